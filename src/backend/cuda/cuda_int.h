// Inside the CUDA backend: device, kernels, and lowering of ops to launches.
#ifndef MX_BACKEND_CUDA_INT_H
#define MX_BACKEND_CUDA_INT_H

#include "backend/backend.h"
#include "backend/cuda/cuda.h"
#include "backend/cuda/drv.h"
#include "backend/cuda/kargs.h"
#include "backend/feed.h"
#include "base/mem.h"

typedef enum cuda_kernel {
#define KERNEL(image, name) CK_##name,
#include "backend/cuda/kernels.def"
#undef KERNEL
    CK_COUNT
} cuda_kernel;

typedef struct cuda_pack_info {
    const char *name;
    int32_t bits, group, kb, sc;
    int32_t block_bytes, slot_bytes, sum_cols; // one block; one ring slot; columns of a sum
    int32_t stage_bytes;                       // of a strip in a batch product, see kargs.h
} cuda_pack_info;
const cuda_pack_info *cuda_pack_get(int pack); // KPACK_*

// Scratch memory of launches: blocks stay until close, so that older plans keep theirs.
typedef struct cuda_scratch {
    struct cuda_scratch *next;
    CUdeviceptr base;
    size_t n_bytes;
} cuda_scratch;

typedef struct cuda_lt cuda_lt;     // cuBLASLt, see lt.c
typedef struct cuda_ring cuda_ring; // pinned upload ring, see ring.c

typedef enum cuda_item_kind { CUDA_ITEM_KERNEL, CUDA_ITEM_LT } cuda_item_kind;

// One launch of a plan. args are in the plan's blob.
typedef struct cuda_item {
    cuda_item_kind kind;
    cuda_kernel kernel;
    bool apart; // see cuda_kernel_get
    CUfunction fn;
    uint32_t grid[3], block, smem;
    uint32_t cluster; // CTAs along x that share memory; 0, 1: none
    size_t arg_offset;
} cuda_item;

// Raw rows of a weight on the device, between their transfer and the kernel that packs them.
enum { CUDA_STAGES = 4 };
typedef struct cuda_stage {
    CUdeviceptr base;
    CUevent copied, packed;
    bool used;    // packed was recorded
    bool pending; // rows are on their way; then:
    uint64_t ticket;
    cuda_item item;
    k_pack args;
} cuda_stage;

enum { CUDA_MAX_MODULES = 32 };

typedef struct cuda_backend {
    mx_backend base;
    CUdevice dev;
    CUcontext ctx;
    CUstream stream, copy; // steps and kernels; uploads
    int32_t cc_major, cc_minor, n_sm, smem_max, smem_sm;
    char name[128], arch[32];
    CUmodule modules[CUDA_MAX_MODULES];
    int32_t n_modules;
    CUmodule attn_apart;          // a second copy of that image; NULL: not needed yet
    CUfunction fn[2][CK_COUNT];   // [apart]; resolved at first use
    int32_t fn_smem[2][CK_COUNT]; // dynamic shared memory it may have
    mx_step_caps caps;
    mx_step_layout layout;
    CUdeviceptr step;
    mx_step_io io; // device addresses
    void *host[MX_STEP_SLOTS];
    mx_step_io host_io[MX_STEP_SLOTS];
    CUevent begin[MX_STEP_SLOTS], end[MX_STEP_SLOTS], done[MX_STEP_SLOTS];
    uint64_t slot_serial[MX_STEP_SLOTS]; // last submitted
    bool slot_open[MX_STEP_SLOTS];
    int32_t slot_out[MX_STEP_SLOTS], slot_bufs[MX_STEP_SLOTS], slot_ops[MX_STEP_SLOTS];
    uint64_t serial;
    cuda_scratch *scratch; // newest first
    CUdeviceptr tickets;   // zero between launches
    size_t n_tickets;
    cuda_lt *lt;
    cuda_ring *ring;
    mx_feed_shape ring_shape; // the greatest
    double ring_poll_s;       // between two looks at a slot's transfer; 0: yields only
    cuda_stage *stage;        // (CUDA_STAGES) upload.c; NULL: none
    size_t stage_bytes;
    int32_t stage_next;
    uint64_t ticket;   // of the ring's newest job
    mx_err upload_err; // of uploads whose caller has returned, until upload_end
    bool wait_buffers; // wait for the device after every command buffer (measurements)
    bool exact;        // MLXCEL_EXACT: no bf16 activations
    // Rows must not depend on each other: no kernel, split or order of a sum may be chosen by the
    // number of rows, the phase or the step's longest context. docs/cuda.md has the argument.
    bool fixed_products, fixed_attn;
    bool graphs, overlap, clusters, fused_rope, skinny, prefill_attn;
    int32_t gemv_rows; // up to this many tokens take the one-pass kernel
    int32_t lt_rows;   // from this many on cuBLASLt, when found
    mx_cuda_counters count;
} cuda_backend;

