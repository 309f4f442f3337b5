// The forward pass as a recording, and the life of a model. One pass serves every family: layers
// differ by spec. The head runs for output rows only, and the last layer's rest too.
#include "model/model_int.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

// ---- Open
// ----------------------------------------------------------------------------------------

static int32_t find_group(mx_model *m, const mx_attn_spec *s) {
    for (int32_t g = 0; g < m->n_groups; g++) {
        const mx_kv_group *k = &m->groups[g];
        if (k->window == s->window && k->n_kv_head == s->n_kv_head && k->head_dim == s->head_dim) {
            return g;
        }
    }
    return -1;
}

static mx_status make_specs(mx_model *m, mx_err *err) {
    m->specs = MX_ARENA_ARRAY(&m->arena, mx_layer_spec, m->hp.n_layer);
    for (int32_t il = 0; il < m->hp.n_layer; il++) {
        mx_layer_spec *s = &m->specs[il];
        mx_layer_spec_make(m->family, &m->hp, il, s);
        int32_t g = find_group(m, &s->attn);
        if (g < 0) {
            if (m->n_groups == MX_MAX_KV_GROUPS) {
                return mx_err_set(err, MX_UNSUPPORTED, "more than %d kinds of sequence state",
                                  MX_MAX_KV_GROUPS);
            }
            g = m->n_groups++;
            m->groups[g] = (mx_kv_group){.n_kv_head = s->attn.n_kv_head,
                                         .head_dim = s->attn.head_dim,
                                         .window = s->attn.window};
        }
        s->attn.kv_group = g;
        s->kv_layer = m->groups[g].n_layers++;
    }
    return MX_OK;
}

static mx_status open_model(mx_model *m, bool lazy, mx_err *err) {
    MX_TRY(mx_family_of(m->weights, &m->family, err));
    MX_TRY(mx_hparams_read(m->family, m->weights, &m->hp, &m->arena, err));
    m->layers =
        MX_ARENA_ARRAY(&m->arena, bound_weight, m->hp.n_layer * (MX_W_SLOTS - MX_W_GLOBALS));
    m->embed_scale = powf((float)m->hp.d_model, m->family->embed_scale_power);
    MX_TRY(make_specs(m, err));
    MX_TRY(model_bind(m, err));
    MX_TRY(model_make_rope(m, err));
    return lazy ? MX_OK : model_load_all(m, err);
}

mx_status mx_model_load(mx_model *m, mx_err *err) {
    double t0 = mx_now_s();
    mx_status st = model_load_all(m, err);
    m->load.seconds += mx_now_s() - t0;
    return st;
}

mx_status mx_model_open(mx_model **out, mx_backend *b, const mx_weights *w, bool lazy,
                        mx_err *err) {
    double t0 = mx_now_s();
    mx_model *m = mx_calloc(1, sizeof *m);
    mx_backend_facts facts;
    b->ops->facts(b, &facts);
    m->reads_files = facts.reads_files;
    m->backend = b;
    m->weights = w;
    mx_arena_init(&m->arena, 0);
    mx_status st = open_model(m, lazy, err);
    m->load.seconds = mx_now_s() - t0;
    if (st != MX_OK) {
        mx_model_close(m);
        m = NULL;
    }
    *out = m;
    return st;
}

static void free_tensor(mx_model *m, mx_tensor *t) {
    if (t->buf) m->backend->ops->free(m->backend, t->buf);
}

static void free_weight(mx_model *m, bound_weight *w) {
    free_tensor(m, &w->tensor);
    mx_free_large(w->copy, w->copy_bytes);
}

void mx_model_close(mx_model *m) {
    if (!m) return;
    for (int s = 0; s < MX_W_GLOBALS; s++) free_weight(m, &m->globals[s]);
    for (int64_t i = 0; m->layers && i < m->hp.n_layer * (MX_W_SLOTS - MX_W_GLOBALS); i++) {
        free_weight(m, &m->layers[i]);
    }
    for (int i = 0; i < 2; i++) free_tensor(m, &m->inv_freq[i]);
    mx_arena_free(&m->arena);
    mx_free(m);
}

// general.file_type of a GGUF file: what its maker calls the mixture. NULL: unknown, or none.
static const char *file_type(const mx_weights *w) {
    static const char *const names[] = {
        [0] = "f32",     [1] = "f16",     [2] = "q4_0",    [3] = "q4_1",    [7] = "q8_0",
        [8] = "q5_0",    [9] = "q5_1",    [10] = "q2_k",   [11] = "q3_k_s", [12] = "q3_k_m",
        [13] = "q3_k_l", [14] = "q4_k_s", [15] = "q4_k_m", [16] = "q5_k_s", [17] = "q5_k_m",
        [18] = "q6_k",   [32] = "bf16"};
    enum { GUESSED = 1024 };
    int64_t v;
    if (w->container != MX_CONTAINER_GGUF || !mx_gguf_get_i64(w, "general.file_type", &v))
        return NULL;
    v &= ~(int64_t)GUESSED;
    return v >= 0 && v < (int64_t)MX_COUNT(names) ? names[v] : NULL;
}

