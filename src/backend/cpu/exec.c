// Walks a plan on every worker and runs its pointwise, lookup and sampling ops. State is the
// backend's; a worker owns nothing but its scratch. Threads divide rows, heads, tiles and whole
// chunks of a reduction, never a reduction, so their number changes no result.
#include "backend/cpu/exec_int.h"

#include "base/mem.h"

#include <math.h>
#include <string.h>

const mx_tensor *cpu_tensor(const cpu_ctx *c, mx_tid id) {
    return id == MX_NONE ? NULL : &c->run->plan->tensors[id];
}

void *cpu_ptr(const cpu_ctx *c, const mx_tensor *t) {
    if (t->kind == MX_T_LOGITS) return c->run->io->logits;
    uint8_t *base = t->kind == MX_T_TEMP ? c->run->arena : t->buf->host;
    return base + t->offset;
}

void cpu_slice(const cpu_ctx *c, int64_t n, int64_t *lo, int64_t *hi) {
    *lo = n * c->worker / c->n;
    *hi = n * (c->worker + 1) / c->n;
}

int64_t cpu_claim(const cpu_ctx *c) {
    return atomic_fetch_add_explicit(&c->run->b->claims[c->op_index], 1, memory_order_relaxed);
}

uint8_t *cpu_take_shared(cpu_ctx *c) {
    c->half ^= 1;
    c->took = true;
    if (c->used[c->half] == c->n_barriers + 1) cpu_barrier(c);
    return c->run->b->shared[c->half];
}

mx_wview cpu_weight_view(const mx_tensor *w) {
    const uint8_t *p = (const uint8_t *)w->buf->host;
    return (mx_wview){.fmt = w->fmt,
                      .n_rows = w->n_rows,
                      .n_cols = w->n_cols,
                      .data = p + w->offset,
                      .scales = p + w->scales_offset,
                      .biases = p + w->biases_offset};
}

void cpu_weight_row(const cpu_ctx *c, const mx_tensor *w, int64_t row, float *out) {
    if (w->layout == MX_LAYOUT_PACKED) {
        c->k->unpack_row(w, (const uint8_t *)cpu_ptr(c, w), row, out);
    } else {
        mx_wview v = cpu_weight_view(w);
        mx_dequant_row(&v, row, out);
    }
}

static const mx_tensor *in_of(const cpu_ctx *c, int i) {
    return cpu_tensor(c, c->op->in[i]);
}

static const mx_tensor *out_of(const cpu_ctx *c, int i) {
    return cpu_tensor(c, c->op->out[i]);
}

static const float *vector_of(const cpu_ctx *c, int i) {
    return (const float *)cpu_ptr(c, in_of(c, i));
}

static int32_t token_of(const cpu_ctx *c, int64_t row) {
    int32_t id = c->run->io->ids[row];
    if (id >= 0) return id;
    CHECKF(c->run->prev_id && -1 - id < c->run->b->caps.max_out, "token id %d of row %lld", id,
           (long long)row);
    return c->run->prev_id[-1 - id];
}

static void op_embed(cpu_ctx *c) {
    const mx_tensor *w = in_of(c, 0), *y = out_of(c, 0);
    int64_t lo, hi;
    float scale = c->op->p.embed.scale;
    cpu_slice(c, y->n_rows, &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        int32_t id = token_of(c, r);
        CHECKF(id >= 0 && id < w->n_rows, "token id %d of %lld", id, (long long)w->n_rows);
        float *out = cpu_row(c, y, r);
        cpu_weight_row(c, w, id, out);
        if (scale == 1.0f) continue;
        for (int64_t i = 0; i < y->n_cols; i++) out[i] = out[i] * scale;
    }
}

static void op_rms_norm(cpu_ctx *c) {
    const mx_tensor *x = in_of(c, 0), *y = out_of(c, 0);
    const float *w = vector_of(c, 1);
    int64_t dim = c->op->p.norm.dim, parts = x->n_cols / dim, lo, hi;
    cpu_slice(c, x->n_rows * parts, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        int64_t r = i / parts, col = i % parts * dim;
        c->k->rms_norm(cpu_row(c, x, r) + col, w, c->op->p.norm.eps, dim, cpu_row(c, y, r) + col);
    }
}

