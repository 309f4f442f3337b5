// The op table, shape checks and costs. No state.
#include "backend/op.h"

#include "base/mem.h"

#include <math.h>

static const mx_op_info infos[] = {
#define OP(ID, name, lo, hi, outs, fused) {#name, lo, hi, outs, fused},
#include "backend/ops.def"
#undef OP
};

const mx_op_info *mx_op_get(mx_op_kind k) {
    CHECK((unsigned)k < MX_OP_COUNT);
    return &infos[k];
}

static const struct {
    const char *name, *what;
    mx_log_level level;
} slow_paths[] = {
#define SLOW(id, level, name, what) {name, what, MX_LOG_##level},
#include "backend/slow.def"
#undef SLOW
};

const char *mx_slow_name(mx_slow s) {
    CHECK((unsigned)s < MX_SLOW_COUNT);
    return slow_paths[s].name;
}

const char *mx_slow_what(mx_slow s) {
    CHECK((unsigned)s < MX_SLOW_COUNT);
    return slow_paths[s].what;
}

mx_log_level mx_slow_level(mx_slow s) {
    CHECK((unsigned)s < MX_SLOW_COUNT);
    return slow_paths[s].level;
}

const char *mx_role_name(mx_role r) {
    static const char *const names[] = {"embed", "attention", "mlp",      "moe",
                                        "head",  "norm",      "sampling", "other"};
    return (unsigned)r < MX_ROLE_COUNT ? names[r] : "?";
}

const char *mx_commit_reason_name(mx_commit_reason r) {
    static const char *const names[] = {"ops", "bytes", "end", "sync"};
    return (unsigned)r < MX_COMMIT_REASONS ? names[r] : "?";
}

// ---- Shape checks ----------------------------------------------------------------------------

typedef struct check {
    const mx_op *op;
    const mx_tensor *t;
    mx_err *err;
    bool bad;
} check;

static const mx_tensor *input(const check *c, int i) {
    return c->op->in[i] == MX_NONE ? NULL : &c->t[c->op->in[i]];
}

// Input i, when present, must be (rows, cols); -1 leaves a dimension free.
static void expect(check *c, const mx_tensor *t, const char *what, int i, int64_t rows,
                   int64_t cols) {
    if (c->bad || !t) return;
    if ((rows >= 0 && t->n_rows != rows) || (cols >= 0 && t->n_cols != cols)) {
        c->bad = true;
        mx_err_set(c->err, MX_INTERNAL, "%s: %s %d is (%lld, %lld), expected (%lld, %lld)",
                   infos[c->op->kind].name, what, i, (long long)t->n_rows, (long long)t->n_cols,
                   (long long)rows, (long long)cols);
    }
}

static void expect_in(check *c, int i, int64_t rows, int64_t cols) {
    expect(c, input(c, i), "input", i, rows, cols);
}

static void expect_out(check *c, int i, int64_t rows, int64_t cols) {
    expect(c, &c->t[c->op->out[i]], "output", i, rows, cols);
}

static void require(check *c, int i) {
    if (c->bad || c->op->in[i] != MX_NONE) return;
    c->bad = true;
    mx_err_set(c->err, MX_INTERNAL, "%s: input %d is missing", infos[c->op->kind].name, i);
}

// y = x W^T with an optional bias: W at w, bias at b (b < 0: none).
static void check_product(check *c, int x, int w, int b, int out) {
    const mx_tensor *wt = input(c, w), *xt = input(c, x);
    expect_in(c, w, -1, xt->n_cols);
    if (b >= 0) expect_in(c, b, -1, wt->n_rows);
    expect_out(c, out, xt->n_rows, wt->n_rows);
}

static void check_rope_kv(check *c) {
    const mx_op *op = c->op;
    int64_t d = op->p.rope.head_dim, nh = op->p.rope.n_head, nk = op->p.rope.n_kv_head;
    int64_t rows = input(c, 0)->n_rows;
    expect_in(c, 0, rows, nh * d);
    expect_in(c, 1, rows, nk * d);
    expect_in(c, 2, rows, nk * d);
    expect_in(c, 3, rows, op->p.rope.n_rot);
    expect_in(c, 4, -1, d);
    expect_in(c, 5, -1, d);
    expect_out(c, 0, rows, nh * d);
}

