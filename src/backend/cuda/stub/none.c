// Stands in for the CUDA backend in a build without nvcc. Says so; does nothing else.
#include "backend/cuda/cuda.h"

#include <string.h>

mx_status mx_cuda_open(int device, mx_backend **out, mx_err *err) {
    (void)device;
    *out = NULL;
    return mx_err_set(err, MX_UNSUPPORTED, "this program was built without CUDA (docs/cuda.md)");
}

mx_status mx_cuda_open_with(const mx_cuda_options *o, mx_backend **out, mx_err *err) {
    return mx_cuda_open(o->device, out, err);
}

int mx_cuda_device_count(void) {
    return 0;
}

const char *mx_cuda_archs(void) {
    return "";
}

int32_t mx_cuda_unused_kernels(mx_backend *b, const char **names, int32_t cap) {
    (void)b, (void)names, (void)cap;
    return 0;
}

void mx_cuda_limit_sms(mx_backend *b, int32_t n) {
    (void)b, (void)n;
}

void mx_cuda_counters_get(mx_backend *b, mx_cuda_counters *out) {
    (void)b;
    memset(out, 0, sizeof(*out));
}
