// Integer parts of the matrix products in every instruction set. vi is an int32 for each of a
// tile's sixteen rows. Quad h (0 or 1) of a unit is 16 of its columns.
#ifndef MX_BACKEND_CPU_K_MATMUL_VEC_H
#define MX_BACKEND_CPU_K_MATMUL_VEC_H

#include "backend/cpu/pack.h"
#include "backend/cpu/vec.h"

// Loops over streams, rows and quad columns must vanish, or their arrays live in memory.
#if defined(MX_ISA_SCALAR)
#define MM_UNROLL
#elif defined(__clang__)
#define MM_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MM_UNROLL _Pragma("GCC unroll 16")
#endif

// The compiler forgets what it knows of a value. On pointers to activations: gcc would keep every
// number loaded for one stream in a register, or on the stack, for the next.
#define MM_FORGET_POINTER(p) __asm__ volatile("" : "+r"(p)) // volatile: two are not one
#define MM_FORGET_VECTOR(v)  __asm__("" : "+v"(v))
// gcc would keep codes of one block of rows in registers for the next, and sums on the stack.
#define MM_FORGET_MEMORY() __asm__ volatile("" : : : "memory")

VEC_FN int32_t mm_i32(const void *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return v;
}

// 32 columns of codes.
typedef struct mm_unit {
    const uint8_t *p;
    int bits;
    bool spread; // p is what vi_spread wrote
} mm_unit;

enum { MM_SPREAD = 8 * CPU_VEC, MM_SPREAD_BYTES = 2 * MM_SPREAD + CPU_VEC };

// Where the planes of a unit start.
VEC_FN const uint8_t *mm_plane2(const uint8_t *unit, int bits) {
    return unit + (bits & 4 ? 4 * CPU_VEC : 0);
}
VEC_FN const uint8_t *mm_plane1(const uint8_t *unit, int bits) {
    return mm_plane2(unit, bits) + (bits & 2 ? 2 * CPU_VEC : 0);
}

#if defined(MX_ISA_AVX512)

enum { VI_BLOCK = 8 };
typedef __m512i vi;

// Shifts by a number that only optimised code knows to be constant.
typedef int32_t mm_v16 __attribute__((vector_size(64)));
typedef uint16_t mm_v32 __attribute__((vector_size(64)));

// A dot product is centred by n * center, at its start or at its end.
VEC_FN vi vi_start(int32_t n, int bits) {
    __m512i v = _mm512_set1_epi32(n);
    MM_FORGET_VECTOR(v); // or gcc shifts in a general register first
    return (vi)((mm_v16)v << (bits - 1));
}
VEC_FN vi vi_end(vi dot, int32_t n, int bits) {
    (void)n, (void)bits;
    return dot;
}
VEC_FN vf vi_float(vi a) {
    return _mm512_cvtepi32_ps(a);
}
VEC_FN vf vld_bf16(const uint8_t *p) {
    __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
}
VEC_FN vf vld_i8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
// Six-bit numbers: bits [s4, s4 + 4) of lo, then bits [s2, s2 + 2) of hi.
VEC_FN vf vld_six(const uint8_t *lo, int s4, const uint8_t *hi, int s2) {
    __m512i a = _mm512_srl_epi32(_mm512_loadu_si512(lo), _mm_cvtsi32_si128(s4));
    __m512i b = _mm512_srl_epi32(_mm512_loadu_si512(hi), _mm_cvtsi32_si128(s2));
    a = _mm512_and_si512(a, _mm512_set1_epi32(15));
    b = _mm512_and_si512(b, _mm512_set1_epi32(3));
    return _mm512_cvtepi32_ps(_mm512_or_si512(a, _mm512_slli_epi32(b, 4)));
}

// Moves bit `from` of each byte to bit `to` (other bits are rubbish).
VEC_FN __m512i mm_move(__m512i v, int from, int to) {
    return from > to ? (__m512i)((mm_v32)v >> (from - to)) : (__m512i)((mm_v32)v << (to - from));
}

