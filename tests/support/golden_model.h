// Test support: the small models of tests/golden/FAMILY/CASE.json, written as checkpoints. The file
// says which tensors there are, under which name each container has them, and how each is scaled;
// values come from the hash. Everything is static inline; a failure to read or write is a CHECK.
#ifndef TESTS_SUPPORT_GOLDEN_MODEL_H
#define TESTS_SUPPORT_GOLDEN_MODEL_H

#include "format/weights.h"
#include "support/tiny_model.h"

#ifndef MX_TEST_GOLDEN
#define MX_TEST_GOLDEN "tests/golden"
#endif

static inline json_t *gm_load(const char *id) {
    char path[256];
    mx_err err = {0};
    snprintf(path, sizeof path, "%s/%s.json", MX_TEST_GOLDEN, id);
    json_t *j = mx_json_load(path, 1 << 20, MX_JSON_CONFIG, &err);
    CHECKF(j != NULL, "%s", err.msg);
    return j;
}

static inline const json_t *gm_form(const json_t *m, const char *form) {
    return json_object_get(json_object_get(m, "forms"), form);
}

static inline mx_dtype gm_dtype(const char *name) {
    for (int t = 0; t < MX_DTYPE_COUNT; t++) {
        if (strcmp(mx_dtype_get((mx_dtype)t)->name, name) == 0) return (mx_dtype)t;
    }
    CHECKF(false, "%s", name);
    return MX_F32;
}

static inline const char *gm_str(const json_t *obj, const char *key) {
    const char *s = json_string_value(json_object_get(obj, key));
    CHECKF(s != NULL, "%s", key);
    return s;
}

static inline int64_t gm_int(const json_t *obj, const char *key) {
    return json_integer_value(json_object_get(obj, key));
}

static inline float gm_float(const json_t *obj, const char *key) {
    return (float)json_number_value(json_object_get(obj, key));
}

// ---- One tensor of the table, for one layer ----

typedef struct gm_tensor {
    const json_t *row;
    char hf[160], gguf[160]; // names
    int n_dim;
    int64_t dim[2], rows, cols; // rows, cols: a vector is one row
} gm_tensor;

static inline void gm_name(char *out, size_t cap, const char *pattern, int64_t il) {
    const char *at = strstr(pattern, "%d");
    if (at)
        snprintf(out, cap, "%.*s%lld%s", (int)(at - pattern), pattern, (long long)il, at + 2);
    else
        snprintf(out, cap, "%s", pattern);
}

static inline void gm_tensor_of(const json_t *row, int64_t il, gm_tensor *t) {
    *t = (gm_tensor){.row = row};
    gm_name(t->hf, sizeof t->hf, gm_str(row, "hf"), il);
    gm_name(t->gguf, sizeof t->gguf, gm_str(row, "gguf"), il);
    const json_t *shape = json_object_get(row, "shape");
    t->n_dim = (int)json_array_size(shape);
    for (int d = 0; d < t->n_dim; d++) {
        t->dim[d] = json_integer_value(json_array_get(shape, (size_t)d));
    }
    t->rows = t->n_dim == 2 ? t->dim[0] : 1;
    t->cols = t->n_dim == 2 ? t->dim[1] : t->dim[0];
}

// Float values of the whole tensor; mx_free them.
static inline float *gm_values(const gm_tensor *t) {
    size_t n = (size_t)(t->rows * t->cols);
    float *x = mx_alloc(n * sizeof *x), offset = gm_float(t->row, "offset");
    ckpt_fill(x, n, t->hf, 0, gm_float(t->row, "scale"));
    for (size_t i = 0; i < n; i++) x[i] += offset;
    return x;
}

static inline void gm_round(mx_dtype t, float *x, int64_t n) {
    char *bytes = mx_alloc((size_t)n * sizeof *x);
    mx_quant_row(t, x, n, bytes);
    mx_wview v = {.fmt = mx_wfmt_of(t), .n_rows = 1, .n_cols = n, .data = bytes};
    mx_dequant_row(&v, 0, x);
    mx_free(bytes);
}

