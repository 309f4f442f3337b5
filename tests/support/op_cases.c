// See op_cases.h. Inputs belong to op_data; nothing else is kept.
#include "support/op_cases.h"

#include "backend/cpu/ref.h"
#include "base/mem.h"
#include "tensor/half.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

const mx_wfmt op_formats[OP_FORMATS] = {
    {MX_F32, 0, 0, MX_F32},     {MX_F16, 0, 0, MX_F32},      {MX_BF16, 0, 0, MX_F32},
    {MX_Q4_0, 0, 0, MX_F32},    {MX_Q4_1, 0, 0, MX_F32},     {MX_Q5_0, 0, 0, MX_F32},
    {MX_Q5_1, 0, 0, MX_F32},    {MX_Q8_0, 0, 0, MX_F32},     {MX_Q4_K, 0, 0, MX_F32},
    {MX_Q5_K, 0, 0, MX_F32},    {MX_Q6_K, 0, 0, MX_F32},     {MX_AFFINE, 4, 64, MX_BF16},
    {MX_AFFINE, 8, 32, MX_F16}, {MX_AFFINE, 3, 128, MX_F32},
};

static float *floats(rng *g, int64_t n, float scale) {
    float *x = mx_calloc((size_t)n + 1, sizeof *x);
    rng_fill(g, x, n, scale);
    return x;
}

static int n_weights(mx_op_kind op) {
    switch (op) {
    case MX_OP_MATMUL:
    case MX_OP_MATMUL_ADD:
    case MX_OP_NORM_MATMUL:
    case MX_OP_EMBED: return 1;
    case MX_OP_MATMUL_GLU:
    case MX_OP_NORM_GLU: return 2;
    case MX_OP_QKV:
    case MX_OP_NORM_QKV: return 3;
    default: return 0;
    }
}

static bool is_glu(mx_op_kind op) {
    return op == MX_OP_MATMUL_GLU || op == MX_OP_NORM_GLU;
}

static bool has_norm(mx_op_kind op) {
    return op == MX_OP_NORM_MATMUL || op == MX_OP_NORM_QKV || op == MX_OP_NORM_GLU;
}

// Rows of weight i: in QKV the later two are narrower.
static int64_t weight_rows(const op_case *c, int i) {
    bool qkv = c->op == MX_OP_QKV || c->op == MX_OP_NORM_QKV;
    return qkv && i > 0 ? (c->n + 2) / 3 : c->n;
}

static int64_t width(const op_case *c) { // columns of the inputs
    return c->op == MX_OP_ROPE ? (int64_t)c->k * c->a : c->op == MX_OP_SAMPLE ? c->n : c->k;
}

op_data op_case_inputs(const op_case *c, uint64_t seed) {
    rng g = {seed};
    op_data d = {.n_m = n_weights(c->op)};
    int64_t n = c->rows * width(c);
    for (int i = 0; i < 3; i++)
        d.x[i] =
            floats(&g, c->op == MX_OP_MATMUL_ADD && i == 1 ? (int64_t)c->rows * c->n : n, 1.0f);
    if (c->op == MX_OP_SOFTCAP || c->op == MX_OP_SAMPLE || c->op == MX_OP_GLU) {
        for (int64_t i = 0; i < n; i++) d.x[0][i] *= 6.0f;
    }
    if (c->op == MX_OP_SAMPLE && c->n > 40) d.x[0][c->n - 7] = d.x[0][30] = 99; // a tie
    d.w = floats(&g, MX_MAX(c->k, c->n), 1.0f);
    if (c->op == MX_OP_ROPE_TABLE) {
        for (int i = 0; i < c->n / 2; i++) d.w[i] = powf(10000.0f, -2.0f * (float)i / (float)c->n);
    }
    for (int i = 0; i < d.n_m; i++) {
        mx_wfmt f = i == d.n_m - 1 && i > 0 ? c->f2 : c->f;
        d.m[i] = rig_random_matrix(&g, f, weight_rows(c, i), c->k);
        if (c->a && !is_glu(c->op)) d.bias[i] = floats(&g, weight_rows(c, i), 1.0f);
    }
    return d;
}

