// Template source to tokens, with Jinja's whitespace control (trim_blocks, lstrip_blocks, '-',
// '+'). Tokens live in the template's arena. It does not know syntax beyond balanced brackets,
// which decide whether "}}" ends a tag or two dictionaries.
#include "text/jinja_int.h"

#include <errno.h>
#include <stdlib.h>

typedef struct jlex {
    jparse *p;
    mx_str src;
    size_t at;
    int line;
    size_t line_at;     // where `line` was counted up to
    bool line_starting; // the last match ended with a newline
    char close[JINJA_MAX_NEST];
    int n_close;
} jlex;

static int line_of(jlex *x, size_t at) {
    for (; x->line_at < at; x->line_at++) x->line += x->src.p[x->line_at] == '\n';
    return x->line;
}

static jtok *push(jlex *x, jtok_kind kind, size_t at) {
    jparse *p = x->p;
    if (p->n_tok == p->cap_tok) {
        size_t cap = p->cap_tok ? p->cap_tok * 2 : 256;
        jtok *tok = MX_ARENA_ARRAY(&p->t->arena, jtok, cap);
        if (p->n_tok) memcpy(tok, p->tok, p->n_tok * sizeof *tok);
        p->tok = tok;
        p->cap_tok = cap;
    }
    jtok *t = &p->tok[p->n_tok++];
    *t = (jtok){.kind = kind, .line = line_of(x, at)};
    return t;
}

static bool starts(const jlex *x, size_t at, const char *s) {
    size_t n = strlen(s);
    return x->src.n - at >= n && memcmp(x->src.p + at, s, n) == 0;
}

static size_t skip_space(const jlex *x, size_t at) {
    while (at < x->src.n) {
        size_t next = at;
        if (!jinja_is_space(jinja_next_char(x->src, &next))) break;
        at = next;
    }
    return at;
}

static size_t rstrip(mx_str s) {
    size_t keep = 0;
    for (size_t at = 0; at < s.n;) {
        if (!jinja_is_space(jinja_next_char(s, &at))) keep = at;
    }
    return keep;
}

static bool all_space(mx_str s) {
    return rstrip(s) == 0;
}

// Template text before a tag at x->at .. end, after what the tag's sign and lstrip take away.
static void push_data(jlex *x, size_t from, size_t to, char sign, bool is_variable) {
    mx_str text = {x->src.p + from, to - from};
    if (sign == '-') {
        text.n = rstrip(text);
    } else if (sign != '+' && !is_variable) {
        size_t l = text.n;
        while (l > 0 && text.p[l - 1] != '\n') l--;
        if ((l > 0 || x->line_starting) && all_space((mx_str){text.p + l, text.n - l})) text.n = l;
    }
    if (text.n) push(x, JT_DATA, from)->text = text;
}

// After the bytes of a closing delimiter at `at` (its sign in front of it): where text goes on.
static size_t after_close(const jlex *x, size_t at, char sign, bool trim) {
    if (sign == '-') return skip_space(x, at);
    if (sign != '+' && trim && at < x->src.n && x->src.p[at] == '\n') return at + 1;
    return at;
}

// Matches [+-]?%} at `at`; sets *end to where text goes on.
static bool match_close(const jlex *x, size_t at, const char *close, bool plus, size_t *end) {
    char sign = 0;
    if (at < x->src.n && (x->src.p[at] == '-' || (plus && x->src.p[at] == '+')))
        sign = x->src.p[at++];
    if (!starts(x, at, close)) return false;
    *end = after_close(x, at + 2, sign, plus);
    return true;
}

static void set_at(jlex *x, size_t at) {
    x->line_starting = at > 0 && x->src.p[at - 1] == '\n';
    x->at = at;
}

static uint32_t read_hex(jlex *x, mx_str s, size_t *at, int n, int line) {
    uint32_t v = 0;
    for (int i = 0; i < n; i++, (*at)++) {
        char c = *at < s.n ? s.p[*at] : 0;
        uint32_t d = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                     : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a' + 10)
                     : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A' + 10)
                                            : 16;
        if (d == 16) jinja_syntax_error(x->p, MX_FORMAT, line, "bad escape in a string");
        v = v * 16 + d;
    }
    return v;
}

