// What measurements ask of the backend: the read rate of the device's memory, and waits between
// command buffers. State: none of its own.
#include "backend/cuda/measure_int.h"

#include "backend/cuda/cuda_int.h"

#include <stdlib.h>

enum { NOISE_BYTES = 32 << 20, WARM_UP = 3, ROUNDS = 21 };

void cuda_wait_buffers(mx_backend *b, bool on) {
    cuda_of(b)->wait_buffers = on;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

// Bytes that no memory compresses.
static mx_status fill(mx_backend *base, mx_buffer *buf, mx_err *err) {
    uint64_t *noise = mx_alloc(NOISE_BYTES), s = 1;
    for (size_t i = 0; i < NOISE_BYTES / 8; i++) {
        s = s * 6364136223846793005ull + 1442695040888963407ull;
        noise[i] = s ^ s >> 29;
    }
    mx_status st = MX_OK;
    for (size_t at = 0; at < buf->n_bytes && st == MX_OK; at += NOISE_BYTES) {
        st = base->ops->write(base, buf, at, noise, NOISE_BYTES, err);
    }
    mx_free(noise);
    return st;
}

static mx_status time_reads(cuda_backend *b, const mx_buffer *buf, CUevent from, CUevent to,
                            double *seconds, mx_err *err) {
    k_chain a = {.x = buf->device, .y = buf->device, .n = (int64_t)(buf->n_bytes / 16)};
    cuda_item it = {.grid = {(uint32_t)b->n_sm * 64, 1, 1}, .block = 512};
    MX_TRY(cuda_kernel_get(b, CK_read_rate, false, &it.fn, err));
    double t[ROUNDS];
    for (int i = -WARM_UP; i < ROUNDS; i++) {
        float ms = 0;
        CUDA_TRY(cuda_d.cuEventRecord(from, b->stream), err);
        MX_TRY(cuda_run_item(b, &it, (const uint8_t *)&a, false, err));
        CUDA_TRY(cuda_d.cuEventRecord(to, b->stream), err);
        CUDA_TRY(cuda_d.cuEventSynchronize(to), err);
        CUDA_TRY(cuda_d.cuEventElapsedTime(&ms, from, to), err);
        if (i >= 0) t[i] = ms * 1e-3;
    }
    qsort(t, ROUNDS, sizeof *t, by_value);
    *seconds = t[ROUNDS / 2];
    return MX_OK;
}

mx_status cuda_read_rate(mx_backend *base, double *bytes_per_s, mx_err *err) {
    cuda_backend *b = cuda_of(base);
    CUDA_TRY(cuda_use(b), err);
    mx_backend_facts f;
    base->ops->facts(base, &f);
    size_t n = MX_MIN((size_t)4 << 30, (size_t)f.available_bytes / 4) / NOISE_BYTES * NOISE_BYTES;
    if (n == 0) {
        return mx_err_set(err, MX_NOMEM, "read rate: %llu bytes of the GPU are free, %d are needed",
                          (unsigned long long)f.available_bytes, 4 * NOISE_BYTES);
    }
    mx_buffer *buf = NULL;
    CUevent ev[2] = {NULL, NULL};
    double s = 0;
    mx_status st = base->ops->alloc(base, &buf, n, MX_USE_WEIGHT, err);
    if (st == MX_OK) st = fill(base, buf, err);
    for (int i = 0; i < 2 && st == MX_OK; i++) {
        st = cuda_check(cuda_d.cuEventCreate(&ev[i], CU_EVENT_DEFAULT), err, "event");
    }
    if (st == MX_OK) st = time_reads(b, buf, ev[0], ev[1], &s, err);
    for (int i = 0; i < 2; i++) {
        if (ev[i]) cuda_d.cuEventDestroy(ev[i]);
    }
    base->ops->free(base, buf);
    if (st == MX_OK) *bytes_per_s = (double)n / s;
    return st;
}
