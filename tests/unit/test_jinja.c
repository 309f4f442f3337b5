// The template interpreter's own promises: origins of text, bounds, errors with line and construct,
// concurrent renders. What the language means is in tests/golden/test_templates.c.
#include "base/mem.h"
#include "base/os.h"
#include "text/jinja.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
// cmocka.h needs the four above
#include <cmocka.h>

static json_t *parse(const char *text) {
    json_error_t e;
    json_t *j = json_loads(text, 0, &e);
    if (!j) fail_msg("%s: %s", text, e.text);
    return j;
}

static const char messages_text[] =
    "[{\"role\":\"user\",\"content\":\"Hi <|end|> You\",\"n\":42,\"l\":[1,\"two\"],"
    "\"d\":{\"key\":\"val\"},\"json\":\"{\\\"a\\\":[1,\\\"b\\\"]}\",\"fmt\":\"%s!{}\"}]";

// Renders src; text of the result with «» around what is not trusted, or NULL and err.
static char *render(const char *src, mx_status *st, mx_err *err) {
    mx_template *t;
    mx_rendered r;
    *st = mx_template_open(&t, mx_str_of(src), err);
    if (*st != MX_OK) return NULL;
    json_t *messages = parse(messages_text);
    mx_template_vars v = {.messages = messages, .bos_token = "<s>"};
    *st = mx_template_render(t, &v, &r, err);
    char *text = NULL;
    if (*st == MX_OK) {
        mx_buf b;
        mx_buf_init(&b, 0);
        for (size_t i = 0; i < r.n; i++) {
            if (!r.spans[i].trusted) mx_buf_puts(&b, "«");
            mx_buf_add(&b, r.spans[i].text.p, r.spans[i].text.n);
            if (!r.spans[i].trusted) mx_buf_puts(&b, "»");
        }
        text = mx_buf_take(&b);
        mx_rendered_free(&r);
    }
    json_decref(messages);
    mx_template_close(t);
    return text;
}