void op_case_free(op_data *d) {
    for (int i = 0; i < 3; i++) {
        mx_free(d->x[i]);
        mx_free(d->bias[i]);
        mx_free(d->m[i].owner);
    }
    mx_free(d->w);
}

int64_t op_case_outputs(const op_case *c) {
    switch (c->op) {
    case MX_OP_QKV:
    case MX_OP_NORM_QKV: return c->rows * (weight_rows(c, 0) + 2 * weight_rows(c, 1));
    case MX_OP_SAMPLE: return 2 * c->rows;
    case MX_OP_ROPE_TABLE: return (int64_t)c->rows * c->n;
    case MX_OP_EMBED: return (int64_t)c->rows * c->k;
    default: return c->rows * (n_weights(c->op) ? c->n : width(c));
    }
}

static mx_op_params params_of(const op_case *c) {
    mx_op_params p = {.words = {0}};
    switch (c->op) {
    case MX_OP_RMS_NORM:
    case MX_OP_NORM_ADD:
    case MX_OP_NORM_MATMUL:
    case MX_OP_NORM_QKV:
        p.norm.eps = 1e-5f;
        p.norm.dim = c->op == MX_OP_RMS_NORM ? c->a : c->k;
        break;
    case MX_OP_GLU:
    case MX_OP_MATMUL_GLU: p.glu.act = c->a; break;
    case MX_OP_NORM_GLU:
        p.glu.act = c->a;
        p.glu.eps = 1e-5f;
        break;
    case MX_OP_EMBED: p.embed.scale = c->a ? 25.25f : 1.0f; break;
    case MX_OP_SOFTCAP: p.softcap.cap = 30.0f; break;
    case MX_OP_ROPE_TABLE:
        p.rope.n_rot = c->n;
        p.rope.mscale = c->a ? 1.25f : 1.0f;
        break;
    case MX_OP_ROPE:
        p.rope.n_rot = c->n;
        p.rope.head_dim = c->k;
        p.rope.interleaved = c->b;
        break;
    default: break;
    }
    return p;
}

static mx_tensor *vector(rig *r, const float *w, int64_t n) {
    mx_wview v = {.fmt = mx_wfmt_of(MX_F32), .n_rows = 1, .n_cols = n, .data = w};
    return rig_weight(r, &v);
}

// Fills in[] with the op's inputs; returns how many.
static int inputs_of(rig *r, const op_case *c, const op_data *d, const mx_tensor *in[8]) {
    int n = 0, nw = d->n_m;
    if (c->op == MX_OP_EMBED) {
        in[0] = rig_weight(r, &d->m[0].view);
        return 1;
    }
    if (c->op == MX_OP_ROPE_TABLE) {
        in[0] = vector(r, d->w, c->n / 2);
        return 1;
    }
    in[n++] = rig_tensor(r, c->rows, width(c), d->x[0]);
    if (has_norm(c->op)) in[n++] = vector(r, d->w, c->k);
    for (int i = 0; i < nw; i++) in[n++] = rig_weight(r, &d->m[i].view);
    if (nw && !is_glu(c->op)) {
        for (int i = 0; i < nw; i++) {
            in[n++] = d->bias[i] ? vector(r, d->bias[i], weight_rows(c, i)) : NULL;
        }
    }
    if (c->op == MX_OP_MATMUL_ADD) in[n++] = rig_tensor(r, c->rows, c->n, d->x[1]);
    if (c->op == MX_OP_ADD || c->op == MX_OP_GLU) in[n++] = rig_tensor(r, c->rows, c->k, d->x[1]);
    if (c->op == MX_OP_RMS_NORM) in[n++] = vector(r, d->w, c->a);
    if (c->op == MX_OP_NORM_ADD) {
        in[n++] = vector(r, d->w, c->k);
        in[n++] = rig_tensor(r, c->rows, c->k, d->x[1]);
    }
    if (c->op == MX_OP_ROPE) in[n++] = rig_tensor(r, c->rows, c->n, d->x[1]);
    return n;
}

