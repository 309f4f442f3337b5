// Matrix products: which kernel, and its arguments.
//
//   1..gemv_rows tokens   one pass over the weights (gemv.cuh), several outputs in one launch
//   fewer than lt_rows    bf16 activations, one pass over the weights for up to 64 (skinny.cuh);
//                         twice as many for a large matrix
//   more                  bf16 activations: weights to bf16 rows and cuBLASLt, or without it own
//                         kernels (gemm.cuh)
//   rows formats          plain kernel (mm_rows)
// MLXCEL_EXACT: every product through the one-pass kernel, whose activations are 16-bit fixed point
// or two 16-bit floats. MLXCEL_DETERMINISTIC: the same, by the instances of 8 warps only.
#include "backend/cuda/cuda_int.h"

#include <string.h>

static const mx_tensor *opt(const mx_op *op, const mx_tensor *t, int i) {
    return i < op->n_in && op->in[i] != MX_NONE ? &t[op->in[i]] : NULL;
}

bool cuda_product_of(const mx_op *op, const mx_tensor *t, cuda_product *p) {
    *p = (cuda_product){.n = 1, .act = KACT_NONE, .x = &t[op->in[0]]};
    int w = 1; // index of the first weight
    switch ((mx_op_kind)op->kind) {
    case MX_OP_MATMUL: p->bias[0] = opt(op, t, 2); break;
    case MX_OP_MATMUL_ADD: p->bias[0] = opt(op, t, 2), p->res = opt(op, t, 3); break;
    case MX_OP_NORM_MATMUL: w = 2, p->bias[0] = opt(op, t, 3), p->eps = op->p.norm.eps; break;
    case MX_OP_NORM_QKV: w = 2, p->n = 3, p->eps = op->p.norm.eps; break;
    case MX_OP_QKV: p->n = 3; break;
    case MX_OP_NORM_GLU: w = 2, p->n = 2, p->eps = op->p.glu.eps, p->act = op->p.glu.act; break;
    case MX_OP_MATMUL_GLU: p->n = 2, p->act = op->p.glu.act; break;
    default: return false;
    }
    if (w == 2) p->gamma = &t[op->in[1]];
    for (int i = 0; i < p->n; i++) {
        p->w[i] = &t[op->in[w + i]];
        if (p->n == 3) p->bias[i] = opt(op, t, w + 3 + i);
        if (i < op->n_out) p->y[i] = &t[op->out[i]];
    }
    return true;
}

static int32_t scale_type(const mx_tensor *w) {
    return w->fmt.dtype == MX_AFFINE && w->fmt.scale_dtype == MX_BF16;
}

static int32_t n_kb_of(const mx_tensor *w) {
    int32_t kb = cuda_pack_get(w->pack)->kb;
    return (int32_t)((w->n_cols + kb - 1) / kb);
}

static k_seg seg_of(const cuda_backend *b, const cuda_product *p, int i, CUdeviceptr arena) {
    const mx_tensor *y = p->y[i] ? p->y[i] : p->y[0];
    return (k_seg){.w = cuda_address(b, p->w[i], arena),
                   .y = cuda_address(b, y, arena),
                   .bias = cuda_address(b, p->bias[i], arena),
                   .res = cuda_address(b, p->res, arena),
                   .n_rows = (int32_t)p->w[i]->n_rows,
                   .n_strips = (int32_t)((p->w[i]->n_rows + 15) / 16),
                   .ldy = (int32_t)y->ld,
                   .ldr = p->res ? (int32_t)p->res->ld : 0};
}

static size_t align128(size_t n) {
    return (n + 127) / 128 * 128;
}

