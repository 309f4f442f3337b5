// The table of element types, the arithmetic of weight formats, and views of rows.
// No state. Does not read or convert any value: that is quant.c and the backends.
#include "tensor/tensor.h"

#include "base/mem.h"

#include <stdio.h>

static const mx_dtype_info dtype_table[MX_DTYPE_COUNT] = {
#define X(id, name, elems, bytes) {name, elems, bytes},
    MX_DTYPE_LIST(X)
#undef X
};

const mx_dtype_info *mx_dtype_get(mx_dtype t) {
    CHECKF((unsigned)t < MX_DTYPE_COUNT, "dtype %d", (int)t);
    return &dtype_table[t];
}

bool mx_dtype_is_float(mx_dtype t) {
    return t == MX_F32 || t == MX_F16 || t == MX_BF16;
}

bool mx_wfmt_eq(mx_wfmt a, mx_wfmt b) {
    if (a.dtype != b.dtype) return false;
    if (a.dtype != MX_AFFINE) return true;
    return a.bits == b.bits && a.group == b.group && a.scale_dtype == b.scale_dtype;
}

const char *mx_wfmt_name(mx_wfmt f, char *buf, size_t cap) {
    if (f.dtype == MX_AFFINE) {
        snprintf(buf, cap, "affine%d g%d %s", f.bits, f.group, mx_dtype_get(f.scale_dtype)->name);
    } else {
        snprintf(buf, cap, "%s", mx_dtype_get(f.dtype)->name);
    }
    return buf;
}

static bool affine_valid(mx_wfmt f) {
    bool bits = f.bits >= 2 && f.bits <= 8 && f.bits != 7;
    bool group = f.group == 32 || f.group == 64 || f.group == 128;
    return bits && group && mx_dtype_is_float(f.scale_dtype);
}

bool mx_wfmt_code_bytes(mx_wfmt f, int64_t n_cols, size_t *out_bytes) {
    if (n_cols < 0) return false;
    size_t n = (size_t)n_cols;
    if (f.dtype == MX_AFFINE) {
        // group is a multiple of 32, so whole groups are whole 32-bit words
        if (!affine_valid(f) || n % f.group != 0) return false;
        return mx_mul_size(n / 32, (size_t)f.bits * 4, out_bytes);
    }
    const mx_dtype_info *d = mx_dtype_get(f.dtype);
    if (n % (size_t)d->block_elems != 0) return false;
    return mx_mul_size(n / (size_t)d->block_elems, (size_t)d->block_bytes, out_bytes);
}

bool mx_wfmt_row_bytes(mx_wfmt f, int64_t n_cols, size_t *out_bytes) {
    size_t codes, planes;
    if (!mx_wfmt_code_bytes(f, n_cols, &codes)) return false;
    if (f.dtype != MX_AFFINE) {
        *out_bytes = codes;
        return true;
    }
    size_t scale = (size_t)mx_dtype_get(f.scale_dtype)->block_bytes;
    return mx_mul_size((size_t)n_cols / f.group, 2 * scale, &planes) &&
           mx_add_size(codes, planes, out_bytes);
}

double mx_wfmt_bits_per_weight(mx_wfmt f) {
    if (f.dtype == MX_AFFINE) {
        CHECKF(affine_valid(f), "affine%d g%d", f.bits, f.group);
        return f.bits + 16.0 * mx_dtype_get(f.scale_dtype)->block_bytes / f.group;
    }
    const mx_dtype_info *d = mx_dtype_get(f.dtype);
    return 8.0 * d->block_bytes / d->block_elems;
}

mx_wview mx_wview_rows(const mx_wview *w, int64_t row0, int64_t n) {
    CHECKF(row0 >= 0 && n >= 0 && row0 <= w->n_rows && n <= w->n_rows - row0,
           "rows %lld + %lld of %lld", (long long)row0, (long long)n, (long long)w->n_rows);
    size_t code_bytes;
    CHECK(mx_wfmt_code_bytes(w->fmt, w->n_cols, &code_bytes));
    mx_wview v = *w;
    v.n_rows = n;
    if (v.data) v.data = (const char *)v.data + (size_t)row0 * code_bytes;
    if (w->fmt.dtype == MX_AFFINE) {
        size_t scale = (size_t)mx_dtype_get(w->fmt.scale_dtype)->block_bytes;
        size_t plane_row = (size_t)w->n_cols / w->fmt.group * scale;
        if (v.scales) v.scales = (const char *)v.scales + (size_t)row0 * plane_row;
        if (v.biases) v.biases = (const char *)v.biases + (size_t)row0 * plane_row;
    }
    return v;
}
