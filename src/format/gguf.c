// Reading GGUF, versions 2 and 3, little-endian. Fills the tables of an mx_weights; the metadata
// and the names stay views into the mapping. Does not know what a key means, except those that
// describe the container and the element types of the vocabulary's arrays.
//
//   "GGUF"  u32 version  u64 n_tensors  u64 n_kv
//   n_kv  x { string key, u32 type, value }        string: u64 length, bytes
//                                                  array:  u32 type, u64 count, elements
//   n_tensors x { string name, u32 n_dims, u64 dim[n_dims] innermost first, u32 type, u64 offset }
//   padding to general.alignment (32), then data; offsets count from here
//
// A count is never used to reserve memory: entries are read one at a time and the tables grow with
// what was really there. Every length is compared with the bytes that are left.
#include "format/format_int.h"

#include <stdarg.h>
#include <stdio.h>

enum {
    MAX_KV = 1 << 16,
    MAX_KEY_BYTES = 65535,   // the specification's limits
    MAX_NAME_BYTES = 64,     //
    MAX_STRINGS = 1 << 21,   // elements of all string arrays together
    MAX_BOOLS = 1 << 20,     // elements of one bool array: each is looked at
    MAX_ALIGNMENT = 1 << 20, // least: 8
    MIN_KV_BYTES = 8 + 1 + 4 + 1,
    MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8
};

typedef struct gguf_reader {
    mx_weights *w;
    const mx_file *f;
    int32_t file;
    size_t at;
    uint64_t n_strings;
    mx_err *err;
} gguf_reader;

static const struct {
    const char *name;
    uint8_t bytes; // 0: string or array
} value_type[] = {
    [MX_GGUF_U8] = {"u8", 1},       [MX_GGUF_I8] = {"i8", 1},     [MX_GGUF_U16] = {"u16", 2},
    [MX_GGUF_I16] = {"i16", 2},     [MX_GGUF_U32] = {"u32", 4},   [MX_GGUF_I32] = {"i32", 4},
    [MX_GGUF_F32] = {"f32", 4},     [MX_GGUF_BOOL] = {"bool", 1}, [MX_GGUF_STRING] = {"string", 0},
    [MX_GGUF_ARRAY] = {"array", 0}, [MX_GGUF_U64] = {"u64", 8},   [MX_GGUF_I64] = {"i64", 8},
    [MX_GGUF_F64] = {"f64", 8},
};

// Names of ggml's tensor types. MX_DTYPE_COUNT: known by name, not supported.
static const struct {
    const char *name;
    mx_dtype dtype;
} tensor_type[] = {
    [0] = {"F32", MX_F32},
    [1] = {"F16", MX_F16},
    [2] = {"Q4_0", MX_Q4_0},
    [3] = {"Q4_1", MX_Q4_1},
    [4] = {"Q4_2", MX_DTYPE_COUNT},
    [5] = {"Q4_3", MX_DTYPE_COUNT},
    [6] = {"Q5_0", MX_Q5_0},
    [7] = {"Q5_1", MX_Q5_1},
    [8] = {"Q8_0", MX_Q8_0},
    [9] = {"Q8_1", MX_DTYPE_COUNT},
    [10] = {"Q2_K", MX_DTYPE_COUNT},
    [11] = {"Q3_K", MX_DTYPE_COUNT},
    [12] = {"Q4_K", MX_Q4_K},
    [13] = {"Q5_K", MX_Q5_K},
    [14] = {"Q6_K", MX_Q6_K},
    [15] = {"Q8_K", MX_DTYPE_COUNT},
    [16] = {"IQ2_XXS", MX_DTYPE_COUNT},
    [17] = {"IQ2_XS", MX_DTYPE_COUNT},
    [18] = {"IQ3_XXS", MX_DTYPE_COUNT},
    [19] = {"IQ1_S", MX_DTYPE_COUNT},
    [20] = {"IQ4_NL", MX_DTYPE_COUNT},
    [21] = {"IQ3_S", MX_DTYPE_COUNT},
    [22] = {"IQ2_S", MX_DTYPE_COUNT},
    [23] = {"IQ4_XS", MX_DTYPE_COUNT},
    [24] = {"I8", MX_I8},
    [25] = {"I16", MX_I16},
    [26] = {"I32", MX_I32},
    [27] = {"I64", MX_I64},
    [28] = {"F64", MX_F64},
    [29] = {"IQ1_M", MX_DTYPE_COUNT},
    [30] = {"BF16", MX_BF16},
    [31] = {"Q4_0_4_4", MX_DTYPE_COUNT},
    [32] = {"Q4_0_4_8", MX_DTYPE_COUNT},
    [33] = {"Q4_0_8_8", MX_DTYPE_COUNT},
    [34] = {"TQ1_0", MX_DTYPE_COUNT},
    [35] = {"TQ2_0", MX_DTYPE_COUNT},
    [36] = {"IQ4_NL_4_4", MX_DTYPE_COUNT},
    [37] = {"IQ4_NL_4_8", MX_DTYPE_COUNT},
    [38] = {"IQ4_NL_8_8", MX_DTYPE_COUNT},
    [39] = {"MXFP4", MX_DTYPE_COUNT},
    [40] = {"NVFP4", MX_DTYPE_COUNT},
    [41] = {"Q1_0", MX_DTYPE_COUNT},
};

