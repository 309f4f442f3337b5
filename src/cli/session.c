// Models and requests as the commands use them: resolving a name, loading with the lines that say
// so, one prompt in, one reply out. State: cli_session and cli_reply, the caller's.
#include "cli/cli.h"

#include "base/knobs.h"
#include "base/mem.h"
#include "base/os.h"
#include "engine/device.h"
#include "format/store.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

bool cli_resolve(const cli_options *o, const char *model, char **path) {
    mx_err err = {0};
    if (mx_store_resolve(model, o->models_dir, path, &err) == MX_OK) return true;
    cli_fail(o, CLI_EXIT_LOAD, "%s", err.msg);
    return false;
}

// ---- Loading ----

// Prints why the model does not fit and returns false, unless that is to be ignored.
static bool check_memory(const cli_options *o, const char *path, const mlxcel_params *p,
                         cli_estimate *e) {
    mx_weights w;
    mx_err err = {0};
    if (mx_weights_open(&w, path, &err) != MX_OK) {
        cli_fail(o, CLI_EXIT_LOAD, "%s", err.msg);
        return false;
    }
    cli_estimate_for what = {
        .ctx = p->ctx_size, .batch = MX_MAX(p->max_batch, 1), .kv_type = o->kv_type};
    mx_status st = cli_estimate_make(e, &w, &what, &err);
    mx_weights_close(&w);
    if (st != MX_OK) {
        cli_fail(o, CLI_EXIT_LOAD, "%s", err.msg);
        return false;
    }
    // On a GPU the engine compares with the memory there.
    if (e->fits || o->force || mx_device_gpus(o->device) > 0) return true;
    mx_buf b;
    mx_buf_init(&b, 0);
    cli_estimate_banner(e, path, &b);
    cli_note("%s", b.data);
    mx_buf_free(&b);
    cli_fail(o, CLI_EXIT_LOAD, "the model does not fit; --force loads it all the same");
    return false;
}

static bool on_gpu(const mlxcel_info *i) {
    return strncmp(i->arch, "sm_", 3) == 0;
}

static void say_loaded(const cli_session *s, const cli_estimate *e) {
    const mlxcel_info *i = &s->info;
    uint64_t used = i->weight_bytes + i->kv_pool_bytes;
    uint64_t resident = on_gpu(i) ? used : mx_mem_rss_bytes();
    uint64_t peak = on_gpu(i) ? used : mx_mem_peak_rss_bytes();
    if (on_gpu(i))
        cli_note("Runtime device: %s (%s)", i->device, i->arch);
    else
        cli_note("Runtime device: CPU, %s (%s, %d threads)", i->device, i->arch, i->n_threads);
    if (i->n_gpus >= 0) cli_note("Detected %d GPU(s).", i->n_gpus);
    if (i->capability[0]) cli_note("%s", i->capability);
    if (i->budget_rule[0]) cli_note("%s", i->budget_rule);
    cli_note("Command buffers: prefill %s; decode %s; synchronous decode %s", i->budget_prefill,
             i->budget_decode, i->budget_decode_sync);
    if (on_gpu(i)) cli_note("Decode steps: %s", i->decode_steps);
    cli_note("Model loaded in %.3fs (resident: %.2f GB, peak: %.2f GB).", i->load_s,
             (double)resident * 1e-9, (double)peak * 1e-9);
    cli_note("Memory estimate vs actual: %.2f GB estimated, %.2f GB (weights %.2f, KV cache %.2f; "
             "temporaries come with the first steps).",
             (double)e->total_bytes * 1e-9, (double)used * 1e-9, (double)i->weight_bytes * 1e-9,
             (double)i->kv_pool_bytes * 1e-9);
    cli_note("decode path: %s", i->decode_path);
}

int cli_session_open(cli_session *s, const cli_options *o, const char *model, mlxcel_params p,
                     bool said) {
    *s = (cli_session){0};
    if (!cli_resolve(o, model, &s->path)) return CLI_EXIT_LOAD;
    cli_estimate e;
    if (p.ctx_size == 0) p.ctx_size = o->ctx_size;
    if (!check_memory(o, s->path, &p, &e)) {
        cli_session_close(s);
        return CLI_EXIT_LOAD;
    }
    if (said) cli_note("Loading model from \"%s\"...", s->path);
    p.model = s->path;
    p.device = o->device;
    p.n_threads = o->threads;
    p.prefill_chunk = o->prefill_chunk;
    p.kv_storage = o->kv_storage;
    p.kv_type = o->kv_type;
    p.deterministic = o->deterministic;
    p.skip_memory_check = o->force;
    mlxcel_error err = {0};
    if (mlxcel_open(&s->engine, &p, &err) != 0) {
        cli_session_close(s);
        return cli_fail(o, CLI_EXIT_LOAD, "%s", err.message);
    }
    mlxcel_get_info(s->engine, &s->info);
    if (said) say_loaded(s, &e);
    if (s->info.fallbacks[0]) cli_note("Declined: %s", s->info.fallbacks);
    return CLI_EXIT_OK;
}

