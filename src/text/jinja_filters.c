// Filters on single values: text, numbers, defaults, JSON; and the look-up over all filters. The
// filters over sequences are in jinja_filters_seq.c.
#include "text/jinja_text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static int64_t int_arg(jrt *r, jval v, int64_t if_absent, const char *what) {
    int64_t i;
    if (!jv_is_given(v)) return if_absent;
    if (v.kind == JV_UNDEF) jinja_fail_undef(r, v);
    if (!jinja_as_int(v, &i))
        jinja_fail(r, MX_INVALID, "%s: expected an integer, got %s", what, jinja_type_name(v));
    return i;
}

static bool flag_arg(jval v) {
    return jv_is_given(v) && jinja_truth(v);
}

// --- text ----------------------------------------------------------------------------------------

#define CASE_FILTER(name, how)                                                                     \
    static jval name(jrt *r, jval self, const jargs *a) {                                          \
        (void)a;                                                                                   \
        return jv_str(jinja_text_case(r, jinja_to_str(r, self), how));                             \
    }
CASE_FILTER(f_upper, JCASE_UPPER)
CASE_FILTER(f_lower, JCASE_LOWER)
CASE_FILTER(f_capitalize, JCASE_CAPITALIZE)
CASE_FILTER(f_title, JCASE_FILTER_TITLE)

static jval f_trim(jrt *r, jval self, const jargs *a) {
    const jstr *chars = NULL;
    if (jv_is_given(a->v[0]) && a->v[0].kind != JV_NONE) chars = jinja_to_str(r, a->v[0]);
    return jv_str(jinja_text_strip(r, jinja_to_str(r, self), chars, true, true));
}

static jval f_replace(jrt *r, jval self, const jargs *a) {
    const jstr *s = jinja_to_str(r, self), *old = jinja_to_str(r, a->v[0]);
    const jstr *new = jinja_to_str(r, a->v[1]);
    int64_t max = a->v[2].kind == JV_NONE ? -1 : int_arg(r, a->v[2], -1, "replace");
    jstr *plain = JINJA_NEW(r, jstr); // the filter, unlike the method, loses the mark
    *plain = *s;
    plain->markup = false;
    return jv_str(jinja_text_replace(r, plain, old, new, max));
}

static jval f_string(jrt *r, jval self, const jargs *a) {
    (void)a;
    return jv_str(jinja_to_str(r, self));
}

static jval f_safe(jrt *r, jval self, const jargs *a) {
    (void)a;
    return jv_str(jinja_text_markup(r, jinja_to_str(r, self)));
}

static jval f_escape(jrt *r, jval self, const jargs *a) {
    (void)a;
    if (self.kind == JV_STR && self.u.s->markup) return self;
    return jv_str(jinja_text_escape(r, jinja_to_str(r, self)));
}

static jval f_forceescape(jrt *r, jval self, const jargs *a) {
    (void)a;
    return jv_str(jinja_text_escape(r, jinja_to_str(r, self)));
}

static jval f_format(jrt *r, jval self, const jargs *a) {
    if (a->n && a->n_kw)
        jinja_fail(r, MX_INVALID, "format: positional and keyword arguments at the same time");
    jval args;
    if (a->n_kw) {
        jdict *d = jinja_dict_new(r, a->n_kw);
        for (size_t i = 0; i < a->n_kw; i++)
            jinja_dict_set(r, d, jv_str(jinja_str_view(r, a->kw[i], false)), a->kw_v[i]);
        args = jinja_dict_val(d);
    } else {
        jlist *l = jinja_list_new(r, JL_TUPLE, a->n);
        for (size_t i = 0; i < a->n; i++) jinja_list_add(r, l, a->v[i]);
        args = jinja_list_val(l);
    }
    return jv_str(jinja_format_percent(r, jinja_to_str(r, self), args));
}

static jval f_center(jrt *r, jval self, const jargs *a) {
    const jstr *space = jinja_str_view(r, mx_str_of(" "), true);
    int64_t width = int_arg(r, a->v[0], 80, "center");
    return jv_str(jinja_text_pad(r, jinja_to_str(r, self), width, space, '^'));
}

