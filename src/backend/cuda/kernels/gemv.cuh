// Matrix product for 1..8 tokens, one pass over the weights, tensor cores.
//
// A CTA takes strips of 16 rows; its 8 or 16 warps each take one run of the columns of every strip
// and keep a ring of asynchronous copies of their weights full, across strips. The ring is filled
// before the dependency wait: weights depend on nothing. Activations are prepared by the warp that
// uses them: quantised formats get 16-bit fixed point in two int8 planes (one scale a run and
// token), so that group sums are exact integers; 16-bit formats get a high and a low half. The
// columns of the B operand are (token, plane). The partial sums of the warps are added in order.
#pragma once
#include "fmt.cuh"

#define GEMV_SLOTS(nw) ((nw) == 8 ? KGEMV_SLOTS_8 : KGEMV_SLOTS_16)

// Copies of the weights a warp needs, in the order it needs them. Items: next(p) points p at this
// warp's blocks of the next item and returns how many there are; 0: no more.
template <class F, class Items> struct Ring {
    static constexpr int BLOCKS = F::SLOT_KB, SLOT = BLOCKS * F::BYTES;
    uint8_t *base;      // this warp's slots, plus this lane's offset
    const uint8_t *src; // next part of the present item, plus this lane's offset
    int left, slot;     // blocks of the present item not yet asked for; next slot
    Items items;

    __device__ __forceinline__ void start(uint8_t *slots, int lane) {
        base = slots + lane * 16, slot = 0;
        left = items.next(src);
        src += lane * 16;
    }
    // The oldest part, once it is there; then its slot may be filled again.
    template <int SLOTS>
    __device__ __forceinline__ const uint8_t *wait(const uint8_t *slots, int at) {
        cp_wait<SLOTS - 1>();
        __syncwarp();
        return slots + at * SLOT;
    }
    template <int SLOTS> __device__ __forceinline__ void done(int at, int lane) {
        (void)at;
        __syncwarp();
        fill<SLOTS>(lane);
    }
    // Starts the copy of the next part into the next slot.
    template <int SLOTS> __device__ __forceinline__ void fill(int lane) {
        if (left > 0) {
            uint8_t *dst = base + slot * SLOT;
            constexpr int FULL_16 = SLOT / 16; // pieces of 16 bytes
            if (left >= F::SLOT_KB) {
#pragma unroll
                for (int p = 0; p < FULL_16 / 32; p++) cp16(dst + p * 512, src + p * 512);
                if (FULL_16 % 32 && lane < FULL_16 % 32) {
                    cp16(dst + FULL_16 / 32 * 512, src + FULL_16 / 32 * 512);
                }
            } else {
                int n16 = left * (F::BYTES / 16) - lane;
#pragma unroll
                for (int p = 0; p < (FULL_16 + 31) / 32; p++) {
                    if (p * 32 < n16) cp16(dst + p * 512, src + p * 512);
                }
            }
            src += SLOT;
            left -= F::SLOT_KB;
            if (left <= 0) {
                left = items.next(src);
                src += lane * 16;
            }
        }
        cp_commit();
        if (++slot == SLOTS) slot = 0;
    }
};

// The items of one launch: strips blockIdx.x, + gridDim.x, ...; GLU: gate and up alternate.
struct GemvItems {
    const k_gemv *a;
    int item, n_items, kb0, n_kb, block_bytes;
    __device__ __forceinline__ int next(const uint8_t *&p) {
        if (item >= n_items || n_kb == 0) return 0;
        bool glu = a->act != KACT_NONE;
        int i = blockIdx.x + (glu ? item >> 1 : item) * gridDim.x, s = glu ? item & 1 : 0;
        if (!glu && i >= a->seg[0].n_strips && a->n_seg > 1) {
            i -= a->seg[0].n_strips, s = 1;
            if (i >= a->seg[1].n_strips && a->n_seg > 2) i -= a->seg[1].n_strips, s = 2;
        }
        p = a->seg[s].w + ((size_t)i * a->n_kb + kb0) * block_bytes;
        item++;
        return n_kb;
    }
};

template <class F, int NT> struct Acc {
    float r[NT][F::FLOAT ? 4 : 2];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int i = 0; i < (F::FLOAT ? 4 : 2); i++) r[j][i] = 0.f;
    }
};

