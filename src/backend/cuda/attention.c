// Rotation, writing the sequence state, and attention: which kernel, and its arguments.
#include "backend/cuda/cuda_int.h"

static void lower_rope(cuda_backend *b, const mx_op *op, const mx_tensor *t, CUdeviceptr arena,
                       cuda_list *l) {
    const mx_tensor *x = &t[op->in[0]], *cs = &t[op->in[1]], *y = &t[op->out[0]];
    k_rope a = {.q = cuda_address(b, x, arena),
                .cs = cuda_address(b, cs, arena),
                .y = cuda_address(b, y, arena),
                .n_head = (int32_t)(x->n_cols / op->p.rope.head_dim),
                .head_dim = op->p.rope.head_dim,
                .n_rot = op->p.rope.n_rot,
                .interleaved = op->p.rope.interleaved,
                .ldq = (int32_t)x->ld,
                .ldcs = (int32_t)cs->ld,
                .ldy = (int32_t)y->ld,
                .page_tokens = 1};
    CUDA_LAUNCH(b, l, CK_rope_kv, a, x->n_rows, (a.n_head + 3) / 4, 1, 128, 0);
}

static void lower_kv_write(cuda_backend *b, const mx_op *op, const mx_tensor *t, CUdeviceptr arena,
                           cuda_list *l) {
    const mx_tensor *k = &t[op->in[0]], *v = &t[op->in[1]];
    int32_t g = op->p.kv.group;
    k_rope a = {.k = cuda_address(b, k, arena),
                .v = cuda_address(b, v, arena),
                .ks = cuda_address(b, &t[op->in[2]], arena),
                .vs = cuda_address(b, &t[op->in[3]], arena),
                .kv_slot = cuda_host_address(b->io.kv_slot[g]),
                .n_kv_head = op->p.kv.n_kv_head,
                .head_dim = op->p.kv.head_dim,
                .ldk = (int32_t)k->ld,
                .ldv = (int32_t)v->ld,
                .page_tokens = b->caps.page_tokens[g],
                .kv_type = cuda_type_of(t[op->in[2]].fmt.dtype)};
    CUDA_LAUNCH(b, l, CK_rope_kv, a, k->n_rows, (2 * a.n_kv_head + 3) / 4, 1, 128, 0);
}

static k_rope rope_kv_args(const cuda_backend *b, const mx_op *op, const mx_tensor *t,
                           CUdeviceptr arena) {
    const mx_tensor *q = &t[op->in[0]], *k = &t[op->in[1]], *v = &t[op->in[2]];
    const mx_tensor *cs = &t[op->in[3]], *y = &t[op->out[0]];
    const mx_tensor *qn = op->in[4] == MX_NONE ? NULL : &t[op->in[4]];
    const mx_tensor *kn = op->in[5] == MX_NONE ? NULL : &t[op->in[5]];
    int32_t g = op->p.rope.group;
    return (k_rope){.q = cuda_address(b, q, arena),
                    .k = cuda_address(b, k, arena),
                    .v = cuda_address(b, v, arena),
                    .cs = cuda_address(b, cs, arena),
                    .qn = cuda_address(b, qn, arena),
                    .kn = cuda_address(b, kn, arena),
                    .y = cuda_address(b, y, arena),
                    .ks = cuda_address(b, &t[op->in[6]], arena),
                    .vs = cuda_address(b, &t[op->in[7]], arena),
                    .kv_slot = cuda_host_address(b->io.kv_slot[g]),
                    .n_head = op->p.rope.n_head,
                    .n_kv_head = op->p.rope.n_kv_head,
                    .head_dim = op->p.rope.head_dim,
                    .n_rot = op->p.rope.n_rot,
                    .interleaved = op->p.rope.interleaved,
                    .ldq = (int32_t)q->ld,
                    .ldk = (int32_t)k->ld,
                    .ldv = (int32_t)v->ld,
                    .ldcs = (int32_t)cs->ld,
                    .ldy = (int32_t)y->ld,
                    .page_tokens = b->caps.page_tokens[g],
                    .kv_type = cuda_type_of(t[op->in[6]].fmt.dtype),
                    .eps = op->p.rope.eps};
}

