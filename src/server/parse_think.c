// Reasoning apart from the answer. One byte after another goes through five modes, so the result
// does not depend on how the text was cut. State: the caller's think_parser.
//
//   MAYBE: only blanks so far; "<think>" here opens reasoning, anything else is the answer
//   INSIDE: until "</think>"; blanks and what may be the tag's beginning are held back
//   AFTER: blanks before the answer are dropped
//   OUTSIDE: the answer; a <think> in it is text like any other
#include "server/server_int.h"

enum { MAYBE, OPENED, INSIDE, AFTER, OUTSIDE };

const char think_open_tag[] = "<think>", think_close_tag[] = "</think>";

static bool is_blank(char c) {
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

void think_init(think_parser *p, bool enabled, bool inside) {
    *p = (think_parser){.mode = !enabled ? OUTSIDE : inside ? OPENED : MAYBE};
    mx_buf_init(&p->held, 0);
}

void think_free(think_parser *p) {
    mx_buf_free(&p->held);
}

// held is blanks, then what may be a tag's beginning.
static void hold(think_parser *p, char c) {
    if (p->blanks == p->held.n && is_blank(c)) p->blanks++;
    mx_buf_putc(&p->held, c);
}

static void drop_held(think_parser *p) {
    mx_buf_clear(&p->held);
    p->blanks = 0;
}

static void flush(think_parser *p, mx_buf *out) {
    if (p->held.n) mx_buf_add(out, p->held.data, p->held.n);
    drop_held(p);
}

static void take_maybe(think_parser *p, char c, mx_buf *content) {
    hold(p, c);
    size_t n = p->held.n - p->blanks;
    if (n == 0) return;
    if (n > sizeof think_open_tag - 1 || memcmp(p->held.data + p->blanks, think_open_tag, n) != 0) {
        p->mode = OUTSIDE;
        flush(p, content);
    } else if (n == sizeof think_open_tag - 1) {
        p->mode = OPENED;
        drop_held(p);
    }
}

// held = blanks, then a proper prefix of the closing tag
static void take_inside(think_parser *p, char c, mx_buf *reasoning) {
    size_t n = p->held.n - p->blanks;
    if (c == think_close_tag[n]) {
        hold(p, c);
        if (n + 1 < sizeof think_close_tag - 1) return;
        drop_held(p);
        p->mode = AFTER;
        return;
    }
    if (n == 0 && is_blank(c)) {
        hold(p, c);
        return;
    }
    flush(p, reasoning);
    // c cannot continue the tag, but it may begin one (the tag has one '<', its first byte)
    if (c == think_close_tag[0] || is_blank(c))
        hold(p, c);
    else
        mx_buf_putc(reasoning, c);
}

static void take(think_parser *p, char c, mx_buf *reasoning, mx_buf *content) {
    if (p->mode == MAYBE) {
        take_maybe(p, c, content);
        return;
    }
    if (p->mode == OPENED) {
        if (is_blank(c)) return;
        p->mode = INSIDE;
    }
    if (p->mode == INSIDE) {
        take_inside(p, c, reasoning);
        return;
    }
    if (p->mode == AFTER && is_blank(c)) return;
    p->mode = OUTSIDE;
    mx_buf_putc(content, c);
}

void think_push(think_parser *p, mx_str in, mx_buf *reasoning, mx_buf *content) {
    for (size_t i = 0; i < in.n; i++) {
        if (p->mode == OUTSIDE) {
            mx_buf_add(content, in.p + i, in.n - i);
            return;
        }
        take(p, in.p[i], reasoning, content);
    }
}

// Held blanks at the end of reasoning are dropped, half a tag is text.
void think_end(think_parser *p, mx_buf *reasoning, mx_buf *content) {
    if (p->mode == MAYBE) flush(p, content);
    if (p->mode == INSIDE && p->blanks < p->held.n) flush(p, reasoning);
    drop_held(p);
}
