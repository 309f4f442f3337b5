// Decode attention over paged float16 state: CTA = (split, KV head or part of its group, row);
// attn.cuh has the arithmetic. Partial results of the splits are merged in order by the CTA that
// arrives last.
#include "attn.cuh"

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
        split_weights(m, l, n, lane, w + h * MAX_PARTS);
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

// The end of a CTA: its warps' partial results to the row's heads, or, with several splits, to
// memory; the CTA that arrives last adds the splits up.
template <int NR>
__device__ __forceinline__ void finish_row(const k_attn &a, const float *so, float *sw, int64_t row,
                                           int grp, int head0, int n_heads, int split, int active) {
    __shared__ int s_last;
    int hd = a.head_dim;
    __syncthreads();
    if (active == 1) {
        float *y = a.y + row * a.ldy + (int64_t)head0 * hd;
        merge_warps<NR>(
            so, hd, n_heads, threadIdx.x, blockDim.x,
            [&](int i, bool, int, float, float l, float x) { y[i] = l > 0.f ? x / l : 0.f; });
        return;
    }
    int64_t cell = row * a.n_groups + grp;
    float *part = a.part + cell * a.n_split * PART_FLOATS(NR, hd);
    float *mine = part + (int64_t)split * PART_FLOATS(NR, hd);
    merge_warps<NR>(so, hd, n_heads, threadIdx.x, blockDim.x,
                    [&](int i, bool first, int h, float m, float l, float x) {
                        __stcg(mine + i, x);
                        if (!first) return;
                        __stcg(mine + NR * hd + 2 * h, m), __stcg(mine + NR * hd + 2 * h + 1, l);
                    });
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
    return split_tokens(len, a.n_split);
}

template <int HD, int NR> __device__ __forceinline__ void decode_body(const k_attn &a) {
    constexpr int I = HD / 32;
    extern __shared__ __align__(16) float so[]; // one partial result a warp
    __shared__ float sw[NR * MAX_PARTS];
    __shared__ __align__(16) uint4 sq[2][I][32];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
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
    Span sp = visible(a.window, pos);
    int len = sp.end - sp.lo, per = split_of(a, len);
    int active = (len + per - 1) / per;
    if (split >= active) {
        dep_wait();
        return;
    }
    int c0 = sp.lo + split * per, c1 = min(c0 + per, sp.end);
    int64_t of_head = (int64_t)kvh * a.page_tokens * hd;
    Paged s = {reinterpret_cast<const __half *>(a.ks) + of_head,
               reinterpret_cast<const __half *>(a.vs) + of_head,
               a.page_table + (int64_t)range * a.max_pages,
               (int64_t)a.n_kv_head * a.page_tokens * hd,
               a.page_shift,
               hd};
    Tiles<HD, NR> w;
    int first = c0 + warp * 16;
    w.start(s, sp, c0, c1, warp, first < c1 ? s.at(first) : 0);
    bool any = w.p < c1, early = any && w.p + 16 <= a.range_pos0[range];
    if (early) w.load_first();
    dep_wait();
    if (!early && any) w.load_first();
    // log2 e without softcap, for exp2
    float qs = a.softcap > 0.f ? a.scale : a.scale * LOG2E;
    const float *q = a.q + row * a.ldq + (int64_t)head0 * hd;
    for (int i = warp; i < I; i += NW) {
        pack_q<HD>(sq, i, n_heads, hd, qs, lane, [&](int h, int d) { return ldx(q + h * hd + d); });
    }
    __syncthreads();
    w.run(sq, a.softcap);
    w.put(so + warp * PART_FLOATS(NR, hd), n_heads);
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
    Span sp = visible(a.window, a.pos[row]);
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
    float *y = a.y + row * a.ldy + (int64_t)head * hd;
    merge_warps<1>(so, hd, 1, threadIdx.x, 128, [&](int i, bool, int, float, float l, float x) {
        y[i] = l > 0.f ? x / l : 0.f;
    });
}
