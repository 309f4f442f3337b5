// Expressions of the template language to a tree, by recursive descent in Jinja's own precedence:
// if-else, or, and, not, comparison, + -, ~, * / // %, **, unary, postfix, filters and tests.
// Nodes live in the template's arena. Filters and tests are looked up here, so that an unknown one
// is found when the template is compiled.
#include "text/jinja_int.h"

void jinja_enter(jparse *p) {
    if (++p->depth > JINJA_MAX_NEST)
        jinja_syntax_error(p, MX_TOOLARGE, p->tok[p->at].line, "nested deeper than %d levels",
                           JINJA_MAX_NEST);
}

jnode *jinja_node(jparse *p, jnode_kind kind, int line) {
    jnode *n = MX_ARENA_NEW(&p->t->arena, jnode);
    n->kind = kind;
    n->line = line;
    n->depth = 1;
    return n;
}

void jinja_node_depth(jparse *p, jnode *n, const jnode *child) {
    if (!child || child->depth < n->depth) return;
    n->depth = child->depth + 1;
    if (n->depth > JINJA_MAX_CHAIN)
        jinja_syntax_error(p, MX_TOOLARGE, n->line, "expression of more than %d steps",
                           JINJA_MAX_CHAIN);
}

void jinja_nodes_add(jparse *p, jnodes *l, jnode *n) {
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 4;
        jnode **v = MX_ARENA_ARRAY(&p->t->arena, jnode *, cap);
        if (l->n) memcpy(v, l->v, l->n * sizeof *v);
        l->v = v;
        l->cap = cap;
    }
    l->v[l->n++] = n;
}

static jnode *with_kids(jparse *p, jnode *n, const jnodes *l) {
    n->kids = l->v;
    n->n = l->n;
    for (size_t i = 0; i < l->n; i++) jinja_node_depth(p, n, l->v[i]);
    return n;
}

static jnode *binary(jparse *p, jop op, jnode *a, jnode *b, int line) {
    jnode *n = jinja_node(p, JN_BINARY, line);
    n->op = op;
    n->a = a;
    n->b = b;
    jinja_node_depth(p, n, a);
    jinja_node_depth(p, n, b);
    return n;
}

static jnode *unary_node(jparse *p, jnode_kind kind, jnode *a, int line) {
    jnode *n = jinja_node(p, kind, line);
    n->a = a;
    jinja_node_depth(p, n, a);
    return n;
}

static const jtok *now(const jparse *p) {
    return &p->tok[p->at];
}

static jnode *constant(jparse *p, jval v, int line) {
    jnode *n = jinja_node(p, JN_CONST, line);
    n->value = v;
    return n;
}

static jnode *parse_list(jparse *p) {
    jnode *n = jinja_node(p, JN_LIST, now(p)->line);
    jnodes l = {0};
    p->at++;
    while (!jinja_is_op(p, JO_RBRACKET)) {
        if (l.n) jinja_expect_op(p, JO_COMMA, ",");
        if (jinja_is_op(p, JO_RBRACKET)) break;
        jinja_nodes_add(p, &l, jinja_parse_expr(p, true));
    }
    jinja_expect_op(p, JO_RBRACKET, "]");
    return with_kids(p, n, &l);
}

static jnode *parse_dict(jparse *p) {
    jnode *n = jinja_node(p, JN_DICT, now(p)->line);
    jnodes l = {0};
    p->at++;
    while (!jinja_is_op(p, JO_RBRACE)) {
        if (l.n) jinja_expect_op(p, JO_COMMA, ",");
        if (jinja_is_op(p, JO_RBRACE)) break;
        jinja_nodes_add(p, &l, jinja_parse_expr(p, true));
        jinja_expect_op(p, JO_COLON, ":");
        jinja_nodes_add(p, &l, jinja_parse_expr(p, true));
    }
    jinja_expect_op(p, JO_RBRACE, "}");
    return with_kids(p, n, &l);
}