void op_case_run(rig *r, const op_case *c, const op_data *d, float *out) {
    const mx_tensor *in[8] = {0}, *res[3] = {0};
    int32_t seq = 0, pos0 = 5;
    int32_t n = c->rows, n_out = c->op == MX_OP_SAMPLE || c->op == MX_OP_GATHER ? c->rows : 0;
    int n_in = inputs_of(r, c, d, in), n_res = mx_op_get(c->op)->n_out;
    mx_step_io *io = &r->io[r->slot];
    int64_t total = op_case_outputs(c);
    for (int i = 0; i < n_res; i++) {
        int64_t cols = n_res == 3 ? weight_rows(c, i) : total / c->rows;
        res[i] = rig_tensor(r, c->rows, cols, NULL);
    }
    rig_begin(r, 1, &seq, &pos0, &n, n_out, 1);
    if (c->op == MX_OP_EMBED) {
        for (int i = 0; i < c->rows; i++) io->ids[i] = i * 7 % c->n;
    }
    rig_op(r, c->op, params_of(c), n_in, in, n_res, res);
    rig_run(r);
    for (int i = 0; i < n_res; i++) {
        rig_read(r, res[i], out);
        out += res[i]->n_rows * res[i]->n_cols;
    }
    if (c->op == MX_OP_SAMPLE) {
        for (int i = 0; i < c->rows; i++) {
            out[2 * i] = (float)io->out_id[i];
            out[2 * i + 1] = io->out_logprob[i];
        }
    }
    rig_reset(r);
}

// ---- Oracles ---------------------------------------------------------------------------------

static void oracle_product(const op_case *c, const op_data *d, int row, double *out) {
    double *x = mx_calloc((size_t)c->k, sizeof *x), *y[3];
    for (int i = 0; i < c->k; i++) x[i] = (double)d->x[0][row * c->k + i];
    if (has_norm(c->op)) cpu_ref_rms_norm(x, d->w, (double)1e-5f, c->k, x);
    int64_t at = 0;
    for (int i = 0; i < d->n_m; i++) {
        y[i] = mx_calloc((size_t)weight_rows(c, i), sizeof **y);
        cpu_ref_matmul(&d->m[i].view, x, d->bias[i], y[i]);
        if (is_glu(c->op)) continue;
        int64_t n = weight_rows(c, i);
        for (int64_t o = 0; o < n; o++) {
            double r = c->op == MX_OP_MATMUL_ADD ? (double)d->x[1][row * n + o] : 0;
            out[at * c->rows + row * n + o] = y[i][o] + r;
        }
        at += n;
    }
    if (is_glu(c->op)) {
        for (int o = 0; o < c->n; o++) {
            out[(int64_t)row * c->n + o] = cpu_ref_act((mx_act)c->a, y[0][o]) * y[1][o];
        }
    }
    for (int i = 0; i < d->n_m; i++) mx_free(y[i]);
    mx_free(x);
}

static void oracle_norm(const op_case *c, const op_data *d, int row, double *out) {
    int dim = c->op == MX_OP_RMS_NORM ? c->a : c->k;
    double *x = mx_calloc((size_t)dim, sizeof *x);
    for (int col = 0; col < c->k; col += dim) {
        int64_t at = (int64_t)row * c->k + col;
        for (int i = 0; i < dim; i++) x[i] = (double)d->x[0][at + i];
        cpu_ref_rms_norm(x, d->w, (double)1e-5f, dim, out + at);
        if (c->op == MX_OP_RMS_NORM) continue;
        for (int i = 0; i < dim; i++) out[at + i] += (double)d->x[1][at + i];
    }
    mx_free(x);
}

