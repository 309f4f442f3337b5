// Values as text: Python's str() and repr(), and json.dumps as chat templates use it. Numbers print
// as Python prints them. Text made of a value that holds untrusted data is untrusted as a whole,
// except that str() of a string is the string itself.
#include "text/jinja_int.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <utf8proc.h>

// Shortest digits that read back as the same double; returns the decimal exponent.
static int shortest(double f, char digits[20]) {
    char tmp[40];
    for (int prec = 0; prec <= 16; prec++) {
        snprintf(tmp, sizeof tmp, "%.*e", prec, f);
        if (strtod(tmp, NULL) == f || prec == 16) break;
    }
    int n = 0;
    const char *p = tmp;
    for (; *p && *p != 'e'; p++)
        if (*p >= '0' && *p <= '9') digits[n++] = *p;
    while (n > 1 && digits[n - 1] == '0') n--;
    digits[n] = 0;
    return *p ? (int)strtol(p + 1, NULL, 10) : 0;
}

size_t jinja_print_float(double f, char out[32]) {
    if (isnan(f)) return (size_t)snprintf(out, 32, "nan");
    if (isinf(f)) return (size_t)snprintf(out, 32, f < 0 ? "-inf" : "inf");
    if (f == 0) return (size_t)snprintf(out, 32, signbit(f) ? "-0.0" : "0.0");
    char d[20];
    const char *sign = f < 0 ? "-" : "";
    int e = shortest(fabs(f), d), n = (int)strlen(d);
    if (e < -4 || e >= 16) {
        return (size_t)snprintf(out, 32, "%s%c%s%se%c%02d", sign, d[0], n > 1 ? "." : "", d + 1,
                                e < 0 ? '-' : '+', abs(e));
    }
    if (e < 0) return (size_t)snprintf(out, 32, "%s0.%.*s%s", sign, -e - 1, "0000", d);
    if (n <= e + 1)
        return (size_t)snprintf(out, 32, "%s%s%.*s.0", sign, d, e + 1 - n, "0000000000000000");
    return (size_t)snprintf(out, 32, "%s%.*s.%s", sign, e + 1, d, d + e + 1);
}

static bool is_printable(uint32_t c) {
    if (c < 0x7f) return c >= 0x20;
    utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)c);
    return !(k == UTF8PROC_CATEGORY_CC || k == UTF8PROC_CATEGORY_CF || k == UTF8PROC_CATEGORY_CS ||
             k == UTF8PROC_CATEGORY_CO || k == UTF8PROC_CATEGORY_CN || k == UTF8PROC_CATEGORY_ZL ||
             k == UTF8PROC_CATEGORY_ZP || k == UTF8PROC_CATEGORY_ZS);
}

static void add(jrt *r, jbuf *b, const char *s, bool trusted) {
    jinja_buf_add(r, b, mx_str_of(s), trusted);
}

static void repr_str(jrt *r, jbuf *b, const jstr *s, bool trusted) {
    mx_str t = jinja_text(s);
    char quote = memchr(t.p, '\'', t.n) && !memchr(t.p, '"', t.n) ? '"' : '\'';
    char tmp[16];
    jinja_charge_bytes(r, t.n * 8);
    jinja_buf_add(r, b, (mx_str){&quote, 1}, trusted);
    for (size_t at = 0, from = 0; at < t.n; from = at) {
        uint32_t c = jinja_next_char(t, &at);
        if (c == '\\' || c == (uint32_t)quote)
            snprintf(tmp, sizeof tmp, "\\%c", (char)c);
        else if (c == '\n')
            snprintf(tmp, sizeof tmp, "\\n");
        else if (c == '\r')
            snprintf(tmp, sizeof tmp, "\\r");
        else if (c == '\t')
            snprintf(tmp, sizeof tmp, "\\t");
        else if (is_printable(c))
            snprintf(tmp, sizeof tmp, "%.*s", (int)(at - from), t.p + from);
        else if (c < 0x100)
            snprintf(tmp, sizeof tmp, "\\x%02x", (unsigned)c);
        else if (c < 0x10000)
            snprintf(tmp, sizeof tmp, "\\u%04x", (unsigned)c);
        else
            snprintf(tmp, sizeof tmp, "\\U%08x", (unsigned)c);
        add(r, b, tmp, trusted);
    }
    jinja_buf_add(r, b, (mx_str){&quote, 1}, trusted);
}

