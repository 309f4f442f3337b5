// mlxcel profile --launch-heavy: does splitting a step into command buffers cost, and does fusing
// ops? Four budgets, fused ops on and off, at a short and a long context, with prefill time and
// peak memory; on a stack that launches much and computes little, or on a given model. State: one
// run's.
//
// The stack is the synthetic geometry launch-heavy, whose layers have one attention and 15 MLPs: 34
// fused ops in each of 45 layers, every one of which needs the one before.
#include "cli/profile.h"

#include "base/mem.h"
#include "base/os.h"

#include <stdio.h>

enum { BUDGETS = 4, ARMS = 2 * BUDGETS + 1, SHORT = 128, EXTRA_MLPS = 14 };

static const struct {
    int32_t ops, mb; // 0, 0: the defaults
} budgets_of[BUDGETS] = {{0, 0}, {1000, 400}, {100, 1000}, {20, 100}};

typedef struct launch_arm {
    prof_arm arm;
    mx_enc *plain; // records the model's own step, for the stack
    bool fuse;
    prof_series prefill_ms;
    uint64_t prefill_hash;
    double decode_ms;
} launch_arm;

typedef struct launch {
    const cli_options *o;
    const char *path;
    bool stack;
    prof_rig rig;
    int32_t chunk, n_steps;
    launch_arm *now; // whose step is recorded
    int32_t len;     // longest visible context of the step
    launch_arm arms[ARMS];
    prof_arm decode[ARMS]; // views of arms, for interleaving
} launch;

// ---- Recording ---------------------------------------------------------------------------------

static mx_status record_stack(launch *l, prof_rig *r, mx_enc *e, mx_err *err) {
    mx_plan *plan;
    mx_enc_begin(l->now->plain, mx_enc_facts(e));
    MX_TRY(mx_model_record(r->model, l->now->plain, r->kv, l->len, MX_OUTPUT_SAMPLE, err));
    MX_TRY(mx_enc_end(l->now->plain, &plan, err));
    prof_list list;
    prof_list_copy(&list, plan);
    prof_repeat deeper = {.list = &list,
                          .part = PROF_MLP,
                          .kind = -1,
                          .k = EXTRA_MLPS,
                          .of = EXTRA_MLPS,
                          .live = true};
    mx_status st = prof_repeat_record(r, &deeper, e, err);
    prof_list_free(&list);
    return st;
}

static mx_status record_step(prof_rig *r, void *arg, mx_enc *e, mx_err *err) {
    launch *l = arg;
    if (l->stack) return record_stack(l, r, e, err);
    return mx_model_record(r->model, e, r->kv, l->len, MX_OUTPUT_SAMPLE, err);
}

static mx_status place(launch *l, launch_arm *a, int32_t pos0, int32_t n, bool out, mx_phase phase,
                       mx_err *err) {
    mx_step_facts facts;
    MX_TRY(prof_rig_place(&l->rig, 1, n, out, phase, &facts, err));
    l->now = a;
    l->len = pos0 + n;
    return prof_arm_record(&l->rig, &a->arm, &facts, record_step, l, err);
}

// ---- Measuring ---------------------------------------------------------------------------------

static mx_status prefill(launch *l, launch_arm *a, int32_t depth, mx_err *err) {
    double ms = 0;
    prof_rig_rewind(&l->rig);
    for (int32_t at = 0; at < depth && !cli_interrupted();) {
        int32_t n = MX_MIN(l->chunk, depth - at);
        bool last = at + n == depth;
        MX_TRY(place(l, a, at, n, last, MX_PHASE_PREFILL, err));
        double t0 = mx_now_s();
        MX_TRY(prof_arm_step(&l->rig, &a->arm, false, NULL, err));
        ms += (mx_now_s() - t0) * 1e3;
        if (last) { // the same step again: it writes the same state
            a->arm.hash = 0;
            MX_TRY(prof_arm_hash(&l->rig, &a->arm, err));
            a->prefill_hash = a->arm.hash;
        }
        prof_rig_commit(&l->rig, &a->arm.facts);
        at += n;
    }
    prof_push(&a->prefill_ms, ms);
    return MX_OK;
}

static mx_status decode(launch *l, int32_t depth, mx_err *err) {
    for (int i = 0; i < ARMS; i++) {
        launch_arm *a = &l->arms[i];
        MX_TRY(place(l, a, depth, 1, true, MX_PHASE_DECODE, err));
        a->arm.hash = 0;
        MX_TRY(prof_arm_hash(&l->rig, &a->arm, err));
        l->decode[i] = a->arm;
        l->decode[i].ms = (prof_series){0};
    }
    MX_TRY(prof_choose_steps(&l->rig, &l->decode[0], &l->n_steps, err));
    mx_status st = prof_interleave(&l->rig, l->decode, ARMS, l->o->reps, l->n_steps, err);
    for (int i = 0; i < ARMS; i++) {
        l->arms[i].decode_ms = prof_quantile(&l->decode[i].ms, 0.5);
        mx_free(l->arms[i].arm.ms.v);
        l->arms[i].arm.ms = l->decode[i].ms;
    }
    return st;
}