// Shared memory of the one-pass kernel for `tok` tokens; fills the offsets of a.
static size_t gemv_smem(const cuda_pack_info *pi, k_gemv *a, int32_t tok) {
    size_t warps = tok == 8 ? 16 : 8; // kernels/gemv.cuh
    size_t at = warps * (tok == 8 ? KGEMV_SLOTS_16 : KGEMV_SLOTS_8) * (size_t)pi->slot_bytes;
    size_t cols = (size_t)a->n_kb * (size_t)pi->kb;
    a->off_xs = (int32_t)at;
    at = align128(at + (size_t)tok * cols * (pi->bits == 16 ? 4 : 2));
    a->off_xm = (int32_t)at;
    if (pi->bits != 16) at = align128(at + (size_t)tok * cols / (size_t)pi->sum_cols * 4);
    int32_t run = (a->n_kb + (int32_t)warps - 1) / (int32_t)warps * pi->kb;
    a->n_slices = (run + KSLICE - 1) / KSLICE;
    a->off_d = (int32_t)at;
    at = align128(at + warps * (8 + (size_t)a->n_slices * (size_t)tok) * 4);
    a->off_part = (int32_t)at;
    at += 2 * warps * (size_t)tok * 16 * 4;
    a->off_gamma = (int32_t)at;
    return at + (a->gamma ? cols * 4 : 0);
}

// Tokens that kernel v of a format prepares at once.
static int32_t gemv_tokens(const cuda_pack_info *pi, int v) {
    static const int32_t coded[] = {1, 4, 8}, floats[] = {1, 2, 4};
    return pi->bits == 16 ? floats[v] : coded[v];
}

// The kernel of fewest passes over the weights whose shared memory suffices; -1: none, for every
// number of tokens alike when all is true. Floats that need a second pass go elsewhere unless all
// is true. Deterministic: the warps' runs of columns decide scales of activations and the order of
// sums, so instances of another number of warps are left out.
static int gemv_choose(const cuda_backend *b, const cuda_pack_info *pi, k_gemv *a, bool all) {
    for (int v = 2; v >= 0; v--) {
        int32_t most = gemv_tokens(pi, v);
        if (b->fixed_products && most == 8) continue;
        if (v > 0 && a->n_tok <= gemv_tokens(pi, v - 1)) continue;
        if (gemv_smem(pi, a, most) + 16 > (size_t)b->smem_max) continue; // 16: static
        int32_t passes = (a->n_tok + most - 1) / most;
        if (passes > (pi->bits == 16 ? 1 : 2) && !all) return -1;
        a->pass_tok = (a->n_tok + passes - 1) / passes;
        return v;
    }
    return -1;
}

// Which parts of a ring are asked for before the activations. They queue behind what is on its way:
// so half of the ring, or, when there is no more than the ring holds and so nothing to do but wait,
// all of it, one part at a time.
static void ask_early(const cuda_backend *b, const cuda_pack_info *pi, k_gemv *a, int v) {
    bool many = gemv_tokens(pi, v) == 8;
    int32_t warps = many ? 16 : 8, slots = many ? KGEMV_SLOTS_16 : KGEMV_SLOTS_8;
    int32_t run = (a->n_kb + warps - 1) / warps * pi->block_bytes;
    int32_t items = (a->n_items + b->n_sm - 1) / b->n_sm * (a->act != KACT_NONE ? 2 : 1);
    bool all = (run + pi->slot_bytes - 1) / pi->slot_bytes * items <= slots;
    a->early = all ? slots : 2;
    a->one_by_one = all;
}

