// The op-test runner: optest test [SEED] checks the whole matrix with fresh random inputs;
// optest perf [ISA] [THREADS] measures decode- and prefill-like steps of two small models;
// optest support prints which weight formats each op takes, for the documentation.
#include "support/op_cases.h"

#include "base/mem.h"
#include "base/os.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// ---- test ------------------------------------------------------------------------------------

typedef struct tally {
    rig *rigs;
    int n_rigs, cases, wrong;
    uint64_t seed;
} tally;

static void check(const op_case *c, void *arg) {
    tally *t = arg;
    char name[160];
    int64_t n = op_case_outputs(c);
    op_data d = op_case_inputs(c, t->seed + (uint64_t)t->cases++);
    float *first = mx_calloc((size_t)n, sizeof *first), *out = mx_calloc((size_t)n, sizeof *out);
    double *want = mx_calloc((size_t)n, sizeof *want), worst = 0;
    op_case_oracle(c, &d, want);
    op_case_name(c, name, sizeof name);
    for (int i = 0; i < t->n_rigs; i++) {
        op_case_run(&t->rigs[i], c, &d, i ? out : first);
        if (i && memcmp(out, first, (size_t)n * sizeof *out) != 0) {
            t->wrong++;
            printf("%s: %s and %s differ\n", name, t->rigs[0].name, t->rigs[i].name);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        double e = fabs((double)first[i] - want[i]) / fmax(1, fabs(want[i]));
        worst = e <= worst ? worst : e; // a NaN is the worst
    }
    if (!(worst <= op_case_tolerance(c, false))) {
        t->wrong++;
        printf("%s: error %g, tolerance %g\n", name, worst, op_case_tolerance(c, false));
    }
    mx_free(first);
    mx_free(out);
    mx_free(want);
    op_case_free(&d);
}

static int run_test(uint64_t seed) {
    rig rigs[CPU_ISA_COUNT * 2];
    tally t = {.rigs = rigs, .seed = seed};
    cpu_isa_facts f;
    cpu_isa_read(&f);
    for (int isa = 0; isa < CPU_ISA_COUNT; isa++) {
        if (!cpu_isa_granted(&f, (cpu_isa)isa)) continue;
        rig_open(&rigs[t.n_rigs++], isa, 1, true, false, 12000);
        rig_open(&rigs[t.n_rigs++], isa, 3, false, false, 12000);
    }
    op_cases_each(check, &t);
    for (int i = 0; i < t.n_rigs; i++) rig_close(&rigs[i]);
    printf("seed %llu: %d cases, %d configurations, %d wrong\n", (unsigned long long)seed, t.cases,
           t.n_rigs, t.wrong);
    return t.wrong != 0;
}

// ---- perf ------------------------------------------------------------------------------------

typedef struct model { // geometry of a perf step
    const char *name;
    int layers, d, ff, n_head, n_kv, head_dim, vocab;
    mx_act act;
} model;

static const model models[] = {
    {"SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152, MX_ACT_SILU},
    {"Gemma-3-270M", 18, 640, 2048, 4, 1, 256, 262144, MX_ACT_GELU_TANH},
};

enum { PERF_CTX = 4096, PERF_PAGE = 32, PERF_ROWS = 512 };

typedef struct bench {
    mx_backend *b;
    mx_enc *enc;
    const model *m;
    mx_step_caps caps;
    mx_step_io io[MX_STEP_SLOTS];
    double weight_bytes; // of all layers
} bench;

static void must(mx_status st, const mx_err *e) {
    CHECKF(st == MX_OK, "%s", e->msg);
}

// Every layer has its own weights: a copy each, so that caches do not flatter.
static mx_tensor *layer_weights(bench *p, mx_wfmt f, rng *g, int64_t rows, int64_t cols) {
    mx_err e = {0};
    mx_tensor *t = mx_calloc((size_t)p->m->layers, sizeof *t);
    rig_matrix m = rig_random_matrix(g, f, rows, cols);
    for (int i = 0; i < p->m->layers; i++) {
        must(p->b->ops->upload(p->b, &t[i], &m.view, &e), &e);
        p->weight_bytes += (double)t[i].n_bytes;
    }
    mx_free(m.owner);
    return t;
}

static mx_tensor vector_of(mx_backend *b, int n) {
    mx_err e = {0};
    mx_tensor t;
    float *x = mx_calloc((size_t)n, sizeof *x);
    for (int i = 0; i < n; i++) x[i] = 1.0f / (1.0f + (float)i);
    mx_wview v = {.fmt = mx_wfmt_of(MX_F32), .n_rows = 1, .n_cols = n, .data = x};
    must(b->ops->upload(b, &t, &v, &e), &e);
    mx_free(x);
    return t;
}

static mx_tensor state_of(bench *p) {
    mx_err e = {0};
    mx_tensor t = {.n_rows = (int64_t)PERF_CTX * p->m->n_kv,
                   .n_cols = p->m->head_dim,
                   .ld = p->m->head_dim,
                   .kind = MX_T_STATE,
                   .fmt = mx_wfmt_of(MX_F16)};
    t.n_bytes = (size_t)(t.n_rows * t.n_cols) * 2;
    must(p->b->ops->alloc(p->b, &t.buf, t.n_bytes, MX_USE_STATE, &e), &e);
    return t;
}

typedef struct layers {
    mx_tensor *q, *k, *v, *o, *gate, *up, *down, *ks, *vs;
    mx_tensor table, norm, freq;
} layers;

static mx_tid use(bench *p, const mx_tensor *t) {
    return mx_enc_use(p->enc, t);
}

static void record_layer(bench *p, const layers *l, int i, mx_tid *x, mx_tid cs, int rows,
                         int ctx) {
    const model *m = p->m;
    mx_enc *e = p->enc;
    int nq = m->n_head * m->head_dim, nk = m->n_kv * m->head_dim;
    mx_tid q = mx_enc_temp(e, rows, nq), k = mx_enc_temp(e, rows, nk), v = mx_enc_temp(e, rows, nk);
    mx_tid rq = mx_enc_temp(e, rows, nq), at = mx_enc_temp(e, rows, nq);
    mx_tid h = mx_enc_temp(e, rows, m->d), f = mx_enc_temp(e, rows, m->ff);
    mx_tid y = mx_enc_temp(e, rows, m->d);
    mx_tid norm = use(p, &l->norm), ks = use(p, &l->ks[i]), vs = use(p, &l->vs[i]);
    mx_enc_op(e, (mx_op){.kind = MX_OP_NORM_QKV,
                         .n_in = 8,
                         .n_out = 3,
                         .in = {*x, norm, use(p, &l->q[i]), use(p, &l->k[i]), use(p, &l->v[i]),
                                MX_NONE, MX_NONE, MX_NONE},
                         .out = {q, k, v},
                         .p.norm = {1e-5f, m->d}});
    mx_enc_op(e, (mx_op){.kind = MX_OP_ROPE_KV,
                         .n_in = 8,
                         .n_out = 1,
                         .in = {q, k, v, cs, MX_NONE, MX_NONE, ks, vs},
                         .out = {rq},
                         .p.rope = {.mscale = 1,
                                    .n_rot = m->head_dim,
                                    .head_dim = m->head_dim,
                                    .n_head = m->n_head,
                                    .n_kv_head = m->n_kv}});
    mx_enc_op(e, (mx_op){.kind = MX_OP_ATTN,
                         .n_in = 3,
                         .n_out = 1,
                         .in = {rq, ks, vs},
                         .out = {at},
                         .p.attn = {.scale = 0.125f,
                                    .n_head = m->n_head,
                                    .n_kv_head = m->n_kv,
                                    .head_dim = m->head_dim,
                                    .ctx_bucket = mx_ctx_bucket(ctx)}});
    mx_enc_op(e, (mx_op){.kind = MX_OP_MATMUL_ADD,
                         .n_in = 4,
                         .n_out = 1,
                         .in = {at, use(p, &l->o[i]), MX_NONE, *x},
                         .out = {h}});
    mx_enc_op(e, (mx_op){.kind = MX_OP_NORM_GLU,
                         .n_in = 4,
                         .n_out = 1,
                         .in = {h, norm, use(p, &l->gate[i]), use(p, &l->up[i])},
                         .out = {f},
                         .p.glu = {(int32_t)m->act, 1e-5f}});
    mx_enc_op(e, (mx_op){.kind = MX_OP_MATMUL_ADD,
                         .n_in = 4,
                         .n_out = 1,
                         .in = {f, use(p, &l->down[i]), MX_NONE, h},
                         .out = {y}});
    *x = y;
}

static void fill_step(bench *p, int slot, int rows, int pos0) {
    mx_step_io *io = &p->io[slot];
    for (int i = 0; i < rows; i++) {
        io->ids[i] = (i * 37 + pos0) % p->m->vocab;
        io->pos[i] = pos0 + i;
        io->tok_range[i] = 0;
        io->kv_slot[0][i] = pos0 + i;
    }
    for (int i = 0; i < PERF_CTX / PERF_PAGE; i++) io->page_table[0][i] = i;
    io->range_first[0] = 0;
    io->range_first[1] = rows;
    io->range_pos0[0] = pos0;
    io->range_len[0] = pos0 + rows;
    io->out_tok[0] = rows - 1;
    io->sample[0] = (mx_sample_row){0};
    io->counts[0] = rows;
    io->counts[1] = io->counts[2] = 1;
}

// One step: rows at pos0, the head for the last. skip: 'a' without attention, 'm' attention alone.
static double run_step(bench *p, layers *l, int slot, int rows, int pos0, char skip) {
    mx_err e = {0};
    mx_step_range range = {.n_tok = rows, .pos0 = pos0, .phase = MX_PHASE_DECODE};
    mx_step_facts facts = {.phase = range.phase,
                           .n_tok = rows,
                           .n_rows = rows,
                           .n_out = 1,
                           .n_ranges = 1,
                           .ranges = &range};
    fill_step(p, slot, rows, pos0);
    mx_enc_begin(p->enc, &facts);
    mx_tid x = mx_enc_temp(p->enc, rows, p->m->d), cs = mx_enc_temp(p->enc, rows, p->m->head_dim);
    mx_tid y = mx_enc_temp(p->enc, 1, p->m->d);
    mx_tensor logits = {.kind = MX_T_LOGITS,
                        .n_rows = 1,
                        .n_cols = p->m->vocab,
                        .ld = p->m->vocab,
                        .fmt = mx_wfmt_of(MX_F32),
                        .n_bytes = (size_t)p->m->vocab * 4};
    mx_tid out = use(p, &logits);
    mx_enc_op(p->enc, (mx_op){.kind = MX_OP_EMBED,
                              .n_in = 1,
                              .n_out = 1,
                              .in = {use(p, &l->table)},
                              .out = {x},
                              .p.embed = {1.0f}});
    mx_enc_op(p->enc, (mx_op){.kind = MX_OP_ROPE_TABLE,
                              .n_in = 1,
                              .n_out = 1,
                              .in = {use(p, &l->freq)},
                              .out = {cs},
                              .p.rope = {.mscale = 1, .n_rot = p->m->head_dim}});
    for (int i = 0; i < p->m->layers; i++) {
        if (skip == 'm') {
            mx_tid q = mx_enc_temp(p->enc, rows, p->m->n_head * p->m->head_dim);
            mx_tid at = mx_enc_temp(p->enc, rows, p->m->n_head * p->m->head_dim);
            mx_enc_op(p->enc, (mx_op){.kind = MX_OP_ATTN,
                                      .n_in = 3,
                                      .n_out = 1,
                                      .in = {q, use(p, &l->ks[i]), use(p, &l->vs[i])},
                                      .out = {at},
                                      .p.attn = {.scale = 0.125f,
                                                 .n_head = p->m->n_head,
                                                 .n_kv_head = p->m->n_kv,
                                                 .head_dim = p->m->head_dim,
                                                 .ctx_bucket = mx_ctx_bucket(pos0 + rows)}});
        } else {
            record_layer(p, l, i, &x, cs, rows, pos0 + rows);
        }
    }
    if (skip != 'm') {
        mx_enc_op(p->enc,
                  (mx_op){.kind = MX_OP_GATHER, .n_in = 1, .n_out = 1, .in = {x}, .out = {y}});
        mx_enc_op(p->enc, (mx_op){.kind = MX_OP_NORM_MATMUL,
                                  .n_in = 4,
                                  .n_out = 1,
                                  .in = {y, use(p, &l->norm), use(p, &l->table), MX_NONE},
                                  .out = {out},
                                  .p.norm = {1e-5f, p->m->d}});
        mx_enc_op(p->enc, (mx_op){.kind = MX_OP_SAMPLE, .n_in = 1, .n_out = 0, .in = {out}});
    }
    mx_plan *plan;
    mx_ticket t;
    mx_run_stats st;
    must(mx_enc_end(p->enc, &plan, &e), &e);
    must(mx_enc_submit(p->enc, plan, slot, &t, &e), &e);
    must(p->b->ops->wait(p->b, t, true, true, NULL, &st, &e), &e);
    return st.seconds;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Median and least of n steps, and the processor time of all threads (comparable on a busy machine
// with one thread: nothing spins).
static void time_steps(bench *p, layers *l, const char *what, int n, int rows, int pos0, char skip,
                       double bytes) {
    double s[64];
    run_step(p, l, 0, rows, pos0, skip);
    const cpu_backend *own = (const cpu_backend *)(const void *)p->b;
    uint64_t shed = own->n_shed_steps;
    double cpu = cpu_seconds();
    for (int i = 0; i < n; i++) s[i] = run_step(p, l, i % 2, rows, pos0, skip);
    cpu = (cpu_seconds() - cpu) / n;
    qsort(s, (size_t)n, sizeof *s, by_value);
    printf(
        "  %-28s %9.3f ms (least %9.3f, cpu %9.3f) %9.1f tok/s %7.2f GB/s, %d on fewer threads\n",
        what, s[n / 2] * 1e3, s[0] * 1e3, cpu * 1e3, rows / s[n / 2], bytes / s[n / 2] * 1e-9,
        (int)(own->n_shed_steps - shed));
    fflush(stdout);
}

static void perf_model(const model *m, int isa, int threads, mx_wfmt f) {
    mx_err e = {0};
    bench p = {.m = m};
    char name[48];
    cpu_options o = {.n_threads = threads, .isa = isa, .exact = -1};
    must(cpu_open_with(&o, &p.b, &e), &e);
    static const mx_budget any = {.max_ops = MX_BUDGET_UNLIMITED, .max_mb = MX_BUDGET_UNLIMITED};
    mx_budget budgets[MX_PHASES] = {any, any, any};
    p.enc = mx_enc_open(p.b, budgets, 16, true);
    p.caps = (mx_step_caps){.max_tok = PERF_ROWS,
                            .max_range = 1,
                            .max_out = 1,
                            .n_vocab = m->vocab,
                            .n_groups = 1,
                            .page_tokens = {PERF_PAGE},
                            .max_pages = {PERF_CTX / PERF_PAGE}};
    must(p.b->ops->step_init(p.b, &p.caps, p.io, &e), &e);
    rng g = {7};
    int nq = m->n_head * m->head_dim, nk = m->n_kv * m->head_dim;
    layers l = {.q = layer_weights(&p, f, &g, nq, m->d),
                .k = layer_weights(&p, f, &g, nk, m->d),
                .v = layer_weights(&p, f, &g, nk, m->d),
                .o = layer_weights(&p, f, &g, m->d, nq),
                .gate = layer_weights(&p, f, &g, m->ff, m->d),
                .up = layer_weights(&p, f, &g, m->ff, m->d),
                .down = layer_weights(&p, f, &g, m->d, m->ff)};
    rig_matrix t = rig_random_matrix(&g, f, m->vocab, m->d);
    must(p.b->ops->upload(p.b, &l.table, &t.view, &e), &e);
    l.norm = vector_of(p.b, m->d);
    l.freq = vector_of(p.b, m->head_dim / 2);
    l.ks = mx_calloc((size_t)m->layers, sizeof *l.ks);
    l.vs = mx_calloc((size_t)m->layers, sizeof *l.vs);
    for (int i = 0; i < m->layers; i++) {
        l.ks[i] = state_of(&p);
        l.vs[i] = state_of(&p);
    }
    mx_backend_facts facts;
    p.b->ops->facts(p.b, &facts);
    printf("%s, %s, %s, %d threads\n", m->name, mx_wfmt_name(f, name, sizeof name), facts.arch,
           facts.n_threads);
    double w = p.weight_bytes + (double)l.table.n_bytes, kv = 4.0 * m->layers * nk;
    time_steps(&p, &l, "decode at 16", 41, 1, 16, 0, w);
    time_steps(&p, &l, "decode at 1000", 21, 1, 1000, 0, w + 1000 * kv);
    time_steps(&p, &l, "decode at 4090", 21, 1, 4090, 0, w + 4090 * kv);
    time_steps(&p, &l, "attention alone at 200", 21, 1, 200, 'm', 200 * kv);
    time_steps(&p, &l, "attention alone at 4090", 21, 1, 4090, 'm', 4090 * kv);
    time_steps(&p, &l, "prefill 512", 5, 512, 0, 0, w);
    time_steps(&p, &l, "attention alone, 512", 5, 512, 0, 'm', 512 * kv);
    time_steps(&p, &l, "attention alone, last of 4096", 3, 512, 3584, 'm', 4096 * kv);
    mx_enc_close(p.enc);
    mx_free(t.owner);
    p.b->ops->close(p.b);
}

// ---- support ---------------------------------------------------------------------------------

static int run_support(void) {
    char name[48];
    printf("| weight format | packed | bits a weight |\n|---|---|---|\n");
    for (int i = 0; i < OP_FORMATS; i++) {
        uint16_t pack;
        bool packed = cpu_kernels_scalar.pack_bytes(op_formats[i], 64, 256, false, &pack) > 0;
        printf("| %s | %s | %.2f |\n", mx_wfmt_name(op_formats[i], name, sizeof name),
               packed ? "yes" : "no", mx_wfmt_bits_per_weight(op_formats[i]));
    }
    return 0;
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "test";
    if (!strcmp(mode, "support")) return run_support();
    if (!strcmp(mode, "perf")) {
        int isa = -1, threads = 0;
        int64_t n;
        for (int i = 0; argc > 2 && i < CPU_ISA_COUNT; i++) {
            if (!strcmp(argv[2], cpu_isa_name((cpu_isa)i))) isa = i;
        }
        if (argc > 3 && mx_parse_i64(argv[3], &n)) threads = (int)n;
        for (size_t i = 0; i < MX_COUNT(models); i++) {
            perf_model(&models[i], isa, threads, mx_wfmt_of(MX_Q4_1));
        }
        return 0;
    }
    if (strcmp(mode, "test") != 0) {
        fprintf(stderr, "usage: optest test [SEED] | perf [ISA] [THREADS] | support\n");
        return 2;
    }
    uint64_t seed = (uint64_t)(mx_wall_s() * 1000);
    if (argc > 2 && !mx_parse_u64(argv[2], &seed)) return 2;
    return run_test(seed);
}
