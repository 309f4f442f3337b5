// The engine thread: mail in, one step after another, events out. It owns model, memory, encoder
// and scheduler state; other threads reach it through the mailbox and each request's queue.
#include "engine/engine_int.h"

#include "backend/cuda/cuda.h"
#include "base/knobs.h"
#include "base/mem.h"

#include <math.h>
#include <string.h>

// ---- Mail --------------------------------------------------------------------------------------

static void push_running(mlxcel_engine *e, eng_seq *s) {
    if (e->n_running == e->cap_running) {
        e->cap_running = e->cap_running ? e->cap_running * 2 : 64;
        size_t n = (size_t)e->cap_running;
        e->running = mx_realloc(e->running, n * sizeof *e->running);
        e->row_tok = mx_realloc(e->row_tok, n * sizeof *e->row_tok);
        e->row_admit = mx_realloc(e->row_admit, n * sizeof *e->row_admit);
        e->row_seq = mx_realloc(e->row_seq, n * sizeof *e->row_seq);
    }
    e->running[e->n_running++] = s;
}

void request_fail(mlxcel_engine *e, mlxcel_request *r, const mx_err *err) {
    r->err = *err;
    for (int32_t i = 0; i < r->p.n_choices; i++) {
        if (!r->seqs[i].finished) seq_finish(e, &r->seqs[i], MLXCEL_FINISH_ERROR, NULL);
    }
}

static void take_request(mlxcel_engine *e, mlxcel_request *r) {
    r->next = e->requests;
    e->requests = r;
    r->n_live = r->p.n_choices;
    r->seqs = mx_calloc((size_t)r->p.n_choices, sizeof *r->seqs);
    for (int32_t i = 0; i < r->p.n_choices; i++) r->seqs[i].req = r;
    mx_err err = {0};
    for (int32_t i = 0; i < r->p.n_choices; i++) {
        if (seq_open(e, r, i, &err) != MX_OK) {
            request_fail(e, r, &err);
            return;
        }
        push_running(e, &r->seqs[i]);
    }
}

static bool is_cancelled(mlxcel_request *r) {
    pthread_mutex_lock(&r->lock);
    bool c = r->cancelled;
    pthread_mutex_unlock(&r->lock);
    return c;
}

static void end_cancelled(mlxcel_engine *e) {
    double now = mx_now_s();
    for (mlxcel_request *r = e->requests; r; r = r->next) {
        bool late = r->deadline_s > 0 && now > r->deadline_s;
        if (r->n_live == 0 || (!late && !is_cancelled(r))) continue;
        if (late) {
            mx_err err = {0};
            mx_err_set(&err, MX_TIMEOUT, "the request's time limit of %g s is over",
                       round(r->p.timeout_s * 1e3) / 1e3);
            request_fail(e, r, &err);
            continue;
        }
        for (int32_t i = 0; i < r->p.n_choices; i++) {
            seq_finish(e, &r->seqs[i], MLXCEL_FINISH_CANCEL, NULL);
        }
        pthread_mutex_lock(&e->lock);
        e->stats.n_cancelled++;
        pthread_mutex_unlock(&e->lock);
    }
}

// Sequences that ended leave the list; requests without live choices get their last event.
static void retire(mlxcel_engine *e) {
    int32_t n = 0;
    for (int32_t i = 0; i < e->n_running; i++) {
        if (!e->running[i]->finished) e->running[n++] = e->running[i];
    }
    e->n_running = n;
    for (mlxcel_request **at = &e->requests; *at;) {
        mlxcel_request *r = *at;
        if (r->n_live > 0) {
            at = &r->next;
            continue;
        }
        *at = r->next;
        pthread_mutex_lock(&e->lock);
        e->n_open--;
        if (r->err.status != MX_OK) e->stats.n_errors++;
        pthread_mutex_unlock(&e->lock);
        request_done(r);
        request_release(r);
    }
}

// ---- One step ----------------------------------------------------------------------------------

// Choices share the prompt's state: the first one computes it, the others begin with its pages.
static bool follows(const mlxcel_engine *e, const eng_seq *s) {
    const eng_seq *first = &s->req->seqs[0];
    bool paged = mx_kv_get_spec(e->kv)->storage == MX_KV_PAGED;
    return paged && s->choice > 0 && !s->req->p.score && !first->finished && s->n_prompt > 1;
}