static size_t put_code(jlex *x, char *out, uint32_t c, int line) {
    if (c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff))
        jinja_syntax_error(x->p, MX_FORMAT, line, "escape \\u%04x is no character", (unsigned)c);
    return (size_t)mx_utf8_encode(c, out);
}

// One escape sequence; *at is behind the backslash. Returns the bytes written (never more than
// read).
static size_t unescape_one(jlex *x, char *out, mx_str s, size_t *at, int line) {
    static const char from[] = "ntrabfv\\'\"", to[] = "\n\t\r\a\b\f\v\\'\"";
    char c = s.p[(*at)++];
    const char *simple = c ? strchr(from, c) : NULL;
    if (simple) {
        *out = to[simple - from];
        return 1;
    }
    if (c == '\n') return 0;
    if (c >= '0' && c <= '7') {
        uint32_t v = (uint32_t)(c - '0');
        for (int i = 0; i < 2 && *at < s.n && s.p[*at] >= '0' && s.p[*at] <= '7'; i++)
            v = v * 8 + (uint32_t)(s.p[(*at)++] - '0');
        return put_code(x, out, v, line);
    }
    if (c == 'x' || c == 'u' || c == 'U') {
        uint32_t v = read_hex(x, s, at, c == 'x' ? 2 : c == 'u' ? 4 : 8, line);
        return put_code(x, out, v, line);
    }
    if (c == 'N') jinja_syntax_error(x->p, MX_UNSUPPORTED, line, "escape \\N{...} in a string");
    *out = '\\';
    (*at)--;
    return 1;
}

static mx_str unescape(jlex *x, mx_str s, int line) {
    if (!memchr(s.p, '\\', s.n)) return s;
    char *p = mx_arena_alloc(&x->p->t->arena, s.n + 4);
    size_t n = 0;
    for (size_t at = 0; at < s.n;) {
        if (s.p[at] != '\\' || at + 1 == s.n) {
            p[n++] = s.p[at++];
        } else {
            at++;
            n += unescape_one(x, p + n, s, &at, line);
        }
    }
    return (mx_str){p, n};
}

static void lex_string(jlex *x) {
    size_t from = x->at + 1;
    char quote = x->src.p[x->at];
    size_t at = from;
    while (at < x->src.n && x->src.p[at] != quote) at += x->src.p[at] == '\\' ? 2 : 1;
    if (at >= x->src.n)
        jinja_syntax_error(x->p, MX_FORMAT, line_of(x, x->at), "string without its end");
    jtok *t = push(x, JT_STRING, x->at);
    int line = t->line;
    mx_str text = unescape(x, (mx_str){x->src.p + from, at - from}, line);
    x->p->tok[x->p->n_tok - 1].text = text;
    x->at = at + 1;
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}
static bool is_name_char(char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
           (unsigned char)c >= 0x80;
}

// Copies digits and underscores between digits.
static size_t take_digits(const jlex *x, size_t at, char *out, size_t *n, size_t cap) {
    while (at < x->src.n && (is_digit(x->src.p[at]) || (x->src.p[at] == '_' && at + 1 < x->src.n &&
                                                        is_digit(x->src.p[at + 1])))) {
        if (x->src.p[at] != '_' && *n < cap) out[(*n)++] = x->src.p[at];
        at++;
    }
    return at;
}

static size_t lex_exponent(const jlex *x, size_t at, char *out, size_t *n, size_t cap) {
    size_t e = at;
    if (e >= x->src.n || (x->src.p[e] | 0x20) != 'e') return at;
    e++;
    char sign = '+';
    if (e < x->src.n && (x->src.p[e] == '+' || x->src.p[e] == '-')) sign = x->src.p[e++];
    if (e >= x->src.n || !is_digit(x->src.p[e]) || *n + 2 >= cap) return at;
    out[(*n)++] = 'e';
    out[(*n)++] = sign;
    return take_digits(x, e, out, n, cap);
}

