// The choice of a backend. Stateless.
#include "engine/device.h"

#include "backend/cpu/cpu.h"
#include "base/knobs.h"
#if __has_include("backend/cuda/cuda.h")
#include "backend/cuda/cuda.h"
#define HAVE_CUDA_MODULE 1
#endif

#include <string.h>

static mx_status open_cuda(const mx_device_options *o, mx_backend **out, mx_err *err) {
#ifdef HAVE_CUDA_MODULE
    return mx_cuda_open_with(&(mx_cuda_options){.deterministic = o->deterministic}, out, err);
#else
    (void)o;
    *out = NULL;
    return mx_err_set(err, MX_NOTFOUND, "this build has no CUDA backend");
#endif
}

mx_status mx_device_open(const mx_device_options *o, mx_backend **out, mx_err *err) {
    const char *want = o->want;
    *out = NULL;
    if (!want || !want[0]) want = mx_knob_text(MX_KNOB_DEVICE);
    bool gpu = strcmp(want, "cuda") == 0 || strcmp(want, "gpu") == 0;
    if (want[0] && !gpu && strcmp(want, "cpu") != 0) {
        return mx_err_set(err, MX_INVALID, "device '%s': expected cpu, cuda or gpu", want);
    }
    if (gpu) {
        mx_status st = open_cuda(o, out, err);
        if (st != MX_OK) mx_err_prefix(err, "device %s", want);
        return st;
    }
    if (!want[0]) {
        mx_err why = {0};
        if (open_cuda(o, out, &why) == MX_OK) return MX_OK;
        mx_log(MX_LOG_INFO, "no GPU: %s; using the CPU", why.msg);
    }
    return mx_cpu_open(o->n_threads, out, err);
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