static bool take_fork(mlxcel_engine *e, eng_seq *s) {
    const eng_seq *first = &s->req->seqs[0];
    if (!follows(e, s) || first->kv < 0 || first->n_past < s->n_prompt) return false;
    if (!mx_kv_fork(e->kv, first->kv, s->kv, s->n_prompt - 1)) return false;
    s->n_past = s->n_prompt - 1; // the last token is left to run: its logits are needed
    return true;
}

static void describe(mlxcel_engine *e) {
    int32_t score_rows = MX_MAX(1, e->caps.max_out / MX_MAX(1, e->params.max_batch));
    for (int32_t i = 0; i < e->n_running; i++) {
        const eng_seq *s = e->running[i];
        static const int32_t levels[] = {1, 2, 0}; // normal, high, low
        e->row_seq[i] = (sched_seq){.phase = s->phase,
                                    .n_left = s->n_tokens - s->n_past,
                                    .n_past = s->n_past,
                                    .priority = levels[s->req->p.priority],
                                    .arrival = s->arrival,
                                    .wait_ticks = s->wait_ticks,
                                    .held = s->phase == SCHED_WAITING && follows(e, s) &&
                                            s->req->seqs[0].n_past < s->n_prompt,
                                    .max_chunk = s->req->p.score ? score_rows : 0};
    }
}

static int64_t free_positions(const mlxcel_engine *e) {
    mx_kv_stats st;
    mx_kv_get_stats(e->kv, &st);
    int64_t least = INT64_MAX;
    for (int32_t g = 0; g < e->caps.n_groups; g++) {
        least = MX_MIN(least, (int64_t)st.free_pages[g] * e->caps.page_tokens[g]);
    }
    for (int32_t i = 0; i < e->n_running; i++) { // what they copy before they write
        int32_t kv = e->running[i]->kv;
        if (kv >= 0 && mx_kv_tail_shared(e->kv, kv)) least -= e->caps.page_tokens[0];
    }
    int64_t plenty = (int64_t)e->caps.max_tok + (int64_t)e->caps.max_range * e->caps.page_tokens[0];
    if (e->prefix && least < plenty) {
        least += (int64_t)mx_prefix_evictable(e->prefix) * e->caps.page_tokens[0];
    }
    return least;
}

static void restore_prefix(mlxcel_engine *e, eng_seq *s) {
    mlxcel_request *r = s->req;
    if (!e->prefix || !r->p.cache_prompt || r->p.score) return;
    const char *why;
    s->n_past = mx_prefix_restore(e->prefix, r->salt, s->tokens, s->n_tokens, s->kv, &why);
    mx_log(MX_LOG_DEBUG, "request %llu: prefix cache: %d of %d tokens (%s)",
           (unsigned long long)r->id, s->n_past, s->n_tokens, why);
    if (!r->started && s->choice == 0) {
        r->t.n_cached = s->n_past;
        pthread_mutex_lock(&e->lock);
        e->stats.prompt_tokens_cached += (uint64_t)s->n_past;
        pthread_mutex_unlock(&e->lock);
    }
}

static void admit(mlxcel_engine *e, eng_seq *s) {
    s->kv = mx_kv_seq_open(e->kv);
    CHECK(s->kv >= 0);
    s->phase = SCHED_PREFILLING;
    mlxcel_request *r = s->req;
    if (!take_fork(e, s)) restore_prefix(e, s);
    if (!r->started) {
        r->started = true;
        r->started_s = mx_now_s();
        r->t.queue_ms = (r->started_s - r->submitted_s) * 1e3;
        r->t.n_prompt = (int32_t)r->p.n_ids;
    }
}

// Back to the queue: its state is dropped and computed again later, from prompt and generated.
static void preempt(mlxcel_engine *e, eng_seq *s) {
    mx_kv_seq_close(e->kv, s->kv);
    s->kv = -1;
    s->n_past = 0;
    s->phase = SCHED_WAITING;
    pthread_mutex_lock(&e->lock);
    e->stats.preemptions++;
    pthread_mutex_unlock(&e->lock);
}

// Tokens for a sequence that was admitted as new and then found to begin n_past positions in.
static int32_t deep_chunk(const mlxcel_engine *e, int32_t n_past) {
    const sched_config *c = &e->sched;
    if (c->step_s <= 0) return INT32_MAX;
    return MX_MAX(sched_chunk_fit(&c->cost, c->step_s - c->cost.fixed_s, n_past), 16);
}