static void repr(jrt *r, jbuf *b, jval v, bool trusted, int depth);

static void repr_items(jrt *r, jbuf *b, const jlist *l, bool trusted, int depth) {
    static const char *const open[] = {"[", "(", "", "dict_keys([", "dict_values([", "dict_items([",
                                       "",  "("},
                             *const close[] = {"]", ")", "", "])", "])", "])", "", ")"};
    char tmp[96];
    if (l->form == JL_RANGE) {
        long long from = l->start, to = l->stop, by = l->step;
        if (by == 1)
            snprintf(tmp, sizeof tmp, "range(%lld, %lld)", from, to);
        else
            snprintf(tmp, sizeof tmp, "range(%lld, %lld, %lld)", from, to, by);
        add(r, b, tmp, trusted);
        return;
    }
    if (l->form == JL_GEN)
        jinja_fail(r, MX_INVALID, "a generator is printed; use |list or |join first");
    add(r, b, open[l->form], trusted);
    for (size_t i = 0; i < l->n; i++) {
        if (i) add(r, b, ", ", trusted);
        repr(r, b, l->v[i], trusted, depth + 1);
    }
    if (l->n == 1 && (l->form == JL_TUPLE || l->form == JL_GROUP)) add(r, b, ",", trusted);
    add(r, b, close[l->form], trusted);
}

static void repr_dict(jrt *r, jbuf *b, const jdict *d, bool trusted, int depth) {
    add(r, b, "{", trusted);
    for (size_t i = 0; i < d->n; i++) {
        if (i) add(r, b, ", ", trusted);
        repr(r, b, d->v[i].key, trusted, depth + 1);
        add(r, b, ": ", trusted);
        repr(r, b, d->v[i].value, trusted, depth + 1);
    }
    add(r, b, "}", trusted);
}

static void repr(jrt *r, jbuf *b, jval v, bool trusted, int depth) {
    char tmp[40];
    if (depth > JINJA_MAX_NEST)
        jinja_fail(r, MX_TOOLARGE, "values nested deeper than %d", JINJA_MAX_NEST);
    jinja_charge(r, 1);
    switch (v.kind) {
    case JV_MISSING:
    case JV_UNDEF: add(r, b, "Undefined", trusted); return;
    case JV_NONE: add(r, b, "None", trusted); return;
    case JV_BOOL: add(r, b, v.u.b ? "True" : "False", trusted); return;
    case JV_INT:
        snprintf(tmp, sizeof tmp, "%lld", (long long)v.u.i);
        add(r, b, tmp, trusted);
        return;
    case JV_FLOAT:
        jinja_print_float(v.u.f, tmp);
        add(r, b, tmp, trusted);
        return;
    case JV_STR:
        if (v.u.s->markup) add(r, b, "Markup(", trusted);
        repr_str(r, b, v.u.s, trusted);
        if (v.u.s->markup) add(r, b, ")", trusted);
        return;
    case JV_LIST: repr_items(r, b, v.u.l, trusted, depth); return;
    case JV_DICT: repr_dict(r, b, v.u.d, trusted, depth); return;
    case JV_NS:
        add(r, b, "<Namespace ", trusted);
        repr_dict(r, b, v.u.d, trusted, depth);
        add(r, b, ">", trusted);
        return;
    default: break;
    }
    jinja_fail(r, MX_INVALID, "a %s cannot be printed", jinja_type_name(v));
}

void jinja_print(jrt *r, jbuf *out, jval v) {
    if (v.kind == JV_STR)
        jinja_buf_str(r, out, v.u.s);
    else if (v.kind != JV_UNDEF)
        repr(r, out, v, !jinja_tainted(v), 0);
}

const jstr *jinja_to_str(jrt *r, jval v) {
    if (v.kind == JV_STR) return v.u.s;
    jbuf *b = jinja_buf_new(r, 32);
    jinja_print(r, b, v);
    return jinja_buf_take(r, b);
}

const jstr *jinja_repr(jrt *r, jval v) {
    jbuf *b = jinja_buf_new(r, 32);
    repr(r, b, v, !jinja_tainted(v), 0);
    return jinja_buf_take(r, b);
}

// --- json.dumps ----------------------------------------------------------------------------------

typedef struct jdump {
    jrt *r;
    jbuf *out;
    bool ascii, trusted, sort;
    const jstr *indent; // NULL: on one line
    mx_str item_sep, key_sep;
} jdump;

