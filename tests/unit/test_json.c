// json: the limits that every reader of untrusted JSON shares.
#include "format/weights.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
// cmocka.h needs the two above
#include <cmocka.h>

static json_t *parse(const char *s, size_t n, int flags, mx_err *err) {
    *err = (mx_err){0};
    return mx_json_parse(s, n, 64 << 20, flags, "place.json", err);
}

static void refuse(const char *s, size_t n, int flags, const char *part) {
    mx_err err;
    clock_t t = clock();
    json_t *v = parse(s, n, flags, &err);
    if (v || err.status != MX_FORMAT || !strstr(err.msg, part) || !strstr(err.msg, "place.json")) {
        fail_msg("%.40s: expected \"%s\", got \"%s\"", s, part, err.msg);
    }
    assert_true(clock() - t < CLOCKS_PER_SEC); // of processor time
}

static void refuse_text(const char *s, int flags, const char *part) {
    refuse(s, strlen(s), flags, part);
}

static void depth_is_bounded(void **state) {
    (void)state;
    static const char *const open[] = {"[", "{\"a\":"}, *const close[] = {"]", "}"};
    mx_err err;
    for (int kind = 0; kind < 2; kind++) {
        for (size_t depth = 100; depth <= 1000000; depth *= 10) {
            mx_buf b;
            mx_buf_init(&b, 0);
            for (size_t i = 0; i < depth; i++) mx_buf_puts(&b, open[kind]);
            mx_buf_puts(&b, "0");
            if (depth > 100) refuse(b.data, b.n, 0, "nested deeper than 128"); // also unclosed
            for (size_t i = 0; i < depth; i++) mx_buf_puts(&b, close[kind]);
            if (depth > 100) {
                refuse(b.data, b.n, 0, "nested deeper than 128");
            } else {
                json_t *v = parse(b.data, b.n, 0, &err);
                assert_non_null(v);
                json_decref(v);
            }
            mx_buf_free(&b);
        }
    }
    // brackets in strings are no depth
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_puts(&b, "[\"\\\"");
    for (int i = 0; i < 1000; i++) mx_buf_puts(&b, "[{");
    mx_buf_puts(&b, "\\\\\"]");
    json_t *v = parse(b.data, b.n, 0, &err);
    assert_non_null(v);
    json_decref(v);
    mx_buf_free(&b);
}

static void what_is_not_json_is_refused(void **state) {
    (void)state;
    static const char *const bad[] = {"{",
                                      "]",
                                      "[1,]",
                                      "{\"a\":1,}",
                                      "{a:1}",
                                      "'a'",
                                      "[1 2]",
                                      "\"\\ud8\"",
                                      "\"\\ud800\"",
                                      "\"a\nb\"",
                                      "01",
                                      "1.",
                                      "nan",
                                      "NaN",
                                      "tru",
                                      "[1]x",
                                      "\xef\xbb\xbf{}",
                                      "\"\xff\"",
                                      "-",
                                      "\"abc",
                                      "1e999",
                                      "{\"a\":1,\"a\":1}",
                                      "{\"a\":{\"b\":1,\"\\u0062\":2}}"};
    for (size_t i = 0; i < MX_COUNT(bad); i++) refuse_text(bad[i], MX_JSON_CONFIG, "place.json: ");
    refuse("", 0, 0, "empty");
    refuse("[1]\0", 4, 0, "place.json");
    refuse_text("{\"a\":1,\"a\":2}", 0, "duplicate");
}

static void large_integers(void **state) {
    (void)state;
    static const char text[] =
        "{\"max\":9223372036854775807,\"min\":-9223372036854775808,\"over\":9223372036854775808,"
        "\"under\":-9223372036854775809,\"huge\":1000000000000000019884624838656,\"n\":7,"
        "\"text\":\"1000000000000000019884624838656\",\"list\":[99999999999999999999,1]}";
    mx_err err;
    json_t *v = parse(text, sizeof text - 1, MX_JSON_CONFIG, &err);
    assert_non_null(v);
    assert_int_equal(json_integer_value(json_object_get(v, "max")), INT64_MAX);
    assert_int_equal(json_integer_value(json_object_get(v, "min")), INT64_MIN);
    assert_true(json_real_value(json_object_get(v, "over")) == 9223372036854775808.0);
    assert_true(json_real_value(json_object_get(v, "under")) == -9223372036854775808.0);
    assert_true(json_real_value(json_object_get(v, "huge")) == 1e30);
    assert_true(json_is_integer(json_object_get(v, "n")));
    assert_string_equal(json_string_value(json_object_get(v, "text")),
                        "1000000000000000019884624838656");
    assert_true(json_real_value(json_array_get(json_object_get(v, "list"), 0)) == 1e20);
    json_decref(v);
    refuse(text, sizeof text - 1, MX_JSON_STRICT, "too big");
}

static void a_number_of_many_digits(void **state) {
    (void)state;
    mx_buf b;
    mx_buf_init(&b, 0);
    for (int i = 0; i < 100000; i++) mx_buf_putc(&b, '7');
    refuse(b.data, b.n, MX_JSON_CONFIG, "place.json");
    refuse(b.data, b.n, MX_JSON_STRICT, "place.json");
    mx_buf_free(&b);
}

static void a_million_keys(void **state) {
    (void)state;
    enum { N = 1000000 };
    mx_buf b;
    mx_err err;
    mx_buf_init(&b, 0);
    for (int i = 0; i < N; i++) {
        char item[24];
        mx_buf_add(&b, item, (size_t)snprintf(item, sizeof item, "%c\"k%d\":1", i ? ',' : '{', i));
    }
    mx_buf_putc(&b, '}');
    json_t *v = parse(b.data, b.n, 0, &err);
    assert_non_null(v);
    assert_int_equal(json_object_size(v), N);
    json_decref(v);
    mx_buf_free(&b);
}

static void size_is_bounded_before_parsing(void **state) {
    (void)state;
    mx_err err = {0};
    char path[] = "/tmp/mlxcel-test-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_null(mx_json_parse("[1,2,3]", 7, 6, 0, "place.json", &err));
    assert_int_equal(err.status, MX_TOOLARGE);
    assert_int_equal(ftruncate(fd, 100 << 20), 0);
    assert_null(mx_json_load(path, 1 << 20, 0, &err));
    assert_int_equal(err.status, MX_TOOLARGE);
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(pwrite(fd, "{\"a\":[]}", 8, 0), 8);
    json_t *v = mx_json_load(path, 8, 0, &err);
    assert_non_null(v);
    json_decref(v);
    close(fd);
    unlink(path);
    assert_null(mx_json_load(path, 8, 0, &err));
    assert_int_equal(err.status, MX_NOTFOUND);
}

static void nul_in_strings_is_for_vocabularies(void **state) {
    (void)state;
    mx_err err;
    refuse_text("[\"a\\u0000b\"]", MX_JSON_CONFIG, "place.json");
    json_t *v = parse("[\"a\\u0000b\"]", 12, MX_JSON_VOCAB, &err);
    assert_int_equal(json_string_length(json_array_get(v, 0)), 3);
    json_decref(v);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(depth_is_bounded),
        cmocka_unit_test(what_is_not_json_is_refused),
        cmocka_unit_test(large_integers),
        cmocka_unit_test(a_number_of_many_digits),
        cmocka_unit_test(a_million_keys),
        cmocka_unit_test(size_is_bounded_before_parsing),
        cmocka_unit_test(nul_in_strings_is_for_vocabularies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