VEC_FN void mm_codes(__m512i q[4], const uint8_t *unit, int bits, int h) {
    if (bits == 8) {
        MM_UNROLL for (int i = 0; i < 4; i++) {
            q[i] = _mm512_loadu_si512(unit + CPU_VEC * (4 * h + i));
        }
        return;
    }
    q[0] = q[1] = q[2] = q[3] = _mm512_setzero_si512();
    if (bits & 4) {
        const __m512i m = _mm512_set1_epi8(15);
        __m512i a = _mm512_loadu_si512(unit + 2 * CPU_VEC * h);
        __m512i b = _mm512_loadu_si512(unit + 2 * CPU_VEC * h + CPU_VEC);
        q[0] = _mm512_and_si512(a, m);
        q[1] = _mm512_and_si512(_mm512_srli_epi16(a, 4), m);
        q[2] = _mm512_and_si512(b, m);
        q[3] = _mm512_and_si512(_mm512_srli_epi16(b, 4), m);
    }
    if (bits & 2) {
        int to = bits & 4;
        const __m512i m = _mm512_set1_epi8((char)(3 << to));
        __m512i a = _mm512_loadu_si512(mm_plane2(unit, bits) + CPU_VEC * h);
        MM_UNROLL for (int i = 0; i < 4; i++) {
            q[i] = _mm512_ternarylogic_epi32(q[i], mm_move(a, 2 * i, to), m, 0xf8); // q | a & m
        }
    }
    if (bits & 1) {
        int to = bits - 1;
        const __m512i m = _mm512_set1_epi8((char)(1 << to));
        __m512i a = _mm512_loadu_si512(mm_plane1(unit, bits));
        MM_UNROLL for (int i = 0; i < 4; i++) {
            q[i] = _mm512_ternarylogic_epi32(q[i], mm_move(a, 4 * h + i, to), m, 0xf8);
        }
    }
}

// One row of 8-bit codes. Loads of 32 bytes, because this is the kernel that does least for a byte:
// with 64-byte loads the demand misses crowd out the hardware's prefetches (EPYC 9004, one thread:
// 19 GB/s against 25).
VEC_FN vi mm_dot_bytes(vi dot, const uint8_t *codes, const uint8_t *x) {
    __m256i d[2] = {_mm512_castsi512_si256(dot), _mm512_extracti64x4_epi64(dot, 1)};
    MM_UNROLL for (int k = 0; k < 2; k++) {
        MM_UNROLL for (int i = 0; i < 4; i++) {
            __m256i q = _mm256_loadu_si256((const __m256i *)(codes + CPU_VEC * i + 32 * k));
            d[k] = _mm256_dpbusd_epi32(d[k], q, _mm256_set1_epi32(mm_i32(x + 4 * i)));
        }
    }
    return _mm512_inserti64x4(_mm512_castsi256_si512(d[0]), d[1], 1);
}

// dot[t] += codes of quad h times x of row t (16 columns), rows xs bytes apart.
VEC_FN void vi_dot(vi *dot, int n_tok, const mm_unit *unit, int h, const uint8_t *x, size_t xs) {
    if (unit->bits == 8 && n_tok == 1) {
        dot[0] = mm_dot_bytes(dot[0], unit->p + 4 * CPU_VEC * h, x);
        return;
    }
    __m512i q[4];
    mm_codes(q, unit->p, unit->bits, h);
    MM_UNROLL for (int i = 0; i < 4; i++) {
        MM_UNROLL for (int t = 0; t < n_tok; t++) {
            __m512i b = _mm512_set1_epi32(mm_i32(x + (size_t)t * xs + 4 * i));
            dot[t] = _mm512_dpbusd_epi32(dot[t], q[i], b);
        }
    }
}

