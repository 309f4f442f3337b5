// Statements: runs the tree, writing to the render's present buffer. Scopes follow Jinja: loops,
// macros, call blocks, with, filter and set blocks have one of their own; if does not.
#include "text/jinja_int.h"

static void assign_to(jrt *r, const jnode *target, jval v) {
    if (target->kind == JN_NAME) {
        jinja_assign(r, target->name, v);
        return;
    }
    if (target->kind == JN_NSREF) {
        jval ns = jinja_lookup(r, target->name);
        r->line = target->line;
        if (ns.kind != JV_NS)
            jinja_fail(r, MX_INVALID, "cannot assign attribute on non-namespace object");
        if (target->str->n && target->str->p[0] == '_')
            jinja_fail(r, MX_INVALID, "namespace attribute '%.60s' begins with an underscore",
                       target->str->p);
        jinja_dict_set(r, ns.u.d, jv_str(target->str), v);
        return;
    }
    jiter it = jinja_iterate(r, v);
    r->line = target->line;
    if (it.n != target->n)
        jinja_fail(r, MX_INVALID, "%s values to unpack (expected %zu, got %zu)",
                   it.n < target->n ? "not enough" : "too many", target->n, it.n);
    for (size_t i = 0; i < it.n; i++) assign_to(r, target->kids[i], it.v[i]);
}

// Runs a body into a buffer of its own, in the present scope.
static const jstr *capture(jrt *r, const jnode *body, jflow *flow) {
    jbuf *outer = r->out;
    r->out = jinja_buf_new(r, 64);
    jflow f = jinja_exec(r, body);
    const jstr *s = jinja_buf_take(r, r->out);
    r->out = outer;
    if (flow) *flow = f;
    return s;
}

static void mark_captured(jscope *s) {
    for (; s && !s->captured; s = s->parent) s->captured = true;
}

// --- loops ---------------------------------------------------------------------------------------

// The items for which the loop's `if` holds. The condition sees the target, not `loop`.
static jiter filter_items(jrt *r, const jnode *n, jiter it, jscope *outer) {
    jlist *kept = jinja_list_new(r, JL_LIST, 0);
    jinja_scope_push(r, outer);
    for (size_t i = 0; i < it.n; i++) {
        assign_to(r, n->a, it.v[i]);
        if (jinja_truth(jinja_eval(r, n->c))) jinja_list_add(r, kept, it.v[i]);
    }
    r->scope = outer;
    return (jiter){kept->v, kept->n, it.tainted};
}

static jflow run_loop(jrt *r, const jnode *n, jval items, int depth0) {
    jscope *outer = r->scope;
    r->line = n->line;
    jiter it = jinja_iterate(r, items);
    if (n->c) it = filter_items(r, n, it, outer);
    jloop *loop = JINJA_NEW(r, jloop);
    *loop = (jloop){.node = n, .scope = outer, .items = it.v, .n = it.n, .depth0 = depth0};
    jscope *s = NULL;
    jflow flow = JF_NEXT;
    bool completed = false; // Jinja runs `else` unless some pass reached its end
    for (; loop->index0 < it.n && flow != JF_BREAK; loop->index0++) {
        jinja_charge(r, 1);
        if (!s || s->captured) s = jinja_scope_push(r, outer);
        s->n = 0;
        r->scope = s;
        jinja_assign(r, r->t->id_loop, (jval){.kind = JV_LOOP, .u.loop = loop});
        assign_to(r, n->a, it.v[loop->index0]);
        flow = jinja_exec(r, n->body);
        completed |= flow == JF_NEXT;
    }
    r->scope = outer;
    if (completed || !n->els) return JF_NEXT;
    jinja_scope_push(r, outer);
    flow = jinja_exec(r, n->els);
    r->scope = outer;
    return flow;
}

jval jinja_call_loop(jrt *r, jloop *loop, const jargs *args) {
    if (!loop->node->flag)
        jinja_fail(r, MX_INVALID, "the loop must have the 'recursive' marker to be called");
    if (args->n != 1 || args->n_kw) jinja_fail(r, MX_INVALID, "loop() takes one argument");
    if (++r->calls > JINJA_MAX_NEST)
        jinja_fail(r, MX_TOOLARGE, "calls nested deeper than %d", JINJA_MAX_NEST);
    jbuf *outer = r->out;
    jscope *scope = r->scope;
    r->out = jinja_buf_new(r, 64);
    r->scope = loop->scope;
    run_loop(r, loop->node, args->v[0], loop->depth0 + 1);
    const jstr *s = jinja_buf_take(r, r->out);
    r->out = outer;
    r->scope = scope;
    r->calls--;
    return jv_str(s);
}

