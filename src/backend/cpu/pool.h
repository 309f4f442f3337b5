// Worker threads that walk one job together.
#ifndef MX_BACKEND_CPU_POOL_H
#define MX_BACKEND_CPU_POOL_H

#include "base/err.h"

typedef struct cpu_pool cpu_pool;
// Called on every active worker with its number in 0 .. n - 1.
typedef void (*cpu_job)(void *arg, int worker, int n);

enum { CPU_MAX_THREADS = 1024 };

// Starts n_threads - 1 threads; the caller of cpu_pool_run is worker 0. Idle workers sleep.
mx_status cpu_pool_open(cpu_pool **out, int n_threads, mx_err *err);
void cpu_pool_close(cpu_pool *p);
int cpu_pool_threads(const cpu_pool *p);
// Runs job on workers 0 .. n_active - 1 and returns when all are done. One caller at a time.
void cpu_pool_run(cpu_pool *p, int n_active, cpu_job job, void *arg);
// Inside a job: waits for every active worker.
void cpu_pool_barrier(cpu_pool *p, int worker);
// The most seconds that one worker of the last run waited for others beyond the spin phase.
double cpu_pool_lost_s(const cpu_pool *p);

// ---- When to do without a thread that a busy neighbour stalls (pure) --------------------------
typedef struct cpu_shed {
    int n_threads, n_active;
    int strikes; // late steps, counted down by good ones
    int hold;    // steps left with fewer threads
    int backoff; // length of the next hold
    int good;    // good steps since the last strike
} cpu_shed;

void cpu_shed_init(cpu_shed *s, int n_threads);
// Takes a finished step's time and the time lost in it; s->n_active is for the next step.
void cpu_shed_update(cpu_shed *s, double step_s, double lost_s);

#endif
