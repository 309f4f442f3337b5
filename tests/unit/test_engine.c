// The engine on a tiny model: what must not change an answer (budgets, batch, chunk, threads,
// storage, fused ops), what ends a request, what a queue refuses.
#include "base/knobs.h"
#include "engine/engine_int.h"
#include "support/tiny_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
// cmocka.h needs the two above and stdio, stdlib
#include <cmocka.h>

static char *dir, *model, *model_q4;

static int set_up(void **state) {
    (void)state;
    dir = ckpt_temp_dir();
    model = mx_path_join(dir, "tiny.gguf");
    model_q4 = mx_path_join(dir, "tiny-q4.gguf");
    tiny_write(model, &(tiny_opts){.max_ctx = 32768});
    tiny_write(model_q4, &(tiny_opts){.type = MX_Q4_1, .max_ctx = 4096});
    mx_log_set_level(MX_LOG_ERROR);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    mx_free(model);
    mx_free(model_q4);
    ckpt_remove_dir(dir);
    return 0;
}

static mlxcel_engine *open_engine(const mlxcel_params *p) {
    mlxcel_error err = {0};
    mlxcel_engine *e = NULL;
    mlxcel_params q = *p;
    if (!q.model) q.model = model;
    q.device = "cpu";
    if (mlxcel_open(&e, &q, &err) != 0) fail_msg("open: %s", err.message);
    return e;
}

typedef struct result {
    uint64_t tokens, logits;
    int32_t n;
    mlxcel_finish finish;
    char text[1024];
    int status;
} result;

static void make_prompt(int32_t *ids, size_t n, uint32_t seed) {
    for (size_t i = 0; i < n; i++) ids[i] = (int32_t)(ckpt_mix(seed, i) % 256);
}

static mlxcel_request *submit(mlxcel_engine *e, const int32_t *ids, size_t n, int32_t max_tokens,
                              float temperature) {
    mlxcel_request_params p;
    mlxcel_request_params_init(&p);
    p.ids = ids;
    p.n_ids = n;
    p.max_tokens = max_tokens;
    p.hash_logits = true;
    p.run_past_end = true;
    p.sampling.temperature = temperature;
    p.sampling.seed = 42;
    p.sampling.has_seed = true;
    mlxcel_request *r = NULL;
    mlxcel_error err = {0};
    if (mlxcel_submit(e, &p, &r, &err) != 0) fail_msg("submit: %s", err.message);
    return r;
}

static result collect(mlxcel_request *r) {
    result out = {0};
    mlxcel_event ev;
    size_t n = 0;
    while (mlxcel_next_event(r, 60, &ev)) {
        if (ev.kind == MLXCEL_EVENT_TEXT && n + ev.n_text < sizeof out.text) {
            memcpy(out.text + n, ev.text, ev.n_text);
            n += ev.n_text;
            out.n += ev.n_tokens;
        }
        if (ev.kind != MLXCEL_EVENT_DONE) continue;
        out.tokens = ev.token_hash;
        out.logits = ev.logit_hash;
        out.finish = ev.finish;
        out.status = ev.error.status;
    }
    mlxcel_request_free(r);
    return out;
}

static result run_one(const mlxcel_params *p, size_t n_prompt, int32_t n_decode,
                      mlxcel_stats *stats) {
    int32_t *ids = mx_alloc(n_prompt * sizeof *ids);
    make_prompt(ids, n_prompt, 1);
    mlxcel_engine *e = open_engine(p);
    result r = collect(submit(e, ids, n_prompt, n_decode, 0));
    if (stats) mlxcel_get_stats(e, stats);
    mlxcel_close(e);
    mx_free(ids);
    return r;
}

static void assert_same(result a, result b) {
    assert_int_equal(a.finish, b.finish);
    assert_true(a.tokens == b.tokens);
    assert_true(a.logits == b.logits);
}

static void set_knob(const char *name, const char *value) {
    if (value)
        setenv(name, value, 1);
    else
        unsetenv(name);
    mx_knobs_reload();
}

