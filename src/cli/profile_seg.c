// mlxcel profile -m MODEL: what one decode step spends on attention, MLP, head, norms, sampling.
// State: one run's. How parts are told apart is in profile_repeat.c.
#include "cli/profile.h"

#include "base/knobs.h"
#include "base/mem.h"

#include <math.h>
#include <stdio.h>

enum { REPEATS = 2, MAX_ROWS = PROF_PARTS + MX_OP_COUNT, BOUNDARY_OPS = 20 };

typedef struct seg_row {
    char name[48];
    prof_part part;
    int32_t kind; // -1: the whole part
    prof_repeat repeat[REPEATS + 1];
    prof_cost cost;
    double ms, spread;
} seg_row;

typedef struct segments {
    const cli_options *o;
    prof_rig rig;
    mx_step_facts facts;
    prof_list list;
    prof_arm *arms; // base, null, split, then REPEATS a row
    size_t n_arms;
    seg_row rows[MAX_ROWS];
    size_t n_rows;
    int32_t n_steps;
    bool same_hashes;
} segments;

// The first one is the model's own recording; the others are made from its list.
static mx_status record_model(prof_rig *r, void *arg, mx_enc *e, mx_err *err) {
    const segments *s = arg;
    return mx_model_record(r->model, e, r->kv, s->o->depth + 1, MX_OUTPUT_SAMPLE, err);
}

static void add_row(segments *s, prof_part part, int32_t kind, const mx_plan *plan) {
    seg_row *w = &s->rows[s->n_rows];
    *w = (seg_row){.part = part, .kind = kind};
    w->cost = prof_part_cost(plan, part, kind, &s->facts);
    if (w->cost.n_ops == 0) return;
    if (kind < 0)
        snprintf(w->name, sizeof w->name, "%s", prof_part_name(part));
    else
        snprintf(w->name, sizeof w->name, "op %s", mx_op_get((mx_op_kind)kind)->name);
    s->n_rows++;
}

static mx_status open_all(segments *s, const char *path, mx_err *err) {
    const cli_options *o = s->o;
    prof_rig *r = &s->rig;
    MX_TRY(prof_rig_open(r, o, err));
    MX_TRY(prof_rig_load(r, path, err));
    mx_model_info info;
    mx_model_get_info(r->model, &info);
    mx_kv_spec spec;
    MX_TRY(prof_rig_kv_spec(r, o, o->depth + 1, o->n_seqs, &spec, err));
    MX_TRY(prof_rig_steps(r, &spec, o->n_seqs, o->n_seqs, (int32_t)info.hp->n_vocab, err));
    MX_TRY(prof_rig_skip(r, o->depth, err));
    MX_TRY(prof_rig_place(r, o->n_seqs, 1, true, MX_PHASE_DECODE, &s->facts, err));
    return prof_rig_read_rate(r, MX_MAX(info.weight_bytes, (uint64_t)64 << 20), err);
}

