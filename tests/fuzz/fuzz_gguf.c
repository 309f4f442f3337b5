// Any bytes as a GGUF file: read, then every key and tensor of what was accepted is used.
#include "fuzz_weights.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void use_array(const mx_gguf_kv *kv) {
    uint64_t n = MX_MIN(kv->n_elems, 64);
    volatile size_t sum = 0; // reading the last byte is the point
    (void)sum;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t k = i % 2 ? kv->n_elems - 1 - i : i; // from both ends
        if (kv->elem_type == MX_GGUF_STRING) {
            if (kv->strings[k].n) sum += (size_t)kv->strings[k].p[kv->strings[k].n - 1];
            continue;
        }
        double d = mx_gguf_array_f64(kv, k);
        if (kv->elem_type == MX_GGUF_F32 || kv->elem_type == MX_GGUF_F64) continue;
        int64_t v = mx_gguf_array_i64(kv, k);
        CHECK(v < 0 ? d < 0 : d >= 0);
    }
}

static void use_metadata(const mx_weights *w) {
    CHECK(w->alignment >= 8 && (w->alignment & (w->alignment - 1)) == 0);
    for (int32_t i = 0; i < w->n_kv; i++) {
        const mx_gguf_kv *kv = &w->kv[i];
        char key[65536];
        CHECK(kv->key.n > 0 && kv->key.n < sizeof key);
        memcpy(key, kv->key.p, kv->key.n);
        key[kv->key.n] = 0;
        CHECK(mx_gguf_find(w, key) == kv);
        int64_t n;
        double d;
        bool b;
        mx_str s;
        int kinds = mx_gguf_get_f64(w, key, &d) + mx_gguf_get_bool(w, key, &b) +
                    mx_gguf_get_str(w, key, &s) + (kv->type == MX_GGUF_ARRAY);
        CHECK(kinds == 1);
        if (mx_gguf_get_i64(w, key, &n)) CHECK(mx_gguf_get_f64(w, key, &d) && d == (double)n);
        if (kv->type == MX_GGUF_ARRAY) use_array(kv);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    fuzz_open(gguf_read, data, n_bytes, use_metadata);
    return 0;
}