// Four blocks at once, see quads_int.
template <class F> struct Quad {
    static constexpr bool IS = F::BITS == 4 && F::GROUP == 64 && F::KB == 64 && F::SLOT_KB == 4;
};

// One block of quantised weights. xs: this block's activations; xm: its sums.
template <class F, int NT, int MT, int SB>
__device__ __forceinline__ void block_int(Acc<F, NT> &acc, const uint8_t *tile, const uint4 *xs,
                                          const float *xm, const int *xo, const int *xt, int lane) {
    constexpr int GB = F::GROUP < 32 ? 1 : F::GROUP / 32; // runs of 32 columns in a group
    int g = lane >> 2;
    int k[NT][4];
#pragma unroll
    for (int i = 0; i < F::KB / 64; i++) {
        Codes<F> c;
        c.load(tile, i, lane);
        uint4 x[NT];
#pragma unroll
        for (int j = 0; j < NT; j++) x[j] = xs[i * MT * 8 + xo[j]];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t a[4];
            c.get(tile, i, h, lane, a);
            if (F::GROUP == 16) {
#pragma unroll
                for (int q = 0; q < 2; q++) {
                    int grp = (i * 2 + h) * 2 + q;
                    Scale2 s = scales<F>(tile, grp, g, SB);
#pragma unroll
                    for (int j = 0; j < NT; j++) {
                        k[j][0] = k[j][1] = k[j][2] = k[j][3] = MAGIC_I;
                        mma_i8_k16(k[j], a[q * 2], a[q * 2 + 1],
                                   h ? (q ? x[j].w : x[j].z) : (q ? x[j].y : x[j].x));
                        float X
                        = xm[grp * MT + xt[j]];
                        float v0 = fmaf(__int_as_float(k[j][0]) - MAGIC_F, 256.f,
                                        __int_as_float(k[j][1]) - MAGIC_F);
                        float v1 = fmaf(__int_as_float(k[j][2]) - MAGIC_F, 256.f,
                                        __int_as_float(k[j][3]) - MAGIC_F);
                        acc.r[j][0] = fmaf(s.s0, v0, fmaf(s.b0, X, acc.r[j][0]));
                        acc.r[j][1] = fmaf(s.s1, v1, fmaf(s.b1, X, acc.r[j][1]));
                    }
                }
                continue;
            }
            int blk = i * 2 + h;
#pragma unroll
            for (int j = 0; j < NT; j++) {
                if (blk % GB == 0) k[j][0] = k[j][1] = k[j][2] = k[j][3] = MAGIC_I;
                if (Quad<F>::IS) { // see x_word
                    mma_i8(k[j], a[0], a[1], a[2], a[3], h ? x[j].y : x[j].x, h ? x[j].w : x[j].z);
                } else {
                    mma_i8(k[j], a[0], a[1], a[2], a[3], h ? x[j].z : x[j].x, h ? x[j].w : x[j].y);
                }
            }
            if ((blk + 1) % GB == 0) {
                int grp = blk / GB;
                Scale2 s = scales<F>(tile, grp, g, SB);
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    float X
                    = xm[grp * MT + xt[j]];
                    float v0 = fmaf(__int_as_float(k[j][0]) - MAGIC_F, 256.f,
                                    __int_as_float(k[j][1]) - MAGIC_F);
                    float v1 = fmaf(__int_as_float(k[j][2]) - MAGIC_F, 256.f,
                                    __int_as_float(k[j][3]) - MAGIC_F);
                    acc.r[j][0] = fmaf(s.s0, v0, fmaf(s.b0, X, acc.r[j][0]));
                    acc.r[j][1] = fmaf(s.s1, v1, fmaf(s.b1, X, acc.r[j][1]));
                }
            }
        }
    }
}

