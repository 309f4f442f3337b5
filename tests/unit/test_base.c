// base: errors, buffers, numbers, UTF-8, maps, arenas, atomic writes.
#include "base/knobs.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/os.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
// cmocka.h needs the four above
#include <cmocka.h>

static void err_prefix_keeps_status_and_truncates(void **state) {
    (void)state;
    mx_err e = {0};
    assert_int_equal(mx_err_set(&e, MX_FORMAT, "bad %d", 7), MX_FORMAT);
    assert_int_equal(mx_err_prefix(&e, "file.gguf"), MX_FORMAT);
    assert_string_equal(e.msg, "file.gguf: bad 7");
    for (int i = 0; i < 200; i++) mx_err_prefix(&e, "0123456789");
    assert_true(strlen(e.msg) < sizeof e.msg);
    assert_int_equal(mx_status_http(MX_CONTEXT), 400);
}

static void numbers_are_whole_and_in_range(void **state) {
    (void)state;
    int64_t i;
    uint64_t u;
    double d;
    assert_true(mx_parse_i64("-12", &i) && i == -12);
    assert_false(mx_parse_i64("12x", &i));
    assert_false(mx_parse_i64("", &i));
    assert_false(mx_parse_i64(" 1", &i));
    assert_false(mx_parse_i64("99999999999999999999", &i));
    assert_false(mx_parse_u64("-1", &u));
    assert_false(mx_parse_f64("nan", &d));
    assert_false(mx_parse_f64("1e999", &d));
    assert_true(mx_parse_size("1.5G", &u) && u == 1610612736u);
    assert_true(mx_parse_size("64KiB", &u) && u == 65536);
    assert_false(mx_parse_size("5 apples", &u));
}

static void utf8_rejects_what_is_not_utf8(void **state) {
    (void)state;
    static const char *const bad[] = {"\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\x80",
                                      "\xe2\x82"};
    for (size_t k = 0; k < MX_COUNT(bad); k++) assert_false(mx_utf8_valid(mx_str_of(bad[k])));
    char enc[4];
    uint32_t cp;
    for (uint32_t c = 0; c <= 0x10ffff; c += c < 0x3000 ? 1 : 977) {
        if (c >= 0xd800 && c <= 0xdfff) continue;
        int n = mx_utf8_encode(c, enc);
        assert_int_equal(mx_utf8_decode(enc, (size_t)n, &cp), n);
        assert_int_equal(cp, c);
    }
    assert_int_equal(mx_utf8_complete(mx_str_of("a\xf0\x9f\x98")), 1);
    assert_int_equal(mx_utf8_complete(mx_str_of("a\xf0\x9f\x98\x80")), 5);
}

static void buffers_stop_at_their_ceiling(void **state) {
    (void)state;
    mx_buf b;
    mx_buf_init(&b, 8);
    assert_true(mx_buf_puts(&b, "12345678"));
    assert_false(mx_buf_putc(&b, '9'));
    assert_true(b.full);
    assert_string_equal(b.data, "12345678");
    mx_buf_free(&b);
    mx_buf_init(&b, 0);
    mx_buf_json(&b, (mx_str){"a\"\n\x01\xff", 5});
    assert_string_equal(b.data, "\"a\\\"\\n\\u0001\xef\xbf\xbd\"");
    mx_buf_free(&b);
}

static void map_finds_what_was_put(void **state) {
    (void)state;
    mx_map m = {0};
    mx_arena a;
    mx_arena_init(&a, 0);
    for (int32_t i = 0; i < 5000; i++) {
        char key[16];
        int n = snprintf(key, sizeof key, "k%d", i * 7);
        assert_true(mx_map_put(&m, (mx_str){mx_arena_strndup(&a, key, (size_t)n), (size_t)n}, i));
    }
    int32_t v;
    assert_true(mx_map_get(&m, mx_str_of("k21"), &v) && v == 3);
    assert_false(mx_map_get(&m, mx_str_of("k22"), &v));
    assert_false(mx_map_put(&m, mx_str_of("k21"), 9));
    mx_map_set(&m, mx_str_of("k21"), 9);
    assert_true(mx_map_get(&m, mx_str_of("k21"), &v) && v == 9);
    mx_map_free(&m);
    mx_arena_free(&a);
}

