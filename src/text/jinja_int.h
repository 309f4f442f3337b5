// Inside the template interpreter: values, strings with origins, syntax tree, run-time state.
//
// One idea carries the whole: every allocation of a compile or a render comes from one arena, and
// every error leaves through one longjmp to the entry point (jinja_fail), so that expression code
// reads as expressions. Values are immutable except namespaces and the position of generators.
#ifndef MX_TEXT_JINJA_INT_H
#define MX_TEXT_JINJA_INT_H

#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "text/jinja.h"

#include <setjmp.h>

enum {
    JINJA_MAX_NEST = 200,       // nesting of the source, of values, of macro calls
    JINJA_MAX_CHAIN = 600,      // depth of one expression tree (a + b + c … is a chain)
    JINJA_MAX_RECURSION = 2000, // C recursion of the evaluator
    JINJA_MAX_STEPS = 10000000,
    JINJA_MAX_STRING = 16 << 20, // bytes of one string, and of the output
    JINJA_MAX_MEMORY = 512 << 20,
    JINJA_MAX_RANGE = 100000,
    JINJA_MAX_ARGS = 64
};

// --- strings -----------------------------------------------------------------------------------

// A run of bytes of one origin; `end` counts from the string's start. The last run's end may lie
// beyond the string (a longer string grew in the same memory): readers clamp it to n.
typedef struct jrun {
    size_t end;
    bool trusted;
} jrun;

// Growable memory in which strings are built. A string that ends where its buffer ends can be
// extended in place, so that repeated concatenation is linear.
typedef struct jbuf {
    char *p;
    size_t n, cap, n_chars;
    jrun *runs;
    size_t n_runs, cap_runs;
} jbuf;

// Immutable UTF-8 text. n_chars counts code points. Empty strings have no runs.
typedef struct jstr {
    const char *p;
    size_t n, n_chars;
    const jrun *runs;
    size_t n_runs;
    jbuf *buf;   // where it was built, or NULL
    bool markup; // went through `safe` or `escape`
} jstr;

// --- values ------------------------------------------------------------------------------------

typedef enum jkind {
    JV_MISSING, // internal: argument not given
    JV_UNDEF,
    JV_NONE,
    JV_BOOL,
    JV_INT,
    JV_FLOAT,
    JV_STR,
    JV_LIST, // every sequence and iterator: see jlist.form
    JV_DICT,
    JV_NS,
    JV_LOOP,
    JV_MACRO,
    JV_METHOD,
    JV_FUNC
} jkind;

typedef struct jlist jlist;
typedef struct jdict jdict;
typedef struct jloop jloop;
typedef struct jmacro jmacro;
typedef struct jmethod jmethod;
typedef struct jfunc jfunc;
typedef struct jnode jnode;
typedef struct jrt jrt;

// What is not there, for the message when it is used after all.
typedef struct jundef {
    const char *owner; // type of the object asked, or NULL for a variable
    mx_str name;
    const char *hint; // whole message, or NULL
} jundef;

typedef struct jval {
    jkind kind;
    bool tainted; // numbers, booleans and containers: made of untrusted data
    union {
        bool b;
        int64_t i;
        double f;
        const jstr *s;
        jlist *l;
        jdict *d;
        jloop *loop;
        jmacro *macro;
        jmethod *method;
        const jfunc *fn;
        const jundef *undef;
    } u;
} jval;

typedef enum jform {
    JL_LIST,
    JL_TUPLE,
    JL_RANGE,
    JL_KEYS,
    JL_VALUES,
    JL_ITEMS,
    JL_GEN,  // one pass only: `pos` moves
    JL_GROUP // (grouper, list), a tuple with names
} jform;

struct jlist {
    jval *v;
    size_t n, cap;
    size_t pos;
    jform form;
    int depth;
    bool tainted;
    int64_t start, stop, step; // JL_RANGE: as given, for printing
};

typedef struct jpair {
    jval key, value;
    uint32_t hash;
} jpair;

