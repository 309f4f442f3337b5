// Weights: raw bytes to the device, then a kernel shuffles them into packed blocks.
//
// Vectors (one row) of floats become float32 rows: norm weights and biases. Matrices of the formats
// in kargs.h are packed; everything else keeps its rows and the plain kernels read it.
//
// A matrix goes through stages of fixed size on the device, some rows each. Bytes of files are
// never waited for: a stage's kernel is launched when the next stage's rows are queued, so that
// readers, transfers (a stream of their own, events between) and kernels all have work until
// upload_end, which gives the stages back. Bytes of memory are read before upload returns. The
// pinned ring stays until the next plan is made; it is as large as the files ask for.
#include "backend/cuda/cuda_int.h"

#include "base/os.h"

#include <string.h>

// kernels/pack.cu spells these numbers.
_Static_assert(MX_F32 == 0 && MX_F16 == 1 && MX_BF16 == 2 && MX_Q4_0 == 13 && MX_Q4_1 == 14 &&
                   MX_Q5_0 == 15 && MX_Q5_1 == 16 && MX_Q8_0 == 17 && MX_Q4_K == 18 &&
                   MX_Q5_K == 19 && MX_Q6_K == 20 && MX_AFFINE == 21,
               "kernels/pack.cu has the numbers of mx_dtype");

static int affine_pack(mx_wfmt f) {
    if (f.scale_dtype != MX_F16 && f.scale_dtype != MX_BF16) return KPACK_ROWS;
    if (f.bits == 4) {
        return f.group == 32 ? KPACK_A4G32 : f.group == 64 ? KPACK_A4G64 : KPACK_A4G128;
    }
    if (f.bits == 8) {
        return f.group == 32 ? KPACK_A8G32 : f.group == 64 ? KPACK_A8G64 : KPACK_A8G128;
    }
    return KPACK_ROWS;
}

static int pack_of(mx_wfmt f) {
    switch (f.dtype) {
    case MX_AFFINE: return affine_pack(f);
    case MX_Q4_0: return KPACK_S4;
    case MX_Q4_1: return KPACK_A4G32;
    case MX_Q5_0: return KPACK_S5;
    case MX_Q5_1: return KPACK_A5;
    case MX_Q8_0: return KPACK_S8;
    case MX_Q4_K: return KPACK_K4;
    case MX_Q5_K: return KPACK_K5;
    case MX_Q6_K: return KPACK_K6;
    case MX_F16: return KPACK_H16;
    case MX_BF16: return KPACK_B16;
    default: return KPACK_ROWS;
    }
}

// Keeps the first error of what a caller no longer waits for, and reports it here too.
static mx_status note_error(cuda_backend *b, mx_status st, const mx_err *e, mx_err *err) {
    if (st == MX_OK) return st;
    if (b->upload_err.status == MX_OK) b->upload_err = *e;
    return mx_err_set(err, st, "%s", e->msg);
}

// ---- Stages ------------------------------------------------------------------------------------

static mx_status make_stages(cuda_backend *b, mx_err *err) {
    for (int i = 0; i < CUDA_STAGES; i++) {
        cuda_stage *s = &b->stage[i];
        MX_TRY(cuda_take(b, b->stage_bytes, &s->base, err));
        CUDA_TRY(cuda_d.cuEventCreate(&s->copied, CU_EVENT_DISABLE_TIMING), err);
        CUDA_TRY(cuda_d.cuEventCreate(&s->packed, CU_EVENT_DISABLE_TIMING), err);
    }
    return MX_OK;
}

static mx_status open_stages(cuda_backend *b, mx_err *err) {
    if (b->stage) return MX_OK;
    b->stage = mx_calloc(CUDA_STAGES, sizeof *b->stage);
    mx_status st = make_stages(b, err);
    if (st != MX_OK) cuda_stage_free(b);
    return st;
}

