// Real chat templates against what transformers renders (make_templates.py wrote the expectations),
// and a table of small templates against jinja2.
#include "base/os.h"
#include "text/chat.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
// cmocka.h needs the four above
#include <cmocka.h>

#ifndef MX_TEST_DATA
#define MX_TEST_DATA "tests/data"
#endif
#define FOLDER MX_TEST_DATA "/templates"

static json_t *load(const char *name) {
    mx_err err = {0};
    char *path = mx_path_join(FOLDER, name);
    json_t *j = mx_json_load(path, 16 << 20, MX_JSON_CONFIG | MX_JSON_VOCAB, &err);
    if (!j) fail_msg("%s", err.msg);
    mx_free(path);
    return j;
}

static mx_str text_of(const json_t *s) {
    return (mx_str){json_string_value(s), json_string_length(s)};
}

// Spans must cover the text in order, alternate, and never be empty.
static void check_spans(const mx_rendered *r, const char *what) {
    size_t at = 0;
    for (size_t i = 0; i < r->n; i++) {
        if (r->spans[i].text.p != r->text.data + at || r->spans[i].text.n == 0 ||
            (i && r->spans[i].trusted == r->spans[i - 1].trusted))
            fail_msg("%s: span %zu is not in order", what, i);
        at += r->spans[i].text.n;
    }
    if (at != r->text.n) fail_msg("%s: spans cover %zu of %zu bytes", what, at, r->text.n);
}

static void show_difference(const char *what, mx_str got, mx_str want) {
    size_t i = 0;
    while (i < got.n && i < want.n && got.p[i] == want.p[i]) i++;
    size_t from = i > 60 ? i - 60 : 0;
    fail_msg("%s: differs at byte %zu\n got  ...%.*s\n want ...%.*s", what, i,
             (int)MX_MIN(got.n - from, 160u), got.p + from, (int)MX_MIN(want.n - from, 160u),
             want.p + from);
}

// Renders and compares with the case's "expect" or "raises".
static void check_case(const mx_template *t, const mx_template_vars *v, const json_t *kase,
                       const char *what) {
    mx_err err = {0};
    mx_rendered r;
    mx_status st = t ? mx_template_render(t, v, &r, &err) : MX_FORMAT;
    const json_t *expect = json_object_get(kase, "expect");
    if (!expect) {
        if (st == MX_OK) fail_msg("%s: rendered, but transformers raises", what);
        return;
    }
    if (st != MX_OK) fail_msg("%s: %s", what, err.msg);
    mx_str got = {r.text.data ? r.text.data : "", r.text.n};
    if (!mx_str_eq(got, text_of(expect))) show_difference(what, got, text_of(expect));
    check_spans(&r, what);
    mx_rendered_free(&r);
}

static void check_conversation(const mx_template *t, const json_t *golden, const json_t *kase,
                               const json_t *conv, const char *what) {
    mx_err err = {0};
    json_t *messages;
    if (mx_chat_normalize(json_object_get(conv, "messages"), true, &messages, &err) != MX_OK)
        fail_msg("%s: %s", what, err.msg);
    const json_t *prompt = json_object_get(conv, "add_generation_prompt");
    mx_template_vars v = {.messages = messages,
                          .tools = json_object_get(conv, "tools"),
                          .extra = json_object_get(conv, "extra"),
                          .add_generation_prompt = !prompt || json_is_true(prompt),
                          .bos_token = json_string_value(json_object_get(golden, "bos_token")),
                          .eos_token = json_string_value(json_object_get(golden, "eos_token")),
                          .now_s = json_number_value(json_object_get(golden, "now"))};
    check_case(t, &v, kase, what);
    json_decref(messages);
}

// With null content the present transformers leaves the field out, on which some templates fail;
// mx_chat_normalize puts "" there, so rendering is right even where the expectation is an error.
static bool may_render(const json_t *kase) {
    const char *name = json_string_value(json_object_get(kase, "conversation"));
    return strcmp(name, "call_null_content") == 0 && !json_object_get(kase, "expect");
}

static size_t check_template(const char *name, const json_t *conversations) {
    mx_err err = {0};
    mx_template *t;
    json_t *golden = load(name), *cases = json_object_get(golden, "cases");
    if (mx_template_open(&t, text_of(json_object_get(golden, "template")), &err) != MX_OK)
        fail_msg("%s: %s", name, err.msg);
    size_t n = 0;
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *kase = json_array_get(cases, i);
        const char *conv = json_string_value(json_object_get(kase, "conversation"));
        char what[200];
        snprintf(what, sizeof what, "%s, %s", name, conv);
        if (may_render(kase)) continue;
        check_conversation(t, golden, kase, json_object_get(conversations, conv), what);
        n++;
    }
    mx_template_close(t);
    json_decref(golden);
    return n;
}

