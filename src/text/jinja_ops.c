// Operators of templates with Python's meaning: arithmetic, comparison, membership, attribute and
// item access, slices. Integers are 64 bits; what leaves that range is an error, not a wrap.
#include "text/jinja_int.h"

#include <math.h>

bool jinja_as_int(jval v, int64_t *out) {
    if (v.kind != JV_INT && v.kind != JV_BOOL) return false;
    *out = v.kind == JV_INT ? v.u.i : v.u.b;
    return true;
}

bool jinja_as_number(jval v, double *out) {
    int64_t i;
    if (v.kind == JV_FLOAT) {
        *out = v.u.f;
        return true;
    }
    if (!jinja_as_int(v, &i)) return false;
    *out = (double)i;
    return true;
}

// --- arithmetic ----------------------------------------------------------------------------------

static const char *op_name(jop op) {
    switch (op) {
    case JO_ADD: return "+";
    case JO_SUB: return "-";
    case JO_MUL: return "*";
    case JO_DIV: return "/";
    case JO_FLOORDIV: return "//";
    case JO_MOD: return "%";
    default: return "**";
    }
}

static _Noreturn void overflow(jrt *r) {
    jinja_fail(r, MX_INVALID, "integer beyond 64 bits");
}

static jval float_power(jrt *r, double a, double b) {
    if (a == 0 && b < 0) jinja_fail(r, MX_INVALID, "0 cannot be raised to a negative power");
    if (a < 0 && b != floor(b)) jinja_fail(r, MX_UNSUPPORTED, "complex number from **");
    double f = pow(a, b);
    if (isinf(f) && isfinite(a) && isfinite(b)) jinja_fail(r, MX_INVALID, "result of ** too large");
    return jv_float(f);
}

static int64_t int_power(jrt *r, int64_t base, int64_t exp) {
    int64_t v = 1;
    while (exp > 0) {
        if (exp & 1 && __builtin_mul_overflow(v, base, &v)) overflow(r);
        exp >>= 1;
        if (exp && __builtin_mul_overflow(base, base, &base)) overflow(r);
    }
    return v;
}

static jval int_divide(jrt *r, jop op, int64_t a, int64_t b) {
    if (b == 0) jinja_fail(r, MX_INVALID, "division by zero");
    if (op == JO_DIV) return jv_float((double)a / (double)b);
    if (b == -1) {
        int64_t v;
        if (op == JO_MOD) return jv_int(0);
        if (__builtin_sub_overflow((int64_t)0, a, &v)) overflow(r);
        return jv_int(v);
    }
    int64_t q = a / b, m = a % b;
    if (m != 0 && (m < 0) != (b < 0)) {
        q--;
        m += b;
    }
    return jv_int(op == JO_MOD ? m : q);
}

static jval int_binary(jrt *r, jop op, int64_t a, int64_t b) {
    int64_t v = 0;
    bool over = false;
    switch (op) {
    case JO_ADD: over = __builtin_add_overflow(a, b, &v); break;
    case JO_SUB: over = __builtin_sub_overflow(a, b, &v); break;
    case JO_MUL: over = __builtin_mul_overflow(a, b, &v); break;
    case JO_POW:
        if (b < 0) return float_power(r, (double)a, (double)b);
        v = a == 0 || a == 1 || a == -1 ? int_power(r, a, b > 1 ? 2 + (b & 1) : b)
                                        : int_power(r, a, b);
        break;
    default: return int_divide(r, op, a, b);
    }
    if (over) overflow(r);
    return jv_int(v);
}

static jval float_binary(jrt *r, jop op, double a, double b) {
    if (b == 0 && (op == JO_DIV || op == JO_FLOORDIV || op == JO_MOD))
        jinja_fail(r, MX_INVALID, "division by zero");
    double m;
    switch (op) {
    case JO_ADD: return jv_float(a + b);
    case JO_SUB: return jv_float(a - b);
    case JO_MUL: return jv_float(a * b);
    case JO_DIV: return jv_float(a / b);
    case JO_FLOORDIV: return jv_float(floor(a / b));
    case JO_MOD: m = fmod(a, b); return jv_float(m != 0 && (m < 0) != (b < 0) ? m + b : m);
    default: return float_power(r, a, b);
    }
}

