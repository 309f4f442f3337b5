// tensor: the type table, row arithmetic, views, 16-bit floats, weights from a hash.
#include "support/ckpt_writer.h"

#include <setjmp.h>
#include <stdarg.h>
// cmocka.h needs the two above
#include <cmocka.h>

static void row_bytes_of_every_type(void **state) {
    (void)state;
    size_t n;
    for (int t = 0; t < MX_DTYPE_COUNT; t++) {
        const mx_dtype_info *d = mx_dtype_get((mx_dtype)t);
        if (t == MX_AFFINE) continue;
        assert_true(mx_wfmt_row_bytes(mx_wfmt_of((mx_dtype)t), 1024, &n));
        assert_int_equal(n, 1024 / d->block_elems * d->block_bytes);
        assert_false(mx_wfmt_row_bytes(mx_wfmt_of((mx_dtype)t), -d->block_elems, &n));
        bool divides = mx_wfmt_row_bytes(mx_wfmt_of((mx_dtype)t), 1023, &n);
        assert_int_equal(divides, d->block_elems == 1);
        assert_true(mx_wfmt_row_bytes(mx_wfmt_of((mx_dtype)t), 0, &n) && n == 0);
    }
    assert_false(mx_wfmt_row_bytes(mx_wfmt_of(MX_F64), INT64_MAX, &n));
    assert_true(mx_wfmt_bits_per_weight(mx_wfmt_of(MX_Q4_K)) == 4.5);
    assert_true(mx_wfmt_bits_per_weight(mx_wfmt_of(MX_Q6_K)) == 6.5625);
}

static void affine_rows_count_three_planes(void **state) {
    (void)state;
    mx_wfmt f = {MX_AFFINE, 4, 64, MX_BF16};
    size_t n;
    char buf[32];
    assert_true(mx_wfmt_row_bytes(f, 128, &n) && n == 64 + 2 * 2 * 2);
    assert_true(mx_wfmt_code_bytes(f, 128, &n) && n == 64);
    assert_true(mx_wfmt_bits_per_weight(f) == 4.5);
    assert_string_equal(mx_wfmt_name(f, buf, sizeof buf), "affine4 g64 bf16");
    assert_false(mx_wfmt_row_bytes(f, 96, &n));
    f.bits = 3;
    f.group = 32;
    f.scale_dtype = MX_F32;
    assert_true(mx_wfmt_row_bytes(f, 96, &n) && n == 36 + 2 * 4 * 3);
    static const uint8_t bad_bits[] = {0, 1, 7, 9, 16};
    for (size_t i = 0; i < sizeof bad_bits; i++) {
        f.bits = bad_bits[i];
        assert_false(mx_wfmt_row_bytes(f, 128, &n));
    }
    f.bits = 8;
    f.group = 16;
    assert_false(mx_wfmt_row_bytes(f, 128, &n));
    f.group = 128;
    f.scale_dtype = MX_I8;
    assert_false(mx_wfmt_row_bytes(f, 128, &n));
}

static void formats_are_equal_by_what_they_use(void **state) {
    (void)state;
    mx_wfmt a = {MX_AFFINE, 4, 64, MX_F16}, b = a;
    assert_true(mx_wfmt_eq(a, b));
    b.group = 32;
    assert_false(mx_wfmt_eq(a, b));
    mx_wfmt q = {MX_Q4_0, 0, 0, MX_F32}, r = {MX_Q4_0, 9, 9, MX_F16};
    assert_true(mx_wfmt_eq(q, r));
    assert_false(mx_wfmt_eq(q, a));
}

static void row_views_move_all_planes(void **state) {
    (void)state;
    mx_wfmt f = {MX_AFFINE, 3, 32, MX_F16};
    char codes[4 * 24], scales[4 * 4], biases[4 * 4];
    mx_wview w = {
        .fmt = f, .n_rows = 4, .n_cols = 64, .data = codes, .scales = scales, .biases = biases};
    mx_wview v = mx_wview_rows(&w, 3, 1);
    assert_ptr_equal(v.data, codes + 72);
    assert_ptr_equal(v.scales, scales + 12);
    assert_ptr_equal(v.biases, biases + 12);
    assert_int_equal(v.n_rows, 1);
    v = mx_wview_rows(&w, 4, 0);
    assert_int_equal(v.n_rows, 0);
}

