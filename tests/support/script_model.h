// Test support: a model that says what a test wants. One layer whose attention and feed-forward add
// nothing, one-hot embeddings, an output matrix that makes one successor certain for every token: a
// chain of tokens. A prompt that ends with a script's key byte is answered by the script, one piece
// a token, then the end token; after any other byte the same byte comes again, for ever.
#ifndef TESTS_SUPPORT_SCRIPT_MODEL_H
#define TESTS_SUPPORT_SCRIPT_MODEL_H

#include "support/tiny_model.h"

typedef struct script {
    char key;
    const char *pieces; // separated by SCRIPT_CUT, each of two bytes or more and there only once;
                        // may cut UTF-8 sequences; marks of tool calls are control tokens
} script;

#define SCRIPT_CUT "\x1f"

enum { SCRIPT_DIM = 1024, SCRIPT_FIRST = TINY_VOCAB };

// GPT-2's spelling of n bytes.
static inline void script_spell(const char *p, size_t n, char *out) {
    for (size_t i = 0; i < n; i++) {
        tiny_byte_token((unsigned char)p[i], out);
        out += strlen(out);
    }
    *out = 0;
}

static inline int script_vocab(const script *s, size_t n_scripts, char (*text)[64], int32_t *next) {
    int n = SCRIPT_FIRST;
    for (size_t i = 0; i < n_scripts; i++) {
        int from = (unsigned char)s[i].key;
        for (const char *p = s[i].pieces; *p;) {
            size_t len = strcspn(p, SCRIPT_CUT);
            CHECK(n < SCRIPT_DIM && len < 31);
            script_spell(p, len, text[n]);
            next[from] = n;
            from = n++;
            p += len + (p[len] != 0);
        }
        next[from] = TINY_EOS;
    }
    return n;
}

static inline void script_matrix(ckpt *c, const char *name, int64_t rows, int64_t cols) {
    int64_t dim[2] = {rows, cols};
    ckpt_add(c, name, MX_F32, 2, dim, NULL);
}

static inline void script_ones(ckpt *c, const char *name, int64_t n) {
    float *w = ckpt_add(c, name, MX_F32, 1, &n, NULL);
    for (int64_t i = 0; i < n; i++) w[i] = 1.0f;
}

static inline void script_weights(ckpt *c, const int32_t *next, int n_vocab) {
    enum { D = SCRIPT_DIM, KV = SCRIPT_DIM / 8, FF = 32 };
    int64_t dim[2] = {n_vocab, D};
    float *embd = ckpt_add(c, "token_embd.weight", MX_F32, 2, dim, NULL);
    for (int i = 0; i < n_vocab; i++) embd[(size_t)i * D + i] = 1.0f;
    script_ones(c, "blk.0.attn_norm.weight", D);
    script_matrix(c, "blk.0.attn_q.weight", D, D);
    script_matrix(c, "blk.0.attn_k.weight", KV, D);
    script_matrix(c, "blk.0.attn_v.weight", KV, D);
    script_matrix(c, "blk.0.attn_output.weight", D, D);
    script_ones(c, "blk.0.ffn_norm.weight", D);
    script_matrix(c, "blk.0.ffn_gate.weight", FF, D);
    script_matrix(c, "blk.0.ffn_up.weight", FF, D);
    script_matrix(c, "blk.0.ffn_down.weight", D, FF);
    script_ones(c, "output_norm.weight", D);
    float *out = ckpt_add(c, "output.weight", MX_F32, 2, dim, NULL);
    for (int i = 0; i < n_vocab; i++) out[(size_t)next[i] * D + i] = 1.0f; // times sqrt(D) = 32
}

static inline void script_tokens(ckpt *c, char (*text)[64], int n) {
    static const char *tokens[SCRIPT_DIM];
    static int32_t types[SCRIPT_DIM];
    static const char *const merges[] = {"z z"};
    for (int i = 0; i < SCRIPT_FIRST; i++) {
        types[i] = i < 256 ? 1 : 3;
        if (i < 256)
            tiny_byte_token(i, text[i]);
        else
            snprintf(text[i], sizeof text[i], "<|unused%d|>", i);
    }
    snprintf(text[TINY_EOS], sizeof text[0], "<|endoftext|>");
    snprintf(text[TINY_IM_START], sizeof text[0], "<|im_start|>");
    snprintf(text[TINY_IM_END], sizeof text[0], "<|im_end|>");
    snprintf(text[TINY_VOCAB - 1], sizeof text[0], "zz");
    types[TINY_VOCAB - 1] = 1;
    for (int i = 0; i < n; i++) {
        tokens[i] = text[i];
        bool mark = strcmp(text[i], "[TOOL_CALLS]") == 0 || strcmp(text[i], "<|python_tag|>") == 0;
        if (i >= SCRIPT_FIRST) types[i] = mark ? 3 : 1;
    }
    ckpt_kv_str(c, "tokenizer.ggml.model", "gpt2");
    ckpt_kv_str(c, "tokenizer.ggml.pre", "gpt-2");
    ckpt_kv_strs(c, "tokenizer.ggml.tokens", tokens, (size_t)n);
    ckpt_kv_array(c, "tokenizer.ggml.token_type", CKPT_I32, types, (size_t)n, 4);
    ckpt_kv_strs(c, "tokenizer.ggml.merges", merges, 1);
    ckpt_kv_u32(c, "tokenizer.ggml.eos_token_id", TINY_EOS);
    ckpt_kv_bool(c, "tokenizer.ggml.add_bos_token", false);
}

static inline void script_write(const char *path, const script *s, size_t n_scripts,
                                int32_t max_ctx, const char *chat_template) {
    static char text[SCRIPT_DIM][64];
    static int32_t next[SCRIPT_DIM];
    for (int i = 0; i < SCRIPT_DIM; i++) next[i] = i;
    int n = script_vocab(s, n_scripts, text, next);
    ckpt c;
    ckpt_init(&c);
    ckpt_kv_str(&c, "general.architecture", "llama");
    ckpt_kv_u32(&c, "llama.block_count", 1);
    ckpt_kv_u32(&c, "llama.embedding_length", SCRIPT_DIM);
    ckpt_kv_u32(&c, "llama.attention.head_count", 8);
    ckpt_kv_u32(&c, "llama.attention.head_count_kv", 1);
    ckpt_kv_u32(&c, "llama.feed_forward_length", 32);
    ckpt_kv_u32(&c, "llama.context_length", (uint32_t)max_ctx);
    ckpt_kv_f32(&c, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    ckpt_kv_f32(&c, "llama.rope.freq_base", 10000.0f);
    script_tokens(&c, text, n);
    if (chat_template) ckpt_kv_str(&c, "tokenizer.chat_template", chat_template);
    script_weights(&c, next, n);
    ckpt_write_gguf(&c, path);
    ckpt_free(&c);
}

#endif
