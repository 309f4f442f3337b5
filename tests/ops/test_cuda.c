// Every op of the CUDA backend against the oracle: all cases of the op matrix, fused and expanded,
// formats at odd shapes, attention by every schedule, sampling, plans cut into command buffers.
// Without a GPU the program says why and passes.
#include "backend/cpu/ref.h"
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

enum { VOCAB = 12000, N_RIGS = 2 };

static rig rigs[N_RIGS]; // fused, expanded
static bool have;
static uint64_t seed = 20261130;
static double worst; // greatest error / tolerance since it was cleared

static int open_rigs(void **state) {
    (void)state;
    have = cuda_rigs_open(rigs, N_RIGS, true, false, VOCAB);
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

static int failures;

static void near_oracle(const char *what, const char *who, const float *a, const double *b,
                        int64_t n, double tol) {
    int64_t bad = 0, at = -1;
    double most = 0;
    for (int64_t i = 0; i < n; i++) {
        double e = fabs((double)a[i] - b[i]) / (tol * fmax(1, fabs(b[i])));
        if (!(e <= 1)) {
            bad++;
            if (at < 0) at = i;
        }
        if (!(e <= most)) most = e;
    }
    if (!(most <= worst)) worst = most;
    if (!bad) return;
    failures++;
    print_message("%s (%s): %lld of %lld wrong, first at %lld: %.9g, oracle %.9g; worst %.3g of "
                  "tolerance %g\n",
                  what, who, (long long)bad, (long long)n, (long long)at, (double)a[at], b[at],
                  most, tol);
}

static void no_failures(void) {
    int n = failures;
    failures = 0;
    if (n) fail_msg("%d cases", n);
}

static bool is_product(const op_case *c) {
    switch (c->op) {
    case MX_OP_MATMUL:
    case MX_OP_MATMUL_ADD:
    case MX_OP_QKV:
    case MX_OP_MATMUL_GLU:
    case MX_OP_NORM_MATMUL:
    case MX_OP_NORM_QKV:
    case MX_OP_NORM_GLU: return true;
    default: return false;
    }
}

// Products of few rows carry activations in 16 bits or more; the others in bf16. Which is which
// depends on what fits: the looser tolerance from 5 rows on when a weight is of 16-bit floats.
static double tolerance(const op_case *c) {
    bool floats = mx_dtype_is_float(c->f.dtype) || mx_dtype_is_float(c->f2.dtype);
    if (c->op == MX_OP_ROPE_TABLE || c->op == MX_OP_SAMPLE) return 2e-5;
    if (!is_product(c)) return op_case_tolerance(c, true);
    return c->rows > (floats || c->k > 8192 ? 3 : 8) ? 0.04 : 5e-4;
}

static void compare_case(rig *r, const op_case *c, double tol) {
    char name[160];
    int64_t n = op_case_outputs(c);
    op_data d = op_case_inputs(c, seed++);
    float *out = mx_calloc((size_t)n, sizeof *out);
    double *want = mx_calloc((size_t)n, sizeof *want);
    op_case_name(c, name, sizeof name);
    op_case_oracle(c, &d, want);
    memset(out, 0xff, (size_t)n * sizeof *out);
    op_case_run(r, c, &d, out);
    near_oracle(name, r->name, out, want, n, tol);
    mx_free(out);
    mx_free(want);
    op_case_free(&d);
}

static void check_case(const op_case *c, void *arg) {
    (void)arg;
    for (int i = 0; i < N_RIGS; i++) compare_case(&rigs[i], c, tolerance(c));
}

static void every_case_of_the_matrix(void **state) {
    (void)state;
    need_gpu();
    worst = 0;
    op_cases_each(check_case, NULL);
    print_message("worst error: %.2f of its tolerance\n", worst);
    no_failures();
}

static const mx_wfmt more_formats[] = {
    {MX_AFFINE, 4, 32, MX_F16},  {MX_AFFINE, 4, 64, MX_F16},  {MX_AFFINE, 4, 128, MX_BF16},
    {MX_AFFINE, 8, 64, MX_BF16}, {MX_AFFINE, 8, 128, MX_F16}, {MX_AFFINE, 4, 64, MX_F32},
    {MX_AFFINE, 6, 64, MX_BF16}, {MX_AFFINE, 2, 32, MX_F16},  {MX_AFFINE, 5, 64, MX_BF16},
    {MX_AFFINE, 8, 32, MX_BF16},
};

static void one_format(mx_wfmt f) {
    static const struct { int n, blocks; } shape[] = {{1, 1}, {16, 2}, {33, 3}, {70, 9}, {257, 5}};
    static const int rows[] = {1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 33, 64, 65};
    int block = f.dtype == MX_AFFINE ? f.group : mx_dtype_get(f.dtype)->block_elems;
    if (block == 1) block = 37; // no blocks: any number of columns
    int k = 0;
    for (size_t r = 0; r < MX_COUNT(rows); r++) {
        for (size_t s = 0; s < 2; s++, k++) {
            op_case c = {.rows = rows[r],
                         .n = shape[k % 5].n,
                         .k = shape[k % 5].blocks * block,
                         .a = s == 0};
            c.op = s == 0 ? MX_OP_MATMUL_ADD : MX_OP_NORM_GLU;
            c.f = c.f2 = f;
            check_case(&c, NULL);
        }
    }
}

static void formats_at_odd_shapes(void **state) {
    (void)state;
    need_gpu();
    for (int i = 0; i < OP_FORMATS; i++) one_format(op_formats[i]);
    for (size_t i = 0; i < MX_COUNT(more_formats); i++) one_format(more_formats[i]);
    no_failures();
}

// N is no multiple of a tile, K one of the group but of no tile; bits, groups and rows in turn.
static void odd_affine_shapes(void **state) {
    (void)state;
    need_gpu();
    static const int bits[] = {2, 3, 4, 5, 6, 8}, groups[] = {32, 64, 128};
    static const int ns[] = {1, 4, 5, 7, 8, 31, 32, 33, 63, 65, 96, 127, 129};
    static const int rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17};
    int turn = 0;
    for (size_t i = 0; i < MX_COUNT(bits) * MX_COUNT(groups); i++) {
        int group = groups[i % MX_COUNT(groups)];
        int ks[] = {group, 3 * group, 544, 608};
        for (size_t n = 0; n < MX_COUNT(ns); n++) {
            for (size_t k = 0; k < MX_COUNT(ks); k++) {
                if (ks[k] % group) continue;
                op_case c = {.op = MX_OP_MATMUL, .n = ns[n], .k = ks[k]};
                c.f = (mx_wfmt){MX_AFFINE, (int8_t)bits[i / MX_COUNT(groups)], (int16_t)group,
                                MX_BF16};
                c.f2 = c.f;
                c.rows = rows[turn++ % (int)MX_COUNT(rows)];
                check_case(&c, NULL);
            }
        }
    }
    no_failures();
}

