// Filters over sequences and mappings: join, sort, map, selectattr and their kin. Those that are
// lazy in Jinja return a generator here too (one pass, always true), but computed at once.
#include "text/jinja_text.h"

// --- attribute paths -----------------------------------------------------------------------------

static bool all_digits(const jstr *s) {
    for (size_t i = 0; i < s->n; i++)
        if (s->p[i] < '0' || s->p[i] > '9') return false;
    return s->n > 0 && s->n < 18;
}

// item.a.b.0, looked up as Jinja's filters do: items first, then attributes.
static jval follow(jrt *r, jval item, jval path, jval dflt) {
    if (path.kind != JV_STR) {
        if (path.kind == JV_NONE || path.kind == JV_MISSING) return item;
        item = jinja_get_item(r, item, path);
        return item.kind == JV_UNDEF && jv_is_given(dflt) ? dflt : item;
    }
    const jlist *parts =
        jinja_text_split(r, path.u.s, jinja_str_view(r, mx_str_of("."), true), -1, false);
    for (size_t i = 0; i < parts->n; i++) {
        const jstr *part = parts->v[i].u.s;
        int64_t n = 0;
        for (size_t k = 0; all_digits(part) && k < part->n; k++) n = n * 10 + (part->p[k] - '0');
        item = jinja_get_item(r, item, all_digits(part) ? jv_int(n) : parts->v[i]);
        if (item.kind == JV_UNDEF && jv_is_given(dflt) && dflt.kind != JV_NONE) item = dflt;
    }
    return item;
}

static jval fold_case(jrt *r, jval v, bool case_sensitive) {
    if (case_sensitive || v.kind != JV_STR) return v;
    return jv_str(jinja_text_case(r, v.u.s, JCASE_LOWER));
}

static bool flag_arg(jval v) {
    return jv_is_given(v) && jinja_truth(v);
}

// --- sorting -------------------------------------------------------------------------------------

typedef struct jkeyed {
    jval key, item;
} jkeyed;

static void sort_keyed(jrt *r, jkeyed *v, jkeyed *tmp, size_t n, bool reverse) {
    if (n < 2) return;
    size_t half = n / 2, i = 0, j = half, k = 0;
    sort_keyed(r, v, tmp, half, reverse);
    sort_keyed(r, v + half, tmp, n - half, reverse);
    while (i < half && j < n) {
        jinja_charge(r, 1);
        // stable in both directions, as Python's sorted(reverse=True)
        bool second = reverse ? jinja_order(r, v[i].key, v[j].key, "<") < 0
                              : jinja_order(r, v[j].key, v[i].key, "<") < 0;
        tmp[k++] = second ? v[j++] : v[i++];
    }
    while (i < half) tmp[k++] = v[i++];
    while (j < n) tmp[k++] = v[j++];
    memcpy(v, tmp, n * sizeof *v);
}

static void sort(jrt *r, jkeyed *v, size_t n, bool reverse) {
    sort_keyed(r, v, JINJA_ARRAY(r, jkeyed, n), n, reverse);
}

// Sort key of an item: one attribute, or a tuple for "a,b".
static jval sort_key(jrt *r, jval item, jval attribute, bool case_sensitive) {
    jval none = {.kind = JV_MISSING};
    bool several = attribute.kind == JV_STR && memchr(attribute.u.s->p, ',', attribute.u.s->n);
    if (!several) return fold_case(r, follow(r, item, attribute, none), case_sensitive);
    const jlist *parts =
        jinja_text_split(r, attribute.u.s, jinja_str_view(r, mx_str_of(","), true), -1, false);
    jlist *key = jinja_list_new(r, JL_TUPLE, parts->n);
    for (size_t i = 0; i < parts->n; i++)
        jinja_list_add(r, key, fold_case(r, follow(r, item, parts->v[i], none), case_sensitive));
    return jinja_list_val(key);
}

