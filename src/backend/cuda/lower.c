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
    // plan_make fills in fn.
    l->items[l->n_items++] = (cuda_item){.kind = k == CK_COUNT ? CUDA_ITEM_LT : CUDA_ITEM_KERNEL,
                                         .kernel = k,
                                         .grid = {gx, gy, gz},
                                         .block = block,
                                         .smem = smem,
                                         .arg_offset = at};
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
                    .type = affine ? KTYPE_AFFINE : cuda_type_of(w->fmt.dtype),
                    .bits = w->fmt.bits,
                    .group = w->fmt.group,
                    .scale_type = cuda_type_of(w->fmt.scale_dtype)};
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
                 .ids = cuda_host_address(b->io.ids),
                 .tok_range = cuda_host_address(b->io.tok_range),
                 .out_id = cuda_host_address(b->io.out_id),
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
               .rows = cuda_host_address(b->io.out_tok),
               .counts = cuda_host_address(b->io.counts),
               .what = what,
               .n_cols = (int32_t)y->n_cols,
               .lda = (int32_t)x->ld,
               .ldb = z ? (int32_t)z->ld : 0,
               .ldy = (int32_t)y->ld,
               .act = what == KMAP_GLU ? op->p.glu.act : 0,
               .cap = what == KMAP_SOFTCAP ? op->p.softcap.cap : 0,
               .n_rows = (int32_t)y->n_rows};
    CUDA_LAUNCH(b, l, CK_map, a, y->n_rows, MX_MIN((y->n_cols + 255) / 256, 512), 1, 256, 0);
}

static void lower_rope_table(cuda_backend *b, const mx_op *op, const mx_tensor *t,
                             CUdeviceptr arena, cuda_list *l) {
    const mx_tensor *y = &t[op->out[0]];
    k_rope_table a = {.freq = cuda_address(b, &t[op->in[0]], arena),
                      .pos = cuda_host_address(b->io.pos),
                      .y = cuda_address(b, y, arena),
                      .mscale = op->p.rope.mscale,
                      .n_rot = op->p.rope.n_rot,
                      .ldy = (int32_t)y->ld};
    CUDA_LAUNCH(b, l, CK_rope_table, a, y->n_rows, 1, 1, 64, 0);
}

static void lower_sample(cuda_backend *b, const mx_op *op, const mx_tensor *t, CUdeviceptr arena,
                         cuda_list *l) {
    const mx_tensor *x = &t[op->in[0]];
    k_sample a = {.logits = cuda_address(b, x, arena),
                  .rows = cuda_host_address(b->io.sample),
                  .edits = cuda_host_address(b->io.edits),
                  .counts = cuda_host_address(b->io.counts),
                  .out_id = cuda_host_address(b->io.out_id),
                  .out_logprob = cuda_host_address(b->io.out_logprob),
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
    case MX_OP_ROPE:
    case MX_OP_KV_WRITE:
    case MX_OP_ROPE_KV:
    case MX_OP_ATTN: cuda_lower_attention(b, plan, op, arena, l); break;
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