static void oracle_rope(const op_case *c, const op_data *d, int row, double *out) {
    double x[CPU_MAX_HEAD_DIM], cs[CPU_MAX_HEAD_DIM];
    for (int i = 0; i < c->n; i++) cs[i] = (double)d->x[1][row * c->n + i];
    for (int h = 0; h < c->a; h++) {
        int64_t at = (int64_t)row * c->k * c->a + h * c->k;
        for (int i = 0; i < c->k; i++) x[i] = (double)d->x[0][at + i];
        cpu_ref_rope(x, cs, c->k, c->n, c->b, out + at);
    }
}

static void oracle_embed(const op_case *c, const op_data *d, int row, double *out) {
    float *t = mx_calloc((size_t)c->k, sizeof *t);
    mx_dequant_row(&d->m[0].view, row * 7 % c->n, t);
    for (int i = 0; i < c->k; i++) {
        out[(int64_t)row * c->k + i] = (double)t[i] * (c->a ? 25.25 : 1.0);
    }
    mx_free(t);
}

static double oracle_element(const op_case *c, const op_data *d, int64_t i) {
    double x = (double)d->x[0][i], y = (double)d->x[1][i];
    switch (c->op) {
    case MX_OP_ADD: return x + y;
    case MX_OP_GLU: return cpu_ref_act((mx_act)c->a, x) * y;
    case MX_OP_SOFTCAP: return cpu_ref_softcap(x, 30);
    case MX_OP_GATHER: {
        int64_t row = c->rows - 1 - i / c->k;
        return (double)d->x[0][row * c->k + i % c->k];
    }
    default: return x;
    }
}

void op_case_oracle(const op_case *c, const op_data *d, double *out) {
    for (int r = 0; r < c->rows; r++) {
        switch (c->op) {
        case MX_OP_RMS_NORM:
        case MX_OP_NORM_ADD: oracle_norm(c, d, r, out); break;
        case MX_OP_ROPE: oracle_rope(c, d, r, out); break;
        case MX_OP_EMBED: oracle_embed(c, d, r, out); break;
        case MX_OP_ROPE_TABLE:
            cpu_ref_rope_table(d->w, c->n, 5 + r, c->a ? 1.25 : 1.0, out + (int64_t)r * c->n);
            break;
        case MX_OP_SAMPLE:
            out[2 * r] = cpu_ref_greedy(d->x[0] + (int64_t)r * c->n, c->n, &out[2 * r + 1]);
            break;
        default:
            if (d->n_m) {
                oracle_product(c, d, r, out);
            } else {
                for (int64_t i = 0; i < width(c); i++) {
                    out[r * width(c) + i] = oracle_element(c, d, r * width(c) + i);
                }
            }
        }
    }
}

double op_case_tolerance(const op_case *c, bool exact) {
    switch (c->op) {
    case MX_OP_ADD:
    case MX_OP_COPY:
    case MX_OP_ALL_REDUCE:
    case MX_OP_GATHER: return 5e-7;
    case MX_OP_EMBED: return c->a ? 1e-5 : 5e-7;
    case MX_OP_SAMPLE: return 1e-5;
    default: break;
    }
    if (!n_weights(c->op)) return 1e-5;
    bool coded = !mx_dtype_is_float(c->f.dtype) || !mx_dtype_is_float(c->f2.dtype);
    if (!coded || exact) return 3e-5;
    return is_glu(c->op) ? 0.15 : 0.06;
}

char *op_case_name(const op_case *c, char *buf, size_t cap) {
    char f[48] = "", f2[48] = "";
    if (n_weights(c->op)) mx_wfmt_name(c->f, f, sizeof f);
    if (n_weights(c->op) > 1) mx_wfmt_name(c->f2, f2, sizeof f2);
    snprintf(buf, cap, "%s rows %d n %d k %d a %d b %d %s %s", mx_op_get(c->op)->name, c->rows,
             c->n, c->k, c->a, c->b, f, f2);
    return buf;
}

// ---- The matrix ------------------------------------------------------------------------------

static const int odd_n[] = {1, 4, 5, 7, 8, 31, 32, 33, 63, 65, 96, 127, 129};
static const int odd_rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17};

static bool k_blocks(mx_wfmt f) {
    return f.dtype == MX_Q4_K || f.dtype == MX_Q5_K || f.dtype == MX_Q6_K;
}

