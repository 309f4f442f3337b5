// Text of templates: UTF-8 with the origin of every byte. Strings live in the render's arena and
// are immutable; a buffer builds them. It does not know values or syntax.
//
// A string is bytes plus runs (end offset, trusted). Concatenation extends the left operand's
// buffer in place when the left operand ends where the buffer ends, so building a prompt piece by
// piece is linear; strings that share the memory clamp the last run to their own length.
#include "text/jinja_int.h"

const jrun jinja_trusted_run = {SIZE_MAX, true}, jinja_untrusted_run = {SIZE_MAX, false};
const jstr jinja_empty = {.p = ""};

size_t jinja_count_chars(mx_str s) {
    size_t n = 0;
    for (size_t i = 0; i < s.n; i++) n += ((unsigned char)s.p[i] & 0xc0) != 0x80;
    return n;
}

jbuf *jinja_buf_new(jrt *r, size_t cap) {
    jbuf *b = JINJA_NEW(r, jbuf);
    b->cap = MX_MAX(cap, (size_t)32);
    b->p = jinja_alloc(r, b->cap);
    return b;
}

static void reserve(jrt *r, jbuf *b, size_t extra) {
    if (extra > JINJA_MAX_STRING || b->n + extra > JINJA_MAX_STRING)
        jinja_fail(r, MX_TOOLARGE, "text longer than %d bytes", JINJA_MAX_STRING);
    if (b->n + extra <= b->cap) return;
    size_t cap = b->cap;
    while (cap < b->n + extra) cap *= 2;
    char *p = jinja_alloc(r, cap);
    memcpy(p, b->p, b->n);
    jinja_charge_bytes(r, b->n);
    b->p = p;
    b->cap = cap;
}

static void add_run(jrt *r, jbuf *b, size_t end, bool trusted) {
    if (b->n_runs && b->runs[b->n_runs - 1].trusted == trusted) {
        b->runs[b->n_runs - 1].end = end;
        return;
    }
    if (b->n_runs == b->cap_runs) {
        size_t cap = b->cap_runs ? b->cap_runs * 2 : 4;
        jrun *runs = JINJA_ARRAY(r, jrun, cap);
        if (b->n_runs) memcpy(runs, b->runs, b->n_runs * sizeof *runs);
        b->runs = runs;
        b->cap_runs = cap;
    }
    b->runs[b->n_runs++] = (jrun){end, trusted};
}

static void append(jrt *r, jbuf *b, mx_str text, size_t n_chars, bool trusted) {
    if (text.n == 0) return;
    reserve(r, b, text.n);
    memcpy(b->p + b->n, text.p, text.n);
    b->n += text.n;
    b->n_chars += n_chars;
    add_run(r, b, b->n, trusted);
    jinja_charge_bytes(r, text.n);
}

void jinja_buf_add(jrt *r, jbuf *b, mx_str text, bool trusted) {
    append(r, b, text, jinja_count_chars(text), trusted);
}

