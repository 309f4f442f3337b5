// The feed of uploads, against a device that is memory and runs transfers late and in order.
#include "backend/feed.h"

#include "base/mem.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// cmocka.h needs the four above
#include <cmocka.h>

enum { MAX_SLOTS = 32, LAG = 3, DEVICE_BYTES = 4 << 20 };

// A transfer copies only when LAG later ones were started, or when somebody waits for it: a slot
// that is filled too early is seen in the bytes.
typedef struct transfer {
    uint8_t *dst;
    const uint8_t *host;
    size_t n;
    int slot;
} transfer;

typedef struct device {
    pthread_mutex_t lock;
    uint8_t *bytes; // (DEVICE_BYTES)
    transfer queue[4096];
    size_t n_queued, n_run;
    size_t last[MAX_SLOTS]; // transfer + 1
    int n_sent, fail_at;    // the send that fails, from 1; 0: none
    int n_entered;
} device;

static void run_until(device *d, size_t n) {
    for (; d->n_run < n; d->n_run++) {
        transfer *t = &d->queue[d->n_run];
        memcpy(t->dst, t->host, t->n);
    }
}

static mx_status enter(void *ctx, mx_err *err) {
    (void)err;
    device *d = ctx;
    pthread_mutex_lock(&d->lock);
    d->n_entered++;
    pthread_mutex_unlock(&d->lock);
    return MX_OK;
}

static mx_status send(void *ctx, int slot, uint64_t dst, const void *host, size_t n, mx_err *err) {
    device *d = ctx;
    mx_status st = MX_OK;
    pthread_mutex_lock(&d->lock);
    if (++d->n_sent == d->fail_at) {
        st = mx_err_set(err, MX_DEVICE, "transfer %d failed", d->fail_at);
    } else {
        assert_true(dst + n <= DEVICE_BYTES && d->n_queued < MX_COUNT(d->queue));
        d->queue[d->n_queued++] = (transfer){d->bytes + dst, host, n, slot};
        d->last[slot] = d->n_queued;
        if (d->n_queued > LAG) run_until(d, d->n_queued - LAG);
    }
    pthread_mutex_unlock(&d->lock);
    return st;
}

static mx_status wait_slot(void *ctx, int slot, mx_err *err) {
    (void)err;
    device *d = ctx;
    pthread_mutex_lock(&d->lock);
    run_until(d, d->last[slot]);
    pthread_mutex_unlock(&d->lock);
    return MX_OK;
}

typedef struct rig {
    device d;
    mx_feed *feed;
    uint8_t *host, *source;
    char path[64];
    mx_file file;
} rig;

enum { SOURCE_BYTES = 3 << 20 };

static rig *rig_open(int readers, int slots, size_t slot_bytes) {
    rig *r = mx_calloc(1, sizeof *r);
    mx_err e = {0};
    pthread_mutex_init(&r->d.lock, NULL);
    r->d.bytes = mx_calloc(1, DEVICE_BYTES);
    r->host = mx_calloc((size_t)slots, slot_bytes);
    r->source = mx_alloc(SOURCE_BYTES);
    uint64_t s = 7;
    for (size_t i = 0; i < SOURCE_BYTES; i++) {
        s = s * 6364136223846793005ull + 1442695040888963407ull;
        r->source[i] = (uint8_t)(s >> 56);
    }
    snprintf(r->path, sizeof r->path, "feed-test-%ld", (long)getpid());
    FILE *f = fopen(r->path, "wb");
    assert_true(f && fwrite(r->source, 1, SOURCE_BYTES, f) == SOURCE_BYTES && fclose(f) == 0);
    assert_int_equal(mx_file_open(&r->file, r->path, &e), MX_OK);
    mx_feed_shape shape = {readers, slots, slot_bytes};
    mx_feed_device dev = {&r->d, enter, send, wait_slot};
    assert_int_equal(mx_feed_open(&r->feed, &shape, r->host, &dev, &e), MX_OK);
    return r;
}

static void rig_close(rig *r) {
    mx_feed_close(r->feed);
    mx_file_close(&r->file);
    unlink(r->path);
    pthread_mutex_destroy(&r->d.lock);
    mx_free(r->d.bytes);
    mx_free(r->host);
    mx_free(r->source);
    mx_free(r);
}

static void sent(rig *r, uint64_t ticket) {
    mx_err e = {0};
    assert_int_equal(mx_feed_sent(r->feed, ticket, &e), MX_OK);
}

// Every mix of sizes, from a file and from memory, with one reader and with many.
static void bytes_arrive(void **state) {
    (void)state;
    static const struct {
        int readers, slots;
        size_t slot;
    } shapes[] = {{1, 2, 4096}, {3, 4, 1000}, {8, 9, 65536}, {12, 32, 8192}};
    for (size_t k = 0; k < MX_COUNT(shapes); k++) {
        rig *r = rig_open(shapes[k].readers, shapes[k].slots, shapes[k].slot);
        uint64_t ticket = 0, seed = k + 1;
        size_t at = 0, bytes = 0;
        for (int i = 0; at < SOURCE_BYTES; i++) {
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            size_t n = (size_t)(seed >> 33) % (i % 5 ? 9000 : 300000) + 1;
            n = MX_MIN(n, SOURCE_BYTES - at);
            mx_feed_job j = {.dst = at + 64, .n_bytes = n};
            if (i % 3) {
                j.file = &r->file;
                j.offset = at;
            } else if (i % 2) {
                j.data = r->source + at;
            } else {
                uint8_t *copy = mx_alloc(n);
                memcpy(copy, r->source + at, n);
                j.data = copy;
                j.owned = true;
            }
            uint64_t t = mx_feed_put(r->feed, &j);
            assert_int_equal(t, ticket + 1);
            ticket = t;
            at += n;
            bytes += n;
        }
        sent(r, ticket);
        mx_feed_stats s;
        mx_feed_get_stats(r->feed, &s);
        assert_int_equal(s.n_bytes, bytes);
        pthread_mutex_lock(&r->d.lock);
        run_until(&r->d, r->d.n_queued);
        pthread_mutex_unlock(&r->d.lock);
        assert_memory_equal(r->d.bytes + 64, r->source, SOURCE_BYTES);
        rig_close(r);
    }
}