// Long rows: activations of 8 tokens do not fit the one-pass kernel at once.
static void long_rows(void **state) {
    (void)state;
    need_gpu();
    static const mx_wfmt f[] = {
        {MX_AFFINE, 4, 64, MX_BF16}, {MX_BF16, 0, 0, 0}, {MX_Q6_K, 0, 0, 0}};
    for (size_t i = 0; i < MX_COUNT(f); i++) {
        for (int rows = 1; rows <= 8; rows += 7) {
            op_case c = {.op = MX_OP_NORM_MATMUL, .rows = rows, .n = 50, .k = 12288};
            c.f = c.f2 = f[i];
            check_case(&c, NULL);
        }
    }
    op_case many = {.op = MX_OP_QKV, .rows = 150, .n = 300, .k = 512, .a = 1};
    many.f = (mx_wfmt){MX_Q4_K, 0, 0, 0};
    many.f2 = (mx_wfmt){MX_Q6_K, 0, 0, 0};
    check_case(&many, NULL);
    many.op = MX_OP_NORM_GLU;
    many.a = 0;
    many.f2 = many.f;
    check_case(&many, NULL);
    no_failures();
}

// Batches: clusters that share the columns, a last group of fewer strips, several passes.
static void batches(void **state) {
    (void)state;
    need_gpu();
    static const mx_wfmt f[] = {{MX_AFFINE, 4, 64, MX_BF16}, {MX_AFFINE, 8, 32, MX_F16},
                                {MX_BF16, 0, 0, 0},          {MX_F16, 0, 0, 0},
                                {MX_Q4_K, 0, 0, 0},          {MX_Q6_K, 0, 0, 0},
                                {MX_Q5_1, 0, 0, 0}};
    static const struct { int n, k; } shape[] = {{40, 2048}, {1500, 512}, {5001, 256}};
    static const int rows[] = {10, 20, 48, 64};
    for (size_t i = 0; i < MX_COUNT(f); i++) {
        for (size_t s = 0; s < MX_COUNT(shape); s++) {
            op_case c = {.op = MX_OP_QKV, .n = shape[s].n, .k = shape[s].k, .a = 1};
            c.rows = rows[(i + s) % MX_COUNT(rows)];
            c.f = c.f2 = f[i];
            check_case(&c, NULL);
            c.op = MX_OP_NORM_GLU, c.a = 0;
            check_case(&c, NULL);
        }
    }
    op_case large = {.op = MX_OP_MATMUL, .rows = 100, .n = 16500, .k = 64};
    large.f = large.f2 = (mx_wfmt){MX_Q4_0, 0, 0, 0};
    check_case(&large, NULL);
    no_failures();
}