static void chunk_threads_storage_and_fusion_change_nothing(void **state) {
    (void)state;
    const char *const models[] = {model, model_q4}; // the second context size is no whole page
    for (int m = 0; m < 2; m++) {
        mlxcel_params base = {.model = models[m], .n_threads = 1, .prefill_chunk = 512};
        if (m == 1) base.ctx_size = 333;
        result want = run_one(&base, 300, 20, NULL);
        assert_int_equal(want.n, 20);
        static const int32_t chunks[] = {1, 7, 64, 299};
        for (size_t i = 0; i < MX_COUNT(chunks); i++) {
            mlxcel_params p = base;
            p.prefill_chunk = chunks[i];
            assert_same(run_one(&p, 300, 20, NULL), want);
        }
        mlxcel_params p = base;
        p.n_threads = 3;
        assert_same(run_one(&p, 300, 20, NULL), want);
        p = base;
        p.kv_storage = "paged";
        assert_same(run_one(&p, 300, 20, NULL), want);
        p.lazy_weights = true;
        assert_same(run_one(&p, 300, 20, NULL), want);
        set_knob("MLXCEL_FUSED_OPS", "0");
        assert_same(run_one(&base, 300, 20, NULL), want);
        set_knob("MLXCEL_FUSED_OPS", NULL);
    }
}

// The default chunk: measured at load for several sequences, from the first prompts' steps for one.
static void a_measured_chunk_changes_nothing(void **state) {
    (void)state;
    mlxcel_params fixed = {.prefill_chunk = 512}, one = {0}, many = {.max_batch = 3};
    result want = run_one(&fixed, 1900, 12, NULL);
    mlxcel_stats s;
    assert_same(run_one(&one, 1900, 12, &s), want);
    assert_true(s.steps_prefill >= 5); // begins with 32, at most 512
    mlxcel_engine *e = open_engine(&many);
    mlxcel_info info;
    mlxcel_get_info(e, &info);
    assert_int_equal(strncmp(info.prefill_chunk_why, "measured: ", 10), 0);
    assert_in_range(info.prefill_chunk, 32, 2048);
    assert_int_equal(info.prefill_chunk % 16, 0);
    mlxcel_get_stats(e, &s);
    assert_int_equal(s.prompt_tokens, 0); // measuring is nobody's work
    int32_t ids[1900];
    make_prompt(ids, 1900, 1);
    for (int i = 0; i < 2; i++) assert_same(collect(submit(e, ids, 1900, 12, 0)), want);
    mlxcel_get_stats(e, &s);
    assert_int_equal(s.kv_pages, s.kv_pages_free);
    mlxcel_close(e);
    many.prefill_chunk = 48;
    e = open_engine(&many);
    mlxcel_get_info(e, &info);
    assert_int_equal(info.prefill_chunk, 48);
    assert_string_equal(info.prefill_chunk_why, "as asked for");
    mlxcel_close(e);
    many.prefill_chunk = 0;
    set_knob("MLXCEL_PREFILL_CHUNK", "0"); // the whole prompt
    e = open_engine(&many);
    set_knob("MLXCEL_PREFILL_CHUNK", NULL);
    mlxcel_get_info(e, &info);
    assert_int_equal(info.prefill_chunk, info.ctx_size);
    mlxcel_close(e);
}

static void every_budget_gives_the_same_bits_and_peak(void **state) {
    (void)state;
    mlxcel_params p = {.prefill_chunk = 512};
    mlxcel_stats unlimited, s;
    result want = run_one(&p, 200, 10, &unlimited);
    static const char *const budgets[][2] = {{"1", NULL}, {"5", NULL}, {"50", "1"}, {NULL, "1"}};
    for (size_t i = 0; i < MX_COUNT(budgets); i++) {
        set_knob("MLX_MAX_OPS_PER_BUFFER", budgets[i][0]);
        set_knob("MLX_MAX_MB_PER_BUFFER", budgets[i][1]);
        set_knob("MLXCEL_MIN_OPS_PER_BUFFER", "0");
        assert_same(run_one(&p, 200, 10, &s), want);
        assert_int_equal(s.peak_bytes, unlimited.peak_bytes);
        assert_int_equal(s.arena_bytes, unlimited.arena_bytes);
        if (i < 2) assert_true(s.buffers_decode > unlimited.buffers_decode);
    }
    assert_int_equal(unlimited.buffers_decode, unlimited.steps_decode);
    set_knob("MLX_MAX_OPS_PER_BUFFER", NULL);
    set_knob("MLX_MAX_MB_PER_BUFFER", NULL);
    set_knob("MLXCEL_MIN_OPS_PER_BUFFER", NULL);
}

