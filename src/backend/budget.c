// The budget choice. Pure: reads nothing but its input. Rules: the tuning page of the system this
// project implements (Apple generations, capability 12.1) and MLX's published table; ours by
// default: decode in one buffer, prefill in one buffer per step.
#include "backend/budget.h"

#include "base/knobs.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

typedef struct device_row {
    int32_t ops, mb;
} device_row;

static device_row cuda_row(int32_t major, int32_t minor) {
    static const struct {
        int32_t major, minor;
        device_row row;
    } table[] = {
        {8, 0, {20, 400}},    {9, 0, {100, 1000}}, {10, 0, {100, 1000}},
        {12, 0, {100, 1000}}, {12, 1, {20, 25}},
    };
    for (size_t i = 0; i < MX_COUNT(table); i++) {
        if (table[i].major == major && table[i].minor == minor) return table[i].row;
    }
    return (device_row){20, 100};
}

static device_row apple_row(char device_class) {
    switch (device_class) {
    case 'p': return (device_row){20, 40};
    case 's':
    case 'd': return (device_row){50, 50};
    default: return (device_row){40, 40};
    }
}

static bool is_off(const char *v) {
    return strcasecmp(v, "0") == 0 || strcasecmp(v, "off") == 0 || strcasecmp(v, "false") == 0 ||
           strcasecmp(v, "no") == 0;
}

// A positive integer that fits, else false.
static bool positive(const char *v, int32_t *out) {
    int64_t x;
    if (!v || !mx_parse_i64(v, &x) || x < 1 || x > MX_BUDGET_UNLIMITED) return false;
    *out = (int32_t)x;
    return true;
}

static bool uses_mlx_table(const mx_budget_input *in) {
    return in->env_defaults && strcasecmp(in->env_defaults, "mlx") == 0;
}

// The families that gained on every measured workload of capability 12.1.
static bool raised_on_121(const mx_budget_input *in) {
    return in->apple_gen == 0 && in->cc_major == 12 && in->cc_minor == 1 && in->family &&
           strcmp(in->family, "laguna") == 0 && in->n_routed_experts > 1;
}

// MLX's table with the page's raises, into every phase.
static void choose_mlx(const mx_budget_input *in, mx_budget out[MX_PHASES]) {
    bool apple = in->apple_gen > 0;
    device_row row = apple ? apple_row(in->apple_class) : cuda_row(in->cc_major, in->cc_minor);
    const char *why = "mlx table";
    if (apple && in->apple_gen <= 4) {
        row.ops = 1000;
        why = "mlx table, M1-M4 rule";
    }
    if (raised_on_121(in)) {
        row = (device_row){100, 1000};
        why = "mlx table, 12.1 family rule";
    }
    for (int p = 0; p < MX_PHASES; p++) {
        out[p].max_ops = row.ops;
        out[p].max_mb = row.mb;
        out[p].elements = true;
        out[p].dedup = apple;
        out[p].min_ops = 0;
        snprintf(out[p].why, sizeof out[p].why, "%s", why);
    }
    if (apple && in->apple_gen <= 4) {
        out[MX_PHASE_DECODE].max_mb = 1000;
        snprintf(out[MX_PHASE_DECODE].why, sizeof out[0].why, "%s, decode raise", why);
    }
}

static void choose_ours(mx_budget out[MX_PHASES]) {
    for (int p = 0; p < MX_PHASES; p++) {
        out[p].max_ops = out[p].max_mb = MX_BUDGET_UNLIMITED;
        out[p].dedup = true;
        snprintf(out[p].why, sizeof out[p].why, "default: one buffer a step");
    }
}

static void apply_explicit(const mx_budget_input *in, mx_budget out[MX_PHASES]) {
    int32_t v;
    if (positive(in->env_max_ops, &v)) {
        for (int p = 0; p < MX_PHASES; p++) {
            out[p].max_ops = v;
            out[p].explicit_ops = true;
            snprintf(out[p].why, sizeof out[p].why, "MLX_MAX_OPS_PER_BUFFER");
        }
    }
    if (positive(in->env_max_mb, &v)) {
        for (int p = 0; p < MX_PHASES; p++) {
            out[p].max_mb = v;
            bool both = out[p].explicit_ops;
            out[p].explicit_mb = true;
            snprintf(out[p].why, sizeof out[p].why, "%sMLX_MAX_MB_PER_BUFFER",
                     both ? "MLX_MAX_OPS_PER_BUFFER, " : "");
        }
    }
}

