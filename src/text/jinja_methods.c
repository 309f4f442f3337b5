// Methods of strings, dictionaries and lists. Those that would change a value are refused, as in
// the sandbox templates are written for. Tables only: the work is in jinja_text.c.
#include "text/jinja_text.h"

const jfunc *jinja_find_in(const jfunc *table, size_t n, mx_str name) {
    for (size_t i = 0; i < n; i++)
        if (mx_str_is(name, table[i].name)) return &table[i];
    return NULL;
}

// --- arguments -----------------------------------------------------------------------------------

static const jstr *text_arg(jrt *r, jval v, const char *method) {
    if (v.kind == JV_UNDEF) jinja_fail_undef(r, v);
    if (v.kind != JV_STR)
        jinja_fail(r, MX_INVALID, "%s: expected text, got %s", method, jinja_type_name(v));
    return v.u.s;
}

static const jstr *optional_text(jrt *r, jval v, const char *method) {
    return v.kind == JV_MISSING || v.kind == JV_NONE ? NULL : text_arg(r, v, method);
}

static int64_t int_arg(jrt *r, jval v, int64_t if_absent, const char *method) {
    int64_t i;
    if (v.kind == JV_MISSING || v.kind == JV_NONE) return if_absent;
    if (v.kind == JV_UNDEF) jinja_fail_undef(r, v);
    if (!jinja_as_int(v, &i))
        jinja_fail(r, MX_INVALID, "%s: expected an integer, got %s", method, jinja_type_name(v));
    return i;
}

// --- strings -------------------------------------------------------------------------------------

#define CASE_METHOD(name, how)                                                                     \
    static jval name(jrt *r, jval self, const jargs *a) {                                          \
        (void)a;                                                                                   \
        return jv_str(jinja_text_case(r, self.u.s, how));                                          \
    }
CASE_METHOD(str_upper, JCASE_UPPER)
CASE_METHOD(str_lower, JCASE_LOWER)
CASE_METHOD(str_swapcase, JCASE_SWAP)
CASE_METHOD(str_capitalize, JCASE_CAPITALIZE)
CASE_METHOD(str_title, JCASE_TITLE)

#define CLASS_METHOD(name, how)                                                                    \
    static jval name(jrt *r, jval self, const jargs *a) {                                          \
        (void)a;                                                                                   \
        return jv_bool(jinja_text_all(r, self.u.s, how));                                          \
    }
CLASS_METHOD(str_isalpha, JCLASS_ALPHA)
CLASS_METHOD(str_isalnum, JCLASS_ALNUM)
CLASS_METHOD(str_isdigit, JCLASS_DIGIT)
CLASS_METHOD(str_isnumeric, JCLASS_NUMERIC)
CLASS_METHOD(str_isspace, JCLASS_SPACE)
CLASS_METHOD(str_isupper, JCLASS_UPPER)
CLASS_METHOD(str_islower, JCLASS_LOWER)
CLASS_METHOD(str_istitle, JCLASS_TITLE)
CLASS_METHOD(str_isascii, JCLASS_ASCII)
CLASS_METHOD(str_isidentifier, JCLASS_NAME)

#define STRIP_METHOD(name, left, right)                                                            \
    static jval name(jrt *r, jval self, const jargs *a) {                                          \
        const jstr *chars = optional_text(r, a->v[0], "strip");                                    \
        return jv_str(jinja_text_strip(r, self.u.s, chars, left, right));                          \
    }
STRIP_METHOD(str_strip, true, true)
STRIP_METHOD(str_lstrip, true, false)
STRIP_METHOD(str_rstrip, false, true)

static jval str_split(jrt *r, jval self, const jargs *a) {
    const jstr *sep = optional_text(r, a->v[0], "split");
    int64_t max = int_arg(r, a->v[1], -1, "split");
    return jinja_list_val(jinja_text_split(r, self.u.s, sep, max, false));
}

