// Inside the CPU backend: the kernel table of one instruction set, and what its users share.
#ifndef MX_BACKEND_CPU_INT_H
#define MX_BACKEND_CPU_INT_H

#include "backend/backend.h"

// ---- Matrix products ------------------------------------------------------------------------
// A weight is packed at load into tiles of `tile_rows` output rows, each tile one contiguous
// stream, with the file's bits per weight and the file's own scales. Activations are prepared once
// per product: int8 per weight group (at most 64 columns) with their scale and sums, or float32
// (exact mode and float weights). The result of an output element depends only on its weight row
// and its activation row: groups are added in ascending order with one fixed formula, the same in
// every instruction set, for one row or many.

enum { CPU_TILE_ROWS = 16 };

// How activations are prepared. Two weights with equal kinds can share one preparation.
typedef enum cpu_act_kind {
    CPU_ACT_F32, // the floats themselves
    CPU_ACT_Q32, // int8 per 32 columns
    CPU_ACT_Q64, // int8 per 64 columns
    CPU_ACT_KINDS
} cpu_act_kind;

typedef struct cpu_mul {
    const mx_tensor *w;  // MX_LAYOUT_PACKED, this table's packing
    const uint8_t *data; // its bytes
    const void *act;     // prepared activations of rows [0, n_tok)
    int64_t n_tok;
    float *y; // (n_tok, ldy)
    int64_t ldy;
    const float *bias;     // (n_out) or NULL
    const float *residual; // (n_tok, ld_res) added, or NULL; may not alias y
    int64_t ld_res;
} cpu_mul;

// Second weight of a gated product: y = act(w.x) * (w2.x), both prepared from one act.
typedef struct cpu_mul_glu {
    cpu_mul gate;
    const mx_tensor *w2;
    const uint8_t *data2;
    int32_t act; // mx_act
} cpu_mul_glu;

// ---- Attention --------------------------------------------------------------------------------
// One chunk of 256 positions (from a multiple of 256) seen by n_row query rows x n_group query
// heads that share a kv head. Query (r, g) is at q + r * ldq + g * head_dim and its results are at
// index r * n_group + g of m, s and o.
enum { CPU_CHUNK = 256, CPU_KV_BLOCK = 16, CPU_CHUNK_BLOCKS = CPU_CHUNK / CPU_KV_BLOCK };
enum { CPU_ATTN_ROWS = 48 }; // most queries (n_row * n_group) of one call

typedef struct cpu_attn_chunk {
    const float *q;
    int64_t ldq;
    int32_t n_row, n_group, head_dim;
    float scale, softcap;
    bool half; // keys and values are float16, else float32
    // Row r sees positions [lo[r], hi[r]) of the chunk, counted from its start; lo[r] >= hi[r]:
    // none. Every position from the least lo to the greatest hi is valid in k and v.
    const int32_t *lo, *hi;          // (n_row)
    const void *k[CPU_CHUNK_BLOCKS]; // 16 tokens each: (head_dim, 16)
    const void *v[CPU_CHUNK_BLOCKS]; // 16 tokens each: (16, head_dim)
    // Keys that will be needed next, fetched beside v: a hint, any address.
    const void *ahead[CPU_CHUNK_BLOCKS];
    float *p;     // scratch (CPU_ATTN_ROWS, CPU_CHUNK)
    float *m, *s; // (n_row * n_group): m = -inf when nothing is visible (then s and o are 0)
    float *o;     // (n_row * n_group, head_dim padded to 16), unnormalised
} cpu_attn_chunk;

static inline int64_t cpu_pad16(int64_t n) {
    return (n + 15) & ~(int64_t)15;
}