static jnode *parse_strings(jparse *p) {
    int line = now(p)->line;
    size_t from = p->at, n = 0;
    for (; now(p)->kind == JT_STRING; p->at++) n += now(p)->text.n;
    char *joined = mx_arena_alloc(&p->t->arena, n + 1);
    n = 0;
    for (size_t i = from; i < p->at; i++) {
        memcpy(joined + n, p->tok[i].text.p, p->tok[i].text.n);
        n += p->tok[i].text.n;
    }
    return constant(p, jv_str(jinja_literal(&p->t->arena, (mx_str){joined, n})), line);
}

static void note_use(jparse *p, int32_t name) {
    if (name == p->t->id_caller) p->uses |= JUSE_CALLER;
    if (name == p->t->id_varargs) p->uses |= JUSE_VARARGS;
    if (name == p->t->id_kwargs) p->uses |= JUSE_KWARGS;
}

static jnode *parse_name(jparse *p, bool with_ns) {
    const jtok *t = &p->tok[p->at++];
    if (mx_str_is(t->text, "true") || mx_str_is(t->text, "True"))
        return constant(p, jv_bool(true), t->line);
    if (mx_str_is(t->text, "false") || mx_str_is(t->text, "False"))
        return constant(p, jv_bool(false), t->line);
    if (mx_str_is(t->text, "none") || mx_str_is(t->text, "None"))
        return constant(p, jv_none(), t->line);
    jnode *n = jinja_node(p, JN_NAME, t->line);
    n->name = jinja_intern(p->t, t->text);
    n->str = jinja_literal(&p->t->arena, t->text);
    note_use(p, n->name);
    if (with_ns && jinja_skip_op(p, JO_DOT)) {
        n->kind = JN_NSREF;
        n->str = jinja_literal(&p->t->arena, jinja_expect_any_name(p)->text);
    }
    return n;
}

static jnode *parse_paren(jparse *p) {
    int line = now(p)->line;
    p->at++;
    jnode *n;
    if (jinja_is_op(p, JO_RPAREN)) {
        n = jinja_node(p, JN_TUPLE, line);
    } else {
        n = jinja_parse_tuple(p, true, NULL);
    }
    jinja_expect_op(p, JO_RPAREN, ")");
    return n;
}

static jnode *parse_primary(jparse *p, bool with_ns) {
    const jtok *t = now(p);
    char what[64];
    switch (t->kind) {
    case JT_NAME: return parse_name(p, with_ns);
    case JT_STRING: return parse_strings(p);
    case JT_INT: p->at++; return constant(p, jv_int(t->i), t->line);
    case JT_FLOAT: p->at++; return constant(p, jv_float(t->f), t->line);
    default: break;
    }
    jinja_enter(p);
    jnode *n = NULL;
    if (jinja_is_op(p, JO_LPAREN))
        n = parse_paren(p);
    else if (jinja_is_op(p, JO_LBRACKET))
        n = parse_list(p);
    else if (jinja_is_op(p, JO_LBRACE))
        n = parse_dict(p);
    else
        jinja_syntax_error(p, MX_FORMAT, t->line, "unexpected %s", jinja_describe(t, what));
    p->depth--;
    return n;
}

// --- postfix -------------------------------------------------------------------------------------

static jnode *optional_expr(jparse *p) {
    if (jinja_is_op(p, JO_COLON) || jinja_is_op(p, JO_RBRACKET) || jinja_is_op(p, JO_COMMA))
        return NULL;
    return jinja_parse_expr(p, true);
}

static jnode *parse_subscript(jparse *p, jnode *of) {
    int line = now(p)->line;
    p->at++;
    jnode *first = optional_expr(p), *n;
    if (jinja_skip_op(p, JO_COLON)) {
        n = jinja_node(p, JN_SLICE, line);
        n->b = first;
        n->c = optional_expr(p);
        if (jinja_skip_op(p, JO_COLON)) n->d = optional_expr(p);
        jinja_node_depth(p, n, n->c);
        jinja_node_depth(p, n, n->d);
    } else {
        if (!first) jinja_syntax_error(p, MX_FORMAT, line, "empty subscript");
        n = jinja_node(p, JN_ITEM, line);
        n->b = first;
    }
    if (jinja_is_op(p, JO_COMMA))
        jinja_syntax_error(p, MX_UNSUPPORTED, line, "subscript with several parts");
    jinja_expect_op(p, JO_RBRACKET, "]");
    n->a = of;
    jinja_node_depth(p, n, of);
    jinja_node_depth(p, n, n->b);
    return n;
}

