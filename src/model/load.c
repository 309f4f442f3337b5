// Loading: canonical form (norms plus one, unpermuted rows), upload, rotation tables.
#include "model/model_int.h"

#include "tensor/half.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

// A vector (norm, bias, frequencies) becomes float32.
static mx_status load_vector(mx_model *m, bound_weight *w, mx_err *err) {
    int64_t n = w->view.n_cols;
    float *f = mx_alloc((size_t)n * sizeof *f), *g = mx_alloc((size_t)n * sizeof *g);
    mx_dequant_row(&w->view, 0, f);
    if (w->fix & MX_FIX_ADD_ONE) {
        for (int64_t i = 0; i < n; i++) f[i] += 1.0f;
    }
    memcpy(g, f, (size_t)n * sizeof *g);
    if (w->fix & MX_FIX_UNPERMUTE) {
        int64_t d = m->hp.head_dim;
        for (int64_t i = 0; i < n; i++) {
            int64_t h = i / d, j = i % d;
            g[h * d + (j % 2) * (d / 2) + j / 2] = f[i];
        }
    }
    mx_wview v = {.fmt = mx_wfmt_of(MX_F32), .n_rows = 1, .n_cols = n, .data = g};
    mx_status st = m->backend->ops->upload(m->backend, &w->tensor, &v, err);
    mx_free(f);
    mx_free(g);
    return st;
}

// The checkpoint's form, for a backend that reads files itself.
static mx_status load_from_files(mx_model *m, bound_weight *w, mx_err *err) {
    mx_wview v = w->view;
    if (m->weights->n_files) v.files = m->weights->files;
    v.n_files = m->weights->n_files;
    if (w->fix & MX_FIX_UNPERMUTE) {
        CHECK(v.n_rows % m->hp.head_dim == 0);
        v.pairs = (int32_t)m->hp.head_dim;
    }
    return m->backend->ops->upload(m->backend, &w->tensor, &v, err);
}

// Rows of each head from interleaved pairs (2i, 2i+1) to halves (i, i + d/2); whole rows move, so
// this works for every row-major block format.
static mx_status load_unpermuted(mx_model *m, bound_weight *w, mx_err *err) {
    int64_t d = m->hp.head_dim;
    size_t row;
    CHECK(w->view.fmt.dtype != MX_AFFINE && w->view.n_rows % d == 0);
    CHECK(mx_wfmt_row_bytes(w->view.fmt, w->view.n_cols, &row));
    size_t n = (size_t)w->view.n_rows * row;
    unsigned char *copy = mx_alloc_large(n);
    if (!copy) return mx_err_set(err, MX_NOMEM, "%zu bytes to reorder a weight", n);
    for (int64_t r = 0; r < w->view.n_rows; r++) {
        int64_t j = r % d, to = r - j + (j % 2) * (d / 2) + j / 2;
        memcpy(copy + (size_t)to * row, (const unsigned char *)w->view.data + (size_t)r * row, row);
    }
    mx_wview v = w->view;
    v.data = copy;
    mx_status st = m->backend->ops->upload(m->backend, &w->tensor, &v, err);
    if (st == MX_OK && w->tensor.buf->borrowed) { // keep what the backend points into
        w->copy = copy;
        w->copy_bytes = n;
    } else {
        mx_free_large(copy, n);
    }
    return st;
}

// The file's pages of a copied weight are given back, so that it is in memory once.
static void release_source(const mx_model *m, const bound_weight *w) {
    size_t row, code, rows = (size_t)w->view.n_rows;
    if (w->tensor.buf->borrowed && !w->copy) return;
    CHECK(mx_wfmt_row_bytes(w->view.fmt, w->view.n_cols, &row) &&
          mx_wfmt_code_bytes(w->view.fmt, w->view.n_cols, &code));
    bool affine = w->view.fmt.dtype == MX_AFFINE;
    mx_weights_release(m->weights, w->view.data, (affine ? code : row) * rows);
    if (!affine) return;
    mx_weights_release(m->weights, w->view.scales, (row - code) / 2 * rows);
    mx_weights_release(m->weights, w->view.biases, (row - code) / 2 * rows);
}

