// Parsers of generated text: reasoning and tool calls. Every text is fed whole, byte by byte and
// cut in two at every place; the result must be the same.
#include "server/server_int.h"

#include "base/mem.h"
#include "base/os.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
// cmocka.h needs setjmp.h and stdarg.h
#include <cmocka.h>

// ---- Reasoning ----

typedef struct split {
    char reasoning[512], content[512];
} split;

static void copy(char *out, size_t cap, const mx_buf *b) {
    snprintf(out, cap, "%.*s", (int)b->n, b->n ? b->data : "");
}

// cut: bytes of the first piece; step: bytes of each piece after it
static split think(const char *text, bool on, bool inside, size_t cut, size_t step) {
    think_parser p;
    mx_buf r, c;
    mx_buf_init(&r, 0);
    mx_buf_init(&c, 0);
    think_init(&p, on, inside);
    size_t n = strlen(text), at = MX_MIN(cut, n);
    think_push(&p, (mx_str){text, at}, &r, &c);
    while (at < n) {
        size_t k = MX_MIN(step, n - at);
        think_push(&p, (mx_str){text + at, k}, &r, &c);
        at += k;
    }
    think_end(&p, &r, &c);
    split s;
    copy(s.reasoning, sizeof s.reasoning, &r);
    copy(s.content, sizeof s.content, &c);
    mx_buf_free(&r);
    mx_buf_free(&c);
    think_free(&p);
    return s;
}

static void check_think(const char *text, bool on, bool inside, const char *reasoning,
                        const char *content) {
    for (size_t cut = 0; cut <= strlen(text); cut++) {
        split s = think(text, on, inside, cut, cut == 0 ? 1 : 1000);
        if (strcmp(s.reasoning, reasoning) != 0 || strcmp(s.content, content) != 0) {
            fail_msg("\"%s\" cut at %zu: \"%s\" and \"%s\"", text, cut, s.reasoning, s.content);
        }
    }
}

static void reasoning_is_split(void **state) {
    (void)state;
    check_think("internal reasoning\n</think>{\"a\":1}", true, true, "internal reasoning",
                "{\"a\":1}");
    check_think("<think>\nhm, so\n</think>\n\nAnswer.", true, false, "hm, so", "Answer.");
    check_think(" \n<think>a</think>b", true, false, "a", "b");
    check_think("<think>a < b </thin k></think>b", true, false, "a < b </thin k>", "b");
    check_think("a<</think>b", true, true, "a<", "b");
    check_think("a</</think></think>b", true, true, "a</", "</think>b");
    check_think("x  \n y\n\n</think> z </think>", true, true, "x  \n y", "z </think>");
    check_think("</think>", true, true, "", "");
    check_think("never closed \n", true, true, "never closed", "");
    check_think("never closed</thi", true, true, "never closed</thi", "");
}

static void text_that_only_looks_like_it_stays(void **state) {
    (void)state;
    check_think("Use <think> tags", true, false, "", "Use <think> tags");
    check_think("<thin", true, false, "", "<thin");
    check_think("  <thing>", true, false, "", "  <thing>");
    check_think("<think>a</think>b", false, false, "", "<think>a</think>b");
    check_think("", true, false, "", "");
    check_think(" \n", true, false, "", " \n");
}

// ---- Tool calls ----

static mx_buf log_text; // c(content) b(name) a0(args) ..., pieces of one kind joined

static char last_kind;
static void note(char kind, int index, mx_str s) {
    if (kind != last_kind || kind == 'b') {
        if (log_text.n) mx_buf_putc(&log_text, '|');
        mx_buf_putc(&log_text, kind);
        if (kind != 'c') mx_buf_printf(&log_text, "%d", index);
        mx_buf_putc(&log_text, ':');
    }
    last_kind = kind;
    mx_buf_add(&log_text, s.p, s.n);
}
static void on_content(void *user, mx_str s) {
    (void)user;
    note('c', 0, s);
}
static void on_begin(void *user, int index, mx_str name) {
    (void)user;
    note('b', index, name);
}
static void on_args(void *user, int index, mx_str s) {
    (void)user;
    note('a', index, s);
}
static const tool_sink sink = {NULL, on_content, on_begin, on_args};

