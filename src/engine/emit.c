// From a sampled token to text, events and the end of a choice. Engine thread only. The order of
// the finish step: end tokens, stop strings, max_tokens, context.
#include "engine/engine_int.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

static uint64_t draw_seed(mlxcel_engine *e) {
    e->seed_state = e->seed_state * 6364136223846793005ull + 1442695040888963407ull;
    return e->seed_state >> 32; // fits every JSON number
}

static void fill_sampling(const mlxcel_engine *e, eng_seq *s, const mlxcel_sampling *p,
                          uint64_t seed) {
    mx_sampling_init(&s->sampling);
    s->sampling.temperature = p->temperature;
    s->sampling.top_k = p->top_k;
    s->sampling.top_p = p->top_p;
    s->sampling.min_p = p->min_p;
    s->sampling.typical_p = p->typical_p;
    s->sampling.top_n_sigma = p->top_n_sigma;
    s->sampling.repeat_penalty = p->repeat_penalty;
    s->sampling.repeat_last_n = p->repeat_last_n;
    s->sampling.presence_penalty = p->presence_penalty;
    s->sampling.frequency_penalty = p->frequency_penalty;
    s->sampling.dry_multiplier = p->dry_multiplier;
    s->sampling.dry_base = p->dry_base;
    s->sampling.dry_allowed_length = p->dry_allowed_length;
    s->sampling.dry_last_n = p->dry_last_n;
    s->sampling.xtc_probability = p->xtc_probability;
    s->sampling.xtc_threshold = p->xtc_threshold;
    s->sampling.seed = seed;
    s->sampling.choice = (uint32_t)s->choice;
    if (p->dry_multiplier > 0) {
        s->sampling.dry_breakers = e->dry_breakers;
        s->sampling.n_dry_breakers = e->n_dry_breakers;
    }
    s->sampling.bias = s->req->bias;
    s->sampling.n_bias = p->n_bias;
}

// Tokens that hold a newline, a colon, a quotation mark or an asterisk; found at first use.
static void find_breakers(mlxcel_engine *e) {
    if (e->dry_breakers) return;
    e->dry_breakers = mx_alloc((size_t)e->info.n_vocab * sizeof *e->dry_breakers);
    for (int32_t id = 0; id < e->info.n_vocab; id++) {
        mx_str s = mx_tokenizer_piece(e->tok, id);
        bool found = false;
        for (size_t i = 0; i < s.n; i++) found |= strchr("\n:\"*", s.p[i]) && s.p[i];
        if (found) e->dry_breakers[e->n_dry_breakers++] = id;
    }
}

// Tokens that the sequence may reach: prompt and max_tokens, at most the context.
static int32_t life_tokens(const mlxcel_engine *e, const mlxcel_request *r) {
    int64_t n = (int64_t)r->p.n_ids + (r->p.max_tokens < 0 ? e->info.ctx_size : r->p.max_tokens);
    return (int32_t)MX_MIN(n, (int64_t)e->info.ctx_size) + 1;
}

mx_status seq_open(mlxcel_engine *e, mlxcel_request *r, int32_t choice, mx_err *err) {
    eng_seq *s = &r->seqs[choice];
    uint64_t seed = r->p.sampling.has_seed ? r->p.sampling.seed
                    : choice > 0           ? r->seqs[0].sampling.seed
                                           : draw_seed(e);
    *s = (eng_seq){.req = r, .choice = choice, .kv = -1, .phase = SCHED_WAITING};
    s->arrival = e->arrivals++;
    if (r->p.sampling.dry_multiplier > 0) find_breakers(e);
    fill_sampling(e, s, &r->p.sampling, seed);
    MX_TRY(mx_sampling_check(&s->sampling, e->info.n_vocab, err));
    s->cap_tokens = life_tokens(e, r);
    s->tokens = mx_alloc((size_t)s->cap_tokens * sizeof *s->tokens);
    memcpy(s->tokens, r->ids, r->p.n_ids * sizeof *s->tokens);
    s->n_tokens = s->n_prompt = (int32_t)r->p.n_ids;
    s->detok = mx_detok_open(e->tok, !r->p.show_special);
    stop_init(&s->stop, r->p.stops, r->p.n_stops);
    if (r->p.reasoning_close)
        stop_skip_reasoning(&s->stop, r->p.reasoning_open, r->p.reasoning_close);
    mx_buf_init(&s->text, 0);
    return MX_OK;
}

