// Stop strings. Owns the held tail. Bytes, not characters: a stop that ends inside a character
// cannot match because released text is always whole characters.
#include "engine/stop.h"

// BEFORE: held is blanks and what may become the opening tag; WITHIN: until the closing one;
// BEHIND: blanks before the answer
enum { ANSWER, BEFORE, WITHIN, BEHIND };

void stop_init(stop_matcher *m, const char *const *stops, size_t n_stops) {
    *m = (stop_matcher){.stops = stops, .n_stops = n_stops};
    mx_buf_init(&m->held, 0);
}

void stop_skip_reasoning(stop_matcher *m, const char *open, const char *close) {
    m->mode = open ? BEFORE : WITHIN;
    m->open = open;
    m->close = close;
}

void stop_free(stop_matcher *m) {
    mx_buf_free(&m->held);
}

// Earliest match in held text; among those that begin together the longest. n_held when none.
static size_t find_match(const stop_matcher *m, int *which) {
    size_t best = m->held.n, best_len = 0;
    *which = -1;
    for (size_t i = 0; i < m->n_stops; i++) {
        size_t len = strlen(m->stops[i]);
        if (len == 0 || len > m->held.n) continue;
        const char *p = memmem(m->held.data, m->held.n, m->stops[i], len);
        if (!p) continue;
        size_t at = (size_t)(p - m->held.data);
        if (at < best || (at == best && len > best_len)) {
            best = at;
            best_len = len;
            *which = (int)i;
        }
    }
    return best;
}

// First offset from which the held text is a proper prefix of some stop.
static size_t find_partial(const stop_matcher *m) {
    size_t first = m->held.n;
    for (size_t i = 0; i < m->n_stops; i++) {
        size_t len = strlen(m->stops[i]);
        size_t from = m->held.n >= len ? m->held.n - len + 1 : 0;
        for (size_t at = from; at < first; at++) {
            if (memcmp(m->held.data + at, m->stops[i], m->held.n - at) == 0) first = at;
        }
    }
    return first;
}

static void release(stop_matcher *m, size_t n, mx_buf *out) {
    mx_buf_add(out, m->held.data, n);
    memmove(m->held.data, m->held.data + n, m->held.n - n);
    m->held.n -= n;
}

static bool is_blank(char c) {
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

static void take_before(stop_matcher *m, char c, mx_buf *out) {
    if (is_blank(c) && m->held.n == m->n_blanks) m->n_blanks++;
    mx_buf_putc(&m->held, c);
    size_t n = m->held.n - m->n_blanks;
    if (strncmp(m->held.data + m->n_blanks, m->open, n) != 0) {
        m->mode = ANSWER;
    } else if (n == strlen(m->open)) {
        release(m, m->held.n, out);
        m->mode = WITHIN;
    }
}

static void take_within(stop_matcher *m, char c, mx_buf *out) {
    mx_buf_putc(out, c);
    m->n_tag = c == m->close[m->n_tag] ? m->n_tag + 1 : c == m->close[0];
    if (!m->close[m->n_tag]) m->mode = BEHIND;
}

// Passes on what stands before the answer; returns the rest.
static mx_str skip_reasoning(stop_matcher *m, mx_str text, mx_buf *out) {
    for (; text.n && m->mode != ANSWER; text.p++, text.n--) {
        if (m->mode == BEFORE) {
            take_before(m, *text.p, out);
        } else if (m->mode == WITHIN) {
            take_within(m, *text.p, out);
        } else if (is_blank(*text.p)) {
            mx_buf_putc(out, *text.p);
        } else {
            m->mode = ANSWER;
            break;
        }
    }
    return text;
}

int stop_push(stop_matcher *m, mx_str text, mx_buf *out) {
    if (m->n_stops == 0) {
        mx_buf_add(out, text.p, text.n);
        return -1;
    }
    text = skip_reasoning(m, text, out);
    if (m->mode != ANSWER) return -1;
    mx_buf_add(&m->held, text.p, text.n);
    if (m->held.n == 0) return -1;
    int which;
    size_t at = find_match(m, &which);
    if (which >= 0) {
        release(m, at, out);
        mx_buf_clear(&m->held);
        return which;
    }
    release(m, find_partial(m), out);
    return -1;
}

int stop_flush(stop_matcher *m, mx_buf *out) {
    int which = -1;
    if (m->mode == BEFORE) { // there was none
        m->mode = ANSWER;
        which = stop_push(m, (mx_str){"", 0}, out);
    }
    if (m->held.n) release(m, m->held.n, out);
    return which;
}