// MLXCEL_EXACT: any number of rows, activations in 16 bits or more.
static void exact_products(void **state) {
    (void)state;
    need_gpu();
    rig r;
    mx_backend *b;
    mx_err e = {0};
    assert_int_equal(setenv("MLXCEL_EXACT", "1", 1), 0);
    mx_knobs_reload();
    assert_int_equal(mx_cuda_open(0, &b, &e), MX_OK);
    rig_open_on(&r, b, true, VOCAB);
    for (int f = 0; f < OP_FORMATS; f++) {
        for (int rows = 1; rows <= 21; rows += 5) {
            op_case c = {.op = MX_OP_NORM_QKV, .rows = rows, .n = 65, .k = 512, .a = 1};
            c.f = c.f2 = op_formats[f];
            compare_case(&r, &c, 5e-4);
        }
    }
    rig_close(&r);
    assert_int_equal(unsetenv("MLXCEL_EXACT"), 0);
    mx_knobs_reload();
    no_failures();
}

// ---- Attention ----

static const attn_case attn_cases[] = {
    {9, 3, 64, 0, 0, 0, MX_F16, false, 2, {300, 40}},
    {4, 1, 256, 24, 1, 0, MX_F16, true, 2, {70, 33}},
    {6, 2, 80, 100, 2, 50, MX_F32, false, 2, {270, 20}},
    {6, 2, 80, 100, 2, 50, MX_F16, false, 2, {270, 20}},
    {6, 2, 64, 0, 0, 0, MX_BF16, false, 2, {70, 20}},
    {3, 1, 64, 0, 0, 20, MX_F16, true, 2, {70, 33}},
    {4, 4, 96, 0, 1, 0, MX_F16, false, 1, {50}},
    {8, 1, 128, 300, 0, 30, MX_F16, true, 1, {560}},
    {8, 2, 128, 0, 1, 0, MX_F16, true, 2, {700, 129}},
    {4, 2, 128, 0, 0, 0, MX_F16, false, 3, {100, 64, 65}},
    {8, 1, 256, 0, 0, 0, MX_F16, false, 1, {200}},
    {5, 1, 512, 0, 1, 0, MX_F16, false, 1, {90}},
    {2, 1, 512, 40, 0, 0, MX_F16, false, 1, {90}},
    {5, 1, 36, 0, 0, 0, MX_F32, false, 1, {40}},
    {49, 1, 32, 0, 1, 0, MX_F16, false, 1, {20}},
};

