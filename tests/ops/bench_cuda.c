// Speed of the CUDA backend's ops and of whole decode steps in the geometry of real models, with
// random weights. Shares are of the read rate measured in the same run.
//
//   bench_cuda [gemv attn gemm step chain load ...] [model=NAME] [folder=PATH] [gb=N]
//   no name of a part: all
#include "backend/cuda/cuda_int.h"
#include "backend/encoder.h"
#include "base/os.h"
#include "base/str.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

static mx_backend *be;
static cuda_backend *cb;
static mx_enc *enc;
static mx_step_io io[MX_STEP_SLOTS];
static mx_step_caps caps;
static double read_gbs;
static uint8_t *noise;     // random bytes
static int most_rows = 64; // 1 leaves out prefill too
static const char *only;   // model=NAME: of the whole steps, that one
enum { NOISE = 64 << 20 };

static void must(mx_status s, const mx_err *e) {
    if (s == MX_OK) return;
    printf("FAILED: %s\n", e->msg);
    exit(1);
}

static uint64_t state = 88172645463325252ull;
static uint64_t next_random(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static const mx_budget no_budget = {.max_ops = MX_BUDGET_UNLIMITED, .max_mb = MX_BUDGET_UNLIMITED};

static void set_budget(int ops) {
    mx_budget b[MX_PHASES];
    for (int i = 0; i < MX_PHASES; i++) b[i] = no_budget, b[i].max_ops = ops;
    mx_enc_set_budgets(enc, b);
}

static void open_steps(int max_tok, int max_range, int max_out, int n_vocab, int page, int ctx) {
    mx_err e = {0};
    if (enc) mx_enc_close(enc);
    mx_budget b[MX_PHASES] = {no_budget, no_budget, no_budget};
    enc = mx_enc_open(be, b, 64, true);
    caps = (mx_step_caps){.max_tok = max_tok,
                          .max_range = max_range,
                          .max_out = max_out,
                          .n_vocab = n_vocab,
                          .n_groups = 1,
                          .page_tokens = {page},
                          .max_pages = {(ctx + page - 1) / page}};
    must(be->ops->step_init(be, &caps, io, &e), &e);
}

// A weight whose bytes come from the noise; scales are 0.002 .. 0.01, biases about -8 scales.
static mx_tensor *weight(mx_wfmt f, int64_t n, int64_t k) {
    static const uint16_t bf[4] = {0x3b03, 0x3b83, 0x3bc4, 0x3b44}; // about 0.002 .. 0.006
    mx_err e = {0};
    mx_tensor *t = mx_calloc(1, sizeof(*t));
    size_t code, all;
    CHECK(mx_wfmt_code_bytes(f, k, &code) && mx_wfmt_row_bytes(f, k, &all));
    size_t scale = (all - code) / 2 * (size_t)n, bytes = code * (size_t)n;
    size_t from = (size_t)(next_random() % 4096) * 64;
    uint8_t *data = mx_alloc_large(bytes + 2 * scale);
    CHECK(data);
    for (size_t at = 0; at < bytes; at += NOISE / 2) {
        memcpy(data + at, noise + from, MX_MIN((size_t)NOISE / 2, bytes - at));
    }
    uint16_t *s = (uint16_t *)(void *)(data + bytes), *b = s + scale / 2;
    for (size_t i = 0; i < scale / 2; i++) {
        s[i] = bf[i * 7 % 4];
        b[i] = (uint16_t)((s[i] + 0x180) | 0x8000); // -8 scales
    }
    if (f.dtype == MX_Q4_1) { // f16 scale and minimum
        uint16_t *w = (uint16_t *)(void *)data;
        for (size_t i = 0; i < bytes / 20; i++) w[i * 10] = 0x1c00, w[i * 10 + 1] = 0xa800;
    }
    mx_wview v = {.fmt = f, .n_rows = n, .n_cols = k, .data = data, .scales = s, .biases = b};
    must(be->ops->upload(be, t, &v, &e), &e);
    cuda_d.cuStreamSynchronize(cb->stream);
    mx_free_large(data, bytes + 2 * scale);
    return t;
}

static mx_tensor *vector(int64_t n) {
    mx_err e = {0};
    mx_tensor *t = mx_calloc(1, sizeof(*t));
    float *x = mx_alloc((size_t)n * sizeof(*x));
    for (int64_t i = 0; i < n; i++) x[i] = 0.5f + (float)(next_random() >> 40) * 0x1p-24f;
    mx_wview v = {.fmt = mx_wfmt_of(MX_F32), .n_rows = 1, .n_cols = n, .data = x};
    must(be->ops->upload(be, t, &v, &e), &e);
    mx_free(x);
    return t;
}

static mx_tensor *plain(int64_t rows, int64_t cols, mx_dtype type) {
    mx_err e = {0};
    mx_tensor *t = mx_calloc(1, sizeof(*t));
    size_t el = type == MX_F32 ? 4 : 2, n = (size_t)(rows * cols) * el;
    *t = (mx_tensor){.n_rows = rows,
                     .n_cols = cols,
                     .ld = cols,
                     .n_bytes = n,
                     .kind = MX_T_STATE,
                     .fmt = mx_wfmt_of(type)};
    must(be->ops->alloc(be, &t->buf, n, MX_USE_STATE, &e), &e);
    size_t chunk = MX_MIN(n, (size_t)8 << 20);
    uint8_t *x = mx_alloc_large(chunk);
    CHECK(x);
    for (size_t i = 0; i + el <= chunk; i += el) {
        float v = (float)(next_random() >> 40) * 0x1p-23f - 1;
        uint16_t h = (uint16_t)(0x3000 | (next_random() & 0x8bff)); // float16, |x| < 0.25
        memcpy(x + i, type == MX_F32 ? (void *)&v : (void *)&h, el);
    }
    for (size_t at = 0; at < n; at += chunk) {
        must(be->ops->write(be, t->buf, at, x, MX_MIN(chunk, n - at), &e), &e);
    }
    mx_free_large(x, chunk);
    return t;
}

static void drop(mx_tensor *t) {
    if (!t) return;
    be->ops->free(be, t->buf);
    mx_free(t);
}

static mx_step_range ranges[256];
static mx_step_facts facts;

// A step of n sequences with `rows` rows each, the first at position pos; pages shuffled.
static void fill_step(int slot, mx_phase phase, int n, int rows, int pos, int n_out, bool shuffle) {
    mx_step_io *s = &io[slot];
    int page = caps.page_tokens[0], most = caps.max_pages[0];
    facts = (mx_step_facts){.phase = phase,
                            .n_tok = n * rows,
                            .n_rows = n * rows,
                            .n_out = n_out,
                            .n_ranges = n,
                            .ranges = ranges};
    for (int i = 0; i < n * most; i++) s->page_table[0][i] = i;
    for (int i = n * most - 1; shuffle && i > 0; i--) {
        int j = (int)(next_random() % (uint64_t)(i + 1)), t = s->page_table[0][i];
        s->page_table[0][i] = s->page_table[0][j];
        s->page_table[0][j] = t;
    }
    for (int r = 0; r < n; r++) {
        ranges[r] = (mx_step_range){r, r * rows, rows, pos, phase};
        s->range_first[r] = r * rows;
        s->range_first[r + 1] = (r + 1) * rows;
        s->range_pos0[r] = pos;
        s->range_len[r] = pos + rows;
        for (int i = 0; i < rows; i++) {
            int row = r * rows + i, p = pos + i;
            s->ids[row] = (int)(next_random() % (uint64_t)caps.n_vocab);
            s->pos[row] = p;
            s->tok_range[row] = r;
            s->kv_slot[0][row] = s->page_table[0][r * most + p / page] * page + p % page;
        }
    }
    for (int i = 0; i < n_out; i++) {
        s->out_tok[i] = (i + 1) * rows - 1;
        s->sample[i] = (mx_sample_row){.temperature = 0};
    }
    s->counts[0] = n * rows, s->counts[1] = n, s->counts[2] = n_out;
}

// Median device seconds of a recorded step.
static double run_plan(mx_plan *plan, int reps) {
    mx_err e = {0};
    double t[64];
    CHECK(reps <= 64);
    for (int i = -2; i < reps; i++) {
        mx_ticket k;
        bool done;
        mx_run_stats st;
        must(mx_enc_submit(enc, plan, 0, &k, &e), &e);
        must(be->ops->wait(be, k, true, false, &done, &st, &e), &e);
        if (i >= 0) t[i] = st.seconds;
    }
    qsort(t, (size_t)reps, sizeof(*t), by_value);
    return t[reps / 2];
}

static double run_recorded(int reps) {
    mx_err e = {0};
    mx_plan *plan;
    must(mx_enc_end(enc, &plan, &e), &e);
    return run_plan(plan, reps);
}

static void op(mx_op_kind kind, mx_op_params p, int n_in, const mx_tid *in, int n_out,
               const mx_tid *out) {
    mx_op o = {.kind = (uint8_t)kind, .n_in = (uint8_t)n_in, .n_out = (uint8_t)n_out, .p = p};
    for (int i = 0; i < n_in; i++) o.in[i] = in[i];
    for (int i = 0; i < n_out; i++) o.out[i] = out[i];
    mx_enc_op(enc, o);
}

// ---- Read rate ----

static void bench_read(void) {
    mx_err e = {0};
    mx_buffer *buf;
    size_t n = (size_t)4 << 30;
    must(be->ops->alloc(be, &buf, n, MX_USE_WEIGHT, &e), &e);
    for (size_t at = 0; at < n; at += NOISE) {
        must(be->ops->write(be, buf, at, noise, NOISE, &e), &e);
    }
    k_chain a = {.x = buf->device, .y = buf->device, .n = (int64_t)(n / 16)};
    cuda_item it = {.grid = {(uint32_t)cb->n_sm * 64, 1, 1}, .block = 512};
    must(cuda_kernel_get(cb, CK_read_rate, false, &it.fn, &e), &e);
    CUevent ev[2];
    cuda_d.cuEventCreate(&ev[0], 0), cuda_d.cuEventCreate(&ev[1], 0);
    double t[21];
    for (int i = -3; i < 21; i++) {
        float ms;
        cuda_d.cuEventRecord(ev[0], cb->stream);
        must(cuda_run_item(cb, &it, (const uint8_t *)&a, false, &e), &e);
        cuda_d.cuEventRecord(ev[1], cb->stream);
        cuda_d.cuEventSynchronize(ev[1]);
        cuda_d.cuEventElapsedTime(&ms, ev[0], ev[1]);
        if (i >= 0) t[i] = ms * 1e-3;
    }
    qsort(t, 21, sizeof(*t), by_value);
    read_gbs = (double)n / t[10] * 1e-9;
    printf("read rate %.0f GB/s (4.3 GB, median of 21)\n", read_gbs);
    be->ops->free(be, buf);
}

// ---- One product over many matrices ----

static double product_us(mx_wfmt f, int n, int k, int rows, double *bytes) {
    size_t one;
    CHECK(mx_wfmt_row_bytes(f, k, &one));
    *bytes = (double)one * n;
    int copies = (int)MX_MAX(2.0, MX_MIN(40.0, 4e8 / *bytes));
    mx_tensor *w[40], *x = plain(rows, k, MX_F32), *y = plain(rows, n, MX_F32);
    for (int i = 0; i < copies; i++) w[i] = weight(f, n, k);
    fill_step(0, rows > 64 ? MX_PHASE_PREFILL : MX_PHASE_DECODE, 1, rows, 0, 0, false);
    mx_enc_begin(enc, &facts);
    for (int i = 0; i < copies; i++) {
        mx_tid in[3] = {mx_enc_use(enc, x), mx_enc_use(enc, w[i]), MX_NONE};
        mx_tid out = mx_enc_use(enc, y);
        op(MX_OP_MATMUL, (mx_op_params){.words = {0}}, 3, in, 1, &out);
    }
    double us = run_recorded(11) * 1e6 / copies;
    set_budget(MX_BUDGET_UNLIMITED); // drops the plans
    for (int i = 0; i < copies; i++) drop(w[i]);
    drop(x), drop(y);
    return us;
}

static const mx_wfmt a4 = {MX_AFFINE, 4, 64, MX_BF16}, b16 = {MX_BF16, 0, 0, 0};

static void bench_gemv(void) {
    static const int shape[][2] = {{1024, 4096},  {4096, 4096},  {6144, 4096},  {12288, 4096},
                                   {24576, 4096}, {4096, 12288}, {4096, 14336}, {128256, 4096}};
    open_steps(64, 64, 64, 1000, 16, 16);
    for (int f = 0; f < 2; f++) {
        printf("one row, %s: shape, us (with the gap to the next kernel), GB/s, share\n",
               f ? "bf16" : "affine4 g64");
        for (size_t i = 0; i < MX_COUNT(shape); i++) {
            double bytes, us = product_us(f ? b16 : a4, shape[i][0], shape[i][1], 1, &bytes);
            printf("  %6d x %5d %8.2f %7.0f %5.1f %%\n", shape[i][0], shape[i][1], us,
                   bytes / us * 1e-3, 100 * bytes / us * 1e-3 / read_gbs);
        }
    }
    printf("few rows, affine4 g64 24576 x 4096 and bf16 6144 x 4096, 4096 x 12288: us\n");
    static const int rows[] = {1, 2, 4, 5, 8, 9, 16, 32, 64};
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        double b, u0 = product_us(a4, 24576, 4096, rows[i], &b);
        double u1 = product_us(b16, 6144, 4096, rows[i], &b);
        double u2 = product_us(a4, 4096, 12288, rows[i], &b);
        printf("  rows %2d %8.2f %8.2f %8.2f\n", rows[i], u0, u1, u2);
    }
}