static void each_product(void (*fn)(const op_case *c, void *arg), void *arg) {
    static const mx_op_kind ops[] = {MX_OP_MATMUL,     MX_OP_MATMUL_ADD,  MX_OP_QKV,
                                     MX_OP_MATMUL_GLU, MX_OP_NORM_MATMUL, MX_OP_NORM_QKV,
                                     MX_OP_NORM_GLU};
    int i = 0;
    for (int f = 0; f < OP_FORMATS; f++) {
        for (size_t o = 0; o < MX_COUNT(ops); o++, i++) {
            op_case c = {.op = ops[o], .f = op_formats[f], .f2 = op_formats[f]};
            c.rows = odd_rows[i % (int)MX_COUNT(odd_rows)];
            c.n = odd_n[i * 5 % (int)MX_COUNT(odd_n)];
            c.k = k_blocks(c.f) ? 256 : 128 + 128 * (i % 2);
            if (!n_weights(c.op)) continue;
            c.a = is_glu(c.op) ? i % 3 : i % 2;
            fn(&c, arg);
            c.rows = odd_rows[(i + 5) % (int)MX_COUNT(odd_rows)];
            c.f2 = op_formats[(f + 4) % OP_FORMATS]; // two formats in one op
            c.k = 256;
            fn(&c, arg);
        }
    }
    for (size_t n = 0; n < MX_COUNT(odd_n); n++) {
        for (size_t r = 0; r < MX_COUNT(odd_rows); r += 2) {
            op_case c = {.op = MX_OP_MATMUL_ADD, .rows = odd_rows[r], .n = odd_n[n], .k = 64};
            c.f = c.f2 = mx_wfmt_of(MX_Q4_1);
            fn(&c, arg);
        }
    }
}

void op_cases_each(void (*fn)(const op_case *c, void *arg), void *arg) {
    static const op_case simple[] = {
        {.op = MX_OP_RMS_NORM, .rows = 1, .k = 576, .a = 576},
        {.op = MX_OP_RMS_NORM, .rows = 5, .k = 33, .a = 33},
        {.op = MX_OP_RMS_NORM, .rows = 17, .k = 192, .a = 64},
        {.op = MX_OP_ADD, .rows = 1, .k = 640},
        {.op = MX_OP_ADD, .rows = 9, .k = 65},
        {.op = MX_OP_NORM_ADD, .rows = 3, .k = 97},
        {.op = MX_OP_GLU, .rows = 1, .k = 1536, .a = MX_ACT_SILU},
        {.op = MX_OP_GLU, .rows = 3, .k = 127, .a = MX_ACT_GELU_TANH},
        {.op = MX_OP_GLU, .rows = 4, .k = 1031, .a = MX_ACT_GELU_ERF},
        {.op = MX_OP_SOFTCAP, .rows = 2, .k = 5001},
        {.op = MX_OP_COPY, .rows = 7, .k = 31},
        {.op = MX_OP_ALL_REDUCE, .rows = 2, .k = 8},
        {.op = MX_OP_GATHER, .rows = 6, .k = 63},
        {.op = MX_OP_ROPE_TABLE, .rows = 9, .n = 64},
        {.op = MX_OP_ROPE_TABLE, .rows = 1, .n = 20, .a = 1},
        {.op = MX_OP_ROPE, .rows = 3, .n = 64, .k = 64, .a = 9},
        {.op = MX_OP_ROPE, .rows = 2, .n = 20, .k = 80, .a = 3},
        {.op = MX_OP_ROPE, .rows = 5, .n = 64, .k = 128, .a = 2, .b = 1},
        {.op = MX_OP_ROPE, .rows = 1, .n = 256, .k = 256, .a = 4},
        {.op = MX_OP_SAMPLE, .rows = 1, .n = 1},
        {.op = MX_OP_SAMPLE, .rows = 3, .n = 4097},
        {.op = MX_OP_SAMPLE, .rows = 2, .n = 12000},
    };
    for (size_t i = 0; i < MX_COUNT(simple); i++) fn(&simple[i], arg);
    for (int i = 0; i < 3 * OP_FORMATS; i++) { // rows of 1, 3 and 5 super-blocks, as they are
        int f = i / 3, k = 256 + 512 * (i % 3);
        op_case c = {.op = MX_OP_EMBED, .rows = 1 + f, .n = 33, .k = k, .a = f % 2};
        c.f = c.f2 = op_formats[f];
        fn(&c, arg);
    }
    each_product(fn, arg);
}

