// The K formats of GGUF, and 16-bit floats.
#include "gemv.cuh"
GEMV(k4)
GEMV(k5)
GEMV(k6)
GEMV(h16)
GEMV(b16)
