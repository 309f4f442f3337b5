// Statements of the template language: tokens to the tree that jinja_exec.c walks. Owns nothing:
// nodes live in the template's arena. What Jinja has and this interpreter does not (extends,
// include, import) is refused by name.
#include "text/jinja_int.h"

#include <stdio.h>

_Noreturn void jinja_syntax_error(jparse *p, mx_status st, int line, const char *fmt, ...) {
    char msg[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    mx_err_set(p->err, st, "template line %d: %s", line, msg);
    longjmp(p->jump, (int)st);
}

int32_t jinja_intern(mx_template *t, mx_str name) {
    int32_t id;
    if (mx_map_get(&t->names, name, &id)) return id;
    if (t->n_names == t->cap_names) {
        size_t cap = t->cap_names ? t->cap_names * 2 : 32;
        mx_str *v = MX_ARENA_ARRAY(&t->arena, mx_str, cap);
        if (t->n_names) memcpy(v, t->name_text, t->n_names * sizeof *v);
        t->name_text = v;
        t->cap_names = cap;
    }
    name.p = mx_arena_strndup(&t->arena, name.p, name.n);
    id = (int32_t)t->n_names;
    t->name_text[t->n_names++] = name;
    mx_map_put(&t->names, name, id);
    return id;
}

// --- token helpers -------------------------------------------------------------------------------

static const jtok *now(const jparse *p) {
    return &p->tok[p->at];
}

bool jinja_is_op(const jparse *p, jop op) {
    return now(p)->kind == JT_OP && now(p)->op == op;
}

bool jinja_is_name(const jparse *p, const char *name) {
    return now(p)->kind == JT_NAME && mx_str_is(now(p)->text, name);
}

bool jinja_skip_op(jparse *p, jop op) {
    bool is = jinja_is_op(p, op);
    p->at += is;
    return is;
}

bool jinja_skip_name(jparse *p, const char *name) {
    bool is = jinja_is_name(p, name);
    p->at += is;
    return is;
}

const char *jinja_describe(const jtok *t, char out[64]) {
    static const char *const ops[] = {"?",  "+", "-",  "*", "/",  "//", "%", "**", "~", "==",
                                      "!=", "<", "<=", ">", ">=", "in", "?", "=",  ".", ":",
                                      "|",  ",", ";",  "(", ")",  "[",  "]", "{",  "}"};
    static const char *const kinds[] = {
        "end of template", "template text", "'{{'",     "end of '{{'", "'{%'",
        "end of '{%'",     "a name",        "a string", "an integer",  "a float"};
    if (t->kind == JT_OP)
        snprintf(out, 64, "'%s'", ops[t->op]);
    else if (t->kind == JT_NAME)
        snprintf(out, 64, "'%.*s'", (int)MX_MIN(t->text.n, 40u), t->text.p);
    else
        snprintf(out, 64, "%s", kinds[t->kind]);
    return out;
}

static _Noreturn void fail_expected(jparse *p, const char *what) {
    char got[64];
    jinja_syntax_error(p, MX_FORMAT, now(p)->line, "expected %s, got %s", what,
                       jinja_describe(now(p), got));
}

void jinja_expect_op(jparse *p, jop op, const char *spelling) {
    char what[16];
    snprintf(what, sizeof what, "'%s'", spelling);
    if (!jinja_skip_op(p, op)) fail_expected(p, what);
}

void jinja_expect_name(jparse *p, const char *name) {
    if (!jinja_skip_name(p, name)) fail_expected(p, name);
}

const jtok *jinja_expect_any_name(jparse *p) {
    if (now(p)->kind != JT_NAME) fail_expected(p, "a name");
    return &p->tok[p->at++];
}

static void expect(jparse *p, jtok_kind kind, const char *what) {
    if (now(p)->kind != kind) fail_expected(p, what);
    p->at++;
}

// --- bodies --------------------------------------------------------------------------------------

typedef struct jends {
    const char *v[3];
} jends;

static bool at_end_tag(const jparse *p, const jends *ends) {
    for (int i = 0; ends && i < 3 && ends->v[i]; i++) {
        const jtok *t = &p->tok[p->at + 1];
        if (t->kind == JT_NAME && mx_str_is(t->text, ends->v[i])) return true;
    }
    return false;
}

static jnode *parse_statement(jparse *p);

typedef struct jlink {
    jnode *n;
    struct jlink *next;
} jlink;

static jnode *parse_item(jparse *p) {
    const jtok *t = now(p);
    jnode *n;
    if (t->kind == JT_DATA) {
        n = jinja_node(p, JN_DATA, t->line);
        n->str = jinja_literal(&p->t->arena, t->text);
        p->at++;
        return n;
    }
    if (t->kind == JT_VAR_BEGIN) {
        p->at++;
        n = jinja_node(p, JN_OUTPUT, t->line);
        n->a = jinja_parse_tuple(p, true, NULL);
        expect(p, JT_VAR_END, "end of '{{'");
        return n;
    }
    p->at++;
    n = parse_statement(p);
    expect(p, JT_BLOCK_END, "end of '{%'");
    return n;
}

// Reads up to one of the end tags; the present token is then that tag's name. ends NULL: to the
// end of the template.
static jnode *parse_until(jparse *p, const jends *ends) {
    jnode *body = jinja_node(p, JN_BODY, now(p)->line);
    jlink *first = NULL, **last = &first;
    for (;;) {
        if (now(p)->kind == JT_EOF) {
            if (!ends) break;
            jinja_syntax_error(p, MX_FORMAT, now(p)->line, "end of template, expected '%s'",
                               ends->v[0]);
        }
        if (now(p)->kind == JT_BLOCK_BEGIN && at_end_tag(p, ends)) {
            p->at++;
            break;
        }
        *last = MX_ARENA_NEW(&p->t->arena, jlink);
        (*last)->n = parse_item(p);
        last = &(*last)->next;
        body->n++;
    }
    body->kids = MX_ARENA_ARRAY(&p->t->arena, jnode *, body->n);
    size_t i = 0;
    for (const jlink *l = first; l; l = l->next) body->kids[i++] = l->n;
    return body;
}

static jnode *parse_body(jparse *p, const jends *ends) {
    jinja_skip_op(p, JO_COLON);
    expect(p, JT_BLOCK_END, "end of '{%'");
    jinja_enter(p);
    jnode *n = parse_until(p, ends);
    p->depth--;
    return n;
}

static jnode *parse_body_to(jparse *p, const char *end) {
    jnode *n = parse_body(p, &(jends){{end}});
    p->at++;
    return n;
}

// A body that is a function of its own in Jinja: break and continue do not cross it.
static jnode *parse_closed_body(jparse *p, const char *end) {
    int loops = p->loops;
    p->loops = 0;
    jnode *n = parse_body_to(p, end);
    p->loops = loops;
    return n;
}

// --- statements ----------------------------------------------------------------------------------

static jnode *parse_if(jparse *p, jnode *n) {
    jnodes kids = {0};
    p->soft++;
    for (;;) {
        jinja_nodes_add(p, &kids, jinja_parse_tuple(p, false, NULL));
        jinja_nodes_add(p, &kids, parse_body(p, &(jends){{"endif", "else", "elif"}}));
        if (jinja_skip_name(p, "elif")) continue;
        if (jinja_skip_name(p, "else")) n->els = parse_body(p, &(jends){{"endif"}});
        jinja_expect_name(p, "endif");
        break;
    }
    p->soft--;
    n->kids = kids.v;
    n->n = kids.n;
    return n;
}

// a: target, b: what to iterate, c: condition.
static jnode *parse_for(jparse *p, jnode *n) {
    n->a = jinja_parse_target(p, false, "in");
    jinja_expect_name(p, "in");
    n->b = jinja_parse_tuple(p, false, "recursive");
    if (jinja_skip_name(p, "if")) n->c = jinja_parse_expr(p, true);
    n->flag = jinja_skip_name(p, "recursive");
    int loops = p->loops;
    p->loops = n->flag ? 1 : loops + 1;
    n->body = parse_body(p, &(jends){{"endfor", "else"}});
    p->loops = loops;
    if (jinja_skip_name(p, "else")) n->els = parse_body(p, &(jends){{"endfor"}});
    jinja_expect_name(p, "endfor");
    return n;
}

static jnode *parse_set(jparse *p, jnode *n) {
    n->a = jinja_parse_target(p, true, NULL);
    if (jinja_skip_op(p, JO_ASSIGN)) {
        n->b = jinja_parse_tuple(p, true, NULL);
        return n;
    }
    n->kind = JN_SETBLOCK;
    if (n->a->kind == JN_TUPLE)
        jinja_syntax_error(p, MX_FORMAT, n->line, "block set with several targets");
    // filters on the block: the innermost has no input of its own
    if (jinja_is_op(p, JO_PIPE)) n->b = jinja_parse_filters(p, NULL, false);
    n->body = parse_body_to(p, "endset");
    return n;
}

// Parameters of a macro or call block: kids are names, args->v their defaults or NULL.
static void parse_signature(jparse *p, jnode *n) {
    jnode *names[JINJA_MAX_ARGS], *defaults[JINJA_MAX_ARGS];
    size_t count = 0;
    bool any_default = false;
    jinja_expect_op(p, JO_LPAREN, "(");
    while (!jinja_is_op(p, JO_RPAREN)) {
        if (count) jinja_expect_op(p, JO_COMMA, ",");
        if (count == JINJA_MAX_ARGS)
            jinja_syntax_error(p, MX_TOOLARGE, n->line, "more than %d parameters", JINJA_MAX_ARGS);
        names[count] = jinja_node(p, JN_NAME, now(p)->line);
        mx_str name = jinja_expect_any_name(p)->text;
        names[count]->name = jinja_intern(p->t, name);
        names[count]->str = jinja_literal(&p->t->arena, name);
        defaults[count] = jinja_skip_op(p, JO_ASSIGN) ? jinja_parse_expr(p, true) : NULL;
        if (any_default && !defaults[count])
            jinja_syntax_error(p, MX_FORMAT, n->line, "parameter without default after one with");
        any_default |= defaults[count] != NULL;
        count++;
    }
    jinja_expect_op(p, JO_RPAREN, ")");
    n->n = count;
    n->kids = MX_ARENA_ARRAY(&p->t->arena, jnode *, count);
    n->args = MX_ARENA_NEW(&p->t->arena, jcallargs);
    n->args->v = MX_ARENA_ARRAY(&p->t->arena, jnode *, count);
    if (count) memcpy(n->kids, names, count * sizeof *names);
    if (count) memcpy(n->args->v, defaults, count * sizeof *defaults);
}

static void parse_macro_body(jparse *p, jnode *n, const char *end) {
    unsigned outer = p->uses;
    p->uses = 0;
    n->body = parse_closed_body(p, end);
    n->uses = p->uses;
    p->uses |= outer;
}

static jnode *parse_macro(jparse *p, jnode *n) {
    const jtok *name = jinja_expect_any_name(p);
    n->name = jinja_intern(p->t, name->text);
    n->str = jinja_literal(&p->t->arena, name->text);
    parse_signature(p, n);
    parse_macro_body(p, n, "endmacro");
    return n;
}

static jnode *parse_call_block(jparse *p, jnode *n) {
    if (jinja_is_op(p, JO_LPAREN)) parse_signature(p, n);
    n->str = jinja_literal(&p->t->arena, mx_str_of("caller"));
    n->a = jinja_parse_expr(p, true);
    if (n->a->kind != JN_CALL) jinja_syntax_error(p, MX_FORMAT, n->line, "call without a call");
    parse_macro_body(p, n, "endcall");
    return n;
}

static jnode *parse_with(jparse *p, jnode *n) {
    jnodes kids = {0};
    while (now(p)->kind != JT_BLOCK_END) {
        if (kids.n) jinja_expect_op(p, JO_COMMA, ",");
        jinja_nodes_add(p, &kids, jinja_parse_target(p, false, NULL));
        jinja_expect_op(p, JO_ASSIGN, "=");
        jinja_nodes_add(p, &kids, jinja_parse_expr(p, true));
    }
    n->kids = kids.v;
    n->n = kids.n;
    n->body = parse_body_to(p, "endwith");
    return n;
}

static jnode *parse_filter_block(jparse *p, jnode *n) {
    n->b = jinja_parse_filters(p, NULL, true);
    n->body = parse_body_to(p, "endfilter");
    return n;
}

static jnode *parse_block(jparse *p, jnode *n) {
    mx_str name = jinja_expect_any_name(p)->text;
    jinja_skip_name(p, "scoped");
    if (jinja_is_name(p, "required"))
        jinja_syntax_error(p, MX_UNSUPPORTED, n->line, "required block (no template inheritance)");
    n->body = parse_closed_body(p, "endblock");
    if (now(p)->kind == JT_NAME && mx_str_eq(now(p)->text, name)) p->at++;
    return n;
}

static jnode *parse_generation(jparse *p, jnode *n) {
    n->body = parse_closed_body(p, "endgeneration");
    return n;
}

static jnode *parse_print(jparse *p, jnode *n) {
    n->a = jinja_parse_expr(p, true);
    if (jinja_is_op(p, JO_COMMA))
        jinja_syntax_error(p, MX_UNSUPPORTED, n->line, "print with several values");
    return n;
}

static jnode *parse_loop_control(jparse *p, jnode *n) {
    if (p->loops == 0)
        jinja_syntax_error(p, MX_FORMAT, n->line, "%s outside a loop",
                           n->kind == JN_BREAK ? "break" : "continue");
    return n;
}

static jnode *parse_statement(jparse *p) {
    static const struct {
        const char *name;
        jnode_kind kind;
        jnode *(*parse)(jparse *, jnode *);
    } tags[] = {{"if", JN_IF, parse_if},
                {"for", JN_FOR, parse_for},
                {"set", JN_SET, parse_set},
                {"macro", JN_MACRO, parse_macro},
                {"call", JN_CALLBLOCK, parse_call_block},
                {"filter", JN_FILTERBLOCK, parse_filter_block},
                {"with", JN_WITH, parse_with},
                {"block", JN_BLOCK, parse_block},
                {"generation", JN_BLOCK, parse_generation},
                {"print", JN_OUTPUT, parse_print},
                {"break", JN_BREAK, parse_loop_control},
                {"continue", JN_CONTINUE, parse_loop_control}};
    static const char *const refused[] = {"extends",    "include", "import", "from",
                                          "autoescape", "do",      "trans",  "debug"};
    const jtok *t = jinja_expect_any_name(p);
    for (size_t i = 0; i < MX_COUNT(tags); i++) {
        if (mx_str_is(t->text, tags[i].name))
            return tags[i].parse(p, jinja_node(p, tags[i].kind, t->line));
    }
    for (size_t i = 0; i < MX_COUNT(refused); i++) {
        if (mx_str_is(t->text, refused[i]))
            jinja_syntax_error(p, MX_UNSUPPORTED, t->line, "unsupported tag '%s'", refused[i]);
    }
    jinja_syntax_error(p, MX_FORMAT, t->line, "unknown tag '%.*s'", (int)MX_MIN(t->text.n, 100u),
                       t->text.p);
}

void jinja_parse(jparse *p) {
    p->t->root = parse_until(p, NULL);
}
