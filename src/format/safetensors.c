// Reading safetensors: one file's header into the tables of an mx_weights. Names are copied into
// its arena. Does not look for shards, nor read config.json.
//
//   u64 n   n bytes of JSON   data
//   {"name": {"dtype": "BF16", "shape": [rows, cols], "data_offsets": [begin, end]}, …,
//    "__metadata__": {…}}     offsets count from the first byte of data
//
// The header may be large (a million tensors) while one entry is small. So only the outer object is
// walked here, iteratively, and each entry goes to the JSON parser alone: memory stays that of one
// entry. All rules of the format hold for every entry whatever its dtype: begin <= end <= size,
// no byte in two tensors, none in no tensor, no name twice. Only then is an unknown dtype reported.
#include "format/format_int.h"

#include <stdarg.h>
#include <stdio.h>

enum { MAX_ENTRY_BYTES = 1 << 20, MAX_NAME_BYTES = 4096 };

size_t safetensors_header_cap = (size_t)256 << 20;

typedef struct st_reader {
    mx_weights *w;
    const mx_file *f;
    int32_t file;
    const char *json; // the header
    size_t n_json, at;
    const unsigned char *data;
    size_t n_data;
    char *unknown; // the first tensor whose dtype cannot be read, as a message; arena
    mx_err *err;
} st_reader;

static const struct {
    const char *name;
    mx_dtype dtype; // MX_DTYPE_COUNT: known by name, not supported
    uint16_t bits;
    bool foreign; // one byte, kept as U8
} st_dtype[] = {
    {"BF16", MX_BF16, 16, false},
    {"F16", MX_F16, 16, false},
    {"F32", MX_F32, 32, false},
    {"F64", MX_F64, 64, false},
    {"U8", MX_U8, 8, false},
    {"I8", MX_I8, 8, false},
    {"U16", MX_U16, 16, false},
    {"I16", MX_I16, 16, false},
    {"U32", MX_U32, 32, false},
    {"I32", MX_I32, 32, false},
    {"U64", MX_U64, 64, false},
    {"I64", MX_I64, 64, false},
    {"BOOL", MX_BOOL, 8, false},
    {"F8_E4M3", MX_U8, 8, true},
    {"F8_E5M2", MX_U8, 8, true},
    {"F8_E8M0", MX_U8, 8, true},
    {"F8_E4M3FNUZ", MX_U8, 8, true},
    {"F8_E5M2FNUZ", MX_U8, 8, true},
    {"C64", MX_DTYPE_COUNT, 64, false},
};

__attribute__((format(printf, 3, 4))) static mx_status st_fail(st_reader *r, mx_status status,
                                                               const char *fmt, ...) {
    char text[MX_ERR_CAP];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return mx_err_set(r->err, status, "%s: %s", r->f->path, text);
}

// ---- The outer object ----

static char peek(st_reader *r) {
    while (r->at < r->n_json && strchr(" \t\r\n", r->json[r->at]) && r->json[r->at]) r->at++;
    return r->at < r->n_json ? r->json[r->at] : 0;
}

static mx_status expect(st_reader *r, char c) {
    if (peek(r) != c) {
        return st_fail(r, MX_FORMAT, "header: expected '%c' at byte %zu of the JSON", c, r->at);
    }
    r->at++;
    return MX_OK;
}

// The span of the string or object that begins at r->at. Only its end is found here; the JSON
// parser judges the inside.
static mx_status take_span(st_reader *r, size_t max, mx_str *out) {
    size_t start = r->at, depth = 0;
    bool in_string = false;
    for (; r->at < r->n_json; r->at++) {
        if (r->at - start >= max) {
            return st_fail(r, MX_TOOLARGE, "header: the entry at byte %zu is longer than %zu bytes",
                           start, max);
        }
        char c = r->json[r->at];
        if (in_string && c == '\\') {
            r->at++;
        } else if (c == '"') {
            in_string = !in_string;
        } else if (!in_string && (c == '{' || c == '[')) {
            depth++;
        } else if (!in_string && (c == '}' || c == ']') && depth > 0) {
            depth--;
        }
        if (!in_string && depth == 0) {
            r->at++;
            *out = (mx_str){r->json + start, r->at - start};
            return MX_OK;
        }
    }
    return st_fail(r, MX_FORMAT, "header: the entry at byte %zu does not end", start);
}

static json_t *parse_span(st_reader *r, mx_str span, const char *what) {
    char where[FORMAT_NAME_TEXT + 32];
    mx_err e = {0};
    snprintf(where, sizeof where, "header: %s", what);
    json_t *v = mx_json_parse(span.p, span.n, span.n, MX_JSON_STRICT, where, &e);
    if (!v) st_fail(r, e.status, "%s", e.msg);
    return v;
}

