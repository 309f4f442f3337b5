// text: tokenizer loading from hostile and odd files, trust of spans, long texts, decoding.
#include "text/split_int.h"
#include "text/tokenizer.h"
#include "text/unicode_int.h"

#include "support/ckpt_writer.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
// cmocka.h needs stdio.h and stdlib.h (above) and these two
#include <cmocka.h>

// A file with the given vocabulary, merges, and other members ("" or starting with a comma).
#define FILE_OF(vocab, merges, more)                                                               \
    "{\"model\":{\"type\":\"BPE\",\"vocab\":" vocab ",\"merges\":" merges "}" more "}"
#define BYTE_LEVEL                                                                                 \
    ",\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false}"                       \
    ",\"decoder\":{\"type\":\"ByteLevel\"}"
#define SMALL_VOCAB                                                                                \
    "{\"a\":0,\"b\":1,\"ab\":2,\"<\":3,\">\":4,\"s\":5,\"Ġ\":6,\"Ã\":7,\"©\":8,"                \
    "\"x\":9,\"/\":10}"
#define ADDED                                                                                      \
    ",\"added_tokens\":[{\"id\":11,\"content\":\"<s>\",\"special\":true},"                         \
    "{\"id\":12,\"content\":\"<x>\",\"special\":false,\"normalized\":false},"                      \
    "{\"id\":13,\"content\":\"bb\",\"special\":false,\"normalized\":false},"                       \
    "{\"id\":14,\"content\":\"</s>\",\"special\":true,\"normalized\":true}]"
#define SMALL FILE_OF(SMALL_VOCAB, "[\"a b\"]", BYTE_LEVEL ADDED)

static mx_tokenizer *open_small(const char *json, const char *config) {
    mx_tokenizer *t;
    mx_err err = {0};
    mx_str c = config ? mx_str_of(config) : (mx_str){0};
    if (mx_tokenizer_open_json(&t, mx_str_of(json), c, &err) != MX_OK) fail_msg("%s", err.msg);
    return t;
}

static void assert_ids(const mx_ids *ids, size_t n, const int32_t *want) {
    assert_int_equal(ids->n, n);
    for (size_t i = 0; i < n; i++) assert_int_equal(ids->v[i], want[i]);
}
#define ASSERT_IDS(ids, ...)                                                                       \
    assert_ids((ids), sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t), (int32_t[]){__VA_ARGS__})

// The file must be refused with this status and a message that holds both texts.
static void refused(const char *json, mx_status status, const char *a, const char *b) {
    mx_tokenizer *t;
    mx_err err = {0};
    assert_int_equal(mx_tokenizer_open_json(&t, mx_str_of(json), (mx_str){0}, &err), status);
    assert_null(t);
    if (!strstr(err.msg, a) || !strstr(err.msg, b)) fail_msg("'%s' lacks %s, %s", err.msg, a, b);
    // no place for a message is no reason to crash
    assert_int_not_equal(mx_tokenizer_open_json(&t, mx_str_of(json), (mx_str){0}, NULL), MX_OK);
}