static const jstr *indent_text(jrt *r, jval width) {
    if (width.kind == JV_STR) return width.u.s;
    int64_t n = int_arg(r, width, 4, "indent");
    if (n > 1000) jinja_fail(r, MX_TOOLARGE, "indent: width %lld", (long long)n);
    jbuf *b = jinja_buf_new(r, 32);
    for (; n > 0; n--) jinja_buf_add(r, b, mx_str_of(" "), true);
    return jinja_buf_take(r, b);
}

// Blanks and newlines put in between are trusted when the whole text is.
static jval f_indent(jrt *r, jval self, const jargs *a) {
    if (self.kind == JV_UNDEF) jinja_fail_undef(r, self);
    if (self.kind != JV_STR)
        jinja_fail(r, MX_INVALID, "indent needs text, got %s", jinja_type_name(self));
    const jstr *in = indent_text(r, a->v[0]);
    bool first = flag_arg(a->v[1]), blank = flag_arg(a->v[2]);
    bool trusted = jinja_str_trusted(self.u.s) && jinja_str_trusted(in);
    const jstr *s = jinja_str_concat(r, self.u.s, jinja_str_view(r, mx_str_of("\n"), trusted));
    const jlist *lines = jinja_text_lines(r, s, false);
    jbuf *b = jinja_buf_new(r, s->n + 64);
    for (size_t i = 0; i < lines->n; i++) {
        const jstr *line = lines->v[i].u.s;
        if (i) jinja_buf_add(r, b, mx_str_of("\n"), trusted);
        if (i ? blank || line->n : first) jinja_buf_add(r, b, jinja_text(in), trusted);
        jinja_buf_str(r, b, line);
    }
    return jv_str(jinja_buf_take(r, b));
}

static jval f_truncate(jrt *r, jval self, const jargs *a) {
    const jstr *end = jinja_str_view(r, mx_str_of("..."), true);
    int64_t length = int_arg(r, a->v[0], 255, "truncate"), leeway = 5;
    if (jv_is_given(a->v[2])) end = jinja_to_str(r, a->v[2]);
    if (a->v[3].kind != JV_NONE) leeway = int_arg(r, a->v[3], 5, "truncate");
    if (length < (int64_t)end->n_chars || leeway < 0)
        jinja_fail(r, MX_INVALID, "truncate: length or leeway too small");
    if (jinja_length(r, self) - leeway <= length) return self; // whatever has a length
    if (self.kind != JV_STR)
        jinja_fail(r, MX_INVALID, "truncate needs text, got %s", jinja_type_name(self));
    const jstr *s = self.u.s;
    size_t keep = jinja_str_offset(s, (size_t)length - end->n_chars);
    const jstr *head = jinja_str_part(r, s, 0, keep);
    if (!flag_arg(a->v[1])) {
        size_t blank = jinja_rfind(r, jinja_text(head), mx_str_of(" "));
        if (blank != SIZE_MAX) head = jinja_str_part(r, head, 0, blank);
    }
    if (!jinja_str_trusted(s)) end = jinja_str_view(r, jinja_text(end), false);
    return jv_str(jinja_str_concat(r, head, end));
}

static jval f_wordcount(jrt *r, jval self, const jargs *a) {
    (void)a;
    const jstr *s = jinja_to_str(r, self);
    int64_t n = 0;
    bool in_word = false;
    jinja_charge_bytes(r, s->n * 8);
    for (size_t at = 0; at < s->n;) {
        size_t from = at;
        uint32_t c = jinja_next_char(jinja_text(s), &at);
        jstr one = {.p = s->p + from, .n = at - from, .n_chars = 1};
        bool word = c == '_' || jinja_text_all(r, &one, JCLASS_ALNUM);
        n += word && !in_word;
        in_word = word;
    }
    return jv_taint(jv_int(n), !jinja_str_trusted(s));
}

