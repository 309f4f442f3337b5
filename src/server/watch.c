// The watcher: one thread that notices clients who left, and streams that have been silent for too
// long. A suspended connection is in nobody's poll set, so its descriptor is watched here; a client
// that shuts its writing side down counts as one that left. State: the registry of requests and an
// epoll set, under srv.lock.
#include "server/server_int.h"

#include "base/mem.h"
#include "base/os.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

static void poke(srv *s) {
    uint64_t one = 1;
    ssize_t written = write(s->wake_fd, &one, sizeof one);
    (void)written;
}

void watch_add(srv_req *q) {
    srv *s = q->s;
    struct epoll_event ev = {.events = EPOLLRDHUP | EPOLLONESHOT, .data.u64 = q->number};
    pthread_mutex_lock(&s->lock);
    q->next = s->first;
    if (q->next) q->next->prev = q;
    s->first = q;
    s->n_generating++;
    if (s->n_generating == 1 && s->c->sse_gather_ms > 0) poke(s); // it looks more often from now on
    // a connection that reads its next request while this one is answered is not watched twice
    if (q->fd >= 0 && epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, q->fd, &ev) != 0) q->fd = -1;
    pthread_mutex_unlock(&s->lock);
}

static void forget_fd(srv_req *q) {
    if (q->fd >= 0) epoll_ctl(q->s->epoll_fd, EPOLL_CTL_DEL, q->fd, NULL);
    q->fd = -1;
}

void watch_quiet(srv_req *q) {
    pthread_mutex_lock(&q->s->lock);
    forget_fd(q);
    q->is_quiet = true;
    pthread_mutex_unlock(&q->s->lock);
}

void watch_remove(srv_req *q) {
    srv *s = q->s;
    pthread_mutex_lock(&s->lock);
    forget_fd(q);
    if (q->prev)
        q->prev->next = q->next;
    else
        s->first = q->next;
    if (q->next) q->next->prev = q->prev;
    s->n_generating--;
    if (s->n_generating == 0) pthread_cond_broadcast(&s->drained);
    pthread_mutex_unlock(&s->lock);
}

// By number: the request may have ended since epoll_wait returned.
static srv_req *find_request(const srv *s, uint64_t number) {
    srv_req *q = s->first;
    while (q && q->number != number) q = q->next;
    return q;
}

static void client_left(srv *s, srv_req *q) {
    pthread_mutex_lock(&q->lock);
    q->gone = true;
    pthread_mutex_unlock(&q->lock);
    s->m.disconnects++;
    gen_cancel(q->gen);
    req_wake(q);
}

static void send_pings(srv *s, double now) {
    double every = s->c->sse_ping_s;
    if (every <= 0) return;
    for (srv_req *q = s->first; q; q = q->next) {
        pthread_mutex_lock(&q->lock);
        bool due = q->streaming && !q->ping && now - q->last_write_s >= every;
        if (due) q->ping = true;
        pthread_mutex_unlock(&q->lock);
        if (due) req_wake(q);
    }
}

enum { SWEEP_MS = 250 }; // between two looks at silent streams and idle connections

static void *watch_main(void *arg) {
    srv *s = arg;
    double swept_s = 0;
    int wait = SWEEP_MS;
    for (;;) {
        struct epoll_event ev[64];
        int n = epoll_wait(s->epoll_fd, ev, MX_COUNT(ev), wait);
        pthread_mutex_lock(&s->lock);
        for (int i = 0; i < n; i++) {
            srv_req *q = find_request(s, ev[i].data.u64);
            uint64_t count;
            if (ev[i].data.u64 == 0 && read(s->wake_fd, &count, sizeof count) < 0) continue;
            if (q && !q->is_quiet) client_left(s, q);
        }
        double now = mx_now_s();
        for (srv_req *q = s->first; q; q = q->next) req_late(q, now);
        if (now - swept_s >= SWEEP_MS * 1e-3) {
            swept_s = now;
            send_pings(s, now);
            conn_sweep(s, now);
        }
        bool gathers = s->n_generating > 0 && s->c->sse_gather_ms > 0, ends = s->watch_ends;
        wait = gathers ? MX_MIN(s->c->sse_gather_ms, SWEEP_MS) : SWEEP_MS;
        pthread_mutex_unlock(&s->lock);
        if (ends) return NULL;
    }
}

mx_status watch_start(srv *s, mx_err *err) {
    s->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    s->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event ev = {.events = EPOLLIN};
    if (s->epoll_fd < 0 || s->wake_fd < 0 ||
        epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, s->wake_fd, &ev) != 0 ||
        mx_thread_start(&s->watcher, watch_main, s) != 0) {
        return mx_err_set(err, MX_IO, "cannot start the watcher thread");
    }
    return MX_OK;
}

void watch_stop(srv *s) {
    pthread_mutex_lock(&s->lock);
    s->watch_ends = true;
    pthread_mutex_unlock(&s->lock);
    poke(s);
    pthread_join(s->watcher, NULL);
    close(s->epoll_fd);
    close(s->wake_fd);
}