static jval str_rsplit(jrt *r, jval self, const jargs *a) {
    const jstr *sep = optional_text(r, a->v[0], "rsplit");
    int64_t max = int_arg(r, a->v[1], -1, "rsplit");
    return jinja_list_val(jinja_text_split(r, self.u.s, sep, max, true));
}

static jval str_splitlines(jrt *r, jval self, const jargs *a) {
    bool keep = jv_is_given(a->v[0]) && jinja_truth(a->v[0]);
    return jinja_list_val(jinja_text_lines(r, self.u.s, keep));
}

// The part of s that start and end (characters, possibly negative) cut out. False when it is
// empty because start lies behind the end.
static bool window(jrt *r, const jstr *s, const jargs *a, size_t *from, size_t *to) {
    int64_t n = (int64_t)s->n_chars;
    int64_t lo = int_arg(r, a->v[1], 0, "start"), hi = int_arg(r, a->v[2], n, "end");
    if (lo < 0) lo = MX_MAX(lo + n, 0);
    if (hi < 0) hi = MX_MAX(hi + n, 0);
    hi = MX_MIN(hi, n);
    if (lo > hi) return false;
    *from = jinja_str_offset(s, (size_t)lo);
    *to = jinja_str_offset(s, (size_t)hi);
    return true;
}

static jval affix(jrt *r, jval self, const jargs *a, bool at_end) {
    size_t from, to;
    const char *name = at_end ? "endswith" : "startswith";
    if (!window(r, self.u.s, a, &from, &to)) return jv_bool(false);
    mx_str part = {self.u.s->p + from, to - from};
    jval *v = a->v;
    size_t n = 1;
    if (a->v[0].kind == JV_LIST && a->v[0].u.l->form == JL_TUPLE) {
        v = a->v[0].u.l->v;
        n = a->v[0].u.l->n;
    }
    for (size_t i = 0; i < n; i++) {
        mx_str t = jinja_text(text_arg(r, v[i], name));
        if (at_end ? mx_str_ends(part, t) : mx_str_starts(part, t)) return jv_bool(true);
    }
    return jv_bool(false);
}

static jval str_startswith(jrt *r, jval self, const jargs *a) {
    return affix(r, self, a, false);
}

static jval str_endswith(jrt *r, jval self, const jargs *a) {
    return affix(r, self, a, true);
}

static jval str_replace(jrt *r, jval self, const jargs *a) {
    const jstr *old = text_arg(r, a->v[0], "replace"), *new = text_arg(r, a->v[1], "replace");
    int64_t max = int_arg(r, a->v[2], -1, "replace");
    return jv_str(jinja_text_replace(r, self.u.s, old, new, max));
}

static int64_t find_in(jrt *r, jval self, const jargs *a, bool last, const char *name) {
    size_t from, to;
    mx_str needle = jinja_text(text_arg(r, a->v[0], name));
    if (!window(r, self.u.s, a, &from, &to)) return -1;
    mx_str part = {self.u.s->p + from, to - from};
    jinja_charge_bytes(r, part.n * 4);
    size_t hit = last ? jinja_rfind(r, part, needle) : jinja_find(part, needle, 0);
    if (hit == SIZE_MAX) return -1;
    jinja_charge_bytes(r, from + hit);
    return (int64_t)jinja_count_chars((mx_str){self.u.s->p, from + hit});
}

static jval found(jval self, int64_t i) {
    return jv_taint(jv_int(i), jinja_tainted(self));
}

static jval str_find(jrt *r, jval self, const jargs *a) {
    return found(self, find_in(r, self, a, false, "find"));
}

static jval str_rfind(jrt *r, jval self, const jargs *a) {
    return found(self, find_in(r, self, a, true, "rfind"));
}

static jval str_index(jrt *r, jval self, const jargs *a) {
    int64_t i = find_in(r, self, a, false, "index");
    if (i < 0) jinja_fail(r, MX_INVALID, "substring not found");
    return found(self, i);
}