static void a_long_prefill_keeps_bits_and_peak(void **state) {
    (void)state;
    mlxcel_params p = {.ctx_size = 20480, .prefill_chunk = 1024};
    mlxcel_stats a, b;
    result want = run_one(&p, 20000, 2, &a);
    set_knob("MLX_MAX_OPS_PER_BUFFER", "4");
    result got = run_one(&p, 20000, 2, &b);
    set_knob("MLX_MAX_OPS_PER_BUFFER", NULL);
    assert_same(got, want);
    assert_int_equal(a.peak_bytes, b.peak_bytes);
    assert_true(b.commits_ops > 0 && a.commits_ops == 0);
}

static void a_row_does_not_depend_on_its_neighbours(void **state) {
    (void)state;
    enum { N = 5 };
    static const size_t lengths[N] = {5, 33, 64, 130, 257};
    int32_t ids[N][300];
    result solo[N];
    mlxcel_params one = {.n_threads = 2},
                  many = {.n_threads = 2, .max_batch = N, .prefill_chunk = 96, .ctx_size = 512};
    for (uint32_t i = 0; i < N; i++) {
        make_prompt(ids[i], lengths[i], i + 10);
        mlxcel_engine *e = open_engine(&one);
        solo[i] = collect(submit(e, ids[i], lengths[i], 24, i % 2 ? 0.9f : 0.0f));
        mlxcel_close(e);
    }
    for (int mixed = 0; mixed < 2; mixed++) { // prompts in steps of their own, beside decode rows
        set_knob("MLXCEL_MIXED_STEP", mixed ? "1" : NULL);
        mlxcel_engine *e = open_engine(&many);
        mlxcel_request *r[N];
        for (int i = 0; i < N; i++) r[i] = submit(e, ids[i], lengths[i], 24, i % 2 ? 0.9f : 0.0f);
        for (int i = 0; i < N; i++) assert_same(collect(r[i]), solo[i]);
        mlxcel_stats s;
        mlxcel_get_stats(e, &s);
        assert_true(s.steps_decode < (uint64_t)N * 24); // they did share steps
        assert_int_equal(s.steps_mixed > 0, mixed);
        mlxcel_close(e);
    }
    set_knob("MLXCEL_MIXED_STEP", NULL);
}

static void a_small_pool_preempts_and_answers_all_the_same(void **state) {
    (void)state;
    enum { N = 4 };
    int32_t ids[N][64];
    result solo[N];
    mlxcel_params one = {.ctx_size = 256};
    mlxcel_engine *e = open_engine(&one);
    for (uint32_t i = 0; i < N; i++) {
        make_prompt(ids[i], 60, i + 77);
        solo[i] = collect(submit(e, ids[i], 60, 190, 0));
    }
    mlxcel_info info;
    mlxcel_get_info(e, &info);
    mlxcel_close(e);
    mlxcel_params p = {.ctx_size = 256,
                       .max_batch = N,
                       .kv_storage = "paged",
                       .kv_budget_bytes = info.kv_token_bytes * 320};
    e = open_engine(&p);
    mlxcel_stats s;
    mlxcel_get_stats(e, &s); // the pool is known before anything runs
    assert_int_equal(s.kv_pages, 320 / 32);
    assert_int_equal(s.kv_pages_free, s.kv_pages);
    mlxcel_request *r[N];
    for (int i = 0; i < N; i++) r[i] = submit(e, ids[i], 60, 190, 0);
    for (int i = 0; i < N; i++) assert_same(collect(r[i]), solo[i]);
    mlxcel_get_stats(e, &s);
    assert_true(s.preemptions > 0);
    assert_int_equal(s.kv_pages, s.kv_pages_free);
    mlxcel_close(e);
}

