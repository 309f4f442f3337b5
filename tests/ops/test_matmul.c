// CPU matrix products: every weight format against a double product of the values that the format
// defines, and bit equality between instruction sets, numbers of rows, tile splits and formats that
// say the same weight. Takes a seed as its argument (the default is fixed); prints it.
#include "backend/cpu/cpu_int.h"
#include "backend/cpu/isa.h"
#include "base/mem.h"
#include "tensor/half.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the ones above
#include <cmocka.h>

enum { MAX_ROWS = 129, MAX_TOK = 65, MAX_ISA = CPU_ISA_COUNT };

static uint64_t seed = 20261130;
static const cpu_kernels *isa[MAX_ISA];
static int n_isa;

static void find_isas(void) {
    isa[n_isa++] = &cpu_kernels_scalar;
#if defined(__x86_64__)
    cpu_isa_facts f;
    cpu_isa_read(&f);
    if (cpu_isa_granted(&f, CPU_ISA_AVX2)) isa[n_isa++] = &cpu_kernels_avx2;
    if (cpu_isa_granted(&f, CPU_ISA_AVXVNNI)) isa[n_isa++] = &cpu_kernels_avxvnni;
    if (cpu_isa_granted(&f, CPU_ISA_AVX512)) isa[n_isa++] = &cpu_kernels_avx512;
#endif
}

// ---- Random data
// ----------------------------------------------------------------------------------

static uint64_t rng;

static uint32_t next(void) {
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    uint64_t x = rng ^ rng >> 29;
    return (uint32_t)((x * 0x9e3779b97f4a7c15u) >> 32);
}
static float uniform(void) { // -1 .. 1
    return (float)(int32_t)next() * 4.656612873077393e-10f;
}
static float normal(void) {
    float s = 0;
    for (int i = 0; i < 6; i++) s += uniform();
    return s * 0.7071f;
}

typedef struct weight {
    mx_wview v;
    uint8_t *data, *scales, *biases;
} weight;

static void put_scale(mx_dtype t, uint8_t *p, float x) {
    uint16_t h = t == MX_F16 ? mx_f32_to_f16(x) : mx_f32_to_bf16(x);
    if (t == MX_F32)
        memcpy(p, &x, 4);
    else
        memcpy(p, &h, 2);
}

// Random bits everywhere but in the scales, which are of a weight's usual size and either sign.
static void random_blocks(mx_dtype t, uint8_t *p, size_t n_blocks) {
    size_t bytes = (size_t)mx_dtype_get(t)->block_bytes;
    for (; n_blocks > 0; n_blocks--, p += bytes) {
        for (size_t i = 0; i < bytes; i++) p[i] = (uint8_t)next();
        float s = 0.02f * uniform();
        if (t == MX_Q4_K || t == MX_Q5_K) s *= 0.05f;
        if (t == MX_Q6_K)
            put_scale(MX_F16, p + 208, s * 0.02f);
        else
            put_scale(MX_F16, p, s);
        bool two = t == MX_Q4_1 || t == MX_Q5_1 || t == MX_Q4_K || t == MX_Q5_K;
        if (two) put_scale(MX_F16, p + 2, -8 * s + 0.02f * uniform());
    }
}

