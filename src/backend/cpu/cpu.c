// The CPU backend behind backend.h: storage, weights, step blocks, and the run of a plan. Owns the
// pool, the scratch and the step blocks; buffers belong to their callers. Kernels and their choice
// are in k_*.c and isa.c, the walk of a plan in exec*.c.
#include "backend/cpu/cpu.h"

#include "backend/cpu/exec_int.h"
#include "base/knobs.h"
#include "base/mem.h"
#include "base/os.h"

#include <stdio.h>
#include <string.h>

enum { READ_PAST = 64 }; // kernels may load (never use) up to a vector past an extent

static cpu_backend *self(mx_backend *b) {
    return (cpu_backend *)(void *)b;
}

static void op_facts(mx_backend *b, mx_backend_facts *out) {
    *out = (mx_backend_facts){.kind = MX_DEVICE_CPU,
                              .n_threads = cpu_pool_threads(self(b)->pool),
                              .memory_bytes = mx_mem_total_bytes(),
                              .available_bytes = mx_mem_available_bytes(),
                              .host_memory = true,
                              .deterministic = true};
    mx_cpu_model(out->device, sizeof out->device);
    snprintf(out->arch, sizeof out->arch, "%s", self(b)->k->isa);
}

// ---- Storage ---------------------------------------------------------------------------------

static mx_status op_alloc(mx_backend *b, mx_buffer **out, size_t n_bytes, mx_usage use,
                          mx_err *err) {
    static const char *const what[] = {"weights", "sequence state", "step arena", "step block"};
    (void)b;
    *out = NULL;
    size_t all;
    void *p = mx_add_size(n_bytes, READ_PAST, &all) ? mx_alloc_large(all) : NULL;
    if (!p) {
        return mx_err_set(err, MX_NOMEM, "%s: %zu bytes asked for, %llu available", what[use],
                          n_bytes, (unsigned long long)mx_mem_available_bytes());
    }
    mx_buffer *buf = mx_calloc(1, sizeof *buf);
    *buf = (mx_buffer){.n_bytes = n_bytes, .host = p, .usage = use};
    *out = buf;
    return MX_OK;
}

static void op_free(mx_backend *b, mx_buffer *buf) {
    (void)b;
    if (!buf) return;
    if (!buf->borrowed) mx_free_large(buf->host, buf->n_bytes + READ_PAST);
    mx_free(buf);
}

static mx_status check_range(const mx_buffer *buf, size_t offset, size_t n, mx_err *err) {
    if (offset <= buf->n_bytes && n <= buf->n_bytes - offset) return MX_OK;
    return mx_err_set(err, MX_INVALID, "bytes %zu + %zu of a buffer of %zu", offset, n,
                      buf->n_bytes);
}

static mx_status op_write(mx_backend *b, mx_buffer *buf, size_t offset, const void *src, size_t n,
                          mx_err *err) {
    (void)b;
    MX_TRY(check_range(buf, offset, n, err));
    if (buf->borrowed) return mx_err_set(err, MX_INVALID, "write into a mapped file");
    memcpy((uint8_t *)buf->host + offset, src, n);
    return MX_OK;
}

static mx_status op_read(mx_backend *b, const mx_buffer *buf, size_t offset, void *dst, size_t n,
                         mx_err *err) {
    (void)b;
    MX_TRY(check_range(buf, offset, n, err));
    memcpy(dst, (const uint8_t *)buf->host + offset, n);
    return MX_OK;
}

// ---- Weights ---------------------------------------------------------------------------------

static mx_status alloc_weight(mx_backend *b, mx_tensor *t, size_t n_bytes, mx_err *err) {
    t->n_bytes = n_bytes;
    return op_alloc(b, &t->buf, n_bytes, MX_USE_WEIGHT, err);
}

// Vectors (norms, biases, frequencies) become float32.
static mx_status upload_vector(mx_backend *b, mx_tensor *t, const mx_wview *w, mx_err *err) {
    MX_TRY(alloc_weight(b, t, (size_t)w->n_cols * sizeof(float), err));
    t->fmt = mx_wfmt_of(MX_F32);
    mx_dequant_row(w, 0, t->buf->host);
    return MX_OK;
}

