// What the targets of both checkpoint readers share: bytes become an open mx_weights, and whatever
// was accepted is then used as the rest of the program uses it.
#ifndef TESTS_FUZZ_WEIGHTS_H
#define TESTS_FUZZ_WEIGHTS_H

#include "format/format_int.h"

typedef mx_status (*fuzz_reader)(mx_weights *w, int32_t file, mx_err *err);

enum { FUZZ_MAX_ROW = 1 << 14 };

static float fuzz_row[FUZZ_MAX_ROW];

// The range that the reader promised, and a row of it through the oracle.
static void fuzz_use_tensor(const mx_weights *w, const mx_wtensor *t) {
    CHECK(mx_weights_find(w, t->name) == t);
    size_t n;
    CHECK(weights_shape_bytes(t->dtype, t->dim, t->n_dim, &n) && n == t->n_bytes);
    if (n == 0) return;
    size_t at = (size_t)((const unsigned char *)t->data - w->files[0].data);
    CHECK(at <= w->files[0].n_bytes && n <= w->files[0].n_bytes - at);
    bool weights = mx_dtype_is_float(t->dtype) || mx_dtype_get(t->dtype)->block_elems > 1;
    int64_t cols = t->n_dim ? t->dim[t->n_dim - 1] : 1, rows = 1;
    for (int i = 0; i + 1 < t->n_dim; i++) rows *= t->dim[i];
    if (!weights || cols > FUZZ_MAX_ROW) return;
    mx_wview v = {.fmt = mx_wfmt_of(t->dtype), .n_rows = rows, .n_cols = cols, .data = t->data};
    mx_dequant_row(&v, 0, fuzz_row);
    mx_dequant_row(&v, rows - 1, fuzz_row);
}

static void fuzz_open(fuzz_reader read, const uint8_t *data, size_t n_bytes,
                      void (*use)(const mx_weights *)) {
    mx_file file = {.data = data, .n_bytes = n_bytes, .path = (char[]){"fuzz"}};
    mx_weights w = {.files = &file, .n_files = 1};
    mx_err err = {0};
    mx_status st = read(&w, 0, &err);
    if (st == MX_OK) {
        for (int32_t i = 0; i < w.n_tensors; i++) fuzz_use_tensor(&w, &w.tensors[i]);
        if (use) use(&w);
    } else {
        CHECK(err.status == st && strncmp(err.msg, "fuzz: ", 6) == 0);
    }
    weights_free_tables(&w);
}

#endif
