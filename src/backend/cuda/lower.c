// Ops to kernel launches: addresses, grids, arguments. Pure but for the list it appends to; the
// values that change from step to step are read by the kernels from the step block.
#include "backend/cuda/cuda_int.h"

#include <string.h>

uint64_t cuda_address(const cuda_backend *b, const mx_tensor *t, CUdeviceptr arena) {
    if (!t) return 0;
    switch ((mx_tkind)t->kind) {
    case MX_T_TEMP: return arena + t->offset;
    case MX_T_LOGITS: return b->step + b->layout.logits_offset + t->offset;
    default: CHECK(t->buf); return t->buf->device + t->offset;
    }
}

static uint64_t addr(const void *p) {
    return (uint64_t)(uintptr_t)p;
}

void cuda_launch(cuda_backend *b, cuda_list *l, cuda_kernel k, const void *args, size_t n_args,
                 uint32_t gx, uint32_t gy, uint32_t gz, uint32_t block, uint32_t smem) {
    (void)b;
    if (gx == 0 || gy == 0 || gz == 0) return;
    size_t at = (l->n_blob + 63) / 64 * 64;
    if (at + n_args > l->cap_blob) {
        l->cap_blob = MX_MAX(2 * l->cap_blob, at + n_args + 4096);
        l->blob = mx_realloc(l->blob, l->cap_blob);
    }
    if (l->n_items == l->cap_items) {
        l->cap_items = MX_MAX(2 * l->cap_items, 64);
        l->items = mx_realloc(l->items, sizeof(*l->items) * (size_t)l->cap_items);
    }
    memcpy(l->blob + at, args, n_args);
    l->n_blob = at + n_args;
    // fn holds the kernel's number until plan_make resolves it.
    l->items[l->n_items++] = (cuda_item){.kind = k == CK_COUNT ? CUDA_ITEM_LT : CUDA_ITEM_KERNEL,
                                         .kernel = k,
                                         .grid = {gx, gy, gz},
                                         .block = block,
                                         .smem = smem,
                                         .arg_offset = at};
}

static int32_t type_of(mx_dtype t) {
    return t == MX_F16 ? KTYPE_F16 : t == MX_BF16 ? KTYPE_BF16 : KTYPE_F32;
}

static k_rows rows_of(const mx_tensor *w, uint64_t data) {
    size_t code = 0, all = 0;
    CHECK(mx_wfmt_code_bytes(w->fmt, w->n_cols, &code) &&
          mx_wfmt_row_bytes(w->fmt, w->n_cols, &all));
    bool affine = w->fmt.dtype == MX_AFFINE;
    return (k_rows){.data = data,
                    .scales = data + w->scales_offset,
                    .biases = data + w->biases_offset,
                    .row_bytes = (int64_t)code,
                    .scale_row_bytes = (int64_t)(all - code) / 2,
                    .type = affine ? KTYPE_AFFINE : type_of(w->fmt.dtype),
                    .bits = w->fmt.bits,
                    .group = w->fmt.group,
                    .scale_type = type_of(w->fmt.scale_dtype)};
}

static void lower_embed(cuda_backend *b, const mx_op *op, const mx_tensor *t, CUdeviceptr arena,
                        cuda_list *l) {
    const mx_tensor *w = &t[op->in[0]], *y = &t[op->out[0]];
    uint64_t data = cuda_address(b, w, arena);
    bool packed = w->layout == MX_LAYOUT_PACKED;
    int32_t kb = packed ? cuda_pack_get(w->pack)->kb : 1;
    k_embed a = {.w = {.w = data,
                       .pack = packed ? w->pack : KPACK_ROWS,
                       .scale_type = w->fmt.dtype == MX_AFFINE && w->fmt.scale_dtype == MX_BF16,
                       .n_kb = (int32_t)((w->n_cols + kb - 1) / kb)},
                 .y = cuda_address(b, y, arena),
                 .ids = addr(b->io.ids),
                 .tok_range = addr(b->io.tok_range),
                 .out_id = addr(b->io.out_id),
                 .scale = op->p.embed.scale,
                 .n_cols = (int32_t)y->n_cols,
                 .ldy = (int32_t)y->ld,
                 .n_vocab = (int32_t)w->n_rows};
    if (!packed) a.w.rows = rows_of(w, data);
    CUDA_LAUNCH(b, l, CK_embed, a, y->n_rows, 1, 1, 128, 0);
}