static const char *run_tools(tool_format f, const char *text, size_t cut, size_t step) {
    json_t *tools = json_loads("[{\"type\":\"function\",\"function\":{\"name\":\"f\"}},"
                               "{\"type\":\"function\",\"function\":{\"name\":\"get_x\"}}]",
                               0, NULL);
    tool_parser p;
    mx_buf_free(&log_text);
    mx_buf_init(&log_text, 0);
    last_kind = 0;
    tools_init(&p, f, tools);
    size_t n = strlen(text), at = MX_MIN(cut, n);
    tools_push(&p, (mx_str){text, at}, &sink);
    while (at < n) {
        size_t k = MX_MIN(step, n - at);
        tools_push(&p, (mx_str){text + at, k}, &sink);
        at += k;
    }
    tools_end(&p, &sink);
    tools_free(&p);
    json_decref(tools);
    return log_text.n ? log_text.data : "";
}

static void check_tools(tool_format f, const char *text, const char *want) {
    for (size_t cut = 0; cut <= strlen(text); cut++) {
        const char *got = run_tools(f, text, cut, cut == 0 ? 1 : 1000);
        if (strcmp(got, want) != 0) fail_msg("\"%s\" cut at %zu: %s", text, cut, got);
    }
}

static void hermes_calls(void **state) {
    (void)state;
    check_tools(TOOLS_HERMES,
                "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, {\"b\": \"}\"}]}}\n"
                "</tool_call>",
                "b0:f|a0:{\"a\": [1, {\"b\": \"}\"}]}");
    check_tools(TOOLS_HERMES,
                "Let me see.\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n"
                "<tool_call>{\"arguments\":{\"q\":\"\\\"<\"},\"name\":\"g\"}</tool_call>",
                "c:Let me see.|b0:f|a0:{}|b1:g|a1:{\"q\":\"\\\"<\"}");
    check_tools(TOOLS_HERMES, "<tool_call>{\"name\":\"f\"}</tool_call>", "b0:f|a0:{}");
    // arguments as a text that holds JSON
    check_tools(TOOLS_HERMES,
                "<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"a\\\":1}\"}</tool_call>",
                "b0:f|a0:{\"a\":1}");
    // cut short by the token limit
    check_tools(TOOLS_HERMES, "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":\"xy",
                "b0:f|a0:{\"a\":\"xy");
    check_tools(TOOLS_HERMES, "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_ca",
                "b0:f|a0:{}");
    check_tools(TOOLS_HERMES, "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call> and more",
                "b0:f|a0:{}|c: and more");
}

static void what_is_no_call_is_text(void **state) {
    (void)state;
    static const char *const texts[] = {"a < b, <tool> and <tool_cal",
                                        "<tool_call>{\"name\": 5}</tool_call>",
                                        "<tool_call>not json</tool_call>",
                                        "<tool_call>{\"name\":\"f\",\"argu",
                                        "<tool_call>[1]</tool_call>",
                                        "<tool_call>{\"arguments\":{\"a\":1}}</tool_call>",
                                        "<<tool_call",
                                        "  spaces  \n",
                                        "<tool_call> \n{\"nam",
                                        "<tool_call>"};
    for (size_t i = 0; i < MX_COUNT(texts); i++) {
        char want[256];
        snprintf(want, sizeof want, "c:%s", texts[i]);
        check_tools(TOOLS_HERMES, texts[i], want);
    }
    check_tools(TOOLS_NONE, "<tool_call>{\"name\":\"f\"}</tool_call>",
                "c:<tool_call>{\"name\":\"f\"}</tool_call>");
}

static void mistral_calls(void **state) {
    (void)state;
    check_tools(TOOLS_MISTRAL,
                "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"get_x\", "
                "\"arguments\": {}}]",
                "b0:f|a0:{\"a\": 1}|b1:get_x|a1:{}");
    check_tools(TOOLS_MISTRAL, "Hi [TOOL_CALLS]f[ARGS]{\"a\": {\"b\": 2}}",
                "c:Hi|b0:f|a0:{\"a\": {\"b\": 2}}");
    check_tools(TOOLS_MISTRAL, "[TOOL_CALLS]f{\"a\":1}[TOOL_CALLS]get_x{}",
                "b0:f|a0:{\"a\":1}|b1:get_x|a1:{}");
    check_tools(TOOLS_MISTRAL, "a [b] [TOOL", "c:a [b] [TOOL");
    check_tools(TOOLS_MISTRAL, "[TOOL_CALLS][{\"x\":1}]", "c:[TOOL_CALLS][{\"x\":1}]");
}