const jfunc jinja_text_filters[] = {
    {"upper", f_upper, "", 0},
    {"lower", f_lower, "", 0},
    {"capitalize", f_capitalize, "", 0},
    {"title", f_title, "", 0},
    {"trim", f_trim, "chars", 0},
    {"replace", f_replace, "old,new,count", 2},
    {"string", f_string, "", 0},
    {"safe", f_safe, "", 0},
    {"escape", f_escape, "", 0},
    {"e", f_escape, "", 0},
    {"forceescape", f_forceescape, "", 0},
    {"format", f_format, "*", 0},
    {"center", f_center, "width", 0},
    {"indent", f_indent, "width,first,blank", 0},
    {"truncate", f_truncate, "length,killwords,end,leeway", 0},
    {"wordcount", f_wordcount, "", 0},
};
const size_t jinja_n_text_filters = MX_COUNT(jinja_text_filters);

// --- numbers and defaults ------------------------------------------------------------------------

static jval f_default(jrt *r, jval self, const jargs *a) {
    (void)r;
    bool use = self.kind == JV_UNDEF || (flag_arg(a->v[1]) && !jinja_truth(self));
    if (!use) return self;
    return jv_is_given(a->v[0]) ? a->v[0] : jv_str(&jinja_empty);
}

static jval f_abs(jrt *r, jval self, const jargs *a) {
    (void)a;
    double f;
    if (self.kind == JV_UNDEF) jinja_fail_undef(r, self);
    if (!jinja_as_number(self, &f)) jinja_fail(r, MX_INVALID, "abs of a %s", jinja_type_name(self));
    if (self.kind == JV_FLOAT) return jv_taint(jv_float(fabs(f)), self.tainted);
    return f < 0 ? jinja_negate(r, self)
                 : jv_taint(jv_int(self.kind == JV_BOOL ? self.u.b : self.u.i), self.tainted);
}

// Text without blanks around and underscores between digits, for number parsing.
static bool clean_number(jrt *r, const jstr *s, char out[128]) {
    s = jinja_text_strip(r, s, NULL, true, true);
    size_t n = 0;
    for (size_t i = 0; i < s->n; i++) {
        if (s->p[i] == '_' && i && i + 1 < s->n && s->p[i - 1] != '_') continue;
        if (n == 127 || s->p[i] == 0) return false;
        out[n++] = s->p[i];
    }
    out[n] = 0;
    return n > 0;
}

static bool parse_int(const char *s, int base, int64_t *out) {
    const char *p = s + (*s == '-' || *s == '+');
    bool hex = base == 16 && p[0] == '0' && (p[1] | 0x20) == 'x';
    bool prefixed = (base == 2 && p[0] == '0' && (p[1] | 0x20) == 'b') ||
                    (base == 8 && p[0] == '0' && (p[1] | 0x20) == 'o');
    char text[130];
    snprintf(text, sizeof text, "%s%s", *s == '-' ? "-" : "", p + (hex || prefixed ? 2 : 0));
    const char *digits = text + (*text == '-');
    if (!*digits || *digits == '-' || *digits == '+' || *digits == ' ') return false;
    char *end;
    *out = strtoll(text, &end, base);
    return !*end && *out != INT64_MAX && *out != INT64_MIN;
}

static bool parse_float(const char *s, double *out) {
    const char *p = s + (*s == '-' || *s == '+');
    bool word =
        strcasecmp(p, "inf") == 0 || strcasecmp(p, "nan") == 0 || strcasecmp(p, "infinity") == 0;
    if (!word && p[strspn(p, "0123456789.eE+-")]) return false;
    char *end;
    *out = strtod(s, &end);
    return end != s && !*end && *p != '+' && *p != '-';
}

