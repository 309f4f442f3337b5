// What a model will need, before anything is loaded: weights from the headers, KV state from the
// config, activations and overhead by rule. No state.
#include "cli/cli.h"

#include "base/knobs.h"
#include "base/mem.h"
#include "base/os.h"
#include "engine/device.h"
#include "model/model.h"

#include <stdio.h>

static uint64_t tensor_bytes(const mx_weights *w) {
    uint64_t n = 0;
    for (int32_t i = 0; i < w->n_tensors; i++) n += w->tensors[i].n_bytes;
    return n;
}

// The layer groups of a family, as the sequence memory counts them.
static mx_status kv_spec(const mx_weights *w, const mx_family *f, const mx_hparams *hp, bool f32,
                         mx_kv_spec *spec, mx_err *err) {
    for (int32_t il = 0; il < (int32_t)hp->n_layer; il++) {
        mx_layer_spec l;
        mx_layer_spec_make(f, hp, il, &l);
        int32_t g = 0;
        while (g < spec->n_groups && spec->groups[g].window != l.attn.window) g++;
        if (g == MX_MAX_KV_GROUPS) {
            return mx_err_set(err, MX_UNSUPPORTED, "%s: more than %d kinds of layers", w->path,
                              MX_MAX_KV_GROUPS);
        }
        if (g == spec->n_groups) {
            spec->groups[spec->n_groups++] = (mx_kv_group){.n_kv_head = l.attn.n_kv_head,
                                                           .head_dim = l.attn.head_dim,
                                                           .window = l.attn.window,
                                                           .codec = f32 ? MX_F32 : MX_F16};
        }
        spec->groups[g].n_layers++;
    }
    return MX_OK;
}

static mx_status read_model(const mx_weights *w, const mx_family **f, mx_hparams *hp, mx_arena *a,
                            mx_err *err) {
    MX_TRY(mx_family_of(w, f, err));
    return mx_hparams_read(*f, w, hp, a, err);
}

uint64_t cli_kv_bytes(const mx_weights *w, int64_t ctx, bool f32, mx_err *err) {
    mx_arena a;
    mx_arena_init(&a, 0);
    const mx_family *f;
    mx_hparams hp = {0};
    mx_kv_spec spec = {0};
    uint64_t n = 0;
    if (read_model(w, &f, &hp, &a, err) == MX_OK && kv_spec(w, f, &hp, f32, &spec, err) == MX_OK) {
        for (int32_t g = 0; g < spec.n_groups; g++) {
            const mx_kv_group *k = &spec.groups[g];
            int64_t seen = k->window ? MX_MIN(ctx, (int64_t)k->window) : ctx;
            n += 2ull * (uint64_t)k->n_layers * (uint64_t)k->n_kv_head * (uint64_t)k->head_dim *
                 (f32 ? 4u : 2u) * (uint64_t)seen;
        }
    }
    mx_arena_free(&a);
    return n;
}

uint64_t cli_weight_read_bytes(const mx_weights *w) {
    static const char *const heads[] = {"output.weight", "lm_head.weight"};
    static const char *const tables[] = {"token_embd.", "model.embed_tokens."};
    bool head = false;
    for (size_t i = 0; i < MX_COUNT(heads); i++)
        head |= mx_weights_find(w, mx_str_of(heads[i])) != NULL;
    uint64_t n = 0;
    for (int32_t i = 0; i < w->n_tensors; i++) {
        bool table = false;
        for (size_t k = 0; k < MX_COUNT(tables); k++) {
            table |= mx_str_starts(w->tensors[i].name, mx_str_of(tables[k]));
        }
        if (!table || !head) n += w->tensors[i].n_bytes;
    }
    return n;
}