// Codes of columns 4 * k .. of quad h as floats, less center: w[i] for column 4k + i.
VEC_FN void mm_columns(vf w[16], const uint8_t *unit, int bits, int h, int center) {
    __m512i q[4];
    const __m512i m = _mm512_set1_epi32(255), c = _mm512_set1_epi32(center);
    mm_codes(q, unit, bits, h);
    MM_UNROLL for (int k = 0; k < 4; k++) {
        MM_UNROLL for (int i = 0; i < 4; i++) {
            __m512i v = _mm512_and_si512((__m512i)((mm_v16)q[k] >> 8 * i), m);
            w[4 * k + i] = _mm512_cvtepi32_ps(_mm512_sub_epi32(v, c));
        }
    }
}

#elif defined(MX_ISA_AVX2)

enum { VI_BLOCK = 4 }; // rows of activations whose accumulators fit into the registers

// Sixteen int32, as two halves of a tile.
typedef struct vi {
    __m256i a, b;
} vi;

// Shifts by a number that only optimised code knows to be constant.
typedef int32_t mm_v8 __attribute__((vector_size(32)));
typedef uint16_t mm_v16 __attribute__((vector_size(32)));

#if defined(MX_ISA_AVXVNNI)
VEC_FN vi vi_start(int32_t n, int bits) {
    __m256i v = _mm256_set1_epi32(n);
    MM_FORGET_VECTOR(v); // or gcc shifts in a general register first
    v = (__m256i)((mm_v8)v << (bits - 1));
    return (vi){v, v};
}
VEC_FN vi vi_end(vi dot, int32_t n, int bits) {
    (void)n, (void)bits;
    return dot;
}
#else
// Added last, because it would take a register from the accumulators. With 8 bits vi_dot centres
// the codes itself.
VEC_FN vi vi_start(int32_t n, int bits) {
    (void)n, (void)bits;
    return (vi){_mm256_setzero_si256(), _mm256_setzero_si256()};
}
VEC_FN vi vi_end(vi dot, int32_t n, int bits) {
    if (bits == 8) return dot;
    __m256i v = _mm256_set1_epi32(n);
    MM_FORGET_VECTOR(v); // or gcc shifts in a general register first
    v = (__m256i)((mm_v8)v << (bits - 1));
    return (vi){_mm256_add_epi32(dot.a, v), _mm256_add_epi32(dot.b, v)};
}
#endif
VEC_FN vf vi_float(vi v) {
    return (vf){_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)};
}
VEC_FN __m256 mm_bf16(const uint8_t *p) {
    __m256i u = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
}
VEC_FN vf vld_bf16(const uint8_t *p) {
    return (vf){mm_bf16(p), mm_bf16(p + 16)};
}
VEC_FN __m256 mm_i8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
VEC_FN vf vld_i8(const uint8_t *p) {
    return (vf){mm_i8(p), mm_i8(p + 8)};
}
VEC_FN __m256 mm_six(const uint8_t *lo, int s4, const uint8_t *hi, int s2) {
    __m256i a = _mm256_loadu_si256((const __m256i *)lo);
    __m256i b = _mm256_loadu_si256((const __m256i *)hi);
    a = _mm256_and_si256(_mm256_srl_epi32(a, _mm_cvtsi32_si128(s4)), _mm256_set1_epi32(15));
    b = _mm256_and_si256(_mm256_srl_epi32(b, _mm_cvtsi32_si128(s2)), _mm256_set1_epi32(3));
    return _mm256_cvtepi32_ps(_mm256_or_si256(a, _mm256_slli_epi32(b, 4)));
}
VEC_FN vf vld_six(const uint8_t *lo, int s4, const uint8_t *hi, int s2) {
    return (vf){mm_six(lo, s4, hi, s2), mm_six(lo + 32, s4, hi + 32, s2)};
}

VEC_FN __m256i mm_move(__m256i v, int from, int to) {
    return from > to ? (__m256i)((mm_v16)v >> (from - to)) : (__m256i)((mm_v16)v << (to - from));
}
VEC_FN __m256i mm_load(const uint8_t *p) {
    return _mm256_loadu_si256((const __m256i *)p);
}

