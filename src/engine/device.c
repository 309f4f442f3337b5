// The choice of a backend. Stateless.
#include "engine/device.h"

#include "backend/cpu/cpu.h"
#include "base/knobs.h"
#if __has_include("backend/cuda/cuda.h")
#include "backend/cuda/cuda.h"
#define HAVE_CUDA_MODULE 1
#endif

#include <stdatomic.h>
#include <string.h>

static mx_status open_cuda(const mx_device_options *o, int gpu, mx_backend **out, mx_err *err) {
#ifdef HAVE_CUDA_MODULE
    mx_cuda_options c = {.device = gpu, .deterministic = o->deterministic, .exact = o->exact};
    return mx_cuda_open_with(&c, out, err);
#else
    (void)o, (void)gpu;
    *out = NULL;
    return mx_err_set(err, MX_NOTFOUND, "this build has no CUDA backend");
#endif
}

bool mx_device_compiled_for_cuda(void) {
#ifdef HAVE_CUDA_MODULE
    return mx_cuda_archs()[0] != 0;
#else
    return false;
#endif
}

// The number of "cuda:N"; 0 for "cuda" and "gpu".
static mx_status gpu_number(const char *want, int *out, mx_err *err) {
    int64_t n = 0;
    bool plain = strcmp(want, "cuda") == 0 || strcmp(want, "gpu") == 0;
    bool numbered =
        strncmp(want, "cuda:", 5) == 0 && mx_parse_i64(want + 5, &n) && n >= 0 && n <= INT32_MAX;
    if (!plain && !numbered) {
        return mx_err_set(err, MX_INVALID, "device '%s': expected cuda:N, N the number of a GPU",
                          want);
    }
    *out = (int)n;
    return MX_OK;
}

bool mx_device_is_word(const char *want) {
    int gpu;
    mx_err err = {0};
    return !want[0] || strcmp(want, "cpu") == 0 || gpu_number(want, &gpu, &err) == MX_OK;
}

// The CPU runs and nobody asked for it.
static void say_declined(const mx_device_options *o, const mx_err *why) {
    static atomic_bool said;
    bool there = why->status != MX_NOTFOUND && mx_device_compiled_for_cuda();
    if (there && o->declined) *o->declined = *why;
    if (there && atomic_exchange(&said, true)) return;
    mx_log(there ? MX_LOG_WARN : MX_LOG_INFO, "no GPU: %s; using the CPU", why->msg);
}

mx_status mx_device_open(const mx_device_options *o, mx_backend **out, mx_err *err) {
    const char *want = o->want;
    *out = NULL;
    if (!want || !want[0]) want = mx_knob_text(MX_KNOB_DEVICE);
    int gpu = 0;
    bool cuda = strncmp(want, "cuda", 4) == 0 || strcmp(want, "gpu") == 0;
    if (want[0] && !cuda && strcmp(want, "cpu") != 0) {
        return mx_err_set(err, MX_INVALID, "device '%s': expected cpu, cuda, cuda:N or gpu", want);
    }
    if (cuda) {
        MX_TRY(gpu_number(want, &gpu, err));
        mx_status st = open_cuda(o, gpu, out, err);
        if (st != MX_OK) mx_err_prefix(err, "device %s", want);
        return st;
    }
    if (!want[0]) {
        mx_err why = {0};
        if (open_cuda(o, 0, out, &why) == MX_OK) return MX_OK;
        say_declined(o, &why);
    }
    mx_cpu_options c = {.n_threads = o->n_threads, .exact = o->exact};
    return mx_cpu_open_with(&c, out, err);
}

int32_t mx_device_gpus(const char *want) {
    if (!want || !want[0]) want = mx_knob_text(MX_KNOB_DEVICE);
    if (strcmp(want, "cpu") == 0) return -1;
#ifdef HAVE_CUDA_MODULE
    return mx_cuda_device_count();
#else
    return 0;
#endif
}