// A prompt asked again is taken from memory, and the answer has the same bits; salts do not mix.
// Somebody else has every page of the pool: requests are refused, the engine does not spin.
static void a_pool_without_pages_refuses(void **state) {
    (void)state;
    mlxcel_params p = {.max_batch = 4, .ctx_size = 256, .kv_storage = "paged", .n_threads = 1};
    mlxcel_engine *e = open_engine(&p);
    mlxcel_info info;
    mlxcel_get_info(e, &info);
    mlxcel_close(e);
    p.kv_budget_bytes = info.kv_token_bytes * 256; // one context
    e = open_engine(&p);
    mx_err why = {0};
    int32_t ids[100], all = mx_kv_seq_open(e->kv); // its thread sleeps
    assert_int_equal(mx_kv_reserve(e->kv, all, 256, &why), MX_OK);
    make_prompt(ids, 100, 1);
    mlxcel_request *r[] = {submit(e, ids, 100, 5, 0), submit(e, ids, 10, 5, 0)};
    for (int i = 0; i < 2; i++) {
        mlxcel_event ev = {0};
        while (mlxcel_next_event(r[i], 20, &ev) && ev.kind != MLXCEL_EVENT_DONE) continue;
        assert_int_equal(ev.kind, MLXCEL_EVENT_DONE);
        assert_int_equal(ev.error.status, MX_NOMEM);
        assert_non_null(strstr(ev.error.message, "0 of 8 pages of 32 tokens"));
        mlxcel_request_free(r[i]);
    }
    mlxcel_close(e);
}

static void a_cache_hit_changes_nothing(void **state) {
    (void)state;
    static const size_t lengths[] = {1, 31, 32, 33, 96, 200};
    mlxcel_params cold = {.ctx_size = 512, .kv_storage = "paged"}, warm = cold;
    warm.prefix_cache_bytes = (uint64_t)8 << 20;
    mlxcel_engine *a = open_engine(&cold), *b = open_engine(&warm);
    int32_t ids[300];
    for (size_t i = 0; i < MX_COUNT(lengths); i++) {
        make_prompt(ids, lengths[i], 500);
        result want = collect(submit(a, ids, lengths[i], 40, 0));
        for (int k = 0; k < 3; k++) assert_same(collect(submit(b, ids, lengths[i], 40, 0)), want);
    }
    mlxcel_stats s;
    mlxcel_get_stats(b, &s);
    assert_true(s.cache_hits >= 8);
    assert_true(s.prompt_tokens_cached >= 2 * (64 + 192));
    assert_true(s.cache_bytes > 0 && s.cache_bytes <= warm.prefix_cache_bytes);
    mlxcel_cache_reset(b);
    make_prompt(ids, 200, 500);
    collect(submit(b, ids, 200, 1, 0));
    mlxcel_stats t;
    mlxcel_get_stats(b, &t);
    assert_int_equal(t.cache_misses, s.cache_misses + 1);
    mlxcel_close(a);
    mlxcel_close(b);
}

static void the_cache_keeps_below_its_cap(void **state) {
    (void)state;
    mlxcel_params p = {.ctx_size = 512, .max_batch = 2, .prefix_cache_bytes = 600 << 10};
    mlxcel_engine *e = open_engine(&p);
    int32_t ids[260];
    for (uint32_t i = 0; i < 30; i++) {
        make_prompt(ids, 256, 1000 + i);
        collect(submit(e, ids, 256, 2, 0));
        mlxcel_stats s;
        mlxcel_get_stats(e, &s);
        assert_true(s.cache_bytes <= p.prefix_cache_bytes);
    }
    mlxcel_stats s;
    mlxcel_get_stats(e, &s);
    assert_true(s.cache_evictions > 0);
    mlxcel_cache_reset(e);
    collect(submit(e, ids, 20, 1, 0));
    mlxcel_get_stats(e, &s);
    assert_int_equal(s.kv_pages, s.kv_pages_free);
    mlxcel_close(e);
}

