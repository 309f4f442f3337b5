// Tests of templates (`x is defined`) and global functions (range, namespace, strftime_now …).
#include "text/jinja_text.h"

#include <math.h>
#include <time.h>

#define KIND_TEST(name, condition)                                                                 \
    static jval name(jrt *r, jval v, const jargs *a) {                                             \
        (void)r;                                                                                   \
        (void)a;                                                                                   \
        return jv_bool(condition);                                                                 \
    }
KIND_TEST(test_defined, v.kind != JV_UNDEF)
KIND_TEST(test_undefined, v.kind == JV_UNDEF)
KIND_TEST(test_none, v.kind == JV_NONE)
KIND_TEST(test_boolean, v.kind == JV_BOOL)
KIND_TEST(test_true, v.kind == JV_BOOL && v.u.b)
KIND_TEST(test_false, v.kind == JV_BOOL && !v.u.b)
KIND_TEST(test_integer, v.kind == JV_INT)
KIND_TEST(test_float, v.kind == JV_FLOAT)
KIND_TEST(test_number, v.kind == JV_INT || v.kind == JV_FLOAT || v.kind == JV_BOOL)
KIND_TEST(test_string, v.kind == JV_STR)
KIND_TEST(test_mapping, v.kind == JV_DICT)
KIND_TEST(test_iterable, jinja_can_iterate(v))
KIND_TEST(test_escaped, v.kind == JV_STR && v.u.s->markup)
KIND_TEST(test_callable, v.kind >= JV_LOOP || v.kind == JV_UNDEF)
KIND_TEST(test_sequence,
          v.kind == JV_STR || v.kind == JV_DICT || v.kind == JV_UNDEF ||
              (v.kind == JV_LIST && (v.u.l->form <= JL_RANGE || v.u.l->form == JL_GROUP)))

static jval test_lower(jrt *r, jval v, const jargs *a) {
    (void)a;
    return jv_bool(jinja_text_all(r, jinja_to_str(r, v), JCLASS_LOWER));
}

static jval test_upper(jrt *r, jval v, const jargs *a) {
    (void)a;
    return jv_bool(jinja_text_all(r, jinja_to_str(r, v), JCLASS_UPPER));
}

static bool remainder_is(jrt *r, jval v, jval by, int64_t want) {
    return jinja_equal(r, jinja_binary(r, JO_MOD, v, by), jv_int(want));
}

static jval test_odd(jrt *r, jval v, const jargs *a) {
    (void)a;
    return jv_bool(remainder_is(r, v, jv_int(2), 1));
}

static jval test_even(jrt *r, jval v, const jargs *a) {
    (void)a;
    return jv_bool(remainder_is(r, v, jv_int(2), 0));
}

static jval test_divisibleby(jrt *r, jval v, const jargs *a) {
    return jv_bool(remainder_is(r, v, a->v[0], 0));
}

static jval test_sameas(jrt *r, jval v, const jargs *a) {
    jval b = a->v[0];
    if (v.kind != b.kind) return jv_bool(false);
    switch (v.kind) {
    case JV_NONE: return jv_bool(true);
    case JV_LIST: return jv_bool(v.u.l == b.u.l);
    case JV_DICT: return jv_bool(v.u.d == b.u.d);
    default: return jv_bool(jinja_equal(r, v, b));
    }
}

static jval test_filter(jrt *r, jval v, const jargs *a) {
    (void)r;
    (void)a;
    return jv_bool(v.kind == JV_STR && jinja_find_filter(jinja_text(v.u.s)));
}

static jval test_test(jrt *r, jval v, const jargs *a) {
    (void)r;
    (void)a;
    return jv_bool(v.kind == JV_STR && jinja_find_test(jinja_text(v.u.s)));
}

#define COMPARE_TEST(name, op)                                                                     \
    static jval name(jrt *r, jval v, const jargs *a) {                                             \
        return jv_bool(jinja_compare(r, op, v, a->v[0]));                                          \
    }
COMPARE_TEST(test_eq, JO_EQ)
COMPARE_TEST(test_ne, JO_NE)
COMPARE_TEST(test_lt, JO_LT)
COMPARE_TEST(test_le, JO_LE)
COMPARE_TEST(test_gt, JO_GT)
COMPARE_TEST(test_ge, JO_GE)
COMPARE_TEST(test_in, JO_IN)

