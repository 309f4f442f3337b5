// What the host (C) and the kernels (CUDA C++) share: argument structs and packed formats.
// A kernel takes exactly one of these structs by value.
#ifndef MX_BACKEND_CUDA_KARGS_H
#define MX_BACKEND_CUDA_KARGS_H

#include <stdint.h>

#ifdef __CUDACC__
#define KP(T) T *
#else
#define KP(T) uint64_t // a device address
#endif

// Packed weight formats: PACK(ID, name, bits, columns per scale, columns per block, scale kind).
// A block is 16 rows x kb columns; a strip is 16 rows of the matrix, its blocks in column order.
#define MX_CUDA_PACKS(PACK)                                                                        \
    PACK(A4G32, a4g32, 4, 32, 64, KSC_PAIR)                                                        \
    PACK(A4G64, a4g64, 4, 64, 64, KSC_PAIR)                                                        \
    PACK(A4G128, a4g128, 4, 128, 128, KSC_PAIR)                                                    \
    PACK(A8G32, a8g32, 8, 32, 64, KSC_PAIR)                                                        \
    PACK(A8G64, a8g64, 8, 64, 64, KSC_PAIR)                                                        \
    PACK(A8G128, a8g128, 8, 128, 128, KSC_PAIR)                                                    \
    PACK(S4, s4, 4, 32, 64, KSC_SYM)                                                               \
    PACK(S5, s5, 5, 32, 64, KSC_SYM)                                                               \
    PACK(A5, a5, 5, 32, 64, KSC_PAIR)                                                              \
    PACK(S8, s8, 8, 32, 64, KSC_SYM)                                                               \
    PACK(K4, k4, 4, 32, 256, KSC_K45)                                                              \
    PACK(K5, k5, 5, 32, 256, KSC_K45)                                                              \
    PACK(K6, k6, 6, 16, 256, KSC_K6)                                                               \
    PACK(H16, h16, 16, 0, 64, KSC_NONE)                                                            \
    PACK(B16, b16, 16, 0, 64, KSC_NONE)

// How a block keeps its scales.
//   PAIR  16-bit scale and bias (bf16 or f16) of each row and group: value = s * code + b
//   SYM   float16 scale of each row and group: value = d * (code - half range)
//   K45   6-bit scale and min of each row and 32 columns, float16 d and m of each row
//   K6    int8 scale of each row and 16 columns, float16 d of each row
enum { KSC_NONE, KSC_PAIR, KSC_SYM, KSC_K45, KSC_K6 };

enum {
    KPACK_ROWS, // not packed
#define PACK(ID, name, bits, group, kb, sc) KPACK_##ID,
    MX_CUDA_PACKS(PACK)
#undef PACK
        KPACK_COUNT
};

// Bytes of one block.
#define KPACK_CODE_BYTES(bits, kb)                                                                 \
    ((bits) == 16                                                                                  \
         ? (kb)*32                                                                                 \
         : ((bits) == 8 ? (kb)*16                                                                  \
                        : (kb)*8 + ((bits) == 5 ? (kb)*2 : 0) + ((bits) == 6 ? (kb)*4 : 0)))
#define KPACK_SCALE_BYTES(group, kb, sc)                                                           \
    ((sc) == KSC_NONE   ? 0                                                                        \
     : (sc) == KSC_PAIR ? (kb) / (group)*64                                                        \
     : (sc) == KSC_SYM  ? (kb) / (group)*32                                                        \
     : (sc) == KSC_K45  ? 256 + 64                                                                 \
                        : 256 + 32)

// Bytes of one slot of the copy ring: some blocks, about 2.3 KB.
#define KPACK_SLOT_KB(bytes) ((bytes) >= 1600 ? 1 : ((bytes) >= 1000 ? 2 : 4))

enum { KGEMV_SLOTS_8 = 4, KGEMV_SLOTS_16 = 3 }; // ring slots of a warp, by warps of a CTA

// Products of batches (skinny.cuh). A stage has of a strip runs of 64 columns: whole blocks, or
// half a block of 256 columns. A run has parts with a scale of their own.
#define KSKINNY_RUNS(bits)    ((bits) < 16 ? 2 : 1)
#define KSKINNY_PARTS(group)  ((group) == 0 || (group) >= 64 ? 1 : 64 / (group))
#define KHALF_HIGH(bits)      ((bits) == 5 ? 256 : (bits) == 6 ? 512 : 0)
#define KHALF_SCALE           128
#define KHALF_BYTES(bits, sc) (1024 + KHALF_HIGH(bits) + KHALF_SCALE + ((sc) == KSC_K45 ? 64 : 32))
// Pairs of strips of a CTA; shares of its columns, a warp each for every pair; floats from a token
// to the next in the sums of a strip; most stages.
enum { KSKINNY_PAIRS = 6, KSKINNY_SHARES = 2, KSKINNY_ROW = 20, KSKINNY_STAGES = 6 };

