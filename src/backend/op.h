// Ops as data: tensors, ops, their parameters, their cost.
#ifndef MX_BACKEND_OP_H
#define MX_BACKEND_OP_H

#include "backend/step.h"
#include "tensor/tensor.h"

typedef enum mx_op_kind {
#define OP(ID, name, lo, hi, outs, fused) MX_OP_##ID,
#include "backend/ops.def"
#undef OP
    MX_OP_COUNT
} mx_op_kind;

typedef struct mx_op_info {
    const char *name;
    uint8_t min_in, max_in, n_out;
    bool fused;
} mx_op_info;
const mx_op_info *mx_op_get(mx_op_kind k);

enum { MX_OP_MAX_IN = 8, MX_OP_MAX_OUT = 3 };

typedef struct mx_buffer mx_buffer; // storage of one backend; see backend.h

typedef enum mx_tkind {
    MX_T_TEMP,   // lives between its first and last op; placed in the step arena
    MX_T_WEIGHT, // read-only, resident
    MX_T_STATE,  // KV pages: (n_pages, n_kv_head, page_tokens, head_dim)
    MX_T_LOGITS  // (n_out, n_vocab) float32 in the step's result block; ld = n_vocab
} mx_tkind;

// Layout of a weight's bytes. ROWS is the checkpoint's own (data, then scales, then biases of
// AFFINE at their offsets); PACKED is the backend's, with the format kept in fmt.
typedef enum mx_layout { MX_LAYOUT_ROWS, MX_LAYOUT_PACKED } mx_layout;

// A matrix that ops refer to. For TEMP, buf is NULL and offset is into the step arena once planned.
typedef struct mx_tensor {
    mx_buffer *buf;
    size_t offset;                       // bytes
    size_t scales_offset, biases_offset; // AFFINE in MX_LAYOUT_ROWS
    size_t n_bytes;                      // extent, all planes
    int64_t n_rows, n_cols, ld;          // ld in elements (activations)
    mx_wfmt fmt;
    uint8_t kind, layout;
    uint16_t pack; // backend's packing variant, when PACKED
} mx_tensor;

typedef int32_t mx_tid; // index into a plan's tensors
enum { MX_NONE = -1 };

// What an op belongs to, for profiles.
typedef enum mx_role {
    MX_ROLE_EMBED,
    MX_ROLE_ATTN,
    MX_ROLE_MLP,
    MX_ROLE_MOE,
    MX_ROLE_HEAD,
    MX_ROLE_NORM,
    MX_ROLE_SAMPLE,
    MX_ROLE_OTHER,
    MX_ROLE_COUNT
} mx_role;
const char *mx_role_name(mx_role r);

typedef enum mx_act { MX_ACT_SILU, MX_ACT_GELU_TANH, MX_ACT_GELU_ERF } mx_act;

typedef union mx_op_params {
    struct {
        float scale;
    } embed;
    struct {
        float eps;
        int32_t dim; // columns normalised together: n_cols, or head_dim
    } norm;          // also NORM_* (dim = n_cols)
    struct {
        int32_t act;
        float eps; // NORM_GLU
    } glu;
    struct {
        float mscale;
        int32_t n_rot, head_dim, interleaved;
        float eps; // ROPE_KV: of the q and k norms
        int32_t n_head, n_kv_head, group;
    } rope; // ROPE_TABLE, ROPE, ROPE_KV
    struct {
        int32_t n_kv_head, head_dim, group;
    } kv;
    struct {
        float scale, softcap; // softcap 0 = none
        int32_t n_head, n_kv_head, head_dim, group;
        int32_t window;     // 0 = full; else query i sees j with i - window < j <= i
        int32_t ctx_bucket; // power of two >= the longest visible context of the step
        int32_t one_row;    // no sequence has two rows: mx_step_one_row
    } attn;
    struct {
        float cap;
    } softcap;
    int32_t words[10]; // the whole, for hashing; an even number; unused words are zero
} mx_op_params;

enum { MX_OPF_BARRIER = 1 }; // set by the planner: wait for every earlier op since the last barrier

typedef struct mx_op {
    uint8_t kind, role;
    uint8_t n_in, n_out;
    int16_t layer; // -1: not in a layer
    uint16_t flags;
    mx_tid in[MX_OP_MAX_IN];
    mx_tid out[MX_OP_MAX_OUT];
    mx_op_params p;
} mx_op;

// Why a command buffer ended.
typedef enum mx_commit_reason {
    MX_COMMIT_OPS,
    MX_COMMIT_BYTES,
    MX_COMMIT_END,
    MX_COMMIT_SYNC,
    MX_COMMIT_REASONS
} mx_commit_reason;
const char *mx_commit_reason_name(mx_commit_reason r);

typedef struct mx_segment { // one command buffer: ops [first, first + n)
    int32_t first, n;
    uint64_t bytes; // counted input bytes (or elements << 20 scale, see budget.h)
    mx_commit_reason reason;
} mx_segment;

// Slow paths that a plan takes, by name: see slow.def.
typedef enum mx_slow {
#define SLOW(id, level, name, what) MX_SLOW_##id,
#include "backend/slow.def"
#undef SLOW
    MX_SLOW_COUNT
} mx_slow;
const char *mx_slow_name(mx_slow s);
const char *mx_slow_what(mx_slow s);
mx_log_level mx_slow_level(mx_slow s);

// A recorded op list. Immutable once made; its key is a hash of everything that decides what runs
// (ops, parameters, shapes, tensors, segments), never of lengths or token values.
typedef struct mx_plan {
    uint64_t key;
    mx_phase phase;
    int32_t n_rows, n_out; // shapes it was recorded for
    mx_op *ops;
    int32_t n_ops;
    mx_tensor *tensors;
    int32_t n_tensors;
    mx_segment *segs;
    int32_t n_segs;
    int32_t n_barriers;
    size_t arena_bytes; // extent of the temporaries: the same for every budget
    uint32_t
        slow[MX_SLOW_COUNT]; // how often one run takes each slow path; the backend adds its own
    void *handle;            // the backend's
} mx_plan;

// Bytes moved and arithmetic of one op under the step's facts: KV counts the visible rows, an
// embedding the rows it reads. Everything that counts bytes uses this.
typedef struct mx_cost {
    double read_bytes, write_bytes, flops;
} mx_cost;
mx_cost mx_op_cost(const mx_op *op, const mx_tensor *tensors, const mx_step_facts *facts);

// Bytes that the op reads of input i (0 for an absent one), by the same rules.
double mx_op_input_bytes(const mx_op *op, int i, const mx_tensor *tensors,
                         const mx_step_facts *facts);

// Checks arity and shapes; the message names op, input, expected and found.
mx_status mx_op_validate(const mx_op *op, const mx_tensor *tensors, int32_t n_tensors, mx_err *err);

#endif