// Insertion order; `index` (open addressing, position + 1) from 9 pairs on.
struct jdict {
    jpair *v;
    size_t n, cap;
    uint32_t *index;
    size_t index_cap;
    int depth;
    bool tainted;
};

typedef struct jargs {
    size_t n, n_kw;
    jval *v;
    const mx_str *kw;
    jval *kw_v;
} jargs;

typedef jval (*jcall)(jrt *r, jval self, const jargs *args);

// A filter, test, method or function. `params` names the parameters after the value, comma
// separated, '*' for "takes what comes" (raw arguments); `n_required` of them must be given.
// Otherwise the callee gets exactly one slot per parameter, JV_MISSING when absent.
struct jfunc {
    const char *name;
    jcall call;
    const char *params;
    int n_required;
};

struct jmethod {
    jval self;
    const jfunc *fn;
};

typedef struct jbind {
    int32_t name;
    jval value;
} jbind;

typedef struct jscope {
    struct jscope *parent;
    jbind *v;
    size_t n, cap;
    bool captured; // a macro keeps it
} jscope;

struct jmacro {
    const jnode *node; // JN_MACRO or JN_CALLBLOCK
    jscope *scope;
};

struct jloop {
    const jnode *node;
    jscope *scope; // where the loop statement stands
    jval *items;
    size_t n, index0;
    int depth0;
    jval last_changed;
};

// --- syntax tree -------------------------------------------------------------------------------

typedef enum jtok_kind {
    JT_EOF,
    JT_DATA,
    JT_VAR_BEGIN,
    JT_VAR_END,
    JT_BLOCK_BEGIN,
    JT_BLOCK_END,
    JT_NAME,
    JT_STRING,
    JT_INT,
    JT_FLOAT,
    JT_OP
} jtok_kind;

typedef enum jop {
    JO_NONE,
    JO_ADD,
    JO_SUB,
    JO_MUL,
    JO_DIV,
    JO_FLOORDIV,
    JO_MOD,
    JO_POW,
    JO_TILDE,
    JO_EQ,
    JO_NE,
    JO_LT,
    JO_LE,
    JO_GT,
    JO_GE,
    JO_IN,
    JO_NOTIN,
    JO_ASSIGN,
    JO_DOT,
    JO_COLON,
    JO_PIPE,
    JO_COMMA,
    JO_SEMICOLON,
    JO_LPAREN,
    JO_RPAREN,
    JO_LBRACKET,
    JO_RBRACKET,
    JO_LBRACE,
    JO_RBRACE
} jop;

typedef struct jtok {
    jtok_kind kind;
    jop op;
    int line;
    mx_str text; // data, name, or string after escapes
    int64_t i;
    double f;
} jtok;

typedef enum jnode_kind {
    // expressions
    JN_CONST,
    JN_NAME,
    JN_LIST,
    JN_TUPLE,
    JN_DICT,  // kids: key, value, …
    JN_ATTR,  // a.name
    JN_ITEM,  // a[b]
    JN_SLICE, // a[b:c:d], any of b c d NULL
    JN_CALL,
    JN_FILTER,
    JN_TEST,
    JN_NOT,
    JN_AND,
    JN_OR,
    JN_NEG,
    JN_POS,
    JN_BINARY,
    JN_CONCAT,
    JN_COMPARE, // a op kids[0] ops…
    JN_COND,    // b if a else c
    JN_NSREF,   // assignment target name.attr
    // statements
    JN_DATA,
    JN_OUTPUT,
    JN_IF, // kids: condition, body, condition, body, …; els
    JN_FOR,
    JN_SET,
    JN_SETBLOCK,
    JN_MACRO,
    JN_CALLBLOCK,
    JN_FILTERBLOCK,
    JN_WITH,
    JN_BLOCK, // a body in its own scope
    JN_BODY,  // kids in order, no scope of its own
    JN_BREAK,
    JN_CONTINUE,
    JN_UNKNOWN // raises when reached: a construct unknown inside a branch
} jnode_kind;

