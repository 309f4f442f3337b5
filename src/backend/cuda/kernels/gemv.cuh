// Matrix product for 1..8 tokens, one pass over the weights, tensor cores.
//
// A CTA takes strips of 16 rows; its 8 or 16 warps each take one run of the columns of every strip
// and keep a ring of asynchronous copies of their weights full, across strips. The ring is filled
// before the dependency wait: weights depend on nothing. Activations are prepared by the warp that
// uses them (prepare.cuh). The columns of the B operand are (token, plane). The partial sums of the
// warps are added in order.
#pragma once
#include "prepare.cuh"

#define GEMV_SLOTS(nw) ((nw) == 8 ? KGEMV_SLOTS_8 : KGEMV_SLOTS_16)

// The items of one launch: strips blockIdx.x, + gridDim.x, ...; GLU: gate and up alternate. next(p)
// points p at this warp's blocks of the next one and returns how many there are; 0: no more.
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

// Copies of the weights a warp needs, in the order it needs them.
template <class F> struct Ring {
    static constexpr int BLOCKS = F::SLOT_KB, SLOT = BLOCKS * F::BYTES;
    uint8_t *base;      // this warp's slots, plus this lane's offset
    const uint8_t *src; // next part of the present item, plus this lane's offset
    int left, slot;     // blocks of the present item not yet asked for; next slot
    GemvItems items;

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
    template <int SLOTS> __device__ __forceinline__ void done(int lane) {
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

template <class F, int NT> struct Acc {
    float r[NT][F::FLOAT ? 4 : 2];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int i = 0; i < (F::FLOAT ? 4 : 2); i++) r[j][i] = 0.f;
    }
};

// A group's product to a sum: weights' scale s and bias b, codes' product v, activations' sum X and
// scale d. LATE: d is left out, see strip_sum.
template <bool LATE>
__device__ __forceinline__ float add_group(float acc, float s, float b, float v, float X, float d) {
    return LATE ? fmaf(s, v, fmaf(b, X, acc)) : fmaf(d, fmaf(s, v, b * X), acc);
}

// One block of quantised weights. xs: this block's activations; xm: its sums; d: their scales. sb:
// scales of weights are bf16.
template <class F, int NT, int MT>
__device__ __forceinline__ void block_int(Acc<F, NT> &acc, const uint8_t *tile, const uint4 *xs,
                                          const float *xm, const float *d, const int *xo,
                                          const int *xt, int sb, int lane) {
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
            if (Quad<F>::IS) { // columns in the order of x_word
                c.nibbles(h, a);
            } else {
                c.get(tile, i, h, lane, a);
            }
            if (F::GROUP == 16) {
#pragma unroll
                for (int q = 0; q < 2; q++) {
                    int grp = (i * 2 + h) * 2 + q;
                    Scale2 s = scales<F>(tile, grp, g, sb);
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
                        acc.r[j][0] = add_group<(NT > 1)>(acc.r[j][0], s.s0, s.b0, v0, X, d[j]);
                        acc.r[j][1] = add_group<(NT > 1)>(acc.r[j][1], s.s1, s.b1, v1, X, d[j]);
                    }
                }
                continue;
            }
            int blk = i * 2 + h;
#pragma unroll
            for (int j = 0; j < NT; j++) {
                if (blk % GB == 0) k[j][0] = k[j][1] = k[j][2] = k[j][3] = MAGIC_I;
                mma_i8(k[j], a[0], a[1], a[2], a[3], h ? x[j].z : x[j].x, h ? x[j].w : x[j].y);
            }
            if ((blk + 1) % GB == 0) {
                int grp = blk / GB;
                Scale2 s = scales<F>(tile, grp, g, sb);
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    float X
                    = xm[grp * MT + xt[j]];
                    float v0 = fmaf(__int_as_float(k[j][0]) - MAGIC_F, 256.f,
                                    __int_as_float(k[j][1]) - MAGIC_F);
                    float v1 = fmaf(__int_as_float(k[j][2]) - MAGIC_F, 256.f,
                                    __int_as_float(k[j][3]) - MAGIC_F);
                    acc.r[j][0] = add_group<(NT > 1)>(acc.r[j][0], s.s0, s.b0, v0, X, d[j]);
                    acc.r[j][1] = add_group<(NT > 1)>(acc.r[j][1], s.s1, s.b1, v1, X, d[j]);
                }
            }
        }
    }
}

