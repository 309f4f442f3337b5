// Weights: raw bytes to the device, then a kernel shuffles them into packed blocks.
//
// Vectors (one row) of floats become float32 rows: norm weights and biases. Matrices of the formats
// in kargs.h are packed; everything else keeps its rows and the plain kernels read it. Nothing
// waits for the device: copies are on a stream of their own, the kernels on the backend's, events
// between them. The staging buffers on the device and the pinned ring are kept between uploads and
// freed, after the last copy, when the next plan is made.
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

// Raw bytes of one weight on the device: two staging buffers take turns, so that the next weight
// is copied while the kernel packs the last.
static mx_status stage_of(cuda_backend *b, size_t n, cuda_stage **out, mx_err *err) {
    cuda_stage *s = &b->stage[b->stage_next];
    b->stage_next ^= 1;
    if (!s->copied) {
        CUDA_TRY(cuda_d.cuEventCreate(&s->copied, CU_EVENT_DISABLE_TIMING), err);
        CUDA_TRY(cuda_d.cuEventCreate(&s->packed, CU_EVENT_DISABLE_TIMING), err);
    }
    if (s->n_bytes < n) {
        CUDA_TRY(cuda_d.cuStreamSynchronize(b->stream), err);
        if (s->base) cuda_d.cuMemFree(s->base);
        s->base = 0;
        s->n_bytes = 0;
        CUDA_TRY(cuda_d.cuMemAlloc(&s->base, n), err);
        s->n_bytes = n;
    } else {
        CUDA_TRY(cuda_d.cuStreamWaitEvent(b->copy, s->packed, 0), err);
    }
    *out = s;
    return MX_OK;
}

void cuda_stage_free(cuda_backend *b) {
    for (int i = 0; i < 2; i++) {
        cuda_stage *s = &b->stage[i];
        if (s->base || s->copied) cuda_d.cuStreamSynchronize(b->stream);
        if (s->base) cuda_d.cuMemFree(s->base);
        if (s->copied) cuda_d.cuEventDestroy(s->copied);
        if (s->packed) cuda_d.cuEventDestroy(s->packed);
        *s = (cuda_stage){0};
    }
}

static mx_status upload_vector(cuda_backend *b, mx_tensor *out, const mx_wview *w, mx_err *err) {
    size_t n = (size_t)w->n_cols * sizeof(float);
    float *row = mx_alloc(n ? n : 1);
    mx_dequant_row(w, 0, row);
    mx_status s = cuda_alloc(&b->base, &out->buf, n, MX_USE_WEIGHT, err);
    if (s == MX_OK) s = cuda_copy_in(b, out->buf->device, row, n, err);
    mx_free(row);
    out->fmt = mx_wfmt_of(MX_F32);
    out->layout = MX_LAYOUT_ROWS;
    out->n_bytes = n;
    return s;
}

static size_t align256(size_t n) {
    return (n + 255) / 256 * 256;
}

// Copies the planes of w to dst one after another; offsets of scales and biases come back.
static mx_status copy_planes(cuda_backend *b, CUdeviceptr dst, const mx_wview *w, size_t code_bytes,
                             size_t scale_bytes, mx_err *err) {
    MX_TRY(cuda_copy_in(b, dst, w->data, code_bytes, err));
    if (!scale_bytes) return MX_OK;
    CUdeviceptr s = dst + align256(code_bytes);
    MX_TRY(cuda_copy_in(b, s, w->scales, scale_bytes, err));
    return cuda_copy_in(b, s + align256(scale_bytes), w->biases, scale_bytes, err);
}