static jval str_rindex(jrt *r, jval self, const jargs *a) {
    int64_t i = find_in(r, self, a, true, "rindex");
    if (i < 0) jinja_fail(r, MX_INVALID, "substring not found");
    return found(self, i);
}

static jval str_count(jrt *r, jval self, const jargs *a) {
    size_t from, to;
    int64_t n = 0;
    mx_str needle = jinja_text(text_arg(r, a->v[0], "count"));
    if (!window(r, self.u.s, a, &from, &to)) return jv_int(0);
    mx_str part = {self.u.s->p + from, to - from};
    if (needle.n == 0) return found(self, (int64_t)jinja_count_chars(part) + 1);
    jinja_charge_bytes(r, part.n * 4);
    for (size_t at = 0; (at = jinja_find(part, needle, at)) != SIZE_MAX; at += needle.n) n++;
    return found(self, n);
}

static jval str_join(jrt *r, jval self, const jargs *a) {
    return jv_str(jinja_text_join(r, self.u.s, jinja_iterate(r, a->v[0]), true));
}

static jval str_format(jrt *r, jval self, const jargs *a) {
    return jv_str(jinja_format_braces(r, self.u.s, a));
}

static jval str_removeprefix(jrt *r, jval self, const jargs *a) {
    const jstr *s = self.u.s, *cut = text_arg(r, a->v[0], "removeprefix");
    bool is = mx_str_starts(jinja_text(s), jinja_text(cut));
    return jv_str(jinja_str_part(r, s, is ? cut->n : 0, s->n));
}

static jval str_removesuffix(jrt *r, jval self, const jargs *a) {
    const jstr *s = self.u.s, *cut = text_arg(r, a->v[0], "removesuffix");
    bool is = mx_str_ends(jinja_text(s), jinja_text(cut));
    return jv_str(jinja_str_part(r, s, 0, is ? s->n - cut->n : s->n));
}

static jval partition(jrt *r, jval self, const jargs *a, bool last) {
    const jstr *s = self.u.s, *sep = text_arg(r, a->v[0], "partition");
    jinja_charge_bytes(r, s->n);
    if (sep->n == 0) jinja_fail(r, MX_INVALID, "empty separator");
    size_t hit = last ? jinja_rfind(r, jinja_text(s), jinja_text(sep))
                      : jinja_find(jinja_text(s), jinja_text(sep), 0);
    size_t a_end = hit, b_end = hit + sep->n;
    if (hit == SIZE_MAX) a_end = b_end = last ? 0 : s->n;
    jlist *l = jinja_list_new(r, JL_TUPLE, 3);
    jinja_list_add(r, l, jv_str(jinja_str_part(r, s, 0, a_end)));
    jinja_list_add(r, l, jv_str(jinja_str_part(r, s, a_end, b_end)));
    jinja_list_add(r, l, jv_str(jinja_str_part(r, s, b_end, s->n)));
    return jinja_list_val(l);
}

static jval str_partition(jrt *r, jval self, const jargs *a) {
    return partition(r, self, a, false);
}

static jval str_rpartition(jrt *r, jval self, const jargs *a) {
    return partition(r, self, a, true);
}

static jval pad(jrt *r, jval self, const jargs *a, char align) {
    const jstr *fill = optional_text(r, a->v[1], "fill");
    if (!fill) fill = jinja_str_view(r, mx_str_of(" "), true);
    return jv_str(jinja_text_pad(r, self.u.s, int_arg(r, a->v[0], 0, "width"), fill, align));
}

static jval str_center(jrt *r, jval self, const jargs *a) {
    return pad(r, self, a, '^');
}

static jval str_ljust(jrt *r, jval self, const jargs *a) {
    return pad(r, self, a, '<');
}

static jval str_rjust(jrt *r, jval self, const jargs *a) {
    return pad(r, self, a, '>');
}

