// Requests: copies of what the submitter asked, a queue of events, two references (submitter and
// engine). The queue is the only thing two threads share; one lock a request.
#include "engine/engine_int.h"

#include "base/mem.h"

#include <math.h>
#include <string.h>
#include <time.h>

void mlxcel_sampling_init(mlxcel_sampling *s) {
    *s = (mlxcel_sampling){.top_p = 1,
                           .typical_p = 1,
                           .top_n_sigma = -1,
                           .repeat_penalty = 1,
                           .repeat_last_n = 64,
                           .dry_base = 1.75f,
                           .dry_allowed_length = 2,
                           .dry_last_n = 64,
                           .xtc_threshold = 0.1f};
}

void mlxcel_request_params_init(mlxcel_request_params *p) {
    *p = (mlxcel_request_params){.max_tokens = -1, .n_choices = 1, .n_logprobs = -1};
    mlxcel_sampling_init(&p->sampling);
    p->cache_prompt = true;
}

const char *mlxcel_finish_name(mlxcel_finish f) {
    static const char *const names[] = {"none", "stop", "stop", "length", "cancelled", "error"};
    return (unsigned)f < MX_COUNT(names) ? names[f] : "?";
}

void engine_error_out(mlxcel_error *out, const mx_err *err) {
    if (!out) return;
    *out = (mlxcel_error){.status = err->status, .http = mx_status_http(err->status)};
    memcpy(out->message, err->msg, sizeof out->message);
}

// ---- Events ----------------------------------------------------------------------------------

event_node *request_event(mlxcel_request *r, mlxcel_event_kind kind, int32_t choice) {
    (void)r;
    event_node *n = mx_calloc(1, sizeof *n);
    n->ev.kind = kind;
    n->ev.choice = choice;
    mx_buf_init(&n->text, 0);
    return n;
}

static void free_event(event_node *n) {
    if (!n) return;
    mx_buf_free(&n->text);
    mx_free(n->tokens);
    mx_free(n->tops);
    mx_free(n);
}

// Adds b's text and tokens to a (same kind and choice, neither read).
static void merge_events(event_node *a, const event_node *b) {
    mx_buf_add(&a->text, b->text.data, b->text.n);
    size_t na = (size_t)a->ev.n_tokens, nb = (size_t)b->ev.n_tokens, n = na + nb;
    if (n > a->cap_tokens) {
        a->cap_tokens = n * 2;
        a->tokens = mx_realloc(a->tokens, a->cap_tokens * sizeof *a->tokens);
    }
    if (nb) memcpy(a->tokens + na, b->tokens, nb * sizeof *a->tokens);
    a->ev.n_tokens = (int32_t)n;
    if (nb) a->ev.timings = b->ev.timings;
}

void request_post(mlxcel_request *r, event_node *n) {
    pthread_mutex_lock(&r->lock);
    event_node *t = r->tail;
    mlxcel_event_kind kind = n->ev.kind;
    bool plain = n->ev.kind == MLXCEL_EVENT_TEXT && r->p.n_logprobs < 0;
    bool progress = n->ev.kind == MLXCEL_EVENT_PROMPT;
    if (t && t->ev.kind == n->ev.kind && t->ev.choice == n->ev.choice && (plain || progress)) {
        if (plain)
            merge_events(t, n);
        else
            t->ev.n_prompt_done = n->ev.n_prompt_done;
        free_event(n);
    } else {
        if (t)
            t->next = n;
        else
            r->head = n;
        r->tail = n;
    }
    pthread_cond_signal(&r->wake);
    if (r->p.notify) r->p.notify(r->p.user, kind); // under the lock: request_free cannot pass it
    pthread_mutex_unlock(&r->lock);
}

void request_done(mlxcel_request *r) {
    event_node *n = request_event(r, MLXCEL_EVENT_DONE, 0);
    n->ev.finish = r->first_finish;
    n->ev.timings = r->t;
    if (r->err.status != MX_OK) engine_error_out(&n->ev.error, &r->err);
    if (r->seqs) {
        n->ev.seed = r->seqs[0].sampling.seed;
        n->ev.token_hash = r->seqs[0].token_hash;
        n->ev.logit_hash = r->seqs[0].logit_hash;
    }
    pthread_mutex_lock(&r->lock);
    r->finished = true;
    pthread_mutex_unlock(&r->lock);
    request_post(r, n);
}