// 4-bit codes with a scale for every 64 columns, one token: four blocks at once. Each block's
// activations stand in two columns of B of their own, zeros in the others, so that lane t ends with
// the sums of block t and scales are applied once. High nibbles are taken where they stand, as 16
// times their value. n: blocks there are; zero: 16 zero bytes.
// Q quads, of n blocks in all; addresses in shared memory. All loads come first.
template <class F, int SB, int Q>
__device__ __forceinline__ void quads_int(Acc<F, 1> &acc, uint32_t slot, int n, uint32_t xs,
                                          uint32_t xm, uint32_t zero, int lane) {
    int g = lane >> 2, t = lane & 3, mine = g >> 1;
    uint32_t at = xs + mine * 128 + (g & 1) * 64 + t * 16;
    const uint32_t low = 0x0f0f0f0fu, high = 0xf0f0f0f0u;
    uint4 q[Q][4], x[Q][4];
    uint2 s[Q];
    float X
    [Q];
#pragma unroll
    for (int k = 0; k < Q; k++) {
        uint32_t have = mine + 4 * k < n ? at + k * 512 : zero;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            q[k][i] = lds16(slot + (4 * k + i) * F::BYTES + lane * 16);
            x[k][i] = lds16(mine == i ? have : zero);
        }
        bool in = t + 4 * k < n;
        s[k] = in ? lds8(slot + (4 * k + t) * F::BYTES + F::CODES + g * 8) : make_uint2(0, 0);
        X
        [k] = in ? lds4(xm + (4 * k + t) * 4) : 0.f;
    }
    int e[Q][4], o[Q][4];
#pragma unroll
    for (int k = 0; k < Q; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) e[k][i] = o[k][i] = MAGIC_I;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int k = 0; k < Q; k++) {
            uint4 w = q[k][i];
            mma_i8(e[k], w.x & low, w.z & low, w.y & low, w.w & low, x[k][i].x, x[k][i].y);
            mma_i8(o[k], w.x & high, w.z & high, w.y & high, w.w & high, x[k][i].z, x[k][i].w);
        }
#pragma unroll
    for (int k = 0; k < Q; k++) {
        float s0 = SB ? bf_lo(s[k].x) : h_lo(s[k].x), b0 = SB ? bf_hi(s[k].x) : h_hi(s[k].x);
        float s1 = SB ? bf_lo(s[k].y) : h_lo(s[k].y), b1 = SB ? bf_hi(s[k].y) : h_hi(s[k].y);
        float f[4], h[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f[i] = __int_as_float(e[k][i]) - MAGIC_F, h[i] = __int_as_float(o[k][i]) - MAGIC_F;
        }
        float v0 = fmaf(fmaf(h[0], 256.f, h[1]), 0.0625f, fmaf(f[0], 256.f, f[1]));
        float v1 = fmaf(fmaf(h[2], 256.f, h[3]), 0.0625f, fmaf(f[2], 256.f, f[3]));
        acc.r[0][0] = fmaf(s0, v0, fmaf(b0, X[k], acc.r[0][0]));
        acc.r[0][1] = fmaf(s1, v1, fmaf(b1, X[k], acc.r[0][1]));
    }
}

template <class F, int NT, int MT>
__device__ __forceinline__ void block_float(Acc<F, NT> &acc, const uint8_t *tile, const uint4 *xs,
                                            const int *xo, int lane) {
#pragma unroll
    for (int i = 0; i < F::KB / 32; i++) {
        uint4 a0 = *reinterpret_cast<const uint4 *>(tile + (2 * i) * 512 + lane * 16);
        uint4 a1 = *reinterpret_cast<const uint4 *>(tile + (2 * i + 1) * 512 + lane * 16);
#pragma unroll
        for (int j = 0; j < NT; j++) {
            uint4 x = xs[i * MT * 8 + xo[j]];
            if (F::BF) {
                mma_bf(acc.r[j], a0.x, a0.y, a0.z, a0.w, x.x, x.y);
                mma_bf(acc.r[j], a1.x, a1.y, a1.z, a1.w, x.z, x.w);
            } else {
                mma_h(acc.r[j], a0.x, a0.y, a0.z, a0.w, x.x, x.y);
                mma_h(acc.r[j], a1.x, a1.y, a1.z, a1.w, x.z, x.w);
            }
        }
    }
}

