// The recorder and the plan cache. Owned by the engine thread. One recording: ops are appended and
// hashed as they come; the end looks the hash up, and only a new list is laid out (liveness),
// checked for hazards and handed to the backend. Does not run anything itself.
#include "backend/encoder.h"

#include "base/mem.h"

#include <math.h>
#include <string.h>

typedef struct plan_entry {
    mx_plan plan;
    struct plan_entry *next_hash, *newer, *older;
} plan_entry;

enum { HASH_BUCKETS = 4096, USE_SLOTS = 4096 };

// Pointer -> tensor id of the present recording; entries of older recordings have another stamp.
typedef struct use_slot {
    const mx_tensor *p;
    uint64_t stamp;
    mx_tid id;
} use_slot;

struct mx_enc {
    mx_backend *backend;
    mx_budget budget[MX_PHASES];
    bool fuse;
    // the recording
    const mx_step_facts *facts;
    mx_err err;
    uint64_t hash, stamp;
    int16_t layer;
    uint8_t role;
    mx_op *ops;
    int32_t n_ops, cap_ops;
    mx_tensor *tensors;
    uint64_t *seen; // per tensor: the segment (stamped) that counted it last
    int32_t n_tensors, cap_tensors;
    mx_segment *segs;
    int32_t n_segs, cap_segs;
    uint32_t slow[MX_SLOW_COUNT];
    double seg_count; // bytes or elements of the open segment
    uint64_t seg_serial;
    use_slot uses[USE_SLOTS];
    // plans
    plan_entry *buckets[HASH_BUCKETS], *newest, *oldest;
    int32_t n_plans, plan_cap;
    mx_buffer *arena;
    mx_enc_stats stats;
};

mx_enc *mx_enc_open(mx_backend *b, const mx_budget budgets[MX_PHASES], int32_t plan_cap,
                    bool fuse) {
    mx_enc *e = mx_calloc(1, sizeof *e);
    e->backend = b;
    memcpy(e->budget, budgets, sizeof e->budget);
    e->plan_cap = MX_MAX(plan_cap, 1);
    e->fuse = fuse;
    return e;
}

// ---- Plan cache ------------------------------------------------------------------------------

static void unlink_lru(mx_enc *e, plan_entry *p) {
    if (p->newer)
        p->newer->older = p->older;
    else
        e->newest = p->older;
    if (p->older)
        p->older->newer = p->newer;
    else
        e->oldest = p->newer;
    p->newer = p->older = NULL;
}

static void push_newest(mx_enc *e, plan_entry *p) {
    p->older = e->newest;
    p->newer = NULL;
    if (e->newest)
        e->newest->newer = p;
    else
        e->oldest = p;
    e->newest = p;
}

static void free_plan(mx_enc *e, plan_entry *p) {
    unlink_lru(e, p);
    plan_entry **at = &e->buckets[p->plan.key % HASH_BUCKETS];
    while (*at != p) at = &(*at)->next_hash;
    *at = p->next_hash;
    e->backend->ops->plan_free(e->backend, &p->plan);
    mx_free(p->plan.ops);
    mx_free(p->plan.tensors);
    mx_free(p->plan.segs);
    mx_free(p);
    e->n_plans--;
}

static void drop_plans(mx_enc *e) {
    while (e->oldest) free_plan(e, e->oldest);
}

static plan_entry *find_plan(mx_enc *e, uint64_t key) {
    plan_entry *p = e->buckets[key % HASH_BUCKETS];
    while (p && p->plan.key != key) p = p->next_hash;
    return p;
}

void mx_enc_close(mx_enc *e) {
    if (!e) return;
    drop_plans(e);
    if (e->arena) e->backend->ops->free(e->backend, e->arena);
    mx_free(e->ops);
    mx_free(e->tensors);
    mx_free(e->seen);
    mx_free(e->segs);
    mx_free(e);
}

void mx_enc_set_budgets(mx_enc *e, const mx_budget budgets[MX_PHASES]) {
    mx_enc_next_budgets(e, budgets);
    drop_plans(e);
}

void mx_enc_next_budgets(mx_enc *e, const mx_budget budgets[MX_PHASES]) {
    memcpy(e->budget, budgets, sizeof e->budget);
}

void mx_enc_get_stats(const mx_enc *e, mx_enc_stats *out) {
    *out = e->stats;
}

// ---- Recording -------------------------------------------------------------------------------

static void mix(mx_enc *e, uint64_t v) {
    uint64_t h = (e->hash ^ v) * 0x9fb21c651e98df25ull;
    e->hash = h ^ (h >> 32);
}

