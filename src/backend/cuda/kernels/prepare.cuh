// Activations as the B operand of a matrix product, by the warp that uses them.
//
// Quantised formats: 16-bit fixed point in two int8 planes, one scale for every 512 columns of a
// warp's run and token, so that group sums are exact integers. 16-bit formats: a high and a low
// half. A lane takes columns c .. c+3 of every 128. A slice of 512 columns at a time, in a loop,
// the next one asked for while this one is worked on: code that runs once for a launch is paid for
// by its size, since it has to be fetched.
#pragma once
#include "fmt.cuh"

// Four blocks at once, see quads_int.
template <class F> struct Quad {
    static constexpr bool IS = F::BITS == 4 && F::GROUP == 64 && F::KB == 64 && F::SLOT_KB == 4;
};

enum { SLICE = KSLICE };

// Four numbers from column c on, zero past the end of the row. L2 only for activations.
__device__ __forceinline__ float4 load4(const k_gemv &a, const float *x, int c) {
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (__builtin_expect(a.vec4, 1)) {
        if (c < a.n_cols) {
            v = __ldcg(reinterpret_cast<const float4 *>(x + c));
        }
        return v;
    }
    if (c < a.n_cols) v.x = ldx(x + c);
    if (c + 1 < a.n_cols) v.y = ldx(x + c + 1);
    if (c + 2 < a.n_cols) v.z = ldx(x + c + 2);
    if (c + 3 < a.n_cols) v.w = ldx(x + c + 3);
    return v;
}

// Sum of squares, then times the norm's weights.
__device__ __forceinline__ float4 times_gamma(float4 v, float4 w, float &ssq) {
    ssq = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, ssq))));
    return make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
}
__device__ __forceinline__ float4 gamma_at(const float *gamma, int c, int c1) {
    return c < c1 ? *reinterpret_cast<const float4 *>(gamma + c) : make_float4(0.f, 0.f, 0.f, 0.f);
}

