// The K formats of GGUF, and 16-bit floats.
#include "gemv.cuh"
GEMV(k4)
GEMV(k5)
GEMV(k6)
GEMV_FLOAT(h16)
GEMV_FLOAT(b16)
