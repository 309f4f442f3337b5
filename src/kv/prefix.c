// The prefix index. Nodes live in one growing array with a free list; children are found by a hash
// of (parent, tokens); one list keeps them by last use. Every touch moves a whole path, leaf first,
// so that a parent is always more recent than its children and the oldest node is a leaf.
#include "kv/prefix.h"

#include "base/mem.h"
#include "base/str.h"

typedef struct node {
    int32_t parent; // -1: first page
    uint64_t salt;
    int32_t pages[MX_MAX_KV_GROUPS];
    int32_t *tokens; // (page_tokens)
    int32_t n_children;
    int32_t newer, older; // by last use
    int32_t next_hash;    // also the free list
    uint32_t bucket;
} node;

struct mx_prefix {
    mx_kv *kv;
    mx_kv_spec spec;
    uint64_t max_bytes, node_bytes;
    node *nodes;
    int32_t n_nodes, cap_nodes, free_node; // free_node: -1 = none
    int32_t newest, oldest;
    int32_t *buckets;
    uint32_t n_buckets;
    int32_t *path; // scratch (max logical pages)
    mx_prefix_stats stats;
};

mx_prefix *mx_prefix_open(mx_kv *kv, uint64_t max_bytes) {
    mx_prefix *p = mx_calloc(1, sizeof *p);
    p->kv = kv;
    p->spec = *mx_kv_get_spec(kv);
    p->max_bytes = max_bytes;
    uint64_t pt = (uint64_t)p->spec.page_tokens;
    p->node_bytes = pt * mx_kv_token_bytes(&p->spec) + sizeof(node) + pt * sizeof(int32_t);
    p->free_node = p->newest = p->oldest = -1;
    p->n_buckets = 4096;
    p->buckets = mx_alloc(p->n_buckets * sizeof *p->buckets);
    for (uint32_t i = 0; i < p->n_buckets; i++) p->buckets[i] = -1;
    p->path = mx_alloc((size_t)(p->spec.max_ctx / p->spec.page_tokens + 1) * sizeof *p->path);
    return p;
}

// ---- Lists
// ---------------------------------------------------------------------------------------

static void unlink_use(mx_prefix *p, int32_t i) {
    node *n = &p->nodes[i];
    if (n->newer >= 0)
        p->nodes[n->newer].older = n->older;
    else
        p->newest = n->older;
    if (n->older >= 0)
        p->nodes[n->older].newer = n->newer;
    else
        p->oldest = n->newer;
}

static void push_use(mx_prefix *p, int32_t i) {
    node *n = &p->nodes[i];
    n->newer = -1;
    n->older = p->newest;
    if (p->newest >= 0)
        p->nodes[p->newest].newer = i;
    else
        p->oldest = i;
    p->newest = i;
}

static void touch_path(mx_prefix *p, int32_t n) {
    for (int32_t i = n - 1; i >= 0; i--) {
        unlink_use(p, p->path[i]);
        push_use(p, p->path[i]);
    }
}

static uint32_t bucket_of(const mx_prefix *p, uint64_t salt, int32_t parent,
                          const int32_t *tokens) {
    uint64_t seed = salt ^ ((uint64_t)(uint32_t)parent << 20);
    uint64_t h = mx_hash64(tokens, (size_t)p->spec.page_tokens * sizeof *tokens, seed);
    return (uint32_t)(h & (p->n_buckets - 1));
}

static int32_t find_child(const mx_prefix *p, uint64_t salt, int32_t parent,
                          const int32_t *tokens) {
    size_t bytes = (size_t)p->spec.page_tokens * sizeof *tokens;
    int32_t i = p->buckets[bucket_of(p, salt, parent, tokens)];
    for (; i >= 0; i = p->nodes[i].next_hash) {
        const node *n = &p->nodes[i];
        bool same = n->parent == parent && n->salt == salt;
        if (same && memcmp(n->tokens, tokens, bytes) == 0) return i;
    }
    return -1;
}

