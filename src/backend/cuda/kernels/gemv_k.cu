// The K formats of GGUF.
#include "gemv.cuh"
GEMV(k4)
GEMV(k5)
GEMV(k6)