static void cancel_frees_what_it_held(void **state) {
    (void)state;
    mlxcel_params p = {.max_batch = 2, .kv_storage = "paged", .ctx_size = 8192};
    mlxcel_engine *e = open_engine(&p);
    int32_t ids[32];
    make_prompt(ids, 32, 3);
    mlxcel_request *r = submit(e, ids, 32, 8000, 0), *queued[3];
    for (int i = 0; i < 3; i++) queued[i] = submit(e, ids, 32, 8000, 0);
    mlxcel_event ev;
    do {
        assert_true(mlxcel_next_event(r, 60, &ev));
    } while (ev.kind != MLXCEL_EVENT_TEXT);
    mlxcel_cancel(queued[2]);
    assert_int_equal(collect(queued[2]).finish, MLXCEL_FINISH_CANCEL);
    mlxcel_request_free(queued[1]); // freeing cancels
    mlxcel_cancel(r);
    mlxcel_cancel(queued[0]);
    assert_int_equal(collect(r).finish, MLXCEL_FINISH_CANCEL);
    assert_int_equal(collect(queued[0]).finish, MLXCEL_FINISH_CANCEL);
    result after = collect(submit(e, ids, 32, 4, 0));
    assert_int_equal(after.finish, MLXCEL_FINISH_LENGTH);
    mlxcel_stats s;
    mlxcel_get_stats(e, &s);
    assert_int_equal(s.kv_pages, s.kv_pages_free);
    mlxcel_close(e);
}

// A request that decodes counts the steps; in one of them it cancels another.
typedef struct pacer {
    int steps;
    int at; // the step in which it cancelled, 0: not yet
    _Atomic(mlxcel_request *) victim;
} pacer;

static void on_pace(void *user, mlxcel_event_kind kind) {
    (void)kind;
    pacer *p = user;
    p->steps++;
    mlxcel_request *victim = p->victim;
    if (!victim || p->at) return;
    mlxcel_cancel(victim);
    p->at = p->steps;
}

typedef struct victim {
    const pacer *pace;
    int ended; // the step of its last event
} victim;

static void on_victim(void *user, mlxcel_event_kind kind) {
    (void)kind;
    victim *v = user;
    v->ended = v->pace->steps;
}

static mlxcel_request *submit_notify(mlxcel_engine *e, const int32_t *ids, size_t n,
                                     void (*notify)(void *, mlxcel_event_kind), void *user) {
    mlxcel_request_params p;
    mlxcel_request_params_init(&p);
    p.ids = ids;
    p.n_ids = n;
    p.run_past_end = true;
    p.notify = notify;
    p.user = user;
    mlxcel_request *r = NULL;
    mlxcel_error err = {0};
    if (mlxcel_submit(e, &p, &r, &err) != 0) fail_msg("submit: %s", err.message);
    return r;
}

static void wait_kind(mlxcel_request *r, mlxcel_event_kind kind) {
    mlxcel_event ev;
    do {
        assert_true(mlxcel_next_event(r, 60, &ev));
    } while (ev.kind != kind);
}

typedef enum stage { QUEUED, PREFILLING, DECODING } stage;

static void cancel_in(stage g, const int32_t *ids, size_t n_long) {
    mlxcel_params p = {
        .max_batch = g == QUEUED ? 1 : 2, .ctx_size = 32768, .prefill_chunk = 64, .n_threads = 1};
    p.kv_storage = "paged";
    mlxcel_engine *e = open_engine(&p);
    pacer pace = {0};
    victim v = {.pace = &pace};
    mlxcel_request *r = submit_notify(e, ids, 16, on_pace, &pace);
    wait_kind(r, MLXCEL_EVENT_TEXT);
    mlxcel_request *other = submit_notify(e, ids, g == PREFILLING ? n_long : 16, on_victim, &v);
    if (g != QUEUED) wait_kind(other, g == PREFILLING ? MLXCEL_EVENT_PROMPT : MLXCEL_EVENT_TEXT);
    pace.victim = other;
    result got = collect(other); // frees it
    assert_int_equal(got.finish, MLXCEL_FINISH_CANCEL);
    mlxcel_stats s;
    mlxcel_get_stats(e, &s);
    mlxcel_request *next = submit_notify(e, ids, 16, NULL, NULL);
    if (g != QUEUED) wait_kind(next, MLXCEL_EVENT_TEXT); // its place is free
    assert_true(s.n_running == 1 && s.n_queued == 0);
    mlxcel_request_free(next);
    mlxcel_cancel(r);
    collect(r);
    assert_true(pace.at > 0 && v.ended - pace.at <= 1);
    mlxcel_get_stats(e, &s);
    assert_int_equal(s.kv_pages, s.kv_pages_free);
    mlxcel_close(e);
}

