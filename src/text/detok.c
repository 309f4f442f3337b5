// Ids to text: the decoders of Hugging Face's tokenizers as a stream.
//
// State: mx_detok holds what is not yet decided: bytes of an unfinished character, a run of byte
// tokens, the start of the text. Does not know the encoder. Decoding a whole list is the same
// stream pushed to its end, so both give the same text by construction. A run of <0xXX> tokens is
// one string when all of it is valid UTF-8 and one U+FFFD a token otherwise, so it has to be held
// until it ends.
#include "text/text_int.h"

#include "base/mem.h"

#include <stdlib.h>

struct mx_detok {
    const mx_tokenizer *t;
    bool skip_special;
    mx_buf run;     // bytes of a run of byte tokens
    mx_buf partial; // DEC_BYTES: bytes not yet shown
    mx_buf scratch[DEC_MAX_OPS + 1];
    mx_buf held;       // STRIP after FUSE: what may have to be cut at the end
    size_t n_tokens;   // seen by METASPACE
    size_t n_seen;     // tokens shown, for joining by spaces
    uint32_t stripped; // characters cut so far by a STRIP behind FUSE
    bool strip_done, fused;
};

#define REPLACEMENT "\xef\xbf\xbd"

static void push_op(mx_detok *d, size_t i, mx_str s, mx_buf *out);

// ---- bytes ----

// Length of the longest ill-formed prefix that becomes one U+FFFD (p[0..n) is not a valid
// sequence), or 0 when more bytes could still complete it.
static size_t bad_prefix(const unsigned char *p, size_t n) {
    unsigned char c = p[0];
    size_t len = c >= 0xf0 && c <= 0xf4 ? 4 : c >= 0xe0 ? 3 : 2;
    if (c < 0xc2 || c > 0xf4) return 1;
    unsigned char lo = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
    unsigned char hi = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
    size_t i = 1;
    for (; i < len && i < n; i++) {
        if (p[i] < lo || p[i] > hi) return i;
        lo = 0x80;
        hi = 0xbf;
    }
    return i < len ? 0 : 1;
}

// Shows what can be shown of partial; at the end everything.
static void show_bytes(mx_detok *d, bool end, mx_buf *out) {
    const char *p = d->partial.data;
    size_t n = d->partial.n, i = 0;
    while (i < n) {
        uint32_t cp;
        int len = mx_utf8_decode(p + i, n - i, &cp);
        if (len > 0) {
            mx_buf_add(out, p + i, (size_t)len);
            i += (size_t)len;
            continue;
        }
        size_t bad = bad_prefix((const unsigned char *)p + i, n - i);
        if (bad == 0) {
            if (!end) break;
            bad = n - i;
        }
        mx_buf_puts(out, REPLACEMENT);
        i += bad;
    }
    if (i) memmove(d->partial.data, p + i, n - i);
    d->partial.n = n - i;
}

// Appends the bytes that s spells; s itself when a code point of it spells none.
static void append_spelled(mx_str s, mx_buf *out) {
    size_t n = out->n;
    for (size_t i = 0; i < s.n;) {
        int b = spelling_to_byte(unicode_next(s.p, &i));
        if (b < 0) {
            out->n = n;
            mx_buf_add(out, s.p, s.n);
            return;
        }
        mx_buf_putc(out, (char)b);
    }
}

// ---- operations ----