void seq_close(mlxcel_engine *e, eng_seq *s) {
    if (s->kv >= 0) mx_kv_seq_close(e->kv, s->kv);
    s->kv = -1;
    mx_free(s->tokens);
    s->tokens = NULL;
    mx_detok_close(s->detok);
    s->detok = NULL;
    stop_free(&s->stop);
    mx_buf_free(&s->text);
}

bool seq_wants_logits(const eng_seq *s) {
    const mlxcel_request_params *p = &s->req->p;
    return p->score || p->n_logprobs >= 0 || p->hash_logits;
}

mx_sample_history seq_history(const mlxcel_engine *e, const eng_seq *s, int32_t n_ahead) {
    const mlxcel_sampling *p = &s->req->p.sampling;
    int32_t n_new = s->n_tokens - s->n_prompt + n_ahead;
    bool ban = p->ignore_eos || n_new < p->min_tokens;
    return (mx_sample_history){.prompt = s->tokens,
                               .n_prompt = (size_t)s->n_prompt,
                               .generated = s->tokens + s->n_prompt,
                               .n_generated = (size_t)n_new,
                               .banned = ban ? e->eos_ids : NULL,
                               .n_banned = ban ? (size_t)e->n_eos : 0};
}

static void mix_hash(uint64_t *h, const void *p, size_t n) {
    *h = mx_hash64(p, n, *h + 1);
}

// Fills one token with its log-probabilities when they were asked for. False: the row has none.
static bool describe_token(mlxcel_engine *e, event_node *n, int32_t index, int32_t id,
                           const float *logits, int32_t k) {
    mlxcel_token *t = &n->tokens[index];
    *t = (mlxcel_token){.id = id};
    if (!logits || k < 0) return true;
    int32_t ids[128];
    float lp[128];
    bool any = mx_logprobs(e->sampler, logits, id, &t->logprob, k, ids, lp);
    mlxcel_top_logprob *top = n->tops + (size_t)index * (size_t)k;
    for (int32_t i = 0; i < k; i++) top[i] = (mlxcel_top_logprob){ids[i], lp[i]};
    t->top = top;
    t->n_top = k;
    return any;
}

static void post_text(mlxcel_engine *e, eng_seq *s, int32_t id, const float *logits) {
    mlxcel_request *r = s->req;
    event_node *n = request_event(r, MLXCEL_EVENT_TEXT, s->choice);
    int32_t k = r->p.n_logprobs;
    n->cap_tokens = 1;
    n->tokens = mx_calloc(1, sizeof *n->tokens);
    n->tops = k > 0 ? mx_calloc((size_t)k, sizeof *n->tops) : NULL;
    describe_token(e, n, 0, id, logits, k); // chosen from the row, which has logits
    n->tokens[0].time_s = mx_now_s();
    n->ev.n_tokens = 1;
    n->ev.timings = r->t;
    n->ev.timings.n_decoded = s->n_tokens - s->n_prompt;
    n->ev.timings.decode_ms = (mx_now_s() - r->first_s) * 1e3;
    mx_buf_add(&n->text, s->text.data, s->text.n);
    request_post(r, n);
}

// What the detokenizer and the stops hold back. Returns the index of a stop in it, or -1.
static int post_tail(eng_seq *s) {
    mx_buf tail;
    mx_buf_init(&tail, 0);
    mx_buf_clear(&s->text);
    mx_detok_flush(s->detok, &tail);
    int which = stop_push(&s->stop, (mx_str){tail.data, tail.n}, &s->text);
    if (which < 0) which = stop_flush(&s->stop, &s->text);
    mx_buf_free(&tail);
    if (s->text.n == 0) return which;
    event_node *n = request_event(s->req, MLXCEL_EVENT_TEXT, s->choice);
    mx_buf_add(&n->text, s->text.data, s->text.n);
    request_post(s->req, n);
    return which;
}

