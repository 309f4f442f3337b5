// The worker pool: threads, the barrier, and the rule that sheds a stalled thread. The pool owns
// its threads and nothing of the work.
//
// A barrier is two cache lines: arrivals are counted on one, the phase on the other releases the
// waiters. Waiters spin shortly (a partner that runs is back within microseconds), then give their
// processor away in turns (the partner may need it), then sleep in the kernel. Between jobs workers
// do the same on a word of their own, so that an idle engine burns nothing and a shed worker is
// never woken.
#include "backend/cpu/pool.h"

#include "base/mem.h"
#include "base/os.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPIN = 2000, YIELD = 64, LINE = 64 };

typedef struct gate { // a word to wait on
    _Alignas(LINE) _Atomic uint32_t word;
    _Atomic uint32_t sleepers;
} gate;

typedef struct worker {
    _Alignas(LINE) gate start;
    double lost_s;
    cpu_pool *pool;
    int index;
    pthread_t thread;
} worker;

struct cpu_pool {
    int n_threads, n_active;
    cpu_job job;
    void *arg;
    _Atomic bool quit;
    _Alignas(LINE) _Atomic uint32_t arrived;
    gate phase, done;
    worker workers[];
};

static void futex(_Atomic uint32_t *word, int op, uint32_t value) {
    syscall(SYS_futex, (void *)word, op, value, NULL, NULL, 0);
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void gate_open(gate *g, uint32_t value) {
    atomic_store(&g->word, value);
    if (atomic_load(&g->sleepers)) futex(&g->word, FUTEX_WAKE_PRIVATE, INT32_MAX);
}

// Waits while the word is `value`. Returns the seconds spent after spinning.
static double gate_wait(gate *g, uint32_t value) {
    for (int i = 0; i < SPIN; i++) {
        if (atomic_load_explicit(&g->word, memory_order_acquire) != value) return 0;
        relax();
    }
    double t0 = mx_now_s();
    for (int i = 0; i < YIELD; i++) {
        if (atomic_load_explicit(&g->word, memory_order_acquire) != value) {
            return mx_now_s() - t0;
        }
        sched_yield();
    }
    atomic_fetch_add(&g->sleepers, 1);
    while (atomic_load(&g->word) == value) futex(&g->word, FUTEX_WAIT_PRIVATE, value);
    atomic_fetch_sub(&g->sleepers, 1);
    return mx_now_s() - t0;
}

static void *worker_main(void *arg) {
    worker *w = arg;
    cpu_pool *p = w->pool;
    uint32_t seen = 0;
    for (;;) {
        gate_wait(&w->start, seen);
        seen++;
        if (atomic_load(&p->quit)) return NULL;
        int n = p->n_active; // the fields of a run may change once this worker is done
        p->job(p->arg, w->index, n);
        uint32_t before = atomic_fetch_add(&p->done.word, 1);
        if (before + 2 == (uint32_t)n && atomic_load(&p->done.sleepers)) {
            futex(&p->done.word, FUTEX_WAKE_PRIVATE, INT32_MAX);
        }
    }
}

static void stop_threads(cpu_pool *p, int n_started) {
    atomic_store(&p->quit, true);
    for (int i = 1; i < n_started; i++) {
        gate *g = &p->workers[i].start;
        gate_open(g, atomic_load(&g->word) + 1);
        pthread_join(p->workers[i].thread, NULL);
    }
}

static size_t pool_bytes(int n_threads) {
    return sizeof(cpu_pool) + (size_t)n_threads * sizeof(worker);
}

mx_status cpu_pool_open(cpu_pool **out, int n_threads, mx_err *err) {
    *out = NULL;
    if (n_threads < 1 || n_threads > CPU_MAX_THREADS) {
        return mx_err_set(err, MX_INVALID, "%d threads: from 1 to %d are possible", n_threads,
                          CPU_MAX_THREADS);
    }
    cpu_pool *p = mx_alloc_large(pool_bytes(n_threads)); // zeroed, aligned
    if (!p) return mx_err_set(err, MX_NOMEM, "thread pool: %zu bytes", pool_bytes(n_threads));
    p->n_threads = n_threads;
    for (int i = 1; i < n_threads; i++) {
        worker *w = &p->workers[i];
        w->pool = p;
        w->index = i;
        int e = mx_thread_start(&w->thread, worker_main, w);
        if (e) {
            stop_threads(p, i);
            mx_free_large(p, pool_bytes(n_threads));
            return mx_err_set(err, MX_NOMEM, "thread %d of %d: %s", i + 1, n_threads, strerror(e));
        }
    }
    *out = p;
    return MX_OK;
}

void cpu_pool_close(cpu_pool *p) {
    if (!p) return;
    stop_threads(p, p->n_threads);
    mx_free_large(p, pool_bytes(p->n_threads));
}

int cpu_pool_threads(const cpu_pool *p) {
    return p->n_threads;
}

static void wait_done(cpu_pool *p) {
    for (;;) {
        uint32_t n = atomic_load(&p->done.word);
        if (n == (uint32_t)p->n_active - 1) return;
        p->workers[0].lost_s += gate_wait(&p->done, n);
    }
}

void cpu_pool_run(cpu_pool *p, int n_active, cpu_job job, void *arg) {
    CHECK(n_active >= 1 && n_active <= p->n_threads);
    p->n_active = n_active;
    p->job = job;
    p->arg = arg;
    atomic_store(&p->done.word, 0);
    for (int i = 0; i < n_active; i++) p->workers[i].lost_s = 0;
    for (int i = 1; i < n_active; i++) {
        gate *g = &p->workers[i].start;
        gate_open(g, atomic_load_explicit(&g->word, memory_order_relaxed) + 1);
    }
    job(arg, 0, n_active);
    if (n_active > 1) wait_done(p);
}

void cpu_pool_barrier(cpu_pool *p, int w) {
    uint32_t n = (uint32_t)p->n_active;
    if (n == 1) return;
    uint32_t phase = atomic_load_explicit(&p->phase.word, memory_order_acquire);
    if (atomic_fetch_add(&p->arrived, 1) == n - 1) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        gate_open(&p->phase, phase + 1);
    } else {
        p->workers[w].lost_s += gate_wait(&p->phase, phase);
    }
}