void cli_session_close(cli_session *s) {
    mlxcel_close(s->engine);
    mx_free(s->path);
    *s = (cli_session){0};
}

void cli_slow_text(const mlxcel_stats *before, const mlxcel_stats *after, char *out, size_t cap) {
    size_t n = 0;
    out[0] = 0;
    for (int32_t i = 0; i < MLXCEL_SLOW_PATHS && n < cap; i++) {
        uint64_t k = after->slow[i] - (before ? before->slow[i] : 0);
        if (!k) continue;
        n += (size_t)snprintf(out + n, cap - n, "%s%s %llu", n ? ", " : "",
                              mlxcel_slow_path(i, NULL), (unsigned long long)k);
    }
}

// ---- Prompts ----

void cli_sampling(const cli_options *o, mlxcel_sampling *out) {
    mlxcel_sampling_init(out);
    out->temperature = o->temperature;
    out->top_k = o->top_k;
    out->top_p = o->top_p;
    out->min_p = o->min_p;
    out->typical_p = o->typical_p;
    out->top_n_sigma = o->top_n_sigma;
    out->repeat_penalty = o->repeat_penalty;
    out->repeat_last_n = o->repeat_last_n;
    out->presence_penalty = o->presence_penalty;
    out->frequency_penalty = o->frequency_penalty;
    out->dry_multiplier = o->dry_multiplier;
    out->dry_base = o->dry_base;
    out->dry_allowed_length = o->dry_allowed_length;
    out->dry_last_n = o->dry_last_n;
    out->xtc_probability = o->xtc_probability;
    out->xtc_threshold = o->xtc_threshold;
    out->seed = o->seed;
    out->has_seed = o->has_seed;
    out->ignore_eos = o->ignore_eos;
    out->bias = o->bias;
    out->n_bias = o->n_bias;
}

json_t *cli_json_text(const char *s) {
    if (mx_utf8_valid(mx_str_of(s))) return json_string(s);
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_json(&b, mx_str_of(s));
    json_t *j = json_loads(b.data, JSON_DECODE_ANY, NULL);
    mx_buf_free(&b);
    return j;
}

json_t *cli_json_number(double v) {
    return isfinite(v) ? json_real(v) : json_null();
}

int cli_check_system(const cli_options *o) {
    if (!o->system || mx_utf8_valid(mx_str_of(o->system))) return CLI_EXIT_OK;
    return cli_usage(o, "--system: not valid UTF-8");
}

static int invalid(mlxcel_error *err, const char *what) {
    *err = (mlxcel_error){.status = MX_INVALID, .http = 400};
    snprintf(err->message, sizeof err->message, "%s", what);
    return MX_INVALID;
}

// {"messages":[system, user]} as text; NULL when a text is not UTF-8.
static char *chat_request(const cli_options *o, mx_str text) {
    json_t *messages = json_array();
    if (o->system) {
        json_array_append_new(messages,
                              json_pack("{s:s, s:s}", "role", "system", "content", o->system));
    }
    json_t *user =
        json_pack("{s:s, s:s%}", "role", "user", "content", text.p ? text.p : "", text.n);
    int bad = !user || json_array_append_new(messages, user) != 0 ||
              json_array_size(messages) != (o->system ? 2u : 1u);
    json_t *all = json_pack("{s:o}", "messages", messages);
    char *out = bad ? NULL : json_dumps(all, JSON_COMPACT);
    json_decref(all);
    return out;
}

int cli_prompt_make(cli_session *s, const cli_options *o, mx_str text, cli_prompt *out,
                    mlxcel_error *err) {
    *out = (cli_prompt){0};
    bool chat = s->info.has_template && !o->no_template;
    if (o->system && !chat) return invalid(err, "--system: the prompt goes through no template");
    int st;
    if (chat) {
        char *request = chat_request(o, text);
        if (!request) return invalid(err, "the prompt is not valid UTF-8");
        st = mlxcel_apply_template(s->engine, request, NULL, &out->ids, &out->n_ids, err);
        free(request);
    } else {
        st = mlxcel_tokenize(s->engine, text.p ? text.p : "", text.n, true, true, &out->ids,
                             &out->n_ids, err);
    }
    if (st == 0 && out->n_ids == 0) {
        mlxcel_free(out->ids);
        *out = (cli_prompt){0};
        return invalid(err, "the prompt is empty");
    }
    return st;
}

// ---- Replies ----

void cli_reply_free(cli_reply *r) {
    mx_buf_free(&r->text);
    mx_free(r->ids);
    mx_free(r->stop_word);
    *r = (cli_reply){0};
}

