// 5- and 8-bit formats of GGUF.
#include "gemv.cuh"
GEMV(s8)
GEMV(s5)
GEMV(a5)
