// A recorded step with parts of it repeated: how long a part takes is the slope of the step's time
// over the number of repeats. Works on recorded ops, so it knows neither families nor devices.
//
// A run is what one layer contributes to a part: consecutive ops with its role. A repeat of a run
// takes the ops, parameters, weights and state of a sibling layer far away (caches must not help),
// writes new temporaries, and works on the output of the run before it, so that repeats wait for
// each other as layers do. The step itself goes on from the first run's output: tokens and logits
// stay the same. A sibling's state may get a wrong row at the present position; the sibling writes
// it again before it reads it. What has no sibling (head, sampling) repeats itself.
#include "cli/profile.h"

#include "base/mem.h"

typedef struct run {
    int32_t first, n;
} run;

const char *prof_part_name(prof_part p) {
    static const char *const names[] = {"attention", "mlp",   "moe", "head",
                                        "sampling",  "embed", "norm"};
    return (unsigned)p < PROF_PARTS ? names[p] : "?";
}

static void *copy_of(const void *p, size_t n) {
    void *q = mx_alloc(n + 1);
    memcpy(q, p, n);
    return q;
}

void prof_list_copy(prof_list *l, const mx_plan *plan) {
    *l = (prof_list){.ops = copy_of(plan->ops, (size_t)plan->n_ops * sizeof *plan->ops),
                     .n_ops = plan->n_ops,
                     .tensors =
                         copy_of(plan->tensors, (size_t)plan->n_tensors * sizeof *plan->tensors),
                     .n_tensors = plan->n_tensors};
}

void prof_list_free(prof_list *l) {
    mx_free(l->ops);
    mx_free(l->tensors);
    *l = (prof_list){0};
}

// ---- Parts -------------------------------------------------------------------------------------

static bool has_norm(const mx_op *op) {
    switch ((mx_op_kind)op->kind) {
    case MX_OP_RMS_NORM:
    case MX_OP_NORM_MATMUL:
    case MX_OP_NORM_QKV:
    case MX_OP_NORM_GLU:
    case MX_OP_NORM_ADD: return true;
    default: return false;
    }
}

static bool in_part(const mx_op *op, prof_part part, int32_t kind) {
    if (kind >= 0) return op->kind == kind;
    switch (part) {
    case PROF_ATTENTION: return op->role == MX_ROLE_ATTN;
    case PROF_MLP: return op->role == MX_ROLE_MLP;
    case PROF_MOE: return op->role == MX_ROLE_MOE;
    case PROF_HEAD: return op->role == MX_ROLE_HEAD;
    case PROF_SAMPLE: return op->role == MX_ROLE_SAMPLE;
    case PROF_EMBED: return op->role == MX_ROLE_EMBED || op->role == MX_ROLE_OTHER;
    case PROF_NORM: return has_norm(op);
    case PROF_PARTS: break;
    }
    return false;
}

// Of the norm alone: its rows in and out, and its weight.
static mx_cost norm_cost(const mx_op *op, const mx_tensor *t, const mx_step_facts *facts) {
    double x = mx_op_input_bytes(op, 0, t, facts), w = mx_op_input_bytes(op, 1, t, facts);
    return (mx_cost){.read_bytes = x + w, .write_bytes = x, .flops = x / 4 * 4};
}

prof_cost prof_part_cost(const mx_plan *plan, prof_part part, int32_t kind,
                         const mx_step_facts *facts) {
    prof_cost c = {0};
    for (int32_t s = 0; s < plan->n_segs; s++) {
        bool any = false;
        for (int32_t i = plan->segs[s].first; i < plan->segs[s].first + plan->segs[s].n; i++) {
            const mx_op *op = &plan->ops[i];
            if (!in_part(op, part, kind)) continue;
            bool norm = part == PROF_NORM && kind < 0;
            mx_cost one =
                norm ? norm_cost(op, plan->tensors, facts) : mx_op_cost(op, plan->tensors, facts);
            any = true;
            c.n_ops++;
            c.read_bytes += one.read_bytes;
            c.write_bytes += one.write_bytes;
            c.flops += one.flops;
        }
        c.n_buffers += any;
    }
    return c;
}

// ---- Recording ---------------------------------------------------------------------------------

typedef struct repeater {
    prof_repeat *p;
    mx_enc *e;
    mx_tid *map; // of the list's tensors in this recording; MX_NONE: not yet
    mx_tid *own; // the same inside one repeat
    run *runs;
} repeater;

