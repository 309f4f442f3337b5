// Commands about models that run nothing: inspect, list, rm, arch. No state.
#include "cli/cli.h"

#include "backend/cpu/cpu.h"
#include "base/mem.h"
#include "base/os.h"
#include "format/store.h"
#include "model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static int print_json(json_t *j) {
    CHECK(j != NULL);
    char *text = json_dumps(j, JSON_INDENT(2));
    cli_outs(text);
    cli_outs("\n");
    free(text);
    json_decref(j);
    return CLI_EXIT_OK;
}

static int print_text(mx_buf *b) {
    cli_out(b->data, b->n);
    mx_buf_free(b);
    return CLI_EXIT_OK;
}

// ---- inspect ----

typedef struct inspected {
    const char *path;
    const mx_weights *w;
    const mx_model *model;
    mx_model_info info;
    cli_estimate estimate;
    uint64_t count[MX_DTYPE_COUNT], bytes[MX_DTYPE_COUNT];
} inspected;

static const struct {
    const char *name;
    size_t offset;
} shown_ints[] =
    {
        {"n_layer", offsetof(mx_hparams, n_layer)},
        {"d_model", offsetof(mx_hparams, d_model)},
        {"n_head", offsetof(mx_hparams, n_head)},
        {"n_kv_head", offsetof(mx_hparams, n_kv_head)},
        {"head_dim", offsetof(mx_hparams, head_dim)},
        {"d_ff", offsetof(mx_hparams, d_ff)},
        {"n_vocab", offsetof(mx_hparams, n_vocab)},
        {"max_ctx", offsetof(mx_hparams, max_ctx)},
        {"window", offsetof(mx_hparams, window)},
},
  shown_reals[] = {
      {"rope_theta", offsetof(mx_hparams, rope_theta)},
      {"rope_factor", offsetof(mx_hparams, rope_factor)},
      {"norm_eps", offsetof(mx_hparams, norm_eps)},
};

static int64_t shown_int(const inspected *x, size_t i) {
    int64_t v;
    memcpy(&v, (const char *)x->info.hp + shown_ints[i].offset, sizeof v);
    return v;
}
static double shown_real(const inspected *x, size_t i) {
    double v;
    memcpy(&v, (const char *)x->info.hp + shown_reals[i].offset, sizeof v);
    return v;
}

static json_t *config_json(const inspected *x) {
    json_t *c = json_object();
    for (size_t i = 0; i < MX_COUNT(shown_ints); i++) {
        json_object_set_new(c, shown_ints[i].name, json_integer(shown_int(x, i)));
    }
    for (size_t i = 0; i < MX_COUNT(shown_reals); i++) {
        json_object_set_new(c, shown_reals[i].name, json_real(shown_real(x, i)));
    }
    return c;
}

static json_t *types_json(const inspected *x) {
    json_t *all = json_array();
    for (int t = 0; t < MX_DTYPE_COUNT; t++) {
        if (x->count[t] == 0) continue;
        json_array_append_new(
            all, json_pack("{s:s, s:I, s:I}", "type", mx_dtype_get((mx_dtype)t)->name, "count",
                           (json_int_t)x->count[t], "bytes", (json_int_t)x->bytes[t]));
    }
    return all;
}

static int inspect_json(const inspected *x) {
    json_t *towers = json_array();
    for (int32_t i = 0; i < x->info.n_towers; i++) {
        json_array_append_new(towers, cli_json_text(mx_model_tower(x->model, i)));
    }
    return print_json(json_pack("{s:o, s:s, s:s, s:s, s:I, s:o, s:{s:i, s:o}, s:o, s:o}", "path",
                                cli_json_text(x->path), "family", x->info.family->name, "format",
                                x->info.format, "quantization", x->estimate.quant, "n_params",
                                (json_int_t)x->info.n_params, "config", config_json(x), "tensors",
                                "count", (int)x->w->n_tensors, "by_type", types_json(x), "towers",
                                towers, "memory", cli_estimate_json(&x->estimate)));
}