// One plane is used where it lies; affine's three are put behind each other.
static mx_status upload_rows(mx_backend *b, mx_tensor *t, const mx_wview *w, mx_err *err) {
    size_t row, code, rows = (size_t)w->n_rows;
    CHECK(mx_wfmt_row_bytes(w->fmt, w->n_cols, &row) &&
          mx_wfmt_code_bytes(w->fmt, w->n_cols, &code));
    if (w->fmt.dtype != MX_AFFINE) {
        t->n_bytes = row * rows;
        t->buf = mx_calloc(1, sizeof *t->buf);
        *t->buf = (mx_buffer){.n_bytes = t->n_bytes,
                              .host = (void *)(uintptr_t)w->data,
                              .usage = MX_USE_WEIGHT,
                              .borrowed = true};
        return MX_OK;
    }
    size_t plane = (row - code) / 2 * rows;
    MX_TRY(alloc_weight(b, t, row * rows, err));
    t->scales_offset = code * rows;
    t->biases_offset = t->scales_offset + plane;
    uint8_t *p = t->buf->host;
    memcpy(p, w->data, code * rows);
    memcpy(p + t->scales_offset, w->scales, plane);
    memcpy(p + t->biases_offset, w->biases, plane);
    return MX_OK;
}

typedef struct pack_job {
    const cpu_kernels *k;
    const mx_wview *w;
    uint16_t pack;
    int64_t n_tiles, run;
    uint8_t *dst;
    _Atomic int64_t next;
} pack_job;

static void pack_tiles(void *arg, int worker, int n) {
    pack_job *j = arg;
    (void)worker;
    (void)n;
    for (int64_t t; (t = atomic_fetch_add(&j->next, j->run)) < j->n_tiles;) {
        j->k->pack(j->w, j->pack, t, MX_MIN(t + j->run, j->n_tiles), j->dst);
    }
}

static mx_status op_upload(mx_backend *b, mx_tensor *out, const mx_wview *w, mx_err *err) {
    cpu_backend *s = self(b);
    mx_tensor t = {.n_rows = w->n_rows,
                   .n_cols = w->n_cols,
                   .ld = w->n_cols,
                   .fmt = w->fmt,
                   .kind = MX_T_WEIGHT,
                   .layout = MX_LAYOUT_ROWS};
    mx_status st;
    if (w->n_rows == 1 && w->fmt.dtype != MX_AFFINE) {
        st = upload_vector(b, &t, w, err);
        *out = t;
        return st;
    }
    size_t packed =
        s->k->pack_bytes ? s->k->pack_bytes(w->fmt, w->n_rows, w->n_cols, s->exact, &t.pack) : 0;
    if (!packed) {
        st = upload_rows(b, &t, w, err);
        *out = t;
        return st;
    }
    MX_TRY(alloc_weight(b, &t, packed, err));
    t.layout = MX_LAYOUT_PACKED;
    int64_t n = (w->n_rows + s->k->tile_rows - 1) / s->k->tile_rows;
    pack_job j = {.k = s->k, .w = w, .pack = t.pack, .n_tiles = n, .run = 8, .dst = t.buf->host};
    cpu_pool_run(s->pool, cpu_pool_threads(s->pool), pack_tiles, &j);
    *out = t;
    return MX_OK;
}

// ---- Plans and steps -------------------------------------------------------------------------

static bool op_supports(mx_backend *b, const mx_op *op, const mx_tensor *tensors) {
    (void)b;
    if (op->kind == MX_OP_ROPE_KV) return op->p.rope.head_dim <= CPU_MAX_HEAD_DIM;
    if (op->kind == MX_OP_ATTN) {
        const mx_tensor *k = &tensors[op->in[1]];
        return k->fmt.dtype == MX_F16 || k->fmt.dtype == MX_F32;
    }
    return true;
}

static int32_t op_variants(mx_backend *b, const mx_op *op, const mx_tensor *tensors,
                           const char **names, int32_t cap) {
    (void)b;
    (void)op;
    (void)tensors;
    if (cap > 0) names[0] = "default";
    return 1;
}

static void free_slots(cpu_backend *s) {
    for (int i = 0; i < MX_STEP_SLOTS; i++) {
        mx_free_large(s->slot_mem[i], s->slot_bytes);
        s->slot_mem[i] = NULL;
    }
}

static mx_status op_step_init(mx_backend *b, const mx_step_caps *caps, mx_step_io io[MX_STEP_SLOTS],
                              mx_err *err) {
    cpu_backend *s = self(b);
    for (int g = 0; g < caps->n_groups; g++) {
        if (caps->page_tokens[g] < 1 || caps->page_tokens[g] % CPU_KV_BLOCK) {
            return mx_err_set(
                err, MX_INVALID,
                "layer group %d: pages of %d tokens; the CPU backend needs a multiple "
                "of %d",
                g, caps->page_tokens[g], CPU_KV_BLOCK);
        }
    }
    free_slots(s);
    s->caps = *caps;
    s->slot_bytes = mx_step_bind(caps, NULL, NULL).total_bytes;
    for (int i = 0; i < MX_STEP_SLOTS; i++) {
        s->slot_mem[i] = mx_alloc_large(s->slot_bytes);
        if (!s->slot_mem[i]) {
            free_slots(s);
            return mx_err_set(err, MX_NOMEM, "step block: %zu bytes", s->slot_bytes);
        }
        mx_step_bind(caps, s->slot_mem[i], &s->io[i]);
        io[i] = s->io[i];
    }
    s->last_slot = -1;
    return MX_OK;
}

