// Decode attention over paged float16 state: CTA = (split, KV head or part of its group, row);
// attn.cuh has the arithmetic. Partial results of the splits are merged in order by the CTA that
// arrives last.
#include "attn.cuh"
#include "turn.cuh"

// Adds up `n` partial results in order and writes the heads. w: NR * MAX_PARTS floats, shared.
template <int NR>
__device__ __forceinline__ void merge_out(const k_attn &a, const float *part, int n, int64_t row,
                                          int head0, int n_heads, float *w) {
    constexpr int HELD = 16; // partial results asked for together
    int hd = a.head_dim, stride = PART_FLOATS(NR, hd);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, all = n_heads * hd;
    bool first = true;
#pragma unroll 1
    for (int i0 = 0; i0 < all; i0 += NW * 128) {
        int i = warp < NW ? i0 + threadIdx.x * 4 : all; // a warp more than NW has none
        const float *p = part + i, *e = w + (first ? 0 : i / hd) * MAX_PARTS;
        float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int k0 = 0; k0 < n; k0 += HELD) {
            float4 v[HELD];
#pragma unroll
            for (int k = 0; k < HELD; k++) {
                bool in = i < all && k0 + k < n;
                v[k] = in ? __ldcg(reinterpret_cast<const float4 *>(p))
                          : make_float4(0.f, 0.f, 0.f, 0.f);
                p += stride;
            }
            // The weights are worked out while the first ones are on their way.
            if (first) {
#pragma unroll 1
                for (int h = warp; h < n_heads && warp < NW; h += NW) {
                    float m[2], l[2];
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        int k = lane + 32 * j;
                        const float *ml = part + (int64_t)k * stride + NR * hd + 2 * h;
                        float2 x = k < n ? __ldcg(reinterpret_cast<const float2 *>(ml))
                                         : make_float2(-1e30f, 0.f);
                        m[j] = x.x, l[j] = x.y;
                    }
                    split_weights(m, l, n, lane, w + h * MAX_PARTS);
                }
                __syncthreads();
                first = false, e = w + i / hd * MAX_PARTS;
            }
            if (i >= all) continue;
#pragma unroll
            for (int k = 0; k < HELD; k++) {
                float x = k0 + k < n ? e[k0 + k] : 0.f;
                o.x = fmaf(x, v[k].x, o.x), o.y = fmaf(x, v[k].y, o.y);
                o.z = fmaf(x, v[k].z, o.z), o.w = fmaf(x, v[k].w, o.w);
            }
        }
        float *y = a.y + row * a.ldy + (int64_t)head0 * hd + i;
        if (i < all) y[0] = o.x, y[1] = o.y, y[2] = o.z, y[3] = o.w;
    }
}

// Takes a number; what this CTA wrote before is seen by the CTA that takes the last one.
__device__ __forceinline__ unsigned take_ticket(uint32_t *t) {
    unsigned n;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(n) : "l"(t) : "memory");
    return n;
}

// The end of a CTA: its warps' partial results to the row's heads, or, with several splits, to
// memory; the CTA that arrives last adds the splits up.
template <int NR>
__device__ __forceinline__ void finish_row(const k_attn &a, const float *so, float *sw, int64_t row,
                                           int grp, int head0, int n_heads, int split, int active) {
    __shared__ int s_last;
    int hd = a.head_dim;
    __syncthreads();
    int64_t cell = row * a.n_groups + grp;
    float *part = a.part + cell * a.n_split * PART_FLOATS(NR, hd);
    float *mine = part + (int64_t)split * PART_FLOATS(NR, hd);
    float *y = a.y + row * a.ldy + (int64_t)head0 * hd;
    merge_warps<NR>(so, hd, n_heads, [&](int h, int d, float4 x, float m, float l) {
        if (active == 1) {
            float4 z = over(x, l);
            float *o = y + h * hd + d;
            o[0] = z.x, o[1] = z.y, o[2] = z.z, o[3] = z.w;
            return;
        }
        __stcg(reinterpret_cast<float4 *>(mine + h * hd + d), x);
        if (d) return;
        __stcg(reinterpret_cast<float2 *>(mine + NR * hd + 2 * h), make_float2(m, l));
    });
    if (active == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        s_last = take_ticket(a.ticket + cell) == (unsigned)active - 1;
        if (s_last) a.ticket[cell] = 0;
    }
    __syncthreads();
    if (s_last) merge_out<NR>(a, part, active, row, head0, n_heads, sw);
}

