// Attention that rotates q and k and writes the state itself gives the bits of the ops by
// themselves, on the GPU: geometries, formats, page sizes, positions, command buffers; and it does
// run as one launch. Without a GPU the program says why and passes.
#include "support/cuda_rig.h"

#include "base/mem.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the four above
#include <cmocka.h>

enum { N_LAYERS = 3, LAYER_OPS = 6 };

typedef struct geometry {
    mx_wfmt f;
    int d, n_head, n_kv, hd, ff;
    int group, window, n_sm; // n_sm 0: the device's
    bool bias, norms, interleaved;
    float softcap;
} geometry;

static const geometry geometries[] = {
    {{MX_AFFINE, 4, 64, MX_BF16}, 256, 8, 2, 64, 512, 0, 0, 0, false, false, false, 0},
    {{MX_AFFINE, 4, 64, MX_BF16}, 512, 4, 4, 128, 1024, 1, 0, 0, false, true, false, 0},
    {{MX_AFFINE, 4, 64, MX_F16}, 256, 8, 2, 64, 2048, 0, 0, 5, true, false, true, 0},
    {{MX_AFFINE, 4, 32, MX_BF16}, 2048, 16, 8, 128, 6144, 0, 0, 0, false, true, false, 0},
    {{MX_AFFINE, 4, 32, MX_F16}, 512, 8, 8, 64, 896, 2, 0, 0, false, false, false, 20},
    {{MX_AFFINE, 4, 64, MX_BF16}, 640, 8, 1, 80, 640, 0, 0, 0, true, true, false, 0},
    {{MX_Q4_1, 0, 0, 0}, 576, 9, 3, 64, 1536, 0, 0, 0, false, false, true, 0},
    {{MX_BF16, 0, 0, 0}, 256, 8, 2, 32, 512, 1, 100, 0, false, false, false, 0},
    {{MX_Q4_1, 0, 0, 0}, 512, 14, 2, 64, 1792, 0, 0, 7, true, false, false, 0},
    {{MX_BF16, 0, 0, 0}, 320, 10, 2, 64, 832, 0, 0, 0, true, false, false, 0},
    {{MX_BF16, 0, 0, 0}, 1024, 8, 1, 128, 2048, 2, 0, 3, false, false, false, 0},
};

static const int positions[] = {0, 1, 15, 63, 64, 200, 777, RIG_MAX_CTX - 1};

static rig the_rig;
static bool have;

static int open_rig(void **state) {
    (void)state;
    have = cuda_rigs_open(&the_rig, 1, false, false, 64);
    return 0;
}

static int close_rig(void **state) {
    (void)state;
    if (have) rig_close(&the_rig);
    return 0;
}

typedef struct stack {
    const geometry *g;
    const mx_tensor *x, *cs, *y;
    const mx_tensor *n1, *n2, *q, *k, *v, *o, *gate, *up, *down, *bq, *bk, *bv, *bo, *qn, *kn;
    const mx_tensor *ks[N_LAYERS], *vs[N_LAYERS];
    uint16_t *noise; // what the states hold at first
    void *owned[8];
    int n_owned;
} stack;

static const mx_tensor *matrix(stack *s, rng *g, int64_t rows, int64_t cols) {
    rig_matrix m = rig_random_matrix(g, s->g->f, rows, cols);
    s->owned[s->n_owned++] = m.owner;
    return rig_weight(&the_rig, &m.view);
}

static const mx_tensor *vector(rng *g, int64_t n, float mean, float spread) {
    float *x = mx_alloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = mean + spread * rng_normal(g);
    mx_wview v = {.fmt = mx_wfmt_of(MX_F32), .n_rows = 1, .n_cols = n, .data = x};
    const mx_tensor *t = rig_weight(&the_rig, &v);
    mx_free(x);
    return t;
}