// Calls f for every tensor of the model.
static inline void gm_each(const json_t *m, void (*f)(void *user, const gm_tensor *t), void *user) {
    int64_t layers = gm_int(json_object_get(m, "config"), "num_hidden_layers");
    const json_t *rows = json_object_get(m, "tensors");
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const json_t *row = json_array_get(rows, i);
        int64_t n = strstr(gm_str(row, "hf"), "%d") ? layers : 1;
        for (int64_t il = 0; il < n; il++) {
            gm_tensor t;
            gm_tensor_of(row, il, &t);
            f(user, &t);
        }
    }
}

// ---- Safetensors ----

// How a folder is written. Zero: as the form says, names as they are.
typedef struct gm_folder {
    const char *prefix; // put before every name, after `drop` bytes of it are dropped
    size_t drop;
    mx_dtype blocks;  // Q4_1 or Q8_0: matrices are those blocks, said as affine groups of 32
    bool with_blocks; // `blocks` counts
} gm_folder;

typedef struct gm_writer {
    ckpt c;
    const gm_folder *how;
    const json_t *quant; // the form's quantization, or NULL
    mx_dtype dtype;
    int64_t head_dim;
} gm_writer;

// STEM.weight -> the stem under the folder's prefix.
static inline void gm_stem(const gm_writer *w, const gm_tensor *t, char *out, size_t cap) {
    size_t drop = strncmp(t->hf, "model.", 6) == 0 ? w->how->drop : 0;
    snprintf(out, cap, "%s%s", w->how->prefix ? w->how->prefix : "", t->hf + drop);
    char *dot = strrchr(out, '.');
    CHECK(dot != NULL);
    *dot = 0;
}

// The three tensors of an affine matrix, zeroed.
static inline void gm_add_planes(ckpt *c, const char *stem, mx_wfmt f, const gm_tensor *t,
                                 void *out[3]) {
    static const char *const part[] = {"weight", "scales", "biases"};
    int64_t dim[2][2] = {{t->rows, t->cols * f.bits / 32}, {t->rows, t->cols / f.group}};
    char name[200];
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "%s.%s", stem, part[i]);
        out[i] = ckpt_add(c, name, i ? f.scale_dtype : MX_U32, 2, dim[i > 0], NULL);
    }
}

// One row of Q4_1 or Q8_0 blocks as affine codes, scales and biases: no bit of the values changes.
static inline void gm_blocks_to_affine(mx_dtype type, const uint8_t *b, int64_t cols,
                                       uint8_t *codes, uint16_t *scales, uint16_t *biases) {
    for (int64_t g = 0; g < cols / 32; g++) {
        if (type == MX_Q4_1) { // scale, minimum, low nibbles 0..15, high nibbles 16..31
            memcpy(&scales[g], b, 2);
            memcpy(&biases[g], b + 2, 2);
            for (int i = 0; i < 16; i++) {
                int lo = i < 8 ? b[4 + 2 * i] & 15 : b[4 + 2 * (i - 8)] >> 4;
                int hi = i < 8 ? b[5 + 2 * i] & 15 : b[5 + 2 * (i - 8)] >> 4;
                codes[g * 16 + i] = (uint8_t)(lo | hi << 4);
            }
            b += 20;
        } else { // scale, 32 signed bytes
            memcpy(&scales[g], b, 2);
            biases[g] = mx_f32_to_f16(-128.0f * mx_f16_to_f32(scales[g]));
            for (int i = 0; i < 32; i++) codes[g * 32 + i] = (uint8_t)(b[2 + i] ^ 0x80);
            b += 34;
        }
    }
}

static inline void gm_add_blocks(gm_writer *w, const char *stem, const gm_tensor *t) {
    mx_dtype type = w->how->blocks;
    mx_wfmt f = {
        .dtype = MX_AFFINE, .bits = type == MX_Q4_1 ? 4 : 8, .group = 32, .scale_dtype = MX_F16};
    void *plane[3];
    gm_add_planes(&w->c, stem, f, t, plane);
    size_t row_bytes = ckpt_shape_bytes(type, 1, &t->cols);
    uint8_t *row = mx_alloc(row_bytes);
    float *x = gm_values(t);
    for (int64_t r = 0; r < t->rows; r++) {
        mx_quant_row(type, x + r * t->cols, t->cols, row);
        gm_blocks_to_affine(type, row, t->cols, (uint8_t *)plane[0] + r * t->cols * f.bits / 8,
                            (uint16_t *)plane[1] + r * t->cols / 32,
                            (uint16_t *)plane[2] + r * t->cols / 32);
    }
    mx_free(x);
    mx_free(row);
}