static void lower_norm(cuda_backend *b, const mx_op *op, const mx_tensor *t, CUdeviceptr arena,
                       cuda_list *l) {
    const mx_tensor *x = &t[op->in[0]], *w = &t[op->in[1]], *y = &t[op->out[0]];
    const mx_tensor *res = op->kind == MX_OP_NORM_ADD ? &t[op->in[2]] : NULL;
    k_norm a = {.x = cuda_address(b, x, arena),
                .w = cuda_address(b, w, arena),
                .res = cuda_address(b, res, arena),
                .y = cuda_address(b, y, arena),
                .eps = op->p.norm.eps,
                .dim = res ? (int32_t)x->n_cols : op->p.norm.dim,
                .n_cols = (int32_t)x->n_cols,
                .ldx = (int32_t)x->ld,
                .ldy = (int32_t)y->ld,
                .ldr = res ? (int32_t)res->ld : 0};
    CUDA_LAUNCH(b, l, CK_rms_norm, a, x->n_rows, 1, 1, 256, 0);
}

static void lower_map(cuda_backend *b, const mx_op *op, const mx_tensor *t, CUdeviceptr arena,
                      cuda_list *l, int32_t what) {
    const mx_tensor *x = &t[op->in[0]], *y = &t[op->out[0]];
    const mx_tensor *z = op->n_in > 1 && op->in[1] != MX_NONE ? &t[op->in[1]] : NULL;
    k_map a = {.a = cuda_address(b, x, arena),
               .b = cuda_address(b, z, arena),
               .y = cuda_address(b, y, arena),
               .rows = addr(b->io.out_tok),
               .counts = addr(b->io.counts),
               .what = what,
               .n_cols = (int32_t)y->n_cols,
               .lda = (int32_t)x->ld,
               .ldb = z ? (int32_t)z->ld : 0,
               .ldy = (int32_t)y->ld,
               .act = what == KMAP_GLU ? op->p.glu.act : 0,
               .cap = what == KMAP_SOFTCAP ? op->p.softcap.cap : 0,
               .n_rows = (int32_t)y->n_rows};
    CUDA_LAUNCH(b, l, CK_map, a, MX_MIN((y->n_cols + 255) / 256, 512), y->n_rows, 1, 256, 0);
}

static void lower_rope_table(cuda_backend *b, const mx_op *op, const mx_tensor *t,
                             CUdeviceptr arena, cuda_list *l) {
    const mx_tensor *y = &t[op->out[0]];
    k_rope_table a = {.freq = cuda_address(b, &t[op->in[0]], arena),
                      .pos = addr(b->io.pos),
                      .y = cuda_address(b, y, arena),
                      .mscale = op->p.rope.mscale,
                      .n_rot = op->p.rope.n_rot,
                      .ldy = (int32_t)y->ld};
    CUDA_LAUNCH(b, l, CK_rope_table, a, y->n_rows, 1, 1, 64, 0);
}

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
                .kv_slot = addr(b->io.kv_slot[g]),
                .n_kv_head = op->p.kv.n_kv_head,
                .head_dim = op->p.kv.head_dim,
                .ldk = (int32_t)k->ld,
                .ldv = (int32_t)v->ld,
                .page_tokens = b->caps.page_tokens[g],
                .kv_type = type_of(t[op->in[2]].fmt.dtype)};
    CUDA_LAUNCH(b, l, CK_rope_kv, a, k->n_rows, (2 * a.n_kv_head + 3) / 4, 1, 128, 0);
}