// unit is 32 bytes further on for rows 8..15.
VEC_FN void mm_codes(__m256i q[4], const uint8_t *unit, int bits, int h) {
    if (bits == 8) {
        MM_UNROLL for (int i = 0; i < 4; i++) q[i] = mm_load(unit + CPU_VEC * (4 * h + i));
        return;
    }
    q[0] = q[1] = q[2] = q[3] = _mm256_setzero_si256();
    if (bits & 4) {
        const __m256i m = _mm256_set1_epi8(15);
        __m256i a = mm_load(unit + 2 * CPU_VEC * h), b = mm_load(unit + 2 * CPU_VEC * h + CPU_VEC);
        q[0] = _mm256_and_si256(a, m);
        q[1] = _mm256_and_si256(_mm256_srli_epi16(a, 4), m);
        q[2] = _mm256_and_si256(b, m);
        q[3] = _mm256_and_si256(_mm256_srli_epi16(b, 4), m);
    }
    if (bits & 2) {
        int to = bits & 4;
        const __m256i m = _mm256_set1_epi8((char)(3 << to));
        __m256i a = mm_load(mm_plane2(unit, bits) + CPU_VEC * h);
        MM_UNROLL for (int i = 0; i < 4; i++) {
            q[i] = _mm256_or_si256(q[i], _mm256_and_si256(mm_move(a, 2 * i, to), m));
        }
    }
    if (bits & 1) {
        int to = bits - 1;
        const __m256i m = _mm256_set1_epi8((char)(1 << to));
        __m256i a = mm_load(mm_plane1(unit, bits));
        MM_UNROLL for (int i = 0; i < 4; i++) {
            q[i] = _mm256_or_si256(q[i], _mm256_and_si256(mm_move(a, 4 * h + i, to), m));
        }
    }
}

// Codes of quad column j.
VEC_FN __m256i mm_code(const uint8_t *unit, int bits, int j) {
    if (bits == 8) return mm_load(unit + CPU_VEC * j);
    __m256i q = _mm256_setzero_si256();
    if (bits & 4) {
        q = mm_load(unit + CPU_VEC * (j / 2));
        if (j % 2) q = _mm256_srli_epi16(q, 4);
        q = _mm256_and_si256(q, _mm256_set1_epi8(15));
    }
    if (bits & 2) {
        const __m256i m = _mm256_set1_epi8((char)(3 << (bits & 4)));
        __m256i v =
            mm_move(mm_load(mm_plane2(unit, bits) + CPU_VEC * (j / 4)), j % 4 * 2, bits & 4);
        q = _mm256_or_si256(q, _mm256_and_si256(v, m));
    }
    if (bits & 1) {
        const __m256i m = _mm256_set1_epi8((char)(1 << (bits - 1)));
        __m256i v = mm_move(mm_load(mm_plane1(unit, bits)), j, bits - 1);
        q = _mm256_or_si256(q, _mm256_and_si256(v, m));
    }
    return q;
}

VEC_FN void mm_store(uint8_t *p, __m256i v) {
    _mm256_storeu_si256((__m256i *)p, v);
}

#if defined(MX_ISA_AVXVNNI)

// Quads [h0, h1) times x.
VEC_FN void mm_dot_quads(vi *dot, int n_tok, const mm_unit *unit, int h0, int h1, const uint8_t *x,
                         size_t xs) {
    const int stored = unit->spread ? 8 : unit->bits;
    MM_UNROLL for (int i = 0; i < 4 * (h1 - h0); i++) {
        __m256i qa = mm_code(unit->p, stored, 4 * h0 + i);
        __m256i qb = mm_code(unit->p + 32, stored, 4 * h0 + i);
        MM_UNROLL for (int t = 0; t < n_tok; t++) {
            __m256i b = _mm256_set1_epi32(mm_i32(x + (size_t)t * xs + 4 * i));
            dot[t].a = _mm256_dpbusd_avx_epi32(dot[t].a, qa, b);
            dot[t].b = _mm256_dpbusd_avx_epi32(dot[t].b, qb, b);
        }
    }
}