static weight make_weight(mx_wfmt f, int64_t n_rows, int64_t n_cols) {
    weight w = {.v = {.fmt = f, .n_rows = n_rows, .n_cols = n_cols}};
    size_t row;
    assert_true(f.dtype == MX_AFFINE ? mx_wfmt_code_bytes(f, n_cols, &row)
                                     : mx_wfmt_row_bytes(f, n_cols, &row));
    size_t bytes = row * (size_t)n_rows;
    w.data = mx_alloc(bytes);
    if (mx_dtype_is_float(f.dtype)) {
        size_t es = (size_t)mx_dtype_get(f.dtype)->block_bytes;
        for (size_t i = 0; i < bytes; i += es) put_scale(f.dtype, w.data + i, 0.05f * normal());
    } else if (f.dtype != MX_AFFINE) {
        random_blocks(f.dtype, w.data, bytes / (size_t)mx_dtype_get(f.dtype)->block_bytes);
    } else {
        for (size_t i = 0; i < bytes; i++) w.data[i] = (uint8_t)next();
        size_t es = f.scale_dtype == MX_F32 ? 4 : 2, n = (size_t)(n_rows * n_cols / f.group);
        w.scales = mx_alloc(n * es);
        w.biases = mx_alloc(n * es);
        for (size_t i = 0; i < n; i++) {
            float s = 0.3f * uniform() / (float)(1 << f.bits);
            put_scale(f.scale_dtype, w.scales + i * es, s);
            put_scale(f.scale_dtype, w.biases + i * es,
                      -s * (float)(1 << (f.bits - 1)) + 0.02f * uniform());
        }
    }
    w.v.data = w.data;
    w.v.scales = w.scales;
    w.v.biases = w.biases;
    return w;
}

static void free_weight(weight *w) {
    mx_free(w->data);
    mx_free(w->scales);
    mx_free(w->biases);
}

// ---- One product through a table
// -------------------------------------------------------------------

typedef struct packed {
    mx_tensor t;
    uint8_t *data;
    size_t bytes;
    int64_t n_tiles;
} packed;

static packed pack_weight(const cpu_kernels *k, const mx_wview *v, bool exact) {
    packed p = {.t = {.n_rows = v->n_rows, .n_cols = v->n_cols, .fmt = v->fmt}};
    p.t.layout = MX_LAYOUT_PACKED;
    p.bytes = k->pack_bytes(v->fmt, v->n_rows, v->n_cols, exact, &p.t.pack);
    assert_true(p.bytes > 0);
    p.t.n_bytes = p.bytes;
    p.data = mx_alloc_large(p.bytes);
    p.n_tiles = (v->n_rows + k->tile_rows - 1) / k->tile_rows;
    k->pack(v, p.t.pack, p.n_tiles / 2, p.n_tiles, p.data); // any order
    k->pack(v, p.t.pack, 0, p.n_tiles / 2, p.data);
    return p;
}

static void free_packed(packed *p) {
    mx_free_large(p->data, p->bytes);
}

// y (n_tok, n_rows) = x w; the rows of x are n_cols apart. cut: first tile of the second half.
static void product(const cpu_kernels *k, const packed *p, const float *x, int64_t n_tok,
                    int64_t cut, float *y) {
    cpu_act_kind kind = k->act_kind(&p->t);
    size_t bytes = k->act_bytes(kind, p->t.n_cols, n_tok);
    void *act = mx_alloc_large(bytes);
    k->act_prepare(kind, x, p->t.n_cols, p->t.n_cols, n_tok / 3, n_tok, NULL, 0, act);
    k->act_prepare(kind, x, p->t.n_cols, p->t.n_cols, 0, n_tok / 3, NULL, 0, act);
    cpu_mul m = {.w = &p->t, .data = p->data, .act = act, .n_tok = n_tok, .y = y};
    m.ldy = p->t.n_rows;
    k->mul(&m, 0, cut);
    k->mul(&m, cut, p->n_tiles);
    mx_free_large(act, bytes);
}

static float *random_floats(size_t n, float scale) {
    float *x = mx_alloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = scale * normal() * (next() % 64 ? 1.0f : 8.0f);
    return x;
}

// What the kernels make of x: int8 per group, as floats.
static void round_activations(const float *x, int64_t n, int group, float *out) {
    for (int64_t k = 0; k < n; k += group) {
        float top = 0;
        for (int i = 0; i < group; i++) top = fmaxf(top, fabsf(x[k + i]));
        float d = top / 127.0f, r = 127.0f / top;
        for (int i = 0; i < group; i++) out[k + i] = d * rintf(x[k + i] * r);
    }
}

