// Every op on every instruction set and several thread counts: against the oracle within a
// tolerance, and bit for bit against each other, fused and expanded.
#include "support/op_cases.h"

#include "base/mem.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
// cmocka.h needs the four above
#include <cmocka.h>

enum { MAX_RIGS = 8, VOCAB = 12000 };

static rig rigs[MAX_RIGS];
static int n_rigs;
static const uint64_t seed = 20261130;

static int open_rigs(void **state) {
    (void)state;
    static const struct {
        cpu_isa isa;
        int threads;
        bool fuse;
    } want[] = {{CPU_ISA_SCALAR, 1, true},  {CPU_ISA_AVX2, 1, true},   {CPU_ISA_AVX512, 1, true},
                {CPU_ISA_AVX2, 3, true},    {CPU_ISA_AVX512, 2, true}, {CPU_ISA_AVX512, 2, false},
                {CPU_ISA_SCALAR, 2, false}, {CPU_ISA_AVXVNNI, 2, true}};
    cpu_isa_facts f;
    cpu_isa_read(&f);
    for (size_t i = 0; i < MX_COUNT(want); i++) {
        if (!cpu_isa_granted(&f, want[i].isa)) {
            printf("skipped: this machine does not grant %s\n", cpu_isa_name(want[i].isa));
            continue;
        }
        rig_open(&rigs[n_rigs++], (int)want[i].isa, want[i].threads, want[i].fuse, false, VOCAB);
    }
    return 0;
}

static int close_rigs(void **state) {
    (void)state;
    for (int i = 0; i < n_rigs; i++) rig_close(&rigs[i]);
    n_rigs = 0;
    return 0;
}

static void same_bits(const char *what, const char *who, const float *a, const float *b,
                      int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (memcmp(&a[i], &b[i], sizeof *a) == 0) continue;
        fail_msg("%s: %s differs at %lld: %.9g, expected %.9g", what, who, (long long)i,
                 (double)a[i], (double)b[i]);
    }
}

static void near_oracle(const char *what, const float *a, const double *b, int64_t n, double tol) {
    for (int64_t i = 0; i < n; i++) {
        if (fabs((double)a[i] - b[i]) <= tol * fmax(1, fabs(b[i]))) continue;
        fail_msg("%s: %.9g at %lld, oracle %.9g, tolerance %g", what, (double)a[i], (long long)i,
                 b[i], tol);
    }
}

static void check_case(const op_case *c, void *arg) {
    bool products = *(bool *)arg;
    char name[160];
    int64_t n = op_case_outputs(c);
    op_data d = op_case_inputs(c, seed);
    bool is_product = d.n_m > 0 && c->op != MX_OP_EMBED;
    if (is_product == products) {
        float *first = mx_calloc((size_t)n, sizeof *first),
              *out = mx_calloc((size_t)n, sizeof *out);
        double *want = mx_calloc((size_t)n, sizeof *want);
        op_case_name(c, name, sizeof name);
        op_case_oracle(c, &d, want);
        op_case_run(&rigs[0], c, &d, first);
        near_oracle(name, first, want, n, op_case_tolerance(c, false));
        for (int i = 1; i < n_rigs; i++) {
            op_case_run(&rigs[i], c, &d, out);
            same_bits(name, rigs[i].name, out, first, n);
        }
        mx_free(first);
        mx_free(out);
        mx_free(want);
    }
    op_case_free(&d);
}

static void lookups_and_pointwise_ops(void **state) {
    (void)state;
    op_cases_each(check_case, &(bool){false});
}

static void products(void **state) {
    (void)state;
    op_cases_each(check_case, &(bool){true});
}

// A row of a product does not depend on the rows beside it.
static void products_of_one_row_and_of_many_agree(void **state) {
    (void)state;
    for (int f = 0; f < OP_FORMATS; f++) {
        op_case c = {.op = MX_OP_NORM_GLU, .rows = 17, .n = 65, .k = 256};
        c.f = c.f2 = op_formats[f];
        op_data d = op_case_inputs(&c, seed);
        float all[17 * 65], one[65], *x = d.x[0];
        rig *r = &rigs[n_rigs - 3];
        op_case_run(r, &c, &d, all);
        c.rows = 1;
        for (int i = 0; i < 17; i++) {
            d.x[0] = x + i * 256;
            op_case_run(r, &c, &d, one);
            same_bits("one row", r->name, one, all + i * 65, 65);
        }
        d.x[0] = x;
        op_case_free(&d);
    }
}

