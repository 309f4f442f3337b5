// Expressions to values: walks the tree the parser made. State is the render's (jrt): scopes, step
// count, recursion depth. Errors leave through jinja_fail.
#include "text/jinja_int.h"

// --- scopes --------------------------------------------------------------------------------------

jscope *jinja_scope_push(jrt *r, jscope *parent) {
    jscope *s = JINJA_NEW(r, jscope);
    s->parent = parent;
    r->scope = s;
    return s;
}

void jinja_assign(jrt *r, int32_t name, jval v) {
    jscope *s = r->scope;
    for (size_t i = 0; i < s->n; i++) {
        if (s->v[i].name == name) {
            s->v[i].value = v;
            return;
        }
    }
    if (s->n == s->cap) {
        size_t cap = s->cap ? s->cap * 2 : 4;
        jbind *b = JINJA_ARRAY(r, jbind, cap);
        if (s->n) memcpy(b, s->v, s->n * sizeof *b);
        s->v = b;
        s->cap = cap;
    }
    s->v[s->n++] = (jbind){name, v};
}

jval jinja_lookup(jrt *r, int32_t name) {
    for (const jscope *s = r->scope; s; s = s->parent) {
        for (size_t i = 0; i < s->n; i++)
            if (s->v[i].name == name && jv_is_given(s->v[i].value)) return s->v[i].value;
    }
    const jfunc *f = jinja_find_global(r->t->name_text[name]);
    if (f) return (jval){.kind = JV_FUNC, .u.fn = f};
    return jinja_undef(r, NULL, r->t->name_text[name]);
}

// --- calls ---------------------------------------------------------------------------------------

static void add_star(jrt *r, jargs *a, const jnode *star) {
    if (!star) return;
    jiter it = jinja_iterate(r, jinja_eval(r, star));
    if (it.n > JINJA_MAX_ARGS) jinja_fail(r, MX_TOOLARGE, "more than %d arguments", JINJA_MAX_ARGS);
    jval *v = JINJA_ARRAY(r, jval, a->n + it.n);
    if (a->n) memcpy(v, a->v, a->n * sizeof *v);
    if (it.n) memcpy(v + a->n, it.v, it.n * sizeof *v);
    a->v = v;
    a->n += it.n;
}

static void add_star2(jrt *r, jargs *a, const jnode *star) {
    if (!star) return;
    jval m = jinja_eval(r, star);
    if (m.kind != JV_DICT) jinja_fail(r, MX_INVALID, "argument after ** must be a mapping");
    if (m.u.d->n > JINJA_MAX_ARGS)
        jinja_fail(r, MX_TOOLARGE, "more than %d arguments", JINJA_MAX_ARGS);
    size_t n = a->n_kw + m.u.d->n;
    mx_str *kw = JINJA_ARRAY(r, mx_str, n);
    jval *v = JINJA_ARRAY(r, jval, n);
    for (size_t i = 0; i < a->n_kw; i++) {
        kw[i] = a->kw[i];
        v[i] = a->kw_v[i];
    }
    for (size_t i = 0; i < m.u.d->n; i++) {
        const jpair *p = &m.u.d->v[i];
        if (p->key.kind != JV_STR) jinja_fail(r, MX_INVALID, "keywords must be strings");
        kw[a->n_kw + i] = jinja_text(p->key.u.s);
        v[a->n_kw + i] = p->value;
    }
    a->kw = kw;
    a->kw_v = v;
    a->n_kw = n;
}

static jargs eval_args(jrt *r, const jcallargs *c) {
    jargs a = {.n = c->n, .n_kw = c->n_kw, .kw = c->kw};
    a.v = c->n ? JINJA_ARRAY(r, jval, c->n) : NULL;
    a.kw_v = c->n_kw ? JINJA_ARRAY(r, jval, c->n_kw) : NULL;
    for (size_t i = 0; i < c->n; i++) a.v[i] = jinja_eval(r, c->v[i]);
    for (size_t i = 0; i < c->n_kw; i++) a.kw_v[i] = jinja_eval(r, c->kw_v[i]);
    add_star(r, &a, c->star);
    add_star2(r, &a, c->star2);
    return a;
}

