// Matrix products of packed weights: which tiles run together, and what happens to their results.
// Built once per instruction set; no state.
//
// A thread's tiles are cut into `streams` runs that are walked side by side: that many memory
// streams are open at once, which reads faster than one. Rows of activations are taken in blocks,
// all blocks of a few tiles before the next tiles, so that weights come from memory once.
#include "backend/cpu/k_matmul.h"
#include "backend/cpu/vec.h"

enum { TOK_SWEEP = 128 }; // rows that pass over one tile: their activations stay in the L2 cache

typedef struct side { // one weight of a product
    cpu_packing p;
    const uint8_t *data;
    size_t tile_bytes;
} side;

static side side_of(const mx_tensor *w, const uint8_t *data) {
    side s = {.data = data};
    CHECK(w->layout == MX_LAYOUT_PACKED && cpu_packing_of(w->fmt, &s.p));
    s.tile_bytes = cpu_tile_bytes(&s.p, w->n_cols);
    return s;
}

typedef struct product { // what the tiles of one call share
    const cpu_mul *m;
    cpu_act_kind kind;
    mm_core core;
    size_t act_block; // bytes of CPU_ACT_BLOCK rows; floats: of a row
} product;

static product product_of(const cpu_mul *m, const side *s) {
    product p = {.m = m, .kind = cpu_act_kind_of(m->w)};
    int64_t n_cols = m->w->n_cols;
    if (p.kind == CPU_ACT_F32) {
        p.act_block = (size_t)cpu_act_row(n_cols) * sizeof(float);
        if (s->p.family == CPU_FAM_FLOAT)
            p.core = CPU_BASE(core_float)(&s->p, m->n_tok);
        else
            p.core = (mm_core){NULL, 1, MM_EXACT_TOK};
    } else {
        p.act_block = cpu_act_block(p.kind, n_cols);
        p.core = CPU_FN(core_int)(&s->p, m->n_tok);
    }
    return p;
}

// Rows [tok, tok + rows) by n tiles; out (core.streams, core.rows, 16). rows <= core.rows.
static void run_core(const product *p, const side *s, const uint8_t *const tile[], int64_t tok,
                     int rows, float *out) {
    const cpu_mul *m = p->m;
    int64_t n_cols = m->w->n_cols;
    if (!p->core.fn) {
        const float *x = (const float *)m->act + tok * cpu_act_row(n_cols);
        CPU_BASE(exact_tile)(&s->p, tile[0], n_cols, x, cpu_act_row(n_cols), rows, out);
        return;
    }
    mm_job j = {.p = s->p, .out = out, .n_groups = cpu_packing_groups(&s->p, n_cols)};
    for (int i = 0; i < p->core.streams; i++) j.tile[i] = tile[i];
    if (p->kind == CPU_ACT_F32) {
        j.act = (const uint8_t *)m->act + (size_t)tok * p->act_block;
        j.act_step = p->act_block;
    } else {
        const uint8_t *block =
            (const uint8_t *)m->act + (size_t)(tok / CPU_ACT_BLOCK) * p->act_block;
        int first = (int)(tok % CPU_ACT_BLOCK), columns = cpu_act_group(p->kind);
        j.act = block + first * columns;
        j.numbers = block + CPU_ACT_BLOCK * columns + 4 * first;
        j.act_step = cpu_act_record(p->kind);
    }
    p->core.fn(&j);
}

// One tile's results of one row: + bias, + residual, store.
static void finish(const cpu_mul *m, int64_t tile, int64_t tok, const float *acc) {
    int64_t row = tile * CPU_TILE_ROWS, left = m->w->n_rows - row;
    int64_t n = left < CPU_TILE_ROWS ? left : CPU_TILE_ROWS;
    float *y = m->y + tok * m->ldy + row;
    vf v = vld(acc);
    if (n == CPU_TILE_ROWS) {
        if (m->bias) v = vadd(v, vld(m->bias + row));
        if (m->residual) v = vadd(v, vld(m->residual + tok * m->ld_res + row));
        vst(y, v);
        return;
    }
    if (m->bias) v = vadd(v, vld_n(m->bias + row, n));
    if (m->residual) v = vadd(v, vld_n(m->residual + tok * m->ld_res + row, n));
    vst_n(y, v, n);
}