static void a_cancelled_request_is_gone_within_a_step(void **state) {
    (void)state;
    enum { LONG = 20000 };
    int32_t *ids = mx_alloc(LONG * sizeof *ids);
    make_prompt(ids, LONG, 31);
    for (int g = QUEUED; g <= DECODING; g++) cancel_in((stage)g, ids, LONG);
    mx_free(ids);
}

static void bad_requests_are_refused_by_name(void **state) {
    (void)state;
    mlxcel_params p = {.ctx_size = 64, .max_queue = 2};
    mlxcel_engine *e = open_engine(&p);
    mlxcel_request_params q;
    mlxcel_request *r;
    mlxcel_error err;
    int32_t ids[70] = {0};
    mlxcel_request_params_init(&q);
    q.ids = ids;
    assert_int_equal(mlxcel_submit(e, &q, &r, &err), MX_INVALID);
    assert_non_null(strstr(err.message, "Empty prompt"));
    q.n_ids = 64;
    assert_int_equal(mlxcel_submit(e, &q, &r, &err), MX_CONTEXT);
    assert_non_null(strstr(err.message, "64 tokens"));
    q.n_ids = 3;
    ids[1] = TINY_VOCAB;
    assert_int_equal(mlxcel_submit(e, &q, &r, &err), MX_INVALID);
    ids[1] = 0;
    q.sampling.top_p = 7;
    assert_int_equal(mlxcel_submit(e, &q, &r, &err), MX_OK);
    result bad = collect(r);
    assert_int_equal(bad.finish, MLXCEL_FINISH_ERROR);
    assert_int_equal(bad.status, MX_INVALID);
    mlxcel_logit_bias all[TINY_VOCAB]; // none is left to choose
    for (int32_t i = 0; i < TINY_VOCAB; i++) all[i] = (mlxcel_logit_bias){i, -100};
    q.sampling.top_p = 1;
    q.sampling.bias = all;
    q.sampling.n_bias = TINY_VOCAB;
    assert_int_equal(mlxcel_submit(e, &q, &r, &err), MX_OK);
    bad = collect(r);
    assert_int_equal(bad.finish, MLXCEL_FINISH_ERROR);
    assert_int_equal(bad.status, MX_INVALID);
    mlxcel_close(e);
}

static void a_full_queue_is_busy(void **state) {
    (void)state;
    mlxcel_params p = {.max_queue = 2, .ctx_size = 8192};
    mlxcel_engine *e = open_engine(&p);
    int32_t ids[8];
    make_prompt(ids, 8, 5);
    mlxcel_request *r[3], *refused;
    for (int i = 0; i < 3; i++) r[i] = submit(e, ids, 8, 8000, 0);
    mlxcel_request_params q;
    mlxcel_request_params_init(&q);
    q.ids = ids;
    q.n_ids = 8;
    mlxcel_error err;
    assert_int_equal(mlxcel_submit(e, &q, &refused, &err), MX_BUSY);
    for (int i = 0; i < 3; i++) mlxcel_request_free(r[i]);
    mlxcel_close(e);
}

