// Values of templates: lists, dictionaries, undefined, iteration, and JSON to values. Everything
// lives in the render's arena. It does not know operators or printing.
//
// Lists and dictionaries are built once and never change after (the sandbox that templates are
// written for forbids it), so each knows its own depth and whether untrusted data is inside.
#include "text/jinja_int.h"

// --- undefined -----------------------------------------------------------------------------------

jval jinja_undef(jrt *r, const char *owner, mx_str name) {
    jundef *u = JINJA_NEW(r, jundef);
    *u = (jundef){owner, name, NULL};
    return (jval){.kind = JV_UNDEF, .u.undef = u};
}

jval jinja_undef_hint(jrt *r, const char *hint) {
    jundef *u = JINJA_NEW(r, jundef);
    *u = (jundef){.hint = hint};
    return (jval){.kind = JV_UNDEF, .u.undef = u};
}

_Noreturn void jinja_fail_undef(jrt *r, jval v) {
    const jundef *u = v.u.undef;
    int n = (int)MX_MIN(u->name.n, 200u);
    if (u->hint) jinja_fail(r, MX_INVALID, "%s", u->hint);
    if (!u->owner) jinja_fail(r, MX_INVALID, "'%.*s' is undefined", n, u->name.p);
    jinja_fail(r, MX_INVALID, "'%s object' has no attribute '%.*s'", u->owner, n, u->name.p);
}

// --- lists ---------------------------------------------------------------------------------------

jlist *jinja_list_new(jrt *r, jform form, size_t cap) {
    jlist *l = JINJA_NEW(r, jlist);
    l->form = form;
    l->depth = 1;
    l->cap = cap;
    l->v = cap ? JINJA_ARRAY(r, jval, cap) : NULL;
    return l;
}

static int depth_of(jval v) {
    return v.kind == JV_LIST ? v.u.l->depth : v.kind == JV_DICT ? v.u.d->depth : 0;
}

static void check_depth(jrt *r, int *depth, jval v) {
    int d = depth_of(v) + 1;
    if (d > JINJA_MAX_NEST)
        jinja_fail(r, MX_TOOLARGE, "values nested deeper than %d", JINJA_MAX_NEST);
    *depth = MX_MAX(*depth, d);
}

void jinja_list_add(jrt *r, jlist *l, jval v) {
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 8;
        jval *items = JINJA_ARRAY(r, jval, cap);
        if (l->n) memcpy(items, l->v, l->n * sizeof *items);
        l->v = items;
        l->cap = cap;
    }
    check_depth(r, &l->depth, v);
    l->tainted |= jinja_tainted(v);
    l->v[l->n++] = v;
}

jval jinja_list_val(jlist *l) {
    return (jval){.kind = JV_LIST, .u.l = l};
}

jval jinja_pair(jrt *r, jval a, jval b) {
    jlist *l = jinja_list_new(r, JL_TUPLE, 2);
    jinja_list_add(r, l, a);
    jinja_list_add(r, l, b);
    return jinja_list_val(l);
}

// --- dictionaries --------------------------------------------------------------------------------

enum { INDEX_FROM = 9 };

bool jinja_hashable(jval v) {
    if (v.kind == JV_DICT) return false;
    if (v.kind != JV_LIST) return true;
    if (v.u.l->form == JL_GEN || v.u.l->form == JL_RANGE) return true; // by identity
    if (v.u.l->form != JL_TUPLE && v.u.l->form != JL_GROUP) return false;
    for (size_t i = 0; i < v.u.l->n; i++)
        if (!jinja_hashable(v.u.l->v[i])) return false;
    return true;
}

static uint32_t hash_bytes(const void *p, size_t n, uint64_t seed) {
    return (uint32_t)mx_hash64(p, n, seed);
}

uint32_t jinja_hash(jrt *r, jval v) {
    int64_t i;
    double f;
    uint32_t h = 77;
    switch (v.kind) {
    case JV_STR: jinja_charge_bytes(r, v.u.s->n); return hash_bytes(v.u.s->p, v.u.s->n, 1);
    case JV_BOOL:
    case JV_INT: i = v.kind == JV_BOOL ? v.u.b : v.u.i; return hash_bytes(&i, sizeof i, 2);
    case JV_FLOAT:
        f = v.u.f;
        if (f >= -9e18 && f <= 9e18 && (double)(int64_t)f == f)
            return jinja_hash(r, jv_int((int64_t)f));
        return hash_bytes(&f, sizeof f, 3);
    case JV_LIST:
        if (!jinja_hashable(v)) break;
        if (v.u.l->form == JL_GEN || v.u.l->form == JL_RANGE)
            return hash_bytes(&v.u.l, sizeof v.u.l, 4);
        for (size_t k = 0; k < v.u.l->n; k++) h = h * 31 + jinja_hash(r, v.u.l->v[k]);
        return h;
    case JV_DICT: break;
    case JV_UNDEF:
    case JV_NONE:
    case JV_MISSING: return 7 + (uint32_t)v.kind;
    default: return hash_bytes(&v.u, sizeof v.u, 4);
    }
    jinja_fail(r, MX_INVALID, "unhashable type: '%s'", jinja_type_name(v));
}