enum { KSLICE = 512 }; // columns of a run whose activations share a scale

enum { KTYPE_F32, KTYPE_F16, KTYPE_BF16, KTYPE_AFFINE }; // rows formats and 16-bit types
enum { KACT_NONE = -1 };                                 // else mx_act

// A weight in the checkpoint's own rows, for the plain kernels.
typedef struct k_rows {
    KP(const uint8_t) data;
    KP(const uint8_t) scales;
    KP(const uint8_t) biases;
    int64_t row_bytes, scale_row_bytes;
    int32_t type, bits, group, scale_type;
} k_rows;

// Pack: one thread writes one 4-byte word of the packed matrix.
typedef struct k_pack {
    KP(const uint8_t) data;
    KP(const uint8_t) scales;
    KP(const uint8_t) biases;
    KP(uint32_t) out;
    int64_t n_rows, n_cols, row_bytes, scale_row_bytes, n_words;
    int32_t n_kb, src, pack, bits; // src = mx_dtype; bits, group of AFFINE
    int32_t group, pad;
} k_pack;

typedef struct k_weight { // one packed weight
    KP(const uint8_t) w;
    int32_t pack, scale_type, n_kb, pad;
    k_rows rows; // pack == KPACK_ROWS
} k_weight;

// One output of a matrix product; several share one launch.
typedef struct k_seg {
    KP(const uint8_t) w;
    KP(float) y;
    KP(const float) bias;
    KP(const float) res;
    int32_t n_rows, n_strips, ldy, ldr;
} k_seg;

typedef struct k_gemv {
    k_seg seg[3];
    KP(const float) x;
    KP(const float) gamma; // rms_norm weight or null
    float eps;
    int32_t n_seg, n_tok, pass_tok; // tokens in all and in one grid row
    int32_t n_cols, ldx, n_kb, scale_type;
    int32_t act;                     // KACT_NONE, or seg[0] is the gate and seg[1] the up weight
    int32_t n_items, vec4, n_slices; // n_slices: most of a warp's run
    int32_t off_xs, off_xm, off_d, off_part, off_gamma; // offsets in dynamic shared memory
    int32_t early,
        one_by_one; // parts of a ring asked for before the wait; each when the last is there
    int32_t pad;
} k_gemv;

typedef struct k_mm_rows { // any rows format, plain float32
    k_rows w;
    KP(const float) x;
    KP(float) y;
    KP(const float) bias;
    KP(const float) res;
    int32_t n_rows, n_cols, n_tok, ldx, ldy, ldr;
} k_mm_rows;

typedef struct k_gemm { // many rows: 16-bit activations against packed weights
    k_seg seg[3];
    KP(const uint16_t) xb; // (n_tok, n_kb * kb) bf16, padded columns zero
    int32_t n_seg, n_tok, n_kb, scale_type;
    int32_t ldxb, act, n_strips, pad;
} k_gemm;

typedef struct k_skinny { // a batch of rows: 16-bit activations against packed weights
    k_seg seg[3];
    KP(const uint16_t) xb; // (n_tok, n_kb * kb) bf16, ordered (k_cast), padded columns zero
    KP(const float) sums;  // see k_cast
    int32_t n_seg, n_tok, n_kb, scale_type;
    int32_t ldxb, act, n_pairs, n_pairs_cta;
    int32_t n_split, stages; // CTAs of a cluster, which share the columns; stages of copies
} k_skinny;

// How a cast orders the columns of a run of 32: as they are; or 8 to a lane of a tensor-core
// operand (4t.. of the first 16, 4t.. of the second), each 4 as they are or as 0, 2, 1, 3.
enum { KORDER_PLAIN, KORDER_LANES, KORDER_CODES };
enum { KCAST_COLS = 2048 }; // columns of a CTA

typedef struct k_cast { // x (optionally normed) to bf16 rows
    KP(const float) x;
    KP(const float) gamma;
    KP(uint16_t) y;
    KP(float) sums; // null, or [64 tokens][run of 64 columns][part of it][token] of what y has
    float eps;
    int32_t n_cols, ldx, ldy, order, parts;
} k_cast;

typedef struct k_unpack { // packed weight to bf16 rows
    k_weight w;
    KP(uint16_t) y;
    int32_t n_rows, n_cols;
} k_unpack;

typedef struct k_finish { // bf16 or float product to y = act / + bias + residual
    KP(const float) a;
    KP(const float) b; // up (GLU) or null
    KP(const float) bias;
    KP(const float) res;
    KP(float) y;
    int32_t n_rows, n_cols, lda, ldy, ldr, act;
} k_finish;