static inline void gm_add_hf(void *user, const gm_tensor *t) {
    gm_writer *w = user;
    char stem[160], own[160], name[200];
    gm_stem(w, t, stem, sizeof stem);
    snprintf(own, sizeof own, "%.*s", (int)(strrchr(t->hf, '.') - t->hf), t->hf);
    if (t->n_dim == 2 && w->how->with_blocks) {
        gm_add_blocks(w, stem, t);
    } else if (t->n_dim == 2 && w->quant) {
        const json_t *q = json_object_get(w->quant, own);
        if (!q) q = w->quant;
        mx_wfmt f = {.dtype = MX_AFFINE,
                     .bits = (uint8_t)gm_int(q, "bits"),
                     .group = (uint16_t)gm_int(q, "group_size"),
                     .scale_dtype = w->dtype};
        void *p[3];
        gm_add_planes(&w->c, stem, f, t, p);
        ckpt_fill_affine(f, own, t->rows, t->cols, gm_float(t->row, "scale"), p[0], p[1], p[2]);
    } else {
        snprintf(name, sizeof name, "%s%s", stem, strrchr(t->hf, '.'));
        char *out = ckpt_add(&w->c, name, w->dtype, t->n_dim, t->dim, NULL);
        float *x = gm_values(t);
        mx_quant_row(w->dtype, x, t->rows * t->cols, out);
        mx_free(x);
    }
}

// Tensors of the form, to be changed or written. ckpt_free them.
static inline ckpt gm_tensors_hf(const json_t *m, const json_t *form, const gm_folder *how) {
    gm_writer w = {.how = how,
                   .quant = json_object_get(form, "quantization"),
                   .dtype = gm_dtype(gm_str(form, "dtype"))};
    ckpt_init(&w.c);
    gm_each(m, gm_add_hf, &w);
    return w.c;
}

// config.json of the form: a new reference.
static inline json_t *gm_config(const json_t *m, const json_t *form, const gm_folder *how) {
    json_t *config = json_deep_copy(json_object_get(m, "config"));
    json_t *quant = json_object_get(form, "quantization");
    if (how->with_blocks) {
        json_t *q =
            json_pack("{s:i,s:i}", "bits", how->blocks == MX_Q4_1 ? 4 : 8, "group_size", 32);
        json_object_set_new(config, "quantization", q);
    } else if (quant) {
        json_object_set(config, "quantization", quant);
    }
    return config;
}

static inline void gm_write_tokenizer(const char *dir) {
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_puts(&b, "{\"version\":\"1.0\",\"added_tokens\":[");
    for (int i = 256; i < TINY_VOCAB - 1; i++) {
        mx_buf_printf(&b,
                      "%s{\"id\":%d,\"content\":\"<|unused%d|>\",\"single_word\":false,"
                      "\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":true}",
                      i > 256 ? "," : "", i, i);
    }
    mx_buf_puts(&b, "],\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\","
                    "\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":true},"
                    "\"post_processor\":null,\"decoder\":{\"type\":\"ByteLevel\","
                    "\"add_prefix_space\":true,\"trim_offsets\":true,\"use_regex\":true},"
                    "\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,"
                    "\"byte_fallback\":false,\"merges\":[\"z z\"],\"vocab\":{");
    for (int i = 0; i < 256; i++) {
        char text[8];
        tiny_byte_token(i, text);
        mx_buf_json(&b, mx_str_of(text));
        mx_buf_printf(&b, ":%d,", i);
    }
    mx_buf_printf(&b, "\"zz\":%d}}}", TINY_VOCAB - 1);
    char *path = mx_path_join(dir, "tokenizer.json");
    ckpt_write_file(path, b.data, b.n);
    mx_free(path);
    mx_buf_free(&b);
}