static jnode *parse_attr(jparse *p, jnode *of) {
    int line = now(p)->line;
    p->at++;
    const jtok *t = &p->tok[p->at];
    jnode *n;
    if (t->kind == JT_NAME) {
        n = jinja_node(p, JN_ATTR, line);
        n->str = jinja_literal(&p->t->arena, t->text);
    } else if (t->kind == JT_INT) {
        n = jinja_node(p, JN_ITEM, line);
        n->b = constant(p, jv_int(t->i), line);
    } else {
        jinja_syntax_error(p, MX_FORMAT, line, "expected a name or number after '.'");
    }
    p->at++;
    n->a = of;
    jinja_node_depth(p, n, of);
    return n;
}

static void parse_arg(jparse *p, jcallargs *c, jnodes *pos, jnodes *kw_v, mx_str *kw) {
    const jtok *t = now(p);
    if (jinja_skip_op(p, JO_MUL)) {
        if (c->star || c->star2) jinja_syntax_error(p, MX_FORMAT, t->line, "two *arguments");
        c->star = jinja_parse_expr(p, true);
        return;
    }
    if (jinja_skip_op(p, JO_POW)) {
        if (c->star2) jinja_syntax_error(p, MX_FORMAT, t->line, "two **arguments");
        c->star2 = jinja_parse_expr(p, true);
        return;
    }
    const jtok *next = &p->tok[p->at + 1];
    if (t->kind == JT_NAME && next->kind == JT_OP && next->op == JO_ASSIGN) {
        if (c->star2 || kw_v->n == JINJA_MAX_ARGS)
            jinja_syntax_error(p, MX_FORMAT, t->line, "invalid or too many keyword arguments");
        p->at += 2;
        kw[kw_v->n] = t->text;
        jinja_nodes_add(p, kw_v, jinja_parse_expr(p, true));
        return;
    }
    if (c->star || c->star2 || kw_v->n || pos->n == JINJA_MAX_ARGS)
        jinja_syntax_error(p, MX_FORMAT, t->line, "invalid or too many arguments of a call");
    jinja_nodes_add(p, pos, jinja_parse_expr(p, true));
}

jcallargs *jinja_parse_args(jparse *p) {
    jcallargs *c = MX_ARENA_NEW(&p->t->arena, jcallargs);
    mx_str kw[JINJA_MAX_ARGS];
    jnodes pos = {0}, kw_v = {0};
    jinja_enter(p);
    jinja_expect_op(p, JO_LPAREN, "(");
    while (!jinja_is_op(p, JO_RPAREN)) {
        parse_arg(p, c, &pos, &kw_v, kw);
        if (!jinja_skip_op(p, JO_COMMA)) break;
    }
    jinja_expect_op(p, JO_RPAREN, ")");
    p->depth--;
    c->v = pos.v;
    c->n = pos.n;
    c->kw_v = kw_v.v;
    c->n_kw = kw_v.n;
    c->kw = MX_ARENA_ARRAY(&p->t->arena, mx_str, kw_v.n);
    if (kw_v.n) memcpy(c->kw, kw, kw_v.n * sizeof *kw);
    return c;
}

static void args_depth(jparse *p, jnode *n, const jcallargs *c) {
    for (size_t i = 0; i < c->n; i++) jinja_node_depth(p, n, c->v[i]);
    for (size_t i = 0; i < c->n_kw; i++) jinja_node_depth(p, n, c->kw_v[i]);
    jinja_node_depth(p, n, c->star);
    jinja_node_depth(p, n, c->star2);
}