static const mx_wfmt formats[] = {
    {.dtype = MX_F32},
    {.dtype = MX_F16},
    {.dtype = MX_BF16},
    {.dtype = MX_Q4_0},
    {.dtype = MX_Q4_1},
    {.dtype = MX_Q5_0},
    {.dtype = MX_Q5_1},
    {.dtype = MX_Q8_0},
    {.dtype = MX_Q4_K},
    {.dtype = MX_Q5_K},
    {.dtype = MX_Q6_K},
    {MX_AFFINE, 4, 32, MX_F16},
    {MX_AFFINE, 4, 64, MX_BF16},
    {MX_AFFINE, 4, 64, MX_F16},
    {MX_AFFINE, 4, 128, MX_F32},
    {MX_AFFINE, 8, 32, MX_F32},
    {MX_AFFINE, 8, 64, MX_BF16},
    {MX_AFFINE, 8, 128, MX_F16},
    {MX_AFFINE, 2, 64, MX_BF16},
    {MX_AFFINE, 2, 32, MX_F16},
    {MX_AFFINE, 3, 64, MX_F16},
    {MX_AFFINE, 3, 32, MX_BF16},
    {MX_AFFINE, 5, 64, MX_F32},
    {MX_AFFINE, 5, 32, MX_F16},
    {MX_AFFINE, 6, 128, MX_BF16},
    {MX_AFFINE, 6, 32, MX_F16},
};

static int group_of(mx_wfmt f) { // columns that K must divide into
    if (mx_dtype_is_float(f.dtype)) return 1;
    return f.dtype == MX_AFFINE ? f.group : mx_dtype_get(f.dtype)->block_elems;
}

static bool coded(mx_wfmt f) {
    return !mx_dtype_is_float(f.dtype);
}

// ---- Tests
// -----------------------------------------------------------------------------------------

static void fail_at(const char *what, mx_wfmt f, int64_t n_cols, int64_t n, int64_t at) {
    char name[64];
    fail_msg("%s: %s, %d columns, %d: element %d (seed %llu)", what,
             mx_wfmt_name(f, name, sizeof name), (int)n_cols, (int)n, (int)at,
             (unsigned long long)seed);
}

static void must_equal(const char *what, const float *a, int64_t lda, const float *b, int64_t ldb,
                       int64_t rows, int64_t n, mx_wfmt f, int64_t n_cols) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < n; i++) {
            if (memcmp(a + r * lda + i, b + r * ldb + i, sizeof *a)) {
                fail_at(what, f, n_cols, rows, r * lda + i);
            }
        }
    }
}

// Result y (MAX_TOK, MAX_ROWS) against a double product with the values that the format defines
// and the activations as the kernels round them; and the whole scheme's error.
static void check_values(const weight *w, bool exact, const float *x, const float *y) {
    mx_wfmt f = w->v.fmt;
    int64_t n_cols = w->v.n_cols;
    bool rounded = coded(f) && !exact;
    float *row = mx_alloc((size_t)n_cols * sizeof *row),
          *xr = mx_alloc((size_t)n_cols * sizeof *xr);
    double err2 = 0, sum2 = 0;
    for (int64_t t = 0; t < MAX_TOK; t += 21) {
        const float *xt = x + t * n_cols;
        memcpy(xr, xt, (size_t)n_cols * sizeof *xr);
        if (rounded) round_activations(xt, n_cols, f.group > 32 ? 64 : 32, xr);
        for (int64_t r = 0; r < MAX_ROWS; r++) {
            double want = 0, size = 0, plain = 0, got = y[t * MAX_ROWS + r];
            mx_dequant_row(&w->v, r, row);
            for (int64_t k = 0; k < n_cols; k++) {
                want += (double)row[k] * xr[k];
                plain += (double)row[k] * xt[k];
                size += fabs((double)row[k] * xr[k]);
            }
            if (!(fabs(got - want) <= 2e-6 * size)) fail_at("value", f, n_cols, t, r);
            err2 += (got - plain) * (got - plain);
            sum2 += plain * plain;
        }
    }
    if (!(sqrt(err2 / sum2) < (rounded ? 2e-2 : 2e-6))) fail_at("error", f, n_cols, 0, 0);
    mx_free(row);
    mx_free(xr);
}

