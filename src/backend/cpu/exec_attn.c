// Attention and the writes into the sequence state: how their work is divided. No state; the
// arithmetic and the layout of a page are in k_attn.c.
//
// A unit of work is (range, tile of query rows, kv head, part of its query heads). A unit walks its
// chunks of 256 positions in ascending order and merges as it goes; units are claimed, the longest
// first. When there are few rows and too few units for the workers, whole chunks are divided
// instead: partial results go to shared scratch and are merged, in the same order, after a barrier.
#include "backend/cpu/exec_int.h"

#include "base/mem.h"

#include <math.h>
#include <string.h>

enum { SPLIT_ROWS = 4 }; // at most so many rows for divided chunks

typedef struct attn {
    const mx_tensor *q, *out;
    const uint8_t *k, *v;
    const mx_step_io *io;
    int32_t n_ranges, n_head, n_kv, head_dim, group, window;
    int32_t page_tokens, max_pages, elem;
    int32_t heads;  // query heads of one unit
    int32_t splits; // parts that a kv head's query heads are cut into
    int64_t ldo;    // head_dim padded to 16
    float scale, softcap;
} attn;

typedef struct unit {
    int32_t range, row0, n_row; // rows of the step
    int32_t kv, head0, n_head;  // query heads [head0, head0 + n_head)
    int32_t chunk0, chunk1;     // chunks that some row sees
} unit;

static int32_t tile_rows(const attn *a, int32_t n_tok) {
    int32_t r = CPU_ATTN_ROWS / a->heads;
    return MX_MIN(MX_MAX(r, 1), n_tok);
}

static int32_t first_visible(const attn *a, int32_t pos) {
    return a->window > 0 ? MX_MAX(0, pos - a->window + 1) : 0;
}

static int64_t range_units(const attn *a, int32_t range) {
    int32_t n = a->io->range_first[range + 1] - a->io->range_first[range];
    if (n <= 0) return 0;
    int32_t rows = tile_rows(a, n);
    return (int64_t)((n + rows - 1) / rows) * a->n_kv * a->splits;
}

static int64_t all_units(const attn *a) {
    int64_t n = 0;
    for (int32_t r = 0; r < a->n_ranges; r++) n += range_units(a, r);
    return n;
}

// Unit number i; within a range the last rows (which see most) come first.
static unit unit_at(const attn *a, int64_t i) {
    unit u = {0};
    while (i >= range_units(a, u.range)) i -= range_units(a, u.range++);
    int32_t first = a->io->range_first[u.range], n = a->io->range_first[u.range + 1] - first;
    int32_t rows = tile_rows(a, n), tiles = (n + rows - 1) / rows;
    int64_t per_tile = (int64_t)a->n_kv * a->splits;
    int32_t tile = tiles - 1 - (int32_t)(i / per_tile), part = (int32_t)(i % per_tile);
    int32_t g = a->n_head / a->n_kv, sub = part % a->splits;
    u.row0 = first + tile * rows;
    u.n_row = MX_MIN(rows, first + n - u.row0);
    u.kv = part / a->splits;
    u.head0 = u.kv * g + sub * a->heads;
    u.n_head = MX_MIN(a->heads, g - sub * a->heads);
    const int32_t *pos = a->io->pos;
    u.chunk0 = first_visible(a, pos[u.row0]) / CPU_CHUNK;
    u.chunk1 = pos[u.row0 + u.n_row - 1] / CPU_CHUNK + 1;
    return u;
}

