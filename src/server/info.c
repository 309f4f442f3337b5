// What the server says about itself: health, models, props, slots, counters. Never a prompt's text.
// State: the server's counters, under srv.lock.
#include "server/server_int.h"

#include "base/mem.h"
#include "base/os.h"

void handle_health(srv_req *q) {
    mx_buf b;
    mx_buf_init(&b, 0);
    if (atomic_load(&q->s->ready)) {
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
    put_text(&b, "fallbacks", i->fallbacks);
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

static const double ttft_ms[] = {5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 60000};
static const double rate_s[] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000};

void metrics_done(srv *s, const gen *g) {
    pthread_mutex_lock(&s->lock);
    s->m.seqs_ended += (uint64_t)g->n_jobs * (uint64_t)g->o.n;
    pthread_mutex_unlock(&s->lock);
    if (g->error.status != 0 || g->n_decoded == 0) return;
    const mlxcel_timings *t = &g->timings;
    double ttft = t->first_token_ms;
    double rate = t->decode_ms > 0 ? (t->n_decoded - 1) * 1e3 / t->decode_ms : 0;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < MX_COUNT(ttft_ms); i++) s->m.ttft_bucket[i] += ttft <= ttft_ms[i];
    s->m.ttft_count++;
    s->m.ttft_sum += ttft;
    if (t->n_decoded > 1) {
        for (size_t i = 0; i < MX_COUNT(rate_s); i++) s->m.rate_bucket[i] += rate <= rate_s[i];
        s->m.rate_count++;
        s->m.rate_sum += rate;
    }
    uint64_t n = (uint64_t)(g->n_prompt + g->n_decoded);
    if (n > s->m.n_tokens_max) s->m.n_tokens_max = n;
    pthread_mutex_unlock(&s->lock);
}

static void put_metric(mx_buf *b, const char *type, const char *name, const char *help, double v) {
    mx_buf_printf(b, "# HELP %s %s\n# TYPE %s %s\n%s %.15g\n", name, help, name, type, name, v);
}

static void put_histogram(mx_buf *b, const char *name, const char *help, const double *le,
                          const uint64_t *n, size_t k, uint64_t count, double sum) {
    mx_buf_printf(b, "# HELP %s %s\n# TYPE %s histogram\n", name, help, name);
    for (size_t i = 0; i < k; i++) {
        mx_buf_printf(b, "%s_bucket{le=\"%.10g\"} %llu\n", name, le[i], (unsigned long long)n[i]);
    }
    mx_buf_printf(b, "%s_bucket{le=\"+Inf\"} %llu\n%s_sum %.15g\n%s_count %llu\n", name,
                  (unsigned long long)count, name, sum, name, (unsigned long long)count);
}

// Rates since the last time somebody asked.
static void update_window(srv *s, const mlxcel_stats *st) {
    double dp = st->prefill_s - s->m.window_prompt_s, dd = st->decode_s - s->m.window_decode_s;
    uint64_t np = st->prompt_tokens;
    s->m.prompt_rate = dp > 0 ? (double)(np - s->m.window_prompt) / dp : 0;
    s->m.decode_rate = dd > 0 ? (double)(st->decode_tokens - s->m.window_decode) / dd : 0;
    s->m.window_prompt = np;
    s->m.window_decode = st->decode_tokens;
    s->m.window_prompt_s = st->prefill_s;
    s->m.window_decode_s = st->decode_s;
}

#define COUNTER(name, help, v) put_metric(b, "counter", name, help, (double)(v))
#define GAUGE(name, help, v)   put_metric(b, "gauge", name, help, (double)(v))

static void put_llamacpp(mx_buf *b, const srv *s, const mlxcel_stats *st) {
    uint64_t steps = st->steps_decode + st->steps_mixed;
    COUNTER("llamacpp:prompt_tokens_total", "Prompt tokens computed.", st->prompt_tokens);
    COUNTER("llamacpp:prompt_tokens_cached_total", "Prompt tokens taken from the cache.",
            st->prompt_tokens_cached);
    COUNTER("llamacpp:prompt_seconds_total", "Time of prefill steps.", st->prefill_s);
    COUNTER("llamacpp:tokens_predicted_total", "Tokens generated.", st->decode_tokens);
    COUNTER("llamacpp:tokens_predicted_seconds_total", "Time of decode steps.", st->decode_s);
    COUNTER("llamacpp:n_decode_total", "Steps that decoded.", steps);
    COUNTER("llamacpp:n_tokens_max", "Longest request, prompt and generated.", s->m.n_tokens_max);
    GAUGE("llamacpp:prompt_tokens_seconds", "Prefill speed since the last scrape.",
          s->m.prompt_rate);
    GAUGE("llamacpp:predicted_tokens_seconds", "Decode speed since the last scrape.",
          s->m.decode_rate);
    GAUGE("llamacpp:requests_processing", "Sequences that run.", st->n_running);
    GAUGE("llamacpp:requests_deferred", "Sequences that wait.", st->n_queued);
    GAUGE("llamacpp:n_busy_slots_per_decode", "Sequences in a decode step, on average.",
          steps ? (double)st->decode_tokens / (double)steps : 0);
}

