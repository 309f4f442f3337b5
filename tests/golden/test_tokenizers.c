// Tokenizers against Hugging Face's libraries: ids, decoded text, and the stream of deltas.
// The data is made by tests/golden/make_text.py; vocabularies are those of published packages
// (Qwen 3, Llama 3: tokenizer.json; SmolLM2, Gemma 3: the metadata of GGUF files, no weights).
#include "text/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
// cmocka.h needs the four above
#include <cmocka.h>

#define DATA MX_TEST_BUILD_DATA "/text/"

static json_t *load(const char *path) {
    mx_err err = {0};
    json_t *j = mx_json_load(path, 64u << 20, MX_JSON_VOCAB, &err);
    if (!j) fail_msg("%s", err.msg);
    return j;
}

static mx_str view(const json_t *s) {
    return (mx_str){json_string_value(s), json_string_length(s)};
}

static bool same_ids(const mx_ids *got, const json_t *want) {
    if (got->n != json_array_size(want)) return false;
    for (size_t i = 0; i < got->n; i++) {
        if (got->v[i] != json_integer_value(json_array_get(want, i))) return false;
    }
    return true;
}

static void take_ids(mx_ids *ids, const json_t *list) {
    ids->n = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        mx_ids_push(ids, (int32_t)json_integer_value(json_array_get(list, i)));
    }
}

// Decodes at once and as a stream; every delta must be valid UTF-8. want NULL or null: anything.
static bool decodes_to(const mx_tokenizer *t, const mx_ids *ids, bool skip, mx_str want) {
    mx_buf whole, parts;
    mx_buf_init(&whole, 0);
    mx_buf_init(&parts, 0);
    mx_tokenizer_decode(t, ids->v, ids->n, skip, &whole);
    mx_detok *d = mx_detok_open(t, skip);
    bool ok = true;
    for (size_t i = 0; i <= ids->n; i++) {
        size_t from = parts.n;
        if (i < ids->n)
            mx_detok_push(d, ids->v[i], &parts);
        else
            mx_detok_flush(d, &parts);
        if (parts.n > from) ok = ok && mx_utf8_valid((mx_str){parts.data + from, parts.n - from});
    }
    mx_detok_close(d);
    ok = ok && mx_str_eq((mx_str){whole.data, whole.n}, (mx_str){parts.data, parts.n});
    if (want.p) ok = ok && mx_str_eq((mx_str){whole.data, whole.n}, want);
    mx_buf_free(&whole);
    mx_buf_free(&parts);
    return ok;
}

static json_t *nth(const json_t *map, size_t i) {
    char key[24];
    snprintf(key, sizeof key, "%zu", i);
    return json_object_get(map, key);
}

static void check_texts(const char *name, const mx_tokenizer *t, const json_t *strings,
                        const json_t *expect) {
    mx_ids ids = {0};
    mx_err err = {0};
    const json_t *plain = json_object_get(expect, "plain"), *skip = json_object_get(expect, "skip");
    for (size_t i = 0; i < json_array_size(strings); i++) {
        mx_str text = view(json_array_get(strings, i));
        ids.n = 0;
        mx_encode_opts opts = {.parse_special = true};
        assert_int_equal(mx_tokenizer_encode(t, text, opts, &ids, &err), MX_OK);
        if (!same_ids(&ids, json_array_get(json_object_get(expect, "ids"), i))) {
            fail_msg("%s: ids of string %zu '%.*s'", name, i, (int)text.n, text.p);
        }
        // "plain" differs from the text, "skip" from "plain"
        const json_t *p = nth(plain, i), *s = nth(skip, i);
        mx_str with = p ? view(p) : text, without = s ? view(s) : with;
        if (!decodes_to(t, &ids, false, with)) fail_msg("%s: decoding string %zu", name, i);
        if (!decodes_to(t, &ids, true, without)) fail_msg("%s: skipping in string %zu", name, i);
    }
    const json_t *lists = json_object_get(expect, "lists");
    const json_t *texts = json_object_get(expect, "list_texts");
    for (size_t i = 0; i < json_array_size(lists); i++) {
        take_ids(&ids, json_array_get(lists, i));
        if (!decodes_to(t, &ids, true, view(json_array_get(texts, i)))) {
            fail_msg("%s: decoding list %zu", name, i);
        }
    }
    mx_free(ids.v);
}

static void check_set(const char *name, const mx_tokenizer *t) {
    json_t *golden = load(DATA "golden.json");
    const json_t *set = json_object_get(json_object_get(golden, "sets"), name);
    assert_non_null(set);
    check_texts(name, t, json_object_get(golden, "strings"), set);
    json_decref(golden);
}

static mx_tokenizer *open_gguf(const char *path) {
    mx_err err = {0};
    mx_weights w;
    mx_tokenizer *t;
    if (mx_weights_open(&w, path, &err) != MX_OK) fail_msg("%s", err.msg);
    if (mx_tokenizer_open_gguf(&t, &w, &err) != MX_OK) fail_msg("%s", err.msg);
    mx_weights_close(&w); // the tokenizer holds copies
    return t;
}

static mx_tokenizer *open_dir(const char *path) {
    mx_err err = {0};
    mx_tokenizer *t;
    if (mx_tokenizer_open_dir(&t, path, &err) != MX_OK) fail_msg("%s", err.msg);
    return t;
}