static void put(jdump *d, const char *s) {
    add(d->r, d->out, s, d->trusted);
}

static void dump_escape(jdump *d, uint32_t c) {
    char tmp[16];
    static const char from[] = "\"\\\n\r\t\f\b", to[] = "\"\\nrtfb";
    const char *hit = c && c < 0x80 ? strchr(from, (int)c) : NULL;
    if (hit) {
        snprintf(tmp, sizeof tmp, "\\%c", to[hit - from]);
    } else if (c >= 0x10000) {
        unsigned v = (unsigned)c - 0x10000;
        snprintf(tmp, sizeof tmp, "\\u%04x\\u%04x", 0xd800 + (v >> 10), 0xdc00 + (v & 0x3ff));
    } else {
        snprintf(tmp, sizeof tmp, "\\u%04x", (unsigned)c);
    }
    put(d, tmp);
}

static void dump_str(jdump *d, const jstr *s) {
    put(d, "\"");
    mx_str t = jinja_text(s);
    size_t from = 0;
    jinja_charge_bytes(d->r, t.n);
    for (size_t i = 0; i < t.n;) {
        unsigned char c = (unsigned char)t.p[i];
        bool plain = c >= 0x20 && c != '"' && c != '\\' && (!d->ascii || c < 0x7f);
        if (plain) {
            i++;
            continue;
        }
        jinja_buf_add(d->r, d->out, (mx_str){t.p + from, i - from}, d->trusted);
        dump_escape(d, jinja_next_char(t, &i));
        from = i;
    }
    jinja_buf_add(d->r, d->out, (mx_str){t.p + from, t.n - from}, d->trusted);
    put(d, "\"");
}

static void dump_number(jdump *d, jval v) {
    char tmp[40];
    if (v.kind == JV_INT)
        snprintf(tmp, sizeof tmp, "%lld", (long long)v.u.i);
    else if (isnan(v.u.f))
        snprintf(tmp, sizeof tmp, "NaN");
    else if (isinf(v.u.f))
        snprintf(tmp, sizeof tmp, v.u.f < 0 ? "-Infinity" : "Infinity");
    else
        jinja_print_float(v.u.f, tmp);
    put(d, tmp);
}

static void dump_newline(jdump *d, int level) {
    if (!d->indent) return;
    put(d, "\n");
    for (int i = 0; i < level; i++) jinja_buf_add(d->r, d->out, jinja_text(d->indent), d->trusted);
}

static bool dump_scalar(jdump *d, jval v) {
    switch (v.kind) {
    case JV_NONE: put(d, "null"); return true;
    case JV_BOOL: put(d, v.u.b ? "true" : "false"); return true;
    case JV_INT:
    case JV_FLOAT: dump_number(d, v); return true;
    case JV_STR: dump_str(d, v.u.s); return true;
    default: return false;
    }
}

static void dump(jdump *d, jval v, int level);

static void dump_list(jdump *d, const jlist *l, int level) {
    if (l->n == 0) {
        put(d, "[]");
        return;
    }
    put(d, "[");
    for (size_t i = 0; i < l->n; i++) {
        if (i) jinja_buf_add(d->r, d->out, d->item_sep, d->trusted);
        dump_newline(d, level + 1);
        dump(d, l->v[i], level + 1);
    }
    dump_newline(d, level);
    put(d, "]");
}

static void dump_key(jdump *d, jval key) {
    if (key.kind == JV_STR) {
        dump_str(d, key.u.s);
        return;
    }
    if (key.kind == JV_LIST || key.kind == JV_UNDEF || key.kind > JV_STR)
        jinja_fail(d->r, MX_INVALID, "keys must be str, int, float, bool or None, not %s",
                   jinja_type_name(key));
    put(d, "\"");
    dump_scalar(d, key);
    put(d, "\"");
}

static void sort_keys(jrt *r, jpair *v, size_t n) {
    // merge sort: stable, and the comparison may leave through an error
    if (n < 2) return;
    size_t half = n / 2, i = 0, j = half, k = 0;
    sort_keys(r, v, half);
    sort_keys(r, v + half, n - half);
    jpair *tmp = JINJA_ARRAY(r, jpair, n);
    while (i < half && j < n)
        tmp[k++] = jinja_order(r, v[j].key, v[i].key, "<") < 0 ? v[j++] : v[i++];
    while (i < half) tmp[k++] = v[i++];
    while (j < n) tmp[k++] = v[j++];
    memcpy(v, tmp, n * sizeof *v);
}