static bool lex_radix(jlex *x) {
    int base = starts(x, x->at, "0x") || starts(x, x->at, "0X")   ? 16
               : starts(x, x->at, "0o") || starts(x, x->at, "0O") ? 8
               : starts(x, x->at, "0b") || starts(x, x->at, "0B") ? 2
                                                                  : 0;
    char digits[70];
    size_t n = 0, at = x->at + 2;
    if (!base) return false;
    for (; at < x->src.n && is_name_char(x->src.p[at]) && n < sizeof digits - 1; at++)
        if (x->src.p[at] != '_') digits[n++] = x->src.p[at];
    digits[n] = 0;
    char *end;
    errno = 0;
    long long v = strtoll(digits, &end, base);
    int line = line_of(x, x->at);
    if (errno || *end || n == 0)
        jinja_syntax_error(x->p, MX_FORMAT, line, "bad or too large number 0%s", digits);
    push(x, JT_INT, x->at)->i = v;
    x->at = at;
    return true;
}

static void lex_number(jlex *x) {
    if (lex_radix(x)) return;
    char digits[400];
    size_t n = 0, cap = sizeof digits - 8;
    bool after_dot = x->at > 0 && x->src.p[x->at - 1] == '.', real = false;
    size_t at = take_digits(x, x->at, digits, &n, cap);
    if (!after_dot && at + 1 < x->src.n && x->src.p[at] == '.' && is_digit(x->src.p[at + 1])) {
        real = true;
        digits[n++] = '.';
        at = take_digits(x, at + 1, digits, &n, cap);
    }
    if (!after_dot) {
        size_t e = lex_exponent(x, at, digits, &n, cap + 4);
        real |= e != at;
        at = e;
    }
    digits[MX_MIN(n, sizeof digits - 1)] = 0;
    jtok *t = push(x, real ? JT_FLOAT : JT_INT, x->at);
    if (real) {
        t->f = strtod(digits, NULL);
    } else if (!mx_parse_i64(digits, &t->i)) {
        jinja_syntax_error(x->p, MX_UNSUPPORTED, t->line, "integer %.40s beyond 64 bits", digits);
    }
    x->at = at;
}

static const struct {
    char text[3];
    jop op;
} operators[] = {{"//", JO_FLOORDIV}, {"**", JO_POW},     {"==", JO_EQ},    {"!=", JO_NE},
                 {">=", JO_GE},       {"<=", JO_LE},      {"+", JO_ADD},    {"-", JO_SUB},
                 {"/", JO_DIV},       {"*", JO_MUL},      {"%", JO_MOD},    {"~", JO_TILDE},
                 {"[", JO_LBRACKET},  {"]", JO_RBRACKET}, {"(", JO_LPAREN}, {")", JO_RPAREN},
                 {"{", JO_LBRACE},    {"}", JO_RBRACE},   {">", JO_GT},     {"<", JO_LT},
                 {"=", JO_ASSIGN},    {".", JO_DOT},      {":", JO_COLON},  {"|", JO_PIPE},
                 {",", JO_COMMA},     {";", JO_SEMICOLON}};

static void balance(jlex *x, jop op, char c) {
    int line = line_of(x, x->at);
    if (op == JO_LPAREN || op == JO_LBRACKET || op == JO_LBRACE) {
        if (x->n_close == JINJA_MAX_NEST)
            jinja_syntax_error(x->p, MX_TOOLARGE, line, "brackets nested deeper than %d",
                               JINJA_MAX_NEST);
        x->close[x->n_close++] = op == JO_LPAREN ? ')' : op == JO_LBRACKET ? ']' : '}';
    } else if (op == JO_RPAREN || op == JO_RBRACKET || op == JO_RBRACE) {
        if (x->n_close == 0) jinja_syntax_error(x->p, MX_FORMAT, line, "unexpected '%c'", c);
        char want = x->close[--x->n_close];
        if (want != c)
            jinja_syntax_error(x->p, MX_FORMAT, line, "unexpected '%c', expected '%c'", c, want);
    }
}

static void lex_operator(jlex *x) {
    for (size_t i = 0; i < MX_COUNT(operators); i++) {
        if (!starts(x, x->at, operators[i].text)) continue;
        balance(x, operators[i].op, operators[i].text[0]);
        push(x, JT_OP, x->at)->op = operators[i].op;
        x->at += strlen(operators[i].text);
        return;
    }
    size_t next = x->at;
    uint32_t c = jinja_next_char(x->src, &next);
    jinja_syntax_error(x->p, MX_FORMAT, line_of(x, x->at), "unexpected character U+%04X",
                       (unsigned)c);
}