// Position of `name` in the comma separated list, or -1; *n_params gets the count.
static int param_index(const char *params, mx_str name, size_t *n_params) {
    int found = -1;
    size_t i = 0;
    for (const char *p = params; *p; i++) {
        const char *end = strchr(p, ',');
        size_t n = end ? (size_t)(end - p) : strlen(p);
        if (mx_str_eq((mx_str){p, n}, name)) found = (int)i;
        p += n + (end != NULL);
    }
    *n_params = i;
    return found;
}

jval jinja_call_func(jrt *r, const char *what, const jfunc *f, jval self, const jargs *args) {
    jinja_charge(r, 1);
    if (f->params[0] == '*') return f->call(r, self, args);
    jval slots[8] = {{.kind = JV_MISSING}};
    size_t n;
    param_index(f->params, mx_str_of("*"), &n);
    CHECK(n <= MX_COUNT(slots));
    if (args->n > n)
        jinja_fail(r, MX_INVALID, "%s '%s' takes at most %zu arguments (%zu given)", what, f->name,
                   n, args->n);
    for (size_t i = 0; i < args->n; i++) slots[i] = args->v[i];
    for (size_t i = 0; i < args->n_kw; i++) {
        int at = param_index(f->params, args->kw[i], &n);
        if (at < 0 || jv_is_given(slots[at]))
            jinja_fail(r, MX_INVALID, "%s '%s' got an unexpected argument '%.*s'", what, f->name,
                       (int)MX_MIN(args->kw[i].n, 100u), args->kw[i].p);
        slots[at] = args->kw_v[i];
    }
    for (int i = 0; i < f->n_required; i++)
        if (!jv_is_given(slots[i]))
            jinja_fail(r, MX_INVALID, "%s '%s' needs more arguments", what, f->name);
    return f->call(r, self, &(jargs){.n = n, .v = slots});
}

jval jinja_call(jrt *r, jval callee, const jargs *args) {
    switch (callee.kind) {
    case JV_METHOD:
        return jinja_call_func(r, "method", callee.u.method->fn, callee.u.method->self, args);
    case JV_FUNC: return jinja_call_func(r, "function", callee.u.fn, jv_none(), args);
    case JV_MACRO: return jinja_call_macro(r, callee.u.macro, args);
    case JV_LOOP: return jinja_call_loop(r, callee.u.loop, args);
    case JV_UNDEF: jinja_fail_undef(r, callee);
    default: jinja_fail(r, MX_INVALID, "'%s' object is not callable", jinja_type_name(callee));
    }
}

static jval eval_call(jrt *r, const jnode *n) {
    jval callee = jinja_eval(r, n->a);
    jargs args = eval_args(r, n->args);
    r->line = n->line;
    return jinja_call(r, callee, &args);
}

static jval eval_filter(jrt *r, const jnode *n) {
    jval in = jinja_eval(r, n->a);
    jargs args = eval_args(r, n->args);
    r->line = n->line;
    bool is_test = n->kind == JN_TEST;
    return jinja_call_func(r, is_test ? "test" : "filter", n->fn, in, &args);
}

// --- the rest ------------------------------------------------------------------------------------

static jval eval_list(jrt *r, const jnode *n) {
    jlist *l = jinja_list_new(r, n->kind == JN_TUPLE ? JL_TUPLE : JL_LIST, n->n);
    for (size_t i = 0; i < n->n; i++) jinja_list_add(r, l, jinja_eval(r, n->kids[i]));
    return jinja_list_val(l);
}

static jval eval_dict(jrt *r, const jnode *n) {
    jdict *d = jinja_dict_new(r, n->n / 2);
    for (size_t i = 0; i < n->n; i += 2) {
        jval key = jinja_eval(r, n->kids[i]);
        jinja_dict_set(r, d, key, jinja_eval(r, n->kids[i + 1]));
    }
    return jinja_dict_val(d);
}

static jval eval_concat(jrt *r, const jnode *n) {
    const jstr *s = &jinja_empty;
    for (size_t i = 0; i < n->n; i++)
        s = jinja_str_concat(r, s, jinja_to_str(r, jinja_eval(r, n->kids[i])));
    return jv_str(s);
}