// ---- cuBLASLt bf16 against our 4-bit product ----

static double lt_us(int n_tok, int n, int k) {
    mx_err e = {0};
    if (!cb->lt) return NAN;
    mx_tensor *x = plain(n_tok, k, MX_F16), *w[8], *y = plain(n_tok, n, MX_F16);
    mx_tensor *ws = plain(1, (int64_t)cuda_lt_workspace() / 2, MX_F16);
    int copies = 6;
    for (int i = 0; i < copies; i++) w[i] = plain(n, k, MX_F16);
    CUevent ev[2];
    cuda_d.cuEventCreate(&ev[0], 0), cuda_d.cuEventCreate(&ev[1], 0);
    double t[11];
    for (int i = -2; i < 11; i++) {
        float ms;
        cuda_d.cuEventRecord(ev[0], cb->stream);
        for (int c = 0; c < copies; c++) {
            cuda_lt_args a = {.x = x->buf->device,
                              .w = w[c]->buf->device,
                              .y = y->buf->device,
                              .workspace = ws->buf->device,
                              .n_tok = n_tok,
                              .n = n,
                              .k = k,
                              .ldx = k,
                              .ldy = n,
                              .y_bf16 = true};
            must(cuda_lt_run(cb->lt, &a, cb->stream, &e), &e);
        }
        cuda_d.cuEventRecord(ev[1], cb->stream);
        cuda_d.cuEventSynchronize(ev[1]);
        cuda_d.cuEventElapsedTime(&ms, ev[0], ev[1]);
        if (i >= 0) t[i] = ms * 1e3 / copies;
    }
    qsort(t, 11, sizeof(*t), by_value);
    for (int i = 0; i < copies; i++) drop(w[i]);
    drop(x), drop(y), drop(ws);
    return t[5];
}

