// The slow lane: one thread that reads the requests whose reading takes long, so that the threads
// which serve connections never do. Parsing, templates and tokenizing cost about a second for a few
// MiB of the worst text. State: a queue under srv.lock; a request is here with its connection
// suspended, and nobody else touches it.
#include "server/server_int.h"

#include "base/os.h"

#include <time.h>

static srv_req *take(srv *s) {
    pthread_mutex_lock(&s->lock);
    while (!s->lane_first && !s->lane_stop) pthread_cond_wait(&s->lane_wake, &s->lock);
    srv_req *q = s->lane_first;
    if (q) s->lane_first = q->lane_next;
    if (!s->lane_first) s->lane_last = NULL;
    pthread_mutex_unlock(&s->lock);
    return q;
}

static void *lane_main(void *arg) {
    srv *s = arg;
    for (srv_req *q; (q = take(s));) {
        if (atomic_load(&s->aborting))
            req_error(q, 503, "server_shutdown", NULL, "the server is shutting down");
        else
            req_read(q);
        MHD_resume_connection(q->conn); // q is the HTTP thread's again
    }
    return NULL;
}

mx_status lane_start(srv *s, mx_err *err) {
    pthread_cond_init(&s->lane_wake, NULL);
    if (mx_thread_start(&s->lane, lane_main, s) != 0)
        return mx_err_set(err, MX_IO, "cannot start the thread of slow requests");
    return MX_OK;
}

bool lane_stop(srv *s, double seconds) {
    double until = mx_wall_s() + seconds;
    struct timespec t = {(time_t)until, (long)((until - (double)(time_t)until) * 1e9)};
    pthread_mutex_lock(&s->lock);
    s->lane_stop = true;
    pthread_cond_signal(&s->lane_wake);
    pthread_mutex_unlock(&s->lock);
    if (pthread_timedjoin_np(s->lane, NULL, &t) != 0) return false;
    pthread_cond_destroy(&s->lane_wake);
    return true;
}

void lane_put(srv_req *q) {
    srv *s = q->s;
    MHD_suspend_connection(q->conn);
    pthread_mutex_lock(&s->lock);
    q->lane_next = NULL;
    if (s->lane_last)
        s->lane_last->lane_next = q;
    else
        s->lane_first = q;
    s->lane_last = q;
    pthread_cond_signal(&s->lane_wake);
    pthread_mutex_unlock(&s->lock);
}
