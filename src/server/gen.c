// A generation: the prompts of one HTTP request, their engine requests, their choices. State: one
// gen, owned by its srv_req and touched by the HTTP thread of the connection only.
//
// Of many prompts no more are the engine's at a time than it has places: the queue is for
// everybody.
//
// Text passes through two parsers on its way to the answer: reasoning, then tool calls. Streams
// send what the parsers release, whole answers keep it; both see the same pieces in the same order.
#include "server/server_int.h"

#include "base/mem.h"
#include "base/os.h"

#include <stdio.h>

enum { MAX_ANSWERS = 256 };

// ---- Life ----

gen *gen_new(srv_req *q, api_kind api) {
    gen *g = mx_calloc(1, sizeof *g);
    g->q = q;
    g->api = api;
    g->created = (long long)mx_wall_s();
    snprintf(g->id, sizeof g->id, "%s-%016llx", api == API_CHAT ? "chatcmpl" : "cmpl",
             (unsigned long long)mx_hash64(&q->number, sizeof q->number,
                                           (uint64_t)(q->s->started_wall_s * 1e6)));
    opts_init(&g->o, q->s, api);
    return g;
}

static void free_choice(gen_choice *c) {
    mx_buf *bufs[] = {&c->text, &c->reasoning, &c->probs, &c->values, &c->tops, &c->offsets};
    for (size_t i = 0; i < MX_COUNT(bufs); i++) mx_buf_free(bufs[i]);
    for (int32_t i = 0; i < c->n_calls; i++) {
        mx_buf_free(&c->calls[i].name);
        mx_buf_free(&c->calls[i].args);
    }
    mx_free(c->calls);
    mx_free(c->ids);
    mx_free(c->stop_word);
    think_free(&c->think);
    tools_free(&c->tools);
}

void gen_free(gen *g) {
    if (!g) return;
    for (int32_t i = 0; i < g->n_jobs; i++) {
        gen_job *j = &g->jobs[i];
        mlxcel_request_free(j->score);
        mlxcel_request_free(j->run);
        for (int32_t k = 0; j->choices && k < g->o.n; k++) free_choice(&j->choices[k]);
        mx_free(j->choices);
        mlxcel_free(j->ids);
        mlxcel_free(j->text);
    }
    mx_free(g->jobs);
    opts_free(&g->o);
    mx_free(g);
}

void gen_add_prompt(gen *g, int32_t *ids, size_t n_ids, char *text, size_t n_text) {
    g->jobs = mx_realloc(g->jobs, (size_t)(g->n_jobs + 1) * sizeof *g->jobs);
    g->jobs[g->n_jobs++] = (gen_job){.ids = ids, .n_ids = n_ids, .text = text, .n_text = n_text};
}

static void init_choice(gen *g, gen_job *j, gen_choice *c, int32_t index) {
    *c = (gen_choice){.g = g, .job = j, .index = index};
    mx_buf *bufs[] = {&c->text, &c->reasoning, &c->probs, &c->values, &c->tops, &c->offsets};
    for (size_t i = 0; i < MX_COUNT(bufs); i++) mx_buf_init(bufs[i], 0);
    think_init(&c->think, g->think_on, g->think_inside);
    tools_init(&c->tools, g->tool_format, g->tools);
}

static void fill_params(gen *g, const gen_job *j, mlxcel_request_params *p) {
    mlxcel_request_params_init(p);
    p->ids = j->ids;
    p->n_ids = j->n_ids;
    p->sampling = g->o.sampling;
    p->max_tokens = g->o.max_tokens;
    p->n_choices = g->o.n;
    p->stops = (const char *const *)g->o.stops;
    p->n_stops = g->o.n_stops;
    if (g->think_on) {
        p->reasoning_open = g->think_inside ? NULL : think_open_tag;
        p->reasoning_close = think_close_tag;
    }
    p->n_logprobs = g->o.want_logprobs ? g->o.logprobs : -1;
    p->show_special = g->o.show_special;
    p->cache_prompt = g->o.cache_prompt;
    p->cache_salt = g->o.cache_salt;
    p->priority = g->priority;
    // all prompts have one time limit
    if (g->timeout_s > 0) {
        p->timeout_s = MX_MAX(g->timeout_s - (mx_now_s() - g->started_s), 1e-3);
    }
    p->predict_s = g->predict_s;
    p->notify = req_event;
    p->user = g->q;
}