static const mx_tensor *tensor(const repeater *x, mx_tid t) {
    return &x->p->list->tensors[t];
}

static mx_tid new_temp(repeater *x, mx_tid t) {
    const mx_tensor *s = tensor(x, t);
    return mx_enc_temp(x->e, s->n_rows, s->n_cols);
}

static mx_tid mapped(repeater *x, mx_tid t) {
    if (t == MX_NONE) return MX_NONE;
    if (x->map[t] == MX_NONE) {
        bool temp = tensor(x, t)->kind == MX_T_TEMP;
        x->map[t] = temp ? new_temp(x, t) : mx_enc_use(x->e, tensor(x, t));
    }
    return x->map[t];
}

static void append(repeater *x, mx_op op) {
    mx_enc_label(x->e, op.layer, (mx_role)op.role);
    for (int i = 0; i < op.n_in; i++) op.in[i] = mapped(x, op.in[i]);
    for (int i = 0; i < op.n_out; i++) op.out[i] = mapped(x, op.out[i]);
    mx_enc_op(x->e, op);
}

// Runs: maximal sequences of one layer and role; of a kind or of norms, every op is one.
static int32_t find_runs(repeater *x) {
    const prof_list *l = x->p->list;
    bool single = x->p->kind >= 0 || x->p->part == PROF_NORM;
    int32_t n = 0;
    for (int32_t i = 0; i < l->n_ops; i++) {
        if (!in_part(&l->ops[i], x->p->part, x->p->kind)) continue;
        run *last = n ? &x->runs[n - 1] : NULL;
        bool joins =
            last && !single && last->first + last->n == i && l->ops[i - 1].layer == l->ops[i].layer;
        if (joins)
            last->n++;
        else
            x->runs[n++] = (run){i, 1};
    }
    return n;
}

static bool same_shape(const repeater *x, mx_tid a, mx_tid b) {
    if (a == MX_NONE || b == MX_NONE) return a == b;
    const mx_tensor *s = tensor(x, a), *t = tensor(x, b);
    if (s->kind != t->kind) return false;
    return s->kind == MX_T_STATE || (s->n_rows == t->n_rows && s->n_cols == t->n_cols);
}

static bool siblings(const repeater *x, const run *a, const run *b) {
    if (a->n != b->n) return false;
    for (int32_t i = 0; i < a->n; i++) {
        const mx_op *s = &x->p->list->ops[a->first + i], *t = &x->p->list->ops[b->first + i];
        if (s->kind != t->kind || s->n_in != t->n_in || s->n_out != t->n_out) return false;
        for (int k = 0; k < s->n_in; k++) {
            if (!same_shape(x, s->in[k], t->in[k])) return false;
        }
        for (int k = 0; k < s->n_out; k++) {
            if (!same_shape(x, s->out[k], t->out[k])) return false;
        }
    }
    return true;
}

// The j-th sibling of a run: far away first. The run itself when there is no other.
static const run *sibling_of(const repeater *x, int32_t index, int32_t j) {
    int32_t n = x->p->n_runs, step = n / (x->p->of + 1), at = index + j * MX_MAX(step, 1);
    for (int32_t i = 0; i < n; i++) {
        const run *s = &x->runs[(at + i) % n];
        if (s != &x->runs[index] && siblings(x, &x->runs[index], s)) return s;
    }
    return &x->runs[index];
}

// The temporary that goes through a run: its first op's first input.
static mx_tid entry_of(const repeater *x, const run *r) {
    mx_tid t = x->p->list->ops[r->first].in[0];
    return tensor(x, t)->kind == MX_T_TEMP ? t : MX_NONE;
}

static mx_tid exit_of(const repeater *x, const run *r) {
    const mx_op *op = &x->p->list->ops[r->first + r->n - 1];
    return op->n_out ? op->out[0] : MX_NONE;
}

static bool chains(const repeater *x, const run *r) {
    mx_tid a = entry_of(x, r), b = exit_of(x, r);
    return a != MX_NONE && b != MX_NONE && same_shape(x, a, b);
}

