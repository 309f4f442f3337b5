// Families are data: what a family's config says, which weights it has, what each layer is.
// Adding a family: one file in families/, one line in families.def, one golden directory.
#ifndef MX_MODEL_FAMILY_H
#define MX_MODEL_FAMILY_H

#include "format/weights.h"
#include "nn/nn.h"

// What a config says, after defaults; one struct for all families. Sizes are checked for sanity.
typedef enum mx_rope_type { MX_ROPE_DEFAULT, MX_ROPE_LINEAR, MX_ROPE_LLAMA3 } mx_rope_type;

typedef struct mx_hparams {
    int64_t n_layer, d_model, n_head, n_kv_head, head_dim, d_ff, n_vocab, max_ctx;
    double norm_eps;
    double rope_theta, rope_local_theta; // local: window layers, 0 = the same
    int64_t rope_type;                   // mx_rope_type of full layers
    double rope_factor, rope_low, rope_high, rope_orig_ctx;
    int64_t window, window_pattern; // every window_pattern-th layer is full; 0 = all alike
    int64_t window_from;            // first layer with a window (Qwen 2's max_window_layers)
    int64_t use_window;             // 0: `window` is ignored (use_sliding_window)
    double query_scale_dim;         // attention scale = 1 / sqrt(this)
    double logit_softcap, attn_softcap;
    int64_t tied;          // -1 not said, 0, 1
    uint8_t *layer_window; // (n_layer) 1 = window layer, from layer_types; or NULL
} mx_hparams;

typedef enum mx_field_type { MX_FIELD_INT, MX_FIELD_FLOAT, MX_FIELD_BOOL } mx_field_type;

