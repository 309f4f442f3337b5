// The deterministic mode of the CUDA backend, op by op: a row has the same bits alone, among 2 to
// 65 rows, in a decode and in a prefill plan, and however its sequence was cut into steps. Without
// a GPU the program says why and passes.
#include "support/cuda_rig.h"
#include "support/op_cases.h"

#include "base/knobs.h"
#include "base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the four above
#include <cmocka.h>

enum { VOCAB = 12000, N_RIGS = 2, MAX_ROWS = 65 };

static rig rigs[N_RIGS]; // fused, expanded
static bool have;
static uint64_t seed = 20261201;
static int n_compared, failures;

static int open_rigs(void **state) {
    (void)state;
    have = cuda_rigs_open(rigs, N_RIGS, true, true, VOCAB);
    return 0;
}

static int close_rigs(void **state) {
    (void)state;
    for (int i = 0; have && i < N_RIGS; i++) rig_close(&rigs[i]);
    return 0;
}

static void need_gpu(void) {
    if (!have) skip();
}

static void no_failures(void) {
    int n = failures;
    failures = 0;
    print_message("%d comparisons\n", n_compared);
    if (n) fail_msg("%d rows differ", n);
}

// ---- Products and the rest of the row-wise ops -------------------------------------------------

// Outputs of a case lie one after another: columns of each.
static int parts_of(const op_case *c, int64_t cols[3]) {
    bool qkv = c->op == MX_OP_QKV || c->op == MX_OP_NORM_QKV;
    int64_t all = op_case_outputs(c) / c->rows;
    cols[0] = qkv ? c->n : all;
    cols[1] = cols[2] = (c->n + 2) / 3;
    return qkv ? 3 : 1;
}

// Row `row` of `rows` as one run of floats.
static void row_of(const op_case *c, const float *out, int rows, int row, float *to) {
    int64_t cols[3];
    int n = parts_of(c, cols);
    for (int i = 0; i < n; i++) {
        memcpy(to, out + row * cols[i], (size_t)cols[i] * sizeof *to);
        out += rows * cols[i];
        to += cols[i];
    }
}

static void run_rows(rig *r, const op_case *c, const op_data *d, int first, int rows, float *out) {
    op_case some = *c;
    op_data from = *d;
    some.rows = rows;
    for (int i = 0; i < 3; i++) from.x[i] += first * c->k;
    if (c->op == MX_OP_MATMUL_ADD) from.x[1] = d->x[1] + first * c->n; // the residual
    op_case_run(r, &some, &from, out);
}

static void compare_counts(rig *r, op_case c) {
    static const int counts[] = {2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 33, MAX_ROWS};
    c.rows = MAX_ROWS;
    int64_t total = op_case_outputs(&c), cols = total / MAX_ROWS;
    op_data d = op_case_inputs(&c, seed++);
    float *alone = mx_alloc((size_t)total * sizeof *alone), *out = mx_alloc((size_t)total * 4);
    float *row = mx_alloc((size_t)cols * sizeof *row);
    for (int i = 0; i < MAX_ROWS; i++) {
        if (i < 17 || i == MAX_ROWS - 1) run_rows(r, &c, &d, i, 1, alone + i * cols);
    }
    for (size_t k = 0; k < MX_COUNT(counts); k++) {
        r->phase = k % 2 ? MX_PHASE_PREFILL : MX_PHASE_DECODE;
        run_rows(r, &c, &d, 0, counts[k], out);
        r->phase = MX_PHASE_DECODE;
        for (int i = 0; i < counts[k]; i++) {
            if (i >= 17 && i != MAX_ROWS - 1) continue;
            row_of(&c, out, counts[k], i, row);
            n_compared++;
            if (memcmp(row, alone + i * cols, (size_t)cols * sizeof *row) == 0) continue;
            char name[160];
            print_message("%s (%s): row %d of %d is not what it is alone\n",
                          op_case_name(&c, name, sizeof name), r->name, i, counts[k]);
            failures++;
            break;
        }
    }
    mx_free(alone);
    mx_free(out);
    mx_free(row);
    op_case_free(&d);
}

static void every_rig(op_case c, mx_wfmt f) {
    c.f = c.f2 = f;
    for (int i = 0; i < N_RIGS; i++) compare_counts(&rigs[i], c);
}

