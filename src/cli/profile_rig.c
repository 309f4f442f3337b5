// The stand of `mlxcel profile`: a backend with step blocks and sequence memory, driven step by
// step without an engine, so that one step can be run in several ways on the same executor. State:
// the rig and the arms, the caller's; one thread.
//
// A step is placed once into both slots and submitted again and again: it writes the same state
// positions each time and computes the same. Two steps are in flight, as the engine decodes.
#include "cli/profile.h"

#include "base/knobs.h"
#include "base/mem.h"
#include "base/os.h"
#include "engine/device.h"
#include "kv/kv.h"

#include <stdio.h>
#include <stdlib.h>

enum { PLAN_CAP = 64 };

// ---- Opening -----------------------------------------------------------------------------------

mx_status prof_rig_open(prof_rig *r, const cli_options *o, mx_err *err) {
    *r = (prof_rig){0};
    mx_device_options device = {
        .want = o->device, .n_threads = o->threads, .deterministic = o->deterministic};
    MX_TRY(mx_device_open(&device, &r->b, err));
    r->b->ops->facts(r->b, &r->facts);
    return MX_OK;
}

void prof_rig_close(prof_rig *r) {
    mx_kv_close(r->kv);
    mx_model_close(r->model);
    if (r->b) r->b->ops->close(r->b);
    if (r->weights_open) mx_weights_close(&r->weights);
    mx_free(r->seqs);
    mx_free(r->ranges);
    *r = (prof_rig){0};
}

mx_status prof_rig_load(prof_rig *r, const char *path, mx_err *err) {
    MX_TRY(mx_weights_open(&r->weights, path, err));
    r->weights_open = true;
    return mx_model_open(&r->model, r->b, &r->weights, false, err);
}

mx_status prof_rig_kv_spec(const prof_rig *r, const cli_options *o, int32_t ctx, int32_t n_seqs,
                           mx_kv_spec *spec, mx_err *err) {
    bool paged =
        strcmp(o->kv_storage, "paged") == 0 || (strcmp(o->kv_storage, "auto") == 0 && n_seqs > 1);
    bool f32 = o->kv_type ? strcmp(o->kv_type, "f32") == 0 : mx_knob_flag(MX_KNOB_EXACT);
    *spec = (mx_kv_spec){.storage = paged ? MX_KV_PAGED : MX_KV_DENSE,
                         .page_tokens = 32,
                         .max_ctx = (ctx + 31) / 32 * 32,
                         .max_seqs = n_seqs,
                         .max_chunk = MX_MIN(ctx, 512)};
    if (r->model) mx_model_kv_groups(r->model, f32 ? MX_F32 : MX_F16, spec);
    mx_backend_facts f;
    r->b->ops->facts(r->b, &f);
    uint64_t need = mx_kv_pool_bytes(spec);
    if (need <= f.available_bytes) return MX_OK;
    return mx_err_set(err, MX_NOMEM, "KV cache %llu bytes: more than the %llu bytes available",
                      (unsigned long long)need, (unsigned long long)f.available_bytes);
}

mx_status prof_rig_steps(prof_rig *r, const mx_kv_spec *spec, int32_t n_seqs, int32_t max_rows,
                         int32_t n_vocab, mx_err *err) {
    r->n_seqs = n_seqs;
    r->max_rows = mx_row_bucket(&r->facts, max_rows);
    r->caps = (mx_step_caps){.max_tok = r->max_rows,
                             .max_range = n_seqs,
                             .max_out = mx_row_bucket(&r->facts, n_seqs),
                             .n_vocab = n_vocab};
    r->ranges = mx_calloc((size_t)n_seqs, sizeof *r->ranges);
    r->seqs = mx_calloc((size_t)n_seqs, sizeof *r->seqs);
    if (spec) {
        MX_TRY(mx_kv_open(&r->kv, r->b, spec, err));
        mx_kv_caps(r->kv, &r->caps);
        r->ctx = spec->max_ctx;
        for (int32_t i = 0; i < n_seqs; i++) r->seqs[i] = mx_kv_seq_open(r->kv);
    }
    return r->b->ops->step_init(r->b, &r->caps, r->io, err);
}