static int submit(gen *g, gen_job *j, mlxcel_error *err) {
    mlxcel_engine *e = g->q->s->engine;
    mlxcel_request_params p;
    fill_params(g, j, &p);
    // the prompt's own log-probabilities are a request of their own
    bool score = g->o.echo && g->o.want_logprobs, run = !score || g->o.max_tokens != 0;
    j->score_done = !score;
    j->run_done = !run;
    int st = run ? mlxcel_submit(e, &p, &j->run, err) : 0;
    if (st == 0 && score) {
        p.score = true;
        p.n_choices = 1;
        st = mlxcel_submit(e, &p, &j->score, err);
    }
    if (st != 0) {
        mlxcel_request_free(j->run);
        j->run = NULL;
    }
    return st;
}

static int32_t count_open(const gen *g) {
    int32_t open = 0;
    for (int32_t i = 0; i < g->n_submitted; i++) {
        open += !g->jobs[i].score_done || !g->jobs[i].run_done;
    }
    return open;
}

static int submit_more(gen *g, mlxcel_error *err) {
    int32_t open = count_open(g);
    while (g->n_submitted < g->n_jobs && open < g->q->s->info.max_batch) {
        int st = submit(g, &g->jobs[g->n_submitted], err);
        if (st == MX_BUSY && open > 0) break; // again when one of the others has ended
        if (st != 0) return st;
        g->n_submitted++;
        open++;
    }
    return 0;
}

static bool read_priority(gen *g) {
    const char *v = MHD_lookup_connection_value(g->q->conn, MHD_HEADER_KIND, "X-Priority");
    g->priority = MLXCEL_PRIORITY_NORMAL;
    if (!v || strcmp(v, "normal") == 0) return true;
    g->priority = strcmp(v, "high") == 0 ? MLXCEL_PRIORITY_HIGH : MLXCEL_PRIORITY_LOW;
    if (g->priority == MLXCEL_PRIORITY_HIGH || strcmp(v, "low") == 0) return true;
    req_error(g->q, 400, "invalid_value", "X-Priority", "X-Priority: expected high, normal or low");
    return false;
}

// One request may not be thousands.
static bool check_answers(gen *g) {
    if ((int64_t)g->n_jobs * g->o.n <= MAX_ANSWERS) return true;
    req_error(g->q, 400, "invalid_value", "n",
              "n: %d prompts and %d answers to each are more than %d", g->n_jobs, g->o.n,
              MAX_ANSWERS);
    return false;
}

bool gen_start(gen *g) {
    srv_req *q = g->q;
    mlxcel_error err = {0};
    if (g->timeout_s <= 0 || g->timeout_s > q->s->c->timeout_s) {
        g->timeout_s = q->s->c->timeout_s > 0 ? q->s->c->timeout_s : g->timeout_s;
    }
    g->started_s = mx_now_s();
    bool ok = check_answers(g) && read_priority(g);
    for (int32_t i = 0; ok && i < g->n_jobs; i++) {
        gen_job *j = &g->jobs[i];
        j->choices = mx_calloc((size_t)g->o.n, sizeof *j->choices);
        for (int32_t k = 0; k < g->o.n; k++) {
            init_choice(g, j, &j->choices[k], i * g->o.n + k);
        }
    }
    if (ok && submit_more(g, &err) == 0) {
        pthread_mutex_lock(&q->s->lock);
        q->s->m.seqs_started += (uint64_t)g->n_jobs * (uint64_t)g->o.n;
        pthread_mutex_unlock(&q->s->lock);
        q->gen = g;
        return true;
    }
    if (!q->answered) req_fail(q, &err);
    gen_free(g);
    return false;
}