static stack open_stack(const geometry *g) {
    stack s = {.g = g};
    rng r = {20261130 + (uint64_t)g->d};
    rig *on = &the_rig;
    int q = g->n_head * g->hd, kv = g->n_kv * g->hd;
    float *x = mx_alloc(sizeof *x * (size_t)MX_MAX(g->d, g->hd));
    rng_fill(&r, x, g->d, 1);
    s.x = rig_tensor(on, 1, g->d, x);
    for (int i = 0; i < g->hd / 2; i++) {
        x[i] = cosf(0.37f * (float)i), x[g->hd / 2 + i] = sinf(0.37f * (float)i);
    }
    s.cs = rig_tensor(on, 1, g->hd, x);
    s.y = rig_tensor(on, 1, g->d, NULL);
    mx_free(x);
    s.n1 = vector(&r, g->d, 1, 0.2f), s.n2 = vector(&r, g->d, 1, 0.2f);
    s.q = matrix(&s, &r, q, g->d), s.k = matrix(&s, &r, kv, g->d), s.v = matrix(&s, &r, kv, g->d);
    s.o = matrix(&s, &r, g->d, q);
    s.gate = matrix(&s, &r, g->ff, g->d), s.up = matrix(&s, &r, g->ff, g->d);
    s.down = matrix(&s, &r, g->d, g->ff);
    if (g->bias) {
        s.bq = vector(&r, q, 0, 1), s.bk = vector(&r, kv, 0, 1), s.bv = vector(&r, kv, 0, 1);
        s.bo = vector(&r, g->d, 0, 1);
    }
    if (g->norms) s.qn = vector(&r, g->hd, 1, 0.2f), s.kn = vector(&r, g->hd, 1, 0.2f);
    for (int i = 0; i < N_LAYERS; i++) {
        s.ks[i] = rig_state(on, g->group, 1, g->n_kv, g->hd, MX_F16);
        s.vs[i] = rig_state(on, g->group, 1, g->n_kv, g->hd, MX_F16);
    }
    size_t n = s.ks[0]->n_bytes / 2;
    s.noise = mx_alloc(2 * n);
    for (size_t i = 0; i < n; i++) { // float16 in (-2, 2)
        s.noise[i] = (uint16_t)(rng_below(&r, 0x4000) | (rng_below(&r, 2) << 15));
    }
    return s;
}

static void close_stack(stack *s) {
    rig_reset(&the_rig);
    for (int i = 0; i < s->n_owned; i++) mx_free(s->owned[i]);
    mx_free(s->noise);
}

static void add_op(mx_op_kind kind, mx_op_params p, int n_in, const mx_tid *in, int n_out,
                   const mx_tid *out) {
    mx_op op = {.kind = (uint8_t)kind, .n_in = (uint8_t)n_in, .n_out = (uint8_t)n_out, .p = p};
    memcpy(op.in, in, sizeof *in * (size_t)n_in);
    memcpy(op.out, out, sizeof *out * (size_t)n_out);
    mx_enc_op(the_rig.enc, op);
}

static void record(const stack *s, int ctx) {
    const geometry *g = s->g;
    mx_enc *e = the_rig.enc;
    int qc = g->n_head * g->hd, kc = g->n_kv * g->hd;
    mx_tid h = rig_use(&the_rig, s->x), cs = rig_use(&the_rig, s->cs);
#define USE(t) rig_use(&the_rig, s->t)
    for (int i = 0; i < N_LAYERS; i++) {
        mx_tid qkv[3] = {mx_enc_temp(e, 1, qc), mx_enc_temp(e, 1, kc), mx_enc_temp(e, 1, kc)};
        mx_tid ks = USE(ks[i]), vs = USE(vs[i]);
        add_op(MX_OP_NORM_QKV, (mx_op_params){.norm = {1e-6f, g->d}}, 8,
               (mx_tid[]){h, USE(n1), USE(q), USE(k), USE(v), USE(bq), USE(bk), USE(bv)}, 3, qkv);
        mx_tid q = mx_enc_temp(e, 1, qc), o = mx_enc_temp(e, 1, qc);
        mx_op_params rope = {.rope = {.n_rot = g->hd,
                                      .head_dim = g->hd,
                                      .interleaved = g->interleaved,
                                      .eps = 1e-6f,
                                      .n_head = g->n_head,
                                      .n_kv_head = g->n_kv,
                                      .group = g->group}};
        add_op(MX_OP_ROPE_KV, rope, 8,
               (mx_tid[]){qkv[0], qkv[1], qkv[2], cs, USE(qn), USE(kn), ks, vs}, 1, &q);
        mx_op_params attn = {.attn = {.scale = 1 / sqrtf((float)g->hd),
                                      .softcap = g->softcap,
                                      .n_head = g->n_head,
                                      .n_kv_head = g->n_kv,
                                      .head_dim = g->hd,
                                      .group = g->group,
                                      .window = g->window,
                                      .ctx_bucket = mx_ctx_bucket(ctx),
                                      .one_row = 1}};
        add_op(MX_OP_ATTN, attn, 3, (mx_tid[]){q, ks, vs}, 1, &o);
        mx_tid h2 = mx_enc_temp(e, 1, g->d), a = mx_enc_temp(e, 1, g->ff);
        add_op(MX_OP_MATMUL_ADD, (mx_op_params){.words = {0}}, 4, (mx_tid[]){o, USE(o), USE(bo), h},
               1, &h2);
        add_op(MX_OP_NORM_GLU, (mx_op_params){.glu = {MX_ACT_SILU, 1e-6f}}, 4,
               (mx_tid[]){h2, USE(n2), USE(gate), USE(up)}, 1, &a);
        h = i + 1 < N_LAYERS ? mx_enc_temp(e, 1, g->d) : USE(y);
        add_op(MX_OP_MATMUL_ADD, (mx_op_params){.words = {0}}, 4, (mx_tid[]){a, USE(down), -1, h2},
               1, &h);
    }
#undef USE
}