__device__ __forceinline__ float max4(float m, float4 v) {
    return fmaxf(m, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
}

// The largest of numbers >= 0 over a warp. As bits they have the same order.
__device__ __forceinline__ float warp_top(float m) {
    return __uint_as_float(__reduce_max_sync(FULL, __float_as_uint(m)));
}

// The scale of float16 products from the largest magnitude: |x| / d < 512, and 1 / d.
__device__ __forceinline__ float2 half_scale(float m) {
    if (!(m > 0.f && m < 3e38f)) return make_float2(1.f, 1.f);
    int e = (int)((__float_as_uint(m) >> 23) & 255) - 127 - 8;
    e = max(-120, min(120, e));
    return make_float2(__uint_as_float((uint32_t)(e + 127) << 23),
                       __uint_as_float((uint32_t)(127 - e) << 23));
}

// Where the runs of 16 columns stand in a lane's 16 bytes of activations: side by side what one
// product takes.
template <class F> __device__ __forceinline__ int x_word(int run) {
    return Quad<F>::IS ? ((run & 1) << 1) | (run >> 1) : run;
}

// Four numbers times inv to 16-bit fixed point: the bytes of the high plane and of the low one; the
// sum of the four, a whole number. Adding 1.5 * 2^23 rounds, and leaves the integer in the low
// bits.
__device__ __forceinline__ uint2 codes4(float4 v, float inv, float &sum) {
    float f0 = fmaf(v.x, inv, MAGIC_F), f1 = fmaf(v.y, inv, MAGIC_F);
    float f2 = fmaf(v.z, inv, MAGIC_F), f3 = fmaf(v.w, inv, MAGIC_F);
    sum = ((f0 - MAGIC_F) + (f1 - MAGIC_F)) + ((f2 - MAGIC_F) + (f3 - MAGIC_F));
    int q0 = __float_as_int(f0), q1 = __float_as_int(f1);
    int q2 = __float_as_int(f2), q3 = __float_as_int(f3);
    uint32_t low = __byte_perm(__byte_perm(q0, q1, 0x0040), __byte_perm(q2, q3, 0x0040), 0x5410);
    uint32_t high = __byte_perm(__byte_perm(q0 + 128, q1 + 128, 0x0051),
                                __byte_perm(q2 + 128, q3 + 128, 0x0051), 0x5410);
    return make_uint2(high, low);
}

// Sums of four numbers over every L lanes; a lane ends with the sum of number `piece`.
template <int L> __device__ __forceinline__ float sum4(const float *v, int lane, int &piece) {
    bool hi = lane & (L / 2), up = lane & (L / 4);
    float k0 = (hi ? v[2] : v[0]) + __shfl_xor_sync(FULL, hi ? v[0] : v[2], L / 2);
    float k1 = (hi ? v[3] : v[1]) + __shfl_xor_sync(FULL, hi ? v[1] : v[3], L / 2);
    float k = (up ? k1 : k0) + __shfl_xor_sync(FULL, up ? k0 : k1, L / 4);
#pragma unroll
    for (int i = L / 8; i; i >>= 1) k += __shfl_xor_sync(FULL, k, i);
    piece = (hi ? 2 : 0) + (up ? 1 : 0);
    return k;
}

// Where a run's prepared activations go: of `most` tokens, this is number `tok`.
struct XPlace {
    uint32_t *xs; // of the row's column 0
    float *xm;
    int most, tok;
};

// P pieces of 128 columns from c0 on, quantised; columns from c1 on are zero and are not stored.
// Returns the scale.
template <class F, int P>
__device__ __forceinline__ float put_codes(const float4 *v, int c0, int c1, const XPlace &o,
                                           int lane) {
    constexpr int L = F::XG / 4; // lanes of a group
    float m = 0.f, sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < P; i++) m = max4(m, v[i]);
    m = warp_top(m);
    float inv = m > 0.f ? __fdividef(32512.f, m) : 0.f;
#pragma unroll
    for (int i = 0; i < P; i++) {
        int k = c0 + lane * 4 + i * 128, w = (k & 63) >> 2;
        uint2 q = codes4(v[i], inv, sum[i]);
        uint32_t *p = o.xs + (((k >> 6) * o.most + o.tok) * 8 + (w & 3)) * 4 + x_word<F>(w >> 2);
        if (k < c1) p[0] = q.x, p[16] = q.y;
    }
    int piece = 0;
    float k = sum[0];
    if constexpr (P == 1) {
#pragma unroll
        for (int s = 1; s < L; s <<= 1) k += __shfl_xor_sync(FULL, k, s);
    } else {
        k = sum4<L>(sum, lane, piece);
    }
    int group = c0 + lane / L * F::XG + piece * 128;
    if (lane % (P == 1 ? L : L / 4) == 0 && group < c1) o.xm[group / F::XG * o.most + o.tok] = k;
    return m * (1.f / 32512.f);
}

// The same for 16-bit floats; d: 1 / scale.
template <class F, int P>
__device__ __forceinline__ void put_floats(const float4 *x, float d, int c0, int c1,
                                           const XPlace &o, int lane) {
#pragma unroll
    for (int j = 0; j < P; j++) {
        int c = c0 + lane * 4 + j * 128, i = c >> 5, t = (c & 15) >> 2, f = (c & 31) >> 4;
        float4 v = make_float4(x[j].x * d, x[j].y * d, x[j].z * d, x[j].w * d);
        uint32_t h0, h1, l0, l1;
        if (F::BF) {
            h0 = pack_bf(v.x, v.y), h1 = pack_bf(v.z, v.w);
            l0 = pack_bf(v.x - bf_lo(h0), v.y - bf_hi(h0));
            l1 = pack_bf(v.z - bf_lo(h1), v.w - bf_hi(h1));
        } else {
            h0 = pack_h(v.x, v.y), h1 = pack_h(v.z, v.w);
            l0 = pack_h(v.x - h_lo(h0), v.y - h_hi(h0));
            l1 = pack_h(v.z - h_lo(h1), v.w - h_hi(h1));
        }
        uint2 *p =
            reinterpret_cast<uint2 *>(o.xs + (((i * o.most + o.tok) * 2) * 4 + t) * 4 + f * 2);
        if (c < c1) p[0] = make_uint2(h0, h1), p[8] = make_uint2(l0, l1);
    }
}