static jval f_int(jrt *r, jval self, const jargs *a) {
    jval dflt = jv_is_given(a->v[0]) ? a->v[0] : jv_int(0);
    int64_t i, base = int_arg(r, a->v[1], 10, "int");
    double f = 0;
    char text[128];
    bool tainted = jinja_tainted(self);
    if (self.kind == JV_UNDEF) jinja_fail_undef(r, self);
    if (jinja_as_int(self, &i)) return jv_taint(jv_int(i), tainted);
    if (base != 0 && (base < 2 || base > 36)) return dflt;
    bool ok = jinja_as_number(self, &f);
    if (self.kind == JV_STR && clean_number(r, self.u.s, text)) {
        if (parse_int(text, (int)base, &i)) return jv_taint(jv_int(i), tainted);
        ok = parse_float(text, &f);
    }
    if (!ok || !isfinite(f)) return dflt;
    if (fabs(f) >= 9.2e18) jinja_fail(r, MX_INVALID, "integer beyond 64 bits");
    return jv_taint(jv_int((int64_t)f), tainted);
}

static jval f_float(jrt *r, jval self, const jargs *a) {
    double f;
    char text[128];
    bool tainted = jinja_tainted(self);
    if (self.kind == JV_UNDEF) jinja_fail_undef(r, self);
    if (jinja_as_number(self, &f)) return jv_taint(jv_float(f), tainted);
    if (self.kind == JV_STR && clean_number(r, self.u.s, text) && parse_float(text, &f))
        return jv_taint(jv_float(f), tainted);
    return jv_is_given(a->v[0]) ? a->v[0] : jv_float(0);
}

static double round_to(double f, int64_t places) {
    char text[400];
    if (!isfinite(f) || places > 300) return f;
    if (places >= 0) {
        snprintf(text, sizeof text, "%.*f", (int)places, f); // exact, half to even
        return strtod(text, NULL);
    }
    if (places < -308) return 0;
    double unit = pow(10, (double)-places);
    return nearbyint(f / unit) * unit;
}

static jval f_round(jrt *r, jval self, const jargs *a) {
    double f;
    int64_t places = int_arg(r, a->v[0], 0, "round");
    const jstr *how = jv_is_given(a->v[1]) ? jinja_to_str(r, a->v[1]) : NULL;
    if (self.kind == JV_UNDEF) jinja_fail_undef(r, self);
    if (!jinja_as_number(self, &f))
        jinja_fail(r, MX_INVALID, "round of a %s", jinja_type_name(self));
    bool tainted = jinja_tainted(self);
    if (!how || mx_str_is(jinja_text(how), "common")) {
        if (self.kind == JV_FLOAT) return jv_taint(jv_float(round_to(f, places)), tainted);
        if (places >= 0) return jv_taint(jv_int((int64_t)f), tainted);
        return jv_taint(jv_int((int64_t)round_to(f, places)), tainted);
    }
    bool up = mx_str_is(jinja_text(how), "ceil");
    if (!up && !mx_str_is(jinja_text(how), "floor"))
        jinja_fail(r, MX_INVALID, "round: method must be common, ceil or floor");
    double unit = pow(10, (double)places);
    return jv_taint(jv_float((up ? ceil(f * unit) : floor(f * unit)) / unit), tainted);
}

static const jfunc value_filters[] = {
    {"default", f_default, "default_value,boolean", 0},
    {"d", f_default, "default_value,boolean", 0},
    {"abs", f_abs, "", 0},
    {"int", f_int, "default,base", 0},
    {"float", f_float, "default", 0},
    {"round", f_round, "precision,method", 0},
    {"tojson", jinja_tojson, "ensure_ascii,indent,separators,sort_keys", 0},
    {"from_json", jinja_fromjson, "", 0},
};

const jfunc *jinja_find_filter(mx_str name) {
    const jfunc *f = jinja_find_in(value_filters, MX_COUNT(value_filters), name);
    if (!f) f = jinja_find_in(jinja_text_filters, jinja_n_text_filters, name);
    if (!f) f = jinja_find_in(jinja_seq_filters, jinja_n_seq_filters, name);
    return f;
}

bool jinja_is_unsupported_filter(mx_str name) {
    static const char *const names[] = {"filesizeformat", "pprint", "random",   "striptags",
                                        "urlencode",      "urlize", "wordwrap", "xmlattr"};
    for (size_t i = 0; i < MX_COUNT(names); i++)
        if (mx_str_is(name, names[i])) return true;
    return false;
}
