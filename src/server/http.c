// HTTP over libmicrohttpd: connections, bodies, answers, streams. State: one srv_req per request,
// made when its first line was read and freed when it is completed.
//
// While a generation runs its connection is suspended. The engine's notify, the watcher and the
// shutdown wake it (req_wake); the HTTP thread then reads what came and suspends it again. A wake
// that arrives between reading and suspending is not lost: it leaves a flag, and the suspending
// side looks at the flag under the same lock. The engine calls notify with its own lock held, so
// nothing here calls the engine while it holds q->lock. Text that comes fast is left to gather.
#include "server/server_int.h"

#include "base/mem.h"
#include "base/os.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    SLOW_BODY = 64 << 10, // bytes: longer ones are read by the slow lane
    BODIES_AT_ONCE = 8    // of the greatest size, or more that are smaller
};

// ---- Answers ----

static void free_body(void *p) {
    mx_free(p);
}

static void count_refusal(const srv_req *q) {
    srv *s = q->s;
    if (!q->route || !(q->route->flags & ROUTE_GEN) || q->gen) return;
    pthread_mutex_lock(&s->lock);
    s->m.rejected_busy += q->is_busy;
    s->m.rejected_invalid += q->status >= 400 && q->status < 500;
    pthread_mutex_unlock(&s->lock);
}

static void queue(srv_req *q, int status, const char *type, struct MHD_Response *r) {
    MHD_add_response_header(r, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    MHD_add_response_header(r, "X-Request-Id", q->id);
    if (q->route && q->route->handle == handle_metrics) {
        char started[24];
        snprintf(started, sizeof started, "%lld", (long long)q->s->started_wall_s);
        MHD_add_response_header(r, "Process-Start-Time-Unix", started);
    }
    if (status == 405) MHD_add_response_header(r, MHD_HTTP_HEADER_ALLOW, q->allow);
    if (status == 501) MHD_add_response_header(r, "X-Should-Retry", "false"); // OpenAI's clients
    if (status == 503 || status == 429) MHD_add_response_header(r, "Retry-After", "1");
    if (q->must_close) MHD_add_response_header(r, MHD_HTTP_HEADER_CONNECTION, "close");
    if (status == 401) MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    gate_headers(q, r);
    q->answered = true;
    q->status = status;
    count_refusal(q);
    if (q->in_lane) { // the library wants it from the connection's own thread
        q->kept = r;
        return;
    }
    MHD_queue_response(q->conn, (unsigned)status, r);
    MHD_destroy_response(r);
}

void req_reply(srv_req *q, int status, const char *type, mx_buf *body) {
    size_t n = body->n;
    q->sent_bytes = n;
    queue(q, status, type,
          MHD_create_response_from_buffer_with_free_callback(n, mx_buf_take(body), free_body));
}

void req_reply_json(srv_req *q, int status, mx_buf *body) {
    if (body->full) {
        mx_buf_free(body);
        req_error(q, 500, NULL, NULL, "the answer is too large");
        return;
    }
    req_reply(q, status, "application/json; charset=utf-8", body);
}

void req_reply_static(srv_req *q, const char *type, const void *data, size_t n) {
    struct MHD_Response *r =
        MHD_create_response_from_buffer(n, (void *)(uintptr_t)data, MHD_RESPMEM_PERSISTENT);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(r, "Content-Security-Policy",
                            "default-src 'none'; style-src 'unsafe-inline'; script-src "
                            "'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
                            "form-action 'none'; frame-ancestors 'none'");
    queue(q, 200, type, r);
}

static const char *error_type(int status, const char *code) {
    static const char *const own[] = {"server_busy", "server_timeout", "feature_disabled"};
    for (size_t i = 0; code && i < MX_COUNT(own); i++) {
        if (strcmp(code, own[i]) == 0) return own[i];
    }
    switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 500: return "server_error";
    case 501: return "not_supported_error";
    case 503: return "unavailable_error";
    case 504: return "server_timeout";
    default: return "invalid_request_error";
    }
}

static void field_or_null(mx_buf *b, const char *name, const char *value) {
    mx_buf_printf(b, ",\"%s\":", name);
    if (value)
        mx_buf_json(b, mx_str_of(value));
    else
        mx_buf_puts(b, "null");
}