static void half_floats_survive_a_round_trip(void **state) {
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        uint16_t u = (uint16_t)h;
        if ((u & 0x7c00) != 0x7c00 || (u & 0x3ff) == 0) { // not NaN
            assert_int_equal(mx_f32_to_f16(mx_f16_to_f32(u)), u);
        }
        if ((u & 0x7f80) != 0x7f80 || (u & 0x7f) == 0) {
            assert_int_equal(mx_f32_to_bf16(mx_bf16_to_f32(u)), u);
        }
    }
    // ties go to even, overflow to infinity, NaN stays NaN
    assert_int_equal(mx_f32_to_f16(1.0f + 0x1p-11f), 0x3c00);
    assert_int_equal(mx_f32_to_f16(1.0f + 3 * 0x1p-11f), 0x3c02);
    assert_int_equal(mx_f32_to_f16(65519.0f), 0x7bff);
    assert_int_equal(mx_f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(mx_f32_to_f16(0x1p-25f), 0);
    assert_int_equal(mx_f32_to_bf16(1.0f + 0x1p-8f), 0x3f80);
    assert_true(isnan(mx_f16_to_f32(mx_f32_to_f16(NAN))));
    assert_true(isnan(mx_bf16_to_f32(mx_f32_to_bf16(NAN))));
}

// The expected values were computed by tests/golden/weights_hash.py.
static void hashed_weights_are_those_of_python(void **state) {
    (void)state;
    static const uint32_t want[] = {1059255222, 3202755580, 1063642918};
    float x[3];
    ckpt_fill(x, 3, "blk.0.attn_q.weight", 0, 1.0f);
    for (int i = 0; i < 3; i++) assert_int_equal(mx_f32_bits(x[i]), want[i]);
    static const uint32_t row1[] = {0xb2f78a6d, 0x81a13eba, 0xcaa9ba66, 0xbfdc4423, 0x1eea261};
    static const uint32_t values[] = {1025728512, 1002766336, 1037099008};
    static const uint16_t sb[] = {15315, 48032, 48057, 48013}, bb[] = {48557, 15779, 15848, 15817};
    static const uint16_t sh[] = {7832, 40193, 40392, 40041}, bh[] = {44392, 11544, 12099, 11850};
    mx_wfmt f = {MX_AFFINE, 5, 32, MX_BF16};
    uint32_t codes[20];
    uint16_t scales[4], biases[4];
    float out[64];
    ckpt_fill_affine(f, "a", 2, 64, 0.1f, codes, scales, biases);
    assert_memory_equal(codes + 10, row1, sizeof row1);
    assert_memory_equal(scales, sb, sizeof sb);
    assert_memory_equal(biases, bb, sizeof bb);
    mx_wview w = {
        .fmt = f, .n_rows = 2, .n_cols = 64, .data = codes, .scales = scales, .biases = biases};
    mx_dequant_row(&w, 1, out);
    for (int i = 0; i < 3; i++) assert_int_equal(mx_f32_bits(out[i]), values[i]);
    f.scale_dtype = MX_F16;
    ckpt_fill_affine(f, "a", 2, 64, 0.1f, codes, scales, biases);
    assert_memory_equal(scales, sh, sizeof sh);
    assert_memory_equal(biases, bh, sizeof bh);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(row_bytes_of_every_type),
        cmocka_unit_test(affine_rows_count_three_planes),
        cmocka_unit_test(formats_are_equal_by_what_they_use),
        cmocka_unit_test(row_views_move_all_planes),
        cmocka_unit_test(half_floats_survive_a_round_trip),
        cmocka_unit_test(hashed_weights_are_those_of_python),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
