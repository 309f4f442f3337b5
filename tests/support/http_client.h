// Test support: the built program as a server, and a client on raw sockets that believes nothing.
// State: the caller's structs. Everything that goes wrong fails the running cmocka test.
#ifndef TESTS_SUPPORT_HTTP_CLIENT_H
#define TESTS_SUPPORT_HTTP_CLIENT_H

#include "base/mem.h"
#include "base/os.h"
#include "base/str.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
// cmocka.h needs setjmp.h and stdarg.h
#include <cmocka.h>

enum { CLIENT_LIMIT_S = 30 };

// ---- The server ----

typedef struct server {
    pid_t pid;
    int port;
    char log[512];       // what it wrote to standard error
    char sock[108];      // a Unix socket instead of the port
    const char *program; // under another name, which needs no `serve`; NULL: as usual
} server;

static inline char *server_log(const server *s) {
    char *text = NULL;
    size_t n;
    mx_err err;
    if (mx_read_file(s->log, 16 << 20, &text, &n, &err) != MX_OK) return mx_strdup("");
    return text;
}

// Starts `mlxcel serve -m model --port 0 args`; args are words between blanks.
static inline void server_spawn(server *s, const char *dir, const char *model, const char *args) {
    static char words[64][256];
    char *argv[64];
    int n = 0;
    char line[4096];
    snprintf(line, sizeof line, "%s%s -m %s %s%s", s->program ? s->program : MX_TEST_PROGRAM,
             s->program ? "" : " serve", model, s->sock[0] ? "" : "--port 0 ", args);
    for (const char *p = line; *p && n < 63;) {
        size_t len = strcspn(p, " ");
        snprintf(words[n], sizeof words[n], "%.*s", (int)len, p);
        if (len) argv[n] = words[n], n++;
        p += len;
        p += strspn(p, " ");
    }
    argv[n] = NULL;
    static int count;
    snprintf(s->log, sizeof s->log, "%s/server%d.log", dir, count++);
    s->pid = fork();
    if (s->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); // a test that fails leaves nothing behind
        int fd = open(s->log, O_CREAT | O_TRUNC | O_WRONLY, 0600);
        dup2(fd, 2);
        execv(argv[0], argv);
        _exit(127);
    }
}

// Waits until its log has `text`; false when it ended before.
static inline bool server_wait(server *s, const char *text) {
    for (int i = 0; i < CLIENT_LIMIT_S * 100; i++) {
        char *log = server_log(s);
        const char *at = strstr(log, "http://127.0.0.1:");
        if (at) sscanf(at + 17, "%d", &s->port);
        bool found = strstr(log, text) != NULL;
        mx_free(log);
        if (found) return true;
        if (waitpid(s->pid, NULL, WNOHANG) == s->pid) {
            s->pid = 0;
            return false;
        }
        mx_sleep_s(0.01);
    }
    return false;
}

static inline void server_start(server *s, const char *dir, const char *model, const char *args) {
    server_spawn(s, dir, model, args);
    if (!server_wait(s, "ready at")) {
        char *log = server_log(s);
        fail_msg("the server did not start: %s", log);
    }
}

// Its exit code, or 1000 + the signal that ended it; -1 when it did not end in time.
static inline int server_end(server *s, double seconds) {
    int st = 0;
    for (double t = mx_now_s(); mx_now_s() - t < seconds;) {
        if (waitpid(s->pid, &st, WNOHANG) == s->pid) {
            s->pid = 0;
            return WIFEXITED(st) ? WEXITSTATUS(st) : 1000 + WTERMSIG(st);
        }
        mx_sleep_s(0.005);
    }
    return -1;
}

static inline void server_stop(server *s) {
    if (s->pid <= 0) return;
    kill(s->pid, SIGTERM);
    int code = server_end(s, 20);
    if (code == 0) return;
    char *log = server_log(s);
    if (s->pid > 0) kill(s->pid, SIGKILL);
    fail_msg("the server ended with %d: %s", code, log);
}