void gen_cancel(gen *g) {
    for (int32_t i = 0; i < g->n_jobs; i++) {
        if (g->jobs[i].score) mlxcel_cancel(g->jobs[i].score);
        if (g->jobs[i].run) mlxcel_cancel(g->jobs[i].run);
    }
}

// ---- Text on its way ----

static void on_content(void *user, mx_str text) {
    gen_choice *c = user;
    if (c->g->o.stream) chat_emit(c, "content", text);
    mx_buf_add(&c->text, text.p, c->g->o.stream ? 0 : text.n);
}

static void on_call(void *user, int index, mx_str name) {
    gen_choice *c = user;
    c->calls = mx_realloc(c->calls, (size_t)(index + 1) * sizeof *c->calls);
    gen_call *call = &c->calls[c->n_calls++];
    uint64_t key[3] = {c->g->q->number, (uint64_t)c->index, (uint64_t)index};
    uint64_t h = mx_hash64(key, sizeof key, (uint64_t)(c->g->q->s->started_wall_s * 1e6));
    static const char digits[] = "0123456789abcdefghijklmnopqrstuvwxyz";
    if (c->g->tool_format == TOOLS_MISTRAL) { // its template wants nine letters and digits
        for (int i = 0; i < 9; i++, h /= 36) call->id[i] = digits[h % 36];
        call->id[9] = 0;
    } else {
        snprintf(call->id, sizeof call->id, "call_%016llx", (unsigned long long)h);
    }
    mx_buf_init(&call->name, 0);
    mx_buf_init(&call->args, 0);
    mx_buf_add(&call->name, name.p, name.n);
    if (c->g->o.stream) chat_emit_call(c, index, call, (mx_str){"", 0});
}

static void on_args(void *user, int index, mx_str piece) {
    gen_choice *c = user;
    if (c->g->o.stream)
        chat_emit_call(c, index, NULL, piece);
    else
        mx_buf_add(&c->calls[index].args, piece.p, piece.n);
}

static void take_parts(gen_choice *c, const mx_buf *reasoning, const mx_buf *content) {
    const tool_sink sink = {c, on_content, on_call, on_args};
    if (reasoning->n && c->g->o.stream)
        chat_emit(c, "reasoning_content", (mx_str){reasoning->data, reasoning->n});
    else if (reasoning->n)
        mx_buf_add(&c->reasoning, reasoning->data, reasoning->n);
    if (content->n) tools_push(&c->tools, (mx_str){content->data, content->n}, &sink);
}

static void take_chat_text(gen_choice *c, mx_str text, bool end) {
    mx_buf reasoning, content;
    mx_buf_init(&reasoning, 0);
    mx_buf_init(&content, 0);
    think_push(&c->think, text, &reasoning, &content);
    if (end) think_end(&c->think, &reasoning, &content);
    take_parts(c, &reasoning, &content);
    if (end) {
        const tool_sink sink = {c, on_content, on_call, on_args};
        tools_end(&c->tools, &sink);
    }
    mx_buf_free(&reasoning);
    mx_buf_free(&content);
}

static void keep_ids(gen_choice *c, const mlxcel_event *ev) {
    size_t n = (size_t)ev->n_tokens;
    c->n_total += n;
    if (!c->g->o.return_tokens || n == 0) return;
    if (c->n_ids + n > c->cap_ids) {
        c->cap_ids = (c->n_ids + n) * 2;
        c->ids = mx_realloc(c->ids, c->cap_ids * sizeof *c->ids);
    }
    for (size_t i = 0; i < n; i++) c->ids[c->n_ids++] = ev->tokens[i].id;
}

