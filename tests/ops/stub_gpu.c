// A stand-in for the NVIDIA driver's library with a GPU of host memory: copies are made at once,
// kernels do nothing. The k-th call fails where it is told to (stub_fail_at), and what was made and
// not given back is counted (stub_live). A second release, a wait while a graph is captured, or a
// launch that no GPU takes ends the process.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long address;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int n_calls, fail_at, fail_code;
static const char *failed;
static size_t n_free = (size_t)8 << 30;
static _Thread_local int capturing;

static const char *const kinds[] = {"memory",  "pinned", "registered", "stream", "event",
                                    "capture", "graph",  "module",     "context"};
enum { MEMORY, PINNED, REGISTERED, STREAM, EVENT, CAPTURE, GRAPH, MODULE, CONTEXT, N_KINDS };
static int live[N_KINDS];

static void die(const char *why) {
    fprintf(stderr, "stub_gpu: %s\n", why);
    abort();
}

static void count(int kind, int by) {
    pthread_mutex_lock(&lock);
    live[kind] += by;
    if (live[kind] < 0) die(kinds[kind]);
    pthread_mutex_unlock(&lock);
}

static int call(const char *name) {
    pthread_mutex_lock(&lock);
    int bad = ++n_calls == fail_at;
    if (bad) failed = name;
    pthread_mutex_unlock(&lock);
    return bad ? fail_code : 0;
}
#define CALL                                                                                       \
    do {                                                                                           \
        int code_ = call(__func__);                                                                \
        if (code_) return code_;                                                                   \
    } while (0)

// Is there the file that a variable names? STUB_GPU_FULL: then there is no memory for buffers and
// graphs. STUB_GPU_LOST: then nothing can be launched.
static int there(const char *variable) {
    const char *path = getenv(variable);
    return path && access(path, F_OK) == 0;
}

static void *made(int kind, size_t n) {
    void *p = aligned_alloc(256, (n + 255) / 256 * 256);
    if (!p) die("no memory");
    count(kind, 1);
    return p;
}

// A release that fails has released.
static int gone(int kind, void *p, const char *name) {
    free(p);
    count(kind, -1);
    return call(name);
}

// ---- What the test calls -----------------------------------------------------------------------

void stub_fail_at(int k, int code); // counts from now on; 0: none
const char *stub_failed(void);      // the function whose call failed; NULL: none yet
void stub_set_free(size_t n);       // bytes of memory that are said to be free
const char *stub_live(void);        // the first kind of thing that is left; NULL: nothing

void stub_fail_at(int k, int code) {
    n_calls = 0;
    fail_at = k;
    fail_code = code;
    failed = NULL;
}
const char *stub_failed(void) {
    return failed;
}
void stub_set_free(size_t n) {
    n_free = n;
}
const char *stub_live(void) {
    for (int i = 0; i < N_KINDS; i++) {
        if (live[i]) return kinds[i];
    }
    return NULL;
}

// ---- The driver --------------------------------------------------------------------------------