// One strip against a warp's run of columns, from the ring. my_xs, my_xm: the run's activations.
// Where Quad applies, block b of a slot is summed with the blocks b of the other slots, and the
// four sums are added at the end: for any number of tokens in the same order.
template <class F, int MT, int SB, int SLOTS, class R>
__device__ __forceinline__ void strip_sum(Acc<F, (MT > 4 ? 2 : 1)> &acc, R &ring,
                                          const uint8_t *slots, int &slot, int n_kb,
                                          const uint4 *my_xs, const float *my_xm, uint32_t zero,
                                          const int *xo, const int *xt, int lane) {
    constexpr int NT = MT > 4 ? 2 : 1, SUMS = Quad<F>::IS && MT > 1 ? 4 : 1, PART = R::BLOCKS;
    Acc<F, NT> part[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) part[i].clear();
#pragma unroll 1
    for (int kb = 0; kb < n_kb; kb += PART) {
        const uint8_t *tile = ring.template wait<SLOTS>(slots, slot);
        const uint4 *x = my_xs + kb * (F::KB / (F::FLOAT ? 32 : 64)) * MT * 8;
        const float *xq = my_xm + kb * (F::KB / F::XG) * MT;
        int n = n_kb - kb;
        if constexpr (Quad<F>::IS && MT == 1) {
            quads_int<F, SB, PART / 4>(part[0], smem_addr(tile), n, smem_addr(x), smem_addr(xq),
                                       zero, lane);
        } else {
            auto block = [&](int b) {
                if constexpr (F::FLOAT) {
                    block_float<F, NT, MT>(part[0], tile + b * F::BYTES,
                                           x + b * (F::KB / 32) * MT * 8, xo, lane);
                } else {
                    block_int<F, NT, MT, SB>(part[b % SUMS], tile + b * F::BYTES,
                                             x + b * (F::KB / 64) * MT * 8,
                                             xq + b * (F::KB / F::XG) * MT, xo, xt, lane);
                }
            };
            if (n >= PART) {
#pragma unroll
                for (int b = 0; b < PART; b++) block(b);
            } else if (SUMS > 1) {
#pragma unroll
                for (int b = 0; b < PART; b++) {
                    if (b < n) block(b);
                }
            } else {
#pragma unroll 1
                for (int b = 0; b < n; b++) block(b);
            }
        }
        ring.template done<SLOTS>(slot, lane);
        if (++slot == SLOTS) slot = 0;
    }
    acc = part[0];
    if constexpr (SUMS > 1) {
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                acc.r[j][i] = (part[0].r[j][i] + part[1 % SUMS].r[j][i]) +
                              (part[2 % SUMS].r[j][i] + part[3 % SUMS].r[j][i]);
            }
    } else if constexpr (Quad<F>::IS) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            acc.r[0][i] += __shfl_xor_sync(FULL, acc.r[0][i], 1);
            acc.r[0][i] += __shfl_xor_sync(FULL, acc.r[0][i], 2);
        }
    }
}

// ---- Preparing activations ----
// A lane takes columns c .. c+3 of every 128 of its warp's run [c0, c1). Up to HELD such pieces are
// held in registers: they are asked for together, the next token's while this one is prepared.
// HELD is no larger than the run needs: code that is skipped is still fetched.

// Four numbers from column c on, zero past the end of the row. L2 only for activations.
template <bool WEIGHT>
__device__ __forceinline__ float4 load4(const k_gemv &a, const float *x, int c) {
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (a.vec4) {
        if (c < a.n_cols) {
            v = WEIGHT ? __ldg(reinterpret_cast<const float4 *>(x + c))
                       : __ldcg(reinterpret_cast<const float4 *>(x + c));
        }
        return v;
    }
    if (c < a.n_cols) v.x = ldx(x + c);
    if (c + 1 < a.n_cols) v.y = ldx(x + c + 1);
    if (c + 2 < a.n_cols) v.z = ldx(x + c + 2);
    if (c + 3 < a.n_cols) v.w = ldx(x + c + 3);
    return v;
}

// Sum of squares, then times gamma.
__device__ __forceinline__ float4 times_gamma(float4 v, float4 w, float &ssq) {
    ssq = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, ssq))));
    return make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
}

