// What the parts of `mlxcel profile` share: a device with step blocks, arms that run the same step
// in different ways, and the statistics of their times.
#ifndef MX_CLI_PROFILE_H
#define MX_CLI_PROFILE_H

#include "backend/encoder.h"
#include "cli/cli.h"
#include "model/model.h"

// ---- profile_stat.c ----

typedef struct prof_series {
    double *v;
    size_t n;
} prof_series;

void prof_push(prof_series *s, double v);
double prof_quantile(const prof_series *s, double q); // 0 when empty
// Least-squares slope of y over x; 0 when all x are equal.
double prof_slope(const double *x, const double *y, size_t n);
// Of a[i] - b[i]: the median, and the greatest distance of the two quartiles from the median. Runs
// of one round are compared with each other, so that what drifts does not count.
typedef struct prof_diff {
    double median, spread;
} prof_diff;
prof_diff prof_paired(const prof_series *a, const prof_series *b);
// Of arms that do the same: the median of their medians, and the greatest difference of two.
prof_diff prof_null(const double *medians, size_t n);
// A random order of 0 … n - 1, another one for every round.
void prof_order(size_t *order, size_t n, uint32_t round);

// ---- profile_rig.c ----

typedef struct prof_rig {
    mx_backend *b;
    mx_backend_facts facts;
    mx_weights weights;
    bool weights_open;
    mx_model *model; // NULL: the step is made by hand
    mx_kv *kv;       // NULL: no state
    int32_t *seqs;   // (n_seqs) open sequences
    int32_t n_seqs, max_rows, ctx;
    mx_step_caps caps;
    mx_step_io io[MX_STEP_SLOTS];
    mx_step_range *ranges; // of the present placement
    int32_t slot;
    double read_bytes_s; // 0: not measured
} prof_rig;

// Opens the device of o. Close after an error too.
mx_status prof_rig_open(prof_rig *r, const cli_options *o, mx_err *err);
void prof_rig_close(prof_rig *r);
mx_status prof_rig_load(prof_rig *r, const char *path, mx_err *err);
// Sequence memory by spec (NULL: none) and step blocks for steps of max_rows rows, n_seqs
// sequences; n_vocab columns of logits.
mx_status prof_rig_steps(prof_rig *r, const mx_kv_spec *spec, int32_t n_seqs, int32_t max_rows,
                         int32_t n_vocab, mx_err *err);
// Spec of the rig's model by o: KV type and storage, contexts of ctx.
mx_status prof_rig_kv_spec(const prof_rig *r, const cli_options *o, int32_t ctx, int32_t n_seqs,
                           mx_kv_spec *spec, mx_err *err);
// Every sequence gets depth positions whose state stays zero (times do not depend on values).
mx_status prof_rig_skip(prof_rig *r, int32_t depth, mx_err *err);
// Puts one step into both slots: the first n_seqs sequences add n_tok rows each behind what they
// hold. n_out: outputs, the last row of each sequence, or 0. Fills facts.
mx_status prof_rig_place(prof_rig *r, int32_t n_seqs, int32_t n_tok, bool out, mx_phase phase,
                         mx_step_facts *facts, mx_err *err);
// The positions of the present placement count as held.
void prof_rig_commit(prof_rig *r, const mx_step_facts *facts);
void prof_rig_rewind(prof_rig *r); // empty sequences
mx_status prof_rig_read_rate(prof_rig *r, uint64_t n_bytes, mx_err *err);

// The budgets that the environment asks for, as the engine chooses them.
void prof_budgets(const prof_rig *r, mx_budget out[MX_PHASES]);
// One budget for every phase; 0: unlimited.
void prof_budgets_of(int32_t ops, int32_t mb, mx_budget out[MX_PHASES]);

// Appends the ops of a step to e.
typedef mx_status (*prof_record)(prof_rig *r, void *arg, mx_enc *e, mx_err *err);