static jval f_sort(jrt *r, jval self, const jargs *a) {
    jiter it = jinja_iterate(r, self);
    jkeyed *v = JINJA_ARRAY(r, jkeyed, it.n);
    for (size_t i = 0; i < it.n; i++)
        v[i] = (jkeyed){sort_key(r, it.v[i], a->v[2], flag_arg(a->v[1])), it.v[i]};
    sort(r, v, it.n, flag_arg(a->v[0]));
    jlist *l = jinja_list_new(r, JL_LIST, it.n);
    l->tainted = it.tainted;
    for (size_t i = 0; i < it.n; i++) jinja_list_add(r, l, v[i].item);
    return jinja_list_val(l);
}

static jval f_dictsort(jrt *r, jval self, const jargs *a) {
    if (self.kind == JV_UNDEF) jinja_fail_undef(r, self);
    if (self.kind != JV_DICT)
        jinja_fail(r, MX_INVALID, "dictsort needs a mapping, got %s", jinja_type_name(self));
    const jstr *by = jv_is_given(a->v[1]) ? jinja_to_str(r, a->v[1]) : NULL;
    bool by_value = by && mx_str_is(jinja_text(by), "value");
    if (by && !by_value && !mx_str_is(jinja_text(by), "key"))
        jinja_fail(r, MX_INVALID, "dictsort: by must be key or value");
    const jdict *d = self.u.d;
    jkeyed *v = JINJA_ARRAY(r, jkeyed, d->n);
    for (size_t i = 0; i < d->n; i++) {
        jval key = by_value ? d->v[i].value : d->v[i].key;
        v[i] = (jkeyed){fold_case(r, key, flag_arg(a->v[0])),
                        jinja_pair(r, d->v[i].key, d->v[i].value)};
    }
    sort(r, v, d->n, flag_arg(a->v[2]));
    jlist *l = jinja_list_new(r, JL_LIST, d->n);
    l->tainted = jinja_tainted(self);
    for (size_t i = 0; i < d->n; i++) jinja_list_add(r, l, v[i].item);
    return jinja_list_val(l);
}

static jval f_groupby(jrt *r, jval self, const jargs *a) {
    jiter it = jinja_iterate(r, self);
    bool exact = flag_arg(a->v[2]);
    jkeyed *v = JINJA_ARRAY(r, jkeyed, it.n);
    for (size_t i = 0; i < it.n; i++)
        v[i] = (jkeyed){fold_case(r, follow(r, it.v[i], a->v[0], a->v[1]), exact), it.v[i]};
    sort(r, v, it.n, false);
    jlist *out = jinja_list_new(r, JL_LIST, 0);
    out->tainted = it.tainted;
    for (size_t i = 0, k; i < it.n; i = k) {
        jlist *members = jinja_list_new(r, JL_LIST, 0);
        for (k = i; k < it.n && jinja_equal(r, v[i].key, v[k].key); k++)
            jinja_list_add(r, members, v[k].item);
        jlist *group = jinja_list_new(r, JL_GROUP, 2);
        jinja_list_add(r, group, follow(r, v[i].item, a->v[0], a->v[1]));
        jinja_list_add(r, group, jinja_list_val(members));
        jinja_list_add(r, out, jinja_list_val(group));
    }
    return jinja_list_val(out);
}

static jval f_unique(jrt *r, jval self, const jargs *a) {
    jiter it = jinja_iterate(r, self);
    jdict *seen = jinja_dict_new(r, 0);
    jlist *l = jinja_list_new(r, JL_GEN, 0);
    l->tainted = it.tainted;
    jval none = {.kind = JV_MISSING};
    for (size_t i = 0; i < it.n; i++) {
        jval key = fold_case(r, follow(r, it.v[i], a->v[1], none), flag_arg(a->v[0]));
        if (jinja_dict_find(r, seen, key)) continue;
        jinja_dict_set(r, seen, key, jv_none());
        jinja_list_add(r, l, it.v[i]);
    }
    return jinja_list_val(l);
}