static int32_t find(const mx_tokenizer *t, const char *s) {
    return mx_tokenizer_find(t, mx_str_of(s));
}

// Ids that add_special gives a text.
static size_t count_bos(const mx_tokenizer *t, const char *text) {
    mx_ids ids = {0};
    mx_encode_opts opts = {.add_special = true, .parse_special = true};
    assert_int_equal(mx_tokenizer_encode(t, mx_str_of(text), opts, &ids, NULL), MX_OK);
    size_t n = 0;
    for (size_t i = 0; i < ids.n; i++) n += ids.v[i] == mx_tokenizer_bos(t);
    mx_free(ids.v);
    return n;
}

static void qwen3(void **state) {
    (void)state;
    mx_tokenizer *t = open_dir(DATA "qwen3");
    check_set("qwen3", t);
    assert_int_equal(mx_tokenizer_n_vocab(t), 151669);
    assert_int_equal(mx_tokenizer_bos(t), -1);
    assert_int_equal(mx_tokenizer_eos(t), find(t, "<|im_end|>"));
    assert_false(mx_tokenizer_adds_bos(t));
    assert_true(mx_tokenizer_template(t, NULL).n > 1000);
    assert_int_equal(mx_tokenizer_template(t, "tool_use").n, 0);
    assert_false(mx_tokenizer_is_special(t, find(t, "<think>")));
    // reasoning markers are no special tokens, yet a message must not forge them
    mx_span spans[] = {{mx_str_of("<think>"), true}, {mx_str_of("a </think> b"), false}};
    mx_ids ids = {0};
    assert_int_equal(mx_tokenizer_encode_spans(t, spans, 2, &ids, NULL), MX_OK);
    assert_int_equal(ids.v[0], find(t, "<think>"));
    for (size_t i = 1; i < ids.n; i++) assert_int_not_equal(ids.v[i], find(t, "</think>"));
    assert_true(decodes_to(t, &ids, false, mx_str_of("<think>a </think> b")));
    mx_free(ids.v);
    mx_tokenizer_close(t);
}

static void llama3(void **state) {
    (void)state;
    mx_tokenizer *t = open_dir(DATA "llama3");
    check_set("llama3", t);
    assert_int_equal(mx_tokenizer_bos(t), 128000);
    assert_int_equal(mx_tokenizer_eos(t), 128009);
    assert_true(mx_tokenizer_adds_bos(t));
    assert_int_equal(count_bos(t, "hi"), 1);
    assert_int_equal(count_bos(t, "<|begin_of_text|>hi"), 1);
    mx_tokenizer_close(t);
}

static void smollm2(void **state) {
    (void)state;
    mx_tokenizer *t = open_gguf(DATA "smollm2.gguf");
    check_set("smollm2", t);
    assert_int_equal(mx_tokenizer_n_vocab(t), 49152);
    assert_int_equal(mx_tokenizer_eos(t), 2);
    assert_false(mx_tokenizer_adds_bos(t));
    assert_true(mx_tokenizer_template(t, "default").n > 100);
    mx_str piece = mx_tokenizer_piece(t, find(t, " world"));
    assert_true(mx_str_is(piece, " world"));
    mx_tokenizer_close(t);
}

static void gemma3(void **state) {
    (void)state;
    mx_tokenizer *t = open_gguf(DATA "gemma3.gguf");
    check_set("gemma3", t);
    assert_int_equal(mx_tokenizer_n_vocab(t), 262144);
    assert_true(mx_tokenizer_adds_bos(t));
    assert_int_equal(count_bos(t, "hi"), 1);
    assert_int_equal(count_bos(t, "<bos>hi"), 1);
    int32_t ids[4];
    assert_int_equal(mx_tokenizer_eos_ids(t, ids, 4), 2); // <eos> and <end_of_turn>
    assert_int_equal(ids[0], 1);
    assert_int_equal(ids[1], find(t, "<end_of_turn>"));
    assert_true(mx_str_is(mx_tokenizer_piece(t, find(t, "<0x0A>")), "\n"));
    mx_tokenizer_close(t);
}

// Small vocabularies through every normalizer, pre-tokenizer, decoder and added-token rule.
static void every_construct(void **state) {
    (void)state;
    json_t *cases = load(DATA "pipelines.json");
    assert_true(json_array_size(cases) >= 40);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *c = json_array_get(cases, i), *expect = json_object_get(c, "expect");
        const char *name = json_string_value(json_object_get(c, "name"));
        mx_str text = view(json_object_get(c, "tokenizer"));
        mx_tokenizer *t;
        mx_err err = {0};
        if (mx_tokenizer_open_json(&t, text, (mx_str){0}, &err) != MX_OK) {
            fail_msg("%s: %s", name, err.msg);
        }
        check_texts(name, t, json_object_get(c, "strings"), expect);
        mx_ids ids = {0};
        mx_encode_opts opts = {.add_special = true, .parse_special = true};
        mx_tokenizer_encode(t, mx_str_of("Hello world"), opts, &ids, &err);
        if (!same_ids(&ids, json_object_get(expect, "special"))) fail_msg("%s: special", name);
        mx_free(ids.v);
        mx_tokenizer_close(t);
    }
    json_decref(cases);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_construct), cmocka_unit_test(smollm2), cmocka_unit_test(gemma3),
        cmocka_unit_test(qwen3),           cmocka_unit_test(llama3),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