// MLXCEL_DECODE_MB_PER_BUFFER touches pipelined decode only, and nothing when MB is pinned.
static void apply_decode_mb(const mx_budget_input *in, mx_budget out[MX_PHASES]) {
    mx_budget *d = &out[MX_PHASE_DECODE];
    if (!in->env_decode_mb || !in->env_decode_mb[0] || d->explicit_mb) return;
    int32_t v;
    if (is_off(in->env_decode_mb)) {
        d->max_mb = out[MX_PHASE_DECODE_SYNC].max_mb;
    } else if (positive(in->env_decode_mb, &v)) {
        d->max_mb = v;
    } else {
        return;
    }
    snprintf(d->why, sizeof d->why, "MLXCEL_DECODE_MB_PER_BUFFER");
}

void mx_budget_choose(const mx_budget_input *in, mx_budget out[MX_PHASES]) {
    memset(out, 0, sizeof(mx_budget) * MX_PHASES);
    int32_t min_ops = 10;
    int64_t x;
    bool set_min =
        in->env_min_ops && mx_parse_i64(in->env_min_ops, &x) && x >= 0 && x < MX_BUDGET_UNLIMITED;
    if (set_min) min_ops = (int32_t)x;
    for (int p = 0; p < MX_PHASES; p++) out[p].min_ops = min_ops;
    if (uses_mlx_table(in))
        choose_mlx(in, out);
    else
        choose_ours(out);
    for (int p = 0; p < MX_PHASES; p++) {
        if (set_min) out[p].min_ops = min_ops;
        if (!in->env_accounting || !in->env_accounting[0]) continue;
        if (strcasecmp(in->env_accounting, "elements") == 0) out[p].elements = true;
        if (strcasecmp(in->env_accounting, "bytes") == 0) {
            out[p].elements = false;
            out[p].dedup = true;
        }
    }
    apply_explicit(in, out);
    apply_decode_mb(in, out);
}

void mx_budget_rule_text(const mx_budget_input *in, char *out, size_t cap) {
    int32_t v;
    bool ops = !positive(in->env_max_ops, &v), mb = !positive(in->env_max_mb, &v);
    mx_budget b[MX_PHASES];
    out[0] = 0;
    if (!uses_mlx_table(in) || !raised_on_121(in) || (!ops && !mb)) return;
    mx_budget_choose(in, b);
    char both[2][48] = {"", ""};
    if (ops) snprintf(both[0], sizeof both[0], " MLX_MAX_OPS_PER_BUFFER=%d", b[0].max_ops);
    if (mb) snprintf(both[1], sizeof both[1], " MLX_MAX_MB_PER_BUFFER=%d", b[0].max_mb);
    snprintf(out, cap,
             "CUDA graph budget:%s%s applied for model_type %s on sm_%d%d (#1798); an operator-set "
             "value wins per variable",
             both[0], both[1], in->family, in->cc_major, in->cc_minor);
}

// Values that mx_budget_choose passes over are reported.
static void warn_of_malformed(const mx_budget_input *in) {
    int32_t v;
    int64_t x;
    bool zero = in->env_min_ops && mx_parse_i64(in->env_min_ops, &x) && x == 0;
    if (in->env_max_ops && !positive(in->env_max_ops, &v)) {
        mx_knob_warn(MX_KNOB_MAX_OPS_PER_BUFFER);
    }
    if (in->env_max_mb && !positive(in->env_max_mb, &v)) mx_knob_warn(MX_KNOB_MAX_MB_PER_BUFFER);
    if (in->env_decode_mb && !is_off(in->env_decode_mb) && !positive(in->env_decode_mb, &v)) {
        mx_knob_warn(MX_KNOB_DECODE_MB_PER_BUFFER);
    }
    if (in->env_min_ops && !zero && !positive(in->env_min_ops, &v)) {
        mx_knob_warn(MX_KNOB_MIN_OPS_PER_BUFFER);
    }
    if (in->env_accounting && strcasecmp(in->env_accounting, "bytes") != 0 &&
        strcasecmp(in->env_accounting, "elements") != 0) {
        mx_knob_warn(MX_KNOB_BUFFER_ACCOUNTING);
    }
    if (in->env_defaults && strcasecmp(in->env_defaults, "mlx") != 0) {
        mx_knob_warn(MX_KNOB_BUFFER_DEFAULTS);
    }
}

void mx_budget_input_env(mx_budget_input *in) {
    in->env_max_ops = mx_knob_raw(MX_KNOB_MAX_OPS_PER_BUFFER);
    in->env_max_mb = mx_knob_raw(MX_KNOB_MAX_MB_PER_BUFFER);
    in->env_decode_mb = mx_knob_raw(MX_KNOB_DECODE_MB_PER_BUFFER);
    in->env_min_ops = mx_knob_raw(MX_KNOB_MIN_OPS_PER_BUFFER);
    in->env_accounting = mx_knob_raw(MX_KNOB_BUFFER_ACCOUNTING);
    in->env_defaults = mx_knob_raw(MX_KNOB_BUFFER_DEFAULTS);
    warn_of_malformed(in);
}