void cuda_stage_free(cuda_backend *b) {
    for (int i = 0; b->stage && i < CUDA_STAGES; i++) {
        cuda_stage *s = &b->stage[i];
        if (s->used) cuda_d.cuStreamSynchronize(b->stream);
        if (s->base) cuda_d.cuMemFree(s->base);
        if (s->copied) cuda_d.cuEventDestroy(s->copied);
        if (s->packed) cuda_d.cuEventDestroy(s->packed);
    }
    mx_free(b->stage);
    b->stage = NULL;
}

// Launches the kernel of a stage whose transfers were all started.
static mx_status pack_stage(cuda_backend *b, cuda_stage *s, mx_err *err) {
    CUDA_TRY(cuda_d.cuEventRecord(s->copied, b->copy), err);
    CUDA_TRY(cuda_d.cuStreamWaitEvent(b->stream, s->copied, 0), err);
    MX_TRY(cuda_run_item(b, &s->item, (const uint8_t *)&s->args, false, err));
    CUDA_TRY(cuda_d.cuEventRecord(s->packed, b->stream), err);
    s->used = true;
    return MX_OK;
}

static mx_status finish_stage(cuda_backend *b, cuda_stage *s, mx_err *err) {
    if (!s->pending) return MX_OK;
    s->pending = false;
    mx_err e = {0};
    mx_status st = b->ring ? cuda_ring_sent(b, s->ticket, &e) : MX_OK;
    if (st == MX_OK) st = pack_stage(b, s, &e);
    return note_error(b, st, &e, err);
}

// All stages, the oldest first, and what went past them. The first error.
static mx_status finish_all(cuda_backend *b, mx_err *err) {
    mx_status first = MX_OK;
    for (int i = 0; b->stage && i < CUDA_STAGES; i++) {
        cuda_stage *s = &b->stage[(b->stage_next + i) % CUDA_STAGES];
        mx_status st = finish_stage(b, s, first == MX_OK ? err : NULL);
        if (first == MX_OK) first = st;
    }
    if (!b->ring) return first;
    mx_err e = {0};
    mx_status st = note_error(b, cuda_ring_sent(b, b->ticket, &e), &e, first == MX_OK ? err : NULL);
    return first == MX_OK ? st : first;
}

void cuda_upload_settle(cuda_backend *b) {
    finish_all(b, NULL);
}

mx_status cuda_upload_end(mx_backend *base, mx_err *err) {
    cuda_backend *b = cuda_of(base);
    double t0 = mx_now_s();
    CUDA_TRY(cuda_use(b), err);
    cuda_upload_settle(b);
    mx_err e = b->upload_err;
    b->upload_err = (mx_err){0};
    if (e.status != MX_OK) return mx_err_set(err, e.status, "%s", e.msg);
    CUDA_TRY(cuda_d.cuStreamSynchronize(b->copy), err);
    CUDA_TRY(cuda_d.cuStreamSynchronize(b->stream), err);
    for (int i = 0; b->stage && i < CUDA_STAGES; i++) b->stage[i].used = false; // all is done
    cuda_stage_free(b);
    b->count.upload_total_s += mx_now_s() - t0;
    return MX_OK;
}

mx_status cuda_upload_close(cuda_backend *b, mx_err *err) {
    mx_status st = cuda_upload_end(&b->base, err);
    cuda_ring_close(b);
    b->ticket = 0;
    cuda_stage_free(b);
    mx_err e = b->upload_err;
    b->upload_err = (mx_err){0};
    return st == MX_OK && e.status != MX_OK ? mx_err_set(err, e.status, "%s", e.msg) : st;
}

// A ring that suits what is loaded; one that turns out to be too small makes place for another.
static mx_status open_ring(cuda_backend *b, const mx_wview *w, size_t row_bytes, mx_err *err) {
    uint64_t n = row_bytes * (uint64_t)w->n_rows;
    for (int32_t i = 0; w->files && i < w->n_files; i++) n += w->files[i].n_bytes;
    mx_feed_shape shape = cuda_ring_fit(&b->ring_shape, n, row_bytes);
    if (cuda_ring_slot_bytes(b) >= shape.slot_bytes) return MX_OK;
    if (b->ring) MX_TRY(finish_all(b, err));
    cuda_ring_close(b);
    b->ticket = 0;
    return cuda_ring_open(b, &shape, err);
}