static void check_rows(const weight *w, bool exact, const float *x, const float *want) {
    static const int counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 64, 65};
    int64_t n_cols = w->v.n_cols;
    float *y = mx_alloc(sizeof(float) * MAX_TOK * MAX_ROWS);
    for (int i = 0; i < n_isa; i++) {
        packed p = pack_weight(isa[i], &w->v, exact);
        for (size_t c = 0; c < MX_COUNT(counts); c++) {
            if (i == 0 && counts[c] > 3) break; // the scalar set is slow
            product(isa[i], &p, x, counts[c], (int64_t)c % p.n_tiles, y);
            must_equal(isa[i]->isa, y, MAX_ROWS, want, MAX_ROWS, counts[c], MAX_ROWS, w->v.fmt,
                       n_cols);
        }
        free_packed(&p);
    }
    mx_free(y);
}

static void check_shapes(const weight *w, bool exact, const float *x, const float *want) {
    static const int sizes[] = {1, 4, 5, 7, 8, 31, 32, 33, 63, 65, 96, 127, 129};
    float *y = mx_alloc(sizeof(float) * (5 * MAX_ROWS + 1));
    for (size_t s = 0; s < MX_COUNT(sizes); s++) {
        int64_t n = sizes[s];
        mx_wview v = mx_wview_rows(&w->v, 0, n);
        for (int i = 1; i < n_isa; i++) {
            packed p = pack_weight(isa[i], &v, exact);
            for (int tok = 1; tok <= 5; tok += 4) {
                y[tok * n] = 12345.0f; // must stay
                product(isa[i], &p, x, tok, 0, y);
                must_equal("rows of the weight", y, n, want, MAX_ROWS, tok, n, v.fmt, v.n_cols);
                assert_true(y[tok * n] == 12345.0f);
            }
            free_packed(&p);
        }
    }
    mx_free(y);
}

static void check_format(mx_wfmt f, int64_t n_cols, bool exact) {
    rng = seed + (uint64_t)n_cols;
    weight w = make_weight(f, MAX_ROWS, n_cols);
    float *x = random_floats((size_t)(MAX_TOK * n_cols), 1.0f);
    float *y = mx_alloc(sizeof(float) * MAX_TOK * MAX_ROWS);
    packed p = pack_weight(isa[n_isa - 1], &w.v, exact);
    product(isa[n_isa - 1], &p, x, MAX_TOK, 0, y);
    free_packed(&p);
    check_values(&w, exact, x, y);
    check_rows(&w, exact, x, y);
    if (n_cols < 200) check_shapes(&w, exact, x, y);
    mx_free(x);
    mx_free(y);
    free_weight(&w);
}

static void check_formats(bool want_coded, bool exact, int part) {
    static const int sizes[] = {528, 544, 608};
    for (size_t i = 0; i < MX_COUNT(formats); i++) {
        int group = group_of(formats[i]);
        if (coded(formats[i]) != want_coded || (int)(i % 4) != part) continue;
        check_format(formats[i], group, exact);
        check_format(formats[i], 3 * group, exact);
        for (size_t s = 0; s < MX_COUNT(sizes); s++) {
            if (sizes[s] % group == 0) check_format(formats[i], sizes[s], exact);
        }
        if (group == 256) check_format(formats[i], 5 * group, exact);
    }
}