static void choices_differ_and_repeat(void **state) {
    (void)state;
    mlxcel_params p = {.max_batch = 3};
    mlxcel_engine *e = open_engine(&p);
    int32_t ids[16];
    make_prompt(ids, 16, 9);
    mlxcel_request_params q;
    mlxcel_request_params_init(&q);
    q.ids = ids;
    q.n_ids = 16;
    q.max_tokens = 12;
    q.n_choices = 3;
    q.sampling.temperature = 1.5f;
    q.sampling.seed = 42;
    q.sampling.has_seed = q.sampling.ignore_eos = true;
    uint64_t hash[2][3] = {{0}};
    for (int round = 0; round < 2; round++) {
        mlxcel_request *r;
        mlxcel_error err;
        assert_int_equal(mlxcel_submit(e, &q, &r, &err), MX_OK);
        mlxcel_event ev;
        while (mlxcel_next_event(r, 60, &ev)) {
            if (ev.kind == MLXCEL_EVENT_CHOICE) hash[round][ev.choice] = ev.token_hash;
        }
        mlxcel_request_free(r);
    }
    for (int i = 0; i < 3; i++) assert_true(hash[0][i] == hash[1][i]);
    assert_true(hash[0][0] != hash[0][1] && hash[0][1] != hash[0][2] && hash[0][0] != hash[0][2]);
    mlxcel_close(e);
}

static void run_choices(const mlxcel_params *p, const int32_t *ids, size_t n, uint64_t hash[4],
                        mlxcel_stats *stats) {
    mlxcel_engine *e = open_engine(p);
    mlxcel_request_params q;
    mlxcel_request_params_init(&q);
    q.ids = ids;
    q.n_ids = n;
    q.max_tokens = 70; // pages of their own follow
    q.n_choices = 4;
    q.sampling.temperature = 1.5f;
    q.sampling.seed = 7;
    q.sampling.has_seed = q.sampling.ignore_eos = q.hash_logits = true;
    mlxcel_request *r;
    mlxcel_error err;
    assert_int_equal(mlxcel_submit(e, &q, &r, &err), MX_OK);
    mlxcel_event ev;
    while (mlxcel_next_event(r, 60, &ev)) {
        if (ev.kind == MLXCEL_EVENT_CHOICE) hash[ev.choice] = ev.token_hash ^ ev.logit_hash;
    }
    mlxcel_request_free(r);
    mlxcel_get_stats(e, stats);
    assert_int_equal(stats->kv_pages, stats->kv_pages_free);
    mlxcel_close(e);
}

// In pages the prompt of several choices is computed once; the page it ends in is copied by each.
static void choices_share_the_prompt(void **state) {
    (void)state;
    static const size_t lengths[] = {1, 2, 32, 33, 77};
    int32_t ids[100];
    make_prompt(ids, 100, 41);
    for (size_t i = 0; i < MX_COUNT(lengths); i++) {
        size_t n = lengths[i];
        uint64_t apart[4], shared[4], two[4], tight[4];
        mlxcel_stats s;
        mlxcel_params p = {
            .max_batch = 4, .kv_storage = "dense", .prefill_chunk = 50, .ctx_size = 512};
        run_choices(&p, ids, n, apart, &s);
        assert_int_equal(s.prompt_tokens, 4 * n);
        p.kv_storage = "paged";
        run_choices(&p, ids, n, shared, &s);
        assert_int_equal(s.prompt_tokens, n + 3);
        p.max_batch = 2; // the others begin when the first has ended
        run_choices(&p, ids, n, two, &s);
        p.max_batch = 4; // and put back, in a pool for one context
        p.ctx_size = 192;
        p.kv_budget_bytes = s.kv_pool_bytes / 2 * 192 / 512;
        run_choices(&p, ids, n, tight, &s);
        if (n == 77) assert_true(s.preemptions > 0);
        assert_memory_equal(tight, apart, sizeof apart);
        assert_memory_equal(shared, apart, sizeof apart);
        assert_memory_equal(two, apart, sizeof apart);
        assert_true(apart[0] != apart[1] && apart[2] != apart[3]);
    }
}

