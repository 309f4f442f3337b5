// Test support: weights from a hash, and small checkpoints written from memory.
//
// Weights. Element i (row-major) of tensor `name` is, every step in float32:
//   h = FNV-1a 64 of the name's bytes
//   z = h + i + 0x9e3779b97f4a7c15            (mod 2^64, as the rest)
//   z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;  z = (z ^ z >> 27) * 0x94d049bb133111eb;  z ^= z >> 31
//   unit = float(z >> 40) * 2^-23 - 1         in [-1, 1), exact
//   value = unit * scale                      then rounded to the tensor's type
// Affine weight STEM (amplitude a, top = 2^bits - 1), group g counted over the whole matrix:
//   code i  = z(STEM.weight, i) >> (64 - bits)
//   t       = unit(STEM.scales, g);  sign = t < 0 ? -1 : 1
//   scale g = sign * (0.5 + 0.5 * |t|) * (2 * a / top)
//   bias g  = -sign * a * (1 + 0.25 * unit(STEM.biases, g))
//   so that weights lie within about [-1.25 a, 1.25 a], and half of the scales are negative.
// tests/golden/weights_hash.py computes the same bits with numpy.
//
// Files. Fill a `ckpt` with metadata and tensors (data is copied), then write it as GGUF or as a
// safetensors folder. Everything is static inline; a failure to write is a CHECK.
#ifndef TESTS_SUPPORT_CKPT_WRITER_H
#define TESTS_SUPPORT_CKPT_WRITER_H

#include "base/mem.h"
#include "base/os.h"
#include "tensor/half.h"
#include "tensor/tensor.h"

#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

// ---- Weights from a hash ----

static inline uint64_t ckpt_name_hash(const char *name) {
    uint64_t h = 0xcbf29ce484222325ull;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x100000001b3ull;
    return h;
}

