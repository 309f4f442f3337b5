// Bytes of files and of memory to a device through pinned slots, by several reader threads.
//
// A job is a range of bytes and its place on the device. Readers take pieces of it in order, fill a
// slot each and start the slot's transfer themselves. Pieces are started in any order.
#ifndef MX_BACKEND_FEED_H
#define MX_BACKEND_FEED_H

#include "base/os.h"

typedef struct mx_feed mx_feed;

// The device's side. Called by reader threads, several at once, with different slots.
typedef struct mx_feed_device {
    void *ctx;
    mx_status (*enter)(void *ctx, mx_err *err); // once in every reader, first
    // Starts the transfer of n bytes from host, which is in the slot, to dst.
    mx_status (*send)(void *ctx, int slot, uint64_t dst, const void *host, size_t n, mx_err *err);
    // Returns when the slot's last transfer has ended (at once when there was none).
    mx_status (*wait)(void *ctx, int slot, mx_err *err);
} mx_feed_device;

typedef struct mx_feed_shape {
    int n_readers, n_slots; // n_slots > n_readers
    size_t slot_bytes;
} mx_feed_shape;

typedef struct mx_feed_job {
    uint64_t dst;
    size_t n_bytes;
    const mx_file *file; // bytes from offset on, read through its descriptor; NULL: data
    size_t offset;
    const void *data;
    bool owned; // data is mx_free'd once it was read
    // pairs > 0: rows of row_bytes; in every `pairs` of them the source has i and i + pairs/2 side
    // by side, as rows 2i and 2i + 1. n_bytes is a multiple of pairs * row_bytes; a row fits a
    // slot.
    int32_t pairs;
    size_t row_bytes;
} mx_feed_job;

typedef struct mx_feed_stats { // seconds are sums over the readers
    uint64_t n_bytes, n_pieces;
    double read_s, wait_s; // filling slots; waiting for a slot's transfer
} mx_feed_stats;

// host: n_slots * slot_bytes, borrowed. INTERNAL: no thread could be started.
mx_status mx_feed_open(mx_feed **out, const mx_feed_shape *shape, void *host,
                       const mx_feed_device *dev, mx_err *err);
// Gives up jobs that are not started. Their transfers may still run when it returns.
void mx_feed_close(mx_feed *f);
// Queues a job; waits while the queue is full. Returns its ticket; tickets count up from 1.
uint64_t mx_feed_put(mx_feed *f, const mx_feed_job *job);
// Returns when the sources of this job and of all before it are no longer read and their transfers
// were started; with the first error since the last call of this, of any job (IO: a file became
// shorter, or the device's). After an error pieces are dropped until this was called.
mx_status mx_feed_sent(mx_feed *f, uint64_t ticket, mx_err *err);
void mx_feed_get_stats(mx_feed *f, mx_feed_stats *out);

#endif
