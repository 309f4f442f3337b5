// Reading a family's config rows from config.json or GGUF metadata into hparams, with bounds.
// No state. Does not look at tensors except for the vocabulary size.
#include "model/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define FAMILY(name) extern const mx_family mx_family_##name;
#include "model/families.def"
#undef FAMILY

static const mx_family *const families[] = {
#define FAMILY(name) &mx_family_##name,
#include "model/families.def"
#undef FAMILY
};

const mx_family *const *mx_families(size_t *n) {
    *n = MX_COUNT(families);
    return families;
}

static bool in_list(const char *const *list, mx_str s) {
    for (; *list; list++) {
        if (mx_str_is(s, *list)) return true;
    }
    return false;
}

const mx_family *mx_family_find(const char *name) {
    for (size_t i = 0; i < MX_COUNT(families); i++) {
        if (strcmp(families[i]->name, name) == 0 ||
            in_list(families[i]->hf_types, mx_str_of(name))) {
            return families[i];
        }
    }
    return NULL;
}

static const json_t *get_path(const json_t *obj, const char *path, size_t n) {
    while (obj && n) {
        size_t part = 0;
        while (part < n && path[part] != '.') part++;
        char key[128];
        if (part >= sizeof key) return NULL;
        memcpy(key, path, part);
        key[part] = 0;
        obj = json_object_get(obj, key);
        size_t skip = part < n ? part + 1 : part;
        path += skip;
        n -= skip;
    }
    return obj && !json_is_null(obj) ? obj : NULL;
}

static const json_t *config_get_n(const json_t *config, const char *path, size_t n) {
    static const char *const inner[] = {"text_config", "language_config"};
    for (size_t i = 0; i < MX_COUNT(inner); i++) {
        const json_t *v = get_path(json_object_get(config, inner[i]), path, n);
        if (v) return v;
    }
    return get_path(config, path, n);
}

const json_t *mx_config_get(const json_t *config, const char *path) {
    return config_get_n(config, path, strlen(path));
}

int32_t mx_config_routed_experts(const json_t *config) {
    static const char *const keys[] = {"num_local_experts", "num_experts", "n_routed_experts",
                                       "num_routed_experts", "moe_num_experts"};
    for (size_t i = 0; i < MX_COUNT(keys); i++) {
        const json_t *v = mx_config_get(config, keys[i]);
        json_int_t n = json_is_integer(v) ? json_integer_value(v) : 0;
        if (n > 0) return n < INT32_MAX ? (int32_t)n : INT32_MAX;
    }
    return 0;
}

mx_status mx_family_of(const mx_weights *w, const mx_family **out, mx_err *err) {
    mx_str type = {0};
    bool gguf = w->container == MX_CONTAINER_GGUF;
    if (gguf) {
        if (!mx_gguf_get_str(w, "general.architecture", &type)) {
            return mx_err_set(err, MX_FORMAT, "%s: general.architecture is missing", w->path);
        }
    } else {
        const json_t *t = json_object_get(w->config, "model_type");
        if (!json_is_string(t)) {
            return mx_err_set(err, MX_FORMAT, "%s: config.json: model_type is missing", w->path);
        }
        type = (mx_str){json_string_value(t), json_string_length(t)};
    }
    for (size_t i = 0; i < MX_COUNT(families); i++) {
        if (!in_list(gguf ? families[i]->gguf_archs : families[i]->hf_types, type)) continue;
        *out = families[i];
        return MX_OK;
    }
    return mx_err_set(err, MX_UNSUPPORTED, "%s: Unsupported model type: %.*s", w->path,
                      (int)MX_MIN(type.n, 64u), type.p);
}

// ---- Rows ------------------------------------------------------------------------------------

// The value of one row as a double; found = false when absent. Bad types are errors.
static mx_status json_number(const json_t *v, const mx_config_row *r, const char *key, double *out,
                             mx_err *err) {
    if (r->type == MX_FIELD_BOOL && json_is_boolean(v)) {
        *out = json_is_true(v);
        return MX_OK;
    }
    if (r->type != MX_FIELD_BOOL && json_is_number(v)) {
        *out = json_number_value(v);
        return MX_OK;
    }
    return mx_err_set(err, MX_FORMAT, "config.json: %s: not a %s", key,
                      r->type == MX_FIELD_BOOL ? "boolean" : "number");
}