static jval repeat(jrt *r, jval seq, int64_t n) {
    if (n < 0) n = 0;
    if (seq.kind == JV_STR) {
        if (seq.u.s->n && n > JINJA_MAX_STRING / (int64_t)seq.u.s->n)
            jinja_fail(r, MX_TOOLARGE, "text longer than %d bytes", JINJA_MAX_STRING);
        jbuf *b = jinja_buf_new(r, seq.u.s->n * (size_t)n);
        for (int64_t i = 0; i < n && seq.u.s->n; i++) jinja_buf_str(r, b, seq.u.s);
        jinja_charge(r, seq.u.s->n ? (uint64_t)n / 16 : 0);
        return jv_str(jinja_buf_take(r, b));
    }
    const jlist *l = seq.u.l;
    if (l->n && n > 10000000 / (int64_t)l->n) jinja_fail(r, MX_TOOLARGE, "list too long");
    jlist *out = jinja_list_new(r, l->form, l->n * (size_t)n);
    for (int64_t i = 0; i < n && l->n; i++)
        for (size_t k = 0; k < l->n; k++) jinja_list_add(r, out, l->v[k]);
    jinja_charge(r, out->n / 4);
    return jinja_list_val(out);
}

static bool is_sequence(jval v) {
    return v.kind == JV_STR ||
           (v.kind == JV_LIST && (v.u.l->form == JL_LIST || v.u.l->form == JL_TUPLE));
}

static jval escape_if_plain(jrt *r, jval v) {
    static const jargs none = {0};
    if (v.u.s->markup) return v;
    return jinja_find_filter(mx_str_of("escape"))->call(r, v, &none);
}

static jval add_sequences(jrt *r, jval a, jval b) {
    if (a.kind == JV_STR) {
        if (!a.u.s->markup && !b.u.s->markup) return jv_str(jinja_str_concat(r, a.u.s, b.u.s));
        // marked-safe text escapes what is added to it, as in Jinja
        a = escape_if_plain(r, a);
        b = escape_if_plain(r, b);
        jstr *s = JINJA_NEW(r, jstr);
        *s = *jinja_str_concat(r, a.u.s, b.u.s);
        s->markup = true;
        return jv_str(s);
    }
    jlist *l = jinja_list_new(r, a.u.l->form, a.u.l->n + b.u.l->n);
    for (size_t i = 0; i < a.u.l->n; i++) jinja_list_add(r, l, a.u.l->v[i]);
    for (size_t i = 0; i < b.u.l->n; i++) jinja_list_add(r, l, b.u.l->v[i]);
    l->tainted |= jinja_tainted(a) || jinja_tainted(b);
    jinja_charge(r, l->n / 4);
    return jinja_list_val(l);
}

jval jinja_binary(jrt *r, jop op, jval a, jval b) {
    int64_t i, k;
    double f, g;
    bool tainted = jinja_tainted(a) || jinja_tainted(b);
    if (jinja_as_int(a, &i) && jinja_as_int(b, &k))
        return jv_taint(int_binary(r, op, i, k), tainted);
    if (jinja_as_number(a, &f) && jinja_as_number(b, &g))
        return jv_taint(float_binary(r, op, f, g), tainted);
    if (op == JO_MOD && a.kind == JV_STR) return jv_str(jinja_format_percent(r, a.u.s, b));
    if (a.kind == JV_UNDEF) jinja_fail_undef(r, a);
    if (b.kind == JV_UNDEF && a.kind != JV_STR) jinja_fail_undef(r, b);
    if (op == JO_ADD && is_sequence(a) && a.kind == b.kind &&
        (a.kind == JV_STR || (is_sequence(b) && a.u.l->form == b.u.l->form)))
        return add_sequences(r, a, b);
    if (op == JO_MUL && is_sequence(a) && jinja_as_int(b, &i)) return repeat(r, a, i);
    if (op == JO_MUL && is_sequence(b) && jinja_as_int(a, &i)) return repeat(r, b, i);
    if (op == JO_ADD && a.kind == JV_STR) {
        if (b.kind == JV_UNDEF) jinja_fail_undef(r, b);
        jinja_fail(r, MX_INVALID, "can only concatenate str (not \"%s\") to str",
                   jinja_type_name(b));
    }
    jinja_fail(r, MX_INVALID, "unsupported operand types for %s: '%s' and '%s'", op_name(op),
               jinja_type_name(a), jinja_type_name(b));
}

