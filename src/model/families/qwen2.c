// Qwen 2 and 2.5 text: as Llama with biases on q, k and v, and an optional sliding window in the
// layers from max_window_layers on (use_sliding_window).
#include "model/family.h"

static const mx_config_row config[] = {
    MX_CONFIG_COMMON,
    MX_CONFIG_ROPE(1e6),
    MX_FIELD(window, INT, "sliding_window", "", false, 0, 0, 1 << 28),
    MX_FIELD(use_window, BOOL, "use_sliding_window", "", false, 0, 0, 1),
    MX_FIELD(window_from, INT, "max_window_layers", "", false, 28, 0, 1 << 20),
};

static const mx_weight_row weights[] = {
    MX_WEIGHTS_COMMON(0),
    MX_NORM_ROW(MX_W_FINAL_NORM, "model.norm", "output_norm", MX_DIM_D, 0),
    MX_NORM_ROW(MX_W_ATTN_NORM, MX_HF_LAYER "input_layernorm", "blk.%d.attn_norm", MX_DIM_D, 0),
    MX_NORM_ROW(MX_W_FFN_NORM, MX_HF_LAYER "post_attention_layernorm", "blk.%d.ffn_norm", MX_DIM_D,
                0),
    MX_BIAS_ROW(MX_W_BQ, MX_HF_LAYER "self_attn.q_proj", "blk.%d.attn_q", MX_DIM_Q, true, 0),
    MX_BIAS_ROW(MX_W_BK, MX_HF_LAYER "self_attn.k_proj", "blk.%d.attn_k", MX_DIM_KV, true, 0),
    MX_BIAS_ROW(MX_W_BV, MX_HF_LAYER "self_attn.v_proj", "blk.%d.attn_v", MX_DIM_KV, true, 0),
};

static const char *const hf_types[] = {"qwen2", NULL};
static const char *const archs[] = {"qwen2", NULL};

const mx_family mx_family_qwen2 = {
    .name = "qwen2",
    .hf_types = hf_types,
    .gguf_archs = archs,
    .config = config,
    .n_config = MX_COUNT(config),
    .weights = weights,
    .n_weights = MX_COUNT(weights),
    .act = MX_ACT_SILU,
};
