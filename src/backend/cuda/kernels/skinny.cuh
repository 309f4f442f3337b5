// Matrix product for a batch of tokens, 9 to 64 in a pass: weights once from memory, bf16 tensor
// cores, float32 sums.
//
// A CTA takes some pairs of strips (GLU: a gate strip and its up strip) over a run of the columns;
// a cluster of CTAs shares the columns of the same pairs. 12 warps: 6 pairs by 2 shares of the
// columns. Weights and activations arrive by asynchronous copies, several stages ahead, weights
// before the dependency wait. Codes enter the tensor cores as they are, as exact bf16 numbers
// (below 8 bits plus 128, which needs one instruction for two); scales and biases are applied to
// float32 sums, with sums of the activations that the cast wrote. Partial sums are added in order:
// by CTA of the cluster, then by share.
#pragma once
#include "fmt.cuh"

enum { SK_PAIRS = KSKINNY_PAIRS, SK_SHARES = KSKINNY_SHARES, SK_ROW = KSKINNY_ROW };
enum { SK_WARPS = SK_PAIRS * SK_SHARES };

// What a stage has of a strip: whole blocks as they are, or half a block of 256 columns.
template <class F> struct Half {
    static constexpr int BITS = F::BITS, GROUP = F::GROUP, SC = F::SC, OFFSET = F::OFFSET;
    static constexpr int XG = F::XG, KB = 128;
    static constexpr bool FLOAT = false, BF = false;
    static constexpr int CODE = F::KB * 4, HIGH_BYTES = KHALF_HIGH(BITS);
    static constexpr int HIGH = CODE, CODES = CODE + HIGH_BYTES, D = KHALF_SCALE;
    static constexpr int BYTES = KHALF_BYTES(BITS, SC), TAIL = BYTES - CODES - D;
};
template <class F> struct Piece {
    using Block = F;
    static constexpr int BLOCKS = KSKINNY_RUNS(F::BITS) * 64 / F::KB;
    static constexpr int BYTES = BLOCKS * F::BYTES;
    // To shared memory at dst: what a stage has of two strips, whose stages at `run` begin at b0
    // and b1. n_runs: that are left.
    static __device__ __forceinline__ void copy(uint32_t dst, const uint8_t *b0, const uint8_t *b1,
                                                int run, int n_runs, int lane) {
        constexpr int WHOLE = BYTES / 512 * 512;
        int n = BLOCKS == 1 || n_runs > 1 ? BYTES : F::BYTES; // the last block may be alone
        int at = lane * 16;
#pragma unroll
        for (int q = 0; q < WHOLE; q += 512) {
            bool there = BLOCKS == 1 || q + at < n;
            if (there) cp16_to(dst + at + q, b0 + at + q);
            if (there) cp16_to(dst + at + BYTES + q, b1 + at + q);
        }
        at = lane % 16 * 16; // the rests of both strips in one copy
        const uint8_t *b = lane < 16 ? b0 : b1;
        dst += lane < 16 ? 0 : BYTES;
#pragma unroll
        for (int q = WHOLE; q < BYTES; q += 256) {
            if (q + at < n) cp16_to(dst + at + q, b + at + q);
        }
    }
    static __device__ __forceinline__ size_t offset(int run) {
        return (size_t)(run * 64 / F::KB) * F::BYTES;
    }
};
template <class F> struct HalfPiece {
    using Block = Half<F>;
    static constexpr int BLOCKS = 1, BYTES = Block::BYTES;
    static __device__ __forceinline__ void copy(uint32_t dst, const uint8_t *b0, const uint8_t *b1,
                                                int run, int n_runs, int lane) {
        using H = Half<F>;
        int half = run / 2 & 1;
#pragma unroll
        for (int q = 0; q < H::CODE; q += 512) {
            int at = q + lane * 16;
            cp16_to(dst + at, b0 + half * H::CODE + at);
            cp16_to(dst + H::BYTES + at, b1 + half * H::CODE + at);
        }
        const uint8_t *b = lane < 16 ? b0 : b1;
        dst += H::CODE + (lane < 16 ? 0 : H::BYTES);
#pragma unroll
        for (int q = 0; q < H::BYTES - H::CODE; q += 256) {
            int o = q + lane % 16 * 16, s = o - H::HIGH_BYTES;
            int at = s < 0      ? F::HIGH + half * H::HIGH_BYTES + o
                     : s < H::D ? F::CODES + half * H::D + s
                                : F::CODES + F::D + s - H::D;
            if (o < H::BYTES - H::CODE) cp16_to(dst + o, b + at);
        }
    }
    static __device__ __forceinline__ size_t offset(int run) {
        return (size_t)(run / 4) * F::BYTES;
    }
};
template <class F, bool LARGE> struct PieceOf { using type = Piece<F>; };
template <class F> struct PieceOf<F, true> { using type = HalfPiece<F>; };

