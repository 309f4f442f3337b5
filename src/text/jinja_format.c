// Python's two ways of formatting text, % and str.format, as far as templates use them. Literal
// parts keep their origin; arguments keep theirs only when the whole format is trusted (else a
// message could choose where template text appears).
#include "text/jinja_int.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>

enum { MAX_WIDTH = 10000 };

typedef struct jspec {
    mx_str fill; // one character
    char align;  // < > ^ = or 0
    char sign;   // + - space or 0
    bool alt, zero;
    char group;      // ',' '_' or 0
    int width, prec; // prec -1: none
    char type;       // 0: none
} jspec;

static const jstr *untrusted_unless(jrt *r, const jstr *s, bool trusted) {
    if (trusted || s->n == 0) return s;
    return jinja_str_view(r, jinja_text(s), false);
}

// Text padded to the spec's width (in characters); padding is trusted when everything is.
static void add_padded(jrt *r, jbuf *out, const jstr *s, const jspec *k, char align, bool trusted) {
    size_t pad = (size_t)k->width > s->n_chars ? (size_t)k->width - s->n_chars : 0;
    size_t left = align == '>' ? pad : align == '^' ? pad / 2 : 0;
    mx_str fill = k->fill.n ? k->fill : mx_str_of(" ");
    trusted = trusted && jinja_str_trusted(s);
    for (size_t i = 0; i < left; i++) jinja_buf_add(r, out, fill, trusted);
    jinja_buf_str(r, out, s);
    for (size_t i = left; i < pad; i++) jinja_buf_add(r, out, fill, trusted);
}

// Digits with a separator in every group of three (the integer part only).
static void group_digits(mx_buf *b, const char *digits, char sep) {
    size_t n = strspn(digits, "0123456789");
    for (size_t i = 0; i < n; i++) {
        if (i && (n - i) % 3 == 0) mx_buf_putc(b, sep);
        mx_buf_putc(b, digits[i]);
    }
    mx_buf_puts(b, digits + n);
}