// ---- Attention -------------------------------------------------------------------------------

static int64_t q_cols(const attn_case *c) {
    return (int64_t)c->n_head * c->head_dim;
}

static int64_t kv_cols(const attn_case *c) {
    return (int64_t)c->n_kv * c->head_dim;
}

attn_data attn_case_inputs(const attn_case *c, uint64_t seed) {
    rng g = {seed};
    int64_t n = (int64_t)c->n_seqs * RIG_MAX_CTX;
    attn_data d = {.q = floats(&g, n * q_cols(c), 1.5f),
                   .k = floats(&g, n * kv_cols(c), 1.5f),
                   .v = floats(&g, n * kv_cols(c), 1.0f),
                   .qn = floats(&g, c->head_dim, 1.0f),
                   .kn = floats(&g, c->head_dim, 1.0f),
                   .freq = floats(&g, c->head_dim / 2, 0.0f)};
    for (int i = 0; i < c->head_dim / 2; i++) {
        d.freq[i] = powf(10000.0f, -2.0f * (float)i / (float)c->head_dim);
    }
    return d;
}

void attn_case_free(attn_data *d) {
    mx_free(d->q);
    mx_free(d->k);
    mx_free(d->v);
    mx_free(d->qn);
    mx_free(d->kn);
    mx_free(d->freq);
}

int64_t attn_case_outputs(const attn_case *c) {
    int64_t n = 0;
    for (int s = 0; s < c->n_seqs; s++) n += c->len[s] * q_cols(c);
    return n;
}

typedef struct attn_run {
    rig *r;
    const attn_case *c;
    const attn_data *d;
    int group;
    const mx_tensor *k, *v, *qn, *kn, *freq;
    float *out;
} attn_run;

// The rows of a step, gathered from (sequence, position, cols) by the step's ranges.
static mx_tensor *rows_of(const attn_run *a, const float *all, int64_t cols, int32_t n,
                          const int32_t *seq, const int32_t *pos0, const int32_t *len) {
    int64_t rows = 0;
    for (int32_t i = 0; i < n; i++) rows += len[i];
    float *x = mx_alloc((size_t)(rows * cols) * sizeof *x), *p = x;
    for (int32_t i = 0; i < n; i++) {
        const float *from = all + ((int64_t)seq[i] * RIG_MAX_CTX + pos0[i]) * cols;
        memcpy(p, from, (size_t)(len[i] * cols) * sizeof *p);
        p += len[i] * cols;
    }
    mx_tensor *t = rig_tensor(a->r, rows, cols, x);
    mx_free(x);
    return t;
}

static float *result_at(const attn_run *a, int32_t seq, int32_t pos) {
    int64_t n = pos;
    for (int s = 0; s < seq; s++) n += a->c->len[s];
    return a->out + n * q_cols(a->c);
}

