// cpu: choice of the instruction set, the pool, the shedding rule.
#include "backend/cpu/isa.h"
#include "backend/cpu/pool.h"

#include "base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
// cmocka.h needs the four above
#include <cmocka.h>

static const uint32_t L1 = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29;
static const uint32_t L7_AVX2 = 1u << 3 | 1u << 5 | 1u << 8;
static const uint32_t L7_AVX512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
static const uint32_t VNNI = 1u << 11, AVXVNNI = 1u << 4;

static void isa_needs_processor_and_system(void **state) {
    (void)state;
    const struct {
        cpu_isa_facts f;
        cpu_isa best;
    } rows[] = {
        {{0, 0, 0, 0, 0}, CPU_ISA_SCALAR},
        {{L1, L7_AVX2, 0, 0x7, 0}, CPU_ISA_AVX2},
        {{L1, L7_AVX2, 0, 0x3, 0}, CPU_ISA_SCALAR},               // the system saves no AVX
        {{L1 & ~(1u << 27), L7_AVX2, 0, 0x7, 0}, CPU_ISA_SCALAR}, // no XSAVE
        {{L1 & ~(1u << 12), L7_AVX2, 0, 0x7, 0}, CPU_ISA_SCALAR}, // no FMA
        {{L1 & ~(1u << 29), L7_AVX2, 0, 0x7, 0}, CPU_ISA_SCALAR}, // no F16C
        {{L1, L7_AVX2 & ~(1u << 8), 0, 0x7, 0}, CPU_ISA_SCALAR},  // no BMI2
        {{L1, L7_AVX2 | L7_AVX512, VNNI, 0xe7, 0}, CPU_ISA_AVX512},
        {{L1, L7_AVX2 | L7_AVX512, VNNI, 0x7, 0}, CPU_ISA_AVX2},  // AVX-512 announced, not granted
        {{L1, L7_AVX2 | L7_AVX512, VNNI, 0x67, 0}, CPU_ISA_AVX2}, // upper registers not saved
        {{L1, L7_AVX2 | L7_AVX512, 0, 0xe7, 0}, CPU_ISA_AVX2},    // no VNNI
        {{L1, L7_AVX2 | 1u << 16, VNNI, 0xe7, 0}, CPU_ISA_AVX2},  // foundation only
        {{L1, L7_AVX2 | L7_AVX512, VNNI, 0x600e7, 0}, CPU_ISA_AVX512},
        {{L1, L7_AVX2, 0, 0x7, AVXVNNI}, CPU_ISA_AVXVNNI},
        {{L1, L7_AVX2, 0, 0x3, AVXVNNI}, CPU_ISA_SCALAR},
        {{L1, L7_AVX2 | L7_AVX512, VNNI, 0x7, AVXVNNI}, CPU_ISA_AVXVNNI},
        {{L1, L7_AVX2 | L7_AVX512, VNNI, 0xe7, AVXVNNI}, CPU_ISA_AVX512},
    };
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        assert_int_equal(cpu_isa_best(&rows[i].f), rows[i].best);
    }
}

static void isa_is_forced_downwards_only(void **state) {
    (void)state;
    cpu_isa_facts avx2 = {L1, L7_AVX2, 0, 0x7, 0};
    cpu_isa_facts avx512 = {L1, L7_AVX2 | L7_AVX512, VNNI, 0xe7, 0};
    cpu_isa isa;
    mx_err e = {0};
    assert_int_equal(cpu_isa_choose(&isa, &avx512, "", &e), MX_OK);
    assert_int_equal(isa, CPU_ISA_AVX512);
    assert_int_equal(cpu_isa_choose(&isa, &avx512, "avx2", &e), MX_OK);
    assert_int_equal(isa, CPU_ISA_AVX2);
    assert_int_equal(cpu_isa_choose(&isa, &avx2, "scalar", &e), MX_OK);
    assert_int_equal(isa, CPU_ISA_SCALAR);
    assert_int_equal(cpu_isa_choose(&isa, &avx512, "vnni", &e), MX_OK);
    assert_int_equal(isa, CPU_ISA_AVX512);
    assert_int_equal(cpu_isa_choose(&isa, &avx2, "avx512", &e), MX_INVALID);
    assert_non_null(strstr(e.msg, "avx2"));
    assert_int_equal(cpu_isa_choose(&isa, &avx512, "sse9", &e), MX_INVALID);
    assert_non_null(strstr(e.msg, "scalar, avx2, avxvnni, avx512, vnni and amx"));
    // not every AVX-512 has the 256-bit form
    assert_int_equal(cpu_isa_choose(&isa, &avx512, "avxvnni", &e), MX_INVALID);
    avx512.leaf7_1_eax = AVXVNNI;
    assert_int_equal(cpu_isa_choose(&isa, &avx512, "avxvnni", &e), MX_OK);
    assert_int_equal(isa, CPU_ISA_AVXVNNI);
}

