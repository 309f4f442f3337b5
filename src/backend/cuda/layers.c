// Many layers of one token as one launch (kernels/step.cuh): which ops of a plan it can take, and
// its arguments.
//
// A layer is NORM_QKV, ROPE_KV, ATTN, MATMUL_ADD, NORM_GLU, MATMUL_ADD in this order, each reading
// the one before; every layer of a launch has the same geometry and number format. Anything else
// stays with the kernels of single ops, which give the same bits. Addresses of the layers are in a
// table of the plan; words and epochs are in a block of the backend that only launches use.
#include "backend/cuda/cuda_int.h"

#include <string.h>

enum { LAYER_OPS = 6 };

// A layer as its ops and products.
typedef struct layer {
    const mx_op *rope, *attn;
    cuda_product qkv, o, glu, down;
} layer;

static const mx_tensor *tensor_of(const mx_plan *plan, mx_tid id) {
    return id == MX_NONE ? NULL : &plan->tensors[id];
}

// The six ops at op, when they follow each other as a layer does.
static bool layer_at(const mx_plan *plan, const mx_op *op, layer *out) {
    static const uint8_t kinds[LAYER_OPS] = {MX_OP_NORM_QKV,   MX_OP_ROPE_KV,  MX_OP_ATTN,
                                             MX_OP_MATMUL_ADD, MX_OP_NORM_GLU, MX_OP_MATMUL_ADD};
    for (int i = 0; i < LAYER_OPS; i++) {
        if (op[i].kind != kinds[i]) return false;
    }
    const mx_tensor *t = plan->tensors;
    *out = (layer){.rope = &op[1], .attn = &op[2]};
    bool linked =
        op[1].in[0] == op[0].out[0] && op[1].in[1] == op[0].out[1] && op[1].in[2] == op[0].out[2] &&
        op[2].in[0] == op[1].out[0] && op[2].in[1] == op[1].in[6] && op[2].in[2] == op[1].in[7] &&
        op[3].in[0] == op[2].out[0] && op[3].in[3] == op[0].in[0] && op[4].in[0] == op[3].out[0] &&
        op[5].in[0] == op[4].out[0] && op[5].in[3] == op[3].out[0];
    return linked && cuda_product_of(&op[0], t, &out->qkv) && cuda_product_of(&op[3], t, &out->o) &&
           cuda_product_of(&op[4], t, &out->glu) && cuda_product_of(&op[5], t, &out->down);
}

static bool same_format(const mx_tensor *a, const mx_tensor *b) {
    return a->layout == MX_LAYOUT_PACKED && a->pack == b->pack && a->fmt.dtype == b->fmt.dtype &&
           a->fmt.scale_dtype == b->fmt.scale_dtype;
}

// Does layer b have the geometry, format and inputs of layer a?
static bool same_shape(const layer *a, const layer *b) {
    const cuda_product *p[] = {&a->qkv, &a->o, &a->glu, &a->down};
    const cuda_product *q[] = {&b->qkv, &b->o, &b->glu, &b->down};
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < p[i]->n; j++) {
            const mx_tensor *w = p[i]->w[j], *v = q[i]->w[j];
            if (!same_format(v, a->qkv.w[0]) || w->n_rows != v->n_rows || w->n_cols != v->n_cols) {
                return false;
            }
        }
    }
    return !memcmp(&a->rope->p, &b->rope->p, sizeof(a->rope->p)) &&
           !memcmp(&a->attn->p, &b->attn->p, sizeof(a->attn->p)) &&
           a->rope->in[3] == b->rope->in[3] && a->qkv.eps == b->qkv.eps &&
           a->glu.eps == a->qkv.eps && b->glu.eps == b->qkv.eps && a->glu.act == b->glu.act &&
           !b->down.bias[0];
}

static size_t align128(size_t n) {
    return (n + 127) / 128 * 128;
}

static bool aligned16(uint64_t address) {
    return address % 16 == 0;
}

// log2 of the tokens of a page; 30 for one page of any length; -1: not a power of two.
static int32_t page_shift(const cuda_backend *b, int32_t group) {
    int32_t n = b->caps.page_tokens[group], s = 0;
    if (b->caps.max_pages[group] == 1) return 30;
    while ((1 << s) < n) s++;
    return (1 << s) == n && n >= 16 ? s : -1;
}

// Formats with a kernel; others are CK_COUNT. The four kernels of a format are heads of 64 with up
// to 4, with up to 8 query heads a KV head, then heads of 128.
static cuda_kernel kernel_of(const layer *l, int32_t n_rep) {
    static const cuda_kernel of_pack[KPACK_COUNT] = {
#define STEP_PACK(ID, name) [KPACK_##ID] = CK_step_##name##_h64_r4,
        MX_CUDA_STEP_PACKS(STEP_PACK)
#undef STEP_PACK
    };
    cuda_kernel k = of_pack[l->qkv.w[0]->pack];
    if (k == 0) return CK_COUNT;
    return (cuda_kernel)(k + (l->rope->p.rope.head_dim > 64 ? 2 : 0) + (n_rep > 4 ? 1 : 0));
}

