// What the loader refuses, and how it says so: every message names the file, the tensor or the key.
// And what it reads by name: towers, ignored tensors, defaults of the families.
#include "backend/cpu/cpu.h"
#include "model/family.h"
#include "model/model.h"
#include "support/golden_model.h"

#include <setjmp.h>
#include <stdarg.h>
// cmocka.h needs the two above and stdio, stdlib
#include <cmocka.h>

static char *dir, *folder, *file;
static mx_backend *backend;

static int set_up(void **state) {
    (void)state;
    mx_err err = {0};
    dir = ckpt_temp_dir();
    folder = mx_path_join(dir, "hf");
    file = mx_path_join(dir, "m.gguf");
    mx_log_set_level(MX_LOG_ERROR);
    return mx_cpu_open(1, &backend, &err) == MX_OK ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    backend->ops->close(backend);
    mx_free(folder);
    mx_free(file);
    ckpt_remove_dir(dir);
    return 0;
}

// ---- A checkpoint that a test changes ----------------------------------------------------------

typedef struct subject {
    json_t *m, *config; // config: of safetensors
    ckpt c;
    bool gguf, foreign; // foreign: U8 is written as F8_E4M3
} subject;

static subject hf(const char *id, const char *form) {
    subject s = {.m = gm_load(id)};
    s.c = gm_tensors_hf(s.m, gm_form(s.m, form), &(gm_folder){0});
    s.config = gm_config(s.m, gm_form(s.m, form), &(gm_folder){0});
    return s;
}

static subject gguf(const char *id) {
    subject s = {.m = gm_load(id), .gguf = true};
    s.c = gm_tensors_gguf(s.m, MX_F32);
    return s;
}

static ckpt_tensor *tensor(subject *s, const char *name) {
    for (size_t i = 0; i < s->c.n_tensors; i++) {
        if (strcmp(s->c.tensors[i].name, name) == 0) return &s->c.tensors[i];
    }
    fail_msg("no %s", name);
    return NULL;
}

static void drop(subject *s, const char *name) {
    ckpt_tensor *t = tensor(s, name);
    mx_free(t->name);
    mx_free(t->data);
    *t = s->c.tensors[--s->c.n_tensors];
}

static void add(subject *s, const char *name, mx_dtype type) {
    int64_t dim[2] = {4, 6};
    ckpt_add(&s->c, name, type, 2, dim, NULL);
}

// Sets "a.b" of config.json; v is taken, NULL removes.
static void set(subject *s, const char *path, json_t *v) {
    json_t *at = s->config;
    const char *dot;
    char key[200];
    while ((dot = strchr(path, '/'))) {
        snprintf(key, sizeof key, "%.*s", (int)(dot - path), path);
        at = json_object_get(at, key);
        assert_non_null(at);
        path = dot + 1;
    }
    if (v)
        json_object_set_new(at, path, v);
    else
        json_object_del(at, path);
}

// The name of a type of one byte that nobody computes with, in the file's header: "U8" becomes
// "F8_E4M3", padded by what the header's alignment leaves.
static void rename_u8(void) {
    char *path = mx_path_join(folder, "model.safetensors"), *bytes;
    size_t n;
    mx_err err = {0};
    assert_int_equal(mx_read_file(path, 1 << 24, &bytes, &n, &err), MX_OK);
    uint64_t header, longer;
    memcpy(&header, bytes, 8);
    char *at = memmem(bytes, 8 + (size_t)header, "\"U8\"", 4);
    assert_non_null(at);
    mx_buf b;
    mx_buf_init(&b, 0);
    longer = (header + 5 + 7) / 8 * 8;
    mx_buf_add(&b, &longer, 8);
    mx_buf_add(&b, bytes + 8, (size_t)(at - bytes) - 8);
    mx_buf_puts(&b, "\"F8_E4M3\"");
    mx_buf_add(&b, at + 4, 8 + (size_t)header - (size_t)(at - bytes) - 4);
    while (b.n < 8 + longer) mx_buf_putc(&b, ' ');
    mx_buf_add(&b, bytes + 8 + header, n - 8 - (size_t)header);
    ckpt_write_file(path, b.data, b.n);
    mx_buf_free(&b);
    mx_free(bytes);
    mx_free(path);
}

typedef struct outcome {
    mx_status st;
    char msg[1024];
    mx_model_info info;
    mx_hparams hp;
    char tower[200];
} outcome;

