// Building blocks that append ops. They know shapes and roles, not families, files or devices.
#ifndef MX_NN_NN_H
#define MX_NN_NN_H

#include "backend/encoder.h"
#include "kv/kv.h"

// Activations are temporaries (rows, cols); weights are (n_out, n_in). NULL weights are absent.

mx_tid mx_nn_embed(mx_enc *e, const mx_tensor *table, float scale); // -> (rows, d)
mx_tid mx_nn_norm(mx_enc *e, mx_tid x, const mx_tensor *w, float eps);
mx_tid mx_nn_add(mx_enc *e, mx_tid a, mx_tid b);
mx_tid mx_nn_gather_out(mx_enc *e, mx_tid x); // (rows, d) -> (n_out, d)
// cos/sin of every row's position for one set of inverse frequencies: (rows, n_rot)
mx_tid mx_nn_rope_table(mx_enc *e, const mx_tensor *inv_freq, float mscale);
// Final norm and head into the step's logits; softcap 0 = none.
void mx_nn_head(mx_enc *e, mx_tid x, const mx_tensor *norm_w, float eps, const mx_tensor *head,
                float softcap, const mx_tensor *logits);
void mx_nn_sample(mx_enc *e, const mx_tensor *logits);

typedef struct mx_attn_spec {
    int32_t n_head, n_kv_head, head_dim;
    float scale, softcap, eps;
    int32_t window, kv_group;
    bool rope_interleaved;
} mx_attn_spec;

typedef struct mx_attn_weights {
    const mx_tensor *norm; // (1, d) before the projections
    const mx_tensor *q, *k, *v, *o;
    const mx_tensor *bq, *bk, *bv, *bo; // or NULL
    const mx_tensor *qn, *kn;           // per-head norms (1, head_dim), or NULL
    const mx_tensor *post_norm;         // on the output before the residual, or NULL
} mx_attn_weights;

// x + attention(norm(x)). gather: only the output rows go on after attention (the last layer);
// with no output rows nothing is appended after the state is written and MX_NONE is returned.
mx_tid mx_nn_attention(mx_enc *e, mx_tid x, mx_tid cs, const mx_attn_spec *s,
                       const mx_attn_weights *w, const mx_tensor *k_state, const mx_tensor *v_state,
                       int32_t ctx_bucket, bool gather);

typedef struct mx_mlp_weights {
    const mx_tensor *norm, *gate, *up, *down, *post_norm;
} mx_mlp_weights;

// x + down(act(gate(n)) * up(n)), n = norm(x)
mx_tid mx_nn_mlp(mx_enc *e, mx_tid x, const mx_mlp_weights *w, mx_act act, float eps);

#endif
