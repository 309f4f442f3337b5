// 16-bit floats.
#include "gemv.cuh"
GEMV_FLOAT(h16)
GEMV_FLOAT(b16)
