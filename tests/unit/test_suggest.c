// Sampling that a checkpoint suggests: both spellings, what is malformed is not used, what is
// absent stays as it was. The engine hands out what was asked for and nothing else.
#include "engine/suggest.h"
#include "support/tiny_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
// cmocka.h needs the two above and stdio, stdlib
#include <cmocka.h>

static char *dir;

static int set_up(void **state) {
    (void)state;
    dir = ckpt_temp_dir();
    mx_log_set_level(MX_LOG_ERROR);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    ckpt_remove_dir(dir);
    return 0;
}

typedef struct read_out {
    uint32_t bits;
    mlxcel_sampling s;
    char text[256];
} read_out;

static read_out read_weights(const mx_weights *w) {
    read_out r;
    mx_buf text;
    mx_buf_init(&text, 0);
    mlxcel_sampling_init(&r.s);
    r.s.top_k = 7;
    r.bits = engine_read_suggestions(w, &r.s, &text);
    snprintf(r.text, sizeof r.text, "%s", text.n ? text.data : "");
    mx_buf_free(&text);
    return r;
}

static read_out read_json(const char *config) {
    mx_weights w = {.container = MX_CONTAINER_SAFETENSORS};
    w.generation_config = json_loads(config, 0, NULL);
    assert_non_null(w.generation_config);
    read_out r = read_weights(&w);
    json_decref(w.generation_config);
    return r;
}

static void json_values_are_read(void **state) {
    (void)state;
    read_out r = read_json("{\"do_sample\":true,\"temperature\":0.6,\"top_k\":20,\"top_p\":0.9,"
                           "\"min_p\":0.1,\"typical_p\":0.5,\"max_new_tokens\":5,"
                           "\"eos_token_id\":[1,2],\"transformers_version\":\"4\"}");
    assert_int_equal(r.bits, MLXCEL_SAMPLING_TEMPERATURE | MLXCEL_SAMPLING_TOP_K |
                                 MLXCEL_SAMPLING_TOP_P | MLXCEL_SAMPLING_MIN_P |
                                 MLXCEL_SAMPLING_TYPICAL_P);
    assert_true(r.s.temperature == 0.6f && r.s.top_k == 20 && r.s.top_p == 0.9f);
    assert_true(r.s.min_p == 0.1f && r.s.typical_p == 0.5f && r.s.repeat_penalty == 1);
    assert_string_equal(r.text, "temperature 0.6, top_k 20, top_p 0.9, min_p 0.1, typical_p 0.5 "
                                "(generation_config.json)");
    r = read_json("{}");
    assert_int_equal(r.bits, 0);
    assert_int_equal(r.s.top_k, 7);
    assert_string_equal(r.text, "");
    r = read_json("{\"temperature\":null,\"top_k\":null,\"top_p\":1}");
    assert_int_equal(r.bits, MLXCEL_SAMPLING_TOP_P);
    mx_weights none = {.container = MX_CONTAINER_SAFETENSORS};
    assert_int_equal(read_weights(&none).bits, 0);
}

static void a_penalty_of_json_sees_the_whole_text(void **state) {
    (void)state;
    read_out r = read_json("{\"repetition_penalty\":1.05}");
    assert_int_equal(r.bits, MLXCEL_SAMPLING_REPEAT_PENALTY | MLXCEL_SAMPLING_REPEAT_LAST_N);
    assert_true(r.s.repeat_penalty == 1.05f && r.s.repeat_last_n == -1);
}

static void no_sampling_is_greedy(void **state) {
    (void)state;
    read_out r = read_json("{\"do_sample\":false,\"temperature\":0.7}");
    assert_int_equal(r.bits, MLXCEL_SAMPLING_TEMPERATURE);
    assert_true(r.s.temperature == 0);
    r = read_json("{\"do_sample\":\"no\",\"temperature\":0.7}");
    assert_true(r.s.temperature == 0.7f);
}

static void malformed_values_are_not_used(void **state) {
    (void)state;
    static const char *const bad[] = {
        "{\"temperature\":\"hot\"}", "{\"temperature\":-1}", "{\"temperature\":1e300}",
        "{\"temperature\":true}",    "{\"top_k\":1.5}",      "{\"top_k\":-2}",
        "{\"top_k\":1e10}",          "{\"top_p\":1.01}",     "{\"top_p\":[0.9]}",
        "{\"min_p\":-0.1}",          "{\"typical_p\":{}}",   "{\"repetition_penalty\":0}",
    };
    for (size_t i = 0; i < MX_COUNT(bad); i++) {
        read_out r = read_json(bad[i]);
        if (r.bits != 0 || r.s.top_k != 7) fail_msg("%s was used: %s", bad[i], r.text);
    }
    // the others of the file still count
    read_out r = read_json("{\"top_p\":7,\"temperature\":0.5}");
    assert_int_equal(r.bits, MLXCEL_SAMPLING_TEMPERATURE);
    assert_int_equal(read_json("{\"top_k\":-1}").s.top_k, 0);
}

static void put_i32(ckpt *c, const char *key, int32_t v) {
    ckpt_kv(c, key, CKPT_I32, &v, sizeof v);
}

static read_out read_gguf(const ckpt *c) {
    char *path = mx_path_join(dir, "kv.gguf");
    mx_weights w;
    mx_err err = {0};
    ckpt_write_gguf(c, path);
    if (mx_weights_open(&w, path, &err) != MX_OK) fail_msg("%s", err.msg);
    read_out r = read_weights(&w);
    mx_weights_close(&w);
    mx_free(path);
    return r;
}

static void gguf_keys_are_read(void **state) {
    (void)state;
    ckpt c;
    ckpt_init(&c);
    ckpt_kv_str(&c, "general.architecture", "llama");
    assert_int_equal(read_gguf(&c).bits, 0);
    ckpt_kv_f32(&c, "general.sampling.temp", 0.7f);
    put_i32(&c, "general.sampling.top_k", 64);
    ckpt_kv_f32(&c, "general.sampling.top_p", 0.95f);
    ckpt_kv_f32(&c, "general.sampling.min_p", 2.0f); // out of range
    ckpt_kv_f32(&c, "general.sampling.xtc_probability", 0.5f);
    ckpt_kv_str(&c, "general.sampling.xtc_threshold", "0.2"); // a text
    put_i32(&c, "general.sampling.penalty_last_n", 128);
    ckpt_kv_u32(&c, "general.sampling.penalty_repeat", 2);
    put_i32(&c, "general.sampling.mirostat", 2); // not supported
    read_out r = read_gguf(&c);
    assert_string_equal(r.text, "temperature 0.7, top_k 64, top_p 0.95, repeat_penalty 2, "
                                "repeat_last_n 128, xtc_probability 0.5 (the GGUF file)");
    assert_true(r.s.temperature == 0.7f && r.s.top_k == 64 && r.s.repeat_last_n == 128);
    assert_true(r.s.min_p == 0 && r.s.repeat_penalty == 2 && r.s.xtc_probability == 0.5f);
    ckpt_free(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(json_values_are_read),
        cmocka_unit_test(a_penalty_of_json_sees_the_whole_text),
        cmocka_unit_test(no_sampling_is_greedy),
        cmocka_unit_test(malformed_values_are_not_used),
        cmocka_unit_test(gguf_keys_are_read),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