static mx_status row_from_json(const json_t *config, const mx_config_row *r, double *out,
                               bool *found, mx_err *err) {
    for (const char *p = r->hf; *p;) {
        size_t n = strcspn(p, "|");
        const json_t *v = config_get_n(config, p, n);
        if (v) {
            char key[160];
            snprintf(key, sizeof key, "%.*s", (int)n, p);
            *found = true;
            return json_number(v, r, key, out, err);
        }
        p += n + (p[n] == '|');
    }
    return MX_OK;
}

static mx_status row_from_gguf(const mx_weights *w, mx_str arch, const mx_config_row *r,
                               double *out, bool *found, mx_err *err) {
    for (const char *p = r->gguf; *p;) {
        size_t n = strcspn(p, "|");
        char key[200];
        snprintf(key, sizeof key, "%.*s.%.*s", (int)MX_MIN(arch.n, 60u), arch.p, (int)n, p);
        if (mx_gguf_find(w, key)) {
            bool b;
            *found = true;
            if (r->type == MX_FIELD_BOOL && mx_gguf_get_bool(w, key, &b)) {
                *out = b;
                return MX_OK;
            }
            if (r->type != MX_FIELD_BOOL && mx_gguf_get_f64(w, key, out)) return MX_OK;
            return mx_err_set(err, MX_FORMAT, "%s: %s: wrong type", w->path, key);
        }
        p += n + (p[n] == '|');
    }
    return MX_OK;
}

static mx_status read_row(const mx_weights *w, mx_str arch, const mx_config_row *r, mx_hparams *hp,
                          mx_err *err) {
    double v = r->dflt;
    bool found = false, gguf = w->container == MX_CONTAINER_GGUF;
    if (gguf)
        MX_TRY(row_from_gguf(w, arch, r, &v, &found, err));
    else
        MX_TRY(row_from_json(w->config, r, &v, &found, err));
    const char *key = gguf && r->gguf[0] ? r->gguf : r->hf;
    if (!found && r->required) {
        return mx_err_set(err, MX_FORMAT, "%s: %s is missing", w->path, key);
    }
    bool whole = r->type == MX_FIELD_FLOAT || v == floor(v);
    if (found && (!isfinite(v) || v < r->min || v > r->max || !whole)) {
        return mx_err_set(err, MX_FORMAT, "%s: %s is %g, expected %s%g to %g", w->path, key, v,
                          whole ? "" : "a whole number from ", r->min, r->max);
    }
    char *field = (char *)hp + r->offset;
    int64_t i = (int64_t)v;
    if (r->type == MX_FIELD_FLOAT)
        memcpy(field, &v, sizeof v);
    else
        memcpy(field, &i, sizeof i);
    return MX_OK;
}

// ---- What rows cannot say ----------------------------------------------------------------------

static mx_status wrong_type(const mx_weights *w, const char *key, const char *expected,
                            mx_err *err) {
    return mx_err_set(err, MX_FORMAT, "%s: config.json: %s: not %s", w->path, key, expected);
}

static bool is_end_id(const json_t *v) {
    return json_is_integer(v) && json_integer_value(v) <= INT32_MAX; // negative: none
}

static mx_status check_end_ids(const mx_weights *w, const json_t *v, const char *key, mx_err *err) {
    bool ok = !v || json_is_null(v) || is_end_id(v) || json_is_array(v);
    for (size_t i = 0; json_is_array(v) && i < json_array_size(v); i++) {
        ok = ok && is_end_id(json_array_get(v, i));
    }
    return ok ? MX_OK : wrong_type(w, key, "a token id or a list of them", err);
}

