// MATMUL and its six fused forms: one function. An op is up to three weights applied to the same
// rows, with an optional norm before, and bias, residual or gate after. No state.
//
// Activations are prepared once per kind of weight: for few rows every worker prepares its own copy
// (cheaper than waiting for each other and for lines that both write), for more the rows are
// divided and a barrier follows. Output tiles are then divided by bytes of weights; with many rows
// workers claim small runs of tiles, so that a late worker gets less.
//
// A weight that stayed in the checkpoint's layout is dequantised row by row and multiplied by the
// (normed) floats: sixteen interleaved sums, then a tree.
#include "backend/cpu/exec_int.h"

#include "base/mem.h"

#include <string.h>

enum { PLAIN = CPU_ACT_KINDS, N_KINDS }; // activations of a weight in MX_LAYOUT_ROWS
// At most so many rows, or rows x workers, are prepared by each worker for itself.
enum { OWN_ROWS = 2, OWN_WORK = 16 };
enum { CLAIM_ROWS = 16 }; // from so many rows tiles are claimed
enum { PLAIN_TILE = 16 };

typedef struct product {
    const mx_tensor *w, *bias, *y;
    int kind;
} product;

typedef struct job {
    const mx_tensor *x, *norm, *residual;
    product p[3];
    int n;    // products
    bool glu; // p[0] is the gate, p[1] the other; the result goes to p[0].y
    int32_t act;
    float eps;
} job;

static const mx_tensor *at(const mx_tensor *t, mx_tid id) {
    return id == MX_NONE ? NULL : &t[id];
}

static int kind_of(const cpu_kernels *k, const mx_tensor *w) {
    return w->layout == MX_LAYOUT_PACKED ? (int)k->act_kind(w) : (int)PLAIN;
}

// Reads an op: where its norm, weights, biases and outputs are.
static job job_of(const cpu_kernels *k, const mx_op *op, const mx_tensor *t) {
    mx_op_kind kind = (mx_op_kind)op->kind;
    bool norm = kind == MX_OP_NORM_MATMUL || kind == MX_OP_NORM_QKV || kind == MX_OP_NORM_GLU;
    job j = {.x = &t[op->in[0]]};
    int w = norm ? 2 : 1;
    j.n = kind == MX_OP_QKV || kind == MX_OP_NORM_QKV ? 3 : 1;
    j.glu = kind == MX_OP_MATMUL_GLU || kind == MX_OP_NORM_GLU;
    if (j.glu) j.n = 2;
    if (norm) {
        j.norm = &t[op->in[1]];
        j.eps = j.glu ? op->p.glu.eps : op->p.norm.eps;
    }
    if (j.glu) j.act = op->p.glu.act;
    if (kind == MX_OP_MATMUL_ADD) j.residual = &t[op->in[3]];
    for (int i = 0; i < j.n; i++) {
        int b = w + j.n + i;
        j.p[i].w = &t[op->in[w + i]];
        j.p[i].bias = !j.glu && b < op->n_in ? at(t, op->in[b]) : NULL;
        if (j.n == 1) j.p[i].bias = w + 1 < op->n_in ? at(t, op->in[w + 1]) : NULL;
        j.p[i].y = &t[op->out[j.glu ? 0 : i]];
        j.p[i].kind = kind_of(k, j.p[i].w);
    }
    return j;
}

static size_t act_size(const cpu_kernels *k, int kind, int64_t n_cols, int64_t n_tok) {
    size_t n = kind == PLAIN ? (size_t)(n_cols * n_tok) * sizeof(float)
                             : k->act_bytes((cpu_act_kind)kind, n_cols, n_tok);
    return cpu_align(n);
}

// Places one preparation for each kind in use from `base`; returns the bytes taken.
static size_t place_acts(const cpu_kernels *k, const job *j, uint8_t *base, uint8_t *act[N_KINDS]) {
    size_t used = 0;
    bool seen[N_KINDS] = {0};
    for (int i = 0; i < j->n; i++) {
        int kind = j->p[i].kind;
        if (seen[kind] || (kind == PLAIN && !j->norm)) continue; // plain floats: x itself
        seen[kind] = true;
        if (act) act[kind] = base + used;
        used += act_size(k, kind, j->x->n_cols, j->x->n_rows);
    }
    return used;
}

static bool fused_glu(const job *j) {
    return j->p[0].kind != PLAIN && j->p[0].kind == j->p[1].kind;
}

// Scratch of one worker: a dequantised row, then its own activations. Shared: activations, then
// the second product of a gate whose weights differ in kind.
static size_t own_row_bytes(const job *j) {
    return cpu_align((size_t)j->x->n_cols * sizeof(float));
}

static size_t second_bytes(const job *j) {
    if (!j->glu || fused_glu(j)) return 0;
    return cpu_align((size_t)(j->x->n_rows * j->p[1].w->n_rows) * sizeof(float));
}