void error_body(mx_buf *out, int status, const char *code, const char *param, const char *message) {
    mx_buf_puts(out, "{\"error\":{\"message\":");
    mx_buf_json(out, mx_str_of(message));
    mx_buf_printf(out, ",\"type\":\"%s\"", error_type(status, code));
    field_or_null(out, "param", param);
    if (code)
        field_or_null(out, "code", code);
    else if (status == 401 || status == 503)
        mx_buf_printf(out, ",\"code\":%d", status);
    else
        field_or_null(out, "code", NULL);
    mx_buf_puts(out, "}}");
}

void req_error(srv_req *q, int status, const char *code, const char *param, const char *fmt, ...) {
    char text[MX_ERR_CAP];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    q->is_busy = code && strcmp(code, "server_busy") == 0;
    mx_buf b;
    mx_buf_init(&b, 0);
    error_body(&b, status, code, param, text);
    req_reply(q, status, "application/json; charset=utf-8", &b);
}

const char *error_code_of(const mlxcel_error *e) {
    switch (e->status) {
    case MX_CONTEXT: return "context_length_exceeded";
    case MX_BUSY: return "server_busy";
    case MX_NOMEM: return "out_of_memory";
    case MX_TIMEOUT: return "server_timeout";
    case MX_CANCELLED: return "server_shutdown";
    default: return NULL;
    }
}

void req_fail(srv_req *q, const mlxcel_error *e) {
    int http = e->status == MX_CANCELLED ? 503 : e->http;
    req_error(q, http ? http : 500, error_code_of(e), NULL, "%s", e->message);
}

// ---- Waking ----

// Under q->lock.
static void wake(srv_req *q) {
    q->wake = true, q->late = false;
    if (!q->suspended) return;
    q->suspended = false;
    MHD_resume_connection(q->conn);
}

void req_wake(srv_req *q) {
    pthread_mutex_lock(&q->lock);
    wake(q);
    pthread_mutex_unlock(&q->lock);
}

static bool is_early(const srv_req *q, double now) {
    return now - q->sent_s < q->s->c->sse_gather_ms * 1e-3;
}

void req_event(void *user, mlxcel_event_kind kind) {
    srv_req *q = user;
    pthread_mutex_lock(&q->lock);
    if (q->streaming && q->suspended && kind == MLXCEL_EVENT_TEXT && is_early(q, mx_now_s()))
        q->late = true;
    else
        wake(q);
    pthread_mutex_unlock(&q->lock);
}

void req_late(srv_req *q, double now) {
    pthread_mutex_lock(&q->lock);
    if (q->late && !is_early(q, now)) wake(q);
    pthread_mutex_unlock(&q->lock);
}

// False when something came meanwhile: look again instead of waiting.
static bool suspend(srv_req *q) {
    pthread_mutex_lock(&q->lock);
    bool wait = !q->wake;
    if (wait) {
        q->suspended = true;
        MHD_suspend_connection(q->conn);
    }
    pthread_mutex_unlock(&q->lock);
    return wait;
}

typedef struct signals {
    bool gone, ping;
} signals;

static signals take_signals(srv_req *q) {
    pthread_mutex_lock(&q->lock);
    signals s = {q->gone, q->ping};
    q->wake = q->ping = false;
    pthread_mutex_unlock(&q->lock);
    return s;
}

static void shut_down(gen *g) {
    if (g->done || !atomic_load(&g->q->s->aborting)) return;
    g->error = (mlxcel_error){MX_CANCELLED, 503, "the server is shutting down"};
    gen_leave(g);
    g->done = true;
}

// ---- Streams ----

static ssize_t hand_out(srv_req *q, char *buf, size_t max) {
    size_t n = MX_MIN(max, q->out.n - q->out_pos);
    memcpy(buf, q->out.data + q->out_pos, n);
    q->out_pos += n;
    q->sent_bytes += n;
    if (q->out_pos == q->out.n) {
        mx_buf_clear(&q->out);
        q->out_pos = 0;
    }
    pthread_mutex_lock(&q->lock);
    q->last_write_s = q->sent_s = mx_now_s();
    pthread_mutex_unlock(&q->lock);
    return (ssize_t)n;
}

static void finish_stream(srv_req *q) {
    gen *g = q->gen;
    q->ended = true;
    watch_quiet(q);
    if (g->error.status != 0) {
        mx_buf_puts(&q->out, "data: ");
        error_body(&q->out, g->error.http ? g->error.http : 500, error_code_of(&g->error), NULL,
                   g->error.message);
        mx_buf_puts(&q->out, "\n\n");
    } else if (g->api != API_NATIVE) {
        openai_stream_end(g);
    }
}