static jval str_zfill(jrt *r, jval self, const jargs *a) {
    const jstr *s = self.u.s, *zero = jinja_str_view(r, mx_str_of("0"), true);
    int64_t width = int_arg(r, a->v[0], 0, "zfill");
    if (s->n == 0 || (s->p[0] != '-' && s->p[0] != '+'))
        return jv_str(jinja_text_pad(r, s, width, zero, '>'));
    const jstr *rest = jinja_str_part(r, s, 1, s->n);
    rest = jinja_text_pad(r, rest, width - 1, zero, '>');
    return jv_str(jinja_str_concat(r, jinja_str_part(r, s, 0, 1), rest));
}

#define UNSUPPORTED_METHOD(name, text)                                                             \
    static jval name(jrt *r, jval self, const jargs *a) {                                          \
        (void)self;                                                                                \
        (void)a;                                                                                   \
        jinja_fail(r, MX_UNSUPPORTED, "unsupported method '%s'", text);                            \
    }
UNSUPPORTED_METHOD(str_encode, "encode")
UNSUPPORTED_METHOD(str_translate, "translate")
UNSUPPORTED_METHOD(str_maketrans, "maketrans")
UNSUPPORTED_METHOD(str_format_map, "format_map")
UNSUPPORTED_METHOD(str_expandtabs, "expandtabs")
UNSUPPORTED_METHOD(str_isprintable, "isprintable")

static const jfunc str_methods[] = {
    {"upper", str_upper, "", 0},
    {"lower", str_lower, "", 0},
    {"casefold", str_lower, "", 0},
    {"swapcase", str_swapcase, "", 0},
    {"capitalize", str_capitalize, "", 0},
    {"title", str_title, "", 0},
    {"strip", str_strip, "chars", 0},
    {"lstrip", str_lstrip, "chars", 0},
    {"rstrip", str_rstrip, "chars", 0},
    {"split", str_split, "sep,maxsplit", 0},
    {"rsplit", str_rsplit, "sep,maxsplit", 0},
    {"splitlines", str_splitlines, "keepends", 0},
    {"startswith", str_startswith, "prefix,start,end", 1},
    {"endswith", str_endswith, "suffix,start,end", 1},
    {"replace", str_replace, "old,new,count", 2},
    {"find", str_find, "sub,start,end", 1},
    {"rfind", str_rfind, "sub,start,end", 1},
    {"index", str_index, "sub,start,end", 1},
    {"rindex", str_rindex, "sub,start,end", 1},
    {"count", str_count, "sub,start,end", 1},
    {"join", str_join, "iterable", 1},
    {"format", str_format, "*", 0},
    {"removeprefix", str_removeprefix, "prefix", 1},
    {"removesuffix", str_removesuffix, "suffix", 1},
    {"partition", str_partition, "sep", 1},
    {"rpartition", str_rpartition, "sep", 1},
    {"center", str_center, "width,fillchar", 1},
    {"ljust", str_ljust, "width,fillchar", 1},
    {"rjust", str_rjust, "width,fillchar", 1},
    {"zfill", str_zfill, "width", 1},
    {"isalpha", str_isalpha, "", 0},
    {"isalnum", str_isalnum, "", 0},
    {"isdigit", str_isdigit, "", 0},
    {"isdecimal", str_isdigit, "", 0},
    {"isnumeric", str_isnumeric, "", 0},
    {"isspace", str_isspace, "", 0},
    {"isupper", str_isupper, "", 0},
    {"islower", str_islower, "", 0},
    {"istitle", str_istitle, "", 0},
    {"isascii", str_isascii, "", 0},
    {"isidentifier", str_isidentifier, "", 0},
    {"encode", str_encode, "*", 0},
    {"translate", str_translate, "*", 0},
    {"maketrans", str_maketrans, "*", 0},
    {"format_map", str_format_map, "*", 0},
    {"expandtabs", str_expandtabs, "*", 0},
    {"isprintable", str_isprintable, "*", 0},
};