static void check_shapes(check *c) {
    const mx_op *op = c->op;
    const mx_tensor *x = input(c, 0);
    switch ((mx_op_kind)op->kind) {
    case MX_OP_EMBED: expect_out(c, 0, -1, x->n_cols); break;
    case MX_OP_RMS_NORM:
        expect_in(c, 1, -1, op->p.norm.dim);
        expect_out(c, 0, x->n_rows, x->n_cols);
        break;
    case MX_OP_MATMUL: check_product(c, 0, 1, 2, 0); break;
    case MX_OP_ADD:
    case MX_OP_GLU:
        expect_in(c, 1, x->n_rows, x->n_cols);
        expect_out(c, 0, x->n_rows, x->n_cols);
        break;
    case MX_OP_ROPE_TABLE: expect_out(c, 0, -1, op->p.rope.n_rot); break;
    case MX_OP_ROPE:
        expect_in(c, 1, x->n_rows, op->p.rope.n_rot);
        expect_out(c, 0, x->n_rows, x->n_cols);
        break;
    case MX_OP_KV_WRITE:
        expect_in(c, 0, -1, (int64_t)op->p.kv.n_kv_head * op->p.kv.head_dim);
        expect_in(c, 1, x->n_rows, x->n_cols);
        break;
    case MX_OP_ATTN:
        expect_in(c, 0, -1, (int64_t)op->p.attn.n_head * op->p.attn.head_dim);
        expect_out(c, 0, x->n_rows, x->n_cols);
        break;
    case MX_OP_GATHER: expect_out(c, 0, -1, x->n_cols); break;
    case MX_OP_SOFTCAP:
    case MX_OP_COPY:
    case MX_OP_ALL_REDUCE: expect_out(c, 0, x->n_rows, x->n_cols); break;
    case MX_OP_SAMPLE: break;
    case MX_OP_MATMUL_ADD:
        check_product(c, 0, 1, 2, 0);
        require(c, 3);
        expect_in(c, 3, x->n_rows, input(c, 1)->n_rows);
        break;
    case MX_OP_QKV:
        for (int i = 0; i < 3; i++) check_product(c, 0, 1 + i, 4 + i, i);
        break;
    case MX_OP_MATMUL_GLU:
        check_product(c, 0, 1, -1, 0);
        check_product(c, 0, 2, -1, 0);
        break;
    case MX_OP_NORM_MATMUL:
        expect_in(c, 1, -1, x->n_cols);
        check_product(c, 0, 2, 3, 0);
        break;
    case MX_OP_NORM_QKV:
        expect_in(c, 1, -1, x->n_cols);
        for (int i = 0; i < 3; i++) check_product(c, 0, 2 + i, 5 + i, i);
        break;
    case MX_OP_NORM_GLU:
        expect_in(c, 1, -1, x->n_cols);
        check_product(c, 0, 2, -1, 0);
        check_product(c, 0, 3, -1, 0);
        break;
    case MX_OP_NORM_ADD:
        expect_in(c, 1, -1, x->n_cols);
        expect_in(c, 2, x->n_rows, x->n_cols);
        expect_out(c, 0, x->n_rows, x->n_cols);
        break;
    case MX_OP_ROPE_KV: check_rope_kv(c); break;
    case MX_OP_COUNT: break;
    }
}

// True when input i of the op may be absent.
static bool optional_input(mx_op_kind k, int i) {
    switch (k) {
    case MX_OP_MATMUL:
    case MX_OP_MATMUL_ADD: return i == 2;
    case MX_OP_QKV: return i >= 4;
    case MX_OP_NORM_MATMUL: return i == 3;
    case MX_OP_NORM_QKV: return i >= 5;
    case MX_OP_ROPE_KV: return i == 4 || i == 5;
    default: return false;
    }
}