typedef struct runs { // n tiles from first on, cut into runs of `each` (the last ones shorter)
    int64_t first, n, each;
} runs;

static runs cut_runs(int64_t tile0, int64_t tile1, int count) {
    int64_t n = tile1 - tile0;
    return (runs){tile0, n, (n + count - 1) / count};
}

// The i-th tile of run r; -1 when that run has ended.
static int64_t run_tile(const runs *u, int r, int64_t i) {
    int64_t at = r * u->each + i;
    return at < u->n ? u->first + at : -1;
}

static const uint8_t *tile_at(const side *s, int64_t tile, int64_t otherwise) {
    return s->data + (size_t)(tile < 0 ? otherwise : tile) * s->tile_bytes;
}

static void mul_tiles(const product *p, const side *s, const int64_t *tile, int64_t tok0,
                      int64_t tok1) {
    _Alignas(64) float out[MM_EXACT_TOK * 16];
    const uint8_t *at[MM_MAX_STREAMS];
    int rows = p->core.rows;
    for (int i = 0; i < p->core.streams; i++) at[i] = tile_at(s, tile[i], tile[0]);
    for (int64_t tok = tok0; tok < tok1; tok += rows) {
        int n = (int)(tok1 - tok < rows ? tok1 - tok : rows);
        run_core(p, s, at, tok, n, out);
        for (int i = 0; i < p->core.streams; i++) {
            if (tile[i] < 0) continue;
            for (int t = 0; t < n; t++) finish(p->m, tile[i], tok + t, out + 16 * (i * rows + t));
        }
    }
}

void CPU_FN(mul)(const cpu_mul *m, int64_t tile0, int64_t tile1) {
    side s = side_of(m->w, m->data);
    product p = product_of(m, &s);
    runs u = cut_runs(tile0, tile1, p.core.streams);
    for (int64_t tok = 0; tok < m->n_tok; tok += TOK_SWEEP) {
        int64_t end = tok + TOK_SWEEP < m->n_tok ? tok + TOK_SWEEP : m->n_tok;
        for (int64_t i = 0; i < u.each; i++) {
            int64_t tile[MM_MAX_STREAMS];
            for (int r = 0; r < p.core.streams; r++) tile[r] = run_tile(&u, r, i);
            mul_tiles(&p, &s, tile, tok, end);
        }
    }
}

typedef struct pair { // gate and up
    side gate, up;
    product p, q; // of gate, of up
    bool joint;   // one core call does both: half of its streams each
    int32_t act;
} pair;

// Rows [tok, tok + n) by one tile with whatever core; out (n, 16).
static void run_rows(const product *p, const side *s, const uint8_t *tile, int64_t tok, int n,
                     float *out) {
    _Alignas(64) float block[MM_EXACT_TOK * 16];
    const uint8_t *at[MM_MAX_STREAMS] = {tile, tile, tile, tile};
    for (int t = 0; t < n; t += p->core.rows) {
        int rows = n - t < p->core.rows ? n - t : p->core.rows;
        run_core(p, s, at, tok + t, rows, block);
        memcpy(out + 16 * t, block, (size_t)rows * 16 * sizeof *out);
    }
}