// How many run and wait, for whoever asks.
static void count_sequences(mlxcel_engine *e) {
    int32_t waiting = 0, prefilling = 0, live = 0;
    for (int32_t i = 0; i < e->n_running; i++) {
        if (e->running[i]->finished) continue; // about to retire
        live++;
        waiting += e->running[i]->phase == SCHED_WAITING;
        prefilling += e->running[i]->phase == SCHED_PREFILLING;
    }
    pthread_mutex_lock(&e->lock);
    e->stats.n_running = live - waiting;
    e->stats.n_queued = waiting;
    e->stats.n_prefilling = prefilling;
    pthread_mutex_unlock(&e->lock);
}

// A prefill step that others, who decode, make way for.
static void count_grant(mlxcel_engine *e) {
    bool decoding = false;
    for (int32_t i = 0; i < e->n_running; i++) decoding |= e->running[i]->phase == SCHED_DECODING;
    pthread_mutex_lock(&e->lock);
    e->stats.prefill_grants += decoding;
    pthread_mutex_unlock(&e->lock);
}

// Nothing can run and nothing will change: what came first cannot have the memory it needs.
static void refuse_first(mlxcel_engine *e) {
    const eng_seq *first = NULL;
    for (int32_t i = 0; i < e->n_running; i++) {
        if (!first || e->running[i]->arrival < first->arrival) first = e->running[i];
    }
    const mlxcel_request *r = first->req;
    mx_kv_stats st;
    mx_kv_get_stats(e->kv, &st);
    mx_err err = {0};
    mx_err_set(&err, MX_NOMEM,
               "KV cache: request (%zu tokens) cannot go on at position %d: %d of %d pages of %d "
               "tokens are free and no other request holds any",
               r->p.n_ids, first->n_past, st.free_pages[0], st.n_pages[0], e->caps.page_tokens[0]);
    mx_log(MX_LOG_ERROR, "request %llu: %s", (unsigned long long)r->id, err.msg);
    request_fail(e, first->req, &err);
}

// The rows of the next step; 0 when there are none.
static int32_t decide(mlxcel_engine *e, step_pick *picks) {
    for (;;) {
        describe(e);
        sched_state s = {.seqs = e->row_seq,
                         .n_seqs = e->n_running,
                         .decode_ticks = e->decode_ticks,
                         .free_positions = free_positions(e),
                         .page_tokens = e->caps.page_tokens[0]};
        sched_decision d = sched_decide(&e->sched, &s, e->row_tok, e->row_admit);
        if (d.preempt >= 0) {
            preempt(e, e->running[d.preempt]);
            continue;
        }
        int32_t n = 0, n_admitted = 0;
        for (int pass = 0; pass < 2; pass++) { // decode rows first
            for (int32_t i = 0; i < e->n_running; i++) {
                eng_seq *q = e->running[i];
                if (e->row_admit[i] && q->phase == SCHED_WAITING) {
                    admit(e, q);
                    n_admitted++;
                }
                bool decode = q->phase == SCHED_DECODING;
                if (e->row_tok[i] == 0 || decode != (pass == 0)) continue;
                int32_t left = q->n_tokens - q->n_past; // less than asked for after a cache hit
                if (e->row_admit[i] && q->n_past > 0) left = MX_MIN(left, deep_chunk(e, q->n_past));
                picks[n++] = (step_pick){q, MX_MIN(e->row_tok[i], left), -1};
            }
        }
        for (int32_t i = 0; i < e->n_running; i++) {
            eng_seq *q = e->running[i];
            q->wait_ticks = q->phase == SCHED_WAITING ? q->wait_ticks + 1 : 0;
        }
        // an interval without prefill steps is INT32_MAX, which is never passed
        e->decode_ticks = d.n_prefill_rows > 0 ? 0 : MX_MIN(e->decode_ticks, INT32_MAX - 1) + 1;
        if (d.n_prefill_rows > 0) count_grant(e);
        if (n == 0 && n_admitted == 0 && e->n_running > 0) refuse_first(e);
        return n;
    }
}

