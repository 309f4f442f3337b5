// A rig to run single ops on any CPU configuration: a backend, an encoder, step blocks, and tensors
// that live in buffers, so that inputs are written and outputs read.
#ifndef MX_TESTS_OP_RIG_H
#define MX_TESTS_OP_RIG_H

#include "backend/cpu/exec_int.h"
#include "backend/encoder.h"

enum {
    RIG_GROUPS = 3,
    RIG_MAX_CTX = 1024,
    RIG_MAX_TOK = 192,
    RIG_MAX_RANGE = 4,
    RIG_MAX_EDITS = 1024
};
// Layer groups: pages of 16, pages of 64, one page for everything.
extern const int32_t rig_page_tokens[RIG_GROUPS];

typedef struct rig {
    char name[64]; // "avx2, 2 threads, fused"
    mx_backend *b;
    mx_enc *enc;
    mx_step_io io[MX_STEP_SLOTS];
    mx_step_caps caps;
    mx_step_range ranges[RIG_MAX_RANGE];
    mx_step_facts facts;
    mx_tensor *used[32]; // freed by rig_reset
    int n_used;
    int slot;       // next to submit
    mx_phase phase; // of the steps; DECODE when opened
} rig;

// isa, exact: as cpu_options. n_vocab: of the step block's logits.
void rig_open(rig *r, int isa, int n_threads, bool fuse, bool exact, int32_t n_vocab);
// The same over an open backend, which rig_close closes.
void rig_open_on(rig *r, mx_backend *b, bool fuse, int32_t n_vocab);
void rig_close(rig *r);
// Frees the tensors of the case.
void rig_reset(rig *r);

// Random numbers: a stream of its own for each seed.
typedef struct rng {
    uint64_t state;
} rng;
float rng_normal(rng *g);     // about N(0, 1)
int rng_below(rng *g, int n); // 0 .. n - 1
void rng_fill(rng *g, float *x, int64_t n, float scale);

// A float tensor (rows, cols) with data (NULL: zeros), as input or output of an op.
mx_tensor *rig_tensor(rig *r, int64_t rows, int64_t cols, const float *data);
// Uploads a weight.
mx_tensor *rig_weight(rig *r, const mx_wview *w);
// A state tensor of group g for n_seqs sequences of RIG_MAX_CTX positions.
mx_tensor *rig_state(rig *r, int g, int32_t n_seqs, int32_t n_kv, int32_t head_dim, mx_dtype type);
void rig_read(rig *r, const mx_tensor *t, float *out);

// Begins a step of n_tok rows, n_out outputs: one range per sequence, rows split by n[i] from
// pos0[i]. Fills every step array for all groups; sequence seq[i] owns every n_seqs-th page.
void rig_begin(rig *r, int32_t n_ranges, const int32_t *seq, const int32_t *pos0, const int32_t *n,
               int32_t n_out, int32_t n_seqs);
mx_tid rig_use(rig *r, const mx_tensor *t); // NULL: MX_NONE
// Appends an op; in and out are tensors, n_in as given.
void rig_op(rig *r, mx_op_kind kind, mx_op_params p, int n_in, const mx_tensor *const *in,
            int n_out, const mx_tensor *const *out);
void rig_run(rig *r); // ends, submits, waits; fails the test on an error

// A random weight matrix in checkpoint form; free with mx_free(owner).
typedef struct rig_matrix {
    mx_wview view;
    void *owner;
} rig_matrix;
rig_matrix rig_random_matrix(rng *g, mx_wfmt f, int64_t rows, int64_t cols);

#endif
