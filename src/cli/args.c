// Parsing of arguments by the table of flags. State: the caller's cli_options.
//
// Both `--flag value` and `--flag=value` are read, `--` ends the flags. Nothing is guessed: an
// unknown flag, a missing or malformed value, a number out of range are errors that name the flag
// and what was expected; of a flag given twice the later value counts.
#include "cli/args.h"

#include "base/knobs.h"
#include "base/mem.h"
#include "base/str.h"
#include "engine/device.h"

#include <math.h>
#include <stdio.h>

bool cli_flag_is(const cli_flag *f, const char *name, size_t n) {
    for (const char *p = f->names; *p;) {
        size_t len = strcspn(p, ",");
        if (len == n && memcmp(p, name, n) == 0) return true;
        p += len;
        p += strspn(p, ", ");
    }
    return false;
}

const cli_command *cli_find_command(const char *name) {
    for (size_t i = 0; i < CLI_COMMANDS; i++) {
        const cli_command *c = &cli_commands[i];
        if (strcmp(c->name, name) == 0) return c;
        if (c->alias && strcmp(c->alias, name) == 0) return c;
    }
    return NULL;
}

static const cli_flag *find_flag(const cli_options *o, const char *name, size_t n) {
    for (size_t i = 0; i < cli_n_flags; i++) {
        const cli_flag *f = &cli_flags[i];
        if ((f->commands >> o->command & 1u) && cli_flag_is(f, name, n)) return f;
    }
    return NULL;
}

// ---- Values ----

static mx_status expected(const char *name, const char *what, const char *got, mx_err *err) {
    return mx_err_set(err, MX_INVALID, "%s: expected %s, got \"%s\"", name, what, got);
}

static void *field(cli_options *o, const cli_flag *f) {
    return (char *)o + f->offset;
}

// "a number from 0 to 1", "an integer, 1 or more"
static void describe_range(const cli_flag *f, char *out, size_t cap) {
    const char *what = f->kind == CLI_INT ? "an integer" : "a number";
    double top = f->kind == CLI_INT ? (double)INT32_MAX : HUGE_VAL;
    if (f->max >= top && !isfinite(f->min))
        snprintf(out, cap, "%s", what);
    else if (f->max >= top)
        snprintf(out, cap, "%s, %.9g or more", what, f->min);
    else
        snprintf(out, cap, "%s from %.9g to %.9g", what, f->min, f->max);
}

static mx_status set_number(cli_options *o, const cli_flag *f, const char *name, const char *v,
                            mx_err *err) {
    int64_t i = 0;
    double d = 0;
    char what[96];
    describe_range(f, what, sizeof what);
    bool ok = f->kind == CLI_INT ? mx_parse_i64(v, &i) : mx_parse_f64(v, &d);
    if (f->kind == CLI_INT) d = (double)i;
    if (!ok || d < f->min || d > f->max) return expected(name, what, v, err);
    if (f->kind == CLI_INT)
        *(int32_t *)field(o, f) = (int32_t)i;
    else
        *(float *)field(o, f) = (float)d;
    return MX_OK;
}

static void push_text(const char ***list, size_t *n, const char *v) {
    *list = mx_realloc(*list, (*n + 1) * sizeof **list);
    (*list)[(*n)++] = v;
}

static mx_status set_choice(cli_options *o, const cli_flag *f, const char *name, const char *v,
                            mx_err *err) {
    size_t n = strlen(v);
    for (const char *p = f->value; *p;) {
        size_t len = strcspn(p, "|");
        if (len == n && memcmp(p, v, n) == 0) {
            *(const char **)field(o, f) = v;
            return MX_OK;
        }
        p += len + (p[len] == '|');
    }
    return mx_err_set(err, MX_INVALID, "%s: expected %s, got \"%s\"", name, f->value, v);
}

static mx_status add_bias(cli_options *o, const char *name, const char *v, mx_err *err) {
    const char *eq = strchr(v, '=');
    uint64_t id = 0;
    double bias = 0;
    char *id_text = eq ? mx_strdup(v) : NULL;
    if (eq) id_text[eq - v] = 0;
    bool ok = eq && mx_parse_u64(id_text, &id) && mx_parse_f64(eq + 1, &bias);
    mx_free(id_text);
    if (!ok || id > INT32_MAX || fabs(bias) > 1e6) {
        return expected(name, "ID=BIAS (as 42=-1.5)", v, err);
    }
    o->bias = mx_realloc(o->bias, (o->n_bias + 1) * sizeof *o->bias);
    o->bias[o->n_bias++] = (mlxcel_logit_bias){(int32_t)id, (float)bias};
    return MX_OK;
}

