// Steps over a4g64 weights.
#include "step.cuh"

STEPS(a4g64)