typedef struct tally {
    cpu_pool *pool;
    _Atomic int arrived;
    int total[8]; // per worker, written by its owner only
    int wrong;
} tally;

enum { ROUNDS = 50 };

// In every round each worker sees all arrivals of the round after the barrier.
static void count_rounds(void *arg, int worker, int n) {
    tally *t = arg;
    for (int i = 1; i <= ROUNDS; i++) {
        atomic_fetch_add(&t->arrived, 1);
        cpu_pool_barrier(t->pool, worker);
        if (atomic_load(&t->arrived) != i * n && worker == 0) t->wrong++;
        t->total[worker]++;
        cpu_pool_barrier(t->pool, worker);
    }
}

static void pool_runs_all_workers_between_barriers(void **state) {
    (void)state;
    mx_err e = {0};
    for (int threads = 1; threads <= 4; threads++) {
        tally t = {0};
        assert_int_equal(cpu_pool_open(&t.pool, threads, &e), MX_OK);
        assert_int_equal(cpu_pool_threads(t.pool), threads);
        int want[8] = {0};
        for (int run = 0; run < 12; run++) {
            int active = 1 + run % threads;
            atomic_store(&t.arrived, 0);
            cpu_pool_run(t.pool, active, count_rounds, &t);
            for (int i = 0; i < active; i++) want[i] += ROUNDS;
        }
        for (int i = 0; i < 8; i++) assert_int_equal(t.total[i], want[i]);
        assert_int_equal(t.wrong, 0);
        cpu_pool_close(t.pool);
    }
}

static void pool_refuses_silly_sizes(void **state) {
    (void)state;
    mx_err e = {0};
    cpu_pool *p;
    assert_int_equal(cpu_pool_open(&p, 0, &e), MX_INVALID);
    assert_int_equal(cpu_pool_open(&p, CPU_MAX_THREADS + 1, &e), MX_INVALID);
    assert_null(p);
}

static void late(cpu_shed *s, int n) {
    for (int i = 0; i < n; i++) cpu_shed_update(s, 10e-3, 5e-3);
}

static void good(cpu_shed *s, int n) {
    for (int i = 0; i < n; i++) cpu_shed_update(s, 3e-3, 0);
}

static void shed_after_repeated_late_steps_and_come_back(void **state) {
    (void)state;
    cpu_shed s;
    cpu_shed_init(&s, 2);
    late(&s, 2);
    assert_int_equal(s.n_active, 2); // twice is chance
    late(&s, 1);
    assert_int_equal(s.n_active, 1);
    good(&s, 15);
    assert_int_equal(s.n_active, 1);
    good(&s, 1);
    assert_int_equal(s.n_active, 2); // tries again
    late(&s, 1);
    assert_int_equal(s.n_active, 1); // on probation: once is enough, and for longer
    good(&s, 31);
    assert_int_equal(s.n_active, 1);
    good(&s, 1);
    assert_int_equal(s.n_active, 2);
    good(&s, 100);
    late(&s, 2);
    assert_int_equal(s.n_active, 2); // forgiven
}

static void shed_ignores_short_and_small_delays(void **state) {
    (void)state;
    cpu_shed s;
    cpu_shed_init(&s, 4);
    for (int i = 0; i < 100; i++) cpu_shed_update(&s, 10e-3, 2e-3);    // a fifth
    for (int i = 0; i < 100; i++) cpu_shed_update(&s, 200e-6, 150e-6); // nothing in absolute terms
    assert_int_equal(s.n_active, 4);
    cpu_shed_init(&s, 1);
    late(&s, 100);
    assert_int_equal(s.n_active, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(isa_needs_processor_and_system),
        cmocka_unit_test(isa_is_forced_downwards_only),
        cmocka_unit_test(pool_runs_all_workers_between_barriers),
        cmocka_unit_test(pool_refuses_silly_sizes),
        cmocka_unit_test(shed_after_repeated_late_steps_and_come_back),
        cmocka_unit_test(shed_ignores_short_and_small_delays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
