// The feed: a queue of jobs, readers, slots. One mutex guards the queue; files are read and
// transfers started without it.
//
// A slot that nobody fills is in `order`, the one whose transfer was started first in front. A
// reader takes the front: with more slots than readers the transfers of the others go on meanwhile,
// and no reader ever waits for another one.
#include "backend/feed.h"

#include "base/mem.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

enum {
    FEED_JOBS = 64,
    // Memory is copied in parts too small for the C library's stores past the caches: the device
    // then reads a slot from the processor's cache.
    COPY_BYTES = 128 << 10,
};

typedef struct job {
    mx_feed_job j;
    size_t claimed, left; // bytes given to readers; bytes whose transfer was not started
} job;

typedef struct piece {
    uint64_t job;
    size_t at, n;
    int slot;
} piece;

struct mx_feed {
    mx_feed_shape shape;
    mx_feed_device dev;
    uint8_t *host;
    pthread_t *readers;
    int n_readers;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    job jobs[FEED_JOBS];             // job number k, from 0, in k % FEED_JOBS
    uint64_t n_put, n_claimed, sent; // jobs: queued; wholly with readers; done, with all before
    int *order;                      // (n_slots), circular
    int front, n_order;
    bool stop, failed;
    mx_err err;
    mx_feed_stats stats;
};

// ---- Reading -----------------------------------------------------------------------------------

static mx_status read_file(const mx_file *file, size_t offset, uint8_t *dst, size_t n,
                           mx_err *err) {
    while (n) {
        ssize_t r = pread(file->fd, dst, n, (off_t)offset);
        if (r < 0 && errno == EINTR) continue;
        if (r < 0) return mx_err_set(err, MX_IO, "%s: %s", file->path, strerror(errno));
        if (r == 0) {
            return mx_err_set(err, MX_IO, "%s: ends at byte %zu, became shorter", file->path,
                              offset);
        }
        dst += r;
        offset += (size_t)r;
        n -= (size_t)r;
    }
    return MX_OK;
}

static mx_status read_range(const mx_feed_job *j, size_t at, uint8_t *dst, size_t n, mx_err *err) {
    if (j->file) return read_file(j->file, j->offset + at, dst, n, err);
    const uint8_t *src = (const uint8_t *)j->data + at;
    for (size_t i = 0; i < n; i += COPY_BYTES) {
        memcpy(dst + i, src + i, MX_MIN((size_t)COPY_BYTES, n - i));
    }
    return MX_OK;
}

static mx_status fill_slot(const mx_feed_job *j, size_t at, uint8_t *dst, size_t n, mx_err *err) {
    if (!j->pairs) return read_range(j, at, dst, n, err);
    size_t pairs = (size_t)j->pairs, half = pairs / 2;
    for (size_t i = 0; i < n / j->row_bytes; i++) {
        size_t row = at / j->row_bytes + i, in = row % pairs;
        size_t from = row - in + (in < half ? 2 * in : 2 * (in - half) + 1);
        MX_TRY(read_range(j, from * j->row_bytes, dst + i * j->row_bytes, j->row_bytes, err));
    }
    return MX_OK;
}

// ---- Readers -----------------------------------------------------------------------------------

// Takes the next piece and the oldest slot. Called with the lock held and work there.
static piece claim(mx_feed *f) {
    job *j = &f->jobs[f->n_claimed % FEED_JOBS];
    size_t most = f->shape.slot_bytes;
    if (j->j.pairs) most = most / j->j.row_bytes * j->j.row_bytes;
    piece p = {.job = f->n_claimed, .at = j->claimed, .slot = f->order[f->front]};
    p.n = MX_MIN(most, j->j.n_bytes - j->claimed);
    j->claimed += p.n;
    if (j->claimed == j->j.n_bytes) f->n_claimed++;
    CHECK(f->n_order > 0);
    f->front = (f->front + 1) % f->shape.n_slots;
    f->n_order--;
    return p;
}

// The piece's transfer was started, or given up. Called with the lock held.
static void settle(mx_feed *f, const piece *p) {
    f->order[(f->front + f->n_order++) % f->shape.n_slots] = p->slot;
    f->jobs[p->job % FEED_JOBS].left -= p->n;
    bool moved = false;
    while (f->sent < f->n_put && f->jobs[f->sent % FEED_JOBS].left == 0) {
        job *j = &f->jobs[f->sent++ % FEED_JOBS];
        if (j->j.owned) mx_free((void *)(uintptr_t)j->j.data);
        moved = true;
    }
    if (moved) pthread_cond_broadcast(&f->done);
}

static mx_status carry(mx_feed *f, const piece *p, mx_feed_stats *took, mx_err *err) {
    const mx_feed_job *j = &f->jobs[p->job % FEED_JOBS].j; // stays until the piece is settled
    uint8_t *host = f->host + (size_t)p->slot * f->shape.slot_bytes;
    double t0 = mx_now_s();
    MX_TRY(f->dev.wait(f->dev.ctx, p->slot, err));
    double t1 = mx_now_s();
    MX_TRY(fill_slot(j, p->at, host, p->n, err));
    took->wait_s = t1 - t0;
    took->read_s = mx_now_s() - t1;
    return f->dev.send(f->dev.ctx, p->slot, j->dst + p->at, host, p->n, err);
}