__device__ __forceinline__ float max4(float m, float4 v) {
    return fmaxf(m, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
}

// The scale of a run from its largest magnitude: d, and 1 / d.
template <class F> __device__ __forceinline__ float2 run_scale(float m) {
    if (F::BF) return make_float2(1.f, 1.f);
    m = warp_max(m);
    if (!F::FLOAT) return make_float2(m * (1.f / 32512.f), m > 0.f ? __fdividef(32512.f, m) : 0.f);
    if (!(m > 0.f && m < 3e38f)) return make_float2(1.f, 1.f);
    int e = (int)((__float_as_uint(m) >> 23) & 255) - 127 - 8; // |x| / d < 512
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

// Four columns into the B operand of token `tok`; every lane calls it, `in` says whose columns are
// in the run.
template <class F, int MT>
__device__ __forceinline__ void put4(float4 v, float inv, int c, bool in, int tok, uint32_t *xs,
                                     float *xm) {
    if constexpr (F::FLOAT) {
        v.x *= inv, v.y *= inv, v.z *= inv, v.w *= inv;
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
        int i = c >> 5, t = (c & 15) >> 2, f = (c & 31) >> 4;
        uint2 *p = reinterpret_cast<uint2 *>(xs + (((i * MT + tok) * 2) * 4 + t) * 4 + f * 2);
        if (in) p[0] = make_uint2(h0, h1), p[8] = make_uint2(l0, l1);
    } else {
        float sum = 0.f;
        uint2 q = codes4(v, inv, sum);
#pragma unroll
        for (int s = 1; s < F::XG / 4; s <<= 1) sum += __shfl_xor_sync(FULL, sum, s);
        int i = c >> 6, w = (c & 63) >> 2; // run of 64 columns, word in it
        uint32_t *p = xs + (((i * MT + tok) * 2) * 4 + (w & 3)) * 4 + x_word<F>(w >> 2);
        if (in) {
            p[0] = q.x;
            p[16] = q.y;
            if (c % F::XG == 0) xm[(c / F::XG) * MT + tok] = sum;
        }
    }
}

// Runs of at most HELD * 128 columns.
template <class F, int MT, int HELD>
__device__ __forceinline__ void prepare_held(const k_gemv &a, const float *x0, int n_tok, int c0,
                                             int c1, uint32_t *xs, float *xm, float *ds,
                                             float *ssqs, int lane) {
    float4 next[HELD], gam[HELD];
    int c = c0 + lane * 4;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        if (c0 + i * 128 >= c1) continue;
        next[i] = load4<false>(a, x0, c + i * 128);
        if (a.gamma) gam[i] = load4<true>(a, a.gamma, c + i * 128);
    }
#pragma unroll 1
    for (int k = 0; k < n_tok; k++) {
        float4 v[HELD];
        float ssq = 0.f, m = 0.f;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            if (c0 + i * 128 >= c1) continue;
            v[i] = next[i];
            if (MT > 1 && k + 1 < n_tok) {
                next[i] = load4<false>(a, x0 + (size_t)(k + 1) * a.ldx, c + i * 128);
            }
        }
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            if (c0 + i * 128 >= c1) continue;
            if (c + i * 128 >= c1) v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (a.gamma) v[i] = times_gamma(v[i], gam[i], ssq);
            m = max4(m, v[i]);
        }
        float2 d = run_scale<F>(m);
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            if (c0 + i * 128 >= c1) continue;
            put4<F, MT>(v[i], d.y, c + i * 128, c + i * 128 < c1, k, xs, xm);
        }
        if (a.gamma) ssq = warp_sum(ssq);
        if (lane == 0) ds[k] = d.x, ssqs[k] = ssq;
    }
}

// Longer runs: twice over the row.
template <class F, int MT>
__device__ __forceinline__ void prepare_long(const k_gemv &a, const float *x, int k, int c0, int c1,
                                             uint32_t *xs, float *xm, float *ds, float *ssqs,
                                             int lane) {
    float ssq = 0.f, none = 0.f, m = 0.f;
    auto get = [&](int c, float &q) {
        float4 v = c < c1 ? load4<false>(a, x, c) : make_float4(0.f, 0.f, 0.f, 0.f);
        return a.gamma && c < c1 ? times_gamma(v, load4<true>(a, a.gamma, c), q) : v;
    };
#pragma unroll 4
    for (int c = c0; c < c1; c += 128) m = max4(m, get(c + lane * 4, ssq));
    float2 d = run_scale<F>(m);
#pragma unroll 4
    for (int c = c0; c < c1; c += 128) {
        put4<F, MT>(get(c + lane * 4, none), d.y, c + lane * 4, c + lane * 4 < c1, k, xs, xm);
    }
    if (a.gamma) ssq = warp_sum(ssq);
    if (lane == 0) ds[k] = d.x, ssqs[k] = ssq;
}

// What the rest of the kernel shares.
struct Gemv {
    int warp, lane, g, t, tok0, n_tok, pair, n_items, kb0, n_kb;
    uint4 *xs;
    float *xm, *ds, *ssqs, *part; // ds, ssqs: [warp][8]; part: [2][warp][8][16]
    uint8_t *slots;
    uint32_t zero; // 16 zero bytes of shared memory
};

