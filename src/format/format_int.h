// What the files of this folder share. A reader fills an mx_weights from one mapped file.
#ifndef MX_FORMAT_FORMAT_INT_H
#define MX_FORMAT_FORMAT_INT_H

#include "format/weights.h"

enum {
    FORMAT_MAX_TENSORS = 1 << 21,
    FORMAT_NAME_TEXT = 100 // room for a name in a message
};

// Reads the container's header in w->files[file] and adds its tensors. The bytes may be any
// memory that outlives w: fuzz targets pass their own buffer.
mx_status gguf_read(mx_weights *w, int32_t file, mx_err *err);
mx_status safetensors_read(mx_weights *w, int32_t file, mx_err *err);

// synthetic.c: a model of that name, made instead of read. Errors: NOTFOUND (with what there is),
// UNSUPPORTED (a geometry that does not divide into the format's blocks), NOMEM.
mx_status synthetic_open(mx_weights *w, mx_str name, mx_err *err);
void synthetic_unmap(mx_weights *w);

// The greatest safetensors header that is read (256 MiB); a test may lower it.
extern size_t safetensors_header_cap;

// Adds a tensor whose range was checked. Errors: FORMAT (the name exists: both files are named),
// TOOLARGE.
mx_status weights_add(mx_weights *w, const mx_wtensor *t, mx_err *err);
// No two tensors of `file` with index >= first share a byte; with `tight`, every byte of
// data[0..n_bytes) belongs to one.
mx_status weights_check_ranges(const mx_weights *w, int32_t file, int32_t first,
                               const unsigned char *data, size_t n_bytes, bool tight, mx_err *err);
// Bytes of dim[0..n_dim) elements; false on overflow or when the last dimension does not divide
// into blocks. An empty shape has one element.
bool weights_shape_bytes(mx_dtype t, const int64_t *dim, int n_dim, size_t *out);
// Frees everything but the mappings.
void weights_free_tables(mx_weights *w);

// Room for one more element of an array that holds n and is only ever grown by this function.
void *format_grow(void *array, int32_t n, size_t elem_bytes);
// An untrusted name for a message: printable, cut at the capacity of buf. Returns buf.
const char *format_show(mx_str name, char buf[FORMAT_NAME_TEXT]);

#endif
