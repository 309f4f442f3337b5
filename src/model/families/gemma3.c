// Gemma 3 text: embeddings times sqrt(d), norms of weight 1 + w (GGUF stores the sum), norms after
// attention and MLP too, q/k norms, tanh-GELU MLP; five window layers (local rotation base) to one
// full layer. GGUF carries neither the pattern nor the query scale: the family's defaults hold.
#include "model/family.h"

#include <string.h>

static const mx_config_row config[] = {
    MX_CONFIG_HEADS(false, 8, 4, 256),
    MX_CONFIG_ROPE(1e6),
    MX_FIELD(rope_local_theta, FLOAT,
             "rope_local_base_freq|rope_parameters.sliding_attention.rope_theta",
             "rope.freq_base_swa", false, 1e4, 1, 1e12),
    MX_FIELD(window, INT, "sliding_window", "attention.sliding_window", false, 512, 0, 1 << 28),
    MX_FIELD(window_pattern, INT, "sliding_window_pattern|_sliding_window_pattern", "", false, 6, 1,
             1024),
    MX_FIELD(query_scale_dim, FLOAT, "query_pre_attn_scalar", "", false, 0, 0, 1e6),
    MX_FIELD(logit_softcap, FLOAT, "final_logit_softcapping", "final_logit_softcapping", false, 0,
             0, 1e6),
    MX_FIELD(attn_softcap, FLOAT, "attn_logit_softcapping", "attn_logit_softcapping", false, 0, 0,
             1e6),
};

static const mx_weight_row weights[] = {
    MX_WEIGHTS_COMMON(0),
    MX_NORM_ROW(MX_W_FINAL_NORM, "model.norm", "output_norm", MX_DIM_D, MX_FIX_ADD_ONE),
    MX_NORM_ROW(MX_W_ATTN_NORM, MX_HF_LAYER "input_layernorm", "blk.%d.attn_norm", MX_DIM_D,
                MX_FIX_ADD_ONE),
    MX_NORM_ROW(MX_W_POST_ATTN_NORM, MX_HF_LAYER "post_attention_layernorm",
                "blk.%d.post_attention_norm", MX_DIM_D, MX_FIX_ADD_ONE),
    MX_NORM_ROW(MX_W_FFN_NORM, MX_HF_LAYER "pre_feedforward_layernorm", "blk.%d.ffn_norm", MX_DIM_D,
                MX_FIX_ADD_ONE),
    MX_NORM_ROW(MX_W_POST_FFN_NORM, MX_HF_LAYER "post_feedforward_layernorm",
                "blk.%d.post_ffw_norm", MX_DIM_D, MX_FIX_ADD_ONE),
    MX_NORM_ROW(MX_W_QN, MX_HF_LAYER "self_attn.q_norm", "blk.%d.attn_q_norm", MX_DIM_HEAD,
                MX_FIX_ADD_ONE),
    MX_NORM_ROW(MX_W_KN, MX_HF_LAYER "self_attn.k_norm", "blk.%d.attn_k_norm", MX_DIM_HEAD,
                MX_FIX_ADD_ONE),
};

static void layer(const mx_hparams *hp, int32_t il, mx_layer_spec *out) {
    bool full = hp->layer_window ? !hp->layer_window[il] : (il + 1) % hp->window_pattern == 0;
    if (full) out->attn.window = 0;
    out->rope = full ? 0 : 1;
}

// attention.sliding_window_pattern of GGUF: every n-th layer is full, or one flag a layer.
static mx_status read_gguf_pattern(mx_hparams *hp, const mx_weights *w, mx_arena *a, mx_err *err) {
    const char *key = "gemma3.attention.sliding_window_pattern";
    const mx_gguf_kv *kv = mx_gguf_find(w, key);
    int64_t n;
    if (!kv) return MX_OK;
    if (mx_gguf_get_i64(w, key, &n) && n >= 1 && n <= 1024) {
        hp->window_pattern = n;
        return MX_OK;
    }
    if (kv->type != MX_GGUF_ARRAY || kv->elem_type != MX_GGUF_BOOL ||
        kv->n_elems != (uint64_t)hp->n_layer) {
        return mx_err_set(err, MX_FORMAT, "%s: %s: neither a count nor a list of %lld booleans",
                          w->path, key, (long long)hp->n_layer);
    }
    hp->layer_window = MX_ARENA_ARRAY(a, uint8_t, hp->n_layer);
    for (int64_t i = 0; i < hp->n_layer; i++) {
        hp->layer_window[i] = mx_gguf_array_f64(kv, (uint64_t)i) != 0;
    }
    return MX_OK;
}

static mx_status finish(mx_hparams *hp, const mx_weights *w, mx_arena *a, mx_err *err) {
    if (w->container == MX_CONTAINER_GGUF) {
        // no window said: every layer is full; 62 layers: the one size (27B) whose query scale is
        // that of hidden / heads, not of head_dim
        if (!mx_gguf_find(w, "gemma3.attention.sliding_window")) hp->window_pattern = 1;
        if (hp->n_layer == 62) hp->query_scale_dim = (double)(hp->d_model / hp->n_head);
        return read_gguf_pattern(hp, w, a, err);
    }
    if (json_is_true(mx_config_get(w->config, "use_bidirectional_attention"))) {
        return mx_err_set(err, MX_UNSUPPORTED,
                          "%s: config.json: use_bidirectional_attention is not supported", w->path);
    }
    const char *local = "rope_parameters.sliding_attention.rope_type";
    const char *type = json_string_value(mx_config_get(w->config, local));
    if (type && strcmp(type, "default") != 0) {
        return mx_err_set(err, MX_UNSUPPORTED, "%s: config.json: %s '%.64s' is not supported",
                          w->path, local, type);
    }
    return MX_OK;
}

static const char *const hf_types[] = {"gemma3_text", "gemma3", NULL};
static const char *const archs[] = {"gemma3", NULL};

const mx_family mx_family_gemma3 = {
    .name = "gemma3",
    .hf_types = hf_types,
    .gguf_archs = archs,
    .config = config,
    .n_config = MX_COUNT(config),
    .weights = weights,
    .n_weights = MX_COUNT(weights),
    .act = MX_ACT_GELU_TANH,
    .embed_scale_power = 0.5f,
    .finish = finish,
    .layer = layer,
};