static ssize_t read_stream(void *cls, uint64_t pos, char *buf, size_t max) {
    srv_req *q = cls;
    (void)pos;
    for (;;) {
        signals now = take_signals(q);
        if (now.gone) return MHD_CONTENT_READER_END_WITH_ERROR;
        if (q->out.n == 0 && !q->ended) {
            gen_pump(q->gen);
            shut_down(q->gen);
            if (q->gen->done) finish_stream(q);
        }
        if (q->out.n == 0 && now.ping && !q->ended) gen_ping(q->gen);
        if (q->out.full) return MHD_CONTENT_READER_END_WITH_ERROR;
        if (q->out.n > 0) return hand_out(q, buf, max);
        if (q->ended) return MHD_CONTENT_READER_END_OF_STREAM;
        if (suspend(q)) return 0;
    }
}

static void start_stream(srv_req *q) {
    pthread_mutex_lock(&q->lock);
    q->streaming = true;
    q->last_write_s = mx_now_s();
    pthread_mutex_unlock(&q->lock);
    struct MHD_Response *r =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 32768, read_stream, q, NULL);
    MHD_add_response_header(r, "Cache-Control", "no-cache");
    MHD_add_response_header(r, "X-Accel-Buffering", "no");
    queue(q, 200, "text/event-stream; charset=utf-8", r);
}

// An answer in one piece: waits, or answers.
static enum MHD_Result wait_whole(srv_req *q) {
    for (;;) {
        signals now = take_signals(q);
        if (now.gone) {
            q->status = 499;
            return MHD_NO;
        }
        gen_pump(q->gen);
        shut_down(q->gen);
        if (q->gen->done) {
            watch_quiet(q);
            gen_reply(q->gen);
            return MHD_YES;
        }
        if (suspend(q)) return MHD_YES;
    }
}

// ---- Requests ----

static void *on_uri(void *cls, const char *uri, struct MHD_Connection *conn) {
    srv *s = cls;
    srv_req *q = mx_calloc(1, sizeof *q);
    q->s = s;
    q->conn = conn;
    q->started_s = mx_now_s();
    q->uri = mx_strdup(uri);
    pthread_mutex_init(&q->lock, NULL);
    mx_buf_init(&q->body, (size_t)s->c->max_body + 1);
    mx_buf_init(&q->out, 0);
    const union MHD_ConnectionInfo *fd =
        MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CONNECTION_FD);
    q->fd = fd ? fd->connect_fd : -1;
    pthread_mutex_lock(&s->lock);
    q->number = ++s->next_id;
    s->m.http_total++;
    pthread_mutex_unlock(&s->lock);
    return q;
}

static bool plain_id(const char *p) {
    size_t n = strlen(p);
    if (n == 0 || n >= sizeof((srv_req *)0)->id) return false;
    return strspn(p, "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.:") == n;
}

static void choose_id(srv_req *q) {
    const char *given = MHD_lookup_connection_value(q->conn, MHD_HEADER_KIND, "X-Request-Id");
    if (given && plain_id(given)) {
        snprintf(q->id, sizeof q->id, "%s", given);
    } else {
        uint64_t salt = mx_hash64(&q->s->started_wall_s, sizeof q->s->started_wall_s, q->number);
        snprintf(q->id, sizeof q->id, "req_%016llx", (unsigned long long)salt);
    }
}

static bool declares_too_much(srv_req *q) {
    const char *n = MHD_lookup_connection_value(q->conn, MHD_HEADER_KIND, "Content-Length");
    uint64_t bytes;
    return n && mx_parse_u64(n, &bytes) && bytes > (uint64_t)q->s->c->max_body;
}

// The first call of a request: who asks, and for what. Refusals wait for the end of the body, for
// an answer given earlier ends the connection; a refused body is not kept.
static enum MHD_Result begin(srv_req *q, const char *method, const char *url, const char *version) {
    q->begun = true;
    q->verdict = 400;
    q->path = url;
    choose_id(q);
    if (!head_check(q, q->uri, version)) return MHD_YES;
    if (strcmp(method, "HEAD") == 0) method = "GET";
    q->preflight = strcmp(method, "OPTIONS") == 0;
    q->route = route_find(q->s, method, url, &q->arg, q->allow, sizeof q->allow);
    q->verdict = gate_verdict(q);
    if (!declares_too_much(q)) return MHD_YES;
    if (q->verdict == 200)
        req_error(q, 413, NULL, NULL, "Request body too large.");
    else
        gate_refuse(q, q->verdict);
    return MHD_YES;
}