typedef struct cpu_kernels {
    const char *isa; // "scalar", "avx2", "avxvnni", "avx512"
    int32_t tile_rows;
    // Bytes of the packed form; *pack = variant for mx_tensor.pack. 0: this format stays in ROWS.
    // exact: prefer the variant for float-exact products.
    size_t (*pack_bytes)(mx_wfmt f, int64_t n_rows, int64_t n_cols, bool exact, uint16_t *pack);
    // Packs tiles [tile0, tile1) (the last may be partial; its missing rows are zeros).
    void (*pack)(const mx_wview *w, uint16_t pack, int64_t tile0, int64_t tile1, uint8_t *dst);
    cpu_act_kind (*act_kind)(const mx_tensor *w);
    size_t (*act_bytes)(cpu_act_kind kind, int64_t n_cols, int64_t n_tok);
    // Prepares rows [tok0, tok1) of x (n_tok, ldx) into act (sized for n_tok rows). norm_w, when
    // not NULL, applies rms_norm with that weight and eps first (the NORM_* ops); same bits as
    // RMS_NORM.
    void (*act_prepare)(cpu_act_kind kind, const float *x, int64_t ldx, int64_t n_cols,
                        int64_t tok0, int64_t tok1, const float *norm_w, float eps, void *act);
    // Output rows of tiles [tile0, tile1).
    void (*mul)(const cpu_mul *m, int64_t tile0, int64_t tile1);
    void (*mul_glu)(const cpu_mul_glu *m, int64_t tile0, int64_t tile1);
    // Row `row` of a packed or plain weight as floats (EMBED on a tied table).
    void (*unpack_row)(const mx_tensor *w, const uint8_t *data, int64_t row, float *out);

    // ---- Pointwise (k_point.c) --------------------------------------------------------------
    // All give the same bits in every instruction set. y may be x.
    void (*rms_norm)(const float *x, const float *w, float eps, int64_t n, float *y);
    void (*add)(const float *a, const float *b, int64_t n, float *y);
    void (*glu)(const float *gate, const float *up, int32_t act, int64_t n, float *y);
    void (*softcap)(const float *x, float cap, int64_t n, float *y);
    // One head: rotate x (head_dim) by cs = cos[n_rot/2], sin[n_rot/2].
    void (*rope)(const float *x, const float *cs, int32_t head_dim, int32_t n_rot,
                 int32_t interleaved, float *y);
    // Largest of x[0..n) with the lowest index, and the sum of exp(x - largest). n > 0.
    void (*max_sum)(const float *x, int64_t n, float *max, int64_t *at, double *sum);
    // ---- Attention (k_attn.c; the order of reduction is defined there) -----------------------
    void (*attn_chunk)(const cpu_attn_chunk *c);
    // state <- state merged with a later part, both (n, 2 + head_dim padded to 16): m, s, o.
    void (*attn_merge)(float *m, float *s, float *o, const float *pm, const float *ps,
                       const float *po, int64_t n, int64_t ld);
    // out[0..head_dim) = o / s.
    void (*attn_finish)(const float *o, float s, int64_t head_dim, float *out);
    // Stores one head's key (head_dim) or value row as token `slot` of a page, see k_attn.c.
    void (*kv_store)(const float *k, const float *v, int32_t head_dim, bool half, int64_t slot,
                     void *kpage, void *vpage);
} cpu_kernels;

// Names of one instruction set's functions: CPU_FN(mul) is cpu_mul_avx2, …
#define CPU_CAT_(a, b) a##b
#define CPU_CAT(a, b)  CPU_CAT_(a, b)
#ifdef MX_ISA
#define CPU_FN(name) CPU_CAT(CPU_CAT(cpu_##name, _), MX_ISA)
// What gains nothing from AVX-VNNI is AVX2's: all but k_matmul.c and k_matmul_int.c.
#ifdef MX_ISA_AVXVNNI
#define CPU_BASE(name) CPU_CAT(cpu_##name, _avx2)
#else
#define CPU_BASE(name) CPU_FN(name)
#endif

// Provided by k_matmul*.c.
size_t CPU_FN(pack_bytes)(mx_wfmt f, int64_t n_rows, int64_t n_cols, bool exact, uint16_t *pack);
void CPU_FN(pack)(const mx_wview *w, uint16_t pack, int64_t tile0, int64_t tile1, uint8_t *dst);
cpu_act_kind CPU_FN(act_kind)(const mx_tensor *w);
size_t CPU_FN(act_bytes)(cpu_act_kind kind, int64_t n_cols, int64_t n_tok);
void CPU_BASE(act_prepare)(cpu_act_kind kind, const float *x, int64_t ldx, int64_t n_cols,
                           int64_t tok0, int64_t tok1, const float *norm_w, float eps, void *act);
void CPU_FN(mul)(const cpu_mul *m, int64_t tile0, int64_t tile1);
void CPU_FN(mul_glu)(const cpu_mul_glu *m, int64_t tile0, int64_t tile1);
void CPU_FN(unpack_row)(const mx_tensor *w, const uint8_t *data, int64_t row, float *out);

// Provided by k_point.c.
void CPU_BASE(rms_norm)(const float *x, const float *w, float eps, int64_t n, float *y);
void CPU_BASE(add)(const float *a, const float *b, int64_t n, float *y);
void CPU_BASE(glu)(const float *gate, const float *up, int32_t act, int64_t n, float *y);
void CPU_BASE(softcap)(const float *x, float cap, int64_t n, float *y);
void CPU_BASE(rope)(const float *x, const float *cs, int32_t head_dim, int32_t n_rot,
                    int32_t interleaved, float *y);
void CPU_BASE(max_sum)(const float *x, int64_t n, float *max, int64_t *at, double *sum);

// Provided by k_attn.c.
void CPU_BASE(attn_chunk)(const cpu_attn_chunk *c);
void CPU_BASE(attn_merge)(float *m, float *s, float *o, const float *pm, const float *ps,
                          const float *po, int64_t n, int64_t ld);
void CPU_BASE(attn_finish)(const float *o, float s, int64_t head_dim, float *out);
void CPU_BASE(kv_store)(const float *k, const float *v, int32_t head_dim, bool half, int64_t slot,
                        void *kpage, void *vpage);
#endif

extern const cpu_kernels cpu_kernels_scalar;
#if defined(__x86_64__)
extern const cpu_kernels cpu_kernels_avx2;
extern const cpu_kernels cpu_kernels_avxvnni;
extern const cpu_kernels cpu_kernels_avx512;
#endif

#endif