static void dump_dict(jdump *d, const jdict *dict, int level) {
    if (dict->n == 0) {
        put(d, "{}");
        return;
    }
    jpair *v = dict->v;
    if (d->sort) {
        v = JINJA_ARRAY(d->r, jpair, dict->n);
        memcpy(v, dict->v, dict->n * sizeof *v);
        sort_keys(d->r, v, dict->n);
    }
    put(d, "{");
    for (size_t i = 0; i < dict->n; i++) {
        if (i) jinja_buf_add(d->r, d->out, d->item_sep, d->trusted);
        dump_newline(d, level + 1);
        dump_key(d, v[i].key);
        jinja_buf_add(d->r, d->out, d->key_sep, d->trusted);
        dump(d, v[i].value, level + 1);
    }
    dump_newline(d, level);
    put(d, "}");
}

static void dump(jdump *d, jval v, int level) {
    jinja_charge(d->r, 1);
    if (dump_scalar(d, v)) return;
    if (v.kind == JV_DICT) {
        dump_dict(d, v.u.d, level);
    } else if (v.kind == JV_LIST &&
               (v.u.l->form == JL_LIST || v.u.l->form == JL_TUPLE || v.u.l->form == JL_GROUP)) {
        dump_list(d, v.u.l, level);
    } else {
        jinja_fail(d->r, MX_INVALID, "Object of type %s is not JSON serializable",
                   jinja_type_name(v));
    }
}

static void dump_separators(jdump *d, jval v) {
    d->item_sep = mx_str_of(d->indent ? "," : ", ");
    d->key_sep = mx_str_of(": ");
    if (v.kind == JV_MISSING || v.kind == JV_NONE) return;
    bool ok = v.kind == JV_LIST && v.u.l->n == 2 && v.u.l->v[0].kind == JV_STR &&
              v.u.l->v[1].kind == JV_STR;
    if (!ok) jinja_fail(d->r, MX_INVALID, "tojson: separators must be two strings");
    d->item_sep = jinja_text(v.u.l->v[0].u.s);
    d->key_sep = jinja_text(v.u.l->v[1].u.s);
    d->trusted &= !jinja_tainted(v);
}

static void dump_indent(jdump *d, jval v) {
    int64_t n;
    if (v.kind == JV_MISSING || v.kind == JV_NONE) return;
    if (v.kind == JV_STR) {
        d->indent = v.u.s;
        d->trusted &= jinja_str_trusted(v.u.s);
        return;
    }
    if (!jinja_as_int(v, &n) || n > 1000)
        jinja_fail(d->r, MX_INVALID, "tojson: indent must be a small number or a string");
    jbuf *b = jinja_buf_new(d->r, 32);
    for (; n > 0; n--) add(d->r, b, " ", true);
    d->indent = jinja_buf_take(d->r, b);
}

// tojson(value, ensure_ascii, indent, separators, sort_keys)
jval jinja_tojson(jrt *r, jval self, const jargs *a) {
    jdump d = {.r = r, .trusted = !jinja_tainted(self)};
    d.ascii = jv_is_given(a->v[0]) && jinja_truth(a->v[0]);
    dump_indent(&d, a->v[1]);
    dump_separators(&d, a->v[2]);
    d.sort = jv_is_given(a->v[3]) && jinja_truth(a->v[3]);
    d.out = jinja_buf_new(r, 256);
    dump(&d, self, 0);
    return jv_str(jinja_buf_take(r, d.out));
}

jval jinja_fromjson(jrt *r, jval self, const jargs *a) {
    (void)a;
    if (self.kind != JV_STR) jinja_fail(r, MX_INVALID, "from_json needs a string");
    mx_err why = {0};
    jjson *j = JINJA_NEW(r, jjson);
    j->json = mx_json_parse(self.u.s->p, self.u.s->n, JINJA_MAX_STRING, MX_JSON_CONFIG, "from_json",
                            &why);
    if (!j->json) jinja_fail(r, MX_INVALID, "%s", why.msg);
    j->next = r->jsons;
    r->jsons = j;
    jinja_charge(r, self.u.s->n / 64);
    return jinja_from_json(r, j->json, !jinja_str_trusted(self.u.s), 0);
}