static void put_own(mx_buf *b, const srv *s, const mlxcel_stats *st) {
    COUNTER("mlxcel_requests_total", "Requests taken by the engine.", st->n_requests);
    COUNTER("mlxcel_requests_cancelled_total", "Requests whose client left.", st->n_cancelled);
    COUNTER("mlxcel_requests_failed_total", "Requests that failed.", st->n_errors);
    COUNTER("mlxcel_http_requests_total", "HTTP requests.", s->m.http_total);
    COUNTER("mlxcel_prompt_tokens_total", "Prompt tokens, cached ones included.",
            st->prompt_tokens + st->prompt_tokens_cached);
    COUNTER("mlxcel_completion_tokens_total", "Tokens generated.", st->decode_tokens);
    COUNTER("mlxcel_generation_time_seconds_total", "Time of all steps.",
            st->prefill_s + st->decode_s);
    GAUGE("mlxcel_slots_total", "Places in the batch.", s->info.max_batch);
    GAUGE("mlxcel_slots_available", "Places that are free.",
          MX_MAX(s->info.max_batch - st->n_running, 0));
    GAUGE("mlxcel_queue_depth", "Sequences that wait.", st->n_queued);
    GAUGE("mlxcel_batch_current_size", "Sequences that run.", st->n_running);
    COUNTER("mlxcel_batch_prefill_tokens_total", "Prompt tokens computed.", st->prompt_tokens);
    COUNTER("mlxcel_batch_decode_tokens_total", "Tokens decoded.", st->decode_tokens);
    COUNTER("mlxcel_batch_decode_steps_total", "Steps that only decoded.", st->steps_decode);
    COUNTER("mlxcel_batch_decode_lookahead_steps_total",
            "Decode steps submitted before the last token was read.", st->steps_decode_pipelined);
    COUNTER("mlxcel_batch_sequences_started_total", "Sequences handed to the engine.",
            s->m.seqs_started);
    COUNTER("mlxcel_batch_sequences_completed_total", "Sequences of requests that are over.",
            s->m.seqs_ended);
    COUNTER("mlxcel_batch_prefill_grants_total", "Prefill steps while others decoded.",
            st->prefill_grants);
    COUNTER("mlxcel_batch_prefill_chunks_total", "Steps that prefilled.", st->steps_prefill);
    COUNTER("mlxcel_batch_mixed_steps_total", "Steps that did both.", st->steps_mixed);
    COUNTER("mlxcel_preemptions_total", "Sequences sent back to the queue.", st->preemptions);
    GAUGE("mlxcel_cache_pool_active", "Sequences that hold KV state.", st->n_running);
    GAUGE("mlxcel_cache_pool_paged_block_budget", "KV pages that may be used.", st->kv_pages);
    GAUGE("mlxcel_cache_pool_paged_block_size", "Tokens in a KV page.", st->kv_page_tokens);
    GAUGE("mlxcel_cache_pool_paged_blocks_allocated", "KV pages.", st->kv_pages);
    GAUGE("mlxcel_cache_pool_paged_free", "KV pages that are free.", st->kv_pages_free);
    GAUGE("mlxcel_cache_pool_paged_live", "KV pages that are used.",
          st->kv_pages - st->kv_pages_free);
    GAUGE("mlxcel_cache_pool_paged_bytes_reserved", "Bytes of the KV pool.", st->kv_pool_bytes);
    GAUGE("mlxcel_cache_pool_paged_bytes_in_use", "Bytes of it that are used.", st->kv_used_bytes);
    COUNTER("mlxcel_decode_storage_fallbacks_total", "Paged storage asked for and declined.",
            st->storage_fallbacks);
    COUNTER("mlxcel_prompt_cache_hits_total", "Requests that found a cached prefix.",
            st->cache_hits);
    COUNTER("mlxcel_prompt_cache_misses_total", "Requests that found none.", st->cache_misses);
    COUNTER("mlxcel_prompt_cache_prefix_tokens_reused_total", "Prompt tokens not computed again.",
            st->prompt_tokens_cached);
    mx_buf_printf(b,
                  "# HELP mlxcel_prompt_cache_evictions_total Entries dropped for room.\n"
                  "# TYPE mlxcel_prompt_cache_evictions_total counter\n"
                  "mlxcel_prompt_cache_evictions_total{reason=\"lru\"} %llu\n",
                  (unsigned long long)st->cache_evictions);
    if (strcmp(s->info.kv_storage, "paged") == 0) { // there is one path, and no other to fall to
        mx_buf_printf(b,
                      "# HELP mlxcel_paged_decode_launches_total Decode steps on paged storage.\n"
                      "# TYPE mlxcel_paged_decode_launches_total counter\n"
                      "mlxcel_paged_decode_launches_total{path=\"fused_v2\"} %llu\n",
                      (unsigned long long)st->steps_decode);
    }
    GAUGE("mlxcel_prompt_cache_bytes", "Bytes held for later prompts.", st->cache_bytes);
    GAUGE("mlxcel_prompt_cache_entries", "Entries held.", st->cache_entries);
    COUNTER("mlxcel_disconnects_total", "Clients that left before their answer.", s->m.disconnects);
    COUNTER("mlxcel_command_buffers_prefill_total", "Command buffers of prefill steps.",
            st->buffers_prefill);
    COUNTER("mlxcel_command_buffers_decode_total", "Command buffers of decode steps.",
            st->buffers_decode);
    COUNTER("mlxcel_plans_made_total", "Step plans recorded.", st->plans_made);
    COUNTER("mlxcel_plan_hits_total", "Steps that reused a plan.", st->plan_hits);
    COUNTER("mlxcel_plan_evictions_total", "Plans dropped for others.", st->plan_evictions);
    mx_buf_puts(b, "# HELP mlxcel_slow_path_total Slow paths taken, by name (docs/cuda.md).\n"
                   "# TYPE mlxcel_slow_path_total counter\n");
    for (int32_t i = 0; i < MLXCEL_SLOW_PATHS; i++) {
        mx_buf_printf(b, "mlxcel_slow_path_total{path=\"%s\"} %llu\n", mlxcel_slow_path(i, NULL),
                      (unsigned long long)st->slow[i]);
    }
    mx_buf_printf(b,
                  "# HELP mlxcel_reject_total Requests refused.\n"
                  "# TYPE mlxcel_reject_total counter\n"
                  "mlxcel_reject_total{reason=\"queue_full\"} %llu\n"
                  "mlxcel_reject_total{reason=\"invalid\"} %llu\n",
                  (unsigned long long)s->m.rejected_busy,
                  (unsigned long long)s->m.rejected_invalid);
    put_histogram(b, "mlxcel_request_ttft_ms", "Milliseconds to the first token.", ttft_ms,
                  s->m.ttft_bucket, MX_COUNT(ttft_ms), s->m.ttft_count, s->m.ttft_sum);
    put_histogram(b, "mlxcel_request_decode_tok_s", "Tokens per second of a request.", rate_s,
                  s->m.rate_bucket, MX_COUNT(rate_s), s->m.rate_count, s->m.rate_sum);
}

