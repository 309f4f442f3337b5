// Tool calls in generated text, for the three forms that models are trained on:
//   Hermes, Qwen: <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number of them
//   Mistral:      [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]  or [TOOL_CALLS]f[ARGS]{...}
//   Llama 3:      {"name": "f", "parameters": {...}} as the whole answer, "<|python_tag|>" before
//   it
//                 or not, ';' between several
// One byte after another, so the result does not depend on how the text was cut. A call is handed
// out once its name is known and its arguments have begun; the arguments' JSON text then passes
// through as it comes. What looked like a call and turns out not to be one before that is content.
// State: the caller's tool_parser.
#include "server/server_int.h"

enum { TEXT, MARKER_SEEN, CALL, AFTER_CALL, NAME_FORM, START };

// ---- One JSON call ----

enum { C_BEFORE, C_KEY_OR_END, C_IN_KEY, C_COLON, C_VALUE, C_IN_VALUE, C_NEXT, C_DONE, C_BAD };
enum { T_OTHER, T_NAME, T_ARGS };

static bool is_blank(char c) {
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

static void call_free(call_scan *c) {
    mx_buf_free(&c->raw);
    mx_buf_free(&c->key);
    mx_buf_free(&c->name);
    mx_buf_free(&c->args);
}

static void call_reset(call_scan *c) {
    call_free(c);
    *c = (call_scan){0};
    mx_buf_init(&c->raw, 0);
    mx_buf_init(&c->key, 4096);
    mx_buf_init(&c->name, 4096);
    mx_buf_init(&c->args, 0);
}

// The text of a JSON string with its quotes; false when it is none.
static bool decode_string(mx_buf *b) {
    json_t *v = json_loadb(b->data, b->n, JSON_DECODE_ANY, NULL);
    bool ok = json_is_string(v);
    if (ok) {
        mx_buf_clear(b);
        mx_buf_add(b, json_string_value(v), json_string_length(v));
    }
    json_decref(v);
    return ok;
}

static int target_of(const mx_buf *key) {
    mx_str k = {key->data, key->n};
    if (mx_str_is(k, "\"name\"")) return T_NAME;
    if (mx_str_is(k, "\"arguments\"") || mx_str_is(k, "\"parameters\"")) return T_ARGS;
    return T_OTHER;
}

static void value_byte(call_scan *c, char b) {
    if (c->target == T_NAME) mx_buf_putc(&c->name, b);
    if (c->target == T_ARGS) mx_buf_putc(&c->args, b);
}

static void value_end(call_scan *c) {
    c->phase = C_NEXT;
    if (c->target == T_NAME) {
        c->has_name = decode_string(&c->name) && c->name.n > 0;
        if (!c->has_name) c->phase = C_BAD;
    }
    if (c->target == T_ARGS && c->args_text) {
        if (!decode_string(&c->args)) c->phase = C_BAD;
        c->args_text = false;
    }
}

// True when b belongs to the value or ended it, false when it must be looked at again.
static bool in_value(call_scan *c, char b) {
    if (c->in_string) {
        value_byte(c, b);
        if (c->escape)
            c->escape = false;
        else if (b == '\\')
            c->escape = true;
        else if (b == '"')
            c->in_string = false;
        if (!c->in_string && c->depth == 0) value_end(c);
        return true;
    }
    bool scalar_end = c->depth == 0 && (b == ',' || b == '}' || is_blank(b));
    if (scalar_end) {
        value_end(c);
        return false;
    }
    if (b == '"') c->in_string = true;
    if (b == '{' || b == '[') c->depth++;
    if (b == '}' || b == ']') c->depth--;
    if (c->depth < 0 || c->depth > JSON_DEPTH) {
        c->phase = C_BAD;
        return true;
    }
    value_byte(c, b);
    if (c->depth == 0 && (b == '}' || b == ']')) value_end(c);
    return true;
}

static void value_start(call_scan *c, char b) {
    c->target = target_of(&c->key);
    if (c->target == T_NAME && b != '"') c->phase = C_BAD;
    if (c->target == T_ARGS && c->args.n) c->phase = C_BAD; // twice
    if (c->phase == C_BAD) return;
    if (c->target == T_NAME) mx_buf_clear(&c->name);
    c->args_text = c->target == T_ARGS && b == '"';
    c->phase = C_IN_VALUE;
    c->depth = 0;
    in_value(c, b);
}

static void in_key(call_scan *c, char b) {
    mx_buf_putc(&c->key, b);
    if (c->escape)
        c->escape = false;
    else if (b == '\\')
        c->escape = true;
    else if (b == '"')
        c->phase = C_COLON;
}

static void call_byte(call_scan *c, char b) {
    if (!c->begun) mx_buf_putc(&c->raw, b);
    if (c->phase == C_IN_VALUE && in_value(c, b)) return;
    if (c->phase == C_IN_KEY) {
        in_key(c, b);
        return;
    }
    if (c->phase == C_BAD || is_blank(b)) return;
    switch (c->phase) {
    case C_BEFORE: c->phase = b == '{' ? C_KEY_OR_END : C_BAD; break;
    case C_KEY_OR_END:
    case C_NEXT:
        if (b == '}') {
            c->phase = C_DONE;
        } else if (c->phase == C_NEXT && b == ',') {
            c->phase = C_KEY_OR_END;
        } else if (c->phase == C_KEY_OR_END && b == '"') {
            mx_buf_clear(&c->key);
            mx_buf_putc(&c->key, b);
            c->phase = C_IN_KEY;
        } else {
            c->phase = C_BAD;
        }
        break;
    case C_COLON: c->phase = b == ':' ? C_VALUE : C_BAD; break;
    case C_VALUE: value_start(c, b); break;
    default: c->phase = C_BAD;
    }
}

// ---- Output, gathered until something else comes ----

static void flush_content(tool_parser *p) {
    if (p->content.n) p->sink->content(p->sink->user, (mx_str){p->content.data, p->content.n});
    mx_buf_clear(&p->content);
}

static void flush_args(tool_parser *p) {
    if (p->args.n) p->sink->args(p->sink->user, p->n_calls - 1, (mx_str){p->args.data, p->args.n});
    mx_buf_clear(&p->args);
}

static void put_content(tool_parser *p, const char *s, size_t n) {
    flush_args(p);
    if (n) mx_buf_add(&p->content, s, n);
}

static void begin_call(tool_parser *p, mx_str name) {
    flush_content(p);
    flush_args(p);
    p->n_calls++;
    p->sink->begin(p->sink->user, p->n_calls - 1, name);
}

static bool is_known(const tool_parser *p, const mx_buf *name) {
    size_t i;
    json_t *t;
    json_array_foreach(p->tools, i, t) {
        const json_t *n = json_object_get(json_object_get(t, "function"), "name");
        if (json_is_string(n) && mx_str_eq((mx_str){name->data, name->n},
                                           (mx_str){json_string_value(n), json_string_length(n)}))
            return true;
    }
    return false;
}

static void drop_held(tool_parser *p) {
    mx_buf_clear(&p->held);
    p->blanks = 0;
}

// Text: held is blanks, then what may be a marker's beginning.
static void hold(tool_parser *p, char b) {
    if (p->blanks == p->held.n && is_blank(b)) p->blanks++;
    mx_buf_putc(&p->held, b);
}

static void to_text(tool_parser *p) {
    p->mode = TEXT;
    put_content(p, p->held.n ? p->held.data : "", p->held.n);
    drop_held(p);
}

// ---- Modes ----

static const char *marker(const tool_parser *p) {
    return p->format == TOOLS_HERMES ? "<tool_call>" : "[TOOL_CALLS]";
}

// Text: blanks and what may be the marker's beginning are held back; blanks before it are dropped.
static void take_text(tool_parser *p, char b) {
    const char *m = marker(p);
    size_t n = p->held.n - p->blanks;
    if (b == m[n]) {
        hold(p, b);
        if (m[n + 1]) return;
        p->mode = MARKER_SEEN;
        drop_held(p);
        mx_buf_puts(&p->held, m);
        return;
    }
    if (n == 0 && is_blank(b)) {
        hold(p, b);
        return;
    }
    put_content(p, p->held.n ? p->held.data : "", p->held.n);
    drop_held(p);
    if (b == m[0] || is_blank(b))
        hold(p, b);
    else
        put_content(p, &b, 1);
}

static void start_call(tool_parser *p) {
    p->mode = CALL;
    call_reset(&p->call);
}

static void take_call(tool_parser *p, char b) {
    call_scan *c = &p->call;
    size_t before = c->args.n;
    call_byte(c, b);
    bool ready = c->has_name && !c->args_text && (c->args.n > 0 || c->phase == C_DONE);
    if (c->phase != C_BAD && !c->begun && ready) {
        if (p->known_only && !is_known(p, &c->name)) {
            c->phase = C_BAD;
        } else {
            c->begun = true;
            begin_call(p, (mx_str){c->name.data, c->name.n});
            if (c->args.n)
                mx_buf_add(&p->args, c->args.data, c->args.n);
            else
                mx_buf_puts(&p->args, "{}");
            drop_held(p);
        }
    } else if (c->begun && c->args.n > before) {
        mx_buf_putc(&p->args, b);
    }
    if (c->phase == C_BAD || (c->phase == C_DONE && !c->begun)) {
        if (!c->begun) mx_buf_add(&p->held, c->raw.data, c->raw.n);
        to_text(p);
    } else if (c->phase == C_DONE) {
        p->mode = AFTER_CALL;
        drop_held(p);
    }
}

// Mistral's second form: name[ARGS]{...} or name{...}, perhaps with [CALL_ID]x between
static void take_name(tool_parser *p, char b) {
    mx_buf_putc(&p->held, b);
    if (b != '{') {
        if (p->held.n > 512) to_text(p);
        return;
    }
    const char *name = p->held.data + strlen(marker(p));
    size_t n = strcspn(name, "[{");
    while (n && is_blank(*name)) name++, n--;
    while (n && is_blank(name[n - 1])) n--;
    if (n == 0) {
        to_text(p);
        return;
    }
    start_call(p);
    call_scan *c = &p->call;
    mx_buf_add(&c->name, name, n);
    c->has_name = c->begun = true;
    c->target = T_ARGS;
    c->phase = C_IN_VALUE;
    c->args_text = false;
    begin_call(p, (mx_str){c->name.data, c->name.n});
    drop_held(p);
    in_value(c, b);
    mx_buf_putc(&p->args, b);
}

static void take_after_marker(tool_parser *p, char b) {
    if (is_blank(b)) {
        mx_buf_putc(&p->held, b);
        return;
    }
    if (p->format == TOOLS_HERMES) {
        start_call(p);
        take_call(p, b);
        return;
    }
    if (b == '[') {
        mx_buf_putc(&p->held, b);
        start_call(p);
        return;
    }
    p->mode = NAME_FORM;
    take_name(p, b);
}

// Hermes: the closing tag. Mistral: ',' or ']'. Llama: ';' or the next '{'.
static void take_after_call(tool_parser *p, char b) {
    static const char closing[] = "</tool_call>";
    if (p->format == TOOLS_HERMES) {
        if (p->held.n == 0 && is_blank(b)) return;
        if (b == closing[p->held.n]) {
            mx_buf_putc(&p->held, b);
            if (p->held.n == sizeof closing - 1) {
                p->mode = TEXT;
                drop_held(p);
            }
            return;
        }
        to_text(p);
        take_text(p, b);
        return;
    }
    if (is_blank(b)) return;
    if (p->format == TOOLS_MISTRAL && b == ']') {
        p->mode = TEXT;
    } else if (b == ',' || (p->format == TOOLS_LLAMA && b == ';')) {
        start_call(p);
    } else if (p->format == TOOLS_LLAMA && b == '{') {
        start_call(p);
        take_call(p, b);
    } else {
        p->mode = TEXT;
        if (p->format == TOOLS_MISTRAL)
            take_text(p, b);
        else
            put_content(p, &b, 1);
    }
}

// Llama: a call may only begin the answer.
static void take_start(tool_parser *p, char b) {
    static const char tag[] = "<|python_tag|>";
    size_t n = p->held.n - p->blanks;
    bool tagged = n == sizeof tag - 1;
    if (is_blank(b) && (n == 0 || tagged)) {
        if (!tagged) hold(p, b);
    } else if (b == '{' && (n == 0 || tagged)) {
        start_call(p);
        take_call(p, b);
    } else if (!tagged && b == tag[n]) {
        hold(p, b);
    } else {
        hold(p, b);
        to_text(p);
    }
}

static void take(tool_parser *p, char b) {
    switch (p->mode) {
    case TEXT:
        if (p->format == TOOLS_LLAMA)
            put_content(p, &b, 1);
        else
            take_text(p, b);
        break;
    case MARKER_SEEN: take_after_marker(p, b); break;
    case CALL:
        // Mistral's second form ends with its arguments
        take_call(p, b);
        if (p->mode == CALL && p->call.phase == C_NEXT && p->call.raw.n == 0) {
            p->mode = TEXT;
            drop_held(p);
        }
        break;
    case AFTER_CALL: take_after_call(p, b); break;
    case NAME_FORM: take_name(p, b); break;
    default: take_start(p, b);
    }
}

void tools_init(tool_parser *p, tool_format f, const json_t *tools) {
    *p = (tool_parser){.format = f, .tools = tools};
    p->mode = f == TOOLS_LLAMA ? START : TEXT;
    p->known_only = f == TOOLS_LLAMA;
    mx_buf_init(&p->held, 0);
    mx_buf_init(&p->content, 0);
    mx_buf_init(&p->args, 0);
    call_reset(&p->call);
}

void tools_push(tool_parser *p, mx_str in, const tool_sink *sink) {
    if (p->format == TOOLS_NONE) {
        if (in.n) sink->content(sink->user, in);
        return;
    }
    p->sink = sink;
    for (size_t i = 0; i < in.n; i++) take(p, in.p[i]);
    flush_content(p);
    flush_args(p);
}

void tools_end(tool_parser *p, const tool_sink *sink) {
    if (p->format == TOOLS_NONE) return;
    p->sink = sink;
    if (p->mode == CALL && !p->call.begun) mx_buf_add(&p->held, p->call.raw.data, p->call.raw.n);
    bool rest = p->mode != CALL || !p->call.begun;
    // blanks after a call, and half a closing tag, are nobody's text
    size_t i = 0;
    while (i < p->held.n && is_blank(p->held.data[i])) i++;
    if (p->mode == AFTER_CALL || (i == p->held.n && p->n_calls > 0)) rest = false;
    if (rest) put_content(p, p->held.n ? p->held.data : "", p->held.n);
    drop_held(p);
    flush_content(p);
    flush_args(p);
    p->mode = TEXT;
}

void tools_free(tool_parser *p) {
    mx_buf_free(&p->held);
    mx_buf_free(&p->content);
    mx_buf_free(&p->args);
    call_free(&p->call);
}
