// Chat templates: opening and rendering. A compiled template is read-only and shared; a render owns
// one arena with everything it makes, and is left either at the end or by one longjmp on an error.
// The language itself is in jinja_lex/parse/eval/exec and the tables of filters, tests, methods.
#include "text/jinja_int.h"

#include <stdio.h>

static char *normalise_newlines(mx_str s, size_t *n) {
    char *out = mx_alloc(s.n + 1);
    size_t k = 0;
    for (size_t i = 0; i < s.n; i++) {
        if (s.p[i] == '\r' && i + 1 < s.n && s.p[i + 1] == '\n') continue;
        out[k++] = s.p[i] == '\r' ? '\n' : s.p[i];
    }
    if (k && out[k - 1] == '\n') k--; // one newline at the end is not kept
    out[k] = 0;
    *n = k;
    return out;
}

static mx_status compile(mx_template *t, mx_err *err) {
    jparse *p = MX_ARENA_NEW(&t->arena, jparse);
    p->t = t;
    p->err = err;
    int st = setjmp(p->jump);
    if (st) return (mx_status)st;
    jinja_lex(p);
    jinja_parse(p);
    return MX_OK;
}

mx_status mx_template_open(mx_template **out, mx_str source, mx_err *err) {
    *out = NULL;
    if (source.n > JINJA_MAX_STRING)
        return mx_err_set(err, MX_TOOLARGE, "template of %zu bytes (at most %d)", source.n,
                          JINJA_MAX_STRING);
    if (!mx_utf8_valid(source)) return mx_err_set(err, MX_FORMAT, "template is not valid UTF-8");
    mx_template *t = mx_calloc(1, sizeof *t);
    mx_arena_init(&t->arena, 0);
    t->source = normalise_newlines(source, &t->n_source);
    t->id_caller = jinja_intern(t, mx_str_of("caller"));
    t->id_loop = jinja_intern(t, mx_str_of("loop"));
    t->id_varargs = jinja_intern(t, mx_str_of("varargs"));
    t->id_kwargs = jinja_intern(t, mx_str_of("kwargs"));
    mx_status st = compile(t, err);
    if (st != MX_OK) {
        mx_template_close(t);
        return st;
    }
    *out = t;
    return MX_OK;
}

void mx_template_close(mx_template *t) {
    if (!t) return;
    mx_map_free(&t->names);
    mx_arena_free(&t->arena);
    mx_free(t->source);
    mx_free(t);
}

_Noreturn void jinja_fail(jrt *r, mx_status st, const char *fmt, ...) {
    char msg[MX_ERR_CAP];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    if (r->line)
        mx_err_set(r->err, st, "template line %d: %s", r->line, msg);
    else
        mx_err_set(r->err, st, "%s", msg); // before the first statement: the variables
    longjmp(r->jump, (int)st);
}

void *jinja_alloc(jrt *r, size_t n) {
    void *p = mx_arena_alloc(&r->arena, n);
    if (!p) jinja_fail(r, MX_TOOLARGE, "more than %d MiB of memory", JINJA_MAX_MEMORY >> 20);
    return p;
}

void jinja_charge(jrt *r, uint64_t steps) {
    r->steps += steps;
    if (r->steps > JINJA_MAX_STEPS)
        jinja_fail(r, MX_TOOLARGE, "more than %d steps", JINJA_MAX_STEPS);
}

void jinja_charge_bytes(jrt *r, size_t n) {
    jinja_charge(r, n / 128);
}

void jinja_descend(jrt *r) {
    if (++r->depth > JINJA_MAX_RECURSION)
        jinja_fail(r, MX_TOOLARGE, "nested too deep while rendering");
}

static void define(jrt *r, const char *name, jval v) {
    int32_t id;
    if (mx_map_get(&r->t->names, mx_str_of(name), &id)) jinja_assign(r, id, v);
}

static jval json_or_none(jrt *r, const json_t *j) {
    return j ? jinja_from_json(r, j, true, 0) : jv_none();
}

static void define_vars(jrt *r, const mx_template_vars *vars) {
    define(r, "messages", json_or_none(r, vars->messages));
    define(r, "tools", json_or_none(r, vars->tools));
    define(r, "documents", json_or_none(r, vars->documents));
    define(r, "add_generation_prompt", jv_bool(vars->add_generation_prompt));
    const char *tokens[2][2] = {{"bos_token", vars->bos_token}, {"eos_token", vars->eos_token}};
    for (int i = 0; i < 2; i++) {
        if (!tokens[i][1]) continue;
        if (!mx_utf8_valid(mx_str_of(tokens[i][1])))
            jinja_fail(r, MX_INVALID, "%s is not valid UTF-8", tokens[i][0]);
        define(r, tokens[i][0], jv_str(jinja_str_make(r, mx_str_of(tokens[i][1]), true)));
    }
    static const char *const fixed[] = {"messages", "tools", "documents", "add_generation_prompt"};
    json_t *extra = (json_t *)vars->extra; // jansson's iterators do not change it
    for (void *it = json_object_iter(extra); it; it = json_object_iter_next(extra, it)) {
        jval v = jinja_from_json(r, json_object_iter_value(it), true, 0);
        const char *key = json_object_iter_key(it);
        for (size_t i = 0; i < MX_COUNT(fixed); i++)
            if (strcmp(key, fixed[i]) == 0)
                jinja_fail(r, MX_INVALID, "chat_template_kwargs may not set '%s'", key);
        define(r, key, v);
    }
}

static mx_status render(jrt *r, const mx_template_vars *vars) {
    int st = setjmp(r->jump);
    if (st) return (mx_status)st;
    r->out = jinja_buf_new(r, 4096);
    jinja_scope_push(r, NULL);
    define_vars(r, vars);
    jinja_scope_push(r, r->scope); // what the template sets at its top
    jinja_exec(r, r->t->root);
    return MX_OK;
}

static void hand_over(const jbuf *b, mx_rendered *out) {
    mx_buf_init(&out->text, 0);
    mx_buf_add(&out->text, b->p, b->n);
    out->n = b->n_runs;
    out->spans = mx_calloc(b->n_runs, sizeof *out->spans);
    size_t from = 0;
    for (size_t i = 0; i < b->n_runs; i++) {
        mx_str text = {out->text.data + from, b->runs[i].end - from};
        out->spans[i] = (mx_span){text, b->runs[i].trusted};
        from = b->runs[i].end;
    }
}

mx_status mx_template_render(const mx_template *t, const mx_template_vars *vars, mx_rendered *out,
                             mx_err *err) {
    *out = (mx_rendered){0};
    jrt *r = mx_calloc(1, sizeof *r);
    r->t = t;
    r->err = err;
    r->now_s = vars->now_s;
    mx_arena_init(&r->arena, JINJA_MAX_MEMORY);
    mx_status st = render(r, vars);
    if (st == MX_OK) hand_over(r->out, out);
    for (jjson *j = r->jsons; j; j = j->next) json_decref(j->json);
    mx_arena_free(&r->arena);
    mx_free(r);
    return st;
}

void mx_rendered_free(mx_rendered *r) {
    mx_free(r->spans);
    mx_buf_free(&r->text);
    *r = (mx_rendered){0};
}