static int inspect_text(const inspected *x) {
    mx_buf b;
    mx_buf_init(&b, 0);
    mx_buf_printf(&b, "%-16s%s\n%-16s%s\n%-16s%s\n%-16s%llu\n", "Model:", x->path,
                  "Family:", x->info.family->name, "Format:", x->info.format,
                  "Parameters:", (unsigned long long)x->info.n_params);
    mx_buf_puts(&b, "Config:\n");
    for (size_t i = 0; i < MX_COUNT(shown_ints); i++) {
        mx_buf_printf(&b, "  %-14s%lld\n", shown_ints[i].name, (long long)shown_int(x, i));
    }
    for (size_t i = 0; i < MX_COUNT(shown_reals); i++) {
        mx_buf_printf(&b, "  %-14s%.9g\n", shown_reals[i].name, shown_real(x, i));
    }
    mx_buf_printf(&b, "Tensors: %d\n", x->w->n_tensors);
    for (int t = 0; t < MX_DTYPE_COUNT; t++) {
        if (x->count[t] == 0) continue;
        mx_buf_printf(&b, "  %-14s%llu, ", mx_dtype_get((mx_dtype)t)->name,
                      (unsigned long long)x->count[t]);
        cli_size_text(x->bytes[t], &b);
        mx_buf_putc(&b, '\n');
    }
    mx_buf_printf(&b, "Towers (not read): %d tensors\n", x->info.n_towers);
    for (int32_t i = 0; i < MX_MIN(x->info.n_towers, 4); i++) {
        mx_buf_printf(&b, "  %s%s\n", mx_model_tower(x->model, i),
                      i == 3 && x->info.n_towers > 4 ? " ..." : "");
    }
    cli_estimate_banner(&x->estimate, x->path, &b);
    mx_buf_putc(&b, '\n');
    return print_text(&b);
}

// Binds without reading weights: every tensor is checked against the family's table.
static mx_status inspect_model(const cli_options *o, inspected *x, mx_backend **b, mx_model **m,
                               mx_err *err) {
    MX_TRY(mx_cpu_open(1, b, err));
    MX_TRY(mx_model_open(m, *b, x->w, true, err));
    x->model = *m;
    mx_model_get_info(*m, &x->info);
    for (int32_t i = 0; i < x->w->n_tensors; i++) {
        x->count[x->w->tensors[i].dtype]++;
        x->bytes[x->w->tensors[i].dtype] += x->w->tensors[i].n_bytes;
    }
    cli_estimate_for what = {.ctx = o->max_tokens, .batch = o->batch, .kv_type = o->kv_type};
    MX_TRY(cli_estimate_make(&x->estimate, x->w, &what, err));
    return cli_estimate_device(&x->estimate, o->device, err);
}

int cli_inspect(const cli_options *o) {
    const char *model = o->positional ? o->positional : o->model;
    if (!model) return cli_usage(o, "expected a model: MODEL or -m MODEL");
    if (o->positional && o->model) return cli_usage(o, "MODEL and -m: expected one of them");
    char *path;
    if (!cli_resolve(o, model, &path)) return CLI_EXIT_LOAD;
    mx_weights w = {0};
    mx_err err = {0};
    inspected x = {.path = path, .w = &w};
    mx_backend *b = NULL;
    mx_model *m = NULL;
    int code;
    mx_status st = mx_weights_open(&w, path, &err);
    bool open = st == MX_OK;
    if (open) st = inspect_model(o, &x, &b, &m, &err);
    if (st != MX_OK)
        code = cli_fail(o, CLI_EXIT_LOAD, "%s", err.msg);
    else
        code = o->json ? inspect_json(&x) : inspect_text(&x);
    mx_model_close(m);
    if (b) b->ops->close(b);
    if (open) mx_weights_close(&w);
    mx_free(path);
    return code;
}

// ---- list ----

static int by_size(const void *a, const void *b) {
    const mx_store_entry *x = a, *y = b;
    if (x->size_bytes != y->size_bytes) return x->size_bytes > y->size_bytes ? -1 : 1;
    return strcmp(x->repo_id, y->repo_id);
}
static int by_age(const void *a, const void *b) {
    const mx_store_entry *x = a, *y = b;
    if (x->modified < y->modified || x->modified > y->modified) {
        return x->modified > y->modified ? -1 : 1;
    }
    return strcmp(x->repo_id, y->repo_id);
}

static int list_json(const mx_store_entry *e, size_t n) {
    json_t *all = json_array();
    for (size_t i = 0; i < n; i++) {
        json_array_append_new(
            all,
            json_pack("{s:o, s:I, s:o, s:I, s:b}", "repo_id", cli_json_text(e[i].repo_id),
                      "size_bytes", (json_int_t)e[i].size_bytes, "path", cli_json_text(e[i].path),
                      "modified", (json_int_t)e[i].modified, "read_only", e[i].read_only));
    }
    return print_json(all);
}

