// The same request, the same numbers: alone, in a batch of eight, in other chunks, from the prefix
// cache; with the token chosen on the device (pipelined) and on the host, greedy and not; with
// places for two plans. On the CPU always; with MX_TEST_DEVICE=cuda on a GPU in deterministic mode.
#include "base/knobs.h"
#include "mlxcel.h"
#include "support/tiny_model.h"

#include <setjmp.h>
#include <stdarg.h>
// cmocka.h needs the two above and stdio, stdlib
#include <cmocka.h>

enum { N = 8, MAX_PROMPT = 900, DECODE = 24 };

static const size_t lengths[N] = {5, 37, 130, 300, 513, 700, 64, 1};
static const mx_dtype types[] = {MX_F32, MX_F16, MX_BF16, MX_Q4_1, MX_Q8_0, MX_Q4_K, MX_Q6_K};

static char *dir, *model;
static const char *device = "cpu";
static int32_t prompts[N][MAX_PROMPT];

static int set_up(void **state) {
    (void)state;
    const char *other = getenv("MX_TEST_DEVICE");
    if (other) device = other;
    dir = ckpt_temp_dir();
    model = mx_path_join(dir, "tiny.gguf");
    mx_log_set_level(MX_LOG_ERROR);
    for (int s = 0; s < N; s++) {
        for (int i = 0; i < MAX_PROMPT; i++) {
            prompts[s][i] = (int32_t)(ckpt_mix((uint32_t)s + 40, (uint64_t)i) % 256);
        }
    }
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    mx_free(model);
    ckpt_remove_dir(dir);
    return 0;
}

typedef struct answer {
    uint64_t tokens, logits;
    int32_t n_cached;
} answer;

static mlxcel_engine *open_engine(mlxcel_params p) {
    mlxcel_engine *e = NULL;
    mlxcel_error err = {0};
    mlxcel_info info;
    p.model = model;
    p.device = device;
    p.n_threads = 2;
    p.ctx_size = 1024;
    p.deterministic = true;
    if (mlxcel_open(&e, &p, &err) != 0) fail_msg("open: %s", err.message);
    mlxcel_get_info(e, &info);
    assert_true(info.deterministic);
    return e;
}

// Greedy, and what devices can choose by: a hash of the logits brings each to the host.
static void set_sampling(mlxcel_sampling *p, int s) {
    static const mlxcel_logit_bias bias[] = {{65, 2.5f}, {66, -100}};
    p->seed = 77;
    p->has_seed = true;
    p->temperature = s % 4 ? 0.9f : 0;
    if (s % 4 == 2) {
        p->top_k = 40;
        p->top_p = 0.9f;
        p->min_p = 0.01f;
        p->ignore_eos = true;
    }
    if (s % 4 == 3) {
        p->repeat_penalty = 1.2f;
        p->presence_penalty = 0.4f;
        p->frequency_penalty = 0.3f;
        p->bias = bias;
        p->n_bias = MX_COUNT(bias);
        p->min_tokens = 5;
    }
}

static mlxcel_request *submit(mlxcel_engine *e, int s, bool hash) {
    mlxcel_request_params p;
    mlxcel_request *r = NULL;
    mlxcel_error err = {0};
    mlxcel_request_params_init(&p);
    p.ids = prompts[s];
    p.n_ids = lengths[s];
    p.max_tokens = DECODE;
    p.hash_logits = hash;
    p.run_past_end = true;
    set_sampling(&p.sampling, s);
    if (mlxcel_submit(e, &p, &r, &err) != 0) fail_msg("submit: %s", err.message);
    return r;
}

static answer collect(mlxcel_request *r) {
    answer a = {0};
    mlxcel_event ev = {0};
    while (ev.kind != MLXCEL_EVENT_DONE) {
        if (!mlxcel_next_event(r, 60, &ev)) fail_msg("no event in 60 s");
    }
    if (ev.error.status) fail_msg("%s", ev.error.message);
    a = (answer){ev.token_hash, ev.logit_hash, ev.timings.n_cached};
    mlxcel_request_free(r);
    return a;
}

static int differ;

static void compare(const char *how, int s, answer got, answer want, bool logits) {
    if (got.tokens == want.tokens && (!logits || got.logits == want.logits)) return;
    differ++;
    print_message("%s, prompt of %zu: %s differ\n", how, lengths[s],
                  got.tokens == want.tokens ? "logits" : "tokens");
}

static void one_by_one(const char *how, mlxcel_params p, const answer *want, bool hash) {
    mlxcel_engine *e = open_engine(p);
    for (int s = 0; s < N; s++) compare(how, s, collect(submit(e, s, hash)), want[s], hash);
    mlxcel_close(e);
}

static void together(const char *how, mlxcel_params p, const answer *want, bool hash) {
    mlxcel_engine *e = open_engine(p);
    mlxcel_request *r[N];
    mlxcel_stats st;
    for (int s = 0; s < N; s++) r[s] = submit(e, s, hash);
    for (int s = 0; s < N; s++) compare(how, s, collect(r[s]), want[s], hash);
    mlxcel_get_stats(e, &st);
    assert_true(st.steps_decode < N * DECODE / 2); // they did share steps
    mlxcel_close(e);
}

