// Loading, on the engine thread: device, model, sequence memory, encoder, step buffers, info. And
// the text side (tokenizer, template, end ids), which runs beside it on the opener's thread.
#include "engine/engine_int.h"

#include "backend/cover.h"
#include "base/knobs.h"
#include "base/mem.h"
#include "engine/device.h"
#include "engine/suggest.h"

#include <stdio.h>
#include <string.h>

// ---- Text --------------------------------------------------------------------------------------

static void add_eos(mlxcel_engine *e, int64_t id) {
    if (id < 0 || id > INT32_MAX) return;
    for (int32_t i = 0; i < e->n_eos; i++) {
        if (e->eos_ids[i] == id) return;
    }
    e->eos_ids = mx_realloc(e->eos_ids, (size_t)(e->n_eos + 1) * sizeof *e->eos_ids);
    e->eos_ids[e->n_eos++] = (int32_t)id;
}

static void add_eos_json(mlxcel_engine *e, const json_t *v) {
    if (json_is_integer(v)) add_eos(e, json_integer_value(v));
    for (size_t i = 0; json_is_array(v) && i < json_array_size(v) && i < 256; i++) {
        const json_t *x = json_array_get(v, i);
        if (json_is_integer(x)) add_eos(e, json_integer_value(x));
    }
}

// The end set is a union: config, generation_config, the tokenizer's own, GGUF's.
static void collect_eos(mlxcel_engine *e) {
    if (e->weights.config) add_eos_json(e, mx_config_get(e->weights.config, "eos_token_id"));
    if (e->weights.generation_config) {
        add_eos_json(e, json_object_get(e->weights.generation_config, "eos_token_id"));
    }
    int32_t ids[64];
    int32_t n = mx_tokenizer_eos_ids(e->tok, ids, (int32_t)MX_COUNT(ids));
    for (int32_t i = 0; i < n && i < (int32_t)MX_COUNT(ids); i++) add_eos(e, ids[i]);
}

static void read_suggestions(mlxcel_engine *e) {
    mx_buf text;
    mx_buf_init(&text, 0);
    mlxcel_sampling_init(&e->suggested);
    e->suggested_bits = engine_read_suggestions(&e->weights, &e->suggested, &text);
    e->info_text[4] = mx_buf_take(&text);
}

mx_status engine_load_text(mlxcel_engine *e, mx_err *err) {
    if (e->weights.made) {
        MX_TRY(mx_tokenizer_open_bytes(&e->tok, err));
    } else if (e->weights.container == MX_CONTAINER_GGUF) {
        MX_TRY(mx_tokenizer_open_gguf(&e->tok, &e->weights, err));
    } else {
        char *dir = mx_strdup(e->model_path);
        char *slash = mx_path_is_dir(dir) ? NULL : strrchr(dir, '/');
        if (slash) *slash = 0;
        mx_status st =
            mx_tokenizer_open_dir(&e->tok, slash || mx_path_is_dir(dir) ? dir : ".", err);
        mx_free(dir);
        MX_TRY(st);
    }
    collect_eos(e);
    read_suggestions(e);
    mx_str source = mx_tokenizer_template(e->tok, NULL);
    if (source.n == 0) return MX_OK;
    mx_err why = {0};
    if (mx_template_open(&e->tmpl, source, &why) != MX_OK) {
        mx_log(MX_LOG_WARN, "chat template: %s; chat needs another template", why.msg);
    }
    return MX_OK;
}

// ---- Sizes
// ---------------------------------------------------------------------------------------

static mx_status choose_storage(mlxcel_engine *e, mx_kv_storage *out, mx_err *err) {
    const mlxcel_params *p = &e->params;
    const char *want = p->kv_storage ? p->kv_storage : "auto";
    mx_model_info info;
    mx_model_get_info(e->model, &info);
    bool can_page = info.family->dense_only == NULL;
    if (!mx_kv_choose(want, p->max_batch > 1, p->prefix_cache_bytes > 0, can_page, out,
                      &e->storage_declined)) {
        return mx_err_set(err, MX_INVALID, "KV storage '%s': expected auto, paged or dense", want);
    }
    if (e->storage_declined) {
        mx_log(MX_LOG_INFO, "Paged decode storage requested but unavailable for this worker; "
                            "falling back to dense");
    }
    return MX_OK;
}