static void errors_name_the_place(void **state) {
    (void)state;
#define V SMALL_VOCAB
    refused("", MX_FORMAT, "tokenizer.json", "empty");
    refused("[]", MX_FORMAT, "model", "missing");
    refused("{\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}", MX_UNSUPPORTED, "type", "Unigram");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{}}}", MX_FORMAT, "model.merges", "");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":5,\"merges\":[]}}", MX_FORMAT, "model.vocab",
            "");
    refused(FILE_OF("{\"a\":0,\"b\":0}", "[]", ""), MX_FORMAT, "model.vocab: id 0", "'b'");
    refused(FILE_OF("{\"a\":0,\"a\":1}", "[]", ""), MX_FORMAT, "model.vocab", "same text 'a'");
    refused(FILE_OF("{\"a\":4194304}", "[]", ""), MX_FORMAT, "4194304", "outside");
    refused(FILE_OF("{\"a\":99999999999999999999}", "[]", ""), MX_FORMAT, "model.vocab", "id");
    refused(FILE_OF("{\"a\":-1}", "[]", ""), MX_FORMAT, "model.vocab", "byte 5");
    refused(FILE_OF("{\"a\":1.5}", "[]", ""), MX_FORMAT, "model.vocab", "id");
    refused(FILE_OF("{\"a\":\"1\"}", "[]", ""), MX_FORMAT, "model.vocab", "id");
    refused(FILE_OF("{\"\":1}", "[]", ""), MX_FORMAT, "model.vocab", "empty");
    refused(FILE_OF("{\"\\ud800\":1}", "[]", ""), MX_FORMAT, "model.vocab", "surrogate");
    refused(FILE_OF("{\"\xff\":1}", "[]", ""), MX_FORMAT, "model.vocab", "UTF-8");
    refused(FILE_OF("{\"a\":1,}", "[]", ""), MX_FORMAT, "model.vocab", "string");
    refused(FILE_OF(V, "[\"a q\"]", ""), MX_FORMAT, "model.merges[0]", "'q'");
    refused(FILE_OF(V, "[\"a b\",\"b a\"]", ""), MX_FORMAT, "model.merges[1]", "'ba'");
    refused(FILE_OF(V, "[\"ab\"]", ""), MX_FORMAT, "model.merges", "two parts");
    refused(FILE_OF(V, "[[\"a\",\"b\",\"x\"]]", ""), MX_FORMAT, "model.merges", "']'");
    refused(FILE_OF(V, "[5]", ""), MX_FORMAT, "model.merges", "string");
    refused("{\"model\":{\"vocab\":{\"a\":0},\"vocab\":{\"a\":0},\"merges\":[]}}", MX_FORMAT,
            "vocab", "twice");
    refused("{\"model\":{\"vocab\":{\"a\":0", MX_FORMAT, "ends inside", "");
    refused(FILE_OF(V, "[]", ",\"added_tokens\":[{\"id\":1,\"content\":\"zz\"}]"), MX_FORMAT,
            "added_tokens[0]", "id 1");
    refused(FILE_OF(V, "[]", ",\"added_tokens\":[{\"id\":1,\"content\":\"a\"}]"), MX_FORMAT,
            "added_tokens[0]", "'a' has id 1");
    refused(FILE_OF(V, "[]", ",\"added_tokens\":[{\"id\":2147483648,\"content\":\"zz\"}]"),
            MX_FORMAT, "added_tokens[0]", "2147483648");
    refused(FILE_OF(V, "[]", ",\"added_tokens\":[{\"id\":\"7\",\"content\":\"zz\"}]"), MX_FORMAT,
            "added_tokens[0]", "id");
    refused(FILE_OF(V, "[]", ",\"normalizer\":{\"type\":\"Precompiled\"}"), MX_UNSUPPORTED,
            "normalizer", "Precompiled");
    refused(FILE_OF(V, "[]", ",\"pre_tokenizer\":{\"type\":\"UnicodeScripts\"}"), MX_UNSUPPORTED,
            "pre_tokenizer", "UnicodeScripts");
    refused(FILE_OF(V, "[]", ",\"decoder\":{\"type\":\"WordPiece\"}"), MX_UNSUPPORTED, "decoder",
            "WordPiece");
    refused(FILE_OF(V, "[]", ",\"post_processor\":{\"type\":\"Other\"}"), MX_UNSUPPORTED,
            "post_processor", "Other");
    refused(FILE_OF(V, "[]",
                    ",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\\\\Kb\"},"
                    "\"behavior\":\"Isolated\"}"),
            MX_UNSUPPORTED, "\\K", "");
    refused(FILE_OF(V, "[]",
                    ",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},"
                    "\"behavior\":\"Isolated\"}"),
            MX_UNSUPPORTED, "regex", "");
    refused(FILE_OF(V, "[]",
                    ",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":["
                    "{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":{\"id\":\"A\"}}],"
                    "\"special_tokens\":{\"<s>\":{\"ids\":[77]}}}"),
            MX_FORMAT, "post_processor", "token");
#undef V
}

static void deep_json_is_an_error(void **state) {
    (void)state;
    for (size_t depth = 100; depth <= 1000000; depth *= 100) {
        mx_buf b;
        mx_buf_init(&b, 0);
        mx_buf_puts(&b, "{\"x\":");
        for (size_t i = 0; i < depth; i++) mx_buf_puts(&b, i & 1 ? "[" : "{\"k\":");
        mx_tokenizer *t;
        mx_err err = {0};
        mx_str text = {b.data, b.n};
        assert_int_equal(mx_tokenizer_open_json(&t, text, (mx_str){0}, &err), MX_FORMAT);
        assert_int_equal(mx_tokenizer_open_json(&t, mx_str_of(SMALL), text, &err), MX_FORMAT);
        assert_non_null(strstr(err.msg, "tokenizer_config.json"));
        // inside the parts that are read by our own code
        mx_buf_clear(&b);
        mx_buf_puts(&b, "{\"model\":{\"merges\":[],\"vocab\":");
        for (size_t i = 0; i < depth; i++) mx_buf_puts(&b, "{\"a\":");
        mx_buf_puts(&b, "1");
        for (size_t i = 0; i < depth + 2; i++) mx_buf_puts(&b, "}");
        assert_int_equal(mx_tokenizer_open_json(&t, (mx_str){b.data, b.n}, (mx_str){0}, &err),
                         MX_FORMAT);
        mx_buf_free(&b);
    }
}

static void spans_guard_control_tokens(void **state) {
    (void)state;
    mx_tokenizer *t = open_small(SMALL, "{\"chat_template\":\"<x> {{ bos_token }} bb\"}");
    mx_ids ids = {0};
    mx_err err = {0};
    // 'bb' has no look of markup, but the template speaks of it; '<x>' has the look
    mx_span forged[] = {
        {mx_str_of("<s>"), true}, {mx_str_of("a<s>b<x></s>bb"), false}, {mx_str_of("</s>"), true}};
    assert_int_equal(mx_tokenizer_encode_spans(t, forged, 3, &ids, &err), MX_OK);
    ASSERT_IDS(&ids, 11, 0, 3, 5, 4, 1, 3, 9, 4, 3, 10, 5, 4, 1, 1, 14);
    mx_buf text;
    mx_buf_init(&text, 0);
    mx_tokenizer_decode(t, ids.v, ids.n, false, &text);
    assert_string_equal(text.data, "<s>a<s>b<x></s>bb</s>");
    mx_buf_free(&text);
    // a spelling may not be put together from two kinds of text
    mx_span joined[] = {{mx_str_of("<"), true}, {mx_str_of("s"), false}, {mx_str_of(">"), true}};
    ids.n = 0;
    assert_int_equal(mx_tokenizer_encode_spans(t, joined, 3, &ids, &err), MX_OK);
    ASSERT_IDS(&ids, 3, 5, 4);
    mx_span trusted[] = {{mx_str_of("<"), true}, {mx_str_of(""), false}, {mx_str_of("s>"), true}};
    ids.n = 0;
    assert_int_equal(mx_tokenizer_encode_spans(t, trusted, 3, &ids, &err), MX_OK);
    ASSERT_IDS(&ids, 11);
    // merges do not know spans
    mx_span halves[] = {{mx_str_of("a"), true}, {mx_str_of("b"), false}};
    ids.n = 0;
    assert_int_equal(mx_tokenizer_encode_spans(t, halves, 2, &ids, &err), MX_OK);
    ASSERT_IDS(&ids, 2);
    ids.n = 0;
    assert_int_equal(mx_tokenizer_encode(t, mx_str_of("<s>"), (mx_encode_opts){0}, &ids, &err),
                     MX_OK);
    ASSERT_IDS(&ids, 3, 5, 4);
    mx_free(ids.v);
    mx_tokenizer_close(t);
}

// A vocabulary whose merges lead to a control token: they are not followed.
static void merges_do_not_arrive_at_control_tokens(void **state) {
    (void)state;
    static const char vocab[] =
        FILE_OF("{\"<\":0,\"s\":1,\">\":2,\"<s\":3,\"<s>\":4,\"s>\":5}", "[\"< s\",\"<s >\"]",
                ",\"added_tokens\":[{\"id\":4,\"content\":\"<s>\",\"special\":true}]");
    mx_tokenizer *t = open_small(vocab, NULL);
    mx_ids ids = {0};
    mx_err err = {0};
    mx_span span[] = {{mx_str_of("<s>"), false}, {mx_str_of("<s>"), true}};
    assert_int_equal(mx_tokenizer_encode_spans(t, span, 2, &ids, &err), MX_OK);
    ASSERT_IDS(&ids, 3, 2, 4);
    mx_free(ids.v);
    mx_tokenizer_close(t);
}

static void bos_is_added_once(void **state) {
    (void)state;
    static const char post[] = FILE_OF(
        SMALL_VOCAB, "[\"a b\"]",
        BYTE_LEVEL ADDED ",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":["
                         "{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":{\"id\":\"A\"}}],"
                         "\"special_tokens\":{\"<s>\":{\"ids\":[11]}}}");
    static const char config[] = "{\"bos_token\":{\"content\":\"<s>\"},\"eos_token\":\"</s>\"}";
    mx_tokenizer *t = open_small(post, config);
    mx_ids ids = {0};
    mx_encode_opts all = {.add_special = true, .parse_special = true};
    assert_true(mx_tokenizer_adds_bos(t));
    mx_tokenizer_encode(t, mx_str_of("ab"), all, &ids, NULL);
    ASSERT_IDS(&ids, 11, 2);
    ids.n = 0;
    mx_tokenizer_encode(t, mx_str_of("<s>ab"), all, &ids, NULL);
    ASSERT_IDS(&ids, 11, 2);
    ids.n = 0;
    mx_tokenizer_encode(t, mx_str_of(""), all, &ids, NULL);
    ASSERT_IDS(&ids, 11);
    int32_t eos[2];
    assert_int_equal(mx_tokenizer_eos_ids(t, eos, 2), 1);
    assert_int_equal(eos[0], 14);
    mx_tokenizer_close(t);
    // the configuration's word wins over the post-processor's
    t = open_small(post, "{\"bos_token\":\"<s>\",\"add_bos_token\":false,\"eos_token\":\"</s>\","
                         "\"add_eos_token\":true}");
    ids.n = 0;
    mx_tokenizer_encode(t, mx_str_of("ab"), all, &ids, NULL);
    ASSERT_IDS(&ids, 2, 14);
    mx_tokenizer_close(t);
    mx_free(ids.v);
}

static void bad_text_is_refused(void **state) {
    (void)state;
    mx_tokenizer *t = open_small(SMALL, NULL);
    mx_ids ids = {0};
    mx_err err = {0};
    mx_ids_push(&ids, 7);
    mx_str bad = {"a\xc3", 2};
    assert_int_equal(mx_tokenizer_encode(t, bad, (mx_encode_opts){0}, &ids, &err), MX_INVALID);
    mx_span spans[] = {{{"a\xc3", 2}, true}, {{"\xa9", 1}, true}}; // valid when joined
    assert_int_equal(mx_tokenizer_encode_spans(t, spans, 2, &ids, &err), MX_OK);
    ASSERT_IDS(&ids, 7, 0, 7, 8);
    mx_free(ids.v);
    mx_tokenizer_close(t);
}

static void deltas_never_break_characters(void **state) {
    (void)state;
    mx_tokenizer *t = open_small(SMALL, NULL);
    mx_detok *d = mx_detok_open(t, true);
    mx_buf b;
    mx_buf_init(&b, 0);
    static const int32_t ids[] = {0, 7, 8, 11, 7, 99999, -1, 7, 0};
    static const char *const after[] = {
        "a", "a", "aé", "aé", "aé", "aé", "aé", "aé\ufffd", "aé\ufffd\ufffda"};
    for (size_t i = 0; i < MX_COUNT(ids); i++) {
        mx_detok_push(d, ids[i], &b);
        assert_string_equal(b.data, after[i]);
    }
    mx_detok_push(d, 7, &b);
    assert_string_equal(b.data, "aé\ufffd\ufffda");
    mx_detok_flush(d, &b);
    assert_string_equal(b.data, "aé\ufffd\ufffda\ufffd");
    mx_detok_close(d);
    mx_buf_free(&b);
    assert_true(mx_str_is(mx_tokenizer_piece(t, 6), " "));
    assert_true(mx_str_is(mx_tokenizer_piece(t, 7), "\xc3"));
    assert_true(mx_str_is(mx_tokenizer_piece(t, 14), "</s>"));
    assert_int_equal(mx_tokenizer_piece(t, 15).n, 0);
    assert_int_equal(mx_tokenizer_find(t, mx_str_of(" ")), 6);
    mx_tokenizer_close(t);
}

// ---- templates and files of a folder ----

static void put(const char *dir, const char *name, const char *text) {
    char *path = mx_path_join(dir, name);
    assert_int_equal(mx_write_file_atomic(path, text, strlen(text), NULL), MX_OK);
    mx_free(path);
}

static void templates_of_a_folder(void **state) {
    (void)state;
    char *dir = ckpt_temp_dir();
    mx_tokenizer *t;
    mx_err err = {0};
    assert_int_equal(mx_tokenizer_open_dir(&t, dir, &err), MX_NOTFOUND);
    assert_non_null(strstr(err.msg, "tokenizer.json"));
    put(dir, "tokenizer.json", SMALL);
    put(dir, "special_tokens_map.json", "{\"bos_token\":\"<s>\",\"eos_token\":\"</s>\"}");
    put(dir, "chat_template.json", "{\"chat_template\":\"from json\"}");
    assert_int_equal(mx_tokenizer_open_dir(&t, dir, &err), MX_OK);
    assert_true(mx_str_is(mx_tokenizer_template(t, NULL), "from json"));
    assert_int_equal(mx_tokenizer_bos(t), 11);
    assert_int_equal(mx_tokenizer_eos(t), 14);
    mx_tokenizer_close(t);
    put(dir, "tokenizer_config.json",
        "{\"model_max_length\":1000000000000000019884624838656,\"chat_template\":["
        "{\"name\":\"default\",\"template\":\"plain\"},{\"name\":\"tool_use\",\"template\":\"t\"}],"
        "\"added_tokens_decoder\":{\"15\":{\"content\":\"<new>\",\"special\":true}}}");
    assert_int_equal(mx_tokenizer_open_dir(&t, dir, &err), MX_OK);
    assert_true(mx_str_is(mx_tokenizer_template(t, NULL), "plain"));
    assert_true(mx_str_is(mx_tokenizer_template(t, "tool_use"), "t"));
    assert_int_equal(mx_tokenizer_template(t, "rag").n, 0);
    assert_true(mx_tokenizer_is_special(t, 15));
    assert_int_equal(mx_tokenizer_n_vocab(t), 16);
    mx_tokenizer_close(t);
    put(dir, "chat_template.jinja", "from a file");
    assert_int_equal(mx_tokenizer_open_dir(&t, dir, &err), MX_OK);
    assert_true(mx_str_is(mx_tokenizer_template(t, NULL), "from a file"));
    mx_tokenizer_close(t);
    put(dir, "tokenizer_config.json", "{\"bos_token\":\"<nope>\"}");
    assert_int_equal(mx_tokenizer_open_dir(&t, dir, &err), MX_FORMAT);
    assert_non_null(strstr(err.msg, "<nope>"));
    ckpt_remove_dir(dir);
}

// ---- GGUF ----

typedef struct bad_gguf {
    const char *model, *pre;
    mx_gguf_type score_type, type_type;
    uint32_t n_scores, bos;
    mx_status status;
    const char *message;
} bad_gguf;

static mx_status open_gguf(const bad_gguf *g, mx_err *err) {
    static const char *const tokens[] = {"<unk>", "<s>", "a", "b", "ab"};
    static const char *const merges[] = {"a b"};
    ckpt c;
    ckpt_init(&c);
    ckpt_kv_str(&c, "general.architecture", "llama");
    ckpt_kv_str(&c, "tokenizer.ggml.model", g->model);
    if (g->pre) ckpt_kv_str(&c, "tokenizer.ggml.pre", g->pre);
    ckpt_kv_strs(&c, "tokenizer.ggml.tokens", tokens, 5);
    if (strcmp(g->model, "gpt2") == 0) ckpt_kv_strs(&c, "tokenizer.ggml.merges", merges, 1);
    char zero[40] = {0};
    ckpt_kv_array(&c, "tokenizer.ggml.scores", g->score_type, zero, g->n_scores,
                  g->score_type == MX_GGUF_U8 ? 1 : 4);
    ckpt_kv_array(&c, "tokenizer.ggml.token_type", g->type_type, zero, 5,
                  g->type_type == MX_GGUF_U8 ? 1 : 4);
    ckpt_kv_u32(&c, "tokenizer.ggml.bos_token_id", g->bos);
    char path[] = "/tmp/tokXXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    ckpt_write_gguf(&c, path);
    ckpt_free(&c);
    mx_weights w;
    mx_tokenizer *t = NULL;
    mx_status st = mx_weights_open(&w, path, err); // looks at some of the types already
    if (st == MX_OK) {
        st = mx_tokenizer_open_gguf(&t, &w, err);
        mx_weights_close(&w);
    }
    assert_int_equal(st == MX_OK, t != NULL);
    mx_tokenizer_close(t);
    unlink(path);
    return st;
}

static void gguf_arrays_are_checked(void **state) {
    (void)state;
    static const bad_gguf cases[] = {
        {"llama", NULL, MX_GGUF_F32, MX_GGUF_I32, 5, 1, MX_OK, ""},
        {"gpt2", "gpt-2", MX_GGUF_F32, MX_GGUF_I32, 5, 1, MX_OK, ""},
        {"gpt2", "no-such", MX_GGUF_F32, MX_GGUF_I32, 5, 1, MX_UNSUPPORTED, "no-such"},
        {"bert", NULL, MX_GGUF_F32, MX_GGUF_I32, 5, 1, MX_UNSUPPORTED, "bert"},
        {"llama", NULL, MX_GGUF_U8, MX_GGUF_I32, 5, 1, MX_FORMAT, "scores: array of u8"},
        {"llama", NULL, MX_GGUF_F32, MX_GGUF_U8, 5, 1, MX_FORMAT, "token_type: array of u8"},
        {"llama", NULL, MX_GGUF_F32, MX_GGUF_I32, 4, 1, MX_FORMAT, "scores: 4 elements"},
        {"llama", NULL, MX_GGUF_F32, MX_GGUF_I32, 5, 5, MX_FORMAT, "bos_token_id"},
    };
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        mx_err err = {0};
        assert_int_equal(open_gguf(&cases[i], &err), cases[i].status);
        if (!strstr(err.msg, cases[i].message)) fail_msg("%zu: %s", i, err.msg);
    }
}

// A file made for measuring: programs give it ids, text is bytes.
static void gguf_without_a_vocabulary_has_the_bytes(void **state) {
    (void)state;
    ckpt c;
    ckpt_init(&c);
    ckpt_kv_str(&c, "general.architecture", "llama");
    ckpt_kv_str(&c, "tokenizer.ggml.model", "no_vocab");
    char path[] = "/tmp/tokXXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0 && close(fd) == 0);
    ckpt_write_gguf(&c, path);
    ckpt_free(&c);
    mx_weights w;
    mx_tokenizer *t = NULL;
    mx_err err = {0};
    assert_int_equal(mx_weights_open(&w, path, &err), MX_OK);
    if (mx_tokenizer_open_gguf(&t, &w, &err) != MX_OK) fail_msg("%s", err.msg);
    assert_int_equal(mx_tokenizer_n_vocab(t), 256);
    assert_int_equal(mx_tokenizer_bos(t), -1);
    mx_ids ids = {0};
    assert_int_equal(
        mx_tokenizer_encode(t, mx_str_of("a\xc3\xa9"), (mx_encode_opts){0}, &ids, &err), MX_OK);
    assert_int_equal(ids.n, 3);
    assert_true(ids.v[0] == 'a' && ids.v[1] == 0xc3 && ids.v[2] == 0xa9);
    mx_free(ids.v);
    mx_tokenizer_close(t);
    mx_weights_close(&w);
    unlink(path);
}

// ---- long texts ----

#ifdef MX_DEBUG_HOOKS // instrumented builds are an order slower
enum { LONG = 128 << 10 };
#else
enum { LONG = 1 << 20 };
#endif

typedef struct long_case {
    const mx_tokenizer *t;
    const char *unit;
    mx_status st;
    size_t n_ids;
    double seconds;
} long_case;

static double cpu_seconds(void) {
    struct timespec ts;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static void *encode_long(void *arg) {
    long_case *c = arg;
    size_t len = strlen(c->unit), n = LONG / len * len;
    char *text = mx_alloc(n);
    for (size_t i = 0; i < n; i += len) memcpy(text + i, c->unit, len);
    mx_ids ids = {0};
    double t0 = cpu_seconds();
    c->st = mx_tokenizer_encode(c->t, (mx_str){text, n}, (mx_encode_opts){.parse_special = true},
                                &ids, NULL);
    c->seconds = cpu_seconds() - t0;
    c->n_ids = ids.n;
    mx_buf back;
    mx_buf_init(&back, 0);
    mx_tokenizer_decode(c->t, ids.v, ids.n, false, &back);
    // NFC may have joined marks, which is not for this test to judge
    if (back.n == n && memcmp(back.data, text, n) != 0) c->st = MX_INTERNAL;
    mx_buf_free(&back);
    mx_free(ids.v);
    mx_free(text);
    return NULL;
}

// Ideographs, emoji or letters without order: more kinds of pairs than a run has.
static const char *mixture(uint32_t first, uint32_t n) {
    static char text[3][60001];
    static int next;
    char *out = text[next++ % 3];
    size_t at = 0;
    for (uint32_t x = 1; at + 4 < sizeof text[0];) {
        x = x * 1664525u + 1013904223u;
        at += (size_t)mx_utf8_encode(first + (x >> 8) % n, out + at);
    }
    out[at] = 0;
    return out;
}

static void encode_all_long(const mx_tokenizer *t, const char *const *units, size_t n) {
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 256 << 10);
    for (size_t i = 0; i < n; i++) {
        long_case c = {.t = t, .unit = units[i]};
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, &attr, encode_long, &c), 0);
        pthread_join(thread, NULL);
        assert_int_equal(c.st, MX_OK);
        assert_true(c.n_ids > 0);
        if (c.seconds >= MX_TEST_SLOW) fail_msg("'%.20s' took %.2f s", c.unit, c.seconds);
    }
    pthread_attr_destroy(&attr);
}