cpu_scratch cpu_product_scratch(const cpu_backend *b, const mx_op *op, const mx_tensor *t) {
    job j = job_of(b->k, op, t);
    size_t acts = place_acts(b->k, &j, NULL, NULL);
    return (cpu_scratch){own_row_bytes(&j) + acts, second_bytes(&j) + acts};
}

static void prepare(const cpu_ctx *c, const job *j, int64_t lo, int64_t hi, uint8_t *act[N_KINDS]) {
    const float *norm = j->norm ? (const float *)cpu_ptr(c, j->norm) : NULL;
    int64_t n = j->x->n_cols;
    for (int kind = 0; kind < N_KINDS; kind++) {
        if (!act[kind]) continue;
        if (kind != PLAIN) {
            c->k->act_prepare((cpu_act_kind)kind, cpu_row(c, j->x, 0), j->x->ld, n, lo, hi, norm,
                              j->eps, act[kind]);
            continue;
        }
        for (int64_t r = lo; r < hi; r++) {
            c->k->rms_norm(cpu_row(c, j->x, r), norm, j->eps, n, (float *)act[kind] + r * n);
        }
    }
}

// ---- Plain weights ---------------------------------------------------------------------------

typedef struct plain {
    const mx_tensor *w;
    const float *x; // floats (n_tok, ldx)
    int64_t ldx;
    cpu_mul m; // y, bias, residual
} plain;

static float dot16(const float *a, const float *b, int64_t n) {
    float s[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        for (int l = 0; l < 16; l++) s[l] += a[i + l] * b[i + l];
    }
    for (int l = 0; i + l < n; l++) s[l] += a[i + l] * b[i + l];
    for (int h = 8; h > 0; h /= 2) {
        for (int l = 0; l < h; l++) s[l] += s[l + h];
    }
    return s[0];
}

static void plain_tiles(const cpu_ctx *c, const plain *p, int64_t tile0, int64_t tile1) {
    float *row = (float *)c->priv;
    int64_t end = MX_MIN(tile1 * PLAIN_TILE, p->w->n_rows);
    mx_wview v = cpu_weight_view(p->w);
    for (int64_t r = tile0 * PLAIN_TILE; r < end; r++) {
        mx_dequant_row(&v, r, row);
        for (int64_t t = 0; t < p->m.n_tok; t++) {
            float y = dot16(p->x + t * p->ldx, row, p->w->n_cols);
            if (p->m.bias) y += p->m.bias[r];
            if (p->m.residual) y += p->m.residual[t * p->m.ld_res + r];
            p->m.y[t * p->m.ldy + r] = y;
        }
    }
}

// ---- Tiles -----------------------------------------------------------------------------------

typedef struct stage {
    const job *j;
    plain p[3];
    int64_t tiles[3], tile_bytes[3];
    int n; // streams of tiles: products, or 1 for a gate
} stage;

static void stage_product(const cpu_ctx *c, const job *j, int i, uint8_t *act[N_KINDS], float *y,
                          int64_t ldy, plain *p) {
    const product *pr = &j->p[i];
    *p = (plain){.w = pr->w, .x = cpu_row(c, j->x, 0), .ldx = j->x->ld};
    if (pr->kind == PLAIN && act[PLAIN]) {
        p->x = (const float *)act[PLAIN];
        p->ldx = j->x->n_cols;
    }
    p->m = (cpu_mul){.w = pr->w,
                     .data = (const uint8_t *)cpu_ptr(c, pr->w),
                     .act = act[pr->kind],
                     .n_tok = j->x->n_rows,
                     .y = y,
                     .ldy = ldy,
                     .bias = pr->bias ? (const float *)cpu_ptr(c, pr->bias) : NULL};
    if (j->residual) {
        p->m.residual = cpu_row(c, j->residual, 0);
        p->m.ld_res = j->residual->ld;
    }
}

static int64_t tile_rows(const cpu_ctx *c, const job *j, int i) {
    return j->p[i].kind == PLAIN ? (int64_t)PLAIN_TILE : (int64_t)c->k->tile_rows;
}

static stage stage_of(const cpu_ctx *c, const job *j, uint8_t *act[N_KINDS], float *second) {
    stage s = {.j = j, .n = j->glu ? 1 : j->n};
    for (int i = 0; i < j->n; i++) {
        bool to_second = j->glu && i == 1 && second;
        const mx_tensor *y = j->p[i].y;
        stage_product(c, j, i, act, to_second ? second : cpu_row(c, y, 0),
                      to_second ? j->p[i].w->n_rows : y->ld, &s.p[i]);
        // A gate of two kinds of weights is cut in the larger tile's steps.
        int64_t rows = tile_rows(c, j, i), n = j->p[i].w->n_rows;
        if (j->glu) rows = MX_MAX(tile_rows(c, j, 0), tile_rows(c, j, 1));
        s.tiles[i] = (n + rows - 1) / rows;
        s.tile_bytes[i] = (int64_t)j->p[i].w->n_bytes / MX_MAX(s.tiles[i], 1) + 1;
    }
    return s;
}