// Offsets in shared memory, and its size.
static size_t shared_memory(const cuda_pack_info *pi, k_step *a, int32_t most_kb) {
    size_t warps = 8, cols = (size_t)most_kb * (size_t)pi->kb;
    size_t hd = a->head_dim > 64 ? 128 : 64, heads = a->n_rep > 4 ? 8 : 4;
    size_t at = warps * KSTEP_SLOTS * (size_t)pi->slot_bytes;
    a->off_layers = (int32_t)at;
    at = align128(at + (size_t)a->n_layers * sizeof(k_layer));
    a->off_d = (int32_t)at;
    at = align128(at + 3 * warps * 4);
    a->off_part = (int32_t)at;
    at = align128(at + 2 * KSTEP_BATCH * warps * 16 * 4);
    // Attention uses the memory of the activations, between two products.
    a->off_attn = a->off_xs = (int32_t)at;
    size_t attn = at + 4 * (heads * hd + warps * hd + 8 * hd + heads * 64 + 2304 +
                            warps * heads * (hd + 4)); // AttnShared of kernels/step.cuh
    at = align128(at + cols * (pi->bits == 16 ? 4 : 2));
    a->off_xm = (int32_t)at;
    if (pi->bits != 16) at = align128(at + cols / (size_t)pi->sum_cols * 4);
    return MX_MAX(at, attn);
}

// Geometry of a launch but for its addresses; false: no kernel takes it.
static bool geometry(const cuda_backend *b, const layer *l, int32_t n_layers, k_step *a,
                     cuda_kernel *kernel, size_t *smem) {
    const mx_op_params *r = &l->rope->p, *at = &l->attn->p;
    const cuda_pack_info *pi = cuda_pack_get(l->qkv.w[0]->pack);
    int32_t hd = r->rope.head_dim, heads = r->rope.n_head, kv = r->rope.n_kv_head;
    *a = (k_step){.n_layers = n_layers,
                  .n_embd = (int32_t)l->qkv.x->n_cols,
                  .n_q = heads * hd,
                  .n_kv = kv * hd,
                  .n_ff = (int32_t)l->glu.w[0]->n_rows,
                  .act = l->glu.act,
                  .scale_type = l->qkv.w[0]->fmt.dtype == MX_AFFINE &&
                                l->qkv.w[0]->fmt.scale_dtype == MX_BF16,
                  .n_head = heads,
                  .n_kv_head = kv,
                  .head_dim = hd,
                  .n_rep = heads / kv,
                  .n_rot = r->rope.n_rot,
                  .interleaved = r->rope.interleaved,
                  .window = at->attn.window,
                  .eps = l->qkv.eps,
                  .head_eps = r->rope.eps,
                  .scale = at->attn.scale,
                  .softcap = at->attn.softcap,
                  .page_tokens = b->caps.page_tokens[at->attn.group],
                  .page_shift = page_shift(b, at->attn.group),
                  .max_pages = b->caps.max_pages[at->attn.group]};
    bool heads_fit = hd % 8 == 0 && hd <= 128 && a->n_rep <= 8 && kv <= b->n_sm &&
                     at->attn.n_head == heads && at->attn.head_dim == hd &&
                     at->attn.n_kv_head == kv && r->rope.group == at->attn.group;
    if (!heads_fit || a->page_shift < 0 || a->page_tokens < 16) return false;
    if (a->n_embd % 4 || a->n_q % 4 || a->n_ff % 4) return false;
    a->n_split = cuda_row_splits(b, kv);
    a->in_flight = b->in_flight;
    *kernel = kernel_of(l, a->n_rep);
    if (*kernel == CK_COUNT) return false;
    int32_t most = MX_MAX(a->n_ff, MX_MAX(a->n_embd, a->n_q));
    int32_t kb = (most + pi->kb - 1) / pi->kb;
    if ((kb + 7) / 8 * pi->kb > 14 * 128) return false; // a warp's run, see prepare_words
    *smem = shared_memory(pi, a, kb);
    return *smem + 2048 <= (size_t)b->smem_max; // and what the kernel itself has
}

// Words a launch needs, in 8 bytes each; fills their addresses from base on.
static size_t words_of(k_step *a, uint64_t base) {
    size_t heads = a->n_rep > 4 ? 8 : 4, at = 64;
    size_t part = (size_t)a->n_kv_head * (size_t)a->n_split * heads * (size_t)(a->head_dim + 4);
    struct {
        uint64_t *p;
        size_t n;
    } all[] = {{&a->h0, (size_t)a->n_embd},
               {&a->h1, (size_t)a->n_embd},
               {&a->qkv, (size_t)(a->n_q + 2 * a->n_kv)},
               {&a->att, (size_t)a->n_q},
               {&a->glu, (size_t)a->n_ff},
               {&a->part, part}};
    a->epoch = base;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        *all[i].p = base + at * 8;
        at += (all[i].n + 15) / 16 * 16;
    }
    return at;
}

