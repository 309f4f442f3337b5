// Sixteen floats at a time, the same in every instruction set: each operation below gives the same
// bits whether it is one AVX-512 instruction, two of AVX2, or a loop. Kernels written with these
// operations and a fixed order of reduction therefore agree bit for bit.
#ifndef MX_BACKEND_CPU_VEC_H
#define MX_BACKEND_CPU_VEC_H

#include "tensor/half.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#if defined(MX_ISA_AVX2) || defined(MX_ISA_AVX512)
#include <immintrin.h>
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define VEC_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define VEC_SANITIZED 1
#endif
#endif
#if defined(VEC_SANITIZED) && defined(MX_ISA_SCALAR) // inlined, these take minutes to compile
#define VEC_FN static __attribute__((noinline, unused))
#else
#define VEC_FN static inline __attribute__((always_inline, unused))
#endif
#if defined(MX_ISA_AVX2) || defined(MX_ISA_AVX512)
#define VEC_TILES 1 // register tiles pay
#else
#define VEC_TILES 0
#endif

#if defined(MX_ISA_AVX512)

enum { VEC_REGS = 32 };
typedef __m512 vf;

VEC_FN vf vset1(float x) {
    return _mm512_set1_ps(x);
}
VEC_FN vf vld(const float *p) {
    return _mm512_loadu_ps(p);
}
VEC_FN void vst(float *p, vf v) {
    _mm512_storeu_ps(p, v);
}
VEC_FN vf vldh(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
VEC_FN void vsth(uint16_t *p, vf v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
VEC_FN vf vadd(vf a, vf b) {
    return _mm512_add_ps(a, b);
}
VEC_FN vf vsub(vf a, vf b) {
    return _mm512_sub_ps(a, b);
}
VEC_FN vf vmul(vf a, vf b) {
    return _mm512_mul_ps(a, b);
}
VEC_FN vf vdiv(vf a, vf b) {
    return _mm512_div_ps(a, b);
}
VEC_FN vf vfma(vf a, vf b, vf c) { // a * b + c, rounded once
    return _mm512_fmadd_ps(a, b, c);
}
VEC_FN vf vmax(vf a, vf b) { // a > b ? a : b
    return _mm512_max_ps(a, b);
}
VEC_FN vf vmin(vf a, vf b) { // a < b ? a : b
    return _mm512_min_ps(a, b);
}
VEC_FN vf vsel_lt(vf a, vf b, vf x, vf y) { // a < b ? x : y
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
VEC_FN bool vany_eq(vf a, vf b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ) != 0;
}
// 2^n for t = n + 1.5 * 2^23, n in -126 .. 127.
VEC_FN vf vexp2_of(vf t) {
    __m512i i = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(i, _mm512_set1_epi32(0x3f800000)));
}
VEC_FN vf vabs(vf a) {
    return _mm512_castsi512_ps(
        _mm512_and_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
}
// |a| with the sign of b; a >= 0
VEC_FN vf vcopysign(vf a, vf b) {
    __m512i s = _mm512_and_epi32(_mm512_castps_si512(b), _mm512_set1_epi32((int)0x80000000u));
    return _mm512_castsi512_ps(_mm512_or_epi32(_mm512_castps_si512(a), s));
}

#elif defined(MX_ISA_AVX2)

enum { VEC_REGS = 16 };
typedef struct vf {
    __m256 a, b;
} vf;

VEC_FN vf vset1(float x) {
    __m256 v = _mm256_set1_ps(x);
    return (vf){v, v};
}
VEC_FN vf vld(const float *p) {
    return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
VEC_FN void vst(float *p, vf v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
VEC_FN vf vldh(const uint16_t *p) {
    return (vf){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
VEC_FN void vsth(uint16_t *p, vf v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT));
}
VEC_FN vf vadd(vf x, vf y) {
    return (vf){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
VEC_FN vf vsub(vf x, vf y) {
    return (vf){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
VEC_FN vf vmul(vf x, vf y) {
    return (vf){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
VEC_FN vf vdiv(vf x, vf y) {
    return (vf){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
VEC_FN vf vfma(vf x, vf y, vf z) {
    return (vf){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
VEC_FN vf vmax(vf x, vf y) {
    return (vf){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
VEC_FN vf vmin(vf x, vf y) {
    return (vf){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
VEC_FN vf vsel_lt(vf p, vf q, vf x, vf y) {
    return (vf){_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(p.a, q.a, _CMP_LT_OQ)),
                _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(p.b, q.b, _CMP_LT_OQ))};
}
VEC_FN bool vany_eq(vf x, vf y) {
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ),
                                           _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ))) != 0;
}
VEC_FN __m256 vec_exp2_half(__m256 t) {
    __m256i i = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(i, _mm256_set1_epi32(0x3f800000)));
}
VEC_FN vf vexp2_of(vf t) {
    return (vf){vec_exp2_half(t.a), vec_exp2_half(t.b)};
}
VEC_FN vf vabs(vf x) {
    __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return (vf){_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
VEC_FN vf vcopysign(vf x, vf y) {
    __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32((int)0x80000000u));
    return (vf){_mm256_or_ps(x.a, _mm256_and_ps(y.a, m)), _mm256_or_ps(x.b, _mm256_and_ps(y.b, m))};
}

#else

// Four vectors of four: every target has them.
enum { VEC_REGS = 16 };
typedef float vec4 __attribute__((vector_size(16)));
typedef int32_t vec4i __attribute__((vector_size(16)));
typedef union vf {
    vec4 q[4];
    float f[16];
} vf;
#define VEC_LOOP(expr)                                                                             \
    do {                                                                                           \
        vf r;                                                                                      \
        for (int i = 0; i < 16; i++) r.f[i] = (expr);                                              \
        return r;                                                                                  \
    } while (0)
#define VEC_QUADS(expr)                                                                            \
    do {                                                                                           \
        vf r;                                                                                      \
        for (int i = 0; i < 4; i++) r.q[i] = (expr);                                               \
        return r;                                                                                  \
    } while (0)

VEC_FN vec4 vec4_choose(vec4i mask, vec4 x, vec4 y) {
    return (vec4)(((vec4i)x & mask) | ((vec4i)y & ~mask));
}
VEC_FN vf vset1(float x) {
    VEC_QUADS(((vec4){x, x, x, x}));
}
VEC_FN vf vld(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
VEC_FN void vst(float *p, vf v) {
    memcpy(p, &v, sizeof v);
}
VEC_FN vf vldh(const uint16_t *p) {
    vf v;
    for (int i = 0; i < 16; i++) v.f[i] = mx_f16_to_f32(p[i]);
    return v;
}
VEC_FN void vsth(uint16_t *p, vf v) {
    for (int i = 0; i < 16; i++) p[i] = mx_f32_to_f16(v.f[i]);
}
VEC_FN vf vadd(vf a, vf b) {
    VEC_QUADS(a.q[i] + b.q[i]);
}
VEC_FN vf vsub(vf a, vf b) {
    VEC_QUADS(a.q[i] - b.q[i]);
}
VEC_FN vf vmul(vf a, vf b) {
    VEC_QUADS(a.q[i] * b.q[i]);
}
VEC_FN vf vdiv(vf a, vf b) {
    VEC_QUADS(a.q[i] / b.q[i]);
}
VEC_FN vf vfma(vf a, vf b, vf c) {
    for (int i = 0; i < 16; i++) c.f[i] = __builtin_fmaf(a.f[i], b.f[i], c.f[i]);
    return c;
}
VEC_FN vf vmax(vf a, vf b) {
    VEC_QUADS(vec4_choose((vec4i)(a.q[i] > b.q[i]), a.q[i], b.q[i]));
}
VEC_FN vf vmin(vf a, vf b) {
    VEC_QUADS(vec4_choose((vec4i)(a.q[i] < b.q[i]), a.q[i], b.q[i]));
}
VEC_FN vf vsel_lt(vf a, vf b, vf x, vf y) {
    VEC_QUADS(vec4_choose((vec4i)(a.q[i] < b.q[i]), x.q[i], y.q[i]));
}
VEC_FN bool vany_eq(vf a, vf b) {
    bool any = false;
    for (int i = 0; i < 16; i++) any |= a.f[i] == b.f[i];
    return any;
}
VEC_FN vf vexp2_of(vf t) {
    for (int i = 0; i < 16; i++) {
        t.f[i] = mx_f32_from_bits((mx_f32_bits(t.f[i]) << 23) + 0x3f800000u);
    }
    return t;
}
VEC_FN vf vabs(vf a) {
    for (int i = 0; i < 16; i++) a.f[i] = mx_f32_from_bits(mx_f32_bits(a.f[i]) & 0x7fffffffu);
    return a;
}
VEC_FN vf vcopysign(vf a, vf b) {
    for (int i = 0; i < 16; i++) {
        a.f[i] = mx_f32_from_bits(mx_f32_bits(a.f[i]) | (mx_f32_bits(b.f[i]) & 0x80000000u));
    }
    return a;
}

#endif

// The first n < 16 lanes from memory, the others zero.
VEC_FN vf vld_n(const float *p, int64_t n) {
    float t[16] = {0};
    memcpy(t, p, (size_t)n * sizeof *t);
    return vld(t);
}
VEC_FN void vst_n(float *p, vf v, int64_t n) {
    float t[16];
    vst(t, v);
    memcpy(p, t, (size_t)n * sizeof *t);
}
// Lane sum in a fixed tree: i + (i + 8), then 4, 2, 1 apart.
VEC_FN float vsum(vf v) {
    float t[16];
    vst(t, v);
    for (int h = 8; h > 0; h /= 2) {
        for (int i = 0; i < h; i++) t[i] = t[i] + t[i + h];
    }
    return t[0];
}
VEC_FN float vmaxall(vf v) {
    float t[16];
    vst(t, v);
    for (int h = 8; h > 0; h /= 2) {
        for (int i = 0; i < h; i++) t[i] = t[i] > t[i + h] ? t[i] : t[i + h];
    }
    return t[0];
}
VEC_FN vf viota(void) {
    static const float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return vld(lanes);
}

// exp, relative error below 2e-7: 2^n * (1 + r + r^2 q(r)), |r| <= ln2 / 2, q of degree 4 fitted at
// Chebyshev nodes. Below -87 it is 0 exactly; above 88 it is exp(88).
VEC_FN vf vexp(vf x) {
    const vf magic = vset1(12582912.0f);
    vf c = vmin(vset1(88.0f), x);
    vf t = vfma(c, vset1(1.44269504f), magic);
    vf n = vsub(t, magic);
    vf r = vfma(n, vset1(-0.693359375f), c); // ln2 in two parts
    r = vfma(n, vset1(2.12194440e-4f), r);
    vf q = vset1(0.0013926250394433737f);
    q = vfma(q, r, vset1(0.00836323294788599f));
    q = vfma(q, r, vset1(0.04166655242443085f));
    q = vfma(q, r, vset1(0.16666576266288757f));
    q = vfma(q, r, vset1(0.5f));
    vf e = vfma(vmul(r, r), q, r);
    e = vmul(vadd(e, vset1(1.0f)), vexp2_of(t));
    return vsel_lt(x, vset1(-87.0f), vset1(0.0f), e);
}

// tanh: odd polynomial below 0.625, else 1 - 2 / (exp(2|x|) + 1).
VEC_FN vf vtanh(vf x) {
    vf a = vabs(x), z = vmul(x, x);
    vf q = vset1(-0.006096714176237583f);
    q = vfma(q, z, vset1(0.020997179672122f));
    q = vfma(q, z, vset1(-0.05385090783238411f));
    q = vfma(q, z, vset1(0.1333276927471161f));
    q = vfma(q, z, vset1(-0.333333283662796f));
    vf small = vfma(vmul(z, x), q, x);
    vf e = vexp(vadd(a, a));
    vf big = vsub(vset1(1.0f), vdiv(vset1(2.0f), vadd(e, vset1(1.0f))));
    return vsel_lt(a, vset1(0.625f), small, vcopysign(big, x));
}

// 1 / sqrt(mean(x^2) + eps) of RMS_NORM: sixteen interleaved sums, then the tree.
VEC_FN float vec_rms_inverse(const float *x, int64_t n, float eps) {
    vf s = vset1(0.0f);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        vf v = vld(x + i);
        s = vfma(v, v, s);
    }
    if (i < n) {
        vf v = vld_n(x + i, n - i);
        s = vfma(v, v, s);
    }
    return 1.0f / __builtin_sqrtf(vsum(s) / (float)n + eps);
}

#endif