static void arena_honours_its_ceiling(void **state) {
    (void)state;
    mx_arena a;
    mx_arena_init(&a, 1000);
    assert_non_null(mx_arena_alloc(&a, 900));
    assert_null(mx_arena_alloc(&a, 200));
    mx_arena_free(&a);
}

static void files_are_replaced_whole(void **state) {
    (void)state;
    char path[] = "/tmp/mx_base_XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    mx_err e = {0};
    assert_int_equal(mx_write_file_atomic(path, "hello", 5, &e), MX_OK);
    mx_file f;
    assert_int_equal(mx_file_open(&f, path, &e), MX_OK);
    assert_int_equal(f.n_bytes, 5);
    assert_memory_equal(f.data, "hello", 5);
    mx_file_close(&f);
    char *text;
    assert_int_equal(mx_read_file(path, 4, &text, NULL, &e), MX_TOOLARGE);
    assert_int_equal(mx_file_open(&f, "/nowhere/x", &e), MX_NOTFOUND);
    assert_int_equal(mx_file_open(&f, "/tmp", &e), MX_INVALID);
    unlink(path);
}

// Pages that are given back can be read again; the rest of the file is left alone.
static void file_pages_are_given_back(void **state) {
    (void)state;
    enum { SIZE = 48 << 20, MARGIN = 16 << 20, FROM = 4097, UNTIL = SIZE - 5000 };
    char path[] = "/tmp/mx_base_XXXXXX";
    close(mkstemp(path));
    mx_err e = {0};
    mx_file f;
    char *text = mx_alloc(SIZE);
    for (size_t i = 0; i < SIZE; i++) text[i] = (char)(i * 2654435761u >> 24);
    assert_int_equal(mx_write_file_atomic(path, text, SIZE, &e), MX_OK);
    assert_int_equal(mx_file_open(&f, path, &e), MX_OK);
    mx_file_populate(&f, 0, SIZE);
    uint64_t full = mx_mem_rss_bytes();
    mx_file_release(&f, FROM, UNTIL - FROM);
    assert_true(mx_mem_rss_bytes() + MARGIN < full);
    mx_file_release(&f, SIZE + 1, 1);
    mx_file_release(&f, 1, 10);
    assert_memory_equal(f.data, text, SIZE);
    mx_file_release(&f, 0, SIZE_MAX);
    assert_memory_equal(f.data, text, SIZE);
    mx_file_close(&f);
    mx_free(text);
    unlink(path);
}

static void knobs_fall_back_to_the_table(void **state) {
    (void)state;
    setenv("MLXCEL_MIN_OPS_PER_BUFFER", "12", 1);
    setenv("MLXCEL_EXACT", "off", 1);
    mx_knobs_reload();
    assert_int_equal(mx_knob_int(MX_KNOB_MIN_OPS_PER_BUFFER, 0), 12);
    assert_false(mx_knob_flag(MX_KNOB_EXACT));
    setenv("MLXCEL_MIN_OPS_PER_BUFFER", "many", 1);
    mx_knobs_reload();
    mx_log_set_level(MX_LOG_ERROR);
    assert_int_equal(mx_knob_int(MX_KNOB_MIN_OPS_PER_BUFFER, 0), 10);
    assert_true(mx_cpu_default_threads() >= 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(err_prefix_keeps_status_and_truncates),
        cmocka_unit_test(numbers_are_whole_and_in_range),
        cmocka_unit_test(utf8_rejects_what_is_not_utf8),
        cmocka_unit_test(buffers_stop_at_their_ceiling),
        cmocka_unit_test(map_finds_what_was_put),
        cmocka_unit_test(arena_honours_its_ceiling),
        cmocka_unit_test(files_are_replaced_whole),
        cmocka_unit_test(file_pages_are_given_back),
        cmocka_unit_test(knobs_fall_back_to_the_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
