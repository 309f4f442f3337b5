// A checkpoint as the rest of the program sees it, whatever container it came from.
#ifndef MX_FORMAT_WEIGHTS_H
#define MX_FORMAT_WEIGHTS_H

#include "base/map.h"
#include "base/mem.h"
#include "base/os.h"
#include "tensor/tensor.h"

#include <jansson.h>

typedef enum mx_container { MX_CONTAINER_GGUF, MX_CONTAINER_SAFETENSORS } mx_container;

// One tensor of a file. Shape is outermost first (a matrix is (rows, cols); GGUF's order is
// reversed when read; a scalar has n_dim 0). The byte range was checked against the file and
// against shape x type. data is aligned to 8 bytes in GGUF and need not be aligned in safetensors.
// foreign is NULL, or the name of an element type of one byte that this program does not compute
// with ("F8_E4M3"): dtype is then U8, and whoever needs the values reports the name.
typedef struct mx_wtensor {
    mx_str name;
    mx_dtype dtype;
    int n_dim;
    int64_t dim[MX_MAX_DIM];
    const void *data; // in the mapping; NULL only when n_bytes is 0
    size_t n_bytes;
    int32_t file; // index into mx_weights.files; -1: synthetic
    const char *foreign;
} mx_wtensor;

// GGUF metadata value types, as in the specification.
typedef enum mx_gguf_type {
    MX_GGUF_U8,
    MX_GGUF_I8,
    MX_GGUF_U16,
    MX_GGUF_I16,
    MX_GGUF_U32,
    MX_GGUF_I32,
    MX_GGUF_F32,
    MX_GGUF_BOOL,
    MX_GGUF_STRING,
    MX_GGUF_ARRAY,
    MX_GGUF_U64,
    MX_GGUF_I64,
    MX_GGUF_F64
} mx_gguf_type;

// One metadata pair. Scalars are widened into i, u or f; a string is a view into the mapping; an
// array keeps its element type and count: numbers lie packed at `data` (unaligned; use the
// getters), strings are parsed into `strings`.
typedef struct mx_gguf_kv {
    mx_str key;
    mx_gguf_type type, elem_type;
    union {
        int64_t i;
        uint64_t u;
        double f;
        mx_str s;
    } v;
    uint64_t n_elems;
    const void *data;
    mx_str *strings;
} mx_gguf_kv;

// An open checkpoint. Owns its mappings; every view above stays valid until mx_weights_close.
// Read-only after open and safe to read from several threads.
typedef struct mx_weights {
    mx_container container;
    char *path; // as given (file or folder)
    mx_file *files;
    int32_t n_files;
    mx_wtensor *tensors;
    int32_t n_tensors;
    mx_map by_name;
    // GGUF only
    uint32_t gguf_version, alignment;
    mx_gguf_kv *kv;
    int32_t n_kv;
    mx_map kv_by_name;
    // safetensors only: parsed JSON files of the folder, or NULL when absent
    json_t *config;            // config.json (required there)
    json_t *generation_config; // generation_config.json
    mx_arena arena;
    void *made; // a synthetic model's values; NULL for a checkpoint
    size_t made_bytes;
} mx_weights;

// In front of the name of a model that is made instead of read: "synthetic:llama-3.1-8b-bf16", a
// geometry and a format (docs/profile.md). Such weights have no files, and text means nothing.
#define MX_SYNTHETIC "synthetic:"

// Opens a GGUF file, a folder with config.json and *.safetensors (shards are found by listing the
// folder: model*.safetensors, or every one when there is none of that name; a stale index file is
// reported at debug level and not trusted; a hole in numbered shards is an error), or one
// .safetensors file beside its config.json, or makes "synthetic:NAME". Every count, length, offset
// and product is checked before memory is allocated or a byte is read. Errors: NOTFOUND, IO, FORMAT
// (what and where: file, tensor or key), UNSUPPORTED (a tensor type by name, an endianness, a
// version), TOOLARGE.
mx_status mx_weights_open(mx_weights *w, const char *path, mx_err *err);
void mx_weights_close(mx_weights *w);

// Looks again at the files' sizes: a file that became shorter since it was opened is an IO error
// (reading past its end would end the process). For a loader, before and after it copies.
mx_status mx_weights_check_files(const mx_weights *w, mx_err *err);

// Gives back the memory of bytes of a file that were copied elsewhere; they can still be read.
// Bytes that belong to no file are left alone.
void mx_weights_release(const mx_weights *w, const void *data, size_t n_bytes);
const mx_wtensor *mx_weights_find(const mx_weights *w, mx_str name); // NULL when absent
const mx_gguf_kv *mx_gguf_find(const mx_weights *w, const char *key);
// Typed getters: false when absent or of another kind (integers of any width convert when they
// fit).
bool mx_gguf_get_i64(const mx_weights *w, const char *key, int64_t *out);
bool mx_gguf_get_f64(const mx_weights *w, const char *key, double *out);
bool mx_gguf_get_bool(const mx_weights *w, const char *key, bool *out);
bool mx_gguf_get_str(const mx_weights *w, const char *key, mx_str *out);
// Element i of a numeric or bool array; CHECKs the index and that elem_type is one (ask before).
// Integers beyond 2^53 are rounded by the first; the second takes integers only, and gives
// INT64_MAX for an unsigned one that is greater.
double mx_gguf_array_f64(const mx_gguf_kv *kv, uint64_t i);
int64_t mx_gguf_array_i64(const mx_gguf_kv *kv, uint64_t i);

// Parses untrusted JSON with the limits used everywhere: depth 128, duplicate keys are errors,
// size at most max_bytes. Any JSON value is accepted at the top: the caller checks its type.
// `what` names the source in messages. NULL on error; else json_decref it.
// flags: MX_JSON_CONFIG for config files (integers too large for 64 bits become reals),
// MX_JSON_VOCAB for vocabularies (NUL in strings allowed).
enum { MX_JSON_STRICT = 0, MX_JSON_CONFIG = 1, MX_JSON_VOCAB = 2 };
json_t *mx_json_parse(const char *text, size_t n, size_t max_bytes, int flags, const char *what,
                      mx_err *err);
json_t *mx_json_load(const char *path, size_t max_bytes, int flags, mx_err *err);

#endif
