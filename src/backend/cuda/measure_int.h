// The entries of the backend that only measurements use (measure.c).
#ifndef MX_CUDA_MEASURE_INT_H
#define MX_CUDA_MEASURE_INT_H

#include "backend/backend.h"

void cuda_wait_buffers(mx_backend *b, bool on);
mx_status cuda_read_rate(mx_backend *b, double *bytes_per_s, mx_err *err);

#endif