// ---- Nodes
// ---------------------------------------------------------------------------------------

static void remove_node(mx_prefix *p, int32_t i) {
    node *n = &p->nodes[i];
    CHECK(n->n_children == 0);
    unlink_use(p, i);
    int32_t *at = &p->buckets[n->bucket];
    while (*at != i) at = &p->nodes[*at].next_hash;
    *at = n->next_hash;
    for (int32_t g = 0; g < p->spec.n_groups; g++) {
        if (n->pages[g] >= 0) mx_kv_page_unref(p->kv, g, n->pages[g]);
    }
    if (n->parent >= 0) p->nodes[n->parent].n_children--;
    mx_free(n->tokens);
    n->tokens = NULL;
    n->next_hash = p->free_node;
    p->free_node = i;
    p->stats.entries--;
    p->stats.bytes -= p->node_bytes;
}

static int32_t new_node(mx_prefix *p) {
    if (p->free_node >= 0) {
        int32_t i = p->free_node;
        p->free_node = p->nodes[i].next_hash;
        return i;
    }
    if (p->n_nodes == p->cap_nodes) {
        p->cap_nodes = p->cap_nodes ? p->cap_nodes * 2 : 256;
        p->nodes = mx_realloc(p->nodes, (size_t)p->cap_nodes * sizeof *p->nodes);
    }
    return p->n_nodes++;
}

static int32_t add_node(mx_prefix *p, uint64_t salt, int32_t parent, const int32_t *tokens,
                        int32_t seq, int32_t logical) {
    size_t bytes = (size_t)p->spec.page_tokens * sizeof *tokens;
    int32_t i = new_node(p);
    node *n = &p->nodes[i];
    *n = (node){.parent = parent, .salt = salt};
    n->tokens = mx_alloc(bytes);
    memcpy(n->tokens, tokens, bytes);
    for (int32_t g = 0; g < p->spec.n_groups; g++) {
        n->pages[g] = mx_kv_page(p->kv, seq, g, logical);
        if (n->pages[g] >= 0) mx_kv_page_ref(p->kv, g, n->pages[g]);
    }
    n->bucket = bucket_of(p, salt, parent, tokens);
    n->next_hash = p->buckets[n->bucket];
    p->buckets[n->bucket] = i;
    if (parent >= 0) p->nodes[parent].n_children++;
    push_use(p, i);
    p->stats.entries++;
    p->stats.bytes += p->node_bytes;
    return i;
}

void mx_prefix_reset(mx_prefix *p) {
    while (p->oldest >= 0) remove_node(p, p->oldest);
}

void mx_prefix_close(mx_prefix *p) {
    if (!p) return;
    mx_prefix_reset(p);
    mx_free(p->nodes);
    mx_free(p->buckets);
    mx_free(p->path);
    mx_free(p);
}

// ---- Restore and store
// ---------------------------------------------------------------------------

// Nodes of the longest stored path, into p->path; returns how many.
static int32_t walk(mx_prefix *p, uint64_t salt, const int32_t *tokens, int32_t n_pages) {
    int32_t parent = -1, n = 0;
    while (n < n_pages) {
        int32_t i = find_child(p, salt, parent, tokens + n * p->spec.page_tokens);
        if (i < 0) break;
        p->path[n++] = parent = i;
    }
    return n;
}

// First logical page that group g still needs when a sequence of n pages goes on.
static int32_t first_needed(const mx_prefix *p, int32_t g, int32_t n) {
    int32_t window = p->spec.groups[g].window, len = n * p->spec.page_tokens;
    return window == 0 ? 0 : MX_MAX(0, len - window + 1) / p->spec.page_tokens;
}

static bool restorable(const mx_prefix *p, int32_t n) {
    for (int32_t g = 0; g < p->spec.n_groups; g++) {
        for (int32_t i = first_needed(p, g, n); i < n; i++) {
            if (p->nodes[p->path[i]].pages[g] < 0) return false;
        }
    }
    return true;
}

