// mlxcel bench --ab: the same bench under several settings of the environment. State: one run's.
//
// Settings are read once in a process, so every arm is a process of its own: this program again,
// with the arm's variables, asked for one repetition as JSON. Arms run in turns; the first has no
// settings and the second is the same again, which says what a difference must exceed.
#include "cli/profile.h"

#include "base/knobs.h"
#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_ARGS = 40, NUMBER = 24, MAX_RESULT = 4 << 20 };

extern char **environ;

typedef struct ab_arm {
    const char *name, *settings; // NULL: none
    prof_series prefill_ms, decode_ms;
    char token_hash[32], logit_hash[32];
    int64_t peak_bytes;
    double buffers;
    bool unstable; // another round gave another hash or peak
    int exit_code; // of a process that ended by itself and failed
} ab_arm;

typedef struct ab {
    const cli_options *o;
    ab_arm *arms;
    size_t n_arms;
} ab;

// ---- One arm's process -------------------------------------------------------------------------

typedef struct child_args {
    const char *v[MAX_ARGS];
    char numbers[MAX_ARGS][NUMBER];
    int n;
} child_args;

static void add_text(child_args *a, const char *flag, const char *value) {
    if (!value) return;
    CHECK(a->n + 3 <= MAX_ARGS);
    a->v[a->n++] = flag;
    a->v[a->n++] = value;
}

static void add_number(child_args *a, const char *flag, int32_t value) {
    snprintf(a->numbers[a->n], NUMBER, "%d", value);
    add_text(a, flag, a->numbers[a->n]);
}

// True when a setting "NAME=..." of the arm sets the variable of this entry of the environment.
static bool overrides(const char *settings, const char *entry) {
    size_t n = strcspn(entry, "=") + 1;
    for (const char *p = settings; *p; p += strcspn(p, " ")) {
        p += strspn(p, " ");
        if (strncmp(p, entry, n) == 0) return true;
    }
    return false;
}

// Measured by each process for itself it would not be the same in all, and the peaks neither.
static int32_t chunk_of(const cli_options *o, const char *settings) {
    if (o->prefill_chunk > 0) return o->prefill_chunk;
    bool set = mx_knob_is_set(MX_KNOB_PREFILL_CHUNK);
    if (set || (settings && overrides(settings, "MLXCEL_PREFILL_CHUNK="))) return 0;
    return o->n_seqs > 1 ? 2048 : 512;
}

static void make_args(const cli_options *o, const char *settings, child_args *a) {
    *a = (child_args){.v = {"mlxcel", "bench"}, .n = 2};
    add_text(a, "-m", o->model);
    add_text(a, "--models-dir", o->models_dir);
    add_text(a, "--device", o->device);
    add_text(a, "--kv-type", o->kv_type);
    add_text(a, "--kv-storage", o->kv_storage);
    add_text(a, "-o", "json");
    add_number(a, "-t", o->threads);
    add_number(a, "--prefill-chunk", chunk_of(o, settings));
    add_number(a, "-p", o->n_prefill);
    add_number(a, "-n", o->n_decode);
    add_number(a, "-d", o->depth);
    add_number(a, "-b", o->n_seqs);
    add_number(a, "-r", 1);
    if (o->force) a->v[a->n++] = "--force";
    if (o->deterministic) a->v[a->n++] = "--deterministic";
    if (o->warm_cache) a->v[a->n++] = "--warm-cache";
    a->v[a->n++] = "--allow-fallback";
}

// The environment with the arm's settings; strings are in *text. Both mx_free'd by the caller.
static char **make_env(const char *settings, char **text) {
    size_t n = 0;
    while (environ[n]) n++;
    *text = mx_strdup(settings ? settings : "");
    char **env = mx_calloc(n + strlen(*text) / 2 + 2, sizeof *env);
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        if (!overrides(settings ? settings : "", environ[i])) env[k++] = environ[i];
    }
    for (char *p = *text; *p;) {
        size_t blank = strspn(p, " ");
        memset(p, 0, blank);
        p += blank;
        if (*p) env[k++] = p;
        p += strcspn(p, " ");
    }
    return env;
}