// A source may be overwritten once its ticket was waited for; the feed goes on after that.
static void a_source_is_free_after_its_ticket(void **state) {
    (void)state;
    rig *r = rig_open(4, 6, 4096);
    uint8_t *mine = mx_alloc(40000);
    for (int i = 0; i < 20; i++) {
        memset(mine, i + 1, 40000);
        mx_feed_job j = {.dst = (uint64_t)i * 40000, .n_bytes = 40000, .data = mine};
        sent(r, mx_feed_put(r->feed, &j));
    }
    pthread_mutex_lock(&r->d.lock);
    run_until(&r->d, r->d.n_queued);
    pthread_mutex_unlock(&r->d.lock);
    for (int i = 0; i < 20 * 40000; i++) assert_int_equal(r->d.bytes[i], i / 40000 + 1);
    mx_free(mine);
    rig_close(r);
}

static void rows_in_pairs_become_halves(void **state) {
    (void)state;
    enum { HEAD = 6, HEADS = 50, ROW = 37 };
    for (int from_file = 0; from_file < 2; from_file++) {
        rig *r = rig_open(3, 5, 1024);
        mx_feed_job j = {.dst = 5,
                         .n_bytes = HEAD * HEADS * ROW,
                         .data = from_file ? NULL : r->source + 11,
                         .file = from_file ? &r->file : NULL,
                         .offset = 11,
                         .pairs = HEAD,
                         .row_bytes = ROW};
        sent(r, mx_feed_put(r->feed, &j));
        run_until(&r->d, r->d.n_queued);
        for (int row = 0; row < HEAD * HEADS; row++) {
            int i = row % HEAD, from = row - i + (i < HEAD / 2 ? 2 * i : 2 * (i - HEAD / 2) + 1);
            assert_memory_equal(r->d.bytes + 5 + row * ROW, r->source + 11 + from * ROW, ROW);
        }
        rig_close(r);
    }
}

static void a_file_that_became_shorter_is_an_error(void **state) {
    (void)state;
    rig *r = rig_open(4, 6, 4096);
    mx_err e = {0};
    assert_int_equal(truncate(r->path, SOURCE_BYTES / 2), 0);
    mx_feed_job j = {.dst = 0, .n_bytes = SOURCE_BYTES, .file = &r->file};
    uint64_t t = mx_feed_put(r->feed, &j);
    assert_int_equal(mx_feed_sent(r->feed, t, &e), MX_IO);
    assert_non_null(strstr(e.msg, r->path));
    assert_non_null(strstr(e.msg, "became shorter"));
    // the error was told once; what still exists can be read
    j.n_bytes = SOURCE_BYTES / 2;
    sent(r, mx_feed_put(r->feed, &j));
    run_until(&r->d, r->d.n_queued);
    assert_memory_equal(r->d.bytes, r->source, SOURCE_BYTES / 2);
    rig_close(r);
}

// The k-th transfer fails, for each k: the ticket says so, nothing hangs, the feed can be used on.
static void a_failed_transfer_is_an_error(void **state) {
    (void)state;
    for (int k = 1; k <= 25; k++) {
        rig *r = rig_open(3, 5, 4096);
        mx_err e = {0};
        r->d.fail_at = k;
        uint64_t t = 0;
        for (int i = 0; i < 5; i++) {
            mx_feed_job j = {.dst = (uint64_t)i * 20480,
                             .n_bytes = 20480,
                             .file = &r->file,
                             .offset = (size_t)i * 20480};
            t = mx_feed_put(r->feed, &j);
        }
        assert_int_equal(mx_feed_sent(r->feed, t, &e), MX_DEVICE);
        char want[64];
        snprintf(want, sizeof want, "transfer %d failed", k);
        assert_string_equal(e.msg, want);
        r->d.fail_at = 0;
        mx_feed_job j = {.dst = 0, .n_bytes = 100000, .file = &r->file, .offset = 5};
        sent(r, mx_feed_put(r->feed, &j));
        run_until(&r->d, r->d.n_queued);
        assert_memory_equal(r->d.bytes, r->source + 5, 100000);
        rig_close(r);
    }
}

static void closing_drops_what_waits(void **state) {
    (void)state;
    for (int i = 0; i < 20; i++) {
        rig *r = rig_open(2, 3, 512);
        for (int k = 0; k < 40; k++) {
            uint8_t *copy = mx_calloc(1, 9000);
            mx_feed_job j = {.dst = 0, .n_bytes = 9000, .data = copy, .owned = true};
            mx_feed_put(r->feed, &j);
        }
        rig_close(r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_arrive),
        cmocka_unit_test(a_source_is_free_after_its_ticket),
        cmocka_unit_test(rows_in_pairs_become_halves),
        cmocka_unit_test(a_file_that_became_shorter_is_an_error),
        cmocka_unit_test(a_failed_transfer_is_an_error),
        cmocka_unit_test(closing_drops_what_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
