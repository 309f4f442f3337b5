// The head of a request: what the library lets through and HTTP does not allow. A request that two
// programs on its way could read differently is refused and its connection closed. No state.
#include "server/server_int.h"

#include <strings.h>

enum { MAX_URI = 16 << 10, MAX_HEADERS = 64 << 10 };

typedef struct head {
    size_t n_bytes;
    int n_host, n_length, n_coding;
    bool bad_name, bad_value, other_coding;
} head;

static bool is_token(const char *p, size_t n) {
    static const char chars[] = "!#$%&'*+-.^_`|~0123456789"
                                "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    return n > 0 && strlen(p) == n && strspn(p, chars) == n;
}

static enum MHD_Result look(void *cls, enum MHD_ValueKind kind, const char *name, size_t n_name,
                            const char *value, size_t n_value) {
    head *h = cls;
    (void)kind;
    h->n_bytes += n_name + n_value + 4;
    h->bad_name |= !is_token(name, n_name);
    for (size_t i = 0; i < n_value; i++) {
        unsigned char c = (unsigned char)value[i];
        h->bad_value |= (c < 32 && c != '\t') || c == 127;
    }
    h->n_host += strcasecmp(name, "Host") == 0;
    h->n_length += strcasecmp(name, "Content-Length") == 0;
    if (strcasecmp(name, "Transfer-Encoding") == 0) {
        h->n_coding++;
        h->other_coding |= !value || strcasecmp(value, "chunked") != 0;
    }
    return MHD_YES;
}

// The characters of a host, a port and brackets; no user, path or query.
static bool is_host(const char *host) {
    static const char chars[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-._"
                                "~%!$&'()*+,;=[]:";
    return strlen(host) < 512 && strspn(host, chars) == strlen(host);
}

bool head_check(srv_req *q, const char *uri, const char *version) {
    head h = {0};
    MHD_get_connection_values_n(q->conn, MHD_HEADER_KIND, look, &h);
    const char *host = MHD_lookup_connection_value(q->conn, MHD_HEADER_KIND, "Host");
    const char *why = NULL;
    int status = 400;
    if (strlen(uri) > MAX_URI) {
        status = 414;
        why = "the address is longer than 16384 bytes";
    } else if (h.n_bytes > MAX_HEADERS) {
        status = 431;
        why = "the headers are longer than 65536 bytes";
    } else if (h.bad_name) {
        why = "a header's name has a character that is not allowed";
    } else if (h.bad_value) {
        why = "a header's value has a control character";
    } else if (h.n_host > 1 || (h.n_host == 0 && strcmp(version, "HTTP/1.0") != 0)) {
        why = "expected one Host header";
    } else if (host && !is_host(host)) {
        why = "Host is not a name or an address";
    } else if (h.other_coding || h.n_coding > 1) {
        status = 501;
        why = "Transfer-Encoding: only chunked is supported";
    } else if (h.n_length > 1 || (h.n_length && h.n_coding)) {
        why = "expected one Content-Length or Transfer-Encoding header";
    }
    if (!why) return true;
    q->must_close = true;
    req_error(q, status, "malformed_request", NULL, "%s", why);
    return false;
}

// "http://name/path" is asked of proxies, and allowed here.
const char *head_path(const char *uri) {
    size_t n = strncasecmp(uri, "http://", 7) == 0    ? 7
               : strncasecmp(uri, "https://", 8) == 0 ? 8
                                                      : 0;
    if (n == 0) return uri;
    const char *path = uri + n + strcspn(uri + n, "/?");
    return *path == '/' ? path : "/";
}