static void int_digits(char *out, size_t cap, uint64_t v, char type, bool alt) {
    char bin[72];
    int n = 0;
    const char *prefix = !alt          ? ""
                         : type == 'x' ? "0x"
                         : type == 'X' ? "0X"
                         : type == 'o' ? "0o"
                         : type == 'b' ? "0b"
                                       : "";
    unsigned base = type == 'b' ? 2 : type == 'o' ? 8 : type == 'x' || type == 'X' ? 16 : 10;
    do {
        bin[n++] = (type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef")[v % base];
        v /= base;
    } while (v);
    size_t k = (size_t)snprintf(out, cap, "%s", prefix);
    while (n > 0 && k + 1 < cap) out[k++] = bin[--n];
    out[k] = 0;
}

static void float_digits(char *out, size_t cap, double f, const jspec *k) {
    int prec = k->prec < 0 ? 6 : k->prec;
    char fmt[] = "%.*f";
    if (k->type == 0 && k->prec < 0) {
        char tmp[32];
        jinja_print_float(f, tmp);
        snprintf(out, cap, "%s", tmp);
        return;
    }
    fmt[3] = k->type == '%' ? 'f' : k->type == 0 || k->type == 'n' ? 'g' : k->type;
    snprintf(out, cap, fmt, prec, k->type == '%' ? f * 100 : f);
    if (k->type == '%') snprintf(out + strlen(out), cap - strlen(out), "%%");
}

static void add_number(jrt *r, jbuf *out, const char *digits, bool negative, const jspec *k,
                       bool trusted) {
    char sign = negative ? '-' : k->sign == '+' || k->sign == ' ' ? k->sign : 0;
    char align = k->align ? k->align : k->zero ? '=' : '>';
    mx_buf b;
    mx_buf_init(&b, 4096);
    if (k->group)
        group_digits(&b, digits, k->group);
    else
        mx_buf_puts(&b, digits);
    char text[1400];
    size_t n = strlen(b.data) + (sign != 0), pad = 0;
    if (align == '=' && (size_t)k->width > n) pad = MX_MIN((size_t)k->width - n, 900u);
    char fill = k->fill.n == 1 ? k->fill.p[0] : k->zero ? '0' : ' ';
    size_t at = 0;
    if (sign) text[at++] = sign;
    memset(text + at, fill, pad);
    snprintf(text + at + pad, sizeof text - at - pad, "%s", b.data);
    mx_buf_free(&b);
    add_padded(r, out, jinja_str_make(r, mx_str_of(text), trusted), k, align, trusted);
}

static void add_int(jrt *r, jbuf *out, int64_t v, const jspec *k, bool trusted) {
    char digits[96];
    uint64_t u = v < 0 ? 0 - (uint64_t)v : (uint64_t)v;
    int_digits(digits, sizeof digits, u, k->type, k->alt);
    add_number(r, out, digits, v < 0, k, trusted);
}

static void add_float(jrt *r, jbuf *out, double f, const jspec *k, bool trusted) {
    char digits[400];
    if (k->prec > 60) jinja_fail(r, MX_UNSUPPORTED, "format with a precision of %d", k->prec);
    float_digits(digits, sizeof digits, fabs(f), k);
    add_number(r, out, digits, signbit(f) != 0, k, trusted);
}

static const jstr *cut(jrt *r, const jstr *s, int prec) {
    if (prec < 0 || (size_t)prec >= s->n_chars) return s;
    return jinja_str_part(r, s, 0, jinja_str_offset(s, (size_t)prec));
}

// --- % -------------------------------------------------------------------------------------------

typedef struct jpercent {
    jrt *r;
    jbuf *out;
    jval args;
    size_t next, n_args;
    bool trusted, used_key;
} jpercent;

static jval next_arg(jpercent *p) {
    bool tuple = p->args.kind == JV_LIST && p->args.u.l->form == JL_TUPLE;
    p->n_args = tuple ? p->args.u.l->n : 1;
    if (p->next >= p->n_args)
        jinja_fail(p->r, MX_INVALID, "not enough arguments for format string");
    jval v = tuple ? p->args.u.l->v[p->next] : p->args;
    p->next++;
    return v;
}

static int take_width(jpercent *p, mx_str f, size_t *at) {
    int64_t n = 0;
    if (*at < f.n && f.p[*at] == '*') {
        (*at)++;
        if (!jinja_as_int(next_arg(p), &n)) jinja_fail(p->r, MX_INVALID, "* wants int");
    } else {
        while (*at < f.n && isdigit((unsigned char)f.p[*at]) && n <= MAX_WIDTH)
            n = n * 10 + (f.p[(*at)++] - '0');
    }
    if (n < 0 || n > MAX_WIDTH) jinja_fail(p->r, MX_TOOLARGE, "format width beyond %d", MAX_WIDTH);
    return (int)n;
}

static void percent_value(jpercent *p, jval v, jspec *k) {
    int64_t i;
    double f;
    bool trusted = p->trusted && !jinja_tainted(v);
    if (v.kind == JV_UNDEF && k->type != 's' && k->type != 'r') jinja_fail_undef(p->r, v);
    if (k->type == 'c') {
        char one[4];
        if (jinja_as_int(v, &i)) {
            if (i < 0 || i > 0x10ffff || (i >= 0xd800 && i <= 0xdfff))
                jinja_fail(p->r, MX_INVALID, "%%c arg not a character");
            size_t n = (size_t)mx_utf8_encode((uint32_t)i, one);
            v = jv_str(jinja_str_make(p->r, (mx_str){one, n}, trusted));
        }
        if (v.kind != JV_STR || v.u.s->n_chars != 1)
            jinja_fail(p->r, MX_INVALID, "%%c requires int or char");
        k->type = 's';
    }
    switch (k->type) {
    case 's':
    case 'r': {
        const jstr *s = k->type == 's' ? jinja_to_str(p->r, v) : jinja_repr(p->r, v);
        s = untrusted_unless(p->r, cut(p->r, s, k->prec), p->trusted);
        add_padded(p->r, p->out, s, k, k->align == '<' ? '<' : '>', p->trusted);
        return;
    }
    case 'd':
    case 'i':
    case 'u':
        k->type = 0;
        if (v.kind == JV_FLOAT && fabs(v.u.f) < 9e18) v = jv_int((int64_t)v.u.f);
        break;
    case 'x':
    case 'X':
    case 'o': break;
    default:
        if (!jinja_as_number(v, &f))
            jinja_fail(p->r, MX_INVALID, "must be real number, not %s", jinja_type_name(v));
        add_float(p->r, p->out, f, k, trusted);
        return;
    }
    if (!jinja_as_int(v, &i))
        jinja_fail(p->r, MX_INVALID, "%%d format: a number is required, not %s",
                   jinja_type_name(v));
    add_int(p->r, p->out, i, k, trusted);
}

static jval keyed_arg(jpercent *p, mx_str f, size_t *at) {
    size_t from = *at + 1, to = jinja_find(f, mx_str_of(")"), from);
    if (to == SIZE_MAX) jinja_fail(p->r, MX_INVALID, "incomplete format key");
    if (p->args.kind != JV_DICT) jinja_fail(p->r, MX_INVALID, "format requires a mapping");
    const jpair *pair = jinja_dict_find_str(p->args.u.d, (mx_str){f.p + from, to - from});
    if (!pair)
        jinja_fail(p->r, MX_INVALID, "format key '%.*s' is not there", (int)MX_MIN(to - from, 60u),
                   f.p + from);
    *at = to + 1;
    p->used_key = true;
    return pair->value;
}

// One conversion; *at is behind the '%'.
static void percent_one(jpercent *p, mx_str f, size_t *at) {
    jspec k = {.prec = -1};
    jval v = {.kind = JV_MISSING};
    if (*at < f.n && f.p[*at] == '(') v = keyed_arg(p, f, at);
    for (; *at < f.n && strchr("-+ #0", f.p[*at]) && f.p[*at]; (*at)++) {
        char c = f.p[*at];
        if (c == '-')
            k.align = '<';
        else if (c == '#')
            k.alt = true;
        else if (c == '0')
            k.zero = true;
        else
            k.sign = c;
    }
    k.width = take_width(p, f, at);
    if (*at < f.n && f.p[*at] == '.') {
        (*at)++;
        k.prec = take_width(p, f, at);
    }
    while (*at < f.n && strchr("hlL", f.p[*at]) && f.p[*at]) (*at)++;
    if (*at >= f.n) jinja_fail(p->r, MX_INVALID, "incomplete format");
    k.type = f.p[(*at)++];
    if (k.type == '%') {
        jinja_buf_add(p->r, p->out, mx_str_of("%"), p->trusted);
        return;
    }
    if (!strchr("srcdiuxXofFeEgG", k.type))
        jinja_fail(p->r, MX_UNSUPPORTED, "format character '%c' (0x%x)",
                   isprint((unsigned char)k.type) ? k.type : '?', (unsigned char)k.type);
    percent_value(p, jv_is_given(v) ? v : next_arg(p), &k);
}

const jstr *jinja_format_percent(jrt *r, const jstr *fmt, jval args) {
    jpercent p = {.r = r, .out = jinja_buf_new(r, fmt->n + 32), .args = args};
    p.trusted = jinja_str_trusted(fmt);
    jinja_charge_bytes(r, fmt->n);
    mx_str f = jinja_text(fmt);
    for (size_t at = 0; at < f.n;) {
        size_t hit = jinja_find(f, mx_str_of("%"), at);
        size_t to = hit == SIZE_MAX ? f.n : hit;
        jinja_buf_part(r, p.out, fmt, at, to);
        at = to;
        if (hit == SIZE_MAX) break;
        at++;
        percent_one(&p, f, &at);
    }
    bool list = args.kind == JV_LIST, tuple = list && args.u.l->form == JL_TUPLE;
    bool open = args.kind == JV_DICT || (list && args.u.l->form == JL_LIST);
    size_t n = tuple ? args.u.l->n : open ? 0 : 1; // Python counts mappings and lists as all used
    if (p.next < n && !p.used_key)
        jinja_fail(r, MX_INVALID, "not all arguments converted during string formatting");
    return jinja_buf_take(r, p.out);
}

// --- str.format ----------------------------------------------------------------------------------

static int spec_number(jrt *r, mx_str s, size_t *at) {
    int n = 0;
    while (*at < s.n && isdigit((unsigned char)s.p[*at]) && n <= MAX_WIDTH)
        n = n * 10 + (s.p[(*at)++] - '0');
    if (n > MAX_WIDTH) jinja_fail(r, MX_TOOLARGE, "format width beyond %d", MAX_WIDTH);
    return n;
}

static bool is_align(mx_str s, size_t at) {
    return at < s.n && s.p[at] && strchr("<>^=", s.p[at]);
}

static jspec parse_spec(jrt *r, mx_str s) {
    jspec k = {.prec = -1};
    size_t at = 0, next = 0;
    if (s.n) jinja_next_char(s, &next);
    if (s.n && is_align(s, next)) {
        k.fill = (mx_str){s.p, next};
        k.align = s.p[next];
        at = next + 1;
    } else if (is_align(s, 0)) {
        k.align = s.p[at++];
    }
    if (at < s.n && s.p[at] && strchr("+- ", s.p[at])) k.sign = s.p[at++];
    if (at < s.n && s.p[at] == '#') k.alt = s.p[at++] != 0;
    if (at < s.n && s.p[at] == '0') k.zero = s.p[at++] != 0;
    k.width = spec_number(r, s, &at);
    if (at < s.n && s.p[at] && strchr(",_", s.p[at])) k.group = s.p[at++];
    if (at < s.n && s.p[at] == '.') {
        at++;
        k.prec = spec_number(r, s, &at);
    }
    if (at < s.n) k.type = s.p[at++];
    if (at < s.n || (k.type && !strchr("sdfFeEgGxXob%", k.type)))
        jinja_fail(r, MX_UNSUPPORTED, "format specifier '%.*s'", (int)MX_MIN(s.n, 60u), s.p);
    return k;
}

static void add_field(jrt *r, jbuf *out, jval v, mx_str spec, bool trusted) {
    jspec k = parse_spec(r, spec);
    int64_t i;
    double f;
    bool own = trusted && !jinja_tainted(v);
    bool is_int = v.kind == JV_INT || (v.kind == JV_BOOL && k.type && k.type != 's');
    if (is_int && (!k.type || strchr("dxXob", k.type))) {
        if (k.type == 'd') k.type = 0;
        jinja_as_int(v, &i);
        add_int(r, out, i, &k, own);
    } else if ((is_int || v.kind == JV_FLOAT) && (!k.type || strchr("fFeEgG%", k.type))) {
        jinja_as_number(v, &f);
        add_float(r, out, f, &k, own);
    } else {
        if ((k.type && k.type != 's') || k.align == '=' || (v.kind != JV_STR && spec.n))
            jinja_fail(r, MX_INVALID, "format specifier '%.*s' does not fit a %s",
                       (int)MX_MIN(spec.n, 60u), spec.p, jinja_type_name(v));
        const jstr *s = untrusted_unless(r, cut(r, jinja_to_str(r, v), k.prec), trusted);
        add_padded(r, out, s, &k, k.align ? k.align : '<', trusted);
    }
}

// The value a field such as "0", "name", "a.b[c]" or "" names.
static jval field_value(jrt *r, mx_str f, const jargs *args, size_t *next) {
    size_t n = 0;
    while (n < f.n && f.p[n] != '.' && f.p[n] != '[') n++;
    jval v = {.kind = JV_MISSING};
    size_t digits = 0, index = 0;
    while (digits < n && isdigit((unsigned char)f.p[digits]) && digits < 6)
        index = index * 10 + (size_t)(f.p[digits++] - '0');
    if (n == 0) index = (*next)++;
    if (digits == n && index < args->n) v = args->v[index];
    for (size_t i = 0; i < args->n_kw && digits < n; i++)
        if (mx_str_eq(args->kw[i], (mx_str){f.p, n})) v = args->kw_v[i];
    if (!jv_is_given(v))
        jinja_fail(r, MX_INVALID, "format field '%.*s' has no argument", (int)MX_MIN(n, 60u), f.p);
    while (n < f.n) {
        bool item = f.p[n] == '[';
        size_t from = ++n;
        while (n < f.n && (item ? f.p[n] != ']' : f.p[n] != '.' && f.p[n] != '[')) n++;
        const jstr *name = jinja_str_make(r, (mx_str){f.p + from, n - from}, false);
        int64_t i;
        bool number = mx_parse_i64(mx_arena_strndup(&r->arena, name->p, name->n), &i);
        v = item ? jinja_get_item(r, v, number ? jv_int(i) : jv_str(name))
                 : jinja_get_attr(r, v, name);
        n += item;
    }
    return v;
}

const jstr *jinja_format_braces(jrt *r, const jstr *fmt, const jargs *args) {
    jbuf *out = jinja_buf_new(r, fmt->n + 32);
    bool trusted = jinja_str_trusted(fmt);
    mx_str f = jinja_text(fmt);
    size_t next = 0;
    jinja_charge_bytes(r, fmt->n);
    for (size_t at = 0; at < f.n;) {
        size_t to = at;
        while (to < f.n && f.p[to] != '{' && f.p[to] != '}') to++;
        jinja_buf_part(r, out, fmt, at, to);
        if (to == f.n) break;
        at = to + 1;
        if (at < f.n && f.p[at] == f.p[to]) {
            jinja_buf_part(r, out, fmt, at, at + 1);
            at++;
            continue;
        }
        size_t end = jinja_find(f, mx_str_of("}"), at);
        if (f.p[to] == '}' || end == SIZE_MAX)
            jinja_fail(r, MX_INVALID, "single '%c' in format string", f.p[to]);
        mx_str field = {f.p + at, end - at}, spec = {"", 0};
        if (memchr(field.p, '{', field.n)) jinja_fail(r, MX_UNSUPPORTED, "nested format fields");
        size_t colon = jinja_find(field, mx_str_of(":"), 0);
        if (colon != SIZE_MAX) {
            spec = (mx_str){field.p + colon + 1, field.n - colon - 1};
            field.n = colon;
        }
        char conv = 0;
        if (field.n >= 2 && field.p[field.n - 2] == '!') {
            conv = field.p[field.n - 1];
            field.n -= 2;
        }
        jval v = field_value(r, field, args, &next);
        if (conv == 'r')
            v = jv_str(jinja_repr(r, v));
        else if (conv == 's')
            v = jv_str(jinja_to_str(r, v));
        else if (conv)
            jinja_fail(r, MX_UNSUPPORTED, "format conversion '!%c'", conv);
        add_field(r, out, v, spec, trusted);
        at = end + 1;
    }
    return jinja_buf_take(r, out);
}