static jval loop_cycle(jrt *r, jval self, const jargs *a) {
    if (a->n == 0) jinja_fail(r, MX_INVALID, "no items for cycling given");
    return a->v[self.u.loop->index0 % a->n];
}

static jval loop_changed(jrt *r, jval self, const jargs *a) {
    jlist *l = jinja_list_new(r, JL_TUPLE, a->n);
    for (size_t i = 0; i < a->n; i++) jinja_list_add(r, l, a->v[i]);
    jloop *loop = self.u.loop;
    bool same =
        jv_is_given(loop->last_changed) && jinja_equal(r, loop->last_changed, jinja_list_val(l));
    loop->last_changed = jinja_list_val(l);
    return jv_bool(!same);
}

jval jinja_loop_attr(jrt *r, jloop *loop, mx_str name) {
    static const jfunc methods[] = {{"cycle", loop_cycle, "*", 0},
                                    {"changed", loop_changed, "*", 0}};
    int64_t i = (int64_t)loop->index0, n = (int64_t)loop->n;
    if (mx_str_is(name, "index")) return jv_int(i + 1);
    if (mx_str_is(name, "index0")) return jv_int(i);
    if (mx_str_is(name, "first")) return jv_bool(i == 0);
    if (mx_str_is(name, "last")) return jv_bool(i + 1 == n);
    if (mx_str_is(name, "length")) return jv_int(n);
    if (mx_str_is(name, "revindex")) return jv_int(n - i);
    if (mx_str_is(name, "revindex0")) return jv_int(n - i - 1);
    if (mx_str_is(name, "depth")) return jv_int(loop->depth0 + 1);
    if (mx_str_is(name, "depth0")) return jv_int(loop->depth0);
    if (mx_str_is(name, "previtem"))
        return i > 0 ? loop->items[i - 1] : jinja_undef_hint(r, "there is no previous item");
    if (mx_str_is(name, "nextitem"))
        return i + 1 < n ? loop->items[i + 1] : jinja_undef_hint(r, "there is no next item");
    const jfunc *f = jinja_find_in(methods, MX_COUNT(methods), name);
    if (!f) return (jval){.kind = JV_MISSING};
    jmethod *m = JINJA_NEW(r, jmethod);
    *m = (jmethod){{.kind = JV_LOOP, .u.loop = loop}, f};
    return (jval){.kind = JV_METHOD, .u.method = m};
}

// --- macros --------------------------------------------------------------------------------------

// Takes the keyword argument `name` out of args; JV_MISSING when absent.
static jval take_keyword(const jargs *args, mx_str name, bool *used) {
    for (size_t i = 0; i < args->n_kw; i++) {
        if (used[i] || !mx_str_eq(args->kw[i], name)) continue;
        used[i] = true;
        return args->kw_v[i];
    }
    return (jval){.kind = JV_MISSING};
}

static void bind_rest(jrt *r, const jnode *n, const jargs *args, bool *used) {
    jval caller = take_keyword(args, mx_str_of("caller"), used);
    if (n->uses & JUSE_CALLER) {
        if (!jv_is_given(caller)) caller = jinja_undef_hint(r, "No caller defined");
        jinja_assign(r, r->t->id_caller, caller);
    } else if (jv_is_given(caller)) {
        jinja_fail(r, MX_INVALID, "macro '%.60s' takes no caller", n->str->p);
    }
    jdict *kwargs = jinja_dict_new(r, 0);
    for (size_t i = 0; i < args->n_kw; i++) {
        if (used[i]) continue;
        if (!(n->uses & JUSE_KWARGS))
            jinja_fail(r, MX_INVALID, "macro '%.60s' takes no keyword argument '%.*s'", n->str->p,
                       (int)MX_MIN(args->kw[i].n, 60u), args->kw[i].p);
        // the name may come from a dictionary of the request (**), so it is not trusted
        jinja_dict_set(r, kwargs, jv_str(jinja_str_view(r, args->kw[i], false)), args->kw_v[i]);
    }
    if (n->uses & JUSE_KWARGS) jinja_assign(r, r->t->id_kwargs, jinja_dict_val(kwargs));
    if (args->n > n->n && !(n->uses & JUSE_VARARGS))
        jinja_fail(r, MX_INVALID, "macro '%.60s' takes not more than %zu argument(s)", n->str->p,
                   n->n);
    jlist *varargs = jinja_list_new(r, JL_TUPLE, 0);
    for (size_t i = n->n; i < args->n; i++) jinja_list_add(r, varargs, args->v[i]);
    if (n->uses & JUSE_VARARGS) jinja_assign(r, r->t->id_varargs, jinja_list_val(varargs));
}