static inline uint64_t ckpt_mix(uint64_t h, uint64_t i) {
    uint64_t z = h + i + 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static inline float ckpt_unit(uint64_t h, uint64_t i) {
    return (float)(ckpt_mix(h, i) >> 40) * 1.1920928955078125e-7f - 1.0f;
}

// out[0..n) = elements first, first + 1, … of tensor `name`
static inline void ckpt_fill(float *out, size_t n, const char *name, uint64_t first, float scale) {
    uint64_t h = ckpt_name_hash(name);
    for (size_t i = 0; i < n; i++) out[i] = ckpt_unit(h, first + i) * scale;
}

static inline uint64_t ckpt_stem_hash(const char *stem, const char *part) {
    char name[256];
    int n = snprintf(name, sizeof name, "%s.%s", stem, part);
    CHECK(n > 0 && (size_t)n < sizeof name);
    return ckpt_name_hash(name);
}

// Codes (rows, cols * bits / 8 bytes), scales and biases (rows, cols / group) of scale_dtype.
static inline void ckpt_fill_affine(mx_wfmt f, const char *stem, int64_t rows, int64_t cols,
                                    float a, void *codes, void *scales, void *biases) {
    uint64_t hw = ckpt_stem_hash(stem, "weight"), hs = ckpt_stem_hash(stem, "scales");
    uint64_t hb = ckpt_stem_hash(stem, "biases");
    size_t row_bytes, scale_bytes = (size_t)mx_dtype_get(f.scale_dtype)->block_bytes;
    CHECK(mx_wfmt_code_bytes(f, cols, &row_bytes));
    memset(codes, 0, row_bytes * (size_t)rows);
    for (int64_t i = 0; i < rows * cols; i++) {
        size_t at = (size_t)i * f.bits; // rows are whole bytes: one stream for the whole matrix
        unsigned v = (unsigned)(ckpt_mix(hw, (uint64_t)i) >> (64 - f.bits)) << (at % 8);
        uint8_t *p = (uint8_t *)codes + at / 8;
        p[0] = (uint8_t)(p[0] | v);
        if (v >> 8) p[1] = (uint8_t)(p[1] | v >> 8);
    }
    float step = 2.0f * a / (float)((1 << f.bits) - 1);
    for (int64_t g = 0; g < rows * cols / f.group; g++) {
        float t = ckpt_unit(hs, (uint64_t)g), sign = t < 0 ? -1.0f : 1.0f;
        float s = sign * (0.5f + 0.5f * fabsf(t)) * step;
        float b = -sign * a * (1.0f + 0.25f * ckpt_unit(hb, (uint64_t)g));
        mx_quant_row(f.scale_dtype, &s, 1, (char *)scales + (size_t)g * scale_bytes);
        mx_quant_row(f.scale_dtype, &b, 1, (char *)biases + (size_t)g * scale_bytes);
    }
}

// ---- Checkpoints ----

typedef struct ckpt_tensor {
    char *name;
    mx_dtype dtype;
    int n_dim;
    int64_t dim[MX_MAX_DIM]; // outermost first
    void *data;
    size_t n_bytes;
} ckpt_tensor;

typedef struct ckpt {
    ckpt_tensor *tensors;
    size_t n_tensors;
    mx_buf kv; // GGUF metadata, encoded
    uint64_t n_kv;
} ckpt;

static inline void ckpt_init(ckpt *c) {
    *c = (ckpt){0};
    mx_buf_init(&c->kv, 0);
}

static inline void ckpt_free(ckpt *c) {
    for (size_t i = 0; i < c->n_tensors; i++) {
        mx_free(c->tensors[i].name);
        mx_free(c->tensors[i].data);
    }
    mx_free(c->tensors);
    mx_buf_free(&c->kv);
    *c = (ckpt){0};
}

static inline size_t ckpt_shape_bytes(mx_dtype t, int n_dim, const int64_t *dim) {
    const mx_dtype_info *d = mx_dtype_get(t);
    size_t n = 1;
    for (int i = 0; i < n_dim; i++) n *= (size_t)dim[i];
    return n / (size_t)d->block_elems * (size_t)d->block_bytes;
}

// Adds a tensor; data NULL means zeros. Returns its bytes, to be filled or changed.
static inline void *ckpt_add(ckpt *c, const char *name, mx_dtype t, int n_dim, const int64_t *dim,
                             const void *data) {
    size_t n = ckpt_shape_bytes(t, n_dim, dim);
    c->tensors = mx_realloc(c->tensors, (c->n_tensors + 1) * sizeof *c->tensors);
    ckpt_tensor *x = &c->tensors[c->n_tensors++];
    *x = (ckpt_tensor){.name = mx_strdup(name), .dtype = t, .n_dim = n_dim, .n_bytes = n};
    for (int i = 0; i < n_dim; i++) x->dim[i] = dim[i];
    x->data = mx_calloc(n, 1);
    if (data && n) memcpy(x->data, data, n);
    return x->data;
}

// Adds tensor `name` with its values from the hash, rounded to t (floats and GGUF block types).
static inline void ckpt_add_hash(ckpt *c, const char *name, mx_dtype t, int n_dim,
                                 const int64_t *dim, float scale) {
    char *out = ckpt_add(c, name, t, n_dim, dim, NULL);
    int64_t cols = n_dim ? dim[n_dim - 1] : 1, rows = 1;
    for (int i = 0; i + 1 < n_dim; i++) rows *= dim[i];
    float *x = mx_calloc((size_t)cols, sizeof *x);
    size_t row_bytes = ckpt_shape_bytes(t, 1, &cols);
    for (int64_t r = 0; r < rows; r++) {
        ckpt_fill(x, (size_t)cols, name, (uint64_t)(r * cols), scale);
        mx_quant_row(t, x, cols, out + (size_t)r * row_bytes);
    }
    mx_free(x);
}

// Adds STEM.weight (U32 words), STEM.scales and STEM.biases of an affine matrix from the hash.
static inline void ckpt_add_affine(ckpt *c, const char *stem, mx_wfmt f, int64_t rows, int64_t cols,
                                   float a) {
    char name[256];
    int64_t words[2] = {rows, cols * f.bits / 32}, groups[2] = {rows, cols / f.group};
    snprintf(name, sizeof name, "%s.weight", stem);
    void *codes = ckpt_add(c, name, MX_U32, 2, words, NULL);
    snprintf(name, sizeof name, "%s.scales", stem);
    void *scales = ckpt_add(c, name, f.scale_dtype, 2, groups, NULL);
    snprintf(name, sizeof name, "%s.biases", stem);
    void *biases = ckpt_add(c, name, f.scale_dtype, 2, groups, NULL);
    ckpt_fill_affine(f, stem, rows, cols, a, codes, scales, biases);
}

// ---- GGUF ----

enum { CKPT_U32 = 4, CKPT_I32 = 5, CKPT_F32 = 6, CKPT_BOOL = 7, CKPT_STR = 8, CKPT_ARR = 9 };

static inline void ckpt_put_str(mx_buf *b, const char *s) {
    uint64_t n = strlen(s);
    mx_buf_add(b, &n, 8);
    mx_buf_add(b, s, (size_t)n);
}

// Any scalar: type is GGUF's number of it.
static inline void ckpt_kv(ckpt *c, const char *key, uint32_t type, const void *v, size_t n) {
    ckpt_put_str(&c->kv, key);
    mx_buf_add(&c->kv, &type, 4);
    mx_buf_add(&c->kv, v, n);
    c->n_kv++;
}
static inline void ckpt_kv_u32(ckpt *c, const char *key, uint32_t v) {
    ckpt_kv(c, key, CKPT_U32, &v, 4);
}
static inline void ckpt_kv_f32(ckpt *c, const char *key, float v) {
    ckpt_kv(c, key, CKPT_F32, &v, 4);
}
static inline void ckpt_kv_bool(ckpt *c, const char *key, bool v) {
    uint8_t u = v;
    ckpt_kv(c, key, CKPT_BOOL, &u, 1);
}
static inline void ckpt_kv_str(ckpt *c, const char *key, const char *v) {
    ckpt_kv(c, key, CKPT_STR, NULL, 0);
    ckpt_put_str(&c->kv, v);
}
// Numbers of elem_bytes each: CKPT_F32, CKPT_I32, …
static inline void ckpt_kv_array(ckpt *c, const char *key, uint32_t elem_type, const void *v,
                                 uint64_t n, size_t elem_bytes) {
    ckpt_kv(c, key, CKPT_ARR, &elem_type, 4);
    mx_buf_add(&c->kv, &n, 8);
    mx_buf_add(&c->kv, v, (size_t)n * elem_bytes);
}
static inline void ckpt_kv_strs(ckpt *c, const char *key, const char *const *v, uint64_t n) {
    uint32_t type = CKPT_STR;
    ckpt_kv(c, key, CKPT_ARR, &type, 4);
    mx_buf_add(&c->kv, &n, 8);
    for (uint64_t i = 0; i < n; i++) ckpt_put_str(&c->kv, v[i]);
}

static inline uint32_t ckpt_gguf_type(mx_dtype t) {
    static const int8_t id[MX_DTYPE_COUNT] = {
        [MX_F32] = 1,  [MX_F16] = 2,   [MX_BF16] = 31, [MX_F64] = 29,  [MX_I8] = 25,  [MX_I16] = 26,
        [MX_I32] = 27, [MX_I64] = 28,  [MX_Q4_0] = 3,  [MX_Q4_1] = 4,  [MX_Q5_0] = 7, [MX_Q5_1] = 8,
        [MX_Q8_0] = 9, [MX_Q4_K] = 13, [MX_Q5_K] = 14, [MX_Q6_K] = 15,
    };
    CHECKF(id[t] != 0, "GGUF has no %s", mx_dtype_get(t)->name);
    return (uint32_t)id[t] - 1;
}

static inline void ckpt_pad(mx_buf *b, size_t align) {
    while (b->n % align) mx_buf_putc(b, 0);
}

// The bytes of the whole file, in b (initialised here; mx_buf_free it).
static inline void ckpt_build_gguf(const ckpt *c, mx_buf *b) {
    uint32_t version = 3;
    uint64_t n = c->n_tensors, offset = 0;
    mx_buf_init(b, 0);
    mx_buf_add(b, "GGUF", 4);
    mx_buf_add(b, &version, 4);
    mx_buf_add(b, &n, 8);
    mx_buf_add(b, &c->n_kv, 8);
    mx_buf_add(b, c->kv.data, c->kv.n);
    for (size_t i = 0; i < c->n_tensors; i++) {
        const ckpt_tensor *t = &c->tensors[i];
        uint32_t n_dim = (uint32_t)t->n_dim, type = ckpt_gguf_type(t->dtype);
        ckpt_put_str(b, t->name);
        mx_buf_add(b, &n_dim, 4);
        for (int d = t->n_dim - 1; d >= 0; d--) mx_buf_add(b, &t->dim[d], 8);
        mx_buf_add(b, &type, 4);
        mx_buf_add(b, &offset, 8);
        offset += (t->n_bytes + 31) / 32 * 32;
    }
    for (size_t i = 0; i < c->n_tensors; i++) {
        ckpt_pad(b, 32);
        mx_buf_add(b, c->tensors[i].data, c->tensors[i].n_bytes);
    }
    CHECK(!b->full);
}

static inline void ckpt_write_file(const char *path, const void *p, size_t n) {
    unlink(path); // writing over a file waits for the disk on some file systems
    FILE *f = fopen(path, "wb");
    CHECKF(f && fwrite(p, 1, n, f) == n && fclose(f) == 0, "%s", path);
}

static inline void ckpt_write_gguf(const ckpt *c, const char *path) {
    mx_buf b;
    ckpt_build_gguf(c, &b);
    ckpt_write_file(path, b.data, b.n);
    mx_buf_free(&b);
}

// ---- safetensors ----

static inline const char *ckpt_safetensors_type(mx_dtype t) {
    static const char *const name[MX_DTYPE_COUNT] = {
        [MX_F32] = "F32", [MX_F16] = "F16", [MX_BF16] = "BF16", [MX_F64] = "F64", [MX_I8] = "I8",
        [MX_U8] = "U8",   [MX_I16] = "I16", [MX_U16] = "U16",   [MX_I32] = "I32", [MX_U32] = "U32",
        [MX_I64] = "I64", [MX_U64] = "U64", [MX_BOOL] = "BOOL"};
    CHECKF(name[t] != NULL, "safetensors has no %s", mx_dtype_get(t)->name);
    return name[t];
}

static inline void ckpt_build_safetensors(const ckpt *c, mx_buf *b) {
    mx_buf_init(b, 0);
    mx_buf_add(b, "\0\0\0\0\0\0\0", 8);
    mx_buf_puts(b, "{\"__metadata__\":{\"format\":\"mlx\"}");
    size_t offset = 0;
    for (size_t i = 0; i < c->n_tensors; i++) {
        const ckpt_tensor *t = &c->tensors[i];
        mx_buf_putc(b, ',');
        mx_buf_json(b, mx_str_of(t->name));
        mx_buf_printf(b, ":{\"dtype\":\"%s\",\"shape\":[", ckpt_safetensors_type(t->dtype));
        for (int d = 0; d < t->n_dim; d++) {
            mx_buf_printf(b, "%s%lld", d ? "," : "", (long long)t->dim[d]);
        }
        mx_buf_printf(b, "],\"data_offsets\":[%zu,%zu]}", offset, offset + t->n_bytes);
        offset += t->n_bytes;
    }
    mx_buf_putc(b, '}');
    while (b->n % 8) mx_buf_putc(b, ' ');
    uint64_t header = b->n - 8;
    memcpy(b->data, &header, 8);
    for (size_t i = 0; i < c->n_tensors; i++) {
        mx_buf_add(b, c->tensors[i].data, c->tensors[i].n_bytes);
    }
    CHECK(!b->full);
}

// folder/model.safetensors and folder/config.json (its text; NULL: none); the folder is made.
static inline void ckpt_write_safetensors(const ckpt *c, const char *folder, const char *config) {
    mx_err err = {0};
    CHECKF(mx_mkdirs(folder, &err) == MX_OK, "%s", err.msg);
    char *path = mx_path_join(folder, "model.safetensors");
    mx_buf b;
    ckpt_build_safetensors(c, &b);
    ckpt_write_file(path, b.data, b.n);
    mx_buf_free(&b);
    mx_free(path);
    if (!config) return;
    path = mx_path_join(folder, "config.json");
    ckpt_write_file(path, config, strlen(config));
    mx_free(path);
}

// ---- Temporary folders, time ----

// Processor time of this process, for limits that a busy machine must not break.
static inline double ckpt_cpu_s(void) {
    return (double)clock() / CLOCKS_PER_SEC;
}

// A new empty folder; mx_free the name after ckpt_remove_dir.
static inline char *ckpt_temp_dir(void) {
    char *path = mx_strdup("/tmp/mlxcel-test-XXXXXX");
    CHECK(mkdtemp(path) != NULL);
    return path;
}

static inline int ckpt_remove_one(const char *p, const struct stat *s, int f, struct FTW *w) {
    (void)s, (void)f, (void)w;
    return remove(p);
}

static inline void ckpt_remove_dir(char *path) {
    nftw(path, ckpt_remove_one, 16, FTW_DEPTH | FTW_PHYS);
    mx_free(path);
}

#endif