static mx_status choose_codec(mlxcel_engine *e, mx_dtype *codec, mx_err *err) {
    const char *want = e->params.kv_type;
    *codec = e->params.exact ? MX_F32 : MX_F16;
    if (!want) return MX_OK;
    if (strcmp(want, "f16") == 0)
        *codec = MX_F16;
    else if (strcmp(want, "f32") == 0)
        *codec = MX_F32;
    else
        return mx_err_set(err, MX_INVALID, "KV type '%s': expected f16 or f32", want);
    return MX_OK;
}

static void set_default(int32_t *field, int64_t value) {
    if (*field <= 0) *field = (int32_t)value;
}

static mx_status choose_sizes(mlxcel_engine *e, const mx_hparams *hp, mx_kv_spec *spec,
                              mx_err *err) {
    mlxcel_params *p = &e->params;
    set_default(&p->ctx_size, MX_MIN(hp->max_ctx, (int64_t)8192));
    if (p->ctx_size > 1 << 30) { // positions are rounded up to pages in 32 bits
        return mx_err_set(err, MX_INVALID, "context size %d: at most %d", p->ctx_size, 1 << 30);
    }
    if (p->ctx_size > hp->max_ctx) {
        mx_log(MX_LOG_WARN, "context size %d is beyond the %lld the model was trained with",
               p->ctx_size, (long long)hp->max_ctx);
    }
    chunk_choose(e);
    mx_kv_storage storage;
    MX_TRY(choose_storage(e, &storage, err));
    *spec = (mx_kv_spec){.storage = storage,
                         .page_tokens = 32,
                         .max_ctx = (p->ctx_size + 31) / 32 * 32, // whole pages
                         .max_seqs = p->max_batch,
                         .max_chunk = p->prefill_chunk,
                         .cache_bytes = p->prefix_cache_bytes,
                         .budget_bytes = p->kv_budget_bytes};
    if (spec->storage == MX_KV_DENSE) spec->cache_bytes = 0;
    mx_dtype codec;
    MX_TRY(choose_codec(e, &codec, err));
    mx_model_kv_groups(e->model, codec, spec);
    return MX_OK;
}

// Temporaries of the largest step, and its logits: about so much, the encoder knows better once it
// has placed them.
static uint64_t scratch_bytes(const mlxcel_engine *e) {
    const mlxcel_params *p = &e->params;
    mx_model_info m;
    mx_model_get_info(e->model, &m);
    bool slow = e->chunk.measure && e->facts.host_memory; // its chunk may become any size
    int32_t chunk = slow ? 32 : p->prefill_chunk;
    uint64_t rows = (uint64_t)MX_MAX(chunk, p->max_batch) + (uint64_t)p->max_batch;
    uint64_t out = (uint64_t)MX_MAX(p->max_batch, 32);
    return 4 * (2 * rows * (uint64_t)(m.hp->d_model + m.hp->d_ff) +
                MX_STEP_SLOTS * out * (uint64_t)m.hp->n_vocab);
}

// weights: bytes that are still to be made resident. What uploading them takes is given back before
// the KV cache is made, unless they come later.
static mx_status check_memory(mlxcel_engine *e, const mx_kv_spec *spec, uint64_t weights,
                              mx_err *err) {
    if (e->params.skip_memory_check) return MX_OK;
    mx_backend_facts f;
    e->backend->ops->facts(e->backend, &f);
    uint64_t limit = mx_knob_size(MX_KNOB_MEMORY_LIMIT, UINT64_MAX);
    uint64_t have = MX_MIN(limit, f.available_bytes), kv = mx_kv_pool_bytes(spec);
    uint64_t scratch = scratch_bytes(e), staging = weights ? f.upload_bytes : 0, later, need;
    bool fits = !__builtin_add_overflow(kv, scratch, &later);
    if (e->params.lazy_weights)
        fits = fits && !__builtin_add_overflow(later, staging, &later);
    else
        later = MX_MAX(later, staging);
    fits = fits && !__builtin_add_overflow(later, weights, &need) && need <= have;
    if (fits) return MX_OK;
    char of_weights[128] = "";
    if (weights) {
        snprintf(of_weights, sizeof of_weights, ", weights %llu bytes",
                 (unsigned long long)weights);
        size_t n = strlen(of_weights);
        if (staging)
            snprintf(of_weights + n, sizeof of_weights - n, ", loading them %llu bytes",
                     (unsigned long long)staging);
    }
    return mx_err_set(err, MX_NOMEM,
                      "KV cache %llu bytes, scratch about %llu bytes%s: more than the %llu bytes "
                      "available%s; lower --ctx-size, the batch or the prefill chunk",
                      (unsigned long long)kv, (unsigned long long)scratch, of_weights,
                      (unsigned long long)have,
                      limit != UINT64_MAX ? " (MLXCEL_MEMORY_LIMIT)" : "");
}

