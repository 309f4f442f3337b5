// Binding: the family's weight rows against the tensors of a checkpoint. Every row is looked up by
// its container's name and checked for shape and format; every tensor of the checkpoint must be
// claimed by a row, be a tower's, or be on the list of those ignored by name.
#include "model/model_int.h"

#include <stdio.h>
#include <string.h>

// Where a checkpoint's text weights may live; the first prefix under which the embedding is found
// is used for all. `drop` bytes of the row's name ("model.") are replaced by `with`.
static const struct {
    const char *with;
    size_t drop;
} prefixes[] = {
    {"", 0},
    {"language_model.", 0},       // language_model.model.layers…
    {"model.language_model.", 6}, // model.language_model.layers…
    {"", 6},                      // layers… (a bare text model)
};

typedef struct binder {
    mx_model *m;
    const mx_weights *w;
    bool gguf;
    size_t prefix;
    uint8_t *claimed; // per tensor of the checkpoint
    const json_t *quant;
    mx_err *err;
} binder;

// Name of a row's tensor without suffix; lm_head lies beside "model." in most layouts.
static void row_name(const binder *b, const mx_weight_row *r, int32_t il, size_t prefix, char *out,
                     size_t cap) {
    char base[128];
    const char *pattern = b->gguf ? r->gguf : r->hf;
    const char *at = strstr(pattern, "%d");
    if (at)
        snprintf(base, sizeof base, "%.*s%d%s", (int)(at - pattern), pattern, il, at + 2);
    else
        snprintf(base, sizeof base, "%s", pattern);
    if (b->gguf) {
        snprintf(out, cap, "%s", base);
        return;
    }
    bool inner = strncmp(base, "model.", 6) == 0;
    if (inner)
        snprintf(out, cap, "%s%s", prefixes[prefix].with, base + prefixes[prefix].drop);
    else if (prefixes[prefix].drop == 0)
        snprintf(out, cap, "%s%s", prefixes[prefix].with, base);
    else
        snprintf(out, cap, "%s", base);
}

static const mx_wtensor *find(const binder *b, const char *base, const char *suffix) {
    char name[300];
    snprintf(name, sizeof name, "%s.%s", base, suffix);
    return mx_weights_find(b->w, mx_str_of(name));
}

static void claim(binder *b, const mx_wtensor *t) {
    if (t) b->claimed[t - b->w->tensors] = 1;
}

static void choose_prefix(binder *b) {
    const mx_family *f = b->m->family;
    for (size_t p = 0; p < MX_COUNT(prefixes); p++) {
        for (size_t i = 0; i < f->n_weights; i++) {
            if (f->weights[i].slot != MX_W_EMBED) continue;
            char base[256];
            row_name(b, &f->weights[i], 0, p, base, sizeof base);
            if (find(b, base, "weight")) {
                b->prefix = p;
                return;
            }
        }
    }
}

// ---- Shapes ------------------------------------------------------------------------------------

static mx_status shape_error(const binder *b, const mx_weight_row *r, const mx_wtensor *t,
                             int64_t rows, int64_t cols) {
    char found[128] = "";
    size_t n = 0;
    for (int i = 0; i < t->n_dim && n < sizeof found; i++) {
        n += (size_t)snprintf(found + n, sizeof found - n, "%s%lld", i ? ", " : "",
                              (long long)t->dim[i]);
    }
    char expected[128];
    if (r->cols == MX_DIM_NONE) {
        snprintf(expected, sizeof expected, "%lld) = (%s", (long long)rows, mx_dim_name(r->rows));
    } else {
        snprintf(expected, sizeof expected, "%lld, %lld) = (%s, %s", (long long)rows,
                 (long long)cols, mx_dim_name(r->rows), mx_dim_name(r->cols));
    }
    return mx_err_set(b->err, MX_FORMAT, "%s: %.*s: shape (%s), expected (%s)", b->w->path,
                      (int)MX_MIN(t->name.n, 200u), t->name.p, found, expected);
}

static mx_status type_error(const binder *b, const mx_wtensor *t) {
    return mx_err_set(b->err, MX_UNSUPPORTED, "%s: %.*s: type %s is not a weight type", b->w->path,
                      (int)MX_MIN(t->name.n, 200u), t->name.p,
                      t->foreign ? t->foreign : mx_dtype_get(t->dtype)->name);
}

