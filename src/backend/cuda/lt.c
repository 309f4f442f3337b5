// cuBLASLt, opened at run time: bf16 products of many rows. Not needed: without it the backend's
// own kernel does them. Owns the handle and one prepared algorithm a shape.
#include "backend/cuda/cuda_int.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <string.h>

#define LT_LIST(X)                                                                                 \
    X(cublasLtCreate)                                                                              \
    X(cublasLtDestroy)                                                                             \
    X(cublasLtMatmulDescCreate)                                                                    \
    X(cublasLtMatmulDescDestroy)                                                                   \
    X(cublasLtMatmulDescSetAttribute)                                                              \
    X(cublasLtMatrixLayoutCreate)                                                                  \
    X(cublasLtMatrixLayoutDestroy)                                                                 \
    X(cublasLtMatmulPreferenceCreate)                                                              \
    X(cublasLtMatmulPreferenceDestroy)                                                             \
    X(cublasLtMatmulPreferenceSetAttribute)                                                        \
    X(cublasLtMatmulAlgoGetHeuristic)                                                              \
    X(cublasLtMatmul)

enum { LT_SHAPES = 256 };
static const size_t workspace_bytes = (size_t)32 << 20;

typedef struct lt_shape {
    int32_t n_tok, n, k, ldx, ldy;
    bool y_bf16;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t w, x, y;
    cublasLtMatmulAlgo_t algo;
} lt_shape;

struct cuda_lt {
#define X(f) __typeof__(&f) f;
    LT_LIST(X)
#undef X
    void *lib;
    cublasLtHandle_t handle;
    lt_shape shapes[LT_SHAPES]; // round robin
    int32_t n_shapes, next;
};

cuda_lt *cuda_lt_open(void) {
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12",
                                        "/usr/local/cuda/lib64/libcublasLt.so.13",
                                        "/usr/local/cuda/lib64/libcublasLt.so"};
    void *h = NULL;
    for (size_t i = 0; !h && i < MX_COUNT(names); i++) h = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!h) return NULL;
    cuda_lt *lt = mx_calloc(1, sizeof(*lt));
    lt->lib = h;
    bool ok = true;
#define X(f)                                                                                       \
    {                                                                                              \
        void *p = dlsym(h, #f);                                                                    \
        memcpy(&lt->f, &p, sizeof(p));                                                             \
        ok = ok && p;                                                                              \
    }
    LT_LIST(X)
#undef X
    if (!ok || lt->cublasLtCreate(&lt->handle) != CUBLAS_STATUS_SUCCESS) {
        mx_log(MX_LOG_WARN, "cuBLASLt was found but cannot be used; own kernels take its place");
        dlclose(h);
        mx_free(lt);
        return NULL;
    }
    return lt;
}

static void shape_free(cuda_lt *lt, lt_shape *s) {
    if (s->desc) lt->cublasLtMatmulDescDestroy(s->desc);
    if (s->w) lt->cublasLtMatrixLayoutDestroy(s->w);
    if (s->x) lt->cublasLtMatrixLayoutDestroy(s->x);
    if (s->y) lt->cublasLtMatrixLayoutDestroy(s->y);
    memset(s, 0, sizeof(*s));
}

void cuda_lt_close(cuda_lt *lt) {
    if (!lt) return;
    for (int32_t i = 0; i < lt->n_shapes; i++) shape_free(lt, &lt->shapes[i]);
    lt->cublasLtDestroy(lt->handle);
    dlclose(lt->lib);
    mx_free(lt);
}

size_t cuda_lt_workspace(void) {
    return workspace_bytes;
}

static mx_status lt_check(cublasStatus_t r, mx_err *err, const char *what) {
    if (r == CUBLAS_STATUS_SUCCESS) return MX_OK;
    return mx_err_set(err, MX_DEVICE, "cuBLASLt: %s: status %d", what, (int)r);
}
#define LT_TRY(call, err) MX_TRY(lt_check((call), (err), #call))

// Column-major view: y (n x n_tok) = w (k x n)^T x (k x n_tok).
static mx_status shape_make(cuda_lt *lt, lt_shape *s, mx_err *err) {
    cublasOperation_t t = CUBLAS_OP_T;
    LT_TRY(lt->cublasLtMatmulDescCreate(&s->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), err);
    LT_TRY(lt->cublasLtMatmulDescSetAttribute(s->desc, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof(t)),
           err);
    LT_TRY(lt->cublasLtMatrixLayoutCreate(&s->w, CUDA_R_16BF, (uint64_t)s->k, (uint64_t)s->n, s->k),
           err);
    LT_TRY(lt->cublasLtMatrixLayoutCreate(&s->x, CUDA_R_16BF, (uint64_t)s->k, (uint64_t)s->n_tok,
                                          s->ldx),
           err);
    LT_TRY(lt->cublasLtMatrixLayoutCreate(&s->y, s->y_bf16 ? CUDA_R_16BF : CUDA_R_32F,
                                          (uint64_t)s->n, (uint64_t)s->n_tok, s->ldy),
           err);
    cublasLtMatmulPreference_t pref = NULL;
    LT_TRY(lt->cublasLtMatmulPreferenceCreate(&pref), err);
    lt->cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                             &workspace_bytes, sizeof(workspace_bytes));
    cublasLtMatmulHeuristicResult_t res = {0};
    int n = 0;
    cublasStatus_t r = lt->cublasLtMatmulAlgoGetHeuristic(lt->handle, s->desc, s->w, s->x, s->y,
                                                          s->y, pref, 1, &res, &n);
    lt->cublasLtMatmulPreferenceDestroy(pref);
    if (r == CUBLAS_STATUS_SUCCESS && n == 0) r = CUBLAS_STATUS_NOT_SUPPORTED;
    s->algo = res.algo;
    return lt_check(r, err, "no algorithm");
}

static mx_status shape_get(cuda_lt *lt, const cuda_lt_args *a, lt_shape **out, mx_err *err) {
    for (int32_t i = 0; i < lt->n_shapes; i++) {
        lt_shape *s = &lt->shapes[i];
        if (s->n_tok == a->n_tok && s->n == a->n && s->k == a->k && s->ldx == a->ldx &&
            s->ldy == a->ldy && s->y_bf16 == a->y_bf16) {
            *out = s;
            return MX_OK;
        }
    }
    lt_shape *s = &lt->shapes[lt->next];
    shape_free(lt, s);
    s->n_tok = a->n_tok, s->n = a->n, s->k = a->k, s->ldx = a->ldx, s->ldy = a->ldy;
    s->y_bf16 = a->y_bf16;
    mx_status st = shape_make(lt, s, err);
    if (st != MX_OK) {
        shape_free(lt, s);
        return st;
    }
    lt->next = (lt->next + 1) % LT_SHAPES;
    lt->n_shapes = MX_MAX(lt->n_shapes, lt->next == 0 ? LT_SHAPES : lt->next);
    *out = s;
    return MX_OK;
}

mx_status cuda_lt_run(cuda_lt *lt, const cuda_lt_args *a, CUstream stream, mx_err *err) {
    lt_shape *s = NULL;
    MX_TRY(shape_get(lt, a, &s, err));
    float one = 1, zero = 0;
    void *y = (void *)(uintptr_t)a->y;
    return lt_check(lt->cublasLtMatmul(lt->handle, s->desc, &one, (void *)(uintptr_t)a->w, s->w,
                                       (void *)(uintptr_t)a->x, s->x, &zero, y, s->y, y, s->y,
                                       &s->algo, (void *)(uintptr_t)a->workspace, workspace_bytes,
                                       (cudaStream_t)stream),
                    err, "product");
}
