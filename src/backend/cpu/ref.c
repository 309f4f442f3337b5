// The oracle of every primitive op, in double precision. No state, no vectors, no threads: it
// shares no code with the kernels that are compared with it.
#include "backend/cpu/ref.h"

#include "base/mem.h"

#include <math.h>

void cpu_ref_rms_norm(const double *x, const float *w, double eps, int64_t n, double *y) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    double r = 1 / sqrt(sum / (double)n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * r * (double)w[i];
}

void cpu_ref_matmul(const mx_wview *w, const double *x, const float *bias, double *y) {
    float *row = mx_alloc((size_t)w->n_cols * sizeof *row);
    for (int64_t r = 0; r < w->n_rows; r++) {
        mx_dequant_row(w, r, row);
        double sum = bias ? (double)bias[r] : 0;
        for (int64_t i = 0; i < w->n_cols; i++) sum += (double)row[i] * x[i];
        y[r] = sum;
    }
    mx_free(row);
}

double cpu_ref_act(mx_act act, double x) {
    switch (act) {
    case MX_ACT_SILU: return x / (1 + exp(-x));
    case MX_ACT_GELU_TANH: return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case MX_ACT_GELU_ERF: return 0.5 * x * erfc(-x * M_SQRT1_2);
    }
    return NAN;
}

double cpu_ref_softcap(double x, double cap) {
    return cap * tanh(x / cap);
}

void cpu_ref_rope_table(const float *inv_freq, int32_t n_rot, int32_t pos, double mscale,
                        double *cs) {
    for (int32_t i = 0; i < n_rot / 2; i++) {
        double angle = (double)((float)pos * inv_freq[i]);
        cs[i] = cos(angle) * mscale;
        cs[n_rot / 2 + i] = sin(angle) * mscale;
    }
}

void cpu_ref_rope(const double *x, const double *cs, int32_t head_dim, int32_t n_rot,
                  bool interleaved, double *y) {
    int32_t h = n_rot / 2;
    for (int32_t i = 0; i < head_dim; i++) y[i] = x[i];
    for (int32_t i = 0; i < h; i++) {
        int32_t a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : h + i;
        y[a] = x[a] * cs[i] - x[b] * cs[h + i];
        y[b] = x[b] * cs[i] + x[a] * cs[h + i];
    }
}

void cpu_ref_attn(const float *q, const float *k, const float *v, int64_t stride, int32_t lo,
                  int32_t hi, int32_t head_dim, double scale, double softcap, double *out) {
    double *p = mx_calloc((size_t)(hi - lo), sizeof *p), top = -INFINITY, sum = 0;
    for (int32_t t = lo; t < hi; t++) {
        double s = 0;
        for (int32_t d = 0; d < head_dim; d++) s += (double)q[d] * (double)k[t * stride + d];
        s *= scale;
        p[t - lo] = softcap > 0 ? cpu_ref_softcap(s, softcap) : s;
        top = fmax(top, p[t - lo]);
    }
    for (int32_t d = 0; d < head_dim; d++) out[d] = 0;
    for (int32_t t = lo; t < hi; t++) {
        double e = exp(p[t - lo] - top);
        sum += e;
        for (int32_t d = 0; d < head_dim; d++) out[d] += e * (double)v[t * stride + d];
    }
    for (int32_t d = 0; d < head_dim; d++) out[d] /= sum;
    mx_free(p);
}

int32_t cpu_ref_greedy(const float *logits, int64_t n, double *logprob) {
    int64_t best = 0;
    double sum = 0;
    for (int64_t i = 1; i < n; i++) {
        if (logits[i] > logits[best]) best = i;
    }
    for (int64_t i = 0; i < n; i++) sum += exp((double)logits[i] - (double)logits[best]);
    *logprob = -log(sum);
    return (int32_t)best;
}