static jval eval_compare(jrt *r, const jnode *n) {
    jval left = jinja_eval(r, n->a);
    for (size_t i = 0; i < n->n; i++) {
        jval right = jinja_eval(r, n->kids[i]);
        r->line = n->line;
        if (!jinja_compare(r, n->ops[i], left, right)) return jv_bool(false);
        left = right;
    }
    return jv_bool(true);
}

static jval eval_optional(jrt *r, const jnode *n) {
    return n ? jinja_eval(r, n) : (jval){.kind = JV_MISSING};
}

static jval eval_slice(jrt *r, const jnode *n) {
    jval of = jinja_eval(r, n->a), from = eval_optional(r, n->b), to = eval_optional(r, n->c);
    jval step = eval_optional(r, n->d);
    r->line = n->line;
    return jinja_slice(r, of, from, to, step);
}

static jval eval_cond(jrt *r, const jnode *n) {
    if (jinja_truth(jinja_eval(r, n->a))) return jinja_eval(r, n->b);
    if (n->c) return jinja_eval(r, n->c);
    return jinja_undef_hint(r, "the inline if-expression was false and has no else");
}

static jval eval_binary(jrt *r, const jnode *n) {
    jval a = jinja_eval(r, n->a), b = jinja_eval(r, n->b);
    r->line = n->line;
    return jinja_binary(r, n->op, a, b);
}

static jval eval_item(jrt *r, const jnode *n) {
    jval of = jinja_eval(r, n->a), key = jinja_eval(r, n->b);
    r->line = n->line;
    return jinja_get_item(r, of, key);
}

static jval eval_attr(jrt *r, const jnode *n) {
    jval of = jinja_eval(r, n->a);
    r->line = n->line;
    return jinja_get_attr(r, of, n->str);
}

static jval eval_sign(jrt *r, const jnode *n) {
    jval v = jinja_eval(r, n->a);
    double f;
    r->line = n->line;
    if (n->kind == JN_NEG) return jinja_negate(r, v);
    if (v.kind == JV_UNDEF) jinja_fail_undef(r, v);
    if (!jinja_as_number(v, &f))
        jinja_fail(r, MX_INVALID, "bad operand type for unary +: '%s'", jinja_type_name(v));
    return v.kind == JV_BOOL ? jv_int(v.u.b) : v;
}

static jval eval_node(jrt *r, const jnode *n) {
    jval v;
    switch (n->kind) {
    case JN_CONST: return n->value;
    case JN_NAME: return jinja_lookup(r, n->name);
    case JN_LIST:
    case JN_TUPLE: return eval_list(r, n);
    case JN_DICT: return eval_dict(r, n);
    case JN_ATTR: return eval_attr(r, n);
    case JN_ITEM: return eval_item(r, n);
    case JN_SLICE: return eval_slice(r, n);
    case JN_CALL: return eval_call(r, n);
    case JN_FILTER:
    case JN_TEST: return eval_filter(r, n);
    case JN_NOT: return jv_bool(!jinja_truth(jinja_eval(r, n->a)));
    case JN_AND: v = jinja_eval(r, n->a); return jinja_truth(v) ? jinja_eval(r, n->b) : v;
    case JN_OR: v = jinja_eval(r, n->a); return jinja_truth(v) ? v : jinja_eval(r, n->b);
    case JN_NEG:
    case JN_POS: return eval_sign(r, n);
    case JN_BINARY: return eval_binary(r, n);
    case JN_CONCAT: return eval_concat(r, n);
    case JN_COMPARE: return eval_compare(r, n);
    case JN_COND: return eval_cond(r, n);
    case JN_UNKNOWN:
        r->line = n->line;
        jinja_fail(r, n->value.u.b ? MX_UNSUPPORTED : MX_FORMAT, "%s %s '%.*s'",
                   n->value.u.b ? "unsupported" : "unknown", n->flag ? "filter" : "test",
                   (int)MX_MIN(n->str->n, 100u), n->str->p);
    default: break;
    }
    CHECKF(false, "no expression: node kind %d", (int)n->kind);
}

jval jinja_eval(jrt *r, const jnode *n) {
    jinja_descend(r);
    jinja_charge(r, 1);
    jval v = eval_node(r, n);
    r->depth--;
    return v;
}