static bool wait_event(mlxcel_request *r, double timeout_s) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    if (timeout_s > 0) {
        double whole = floor(timeout_s);
        until.tv_sec += (time_t)whole;
        until.tv_nsec += (long)((timeout_s - whole) * 1e9);
        if (until.tv_nsec >= 1000000000) {
            until.tv_sec++;
            until.tv_nsec -= 1000000000;
        }
    }
    while (!r->head) {
        if (timeout_s == 0) return false;
        if (timeout_s < 0)
            pthread_cond_wait(&r->wake, &r->lock);
        else if (pthread_cond_timedwait(&r->wake, &r->lock, &until) != 0)
            return r->head != NULL;
    }
    return true;
}

bool mlxcel_next_event(mlxcel_request *r, double timeout_s, mlxcel_event *out) {
    free_event(r->read);
    r->read = NULL;
    if (r->done_read) return false;
    pthread_mutex_lock(&r->lock);
    bool got = wait_event(r, timeout_s);
    if (got) {
        r->read = r->head;
        r->head = r->head->next;
        if (!r->head) r->tail = NULL;
    }
    pthread_mutex_unlock(&r->lock);
    if (!got) return false;
    event_node *n = r->read;
    n->ev.text = n->text.data ? n->text.data : "";
    n->ev.n_text = n->text.n;
    n->ev.tokens = n->tokens;
    r->done_read = n->ev.kind == MLXCEL_EVENT_DONE;
    *out = n->ev;
    return true;
}

// ---- Life ------------------------------------------------------------------------------------

static mx_status copy_params(mlxcel_request *r, const mlxcel_request_params *p, mx_err *err) {
    r->p = *p;
    r->ids = mx_alloc(p->n_ids * sizeof *r->ids);
    if (p->n_ids) memcpy(r->ids, p->ids, p->n_ids * sizeof *r->ids);
    r->p.ids = r->ids;
    r->bias = mx_alloc(p->sampling.n_bias * sizeof *r->bias);
    for (size_t i = 0; i < p->sampling.n_bias; i++) {
        r->bias[i] = (mx_logit_bias){p->sampling.bias[i].id, p->sampling.bias[i].bias};
    }
    r->stops = mx_calloc(p->n_stops, sizeof *r->stops);
    for (size_t i = 0; i < p->n_stops; i++) {
        if (!p->stops[i] || !p->stops[i][0]) {
            return mx_err_set(err, MX_INVALID, "stop string %zu is empty", i);
        }
        if (!mx_utf8_valid(mx_str_of(p->stops[i]))) { // it would end the text within a character
            return mx_err_set(err, MX_INVALID, "stop string %zu is not valid UTF-8", i);
        }
        r->stops[i] = mx_strdup(p->stops[i]);
    }
    r->p.stops = (const char *const *)r->stops;
    if (p->cache_salt) r->salt = mx_hash64(p->cache_salt, strlen(p->cache_salt), 1);
    r->p.cache_salt = NULL;
    return MX_OK;
}

static void free_request(mlxcel_request *r) {
    while (r->head) {
        event_node *n = r->head;
        r->head = n->next;
        free_event(n);
    }
    free_event(r->read);
    for (size_t i = 0; r->stops && i < r->p.n_stops; i++) mx_free(r->stops[i]);
    mx_free(r->stops);
    mx_free(r->ids);
    mx_free(r->bias);
    mx_free(r->seqs);
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->wake);
    mx_free(r);
}

void request_release(mlxcel_request *r) {
    pthread_mutex_lock(&r->lock);
    int32_t left = --r->refs;
    pthread_mutex_unlock(&r->lock);
    if (left == 0) free_request(r);
}