// Products of every item and their sums over the warps. SB: 16-bit scales are bf16.
template <class F, int MT, int NW, int SB>
__device__ __forceinline__ void gemv_main(const k_gemv &a, const Gemv &c,
                                          Ring<F, GemvItems> &ring) {
    constexpr int NT = MT > 4 ? 2 : 1;
    int warp = c.warp, lane = c.lane, g = c.g, t = c.t, n_tok = c.n_tok, pair = c.pair;
    int xo[NT], xt[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) {
        xo[j] = (min(4 * j + (g >> 1), n_tok - 1) * 2 + (g & 1)) * 4 + t;
        xt[j] = min(4 * j + t, n_tok - 1);
    }
    const uint4 *my_xs = c.xs + (size_t)c.kb0 * (F::KB / (F::FLOAT ? 32 : 64)) * MT * 8;
    const float *my_xm = c.xm + c.kb0 * (F::KB / F::XG) * MT;
    int buf = 0, slot = 0;
    float gate = 0.f;
#pragma unroll 1
    for (int it = 0; it < c.n_items; it++) {
        // The outputs of an item belong to other warps each time. Where this thread's output
        // goes; its bias and residual are requested now.
        int e = ((warp - (pair ? it >> 1 : it)) & (NW - 1)) * 32 + lane;
        int my_row = e & 15, my_tok = e >> 4;
        bool writes = my_tok < n_tok;
        int strip = 0, si = pair ? it & 1 : 0, row = 0;
        float add = 0.f;
        if (writes) {
            strip = blockIdx.x + (pair ? it >> 1 : it) * gridDim.x;
            if (!pair && a.n_seg > 1 && strip >= a.seg[0].n_strips) {
                strip -= a.seg[0].n_strips, si = 1;
                if (a.n_seg > 2 && strip >= a.seg[1].n_strips) strip -= a.seg[1].n_strips, si = 2;
            }
            row = strip * 16 + my_row;
            const k_seg &s = a.seg[si];
            if (row < s.n_rows) {
                if (s.bias) add = s.bias[row];
                if (s.res) add += ldx(s.res + (size_t)(c.tok0 + my_tok) * s.ldr + row);
            }
        }
        Acc<F, NT> acc;
        strip_sum<F, MT, SB, GEMV_SLOTS(NW)>(acc, ring, c.slots, slot, c.n_kb, my_xs, my_xm, c.zero,
                                             xo, xt, lane);
#pragma unroll
        for (int j = 0; j < NT; j++) {
            int k = 4 * j + t;
            if (k < n_tok) {
                float d = c.ds[warp * 8 + k];
                float r0 = F::FLOAT ? acc.r[j][0] + acc.r[j][1] : acc.r[j][0];
                float r1 = F::FLOAT ? acc.r[j][F::FLOAT ? 2 : 0] + acc.r[j][F::FLOAT ? 3 : 0]
                                    : acc.r[j][1];
                float *q = c.part + ((buf * NW + warp) * 8 + k) * 16;
                q[g] = d * r0, q[g + 8] = d * r1;
            }
        }
        __syncthreads();
        if (writes) {
            float v = 0.f;
#pragma unroll
            for (int w = 0; w < NW; w++) v += c.part[((buf * NW + w) * 8 + my_tok) * 16 + my_row];
            float r = 1.f;
            if (a.gamma) {
                float q = 0.f;
#pragma unroll
                for (int w = 0; w < NW; w++) q += c.ssqs[w * 8 + my_tok];
                r = 1.f / sqrtf(q / (float)a.n_cols + a.eps);
            }
            v = fmaf(v, r, add); // said, so that every instance of the template rounds alike
            if (pair && si == 0) {
                gate = v;
            } else {
                if (pair) v = activate(gate, a.act) * v;
                const k_seg &o = a.seg[pair ? 0 : si];
                if (row < o.n_rows) o.y[(size_t)(c.tok0 + my_tok) * o.ldy + row] = v;
            }
        }
        buf ^= 1;
    }
    cp_wait<0>();
}