void mx_enc_begin(mx_enc *e, const mx_step_facts *facts) {
    e->facts = facts;
    e->err = (mx_err){0};
    memset(e->slow, 0, sizeof e->slow);
    e->n_ops = e->n_tensors = e->n_segs = 0;
    e->seg_count = 0;
    e->seg_serial++;
    e->stamp++;
    e->layer = -1;
    e->role = MX_ROLE_OTHER;
    e->hash = 0x243f6a8885a308d3ull;
    mix(e, facts->phase);
    mix(e, (uint64_t)facts->n_rows << 32 | (uint32_t)facts->n_out);
}

void mx_enc_label(mx_enc *e, int16_t layer, mx_role role) {
    e->layer = layer;
    e->role = (uint8_t)role;
}

static mx_tid add_tensor(mx_enc *e, const mx_tensor *t) {
    if (e->n_tensors == e->cap_tensors) {
        e->cap_tensors = e->cap_tensors ? e->cap_tensors * 2 : 1024;
        e->tensors = mx_realloc(e->tensors, (size_t)e->cap_tensors * sizeof *e->tensors);
        e->seen = mx_realloc(e->seen, (size_t)e->cap_tensors * sizeof *e->seen);
    }
    e->tensors[e->n_tensors] = *t;
    e->seen[e->n_tensors] = 0;
    // A plan has the buffer and, on a device, its address: both must be those of before.
    mix(e, (uint64_t)(uintptr_t)t->buf);
    if (t->buf) mix(e, t->buf->device ^ (uint64_t)(uintptr_t)t->buf->host);
    mix(e, t->offset ^ (uint64_t)t->kind << 56);
    mix(e, (uint64_t)t->n_rows << 32 ^ (uint64_t)t->n_cols);
    mix(e, (uint64_t)t->fmt.dtype << 48 ^ (uint64_t)t->fmt.bits << 40 ^
               (uint64_t)t->fmt.group << 20 ^ (uint64_t)t->layout << 16 ^ t->pack);
    return e->n_tensors++;
}

mx_tid mx_enc_temp(mx_enc *e, int64_t rows, int64_t cols) {
    CHECK(rows > 0 && cols > 0);
    mx_tensor t = {.kind = MX_T_TEMP, .n_rows = rows, .n_cols = cols, .ld = cols};
    t.fmt = mx_wfmt_of(MX_F32);
    t.n_bytes = (size_t)rows * (size_t)cols * sizeof(float);
    return add_tensor(e, &t);
}

mx_tid mx_enc_use(mx_enc *e, const mx_tensor *t) {
    if (!t) return MX_NONE;
    size_t i = ((uintptr_t)t >> 4) * 0x9e3779b97f4a7c15ull >> 52;
    for (size_t probes = 0; probes < USE_SLOTS; probes++, i = (i + 1) % USE_SLOTS) {
        use_slot *s = &e->uses[i];
        if (s->stamp == e->stamp && s->p == t) return s->id;
        if (s->stamp != e->stamp) {
            *s = (use_slot){t, e->stamp, add_tensor(e, t)};
            return s->id;
        }
    }
    return add_tensor(e, t); // table full: correct, only counted twice
}

const mx_tensor *mx_enc_tensor(const mx_enc *e, mx_tid id) {
    CHECK(id >= 0 && id < e->n_tensors);
    return &e->tensors[id];
}

const mx_step_facts *mx_enc_facts(const mx_enc *e) {
    return e->facts;
}

// MLX's count of one input: array elements (a packed weight counts 32-bit words).
static double count_elements(const mx_tensor *t) {
    double n = (double)t->n_rows * (double)t->n_cols;
    if (t->kind != MX_T_WEIGHT || mx_dtype_is_float(t->fmt.dtype)) return n;
    if (t->fmt.dtype != MX_AFFINE) return (double)t->n_bytes / 4;
    return n * t->fmt.bits / 32 + 2 * n / t->fmt.group;
}

static void count_inputs(mx_enc *e, const mx_op *op, const mx_budget *b) {
    for (int i = 0; i < op->n_in; i++) {
        mx_tid id = op->in[i];
        if (id == MX_NONE) continue;
        if (!b->elements || b->dedup) {
            if (e->seen[id] == e->seg_serial) continue;
            e->seen[id] = e->seg_serial;
        }
        e->seg_count += b->elements ? count_elements(&e->tensors[id])
                                    : mx_op_input_bytes(op, i, e->tensors, e->facts);
    }
}