static void bench_gemm(void) {
    static const int rows[] = {8, 16, 64, 128, 256, 512, 2048};
    printf("24576 x 4096: rows, cuBLASLt bf16 us, affine4 us, ratio; bf16 weights us; TFLOP/s of "
           "cuBLASLt\n");
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        open_steps(2048, 2048, 8, 1000, 16, 16);
        double b, lt = lt_us(rows[i], 24576, 4096), us = product_us(a4, 24576, 4096, rows[i], &b);
        double ub = product_us(b16, 24576, 4096, rows[i], &b);
        printf("  %5d %9.1f %9.1f %5.2f %9.1f %7.0f\n", rows[i], lt, us, lt / us, ub,
               2.0 * 24576 * 4096 * rows[i] / lt * 1e-6);
    }
}

// ---- Batches ----

// Products of a batch by each kernel that takes them; weights stay in device memory.
static void bench_batch(void) {
    static const int shape[][2] = {{24576, 4096}, {6144, 4096}, {4096, 4096}, {4096, 12288}};
    static const int rows[] = {5, 8, 9, 16, 24, 32, 48, 64, 96, 128, 256};
    int32_t gemv_rows = cb->gemv_rows, lt_rows = cb->lt_rows;
    for (int f = 0; f < 2; f++) {
        for (size_t s = 0; s < MX_COUNT(shape); s++) {
            int n = shape[s][0], k = shape[s][1];
            printf("%s %d x %d: rows, one pass us, batch us, share of the read rate, cuBLASLt us\n",
                   f ? "bf16" : "affine4 g64", n, k);
            for (size_t i = 0; i < MX_COUNT(rows); i++) {
                double b, one = NAN;
                if (rows[i] > most_rows) break;
                open_steps(512, 512, 8, 1000, 16, 16);
                if (rows[i] <= 8) one = product_us(f ? b16 : a4, n, k, rows[i], &b);
                cb->gemv_rows = 1, cb->lt_rows = 1 << 20;
                double us = product_us(f ? b16 : a4, n, k, rows[i], &b);
                cb->lt_rows = 1, cb->skinny = false;
                double lt = product_us(f ? b16 : a4, n, k, rows[i], &b);
                cb->gemv_rows = gemv_rows, cb->lt_rows = lt_rows, cb->skinny = true;
                printf("  %4d %8.2f %8.2f %5.1f %% %8.2f\n", rows[i], one, us,
                       100 * b / us * 1e-3 / read_gbs, lt);
            }
        }
    }
}

// ---- Paged decode attention ----