static attn attn_of(const cpu_ctx *c) {
    const mx_op *op = c->op;
    const mx_tensor *k = cpu_tensor(c, op->in[1]), *v = cpu_tensor(c, op->in[2]);
    const mx_step_caps *caps = &c->run->b->caps;
    int32_t g = op->p.attn.n_head / op->p.attn.n_kv_head;
    attn a = {.q = cpu_tensor(c, op->in[0]),
              .out = cpu_tensor(c, op->out[0]),
              .k = cpu_ptr(c, k),
              .v = cpu_ptr(c, v),
              .io = c->run->io,
              .n_ranges = c->run->io->counts[1],
              .n_head = op->p.attn.n_head,
              .n_kv = op->p.attn.n_kv_head,
              .head_dim = op->p.attn.head_dim,
              .group = op->p.attn.group,
              .window = op->p.attn.window,
              .page_tokens = caps->page_tokens[op->p.attn.group],
              .max_pages = caps->max_pages[op->p.attn.group],
              .elem = k->fmt.dtype == MX_F32 ? 4 : 2,
              .ldo = cpu_pad16(op->p.attn.head_dim),
              .scale = op->p.attn.scale,
              .softcap = op->p.attn.softcap};
    a.splits = (g + CPU_ATTN_ROWS - 1) / CPU_ATTN_ROWS;
    a.heads = (g + a.splits - 1) / a.splits;
    return a;
}

// First byte in k or v of block b of a chunk.
static int64_t block_offset(const attn *a, const unit *u, int32_t chunk, int32_t b) {
    int32_t pos = chunk * CPU_CHUNK + b * CPU_KV_BLOCK;
    int32_t page =
        a->io->page_table[a->group][(int64_t)u->range * a->max_pages + pos / a->page_tokens];
    CHECKF(page >= 0, "position %d of range %d has no page", pos, u->range);
    int64_t token = ((int64_t)page * a->n_kv + u->kv) * a->page_tokens + pos % a->page_tokens;
    return token * a->head_dim * a->elem;
}

// Addresses of the chunk's blocks that rows of the unit see; those of `next` (or NULL) at
// next_chunk are fetched ahead.
static void bind_blocks(const attn *a, const unit *u, int32_t chunk, int32_t lo, int32_t hi,
                        const unit *next, int32_t next_chunk, cpu_attn_chunk *c) {
    int32_t from = 0, to = 0; // blocks of next_chunk that its last row sees
    if (next) {
        int32_t pos = a->io->pos[next->row0 + next->n_row - 1];
        int32_t first = first_visible(a, pos) - next_chunk * CPU_CHUNK;
        from = MX_MAX(first, 0) / CPU_KV_BLOCK;
        to = (pos - next_chunk * CPU_CHUNK) / CPU_KV_BLOCK + 1;
    }
    for (int32_t b = lo / CPU_KV_BLOCK; b * CPU_KV_BLOCK < hi; b++) {
        int64_t at = block_offset(a, u, chunk, b);
        c->k[b] = a->k + at;
        c->v[b] = a->v + at;
        bool ahead = b >= from && b < to;
        c->ahead[b] = ahead ? a->k + block_offset(a, next, next_chunk, b) : c->k[b];
    }
}

// One worker's buffers: scores, the chunk's result, the merged result.
typedef struct bench {
    float *p;
    float *m[2], *s[2], *o[2];
    int32_t lo[CPU_ATTN_ROWS], hi[CPU_ATTN_ROWS];
} bench;

static size_t bench_bytes(int64_t ldo) {
    return sizeof(float) * (size_t)(CPU_ATTN_ROWS * CPU_CHUNK + 2 * CPU_ATTN_ROWS * (2 + ldo));
}

static void bench_init(bench *w, uint8_t *priv, int64_t ldo) {
    float *f = (float *)(void *)priv;
    w->p = f;
    f += CPU_ATTN_ROWS * CPU_CHUNK;
    for (int i = 0; i < 2; i++) {
        w->o[i] = f;
        f += CPU_ATTN_ROWS * ldo;
        w->m[i] = f;
        w->s[i] = f + CPU_ATTN_ROWS;
        f += 2 * CPU_ATTN_ROWS;
    }
}

