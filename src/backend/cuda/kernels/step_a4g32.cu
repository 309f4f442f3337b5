// Steps over a4g32 weights.
#include "step.cuh"

STEPS(a4g32)