VEC_FN bool vi_spread_pays(int bits) {
    return bits != 4 && bits != 8;
}
VEC_FN void mm_spread_bytes(uint8_t *q, const uint8_t *unit) { // never needed
    (void)q, (void)unit;
}
VEC_FN void mm_dot_spread_bytes(vi *dot, int n_tok, const uint8_t *q, const uint8_t *x, size_t xs) {
    (void)dot, (void)n_tok, (void)q, (void)x, (void)xs;
}

#else

VEC_FN bool vi_spread_pays(int bits) {
    (void)bits;
    return true;
}

// Pairs of products in 16 bits. 8-bit codes are centred first: |code| <= 128 times the x with its
// sign.
VEC_FN __m256i mm_pairs(__m256i q, __m256i x, int bits) {
    if (bits != 8) return _mm256_maddubs_epi16(q, x);
    __m256i w = _mm256_xor_si256(q, _mm256_set1_epi8((char)128));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}

// Quads [h0, h1). As many pairs are added in 16 bits as cannot pass 32,767: a pair is at most
// 2 * 127 * code, so 8 of 4-bit codes (30,480), 4 of 5 bits (31,496), 2 of 6 bits (32,004), one of
// 8 bits (32,512).
VEC_FN void mm_dot_quads(vi *dot, int n_tok, const mm_unit *unit, int h0, int h1, const uint8_t *x,
                         size_t xs) {
    const int bits = unit->bits, stored = unit->spread ? 8 : bits;
    const __m256i one = _mm256_set1_epi16(1);
    const int n = 4 * (h1 - h0), most = bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
    const int run = most < n ? most : n;
    vi s[VI_BLOCK];
    MM_UNROLL for (int i = 0; i < n; i++) {
        __m256i qa = mm_code(unit->p, stored, 4 * h0 + i);
        __m256i qb = mm_code(unit->p + 32, stored, 4 * h0 + i);
        MM_UNROLL for (int t = 0; t < n_tok; t++) {
            __m256i b = _mm256_set1_epi32(mm_i32(x + (size_t)t * xs + 4 * i));
            __m256i pa = mm_pairs(qa, b, bits), pb = mm_pairs(qb, b, bits);
            s[t].a = i % run == 0 ? pa : _mm256_add_epi16(s[t].a, pa);
            s[t].b = i % run == 0 ? pb : _mm256_add_epi16(s[t].b, pb);
            MM_FORGET_VECTOR(s[t].a); // or gcc makes trees of the sums and runs out of registers
            MM_FORGET_VECTOR(s[t].b);
            if (i % run == run - 1) {
                dot[t].a = _mm256_add_epi32(dot[t].a, _mm256_madd_epi16(s[t].a, one));
                dot[t].b = _mm256_add_epi32(dot[t].b, _mm256_madd_epi16(s[t].b, one));
            }
        }
    }
}

// 8-bit codes w, centred, as |w|, then masks of the negative ones, then the sum of the negative |w|
// of each row: w * x = |w| * (x ^ mask), and |w| where w is negative.
VEC_FN void mm_spread_bytes(uint8_t *q, const uint8_t *unit) {
    const __m256i one8 = _mm256_set1_epi8(1), one = _mm256_set1_epi16(1);
    MM_UNROLL for (int k = 0; k < 2; k++) {
        __m256i sum = _mm256_setzero_si256();
        MM_UNROLL for (int j = 0; j < 8; j++) {
            __m256i w = mm_load(unit + CPU_VEC * j + 32 * k);
            w = _mm256_xor_si256(w, _mm256_set1_epi8((char)128));
            __m256i m = _mm256_cmpgt_epi8(_mm256_setzero_si256(), w), a = _mm256_abs_epi8(w);
            mm_store(q + CPU_VEC * j + 32 * k, a);
            mm_store(q + MM_SPREAD + CPU_VEC * j + 32 * k, m);
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(_mm256_and_si256(a, m), one8));
        }
        mm_store(q + 2 * MM_SPREAD + 32 * k, _mm256_madd_epi16(sum, one));
    }
}

