// mlxcel serve: flags to a server's configuration, the memory estimate, and its exit codes. State:
// none but process-wide signals.
#include "cli/cli.h"

#include "base/knobs.h"
#include "base/mem.h"
#include "base/os.h"
#include "engine/device.h"
#include "server/server.h"

#include <strings.h>

static int32_t smaller(int32_t a, int32_t b) { // of two bounds, where 0 is none
    return a == 0 ? b : b == 0 ? a : MX_MIN(a, b);
}

// "1.5G", or one of the words, which mean if_word.
static bool read_size(const cli_options *o, const char *flag, const char *v, const char *words,
                      uint64_t if_word, uint64_t *out, int *code) {
    *out = if_word;
    if (strstr(words, v) && v[0] != '0') return true;
    if (mx_parse_size(v, out)) return true;
    *code = cli_usage(o, "%s: expected a size such as 512M%s%s, got \"%s\"", flag,
                      words[0] ? ", or " : "", words, v);
    return false;
}

static const char *storage_of(const cli_options *o) {
    const char *env = mx_knob_raw(MX_KNOB_SERVER_STORAGE);
    if (!env || strcmp(o->kv_storage, "auto") != 0) return o->kv_storage;
    if (strcmp(env, "paged") == 0 || strcmp(env, "dense") == 0 || strcmp(env, "auto") == 0)
        return env;
    mx_log(MX_LOG_WARN, "MLXCEL_SERVER_DECODE_STORAGE=%s: expected auto, paged or dense; auto",
           env);
    return "auto";
}

// A second signal ends the process at once.
static void on_stopping(void) {
    cli_signals_defer(false);
}

static bool engine_params(const cli_options *o, mlxcel_params *p, int *code) {
    const char *k = o->cache_type_k, *v = o->cache_type_v;
    if (k && v && strcmp(k, v) != 0) {
        *code =
            cli_usage(o, "--cache-type-k %s and --cache-type-v %s: they must be the same", k, v);
        return false;
    }
    if (o->parallel == 0) {
        *code = cli_usage(o, "--n-parallel 0: expected 1 to 256, or -1 for 4");
        return false;
    }
    uint64_t body,
        quarter =
            MX_MIN(mx_mem_available_bytes(), mx_knob_size(MX_KNOB_MEMORY_LIMIT, UINT64_MAX)) / 4;
    if (!read_size(o, "--kv-cache-budget", o->kv_budget, "auto none", 0, &p->kv_budget_bytes,
                   code) ||
        !read_size(o, "--prompt-cache-bytes", o->prompt_cache, "auto",
                   MX_MIN(quarter, (uint64_t)2 << 30), &p->prefix_cache_bytes, code) ||
        !read_size(o, "--max-body", o->max_body, "", 0, &body, code))
        return false;
    if (o->no_prompt_cache) p->prefix_cache_bytes = 0;
    int32_t parallel = o->parallel > 0 ? o->parallel : 4;
    p->max_batch = smaller(parallel, o->max_batch);
    p->max_queue = o->queue_depth;
    p->prefill_grant_interval = o->grant_interval ? o->grant_interval : INT32_MAX;
    p->device = o->device;
    p->n_threads = o->threads;
    p->ctx_size = o->ctx_size;
    p->kv_storage = storage_of(o);
    p->kv_type = k ? k : v;
    p->deterministic = o->deterministic;
    p->skip_memory_check = o->force;
    p->prefill_chunk = o->prefill_chunk;
    if (!p->prefill_chunk && !mx_knob_is_set(MX_KNOB_PREFILL_CHUNK))
        p->prefill_chunk = o->ubatch_size ? smaller(o->ubatch_size, o->batch_size) : 0;
    return true;
}

static bool fits(const cli_options *o, const char *path, const mlxcel_params *p, int *code) {
    mx_weights w;
    mx_err err = {0};
    cli_estimate e;
    if (o->force || mx_device_gpus(o->device) > 0) return true; // a GPU: the engine compares
    mx_status st = mx_weights_open(&w, path, &err);
    if (st == MX_OK) {
        cli_estimate_for what = {.ctx = p->ctx_size,
                                 .batch = p->max_batch,
                                 .kv_type = p->kv_type,
                                 .kv_budget_bytes = p->kv_budget_bytes,
                                 .cache_bytes = p->prefix_cache_bytes};
        st = cli_estimate_make(&e, &w, &what, &err);
        mx_weights_close(&w);
    }
    if (st != MX_OK) {
        *code = cli_fail(o, CLI_EXIT_LOAD, "%s", err.msg);
        return false;
    }
    if (e.fits) return true;
    mx_buf b;
    mx_buf_init(&b, 0);
    cli_estimate_banner(&e, path, &b);
    cli_note("%s", b.data);
    mx_buf_free(&b);
    *code = cli_fail(o, CLI_EXIT_LOAD,
                     "the model does not fit; --ctx-size, --n-parallel, --kv-cache-budget or "
                     "--prompt-cache-bytes make it smaller, --force loads it all the same");
    return false;
}

