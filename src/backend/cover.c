// The rule by which CUDA code fits devices. Pure.
#include "backend/cover.h"

#include <stdio.h>
#include <string.h>

// Version of "sm_90a": 90; letter says that there is one. 0: not a version.
static int32_t version_of(const char *digits, const char *end, bool *letter) {
    int32_t v = 0;
    const char *p = digits;
    while (p < end && *p >= '0' && *p <= '9' && v < 100000) v = v * 10 + (*p++ - '0');
    *letter = p < end;
    return v;
}

bool mx_arch_cover(const char *archs, int32_t major, int32_t minor, char *out, size_t cap) {
    int32_t device = major * 10 + minor, best = 0;
    out[0] = 0;
    for (const char *p = archs + strspn(archs, " "); *p;) {
        const char *end = p + strcspn(p, " ");
        bool machine = strncmp(p, "sm_", 3) == 0, letter;
        bool source = strncmp(p, "compute_", 8) == 0;
        int32_t v = machine || source ? version_of(p + (machine ? 3 : 8), end, &letter) : 0;
        bool fits = v > 0 && v <= device;
        if (fits && machine) fits = letter ? v == device : v / 10 == major;
        if (fits && source && letter) fits = v == device;
        int32_t rank = fits ? v + (machine ? 100000 : 0) : 0;
        if (rank > best) {
            best = rank;
            snprintf(out, cap, "%.*s", (int)(end - p), p);
        }
        p = end + strspn(end, " ");
    }
    return best > 0;
}