// "q4_1", "affine 4 bit, groups of 64", "bf16": what most bytes are.
static void describe_quant(const mx_weights *w, char *out, size_t cap) {
    const json_t *q = w->config ? mx_config_get(w->config, "quantization") : NULL;
    const json_t *bits = json_object_get(q, "bits"), *group = json_object_get(q, "group_size");
    if (json_is_integer(bits) && json_is_integer(group)) {
        snprintf(out, cap, "affine %lld bit, groups of %lld", (long long)json_integer_value(bits),
                 (long long)json_integer_value(group));
        return;
    }
    uint64_t by_type[MX_DTYPE_COUNT] = {0};
    int best = 0;
    for (int32_t i = 0; i < w->n_tensors; i++)
        by_type[w->tensors[i].dtype] += w->tensors[i].n_bytes;
    for (int t = 0; t < MX_DTYPE_COUNT; t++) {
        if (by_type[t] > by_type[best]) best = t;
    }
    snprintf(out, cap, "%s", mx_dtype_get((mx_dtype)best)->name);
}

static int64_t round_up(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}

static void compare(cli_estimate *e, uint64_t available) {
    uint64_t limit = mx_knob_size(MX_KNOB_MEMORY_LIMIT, UINT64_MAX);
    e->total_bytes = e->weights_bytes + e->kv_bytes + e->cache_bytes + e->activation_bytes +
                     e->staging_bytes + e->overhead_bytes;
    e->limited = limit < available;
    e->budget_bytes = MX_MIN(limit, available);
    e->fits = e->total_bytes <= e->budget_bytes;
}

mx_status cli_estimate_device(cli_estimate *e, const char *device, mx_err *err) {
    const char *want = device && device[0] ? device : mx_knob_text(MX_KNOB_DEVICE);
    if (strcmp(want, "cpu") == 0 || (!want[0] && mx_device_gpus(NULL) <= 0)) return MX_OK;
    mx_backend *b = NULL;
    MX_TRY(mx_device_open(&(mx_device_options){.want = device}, &b, err));
    mx_backend_facts f;
    b->ops->facts(b, &f);
    b->ops->close(b);
    if (f.host_memory) return MX_OK;
    uint64_t later = e->kv_bytes + e->cache_bytes + e->activation_bytes;
    e->staging_bytes = f.upload_bytes > later ? f.upload_bytes - later : 0;
    snprintf(e->device, sizeof e->device, "%s", f.device);
    compare(e, f.available_bytes);
    return MX_OK;
}

mx_status cli_estimate_make(cli_estimate *e, const mx_weights *w, const cli_estimate_for *what,
                            mx_err *err) {
    int64_t ctx = what->ctx, batch = what->batch;
    const char *kv_type = what->kv_type;
    *e = (cli_estimate){.batch = batch, .factor = mx_knob_float(MX_KNOB_HEADROOM_FACTOR)};
    mx_arena a;
    mx_arena_init(&a, 0);
    const mx_family *f;
    mx_hparams hp = {0};
    mx_kv_spec spec = {.storage = MX_KV_DENSE, .page_tokens = 32};
    bool f32 = kv_type ? strcmp(kv_type, "f32") == 0 : mx_knob_flag(MX_KNOB_EXACT);
    mx_status st = read_model(w, &f, &hp, &a, err);
    if (st == MX_OK) st = kv_spec(w, f, &hp, f32, &spec, err);
    mx_arena_free(&a);
    MX_TRY(st);
    int64_t most = hp.max_ctx > 0 ? MX_MIN(hp.max_ctx, (int64_t)8192) : 8192;
    e->ctx = round_up(ctx > 0 ? ctx : most, 256);
    spec.max_ctx = (int32_t)MX_MIN(e->ctx, (int64_t)INT32_MAX);
    spec.max_seqs = (int32_t)batch;
    spec.max_chunk = (int32_t)MX_MIN(e->ctx, (int64_t)512);
    e->kv_type = f32 ? "f32" : "f16";
    e->weights_bytes = tensor_bytes(w);
    e->kv_token_bytes = mx_kv_token_bytes(&spec);
    e->kv_bytes = mx_kv_pool_bytes(&spec);
    e->cache_bytes = what->cache_bytes;
    if (what->kv_budget_bytes) { // stands in for the full contexts, and holds the cache too
        e->kv_bytes = MX_MIN(e->kv_bytes, what->kv_budget_bytes);
        e->cache_bytes = MX_MIN(e->cache_bytes, what->kv_budget_bytes - e->kv_bytes);
    }
    double rows = (double)batch * (double)spec.max_chunk;
    double act =
        mx_knob_float(MX_KNOB_ACTIVATION_MULT) * rows * (double)(hp.d_model + hp.d_ff) * 2 +
        (double)batch * (double)hp.n_vocab * 2;
    e->activation_bytes = (uint64_t)act;
    e->overhead_bytes = (uint64_t)((e->factor - 1) * (double)(e->weights_bytes + e->kv_bytes));
    compare(e, mx_mem_available_bytes());
    describe_quant(w, e->quant, sizeof e->quant);
    return MX_OK;
}