// Every arm has its encoder: plans and temporaries of its own.
static mx_status make_arms(segments *s, mx_err *err) {
    mx_budget budgets[MX_PHASES], small[MX_PHASES];
    prof_budgets(&s->rig, budgets);
    prof_budgets_of(BOUNDARY_OPS, 0, small);
    bool fuse = mx_knob_flag(MX_KNOB_FUSED_OPS);
    s->arms = mx_calloc(3 + MAX_ROWS * REPEATS, sizeof *s->arms); // they must not move
    prof_arm *base = &s->arms[s->n_arms++];
    snprintf(base->name, sizeof base->name, "base");
    prof_arm_open(&s->rig, base, budgets, fuse);
    MX_TRY(prof_arm_record(&s->rig, base, &s->facts, record_model, s, err));
    prof_list_copy(&s->list, base->plan);
    for (int p = 0; p < PROF_PARTS; p++) add_row(s, (prof_part)p, -1, base->plan);
    for (int k = 0; s->o->ops && k < MX_OP_COUNT; k++) add_row(s, PROF_PARTS, k, base->plan);
    prof_repeat plain = {.list = &s->list, .kind = -1, .of = REPEATS};
    for (int i = 0; i < 2; i++) { // the same again, and in small buffers
        prof_arm *a = &s->arms[s->n_arms++];
        snprintf(a->name, sizeof a->name, i ? "%d ops a buffer" : "null", BOUNDARY_OPS);
        prof_arm_open(&s->rig, a, i ? small : budgets, fuse);
        MX_TRY(prof_arm_record(&s->rig, a, &s->facts, prof_repeat_record, &plain, err));
    }
    for (size_t i = 0; i < s->n_rows; i++) {
        for (int32_t k = 1; k <= REPEATS; k++) {
            prof_arm *a = &s->arms[s->n_arms++];
            prof_repeat *p = &s->rows[i].repeat[k];
            *p = (prof_repeat){.list = &s->list,
                               .part = s->rows[i].part,
                               .kind = s->rows[i].kind,
                               .k = k,
                               .of = REPEATS};
            snprintf(a->name, sizeof a->name, "%s x%d", s->rows[i].name, k);
            prof_arm_open(&s->rig, a, budgets, fuse);
            MX_TRY(prof_arm_record(&s->rig, a, &s->facts, prof_repeat_record, p, err));
        }
    }
    return MX_OK;
}

// Milliseconds of a row in one round: the slope over repeats, scaled to all its runs.
static void fit_row(segments *s, size_t index) {
    seg_row *w = &s->rows[index];
    const prof_arm *base = &s->arms[0], *own = &s->arms[3 + index * REPEATS];
    prof_series slopes = {0};
    double scale = (double)w->repeat[1].n_runs / MX_MAX(w->repeat[1].n_extra, 1);
    for (size_t i = 0; i < base->ms.n; i++) {
        double x[REPEATS + 1] = {0}, y[REPEATS + 1] = {base->ms.v[i]};
        for (int k = 1; k <= REPEATS; k++) x[k] = k, y[k] = own[k - 1].ms.v[i];
        prof_push(&slopes, prof_slope(x, y, REPEATS + 1) * scale);
    }
    w->ms = prof_quantile(&slopes, 0.5);
    w->spread = (prof_quantile(&slopes, 0.75) - prof_quantile(&slopes, 0.25)) / 2;
    mx_free(slopes.v);
}

static mx_status measure(segments *s, mx_err *err) {
    prof_rig *r = &s->rig;
    s->same_hashes = true;
    for (size_t i = 0; i < s->n_arms; i++) {
        MX_TRY(prof_arm_hash(r, &s->arms[i], err));
        s->same_hashes &= s->arms[i].hash == s->arms[0].hash;
    }
    MX_TRY(prof_choose_steps(r, &s->arms[0], &s->n_steps, err));
    MX_TRY(prof_interleave(r, s->arms, s->n_arms, s->o->reps, s->n_steps, err));
    for (size_t i = 0; i < s->n_rows; i++) fit_row(s, i);
    return prof_rig_read_rate(r, (uint64_t)64 << 20, err);
}

// ---- Results -----------------------------------------------------------------------------------

// A time that is not above its own spread says nothing about rates.
static bool is_clear(const seg_row *w) {
    return w->ms > w->spread && w->ms > 0;
}

static json_t *row_json(const segments *s, const seg_row *w) {
    double bytes = w->cost.read_bytes + w->cost.write_bytes, rate = s->rig.read_bytes_s;
    bool clear = is_clear(w) && rate > 0;
    json_t *j = json_pack("{s:s, s:f, s:f, s:i, s:i, s:f}", "segment", w->name, "ms", w->ms,
                          "spread_ms", w->spread, "kernels", w->cost.n_ops, "buffers",
                          w->cost.n_buffers, "bytes", bytes);
    double s_row = w->ms * 1e-3;
    json_object_set_new(j, "gb_s", clear ? json_real(bytes / s_row * 1e-9) : json_null());
    json_object_set_new(j, "share",
                        clear ? json_real(w->cost.read_bytes / s_row / rate) : json_null());
    return j;
}