// One that finds no room gives back what it took, so that others can end.
static void count_body(srv_req *q, size_t n) {
    q->n_counted += n;
    size_t all = atomic_fetch_add(&q->s->body_bytes, n) + n;
    if (all <= BODIES_AT_ONCE * (size_t)q->s->c->max_body) return;
    q->no_room = true;
    atomic_fetch_sub(&q->s->body_bytes, q->n_counted);
    q->n_counted = 0;
    mx_buf_free(&q->body);
}

static enum MHD_Result take_body(srv_req *q, const char *data, size_t *n) {
    conn_took(q, *n);
    bool wanted = q->route && q->verdict == 200;
    if (q->body.n + *n > (size_t)q->s->c->max_body) q->too_large = true;
    if (wanted && !q->too_large && !q->no_room) count_body(q, *n);
    if (wanted && !q->too_large && !q->no_room)
        mx_buf_add(&q->body, data, *n);
    else
        q->n_dropped += *n;
    *n = 0;
    // the answer must wait for the end of the body, which may have none
    return q->n_dropped <= (size_t)q->s->c->max_body ? MHD_YES : MHD_NO;
}

static void refuse_path(srv_req *q) {
    if (q->allow[0])
        req_error(q, 405, "method_not_allowed", NULL, "%.200s takes %s", q->path, q->allow);
    else
        req_error(q, 404, "not_found", NULL, "there is no %.200s here", q->path);
}

// Refusals that need no handler. True: answered.
static bool refused(srv_req *q) {
    int flags = q->route ? q->route->flags : 0;
    if (q->preflight)
        gate_preflight(q);
    else if (q->verdict != 200)
        gate_refuse(q, q->verdict);
    else if (!q->route)
        refuse_path(q);
    else if (q->too_large)
        req_error(q, 413, NULL, NULL, "Request body too large.");
    else if (q->no_room)
        req_error(q, 503, "server_busy", NULL, "too many long requests at once");
    else if ((flags & ROUTE_ENGINE) && !atomic_load(&q->s->ready))
        req_error(q, 503, NULL, NULL, "Loading model");
    else if ((flags & ROUTE_GEN) && atomic_load(&q->s->stopping))
        req_error(q, 503, "server_shutdown", NULL, "the server is shutting down");
    return q->answered;
}

static bool read_json(srv_req *q) {
    mx_err err = {0};
    char field[JSON_FIELD];
    q->json = json_read(q->body.n ? q->body.data : "", q->body.n, &err, field);
    mx_buf_free(&q->body);
    if (!q->json) req_error(q, 400, NULL, field[0] ? field : NULL, "%s", err.msg);
    return q->json != NULL;
}

void req_read(srv_req *q) {
    if ((q->route->flags & ROUTE_BODY) && !read_json(q)) return;
    q->route->handle(q);
    CHECK(q->gen || q->answered);
}

// Queues what the slow lane answered.
static enum MHD_Result hand_over(srv_req *q) {
    MHD_queue_response(q->conn, (unsigned)q->status, q->kept);
    MHD_destroy_response(q->kept);
    q->kept = NULL;
    return MHD_YES;
}

// The request was read: it is answered, or it generates.
static enum MHD_Result go_on(srv_req *q) {
    q->in_lane = false;
    if (q->kept) return hand_over(q);
    if (q->answered) return MHD_YES;
    q->watched = true;
    watch_add(q);
    if (!q->gen->o.stream) return wait_whole(q);
    start_stream(q);
    return MHD_YES;
}

// A long body, or a template of the client's own.
static bool is_slow(const srv_req *q) {
    return q->body.n > SLOW_BODY || q->route->handle == handle_template;
}

static enum MHD_Result answer(srv_req *q) {
    conn_set_busy(q, true);
    if (refused(q)) return MHD_YES;
    if (is_slow(q)) {
        q->in_lane = true;
        lane_put(q);
        return MHD_YES;
    }
    req_read(q);
    return go_on(q);
}