static const mx_wfmt more_formats[] = {
    {MX_AFFINE, 4, 32, MX_F16},  {MX_AFFINE, 4, 128, MX_BF16}, {MX_AFFINE, 8, 64, MX_BF16},
    {MX_AFFINE, 8, 128, MX_F16}, {MX_AFFINE, 6, 64, MX_BF16},
};

static void products_of_every_format(void **state) {
    (void)state;
    need_gpu();
    for (int i = 0; i < OP_FORMATS + (int)MX_COUNT(more_formats); i++) {
        mx_wfmt f = i < OP_FORMATS ? op_formats[i] : more_formats[i - OP_FORMATS];
        every_rig((op_case){.op = MX_OP_MATMUL_ADD, .n = 50, .k = 512}, f);
        every_rig((op_case){.op = MX_OP_NORM_QKV, .n = 40, .k = 1536, .a = 1}, f);
        every_rig((op_case){.op = MX_OP_NORM_GLU, .n = 33, .k = 768, .a = i % 3}, f);
        every_rig((op_case){.op = MX_OP_MATMUL_GLU, .n = 17, .k = 256, .a = i % 3}, f);
    }
    no_failures();
}

// Long rows are prepared by other code, and fewer tokens fit at once.
static void products_of_long_rows(void **state) {
    (void)state;
    need_gpu();
    static const mx_wfmt f[] = {{MX_AFFINE, 4, 64, MX_BF16},
                                {MX_BF16, 0, 0, 0},
                                {MX_F16, 0, 0, 0},
                                {MX_Q6_K, 0, 0, 0},
                                {MX_Q4_1, 0, 0, 0}};
    static const int k[] = {4096, 8192, 14336, 16384, 28672};
    for (size_t i = 0; i < MX_COUNT(f); i++) {
        for (size_t j = 0; j < MX_COUNT(k); j++) {
            every_rig((op_case){.op = MX_OP_NORM_MATMUL, .n = 20, .k = k[j], .a = 1}, f[i]);
        }
    }
    no_failures();
}

static void ops_without_weights(void **state) {
    (void)state;
    need_gpu();
    mx_wfmt none = mx_wfmt_of(MX_F32);
    every_rig((op_case){.op = MX_OP_RMS_NORM, .k = 576, .a = 576}, none);
    every_rig((op_case){.op = MX_OP_RMS_NORM, .k = 192, .a = 64}, none);
    every_rig((op_case){.op = MX_OP_NORM_ADD, .k = 97}, none);
    every_rig((op_case){.op = MX_OP_GLU, .k = 1031, .a = MX_ACT_GELU_TANH}, none);
    every_rig((op_case){.op = MX_OP_SOFTCAP, .k = 5001}, none);
    no_failures();
}

// ---- Attention ---------------------------------------------------------------------------------

static const attn_case attn_cases[] = {
    {9, 3, 64, 0, 0, 0, MX_F16, false, 2, {900, 40}},
    {4, 1, 256, 24, 1, 0, MX_F16, true, 2, {70, 33}},
    {6, 2, 80, 300, 2, 50, MX_F16, false, 2, {600, 20}},
    {6, 2, 80, 100, 2, 50, MX_F32, false, 2, {270, 20}},
    {6, 2, 64, 0, 0, 0, MX_BF16, false, 2, {70, 20}},
    {8, 1, 128, 300, 0, 30, MX_F16, true, 1, {560}},
    {8, 2, 128, 0, 1, 0, MX_F16, true, 3, {1000, 257, 256}},
    {4, 2, 128, 0, 0, 0, MX_F16, false, 3, {100, 512, 513}},
    {5, 1, 512, 0, 1, 0, MX_F16, false, 1, {300}},
};