// A row's q; and what a kernel that rotates needs: q, k and v as projected, then rotated.
template <int HD, int NR> struct Fresh {
    static constexpr bool TURNS = HD <= 256;
    static constexpr int D = TURNS ? HD : 8;
    float raw[TURNS ? NR + 2 : NR][HD], cs[D], norm[2][D];
    __align__(16) __half kv[2 * D]; // the row's position in the state
};

// Weights of the per-head norms, before the wait: by then they are long out of the caches.
template <int HD, int NR>
__device__ __forceinline__ void hold_norms(const k_attn &a, Fresh<HD, NR> &f) {
    for (int d = threadIdx.x; d < a.head_dim; d += blockDim.x) {
        if (a.qn) f.norm[0][d] = __ldg(a.qn + d);
        if (a.kn) f.norm[1][d] = __ldg(a.kn + d);
    }
}

// n_heads heads of q, and with kvh >= 0 the row's k and v, to raw[h][HD]. 16-byte aligned.
template <int HD>
__device__ __forceinline__ void fetch_heads(const k_attn &a, float (*raw)[HD], int64_t row,
                                            int head0, int n_heads, int kvh) {
    int n = n_heads + (kvh >= 0 ? 2 : 0), hd = a.head_dim;
    constexpr int PIECES = HD / 4; // of 16 bytes
#pragma unroll 1
    for (int i = threadIdx.x; i < n * PIECES; i += blockDim.x) {
        int h = i / PIECES, d = i % PIECES * 4;
        const float *p = a.q + row * a.ldq + (int64_t)(head0 + h) * hd;
        if (h == n_heads) p = a.k + row * a.ldk + kvh * hd;
        if (h > n_heads) p = a.v + row * a.ldv + kvh * hd;
        if (d < hd) cp16(&raw[h][d], p + d);
    }
}

// Rotates what fetch_heads fetched: q to q_out (n_heads, hd); k and v to f.kv, and to the state
// when slot >= 0.
template <int HD, int NR>
__device__ __forceinline__ void turn_group(const k_attn &a, Fresh<HD, NR> &f, float *q_out,
                                           int n_heads, int kvh, int slot) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, hd = a.head_dim;
    int n = n_heads + (kvh >= 0 ? 2 : 0);
#pragma unroll 1
    for (int h = warp; h < n; h += blockDim.x >> 5) {
        bool is_q = h < n_heads, is_v = h == n_heads + 1;
        bool has_norm = is_q ? a.qn != nullptr : !is_v && a.kn;
        const float *x = f.raw[h], *norm = f.norm[is_q ? 0 : 1];
        Turn turn = {hd, a.n_rot, a.interleaved, a.eps, has_norm, !is_v && a.cs};
        int64_t to = is_q || slot < 0 ? 0 : state_index(slot, kvh, a.n_kv_head, a.page_tokens, hd);
        auto get = [&](int d) { return x[d]; };
        auto angle = [&](int k) { return f.cs[k]; };
        auto weight = [&](int d) { return norm[d]; };
        turn_head(turn, lane, get, angle, weight, [&](int d, float v) {
            if (is_q) {
                q_out[h * hd + d] = v;
                return;
            }
            f.kv[(is_v ? HD : 0) + d] = __float2half_rn(v);
            if (slot >= 0) store_kv(is_v ? a.vs_out : a.ks_out, to + d, v, KTYPE_F16);
        });
    }
}

// Which positions a CTA takes, of how many splits.
struct Cut {
    int active, c0, c1;
};
__device__ __forceinline__ Cut cut_of(const k_attn &a, Span sp, int split) {
    Cut c = {};
    if (a.chunk > 0) {
        int len = sp.end - sp.lo;
        int per = a.chunk * ((len + a.chunk * MAX_PARTS - 1) / (a.chunk * MAX_PARTS));
        c.active = (len + per - 1) / per;
        c.c0 = sp.lo + split * per, c.c1 = min(c.c0 + per, sp.end);
        return c;
    }
    c.active = splits_of(sp, a.n_split, a.few_splits);
    if (split < c.active) split_bounds(sp, c.active, split, c.c0, c.c1);
    return c;
}

