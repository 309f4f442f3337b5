// String map: linear probing at a load of at most 1/2. Reading is thread-safe once built.
#include "base/map.h"

#include "base/mem.h"

void mx_map_free(mx_map *m) {
    mx_free(m->slots);
    *m = (mx_map){0};
}

// The slot that holds key, or the empty one where it belongs. cap > 0.
static mx_map_slot *find_slot(mx_map_slot *slots, size_t cap, mx_str key, uint32_t hash) {
    size_t i = hash & (cap - 1);
    while (slots[i].key.p && !(slots[i].hash == hash && mx_str_eq(slots[i].key, key))) {
        i = (i + 1) & (cap - 1);
    }
    return &slots[i];
}

void mx_map_reserve(mx_map *m, size_t n) {
    size_t cap = m->cap ? m->cap : 16;
    while (cap < n * 2) cap *= 2;
    if (cap == m->cap) return;
    mx_map_slot *slots = mx_calloc(cap, sizeof *slots);
    for (size_t i = 0; i < m->cap; i++) {
        mx_map_slot *s = &m->slots[i];
        if (s->key.p) *find_slot(slots, cap, s->key, s->hash) = *s;
    }
    mx_free(m->slots);
    m->slots = slots;
    m->cap = cap;
}

static uint32_t hash_key(mx_str key) {
    return (uint32_t)mx_hash64(key.p, key.n, 0);
}

bool mx_map_put(mx_map *m, mx_str key, int32_t value) {
    CHECK(key.p != NULL);
    mx_map_reserve(m, m->n + 1);
    uint32_t h = hash_key(key);
    mx_map_slot *s = find_slot(m->slots, m->cap, key, h);
    if (s->key.p) return false;
    *s = (mx_map_slot){key, h, value};
    m->n++;
    return true;
}

void mx_map_set(mx_map *m, mx_str key, int32_t value) {
    if (!mx_map_put(m, key, value)) {
        find_slot(m->slots, m->cap, key, hash_key(key))->value = value;
    }
}

bool mx_map_get(const mx_map *m, mx_str key, int32_t *value) {
    if (!m->cap || !key.p) return false;
    const mx_map_slot *s = find_slot(m->slots, m->cap, key, hash_key(key));
    if (!s->key.p) return false;
    if (value) *value = s->value;
    return true;
}