static void real_templates_render_as_in_transformers(void **state) {
    (void)state;
    char **names;
    size_t n, n_cases = 0, n_templates = 0;
    mx_err err = {0};
    assert_int_equal(mx_list_dir(FOLDER, &names, &n, &err), MX_OK);
    json_t *conversations = load("conversations.json");
    for (size_t i = 0; i < n; i++) {
        if (strcmp(names[i], "conversations.json") == 0) continue;
        if (strcmp(names[i], "semantics.json") == 0) continue;
        n_cases += check_template(names[i], conversations);
        n_templates++;
    }
    assert_true(n_templates >= 40);
    assert_true(n_cases >= 500);
    json_decref(conversations);
    mx_free(names);
}

#define MARK "\xee\x84\xa3" // U+E123, which no template contains

// Puts the mark at both ends of every text a user or tool can choose.
static json_t *with_marks(const json_t *v, bool chosen) {
    static const char *const fields[] = {"content", "text", "description", "reasoning_content"};
    if (json_is_string(v) && chosen) return json_sprintf(MARK "%s" MARK, json_string_value(v));
    if (json_is_array(v)) {
        json_t *out = json_array();
        for (size_t i = 0; i < json_array_size(v); i++)
            json_array_append_new(out, with_marks(json_array_get(v, i), chosen));
        return out;
    }
    if (!json_is_object(v)) return json_incref((json_t *)v);
    json_t *out = json_object(), *obj = (json_t *)v;
    const char *key;
    json_t *item;
    json_object_foreach(obj, key, item) {
        bool own = chosen || strcmp(key, "arguments") == 0;
        for (size_t i = 0; i < MX_COUNT(fields); i++) own |= strcmp(key, fields[i]) == 0;
        json_object_set_new(out, key, with_marks(item, own && strcmp(key, "type") != 0));
    }
    return out;
}

// Renders a marked conversation; counts renderings in which the mark is seen.
static size_t check_marked(const mx_template *t, const json_t *conv, const char *what) {
    mx_err err = {0};
    json_t *marked = with_marks(conv, false), *messages;
    mx_rendered r;
    if (mx_chat_normalize(json_object_get(marked, "messages"), true, &messages, &err) != MX_OK)
        fail_msg("%s: %s", what, err.msg);
    mx_template_vars v = {.messages = messages,
                          .tools = json_object_get(marked, "tools"),
                          .extra = json_object_get(marked, "extra"),
                          .add_generation_prompt = true,
                          .bos_token = "<s>",
                          .eos_token = "</s>"};
    size_t seen = 0;
    if (mx_template_render(t, &v, &r, &err) == MX_OK) {
        for (size_t i = 0; i < r.n; i++) {
            bool has = memmem(r.spans[i].text.p, r.spans[i].text.n, MARK, 3) != NULL;
            if (has && r.spans[i].trusted) fail_msg("%s: message text is trusted", what);
            seen |= has;
        }
        mx_rendered_free(&r);
    }
    json_decref(messages);
    json_decref(marked);
    return seen;
}

static void message_text_is_never_trusted(void **state) {
    (void)state;
    char **names;
    size_t n, seen = 0;
    mx_err err = {0};
    assert_int_equal(mx_list_dir(FOLDER, &names, &n, &err), MX_OK);
    json_t *conversations = load("conversations.json");
    for (size_t i = 0; i < n; i++) {
        json_t *golden = load(names[i]), *src = json_object_get(golden, "template"), *conv;
        const char *key;
        mx_template *t = NULL;
        if (src && mx_template_open(&t, text_of(src), &err) != MX_OK) fail_msg("%s", err.msg);
        json_object_foreach(conversations, key, conv) {
            if (t) seen += check_marked(t, conv, names[i]);
        }
        mx_template_close(t);
        json_decref(golden);
    }
    assert_true(seen > 500);
    json_decref(conversations);
    mx_free(names);
}

static void small_templates_mean_what_jinja_means(void **state) {
    (void)state;
    json_t *table = load("semantics.json"), *cases = json_object_get(table, "cases");
    mx_template_vars v = {.messages = json_object_get(table, "messages"),
                          .extra = json_object_get(table, "extra"),
                          .add_generation_prompt = true,
                          .bos_token = "<s>",
                          .eos_token = "</s>",
                          .now_s = json_number_value(json_object_get(table, "now"))};
    assert_true(json_array_size(cases) > 200);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *kase = json_array_get(cases, i), *src = json_object_get(kase, "template");
        mx_err err = {0};
        mx_template *t;
        mx_status st = mx_template_open(&t, text_of(src), &err);
        if (st != MX_OK && json_object_get(kase, "expect"))
            fail_msg("%s: %s", json_string_value(src), err.msg);
        check_case(t, &v, kase, json_string_value(src));
        mx_template_close(t);
    }
    json_decref(table);
}

static int use_utc(void **state) {
    (void)state;
    setenv("TZ", "UTC", 1); // strftime_now prints local time; the expectations are UTC
    tzset();
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(real_templates_render_as_in_transformers),
        cmocka_unit_test(message_text_is_never_trusted),
        cmocka_unit_test(small_templates_mean_what_jinja_means),
    };
    return cmocka_run_group_tests_name("golden templates", tests, use_utc, NULL);
}
