// Small blocks: embedding, norm, head, MLP. Stateless; every function appends ops to the encoder.
#include "nn/nn.h"

static int64_t rows_of(mx_enc *e, mx_tid t) {
    return mx_enc_tensor(e, t)->n_rows;
}

static int64_t cols_of(mx_enc *e, mx_tid t) {
    return mx_enc_tensor(e, t)->n_cols;
}

mx_tid mx_nn_embed(mx_enc *e, const mx_tensor *table, float scale) {
    mx_tid y = mx_enc_temp(e, mx_enc_facts(e)->n_rows, table->n_cols);
    mx_enc_op(e, (mx_op){.kind = MX_OP_EMBED,
                         .n_in = 1,
                         .n_out = 1,
                         .in = {mx_enc_use(e, table)},
                         .out = {y},
                         .p.embed = {scale}});
    return y;
}

mx_tid mx_nn_norm(mx_enc *e, mx_tid x, const mx_tensor *w, float eps) {
    mx_tid y = mx_enc_temp(e, rows_of(e, x), cols_of(e, x));
    mx_enc_op(e, (mx_op){.kind = MX_OP_RMS_NORM,
                         .n_in = 2,
                         .n_out = 1,
                         .in = {x, mx_enc_use(e, w)},
                         .out = {y},
                         .p.norm = {eps, (int32_t)cols_of(e, x)}});
    return y;
}

mx_tid mx_nn_add(mx_enc *e, mx_tid a, mx_tid b) {
    mx_tid y = mx_enc_temp(e, rows_of(e, a), cols_of(e, a));
    mx_enc_op(e, (mx_op){.kind = MX_OP_ADD, .n_in = 2, .n_out = 1, .in = {a, b}, .out = {y}});
    return y;
}

mx_tid mx_nn_gather_out(mx_enc *e, mx_tid x) {
    mx_tid y = mx_enc_temp(e, mx_enc_facts(e)->n_out, cols_of(e, x));
    mx_enc_op(e, (mx_op){.kind = MX_OP_GATHER, .n_in = 1, .n_out = 1, .in = {x}, .out = {y}});
    return y;
}

mx_tid mx_nn_rope_table(mx_enc *e, const mx_tensor *inv_freq, float mscale) {
    int32_t n_rot = (int32_t)inv_freq->n_cols * 2;
    mx_tid y = mx_enc_temp(e, mx_enc_facts(e)->n_rows, n_rot);
    mx_enc_op(e, (mx_op){.kind = MX_OP_ROPE_TABLE,
                         .n_in = 1,
                         .n_out = 1,
                         .in = {mx_enc_use(e, inv_freq)},
                         .out = {y},
                         .p.rope = {.mscale = mscale, .n_rot = n_rot}});
    return y;
}

void mx_nn_head(mx_enc *e, mx_tid x, const mx_tensor *norm_w, float eps, const mx_tensor *head,
                float softcap, const mx_tensor *logits) {
    mx_tid y = softcap > 0 ? mx_enc_temp(e, rows_of(e, x), head->n_rows) : mx_enc_use(e, logits);
    mx_enc_op(e, (mx_op){.kind = MX_OP_NORM_MATMUL,
                         .n_in = 4,
                         .n_out = 1,
                         .in = {x, mx_enc_use(e, norm_w), mx_enc_use(e, head), MX_NONE},
                         .out = {y},
                         .p.norm = {eps, (int32_t)cols_of(e, x)}});
    if (softcap <= 0) return;
    mx_enc_op(e, (mx_op){.kind = MX_OP_SOFTCAP,
                         .n_in = 1,
                         .n_out = 1,
                         .in = {y},
                         .out = {mx_enc_use(e, logits)},
                         .p.softcap = {softcap}});
}

void mx_nn_sample(mx_enc *e, const mx_tensor *logits) {
    mx_enc_op(e, (mx_op){.kind = MX_OP_SAMPLE, .n_in = 1, .in = {mx_enc_use(e, logits)}});
}

mx_tid mx_nn_mlp(mx_enc *e, mx_tid x, const mx_mlp_weights *w, mx_act act, float eps) {
    int64_t rows = rows_of(e, x), d = cols_of(e, x);
    mx_tid h = mx_enc_temp(e, rows, w->gate->n_rows);
    mx_enc_op(
        e, (mx_op){.kind = MX_OP_NORM_GLU,
                   .n_in = 4,
                   .n_out = 1,
                   .in = {x, mx_enc_use(e, w->norm), mx_enc_use(e, w->gate), mx_enc_use(e, w->up)},
                   .out = {h},
                   .p.glu = {(int32_t)act, eps}});
    mx_tid y = mx_enc_temp(e, rows, d);
    if (!w->post_norm) {
        mx_enc_op(e, (mx_op){.kind = MX_OP_MATMUL_ADD,
                             .n_in = 4,
                             .n_out = 1,
                             .in = {h, mx_enc_use(e, w->down), MX_NONE, x},
                             .out = {y}});
        return y;
    }
    mx_tid z = mx_enc_temp(e, rows, d);
    mx_enc_op(e, (mx_op){.kind = MX_OP_MATMUL,
                         .n_in = 3,
                         .n_out = 1,
                         .in = {h, mx_enc_use(e, w->down), MX_NONE},
                         .out = {z}});
    mx_enc_op(e, (mx_op){.kind = MX_OP_NORM_ADD,
                         .n_in = 3,
                         .n_out = 1,
                         .in = {z, mx_enc_use(e, w->post_norm), x},
                         .out = {y},
                         .p.norm = {eps, (int32_t)d}});
    return y;
}