mx_status prof_rig_read_rate(prof_rig *r, uint64_t n_bytes, mx_err *err) {
    double rate = 0;
    if (r->b->ops->read_rate)
        MX_TRY(r->b->ops->read_rate(r->b, &rate, err));
    else
        rate = cli_read_rate(n_bytes, r->facts.n_threads) * 1e9;
    if (rate > r->read_bytes_s) r->read_bytes_s = rate;
    return MX_OK;
}

// ---- Rows --------------------------------------------------------------------------------------

mx_status prof_rig_skip(prof_rig *r, int32_t depth, mx_err *err) {
    for (int32_t i = 0; r->kv && i < r->n_seqs; i++) {
        for (int32_t at = 0; at < depth;) { // windows give back what they have passed
            at = MX_MIN(at + 256, depth);
            MX_TRY(mx_kv_reserve(r->kv, r->seqs[i], at, err));
            mx_kv_commit(r->kv, r->seqs[i], at);
        }
    }
    return MX_OK;
}

void prof_rig_rewind(prof_rig *r) {
    for (int32_t i = 0; r->kv && i < r->n_seqs; i++) {
        mx_kv_seq_close(r->kv, r->seqs[i]);
        r->seqs[i] = mx_kv_seq_open(r->kv);
    }
}

static void place_rows(prof_rig *r, mx_step_io *io, const mx_step_range *g, int32_t index) {
    for (int32_t k = 0; k < g->n_tok; k++) {
        int32_t row = g->first + k, key[2] = {index, g->pos0 + k};
        io->ids[row] = (int32_t)(mx_hash64(key, sizeof key, 1) % (uint64_t)r->caps.n_vocab);
        io->pos[row] = g->pos0 + k;
        io->tok_range[row] = index;
    }
    io->range_first[index] = g->first;
    io->range_pos0[index] = g->pos0;
    io->range_len[index] = g->pos0 + g->n_tok;
    if (r->kv) mx_kv_fill(r->kv, g->seq, g, index, &r->caps, io);
}

static void place_slot(prof_rig *r, mx_step_io *io, const mx_step_facts *f) {
    for (int32_t i = 0; i < f->n_ranges; i++) {
        const mx_step_range *g = &r->ranges[i];
        place_rows(r, io, g, i);
        if (f->n_out == 0) continue;
        io->out_tok[i] = g->first + g->n_tok - 1;
        io->sample[i] = (mx_sample_row){0};
    }
    io->range_first[f->n_ranges] = f->n_tok;
    for (int32_t row = f->n_tok; row < f->n_rows; row++) {
        io->ids[row] = io->pos[row] = 0;
        io->tok_range[row] = -1;
        for (int32_t g = 0; g < r->caps.n_groups; g++) io->kv_slot[g][row] = -1;
    }
    io->counts[0] = f->n_tok;
    io->counts[1] = f->n_ranges;
    io->counts[2] = f->n_out;
}

mx_status prof_rig_place(prof_rig *r, int32_t n_seqs, int32_t n_tok, bool out, mx_phase phase,
                         mx_step_facts *facts, mx_err *err) {
    CHECK(n_seqs >= 1 && n_seqs <= r->n_seqs);
    for (int32_t i = 0; i < n_seqs; i++) {
        int32_t pos0 = r->kv ? mx_kv_seq_len(r->kv, r->seqs[i]) : 0;
        if (r->kv) MX_TRY(mx_kv_reserve(r->kv, r->seqs[i], pos0 + n_tok, err));
        r->ranges[i] = (mx_step_range){
            .seq = r->seqs[i], .first = i * n_tok, .n_tok = n_tok, .pos0 = pos0, .phase = phase};
    }
    *facts = (mx_step_facts){.phase = phase,
                             .n_tok = n_seqs * n_tok,
                             .n_rows = mx_row_bucket(&r->facts, n_seqs * n_tok),
                             .n_out = out ? n_seqs : 0,
                             .n_ranges = n_seqs,
                             .ranges = r->ranges};
    CHECK(facts->n_rows <= r->caps.max_tok);
    for (int s = 0; s < MX_STEP_SLOTS; s++) place_slot(r, &r->io[s], facts);
    return MX_OK;
}