static jnode *parse_call(jparse *p, jnode *callee) {
    jnode *n = jinja_node(p, JN_CALL, now(p)->line);
    n->a = callee;
    n->args = jinja_parse_args(p);
    jinja_node_depth(p, n, callee);
    args_depth(p, n, n->args);
    return n;
}

static jnode *parse_postfix(jparse *p, jnode *n) {
    for (;;) {
        if (jinja_is_op(p, JO_DOT))
            n = parse_attr(p, n);
        else if (jinja_is_op(p, JO_LBRACKET))
            n = parse_subscript(p, n);
        else if (jinja_is_op(p, JO_LPAREN))
            n = parse_call(p, n);
        else
            return n;
    }
}

// A filter or test name that is not in the tables: inside a branch it is (as in Jinja) an error
// when it is reached, elsewhere now. Whether an expression stands in a branch of an inline `if` is
// known only behind it, so the error waits in p->unknown until the whole expression is read.
static void note_unknown(jparse *p, jnode *n, bool is_filter, mx_str name) {
    n->flag = is_filter;
    n->value = jv_bool(is_filter && jinja_is_unsupported_filter(name));
    n->kind = JN_UNKNOWN;
    if (p->soft == 0 && !p->unknown) p->unknown = n;
}

static void check_unknown(jparse *p) {
    const jnode *n = p->unknown;
    if (!n || p->expr_depth) return;
    jinja_syntax_error(p, n->value.u.b ? MX_UNSUPPORTED : MX_FORMAT, n->line, "%s %s '%.*s'",
                       n->value.u.b ? "unsupported" : "unknown", n->flag ? "filter" : "test",
                       (int)MX_MIN(n->str->n, 100u), n->str->p);
}

static mx_str dotted_name(jparse *p) {
    const jtok *t = jinja_expect_any_name(p);
    mx_str name = t->text;
    while (jinja_skip_op(p, JO_DOT)) {
        const jtok *part = jinja_expect_any_name(p);
        name.n = (size_t)(part->text.p + part->text.n - name.p);
    }
    return name;
}

jnode *jinja_parse_filters(jparse *p, jnode *in, bool inline_first) {
    while (inline_first || jinja_is_op(p, JO_PIPE)) {
        if (!inline_first) p->at++;
        inline_first = false;
        jnode *n = jinja_node(p, JN_FILTER, now(p)->line);
        mx_str name = dotted_name(p);
        n->a = in;
        n->str = jinja_literal(&p->t->arena, name);
        n->args =
            jinja_is_op(p, JO_LPAREN) ? jinja_parse_args(p) : MX_ARENA_NEW(&p->t->arena, jcallargs);
        n->fn = jinja_find_filter(name);
        if (!n->fn) note_unknown(p, n, true, name);
        jinja_node_depth(p, n, in);
        args_depth(p, n, n->args);
        in = n;
    }
    check_unknown(p);
    return in;
}

static bool starts_test_arg(const jparse *p) {
    switch (now(p)->kind) {
    case JT_NAME:
        return !jinja_is_name(p, "else") && !jinja_is_name(p, "or") && !jinja_is_name(p, "and");
    case JT_STRING:
    case JT_INT:
    case JT_FLOAT: return true;
    default: return jinja_is_op(p, JO_LBRACKET) || jinja_is_op(p, JO_LBRACE);
    }
}

static jnode *parse_test(jparse *p, jnode *in) {
    int line = now(p)->line;
    p->at++;
    bool negated = jinja_skip_name(p, "not");
    jnode *n = jinja_node(p, JN_TEST, line);
    mx_str name = dotted_name(p);
    n->a = in;
    n->str = jinja_literal(&p->t->arena, name);
    n->args = MX_ARENA_NEW(&p->t->arena, jcallargs);
    if (jinja_is_op(p, JO_LPAREN)) {
        n->args = jinja_parse_args(p);
    } else if (starts_test_arg(p)) {
        if (jinja_is_name(p, "is"))
            jinja_syntax_error(p, MX_FORMAT, line, "several tests chained with 'is'");
        jnodes l = {0};
        jinja_nodes_add(p, &l, parse_postfix(p, parse_primary(p, false)));
        n->args->v = l.v;
        n->args->n = 1;
    }
    n->fn = jinja_find_test(name);
    if (!n->fn) note_unknown(p, n, false, name);
    jinja_node_depth(p, n, in);
    args_depth(p, n, n->args);
    return negated ? unary_node(p, JN_NOT, n, line) : n;
}