static void update_phases(mlxcel_engine *e) {
    for (int32_t i = 0; i < e->n_running; i++) {
        eng_seq *s = e->running[i];
        if (s->phase == SCHED_WAITING || s->finished) continue;
        bool decoding = s->n_past >= s->n_prompt && s->n_tokens - s->n_past <= 1;
        if (decoding && s->choice == 0 && s->req->p.n_choices > 1 && !s->req->led) {
            s->req->led = true; // once: the other choices begin now, they need one row each
            e->decode_ticks = e->sched.grant_interval;
        }
        s->phase = decoding ? SCHED_DECODING : SCHED_PREFILLING;
    }
}

// A step that failed ends the requests that were in it; others go on.
static void fail_picks(mlxcel_engine *e, const step_pick *picks, int32_t n, const mx_err *err) {
    for (int32_t i = 0; i < n; i++) {
        if (!picks[i].seq->finished) request_fail(e, picks[i].seq->req, err);
    }
}

// The rows that may run again before their tokens are known: every row of the flight decodes with
// its token chosen on the device, nobody waits, nobody reaches a limit with the token in flight.
static int32_t pipelined_picks(mlxcel_engine *e, const flight *f, step_pick *picks) {
    if (!e->pipeline || f->n_rows != e->n_running) return 0;
    int32_t n = 0;
    for (int32_t i = 0; i < f->n_rows; i++) {
        const flight_row *r = &f->rows[i];
        const eng_seq *s = r->seq;
        int32_t n_new = s->n_tokens - s->n_prompt;
        bool limit = (s->req->p.max_tokens >= 0 && n_new + 1 >= s->req->p.max_tokens) ||
                     s->n_tokens + 1 >= e->info.ctx_size;
        if (r->n_out != 1 || r->host || r->sync || s->finished || limit || is_cancelled(s->req))
            return 0;
        picks[n++] = (step_pick){r->seq, 1, r->out_row};
    }
    return n;
}

static void finish_flight(mlxcel_engine *e, flight *f) {
    mx_err err = {0};
    step_finish(e, f, &err);
    update_phases(e);
}

// Runs one step; with a pipeline the next one is submitted before this one's tokens are read.
static void run_steps(mlxcel_engine *e, step_pick *picks) {
    mx_err err = {0};
    int32_t n = decide(e, picks);
    if (n == 0) return;
    flight *f = &e->flights[0];
    mx_status st = step_submit(e, f, picks, n, &err);
    if (st != MX_OK) {
        step_note(e, st);
        fail_picks(e, picks, n, &err);
        return;
    }
    count_sequences(e); // who reads a token of this step and asks, must be told that it runs
    for (int cur = 0;; cur = 1 - cur) {
        f = &e->flights[cur];
        n = pipelined_picks(e, f, picks);
        flight *next = &e->flights[1 - cur];
        mx_status st_next = n > 0 ? step_submit(e, next, picks, n, &err) : MX_OK;
        bool ahead = n > 0 && st_next == MX_OK;
        if (st_next == MX_DEVICE) { // without memory it is asked for again, by whoever decides
            mx_log(MX_LOG_WARN, "a decode step could not be started ahead: %s; it is tried again",
                   err.msg);
        }
        finish_flight(e, f);
        if (!ahead) return;
        e->stats.steps_decode_pipelined++;
    }
}

// ---- The thread
// ----------------------------------------------------------------------------------

static void put_uploads(mlxcel_engine *e, mlxcel_stats *s) {
    mx_load_stats l;
    mx_model_get_load_stats(e->model, &l);
    s->upload_tensors = (uint64_t)l.n_tensors;
    s->upload_bytes = l.bytes;
    if (e->facts.kind != MX_DEVICE_CUDA) return;
    mx_cuda_counters c;
    mx_cuda_counters_get(e->backend, &c);
    s->upload_bytes = c.upload_bytes;
    s->upload_read_s = c.upload_read_s;
    s->upload_wait_s = c.upload_wait_s;
    s->upload_ring_s = c.ring_open_s;
    s->upload_alloc_s = c.upload_alloc_s;
    s->upload_total_s = c.upload_total_s;
    s->upload_pinned = c.pinned;
}