void prof_rig_commit(prof_rig *r, const mx_step_facts *f) {
    for (int32_t i = 0; r->kv && i < f->n_ranges; i++) {
        mx_kv_commit(r->kv, r->ranges[i].seq, r->ranges[i].pos0 + r->ranges[i].n_tok);
    }
}

// ---- Budgets -----------------------------------------------------------------------------------

void prof_budgets(const prof_rig *r, mx_budget out[MX_PHASES]) {
    mx_budget_input in = {
        .device = r->facts.kind, .cc_major = r->facts.cc_major, .cc_minor = r->facts.cc_minor};
    mx_model_info info;
    if (r->model) {
        mx_model_get_info(r->model, &info);
        in.family = info.model_type;
        in.n_routed_experts = info.n_routed_experts;
    }
    mx_budget_input_env(&in);
    mx_budget_choose(&in, out);
}

void prof_budgets_of(int32_t ops, int32_t mb, mx_budget out[MX_PHASES]) {
    for (int p = 0; p < MX_PHASES; p++) {
        out[p] = (mx_budget){.max_ops = ops > 0 ? ops : MX_BUDGET_UNLIMITED,
                             .max_mb = mb > 0 ? mb : MX_BUDGET_UNLIMITED,
                             .min_ops = 10,
                             .dedup = true};
    }
}

// ---- Arms --------------------------------------------------------------------------------------

void prof_arm_open(prof_rig *r, prof_arm *a, const mx_budget budgets[MX_PHASES], bool fuse) {
    a->enc = mx_enc_open(r->b, budgets, PLAN_CAP, fuse);
    memcpy(a->budgets, budgets, sizeof a->budgets);
}

void prof_arm_join(prof_arm *a, const prof_arm *first, const mx_budget budgets[MX_PHASES]) {
    a->enc = first->enc;
    a->shared = true;
    memcpy(a->budgets, budgets, sizeof a->budgets);
}

void prof_arm_close(prof_arm *a) {
    if (!a->shared) mx_enc_close(a->enc);
    mx_free(a->ms.v);
    *a = (prof_arm){0};
}

mx_status prof_arm_record(prof_rig *r, prof_arm *a, const mx_step_facts *facts, prof_record record,
                          void *arg, mx_err *err) {
    a->facts = *facts;
    mx_enc_next_budgets(a->enc, a->budgets);
    mx_enc_begin(a->enc, &a->facts);
    MX_TRY(record(r, arg, a->enc, err));
    return mx_enc_end(a->enc, &a->plan, err);
}

static mx_status submit(prof_rig *r, prof_arm *a, mx_ticket *t, mx_err *err) {
    r->slot = (r->slot + 1) % MX_STEP_SLOTS;
    return mx_enc_submit(a->enc, a->plan, r->slot, t, err);
}

static mx_status wait(prof_rig *r, mx_ticket t, bool logits, mx_run_stats *s, mx_err *err) {
    bool done;
    mx_run_stats own;
    return r->b->ops->wait(r->b, t, true, logits, &done, s ? s : &own, err);
}

static void set_wait(prof_rig *r, bool on) {
    if (r->b->ops->wait_buffers) r->b->ops->wait_buffers(r->b, on);
}

mx_status prof_arm_step(prof_rig *r, prof_arm *a, bool logits, double *seconds, mx_err *err) {
    mx_ticket t;
    mx_run_stats s;
    MX_TRY(submit(r, a, &t, err));
    MX_TRY(wait(r, t, logits, &s, err));
    if (seconds) *seconds = s.seconds;
    return MX_OK;
}

mx_status prof_arm_hash(prof_rig *r, prof_arm *a, mx_err *err) {
    if (a->facts.n_out == 0) return MX_OK;
    MX_TRY(prof_arm_step(r, a, true, NULL, err));
    const mx_step_io *io = &r->io[r->slot];
    size_t n = (size_t)a->facts.n_out;
    a->hash = mx_hash64(io->logits, n * (size_t)r->caps.n_vocab * sizeof(float), a->hash);
    a->hash = mx_hash64(io->out_id, n * sizeof *io->out_id, a->hash);
    return MX_OK;
}

