// Merging the symbols of one piece. The order of merges is (rule, position), and every way below
// keeps it exactly; they differ in cost. Few symbols: the least pair is found by looking at all.
// More: a heap of candidates, whose stale entries are told by the pair's present key. Very many: a
// heap of millions would miss the cache at every step, so candidates lie in a bucket for each rank,
// and a bucket is sorted by position when its turn comes. What a merge makes is nearly always of a
// later rank; what is not (rules in an order that no training makes) goes through a heap that is
// emptied before the next bucket. State: struct bpe_work, of one call.
#include "text/bpe_int.h"

#include "base/mem.h"

typedef struct bpe_entry {
    uint64_t key;
    uint64_t tie; // joint id << 32 | position
} bpe_entry;

enum { CHUNK = 14 };
typedef struct bpe_chunk {
    uint32_t prev, n; // prev: the one filled before, or the next free one; 0: none
    uint32_t at[CHUNK];
} bpe_chunk;

#define NIL UINT32_MAX
enum { SCAN_MAX = 48, HEAP_MAX = 4096 };

void bpe_work_free(bpe_work *w) {
    mx_free(w->syms);
    mx_free(w->heap);
    mx_free(w->sorted);
    mx_free(w->sorted2);
    mx_free(w->chunks);
    mx_free(w->buckets);
    *w = (bpe_work){0};
}

// ---- Pairs ----

// The token of the joint text of l and r, or -1.
static int32_t join_texts(const bpe *b, int32_t l, int32_t r) {
    mx_str ls = vocab_text(b->v, (uint32_t)l), rs = vocab_text(b->v, (uint32_t)r);
    if (ls.n + rs.n > b->v->max_token_bytes) return -1;
    char joint[VOCAB_MAX_TOKEN];
    memcpy(joint, ls.p, ls.n);
    memcpy(joint + ls.n, rs.p, rs.n);
    return bpe_find_token(b, (mx_str){joint, ls.n + rs.n});
}

// Sets key and joint of the pair (s, right); right < 0 means none.
static inline void set_pair(const bpe *b, bpe_sym *s, int32_t right) {
    s->key = BPE_NO_PAIR;
    if (right < 0) return;
    if (b->score_rank) {
        s->joint = join_texts(b, s->id, right);
        if (s->joint < 0) return;
        // best score, then the longest left part, then the longest right part
        s->key = (uint64_t)b->score_rank[s->joint] << 32 |
                 (uint64_t)(BPE_MAX_CHARS - b->n_chars[s->id]) << 16 |
                 (uint64_t)(BPE_MAX_CHARS - b->n_chars[right]);
        return;
    }
    if (!b->n_slots) return;
    uint64_t key = (uint64_t)s->id << 32 | (uint32_t)right;
    for (size_t i = bpe_slot_of(key, b->n_slots); b->rules[i].key != BPE_NO_PAIR;
         i = (i + 1) & (b->n_slots - 1)) {
        if (b->rules[i].key != key) continue;
        s->joint = b->rules[i].id;
        if (s->joint >= 0) s->key = b->rules[i].rank;
        return;
    }
}

// ---- Few ----

// Merges few symbols: the least pair is found by looking at all. Returns how many are left.
static size_t merge_by_scan(const bpe *b, bpe_sym *s, size_t n) {
    for (size_t i = 0; i < n; i++) set_pair(b, &s[i], i + 1 < n ? s[i + 1].id : -1);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++) {
            if (s[i].key > s[best].key || s[i].key == BPE_NO_PAIR) continue;
            if (s[i].key < s[best].key || s[i].joint < s[best].joint) best = i;
        }
        if (s[best].key == BPE_NO_PAIR) break;
        s[best].id = s[best].joint;
        memmove(s + best + 1, s + best + 2, (n - best - 2) * sizeof *s);
        n--;
        set_pair(b, &s[best], best + 1 < n ? s[best + 1].id : -1);
        if (best > 0) set_pair(b, &s[best - 1], s[best].id);
    }
    return n;
}

// ---- A heap ----

static inline bool before(const bpe_entry *x, const bpe_entry *y) {
    return x->key != y->key ? x->key < y->key : x->tie < y->tie;
}

// The heap has four children a node: fewer cache lines than two.
static void sift_down(bpe_entry *h, size_t n, size_t i) {
    bpe_entry x = h[i];
    for (;;) {
        size_t c = 4 * i + 1;
        if (c >= n) break;
        size_t best = c, end = MX_MIN(c + 4, n);
        for (size_t k = c + 1; k < end; k++) {
            if (before(&h[k], &h[best])) best = k;
        }
        if (!before(&h[best], &x)) break;
        h[i] = h[best];
        i = best;
    }
    h[i] = x;
}

