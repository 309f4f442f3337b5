// Many-token products of the other formats.
#include "gemm.cuh"
GEMM(s5)
GEMM(a5)
GEMM(k4)
GEMM(k5)
GEMM(k6)
GEMM(h16)
GEMM(b16)

// Sums of the parts of 64 columns, two of them in each lane of a warp in the order of a cast.
__device__ __forceinline__ void part_sums(float *sums, float v, int parts) {
    int lane = threadIdx.x & 31;
    v += __shfl_xor_sync(FULL, v, 1);
    v += __shfl_xor_sync(FULL, v, 4);
    v += __shfl_xor_sync(FULL, v, 8);
    if (parts < 4) v += __shfl_xor_sync(FULL, v, 2);
    if (parts < 2) v += __shfl_xor_sync(FULL, v, 16);
    int part = parts == 4 ? (lane >> 4) * 2 + (lane >> 1 & 1) : parts == 2 ? lane >> 4 : 0;
    if ((lane & (parts == 4 ? 13 : parts == 2 ? 15 : 31)) == 0) sums[part * 64] = v;
}

// The root mean square's inverse of a row.
__device__ __forceinline__ float row_scale(const float *x, int n, float eps, float *tmp) {
    float s = 0.f;
    int c = threadIdx.x * 4, step = blockDim.x * 4;
    if ((reinterpret_cast<uintptr_t>(x) & 15) == 0) {
#pragma unroll 4
        for (; c + 3 < n; c += step) {
            float4 v = __ldcg(reinterpret_cast<const float4 *>(x + c));
            s = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, s))));
        }
    }
    for (; c < n; c += step) {
        for (int i = c; i < min(c + 4, n); i++) s = fmaf(ldx(x + i), ldx(x + i), s);
    }
    return 1.f / sqrtf(block_sum(s, tmp) / (float)n + eps);
}

// Rows of x, optionally normed (rms_norm with weight gamma), as bf16; columns past n_cols zero.
// Each CTA of a row takes CAST_COLS columns.
ENTRY __launch_bounds__(256) cast_rows(PAR const k_cast a) {
    __shared__ float tmp[33];
    dep_trigger();
    dep_wait();
    int64_t row = blockIdx.x;
    const float *x = a.x + row * a.ldx;
    float r = a.gamma ? row_scale(x, a.n_cols, a.eps, tmp) : 1.f;
    uint32_t *y = reinterpret_cast<uint32_t *>(a.y + row * a.ldy);
    float *sums = a.sums ? a.sums + row / 64 * a.ldy * a.parts + row % 64 : nullptr;
#pragma unroll
    for (int k = 0; k < KCAST_COLS; k += 512) {
        int c = blockIdx.y * KCAST_COLS + k + threadIdx.x * 2;
        if (c >= a.ldy) break; // of sums: for whole warps
        int c0 = c, c1 = c + 1;
        if (a.order != KORDER_PLAIN) {
            c0 = (c & ~31) + (c & 4) * 4 + (c >> 3 & 3) * 4 + (c & 2);
            c1 = c0 + 1;
            if (a.order == KORDER_CODES) c0 -= (c & 2) / 2, c1 += 1 - (c & 2) / 2;
        }
        float v0 = c0 < a.n_cols ? ldx(x + c0) : 0.f, v1 = c1 < a.n_cols ? ldx(x + c1) : 0.f;
        if (a.gamma) {
            v0 *= c0 < a.n_cols ? r * a.gamma[c0] : 0.f;
            v1 *= c1 < a.n_cols ? r * a.gamma[c1] : 0.f;
        }
        uint32_t v = pack_bf(v0, v1);
        y[c >> 1] = v;
        if (sums) part_sums(sums + (c >> 6) * a.parts * 64, bf_lo(v) + bf_hi(v), a.parts);
    }
}

// The rest of a product made by a library: activation, bias, residual.
ENTRY __launch_bounds__(256) finish(PAR const k_finish a) {
    dep_trigger();
    dep_wait();
    int64_t row = blockIdx.x;
    int c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= a.n_cols) return;
    float v = ldx(a.a + row * a.lda + c);
    if (a.b) v = activate(v, a.act) * ldx(a.b + row * a.lda + c);
    if (a.bias) v += a.bias[c];
    if (a.res) v += ldx(a.res + row * a.ldr + c);
    a.y[row * a.ldy + c] = v;
}
