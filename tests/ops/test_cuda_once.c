// Every kernel of the CUDA backend at least once, at small shapes, for tools that make each launch
// hundreds of times slower: compute-sanitizer --tool racecheck (memcheck, synccheck) on this
// program. What comes out is only checked to be finite; tests/ops/test_cuda.c compares with the
// oracle. Without a GPU the program says why and passes.
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

enum { VOCAB = 4500, N_RIGS = 2, MAX_NAMES = 512 };

static rig rigs[N_RIGS]; // with cuBLASLt where there is one, without
static bool have;
static uint64_t seed = 7;

static int open_rigs(void **state) {
    (void)state;
    have = true;
    for (int i = 0; have && i < N_RIGS; i++) {
        setenv("MLXCEL_CUBLASLT", i == 0 ? "1" : "0", 1);
        mx_knobs_reload();
        have = cuda_rigs_open(&rigs[i], 1, false, false, VOCAB);
    }
    unsetenv("MLXCEL_CUBLASLT");
    mx_knobs_reload();
    return 0;
}

static int close_rigs(void **state) {
    (void)state;
    for (int i = 0; have && i < N_RIGS; i++) rig_close(&rigs[i]);
    return 0;
}

static void run_case(rig *r, op_case c) {
    int64_t n = op_case_outputs(&c);
    op_data d = op_case_inputs(&c, seed++);
    float *out = mx_calloc((size_t)n, sizeof *out);
    op_case_run(r, &c, &d, out);
    for (int64_t i = 0; i < n; i++) assert_true(isfinite(out[i]));
    mx_free(out);
    op_case_free(&d);
}

// Products of each format by every number of rows that has a kernel of its own.
static void products(void **state) {
    (void)state;
    if (!have) skip();
    static const mx_wfmt more[] = {{MX_AFFINE, 4, 32, MX_F16},
                                   {MX_AFFINE, 4, 128, MX_BF16},
                                   {MX_AFFINE, 8, 64, MX_BF16},
                                   {MX_AFFINE, 8, 128, MX_F16},
                                   {MX_AFFINE, 4, 64, MX_F16}};
    static const int rows[] = {1, 2, 4, 6, 12, 20, 40, 70};
    for (int i = 0; i < OP_FORMATS + (int)MX_COUNT(more); i++) {
        mx_wfmt f = i < OP_FORMATS ? op_formats[i] : more[i - OP_FORMATS];
        for (size_t k = 0; k < MX_COUNT(rows); k++) {
            for (int g = 0; g < (rows[k] >= 20 ? N_RIGS : 1); g++) {
                run_case(&rigs[g], (op_case){.op = MX_OP_MATMUL_ADD,
                                             .rows = rows[k],
                                             .n = 33,
                                             .k = 256,
                                             .a = 1,
                                             .f = f,
                                             .f2 = f});
                run_case(
                    &rigs[g],
                    (op_case){
                        .op = MX_OP_NORM_GLU, .rows = rows[k], .n = 18, .k = 256, .f = f, .f2 = f});
            }
        }
        run_case(&rigs[0],
                 (op_case){.op = MX_OP_EMBED, .rows = 2, .n = 20, .k = 256, .f = f, .f2 = f});
    }
}

static void small_ops(void **state) {
    (void)state;
    if (!have) skip();
    static const op_case cases[] = {
        {.op = MX_OP_RMS_NORM, .rows = 2, .k = 192, .a = 192},
        {.op = MX_OP_RMS_NORM, .rows = 2, .k = 192, .a = 64},
        {.op = MX_OP_NORM_ADD, .rows = 2, .k = 97},
        {.op = MX_OP_GLU, .rows = 2, .k = 127, .a = MX_ACT_GELU_TANH},
        {.op = MX_OP_SOFTCAP, .rows = 1, .k = 301},
        {.op = MX_OP_GATHER, .rows = 3, .k = 63},
        {.op = MX_OP_ROPE_TABLE, .rows = 3, .n = 64},
        {.op = MX_OP_ROPE, .rows = 2, .n = 20, .k = 80, .a = 3},
        {.op = MX_OP_SAMPLE, .rows = 3, .n = VOCAB},
    };
    for (size_t i = 0; i < MX_COUNT(cases); i++) run_case(&rigs[0], cases[i]);
}