static mx_status read_key(st_reader *r, mx_str *name) {
    mx_str span;
    char what[48];
    if (peek(r) != '"') {
        return st_fail(r, MX_FORMAT, "header: expected a name at byte %zu of the JSON", r->at);
    }
    snprintf(what, sizeof what, "name at byte %zu", r->at);
    MX_TRY(take_span(r, MAX_NAME_BYTES, &span));
    bool plain = !memchr(span.p, '\\', span.n) && mx_utf8_valid(span);
    for (size_t i = 0; plain && i < span.n; i++) plain = (unsigned char)span.p[i] >= 0x20;
    if (plain) { // nothing to decode
        name->n = span.n - 2;
        name->p = mx_arena_strndup(&r->w->arena, span.p + 1, name->n);
    } else {
        json_t *v = parse_span(r, span, what);
        if (!v) return r->err ? r->err->status : MX_FORMAT;
        name->n = json_string_length(v);
        name->p = mx_arena_strndup(&r->w->arena, json_string_value(v), name->n);
        json_decref(v);
    }
    return name->n ? MX_OK : st_fail(r, MX_FORMAT, "header: empty %s", what);
}

// ---- One entry ----

static mx_status read_offsets(st_reader *r, const json_t *entry, mx_wtensor *t, const char *name) {
    const json_t *o = json_object_get(entry, "data_offsets");
    const json_t *b = json_array_get(o, 0), *e = json_array_get(o, 1);
    if (json_array_size(o) != 2 || !json_is_integer(b) || !json_is_integer(e)) {
        return st_fail(r, MX_FORMAT, "tensor %s: data_offsets is not a pair of integers", name);
    }
    json_int_t begin = json_integer_value(b), end = json_integer_value(e);
    if (begin < 0 || end < begin) {
        return st_fail(r, MX_FORMAT, "tensor %s: data_offsets [%lld, %lld]", name, (long long)begin,
                       (long long)end);
    }
    if ((uint64_t)end > r->n_data) {
        return st_fail(r, MX_FORMAT,
                       "tensor %s: needs bytes %lld to %lld of the data, which has %zu bytes: the "
                       "file is cut short or damaged",
                       name, (long long)begin, (long long)end, r->n_data);
    }
    t->n_bytes = (size_t)(end - begin);
    t->data = t->n_bytes ? r->data + begin : NULL;
    return MX_OK;
}

static mx_status read_shape(st_reader *r, const json_t *entry, mx_wtensor *t, const char *name) {
    const json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape)) return st_fail(r, MX_FORMAT, "tensor %s: no shape", name);
    size_t n = json_array_size(shape);
    if (n > MX_MAX_DIM) {
        return st_fail(r, MX_FORMAT, "tensor %s: %zu dimensions, at most %d", name, n, MX_MAX_DIM);
    }
    t->n_dim = (int)n;
    for (size_t i = 0; i < n; i++) {
        const json_t *d = json_array_get(shape, i);
        if (!json_is_integer(d) || json_integer_value(d) < 0) {
            return st_fail(r, MX_FORMAT, "tensor %s: dimension %zu is not a count", name, i);
        }
        t->dim[i] = json_integer_value(d);
    }
    return MX_OK;
}

// Elements of the shape; false on overflow. Also right for element types that are not known.
static mx_status check_size(st_reader *r, const mx_wtensor *t, size_t bits, const char *name) {
    size_t n;
    if (!weights_shape_bytes(MX_U8, t->dim, t->n_dim, &n) || (bits && n > SIZE_MAX / bits)) {
        return st_fail(r, MX_FORMAT, "tensor %s: the product of its shape overflows", name);
    }
    if (bits && n * bits / 8 != t->n_bytes) {
        return st_fail(r, MX_FORMAT,
                       "tensor %s: shape and dtype need %zu bytes, data_offsets give %zu", name,
                       n * bits / 8, t->n_bytes);
    }
    return MX_OK;
}

static mx_status fill_tensor(st_reader *r, const json_t *entry, mx_wtensor *t, const char *name) {
    const json_t *d = json_object_get(entry, "dtype");
    if (!json_is_object(entry)) return st_fail(r, MX_FORMAT, "tensor %s: not an object", name);
    if (!json_is_string(d)) return st_fail(r, MX_FORMAT, "tensor %s: no dtype", name);
    mx_str dtype = {json_string_value(d), json_string_length(d)};
    size_t k = 0;
    while (k < MX_COUNT(st_dtype) && !mx_str_is(dtype, st_dtype[k].name)) k++;
    bool named = k < MX_COUNT(st_dtype), known = named && st_dtype[k].dtype != MX_DTYPE_COUNT;
    MX_TRY(read_offsets(r, entry, t, name));
    MX_TRY(read_shape(r, entry, t, name));
    MX_TRY(check_size(r, t, named ? st_dtype[k].bits : 0, name));
    t->dtype = known ? st_dtype[k].dtype : MX_U8;
    if (named && st_dtype[k].foreign) t->foreign = st_dtype[k].name;
    if (!known && !r->unknown) {
        char buf[FORMAT_NAME_TEXT], text[2 * FORMAT_NAME_TEXT + 64];
        int n = snprintf(text, sizeof text, "tensor %s: dtype %s is not supported", name,
                         format_show(dtype, buf));
        r->unknown = mx_arena_strndup(&r->w->arena, text, (size_t)n);
    }
    return MX_OK;
}

