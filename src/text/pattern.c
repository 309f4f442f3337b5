// Patterns of tokenizer files: literal text, classes, well-known expressions, PCRE2 for the rest.
//
// State: compiled code owned by the pattern, constant; match data belongs to one call. Does not cut
// text into pieces. The files are written for Oniguruma with Unicode 16 tables. PCRE2 has another
// syntax in a few places and the distribution's Unicode version, so an expression is rewritten
// first: \p{..}, \s, \d and \w become explicit classes (what PCRE2 knows plus what its version
// lacks), and whatever would mean something else is refused by name.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/split_int.h"

#include <pcre2.h>
#include <stdio.h>

enum { MATCH_LIMIT = 50000000, HEAP_LIMIT_KIB = 256 * 1024, JIT_STACK_BYTES = 8 << 20, DEPTH = 64 };

static const char space_class[] = "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}"
                                  "\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";

void pattern_free(pattern *p) {
    if (p->code) pcre2_code_free(p->code);
    *p = (pattern){0};
}

void pattern_work_free(pattern_work *w) {
    if (w->data) pcre2_match_data_free(w->data);
    if (w->context) pcre2_match_context_free(w->context);
    if (w->stack) pcre2_jit_stack_free(w->stack);
    *w = (pattern_work){0};
}

pattern pattern_string(mx_arena *a, mx_str s) {
    return (pattern){.kind = PAT_STRING, .text = {mx_arena_strndup(a, s.p, s.n), s.n}};
}

pattern pattern_class(uint8_t mask) {
    return (pattern){.kind = PAT_CLASS, .mask = mask};
}

// ---- rewriting ----

typedef struct rewrite {
    mx_str re;
    size_t i;            // next byte of re
    mx_buf out;          // PCRE2's spelling
    size_t atom;         // where the last atom begins in out
    size_t group[DEPTH]; // where open groups begin in out
    int depth;
    mx_err *err;
} rewrite;

static mx_status refuse(rewrite *r, const char *what) {
    return mx_err_set(r->err, MX_UNSUPPORTED, "regex construct %s at byte %zu of %.*s", what, r->i,
                      (int)MX_MIN(r->re.n, 400u), r->re.p);
}

static char peek(const rewrite *r, size_t ahead) {
    return r->i + ahead < r->re.n ? r->re.p[r->i + ahead] : 0;
}

// Adds class text, as a class of its own when outside brackets.
static mx_status put_class(rewrite *r, const char *text, bool negated, bool inside) {
    if (inside) {
        mx_buf_puts(&r->out, text);
    } else {
        mx_buf_printf(&r->out, negated ? "[^%s]" : "[%s]", text);
    }
    return MX_OK;
}

// \p{X} \P{X} \p{^X}, r->i behind the p.
static mx_status put_property(rewrite *r, bool negated, bool inside) {
    if (peek(r, 0) != '{') return refuse(r, "\\p without braces");
    r->i++;
    if (peek(r, 0) == '^') {
        negated = !negated;
        r->i++;
    }
    size_t from = r->i;
    while (r->i < r->re.n && r->re.p[r->i] != '}') r->i++;
    mx_str name = {r->re.p + from, r->i - from};
    if (r->i++ >= r->re.n) return refuse(r, "\\p without end");
    mx_buf text;
    mx_buf_init(&text, 0);
    mx_status st = MX_OK;
    if (inside && negated) {
        st = refuse(r, "\\P inside brackets");
    } else if (mx_str_is(name, "Han")) {
        mx_buf_puts(&text, "\\p{sc:Han}\\x{31350}-\\x{323af}\\x{2ebf0}-\\x{2ee5d}");
    } else if (!unicode_class_text(name, &text)) {
        st = refuse(r, "\\p with an unknown property");
    }
    if (st == MX_OK) put_class(r, text.data, negated, inside);
    mx_buf_free(&text);
    return st;
}

