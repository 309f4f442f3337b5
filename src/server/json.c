// Request bodies as JSON. Nothing of a body is trusted: its depth is counted before it is parsed
// (the parser recurses), keys may not repeat, strings hold no NUL. No state.
#include "server/server_int.h"

#include "base/mem.h"

static bool too_deep(const char *p, size_t n) {
    int depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < n; i++) {
        char c = p[i];
        if (in_string) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '{' || c == '[') {
            if (++depth > JSON_DEPTH) return true;
        } else if (c == '}' || c == ']') {
            depth--;
        }
    }
    return false;
}

// The key at the top level whose value the byte `at` is in, as written; empty when it is in none.
static mx_str key_at(const char *p, size_t at) {
    int depth = 0;
    mx_str key = {"", 0};
    for (size_t i = 0; i < at; i++) {
        if (p[i] == '"') {
            size_t end = i + 1;
            while (end < at && p[end] != '"') end += p[end] == '\\' ? 2 : 1;
            if (end >= at) break;
            size_t next = end + 1;
            while (next < at && strchr(" \t\r\n", p[next])) next++;
            if (depth == 1 && next < at && p[next] == ':') key = (mx_str){p + i + 1, end - i - 1};
            i = end;
        }
        depth += p[i] == '{' || p[i] == '[';
        depth -= p[i] == '}' || p[i] == ']';
    }
    return key;
}

// A number that neither 64 bits nor a double hold is valid JSON all the same.
static void say_too_large(const char *p, size_t n, const json_error_t *e, mx_err *err,
                          char field[JSON_FIELD]) {
    size_t at = e->position > 0 ? MX_MIN((size_t)e->position, n) : 0;
    mx_str key = key_at(p, at);
    bool plain = key.n > 0 && key.n < JSON_FIELD;
    for (size_t i = 0; i < key.n; i++) plain = plain && key.p[i] > ' ' && key.p[i] < 127;
    if (plain) snprintf(field, JSON_FIELD, "%.*s", (int)key.n, key.p);
    mx_err_set(err, MX_INVALID, "%s%sa number is too large (line %d, column %d)", field,
               plain ? ": " : "", e->line, e->column);
}

json_t *json_read(const char *p, size_t n, mx_err *err, char field[JSON_FIELD]) {
    field[0] = 0;
    if (n == 0) {
        mx_err_set(err, MX_INVALID, "the body is empty, expected a JSON object");
        return NULL;
    }
    if (too_deep(p, n)) {
        mx_err_set(err, MX_INVALID, "the body is nested deeper than %d levels", JSON_DEPTH);
        return NULL;
    }
    json_error_t e;
    json_t *v = json_loadb(p, n, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &e);
    if (!v && json_error_code(&e) == json_error_numeric_overflow) {
        say_too_large(p, n, &e, err, field);
        return NULL;
    }
    if (!v) {
        mx_err_set(err, MX_INVALID, "the body is not valid JSON: line %d, column %d: %.120s",
                   e.line, e.column, e.text);
        return NULL;
    }
    if (json_is_object(v)) return v;
    json_decref(v);
    mx_err_set(err, MX_INVALID, "the body is not a JSON object");
    return NULL;
}
