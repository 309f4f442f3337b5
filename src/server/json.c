// Request bodies as JSON. Nothing of a body is trusted: its depth is counted before it is parsed
// (the parser recurses), keys may not repeat, strings hold no NUL. No state.
#include "server/server_int.h"

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

json_t *json_read(const char *p, size_t n, mx_err *err) {
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