VEC_FN __m256i mm_dot_half(__m256i dot, __m256i w, __m256i mask, const uint8_t *x) {
    __m256i b = _mm256_xor_si256(_mm256_set1_epi32(mm_i32(x)), mask);
    __m256i p = _mm256_madd_epi16(_mm256_maddubs_epi16(w, b), _mm256_set1_epi16(1));
    dot = _mm256_add_epi32(dot, p);
    MM_FORGET_VECTOR(dot); // or gcc makes trees of the sums and runs out of registers
    return dot;
}

// A pair is at least -2 * 128 * 128, which 16 bits hold.
VEC_FN void mm_dot_spread_bytes(vi *dot, int n_tok, const uint8_t *q, const uint8_t *x, size_t xs) {
    MM_UNROLL for (int j = 0; j < 8; j++) {
        const uint8_t *p = q + CPU_VEC * j, *m = p + MM_SPREAD;
        __m256i w = mm_load(p), mask = mm_load(m);
        MM_UNROLL for (int t = 0; t < n_tok; t++) {
            dot[t].a = mm_dot_half(dot[t].a, w, mask, x + (size_t)t * xs + 4 * j);
        }
        w = mm_load(p + 32), mask = mm_load(m + 32);
        MM_UNROLL for (int t = 0; t < n_tok; t++) {
            dot[t].b = mm_dot_half(dot[t].b, w, mask, x + (size_t)t * xs + 4 * j);
        }
    }
    MM_UNROLL for (int t = 0; t < n_tok; t++) {
        dot[t].a = _mm256_add_epi32(dot[t].a, mm_load(q + 2 * MM_SPREAD));
        dot[t].b = _mm256_add_epi32(dot[t].b, mm_load(q + 2 * MM_SPREAD + 32));
    }
}

#endif

// Brings a unit into a form that costs least for every row of activations: codes of a byte.
VEC_FN void vi_spread(uint8_t *q, const uint8_t *unit, int bits) {
    if (bits == 8) {
        mm_spread_bytes(q, unit);
        return;
    }
    MM_UNROLL for (int j = 0; j < 8; j++) {
        mm_store(q + CPU_VEC * j, mm_code(unit, bits, j));
        mm_store(q + CPU_VEC * j + 32, mm_code(unit + 32, bits, j));
    }
}

VEC_FN void vi_dot(vi *dot, int n_tok, const mm_unit *unit, int h, const uint8_t *x, size_t xs) {
    if (h == 0)
        mm_dot_quads(dot, n_tok, unit, 0, 1, x, xs);
    else
        mm_dot_quads(dot, n_tok, unit, 1, 2, x, xs);
}
VEC_FN void vi_dot_unit(vi *dot, int n_tok, const mm_unit *unit, const uint8_t *x, size_t xs) {
    if (unit->bits == 8 && unit->spread)
        mm_dot_spread_bytes(dot, n_tok, unit->p, x, xs);
    else
        mm_dot_quads(dot, n_tok, unit, 0, 2, x, xs);
}

VEC_FN __m256 mm_column(__m256i q, int i, int center) {
    __m256i v = _mm256_and_si256((__m256i)((mm_v8)q >> 8 * i), _mm256_set1_epi32(255));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(v, _mm256_set1_epi32(center)));
}

VEC_FN void mm_columns(vf w[16], const uint8_t *unit, int bits, int h, int center) {
    __m256i a[4], b[4];
    mm_codes(a, unit, bits, h);
    mm_codes(b, unit + 32, bits, h);
    MM_UNROLL for (int k = 0; k < 4; k++) {
        MM_UNROLL for (int i = 0; i < 4; i++) {
            w[4 * k + i] = (vf){mm_column(a[k], i, center), mm_column(b[k], i, center)};
        }
    }
}

#else

enum { VI_BLOCK = 8 };
typedef struct vi {
    int32_t v[16];
} vi;

