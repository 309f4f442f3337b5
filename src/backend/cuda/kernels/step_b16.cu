// Steps over b16 weights.
#include "step.cuh"

STEPS(b16)