// "gguf q4_k_m, most bytes q8_0": what the file calls itself, else the format that most bytes have;
// and what the first does not say.
static void describe_format(const mx_model *m, char *out, size_t cap) {
    const char *from = m->weights->made                             ? "synthetic"
                       : m->weights->container == MX_CONTAINER_GGUF ? "gguf"
                                                                    : "safetensors";
    int32_t best = 0;
    uint64_t all = 0;
    for (int32_t i = 0; i < m->n_formats; i++) {
        all += m->formats[i].bytes;
        if (m->formats[i].bytes > m->formats[best].bytes) best = i;
    }
    char most[32];
    mx_wfmt_name(m->formats[best].fmt, most, sizeof most);
    const char *type = file_type(m->weights);
    if (!type)
        snprintf(out, cap, "%s %s%s", from, most,
                 m->formats[best].bytes < all - all / 20 ? ", mixed" : "");
    else if (strncmp(type, most, strlen(most)) == 0)
        snprintf(out, cap, "%s %s", from, type);
    else
        snprintf(out, cap, "%s %s, most bytes %s", from, type, most);
}

void mx_model_get_info(const mx_model *m, mx_model_info *out) {
    *out = (mx_model_info){.family = m->family,
                           .hp = &m->hp,
                           .weight_bytes = m->load.bytes ? m->load.bytes : m->weight_bytes,
                           .n_params = m->n_params,
                           .n_kv_groups = m->n_groups,
                           .n_towers = m->n_towers,
                           .model_type = m->family->name};
    const json_t *config = m->weights->config;
    const json_t *type = config ? mx_config_get(config, "model_type") : NULL;
    if (json_is_string(type)) out->model_type = json_string_value(type);
    if (config) out->n_routed_experts = mx_config_routed_experts(config);
    describe_format(m, out->format, sizeof out->format);
}

void mx_model_get_load_stats(const mx_model *m, mx_load_stats *out) {
    *out = m->load;
}

void mx_model_kv_groups(const mx_model *m, mx_dtype codec, mx_kv_spec *spec) {
    spec->n_groups = m->n_groups;
    for (int32_t g = 0; g < m->n_groups; g++) {
        spec->groups[g] = m->groups[g];
        spec->groups[g].codec = codec;
    }
}

const char *mx_model_tower(const mx_model *m, int32_t i) {
    return i >= 0 && i < m->n_towers ? m->towers[i] : NULL;
}

// ---- Record
// ----------------------------------------------------------------------------------------

static const mx_tensor *tensor_of(mx_model *m, int32_t il, mx_slot slot) {
    const bound_weight *w = model_weight(m, il, slot);
    return w->present ? &w->tensor : NULL;
}

static mx_status ensure_layer(mx_model *m, int32_t il, mx_err *err) {
    for (int s = MX_W_GLOBALS; s < MX_W_SLOTS; s++) {
        MX_TRY(model_materialize(m, model_weight(m, il, (mx_slot)s), err));
    }
    return MX_OK;
}

static mx_tid record_layer(mx_model *m, mx_enc *e, const mx_kv *kv, int32_t il, mx_tid x,
                           const mx_tid cs[2], int32_t ctx_bucket) {
    const mx_layer_spec *s = &m->specs[il];
    mx_attn_weights a = {.norm = tensor_of(m, il, MX_W_ATTN_NORM),
                         .q = tensor_of(m, il, MX_W_Q),
                         .k = tensor_of(m, il, MX_W_K),
                         .v = tensor_of(m, il, MX_W_V),
                         .o = tensor_of(m, il, MX_W_O),
                         .bq = tensor_of(m, il, MX_W_BQ),
                         .bk = tensor_of(m, il, MX_W_BK),
                         .bv = tensor_of(m, il, MX_W_BV),
                         .bo = tensor_of(m, il, MX_W_BO),
                         .qn = tensor_of(m, il, MX_W_QN),
                         .kn = tensor_of(m, il, MX_W_KN),
                         .post_norm = tensor_of(m, il, MX_W_POST_ATTN_NORM)};
    bool gather = s->last && mx_enc_facts(e)->n_out < mx_enc_facts(e)->n_rows;
    mx_enc_label(e, (int16_t)il, MX_ROLE_ATTN);
    x = mx_nn_attention(e, x, cs[s->rope], &s->attn, &a, mx_kv_k(kv, s->attn.kv_group, s->kv_layer),
                        mx_kv_v(kv, s->attn.kv_group, s->kv_layer), ctx_bucket, gather);
    if (x == MX_NONE) return x;
    mx_mlp_weights f = {.norm = tensor_of(m, il, MX_W_FFN_NORM),
                        .gate = tensor_of(m, il, MX_W_GATE),
                        .up = tensor_of(m, il, MX_W_UP),
                        .down = tensor_of(m, il, MX_W_DOWN),
                        .post_norm = tensor_of(m, il, MX_W_POST_FFN_NORM)};
    mx_enc_label(e, (int16_t)il, MX_ROLE_MLP);
    return mx_nn_mlp(e, x, &f, s->act, (float)m->hp.norm_eps);
}