static void coded_weights_0(void **state) {
    (void)state;
    check_formats(true, false, 0);
}
static void coded_weights_1(void **state) {
    (void)state;
    check_formats(true, false, 1);
}
static void coded_weights_2(void **state) {
    (void)state;
    check_formats(true, false, 2);
}
static void coded_weights_3(void **state) {
    (void)state;
    check_formats(true, false, 3);
}
static void float_weights(void **state) {
    (void)state;
    for (int part = 0; part < 4; part++) check_formats(false, false, part);
}
static void coded_weights_exact(void **state) {
    (void)state;
    static const uint8_t picked[] = {3, 4, 7, 8, 10, 12, 16, 20};
    for (size_t i = 0; i < MX_COUNT(picked); i++) {
        check_format(formats[picked[i]], 256, true);
        check_format(formats[picked[i]], group_of(formats[picked[i]]), true);
    }
}

// Another weight with the same values in affine form.
static weight as_affine(const weight *w, int bits) {
    mx_dtype t = w->v.fmt.dtype;
    mx_wfmt f = {MX_AFFINE, (uint8_t)bits, 32, MX_F16};
    weight a = make_weight(f, w->v.n_rows, w->v.n_cols);
    size_t block = (size_t)mx_dtype_get(t)->block_bytes,
           n = (size_t)(w->v.n_rows * w->v.n_cols / 32);
    bool asym = t == MX_Q4_1 || t == MX_Q5_1;
    memset(a.data, 0, n * 4 * (size_t)bits);
    for (size_t b = 0; b < n; b++) {
        const uint8_t *p = w->data + b * block;
        uint16_t d;
        memcpy(&d, p, 2);
        memcpy(a.scales + 2 * b, p, 2);
        if (asym)
            memcpy(a.biases + 2 * b, p + 2, 2);
        else
            put_scale(MX_F16, a.biases + 2 * b, -(float)(1 << (bits - 1)) * mx_f16_to_f32(d));
        p += asym ? 4 : 2;
        uint8_t *out = a.data + b * 4 * (size_t)bits;
        for (int i = 0; i < 32; i++) {
            int c = bits == 8 ? p[i] ^ 128 : p[(bits == 5 ? 4 : 0) + i % 16] >> (i / 16 * 4) & 15;
            if (bits == 5) c |= (p[i / 8] >> i % 8 & 1) << 4;
            for (int j = 0; j < bits; j++) {
                int at = i * bits + j;
                out[at / 8] = (uint8_t)(out[at / 8] | (c >> j & 1) << at % 8);
            }
        }
    }
    return a;
}

static void equal_weights_give_equal_bits(void **state) {
    (void)state;
    static const struct {
        mx_dtype t;
        int bits;
    } cases[] = {{MX_Q4_0, 4}, {MX_Q4_1, 4}, {MX_Q5_0, 5}, {MX_Q5_1, 5}, {MX_Q8_0, 8}};
    enum { K = 352, N = 40, TOK = 19 };
    rng = seed;
    float *x = random_floats(TOK * K, 1.0f);
    float *y[2] = {mx_alloc(sizeof(float) * TOK * N), mx_alloc(sizeof(float) * TOK * N)};
    for (size_t c = 0; c < MX_COUNT(cases); c++) {
        weight w = make_weight(mx_wfmt_of(cases[c].t), N, K), a = as_affine(&w, cases[c].bits);
        for (int i = 0; i < n_isa; i++) {
            packed p = pack_weight(isa[i], &w.v, false), q = pack_weight(isa[i], &a.v, false);
            product(isa[i], &p, x, TOK, 1, y[0]);
            product(isa[i], &q, x, TOK, 2, y[1]);
            must_equal("affine form", y[0], N, y[1], N, TOK, N, w.v.fmt, K);
            free_packed(&p);
            free_packed(&q);
        }
        free_weight(&w);
        free_weight(&a);
    }
    mx_free(x);
    mx_free(y[0]);
    mx_free(y[1]);
}

