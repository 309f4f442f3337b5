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

typedef struct cpu_kernels {
    const char *isa; // "scalar", "avx2", "avx512"
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

    // ---- Pointwise ------------------------------------------------------------------------
    void (*rms_norm)(const float *x, const float *w, float eps, int64_t n, float *y);
    void (*add)(const float *a, const float *b, int64_t n, float *y);
    void (*glu)(const float *gate, const float *up, int32_t act, int64_t n, float *y);
    // One head: rotate x (head_dim) by cs = cos[n_rot/2], sin[n_rot/2].
    void (*rope)(const float *x, const float *cs, int32_t head_dim, int32_t n_rot,
                 int32_t interleaved, float *y);
    // ---- Attention: the partial result of one (row, kv head, chunk of 256 positions) ----------
    // For each of n_q query heads (q: n_q x head_dim, packed): running max m, sum s and
    // unnormalised output o (n_q x head_dim) over positions [t0, t1) of the pages. k and v hold
    // token t of the present kv head at base + slot(t) * stride. See k_attn.c for the order of
    // reduction.
    void (*attn_chunk)(const struct cpu_attn_chunk *c);
} cpu_kernels;

extern const cpu_kernels cpu_kernels_scalar;
#if defined(__x86_64__)
extern const cpu_kernels cpu_kernels_avx2;
extern const cpu_kernels cpu_kernels_avx512;
#endif

#endif
