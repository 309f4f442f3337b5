// The recorder: ops are appended, checked, costed and cut into command buffers; the end of a
// recording lays out the temporaries and gives a plan, or the cached plan of an equal recording.
#ifndef MX_BACKEND_ENCODER_H
#define MX_BACKEND_ENCODER_H

#include "backend/budget.h"

typedef struct mx_enc mx_enc;

typedef struct mx_enc_stats { // since open
    uint64_t plans_made, plan_hits, plan_evictions;
    uint64_t commits[MX_COMMIT_REASONS];
    uint64_t steps[MX_PHASES], buffers[MX_PHASES], ops[MX_PHASES];
    uint64_t slow[MX_SLOW_COUNT]; // of what was submitted
    size_t arena_bytes, arena_peak_bytes;
} mx_enc_stats;

// plan_cap: plans kept (LRU; MLX_CUDA_GRAPH_CACHE_SIZE), at least 1. fuse false runs every fused op
// as its expansion.
mx_enc *mx_enc_open(mx_backend *b, const mx_budget budgets[MX_PHASES], int32_t plan_cap, bool fuse);
void mx_enc_close(mx_enc *e);
void mx_enc_set_budgets(mx_enc *e, const mx_budget budgets[MX_PHASES]); // also drops the plans
// The same for what is recorded from now on; plans stay.
void mx_enc_next_budgets(mx_enc *e, const mx_budget budgets[MX_PHASES]);
void mx_enc_get_stats(const mx_enc *e, mx_enc_stats *out);

// Begins recording a step. facts must stay valid until mx_enc_end.
void mx_enc_begin(mx_enc *e, const mx_step_facts *facts);
// Label for the ops that follow.
void mx_enc_label(mx_enc *e, int16_t layer, mx_role role);
// A float32 temporary (rows, cols).
mx_tid mx_enc_temp(mx_enc *e, int64_t rows, int64_t cols);
// A weight, state or logits tensor; the same pointer within one recording gives the same id.
// NULL gives MX_NONE.
mx_tid mx_enc_use(mx_enc *e, const mx_tensor *t);
const mx_tensor *mx_enc_tensor(const mx_enc *e, mx_tid id);
const mx_step_facts *mx_enc_facts(const mx_enc *e);
// Appends an op (layer and role are filled in). Errors are sticky: after the first, later calls do
// nothing; mx_enc_end reports it.
void mx_enc_op(mx_enc *e, mx_op op);
// Ends the recording. *plan belongs to the encoder (valid until evicted: at least until the next
// mx_enc_begin).
mx_status mx_enc_end(mx_enc *e, mx_plan **plan, mx_err *err);

// Runs a plan: submit with the encoder's arena.
mx_status mx_enc_submit(mx_enc *e, mx_plan *plan, int32_t slot, mx_ticket *t, mx_err *err);

// Appends the declared expansion of a fused op (expand.c).
void mx_op_expand(mx_enc *e, const mx_op *op);

#endif
