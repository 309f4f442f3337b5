// Attention of many rows: blocks of 64 rows of one sequence and head against its paged float16
// state, on tensor cores, with causal masks and windows by position.
//
// Grid x is an upper bound on the row blocks of the step; a CTA finds its sequence from
// range_first. 4 warps, 16 rows each; K and V tiles of 64 tokens are double-buffered.
#include "dev.cuh"

#define LOG2E 1.4426950408889634f
enum { BQ = 64, BK = 64 };

__device__ __forceinline__ void ldsm4_t(uint32_t *r, const void *p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_addr(p)));
}

// Range and block of rows of CTA b: rows first..last of the step. False: nothing to do.
__device__ __forceinline__ bool find_block(const k_attn &a, int b, int *range, int *first,
                                           int *last) {
    int lane = threadIdx.x & 31, n = a.counts[1], before = 0;
    for (int r0 = 0; r0 < n; r0 += 32) {
        int r = r0 + lane, len = r < n ? a.range_first[r + 1] - a.range_first[r] : 0;
        int blocks = (len + BQ - 1) / BQ, sum = blocks;
#pragma unroll
        for (int s = 1; s < 32; s <<= 1) {
            int v = __shfl_up_sync(FULL, sum, s);
            if (lane >= s) sum += v;
        }
        int start = before + sum - blocks;
        unsigned hit = __ballot_sync(FULL, b >= start && b < start + blocks);
        if (hit) {
            int src = __ffs(hit) - 1;
            int st = __shfl_sync(FULL, start, src);
            *range = r0 + src;
            *first = a.range_first[*range] + (b - st) * BQ;
            *last = min(*first + BQ, a.range_first[*range + 1]);
            return true;
        }
        before = __shfl_sync(FULL, before + sum, 31);
    }
    return false;
}

template <int HD> __device__ __forceinline__ void prefill_body(const k_attn &a) {
    constexpr int KS = HD * 2 + 64, VS = HD * 2 + 16; // row strides of the tiles, bytes
    constexpr int STAGE = BK * (KS + VS), I = HD / 32, NB = HD / 8;
    extern __shared__ __align__(128) uint8_t sm[];
    dep_trigger();
    dep_wait();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int head = blockIdx.y, kvh = head / a.n_rep, hd = a.head_dim;
    int range, first, last;
    if (!find_block(a, blockIdx.x, &range, &first, &last)) return;
    int pos_first = a.pos[first], pos_last = a.pos[last - 1];
    int lo = a.window > 0 ? max(0, pos_first - a.window + 1) / BK * BK : 0;
    const int *table = a.page_table + (int64_t)range * a.max_pages;
    int64_t page_elems = (int64_t)a.n_kv_head * a.page_tokens * hd;
    const __half *K = reinterpret_cast<const __half *>(a.ks) + (int64_t)kvh * a.page_tokens * hd;
    const __half *V = reinterpret_cast<const __half *>(a.vs) + (int64_t)kvh * a.page_tokens * hd;

    auto load = [&](int p0, uint8_t *st) {
        for (int i = threadIdx.x; i < BK * (HD / 8); i += 128) {
            int tok = i / (HD / 8), d = i % (HD / 8) * 8, p = p0 + tok;
            bool ok = d < hd && p <= pos_last;
            int page = ok ? max(0, table[p >> a.page_shift]) : 0;
            int64_t at = page * page_elems + (int64_t)(p & ((1 << a.page_shift) - 1)) * hd + d;
            if (!ok) at = 0;
            cp16_or_zero(st + tok * KS + d * 2, K + at, ok);
            cp16_or_zero(st + BK * KS + tok * VS + d * 2, V + at, ok);
        }
        cp_commit();
    };
    load(lo, sm);

    // q of rows g and g + 8 of this warp; lane's dims 32i + 8t .. +7
    uint32_t q[2 * I][4];
    float qs = a.softcap > 0.f ? a.scale : a.scale * LOG2E;
    int r0 = first + warp * 16 + g, r1 = r0 + 8;
#pragma unroll
    for (int i = 0; i < I; i++) {
        float v0[8], v1[8];
        int d = 32 * i + 8 * t;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            bool in = d + e < hd;
            v0[e] = in && r0 < last
                        ? ldx(a.q + (int64_t)r0 * a.ldq + (int64_t)head * hd + d + e) * qs
                        : 0.f;
            v1[e] = in && r1 < last
                        ? ldx(a.q + (int64_t)r1 * a.ldq + (int64_t)head * hd + d + e) * qs
                        : 0.f;
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            q[2 * i + k][0] = pack_h(v0[4 * k], v0[4 * k + 1]);
            q[2 * i + k][1] = pack_h(v1[4 * k], v1[4 * k + 1]);
            q[2 * i + k][2] = pack_h(v0[4 * k + 2], v0[4 * k + 3]);
            q[2 * i + k][3] = pack_h(v1[4 * k + 2], v1[4 * k + 3]);
        }
    }
    int p0row = pos_first + warp * 16 + g, p1row = p0row + 8; // positions of the two rows
    float o[NB][4], m0 = -1e30f, m1 = -1e30f, l0 = 0.f, l1 = 0.f;