static jval extreme(jrt *r, jval self, const jargs *a, int sign) {
    jiter it = jinja_iterate(r, self);
    if (it.n == 0) return jinja_undef_hint(r, "No aggregated item, sequence was empty.");
    jval none = {.kind = JV_MISSING}, best = it.v[0];
    jval best_key = fold_case(r, follow(r, best, a->v[1], none), flag_arg(a->v[0]));
    for (size_t i = 1; i < it.n; i++) {
        jinja_charge(r, 1);
        jval key = fold_case(r, follow(r, it.v[i], a->v[1], none), flag_arg(a->v[0]));
        int c = jinja_order(r, key, best_key, sign < 0 ? "<" : ">");
        if (sign < 0 ? c >= 0 : c <= 0) continue;
        best = it.v[i];
        best_key = key;
    }
    return best;
}

static jval f_min(jrt *r, jval self, const jargs *a) {
    return extreme(r, self, a, -1);
}

static jval f_max(jrt *r, jval self, const jargs *a) {
    return extreme(r, self, a, 1);
}

static jval f_sum(jrt *r, jval self, const jargs *a) {
    jiter it = jinja_iterate(r, self);
    jval none = {.kind = JV_MISSING}, sum = jv_is_given(a->v[1]) ? a->v[1] : jv_int(0);
    if (sum.kind == JV_STR) jinja_fail(r, MX_INVALID, "sum() can't sum strings");
    for (size_t i = 0; i < it.n; i++) {
        jinja_charge(r, 1);
        sum = jinja_binary(r, JO_ADD, sum, follow(r, it.v[i], a->v[0], none));
    }
    return sum;
}

// --- selecting -----------------------------------------------------------------------------------

static jargs rest_args(const jargs *a, size_t skip) {
    jargs rest = *a;
    size_t n = MX_MIN(skip, a->n);
    rest.n -= n;
    if (rest.v) rest.v += n;
    return rest;
}

static jval f_map(jrt *r, jval self, const jargs *a) {
    jlist *l = jinja_list_new(r, JL_GEN, 0);
    if (!jinja_truth(self)) return jinja_list_val(l);
    jiter it = jinja_iterate(r, self);
    l->tainted = it.tainted;
    jval attribute = {.kind = JV_MISSING}, dflt = {.kind = JV_MISSING};
    for (size_t i = 0; i < a->n_kw && a->n == 0; i++) {
        if (mx_str_is(a->kw[i], "attribute"))
            attribute = a->kw_v[i];
        else if (mx_str_is(a->kw[i], "default"))
            dflt = a->kw_v[i];
        else
            jinja_fail(r, MX_INVALID, "map: unexpected keyword argument");
    }
    const jfunc *f = NULL;
    jargs rest = rest_args(a, 1);
    if (!jv_is_given(attribute)) {
        if (a->n == 0) jinja_fail(r, MX_INVALID, "map requires a filter argument");
        const jstr *name = jinja_to_str(r, a->v[0]);
        f = jinja_find_filter(jinja_text(name));
        if (!f)
            jinja_fail(r, MX_INVALID, "map: no filter named '%.*s'", (int)MX_MIN(name->n, 60u),
                       name->p);
    }
    for (size_t i = 0; i < it.n; i++) {
        jinja_charge(r, 1);
        jval v = f ? jinja_call_func(r, "filter", f, it.v[i], &rest)
                   : follow(r, it.v[i], attribute, dflt);
        jinja_list_add(r, l, v);
    }
    return jinja_list_val(l);
}

static jval choose(jrt *r, jval self, const jargs *a, bool by_attr, bool want) {
    jlist *l = jinja_list_new(r, JL_GEN, 0);
    if (!jinja_truth(self)) return jinja_list_val(l);
    jiter it = jinja_iterate(r, self);
    l->tainted = it.tainted;
    size_t skip = by_attr ? 1 : 0;
    if (a->n < skip) jinja_fail(r, MX_INVALID, "missing parameter for attribute name");
    const jfunc *test = NULL;
    if (a->n > skip) {
        const jstr *name = jinja_to_str(r, a->v[skip]);
        test = jinja_find_test(jinja_text(name));
        if (!test)
            jinja_fail(r, MX_INVALID, "no test named '%.*s'", (int)MX_MIN(name->n, 60u), name->p);
    }
    jargs rest = rest_args(a, skip + 1);
    jval none = {.kind = JV_MISSING};
    for (size_t i = 0; i < it.n; i++) {
        jinja_charge(r, 1);
        jval v = by_attr ? follow(r, it.v[i], a->v[0], none) : it.v[i];
        bool ok = jinja_truth(test ? jinja_call_func(r, "test", test, v, &rest) : v);
        if (ok == want) jinja_list_add(r, l, it.v[i]);
    }
    return jinja_list_val(l);
}