static void note_error(mx_feed *f, const mx_err *e) {
    if (f->failed) return;
    f->failed = true;
    f->err = *e;
}

static void *read_pieces(void *arg) {
    mx_feed *f = arg;
    mx_err err = {0};
    mx_status st = f->dev.enter(f->dev.ctx, &err);
    pthread_mutex_lock(&f->lock);
    if (st != MX_OK) note_error(f, &err);
    for (;;) {
        while (!f->stop && f->n_claimed == f->n_put) pthread_cond_wait(&f->work, &f->lock);
        if (f->stop) break;
        piece p = claim(f);
        bool give_up = f->failed;
        pthread_mutex_unlock(&f->lock);
        mx_feed_stats took = {0};
        err = (mx_err){0};
        st = give_up ? MX_OK : carry(f, &p, &took, &err);
        pthread_mutex_lock(&f->lock);
        if (st != MX_OK) note_error(f, &err);
        f->stats.n_bytes += p.n;
        f->stats.n_pieces++;
        f->stats.read_s += took.read_s;
        f->stats.wait_s += took.wait_s;
        settle(f, &p);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

// ---- The caller's side -------------------------------------------------------------------------

mx_status mx_feed_open(mx_feed **out, const mx_feed_shape *shape, void *host,
                       const mx_feed_device *dev, mx_err *err) {
    CHECK(shape->n_readers > 0 && shape->n_slots > shape->n_readers && shape->slot_bytes > 0);
    mx_feed *f = mx_calloc(1, sizeof *f);
    f->shape = *shape;
    f->dev = *dev;
    f->host = host;
    f->order = mx_calloc((size_t)shape->n_slots, sizeof *f->order);
    for (int i = 0; i < shape->n_slots; i++) f->order[f->n_order++] = i;
    f->readers = mx_calloc((size_t)shape->n_readers, sizeof *f->readers);
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->work, NULL);
    pthread_cond_init(&f->done, NULL);
    while (f->n_readers < shape->n_readers &&
           mx_thread_start(&f->readers[f->n_readers], read_pieces, f) == 0) {
        f->n_readers++;
    }
    *out = f;
    if (f->n_readers) return MX_OK;
    mx_feed_close(f);
    *out = NULL;
    return mx_err_set(err, MX_INTERNAL, "no thread for loading could be started");
}

void mx_feed_close(mx_feed *f) {
    if (!f) return;
    pthread_mutex_lock(&f->lock);
    f->stop = true;
    pthread_cond_broadcast(&f->work);
    pthread_mutex_unlock(&f->lock);
    for (int i = 0; i < f->n_readers; i++) pthread_join(f->readers[i], NULL);
    for (; f->sent < f->n_put; f->sent++) {
        mx_feed_job *j = &f->jobs[f->sent % FEED_JOBS].j;
        if (j->owned) mx_free((void *)(uintptr_t)j->data);
    }
    pthread_mutex_destroy(&f->lock);
    pthread_cond_destroy(&f->work);
    pthread_cond_destroy(&f->done);
    mx_free(f->order);
    mx_free(f->readers);
    mx_free(f);
}

uint64_t mx_feed_put(mx_feed *f, const mx_feed_job *j) {
    CHECK(j->n_bytes > 0);
    if (j->pairs) {
        CHECK(j->pairs % 2 == 0 && j->row_bytes > 0 && j->row_bytes <= f->shape.slot_bytes);
        CHECK(j->n_bytes % ((size_t)j->pairs * j->row_bytes) == 0);
    }
    pthread_mutex_lock(&f->lock);
    while (f->n_put - f->sent == FEED_JOBS) pthread_cond_wait(&f->done, &f->lock);
    f->jobs[f->n_put % FEED_JOBS] = (job){.j = *j, .left = j->n_bytes};
    uint64_t ticket = ++f->n_put;
    if (j->n_bytes > f->shape.slot_bytes)
        pthread_cond_broadcast(&f->work);
    else
        pthread_cond_signal(&f->work);
    pthread_mutex_unlock(&f->lock);
    return ticket;
}

mx_status mx_feed_sent(mx_feed *f, uint64_t ticket, mx_err *err) {
    pthread_mutex_lock(&f->lock);
    CHECK(ticket <= f->n_put);
    while (f->sent < ticket) pthread_cond_wait(&f->done, &f->lock);
    mx_status st = MX_OK;
    if (f->failed) st = mx_err_set(err, f->err.status, "%s", f->err.msg);
    f->failed = false;
    pthread_mutex_unlock(&f->lock);
    return st;
}

void mx_feed_get_stats(mx_feed *f, mx_feed_stats *out) {
    pthread_mutex_lock(&f->lock);
    *out = f->stats;
    pthread_mutex_unlock(&f->lock);
}