// MT: most tokens of a pass (strides of the prepared activations). NW: warps.
template <class F, int MT, int NW> __device__ __forceinline__ void gemv_body(const k_gemv &a) {
    extern __shared__ __align__(128) uint8_t sm[];
    __shared__ uint4 zero;
    Gemv c;
    c.zero = smem_addr(&zero);
    if (threadIdx.x == 0) zero = make_uint4(0, 0, 0, 0);
    c.warp = threadIdx.x >> 5, c.lane = threadIdx.x & 31, c.g = c.lane >> 2, c.t = c.lane & 3;
    c.tok0 = blockIdx.y * a.pass_tok, c.n_tok = MT == 1 ? 1 : min(a.pass_tok, a.n_tok - c.tok0);
    c.pair = a.act != KACT_NONE;
    int mine = (a.n_items - 1 - (int)blockIdx.x) / (int)gridDim.x + 1; // items (GLU: pairs)
    c.n_items = c.pair ? 2 * mine : mine;
    c.xs = reinterpret_cast<uint4 *>(sm + a.off_xs);
    c.xm = reinterpret_cast<float *>(sm + a.off_xm);
    c.ds = reinterpret_cast<float *>(sm + a.off_d);
    c.ssqs = c.ds + NW * 8;
    c.part = reinterpret_cast<float *>(sm + a.off_part);
    c.kb0 = c.warp * a.n_kb / NW, c.n_kb = (c.warp + 1) * a.n_kb / NW - c.kb0;
    c.slots = sm + c.warp * GEMV_SLOTS(NW) * Ring<F, GemvItems>::SLOT;

    Ring<F, GemvItems> ring;
    ring.items = GemvItems{&a, 0, c.n_items, c.kb0, c.n_kb, F::BYTES};
    ring.start(c.slots, c.lane);
    dep_trigger();
#pragma unroll 1
    for (int i = 0; i < GEMV_SLOTS(NW); i++) ring.template fill<GEMV_SLOTS(NW)>(c.lane);
    dep_wait();

    const float *x0 = a.x + (size_t)c.tok0 * a.ldx;
    int c0 = c.kb0 * F::KB, c1 = c0 + c.n_kb * F::KB;
    float *d = c.ds + c.warp * 8, *q = c.ssqs + c.warp * 8;
    uint32_t *xs = (uint32_t *)c.xs;
    if (c1 - c0 <= 128) {
        prepare_held<F, MT, 1>(a, x0, c.n_tok, c0, c1, xs, c.xm, d, q, c.lane);
    } else if (c1 - c0 <= 512) {
        prepare_held<F, MT, 4>(a, x0, c.n_tok, c0, c1, xs, c.xm, d, q, c.lane);
    } else if (MT < 8 && c1 - c0 <= 1792) {
        prepare_held < F, MT, MT<8 ? 14 : 1>(a, x0, c.n_tok, c0, c1, xs, c.xm, d, q, c.lane);
    } else {
#pragma unroll 1
        for (int k = 0; k < c.n_tok; k++) {
            prepare_long<F, MT>(a, x0 + (size_t)k * a.ldx, k, c0, c1, xs, c.xm, d, q, c.lane);
        }
    }
    __syncthreads(); // of `zero`
    if (F::SC == KSC_PAIR && a.scale_type) {
        gemv_main<F, MT, NW, F::SC == KSC_PAIR>(a, c, ring);
    } else {
        gemv_main<F, MT, NW, 0>(a, c, ring);
    }
}

#define GEMV_ENTRY(name, MT, NW)                                                                   \
    ENTRY __launch_bounds__(NW * 32, 1) gemv_##name##_t##MT(PAR const k_gemv a) {                  \
        gemv_body<Fmt_##name, MT, NW>(a);                                                          \
    }
// Tokens of a pass: quantised formats 1, 4, 8; 16-bit floats (prepared in twice the bytes) 1, 2, 4.
// Eight tokens are bound by instructions, not by memory: twice the warps.
#define GEMV(name)                                                                                 \
    GEMV_ENTRY(name, 1, 8)                                                                         \
    GEMV_ENTRY(name, 4, 8)                                                                         \
    GEMV_ENTRY(name, 8, 16)
#define GEMV_FLOAT(name)                                                                           \
    GEMV_ENTRY(name, 1, 8)                                                                         \
    GEMV_ENTRY(name, 2, 8)                                                                         \
    GEMV_ENTRY(name, 4, 8)
