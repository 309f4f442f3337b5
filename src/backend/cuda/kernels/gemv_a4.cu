// 4-bit codes with 16-bit scales.
#include "gemv.cuh"
GEMV(a4g32)
GEMV(a4g64)
GEMV(a4g128)
GEMV(s4)
