// Text functions of templates, used both as methods of strings and as filters. Each character of a
// result keeps the origin it had; what is inserted is trusted only when nothing untrusted decided
// where it goes.
#include "text/jinja_text.h"

#include <utf8proc.h>

// --- case ----------------------------------------------------------------------------------------

static bool is_cased(uint32_t c) {
    utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)c);
    return k == UTF8PROC_CATEGORY_LU || k == UTF8PROC_CATEGORY_LL || k == UTF8PROC_CATEGORY_LT;
}

static bool is_upper(uint32_t c) {
    return utf8proc_category((utf8proc_int32_t)c) == UTF8PROC_CATEGORY_LU;
}

static bool is_lower(uint32_t c) {
    return utf8proc_category((utf8proc_int32_t)c) == UTF8PROC_CATEGORY_LL;
}

static void add_char(jrt *r, jbuf *b, uint32_t c, bool trusted) {
    char tmp[4];
    jinja_buf_add(r, b, (mx_str){tmp, (size_t)mx_utf8_encode(c, tmp)}, trusted);
}

static void add_upper(jrt *r, jbuf *b, uint32_t c, bool trusted, bool title) {
    if (c == 0xdf)
        jinja_buf_add(r, b, mx_str_of(title ? "Ss" : "SS"), trusted);
    else
        add_char(r, b,
                 (uint32_t)(title ? utf8proc_totitle((utf8proc_int32_t)c)
                                  : utf8proc_toupper((utf8proc_int32_t)c)),
                 trusted);
}

static void add_lower(jrt *r, jbuf *b, uint32_t c, bool trusted) {
    add_char(r, b, (uint32_t)utf8proc_tolower((utf8proc_int32_t)c), trusted);
}

// Whether a new word begins at c for the title filter: after one of its separators.
static bool ends_word(uint32_t c) {
    return c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || jinja_is_space(c);
}

// Whether the character after c begins a word, for the two kinds of title.
static bool starts_word(jcase how, uint32_t c) {
    return how == JCASE_TITLE ? !is_cased(c) : how == JCASE_FILTER_TITLE && ends_word(c);
}

// ASCII text: a copy with its origins, changed in place.
static const jstr *ascii_case(jrt *r, const jstr *s, jcase how) {
    jbuf *b = jinja_buf_new(r, s->n);
    jinja_buf_str(r, b, s);
    jinja_charge_bytes(r, s->n);
    bool start = true;
    for (size_t i = 0; i < s->n; i++) {
        char c = s->p[i];
        bool lower = c >= 'a' && c <= 'z', upper = c >= 'A' && c <= 'Z';
        bool up = how == JCASE_UPPER || (how == JCASE_SWAP && lower) ||
                  (how >= JCASE_CAPITALIZE && start);
        if (up ? lower : upper) b->p[i] = (char)(c ^ 0x20);
        start = how >= JCASE_TITLE && starts_word(how, (unsigned char)c);
    }
    return jinja_buf_take(r, b);
}

const jstr *jinja_text_case(jrt *r, const jstr *s, jcase how) {
    if (s->n == s->n_chars) return ascii_case(r, s, how);
    jbuf *b = jinja_buf_new(r, s->n + 8);
    mx_str t = jinja_text(s);
    bool start = true;
    jinja_charge_bytes(r, t.n * 16);
    for (size_t at = 0; at < t.n;) {
        size_t from = at;
        uint32_t c = jinja_next_char(t, &at);
        bool trusted = jinja_str_trusted_at(s, from);
        bool up = how == JCASE_UPPER || (how == JCASE_SWAP && is_lower(c)) ||
                  (how >= JCASE_CAPITALIZE && start);
        bool keep = how == JCASE_SWAP && !is_upper(c) && !is_lower(c);
        if (keep)
            add_char(r, b, c, trusted);
        else if (up)
            add_upper(r, b, c, trusted, how == JCASE_CAPITALIZE || how == JCASE_TITLE);
        else
            add_lower(r, b, c, trusted);
        start = starts_word(how, c);
    }
    return jinja_buf_take(r, b);
}