// y (n_tok, n) float32 = x (n_tok, k) w (n, k)^T, bf16 inputs.
typedef struct cuda_lt_args {
    CUdeviceptr x, w, y, workspace;
    int32_t n_tok, n, k, ldx, ldy;
    bool y_bf16; // y is bf16
} cuda_lt_args;

typedef struct cuda_list { // launches of a plan, and what they need
    cuda_item *items;
    int32_t n_items, cap_items;
    uint8_t *blob;
    size_t n_blob, cap_blob;
    size_t scratch_bytes; // need, found by a first pass with scratch = 0
    size_t n_tickets;
    CUdeviceptr scratch, tickets;
    uint32_t slow[MX_SLOW_COUNT]; // slow paths taken
} cuda_list;

// lower.c: appends the launches of an op.
void cuda_lower(cuda_backend *b, const mx_plan *plan, const mx_op *op, CUdeviceptr arena,
                cuda_list *l);
static inline uint64_t cuda_host_address(const void *p) {
    return (uint64_t)(uintptr_t)p;
}
static inline int32_t cuda_type_of(mx_dtype t) { // KTYPE_*
    return t == MX_F16 ? KTYPE_F16 : t == MX_BF16 ? KTYPE_BF16 : KTYPE_F32;
}
bool cuda_supports(const cuda_backend *b, const mx_op *op, const mx_tensor *tensors);
// Appends one kernel launch; args are copied.
void cuda_launch(cuda_backend *b, cuda_list *l, cuda_kernel k, const void *args, size_t n_args,
                 uint32_t gx, uint32_t gy, uint32_t gz, uint32_t block, uint32_t smem);
#define CUDA_LAUNCH(b, l, k, args, gx, gy, gz, block, smem)                                        \
    cuda_launch(b, l, k, &(args), sizeof(args), (uint32_t)(gx), (uint32_t)(gy), (uint32_t)(gz),    \
                (uint32_t)(block), (uint32_t)(smem))
// attention.c: ROPE, KV_WRITE, ROPE_KV, ATTN.
void cuda_lower_attention(cuda_backend *b, const mx_plan *plan, const mx_op *op, CUdeviceptr arena,
                          cuda_list *l);
// One launch for a ROPE_KV at op `first` and the ATTN that reads it; the number of ops it takes, 0:
// none.
int32_t cuda_lower_turned(cuda_backend *b, const mx_plan *plan, int32_t first, int32_t end,
                          CUdeviceptr arena, cuda_list *l);
// product.c
typedef struct cuda_product {
    const mx_tensor *x, *gamma; // gamma: rms_norm weight or NULL
    const mx_tensor *w[3], *bias[3], *y[3];
    const mx_tensor *res;
    float eps;
    int32_t n, act; // outputs; act >= 0: w[0] gate, w[1] up, y[0]
} cuda_product;
bool cuda_product_of(const mx_op *op, const mx_tensor *t, cuda_product *p);
void cuda_lower_product(cuda_backend *b, const cuda_product *p, CUdeviceptr arena, cuda_list *l);
uint64_t cuda_address(const cuda_backend *b, const mx_tensor *t, CUdeviceptr arena); // NULL gives 0

