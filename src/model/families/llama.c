// Llama 1-3.x, SmolLM2 and their kind: pre-norm, GQA, SiLU MLP, rotation with optional linear or
// llama3 scaling. GGUF stores Q and K rows permuted for pairwise rotation; undone at load.
#include "model/family.h"

static const mx_config_row config[] = {MX_CONFIG_COMMON, MX_CONFIG_ROPE(10000)};

static const mx_weight_row weights[] = {
    MX_WEIGHTS_COMMON(MX_FIX_UNPERMUTE),
    MX_NORM_ROW(MX_W_FINAL_NORM, "model.norm", "output_norm", MX_DIM_D, 0),
    MX_NORM_ROW(MX_W_ATTN_NORM, MX_HF_LAYER "input_layernorm", "blk.%d.attn_norm", MX_DIM_D, 0),
    MX_NORM_ROW(MX_W_FFN_NORM, MX_HF_LAYER "post_attention_layernorm", "blk.%d.ffn_norm", MX_DIM_D,
                0),
    MX_BIAS_ROW(MX_W_BQ, MX_HF_LAYER "self_attn.q_proj", "blk.%d.attn_q", MX_DIM_Q, false,
                MX_FIX_UNPERMUTE),
    MX_BIAS_ROW(MX_W_BK, MX_HF_LAYER "self_attn.k_proj", "blk.%d.attn_k", MX_DIM_KV, false,
                MX_FIX_UNPERMUTE),
    MX_BIAS_ROW(MX_W_BV, MX_HF_LAYER "self_attn.v_proj", "blk.%d.attn_v", MX_DIM_KV, false, 0),
    MX_BIAS_ROW(MX_W_BO, MX_HF_LAYER "self_attn.o_proj", "blk.%d.attn_output", MX_DIM_D, false, 0),
    {MX_W_ROPE_FREQS, NULL, "rope_freqs", "weight", MX_DIM_HALF_ROT, MX_DIM_NONE, false, 0, 0,
     MX_SHARD_REPLICATE},
};

static const char *const hf_types[] = {"llama", NULL};
static const char *const archs[] = {"llama", NULL};

const mx_family mx_family_llama = {
    .name = "llama",
    .hf_types = hf_types,
    .gguf_archs = archs,
    .config = config,
    .n_config = MX_COUNT(config),
    .weights = weights,
    .n_weights = MX_COUNT(weights),
    .act = MX_ACT_SILU,
};