static mx_tokenizer *open_data_gguf(const char *path) {
    mx_err err = {0};
    mx_weights w;
    mx_tokenizer *t;
    if (mx_weights_open(&w, path, &err) != MX_OK) fail_msg("%s", err.msg);
    if (mx_tokenizer_open_gguf(&t, &w, &err) != MX_OK) fail_msg("%s", err.msg);
    mx_weights_close(&w);
    return t;
}

static void long_runs_byte_level(void **state) {
    (void)state;
    mx_tokenizer *t = open_data_gguf(MX_TEST_BUILD_DATA "/text/smollm2.gguf");
    const char *const units[] = {"Z",
                                 " ",
                                 "\n",
                                 ".",
                                 "中",
                                 "\u0301",
                                 "aA",
                                 "a1",
                                 "\u0301\u0323",
                                 " \n",
                                 "'s",
                                 "<|im_",
                                 "😀",
                                 mixture(0x4e00, 20000),
                                 mixture(0x1f300, 800),
                                 mixture('a', 26)};
    encode_all_long(t, units, MX_COUNT(units));
    mx_tokenizer_close(t);
}

static void long_runs_sentencepiece(void **state) {
    (void)state;
    mx_tokenizer *t = open_data_gguf(MX_TEST_BUILD_DATA "/text/gemma3.gguf");
    const char *const units[] = {"Z",
                                 " ",
                                 "aA",
                                 "\u0301\u0323",
                                 "中",
                                 "<",
                                 "😀",
                                 mixture(0x4e00, 20000),
                                 mixture(0x1f300, 800),
                                 mixture('a', 26)};
    encode_all_long(t, units, MX_COUNT(units));
    mx_tokenizer_close(t);
}