static void llama_calls(void **state) {
    (void)state;
    check_tools(TOOLS_LLAMA, "{\"name\": \"f\", \"parameters\": {\"a\": \"b\"}}",
                "b0:f|a0:{\"a\": \"b\"}");
    check_tools(TOOLS_LLAMA,
                "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"get_x\", "
                "\"parameters\": {\"n\": 1}}",
                "b0:f|a0:{}|b1:get_x|a1:{\"n\": 1}");
    // JSON that is the answer, a function nobody offered, a call that does not begin the text
    check_tools(TOOLS_LLAMA, "{\"title\": \"f\", \"x\": 1}", "c:{\"title\": \"f\", \"x\": 1}");
    check_tools(TOOLS_LLAMA, "{\"name\": \"rm\", \"parameters\": {}}",
                "c:{\"name\": \"rm\", \"parameters\": {}}");
    check_tools(TOOLS_LLAMA, "See {\"name\": \"f\", \"parameters\": {}}",
                "c:See {\"name\": \"f\", \"parameters\": {}}");
    check_tools(TOOLS_LLAMA, "<|python_tag|>f.call(1)", "c:<|python_tag|>f.call(1)");
    check_tools(TOOLS_LLAMA, "<|pyth", "c:<|pyth");
}

// ---- Any text ----

static uint64_t state64 = 88172645463325252u;

static uint32_t random_below(uint32_t n) {
    state64 ^= state64 << 13;
    state64 ^= state64 >> 7;
    state64 ^= state64 << 17;
    return (uint32_t)(state64 >> 33) % n;
}

// What models write, in no order.
static void random_text(char *out, size_t cap) {
    static const char *const parts[] = {"<think>",
                                        "</think>",
                                        "<tool_call>",
                                        "</tool_call>",
                                        "[TOOL_CALLS]",
                                        "[ARGS]",
                                        "[CALL_ID]",
                                        "<|python_tag|>",
                                        "{\"name\": \"f\"",
                                        "\"arguments\"",
                                        "\"parameters\"",
                                        ": ",
                                        "{",
                                        "}",
                                        "[",
                                        "]",
                                        ",",
                                        ";",
                                        "\"",
                                        "\\",
                                        "\\\"",
                                        " ",
                                        "\n",
                                        "get_x",
                                        "é",
                                        "中",
                                        "😀",
                                        "<",
                                        "</",
                                        "\\u00e9",
                                        "\"a\":1",
                                        "null",
                                        "true",
                                        "-1.5e3",
                                        "x",
                                        "{}",
                                        "{\"name\":\"f\",\"arguments\":{\"a\":\"}\"}}",
                                        "{\"name\":\"get_x\",\"parameters\":"};
    size_t n = 0;
    out[0] = 0;
    for (uint32_t k = 1 + random_below(24); k > 0; k--) {
        const char *part = parts[random_below(MX_COUNT(parts))];
        size_t len = strlen(part);
        if (random_below(8) == 0) len = 1 + random_below((uint32_t)len); // half of one
        if (n + len >= cap) return;
        memcpy(out + n, part, len);
        n += len;
        out[n] = 0;
    }
}

// The same deltas, joined, whole, byte by byte, and in pieces of random sizes.
static void cuts_change_nothing(void **state) {
    (void)state;
    static const tool_format formats[] = {TOOLS_HERMES, TOOLS_MISTRAL, TOOLS_LLAMA, TOOLS_NONE};
    for (int round = 0; round < 20000; round++) {
        char text[480];
        random_text(text, sizeof text);
        size_t n = strlen(text);
        tool_format f = formats[round % 4];
        char *whole = mx_strdup(run_tools(f, text, n, 1000));
        for (int k = 0; k < 6; k++) {
            size_t cut = random_below((uint32_t)n + 1), step = k == 0 ? 1 : 1 + random_below(9);
            const char *got = run_tools(f, text, k == 0 ? 0 : cut, step);
            if (strcmp(got, whole) != 0)
                fail_msg("\"%s\" in form %d, cut at %zu by %zu: %s, whole: %s", text, f, cut, step,
                         got, whole);
        }
        mx_free(whole);
        bool on = round & 1, inside = round & 2;
        split all = think(text, on, inside, n, 1000);
        for (int k = 0; k < 6; k++) {
            size_t cut = random_below((uint32_t)n + 1), step = k == 0 ? 1 : 1 + random_below(9);
            split s = think(text, on, inside, k == 0 ? 0 : cut, step);
            if (strcmp(s.reasoning, all.reasoning) != 0 || strcmp(s.content, all.content) != 0)
                fail_msg("\"%s\" cut at %zu by %zu: \"%s\" and \"%s\"", text, cut, step,
                         s.reasoning, s.content);
        }
        // without reasoning nothing is lost
        if (!on && strcmp(all.content, text) != 0) fail_msg("\"%s\": \"%s\"", text, all.content);
    }
}

