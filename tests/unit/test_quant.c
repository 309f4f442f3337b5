// The scalar oracle against values made by other programs: gguf-py for GGUF's block types, MLX for
// affine (tests/data/quant, made by tests/golden/make_quant.py). And the quantisers.
#include "support/ckpt_writer.h"

#include <setjmp.h>
#include <stdarg.h>
// cmocka.h needs the two above
#include <cmocka.h>

#ifndef MX_TEST_DATA
#define MX_TEST_DATA "tests/data"
#endif

typedef struct golden {
    char *data;
    size_t n, at;
} golden;

static golden open_golden(const char *name) {
    golden g = {0};
    mx_err err = {0};
    char path[256];
    snprintf(path, sizeof path, "%s/quant/%s", MX_TEST_DATA, name);
    if (mx_read_file(path, 1 << 20, &g.data, &g.n, &err) != MX_OK) fail_msg("%s", err.msg);
    return g;
}

// The next n bytes, copied so that they are aligned and over-reads are seen.
static void *take(golden *g, size_t n) {
    assert_true(n <= g->n - g->at);
    void *p = mx_alloc(n);
    memcpy(p, g->data + g->at, n);
    g->at += n;
    return p;
}

static uint32_t take_u32(golden *g) {
    uint32_t *p = take(g, 4), v = *p;
    mx_free(p);
    return v;
}

static void assert_same_floats(const float *got, const float *want, size_t n, const char *what) {
    for (size_t i = 0; i < n; i++) {
        // 0 and -0 are one value: sources differ in the sign of 0 * negative
        if (mx_f32_bits(got[i]) != mx_f32_bits(want[i]) && got[i] != want[i]) {
            fail_msg("%s: element %zu of %zu: %a, expected %a", what, i, n, (double)got[i],
                     (double)want[i]);
        }
    }
}

static mx_dtype dtype_named(const char *name) {
    for (int t = 0; t < MX_DTYPE_COUNT; t++) {
        if (strcmp(mx_dtype_get((mx_dtype)t)->name, name) == 0) return (mx_dtype)t;
    }
    fail_msg("no type %s", name);
    return MX_F32;
}

static void gguf_blocks_mean_what_gguf_py_says(void **state) {
    (void)state;
    golden g = open_golden("gguf.bin");
    int n_rows = 0;
    for (; g.at < g.n; n_rows++) {
        char *name = take(&g, 8);
        uint32_t n = take_u32(&g), bytes = take_u32(&g);
        void *row = take(&g, bytes);
        float *want = take(&g, n * sizeof(float)), *got = mx_alloc(n * sizeof(float));
        mx_dtype t = dtype_named(name);
        size_t row_bytes;
        assert_true(mx_wfmt_row_bytes(mx_wfmt_of(t), n, &row_bytes) && row_bytes == bytes);
        mx_wview w = {.fmt = mx_wfmt_of(t), .n_rows = 1, .n_cols = n, .data = row};
        mx_dequant_row(&w, 0, got);
        assert_same_floats(got, want, n, name);
        mx_free(got);
        mx_free(want);
        mx_free(row);
        mx_free(name);
    }
    assert_int_equal(n_rows, 8 * 3);
    mx_free(g.data);
}

static void affine_rows_mean_what_mlx_says(void **state) {
    (void)state;
    static const mx_dtype types[] = {MX_F32, MX_F16, MX_BF16};
    golden g = open_golden("affine.bin");
    int n_rows = 0;
    for (; g.at < g.n; n_rows++) {
        mx_wfmt f = {.dtype = MX_AFFINE};
        f.bits = (uint8_t)take_u32(&g);
        f.group = (uint16_t)take_u32(&g);
        f.scale_dtype = types[take_u32(&g)];
        uint32_t n = take_u32(&g);
        size_t plane = n / f.group * (size_t)mx_dtype_get(f.scale_dtype)->block_bytes, codes;
        assert_true(mx_wfmt_code_bytes(f, n, &codes));
        void *c = take(&g, codes), *s = take(&g, plane), *b = take(&g, plane);
        float *want = take(&g, n * sizeof(float)), *got = mx_alloc(n * sizeof(float));
        mx_wview w = {.fmt = f, .n_rows = 1, .n_cols = n, .data = c, .scales = s, .biases = b};
        mx_dequant_row(&w, 0, got);
        char what[64];
        assert_same_floats(got, want, n, mx_wfmt_name(f, what, sizeof what));
        mx_free(got);
        mx_free(want);
        mx_free(b);
        mx_free(s);
        mx_free(c);
    }
    assert_int_equal(n_rows, 6 * 3 * 3);
    mx_free(g.data);
}

