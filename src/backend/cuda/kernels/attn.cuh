// One warp's part of decode attention: a row against some of its own sequence's positions.
//
// Four warps share a split and each takes 16 tokens a step. Scores on tensor cores: K rows are
// loaded straight into the A operand (lane (g, t): dims 32i + 8t .. +7 of tokens g and g + 8), the
// group's heads are the columns of B, q in a high and a low half. V in float32: a few lanes a
// token, probabilities by shuffle.
#pragma once
#include "dev.cuh"

#define LOG2E 1.4426950408889634f
enum { NW = 4 }; // warps of a split

// First and last visible position of a row, the first rounded down to 16.
struct Span {
    int lo, first, end;
};
__device__ __forceinline__ Span visible(int window, int pos) {
    Span s;
    s.first = window > 0 ? max(0, pos - window + 1) : 0;
    s.lo = s.first & ~15;
    s.end = pos + 1;
    return s;
}

__device__ __forceinline__ float cap_score(float s, float cap) {
    return cap * tanhf(s / cap);
}

// Partial results of NR heads: o[NR][hd], then {m, l}[NR]; one after another at this stride.
#define PART_FLOATS(NR, hd) ((NR) * ((hd) + 4))
enum { MAX_PARTS = 64 };

// Splits that share a context: `few` of at most `most` until their warps have two tiles of 16
// tokens each; a tile a warp at least.
__device__ __forceinline__ int splits_of(Span sp, int most, int few) {
    int tiles = (sp.end - sp.lo + 15) >> 4;
    return min(tiles <= 2 * NW * few ? few : most, (tiles + NW - 1) / NW);
}
// Positions of a split of `active`, in whole tiles.
__device__ __forceinline__ void split_bounds(Span sp, int active, int split, int &c0, int &c1) {
    int tiles = (sp.end - sp.lo + 15) >> 4;
    c0 = sp.lo + split * tiles / active * 16;
    c1 = min(sp.lo + (split + 1) * tiles / active * 16, sp.end);
}

// Weights of the n partial results (m, l) of a head; lane k holds those of k and k + 32.
__device__ __forceinline__ void split_weights(const float *m, const float *l, int n, int lane,
                                              float *w) {
    float top = warp_max(fmaxf(m[0], m[1]));
    float e0 = exp2f(m[0] - top), e1 = exp2f(m[1] - top);
    float sum = warp_sum(fmaf(e0, l[0], e1 * l[1]));
    float inv = sum > 0.f ? 1.f / sum : 0.f;
    if (lane < n) w[lane] = e0 * inv;
    if (lane + 32 < n) w[lane + 32] = e1 * inv;
}

// The partial results of a split's warps, added in order: out(head, d, x, m, l) gets numbers d ..
// d+3 of a head.
template <int NR, class Out>
__device__ __forceinline__ void merge_warps(const float *so, int hd, int n_heads, Out out) {
    int stride = PART_FLOATS(NR, hd), lane = threadIdx.x & 31;
#pragma unroll 1
    for (int h = threadIdx.x >> 5; h < n_heads; h += blockDim.x >> 5) {
        float e[NW], m = -1e30f, l = 0.f;
        float2 ml[NW];
#pragma unroll
        for (int k = 0; k < NW; k++) {
            ml[k] = *reinterpret_cast<const float2 *>(so + k * stride + NR * hd + 2 * h);
            m = fmaxf(m, ml[k].x);
        }
#pragma unroll
        for (int k = 0; k < NW; k++) e[k] = exp2f(ml[k].x - m), l = fmaf(e[k], ml[k].y, l);
#pragma unroll 1
        for (int d = lane * 4; d < hd; d += 128) {
            float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int k = 0; k < NW; k++) {
                float4 v = *reinterpret_cast<const float4 *>(so + k * stride + h * hd + d);
                x.x = fmaf(e[k], v.x, x.x), x.y = fmaf(e[k], v.y, x.y);
                x.z = fmaf(e[k], v.z, x.z), x.w = fmaf(e[k], v.w, x.w);
            }
            out(h, d, x, m, l);
        }
    }
}