static double attn_us(int batch, int ctx, int page, bool shuffle, int n_head, int n_kv, int hd) {
    open_steps(batch, batch, 8, 1000, page, ctx);
    int copies = (int)MX_MAX(1.0, MX_MIN(16.0, 4e9 / ((double)batch * ctx * n_kv * hd * 4)));
    int64_t tokens = (int64_t)batch * caps.max_pages[0] * page;
    mx_tensor *k[16], *v[16], *q = plain(batch, n_head * hd, MX_F32);
    mx_tensor *o = plain(batch, n_head * hd, MX_F32);
    for (int i = 0; i < copies; i++) {
        k[i] = plain(tokens * n_kv, hd, MX_F16);
        v[i] = plain(tokens * n_kv, hd, MX_F16);
    }
    fill_step(0, MX_PHASE_DECODE, batch, 1, ctx - 1, 0, shuffle);
    mx_enc_begin(enc, &facts);
    for (int i = 0; i < copies; i++) {
        mx_tid in[3] = {mx_enc_use(enc, q), mx_enc_use(enc, k[i]), mx_enc_use(enc, v[i])};
        mx_tid out = mx_enc_use(enc, o);
        mx_op_params p = {.attn = {.scale = 1 / sqrtf((float)hd),
                                   .n_head = n_head,
                                   .n_kv_head = n_kv,
                                   .head_dim = hd,
                                   .ctx_bucket = mx_ctx_bucket(ctx)}};
        op(MX_OP_ATTN, p, 3, in, 1, &out);
    }
    double us = run_recorded(11) * 1e6 / copies;
    set_budget(MX_BUDGET_UNLIMITED);
    for (int i = 0; i < copies; i++) drop(k[i]), drop(v[i]);
    drop(q), drop(o);
    return us;
}

static void bench_attn(void) {
    static const int cases[][3] = {{64, 8192, 0},   {64, 8192, 16}, {64, 8192, 32}, {64, 8192, 64},
                                   {64, 8192, 128}, {64, 1024, 32}, {8, 8192, 32},  {1, 8192, 32},
                                   {1, 1024, 32},   {1, 1024, 0},   {1, 32768, 32}};
    printf("decode attention, 32/8 heads of 128, float16: batch, context, page (0: one), us, GB/s, "
           "share\n");
    for (size_t i = 0; i < MX_COUNT(cases); i++) {
        int b = cases[i][0], ctx = cases[i][1], page = cases[i][2];
        double us = attn_us(b, ctx, page ? page : ctx, page != 0, 32, 8, 128);
        double bytes = (double)b * ctx * 8 * 128 * 4;
        printf("  %3d %6d %4d %9.2f %7.0f %5.1f %%\n", b, ctx, page, us, bytes / us * 1e-3,
               100 * bytes / us * 1e-3 / read_gbs);
    }
}

// ---- Whole steps ----

typedef struct geometry {
    const char *name;
    int d, n_layer, n_head, n_kv, hd, ff, vocab;
    bool qk_norm;
    mx_wfmt f;
} geometry;

typedef struct layer {
    mx_tensor *n1, *q, *k, *v, *o, *n2, *gate, *up, *down, *ks, *vs;
} layer;

typedef struct model {
    const geometry *g;
    layer l[48];
    mx_tensor *embed, *nf, *freq, *qn, *kn, *logits;
    double bytes; // weights read in a step
} model;

static void model_open(model *m, const geometry *g, int64_t kv_tokens) {
    *m = (model){.g = g};
    for (int i = 0; i < g->n_layer; i++) {
        layer *l = &m->l[i];
        l->n1 = vector(g->d), l->n2 = vector(g->d);
        l->q = weight(g->f, g->n_head * g->hd, g->d);
        l->k = weight(g->f, g->n_kv * g->hd, g->d);
        l->v = weight(g->f, g->n_kv * g->hd, g->d);
        l->o = weight(g->f, g->d, g->n_head * g->hd);
        l->gate = weight(g->f, g->ff, g->d);
        l->up = weight(g->f, g->ff, g->d);
        l->down = weight(g->f, g->d, g->ff);
        l->ks = plain(kv_tokens * g->n_kv, g->hd, MX_F16);
        l->vs = plain(kv_tokens * g->n_kv, g->hd, MX_F16);
    }
    m->embed = weight(g->f, g->vocab, g->d);
    m->nf = vector(g->d), m->freq = vector(g->hd / 2);
    if (g->qk_norm) m->qn = vector(g->hd), m->kn = vector(g->hd);
    size_t rd, rh, rf;
    CHECK(mx_wfmt_row_bytes(g->f, g->d, &rd) && mx_wfmt_row_bytes(g->f, g->n_head * g->hd, &rh) &&
          mx_wfmt_row_bytes(g->f, g->ff, &rf));
    m->bytes = (double)rd * g->vocab +
               g->n_layer * ((double)rd * ((g->n_head + 2 * g->n_kv) * g->hd + 2 * g->ff) +
                             (double)(rh + rf) * g->d);
    m->logits = mx_calloc(1, sizeof(mx_tensor));
}

static void model_close(model *m) {
    for (int i = 0; i < m->g->n_layer; i++) {
        layer *l = &m->l[i];
        drop(l->n1), drop(l->q), drop(l->k), drop(l->v), drop(l->o), drop(l->n2);
        drop(l->gate), drop(l->up), drop(l->down), drop(l->ks), drop(l->vs);
    }
    drop(m->embed), drop(m->nf), drop(m->freq), drop(m->qn), drop(m->kn);
    mx_free(m->logits);
}

#define USE(t) mx_enc_use(enc, t)