// --- strip and split -----------------------------------------------------------------------------

static bool in_set(jrt *r, const jstr *chars, uint32_t c) {
    if (!chars) return jinja_is_space(c);
    jinja_charge(r, 1 + chars->n / 32);
    for (size_t at = 0; at < chars->n;)
        if (jinja_next_char(jinja_text(chars), &at) == c) return true;
    return false;
}

static size_t char_start(mx_str s, size_t end) {
    do end--;
    while (end > 0 && ((unsigned char)s.p[end] & 0xc0) == 0x80);
    return end;
}

const jstr *jinja_text_strip(jrt *r, const jstr *s, const jstr *chars, bool left, bool right) {
    mx_str t = jinja_text(s);
    size_t from = 0, to = t.n;
    while (left && from < to) {
        size_t next = from;
        if (!in_set(r, chars, jinja_next_char(t, &next))) break;
        from = next;
    }
    while (right && to > from) {
        size_t start = char_start(t, to), next = start;
        if (!in_set(r, chars, jinja_next_char(t, &next))) break;
        to = start;
    }
    jinja_charge_bytes(r, 4 * (t.n - (to - from)));
    return jinja_str_part(r, s, from, to);
}

static void add_part(jrt *r, jlist *l, const jstr *s, size_t from, size_t to) {
    jinja_list_add(r, l, jv_str(jinja_str_part(r, s, from, to)));
    jinja_charge(r, 1);
}

static void split_space(jrt *r, jlist *l, const jstr *s, int64_t max) {
    mx_str t = jinja_text(s);
    size_t at = 0;
    jinja_charge_bytes(r, t.n * 2);
    for (;;) {
        size_t from = at, next = at;
        while (from < t.n && jinja_is_space(jinja_next_char(t, &next))) from = next;
        if (from >= t.n) return;
        if (max == 0) {
            add_part(r, l, s, from, t.n);
            return;
        }
        max--;
        size_t to = from;
        next = from;
        while (to < t.n && !jinja_is_space(jinja_next_char(t, &next))) to = next;
        add_part(r, l, s, from, to);
        at = to;
    }
}

static void split_space_right(jrt *r, jlist *l, const jstr *s, int64_t max) {
    mx_str t = jinja_text(s);
    size_t end = t.n;
    jinja_charge_bytes(r, t.n * 2);
    for (;; max--) {
        s = jinja_text_strip(r, jinja_str_part(r, s, 0, end), NULL, false, true);
        end = s->n;
        if (end == 0) return;
        size_t from = end;
        if (max == 0) {
            add_part(r, l, s, 0, end);
            return;
        }
        while (from > 0) {
            size_t start = char_start(t, from), next = start;
            if (jinja_is_space(jinja_next_char(t, &next))) break;
            from = start;
        }
        add_part(r, l, s, from, end);
        end = from;
    }
}

static void reverse(jlist *l) {
    for (size_t i = 0; i + 1 < l->n - i; i++) {
        jval tmp = l->v[i];
        l->v[i] = l->v[l->n - 1 - i];
        l->v[l->n - 1 - i] = tmp;
    }
}

jlist *jinja_text_split(jrt *r, const jstr *s, const jstr *sep, int64_t max, bool right) {
    jlist *l = jinja_list_new(r, JL_LIST, 0);
    mx_str t = jinja_text(s);
    if (max < 0) max = INT64_MAX;
    if (!sep) {
        if (!right || max == INT64_MAX) {
            split_space(r, l, s, max);
        } else {
            split_space_right(r, l, s, max);
            if (l->n) reverse(l);
        }
        return l;
    }
    if (sep->n == 0) jinja_fail(r, MX_INVALID, "empty separator");
    jinja_charge_bytes(r, t.n);
    size_t at = 0, end = t.n, hit;
    if (right && max != INT64_MAX) {
        for (; max > 0; max--, end = hit) {
            hit = jinja_rfind(r, (mx_str){t.p, end}, jinja_text(sep));
            if (hit == SIZE_MAX) break;
            add_part(r, l, s, hit + sep->n, end);
        }
        add_part(r, l, s, 0, end);
        reverse(l);
        return l;
    }
    for (; max > 0; max--, at = hit + sep->n) {
        hit = jinja_find(t, jinja_text(sep), at);
        if (hit == SIZE_MAX) break;
        add_part(r, l, s, at, hit);
    }
    add_part(r, l, s, at, t.n);
    return l;
}