static jnode *parse_unary(jparse *p, bool with_filter) {
    int line = now(p)->line;
    jnode *n;
    if (jinja_is_op(p, JO_SUB) || jinja_is_op(p, JO_ADD)) {
        jnode_kind kind = jinja_is_op(p, JO_SUB) ? JN_NEG : JN_POS;
        p->at++;
        jinja_enter(p);
        n = unary_node(p, kind, parse_unary(p, false), line);
        p->depth--;
    } else {
        n = parse_primary(p, false);
    }
    n = parse_postfix(p, n);
    while (with_filter) {
        if (jinja_is_op(p, JO_PIPE))
            n = jinja_parse_filters(p, n, false);
        else if (jinja_is_name(p, "is"))
            n = parse_test(p, n);
        else if (jinja_is_op(p, JO_LPAREN))
            n = parse_call(p, n);
        else
            break;
    }
    return n;
}

// --- operators -----------------------------------------------------------------------------------

static jop present_op(const jparse *p) {
    return now(p)->kind == JT_OP ? now(p)->op : JO_NONE;
}

static jnode *parse_pow(jparse *p) {
    jnode *n = parse_unary(p, true);
    while (jinja_is_op(p, JO_POW)) {
        int line = now(p)->line;
        p->at++;
        n = binary(p, JO_POW, n, parse_unary(p, true), line);
    }
    return n;
}

static jnode *parse_product(jparse *p) {
    jnode *n = parse_pow(p);
    for (;;) {
        jop op = present_op(p);
        if (op != JO_MUL && op != JO_DIV && op != JO_FLOORDIV && op != JO_MOD) return n;
        int line = now(p)->line;
        p->at++;
        n = binary(p, op, n, parse_pow(p), line);
    }
}

static jnode *parse_concat(jparse *p) {
    int line = now(p)->line;
    jnode *first = parse_product(p);
    if (!jinja_is_op(p, JO_TILDE)) return first;
    jnodes l = {0};
    jinja_nodes_add(p, &l, first);
    while (jinja_skip_op(p, JO_TILDE)) jinja_nodes_add(p, &l, parse_product(p));
    return with_kids(p, jinja_node(p, JN_CONCAT, line), &l);
}

static jnode *parse_sum(jparse *p) {
    jnode *n = parse_concat(p);
    for (;;) {
        jop op = present_op(p);
        if (op != JO_ADD && op != JO_SUB) return n;
        int line = now(p)->line;
        p->at++;
        n = binary(p, op, n, parse_concat(p), line);
    }
}

static jop take_comparison(jparse *p) {
    jop op = present_op(p);
    if (op >= JO_EQ && op <= JO_GE) {
        p->at++;
        return op;
    }
    if (jinja_skip_name(p, "in")) return JO_IN;
    const jtok *next = now(p)->kind == JT_EOF ? now(p) : &p->tok[p->at + 1];
    if (jinja_is_name(p, "not") && next->kind == JT_NAME && mx_str_is(next->text, "in")) {
        p->at += 2;
        return JO_NOTIN;
    }
    return JO_NONE;
}

static jnode *parse_compare(jparse *p) {
    int line = now(p)->line;
    jnode *first = parse_sum(p);
    jnodes l = {0};
    jop ops[JINJA_MAX_ARGS], op;
    while ((op = take_comparison(p)) != JO_NONE) {
        if (l.n == JINJA_MAX_ARGS)
            jinja_syntax_error(p, MX_TOOLARGE, line, "more than %d comparisons", JINJA_MAX_ARGS);
        ops[l.n] = op;
        jinja_nodes_add(p, &l, parse_sum(p));
    }
    if (l.n == 0) return first;
    jnode *n = with_kids(p, jinja_node(p, JN_COMPARE, line), &l);
    n->a = first;
    jinja_node_depth(p, n, first);
    n->ops = MX_ARENA_ARRAY(&p->t->arena, jop, l.n);
    memcpy(n->ops, ops, l.n * sizeof *ops);
    return n;
}