// Blocks and lists that are looked into, not read by rows: of another type they would not be seen.
static mx_status check_types(const mx_weights *w, mx_err *err) {
    static const char *const inner[] = {"text_config", "language_config", "quantization",
                                        "quantization_config"};
    for (size_t i = 0; i < MX_COUNT(inner); i++) {
        const json_t *v = json_object_get(w->config, inner[i]);
        if (v && !json_is_null(v) && !json_is_object(v)) {
            return wrong_type(w, inner[i], "an object", err);
        }
    }
    static const char *const blocks[] = {"rope_scaling", "rope_parameters"};
    for (size_t i = 0; i < MX_COUNT(blocks); i++) {
        const json_t *v = mx_config_get(w->config, blocks[i]);
        if (v && !json_is_object(v)) return wrong_type(w, blocks[i], "an object", err);
    }
    const json_t *own = mx_config_get(w->config, "eos_token_id");
    MX_TRY(check_end_ids(w, own, "eos_token_id", err));
    const json_t *other = json_object_get(w->generation_config, "eos_token_id");
    return check_end_ids(w, other, "eos_token_id (of generation_config.json)", err);
}

static mx_status read_rope_type(const mx_weights *w, mx_str arch, mx_hparams *hp, mx_err *err) {
    static const char *const paths[] = {"rope_scaling.rope_type", "rope_scaling.type",
                                        "rope_parameters.rope_type",
                                        "rope_parameters.full_attention.rope_type"};
    mx_str type = {0};
    if (w->container == MX_CONTAINER_GGUF) {
        char key[128];
        snprintf(key, sizeof key, "%.*s.rope.scaling.type", (int)MX_MIN(arch.n, 60u), arch.p);
        mx_gguf_get_str(w, key, &type);
    } else {
        for (size_t i = 0; i < MX_COUNT(paths) && !type.p; i++) {
            const json_t *v = mx_config_get(w->config, paths[i]);
            if (v && !json_is_string(v)) return wrong_type(w, paths[i], "a string", err);
            if (v) type = (mx_str){json_string_value(v), json_string_length(v)};
        }
        if (!type.p && mx_config_get(w->config, "rope_scaling.factor")) {
            return wrong_type(w, "rope_scaling.rope_type", "there, but a factor is", err);
        }
    }
    if (!type.p || mx_str_is(type, "default") || mx_str_is(type, "none")) {
        hp->rope_type = MX_ROPE_DEFAULT;
        if (w->container == MX_CONTAINER_GGUF && !type.p && hp->rope_factor != 1) {
            hp->rope_type = MX_ROPE_LINEAR;
        }
    } else if (mx_str_is(type, "linear")) {
        hp->rope_type = MX_ROPE_LINEAR;
    } else if (mx_str_is(type, "llama3")) {
        hp->rope_type = MX_ROPE_LLAMA3;
    } else {
        return mx_err_set(err, MX_UNSUPPORTED, "%s: rope scaling type '%.*s' is not supported",
                          w->path, (int)MX_MIN(type.n, 64u), type.p);
    }
    return MX_OK;
}

static mx_status read_layer_types(const mx_weights *w, mx_hparams *hp, mx_arena *a, mx_err *err) {
    const json_t *list = w->config ? mx_config_get(w->config, "layer_types") : NULL;
    if (!list) return MX_OK;
    if (!json_is_array(list) || json_array_size(list) != (size_t)hp->n_layer) {
        return mx_err_set(err, MX_FORMAT, "config.json: layer_types: not a list of %lld entries",
                          (long long)hp->n_layer);
    }
    hp->layer_window = MX_ARENA_ARRAY(a, uint8_t, hp->n_layer);
    for (size_t i = 0; i < (size_t)hp->n_layer; i++) {
        const char *s = json_string_value(json_array_get(list, i));
        if (s && strcmp(s, "sliding_attention") == 0) {
            hp->layer_window[i] = 1;
        } else if (!s || strcmp(s, "full_attention") != 0) {
            return mx_err_set(err, MX_UNSUPPORTED, "config.json: layer_types[%zu]: '%s'", i,
                              s ? s : "not a string");
        }
    }
    return MX_OK;
}

