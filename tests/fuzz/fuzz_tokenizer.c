// A tokenizer.json and a text, with the line "%%" between them: whatever loads must encode valid
// text to ids that exist, decode to valid UTF-8, stream the same text, and never make markup of
// untrusted text.
#include "base/mem.h"
#include "text/text_int.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void check_decode(const mx_tokenizer *t, const mx_ids *ids) {
    mx_buf whole, parts;
    mx_buf_init(&whole, 0);
    mx_buf_init(&parts, 0);
    mx_tokenizer_decode(t, ids->v, ids->n, false, &whole);
    mx_detok *d = mx_detok_open(t, false);
    for (size_t i = 0; i < ids->n; i++) {
        size_t from = parts.n;
        mx_detok_push(d, ids->v[i], &parts);
        CHECK(parts.n == from || mx_utf8_valid((mx_str){parts.data + from, parts.n - from}));
    }
    mx_detok_flush(d, &parts);
    mx_detok_close(d);
    CHECK(whole.n == parts.n && (whole.n == 0 || memcmp(whole.data, parts.data, whole.n) == 0));
    mx_buf_free(&whole);
    mx_buf_free(&parts);
}

static void check_ids(const mx_tokenizer *t, const mx_ids *ids) {
    for (size_t i = 0; i < ids->n; i++) {
        CHECK(ids->v[i] >= 0 && ids->v[i] < mx_tokenizer_n_vocab(t));
        CHECK(mx_tokenizer_piece(t, ids->v[i]).p != NULL);
    }
}

static void check_text(const mx_tokenizer *t, mx_str text) {
    mx_ids a = {0}, b = {0};
    mx_err err = {0};
    mx_encode_opts opts = {.add_special = true, .parse_special = true};
    mx_status st = mx_tokenizer_encode(t, text, opts, &a, &err);
    CHECK(st == MX_OK || err.msg[0]);
    check_ids(t, &a);
    check_decode(t, &a);
    mx_span half[] = {{{text.p, text.n / 2}, true},
                      {{text.p + text.n / 2, text.n - text.n / 2}, true}};
    a.n = 0;
    opts.add_special = false;
    st = mx_tokenizer_encode(t, text, opts, &a, &err);
    mx_status st2 = mx_tokenizer_encode_spans(t, half, 2, &b, &err);
    CHECK(st == st2 && a.n == b.n);
    CHECK(a.n == 0 || memcmp(a.v, b.v, a.n * sizeof *a.v) == 0);
    half[0].trusted = half[1].trusted = false;
    b.n = 0;
    if (mx_tokenizer_encode_spans(t, half, 2, &b, &err) == MX_OK) {
        for (size_t i = 0; i < b.n; i++) {
            int32_t id = b.v[i];
            bool byte = t->b.byte_fallback &&
                        mx_str_starts(vocab_text(&t->v, (uint32_t)id), mx_str_of("<0x"));
            CHECK(id == t->b.unk || byte || !(t->v.flags[id] & (TOK_MARKUP | TOK_SPECIAL)));
        }
    }
    mx_free(a.v);
    mx_free(b.v);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    const char *p = (const char *)data;
    const char *cut = n_bytes ? memmem(p, n_bytes, "\n%%\n", 4) : NULL;
    size_t n = cut ? (size_t)(cut - p) : n_bytes;
    mx_str text = cut ? (mx_str){cut + 4, n_bytes - n - 4} : (mx_str){"a b", 3};
    if (text.n > 4096) return 0;
    mx_tokenizer *t;
    mx_err err = {0};
    if (mx_tokenizer_open_json(&t, (mx_str){p, n}, (mx_str){0}, &err) != MX_OK) {
        CHECK(t == NULL && err.msg[0]);
        return 0;
    }
    check_text(t, text);
    mx_tokenizer_close(t);
    return 0;
}