static int cuInit(unsigned flags) {
    (void)flags;
    CALL;
    return 0;
}
static int cuDriverGetVersion(int *v) {
    CALL;
    *v = 99000;
    return 0;
}
static int cuGetErrorName(int r, const char **out) {
    *out = r == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : NULL;
    return *out ? 0 : 1;
}
static int cuGetErrorString(int r, const char **out) {
    *out = r == 2 ? "out of memory" : NULL;
    return *out ? 0 : 1;
}
static int cuDeviceGetCount(int *n) {
    CALL;
    *n = 1;
    return 0;
}
static int cuDeviceGet(int *out, int i) {
    CALL;
    *out = i;
    return 0;
}
static int cuDeviceGetName(char *out, int cap, int dev) {
    (void)dev;
    CALL;
    snprintf(out, (size_t)cap, "Stub GPU");
    return 0;
}
static int cuDeviceGetAttribute(int *out, int which, int dev) {
    (void)dev;
    CALL;
    switch (which) {
    case 75: *out = 9; break; // compute capability
    case 76: *out = 0; break;
    case 16: *out = 132; break;        // multiprocessors
    case 97: *out = 227 * 1024; break; // shared memory of a block
    default: *out = 228 * 1024; break; // of a multiprocessor
    }
    return 0;
}
static int cuDevicePrimaryCtxRetain(void **out, int dev) {
    (void)dev;
    CALL;
    *out = made(CONTEXT, 1);
    free(*out); // the device's; it has no release of its own
    return 0;
}
static int cuDevicePrimaryCtxRelease(int dev) {
    (void)dev;
    return gone(CONTEXT, NULL, __func__);
}
static int cuModuleLoadData(void **out, const void *image) {
    (void)image;
    CALL;
    *out = made(MODULE, 1);
    return 0;
}
static int cuModuleUnload(void *m) {
    return gone(MODULE, m, __func__);
}
static int cuModuleGetFunction(void **out, void *m, const char *name) {
    (void)name;
    CALL;
    *out = m;
    return 0;
}
static int cuMemGetInfo(size_t *avail, size_t *total) {
    CALL;
    *avail = n_free;
    *total = (size_t)8 << 30;
    return 0;
}
static int cuMemAlloc(address *out, size_t n) {
    CALL;
    if (there("STUB_GPU_FULL")) return 2;
    if (n == 0) return 1; // as the driver
    *out = (address)(uintptr_t)made(MEMORY, n);
    return 0;
}
static int cuMemFree(address p) {
    return gone(MEMORY, (void *)(uintptr_t)p, __func__);
}
static int cuMemHostAlloc(void **out, size_t n, unsigned flags) {
    (void)flags;
    CALL;
    *out = made(PINNED, n);
    return 0;
}
static int cuMemFreeHost(void *p) {
    return gone(PINNED, p, __func__);
}
static int cuMemHostRegister(void *p, size_t n, unsigned flags) {
    (void)p, (void)n, (void)flags;
    CALL;
    count(REGISTERED, 1);
    return 0;
}
static int cuMemHostUnregister(void *p) {
    (void)p;
    return gone(REGISTERED, NULL, __func__);
}
static int cuMemcpyHtoDAsync(address dst, const void *src, size_t n, void *s) {
    (void)s;
    CALL;
    memcpy((void *)(uintptr_t)dst, src, n);
    return 0;
}
static int cuMemcpyDtoHAsync(void *dst, address src, size_t n, void *s) {
    (void)s;
    CALL;
    memcpy(dst, (void *)(uintptr_t)src, n);
    return 0;
}
static int cuMemsetD8Async(address dst, unsigned char v, size_t n, void *s) {
    (void)s;
    CALL;
    memset((void *)(uintptr_t)dst, v, n);
    return 0;
}
static int cuStreamCreate(void **out, unsigned flags) {
    (void)flags;
    CALL;
    *out = made(STREAM, 1);
    return 0;
}
static int cuStreamDestroy(void *s) {
    return gone(STREAM, s, __func__);
}
static int cuStreamSynchronize(void *s) {
    (void)s;
    if (capturing) die("a wait while a graph is captured");
    CALL;
    return 0;
}
static int cuStreamBeginCapture(void *s, int mode) {
    (void)s, (void)mode;
    if (capturing) die("a capture inside another");
    CALL;
    capturing = 1;
    return 0;
}
static int cuStreamEndCapture(void *s, void **out) {
    (void)s;
    if (!capturing) die("the end of no capture");
    capturing = 0;
    *out = NULL;
    CALL;
    *out = made(CAPTURE, 1);
    return 0;
}
static int cuGraphDestroy(void *g) {
    return gone(CAPTURE, g, __func__);
}
static int cuGraphInstantiateWithFlags(void **out, void *g, unsigned long long flags) {
    (void)g, (void)flags;
    CALL;
    if (there("STUB_GPU_FULL")) return 2;
    *out = made(GRAPH, 1);
    return 0;
}
static int cuGraphExecDestroy(void *g) {
    return gone(GRAPH, g, __func__);
}
static int cuLaunchKernelEx(const unsigned *config, void *f, void **params, void **extra) {
    (void)params, (void)extra;
    const unsigned *c = config; // grid, block, dynamic shared memory
    if (!f || !c[0] || !c[1] || !c[2] || !c[3] || !c[4] || !c[5]) die("an empty launch");
    if (c[1] > 65535 || c[2] > 65535 || c[3] * c[4] * c[5] > 1024 || c[6] > 227 * 1024) {
        die("a launch beyond the limits");
    }
    CALL;
    return there("STUB_GPU_LOST") ? 719 : 0;
}
static int cuGraphLaunch(void *g, void *s) {
    (void)g, (void)s;
    CALL;
    return there("STUB_GPU_LOST") ? 719 : 0;
}
static int cuEventCreate(void **out, unsigned flags) {
    (void)flags;
    CALL;
    *out = made(EVENT, 1);
    return 0;
}
static int cuEventDestroy(void *e) {
    return gone(EVENT, e, __func__);
}
static int cuEventElapsedTime(float *ms, void *a, void *b) {
    (void)a, (void)b;
    CALL;
    *ms = 1;
    return 0;
}