static void close_segment(mx_enc *e, mx_commit_reason reason) {
    int32_t first = e->n_segs ? e->segs[e->n_segs - 1].first + e->segs[e->n_segs - 1].n : 0;
    if (e->n_ops == first) return;
    if (e->n_segs == e->cap_segs) {
        e->cap_segs = e->cap_segs ? e->cap_segs * 2 : 64;
        e->segs = mx_realloc(e->segs, (size_t)e->cap_segs * sizeof *e->segs);
    }
    e->segs[e->n_segs++] = (mx_segment){first, e->n_ops - first, (uint64_t)e->seg_count, reason};
    mix(e, (uint64_t)e->n_ops << 8 | reason);
    e->seg_count = 0;
    e->seg_serial++;
}

static void apply_budget(mx_enc *e, const mx_op *op) {
    const mx_budget *b = &e->budget[e->facts->phase];
    count_inputs(e, op, b);
    int32_t first = e->n_segs ? e->segs[e->n_segs - 1].first + e->segs[e->n_segs - 1].n : 0;
    int32_t n = e->n_ops - first;
    if (n > b->max_ops) {
        close_segment(e, MX_COMMIT_OPS);
    } else if (n > b->min_ops && b->max_mb < MX_BUDGET_UNLIMITED &&
               e->seg_count > (double)b->max_mb * 1048576.0) {
        close_segment(e, MX_COMMIT_BYTES);
    }
}

static void append(mx_enc *e, const mx_op *op) {
    if (e->n_ops == e->cap_ops) {
        e->cap_ops = e->cap_ops ? e->cap_ops * 2 : 512;
        e->ops = mx_realloc(e->ops, (size_t)e->cap_ops * sizeof *e->ops);
    }
    e->ops[e->n_ops++] = *op;
    mix(e, (uint64_t)op->kind << 48 | (uint64_t)op->role << 40 | (uint16_t)op->layer);
    for (int i = 0; i < op->n_in; i++) mix(e, (uint64_t)(uint32_t)op->in[i] + 1);
    for (int i = 0; i < op->n_out; i++) mix(e, (uint64_t)(uint32_t)op->out[i] + 3);
    for (size_t i = 0; i < MX_COUNT(op->p.words); i += 2) {
        mix(e, (uint64_t)(uint32_t)op->p.words[i] << 32 | (uint32_t)op->p.words[i + 1]);
    }
    apply_budget(e, op);
}

// Weights of a product that are not packed.
static uint32_t unpacked_products(const mx_enc *e, const mx_op *op) {
    bool glu = op->kind == MX_OP_MATMUL_GLU || op->kind == MX_OP_NORM_GLU;
    bool qkv = op->kind == MX_OP_QKV || op->kind == MX_OP_NORM_QKV;
    bool norm =
        op->kind == MX_OP_NORM_MATMUL || op->kind == MX_OP_NORM_GLU || op->kind == MX_OP_NORM_QKV;
    if (!glu && !qkv && !norm && op->kind != MX_OP_MATMUL && op->kind != MX_OP_MATMUL_ADD) return 0;
    uint32_t n = 0;
    int first = norm ? 2 : 1, end = first + (qkv ? 3 : glu ? 2 : 1);
    for (int i = first; i < end; i++) n += e->tensors[op->in[i]].layout != MX_LAYOUT_PACKED;
    return n;
}

void mx_enc_op(mx_enc *e, mx_op op) {
    if (e->err.status != MX_OK) return;
    op.layer = e->layer;
    op.role = e->role;
    op.flags = 0;
    if (mx_op_validate(&op, e->tensors, e->n_tensors, &e->err) != MX_OK) {
        mx_err_prefix(&e->err, "layer %d", op.layer);
        return;
    }
    bool fused = mx_op_get((mx_op_kind)op.kind)->fused;
    bool supported = e->backend->ops->supports(e->backend, &op, e->tensors);
    if (fused && (!e->fuse || !supported)) {
        e->slow[MX_SLOW_EXPANDED] += e->fuse;
        mx_op_expand(e, &op);
        return;
    }
    if (!supported) {
        mx_err_set(&e->err, MX_UNSUPPORTED, "layer %d: op %s is not supported by backend %s",
                   op.layer, mx_op_get((mx_op_kind)op.kind)->name, e->backend->name);
        return;
    }
    e->slow[MX_SLOW_ROWS] += unpacked_products(e, &op);
    append(e, &op);
}

// ---- Planning --------------------------------------------------------------------------------

typedef struct live {
    int32_t first, last; // ops
} live;

