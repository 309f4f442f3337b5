// mlxcel perplexity: how well a model predicts a text. State: the sums of one run.
//
// The text is cut into windows that do not overlap, each preceded by what the tokenizer puts in
// front of a text; every token after a window's first counts.
#include "cli/cli.h"

#include "base/mem.h"
#include "base/os.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { DEFAULT_WINDOW = 512, MAX_LINE_BYTES = 256 << 20 };

typedef struct scores {
    double sum, squares; // of negative log-likelihoods
    int64_t n, windows;
    double seconds;
} scores;

// Called with each scored token, in order.
typedef void (*score_fn)(void *user, const mlxcel_token *t);

// Returns 0, or a status; CANCELLED after a signal.
static int score(cli_session *s, const int32_t *ids, size_t n, int32_t k, score_fn fn, void *user,
                 mlxcel_error *err) {
    mlxcel_request_params q;
    mlxcel_request_params_init(&q);
    q.ids = ids, q.n_ids = n;
    q.score = true;
    q.max_tokens = 0;
    q.n_logprobs = k;
    q.cache_prompt = false;
    mlxcel_request *r;
    int st = mlxcel_submit(s->engine, &q, &r, err);
    if (st != 0) return st;
    bool cancelled = false;
    mlxcel_event ev;
    do {
        bool got = mlxcel_next_event(r, 0.1, &ev);
        if (!cancelled && (cli_interrupted() || cli_stdout_closed())) {
            mlxcel_cancel(r);
            cancelled = true;
        }
        if (!got) ev.kind = MLXCEL_EVENT_PROMPT;
        for (int32_t i = 0; ev.kind == MLXCEL_EVENT_SCORE && i < ev.n_tokens; i++) {
            fn(user, &ev.tokens[i]);
        }
    } while (ev.kind != MLXCEL_EVENT_DONE);
    if (ev.finish == MLXCEL_FINISH_ERROR) *err = ev.error;
    st = cancelled ? MX_CANCELLED : err->status;
    mlxcel_request_free(r);
    return st;
}

static void add_score(void *user, const mlxcel_token *t) {
    scores *x = user;
    double nll = -(double)t->logprob;
    x->sum += nll;
    x->squares += nll * nll;
    x->n++;
}

// ---- A text ----

static int score_text(cli_session *s, size_t window, const int32_t *ids, size_t n,
                      const int32_t *front, size_t n_front, scores *x, mlxcel_error *err) {
    size_t room = window - n_front;
    int32_t *w = mx_alloc(window * sizeof *w);
    if (n_front) memcpy(w, front, n_front * sizeof *w);
    double start = mx_now_s();
    int st = 0;
    for (size_t at = 0; st == 0 && at < n; at += room) {
        size_t m = MX_MIN(room, n - at);
        memcpy(w + n_front, ids + at, m * sizeof *w);
        if (n_front + m < 2) continue;
        st = score(s, w, n_front + m, 0, add_score, x, err);
        x->windows++;
        if (cli_err_is_terminal()) {
            fprintf(stderr, "\rwindow %lld of %zu, perplexity %.4f ", (long long)x->windows,
                    (n + room - 1) / room, exp(x->sum / (double)MX_MAX(x->n, 1)));
        }
    }
    if (cli_err_is_terminal()) fputs("\r\033[K", stderr);
    x->seconds = mx_now_s() - start;
    mx_free(w);
    return st;
}

static void print_result(const cli_options *o, const cli_session *s, size_t window,
                         const scores *x) {
    double n = (double)x->n, mean = x->sum / n, var = x->squares / n - mean * mean;
    double se = x->n > 1 ? sqrt(MX_MAX(var, 0) / (n - 1)) : 0, ppl = exp(mean);
    mx_buf b;
    mx_buf_init(&b, 0);
    if (o->json) {
        json_t *j = json_pack(
            "{s:o, s:o, s:o, s:o, s:o, s:I, s:I, s:i, s:f}", "model", cli_json_text(s->path),
            "mean_nll", cli_json_number(mean), "nll_stderr", cli_json_number(se), "perplexity",
            cli_json_number(ppl), "stderr", cli_json_number(ppl * se), "tokens", (json_int_t)x->n,
            "windows", (json_int_t)x->windows, "ctx_size", (int)window, "tok_s", n / x->seconds);
        char *text = json_dumps(j, JSON_COMPACT);
        mx_buf_printf(&b, "%s\n", text);
        free(text);
        json_decref(j);
    } else {
        mx_buf_printf(&b,
                      "perplexity %.4f +/- %.4f (mean negative log-likelihood %.5f, %lld tokens in "
                      "%lld windows of %d, %.1f tok/s)\n",
                      ppl, ppl * se, mean, (long long)x->n, (long long)x->windows, (int)window,
                      n / x->seconds);
    }
    cli_out(b.data, b.n);
    mx_buf_free(&b);
}

