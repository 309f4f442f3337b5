// See op_rig.h. Owns the backend, the encoder and the tensors of the present case.
#include "support/op_rig.h"

#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

const int32_t rig_page_tokens[RIG_GROUPS] = {16, 64, RIG_MAX_CTX};

static const mx_budget no_budgets[MX_PHASES] = {
    {.max_ops = MX_BUDGET_UNLIMITED, .max_mb = MX_BUDGET_UNLIMITED},
    {.max_ops = MX_BUDGET_UNLIMITED, .max_mb = MX_BUDGET_UNLIMITED},
    {.max_ops = MX_BUDGET_UNLIMITED, .max_mb = MX_BUDGET_UNLIMITED}};

static void must(mx_status st, const rig *r, const mx_err *e) {
    CHECKF(st == MX_OK, "%s: %s", r->name, e->msg);
}

static void open_steps(rig *r, bool fuse, int32_t n_vocab) {
    mx_err e = {0};
    r->phase = MX_PHASE_DECODE;
    r->enc = mx_enc_open(r->b, no_budgets, 8, fuse);
    r->caps = (mx_step_caps){.max_tok = RIG_MAX_TOK,
                             .max_range = RIG_MAX_RANGE,
                             .max_out = 16,
                             .max_edits = RIG_MAX_EDITS,
                             .n_vocab = n_vocab,
                             .n_groups = RIG_GROUPS};
    for (int g = 0; g < RIG_GROUPS; g++) {
        r->caps.page_tokens[g] = rig_page_tokens[g];
        r->caps.max_pages[g] = RIG_MAX_CTX / rig_page_tokens[g];
    }
    must(r->b->ops->step_init(r->b, &r->caps, r->io, &e), r, &e);
}

void rig_open(rig *r, int isa, int n_threads, bool fuse, bool exact, int32_t n_vocab) {
    mx_err e = {0};
    *r = (rig){0};
    cpu_options o = {.n_threads = n_threads, .isa = isa, .exact = exact};
    must(cpu_open_with(&o, &r->b, &e), r, &e);
    mx_backend_facts f;
    r->b->ops->facts(r->b, &f);
    snprintf(r->name, sizeof r->name, "%s, %d threads, %s", f.arch, n_threads,
             fuse ? "fused" : "expanded");
    open_steps(r, fuse, n_vocab);
}

void rig_open_on(rig *r, mx_backend *b, bool fuse, int32_t n_vocab) {
    *r = (rig){.b = b};
    mx_backend_facts f;
    b->ops->facts(b, &f);
    snprintf(r->name, sizeof r->name, "%s, %s", f.arch, fuse ? "fused" : "expanded");
    open_steps(r, fuse, n_vocab);
}

void rig_reset(rig *r) {
    for (int i = 0; i < r->n_used; i++) {
        r->b->ops->free(r->b, r->used[i]->buf);
        mx_free(r->used[i]);
    }
    r->n_used = 0;
    // A plan refers to buffers; another one may come to lie at the same address.
    mx_enc_set_budgets(r->enc, no_budgets);
}

void rig_close(rig *r) {
    rig_reset(r);
    mx_enc_close(r->enc);
    r->b->ops->close(r->b);
}

static uint64_t rng_next(rng *g) { // splitmix64
    uint64_t z = g->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

float rng_normal(rng *g) {
    float s = 0;
    for (int i = 0; i < 4; i++) s += (float)(rng_next(g) >> 40) * 0x1p-24f - 0.5f;
    return s * 1.7320508f;
}

int rng_below(rng *g, int n) {
    return (int)(rng_next(g) % (uint64_t)n);
}

void rng_fill(rng *g, float *x, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i++) x[i] = rng_normal(g) * scale;
}

static mx_tensor *keep(rig *r, mx_tensor t) {
    CHECK(r->n_used < (int)MX_COUNT(r->used));
    mx_tensor *p = mx_alloc(sizeof *p);
    *p = t;
    r->used[r->n_used++] = p;
    return p;
}

mx_tensor *rig_tensor(rig *r, int64_t rows, int64_t cols, const float *data) {
    mx_err e = {0};
    mx_tensor t = {.n_rows = rows,
                   .n_cols = cols,
                   .ld = cols,
                   .n_bytes = (size_t)(rows * cols) * sizeof(float),
                   .kind = MX_T_STATE,
                   .fmt = mx_wfmt_of(MX_F32)};
    must(r->b->ops->alloc(r->b, &t.buf, t.n_bytes, MX_USE_STATE, &e), r, &e);
    if (data) must(r->b->ops->write(r->b, t.buf, 0, data, t.n_bytes, &e), r, &e);
    return keep(r, t);
}

mx_tensor *rig_weight(rig *r, const mx_wview *w) {
    mx_err e = {0};
    mx_tensor t;
    must(r->b->ops->upload(r->b, &t, w, &e), r, &e);
    return keep(r, t);
}

mx_tensor *rig_state(rig *r, int g, int32_t n_seqs, int32_t n_kv, int32_t head_dim, mx_dtype type) {
    mx_err e = {0};
    int64_t pages = (int64_t)n_seqs * RIG_MAX_CTX / rig_page_tokens[g];
    mx_tensor t = {.n_rows = pages * n_kv * rig_page_tokens[g],
                   .n_cols = head_dim,
                   .ld = head_dim,
                   .kind = MX_T_STATE,
                   .fmt = mx_wfmt_of(type)};
    t.n_bytes = (size_t)(t.n_rows * t.n_cols) * (type == MX_F32 ? 4 : 2);
    must(r->b->ops->alloc(r->b, &t.buf, t.n_bytes, MX_USE_STATE, &e), r, &e);
    return keep(r, t);
}