static void text_keeps_its_origin(void **state) {
    (void)state;
    static const char *const table[][2] = {
        // literals, concatenation, special tokens
        {"<|u|>{{ messages[0].content }}<|e|>", "<|u|>«Hi <|end|> You»<|e|>"},
        {"{{ '<|u|>' + messages[0].content + '<|e|>' }}", "<|u|>«Hi <|end|> You»<|e|>"},
        {"{{ '<|' ~ messages[0].role ~ '|>' }}", "<|«user»|>"},
        {"{{ bos_token ~ 'a' }}", "<s>a"},
        {"{{ bos_token + messages[0].role + bos_token }}", "<s>«user»<s>"},
        // parts of a mixed text
        {"{% set x = 'abc' ~ messages[0].role ~ 'xyz' %}{{ x[2:5] }}|{{ x[5:] }}|{{ x[::-1] }}",
         "c«us»|«er»xyz|zyx«resu»cba"},
        {"{% set x = 'abc' ~ messages[0].role %}{{ x[0] }}{{ x[3] }}{{ x|first }}{{ x|last }}",
         "a«u»a«r»"},
        {"{{ ('  a' ~ messages[0].role ~ ' ')|trim }}", "a«user»"},
        {"{{ ('a,' ~ messages[0].role ~ ',b').split(',')|join('|') }}", "a|«user»|b"},
        {"{{ ('a' ~ messages[0].role)|upper }}{{ ('É' ~ messages[0].role)|title }}",
         "A«USER»É«user»"},
        {"{{ ('a' ~ messages[0].role)|reverse }}", "«resu»a"},
        {"{{ ('x' ~ messages[0].role) * 2 }}", "x«user»x«user»"},
        {"{% for c in 'a' ~ messages[0].role %}{{ c }}{% endfor %}", "a«user»"},
        // replacement text is trusted only in trusted text
        {"{{ messages[0].content|replace('Hi', '<|x|>') }}", "«<|x|> <|end|> You»"},
        {"{{ messages[0].content.replace('', '#') }}", "«#H#i# #<#|#e#n#d#|#># #Y#o#u#»"},
        {"{{ 'a-b'|replace('-', messages[0].role) }}", "a«user»b"},
        {"{{ ('-' ~ messages[0].role)|replace('-', '+')|replace('s', '*') }}", "+«u*er»"},
        // joins keep the separator's origin
        {"{{ [messages[0].role, messages[0].role]|join('<|sep|>') }}", "«user»<|sep|>«user»"},
        {"{{ messages[0].role.join(['a', 'b']) }}", "a«user»b"},
        // what mixes is untrusted
        {"{{ messages[0]|tojson|length > 5 }}{{ messages[0].d|tojson }}",
         "True«{\"key\": \"val\"}»"},
        {"{{ {'a': 1}|tojson }}{{ {'a': messages[0].role}|tojson }}",
         "{\"a\": 1}«{\"a\": \"user\"}»"},
        {"{{ messages[0].l }}{{ [1, 'x'] }}{{ ['x', messages[0].role] }}",
         "«[1, 'two']»[1, 'x']«['x', 'user']»"},
        {"{{ {}|tojson }}{{ messages[0].d.items()|list }}", "{}«[('key', 'val')]»"},
        {"{{ ('a\n' ~ messages[0].role)|indent(2) }}", "a«\n  user»"},
        {"{{ messages[0].role.center(8) }}{{ 'ab'.center(4) }}", "«  user  » ab "},
        {"{{ messages[0].role|escape }}{{ ('<' ~ messages[0].content)|e }}",
         "«user»&lt;«Hi &lt;|end|&gt; You»"},
        // formats: a trusted one keeps the origins, another takes all trust away
        {"{{ '<%s>' % messages[0].role }}{{ '<{}>'.format(messages[0].role) }}",
         "<«user»><«user»>"},
        {"{{ '%s-%s' % ('a', messages[0].role) }}", "a-«user»"},
        {"{{ messages[0].fmt % '<|x|>' }}{{ messages[0].fmt.format('<|x|>') }}",
         "«<|x|>!{}%s!<|x|>»"},
        // numbers and truth values
        {"{{ messages[0].n }}{{ messages[0].n + 1 }}{{ 42 }}", "«4243»42"},
        {"{{ messages|length }}{% for m in messages %}{{ loop.index }}{% endfor %}", "«1»1"},
        {"{{ '7'|int }}{{ messages[0].role|length }}", "7«4»"},
        {"{{ messages[0].n|string ~ 'x' }}{{ '%d' % messages[0].n }}", "«42»x«42»"},
        // data structures, keys, parsed JSON
        {"{% for k, v in messages[0].d.items() %}{{ k }}={{ v }}{% endfor %}", "«key»=«val»"},
        {"{% for k, v in {'a': messages[0].role}|dictsort %}{{ k }}={{ v }}{% endfor %}",
         "a=«user»"},
        {"{{ (messages[0].json|from_json).a|join('-') }}", "«1»-«b»"},
        {"{{ ('{\"a\": \"b\"}'|from_json).a }}", "b"},
        {"{{ messages|map(attribute='role')|join(',') }}", "«user»"},
        {"{{ dict(a=messages[0].role).a ~ namespace(b='c').b }}", "«user»c"},
        // captured text
        {"{% set x %}a{{ messages[0].role }}b{% endset %}{{ x }}", "a«user»b"},
        {"{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(messages[0].role) }}", "<«user»>"},
        {"{% macro m() %}[{{ caller() }}]{% endmacro %}"
         "{% call m() %}a{{ messages[0].role }}{% endcall %}",
         "[a«user»]"},
        {"{% filter upper %}a{{ messages[0].role }}{% endfilter %}", "A«USER»"},
        {"{% generation %}{{ messages[0].role }}!{% endgeneration %}", "«user»!"},
        // one text grown in two ways from the same beginning
        {"{% set a = 'x' ~ messages[0].role %}{% set b = a ~ '1' %}{% set c = a ~ messages[0].n %}"
         "{% set d = b ~ '2' %}{{ a }}|{{ b }}|{{ c }}|{{ d }}",
         "x«user»|x«user»1|x«user42»|x«user»12"},
        {"{% set ns = namespace(s='') %}{% for i in range(3) %}"
         "{% set ns.s = ns.s ~ i ~ messages[0].role %}{% endfor %}{{ ns.s }}",
         "0«user»1«user»2«user»"},
        {"{{ nothing|default(messages[0].role) }}{{ messages[0].nothing|default('d') }}",
         "«user»d"},
        {"{{ strftime_now('%%') }}{{ strftime_now('%%' ~ messages[0].role) }}", "%«%user»"},
    };
    for (size_t i = 0; i < MX_COUNT(table); i++) {
        mx_err err = {0};
        mx_status st;
        char *got = render(table[i][0], &st, &err);
        if (!got) fail_msg("%s: %s", table[i][0], err.msg);
        if (strcmp(got, table[i][1]) != 0)
            fail_msg("%s\n got  %s\n want %s", table[i][0], got, table[i][1]);
        mx_free(got);
    }
}

