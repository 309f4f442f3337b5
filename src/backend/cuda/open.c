// The CUDA backend's device: opening, facts, memory, closing, and the table of functions.
// Owns context, stream, modules and scratch. Lowering is in lower.c and product.c, plans in plan.c,
// weights in upload.c.
#include "backend/cuda/cuda_int.h"
#include "backend/cuda/measure_int.h"

#include "backend/cover.h"
#include "base/knobs.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *image, *name;
} kernels[] = {
#define KERNEL(image, name) {#image, #name},
#include "backend/cuda/kernels.def"
#undef KERNEL
};

#define BLOCK(bits, group, kb, sc)                                                                 \
    (KPACK_CODE_BYTES(bits, kb) + KPACK_SCALE_BYTES(((group) ? (group) : 1), kb, sc))
#define STAGE(bits, group, kb, sc)                                                                 \
    ((kb) > 128 ? KHALF_BYTES(bits, sc) : KSKINNY_RUNS(bits) * 64 / (kb)*BLOCK(bits, group, kb, sc))
static const cuda_pack_info packs[] = {{.name = "rows"},
#define PACK(ID, name, bits, group, kb, sc)                                                        \
    {#name,                                                                                        \
     bits,                                                                                         \
     group,                                                                                        \
     kb,                                                                                           \
     sc,                                                                                           \
     BLOCK(bits, group, kb, sc),                                                                   \
     BLOCK(bits, group, kb, sc) * KPACK_SLOT_KB(BLOCK(bits, group, kb, sc)),                       \
     group ? group : 32,                                                                           \
     STAGE(bits, group, kb, sc)},
                                       MX_CUDA_PACKS(PACK)
#undef PACK
};

const cuda_pack_info *cuda_pack_get(int pack) {
    CHECK(pack >= 0 && pack < KPACK_COUNT);
    return &packs[pack];
}

static mx_status find_kernel(cuda_backend *b, cuda_kernel k, bool apart, CUfunction *fn,
                             mx_err *err) {
    for (int i = 0; i < b->n_modules; i++) {
        if (strcmp(cuda_image_names[i], kernels[k].image) != 0) continue;
        CUmodule m = b->modules[i];
        if (apart) {
            CHECK(strcmp(kernels[k].image, "attn") == 0);
            if (!b->attn_apart) {
                CUDA_TRY(cuda_d.cuModuleLoadData(&b->attn_apart, cuda_images[i]), err);
            }
            m = b->attn_apart;
        }
        char what[96];
        snprintf(what, sizeof(what), "kernel %s", kernels[k].name);
        return cuda_check(cuda_d.cuModuleGetFunction(fn, m, kernels[k].name), err, what);
    }
    return mx_err_set(err, MX_INTERNAL, "kernel %s is in no image", kernels[k].name);
}

