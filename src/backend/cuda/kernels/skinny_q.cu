// Products of batches, quantised formats with 16-bit scales.
#include "skinny.cuh"
SKINNY(a4g32)
SKINNY(a4g64)
SKINNY(a4g128)
SKINNY(a8g32)
SKINNY(a8g64)
SKINNY(a8g128)
SKINNY(s4)
SKINNY(s8)
