// Normalizer chains: Unicode forms, replacements, prefixes, as a tokenizer file lists them.
//
// State: the chain is constant; buffers belong to the caller. Does not recognise added tokens. Each
// operation reads one buffer and writes the other.
#include "text/split_int.h"

void norm_free(norm_chain *c) {
    for (size_t i = 0; i < c->n; i++) pattern_free(&c->ops[i].pat);
    *c = (norm_chain){0};
}

static mx_status replace_all(const norm_op *op, pattern_work *w, mx_str text, mx_buf *out,
                             mx_err *err) {
    size_t done = 0, from = 0;
    bool matched = false;
    while (from <= text.n) {
        bool found;
        size_t s, e;
        MX_TRY(pattern_find(&op->pat, w, text, from, &found, &s, &e, err));
        if (!found) break;
        if (s == e && matched && s == done) { // no empty match right after another
            from = e + (e < text.n ? unicode_len(text.p[e]) : 1);
            continue;
        }
        matched = true;
        mx_buf_add(out, text.p + done, s - done);
        mx_buf_add(out, op->text.p, op->text.n);
        done = e;
        from = e;
    }
    mx_buf_add(out, text.p + done, text.n - done);
    return MX_OK;
}

static mx_str strip_spaces(mx_str s, bool left, bool right) {
    const uint8_t *cls = unicode_classes();
    while (left && s.n) {
        size_t i = 0;
        if (!(cls[unicode_next(s.p, &i)] & UC_SPACE)) break;
        s.p += i;
        s.n -= i;
    }
    while (right && s.n) {
        size_t at = unicode_prev(s.p, s.n), i = at;
        if (!(cls[unicode_next(s.p, &i)] & UC_SPACE)) break;
        s.n = at;
    }
    return s;
}

static mx_status run_op(const norm_op *op, pattern_work *w, mx_str text, mx_buf *out, mx_err *err) {
    switch (op->kind) {
    case NORM_UNICODE: unicode_normalize(op->form, text, out); break;
    case NORM_PREPEND:
        if (text.n) mx_buf_add(out, op->text.p, op->text.n);
        mx_buf_add(out, text.p, text.n);
        break;
    case NORM_REPLACE: return replace_all(op, w, text, out, err);
    case NORM_LOWERCASE: unicode_lower(text, out); break;
    case NORM_STRIP:
        text = strip_spaces(text, op->left, op->right);
        mx_buf_add(out, text.p, text.n);
        break;
    case NORM_BYTES: append_byte_spelling(text, out); break;
    }
    return MX_OK;
}

mx_status norm_run(const norm_chain *c, pattern_work *w, mx_str text, mx_buf tmp[2], mx_str *out,
                   mx_err *err) {
    for (size_t i = 0; i < c->n; i++) {
        mx_buf *to = &tmp[i & 1];
        mx_buf_clear(to);
        MX_TRY(run_op(&c->ops[i], w, text, to, err));
        if (to->full) return mx_err_set(err, MX_TOOLARGE, "normalised text is too long");
        text = (mx_str){to->data ? to->data : "", to->n};
    }
    *out = text;
    return MX_OK;
}