static void find_lifetimes(const mx_enc *e, live *l) {
    for (int32_t t = 0; t < e->n_tensors; t++) l[t] = (live){-1, -1};
    for (int32_t i = 0; i < e->n_ops; i++) {
        const mx_op *op = &e->ops[i];
        for (int k = 0; k < op->n_in + op->n_out; k++) {
            mx_tid t = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
            if (t == MX_NONE) continue;
            if (l[t].first < 0) l[t].first = i;
            l[t].last = i;
        }
    }
}

// First-fit over the temporaries that live at the same time as t; placed[0..n) are in arena order.
static size_t first_fit(const mx_tensor *ts, const live *l, const mx_tid *placed, int32_t n,
                        mx_tid t, size_t need) {
    size_t at = 0;
    for (int32_t i = 0; i < n; i++) {
        const mx_tensor *o = &ts[placed[i]];
        bool overlap = l[placed[i]].first <= l[t].last && l[t].first <= l[placed[i]].last;
        if (!overlap) continue;
        if (at + need <= o->offset) break;
        size_t end = (o->offset + o->n_bytes + 63) & ~(size_t)63;
        if (end > at) at = end;
    }
    return at;
}

// For every tensor, the first op that touches a temporary from it on.
static int32_t *first_ops(const mx_enc *e, const live *l) {
    int32_t *from = mx_alloc((size_t)e->n_tensors * sizeof *from + 1), least = INT32_MAX;
    for (mx_tid t = e->n_tensors - 1; t >= 0; t--) {
        if (e->tensors[t].kind == MX_T_TEMP && l[t].first >= 0) least = MX_MIN(least, l[t].first);
        from[t] = least;
    }
    return from;
}

// Places every temporary; returns the arena's extent. The budget is not consulted. What no later
// temporary meets leaves the list: long steps have few that live at the same time.
static size_t layout_arena(mx_enc *e, live *l) {
    mx_tid *placed = mx_alloc((size_t)e->n_tensors * sizeof *placed);
    int32_t n = 0, *from = first_ops(e, l);
    size_t extent = 0;
    for (mx_tid t = 0; t < e->n_tensors; t++) {
        mx_tensor *x = &e->tensors[t];
        if (x->kind != MX_T_TEMP || l[t].first < 0) continue;
        int32_t kept = 0;
        for (int32_t i = 0; i < n; i++) {
            if (l[placed[i]].last >= from[t]) placed[kept++] = placed[i];
        }
        n = kept;
        x->offset = first_fit(e->tensors, l, placed, n, t, x->n_bytes);
        extent = MX_MAX(extent, x->offset + x->n_bytes);
        int32_t i = n++;
        for (; i > 0 && e->tensors[placed[i - 1]].offset > x->offset; i--) {
            placed[i] = placed[i - 1];
        }
        placed[i] = t;
    }
    mx_free(placed);
    mx_free(from);
    return (extent + 63) & ~(size_t)63;
}

static bool is_state_writer(const mx_op *op) {
    return op->kind == MX_OP_KV_WRITE || op->kind == MX_OP_ROPE_KV;
}

static bool overlap(const mx_tensor *a, const mx_tensor *b) {
    if (a->kind != b->kind) return false;
    if (a->kind == MX_T_LOGITS) return true;
    if (a->kind == MX_T_STATE) return a->buf == b->buf && a->offset == b->offset;
    return a->offset < b->offset + b->n_bytes && b->offset < a->offset + a->n_bytes;
}

static bool writes(const mx_op *op, int k) {
    return k >= op->n_in;
}

// True when b must wait for a: one of them writes memory that the other touches.
static bool conflict(const mx_op *a, const mx_op *b, const mx_tensor *ts) {
    for (int i = 0; i < a->n_in + a->n_out; i++) {
        mx_tid ta = writes(a, i) ? a->out[i - a->n_in] : a->in[i];
        if (ta == MX_NONE || ts[ta].kind == MX_T_WEIGHT) continue;
        bool wa = writes(a, i) || (ts[ta].kind == MX_T_STATE && is_state_writer(a));
        for (int k = 0; k < b->n_in + b->n_out; k++) {
            mx_tid tb = writes(b, k) ? b->out[k - b->n_in] : b->in[k];
            if (tb == MX_NONE) continue;
            bool wb = writes(b, k) || (ts[tb].kind == MX_T_STATE && is_state_writer(b));
            if ((wa || wb) && overlap(&ts[ta], &ts[tb])) return true;
        }
    }
    return false;
}

