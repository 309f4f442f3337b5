// What the server counts: /metrics, /v1/stats and usage. The model is a script
// (support/script_model.h).
#include "support/served.h"

static const script scripts[] = {
    {'A', "Hello " SCRIPT_CUT "wor" SCRIPT_CUT "ld!"},
};

static int set_up(void **state) {
    (void)state;
    return serve_scripts(scripts, MX_COUNT(scripts), 256, "{{ messages[0].content }}", "--metrics");
}

static long long metric(const char *name) {
    reply r = get(S, "/metrics");
    const char *at = strstr(r.body.data, name);
    assert_non_null(at);
    long long x = strtoll(at + strlen(name), NULL, 10);
    reply_free(&r);
    return x;
}

static void cached_tokens_are_counted_apart(void **state) {
    (void)state;
    static const char computed[] = "\nllamacpp:prompt_tokens_total ";
    static const char cached[] = "\nllamacpp:prompt_tokens_cached_total ";
    static const char all[] = "\nmlxcel_prompt_tokens_total ";
    char body[300] = "{\"max_tokens\":1,\"prompt\":\"";
    size_t n = strlen(body);
    memset(body + n, 'g', 100);
    memcpy(body + n + 100, "\"}", 3);
    json_decref(post_json(S, "/v1/cache/reset", "", 200));
    json_decref(post_json(S, "/v1/completions", body, 200));
    long long a = metric(computed), b = metric(cached), c = metric(all);
    json_t *v = post_json(S, "/v1/completions", body, 200);
    long long reused = int_at(v, "usage/prompt_tokens_details/cached_tokens");
    json_decref(v);
    assert_true(reused >= 64);
    assert_int_equal(metric(cached) - b, reused);
    assert_int_equal(metric(computed) - a, 100 - reused);
    assert_int_equal(metric(all) - c, 100);
}

// Whatever is wrong with them; not those of other routes.
static void refusals_are_counted(void **state) {
    (void)state;
    static const char *const bad[] = {"{", "{\"prompt\":\"A\",\"x\":1}",
                                      "{\"prompt\":\"A\",\"n\":0}", "{\"prompt\":[]}"};
    long long before = metric("mlxcel_reject_total{reason=\"invalid\"}");
    for (size_t i = 0; i < MX_COUNT(bad); i++)
        json_decref(post_json(S, "/v1/completions", bad[i], 400));
    json_decref(post_json(S, "/tokenize", "{", 400));
    json_decref(get_json(S, "/nothing", 404));
    json_decref(post_json(S, "/v1/completions", "{\"prompt\":\"A\"}", 200));
    assert_int_equal(metric("mlxcel_reject_total{reason=\"invalid\"}"), before + 4);
}

// Metrics, /v1/stats and usage count the same tokens.
static void counters_agree_with_usage(void **state) {
    (void)state;
    json_t *before = get_json(S, "/v1/stats", 200);
    json_t *v = post_json(S, "/v1/completions",
                          "{\"prompt\":[\"bA\",\"A\"],\"n\":2,\"max_tokens\":3,"
                          "\"cache_prompt\":false}",
                          200);
    json_t *after = get_json(S, "/v1/stats", 200);
    long long made = int_at(after, "generated_tokens") - int_at(before, "generated_tokens");
    assert_int_equal(made, 12);
    assert_int_equal(int_at(v, "usage/completion_tokens"), made);
    char line[64];
    reply r = get(S, "/metrics");
    snprintf(line, sizeof line, "\nllamacpp:tokens_predicted_total %lld\n",
             int_at(after, "generated_tokens"));
    assert_non_null(strstr(r.body.data, line));
    snprintf(line, sizeof line, "\nmlxcel_completion_tokens_total %lld\n",
             int_at(after, "generated_tokens"));
    assert_non_null(strstr(r.body.data, line));
    reply_free(&r);
    json_decref(before);
    json_decref(after);
    json_decref(v);
}

static void metrics_have_their_names(void **state) {
    (void)state;
    static const char *const names[] = {"llamacpp:prompt_tokens_total",
                                        "llamacpp:prompt_tokens_cached_total",
                                        "llamacpp:prompt_seconds_total",
                                        "llamacpp:tokens_predicted_total",
                                        "llamacpp:tokens_predicted_seconds_total",
                                        "llamacpp:n_decode_total",
                                        "llamacpp:n_tokens_max",
                                        "llamacpp:prompt_tokens_seconds",
                                        "llamacpp:predicted_tokens_seconds",
                                        "llamacpp:requests_processing",
                                        "llamacpp:requests_deferred",
                                        "llamacpp:n_busy_slots_per_decode",
                                        "mlxcel_requests_total",
                                        "mlxcel_prompt_tokens_total",
                                        "mlxcel_completion_tokens_total",
                                        "mlxcel_generation_time_seconds_total",
                                        "mlxcel_slots_total",
                                        "mlxcel_slots_available",
                                        "mlxcel_queue_depth",
                                        "mlxcel_batch_sequences_started_total",
                                        "mlxcel_batch_sequences_completed_total",
                                        "mlxcel_batch_prefill_tokens_total",
                                        "mlxcel_batch_decode_tokens_total",
                                        "mlxcel_batch_decode_steps_total",
                                        "mlxcel_batch_decode_lookahead_steps_total",
                                        "mlxcel_batch_prefill_chunks_total",
                                        "mlxcel_batch_mixed_steps_total",
                                        "mlxcel_batch_prefill_grants_total",
                                        "mlxcel_batch_current_size",
                                        "mlxcel_cache_pool_active",
                                        "mlxcel_cache_pool_paged_block_size",
                                        "mlxcel_cache_pool_paged_blocks_allocated",
                                        "mlxcel_cache_pool_paged_live",
                                        "mlxcel_cache_pool_paged_free",
                                        "mlxcel_cache_pool_paged_bytes_reserved",
                                        "mlxcel_cache_pool_paged_bytes_in_use",
                                        "mlxcel_cache_pool_paged_block_budget",
                                        "mlxcel_decode_storage_fallbacks_total",
                                        "mlxcel_paged_decode_launches_total{path=\"fused_v2\"}",
                                        "mlxcel_prompt_cache_hits_total",
                                        "mlxcel_prompt_cache_misses_total",
                                        "mlxcel_prompt_cache_prefix_tokens_reused_total",
                                        "mlxcel_prompt_cache_evictions_total{reason=\"lru\"}",
                                        "mlxcel_prompt_cache_bytes",
                                        "mlxcel_prompt_cache_entries",
                                        "mlxcel_reject_total{reason=\"queue_full\"}",
                                        "mlxcel_request_ttft_ms_count",
                                        "mlxcel_request_decode_tok_s_count"};
    reply r = get(S, "/metrics");
    assert_int_equal(r.status, 200);
    const char *started = reply_header(&r, "Process-Start-Time-Unix");
    assert_true(started && atoll(started) > 1600000000);
    for (size_t i = 0; i < MX_COUNT(names); i++) {
        char line[128];
        snprintf(line, sizeof line, "\n%s ", names[i]);
        if (!strstr(r.body.data, line)) fail_msg("no %s", names[i]);
    }
    reply_free(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cached_tokens_are_counted_apart),
        cmocka_unit_test(metrics_have_their_names),
        cmocka_unit_test(counters_agree_with_usage),
        cmocka_unit_test(refusals_are_counted),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
