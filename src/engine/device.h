// Which backend runs: from a device's name.
#ifndef MX_ENGINE_DEVICE_H
#define MX_ENGINE_DEVICE_H

#include "backend/backend.h"

typedef struct mx_device_options {
    const char *want;   // "cpu", "cuda", "gpu" (= cuda), "cuda:N"; "" or NULL: MLXCEL_DEVICE, else
                        // cuda when there is one, else the CPU (said at info level;
                        // a warning where a GPU or its driver is there and cannot be used)
    int32_t n_threads;  // 0: the default; CPU only
    bool deterministic; // else MLXCEL_DETERMINISTIC decides; the CPU always is
    bool exact;         // else MLXCEL_EXACT decides
    mx_err *declined;   // NULL, or: why a GPU that nobody asked for and is there is not used
} mx_device_options;

// Errors: INVALID (another word), and, for a device that was asked for and cannot be had, why.
// Close with ops->close.
mx_status mx_device_open(const mx_device_options *o, mx_backend **out, mx_err *err);
// Is it a word for a device? "" is.
bool mx_device_is_word(const char *want);
// GPUs that the driver offers; -1 when `want` (as above) is the CPU: then nobody asks the driver.
int32_t mx_device_gpus(const char *want);
// Was there an nvcc when the program was built?
bool mx_device_compiled_for_cuda(void);

#endif