// Two codes of w, at bits 0 and 16, as bf16: 128 + code. One instruction, with one constant in a
// register; left to the compiler it is two with a constant in each.
template <uint32_t MASK> __device__ __forceinline__ uint32_t two_codes(uint32_t w, uint32_t base) {
    uint32_t v;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(w), "n"(MASK), "r"(base));
    return v;
}
__device__ __forceinline__ uint32_t code_base() {
    uint32_t v;
    asm volatile("mov.b32 %0, 0x43004300;" : "=r"(v));
    return v;
}
// Bytes i and j of w as bf16.
__device__ __forceinline__ uint32_t two_bytes(uint32_t w, int i, int j) {
    float x = __uint_as_float(__byte_perm(w, 0x4B000000u, 0x7650 + i)) - 8388608.f;
    float y = __uint_as_float(__byte_perm(w, 0x4B000000u, 0x7650 + j)) - 8388608.f;
    return __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
}

// Run i of 64 columns as A operands of 4 x 16. Codes: columns 0, 2 | 1, 3 of a lane's four.
template <class P>
__device__ __forceinline__ void operands(uint32_t (&a)[4][4], const uint8_t *tile, int i, int lane,
                                         uint32_t base) {
    if constexpr (P::FLOAT) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint4 v = *reinterpret_cast<const uint4 *>(tile + (i * 4 + k) * 512 + lane * 16);
            uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int e = 0; e < 4; e++) a[k][e] = P::BF ? w[e] : pack_bf(h_lo(w[e]), h_hi(w[e]));
        }
    } else if constexpr (P::BITS == 4) {
        uint4 q = *reinterpret_cast<const uint4 *>(tile + i * 512 + lane * 16);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t r0 = (k < 2 ? q.x : q.y) >> k % 2 * 4, r1 = (k < 2 ? q.z : q.w) >> k % 2 * 4;
            a[k][0] = two_codes<0x000f000fu>(r0, base), a[k][1] = two_codes<0x000f000fu>(r1, base);
            a[k][2] = two_codes<0x000f000fu>(r0 >> 8, base),
            a[k][3] = two_codes<0x000f000fu>(r1 >> 8, base);
        }
    } else {
        Codes<P> c;
        c.load(tile, i, lane);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t w[4];
            c.get(tile, i, k / 2, lane, w);
            uint32_t r0 = w[k % 2 * 2], r1 = w[k % 2 * 2 + 1];
            if (P::BITS == 8) {
                a[k][0] = two_bytes(r0, 0, 2), a[k][1] = two_bytes(r1, 0, 2);
                a[k][2] = two_bytes(r0, 1, 3), a[k][3] = two_bytes(r1, 1, 3);
            } else {
                a[k][0] = two_codes<0x00ff00ffu>(r0, base),
                a[k][1] = two_codes<0x00ff00ffu>(r1, base);
                a[k][2] = two_codes<0x00ff00ffu>(r0 >> 8, base);
                a[k][3] = two_codes<0x00ff00ffu>(r1 >> 8, base);
            }
        }
    }
}

