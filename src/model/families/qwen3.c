// Qwen 3 dense text: no biases, RMS norms over each head of q and k before the rotation, an
// explicit head_dim.
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
    MX_NORM_ROW(MX_W_QN, MX_HF_LAYER "self_attn.q_norm", "blk.%d.attn_q_norm", MX_DIM_HEAD, 0),
    MX_NORM_ROW(MX_W_KN, MX_HF_LAYER "self_attn.k_norm", "blk.%d.attn_k_norm", MX_DIM_HEAD, 0),
};

static const char *const hf_types[] = {"qwen3", NULL};
static const char *const archs[] = {"qwen3", NULL};

const mx_family mx_family_qwen3 = {
    .name = "qwen3",
    .hf_types = hf_types,
    .gguf_archs = archs,
    .config = config,
    .n_config = MX_COUNT(config),
    .weights = weights,
    .n_weights = MX_COUNT(weights),
    .act = MX_ACT_SILU,
};