// Writes, opens, and frees the subject.
static outcome load(subject *s) {
    if (s->gguf)
        ckpt_write_gguf(&s->c, file);
    else
        gm_write_folder(folder, &s->c, s->config);
    if (s->foreign) rename_u8();
    outcome o = {0};
    mx_weights w;
    mx_model *m = NULL;
    mx_err err = {0};
    o.st = mx_weights_open(&w, s->gguf ? file : folder, &err);
    if (o.st != MX_OK) fail_msg("%s", err.msg);
    o.st = mx_model_open(&m, backend, &w, false, &err);
    snprintf(o.msg, sizeof o.msg, "%s", err.msg);
    if (m) {
        mx_model_get_info(m, &o.info);
        o.hp = *o.info.hp;
        const char *t = mx_model_tower(m, 0);
        snprintf(o.tower, sizeof o.tower, "%s", t ? t : "");
        mx_model_close(m);
    }
    mx_weights_close(&w);
    json_decref(s->m);
    json_decref(s->config);
    ckpt_free(&s->c);
    return o;
}

// Refused with `status`, and the message has every one of `parts` (separated by '|').
static void refused(subject s, mx_status status, const char *parts) {
    outcome o = load(&s);
    if (o.st == MX_OK) fail_msg("loaded, expected: %s", parts);
    for (const char *p = parts; *p;) {
        size_t n = strcspn(p, "|");
        if (!memmem(o.msg, strlen(o.msg), p, n)) fail_msg("'%s' lacks '%.*s'", o.msg, (int)n, p);
        p += n + (p[n] == '|');
    }
    if (o.st != status) fail_msg("status %d, expected %d: %s", o.st, status, o.msg);
}

static outcome loaded(subject s) {
    outcome o = load(&s);
    if (o.st != MX_OK) fail_msg("%s", o.msg);
    return o;
}

// ---- Tensors -----------------------------------------------------------------------------------

static void tensors_are_named_when_unknown_missing_or_misshapen(void **state) {
    (void)state;
    subject s = hf("llama/plain", "f32");
    add(&s, "model.layers.1.mlp.surprise.weight", MX_F32);
    refused(s, MX_FORMAT, "hf: |model.layers.1.mlp.surprise.weight|unknown|llama");
    s = hf("llama/plain", "f32");
    drop(&s, "model.layers.2.mlp.up_proj.weight");
    refused(s, MX_FORMAT, "model.layers.2.mlp.up_proj.weight|missing");
    s = hf("llama/plain", "f32");
    drop(&s, "lm_head.weight");
    refused(s, MX_FORMAT, "head is missing");
    s = hf("llama/plain", "f32");
    set(&s, "intermediate_size", json_integer(200));
    refused(s, MX_FORMAT, "gate_proj.weight|(192, 128)|expected (200, 128) = (ff, hidden)");
    s = hf("llama/plain", "f32");
    set(&s, "num_key_value_heads", json_integer(4));
    refused(s, MX_FORMAT, "k_proj.weight|(96, 128)|(192, 128) = (kv_heads x head_dim, hidden)");
    s = hf("qwen3/plain", "f32");
    set(&s, "num_hidden_layers", json_integer(1));
    refused(s, MX_FORMAT, "model.layers.1.|unknown to family qwen3");
    s = gguf("qwen2/plain");
    drop(&s, "blk.1.attn_k.bias");
    refused(s, MX_FORMAT, "m.gguf: |blk.1.attn_k.bias|missing");
    s = gguf("gemma3/default");
    add(&s, "rope_freqs.weight", MX_F32);
    refused(s, MX_FORMAT, "rope_freqs.weight|unknown|gemma3");
}

static void a_foreign_type_is_named(void **state) {
    (void)state;
    static const struct {
        const char *form, *name;
    } t[] = {{"f32", "model.layers.0.mlp.up_proj.weight"},
             {"f32", "model.norm.weight"},
             {"a8", "model.layers.0.mlp.up_proj.weight"},
             {"a8", "model.layers.0.mlp.up_proj.scales"},
             {"a8", "model.layers.0.mlp.up_proj.biases"}};
    for (size_t i = 0; i < MX_COUNT(t); i++) {
        subject s = hf("llama/plain", t[i].form);
        ckpt_tensor *x = tensor(&s, t[i].name);
        x->dtype = MX_U8;
        x->n_bytes = ckpt_shape_bytes(MX_U8, x->n_dim, x->dim);
        s.foreign = true;
        char parts[200];
        snprintf(parts, sizeof parts, "%s|F8_E4M3", t[i].name);
        refused(s, MX_UNSUPPORTED, parts);
    }
}

