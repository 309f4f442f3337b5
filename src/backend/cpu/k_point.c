// Pointwise kernels, built once for every instruction set from the operations of vec.h; no state.
// Reductions run in sixteen interleaved partial sums added in a fixed tree.
#include "backend/cpu/cpu_int.h"
#include "backend/cpu/vec.h"

#include <math.h>

void CPU_FN(rms_norm)(const float *x, const float *w, float eps, int64_t n, float *y) {
    float inverse = vec_rms_inverse(x, n, eps);
    vf r = vset1(inverse);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) vst(y + i, vmul(vmul(vld(x + i), r), vld(w + i)));
    for (; i < n; i++) y[i] = x[i] * inverse * w[i];
}

void CPU_FN(add)(const float *a, const float *b, int64_t n, float *y) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) vst(y + i, vadd(vld(a + i), vld(b + i)));
    for (; i < n; i++) y[i] = a[i] + b[i];
}

VEC_FN vf silu(vf x) {
    return vdiv(x, vadd(vset1(1.0f), vexp(vsub(vset1(0.0f), x))));
}

// 0.5 x (1 + tanh u) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
VEC_FN vf gelu_tanh(vf x) {
    vf u = vfma(vmul(vmul(x, x), x), vset1(0.044715f), x);
    return vdiv(x, vadd(vset1(1.0f), vexp(vmul(u, vset1(-1.5957691216057308f)))));
}

// x Phi(x) with erfc(a) = exp(-a^2) t P(t), t = 1 / (1 + 0.4 a), a = |x| / sqrt 2; P of degree 9
// fitted on a in 0 .. 14, relative error 5e-8.
VEC_FN vf gelu_erf(vf x) {
    static const float c[10] = {0.22569586336612701f, 0.22516033053398132f, 0.21326281130313873f,
                                0.13698334991931915f, 0.2523214519023895f,  -0.2503185570240021f,
                                0.5098616480827332f,  -0.4731464385986328f, 0.1881408840417862f,
                                -0.02796132117509842f};
    vf a = vmul(vabs(x), vset1(0.70710678118654752f));
    vf t = vdiv(vset1(1.0f), vfma(a, vset1(0.4f), vset1(1.0f)));
    vf q = vset1(c[9]);
    for (int i = 8; i >= 0; i--) q = vfma(q, t, vset1(c[i]));
    vf half = vset1(0.5f);
    vf tail = vmul(vmul(vmul(q, t), vexp(vmul(vmul(x, x), vset1(-0.5f)))), half);
    vf phi = vsel_lt(x, vset1(0.0f), tail, vsub(vset1(1.0f), tail));
    return vmul(x, phi);
}

VEC_FN vf activate(vf x, int32_t act) {
    if (act == MX_ACT_SILU) return silu(x);
    if (act == MX_ACT_GELU_TANH) return gelu_tanh(x);
    return gelu_erf(x);
}

VEC_FN void glu_of(const float *gate, const float *up, int32_t act, int64_t n, float *y) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) vst(y + i, vmul(activate(vld(gate + i), act), vld(up + i)));
    if (i < n) {
        int64_t m = n - i;
        vst_n(y + i, vmul(activate(vld_n(gate + i, m), act), vld_n(up + i, m)), m);
    }
}

void CPU_FN(glu)(const float *gate, const float *up, int32_t act, int64_t n, float *y) {
    switch (act) {
    case MX_ACT_SILU: glu_of(gate, up, MX_ACT_SILU, n, y); break;
    case MX_ACT_GELU_TANH: glu_of(gate, up, MX_ACT_GELU_TANH, n, y); break;
    default: glu_of(gate, up, MX_ACT_GELU_ERF, n, y); break;
    }
}

void CPU_FN(softcap)(const float *x, float cap, int64_t n, float *y) {
    vf c = vset1(cap);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) vst(y + i, vmul(vtanh(vdiv(vld(x + i), c)), c));
    if (i < n) vst_n(y + i, vmul(vtanh(vdiv(vld_n(x + i, n - i), c)), c), n - i);
}

static void rope_pair(const float *x, float c, float s, int64_t a, int64_t b, float *y) {
    float xa = x[a], xb = x[b];
    y[a] = xa * c - xb * s;
    y[b] = xb * c + xa * s;
}

void CPU_FN(rope)(const float *x, const float *cs, int32_t head_dim, int32_t n_rot,
                  int32_t interleaved, float *y) {
    int64_t h = n_rot / 2, i = 0;
    if (interleaved) {
        for (; i < h; i++) rope_pair(x, cs[i], cs[h + i], 2 * i, 2 * i + 1, y);
    } else {
        for (; i + 16 <= h; i += 16) {
            vf a = vld(x + i), b = vld(x + h + i), c = vld(cs + i), s = vld(cs + h + i);
            vst(y + i, vsub(vmul(a, c), vmul(b, s)));
            vst(y + h + i, vadd(vmul(b, c), vmul(a, s)));
        }
        for (; i < h; i++) rope_pair(x, cs[i], cs[h + i], i, h + i, y);
    }
    if (x != y && n_rot < head_dim) {
        memcpy(y + n_rot, x + n_rot, (size_t)(head_dim - n_rot) * sizeof *y);
    }
}

static int64_t find_first(const float *x, int64_t n, float value) {
    vf m = vset1(value);
    int64_t i = 0;
    while (i + 16 <= n && !vany_eq(vld(x + i), m)) i += 16;
    while (i < n && x[i] != value) i++;
    return i < n ? i : -1;
}

void CPU_FN(max_sum)(const float *x, int64_t n, float *max, int64_t *at, double *sum) {
    vf m = vset1(-INFINITY);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) m = vmax(vld(x + i), m);
    float best = vmaxall(m);
    for (int64_t j = i; j < n; j++) best = x[j] > best ? x[j] : best;
    vf b = vset1(best), s = vset1(0.0f);
    for (int64_t j = 0; j < i; j += 16) s = vadd(s, vexp(vsub(vld(x + j), b)));
    if (i < n) { // lanes past the end: exp(-inf) = 0
        float t[16];
        for (int64_t j = 0; j < 16; j++) t[j] = i + j < n ? x[i + j] : -INFINITY;
        s = vadd(s, vexp(vsub(vld(t), b)));
    }
    *max = best;
    *at = find_first(x, n, best);
    *sum = (double)vsum(s);
}
