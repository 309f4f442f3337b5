// Test support: a tiny Llama (with a window: Gemma 3) as GGUF with a byte-level vocabulary, its
// weights from the hash.
#ifndef TESTS_SUPPORT_TINY_MODEL_H
#define TESTS_SUPPORT_TINY_MODEL_H

#include "support/ckpt_writer.h"

typedef struct tiny_opts { // zero means the default
    int32_t n_layer;       // 2
    int32_t d_model;       // 64
    int32_t n_head;        // 4
    int32_t n_kv_head;     // 2
    int32_t d_ff;          // 96
    int32_t max_ctx;       // 512
    int32_t window;        // 0: none; else every other layer sees as many positions
    mx_dtype type;         // F32 (the zero value): of the matrices
    uint32_t file_type;    // what the file says of itself, when not 0
    const char *chat_template;
    bool suggests; // sampling: temperature 0.25, top_k 33, min_p out of range
} tiny_opts;

enum { TINY_EOS = 256, TINY_IM_START = 257, TINY_IM_END = 258, TINY_VOCAB = 272 };

static inline int32_t tiny_or(int32_t v, int32_t d) {
    return v ? v : d;
}

// GPT-2's printable stand-in for a byte, as UTF-8.
static inline void tiny_byte_token(int b, char out[8]) {
    bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    uint32_t cp = (uint32_t)b;
    if (!printable) {
        cp = 256;
        for (int i = 0; i < b; i++) {
            cp += !((i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174);
        }
    }
    int n = mx_utf8_encode(cp, out);
    out[n] = 0;
}

static inline void tiny_vocab(ckpt *c) {
    static char text[TINY_VOCAB][16];
    const char *tokens[TINY_VOCAB];
    int32_t types[TINY_VOCAB];
    for (int i = 0; i < TINY_VOCAB; i++) {
        types[i] = i < 256 ? 1 : 3;
        if (i < 256)
            tiny_byte_token(i, text[i]);
        else
            snprintf(text[i], sizeof text[i], "<|unused%d|>", i);
        tokens[i] = text[i];
    }
    tokens[TINY_EOS] = "<|endoftext|>";
    tokens[TINY_IM_START] = "<|im_start|>";
    tokens[TINY_IM_END] = "<|im_end|>";
    // one merge keeps the list non-empty; its result is not in the text of the tests
    static const char *const merges[] = {"z z"};
    tokens[TINY_VOCAB - 1] = "zz";
    types[TINY_VOCAB - 1] = 1;
    ckpt_kv_str(c, "tokenizer.ggml.model", "gpt2");
    ckpt_kv_str(c, "tokenizer.ggml.pre", "gpt-2");
    ckpt_kv_strs(c, "tokenizer.ggml.tokens", tokens, TINY_VOCAB);
    ckpt_kv_array(c, "tokenizer.ggml.token_type", CKPT_I32, types, TINY_VOCAB, 4);
    ckpt_kv_strs(c, "tokenizer.ggml.merges", merges, 1);
    ckpt_kv_u32(c, "tokenizer.ggml.eos_token_id", TINY_EOS);
    ckpt_kv_bool(c, "tokenizer.ggml.add_bos_token", false);
}

static inline void tiny_matrix(ckpt *c, const char *name, mx_dtype t, int64_t rows, int64_t cols) {
    int64_t dim[2] = {rows, cols};
    ckpt_add_hash(c, name, t, 2, dim, 1.7f / sqrtf((float)cols));
}

// Norm weights of one plus something small.
static inline void tiny_norm(ckpt *c, const char *name, int64_t n) {
    float *w = ckpt_add(c, name, MX_F32, 1, &n, NULL);
    ckpt_fill(w, (size_t)n, name, 0, 0.1f);
    for (int64_t i = 0; i < n; i++) w[i] += 1.0f;
}

static inline void tiny_layer(ckpt *c, const tiny_opts *o, int il, int64_t d, int64_t kv,
                              int64_t ff) {
    char name[64];
#define TINY(part) (snprintf(name, sizeof name, "blk.%d." part ".weight", il), name)
    tiny_norm(c, TINY("attn_norm"), d);
    tiny_matrix(c, TINY("attn_q"), o->type, d, d);
    tiny_matrix(c, TINY("attn_k"), o->type, kv, d);
    tiny_matrix(c, TINY("attn_v"), o->type, kv, d);
    tiny_matrix(c, TINY("attn_output"), o->type, d, d);
    tiny_norm(c, TINY("ffn_norm"), d);
    tiny_matrix(c, TINY("ffn_gate"), o->type, ff, d);
    tiny_matrix(c, TINY("ffn_up"), o->type, ff, d);
    tiny_matrix(c, TINY("ffn_down"), o->type, d, ff);
    if (o->window) {
        int64_t head = d / tiny_or(o->n_head, 4);
        tiny_norm(c, TINY("post_attention_norm"), d);
        tiny_norm(c, TINY("post_ffw_norm"), d);
        tiny_norm(c, TINY("attn_q_norm"), head);
        tiny_norm(c, TINY("attn_k_norm"), head);
    }
#undef TINY
}

static inline void tiny_config(ckpt *c, const tiny_opts *o) {
    const char *arch = o->window ? "gemma3" : "llama";
    int32_t d = tiny_or(o->d_model, 64), heads = tiny_or(o->n_head, 4);
    const struct {
        const char *key;
        int32_t value;
    } rows[] = {{"block_count", tiny_or(o->n_layer, 2)},
                {"embedding_length", d},
                {"attention.head_count", heads},
                {"attention.head_count_kv", tiny_or(o->n_kv_head, 2)},
                {"feed_forward_length", tiny_or(o->d_ff, 96)},
                {"context_length", tiny_or(o->max_ctx, 512)},
                {"attention.key_length", d / heads},
                {"attention.value_length", d / heads},
                {"attention.sliding_window", o->window},
                {"attention.sliding_window_pattern", 2}};
    char key[64];
    ckpt_kv_str(c, "general.architecture", arch);
    for (size_t i = 0; i < MX_COUNT(rows) - (o->window ? 0 : 4); i++) {
        snprintf(key, sizeof key, "%s.%s", arch, rows[i].key);
        ckpt_kv_u32(c, key, (uint32_t)rows[i].value);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", arch);
    ckpt_kv_f32(c, key, 1e-5f);
    snprintf(key, sizeof key, "%s.rope.freq_base", arch);
    ckpt_kv_f32(c, key, 10000.0f);
}

// Writes the model to path.
static inline void tiny_write(const char *path, const tiny_opts *o) {
    int32_t d = tiny_or(o->d_model, 64), heads = tiny_or(o->n_head, 4);
    int32_t kv_heads = tiny_or(o->n_kv_head, 2), ff = tiny_or(o->d_ff, 96);
    int32_t layers = tiny_or(o->n_layer, 2);
    ckpt c;
    ckpt_init(&c);
    tiny_config(&c, o);
    tiny_vocab(&c);
    if (o->file_type) ckpt_kv_u32(&c, "general.file_type", o->file_type);
    if (o->chat_template) ckpt_kv_str(&c, "tokenizer.chat_template", o->chat_template);
    if (o->suggests) {
        ckpt_kv_f32(&c, "general.sampling.temp", 0.25f);
        ckpt_kv_u32(&c, "general.sampling.top_k", 33);
        ckpt_kv_f32(&c, "general.sampling.min_p", 1.5f);
    }
    tiny_matrix(&c, "token_embd.weight", o->type, TINY_VOCAB, d);
    for (int il = 0; il < layers; il++) tiny_layer(&c, o, il, d, d / heads * kv_heads, ff);
    tiny_norm(&c, "output_norm.weight", d);
    ckpt_write_gguf(&c, path);
    ckpt_free(&c);
}

#endif