// Index of the run that holds byte `at`.
static size_t run_at(const jstr *s, size_t at) {
    size_t lo = 0, hi = s->n_runs;
    while (hi - lo > 1) {
        size_t mid = lo + (hi - lo) / 2;
        if (s->runs[mid - 1].end <= at)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

void jinja_buf_part(jrt *r, jbuf *b, const jstr *s, size_t from, size_t to) {
    if (from >= to) return;
    bool ascii = s->n == s->n_chars;
    for (size_t i = run_at(s, from); from < to; i++) {
        size_t end = MX_MIN(s->runs[i].end, to);
        mx_str part = {s->p + from, end - from};
        append(r, b, part, ascii ? part.n : jinja_count_chars(part), s->runs[i].trusted);
        from = end;
    }
}

void jinja_buf_str(jrt *r, jbuf *b, const jstr *s) {
    jinja_buf_part(r, b, s, 0, s->n);
}

const jstr *jinja_buf_take(jrt *r, jbuf *b) {
    if (b->n == 0) return &jinja_empty;
    jstr *s = JINJA_NEW(r, jstr);
    *s = (jstr){b->p, b->n, b->n_chars, b->runs, b->n_runs, b, false};
    return s;
}

const jstr *jinja_str_view(jrt *r, mx_str text, bool trusted) {
    if (text.n == 0) return &jinja_empty;
    jstr *s = JINJA_NEW(r, jstr);
    *s = (jstr){.p = text.p,
                .n = text.n,
                .n_chars = jinja_count_chars(text),
                .runs = trusted ? &jinja_trusted_run : &jinja_untrusted_run,
                .n_runs = 1};
    return s;
}

const jstr *jinja_str_make(jrt *r, mx_str text, bool trusted) {
    char *p = jinja_alloc(r, text.n + 1);
    if (text.n) memcpy(p, text.p, text.n);
    return jinja_str_view(r, (mx_str){p, text.n}, trusted);
}

const jstr *jinja_literal(mx_arena *a, mx_str text) {
    jstr *s = MX_ARENA_NEW(a, jstr);
    *s = (jstr){.p = mx_arena_strndup(a, text.p, text.n),
                .n = text.n,
                .n_chars = jinja_count_chars(text),
                .runs = &jinja_trusted_run,
                .n_runs = text.n ? 1 : 0};
    return s;
}

const jstr *jinja_str_part(jrt *r, const jstr *s, size_t from, size_t to) {
    if (from >= to) return &jinja_empty;
    if (from == 0 && to == s->n) return s;
    size_t first = run_at(s, from), last = run_at(s, to - 1);
    jstr *part = JINJA_NEW(r, jstr);
    *part = (jstr){.p = s->p + from, .n = to - from, .markup = s->markup};
    part->n_chars = s->n == s->n_chars ? part->n : jinja_count_chars((mx_str){part->p, part->n});
    part->n_runs = last - first + 1;
    if (part->n_runs == 1) {
        part->runs = s->runs[first].trusted ? &jinja_trusted_run : &jinja_untrusted_run;
        return part;
    }
    jrun *runs = JINJA_ARRAY(r, jrun, part->n_runs);
    for (size_t i = 0; i < part->n_runs; i++) {
        size_t end = s->runs[first + i].end;
        runs[i] = (jrun){MX_MIN(end, to) - from, s->runs[first + i].trusted};
    }
    part->runs = runs;
    return part;
}

const jstr *jinja_str_concat(jrt *r, const jstr *a, const jstr *b) {
    if (a->n == 0) return b;
    if (b->n == 0) return a;
    jbuf *buf = a->buf;
    if (!buf || a->p != buf->p || a->n != buf->n) {
        buf = jinja_buf_new(r, a->n + b->n + (a->n + b->n) / 2);
        jinja_buf_str(r, buf, a);
    }
    jinja_buf_str(r, buf, b);
    return jinja_buf_take(r, buf);
}

bool jinja_str_part_trusted(const jstr *s, size_t from, size_t to) {
    if (from >= to) return true;
    for (size_t i = run_at(s, from); i < s->n_runs; i++) {
        if (!s->runs[i].trusted) return false;
        if (s->runs[i].end >= to) break;
    }
    return true;
}

bool jinja_str_trusted(const jstr *s) {
    return jinja_str_part_trusted(s, 0, s->n);
}

bool jinja_str_trusted_at(const jstr *s, size_t at) {
    return s->runs[run_at(s, at)].trusted;
}

size_t jinja_str_offset(const jstr *s, size_t i_char) {
    if (i_char >= s->n_chars) return s->n;
    if (s->n == s->n_chars) return i_char;
    size_t at = 0;
    for (size_t left = i_char + 1; at < s->n; at++) {
        if (((unsigned char)s->p[at] & 0xc0) != 0x80 && --left == 0) break;
    }
    return at;
}

uint32_t jinja_next_char(mx_str s, size_t *at) {
    uint32_t c = 0;
    int n = mx_utf8_decode(s.p + *at, s.n - *at, &c);
    CHECK(n > 0); // every string of a render was validated when it came in
    *at += (size_t)n;
    return c;
}

bool jinja_is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

size_t jinja_find(mx_str s, mx_str needle, size_t from) {
    if (from > s.n) return SIZE_MAX;
    if (needle.n == 0) return from;
    const char *hit = memmem(s.p + from, s.n - from, needle.p, needle.n);
    return hit ? (size_t)(hit - s.p) : SIZE_MAX;
}

size_t jinja_rfind(jrt *r, mx_str s, mx_str needle) {
    if (needle.n > s.n) return SIZE_MAX;
    for (size_t at = s.n - needle.n + 1; at-- > 0;) {
        if ((at & 1023) == 0) jinja_charge_bytes(r, 1024 + needle.n * 1024);
        if (memcmp(s.p + at, needle.p, needle.n) == 0) return at;
    }
    return SIZE_MAX;
}