typedef struct k_embed {
    k_weight w;
    KP(float) y;
    KP(const int32_t) ids;
    KP(const int32_t) tok_range;
    KP(const int32_t) out_id;
    float scale;
    int32_t n_cols, ldy, n_vocab;
} k_embed;

typedef struct k_norm {
    KP(const float) x;
    KP(const float) w;
    KP(const float) res; // NORM_ADD
    KP(float) y;
    float eps;
    int32_t dim, n_cols, ldx, ldy, ldr;
} k_norm;

typedef struct k_map { // ADD, GLU, SOFTCAP, COPY, GATHER
    KP(const float) a;
    KP(const float) b;
    KP(float) y;
    KP(const int32_t) rows;   // GATHER: out_tok
    KP(const int32_t) counts; // GATHER
    int32_t what, n_cols, lda, ldb, ldy, act;
    float cap;
    int32_t n_rows;
} k_map;
enum { KMAP_ADD, KMAP_GLU, KMAP_SOFTCAP, KMAP_COPY, KMAP_GATHER };

typedef struct k_rope_table {
    KP(const float) freq;
    KP(const int32_t) pos;
    KP(float) y;
    float mscale;
    int32_t n_rot, ldy, pad;
} k_rope_table;

typedef struct k_rope { // ROPE, KV_WRITE, ROPE_KV: one warp a head
    KP(const float) q;
    KP(const float) k;
    KP(const float) v;
    KP(const float) cs;
    KP(const float) qn;
    KP(const float) kn;
    KP(float) y;
    KP(uint8_t) ks;
    KP(uint8_t) vs;
    KP(const int32_t) kv_slot;
    int32_t n_head, n_kv_head, head_dim, n_rot, interleaved;
    int32_t ldq, ldk, ldv, ldcs, ldy, page_tokens, kv_type;
    float eps;
    int32_t pad;
} k_rope;

typedef struct k_attn {
    KP(const float) q;
    KP(const uint8_t) ks;
    KP(const uint8_t) vs;
    KP(float) y;
    KP(const int32_t) pos;
    KP(const int32_t) tok_range;
    KP(const int32_t) page_table;
    KP(const int32_t) range_first;
    KP(const int32_t) range_pos0;
    KP(const int32_t) counts;
    KP(float) part;      // (rows, kv heads * groups, splits, heads of a group, head_dim + 4)
    KP(uint32_t) ticket; // (rows, kv heads * groups), zero between launches
    float scale, softcap;
    int32_t n_head, n_kv_head, head_dim, n_rep, window;
    int32_t ldq, ldy, page_tokens, max_pages, n_split, group_heads, kv_type;
    int32_t n_rows, n_groups; // n_groups = kv heads * ceil(n_rep / heads of a group)
    int32_t few_splits;       // so many while their warps have at most two tiles each
    // chunk > 0: a split is `chunk` positions, or a multiple of it where 64 would not suffice,
    // whatever n_split is: a row's splits depend on its own context only. A multiple of 64.
    int32_t page_shift, chunk, pad;
    // ROPE_KV in the same launch, when k is not null: q, k and v as projected, one row a sequence.
    KP(const float) k;
    KP(const float) v;
    KP(const float) cs;
    KP(const float) qn;
    KP(const float) kn;
    KP(uint8_t) ks_out;
    KP(uint8_t) vs_out;
    KP(const int32_t) kv_slot;
    int32_t n_rot, interleaved, ldk, ldv, ldcs;
    float eps;
} k_attn;

// mx_sample_row, as in backend/step.h.
typedef struct k_sample_row {
    float temperature, top_p, min_p;
    int32_t top_k;
    uint64_t seed;
    uint32_t choice, pos;
    int32_t host;
    int32_t first_edit, n_edits;
    float repeat_penalty, presence_penalty, frequency_penalty;
} k_sample_row;

// mx_sample_edit, as there.
typedef struct k_sample_edit {
    int32_t id;
    float bias;
    int32_t count, repeated;
} k_sample_edit;

typedef struct k_sample {
    KP(float) logits; // edits are written to them
    KP(const k_sample_row) rows;
    KP(const k_sample_edit) edits;
    KP(const int32_t) counts;
    KP(int32_t) out_id;
    KP(float) out_logprob;
    KP(float) part;      // (n_out, n_part, 8)
    KP(uint32_t) ticket; // (n_out), zero between launches
    int32_t n_vocab, ld, n_part, pad;
} k_sample;

typedef struct k_chain { // tiny dependent op of `profile --chain`; also the read-rate kernel
    KP(const uint8_t) x;
    KP(float) y;
    int64_t n;
} k_chain;

#endif