static void step(attn_run *a, int32_t n, const int32_t *seq, const int32_t *pos0,
                 const int32_t *len) {
    const attn_case *c = a->c;
    rig *r = a->r;
    int keep = r->n_used;
    mx_tensor *q = rows_of(a, a->d->q, q_cols(c), n, seq, pos0, len);
    mx_tensor *k = rows_of(a, a->d->k, kv_cols(c), n, seq, pos0, len);
    mx_tensor *v = rows_of(a, a->d->v, kv_cols(c), n, seq, pos0, len);
    mx_tensor *o = rig_tensor(r, q->n_rows, q->n_cols, NULL);
    rig_begin(r, n, seq, pos0, len, 0, c->n_seqs);
    int32_t longest = 0;
    for (int32_t i = 0; i < n; i++) longest = MX_MAX(longest, pos0[i] + len[i]);
    mx_tid cs = mx_enc_temp(r->enc, q->n_rows, c->head_dim);
    mx_tid rq = mx_enc_temp(r->enc, q->n_rows, q->n_cols);
    mx_enc_op(r->enc, (mx_op){.kind = MX_OP_ROPE_TABLE,
                              .n_in = 1,
                              .n_out = 1,
                              .in = {rig_use(r, a->freq)},
                              .out = {cs},
                              .p.rope = {.mscale = 1, .n_rot = c->head_dim}});
    mx_enc_op(r->enc,
              (mx_op){.kind = MX_OP_ROPE_KV,
                      .n_in = 8,
                      .n_out = 1,
                      .in = {rig_use(r, q), rig_use(r, k), rig_use(r, v), cs, rig_use(r, a->qn),
                             rig_use(r, a->kn), rig_use(r, a->k), rig_use(r, a->v)},
                      .out = {rq},
                      .p.rope = {.mscale = 1,
                                 .n_rot = c->head_dim,
                                 .head_dim = c->head_dim,
                                 .eps = 1e-6f,
                                 .n_head = c->n_head,
                                 .n_kv_head = c->n_kv,
                                 .group = a->group}});
    mx_enc_op(r->enc, (mx_op){.kind = MX_OP_ATTN,
                              .n_in = 3,
                              .n_out = 1,
                              .in = {rq, rig_use(r, a->k), rig_use(r, a->v)},
                              .out = {rig_use(r, o)},
                              .p.attn = {.scale = 1.0f / sqrtf((float)c->head_dim),
                                         .softcap = c->softcap,
                                         .n_head = c->n_head,
                                         .n_kv_head = c->n_kv,
                                         .head_dim = c->head_dim,
                                         .group = a->group,
                                         .window = c->window,
                                         .ctx_bucket = mx_ctx_bucket(longest),
                                         .one_row = mx_step_one_row(mx_enc_facts(r->enc))}});
    rig_run(r);
    float *all = mx_alloc(o->n_bytes), *p = all;
    rig_read(r, o, all);
    for (int32_t i = 0; i < n; i++) {
        int64_t m = len[i] * q_cols(c);
        memcpy(result_at(a, seq[i], pos0[i]), p, (size_t)m * sizeof *p);
        p += m;
    }
    mx_free(all);
    while (r->n_used > keep) { // the step's own tensors
        r->n_used--;
        r->b->ops->free(r->b, r->used[r->n_used]->buf);
        mx_free(r->used[r->n_used]);
    }
}

// Brings sequence s from position `from` to `to` in steps of at most `most` rows.
static void advance(attn_run *a, int32_t s, int32_t from, int32_t to, int32_t most) {
    while (from < to) {
        int32_t n = MX_MIN(most, to - from);
        step(a, 1, &s, &from, &n);
        from += n;
    }
}

// All sequences side by side, at most `most[s]` rows of each a step, until they have `to`.
static void advance_all(attn_run *a, int32_t *at, const int32_t *to, const int32_t *most) {
    for (;;) {
        int32_t n = 0, seq[RIG_MAX_RANGE], pos0[RIG_MAX_RANGE], len[RIG_MAX_RANGE];
        for (int32_t s = 0; s < a->c->n_seqs; s++) {
            if (at[s] >= to[s]) continue;
            seq[n] = s;
            pos0[n] = at[s];
            len[n] = MX_MIN(most[s], to[s] - at[s]);
            at[s] += len[n++];
        }
        if (n == 0) return;
        step(a, n, seq, pos0, len);
    }
}