// ---- Connections ----

static inline int dial(const server *s) {
    struct timeval limit = {CLIENT_LIMIT_S, 0};
    int fd, rc;
    if (s->sock[0]) {
        struct sockaddr_un a = {.sun_family = AF_UNIX};
        memcpy(a.sun_path, s->sock, sizeof s->sock);
        fd = socket(AF_UNIX, SOCK_STREAM, 0);
        rc = connect(fd, (struct sockaddr *)&a, sizeof a);
    } else {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)s->port)};
        inet_pton(AF_INET, "127.0.0.1", &a.sin_addr);
        fd = socket(AF_INET, SOCK_STREAM, 0);
        rc = connect(fd, (struct sockaddr *)&a, sizeof a);
    }
    if (rc != 0) {
        close(fd);
        return -1;
    }
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    return fd;
}

static inline void send_all(int fd, const char *p, size_t n) {
    while (n) {
        ssize_t k = send(fd, p, n, MSG_NOSIGNAL);
        if (k <= 0) return; // it answered already
        p += k, n -= (size_t)k;
    }
}

static inline void send_request(int fd, const char *method, const char *path, const char *headers,
                                const char *body, size_t n) {
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_printf(&b, "%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n%s", method, path,
                  headers ? headers : "");
    if (body) mx_buf_printf(&b, "Content-Type: application/json\r\nContent-Length: %zu\r\n", n);
    mx_buf_puts(&b, "\r\n");
    if (body) mx_buf_add(&b, body, n);
    send_all(fd, b.data, b.n);
    mx_buf_free(&b);
}

typedef struct reply {
    int status; // 0: none came
    char *head; // headers, owned
    mx_buf body;
    bool whole; // ended as its framing says
} reply;

static inline void reply_free(reply *r) {
    mx_free(r->head);
    mx_buf_free(&r->body);
    *r = (reply){0};
}

static inline const char *reply_header(const reply *r, const char *name) {
    static _Thread_local char value[1024];
    char want[128];
    snprintf(want, sizeof want, "\n%s:", name);
    const char *at = strcasestr(r->head, want);
    if (!at) return NULL;
    at += strlen(want);
    at += strspn(at, " ");
    snprintf(value, sizeof value, "%.*s", (int)strcspn(at, "\r\n"), at);
    return value;
}

static inline bool dechunk(const char *p, size_t n, mx_buf *out) {
    for (;;) {
        char *end = NULL;
        unsigned long k = strtoul(p, &end, 16);
        if (end == p || (size_t)(end - p) + 2 > n || memcmp(end, "\r\n", 2) != 0) return false;
        n -= (size_t)(end + 2 - p);
        p = end + 2;
        if (k == 0) return n >= 2;
        if (k + 2 > n) return false;
        mx_buf_add(out, p, k);
        p += k + 2, n -= k + 2;
    }
}

// Reads until the server closes.
static inline reply read_reply(int fd) {
    reply r = {0};
    mx_buf raw;
    mx_buf_init(&raw, 0);
    char part[65536];
    ssize_t k;
    while ((k = recv(fd, part, sizeof part, 0)) > 0) mx_buf_add(&raw, part, (size_t)k);
    mx_buf_init(&r.body, 0);
    const char *end = raw.n ? strstr(raw.data, "\r\n\r\n") : NULL;
    if (end) {
        size_t n_head = (size_t)(end - raw.data);
        r.head = mx_alloc(n_head + 1);
        memcpy(r.head, raw.data, n_head);
        r.head[n_head] = 0;
        sscanf(r.head, "HTTP/1.1 %d", &r.status);
        const char *length = reply_header(&r, "Content-Length");
        size_t n_body = raw.n - n_head - 4;
        if (reply_header(&r, "Transfer-Encoding"))
            r.whole = dechunk(end + 4, n_body, &r.body);
        else
            mx_buf_add(&r.body, end + 4, n_body);
        if (length) r.whole = (size_t)atol(length) == n_body;
        if (r.status == 204) r.whole = true;
    } else {
        r.head = mx_strdup("");
    }
    mx_buf_free(&raw);
    return r;
}