// What the whole step moves, and the share of its time that the reads would take.
static prof_cost whole_step(const segments *s) {
    prof_cost c = {0};
    for (int p = 0; p < PROF_NORM; p++) {
        prof_cost one = prof_part_cost(s->arms[0].plan, (prof_part)p, -1, &s->facts);
        c.read_bytes += one.read_bytes;
        c.write_bytes += one.write_bytes;
    }
    return c;
}

static json_t *results(const segments *s) {
    const mx_plan *plan = s->arms[0].plan;
    json_t *j = prof_head_json(&s->rig, "segments"), *rows = json_array();
    double sum = 0, step = prof_quantile(&s->arms[0].ms, 0.5);
    for (size_t i = 0; i < s->n_rows; i++) {
        json_array_append_new(rows, row_json(s, &s->rows[i]));
        if (s->rows[i].kind < 0 && s->rows[i].part != PROF_NORM) sum += s->rows[i].ms;
    }
    prof_diff null = prof_paired(&s->arms[1].ms, &s->arms[0].ms);
    prof_diff split = prof_paired(&s->arms[2].ms, &s->arms[0].ms);
    int32_t more = s->arms[2].plan->n_segs - plan->n_segs;
    json_object_set_new(j, "depth", json_integer(s->o->depth));
    json_object_set_new(j, "seqs", json_integer(s->o->n_seqs));
    json_object_set_new(j, "segments", rows);
    json_object_set_new(j, "step_ms", json_real(step));
    json_object_set_new(j, "rest_ms", json_real(step - sum));
    prof_cost all = whole_step(s);
    double rate = s->rig.read_bytes_s, share = all.read_bytes / (step * 1e-3) / rate;
    json_object_set_new(j, "tok_s", json_real(s->o->n_seqs * 1e3 / step));
    json_object_set_new(j, "read_bytes", json_real(all.read_bytes));
    json_object_set_new(j, "bytes", json_real(all.read_bytes + all.write_bytes));
    json_object_set_new(j, "share", rate > 0 ? json_real(share) : json_null());
    json_object_set_new(j, "kernels", json_integer(plan->n_ops));
    json_object_set_new(j, "buffers", json_integer(plan->n_segs));
    json_object_set_new(j, "null_ms", json_real(null.median));
    json_object_set_new(j, "null_spread_ms", json_real(null.spread));
    json_object_set_new(j, "boundary_us",
                        more > 0 ? json_real(split.median * 1e3 / more) : json_null());
    json_object_set_new(j, "boundary_spread_us",
                        more > 0 ? json_real(split.spread * 1e3 / more) : json_null());
    json_object_set_new(j, "slow_paths", prof_slow_json(plan));
    json_object_set_new(j, "hash", prof_hash_json(s->arms[0].hash));
    json_object_set_new(j, "hashes_equal", json_boolean(s->same_hashes));
    return j;
}