static jnode *parse_not(jparse *p) {
    int line = now(p)->line;
    if (!jinja_skip_name(p, "not")) return parse_compare(p);
    jinja_enter(p);
    jnode *n = unary_node(p, JN_NOT, parse_not(p), line);
    p->depth--;
    return n;
}

static jnode *logical(jparse *p, jnode_kind kind, jnode *a, jnode *b, int line) {
    jnode *n = unary_node(p, kind, a, line);
    n->b = b;
    jinja_node_depth(p, n, b);
    return n;
}

static jnode *parse_and(jparse *p) {
    jnode *n = parse_not(p);
    for (int line = now(p)->line; jinja_skip_name(p, "and"); line = now(p)->line)
        n = logical(p, JN_AND, n, parse_not(p), line);
    return n;
}

static jnode *parse_or(jparse *p) {
    jnode *n = parse_and(p);
    for (int line = now(p)->line; jinja_skip_name(p, "or"); line = now(p)->line)
        n = logical(p, JN_OR, n, parse_and(p), line);
    return n;
}

jnode *jinja_parse_expr(jparse *p, bool with_cond) {
    int line = now(p)->line;
    const jnode *unknown_before = p->unknown;
    jinja_enter(p);
    p->expr_depth++;
    jnode *n = parse_or(p);
    while (with_cond && jinja_skip_name(p, "if")) {
        jnode *cond = jinja_node(p, JN_COND, line);
        cond->b = n;
        cond->a = parse_or(p);
        if (jinja_skip_name(p, "else")) cond->c = jinja_parse_expr(p, true);
        jinja_node_depth(p, cond, cond->a);
        jinja_node_depth(p, cond, cond->b);
        jinja_node_depth(p, cond, cond->c);
        n = cond;
        p->unknown = unknown_before;
    }
    p->expr_depth--;
    p->depth--;
    check_unknown(p);
    return n;
}

static bool tuple_ends(const jparse *p, const char *end) {
    jtok_kind k = now(p)->kind;
    return k == JT_VAR_END || k == JT_BLOCK_END || jinja_is_op(p, JO_RPAREN) ||
           (end && jinja_is_name(p, end));
}

// One expression, or several with commas as a tuple. with_cond -1: targets.
static jnode *parse_tuple_of(jparse *p, int with_cond, bool with_ns, const char *end) {
    const jtok *t = now(p);
    jnodes l = {0};
    bool tuple = false;
    while (!tuple_ends(p, end)) {
        jinja_nodes_add(
            p, &l, with_cond < 0 ? parse_primary(p, with_ns) : jinja_parse_expr(p, with_cond > 0));
        if (!jinja_skip_op(p, JO_COMMA)) break;
        tuple = true;
    }
    char what[64];
    if (l.n == 0)
        jinja_syntax_error(p, MX_FORMAT, t->line, "expected an expression, got %s",
                           jinja_describe(t, what));
    return tuple ? with_kids(p, jinja_node(p, JN_TUPLE, t->line), &l) : l.v[0];
}

jnode *jinja_parse_tuple(jparse *p, bool with_cond, const char *end) {
    return parse_tuple_of(p, with_cond, false, end);
}

static void check_target(jparse *p, const jnode *n) {
    if (n->kind == JN_NAME || n->kind == JN_NSREF) return;
    if (n->kind != JN_TUPLE || n->n == 0)
        jinja_syntax_error(p, MX_FORMAT, n->line, "cannot assign to this expression");
    for (size_t i = 0; i < n->n; i++) check_target(p, n->kids[i]);
}

jnode *jinja_parse_target(jparse *p, bool with_ns, const char *end) {
    jnode *n = parse_tuple_of(p, -1, with_ns, end);
    check_target(p, n);
    return n;
}