static void cached(mlxcel_params p, const answer *want) {
    mlxcel_engine *e = open_engine(p);
    for (int again = 0; again < 2; again++) {
        for (int s = 0; s < N; s++) {
            answer a = collect(submit(e, s, true));
            compare(again ? "cached" : "first", s, a, want[s], true);
            assert_true(again && lengths[s] > 64 ? a.n_cached >= 64 : true);
        }
    }
    mlxcel_close(e);
}

static void set_caches(const char *size) {
    static const char *const names[] = {"MLX_CUDA_GRAPH_CACHE_SIZE", "MLX_CUDA_SDPA_CACHE_SIZE"};
    for (size_t i = 0; i < MX_COUNT(names); i++) {
        if (size)
            setenv(names[i], size, 1);
        else
            unsetenv(names[i]);
    }
    mx_knobs_reload();
}

// Two places for plans (graphs on a GPU): nearly every step makes one and drops one.
static void small_caches(mlxcel_params p, const answer *want) {
    mlxcel_stats st;
    set_caches("2");
    mlxcel_engine *e = open_engine(p);
    for (int again = 0; again < 2; again++) {
        mlxcel_request *r[N];
        for (int s = 0; s < N; s++) r[s] = submit(e, s, true);
        for (int s = 0; s < N; s++) compare("small caches", s, collect(r[s]), want[s], true);
    }
    mlxcel_get_stats(e, &st);
    mlxcel_close(e);
    set_caches(NULL);
    assert_true(st.plan_evictions >= 4);
}

// MLXCEL_DEVICE_SAMPLING=0.
static void chosen_by_the_host(mlxcel_params p, const answer *want) {
    mlxcel_stats st;
    setenv("MLXCEL_DEVICE_SAMPLING", "0", 1);
    mx_knobs_reload();
    mlxcel_engine *e = open_engine(p);
    for (int s = 0; s < N; s++) compare("by the host", s, collect(submit(e, s, false)), want[s], 0);
    mlxcel_get_stats(e, &st);
    for (int i = 0; i < MLXCEL_SLOW_PATHS; i++) {
        if (strcmp(mlxcel_slow_path(i, NULL), "host_sampling") != 0) continue;
        if (strcmp(device, "cpu") == 0)
            assert_int_equal(st.slow[i], 0);
        else // the last step may be counted after its token was seen
            assert_true(st.slow[i] >= N * DECODE - 4);
    }
    mlxcel_close(e);
    unsetenv("MLXCEL_DEVICE_SAMPLING");
    mx_knobs_reload();
}

static void check_type(mx_dtype type) {
    answer want[N];
    tiny_write(model, &(tiny_opts){.type = type, .d_model = 256, .d_ff = 512, .max_ctx = 1024});
    mlxcel_params solo = {.kv_storage = "dense", .prefill_chunk = 512};
    mlxcel_params batch = {.max_batch = N, .prefill_chunk = 96, .prefill_grant_interval = 1};
    mlxcel_params warm = {.kv_storage = "paged", .prefix_cache_bytes = (uint64_t)64 << 20};
    mlxcel_engine *e = open_engine(solo);
    for (int s = 0; s < N; s++) want[s] = collect(submit(e, s, true));
    mlxcel_close(e);
    one_by_one("alone, not hashed", solo, want, false);
    together("batch", batch, want, true);
    together("batch, not hashed", batch, want, false);
    static const int32_t chunks[] = {7, 16, 33, 299};
    for (size_t i = 0; i < MX_COUNT(chunks); i++) {
        mlxcel_params p = solo;
        p.prefill_chunk = chunks[i];
        one_by_one("chunks", p, want, true);
    }
    cached(warm, want);
    small_caches(batch, want);
    if (type == types[0]) chosen_by_the_host(solo, want);
    if (differ) fail_msg("%s: %d answers differ", mx_dtype_get(type)->name, differ);
}

static void every_way_gives_the_same_numbers(void **state) {
    (void)state;
    bool cpu = strcmp(device, "cpu") == 0; // whose unit tests have the formats
    for (size_t i = 0; i < MX_COUNT(types); i += cpu ? 3 : 1) check_type(types[i]);
}

// mlxcel_params.exact is what MLXCEL_EXACT=1 is, and not the default.
static void the_exact_mode_is_had_either_way(void **state) {
    (void)state;
    answer got[3];
    tiny_write(model, &(tiny_opts){.type = MX_Q4_1, .d_model = 256, .d_ff = 512});
    for (int i = 0; i < 3; i++) {
        if (i == 2) setenv("MLXCEL_EXACT", "1", 1);
        mx_knobs_reload();
        mlxcel_info info;
        mlxcel_engine *e = open_engine((mlxcel_params){.exact = i == 1});
        mlxcel_get_info(e, &info);
        assert_int_equal(info.exact, i > 0);
        assert_string_equal(info.kv_type, i > 0 ? "f32" : "f16");
        got[i] = collect(submit(e, 2, true));
        mlxcel_close(e);
    }
    unsetenv("MLXCEL_EXACT");
    mx_knobs_reload();
    assert_true(got[1].logits == got[2].logits);
    assert_true(got[0].logits != got[1].logits);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_way_gives_the_same_numbers),
        cmocka_unit_test(the_exact_mode_is_had_either_way),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