jval jinja_negate(jrt *r, jval v) {
    int64_t i;
    if (v.kind == JV_FLOAT) return jv_taint(jv_float(-v.u.f), v.tainted);
    if (v.kind == JV_UNDEF) jinja_fail_undef(r, v);
    if (!jinja_as_int(v, &i))
        jinja_fail(r, MX_INVALID, "bad operand type for unary -: '%s'", jinja_type_name(v));
    return jinja_binary(r, JO_SUB, jv_int(0), v);
}

// --- comparison ----------------------------------------------------------------------------------

static bool equal_lists(jrt *r, const jlist *a, const jlist *b) {
    bool tuples = (a->form == JL_TUPLE || a->form == JL_GROUP) &&
                  (b->form == JL_TUPLE || b->form == JL_GROUP);
    if (a == b) return true;
    if (a->form == JL_GEN || (a->form != b->form && !tuples) || a->n != b->n) return false;
    jinja_charge(r, a->n);
    for (size_t i = 0; i < a->n; i++)
        if (!jinja_equal(r, a->v[i], b->v[i])) return false;
    return true;
}

static bool equal_dicts(jrt *r, const jdict *a, const jdict *b) {
    if (a->n != b->n) return false;
    jinja_charge(r, a->n);
    for (size_t i = 0; i < a->n; i++) {
        const jpair *p = jinja_dict_find(r, b, a->v[i].key);
        if (!p || !jinja_equal(r, a->v[i].value, p->value)) return false;
    }
    return true;
}

bool jinja_equal(jrt *r, jval a, jval b) {
    double f, g;
    int64_t i, k;
    if (jinja_as_int(a, &i) && jinja_as_int(b, &k)) return i == k;
    if (jinja_as_number(a, &f) && jinja_as_number(b, &g)) return f == g;
    if (a.kind != b.kind) return false;
    switch (a.kind) {
    case JV_STR:
        if (r && a.u.s->n == b.u.s->n) jinja_charge_bytes(r, a.u.s->n / 8);
        return mx_str_eq(jinja_text(a.u.s), jinja_text(b.u.s));
    case JV_LIST: return equal_lists(r, a.u.l, b.u.l);
    case JV_DICT: return equal_dicts(r, a.u.d, b.u.d);
    case JV_NS: return a.u.d == b.u.d;
    case JV_NONE:
    case JV_UNDEF:
    case JV_MISSING: return true;
    case JV_FUNC: return a.u.fn == b.u.fn;
    default: return a.u.macro == b.u.macro;
    }
}

static int order_str(const jstr *a, const jstr *b) {
    int c = memcmp(a->p, b->p, MX_MIN(a->n, b->n)); // UTF-8 sorts as code points
    return c ? c : (a->n > b->n) - (a->n < b->n);
}

static int order_lists(jrt *r, const jlist *a, const jlist *b, const char *op) {
    for (size_t i = 0; i < a->n && i < b->n; i++) {
        jinja_charge(r, 1);
        if (!jinja_equal(r, a->v[i], b->v[i])) return jinja_order(r, a->v[i], b->v[i], op);
    }
    return (a->n > b->n) - (a->n < b->n);
}

int jinja_order(jrt *r, jval a, jval b, const char *op) {
    double f, g;
    int64_t i, k;
    if (jinja_as_int(a, &i) && jinja_as_int(b, &k)) return (i > k) - (i < k);
    if (jinja_as_number(a, &f) && jinja_as_number(b, &g))
        return isnan(f) || isnan(g) ? 2 : (f > g) - (f < g);
    if (a.kind == JV_STR && b.kind == JV_STR) {
        jinja_charge_bytes(r, MX_MIN(a.u.s->n, b.u.s->n) / 8);
        return order_str(a.u.s, b.u.s);
    }
    if (is_sequence(a) && is_sequence(b) && a.kind == JV_LIST && b.kind == JV_LIST &&
        a.u.l->form == b.u.l->form)
        return order_lists(r, a.u.l, b.u.l, op);
    if (a.kind == JV_UNDEF) jinja_fail_undef(r, a);
    if (b.kind == JV_UNDEF) jinja_fail_undef(r, b);
    jinja_fail(r, MX_INVALID, "'%s' not supported between instances of '%s' and '%s'", op,
               jinja_type_name(a), jinja_type_name(b));
}

static bool is_nan(jval v) {
    return v.kind == JV_FLOAT && isnan(v.u.f);
}