static bool lower_gemv(cuda_backend *b, const cuda_product *p, CUdeviceptr arena, cuda_list *l) {
    const cuda_pack_info *pi = cuda_pack_get(p->w[0]->pack);
    const mx_tensor *x = p->x;
    k_gemv a = {.x = cuda_address(b, x, arena),
                .gamma = cuda_address(b, p->gamma, arena),
                .eps = p->eps,
                .n_seg = p->n,
                .n_tok = (int32_t)x->n_rows,
                .n_cols = (int32_t)x->n_cols,
                .ldx = (int32_t)x->ld,
                .n_kb = n_kb_of(p->w[0]),
                .scale_type = scale_type(p->w[0]),
                .act = p->act,
                .vec4 = x->n_cols % 4 == 0 && x->ld % 4 == 0 && x->offset % 16 == 0};
    for (int i = 0; i < p->n; i++) {
        a.seg[i] = seg_of(b, p, i, arena);
        if (p->act == KACT_NONE || i == 0) a.n_items += a.seg[i].n_strips;
    }
    int v = gemv_choose(b, pi, &a, b->exact || b->fixed_products);
    if (v < 0) return false;
    size_t smem = gemv_smem(pi, &a, gemv_tokens(pi, v));
    // More than half of an SM, so that the next kernel's CTAs spread one an SM.
    smem = MX_MAX(smem, (size_t)b->smem_sm / 2 + 1024);
    ask_early(b, pi, &a, v);
    int32_t passes = (a.n_tok + a.pass_tok - 1) / a.pass_tok;
    cuda_kernel k = (cuda_kernel)(CK_gemv_a4g32_t1 + (p->w[0]->pack - 1) * 3 + v);
    CUDA_LAUNCH(b, l, k, a, MX_MIN(a.n_items, b->n_sm), passes, 1,
                gemv_tokens(pi, v) == 8 ? 512 : 256, smem);
    return true;
}

// x as bf16 rows at the list's scratch; *scratch: bytes taken. With parts, the sums of each run of
// 64 columns follow; their address is returned.
static CUdeviceptr cast_x(cuda_backend *b, const cuda_product *p, int32_t ld, int32_t order,
                          int32_t parts, size_t *scratch, CUdeviceptr arena, cuda_list *l) {
    size_t n_tok = (size_t)p->x->n_rows, at = align128(n_tok * (size_t)ld * 2);
    k_cast c = {.x = cuda_address(b, p->x, arena),
                .gamma = cuda_address(b, p->gamma, arena),
                .y = l->scratch,
                .sums = parts ? l->scratch + at : 0,
                .eps = p->eps,
                .n_cols = (int32_t)p->x->n_cols,
                .ldx = (int32_t)p->x->ld,
                .ldy = ld,
                .order = order,
                .parts = parts};
    *scratch = at + (n_tok + 63) / 64 * (size_t)ld * (size_t)parts * 4;
    CUDA_LAUNCH(b, l, CK_cast_rows, c, p->x->n_rows, (ld + KCAST_COLS - 1) / KCAST_COLS, 1, 256, 0);
    return c.sums;
}

static void lower_gemm(cuda_backend *b, const cuda_product *p, CUdeviceptr arena, cuda_list *l) {
    const cuda_pack_info *pi = cuda_pack_get(p->w[0]->pack);
    k_gemm a = {.n_seg = p->n,
                .n_tok = (int32_t)p->x->n_rows,
                .n_kb = n_kb_of(p->w[0]),
                .scale_type = scale_type(p->w[0]),
                .act = p->act};
    a.ldxb = a.n_kb * pi->kb;
    size_t used;
    a.xb = l->scratch;
    cast_x(b, p, a.ldxb, KORDER_PLAIN, 0, &used, arena, l);
    l->scratch_bytes = MX_MAX(l->scratch_bytes, used);
    for (int i = 0; i < p->n; i++) {
        a.seg[i] = seg_of(b, p, i, arena);
        if (p->act == KACT_NONE || i == 0) a.n_strips += a.seg[i].n_strips;
    }
    cuda_kernel k =
        (cuda_kernel)(CK_gemm_a4g32_n64 + (p->w[0]->pack - 1) * 2 + (p->act != KACT_NONE));
    CUDA_LAUNCH(b, l, k, a, (a.n_tok + 63) / 64, (a.n_strips + 7) / 8, 1, 256, 3 * 64 * 160);
}

// ---- Batches (skinny.cuh) ----------------------------------------------------------------------

static size_t skinny_stage(const cuda_pack_info *pi, int32_t tokens) {
    size_t weights = 2 * (size_t)pi->stage_bytes * KSKINNY_PAIRS;
    size_t sums = pi->bits == 16 ? 0 : (size_t)KSKINNY_PARTS(pi->group) * 4;
    return (size_t)KSKINNY_SHARES *
           (weights + (size_t)KSKINNY_RUNS(pi->bits) * (size_t)tokens * (128 + sums));
}

