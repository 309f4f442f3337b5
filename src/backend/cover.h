// Which of the architectures that a program was compiled for runs on a device.
#ifndef MX_BACKEND_COVER_H
#define MX_BACKEND_COVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// archs: "sm_80 sm_90a compute_80". Machine code (sm_XY) runs on its major version from its minor
// on, with a letter on exactly its version; compute_XY is compiled by the driver for that version
// and every later one. Writes the best match, machine code before compute_ and the highest version
// first, to out; false, and "" there, when nothing runs. The device's version is major.minor.
bool mx_arch_cover(const char *archs, int32_t major, int32_t minor, char *out, size_t cap);

#endif
