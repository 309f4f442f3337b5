// Speed of the CPU matrix products alone: every matrix of a small model once a step, on n threads,
// beside a plain read of as many bytes in the same run. Not part of the checks; for example
//   cc -O2 -D_GNU_SOURCE -Isrc tests/ops/bench_matmul.c build/release/libmlxcel.a -lm -pthread
//   ./a.out avx512 smollm2 1 2       instruction set, model, rows, threads [, format of all]
#include "backend/cpu/cpu_int.h"
#include "base/mem.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_MATS = 512, MAX_THREADS = 8, REPS = 9 };

typedef struct matrix {
    mx_tensor t;
    uint8_t *data;
    bool glu; // the next one is its partner
} matrix;

static const cpu_kernels *k;
static matrix mats[MAX_MATS];
static int n_mats, n_threads = 2;
static int64_t n_tok = 1;
static uint8_t *weights;
static size_t total, capacity;
static float *x, *y;
static uint8_t *act[CPU_ACT_KINDS];
static const char *only;

static double now(void) {
    struct timespec t;
    // one thread: its own time, so that neighbours disturb less
    clock_gettime(n_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static atomic_int arrived, turn;
static void barrier(void) {
    int g = atomic_load(&turn);
    if (atomic_fetch_add(&arrived, 1) == n_threads - 1) {
        atomic_store(&arrived, 0);
        atomic_fetch_add(&turn, 1);
    } else {
        for (int i = 0; atomic_load_explicit(&turn, memory_order_acquire) == g; i++) {
            if (i > 20000) sched_yield();
        }
    }
}

static mx_wfmt format_of(const char *name) {
    for (int t = 0; t < MX_DTYPE_COUNT; t++) {
        if (!strcmp(name, mx_dtype_get((mx_dtype)t)->name)) return mx_wfmt_of((mx_dtype)t);
    }
    int bits = 4, group = 64; // a4g64: affine with bfloat16 scales
    if (sscanf(name, "a%dg%d", &bits, &group) != 2) fprintf(stderr, "format %s?\n", name);
    return (mx_wfmt){MX_AFFINE, (uint8_t)bits, (uint16_t)group, MX_BF16};
}

static void add(const char *fmt, int64_t rows, int64_t cols, bool glu) {
    matrix *m = &mats[n_mats++];
    mx_wfmt f = format_of(only ? only : fmt);
    *m = (matrix){.t = {.n_rows = rows, .n_cols = cols, .fmt = f}, .glu = glu};
    m->t.layout = MX_LAYOUT_PACKED;
    m->t.n_bytes = k->pack_bytes(f, rows, cols, false, &m->t.pack);
    if (m->t.n_bytes == 0) fprintf(stderr, "%s does not fit %d columns\n", fmt, (int)cols);
    m->data = weights + total;
    total += m->t.n_bytes;
    if (total > capacity) abort();
}

static void build(const char *model) {
    if (!strcmp(model, "smollm2")) {
        for (int l = 0; l < 30; l++) {
            add("q4_1", 960, 576, false);
            add("q4_1", 576, 576, false);
            add("q4_1", 1536, 576, true);
            add("q4_1", 1536, 576, false);
            add("q4_1", 576, 1536, false);
        }
        add("q8_0", 49152, 576, false);
    } else {
        for (int l = 0; l < 18; l++) {
            add("q5_0", 1536, 640, false);
            add("q4_k", 640, 1024, false);
            add("q5_0", 2048, 640, true);
            add("q5_0", 2048, 640, false);
            add(l % 2 ? "q6_k" : "q4_k", 640, 2048, false);
        }
        add("q8_0", 262144, 640, false);
    }
}

static void multiply(int id, int i, const uint8_t *prepared, bool head) {
    const matrix *m = &mats[i];
    int64_t tiles = (m->t.n_rows + k->tile_rows - 1) / k->tile_rows;
    int64_t t0 = tiles * id / n_threads, t1 = tiles * (id + 1) / n_threads;
    cpu_mul_glu g = {.w2 = &mats[i + 1].t, .data2 = mats[i + 1].data, .act = MX_ACT_SILU};
    g.gate = (cpu_mul){.w = &m->t, .data = m->data, .act = prepared, .y = y};
    g.gate.n_tok = head ? (n_tok > 8 ? 1 : n_tok) : n_tok; // a prompt needs its last logits only
    g.gate.ldy = m->t.n_rows;
    if (m->glu)
        k->mul_glu(&g, t0, t1);
    else
        k->mul(&g.gate, t0, t1);
}

static void step(int id) {
    for (int i = 0; i < n_mats; i += mats[i].glu ? 2 : 1) {
        bool head = i == n_mats - 1;
        int64_t rows = head && n_tok > 8 ? 1 : n_tok, n = mats[i].t.n_cols;
        cpu_act_kind kind = k->act_kind(&mats[i].t);
        k->act_prepare(kind, x, 2048, n, rows * id / n_threads, rows * (id + 1) / n_threads, NULL,
                       0, act[kind]);
        barrier();
        multiply(id, i, act[kind], head);
        barrier();
    }
}

typedef uint64_t wide __attribute__((vector_size(64)));
static wide sink[MAX_THREADS];
static void read_all(int id) { // four streams a thread
    size_t n = total / (size_t)n_threads / 4 / sizeof(wide);
    const wide *p = (const wide *)(const void *)weights + (size_t)id * 4 * n;
    wide s = {0}, t = {0};
    for (size_t i = 0; i < n; i++) {
        s += p[i] ^ p[n + i];
        t += p[2 * n + i] ^ p[3 * n + i];
    }
    sink[id] = s + t;
    __asm__ volatile("" : : "r"(sink) : "memory"); // it is read
}

static double step_s[REPS], read_s[REPS];

static void *worker(void *arg) {
    int id = *(int *)arg;
    cpu_set_t c;
    CPU_ZERO(&c);
    CPU_SET(id, &c);
    pthread_setaffinity_np(pthread_self(), sizeof c, &c);
    int steps = n_tok > 8 ? 1 : 4;
    for (int r = -1; r < REPS; r++) {
        barrier();
        double t0 = now();
        read_all(id);
        barrier();
        double t1 = now();
        for (int i = 0; i < steps; i++) step(id);
        barrier();
        if (id == 0 && r >= 0) {
            read_s[r] = t1 - t0;
            step_s[r] = (now() - t1) / steps;
        }
    }
    return NULL;
}

static int by_value(const void *a, const void *b) {
    double p = *(const double *)a, q = *(const double *)b;
    return (p > q) - (p < q);
}

int main(int argc, char **argv) {
    const char *isa = argc > 1 ? argv[1] : "avx512", *model = argc > 2 ? argv[2] : "smollm2";
    if (argc > 3) n_tok = (int)strtol(argv[3], NULL, 10);
    if (argc > 4) n_threads = (int)strtol(argv[4], NULL, 10);
    if (argc > 5) only = argv[5];
    k = &cpu_kernels_scalar;
    if (!strcmp(isa, "avx2")) k = &cpu_kernels_avx2;
    if (!strcmp(isa, "avxvnni")) k = &cpu_kernels_avxvnni;
    if (!strcmp(isa, "avx512")) k = &cpu_kernels_avx512;
    capacity = (size_t)1 << 30;
    weights = mx_alloc_large(capacity);
    build(model);
    for (size_t i = 0; i < total; i += 2) { // half floats of about 0.05
        weights[i] = (uint8_t)(i * 2654435761u >> 13);
        weights[i + 1] = 0x2a;
    }
    x = mx_calloc((size_t)n_tok * 2048, sizeof *x);
    y = mx_calloc((size_t)(n_tok > 8 ? n_tok * 4096 + 262144 : n_tok * 262144), sizeof *y);
    for (int64_t i = 0; i < n_tok * 2048; i++) x[i] = (float)(i * 37 % 101 - 50) * 0.02f;
    for (int i = 0; i < CPU_ACT_KINDS; i++) {
        act[i] = mx_alloc_large(k->act_bytes((cpu_act_kind)i, 2048, n_tok));
    }
    pthread_t th[MAX_THREADS];
    int ids[MAX_THREADS];
    for (int i = 0; i < n_threads; i++) {
        ids[i] = i;
        pthread_create(&th[i], NULL, worker, &ids[i]);
    }
    for (int i = 0; i < n_threads; i++) pthread_join(th[i], NULL);
    double flops = 0, ratio[REPS];
    for (int i = 0; i < n_mats; i++) {
        double rows = (double)(i == n_mats - 1 && n_tok > 8 ? 1 : n_tok);
        flops += 2.0 * (double)mats[i].t.n_rows * (double)mats[i].t.n_cols * rows;
    }
    for (int i = 0; i < REPS; i++) ratio[i] = read_s[i] / step_s[i];
    qsort(ratio, REPS, sizeof *ratio, by_value);
    qsort(step_s, REPS, sizeof *step_s, by_value);
    qsort(read_s, REPS, sizeof *read_s, by_value);
    double s = step_s[REPS / 2], rd = read_s[REPS / 2], b = (double)total;
    printf("%s %s rows %d threads %d %s: %.1f MB, %.2f ms (best %.2f), %.0f rows/s, %.1f GB/s "
           "(read %.1f), %.2f of read (best %.2f), %.0f GOPS (best %.0f)\n",
           isa, model, (int)n_tok, n_threads, only ? only : "", b / 1e6, s * 1e3, step_s[0] * 1e3,
           (double)n_tok / s, b / s / 1e9, b / rd / 1e9, ratio[REPS / 2], ratio[REPS - 1],
           flops / s / 1e9, flops / step_s[0] / 1e9);
    return 0;
}