static mx_status plain_view(const binder *b, const mx_weight_row *r, const mx_wtensor *t,
                            mx_wview *v) {
    int64_t rows = mx_dim_value(r->rows, &b->m->hp), cols = mx_dim_value(r->cols, &b->m->hp);
    bool vector = r->cols == MX_DIM_NONE;
    bool ok = vector ? t->n_dim == 1 && t->dim[0] == rows
                     : t->n_dim == 2 && t->dim[0] == rows && t->dim[1] == cols;
    if (!ok) return shape_error(b, r, t, rows, cols);
    bool block = t->dtype >= MX_Q4_0 && t->dtype <= MX_Q6_K;
    if (!mx_dtype_is_float(t->dtype) && (!block || vector)) return type_error(b, t);
    *v = (mx_wview){.fmt = mx_wfmt_of(t->dtype), .data = t->data};
    v->n_rows = vector ? 1 : rows;
    v->n_cols = vector ? rows : cols;
    return MX_OK;
}

// ---- MLX quantisation --------------------------------------------------------------------------

// A module path without the prefixes that wrappers put before a text model's modules.
static const char *bare_path(const char *path) {
    static const char *const parts[] = {"model.", "language_model."};
    for (size_t i = 0; i < MX_COUNT(parts); i++) {
        size_t n = strlen(parts[i]);
        if (strncmp(path, parts[i], n) != 0) continue;
        path += n;
        i = SIZE_MAX; // from the first again
    }
    return path;
}

// The entry of the quantization block for a module path; overrides may carry another prefix.
static const json_t *find_override(const binder *b, const char *base) {
    const json_t *v = json_object_get(b->quant, base);
    if (v) return v;
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)b->quant, key, value) {
        if (!json_is_object(value) && !json_is_boolean(value)) continue;
        if (strcmp(bare_path(key), bare_path(base)) == 0) return value;
    }
    return NULL;
}

static mx_status quant_param(const binder *b, const char *base, const json_t *own, const char *key,
                             int64_t *out) {
    const json_t *v = own && json_is_object(own) ? json_object_get(own, key) : NULL;
    if (!v) v = json_object_get(b->quant, key);
    if (!json_is_integer(v) || json_integer_value(v) < 1 || json_integer_value(v) > 1024) {
        return mx_err_set(b->err, MX_FORMAT,
                          "%s: config.json: quantization: %s of %s is missing or "
                          "out of range",
                          b->w->path, key, base);
    }
    *out = json_integer_value(v);
    return MX_OK;
}

// What config.json says of this module: bits and group, affine mode only.
static mx_status quant_config(const binder *b, const char *base, int64_t *bits, int64_t *group) {
    const json_t *own = find_override(b, base);
    if (json_is_false(own)) {
        return mx_err_set(b->err, MX_FORMAT,
                          "%s: %s has scales, but config.json says that it is not "
                          "quantised",
                          b->w->path, base);
    }
    const json_t *mode = own ? json_object_get(own, "mode") : NULL;
    if (!mode) mode = json_object_get(b->quant, "mode");
    if (mode && !json_is_null(mode) && !json_is_string(mode)) {
        return mx_err_set(b->err, MX_FORMAT,
                          "%s: config.json: quantization: mode of %s: not a string", b->w->path,
                          base);
    }
    if (json_is_string(mode) && strcmp(json_string_value(mode), "affine") != 0) {
        return mx_err_set(b->err, MX_UNSUPPORTED, "%s: %s: quantization mode '%s' is not supported",
                          b->w->path, base, json_string_value(mode));
    }
    MX_TRY(quant_param(b, base, own, "bits", bits));
    return quant_param(b, base, own, "group_size", group);
}