VEC_FN vi vi_start(int32_t n, int bits) {
    vi r;
    for (int i = 0; i < 16; i++) r.v[i] = (int32_t)((uint32_t)n << (bits - 1));
    return r;
}
VEC_FN vi vi_end(vi dot, int32_t n, int bits) {
    (void)n, (void)bits;
    return dot;
}
VEC_FN vf vi_float(vi a) {
    VEC_LOOP((float)a.v[i]);
}
VEC_FN vf vld_bf16(const uint8_t *p) {
    uint16_t h[16];
    memcpy(h, p, sizeof h);
    VEC_LOOP(mx_bf16_to_f32(h[i]));
}
VEC_FN vf vld_i8(const uint8_t *p) {
    VEC_LOOP((float)(int8_t)p[i]);
}
VEC_FN vf vld_six(const uint8_t *lo, int s4, const uint8_t *hi, int s2) {
    VEC_LOOP((float)((mm_i32(lo + 4 * i) >> s4 & 15) | (mm_i32(hi + 4 * i) >> s2 & 3) << 4));
}

VEC_FN void mm_codes(uint8_t q[4][CPU_VEC], const uint8_t *unit, int bits, int h) {
    for (int i = 0; i < 4; i++) {
        int j = 4 * h + i;
        const uint8_t *a = bits == 8 ? unit + CPU_VEC * j : unit + CPU_VEC * (j / 2);
        const uint8_t *b = mm_plane2(unit, bits) + CPU_VEC * h, *c = mm_plane1(unit, bits);
        for (int k = 0; k < CPU_VEC; k++) {
            int v = 0;
            if (bits == 8)
                v = a[k];
            else if (bits & 4)
                v = a[k] >> (4 * (j & 1)) & 15;
            if (bits != 8 && bits & 2) v |= (b[k] >> 2 * i & 3) << (bits & 4);
            if (bits & 1) v |= (c[k] >> j & 1) << (bits - 1);
            q[i][k] = (uint8_t)v;
        }
    }
}

VEC_FN void vi_dot(vi *dot, int n_tok, const mm_unit *unit, int h, const uint8_t *x, size_t xs) {
    uint8_t q[4][CPU_VEC];
    mm_codes(q, unit->p, unit->bits, h);
    for (int t = 0; t < n_tok; t++) {
        const int8_t *xt = (const int8_t *)(x + (size_t)t * xs);
        for (int i = 0; i < 4; i++) {
            for (int r = 0; r < 16; r++) {
                const uint8_t *w = q[i] + 4 * r;
                dot[t].v[r] += w[0] * xt[4 * i] + w[1] * xt[4 * i + 1] + w[2] * xt[4 * i + 2] +
                               w[3] * xt[4 * i + 3];
            }
        }
    }
}

VEC_FN void mm_columns(vf w[16], const uint8_t *unit, int bits, int h, int center) {
    uint8_t q[4][CPU_VEC];
    mm_codes(q, unit, bits, h);
    for (int c = 0; c < 16; c++) {
        for (int r = 0; r < 16; r++) w[c].f[r] = (float)(q[c / 4][4 * r + c % 4] - center);
    }
}

#endif

// Where codes are multiplied as they stand.
#if !defined(MX_ISA_AVX2)
VEC_FN void vi_dot_unit(vi *dot, int n_tok, const mm_unit *unit, const uint8_t *x, size_t xs) {
    vi_dot(dot, n_tok, unit, 0, x, xs);
    vi_dot(dot, n_tok, unit, 1, x + 16, xs);
}

VEC_FN bool vi_spread_pays(int bits) { // one block of rows
    (void)bits;
    return false;
}
VEC_FN void vi_spread(uint8_t *q, const uint8_t *unit, int bits) {
    (void)q, (void)unit, (void)bits;
}
#endif

// Sixteen numbers of a scale type.
VEC_FN vf vld_type(mx_dtype t, const uint8_t *p) {
    if (t == MX_F16) return vldh((const uint16_t *)(const void *)p);
    if (t == MX_BF16) return vld_bf16(p);
    return vld((const float *)(const void *)p);
}

#endif