static mx_status put_shorthand(rewrite *r, char c, bool inside) {
    bool negated = c < 'a';
    if (c == 's' || c == 'S') {
        if (!inside || !negated) return put_class(r, space_class, negated, inside);
        // PCRE2's own \S lacks U+180E, which is no white space since Unicode 6.3
        mx_buf_puts(&r->out, "\\S\\x{180e}");
        return MX_OK;
    }
    if (inside && negated) return refuse(r, "\\D or \\W inside brackets");
    mx_buf text;
    mx_buf_init(&text, 0);
    bool digits = c == 'd' || c == 'D';
    unicode_class_text(mx_str_of(digits ? "Nd" : "\\w"), &text);
    // outside brackets Oniguruma takes these Latin-1 numbers for word characters
    if (!digits && !inside) mx_buf_puts(&text, "\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}");
    put_class(r, text.data, negated, inside);
    mx_buf_free(&text);
    return MX_OK;
}

// \uHHHH and \xHH and \x{H..}, r->i behind the letter.
static mx_status put_code(rewrite *r, char kind) {
    uint32_t v = 0;
    bool braces = kind == 'x' && peek(r, 0) == '{';
    size_t max = kind == 'u' ? 4 : braces ? 6 : 2, n = 0;
    if (braces) r->i++;
    for (; n < max; n++) {
        char c = peek(r, 0);
        int digit = c >= '0' && c <= '9'                 ? c - '0'
                    : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                         : -1;
        if (digit < 0) break;
        v = v << 4 | (uint32_t)digit;
        r->i++;
    }
    if (n == 0 || (kind == 'u' && n < 4) || (braces && peek(r, 0) != '}')) {
        return refuse(r, "a malformed \\x or \\u");
    }
    if (braces) r->i++;
    if (!braces && kind == 'x' && v > 0x7f) return refuse(r, "\\x of a byte above 7f");
    if (v > 0x10ffff || (v >= 0xd800 && v <= 0xdfff)) return refuse(r, "an invalid code point");
    mx_buf_printf(&r->out, "\\x{%x}", v);
    return MX_OK;
}

// The escape at r->i (behind the backslash).
static mx_status put_escape(rewrite *r, bool inside) {
    char c = peek(r, 0);
    r->i++;
    switch (c) {
    case 'p': return put_property(r, false, inside);
    case 'P': return put_property(r, true, inside);
    case 's':
    case 'S':
    case 'd':
    case 'D':
    case 'w':
    case 'W': return put_shorthand(r, c, inside);
    case 'x':
    case 'u': return put_code(r, c);
    case 'n':
    case 'r':
    case 't':
    case 'f':
    case 'a':
    case 'e': mx_buf_printf(&r->out, "\\%c", c); return MX_OK;
    case 'v': mx_buf_puts(&r->out, "\\x{b}"); return MX_OK;
    case 'A':
    case 'z':
        if (inside) break;
        mx_buf_printf(&r->out, "\\%c", c);
        return MX_OK;
    default:
        if (c > ' ' && c < 127 && !(c >= '0' && c <= '9') &&
            !((c | 32) >= 'a' && (c | 32) <= 'z')) {
            mx_buf_printf(&r->out, "\\%c", c);
            return MX_OK;
        }
        if (c == ' ') {
            mx_buf_puts(&r->out, "\\x{20}");
            return MX_OK;
        }
    }
    char what[4] = {'\\', c, 0};
    r->i--;
    return refuse(r, c ? what : "a backslash at the end");
}

static mx_status put_brackets(rewrite *r) {
    mx_buf_putc(&r->out, '[');
    r->i++;
    if (peek(r, 0) == '^') {
        mx_buf_putc(&r->out, '^');
        r->i++;
    }
    for (bool first = true; r->i < r->re.n; first = false) {
        char c = peek(r, 0);
        if (c == ']' && !first) {
            mx_buf_putc(&r->out, ']');
            r->i++;
            return MX_OK;
        }
        if (c == '[') return refuse(r, "a class inside a class");
        if (c == '&' && peek(r, 1) == '&') return refuse(r, "&&");
        if (c == '\\') {
            r->i++;
            MX_TRY(put_escape(r, true));
            continue;
        }
        if (c == ']') mx_buf_putc(&r->out, '\\');
        mx_buf_putc(&r->out, c);
        r->i++;
    }
    return refuse(r, "[ without end");
}