static void heap_push(bpe_work *w, bpe_entry x) {
    if (w->heap_n == w->heap_cap) {
        w->heap_cap = w->heap_cap ? w->heap_cap * 2 : 256;
        w->heap = mx_realloc(w->heap, w->heap_cap * sizeof *w->heap);
    }
    size_t i = w->heap_n++;
    while (i > 0) {
        size_t up = (i - 1) / 4;
        if (!before(&x, &w->heap[up])) break;
        w->heap[i] = w->heap[up];
        i = up;
    }
    w->heap[i] = x;
}

static bpe_entry entry_of(const bpe_sym *s, size_t i) {
    return (bpe_entry){s[i].key, (uint64_t)(uint32_t)s[i].joint << 32 | (uint32_t)i};
}

// Merges the pair of the entry, unless it is stale: the pair there is no longer the one that was
// offered. True when it was; the pairs that begin at *first and *second (NIL: none) are new then.
static inline bool merge_pair(bpe_sym *s, bpe_entry e, uint32_t *first, uint32_t *second) {
    uint32_t i = (uint32_t)e.tie;
    if (s[i].key != e.key || (uint32_t)s[i].joint != (uint32_t)(e.tie >> 32)) return false;
    uint32_t r = s[i].next;
    s[i].id = s[i].joint;
    s[i].next = s[r].next;
    if (s[r].next != NIL) s[s[r].next].prev = i;
    s[r].key = BPE_NO_PAIR;
    *first = i;
    *second = s[i].prev;
    return true;
}

// Recomputes the pair that begins at i. True when it can merge.
static inline bool renew(const bpe *b, bpe_sym *s, uint32_t i) {
    set_pair(b, &s[i], s[i].next == NIL ? -1 : s[s[i].next].id);
    return s[i].key != BPE_NO_PAIR;
}

static bpe_entry heap_pop(bpe_work *w) {
    bpe_entry e = w->heap[0];
    w->heap[0] = w->heap[--w->heap_n];
    if (w->heap_n) sift_down(w->heap, w->heap_n, 0);
    return e;
}

static void link_symbols(bpe_sym *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        s[i].prev = i ? (uint32_t)i - 1 : NIL;
        s[i].next = i + 1 < n ? (uint32_t)i + 1 : NIL;
    }
}

static void fill_heap(const bpe *b, bpe_work *w, size_t n) {
    bpe_sym *s = w->syms;
    if (w->heap_cap < n) {
        mx_free(w->heap);
        w->heap_cap = n;
        w->heap = mx_alloc(n * sizeof *w->heap);
    }
    w->heap_n = 0;
    for (size_t i = 0; i < n; i++) {
        if (renew(b, s, (uint32_t)i)) w->heap[w->heap_n++] = entry_of(s, i);
    }
    for (size_t i = w->heap_n / 4 + 1; i-- > 0;) {
        if (i < w->heap_n) sift_down(w->heap, w->heap_n, i);
    }
}

static void merge_by_heap(const bpe *b, bpe_work *w, size_t n) {
    bpe_sym *s = w->syms;
    link_symbols(s, n);
    fill_heap(b, w, n);
    while (w->heap_n) {
        uint32_t x, y;
        if (!merge_pair(s, heap_pop(w), &x, &y)) continue;
        if (renew(b, s, x)) heap_push(w, entry_of(s, x));
        if (y != NIL && renew(b, s, y)) heap_push(w, entry_of(s, y));
    }
}

// ---- Buckets ----

static uint32_t rank_of(const bpe *b, uint64_t key) {
    return (uint32_t)(b->score_rank ? key >> 32 : key);
}

static uint32_t new_chunk(bpe_work *w) {
    uint32_t c = w->free_chunk;
    if (c) {
        w->free_chunk = w->chunks[c].prev;
        return c;
    }
    if (w->n_chunks == w->cap_chunks) {
        w->cap_chunks = w->cap_chunks ? w->cap_chunks * 2 : 1024;
        w->chunks = mx_realloc(w->chunks, w->cap_chunks * sizeof *w->chunks);
    }
    if (w->n_chunks == 0) w->n_chunks = 1; // 0 is none
    return w->n_chunks++;
}

static inline void bucket_add(bpe_work *w, uint32_t rank, uint32_t at) {
    uint32_t c = w->buckets[rank];
    if (!c || w->chunks[c].n == CHUNK) {
        uint32_t more = new_chunk(w);
        w->chunks[more].prev = c;
        w->chunks[more].n = 0;
        w->buckets[rank] = c = more;
    }
    bpe_chunk *k = &w->chunks[c];
    k->at[k->n++] = at;
}

