// Matrix product for many tokens from packed weights: bf16 tensor cores, float32 sums.
//
// CTA: 8 warps x 16 weight rows = 128 rows, BN tokens. A operands are dequantised in registers
// straight from the packed blocks (lane layout of fmt.cuh, no shared memory); activations are
// bf16 rows, staged in shared memory in runs of 64 columns, three deep. GLU: a warp computes gate
// and up of the same rows.
#pragma once
#include "fmt.cuh"

enum { GK = 64, GSTAGES = 3 };

template <class F> struct Frag { // 16 rows x 64 columns as bf16 A operands, 4 x 16 columns
    uint32_t a[4][4];
};

__device__ __forceinline__ float byte_f(uint32_t w, int b) {
    return __uint_as_float(__byte_perm(w, 0x4B000000u, 0x7650 + b)) - 8388608.f;
}

// Columns [64i, 64i + 64) of a block in device memory.
template <class F>
__device__ __forceinline__ void frag_load(Frag<F> &f, const uint8_t *tile, int i, int lane,
                                          int bf) {
    int g = lane >> 2;
    if constexpr (F::FLOAT) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint4 v = __ldg(reinterpret_cast<const uint4 *>(tile + (i * 4 + k) * 512 + lane * 16));
            uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int e = 0; e < 4; e++) f.a[k][e] = F::BF ? w[e] : pack_bf(h_lo(w[e]), h_hi(w[e]));
        }
    } else {
        Codes<F> c;
        c.load(tile, i, lane);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t w[4]; // row g cols 0-15, g+8 0-15, g 16-31, g+8 16-31
            c.get(tile, i, h, lane, w);
#pragma unroll
            for (int q = 0; q < 2; q++) {
                Scale2 s = scales<F>(tile, (i * 64 + h * 32 + q * 16) / F::XG, g, bf);
                uint32_t r0 = w[q * 2], r1 = w[q * 2 + 1];
                uint32_t *a = f.a[h * 2 + q];
                a[0] = pack_bf(fmaf(s.s0, byte_f(r0, 0), s.b0), fmaf(s.s0, byte_f(r0, 1), s.b0));
                a[1] = pack_bf(fmaf(s.s1, byte_f(r1, 0), s.b1), fmaf(s.s1, byte_f(r1, 1), s.b1));
                a[2] = pack_bf(fmaf(s.s0, byte_f(r0, 2), s.b0), fmaf(s.s0, byte_f(r0, 3), s.b0));
                a[3] = pack_bf(fmaf(s.s1, byte_f(r1, 2), s.b1), fmaf(s.s1, byte_f(r1, 3), s.b1));
            }
        }
    }
}