__attribute__((format(printf, 3, 4))) static mx_status gguf_fail(gguf_reader *r, mx_status status,
                                                                 const char *fmt, ...) {
    char text[MX_ERR_CAP];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return mx_err_set(r->err, status, "%s: %s", r->f->path, text);
}

static size_t bytes_left(const gguf_reader *r) {
    return r->f->n_bytes - r->at;
}

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are copied as they lie");

// The next n bytes, little-endian. `what` names them when the file ends before.
static mx_status read_uint(gguf_reader *r, size_t n, uint64_t *out, const char *what) {
    *out = 0;
    if (bytes_left(r) < n) {
        return gguf_fail(r, MX_FORMAT, "%s: the file ends at byte %zu, %zu more are needed", what,
                         r->f->n_bytes, n - bytes_left(r));
    }
    memcpy(out, r->f->data + r->at, n);
    r->at += n;
    return MX_OK;
}

static mx_status read_string(gguf_reader *r, mx_str *out, const char *what) {
    uint64_t n;
    MX_TRY(read_uint(r, 8, &n, what));
    if (n > bytes_left(r)) {
        return gguf_fail(r, MX_FORMAT, "%s: a string of %llu bytes at byte %zu, %zu are left", what,
                         (unsigned long long)n, r->at, bytes_left(r));
    }
    *out = (mx_str){(const char *)r->f->data + r->at, (size_t)n};
    r->at += (size_t)n;
    return MX_OK;
}

// A key or a tensor's name: neither empty nor longer than max, no NUL, UTF-8.
static mx_status read_name(gguf_reader *r, mx_str *out, size_t max, const char *what) {
    char buf[FORMAT_NAME_TEXT];
    MX_TRY(read_string(r, out, what));
    if (out->n == 0) return gguf_fail(r, MX_FORMAT, "%s: empty name", what);
    if (out->n > max) {
        return gguf_fail(r, MX_FORMAT, "%s: name of %zu bytes, at most %zu (%s)", what, out->n, max,
                         format_show(*out, buf));
    }
    if (memchr(out->p, 0, out->n) || !mx_utf8_valid(*out)) {
        return gguf_fail(r, MX_FORMAT, "%s: name with NUL or not UTF-8 (%s)", what,
                         format_show(*out, buf));
    }
    return MX_OK;
}

// ---- Metadata ----

static int64_t sign_extend(uint64_t u, size_t bytes) {
    unsigned shift = (unsigned)(64 - 8 * bytes);
    return (int64_t)(u << shift) >> shift;
}

static bool is_signed(mx_gguf_type t) {
    return t == MX_GGUF_I8 || t == MX_GGUF_I16 || t == MX_GGUF_I32 || t == MX_GGUF_I64;
}

static bool is_integer(mx_gguf_type t) {
    return is_signed(t) || t == MX_GGUF_U8 || t == MX_GGUF_U16 || t == MX_GGUF_U32 ||
           t == MX_GGUF_U64;
}

static double real_of(uint64_t bits, mx_gguf_type t) {
    if (t == MX_GGUF_F64) {
        double d;
        memcpy(&d, &bits, 8);
        return d;
    }
    float f;
    memcpy(&f, &bits, 4);
    return (double)f;
}