static int hex_value(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

// The byte that <0xXX> stands for, or -1.
static int byte_token(mx_str s) {
    if (s.n != 6 || memcmp(s.p, "<0x", 3) != 0 || s.p[5] != '>') return -1;
    int a = hex_value(s.p[3]), b = hex_value(s.p[4]);
    return a < 0 || b < 0 ? -1 : a << 4 | b;
}

static void flush_run(mx_detok *d, size_t next, mx_buf *out) {
    if (!d->run.n) return;
    mx_str s = {d->run.data, d->run.n};
    if (mx_utf8_valid(s)) {
        push_op(d, next, s, out);
    } else {
        for (size_t i = 0; i < s.n; i++) push_op(d, next, mx_str_of(REPLACEMENT), out);
    }
    mx_buf_clear(&d->run);
}

static void replace_in(mx_str s, mx_str from, mx_str to, mx_buf *out) {
    while (from.n) {
        const char *hit = memmem(s.p, s.n, from.p, from.n);
        if (!hit) break;
        size_t n = (size_t)(hit - s.p);
        mx_buf_add(out, s.p, n);
        mx_buf_add(out, to.p, to.n);
        s = (mx_str){hit + from.n, s.n - n - from.n};
    }
    mx_buf_add(out, s.p, s.n);
}

static mx_str strip_left(mx_str s, mx_str c, uint32_t max, uint32_t *cut) {
    while (*cut < max && s.n && mx_str_starts(s, c)) {
        s = (mx_str){s.p + c.n, s.n - c.n};
        ++*cut;
    }
    return s;
}

static mx_str strip_right(mx_str s, mx_str c, uint32_t max) {
    for (uint32_t i = 0; i < max && mx_str_ends(s, c); i++) s.n -= c.n;
    return s;
}

// STRIP behind FUSE: the text is one string that arrives in parts.
static void strip_stream(mx_detok *d, size_t i, mx_str s, bool end, mx_buf *out) {
    const dec_op *op = &d->t->dec[i];
    if (!d->strip_done && s.n) {
        s = strip_left(s, op->from, op->left, &d->stripped);
        d->strip_done = s.n > 0 || d->stripped == op->left;
    }
    if (!op->right) {
        if (s.n) push_op(d, i + 1, s, out);
        return;
    }
    mx_buf_add(&d->held, s.p, s.n);
    mx_str h = {d->held.data ? d->held.data : "", d->held.n};
    if (end) {
        h = strip_right(h, op->from, op->right);
        push_op(d, i + 1, h, out);
        mx_buf_clear(&d->held);
        return;
    }
    mx_str keep = strip_right(h, op->from, UINT32_MAX);
    size_t tail = MX_MIN(h.n - keep.n, (size_t)op->right * op->from.n);
    size_t show = h.n - tail;
    if (show) push_op(d, i + 1, (mx_str){h.p, show}, out);
    memmove(d->held.data, d->held.data + show, tail);
    d->held.n = tail;
}

static void run_metaspace(mx_detok *d, const dec_op *op, mx_str s, mx_buf *out) {
    bool drop = op->drop_first && d->n_tokens == 0;
    d->n_tokens++;
    replace_in(s, op->from, drop ? (mx_str){"", 0} : (mx_str){" ", 1}, out);
}

static void push_op(mx_detok *d, size_t i, mx_str s, mx_buf *out) {
    const mx_tokenizer *t = d->t;
    for (; i < t->n_dec; i++) {
        const dec_op *op = &t->dec[i];
        mx_buf *tmp = &d->scratch[i];
        switch (op->kind) {
        case DEC_FUSE: continue;
        case DEC_BYTE_FALLBACK: {
            int b = byte_token(s);
            if (b >= 0) {
                mx_buf_putc(&d->run, (char)b);
                return;
            }
            flush_run(d, i + 1, out);
            continue;
        }
        case DEC_STRIP: {
            if (i > 0 && t->dec[i - 1].kind == DEC_FUSE) {
                strip_stream(d, i, s, false, out);
                return;
            }
            uint32_t cut = 0;
            s = strip_right(strip_left(s, op->from, op->left, &cut), op->from, op->right);
            continue;
        }
        case DEC_BYTES:
            append_spelled(s, &d->partial);
            show_bytes(d, false, out);
            return;
        case DEC_REPLACE:
            mx_buf_clear(tmp);
            replace_in(s, op->from, op->to, tmp);
            break;
        case DEC_METASPACE:
            mx_buf_clear(tmp);
            run_metaspace(d, op, s, tmp);
            break;
        }
        s = (mx_str){tmp->data ? tmp->data : "", tmp->n};
    }
    mx_buf_add(out, s.p, s.n);
}

mx_detok *mx_detok_open(const mx_tokenizer *t, bool skip_special) {
    mx_detok *d = mx_calloc(1, sizeof *d);
    d->t = t;
    d->skip_special = skip_special;
    mx_buf_init(&d->run, 0);
    mx_buf_init(&d->partial, 0);
    mx_buf_init(&d->held, 0);
    for (size_t i = 0; i < MX_COUNT(d->scratch); i++) mx_buf_init(&d->scratch[i], 0);
    return d;
}

void mx_detok_close(mx_detok *d) {
    if (!d) return;
    mx_buf_free(&d->run);
    mx_buf_free(&d->partial);
    mx_buf_free(&d->held);
    for (size_t i = 0; i < MX_COUNT(d->scratch); i++) mx_buf_free(&d->scratch[i]);
    mx_free(d);
}

static int compare_shown(const void *a, const void *b) {
    return ((const shown_token *)a)->id - ((const shown_token *)b)->id;
}

void detok_note_shown(mx_tokenizer *t) {
    t->n_shown = t->normal.n;
    t->shown = MX_ARENA_ARRAY(&t->arena, shown_token, t->n_shown + 1);
    for (size_t i = 0; i < t->n_shown; i++) {
        t->shown[i] = (shown_token){t->normal.items[i].id, t->normal.items[i].match};
    }
    if (t->n_shown) qsort(t->shown, t->n_shown, sizeof *t->shown, compare_shown);
}

// The token's text as decoding sees it. The library decodes a normalised added token to its normal
// form, not to its content.
static mx_str decoded_text(const mx_tokenizer *t, int32_t id) {
    if (t->n_shown && (t->v.flags[id] & TOK_ADDED)) {
        shown_token key = {.id = id};
        const shown_token *s = bsearch(&key, t->shown, t->n_shown, sizeof key, compare_shown);
        if (s) return s->text;
    }
    return vocab_text(&t->v, (uint32_t)id);
}

void mx_detok_push(mx_detok *d, int32_t id, mx_buf *out) {
    const mx_tokenizer *t = d->t;
    if (!vocab_has(&t->v, id)) return;
    if (d->skip_special && (t->v.flags[id] & TOK_SPECIAL)) return;
    if (t->join_with_spaces && d->n_seen) mx_buf_putc(out, ' ');
    d->n_seen++;
    push_op(d, 0, decoded_text(t, id), out);
}

void mx_detok_flush(mx_detok *d, mx_buf *out) {
    const mx_tokenizer *t = d->t;
    for (size_t i = 0; i < t->n_dec; i++) {
        if (t->dec[i].kind == DEC_BYTE_FALLBACK) flush_run(d, i + 1, out);
        if (t->dec[i].kind == DEC_STRIP && i > 0 && t->dec[i - 1].kind == DEC_FUSE) {
            strip_stream(d, i, (mx_str){"", 0}, true, out);
        }
    }
    if (d->partial.n) show_bytes(d, true, out);
}

void mx_tokenizer_decode(const mx_tokenizer *t, const int32_t *ids, size_t n, bool skip_special,
                         mx_buf *out) {
    mx_detok *d = mx_detok_open(t, skip_special);
    for (size_t i = 0; i < n; i++) mx_detok_push(d, ids[i], out);
    mx_detok_flush(d, out);
    mx_detok_close(d);
}

// ---- pieces ----

// What the token reads as, by itself, in the middle of a text.
static void append_piece(const mx_tokenizer *t, mx_str s, mx_buf *out) {
    for (size_t i = 0; i < t->n_dec; i++) {
        const dec_op *op = &t->dec[i];
        switch (op->kind) {
        case DEC_BYTES: append_spelled(s, out); return;
        case DEC_BYTE_FALLBACK: {
            int b = byte_token(s);
            if (b < 0) break;
            mx_buf_putc(out, (char)b);
            return;
        }
        case DEC_REPLACE:
        case DEC_METASPACE:
            if (!memmem(s.p, s.n, op->from.p, op->from.n)) break;
            replace_in(s, op->from, op->kind == DEC_REPLACE ? op->to : (mx_str){" ", 1}, out);
            return;
        default: break;
        }
    }
    mx_buf_add(out, s.p, s.n);
}

void detok_make_pieces(mx_tokenizer *t) {
    mx_buf b;
    mx_buf_init(&b, 0);
    for (uint32_t id = 0; id < t->v.n; id++) {
        if (!(t->v.flags[id] & TOK_EXISTS) || (t->v.flags[id] & TOK_ADDED)) continue;
        mx_str s = vocab_text(&t->v, id);
        mx_buf_clear(&b);
        append_piece(t, s, &b);
        if (!mx_str_eq(s, (mx_str){b.data, b.n})) {
            t->v.piece[id] = vocab_store(&t->v, (mx_str){b.data, b.n});
        }
    }
    mx_buf_free(&b);
}

int32_t mx_tokenizer_find(const mx_tokenizer *t, mx_str piece) {
    int32_t id = vocab_find(&t->v, piece);
    if (id >= 0 || !mx_utf8_valid(piece)) return id;
    mx_buf b;
    mx_buf_init(&b, 0);
    for (size_t i = 0; i < t->n_dec && !b.n; i++) {
        const dec_op *op = &t->dec[i];
        if (op->kind == DEC_BYTES) append_byte_spelling(piece, &b);
        if (op->kind == DEC_METASPACE) replace_in(piece, (mx_str){" ", 1}, op->from, &b);
        if (op->kind == DEC_REPLACE && op->to.n) replace_in(piece, op->to, op->from, &b);
    }
    if (b.n) id = vocab_find(&t->v, (mx_str){b.data, b.n});
    mx_buf_free(&b);
    return id;
}
