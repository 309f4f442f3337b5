// What a configuration may be: every text of it that reaches addresses, headers or JSON is checked
// before anything listens, and refused by the name of its flag. No state.
#include "server/server_int.h"

#include "base/mem.h"

#include <string.h>

// Letters, digits and "-._~" in segments that are not empty, "." or "..": what needs no escaping
// and what no client or proxy rewrites.
static bool is_prefix(const char *p) {
    static const char chars[] =
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-._~";
    while (*p) {
        if (*p++ != '/') return false;
        size_t n = strspn(p, chars);
        if (n == 0 || (n <= 2 && strspn(p, ".") == n)) return false;
        p += n;
    }
    return true;
}

// Comma-separated names, none of them empty.
static bool is_names(const char *p) {
    if (!mx_utf8_valid(mx_str_of(p))) return false;
    for (const char *c = p; *c; c++) {
        if ((unsigned char)*c < 32 || *c == 127) return false;
    }
    for (;;) {
        size_t n = strcspn(p, ",");
        if (strspn(p, " ") >= n) return false;
        if (!p[n]) return true;
        p += n + 1;
    }
}

// Comma-separated: *, loopback, or what browsers send as Origin (pages in files: null). Nothing:
// none.
static bool is_origins(const char *p) {
    for (;;) {
        p += strspn(p, ", ");
        size_t n = strcspn(p, ", ");
        if (n == 0) return true;
        mx_str word = {p, n};
        const char *colon = memchr(p, ':', n);
        bool origin = colon && colon > p && (size_t)(colon - p) + 3 < n && colon[1] == '/' &&
                      colon[2] == '/' && !memchr(colon + 3, '/', n - (size_t)(colon - p) - 3);
        for (size_t i = 0; i < n; i++) origin &= p[i] > 32 && p[i] < 127;
        bool known = mx_str_is(word, "*") || mx_str_is(word, "loopback") || mx_str_is(word, "null");
        if (!origin && !known) return false;
        p += n;
    }
}

// A key of the answers beside those they have.
static bool is_alias_field(const char *p) {
    static const char *const taken[] = {"role",    "content",    "reasoning_content",
                                        "refusal", "tool_calls", "function_call"};
    static const char chars[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_";
    for (size_t i = 0; i < MX_COUNT(taken); i++) {
        if (strcmp(p, taken[i]) == 0) return false;
    }
    size_t n = strlen(p);
    return n > 0 && n <= 64 && strspn(p, chars) == n && (p[0] < '0' || p[0] > '9');
}

static mx_status refuse(const char *flag, const char *expected, const char *got, mx_err *err) {
    return mx_err_set(err, MX_INVALID, "%s: expected %s, got \"%s\"", flag, expected, got);
}

static mx_status read_template_kwargs(srv *s, mx_err *err) {
    const char *text = s->c->chat_template_kwargs;
    mx_err why = {0};
    char field[JSON_FIELD];
    s->template_kwargs = json_read(text, strlen(text), &why, field);
    if (s->template_kwargs) return MX_OK;
    return mx_err_set(err, MX_INVALID, "--chat-template-kwargs: expected a JSON object");
}

mx_status config_check(srv *s, mx_err *err) {
    const mx_server_config *c = s->c;
    if (!c->ssl_key_file != !c->ssl_cert_file) {
        return mx_err_set(err, MX_INVALID, "--ssl-key-file and --ssl-cert-file go together");
    }
    s->is_tls = c->ssl_key_file != NULL;
    if (!is_prefix(c->api_prefix)) {
        return refuse("--api-prefix",
                      "/NAME or /NAME/NAME..., of letters, digits and \"-._~\", no \".\" or \"..\"",
                      c->api_prefix, err);
    }
    if (c->alias && !is_names(c->alias)) {
        return refuse("--alias",
                      "names without control characters, comma-separated, none of them empty",
                      c->alias, err);
    }
    if (!is_alias_field(c->reasoning_alias)) {
        return refuse("--reasoning-alias-field",
                      "none, or a name of letters, digits and _ that messages do not have yet",
                      c->reasoning_alias, err);
    }
    if (!is_origins(c->cors_origins)) {
        return refuse("--cors-origins",
                      "origins such as https://name:port, *, loopback or none, comma-separated",
                      c->cors_origins, err);
    }
    if (c->chat_template_kwargs) MX_TRY(read_template_kwargs(s, err));
    return gate_load_keys(s, err);
}
