// How much goes into one command buffer: a pure choice by device, phase, family and environment.
#ifndef MX_BACKEND_BUDGET_H
#define MX_BACKEND_BUDGET_H

#include "backend/backend.h"

enum { MX_BUDGET_UNLIMITED = 0x7fffffff };

// The commit rule, tested after each op is recorded:
//   ops > max_ops || (ops > min_ops && counted > max_mb)
// counted = true MiB of distinct input views since the last commit, or (elements) MLX's count:
// elements >> 20 of every input, CUDA-style without and Metal-style with de-duplication.
typedef struct mx_budget {
    int32_t max_ops, max_mb, min_ops;
    bool elements; // MLXCEL_BUFFER_ACCOUNTING=elements
    bool dedup;    // distinct views count once
    bool explicit_ops, explicit_mb;
    char why[96]; // "default: decode unlimited", "MLX_MAX_OPS_PER_BUFFER", …
} mx_budget;

// Everything the choice depends on. Strings may be NULL (unset). apple_gen 1..5 for M1..M5 rows of
// the table (reproduction of documented rules; no such device is driven here).
typedef struct mx_budget_input {
    mx_device_kind device;
    int32_t cc_major, cc_minor;
    int32_t apple_gen;
    char apple_class;   // 'p', 'g', 's', 'd' as in the architecture string's last letter; 0 = none
    const char *family; // model_type
    int32_t n_routed_experts;
    const char *env_max_ops, *env_max_mb, *env_decode_mb, *env_min_ops, *env_accounting,
        *env_defaults;
} mx_budget_input;

void mx_budget_choose(const mx_budget_input *in, mx_budget out[MX_PHASES]);
// The line that says that a family's rule for the device raised the budget: "CUDA graph budget: …";
// "" when none did.
void mx_budget_rule_text(const mx_budget_input *in, char *out, size_t cap);
// Fills the env_* fields from the knob table; warns of values that mean nothing.
void mx_budget_input_env(mx_budget_input *in);

#endif
