// mlxcel generate: one prompt, one text. Standard output is the text (or one JSON object); lines
// about loading, limits and speed go to standard error. No state.
#include "cli/cli.h"

#include "base/knobs.h"
#include "base/mem.h"
#include "base/os.h"

#include <stdio.h>
#include <stdlib.h>

// The prompt of -p or -f. Returns an exit code.
static int read_prompt(const cli_options *o, mx_buf *out) {
    mx_err err = {0};
    if (o->prompt && o->file) return cli_usage(o, "-p and -f: expected one of them");
    if (!o->prompt && !o->file) return cli_usage(o, "expected a prompt: -p TEXT or -f FILE");
    if (o->prompt)
        mx_buf_puts(out, o->prompt);
    else if (cli_read_all(o->file, out, &err) != MX_OK) {
        return cli_fail(o, CLI_EXIT_RUN, "%s", err.msg);
    }
    return CLI_EXIT_OK;
}

static int estimate_only(const cli_options *o) {
    char *path;
    if (!cli_resolve(o, o->model, &path)) return CLI_EXIT_LOAD;
    mx_weights w;
    mx_err err = {0};
    cli_estimate e;
    mx_status st = mx_weights_open(&w, path, &err);
    if (st == MX_OK) {
        cli_estimate_for what = {.ctx = o->ctx_size, .batch = 1, .kv_type = o->kv_type};
        st = cli_estimate_make(&e, &w, &what, &err);
        if (st == MX_OK) st = cli_estimate_device(&e, o->device, &err);
        mx_weights_close(&w);
    }
    int code = st == MX_OK ? CLI_EXIT_OK : cli_fail(o, CLI_EXIT_LOAD, "%s", err.msg);
    mx_buf b;
    mx_buf_init(&b, 0);
    if (st == MX_OK && o->json) {
        json_t *j = cli_estimate_json(&e);
        char *text = json_dumps(j, JSON_COMPACT);
        mx_buf_puts(&b, text);
        free(text);
        json_decref(j);
    } else if (st == MX_OK) {
        cli_estimate_banner(&e, path, &b);
    }
    if (st == MX_OK) mx_buf_putc(&b, '\n');
    cli_out(b.data, b.n);
    mx_buf_free(&b);
    mx_free(path);
    return code;
}

static double per_second(int32_t n, double ms) {
    return n > 0 && ms > 0 ? n / (ms * 1e-3) : 0;
}

static json_t *timings_json(const mlxcel_timings *t) {
    int32_t n = t->n_prompt - t->n_cached, m = t->n_decoded > 1 ? t->n_decoded - 1 : 0;
    return json_pack("{s:i, s:i, s:f, s:f, s:f, s:i, s:f, s:f, s:f}", "cache_n", t->n_cached,
                     "prompt_n", n, "prompt_ms", t->prompt_ms, "prompt_per_token_ms",
                     n > 0 ? t->prompt_ms / n : 0.0, "prompt_per_second",
                     per_second(n, t->prompt_ms), "predicted_n", t->n_decoded, "predicted_ms",
                     t->decode_ms, "predicted_per_token_ms", m > 0 ? t->decode_ms / m : 0.0,
                     "predicted_per_second", per_second(m, t->decode_ms));
}

static json_t *ids_json(const int32_t *ids, size_t n) {
    json_t *a = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(a, json_integer(ids[i]));
    return a;
}

static void print_json(const cli_session *s, const cli_prompt *p, const cli_reply *r) {
    json_t *j = json_pack("{s:o, s:s%, s:o, s:o, s:s, s:I, s:o}", "model", cli_json_text(s->path),
                          "text", r->text.n ? r->text.data : "", r->text.n, "ids",
                          ids_json(r->ids, r->n_ids), "prompt_ids", ids_json(p->ids, p->n_ids),
                          "finish_reason", mlxcel_finish_name(r->finish), "seed",
                          (json_int_t)r->seed, "timings", timings_json(&r->timings));
    CHECK(j != NULL);
    if (r->stop_word) json_object_set_new(j, "stopping_word", cli_json_text(r->stop_word));
    char *text = json_dumps(j, JSON_COMPACT);
    cli_outs(text);
    cli_outs("\n");
    free(text);
    json_decref(j);
}

