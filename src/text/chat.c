// Message normalisation: what clients send (OpenAI's form, with its nulls and JSON in strings) to
// what templates expect. Stateless; builds a new array that shares the values it does not change.
// It does not render and does not know which template follows.
#include "text/chat.h"

#include "base/mem.h"

#include <stdio.h>

enum { MAX_DEPTH = 128, MAX_ARGUMENT_BYTES = 16 << 20 };

// Where in the request the present value stands, for messages.
typedef struct chat_place {
    size_t message;
    char path[96];
    mx_err *err;
} chat_place;

static mx_status fail(const chat_place *at, const char *what) {
    return mx_err_set(at->err, MX_INVALID, "messages[%zu]%s: %s", at->message, at->path, what);
}

static bool too_deep(const json_t *v, int left) {
    if (!json_is_object(v) && !json_is_array(v)) return false;
    if (left == 0) return true;
    if (json_is_array(v)) {
        for (size_t i = 0; i < json_array_size(v); i++)
            if (too_deep(json_array_get(v, i), left - 1)) return true;
        return false;
    }
    json_t *obj = (json_t *)v; // jansson's iterators do not change it
    for (void *it = json_object_iter(obj); it; it = json_object_iter_next(obj, it))
        if (too_deep(json_object_iter_value(it), left - 1)) return true;
    return false;
}

static const char *type_name(const json_t *v) {
    static const char *const names[] = {"an object", "an array", "a string", "a number",
                                        "a number",  "true",     "false",    "null"};
    return v ? names[json_typeof(v)] : "missing";
}

static bool is_given(const json_t *v) {
    return v && !json_is_null(v);
}

// --- content -------------------------------------------------------------------------------------

static mx_status check_part(chat_place *at, const json_t *part, size_t i) {
    const json_t *type = json_object_get(part, "type"), *text = json_object_get(part, "text");
    snprintf(at->path, sizeof at->path, ".content[%zu]", i);
    if (!json_is_object(part)) return fail(at, "expected an object with type and text");
    if (is_given(type) && !json_is_string(type)) return fail(at, "type is not a string");
    if (json_is_string(type)) {
        const char *name = json_string_value(type);
        bool is_text = strcmp(name, "text") == 0 || strcmp(name, "input_text") == 0 ||
                       strcmp(name, "output_text") == 0;
        if (!is_text) {
            return mx_err_set(at->err, MX_INVALID,
                              "messages[%zu]%s: part of type '%.40s'; only text is supported",
                              at->message, at->path, name);
        }
    }
    if (!json_is_string(text)) return fail(at, "a text part needs a string 'text'");
    return MX_OK;
}

static mx_status parts_content(chat_place *at, const json_t *parts, bool keep, json_t **out) {
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_status st = MX_OK;
    size_t n = json_array_size(parts);
    for (size_t i = 0; i < n && st == MX_OK; i++) {
        const json_t *part = json_array_get(parts, i), *text = json_object_get(part, "text");
        st = check_part(at, part, i);
        if (st == MX_OK && !keep) mx_buf_add(&b, json_string_value(text), json_string_length(text));
    }
    if (st == MX_OK) {
        *out = keep && n ? json_incref((json_t *)parts) : json_stringn(b.data ? b.data : "", b.n);
    }
    mx_buf_free(&b);
    return st;
}

static bool may_lack_content(const json_t *msg) {
    static const char *const fields[] = {"function_call", "reasoning_content", "thinking",
                                         "reasoning"};
    const json_t *role = json_object_get(msg, "role");
    if (strcmp(json_string_value(role), "assistant") != 0) return false;
    if (json_array_size(json_object_get(msg, "tool_calls")) > 0) return true;
    for (size_t i = 0; i < MX_COUNT(fields); i++)
        if (is_given(json_object_get(msg, fields[i]))) return true;
    return false;
}

static mx_status make_content(chat_place *at, const json_t *msg, bool keep, json_t **out) {
    const json_t *c = json_object_get(msg, "content");
    if (json_is_string(c)) {
        *out = json_incref((json_t *)c);
        return MX_OK;
    }
    if (json_is_array(c)) return parts_content(at, c, keep, out);
    snprintf(at->path, sizeof at->path, ".content");
    if (is_given(c)) return fail(at, "expected a string or a list of text parts");
    if (!may_lack_content(msg)) return fail(at, c ? "null without tool_calls" : "missing");
    *out = json_string("");
    return MX_OK;
}

// --- tool calls ----------------------------------------------------------------------------------

static bool is_blank(const json_t *s) {
    const char *p = json_string_value(s);
    return p[strspn(p, " \t\r\n")] == 0 && strlen(p) == json_string_length(s);
}

static mx_status make_arguments(chat_place *at, const json_t *args, json_t **out) {
    mx_err why = {0};
    if (json_is_object(args)) {
        *out = json_incref((json_t *)args);
        return MX_OK;
    }
    if (!is_given(args) || (json_is_string(args) && is_blank(args))) {
        *out = json_object();
        return MX_OK;
    }
    if (!json_is_string(args)) return fail(at, "expected an object or a string with one");
    *out = mx_json_parse(json_string_value(args), json_string_length(args), MAX_ARGUMENT_BYTES,
                         MX_JSON_CONFIG, "not valid JSON", &why);
    if (!*out) return fail(at, why.msg);
    if (json_is_object(*out)) return MX_OK;
    json_decref(*out);
    *out = NULL;
    return fail(at, "the JSON in the string is no object");
}

