// How many prompt tokens a step takes when nobody says: the most whose step was measured to take
// STEP_S, 32 to 2,048. An engine for several sequences measures while it loads, with real steps on
// a small state of its own: two sizes give the cost of a token, one step far into a context what
// each position before it adds. An engine for one sequence on a CPU makes nobody wait but whoever
// stops it; it learns from the steps of its first prompts instead, and loads no slower. On a device
// whose results may depend on the chunk, one sequence has a fixed one. Engine thread only.
#include "engine/engine_int.h"

#include "base/knobs.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

enum {
    LEAST = 32,
    MOST = 2048,
    FIXED = 512,     // where nothing is measured
    DEEP = 4096,     // position of the deep step
    LEAST_DEEP = 512 // a context too short for less
};
static const double STEP_S = 0.1;

void chunk_choose(mlxcel_engine *e) {
    mlxcel_params *p = &e->params;
    chunk_rule *r = &e->chunk;
    int64_t env = mx_knob_int(MX_KNOB_PREFILL_CHUNK, -1);
    bool asked = p->prefill_chunk > 0;
    *r = (chunk_rule){.why = asked ? "as asked for" : "MLXCEL_PREFILL_CHUNK"};
    if (!asked) p->prefill_chunk = env == 0 ? p->ctx_size : (int32_t)MX_MAX(env, 0);
    if (p->prefill_chunk <= 0) {
        r->measure = p->max_batch > 1;
        r->learn = !r->measure && e->facts.host_memory;
        p->prefill_chunk = r->measure ? MOST : FIXED;
        r->why = r->learn ? "at most; as many as took 0.1 s" : "fixed: one sequence on a GPU";
    }
    p->prefill_chunk = MX_MIN(p->prefill_chunk, p->ctx_size);
}

// ---- While it works ----------------------------------------------------------------------------

void chunk_learn(mlxcel_engine *e, int32_t n_tok, double dt) {
    int32_t now = e->sched.prefill_chunk, most = e->params.prefill_chunk;
    if (!e->chunk.learn || dt <= 0 || (n_tok < now && dt <= STEP_S)) return;
    double n = MX_MIN(n_tok * STEP_S / dt, now * 4.0); // a quick step may have been luck
    e->sched.prefill_chunk = MX_MIN(MX_MAX((int32_t)n / LEAST * LEAST, LEAST), most);
}

// ---- While it loads ----------------------------------------------------------------------------

typedef struct probe {
    mlxcel_engine *e;
    mlxcel_request req; // nobody's: asks for no output
    eng_seq seq;
    int32_t most; // positions of its state
} probe;

static void probe_open(probe *p, mlxcel_engine *e, int32_t ctx) {
    *p = (probe){.e = e, .most = ctx};
    pthread_mutex_init(&p->req.lock, NULL);
    p->req.refs = 1;
    p->seq = (eng_seq){.req = &p->req, .kv = -1, .phase = SCHED_PREFILLING, .finished = true};
    p->seq.n_tokens = p->seq.n_prompt = ctx;
    p->seq.tokens = mx_alloc((size_t)ctx * sizeof *p->seq.tokens);
    for (int32_t i = 0; i < ctx; i++) {
        p->seq.tokens[i] = (int32_t)(mx_hash64(&i, sizeof i, 1) % (uint64_t)e->caps.n_vocab);
    }
}

static void probe_close(probe *p) {
    if (p->seq.kv >= 0) mx_kv_seq_close(p->e->kv, p->seq.kv);
    mx_free(p->seq.tokens);
    pthread_mutex_destroy(&p->req.lock);
}

// Time of one step of n tokens after n_past others, whose state is whatever the pages hold.
static mx_status probe_step(probe *p, int32_t n_past, int32_t n, double *seconds, mx_err *err) {
    mlxcel_engine *e = p->e;
    if (p->seq.kv >= 0) mx_kv_seq_close(e->kv, p->seq.kv);
    p->seq.kv = mx_kv_seq_open(e->kv);
    for (int32_t at = 0; at < n_past;) { // windows give back what they have passed
        at = MX_MIN(at + LEAST, n_past);
        MX_TRY(mx_kv_reserve(e->kv, p->seq.kv, at, err));
        mx_kv_commit(e->kv, p->seq.kv, at);
    }
    p->seq.n_past = n_past;
    step_pick pick = {&p->seq, n, -1};
    double start = mx_now_s();
    MX_TRY(step_submit(e, &e->flights[0], &pick, 1, err));
    MX_TRY(step_finish(e, &e->flights[0], err));
    *seconds = mx_now_s() - start;
    return MX_OK;
}

// Whether a third measurement, or a second one, may tell more: the first of all reads weights that
// are in no cache yet, and another process may have had the processor.
static bool again(int n_done, double first_s, double best_s, double all_s) {
    if (n_done == 0) return true;
    if (n_done == 1) return all_s < 50 * STEP_S;
    return n_done == 2 && (all_s < 1.5 * STEP_S || best_s < first_s / 2);
}