static void affine_rule_chooses_as_mlx_does(void **state) {
    (void)state;
    golden g = open_golden("affine_rule.bin");
    int n_rows = 0;
    for (; g.at < g.n; n_rows++) {
        mx_wfmt f = {.dtype = MX_AFFINE, .scale_dtype = MX_F32};
        f.bits = (uint8_t)take_u32(&g);
        f.group = (uint16_t)take_u32(&g);
        uint32_t n = take_u32(&g);
        size_t bytes, plane = n / f.group * sizeof(float);
        assert_true(mx_wfmt_code_bytes(f, n, &bytes));
        void *codes = take(&g, bytes), *mine = mx_calloc(bytes, 1);
        float *s = take(&g, plane), *b = take(&g, plane);
        float *ms = mx_alloc(plane), *mb = mx_alloc(plane), *x = mx_alloc(n * sizeof(float));
        ckpt_fill(x, n, "rule", 0, 0.1f);
        for (uint32_t i = 0; i < n; i++) x[i] += 0.05f * (float)((int)(i / f.group % 5) - 2);
        mx_quant_row_affine(f, x, n, mine, ms, mb);
        assert_same_floats(ms, s, n / f.group, "scales");
        assert_same_floats(mb, b, n / f.group, "biases");
        assert_memory_equal(mine, codes, bytes);
        mx_free(x);
        mx_free(mb);
        mx_free(ms);
        mx_free(b);
        mx_free(s);
        mx_free(mine);
        mx_free(codes);
    }
    assert_int_equal(n_rows, 6 * 3);
    mx_free(g.data);
}

// Every bits x group x scale type, several rows, widths that are whole groups but no whole tiles:
// the codes are known from the hash, not read back by the code under test.
static void affine_rows_of_any_width(void **state) {
    (void)state;
    static const uint8_t bits[] = {2, 3, 4, 5, 6, 8};
    static const mx_dtype types[] = {MX_F32, MX_F16, MX_BF16};
    enum { ROWS = 5 };
    uint64_t h = ckpt_name_hash("wide.weight");
    for (size_t i = 0; i < 6 * 3 * 3; i++) {
        mx_wfmt f = {MX_AFFINE, bits[i % 6], (uint16_t)(32 << (i / 6 % 3)), types[i / 18]};
        int64_t widths[] = {f.group, 3 * f.group, 544 / f.group * f.group, 608 / f.group * f.group};
        for (size_t k = 0; k < MX_COUNT(widths); k++) {
            int64_t n = widths[k], groups = n / f.group;
            size_t bytes, scale = (size_t)mx_dtype_get(f.scale_dtype)->block_bytes;
            assert_true(mx_wfmt_code_bytes(f, n, &bytes));
            void *codes = mx_alloc(ROWS * bytes), *s = mx_alloc(ROWS * (size_t)groups * scale);
            void *b = mx_alloc(ROWS * (size_t)groups * scale);
            float *out = mx_alloc((size_t)n * sizeof *out);
            ckpt_fill_affine(f, "wide", ROWS, n, 0.5f, codes, s, b);
            mx_wview w = {
                .fmt = f, .n_rows = ROWS, .n_cols = n, .data = codes, .scales = s, .biases = b};
            mx_wview sv = {.fmt = mx_wfmt_of(f.scale_dtype),
                           .n_rows = ROWS,
                           .n_cols = groups,
                           .data = s},
                     bv = sv;
            bv.data = b;
            for (int64_t r = 0; r < ROWS; r++) {
                float rs[32], rb[32];
                mx_dequant_row(&w, r, out);
                mx_dequant_row(&sv, r, rs);
                mx_dequant_row(&bv, r, rb);
                for (int64_t c = 0; c < n; c++) {
                    float code = (float)(ckpt_mix(h, (uint64_t)(r * n + c)) >> (64 - f.bits));
                    assert_true(out[c] == rs[c / f.group] * code + rb[c / f.group]);
                }
            }
            mx_free(out);
            mx_free(b);
            mx_free(s);
            mx_free(codes);
        }
    }
}