static mx_status read_scalar(gguf_reader *r, mx_gguf_kv *kv, const char *key) {
    uint64_t u;
    size_t bytes = value_type[kv->type].bytes;
    MX_TRY(read_uint(r, bytes, &u, key));
    if (kv->type == MX_GGUF_BOOL && u > 1) {
        return gguf_fail(r, MX_FORMAT, "%s: bool of value %llu", key, (unsigned long long)u);
    }
    if (kv->type == MX_GGUF_F32 || kv->type == MX_GGUF_F64) {
        kv->v.f = real_of(u, kv->type);
    } else if (is_signed(kv->type)) {
        kv->v.i = sign_extend(u, bytes);
    } else {
        kv->v.u = u;
    }
    return MX_OK;
}

// Two walks: the first proves that the strings are there, the second keeps views of them.
static mx_status read_string_array(gguf_reader *r, mx_gguf_kv *kv, const char *key) {
    uint64_t n = kv->n_elems;
    if (n > MAX_STRINGS - r->n_strings) {
        return gguf_fail(r, MX_TOOLARGE, "%s: %llu strings; a file may have %d in all", key,
                         (unsigned long long)n, MAX_STRINGS);
    }
    r->n_strings += n;
    size_t start = r->at;
    mx_str s;
    for (uint64_t i = 0; i < n; i++) MX_TRY(read_string(r, &s, key));
    kv->strings = MX_ARENA_ARRAY(&r->w->arena, mx_str, n);
    r->at = start;
    for (uint64_t i = 0; i < n; i++) MX_TRY(read_string(r, &kv->strings[i], key));
    return MX_OK;
}

static mx_status check_bools(gguf_reader *r, const mx_gguf_kv *kv, const char *key) {
    const unsigned char *p = kv->data;
    if (kv->n_elems > MAX_BOOLS) {
        return gguf_fail(r, MX_TOOLARGE, "%s: %llu bools, at most %d", key,
                         (unsigned long long)kv->n_elems, MAX_BOOLS);
    }
    for (uint64_t i = 0; i < kv->n_elems; i++) {
        if (p[i] > 1) return gguf_fail(r, MX_FORMAT, "%s: bool of value %d", key, p[i]);
    }
    return MX_OK;
}

static mx_status read_array(gguf_reader *r, mx_gguf_kv *kv, const char *key) {
    uint64_t type, n;
    MX_TRY(read_uint(r, 4, &type, key));
    MX_TRY(read_uint(r, 8, &n, key));
    if (type >= MX_COUNT(value_type)) {
        return gguf_fail(r, MX_FORMAT, "%s: array of unknown element type %llu", key,
                         (unsigned long long)type);
    }
    if (type == MX_GGUF_ARRAY) {
        return gguf_fail(r, MX_UNSUPPORTED, "%s: array of arrays is not supported", key);
    }
    kv->elem_type = (mx_gguf_type)type;
    kv->n_elems = n;
    size_t bytes = value_type[type].bytes, least = bytes ? bytes : 8;
    if (n > bytes_left(r) / least) {
        return gguf_fail(r, MX_FORMAT, "%s: array of %llu x %s, %zu bytes are left", key,
                         (unsigned long long)n, value_type[type].name, bytes_left(r));
    }
    if (type == MX_GGUF_STRING) return read_string_array(r, kv, key);
    kv->data = r->f->data + r->at;
    r->at += (size_t)n * bytes;
    return type == MX_GGUF_BOOL ? check_bools(r, kv, key) : MX_OK;
}

// Arrays whose readers count on an element type.
static mx_status check_known_array(gguf_reader *r, const mx_gguf_kv *kv) {
    static const struct {
        const char *key;
        mx_gguf_type type, also;
    } known[] = {
        {"tokenizer.ggml.tokens", MX_GGUF_STRING, MX_GGUF_STRING},
        {"tokenizer.ggml.merges", MX_GGUF_STRING, MX_GGUF_STRING},
        {"tokenizer.ggml.scores", MX_GGUF_F32, MX_GGUF_F32},
        {"tokenizer.ggml.token_type", MX_GGUF_I32, MX_GGUF_U32},
    };
    for (size_t i = 0; i < MX_COUNT(known); i++) {
        if (!mx_str_is(kv->key, known[i].key)) continue;
        if (kv->type != MX_GGUF_ARRAY) {
            return gguf_fail(r, MX_FORMAT, "%s: type %s, expected an array of %s", known[i].key,
                             value_type[kv->type].name, value_type[known[i].type].name);
        }
        if (kv->elem_type != known[i].type && kv->elem_type != known[i].also) {
            return gguf_fail(r, MX_FORMAT, "%s: array of %s, expected %s", known[i].key,
                             value_type[kv->elem_type].name, value_type[known[i].type].name);
        }
    }
    return MX_OK;
}