// A model that repeats itself for ever costs time in proportion.
static void long_texts_cost_linear_time(void **state) {
    (void)state;
    static const char *const units[] = {
        " ", "\n", "<", "<tool_call>", "</think", "[TOOL_CALLS]", "[TOOL_CALLS]x", "{", "[", "x"};
    static const tool_format formats[] = {TOOLS_HERMES, TOOLS_MISTRAL, TOOLS_LLAMA};
    enum { LONG = 256 << 10 };
    char *text = mx_alloc(LONG + 64);
    for (size_t i = 0; i < MX_COUNT(units); i++) {
        size_t n = 0;
        for (; n < LONG; n += strlen(units[i])) memcpy(text + n, units[i], strlen(units[i]) + 1);
        for (size_t f = 0; f < MX_COUNT(formats); f++) {
            double t = mx_now_s();
            run_tools(formats[f], text, 0, 5);
            think(text, true, f == 0, 0, 5);
            double s = mx_now_s() - t;
            if (s > 2 * MX_TEST_SLOW) fail_msg("\"%s\" took %.1f s", units[i], s);
        }
    }
    mx_free(text);
}

// ---- Bodies ----

static void *nested(int depth, size_t *n) {
    char *p = mx_alloc((size_t)depth * 2 + 8);
    memcpy(p, "{\"x\":", 5);
    memset(p + 5, '[', (size_t)depth);
    memset(p + 5 + depth, ']', (size_t)depth);
    p[5 + depth * 2] = '}';
    *n = (size_t)depth * 2 + 6;
    return p;
}

static void bodies_are_bounded(void **state) {
    (void)state;
    mx_err err = {0};
    char field[JSON_FIELD];
    for (int depth = 1; depth <= 1000000; depth *= 10) {
        size_t n;
        char *p = nested(depth, &n);
        json_t *v = json_read(p, n, &err, field);
        assert_int_equal(v != NULL, depth < JSON_DEPTH);
        json_decref(v);
        mx_free(p);
    }
    static const char *const bad[] = {"",
                                      "null",
                                      "[]",
                                      "\"x\"",
                                      "{\"a\":1,\"a\":2}",
                                      "{\"a\":\"\\u0000\"}",
                                      "{",
                                      "{\"a\"",
                                      "{\"a\":1}x",
                                      "{a:1}",
                                      "{\"a\":\"\\ud800\"}",
                                      "{\"a\":\"\xc4\xe3\"}",
                                      "\xff",
                                      "{\"a\":NaN}",
                                      "{\"a\":1e999}",
                                      "{\"a\":99999999999999999999999}"};
    for (size_t i = 0; i < MX_COUNT(bad); i++) {
        if (json_read(bad[i], strlen(bad[i]), &err, field)) fail_msg("%s was taken", bad[i]);
        assert_int_equal(err.status, MX_INVALID);
    }
    json_t *v = json_read("{\"a\":[\"[[[[\"]}", 14, &err, field);
    assert_non_null(v);
    json_decref(v);
}

static void numbers_too_large_name_their_field(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"{\"a\":99999999999999999999}", "a"},
        {"{\"a\" :\n9223372036854775808, \"b\": 1}", "a"},
        {"{\"a\":-9223372036854775809}", "a"},
        {"{\"a\":1e999}", "a"},
        {"{\"x\":{\"y\":[1]},\"s\":\"\\\"b\\\":1\",\"logit_bias\":{\"5\":1e400}}", "logit_bias"},
        {"{\"x\":\"y\",\"z\":[{\"k\":[99999999999999999999]}]}", "z"},
        {"{\"a b\":99999999999999999999}", ""},
        {"[99999999999999999999]", ""},
    };
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        mx_err err = {0};
        char field[JSON_FIELD];
        assert_null(json_read(cases[i][0], strlen(cases[i][0]), &err, field));
        assert_string_equal(field, cases[i][1]);
        assert_non_null(strstr(err.msg, "a number is too large"));
        assert_null(strstr(err.msg, "valid"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reasoning_is_split),  cmocka_unit_test(text_that_only_looks_like_it_stays),
        cmocka_unit_test(hermes_calls),        cmocka_unit_test(what_is_no_call_is_text),
        cmocka_unit_test(mistral_calls),       cmocka_unit_test(llama_calls),
        cmocka_unit_test(bodies_are_bounded),  cmocka_unit_test(numbers_too_large_name_their_field),
        cmocka_unit_test(cuts_change_nothing), cmocka_unit_test(long_texts_cost_linear_time),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    mx_buf_free(&log_text);
    return failed;
}