static void adopt(mx_prefix *p, int32_t seq, int32_t n) {
    int32_t *pages[MX_MAX_KV_GROUPS];
    const int32_t *rows[MX_MAX_KV_GROUPS];
    for (int32_t g = 0; g < p->spec.n_groups; g++) {
        pages[g] = mx_alloc((size_t)n * sizeof(int32_t));
        int32_t first = first_needed(p, g, n);
        for (int32_t i = 0; i < n; i++) {
            pages[g][i] = i < first ? -1 : p->nodes[p->path[i]].pages[g];
        }
        rows[g] = pages[g];
    }
    mx_kv_adopt(p->kv, seq, rows, n);
    for (int32_t g = 0; g < p->spec.n_groups; g++) mx_free(pages[g]);
}

int32_t mx_prefix_restore(mx_prefix *p, uint64_t salt, const int32_t *tokens, int32_t n_tokens,
                          int32_t seq, const char **why) {
    int32_t most = (n_tokens - 1) / p->spec.page_tokens;
    int32_t found = walk(p, salt, tokens, most), n = found;
    while (n > 0 && !restorable(p, n)) n--;
    *why = n == most    ? "all full pages"
           : n < found  ? "a window's pages are gone"
           : found == 0 ? "no stored prefix"
                        : "the stored text differs from here on";
    if (n == 0) {
        p->stats.misses++;
        return 0;
    }
    touch_path(p, n);
    adopt(p, seq, n);
    p->stats.hits++;
    p->stats.tokens_reused += (uint64_t)n * (uint64_t)p->spec.page_tokens;
    return n * p->spec.page_tokens;
}

// Room for one more node; never by taking a node of the present path away.
static bool make_byte_room(mx_prefix *p, int32_t keep_from) {
    while (p->stats.bytes + p->node_bytes > p->max_bytes) {
        int32_t i = p->oldest;
        if (i < 0) return false;
        for (int32_t k = 0; k < keep_from; k++) {
            if (p->path[k] == i) return false;
        }
        remove_node(p, i);
        p->stats.evictions++;
    }
    return true;
}

void mx_prefix_store(mx_prefix *p, uint64_t salt, const int32_t *tokens, int32_t n_tokens,
                     int32_t seq) {
    int32_t n_pages = n_tokens / p->spec.page_tokens;
    int32_t n = walk(p, salt, tokens, n_pages);
    touch_path(p, n);
    for (; n < n_pages; n++) {
        if (!make_byte_room(p, n)) return;
        int32_t parent = n > 0 ? p->path[n - 1] : -1;
        p->path[n] = add_node(p, salt, parent, tokens + n * p->spec.page_tokens, seq, n);
        touch_path(p, n); // the parents stay more recent than the new leaf
    }
}

// ---- Room
// ----------------------------------------------------------------------------------------

static bool has_room(const mx_prefix *p, int32_t n_free) {
    mx_kv_stats st;
    mx_kv_get_stats(p->kv, &st);
    for (int32_t g = 0; g < p->spec.n_groups; g++) {
        if (st.free_pages[g] < n_free) return false;
    }
    return true;
}

bool mx_prefix_make_room(mx_prefix *p, int32_t n_free) {
    while (!has_room(p, n_free)) {
        if (p->oldest < 0) return false;
        remove_node(p, p->oldest);
        p->stats.evictions++;
    }
    return true;
}

int32_t mx_prefix_evictable(const mx_prefix *p) {
    int32_t least = INT32_MAX;
    for (int32_t g = 0; g < p->spec.n_groups; g++) {
        int32_t n = 0;
        for (int32_t i = p->newest; i >= 0; i = p->nodes[i].older) {
            int32_t page = p->nodes[i].pages[g];
            n += page >= 0 && mx_kv_page_refs(p->kv, g, page) == 1;
        }
        least = MX_MIN(least, n);
    }
    return least;
}

void mx_prefix_get_stats(const mx_prefix *p, mx_prefix_stats *out) {
    *out = p->stats;
}
