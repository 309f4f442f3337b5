// The CPU backend: always there.
#ifndef MX_BACKEND_CPU_CPU_H
#define MX_BACKEND_CPU_CPU_H

#include "backend/backend.h"

// Opens the backend with n_threads workers (the caller's thread is one of them); 0 takes
// MLXCEL_THREADS, and when that is 0 too mx_cpu_default_threads(). The instruction set is the best
// that processor and operating system grant, or the lower one that MLXCEL_CPU_ISA names; a name
// that is unknown or not granted is INVALID. MLXCEL_EXACT asks for float-exact products.
// Results do not depend on the number of threads.
mx_status mx_cpu_open(int n_threads, mx_backend **out, mx_err *err);

typedef struct mx_cpu_options {
    int n_threads;
    bool exact; // else MLXCEL_EXACT decides
} mx_cpu_options;
mx_status mx_cpu_open_with(const mx_cpu_options *o, mx_backend **out, mx_err *err);

#endif