// P pieces of the row x from c on: a lane's own.
template <int P>
__device__ __forceinline__ void load_pieces(const k_gemv &a, const float *x, int c, int c1,
                                            float4 *v) {
#pragma unroll
    for (int i = 0; i < P; i++) {
        int k = c + i * 128;
        v[i] = k < c1 ? load4(a, x, k) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
}

// The float16 scale of a run.
template <int P>
__device__ __forceinline__ float2 run_scale(const k_gemv &a, const float *x, const float *gamma,
                                            int c0, int c1, int lane) {
    float m = 0.f, none = 0.f;
#pragma unroll 1
    for (int c = c0; c < c1; c += P * 128) {
        float4 v[P];
        load_pieces<P>(a, x, c + lane * 4, c1, v);
#pragma unroll
        for (int i = 0; i < P; i++) {
            v[i] = a.gamma ? times_gamma(v[i], gamma_at(gamma, c + lane * 4 + i * 128, c1), none)
                           : v[i];
            m = max4(m, v[i]);
        }
    }
    return half_scale(warp_top(m));
}

// The run [c0, c1) of n_tok tokens from row x0 on. ds: scales [slice][MT] (floats: [MT]); ssqs:
// sums of squares [MT]. gamma: weights of the norm in shared memory, zero past the end. asked() is
// called when the first numbers are on their way.
template <class F, int MT, int P, class Asked>
__device__ __forceinline__ void prepare(const k_gemv &a, const float *x0, const float *gamma,
                                        int n_tok, int c0, int c1, uint32_t *xs, float *xm,
                                        float *ds, float *ssqs, int lane, Asked asked) {
    float4 next[P];
    if (lane < MT) ssqs[lane] = 0.f;
    if (F::FLOAT && !F::BF && lane < MT) ds[lane] = 1.f;
    __syncwarp();
    load_pieces<P>(a, x0, c0 + lane * 4, c1, next);
    asked();
    int k = 0, s = 0;
#pragma unroll 1
    for (int c = c0; c < c1;) {
        float4 v[P];
        float ssq = 0.f;
#pragma unroll
        for (int i = 0; i < P; i++) {
            int at = c + lane * 4 + i * 128;
            v[i] = a.gamma ? times_gamma(next[i], gamma_at(gamma, at, c1), ssq) : next[i];
        }
        bool last = MT == 1 || k + 1 == n_tok;
        int c2 = last ? c + P * 128 : c, k2 = last ? 0 : k + 1;
        load_pieces<P>(a, x0 + (size_t)k2 * a.ldx, c2 + lane * 4, c1, next);
        XPlace o = {xs, xm, MT, k};
        if constexpr (F::FLOAT) {
            float2 d = make_float2(1.f, 1.f);
            if (!F::BF) {
                if (s == 0) {
                    d = run_scale<P>(a, x0 + (size_t)k * a.ldx, gamma, c0, c1, lane);
                    if (lane == 0) ds[k] = d.x;
                }
                __syncwarp();
                d.y = 1.f / ds[k]; // a power of two
            }
            put_floats<F, P>(v, d.y, c, c1, o, lane);
        } else {
            float d = put_codes<F, P>(v, c, c1, o, lane);
            if (lane == 0) ds[s * MT + k] = d;
        }
        if (a.gamma) {
            ssq = warp_sum(ssq);
            if (lane == 0) ssqs[k] += ssq;
        }
        c = c2, k = k2, s += last;
    }
}
