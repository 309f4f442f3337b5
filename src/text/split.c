// Pre-tokenizers: cuts text into the pieces that are merged one by one.
//
// State: the chain is constant; struct pre_work belongs to one call. Does not know the vocabulary.
// A piece is a range of the working text; an operation that changes text writes the other buffer
// and moves the ranges along.
#include "text/split_int.h"

void pre_work_init(pre_work *w) {
    *w = (pre_work){0};
    mx_buf_init(&w->buf[0], 0);
    mx_buf_init(&w->buf[1], 0);
}

void pre_work_free(pre_work *w) {
    mx_buf_free(&w->buf[0]);
    mx_buf_free(&w->buf[1]);
    mx_free(w->pieces);
    mx_free(w->other);
    pattern_work_free(&w->pat);
    *w = (pre_work){0};
}

void pre_free(pre_chain *c) {
    for (size_t i = 0; i < c->n; i++) pattern_free(&c->ops[i].pat);
    *c = (pre_chain){0};
}

// ---- bytes and their spelling ----
// A byte-level vocabulary spells each byte by one printable code point: bytes that are printable
// Latin-1 by themselves, the other 68 by U+0100 and on, in ascending order.

static bool spelled_by_itself(uint32_t b) {
    return (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
}

uint32_t byte_to_spelling(uint8_t b) {
    if (spelled_by_itself(b)) return b;
    if (b <= 0x20) return 0x100u + b;
    if (b < 0xa1) return 0x100u + 33 + (b - 0x7f); // 7f..a0
    return 0x143;                                  // ad
}

int spelling_to_byte(uint32_t c) {
    if (c < 0x100) return spelled_by_itself(c) ? (int)c : -1;
    if (c <= 0x120) return (int)(c - 0x100);
    if (c <= 0x142) return (int)(c - 0x121 + 0x7f);
    return c == 0x143 ? 0xad : -1;
}

void append_byte_spelling(mx_str bytes, mx_buf *out) {
    for (size_t i = 0; i < bytes.n; i++) {
        uint32_t c = byte_to_spelling((uint8_t)bytes.p[i]);
        if (c < 0x80) {
            mx_buf_putc(out, (char)c);
        } else {
            char two[2] = {(char)(0xc0 | c >> 6), (char)(0x80 | (c & 0x3f))};
            mx_buf_add(out, two, 2);
        }
    }
}

// ---- pieces ----

// The list being built, in w->other.
typedef struct piece_list {
    pre_work *w;
    size_t n;
} piece_list;

static void add_piece(piece_list *l, size_t start, size_t end) {
    pre_work *w = l->w;
    if (start == end) return;
    if (l->n == w->other_cap) {
        w->other_cap = w->other_cap ? w->other_cap * 2 : 256;
        w->other = mx_realloc(w->other, w->other_cap * sizeof *w->other);
    }
    w->other[l->n++] = (pre_piece){(uint32_t)start, (uint32_t)(end - start)};
}

static void take_list(piece_list *l) {
    pre_work *w = l->w;
    pre_piece *p = w->pieces;
    size_t cap = w->cap;
    w->pieces = w->other;
    w->cap = w->other_cap;
    w->n = l->n;
    w->other = p;
    w->other_cap = cap;
}

// Splitting one piece: matched and unmatched ranges arrive in order and are joined as the behaviour
// says. `open` is the range not yet added.
typedef struct splitter {
    piece_list *list;
    pre_behavior behavior;
    bool invert, started, previous_match;
    size_t open_start, open_end;
} splitter;

static void flush_open(splitter *s) {
    if (s->started) add_piece(s->list, s->open_start, s->open_end);
    s->started = false;
}

static void add_range(splitter *s, size_t start, size_t end, bool match) {
    match = match != s->invert;
    bool join = false;
    switch (s->behavior) {
    case PRE_REMOVED:
        if (match) return;
        break;
    case PRE_ISOLATED: break;
    case PRE_CONTIGUOUS: join = match == s->previous_match; break;
    case PRE_MERGED_WITH_PREVIOUS: join = match && !s->previous_match; break;
    case PRE_MERGED_WITH_NEXT: join = s->previous_match && !match; break;
    }
    s->previous_match = match;
    if (join && s->started) {
        s->open_end = end;
        return;
    }
    flush_open(s);
    s->started = true;
    s->open_start = start;
    s->open_end = end;
}

static mx_status split_piece(const pre_op *op, pre_work *w, piece_list *list, pre_piece piece,
                             mx_err *err) {
    mx_str t = {w->text.p + piece.at, piece.n};
    splitter s = {.list = list, .behavior = op->behavior, .invert = op->invert};
    size_t done = 0, from = 0;
    bool matched = false;
    while (from <= t.n) {
        bool found;
        size_t start, end;
        MX_TRY(pattern_find(&op->pat, &w->pat, t, from, &found, &start, &end, err));
        if (!found) break;
        if (start == end && matched && start == done) { // no empty match right after another
            from = end + (end < t.n ? unicode_len(t.p[end]) : 1);
            continue;
        }
        matched = true;
        if (start > done) add_range(&s, piece.at + done, piece.at + start, false);
        add_range(&s, piece.at + start, piece.at + end, true);
        done = end;
        from = end;
    }
    if (done < t.n) add_range(&s, piece.at + done, piece.at + t.n, false);
    flush_open(&s);
    return MX_OK;
}

static mx_status split_all(const pre_op *op, pre_work *w, mx_err *err) {
    piece_list list = {w, 0};
    size_t first = w->n ? w->pieces[0].at : 0;
    for (size_t i = 0; i < w->n; i++) MX_TRY(split_piece(op, w, &list, w->pieces[i], err));
    take_list(&list);
    if (!w->n || w->pieces[0].at != first) w->at_zero = false;
    return MX_OK;
}

static mx_buf *other_buf(pre_work *w) {
    mx_buf *b = w->text.p == w->buf[0].data && w->text.p ? &w->buf[1] : &w->buf[0];
    mx_buf_clear(b);
    return b;
}

static void spell_bytes(pre_work *w) {
    mx_buf *b = other_buf(w);
    for (size_t i = 0; i < w->n; i++) {
        mx_str t = {w->text.p + w->pieces[i].at, w->pieces[i].n};
        size_t at = b->n;
        append_byte_spelling(t, b);
        w->pieces[i] = (pre_piece){(uint32_t)at, (uint32_t)(b->n - at)};
    }
    w->text = (mx_str){b->data, b->n};
}

// Puts a space in front of each piece that has none.
static void prefix_spaces(pre_work *w) {
    mx_buf *b = other_buf(w);
    for (size_t i = 0; i < w->n; i++) {
        mx_str t = {w->text.p + w->pieces[i].at, w->pieces[i].n};
        size_t at = b->n;
        if (t.p[0] != ' ') mx_buf_putc(b, ' ');
        mx_buf_add(b, t.p, t.n);
        w->pieces[i] = (pre_piece){(uint32_t)at, (uint32_t)(b->n - at)};
    }
    w->text = (mx_str){b->data, b->n};
}

static void mark_spaces(const pre_op *op, pre_work *w) {
    mx_buf *b = other_buf(w);
    for (size_t i = 0; i < w->n; i++) {
        mx_str t = {w->text.p + w->pieces[i].at, w->pieces[i].n};
        size_t at = b->n;
        bool marked = t.p[0] == ' ' || mx_str_starts(t, op->replacement);
        bool wanted =
            op->prepend == PRE_ALWAYS || (op->prepend == PRE_FIRST && i == 0 && w->at_zero);
        if (wanted && !marked) mx_buf_add(b, op->replacement.p, op->replacement.n);
        for (size_t k = 0; k < t.n;) {
            const char *sp = memchr(t.p + k, ' ', t.n - k);
            size_t end = sp ? (size_t)(sp - t.p) : t.n;
            mx_buf_add(b, t.p + k, end - k);
            if (sp) mx_buf_add(b, op->replacement.p, op->replacement.n);
            k = end + 1;
        }
        w->pieces[i] = (pre_piece){(uint32_t)at, (uint32_t)(b->n - at)};
    }
    w->text = (mx_str){b->data, b->n};
}

mx_status pre_run(const pre_chain *c, pre_work *w, mx_str text, bool at_zero, mx_err *err) {
    w->text = text;
    w->at_zero = at_zero;
    piece_list list = {w, 0};
    add_piece(&list, 0, text.n);
    take_list(&list);
    for (size_t i = 0; i < c->n && w->n; i++) {
        const pre_op *op = &c->ops[i];
        switch (op->kind) {
        case PRE_SPLIT: MX_TRY(split_all(op, w, err)); break;
        case PRE_BYTES:
            if (op->prefix_space) prefix_spaces(w);
            if (op->use_regex) MX_TRY(split_all(op, w, err));
            spell_bytes(w);
            break;
        case PRE_METASPACE: mark_spaces(op, w); break;
        }
        if (w->buf[0].full || w->buf[1].full) {
            return mx_err_set(err, MX_TOOLARGE, "text is too long to be split");
        }
    }
    return MX_OK;
}