static mx_status pack_weight(cuda_backend *b, mx_tensor *out, const mx_wview *w, int pack,
                             const cuda_stage *st, size_t row_bytes, size_t scale_row,
                             mx_err *err) {
    CUdeviceptr raw = st->base;
    const cuda_pack_info *pi = cuda_pack_get(pack);
    int64_t n_kb = (w->n_cols + pi->kb - 1) / pi->kb, strips = (w->n_rows + 15) / 16;
    size_t n = (size_t)(strips * n_kb) * (size_t)pi->block_bytes;
    MX_TRY(cuda_alloc(&b->base, &out->buf, n, MX_USE_WEIGHT, err));
    size_t scales = align256(row_bytes * (size_t)w->n_rows);
    k_pack a = {.data = raw,
                .scales = raw + scales,
                .biases = raw + scales + align256(scale_row * (size_t)w->n_rows),
                .out = out->buf->device,
                .n_rows = w->n_rows,
                .n_cols = w->n_cols,
                .row_bytes = (int64_t)row_bytes,
                .scale_row_bytes = (int64_t)scale_row,
                .n_words = (int64_t)(n / 4),
                .n_kb = (int32_t)n_kb,
                .src = (int32_t)w->fmt.dtype,
                .pack = pack,
                .bits = w->fmt.bits,
                .group = w->fmt.group};
    cuda_item it = {.kind = CUDA_ITEM_KERNEL, .block = 256, .grid = {1, 1, 1}};
    it.grid[0] = (uint32_t)MX_MIN((n / 4 + 255) / 256, (size_t)b->n_sm * 32);
    MX_TRY(cuda_kernel_get(b, (cuda_kernel)(CK_pack_a4g32 + pack - 1), &it.fn, err));
    CUDA_TRY(cuda_d.cuEventRecord(st->copied, b->copy), err);
    CUDA_TRY(cuda_d.cuStreamWaitEvent(b->stream, st->copied, 0), err);
    MX_TRY(cuda_run_item(b, &it, (const uint8_t *)&a, false, err));
    CUDA_TRY(cuda_d.cuEventRecord(st->packed, b->stream), err);
    out->layout = MX_LAYOUT_PACKED;
    out->pack = (uint16_t)pack;
    out->n_bytes = n;
    return MX_OK;
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
    char name[48];
    size_t code_row, all_row, raw_code, raw_scale = 0, scale_row = 0;
    if (w->n_rows <= 0 || w->n_cols <= 0 || !mx_wfmt_code_bytes(w->fmt, w->n_cols, &code_row) ||
        !mx_wfmt_row_bytes(w->fmt, w->n_cols, &all_row) ||
        !mx_mul_size(code_row, (size_t)w->n_rows, &raw_code)) {
        return mx_err_set(err, MX_FORMAT, "weight (%lld, %lld) of %s does not divide into blocks",
                          (long long)w->n_rows, (long long)w->n_cols,
                          mx_wfmt_name(w->fmt, name, sizeof(name)));
    }
    mx_status s;
    if (w->n_rows == 1 && mx_dtype_is_float(w->fmt.dtype)) {
        s = upload_vector(b, out, w, err);
    } else {
        if (w->fmt.dtype == MX_AFFINE) {
            scale_row = (all_row - code_row) / 2;
            raw_scale = scale_row * (size_t)w->n_rows;
        }
        size_t total = align256(raw_code) + 2 * align256(raw_scale);
        int pack = pack_of(w->fmt);
        if (pack != KPACK_ROWS) {
            cuda_stage *st = NULL;
            s = stage_of(b, total, &st, err);
            if (s == MX_OK) s = copy_planes(b, st->base, w, raw_code, raw_scale, err);
            if (s == MX_OK) s = pack_weight(b, out, w, pack, st, code_row, scale_row, err);
        } else if (w->fmt.dtype == MX_F32 || w->fmt.dtype == MX_AFFINE) {
            s = cuda_alloc(base, &out->buf, total, MX_USE_WEIGHT, err);
            if (s == MX_OK) s = copy_planes(b, out->buf->device, w, raw_code, raw_scale, err);
            out->layout = MX_LAYOUT_ROWS;
            out->scales_offset = align256(raw_code);
            out->biases_offset = align256(raw_code) + align256(raw_scale);
            out->n_bytes = total;
        } else {
            s = mx_err_set(err, MX_UNSUPPORTED, "cuda: weights of format %s",
                           mx_wfmt_name(w->fmt, name, sizeof(name)));
        }
    }
    if (s != MX_OK && out->buf) {
        cuda_free(base, out->buf);
        out->buf = NULL;
    }
    b->count.uploads++;
    b->count.upload_total_s += mx_now_s() - t0;
    return s;
}
