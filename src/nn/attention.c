// The attention block: projections, per-head norms and rotation with the state write, attention
// over the sequence's pages, output projection and residual.
#include "nn/nn.h"

#include <math.h>

typedef struct qkv {
    mx_tid q, k, v;
} qkv;

static qkv project(mx_enc *e, mx_tid x, const mx_attn_spec *s, const mx_attn_weights *w) {
    int64_t rows = mx_enc_tensor(e, x)->n_rows;
    qkv t = {.q = mx_enc_temp(e, rows, w->q->n_rows),
             .k = mx_enc_temp(e, rows, w->k->n_rows),
             .v = mx_enc_temp(e, rows, w->v->n_rows)};
    mx_enc_op(e, (mx_op){.kind = MX_OP_NORM_QKV,
                         .n_in = 8,
                         .n_out = 3,
                         .in = {x, mx_enc_use(e, w->norm), mx_enc_use(e, w->q), mx_enc_use(e, w->k),
                                mx_enc_use(e, w->v), mx_enc_use(e, w->bq), mx_enc_use(e, w->bk),
                                mx_enc_use(e, w->bv)},
                         .out = {t.q, t.k, t.v},
                         .p.norm = {s->eps, (int32_t)mx_enc_tensor(e, x)->n_cols}});
    return t;
}

// Output projection with residual, or with a norm in between.
static mx_tid finish(mx_enc *e, mx_tid o, mx_tid x, const mx_attn_spec *s,
                     const mx_attn_weights *w) {
    int64_t rows = mx_enc_tensor(e, x)->n_rows, d = mx_enc_tensor(e, x)->n_cols;
    mx_tid y = mx_enc_temp(e, rows, d);
    if (!w->post_norm) {
        mx_enc_op(e, (mx_op){.kind = MX_OP_MATMUL_ADD,
                             .n_in = 4,
                             .n_out = 1,
                             .in = {o, mx_enc_use(e, w->o), mx_enc_use(e, w->bo), x},
                             .out = {y}});
        return y;
    }
    mx_tid z = mx_enc_temp(e, rows, d);
    mx_enc_op(e, (mx_op){.kind = MX_OP_MATMUL,
                         .n_in = 3,
                         .n_out = 1,
                         .in = {o, mx_enc_use(e, w->o), mx_enc_use(e, w->bo)},
                         .out = {z}});
    mx_enc_op(e, (mx_op){.kind = MX_OP_NORM_ADD,
                         .n_in = 3,
                         .n_out = 1,
                         .in = {z, mx_enc_use(e, w->post_norm), x},
                         .out = {y},
                         .p.norm = {s->eps, (int32_t)d}});
    return y;
}

mx_tid mx_nn_attention(mx_enc *e, mx_tid x, mx_tid cs, const mx_attn_spec *s,
                       const mx_attn_weights *w, const mx_tensor *k_state, const mx_tensor *v_state,
                       int32_t ctx_bucket, bool gather) {
    qkv t = project(e, x, s, w);
    int64_t rows = mx_enc_tensor(e, x)->n_rows;
    mx_tid q = mx_enc_temp(e, rows, (int64_t)s->n_head * s->head_dim);
    mx_tid ks = mx_enc_use(e, k_state), vs = mx_enc_use(e, v_state);
    mx_op rope = {.kind = MX_OP_ROPE_KV,
                  .n_in = 8,
                  .n_out = 1,
                  .in = {t.q, t.k, t.v, cs, mx_enc_use(e, w->qn), mx_enc_use(e, w->kn), ks, vs},
                  .out = {q}};
    rope.p.rope.n_rot = (int32_t)mx_enc_tensor(e, cs)->n_cols;
    rope.p.rope.head_dim = s->head_dim;
    rope.p.rope.interleaved = s->rope_interleaved;
    rope.p.rope.eps = s->eps;
    rope.p.rope.n_head = s->n_head;
    rope.p.rope.n_kv_head = s->n_kv_head;
    rope.p.rope.group = s->kv_group;
    mx_enc_op(e, rope);
    if (gather && mx_enc_facts(e)->n_out == 0) return MX_NONE;
    mx_tid o = mx_enc_temp(e, rows, (int64_t)s->n_head * s->head_dim);
    mx_op attn = {.kind = MX_OP_ATTN, .n_in = 3, .n_out = 1, .in = {q, ks, vs}, .out = {o}};
    attn.p.attn.scale = s->scale;
    attn.p.attn.softcap = s->softcap;
    attn.p.attn.n_head = s->n_head;
    attn.p.attn.n_kv_head = s->n_kv_head;
    attn.p.attn.head_dim = s->head_dim;
    attn.p.attn.group = s->kv_group;
    attn.p.attn.window = s->window;
    attn.p.attn.ctx_bucket = ctx_bucket;
    attn.p.attn.one_row = mx_step_one_row(mx_enc_facts(e));
    mx_enc_op(e, attn);
    if (gather) {
        o = mx_nn_gather_out(e, o);
        x = mx_nn_gather_out(e, x);
    }
    return finish(e, o, x, s, w);
}