static void one_chunk(const cpu_ctx *ctx, const attn *a, const unit *u, int32_t chunk,
                      const unit *next, int32_t next_chunk, bench *w, float *m, float *s,
                      float *o) {
    int32_t start = chunk * CPU_CHUNK, lo = CPU_CHUNK, hi = 0;
    for (int32_t r = 0; r < u->n_row; r++) {
        int32_t pos = a->io->pos[u->row0 + r];
        w->lo[r] = MX_MAX(first_visible(a, pos) - start, 0);
        w->hi[r] = MX_MIN(pos + 1 - start, CPU_CHUNK);
        if (w->lo[r] >= w->hi[r]) continue;
        lo = MX_MIN(lo, w->lo[r]);
        hi = MX_MAX(hi, w->hi[r]);
    }
    cpu_attn_chunk c = {.q = cpu_row(ctx, a->q, u->row0) + (int64_t)u->head0 * a->head_dim,
                        .ldq = a->q->ld,
                        .n_row = u->n_row,
                        .n_group = u->n_head,
                        .head_dim = a->head_dim,
                        .scale = a->scale,
                        .softcap = a->softcap,
                        .half = a->elem == 2,
                        .lo = w->lo,
                        .hi = w->hi,
                        .p = w->p,
                        .m = m,
                        .s = s,
                        .o = o};
    bind_blocks(a, u, chunk, lo, hi, next, next_chunk, &c);
    ctx->k->attn_chunk(&c);
}

static void finish(const cpu_ctx *ctx, const attn *a, const unit *u, const float *s,
                   const float *o) {
    for (int32_t i = 0; i < u->n_row * u->n_head; i++) {
        float *out = cpu_row(ctx, a->out, u->row0 + i / u->n_head) +
                     (int64_t)(u->head0 + i % u->n_head) * a->head_dim;
        ctx->k->attn_finish(o + i * a->ldo, s[i], a->head_dim, out);
    }
}

// next: what this worker probably does after it, or NULL.
static void run_unit(const cpu_ctx *ctx, const attn *a, const unit *u, const unit *next, bench *w) {
    for (int32_t ch = u->chunk0; ch < u->chunk1; ch++) {
        bool last = ch + 1 == u->chunk1;
        int to = ch == u->chunk0;
        one_chunk(ctx, a, u, ch, last ? next : u, last ? (next ? next->chunk0 : 0) : ch + 1, w,
                  w->m[to], w->s[to], w->o[to]);
        if (to) continue;
        ctx->k->attn_merge(w->m[1], w->s[1], w->o[1], w->m[0], w->s[0], w->o[0],
                           u->n_row * u->n_head, a->ldo);
    }
    finish(ctx, a, u, w->s[1], w->o[1]);
}

// ---- Divided chunks --------------------------------------------------------------------------

// Partial results of (unit, chunk): m, s, o of at most `per` queries.
typedef struct parts {
    float *base;
    int64_t per, cap, stride; // queries of a unit, chunks of a unit, floats of a part
} parts;

static float *part_at(const parts *p, int64_t unit_no, int64_t chunk) {
    return p->base + (unit_no * p->cap + chunk) * p->stride;
}

static int64_t part_floats(int64_t per, int64_t ldo) {
    return cpu_pad16(per * 2) + per * ldo;
}

static int64_t chunk_cap(int32_t ctx_bucket) {
    return ctx_bucket / CPU_CHUNK + 2;
}

static int64_t most_chunks(const attn *a) {
    int64_t n = 0;
    for (int32_t r = 0; r < a->n_ranges; r++) {
        int32_t last = a->io->range_len[r] - 1;
        int32_t first = first_visible(a, a->io->range_pos0[r]);
        n = MX_MAX(n, last / CPU_CHUNK - first / CPU_CHUNK + 1);
    }
    return n;
}