static void publish_stats(mlxcel_engine *e) {
    mx_enc_stats es;
    mx_kv_stats ks;
    mx_enc_get_stats(e->enc, &es);
    mx_kv_get_stats(e->kv, &ks);
    count_sequences(e);
    pthread_mutex_lock(&e->lock);
    mlxcel_stats *s = &e->stats;
    s->plans_made = es.plans_made;
    s->plan_hits = es.plan_hits;
    s->plan_evictions = es.plan_evictions;
    s->buffers_prefill = es.buffers[MX_PHASE_PREFILL];
    s->buffers_decode = es.buffers[MX_PHASE_DECODE] + es.buffers[MX_PHASE_DECODE_SYNC];
    s->commits_ops = es.commits[MX_COMMIT_OPS];
    s->commits_bytes = es.commits[MX_COMMIT_BYTES];
    s->commits_end = es.commits[MX_COMMIT_END];
    s->commits_sync = es.commits[MX_COMMIT_SYNC];
    s->kv_pages = (uint64_t)ks.n_pages[0];
    s->kv_pages_free = (uint64_t)ks.free_pages[0];
    s->kv_page_tokens = (uint64_t)e->caps.page_tokens[0];
    s->kv_pool_bytes = ks.pool_bytes;
    s->kv_used_bytes = ks.used_bytes;
    s->arena_bytes = es.arena_bytes;
    if (e->prefix) {
        mx_prefix_stats ps;
        mx_prefix_get_stats(e->prefix, &ps);
        s->cache_hits = ps.hits;
        s->cache_misses = ps.misses;
        s->cache_tokens = ps.tokens_reused;
        s->cache_evictions = ps.evictions;
        s->cache_bytes = ps.bytes;
        s->cache_entries = ps.entries;
    }
    es.slow[MX_SLOW_HOST_SAMPLING] = e->n_host_sampled;
    for (int i = 0; i < MX_SLOW_COUNT; i++) {
        if (es.slow[i] && !s->slow[i]) {
            mx_log(mx_slow_level((mx_slow)i), "slow path: %s: %s", mx_slow_name((mx_slow)i),
                   mx_slow_what((mx_slow)i));
        }
        s->slow[i] = es.slow[i];
    }
    s->peak_bytes = MX_MAX(s->peak_bytes, es.arena_peak_bytes + ks.used_bytes);
    put_uploads(e, s);
    pthread_mutex_unlock(&e->lock);
}

// Takes the mail; sleeps while there is nothing to do. False when the engine must stop.
static bool take_mail(mlxcel_engine *e) {
    pthread_mutex_lock(&e->lock);
    while (!e->stop && !e->mail_head && e->n_running == 0 && !e->reset_cache) {
        pthread_cond_wait(&e->wake, &e->lock);
    }
    mlxcel_request *mail = e->mail_head;
    e->mail_head = e->mail_tail = NULL;
    bool stop = e->stop, reset = e->reset_cache;
    e->reset_cache = false;
    pthread_mutex_unlock(&e->lock);
    if (reset && e->prefix) mx_prefix_reset(e->prefix);
    while (mail) {
        mlxcel_request *next = mail->next;
        take_request(e, mail);
        mail = next;
    }
    return !stop;
}

static void cancel_all(mlxcel_engine *e) {
    for (mlxcel_request *r = e->requests; r; r = r->next) {
        for (int32_t i = 0; i < r->p.n_choices; i++) {
            seq_finish(e, &r->seqs[i], MLXCEL_FINISH_CANCEL, NULL);
        }
    }
    retire(e);
}

void *engine_main(void *arg) {
    mlxcel_engine *e = arg;
    mx_err err = {0};
    mx_status st = engine_load(e, &err);
    if (st == MX_OK) publish_stats(e);
    pthread_mutex_lock(&e->lock);
    e->open_err = err;
    e->open_err.status = st;
    e->is_ready = true;
    pthread_cond_broadcast(&e->ready);
    pthread_mutex_unlock(&e->lock);
    step_pick *picks = st == MX_OK ? mx_calloc((size_t)e->caps.max_range, sizeof *picks) : NULL;
    while (st == MX_OK && take_mail(e)) {
        end_cancelled(e);
        publish_stats(e); // before a last event goes out: who reads it finds it counted
        retire(e);
        run_steps(e, picks);
        publish_stats(e);
        retire(e);
    }
    if (st == MX_OK) {
        take_mail(e);
        cancel_all(e);
    }
    mx_free(picks);
    engine_unload(e);
    return NULL;
}
