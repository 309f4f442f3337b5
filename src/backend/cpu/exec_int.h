// Inside the CPU backend: its state, and how a plan is walked.
#ifndef MX_BACKEND_CPU_EXEC_INT_H
#define MX_BACKEND_CPU_EXEC_INT_H

#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_int.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/pool.h"

#include <stdatomic.h>

enum { CPU_LINE = 64, CPU_MAX_HEAD_DIM = 512 };
enum { CPU_VOCAB_CHUNK = 4096 }; // logits summed together by SAMPLE

typedef struct cpu_backend {
    mx_backend base;
    const cpu_kernels *k;
    bool exact;
    cpu_pool *pool;
    cpu_shed shed;
    uint64_t n_shed_steps; // steps that ran on fewer threads
    mx_step_caps caps;
    mx_step_io io[MX_STEP_SLOTS];
    void *slot_mem[MX_STEP_SLOTS];
    size_t slot_bytes;
    int32_t last_slot; // of the step before
    uint64_t serial;
    mx_run_stats stats[MX_STEP_SLOTS];
    // Scratch, grown by plan_make only. Shared halves are used in turns, so that an op rarely waits
    // for workers that are still in the one before.
    uint8_t *priv, *shared[2];
    size_t priv_bytes, shared_bytes; // of one worker; of one half
    _Atomic int64_t *claims;         // one per op, zeroed before a run
    int32_t n_claims;
} cpu_backend;

// One walk of a plan; the same for all workers.
typedef struct cpu_run {
    cpu_backend *b;
    const mx_plan *plan;
    const mx_step_io *io;
    const int32_t *prev_id; // out_id of the step before, or NULL
    uint8_t *arena;
} cpu_run;

// One worker's view.
typedef struct cpu_ctx {
    const cpu_run *run;
    const cpu_kernels *k;
    const mx_op *op;
    int op_index, worker, n;
    int half;            // shared half taken last
    uint32_t n_barriers; // passed so far
    uint32_t used[2];    // n_barriers at the end of the op that used a half last, + 1; 0: none did
    bool took;           // the present op took a half
    uint8_t *priv;       // this worker's scratch
} cpu_ctx;

typedef struct cpu_scratch {
    size_t priv, shared;
} cpu_scratch;

// Options of a backend; for tests. isa < 0: the best; exact < 0: by the knob.
typedef struct cpu_options {
    int n_threads, isa, exact;
} cpu_options;
mx_status cpu_open_with(const cpu_options *o, mx_backend **out, mx_err *err);

// exec.c ----------------------------------------------------------------------------------------
const mx_tensor *cpu_tensor(const cpu_ctx *c, mx_tid id);
// Address of a tensor's first element.
void *cpu_ptr(const cpu_ctx *c, const mx_tensor *t);
static inline float *cpu_row(const cpu_ctx *c, const mx_tensor *t, int64_t row) {
    return (float *)cpu_ptr(c, t) + row * t->ld;
}
void cpu_slice(const cpu_ctx *c, int64_t n, int64_t *lo, int64_t *hi); // this worker's part of n
int64_t cpu_claim(const cpu_ctx *c); // next unclaimed unit of this op: 0, 1, 2, …
// Waits for all workers.
static inline void cpu_barrier(cpu_ctx *c) {
    cpu_pool_barrier(c->run->b->pool, c->worker);
    c->n_barriers++;
}
// Shared scratch for the present op; no other worker still uses it for an earlier one. At most once
// an op.
uint8_t *cpu_take_shared(cpu_ctx *c);
static inline size_t cpu_align(size_t n) {
    return (n + CPU_LINE - 1) / CPU_LINE * CPU_LINE;
}
// Row `row` of a weight as floats.
void cpu_weight_row(const cpu_ctx *c, const mx_tensor *w, int64_t row, float *out);
mx_wview cpu_weight_view(const mx_tensor *w); // of a weight in MX_LAYOUT_ROWS
// Most scratch that the op needs for n_rows rows.
cpu_scratch cpu_op_scratch(const cpu_backend *b, const mx_op *op, const mx_tensor *tensors);
// Walks the plan: the pool's job; arg is a cpu_run.
void cpu_walk(void *arg, int worker, int n);

// exec_mul.c: MATMUL and its fused forms. exec_attn.c: ATTN, KV_WRITE, ROPE_KV ---------------
void cpu_op_product(cpu_ctx *c);
cpu_scratch cpu_product_scratch(const cpu_backend *b, const mx_op *op, const mx_tensor *tensors);
void cpu_op_attn(cpu_ctx *c);
cpu_scratch cpu_attn_scratch(const cpu_backend *b, const mx_op *op, const mx_tensor *tensors);
void cpu_op_kv_write(cpu_ctx *c);
void cpu_op_rope_kv(cpu_ctx *c);

#endif
