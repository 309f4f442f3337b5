// What the server says about itself: health, models, props, slots, counters. Never a prompt's text.
// State: none (metrics.c has the counters in Prometheus' form).
#include "server/server_int.h"

#include "base/mem.h"
#include "base/os.h"

// A device that fails step after step will not recover: whoever supervises the server may know.
enum { MAX_FAILED_STEPS = 3 };

void handle_health(srv_req *q) {
    mx_buf b;
    mx_buf_init(&b, 0);
    bool ready = atomic_load(&q->s->ready);
    mlxcel_stats st = {0};
    if (ready) mlxcel_get_stats(q->s->engine, &st);
    if (st.n_failed_steps >= MAX_FAILED_STEPS) {
        req_error(q, 503, NULL, NULL, "the device failed in the last %d steps", st.n_failed_steps);
        return;
    }
    if (ready) {
        mx_buf_puts(&b, "{\"status\":\"ok\"}");
        req_reply_json(q, 200, &b);
        return;
    }
    mx_buf_free(&b);
    req_error(q, 503, NULL, NULL, "Loading model");
}

// ---- Models ----

static void put_model(const srv *s, mx_buf *b, const char *name, size_t n) {
    const mlxcel_info *i = &s->info;
    mx_buf_puts(b, "{\"id\":");
    mx_buf_json(b, (mx_str){name, n});
    mx_buf_printf(b,
                  ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"llamacpp\",\"meta\":{"
                  "\"n_vocab\":%d,\"n_ctx\":%d,\"n_ctx_train\":%d,\"n_params\":%llu,"
                  "\"size\":%llu,\"family\":",
                  (long long)s->started_wall_s, i->n_vocab, i->ctx_size, i->ctx_train,
                  (unsigned long long)i->n_params, (unsigned long long)i->weight_bytes);
    mx_buf_json(b, mx_str_of(i->family));
    mx_buf_puts(b, ",\"format\":");
    mx_buf_json(b, mx_str_of(i->format));
    mx_buf_puts(b, "}}");
}

void handle_models(srv_req *q) {
    const srv *s = q->s;
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_puts(&b, "{\"object\":\"list\",\"data\":[");
    put_model(s, &b, s->model_name, strlen(s->model_name));
    for (const char *p = s->model_names; *p;) {
        size_t n = strcspn(p, ",");
        if (n) {
            mx_buf_putc(&b, ',');
            put_model(s, &b, p, n);
        }
        p += n + (p[n] == ',');
    }
    mx_buf_puts(&b, "]}");
    req_reply_json(q, 200, &b);
}

static bool is_name(const srv *s, const char *name) {
    if (strcmp(name, s->model_name) == 0) return true;
    size_t len = strlen(name);
    for (const char *p = s->model_names; *p;) {
        size_t n = strcspn(p, ",");
        if (n == len && memcmp(p, name, n) == 0) return true;
        p += n + (p[n] == ',');
    }
    return false;
}

void handle_model(srv_req *q) {
    if (!is_name(q->s, q->arg)) {
        req_error(q, 404, "model_not_found", "model", "there is no model %.100s here, only %s",
                  q->arg, q->s->model_name);
        return;
    }
    mx_buf b;
    mx_buf_init(&b, 0);
    put_model(q->s, &b, q->arg, strlen(q->arg));
    req_reply_json(q, 200, &b);
}

// ---- Props, slots ----

static void put_text(mx_buf *b, const char *name, const char *value) {
    mx_buf_printf(b, ",\"%s\":", name);
    mx_buf_json(b, mx_str_of(value ? value : ""));
}

// Those that were taken, with how often.
static void put_slow_paths(const srv *s, mx_buf *b) {
    mlxcel_stats st;
    mlxcel_get_stats(s->engine, &st);
    mx_buf_puts(b, ",\"slow_paths\":{");
    const char *comma = "";
    for (int32_t i = 0; i < MLXCEL_SLOW_PATHS; i++) {
        if (!st.slow[i]) continue;
        mx_buf_printf(b, "%s\"%s\":%llu", comma, mlxcel_slow_path(i, NULL),
                      (unsigned long long)st.slow[i]);
        comma = ",";
    }
    mx_buf_putc(b, '}');
}

void handle_props(srv_req *q) {
    const srv *s = q->s;
    const mlxcel_info *i = &s->info;
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_printf(
        &b, "{\"total_slots\":%d,\"default_generation_settings\":{\"n_ctx\":%d,\"n_predict\":%d,",
        i->max_batch, i->ctx_size, s->c->n_predict);
    sampling_json(&b, &s->c->sampling);
    mx_buf_puts(&b, "},\"modalities\":{\"vision\":false,\"audio\":false}");
    put_text(&b, "sampling_suggested", i->sampling);
    put_text(&b, "model_alias", s->model_name);
    put_text(&b, "build_info", "mlxcel " MLXCEL_VERSION);
    put_text(&b, "family", i->family);
    put_text(&b, "format", i->format);
    put_text(&b, "device", i->device);
    put_text(&b, "arch", i->arch);
    put_text(&b, "kv_storage", i->kv_storage);
    put_text(&b, "kv_type", i->kv_type);
    put_text(&b, "decode_path", i->decode_path);
    put_text(&b, "decode_steps", i->decode_steps);
    put_text(&b, "fallbacks", i->fallbacks);
    put_slow_paths(s, &b);
    put_text(&b, "prefill_chunk_why", i->prefill_chunk_why);
    put_text(&b, "budget_prefill", i->budget_prefill);
    put_text(&b, "budget_decode", i->budget_decode);
    mx_buf_printf(
        &b,
        ",\"threads\":%d,\"prefill_chunk\":%d,\"exact\":%s,\"deterministic\":%s,"
        "\"has_chat_template\":%s,\"thinks\":%s,\"kv_token_bytes\":%llu,\"kv_pool_bytes\":%llu}",
        i->n_threads, i->prefill_chunk, i->exact ? "true" : "false",
        i->deterministic ? "true" : "false", i->has_template ? "true" : "false",
        s->knows_thinking ? "true" : "false", (unsigned long long)i->kv_token_bytes,
        (unsigned long long)i->kv_pool_bytes);
    req_reply_json(q, 200, &b);
}