// n pairs of tiles; the streams of a joint call are the gates, then the ups.
static void glu_joint(const pair *q, const int64_t *tile, int n, int64_t tok0, int64_t tok1) {
    _Alignas(64) float out[MM_EXACT_TOK * 16];
    const uint8_t *at[MM_MAX_STREAMS];
    int rows = q->p.core.rows;
    for (int i = 0; i < n; i++) {
        at[i] = tile_at(&q->gate, tile[i], tile[0]);
        at[n + i] = tile_at(&q->up, tile[i], tile[0]);
    }
    for (int64_t tok = tok0; tok < tok1; tok += rows) {
        int m = (int)(tok1 - tok < rows ? tok1 - tok : rows);
        run_core(&q->p, &q->gate, at, tok, m, out);
        for (int i = 0; i < n; i++) {
            if (tile[i] < 0) continue;
            float *g = out + 16 * i * rows;
            CPU_BASE(glu)(g, g + 16 * n * rows, q->act, 16 * m, g);
            for (int t = 0; t < m; t++) finish(q->p.m, tile[i], tok + t, g + 16 * t);
        }
    }
}

static void glu_apart(const pair *q, int64_t tile, int64_t tok0, int64_t tok1) {
    _Alignas(64) float g[MM_EXACT_TOK * 16], u[MM_EXACT_TOK * 16];
    for (int64_t tok = tok0; tok < tok1; tok += MM_EXACT_TOK) {
        int m = (int)(tok1 - tok < MM_EXACT_TOK ? tok1 - tok : MM_EXACT_TOK);
        run_rows(&q->p, &q->gate, tile_at(&q->gate, tile, tile), tok, m, g);
        run_rows(&q->q, &q->up, tile_at(&q->up, tile, tile), tok, m, u);
        CPU_BASE(glu)(g, u, q->act, 16 * m, g);
        for (int t = 0; t < m; t++) finish(q->p.m, tile, tok + t, g + 16 * t);
    }
}

void CPU_FN(mul_glu)(const cpu_mul_glu *m, int64_t tile0, int64_t tile1) {
    pair q = {.gate = side_of(m->gate.w, m->gate.data), .up = side_of(m->w2, m->data2)};
    CHECK(!m->gate.bias && !m->gate.residual && m->w2->n_cols == m->gate.w->n_cols);
    CHECK(cpu_act_kind_of(m->w2) == cpu_act_kind_of(m->gate.w));
    q.act = m->act;
    q.p = product_of(&m->gate, &q.gate);
    q.q = product_of(&m->gate, &q.up);
    q.joint = q.p.core.streams >= 2 && mx_wfmt_eq(m->gate.w->fmt, m->w2->fmt);
    int n = q.joint ? q.p.core.streams / 2 : 1;
    runs u = cut_runs(tile0, tile1, n);
    for (int64_t tok = 0; tok < m->gate.n_tok; tok += TOK_SWEEP) {
        int64_t end = tok + TOK_SWEEP < m->gate.n_tok ? tok + TOK_SWEEP : m->gate.n_tok;
        for (int64_t i = 0; i < u.each; i++) {
            int64_t tile[MM_MAX_STREAMS];
            for (int r = 0; r < n; r++) tile[r] = run_tile(&u, r, i);
            if (q.joint)
                glu_joint(&q, tile, n, tok, end);
            else
                glu_apart(&q, tile[0], tok, end);
        }
    }
}

// ---- The rest of the table: the same bytes in every instruction set -----------------------------

size_t CPU_FN(pack_bytes)(mx_wfmt f, int64_t n_rows, int64_t n_cols, bool exact, uint16_t *pack) {
    return cpu_pack_bytes(f, n_rows, n_cols, exact, pack);
}

void CPU_FN(pack)(const mx_wview *w, uint16_t pack, int64_t tile0, int64_t tile1, uint8_t *dst) {
    (void)pack; // an exact weight has the same bytes
    cpu_pack_tiles(w, tile0, tile1, dst);
}

cpu_act_kind CPU_FN(act_kind)(const mx_tensor *w) {
    return cpu_act_kind_of(w);
}

size_t CPU_FN(act_bytes)(cpu_act_kind kind, int64_t n_cols, int64_t n_tok) {
    return cpu_act_bytes(kind, n_cols, n_tok);
}

void CPU_FN(unpack_row)(const mx_tensor *w, const uint8_t *data, int64_t row, float *out) {
    cpu_unpack_row_any(w, data, row, out);
}