__device__ __forceinline__ float4 over(float4 x, float l) {
    return l > 0.f ? make_float4(x.x / l, x.y / l, x.z / l, x.w / l)
                   : make_float4(0.f, 0.f, 0.f, 0.f);
}

// What a sequence's state looks like to one KV head.
struct Paged {
    const __half *K, *V; // of the head, in page 0
    const int *table;
    int64_t page_elems;
    int shift, hd; // log2 of the tokens of a page; head size

    // Where position p is, in elements.
    __device__ __forceinline__ int64_t at(int p) const {
        int page = max(0, table[p >> shift]);
        return page * page_elems + (int64_t)(p & ((1 << shift) - 1)) * hd;
    }
};

// q (n_heads, hd; rows of ldq, in shared memory) as B operands: piece i of [2][I][32].
template <int HD>
__device__ __forceinline__ void pack_q(uint4 (*sq)[HD / 32][32], int i, int n_heads, int hd,
                                       float qs, int lane, const float *q, int ldq) {
    int g = lane >> 2, t = lane & 3, d = 32 * i + 8 * t;
    float4 a = make_float4(0.f, 0.f, 0.f, 0.f), b = a;
    if (g < n_heads && d < hd) {
        a = *reinterpret_cast<const float4 *>(q + g * ldq + d);
        b = *reinterpret_cast<const float4 *>(q + g * ldq + d + 4);
    }
    float v[8] = {a.x * qs, a.y * qs, a.z * qs, a.w * qs, b.x * qs, b.y * qs, b.z * qs, b.w * qs};
    uint32_t hi[4], lo[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        hi[e] = pack_h(v[2 * e], v[2 * e + 1]);
        lo[e] = pack_h(v[2 * e] - h_lo(hi[e]), v[2 * e + 1] - h_hi(hi[e]));
    }
    sq[0][i][lane] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
    sq[1][i][lane] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
}