static mx_status read_kv(gguf_reader *r, uint64_t index) {
    mx_weights *w = r->w;
    char what[48], key[FORMAT_NAME_TEXT];
    snprintf(what, sizeof what, "metadata key %llu", (unsigned long long)index);
    mx_gguf_kv kv = {0};
    uint64_t type;
    MX_TRY(read_name(r, &kv.key, MAX_KEY_BYTES, what));
    format_show(kv.key, key);
    if (mx_map_get(&w->kv_by_name, kv.key, NULL)) {
        return gguf_fail(r, MX_FORMAT, "metadata key %s: defined twice", key);
    }
    MX_TRY(read_uint(r, 4, &type, key));
    if (type >= MX_COUNT(value_type)) {
        return gguf_fail(r, MX_FORMAT, "%s: unknown value type %llu", key,
                         (unsigned long long)type);
    }
    kv.type = (mx_gguf_type)type;
    mx_status st = type == MX_GGUF_STRING  ? read_string(r, &kv.v.s, key)
                   : type == MX_GGUF_ARRAY ? read_array(r, &kv, key)
                                           : read_scalar(r, &kv, key);
    MX_TRY(st);
    MX_TRY(check_known_array(r, &kv));
    w->kv = format_grow(w->kv, w->n_kv, sizeof *w->kv);
    w->kv[w->n_kv] = kv;
    mx_map_put(&w->kv_by_name, kv.key, w->n_kv);
    w->n_kv++;
    return MX_OK;
}

static mx_status read_container_keys(gguf_reader *r) {
    mx_weights *w = r->w;
    w->alignment = 32;
    const mx_gguf_kv *kv = mx_gguf_find(w, "general.alignment");
    if (kv) {
        if (kv->type != MX_GGUF_U32) {
            return gguf_fail(r, MX_FORMAT, "general.alignment: type %s, expected u32",
                             value_type[kv->type].name);
        }
        uint64_t a = kv->v.u;
        if (a < 8 || a > MAX_ALIGNMENT || (a & (a - 1)) != 0) {
            return gguf_fail(r, MX_FORMAT,
                             "general.alignment: %llu, expected a power of two from 8 to %d",
                             (unsigned long long)a, MAX_ALIGNMENT);
        }
        w->alignment = (uint32_t)a;
    }
    int64_t parts;
    if (mx_gguf_get_i64(w, "split.count", &parts) && parts > 1) {
        return gguf_fail(
            r, MX_UNSUPPORTED,
            "split.count: the file is one of %lld parts; join them into one file first",
            (long long)parts);
    }
    return MX_OK;
}

// ---- Tensors ----

typedef struct tensor_entry {
    mx_wtensor t;
    uint64_t offset;
} tensor_entry;

static mx_status set_type(gguf_reader *r, mx_wtensor *t, uint64_t type, const char *name) {
    if (type >= MX_COUNT(tensor_type)) {
        return gguf_fail(r, MX_UNSUPPORTED, "tensor %s: unknown tensor type %llu", name,
                         (unsigned long long)type);
    }
    if (tensor_type[type].dtype == MX_DTYPE_COUNT) {
        return gguf_fail(r, MX_UNSUPPORTED, "tensor %s: tensor type %s is not supported", name,
                         tensor_type[type].name);
    }
    t->dtype = tensor_type[type].dtype;
    return MX_OK;
}

static mx_status read_dims(gguf_reader *r, mx_wtensor *t, const char *name) {
    uint64_t n, dim;
    MX_TRY(read_uint(r, 4, &n, name));
    if (n > MX_MAX_DIM) {
        return gguf_fail(r, MX_FORMAT, "tensor %s: %llu dimensions, at most %d", name,
                         (unsigned long long)n, MX_MAX_DIM);
    }
    t->n_dim = (int)n;
    for (int i = t->n_dim - 1; i >= 0; i--) {
        MX_TRY(read_uint(r, 8, &dim, name));
        if (dim > INT64_MAX) {
            return gguf_fail(r, MX_FORMAT, "tensor %s: dimension of %llu", name,
                             (unsigned long long)dim);
        }
        t->dim[i] = (int64_t)dim;
    }
    return MX_OK;
}