// Scratch blocks only grow; no step is in flight here.
static bool grow(uint8_t **p, size_t *have, size_t want, size_t copies) {
    want = cpu_align(want);
    if (want <= *have) return true;
    mx_free_large(*p, *have * copies);
    *have = 0;
    *p = mx_alloc_large(want * copies);
    if (*p) *have = want;
    return *p != NULL;
}

static bool grow_claims(cpu_backend *s, int32_t n) {
    if (n <= s->n_claims) return true;
    mx_free((void *)s->claims);
    s->claims = mx_calloc((size_t)n, sizeof *s->claims);
    s->n_claims = n;
    return true;
}

static mx_status op_plan_make(mx_backend *b, mx_plan *plan, mx_buffer *arena, mx_err *err) {
    cpu_backend *s = self(b);
    cpu_scratch most = {0};
    for (int32_t i = 0; i < plan->n_ops; i++) {
        cpu_scratch one = cpu_op_scratch(s, &plan->ops[i], plan->tensors);
        most.priv = MX_MAX(most.priv, one.priv);
        most.shared = MX_MAX(most.shared, one.shared);
    }
    size_t n = (size_t)cpu_pool_threads(s->pool), have[2] = {s->shared_bytes, s->shared_bytes};
    bool ok = grow(&s->priv, &s->priv_bytes, most.priv, n) &&
              grow(&s->shared[0], &have[0], most.shared, 1) &&
              grow(&s->shared[1], &have[1], most.shared, 1) && grow_claims(s, plan->n_ops);
    if (!ok) {
        for (int i = 0; i < 2; i++) {
            mx_free_large(s->shared[i], have[i]);
            s->shared[i] = NULL;
        }
        s->shared_bytes = 0;
        return mx_err_set(err, MX_NOMEM, "scratch: %zu x %zu + 2 x %zu bytes", n, most.priv,
                          most.shared);
    }
    s->shared_bytes = have[0];
    plan->handle = arena;
    return MX_OK;
}

static void op_plan_free(mx_backend *b, mx_plan *plan) {
    (void)b;
    plan->handle = NULL; // the arena is the encoder's
}

// SAMPLE is greedy here: other rows are the host's.
static mx_status check_step(const cpu_backend *s, const mx_plan *plan, const mx_step_facts *facts,
                            const mx_step_io *io, mx_err *err) {
    if (!s->slot_mem[0]) return mx_err_set(err, MX_INTERNAL, "submit before step_init");
    if (facts->n_rows != plan->n_rows || facts->n_out != plan->n_out) {
        return mx_err_set(err, MX_INTERNAL, "step of %d rows, %d outputs; the plan has %d and %d",
                          facts->n_rows, facts->n_out, plan->n_rows, plan->n_out);
    }
    for (int32_t i = 0; i < io->counts[2]; i++) {
        if (!io->sample[i].host && io->sample[i].temperature > 0) {
            return mx_err_set(err, MX_UNSUPPORTED,
                              "output %d: sampling at a temperature on the CPU is the host's work",
                              i);
        }
    }
    return MX_OK;
}

static mx_status op_submit(mx_backend *b, mx_plan *plan, const mx_step_facts *facts, int32_t slot,
                           mx_ticket *out, mx_err *err) {
    cpu_backend *s = self(b);
    CHECK(slot >= 0 && slot < MX_STEP_SLOTS);
    MX_TRY(check_step(s, plan, facts, &s->io[slot], err));
    const mx_buffer *arena = plan->handle;
    cpu_run run = {.b = s,
                   .plan = plan,
                   .io = &s->io[slot],
                   .prev_id = s->last_slot < 0 ? NULL : s->io[s->last_slot].out_id,
                   .arena = arena ? arena->host : NULL};
    for (int32_t i = 0; i < plan->n_ops; i++) {
        atomic_store_explicit(&s->claims[i], 0, memory_order_relaxed);
    }
    double t0 = mx_now_s();
    if (s->shed.n_active < s->shed.n_threads) s->n_shed_steps++;
    cpu_pool_run(s->pool, s->shed.n_active, cpu_walk, &run);
    double took = mx_now_s() - t0;
    cpu_shed_update(&s->shed, took, cpu_pool_lost_s(s->pool));
    s->last_slot = slot;
    s->stats[slot] =
        (mx_run_stats){.seconds = took, .n_buffers = plan->n_segs, .n_ops = plan->n_ops};
    *out = (mx_ticket){.slot = slot, .serial = ++s->serial};
    return MX_OK;
}