static bool is_pow2(int32_t n) {
    return n > 0 && (n & (n - 1)) == 0;
}

static int32_t log2_of(int32_t n) {
    int32_t s = 0;
    while (n >> (s + 1)) s++;
    return s;
}

enum { FIXED_CHUNK = 256, MAX_SPLITS = 64 };             // of deterministic attention; attn.cu
enum { MAX_GRID = 65535 };                               // of a grid's second and third number
static const size_t fixed_part_bytes = (size_t)64 << 20; // its partial results, at most

static int32_t row_splits(const cuda_backend *b, int32_t n_groups) {
    return 2 * MX_MAX(1, MX_MIN(MAX_SPLITS / 2, b->n_sm / n_groups));
}

// Splits of a row's context. One row: one CTA an SM while that suffices, then two. Else about 5
// CTAs an SM (a short wave at the end), 128 tokens or more each. Deterministic: the chunks that the
// longest context of the bucket can have; the kernel cuts.
static void choose_splits(const cuda_backend *b, const mx_op *op, k_attn *a) {
    int64_t ctx = op->p.attn.ctx_bucket, cells = (int64_t)a->n_rows * a->n_groups;
    if (op->p.attn.window > 0) ctx = MX_MIN(ctx, (int64_t)op->p.attn.window + 16);
    int64_t want = (5 * (int64_t)b->n_sm + cells - 1) / cells, most = MX_MIN(ctx / 128, MAX_SPLITS);
    if (b->fixed_attn) {
        a->chunk = FIXED_CHUNK;
        want = MX_MIN((ctx + FIXED_CHUNK - 1) / FIXED_CHUNK, MAX_SPLITS);
    } else if (a->n_rows == 1) {
        want = row_splits(b, a->n_groups), most = (ctx + 63) / 64;
        a->few_splits = (int32_t)MX_MAX(1, MX_MIN(want / 2, most));
    }
    a->n_split = (int32_t)MX_MAX(1, b->fixed_attn ? want : MX_MIN(want, most));
    if (a->few_splits == 0) a->few_splits = a->n_split;
}

// So many CTAs that the kernels before and after had better not run beside them.
static bool fills_gpu(const cuda_backend *b, const k_attn *a) {
    return (int64_t)a->n_split * a->n_groups * a->n_rows > 4 * (int64_t)b->n_sm;
}

// Decode attention of all rows; of so few at a time that a grid can have them, and that partial
// results stay within bounds when they are a prefill's (deterministic).
static void launch_rows(cuda_backend *b, const k_attn *all, cuda_kernel kernel, cuda_list *l) {
    k_attn a = *all;
    int32_t nr = a.group_heads, most = MX_MIN(a.n_rows, MAX_GRID);
    size_t row = (size_t)a.n_groups * (size_t)(a.n_split * nr) * (size_t)(a.head_dim + 4) * 4;
    if (b->fixed_attn && a.n_split > 1) {
        most = (int32_t)MX_MAX((size_t)1, MX_MIN((size_t)most, fixed_part_bytes / row));
    }
    CHECK(!a.k || most == a.n_rows);
    if (a.n_split > 1) {
        l->scratch_bytes = MX_MAX(l->scratch_bytes, (size_t)most * row);
        l->n_tickets = MX_MAX(l->n_tickets, (size_t)most * (size_t)a.n_groups);
    }
    for (int32_t r = 0; r < all->n_rows; r += most) {
        size_t at = (size_t)r;
        a.n_rows = MX_MIN(most, all->n_rows - r);
        a.q = all->q + at * (size_t)a.ldq * 4;
        a.y = all->y + at * (size_t)a.ldy * 4;
        a.pos = all->pos + at * 4;
        a.tok_range = all->tok_range + at * 4;
        // Two warps more turn k and v while four turn q.
        CUDA_LAUNCH(b, l, kernel, a, a.n_split, a.n_groups, a.n_rows, a.k ? 192 : 128,
                    4 * nr * (a.head_dim + 4) * 4);
        l->items[l->n_items - 1].apart = fills_gpu(b, all);
    }
}

