// The oracle: what each primitive op means, one row at a time, in double precision and the plainest
// order. Fused ops mean their expansion. For tests, tools and tuning; no backend runs it.
#ifndef MX_BACKEND_CPU_REF_H
#define MX_BACKEND_CPU_REF_H

#include "backend/op.h"

// y[n] = x / sqrt(mean(x^2) + eps) * w
void cpu_ref_rms_norm(const double *x, const float *w, double eps, int64_t n, double *y);
// y[w->n_rows] = W x + bias (bias may be NULL), W dequantised exactly
void cpu_ref_matmul(const mx_wview *w, const double *x, const float *bias, double *y);
double cpu_ref_act(mx_act act, double x);
double cpu_ref_softcap(double x, double cap);
// cs[n_rot]: cos, then sin, of the float32 angle pos * inv_freq
void cpu_ref_rope_table(const float *inv_freq, int32_t n_rot, int32_t pos, double mscale,
                        double *cs);
void cpu_ref_rope(const double *x, const double *cs, int32_t head_dim, int32_t n_rot,
                  bool interleaved, double *y);
// One query head over positions [lo, hi): key t is at k + t * stride, value at v + t * stride.
void cpu_ref_attn(const float *q, const float *k, const float *v, int64_t stride, int32_t lo,
                  int32_t hi, int32_t head_dim, double scale, double softcap, double *out);
// Greedy choice: the largest logit, lowest id on ties; *logprob is its log-softmax.
int32_t cpu_ref_greedy(const float *logits, int64_t n, double *logprob);

#endif