static inline reply ask_bytes(const server *s, const char *method, const char *path,
                              const char *headers, const char *body, size_t n) {
    int fd = dial(s);
    assert_true(fd >= 0);
    send_request(fd, method, path, headers, body, n);
    reply r = read_reply(fd);
    close(fd);
    return r;
}

static inline reply get(const server *s, const char *path) {
    return ask_bytes(s, "GET", path, NULL, NULL, 0);
}

static inline reply post(const server *s, const char *path, const char *body) {
    return ask_bytes(s, "POST", path, NULL, body, strlen(body));
}

// The body as JSON; fails the test when status is another one.
static inline json_t *json_of(reply r, int status, const char *what) {
    json_t *v = json_loadb(r.body.n ? r.body.data : "", r.body.n, JSON_ALLOW_NUL, NULL);
    if (r.status != status || !v || !r.whole) {
        fail_msg("%.200s: status %d, expected %d: %.*s", what, r.status, status, (int)r.body.n,
                 r.body.n ? r.body.data : "");
    }
    reply_free(&r);
    return v;
}

static inline json_t *get_json(const server *s, const char *path, int status) {
    return json_of(get(s, path), status, path);
}

static inline json_t *post_json(const server *s, const char *path, const char *body, int status) {
    return json_of(post(s, path, body), status, body);
}

// "choices/0/message/content"
static inline json_t *at(const json_t *v, const char *path) {
    while (v && *path) {
        char key[64];
        size_t n = strcspn(path, "/");
        snprintf(key, sizeof key, "%.*s", (int)n, path);
        v = json_is_array(v) ? json_array_get(v, (size_t)atol(key)) : json_object_get(v, key);
        path += n + (path[n] == '/');
    }
    return (json_t *)(uintptr_t)v;
}

static inline const char *text_at(const json_t *v, const char *path) {
    const char *t = json_string_value(at(v, path));
    return t ? t : "(none)";
}

static inline long long int_at(const json_t *v, const char *path) {
    return json_integer_value(at(v, path));
}

// ---- Server-sent events ----

// Strictly: comments (": ...") and "data: {json}", each followed by an empty line, nothing else.
// Returns an array of the events, "[DONE]" as a string.
static inline json_t *parse_events(const mx_buf *b) {
    json_t *list = json_array();
    const char *p = b->n ? b->data : "", *end = p + b->n;
    while (p < end) {
        const char *stop = strstr(p, "\n\n");
        if (!stop) fail_msg("half an event: %s", p);
        mx_str e = {p, (size_t)(stop - p)};
        p = stop + 2;
        if (e.p[0] == ':' && !memchr(e.p, '\n', e.n)) continue;
        if (!mx_str_starts(e, mx_str_of("data: ")) || memchr(e.p, '\n', e.n)) {
            fail_msg("no event: %.*s", (int)e.n, e.p);
        }
        e.p += 6, e.n -= 6;
        if (mx_str_is(e, "[DONE]")) {
            json_array_append_new(list, json_string("[DONE]"));
            continue;
        }
        json_t *v = json_loadb(e.p, e.n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
        if (!v) fail_msg("no JSON: %.*s", (int)e.n, e.p);
        json_array_append_new(list, v);
    }
    return list;
}

static inline json_t *post_stream(const server *s, const char *path, const char *body) {
    reply r = post(s, path, body);
    if (r.status != 200 || !r.whole) fail_msg("%.200s: status %d: %s", body, r.status, r.body.data);
    const char *type = reply_header(&r, "Content-Type");
    assert_true(type && strncmp(type, "text/event-stream", 17) == 0);
    json_t *events = parse_events(&r.body);
    reply_free(&r);
    return events;
}

#endif