// Where a pair's strips are: segment, first strip, pointers. GLU: strip of both segments.
struct Pair {
    int seg, strip;
    const uint8_t *w[2];
    __device__ __forceinline__ Pair(const k_skinny &a, int pair, int block_bytes) {
        bool glu = a.act != KACT_NONE;
        seg = 0, strip = pair;
        if (!glu) {
            while (seg + 1 < a.n_seg && strip >= (a.seg[seg].n_strips + 1) / 2) {
                strip -= (a.seg[seg].n_strips + 1) / 2, seg++;
            }
            strip *= 2;
        }
        size_t step = (size_t)a.n_kb * block_bytes;
        w[0] = a.seg[seg].w + strip * step;
        w[1] = glu ? a.seg[1].w + strip * step
                   : a.seg[seg].w + min(strip + 1, a.seg[seg].n_strips - 1) * step;
    }
};

template <class F, int NT> struct Skinny {
    using Stage = typename PieceOf<F, (F::KB > 128)>::type;
    using B = typename Stage::Block;
    static constexpr int T = NT * 8, U = KSKINNY_RUNS(F::BITS); // tokens; runs of 64 of a stage
    static constexpr int SIX = SK_PAIRS * 32;                   // threads of a share of the columns
    static constexpr int PARTS = KSKINNY_PARTS(F::GROUP);       // of a run, with a scale each
    static constexpr int STRIP = Stage::BYTES, W = 2 * STRIP;
    static constexpr int RUN = T * 128, SUMS = F::FLOAT ? 0 : PARTS * T * 4;
    static constexpr int STAGE = SK_WARPS * W + SK_SHARES * U * (RUN + SUMS);
    static constexpr int EACH = (T * 8 + SIX - 1) / SIX; // copies of a thread

    const k_skinny &a;
    uint8_t *sm;
    int warp, lane, share, lo, hi; // lo, hi: runs of this share
    bool live;
    const uint8_t *w0, *w1;
    uint32_t base;            // see two_codes
    const uint16_t *x0[EACH]; // what this thread copies of the next run's activations
    const float *s0;          // and of their sums

    // Row of a token: 8 pieces of 16 bytes, the halves of odd rows exchanged, so that 8 lanes meet
    // all banks.
    __device__ __forceinline__ void set_inputs(int tok0) {
        int i = warp % SK_PAIRS * 32 + lane, n_run = a.n_kb * (F::KB / 64);
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            int e = i + k * SIX;
            x0[k] = a.xb + (size_t)min(tok0 + e / 8, a.n_tok - 1) * a.ldxb + lo * 64 + e % 8 * 8;
        }
        s0 = a.sums + (((size_t)(tok0 / 64) * n_run + lo) * PARTS + i / (T / 4)) * 64 + tok0 % 64 +
             i % (T / 4) * 4;
    }
    __device__ __forceinline__ int weights(int slot) const {
        return slot * STAGE + warp * W;
    }
    __device__ __forceinline__ int inputs(int slot) const {
        return slot * STAGE + SK_WARPS * W + share * U * (RUN + SUMS);
    }
    __device__ __forceinline__ void ask_weights(int run, int slot) const {
        if (!live || run >= hi) return;
        size_t at = Stage::offset(run);
        Stage::copy(smem_addr(sm) + weights(slot), w0 + at, w1 + at, run, hi - run, lane);
    }
    // Activations of a stage, by the six warps of this share.
    __device__ __forceinline__ void ask_inputs(int run, int slot) {
        int i = warp % SK_PAIRS * 32 + lane;
        uint32_t at = smem_addr(sm) + inputs(slot) + i * 16;
        uint32_t x = at - i * 16 + (i ^ (i / 8 & 1) * 4) * 16;
#pragma unroll
        for (int u = 0; u < U; u++) {
            bool in = run + u < hi;
#pragma unroll
            for (int k = 0; k < EACH; k++) { // SIX is a multiple of 16: the same exchange
                bool mine = in && (T * 8 % SIX == 0 || i + k * SIX < T * 8);
                if (mine) cp16_to(x + u * RUN + k * SIX * 16, x0[k]);
                x0[k] += 64;
            }
            if (F::FLOAT) continue;
            if (in && i < PARTS * T / 4) cp16_to(at + U * RUN + u * SUMS, s0);
            s0 += PARTS * 64;
        }
    }
    __device__ __forceinline__ void wait(int stages) const {
        if (stages == 4) {
            cp_wait<2>();
        } else if (stages == 3) {
            cp_wait<1>();
        } else if (stages == 2) {
            cp_wait<0>();
        } else {
            cp_wait<4>();
        }
        asm volatile("bar.sync %0, %1;" ::"r"(1 + share), "n"(SIX) : "memory");
    }
    // Columns 16 k0 to 16 (k0 + n) of two strips by two groups of tokens, to c and d.
    static __device__ __forceinline__ void products(float (*c)[4], float (*d)[4],
                                                    const uint32_t (&w)[2][4][4],
                                                    const uint32_t (&b)[2][4][2], int k0, int n) {
#pragma unroll
        for (int k = k0; k < k0 + n; k++)
#pragma unroll
            for (int q = 0; q < 2; q++) {
                mma_bf(c[q], w[0][k][0], w[0][k][1], w[0][k][2], w[0][k][3], b[q][k][0],
                       b[q][k][1]);
                mma_bf(d[q], w[1][k][0], w[1][k][1], w[1][k][2], w[1][k][3], b[q][k][0],
                       b[q][k][1]);
            }
    }
    // One run of 64 columns. BF: scales are bf16.
    template <bool BF>
    __device__ __forceinline__ void multiply(float (&acc)[2][NT][4], const uint8_t *slot, int u,
                                             const uint8_t *x, const float *sums) const {
        constexpr int PER = B::KB / 64; // runs of a block
        const uint8_t *tile = slot + u / PER * B::BYTES;
        int i = u % PER;
        int g = lane >> 2, t = lane & 3;
        uint32_t w[2][4][4];
        operands<B>(w[0], tile, i, lane, base);
        operands<B>(w[1], tile + STRIP, i, lane, base);
        Scale2 s[2][PARTS];
#pragma unroll
        for (int h = 0; h < 2 && !F::FLOAT; h++)
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                s[h][p] =
                    scales<B>(tile + h * STRIP, (i * 64 + p * 64 / PARTS) / B::XG, g, a.scale_type);
                if (F::BITS < 8) {
                    s[h][p].b0 = fmaf(-128.f, s[h][p].s0, s[h][p].b0);
                    s[h][p].b1 = fmaf(-128.f, s[h][p].s1, s[h][p].b1);
                }
            }
        const uint8_t *row = x + g * 128;
        int first = (t ^ (g & 1) * 4) * 16;
        // Two groups of 8 tokens at a time: four products that do not wait for each other.