static enum MHD_Result on_request(void *cls, struct MHD_Connection *conn, const char *url,
                                  const char *method, const char *version, const char *data,
                                  size_t *n_data, void **state) {
    srv_req *q = *state;
    (void)cls, (void)conn;
    if (!q->begun) return begin(q, method, head_path(url), version);
    if (*n_data) return q->answered ? (*n_data = 0, MHD_YES) : take_body(q, data, n_data);
    if (q->in_lane) return go_on(q);
    if (q->answered) return MHD_YES;
    if (q->gen) return wait_whole(q);
    return answer(q);
}

// Never what was asked or answered, only how it went.
void req_log(const srv_req *q) {
    if (!q->s->c->log_requests || !q->begun) return;
    const gen *g = q->gen;
    char more[160] = "";
    if (g) {
        snprintf(more, sizeof more, " prompt=%d cached=%d generated=%d%s%s", g->n_prompt,
                 g->n_cached, g->n_decoded, g->error.status ? " error=" : "",
                 g->error.status ? mx_status_name((mx_status)g->error.status) : "");
    }
    mx_log(MX_LOG_INFO, "%s %.80s %d %.1f ms id=%s%s",
           q->route && q->route->method[0] ? q->route->method : "-",
           q->route ? q->route->path : "(no route)", q->status, (mx_now_s() - q->started_s) * 1e3,
           q->id, more);
}

static void on_completed(void *cls, struct MHD_Connection *conn, void **state,
                         enum MHD_RequestTerminationCode how) {
    srv_req *q = *state;
    (void)cls, (void)conn;
    if (!q) return;
    conn_set_busy(q, false);
    if (q->watched) watch_remove(q);
    if (how != MHD_REQUEST_TERMINATED_COMPLETED_OK && q->streaming && !q->ended) q->status = 499;
    if (q->gen) gen_leave(q->gen);
    if (q->gen) metrics_done(q->s, q->gen);
    req_log(q);
    if (q->kept) MHD_destroy_response(q->kept);
    atomic_fetch_sub(&q->s->body_bytes, q->n_counted);
    gen_free(q->gen);
    json_decref(q->json);
    mx_buf_free(&q->body);
    mx_buf_free(&q->out);
    mx_free(q->uri);
    pthread_mutex_destroy(&q->lock);
    mx_free(q);
    *state = NULL;
}

// ---- Listening ----

static mx_status listen_unix(srv *s, mx_err *err) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    const char *path = s->c->host;
    if (strlen(path) >= sizeof a.sun_path) {
        return mx_err_set(err, MX_INVALID, "--host %s: the path of a socket is at most %zu bytes",
                          path, sizeof a.sun_path - 1);
    }
    memcpy(a.sun_path, path, strlen(path) + 1);
    // A socket file that nobody listens on is left from a server that was killed. Other files stay.
    // One that does not accept (EAGAIN) would have us wait for it.
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct stat st;
    int why = connect(fd, (struct sockaddr *)&a, sizeof a) == 0 ? 0 : errno;
    close(fd);
    if (why == 0 || why == EAGAIN) {
        return mx_err_set(err, MX_IO, "cannot listen on %s: another program listens there%s", path,
                          why ? ", and accepts no connection at the moment" : "");
    }
    if (why == ECONNREFUSED && lstat(path, &st) == 0 && S_ISSOCK(st.st_mode)) unlink(path);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) != 0 || listen(fd, 511) != 0) {
        mx_err_set(err, MX_IO, "cannot listen on %s: %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        return MX_IO;
    }
    s->listen_fd = fd;
    s->is_unix = true;
    if (lstat(path, &st) == 0) s->socket_dev = (uint64_t)st.st_dev, s->socket_ino = st.st_ino;
    s->address = mx_strdup(path);
    return MX_OK;
}

static void note_address(srv *s) {
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    char host[128] = "", port[16] = "";
    getsockname(s->listen_fd, (struct sockaddr *)&a, &n);
    getnameinfo((struct sockaddr *)&a, n, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
    mx_buf b;
    mx_buf_init(&b, 0);
    bool v6 = a.ss_family == AF_INET6;
    mx_buf_printf(&b, "%s://%s%s%s:%s", s->is_tls ? "https" : "http", v6 ? "[" : "", host,
                  v6 ? "]" : "", port);
    s->address = mx_buf_take(&b);
}

static int open_socket(const srv *s, const struct addrinfo *a) {
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (s->c->reuse_port) setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 511) == 0) return fd;
    int saved = errno;
    close(fd);
    errno = saved;
    return -1;
}

