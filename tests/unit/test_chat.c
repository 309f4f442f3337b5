// Message normalisation: what clients send back (null contents, arguments in strings) becomes what
// templates read.
#include "base/mem.h"
#include "text/chat.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
// cmocka.h needs the four above
#include <cmocka.h>

static json_t *parse(const char *text) {
    json_error_t e;
    json_t *j = json_loads(text, JSON_DECODE_ANY, &e);
    if (!j) fail_msg("%s: %s", text, e.text);
    return j;
}

// Normalises `in` and compares with `want` (as JSON, in order).
static void expect(const char *in, bool keep_parts, const char *want) {
    mx_err err = {0};
    json_t *a = parse(in), *b = parse(want), *out;
    if (mx_chat_normalize(a, keep_parts, &out, &err) != MX_OK) fail_msg("%s: %s", in, err.msg);
    char *got = json_dumps(out, JSON_COMPACT), *wanted = json_dumps(b, JSON_COMPACT);
    assert_string_equal(got, wanted);
    free(got);
    free(wanted);
    json_decref(out);
    char *before = json_dumps(a, 0);
    json_t *again = parse(in);
    char *after = json_dumps(again, 0);
    assert_string_equal(before, after); // the request itself is not changed
    free(before);
    free(after);
    json_decref(again);
    json_decref(a);
    json_decref(b);
}

static void expect_error(const char *in, const char *part) {
    mx_err err = {0};
    json_t *a = parse(in), *out;
    if (mx_chat_normalize(a, false, &out, &err) != MX_INVALID || !strstr(err.msg, part) || out)
        fail_msg("%s: %s", in, err.msg);
    json_decref(a);
}

#define CALL                                                                                       \
    "\"tool_calls\":[{\"id\":\"1\",\"type\":\"function\",\"function\":{\"name\":\"f\","            \
    "\"arguments\":{\"a\":1}}}]"

static void empty_contents_of_tool_calls_become_empty_text(void **state) {
    (void)state;
    static const char *const contents[] = {"\"content\":null,", "\"content\":\"\",",
                                           "\"content\":[],"};
    for (size_t i = 0; i < MX_COUNT(contents); i++) {
        char in[300];
        snprintf(in, sizeof in, "[{\"role\":\"assistant\",%s" CALL "}]", contents[i]);
        expect(in, false, "[{\"role\":\"assistant\",\"content\":\"\"," CALL "}]");
        expect(in, true, "[{\"role\":\"assistant\",\"content\":\"\"," CALL "}]");
    }
    expect("[{\"role\":\"assistant\"," CALL "}]", false,
           "[{\"role\":\"assistant\"," CALL ",\"content\":\"\"}]");
}

static void arguments_in_strings_become_objects(void **state) {
    (void)state;
    static const char *const table[][2] = {
        {"\"{\\\"a\\\": 1}\"", "{\"a\":1}"},
        {"{\"a\": [1, null]}", "{\"a\":[1,null]}"},
        {"\"\"", "{}"},
        {"\" \\n\"", "{}"},
        {"\"{}\"", "{}"},
        {"null", "{}"},
        {"\"{\\\"c\\\": \\\"Z\\\\u00fcrich \\\\ud83d\\\\ude00\\\", \\\"n\\\": {\\\"x\\\": 1.5}}\"",
         "{\"c\":\"Zürich 😀\",\"n\":{\"x\":1.5}}"},
    };
    for (size_t i = 0; i < MX_COUNT(table); i++) {
        char in[400], want[400];
        const char *frame = "[{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"type\":"
                            "\"function\",\"function\":{\"name\":\"f\",\"arguments\":%s}}]}]";
        snprintf(in, sizeof in, frame, table[i][0]);
        snprintf(want, sizeof want, frame, table[i][1]);
        expect(in, false, want);
    }
    expect(
        "[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\"}}]}]", false,
        "[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{}}"
        "}],\"content\":\"\"}]");
}