// The inside of {{ }} or {% %}.
static void lex_tag(jlex *x, bool is_variable) {
    int line = line_of(x, x->at);
    x->n_close = 0;
    for (;;) {
        x->at = skip_space(x, x->at);
        if (x->at >= x->src.n) jinja_syntax_error(x->p, MX_FORMAT, line, "tag without its end");
        size_t end;
        char c = x->src.p[x->at];
        if (x->n_close == 0 &&
            match_close(x, x->at, is_variable ? "}}" : "%}", !is_variable, &end)) {
            push(x, is_variable ? JT_VAR_END : JT_BLOCK_END, x->at);
            set_at(x, end);
            return;
        }
        if (is_digit(c)) {
            lex_number(x);
        } else if (is_name_char(c)) {
            size_t from = x->at;
            while (x->at < x->src.n && is_name_char(x->src.p[x->at])) x->at++;
            push(x, JT_NAME, from)->text = (mx_str){x->src.p + from, x->at - from};
        } else if (c == '"' || c == '\'') {
            lex_string(x);
        } else {
            lex_operator(x);
        }
    }
}

static void lex_comment(jlex *x) {
    size_t at = x->at, end;
    if (at == x->src.n) return; // as in Jinja, where an opening at the very end goes unnoticed
    for (; at < x->src.n; at++) {
        if (match_close(x, at, "#}", true, &end)) {
            set_at(x, end);
            return;
        }
    }
    jinja_syntax_error(x->p, MX_FORMAT, line_of(x, x->at), "comment without its end");
}

// {% raw %}: `at` is behind "{%" and its sign. Returns false when it is another tag.
static bool match_raw(const jlex *x, size_t at, const char *word, size_t *end, bool is_end) {
    at = skip_space(x, at);
    if (!starts(x, at, word)) return false;
    at = skip_space(x, at + strlen(word));
    if (is_end) return match_close(x, at, "%}", true, end);
    bool minus = at < x->src.n && x->src.p[at] == '-';
    if (!starts(x, at + minus, "%}")) return false;
    *end = minus ? skip_space(x, at + 3) : at + 2;
    return true;
}

static void lex_raw(jlex *x) {
    for (size_t at = x->at; at < x->src.n; at++) {
        if (!starts(x, at, "{%")) continue;
        size_t in = at + 2, end;
        char sign = in < x->src.n && strchr("+-", x->src.p[in]) ? x->src.p[in] : 0;
        if (!match_raw(x, in + (sign != 0), "endraw", &end, true)) continue;
        push_data(x, x->at, at, sign, false);
        set_at(x, end);
        return;
    }
    jinja_syntax_error(x->p, MX_FORMAT, line_of(x, x->at), "raw without endraw");
}

static size_t find_tag(const jlex *x) {
    for (size_t at = x->at; at + 1 < x->src.n; at++) {
        if (x->src.p[at] != '{') continue;
        char c = x->src.p[at + 1];
        if (c == '{' || c == '%' || c == '#') return at;
    }
    return SIZE_MAX;
}

void jinja_lex(jparse *p) {
    jlex x = {.p = p, .src = {p->t->source, p->t->n_source}, .line = 1, .line_starting = true};
    size_t tag;
    while ((tag = find_tag(&x)) != SIZE_MAX) {
        char kind = x.src.p[tag + 1];
        size_t in = tag + 2, end;
        char sign = in < x.src.n && (x.src.p[in] == '-' || x.src.p[in] == '+') ? x.src.p[in] : 0;
        in += sign != 0;
        push_data(&x, x.at, tag, sign, kind == '{');
        if (kind == '#') {
            x.at = in;
            lex_comment(&x);
        } else if (kind == '%' && match_raw(&x, in, "raw", &end, false)) {
            set_at(&x, end);
            lex_raw(&x);
        } else {
            push(&x, kind == '{' ? JT_VAR_BEGIN : JT_BLOCK_BEGIN, tag);
            x.at = in;
            lex_tag(&x, kind == '{');
        }
    }
    if (x.at < x.src.n) push(&x, JT_DATA, x.at)->text = (mx_str){x.src.p + x.at, x.src.n - x.at};
    push(&x, JT_EOF, x.src.n);
}
