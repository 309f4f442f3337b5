// Which backend runs: from a device's name.
#ifndef MX_ENGINE_DEVICE_H
#define MX_ENGINE_DEVICE_H

#include "backend/backend.h"

// want: "cpu", "cuda", "gpu" (= cuda); "" or NULL: MLXCEL_DEVICE, else cuda when there is one, else
// the CPU (said at info level). n_threads 0: the default; CPU only. Errors: INVALID (another word),
// and, for a device that was asked for and cannot be had, why. Close with ops->close.
mx_status mx_device_open(const char *want, int32_t n_threads, mx_backend **out, mx_err *err);

#endif