template <int HD, int NR> __device__ __forceinline__ void decode_body(const k_attn &a) {
    constexpr int I = HD / 32;
    extern __shared__ __align__(16) float so[]; // one partial result a warp; before, q
    __shared__ float sw[NR * MAX_PARTS];
    __shared__ __align__(16) uint4 sq[2][I][32];
    __shared__ __align__(16) Fresh<HD, NR> fresh;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int split = blockIdx.x, grp = blockIdx.y;
    int64_t row = blockIdx.z;
    dep_trigger();
    int per_kv = a.n_groups / a.n_kv_head, kvh = grp / per_kv;
    int sub = grp % per_kv, head0 = kvh * a.n_rep + sub * NR;
    int n_heads = min(NR, a.n_rep - sub * NR), hd = a.head_dim;
    bool turns = Fresh<HD, NR>::TURNS && a.k;
    // The step's own arrays and the state of earlier steps may be read before the wait.
    int range = a.tok_range[row], pos = a.pos[row];
    int slot = turns && sub == 0 && a.kv_slot ? a.kv_slot[row] : -1;
    if (range < 0) {
        dep_wait();
        if (split == 0) {
            for (int i = threadIdx.x; i < n_heads * hd; i += blockDim.x) {
                a.y[row * a.ldy + (int64_t)head0 * hd + i] = 0.f;
            }
        }
        return;
    }
    Span sp = visible(a.window, pos);
    Cut cut = cut_of(a, sp, split);
    // Nothing to do. Not even to wait: the first split does, and what comes next waits for it.
    if (split >= cut.active) return;
    int64_t of_head = (int64_t)kvh * a.page_tokens * hd;
    Paged s = {reinterpret_cast<const __half *>(a.ks) + of_head,
               reinterpret_cast<const __half *>(a.vs) + of_head,
               a.page_table + (int64_t)range * a.max_pages,
               (int64_t)a.n_kv_head * a.page_tokens * hd,
               a.page_shift,
               hd};
    Tiles<HD, NR> w;
    int first = cut.c0 + warp * 16, own = turns && split == cut.active - 1 ? kvh : -1;
    w.start(s, sp, cut.c0, cut.c1, warp, first < cut.c1 ? s.at(first) : 0);
    // Rotated here: every position before the row's own is from earlier steps.
    bool any = warp < NW && w.p < w.c1, early = turns || w.p + 16 <= a.range_pos0[range];
    if (any && early) w.load_first();
    if (turns) hold_norms(a, fresh);
    // log2 e without softcap, for exp2
    float qs = a.softcap > 0.f ? a.scale : a.scale * LOG2E;
    const float *q = turns ? so : fresh.raw[0];
    int ldh = turns ? hd : HD;
    dep_wait();
    fetch_heads<HD>(a, fresh.raw, row, head0, n_heads, own);
    for (int i = threadIdx.x; turns && i < a.n_rot; i += blockDim.x) {
        if (a.cs) fresh.cs[i] = ldx(a.cs + row * a.ldcs + i);
    }
    cp_commit();
    cp_wait<0>();
    __syncthreads();
    if (turns) {
        turn_group(a, fresh, so, n_heads, own, slot);
        __syncthreads();
    }
#pragma unroll 1
    for (int i = warp; i < I; i += blockDim.x >> 5)
        pack_q<HD>(sq, i, n_heads, hd, qs, lane, q, ldh);
    __syncthreads();
    if (any && !early) w.load_first();
    if (warp < NW) {
        w.run(sq, a.softcap, own >= 0 ? fresh.kv : nullptr);
        w.put(so + warp * PART_FLOATS(NR, hd), n_heads);
    }
    finish_row<NR>(a, so, sw, row, grp, head0, n_heads, split, cut.active);
}

#define DECODE(HD, NR)                                                                             \
    ENTRY __launch_bounds__(NW * 32 + 64) attn_h##HD##_r##NR(PAR const k_attn a) {                 \
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
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.y, hd = a.head_dim;
    int64_t row = blockIdx.x;
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
    const float *ml = so + hd;
    float top = -1e30f, l4 = 0.f, e[NW];
    for (int k = 0; k < NW; k++) top = fmaxf(top, ml[k * PART_FLOATS(1, hd)]);
    for (int k = 0; k < NW; k++) {
        e[k] = exp2f(ml[k * PART_FLOATS(1, hd)] - top);
        l4 = fmaf(e[k], ml[k * PART_FLOATS(1, hd) + 1], l4);
    }
    for (int d = threadIdx.x; d < hd; d += 128) {
        float x = 0.f;
        for (int k = 0; k < NW; k++) x = fmaf(e[k], so[k * PART_FLOATS(1, hd) + d], x);
        y[d] = l4 > 0.f ? x / l4 : 0.f;
    }
}