void handle_metrics(srv_req *q) {
    srv *s = q->s;
    if (!s->c->metrics) {
        req_error(q, 501, NULL, NULL,
                  "This server does not support metrics endpoint. Start it with `--metrics`");
        return;
    }
    mlxcel_stats st;
    mlxcel_get_stats(s->engine, &st);
    mx_buf b;
    mx_buf_init(&b, 0);
    pthread_mutex_lock(&s->lock);
    update_window(s, &st);
    put_llamacpp(&b, s, &st);
    put_own(&b, s, &st);
    pthread_mutex_unlock(&s->lock);
    put_metric(&b, "gauge", "process_start_time_seconds", "When the server started.",
               s->started_wall_s);
    put_metric(&b, "gauge", "process_resident_memory_bytes", "Resident memory.",
               (double)mx_mem_rss_bytes());
    req_reply(q, 200, "text/plain; version=0.0.4; charset=utf-8", &b);
}

// The page's live line reads this; rates are the reader's to compute.
void handle_stats(srv_req *q) {
    mlxcel_stats st;
    mlxcel_get_stats(q->s->engine, &st);
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_printf(&b,
                  "{\"running\":%d,\"queued\":%d,\"prefilling\":%d,\"batch\":%d,"
                  "\"prompt_tokens\":%llu,\"prompt_tokens_cached\":%llu,\"decode_tokens\":%llu,"
                  "\"prefill_s\":%.6f,\"decode_s\":%.6f,\"steps_prefill\":%llu,"
                  "\"steps_decode\":%llu,\"steps_mixed\":%llu,\"buffers_prefill\":%llu,"
                  "\"buffers_decode\":%llu,\"cache_hits\":%llu,\"cache_misses\":%llu,"
                  "\"requests\":%llu,\"cancelled\":%llu,\"kv_pages\":%llu,\"kv_pages_free\":%llu}",
                  st.n_running, st.n_queued, st.n_prefilling, q->s->info.max_batch,
                  (unsigned long long)st.prompt_tokens, (unsigned long long)st.prompt_tokens_cached,
                  (unsigned long long)st.decode_tokens, st.prefill_s, st.decode_s,
                  (unsigned long long)st.steps_prefill, (unsigned long long)st.steps_decode,
                  (unsigned long long)st.steps_mixed, (unsigned long long)st.buffers_prefill,
                  (unsigned long long)st.buffers_decode, (unsigned long long)st.cache_hits,
                  (unsigned long long)st.cache_misses, (unsigned long long)st.n_requests,
                  (unsigned long long)st.n_cancelled, (unsigned long long)st.kv_pages,
                  (unsigned long long)st.kv_pages_free);
    req_reply_json(q, 200, &b);
}