static void list_row(const cli_options *o, const mx_store_entry *e, int width, mx_buf *b) {
    if (o->quiet) {
        mx_buf_printf(b, "%s\n", e->repo_id);
        return;
    }
    char when[32] = "";
    time_t t = (time_t)e->modified;
    struct tm tm;
    if (localtime_r(&t, &tm)) strftime(when, sizeof when, "%Y-%m-%d %H:%M", &tm);
    mx_buf_printf(b, "%-*s  %9.1f MB  %s", width, e->repo_id, (double)e->size_bytes * 1e-6, when);
    if (o->verbose) mx_buf_printf(b, "  %s%s", e->path, e->read_only ? " (read only)" : "");
    mx_buf_putc(b, '\n');
}

int cli_list(const cli_options *o) {
    mx_store_entry *e;
    size_t n;
    mx_err err = {0};
    if (o->json && o->quiet) return cli_usage(o, "--json and --quiet: expected one of them");
    if (o->verbose && o->quiet) return cli_usage(o, "--verbose and --quiet: expected one of them");
    if (mx_store_list(o->models_dir, &e, &n, &err) != MX_OK) {
        return cli_fail(o, CLI_EXIT_RUN, "%s", err.msg);
    }
    if (n && strcmp(o->sort, "size") == 0) qsort(e, n, sizeof *e, by_size);
    if (n && strcmp(o->sort, "modified") == 0) qsort(e, n, sizeof *e, by_age);
    int code = CLI_EXIT_OK, width = 0;
    if (o->json) {
        code = list_json(e, n);
    } else {
        mx_buf b;
        mx_buf_init(&b, 0);
        for (size_t i = 0; i < n; i++) width = MX_MAX(width, (int)strlen(e[i].repo_id));
        for (size_t i = 0; i < n; i++) list_row(o, &e[i], width, &b);
        if (n == 0) cli_note("No models in the store.");
        print_text(&b);
    }
    mx_store_free(e, n);
    return code;
}

// ---- rm ----

// True when the answer is yes.
static bool confirm(const char *repo) {
    fprintf(stderr, "Remove %s? [y/N] ", repo);
    fflush(stderr);
    mx_buf line;
    mx_buf_init(&line, 4096);
    bool yes = cli_file_line(stdin, &line) && line.n && (line.data[0] | 0x20) == 'y';
    mx_buf_free(&line);
    return yes;
}

int cli_rm(const cli_options *o) {
    mx_err err = {0};
    if (!o->yes && !cli_in_is_terminal()) {
        return cli_usage(o, "expected --yes when standard input is not a terminal");
    }
    if (!o->yes && !confirm(o->positional)) {
        cli_note("Nothing was removed.");
        return CLI_EXIT_RUN;
    }
    if (mx_store_remove(o->models_dir, o->positional, &err) != MX_OK) {
        return cli_fail(o, CLI_EXIT_RUN, "%s", err.msg);
    }
    cli_note("Removed %s.", o->positional);
    return CLI_EXIT_OK;
}

// ---- arch ----

static void arch_row(const mx_family *f, mx_buf *b) {
    mx_buf_printf(b, "%-10s model_type", f->name);
    for (const char *const *t = f->hf_types; *t; t++) mx_buf_printf(b, " %s", *t);
    mx_buf_puts(b, "; GGUF");
    for (const char *const *t = f->gguf_archs; *t; t++) mx_buf_printf(b, " %s", *t);
    mx_buf_putc(b, '\n');
}

int cli_arch(const cli_options *o) {
    size_t n;
    const mx_family *const *all = mx_families(&n);
    mx_buf b;
    mx_buf_init(&b, 0);
    if (!o->positional) {
        for (size_t i = 0; i < n; i++) arch_row(all[i], &b);
        return print_text(&b);
    }
    const mx_family *f = mx_family_find(o->positional);
    if (f) {
        mx_family_print(f, &b);
        return print_text(&b);
    }
    for (size_t i = 0; i < n; i++) mx_buf_printf(&b, "%s %s", i ? "," : "", all[i]->name);
    int code = cli_usage(o, "unknown family \"%s\"; families are%s", o->positional, b.data);
    mx_buf_free(&b);
    return code;
}
