// The op-test matrix: one row per case. A case has inputs, a run on a rig, and an oracle.
#ifndef MX_TESTS_OP_CASES_H
#define MX_TESTS_OP_CASES_H

#include "support/op_rig.h"

enum { OP_FORMATS = 14, OP_SCALAR_ONLY_SMALL = 1 };
extern const mx_wfmt op_formats[OP_FORMATS];

// What a case is about; meaning of n, k, a, b by op:
//   rms_norm     k columns, a = columns normalised together
//   products     n outputs, k inputs, f format, f2 format of the last weight, a = bias or act
//   embed        n entries, k columns, f
//   glu          k columns, a = act          softcap, add, norm_add, copy, gather: k columns
//   rope_table   n = n_rot                   rope: n = n_rot, k = head_dim, a = heads, b =
//   interleaved sample       n vocabulary
typedef struct op_case {
    mx_op_kind op;
    int rows, n, k, a, b;
    mx_wfmt f, f2;
} op_case;

// Inputs of a case, made from a seed.
typedef struct op_data {
    float *x[3]; // (rows, k): activations
    float *w;    // norm weight or frequencies
    float *bias[3];
    rig_matrix m[3];
    int n_m;
} op_data;

op_data op_case_inputs(const op_case *c, uint64_t seed);
void op_case_free(op_data *d);
int64_t op_case_outputs(const op_case *c); // floats
void op_case_run(rig *r, const op_case *c, const op_data *d, float *out);
void op_case_oracle(const op_case *c, const op_data *d, double *out);
// Greatest |out - oracle| that is right; exact: float32 activations.
double op_case_tolerance(const op_case *c, bool exact);
char *op_case_name(const op_case *c, char *buf, size_t cap);

// Calls fn on every case of the matrix.
void op_cases_each(void (*fn)(const op_case *c, void *arg), void *arg);

// ---- Attention: whole schedules ---------------------------------------------------------------
typedef struct attn_case {
    int n_head, n_kv, head_dim, window, group;
    float softcap;
    mx_dtype type;
    bool norms; // q and k norms in ROPE_KV
    int n_seqs, len[RIG_MAX_RANGE];
} attn_case;

typedef struct attn_data {
    float *q, *k, *v; // (sequence, position, heads * head_dim), RIG_MAX_CTX positions each
    float *qn, *kn, *freq;
} attn_data;

// How the positions of the sequences are cut into steps.
typedef enum attn_schedule {
    ATTN_WHOLE,    // each sequence in as few steps as rows allow
    ATTN_CHUNKS,   // chunks of 37 rows
    ATTN_TOGETHER, // all sequences in one step, uneven chunks
    ATTN_DECODE,   // whole but the last 8 positions one by one
    ATTN_BATCH,    // as DECODE, all sequences together
    ATTN_SCHEDULES
} attn_schedule;

attn_data attn_case_inputs(const attn_case *c, uint64_t seed);
void attn_case_free(attn_data *d);
int64_t attn_case_outputs(const attn_case *c);
// out (sequence, position of len, n_head * head_dim). group overrides c->group.
void attn_case_run(rig *r, const attn_case *c, const attn_data *d, attn_schedule s, int group,
                   float *out);
void attn_case_oracle(const attn_case *c, const attn_data *d, double *out);

#endif