static void lower_rope_kv(cuda_backend *b, const mx_op *op, const mx_tensor *t, CUdeviceptr arena,
                          cuda_list *l) {
    const mx_tensor *q = &t[op->in[0]], *k = &t[op->in[1]], *v = &t[op->in[2]];
    const mx_tensor *cs = &t[op->in[3]], *y = &t[op->out[0]];
    const mx_tensor *qn = op->in[4] == MX_NONE ? NULL : &t[op->in[4]];
    const mx_tensor *kn = op->in[5] == MX_NONE ? NULL : &t[op->in[5]];
    int32_t g = op->p.rope.group;
    k_rope a = {.q = cuda_address(b, q, arena),
                .k = cuda_address(b, k, arena),
                .v = cuda_address(b, v, arena),
                .cs = cuda_address(b, cs, arena),
                .qn = cuda_address(b, qn, arena),
                .kn = cuda_address(b, kn, arena),
                .y = cuda_address(b, y, arena),
                .ks = cuda_address(b, &t[op->in[6]], arena),
                .vs = cuda_address(b, &t[op->in[7]], arena),
                .kv_slot = addr(b->io.kv_slot[g]),
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
                .kv_type = type_of(t[op->in[6]].fmt.dtype),
                .eps = op->p.rope.eps};
    CUDA_LAUNCH(b, l, CK_rope_kv, a, q->n_rows, (a.n_head + 2 * a.n_kv_head + 3) / 4, 1, 128, 0);
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
static const size_t fixed_part_bytes = (size_t)64 << 20; // its partial results, at most

int32_t cuda_row_splits(const cuda_backend *b, int32_t n_groups) {
    return 2 * MX_MAX(1, MX_MIN(MAX_SPLITS / 2, b->n_sm / n_groups));
}

// Splits of a row's context. One row: what a launch of many layers would take, so that both give
// the same bits. Else about 5 CTAs an SM (a short wave at the end), 128 tokens or more each.
// Deterministic: the chunks that the longest context of the bucket can have; the kernel cuts.
static int32_t attn_splits(const cuda_backend *b, const mx_op *op, int64_t n_rows, int64_t cells) {
    int64_t ctx = op->p.attn.ctx_bucket;
    if (op->p.attn.window > 0) ctx = MX_MIN(ctx, (int64_t)op->p.attn.window + 16);
    if (b->fixed_attn) {
        return (int32_t)MX_MAX(1, MX_MIN((ctx + FIXED_CHUNK - 1) / FIXED_CHUNK, MAX_SPLITS));
    }
    if (n_rows == 1) return cuda_row_splits(b, (int32_t)cells);
    int64_t want = (5 * (int64_t)b->n_sm + cells - 1) / cells;
    return (int32_t)MX_MAX(1, MX_MIN(want, MX_MIN(ctx / 128, MAX_SPLITS)));
}

// Decode attention of all rows; of so few at a time that partial results stay within bounds when
// they are a prefill's (deterministic).
static void launch_rows(cuda_backend *b, const k_attn *all, cuda_kernel kernel, cuda_list *l) {
    k_attn a = *all;
    int32_t nr = a.group_heads, most = a.n_rows;
    size_t row = (size_t)a.n_groups * (size_t)(a.n_split * nr) * (size_t)(a.head_dim + 4) * 4;
    if (b->fixed_attn && a.n_split > 1) {
        most = (int32_t)MX_MAX((size_t)1, MX_MIN((size_t)most, fixed_part_bytes / row));
    }
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
        CUDA_LAUNCH(b, l, kernel, a, a.n_split, a.n_groups, a.n_rows, 128,
                    4 * nr * (a.head_dim + 4) * 4);
    }
}

static void lower_attn(cuda_backend *b, const mx_plan *plan, const mx_op *op, CUdeviceptr arena,
                       cuda_list *l) {
    const mx_tensor *t = plan->tensors, *q = &t[op->in[0]], *y = &t[op->out[0]];
    int32_t g = op->p.attn.group, hd = op->p.attn.head_dim;
    k_attn a = {.q = cuda_address(b, q, arena),
                .ks = cuda_address(b, &t[op->in[1]], arena),
                .vs = cuda_address(b, &t[op->in[2]], arena),
                .y = cuda_address(b, y, arena),
                .pos = addr(b->io.pos),
                .tok_range = addr(b->io.tok_range),
                .page_table = addr(b->io.page_table[g]),
                .range_first = addr(b->io.range_first),
                .range_pos0 = addr(b->io.range_pos0),
                .counts = addr(b->io.counts),
                .ticket = l->tickets,
                .scale = op->p.attn.scale,
                .softcap = op->p.attn.softcap,
                .n_head = op->p.attn.n_head,
                .n_kv_head = op->p.attn.n_kv_head,
                .head_dim = hd,
                .n_rep = op->p.attn.n_head / op->p.attn.n_kv_head,
                .window = op->p.attn.window,
                .ldq = (int32_t)q->ld,
                .ldy = (int32_t)y->ld,
                .page_tokens = b->caps.page_tokens[g],
                .max_pages = b->caps.max_pages[g],
                .kv_type = type_of(t[op->in[1]].fmt.dtype),
                .n_rows = (int32_t)q->n_rows};
    bool one_page = a.max_pages == 1; // dense: of any length
    bool fast = a.kv_type == KTYPE_F16 && hd % 8 == 0 && hd <= 512 && a.page_tokens >= 16 &&
                (one_page || is_pow2(a.page_tokens));
    if (!fast) {
        l->slow[MX_SLOW_ATTN_PLAIN]++;
        CUDA_LAUNCH(b, l, CK_attn_any, a, a.n_head, a.n_rows, 1, 128, (5 * hd + 16) * 4);
        return;
    }
    a.page_shift = one_page ? 30 : log2_of(a.page_tokens);
    int32_t size = hd <= 64 ? 0 : hd <= 128 ? 1 : hd <= 256 ? 2 : 3;
    if (plan->phase == MX_PHASE_PREFILL && a.n_rows >= 16 && size < 3 && !b->fixed_attn) {
        int32_t hdp = 64 << size, stage = 64 * (hdp * 4 + 80);
        int32_t blocks = (a.n_rows + 63) / 64 + MX_MIN(b->caps.max_range, a.n_rows);
        // Rows outside every range (padding) stay as they are: nothing reads them.
        CUDA_LAUNCH(b, l, CK_prefill_h64 + size, a, blocks, a.n_head, 1, 128, 2 * stage);
        return;
    }
    int32_t most = size == 3 ? 4 : 8, nr = 1, lg = 0;
    while (nr < a.n_rep && nr < most) nr *= 2, lg++;
    a.group_heads = nr;
    a.n_groups = a.n_kv_head * ((a.n_rep + nr - 1) / nr);
    a.n_split = attn_splits(b, op, a.n_rows, (int64_t)a.n_rows * a.n_groups);
    a.chunk = b->fixed_attn ? FIXED_CHUNK : 0;
    a.part = l->scratch;
    launch_rows(b, &a, (cuda_kernel)(CK_attn_h64_r1 + size * 4 + lg), l);
}