static int failed(const cli_options *o, int st, const mlxcel_error *err) {
    if (st == MX_CANCELLED) return cli_interrupted() ? CLI_EXIT_INTERRUPTED : CLI_EXIT_OK;
    return cli_fail(o, CLI_EXIT_RUN, "%s", err->message);
}

static int text_mode(const cli_options *o, cli_session *s, mx_str text) {
    size_t window = (size_t)(o->ctx_size ? o->ctx_size : DEFAULT_WINDOW);
    int32_t *ids = NULL, *front = NULL;
    size_t n = 0, n_front = 0;
    mlxcel_error err = {0};
    scores x = {0};
    int st = mlxcel_tokenize(s->engine, "", 0, true, false, &front, &n_front, &err);
    if (st == 0) st = mlxcel_tokenize(s->engine, text.p, text.n, false, false, &ids, &n, &err);
    int code = CLI_EXIT_OK;
    if (st == 0 && (n_front + 1 >= window || window < 2)) {
        code = cli_usage(o, "--ctx-size: a window of %zu leaves no room", window);
    } else if (st == 0 && n_front + n < 2) {
        code = cli_fail(o, CLI_EXIT_RUN, "%s: fewer than two tokens", o->file);
    } else {
        if (st == 0) st = score_text(s, window, ids, n, front, n_front, &x, &err);
        if (st == 0)
            print_result(o, s, window, &x);
        else
            code = failed(o, st, &err);
    }
    mlxcel_free(ids);
    mlxcel_free(front);
    return code;
}

// ---- JSON lines ----

typedef struct line_scores {
    mx_buf logprobs, top;
} line_scores;

static void number(mx_buf *b, float v) {
    if (isfinite(v))
        mx_buf_printf(b, "%.9g", (double)v);
    else
        mx_buf_puts(b, "null"); // JSON has no infinity
}

static void add_line_score(void *user, const mlxcel_token *t) {
    line_scores *x = user;
    mx_buf_putc(&x->logprobs, ',');
    number(&x->logprobs, t->logprob);
    mx_buf_puts(&x->top, ",[");
    for (int32_t i = 0; i < t->n_top; i++) {
        mx_buf_printf(&x->top, "%s{\"id\":%d,\"logprob\":", i ? "," : "", t->top[i].id);
        number(&x->top, t->top[i].logprob);
        mx_buf_putc(&x->top, '}');
    }
    mx_buf_putc(&x->top, ']');
}

// Ids of a line: its own, or those of its text with what the tokenizer adds.
static int line_ids(cli_session *s, const json_t *line, int32_t **ids, size_t *n,
                    mlxcel_error *err) {
    const json_t *list = json_object_get(line, "ids"), *text = json_object_get(line, "text");
    if (json_is_string(text)) {
        return mlxcel_tokenize(s->engine, json_string_value(text), json_string_length(text), true,
                               true, ids, n, err);
    }
    err->status = MX_INVALID;
    snprintf(err->message, sizeof err->message, "expected ids or text");
    if (!json_is_array(list) || json_array_size(list) == 0) return MX_INVALID;
    *n = json_array_size(list);
    *ids = mx_alloc(*n * sizeof **ids);
    for (size_t i = 0; i < *n; i++) {
        const json_t *v = json_array_get(list, i);
        json_int_t id = json_is_integer(v) ? json_integer_value(v) : -1;
        snprintf(err->message, sizeof err->message, "ids[%zu]: expected a token id", i);
        if (id < 0 || id > INT32_MAX) return MX_INVALID;
        (*ids)[i] = (int32_t)id;
    }
    *err = (mlxcel_error){0};
    return 0;
}

static void print_line(const cli_options *o, const int32_t *ids, size_t n, const line_scores *x) {
    mx_buf out;
    mx_buf_init(&out, 0);
    mx_buf_puts(&out, "{\"ids\":[");
    for (size_t i = 0; i < n; i++) mx_buf_printf(&out, "%s%d", i ? "," : "", ids[i]);
    mx_buf_printf(&out, "],\"logprobs\":[%s", n ? "null" : "");
    mx_buf_add(&out, x->logprobs.data, x->logprobs.n);
    if (o->logprobs > 0) {
        mx_buf_printf(&out, "],\"top\":[%s", n ? "null" : "");
        mx_buf_add(&out, x->top.data, x->top.n);
    }
    mx_buf_puts(&out, "]}\n");
    cli_out(out.data, out.n);
    mx_buf_free(&out);
}