static void run_divided(cpu_ctx *ctx, const attn *a, int64_t units, int64_t chunks, bench *w,
                        float *shared) {
    parts p = {.base = shared, .per = a->heads, .cap = chunks};
    p.stride = part_floats(p.per, a->ldo);
    int64_t total = units * chunks, lo, hi;
    for (int64_t i; (i = cpu_claim(ctx)) < total;) {
        unit u = unit_at(a, i / chunks);
        int64_t ch = i % chunks;
        if (u.chunk0 + ch >= u.chunk1) continue;
        float *f = part_at(&p, i / chunks, ch);
        one_chunk(ctx, a, &u, u.chunk0 + (int32_t)ch, NULL, 0, w, f, f + p.per,
                  f + cpu_pad16(p.per * 2));
    }
    cpu_barrier(ctx);
    cpu_slice(ctx, units, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        unit u = unit_at(a, i);
        float *f = part_at(&p, i, 0), *o = f + cpu_pad16(p.per * 2);
        for (int64_t ch = 1; u.chunk0 + ch < u.chunk1; ch++) {
            float *g = part_at(&p, i, ch);
            ctx->k->attn_merge(f, f + p.per, o, g, g + p.per, g + cpu_pad16(p.per * 2), u.n_head,
                               a->ldo);
        }
        finish(ctx, a, &u, f + p.per, o);
    }
}

cpu_scratch cpu_attn_scratch(const cpu_backend *b, const mx_op *op, const mx_tensor *t) {
    (void)b;
    int64_t ldo = cpu_pad16(op->p.attn.head_dim), rows = MX_MIN(t[op->in[0]].n_rows, SPLIT_ROWS);
    int64_t g = op->p.attn.n_head / op->p.attn.n_kv_head;
    int64_t units = rows * op->p.attn.n_kv_head * g; // at most one unit a query head
    int64_t floats = units * chunk_cap(op->p.attn.ctx_bucket) * part_floats(1, ldo) +
                     rows * op->p.attn.n_kv_head * chunk_cap(op->p.attn.ctx_bucket) * 2 * g;
    return (cpu_scratch){bench_bytes(ldo), (size_t)floats * sizeof(float)};
}

// With fewer units than workers, a kv head's query heads are cut in two or more.
static void cut_heads(attn *a, int64_t pieces, int n_workers) {
    int32_t g = a->n_head / a->n_kv;
    while (pieces * a->splits < n_workers && a->splits < g) {
        a->splits++;
        a->heads = (g + a->splits - 1) / a->splits;
    }
    a->splits = (g + a->heads - 1) / a->heads;
}

void cpu_op_attn(cpu_ctx *ctx) {
    attn a = attn_of(ctx);
    bench w;
    bench_init(&w, ctx->priv, a.ldo);
    int32_t rows = a.io->counts[0];
    int64_t units = all_units(&a), chunks = most_chunks(&a);
    bool single = rows == a.n_ranges && rows <= SPLIT_ROWS;
    // Chunks of the busiest worker either way; a barrier costs about half a chunk.
    int64_t whole = (units + ctx->n - 1) / ctx->n * chunks;
    int64_t cut = (units * chunks + ctx->n - 1) / ctx->n;
    if (single && chunks > 1 && cut < whole && chunks <= chunk_cap(ctx->op->p.attn.ctx_bucket)) {
        run_divided(ctx, &a, units, chunks, &w, (float *)(void *)cpu_take_shared(ctx));
        return;
    }
    if (units < ctx->n) {
        cut_heads(&a, units, ctx->n);
        units = all_units(&a);
    }
    unit u, next;
    int64_t guess = -1;
    for (int64_t i; (i = cpu_claim(ctx)) < units;) {
        u = i == guess ? next : unit_at(&a, i);
        guess = i + ctx->n;
        if (guess < units) next = unit_at(&a, guess);
        run_unit(ctx, &a, &u, guess < units ? &next : NULL, &w);
    }
}

// ---- Writes into the state -------------------------------------------------------------------

typedef struct place {
    uint8_t *k, *v; // page of one kv head
    int64_t slot;   // token in the page
    bool half;
} place;