static void run_one(const cpu_ctx *c, const stage *s, int i, int64_t tile0, int64_t tile1) {
    if (s->j->p[i].kind == PLAIN) {
        plain_tiles(c, &s->p[i], tile0, tile1);
    } else {
        c->k->mul(&s->p[i].m, tile0, tile1);
    }
}

// Tiles of one half of a gate whose two weights have different tiles.
static void run_half(const cpu_ctx *c, const stage *s, int i, int64_t row0, int64_t row1) {
    int64_t rows = tile_rows(c, s->j, i);
    run_one(c, s, i, row0 / rows, (row1 + rows - 1) / rows);
}

static void run_tiles(const cpu_ctx *c, const stage *s, int i, int64_t tile0, int64_t tile1) {
    const job *j = s->j;
    if (tile0 >= tile1) return;
    if (!j->glu) {
        run_one(c, s, i, tile0, tile1);
        return;
    }
    if (fused_glu(j)) {
        cpu_mul_glu m = {
            .gate = s->p[0].m, .w2 = s->p[1].w, .data2 = s->p[1].m.data, .act = j->act};
        c->k->mul_glu(&m, tile0, tile1);
        return;
    }
    int64_t rows = MX_MAX(tile_rows(c, j, 0), tile_rows(c, j, 1)), n = j->p[0].w->n_rows;
    int64_t row0 = tile0 * rows, row1 = MX_MIN(tile1 * rows, n);
    run_half(c, s, 0, row0, row1);
    run_half(c, s, 1, row0, row1);
    for (int64_t t = 0; t < j->x->n_rows; t++) {
        float *gate = s->p[0].m.y + t * s->p[0].m.ldy + row0;
        c->k->glu(gate, s->p[1].m.y + t * s->p[1].m.ldy + row0, j->act, row1 - row0, gate);
    }
}

// First tile of stream i that starts at or after byte `pos` of all streams in a row.
static int64_t tile_at(const stage *s, int i, int64_t pos) {
    int64_t before = 0;
    for (int k = 0; k < i; k++) before += s->tiles[k] * s->tile_bytes[k];
    int64_t t = (pos - before + s->tile_bytes[i] - 1) / s->tile_bytes[i];
    return pos <= before ? 0 : MX_MIN(t, s->tiles[i]);
}

static void run_divided(const cpu_ctx *c, const stage *s) {
    int64_t total = 0;
    for (int i = 0; i < s->n; i++) total += s->tiles[i] * s->tile_bytes[i];
    int64_t lo, hi;
    cpu_slice(c, total, &lo, &hi);
    for (int i = 0; i < s->n; i++) run_tiles(c, s, i, tile_at(s, i, lo), tile_at(s, i, hi));
}

static void run_claimed(const cpu_ctx *c, const stage *s) {
    int64_t total = 0;
    for (int i = 0; i < s->n; i++) total += s->tiles[i];
    int64_t run = MX_MAX(1, total / (c->n * 8));
    for (;;) {
        int64_t lo = cpu_claim(c) * run, hi = MX_MIN(lo + run, total);
        if (lo >= total) return;
        for (int i = 0; i < s->n; i++) {
            run_tiles(c, s, i, MX_MIN(MX_MAX(lo, 0), s->tiles[i]),
                      MX_MIN(MX_MAX(hi, 0), s->tiles[i]));
            lo -= s->tiles[i];
            hi -= s->tiles[i];
        }
    }
}

void cpu_op_product(cpu_ctx *c) {
    job j = job_of(c->k, c->op, c->run->plan->tensors);
    int64_t rows = j.x->n_rows, lo, hi;
    uint8_t *act[N_KINDS] = {0};
    bool own = rows <= OWN_ROWS || rows * c->n <= OWN_WORK || c->n == 1;
    uint8_t *shared = own && !second_bytes(&j) ? NULL : cpu_take_shared(c);
    place_acts(c->k, &j, own ? c->priv + own_row_bytes(&j) : shared + second_bytes(&j), act);
    if (own) {
        prepare(c, &j, 0, rows, act);
    } else {
        cpu_slice(c, rows, &lo, &hi);
        prepare(c, &j, lo, hi, act);
        cpu_barrier(c);
    }
    stage s = stage_of(c, &j, act, second_bytes(&j) ? (float *)(void *)shared : NULL);
    if (rows >= CLAIM_ROWS && c->n > 1) {
        run_claimed(c, &s);
    } else {
        run_divided(c, &s);
    }
}