static void towers_are_listed_and_not_read(void **state) {
    (void)state;
    subject s = hf("gemma3/pattern", "bf16");
    add(&s, "vision_tower.vision_model.embeddings.patch.weight", MX_I8);
    add(&s, "model.multi_modal_projector.mm_input_projection_weight", MX_F32);
    add(&s, "audio_tower.x", MX_F16);
    outcome o = loaded(s), plain = loaded(hf("gemma3/pattern", "bf16"));
    assert_int_equal(o.info.n_towers, 3);
    assert_string_equal(o.tower, "vision_tower.vision_model.embeddings.patch.weight");
    assert_int_equal(o.info.weight_bytes, plain.info.weight_bytes);
    assert_int_equal(plain.info.n_towers, 0);
}

static void derived_tensors_are_ignored_by_name(void **state) {
    (void)state;
    subject s = hf("llama/llama3", "f16");
    add(&s, "model.layers.0.self_attn.rotary_emb.inv_freq", MX_F32);
    add(&s, "lm_head.weight", MX_F32); // tied, as config.json says
    loaded(s);
    s = hf("llama/llama3", "f16");
    add(&s, "model.layers.0.self_attn.rotary_emb.freq_inv", MX_F32);
    refused(s, MX_FORMAT, "rotary_emb.freq_inv|unknown");
}

// ---- Quantisation ------------------------------------------------------------------------------

static void quantisation_must_agree_with_shapes(void **state) {
    (void)state;
    static const char *const down = "quantization/model.layers.1.mlp.down_proj";
    subject s = hf("llama/plain", "a4");
    set(&s, "quantization", NULL);
    refused(s, MX_FORMAT, "model.embed_tokens has scales|no quantization block");
    s = hf("llama/plain", "a4"); // 8 bits taken for 4
    set(&s, down, NULL);
    refused(s, MX_FORMAT, "model.layers.1.mlp.down_proj|(128, 48)|(128, 3)|4 bits in groups of 64");
    s = hf("llama/plain", "a4");
    set(&s, down, json_pack("{s:i,s:i}", "bits", 6, "group_size", 64));
    refused(s, MX_FORMAT, "model.layers.1.mlp.down_proj|6 bits in groups of 64");
    s = hf("llama/plain", "a4");
    set(&s, down, json_pack("{s:i,s:i}", "bits", 8, "group_size", 32));
    refused(s, MX_FORMAT, "model.layers.1.mlp.down_proj|8 bits in groups of 32");
    s = hf("llama/plain", "a4");
    set(&s, "quantization/group_size", json_integer(32));
    refused(s, MX_FORMAT, "in groups of 32");
    s = hf("llama/plain", "a4");
    set(&s, down, json_false());
    refused(s, MX_FORMAT, "model.layers.1.mlp.down_proj|not quantised");
    s = hf("llama/plain", "a4");
    drop(&s, "model.layers.0.mlp.up_proj.biases");
    refused(s, MX_UNSUPPORTED, "model.layers.0.mlp.up_proj|no biases");
    s = hf("llama/plain", "a4");
    drop(&s, "model.layers.0.mlp.up_proj.scales");
    refused(s, MX_FORMAT, "model.layers.0.mlp.up_proj.weight|(192, 16)|expected (192, 128)");
    s = hf("llama/plain", "a4");
    set(&s, "quantization/bits", json_integer(7));
    refused(s, MX_UNSUPPORTED, "7 bits in groups of 64");
    s = hf("llama/plain", "a4");
    set(&s, "quantization/bits", NULL);
    refused(s, MX_FORMAT, "quantization: bits of|missing");
    s = hf("llama/plain", "a4");
    set(&s, "quantization/mode", json_string("mxfp4"));
    refused(s, MX_UNSUPPORTED, "mode 'mxfp4'");
    s = hf("llama/plain", "f16");
    set(&s, "quantization_config", json_pack("{s:s}", "quant_method", "gptq"));
    refused(s, MX_UNSUPPORTED, "config.json|'gptq'");
}