// On a rig of its own, or NULL: on those of the program in turn.
static void check_attn(rig *own, const attn_case *c) {
    int64_t n = attn_case_outputs(c);
    attn_data d = attn_case_inputs(c, seed++);
    float *out = mx_calloc((size_t)n, sizeof *out);
    double *want = mx_calloc((size_t)n, sizeof *want);
    char name[128];
    attn_case_oracle(c, &d, want);
    for (int s = 0; s < ATTN_SCHEDULES; s++) {
        for (int phase = 0; phase < 2; phase++) {
            rig *r = own ? own : &rigs[s % N_RIGS];
            r->phase = phase ? MX_PHASE_PREFILL : MX_PHASE_DECODE;
            memset(out, 0xff, (size_t)n * sizeof *out);
            attn_case_run(r, c, &d, (attn_schedule)s, (c->group + s) % RIG_GROUPS, out);
            snprintf(name, sizeof name, "attention %d/%d heads of %d, window %d, schedule %d, %s",
                     c->n_head, c->n_kv, c->head_dim, c->window, s, mx_phase_name(r->phase));
            double tol = c->type == MX_F32 ? 5e-5 : c->type == MX_BF16 ? 2e-2 : 4e-3;
            near_oracle(name, r->name, out, want, n, phase && c->type == MX_F16 ? 1e-2 : tol);
            r->phase = MX_PHASE_DECODE;
        }
    }
    mx_free(out);
    mx_free(want);
    attn_case_free(&d);
}

static void attention_by_every_schedule(void **state) {
    (void)state;
    need_gpu();
    worst = 0;
    for (size_t i = 0; i < MX_COUNT(attn_cases); i++) check_attn(NULL, &attn_cases[i]);
    print_message("worst error: %.2f of its tolerance\n", worst);
    no_failures();
}

static uint64_t slow_of(rig *r, mx_slow s) {
    mx_enc_stats st;
    mx_enc_get_stats(r->enc, &st);
    return st.slow[s];
}

// MLXCEL_CUDA_PREFILL_ATTN=0: the kernel of decode steps takes prompts too.
static void attention_of_prompts_may_be_switched_off(void **state) {
    (void)state;
    need_gpu();
    rig r;
    assert_int_equal(setenv("MLXCEL_CUDA_PREFILL_ATTN", "0", 1), 0);
    mx_knobs_reload();
    assert_true(cuda_rigs_open(&r, 1, false, false, VOCAB));
    for (size_t i = 0; i < MX_COUNT(attn_cases); i++) check_attn(&r, &attn_cases[i]);
    enum { MAX_NAMES = 1024 };
    static const char *names[MAX_NAMES];
    int32_t n = mx_cuda_unused_kernels(r.b, names, MAX_NAMES), n_prefill = 0;
    assert_true(n <= MAX_NAMES);
    for (int32_t i = 0; i < n; i++) n_prefill += strncmp(names[i], "prefill_h", 9) == 0;
    assert_int_equal(n_prefill, 3); // none of them was used
    assert_true(slow_of(&r, MX_SLOW_NO_PREFILL_ATTN) > 0);
    rig_close(&r);
    assert_int_equal(unsetenv("MLXCEL_CUDA_PREFILL_ATTN"), 0);
    mx_knobs_reload();
    no_failures();
}

// ---- Sampling ----

static void sample_rows(rig *r, const float *logits, int n_rows, int n_vocab,
                        const mx_sample_row *rows, int32_t *ids, float *lp) {
    const mx_tensor *x = rig_tensor(r, n_rows, n_vocab, logits);
    int32_t seq = 0, pos = 0, n = n_rows;
    mx_step_io *io = &r->io[r->slot];
    rig_begin(r, 1, &seq, &pos, &n, n_rows, 1);
    for (int i = 0; i < n_rows; i++) io->sample[i] = rows[i];
    rig_op(r, MX_OP_SAMPLE, (mx_op_params){.words = {0}}, 1, &x, 0, NULL);
    rig_run(r);
    for (int i = 0; i < n_rows; i++) ids[i] = io->out_id[i], lp[i] = io->out_logprob[i];
    rig_reset(r);
}