void attn_case_run(rig *r, const attn_case *c, const attn_data *d, attn_schedule s, int group,
                   float *out) {
    static const int32_t uneven[RIG_MAX_RANGE] = {61, 1, 17, 40}, one[RIG_MAX_RANGE] = {1, 1, 1, 1};
    attn_run a = {.r = r, .c = c, .d = d, .group = group, .out = out};
    a.k = rig_state(r, group, c->n_seqs, c->n_kv, c->head_dim, c->type);
    a.v = rig_state(r, group, c->n_seqs, c->n_kv, c->head_dim, c->type);
    a.freq = vector(r, d->freq, c->head_dim / 2);
    if (c->norms) {
        a.qn = vector(r, d->qn, c->head_dim);
        a.kn = vector(r, d->kn, c->head_dim);
    }
    int32_t at[RIG_MAX_RANGE] = {0};
    bool tail = s == ATTN_DECODE || s == ATTN_BATCH;
    for (int32_t i = 0; i < c->n_seqs && s != ATTN_TOGETHER; i++) {
        at[i] = tail ? MX_MAX(c->len[i] - 8, 0) : c->len[i];
        advance(&a, i, 0, at[i], s == ATTN_CHUNKS ? 37 : RIG_MAX_TOK);
        if (s == ATTN_DECODE) advance(&a, i, at[i], c->len[i], 1);
    }
    if (s == ATTN_BATCH) advance_all(&a, at, c->len, one);
    if (s == ATTN_TOGETHER) advance_all(&a, at, c->len, uneven);
    rig_reset(r);
}

// One head of the rotated (and normed) row.
static void oracle_head(const attn_case *c, const attn_data *d, const float *x, const float *w,
                        int32_t pos, bool half, float *out) {
    double t[CPU_MAX_HEAD_DIM], cs[CPU_MAX_HEAD_DIM];
    for (int i = 0; i < c->head_dim; i++) t[i] = (double)x[i];
    if (c->norms) cpu_ref_rms_norm(t, w, (double)1e-6f, c->head_dim, t);
    cpu_ref_rope_table(d->freq, c->head_dim, pos, 1, cs);
    double y[CPU_MAX_HEAD_DIM];
    cpu_ref_rope(t, cs, c->head_dim, c->head_dim, false, y);
    for (int i = 0; i < c->head_dim; i++) {
        out[i] = half ? mx_f16_to_f32(mx_f32_to_f16((float)y[i])) : (float)y[i];
    }
}

static void oracle_seq(const attn_case *c, const attn_data *d, int s, double *out) {
    int64_t hd = c->head_dim, kc = kv_cols(c), base = (int64_t)s * RIG_MAX_CTX, n = c->len[s];
    float *k = mx_calloc((size_t)(n * kc), sizeof *k), *v = mx_calloc((size_t)(n * kc), sizeof *v);
    bool half = c->type == MX_F16;
    for (int32_t p = 0; p < n; p++) {
        for (int h = 0; h < c->n_kv; h++) {
            int64_t from = (base + p) * kc + h * hd, to = p * kc + h * hd;
            oracle_head(c, d, d->k + from, d->kn, p, half, k + to);
            for (int i = 0; i < hd; i++) {
                float x = d->v[from + i];
                v[to + i] = half ? mx_f16_to_f32(mx_f32_to_f16(x)) : x;
            }
        }
    }
    float q[CPU_MAX_HEAD_DIM];
    for (int32_t p = 0; p < n; p++) {
        int32_t lo = c->window ? MX_MAX(0, p - c->window + 1) : 0;
        for (int h = 0; h < c->n_head; h++) {
            int64_t kv = h / (c->n_head / c->n_kv) * hd;
            oracle_head(c, d, d->q + (base + p) * q_cols(c) + h * hd, d->qn, p, false, q);
            cpu_ref_attn(q, k + kv, v + kv, kc, lo, p + 1, c->head_dim,
                         (double)(1.0f / sqrtf((float)hd)), (double)c->softcap,
                         out + p * q_cols(c) + h * hd);
        }
    }
    mx_free(k);
    mx_free(v);
}

void attn_case_oracle(const attn_case *c, const attn_data *d, double *out) {
    for (int s = 0; s < c->n_seqs; s++) {
        oracle_seq(c, d, s, out);
        out += c->len[s] * q_cols(c);
    }
}