template <class F, int BN, bool GLU> __device__ __forceinline__ void gemm_body(const k_gemm &a) {
    constexpr int XS = GK * 2 + 32; // row stride of staged activations
    constexpr int RUN = BN * XS;    // bytes of one staged run
    constexpr int NB = BN / 8;
    extern __shared__ __align__(128) uint8_t sm[];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    dep_trigger();
    dep_wait();
    int tok0 = blockIdx.x * BN;
    int strip = blockIdx.y * 8 + warp, si = 0;
    bool live = strip < a.n_strips;
    if (!GLU && live && a.n_seg > 1 && strip >= a.seg[0].n_strips) {
        strip -= a.seg[0].n_strips, si = 1;
        if (a.n_seg > 2 && strip >= a.seg[1].n_strips) strip -= a.seg[1].n_strips, si = 2;
    }
    if (!live) strip = 0;
    const k_seg &s = a.seg[si];
    const uint8_t *w0 = s.w + (size_t)strip * a.n_kb * F::BYTES;
    const uint8_t *w1 = GLU ? a.seg[1].w + (size_t)strip * a.n_kb * F::BYTES : nullptr;
    int n_run = a.n_kb * (F::KB / 64);

    auto stage = [&](int run) {
        if (run < n_run) {
            uint8_t *dst = sm + run % GSTAGES * RUN;
            for (int i = threadIdx.x; i < BN * 8; i += 256) {
                int c = i % 8, tok = i / 8;
                bool ok = tok0 + tok < a.n_tok;
                const uint16_t *src =
                    a.xb + (ok ? (size_t)(tok0 + tok) * a.ldxb + run * 64 + c * 8 : 0);
                cp16_or_zero(dst + tok * XS + c * 16, src, ok);
            }
        }
        cp_commit();
    };
    float acc[NB][4], acc2[GLU ? NB : 1][4];
#pragma unroll
    for (int n = 0; n < NB; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][i] = 0.f, acc2[GLU ? n : 0][i] = 0.f;
    stage(0);
    stage(1);
#pragma unroll 1
    for (int run = 0; run < n_run; run++) {
        int kb = run / (F::KB / 64), i = run % (F::KB / 64);
        Frag<F> f, f2;
        frag_load<F>(f, w0 + (size_t)kb * F::BYTES, i, lane, a.scale_type);
        if (GLU) frag_load<F>(f2, w1 + (size_t)kb * F::BYTES, i, lane, a.scale_type);
        cp_wait<1>();
        __syncthreads();
        stage(run + 2);
        const uint8_t *x = sm + run % GSTAGES * RUN;
#pragma unroll
        for (int n = 0; n < NB; n++) {
            const uint8_t *p = x + (n * 8 + g) * XS + t * 8;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                uint2 b = *reinterpret_cast<const uint2 *>(p + k * 32);
                mma_bf(acc[n], f.a[k][0], f.a[k][1], f.a[k][2], f.a[k][3], b.x, b.y);
                if (GLU) {
                    mma_bf(acc2[GLU ? n : 0], f2.a[k][0], f2.a[k][1], f2.a[k][2], f2.a[k][3], b.x,
                           b.y);
                }
            }
        }
    }
    cp_wait<0>();
    if (!live) return;
#pragma unroll
    for (int n = 0; n < NB; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = strip * 16 + g + (i >> 1) * 8, tok = tok0 + n * 8 + 2 * t + (i & 1);
            if (row >= s.n_rows || tok >= a.n_tok) continue;
            float v = acc[n][i];
            if (GLU) v = activate(v, a.act) * acc2[GLU ? n : 0][i];
            if (s.bias) v += s.bias[row];
            if (s.res) v += ldx(s.res + (size_t)tok * s.ldr + row);
            s.y[(size_t)tok * s.ldy + row] = v;
        }
    }
}

// Packed weight to bf16 rows: one warp 16 rows x 64 columns.
template <class F> __device__ __forceinline__ void unpack_body(const k_unpack &a) {
    dep_trigger();
    dep_wait();
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int per = a.w.n_kb * (F::KB / 64);
    int64_t n = (int64_t)((a.n_rows + 15) / 16) * per;
    for (int64_t i = blockIdx.x * 8ll + (threadIdx.x >> 5); i < n; i += gridDim.x * 8ll) {
        int64_t strip = i / per;
        int run = (int)(i % per), kb = run / (F::KB / 64);
        Frag<F> f;
        frag_load<F>(f, a.w.w + (strip * a.w.n_kb + kb) * (int64_t)F::BYTES, run % (F::KB / 64),
                     lane, a.w.scale_type);
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int64_t row = strip * 16 + g + h * 8;
                int c = run * 64 + k * 16 + t * 4;
                uint16_t *y = a.y + row * a.n_cols + c;
                if (row < a.n_rows && c < a.n_cols) { // n_cols is a multiple of 8
                    *reinterpret_cast<uint2 *>(y) = make_uint2(f.a[k][h], f.a[k][2 + h]);
                }
            }
        }
    }
}

#define GEMM(name)                                                                                 \
    ENTRY __launch_bounds__(256) gemm_##name##_n64(PAR const k_gemm a) {                           \
        gemm_body<Fmt_##name, 64, false>(a);                                                       \
    }                                                                                              \
    ENTRY __launch_bounds__(256) gemm_##name##_n64glu(PAR const k_gemm a) {                        \
        gemm_body<Fmt_##name, 64, true>(a);                                                        \
    }                                                                                              \
    ENTRY __launch_bounds__(256) unpack_##name(PAR const k_unpack a) {                             \
        unpack_body<Fmt_##name>(a);                                                                \
    }