static mx_status op_wait(mx_backend *b, mx_ticket t, bool block, bool logits, bool *done,
                         mx_run_stats *stats, mx_err *err) {
    (void)block;
    (void)logits;
    if (t.serial == 0 || t.serial > self(b)->serial || t.slot < 0 || t.slot >= MX_STEP_SLOTS) {
        return mx_err_set(err, MX_INTERNAL, "wait for a step that was not submitted");
    }
    if (done) *done = true;
    if (stats) *stats = self(b)->stats[t.slot];
    return MX_OK;
}

static void op_close(mx_backend *b) {
    cpu_backend *s = self(b);
    size_t n = s->pool ? (size_t)cpu_pool_threads(s->pool) : 0;
    free_slots(s);
    mx_free_large(s->priv, s->priv_bytes * n);
    for (int i = 0; i < 2; i++) mx_free_large(s->shared[i], s->shared_bytes);
    mx_free((void *)s->claims);
    cpu_pool_close(s->pool);
    mx_free(s);
}

static const mx_backend_ops cpu_ops = {.facts = op_facts,
                                       .alloc = op_alloc,
                                       .free = op_free,
                                       .upload = op_upload,
                                       .write = op_write,
                                       .read = op_read,
                                       .supports = op_supports,
                                       .variants = op_variants,
                                       .step_init = op_step_init,
                                       .plan_make = op_plan_make,
                                       .plan_free = op_plan_free,
                                       .submit = op_submit,
                                       .wait = op_wait,
                                       .close = op_close};

// ---- Opening ---------------------------------------------------------------------------------

static const cpu_kernels *table_of(cpu_isa isa) {
#if defined(__x86_64__)
    if (isa == CPU_ISA_AVX512) return &cpu_kernels_avx512;
    if (isa == CPU_ISA_AVXVNNI) return &cpu_kernels_avxvnni;
    if (isa == CPU_ISA_AVX2) return &cpu_kernels_avx2;
#endif
    (void)isa;
    return &cpu_kernels_scalar;
}

mx_status cpu_open_with(const cpu_options *o, mx_backend **out, mx_err *err) {
    *out = NULL;
    cpu_isa_facts facts;
    cpu_isa isa = CPU_ISA_SCALAR;
    cpu_isa_read(&facts);
    if (o->isa < 0) {
        MX_TRY(cpu_isa_choose(&isa, &facts, mx_knob_text(MX_KNOB_CPU_ISA), err));
    } else {
        MX_TRY(cpu_isa_choose(&isa, &facts, cpu_isa_name((cpu_isa)o->isa), err));
    }
    int64_t n = o->n_threads > 0 ? o->n_threads : mx_knob_int(MX_KNOB_THREADS, 0);
    if (n < 0 || n > CPU_MAX_THREADS) {
        return mx_err_set(err, MX_INVALID, "MLXCEL_THREADS: %lld; from 0 (automatic) to %d",
                          (long long)n, CPU_MAX_THREADS);
    }
    if (n == 0) n = MX_MIN(mx_cpu_default_threads(), (int)CPU_MAX_THREADS);
    cpu_backend *s = mx_calloc(1, sizeof *s);
    s->base = (mx_backend){.ops = &cpu_ops, .name = "cpu"};
    s->k = table_of(isa);
    s->exact = o->exact < 0 ? mx_knob_flag(MX_KNOB_EXACT) : o->exact > 0;
    s->last_slot = -1;
    mx_status st = cpu_pool_open(&s->pool, (int)n, err);
    if (st != MX_OK) {
        mx_free(s);
        return st;
    }
    cpu_shed_init(&s->shed, (int)n);
    *out = &s->base;
    return MX_OK;
}

mx_status mx_cpu_open(int n_threads, mx_backend **out, mx_err *err) {
    return mx_cpu_open_with(&(mx_cpu_options){.n_threads = n_threads}, out, err);
}

mx_status mx_cpu_open_with(const mx_cpu_options *o, mx_backend **out, mx_err *err) {
    cpu_options c = {.n_threads = o->n_threads, .isa = -1, .exact = o->exact ? 1 : -1};
    return cpu_open_with(&c, out, err);
}
