// A stand-in for the NVIDIA driver's library that refuses in the ways a real one can: STUB_MISSING
// (a function it has not), STUB_INIT (what cuInit returns), STUB_VERSION, STUB_COUNT, STUB_CC (as
// 75). With -DSTUB_OLD it is one from before CUDA 12.0.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int number(const char *name, int dflt) {
    const char *v = getenv(name);
    return v ? (int)strtol(v, NULL, 10) : dflt;
}

static int nothing(void) {
    return 0;
}
static int init(unsigned flags) {
    (void)flags;
    return number("STUB_INIT", 0);
}
static int version(int *v) {
    *v = number("STUB_VERSION", 99000);
    return 0;
}
static int text(int r, const char **out) {
    (void)r;
    *out = "stub";
    return 0;
}
static int count(int *n) {
    *n = number("STUB_COUNT", 1);
    return 0;
}
static int device(int *out, int i) {
    *out = i;
    return 0;
}
static int name(char *out, int cap, int dev) {
    (void)dev;
    snprintf(out, (size_t)cap, "Stub GPU");
    return 0;
}
static int attribute(int *out, int which, int dev) {
    (void)dev;
    int cc = number("STUB_CC", 90);
    *out = which == 75 ? cc / 10 : which == 76 ? cc % 10 : 1; // compute capability
    return 0;
}

#ifndef STUB_OLD
int cuGetProcAddress_v2(const char *want, void **out, int min, unsigned long long flags, int *q);
int cuGetProcAddress_v2(const char *want, void **out, int min, unsigned long long flags, int *q) {
    static const struct {
        const char *name;
        int (*f)(void);
    } table[] = {{"cuInit", (int (*)(void))init},
                 {"cuDriverGetVersion", (int (*)(void))version},
                 {"cuGetErrorString", (int (*)(void))text},
                 {"cuGetErrorName", (int (*)(void))text},
                 {"cuDeviceGetCount", (int (*)(void))count},
                 {"cuDeviceGet", (int (*)(void))device},
                 {"cuDeviceGetName", (int (*)(void))name},
                 {"cuDeviceGetAttribute", (int (*)(void))attribute}};
    (void)min, (void)flags, (void)q;
    const char *missing = getenv("STUB_MISSING");
    if (missing && strcmp(missing, want) == 0) return 500; // not found
    int (*f)(void) = nothing;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (strcmp(table[i].name, want) == 0) f = table[i].f;
    }
    memcpy(out, &f, sizeof f);
    return 0;
}
#else
int cuInit(unsigned flags);
int cuInit(unsigned flags) {
    (void)version, (void)text, (void)count, (void)device, (void)name, (void)attribute,
        (void)nothing;
    return init(flags);
}
#endif