void seq_finish(mlxcel_engine *e, eng_seq *s, mlxcel_finish f, const char *stop_word) {
    mlxcel_request *r = s->req;
    if (s->finished) return;
    s->finished = true;
    if (f != MLXCEL_FINISH_STOP && f != MLXCEL_FINISH_ERROR && s->detok) {
        int which = post_tail(s);
        if (which >= 0 && f != MLXCEL_FINISH_CANCEL) {
            f = MLXCEL_FINISH_STOP;
            stop_word = r->stops[which];
        }
    }
    if (s->choice == 0) r->first_finish = f;
    double now = mx_now_s();
    r->t.n_decoded += s->n_tokens - s->n_prompt;
    if (r->first_s > 0) r->t.decode_ms = (now - r->first_s) * 1e3;
    event_node *n = request_event(r, MLXCEL_EVENT_CHOICE, s->choice);
    n->ev.finish = f;
    n->ev.stop_word = stop_word; // the request's own
    n->ev.seed = s->sampling.seed;
    n->ev.token_hash = s->token_hash;
    n->ev.logit_hash = s->logit_hash;
    n->ev.timings = r->t;
    request_post(r, n);
    seq_close(e, s);
    r->n_live--;
}

static bool is_end(const mlxcel_engine *e, int32_t id) {
    for (int32_t i = 0; i < e->n_eos; i++) {
        if (e->eos_ids[i] == id) return true;
    }
    return false;
}

void seq_accept(mlxcel_engine *e, eng_seq *s, int32_t id, const float *logits) {
    mlxcel_request *r = s->req;
    pthread_mutex_lock(&e->lock);
    e->stats.generated_tokens++;
    pthread_mutex_unlock(&e->lock);
    if (r->first_s == 0) {
        r->first_s = mx_now_s();
        r->t.first_token_ms = (r->first_s - r->submitted_s) * 1e3;
    }
    if (logits && r->p.hash_logits) {
        mix_hash(&s->logit_hash, logits, (size_t)e->info.n_vocab * sizeof *logits);
    }
    mix_hash(&s->token_hash, &id, sizeof id);
    s->tokens[s->n_tokens++] = id;
    if (is_end(e, id) && !r->p.sampling.ignore_eos && !r->p.run_past_end) {
        seq_finish(e, s, MLXCEL_FINISH_EOS, NULL);
        return;
    }
    mx_buf delta;
    mx_buf_init(&delta, 0);
    mx_buf_clear(&s->text);
    mx_detok_push(s->detok, id, &delta);
    int which = stop_push(&s->stop, (mx_str){delta.data, delta.n}, &s->text);
    mx_buf_free(&delta);
    post_text(e, s, id, logits);
    int32_t n_new = s->n_tokens - s->n_prompt;
    if (which >= 0) {
        seq_finish(e, s, MLXCEL_FINISH_STOP, r->stops[which]);
    } else if ((r->p.max_tokens >= 0 && n_new >= r->p.max_tokens) ||
               s->n_tokens >= e->info.ctx_size ||
               (r->p.predict_s > 0 && mx_now_s() - r->first_s >= r->p.predict_s)) {
        seq_finish(e, s, MLXCEL_FINISH_LENGTH, NULL);
    }
}

void seq_fail_row(mlxcel_engine *e, eng_seq *s, int32_t pos) {
    mx_err_set(&s->req->err, MX_INTERNAL, "no finite logit at position %d", pos);
    seq_finish(e, s, MLXCEL_FINISH_ERROR, NULL);
}

void seq_score(mlxcel_engine *e, eng_seq *s, int32_t first_pos, int32_t n, const float *logits) {
    mlxcel_request *r = s->req;
    int32_t k = MX_MAX(r->p.n_logprobs, 0);
    int32_t last = MX_MIN(first_pos + n, s->n_prompt - 1); // row p predicts token p + 1
    if (last <= first_pos) return;
    event_node *ev = request_event(r, MLXCEL_EVENT_SCORE, s->choice);
    size_t count = (size_t)(last - first_pos);
    ev->tokens = mx_calloc(count, sizeof *ev->tokens);
    ev->tops = k > 0 ? mx_calloc(count * (size_t)k, sizeof *ev->tops) : NULL;
    bool any = true;
    size_t i = 0;
    for (; any && i < count; i++) {
        const float *row = logits + i * (size_t)e->info.n_vocab;
        if (r->p.hash_logits) mix_hash(&s->logit_hash, row, (size_t)e->info.n_vocab * sizeof *row);
        any = describe_token(e, ev, (int32_t)i, s->tokens[first_pos + (int32_t)i + 1], row, k);
    }
    if (!any) i--;
    ev->ev.n_tokens = (int32_t)i;
    request_post(r, ev);
    if (!any) seq_fail_row(e, s, first_pos + (int32_t)i);
}