// Rows of the embedding decide the vocabulary; a config may round it differently.
static mx_status find_vocab(const mx_family *f, const mx_weights *w, mx_hparams *hp, mx_err *err) {
    static const char *const prefixes[] = {"", "language_model.", "model.language_model.", ""};
    for (size_t r = 0; r < f->n_weights; r++) {
        if (f->weights[r].slot != MX_W_EMBED) continue;
        for (size_t i = 0; i < MX_COUNT(prefixes); i++) {
            char name[160];
            if (w->container == MX_CONTAINER_GGUF) {
                snprintf(name, sizeof name, "%s.weight", f->weights[r].gguf);
            } else {
                const char *hf = f->weights[r].hf;
                if (i >= 2) hf += strlen("model.");
                snprintf(name, sizeof name, "%s%s.weight", prefixes[i], hf);
            }
            const mx_wtensor *t = mx_weights_find(w, mx_str_of(name));
            if (t && t->n_dim == 2 && t->dim[0] > 0 && t->dim[0] <= 1 << 22) {
                hp->n_vocab = t->dim[0];
                return MX_OK;
            }
        }
    }
    if (hp->n_vocab > 0) return MX_OK;
    return mx_err_set(err, MX_FORMAT, "%s: no embedding table and no vocab_size", w->path);
}

// What the forward pass of every family does; a config that says otherwise is refused.
static mx_status check_activation(const mx_family *f, const mx_weights *w, mx_err *err) {
    static const char *const silu[] = {"silu", "swish", NULL};
    static const char *const gelu[] = {"gelu_pytorch_tanh", "gelu_new", NULL};
    const json_t *v = mx_config_get(w->config, "hidden_activation");
    if (!v) v = mx_config_get(w->config, "hidden_act");
    if (!v) return MX_OK;
    if (!json_is_string(v)) return wrong_type(w, "hidden_act", "a string", err);
    mx_str s = {json_string_value(v), json_string_length(v)};
    if (in_list(f->act == MX_ACT_SILU ? silu : gelu, s)) return MX_OK;
    return mx_err_set(err, MX_UNSUPPORTED,
                      "%s: config.json: activation '%.*s' is not supported in family %s", w->path,
                      (int)MX_MIN(s.n, 64u), s.p, f->name);
}

static mx_status check_rotation(const mx_weights *w, mx_str arch, const mx_hparams *hp,
                                mx_err *err) {
    static const char *const paths[] = {"partial_rotary_factor",
                                        "rope_parameters.partial_rotary_factor",
                                        "rope_parameters.full_attention.partial_rotary_factor"};
    for (size_t i = 0; w->config && i < MX_COUNT(paths); i++) {
        const json_t *v = mx_config_get(w->config, paths[i]);
        if (v && !json_is_number(v)) return wrong_type(w, paths[i], "a number", err);
        if (!v || json_number_value(v) == 1) continue;
        return mx_err_set(err, MX_UNSUPPORTED, "%s: config.json: %s %g is not supported", w->path,
                          paths[i], json_number_value(v));
    }
    static const char *const keys[] = {"rope.dimension_count", "attention.value_length"};
    for (size_t i = 0; w->container == MX_CONTAINER_GGUF && i < MX_COUNT(keys); i++) {
        char key[128];
        int64_t n;
        snprintf(key, sizeof key, "%.*s.%s", (int)MX_MIN(arch.n, 60u), arch.p, keys[i]);
        if (!mx_gguf_get_i64(w, key, &n) || n == hp->head_dim) continue;
        return mx_err_set(err, MX_UNSUPPORTED, "%s: %s is %lld with heads of %lld", w->path, key,
                          (long long)n, (long long)hp->head_dim);
    }
    return MX_OK;
}