mx_status mx_op_validate(const mx_op *op, const mx_tensor *tensors, int32_t n_tensors,
                         mx_err *err) {
    if (op->kind >= MX_OP_COUNT) return mx_err_set(err, MX_INTERNAL, "op %d unknown", op->kind);
    const mx_op_info *info = &infos[op->kind];
    if (op->n_in < info->min_in || op->n_in > info->max_in || op->n_out != info->n_out) {
        return mx_err_set(err, MX_INTERNAL, "%s: %d inputs and %d outputs, expected %d..%d and %d",
                          info->name, op->n_in, op->n_out, info->min_in, info->max_in, info->n_out);
    }
    for (int i = 0; i < op->n_in; i++) {
        bool absent = op->in[i] == MX_NONE && optional_input((mx_op_kind)op->kind, i);
        if (!absent && (op->in[i] < 0 || op->in[i] >= n_tensors)) {
            return mx_err_set(err, MX_INTERNAL, "%s: input %d is not a tensor", info->name, i);
        }
    }
    for (int i = 0; i < op->n_out; i++) {
        if (op->out[i] < 0 || op->out[i] >= n_tensors) {
            return mx_err_set(err, MX_INTERNAL, "%s: output %d is not a tensor", info->name, i);
        }
    }
    check c = {.op = op, .t = tensors, .err = err};
    check_shapes(&c);
    return c.bad ? MX_INTERNAL : MX_OK;
}

// ---- Cost ------------------------------------------------------------------------------------

// Positions of range r that an attention with this window reads.
static double visible(const mx_step_range *r, int32_t window) {
    double len = (double)r->pos0 + r->n_tok;
    if (window > 0) len = fmin(len, (double)window + r->n_tok - 1);
    return len;
}

static double elem_bytes(const mx_tensor *state) {
    return state->fmt.dtype == MX_F32 ? 4 : 2;
}

// Bytes of the K (or V) rows that an attention sees, every range counted.
static double visible_bytes(const mx_op *op, const mx_tensor *state, const mx_step_facts *f) {
    double n = 0;
    for (int32_t i = 0; i < f->n_ranges; i++) n += visible(&f->ranges[i], op->p.attn.window);
    return n * op->p.attn.n_kv_head * op->p.attn.head_dim * elem_bytes(state);
}

double mx_op_input_bytes(const mx_op *op, int i, const mx_tensor *t, const mx_step_facts *f) {
    if (op->in[i] == MX_NONE) return 0;
    const mx_tensor *x = &t[op->in[i]];
    if (x->kind == MX_T_STATE) return op->kind == MX_OP_ATTN ? visible_bytes(op, x, f) : 0;
    if (x->kind == MX_T_WEIGHT) {
        if (op->kind != MX_OP_EMBED) return (double)x->n_bytes;
        return (double)x->n_bytes / (double)x->n_rows * f->n_tok;
    }
    int64_t rows = x->n_rows == f->n_rows ? f->n_tok : x->n_rows;
    return (double)rows * (double)x->n_cols * 4;
}

static double attn_flops(const mx_op *op, const mx_step_facts *f) {
    double pairs = 0;
    for (int32_t i = 0; i < f->n_ranges; i++) {
        const mx_step_range *r = &f->ranges[i];
        double n = r->n_tok, len = visible(r, op->p.attn.window);
        pairs += n * len - 0.5 * n * (n - 1);
    }
    return 4 * pairs * op->p.attn.n_head * op->p.attn.head_dim;
}

mx_cost mx_op_cost(const mx_op *op, const mx_tensor *t, const mx_step_facts *f) {
    mx_cost c = {0};
    double rows = f->n_tok;
    if (op->kind == MX_OP_ATTN) c.flops = attn_flops(op, f);
    for (int i = 0; i < op->n_in; i++) {
        c.read_bytes += mx_op_input_bytes(op, i, t, f);
        if (op->in[i] == MX_NONE || op->kind == MX_OP_EMBED) continue;
        const mx_tensor *w = &t[op->in[i]];
        bool matrix = w->kind == MX_T_WEIGHT && w->n_rows > 1 && w->n_cols > 1;
        if (!matrix) continue;
        const mx_tensor *y = &t[op->out[0]];
        double r = y->n_rows == f->n_rows ? rows : (double)y->n_rows;
        c.flops += 2 * r * (double)w->n_rows * (double)w->n_cols;
    }
    for (int i = 0; i < op->n_out; i++) {
        const mx_tensor *y = &t[op->out[i]];
        double r = y->n_rows == f->n_rows ? rows : (double)y->n_rows;
        c.write_bytes += r * (double)y->n_cols * 4;
    }
    if (op->kind == MX_OP_KV_WRITE || op->kind == MX_OP_ROPE_KV) {
        int k = op->kind == MX_OP_KV_WRITE ? 2 : 6;
        int kin = op->kind == MX_OP_KV_WRITE ? 0 : 1;
        c.write_bytes += 2 * rows * (double)t[op->in[kin]].n_cols * elem_bytes(&t[op->in[k]]);
    }
    return c;
}