// Writes dir: tokenizer.json, config.json, model.safetensors.
static inline void gm_write_folder(const char *dir, const ckpt *c, const json_t *config) {
    char *text = json_dumps(config, 0);
    ckpt_write_safetensors(c, dir, text);
    free(text);
    gm_write_tokenizer(dir);
}

static inline void gm_write_hf(const char *dir, const json_t *m, const json_t *form,
                               const gm_folder *how) {
    ckpt c = gm_tensors_hf(m, form, how);
    json_t *config = gm_config(m, form, how);
    gm_write_folder(dir, &c, config);
    json_decref(config);
    ckpt_free(&c);
}

// ---- GGUF ----

// Where row r of Q or K goes: within a head, the two halves interleave.
static inline int64_t gm_gguf_row(int64_t r, int64_t head_dim, bool permuted) {
    if (!permuted) return r;
    int64_t j = r % head_dim, half = head_dim / 2;
    return r - j + (j < half ? 2 * j : 2 * (j - half) + 1);
}

static inline void gm_add_gguf(void *user, const gm_tensor *t) {
    gm_writer *w = user;
    float *x = gm_values(t), add = gm_float(t->row, "gguf_add");
    int64_t n = t->rows * t->cols, heads = gm_int(t->row, "gguf_heads");
    int64_t head_dim = heads ? t->dim[0] / heads : 1;
    if (t->n_dim == 1) { // as the form holds it, then float32
        if (mx_dtype_is_float(w->dtype)) gm_round(w->dtype, x, n);
        float *out = ckpt_add(&w->c, t->gguf, MX_F32, 1, t->dim, NULL);
        for (int64_t i = 0; i < n; i++) out[gm_gguf_row(i, head_dim, heads > 0)] = x[i] + add;
    } else {
        char *out = ckpt_add(&w->c, t->gguf, w->dtype, 2, t->dim, NULL);
        size_t row_bytes = ckpt_shape_bytes(w->dtype, 1, &t->cols);
        for (int64_t r = 0; r < t->rows; r++) {
            int64_t to = gm_gguf_row(r, head_dim, heads > 0);
            mx_quant_row(w->dtype, x + r * t->cols, t->cols, out + (size_t)to * row_bytes);
        }
    }
    mx_free(x);
}

// Matrices of `dtype`; vectors as the form of that dtype has them (blocks: float32).
static inline ckpt gm_tensors_gguf(const json_t *m, mx_dtype dtype) {
    gm_writer w = {.dtype = dtype};
    ckpt_init(&w.c);
    const char *key;
    json_t *v;
    json_object_foreach(json_object_get(m, "gguf"), key, v) {
        if (json_is_string(v))
            ckpt_kv_str(&w.c, key, json_string_value(v));
        else if (json_is_integer(v))
            ckpt_kv_u32(&w.c, key, (uint32_t)json_integer_value(v));
        else
            ckpt_kv_f32(&w.c, key, (float)json_real_value(v));
    }
    tiny_vocab(&w.c);
    gm_each(m, gm_add_gguf, &w);
    const json_t *freqs = json_object_get(m, "rope_freqs");
    int64_t n = (int64_t)json_array_size(freqs);
    if (n) {
        float *out = ckpt_add(&w.c, "rope_freqs.weight", MX_F32, 1, &n, NULL);
        for (int64_t i = 0; i < n; i++) {
            out[i] = (float)json_real_value(json_array_get(freqs, (size_t)i));
        }
    }
    return w.c;
}

static inline void gm_write_gguf(const char *path, const json_t *m, mx_dtype dtype) {
    ckpt c = gm_tensors_gguf(m, dtype);
    ckpt_write_gguf(&c, path);
    ckpt_free(&c);
}

// Ids of the form's prompt, n of them; mx_free them. salt: another prompt of the same length.
static inline int32_t *gm_prompt(const json_t *form, size_t *n, const char *salt) {
    char name[200];
    snprintf(name, sizeof name, "%s%s", gm_str(form, "prompt"), salt);
    *n = (size_t)gm_int(form, "n");
    int32_t *ids = mx_alloc(*n * sizeof *ids);
    for (size_t i = 0; i < *n; i++) ids[i] = (int32_t)(ckpt_mix(ckpt_name_hash(name), i) % 256);
    return ids;
}

#endif