// Fields of sampling that were set here, which a checkpoint's suggestions leave alone.
static uint32_t sampling_given(const cli_options *o) {
    static const struct {
        size_t offset;
        uint32_t bit;
    } rows[] = {
        {offsetof(cli_options, temperature), MLXCEL_SAMPLING_TEMPERATURE},
        {offsetof(cli_options, top_k), MLXCEL_SAMPLING_TOP_K},
        {offsetof(cli_options, top_p), MLXCEL_SAMPLING_TOP_P},
        {offsetof(cli_options, min_p), MLXCEL_SAMPLING_MIN_P},
        {offsetof(cli_options, typical_p), MLXCEL_SAMPLING_TYPICAL_P},
        {offsetof(cli_options, repeat_penalty), MLXCEL_SAMPLING_REPEAT_PENALTY},
        {offsetof(cli_options, repeat_last_n), MLXCEL_SAMPLING_REPEAT_LAST_N},
        {offsetof(cli_options, xtc_probability), MLXCEL_SAMPLING_XTC_PROBABILITY},
        {offsetof(cli_options, xtc_threshold), MLXCEL_SAMPLING_XTC_THRESHOLD},
    };
    uint32_t bits = 0;
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        if (cli_is_given(o, rows[i].offset)) bits |= rows[i].bit;
    }
    return bits;
}

static void fill(const cli_options *o, const char *path, mx_server_config *c) {
    uint64_t body = 0;
    c->engine.model = path;
    c->host = o->host;
    c->port = o->port;
    c->alias = o->alias;
    c->api_prefix = o->api_prefix;
    c->api_keys = o->api_key;
    c->api_key_file = o->api_key_file;
    c->env_api_key = mx_knob_raw(MX_KNOB_API_KEY);
    c->cors_origins = strcmp(o->cors_origins, "none") == 0 ? "" : o->cors_origins;
    c->allowed_hosts = o->allowed_hosts;
    c->ssl_key_file = o->ssl_key_file;
    c->ssl_cert_file = o->ssl_cert_file;
    c->reasoning_format = o->reasoning_format;
    c->reasoning_alias = o->reasoning_alias;
    c->chat_template_kwargs = o->template_kwargs;
    c->threads_http = o->threads_http;
    c->sse_ping_s = o->sse_ping;
    c->sse_ping_style = o->sse_ping_style;
    c->sse_gather_ms = o->sse_gather;
    c->timeout_s = o->timeout_s;
    c->idle_timeout_s = o->idle_timeout_s;
    c->grace_s = (double)o->grace_s;
    c->metrics = o->metrics;
    c->slots = !o->no_slots;
    c->no_web = o->no_web;
    c->reuse_port = o->reuse_port;
    c->log_requests = !o->no_request_log;
    c->n_predict = o->max_tokens;
    c->stop_fd = cli_signal_fd();
    c->on_stopping = on_stopping;
    cli_sampling(o, &c->sampling);
    c->sampling_given = sampling_given(o);
    c->max_body = mx_parse_size(o->max_body, &body) ? (int32_t)MX_MIN(body, INT32_MAX - 1) : 0;
}

int cli_serve(const cli_options *o) {
    if (!o->model) return cli_usage(o, "expected --model");
    if (!mx_knob_is_set(MX_KNOB_LOG)) mx_log_set_level(MX_LOG_INFO);
    mx_share_free_memory();
    mx_server_config c = {0};
    char *path = NULL;
    int code = CLI_EXIT_OK;
    bool loading = false;
    mx_err err = {0};
    if (!engine_params(o, &c.engine, &code)) return code;
    if (!cli_resolve(o, o->model, &path)) return CLI_EXIT_LOAD;
    if (!cli_interrupted() && fits(o, path, &c.engine, &code) && !cli_interrupted()) {
        fill(o, path, &c);
        if (!c.alias && !mx_path_exists(o->model)) c.alias = o->model;
        mx_status st = mx_server_run(&c, &loading, &err);
        if (st == MX_INVALID && !loading)
            code = cli_usage(o, "%s", err.msg);
        else if (st != MX_OK)
            code = cli_fail(o, loading ? CLI_EXIT_LOAD : CLI_EXIT_RUN, "%s", err.msg);
    }
    mx_free(path);
    return code;
}