static void record_head(mx_model *m, mx_enc *e, mx_tid x, mx_output output) {
    const mx_tensor *head = tensor_of(m, 0, MX_W_HEAD);
    if (!head) head = tensor_of(m, 0, MX_W_EMBED);
    mx_tensor logits = {.kind = MX_T_LOGITS,
                        .n_rows = mx_enc_facts(e)->n_out,
                        .n_cols = m->hp.n_vocab,
                        .ld = m->hp.n_vocab,
                        .fmt = mx_wfmt_of(MX_F32)};
    logits.n_bytes = (size_t)logits.n_rows * (size_t)logits.n_cols * sizeof(float);
    mx_enc_label(e, -1, MX_ROLE_HEAD);
    mx_nn_head(e, x, tensor_of(m, 0, MX_W_FINAL_NORM), (float)m->hp.norm_eps, head,
               (float)m->hp.logit_softcap, &logits);
    if (output != MX_OUTPUT_SAMPLE) return;
    mx_enc_label(e, -1, MX_ROLE_SAMPLE);
    mx_nn_sample(e, &logits);
}

static mx_status record_pass(mx_model *m, mx_enc *e, const mx_kv *kv, int32_t max_len,
                             mx_output output, mx_err *err) {
    for (int s = 0; s < MX_W_GLOBALS; s++) MX_TRY(model_materialize(m, &m->globals[s], err));
    mx_enc_label(e, -1, MX_ROLE_EMBED);
    mx_tid x = mx_nn_embed(e, tensor_of(m, 0, MX_W_EMBED), m->embed_scale);
    mx_enc_label(e, -1, MX_ROLE_OTHER);
    mx_tid cs[2] = {mx_nn_rope_table(e, &m->inv_freq[0], 1.0f), MX_NONE};
    if (m->has_local_rope) cs[1] = mx_nn_rope_table(e, &m->inv_freq[1], 1.0f);
    int32_t ctx_bucket = mx_ctx_bucket(max_len);
    for (int32_t il = 0; il < m->hp.n_layer; il++) {
        MX_TRY(ensure_layer(m, il, err));
        x = record_layer(m, e, kv, il, x, cs, ctx_bucket);
    }
    if (x != MX_NONE) record_head(m, e, x, output);
    return MX_OK;
}

mx_status mx_model_record(mx_model *m, mx_enc *e, const mx_kv *kv, int32_t max_len,
                          mx_output output, mx_err *err) {
    mx_status st = record_pass(m, e, kv, max_len, output, err);
    mx_status end = model_end_uploads(m, st == MX_OK ? err : NULL);
    return st == MX_OK ? end : st;
}

void mx_family_print(const mx_family *f, mx_buf *out) {
    mx_hparams hp = {.n_layer = 12,
                     .d_model = 512,
                     .n_head = 8,
                     .n_kv_head = 4,
                     .head_dim = 64,
                     .d_ff = 1024,
                     .n_vocab = 1000,
                     .window = 512,
                     .use_window = 1,
                     .query_scale_dim = 64,
                     .norm_eps = 1e-6,
                     .window_pattern = 6};
    bool windows = false;
    for (size_t i = 0; i < f->n_config; i++) {
        windows |= f->config[i].offset == offsetof(mx_hparams, window) && f->config[i].dflt > 0;
    }
    if (!windows) hp.window = 0;
    mx_buf_printf(out, "%s: config\n", f->name);
    for (size_t i = 0; i < f->n_config; i++) {
        const mx_config_row *r = &f->config[i];
        mx_buf_printf(out, "  %s%s%s%s\n", r->hf, r->gguf[0] ? "  [gguf: " : "", r->gguf,
                      r->gguf[0] ? "]" : "");
    }
    mx_buf_printf(out, "%s: weights\n", f->name);
    for (size_t i = 0; i < f->n_weights; i++) {
        const mx_weight_row *r = &f->weights[i];
        mx_buf_printf(out, "  %-15s %s.%s  [gguf: %s]  (%s%s%s)%s\n", mx_slot_name(r->slot),
                      r->hf ? r->hf : "-", r->suffix, r->gguf ? r->gguf : "-", mx_dim_name(r->rows),
                      r->cols ? ", " : "", r->cols ? mx_dim_name(r->cols) : "",
                      r->required ? "" : " optional");
    }
    mx_buf_printf(out, "%s: layers of a 12-layer example\n", f->name);
    for (int32_t il = 0; il < hp.n_layer; il++) {
        mx_layer_spec s;
        mx_layer_spec_make(f, &hp, il, &s);
        mx_buf_printf(out, "  %2d %s heads %d/%d x %d rope %s act %s\n", il,
                      s.attn.window ? "window" : "full", s.attn.n_head, s.attn.n_kv_head,
                      s.attn.head_dim, s.rope ? "local" : "full",
                      s.act == MX_ACT_SILU ? "silu" : "gelu_tanh");
    }
}
