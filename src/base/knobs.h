// The one place that reads the environment. Values are read once, at first use, and then fixed.
#ifndef MX_BASE_KNOBS_H
#define MX_BASE_KNOBS_H

#include "base/str.h"

typedef enum mx_knob {
#define KNOB(id, name, kind, dflt, help) MX_KNOB_##id,
#include "base/knobs.def"
#undef KNOB
    MX_KNOB_COUNT
} mx_knob;

typedef enum mx_knob_kind {
    MX_KNOB_FLAG,
    MX_KNOB_PRESENT,
    MX_KNOB_INT,
    MX_KNOB_FLOAT,
    MX_KNOB_SIZE,
    MX_KNOB_TEXT
} mx_knob_kind;

typedef struct mx_knob_info {
    const char *name, *dflt, *help;
    mx_knob_kind kind;
} mx_knob_info;

const mx_knob_info *mx_knob_info_get(mx_knob k);
// The raw value, or NULL when unset or empty. Thread-safe.
const char *mx_knob_raw(mx_knob k);
bool mx_knob_is_set(mx_knob k);
// The value, or the default of the table; a malformed value warns once and gives the default. INT
// is a count (0 to 2^31 - 1), FLOAT a factor (above 0, at most 10^6).
bool mx_knob_flag(mx_knob k);
const char *mx_knob_text(mx_knob k);              // never NULL
int64_t mx_knob_int(mx_knob k, int64_t if_unset); // if_unset used when the table's default is empty
double mx_knob_float(mx_knob k);
uint64_t mx_knob_size(mx_knob k, uint64_t if_unset);
// Says once that the knob's value is not valid, for readers that parse it themselves.
void mx_knob_warn(mx_knob k);
// "NAME=value" of the next variable at or behind *at whose name begins with prefix and is not in
// the table; NULL at the end. *at begins as 0 and moves on.
const char *mx_knob_other(const char *prefix, size_t *at);
// Empty, 0, false, off and no are off.
bool mx_knob_text_is_on(const char *v);
// For tests: forget what was read, so that setenv takes effect.
void mx_knobs_reload(void);

#endif