static size_t skinny_smem(const cuda_pack_info *pi, const k_skinny *a, int32_t tokens) {
    size_t sums =
        (size_t)KSKINNY_SHARES * 2 * (size_t)a->n_pairs_cta * (size_t)tokens * KSKINNY_ROW * 4;
    return MX_MAX((size_t)a->stages * skinny_stage(pi, tokens), sums);
}

// Pairs of a CTA and CTAs that share the columns, by a model of the time: a CTA streams its weights
// at its share of the read rate, its activations, which come from L2, at about twice that, and
// takes a time to start. Not by the number of tokens that there are: rows may not depend on it.
static void skinny_split(const cuda_backend *b, const cuda_pack_info *pi, int32_t tokens,
                         k_skinny *a) {
    int32_t runs = a->n_kb * pi->kb / 64, most = b->clusters ? 8 : 1;
    double best = 0;
    for (int32_t split = 1; split <= most; split *= 2) {
        // a cluster lies in one of the device's groups of 16 or 18 SMs
        int32_t at_once = split > 2 ? MX_MAX(b->n_sm / 16 * 16, 8) : b->n_sm;
        for (int32_t q = 1; q <= KSKINNY_PAIRS; q++) {
            int32_t ctas = (a->n_pairs + q - 1) / q * split;
            double bytes = (double)runs / split *
                           (q * 2 * pi->stage_bytes / KSKINNY_RUNS(pi->bits) + tokens * 64);
            double us = (ctas + at_once - 1) / at_once * (1.5 + bytes / 34e3) + 0.1 * split;
            if (best > 0 && us >= best) continue;
            best = us, a->n_split = split, a->n_pairs_cta = q;
        }
    }
}

// The kernel for the number of tokens, or one of fewer tokens and more passes where shared memory
// is scarce; 32 for every number where rows may not depend on it. Fills in the split and the
// stages.
static int skinny_choose(const cuda_backend *b, const cuda_pack_info *pi, k_skinny *a) {
    int v = b->fixed_products ? 1 : a->n_tok <= 16 ? 0 : a->n_tok <= 32 ? 1 : 2;
    for (; v >= 0; v--) {
        skinny_split(b, pi, 16 << v, a);
        for (a->stages = KSKINNY_STAGES; a->stages >= 2; a->stages--) {
            if (skinny_smem(pi, a, 16 << v) <= (size_t)b->smem_max) break;
        }
        if (a->stages == 5) a->stages = 4; // see wait of the kernel
        if (a->stages >= 2) return v;
        if (b->fixed_products) break;
    }
    return -1;
}

static bool lower_skinny(cuda_backend *b, const cuda_product *p, CUdeviceptr arena, cuda_list *l) {
    const cuda_pack_info *pi = cuda_pack_get(p->w[0]->pack);
    k_skinny a = {.n_seg = p->n,
                  .n_tok = (int32_t)p->x->n_rows,
                  .n_kb = n_kb_of(p->w[0]),
                  .scale_type = scale_type(p->w[0]),
                  .act = p->act};
    a.ldxb = a.n_kb * pi->kb;
    for (int i = 0; i < p->n; i++) {
        a.seg[i] = seg_of(b, p, i, arena);
        if (p->act == KACT_NONE) a.n_pairs += (a.seg[i].n_strips + 1) / 2;
    }
    if (p->act != KACT_NONE) a.n_pairs = a.seg[0].n_strips;
    int v = skinny_choose(b, pi, &a);
    if (v < 0) return false;
    int32_t tokens = 16 << v;
    size_t used;
    a.xb = l->scratch;
    a.sums = cast_x(b, p, a.ldxb, pi->bits == 16 ? KORDER_LANES : KORDER_CODES,
                    pi->bits == 16 ? 0 : KSKINNY_PARTS(pi->group), &used, arena, l);
    l->scratch_bytes = MX_MAX(l->scratch_bytes, used);
    size_t smem = MX_MAX(skinny_smem(pi, &a, tokens), (size_t)b->smem_sm / 2 + 1024);
    cuda_kernel k = (cuda_kernel)(CK_skinny_a4g32_n16 + (p->w[0]->pack - 1) * 3 + v);
    CUDA_LAUNCH(b, l, k, a, (a.n_pairs + a.n_pairs_cta - 1) / a.n_pairs_cta * a.n_split,
                (a.n_tok + tokens - 1) / tokens, 1, KSKINNY_SHARES * KSKINNY_PAIRS * 32, smem);
    l->items[l->n_items - 1].cluster = (uint32_t)a.n_split;
    return true;
}