mx_status model_materialize(mx_model *m, bound_weight *w, mx_err *err) {
    if (w->resident || !w->present) return MX_OK;
    mx_status st;
    if (w->view.n_rows == 1 && w->view.fmt.dtype <= MX_BF16)
        st = load_vector(m, w, err);
    else if (m->reads_files)
        st = load_from_files(m, w, err);
    else if (w->fix & MX_FIX_UNPERMUTE)
        st = load_unpermuted(m, w, err);
    else
        st = m->backend->ops->upload(m->backend, &w->tensor, &w->view, err);
    MX_TRY(st);
    release_source(m, w);
    w->tensor.kind = MX_T_WEIGHT;
    w->resident = w->fresh = true;
    m->n_fresh++;
    m->load.n_tensors++;
    m->load.bytes += w->tensor.n_bytes;
    return MX_OK;
}

// The fresh weight is complete, or (ok = false) was never loaded.
static void settle_weight(mx_model *m, bound_weight *w, bool ok) {
    if (!w->fresh) return;
    w->fresh = false;
    if (ok) return;
    m->backend->ops->free(m->backend, w->tensor.buf);
    mx_free_large(w->copy, w->copy_bytes);
    m->load.n_tensors--;
    m->load.bytes -= w->tensor.n_bytes;
    w->tensor = (mx_tensor){0};
    w->copy = NULL;
    w->copy_bytes = 0;
    w->resident = false;
}

mx_status model_end_uploads(mx_model *m, mx_err *err) {
    if (!m->n_fresh) return MX_OK;
    mx_status st = MX_OK;
    if (m->backend->ops->upload_end) st = m->backend->ops->upload_end(m->backend, err);
    for (int s = 0; s < MX_W_GLOBALS; s++) settle_weight(m, &m->globals[s], st == MX_OK);
    for (int64_t i = 0; i < m->hp.n_layer * (MX_W_SLOTS - MX_W_GLOBALS); i++) {
        settle_weight(m, &m->layers[i], st == MX_OK);
    }
    m->n_fresh = 0;
    return st;
}

mx_status model_load_all(mx_model *m, mx_err *err) {
    for (int s = 0; s < MX_W_GLOBALS; s++) MX_TRY(model_materialize(m, &m->globals[s], err));
    for (int64_t i = 0; i < m->hp.n_layer * (MX_W_SLOTS - MX_W_GLOBALS); i++) {
        MX_TRY(model_materialize(m, &m->layers[i], err));
    }
    return model_end_uploads(m, err);
}

// Llama 3's rule: long wavelengths slowed by factor, a smooth band between.
static double scale_llama3(const mx_hparams *hp, double f) {
    double wavelength = 2 * 3.14159265358979323846 / f;
    if (wavelength < hp->rope_orig_ctx / hp->rope_high) return f;
    if (wavelength > hp->rope_orig_ctx / hp->rope_low) return f / hp->rope_factor;
    double t = (hp->rope_orig_ctx / wavelength - hp->rope_low) / (hp->rope_high - hp->rope_low);
    return (1 - t) * f / hp->rope_factor + t * f;
}

static mx_status make_table(mx_model *m, double theta, bool full, mx_tensor *out, mx_err *err) {
    int64_t half = m->hp.head_dim / 2;
    float *f = mx_alloc((size_t)half * sizeof *f);
    for (int64_t i = 0; i < half; i++) {
        double v = 1.0 / pow(theta, (double)(2 * i) / (double)m->hp.head_dim);
        if (full && m->hp.rope_type == MX_ROPE_LINEAR) v /= m->hp.rope_factor;
        if (full && m->hp.rope_type == MX_ROPE_LLAMA3) v = scale_llama3(&m->hp, v);
        f[i] = (float)v;
    }
    const bound_weight *factors = &m->globals[MX_W_ROPE_FREQS];
    if (full && factors->present) { // GGUF's form of the same rule: divisors
        float *div = mx_alloc((size_t)half * sizeof *div);
        mx_dequant_row(&factors->view, 0, div);
        for (int64_t i = 0; i < half; i++) f[i] = f[i] / (div[i] > 0 ? div[i] : 1.0f);
        mx_free(div);
    }
    mx_wview v = {.fmt = mx_wfmt_of(MX_F32), .n_rows = 1, .n_cols = half, .data = f};
    mx_status st = m->backend->ops->upload(m->backend, out, &v, err);
    out->kind = MX_T_WEIGHT;
    mx_free(f);
    return st;
}

mx_status model_make_rope(mx_model *m, mx_err *err) {
    MX_TRY(make_table(m, m->hp.rope_theta, true, &m->inv_freq[0], err));
    m->has_local_rope = m->hp.rope_local_theta > 0;
    if (m->has_local_rope) {
        MX_TRY(make_table(m, m->hp.rope_local_theta, false, &m->inv_freq[1], err));
    }
    return MX_OK;
}