// Without prefill steps beside decoding (serve --prefill-grant-interval 0) the choices of a request
// begin all the same, and wait while there is no place: the count of steps does not overflow.
static void choices_wait_for_places_without_grants(void **state) {
    (void)state;
    int32_t ids[40];
    make_prompt(ids, 40, 41);
    uint64_t want[4], got[4];
    mlxcel_stats s;
    mlxcel_params p = {.max_batch = 4, .kv_storage = "paged", .ctx_size = 192};
    run_choices(&p, ids, 40, want, &s);
    p.prefill_grant_interval = INT32_MAX;
    for (p.max_batch = 1; p.max_batch <= 3; p.max_batch++) {
        run_choices(&p, ids, 40, got, &s);
        assert_memory_equal(got, want, sizeof want);
    }
}

// Scores of a text are the same in one chunk, in many, and from decoding it token by token.
static void scores_are_teacher_forced(void **state) {
    (void)state;
    static const int32_t chunks[] = {512, 5};
    float lp[2][80];
    int32_t ids[80];
    make_prompt(ids, 80, 21);
    for (int c = 0; c < 2; c++) {
        mlxcel_params p = {.prefill_chunk = chunks[c]};
        mlxcel_engine *e = open_engine(&p);
        mlxcel_request_params q;
        mlxcel_request_params_init(&q);
        q.ids = ids;
        q.n_ids = 80;
        q.score = true;
        q.n_logprobs = 3;
        mlxcel_request *r;
        mlxcel_error err;
        assert_int_equal(mlxcel_submit(e, &q, &r, &err), MX_OK);
        mlxcel_event ev;
        int n = 0;
        while (mlxcel_next_event(r, 60, &ev)) {
            for (int i = 0; ev.kind == MLXCEL_EVENT_SCORE && i < ev.n_tokens; i++) {
                assert_int_equal(ev.tokens[i].id, ids[n + 1]);
                assert_int_equal(ev.tokens[i].n_top, 3);
                assert_true(ev.tokens[i].top[0].logprob >= ev.tokens[i].logprob);
                lp[c][n++] = ev.tokens[i].logprob;
            }
        }
        assert_int_equal(n, 79);
        mlxcel_request_free(r);
        mlxcel_close(e);
    }
    assert_memory_equal(lp[0], lp[1], 79 * sizeof(float));
}

static void a_broken_model_does_not_open(void **state) {
    (void)state;
    mlxcel_engine *e;
    mlxcel_error err;
    mlxcel_params p = {.model = "/nowhere/model.gguf", .device = "cpu"};
    assert_int_equal(mlxcel_open(&e, &p, &err), MX_NOTFOUND);
    p.model = model;
    p.device = "toaster";
    assert_int_equal(mlxcel_open(&e, &p, &err), MX_INVALID);
    p.device = "cpu";
    p.kv_type = "q3";
    assert_int_equal(mlxcel_open(&e, &p, &err), MX_INVALID);
    assert_null(e);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunk_threads_storage_and_fusion_change_nothing),
        cmocka_unit_test(a_measured_chunk_changes_nothing),
        cmocka_unit_test(every_budget_gives_the_same_bits_and_peak),
        cmocka_unit_test(a_long_prefill_keeps_bits_and_peak),
        cmocka_unit_test(a_row_does_not_depend_on_its_neighbours),
        cmocka_unit_test(a_small_pool_preempts_and_answers_all_the_same),
        cmocka_unit_test(a_pool_without_pages_refuses),
        cmocka_unit_test(a_cache_hit_changes_nothing),
        cmocka_unit_test(the_cache_keeps_below_its_cap),
        cmocka_unit_test(cancel_frees_what_it_held),
        cmocka_unit_test(a_cancelled_request_is_gone_within_a_step),
        cmocka_unit_test(bad_requests_are_refused_by_name),
        cmocka_unit_test(a_full_queue_is_busy),
        cmocka_unit_test(choices_differ_and_repeat),
        cmocka_unit_test(choices_share_the_prompt),
        cmocka_unit_test(choices_wait_for_places_without_grants),
        cmocka_unit_test(scores_are_teacher_forced),
        cmocka_unit_test(a_broken_model_does_not_open),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