// Up to how many tokens it is faster than bf16 rows and cuBLASLt: for a large matrix two passes
// are, since its bf16 rows take so long to make.
static int64_t most_skinny(const cuda_backend *b, const cuda_product *p) {
    int64_t n_rows = 0;
    for (int i = 0; i < p->n; i++) n_rows += p->w[i]->n_rows;
    return (b->lt_rows - 1) * (n_rows >= 16384 ? 2 : 1);
}

// One weight through bf16 rows and cuBLASLt into y (float32, ld ldy).
static void lt_one(cuda_backend *b, const mx_tensor *w, CUdeviceptr x, int32_t ldx, CUdeviceptr y,
                   int32_t ldy, int32_t n_tok, CUdeviceptr wb, CUdeviceptr arena, cuda_list *l) {
    k_unpack u = {.w = {.w = cuda_address(b, w, arena),
                        .pack = w->pack,
                        .scale_type = scale_type(w),
                        .n_kb = n_kb_of(w)},
                  .y = wb,
                  .n_rows = (int32_t)w->n_rows,
                  .n_cols = (int32_t)w->n_cols};
    CUDA_LAUNCH(b, l, CK_unpack_a4g32 + w->pack - 1, u, b->n_sm * 8, 1, 1, 256, 0);
    cuda_lt_args a = {.x = x,
                      .w = wb,
                      .y = y,
                      .workspace = l->scratch,
                      .n_tok = n_tok,
                      .n = (int32_t)w->n_rows,
                      .k = (int32_t)w->n_cols,
                      .ldx = ldx,
                      .ldy = ldy};
    cuda_launch(b, l, CK_COUNT, &a, sizeof(a), 1, 1, 1, 1, 0);
}

// Scratch: workspace | bf16 x | bf16 w | gate and up.
static void lower_lt(cuda_backend *b, const cuda_product *p, CUdeviceptr arena, cuda_list *l) {
    int32_t n_tok = (int32_t)p->x->n_rows, k = (int32_t)p->x->n_cols, ldx = (k + 7) / 8 * 8;
    size_t at = align128(cuda_lt_workspace()), n_max = 0, used;
    for (int i = 0; i < p->n; i++) n_max = MX_MAX(n_max, (size_t)p->w[i]->n_rows);
    CUdeviceptr base = l->scratch;
    l->scratch = base + at; // cast_x writes at l->scratch
    CUdeviceptr x = l->scratch;
    cast_x(b, p, ldx, KORDER_PLAIN, 0, &used, arena, l);
    l->scratch = base;
    at += used;
    CUdeviceptr wb = base + at;
    at += align128(n_max * (size_t)k * 2);
    CUdeviceptr tmp = base + at;
    size_t plane = align128((size_t)n_tok * n_max * 4);
    if (p->act != KACT_NONE) at += 2 * plane;
    l->scratch_bytes = MX_MAX(l->scratch_bytes, at);
    for (int i = 0; i < p->n; i++) {
        k_seg s = seg_of(b, p, i, arena);
        bool glu = p->act != KACT_NONE;
        lt_one(b, p->w[i], x, ldx, glu ? tmp + (size_t)i * plane : s.y, glu ? s.n_rows : s.ldy,
               n_tok, wb, arena, l);
        if (glu ? i == 0 : !s.bias && !s.res) continue;
        k_finish f = {.a = glu ? tmp : s.y,
                      .b = glu ? tmp + plane : 0,
                      .bias = s.bias,
                      .res = s.res,
                      .y = s.y,
                      .n_rows = n_tok,
                      .n_cols = s.n_rows,
                      .lda = glu ? s.n_rows : s.ldy,
                      .ldy = s.ldy,
                      .ldr = s.ldr,
                      .act = p->act};
        CUDA_LAUNCH(b, l, CK_finish, f, n_tok, (s.n_rows + 255) / 256, 1, 256, 0);
    }
}