static void parts_become_one_text(void **state) {
    (void)state;
    const char *in = "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
                     "{\"type\":\"text\",\"text\":\"b\\u0000\"}]}]";
    mx_err err = {0};
    json_error_t e;
    json_t *a = json_loads(in, JSON_ALLOW_NUL, &e), *out;
    assert_int_equal(mx_chat_normalize(a, false, &out, &err), MX_OK);
    const json_t *content = json_object_get(json_array_get(out, 0), "content");
    assert_int_equal(json_string_length(content), 3);
    assert_memory_equal(json_string_value(content), "ab\0", 3);
    json_decref(out);
    assert_int_equal(mx_chat_normalize(a, true, &out, &err), MX_OK);
    assert_true(json_equal(a, out));
    json_decref(out);
    json_decref(a);
}

static void nulls_go_and_reasoning_has_both_names(void **state) {
    (void)state;
    expect("[{\"role\":\"user\",\"content\":\"x\",\"name\":null,\"tool_calls\":null}]", false,
           "[{\"role\":\"user\",\"content\":\"x\"}]");
    expect("[{\"role\":\"assistant\",\"content\":\"x\",\"reasoning_content\":\"r\"}]", false,
           "[{\"thinking\":\"r\",\"role\":\"assistant\",\"content\":\"x\",\"reasoning_content\":"
           "\"r\"}]");
    expect("[{\"role\":\"assistant\",\"content\":null,\"reasoning\":\"r\"}]", false,
           "[{\"thinking\":\"r\",\"role\":\"assistant\",\"content\":\"\",\"reasoning\":\"r\","
           "\"reasoning_content\":\"r\"}]");
}

static void wrong_messages_are_named(void **state) {
    (void)state;
    expect_error("{}", "messages: expected an array");
    expect_error("[1]", "messages[0]: expected an object");
    expect_error("[{\"role\":\"user\",\"content\":\"x\"},{\"content\":\"x\"}]", "messages[1].role");
    expect_error("[{\"role\":\"user\"}]", "messages[0].content: missing");
    expect_error("[{\"role\":\"user\",\"content\":null}]", "messages[0].content: null");
    expect_error("[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[]}]",
                 "messages[0].content: null");
    expect_error("[{\"role\":\"user\",\"content\":5}]", "messages[0].content: expected a string");
    expect_error("[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]",
                 "messages[0].content[0]: part of type 'image_url'");
    expect_error("[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]",
                 "messages[0].content[0]");
    expect_error("[{\"role\":\"user\",\"content\":[\"x\"]}]", "messages[0].content[0]");
    expect_error("[{\"role\":\"assistant\",\"tool_calls\":{}}]", "messages[0].tool_calls");
    expect_error("[{\"role\":\"assistant\",\"tool_calls\":[{}]}]", "messages[0].tool_calls[0]");
    static const char *const bad[] = {
        "\"{\\\"a\\\": \"", "\"nonsense\"", "\"[1]\"", "\"5\"", "5", "[1]", "\"{\\\"a\\\": NaN}\""};
    for (size_t i = 0; i < MX_COUNT(bad); i++) {
        char in[200];
        snprintf(in, sizeof in,
                 "[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\","
                 "\"arguments\":%s}}]}]",
                 bad[i]);
        expect_error(in, "messages[0].tool_calls[0].function.arguments: ");
    }
}

static void depth_is_bounded(void **state) {
    (void)state;
    char in[2200] = "[{\"role\":\"user\",\"content\":\"x\",\"x\":";
    size_t n = strlen(in);
    for (int i = 0; i < 1000; i++) in[n++] = '[';
    for (int i = 0; i < 1000; i++) in[n++] = ']';
    snprintf(in + n, sizeof in - n, "}]");
    expect_error(in, "nested deeper than 128");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(empty_contents_of_tool_calls_become_empty_text),
        cmocka_unit_test(arguments_in_strings_become_objects),
        cmocka_unit_test(parts_become_one_text),
        cmocka_unit_test(nulls_go_and_reasoning_has_both_names),
        cmocka_unit_test(wrong_messages_are_named),
        cmocka_unit_test(depth_is_bounded),
    };
    return cmocka_run_group_tests_name("chat", tests, NULL, NULL);
}