#pragma unroll
        for (int j = 0; j < NT; j += 2) {
            uint32_t b[2][4][2];
#pragma unroll
            for (int q = 0; q < 2; q++) {
                const uint8_t *r = row + (j + q) * 1024;
                uint4 b0 = *reinterpret_cast<const uint4 *>(r + first);
                uint4 b1 = *reinterpret_cast<const uint4 *>(r + (first ^ 64));
                b[q][0][0] = b0.x, b[q][0][1] = b0.y, b[q][1][0] = b0.z, b[q][1][1] = b0.w;
                b[q][2][0] = b1.x, b[q][2][1] = b1.y, b[q][3][0] = b1.z, b[q][3][1] = b1.w;
            }
            if constexpr (F::FLOAT) {
                products(&acc[0][j], &acc[1][j], w, b, 0, 4);
            } else {
                constexpr int KS = 4 / PARTS;
#pragma unroll
                for (int p = 0; p < PARTS; p++) {
                    float v[2][2][4] = {};
                    products(v[0], v[1], w, b, p * KS, KS);
#pragma unroll
                    for (int q = 0; q < 2; q++) {
                        const float *x2 = sums + p * T + (j + q) * 8 + 2 * t;
                        float2 sum = *reinterpret_cast<const float2 *>(x2);
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            float *d = acc[h][j + q], *e = v[h][q];
                            d[0] = fmaf(s[h][p].s0, e[0], fmaf(s[h][p].b0, sum.x, d[0]));
                            d[1] = fmaf(s[h][p].s0, e[1], fmaf(s[h][p].b0, sum.y, d[1]));
                            d[2] = fmaf(s[h][p].s1, e[2], fmaf(s[h][p].b1, sum.x, d[2]));
                            d[3] = fmaf(s[h][p].s1, e[3], fmaf(s[h][p].b1, sum.y, d[3]));
                        }
                    }
                }
            }
        }
    }
    template <bool BF>
    __device__ __forceinline__ void stage(float (&acc)[2][NT][4], int slot, int n) const {
        const uint8_t *w = sm + weights(slot), *x = sm + inputs(slot);
        auto run = [&](int u) {
            multiply<BF>(acc, w, u, x + u * RUN,
                         reinterpret_cast<const float *>(x + U * RUN + u * SUMS));
        };
        if (n >= U && NT <= 4) {
#pragma unroll
            for (int u = 0; u < U; u++) run(u);
        } else {
#pragma unroll 1
            for (int u = 0; u < min(n, U); u++) run(u);
        }
    }
    __device__ __forceinline__ void columns(float (&acc)[2][NT][4]) {
        int stages = a.stages, slot = 0, next = lo, next_slot = stages - 1;
#pragma unroll 1
        for (int s = 0; s < stages - 1; s++) ask_weights(lo + s * U, s);
        dep_wait();
#pragma unroll 1
        for (int s = 0; s < stages - 1; s++, next += U) {
            ask_inputs(next, s);
            cp_commit();
        }
        bool bf = F::SC == KSC_PAIR && a.scale_type;
#pragma unroll 1
        for (int run = lo; run < hi; run += U) {
            wait(stages);
            ask_weights(next, next_slot); // where the step before was
            ask_inputs(next, next_slot);
            cp_commit();
            next += U, next_slot = slot;
            if (live && bf) {
                stage<true>(acc, slot, hi - run);
            } else if (live) {
                stage<false>(acc, slot, hi - run);
            }
            if (++slot == stages) slot = 0;
        }
        cp_wait<0>();
    }
};