static void errors_name_line_and_construct(void **state) {
    (void)state;
    static const struct {
        const char *src;
        mx_status st;
        const char *part, *line;
    } table[] = {
        {"a\n{{ x|nope }}", MX_FORMAT, "unknown filter 'nope'", "line 2"},
        {"\n\n{{ x is nope }}", MX_FORMAT, "unknown test 'nope'", "line 3"},
        {"{% nope %}", MX_FORMAT, "unknown tag 'nope'", "line 1"},
        {"{{ x|urlencode }}", MX_UNSUPPORTED, "unsupported filter 'urlencode'", "line 1"},
        {"{% include 'x' %}", MX_UNSUPPORTED, "unsupported tag 'include'", "line 1"},
        {"{% extends 'x' %}", MX_UNSUPPORTED, "unsupported tag 'extends'", "line 1"},
        {"{% import 'x' as y %}", MX_UNSUPPORTED, "unsupported tag 'import'", "line 1"},
        {"{% from 'x' import y %}", MX_UNSUPPORTED, "unsupported tag 'from'", "line 1"},
        {"\n{{ nope() }}", MX_INVALID, "'nope' is undefined", "line 2"},
        {"{{ 'x'.nope() }}", MX_INVALID, "'str object' has no attribute 'nope'", "line 1"},
        {"{{ 'x'.encode() }}", MX_UNSUPPORTED, "unsupported method 'encode'", "line 1"},
        {"{{ messages.append(1) }}", MX_UNSUPPORTED, "method 'append' changes a list", "line 1"},
        {"{{ cycler(1) }}", MX_UNSUPPORTED, "unsupported function 'cycler'", "line 1"},
        {"{% if true %}\n{{ x|nope }}{% endif %}", MX_FORMAT, "unknown filter 'nope'", "line 2"},
        {"{% if true %}\n\n", MX_FORMAT, "expected 'endif'", "line"},
        {"{{ 'abc", MX_FORMAT, "string without its end", "line 1"},
        {"{{ 1 ", MX_FORMAT, "tag without its end", "line 1"},
        {"{# x", MX_FORMAT, "comment without its end", "line 1"},
        {"{{ 'a' + 1 }}", MX_INVALID, "can only concatenate str", "line 1"},
        {"{{ nope.x }}", MX_INVALID, "'nope' is undefined", "line 1"},
        {"{{ 9223372036854775807 + 1 }}", MX_INVALID, "beyond 64 bits", "line 1"},
        {"{{ 9223372036854775808 }}", MX_UNSUPPORTED, "beyond 64 bits", "line 1"},
        {"{{ 'a'|upper(1) }}", MX_INVALID, "filter 'upper' takes at most 0", "line 1"},
        {"{{ messages[0].content|from_json }}", MX_INVALID, "from_json", "line 1"},
        {"{{ raise_exception('Only \"' ~ messages[0].role ~ '\" here') }}", MX_INVALID,
         "Only \"user\" here", ""},
        {"{{ '\\ud800' }}", MX_FORMAT, "is no character", "line 1"},
    };
    for (size_t i = 0; i < MX_COUNT(table); i++) {
        mx_err err = {0};
        mx_status st;
        char *got = render(table[i].src, &st, &err);
        if (got) fail_msg("%s: rendered", table[i].src);
        if (st != table[i].st || err.status != st || !strstr(err.msg, table[i].part) ||
            !strstr(err.msg, table[i].line))
            fail_msg("%s: %s: %s", table[i].src, mx_status_name(st), err.msg);
    }
}