// ---- One weight --------------------------------------------------------------------------------

// Bytes of a plane for each row, and where row 0 is.
typedef struct plane {
    const uint8_t *src;
    size_t row_bytes;
    const mx_file *file; // NULL: memory
} plane;

typedef struct matrix { // what is uploaded: codes, scales, biases
    const mx_wview *w;
    plane plane[3];
    int n_planes;
    size_t row_bytes; // of all planes
    bool files;       // all of them are in files
} matrix;

static size_t align256(size_t n) {
    return (n + 255) / 256 * 256;
}

static const mx_file *file_of(const mx_wview *w, const uint8_t *p) {
    for (int32_t i = 0; w->files && i < w->n_files; i++) {
        const mx_file *f = &w->files[i];
        if (p >= f->data && p < f->data + f->n_bytes) return f;
    }
    return NULL;
}

static matrix matrix_of(const mx_wview *w, size_t code_row, size_t all_row) {
    matrix m = {.w = w, .n_planes = w->fmt.dtype == MX_AFFINE ? 3 : 1, .row_bytes = all_row};
    const void *src[] = {w->data, w->scales, w->biases};
    m.files = true;
    for (int i = 0; i < m.n_planes; i++) {
        m.plane[i] = (plane){.src = src[i],
                             .row_bytes = i ? (all_row - code_row) / 2 : code_row,
                             .file = file_of(w, src[i])};
        m.files = m.files && m.plane[i].file;
    }
    return m;
}

// Offset of plane i among n rows of all planes, i = n_planes: bytes of all of them.
static size_t plane_at(const matrix *m, int i, int64_t n) {
    size_t at = 0;
    for (int k = 0; k < i; k++) at += align256(m->plane[k].row_bytes * (size_t)n);
    return at;
}

static mx_status copy_rows(cuda_backend *b, CUdeviceptr dst, const matrix *m, int64_t row0,
                           int64_t n, mx_err *err) {
    for (int i = 0; i < m->n_planes; i++) {
        const plane *p = &m->plane[i];
        const uint8_t *src = p->src + p->row_bytes * (size_t)row0;
        size_t bytes = p->row_bytes * (size_t)n;
        CUdeviceptr to = dst + plane_at(m, i, n);
        if (b->count.pinned) {
            mx_feed_job j = {.dst = to,
                             .n_bytes = bytes,
                             .file = p->file,
                             .offset = p->file ? (size_t)(src - p->file->data) : 0,
                             .data = src,
                             .pairs = m->w->pairs,
                             .row_bytes = p->row_bytes};
            b->ticket = cuda_ring_put(b, &j);
        } else {
            CUDA_TRY(cuda_d.cuMemcpyHtoDAsync(to, src, bytes, b->copy), err);
            CUDA_TRY(cuda_d.cuStreamSynchronize(b->copy), err);
            b->count.upload_bytes += bytes;
        }
    }
    return MX_OK;
}

static mx_status alloc_weight(cuda_backend *b, mx_tensor *out, size_t n, mx_err *err) {
    double t0 = mx_now_s();
    mx_status st = cuda_alloc(&b->base, &out->buf, n, MX_USE_WEIGHT, err);
    b->count.upload_alloc_s += mx_now_s() - t0;
    out->n_bytes = n;
    return st;
}