static mx_status measure(launch *l, int32_t depth, mx_err *err) {
    for (int i = 0; i < ARMS; i++) l->arms[i].prefill_ms.n = 0;
    MX_TRY(prefill(l, &l->arms[0], MX_MIN(depth, l->chunk), err)); // warm-up
    l->arms[0].prefill_ms.n = 0;
    int32_t rounds = 1;
    for (int32_t k = 0; k < rounds && !cli_interrupted(); k++) {
        for (int i = 0; i < ARMS; i++) MX_TRY(prefill(l, &l->arms[(i + k) % ARMS], depth, err));
        if (l->arms[0].prefill_ms.v[0] < 2000) rounds = MX_MIN(3, l->o->reps);
    }
    return cli_interrupted() ? MX_OK : decode(l, depth, err);
}

// ---- Results -----------------------------------------------------------------------------------

typedef struct launch_sum {
    bool budgets_equal, peaks_equal; // hashes and peaks, over the budgets of one fused setting
    bool fused_equal;                // hashes, fused on against off
    prof_diff null;
} launch_sum;

static uint64_t peak_of(const launch_arm *a) {
    mx_enc_stats s;
    mx_enc_get_stats(a->arm.enc, &s);
    return s.arena_peak_bytes;
}

static bool same_hashes(const launch_arm *a, const launch_arm *b) {
    return a->arm.hash == b->arm.hash && a->prefill_hash == b->prefill_hash;
}

static launch_sum sum_of(const launch *l) {
    launch_sum s = {.budgets_equal = true, .peaks_equal = true};
    for (int i = 0; i < ARMS; i++) {
        const launch_arm *a = &l->arms[i], *first = &l->arms[a->fuse ? 0 : 2];
        s.budgets_equal &= same_hashes(a, first);
        s.peaks_equal &= peak_of(a) == peak_of(first);
    }
    s.fused_equal = same_hashes(&l->arms[0], &l->arms[2]);
    s.null = prof_paired(&l->arms[1].arm.ms, &l->arms[0].arm.ms);
    return s;
}

static json_t *results(const launch *l, int32_t depth) {
    launch_sum s = sum_of(l);
    json_t *rows = json_array();
    for (int i = 0; i < ARMS; i++) {
        const launch_arm *a = &l->arms[i];
        const mx_plan *p = a->arm.plan;
        json_array_append_new(rows,
                              json_pack("{s:s, s:b, s:f, s:f, s:i, s:i, s:I, s:o, s:o}", "budget",
                                        a->arm.name, "fused", a->fuse, "ms", a->decode_ms,
                                        "prefill_ms", prof_quantile(&a->prefill_ms, 0.5), "kernels",
                                        p->n_ops, "buffers", p->n_segs, "arena_peak_bytes",
                                        (json_int_t)peak_of(a), "hash", prof_hash_json(a->arm.hash),
                                        "prefill_hash", prof_hash_json(a->prefill_hash)));
    }
    json_t *j = prof_head_json(&l->rig, "launch-heavy");
    json_object_set_new(j, "model", cli_json_text(l->stack ? "launch-heavy stack" : l->path));
    json_object_set_new(j, "context", json_integer(depth));
    json_object_set_new(j, "rows", rows);
    json_object_set_new(j, "slow_paths", prof_slow_json(l->arms[0].arm.plan));
    json_object_set_new(j, "null_ms", json_real(s.null.median));
    json_object_set_new(j, "null_spread_ms", json_real(s.null.spread));
    json_object_set_new(j, "hashes_equal_over_budgets", json_boolean(s.budgets_equal));
    json_object_set_new(j, "hashes_equal_fused_or_not", json_boolean(s.fused_equal));
    json_object_set_new(j, "peaks_equal_over_budgets", json_boolean(s.peaks_equal));
    return j;
}

static void print_table(const launch *l, int32_t depth) {
    launch_sum s = sum_of(l);
    mx_buf t;
    mx_buf_init(&t, 0);
    mx_buf_printf(&t, "mlxcel %s, %s, context %d\n%s, %s\n\n", mlxcel_version(),
                  l->stack ? "launch-heavy stack" : l->path, depth, l->rig.facts.device,
                  l->rig.facts.arch);
    mx_buf_printf(&t, "%-16s %-5s %10s %8s %8s %12s %14s  %s\n", "ops/MiB a buffer", "fused",
                  "ms/token", "kernels", "buffers", "prefill ms", "arena peak", "hash");
    for (int i = 0; i < ARMS; i++) {
        const launch_arm *a = &l->arms[i];
        mx_buf_printf(&t, "%-16s %-5s %10.4f %8d %8d %12.2f %14llu  %016llx\n", a->arm.name,
                      a->fuse ? "on" : "off", a->decode_ms, a->arm.plan->n_ops, a->arm.plan->n_segs,
                      prof_quantile(&a->prefill_ms, 0.5), (unsigned long long)peak_of(a),
                      (unsigned long long)a->arm.hash);
    }
    mx_buf_printf(&t, "\nnull arm: %+.4f ms (+- %.4f)\n", s.null.median, s.null.spread);
    mx_buf_printf(&t,
                  "hashes of decode and prefill: %s over budgets, %s with fused ops on and off\n",
                  s.budgets_equal ? "equal" : "NOT EQUAL", s.fused_equal ? "equal" : "different");
    mx_buf_printf(
        &t, "peak memory: %s over budgets\nslow paths: ", s.peaks_equal ? "equal" : "NOT EQUAL");
    prof_slow_text(l->arms[0].arm.plan, &t);
    mx_buf_puts(&t, "\n");
    cli_out(t.data, t.n);
    mx_buf_free(&t);
}