static mx_status derive(const mx_weights *w, mx_hparams *hp, mx_err *err) {
    if (hp->n_kv_head == 0) hp->n_kv_head = hp->n_head;
    if (hp->n_head % hp->n_kv_head != 0) {
        return mx_err_set(err, MX_FORMAT, "%s: %lld heads are no multiple of %lld KV heads",
                          w->path, (long long)hp->n_head, (long long)hp->n_kv_head);
    }
    if (hp->head_dim == 0) {
        if (hp->d_model % hp->n_head != 0) {
            return mx_err_set(err, MX_FORMAT, "%s: hidden size %lld is no multiple of %lld heads",
                              w->path, (long long)hp->d_model, (long long)hp->n_head);
        }
        hp->head_dim = hp->d_model / hp->n_head;
    }
    if (hp->head_dim % 2 != 0 || hp->head_dim > 512) {
        return mx_err_set(err, MX_UNSUPPORTED, "%s: head_dim %lld", w->path,
                          (long long)hp->head_dim);
    }
    if (hp->max_ctx == 0) hp->max_ctx = 4096;
    if (hp->query_scale_dim == 0) hp->query_scale_dim = (double)hp->head_dim;
    if (!hp->use_window) hp->window = 0;
    return MX_OK;
}

mx_status mx_hparams_read(const mx_family *f, const mx_weights *w, mx_hparams *hp, mx_arena *a,
                          mx_err *err) {
    *hp = (mx_hparams){.use_window = 1};
    if (w->config) MX_TRY(check_types(w, err));
    mx_str arch = {0};
    if (w->container == MX_CONTAINER_GGUF) mx_gguf_get_str(w, "general.architecture", &arch);
    for (size_t i = 0; i < f->n_config; i++) MX_TRY(read_row(w, arch, &f->config[i], hp, err));
    MX_TRY(read_rope_type(w, arch, hp, err));
    MX_TRY(read_layer_types(w, hp, a, err));
    MX_TRY(find_vocab(f, w, hp, err));
    MX_TRY(derive(w, hp, err));
    MX_TRY(check_rotation(w, arch, hp, err));
    if (w->config) MX_TRY(check_activation(f, w, err));
    return f->finish ? f->finish(hp, w, a, err) : MX_OK;
}

void mx_layer_spec_make(const mx_family *f, const mx_hparams *hp, int32_t il, mx_layer_spec *out) {
    *out = (mx_layer_spec){.act = f->act, .last = il == hp->n_layer - 1};
    out->attn = (mx_attn_spec){.n_head = (int32_t)hp->n_head,
                               .n_kv_head = (int32_t)hp->n_kv_head,
                               .head_dim = (int32_t)hp->head_dim,
                               .scale = (float)(1.0 / sqrt(hp->query_scale_dim)),
                               .softcap = (float)hp->attn_softcap,
                               .eps = (float)hp->norm_eps,
                               .window = (int32_t)hp->window};
    bool windowed = hp->layer_window ? hp->layer_window[il] : il >= hp->window_from;
    if (!windowed) out->attn.window = 0;
    if (f->layer) f->layer(hp, il, out);
}

int64_t mx_dim_value(mx_dim d, const mx_hparams *hp) {
    switch (d) {
    case MX_DIM_NONE: return 1;
    case MX_DIM_D: return hp->d_model;
    case MX_DIM_Q: return hp->n_head * hp->head_dim;
    case MX_DIM_KV: return hp->n_kv_head * hp->head_dim;
    case MX_DIM_FF: return hp->d_ff;
    case MX_DIM_V: return hp->n_vocab;
    case MX_DIM_HEAD: return hp->head_dim;
    case MX_DIM_HALF_ROT: return hp->head_dim / 2;
    }
    return 0;
}

const char *mx_dim_name(mx_dim d) {
    static const char *const names[] = {"1",  "hidden", "heads x head_dim", "kv_heads x head_dim",
                                        "ff", "vocab",  "head_dim",         "head_dim / 2"};
    return names[d];
}

const char *mx_slot_name(mx_slot s) {
    static const char *const names[] = {"embed",
                                        "final_norm",
                                        "head",
                                        "rope_freqs",
                                        "attn_norm",
                                        "q",
                                        "k",
                                        "v",
                                        "o",
                                        "bq",
                                        "bk",
                                        "bv",
                                        "bo",
                                        "q_norm",
                                        "k_norm",
                                        "post_attn_norm",
                                        "ffn_norm",
                                        "gate",
                                        "up",
                                        "down",
                                        "post_ffn_norm"};
    return names[s];
}