static void take_text(gen_choice *c, const mlxcel_event *ev) {
    gen *g = c->g;
    mx_str text = {ev->text, ev->n_text};
    keep_ids(c, ev);
    if (ev->n_tokens) c->live = ev->timings;
    if (g->o.want_logprobs) {
        for (int32_t i = 0; i < ev->n_tokens; i++) probs_add(c, &ev->tokens[i]);
    }
    if (g->api == API_CHAT) {
        take_chat_text(c, text, false);
        if (g->o.stream && c->probs.n) chat_emit(c, "content", (mx_str){"", 0});
    } else if (!g->o.stream) {
        mx_buf_add(&c->text, text.p, text.n);
    } else if (text.n || c->probs.n || c->n_ids) {
        if (g->api == API_TEXT)
            text_emit(c, text);
        else
            native_emit(c, text);
    }
}

static void end_choice(gen_choice *c, const mlxcel_event *ev) {
    gen *g = c->g;
    c->ended = true;
    c->finish = ev->finish;
    c->seed = ev->seed;
    if (ev->stop_word) c->stop_word = mx_strdup(ev->stop_word);
    if (ev->finish == MLXCEL_FINISH_ERROR || ev->finish == MLXCEL_FINISH_CANCEL) return;
    if (g->api == API_CHAT) take_chat_text(c, (mx_str){"", 0}, true);
    if (!g->o.stream) return;
    if (g->api == API_CHAT)
        chat_emit_end(c, &ev->timings);
    else if (g->api == API_TEXT)
        text_emit_end(c, &ev->timings);
    else
        native_emit_end(c, &ev->timings);
}

// ---- Events ----

static void note_prompt(gen_job *j, const mlxcel_event *ev) {
    j->n_prefilled = MX_MAX(j->n_prefilled, ev->n_prompt_done);
    j->n_cached = ev->timings.n_cached;
}

static void note_done(gen *g, gen_job *j, const mlxcel_event *ev) {
    j->timings = ev->timings;
    if (g->timings.n_prompt == 0) g->timings = ev->timings;
    bool whole = ev->finish != MLXCEL_FINISH_ERROR && ev->finish != MLXCEL_FINISH_CANCEL;
    g->n_prompt += whole ? ev->timings.n_prompt : j->n_prefilled;
    g->n_cached += ev->timings.n_cached;
    g->n_decoded += ev->timings.n_decoded;
    if (ev->finish == MLXCEL_FINISH_ERROR && g->error.status == 0) {
        g->error = ev->error;
        gen_cancel(g); // there is one answer for all prompts, and it is the error
    }
    if (ev->finish == MLXCEL_FINISH_CANCEL && g->error.status == 0) {
        g->error = (mlxcel_error){MX_CANCELLED, 503, "the request was cancelled"};
    }
}

// The prompt as the beginning of every choice.
static void echo_prompt(gen *g, gen_job *j) {
    for (int32_t k = 0; k < g->o.n; k++) {
        gen_choice *c = &j->choices[k];
        if (g->o.stream)
            text_emit(c, (mx_str){j->text, j->n_text});
        else
            mx_buf_add(&c->text, j->text, j->n_text);
    }
}

static void take_score(gen *g, gen_job *j, const mlxcel_event *ev) {
    for (int32_t k = 0; k < g->o.n; k++) {
        gen_choice *c = &j->choices[k];
        if (!j->scored) probs_add(c, &(mlxcel_token){.id = j->ids[0], .n_top = -1});
        for (int32_t i = 0; i < ev->n_tokens; i++) probs_add(c, &ev->tokens[i]);
    }
    j->scored = true;
}

static void end_without_run(gen *g, gen_job *j, const mlxcel_event *done) {
    for (int32_t k = 0; k < g->o.n; k++) {
        mlxcel_event ev = *done;
        ev.finish = done->finish == MLXCEL_FINISH_ERROR ? done->finish : MLXCEL_FINISH_LENGTH;
        end_choice(&j->choices[k], &ev);
    }
}