static void bind_params(jrt *r, const jnode *n, const jargs *args) {
    bool used[2 * JINJA_MAX_ARGS] = {false};
    if (args->n_kw > MX_COUNT(used)) jinja_fail(r, MX_TOOLARGE, "too many keyword arguments");
    jval given[JINJA_MAX_ARGS];
    for (size_t i = 0; i < n->n; i++) {
        jval kw = take_keyword(args, jinja_text(n->kids[i]->str), used);
        if (i < args->n && jv_is_given(kw))
            jinja_fail(r, MX_INVALID, "macro '%.60s' got two values for '%.60s'", n->str->p,
                       n->kids[i]->str->p);
        given[i] = i < args->n ? args->v[i] : kw;
    }
    bind_rest(r, n, args, used);
    for (size_t i = 0; i < n->n; i++) {
        if (!jv_is_given(given[i])) {
            given[i] = n->args->v[i] ? jinja_eval(r, n->args->v[i])
                                     : jinja_undef_hint(r, "a parameter was not provided");
        }
        jinja_assign(r, n->kids[i]->name, given[i]);
    }
}

jval jinja_call_macro(jrt *r, jmacro *m, const jargs *args) {
    if (++r->calls > JINJA_MAX_NEST)
        jinja_fail(r, MX_TOOLARGE, "calls nested deeper than %d", JINJA_MAX_NEST);
    jscope *outer = r->scope;
    jinja_scope_push(r, m->scope);
    bind_params(r, m->node, args);
    const jstr *s = capture(r, m->node->body, NULL);
    r->scope = outer;
    r->calls--;
    return jv_str(s);
}

static jval make_macro(jrt *r, const jnode *n) {
    jmacro *m = JINJA_NEW(r, jmacro);
    *m = (jmacro){n, r->scope};
    mark_captured(r->scope);
    return (jval){.kind = JV_MACRO, .u.macro = m};
}

static void exec_call_block(jrt *r, const jnode *n) {
    const jnode *call = n->a;
    jval callee = jinja_eval(r, call->a);
    const jcallargs *c = call->args;
    if (c->star || c->star2) jinja_fail(r, MX_UNSUPPORTED, "call block with * or ** arguments");
    jargs args = {.n = c->n, .n_kw = c->n_kw + 1};
    args.v = JINJA_ARRAY(r, jval, c->n);
    args.kw_v = JINJA_ARRAY(r, jval, args.n_kw);
    mx_str *kw = JINJA_ARRAY(r, mx_str, args.n_kw);
    for (size_t i = 0; i < c->n; i++) args.v[i] = jinja_eval(r, c->v[i]);
    for (size_t i = 0; i < c->n_kw; i++) {
        kw[i] = c->kw[i];
        args.kw_v[i] = jinja_eval(r, c->kw_v[i]);
    }
    kw[c->n_kw] = mx_str_of("caller");
    args.kw_v[c->n_kw] = make_macro(r, n);
    args.kw = kw;
    r->line = n->line;
    jinja_print(r, r->out, jinja_call(r, callee, &args));
}

// --- blocks --------------------------------------------------------------------------------------

// Puts text through the filters of {% filter %} or {% set x | f %}: n is the outermost, the
// innermost has no input.
static jval apply_filters(jrt *r, const jnode *n, jval in) {
    jinja_descend(r);
    if (n->a) in = apply_filters(r, n->a, in);
    r->depth--;
    const jcallargs *c = n->args;
    jargs args = {.n = c->n, .n_kw = c->n_kw, .kw = c->kw};
    args.v = JINJA_ARRAY(r, jval, c->n);
    args.kw_v = JINJA_ARRAY(r, jval, c->n_kw);
    for (size_t i = 0; i < c->n; i++) args.v[i] = jinja_eval(r, c->v[i]);
    for (size_t i = 0; i < c->n_kw; i++) args.kw_v[i] = jinja_eval(r, c->kw_v[i]);
    if (c->star || c->star2) jinja_fail(r, MX_UNSUPPORTED, "filter block with * or ** arguments");
    if (n->kind == JN_UNKNOWN) return jinja_eval(r, n); // fails with its name
    r->line = n->line;
    return jinja_call_func(r, "filter", n->fn, in, &args);
}