static mx_status read_tensor(gguf_reader *r, uint64_t index, tensor_entry *e) {
    char what[48], name[FORMAT_NAME_TEXT];
    snprintf(what, sizeof what, "tensor %llu", (unsigned long long)index);
    *e = (tensor_entry){.t.file = r->file};
    MX_TRY(read_name(r, &e->t.name, MAX_NAME_BYTES, what));
    format_show(e->t.name, name);
    MX_TRY(read_dims(r, &e->t, name));
    uint64_t type;
    MX_TRY(read_uint(r, 4, &type, name));
    MX_TRY(read_uint(r, 8, &e->offset, name));
    if (e->offset % r->w->alignment != 0) {
        return gguf_fail(r, MX_FORMAT,
                         "tensor %s: offset %llu is not a multiple of the alignment %u", name,
                         (unsigned long long)e->offset, r->w->alignment);
    }
    MX_TRY(set_type(r, &e->t, type, name));
    if (!weights_shape_bytes(e->t.dtype, e->t.dim, e->t.n_dim, &e->t.n_bytes)) {
        long long row = e->t.n_dim ? (long long)e->t.dim[e->t.n_dim - 1] : 1;
        return gguf_fail(
            r, MX_FORMAT,
            "tensor %s: its shape overflows, or rows of %lld are no whole blocks of %s", name, row,
            tensor_type[type].name);
    }
    return MX_OK;
}

// Sets the tensor's address once the data section's start is known.
static mx_status place_tensor(gguf_reader *r, mx_wtensor *t, uint64_t offset, size_t start) {
    size_t have = r->f->n_bytes > start ? r->f->n_bytes - start : 0;
    if (t->n_bytes == 0) return MX_OK;
    if (offset > have || t->n_bytes > have - offset) {
        char name[FORMAT_NAME_TEXT];
        return gguf_fail(
            r, MX_FORMAT,
            "tensor %s: needs %zu bytes at offset %llu of the data, which has %zu bytes: "
            "the file is cut short or damaged",
            format_show(t->name, name), t->n_bytes, (unsigned long long)offset, have);
    }
    t->data = r->f->data + start + (size_t)offset;
    return MX_OK;
}

static mx_status read_tensors(gguf_reader *r, uint64_t n) {
    mx_weights *w = r->w;
    int32_t first = w->n_tensors;
    uint64_t *offset = NULL;
    mx_status st = MX_OK;
    for (uint64_t i = 0; i < n && st == MX_OK; i++) {
        tensor_entry e;
        st = read_tensor(r, i, &e);
        if (st == MX_OK) st = weights_add(w, &e.t, r->err);
        if (st != MX_OK) break;
        offset = format_grow(offset, (int32_t)i, sizeof *offset);
        offset[i] = e.offset;
    }
    size_t start = (r->at + w->alignment - 1) / w->alignment * w->alignment;
    for (uint64_t i = 0; i < n && st == MX_OK; i++) {
        st = place_tensor(r, &w->tensors[first + (int32_t)i], offset[i], start);
    }
    mx_free(offset);
    if (st != MX_OK || start >= r->f->n_bytes) return st;
    return weights_check_ranges(w, r->file, first, r->f->data + start, r->f->n_bytes - start, false,
                                r->err);
}

// ---- Header ----

static mx_status read_version(gguf_reader *r) {
    uint64_t v;
    if (bytes_left(r) < 4 || memcmp(r->f->data, "GGUF", 4) != 0) {
        return gguf_fail(r, MX_FORMAT, "not a GGUF file: it does not begin with GGUF");
    }
    r->at = 4;
    MX_TRY(read_uint(r, 4, &v, "version"));
    if (v != 0 && (v & 0xffff) == 0) {
        return gguf_fail(r, MX_UNSUPPORTED, "version: a big-endian GGUF file is not supported");
    }
    if (v < 2 || v > 3) {
        return gguf_fail(r, MX_UNSUPPORTED, "version: GGUF version %llu, supported are 2 and 3",
                         (unsigned long long)v);
    }
    r->w->gguf_version = (uint32_t)v;
    return MX_OK;
}

static mx_status check_count(gguf_reader *r, const char *field, uint64_t n, size_t least,
                             uint64_t max) {
    if (n > bytes_left(r) / least) {
        return gguf_fail(r, MX_FORMAT, "%s: %llu entries of at least %zu bytes, %zu bytes are left",
                         field, (unsigned long long)n, least, bytes_left(r));
    }
    if (n > max) {
        return gguf_fail(r, MX_TOOLARGE, "%s: %llu entries, at most %llu", field,
                         (unsigned long long)n, (unsigned long long)max);
    }
    return MX_OK;
}

