// Any bytes as JSON under each set of flags: what is accepted is no deeper than the limit and, when
// written and read again, the same value. An object is then read as a config.json by the family
// that its model_type names: sizes that come out are within their bounds, and every layer has a
// spec.
#include "model/family.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static int depth_of(json_t *v) {
    int deepest = 0, d;
    size_t i;
    const char *key;
    json_t *item;
    if (json_is_object(v)) {
        json_object_foreach(v, key, item) deepest = (d = depth_of(item)) > deepest ? d : deepest;
        return deepest + 1;
    }
    if (!json_is_array(v)) return 0;
    json_array_foreach(v, i, item) deepest = (d = depth_of(item)) > deepest ? d : deepest;
    return deepest + 1;
}

static void parse(const char *text, size_t n, int flags) {
    mx_err err = {0};
    json_t *v = mx_json_parse(text, n, 1 << 20, flags, "fuzz", &err);
    if (!v) {
        CHECK(err.status != MX_OK && strncmp(err.msg, "fuzz: ", 6) == 0);
        return;
    }
    CHECK(depth_of(v) <= 128);
    char *out = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
    CHECK(out != NULL);
    json_t *again = mx_json_parse(out, strlen(out), 8 << 20, flags, "again", &err);
    CHECKF(again != NULL, "%s", err.msg);
    CHECK(json_equal(v, again));
    json_decref(again);
    json_decref(v);
    free(out);
}

static void read_config(const char *text, size_t n) {
    mx_err err = {0};
    mx_weights w = {.container = MX_CONTAINER_SAFETENSORS, .path = "fuzz"};
    w.config = mx_json_parse(text, n, 1 << 20, MX_JSON_CONFIG, "fuzz", &err);
    const mx_family *f;
    mx_hparams hp;
    mx_arena a;
    mx_arena_init(&a, (size_t)16 << 20);
    bool ok = w.config && mx_family_of(&w, &f, &err) == MX_OK &&
              mx_hparams_read(f, &w, &hp, &a, &err) == MX_OK;
    if (ok) {
        CHECK(hp.n_layer >= 1 && hp.n_layer <= 1024 && hp.head_dim >= 2 && hp.head_dim <= 512);
        CHECK(hp.n_kv_head >= 1 && hp.n_head % hp.n_kv_head == 0 && hp.n_vocab >= 1);
        mx_layer_spec s;
        for (int32_t il = 0; il < hp.n_layer; il++) {
            mx_layer_spec_make(f, &hp, il, &s);
            CHECK(s.attn.window >= 0 && s.attn.scale > 0 && s.rope >= 0 && s.rope <= 1);
        }
    } else {
        CHECK(err.status != MX_OK && err.msg[0]);
    }
    json_decref(w.config);
    mx_arena_free(&a);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    read_config((const char *)data, n_bytes);
    static const int flags[] = {MX_JSON_STRICT, MX_JSON_CONFIG, MX_JSON_VOCAB};
    for (size_t i = 0; i < MX_COUNT(flags); i++) parse((const char *)data, n_bytes, flags[i]);
    return 0;
}