static void unknown_filter_in_an_untaken_branch_is_no_error(void **state) {
    (void)state;
    mx_err err = {0};
    mx_status st;
    char *got =
        render("{% if false %}{{ 1|nope }}{% endif %}{{ 1 if true else (2|nope) }}", &st, &err);
    if (!got) fail_msg("%s", err.msg);
    assert_string_equal(got, "1");
    mx_free(got);
}

static void repeat_text(mx_buf *b, const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) mx_buf_puts(b, s);
}

// n times open, a middle, n times close.
static char *nested(const char *open, const char *middle, const char *close, size_t n) {
    mx_buf b;
    mx_buf_init(&b, 0);
    repeat_text(&b, open, n);
    mx_buf_puts(&b, middle);
    repeat_text(&b, close, n);
    return mx_buf_take(&b);
}

static void deep_sources_are_refused(void **state) {
    (void)state;
    static const char *const table[][3] = {
        {"{{ (", "1", ")"},   {"{{ [", "1", "]"},     {"{{ not ", "1", ""}, {"{{ - ", "1", ""},
        {"{{ f(", "1", ")"},  {"{{ {1: ", "1", "}"},  {"{{ x[", "1", "]"},  {"{{ 1 if ", "1", ""},
        {"{{ 1+", "1", "+1"}, {"{{ x", "", "|upper"}, {"{{ x", "", ".a"},   {"{{ x", "", "()"},
        {"{{ x", "", "**2"},
    };
    for (size_t i = 0; i < MX_COUNT(table); i++) {
        mx_err err = {0};
        mx_template *t;
        char *body = nested(table[i][0] + 3, table[i][1], table[i][2], 5000);
        mx_buf src;
        mx_buf_init(&src, 0);
        mx_buf_puts(&src, "{{ ");
        mx_buf_puts(&src, body);
        mx_buf_puts(&src, " }}");
        mx_status st = mx_template_open(&t, (mx_str){src.data, src.n}, &err);
        if (st != MX_TOOLARGE) fail_msg("%s: %s %s", table[i][0], mx_status_name(st), err.msg);
        mx_free(body);
        mx_buf_free(&src);
    }
    mx_err err = {0};
    mx_template *t;
    char *src = nested("{% if 1 %}", "", "{% endif %}", 5000);
    assert_int_equal(mx_template_open(&t, mx_str_of(src), &err), MX_TOOLARGE);
    mx_free(src);
}

