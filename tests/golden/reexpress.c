// reexpress MODEL.gguf: by hand, for real models (make check-reexpress MODEL=…). Writes the model
// again in a temporary place:
//   as an MLX folder, no bit of a weight changed: Q4_1 blocks as affine 4-bit and Q8_0 as affine
//   8-bit in groups of 32, Q and K rows in Hugging Face's order;
//   rounded to f16, as a GGUF file and as a Hugging Face folder.
// The model and the MLX folder must give the same 64 greedy tokens and the same logits for ten
// prompts, in the default and the float-exact mode; so must the two of f16. Families whose norms
// GGUF stores changed (Gemma) are refused.
#include "base/knobs.h"
#include "mlxcel.h"
#include "model/family.h"
#include "support/golden_model.h"
#include "text/tokenizer.h"

enum { N_TOKENS = 64 };

static const char *const prompts[] = {
    "The capital of France is",          "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",           "Water boils at 100 degrees because",
    "Q: What is 17 + 25?\nA:",           "The three laws of motion are",
    "Liebe Anna, ich schreibe dir aus",  "A list of fruits:\n1. apple\n2.",
    "SELECT name, age FROM users WHERE", "In 1969, people first",
};

static void check(mx_status st, const mx_err *err) {
    CHECKF(st == MX_OK, "%s", err->msg);
}

// ---- The folder --------------------------------------------------------------------------------

typedef struct source {
    mx_weights w;
    const mx_family *family;
    mx_hparams hp;
    mx_arena arena;
    ckpt out, out_gguf; // out_gguf: f16 only
    bool f16;
    json_t *overrides;
    uint8_t bits; // of the checkpoint; tensors with others are overrides
} source;

static uint8_t affine_bits(mx_dtype t) {
    return t == MX_Q4_1 ? 4 : t == MX_Q8_0 ? 8 : 0;
}

static void add_affine(source *s, const mx_wtensor *t, const char *stem, bool permuted) {
    mx_wfmt f = {
        .dtype = MX_AFFINE, .bits = affine_bits(t->dtype), .group = 32, .scale_dtype = MX_F16};
    gm_tensor shape = {.rows = t->dim[0], .cols = t->dim[1]};
    void *plane[3];
    gm_add_planes(&s->out, stem, f, &shape, plane);
    size_t row_bytes = ckpt_shape_bytes(t->dtype, 1, &t->dim[1]);
    for (int64_t r = 0; r < t->dim[0]; r++) {
        int64_t from = gm_gguf_row(r, s->hp.head_dim, permuted);
        gm_blocks_to_affine(t->dtype, (const uint8_t *)t->data + (size_t)from * row_bytes,
                            t->dim[1], (uint8_t *)plane[0] + r * t->dim[1] * f.bits / 8,
                            (uint16_t *)plane[1] + r * t->dim[1] / 32,
                            (uint16_t *)plane[2] + r * t->dim[1] / 32);
    }
    if (f.bits != s->bits) {
        json_object_set_new(s->overrides, stem,
                            json_pack("{s:i,s:i}", "bits", f.bits, "group_size", 32));
    }
}

static void add_f16(source *s, const mx_wtensor *t, const char *hf, const char *gguf,
                    bool permuted) {
    mx_wview v = {
        .fmt = mx_wfmt_of(t->dtype), .n_rows = t->dim[0], .n_cols = t->dim[1], .data = t->data};
    char *a = ckpt_add(&s->out, hf, MX_F16, 2, t->dim, NULL);
    char *b = ckpt_add(&s->out_gguf, gguf, MX_F16, 2, t->dim, NULL);
    size_t row_bytes = (size_t)v.n_cols * 2;
    float *x = mx_alloc((size_t)v.n_cols * sizeof *x);
    for (int64_t r = 0; r < v.n_rows; r++) {
        size_t from = (size_t)gm_gguf_row(r, s->hp.head_dim, permuted);
        mx_dequant_row(&v, (int64_t)from, x);
        mx_quant_row(MX_F16, x, v.n_cols, a + (size_t)r * row_bytes);
        memcpy(b + from * row_bytes, a + (size_t)r * row_bytes, row_bytes);
    }
    mx_free(x);
}

