// Many-token products of the other formats.
#include "gemm.cuh"
GEMM(s5)
GEMM(a5)
GEMM(k4)
GEMM(k5)
GEMM(k6)
GEMM(h16)
GEMM(b16)

// Rows of x, optionally normed (rms_norm with weight gamma), as bf16; columns past n_cols zero.
ENTRY __launch_bounds__(256) cast_rows(PAR const k_cast a) {
    __shared__ float tmp[33];
    dep_trigger();
    dep_wait();
    int64_t row = blockIdx.x;
    const float *x = a.x + row * a.ldx;
    float r = 1.f;
    if (a.gamma) {
        float s = 0.f;
        for (int c = threadIdx.x; c < a.n_cols; c += blockDim.x) {
            float v = ldx(x + c);
            s = fmaf(v, v, s);
        }
        r = 1.f / sqrtf(block_sum(s, tmp) / (float)a.n_cols + a.eps);
    }
    uint32_t *y = reinterpret_cast<uint32_t *>(a.y + row * a.ldy);
    for (int c = threadIdx.x * 2; c < a.ldy; c += blockDim.x * 2) {
        float v0 = c < a.n_cols ? ldx(x + c) : 0.f, v1 = c + 1 < a.n_cols ? ldx(x + c + 1) : 0.f;
        if (a.gamma) {
            v0 *= c < a.n_cols ? r * a.gamma[c] : 0.f;
            v1 *= c + 1 < a.n_cols ? r * a.gamma[c + 1] : 0.f;
        }
        y[c >> 1] = pack_bf(v0, v1);
    }
}

// The rest of a product made by a library: activation, bias, residual.
ENTRY __launch_bounds__(256) finish(PAR const k_finish a) {
    dep_trigger();
    dep_wait();
    int64_t row = blockIdx.y;
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= a.n_cols) return;
    float v = ldx(a.a + row * a.lda + c);
    if (a.b) v = activate(v, a.act) * ldx(a.b + row * a.lda + c);
    if (a.bias) v += a.bias[c];
    if (a.res) v += ldx(a.res + row * a.ldr + c);
    a.y[row * a.ldy + c] = v;
}