// n steps back to back; the next is submitted before the last is waited for.
static mx_status run_steps(prof_rig *r, prof_arm *a, int32_t n, double *ms, mx_err *err) {
    mx_ticket last = {0}, next;
    set_wait(r, a->wait);
    double t0 = mx_now_s();
    mx_status st = MX_OK;
    for (int32_t i = 0; i < n && st == MX_OK; i++) {
        st = submit(r, a, &next, err);
        if (st == MX_OK && last.serial) st = wait(r, last, false, NULL, err);
        last = next;
    }
    if (st == MX_OK) st = wait(r, last, false, NULL, err);
    *ms = (mx_now_s() - t0) * 1e3 / n;
    set_wait(r, false);
    return st;
}

mx_status prof_interleave(prof_rig *r, prof_arm *arms, size_t n, int32_t rounds, int32_t n_steps,
                          mx_err *err) {
    double ms;
    mx_status st = MX_OK;
    size_t *order = mx_alloc(n * sizeof *order);
    for (size_t i = 0; i < n && st == MX_OK; i++) st = run_steps(r, &arms[i], 1, &ms, err);
    for (int32_t k = 0; k < rounds && st == MX_OK && !cli_interrupted(); k++) {
        prof_order(order, n, (uint32_t)k);
        for (size_t i = 0; i < n && st == MX_OK; i++) {
            prof_arm *a = &arms[order[i]];
            st = run_steps(r, a, 1, &ms, err); // what ran before has left nothing that counts
            if (st == MX_OK) st = run_steps(r, a, n_steps, &ms, err);
            if (st == MX_OK) prof_push(&a->ms, ms);
        }
    }
    mx_free(order);
    return st;
}

mx_status prof_choose_steps(prof_rig *r, prof_arm *a, int32_t *n, mx_err *err) {
    double ms;
    MX_TRY(run_steps(r, a, 2, &ms, err));
    MX_TRY(run_steps(r, a, 2, &ms, err));
    *n = (int32_t)MX_MAX(1.0, MX_MIN(1000.0, 20 / MX_MAX(ms, 1e-3)));
    return MX_OK;
}

// ---- Results -----------------------------------------------------------------------------------

int prof_print_json(json_t *j) {
    char *text = json_dumps(j, JSON_COMPACT | JSON_REAL_PRECISION(9));
    CHECK(text != NULL);
    cli_outs(text);
    cli_outs("\n");
    free(text);
    json_decref(j);
    return CLI_EXIT_OK;
}

json_t *prof_hash_json(uint64_t h) {
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)h);
    return json_string(text);
}

json_t *prof_slow_json(const mx_plan *p) {
    json_t *j = json_object();
    for (int i = 0; i < MX_SLOW_COUNT; i++) {
        if (p->slow[i]) json_object_set_new(j, mx_slow_name((mx_slow)i), json_integer(p->slow[i]));
    }
    return j;
}

void prof_slow_text(const mx_plan *p, mx_buf *out) {
    bool any = false;
    for (int i = 0; i < MX_SLOW_COUNT; i++) {
        if (p->slow[i]) mx_buf_printf(out, "%s %u, ", mx_slow_name((mx_slow)i), p->slow[i]);
        any |= p->slow[i] > 0;
    }
    mx_buf_puts(out, any ? "in a step\n" : "none\n");
}

json_t *prof_head_json(const prof_rig *r, const char *what) {
    json_t *j =
        json_pack("{s:s, s:s, s:s, s:s, s:i}", "version", mlxcel_version(), "profile", what,
                  "device", r->facts.device, "arch", r->facts.arch, "threads", r->facts.n_threads);
    CHECK(j != NULL);
    json_t *rate = r->read_bytes_s > 0 ? json_real(r->read_bytes_s * 1e-9) : json_null();
    json_object_set_new(j, "read_gb_s", rate);
    return j;
}