// Draws from a row many times; the counts must fit the wanted probabilities (chi-square).
static void draws_fit(const float *row, int n, mx_sample_row s, const double *want) {
    enum { ROWS = 16, STEPS = 150 };
    rig *r = &rigs[0];
    float *logits = mx_alloc(sizeof(float) * (size_t)(ROWS * n));
    int *count = mx_calloc((size_t)n, sizeof *count);
    for (int i = 0; i < ROWS; i++) memcpy(logits + i * n, row, sizeof(float) * (size_t)n);
    for (int k = 0; k < STEPS; k++) {
        mx_sample_row rows[ROWS];
        int32_t ids[ROWS];
        float lp[ROWS];
        for (int i = 0; i < ROWS; i++) rows[i] = s, rows[i].pos = (uint32_t)(k * ROWS + i);
        sample_rows(r, logits, ROWS, n, rows, ids, lp);
        for (int i = 0; i < ROWS; i++) count[ids[i]]++;
    }
    double chi = 0, dof = -1, rest_want = 0, rest = 0;
    for (int i = 0; i < n; i++) {
        double e = want[i] * ROWS * STEPS;
        if (want[i] <= 0) assert_int_equal(count[i], 0);
        if (e < 5) {
            rest_want += e, rest += count[i];
            continue;
        }
        chi += (count[i] - e) * (count[i] - e) / e, dof++;
    }
    if (rest_want > 5) chi += (rest - rest_want) * (rest - rest_want) / rest_want, dof++;
    if (chi > dof + 5 * sqrt(2 * dof) + 5) fail_msg("chi-square %.1f, %g degrees", chi, dof);
    mx_free(logits);
    mx_free(count);
}

static void sampling_follows_the_distribution(void **state) {
    (void)state;
    need_gpu();
    enum { N = 40 };
    float row[N];
    double p[N], q[N], sum = 0;
    for (int i = 0; i < N; i++) row[i] = (float)((i * 17) % N) * 0.15f; // distinct
    for (int i = 0; i < N; i++) sum += p[i] = exp((double)row[i] / 0.7);
    for (int i = 0; i < N; i++) p[i] /= sum;
    draws_fit(row, N, (mx_sample_row){.temperature = 0.7f, .top_p = 1, .seed = 5}, p);
    // top_k 7, then top_p 0.8 of what is left, untempered; then temperature
    double u[N], mass = 0, kept = 0, z = 0;
    for (int i = 0; i < N; i++)
        u[i] = row[i] >= (float)(N - 7) * 0.15f - 1e-4f ? exp((double)row[i]) : 0;
    for (int i = 0; i < N; i++) mass += u[i];
    for (int v = N - 1; v >= 0; v--) {
        for (int i = 0; i < N; i++) {
            if ((i * 17) % N != v) continue;
            q[i] = kept < 0.8 * mass && u[i] > 0 ? exp((double)row[i] / 1.3) : 0;
            kept += u[i], z += q[i];
        }
    }
    for (int i = 0; i < N; i++) q[i] /= z;
    draws_fit(row, N, (mx_sample_row){.temperature = 1.3f, .top_k = 7, .top_p = 0.8f, .seed = 9},
              q);
    // min_p 0.5: logits within log 2 of the largest
    z = 0;
    for (int i = 0; i < N; i++) {
        q[i] = (double)row[i] >= (N - 1) * 0.15 - log(2.0) ? exp((double)row[i]) : 0;
        z += q[i];
    }
    for (int i = 0; i < N; i++) q[i] /= z;
    draws_fit(row, N, (mx_sample_row){.temperature = 1, .top_p = 1, .min_p = 0.5f, .seed = 1}, q);
}

