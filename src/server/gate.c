// Who may ask: API keys, browser origins, host names. State: the list of keys, read at start.
//
// The Host check keeps a web page on another site from reaching a server that listens on loopback
// by pointing its own name at 127.0.0.1. Preflights are answered before keys are looked at.
#include "server/server_int.h"

#include "base/mem.h"
#include "base/os.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <strings.h>

// ---- Keys ----

static void add_key(srv *s, const char *p, size_t n) {
    while (n && (*p == ' ' || *p == '\t')) p++, n--;
    while (n && strchr(" \t\r", p[n - 1])) n--;
    if (n == 0) return;
    s->keys = mx_realloc(s->keys, (s->n_keys + 1) * sizeof *s->keys);
    char *k = mx_alloc(n + 1);
    memcpy(k, p, n);
    k[n] = 0;
    s->keys[s->n_keys++] = k;
}

// Position of the first byte that no header may carry, or n.
static size_t find_unprintable(const char *p, size_t n) {
    size_t i = 0;
    while (i < n && (p[i] == '\t' || ((unsigned char)p[i] >= 32 && (unsigned char)p[i] < 127))) i++;
    return i;
}

// a,b,"c,d": quoted keys may hold commas, "" is a quote. Messages do not show the keys.
static mx_status add_csv(srv *s, const char *name, const char *p, mx_err *err) {
    size_t n = strlen(p), odd = find_unprintable(p, n), before = s->n_keys;
    if (odd < n)
        return mx_err_set(err, MX_INVALID, "%s: byte %zu is no printable ASCII", name, odd);
    mx_buf b;
    mx_buf_init(&b, 0);
    bool quoted = false, empty = false;
    for (;; p++) {
        if (*p == '"' && quoted && p[1] == '"') {
            mx_buf_putc(&b, '"');
            p++;
        } else if (*p == '"') {
            quoted = !quoted;
        } else if (*p == 0 || (*p == ',' && !quoted)) {
            size_t have = s->n_keys;
            add_key(s, b.n ? b.data : "", b.n);
            empty |= s->n_keys == have;
            mx_buf_clear(&b);
            if (*p == 0) break;
        } else {
            mx_buf_putc(&b, *p);
        }
    }
    mx_buf_free(&b);
    if (quoted) return mx_err_set(err, MX_INVALID, "%s: a quote is not closed", name);
    if (s->n_keys == before) return mx_err_set(err, MX_INVALID, "%s: no key", name);
    if (empty) return mx_err_set(err, MX_INVALID, "%s: a key is empty", name);
    return MX_OK;
}

static mx_status add_file(srv *s, const char *path, mx_err *err) {
    char *text;
    size_t n, before = s->n_keys;
    MX_TRY(mx_read_file(path, 1 << 20, &text, &n, err));
    for (char *line = text; line < text + n;) {
        char *end = memchr(line, '\n', (size_t)(text + n - line));
        if (!end) end = text + n;
        size_t len = (size_t)(end - line) - (end > line && end[-1] == '\r');
        size_t odd = find_unprintable(line, len);
        if (odd < len) {
            mx_err_set(err, MX_INVALID, "--api-key-file %s: byte %zu is no printable ASCII", path,
                       (size_t)(line - text) + odd);
            mx_free(text);
            return MX_INVALID;
        }
        if (*line != '#') add_key(s, line, len);
        line = end + 1;
    }
    mx_free(text);
    if (s->n_keys > before) return MX_OK;
    return mx_err_set(err, MX_INVALID, "--api-key-file %s: no key in it", path);
}

mx_status gate_load_keys(srv *s, mx_err *err) {
    const mx_server_config *c = s->c;
    if (c->api_keys) MX_TRY(add_csv(s, "--api-key", c->api_keys, err));
    if (c->api_key_file) MX_TRY(add_file(s, c->api_key_file, err));
    if (c->env_api_key) MX_TRY(add_csv(s, "LLAMA_API_KEY", c->env_api_key, err));
    return MX_OK;
}

void gate_free(srv *s) {
    for (size_t i = 0; i < s->n_keys; i++) {
        explicit_bzero(s->keys[i], strlen(s->keys[i]));
        mx_free(s->keys[i]);
    }
    mx_free(s->keys);
}

// Takes the same time wherever two keys differ.
static bool same_key(const char *a, const char *b) {
    size_t na = strlen(a), nb = strlen(b), n = MX_MAX(na, nb);
    unsigned diff = na != nb;
    for (size_t i = 0; i < n; i++) {
        diff |= (unsigned char)a[i < na ? i : 0] ^ (unsigned char)b[i < nb ? i : 0];
    }
    return diff == 0;
}

static const char *header(const srv_req *q, const char *name) {
    return MHD_lookup_connection_value(q->conn, MHD_HEADER_KIND, name);
}