// A device's memory is planned before anything is put there; weights that the host maps are in the
// page cache already, so that what is left afterwards counts.
static mx_status load_weights(mlxcel_engine *e, const mx_kv_spec *spec, uint64_t weights,
                              mx_err *err) {
    bool plan = !e->facts.host_memory;
    if (plan) MX_TRY(check_memory(e, spec, weights, err));
    if (!e->params.lazy_weights) MX_TRY(mx_model_load(e->model, err));
    if (plan) return MX_OK;
    return check_memory(e, spec, e->params.lazy_weights ? weights : 0, err);
}

static void choose_budgets(mlxcel_engine *e) {
    mx_budget_input in = {
        .device = e->facts.kind, .cc_major = e->facts.cc_major, .cc_minor = e->facts.cc_minor};
    mx_model_info info;
    mx_model_get_info(e->model, &info);
    in.family = info.model_type;
    in.n_routed_experts = info.n_routed_experts;
    mx_budget_input_env(&in);
    mx_budget_choose(&in, e->budgets);
    char line[256];
    mx_budget_rule_text(&in, line, sizeof line);
    e->info.budget_rule = e->info_text[5] = mx_strdup(line);
}

// ---- Info
// ----------------------------------------------------------------------------------------

static const char *budget_text(mlxcel_engine *e, int slot, mx_phase p) {
    const mx_budget *b = &e->budgets[p];
    mx_buf t;
    mx_buf_init(&t, 0);
    if (b->max_ops == MX_BUDGET_UNLIMITED)
        mx_buf_puts(&t, "ops unlimited, ");
    else
        mx_buf_printf(&t, "ops %d, ", b->max_ops);
    if (b->max_mb == MX_BUDGET_UNLIMITED)
        mx_buf_puts(&t, "MB unlimited");
    else
        mx_buf_printf(&t, "MB %d", b->max_mb);
    mx_buf_printf(&t, " (%s%s)", b->why, b->elements ? ", counted in elements" : "");
    e->info_text[slot] = mx_buf_take(&t);
    return e->info_text[slot];
}

// "CUDA compute capability 9.0 (sm_90); compiled for [sm_80 sm_90a] (sm_90a)".
static char *capability_text(const mlxcel_engine *e) {
    const mx_backend_facts *f = &e->facts;
    if (f->kind != MX_DEVICE_CUDA) {
        bool blind = e->info.n_gpus >= 0 && !mx_device_compiled_for_cuda();
        return mx_strdup(blind ? "This program was built without CUDA and sees no GPU." : "");
    }
    char cover[32];
    mx_buf t;
    mx_buf_init(&t, 0);
    bool ok = mx_arch_cover(f->compiled, f->cc_major, f->cc_minor, cover, sizeof cover);
    mx_buf_printf(&t, "CUDA compute capability %d.%d (%s); compiled for [%s] (%s)", f->cc_major,
                  f->cc_minor, f->arch, f->compiled, ok ? cover : "not covered");
    return mx_buf_take(&t);
}

static const char *decode_steps_text(const mx_backend_facts *f) {
    if (f->host_memory) return "recorded op lists";
    return f->graphs ? "CUDA graphs" : "kernel by kernel (MLXCEL_CUDA_GRAPHS=0)";
}