static void copy_metadata(source *s) {
    static const size_t size[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8}; // by mx_gguf_type
    ckpt *c = &s->out_gguf;
    for (int32_t i = 0; i < s->w.n_kv; i++) {
        const mx_gguf_kv *kv = &s->w.kv[i];
        char *key = mx_arena_strndup(&s->arena, kv->key.p, kv->key.n);
        if (kv->type == MX_GGUF_STRING) {
            ckpt_kv_str(c, key, mx_arena_strndup(&s->arena, kv->v.s.p, kv->v.s.n));
        } else if (kv->type == MX_GGUF_ARRAY && kv->strings) {
            const char **list = MX_ARENA_ARRAY(&s->arena, const char *, kv->n_elems);
            for (uint64_t k = 0; k < kv->n_elems; k++) {
                list[k] = mx_arena_strndup(&s->arena, kv->strings[k].p, kv->strings[k].n);
            }
            ckpt_kv_strs(c, key, list, kv->n_elems);
        } else if (kv->type == MX_GGUF_ARRAY) {
            ckpt_kv_array(c, key, kv->elem_type, kv->data, kv->n_elems, size[kv->elem_type]);
        } else if (kv->type == MX_GGUF_F32) {
            ckpt_kv_f32(c, key, (float)kv->v.f);
        } else { // little-endian: the first bytes of the widened value
            ckpt_kv(c, key, kv->type, &kv->v, size[kv->type]);
        }
    }
}

static void add_row(source *s, const mx_weight_row *r, int64_t il) {
    char stem[160], name[170], hf[170];
    gm_name(stem, sizeof stem, r->gguf, il);
    snprintf(name, sizeof name, "%s.%s", stem, r->suffix);
    const mx_wtensor *t = mx_weights_find(&s->w, mx_str_of(name));
    if (!t) return;
    bool permuted = r->fix_gguf & MX_FIX_UNPERMUTE;
    gm_name(stem, sizeof stem, r->hf, il);
    CHECKF(r->fix_hf == 0 && r->hf, "%s: not the same numbers in both containers", name);
    if (t->n_dim == 2 && s->f16) {
        snprintf(hf, sizeof hf, "%s.%s", stem, r->suffix);
        add_f16(s, t, hf, name, permuted);
        return;
    }
    if (t->n_dim == 2 && affine_bits(t->dtype)) {
        add_affine(s, t, stem, permuted);
        return;
    }
    CHECKF(mx_dtype_is_float(t->dtype) && !permuted, "%s: type %s", name,
           mx_dtype_get(t->dtype)->name);
    snprintf(hf, sizeof hf, "%s.%s", stem, r->suffix);
    ckpt_add(&s->out, hf, t->dtype, t->n_dim, t->dim, t->data);
    if (s->f16) ckpt_add(&s->out_gguf, name, t->dtype, t->n_dim, t->dim, t->data);
}

static json_t *strings(const mx_weights *w, const char *key) {
    const mx_gguf_kv *kv = mx_gguf_find(w, key);
    CHECKF(kv && kv->strings, "%s", key);
    json_t *list = json_array();
    for (uint64_t i = 0; i < kv->n_elems; i++) {
        json_array_append_new(list, json_stringn(kv->strings[i].p, kv->strings[i].n));
    }
    return list;
}

