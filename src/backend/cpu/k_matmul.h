// Between the files of the matrix products of one instruction set.
#ifndef MX_BACKEND_CPU_K_MATMUL_H
#define MX_BACKEND_CPU_K_MATMUL_H

#include "backend/cpu/pack.h"

enum { MM_MAX_STREAMS = 4, MM_MAX_TOK = 8 };

// One call of a core: up to 4 tiles by up to 8 rows of activations that lie in one act block.
typedef struct mm_job {
    const uint8_t *tile[MM_MAX_STREAMS]; // every stream is read: repeat a tile to fill up
    const uint8_t *act;     // codes of the first row in the first record; float cores: floats
    const uint8_t *numbers; // d of the first row in the first record; float cores: unused
    size_t act_step;        // bytes of a record; float cores: between rows
    int64_t n_groups;
    cpu_packing p;
    float *out; // (streams, rows, 16)
} mm_job;

typedef void mm_core_fn(const mm_job *j);
typedef struct mm_core {
    mm_core_fn *fn;
    int streams, rows;
} mm_core;

// The core for n_tok rows at once: the least `rows` >= n_tok, or the largest there is.
mm_core CPU_FN(core_int)(const cpu_packing *p, int64_t n_tok);
mm_core CPU_BASE(core_float)(const cpu_packing *p, int64_t n_tok);

// Float products of a coded format: one tile by rows [tok0, tok1) of activations, at most
// MM_EXACT_TOK of them; out (rows, 16).
enum { MM_EXACT_TOK = 64 };
void CPU_BASE(exact_tile)(const cpu_packing *p, const uint8_t *tile, int64_t n_cols, const float *x,
                          int64_t ldx, int n_tok, float *out);

#endif