mx_status gguf_read(mx_weights *w, int32_t file, mx_err *err) {
    gguf_reader r = {.w = w, .f = &w->files[file], .file = file, .err = err};
    uint64_t n_tensors, n_kv;
    MX_TRY(read_version(&r));
    MX_TRY(read_uint(&r, 8, &n_tensors, "tensor_count"));
    MX_TRY(read_uint(&r, 8, &n_kv, "metadata_kv_count"));
    MX_TRY(check_count(&r, "metadata_kv_count", n_kv, MIN_KV_BYTES, MAX_KV));
    MX_TRY(check_count(&r, "tensor_count", n_tensors, MIN_TENSOR_BYTES, FORMAT_MAX_TENSORS));
    for (uint64_t i = 0; i < n_kv; i++) MX_TRY(read_kv(&r, i));
    MX_TRY(read_container_keys(&r));
    MX_TRY(check_count(&r, "tensor_count", n_tensors, MIN_TENSOR_BYTES, FORMAT_MAX_TENSORS));
    return read_tensors(&r, n_tensors);
}

// ---- Getters ----

const mx_gguf_kv *mx_gguf_find(const mx_weights *w, const char *key) {
    int32_t i;
    return mx_map_get(&w->kv_by_name, mx_str_of(key), &i) ? &w->kv[i] : NULL;
}

bool mx_gguf_get_i64(const mx_weights *w, const char *key, int64_t *out) {
    const mx_gguf_kv *kv = mx_gguf_find(w, key);
    if (!kv || !is_integer(kv->type)) return false;
    if (!is_signed(kv->type) && kv->v.u > INT64_MAX) return false;
    *out = kv->v.i;
    return true;
}

bool mx_gguf_get_f64(const mx_weights *w, const char *key, double *out) {
    const mx_gguf_kv *kv = mx_gguf_find(w, key);
    if (!kv) return false;
    if (kv->type == MX_GGUF_F32 || kv->type == MX_GGUF_F64) {
        *out = kv->v.f;
    } else if (is_integer(kv->type)) {
        *out = is_signed(kv->type) ? (double)kv->v.i : (double)kv->v.u;
    } else {
        return false;
    }
    return true;
}

bool mx_gguf_get_bool(const mx_weights *w, const char *key, bool *out) {
    const mx_gguf_kv *kv = mx_gguf_find(w, key);
    if (!kv || kv->type != MX_GGUF_BOOL) return false;
    *out = kv->v.u != 0;
    return true;
}

bool mx_gguf_get_str(const mx_weights *w, const char *key, mx_str *out) {
    const mx_gguf_kv *kv = mx_gguf_find(w, key);
    if (!kv || kv->type != MX_GGUF_STRING) return false;
    *out = kv->v.s;
    return true;
}

static uint64_t array_bits(const mx_gguf_kv *kv, uint64_t i) {
    CHECKF(kv->type == MX_GGUF_ARRAY && i < kv->n_elems, "element %llu", (unsigned long long)i);
    size_t bytes = value_type[kv->elem_type].bytes;
    CHECKF(bytes > 0, "an array of %s has no numbers", value_type[kv->elem_type].name);
    uint64_t u = 0;
    memcpy(&u, (const char *)kv->data + i * bytes, bytes);
    return u;
}

double mx_gguf_array_f64(const mx_gguf_kv *kv, uint64_t i) {
    uint64_t u = array_bits(kv, i);
    mx_gguf_type t = kv->elem_type;
    if (t == MX_GGUF_F32 || t == MX_GGUF_F64) return real_of(u, t);
    return is_signed(t) ? (double)sign_extend(u, value_type[t].bytes) : (double)u;
}

int64_t mx_gguf_array_i64(const mx_gguf_kv *kv, uint64_t i) {
    uint64_t u = array_bits(kv, i);
    mx_gguf_type t = kv->elem_type;
    CHECKF(is_integer(t) || t == MX_GGUF_BOOL, "an array of %s has no integers",
           value_type[t].name);
    if (is_signed(t)) return sign_extend(u, value_type[t].bytes);
    return u > INT64_MAX ? INT64_MAX : (int64_t)u;
}
