// Products of batches, the other formats.
#include "skinny.cuh"
SKINNY(s5)
SKINNY(a5)
SKINNY(k4)
SKINNY(k5)
SKINNY(k6)
SKINNY(h16)
SKINNY(b16)
