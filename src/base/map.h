// Hash map from byte strings to 32-bit values (open addressing, insertion only).
#ifndef MX_BASE_MAP_H
#define MX_BASE_MAP_H

#include "base/str.h"

// Keys are NOT copied: they must outlive the map. Zero-initialised is a valid empty map.
typedef struct mx_map_slot {
    mx_str key;
    uint32_t hash;
    int32_t value;
} mx_map_slot;

typedef struct mx_map {
    mx_map_slot *slots;
    size_t n, cap;
} mx_map;

void mx_map_free(mx_map *m);
void mx_map_reserve(mx_map *m, size_t n); // room for n keys without growing
// Adds key -> value. Returns false, changing nothing, when the key is there already.
bool mx_map_put(mx_map *m, mx_str key, int32_t value);
void mx_map_set(mx_map *m, mx_str key, int32_t value);        // adds or replaces
bool mx_map_get(const mx_map *m, mx_str key, int32_t *value); // value may be NULL

#endif