// Expressions that PCRE2 runs, normal forms, and an added token that strips blanks.
static void long_runs_regex(void **state) {
    (void)state;
    static const char tekken[] = FILE_OF(
        SMALL_VOCAB, "[\"a b\"]",
        ",\"normalizer\":{\"type\":\"NFKC\"},\"pre_tokenizer\":{\"type\":\"Sequence\","
        "\"pretokenizers\":[{"
        "\"type\":\"Split\",\"pattern\":{\"Regex\":\"[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?[\\\\p{Lu}\\\\p{"
        "Lt}"
        "\\\\p{Lm}\\\\p{Lo}\\\\p{M}]*[\\\\p{Ll}\\\\p{Lm}\\\\p{Lo}\\\\p{M}]+|[^\\\\r\\\\n\\\\p{L}"
        "\\\\p{N}]?"
        "[\\\\p{Lu}\\\\p{Lt}\\\\p{Lm}\\\\p{Lo}\\\\p{M}]+[\\\\p{Ll}\\\\p{Lm}\\\\p{Lo}\\\\p{M}]*|"
        "\\\\p{N}| ?"
        "[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n/]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"},"
        "\"behavior\":\"Isolated\"},{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
        "\"use_regex\":false}]},\"decoder\":{\"type\":\"ByteLevel\"},\"added_tokens\":["
        "{\"id\":11,\"content\":\"\\t\",\"rstrip\":true,\"normalized\":false}]");
    mx_tokenizer *t = open_small(tekken, NULL);
    static const char *const units[] = {"a", "aB", "A", "b ", "\t", "x/\t", "ab\u0301"};
    for (size_t i = 0; i < MX_COUNT(units); i++) {
        long_case c = {.t = t, .unit = units[i]};
        encode_long(&c);
        assert_int_equal(c.st, MX_OK);
        if (c.seconds >= MX_TEST_SLOW) fail_msg("'%.20s' took %.2f s", c.unit, c.seconds);
    }
    mx_tokenizer_close(t);
}