static void show_ids(const char *what, const int32_t *ids, size_t n) {
    if (!mx_knob_is_set(MX_KNOB_PRINT_TOKEN_IDS)) return;
    mx_buf b;
    mx_buf_init(&b, 0);
    for (size_t i = 0; i < n; i++) mx_buf_printf(&b, " %d", ids[i]);
    cli_note("%s ids:%s", what, b.n ? b.data : "");
    mx_buf_free(&b);
}

static void show_progress(const mlxcel_event *ev, bool *shown) {
    if (!cli_err_is_terminal() || (ev->n_prompt <= ev->n_prompt_done && !*shown)) return;
    bool end = ev->n_prompt_done >= ev->n_prompt;
    if (end)
        fputs("\r\033[K", stderr);
    else
        fprintf(stderr, "\rprompt: %d of %d tokens", ev->n_prompt_done, ev->n_prompt);
    fflush(stderr);
    *shown = !end;
}

static void take_text(cli_reply *r, const mlxcel_event *ev, bool stream) {
    size_t n = (size_t)ev->n_tokens;
    if (n) {
        r->ids = mx_realloc(r->ids, (r->n_ids + n) * sizeof *r->ids);
        for (size_t i = 0; i < n; i++) r->ids[r->n_ids++] = ev->tokens[i].id;
    }
    mx_buf_add(&r->text, ev->text, ev->n_text);
    if (stream) cli_out(ev->text, ev->n_text);
}

static void take_done(cli_reply *r, const mlxcel_event *ev, mlxcel_error *err) {
    r->finish = ev->finish;
    r->seed = ev->seed;
    r->timings = ev->timings;
    if (ev->finish == MLXCEL_FINISH_ERROR) *err = ev->error;
}

// Reads events until the last one.
static void follow(mlxcel_request *req, bool stream, cli_reply *r, mlxcel_error *err) {
    bool cancelled = false, progress = false;
    for (;;) {
        mlxcel_event ev;
        bool got = mlxcel_next_event(req, 0.05, &ev);
        if (!cancelled && (cli_interrupted() || (stream && cli_stdout_closed()))) {
            mlxcel_cancel(req);
            cancelled = true;
            r->interrupted = cli_interrupted();
        }
        if (!got) continue;
        if (ev.kind == MLXCEL_EVENT_PROMPT) show_progress(&ev, &progress);
        if (ev.kind == MLXCEL_EVENT_TEXT) take_text(r, &ev, stream);
        if (ev.kind == MLXCEL_EVENT_CHOICE && ev.stop_word) {
            mx_free(r->stop_word);
            r->stop_word = mx_strdup(ev.stop_word);
        }
        if (ev.kind == MLXCEL_EVENT_DONE) {
            take_done(r, &ev, err);
            break;
        }
    }
    if (progress) fputs("\r\033[K", stderr);
}

int cli_reply_run(cli_session *s, const mlxcel_request_params *p, bool stream, cli_reply *out,
                  mlxcel_error *err) {
    *out = (cli_reply){0};
    *err = (mlxcel_error){0};
    mx_buf_init(&out->text, 0);
    show_ids("prompt", p->ids, p->n_ids);
    mlxcel_request *req;
    int st = mlxcel_submit(s->engine, p, &req, err);
    if (st != 0) return st;
    bool before = cli_signals_defer(true);
    follow(req, stream, out, err);
    cli_signals_defer(before);
    mlxcel_request_free(req);
    show_ids("generated", out->ids, out->n_ids);
    return err->status;
}

void cli_say_ttft(const cli_session *s, const mlxcel_timings *t, double setup_ms, double post_ms) {
    double steps = t->queue_ms + t->prompt_ms; // all there is when no token was asked for
    double sample = t->first_token_ms > steps ? t->first_token_ms - steps : 0;
    double prefill = setup_ms + (t->first_token_ms > 0 ? t->first_token_ms : steps);
    double residual = prefill - setup_ms - t->queue_ms - sample - t->prompt_ms;
    mlxcel_stats u;
    mlxcel_get_stats(s->engine, &u);
    char gpu[200] = "";
    if (on_gpu(&s->info)) {
        snprintf(gpu, sizeof gpu,
                 " read=%.2fms wait=%.2fms ring=%.2fms alloc=%.2fms total=%.2fms %s",
                 u.upload_read_s * 1e3, u.upload_wait_s * 1e3, u.upload_ring_s * 1e3,
                 u.upload_alloc_s * 1e3, u.upload_total_s * 1e3,
                 u.upload_pinned ? "pinned" : "pageable");
    }
    cli_note("[TTFT] prompt=%d tok setup=%.2fms build=%.2fms sample=%.2fms eval=%.2fms post=%.2fms "
             "| prefill=%.2fms residual=%.2fms | upload bytes=%llu tensors=%llu%s load=%.2fms",
             t->n_prompt, setup_ms, t->queue_ms, sample, t->prompt_ms, post_ms, prefill,
             residual > 0 ? residual : 0.0, (unsigned long long)u.upload_bytes,
             (unsigned long long)u.upload_tensors, gpu, s->info.load_s * 1e3);
}