static mx_status set_value(cli_options *o, const cli_flag *f, const char *name, const char *v,
                           mx_err *err) {
    switch (f->kind) {
    case CLI_INT:
    case CLI_FLOAT: return set_number(o, f, name, v, err);
    case CLI_CHOICE: return set_choice(o, f, name, v, err);
    case CLI_BIAS: return add_bias(o, name, v, err);
    case CLI_TEXT: *(const char **)field(o, f) = v; return MX_OK;
    case CLI_SEED:
        o->has_seed = true;
        if (mx_parse_u64(v, (uint64_t *)field(o, f))) return MX_OK;
        return expected(name, "an integer, 0 or more", v, err);
    case CLI_TEXTS:
        if (!v[0]) return expected(name, "a text that is not empty", v, err);
        if (f->offset == offsetof(cli_options, arms))
            push_text(&o->arms, &o->n_arms, v);
        else
            push_text(&o->stops, &o->n_stops, v);
        return MX_OK;
    case CLI_FLAG:
    case CLI_REFUSED: break;
    }
    CHECKF(false, "%s takes no value", name);
    return MX_INTERNAL;
}

static void note_given(cli_options *o, const cli_flag *f) {
    size_t i = (size_t)(f - cli_flags);
    CHECK(i < MX_COUNT(o->given) * 64);
    o->given[i / 64] |= (uint64_t)1 << (i % 64);
}

bool cli_is_given(const cli_options *o, size_t offset) {
    for (size_t i = 0; i < cli_n_flags; i++) {
        bool given = o->given[i / 64] >> (i % 64) & 1u;
        if (given && cli_flags[i].kind != CLI_REFUSED && cli_flags[i].offset == offset) return true;
    }
    return false;
}

// ---- Arguments ----

// One argument that starts with '-'; takes the next one (*i moves) when it needs a value.
static mx_status parse_flag(cli_options *o, const cli_command *c, int argc, char *const *argv,
                            int *i, mx_err *err) {
    const char *arg = argv[*i], *eq = strchr(arg, '=');
    size_t n = eq ? (size_t)(eq - arg) : strlen(arg);
    const cli_flag *f = find_flag(o, arg, n);
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)MX_MIN(n, sizeof name - 1), arg);
    if (!f) return mx_err_set(err, MX_INVALID, "unknown flag %s for %s", name, c->name);
    if (f->kind == CLI_REFUSED) {
        return mx_err_set(err, MX_INVALID, "%s: %s in this version", name, f->help);
    }
    note_given(o, f);
    if (f->kind == CLI_FLAG) {
        if (eq) return mx_err_set(err, MX_INVALID, "%s takes no value", name);
        *(bool *)field(o, f) = true;
        return MX_OK;
    }
    if (eq) return set_value(o, f, name, eq + 1, err);
    const char *next = *i + 1 < argc ? argv[*i + 1] : NULL;
    if (!next) return mx_err_set(err, MX_INVALID, "%s: expected %s", name, f->value);
    if (next[0] == '-' && find_flag(o, next, strcspn(next, "="))) {
        return mx_err_set(err, MX_INVALID,
                          "%s: expected %s, got the flag %s (write %s=%s to mean it)", name,
                          f->value, next, name, next);
    }
    ++*i;
    return set_value(o, f, name, next, err);
}

static mx_status set_defaults(cli_options *o, mx_err *err) {
    for (size_t i = 0; i < cli_n_flags; i++) {
        const cli_flag *f = &cli_flags[i];
        if (!(f->commands >> o->command & 1u) || !f->dflt) continue;
        MX_TRY(set_value(o, f, f->names, f->dflt, err));
    }
    return MX_OK;
}

// ---- Environment: llama-server's variables, between the defaults and the arguments ----

static const struct {
    mx_knob knob;
    const char *flag;
} serve_env[] = {
    {MX_KNOB_ARG_ALIAS, "--alias"},
    {MX_KNOB_ARG_CTX_SIZE, "--ctx-size"},
    {MX_KNOB_ARG_N_PARALLEL, "--n-parallel"},
    {MX_KNOB_ARG_BATCH, "--batch-size"},
    {MX_KNOB_ARG_UBATCH, "--ubatch-size"},
    {MX_KNOB_ARG_HOST, "--host"},
    {MX_KNOB_ARG_PORT, "--port"},
    {MX_KNOB_ARG_THREADS, "--threads"},
    {MX_KNOB_ARG_THREADS_HTTP, "--threads-http"},
    {MX_KNOB_ARG_TIMEOUT, "--timeout"},
    {MX_KNOB_ARG_API_PREFIX, "--api-prefix"},
    {MX_KNOB_ARG_SSL_KEY_FILE, "--ssl-key-file"},
    {MX_KNOB_ARG_SSL_CERT_FILE, "--ssl-cert-file"},
    {MX_KNOB_ARG_CACHE_TYPE_K, "--cache-type-k"},
    {MX_KNOB_ARG_CACHE_TYPE_V, "--cache-type-v"},
    {MX_KNOB_ARG_N_PREDICT, "--n-predict"},
    {MX_KNOB_ARG_MODEL, "--model"},
    {MX_KNOB_ARG_THINK, "--reasoning-format"},
    {MX_KNOB_ARG_DEVICE, "--device"},
    {MX_KNOB_ARG_METRICS, "--metrics"},
    {MX_KNOB_ARG_NO_SLOTS, "--no-slots"},
    {MX_KNOB_ARG_PROPS, "--props"},
};