static mx_status affine_view(const binder *b, const mx_weight_row *r, const char *base,
                             const mx_wtensor *t, const mx_wtensor *sc, const mx_wtensor *bi,
                             mx_wview *v) {
    int64_t rows = mx_dim_value(r->rows, &b->m->hp), cols = mx_dim_value(r->cols, &b->m->hp);
    int64_t bits, group;
    if (!b->quant) {
        return mx_err_set(b->err, MX_FORMAT,
                          "%s: %s has scales, but config.json has no quantization "
                          "block",
                          b->w->path, base);
    }
    MX_TRY(quant_config(b, base, &bits, &group));
    if (!bi) {
        return mx_err_set(b->err, MX_UNSUPPORTED,
                          "%s: %s has scales and no biases: block-float "
                          "modes are not supported",
                          b->w->path, base);
    }
    bool known = (bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8) &&
                 (group == 32 || group == 64 || group == 128);
    if (!known) {
        return mx_err_set(b->err, MX_UNSUPPORTED, "%s: %s: %lld bits in groups of %lld", b->w->path,
                          base, (long long)bits, (long long)group);
    }
    if (t->dtype != MX_U32) return type_error(b, t);
    if (!mx_dtype_is_float(sc->dtype)) return type_error(b, sc);
    if (!mx_dtype_is_float(bi->dtype)) return type_error(b, bi);
    bool ok =
        t->n_dim == 2 && t->dim[0] == rows && cols % group == 0 && t->dim[1] * 32 == cols * bits;
    const mx_wtensor *planes[] = {sc, bi};
    for (int i = 0; i < 2; i++) {
        ok = ok && planes[i]->n_dim == 2 && planes[i]->dim[0] == rows &&
             planes[i]->dim[1] * group == cols && planes[i]->dtype == sc->dtype;
    }
    if (!ok) {
        return mx_err_set(
            b->err, MX_FORMAT,
            "%s: %s: packed shape (%lld, %lld) with scales (%lld, %lld) does not hold "
            "(%lld, %lld) weights at %lld bits in groups of %lld, as config.json says",
            b->w->path, base, (long long)t->dim[0], (long long)t->dim[1], (long long)sc->dim[0],
            (long long)sc->dim[1], (long long)rows, (long long)cols, (long long)bits,
            (long long)group);
    }
    *v = (mx_wview){.fmt = {.dtype = MX_AFFINE,
                            .bits = (uint8_t)bits,
                            .group = (uint16_t)group,
                            .scale_dtype = sc->dtype},
                    .n_rows = rows,
                    .n_cols = cols,
                    .data = t->data,
                    .scales = sc->data,
                    .biases = bi->data};
    return MX_OK;
}

// ---- Rows --------------------------------------------------------------------------------------

static void count_format(mx_model *m, mx_wfmt fmt, uint64_t n_bytes) {
    int32_t i = 0, most = (int32_t)MX_COUNT(m->formats);
    while (i < m->n_formats && !mx_wfmt_eq(m->formats[i].fmt, fmt)) i++;
    if (i == most) return;
    m->formats[i].fmt = fmt;
    m->formats[i].bytes += n_bytes;
    m->n_formats = MX_MAX(m->n_formats, i + 1);
}

static mx_status bind_row(binder *b, const mx_weight_row *r, int32_t il) {
    bound_weight *bw = model_weight(b->m, il, r->slot);
    if (!(b->gguf ? r->gguf : r->hf)) return MX_OK;
    char base[256];
    row_name(b, r, il, b->prefix, base, sizeof base);
    const mx_wtensor *t = find(b, base, r->suffix);
    if (!t) {
        if (!r->required) return MX_OK;
        return mx_err_set(b->err, MX_FORMAT, "%s: tensor %s.%s is missing", b->w->path, base,
                          r->suffix);
    }
    claim(b, t);
    const mx_wtensor *sc = NULL, *bi = NULL;
    if (!b->gguf && strcmp(r->suffix, "weight") == 0) {
        sc = find(b, base, "scales");
        bi = find(b, base, "biases");
        claim(b, sc);
        claim(b, bi);
    }
    if (sc)
        MX_TRY(affine_view(b, r, base, t, sc, bi, &bw->view));
    else
        MX_TRY(plain_view(b, r, t, &bw->view));
    size_t row_bytes;
    if (!mx_wfmt_row_bytes(bw->view.fmt, bw->view.n_cols, &row_bytes)) {
        return mx_err_set(b->err, MX_FORMAT, "%s: %s: rows of %lld do not divide into blocks",
                          b->w->path, base, (long long)bw->view.n_cols);
    }
    bw->present = true;
    bw->fix = b->gguf ? r->fix_gguf : r->fix_hf;
    uint64_t n = (uint64_t)bw->view.n_rows * row_bytes;
    count_format(b->m, bw->view.fmt, n);
    b->m->weight_bytes += n;
    b->m->n_params += (uint64_t)(bw->view.n_rows * bw->view.n_cols);
    return MX_OK;
}