static mx_status upload_vector(cuda_backend *b, mx_tensor *out, const mx_wview *w, mx_err *err) {
    size_t n = (size_t)w->n_cols * sizeof(float);
    out->fmt = mx_wfmt_of(MX_F32);
    out->layout = MX_LAYOUT_ROWS;
    MX_TRY(alloc_weight(b, out, n, err));
    float *row = mx_alloc(n);
    mx_dequant_row(w, 0, row);
    if (b->count.pinned) {
        mx_feed_job j = {.dst = out->buf->device, .n_bytes = n, .data = row, .owned = true};
        b->ticket = cuda_ring_put(b, &j);
        return MX_OK;
    }
    CUresult r = cuda_d.cuMemcpyHtoDAsync(out->buf->device, row, n, b->copy);
    if (r == CUDA_SUCCESS) r = cuda_d.cuStreamSynchronize(b->copy);
    mx_free(row);
    b->count.upload_bytes += n;
    return cuda_check(r, err, "upload");
}

static mx_status upload_rows(cuda_backend *b, mx_tensor *out, const matrix *m, mx_err *err) {
    int64_t n = m->w->n_rows;
    MX_TRY(alloc_weight(b, out, plane_at(m, m->n_planes, n), err));
    out->layout = MX_LAYOUT_ROWS;
    out->scales_offset = plane_at(m, 1, n);
    out->biases_offset = m->n_planes > 1 ? plane_at(m, 2, n) : out->scales_offset;
    return copy_rows(b, out->buf->device, m, 0, n, err);
}

// Queues the rows of one stage and launches the kernel of the stage before.
static mx_status stage_rows(cuda_backend *b, const mx_tensor *out, const matrix *m, int64_t row0,
                            int64_t n, mx_err *err) {
    const cuda_pack_info *pi = cuda_pack_get(out->pack);
    int64_t n_kb = (m->w->n_cols + pi->kb - 1) / pi->kb, strips = (n + 15) / 16;
    size_t strip_bytes = (size_t)n_kb * (size_t)pi->block_bytes;
    int32_t last = (b->stage_next + CUDA_STAGES - 1) % CUDA_STAGES;
    cuda_stage *s = &b->stage[b->stage_next];
    MX_TRY(finish_stage(b, s, err));
    if (s->used) CUDA_TRY(cuda_d.cuStreamWaitEvent(b->copy, s->packed, 0), err);
    MX_TRY(copy_rows(b, s->base, m, row0, n, err));
    b->stage_next = (b->stage_next + 1) % CUDA_STAGES;
    s->args = (k_pack){.data = s->base,
                       .scales = s->base + plane_at(m, 1, n),
                       .biases = s->base + plane_at(m, MX_MIN(2, m->n_planes), n),
                       .out = out->buf->device + (size_t)(row0 / 16) * strip_bytes,
                       .n_rows = n,
                       .n_cols = m->w->n_cols,
                       .row_bytes = (int64_t)m->plane[0].row_bytes,
                       .scale_row_bytes = (int64_t)m->plane[1].row_bytes,
                       .n_words = (int64_t)((size_t)strips * strip_bytes / 4),
                       .n_kb = (int32_t)n_kb,
                       .src = (int32_t)m->w->fmt.dtype,
                       .pack = out->pack,
                       .bits = m->w->fmt.bits,
                       .group = m->w->fmt.group};
    s->item = (cuda_item){.kind = CUDA_ITEM_KERNEL, .block = 256, .grid = {1, 1, 1}};
    s->item.grid[0] = (uint32_t)MX_MIN(((size_t)s->args.n_words + 255) / 256, (size_t)b->n_sm * 32);
    MX_TRY(
        cuda_kernel_get(b, (cuda_kernel)(CK_pack_a4g32 + out->pack - 1), false, &s->item.fn, err));
    s->ticket = b->ticket;
    s->pending = true;
    return finish_stage(b, b->count.pinned ? &b->stage[last] : s, err);
}

// Rows that go through one stage: whole strips of 16 and whole heads.
static int64_t rows_of_stage(const cuda_backend *b, const matrix *m) {
    int64_t unit = 16, pairs = m->w->pairs ? m->w->pairs : 1;
    while (unit % pairs) unit += 16;
    return ((int64_t)b->stage_bytes - 3 * 256) / (int64_t)m->row_bytes / unit * unit;
}