__device__ __forceinline__ void cluster_sync(int n) {
#if __CUDA_ARCH__ >= 900
    if (n > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;\n"
                     "barrier.cluster.wait.acquire.aligned;" ::
                         : "memory");
        return;
    }
#endif
    __syncthreads();
}
// Four floats at p in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ float4 cluster_load(const float *p, int rank, int n) {
#if __CUDA_ARCH__ >= 900
    if (n > 1) {
        uint32_t at;
        float4 v;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                     : "=r"(at)
                     : "r"(smem_addr(p)), "r"(rank));
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "r"(at)
                     : "memory");
        return v;
    }
#endif
    return *reinterpret_cast<const float4 *>(p);
}

// The sum of a strip's four rows for a token over shares and CTAs.
__device__ __forceinline__ void strip_rows(float (&v)[4], const k_skinny &a, const float *p,
                                           int share_floats) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = 0.f;
    for (int c = 0; c < a.n_split; c++)
#pragma unroll
        for (int h = 0; h < SK_SHARES; h++) {
            float4 q = cluster_load(p + h * share_floats, c, a.n_split);
            v[0] += q.x, v[1] += q.y, v[2] += q.z, v[3] += q.w;
        }
}

template <int T>
__device__ __forceinline__ void skinny_store(const k_skinny &a, const float *part, int first,
                                             int rank, int tok0) {
    bool glu = a.act != KACT_NONE;
    int per = glu ? 1 : 2, share_floats = a.n_pairs_cta * 2 * T * SK_ROW;
    for (int e = rank * blockDim.x + threadIdx.x; e < a.n_pairs_cta * per * T * 4;
         e += a.n_split * blockDim.x) {
        int quad = e % 4, tok = e / 4 % T, strip = e / 4 / T, h = glu ? 0 : strip & 1;
        int k = glu ? strip : strip >> 1;
        if (first + k >= a.n_pairs || tok0 + tok >= a.n_tok) continue;
        Pair pair(a, first + k, 0);
        const k_seg &s = a.seg[pair.seg];
        int row = (pair.strip + h) * 16 + quad * 4;
        if (row >= s.n_rows) continue;
        const float *p = part + ((size_t)(k * 2 + h) * T + tok) * SK_ROW + quad * 4;
        float v[4], up[4];
        strip_rows(v, a, p, share_floats);
        if (glu) {
            strip_rows(up, a, p + T * SK_ROW, share_floats);
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = activate(v[i], a.act) * up[i];
        }
        float *y = s.y + (size_t)(tok0 + tok) * s.ldy + row;
        const float *res = s.res ? s.res + (size_t)(tok0 + tok) * s.ldr + row : nullptr;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (row + i >= s.n_rows) break;
            if (s.bias) v[i] += s.bias[row + i];
            if (res) v[i] += ldx(res + i);
        }
        if (row + 4 <= s.n_rows && (reinterpret_cast<uintptr_t>(y) & 15) == 0) {
            *reinterpret_cast<float4 *>(y) = make_float4(v[0], v[1], v[2], v[3]);
            continue;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (row + i < s.n_rows) y[i] = v[i];
        }
    }
}