bool jinja_compare(jrt *r, jop op, jval a, jval b) {
    if (is_nan(a) || is_nan(b)) {
        double f;
        if (jinja_as_number(a, &f) && jinja_as_number(b, &f)) return op == JO_NE;
    }
    switch (op) {
    case JO_EQ: return jinja_equal(r, a, b);
    case JO_NE: return !jinja_equal(r, a, b);
    case JO_LT: return jinja_order(r, a, b, "<") < 0;
    case JO_LE: return jinja_order(r, a, b, "<=") <= 0;
    case JO_GT: return jinja_order(r, a, b, ">") > 0;
    case JO_GE: return jinja_order(r, a, b, ">=") >= 0;
    case JO_IN: return jinja_contains(r, b, a);
    default: return !jinja_contains(r, b, a);
    }
}

bool jinja_contains(jrt *r, jval in, jval what) {
    if (in.kind == JV_STR) {
        if (what.kind == JV_UNDEF) jinja_fail_undef(r, what);
        if (what.kind != JV_STR)
            jinja_fail(r, MX_INVALID, "'in <string>' requires string as left operand, not %s",
                       jinja_type_name(what));
        jinja_charge_bytes(r, in.u.s->n);
        return jinja_find(jinja_text(in.u.s), jinja_text(what.u.s), 0) != SIZE_MAX;
    }
    if (in.kind == JV_DICT) return jinja_dict_find(r, in.u.d, what) != NULL;
    if (!jinja_can_iterate(in))
        jinja_fail(r, MX_INVALID, "argument of type '%s' is not iterable", jinja_type_name(in));
    jiter it = jinja_iterate(r, in);
    jinja_charge(r, it.n / 4);
    for (size_t i = 0; i < it.n; i++)
        if (jinja_equal(r, it.v[i], what)) return true;
    return false;
}

// --- attributes and items ------------------------------------------------------------------------

// A method, an attribute of loops and groups, or JV_MISSING.
static jval real_attr(jrt *r, jval v, mx_str name) {
    if (v.kind == JV_LOOP) return jinja_loop_attr(r, v.u.loop, name);
    if (v.kind == JV_NS) {
        const jpair *p = jinja_dict_find_str(v.u.d, name);
        return p ? p->value : (jval){.kind = JV_MISSING};
    }
    if (v.kind == JV_LIST && v.u.l->form == JL_GROUP) {
        if (mx_str_is(name, "grouper")) return v.u.l->v[0];
        if (mx_str_is(name, "list")) return v.u.l->v[1];
    }
    if (v.kind == JV_MACRO && mx_str_is(name, "name") && v.u.macro->node->str)
        return jv_str(v.u.macro->node->str);
    if (jinja_is_mutator(v, name))
        jinja_fail(r, MX_UNSUPPORTED, "method '%.*s' changes a %s; templates may not",
                   (int)MX_MIN(name.n, 60u), name.p, jinja_type_name(v));
    const jfunc *f = jinja_find_method(v, name);
    if (!f) return (jval){.kind = JV_MISSING};
    jmethod *m = JINJA_NEW(r, jmethod);
    *m = (jmethod){v, f};
    return (jval){.kind = JV_METHOD, .u.method = m};
}

jval jinja_get_attr(jrt *r, jval v, const jstr *name) {
    if (v.kind == JV_UNDEF) jinja_fail_undef(r, v);
    mx_str text = jinja_text(name);
    jval found = real_attr(r, v, text);
    if (jv_is_given(found)) return found;
    if (v.kind == JV_DICT) {
        const jpair *p = jinja_dict_find_str(v.u.d, text);
        if (p) return p->value;
    }
    return jinja_undef(r, jinja_type_name(v), text);
}

static jval item_at(jrt *r, jval v, int64_t i) {
    int64_t n = v.kind == JV_STR ? (int64_t)v.u.s->n_chars : (int64_t)v.u.l->n;
    if (i < 0) i += n;
    if (i < 0 || i >= n) return (jval){.kind = JV_MISSING};
    if (v.kind == JV_LIST) return v.u.l->v[i];
    size_t from = jinja_str_offset(v.u.s, (size_t)i), to = from;
    jinja_charge_bytes(r, v.u.s->n == v.u.s->n_chars ? 0 : from);
    jinja_next_char(jinja_text(v.u.s), &to);
    return jv_str(jinja_str_part(r, v.u.s, from, to));
}

static bool is_indexed(jval v) {
    return v.kind == JV_STR ||
           (v.kind == JV_LIST && (v.u.l->form <= JL_RANGE || v.u.l->form == JL_GROUP));
}

