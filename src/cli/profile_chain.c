// mlxcel profile --chain N: what a command-buffer boundary costs. A chain of N tiny ops, each of
// which needs the one before, in buffers of several sizes, with and without a host that waits for
// every buffer; the same executor that runs models. All arms share one encoder, so that they work
// at the same addresses. State: one run's.
#include "cli/profile.h"

#include "base/mem.h"

#include <stdio.h>

// VOCAB x WIDTH values that every row of the chain is made of.
enum { WIDTH = 64, VOCAB = WIDTH, UNSPLIT = 5, SIZES = UNSPLIT + 5, HEAD_OPS = 3 };

// Ops in one buffer; 0: all. The first UNSPLIT do the same: null arms.
static const int32_t sizes[SIZES] = {0, 0, 0, 0, 0, 1000, 200, 100, 50, 20};
// An arm is faster than unsplit when its median is by so many times the greatest difference of two
// unsplit medians: of ten arms without a difference one in twenty runs would show one.
enum { BEYOND = 2 };

typedef struct chain {
    const cli_options *o;
    prof_rig rig;
    mx_step_facts facts;
    mx_tensor table;
    prof_arm arms[2 * SIZES]; // without waits, with waits
    size_t n_arms;
    bool same_hashes;
} chain;

// embed, N - 3 adds, and an end that brings the row into the logits and takes the greatest.
static mx_status record_chain(prof_rig *r, void *arg, mx_enc *e, mx_err *err) {
    chain *c = arg;
    (void)r;
    (void)err;
    mx_tensor logits = {.kind = MX_T_LOGITS,
                        .n_rows = 1,
                        .n_cols = WIDTH,
                        .ld = WIDTH,
                        .n_bytes = WIDTH * sizeof(float),
                        .fmt = mx_wfmt_of(MX_F32)};
    mx_enc_label(e, (int16_t)c->n_arms, MX_ROLE_OTHER); // null arms are plans of their own
    mx_tid x = mx_nn_embed(e, &c->table, 1), y = x;
    for (int32_t i = 0; i < c->o->chain - HEAD_OPS; i++) y = mx_nn_add(e, y, x);
    mx_enc_op(e, (mx_op){.kind = MX_OP_SOFTCAP,
                         .n_in = 1,
                         .n_out = 1,
                         .in = {y},
                         .out = {mx_enc_use(e, &logits)},
                         .p.softcap = {1000}});
    mx_nn_sample(e, &logits);
    return MX_OK;
}

static mx_status open_chain(chain *c, mx_err *err) {
    prof_rig *r = &c->rig;
    MX_TRY(prof_rig_open(r, c->o, err));
    float values[VOCAB * WIDTH];
    for (int32_t i = 0; i < VOCAB * WIDTH; i++) {
        values[i] = (float)(mx_hash64(&i, sizeof i, 1) >> 40) * 0x1p-24f - 0.5f;
    }
    mx_wview v = {.fmt = mx_wfmt_of(MX_F32), .n_rows = VOCAB, .n_cols = WIDTH, .data = values};
    mx_status st = r->b->ops->upload(r->b, &c->table, &v, err);
    c->table.kind = MX_T_WEIGHT;
    if (st == MX_OK) st = prof_rig_steps(r, NULL, 1, 1, WIDTH, err);
    if (st == MX_OK) st = prof_rig_place(r, 1, 1, true, MX_PHASE_DECODE, &c->facts, err);
    for (int w = 0; w < 2 && st == MX_OK; w++) {
        for (int i = 0; i < SIZES && st == MX_OK && !cli_interrupted(); i++) {
            prof_arm *a = &c->arms[c->n_arms++];
            mx_budget budgets[MX_PHASES];
            prof_budgets_of(sizes[i], 0, budgets);
            if (sizes[i])
                snprintf(a->name, sizeof a->name, "%d", sizes[i]);
            else
                snprintf(a->name, sizeof a->name, i ? "unsplit (null)" : "unsplit");
            a->wait = w;
            if (a == c->arms)
                prof_arm_open(r, a, budgets, true);
            else
                prof_arm_join(a, c->arms, budgets);
            st = prof_arm_record(r, a, &c->facts, record_chain, c, err);
        }
    }
    return st;
}

static mx_status measure(chain *c, mx_err *err) {
    c->same_hashes = true;
    for (size_t i = 0; i < c->n_arms; i++) {
        MX_TRY(prof_arm_hash(&c->rig, &c->arms[i], err));
        c->same_hashes &= c->arms[i].hash == c->arms[0].hash;
    }
    int32_t n;
    MX_TRY(prof_choose_steps(&c->rig, &c->arms[0], &n, err));
    return prof_interleave(&c->rig, c->arms, c->n_arms, c->o->reps, n, err);
}

// What a row says besides its time.
typedef struct chain_row {
    double ms, boundary_us, spread_us;
    int32_t buffers;
    prof_diff null;      // of the unsplit arms with the same wait
    bool unsplit_slower; // beyond what they show
} chain_row;