typedef struct jcallargs {
    jnode **v;
    mx_str *kw;
    jnode **kw_v;
    size_t n, n_kw;
    jnode *star, *star2; // *args, **kwargs or NULL
} jcallargs;

enum { JUSE_CALLER = 1, JUSE_VARARGS = 2, JUSE_KWARGS = 4 };

struct jnode {
    jnode_kind kind;
    jop op;
    int line, depth;
    int32_t name; // interned
    bool flag;    // recursive loop
    unsigned uses;
    const jstr *str; // attribute, data, name for messages
    jval value;
    const jfunc *fn;
    jcallargs *args;
    jnode *a, *b, *c, *d;
    jnode **kids;
    jop *ops;
    size_t n;
    jnode *body, *els;
};

struct mx_template {
    mx_arena arena;
    char *source;
    size_t n_source;
    mx_map names; // spelling → id
    mx_str *name_text;
    size_t n_names, cap_names;
    jnode *root;
    int32_t id_caller, id_loop, id_varargs, id_kwargs;
};

// Compile state: lexer and parser.
typedef struct jparse {
    mx_template *t;
    mx_err *err;
    jmp_buf jump;
    jtok *tok;
    size_t n_tok, cap_tok, at;
    int depth, soft, loops, expr_depth;
    const jnode *unknown; // first unknown filter or test of the expression being read
    unsigned uses;
} jparse;

