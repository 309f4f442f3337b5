// Many-token products of the quantised formats with 16-bit scales.
#include "gemm.cuh"
GEMM(a4g32)
GEMM(a4g64)
GEMM(a4g128)
GEMM(s4)
GEMM(a8g32)
GEMM(a8g64)
GEMM(a8g128)
GEMM(s8)