void cli_size_text(uint64_t bytes, mx_buf *out) {
    static const char *const units[] = {"GiB", "MiB", "KiB"};
    for (int i = 0; i < 3; i++) {
        double unit = (double)(1ull << (30 - 10 * i));
        if ((double)bytes < unit && i < 2) continue;
        mx_buf_printf(out, "%.2f %s (%llu bytes)", (double)bytes / unit, units[i],
                      (unsigned long long)bytes);
        return;
    }
}

static void banner_size(const char *label, uint64_t bytes, const char *detail, mx_buf *out) {
    mx_buf_printf(out, "%-16s", label);
    cli_size_text(bytes, out);
    mx_buf_printf(out, "%s\n", detail);
}

void cli_estimate_banner(const cli_estimate *e, const char *model, mx_buf *out) {
    char detail[96];
    mx_buf_puts(out, "=== Memory Estimate ===\n");
    mx_buf_printf(out, "%-16s%s\n%-16s%lld\n", "Model:", model,
                  "Context length:", (long long)e->ctx);
    mx_buf_printf(out, "%-16s%s\n%-16s%s\n", "Quant hint:", e->quant, "KV dtype:", e->kv_type);
    banner_size("Weights:", e->weights_bytes, " (from the file's headers)", out);
    snprintf(detail, sizeof detail, " (%lld x %lld positions)", (long long)e->batch,
             (long long)e->ctx);
    banner_size("KV cache:", e->kv_bytes, detail, out);
    banner_size("  per token:", e->kv_token_bytes, "", out);
    if (e->cache_bytes) banner_size("Prompt cache:", e->cache_bytes, "", out);
    banner_size("Activation:", e->activation_bytes, "", out);
    if (e->staging_bytes)
        banner_size("Staging:", e->staging_bytes, " (while weights are loaded)", out);
    snprintf(detail, sizeof detail, " (%.2f x (weights + KV) - 1)", e->factor);
    banner_size("Allocator ovhd:", e->overhead_bytes, detail, out);
    mx_buf_puts(out, "-----------------------\n");
    banner_size("Total estimate:", e->total_bytes, "", out);
    snprintf(detail, sizeof detail, "%s%.80s%s", e->device[0] ? " (" : "", e->device,
             e->device[0] ? ")" : "");
    banner_size("Available:", e->budget_bytes, e->limited ? " (MLXCEL_MEMORY_LIMIT)" : detail, out);
    mx_buf_puts(out, e->fits ? "FITS: " : "DOES NOT FIT: ");
    cli_size_text(e->fits ? e->budget_bytes - e->total_bytes : e->total_bytes - e->budget_bytes,
                  out);
    mx_buf_puts(out, e->fits ? " of headroom" : " over budget");
}

json_t *cli_estimate_json(const cli_estimate *e) {
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:s, s:b}",
                     "weights_bytes", (json_int_t)e->weights_bytes, "kv_bytes_total",
                     (json_int_t)e->kv_bytes, "prompt_cache_bytes", (json_int_t)e->cache_bytes,
                     "activation_bytes", (json_int_t)e->activation_bytes, "backend_inflight_bytes",
                     (json_int_t)e->staging_bytes, "headroom_bytes", (json_int_t)e->overhead_bytes,
                     "total_bytes", (json_int_t)e->total_bytes, "budget_bytes",
                     (json_int_t)e->budget_bytes, "device", e->device[0] ? e->device : "cpu",
                     "context", (json_int_t)e->ctx, "kv_type", e->kv_type, "fits", e->fits);
}
