// Element types, weight formats, and matrices as they lie in a checkpoint.
#ifndef MX_TENSOR_TENSOR_H
#define MX_TENSOR_TENSOR_H

#include "base/err.h"
#include "base/os.h"

#include <stddef.h>
#include <stdint.h>

// X(id, name, elements per block, bytes per block). A plain type has blocks of one element.
// The Q* block types are GGUF's; AFFINE is MLX's (codes, scales and biases in three planes).
#define MX_DTYPE_LIST(X)                                                                           \
    X(F32, "f32", 1, 4)                                                                            \
    X(F16, "f16", 1, 2)                                                                            \
    X(BF16, "bf16", 1, 2)                                                                          \
    X(F64, "f64", 1, 8)                                                                            \
    X(I8, "i8", 1, 1)                                                                              \
    X(U8, "u8", 1, 1)                                                                              \
    X(I16, "i16", 1, 2)                                                                            \
    X(U16, "u16", 1, 2)                                                                            \
    X(I32, "i32", 1, 4)                                                                            \
    X(U32, "u32", 1, 4)                                                                            \
    X(I64, "i64", 1, 8)                                                                            \
    X(U64, "u64", 1, 8)                                                                            \
    X(BOOL, "bool", 1, 1)                                                                          \
    X(Q4_0, "q4_0", 32, 18)                                                                        \
    X(Q4_1, "q4_1", 32, 20)                                                                        \
    X(Q5_0, "q5_0", 32, 22)                                                                        \
    X(Q5_1, "q5_1", 32, 24)                                                                        \
    X(Q8_0, "q8_0", 32, 34)                                                                        \
    X(Q4_K, "q4_k", 256, 144)                                                                      \
    X(Q5_K, "q5_k", 256, 176)                                                                      \
    X(Q6_K, "q6_k", 256, 210)                                                                      \
    X(AFFINE, "affine", 1, 0)

typedef enum mx_dtype {
#define X(id, name, elems, bytes) MX_##id,
    MX_DTYPE_LIST(X)
#undef X
        MX_DTYPE_COUNT
} mx_dtype;

typedef struct mx_dtype_info {
    const char *name;
    int block_elems;
    int block_bytes; // 0 for AFFINE: see mx_wfmt
} mx_dtype_info;

const mx_dtype_info *mx_dtype_get(mx_dtype t);
bool mx_dtype_is_float(mx_dtype t); // F32, F16, BF16

enum { MX_MAX_DIM = 4 };

// The format of a weight matrix. bits, group and scale_dtype are set for AFFINE only:
// bits in {2,3,4,5,6,8}, group in {32,64,128}, scale_dtype F32, F16 or BF16.
typedef struct mx_wfmt {
    mx_dtype dtype;
    uint8_t bits;
    uint16_t group;
    mx_dtype scale_dtype;
} mx_wfmt;

static inline mx_wfmt mx_wfmt_of(mx_dtype t) {
    return (mx_wfmt){.dtype = t};
}
bool mx_wfmt_eq(mx_wfmt a, mx_wfmt b);
// "q4_k", "affine4 g64 bf16", …; returns buf.
const char *mx_wfmt_name(mx_wfmt f, char *buf, size_t cap);
// Bytes of one row of n_cols weights, every plane counted. Returns false when n_cols does not
// divide into blocks or groups, or on overflow.
bool mx_wfmt_row_bytes(mx_wfmt f, int64_t n_cols, size_t *out_bytes);
// Bytes of one row of the codes plane alone (AFFINE: n_cols * bits / 8).
bool mx_wfmt_code_bytes(mx_wfmt f, int64_t n_cols, size_t *out_bytes);
double mx_wfmt_bits_per_weight(mx_wfmt f);

// A weight matrix (n_rows, n_cols), row-major, in the checkpoint's own layout. Not owned.
// AFFINE: data is the little-endian bit stream of codes; scales and biases are
// (n_rows, n_cols / group) of scale_dtype; value = scale * code + bias.
typedef struct mx_wview {
    mx_wfmt fmt;
    int64_t n_rows, n_cols;
    const void *data;
    const void *scales, *biases;
    // For a backend that reads files itself (mx_backend_facts.reads_files); not for others.
    const mx_file *files; // (n_files): the mapped files that the planes lie in; NULL: memory
    int32_t n_files;
    int32_t pairs; // > 0: in every `pairs` rows, rows i and i + pairs/2 are stored as 2i and 2i + 1
} mx_wview;

// The sub-matrix of rows [row0, row0 + n).
mx_wview mx_wview_rows(const mx_wview *w, int64_t row0, int64_t n);

// ---- The scalar oracle of every format (quant.c). Sources: the ggml and GGUF specifications;
// ---- MLX's documented affine layout.

// Dequantises one row to float32: the exact value that the format defines.
void mx_dequant_row(const mx_wview *w, int64_t row, float *out); // out: (n_cols)
// Quantises one row of floats into a GGUF block type or F32/F16/BF16 (round to nearest; the
// simple min/max rule of the format, not ggml's search). For tests and tools. AFFINE: use the next.
void mx_quant_row(mx_dtype t, const float *x, int64_t n, void *out);
// MLX's affine rule (docs/formats.md): codes, scales, biases for one row.
void mx_quant_row_affine(mx_wfmt f, const float *x, int64_t n, void *codes, void *scales,
                         void *biases);

#endif
