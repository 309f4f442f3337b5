// Decode attention over paged float16 state: a row against its own sequence's positions.
//
// CTA = (split, KV head or part of its group, row); 4 independent warps, each takes 16 tokens a
// step. Scores on tensor cores: K rows are loaded straight into the A operand (lane (g, t): dims
// 32i + 8t .. +7 of tokens g and g + 8), the group's heads are the columns of B, q in a high and a
// low half. V in float32: a few lanes a token, probabilities by shuffle. Partial results of the
// splits are merged in order by the CTA that arrives last.
#include "dev.cuh"

#define LOG2E 1.4426950408889634f
enum { NW = 4 };

// First and last visible position of a row, the first rounded down to 16.
struct Span {
    int lo, first, end;
};
__device__ __forceinline__ Span visible(const k_attn &a, int pos) {
    Span s;
    s.first = a.window > 0 ? max(0, pos - a.window + 1) : 0;
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

// Adds up `n` partial results in order and writes the heads. w: NR * MAX_PARTS floats, shared.
template <int NR>
__device__ __forceinline__ void merge_out(const k_attn &a, const float *part, int n, int64_t row,
                                          int head0, int n_heads, float *w) {
    int hd = a.head_dim, stride = PART_FLOATS(NR, hd);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int h = warp; h < n_heads; h += NW) {
        float m[2], l[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int k = lane + 32 * i;
            const float *p = part + (int64_t)k * stride + NR * hd + 2 * h;
            m[i] = k < n ? __ldcg(p) : -1e30f;
            l[i] = k < n ? __ldcg(p + 1) : 0.f;
        }
        float top = warp_max(fmaxf(m[0], m[1]));
        float e0 = exp2f(m[0] - top), e1 = exp2f(m[1] - top);
        float sum = warp_sum(fmaf(e0, l[0], e1 * l[1]));
        float inv = sum > 0.f ? 1.f / sum : 0.f;
        if (lane < n) w[h * MAX_PARTS + lane] = e0 * inv;
        if (lane + 32 < n) w[h * MAX_PARTS + lane + 32] = e1 * inv;
    }
    __syncthreads();
    for (int i = threadIdx.x * 2; i < n_heads * hd; i += blockDim.x * 2) {
        int h = i / hd;
        float x = 0.f, y = 0.f;
#pragma unroll 8
        for (int k = 0; k < n; k++) {
            float2 v = __ldcg(reinterpret_cast<const float2 *>(part + (int64_t)k * stride + i));
            float e = w[h * MAX_PARTS + k];
            x = fmaf(e, v.x, x), y = fmaf(e, v.y, y);
        }
        float *o = a.y + row * a.ldy + (int64_t)head0 * hd + i;
        o[0] = x, o[1] = y;
    }
}

// The same from shared memory, for the warps of a CTA; out null: to the row's heads.
template <int NR>
__device__ __forceinline__ void merge_warps(const k_attn &a, const float *so, int64_t row,
                                            int head0, int n_heads, float *out) {
    int hd = a.head_dim, stride = PART_FLOATS(NR, hd);
    for (int i = threadIdx.x; i < n_heads * hd; i += blockDim.x) {
        int h = i / hd;
        const float *ml = so + NR * hd + 2 * h;
        float m = -1e30f, l = 0.f, x = 0.f;
#pragma unroll
        for (int k = 0; k < NW; k++) m = fmaxf(m, ml[k * stride]);
#pragma unroll
        for (int k = 0; k < NW; k++) {
            float e = exp2f(ml[k * stride] - m);
            l = fmaf(e, ml[k * stride + 1], l), x = fmaf(e, so[k * stride + i], x);
        }
        if (!out) {
            a.y[row * a.ldy + (int64_t)head0 * hd + i] = l > 0.f ? x / l : 0.f;
            continue;
        }
        __stcg(out + i, x);
        if (i % hd == 0) __stcg(out + NR * hd + 2 * h, m), __stcg(out + NR * hd + 2 * h + 1, l);
    }
}