static char *fallbacks_text(const mlxcel_engine *e, const mx_family *f) {
    mx_buf t;
    mx_buf_init(&t, 0);
    if (e->gpu_declined.status != MX_OK) {
        mx_buf_printf(&t, "GPU: the CPU instead: %s\n", e->gpu_declined.msg);
    }
    if (e->storage_declined) {
        mx_buf_printf(&t, "paged storage: dense instead, %s cannot: %s\n", f->name, f->dense_only);
    }
    if (e->params.prefix_cache_bytes > 0 && !e->prefix) {
        mx_buf_puts(&t, "prefix cache: off, it needs paged storage\n");
    }
    if (t.n) t.data[--t.n] = 0;
    return t.n ? mx_buf_take(&t) : mx_strdup("");
}

static void fill_info(mlxcel_engine *e) {
    mx_model_info m;
    mx_load_stats l;
    mx_model_get_info(e->model, &m);
    mx_model_get_load_stats(e->model, &l);
    const mx_kv_spec *kv = mx_kv_get_spec(e->kv);
    mlxcel_info *i = &e->info;
    e->info_text[0] = mx_strdup(m.format);
    i->model_path = e->model_path;
    i->family = m.family->name;
    i->format = e->info_text[0];
    i->device = e->facts.device;
    i->arch = e->facts.arch;
    i->n_gpus = mx_device_gpus(e->params.device);
    i->capability = e->info_text[6] = capability_text(e);
    i->kv_storage = kv->storage == MX_KV_PAGED ? "paged" : "dense";
    i->kv_type = kv->groups[0].codec == MX_F32 ? "f32" : "f16";
    i->decode_path = "native batched forward";
    i->decode_steps = decode_steps_text(&e->facts);
    i->fallbacks = e->info_text[7] = fallbacks_text(e, m.family);
    i->budget_prefill = budget_text(e, 1, MX_PHASE_PREFILL);
    i->budget_decode = budget_text(e, 2, MX_PHASE_DECODE);
    i->budget_decode_sync = budget_text(e, 3, MX_PHASE_DECODE_SYNC);
    i->n_threads = e->facts.n_threads;
    i->n_vocab = (int32_t)m.hp->n_vocab;
    i->n_layers = (int32_t)m.hp->n_layer;
    i->ctx_size = e->params.ctx_size;
    i->ctx_train = (int32_t)m.hp->max_ctx;
    i->max_batch = e->params.max_batch;
    i->prefill_chunk = e->params.prefill_chunk;
    i->prefill_chunk_why = e->chunk.why;
    i->exact = e->params.exact;
    i->deterministic = e->facts.deterministic;
    i->n_params = m.n_params;
    i->weight_bytes = m.weight_bytes;
    i->kv_pool_bytes = mx_kv_pool_bytes(kv);
    i->kv_token_bytes = mx_kv_token_bytes(kv);
    i->load_s = l.seconds + e->chunk.seconds;
}

// ---- Load
// ----------------------------------------------------------------------------------------

static mx_status init_steps(mlxcel_engine *e, int32_t n_vocab, mx_err *err) {
    const mlxcel_params *p = &e->params;
    int32_t rows = MX_MAX(p->prefill_chunk, p->max_batch) + p->max_batch;
    e->caps = (mx_step_caps){.max_tok = mx_row_bucket(&e->facts, rows),
                             .max_range = p->max_batch,
                             .max_out = MX_MAX(p->max_batch, 32),
                             .max_edits = e->facts.host_memory ? 0 : 1024 + 64 * p->max_batch,
                             .n_vocab = n_vocab};
    mx_kv_caps(e->kv, &e->caps);
    e->sched = (sched_config){.max_batch = p->max_batch,
                              .prefill_chunk = e->chunk.learn ? 32 : p->prefill_chunk,
                              .grant_interval = p->prefill_grant_interval,
                              .mixed = mx_knob_flag(MX_KNOB_MIXED_STEP),
                              .ageing_ticks = 256,
                              .max_rows = rows,
                              .cost = e->chunk.cost,
                              .step_s = e->chunk.step_s};
    e->ranges = mx_calloc((size_t)e->caps.max_range, sizeof *e->ranges);
    for (int i = 0; i < MX_STEP_SLOTS; i++) {
        e->flights[i].slot = i;
        e->flights[i].rows = mx_calloc((size_t)e->caps.max_range, sizeof *e->flights[i].rows);
    }
    e->device_sampling = mx_knob_flag(MX_KNOB_DEVICE_SAMPLING);
    e->pipeline = !e->facts.host_memory && !mx_knob_is_set(MX_KNOB_FORCE_SYNC);
    return e->backend->ops->step_init(e->backend, &e->caps, e->io, err);
}

