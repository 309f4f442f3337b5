// The prefix index: which full pages of which token sequences are still in memory.
//
// A radix tree whose edges are pages: a node is one page of tokens after its parent's, and holds a
// reference to that page in every layer group (-1 where a window had passed when it was stored). A
// hit is the deepest node up to which every group can be restored. Engine thread only.
#ifndef MX_KV_PREFIX_H
#define MX_KV_PREFIX_H

#include "kv/kv.h"

typedef struct mx_prefix mx_prefix;

// max_bytes caps the pages held and the index itself; checked before a page is kept.
mx_prefix *mx_prefix_open(mx_kv *kv, uint64_t max_bytes);
void mx_prefix_close(mx_prefix *p);

// Looks up tokens under a salt (other salts never match) and starts the empty sequence seq from
// what is found: at most n_tokens - 1 positions, so that one token is left to run. Returns the
// positions restored; *why (static text) says why it is not more.
int32_t mx_prefix_restore(mx_prefix *p, uint64_t salt, const int32_t *tokens, int32_t n_tokens,
                          int32_t seq, const char **why);
// Keeps the full pages of seq, whose first n_tokens tokens are known and computed. Pages already
// in the index are only marked as used.
void mx_prefix_store(mx_prefix *p, uint64_t salt, const int32_t *tokens, int32_t n_tokens,
                     int32_t seq);
// Gives back least recently used pages until the pool has n_free free pages in every group, or
// nothing is left that would help. Returns true when it has.
bool mx_prefix_make_room(mx_prefix *p, int32_t n_free);
// Pages per group that make_room could free (held by the index alone), least over the groups.
int32_t mx_prefix_evictable(const mx_prefix *p);
void mx_prefix_reset(mx_prefix *p); // drops everything

typedef struct mx_prefix_stats {
    uint64_t hits, misses, tokens_reused, evictions, bytes, entries;
} mx_prefix_stats;
void mx_prefix_get_stats(const mx_prefix *p, mx_prefix_stats *out);

#endif