mx_status http_listen(srv *s, mx_err *err) {
    const char *host = s->c->host;
    if (mx_str_ends(mx_str_of(host), mx_str_of(".sock"))) return listen_unix(s, err);
    char port[16];
    snprintf(port, sizeof port, "%d", s->c->port);
    struct addrinfo hint = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *list = NULL;
    int rc = getaddrinfo(host, port, &hint, &list);
    if (rc != 0) return mx_err_set(err, MX_INVALID, "--host %s: %s", host, gai_strerror(rc));
    int fd = -1;
    for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next) fd = open_socket(s, a);
    int saved = errno;
    freeaddrinfo(list);
    if (fd < 0) {
        return mx_err_set(err, MX_IO, "cannot listen on %s port %s: %s", host, port,
                          strerror(saved));
    }
    s->listen_fd = fd;
    note_address(s);
    return MX_OK;
}

static void on_library_log(void *cls, const char *fmt, va_list ap) {
    char text[512];
    (void)cls;
    vsnprintf(text, sizeof text, fmt, ap);
    text[strcspn(text, "\n")] = 0;
    mx_log(MX_LOG_DEBUG, "http: %s", text);
}

static mx_status read_tls(const srv *s, char **key, char **cert, mx_err *err) {
    size_t n;
    if (MHD_is_feature_supported(MHD_FEATURE_TLS) != MHD_YES) {
        return mx_err_set(err, MX_UNSUPPORTED,
                          "--ssl-key-file: this build's libmicrohttpd has no TLS");
    }
    MX_TRY(mx_read_file(s->c->ssl_key_file, 1 << 20, key, &n, err));
    return mx_read_file(s->c->ssl_cert_file, 1 << 20, cert, &n, err);
}

mx_status http_start(srv *s, mx_err *err) {
    char *key = NULL, *cert = NULL;
    mx_status st = s->is_tls ? read_tls(s, &key, &cert, err) : MX_OK;
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    struct MHD_OptionItem more[8], *o = more;
    unsigned threads = s->c->threads_http > 0 ? (unsigned)s->c->threads_http : 2;
    if (threads > 1) *o++ = (struct MHD_OptionItem){MHD_OPTION_THREAD_POOL_SIZE, threads, NULL};
    if (s->is_tls) {
        flags |= MHD_USE_TLS;
        *o++ = (struct MHD_OptionItem){MHD_OPTION_HTTPS_MEM_KEY, 0, key};
        *o++ = (struct MHD_OptionItem){MHD_OPTION_HTTPS_MEM_CERT, 0, cert};
    }
    *o = (struct MHD_OptionItem){MHD_OPTION_END, 0, NULL};
    if (st == MX_OK) {
        s->daemon = MHD_start_daemon(
            flags, 0, NULL, NULL, on_request, s, MHD_OPTION_EXTERNAL_LOGGER, on_library_log, NULL,
            MHD_OPTION_LISTEN_SOCKET, s->listen_fd, MHD_OPTION_URI_LOG_CALLBACK, on_uri, s,
            MHD_OPTION_NOTIFY_COMPLETED, on_completed, s, MHD_OPTION_CONNECTION_TIMEOUT,
            (unsigned)s->c->idle_timeout_s, MHD_OPTION_CONNECTION_LIMIT, (unsigned)SRV_MAX_CONNS,
            MHD_OPTION_NOTIFY_CONNECTION, conn_changed, s, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
            (size_t)262144, MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1, MHD_OPTION_THREAD_STACK_SIZE,
            (size_t)MX_THREAD_STACK_BYTES, MHD_OPTION_ARRAY, more, MHD_OPTION_END);
        if (!s->daemon)
            st = mx_err_set(err, MX_IO, "cannot start the HTTP threads%s",
                            s->is_tls ? " (are key and certificate valid PEM?)" : "");
    }
    mx_free(key);
    mx_free(cert);
    return st;
}

// The socket's file, unless another server has put its own there since.
void http_unlink_socket(const srv *s) {
    struct stat st;
    if (s->is_unix && lstat(s->c->host, &st) == 0 && (uint64_t)st.st_dev == s->socket_dev &&
        st.st_ino == s->socket_ino) {
        unlink(s->c->host);
    }
}

// No connection is suspended any more when this is called: `aborting` is set, all were woken.
void http_stop(srv *s) {
    MHD_stop_daemon(s->daemon);
    http_unlink_socket(s);
}