static int32_t mark_barriers(mx_enc *e) {
    int32_t epoch = 0, n = 0;
    for (int32_t i = 1; i < e->n_ops; i++) {
        for (int32_t j = epoch; j < i; j++) {
            if (!conflict(&e->ops[j], &e->ops[i], e->tensors)) continue;
            e->ops[i].flags |= MX_OPF_BARRIER;
            epoch = i;
            n++;
            break;
        }
    }
    return n;
}

static mx_status grow_arena(mx_enc *e, size_t need, mx_err *err) {
    if (e->arena && e->arena->n_bytes >= need) return MX_OK;
    need = MX_MAX(need, (size_t)4096);
    mx_buffer *more = NULL; // first: when it can't be had, the plans there are go on
    MX_TRY(e->backend->ops->alloc(e->backend, &more, need, MX_USE_ARENA, err));
    drop_plans(e); // their handles may hold the old addresses
    if (e->arena) e->backend->ops->free(e->backend, e->arena);
    e->arena = more;
    e->stats.arena_bytes = need;
    return MX_OK;
}

static void *copy_of(const void *p, size_t n) {
    void *q = mx_alloc(n);
    memcpy(q, p, n);
    return q;
}

static mx_status make_plan(mx_enc *e, plan_entry **out, mx_err *err) {
    live *l = mx_alloc((size_t)e->n_tensors * sizeof *l + 1);
    find_lifetimes(e, l);
    size_t arena = layout_arena(e, l);
    mx_free(l);
    int32_t barriers = mark_barriers(e);
    MX_TRY(grow_arena(e, arena, err));
    while (e->n_plans >= e->plan_cap) {
        free_plan(e, e->oldest);
        e->stats.plan_evictions++;
    }
    plan_entry *p = mx_calloc(1, sizeof *p);
    p->plan = (mx_plan){.key = e->hash,
                        .phase = e->facts->phase,
                        .n_rows = e->facts->n_rows,
                        .n_out = e->facts->n_out,
                        .n_ops = e->n_ops,
                        .n_tensors = e->n_tensors,
                        .n_segs = e->n_segs,
                        .n_barriers = barriers,
                        .arena_bytes = arena};
    memcpy(p->plan.slow, e->slow, sizeof e->slow);
    p->plan.ops = copy_of(e->ops, (size_t)e->n_ops * sizeof *e->ops);
    p->plan.tensors = copy_of(e->tensors, (size_t)e->n_tensors * sizeof *e->tensors);
    p->plan.segs = copy_of(e->segs, (size_t)e->n_segs * sizeof *e->segs);
    mx_status st = e->backend->ops->plan_make(e->backend, &p->plan, e->arena, err);
    p->next_hash = e->buckets[p->plan.key % HASH_BUCKETS];
    e->buckets[p->plan.key % HASH_BUCKETS] = p;
    push_newest(e, p);
    e->n_plans++;
    if (st != MX_OK) {
        free_plan(e, p);
        return st;
    }
    e->stats.plans_made++;
    e->stats.arena_peak_bytes = MX_MAX(e->stats.arena_peak_bytes, arena);
    *out = p;
    return MX_OK;
}

mx_status mx_enc_end(mx_enc *e, mx_plan **plan, mx_err *err) {
    *plan = NULL;
    if (e->err.status != MX_OK) return mx_err_set(err, e->err.status, "%s", e->err.msg);
    if (e->n_ops == 0) return mx_err_set(err, MX_INTERNAL, "a step without ops");
    close_segment(e, MX_COMMIT_END);
    plan_entry *p = find_plan(e, e->hash);
    if (p) {
        e->stats.plan_hits++;
        unlink_lru(e, p);
        push_newest(e, p);
    } else {
        MX_TRY(make_plan(e, &p, err));
    }
    *plan = &p->plan;
    return MX_OK;
}

mx_status mx_enc_submit(mx_enc *e, mx_plan *plan, int32_t slot, mx_ticket *t, mx_err *err) {
    MX_TRY(e->backend->ops->submit(e->backend, plan, e->facts, slot, t, err));
    e->stats.steps[plan->phase]++;
    e->stats.buffers[plan->phase] += (uint64_t)plan->n_segs;
    e->stats.ops[plan->phase] += (uint64_t)plan->n_ops;
    for (int32_t i = 0; i < plan->n_segs; i++) e->stats.commits[plan->segs[i].reason]++;
    for (int i = 0; i < MX_SLOW_COUNT; i++) e->stats.slow[i] += plan->slow[i];
    return MX_OK;
}