// Greatest error of quantising 5 blocks of values in [-1, 1), as a share of the step's size.
static float worst_error(mx_dtype t, float lo, float hi) {
    enum { N = 5 * 256 };
    float x[N], y[N], worst = 0;
    char row[N * 4];
    ckpt_fill(x, N, "error", 0, 1.0f);
    for (int i = 0; i < N; i++) x[i] = lo + (hi - lo) * 0.5f * (x[i] + 1.0f);
    memset(row, 0x5a, sizeof row);
    mx_quant_row(t, x, N, row);
    mx_wview w = {.fmt = mx_wfmt_of(t), .n_rows = 1, .n_cols = N, .data = row};
    mx_dequant_row(&w, 0, y);
    for (int i = 0; i < N; i++) worst = fmaxf(worst, fabsf(x[i] - y[i]));
    return worst;
}

static void quantisers_stay_near_their_input(void **state) {
    (void)state;
    static const struct {
        mx_dtype t;
        float limit; // about half of a step (a whole one at the far end of the symmetric types)
    } rows[] = {{MX_F32, 0},       {MX_F16, 0x1p-11f}, {MX_BF16, 0x1p-8f}, {MX_Q4_0, 0.126f},
                {MX_Q5_0, 0.063f}, {MX_Q4_1, 0.068f},  {MX_Q5_1, 0.034f},  {MX_Q8_0, 0.0045f},
                {MX_Q4_K, 0.09f},  {MX_Q5_K, 0.055f},  {MX_Q6_K, 0.036f}};
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        float e = worst_error(rows[i].t, -1, 1);
        if (e > rows[i].limit) {
            fail_msg("%s: error %g", mx_dtype_get(rows[i].t)->name, (double)e);
        }
    }
    assert_true(worst_error(MX_Q4_1, 2, 3) < 0.04f);
    assert_true(worst_error(MX_Q4_K, 2, 3) < 0.25f); // its minimum is never above 0
}

static void quantisers_take_any_input(void **state) {
    (void)state;
    static const mx_dtype types[] = {MX_Q4_0, MX_Q4_1, MX_Q5_0, MX_Q5_1,
                                     MX_Q8_0, MX_Q4_K, MX_Q5_K, MX_Q6_K};
    float x[256], y[256];
    char row[512];
    for (size_t k = 0; k < MX_COUNT(types); k++) {
        mx_wview w = {.fmt = mx_wfmt_of(types[k]), .n_rows = 1, .n_cols = 256, .data = row};
        memset(x, 0, sizeof x);
        mx_quant_row(types[k], x, 256, row);
        mx_dequant_row(&w, 0, y);
        for (int i = 0; i < 256; i++) assert_true(y[i] == 0);
        for (int i = 0; i < 256; i++) x[i] = i % 3 == 0 ? NAN : i % 3 == 1 ? 3e38f : -INFINITY;
        mx_quant_row(types[k], x, 256, row); // no crash, no undefined conversion
    }
}

static void plain_rows_convert(void **state) {
    (void)state;
    static const mx_dtype types[] = {MX_F32, MX_F16, MX_BF16};
    float x[7], y[7];
    char rows[64];
    ckpt_fill(x, 7, "plain", 0, 1.0f);
    for (size_t k = 0; k < 3; k++) {
        size_t bytes = (size_t)mx_dtype_get(types[k])->block_bytes;
        // one byte off: data of a checkpoint need not be aligned
        mx_quant_row(types[k], x, 7, rows + 1);
        mx_quant_row(types[k], x, 7, rows + 1 + 7 * bytes);
        mx_wview w = {.fmt = mx_wfmt_of(types[k]), .n_rows = 2, .n_cols = 7, .data = rows + 1};
        mx_dequant_row(&w, 1, y);
        for (int i = 0; i < 7; i++) assert_true(fabsf(x[i] - y[i]) <= 0x1p-8f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gguf_blocks_mean_what_gguf_py_says),
        cmocka_unit_test(affine_rows_mean_what_mlx_says),
        cmocka_unit_test(affine_rule_chooses_as_mlx_does),
        cmocka_unit_test(affine_rows_of_any_width),
        cmocka_unit_test(quantisers_stay_near_their_input),
        cmocka_unit_test(quantisers_take_any_input),
        cmocka_unit_test(plain_rows_convert),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
