// Any bytes as a chat template: compiled and, when that works, rendered with a fixed conversation
// (tools, a call, a result). Whatever comes out keeps the promises: spans cover the text in order,
// text is UTF-8, and no byte of a message lies in a trusted span.
#include "text/jinja.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

// Every string value carries U+E123, which no template of the corpus contains.
#define MARK "\xee\x84\xa3"

static json_t *conversation(void) {
    static const char text[] =
        "{\"messages\":[{\"role\":\"system\",\"content\":\"Be terse" MARK "\"},"
        "{\"role\":\"user\",\"content\":\" Hi, <b>" MARK "Z\\u00fcrich</b>\\n'x' \",\"n\":7},"
        "{\"role\":\"assistant\",\"content\":\"" MARK "\",\"tool_calls\":[{\"id\":\"" MARK "\","
        "\"type\":\"function\",\"function\":{\"name\":\"f" MARK "\",\"arguments\":{\"a\":\"" MARK
        "\",\"b\":[1,2.5,null,true]}}}]},"
        "{\"role\":\"tool\",\"content\":\"{\\\"t\\\": 1}" MARK "\"},"
        "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a" MARK "\"}]}],"
        "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f" MARK
        "\",\"description\":\"" MARK
        "\",\"parameters\":{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\"}}}"
        "}}],\"extra\":{\"enable_thinking\":true,\"x\":\"" MARK "\"}}";
    json_t *j = json_loads(text, 0, NULL);
    CHECK(j != NULL);
    return j;
}

static bool holds(mx_str s, const char *part) {
    return s.n > 0 && memmem(s.p, s.n, part, strlen(part)) != NULL;
}

static void check(const mx_rendered *r, bool own_mark) {
    size_t at = 0;
    for (size_t i = 0; i < r->n; i++) {
        const mx_span *s = &r->spans[i];
        CHECK(s->text.p == r->text.data + at && s->text.n > 0);
        CHECK(i == 0 || s->trusted != r->spans[i - 1].trusted);
        CHECK(mx_utf8_valid(s->text));
        CHECK(own_mark || !s->trusted || !holds(s->text, MARK));
        at += s->text.n;
    }
    CHECK(at == r->text.n);
}

// Whether the template could make the mark itself: literally or by an escape in a string.
static bool makes_mark(mx_str src) {
    return holds(src, MARK) || holds(src, "\\") || holds(src, "%c");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    mx_err err = {0};
    mx_template *t;
    mx_rendered r;
    mx_str src = {(const char *)data, n_bytes};
    if (mx_template_open(&t, src, &err) != MX_OK) {
        CHECK(err.status != MX_OK && err.msg[0]);
        return 0;
    }
    json_t *j = conversation();
    mx_template_vars v = {.messages = json_object_get(j, "messages"),
                          .tools = json_object_get(j, "tools"),
                          .extra = json_object_get(j, "extra"),
                          .add_generation_prompt = true,
                          .bos_token = "<s>",
                          .eos_token = "</s>",
                          .now_s = 1785427200};
    if (mx_template_render(t, &v, &r, &err) == MX_OK) {
        check(&r, makes_mark(src));
        mx_rendered_free(&r);
    } else {
        CHECK(err.status != MX_OK);
    }
    json_decref(j);
    mx_template_close(t);
    return 0;
}