// Runs one item on the stream. overlap: it may start before what is before it ends.
mx_status cuda_run_item(cuda_backend *b, const cuda_item *it, const uint8_t *blob, bool overlap,
                        mx_err *err);

// Kernels run side by side, the next one starting early, when they divide an SM's memory alike: all
// for shared memory. Apart: attention that fills the GPU by itself has the driver's division, with
// more cache, where what is on its way to registers takes a place; a second copy of the kernel.
mx_status cuda_kernel_get(cuda_backend *b, cuda_kernel k, bool apart, CUfunction *fn, mx_err *err);
// cuMemAlloc; the error of too little memory has numbers.
mx_status cuda_take(cuda_backend *b, size_t n_bytes, CUdeviceptr *out, mx_err *err);

// upload.c
mx_status cuda_upload(mx_backend *base, mx_tensor *out, const mx_wview *w, mx_err *err);
mx_status cuda_upload_end(mx_backend *base, mx_err *err);
// The same, and the memory of uploads is given back; a later upload takes it again.
mx_status cuda_upload_close(cuda_backend *b, mx_err *err);
// Nothing of an upload is under way afterwards; its error waits for cuda_upload_end.
void cuda_upload_settle(cuda_backend *b);
void cuda_stage_free(cuda_backend *b);

// ring.c
mx_feed_shape cuda_ring_shape(void); // the greatest for this machine
// For a load of n_bytes: at most a quarter of that, but for small ones; a slot holds row_bytes.
mx_feed_shape cuda_ring_fit(const mx_feed_shape *most, uint64_t n_bytes, size_t row_bytes);
mx_status cuda_ring_open(cuda_backend *b, const mx_feed_shape *shape, mx_err *err);
size_t cuda_ring_slot_bytes(const cuda_backend *b); // 0: not open
void cuda_ring_close(cuda_backend *b);
uint64_t cuda_ring_put(cuda_backend *b, const mx_feed_job *job);
mx_status cuda_ring_sent(cuda_backend *b, uint64_t ticket, mx_err *err);
void cuda_ring_count(const cuda_backend *b, mx_cuda_counters *c); // adds the open ring's

// open.c
mx_status cuda_alloc(mx_backend *base, mx_buffer **out, size_t n_bytes, mx_usage use, mx_err *err);
void cuda_free(mx_backend *base, mx_buffer *buf);

// plan.c
mx_status cuda_step_init(mx_backend *base, const mx_step_caps *caps, mx_step_io io[MX_STEP_SLOTS],
                         mx_err *err);
void cuda_step_free(cuda_backend *b);
mx_status cuda_plan_make(mx_backend *base, mx_plan *plan, mx_buffer *arena, mx_err *err);
void cuda_plan_free(mx_backend *base, mx_plan *plan);
mx_status cuda_submit(mx_backend *base, mx_plan *plan, const mx_step_facts *facts, int32_t slot,
                      mx_ticket *out, mx_err *err);
mx_status cuda_wait(mx_backend *base, mx_ticket t, bool block, bool logits, bool *done,
                    mx_run_stats *stats, mx_err *err);

// lt.c
cuda_lt *cuda_lt_open(void); // NULL: not found
void cuda_lt_close(cuda_lt *lt);
size_t cuda_lt_workspace(void);
mx_status cuda_lt_run(cuda_lt *lt, const cuda_lt_args *a, CUstream stream, mx_err *err);

// images.S: the fatbins.
extern const uint8_t *const cuda_images[];   // ends with NULL
extern const char *const cuda_image_names[]; // "attn", …
extern const char cuda_archs[];

static inline cuda_backend *cuda_of(mx_backend *b) {
    return (cuda_backend *)(void *)b;
}
static inline CUresult cuda_use(cuda_backend *b) {
    return cuda_d.cuCtxSetCurrent(b->ctx);
}

#endif
