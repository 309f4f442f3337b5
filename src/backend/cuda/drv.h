// The driver API, resolved at run time. cuda.h maps a name to its newest form by macro; the table
// below keeps name, type and version of a function together, so that what is asked for is what the
// declaration says.
#ifndef MX_BACKEND_CUDA_DRV_H
#define MX_BACKEND_CUDA_DRV_H

#include "base/err.h"

#include <cuda.h>

// X(function, driver version that brought the declared form)
#define CUDA_DRV_LIST(X)                                                                           \
    X(cuInit, 2000)                                                                                \
    X(cuDriverGetVersion, 2020)                                                                    \
    X(cuGetErrorString, 6000)                                                                      \
    X(cuGetErrorName, 6000)                                                                        \
    X(cuDeviceGetCount, 2000)                                                                      \
    X(cuDeviceGet, 2000)                                                                           \
    X(cuDeviceGetName, 2000)                                                                       \
    X(cuDeviceGetAttribute, 2000)                                                                  \
    X(cuDeviceTotalMem, 3020)                                                                      \
    X(cuDevicePrimaryCtxRetain, 7000)                                                              \
    X(cuDevicePrimaryCtxRelease, 11000)                                                            \
    X(cuCtxSetCurrent, 4000)                                                                       \
    X(cuModuleLoadData, 2000)                                                                      \
    X(cuModuleUnload, 2000)                                                                        \
    X(cuModuleGetFunction, 2000)                                                                   \
    X(cuFuncSetAttribute, 9000)                                                                    \
    X(cuMemGetInfo, 3020)                                                                          \
    X(cuMemAlloc, 3020)                                                                            \
    X(cuMemFree, 3020)                                                                             \
    X(cuMemHostAlloc, 2020)                                                                        \
    X(cuMemFreeHost, 2000)                                                                         \
    X(cuMemHostRegister, 6050)                                                                     \
    X(cuMemHostUnregister, 4000)                                                                   \
    X(cuMemcpyHtoDAsync, 3020)                                                                     \
    X(cuMemcpyDtoHAsync, 3020)                                                                     \
    X(cuMemsetD8Async, 3020)                                                                       \
    X(cuStreamCreate, 2000)                                                                        \
    X(cuStreamDestroy, 4000)                                                                       \
    X(cuStreamSynchronize, 2000)                                                                   \
    X(cuStreamWaitEvent, 3020)                                                                     \
    X(cuStreamBeginCapture, 10010)                                                                 \
    X(cuStreamEndCapture, 10000)                                                                   \
    X(cuGraphInstantiateWithFlags, 11040)                                                          \
    X(cuGraphUpload, 11010)                                                                        \
    X(cuGraphLaunch, 10000)                                                                        \
    X(cuGraphExecDestroy, 10000)                                                                   \
    X(cuGraphDestroy, 10000)                                                                       \
    X(cuLaunchKernelEx, 11060)                                                                     \
    X(cuEventCreate, 2000)                                                                         \
    X(cuEventDestroy, 4000)                                                                        \
    X(cuEventRecord, 2000)                                                                         \
    X(cuEventQuery, 2000)                                                                          \
    X(cuEventSynchronize, 2000)                                                                    \
    X(cuEventElapsedTime, 2000)

typedef struct cuda_drv {
#define X(f, version) __typeof__(&f) f;
    CUDA_DRV_LIST(X)
#undef X
    int version; // of the driver: 13000 = CUDA 13.0
} cuda_drv;

// The least driver: code for the toolkit's major version needs a driver of that version.
enum { CUDA_MIN_DRIVER = CUDA_VERSION / 1000 * 1000 };

extern cuda_drv cuda_d; // valid after cuda_drv_open has returned MX_OK

// Opens the driver once for the process. NOTFOUND, UNSUPPORTED (too old) or DEVICE.
mx_status cuda_drv_open(mx_err *err);
// MX_OK, or a message "what: NAME (text)". OUT_OF_MEMORY gives NOMEM, the rest DEVICE.
mx_status cuda_check(CUresult r, mx_err *err, const char *what);
// The same with the name of the driver's function out of the text of a call.
mx_status cuda_check_call(CUresult r, mx_err *err, const char *call);

#define CUDA_TRY(call, err)                                                                        \
    do {                                                                                           \
        CUresult cuda_r_ = (call);                                                                 \
        if (cuda_r_ != CUDA_SUCCESS) return cuda_check_call(cuda_r_, (err), #call);                \
    } while (0)

#endif