// A shallow copy of obj with one field replaced (or added at the end). Takes over value.
static json_t *with_field(const json_t *obj, const char *key, json_t *value) {
    json_t *copy = json_copy((json_t *)obj);
    CHECK(copy && json_object_set_new(copy, key, value) == 0);
    return copy;
}

static mx_status make_call(chat_place *at, const json_t *call, size_t i, json_t **out) {
    const json_t *fn = json_object_get(call, "function");
    json_t *args = NULL;
    snprintf(at->path, sizeof at->path, ".tool_calls[%zu]", i);
    if (!json_is_object(call)) return fail(at, "expected an object");
    if (!json_is_object(fn)) {
        if (!json_is_string(json_object_get(call, "name")))
            return fail(at, "needs a 'function' object");
        // the bare form {name, arguments}, which some templates write themselves
        snprintf(at->path, sizeof at->path, ".tool_calls[%zu].arguments", i);
        MX_TRY(make_arguments(at, json_object_get(call, "arguments"), &args));
        *out = with_field(call, "arguments", args);
        return MX_OK;
    }
    snprintf(at->path, sizeof at->path, ".tool_calls[%zu].function.name", i);
    if (!json_is_string(json_object_get(fn, "name"))) return fail(at, "expected a string");
    snprintf(at->path, sizeof at->path, ".tool_calls[%zu].function.arguments", i);
    MX_TRY(make_arguments(at, json_object_get(fn, "arguments"), &args));
    *out = with_field(call, "function", with_field(fn, "arguments", args));
    return MX_OK;
}

static mx_status make_calls(chat_place *at, const json_t *calls, json_t **out) {
    snprintf(at->path, sizeof at->path, ".tool_calls");
    if (!json_is_array(calls)) return fail(at, "expected an array");
    *out = json_array();
    for (size_t i = 0; i < json_array_size(calls); i++) {
        json_t *call = NULL;
        mx_status st = make_call(at, json_array_get(calls, i), i, &call);
        if (st != MX_OK) {
            json_decref(*out);
            *out = NULL;
            return st;
        }
        json_array_append_new(*out, call);
    }
    return MX_OK;
}

// --- messages ------------------------------------------------------------------------------------

static const json_t *find_reasoning(const json_t *msg) {
    static const char *const names[] = {"reasoning_content", "thinking", "reasoning"};
    for (size_t i = 0; i < MX_COUNT(names); i++) {
        const json_t *v = json_object_get(msg, names[i]);
        if (is_given(v)) return v;
    }
    return NULL;
}

// The message's fields in their order, without nulls, with content and tool_calls replaced.
static json_t *assemble(const json_t *msg, json_t *content, json_t *calls) {
    json_t *out = json_object(), *obj = (json_t *)msg;
    const json_t *reasoning = find_reasoning(msg);
    if (reasoning && !is_given(json_object_get(msg, "thinking")))
        json_object_set(out, "thinking", (json_t *)reasoning);
    for (void *it = json_object_iter(obj); it; it = json_object_iter_next(obj, it)) {
        const char *key = json_object_iter_key(it);
        size_t n = json_object_iter_key_len(it);
        json_t *v = json_object_iter_value(it);
        if (strcmp(key, "content") == 0)
            v = content;
        else if (strcmp(key, "tool_calls") == 0 && calls)
            v = calls;
        if (is_given(v)) json_object_setn(out, key, n, v);
    }
    json_object_set(out, "content", content);
    if (reasoning) json_object_set(out, "reasoning_content", (json_t *)reasoning);
    return out;
}

static mx_status make_message(chat_place *at, const json_t *msg, bool keep, json_t **out) {
    json_t *content = NULL, *calls = NULL;
    const json_t *role = json_object_get(msg, "role"), *given = json_object_get(msg, "tool_calls");
    if (!json_is_object(msg)) return fail(at, "expected an object");
    if (too_deep(msg, MAX_DEPTH)) return fail(at, "nested deeper than 128");
    snprintf(at->path, sizeof at->path, ".role");
    if (!json_is_string(role))
        return mx_err_set(at->err, MX_INVALID, "messages[%zu].role: expected a string, got %s",
                          at->message, type_name(role));
    if (is_given(given)) MX_TRY(make_calls(at, given, &calls));
    mx_status st = make_content(at, msg, keep, &content);
    if (st == MX_OK) *out = assemble(msg, content, calls);
    json_decref(content);
    json_decref(calls);
    return st;
}

mx_status mx_chat_normalize(const json_t *messages, bool keep_parts, json_t **out, mx_err *err) {
    *out = NULL;
    if (!json_is_array(messages))
        return mx_err_set(err, MX_INVALID, "messages: expected an array, got %s",
                          type_name(messages));
    json_t *list = json_array();
    for (size_t i = 0; i < json_array_size(messages); i++) {
        chat_place at = {.message = i, .err = err};
        json_t *msg = NULL;
        mx_status st = make_message(&at, json_array_get(messages, i), keep_parts, &msg);
        if (st != MX_OK) {
            json_decref(list);
            return st;
        }
        json_array_append_new(list, msg);
    }
    *out = list;
    return MX_OK;
}