// Sorts by joining ascending runs: what was added in order costs one look.
static void sort_entries(bpe_work *w, size_t n) {
    for (bool done = n < 2; !done;) {
        bpe_entry *from = w->sorted, *to = w->sorted2;
        size_t n_runs = 0;
        for (size_t i = 0; i < n;) {
            size_t mid = i + 1;
            while (mid < n && !before(&from[mid], &from[mid - 1])) mid++;
            if (mid == n && i == 0) return;
            size_t end = MX_MIN(mid + 1, n);
            while (mid < n && end < n && !before(&from[end], &from[end - 1])) end++;
            size_t x = i, y = mid, k = i;
            while (x < mid && y < end) to[k++] = before(&from[y], &from[x]) ? from[y++] : from[x++];
            memcpy(to + k, from + x, (mid - x) * sizeof *to);
            k += mid - x;
            memcpy(to + k, from + y, (end - y) * sizeof *to);
            i = end;
            n_runs++;
        }
        w->sorted = to;
        w->sorted2 = from;
        done = n_runs == 1;
    }
}

static void reserve_sorted(bpe_work *w, size_t n) {
    if (n <= w->sorted_cap) return;
    w->sorted_cap = MX_MAX(n, w->sorted_cap * 2);
    mx_free(w->sorted);
    mx_free(w->sorted2);
    w->sorted = mx_alloc(w->sorted_cap * sizeof *w->sorted);
    w->sorted2 = mx_alloc(w->sorted_cap * sizeof *w->sorted2);
}

// Empties a bucket into w->sorted, stale candidates left out; returns how many.
static size_t take_bucket(const bpe *b, bpe_work *w, uint32_t rank) {
    size_t n = 0;
    for (uint32_t c = w->buckets[rank]; c; c = w->chunks[c].prev) n += w->chunks[c].n;
    reserve_sorted(w, n);
    size_t end = n; // the last chunk comes first
    for (uint32_t c = w->buckets[rank]; c;) {
        bpe_chunk *k = &w->chunks[c];
        for (uint32_t i = k->n; i-- > 0;) {
            const bpe_sym *s = &w->syms[k->at[i]];
            if (s->key != BPE_NO_PAIR && rank_of(b, s->key) == rank)
                w->sorted[--end] = entry_of(w->syms, k->at[i]);
        }
        uint32_t prev = k->prev;
        k->prev = w->free_chunk;
        w->free_chunk = c;
        c = prev;
    }
    w->buckets[rank] = 0;
    memmove(w->sorted, w->sorted + end, (n - end) * sizeof *w->sorted);
    sort_entries(w, n - end);
    return n - end;
}

static inline void offer(const bpe *b, bpe_work *w, uint32_t i, uint32_t rank) {
    if (i == NIL || !renew(b, w->syms, i)) return;
    uint32_t r = rank_of(b, w->syms[i].key);
    if (r > rank)
        bucket_add(w, r, i);
    else
        heap_push(w, entry_of(w->syms, i));
}

static void merge_bucket(const bpe *b, bpe_work *w, uint32_t rank) {
    size_t n = take_bucket(b, w, rank), k = 0;
    w->heap_n = 0;
    while (k < n || w->heap_n) {
        bool urgent = w->heap_n && (k == n || before(&w->heap[0], &w->sorted[k]));
        bpe_entry e = urgent ? heap_pop(w) : w->sorted[k++];
        if (k + 8 < n) __builtin_prefetch(&w->syms[(uint32_t)w->sorted[k + 8].tie], 1);
        uint32_t x, y;
        if (!merge_pair(w->syms, e, &x, &y)) continue;
        offer(b, w, x, rank);
        offer(b, w, y, rank);
    }
}

static void merge_by_buckets(const bpe *b, bpe_work *w, size_t n) {
    if (w->n_buckets < b->n_ranks) {
        w->n_buckets = b->n_ranks;
        w->buckets = mx_calloc(w->n_buckets, sizeof *w->buckets);
    }
    link_symbols(w->syms, n);
    for (uint32_t i = 0; i < n; i++) {
        if (renew(b, w->syms, i)) bucket_add(w, rank_of(b, w->syms[i].key), i);
    }
    for (uint32_t rank = 0; rank < b->n_ranks; rank++) {
        if (w->buckets[rank]) merge_bucket(b, w, rank);
    }
}

void bpe_merge(const bpe *b, bpe_work *w, size_t n, mx_ids *out) {
    const bpe_sym *s = w->syms;
    if (n <= SCAN_MAX) {
        n = merge_by_scan(b, w->syms, n);
        for (size_t i = 0; i < n; i++) mx_ids_push(out, s[i].id);
        return;
    }
    if (n <= HEAP_MAX)
        merge_by_heap(b, w, n);
    else
        merge_by_buckets(b, w, n);
    for (uint32_t i = 0; i != NIL; i = s[i].next) mx_ids_push(out, s[i].id);
}