static void exact_products(void **state) {
    (void)state;
    rig r;
    rig_open(&r, -1, 2, true, true, VOCAB);
    for (int f = 0; f < OP_FORMATS; f++) {
        op_case c = {.op = MX_OP_NORM_QKV, .rows = 3, .n = 33, .k = 256, .a = 1};
        c.f = c.f2 = op_formats[f];
        char name[160];
        op_data d = op_case_inputs(&c, seed);
        float out[3 * 64];
        double want[3 * 64];
        int64_t n = op_case_outputs(&c);
        assert_true(n <= 3 * 64);
        op_case_run(&r, &c, &d, out);
        op_case_oracle(&c, &d, want);
        near_oracle(op_case_name(&c, name, sizeof name), out, want, n, op_case_tolerance(&c, true));
        op_case_free(&d);
    }
    rig_close(&r);
}

// ---- Attention -------------------------------------------------------------------------------

static const attn_case attn_cases[] = {
    {9, 3, 64, 0, 0, 0, MX_F16, false, 2, {300, 40}},
    {4, 1, 256, 24, 1, 0, MX_F16, true, 2, {70, 33}},
    {6, 2, 80, 100, 2, 50, MX_F32, false, 2, {270, 20}},
    {3, 1, 64, 0, 0, 20, MX_F16, true, 2, {70, 33}},
    {4, 4, 96, 0, 1, 0, MX_F16, false, 1, {50}},
    {8, 1, 128, 300, 0, 30, MX_F16, true, 1, {560}},
    {5, 1, 36, 0, 0, 0, MX_F32, false, 1, {40}},
    {49, 1, 32, 0, 1, 0, MX_F16, false, 1, {20}},
};

static void check_attn(const attn_case *c) {
    int64_t n = attn_case_outputs(c);
    attn_data d = attn_case_inputs(c, seed);
    float *first = mx_calloc((size_t)n, sizeof *first), *out = mx_calloc((size_t)n, sizeof *out);
    double *want = mx_calloc((size_t)n, sizeof *want);
    char name[96];
    int fast = n_rigs > 2 ? 2 : n_rigs - 1;
    attn_case_oracle(c, &d, want);
    attn_case_run(&rigs[fast], c, &d, ATTN_WHOLE, c->group, first);
    snprintf(name, sizeof name, "attention %d/%d heads of %d, window %d", c->n_head, c->n_kv,
             c->head_dim, c->window);
    near_oracle(name, first, want, n, c->type == MX_F16 ? 2e-3 : 2e-5);
    double work = 0;
    for (int i = 0; i < c->n_seqs; i++)
        work += c->len[i] * c->len[i] * (double)c->n_head * c->head_dim;
    for (int i = 0; i < n_rigs; i++) {
        if (work > 3e6 && !strncmp(rigs[i].name, "scalar", 6)) continue; // slow
        // every schedule and storage on some configuration, each configuration with some
        for (int s = i % 2; s < ATTN_SCHEDULES; s += 2) {
            attn_case_run(&rigs[i], c, &d, (attn_schedule)s, (c->group + i + s) % RIG_GROUPS, out);
            snprintf(name + 60, sizeof name - 60, ", schedule %d", s);
            same_bits(name, rigs[i].name, out, first, n);
        }
    }
    mx_free(first);
    mx_free(out);
    mx_free(want);
    attn_case_free(&d);
}

static void attention_is_the_same_by_any_way(void **state) {
    (void)state;
    for (size_t i = 0; i < MX_COUNT(attn_cases); i++) check_attn(&attn_cases[i]);
}

// A token that only the device knows: -1 - k is output k of the step before.
static void embed_takes_the_token_sampled_before(void **state) {
    (void)state;
    rig *r = &rigs[n_rigs - 1];
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
        same_bits("embed", r->name, got + 32 * i, want, 32);
    }
    rig_reset(r);
    mx_free(m.owner);
}

static void rows_for_the_host_are_left_alone(void **state) {
    (void)state;
    rig *r = &rigs[0];
    float logits[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const mx_tensor *x = rig_tensor(r, 2, 4, logits);
    int32_t seq = 0, pos = 0, n = 2;
    mx_step_io *io = &r->io[r->slot];
    rig_begin(r, 1, &seq, &pos, &n, 2, 1);
    io->sample[0].host = 1;
    io->out_id[0] = -7;
    rig_op(r, MX_OP_SAMPLE, (mx_op_params){.words = {0}}, 1, &x, 0, NULL);
    rig_run(r);
    assert_int_equal(io->out_id[0], -7);
    assert_int_equal(io->out_id[1], 3);
    rig_reset(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lookups_and_pointwise_ops),
        cmocka_unit_test(products),
        cmocka_unit_test(products_of_one_row_and_of_many_agree),
        cmocka_unit_test(exact_products),
        cmocka_unit_test(attention_is_the_same_by_any_way),
        cmocka_unit_test(embed_takes_the_token_sampled_before),
        cmocka_unit_test(rows_for_the_host_are_left_alone),
    };
    return cmocka_run_group_tests(tests, open_rigs, close_rigs);
}