// Takes the value of a flag from a variable.
static mx_status take_variable(cli_options *o, const cli_flag *f, const char *name, const char *v,
                               mx_err *err) {
    bool on = mx_knob_text_is_on(v);
    if (f->kind == CLI_REFUSED) {
        if (!on) return MX_OK;
        return mx_err_set(err, MX_INVALID, "%s: %s in this version", name, f->help);
    }
    if (f->kind == CLI_FLAG && f->offset == offsetof(cli_options, as_always)) {
        if (on) return MX_OK;
        return mx_err_set(err, MX_INVALID, "%s=%s: this cannot be turned off so", name, v);
    }
    note_given(o, f);
    if (f->kind != CLI_FLAG) return set_value(o, f, name, v, err);
    *(bool *)field(o, f) = on;
    return MX_OK;
}

// LLAMA_ARG_TOP_K=5 is --top-k 5.
static mx_status take_others(cli_options *o, mx_err *err) {
    static const char prefix[] = "LLAMA_ARG_";
    const char *pair;
    for (size_t at = 0; (pair = mx_knob_other(prefix, &at));) {
        char name[80], flag[80] = "--";
        size_t n = strcspn(pair, "="), k = 2;
        snprintf(name, sizeof name, "%.*s", (int)n, pair);
        for (const char *p = name + strlen(prefix); *p && k + 1 < sizeof flag; p++) {
            char c = *p == '_' ? '-' : *p;
            flag[k++] = c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
        }
        const cli_flag *f = find_flag(o, flag, k);
        if (!f) return mx_err_set(err, MX_INVALID, "%s: there is no flag %.*s", name, (int)k, flag);
        MX_TRY(take_variable(o, f, name, pair + n + 1, err));
    }
    return MX_OK;
}

static mx_status set_environment(cli_options *o, mx_err *err) {
    if (o->command != CLI_SERVE) return MX_OK;
    for (size_t i = 0; i < MX_COUNT(serve_env); i++) {
        const char *v = mx_knob_raw(serve_env[i].knob);
        if (!v) continue;
        const cli_flag *f = find_flag(o, serve_env[i].flag, strlen(serve_env[i].flag));
        CHECK(f != NULL);
        MX_TRY(take_variable(o, f, mx_knob_info_get(serve_env[i].knob)->name, v, err));
    }
    if (!mx_knob_flag(MX_KNOB_ARG_SLOTS)) o->no_slots = true;
    return take_others(o, err);
}

static mx_status take_positional(cli_options *o, const cli_command *c, const char *arg,
                                 mx_err *err) {
    if (!c->positional || o->positional) {
        return mx_err_set(err, MX_INVALID, "unexpected argument \"%s\" for %s", arg, c->name);
    }
    if (!arg[0]) return mx_err_set(err, MX_INVALID, "%s is empty", c->positional);
    o->positional = arg;
    return MX_OK;
}

mx_status cli_parse(cli_options *o, const cli_command *c, int argc, char *const *argv,
                    mx_err *err) {
    *o = (cli_options){.command = (cli_command_id)(c - cli_commands)};
    CHECK(set_defaults(o, err) == MX_OK);
    MX_TRY(set_environment(o, err));
    bool flags = true;
    for (int i = 0; i < argc; i++) {
        const char *arg = argv[i];
        if (flags && strcmp(arg, "--") == 0)
            flags = false;
        else if (flags && arg[0] == '-' && arg[1])
            MX_TRY(parse_flag(o, c, argc, argv, &i, err));
        else
            MX_TRY(take_positional(o, c, arg, err));
        if (o->help) return MX_OK;
    }
    if (c->positional_required && !o->positional) {
        return mx_err_set(err, MX_INVALID, "expected %s", c->positional);
    }
    if (o->device && !mx_device_is_word(o->device)) {
        return mx_err_set(err, MX_INVALID,
                          "--device: expected cpu, cuda, cuda:N or gpu, got \"%s\"", o->device);
    }
    return MX_OK;
}

void cli_options_free(cli_options *o) {
    mx_free(o->stops);
    mx_free(o->arms);
    mx_free(o->bias);
    *o = (cli_options){0};
}