jdict *jinja_dict_new(jrt *r, size_t cap) {
    jdict *d = JINJA_NEW(r, jdict);
    d->depth = 1;
    d->cap = cap;
    d->v = cap ? JINJA_ARRAY(r, jpair, cap) : NULL;
    return d;
}

static void index_put(jdict *d, size_t pos) {
    size_t mask = d->index_cap - 1, at = d->v[pos].hash & mask;
    while (d->index[at]) at = (at + 1) & mask;
    d->index[at] = (uint32_t)(pos + 1);
}

static void grow(jrt *r, jdict *d) {
    size_t cap = d->cap ? d->cap * 2 : 8;
    jpair *v = JINJA_ARRAY(r, jpair, cap);
    if (d->n) memcpy(v, d->v, d->n * sizeof *v);
    d->v = v;
    d->cap = cap;
}

static void reindex(jrt *r, jdict *d) {
    if (d->n < INDEX_FROM || d->n * 2 <= d->index_cap) return;
    size_t cap = d->index_cap ? d->index_cap * 2 : 32;
    while (cap < d->n * 2) cap *= 2;
    d->index = JINJA_ARRAY(r, uint32_t, cap);
    d->index_cap = cap;
    for (size_t i = 0; i < d->n; i++) index_put(d, i);
}

static bool same_key(jrt *r, const jpair *p, jval key) {
    return p->key.kind == JV_STR && key.kind == JV_STR
               ? mx_str_eq(jinja_text(p->key.u.s), jinja_text(key.u.s))
               : jinja_equal(r, p->key, key);
}

static const jpair *find(jrt *r, const jdict *d, jval key, uint32_t hash) {
    if (!d->index_cap) {
        for (size_t i = 0; i < d->n; i++)
            if (d->v[i].hash == hash && same_key(r, &d->v[i], key)) return &d->v[i];
        return NULL;
    }
    for (size_t mask = d->index_cap - 1, at = hash & mask; d->index[at]; at = (at + 1) & mask) {
        const jpair *p = &d->v[d->index[at] - 1];
        if (p->hash == hash && same_key(r, p, key)) return p;
    }
    return NULL;
}

const jpair *jinja_dict_find(jrt *r, const jdict *d, jval key) {
    return find(r, d, key, jinja_hash(r, key));
}

const jpair *jinja_dict_find_str(const jdict *d, mx_str key) {
    jstr s = {.p = key.p, .n = key.n};
    return find(NULL, d, jv_str(&s), hash_bytes(key.p, key.n, 1));
}

void jinja_dict_set(jrt *r, jdict *d, jval key, jval value) {
    uint32_t hash = jinja_hash(r, key);
    jpair *p = (jpair *)find(r, d, key, hash);
    check_depth(r, &d->depth, value);
    check_depth(r, &d->depth, key);
    d->tainted |= jinja_tainted(key) || jinja_tainted(value);
    if (p) {
        p->value = value;
        return;
    }
    if (d->n == d->cap) grow(r, d);
    d->v[d->n++] = (jpair){key, value, hash};
    if (d->index_cap) index_put(d, d->n - 1);
    reindex(r, d);
}

jval jinja_dict_val(jdict *d) {
    return (jval){.kind = JV_DICT, .u.d = d};
}

// --- questions -----------------------------------------------------------------------------------

const char *jinja_type_name(jval v) {
    static const char *const forms[] = {"list",        "tuple",      "range",     "dict_keys",
                                        "dict_values", "dict_items", "generator", "tuple"};
    switch (v.kind) {
    case JV_MISSING: return "missing";
    case JV_UNDEF: return "Undefined";
    case JV_NONE: return "NoneType";
    case JV_BOOL: return "bool";
    case JV_INT: return "int";
    case JV_FLOAT: return "float";
    case JV_STR: return v.u.s->markup ? "Markup" : "str";
    case JV_LIST: return forms[v.u.l->form];
    case JV_DICT: return "dict";
    case JV_NS: return "Namespace";
    case JV_LOOP: return "LoopContext";
    case JV_MACRO: return "Macro";
    case JV_METHOD: return "method";
    case JV_FUNC: return "function";
    }
    return "?";
}

bool jinja_truth(jval v) {
    switch (v.kind) {
    case JV_MISSING:
    case JV_UNDEF:
    case JV_NONE: return false;
    case JV_BOOL: return v.u.b;
    case JV_INT: return v.u.i != 0;
    case JV_FLOAT: return v.u.f != 0;
    case JV_STR: return v.u.s->n != 0;
    case JV_LIST: return v.u.l->form == JL_GEN || v.u.l->n != 0;
    case JV_DICT: return v.u.d->n != 0;
    case JV_LOOP: return v.u.loop->n != 0;
    default: return true;
    }
}