// Every code and every activation at its largest: sums of 16-bit pairs must not saturate.
static void largest_codes_do_not_saturate(void **state) {
    (void)state;
    enum { K = 256, TOK = 9 };
    rng = seed;
    float *x = mx_alloc(sizeof(float) * TOK * K), y[TOK * 16];
    for (int i = 0; i < TOK * K; i++) x[i] = i / K % 2 ? -1.0f : 1.0f;
    for (size_t f = 0; f < MX_COUNT(formats); f++) {
        weight w = make_weight(formats[f], 16, K);
        for (int fill = 0; fill < 2 && coded(formats[f]); fill++) {
            size_t row, block = (size_t)mx_dtype_get(formats[f].dtype)->block_bytes;
            bool affine = formats[f].dtype == MX_AFFINE;
            assert_true(affine ? mx_wfmt_code_bytes(formats[f], K, &row)
                               : mx_wfmt_row_bytes(formats[f], K, &row));
            if (affine) block = row;
            for (size_t b = 0; b < 16 * row; b += block) {
                uint8_t head[4];
                size_t keep = affine ? 0 : formats[f].dtype == MX_Q6_K ? 2 : 4;
                uint8_t *at = w.data + b + (formats[f].dtype == MX_Q6_K ? 208 : 0);
                memcpy(head, at, keep);
                memset(w.data + b, fill ? 0xff : 0, block);
                memcpy(at, head, keep);
            }
            float values[K];
            for (int i = 0; i < n_isa; i++) {
                packed p = pack_weight(isa[i], &w.v, false);
                product(isa[i], &p, x, TOK, 0, y);
                for (int r = 0; r < 16; r++) {
                    double want = 0, size = 0;
                    mx_dequant_row(&w.v, r, values);
                    for (int k = 0; k < K; k++) want += values[k];
                    for (int k = 0; k < K; k++) size += fabs((double)values[k]);
                    for (int t = 0; t < TOK; t++) {
                        double got = t % 2 ? -y[16 * t + r] : y[16 * t + r];
                        if (!(fabs(got - want) <= 1e-5 * size + 1e-9)) {
                            fail_at(isa[i]->isa, formats[f], K, t, r);
                        }
                    }
                }
                free_packed(&p);
            }
        }
        free_weight(&w);
    }
    mx_free(x);
}

static void bias_and_residual_are_added(void **state) {
    (void)state;
    enum { K = 64, N = 37, TOK = 11, LD = 41 };
    rng = seed;
    weight w = make_weight(mx_wfmt_of(MX_Q4_1), N, K);
    float *x = random_floats(TOK * K, 1.0f), *bias = random_floats(N, 1.0f);
    float *res = random_floats(TOK * LD, 1.0f), plain[TOK * N], y[TOK * LD];
    for (int i = 0; i < n_isa; i++) {
        const cpu_kernels *k = isa[i];
        packed p = pack_weight(k, &w.v, false);
        product(k, &p, x, TOK, 1, plain);
        size_t bytes = k->act_bytes(CPU_ACT_Q32, K, TOK);
        void *act = mx_alloc_large(bytes);
        k->act_prepare(CPU_ACT_Q32, x, K, K, 0, TOK, NULL, 0, act);
        cpu_mul m = {.w = &p.t, .data = p.data, .act = act, .n_tok = TOK, .y = y, .ldy = LD};
        m.bias = bias;
        m.residual = res;
        m.ld_res = LD;
        k->mul(&m, 0, p.n_tiles);
        for (int t = 0; t < TOK; t++) {
            for (int r = 0; r < N; r++) {
                float want = plain[t * N + r] + bias[r] + res[t * LD + r];
                assert_memory_equal(&want, &y[t * LD + r], sizeof want);
            }
        }
        mx_free_large(act, bytes);
        free_packed(&p);
    }
    mx_free(x);
    mx_free(bias);
    mx_free(res);
    free_weight(&w);
}