// Every head size and number of heads of a group; contexts of one split and of several; so many
// rows that they fill the GPU, and one row, which is rotated in the same launch.
static void attention(void **state) {
    (void)state;
    if (!have) skip();
    static const int sizes[] = {64, 128, 256, 512}, heads[] = {1, 2, 4, 8};
    for (size_t s = 0; s < MX_COUNT(sizes); s++) {
        for (size_t h = 0; h < MX_COUNT(heads); h++) {
            for (int k = 0; k < 3; k++) {
                bool one = k == 2; // steps of 61, 61 and 1 rows
                int len = one ? 123 : h ? 18 : 300;
                attn_case c = {heads[h], 1, sizes[s], 0, 0, 0, MX_F16, one, 1, {len}};
                attn_data d = attn_case_inputs(&c, seed++);
                int64_t n = attn_case_outputs(&c);
                float *out = mx_calloc((size_t)n, sizeof *out);
                rigs[0].phase = k == 1 ? MX_PHASE_PREFILL : MX_PHASE_DECODE;
                attn_case_run(&rigs[0], &c, &d, one ? ATTN_TOGETHER : ATTN_WHOLE, 0, out);
                rigs[0].phase = MX_PHASE_DECODE;
                for (int64_t i = 0; i < n; i++) assert_true(isfinite(out[i]));
                mx_free(out);
                attn_case_free(&d);
            }
        }
    }
    attn_case any = {2, 1, 36, 0, 1, 0, MX_F32, true, 1, {40}};
    attn_data d = attn_case_inputs(&any, seed++);
    float *out = mx_calloc((size_t)attn_case_outputs(&any), sizeof *out);
    attn_case_run(&rigs[0], &any, &d, ATTN_CHUNKS, 1, out);
    mx_free(out);
    attn_case_free(&d);
}

// Filters, the plain draw and edits: all of the sampling kernel.
static void sampling(void **state) {
    (void)state;
    if (!have) skip();
    enum { ROWS = 4 };
    static float x[ROWS * VOCAB];
    rig *r = &rigs[0];
    rng g = {seed++};
    int32_t seq = 0, pos = 0, n = ROWS;
    rng_fill(&g, x, ROWS * VOCAB, 3);
    const mx_tensor *t = rig_tensor(r, ROWS, VOCAB, x);
    mx_step_io *io = &r->io[r->slot];
    rig_begin(r, 1, &seq, &pos, &n, ROWS, 1);
    for (int i = 0; i < ROWS; i++) {
        io->edits[i] = (mx_sample_edit){.id = 5 * i, .bias = 1, .count = 1, .repeated = 1};
        io->sample[i] = (mx_sample_row){.temperature = i ? 0.8f : 0,
                                        .top_p = i > 1 ? 0.9f : 1,
                                        .top_k = i > 2 ? 40 : 0,
                                        .min_p = i == 3 ? 0.01f : 0,
                                        .first_edit = i,
                                        .n_edits = 1,
                                        .repeat_penalty = 1.1f};
    }
    io->counts[3] = ROWS;
    rig_op(r, MX_OP_SAMPLE, (mx_op_params){.words = {0}}, 1, &t, 0, NULL);
    rig_run(r);
    for (int i = 0; i < ROWS; i++) assert_true(io->out_id[i] >= 0 && io->out_id[i] < VOCAB);
    rig_reset(r);
}

// Kernels that only `mlxcel profile` launches.
static bool elsewhere(const char *name) {
    return strcmp(name, "chain_step") == 0 || strcmp(name, "read_rate") == 0;
}

static bool is_in(const char *name, const char *const *names, int n) {
    for (int i = 0; i < n; i++) {
        if (strcmp(name, names[i]) == 0) return true;
    }
    return false;
}

static void none_was_left_out(void **state) {
    (void)state;
    if (!have) skip();
    const char *a[MAX_NAMES], *b[MAX_NAMES];
    int n = mx_cuda_unused_kernels(rigs[0].b, a, MAX_NAMES);
    int m = mx_cuda_unused_kernels(rigs[1].b, b, MAX_NAMES), left = 0;
    mx_cuda_counters count;
    mx_cuda_counters_get(rigs[0].b, &count);
    for (int i = 0; i < n; i++) {
        bool library = strncmp(a[i], "unpack_", 7) == 0 || strcmp(a[i], "finish") == 0;
        if (!is_in(a[i], b, m) || elsewhere(a[i]) || (library && !count.blaslt)) continue;
        print_message("not run: %s\n", a[i]);
        left++;
    }
    if (left) fail_msg("%d kernels were not run: they need a case here", left);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products),          cmocka_unit_test(small_ops),
        cmocka_unit_test(attention),         cmocka_unit_test(sampling),
        cmocka_unit_test(none_was_left_out),
    };
    return cmocka_run_group_tests(tests, open_rigs, close_rigs);
}