// One config row. hf: alternatives separated by '|', each a dotted path in config.json (text_config
// is looked into first). gguf: key without the architecture prefix, alternatives by '|'; a key that
// starts with '.' is absolute. A null value counts as absent.
typedef struct mx_config_row {
    size_t offset; // in mx_hparams
    mx_field_type type;
    const char *hf, *gguf;
    bool required;
    double dflt, min, max;
} mx_config_row;
#define MX_FIELD(field, type, hf, gguf, required, dflt, min, max)                                  \
    { offsetof(mx_hparams, field), MX_FIELD_##type, hf, gguf, required, dflt, min, max }

typedef enum mx_slot {
    // global
    MX_W_EMBED,
    MX_W_FINAL_NORM,
    MX_W_HEAD,
    MX_W_ROPE_FREQS,
    MX_W_GLOBALS,
    // per layer
    MX_W_ATTN_NORM = MX_W_GLOBALS,
    MX_W_Q,
    MX_W_K,
    MX_W_V,
    MX_W_O,
    MX_W_BQ,
    MX_W_BK,
    MX_W_BV,
    MX_W_BO,
    MX_W_QN,
    MX_W_KN,
    MX_W_POST_ATTN_NORM,
    MX_W_FFN_NORM,
    MX_W_GATE,
    MX_W_UP,
    MX_W_DOWN,
    MX_W_POST_FFN_NORM,
    MX_W_SLOTS
} mx_slot;

// Symbols of shapes; resolved against hparams, so that an error prints expected and found.
typedef enum mx_dim {
    MX_DIM_NONE,
    MX_DIM_D,
    MX_DIM_Q,
    MX_DIM_KV,
    MX_DIM_FF,
    MX_DIM_V,
    MX_DIM_HEAD,
    MX_DIM_HALF_ROT
} mx_dim;

// Canonical form is made at load; neither the forward pass nor a kernel knows the container.
enum {
    MX_FIX_NONE = 0,
    MX_FIX_ADD_ONE = 1,   // norm weight stored minus one
    MX_FIX_UNPERMUTE = 2, // rows of each head interleaved for pairwise rotation: undo
};

// How a weight would be cut over ranks; unused until tensor parallel.
typedef enum mx_shard {
    MX_SHARD_REPLICATE,
    MX_SHARD_ROWS,
    MX_SHARD_COLS,
    MX_SHARD_EXPERTS
} mx_shard;

// Names are without ".weight"/".bias"; %d is the layer. MX_DIM_NONE in cols: a vector.
typedef struct mx_weight_row {
    mx_slot slot;
    const char *hf, *gguf; // NULL: this container never has it
    const char *suffix;    // "weight" or "bias"
    mx_dim rows, cols;
    bool required;
    uint8_t fix_hf, fix_gguf;
    mx_shard shard;
} mx_weight_row;

typedef struct mx_layer_spec {
    mx_attn_spec attn;
    int32_t rope;     // 0 = full, 1 = local table
    int32_t kv_layer; // layer within its KV group
    mx_act act;
    bool last;
} mx_layer_spec;

typedef struct mx_family {
    const char *name;
    const char *const *hf_types;   // model_type values, NULL-terminated
    const char *const *gguf_archs; // general.architecture values, NULL-terminated
    const mx_config_row *config;
    size_t n_config;
    const mx_weight_row *weights;
    size_t n_weights;
    mx_act act;
    float embed_scale_power; // embedding times d_model^this (0 or 0.5)
    // Why its sequence state cannot be kept in pages; NULL: every layer's is keys and values, which
    // can (all formats).
    const char *dense_only;
    // Checks and derives what the rows cannot say (layer types, scales). May be NULL.
    mx_status (*finish)(mx_hparams *hp, const mx_weights *w, mx_arena *a, mx_err *err);
    // Fills what differs by layer; attn sizes, scale and window come filled from hparams.
    void (*layer)(const mx_hparams *hp, int32_t il, mx_layer_spec *out);
} mx_family;

const mx_family *const *mx_families(size_t *n);
const mx_family *mx_family_find(const char *name);
// By checkpoint: model_type or general.architecture. UNSUPPORTED names what was found.
mx_status mx_family_of(const mx_weights *w, const mx_family **out, mx_err *err);

// Reads hparams (config.c). Memory from a. FORMAT errors name the key and its value.
mx_status mx_hparams_read(const mx_family *f, const mx_weights *w, mx_hparams *hp, mx_arena *a,
                          mx_err *err);
void mx_layer_spec_make(const mx_family *f, const mx_hparams *hp, int32_t il, mx_layer_spec *out);
int64_t mx_dim_value(mx_dim d, const mx_hparams *hp);
const char *mx_dim_name(mx_dim d);
const char *mx_slot_name(mx_slot s);

// JSON helpers of family files: dotted path in config (text_config first); NULL when absent or
// null.
const json_t *mx_config_get(const json_t *config, const char *path);
// Experts that a router chooses from, under any of the names that configs have for it; 0: none.
int32_t mx_config_routed_experts(const json_t *config);

// Rows that most families share.
#define MX_CONFIG_COMMON MX_CONFIG_HEADS(true, 0, 0, 0)
// The same with defaults for the head counts (a config of Gemma 3's size omits them).
#define MX_CONFIG_HEADS(required, heads, kv_heads, dim)                                            \
    MX_FIELD(n_layer, INT, "num_hidden_layers", "block_count", true, 0, 1, 1024),                  \
        MX_FIELD(d_model, INT, "hidden_size", "embedding_length", true, 0, 1, 65536),              \
        MX_FIELD(n_head, INT, "num_attention_heads", "attention.head_count", required, heads, 1,   \
                 1024),                                                                            \
        MX_FIELD(n_kv_head, INT, "num_key_value_heads", "attention.head_count_kv", false,          \
                 kv_heads, 0, 1024),                                                               \
        MX_FIELD(head_dim, INT, "head_dim", "attention.key_length", false, dim, 0, 1024),          \
        MX_FIELD(d_ff, INT, "intermediate_size", "feed_forward_length", true, 0, 1, 1 << 20),      \
        MX_FIELD(n_vocab, INT, "vocab_size", "vocab_size", false, 0, 0, 1 << 22),                  \
        MX_FIELD(max_ctx, INT, "max_position_embeddings", "context_length", false, 0, 0, 1 << 28), \
        MX_FIELD(norm_eps, FLOAT, "rms_norm_eps", "attention.layer_norm_rms_epsilon", false, 1e-6, \
                 0, 1),                                                                            \
        MX_FIELD(tied, BOOL, "tie_word_embeddings", "", false, -1, -1, 1)

// Rotation rows with the usual keys; both spellings of config.json.
#define MX_CONFIG_ROPE(theta)                                                                      \
    MX_FIELD(rope_theta, FLOAT,                                                                    \
             "rope_theta|rope_parameters.rope_theta|rope_parameters.full_attention.rope_theta",    \
             "rope.freq_base", false, theta, 1, 1e12),                                             \
        MX_FIELD(rope_factor, FLOAT,                                                               \
                 "rope_scaling.factor|rope_parameters.factor|"                                     \
                 "rope_parameters.full_attention.factor",                                          \
                 "rope.scaling.factor|rope.scale_linear", false, 1, 1e-3, 1e6),                    \
        MX_FIELD(rope_low, FLOAT, "rope_scaling.low_freq_factor|rope_parameters.low_freq_factor",  \
                 "", false, 1, 1e-3, 1e6),                                                         \
        MX_FIELD(rope_high, FLOAT,                                                                 \
                 "rope_scaling.high_freq_factor|rope_parameters.high_freq_factor", "", false, 4,   \
                 1e-3, 1e6),                                                                       \
        MX_FIELD(rope_orig_ctx, FLOAT,                                                             \
                 "rope_scaling.original_max_position_embeddings|"                                  \
                 "rope_parameters.original_max_position_embeddings",                               \
                 "rope.scaling.original_context_length", false, 8192, 1, 1e9)

#define MX_HF_LAYER "model.layers.%d."
// Weight rows of a pre-norm decoder layer with GQA and a gated MLP.
#define MX_WEIGHTS_COMMON(qk_fix)                                                                   \
    {MX_W_EMBED, "model.embed_tokens", "token_embd", "weight", MX_DIM_V, MX_DIM_D, true, 0,         \
     0,          MX_SHARD_ROWS},                                                                    \
        {MX_W_HEAD, "lm_head", "output", "weight", MX_DIM_V, MX_DIM_D, false, 0, 0, MX_SHARD_ROWS}, \
        {MX_W_Q,                                                                                    \
         MX_HF_LAYER "self_attn.q_proj",                                                            \
         "blk.%d.attn_q",                                                                           \
         "weight",                                                                                  \
         MX_DIM_Q,                                                                                  \
         MX_DIM_D,                                                                                  \
         true,                                                                                      \
         0,                                                                                         \
         qk_fix,                                                                                    \
         MX_SHARD_ROWS},                                                                            \
        {MX_W_K,                                                                                    \
         MX_HF_LAYER "self_attn.k_proj",                                                            \
         "blk.%d.attn_k",                                                                           \
         "weight",                                                                                  \
         MX_DIM_KV,                                                                                 \
         MX_DIM_D,                                                                                  \
         true,                                                                                      \
         0,                                                                                         \
         qk_fix,                                                                                    \
         MX_SHARD_ROWS},                                                                            \
        {MX_W_V,                                                                                    \
         MX_HF_LAYER "self_attn.v_proj",                                                            \
         "blk.%d.attn_v",                                                                           \
         "weight",                                                                                  \
         MX_DIM_KV,                                                                                 \
         MX_DIM_D,                                                                                  \
         true,                                                                                      \
         0,                                                                                         \
         0,                                                                                         \
         MX_SHARD_ROWS},                                                                            \
        {MX_W_O,                                                                                    \
         MX_HF_LAYER "self_attn.o_proj",                                                            \
         "blk.%d.attn_output",                                                                      \
         "weight",                                                                                  \
         MX_DIM_D,                                                                                  \
         MX_DIM_Q,                                                                                  \
         true,                                                                                      \
         0,                                                                                         \
         0,                                                                                         \
         MX_SHARD_COLS},                                                                            \
        {MX_W_GATE,                                                                                 \
         MX_HF_LAYER "mlp.gate_proj",                                                               \
         "blk.%d.ffn_gate",                                                                         \
         "weight",                                                                                  \
         MX_DIM_FF,                                                                                 \
         MX_DIM_D,                                                                                  \
         true,                                                                                      \
         0,                                                                                         \
         0,                                                                                         \
         MX_SHARD_ROWS},                                                                            \
        {MX_W_UP,                                                                                   \
         MX_HF_LAYER "mlp.up_proj",                                                                 \
         "blk.%d.ffn_up",                                                                           \
         "weight",                                                                                  \
         MX_DIM_FF,                                                                                 \
         MX_DIM_D,                                                                                  \
         true,                                                                                      \
         0,                                                                                         \
         0,                                                                                         \
         MX_SHARD_ROWS},                                                                            \
    {                                                                                               \
        MX_W_DOWN, MX_HF_LAYER "mlp.down_proj", "blk.%d.ffn_down", "weight", MX_DIM_D, MX_DIM_FF,   \
            true, 0, 0, MX_SHARD_COLS                                                               \
    }
#define MX_NORM_ROW(slot, hf, gguf, dim, fix)                                                      \
    { slot, hf, gguf, "weight", dim, MX_DIM_NONE, true, fix, 0, MX_SHARD_REPLICATE }
#define MX_BIAS_ROW(slot, hf, gguf, dim, required, gguf_fix)                                       \
    { slot, hf, gguf, "bias", dim, MX_DIM_NONE, required, 0, gguf_fix, MX_SHARD_ROWS }

#endif