static mx_status open_group(rewrite *r) {
    if (r->depth == DEPTH) return refuse(r, "too deep nesting");
    r->group[r->depth++] = r->out.n;
    size_t from = r->i++;
    if (peek(r, 0) == '?') {
        r->i++;
        static const char *const known[] = {
            ":", "=", "!", ">", "<=", "<!", "i:", "-i:", "i)", "-i)"};
        size_t k = 0;
        mx_str rest = {r->re.p + r->i, r->re.n - r->i};
        while (k < MX_COUNT(known) && !mx_str_starts(rest, mx_str_of(known[k]))) k++;
        if (k == MX_COUNT(known)) return refuse(r, "(? of this kind");
        r->i += strlen(known[k]);
        if (known[k][strlen(known[k]) - 1] == ')') r->depth--;
    } else if (peek(r, 0) == '*') {
        return refuse(r, "(*");
    }
    mx_buf_add(&r->out, r->re.p + from, r->i - from);
    return MX_OK;
}

// {n}, {n,}, {,m}, {n,m}: true and consumed when it is one. Oniguruma reads {n,m}+ as (?:..{n,m})+,
// PCRE2 as possessive.
static bool put_interval(rewrite *r) {
    size_t i = r->i + 1, digits = 0;
    while (i < r->re.n && ((r->re.p[i] >= '0' && r->re.p[i] <= '9') || r->re.p[i] == ',')) {
        digits += r->re.p[i++] != ',';
    }
    if (i >= r->re.n || r->re.p[i] != '}' || !digits) return false;
    bool from_zero = r->re.p[r->i + 1] == ',';
    bool plus = i + 1 < r->re.n && r->re.p[i + 1] == '+';
    if (plus) {
        mx_buf tail;
        mx_buf_init(&tail, 0);
        mx_buf_add(&tail, r->out.data + r->atom, r->out.n - r->atom);
        r->out.n = r->atom;
        mx_buf_printf(&r->out, "(?:%s", tail.data);
        mx_buf_free(&tail);
    }
    mx_buf_puts(&r->out, from_zero ? "{0" : "{");
    mx_buf_add(&r->out, r->re.p + r->i + 1, i - r->i - 1);
    mx_buf_puts(&r->out, plus ? "})" : "}");
    r->i = i + 1;
    return true;
}

static mx_status rewrite_regex(rewrite *r) {
    while (r->i < r->re.n) {
        char c = peek(r, 0);
        if (c == '(') {
            MX_TRY(open_group(r));
            continue;
        }
        if (c == ')') {
            if (r->depth == 0) return refuse(r, ") without (");
            r->atom = r->group[--r->depth];
            mx_buf_putc(&r->out, c);
            r->i++;
            continue;
        }
        if (c == '{' && put_interval(r)) continue;
        if (c == '*' || c == '+' || c == '?') {
            mx_buf_putc(&r->out, c);
            r->i++;
            continue;
        }
        r->atom = r->out.n;
        if (c == '[') {
            MX_TRY(put_brackets(r));
        } else if (c == '\\') {
            r->i++;
            MX_TRY(put_escape(r, false));
        } else {
            size_t n = MX_MIN(unicode_len(c), r->re.n - r->i);
            mx_buf_add(&r->out, r->re.p + r->i, n);
            r->i += n;
        }
    }
    return MX_OK;
}

// ---- compiling and searching ----