static k_attn attn_args(const cuda_backend *b, const mx_op *op, const mx_tensor *t,
                        CUdeviceptr arena, const cuda_list *l) {
    const mx_tensor *q = &t[op->in[0]], *y = &t[op->out[0]];
    int32_t g = op->p.attn.group, one_page = b->caps.max_pages[g] == 1; // dense: of any length
    return (k_attn){.q = cuda_address(b, q, arena),
                    .ks = cuda_address(b, &t[op->in[1]], arena),
                    .vs = cuda_address(b, &t[op->in[2]], arena),
                    .y = cuda_address(b, y, arena),
                    .pos = cuda_host_address(b->io.pos),
                    .tok_range = cuda_host_address(b->io.tok_range),
                    .page_table = cuda_host_address(b->io.page_table[g]),
                    .range_first = cuda_host_address(b->io.range_first),
                    .range_pos0 = cuda_host_address(b->io.range_pos0),
                    .counts = cuda_host_address(b->io.counts),
                    .part = l->scratch,
                    .ticket = l->tickets,
                    .scale = op->p.attn.scale,
                    .softcap = op->p.attn.softcap,
                    .n_head = op->p.attn.n_head,
                    .n_kv_head = op->p.attn.n_kv_head,
                    .head_dim = op->p.attn.head_dim,
                    .n_rep = op->p.attn.n_head / op->p.attn.n_kv_head,
                    .window = op->p.attn.window,
                    .ldq = (int32_t)q->ld,
                    .ldy = (int32_t)y->ld,
                    .page_tokens = b->caps.page_tokens[g],
                    .page_shift = one_page ? 30 : log2_of(b->caps.page_tokens[g]),
                    .max_pages = b->caps.max_pages[g],
                    .kv_type = cuda_type_of(t[op->in[1]].fmt.dtype),
                    .n_rows = (int32_t)q->n_rows};
}

// Can the kernels with tensor cores take it?
static bool is_fast(const k_attn *a) {
    return a->kv_type == KTYPE_F16 && a->head_dim % 8 == 0 && a->head_dim <= 512 &&
           a->page_tokens >= 16 && (a->max_pages == 1 || is_pow2(a->page_tokens)) &&
           a->q % 16 == 0 && a->ldq % 4 == 0;
}

static int32_t size_of_head(const k_attn *a) { // 64, 128, 256, 512
    return a->head_dim <= 64 ? 0 : a->head_dim <= 128 ? 1 : a->head_dim <= 256 ? 2 : 3;
}

// The kernel for a's heads; fills in how they and their contexts are split.
static cuda_kernel choose_decode(const cuda_backend *b, const mx_op *op, k_attn *a) {
    int32_t size = size_of_head(a), most = size == 3 ? 4 : 8, nr = 1, lg = 0;
    while (nr < a->n_rep && nr < most) nr *= 2, lg++;
    a->group_heads = nr;
    a->n_groups = a->n_kv_head * ((a->n_rep + nr - 1) / nr);
    choose_splits(b, op, a);
    return (cuda_kernel)(CK_attn_h64_r1 + size * 4 + lg);
}