// An arm that was recorded must stay where it is: its encoder reads its facts.
typedef struct prof_arm {
    char name[64];
    mx_enc *enc;
    bool shared; // enc belongs to another arm
    mx_budget budgets[MX_PHASES];
    mx_plan *plan;
    mx_step_facts facts;
    bool wait;      // the host waits after every command buffer
    prof_series ms; // of a step, one value a round
    uint64_t hash;  // of logits and tokens
} prof_arm;

void prof_arm_open(prof_rig *r, prof_arm *a, const mx_budget budgets[MX_PHASES], bool fuse);
// An arm in the encoder of another one, which is closed after it or with it: temporaries and
// everything else have the same addresses. Their steps have the same facts, and each records a list
// of its own (mx_enc_label tells equal ones apart).
void prof_arm_join(prof_arm *a, const prof_arm *first, const mx_budget budgets[MX_PHASES]);
void prof_arm_close(prof_arm *a);
// Records the arm's step for these facts.
mx_status prof_arm_record(prof_rig *r, prof_arm *a, const mx_step_facts *facts, prof_record record,
                          void *arg, mx_err *err);
// One step, waited for; its device seconds (may be NULL).
mx_status prof_arm_step(prof_rig *r, prof_arm *a, bool logits, double *seconds, mx_err *err);
// Hash of one step's results into a->hash (mixed with what is there).
mx_status prof_arm_hash(prof_rig *r, prof_arm *a, mx_err *err);
// rounds times: every arm runs a step that is not timed and n_steps that are, with two in flight
// unless it waits; every round has an order of its own. Stops early, without error, when a signal
// came.
mx_status prof_interleave(prof_rig *r, prof_arm *arms, size_t n, int32_t rounds, int32_t n_steps,
                          mx_err *err);
// Steps that take about 20 ms on this arm, from 1 to 1000.
mx_status prof_choose_steps(prof_rig *r, prof_arm *a, int32_t *n, mx_err *err);

// Results are JSON; the table is printed from the same object. Owns j. Returns an exit code.
int prof_print_json(json_t *j);
json_t *prof_hash_json(uint64_t h);
json_t *prof_slow_json(const mx_plan *p);           // {"name": times} of one run of the plan
void prof_slow_text(const mx_plan *p, mx_buf *out); // the same, a line
json_t *prof_head_json(const prof_rig *r, const char *what); // version, device, threads, read rate

// ---- what is measured: exit codes ----

int prof_segments(const cli_options *o); // profile_seg.c
int prof_chain(const cli_options *o);    // profile_chain.c
int prof_launch(const cli_options *o);   // profile_launch.c

// ---- profile_repeat.c: a recorded step with parts of it repeated ----

typedef enum prof_part {
    PROF_ATTENTION,
    PROF_MLP,
    PROF_MOE,
    PROF_HEAD,
    PROF_SAMPLE,
    PROF_EMBED, // embedding and rotation tables
    PROF_NORM,  // every norm as an op of its own
    PROF_PARTS
} prof_part;
const char *prof_part_name(prof_part p);

// A copy of a recorded list that can be appended to another recording.
typedef struct prof_list {
    mx_op *ops;
    int32_t n_ops;
    mx_tensor *tensors;
    int32_t n_tensors;
} prof_list;
void prof_list_copy(prof_list *l, const mx_plan *plan);
void prof_list_free(prof_list *l);

typedef struct prof_repeat {
    const prof_list *list;
    prof_part part;
    int32_t kind;    // >= 0: only ops of this kind, one by one
    int32_t k, of;   // repeats of every run; the greatest k of the experiment
    bool live;       // the step goes on from the last repeat: a deeper model
    int32_t n_runs;  // out: runs of the part
    int32_t n_extra; // out: runs that were added
} prof_repeat;
// Appends the list with every run of the part followed by k runs of sibling layers, each working on
// the output of the one before. What they compute is used by nothing else.
mx_status prof_repeat_record(prof_rig *r, void *repeat, mx_enc *e, mx_err *err);

typedef struct prof_cost {
    int32_t n_ops, n_buffers; // buffers that hold one of its ops
    double read_bytes, write_bytes, flops;
} prof_cost;
prof_cost prof_part_cost(const mx_plan *plan, prof_part part, int32_t kind,
                         const mx_step_facts *facts);

#endif
