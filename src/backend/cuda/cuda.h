// The CUDA backend: libcuda.so.1 is opened at run time, the kernels are in the binary.
#ifndef MX_BACKEND_CUDA_CUDA_H
#define MX_BACKEND_CUDA_CUDA_H

#include "backend/backend.h"

// Opens device number `device` (0..). NOTFOUND with one line: no driver or no such device.
// UNSUPPORTED: the driver is older than this build needs, the device has no code in this binary,
// or the program was built without CUDA.
mx_status mx_cuda_open(int device, mx_backend **out, mx_err *err);

typedef struct mx_cuda_options {
    int device;
    bool deterministic; // else MLXCEL_DETERMINISTIC decides
    bool exact;         // else MLXCEL_EXACT decides
} mx_cuda_options;
mx_status mx_cuda_open_with(const mx_cuda_options *o, mx_backend **out, mx_err *err);

// Devices the driver offers; 0 without a driver, or when built without CUDA.
int mx_cuda_device_count(void);

// Architectures compiled in, "sm_80 sm_90a … compute_80"; "" when built without CUDA.
const char *mx_cuda_archs(void);

// Names of the kernels that no plan and no upload has needed since open; returns how many there
// are. For tests of everything.
int32_t mx_cuda_unused_kernels(mx_backend *b, const char **names, int32_t cap);

typedef struct mx_cuda_counters { // since open
    uint64_t graphs_made, graph_launches, kernel_launches, boundaries;
    uint64_t uploads, upload_bytes;
    // of the ring: its readers' time in sum, reading and waiting for transfers; making it
    double upload_read_s, upload_wait_s, ring_open_s;
    double upload_alloc_s, upload_total_s; // of the loading thread: device memory; in all
    bool pinned;                           // uploads go through the pinned ring
    bool blaslt;                           // cuBLASLt was found
} mx_cuda_counters;
// Plans from now on use n multiprocessors; 0: all. For tests of how work is divided.
void mx_cuda_limit_sms(mx_backend *b, int32_t n);
void mx_cuda_counters_get(mx_backend *b, mx_cuda_counters *out);

#endif
