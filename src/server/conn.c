// Connections: which are idle, which have been sending a request for too long. State: the list of
// connections, under srv.lock.
//
// The library closes a connection that is silent, not one that sends a byte now and then. So the
// watcher looks at all of them: a request must have arrived within the idle time, and a body that
// takes longer must come at MIN_RATE on average. When nearly all places are taken, those that have
// been idle longest make room. A connection is closed by shutting its socket down; the library then
// sees the end and frees it.
#include "server/server_int.h"

#include "base/mem.h"
#include "base/os.h"

#include <sys/resource.h>
#include <sys/socket.h>

enum {
    MIN_RATE = 4096,               // bytes a second
    CROWD = SRV_MAX_CONNS / 8 * 7, // more than these: idle ones are closed
    SPARE_FILES = 128              // descriptors that are not connections
};

struct srv_conn {
    int fd;
    bool busy, shut; // busy: its request is complete, the answer is not
    double since_s;  // opened, or the last request completed
    size_t n_bytes;  // of the present request's body
    srv_conn *prev, *next;
};

static void add(srv *s, srv_conn *c) {
    pthread_mutex_lock(&s->lock);
    c->next = s->conns;
    if (c->next) c->next->prev = c;
    s->conns = c;
    s->n_conns++;
    pthread_mutex_unlock(&s->lock);
}

static void drop(srv *s, srv_conn *c) {
    pthread_mutex_lock(&s->lock);
    if (c->prev)
        c->prev->next = c->next;
    else
        s->conns = c->next;
    if (c->next) c->next->prev = c->prev;
    s->n_conns--;
    pthread_mutex_unlock(&s->lock);
    mx_free(c);
}

void conn_changed(void *server, struct MHD_Connection *conn, void **context,
                  enum MHD_ConnectionNotificationCode what) {
    srv *s = server;
    if (what == MHD_CONNECTION_NOTIFY_CLOSED) {
        drop(s, *context);
        return;
    }
    const union MHD_ConnectionInfo *i =
        MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CONNECTION_FD);
    srv_conn *c = mx_calloc(1, sizeof *c);
    c->fd = i ? i->connect_fd : -1;
    c->since_s = mx_now_s();
    *context = c;
    add(s, c);
}

static srv_conn *of_request(const srv_req *q) {
    const union MHD_ConnectionInfo *i =
        MHD_get_connection_info(q->conn, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return i->socket_context;
}

void conn_took(srv_req *q, size_t n) {
    srv_conn *c = of_request(q);
    pthread_mutex_lock(&q->s->lock);
    c->n_bytes += n;
    pthread_mutex_unlock(&q->s->lock);
}

void conn_set_busy(srv_req *q, bool busy) {
    srv_conn *c = of_request(q);
    pthread_mutex_lock(&q->s->lock);
    c->busy = busy;
    c->n_bytes = 0;
    c->since_s = mx_now_s();
    pthread_mutex_unlock(&q->s->lock);
}

static void shut(srv_conn *c) {
    c->shut = true;
    shutdown(c->fd, SHUT_RDWR);
}

static void close_longest_idle(srv *s, double now) {
    srv_conn *oldest = NULL;
    for (srv_conn *c = s->conns; c; c = c->next) {
        if (c->busy || c->shut || now - c->since_s < 1) continue;
        if (!oldest || c->since_s < oldest->since_s) oldest = c;
    }
    if (oldest) shut(oldest);
}

void conn_sweep(srv *s, double now) {
    for (srv_conn *c = s->conns; c; c = c->next) {
        double limit = s->c->idle_timeout_s + (double)c->n_bytes / MIN_RATE;
        if (!c->busy && !c->shut && now - c->since_s > limit) shut(c);
    }
    for (int32_t i = CROWD; i < s->n_conns; i++) close_longest_idle(s, now);
}

void conn_allow_files(void) {
    struct rlimit r;
    const rlim_t want = SRV_MAX_CONNS + SPARE_FILES;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0 || r.rlim_cur == RLIM_INFINITY || r.rlim_cur >= want)
        return;
    rlim_t have = r.rlim_cur;
    r.rlim_cur = r.rlim_max == RLIM_INFINITY ? want : MX_MIN(want, r.rlim_max);
    if (r.rlim_cur > have && setrlimit(RLIMIT_NOFILE, &r) == 0) have = r.rlim_cur;
    if (have < want)
        mx_log(MX_LOG_WARN,
               "at most %llu open files: fewer than the %d connections that are served",
               (unsigned long long)have, SRV_MAX_CONNS);
}