static void lower_attn(cuda_backend *b, const mx_plan *plan, const mx_op *op, CUdeviceptr arena,
                       cuda_list *l) {
    k_attn a = attn_args(b, op, plan->tensors, arena, l);
    int32_t hd = a.head_dim, size = size_of_head(&a);
    if (!is_fast(&a)) {
        l->slow[MX_SLOW_ATTN_PLAIN]++;
        CUDA_LAUNCH(b, l, CK_attn_any, a, a.n_rows, a.n_head, 1, 128, (5 * hd + 16) * 4);
        return;
    }
    bool prompt = plan->phase == MX_PHASE_PREFILL && a.n_rows >= 16 && !b->fixed_attn;
    if (prompt && (size == 3 || !b->prefill_attn)) l->slow[MX_SLOW_NO_PREFILL_ATTN]++;
    if (prompt && size < 3 && b->prefill_attn) {
        int32_t hdp = 64 << size, stage = 64 * (hdp * 4 + 80);
        int32_t blocks = (a.n_rows + 63) / 64 + MX_MIN(b->caps.max_range, a.n_rows);
        // Rows outside every range (padding) stay as they are: nothing reads them.
        CUDA_LAUNCH(b, l, CK_prefill_h64 + size, a, blocks, a.n_head, 1, 128, 2 * stage);
        return;
    }
    cuda_kernel kernel = choose_decode(b, op, &a);
    launch_rows(b, &a, kernel, l);
}

// With one row a sequence, all that a row needs of this step is its own k and v, which the kernel
// of attention can make itself.
int32_t cuda_lower_turned(cuda_backend *b, const mx_plan *plan, int32_t first, int32_t end,
                          CUdeviceptr arena, cuda_list *l) {
    const mx_op *r = &plan->ops[first], *op = r + 1;
    if (!b->fused_rope || first + 2 > end) return 0;
    if (r->kind != MX_OP_ROPE_KV || op->kind != MX_OP_ATTN || op->in[0] != r->out[0] ||
        op->in[1] != r->in[6] || !op->p.attn.one_row || op->in[2] != r->in[7] ||
        r->p.rope.group != op->p.attn.group) {
        return 0;
    }
    k_attn a = attn_args(b, op, plan->tensors, arena, l);
    k_rope k = rope_kv_args(b, r, plan->tensors, arena);
    if (!is_fast(&a) || a.head_dim > 256 || k.head_dim != a.head_dim ||
        k.n_kv_head != a.n_kv_head || k.n_head != a.n_head || (k.q | k.k | k.v) % 16 ||
        (k.ldq | k.ldk | k.ldv) % 4) {
        return 0;
    }
    cuda_kernel kernel = choose_decode(b, op, &a);
    if (fills_gpu(b, &a)) return 0;
    a.q = k.q, a.ldq = k.ldq;
    a.k = k.k, a.ldk = k.ldk;
    a.v = k.v, a.ldv = k.ldv;
    a.cs = k.cs, a.ldcs = k.ldcs, a.n_rot = k.n_rot, a.interleaved = k.interleaved;
    a.qn = k.qn, a.kn = k.kn, a.eps = k.eps;
    a.ks_out = k.ks, a.vs_out = k.vs, a.kv_slot = k.kv_slot;
    launch_rows(b, &a, kernel, l);
    return 2;
}

void cuda_lower_attention(cuda_backend *b, const mx_plan *plan, const mx_op *op, CUdeviceptr arena,
                          cuda_list *l) {
    switch ((mx_op_kind)op->kind) {
    case MX_OP_ROPE: lower_rope(b, op, plan->tensors, arena, l); break;
    case MX_OP_KV_WRITE: lower_kv_write(b, op, plan->tensors, arena, l); break;
    case MX_OP_ROPE_KV: {
        k_rope a = rope_kv_args(b, op, plan->tensors, arena);
        int32_t heads = a.n_head + 2 * a.n_kv_head;
        CUDA_LAUNCH(b, l, CK_rope_kv, a, plan->tensors[op->in[0]].n_rows, (heads + 3) / 4, 1, 128,
                    0);
        break;
    }
    default: lower_attn(b, plan, op, arena, l);
    }
}
