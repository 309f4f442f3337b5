// How fast this machine's threads read memory: the roof of decoding. State: one run's.
//
// Every thread reads its share of one array as four streams at once, so that more than one page and
// more than one row of the memory is open; rounds are kept in step by a barrier, the best one
// counts.
#include "cli/cli.h"

#include "base/mem.h"
#include "base/os.h"

#include <pthread.h>

enum { STREAMS = 4, MAX_THREADS = 1024, MIN_ROUNDS = 3, MAX_ROUNDS = 64 };

typedef uint64_t words __attribute__((vector_size(32)));

typedef struct rate_run {
    words *data;
    size_t n_words, n_threads; // n_words of one stream of one thread
    bool stop;
    pthread_barrier_t start, end;
} rate_run;

typedef struct rate_worker {
    rate_run *run;
    size_t index;
    uint64_t sum; // kept, so that the reads are not dropped
    pthread_t thread;
} rate_worker;

static words *share_of(const rate_worker *w) {
    return w->run->data + w->index * w->run->n_words * STREAMS;
}

static void read_share(rate_worker *w) {
    size_t n = w->run->n_words;
    const words *a = share_of(w), *b = a + n, *c = b + n, *d = c + n;
    words s[STREAMS] = {{0}};
    for (size_t i = 0; i < n; i++) {
        s[0] += a[i];
        s[1] += b[i];
        s[2] += c[i];
        s[3] += d[i];
    }
    words all = s[0] + s[1] + s[2] + s[3];
    w->sum += all[0] + all[1] + all[2] + all[3];
}

static void *work(void *arg) {
    rate_worker *w = arg;
    memset(share_of(w), (int)w->index + 1, w->run->n_words * STREAMS * sizeof(words));
    for (;;) {
        pthread_barrier_wait(&w->run->start);
        if (w->run->stop) return NULL;
        read_share(w);
        pthread_barrier_wait(&w->run->end);
    }
}

// Worker 0 is the caller.
static double time_rounds(rate_run *r, rate_worker *workers) {
    memset(share_of(&workers[0]), 1, r->n_words * STREAMS * sizeof(words));
    double best = 0, begin = mx_now_s();
    for (int i = 0; i < MAX_ROUNDS && (i < MIN_ROUNDS || mx_now_s() - begin < 0.3); i++) {
        pthread_barrier_wait(&r->start);
        double t = mx_now_s();
        read_share(&workers[0]);
        pthread_barrier_wait(&r->end);
        t = mx_now_s() - t;
        if (i > 0 && (best == 0 || t < best)) best = t; // the first one waited for the fill
    }
    r->stop = true;
    pthread_barrier_wait(&r->start);
    return best;
}

double cli_read_rate(uint64_t n_bytes, int n_threads) {
    rate_run r = {.n_threads = (size_t)MX_MAX(1, MX_MIN(n_threads, MAX_THREADS))};
    r.n_words = (size_t)n_bytes / sizeof(words) / STREAMS / r.n_threads;
    size_t bytes = r.n_words * STREAMS * r.n_threads * sizeof(words);
    if (r.n_words == 0 || bytes > mx_mem_available_bytes() / 2) return 0;
    r.data = mx_alloc_large(bytes);
    if (!r.data) return 0;
    rate_worker *workers = mx_calloc(r.n_threads, sizeof *workers);
    pthread_barrier_init(&r.start, NULL, (unsigned)r.n_threads);
    pthread_barrier_init(&r.end, NULL, (unsigned)r.n_threads);
    for (size_t i = 0; i < r.n_threads; i++) {
        workers[i] = (rate_worker){.run = &r, .index = i};
        if (i > 0) CHECK(mx_thread_start(&workers[i].thread, work, &workers[i]) == 0);
    }
    double seconds = time_rounds(&r, workers);
    volatile uint64_t sink = 0;
    for (size_t i = 0; i < r.n_threads; i++) {
        if (i > 0) pthread_join(workers[i].thread, NULL);
        sink += workers[i].sum;
    }
    (void)sink;
    pthread_barrier_destroy(&r.start);
    pthread_barrier_destroy(&r.end);
    mx_free(workers);
    mx_free_large(r.data, bytes);
    return seconds > 0 ? (double)bytes / seconds * 1e-9 : 0;
}