// ---- scanners ----

// The same pieces from a scanner and from PCRE2.
static void compare_scanner(const char *re, mx_str text) {
    mx_arena a;
    mx_arena_init(&a, 0);
    pattern fast, slow;
    pattern_work w = {0};
    mx_err err = {0};
    assert_int_equal(pattern_regex(&fast, &a, mx_str_of(re), false, &err), MX_OK);
    assert_int_equal(pattern_regex(&slow, &a, mx_str_of(re), true, &err), MX_OK);
    assert_int_not_equal(fast.kind, PAT_REGEX);
    assert_int_equal(slow.kind, PAT_REGEX);
    for (size_t i = 0; i < text.n;) {
        bool f1, f2;
        size_t s1, e1, s2, e2;
        assert_int_equal(pattern_find(&fast, &w, text, i, &f1, &s1, &e1, &err), MX_OK);
        assert_int_equal(pattern_find(&slow, &w, text, i, &f2, &s2, &e2, &err), MX_OK);
        if (!f1 || !f2 || s1 != i || s2 != i || e1 != e2 || e1 <= i) {
            fail_msg("%s at byte %zu of '%.*s': %zu, %zu", re, i, (int)text.n, text.p, e1, e2);
        }
        i = e1;
    }
    pattern_work_free(&w);
    pattern_free(&slow);
    mx_arena_free(&a);
}

