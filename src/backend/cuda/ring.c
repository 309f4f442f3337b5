// The pinned memory of uploads, and the device's side of the feed (backend/feed.h) that fills it.
//
// The ring fits a processor's last-level cache, where the device then finds what was just read, and
// has more slots than readers: on an H200 machine 128 MiB in slots of 4 MiB with 12 readers gave 52
// of 55 GB/s, four slots of 64 MiB 16. Its memory is the program's own, registered with the driver:
// asking the driver for pinned memory takes some ten times as long, which a load of a few gigabytes
// notices. Small models have a smaller ring: to clear and register 128 MiB takes longer than to
// load them. MLXCEL_CUDA_PINNED_LOAD=0 takes the driver's pageable path (upload.c) instead.
#include "backend/cuda/cuda_int.h"

#include "base/os.h"

#include <sched.h>
#include <stdio.h>

enum { MAX_READERS = 12, SLOTS = 32, SLOT_MB = 4, MIN_SLOT = 256 << 10 };

struct cuda_ring {
    cuda_backend *b;
    mx_feed *feed;
    uint8_t *host;
    size_t n_bytes;
    int n_slots;
    bool registered;
    CUevent *sent; // (n_slots) the slot's last transfer
    bool *used;    // (n_slots) it had one
};

mx_feed_shape cuda_ring_shape(void) {
    return (mx_feed_shape){.n_readers =
                               MX_MIN((int)MAX_READERS, MX_MAX(1, mx_cpu_affinity_count() - 1)),
                           .n_slots = SLOTS,
                           .slot_bytes = (size_t)SLOT_MB << 20};
}

mx_feed_shape cuda_ring_fit(const mx_feed_shape *most, uint64_t n_bytes, size_t row_bytes) {
    size_t unit = MIN_SLOT, share = (size_t)(n_bytes / 4 / (uint64_t)most->n_slots);
    size_t slot = MX_MAX(MX_MAX(share, row_bytes) / unit * unit, unit);
    if (slot < row_bytes) slot += unit;
    mx_feed_shape s = *most;
    s.slot_bytes = MX_MIN(slot, most->slot_bytes);
    return s;
}

// ---- What readers call -------------------------------------------------------------------------

static mx_status enter(void *ctx, mx_err *err) {
    cuda_ring *r = ctx;
    CUDA_TRY(cuda_use(r->b), err);
    return MX_OK;
}

static mx_status send(void *ctx, int slot, uint64_t dst, const void *host, size_t n, mx_err *err) {
    cuda_ring *r = ctx;
    CUDA_TRY(cuda_d.cuMemcpyHtoDAsync(dst, host, n, r->b->copy), err);
    r->used[slot] = true;
    CUDA_TRY(cuda_d.cuEventRecord(r->sent[slot], r->b->copy), err);
    return MX_OK;
}

// Sleeps between two looks: a queue of transfers is before this one, and readers that spin take
// the processor and the driver's lock from those that read.
static mx_status wait_slot(void *ctx, int slot, mx_err *err) {
    cuda_ring *r = ctx;
    if (!r->used[slot]) return MX_OK;
    CUresult res;
    while ((res = cuda_d.cuEventQuery(r->sent[slot])) == CUDA_ERROR_NOT_READY) {
        if (r->b->ring_poll_s > 0)
            mx_sleep_s(r->b->ring_poll_s);
        else
            sched_yield();
    }
    return cuda_check(res, err, "upload");
}

// ---- Opening and closing -----------------------------------------------------------------------

typedef struct span {
    uint8_t *p;
    size_t n_bytes;
} span;

static void *touch_pages(void *arg) {
    span *s = arg;
    for (size_t i = 0; i < s->n_bytes; i += 4096) ((volatile uint8_t *)s->p)[i] = 0;
    return NULL;
}