static void record_step(const model *m, int rows, int n_out, int ctx) {
    const geometry *g = m->g;
    int qc = g->n_head * g->hd, kc = g->n_kv * g->hd;
    mx_enc_begin(enc, &facts);
    mx_tid h = mx_enc_temp(enc, rows, g->d), cs = mx_enc_temp(enc, rows, g->hd);
    op(MX_OP_EMBED, (mx_op_params){.embed = {1}}, 1, (mx_tid[]){USE(m->embed)}, 1, &h);
    op(MX_OP_ROPE_TABLE, (mx_op_params){.rope = {.mscale = 1, .n_rot = g->hd}}, 1,
       (mx_tid[]){USE(m->freq)}, 1, &cs);
    for (int i = 0; i < g->n_layer; i++) {
        const layer *l = &m->l[i];
        mx_tid qkv[3] = {mx_enc_temp(enc, rows, qc), mx_enc_temp(enc, rows, kc),
                         mx_enc_temp(enc, rows, kc)};
        op(MX_OP_NORM_QKV, (mx_op_params){.norm = {1e-6f, g->d}}, 8,
           (mx_tid[]){h, USE(l->n1), USE(l->q), USE(l->k), USE(l->v), -1, -1, -1}, 3, qkv);
        mx_tid q = mx_enc_temp(enc, rows, qc), o = mx_enc_temp(enc, rows, qc);
        op(MX_OP_ROPE_KV,
           (mx_op_params){.rope = {.mscale = 1,
                                   .n_rot = g->hd,
                                   .head_dim = g->hd,
                                   .eps = 1e-6f,
                                   .n_head = g->n_head,
                                   .n_kv_head = g->n_kv}},
           8,
           (mx_tid[]){qkv[0], qkv[1], qkv[2], cs, USE(m->qn), USE(m->kn), USE(l->ks), USE(l->vs)},
           1, &q);
        op(MX_OP_ATTN,
           (mx_op_params){.attn = {.scale = 1 / sqrtf((float)g->hd),
                                   .n_head = g->n_head,
                                   .n_kv_head = g->n_kv,
                                   .head_dim = g->hd,
                                   .ctx_bucket = mx_ctx_bucket(ctx),
                                   .one_row = mx_step_one_row(&facts)}},
           3, (mx_tid[]){q, USE(l->ks), USE(l->vs)}, 1, &o);
        mx_tid h2 = mx_enc_temp(enc, rows, g->d), a = mx_enc_temp(enc, rows, g->ff);
        op(MX_OP_MATMUL_ADD, (mx_op_params){.words = {0}}, 4, (mx_tid[]){o, USE(l->o), -1, h}, 1,
           &h2);
        op(MX_OP_NORM_GLU, (mx_op_params){.glu = {MX_ACT_SILU, 1e-6f}}, 4,
           (mx_tid[]){h2, USE(l->n2), USE(l->gate), USE(l->up)}, 1, &a);
        h = mx_enc_temp(enc, rows, g->d);
        op(MX_OP_MATMUL_ADD, (mx_op_params){.words = {0}}, 4, (mx_tid[]){a, USE(l->down), -1, h2},
           1, &h);
    }
    mx_tid x = h;
    if (n_out < rows) {
        x = mx_enc_temp(enc, n_out, g->d);
        op(MX_OP_GATHER, (mx_op_params){.words = {0}}, 1, &h, 1, &x);
    }
    *m->logits = (mx_tensor){.kind = MX_T_LOGITS,
                             .n_rows = n_out,
                             .n_cols = g->vocab,
                             .ld = g->vocab,
                             .n_bytes = (size_t)n_out * (size_t)g->vocab * 4,
                             .fmt = mx_wfmt_of(MX_F32)};
    mx_tid lg = USE(m->logits);
    op(MX_OP_NORM_MATMUL, (mx_op_params){.norm = {1e-6f, g->d}}, 4,
       (mx_tid[]){x, USE(m->nf), USE(m->embed), -1}, 1, &lg);
    op(MX_OP_SAMPLE, (mx_op_params){.words = {0}}, 1, &lg, 0, NULL);
}

// Wall time a step with the next step always submitted before the last is waited for.
static double pipelined_s(mx_plan *plan, int n) {
    mx_err e = {0};
    mx_ticket t[2];
    bool done;
    must(mx_enc_submit(enc, plan, 0, &t[0], &e), &e);
    double t0 = mx_now_s();
    for (int i = 1; i <= n; i++) {
        must(mx_enc_submit(enc, plan, i & 1, &t[i & 1], &e), &e);
        must(be->ops->wait(be, t[(i - 1) & 1], true, false, &done, NULL, &e), &e);
    }
    double s = (mx_now_s() - t0) / n;
    must(be->ops->wait(be, t[n & 1], true, false, &done, NULL, &e), &e);
    return s;
}

static const geometry models[] = {
    {"Qwen3-8B affine4 g64",
     4096,
     36,
     32,
     8,
     128,
     12288,
     151936,
     true,
     {MX_AFFINE, 4, 64, MX_BF16}},
    {"Llama-3.1-8B bf16", 4096, 32, 32, 8, 128, 14336, 128256, false, {MX_BF16, 0, 0, 0}},
    {"SmolLM2-135M q4_1", 576, 30, 9, 3, 64, 1536, 49152, false, {MX_Q4_1, 0, 0, 0}},
    {"SmolLM2-135M bf16", 576, 30, 9, 3, 64, 1536, 49152, false, {MX_BF16, 0, 0, 0}},
};

// One line: a decode step of n rows.
static void step_row(const model *m, int n, int ctx) {
    const geometry *g = m->g;
    mx_err e = {0};
    mx_plan *plan;
    fill_step(0, MX_PHASE_DECODE, n, 1, ctx - 1, n, true);
    memcpy(cb->host[1], cb->host[0], cb->layout.input_bytes);
    record_step(m, n, n, ctx);
    uint64_t before = cb->count.kernel_launches;
    must(mx_enc_end(enc, &plan, &e), &e);
    int launches = (int)(cb->count.kernel_launches - before);
    double dev = run_plan(plan, 21), wall = pipelined_s(plan, 100);
    double bytes = m->bytes + (double)n * ctx * g->n_layer * g->n_kv * g->hd * 4;
    printf("    %2d %8.3f %8.3f %8.0f %5.1f %%  (%d ops, %d launches)\n", n, dev * 1e3, wall * 1e3,
           n / wall, 100 * bytes / wall * 1e-9 / read_gbs, plan->n_ops, launches);
}