// A byte-level tokenizer.json with the GGUF's tokens: enough to decode ids and to know the ends.
static void write_tokenizer(const source *s, const char *dir) {
    json_t *tokens = strings(&s->w, "tokenizer.ggml.tokens"), *vocab = json_object();
    json_t *added = json_array();
    const mx_gguf_kv *types = mx_gguf_find(&s->w, "tokenizer.ggml.token_type");
    for (size_t i = 0; i < json_array_size(tokens); i++) {
        json_t *text = json_array_get(tokens, i);
        if (types && mx_gguf_array_i64(types, i) == 3) {
            json_array_append_new(added, json_pack("{s:i,s:O,s:b,s:b,s:b,s:b,s:b}", "id", (int)i,
                                                   "content", text, "special", 1, "normalized", 0,
                                                   "single_word", 0, "lstrip", 0, "rstrip", 0));
        }
        json_object_set_new(vocab, json_string_value(text), json_integer((json_int_t)i));
    }
    json_t *bytes = json_pack("{s:s,s:b,s:b,s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                              "trim_offsets", 1, "use_regex", 1);
    json_t *all = json_pack("{s:s,s:o,s:n,s:O,s:n,s:o,s:{s:s,s:o,s:o}}", "version", "1.0",
                            "added_tokens", added, "normalizer", "pre_tokenizer", bytes,
                            "post_processor", "decoder", bytes, "model", "type", "BPE", "vocab",
                            vocab, "merges", strings(&s->w, "tokenizer.ggml.merges"));
    char *path = mx_path_join(dir, "tokenizer.json");
    CHECK(json_dump_file(all, path, 0) == 0);
    mx_free(path);
    json_decref(all);
    json_decref(tokens);
}

static json_t *end_ids(const source *s) {
    mx_tokenizer *t;
    mx_err err = {0};
    int32_t ids[64];
    check(mx_tokenizer_open_gguf(&t, &s->w, &err), &err);
    int32_t n = mx_tokenizer_eos_ids(t, ids, 64);
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++) json_array_append_new(list, json_integer(ids[i]));
    mx_tokenizer_close(t);
    return list;
}

static json_t *config_of(const source *s) {
    const mx_hparams *h = &s->hp;
    CHECK(h->rope_type == MX_ROPE_DEFAULT && h->window == 0);
    json_t *c =
        json_pack("{s:s,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:f,s:f,s:o}", "model_type",
                  s->family->hf_types[0], "num_hidden_layers", h->n_layer, "hidden_size",
                  h->d_model, "num_attention_heads", h->n_head, "num_key_value_heads", h->n_kv_head,
                  "head_dim", h->head_dim, "intermediate_size", h->d_ff, "vocab_size", h->n_vocab,
                  "max_position_embeddings", h->max_ctx, "rms_norm_eps", h->norm_eps, "rope_theta",
                  h->rope_theta, "eos_token_id", end_ids(s));
    if (s->f16) return c;
    json_object_set_new(s->overrides, "bits", json_integer(s->bits));
    json_object_set_new(s->overrides, "group_size", json_integer(32));
    json_object_set(c, "quantization", s->overrides);
    return c;
}

// out_gguf: NULL, or the file of f16.
static void write_folder(const char *gguf, const char *dir, const char *out_gguf) {
    source s = {.overrides = json_object(), .f16 = out_gguf != NULL};
    mx_err err = {0};
    check(mx_weights_open(&s.w, gguf, &err), &err);
    check(mx_family_of(&s.w, &s.family, &err), &err);
    mx_arena_init(&s.arena, 0);
    check(mx_hparams_read(s.family, &s.w, &s.hp, &s.arena, &err), &err);
    const mx_wtensor *down = mx_weights_find(&s.w, mx_str_of("blk.0.ffn_down.weight"));
    CHECKF(down && affine_bits(down->dtype), "%s: neither Q4_1 nor Q8_0", gguf);
    s.bits = affine_bits(down->dtype);
    ckpt_init(&s.out);
    ckpt_init(&s.out_gguf);
    if (s.f16) copy_metadata(&s);
    for (size_t i = 0; i < s.family->n_weights; i++) {
        const mx_weight_row *r = &s.family->weights[i];
        int64_t n = r->slot < MX_W_GLOBALS ? 1 : s.hp.n_layer;
        for (int64_t il = 0; r->gguf && il < n; il++) add_row(&s, r, il);
    }
    json_t *config = config_of(&s);
    char *text = json_dumps(config, 0);
    ckpt_write_safetensors(&s.out, dir, text);
    write_tokenizer(&s, dir);
    if (out_gguf) ckpt_write_gguf(&s.out_gguf, out_gguf);
    printf("%s: %d tensors, %zu written\n", gguf, s.w.n_tensors, s.out.n_tensors);
    free(text);
    json_decref(config);
    json_decref(s.overrides);
    ckpt_free(&s.out);
    ckpt_free(&s.out_gguf);
    mx_weights_close(&s.w);
    mx_arena_free(&s.arena);
}

