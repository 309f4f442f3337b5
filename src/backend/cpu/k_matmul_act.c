// Prepares activations for the matrix products: int8 codes a group, or the floats themselves.
// Built once per instruction set; no state. The layout is in pack.h.
//
// d = max |x| / 127, code = x * (127 / max |x|) to the nearest, ties to even. A group with an
// infinity or a NaN gets d = v = NaN, so that they show in the result; a group below 2^-116 is
// zero.
#include "backend/cpu/k_matmul.h"
#include "backend/cpu/k_matmul_vec.h"

enum { NORM_COLS = 32768 }; // most columns of a row that is normalised here

typedef struct coded { // the numbers of one group
    float d, v;
    int32_t sum, half;
} coded;

// Bits of the largest |x|; infinities and NaNs are the largest.
static uint32_t largest(const float *x, int n) {
    uint32_t m = 0;
    for (int i = 0; i < n; i++) {
        uint32_t u = mx_f32_bits(x[i]) & 0x7fffffffu;
        m = u > m ? u : m;
    }
    return m;
}

#if defined(MX_ISA_AVX512)
static int32_t code16(const float *x, float r, int8_t *q) {
    __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(r)));
    _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(v));
    return _mm512_reduce_add_epi32(v);
}
#elif defined(MX_ISA_AVX2)
static int32_t code16(const float *x, float r, int8_t *q) {
    __m256 m = _mm256_set1_ps(r);
    __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), m));
    __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), m));
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    __m128i lo = _mm256_castsi256_si128(w), hi = _mm256_extracti128_si256(w, 1);
    _mm_storeu_si128((__m128i *)q, _mm_packs_epi16(lo, hi));
    __m256i s = _mm256_add_epi32(a, b);
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}
#else
static int32_t code16(const float *x, float r, int8_t *q) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) {
        // adding 1.5 * 2^23 rounds to the nearest whole number, ties to even
        int32_t c = (int32_t)mx_f32_bits(x[i] * r + 12582912.0f) - 0x4b400000;
        q[i] = (int8_t)c;
        sum += c;
    }
    return sum;
}
#endif

static coded code_group(const float *x, int n, int8_t *q) {
    uint32_t m = largest(x, n);
    if (m >= 0x7f800000u || m < 0x05800000u) { // not finite, or below 2^-116
        float d = m >= 0x7f800000u ? mx_f32_from_bits(0x7fc00000u) : 0.0f;
        memset(q, 0, (size_t)n);
        return (coded){.d = d, .v = d};
    }
    float top = mx_f32_from_bits(m), r = 127.0f / top;
    coded c = {.d = top / 127.0f};
    c.half = code16(x, r, q);
    c.sum = c.half;
    for (int i = 16; i < n; i += 16) c.sum += code16(x + i, r, q + i);
    c.v = c.d * (float)c.sum;
    return c;
}

static void code_row(cpu_act_kind kind, const float *x, int64_t n_cols, int64_t tok, uint8_t *act) {
    const int n = cpu_act_group(kind);
    const size_t record = cpu_act_record(kind);
    const int t = (int)(tok % CPU_ACT_BLOCK);
    uint8_t *p = act + (size_t)(tok / CPU_ACT_BLOCK) * cpu_act_block(kind, n_cols);
    for (int64_t k = 0; k < n_cols; k += n, p += record) {
        coded c = code_group(x + k, n, (int8_t *)p + t * n);
        float *d = (float *)(void *)(p + CPU_ACT_BLOCK * n), *v = d + CPU_ACT_BLOCK;
        int32_t *sum = (int32_t *)(void *)(v + CPU_ACT_BLOCK), *half = sum + CPU_ACT_BLOCK;
        d[t] = c.d;
        v[t] = c.v;
        sum[t] = -c.sum;
        half[t] = -c.half;
    }
}

void CPU_FN(act_prepare)(cpu_act_kind kind, const float *x, int64_t ldx, int64_t n_cols,
                         int64_t tok0, int64_t tok1, const float *norm_w, float eps, void *act) {
    _Alignas(64) float row[NORM_COLS];
    CHECKF(!norm_w || n_cols <= NORM_COLS, "a norm over more than %d columns", NORM_COLS);
    CHECK(kind == CPU_ACT_F32 || n_cols % cpu_act_group(kind) == 0);
    for (int64_t tok = tok0; tok < tok1; tok++) {
        const float *src = x + tok * ldx;
        float *floats = kind == CPU_ACT_F32 ? (float *)act + tok * cpu_act_row(n_cols) : row;
        if (norm_w)
            CPU_FN(rms_norm)(src, norm_w, eps, n_cols, floats);
        else if (kind == CPU_ACT_F32)
            memcpy(floats, src, (size_t)n_cols * sizeof *src);
        if (kind != CPU_ACT_F32) code_row(kind, norm_w ? row : src, n_cols, tok, act);
    }
}