static int score_line(const cli_options *o, cli_session *s, const mx_buf *line, int at,
                      mlxcel_error *err) {
    char what[32];
    mx_err e = {0};
    snprintf(what, sizeof what, "line %d", at);
    json_t *j =
        mx_json_parse(line->n ? line->data : "", line->n, MAX_LINE_BYTES, MX_JSON_VOCAB, what, &e);
    if (!j) {
        err->status = (int)e.status;
        snprintf(err->message, sizeof err->message, "%s", e.msg);
        return err->status;
    }
    int32_t *ids = NULL;
    size_t n = 0;
    line_scores x;
    mx_buf_init(&x.logprobs, 0);
    mx_buf_init(&x.top, 0);
    int st = line_ids(s, j, &ids, &n, err);
    if (st == 0 && n > 1) st = score(s, ids, n, o->logprobs, add_line_score, &x, err);
    if (st == 0) print_line(o, ids, n, &x);
    mlxcel_free(ids);
    mx_buf_free(&x.logprobs);
    mx_buf_free(&x.top);
    json_decref(j);
    return st;
}

// The next line. While it waits a signal ends the process: nothing is under way. False too when
// one came before.
static bool next_line(FILE *f, mx_buf *line) {
    bool before = cli_signals_defer(false);
    bool got = !cli_interrupted() && cli_file_line(f, line);
    cli_signals_defer(before);
    return got && !cli_interrupted();
}

static int lines_mode(const cli_options *o, cli_session *s) {
    FILE *f = !o->file || strcmp(o->file, "-") == 0 ? stdin : fopen(o->file, "rb");
    if (!f) return cli_fail(o, CLI_EXIT_RUN, "%s: cannot be read", o->file);
    mx_buf line;
    mx_buf_init(&line, MAX_LINE_BYTES);
    int bad = 0, st = 0;
    for (int at = 1; st != MX_CANCELLED && next_line(f, &line); at++) {
        mlxcel_error err = {0};
        st = score_line(o, s, &line, at, &err);
        if (st == 0 || st == MX_CANCELLED) continue;
        mx_buf out;
        mx_buf_init(&out, 0);
        mx_buf_puts(&out, "{\"error\":");
        mx_buf_json(&out, mx_str_of(err.message));
        mx_buf_puts(&out, "}\n");
        cli_out(out.data, out.n);
        mx_buf_free(&out);
        bad++;
    }
    mx_buf_free(&line);
    if (f != stdin) fclose(f);
    if (cli_interrupted()) return CLI_EXIT_INTERRUPTED;
    if (st == MX_CANCELLED) return CLI_EXIT_OK;
    return bad ? cli_fail(o, CLI_EXIT_RUN, "%d lines could not be scored", bad) : CLI_EXIT_OK;
}

int cli_perplexity(const cli_options *o) {
    if (!o->model) return cli_usage(o, "expected a model: -m MODEL");
    if (!o->jsonl && !o->file) return cli_usage(o, "expected a text: -f FILE");
    if (!o->jsonl && o->logprobs) return cli_usage(o, "--logprobs needs --jsonl");
    int64_t ctx = o->ctx_size || o->jsonl ? o->ctx_size : DEFAULT_WINDOW;
    if (ctx > INT32_MAX / 2) return cli_usage(o, "--ctx-size: %lld is too much", (long long)ctx);
    mx_buf text;
    mx_err err = {0};
    mx_buf_init(&text, 0);
    if (!o->jsonl && cli_read_all(o->file, &text, &err) != MX_OK) {
        mx_buf_free(&text);
        return cli_fail(o, CLI_EXIT_RUN, "%s", err.msg);
    }
    mlxcel_params p = {.ctx_size = (int32_t)((ctx + 255) / 256 * 256)}; // room for a window
    cli_session s;
    int code = cli_session_open(&s, o, o->model, p, false);
    bool before = cli_signals_defer(true);
    if (code == CLI_EXIT_OK) {
        code = o->jsonl ? lines_mode(o, &s)
                        : text_mode(o, &s, (mx_str){text.n ? text.data : "", text.n});
    }
    cli_signals_defer(before);
    cli_session_close(&s);
    mx_buf_free(&text);
    return code;
}