// The quickest of up to three.
static mx_status probe_best(probe *p, int32_t n_past, int32_t n, double *seconds, mx_err *err) {
    double all = 0, first = 0;
    *seconds = 0;
    for (int i = 0; again(i, first, *seconds, all); i++) {
        double s;
        MX_TRY(probe_step(p, n_past, n, &s, err));
        if (i == 0) first = s;
        if (i == 0 || s < *seconds) *seconds = s;
        all += s;
    }
    return MX_OK;
}

// Sizes that steps come in: on some backends plans are made for so many rows only.
static int32_t round_down(const mlxcel_engine *e, double n, int32_t most) {
    int32_t unit = e->facts.bucket_rows && n >= 128 ? 128 : LEAST / 2;
    int32_t k = (int32_t)MX_MIN(n, (double)most) / unit * unit;
    return MX_MIN(MX_MAX(k, LEAST), most);
}

// The largest size that was measured within STEP_S, and its time.
static mx_status find_size(probe *p, int32_t most, double small_s, int32_t *best, double *best_s,
                           mx_err *err) {
    *best = MX_MIN(LEAST, most), *best_s = small_s;
    int32_t above = INT32_MAX; // one that took longer
    double n = LEAST * STEP_S / small_s;
    for (int i = 0; i < 4; i++) {
        int32_t k = round_down(p->e, n, MX_MIN(most, above - 1));
        if (k <= *best || k < *best + *best / 8) return MX_OK;
        double s;
        MX_TRY(probe_best(p, 0, k, &s, err));
        if (s <= STEP_S)
            *best = k, *best_s = s;
        else
            above = k;
        n = k * STEP_S / s;
    }
    return MX_OK;
}

static mx_status find_costs(probe *p, sched_cost *c, char *why, size_t cap, mx_err *err) {
    double small_s, best_s, deep_s = 0;
    int32_t most = MX_MIN(p->e->params.prefill_chunk, p->most), small = MX_MIN(LEAST, most), best;
    MX_TRY(probe_best(p, 0, small, &small_s, err));
    MX_TRY(find_size(p, most, small_s, &best, &best_s, err));
    *c = (sched_cost){.token_s = best_s / best};
    if (best > small && best_s > small_s) {
        c->token_s = (best_s - small_s) / (best - small);
        c->fixed_s = MX_MAX(best_s - best * c->token_s, 0);
    }
    int32_t m = MX_MIN(MX_MAX(best / 4 / LEAST * LEAST, LEAST), 256);
    int32_t past = MX_MIN(DEEP, p->most - m) / LEAST * LEAST;
    if (best > LEAST && past >= LEAST_DEEP) {
        MX_TRY(probe_best(p, past, m, &deep_s, err));
        double more = deep_s - c->fixed_s - m * c->token_s;
        if (more > 0) c->pair_s = more / ((double)m * past);
    }
    p->e->params.prefill_chunk = best;
    int len = snprintf(why, cap, "measured: %d tokens took %.1f ms", best, best_s * 1e3);
    if (deep_s > 0 && len > 0 && (size_t)len < cap) {
        double flat_s = c->fixed_s + m * c->token_s;
        snprintf(why + len, cap - (size_t)len, "; %d: %.1f, after %d others %.1f", m, flat_s * 1e3,
                 past, deep_s * 1e3);
    }
    return MX_OK;
}

mx_status chunk_measure(mlxcel_engine *e, const mx_kv_spec *spec, int32_t n_vocab, mx_err *err) {
    double start = mx_now_s();
    mx_kv_spec small = *spec;
    small.storage = MX_KV_PAGED;
    small.max_ctx = MX_MIN(spec->max_ctx, DEEP + 256);
    small.max_seqs = 1;
    small.cache_bytes = small.budget_bytes = 0;
    mx_status st = engine_open_steps(e, &small, n_vocab, err);
    if (st == MX_OK) {
        probe p;
        probe_open(&p, e, small.max_ctx);
        st = find_costs(&p, &e->chunk.cost, e->chunk.text, sizeof e->chunk.text, err);
        probe_close(&p);
    }
    engine_close_steps(e);
    e->chunk.why = e->chunk.text;
    e->chunk.step_s = STEP_S;
    if (st == MX_NOMEM) { // what serves may need less than what measures
        mx_log(MX_LOG_WARN, "prefill chunk: not measured: %s", err->msg);
        e->chunk = (chunk_rule){.why = "fixed: no memory to measure with"};
        e->params.prefill_chunk = MX_MIN(FIXED, e->params.ctx_size);
        *err = (mx_err){0};
        st = MX_OK;
    }
    e->chunk.seconds = mx_now_s() - start;
    memset(&e->stats, 0, sizeof e->stats); // nobody has asked for anything yet
    return st;
}