static void bench_step(void) {
    printf("whole steps, 1,024 tokens of context: rows, ms on the device, wall ms (pipelined), "
           "tok/s, share of the read rate\n");
    for (size_t i = 0; i < MX_COUNT(models); i++) {
        const geometry *g = &models[i];
        int ctx = 1024, most = MX_MAX(8, MX_MIN(most_rows, 64));
        if (only && !strstr(g->name, only)) continue;
        open_steps(2048, most, most, g->vocab, 32, 2048);
        model *m = mx_calloc(1, sizeof(*m));
        double t0 = mx_now_s();
        model_open(m, g, (int64_t)most * 2048);
        printf("  %s (made in %.1f s)\n", g->name, mx_now_s() - t0);
        static const int rows[] = {1, 2, 4, 8, 16, 32, 64};
        for (size_t r = 0; r < MX_COUNT(rows) && rows[r] <= most_rows; r++) {
            step_row(m, rows[r], ctx);
        }
        for (int rowsp = 512; rowsp <= 2048 && most_rows > 1; rowsp *= 4) {
            fill_step(0, MX_PHASE_PREFILL, 1, rowsp, 0, 1, true);
            record_step(m, rowsp, 1, rowsp);
            double dev = run_recorded(5);
            printf("    prefill %d: %.2f ms, %.0f tok/s\n", rowsp, dev * 1e3, rowsp / dev);
        }
        set_budget(MX_BUDGET_UNLIMITED);
        model_close(m);
        mx_free(m);
    }
}

// ---- The chain of tiny dependent ops ----

static uint64_t hash_of(const mx_tensor *y) {
    mx_err e = {0};
    static float out[4096];
    must(be->ops->read(be, y->buf, 0, out, sizeof(out), &e), &e);
    uint64_t h = 0xcbf29ce484222325ull;
    for (int k = 0; k < 4096; k++) {
        uint32_t u;
        memcpy(&u, &out[k], 4);
        h = (h ^ u) * 0x100000001b3ull;
    }
    return h;
}

// Median wall milliseconds of one chain, the next always submitted before the last is waited for.
static double chain_ms(mx_plan *plan) {
    double t[15];
    for (int i = 0; i < 15; i++) t[i] = pipelined_s(plan, 8) * 1e3;
    qsort(t, 15, sizeof(*t), by_value);
    return t[7];
}

static void bench_chain(void) {
    enum { N = 3200 };
    mx_err e = {0};
    static const int ops[] = {MX_BUDGET_UNLIMITED, MX_BUDGET_UNLIMITED, 1000, 200, 100, 50, 20};
    open_steps(8, 8, 8, 1000, 16, 16);
    mx_tensor *x = plain(1, 4096, MX_F32), *y = plain(1, 4096, MX_F32);
    mx_tensor *z = plain(1, 4096, MX_F32);
    double base[2] = {0};
    printf("chain of %d dependent adds of 4,096 floats; second figures: the host waits after every "
           "buffer\n  ops/buffer, buffers, ms, us a boundary, ms, us a boundary, hash\n",
           N);
    for (size_t i = 0; i < MX_COUNT(ops); i++) {
        set_budget(ops[i] == MX_BUDGET_UNLIMITED ? ops[i] : ops[i] - 1);
        fill_step(0, MX_PHASE_DECODE, 1, 1, 0, 0, false);
        memcpy(cb->host[1], cb->host[0], cb->layout.input_bytes);
        mx_enc_begin(enc, &facts);
        mx_tid a = USE(x), one = USE(z);
        for (int k = 0; k < N; k++) {
            mx_tid b = k == N - 1 ? USE(y) : mx_enc_temp(enc, 1, 4096);
            op(MX_OP_ADD, (mx_op_params){.words = {0}}, 2, (mx_tid[]){a, one}, 1, &b);
            a = b;
        }
        mx_plan *plan;
        must(mx_enc_end(enc, &plan, &e), &e);
        run_plan(plan, 3);
        double ms[2], edge[2];
        for (int w = 0; w < 2; w++) {
            cb->wait_buffers = w;
            ms[w] = chain_ms(plan);
            if (i == 0) base[w] = ms[w];
            edge[w] = plan->n_segs > 1 ? (ms[w] - base[w]) * 1e3 / (plan->n_segs - 1) : 0;
        }
        cb->wait_buffers = false;
        printf("  %10d %4d %7.3f %6.2f %7.3f %6.2f %016llx\n", ops[i], plan->n_segs, ms[0], edge[0],
               ms[1], edge[1], (unsigned long long)hash_of(y));
    }
    set_budget(MX_BUDGET_UNLIMITED);
    drop(x), drop(y), drop(z);
}

// ---- Loading ----

// From a file in the page cache to the device: the readers alone, the ring at several shapes, then
// weights with packing. folder=PATH and gb=N say where the file is made and its size.

enum { LOAD_WEIGHTS = 128, LOAD_COLS = 4096 };
static const char *load_folder;
static double load_gb = 16;
typedef struct load_file {
    char path[256];
    mx_file f;
    size_t each; // bytes of a weight
} load_file;

static bool load_make(load_file *l) {
    static const char *const folders[] = {"/dev/shm", "/tmp", "."};
    mx_err e = {0};
    size_t room = 0;
    for (size_t i = 0; i < MX_COUNT(folders) && room < (size_t)20 << 30; i++) {
        struct statvfs v;
        const char *d = load_folder ? load_folder : folders[i];
        size_t here = statvfs(d, &v) == 0 ? (size_t)v.f_bavail * v.f_frsize : 0;
        if (here > room) {
            room = here;
            snprintf(l->path, sizeof(l->path), "%s/bench-load-%ld", d, (long)getpid());
        }
    }
    size_t n = MX_MIN((size_t)(load_gb * 1e9), room - room / 5);
    l->each = n / LOAD_WEIGHTS / ((size_t)LOAD_COLS * 32) * ((size_t)LOAD_COLS * 32);
    n = l->each * LOAD_WEIGHTS;
    double t0 = mx_now_s();
    FILE *f = n ? fopen(l->path, "wb") : NULL;
    bool ok = f != NULL;
    for (size_t at = 0; ok && at < n; at += NOISE) {
        ok = fwrite(noise, 1, MX_MIN((size_t)NOISE, n - at), f) == MX_MIN((size_t)NOISE, n - at);
    }
    if (f && fclose(f) != 0) ok = false;
    if (!ok || mx_file_open(&l->f, l->path, &e) != MX_OK) {
        printf("load: no room for a file in %s: rows left out\n", l->path);
        remove(l->path);
        return false;
    }
    printf("load: file of %.1f GB at %s, written in %.1f s; %d processors\n", (double)n * 1e-9,
           l->path, mx_now_s() - t0, mx_cpu_affinity_count());
    return true;
}