// One repeat of run r by the ops of s. stream: what takes the place of r's entry, or MX_NONE for
// the entry itself. Returns its output.
static mx_tid repeat_run(repeater *x, const run *r, const run *s, mx_tid stream) {
    const prof_list *l = x->p->list;
    for (int32_t i = 0; i < l->n_tensors; i++) x->own[i] = MX_NONE;
    mx_tid last = MX_NONE;
    for (int32_t i = 0; i < r->n; i++) {
        const mx_op *here = &l->ops[r->first + i];
        mx_op op = l->ops[s->first + i];
        mx_enc_label(x->e, here->layer, (mx_role)here->role);
        for (int k = 0; k < op.n_in; k++) {
            mx_tid t = here->in[k];
            if (op.in[k] == MX_NONE) continue;
            if (tensor(x, t)->kind != MX_T_TEMP)
                op.in[k] = mx_enc_use(x->e, tensor(x, op.in[k]));
            else if (x->own[t] != MX_NONE)
                op.in[k] = x->own[t];
            else
                op.in[k] = stream != MX_NONE && t == entry_of(x, r) ? stream : mapped(x, t);
        }
        for (int k = 0; k < op.n_out; k++) {
            op.out[k] = last = x->own[here->out[k]] = new_temp(x, here->out[k]);
        }
        mx_enc_op(x->e, op);
    }
    return r->n ? x->own[exit_of(x, r)] : last;
}

// A norm by itself, whatever op it is fused into.
static mx_tid repeat_norm(repeater *x, const run *r, const run *s, mx_tid stream) {
    const mx_op *here = &x->p->list->ops[r->first], *there = &x->p->list->ops[s->first];
    const mx_tensor *in = tensor(x, here->in[0]);
    bool plain = here->kind == MX_OP_RMS_NORM;
    mx_op op = {.kind = MX_OP_RMS_NORM, .n_in = 2, .n_out = 1};
    op.p.norm.eps = here->kind == MX_OP_NORM_GLU ? here->p.glu.eps : here->p.norm.eps;
    op.p.norm.dim = plain ? here->p.norm.dim : (int32_t)in->n_cols;
    op.in[0] = stream != MX_NONE ? stream : mapped(x, here->in[0]);
    op.in[1] = mx_enc_use(x->e, tensor(x, there->in[1]));
    op.out[0] = mx_enc_temp(x->e, in->n_rows, in->n_cols);
    mx_enc_label(x->e, here->layer, MX_ROLE_NORM);
    mx_enc_op(x->e, op);
    return op.out[0];
}

static void add_repeats(repeater *x, int32_t index) {
    const run *r = &x->runs[index];
    bool norm = x->p->part == PROF_NORM && x->p->kind < 0, chained = norm || chains(x, r);
    mx_tid stream = chained && !norm ? mapped(x, exit_of(x, r)) : MX_NONE;
    for (int32_t j = 1; j <= x->p->k; j++) {
        const run *s = sibling_of(x, index, j);
        mx_tid y;
        if (norm) {
            y = repeat_norm(x, r, s, stream);
        } else if (exit_of(x, r) == MX_NONE) { // sampling: writes the step's result again
            append(x, x->p->list->ops[r->first]);
            y = MX_NONE;
        } else {
            y = repeat_run(x, r, s, stream);
        }
        if (chained) stream = y;
        x->p->n_extra++;
    }
    if (x->p->live && stream != MX_NONE) x->map[exit_of(x, r)] = stream;
}

mx_status prof_repeat_record(prof_rig *rig, void *repeat, mx_enc *e, mx_err *err) {
    (void)rig;
    (void)err;
    prof_repeat *p = repeat;
    const prof_list *l = p->list;
    repeater x = {.p = p, .e = e};
    x.map = mx_alloc((size_t)l->n_tensors * sizeof *x.map + 1);
    x.own = mx_alloc((size_t)l->n_tensors * sizeof *x.own + 1);
    x.runs = mx_alloc((size_t)l->n_ops * sizeof *x.runs + 1);
    for (int32_t i = 0; i < l->n_tensors; i++) x.map[i] = MX_NONE;
    p->n_runs = find_runs(&x);
    p->n_extra = 0;
    for (int32_t i = 0, next = 0; i < l->n_ops; i++) {
        append(&x, l->ops[i]);
        if (next == p->n_runs || x.runs[next].first + x.runs[next].n != i + 1) continue;
        add_repeats(&x, next++);
    }
    mx_free(x.map);
    mx_free(x.own);
    mx_free(x.runs);
    return MX_OK; // errors of ops are the encoder's
}