static void overrides_are_found_under_other_prefixes_only_of_the_text_model(void **state) {
    (void)state;
    static const char *const down = "model.layers.1.mlp.down_proj";
    subject s = hf("llama/plain", "a4");
    json_t *q = json_object_get(s.config, "quantization");
    json_t *v = json_incref(json_object_get(q, down));
    json_object_del(q, down);
    json_object_set_new(q, "language_model.model.layers.1.mlp.down_proj", v);
    v = json_incref(json_object_get(q, "model.embed_tokens"));
    json_object_del(q, "model.embed_tokens");
    json_object_set_new(q, "model.language_model.embed_tokens", v);
    loaded(s);
    s = hf("llama/plain", "a4"); // a tower's layer of the same name
    q = json_object_get(s.config, "quantization");
    v = json_incref(json_object_get(q, down));
    json_object_del(q, down);
    json_object_set_new(q, "vision_tower.encoder.layers.1.mlp.down_proj", v);
    refused(s, MX_FORMAT, "model.layers.1.mlp.down_proj|4 bits in groups of 64");
}

// ---- Configuration -----------------------------------------------------------------------------

static void configs_that_are_not_supported_are_named(void **state) {
    (void)state;
    static const struct {
        const char *id, *path, *json, *parts;
        mx_status st;
    } t[] = {
        {"llama/plain", "model_type", "\"mamba\"", "model type: mamba", MX_UNSUPPORTED},
        {"llama/plain", "model_type", "5", "model_type is missing", MX_FORMAT},
        {"llama/plain", "head_dim", "47", "head_dim 47", MX_UNSUPPORTED},
        {"llama/plain", "hidden_act", "\"relu\"", "activation 'relu'", MX_UNSUPPORTED},
        {"gemma3/pattern", "hidden_activation", "\"gelu\"", "activation 'gelu'", MX_UNSUPPORTED},
        {"llama/linear", "rope_scaling", "{\"rope_type\":\"yarn\",\"factor\":2}", "'yarn'",
         MX_UNSUPPORTED},
        {"llama/linear", "rope_scaling", "{\"type\":\"dynamic\",\"factor\":2}", "'dynamic'",
         MX_UNSUPPORTED},
        {"llama/llama3", "rope_parameters/rope_type", "\"longrope\"", "'longrope'", MX_UNSUPPORTED},
        {"llama/plain", "partial_rotary_factor", "0.5", "partial_rotary_factor 0.5",
         MX_UNSUPPORTED},
        {"gemma3/default", "rope_parameters/sliding_attention/rope_type", "\"linear\"",
         "sliding_attention.rope_type 'linear'", MX_UNSUPPORTED},
        {"gemma3/pattern", "use_bidirectional_attention", "true", "use_bidirectional_attention",
         MX_UNSUPPORTED},
        {"qwen3/window", "layer_types", "[\"full_attention\"]", "layer_types", MX_FORMAT},
        {"llama/plain", "num_attention_heads", "3", "3 heads", MX_FORMAT},
        {"llama/plain", "num_hidden_layers", "-1", "num_hidden_layers", MX_FORMAT},
        {"llama/plain", "hidden_size", "128.5", "hidden_size", MX_FORMAT},
        {"llama/plain", "rms_norm_eps", "\"small\"", "rms_norm_eps", MX_FORMAT},
        {"llama/plain", "intermediate_size", NULL, "intermediate_size is missing", MX_FORMAT},
        {"llama/plain", "hidden_act", "5", "hidden_act: not a string", MX_FORMAT},
        {"llama/plain", "text_config", "5", "text_config: not an object", MX_FORMAT},
        {"llama/plain", "quantization", "[4]", "quantization: not an object", MX_FORMAT},
        {"llama/plain", "partial_rotary_factor", "\"half\"", "not a number", MX_FORMAT},
        {"llama/linear", "rope_scaling", "\"linear\"", "rope_scaling: not an object", MX_FORMAT},
        {"llama/linear", "rope_scaling", "{\"rope_type\":5,\"factor\":4}",
         "rope_type: not a string", MX_FORMAT},
        {"llama/linear", "rope_scaling", "{\"factor\":4}", "rope_scaling.rope_type", MX_FORMAT},
        {"llama/llama3", "rope_parameters", "[]", "rope_parameters: not an object", MX_FORMAT},
        {"llama/plain", "eos_token_id", "\"</s>\"", "eos_token_id: not a token id", MX_FORMAT},
        {"llama/plain", "eos_token_id", "[256,1.5]", "eos_token_id: not a token id", MX_FORMAT},
        {"llama/plain", "eos_token_id", "4294967296", "eos_token_id: not a token id", MX_FORMAT},
    };
    for (size_t i = 0; i < MX_COUNT(t); i++) {
        subject s = hf(t[i].id, "f32");
        set(&s, t[i].path, t[i].json ? json_loads(t[i].json, JSON_DECODE_ANY, NULL) : NULL);
        refused(s, t[i].st, t[i].parts);
    }
}

