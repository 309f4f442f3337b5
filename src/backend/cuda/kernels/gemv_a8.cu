// 8-bit codes with 16-bit scales.
#include "gemv.cuh"
GEMV(a8g32)
GEMV(a8g64)
GEMV(a8g128)