// Where row `row` of kv head h goes; false when it is not to be written.
static bool place_of(const cpu_ctx *c, mx_tid k_state, mx_tid v_state, int32_t group, int32_t n_kv,
                     int32_t head_dim, int64_t row, int32_t h, place *out) {
    const mx_tensor *k = cpu_tensor(c, k_state), *v = cpu_tensor(c, v_state);
    int32_t at = row < c->run->io->counts[0] ? c->run->io->kv_slot[group][row] : -1;
    if (at < 0) return false;
    int32_t pt = c->run->b->caps.page_tokens[group];
    int64_t first = ((int64_t)(at / pt) * n_kv + h) * pt * head_dim;
    out->half = k->fmt.dtype != MX_F32;
    int64_t bytes = first * (out->half ? 2 : 4);
    CHECKF(first + (int64_t)pt * head_dim <= k->n_rows * k->n_cols, "kv slot %d", at);
    out->k = (uint8_t *)cpu_ptr(c, k) + bytes;
    out->v = (uint8_t *)cpu_ptr(c, v) + bytes;
    out->slot = at % pt;
    return true;
}

void cpu_op_kv_write(cpu_ctx *c) {
    const mx_op *op = c->op;
    const mx_tensor *k = cpu_tensor(c, op->in[0]), *v = cpu_tensor(c, op->in[1]);
    int32_t n_kv = op->p.kv.n_kv_head, hd = op->p.kv.head_dim;
    int64_t lo, hi;
    cpu_slice(c, k->n_rows * n_kv, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        int64_t r = i / n_kv;
        int32_t h = (int32_t)(i % n_kv);
        place p;
        if (!place_of(c, op->in[2], op->in[3], op->p.kv.group, n_kv, hd, r, h, &p)) continue;
        c->k->kv_store(cpu_row(c, k, r) + h * hd, cpu_row(c, v, r) + h * hd, hd, p.half, p.slot,
                       p.k, p.v);
    }
}

// One head: optional norm, then rotation, into y.
static void norm_rope(const cpu_ctx *c, const float *x, const float *w, const float *cs, float *y) {
    const mx_op *op = c->op;
    if (w) {
        c->k->rms_norm(x, w, op->p.rope.eps, op->p.rope.head_dim, y);
        x = y;
    }
    c->k->rope(x, cs, op->p.rope.head_dim, op->p.rope.n_rot, op->p.rope.interleaved, y);
}

void cpu_op_rope_kv(cpu_ctx *c) {
    const mx_op *op = c->op;
    const mx_tensor *t[6];
    for (int i = 0; i < 6; i++) t[i] = cpu_tensor(c, op->in[i]);
    const mx_tensor *out = cpu_tensor(c, op->out[0]);
    const float *qn = t[4] ? cpu_ptr(c, t[4]) : NULL, *kn = t[5] ? cpu_ptr(c, t[5]) : NULL;
    int32_t n_head = op->p.rope.n_head, n_kv = op->p.rope.n_kv_head, hd = op->p.rope.head_dim;
    float tmp[CPU_MAX_HEAD_DIM];
    int64_t all = n_head + n_kv, lo, hi;
    cpu_slice(c, t[0]->n_rows * all, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        int64_t r = i / all;
        int32_t h = (int32_t)(i % all);
        const float *cs = cpu_row(c, t[3], r);
        if (h < n_head) {
            norm_rope(c, cpu_row(c, t[0], r) + h * hd, qn, cs, cpu_row(c, out, r) + h * hd);
            continue;
        }
        h -= n_head;
        place p;
        if (!place_of(c, op->in[6], op->in[7], op->p.rope.group, n_kv, hd, r, h, &p)) continue;
        norm_rope(c, cpu_row(c, t[1], r) + h * hd, kn, cs, tmp);
        c->k->kv_store(tmp, cpu_row(c, t[2], r) + h * hd, hd, p.half, p.slot, p.k, p.v);
    }
}