static mx_status check_request(const mlxcel_engine *e, const mlxcel_request_params *p,
                               mx_err *err) {
    if (p->n_ids == 0) {
        return mx_err_set(err, MX_INVALID, "Empty prompt: request has no input tokens to process");
    }
    int64_t room = (int64_t)e->info.ctx_size - (p->score ? 0 : 1);
    if ((int64_t)p->n_ids > room) {
        return mx_err_set(err, MX_CONTEXT,
                          "request (%zu tokens) exceeds the available context size (%d tokens), "
                          "try increasing it",
                          p->n_ids, e->info.ctx_size);
    }
    for (size_t i = 0; i < p->n_ids; i++) {
        if (p->ids[i] >= 0 && p->ids[i] < e->info.n_vocab) continue;
        return mx_err_set(err, MX_INVALID, "prompt token %zu is %d, the vocabulary has %d", i,
                          p->ids[i], e->info.n_vocab);
    }
    if (p->n_choices < 1 || p->n_choices > 128) {
        return mx_err_set(err, MX_INVALID, "n is %d, expected 1 to 128", p->n_choices);
    }
    if (p->n_logprobs > 100) {
        return mx_err_set(err, MX_INVALID, "%d log-probabilities asked for, at most 100",
                          p->n_logprobs);
    }
    return MX_OK;
}

static mlxcel_request *new_request(mlxcel_engine *e, const mlxcel_request_params *p, mx_err *err) {
    mlxcel_request *r = mx_calloc(1, sizeof *r);
    r->engine = e;
    r->refs = 2;
    pthread_mutex_init(&r->lock, NULL);
    pthread_condattr_t attr; // a clock that is set must not end a wait
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&r->wake, &attr);
    pthread_condattr_destroy(&attr);
    r->submitted_s = mx_now_s();
    if (p->timeout_s > 0) r->deadline_s = r->submitted_s + p->timeout_s;
    if (copy_params(r, p, err) != MX_OK) {
        free_request(r);
        return NULL;
    }
    return r;
}

static mx_status enqueue(mlxcel_engine *e, mlxcel_request *r, mx_err *err) {
    mx_status st = MX_OK;
    pthread_mutex_lock(&e->lock);
    int32_t limit = e->params.max_queue + e->params.max_batch;
    if (e->stop) {
        st = mx_err_set(err, MX_CANCELLED, "the engine is shutting down");
    } else if (e->n_open >= limit) {
        e->stats.n_rejected++;
        st = mx_err_set(err, MX_BUSY, "%d requests are open already (queue depth %d)", e->n_open,
                        e->params.max_queue);
    } else {
        r->id = ++e->next_id;
        e->n_open++;
        e->stats.n_requests++;
        if (e->mail_tail)
            e->mail_tail->next = r;
        else
            e->mail_head = r;
        e->mail_tail = r;
        pthread_cond_signal(&e->wake);
    }
    pthread_mutex_unlock(&e->lock);
    return st;
}

int mlxcel_submit(mlxcel_engine *e, const mlxcel_request_params *p, mlxcel_request **out,
                  mlxcel_error *error) {
    mx_err err = {0};
    *out = NULL;
    mx_status st = check_request(e, p, &err);
    mlxcel_request *r = st == MX_OK ? new_request(e, p, &err) : NULL;
    if (r) {
        st = enqueue(e, r, &err);
        if (st != MX_OK) free_request(r);
    } else {
        st = err.status;
    }
    if (st != MX_OK)
        engine_error_out(error, &err);
    else
        *out = r;
    return (int)st;
}

void mlxcel_cancel(mlxcel_request *r) {
    pthread_mutex_lock(&r->lock);
    r->cancelled = true;
    bool finished = r->finished;
    pthread_mutex_unlock(&r->lock);
    if (finished) return;
    pthread_mutex_lock(&r->engine->lock);
    pthread_cond_signal(&r->engine->wake);
    pthread_mutex_unlock(&r->engine->lock);
}

void mlxcel_request_free(mlxcel_request *r) {
    if (!r) return;
    mlxcel_cancel(r);
    pthread_mutex_lock(&r->lock);
    r->p.notify = NULL; // nobody listens any more
    pthread_mutex_unlock(&r->lock);
    request_release(r);
}

uint64_t mlxcel_request_id(const mlxcel_request *r) {
    return r->id;
}