static const struct {
    pattern_kind kind;
    const char *re;
} well_known[] = {
    {PAT_GPT2,
     "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"},
    {PAT_GPT2, "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"},
    {PAT_LLAMA3, "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
                 "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
    {PAT_QWEN2, "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
                "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
};

mx_status pattern_regex(pattern *p, mx_arena *a, mx_str re, bool plain, mx_err *err) {
    *p = (pattern){.kind = PAT_REGEX, .text = {mx_arena_strndup(a, re.p, re.n), re.n}};
    for (size_t k = 0; k < MX_COUNT(well_known) && !plain; k++) {
        if (!mx_str_is(re, well_known[k].re)) continue;
        p->kind = well_known[k].kind;
        return MX_OK;
    }
    if (!mx_utf8_valid(re)) return mx_err_set(err, MX_FORMAT, "regex is not valid UTF-8");
    rewrite r = {.re = re, .err = err};
    mx_buf_init(&r.out, 1 << 20);
    mx_status st = rewrite_regex(&r);
    if (st == MX_OK && r.out.full) st = mx_err_set(err, MX_TOOLARGE, "regex is too long");
    if (st == MX_OK) {
        int code;
        size_t at;
        p->code = pcre2_compile((PCRE2_SPTR)(r.out.data ? r.out.data : ""), r.out.n,
                                PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                                &code, &at, NULL);
        if (!p->code) {
            PCRE2_UCHAR msg[128];
            pcre2_get_error_message(code, msg, sizeof msg);
            st = mx_err_set(err, MX_UNSUPPORTED, "regex %.*s: %s", (int)MX_MIN(re.n, 400u), re.p,
                            (const char *)msg);
        } else {
            pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE); // without it the interpreter runs
        }
    }
    mx_buf_free(&r.out);
    return st;
}

static mx_status find_regex(const pattern *p, pattern_work *w, mx_str text, size_t from,
                            bool *found, size_t *start, size_t *end, mx_err *err) {
    if (!w->data) {
        w->data = pcre2_match_data_create(1, NULL);
        w->context = pcre2_match_context_create(NULL);
        w->stack = pcre2_jit_stack_create(32 << 10, JIT_STACK_BYTES, NULL);
        CHECK(w->data && w->context);
        pcre2_set_match_limit(w->context, MATCH_LIMIT);
        pcre2_set_heap_limit(w->context, HEAP_LIMIT_KIB);
        if (w->stack) pcre2_jit_stack_assign(w->context, NULL, w->stack);
    }
    // an expression may match nothing; such matches are asked for no further than the end
    int rc = pcre2_match(p->code, (PCRE2_SPTR)text.p, text.n, from, PCRE2_NO_UTF_CHECK, w->data,
                         w->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
        rc = pcre2_match(p->code, (PCRE2_SPTR)text.p, text.n, from,
                         PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, w->data, w->context);
    }
    *found = rc >= 0;
    if (rc == PCRE2_ERROR_NOMATCH) return MX_OK;
    if (rc < 0) {
        PCRE2_UCHAR msg[128];
        pcre2_get_error_message(rc, msg, sizeof msg);
        return mx_err_set(err, MX_INVALID, "pre-tokenizer expression gave up at byte %zu: %s", from,
                          (const char *)msg);
    }
    size_t *v = pcre2_get_ovector_pointer(w->data);
    *start = v[0];
    *end = MX_MAX(v[0], v[1]);
    return MX_OK;
}

static bool find_class(const pattern *p, mx_str text, size_t from, size_t *start, size_t *end) {
    const uint8_t *cls = unicode_classes();
    for (size_t i = from; i < text.n;) {
        *start = i;
        bool hit = cls[unicode_next(text.p, &i)] & p->mask;
        *end = i;
        if (hit) return true;
    }
    return false;
}

mx_status pattern_find(const pattern *p, pattern_work *w, mx_str text, size_t from, bool *found,
                       size_t *start, size_t *end, mx_err *err) {
    if (p->kind == PAT_REGEX) return find_regex(p, w, text, from, found, start, end, err);
    *found = false;
    if (from >= text.n) return MX_OK;
    const uint8_t *cls = unicode_classes();
    *start = from;
    *found = true;
    switch (p->kind) {
    case PAT_CLASS: *found = find_class(p, text, from, start, end); break;
    case PAT_GPT2: *end = scan_gpt2(text, from, cls); break;
    case PAT_LLAMA3: *end = scan_cl100k(text, from, cls, 3); break;
    case PAT_QWEN2: *end = scan_cl100k(text, from, cls, 1); break;
    default: {
        const char *hit =
            p->text.n ? memmem(text.p + from, text.n - from, p->text.p, p->text.n) : NULL;
        *found = hit != NULL;
        *start = hit ? (size_t)(hit - text.p) : 0;
        *end = *start + p->text.n;
    }
    }
    return MX_OK;
}