static void a_large_vocabulary_is_sampled_within_the_filters(void **state) {
    (void)state;
    need_gpu();
    rng g = {seed};
    static float logits[2 * VOCAB];
    rng_fill(&g, logits, 2 * VOCAB, 3.0f);
    for (int k = 0; k < 20; k++) {
        mx_sample_row rows[2] = {{.temperature = 1.5f, .top_p = 0.9f, .top_k = 50, .seed = 3},
                                 {.temperature = 1, .top_p = 0.5f, .min_p = 0.02f, .seed = 4}};
        int32_t ids[2];
        float lp[2];
        rows[0].pos = rows[1].pos = (uint32_t)k;
        sample_rows(&rigs[0], logits, 2, VOCAB, rows, ids, lp);
        for (int r = 0; r < 2; r++) {
            double greedy;
            const float *x = logits + r * VOCAB;
            int above = 0, top = cpu_ref_greedy(x, VOCAB, &greedy);
            for (int i = 0; i < VOCAB; i++) above += x[i] > x[ids[r]];
            double want = greedy + (double)x[ids[r]] - (double)x[top];
            assert_true(fabs(want - (double)lp[r]) < 1e-4 * fmax(1, fabs(want)));
            assert_true(r == 1 || above < 50);
        }
    }
}

static void rows_for_the_host_are_left_alone(void **state) {
    (void)state;
    need_gpu();
    float logits[12] = {0, 1, 2, 3, 4, 5, 6, 7, NAN, -INFINITY, 9, 9};
    mx_sample_row rows[3] = {{.host = 1}, {.host = 0}, {.host = 0}};
    int32_t ids[3];
    float lp[3];
    sample_rows(&rigs[0], logits, 3, 4, rows, ids, lp);
    assert_int_equal(ids[1], 3);
    assert_int_equal(ids[2], 2);
    assert_true(fabsf(lp[2] + 0.693147f) < 1e-5f);
}

// A token that only the device knows: -1 - k is output k of the step before.
static void embed_takes_the_token_sampled_before(void **state) {
    (void)state;
    need_gpu();
    rig *r = &rigs[0];
    rng g = {seed};
    rig_matrix m = rig_random_matrix(&g, mx_wfmt_of(MX_Q8_0), 64, 32);
    float logits[2 * 64], want[32], got[2 * 32];
    rng_fill(&g, logits, 128, 1.0f);
    logits[17] = 9;
    logits[64 + 42] = 9;
    const mx_tensor *w = rig_weight(r, &m.view), *x = rig_tensor(r, 2, 64, logits);
    const mx_tensor *y = rig_tensor(r, 2, 32, NULL);
    int32_t seq[2] = {0, 1}, pos[2] = {0, 0}, n[2] = {1, 1};
    rig_begin(r, 2, seq, pos, n, 2, 2);
    rig_op(r, MX_OP_SAMPLE, (mx_op_params){.words = {0}}, 1, &x, 0, NULL);
    rig_run(r);
    rig_begin(r, 2, seq, pos, n, 0, 2);
    r->io[r->slot].ids[0] = -2;
    r->io[r->slot].ids[1] = -1;
    rig_op(r, MX_OP_EMBED, (mx_op_params){.embed = {1.0f}}, 1, &w, 1, &y);
    rig_run(r);
    rig_read(r, y, got);
    for (int i = 0; i < 2; i++) {
        mx_dequant_row(&m.view, i == 0 ? 42 : 17, want);
        for (int k = 0; k < 32; k++) assert_true(fabsf(got[32 * i + k] - want[k]) < 1e-6f);
    }
    rig_reset(r);
    mx_free(m.owner);
}

// ---- Command buffers ----

// A chain of products and norms, cut at several budgets, as graphs and launch by launch: the bits
// are the same.
static void chain(rig *r, const mx_tensor *w, const mx_tensor *n, const mx_tensor *x,
                  const mx_tensor *y, float *out) {
    int32_t seq = 0, pos = 0, rows = 3;
    rig_begin(r, 1, &seq, &pos, &rows, 0, 1);
    mx_tid a = rig_use(r, x), tw = rig_use(r, w), tn = rig_use(r, n);
    for (int i = 0; i < 40; i++) {
        mx_tid b = mx_enc_temp(r->enc, 3, 256),
               c = i == 39 ? rig_use(r, y) : mx_enc_temp(r->enc, 3, 256);
        mx_enc_op(
            r->enc,
            (mx_op){
                .kind = MX_OP_MATMUL, .n_in = 3, .n_out = 1, .in = {a, tw, MX_NONE}, .out = {b}});
        mx_enc_op(r->enc, (mx_op){.kind = MX_OP_RMS_NORM,
                                  .n_in = 2,
                                  .n_out = 1,
                                  .in = {b, tn},
                                  .out = {c},
                                  .p.norm = {1e-5f, 256}});
        a = c;
    }
    rig_run(r);
    rig_read(r, y, out);
}