// --- dictionaries and lists ----------------------------------------------------------------------

static jval dict_get(jrt *r, jval self, const jargs *a) {
    const jpair *p = jinja_dict_find(r, self.u.d, a->v[0]);
    if (p) return p->value;
    return jv_is_given(a->v[1]) ? a->v[1] : jv_none();
}

static jval dict_view(jrt *r, jval self, jform form) {
    const jdict *d = self.u.d;
    jlist *l = jinja_list_new(r, form, d->n);
    l->tainted = jinja_tainted(self);
    for (size_t i = 0; i < d->n; i++) {
        const jpair *p = &d->v[i];
        jinja_list_add(r, l,
                       form == JL_KEYS     ? p->key
                       : form == JL_VALUES ? p->value
                                           : jinja_pair(r, p->key, p->value));
    }
    jinja_charge(r, d->n / 4);
    return jinja_list_val(l);
}

static jval dict_items(jrt *r, jval self, const jargs *a) {
    (void)a;
    return dict_view(r, self, JL_ITEMS);
}

static jval dict_keys(jrt *r, jval self, const jargs *a) {
    (void)a;
    return dict_view(r, self, JL_KEYS);
}

static jval dict_values(jrt *r, jval self, const jargs *a) {
    (void)a;
    return dict_view(r, self, JL_VALUES);
}

static jval self_copy(jrt *r, jval self, const jargs *a) {
    (void)r;
    (void)a;
    return self; // values never change
}

static const jfunc dict_methods[] = {{"get", dict_get, "key,default", 1},
                                     {"items", dict_items, "", 0},
                                     {"keys", dict_keys, "", 0},
                                     {"values", dict_values, "", 0},
                                     {"copy", self_copy, "", 0}};

static jval list_count(jrt *r, jval self, const jargs *a) {
    int64_t n = 0;
    jinja_charge(r, self.u.l->n);
    for (size_t i = 0; i < self.u.l->n; i++) n += jinja_equal(r, self.u.l->v[i], a->v[0]);
    return jv_int(n);
}

static jval list_index(jrt *r, jval self, const jargs *a) {
    jinja_charge(r, self.u.l->n);
    for (size_t i = 0; i < self.u.l->n; i++)
        if (jinja_equal(r, self.u.l->v[i], a->v[0])) return jv_int((int64_t)i);
    jinja_fail(r, MX_INVALID, "the value is not in the list");
}

static const jfunc list_methods[] = {{"count", list_count, "value", 1},
                                     {"index", list_index, "value", 1},
                                     {"copy", self_copy, "", 0}};

const jfunc *jinja_find_method(jval self, mx_str name) {
    switch (self.kind) {
    case JV_STR: return jinja_find_in(str_methods, MX_COUNT(str_methods), name);
    case JV_DICT: return jinja_find_in(dict_methods, MX_COUNT(dict_methods), name);
    case JV_LIST:
        if (self.u.l->form > JL_RANGE && self.u.l->form != JL_GROUP) return NULL;
        return jinja_find_in(list_methods, MX_COUNT(list_methods) - (self.u.l->form != JL_LIST),
                             name);
    default: return NULL;
    }
}

bool jinja_is_mutator(jval self, mx_str name) {
    static const char *const of_dict[] = {"clear", "pop", "popitem", "setdefault", "update"},
                             *const of_list[] = {"append", "clear", "pop",    "reverse",
                                                 "insert", "sort",  "extend", "remove"};
    bool dict = self.kind == JV_DICT;
    if (!dict && (self.kind != JV_LIST || self.u.l->form != JL_LIST)) return false;
    const char *const *names = dict ? of_dict : of_list;
    size_t n = dict ? MX_COUNT(of_dict) : MX_COUNT(of_list);
    for (size_t i = 0; i < n; i++)
        if (mx_str_is(name, names[i])) return true;
    return false;
}