// New memory is cleared page by page when it is first written: by several threads, since the first
// bytes of a model wait for it.
static void populate(uint8_t *p, size_t n_bytes, int n_threads) {
    pthread_t thread[MAX_READERS];
    span part[MAX_READERS];
    int n = MX_MIN(n_threads, (int)MAX_READERS), started = 0;
    size_t each = (n_bytes / (size_t)n + 4095) / 4096 * 4096;
    for (int i = 0; i < n; i++) {
        size_t at = MX_MIN(n_bytes, each * (size_t)i);
        part[i] = (span){p + at, MX_MIN(each, n_bytes - at)};
        if (i + 1 < n && mx_thread_start(&thread[started], touch_pages, &part[i]) == 0)
            started++;
        else
            touch_pages(&part[i]);
    }
    for (int i = 0; i < started; i++) pthread_join(thread[i], NULL);
}

static mx_status open_ring(cuda_ring *r, const mx_feed_shape *shape, mx_err *err) {
    r->n_bytes = (size_t)shape->n_slots * shape->slot_bytes;
    r->host = mx_alloc_large(r->n_bytes);
    if (!r->host) return mx_err_set(err, MX_NOMEM, "%zu bytes to load through", r->n_bytes);
    populate(r->host, r->n_bytes, shape->n_readers);
    char what[96];
    snprintf(what, sizeof what, "pinning %zu bytes of host memory to load through", r->n_bytes);
    CUresult res = cuda_d.cuMemHostRegister(r->host, r->n_bytes, CU_MEMHOSTREGISTER_PORTABLE);
    MX_TRY(cuda_check(res, err, what));
    r->registered = true;
    r->n_slots = shape->n_slots;
    r->used = mx_calloc((size_t)r->n_slots, sizeof *r->used);
    r->sent = mx_calloc((size_t)r->n_slots, sizeof *r->sent);
    for (int i = 0; i < r->n_slots; i++) {
        CUDA_TRY(cuda_d.cuEventCreate(&r->sent[i], CU_EVENT_DISABLE_TIMING), err);
    }
    mx_feed_device dev = {.ctx = r, .enter = enter, .send = send, .wait = wait_slot};
    return mx_feed_open(&r->feed, shape, r->host, &dev, err);
}

mx_status cuda_ring_open(cuda_backend *b, const mx_feed_shape *shape, mx_err *err) {
    CHECK(!b->ring);
    b->ring = mx_calloc(1, sizeof *b->ring);
    b->ring->b = b;
    double t0 = mx_now_s();
    mx_status st = open_ring(b->ring, shape, err);
    b->count.ring_open_s += mx_now_s() - t0;
    if (st != MX_OK) cuda_ring_close(b);
    return st;
}

static void add_stats(cuda_ring *r, mx_cuda_counters *c) {
    mx_feed_stats s;
    mx_feed_get_stats(r->feed, &s);
    c->upload_bytes += s.n_bytes;
    c->upload_read_s += s.read_s;
    c->upload_wait_s += s.wait_s;
}

void cuda_ring_count(const cuda_backend *b, mx_cuda_counters *c) {
    if (b->ring && b->ring->feed) add_stats(b->ring, c);
}

size_t cuda_ring_slot_bytes(const cuda_backend *b) {
    return b->ring ? b->ring->n_bytes / (size_t)b->ring->n_slots : 0;
}

void cuda_ring_close(cuda_backend *b) {
    cuda_ring *r = b->ring;
    if (!r) return;
    cuda_ring_count(b, &b->count);
    mx_feed_close(r->feed);
    mx_err e = {0};
    mx_status st = cuda_check(cuda_d.cuStreamSynchronize(b->copy), &e, "end of the upload ring");
    if (st != MX_OK && b->upload_err.status == MX_OK) b->upload_err = e; // cuda_upload_end says it
    for (int i = 0; r->sent && i < r->n_slots; i++) {
        if (r->sent[i]) cuda_d.cuEventDestroy(r->sent[i]);
    }
    if (r->registered) cuda_d.cuMemHostUnregister(r->host);
    mx_free_large(r->host, r->n_bytes);
    mx_free(r->sent);
    mx_free(r->used);
    mx_free(r);
    b->ring = NULL;
}

uint64_t cuda_ring_put(cuda_backend *b, const mx_feed_job *job) {
    return mx_feed_put(b->ring->feed, job);
}

mx_status cuda_ring_sent(cuda_backend *b, uint64_t ticket, mx_err *err) {
    return mx_feed_sent(b->ring->feed, ticket, err);
}