static void budgets_change_no_bits(void **state) {
    (void)state;
    need_gpu();
    rig *r = &rigs[0];
    rng g = {seed};
    rig_matrix m = rig_random_matrix(&g, (mx_wfmt){MX_AFFINE, 4, 64, MX_BF16}, 256, 256);
    float ones[256], data[3 * 256], first[3 * 256], out[3 * 256];
    for (int i = 0; i < 256; i++) ones[i] = 1;
    rng_fill(&g, data, 3 * 256, 1);
    mx_wview v = {.fmt = mx_wfmt_of(MX_F32), .n_rows = 1, .n_cols = 256, .data = ones};
    const mx_tensor *w = rig_weight(r, &m.view), *n = rig_weight(r, &v);
    const mx_tensor *x = rig_tensor(r, 3, 256, data), *y = rig_tensor(r, 3, 256, NULL);
    static const int ops[] = {MX_BUDGET_UNLIMITED, 1, 2, 7, 20, 50};
    for (size_t i = 0; i < MX_COUNT(ops); i++) {
        mx_budget b[MX_PHASES];
        for (int p = 0; p < MX_PHASES; p++) {
            b[p] = (mx_budget){.max_ops = ops[i], .max_mb = MX_BUDGET_UNLIMITED};
        }
        mx_enc_set_budgets(r->enc, b);
        for (int phase = 0; phase < 2; phase++) {
            r->phase = phase ? MX_PHASE_PREFILL : MX_PHASE_DECODE;
            for (int again = 0; again < 3; again++) {
                chain(r, w, n, x, y, i + (size_t)phase + (size_t)again == 0 ? first : out);
                if (i + (size_t)phase + (size_t)again) assert_memory_equal(first, out, sizeof out);
            }
        }
        r->phase = MX_PHASE_DECODE;
    }
    for (int i = 0; i < 3 * 256; i++) assert_true(isfinite(first[i]));
    rig_reset(r);
    mx_free(m.owner);
}

static void slow_paths_are_counted(void **state) {
    (void)state;
    need_gpu();
    rig *r = &rigs[0];
    static const attn_case cases[] = {{6, 2, 80, 100, 2, 50, MX_F32, false, 2, {270, 20}},
                                      {6, 2, 80, 100, 2, 50, MX_F16, false, 2, {270, 20}},
                                      {5, 1, 36, 0, 0, 0, MX_F16, false, 1, {40}}};
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        uint64_t before = slow_of(r, MX_SLOW_ATTN_PLAIN);
        attn_data d = attn_case_inputs(&cases[i], seed++);
        float *out = mx_calloc((size_t)attn_case_outputs(&cases[i]), sizeof *out);
        attn_case_run(r, &cases[i], &d, ATTN_WHOLE, cases[i].group, out);
        assert_int_equal(slow_of(r, MX_SLOW_ATTN_PLAIN) > before, i != 1);
        mx_free(out);
        attn_case_free(&d);
    }
    for (int i = 0; i < 2; i++) {
        uint64_t before = slow_of(r, MX_SLOW_ROWS);
        op_case c = {.op = MX_OP_MATMUL, .rows = 3, .n = 32, .k = 256};
        c.f = c.f2 = mx_wfmt_of(i ? MX_F32 : MX_Q8_0);
        check_case(&c, NULL);
        assert_int_equal(slow_of(r, MX_SLOW_ROWS) - before, i);
    }
    assert_int_equal(slow_of(r, MX_SLOW_NO_GRAPHS), 0);
    no_failures();
}

