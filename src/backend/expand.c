// The declared expansion of each fused op into primitive ops. A backend that lacks a fused op, the
// kill switch MLXCEL_FUSED_OPS=0 and the oracle run these; nn never asks.
#include "backend/encoder.h"

static int64_t cols_of(const mx_enc *e, mx_tid t) {
    return mx_enc_tensor(e, t)->n_cols;
}

static int64_t rows_of(const mx_enc *e, mx_tid t) {
    return mx_enc_tensor(e, t)->n_rows;
}

// norm over the whole row of x into a new temporary
static mx_tid norm_row(mx_enc *e, mx_tid x, mx_tid w, float eps) {
    mx_tid y = mx_enc_temp(e, rows_of(e, x), cols_of(e, x));
    mx_enc_op(e, (mx_op){.kind = MX_OP_RMS_NORM,
                         .n_in = 2,
                         .n_out = 1,
                         .in = {x, w},
                         .out = {y},
                         .p.norm = {eps, (int32_t)cols_of(e, x)}});
    return y;
}

static void matmul_into(mx_enc *e, mx_tid x, mx_tid w, mx_tid bias, mx_tid y) {
    mx_enc_op(e,
              (mx_op){.kind = MX_OP_MATMUL, .n_in = 3, .n_out = 1, .in = {x, w, bias}, .out = {y}});
}

static mx_tid matmul_new(mx_enc *e, mx_tid x, mx_tid w, mx_tid bias) {
    mx_tid y = mx_enc_temp(e, rows_of(e, x), rows_of(e, w));
    matmul_into(e, x, w, bias, y);
    return y;
}

static void binary(mx_enc *e, mx_op_kind kind, mx_tid a, mx_tid b, mx_tid y, mx_op_params p) {
    mx_enc_op(
        e, (mx_op){.kind = (uint8_t)kind, .n_in = 2, .n_out = 1, .in = {a, b}, .out = {y}, .p = p});
}

static void expand_glu(mx_enc *e, const mx_op *op, mx_tid x, mx_tid gate_w, mx_tid up_w) {
    mx_tid gate = matmul_new(e, x, gate_w, MX_NONE);
    mx_tid up = matmul_new(e, x, up_w, MX_NONE);
    binary(e, MX_OP_GLU, gate, up, op->out[0], (mx_op_params){.glu = {op->p.glu.act, 0}});
}

// One of q, k: optional norm over each head, then rotation, into y.
static void norm_rope(mx_enc *e, const mx_op *op, mx_tid x, mx_tid w, mx_tid y) {
    if (w != MX_NONE) {
        mx_tid n = mx_enc_temp(e, rows_of(e, x), cols_of(e, x));
        binary(e, MX_OP_RMS_NORM, x, w, n,
               (mx_op_params){.norm = {op->p.rope.eps, op->p.rope.head_dim}});
        x = n;
    }
    mx_op_params p = {.rope = {.n_rot = op->p.rope.n_rot,
                               .head_dim = op->p.rope.head_dim,
                               .interleaved = op->p.rope.interleaved}};
    binary(e, MX_OP_ROPE, x, op->in[3], y, p);
}

static void expand_rope_kv(mx_enc *e, const mx_op *op) {
    mx_tid k = mx_enc_temp(e, rows_of(e, op->in[1]), cols_of(e, op->in[1]));
    norm_rope(e, op, op->in[0], op->in[4], op->out[0]);
    norm_rope(e, op, op->in[1], op->in[5], k);
    mx_enc_op(e, (mx_op){.kind = MX_OP_KV_WRITE,
                         .n_in = 4,
                         .n_out = 0,
                         .in = {k, op->in[2], op->in[6], op->in[7]},
                         .p.kv = {op->p.rope.n_kv_head, op->p.rope.head_dim, op->p.rope.group}});
}

void mx_op_expand(mx_enc *e, const mx_op *op) {
    const mx_tid *in = op->in;
    switch ((mx_op_kind)op->kind) {
    case MX_OP_MATMUL_ADD: {
        mx_tid y = matmul_new(e, in[0], in[1], in[2]);
        binary(e, MX_OP_ADD, y, in[3], op->out[0], (mx_op_params){0});
        break;
    }
    case MX_OP_QKV:
        for (int i = 0; i < 3; i++) matmul_into(e, in[0], in[1 + i], in[4 + i], op->out[i]);
        break;
    case MX_OP_MATMUL_GLU: expand_glu(e, op, in[0], in[1], in[2]); break;
    case MX_OP_NORM_MATMUL:
        matmul_into(e, norm_row(e, in[0], in[1], op->p.norm.eps), in[2], in[3], op->out[0]);
        break;
    case MX_OP_NORM_QKV: {
        mx_tid x = norm_row(e, in[0], in[1], op->p.norm.eps);
        for (int i = 0; i < 3; i++) matmul_into(e, x, in[2 + i], in[5 + i], op->out[i]);
        break;
    }
    case MX_OP_NORM_GLU:
        expand_glu(e, op, norm_row(e, in[0], in[1], op->p.glu.eps), in[2], in[3]);
        break;
    case MX_OP_NORM_ADD:
        binary(e, MX_OP_ADD, in[2], norm_row(e, in[0], in[1], op->p.norm.eps), op->out[0],
               (mx_op_params){0});
        break;
    case MX_OP_ROPE_KV: expand_rope_kv(e, op); break;
    default: CHECKF(false, "op %s has no expansion", mx_op_get((mx_op_kind)op->kind)->name);
    }
}