#pragma unroll
    for (int i = 0; i < NB; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
    int buf = 0;
#pragma unroll 1
    for (int p = lo; p <= pos_last; p += BK) {
        if (p + BK <= pos_last) {
            load(p + BK, sm + (buf ^ 1) * STAGE);
            cp_wait<1>();
        } else {
            cp_wait<0>();
        }
        __syncthreads();
        const uint8_t *ks = sm + buf * STAGE, *vs = ks + BK * KS;
        float s[8][4];
#pragma unroll
        for (int n = 0; n < 8; n++) {
            s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
            for (int i = 0; i < I; i++) {
                uint4 b = *reinterpret_cast<const uint4 *>(ks + (n * 8 + g) * KS + i * 64 + t * 16);
                mma_h(s[n], q[2 * i][0], q[2 * i][1], q[2 * i][2], q[2 * i][3], b.x, b.y);
                mma_h(s[n], q[2 * i + 1][0], q[2 * i + 1][1], q[2 * i + 1][2], q[2 * i + 1][3], b.z,
                      b.w);
            }
        }
        if (a.softcap > 0.f) {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    s[n][k] = a.softcap * tanhf(s[n][k] / a.softcap) * LOG2E;
                }
        }
        int w = a.window > 0 ? a.window : 0x3fffffff;
        bool mask = p + BK - 1 > pos_first + warp * 16 || p <= pos_first + warp * 16 + 15 - w;
        if (mask) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
                int c = p + n * 8 + 2 * t;
                if (c > p0row || c <= p0row - w) s[n][0] = -1e30f;
                if (c + 1 > p0row || c + 1 <= p0row - w) s[n][1] = -1e30f;
                if (c > p1row || c <= p1row - w) s[n][2] = -1e30f;
                if (c + 1 > p1row || c + 1 <= p1row - w) s[n][3] = -1e30f;
            }
        }
        float x0 = -1e30f, x1 = -1e30f;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            x0 = fmaxf(x0, fmaxf(s[n][0], s[n][1])), x1 = fmaxf(x1, fmaxf(s[n][2], s[n][3]));
        }
        x0 = fmaxf(x0, __shfl_xor_sync(FULL, x0, 1)), x0 = fmaxf(x0, __shfl_xor_sync(FULL, x0, 2));
        x1 = fmaxf(x1, __shfl_xor_sync(FULL, x1, 1)), x1 = fmaxf(x1, __shfl_xor_sync(FULL, x1, 2));
        float n0 = fmaxf(m0, x0), n1 = fmaxf(m1, x1);
        float f0 = exp2f(m0 - n0), f1 = exp2f(m1 - n1);
        m0 = n0, m1 = n1, l0 *= f0, l1 *= f1;
        // A row of which nothing is visible yet has m = -1e30: its terms must be zero, not one.
        float e0 = m0 > -1e29f ? m0 : 1e30f, e1 = m1 > -1e29f ? m1 : 1e30f;
#pragma unroll
        for (int i = 0; i < NB; i++) o[i][0] *= f0, o[i][1] *= f0, o[i][2] *= f1, o[i][3] *= f1;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            s[n][0] = exp2f(s[n][0] - e0), s[n][1] = exp2f(s[n][1] - e0);
            s[n][2] = exp2f(s[n][2] - e1), s[n][3] = exp2f(s[n][3] - e1);
            l0 += s[n][0] + s[n][1], l1 += s[n][2] + s[n][3];
        }
#pragma unroll
        for (int k = 0; k < 4; k++) { // 16 tokens
            uint32_t a0 = pack_h(s[2 * k][0], s[2 * k][1]), a1 = pack_h(s[2 * k][2], s[2 * k][3]);
            uint32_t a2 = pack_h(s[2 * k + 1][0], s[2 * k + 1][1]);
            uint32_t a3 = pack_h(s[2 * k + 1][2], s[2 * k + 1][3]);
#pragma unroll
            for (int i = 0; i < NB; i += 2) { // 16 dims
                uint32_t b[4];
                ldsm4_t(b, vs + (k * 16 + (lane & 15)) * VS + (i * 8 + (lane >> 4) * 8) * 2);
                mma_h(o[i], a0, a1, a2, a3, b[0], b[1]);
                mma_h(o[i + 1], a0, a1, a2, a3, b[2], b[3]);
            }
        }
        __syncthreads();
        buf ^= 1;
    }
    l0 += __shfl_xor_sync(FULL, l0, 1), l0 += __shfl_xor_sync(FULL, l0, 2);
    l1 += __shfl_xor_sync(FULL, l1, 1), l1 += __shfl_xor_sync(FULL, l1, 2);
    float i0 = l0 > 0.f ? 1.f / l0 : 0.f, i1 = l1 > 0.f ? 1.f / l1 : 0.f;
#pragma unroll
    for (int i = 0; i < NB; i++) {
        int d = i * 8 + 2 * t;
        if (d >= hd) continue;
        if (r0 < last) {
            float *y = a.y + (int64_t)r0 * a.ldy + (int64_t)head * hd + d;
            y[0] = o[i][0] * i0, y[1] = o[i][1] * i0;
        }
        if (r1 < last) {
            float *y = a.y + (int64_t)r1 * a.ldy + (int64_t)head * hd + d;
            y[0] = o[i][2] * i1, y[1] = o[i][3] * i1;
        }
    }
}

ENTRY __launch_bounds__(128) prefill_h64(PAR const k_attn a) {
    prefill_body<64>(a);
}
ENTRY __launch_bounds__(128) prefill_h128(PAR const k_attn a) {
    prefill_body<128>(a);
}
ENTRY __launch_bounds__(128) prefill_h256(PAR const k_attn a) {
    prefill_body<256>(a);
}