// Every schedule, phase and page size against the first.
static void compare_schedules(rig *all, const attn_case *c) {
    int64_t n = attn_case_outputs(c);
    attn_data d = attn_case_inputs(c, seed++);
    float *want = mx_calloc((size_t)n, sizeof *want), *out = mx_calloc((size_t)n, sizeof *out);
    for (int k = 0; k < 2 * ATTN_SCHEDULES * RIG_GROUPS; k++) {
        int s = k / 2 % ATTN_SCHEDULES, group = k / (2 * ATTN_SCHEDULES);
        rig *r = &all[0];
        r->phase = k % 2 ? MX_PHASE_PREFILL : MX_PHASE_DECODE;
        attn_case_run(r, c, &d, (attn_schedule)s, group, k ? out : want);
        r->phase = MX_PHASE_DECODE;
        n_compared++;
        if (k == 0 || memcmp(want, out, (size_t)n * sizeof *out) == 0) continue;
        int64_t at = 0;
        while (memcmp(&want[at], &out[at], sizeof *out) == 0) at++;
        print_message("attention %d/%d heads of %d, window %d: schedule %d, plan %d, pages %d: "
                      "%lld is %.9g, was %.9g\n",
                      c->n_head, c->n_kv, c->head_dim, c->window, s, k % 2, rig_page_tokens[group],
                      (long long)at, (double)out[at], (double)want[at]);
        failures++;
    }
    mx_free(want);
    mx_free(out);
    attn_case_free(&d);
}

static void attention_by_every_schedule(void **state) {
    (void)state;
    need_gpu();
    for (size_t i = 0; i < MX_COUNT(attn_cases); i++) compare_schedules(rigs, &attn_cases[i]);
    no_failures();
}

// The switch for attention alone gives attention the same property.
static void attention_alone(void **state) {
    (void)state;
    need_gpu();
    mx_backend *b;
    mx_backend_facts facts;
    mx_err e = {0};
    rig r;
    assert_int_equal(setenv("MLXCEL_SDPA_DETERMINISTIC", "1", 1), 0);
    mx_knobs_reload();
    assert_int_equal(mx_cuda_open(0, &b, &e), MX_OK);
    assert_int_equal(unsetenv("MLXCEL_SDPA_DETERMINISTIC"), 0);
    mx_knobs_reload();
    rig_open_on(&r, b, true, VOCAB);
    b->ops->facts(b, &facts);
    assert_false(facts.deterministic); // products are not
    rigs[0].b->ops->facts(rigs[0].b, &facts);
    assert_true(facts.deterministic);
    for (size_t i = 0; i < 3; i++) compare_schedules(&r, &attn_cases[i]);
    rig_close(&r);
    no_failures();
}

// ---- Sampling ----------------------------------------------------------------------------------

static void a_sampled_row_alone_and_among_others(void **state) {
    (void)state;
    need_gpu();
    enum { ROWS = 8, N = 9001 };
    rig *r = &rigs[0];
    rng g = {seed++};
    static float x[ROWS * N];
    rng_fill(&g, x, ROWS * N, 3);
    float lp[ROWS];
    int32_t id[ROWS];
    for (int alone = 0; alone < 2; alone++) {
        for (int i = 0; i < (alone ? ROWS : 1); i++) {
            int32_t seq = 0, pos = 0, n = alone ? 1 : ROWS;
            mx_step_io *io = &r->io[r->slot];
            const mx_tensor *t = rig_tensor(r, n, N, x + i * N);
            rig_begin(r, 1, &seq, &pos, &n, n, 1);
            for (int k = 0; k < n; k++) {
                int row = alone ? i : k;
                io->sample[k] = (mx_sample_row){.temperature = row % 2 ? 0.8f : 0,
                                                .top_p = row % 4 == 3 ? 0.9f : 1,
                                                .top_k = row == 5 ? 40 : 0,
                                                .seed = 7,
                                                .pos = (uint32_t)row};
            }
            rig_op(r, MX_OP_SAMPLE, (mx_op_params){.words = {0}}, 1, &t, 0, NULL);
            rig_run(r);
            for (int k = 0; k < n; k++) {
                int row = alone ? i : k;
                if (alone) {
                    assert_int_equal(io->out_id[k], id[row]);
                    assert_memory_equal(&io->out_logprob[k], &lp[row], sizeof lp[row]);
                }
                id[row] = io->out_id[k];
                lp[row] = io->out_logprob[k];
            }
            rig_reset(r);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_of_every_format),
        cmocka_unit_test(products_of_long_rows),
        cmocka_unit_test(ops_without_weights),
        cmocka_unit_test(attention_by_every_schedule),
        cmocka_unit_test(attention_alone),
        cmocka_unit_test(a_sampled_row_alone_and_among_others),
    };
    return cmocka_run_group_tests(tests, open_rigs, close_rigs);
}