static double pinned_rate(size_t n_bytes) {
    void *pin = NULL;
    CUdeviceptr d = 0;
    double t0 = mx_now_s(), best = 1e9;
    CHECK(cuda_d.cuMemHostAlloc(&pin, n_bytes, 0) == CUDA_SUCCESS);
    double made = mx_now_s() - t0;
    CHECK(cuda_d.cuMemAlloc(&d, n_bytes) == CUDA_SUCCESS);
    for (int i = 0; i < 12; i++) {
        t0 = mx_now_s();
        cuda_d.cuMemcpyHtoDAsync(d, pin, n_bytes, cb->stream);
        cuda_d.cuStreamSynchronize(cb->stream);
        best = MX_MIN(best, mx_now_s() - t0);
    }
    cuda_d.cuMemFree(d), cuda_d.cuMemFreeHost(pin);
    printf("load: pinned copy %.1f GB/s (%zu MiB from the driver in %.1f ms)\n",
           (double)n_bytes / best * 1e-9, n_bytes >> 20, made * 1e3);
    return (double)n_bytes / best * 1e-9;
}

static mx_status null_enter(void *ctx, mx_err *err) {
    (void)ctx, (void)err;
    return MX_OK;
}
static mx_status null_send(void *ctx, int slot, uint64_t dst, const void *p, size_t n, mx_err *e) {
    (void)ctx, (void)slot, (void)dst, (void)p, (void)n, (void)e;
    return MX_OK;
}
static mx_status null_wait(void *ctx, int slot, mx_err *err) {
    (void)ctx, (void)slot, (void)err;
    return MX_OK;
}

// GB/s of the readers alone: from the file, or from its mapping (copied, pages touched before).
static double readers_gbs(const load_file *l, mx_feed_shape shape, bool mapped) {
    mx_err e = {0};
    mx_feed *feed;
    size_t ring = (size_t)shape.n_slots * shape.slot_bytes, n = MX_MIN(l->f.n_bytes, (size_t)8e9);
    uint8_t *host = mx_alloc_large(ring);
    CHECK(host);
    memset(host, 0, ring);
    mx_feed_device dev = {NULL, null_enter, null_send, null_wait};
    must(mx_feed_open(&feed, &shape, host, &dev, &e), &e);
    double t0 = mx_now_s();
    mx_feed_job j = {.n_bytes = n, .file = mapped ? NULL : &l->f, .data = l->f.data};
    must(mx_feed_sent(feed, mx_feed_put(feed, &j), &e), &e);
    t0 = mx_now_s() - t0;
    mx_feed_close(feed);
    mx_free_large(host, ring);
    return (double)n / t0 * 1e-9;
}

// Seconds for the whole file to one place on the device, the ring open already.
static double ring_s(const load_file *l, CUdeviceptr dst, mx_feed_shape shape, double poll_s,
                     mx_cuda_counters *took) {
    mx_err e = {0};
    cuda_ring_close(cb);
    cb->ring_shape = shape;
    cb->ring_poll_s = poll_s;
    cb->count = (mx_cuda_counters){.pinned = true};
    must(cuda_ring_open(cb, &shape, &e), &e);
    double t0 = mx_now_s();
    mx_feed_job j = {.dst = dst, .n_bytes = l->f.n_bytes, .file = &l->f};
    must(cuda_ring_sent(cb, cuda_ring_put(cb, &j), &e), &e);
    cuda_d.cuStreamSynchronize(cb->copy);
    t0 = mx_now_s() - t0;
    cuda_ring_close(cb);
    *took = cb->count;
    return t0;
}

static void bench_ring(const load_file *l, double rate) {
    static const int shapes[][3] = {// readers, slots, MiB a slot
                                    {4, 32, 4},  {8, 32, 4},  {12, 32, 4},  {14, 32, 4},
                                    {16, 32, 4}, {12, 64, 2}, {16, 64, 2},  {12, 16, 8},
                                    {15, 16, 8}, {12, 64, 1}, {12, 16, 4},  {12, 32, 2},
                                    {12, 64, 4}, {14, 24, 4}, {12, 128, 1}, {16, 128, 1}};
    mx_cuda_counters c;
    CUdeviceptr d = 0;
    CHECK(cuda_d.cuMemAlloc(&d, l->f.n_bytes) == CUDA_SUCCESS);
    double s = (double)l->f.n_bytes * 1e-9;
    printf("load, ring without packing: readers, slots x MiB, GB/s with naps of 20 us (again), "
           "with yields; readers' time reading and waiting, making the ring\n");
    for (size_t i = 0; i < MX_COUNT(shapes); i++) {
        mx_feed_shape sh = {shapes[i][0], shapes[i][1], (size_t)shapes[i][2] << 20};
        double nap = ring_s(l, d, sh, 20e-6, &c), yield, again;
        mx_cuda_counters u;
        yield = ring_s(l, d, sh, 0, &u);
        again = ring_s(l, d, sh, 20e-6, &u);
        printf("  %2d %3d x %d %6.1f %6.1f %6.1f  %3.0f %% of pinned; %.2f s, %.2f s, %.1f ms\n",
               sh.n_readers, sh.n_slots, shapes[i][2], s / nap, s / again, s / yield,
               100 * s / MX_MIN(nap, again) / rate, c.upload_read_s, c.upload_wait_s,
               c.ring_open_s * 1e3);
        fflush(stdout);
    }
    cuda_d.cuMemFree(d);
}