static jval f_select(jrt *r, jval self, const jargs *a) {
    return choose(r, self, a, false, true);
}

static jval f_reject(jrt *r, jval self, const jargs *a) {
    return choose(r, self, a, false, false);
}

static jval f_selectattr(jrt *r, jval self, const jargs *a) {
    return choose(r, self, a, true, true);
}

static jval f_rejectattr(jrt *r, jval self, const jargs *a) {
    return choose(r, self, a, true, false);
}

// --- the rest ------------------------------------------------------------------------------------

static jval f_length(jrt *r, jval self, const jargs *a) {
    (void)a;
    return jv_taint(jv_int(jinja_length(r, self)), jinja_tainted(self));
}

static jval f_first(jrt *r, jval self, const jargs *a) {
    (void)a;
    if (self.kind == JV_LIST && self.u.l->form == JL_GEN && self.u.l->pos < self.u.l->n)
        return self.u.l->v[self.u.l->pos++];
    if (self.kind == JV_STR && self.u.s->n) return jinja_get_item(r, self, jv_int(0));
    jiter it = jinja_iterate(r, self);
    return it.n ? it.v[0] : jinja_undef_hint(r, "No first item, sequence was empty.");
}

static jval f_last(jrt *r, jval self, const jargs *a) {
    (void)a;
    if (self.kind == JV_LIST && self.u.l->form == JL_GEN)
        jinja_fail(r, MX_INVALID, "'generator' object is not reversible");
    if (self.kind == JV_STR && self.u.s->n) return jinja_get_item(r, self, jv_int(-1));
    jiter it = jinja_iterate(r, self);
    return it.n ? it.v[it.n - 1] : jinja_undef_hint(r, "No last item, sequence was empty.");
}

static jval f_list(jrt *r, jval self, const jargs *a) {
    (void)a;
    jiter it = jinja_iterate(r, self);
    jlist *l = jinja_list_new(r, JL_LIST, it.n);
    l->tainted = it.tainted;
    for (size_t i = 0; i < it.n; i++) jinja_list_add(r, l, it.v[i]);
    jinja_charge(r, it.n / 8);
    return jinja_list_val(l);
}

static jval f_join(jrt *r, jval self, const jargs *a) {
    jiter it = jinja_iterate(r, self);
    const jstr *sep = jv_is_given(a->v[0]) ? jinja_to_str(r, a->v[0]) : &jinja_empty;
    if (jv_is_given(a->v[1]) && a->v[1].kind != JV_NONE) {
        jval *v = JINJA_ARRAY(r, jval, it.n), none = {.kind = JV_MISSING};
        for (size_t i = 0; i < it.n; i++) v[i] = follow(r, it.v[i], a->v[1], none);
        it.v = v;
    }
    return jv_str(jinja_text_join(r, sep, it, false));
}

static jval f_reverse(jrt *r, jval self, const jargs *a) {
    (void)a;
    jval none = {.kind = JV_MISSING};
    if (self.kind == JV_STR) return jinja_slice(r, self, none, none, jv_int(-1));
    jiter it = jinja_iterate(r, self);
    jlist *l = jinja_list_new(r, JL_GEN, it.n);
    l->tainted = it.tainted;
    for (size_t i = it.n; i-- > 0;) jinja_list_add(r, l, it.v[i]);
    jinja_charge(r, it.n / 8);
    return jinja_list_val(l);
}

static jval f_items(jrt *r, jval self, const jargs *a) {
    (void)a;
    jlist *l = jinja_list_new(r, JL_GEN, 0);
    if (self.kind == JV_UNDEF) return jinja_list_val(l);
    if (self.kind != JV_DICT) jinja_fail(r, MX_INVALID, "Can only get item pairs from a mapping.");
    l->tainted = jinja_tainted(self);
    for (size_t i = 0; i < self.u.d->n; i++)
        jinja_list_add(r, l, jinja_pair(r, self.u.d->v[i].key, self.u.d->v[i].value));
    jinja_charge(r, self.u.d->n / 4);
    return jinja_list_val(l);
}