template <int HD, int NR> struct Tiles {
    static constexpr int I = HD / 32;                    // runs of 32 dims
    static constexpr int LT = HD / 8 < 32 ? HD / 8 : 32; // lanes a token
    static constexpr int DPL = HD / LT, TPR = 32 / LT, J = 16 / TPR;
    static constexpr bool HOLD_V = HD <= 256;
    Paged s;
    Span sp;
    int lane, g, t, vt, vd; // this lane's token of a round, its first dim
    int p, c1;              // next tokens; end of the split
    int64_t base, next;
    uint4 ka[I], kb[I], vv[HOLD_V ? J : 1];
    float o[NR][DPL], m0, m1, l0, l1;

    // Tokens [c0, c1) of the split, as warp w of NW, whose first rows are at `first`.
    __device__ __forceinline__ void start(const Paged &paged, Span span, int c0, int end, int w,
                                          int64_t first) {
        s = paged, sp = span, c1 = end;
        lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        vt = lane / LT, vd = (lane % LT) * DPL;
        m0 = m1 = -1e30f, l0 = l1 = 0.f;
#pragma unroll
        for (int h = 0; h < NR; h++)
#pragma unroll
            for (int d = 0; d < DPL; d++) o[h][d] = 0.f;
        p = c0 + w * 16;
        base = first;
        next = p + 16 * NW < c1 ? s.at(p + 16 * NW) : 0;
    }
    __device__ __forceinline__ void load_k(int64_t at) {
        const __half *k = s.K + at + g * s.hd + 8 * t, *k8 = k + 8 * s.hd;
#pragma unroll
        for (int i = 0; i < I; i++) {
            bool ok = 32 * i + 8 * t < s.hd;
            ka[i] = ok ? ld_stream(k + 32 * i) : make_uint4(0, 0, 0, 0);
            kb[i] = ok ? ld_stream(k8 + 32 * i) : make_uint4(0, 0, 0, 0);
        }
    }
    // v: of this lane's first token.
    __device__ __forceinline__ uint4 load_v(const __half *v, int q, int j, int more) {
        int tok = j * TPR + vt;
        bool ok =
            vd + more < s.hd && (unsigned)(q + tok - sp.first) < (unsigned)(sp.end - sp.first);
        return ok ? ld_stream(v + (size_t)(j * TPR * s.hd + more)) : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ const __half *v_at(int64_t at) {
        return s.V + at + vt * s.hd + vd;
    }
    __device__ __forceinline__ void load_first() {
        load_k(base);
        if (HOLD_V) {
#pragma unroll
            for (int j = 0; j < J; j++) vv[HOLD_V ? j : 0] = load_v(v_at(base), p, j, 0);
        }
    }
    // Every step of this warp; the first one's rows are loaded. kv: null, or K and V of the last
    // position, kv[hd] and kv[HD + hd] in shared memory, which are not yet in the state.
    __device__ __forceinline__ void run(const uint4 (*sq)[I][32], float softcap, const __half *kv) {
#pragma unroll 1
        for (; p < c1; p += 16 * NW) {
            if (kv) put_fresh(kv, sp.end - 1 - p);
            step(sq, softcap);
        }
    }
    // Row r of the loaded ones becomes the fresh one.
    __device__ __forceinline__ void put_fresh(const __half *kv, int r) {
        if (r >= 16) return;
#pragma unroll
        for (int i = 0; i < I; i++) {
            int d = 32 * i + 8 * t;
            if (d >= s.hd) continue;
            if (r == g) ka[i] = *reinterpret_cast<const uint4 *>(kv + d);
            if (r == g + 8) kb[i] = *reinterpret_cast<const uint4 *>(kv + d);
        }
#pragma unroll
        for (int j = 0; j < (HOLD_V ? J : 0); j++) {
            if (r == j * TPR + vt && vd < s.hd) {
                vv[HOLD_V ? j : 0] = *reinterpret_cast<const uint4 *>(kv + HD + vd);
            }
        }
    }
    __device__ __forceinline__ void step(const uint4 (*sq)[I][32], float softcap) {
        float c[4] = {0.f, 0.f, 0.f, 0.f}, c2[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < I; i++) {
            uint4 h = sq[0][i][lane], l = sq[1][i][lane];
            mma_h(c, ka[i].x, kb[i].x, ka[i].y, kb[i].y, h.x, h.y);
            mma_h(c, ka[i].z, kb[i].z, ka[i].w, kb[i].w, h.z, h.w);
            mma_h(c2, ka[i].x, kb[i].x, ka[i].y, kb[i].y, l.x, l.y);
            mma_h(c2, ka[i].z, kb[i].z, ka[i].w, kb[i].w, l.z, l.w);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) c[k] += c2[k];
        int pn = p + 16 * NW;
        bool more = pn < c1;
        const __half *vp = v_at(base);
        if (more) {
            base = next;
            load_k(base);
            if (pn + 16 * NW < c1) next = s.at(pn + 16 * NW);
        }
        if (softcap > 0.f) {
#pragma unroll
            for (int k = 0; k < 4; k++) c[k] = cap_score(c[k], softcap) * LOG2E;
        }
        weigh(c);
        const __half *vn = v_at(base);
#pragma unroll
        for (int j = 0; j < J; j++) {
            float f[DPL];
            uint4 v = HOLD_V ? vv[HOLD_V ? j : 0] : load_v(vp, p, j, 0);
            f[0] = h_lo(v.x), f[1] = h_hi(v.x), f[2] = h_lo(v.y), f[3] = h_hi(v.y);
            f[4] = h_lo(v.z), f[5] = h_hi(v.z), f[6] = h_lo(v.w), f[7] = h_hi(v.w);
            if constexpr (DPL == 16) {
                uint4 u = load_v(vp, p, j, 8);
                f[8] = h_lo(u.x), f[9] = h_hi(u.x), f[10] = h_lo(u.y), f[11] = h_hi(u.y);
                f[12] = h_lo(u.z), f[13] = h_hi(u.z), f[14] = h_lo(u.w), f[15] = h_hi(u.w);
            }
            int src = ((j * TPR + vt) & 7) * 4;
#pragma unroll
            for (int h = 0; h < NR; h++) {
                float pr = __shfl_sync(
                    FULL, j * TPR < 8 ? ((h & 1) ? c[1] : c[0]) : ((h & 1) ? c[3] : c[2]),
                    src + (h >> 1));
#pragma unroll
                for (int d = 0; d < DPL; d++) o[h][d] = fmaf(pr, f[d], o[h][d]);
            }
            if (HOLD_V && more) vv[HOLD_V ? j : 0] = load_v(vn, pn, j, 0);
        }
    }
    // Scores to probabilities against the running maximum.
    __device__ __forceinline__ void weigh(float *c) {
        bool ok0 = p + g >= sp.first && p + g < sp.end;
        bool ok1 = p + g + 8 >= sp.first && p + g + 8 < sp.end;
        if (!ok0) c[0] = c[1] = -1e30f;
        if (!ok1) c[2] = c[3] = -1e30f;
        float x0 = fmaxf(c[0], c[2]), x1 = fmaxf(c[1], c[3]);
#pragma unroll
        for (int i = 4; i < 32; i <<= 1) {
            x0 = fmaxf(x0, __shfl_xor_sync(FULL, x0, i));
            x1 = fmaxf(x1, __shfl_xor_sync(FULL, x1, i));
        }
        if (__any_sync(FULL, x0 > m0 || x1 > m1)) {
            float n0 = fmaxf(m0, x0), n1 = fmaxf(m1, x1);
            float f0 = exp2f(m0 - n0), f1 = exp2f(m1 - n1);
            m0 = n0, m1 = n1, l0 *= f0, l1 *= f1;
#pragma unroll
            for (int h = 0; h < NR; h++) {
                float f = __shfl_sync(FULL, (h & 1) ? f1 : f0, h >> 1);
#pragma unroll
                for (int d = 0; d < DPL; d++) o[h][d] *= f;
            }
        }
        c[0] = ok0 ? exp2f(c[0] - m0) : 0.f, c[1] = ok0 ? exp2f(c[1] - m1) : 0.f;
        c[2] = ok1 ? exp2f(c[2] - m0) : 0.f, c[3] = ok1 ? exp2f(c[3] - m1) : 0.f;
        l0 += c[0] + c[2], l1 += c[1] + c[3];
    }
    // The partial result of a warp without tokens.
    __device__ __forceinline__ void put_none(float *mine, int n_heads) {
        for (int i = lane; i < n_heads * s.hd; i += 32) mine[i] = 0.f;
        if (lane < n_heads)
            mine[NR * s.hd + 2 * lane] = -1e30f, mine[NR * s.hd + 2 * lane + 1] = 0.f;
    }
    // This warp's partial result: o[NR][hd], then {m, l}[NR].
    __device__ __forceinline__ void put(float *mine, int n_heads) {
#pragma unroll
        for (int i = 4; i < 32; i <<= 1) {
            l0 += __shfl_xor_sync(FULL, l0, i);
            l1 += __shfl_xor_sync(FULL, l1, i);
        }
#pragma unroll
        for (int h = 0; h < NR; h++) {
#pragma unroll
            for (int i = LT; i < 32; i <<= 1) {
#pragma unroll
                for (int d = 0; d < DPL; d++) o[h][d] += __shfl_xor_sync(FULL, o[h][d], i);
            }
            if (lane < LT && h < n_heads && vd < s.hd) {
                float4 *to = reinterpret_cast<float4 *>(mine + h * s.hd + vd);
#pragma unroll
                for (int d = 0; d < DPL / 4; d++) {
                    to[d] =
                        make_float4(o[h][4 * d], o[h][4 * d + 1], o[h][4 * d + 2], o[h][4 * d + 3]);
                }
            }
        }
        if (g == 0) {
            float *ml = mine + NR * s.hd + 4 * t;
            if (2 * t < n_heads && 2 * t < NR) ml[0] = m0, ml[1] = l0;
            if (2 * t + 1 < n_heads && 2 * t + 1 < NR) ml[2] = m1, ml[3] = l1;
        }
    }
};