static void op_norm_add(cpu_ctx *c) {
    const mx_tensor *x = in_of(c, 0), *res = in_of(c, 2), *y = out_of(c, 0);
    const float *w = vector_of(c, 1);
    int64_t lo, hi;
    cpu_slice(c, x->n_rows, &lo, &hi);
    float *t = (float *)c->priv;
    for (int64_t r = lo; r < hi; r++) {
        c->k->rms_norm(cpu_row(c, x, r), w, c->op->p.norm.eps, x->n_cols, t);
        c->k->add(cpu_row(c, res, r), t, x->n_cols, cpu_row(c, y, r));
    }
}

static void op_add(cpu_ctx *c) {
    const mx_tensor *a = in_of(c, 0), *b = in_of(c, 1), *y = out_of(c, 0);
    int64_t lo, hi;
    cpu_slice(c, a->n_rows, &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        c->k->add(cpu_row(c, a, r), cpu_row(c, b, r), a->n_cols, cpu_row(c, y, r));
    }
}

// Units of rows x column blocks, so that one row is divided too.
static void op_glu(cpu_ctx *c) {
    const mx_tensor *g = in_of(c, 0), *u = in_of(c, 1), *y = out_of(c, 0);
    int64_t block = 512, parts = (g->n_cols + block - 1) / block, lo, hi;
    cpu_slice(c, g->n_rows * parts, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        int64_t r = i / parts, col = i % parts * block, n = MX_MIN(block, g->n_cols - col);
        c->k->glu(cpu_row(c, g, r) + col, cpu_row(c, u, r) + col, c->op->p.glu.act, n,
                  cpu_row(c, y, r) + col);
    }
}

static void op_softcap(cpu_ctx *c) {
    const mx_tensor *x = in_of(c, 0), *y = out_of(c, 0);
    int64_t block = 4096, parts = (x->n_cols + block - 1) / block, lo, hi;
    cpu_slice(c, x->n_rows * parts, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        int64_t r = i / parts, col = i % parts * block, n = MX_MIN(block, x->n_cols - col);
        c->k->softcap(cpu_row(c, x, r) + col, c->op->p.softcap.cap, n, cpu_row(c, y, r) + col);
    }
}

// The angle is rounded to float32 first, as the reference implementations do.
static void op_rope_table(cpu_ctx *c) {
    const mx_tensor *y = out_of(c, 0);
    const float *freq = vector_of(c, 0);
    int64_t h = c->op->p.rope.n_rot / 2, block = 8, parts = (h + block - 1) / block, lo, hi;
    float scale = c->op->p.rope.mscale;
    cpu_slice(c, y->n_rows * parts, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        float pos = (float)c->run->io->pos[i / parts], *out = cpu_row(c, y, i / parts);
        int64_t j0 = i % parts * block;
        for (int64_t j = j0; j < MX_MIN(j0 + block, h); j++) {
            float angle = pos * freq[j];
            out[j] = cosf(angle) * scale;
            out[h + j] = sinf(angle) * scale;
        }
    }
}

static void op_rope(cpu_ctx *c) {
    const mx_tensor *x = in_of(c, 0), *cs = in_of(c, 1), *y = out_of(c, 0);
    int32_t hd = c->op->p.rope.head_dim;
    int64_t parts = x->n_cols / hd, lo, hi;
    cpu_slice(c, x->n_rows * parts, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        int64_t r = i / parts, col = i % parts * hd;
        c->k->rope(cpu_row(c, x, r) + col, cpu_row(c, cs, r), hd, c->op->p.rope.n_rot,
                   c->op->p.rope.interleaved, cpu_row(c, y, r) + col);
    }
}

static void copy_row(const cpu_ctx *c, const mx_tensor *x, int64_t from, const mx_tensor *y,
                     int64_t to) {
    memcpy(cpu_row(c, y, to), cpu_row(c, x, from), (size_t)x->n_cols * sizeof(float));
}

static void op_gather(cpu_ctx *c) {
    const mx_tensor *x = in_of(c, 0), *y = out_of(c, 0);
    int64_t lo, hi;
    cpu_slice(c, y->n_rows, &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        int32_t from = r < c->run->io->counts[2] ? c->run->io->out_tok[r] : 0;
        CHECKF(from >= 0 && from < x->n_rows, "output %lld: row %d of %lld", (long long)r, from,
               (long long)x->n_rows);
        copy_row(c, x, from, y, r);
    }
}

static void op_copy(cpu_ctx *c) {
    const mx_tensor *x = in_of(c, 0), *y = out_of(c, 0);
    int64_t lo, hi;
    cpu_slice(c, x->n_rows, &lo, &hi);
    for (int64_t r = lo; r < hi; r++) copy_row(c, x, r, y, r);
}