jval jinja_get_item(jrt *r, jval v, jval key) {
    int64_t i;
    if (v.kind == JV_UNDEF) jinja_fail_undef(r, v);
    if (v.kind == JV_DICT && jinja_hashable(key)) {
        const jpair *p = jinja_dict_find(r, v.u.d, key);
        if (p) return p->value;
    } else if (is_indexed(v) && jinja_as_int(key, &i)) {
        jval found = item_at(r, v, i);
        if (jv_is_given(found)) return found;
    }
    if (key.kind == JV_STR) {
        jval found = real_attr(r, v, jinja_text(key.u.s));
        if (jv_is_given(found)) return found;
        return jinja_undef(r, jinja_type_name(v), jinja_text(key.u.s));
    }
    return jinja_undef(r, jinja_type_name(v), jinja_text(jinja_repr(r, key)));
}

// --- slices --------------------------------------------------------------------------------------

static int64_t slice_bound(jrt *r, jval v, int64_t if_absent, int64_t n, int64_t lo, int64_t hi) {
    int64_t i;
    if (v.kind == JV_MISSING || v.kind == JV_NONE) return if_absent;
    if (v.kind == JV_UNDEF) jinja_fail_undef(r, v);
    if (!jinja_as_int(v, &i)) jinja_fail(r, MX_INVALID, "slice indices must be integers or None");
    if (i < 0) i = i < -n ? -1 : i + n;
    return i < lo ? lo : i > hi ? hi : i;
}

// Whether i + step would lie beyond the end (asked so that the sum cannot overflow).
static bool passes_end(int64_t i, int64_t end, int64_t step) {
    return step > 0 ? step > end - i : step < end - i;
}

static jval slice_str(jrt *r, const jstr *s, int64_t from, int64_t to, int64_t step) {
    jinja_charge_bytes(r, s->n == s->n_chars ? 0 : 3 * s->n);
    if (step == 1) {
        size_t a = jinja_str_offset(s, (size_t)from), b = jinja_str_offset(s, (size_t)to);
        return jv_str(jinja_str_part(r, s, a, b));
    }
    jiter it = jinja_iterate(r, jv_str(s));
    jbuf *b = jinja_buf_new(r, 32);
    for (int64_t i = from; step > 0 ? i < to : i > to; i += step) {
        jinja_buf_str(r, b, it.v[i].u.s);
        if (passes_end(i, to, step)) break;
    }
    return jv_str(jinja_buf_take(r, b));
}

jval jinja_slice(jrt *r, jval v, jval from, jval to, jval step) {
    int64_t by = 1;
    if (v.kind == JV_UNDEF) jinja_fail_undef(r, v);
    if (jv_is_given(step) && step.kind != JV_NONE && !jinja_as_int(step, &by))
        jinja_fail(r, MX_INVALID, "slice step must be an integer or None");
    if (by == 0) jinja_fail(r, MX_INVALID, "slice step cannot be zero");
    if (!is_indexed(v))
        jinja_fail(r, MX_INVALID, "'%s' object cannot be sliced", jinja_type_name(v));
    int64_t n = v.kind == JV_STR ? (int64_t)v.u.s->n_chars : (int64_t)v.u.l->n;
    int64_t lo = by < 0 ? -1 : 0, hi = by < 0 ? n - 1 : n;
    int64_t a = slice_bound(r, from, by < 0 ? n - 1 : 0, n, lo, hi);
    int64_t b = slice_bound(r, to, by < 0 ? -1 : n, n, lo, hi);
    if (v.kind == JV_STR) {
        if (by > 0 ? a >= b : a <= b) return jv_str(&jinja_empty);
        return slice_str(r, v.u.s, a, b, by);
    }
    jform form = v.u.l->form == JL_GROUP ? JL_TUPLE : v.u.l->form;
    jlist *out = jinja_list_new(r, form, 0);
    out->tainted = jinja_tainted(v);
    if (form == JL_RANGE) { // for printing; unsigned, so that extremes wrap
        uint64_t start = (uint64_t)v.u.l->start, unit = (uint64_t)v.u.l->step;
        out->start = (int64_t)(start + (uint64_t)a * unit);
        out->stop = (int64_t)(start + (uint64_t)b * unit);
        out->step = (int64_t)(unit * (uint64_t)by);
    }
    for (int64_t i = a; by > 0 ? i < b : i > b; i += by) {
        jinja_list_add(r, out, v.u.l->v[i]);
        if (passes_end(i, b, by)) break;
    }
    jinja_charge(r, out->n / 8);
    return jinja_list_val(out);
}