static void lower_sample(cuda_backend *b, const mx_op *op, const mx_tensor *t, CUdeviceptr arena,
                         cuda_list *l) {
    const mx_tensor *x = &t[op->in[0]];
    k_sample a = {.logits = cuda_address(b, x, arena),
                  .rows = addr(b->io.sample),
                  .edits = addr(b->io.edits),
                  .counts = addr(b->io.counts),
                  .out_id = addr(b->io.out_id),
                  .out_logprob = addr(b->io.out_logprob),
                  .part = l->scratch,
                  .ticket = l->tickets,
                  .n_vocab = (int32_t)x->n_cols,
                  .ld = (int32_t)x->ld,
                  .n_part = (int32_t)MX_MIN((x->n_cols + 2047) / 2048, 64)};
    l->scratch_bytes = MX_MAX(l->scratch_bytes, (size_t)x->n_rows * (size_t)a.n_part * 32);
    l->n_tickets = MX_MAX(l->n_tickets, (size_t)x->n_rows);
    CUDA_LAUNCH(b, l, CK_sample, a, a.n_part, x->n_rows, 1, 256, 0);
}

_Static_assert(sizeof(k_sample_row) == sizeof(mx_sample_row) &&
                   sizeof(k_sample_edit) == sizeof(mx_sample_edit),
               "kargs.h mirrors mx_sample_row and mx_sample_edit");

void cuda_lower(cuda_backend *b, const mx_plan *plan, const mx_op *op, CUdeviceptr arena,
                cuda_list *l) {
    const mx_tensor *t = plan->tensors;
    cuda_product p;
    switch ((mx_op_kind)op->kind) {
    case MX_OP_EMBED: lower_embed(b, op, t, arena, l); break;
    case MX_OP_RMS_NORM:
    case MX_OP_NORM_ADD: lower_norm(b, op, t, arena, l); break;
    case MX_OP_ADD: lower_map(b, op, t, arena, l, KMAP_ADD); break;
    case MX_OP_GLU: lower_map(b, op, t, arena, l, KMAP_GLU); break;
    case MX_OP_SOFTCAP: lower_map(b, op, t, arena, l, KMAP_SOFTCAP); break;
    case MX_OP_COPY:
    case MX_OP_ALL_REDUCE: lower_map(b, op, t, arena, l, KMAP_COPY); break;
    case MX_OP_GATHER: lower_map(b, op, t, arena, l, KMAP_GATHER); break;
    case MX_OP_ROPE_TABLE: lower_rope_table(b, op, t, arena, l); break;
    case MX_OP_ROPE: lower_rope(b, op, t, arena, l); break;
    case MX_OP_KV_WRITE: lower_kv_write(b, op, t, arena, l); break;
    case MX_OP_ROPE_KV: lower_rope_kv(b, op, t, arena, l); break;
    case MX_OP_ATTN: lower_attn(b, plan, op, arena, l); break;
    case MX_OP_SAMPLE: lower_sample(b, op, t, arena, l); break;
    default:
        CHECKF(cuda_product_of(op, t, &p), "op %s", mx_op_get((mx_op_kind)op->kind)->name);
        cuda_lower_product(b, &p, arena, l);
    }
}

// Norm and GLU inside a product need packed weights, and gate and up of one format.
bool cuda_supports(const cuda_backend *b, const mx_op *op, const mx_tensor *t) {
    (void)b;
    cuda_product p;
    if (op->kind == MX_OP_ROPE_KV) return op->p.rope.head_dim <= 512;
    if (!cuda_product_of(op, t, &p)) return true;
    bool packed = true, same = true;
    for (int i = 0; i < p.n; i++) {
        packed = packed && p.w[i]->layout == MX_LAYOUT_PACKED;
        same = same && p.w[i]->pack == p.w[0]->pack && p.w[i]->n_rows == p.w[0]->n_rows &&
               p.w[i]->fmt.scale_dtype == p.w[0]->fmt.scale_dtype;
    }
    if (p.act != KACT_NONE) return packed && same;
    return !p.gamma || packed;
}