static bool read_pipe(int fd, mx_buf *out) {
    char chunk[4096];
    for (;;) {
        ssize_t n = read(fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n == 0;
        mx_buf_add(out, chunk, (size_t)n);
    }
}

static mx_status run_child(const ab *x, ab_arm *arm, mx_buf *out, mx_err *err) {
    int fd[2], status = 0;
    pid_t pid;
    child_args args;
    char *text;
    make_args(x->o, arm->settings, &args);
    if (pipe2(fd, O_CLOEXEC) != 0) return mx_err_set(err, MX_INTERNAL, "no pipe for an arm");
    char **env = make_env(arm->settings, &text);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, fd[1], 1);
    int failed =
        posix_spawn(&pid, "/proc/self/exe", &files, NULL, (char *const *)(uintptr_t)args.v, env);
    posix_spawn_file_actions_destroy(&files);
    mx_free(env);
    mx_free(text);
    close(fd[1]);
    bool whole = !failed && read_pipe(fd[0], out);
    close(fd[0]);
    if (failed) return mx_err_set(err, MX_INTERNAL, "arm '%s' could not be started", arm->name);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    if (whole && WIFEXITED(status) && WEXITSTATUS(status) == 0) return MX_OK;
    arm->exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    return mx_err_set(err, MX_INTERNAL, "arm '%s' failed (status %d)", arm->name,
                      WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

// ---- Its result --------------------------------------------------------------------------------

static void take_hash(ab_arm *a, char out[32], const json_t *j, bool first) {
    char text[32];
    snprintf(text, sizeof text, "%s", json_is_string(j) ? json_string_value(j) : "-");
    a->unstable |= !first && strcmp(text, out) != 0;
    memcpy(out, text, sizeof text);
}

static void take_result(ab_arm *a, const json_t *j, bool first) {
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(j, "rows"), i, row) {
        const char *test = json_string_value(json_object_get(row, "test"));
        double ms = json_number_value(json_object_get(json_object_get(row, "ms"), "p50"));
        if (test && strcmp(test, "prefill") == 0) {
            prof_push(&a->prefill_ms, ms);
            continue;
        }
        // of a step: tokens that were read together have no times of their own
        double tok_s = json_number_value(json_array_get(json_object_get(row, "tok_s"), 0));
        double seqs = json_number_value(json_object_get(row, "seqs"));
        if (tok_s > 0) prof_push(&a->decode_ms, 1e3 * seqs / tok_s);
    }
    int64_t peak = json_integer_value(json_object_get(j, "peak_bytes"));
    a->unstable |= !first && peak != a->peak_bytes;
    a->peak_bytes = peak;
    a->buffers = json_number_value(json_object_get(j, "buffers_per_token"));
    take_hash(a, a->token_hash, json_object_get(j, "token_hash"), first);
    take_hash(a, a->logit_hash, json_object_get(j, "logit_hash"), first);
}

static mx_status run_arm(ab *x, ab_arm *a, bool first, mx_err *err) {
    mx_buf text;
    mx_buf_init(&text, MAX_RESULT);
    mx_status st = run_child(x, a, &text, err);
    if (st == MX_OK) {
        json_t *j = mx_json_parse(text.data ? text.data : "", text.n, MAX_RESULT, MX_JSON_STRICT,
                                  "result of an arm", err);
        st = j ? MX_OK : err->status;
        if (j) take_result(a, j, first);
        json_decref(j);
    }
    mx_buf_free(&text);
    return st;
}

// ---- Results -----------------------------------------------------------------------------------

static bool same(const ab_arm *a, const ab_arm *b) {
    return strcmp(a->token_hash, b->token_hash) == 0 && strcmp(a->logit_hash, b->logit_hash) == 0;
}

static void print_table(const ab *x, const char *path) {
    mx_buf t;
    mx_buf_init(&t, 0);
    mx_buf_printf(&t, "mlxcel %s, %s: prefill %d, decode %d, depth %d, %d sequence%s\n\n",
                  mlxcel_version(), path, x->o->n_prefill, x->o->n_decode, x->o->depth,
                  x->o->n_seqs, x->o->n_seqs == 1 ? "" : "s");
    mx_buf_printf(&t, "%11s %10s %9s %9s %12s %8s %-16s %-16s  %s\n", "prefill ms", "ms/token",
                  "against 1", "+-", "peak bytes", "buffers", "token hash", "logit hash", "arm");
    for (size_t i = 0; i < x->n_arms; i++) {
        const ab_arm *a = &x->arms[i];
        prof_diff d = prof_paired(&a->decode_ms, &x->arms[0].decode_ms);
        mx_buf_printf(&t, "%11.3f %10.4f %+9.4f %9.4f %12lld %8.1f %-16s %-16s  %s%s\n",
                      prof_quantile(&a->prefill_ms, 0.5), prof_quantile(&a->decode_ms, 0.5),
                      d.median, d.spread, (long long)a->peak_bytes, a->buffers, a->token_hash,
                      a->logit_hash, a->name,
                      a->unstable            ? " (UNSTABLE over rounds)"
                      : same(a, &x->arms[0]) ? ""
                                             : " (other results)");
    }
    cli_out(t.data, t.n);
    mx_buf_free(&t);
}

static void print_json(const ab *x) {
    json_t *arms = json_array();
    for (size_t i = 0; i < x->n_arms; i++) {
        const ab_arm *a = &x->arms[i];
        prof_diff d = prof_paired(&a->decode_ms, &x->arms[0].decode_ms);
        json_array_append_new(
            arms, json_pack("{s:s, s:s, s:f, s:f, s:f, s:f, s:I, s:f, s:s, s:s, s:b, s:b}", "arm",
                            a->name, "settings", a->settings ? a->settings : "", "prefill_ms",
                            prof_quantile(&a->prefill_ms, 0.5), "decode_ms",
                            prof_quantile(&a->decode_ms, 0.5), "decode_diff_ms", d.median,
                            "decode_spread_ms", d.spread, "peak_bytes", (json_int_t)a->peak_bytes,
                            "buffers_per_token", a->buffers, "token_hash", a->token_hash,
                            "logit_hash", a->logit_hash, "same_results", same(a, &x->arms[0]),
                            "unstable", a->unstable));
    }
    prof_print_json(json_pack("{s:s, s:o, s:i, s:o}", "version", mlxcel_version(), "model",
                              cli_json_text(x->o->model), "rounds", x->o->reps, "arms", arms));
}

// ---- The command -------------------------------------------------------------------------------

// Every setting names a variable that this program reads: a slip of the pen would compare an arm
// with itself.
static bool check_settings(const cli_options *o, const char *settings) {
    bool any = false;
    for (const char *p = settings; *p; p += strcspn(p, " ")) {
        p += strspn(p, " ");
        if (!*p) break;
        size_t n = strcspn(p, "= ");
        bool known = false;
        for (int k = 0; k < MX_KNOB_COUNT; k++) {
            if (k == MX_KNOB_ARG_OTHER) continue; // a pattern, of the server
            known |= mx_str_is((mx_str){p, n}, mx_knob_info_get((mx_knob)k)->name);
        }
        if (p[n] != '=' || !known) {
            cli_usage(o, "--arm %s: expected NAME=VALUE of variables in --help-env", settings);
            return false;
        }
        if (overrides(p + n, p)) { // of two the first would count
            cli_usage(o, "--arm %s: %.*s twice", settings, (int)n, p);
            return false;
        }
        any = true;
    }
    if (!any) cli_usage(o, "--arm: expected NAME=VALUE");
    return any;
}

static int run(ab *x) {
    mx_err err = {0};
    int code = CLI_EXIT_OK;
    bool before = cli_signals_defer(true);
    for (int32_t k = 0; k < x->o->reps && code == CLI_EXIT_OK; k++) {
        for (size_t i = 0; i < x->n_arms && code == CLI_EXIT_OK; i++) {
            ab_arm *a = &x->arms[(i + (size_t)k) % x->n_arms];
            mx_status st = run_arm(x, a, k == 0, &err);
            if (cli_interrupted())
                code = CLI_EXIT_INTERRUPTED;
            else if (st != MX_OK)
                code = cli_fail(x->o, a->exit_code ? a->exit_code : CLI_EXIT_RUN, "%s", err.msg);
        }
    }
    cli_signals_defer(before);
    if (code != CLI_EXIT_OK) return code;
    bool stable = true;
    for (size_t i = 0; i < x->n_arms; i++) stable &= !x->arms[i].unstable;
    if (strcmp(x->o->output, "json") == 0)
        print_json(x);
    else
        print_table(x, x->o->model);
    if (stable && same(&x->arms[1], &x->arms[0])) return CLI_EXIT_OK;
    return cli_fail(x->o, CLI_EXIT_RUN, "an arm is not equal to itself over rounds");
}

int cli_bench_ab(const cli_options *o) {
    for (size_t i = 0; i < o->n_arms; i++) {
        if (!check_settings(o, o->arms[i])) return CLI_EXIT_USAGE;
    }
    ab x = {.o = o, .n_arms = o->n_arms + 2};
    x.arms = mx_calloc(x.n_arms, sizeof *x.arms);
    x.arms[0].name = "no settings";
    x.arms[1].name = "no settings (null)";
    for (size_t i = 0; i < o->n_arms; i++) {
        x.arms[i + 2] = (ab_arm){.name = o->arms[i], .settings = o->arms[i]};
    }
    int code = run(&x);
    for (size_t i = 0; i < x.n_arms; i++) {
        mx_free(x.arms[i].prefill_ms.v);
        mx_free(x.arms[i].decode_ms.v);
    }
    mx_free(x.arms);
    return code;
}
