// The variables that switch a fast product off: the answer is right either way, and other kernels
// give it. Without a GPU the program says why and passes. What attention and whole steps have is in
// test_cuda.c and tests/unit/test_replay.c.
#include "support/cuda_rig.h"
#include "support/op_cases.h"

#include "base/knobs.h"
#include "base/mem.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the four above
#include <cmocka.h>

enum { VOCAB = 512, MAX_NAMES = 1024 };

static const struct {
    const char *name, *value, *kernels; // the variable; what its kernels' names begin with
    int rows;
} switches[] = {{"MLXCEL_DENSE_GEMV_ROWS", "0", "gemv_", 2},
                {"MLXCEL_DENSE_GEMV_ROWS", "3", "gemv_", 4},
                {"MLXCEL_CUDA_SKINNY", "0", "skinny_", 16},
                {"MLXCEL_CUBLASLT", "0", "unpack_", RIG_MAX_TOK}};

static int count_names(const char *const *names, int n, const char *prefix) {
    int found = 0;
    for (int i = 0; i < n; i++) found += strncmp(names[i], prefix, strlen(prefix)) == 0;
    return found;
}

// A product of so many rows on a device opened as the environment says; the number of its kernels
// with the prefix, -1 when it is of cuBLASLt and that is not there.
static int product(int rows, const char *prefix, bool on) {
    static const char *names[MAX_NAMES];
    rig r;
    mx_cuda_counters c;
    assert_true(cuda_rigs_open(&r, 1, false, false, VOCAB));
    mx_cuda_counters_get(r.b, &c);
    int n = mx_cuda_unused_kernels(r.b, names, MAX_NAMES);
    assert_true(n <= MAX_NAMES);
    int before = count_names(names, n, prefix);
    op_case k = {.op = MX_OP_MATMUL, .rows = rows, .n = 96, .k = 512};
    k.f = k.f2 = (mx_wfmt){MX_AFFINE, 4, 64, MX_BF16};
    int64_t n_out = op_case_outputs(&k);
    op_data d = op_case_inputs(&k, 20261201);
    float *out = mx_calloc((size_t)n_out, sizeof *out);
    double *want = mx_calloc((size_t)n_out, sizeof *want);
    op_case_oracle(&k, &d, want);
    op_case_run(&r, &k, &d, out);
    for (int64_t i = 0; i < n_out; i++) {
        assert_true(fabs((double)out[i] - want[i]) <= 0.04 * fmax(1, fabs(want[i])));
    }
    n = mx_cuda_unused_kernels(r.b, names, MAX_NAMES);
    int used = before - count_names(names, n, prefix);
    mx_free(out);
    mx_free(want);
    op_case_free(&d);
    rig_close(&r);
    return on && !c.blaslt && strcmp(prefix, "unpack_") == 0 ? -1 : used;
}

static void another_kernel_takes_over(void **state) {
    (void)state;
    rig r;
    if (!cuda_rigs_open(&r, 1, false, false, VOCAB)) skip();
    rig_close(&r);
    for (size_t i = 0; i < MX_COUNT(switches); i++) {
        int on = product(switches[i].rows, switches[i].kernels, true);
        assert_int_equal(setenv(switches[i].name, switches[i].value, 1), 0);
        mx_knobs_reload();
        int off = product(switches[i].rows, switches[i].kernels, false);
        assert_int_equal(unsetenv(switches[i].name), 0);
        mx_knobs_reload();
        if (on == 0 || off != 0) {
            fail_msg("%s=%s, %d rows: %d kernels %s* without it, %d with it", switches[i].name,
                     switches[i].value, switches[i].rows, on, switches[i].kernels, off);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(another_kernel_takes_over)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