static mx_status upload_packed(cuda_backend *b, mx_tensor *out, const matrix *m, int pack,
                               mx_err *err) {
    const cuda_pack_info *pi = cuda_pack_get(pack);
    int64_t n_kb = (m->w->n_cols + pi->kb - 1) / pi->kb, strips = (m->w->n_rows + 15) / 16;
    int64_t each = rows_of_stage(b, m);
    if (!each) {
        return mx_err_set(err, MX_TOOLARGE,
                          "rows of %zu bytes: 16 of them, or one head, must fit %zu bytes",
                          m->row_bytes, b->stage_bytes);
    }
    MX_TRY(open_stages(b, err));
    out->layout = MX_LAYOUT_PACKED;
    out->pack = (uint16_t)pack;
    MX_TRY(alloc_weight(b, out, (size_t)(strips * n_kb) * (size_t)pi->block_bytes, err));
    for (int64_t row = 0; row < m->w->n_rows; row += each) {
        MX_TRY(stage_rows(b, out, m, row, MX_MIN(each, m->w->n_rows - row), err));
    }
    return MX_OK;
}

static mx_status upload_matrix(cuda_backend *b, mx_tensor *out, const mx_wview *w, mx_err *err) {
    char name[48];
    size_t code_row, all_row, raw;
    if (w->n_rows <= 0 || w->n_cols <= 0 || !mx_wfmt_code_bytes(w->fmt, w->n_cols, &code_row) ||
        !mx_wfmt_row_bytes(w->fmt, w->n_cols, &all_row) ||
        !mx_mul_size(all_row, (size_t)w->n_rows, &raw)) {
        return mx_err_set(err, MX_FORMAT, "weight (%lld, %lld) of %s does not divide into blocks",
                          (long long)w->n_rows, (long long)w->n_cols,
                          mx_wfmt_name(w->fmt, name, sizeof(name)));
    }
    matrix m = matrix_of(w, code_row, all_row);
    if (w->pairs && (w->n_rows % w->pairs || all_row > b->ring_shape.slot_bytes)) {
        return mx_err_set(err, MX_TOOLARGE, "rows of %zu bytes in pairs: %zu fit", all_row,
                          b->ring_shape.slot_bytes);
    }
    int pack = pack_of(w->fmt);
    if (pack != KPACK_ROWS) {
        MX_TRY(upload_packed(b, out, &m, pack, err));
    } else if (w->fmt.dtype == MX_F32 || w->fmt.dtype == MX_AFFINE) {
        MX_TRY(upload_rows(b, out, &m, err));
    } else {
        return mx_err_set(err, MX_UNSUPPORTED, "cuda: weights of format %s",
                          mx_wfmt_name(w->fmt, name, sizeof(name)));
    }
    return m.files ? MX_OK : finish_all(b, err);
}

mx_status cuda_upload(mx_backend *base, mx_tensor *out, const mx_wview *w, mx_err *err) {
    cuda_backend *b = cuda_of(base);
    double t0 = mx_now_s();
    CUDA_TRY(cuda_use(b), err);
    *out = (mx_tensor){.n_rows = w->n_rows,
                       .n_cols = w->n_cols,
                       .ld = w->n_cols,
                       .fmt = w->fmt,
                       .kind = MX_T_WEIGHT};
    size_t row_bytes;
    if (b->count.pinned && mx_wfmt_row_bytes(w->fmt, w->n_cols, &row_bytes)) {
        MX_TRY(open_ring(b, w, row_bytes, err));
    }
    bool vector = w->n_rows == 1 && w->n_cols > 0 && mx_dtype_is_float(w->fmt.dtype);
    mx_status s = vector ? upload_vector(b, out, w, err) : upload_matrix(b, out, w, err);
    if (s != MX_OK && out->buf) {
        cuda_free(base, out->buf);
        out->buf = NULL;
    }
    b->count.uploads++;
    b->count.upload_total_s += mx_now_s() - t0;
    return s;
}