static void say_limit(const cli_options *o, const cli_session *s, const cli_prompt *p) {
    if (o->max_tokens >= 0 || o->quiet) return;
    int64_t left = (int64_t)s->info.ctx_size - (int64_t)p->n_ids;
    cli_note("Max tokens: unlimited (-1) -> %lld (model context window %d, prompt %zu)",
             (long long)MX_MAX(left, 0), s->info.ctx_size, p->n_ids);
}

static void say_slow_paths(const cli_session *s) {
    mlxcel_stats st;
    char text[300];
    mlxcel_get_stats(s->engine, &st);
    cli_slow_text(NULL, &st, text, sizeof text);
    cli_note("Slow paths: %s", text[0] ? text : "none");
}

static void say_speed(const cli_reply *r) {
    const mlxcel_timings *t = &r->timings;
    cli_note("Prompt: %d tokens, %.1f tok/s. Generated: %d tokens, %.1f tok/s (%s).", t->n_prompt,
             per_second(t->n_prompt - t->n_cached, t->prompt_ms), t->n_decoded,
             per_second(t->n_decoded - 1, t->decode_ms), mlxcel_finish_name(r->finish));
}

static int failed(const cli_options *o, const mlxcel_error *err) {
    return cli_fail(o, err->status == MX_INVALID ? CLI_EXIT_USAGE : CLI_EXIT_RUN, "%s",
                    err->message);
}

static int generate(const cli_options *o, cli_session *s, mx_str text) {
    cli_prompt p;
    cli_reply r;
    mlxcel_error err = {0};
    double start = mx_now_s();
    if (cli_prompt_make(s, o, text, &p, &err) != 0) return failed(o, &err);
    double setup_ms = (mx_now_s() - start) * 1e3;
    say_limit(o, s, &p);
    mlxcel_request_params q;
    mlxcel_request_params_init(&q);
    q.ids = p.ids, q.n_ids = p.n_ids;
    q.max_tokens = o->max_tokens;
    q.stops = (const char *const *)o->stops, q.n_stops = o->n_stops;
    cli_sampling(o, &q.sampling);
    int st = cli_reply_run(s, &q, !o->json, &r, &err);
    double done = mx_now_s();
    if (st == 0 && o->json) print_json(s, &p, &r);
    if (!o->json && cli_out_is_terminal()) cli_outs("\n");
    if (st == 0 && !o->quiet) say_speed(&r);
    if (st == 0 && (o->profile || mx_knob_is_set(MX_KNOB_PROFILE_TTFT))) {
        cli_say_ttft(s, &r.timings, setup_ms, (mx_now_s() - done) * 1e3);
        say_slow_paths(s);
    }
    int code = st != 0 ? failed(o, &err) : r.interrupted ? CLI_EXIT_INTERRUPTED : CLI_EXIT_OK;
    cli_reply_free(&r);
    mlxcel_free(p.ids);
    return code;
}

int cli_generate(const cli_options *o) {
    if (!o->model) return cli_usage(o, "expected a model: -m MODEL");
    if (o->estimate && o->profile) {
        return cli_usage(o, "--profile: --estimate-memory runs nothing that could be timed");
    }
    if (o->estimate) return estimate_only(o);
    mx_buf text;
    mx_buf_init(&text, 256u << 20);
    int code = cli_check_system(o);
    if (code == CLI_EXIT_OK) code = read_prompt(o, &text);
    cli_session s = {0};
    if (code == CLI_EXIT_OK)
        code = cli_session_open(&s, o, o->model, (mlxcel_params){0}, !o->quiet);
    if (code == CLI_EXIT_OK) code = generate(o, &s, (mx_str){text.data, text.n});
    cli_session_close(&s);
    mx_buf_free(&text);
    return code;
}