static bool has_key(const srv_req *q) {
    const char *a = header(q, "Authorization"), *x = header(q, "X-Api-Key");
    const char *given = a && strncasecmp(a, "Bearer ", 7) == 0 ? a + 7 : x;
    if (!given) return false;
    while (*given == ' ') given++;
    bool ok = false;
    for (size_t i = 0; i < q->s->n_keys; i++) ok |= same_key(q->s->keys[i], given);
    return ok;
}

// ---- Hosts ----

// True when one of the comma-separated words is name (n bytes), without regard to case.
static bool in_list(const char *list, const char *name, size_t n) {
    for (const char *p = list; p && *p;) {
        p += strspn(p, ", ");
        size_t len = strcspn(p, ", ");
        if (len == n && strncasecmp(p, name, n) == 0) return true;
        p += len;
    }
    return false;
}

// The host without its port and brackets.
static mx_str host_name(const char *host) {
    if (host[0] == '[') {
        const char *end = strchr(host, ']');
        return end ? (mx_str){host + 1, (size_t)(end - host - 1)} : mx_str_of(host);
    }
    return (mx_str){host, strcspn(host, ":")};
}

static bool is_address(mx_str h) {
    char text[64];
    unsigned char sink[16];
    if (h.n >= sizeof text) return false;
    memcpy(text, h.p, h.n);
    text[h.n] = 0;
    return inet_pton(AF_INET, text, sink) == 1 || inet_pton(AF_INET6, text, sink) == 1;
}

static bool is_loopback_bind(const char *host) {
    return strncmp(host, "127.", 4) == 0 || strcmp(host, "::1") == 0 ||
           strcasecmp(host, "localhost") == 0;
}

static bool host_allowed(const srv_req *q) {
    const srv *s = q->s;
    const char *host = header(q, "Host"), *allowed = s->c->allowed_hosts;
    if (!host || s->is_unix) return true; // HTTP/1.0, or a socket that no page can reach
    mx_str h = host_name(host);
    if (allowed && allowed[0]) {
        return in_list(allowed, "*", 1) || in_list(allowed, h.p, h.n) ||
               in_list(allowed, host, strlen(host)) || mx_str_is(h, "localhost") ||
               (is_address(h) && h.n > 3 && strncmp(h.p, "127.", 4) == 0) || mx_str_is(h, "::1");
    }
    // listening beyond loopback, any name may be the machine's; keys are the protection then
    if (!is_loopback_bind(s->c->host)) return true;
    return is_address(h) || in_list("localhost", h.p, h.n) || in_list(s->c->host, h.p, h.n);
}

// ---- Origins ----

static const char *allowed_origin(const srv_req *q) {
    const char *origin = header(q, "Origin"), *list = q->s->c->cors_origins;
    if (!origin) return NULL;
    if (in_list(list, "*", 1)) return "*";
    const char *scheme_end = strstr(origin, "://");
    if (scheme_end && in_list(list, "loopback", 8)) {
        mx_str h = host_name(scheme_end + 3);
        if (in_list("localhost,127.0.0.1,::1", h.p, h.n)) return origin;
    }
    return in_list(list, origin, strlen(origin)) ? origin : NULL;
}

void gate_headers(const srv_req *q, struct MHD_Response *r) {
    if (q->origin) {
        MHD_add_response_header(r, "Access-Control-Allow-Origin", q->origin);
        MHD_add_response_header(r, "Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
    }
    if (strcmp(q->s->c->cors_origins, "*") != 0) MHD_add_response_header(r, "Vary", "Origin");
}

void gate_preflight(srv_req *q) {
    struct MHD_Response *r = MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    const char *wanted = header(q, "Access-Control-Request-Headers");
    q->origin = allowed_origin(q);
    gate_headers(q, r);
    MHD_add_response_header(r, "Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    MHD_add_response_header(r, "Access-Control-Allow-Headers",
                            wanted && strlen(wanted) < 1024
                                ? wanted
                                : "Authorization, Content-Type, X-Api-Key, X-Priority");
    MHD_add_response_header(r, "Access-Control-Max-Age", "86400");
    MHD_queue_response(q->conn, 204, r);
    MHD_destroy_response(r);
    q->answered = true;
    q->status = 204;
}

int gate_verdict(srv_req *q) {
    q->origin = allowed_origin(q);
    if (!host_allowed(q)) return 403;
    bool is_public = q->route && (q->route->flags & ROUTE_PUBLIC);
    return q->s->n_keys == 0 || is_public || has_key(q) ? 200 : 401;
}

void gate_refuse(srv_req *q, int verdict) {
    if (verdict == 403)
        req_error(q, 403, "host_not_allowed", NULL,
                  "this Host is not served here; --allowed-hosts names those that are");
    else
        req_error(q, 401, NULL, NULL, "Invalid API Key");
}