static void pump_score(gen *g, gen_job *j) {
    mlxcel_event ev;
    while (!j->score_done && mlxcel_next_event(j->score, 0, &ev)) {
        if (ev.kind == MLXCEL_EVENT_SCORE) take_score(g, j, &ev);
        if (ev.kind == MLXCEL_EVENT_PROMPT) note_prompt(j, &ev);
        if (ev.kind != MLXCEL_EVENT_DONE) continue;
        j->score_done = true;
        if (ev.finish == MLXCEL_FINISH_ERROR || !j->run) note_done(g, j, &ev);
        // a prompt of one token has nothing to score
        mlxcel_event none = {.kind = MLXCEL_EVENT_SCORE};
        take_score(g, j, &none);
        echo_prompt(g, j);
        if (!j->run) end_without_run(g, j, &ev);
    }
}

static void pump_run(gen *g, gen_job *j) {
    mlxcel_event ev;
    while (!j->run_done && mlxcel_next_event(j->run, 0, &ev)) {
        gen_choice *c = &j->choices[ev.choice];
        bool first = ev.kind == MLXCEL_EVENT_TEXT || ev.kind == MLXCEL_EVENT_CHOICE;
        if (first && g->o.echo && !j->score && !j->choices[0].begun) {
            echo_prompt(g, j);
            for (int32_t k = 0; k < g->o.n; k++) j->choices[k].begun = true;
        }
        if (ev.kind == MLXCEL_EVENT_PROMPT) note_prompt(j, &ev);
        if (ev.kind == MLXCEL_EVENT_TEXT) take_text(c, &ev);
        if (ev.kind == MLXCEL_EVENT_CHOICE) end_choice(c, &ev);
        if (ev.kind == MLXCEL_EVENT_DONE) {
            j->run_done = true;
            note_done(g, j, &ev);
        }
    }
}

void gen_pump(gen *g) {
    bool done = g->n_submitted == g->n_jobs;
    for (int32_t i = 0; i < g->n_submitted && !g->done; i++) {
        gen_job *j = &g->jobs[i];
        pump_score(g, j);
        if (j->score_done) pump_run(g, j);
        done = done && j->score_done && j->run_done;
    }
    mlxcel_error err = {0};
    if (g->error.status == 0 && submit_more(g, &err) != 0) {
        g->error = err;
        gen_cancel(g);
    }
    if (g->error.status != 0) done = count_open(g) == 0; // the rest is not wanted any more
    if (done) g->done = true;
}

static gen_choice *open_choice(const gen *g) {
    for (int32_t i = 0; i < g->n_submitted; i++) {
        for (int32_t k = 0; k < g->o.n; k++) {
            if (!g->jobs[i].choices[k].ended) return &g->jobs[i].choices[k];
        }
    }
    return NULL;
}

void gen_ping(gen *g) {
    const char *style = g->q->s->c->sse_ping_style;
    gen_choice *c = open_choice(g);
    if (!c || strcmp(style, "comment") == 0) {
        mx_buf_puts(&g->q->out, ": ping\n\n");
        return;
    }
    const mx_str none = {"", 0};
    g->tells_progress = strcmp(style, "progress") == 0;
    if (g->api == API_CHAT)
        chat_emit(c, "content", none);
    else if (g->api == API_TEXT)
        text_emit(c, none);
    else
        native_emit(c, none);
    g->tells_progress = false;
}

void gen_leave(gen *g) {
    if (g->done) return;
    gen_cancel(g);
    if (g->error.status == 0) {
        g->error = (mlxcel_error){MX_CANCELLED, 503, "the client has left"};
    }
    gen_pump(g);
    for (int32_t i = 0; i < g->n_submitted; i++) {
        const gen_job *j = &g->jobs[i];
        if (j->score_done && j->run_done) continue;
        g->n_prompt += j->n_prefilled;
        g->n_cached += j->n_cached;
        for (int32_t k = 0; k < g->o.n; k++) g->n_decoded += (int32_t)j->choices[k].n_total;
    }
}

void gen_reply(gen *g) {
    srv_req *q = g->q;
    if (g->error.status != 0) {
        req_fail(q, &g->error);
        return;
    }
    mx_buf b;
    mx_buf_init(&b, 0);
    if (g->api == API_NATIVE)
        native_reply(g, &b);
    else
        openai_reply(g, &b);
    req_reply_json(q, 200, &b);
}