// Leaves the compile with an error at a line.
_Noreturn void jinja_syntax_error(jparse *p, mx_status st, int line, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
// Fills p->tok from p->t->source (newlines are normalised already).
void jinja_lex(jparse *p);
void jinja_parse(jparse *p);                       // tokens → p->t->root
int32_t jinja_intern(mx_template *t, mx_str name); // id of a name
// Expressions, for the statement parser.
jnode *jinja_parse_expr(jparse *p, bool with_cond);
// A tuple without parentheses or one expression; `end` is a name that ends it ("in") or NULL.
jnode *jinja_parse_tuple(jparse *p, bool with_cond, const char *end);
jnode *jinja_parse_target(jparse *p, bool with_ns, const char *end); // assignment target
jnode *jinja_parse_filters(jparse *p, jnode *in, bool inline_first); // in may be NULL
jcallargs *jinja_parse_args(jparse *p);
jnode *jinja_node(jparse *p, jnode_kind kind, int line);
void jinja_node_depth(jparse *p, jnode *n, const jnode *child); // n is at least one deeper
void jinja_enter(jparse *p);                         // one nesting level deeper, or an error
const jstr *jinja_literal(mx_arena *a, mx_str text); // trusted
// Growable node list in the arena.
typedef struct jnodes {
    jnode **v;
    size_t n, cap;
} jnodes;
void jinja_nodes_add(jparse *p, jnodes *l, jnode *n);
// Token helpers.
bool jinja_is_op(const jparse *p, jop op);
bool jinja_is_name(const jparse *p, const char *name);
bool jinja_skip_op(jparse *p, jop op);
bool jinja_skip_name(jparse *p, const char *name);
void jinja_expect_op(jparse *p, jop op, const char *spelling);
void jinja_expect_name(jparse *p, const char *name);
const jtok *jinja_expect_any_name(jparse *p);
const char *jinja_describe(const jtok *t, char out[64]);

// --- run time ----------------------------------------------------------------------------------

typedef struct jjson {
    struct jjson *next;
    json_t *json;
} jjson;

struct jrt {
    const mx_template *t;
    mx_arena arena;
    mx_err *err;
    jmp_buf jump;
    uint64_t steps;
    int depth, line, calls;
    jbuf *out;
    jscope *scope;
    jjson *jsons; // parsed by from_json, released at the end
    double now_s;
};

// Leaves the render with an error; the present line is put in front.
_Noreturn void jinja_fail(jrt *r, mx_status st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void *jinja_alloc(jrt *r, size_t n);
void jinja_charge(jrt *r, uint64_t steps); // counts work against the limit
void jinja_charge_bytes(jrt *r, size_t n); // the same for reading or writing n bytes
#define JINJA_NEW(r, type)      ((type *)jinja_alloc((r), sizeof(type)))
#define JINJA_ARRAY(r, type, n) ((type *)jinja_alloc((r), sizeof(type) * (size_t)(n)))

// Strings (jinja_str.c).
extern const jrun jinja_trusted_run, jinja_untrusted_run;
extern const jstr jinja_empty;
size_t jinja_count_chars(mx_str s); // of valid UTF-8
jbuf *jinja_buf_new(jrt *r, size_t cap);
void jinja_buf_add(jrt *r, jbuf *b, mx_str text, bool trusted);
void jinja_buf_str(jrt *r, jbuf *b, const jstr *s);
// Bytes [from, to) of s, on character boundaries, with their origins.
void jinja_buf_part(jrt *r, jbuf *b, const jstr *s, size_t from, size_t to);
const jstr *jinja_buf_take(jrt *r, jbuf *b);
const jstr *jinja_str_make(jrt *r, mx_str text, bool trusted); // copies
const jstr *jinja_str_view(jrt *r, mx_str text, bool trusted); // does not copy
const jstr *jinja_str_part(jrt *r, const jstr *s, size_t from, size_t to);
const jstr *jinja_str_concat(jrt *r, const jstr *a, const jstr *b);
bool jinja_str_trusted(const jstr *s); // every byte
bool jinja_str_part_trusted(const jstr *s, size_t from, size_t to);
bool jinja_str_trusted_at(const jstr *s, size_t at);
size_t jinja_str_offset(const jstr *s, size_t i_char); // byte offset of a character
static inline mx_str jinja_text(const jstr *s) {
    return (mx_str){s->p, s->n};
}
// Next character at *at (moves it), for loops over text.
uint32_t jinja_next_char(mx_str s, size_t *at);
bool jinja_is_space(uint32_t c); // as Python's str.isspace
// First occurrence of needle in s at or after from, or SIZE_MAX.
size_t jinja_find(mx_str s, mx_str needle, size_t from);
size_t jinja_rfind(jrt *r, mx_str s, mx_str needle);

// Values (jinja_value.c).
static inline jval jv_none(void) {
    return (jval){.kind = JV_NONE};
}
static inline jval jv_bool(bool b) {
    return (jval){.kind = JV_BOOL, .u.b = b};
}
static inline jval jv_int(int64_t i) {
    return (jval){.kind = JV_INT, .u.i = i};
}
static inline jval jv_float(double f) {
    return (jval){.kind = JV_FLOAT, .u.f = f};
}
static inline jval jv_str(const jstr *s) {
    return (jval){.kind = JV_STR, .u.s = s};
}
static inline jval jv_taint(jval v, bool tainted) {
    v.tainted |= tainted;
    return v;
}
static inline bool jv_is_given(jval v) {
    return v.kind != JV_MISSING;
}
jval jinja_undef(jrt *r, const char *owner, mx_str name);
jval jinja_undef_hint(jrt *r, const char *hint);
_Noreturn void jinja_fail_undef(jrt *r, jval v); // its message
jlist *jinja_list_new(jrt *r, jform form, size_t cap);
void jinja_list_add(jrt *r, jlist *l, jval v);
jval jinja_list_val(jlist *l);
jval jinja_pair(jrt *r, jval a, jval b); // a tuple of two
jdict *jinja_dict_new(jrt *r, size_t cap);
void jinja_dict_set(jrt *r, jdict *d, jval key, jval value);
const jpair *jinja_dict_find(jrt *r, const jdict *d, jval key);
const jpair *jinja_dict_find_str(const jdict *d, mx_str key);
jval jinja_dict_val(jdict *d);
const char *jinja_type_name(jval v); // as Python names it
bool jinja_truth(jval v);
bool jinja_tainted(jval v); // any part of it untrusted
bool jinja_hashable(jval v);
uint32_t jinja_hash(jrt *r, jval v);
// Items of anything that can be iterated (a generator is used up); fails for the rest.
typedef struct jiter {
    jval *v;
    size_t n;
    bool tainted;
} jiter;
jiter jinja_iterate(jrt *r, jval v);
bool jinja_can_iterate(jval v);
int64_t jinja_length(jrt *r, jval v);
jval jinja_from_json(jrt *r, const json_t *j, bool tainted, int depth);

// Printing (jinja_print.c).
const jstr *jinja_to_str(jrt *r, jval v);         // Python's str()
const jstr *jinja_repr(jrt *r, jval v);           // Python's repr()
size_t jinja_print_float(double f, char out[32]); // Python's repr of a float
void jinja_print(jrt *r, jbuf *out, jval v);      // str() appended

// Operators (jinja_ops.c).
jval jinja_binary(jrt *r, jop op, jval a, jval b);
jval jinja_negate(jrt *r, jval v);
bool jinja_equal(jrt *r, jval a, jval b);
int jinja_order(jrt *r, jval a, jval b, const char *op); // <0 0 >0; fails when not comparable
bool jinja_compare(jrt *r, jop op, jval a, jval b);
bool jinja_contains(jrt *r, jval in, jval what);
jval jinja_get_attr(jrt *r, jval v, const jstr *name);
jval jinja_get_item(jrt *r, jval v, jval key);
jval jinja_slice(jrt *r, jval v, jval from, jval to, jval step);
bool jinja_as_int(jval v, int64_t *out);   // int or bool
bool jinja_as_number(jval v, double *out); // int, bool or float

// Text formatting (jinja_format.c).
const jstr *jinja_format_percent(jrt *r, const jstr *fmt, jval args);
const jstr *jinja_format_braces(jrt *r, const jstr *fmt, const jargs *args);

// Evaluation (jinja_eval.c) and statements (jinja_exec.c).
jval jinja_eval(jrt *r, const jnode *n);
jval jinja_call(jrt *r, jval callee, const jargs *args);
// Calls a table function with arguments bound to its parameters. `what` is "filter", "method"…
jval jinja_call_func(jrt *r, const char *what, const jfunc *f, jval self, const jargs *args);
jval jinja_lookup(jrt *r, int32_t name);
void jinja_assign(jrt *r, int32_t name, jval v);
jscope *jinja_scope_push(jrt *r, jscope *parent); // becomes the present one
typedef enum jflow { JF_NEXT, JF_BREAK, JF_CONTINUE } jflow;
jflow jinja_exec(jrt *r, const jnode *n);
jval jinja_call_macro(jrt *r, jmacro *m, const jargs *args);
jval jinja_call_loop(jrt *r, jloop *loop, const jargs *args); // recursive loops
void jinja_descend(jrt *r); // C recursion guard; pair with r->depth--

// Tables. NULL when there is none of that name.
const jfunc *jinja_find_filter(mx_str name);
const jfunc *jinja_find_test(mx_str name);
const jfunc *jinja_find_global(mx_str name);
const jfunc *jinja_find_method(jval self, mx_str name); // of str, dict, list
bool jinja_is_mutator(jval self, mx_str name);          // refused, as in the sandbox
jval jinja_loop_attr(jrt *r, jloop *loop, mx_str name);
const jfunc *jinja_find_in(const jfunc *table, size_t n, mx_str name);
// Names that Jinja has and this interpreter does not.
bool jinja_is_unsupported_filter(mx_str name);

// Filters kept in files of their own.
extern const jfunc jinja_text_filters[], jinja_seq_filters[];
extern const size_t jinja_n_text_filters, jinja_n_seq_filters;
// json.dumps; used by the tojson filter.
jval jinja_tojson(jrt *r, jval self, const jargs *a);
jval jinja_fromjson(jrt *r, jval self, const jargs *a);

#endif