static int64_t count_arg(jrt *r, jval v, const char *what) {
    int64_t n;
    if (!jinja_as_int(v, &n) || n < 1 || n > JINJA_MAX_RANGE)
        jinja_fail(r, MX_INVALID, "%s: unusable number of items", what);
    return n;
}

static jval f_batch(jrt *r, jval self, const jargs *a) {
    jiter it = jinja_iterate(r, self);
    size_t n = (size_t)count_arg(r, a->v[0], "batch");
    bool fill = jv_is_given(a->v[1]) && a->v[1].kind != JV_NONE;
    jlist *out = jinja_list_new(r, JL_GEN, 0);
    out->tainted = it.tainted;
    for (size_t i = 0; i < it.n; i += n) {
        jlist *part = jinja_list_new(r, JL_LIST, 0);
        for (size_t k = i; k < it.n && k < i + n; k++) jinja_list_add(r, part, it.v[k]);
        while (fill && part->n < n) jinja_list_add(r, part, a->v[1]);
        jinja_charge(r, part->n);
        jinja_list_add(r, out, jinja_list_val(part));
    }
    return jinja_list_val(out);
}

static jval f_slice(jrt *r, jval self, const jargs *a) {
    jiter it = jinja_iterate(r, self);
    size_t n = (size_t)count_arg(r, a->v[0], "slice"), at = 0;
    bool fill = jv_is_given(a->v[1]) && a->v[1].kind != JV_NONE;
    jlist *out = jinja_list_new(r, JL_GEN, n);
    out->tainted = it.tainted;
    for (size_t i = 0; i < n; i++) {
        jlist *part = jinja_list_new(r, JL_LIST, 0);
        size_t size = it.n / n + (i < it.n % n);
        for (size_t k = 0; k < size; k++) jinja_list_add(r, part, it.v[at++]);
        if (fill && i >= it.n % n) jinja_list_add(r, part, a->v[1]);
        jinja_charge(r, size + 1);
        jinja_list_add(r, out, jinja_list_val(part));
    }
    return jinja_list_val(out);
}

static jval f_attr(jrt *r, jval self, const jargs *a) {
    const jstr *name = jinja_to_str(r, a->v[0]);
    if (self.kind == JV_DICT) {
        const jfunc *f = jinja_find_method(self, jinja_text(name));
        if (!f) return jinja_undef(r, "dict", jinja_text(name));
    }
    return jinja_get_attr(r, self, name);
}

const jfunc jinja_seq_filters[] = {
    {"length", f_length, "", 0},
    {"count", f_length, "", 0},
    {"first", f_first, "", 0},
    {"last", f_last, "", 0},
    {"list", f_list, "", 0},
    {"join", f_join, "d,attribute", 0},
    {"sort", f_sort, "reverse,case_sensitive,attribute", 0},
    {"dictsort", f_dictsort, "case_sensitive,by,reverse", 0},
    {"groupby", f_groupby, "attribute,default,case_sensitive", 1},
    {"unique", f_unique, "case_sensitive,attribute", 0},
    {"min", f_min, "case_sensitive,attribute", 0},
    {"max", f_max, "case_sensitive,attribute", 0},
    {"sum", f_sum, "attribute,start", 0},
    {"map", f_map, "*", 0},
    {"select", f_select, "*", 0},
    {"reject", f_reject, "*", 0},
    {"selectattr", f_selectattr, "*", 0},
    {"rejectattr", f_rejectattr, "*", 0},
    {"reverse", f_reverse, "", 0},
    {"items", f_items, "", 0},
    {"batch", f_batch, "linecount,fill_with", 1},
    {"slice", f_slice, "slices,fill_with", 1},
    {"attr", f_attr, "name", 1},
};
const size_t jinja_n_seq_filters = MX_COUNT(jinja_seq_filters);