// Captures a block's text in a scope of its own. A break or continue in it leaves the block, and
// its text is dropped.
static jflow capture_block(jrt *r, const jnode *n, jval *v) {
    jscope *outer = r->scope;
    jflow flow;
    jinja_scope_push(r, outer);
    *v = jv_str(capture(r, n->body, &flow));
    r->scope = outer;
    return flow;
}

static jflow exec_set_block(jrt *r, const jnode *n) {
    jval v;
    jflow flow = capture_block(r, n, &v);
    if (flow != JF_NEXT) return flow;
    if (n->b) v = apply_filters(r, n->b, v);
    assign_to(r, n->a, v);
    return JF_NEXT;
}

static jflow exec_filter_block(jrt *r, const jnode *n) {
    jval v;
    jflow flow = capture_block(r, n, &v);
    if (flow == JF_NEXT) jinja_print(r, r->out, apply_filters(r, n->b, v));
    return flow;
}

static jflow exec_with(jrt *r, const jnode *n) {
    jscope *outer = r->scope;
    size_t n_vars = n->n / 2;
    jval *v = JINJA_ARRAY(r, jval, n_vars);
    for (size_t i = 0; i < n_vars; i++) v[i] = jinja_eval(r, n->kids[2 * i + 1]);
    jinja_scope_push(r, outer);
    for (size_t i = 0; i < n_vars; i++) assign_to(r, n->kids[2 * i], v[i]);
    jflow flow = jinja_exec(r, n->body);
    r->scope = outer;
    return flow;
}

static jflow exec_block(jrt *r, const jnode *n) {
    jscope *outer = r->scope;
    jinja_scope_push(r, outer);
    jflow flow = jinja_exec(r, n->body);
    r->scope = outer;
    return flow;
}

static jflow exec_if(jrt *r, const jnode *n) {
    for (size_t i = 0; i < n->n; i += 2)
        if (jinja_truth(jinja_eval(r, n->kids[i]))) return jinja_exec(r, n->kids[i + 1]);
    return n->els ? jinja_exec(r, n->els) : JF_NEXT;
}

static jflow exec_body(jrt *r, const jnode *n) {
    for (size_t i = 0; i < n->n; i++) {
        jflow f = jinja_exec(r, n->kids[i]);
        if (f != JF_NEXT) return f;
    }
    return JF_NEXT;
}

static jflow exec_node(jrt *r, const jnode *n) {
    switch (n->kind) {
    case JN_DATA: jinja_buf_str(r, r->out, n->str); return JF_NEXT;
    case JN_OUTPUT: jinja_print(r, r->out, jinja_eval(r, n->a)); return JF_NEXT;
    case JN_BODY: return exec_body(r, n);
    case JN_IF: return exec_if(r, n);
    case JN_FOR: return run_loop(r, n, jinja_eval(r, n->b), 0);
    case JN_SET: assign_to(r, n->a, jinja_eval(r, n->b)); return JF_NEXT;
    case JN_SETBLOCK: return exec_set_block(r, n);
    case JN_MACRO: jinja_assign(r, n->name, make_macro(r, n)); return JF_NEXT;
    case JN_CALLBLOCK: exec_call_block(r, n); return JF_NEXT;
    case JN_FILTERBLOCK: return exec_filter_block(r, n);
    case JN_WITH: return exec_with(r, n);
    case JN_BLOCK: return exec_block(r, n);
    case JN_BREAK: return JF_BREAK;
    case JN_CONTINUE: return JF_CONTINUE;
    default: break;
    }
    CHECKF(false, "no statement: node kind %d", (int)n->kind);
}

jflow jinja_exec(jrt *r, const jnode *n) {
    jinja_descend(r);
    jinja_charge(r, 1);
    r->line = n->line;
    jflow f = exec_node(r, n);
    r->depth--;
    return f;
}