static k_layer addresses(const cuda_backend *b, const mx_plan *plan, const layer *l,
                         CUdeviceptr arena) {
    const mx_op *r = l->rope;
    return (k_layer){
        .w = {cuda_address(b, l->qkv.w[0], arena), cuda_address(b, l->qkv.w[1], arena),
              cuda_address(b, l->qkv.w[2], arena), cuda_address(b, l->o.w[0], arena),
              cuda_address(b, l->glu.w[0], arena), cuda_address(b, l->glu.w[1], arena),
              cuda_address(b, l->down.w[0], arena)},
        .bias = {cuda_address(b, l->qkv.bias[0], arena), cuda_address(b, l->qkv.bias[1], arena),
                 cuda_address(b, l->qkv.bias[2], arena), cuda_address(b, l->o.bias[0], arena)},
        .norm = {cuda_address(b, l->qkv.gamma, arena), cuda_address(b, l->glu.gamma, arena)},
        .qn = cuda_address(b, tensor_of(plan, r->in[4]), arena),
        .kn = cuda_address(b, tensor_of(plan, r->in[5]), arena),
        .ks = cuda_address(b, tensor_of(plan, r->in[6]), arena),
        .vs = cuda_address(b, tensor_of(plan, r->in[7]), arena)};
}

// Layers from op `first` on that one launch can take. `one` is the first.
static int32_t count_layers(const cuda_backend *b, const mx_plan *plan, int32_t first, int32_t end,
                            layer *one) {
    int32_t n = 0;
    for (int32_t i = first; i + LAYER_OPS <= end; i += LAYER_OPS, n++) {
        layer l;
        if (!layer_at(plan, &plan->ops[i], &l)) break;
        if (n == 0) *one = l;
        const mx_tensor *state = tensor_of(plan, l.rope->in[6]);
        bool linked = n == 0 || plan->ops[i].in[0] == plan->ops[i - 1].out[0];
        if (!linked || !same_shape(one, &l) || state->fmt.dtype != MX_F16) break;
        if (!aligned16(cuda_address(b, l.qkv.gamma, 0)) ||
            !aligned16(cuda_address(b, l.glu.gamma, 0))) {
            break;
        }
    }
    return n;
}

int32_t cuda_lower_layers(cuda_backend *b, const mx_plan *plan, int32_t first, int32_t end,
                          CUdeviceptr arena, cuda_list *l) {
    if (!b->fused_layers || plan->phase == MX_PHASE_PREFILL) return 0;
    layer one, li;
    cuda_kernel kernel;
    size_t smem;
    k_step a;
    int32_t n = count_layers(b, plan, first, end, &one);
    // The table of the layers is in shared memory: at most so many a launch.
    n = MX_MIN(n, 128);
    if (n == 0 || one.qkv.x->n_rows != 1 || !geometry(b, &one, n, &a, &kernel, &smem)) return 0;
    const mx_op *last = &plan->ops[first + n * LAYER_OPS - 1];
    if (l->n_layers + n > l->cap_layers) {
        l->cap_layers = MX_MAX(2 * l->cap_layers, l->n_layers + n);
        l->layers = mx_realloc(l->layers, sizeof(*l->layers) * (size_t)l->cap_layers);
    }
    for (int32_t i = 0; i < n; i++) {
        CHECK(layer_at(plan, &plan->ops[first + i * LAYER_OPS], &li));
        l->layers[l->n_layers + i] = addresses(b, plan, &li, arena);
    }
    a.layers = l->layer_table + (uint64_t)l->n_layers * sizeof(k_layer);
    l->n_layers += n;
    l->n_words = MX_MAX(l->n_words, words_of(&a, l->words));
    a.x = cuda_address(b, one.qkv.x, arena);
    a.y = cuda_address(b, &plan->tensors[last->out[0]], arena);
    a.cs = cuda_address(b, tensor_of(plan, one.rope->in[3]), arena);
    int32_t g = one.attn->p.attn.group;
    a.pos = (uint64_t)(uintptr_t)b->io.pos;
    a.tok_range = (uint64_t)(uintptr_t)b->io.tok_range;
    a.page_table = (uint64_t)(uintptr_t)b->io.page_table[g];
    a.kv_slot = (uint64_t)(uintptr_t)b->io.kv_slot[g];
    // One CTA an SM, all there at once.
    smem = MX_MAX(smem, (size_t)b->smem_sm / 2 + 1024);
    CUDA_LAUNCH(b, l, kernel, a, b->n_sm, 1, 1, 384, smem);
    return n * LAYER_OPS;
}