static const jfunc tests[] = {
    {"defined", test_defined, "", 0},
    {"undefined", test_undefined, "", 0},
    {"none", test_none, "", 0},
    {"boolean", test_boolean, "", 0},
    {"true", test_true, "", 0},
    {"false", test_false, "", 0},
    {"integer", test_integer, "", 0},
    {"float", test_float, "", 0},
    {"number", test_number, "", 0},
    {"string", test_string, "", 0},
    {"mapping", test_mapping, "", 0},
    {"sequence", test_sequence, "", 0},
    {"iterable", test_iterable, "", 0},
    {"callable", test_callable, "", 0},
    {"escaped", test_escaped, "", 0},
    {"lower", test_lower, "", 0},
    {"upper", test_upper, "", 0},
    {"odd", test_odd, "", 0},
    {"even", test_even, "", 0},
    {"divisibleby", test_divisibleby, "num", 1},
    {"sameas", test_sameas, "other", 1},
    {"filter", test_filter, "", 0},
    {"test", test_test, "", 0},
    {"eq", test_eq, "other", 1},
    {"equalto", test_eq, "other", 1},
    {"==", test_eq, "other", 1},
    {"ne", test_ne, "other", 1},
    {"!=", test_ne, "other", 1},
    {"lt", test_lt, "other", 1},
    {"lessthan", test_lt, "other", 1},
    {"<", test_lt, "other", 1},
    {"le", test_le, "other", 1},
    {"<=", test_le, "other", 1},
    {"gt", test_gt, "other", 1},
    {"greaterthan", test_gt, "other", 1},
    {">", test_gt, "other", 1},
    {"ge", test_ge, "other", 1},
    {">=", test_ge, "other", 1},
    {"in", test_in, "seq", 1},
};

const jfunc *jinja_find_test(mx_str name) {
    return jinja_find_in(tests, MX_COUNT(tests), name);
}

// --- functions -----------------------------------------------------------------------------------

static int64_t range_arg(jrt *r, jval v) {
    int64_t i;
    if (v.kind == JV_UNDEF) jinja_fail_undef(r, v);
    if (!jinja_as_int(v, &i))
        jinja_fail(r, MX_INVALID, "range: '%s' object cannot be interpreted as an integer",
                   jinja_type_name(v));
    return i;
}

static jval fn_range(jrt *r, jval self, const jargs *a) {
    (void)self;
    int64_t from = 0, to = range_arg(r, a->v[0]), by = 1;
    bool tainted = jinja_tainted(a->v[0]);
    if (jv_is_given(a->v[1])) {
        from = to;
        to = range_arg(r, a->v[1]);
        tainted |= jinja_tainted(a->v[1]);
    }
    if (jv_is_given(a->v[2])) by = range_arg(r, a->v[2]);
    if (by == 0) jinja_fail(r, MX_INVALID, "range() arg 3 must not be zero");
    jlist *l = jinja_list_new(r, JL_RANGE, 0);
    l->start = from;
    l->stop = to;
    l->step = by;
    for (int64_t i = from; by > 0 ? i < to : i > to;) {
        if (l->n == JINJA_MAX_RANGE)
            jinja_fail(r, MX_INVALID, "range too big (at most %d)", JINJA_MAX_RANGE);
        jinja_list_add(r, l, jv_taint(jv_int(i), tainted));
        if (__builtin_add_overflow(i, by, &i)) break;
    }
    jinja_charge(r, l->n / 4);
    return jinja_list_val(l);
}

static void add_mapping(jrt *r, jdict *d, jval v) {
    if (v.kind == JV_DICT) {
        for (size_t i = 0; i < v.u.d->n; i++)
            jinja_dict_set(r, d, v.u.d->v[i].key, v.u.d->v[i].value);
        return;
    }
    jiter it = jinja_iterate(r, v);
    for (size_t i = 0; i < it.n; i++) {
        jiter pair = jinja_iterate(r, it.v[i]);
        if (pair.n != 2) jinja_fail(r, MX_INVALID, "dict: item %zu is no pair", i);
        jinja_dict_set(r, d, pair.v[0], pair.v[1]);
    }
}