// ---- Both --------------------------------------------------------------------------------------

static mlxcel_engine *open_engine(const char *path) {
    mlxcel_params p = {.model = path, .device = "cpu", .ctx_size = 512};
    mlxcel_engine *e = NULL;
    mlxcel_error err = {0};
    CHECKF(mlxcel_open(&e, &p, &err) == 0, "%s", err.message);
    return e;
}

typedef struct answer {
    uint64_t tokens, logits;
    int32_t n;
} answer;

static answer run(mlxcel_engine *e, const int32_t *ids, size_t n) {
    mlxcel_request_params p;
    mlxcel_request_params_init(&p);
    p.ids = ids;
    p.n_ids = n;
    p.max_tokens = N_TOKENS;
    p.hash_logits = true;
    mlxcel_request *r;
    mlxcel_error err = {0};
    CHECKF(mlxcel_submit(e, &p, &r, &err) == 0, "%s", err.message);
    answer a = {0};
    mlxcel_event ev;
    while (mlxcel_next_event(r, -1, &ev)) {
        if (ev.kind != MLXCEL_EVENT_DONE) continue;
        CHECKF(ev.error.status == 0, "%s", ev.error.message);
        a = (answer){ev.token_hash, ev.logit_hash, ev.timings.n_decoded};
    }
    mlxcel_request_free(r);
    return a;
}

// Number of prompts that differ.
static int compare(const char *gguf, const char *dir, const char *mode) {
    setenv("MLXCEL_EXACT", mode, 1);
    mx_knobs_reload();
    mlxcel_engine *a = open_engine(gguf), *b = open_engine(dir);
    int bad = 0;
    for (size_t i = 0; i < MX_COUNT(prompts); i++) {
        int32_t *ids;
        size_t n;
        mlxcel_error err = {0};
        CHECKF(mlxcel_tokenize(a, prompts[i], strlen(prompts[i]), true, false, &ids, &n, &err) == 0,
               "%s", err.message);
        answer x = run(a, ids, n), y = run(b, ids, n);
        bool tokens = x.tokens == y.tokens && x.n == y.n, logits = x.logits == y.logits;
        printf("exact %s, prompt %zu: %d and %d tokens, %s, logits %s\n", mode, i, x.n, y.n,
               tokens ? "the same" : "DIFFERENT", logits ? "the same" : "DIFFERENT");
        bad += !tokens || !logits;
        mlxcel_free(ids);
    }
    mlxcel_close(a);
    mlxcel_close(b);
    return bad;
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "reexpress MODEL.gguf\n");
        return 2;
    }
    mx_log_set_level(MX_LOG_WARN);
    char *dir = ckpt_temp_dir(), *file = mx_path_join(dir, "f16.gguf");
    write_folder(argv[1], dir, NULL);
    int bad = compare(argv[1], dir, "0") + compare(argv[1], dir, "1");
    write_folder(argv[1], dir, file);
    bad += compare(file, dir, "0") + compare(file, dir, "1");
    mx_free(file);
    ckpt_remove_dir(dir);
    printf("%d of %zu runs differ\n", bad, 4 * MX_COUNT(prompts));
    return bad ? 1 : 0;
}