static void gguf_metadata_that_is_not_supported_is_named(void **state) {
    (void)state;
    subject s = gguf("llama/plain");
    ckpt_kv_str(&s.c, "llama.rope.scaling.type", "yarn");
    refused(s, MX_UNSUPPORTED, "m.gguf|'yarn'");
    s = gguf("qwen2/plain");
    ckpt_kv_u32(&s.c, "qwen2.rope.dimension_count", 16);
    refused(s, MX_UNSUPPORTED, "qwen2.rope.dimension_count is 16 with heads of 32");
    s = gguf("gemma3/default");
    uint8_t flags[3] = {1, 1, 0};
    ckpt_kv_array(&s.c, "gemma3.attention.sliding_window_pattern", CKPT_BOOL, flags, 3, 1);
    refused(s, MX_FORMAT, "sliding_window_pattern|7 booleans");
}

static void defaults_are_those_of_the_family(void **state) {
    (void)state;
    subject s = hf("gemma3/pattern", "f32");
    set(&s, "sliding_window_pattern", NULL);
    set(&s, "query_pre_attn_scalar", NULL);
    set(&s, "rope_local_base_freq", NULL);
    outcome o = loaded(s);
    assert_int_equal(o.hp.window_pattern, 6);
    assert_true(o.hp.query_scale_dim == 48 && o.hp.rope_local_theta == 1e4);
    s = hf("qwen2/window", "f32"); // 28 full layers first
    set(&s, "max_window_layers", NULL);
    o = loaded(s);
    assert_int_equal(o.hp.window_from, 28);
    assert_int_equal(o.info.n_kv_groups, 1);
    o = loaded(hf("qwen2/window", "f32"));
    assert_int_equal(o.info.n_kv_groups, 2);
    s = gguf("gemma3/default");
    ckpt_kv_u32(&s.c, "gemma3.attention.sliding_window_pattern", 3);
    assert_int_equal(loaded(s).hp.window_pattern, 3);
    s = gguf("gemma3/default");
    uint8_t flags[7] = {1, 0, 1, 0, 1, 0, 1};
    ckpt_kv_array(&s.c, "gemma3.attention.sliding_window_pattern", CKPT_BOOL, flags, 7, 1);
    assert_int_equal(loaded(s).info.n_kv_groups, 2);
    // null is absent
    s = hf("llama/plain", "f32");
    set(&s, "num_key_value_heads", json_null());
    refused(s, MX_FORMAT, "k_proj.weight|(96, 128)|expected (192, 128)");
}

static void routed_experts_under_every_name(void **state) {
    (void)state;
    static const struct {
        const char *config;
        int32_t want;
    } rows[] = {{"{}", 0},
                {"{\"num_local_experts\":8}", 8},
                {"{\"num_experts\":128}", 128},
                {"{\"n_routed_experts\":256,\"n_shared_experts\":1}", 256},
                {"{\"num_routed_experts\":4}", 4},
                {"{\"moe_num_experts\":2}", 2},
                {"{\"num_experts\":1}", 1},
                {"{\"num_experts\":0,\"n_routed_experts\":64}", 64},
                {"{\"text_config\":{\"num_experts\":16}}", 16},
                {"{\"num_experts\":\"8\"}", 0},
                {"{\"num_experts\":-8}", 0}};
    for (size_t i = 0; i < MX_COUNT(rows); i++) {
        json_t *j = json_loads(rows[i].config, 0, NULL);
        assert_int_equal(mx_config_routed_experts(j), rows[i].want);
        json_decref(j);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_are_named_when_unknown_missing_or_misshapen),
        cmocka_unit_test(a_foreign_type_is_named),
        cmocka_unit_test(towers_are_listed_and_not_read),
        cmocka_unit_test(derived_tensors_are_ignored_by_name),
        cmocka_unit_test(quantisation_must_agree_with_shapes),
        cmocka_unit_test(overrides_are_found_under_other_prefixes_only_of_the_text_model),
        cmocka_unit_test(configs_that_are_not_supported_are_named),
        cmocka_unit_test(gguf_metadata_that_is_not_supported_is_named),
        cmocka_unit_test(defaults_are_those_of_the_family),
        cmocka_unit_test(routed_experts_under_every_name),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