static bool is_line_end(uint32_t c) {
    return (c >= 10 && c <= 13) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
           c == 0x2029;
}

jlist *jinja_text_lines(jrt *r, const jstr *s, bool keep_ends) {
    jlist *l = jinja_list_new(r, JL_LIST, 0);
    mx_str t = jinja_text(s);
    size_t from = 0;
    jinja_charge_bytes(r, t.n * 2);
    for (size_t at = 0; at < t.n;) {
        size_t to = at;
        uint32_t c = jinja_next_char(t, &at);
        if (!is_line_end(c)) continue;
        if (c == '\r' && at < t.n && t.p[at] == '\n') at++;
        add_part(r, l, s, from, keep_ends ? at : to);
        from = at;
    }
    if (from < t.n) add_part(r, l, s, from, t.n);
    return l;
}

// --- replace, join, pad --------------------------------------------------------------------------

// The replacement, trusted only where both it and the place it goes to are: otherwise a message
// could choose where a template's markup appears.
static void add_replacement(jrt *r, jbuf *b, const jstr *new, bool place_trusted) {
    if (place_trusted)
        jinja_buf_str(r, b, new);
    else
        jinja_buf_add(r, b, jinja_text(new), false);
}

static const jstr *insert_between(jrt *r, const jstr *s, const jstr *new, int64_t max) {
    jbuf *b = jinja_buf_new(r, s->n + new->n + 16);
    mx_str t = jinja_text(s);
    bool trusted = jinja_str_trusted(s);
    size_t at = 0;
    jinja_charge_bytes(r, t.n * 8);
    for (;; max--) {
        if (max == 0) {
            jinja_buf_part(r, b, s, at, t.n);
            break;
        }
        add_replacement(r, b, new, trusted);
        if (at >= t.n) break;
        size_t from = at;
        jinja_next_char(t, &at);
        jinja_buf_part(r, b, s, from, at);
    }
    return jinja_buf_take(r, b);
}

const jstr *jinja_text_replace(jrt *r, const jstr *s, const jstr *old, const jstr *new,
                               int64_t max) {
    if (max < 0) max = INT64_MAX;
    if (old->n == 0) return insert_between(r, s, new, max);
    mx_str t = jinja_text(s);
    jinja_charge_bytes(r, t.n);
    size_t at = 0, hit = jinja_find(t, jinja_text(old), 0);
    if (hit == SIZE_MAX || max == 0) return s;
    jbuf *b = jinja_buf_new(r, s->n + new->n + 16);
    for (; hit != SIZE_MAX && max > 0; max--) {
        jinja_buf_part(r, b, s, at, hit);
        at = hit + old->n;
        add_replacement(r, b, new, jinja_str_part_trusted(s, hit, at));
        jinja_charge(r, 1);
        hit = jinja_find(t, jinja_text(old), at);
    }
    jinja_buf_part(r, b, s, at, t.n);
    return jinja_buf_take(r, b);
}

const jstr *jinja_text_join(jrt *r, const jstr *sep, jiter it, bool strict) {
    jbuf *b = jinja_buf_new(r, 64);
    for (size_t i = 0; i < it.n; i++) {
        if (strict && it.v[i].kind != JV_STR)
            jinja_fail(r, MX_INVALID, "sequence item %zu: expected str instance, %s found", i,
                       jinja_type_name(it.v[i]));
        if (i) jinja_buf_str(r, b, sep);
        jinja_print(r, b, it.v[i]);
    }
    jinja_charge(r, it.n);
    return jinja_buf_take(r, b);
}