static jdict *dict_from_args(jrt *r, const jargs *a, const char *what) {
    jdict *d = jinja_dict_new(r, a->n_kw);
    if (a->n > 1) jinja_fail(r, MX_INVALID, "%s expected at most 1 argument", what);
    if (a->n) add_mapping(r, d, a->v[0]);
    for (size_t i = 0; i < a->n_kw; i++)
        jinja_dict_set(r, d, jv_str(jinja_str_view(r, a->kw[i], false)), a->kw_v[i]);
    return d;
}

static jval fn_dict(jrt *r, jval self, const jargs *a) {
    (void)self;
    return jinja_dict_val(dict_from_args(r, a, "dict"));
}

static jval fn_namespace(jrt *r, jval self, const jargs *a) {
    (void)self;
    jdict *d = dict_from_args(r, a, "namespace");
    for (size_t i = 0; i < d->n; i++) {
        const jval key = d->v[i].key;
        if (key.kind == JV_STR && key.u.s->n && key.u.s->p[0] == '_')
            jinja_fail(r, MX_INVALID, "a namespace attribute begins with an underscore");
    }
    return (jval){.kind = JV_NS, .u.d = d};
}

static jval fn_raise(jrt *r, jval self, const jargs *a) {
    (void)self;
    const jstr *s = jinja_to_str(r, a->v[0]);
    mx_err_set(r->err, MX_INVALID, "%.*s", (int)MX_MIN(s->n, (size_t)MX_ERR_CAP), s->p);
    longjmp(r->jump, (int)MX_INVALID);
}

static jval fn_strftime(jrt *r, jval self, const jargs *a) {
    (void)self;
    if (a->v[0].kind != JV_STR) jinja_fail(r, MX_INVALID, "strftime_now needs a format text");
    const jstr *fmt = a->v[0].u.s;
    if (fmt->n > 200 || memchr(fmt->p, 0, fmt->n))
        jinja_fail(r, MX_INVALID, "strftime_now: unusable format");
    time_t now = r->now_s != 0 ? (time_t)floor(r->now_s) : time(NULL);
    struct tm tm;
    char text[2048], *copy = jinja_alloc(r, fmt->n + 2);
    // one more character tells an empty result from one that does not fit
    memcpy(copy, fmt->p, fmt->n);
    copy[fmt->n] = ' ';
    if (!localtime_r(&now, &tm)) jinja_fail(r, MX_INVALID, "strftime_now: time out of range");
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    size_t n = strftime(text, sizeof text, copy, &tm);
#pragma GCC diagnostic pop
    if (n == 0 || !mx_utf8_valid((mx_str){text, n - 1}))
        jinja_fail(r, MX_INVALID, "strftime_now: unusable format");
    return jv_str(jinja_str_make(r, (mx_str){text, n - 1}, jinja_str_trusted(fmt)));
}

#define UNSUPPORTED_FUNCTION(name, text)                                                           \
    static jval name(jrt *r, jval self, const jargs *a) {                                          \
        (void)self;                                                                                \
        (void)a;                                                                                   \
        jinja_fail(r, MX_UNSUPPORTED, "unsupported function '%s'", text);                          \
    }
UNSUPPORTED_FUNCTION(fn_cycler, "cycler")
UNSUPPORTED_FUNCTION(fn_joiner, "joiner")
UNSUPPORTED_FUNCTION(fn_lipsum, "lipsum")

const jfunc *jinja_find_global(mx_str name) {
    static const jfunc functions[] = {{"range", fn_range, "start,stop,step", 1},
                                      {"dict", fn_dict, "*", 0},
                                      {"namespace", fn_namespace, "*", 0},
                                      {"raise_exception", fn_raise, "message", 1},
                                      {"strftime_now", fn_strftime, "format", 1},
                                      {"cycler", fn_cycler, "*", 0},
                                      {"joiner", fn_joiner, "*", 0},
                                      {"lipsum", fn_lipsum, "*", 0}};
    return jinja_find_in(functions, MX_COUNT(functions), name);
}