// ---- Every other tensor ------------------------------------------------------------------------

static bool contains(mx_str s, const char *part) {
    return memmem(s.p, s.n, part, strlen(part)) != NULL;
}

static bool is_tower(mx_str name) {
    static const char *const marks[] = {
        "vision_tower.", "vision_model.", "audio_tower.", "multi_modal_projector.",
        "embed_vision.", "visual.",       "mm.",          "v.blk."};
    for (size_t i = 0; i < MX_COUNT(marks); i++) {
        mx_str m = mx_str_of(marks[i]);
        if (mx_str_starts(name, m)) return true;
        char inner[64];
        snprintf(inner, sizeof inner, "model.%s", marks[i]);
        if (mx_str_starts(name, mx_str_of(inner))) return true;
    }
    return false;
}

// Derived or duplicated values that checkpoints carry and nobody needs.
static bool is_ignored(const binder *b, mx_str name) {
    if (contains(name, "rotary_emb.inv_freq") || contains(name, ".masked_bias")) return true;
    bool head = contains(name, "lm_head.") || mx_str_is(name, "output.weight");
    return head && b->m->hp.tied == 1;
}

static mx_status classify_rest(binder *b) {
    mx_model *m = b->m;
    m->towers = MX_ARENA_ARRAY(&m->arena, const char *, b->w->n_tensors + 1);
    for (int32_t i = 0; i < b->w->n_tensors; i++) {
        if (b->claimed[i]) continue;
        mx_str name = b->w->tensors[i].name;
        if (is_tower(name)) {
            m->towers[m->n_towers++] = mx_arena_strndup(&m->arena, name.p, name.n);
        } else if (!is_ignored(b, name)) {
            return mx_err_set(b->err, MX_FORMAT, "%s: tensor %.*s is unknown to family %s",
                              b->w->path, (int)MX_MIN(name.n, 200u), name.p, m->family->name);
        }
    }
    return MX_OK;
}

static mx_status bind_all(binder *b) {
    const mx_family *f = b->m->family;
    choose_prefix(b);
    for (size_t i = 0; i < f->n_weights; i++) {
        const mx_weight_row *r = &f->weights[i];
        if (r->slot == MX_W_HEAD && b->m->hp.tied == 1) continue;
        int32_t n = r->slot < MX_W_GLOBALS ? 1 : (int32_t)b->m->hp.n_layer;
        for (int32_t il = 0; il < n; il++) MX_TRY(bind_row(b, r, il));
    }
    if (!b->m->globals[MX_W_HEAD].present && b->m->hp.tied == 0) {
        return mx_err_set(b->err, MX_FORMAT,
                          "%s: the head is missing, and config.json says that it "
                          "is not tied to the embedding",
                          b->w->path);
    }
    return classify_rest(b);
}

// config.json's quantization block. "quantization" is MLX's; "quantization_config" is its copy, or
// other tools' with the name of their method.
static mx_status find_quant(binder *b) {
    const json_t *q = json_object_get(b->w->config, "quantization");
    if (!json_is_object(q)) {
        q = json_object_get(b->w->config, "quantization_config");
        const json_t *method = json_object_get(q, "quant_method");
        if (json_is_string(method)) {
            return mx_err_set(b->err, MX_UNSUPPORTED,
                              "%s: config.json: quantization method '%.64s' is not supported",
                              b->w->path, json_string_value(method));
        }
    }
    b->quant = json_is_object(q) ? q : NULL;
    return MX_OK;
}

mx_status model_bind(mx_model *m, mx_err *err) {
    const mx_weights *w = m->weights;
    binder b = {.m = m, .w = w, .gguf = w->container == MX_CONTAINER_GGUF, .err = err};
    MX_TRY(find_quant(&b));
    b.claimed = mx_calloc((size_t)w->n_tensors + 1, 1);
    mx_status st = bind_all(&b);
    mx_free(b.claimed);
    return st;
}