const jstr *jinja_text_pad(jrt *r, const jstr *s, int64_t width, const jstr *fill, char align) {
    if (width > JINJA_MAX_STRING) jinja_fail(r, MX_TOOLARGE, "width %lld", (long long)width);
    if (fill->n_chars != 1)
        jinja_fail(r, MX_INVALID, "the fill character must be exactly one character long");
    if (width <= (int64_t)s->n_chars) return s;
    size_t pad = (size_t)width - s->n_chars;
    // str.center puts the odd one left when both numbers are odd
    size_t left = align == '>' ? pad : align == '<' ? 0 : pad / 2 + (pad & (size_t)width & 1);
    bool trusted = jinja_str_trusted(s) && jinja_str_trusted(fill);
    jbuf *b = jinja_buf_new(r, s->n + pad * fill->n);
    for (size_t i = 0; i < left; i++) jinja_buf_add(r, b, jinja_text(fill), trusted);
    jinja_buf_str(r, b, s);
    for (size_t i = left; i < pad; i++) jinja_buf_add(r, b, jinja_text(fill), trusted);
    jinja_charge(r, pad / 16);
    return jinja_buf_take(r, b);
}

const jstr *jinja_text_escape(jrt *r, const jstr *s) {
    static const struct {
        char c;
        const char *text;
    } map[] = {{'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'\'', "&#39;"}, {'"', "&#34;"}};
    jbuf *b = jinja_buf_new(r, s->n + 16);
    size_t from = 0;
    jinja_charge_bytes(r, s->n * 2);
    for (size_t i = 0; i < s->n; i++) {
        for (size_t k = 0; k < MX_COUNT(map); k++) {
            if (s->p[i] != map[k].c) continue;
            jinja_buf_part(r, b, s, from, i);
            jinja_buf_add(r, b, mx_str_of(map[k].text), jinja_str_trusted_at(s, i));
            from = i + 1;
        }
    }
    jinja_buf_part(r, b, s, from, s->n);
    return jinja_text_markup(r, jinja_buf_take(r, b));
}

const jstr *jinja_text_markup(jrt *r, const jstr *s) {
    jstr *m = JINJA_NEW(r, jstr);
    *m = *s;
    m->markup = true;
    return m;
}

// --- questions -----------------------------------------------------------------------------------

bool jinja_text_all(jrt *r, const jstr *s, jclass how) {
    mx_str t = jinja_text(s);
    jinja_charge_bytes(r, t.n * 8);
    bool any_cased = false, prev_cased = false;
    for (size_t at = 0; at < t.n;) {
        uint32_t c = jinja_next_char(t, &at);
        utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)c);
        bool letter = k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
        bool decimal = k == UTF8PROC_CATEGORY_ND;
        bool numeric = decimal || k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_NO;
        bool cased = is_cased(c);
        switch (how) {
        case JCLASS_ALPHA:
            if (!letter) return false;
            break;
        case JCLASS_ALNUM:
            if (!letter && !numeric) return false;
            break;
        case JCLASS_DIGIT:
            if (!decimal) return false;
            break;
        case JCLASS_NUMERIC:
            if (!numeric) return false;
            break;
        case JCLASS_SPACE:
            if (!jinja_is_space(c)) return false;
            break;
        case JCLASS_UPPER:
            if (cased && !is_upper(c)) return false;
            break;
        case JCLASS_LOWER:
            if (cased && !is_lower(c)) return false;
            break;
        case JCLASS_TITLE:
            if (cased && is_upper(c) == prev_cased) return false;
            break;
        case JCLASS_ASCII:
            if (c >= 0x80) return false;
            break;
        case JCLASS_NAME:
            if (c != '_' && !letter && (at == 1 || !decimal)) return false;
            break;
        }
        any_cased |= cased;
        prev_cased = cased;
    }
    if (how == JCLASS_ASCII) return true;
    if (how == JCLASS_UPPER || how == JCLASS_LOWER || how == JCLASS_TITLE) return any_cased;
    return t.n != 0;
}