mx_status cuda_kernel_get(cuda_backend *b, cuda_kernel k, bool apart, CUfunction *fn, mx_err *err) {
    CUfunction *known = &b->fn[apart][k];
    if (!*known) {
        CUfunction f = NULL;
        MX_TRY(find_kernel(b, k, apart, &f, err));
        if (!apart) {
            CUDA_TRY(cuda_d.cuFuncSetAttribute(
                         f, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
                     err);
        }
        *known = f;
    }
    *fn = *known;
    return MX_OK;
}

static void get_facts(mx_backend *base, mx_backend_facts *out) {
    cuda_backend *b = cuda_of(base);
    *out = (mx_backend_facts){.kind = MX_DEVICE_CUDA,
                              .cc_major = b->cc_major,
                              .cc_minor = b->cc_minor,
                              .compiled = cuda_archs,
                              .n_sm = b->n_sm,
                              .graphs = b->graphs,
                              .bucket_rows = true,
                              .deterministic = b->fixed_products && b->fixed_attn,
                              .reads_files = b->count.pinned};
    snprintf(out->device, sizeof(out->device), "%s", b->name);
    snprintf(out->arch, sizeof(out->arch), "%s", b->arch);
    size_t avail = 0, total = 0;
    CUresult r = cuda_use(b);
    if (r == CUDA_SUCCESS) r = cuda_d.cuMemGetInfo(&avail, &total);
    mx_err e = {0};
    if (cuda_check(r, &e, "free memory of the GPU") != MX_OK) mx_log(MX_LOG_WARN, "%s", e.msg);
    out->available_bytes = avail;
    out->upload_bytes = CUDA_STAGES * b->stage_bytes;
    out->memory_bytes = total;
}

mx_status cuda_take(cuda_backend *b, size_t n_bytes, CUdeviceptr *out, mx_err *err) {
    CUresult r = cuda_d.cuMemAlloc(out, n_bytes);
    if (r != CUDA_ERROR_OUT_OF_MEMORY) return cuda_check(r, err, "cuMemAlloc");
    size_t avail = 0, total = 0;
    cuda_d.cuMemGetInfo(&avail, &total);
    return mx_err_set(err, MX_NOMEM, "%s: %.2f GiB more, %.2f of %.2f GiB are free", b->name,
                      (double)n_bytes / 1073741824.0, (double)avail / 1073741824.0,
                      (double)total / 1073741824.0);
}

mx_status cuda_alloc(mx_backend *base, mx_buffer **out, size_t n_bytes, mx_usage use, mx_err *err) {
    cuda_backend *b = cuda_of(base);
    *out = NULL;
    CUDA_TRY(cuda_use(b), err);
    CUdeviceptr p = 0;
    size_t n = n_bytes ? n_bytes : 1;
    MX_TRY(cuda_take(b, n, &p, err));
    if (use != MX_USE_WEIGHT) {
        CUresult r = cuda_d.cuMemsetD8Async(p, 0, n, b->stream);
        if (r == CUDA_SUCCESS) r = cuda_d.cuStreamSynchronize(b->stream);
        if (r != CUDA_SUCCESS) cuda_d.cuMemFree(p);
        MX_TRY(cuda_check(r, err, "clearing memory"));
    }
    mx_buffer *buf = mx_calloc(1, sizeof(*buf));
    *buf = (mx_buffer){.n_bytes = n_bytes, .device = p, .usage = (int32_t)use};
    *out = buf;
    return MX_OK;
}

void cuda_free(mx_backend *base, mx_buffer *buf) {
    if (!buf) return;
    cuda_use(cuda_of(base));
    cuda_upload_settle(cuda_of(base)); // no transfer to it is still to be started
    cuda_d.cuStreamSynchronize(cuda_of(base)->copy);
    cuda_d.cuStreamSynchronize(cuda_of(base)->stream);
    cuda_d.cuMemFree(buf->device);
    mx_free(buf);
}

static mx_status write_bytes(mx_backend *base, mx_buffer *buf, size_t offset, const void *src,
                             size_t n, mx_err *err) {
    cuda_backend *b = cuda_of(base);
    CHECK(offset <= buf->n_bytes && n <= buf->n_bytes - offset);
    CUDA_TRY(cuda_use(b), err);
    CUDA_TRY(cuda_d.cuMemcpyHtoDAsync(buf->device + offset, src, n, b->stream), err);
    CUDA_TRY(cuda_d.cuStreamSynchronize(b->stream), err);
    return MX_OK;
}

static mx_status read_bytes(mx_backend *base, const mx_buffer *buf, size_t offset, void *dst,
                            size_t n, mx_err *err) {
    cuda_backend *b = cuda_of(base);
    CHECK(offset <= buf->n_bytes && n <= buf->n_bytes - offset);
    CUDA_TRY(cuda_use(b), err);
    cuda_upload_settle(b);
    CUDA_TRY(cuda_d.cuStreamSynchronize(b->copy), err);
    CUDA_TRY(cuda_d.cuMemcpyDtoHAsync(dst, buf->device + offset, n, b->stream), err);
    CUDA_TRY(cuda_d.cuStreamSynchronize(b->stream), err);
    return MX_OK;
}

static bool supports(mx_backend *base, const mx_op *op, const mx_tensor *tensors) {
    return cuda_supports(cuda_of(base), op, tensors);
}

static int32_t variants(mx_backend *base, const mx_op *op, const mx_tensor *tensors,
                        const char **names, int32_t cap) {
    (void)base, (void)op, (void)tensors;
    if (cap > 0) names[0] = "default";
    return 1;
}

static void close_backend(mx_backend *base) {
    cuda_backend *b = cuda_of(base);
    cuda_use(b);
    if (b->copy) cuda_d.cuStreamSynchronize(b->copy);
    if (b->stream) cuda_d.cuStreamSynchronize(b->stream);
    cuda_step_free(b);
    cuda_ring_close(b);
    cuda_stage_free(b);
    cuda_lt_close(b->lt);
    while (b->scratch) {
        cuda_scratch *s = b->scratch;
        b->scratch = s->next;
        cuda_d.cuMemFree(s->base);
        mx_free(s);
    }
    if (b->tickets) cuda_d.cuMemFree(b->tickets);
    for (int i = 0; i < b->n_modules; i++) cuda_d.cuModuleUnload(b->modules[i]);
    if (b->attn_apart) cuda_d.cuModuleUnload(b->attn_apart);
    if (b->copy) cuda_d.cuStreamDestroy(b->copy);
    if (b->stream) cuda_d.cuStreamDestroy(b->stream);
    if (b->ctx) cuda_d.cuDevicePrimaryCtxRelease(b->dev);
    mx_free(b);
}

static const mx_backend_ops ops = {
    .facts = get_facts,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .upload = cuda_upload,
    .upload_end = cuda_upload_end,
    .write = write_bytes,
    .read = read_bytes,
    .supports = supports,
    .variants = variants,
    .step_init = cuda_step_init,
    .plan_make = cuda_plan_make,
    .plan_free = cuda_plan_free,
    .submit = cuda_submit,
    .wait = cuda_wait,
    .wait_buffers = cuda_wait_buffers,
    .read_rate = cuda_read_rate,
    .close = close_backend,
};

static mx_status get_attributes(cuda_backend *b, mx_err *err) {
    const struct {
        int32_t *out;
        CUdevice_attribute which;
    } rows[] = {
        {&b->cc_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
        {&b->cc_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
        {&b->n_sm, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
        {&b->smem_max, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN},
        {&b->smem_sm, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR},
    };
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        CUDA_TRY(cuda_d.cuDeviceGetAttribute(rows[i].out, rows[i].which, b->dev), err);
    }
    return MX_OK;
}

static mx_status open_device(cuda_backend *b, int device, mx_err *err) {
    int n = 0;
    CUDA_TRY(cuda_d.cuDeviceGetCount(&n), err);
    if (device < 0 || device >= n) {
        return mx_err_set(err, MX_NOTFOUND, "the driver offers %d GPU(s), numbered from 0", n);
    }
    CUDA_TRY(cuda_d.cuDeviceGet(&b->dev, device), err);
    CUDA_TRY(cuda_d.cuDeviceGetName(b->name, (int)sizeof(b->name), b->dev), err);
    MX_TRY(get_attributes(b, err));
    snprintf(b->arch, sizeof(b->arch), "sm_%d%d", b->cc_major, b->cc_minor);
    char cover[32];
    if (!mx_arch_cover(cuda_archs, b->cc_major, b->cc_minor, cover, sizeof(cover))) {
        char how[64] = "GPUs before sm_80 are not supported";
        if (b->cc_major >= 8) {
            snprintf(how, sizeof(how), "build it with CUDA_ARCHS=%d%d", b->cc_major, b->cc_minor);
        }
        return mx_err_set(err, MX_UNSUPPORTED,
                          "%s (%s): this program was compiled for [%s], which does not run there; "
                          "%s",
                          b->name, b->arch, cuda_archs, how);
    }
    // Code for older devices neither waits for the kernel before it (dep_wait) nor knows clusters;
    // a slice of a device may be too small for one.
    b->overlap = b->cc_major >= 9 && strncmp(cover, "compute_8", 9) != 0;
    b->clusters = b->overlap && b->n_sm >= 32;
    CUcontext ctx = NULL;
    CUDA_TRY(cuda_d.cuDevicePrimaryCtxRetain(&ctx, b->dev), err);
    b->ctx = ctx;
    CUDA_TRY(cuda_use(b), err);
    CUDA_TRY(cuda_d.cuStreamCreate(&b->stream, CU_STREAM_NON_BLOCKING), err);
    CUDA_TRY(cuda_d.cuStreamCreate(&b->copy, CU_STREAM_NON_BLOCKING), err);
    for (int i = 0; cuda_images[i]; i++) {
        CHECK(b->n_modules < CUDA_MAX_MODULES);
        CUresult r = cuda_d.cuModuleLoadData(&b->modules[b->n_modules], cuda_images[i]);
        if (r == CUDA_ERROR_NO_BINARY_FOR_GPU || r == CUDA_ERROR_UNSUPPORTED_PTX_VERSION) {
            return mx_err_set(err, MX_UNSUPPORTED,
                              "%s (%s): this program was compiled for [%s], which the driver does "
                              "not run there",
                              b->name, b->arch, cuda_archs);
        }
        char what[64];
        snprintf(what, sizeof(what), "loading the kernels '%s'", cuda_image_names[i]);
        MX_TRY(cuda_check(r, err, what));
        b->n_modules++;
    }
    return MX_OK;
}

mx_status mx_cuda_open(int device, mx_backend **out, mx_err *err) {
    return mx_cuda_open_with(&(mx_cuda_options){.device = device}, out, err);
}

mx_status mx_cuda_open_with(const mx_cuda_options *o, mx_backend **out, mx_err *err) {
    *out = NULL;
    MX_TRY(cuda_drv_open(err));
    cuda_backend *b = mx_calloc(1, sizeof(*b));
    b->base = (mx_backend){.ops = &ops, .name = "cuda"};
    mx_status s = open_device(b, o->device, err);
    if (s != MX_OK) {
        close_backend(&b->base);
        return s;
    }
    b->exact = o->exact || mx_knob_flag(MX_KNOB_EXACT);
    b->fixed_products = o->deterministic || mx_knob_flag(MX_KNOB_DETERMINISTIC);
    b->fixed_attn = b->fixed_products || mx_knob_flag(MX_KNOB_SDPA_DETERMINISTIC);
    b->gemv_rows = (int32_t)MX_MAX(1, MX_MIN(8, mx_knob_int(MX_KNOB_DENSE_GEMV_ROWS, 8)));
    b->lt_rows = 65;
    b->skinny = mx_knob_flag(MX_KNOB_CUDA_SKINNY);
    b->prefill_attn = mx_knob_flag(MX_KNOB_CUDA_PREFILL_ATTN);
    b->graphs = mx_knob_flag(MX_KNOB_CUDA_GRAPHS);
    b->overlap = b->overlap && mx_knob_flag(MX_KNOB_CUDA_OVERLAP);
    b->fused_rope = mx_knob_flag(MX_KNOB_CUDA_FUSED_ROPE);
    b->count.pinned = mx_knob_flag(MX_KNOB_CUDA_PINNED_LOAD);
    b->ring_shape = cuda_ring_shape();
    b->ring_poll_s = 20e-6;
    b->stage_bytes = (size_t)64 << 20;
    if (mx_knob_flag(MX_KNOB_CUBLASLT)) b->lt = cuda_lt_open();
    b->count.blaslt = b->lt != NULL;
    *out = &b->base;
    return MX_OK;
}

int mx_cuda_device_count(void) {
    mx_err err = {0};
    int n = 0;
    if (cuda_drv_open(&err) != MX_OK || cuda_d.cuDeviceGetCount(&n) != CUDA_SUCCESS) return 0;
    return n;
}

const char *mx_cuda_archs(void) {
    return cuda_archs;
}

int32_t mx_cuda_unused_kernels(mx_backend *b, const char **names, int32_t cap) {
    int32_t n = 0;
    for (int k = 0; k < CK_COUNT; k++) {
        if (cuda_of(b)->fn[0][k] || cuda_of(b)->fn[1][k]) continue;
        if (n < cap) names[n] = kernels[k].name;
        n++;
    }
    return n;
}

void mx_cuda_limit_sms(mx_backend *b, int32_t n) {
    cuda_backend *c = cuda_of(b);
    int all = 0;
    CHECK(cuda_d.cuDeviceGetAttribute(&all, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, c->dev) ==
          CUDA_SUCCESS);
    c->n_sm = n > 0 ? MX_MIN(n, all) : all;
}

void mx_cuda_counters_get(mx_backend *b, mx_cuda_counters *out) {
    *out = cuda_of(b)->count;
    cuda_ring_count(cuda_of(b), out);
}