template <class F, int NT> __device__ __forceinline__ void skinny_body(const k_skinny &a) {
    constexpr int T = NT * 8;
    extern __shared__ __align__(128) uint8_t sm[];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rw = warp % SK_PAIRS;
    int rank = blockIdx.x % a.n_split, first = blockIdx.x / a.n_split * a.n_pairs_cta;
    int share = warp / SK_PAIRS, k = rank * SK_SHARES + share, n = a.n_split * SK_SHARES;
    // whole blocks, and of those of 256 columns halves
    constexpr int CUT = F::KB > 128 ? 2 : F::KB / 64;
    int n_run = a.n_kb * (F::KB / 64) / CUT;
    bool live = rw < a.n_pairs_cta && first + rw < a.n_pairs;
    Pair p(a, live ? first + rw : 0, F::BYTES);
    Skinny<F, NT> s = {
        a,    sm,     warp,   lane,       share, n_run * k / n * CUT, n_run * (k + 1) / n * CUT,
        live, p.w[0], p.w[1], code_base()};
    int tok0 = blockIdx.y * T;
    s.set_inputs(tok0);
    dep_trigger();
    float acc[2][NT][4] = {};
    s.columns(acc);
    __syncthreads(); // the stages are free
    // part: [share][strip][token][16 rows, 4 floats apart from the next]
    float *part = reinterpret_cast<float *>(sm);
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (rw >= a.n_pairs_cta) break;
        float *q = part + (size_t)((share * a.n_pairs_cta + rw) * 2 + h) * T * SK_ROW;
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                q[(j * 8 + 2 * t + (i & 1)) * SK_ROW + g + (i >> 1) * 8] = acc[h][j][i];
            }
    }
    cluster_sync(a.n_split);
    skinny_store<T>(a, part, first, rank, tok0);
    if (a.n_split > 1) cluster_sync(a.n_split); // others read this CTA's sums
}

#define SKINNY_ENTRY(name, NT)                                                                     \
    ENTRY __launch_bounds__(SK_WARPS * 32, 1) skinny_##name##_n##NT(PAR const k_skinny a) {        \
        skinny_body<Fmt_##name, NT / 8>(a);                                                        \
    }
#define SKINNY(name)                                                                               \
    SKINNY_ENTRY(name, 16)                                                                         \
    SKINNY_ENTRY(name, 32)                                                                         \
    SKINNY_ENTRY(name, 64)
