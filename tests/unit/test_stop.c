// Stop strings: whatever the cut into tokens, the text is that before the earliest match.
#include "engine/stop.h"

#include "base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
// cmocka.h needs the four above
#include <cmocka.h>

// Feeds text in pieces of `step` bytes; out gets what was released. Returns the stop's index.
static int feed(const char *text, size_t step, const char *const *stops, size_t n, mx_buf *out) {
    stop_matcher m;
    stop_init(&m, stops, n);
    mx_buf_init(out, 0);
    int which = -1;
    size_t len = strlen(text);
    for (size_t i = 0; i < len && which < 0; i += step) {
        which = stop_push(&m, (mx_str){text + i, MX_MIN(step, len - i)}, out);
    }
    if (which < 0) stop_flush(&m, out);
    stop_free(&m);
    mx_buf_putc(out, 0);
    return which;
}

static const struct {
    const char *text;
    const char *stops[3];
    const char *expect;
    int which;
} cases[] = {
    {"A B O P Q R", {"O P Q"}, "A B ", 0},
    {"ABCDEF", {"DE"}, "ABC", 0},
    {"hello", {"lo"}, "hel", 0},
    {"well?\nno", {"\n"}, "well?", 0},
    {"stop", {"stop"}, "", 0},
    {"abcabd", {"abd", "zz"}, "abc", 0},
    {"aXbYc", {"Y", "X"}, "a", 1},
    {"no match at al", {"all", "mat!"}, "no match at al", -1},
    {"ends with prefi", {"prefix"}, "ends with prefi", -1},
    {"aaab", {"aab"}, "a", 0},
    {"\xc3\xa9t\xc3\xa9", {"t\xc3\xa9"}, "\xc3\xa9", 0},
    {"", {"x"}, "", -1},
};

static void released_text_is_what_precedes_the_match(void **state) {
    (void)state;
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        size_t n = 0;
        while (n < 3 && cases[i].stops[n]) n++;
        for (size_t step = 1; step <= 7; step++) {
            mx_buf out;
            int which = feed(cases[i].text, step, cases[i].stops, n, &out);
            assert_int_equal(which, cases[i].which);
            assert_string_equal(out.data, cases[i].expect);
            mx_buf_free(&out);
        }
    }
}

static void nothing_of_a_stop_is_ever_released(void **state) {
    (void)state;
    const char *const stops[] = {"<end>"};
    stop_matcher m;
    mx_buf out;
    stop_init(&m, stops, 1);
    mx_buf_init(&out, 0);
    const char *text = "a<en<end>b";
    for (const char *p = text; *p; p++) {
        int which = stop_push(&m, (mx_str){p, 1}, &out);
        assert_false(out.n && memmem(out.data, out.n, "<end", 4));
        if (which >= 0) break;
    }
    assert_int_equal(out.n, 4);
    assert_memory_equal(out.data, "a<en", 4);
    stop_free(&m);
    mx_buf_free(&out);
}

static const struct {
    bool opened;
    const char *text, *stop, *expect;
    bool found;
} reasoned[] = {
    {true, "a b</think>c b d", "b", "a b</think>c ", true},
    {true, "a b</think>\n\nc\nd", "\n", "a b</think>\n\nc", true},
    {true, "a b, and no end", "b", "a b, and no end", false},
    {true, "a</th</think>b", "</th", "a</th</think>b", false},
    {true, "a</think>b", "a</think>b", "a</think>b", false},
    {false, "<think>a b</think> c b", "b", "<think>a b</think> c ", true},
    {false, "\n <think>x\n</think>\ny", "\n", "\n <think>x\n</think>\ny", false},
    {false, "\n <thing>x", "\n", "", true},
    {false, "a<think>b</think>", "b", "a<think>", true},
    {false, "<thi", "hi", "<t", true},
    {false, "\n \n", " ", "\n", true},
    {false, " <thin", "z", " <thin", false},
    {false, "", "x", "", false},
};

static void reasoning_has_no_stops(void **state) {
    (void)state;
    for (size_t i = 0; i < MX_COUNT(reasoned); i++) {
        size_t len = strlen(reasoned[i].text);
        for (size_t step = 1; step <= 9; step++) {
            stop_matcher m;
            mx_buf out;
            int which = -1;
            stop_init(&m, &reasoned[i].stop, 1);
            stop_skip_reasoning(&m, reasoned[i].opened ? NULL : "<think>", "</think>");
            mx_buf_init(&out, 0);
            for (size_t k = 0; k < len && which < 0; k += step)
                which = stop_push(&m, (mx_str){reasoned[i].text + k, MX_MIN(step, len - k)}, &out);
            if (which < 0) which = stop_flush(&m, &out);
            mx_buf_putc(&out, 0);
            assert_string_equal(out.data, reasoned[i].expect);
            assert_int_equal(which, reasoned[i].found ? 0 : -1);
            stop_free(&m);
            mx_buf_free(&out);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(released_text_is_what_precedes_the_match),
        cmocka_unit_test(nothing_of_a_stop_is_ever_released),
        cmocka_unit_test(reasoning_has_no_stops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