// The end of a CTA: its warps' partial results to the row's heads, or, with several splits, to
// memory; the CTA that arrives last adds the splits up.
template <int NR>
__device__ __forceinline__ void finish_row(const k_attn &a, const float *so, float *sw, int64_t row,
                                           int grp, int head0, int n_heads, int split, int active) {
    __shared__ int s_last;
    int hd = a.head_dim;
    __syncthreads();
    if (active == 1) {
        merge_warps<NR>(a, so, row, head0, n_heads, nullptr);
        return;
    }
    int64_t cell = row * a.n_groups + grp;
    float *part = a.part + cell * a.n_split * PART_FLOATS(NR, hd);
    merge_warps<NR>(a, so, row, head0, n_heads, part + (int64_t)split * PART_FLOATS(NR, hd));
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned n = atomicAdd((unsigned *)(a.ticket + cell), 1u);
        s_last = n == (unsigned)active - 1;
        if (s_last) a.ticket[cell] = 0;
        __threadfence();
    }
    __syncthreads();
    if (s_last) merge_out<NR>(a, part, active, row, head0, n_heads, sw);
}

// Positions of a split of a context of len.
__device__ __forceinline__ int split_of(const k_attn &a, int len) {
    if (a.chunk > 0) return a.chunk * ((len + a.chunk * MAX_PARTS - 1) / (a.chunk * MAX_PARTS));
    return ((len + a.n_split - 1) / a.n_split + 16 * NW - 1) & ~(16 * NW - 1);
}