mx_status engine_open_steps(mlxcel_engine *e, const mx_kv_spec *spec, int32_t n_vocab,
                            mx_err *err) {
    MX_TRY(mx_kv_open(&e->kv, e->backend, spec, err));
    // On a CPU a plan is cheap to make again, and has no graph.
    int64_t plans = mx_knob_int(MX_KNOB_CUDA_GRAPH_CACHE_SIZE, e->facts.host_memory ? 128 : 2000);
    e->enc = mx_enc_open(e->backend, e->budgets, (int32_t)plans, mx_knob_flag(MX_KNOB_FUSED_OPS));
    return init_steps(e, n_vocab, err);
}

void engine_close_steps(mlxcel_engine *e) {
    mx_enc_close(e->enc);
    e->enc = NULL;
    mx_kv_close(e->kv);
    e->kv = NULL;
    mx_free(e->ranges);
    e->ranges = NULL;
    for (int i = 0; i < MX_STEP_SLOTS; i++) {
        mx_free(e->flights[i].rows);
        e->flights[i].rows = NULL;
    }
}

mx_status engine_load(mlxcel_engine *e, mx_err *err) {
    e->params.exact |= mx_knob_flag(MX_KNOB_EXACT);
    mx_device_options device = {.want = e->params.device,
                                .n_threads = e->params.n_threads,
                                .deterministic = e->params.deterministic,
                                .exact = e->params.exact,
                                .declined = &e->gpu_declined};
    MX_TRY(mx_device_open(&device, &e->backend, err));
    const char *how = mx_knob_text(MX_KNOB_WEIGHT_MATERIALIZATION);
    if (strcmp(how, "lazy") == 0)
        e->params.lazy_weights = true;
    else if (strcmp(how, "eager") != 0) {
        return mx_err_set(err, MX_INVALID,
                          "MLXCEL_WEIGHT_MATERIALIZATION=%s: expected eager or lazy", how);
    }
    MX_TRY(mx_model_open(&e->model, e->backend, &e->weights, true, err));
    mx_model_info info;
    mx_model_get_info(e->model, &info);
    e->backend->ops->facts(e->backend, &e->facts);
    mx_kv_spec spec;
    MX_TRY(choose_sizes(e, info.hp, &spec, err));
    choose_budgets(e);
    MX_TRY(load_weights(e, &spec, info.weight_bytes, err));
    int32_t n_vocab = (int32_t)info.hp->n_vocab;
    if (e->chunk.measure) {
        MX_TRY(chunk_measure(e, &spec, n_vocab, err));
        spec.max_chunk = e->params.prefill_chunk;
    }
    MX_TRY(engine_open_steps(e, &spec, n_vocab, err));
    if (spec.cache_bytes > 0) e->prefix = mx_prefix_open(e->kv, spec.cache_bytes);
    e->sampler = mx_sampler_open(n_vocab);
    mx_log(MX_LOG_DEBUG, "prefill chunk: %d tokens (%s)", e->params.prefill_chunk, e->chunk.why);
    fill_info(e);
    e->stats.storage_fallbacks = e->storage_declined;
    return MX_OK;
}

void engine_unload(mlxcel_engine *e) {
    mx_sampler_close(e->sampler);
    mx_prefix_close(e->prefix);
    engine_close_steps(e);
    mx_model_close(e->model);
    if (e->backend) e->backend->ops->close(e->backend);
    mx_free(e->running);
    mx_free(e->row_tok);
    mx_free(e->row_admit);
    mx_free(e->row_seq);
    mx_free(e->dry_breakers);
}
