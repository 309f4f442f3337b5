// Rigs on the first GPU, for tests that skip where there is none.
#ifndef MX_TESTS_CUDA_RIG_H
#define MX_TESTS_CUDA_RIG_H

#include "backend/cuda/cuda.h"
#include "support/op_rig.h"

// Opens n rigs, each with a backend of its own: the first runs fused ops, the others their parts
// when `expand`. False, after a line that says why: there is no GPU.
bool cuda_rigs_open(rig *rigs, int n, bool expand, bool deterministic, int32_t n_vocab);

#endif