static bool slots_shown(srv_req *q) {
    if (q->s->c->slots) return true;
    req_error(q, 501, NULL, NULL, "This server does not show slots (--no-slots)");
    return false;
}

void handle_slots(srv_req *q) {
    if (!slots_shown(q)) return;
    mlxcel_stats st;
    mlxcel_get_stats(q->s->engine, &st);
    int32_t n = q->s->info.max_batch;
    const char *fail =
        MHD_lookup_connection_value(q->conn, MHD_GET_ARGUMENT_KIND, "fail_on_no_slot");
    if (fail && strcmp(fail, "0") != 0 && st.n_running >= n) {
        req_error(q, 503, "no_slot", NULL, "no slot available");
        return;
    }
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_putc(&b, '[');
    for (int32_t i = 0; i < n; i++) {
        mx_buf_printf(&b, "%s{\"id\":%d,\"n_ctx\":%d,\"is_processing\":%s}", i ? "," : "", i,
                      q->s->info.ctx_size, i < st.n_running ? "true" : "false");
    }
    mx_buf_putc(&b, ']');
    req_reply_json(q, 200, &b);
}

// ---- Cache ----

void handle_cache_stats(srv_req *q) {
    mlxcel_stats st;
    mlxcel_get_stats(q->s->engine, &st);
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_printf(&b,
                  "{\"enabled\":%s,\"hits\":%llu,\"misses\":%llu,\"tokens_reused\":%llu,"
                  "\"evictions\":%llu,\"bytes\":%llu,\"max_bytes\":%llu,\"entries\":%llu}",
                  q->s->c->engine.prefix_cache_bytes ? "true" : "false",
                  (unsigned long long)st.cache_hits, (unsigned long long)st.cache_misses,
                  (unsigned long long)st.prompt_tokens_cached,
                  (unsigned long long)st.cache_evictions, (unsigned long long)st.cache_bytes,
                  (unsigned long long)q->s->c->engine.prefix_cache_bytes,
                  (unsigned long long)st.cache_entries);
    req_reply_json(q, 200, &b);
}

void handle_cache_reset(srv_req *q) {
    mlxcel_cache_reset(q->s->engine);
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_puts(&b, "{\"status\":\"ok\"}");
    req_reply_json(q, 200, &b);
}

// ---- Counters ----

// The page's live line reads this; rates are the reader's to compute.
void handle_stats(srv_req *q) {
    mlxcel_stats st;
    mlxcel_get_stats(q->s->engine, &st);
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_printf(&b,
                  "{\"running\":%d,\"queued\":%d,\"prefilling\":%d,\"batch\":%d,"
                  "\"prompt_tokens\":%llu,\"prompt_tokens_cached\":%llu,\"decode_tokens\":%llu,"
                  "\"generated_tokens\":%llu,"
                  "\"prefill_s\":%.6f,\"decode_s\":%.6f,\"steps_prefill\":%llu,"
                  "\"steps_decode\":%llu,\"steps_mixed\":%llu,\"buffers_prefill\":%llu,"
                  "\"buffers_decode\":%llu,\"cache_hits\":%llu,\"cache_misses\":%llu,"
                  "\"requests\":%llu,\"cancelled\":%llu,\"kv_pages\":%llu,\"kv_pages_free\":%llu,"
                  "\"arena_bytes\":%llu,\"peak_bytes\":%llu}",
                  st.n_running, st.n_queued, st.n_prefilling, q->s->info.max_batch,
                  (unsigned long long)st.prompt_tokens, (unsigned long long)st.prompt_tokens_cached,
                  (unsigned long long)st.decode_tokens, (unsigned long long)st.generated_tokens,
                  st.prefill_s, st.decode_s, (unsigned long long)st.steps_prefill,
                  (unsigned long long)st.steps_decode, (unsigned long long)st.steps_mixed,
                  (unsigned long long)st.buffers_prefill, (unsigned long long)st.buffers_decode,
                  (unsigned long long)st.cache_hits, (unsigned long long)st.cache_misses,
                  (unsigned long long)st.n_requests, (unsigned long long)st.n_cancelled,
                  (unsigned long long)st.kv_pages, (unsigned long long)st.kv_pages_free,
                  (unsigned long long)st.arena_bytes, (unsigned long long)st.peak_bytes);
    req_reply_json(q, 200, &b);
}