static uint32_t next_random(uint32_t *s) {
    *s = *s * 1664525 + 1013904223;
    return *s >> 8;
}

static void scanners_equal_their_expressions(void **state) {
    (void)state;
    static const char *const res[] = {
        "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
        "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
        "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"};
    static const char *const units[] = {
        "a",      "Z", "é",  "中",   "1",          "٣",         "½", " ",
        " ",      " ", "\n", "\r",   "\t",         "\u00a0",    "'", "'s",
        "'LL",    ".", "!",  "🙂", "\u0301",     "\u3000",    "ſ", "\u180e",
        "\u200b", "-", "t",  "re",   "\U00010d40", "\U00031350"};
    uint32_t seed = 7;
    for (int round = 0; round < 1500; round++) {
        char text[256];
        size_t n = 0;
        for (uint32_t k = next_random(&seed) % 24 + 1; k > 0; k--) {
            const char *u = units[next_random(&seed) % MX_COUNT(units)];
            memcpy(text + n, u, strlen(u));
            n += strlen(u);
        }
        compare_scanner(res[round % 3], (mx_str){text, n});
    }
}

// ---- Unicode ----

static void check_form(uc_form form, const char *in, const char *want) {
    mx_buf b;
    mx_buf_init(&b, 0);
    unicode_normalize(form, mx_str_of(in), &b);
    assert_string_equal(b.data, want);
    mx_buf_free(&b);
}