// 4-bit codes with a scale for every 64 columns, one token: four blocks at once. Each block's
// activations stand in two columns of B of their own, zeros in the others, so that lane t ends with
// the sums of block t and scales are applied once. High nibbles are taken where they stand, as 16
// times their value. n: blocks there are; zero: 16 zero bytes.
// Q quads, of n blocks in all; addresses in shared memory. All loads come first. d, sb: as
// block_int.
template <class F, int Q>
__device__ __forceinline__ void quads_int(Acc<F, 1> &acc, uint32_t slot, int n, uint32_t xs,
                                          uint32_t xm, float d, uint32_t zero, int sb, int lane) {
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
        float s0 = sb ? bf_lo(s[k].x) : h_lo(s[k].x), b0 = sb ? bf_hi(s[k].x) : h_hi(s[k].x);
        float s1 = sb ? bf_lo(s[k].y) : h_lo(s[k].y), b1 = sb ? bf_hi(s[k].y) : h_hi(s[k].y);
        float f[4], h[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f[i] = __int_as_float(e[k][i]) - MAGIC_F, h[i] = __int_as_float(o[k][i]) - MAGIC_F;
        }
        float v0 = fmaf(fmaf(h[0], 256.f, h[1]), 0.0625f, fmaf(f[0], 256.f, f[1]));
        float v1 = fmaf(fmaf(h[2], 256.f, h[3]), 0.0625f, fmaf(f[2], 256.f, f[3]));
        acc.r[0][0] = fmaf(d, fmaf(s0, v0, b0 * X[k]), acc.r[0][0]);
        acc.r[0][1] = fmaf(d, fmaf(s1, v1, b1 * X[k]), acc.r[0][1]);
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

// The prepared activations of a warp's run.
struct Run {
    const uint4 *xs;
    const float *xm, *ds; // ds: as prepare leaves them
};

// One strip against a warp's run of columns, from the ring.
// Where Quad applies, block b of a slot is summed with the blocks b of the other slots, and the
// four sums are added at the end: for up to four tokens in the same order. Eight tokens are summed
// in an order of their own (16 warps), a part first without the activations' scale.
template <class F, int MT, int SLOTS>
__device__ __forceinline__ void
strip_sum(Acc<F, (MT > 4 ? 2 : 1)> &acc, Ring<F> &ring, const uint8_t *slots, int &slot, int n_kb,
          const Run &run, uint32_t zero, const int *xo, const int *xt, int sb, int lane) {
    constexpr int NT = MT > 4 ? 2 : 1, PART = Ring<F>::BLOCKS;
    constexpr int SUMS = Quad<F>::IS && MT > 1 && NT == 1 ? 4 : 1;
    Acc<F, NT> part[SUMS], late;
#pragma unroll
    for (int i = 0; i < SUMS; i++) part[i].clear();
#pragma unroll 1
    for (int kb = 0; kb < n_kb; kb += PART) {
        const uint8_t *tile = ring.template wait<SLOTS>(slots, slot);
        const uint4 *x = run.xs + kb * (F::KB / (F::FLOAT ? 32 : 64)) * MT * 8;
        const float *xq = run.xm + kb * (F::KB / F::XG) * MT;
        int n = n_kb - kb;
        float d[NT]; // a part lies in one slice
#pragma unroll
        for (int j = 0; j < NT && !F::FLOAT; j++) d[j] = run.ds[kb * F::KB / SLICE * MT + xt[j]];
        late.clear();
        if constexpr (Quad<F>::IS && MT == 1) {
            quads_int<F, PART / 4>(part[0], smem_addr(tile), n, smem_addr(x), smem_addr(xq), d[0],
                                   zero, sb, lane);
        } else {
            auto block = [&](int b) {
                if constexpr (F::FLOAT) {
                    block_float<F, NT, MT>(part[0], tile + b * F::BYTES,
                                           x + b * (F::KB / 32) * MT * 8, xo, lane);
                } else {
                    block_int<F, NT, MT>(NT > 1 ? late : part[b % SUMS], tile + b * F::BYTES,
                                         x + b * (F::KB / 64) * MT * 8,
                                         xq + b * (F::KB / F::XG) * MT, d, xo, xt, sb, lane);
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
        if constexpr (NT > 1) {
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    part[0].r[j][i] = fmaf(d[j], late.r[j][i], part[0].r[j][i]);
                }
        }
        ring.template done<SLOTS>(lane);
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
    } else if constexpr (Quad<F>::IS && MT == 1) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            acc.r[0][i] += __shfl_xor_sync(FULL, acc.r[0][i], 1);
            acc.r[0][i] += __shfl_xor_sync(FULL, acc.r[0][i], 2);
        }
    }
}

// What the rest of the kernel shares.
struct Gemv {
    int warp, lane, g, t, tok0, n_tok, pair, n_items, kb0, n_kb;
    uint4 *xs;
    float *xm, *ds, *ssqs, *part; // ds: of this warp; ssqs: [warp][8]; part: [2][warp][MT][16]
    uint8_t *slots;
    uint32_t zero; // 16 zero bytes of shared memory
};

// 1 / rms of a token, from the warps' sums of squares.
template <int NW>
__device__ __forceinline__ float rms_scale(const k_gemv &a, const float *ssqs, int tok) {
    float q = 0.f;
#pragma unroll
    for (int w = 0; w < NW; w++) q += ssqs[w * 8 + tok];
    return rsqrtf(q / (float)a.n_cols + a.eps);
}

// Products of every item and their sums over the warps.
template <class F, int MT, int NW>
__device__ __forceinline__ void gemv_main(const k_gemv &a, const Gemv &c, Ring<F> &ring) {
    constexpr int NT = MT > 4 ? 2 : 1;
    int warp = c.warp, lane = c.lane, g = c.g, t = c.t, n_tok = c.n_tok, pair = c.pair;
    int xo[NT], xt[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) {
        xo[j] = (min(4 * j + (g >> 1), n_tok - 1) * 2 + (g & 1)) * 4 + t;
        xt[j] = min(4 * j + t, n_tok - 1);
    }
    Run run = {c.xs + (size_t)c.kb0 * (F::KB / (F::FLOAT ? 32 : 64)) * MT * 8,
               c.xm + c.kb0 * (F::KB / F::XG) * MT, c.ds};
    int buf = 0, slot = 0;
    float gate = 0.f, rms = 0.f;
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
        strip_sum<F, MT, GEMV_SLOTS(NW)>(acc, ring, c.slots, slot, c.n_kb, run, c.zero, xo, xt,
                                         a.scale_type, lane);
#pragma unroll
        for (int j = 0; j < NT; j++) {
            int k = 4 * j + t;
            if (k < n_tok) {
                float d = F::FLOAT && !F::BF ? c.ds[k] : 1.f;
                float r0 = F::FLOAT ? acc.r[j][0] + acc.r[j][1] : acc.r[j][0];
                float r1 = F::FLOAT ? acc.r[j][F::FLOAT ? 2 : 0] + acc.r[j][F::FLOAT ? 3 : 0]
                                    : acc.r[j][1];
                float *q = c.part + ((buf * NW + warp) * MT + k) * 16;
                q[g] = d * r0, q[g + 8] = d * r1;
            }
        }
        __syncthreads();
        if (writes) {
            float v = 0.f;
#pragma unroll
            for (int w = 0; w < NW; w++) v += c.part[((buf * NW + w) * MT + my_tok) * 16 + my_row];
            // One token: every output of this thread is its.
            if (a.gamma && (MT > 1 || rms == 0.f)) rms = rms_scale<NW>(a, c.ssqs, my_tok);
            float r = a.gamma ? rms : 1.f;
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
    c.ssqs = reinterpret_cast<float *>(sm + a.off_d);
    c.ds = c.ssqs + NW * 8 + c.warp * a.n_slices * MT;
    c.part = reinterpret_cast<float *>(sm + a.off_part);
    c.kb0 = c.warp * a.n_kb / NW, c.n_kb = (c.warp + 1) * a.n_kb / NW - c.kb0;
    c.slots = sm + c.warp * GEMV_SLOTS(NW) * Ring<F>::SLOT;

    Ring<F> ring;
    ring.items = GemvItems{&a, 0, c.n_items, c.kb0, c.n_kb, F::BYTES};
    ring.start(c.slots, c.lane);
    dep_trigger();
    int early = min(a.early, GEMV_SLOTS(NW)); // see ask_early of product.c
    auto fill = [&](int i, int end) {
#pragma unroll 1
        for (; i < end; i++) {
            ring.template fill<GEMV_SLOTS(NW)>(c.lane);
            if (i < early && a.one_by_one) cp_wait<0>();
        }
    };
    int c0 = c.kb0 * F::KB, c1 = c0 + c.n_kb * F::KB;
    // Weights of the norm were last read a step ago: they come from memory, with the first part.
    float *gamma = reinterpret_cast<float *>(sm + a.off_gamma);
    for (int k = c0 + c.lane * 4; a.gamma && k < c1; k += 128) {
        if (a.vec4 && k < a.n_cols) {
            cp16(gamma + k, a.gamma + k);
            continue;
        }
#pragma unroll 1
        for (int e = k; e < k + 4; e++) gamma[e] = e < a.n_cols ? __ldg(a.gamma + e) : 0.f;
    }
    if (a.gamma) cp_commit();
    fill(0, early);
    dep_wait();

    const float *x0 = a.x + (size_t)c.tok0 * a.ldx;
    float *q = c.ssqs + c.warp * 8;
    uint32_t *xs = (uint32_t *)c.xs;
    auto asked = [&] {
        fill(early, GEMV_SLOTS(NW));
        if (a.gamma) cp_wait<GEMV_SLOTS(NW)>();
        __syncwarp();
    };
    if (c1 - c0 <= 128) {
        prepare<F, MT, 1>(a, x0, gamma, c.n_tok, c0, c1, xs, c.xm, c.ds, q, c.lane, asked);
    } else {
        prepare<F, MT, 4>(a, x0, gamma, c.n_tok, c0, c1, xs, c.xm, c.ds, q, c.lane, asked);
    }
    __syncthreads(); // of `zero`
    gemv_main<F, MT, NW>(a, c, ring);
}

// One token: half of an SM's registers are left for attention, which starts while this one ends.
#define GEMV_ENTRY(name, MT, NW)                                                                   \
    ENTRY __launch_bounds__(NW * 32, MT == 1 ? 2 : 1) gemv_##name##_t##MT(PAR const k_gemv a) {    \
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