double cpu_pool_lost_s(const cpu_pool *p) {
    double most = 0;
    for (int i = 0; i < p->n_active; i++) most = MX_MAX(most, p->workers[i].lost_s);
    return most;
}

// ---- Shedding --------------------------------------------------------------------------------
// A step is late when a worker waited for more than a third of it, and more than 0.3 ms, beyond
// the spin phase. Three late steps close together take one thread away for `backoff` steps; coming
// back is on probation (one late step is enough), and each failure doubles the next hold.

enum { STRIKES = 3, BACKOFF_MIN = 16, BACKOFF_MAX = 1024, GOOD_STEPS = 256 };

void cpu_shed_init(cpu_shed *s, int n_threads) {
    *s = (cpu_shed){.n_threads = n_threads, .n_active = n_threads, .backoff = BACKOFF_MIN};
}

static void note_good(cpu_shed *s) {
    if (++s->good < 8) return;
    if (s->strikes > 0 && s->good % 8 == 0) s->strikes--;
    if (s->good >= GOOD_STEPS) {
        s->backoff = MX_MAX(BACKOFF_MIN, s->backoff / 2);
        s->good = 8;
    }
}

void cpu_shed_update(cpu_shed *s, double step_s, double lost_s) {
    bool late = lost_s > 0.3 * step_s && lost_s > 300e-6;
    if (late && s->n_active > 1) {
        s->good = 0;
        if (++s->strikes >= STRIKES) {
            s->n_active--;
            s->strikes = 0;
            s->hold = s->backoff;
            s->backoff = MX_MIN(BACKOFF_MAX, s->backoff * 2);
            return;
        }
    } else {
        note_good(s);
    }
    if (s->n_active < s->n_threads && --s->hold <= 0) {
        s->n_active = s->n_threads;
        s->strikes = STRIKES - 1;
    }
}
