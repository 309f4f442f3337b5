// The vocabulary: texts by id and ids by text.
//
// State: arrays of struct vocab, owned by one tokenizer, constant after loading. Does not know what
// a token means. Texts lie in one block and are named by offset; a slot of the index holds the hash
// beside the id, so that a look-up touches the text only when it is very likely the one.
#include "text/vocab_int.h"

#include "base/mem.h"

enum { MAX_PROBES = 20000, MAX_BYTES = 1 << 30 };

void vocab_free(vocab *v) {
    mx_free(v->bytes);
    mx_free(v->text);
    mx_free(v->piece);
    mx_free(v->flags);
    mx_free(v->slots);
    *v = (vocab){0};
}

static uint32_t hash_text(mx_str s) {
    uint64_t h = s.n * 0x9e3779b97f4a7c15u;
    const char *p = s.p;
    size_t n = s.n;
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        h = (h ^ w) * 0xd6e8feb86659fd93u;
        h ^= h >> 32;
    }
    uint64_t w = 0;
    memcpy(&w, p, n);
    h = (h ^ w) * 0xd6e8feb86659fd93u;
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93u;
    return (uint32_t)(h >> 32);
}

static void grow_slots(vocab *v, uint32_t n_tokens) {
    uint32_t cap = v->n_slots ? v->n_slots : 1024;
    while (cap < n_tokens * 2) cap *= 2;
    if (cap == v->n_slots) return;
    uint64_t *slots = mx_calloc(cap, sizeof *slots);
    for (uint32_t i = 0; i < v->n_slots; i++) {
        uint64_t s = v->slots[i];
        if (!s) continue;
        uint32_t k = (uint32_t)(s >> 32) & (cap - 1);
        while (slots[k]) k = (k + 1) & (cap - 1);
        slots[k] = s;
    }
    mx_free(v->slots);
    v->slots = slots;
    v->n_slots = cap;
}

static void grow_ids(vocab *v, uint32_t n_ids) {
    if (n_ids <= v->cap) return;
    uint32_t cap = MX_MAX(v->cap * 2, MX_MAX(n_ids, 64u));
    v->text = mx_realloc(v->text, cap * sizeof *v->text);
    v->piece = mx_realloc(v->piece, cap * sizeof *v->piece);
    v->flags = mx_realloc(v->flags, cap * sizeof *v->flags);
    memset(v->text + v->cap, 0, (cap - v->cap) * sizeof *v->text);
    memset(v->piece + v->cap, 0, (cap - v->cap) * sizeof *v->piece);
    memset(v->flags + v->cap, 0, (cap - v->cap) * sizeof *v->flags);
    v->cap = cap;
}

static void grow_bytes(vocab *v, size_t n_bytes) {
    CHECK(n_bytes <= MAX_BYTES);
    if (n_bytes <= v->cap_bytes) return;
    v->cap_bytes = MX_MAX(v->cap_bytes * 2, n_bytes);
    v->bytes = mx_realloc(v->bytes, v->cap_bytes);
}

void vocab_reserve(vocab *v, uint32_t n_ids, size_t n_bytes) {
    grow_ids(v, MX_MIN(n_ids, (uint32_t)VOCAB_MAX_ID + 1));
    grow_slots(v, MX_MIN(n_ids, (uint32_t)VOCAB_MAX_ID + 1));
    grow_bytes(v, MX_MIN(n_bytes, (size_t)MAX_BYTES));
}

vocab_range vocab_store(vocab *v, mx_str s) {
    grow_bytes(v, v->n_bytes + s.n);
    if (s.n) memcpy(v->bytes + v->n_bytes, s.p, s.n);
    vocab_range r = {(uint32_t)v->n_bytes, (uint32_t)s.n};
    v->n_bytes += s.n;
    return r;
}

mx_status vocab_put(vocab *v, int64_t id, mx_str text, mx_err *err) {
    if (id < 0 || id > VOCAB_MAX_ID) {
        return mx_err_set(err, MX_FORMAT, "id %lld is outside 0..%d", (long long)id, VOCAB_MAX_ID);
    }
    if (text.n == 0) return mx_err_set(err, MX_FORMAT, "token %lld is empty", (long long)id);
    if (text.n > VOCAB_MAX_TOKEN || v->n_bytes + text.n > MAX_BYTES) {
        return mx_err_set(err, MX_TOOLARGE, "token %lld has %zu bytes, at most %d are taken",
                          (long long)id, text.n, VOCAB_MAX_TOKEN);
    }
    grow_ids(v, (uint32_t)id + 1);
    if (v->flags[id] & TOK_EXISTS) {
        mx_str old = vocab_text(v, (uint32_t)id);
        return mx_err_set(err, MX_FORMAT, "id %lld is given to '%.*s' and to '%.*s'", (long long)id,
                          (int)MX_MIN(old.n, 80u), old.p, (int)MX_MIN(text.n, 80u), text.p);
    }
    grow_slots(v, v->n_tokens + 1);
    uint32_t h = hash_text(text), i = h & (v->n_slots - 1), probes = 0;
    for (; v->slots[i]; i = (i + 1) & (v->n_slots - 1)) {
        uint32_t other = (uint32_t)v->slots[i] - 1;
        if (v->slots[i] >> 32 == h && mx_str_eq(vocab_text(v, other), text)) {
            return mx_err_set(err, MX_FORMAT, "ids %u and %lld have the same text '%.*s'", other,
                              (long long)id, (int)MX_MIN(text.n, 80u), text.p);
        }
        if (++probes > MAX_PROBES) {
            return mx_err_set(err, MX_FORMAT, "texts made to collide in a hash table");
        }
    }
    v->slots[i] = (uint64_t)h << 32 | ((uint32_t)id + 1);
    v->flags[id] = TOK_EXISTS;
    v->text[id] = v->piece[id] = vocab_store(v, text);
    v->n = MX_MAX(v->n, (uint32_t)id + 1);
    v->n_tokens++;
    v->max_token_bytes = MX_MAX(v->max_token_bytes, (uint32_t)text.n);
    return MX_OK;
}

int32_t vocab_find(const vocab *v, mx_str text) {
    if (!v->n_slots || text.n > v->max_token_bytes) return -1;
    uint32_t h = hash_text(text);
    for (uint32_t i = h & (v->n_slots - 1); v->slots[i]; i = (i + 1) & (v->n_slots - 1)) {
        uint32_t id = (uint32_t)v->slots[i] - 1;
        if (v->slots[i] >> 32 == h && mx_str_eq(vocab_text(v, id), text)) return (int32_t)id;
    }
    return -1;
}