// A chain of ops that no other k has, on r's encoder; a hash of what it computes.
static uint64_t run_shape(rig *r, const mx_tensor *x, const mx_tensor *y, int k, float *out) {
    int32_t seq = 0, pos = 0, rows = (int32_t)y->n_rows;
    rig_begin(r, 1, &seq, &pos, &rows, 0, 1);
    mx_op_params p = {.words = {0}};
    p.softcap.cap = 1.0f + (float)k / 16; // part of the plan's key
    mx_tid a = rig_use(r, x);
    for (int i = 0; i <= k % 5; i++) {
        mx_tid b = i == k % 5 ? rig_use(r, y) : mx_enc_temp(r->enc, rows, y->n_cols);
        mx_enc_op(
            r->enc,
            (mx_op){.kind = MX_OP_SOFTCAP, .n_in = 1, .n_out = 1, .in = {a}, .out = {b}, .p = p});
        a = b;
    }
    rig_run(r);
    rig_read(r, y, out);
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < (size_t)(y->n_rows * y->n_cols) * sizeof *out; i++) {
        h = (h ^ ((const uint8_t *)out)[i]) * 0x100000001b3u;
    }
    return h;
}

// Two places for plans and 10,000 shapes, some of them again: graphs come and go, the bits stay.
static void plans_come_and_go(void **state) {
    (void)state;
    need_gpu();
    enum { SHAPES = 10000, EVERY = 20, COLS = 64, ROWS = 3 };
    rig *r = &rigs[0];
    rng g = {seed};
    static float x[ROWS * COLS], out[ROWS * COLS];
    static uint64_t first[SHAPES];
    static const mx_budget any[MX_PHASES] = {{.max_ops = 2, .max_mb = MX_BUDGET_UNLIMITED},
                                             {.max_ops = 2, .max_mb = MX_BUDGET_UNLIMITED},
                                             {.max_ops = 2, .max_mb = MX_BUDGET_UNLIMITED}};
    mx_enc *own = r->enc;
    r->enc = mx_enc_open(r->b, any, 2, true);
    rng_fill(&g, x, MX_COUNT(x), 3);
    const mx_tensor *tx = rig_tensor(r, ROWS, COLS, x), *ty = rig_tensor(r, ROWS, COLS, NULL);
    for (int k = 0; k < SHAPES; k++) {
        first[k] = run_shape(r, tx, ty, k, out);
        float cap = 1.0f + (float)k / 16, want = x[7];
        for (int i = 0; i <= k % 5; i++) want = cap * tanhf(want / cap);
        assert_true(fabsf(out[7] - want) < 1e-4f);
    }
    for (int k = 0; k < SHAPES; k += EVERY) {
        assert_true(run_shape(r, tx, ty, k, out) == first[k]);
    }
    mx_enc_stats s;
    mx_enc_get_stats(r->enc, &s);
    mx_enc_close(r->enc);
    r->enc = own;
    assert_int_equal(s.plans_made, SHAPES + SHAPES / EVERY);
    assert_int_equal(s.plan_evictions, SHAPES + SHAPES / EVERY - 2);
    assert_true(first[0] != first[7]);
    rig_reset(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_case_of_the_matrix),
        cmocka_unit_test(formats_at_odd_shapes),
        cmocka_unit_test(odd_affine_shapes),
        cmocka_unit_test(long_rows),
        cmocka_unit_test(batches),
        cmocka_unit_test(exact_products),
        cmocka_unit_test(attention_by_every_schedule),
        cmocka_unit_test(attention_of_prompts_may_be_switched_off),
        cmocka_unit_test(sampling_follows_the_distribution),
        cmocka_unit_test(a_large_vocabulary_is_sampled_within_the_filters),
        cmocka_unit_test(rows_for_the_host_are_left_alone),
        cmocka_unit_test(embed_takes_the_token_sampled_before),
        cmocka_unit_test(budgets_change_no_bits),
        cmocka_unit_test(plans_come_and_go),
        cmocka_unit_test(slow_paths_are_counted),
    };
    return cmocka_run_group_tests(tests, open_rigs, close_rigs);
}