static void set_budget(int32_t ops) {
    mx_budget b[MX_PHASES];
    for (int p = 0; p < MX_PHASES; p++) {
        b[p] = (mx_budget){.max_ops = ops, .max_mb = MX_BUDGET_UNLIMITED};
    }
    mx_enc_set_budgets(the_rig.enc, b);
}

// Runs the stack at a position. out: y, then the states of the last layer.
static void run_at(const stack *s, int pos, float *y, uint16_t *k, uint16_t *v) {
    rig *r = &the_rig;
    mx_err e = {0};
    size_t n = s->ks[0]->n_bytes;
    for (int i = 0; i < N_LAYERS; i++) {
        assert_int_equal(r->b->ops->write(r->b, s->ks[i]->buf, 0, s->noise, n, &e), MX_OK);
        assert_int_equal(r->b->ops->write(r->b, s->vs[i]->buf, 0, s->noise, n, &e), MX_OK);
    }
    int32_t seq = 0, p = pos, one = 1;
    rig_begin(r, 1, &seq, &p, &one, 0, 1);
    record(s, pos + 1);
    rig_run(r);
    rig_read(r, s->y, y);
    assert_int_equal(r->b->ops->read(r->b, s->ks[N_LAYERS - 1]->buf, 0, k, n, &e), MX_OK);
    assert_int_equal(r->b->ops->read(r->b, s->vs[N_LAYERS - 1]->buf, 0, v, n, &e), MX_OK);
}

// With command buffers of `ops` ops and one more; launches: of a layer.
static void check_bits(const stack *s, int pos, int ops, int launches, const float *want,
                       const uint16_t *wk, const uint16_t *wv) {
    const geometry *g = s->g;
    mx_cuda_counters c0, c1;
    size_t d = sizeof(float) * (size_t)g->d, n = s->ks[0]->n_bytes;
    float *y = mx_alloc(d);
    uint16_t *k = mx_alloc(n), *v = mx_alloc(n);
    set_budget(ops);
    mx_cuda_counters_get(the_rig.b, &c0);
    for (int again = 0; again < 3; again++) {
        run_at(s, pos, y, k, v);
        bool same = !memcmp(want, y, d) && !memcmp(wk, k, n) && !memcmp(wv, v, n);
        int at = 0;
        while (at < g->d - 1 && !memcmp(&want[at], &y[at], 4)) at++;
        if (!same) {
            fail_msg("geometry %d, position %d, buffers of %d ops, run %d: state %s, output %d is "
                     "%.9g for %.9g",
                     (int)(g - geometries), pos, ops, again,
                     memcmp(wk, k, n) || memcmp(wv, v, n) ? "differs" : "equal", at, (double)y[at],
                     (double)want[at]);
        }
    }
    mx_cuda_counters_get(the_rig.b, &c1);
    int made = (int)(c1.kernel_launches - c0.kernel_launches);
    int want_made = N_LAYERS * launches;
    if (made != want_made) {
        fail_msg("geometry %d, position %d, buffers of %d ops: %d launches for %d",
                 (int)(g - geometries), pos, ops, made, want_made);
    }
    mx_free(y), mx_free(k), mx_free(v);
}

static void check_geometry(const geometry *g) {
    mx_cuda_limit_sms(the_rig.b, g->n_sm);
    stack s = open_stack(g);
    size_t d = sizeof(float) * (size_t)g->d, n = s.ks[0]->n_bytes;
    float *want = mx_alloc(d);
    uint16_t *wk = mx_alloc(n), *wv = mx_alloc(n);
    for (size_t i = 0; i < MX_COUNT(positions); i++) {
        set_budget(1); // buffers of two ops: one ends before attention
        run_at(&s, positions[i], want, wk, wv);
        for (int c = 0; c < g->d; c++) assert_true(isfinite(want[c]));
        // buffers of three ops: one ends after attention
        check_bits(&s, positions[i], 2, LAYER_OPS - 1, want, wk, wv);
        check_bits(&s, positions[i], MX_BUDGET_UNLIMITED, LAYER_OPS - 1, want, wk, wv);
    }
    mx_free(want), mx_free(wk), mx_free(wv);
    close_stack(&s);
    mx_cuda_limit_sms(the_rig.b, 0);
}

static void fewer_launches_give_the_same_bits(void **state) {
    (void)state;
    if (!have) skip();
    for (size_t i = 0; i < MX_COUNT(geometries); i++) check_geometry(&geometries[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(fewer_launches_give_the_same_bits)};
    return cmocka_run_group_tests(tests, open_rig, close_rig);
}