static void op_all_reduce(cpu_ctx *c) { // one rank
    op_copy(c);
}

// ---- SAMPLE ----------------------------------------------------------------------------------
// Logits are summed in chunks of 4,096; chunks are merged in ascending order, in double.

typedef struct part {
    double sum;
    int64_t at;
    float max;
} part;

static void merge_parts(const part *p, int64_t n, int32_t *id, float *logprob) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++) {
        if (p[i].max > p[best].max) best = i;
    }
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        if (p[i].max > -INFINITY) sum += p[i].sum * exp((double)p[i].max - (double)p[best].max);
    }
    *id = p[best].at < 0 ? 0 : (int32_t)(best * CPU_VOCAB_CHUNK + p[best].at);
    *logprob = p[best].at < 0 ? NAN : (float)-log(sum);
}

static int64_t vocab_chunks(int64_t n_vocab) {
    return (n_vocab + CPU_VOCAB_CHUNK - 1) / CPU_VOCAB_CHUNK;
}

static void op_sample(cpu_ctx *c) {
    const mx_tensor *x = in_of(c, 0);
    const mx_step_io *io = c->run->io;
    part *parts = (part *)(void *)cpu_take_shared(c);
    int64_t rows = MX_MIN(x->n_rows, io->counts[2]), n = vocab_chunks(x->n_cols), lo, hi;
    cpu_slice(c, rows * n, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        int64_t r = i / n, col = i % n * CPU_VOCAB_CHUNK;
        if (io->sample[r].host) continue;
        c->k->max_sum(cpu_row(c, x, r) + col, MX_MIN(CPU_VOCAB_CHUNK, x->n_cols - col),
                      &parts[i].max, &parts[i].at, &parts[i].sum);
    }
    cpu_barrier(c);
    cpu_slice(c, rows, &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        if (!io->sample[r].host) {
            merge_parts(parts + r * n, n, &io->out_id[r], &io->out_logprob[r]);
        }
    }
}

// ---- Dispatch --------------------------------------------------------------------------------

#define op_matmul      cpu_op_product
#define op_matmul_add  cpu_op_product
#define op_qkv         cpu_op_product
#define op_matmul_glu  cpu_op_product
#define op_norm_matmul cpu_op_product
#define op_norm_qkv    cpu_op_product
#define op_norm_glu    cpu_op_product
#define op_attn        cpu_op_attn
#define op_kv_write    cpu_op_kv_write
#define op_rope_kv     cpu_op_rope_kv

static void (*const dispatch[])(cpu_ctx *c) = {
#define OP(ID, name, lo, hi, outs, fused) op_##name,
#include "backend/ops.def"
#undef OP
};

cpu_scratch cpu_op_scratch(const cpu_backend *b, const mx_op *op, const mx_tensor *tensors) {
    const mx_tensor *x = op->in[0] == MX_NONE ? NULL : &tensors[op->in[0]];
    switch ((mx_op_kind)op->kind) {
    case MX_OP_MATMUL:
    case MX_OP_MATMUL_ADD:
    case MX_OP_QKV:
    case MX_OP_MATMUL_GLU:
    case MX_OP_NORM_MATMUL:
    case MX_OP_NORM_QKV:
    case MX_OP_NORM_GLU: return cpu_product_scratch(b, op, tensors);
    case MX_OP_ATTN: return cpu_attn_scratch(b, op, tensors);
    case MX_OP_NORM_ADD: return (cpu_scratch){(size_t)x->n_cols * sizeof(float), 0};
    case MX_OP_SAMPLE:
        return (cpu_scratch){0, (size_t)(x->n_rows * vocab_chunks(x->n_cols)) * sizeof(part)};
    default: return (cpu_scratch){0};
    }
}

void cpu_walk(void *arg, int worker, int n) {
    const cpu_run *run = arg;
    cpu_ctx c = {.run = run,
                 .k = run->b->k,
                 .worker = worker,
                 .n = n,
                 .priv = run->b->priv + (size_t)worker * run->b->priv_bytes};
    for (int32_t i = 0; i < run->plan->n_ops; i++) {
        c.op = &run->plan->ops[i];
        c.op_index = i;
        if (c.op->flags & MX_OPF_BARRIER) cpu_barrier(&c);
        c.took = false;
        dispatch[c.op->kind](&c);
        if (c.took) c.used[c.half] = c.n_barriers + 1;
    }
}