static void normal_forms(void **state) {
    (void)state;
    check_form(UC_NFC, "e\u0301", "é");
    check_form(UC_NFC, "e\u0301\u0323", "ẹ\u0301");
    check_form(UC_NFD, "ẹ\u0301", "e\u0323\u0301");
    check_form(UC_NFC, "\u212b", "Å");
    check_form(UC_NFC, "\u0958", "\u0915\u093c"); // excluded from composition
    check_form(UC_NFC, "\u1100\u1161\u11a8", "각");
    check_form(UC_NFC, "가\u11a8", "각");
    check_form(UC_NFD, "각", "\u1100\u1161\u11a8");
    check_form(UC_NFKC, "ﬁ①ｱﾞ", "fi1ア\u3099");
    check_form(UC_NFC, "a\u0315\u0300\u05ae\u0300b", "à\u05ae\u0300\u0315b");
    check_form(UC_NFC, "\U00011131\U00011127", "\U0001112e");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(errors_name_the_place),
        cmocka_unit_test(deep_json_is_an_error),
        cmocka_unit_test(spans_guard_control_tokens),
        cmocka_unit_test(merges_do_not_arrive_at_control_tokens),
        cmocka_unit_test(bos_is_added_once),
        cmocka_unit_test(bad_text_is_refused),
        cmocka_unit_test(deltas_never_break_characters),
        cmocka_unit_test(templates_of_a_folder),
        cmocka_unit_test(gguf_arrays_are_checked),
        cmocka_unit_test(gguf_without_a_vocabulary_has_the_bytes),
        cmocka_unit_test(scanners_equal_their_expressions),
        cmocka_unit_test(normal_forms),
        cmocka_unit_test(long_runs_byte_level),
        cmocka_unit_test(long_runs_sentencepiece),
        cmocka_unit_test(long_runs_regex),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