static void print_table(const segments *s, const char *path) {
    mx_buf t;
    mx_buf_init(&t, 0);
    const mx_plan *plan = s->arms[0].plan;
    double rate = s->rig.read_bytes_s, sum = 0, step = prof_quantile(&s->arms[0].ms, 0.5);
    mx_buf_printf(&t, "mlxcel %s, %s\n%s, %s", mlxcel_version(), path, s->rig.facts.device,
                  s->rig.facts.arch);
    if (s->rig.facts.n_threads) mx_buf_printf(&t, ", %d threads", s->rig.facts.n_threads);
    mx_buf_printf(&t, "; depth %d, %d sequence%s; read rate %.1f GB/s\n\n", s->o->depth,
                  s->o->n_seqs, s->o->n_seqs == 1 ? "" : "s", rate * 1e-9);
    mx_buf_printf(&t, "%-20s %10s %9s %8s %8s %12s %9s %6s\n", "segment",
                  s->o->n_seqs == 1 ? "ms/token" : "ms/step", "+-", "kernels", "buffers", "bytes",
                  "GB/s", "share");
    for (size_t i = 0; i < s->n_rows; i++) {
        const seg_row *w = &s->rows[i];
        double bytes = w->cost.read_bytes + w->cost.write_bytes;
        mx_buf_printf(&t, "%-20s %10.4f %9.4f %8d %8d %12.0f ",
                      w->part == PROF_NORM ? "norm (by itself)" : w->name, w->ms, w->spread,
                      w->cost.n_ops, w->cost.n_buffers, bytes);
        if (is_clear(w) && rate > 0) {
            mx_buf_printf(&t, "%9.1f %5.0f%%\n", bytes / w->ms * 1e-6,
                          w->cost.read_bytes / (w->ms * 1e-3) / rate * 100);
        } else {
            mx_buf_printf(&t, "%9s %6s\n", "-", "-");
        }
        if (w->kind < 0 && w->part != PROF_NORM) sum += w->ms;
    }
    prof_diff null = prof_paired(&s->arms[1].ms, &s->arms[0].ms);
    prof_diff split = prof_paired(&s->arms[2].ms, &s->arms[0].ms);
    int32_t more = s->arms[2].plan->n_segs - plan->n_segs;
    mx_buf_printf(&t, "%-20s %10.4f\n%-20s %10.4f %9.4f %8d %8d", "rest", step - sum, "whole step",
                  step, null.spread, plan->n_ops, plan->n_segs);
    prof_cost all = whole_step(s);
    mx_buf_printf(&t, " %12.0f %9.1f %5.0f%%\n", all.read_bytes + all.write_bytes,
                  (all.read_bytes + all.write_bytes) / step * 1e-6,
                  rate > 0 ? all.read_bytes / (step * 1e-3) / rate * 100 : 0);
    mx_buf_printf(&t, "\ntokens a second: %.1f\n", s->o->n_seqs * 1e3 / step);
    mx_buf_printf(&t, "null arm:        %+.4f ms\n", null.median);
    if (more > 0) {
        mx_buf_printf(&t, "boundary:        %.2f us (+- %.2f), %d more buffers of %d ops\n",
                      split.median * 1e3 / more, split.spread * 1e3 / more, more, BOUNDARY_OPS);
    }
    mx_buf_puts(&t, "slow paths:      ");
    prof_slow_text(plan, &t);
    mx_buf_printf(&t, "hashes:          %016llx, %s\n", (unsigned long long)s->arms[0].hash,
                  s->same_hashes ? "equal over all arms" : "NOT EQUAL");
    cli_out(t.data, t.n);
    mx_buf_free(&t);
}

static int report(const segments *s, const char *path) {
    if (strcmp(s->o->output, "json") == 0) {
        json_t *j = results(s);
        json_object_set_new(j, "model", cli_json_text(path));
        prof_print_json(j);
    } else {
        print_table(s, path);
    }
    if (s->same_hashes) return CLI_EXIT_OK;
    return cli_fail(s->o, CLI_EXIT_RUN, "repeats changed the step's results");
}

int prof_segments(const cli_options *o) {
    segments *s = mx_calloc(1, sizeof *s);
    s->o = o;
    char *path = NULL;
    mx_err err = {0};
    int code = CLI_EXIT_LOAD;
    if (!cli_resolve(o, o->model, &path)) goto out;
    if (open_all(s, path, &err) != MX_OK) {
        cli_fail(o, CLI_EXIT_LOAD, "%s", err.msg);
        goto out;
    }
    bool before = cli_signals_defer(true);
    mx_status st = make_arms(s, &err);
    if (st == MX_OK) st = measure(s, &err);
    cli_signals_defer(before);
    if (cli_interrupted())
        code = CLI_EXIT_INTERRUPTED;
    else
        code = st == MX_OK ? report(s, path) : cli_fail(o, CLI_EXIT_RUN, "%s", err.msg);
out:
    for (size_t i = 0; i < s->n_arms; i++) prof_arm_close(&s->arms[i]);
    mx_free(s->arms);
    prof_list_free(&s->list);
    prof_rig_close(&s->rig);
    mx_free(path);
    mx_free(s);
    return code;
}
