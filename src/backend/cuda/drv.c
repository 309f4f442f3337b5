// Finding the driver and its functions. The table is filled once for the process and never freed:
// the driver keeps threads of its own. Owns no device.
#include "backend/cuda/drv.h"

#include "base/knobs.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

cuda_drv cuda_d;

typedef CUresult (*get_proc_fn)(const char *, void **, int, cuuint64_t,
                                CUdriverProcAddressQueryResult *);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool opened;

// dlsym and cuGetProcAddress give object pointers; this is the one place that makes them callable.
static void set_function(void *field, void *address) {
    memcpy(field, &address, sizeof(address));
}

static mx_status resolve(get_proc_fn get, const char *name, int version, void *field, mx_err *err) {
    void *p = NULL;
    CUdriverProcAddressQueryResult q;
    CUresult r = get(name, &p, version, CU_GET_PROC_ADDRESS_DEFAULT, &q);
    if (r != CUDA_SUCCESS || !p) {
        return mx_err_set(err, MX_UNSUPPORTED,
                          "NVIDIA driver: %s (version %d.%d) is missing; this build needs a driver "
                          "for CUDA %d.%d",
                          name, version / 1000, version % 1000 / 10, CUDA_MIN_DRIVER / 1000,
                          CUDA_MIN_DRIVER % 1000 / 10);
    }
    set_function(field, p);
    return MX_OK;
}

static mx_status no_device(mx_err *err) {
    const char *shown = mx_knob_raw(MX_KNOB_CUDA_VISIBLE_DEVICES);
    if (!mx_knob_is_set(MX_KNOB_CUDA_VISIBLE_DEVICES)) {
        return mx_err_set(err, MX_NOTFOUND, "no NVIDIA GPU");
    }
    if (!shown) {
        return mx_err_set(err, MX_NOTFOUND,
                          "no NVIDIA GPU is offered: CUDA_VISIBLE_DEVICES is empty");
    }
    return mx_err_set(err, MX_NOTFOUND, "no NVIDIA GPU is offered: CUDA_VISIBLE_DEVICES is '%s'",
                      shown);
}

static mx_status open_once(mx_err *err) {
    void *h = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!h) return mx_err_set(err, MX_NOTFOUND, "no NVIDIA driver: %s", dlerror());
    get_proc_fn get = NULL;
    set_function(&get, dlsym(h, "cuGetProcAddress_v2"));
    if (!get) {
        return mx_err_set(err, MX_UNSUPPORTED,
                          "NVIDIA driver is older than CUDA 12.0; this build needs CUDA %d.%d",
                          CUDA_MIN_DRIVER / 1000, CUDA_MIN_DRIVER % 1000 / 10);
    }
#define X(f, version) MX_TRY(resolve(get, #f, version, &cuda_d.f, err));
    CUDA_DRV_LIST(X)
#undef X
    CUresult r = cuda_d.cuInit(0);
    if (r == CUDA_ERROR_NO_DEVICE) return no_device(err);
    MX_TRY(cuda_check(r, err, "cuInit"));
    CUDA_TRY(cuda_d.cuDriverGetVersion(&cuda_d.version), err);
    if (cuda_d.version < CUDA_MIN_DRIVER) {
        return mx_err_set(err, MX_UNSUPPORTED,
                          "NVIDIA driver is for CUDA %d.%d; this build needs CUDA %d.%d",
                          cuda_d.version / 1000, cuda_d.version % 1000 / 10, CUDA_MIN_DRIVER / 1000,
                          CUDA_MIN_DRIVER % 1000 / 10);
    }
    return MX_OK;
}

mx_status cuda_drv_open(mx_err *err) {
    pthread_mutex_lock(&lock);
    mx_status s = opened ? MX_OK : open_once(err);
    if (s == MX_OK) opened = true;
    pthread_mutex_unlock(&lock);
    return s;
}

mx_status cuda_check(CUresult r, mx_err *err, const char *what) {
    if (r == CUDA_SUCCESS) return MX_OK;
    const char *name = NULL, *text = NULL;
    cuda_d.cuGetErrorName(r, &name); // NULL for a number it does not know
    cuda_d.cuGetErrorString(r, &text);
    char number[32];
    snprintf(number, sizeof number, "error %d", (int)r);
    return mx_err_set(err, r == CUDA_ERROR_OUT_OF_MEMORY ? MX_NOMEM : MX_DEVICE, "%s: %s (%s)",
                      what, name ? name : number, text ? text : "the driver has no text for it");
}

mx_status cuda_check_call(CUresult r, mx_err *err, const char *call) {
    if (r == CUDA_SUCCESS) return MX_OK;
    static const char table[] = "cuda_d.", use[] = "cuda_use";
    if (strncmp(call, table, sizeof table - 1) == 0) call += sizeof table - 1;
    if (strncmp(call, use, sizeof use - 1) == 0) call = "cuCtxSetCurrent";
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(call, "("), call);
    return cuda_check(r, err, name);
}