static mx_status check_metadata(st_reader *r, const json_t *v) {
    const char *key;
    json_t *s;
    if (!json_is_object(v)) return st_fail(r, MX_FORMAT, "header: __metadata__ is not an object");
    json_object_foreach((json_t *)(uintptr_t)v, key, s) {
        if (!json_is_string(s)) {
            return st_fail(r, MX_FORMAT, "header: __metadata__ holds a value that is no string");
        }
    }
    return MX_OK;
}

static mx_status read_entry(st_reader *r, bool *seen_metadata) {
    mx_wtensor t = {.file = r->file};
    mx_str span;
    char name[FORMAT_NAME_TEXT];
    MX_TRY(read_key(r, &t.name));
    format_show(t.name, name);
    MX_TRY(expect(r, ':'));
    if (peek(r) != '{') return st_fail(r, MX_FORMAT, "tensor %s: not an object", name);
    bool metadata = mx_str_is(t.name, "__metadata__");
    // metadata may fill the whole header: it is text for people
    MX_TRY(take_span(r, metadata ? r->n_json : (size_t)MAX_ENTRY_BYTES, &span));
    json_t *entry = parse_span(r, span, name);
    if (!entry) return r->err ? r->err->status : MX_FORMAT;
    mx_status st = MX_OK;
    if (metadata) {
        st = *seen_metadata ? st_fail(r, MX_FORMAT, "header: __metadata__ twice")
                            : check_metadata(r, entry);
        *seen_metadata = true;
    } else {
        st = fill_tensor(r, entry, &t, name);
        if (st == MX_OK) st = weights_add(r->w, &t, r->err);
    }
    json_decref(entry);
    return st;
}

static mx_status read_header(st_reader *r) {
    bool seen_metadata = false;
    MX_TRY(expect(r, '{'));
    if (peek(r) == '}') return expect(r, '}');
    for (;;) {
        MX_TRY(read_entry(r, &seen_metadata));
        if (peek(r) == '}') break;
        MX_TRY(expect(r, ','));
    }
    r->at++;
    peek(r); // padding
    if (r->at < r->n_json) {
        return st_fail(r, MX_FORMAT, "header: text after the JSON object at byte %zu", r->at);
    }
    return MX_OK;
}

// Three different faults of the first eight bytes: no such file type, a cut file, too much.
static mx_status find_header(st_reader *r) {
    size_t size = r->f->n_bytes;
    if (size < 8 + 2) {
        return st_fail(r, MX_FORMAT, "not a safetensors file: %zu bytes", size);
    }
    uint64_t n;
    memcpy(&n, r->f->data, 8);
    if (n < 2 || (r->f->data[8] != '{' && n > size - 8)) {
        return st_fail(r, MX_FORMAT,
                       "not a safetensors file: it does not begin with a JSON header");
    }
    if (n > size - 8) {
        return st_fail(r, MX_FORMAT, "header: %llu bytes, but the file has %zu after its length",
                       (unsigned long long)n, size - 8);
    }
    if (n > safetensors_header_cap) {
        return st_fail(r, MX_TOOLARGE, "header: %llu bytes, at most %zu are read",
                       (unsigned long long)n, safetensors_header_cap);
    }
    if (r->f->data[8] != '{') {
        return st_fail(r, MX_FORMAT, "not a safetensors file: its header does not begin with '{'");
    }
    r->json = (const char *)r->f->data + 8;
    r->n_json = (size_t)n;
    r->data = r->f->data + 8 + (size_t)n;
    r->n_data = size - 8 - (size_t)n;
    return MX_OK;
}

mx_status safetensors_read(mx_weights *w, int32_t file, mx_err *err) {
    st_reader r = {.w = w, .f = &w->files[file], .file = file, .err = err};
    int32_t first = w->n_tensors;
    MX_TRY(find_header(&r));
    MX_TRY(read_header(&r));
    MX_TRY(weights_check_ranges(w, file, first, r.data, r.n_data, true, err));
    return r.unknown ? st_fail(&r, MX_UNSUPPORTED, "%s", r.unknown) : MX_OK;
}