void rig_read(rig *r, const mx_tensor *t, float *out) {
    mx_err e = {0};
    must(r->b->ops->read(r->b, t->buf, t->offset, out, t->n_bytes, &e), r, &e);
}

static void fill_range(rig *r, mx_step_io *io, int32_t i, int32_t seq, int32_t first, int32_t pos0,
                       int32_t n, int32_t n_seqs) {
    r->ranges[i] = (mx_step_range){
        .seq = seq, .first = first, .n_tok = n, .pos0 = pos0, .phase = r->facts.phase};
    io->range_first[i] = first;
    io->range_first[i + 1] = first + n;
    io->range_pos0[i] = pos0;
    io->range_len[i] = pos0 + n;
    for (int g = 0; g < RIG_GROUPS; g++) {
        int32_t pt = rig_page_tokens[g], max = r->caps.max_pages[g];
        for (int32_t p = 0; p < max; p++) { // pages of sequences lie between each other, backwards
            bool there = p * pt < pos0 + n;
            io->page_table[g][i * max + p] = there ? (max - 1 - p) * n_seqs + seq : -1;
        }
    }
    for (int32_t t = 0; t < n; t++) {
        int32_t row = first + t, pos = pos0 + t;
        io->ids[row] = 0;
        io->pos[row] = pos;
        io->tok_range[row] = i;
        for (int g = 0; g < RIG_GROUPS; g++) {
            int32_t pt = rig_page_tokens[g];
            int32_t page = io->page_table[g][i * r->caps.max_pages[g] + pos / pt];
            io->kv_slot[g][row] = page * pt + pos % pt;
        }
    }
}

void rig_begin(rig *r, int32_t n_ranges, const int32_t *seq, const int32_t *pos0, const int32_t *n,
               int32_t n_out, int32_t n_seqs) {
    mx_step_io *io = &r->io[r->slot];
    int32_t rows = 0;
    r->facts = (mx_step_facts){.phase = r->phase};
    for (int32_t i = 0; i < n_ranges; i++) {
        fill_range(r, io, i, seq[i], rows, pos0[i], n[i], n_seqs);
        rows += n[i];
    }
    for (int32_t i = 0; i < n_out; i++) {
        io->out_tok[i] = rows - 1 - i % rows;
        io->sample[i] = (mx_sample_row){0};
    }
    io->counts[0] = rows;
    io->counts[1] = n_ranges;
    io->counts[2] = n_out;
    io->counts[3] = 0;
    r->facts.n_tok = r->facts.n_rows = rows;
    r->facts.n_out = n_out;
    r->facts.n_ranges = n_ranges;
    r->facts.ranges = r->ranges;
    mx_enc_begin(r->enc, &r->facts);
}

mx_tid rig_use(rig *r, const mx_tensor *t) {
    return mx_enc_use(r->enc, t);
}

void rig_op(rig *r, mx_op_kind kind, mx_op_params p, int n_in, const mx_tensor *const *in,
            int n_out, const mx_tensor *const *out) {
    mx_op op = {.kind = (uint8_t)kind, .n_in = (uint8_t)n_in, .n_out = (uint8_t)n_out, .p = p};
    for (int i = 0; i < n_in; i++) op.in[i] = rig_use(r, in[i]);
    for (int i = 0; i < n_out; i++) op.out[i] = rig_use(r, out[i]);
    mx_enc_op(r->enc, op);
}

void rig_run(rig *r) {
    mx_err e = {0};
    mx_plan *plan;
    mx_ticket t;
    bool done = false;
    must(mx_enc_end(r->enc, &plan, &e), r, &e);
    must(mx_enc_submit(r->enc, plan, r->slot, &t, &e), r, &e);
    must(r->b->ops->wait(r->b, t, true, true, &done, NULL, &e), r, &e);
    CHECK(done);
    r->slot = (r->slot + 1) % MX_STEP_SLOTS;
}

rig_matrix rig_random_matrix(rng *g, mx_wfmt f, int64_t rows, int64_t cols) {
    size_t row, code;
    CHECK(mx_wfmt_row_bytes(f, cols, &row) && mx_wfmt_code_bytes(f, cols, &code));
    size_t plane = (row - code) / 2, n = (size_t)rows;
    uint8_t *p = mx_calloc(n, row);
    rig_matrix m = {.owner = p};
    m.view = (mx_wview){.fmt = f,
                        .n_rows = rows,
                        .n_cols = cols,
                        .data = p,
                        .scales = p + code * n,
                        .biases = p + (code + plane) * n};
    float *x = mx_alloc((size_t)cols * sizeof *x);
    for (size_t r = 0; r < n; r++) {
        rng_fill(g, x, cols, 1.0f / sqrtf((float)cols));
        if (f.dtype == MX_AFFINE) {
            mx_quant_row_affine(f, x, cols, p + code * r, p + code * n + plane * r,
                                p + (code + plane) * n + plane * r);
        } else {
            mx_quant_row(f.dtype, x, cols, p + row * r);
        }
    }
    mx_free(x);
    return m;
}