static void check_glu(const cpu_kernels *k, mx_wfmt f, mx_wfmt f2, bool exact, int n_tok,
                      int32_t act_kind) {
    enum { K = 256, N = 85 };
    rng = seed;
    weight a = make_weight(f, N, K), b = make_weight(f2, N, K);
    packed p = pack_weight(k, &a.v, exact), q = pack_weight(k, &b.v, exact);
    float *x = random_floats((size_t)n_tok * K, 1.0f);
    size_t n = sizeof(float) * (size_t)n_tok * N;
    float *gate = mx_alloc(n), *up = mx_alloc(n), *y = mx_alloc(n);
    product(k, &p, x, n_tok, 1, gate);
    product(k, &q, x, n_tok, 1, up);
    k->glu(gate, up, act_kind, (int64_t)n_tok * N, gate);
    cpu_act_kind kind = k->act_kind(&p.t);
    size_t bytes = k->act_bytes(kind, K, n_tok);
    void *act = mx_alloc_large(bytes);
    k->act_prepare(kind, x, K, K, 0, n_tok, NULL, 0, act);
    cpu_mul_glu m = {.w2 = &q.t, .data2 = q.data, .act = act_kind};
    m.gate = (cpu_mul){.w = &p.t, .data = p.data, .act = act, .n_tok = n_tok, .y = y, .ldy = N};
    k->mul_glu(&m, 0, 2);
    k->mul_glu(&m, 2, p.n_tiles);
    must_equal("gated", y, N, gate, N, n_tok, N, f, K);
    mx_free_large(act, bytes);
    mx_free(gate);
    mx_free(up);
    mx_free(y);
    mx_free(x);
    free_packed(&p);
    free_packed(&q);
    free_weight(&a);
    free_weight(&b);
}

static void gated_product_is_two_products(void **state) {
    (void)state;
    static const int counts[] = {1, 2, 4, 8, 13, 70};
    mx_wfmt q41 = mx_wfmt_of(MX_Q4_1), q4k = mx_wfmt_of(MX_Q4_K), bf = mx_wfmt_of(MX_BF16);
    for (int i = 0; i < n_isa; i++) {
        for (size_t c = 0; c < MX_COUNT(counts); c++) {
            check_glu(isa[i], q41, q41, false, counts[c], MX_ACT_SILU);
            check_glu(isa[i], q4k, q41, false, counts[c], MX_ACT_GELU_TANH);
            check_glu(isa[i], bf, bf, false, counts[c], MX_ACT_SILU);
            check_glu(isa[i], bf, q41, true, counts[c], MX_ACT_SILU);
        }
    }
}

static void norm_is_the_op_and_then_rounding(void **state) {
    (void)state;
    enum { K = 192, TOK = 11 };
    rng = seed;
    float *x = random_floats(TOK * K, 3.0f), *w = random_floats(K, 1.0f), row[TOK * K];
    for (int i = 0; i < n_isa; i++) {
        for (int kind = 0; kind < CPU_ACT_KINDS; kind++) {
            const cpu_kernels *k = isa[i];
            size_t bytes = k->act_bytes((cpu_act_kind)kind, K, TOK);
            void *a = mx_alloc_large(bytes), *b = mx_alloc_large(bytes);
            memset(a, 0, bytes);
            memset(b, 0, bytes);
            for (int t = 0; t < TOK; t++) k->rms_norm(x + t * K, w, 1e-5f, K, row + t * K);
            k->act_prepare((cpu_act_kind)kind, x, K, K, 0, TOK, w, 1e-5f, a);
            k->act_prepare((cpu_act_kind)kind, row, K, K, 0, TOK, NULL, 0, b);
            assert_memory_equal(a, b, bytes);
            isa[0]->act_prepare((cpu_act_kind)kind, x, K, K, 0, TOK, w, 1e-5f, b);
            assert_memory_equal(a, b, bytes);
            mx_free_large(a, bytes);
            mx_free_large(b, bytes);
        }
    }
    mx_free(x);
    mx_free(w);
}