static void endless_work_is_stopped(void **state) {
    (void)state;
    static const char *const table[][2] = {
        {"{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
         "steps"},
        {"{% set n = namespace(s='ab') %}{% for i in range(99) %}"
         "{% set n.s = n.s ~ n.s %}{% endfor %}",
         "text longer"},
        {"{{ 'a' * 100000000 }}", "text longer"},
        {"{{ '%99999999d' % 1 }}", "format width"},
        {"{% for i in range(100000) %}{{ 'xxxxxxxxxx' * 1000 }}{% endfor %}", "text longer"},
        {"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested deeper"},
        {"{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "nested deeper"},
        {"{% set n = namespace(s=[]) %}{% for i in range(999) %}{% set n.s = [n.s] %}{% endfor %}",
         "values nested deeper"},
        {"{% set n = namespace() %}{% set n.me = n %}{{ n }}", "nested deeper"},
        {"{{ [0] * 100000000 }}", "list too long"},
        {"{{ ' '.center(100000000) }}", "width"},
    };
    for (size_t i = 0; i < MX_COUNT(table); i++) {
        mx_err err = {0};
        mx_status st;
        char *got = render(table[i][0], &st, &err);
        if (got || st != MX_TOOLARGE || !strstr(err.msg, table[i][1]))
            fail_msg("%s: %s %s", table[i][0], mx_status_name(st), err.msg);
    }
}

static void deep_or_broken_messages_are_refused(void **state) {
    (void)state;
    mx_err err = {0};
    mx_template *t;
    mx_rendered r;
    assert_int_equal(mx_template_open(&t, mx_str_of("{{ messages }}"), &err), MX_OK);
    char *text = nested("[", "", "]", 1000);
    json_t *messages = parse(text);
    mx_template_vars v = {.messages = messages};
    assert_int_equal(mx_template_render(t, &v, &r, &err), MX_TOOLARGE);
    json_decref(messages);
    mx_free(text);
    messages = json_pack("[o]", json_string_nocheck("\xff\xfe"));
    v.messages = messages;
    assert_int_equal(mx_template_render(t, &v, &r, &err), MX_INVALID);
    json_decref(messages);
    mx_template_close(t);
    assert_int_equal(mx_template_open(&t, (mx_str){"a\xff", 2}, &err), MX_FORMAT);
}

// Building the prompt piece by piece must not cost the square of its length.
static void long_texts_grow_linearly(void **state) {
    (void)state;
    mx_err err = {0};
    mx_status st;
    char *got = render("{% set n = namespace(s='') %}{% for i in range(60000) %}"
                       "{% set n.s = n.s + 'some text' ~ messages[0].role %}{% endfor %}"
                       "{{ n.s|length }}",
                       &st, &err);
    if (!got) fail_msg("%s", err.msg);
    assert_string_equal(got, "«780000»");
    mx_free(got);
}

static void variables_are_there(void **state) {
    (void)state;
    mx_err err = {0};
    mx_template *t;
    mx_rendered r;
    const char *src = "{{ add_generation_prompt }} {{ tools is none }} {{ documents|length }} "
                      "{{ think }} {{ eos_token is defined }}";
    assert_int_equal(mx_template_open(&t, mx_str_of(src), &err), MX_OK);
    json_t *messages = parse("[]"), *docs = parse("[{}]"), *extra = parse("{\"think\": false}");
    mx_template_vars v = {
        .messages = messages, .documents = docs, .extra = extra, .add_generation_prompt = true};
    if (mx_template_render(t, &v, &r, &err) != MX_OK) fail_msg("%s", err.msg);
    assert_string_equal(r.text.data, "True True 1 False False");
    mx_rendered_free(&r);
    mx_template_close(t);
    assert_int_equal(mx_template_open(&t, mx_str_of(""), &err), MX_OK);
    assert_int_equal(mx_template_render(t, &v, &r, &err), MX_OK);
    assert_int_equal(r.n, 0);
    assert_int_equal(r.text.n, 0);
    mx_rendered_free(&r);
    mx_template_close(t);
    json_decref(extra);
    v.extra = extra = parse("{\"messages\": []}");
    assert_int_equal(mx_template_open(&t, mx_str_of("{{ messages }}"), &err), MX_OK);
    assert_int_equal(mx_template_render(t, &v, &r, &err), MX_INVALID);
    assert_string_equal(err.msg, "chat_template_kwargs may not set 'messages'");
    mx_template_close(t);
    json_decref(messages);
    json_decref(docs);
    json_decref(extra);
}

static void *render_many(void *arg) {
    const mx_template *t = arg;
    json_t *messages = parse(messages_text);
    size_t ok = 0;
    for (int i = 0; i < 50; i++) {
        mx_err err = {0};
        mx_rendered r;
        mx_template_vars v = {.messages = messages};
        if (mx_template_render(t, &v, &r, &err) != MX_OK) continue;
        ok += strcmp(r.text.data, "ab user USER ab") == 0;
        mx_rendered_free(&r);
    }
    json_decref(messages);
    return (void *)ok;
}

static void one_template_renders_in_several_threads(void **state) {
    (void)state;
    mx_err err = {0};
    mx_template *t;
    const char *src = "{% set x = 'a' ~ 'b' %}{{ x }} {% for m in messages %}{{ m.role }}"
                      " {{ m.role|upper }}{% endfor %} {{ x }}";
    assert_int_equal(mx_template_open(&t, mx_str_of(src), &err), MX_OK);
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, render_many, t), 0);
    for (size_t i = 0; i < 4; i++) {
        void *ok;
        pthread_join(threads[i], &ok);
        assert_int_equal((size_t)ok, 50);
    }
    mx_template_close(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_keeps_its_origin),
        cmocka_unit_test(errors_name_line_and_construct),
        cmocka_unit_test(unknown_filter_in_an_untaken_branch_is_no_error),
        cmocka_unit_test(deep_sources_are_refused),
        cmocka_unit_test(endless_work_is_stopped),
        cmocka_unit_test(deep_or_broken_messages_are_refused),
        cmocka_unit_test(long_texts_grow_linearly),
        cmocka_unit_test(variables_are_there),
        cmocka_unit_test(one_template_renders_in_several_threads),
    };
    return cmocka_run_group_tests_name("jinja", tests, NULL, NULL);
}