template <int HD, int NR> __device__ __forceinline__ void decode_body(const k_attn &a) {
    constexpr int I = HD / 32;                    // runs of 32 dims
    constexpr int LT = HD / 8 < 32 ? HD / 8 : 32; // lanes a token
    constexpr int DPL = HD / LT, TPR = 32 / LT, J = 16 / TPR;
    extern __shared__ __align__(16) float so[]; // one partial result a warp
    __shared__ float sw[NR * MAX_PARTS];
    __shared__ __align__(16) uint4 sq[2][I][32];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int split = blockIdx.x, grp = blockIdx.y;
    int64_t row = blockIdx.z;
    dep_trigger();
    int per_kv = a.n_groups / a.n_kv_head, kvh = grp / per_kv;
    int sub = grp % per_kv, head0 = kvh * a.n_rep + sub * NR;
    int n_heads = min(NR, a.n_rep - sub * NR), hd = a.head_dim;
    // The step's own arrays and the state of earlier steps may be read before the wait.
    int range = a.tok_range[row];
    if (range < 0) {
        dep_wait();
        if (split == 0) {
            for (int i = threadIdx.x; i < n_heads * hd; i += blockDim.x) {
                a.y[row * a.ldy + (int64_t)head0 * hd + i] = 0.f;
            }
        }
        return;
    }
    int pos = a.pos[row];
    Span sp = visible(a, pos);
    int len = sp.end - sp.lo;
    int per = split_of(a, len);
    int active = (len + per - 1) / per;
    if (split >= active) {
        dep_wait();
        return;
    }
    int c0 = sp.lo + split * per, c1 = min(c0 + per, sp.end);
    const int *table = a.page_table + (int64_t)range * a.max_pages;
    int64_t page_elems = (int64_t)a.n_kv_head * a.page_tokens * hd;
    const __half *K = reinterpret_cast<const __half *>(a.ks) + (int64_t)kvh * a.page_tokens * hd;
    const __half *V = reinterpret_cast<const __half *>(a.vs) + (int64_t)kvh * a.page_tokens * hd;

    float o[NR][DPL], m0 = -1e30f, m1 = -1e30f, l0 = 0.f, l1 = 0.f;
#pragma unroll
    for (int h = 0; h < NR; h++)
#pragma unroll
        for (int d = 0; d < DPL; d++) o[h][d] = 0.f;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 ka[I], kb[I], vv[HD <= 256 ? J : 1];
    int vt = lane / LT, vd = (lane % LT) * DPL; // this lane's token of a round, its first dim
    auto base_of = [&](int p) -> int64_t {
        int page = max(0, table[p >> a.page_shift]);
        return page * page_elems + (int64_t)(p & ((1 << a.page_shift) - 1)) * hd;
    };
    auto load_k = [&](int64_t base) {
#pragma unroll
        for (int i = 0; i < I; i++) {
            int d = 32 * i + 8 * t;
            bool ok = d < hd;
            ka[i] = ok ? ld_stream(K + base + (int64_t)g * hd + d) : zero;
            kb[i] = ok ? ld_stream(K + base + (int64_t)(g + 8) * hd + d) : zero;
        }
    };
    auto load_v = [&](int64_t base, int p, int j) -> uint4 {
        int tok = j * TPR + vt;
        bool ok = vd < hd && p + tok < sp.end && p + tok >= sp.first;
        return ok ? ld_stream(V + base + (int64_t)tok * hd + vd) : zero;
    };
    int p = c0 + warp * 16;
    int64_t base = p < c1 ? base_of(p) : 0;
    int64_t next = p + 16 * NW < c1 ? base_of(p + 16 * NW) : 0;
    bool early = p < c1 && p + 16 <= a.range_pos0[range];
    auto load_first = [&]() {
        load_k(base);
        if (HD <= 256) {
#pragma unroll
            for (int j = 0; j < J; j++) vv[HD <= 256 ? j : 0] = load_v(base, p, j);
        }
    };
    if (early) load_first();
    dep_wait();
    if (!early && p < c1) load_first();
    // q: lane (g, t) holds dims 32i + 8t .. of head g, times scale (and log2 e without softcap)
    float qs = a.softcap > 0.f ? a.scale : a.scale * LOG2E;
    for (int i = warp; i < I; i += NW) {
        float v[8];
        int d = 32 * i + 8 * t;
        const float *q = a.q + row * a.ldq + (int64_t)(head0 + g) * hd + d;
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = (g < n_heads && d + e < hd) ? ldx(q + e) * qs : 0.f;
        uint32_t hi[4], lo[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            hi[e] = pack_h(v[2 * e], v[2 * e + 1]);
            lo[e] = pack_h(v[2 * e] - h_lo(hi[e]), v[2 * e + 1] - h_hi(hi[e]));
        }
        sq[0][i][lane] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
        sq[1][i][lane] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
    __syncthreads();

#pragma unroll 1
    for (; p < c1; p += 16 * NW) {
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
        int64_t cur = base;
        if (more) {
            base = next;
            load_k(base);
            if (pn + 16 * NW < c1) next = base_of(pn + 16 * NW);
        }
        if (a.softcap > 0.f) {
#pragma unroll
            for (int k = 0; k < 4; k++) c[k] = cap_score(c[k], a.softcap) * LOG2E;
        }
        bool ok0 = p + g >= sp.first && p + g < sp.end;
        bool ok1 = p + g + 8 >= sp.first && p + g + 8 < sp.end;
        if (!ok0) c[0] = c[1] = -1e30f;
        if (!ok1) c[2] = c[3] = -1e30f;
        float x0 = fmaxf(c[0], c[2]), x1 = fmaxf(c[1], c[3]);
#pragma unroll
        for (int s = 4; s < 32; s <<= 1) {
            x0 = fmaxf(x0, __shfl_xor_sync(FULL, x0, s));
            x1 = fmaxf(x1, __shfl_xor_sync(FULL, x1, s));
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
#pragma unroll
        for (int j = 0; j < J; j++) {
            float f[DPL];
            uint4 v = HD <= 256 ? vv[HD <= 256 ? j : 0] : load_v(cur, p, j);
            f[0] = h_lo(v.x), f[1] = h_hi(v.x), f[2] = h_lo(v.y), f[3] = h_hi(v.y);
            f[4] = h_lo(v.z), f[5] = h_hi(v.z), f[6] = h_lo(v.w), f[7] = h_hi(v.w);
            if constexpr (DPL == 16) {
                int tok = j * TPR + vt;
                bool ok = vd + 8 < hd && p + tok < sp.end && p + tok >= sp.first;
                uint4 u = ok ? ld_stream(V + cur + (int64_t)tok * hd + vd + 8) : zero;
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
            if (HD <= 256 && more) vv[HD <= 256 ? j : 0] = load_v(base, pn, j);
        }
    }
#pragma unroll
    for (int s = 4; s < 32; s <<= 1) {
        l0 += __shfl_xor_sync(FULL, l0, s);
        l1 += __shfl_xor_sync(FULL, l1, s);
    }
    float *mine = so + warp * PART_FLOATS(NR, hd);
#pragma unroll
    for (int h = 0; h < NR; h++) {
#pragma unroll
        for (int s = LT; s < 32; s <<= 1) {
#pragma unroll
            for (int d = 0; d < DPL; d++) o[h][d] += __shfl_xor_sync(FULL, o[h][d], s);
        }
        if (lane < LT && h < n_heads) {
#pragma unroll
            for (int d = 0; d < DPL; d++) {
                if (vd + d < hd) mine[h * hd + vd + d] = o[h][d];
            }
        }
    }
    if (g == 0) {
        float *ml = mine + NR * hd + 4 * t;
        if (2 * t < n_heads && 2 * t < NR) ml[0] = m0, ml[1] = l0;
        if (2 * t + 1 < n_heads && 2 * t + 1 < NR) ml[2] = m1, ml[3] = l1;
    }
    finish_row<NR>(a, so, sw, row, grp, head0, n_heads, split, active);
}

#define DECODE(HD, NR)                                                                             \
    ENTRY __launch_bounds__(128) attn_h##HD##_r##NR(PAR const k_attn a) {                          \
        decode_body<HD, NR>(a);                                                                    \
    }
DECODE(64, 1)
DECODE(64, 2)
DECODE(64, 4)
DECODE(64, 8)
DECODE(128, 1)
DECODE(128, 2)
DECODE(128, 4)
DECODE(128, 8)
DECODE(256, 1)
DECODE(256, 2)
DECODE(256, 4)
DECODE(256, 8)
DECODE(512, 1)
DECODE(512, 2)
DECODE(512, 4)

// Any head size, page size and state type: one CTA a (head, row), float32, no tensor cores.
__device__ __forceinline__ float state_at(const uint8_t *p, int64_t i, int type) {
    if (type == KTYPE_F32) return reinterpret_cast<const float *>(p)[i];
    return from16(reinterpret_cast<const uint16_t *>(p)[i], type);
}

ENTRY __launch_bounds__(128) attn_any(PAR const k_attn a) {
    extern __shared__ float any_smem[]; // one partial result a warp, then q[hd]
    float *so = any_smem;
    dep_trigger();
    dep_wait();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.x, hd = a.head_dim;
    int64_t row = blockIdx.y;
    int range = a.tok_range[row], kvh = head / a.n_rep;
    if (range < 0) {
        for (int d = threadIdx.x; d < hd; d += 128) a.y[row * a.ldy + (int64_t)head * hd + d] = 0.f;
        return;
    }
    float *q = so + NW * PART_FLOATS(1, hd), *o = so + warp * PART_FLOATS(1, hd);
    for (int d = threadIdx.x; d < hd; d += 128) {
        q[d] = ldx(a.q + row * a.ldq + (int64_t)head * hd + d) * a.scale;
    }
    for (int d = lane; d < hd; d += 32) o[d] = 0.f;
    __syncthreads();
    Span sp = visible(a, a.pos[row]);
    const int *table = a.page_table + (int64_t)range * a.max_pages;
    float m = -1e30f, l = 0.f;
    for (int p = sp.first + warp; p < sp.end; p += NW) {
        int page = max(0, table[p / a.page_tokens]);
        int64_t at = (((int64_t)page * a.n_kv_head + kvh) * a.page_tokens + p % a.page_tokens) * hd;
        float s = 0.f;
        for (int d = lane; d < hd; d += 32) s = fmaf(q[d], state_at(a.ks, at + d, a.kv_type), s);
        s = warp_sum(s);
        if (a.softcap > 0.f) s = cap_score(s, a.softcap);
        s *= LOG2E;
        float n = fmaxf(m, s), f = exp2f(m - n), e = exp2f(s - n);
        l = l * f + e, m = n;
        for (int d = lane; d < hd; d += 32) {
            o[d] = fmaf(e, state_at(a.vs, at + d, a.kv_type), o[d] * f);
        }
    }
    if (lane == 0) o[hd] = m, o[hd + 1] = l;
    __syncthreads();
    merge_warps<1>(a, so, row, head, 1, nullptr);
}