static void odd_activations(void **state) {
    (void)state;
    enum { K = 128, N = 16, TOK = 5 };
    rng = seed;
    weight w = make_weight((mx_wfmt){MX_AFFINE, 4, 64, MX_BF16}, N, K);
    float x[TOK * K] = {0}, y[TOK * N]; // row 0: zeros
    for (int i = 0; i < K; i++) x[K + i] = 1e-38f * (float)(i + 1) * 0.001f;
    for (int i = 0; i < K; i++) x[2 * K + i] = x[3 * K + i] = x[4 * K + i] = 1.0f;
    x[2 * K + 3] = INFINITY;
    x[3 * K + 100] = -NAN;
    for (int i = 0; i < n_isa; i++) {
        packed p = pack_weight(isa[i], &w.v, false);
        product(isa[i], &p, x, TOK, 0, y);
        for (int r = 0; r < N; r++) {
            assert_true(y[r] == 0.0f && fabsf(y[N + r]) < 1e-30f);
            assert_true(isnan(y[2 * N + r]) && isnan(y[3 * N + r]) && isfinite(y[4 * N + r]));
        }
        free_packed(&p);
    }
    free_weight(&w);
}

static void unpacked_rows_are_the_formats_values(void **state) {
    (void)state;
    enum { K = 512, N = 19 };
    float want[K], got[K];
    rng = seed;
    for (size_t f = 0; f < MX_COUNT(formats); f++) {
        weight w = make_weight(formats[f], N, K);
        for (int i = 0; i < n_isa; i++) {
            packed p = pack_weight(isa[i], &w.v, false);
            mx_tensor rows = {.n_rows = N, .n_cols = K, .fmt = formats[f], .offset = 64};
            rows.scales_offset = 64 + (size_t)(w.scales - w.data);
            rows.biases_offset = 64 + (size_t)(w.biases - w.data);
            for (int r = 0; r < N; r++) {
                mx_dequant_row(&w.v, r, want);
                isa[i]->unpack_row(&p.t, p.data, r, got);
                for (int k = 0; k < K; k++) {
                    if (want[k] != got[k]) fail_at("unpacked", formats[f], K, r, k);
                }
                isa[i]->unpack_row(&rows, w.data, r, got);
                assert_memory_equal(want, got, sizeof want);
            }
            free_packed(&p);
        }
        free_weight(&w);
    }
}

static void packed_size_is_the_files(void **state) {
    (void)state;
    for (size_t f = 0; f < MX_COUNT(formats); f++) {
        uint16_t pack;
        for (int64_t k = 512; k <= 2048; k += 512) {
            size_t bytes = isa[0]->pack_bytes(formats[f], 64, k, false, &pack);
            double bits = 8.0 * (double)bytes / (64.0 * (double)k);
            double want = mx_wfmt_bits_per_weight(formats[f]);
            if (fabs(bits / want - 1) > 0.05) fail_at("size", formats[f], k, (int64_t)bytes, 0);
            assert_int_equal(bytes % 64, 0);
        }
    }
    uint16_t pack;
    assert_int_equal(isa[0]->pack_bytes(mx_wfmt_of(MX_I8), 16, 64, false, &pack), 0);
    assert_int_equal(isa[0]->pack_bytes(mx_wfmt_of(MX_Q4_0), 16, 48, false, &pack), 0);
}

int main(int argc, char **argv) {
    if (argc > 1) seed = strtoull(argv[1], NULL, 10);
    find_isas();
    printf("seed %llu, %d instruction sets\n", (unsigned long long)seed, n_isa);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unpacked_rows_are_the_formats_values),
        cmocka_unit_test(packed_size_is_the_files),
        cmocka_unit_test(coded_weights_0),
        cmocka_unit_test(coded_weights_1),
        cmocka_unit_test(coded_weights_2),
        cmocka_unit_test(coded_weights_3),
        cmocka_unit_test(float_weights),
        cmocka_unit_test(coded_weights_exact),
        cmocka_unit_test(equal_weights_give_equal_bits),
        cmocka_unit_test(largest_codes_do_not_saturate),
        cmocka_unit_test(bias_and_residual_are_added),
        cmocka_unit_test(gated_product_is_two_products),
        cmocka_unit_test(norm_is_the_op_and_then_rounding),
        cmocka_unit_test(odd_activations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