// ---- The command -------------------------------------------------------------------------------

static void open_arms(launch *l) {
    for (int i = 0; i < ARMS; i++) { // default, null, default unfused, then the other budgets
        launch_arm *a = &l->arms[i];
        int b = i < 3 ? 0 : (i - 1) / 2;
        mx_budget budgets[MX_PHASES];
        a->fuse = i < 2 || i % 2 == 1;
        if (b == 0)
            prof_budgets(&l->rig, budgets);
        else
            prof_budgets_of(budgets_of[b].ops, budgets_of[b].mb, budgets);
        if (b == 0)
            snprintf(a->arm.name, sizeof a->arm.name, "%s", i == 1 ? "default (null)" : "default");
        else
            snprintf(a->arm.name, sizeof a->arm.name, "%d/%d", budgets_of[b].ops, budgets_of[b].mb);
        prof_arm_open(&l->rig, &a->arm, budgets, a->fuse);
        prof_budgets_of(0, 0, budgets);
        a->plain = mx_enc_open(l->rig.b, budgets, 64, a->fuse);
    }
}

static mx_status open_all(launch *l, int32_t *depth, mx_err *err) {
    const cli_options *o = l->o;
    prof_rig *r = &l->rig;
    MX_TRY(prof_rig_open(r, o, err));
    MX_TRY(prof_rig_load(r, l->path, err));
    mx_model_info info;
    mx_model_get_info(r->model, &info);
    if (*depth == 0) *depth = r->facts.kind == MX_DEVICE_CPU ? 2000 : 20000;
    if (info.hp->max_ctx > 0 && *depth >= info.hp->max_ctx) {
        if (o->depth > 0) {
            mx_log(MX_LOG_WARN, "-d %d: the model's context ends at %d tokens; behind %d instead",
                   o->depth, (int)info.hp->max_ctx, (int)info.hp->max_ctx - 1);
        }
        *depth = (int32_t)info.hp->max_ctx - 1;
    }
    l->chunk = MX_MIN(o->prefill_chunk > 0 ? o->prefill_chunk : 512, *depth);
    mx_kv_spec spec;
    MX_TRY(prof_rig_kv_spec(r, o, *depth + 1, 1, &spec, err));
    spec.max_chunk = l->chunk;
    MX_TRY(prof_rig_steps(r, &spec, 1, l->chunk, (int32_t)info.hp->n_vocab, err));
    open_arms(l);
    return MX_OK;
}

static int report(const launch *l, int32_t depth) {
    if (strcmp(l->o->output, "json") == 0)
        prof_print_json(results(l, depth));
    else
        print_table(l, depth);
    launch_sum s = sum_of(l);
    if (s.budgets_equal && s.peaks_equal) return CLI_EXIT_OK;
    return cli_fail(l->o, CLI_EXIT_RUN, "budgets changed results or peak memory");
}

static int run(launch *l) {
    int32_t depths[2] = {SHORT, l->o->depth};
    mx_err err = {0};
    if (open_all(l, &depths[1], &err) != MX_OK) {
        return cli_fail(l->o, CLI_EXIT_LOAD, "%s", err.msg);
    }
    if (depths[1] < depths[0]) depths[0] = depths[1];
    int code = CLI_EXIT_OK;
    for (int i = depths[0] == depths[1]; i < 2; i++) {
        bool before = cli_signals_defer(true);
        mx_status st = measure(l, depths[i], &err);
        cli_signals_defer(before);
        if (cli_interrupted()) return CLI_EXIT_INTERRUPTED;
        if (st != MX_OK) return cli_fail(l->o, CLI_EXIT_RUN, "%s", err.msg);
        int one = report(l, depths[i]);
        if (one != CLI_EXIT_OK) code = one;
    }
    return code;
}

int prof_launch(const cli_options *o) {
    launch *l = mx_calloc(1, sizeof *l);
    char *path = NULL;
    l->o = o;
    l->stack = !o->model;
    int code = CLI_EXIT_LOAD;
    if (cli_resolve(o, o->model ? o->model : MX_SYNTHETIC "launch-heavy-bf16", &path)) {
        l->path = path;
        code = run(l);
    }
    for (int i = 0; i < ARMS; i++) {
        mx_enc_close(l->arms[i].plain);
        mx_free(l->arms[i].prefill_ms.v);
        prof_arm_close(&l->arms[i].arm);
    }
    prof_rig_close(&l->rig);
    mx_free(path);
    mx_free(l);
    return code;
}