static void lower_rows(cuda_backend *b, const cuda_product *p, int i, CUdeviceptr arena,
                       cuda_list *l) {
    const mx_tensor *w = p->w[i];
    k_seg s = seg_of(b, p, i, arena);
    size_t code = 0, all = 0;
    CHECK(mx_wfmt_code_bytes(w->fmt, w->n_cols, &code) &&
          mx_wfmt_row_bytes(w->fmt, w->n_cols, &all));
    bool affine = w->fmt.dtype == MX_AFFINE;
    k_mm_rows a = {.w = {.data = s.w,
                         .scales = s.w + w->scales_offset,
                         .biases = s.w + w->biases_offset,
                         .row_bytes = (int64_t)code,
                         .scale_row_bytes = (int64_t)(all - code) / 2,
                         .type = affine ? KTYPE_AFFINE : cuda_type_of(w->fmt.dtype),
                         .bits = w->fmt.bits,
                         .group = w->fmt.group,
                         .scale_type = cuda_type_of(w->fmt.scale_dtype)},
                   .x = cuda_address(b, p->x, arena),
                   .y = s.y,
                   .bias = s.bias,
                   .res = s.res,
                   .n_rows = s.n_rows,
                   .n_cols = (int32_t)w->n_cols,
                   .n_tok = (int32_t)p->x->n_rows,
                   .ldx = (int32_t)p->x->ld,
                   .ldy = s.ldy,
                   .ldr = s.ldr};
    CUDA_LAUNCH(b, l, CK_mm_rows, a, (a.n_rows + 7) / 8, (a.n_tok + 7) / 8, 1, 256, 0);
}

static bool same_pack(const cuda_product *p) {
    for (int i = 0; i < p->n; i++) {
        const mx_tensor *w = p->w[i];
        if (w->layout != MX_LAYOUT_PACKED || w->pack != p->w[0]->pack ||
            scale_type(w) != scale_type(p->w[0])) {
            return false;
        }
    }
    return true;
}

void cuda_lower_product(cuda_backend *b, const cuda_product *p, CUdeviceptr arena, cuda_list *l) {
    if (p->n > 1 && !same_pack(p)) { // q, k, v of several formats: one product each
        CHECK(p->act == KACT_NONE);
        for (int i = 0; i < p->n; i++) {
            cuda_product one = *p;
            one.n = 1, one.w[0] = p->w[i], one.bias[0] = p->bias[i], one.y[0] = p->y[i];
            cuda_lower_product(b, &one, arena, l);
        }
        return;
    }
    if (p->w[0]->layout != MX_LAYOUT_PACKED) {
        CHECK(!p->gamma && p->act == KACT_NONE);
        lower_rows(b, p, 0, arena, l);
        return;
    }
    int64_t n = p->x->n_rows;
    bool one_pass = b->exact || b->fixed_products || n <= b->gemv_rows;
    if (one_pass && lower_gemv(b, p, arena, l)) return;
    if (b->skinny && (n <= most_skinny(b, p) || b->fixed_products)) {
        if (lower_skinny(b, p, arena, l)) return;
    }
    // cuBLASLt wants 16-byte rows.
    if (b->lt && !b->fixed_products && n >= b->lt_rows && p->x->n_cols % 8 == 0) {
        lower_lt(b, p, arena, l);
    } else {
        bool many = n >= b->lt_rows && !b->fixed_products;
        l->slow[many ? MX_SLOW_NO_BLASLT : MX_SLOW_NO_SKINNY]++;
        lower_gemm(b, p, arena, l);
    }
}
