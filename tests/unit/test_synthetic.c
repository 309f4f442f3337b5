// format, synthetic models: every geometry in every format that it divides into binds, its values
// lie in its range, activations stay finite, and what is made does not change.
#include "format/store.h"
#include "mlxcel.h"
#include "model/model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
// cmocka.h needs these four
#include <cmocka.h>

static const char *const formats[] = {"bf16", "f16",  "f32",  "affine4", "affine8g32", "q4_0",
                                      "q4_1", "q5_0", "q5_1", "q8_0",    "q4_k",       "q6_k"};

static uint64_t total_bytes(const mx_weights *w) {
    uint64_t n = 0;
    for (int32_t i = 0; i < w->n_tensors; i++) n += w->tensors[i].n_bytes;
    return n;
}

static void large_models_have_their_sizes(void **state) {
    (void)state;
    static const struct {
        const char *name;
        uint64_t params_bytes; // of bfloat16 weights, from the published parameter counts
    } models[] = {
        {"synthetic:llama-3.1-8b-bf16", 2 * 8030261248ull},
        {"synthetic:llama-3.2-1b-bf16", 2 * 1235814400ull},
        {"synthetic:smollm2-135m-bf16", 2 * 134515008ull},
        {"synthetic:qwen3-8b-bf16", 2 * 8190735360ull},
        {"synthetic:qwen3-0.6b-bf16", 2 * 596049920ull},
        {"synthetic:gemma-3-1b-bf16", 2 * 999885952ull},
    };
    for (size_t i = 0; i < MX_COUNT(models); i++) {
        mx_weights w;
        mx_err err = {0};
        if (mx_weights_open(&w, models[i].name, &err) != MX_OK) fail_msg("%s", err.msg);
        assert_int_equal(total_bytes(&w), models[i].params_bytes);
        const unsigned char *from = w.made, *to = from + w.made_bytes;
        for (int32_t t = 0; t < w.n_tensors; t++) {
            const unsigned char *p = w.tensors[t].data;
            assert_true(p >= from && p < to && w.tensors[t].n_bytes <= (size_t)(to - p));
        }
        const mx_family *f;
        assert_int_equal(mx_family_of(&w, &f, &err), MX_OK);
        mx_weights_close(&w);
    }
}

static void unknown_names_say_what_there_is(void **state) {
    (void)state;
    static const char *const bad[] = {"synthetic:",         "synthetic:tiny",
                                      "synthetic:tiny-q9",  "synthetic:tiny-affine4g7",
                                      "synthetic:big-bf16", "synthetic:tiny-affine4x",
                                      "synthetic:tiny-i32", "synthetic:tiny-affine7"};
    for (size_t i = 0; i < MX_COUNT(bad); i++) {
        mx_weights w;
        mx_err err = {0};
        assert_int_equal(mx_weights_open(&w, bad[i], &err), MX_NOTFOUND);
        assert_non_null(strstr(err.msg, "qwen3-8b"));
        assert_non_null(strstr(err.msg, "affine4"));
    }
    mx_weights w;
    mx_err err = {0};
    assert_int_equal(mx_weights_open(&w, "synthetic:smollm2-135m-q4_k", &err), MX_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "576"));
    char *path;
    assert_int_equal(mx_store_resolve("synthetic:tiny-bf16", "/nowhere", &path, &err), MX_OK);
    assert_string_equal(path, "synthetic:tiny-bf16");
    mx_free(path);
}

// Log-probabilities of a fixed prompt; false when one is not a plausible number.
static bool score(const char *model, float out[7]) {
    mlxcel_engine *e;
    mlxcel_error err = {0};
    mlxcel_params p = {.model = model, .device = "cpu", .n_threads = 1, .ctx_size = 64};
    if (mlxcel_open(&e, &p, &err) != 0) fail_msg("%s", err.message);
    static const int32_t ids[8] = {104, 101, 108, 108, 111, 300, 1, 511};
    mlxcel_request_params r;
    mlxcel_request_params_init(&r);
    r.ids = ids, r.n_ids = 8, r.score = true, r.n_logprobs = 0, r.max_tokens = 0;
    mlxcel_request *q;
    assert_int_equal(mlxcel_submit(e, &r, &q, &err), 0);
    mlxcel_event ev;
    int32_t n = 0;
    bool ok = true;
    do {
        assert_true(mlxcel_next_event(q, 60, &ev));
        if (ev.kind != MLXCEL_EVENT_SCORE) continue;
        for (int32_t i = 0; i < ev.n_tokens && n < 7; i++) out[n++] = ev.tokens[i].logprob;
    } while (ev.kind != MLXCEL_EVENT_DONE);
    assert_int_equal(n, 7);
    for (int32_t i = 0; i < n; i++) ok &= isfinite(out[i]) && out[i] <= 0 && out[i] > -100;
    mlxcel_request_free(q);
    mlxcel_close(e);
    return ok;
}

static void every_format_computes(void **state) {
    (void)state;
    for (size_t i = 0; i < MX_COUNT(formats); i++) {
        char name[64];
        float a[7], b[7];
        snprintf(name, sizeof name, "synthetic:%s-%s", i % 2 ? "tiny-qwen3" : "tiny", formats[i]);
        if (!score(name, a)) fail_msg("%s: a log-probability is none", name);
        if (i > 3) continue;
        assert_true(score(name, b));
        assert_memory_equal(a, b, sizeof a);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(large_models_have_their_sizes),
        cmocka_unit_test(unknown_names_say_what_there_is),
        cmocka_unit_test(every_format_computes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