// Those that do nothing here.
#define NOTHING(name)                                                                              \
    static int name(void) {                                                                        \
        CALL;                                                                                      \
        return 0;                                                                                  \
    }
NOTHING(cuDeviceTotalMem)
NOTHING(cuCtxSetCurrent)
NOTHING(cuFuncSetAttribute)
NOTHING(cuStreamWaitEvent)
NOTHING(cuGraphUpload)
NOTHING(cuEventRecord)
NOTHING(cuEventQuery)
NOTHING(cuEventSynchronize)

int cuGetProcAddress_v2(const char *want, void **out, int min, unsigned long long flags, int *q);
int cuGetProcAddress_v2(const char *want, void **out, int min, unsigned long long flags, int *q) {
    (void)min, (void)flags, (void)q;
#define FUNCTION(f)                                                                                \
    { #f, (int (*)(void))f }
    static const struct {
        const char *name;
        int (*f)(void);
    } table[] = {
        FUNCTION(cuInit),
        FUNCTION(cuDriverGetVersion),
        FUNCTION(cuGetErrorName),
        FUNCTION(cuGetErrorString),
        FUNCTION(cuDeviceGetCount),
        FUNCTION(cuDeviceGet),
        FUNCTION(cuDeviceGetName),
        FUNCTION(cuDeviceGetAttribute),
        FUNCTION(cuDeviceTotalMem),
        FUNCTION(cuDevicePrimaryCtxRetain),
        FUNCTION(cuDevicePrimaryCtxRelease),
        FUNCTION(cuCtxSetCurrent),
        FUNCTION(cuModuleLoadData),
        FUNCTION(cuModuleUnload),
        FUNCTION(cuModuleGetFunction),
        FUNCTION(cuFuncSetAttribute),
        FUNCTION(cuMemGetInfo),
        FUNCTION(cuMemAlloc),
        FUNCTION(cuMemFree),
        FUNCTION(cuMemHostAlloc),
        FUNCTION(cuMemFreeHost),
        FUNCTION(cuMemHostRegister),
        FUNCTION(cuMemHostUnregister),
        FUNCTION(cuMemcpyHtoDAsync),
        FUNCTION(cuMemcpyDtoHAsync),
        FUNCTION(cuMemsetD8Async),
        FUNCTION(cuStreamCreate),
        FUNCTION(cuStreamDestroy),
        FUNCTION(cuStreamSynchronize),
        FUNCTION(cuStreamWaitEvent),
        FUNCTION(cuStreamBeginCapture),
        FUNCTION(cuStreamEndCapture),
        FUNCTION(cuGraphDestroy),
        FUNCTION(cuGraphInstantiateWithFlags),
        FUNCTION(cuGraphUpload),
        FUNCTION(cuGraphLaunch),
        FUNCTION(cuGraphExecDestroy),
        FUNCTION(cuLaunchKernelEx),
        FUNCTION(cuEventCreate),
        FUNCTION(cuEventDestroy),
        FUNCTION(cuEventRecord),
        FUNCTION(cuEventQuery),
        FUNCTION(cuEventSynchronize),
        FUNCTION(cuEventElapsedTime),
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (strcmp(table[i].name, want) != 0) continue;
        memcpy(out, &table[i].f, sizeof table[i].f);
        return 0;
    }
    return 500; // not found
}