bool jinja_tainted(jval v) {
    switch (v.kind) {
    case JV_STR: return !jinja_str_trusted(v.u.s);
    case JV_LIST: return v.tainted || v.u.l->tainted;
    case JV_DICT: return v.tainted || v.u.d->tainted;
    case JV_NS: return true; // may change, so never taken as trusted
    case JV_METHOD: return jinja_tainted(v.u.method->self);
    default: return v.tainted;
    }
}

int64_t jinja_length(jrt *r, jval v) {
    switch (v.kind) {
    case JV_UNDEF: return 0;
    case JV_STR: return (int64_t)v.u.s->n_chars;
    case JV_LIST:
        if (v.u.l->form != JL_GEN) return (int64_t)v.u.l->n;
        break;
    case JV_DICT: return (int64_t)v.u.d->n;
    case JV_LOOP: return (int64_t)v.u.loop->n;
    default: break;
    }
    jinja_fail(r, MX_INVALID, "object of type '%s' has no len()", jinja_type_name(v));
}

// --- iteration -----------------------------------------------------------------------------------

bool jinja_can_iterate(jval v) {
    return v.kind == JV_STR || v.kind == JV_LIST || v.kind == JV_DICT || v.kind == JV_UNDEF ||
           v.kind == JV_LOOP;
}

static jiter iterate_str(jrt *r, const jstr *s) {
    jiter it = {.n = s->n_chars, .v = JINJA_ARRAY(r, jval, s->n_chars)};
    jstr *plain = JINJA_NEW(r, jstr); // characters of marked text are not marked
    size_t at = 0;
    *plain = *s;
    plain->markup = false;
    for (size_t i = 0; i < it.n; i++) {
        size_t from = at;
        jinja_next_char(jinja_text(s), &at);
        it.v[i] = jv_str(jinja_str_part(r, plain, from, at));
    }
    jinja_charge(r, it.n / 2);
    return it;
}

jiter jinja_iterate(jrt *r, jval v) {
    jiter it = {.tainted = jinja_tainted(v)};
    switch (v.kind) {
    case JV_UNDEF: return it;
    case JV_STR: return iterate_str(r, v.u.s);
    case JV_LIST:
        it.v = v.u.l->v;
        it.n = v.u.l->n;
        if (v.u.l->form == JL_GEN) {
            if (v.u.l->pos) it.v += v.u.l->pos;
            it.n -= v.u.l->pos;
            v.u.l->pos = v.u.l->n;
        }
        return it;
    case JV_DICT:
        it.n = v.u.d->n;
        it.v = JINJA_ARRAY(r, jval, it.n);
        for (size_t i = 0; i < it.n; i++) it.v[i] = v.u.d->v[i].key;
        jinja_charge(r, it.n / 16);
        return it;
    default: break;
    }
    jinja_fail(r, MX_INVALID, "'%s' object is not iterable", jinja_type_name(v));
}

// --- JSON ----------------------------------------------------------------------------------------

static jval string_from_json(jrt *r, const char *p, size_t n, bool tainted) {
    if (!mx_utf8_valid((mx_str){p, n}))
        jinja_fail(r, MX_INVALID, "a string of the request is not valid UTF-8");
    return jv_str(jinja_str_view(r, (mx_str){p, n}, !tainted));
}

static jval object_from_json(jrt *r, const json_t *j, bool tainted, int depth) {
    jdict *d = jinja_dict_new(r, json_object_size(j));
    json_t *obj = (json_t *)j; // jansson's iterators do not change it
    for (void *it = json_object_iter(obj); it; it = json_object_iter_next(obj, it)) {
        const char *key = json_object_iter_key(it);
        jval k = string_from_json(r, key, json_object_iter_key_len(it), tainted);
        jinja_dict_set(r, d, k, jinja_from_json(r, json_object_iter_value(it), tainted, depth + 1));
    }
    d->tainted |= tainted;
    return jinja_dict_val(d);
}

jval jinja_from_json(jrt *r, const json_t *j, bool tainted, int depth) {
    if (depth >= JINJA_MAX_NEST)
        jinja_fail(r, MX_TOOLARGE, "values nested deeper than %d", JINJA_MAX_NEST);
    switch (json_typeof(j)) {
    case JSON_NULL: return jv_none();
    case JSON_TRUE: return jv_taint(jv_bool(true), tainted);
    case JSON_FALSE: return jv_taint(jv_bool(false), tainted);
    case JSON_INTEGER: return jv_taint(jv_int(json_integer_value(j)), tainted);
    case JSON_REAL: return jv_taint(jv_float(json_real_value(j)), tainted);
    case JSON_STRING:
        return string_from_json(r, json_string_value(j), json_string_length(j), tainted);
    case JSON_OBJECT: return object_from_json(r, j, tainted, depth);
    case JSON_ARRAY: break;
    }
    jlist *l = jinja_list_new(r, JL_LIST, json_array_size(j));
    for (size_t i = 0; i < json_array_size(j); i++)
        jinja_list_add(r, l, jinja_from_json(r, json_array_get(j, i), tainted, depth + 1));
    l->tainted |= tainted;
    return jinja_list_val(l);
}