// All weights of the file in format f, as a model is loaded: cold, from nothing (ring and stages
// made, device memory taken) to complete.
static void load_weights(const load_file *l, mx_wfmt f, const char *name, double rate, bool cold) {
    mx_err e = {0};
    static mx_tensor t[LOAD_WEIGHTS];
    size_t row;
    CHECK(mx_wfmt_row_bytes(f, LOAD_COLS, &row));
    int64_t rows = (int64_t)(l->each / row / 16 * 16);
    double bytes = (double)row * (double)rows * LOAD_WEIGHTS * 1e-9;
    bool pinned = cb->count.pinned;
    if (cold) must(cuda_upload_close(cb, &e), &e);
    cb->count = (mx_cuda_counters){.pinned = pinned};
    double t0 = mx_now_s();
    for (int i = 0; i < LOAD_WEIGHTS; i++) {
        mx_wview v = {.fmt = f,
                      .n_rows = rows,
                      .n_cols = LOAD_COLS,
                      .data = l->f.data + (size_t)i * l->each,
                      .files = pinned ? &l->f : NULL,
                      .n_files = pinned};
        size_t code;
        CHECK(mx_wfmt_code_bytes(f, LOAD_COLS, &code));
        v.scales = (const uint8_t *)v.data + code * (size_t)rows;
        v.biases = (const uint8_t *)v.scales + (row - code) / 2 * (size_t)rows;
        must(be->ops->upload(be, &t[i], &v, &e), &e);
    }
    must(be->ops->upload_end(be, &e), &e);
    double s = mx_now_s() - t0;
    mx_cuda_counters c;
    mx_cuda_counters_get(be, &c);
    printf("load, %s, %s%s: %.1f GB in %.3f s, %.1f GB/s, %.0f %% of pinned; read %.2f s, waited "
           "%.2f s, ring made in %.1f ms, device memory in %.1f ms\n",
           pinned ? "ring" : "pageable", name, cold ? "" : " (ring open)", bytes, s, bytes / s,
           100 * bytes / s / rate, c.upload_read_s, c.upload_wait_s, c.ring_open_s * 1e3,
           c.upload_alloc_s * 1e3);
    fflush(stdout);
    for (int i = 0; i < LOAD_WEIGHTS; i++) be->ops->free(be, t[i].buf);
}

static void bench_load(void) {
    load_file l = {0};
    if (!load_make(&l)) return;
    double rate = pinned_rate((size_t)256 << 20);
    printf("load, readers alone: readers, GB/s from the file, from its mapping (twice)\n");
    static const int readers[] = {1, 4, 8, 12, 14, 16};
    for (size_t i = 0; i < MX_COUNT(readers); i++) {
        mx_feed_shape sh = {readers[i], 32, (size_t)4 << 20};
        double file = readers_gbs(&l, sh, false), map = readers_gbs(&l, sh, true);
        printf("  %2d %6.1f %6.1f %6.1f\n", readers[i], file, map, readers_gbs(&l, sh, true));
        fflush(stdout);
    }
    bench_ring(&l, rate);
    cb->ring_shape = cuda_ring_shape();
    cb->ring_poll_s = 20e-6;
    cb->count.pinned = true;
    for (int i = 0; i < 3; i++) load_weights(&l, b16, "bf16", rate, true);
    load_weights(&l, b16, "bf16", rate, false);
    load_weights(&l, a4, "affine4 g64", rate, true);
    load_weights(&l, mx_wfmt_of(MX_Q4_1), "q4_1", rate, true);
    load_weights(&l, mx_wfmt_of(MX_F32), "f32 (not packed)", rate, true);
    cb->count.pinned = false;
    load_weights(&l, b16, "bf16", rate, true);
    cb->count.pinned = true;
    mx_file_close(&l.f);
    remove(l.path);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*fn)(void);
    } benches[] = {{"gemv", bench_gemv}, {"batch", bench_batch}, {"attn", bench_attn},
                   {"gemm", bench_gemm}, {"step", bench_step},   {"chain", bench_chain},
                   {"load", bench_load}};
    mx_err e = {0};
    mx_status s = mx_cuda_open(0, &be, &e);
    if (s != MX_OK) {
        printf("skipped: %s\n", e.msg);
        return 0;
    }
    cb = cuda_of(be);
    mx_backend_facts f;
    be->ops->facts(be, &f);
    printf("%s, %s, %d SMs, driver %d, cuBLASLt %s\n", f.device, f.arch, f.n_sm, cuda_d.version,
           cb->lt ? "found" : "not found");
    setvbuf(stdout, NULL, _IOLBF, 0);
    noise = mx_alloc_large(NOISE + (1 << 20));
    CHECK(noise);
    // random bf16 numbers about 0.02 in size, which serve as codes too
    for (size_t i = 0; i < (NOISE + (1 << 20)) / 2; i++) {
        uint64_t r = next_random();
        ((uint16_t *)(void *)noise)[i] = (uint16_t)(0x3c00 | (r & 0x80ff));
    }
    for (int k = 1; k < argc; k++) {
        if (!strncmp(argv[k], "model=", 6)) only = argv[k] + 6;
        if (!strncmp(argv[k], "folder=", 7)) load_folder = argv[k] + 7;
        if (!strncmp(argv[k], "gb=", 3)) load_gb = strtod(argv[k] + 3, NULL);
        int64_t n;
        if (!strncmp(argv[k], "rows=", 5) && mx_parse_i64(argv[k] + 5, &n)) most_rows = (int)n;
    }
    bench_read();
    for (size_t i = 0; i < MX_COUNT(benches); i++) {
        bool named = false, want = false;
        for (int k = 1; k < argc; k++) {
            named = named || !strchr(argv[k], '=');
            want = want || !strcmp(argv[k], benches[i].name);
        }
        want = want || !named;
        if (want) benches[i].fn();
    }
    if (enc) mx_enc_close(enc);
    be->ops->close(be);
    return 0;
}