static chain_row row_of(const chain *c, size_t i) {
    const prof_arm *a = &c->arms[i], *unsplit = &c->arms[i / SIZES * SIZES];
    double medians[UNSPLIT];
    for (int k = 0; k < UNSPLIT; k++) medians[k] = prof_quantile(&unsplit[k].ms, 0.5);
    chain_row w = {.ms = prof_quantile(&a->ms, 0.5),
                   .buffers = a->plan->n_segs,
                   .null = prof_null(medians, UNSPLIT)};
    int32_t more = w.buffers - unsplit->plan->n_segs;
    if (more > 0) {
        w.boundary_us = (w.ms - w.null.median) * 1e3 / more;
        w.spread_us = w.null.spread * 1e3 / more;
        w.unsplit_slower = w.null.median - w.ms > BEYOND * w.null.spread;
    }
    return w;
}

static json_t *results(const chain *c) {
    json_t *j = prof_head_json(&c->rig, "chain"), *rows = json_array();
    bool never = true;
    for (size_t i = 0; i < c->n_arms; i++) {
        chain_row w = row_of(c, i);
        never &= !w.unsplit_slower;
        json_t *one = json_pack("{s:s, s:b, s:f, s:f, s:i, s:f, s:f, s:o}", "budget",
                                c->arms[i].name, "wait", c->arms[i].wait, "ms", w.ms, "null_ms",
                                w.null.spread, "buffers", w.buffers, "boundary_us", w.boundary_us,
                                "spread_us", w.spread_us, "hash", prof_hash_json(c->arms[i].hash));
        json_array_append_new(rows, one);
    }
    json_object_set_new(j, "ops", json_integer(c->o->chain));
    json_object_set_new(j, "rows", rows);
    json_object_set_new(j, "hashes_equal", json_boolean(c->same_hashes));
    json_object_set_new(j, "unsplit_never_slower", json_boolean(never));
    return j;
}

static void print_table(const chain *c) {
    mx_buf t;
    mx_buf_init(&t, 0);
    mx_buf_printf(&t, "mlxcel %s, chain of %d dependent ops of %d numbers\n%s, %s\n\n",
                  mlxcel_version(), c->o->chain, WIDTH, c->rig.facts.device, c->rig.facts.arch);
    mx_buf_printf(&t, "%-16s %-8s %10s %8s %14s %8s  %s\n", "ops a buffer", "wait", "total ms",
                  "buffers", "us/boundary", "+-", "hash");
    bool never = true;
    for (size_t i = 0; i < c->n_arms; i++) {
        chain_row w = row_of(c, i);
        never &= !w.unsplit_slower;
        mx_buf_printf(&t, "%-16s %-8s %10.4f %8d %14.3f %8.3f  %016llx\n", c->arms[i].name,
                      c->arms[i].wait ? "buffer" : "-", w.ms, w.buffers, w.boundary_us, w.spread_us,
                      (unsigned long long)c->arms[i].hash);
    }
    for (size_t i = 0; i < c->n_arms; i += SIZES) {
        chain_row w = row_of(c, i);
        mx_buf_printf(&t, "\nunsplit%s: %.4f ms, two of %d arms differ by up to %.4f",
                      i ? ", with waits" : "", w.null.median, UNSPLIT, w.null.spread);
    }
    mx_buf_printf(&t, "\nhashes: %s\nunsplit: %s\n", c->same_hashes ? "equal" : "NOT EQUAL",
                  never ? "never slower than an arm beyond what unsplit arms differ by"
                        : "SLOWER than another arm by more than unsplit arms differ");
    cli_out(t.data, t.n);
    mx_buf_free(&t);
}

int prof_chain(const cli_options *o) {
    chain *c = mx_calloc(1, sizeof *c);
    c->o = o;
    mx_err err = {0};
    bool before = cli_signals_defer(true);
    mx_status st = open_chain(c, &err);
    if (st == MX_OK && !cli_interrupted()) st = measure(c, &err);
    cli_signals_defer(before);
    int code = CLI_EXIT_OK;
    if (cli_interrupted())
        code = CLI_EXIT_INTERRUPTED;
    else if (st != MX_OK)
        code = cli_fail(o, CLI_EXIT_RUN, "%s", err.msg);
    else if (strcmp(o->output, "json") == 0)
        prof_print_json(results(c));
    else
        print_table(c);
    if (code == CLI_EXIT_OK && !c->same_hashes) {
        code = cli_fail(o, CLI_EXIT_RUN, "budgets changed the results");
    }
    for (size_t i = 0; i < c->n_arms; i++) prof_arm_close(&c->arms[i]);
    if (c->table.buf) c->rig.b->ops->free(c->rig.b, c->table.buf);
    prof_rig_close(&c->rig);
    mx_free(c);
    return code;
}
