// Byte-pair encoding of one piece, with the result of Hugging Face's tokenizers.
//
// State: struct bpe is constant after loading; struct bpe_work belongs to one call. Does not
// normalise or split text. The order of merges is (rule, position): short pieces look for the
// least pair by scanning, long ones keep a heap of candidates whose stale entries are told by the
// pair's present key. A vocabulary with scores has no list of merges: the rule of two neighbours is
// looked up by their joint text when they meet, which costs nothing at load (a list for Gemma 3
// would have 514,906 entries).
#include "text/bpe_int.h"

#include "base/mem.h"
#include "text/unicode_int.h"

#include <stdlib.h>

// A symbol and the pair it forms with its right neighbour.
typedef struct bpe_sym {
    uint64_t key;  // order of that pair, NO_PAIR when it cannot merge
    int32_t id;    // token
    int32_t joint; // token of the merged pair
    uint32_t prev, next;
} bpe_sym;

typedef struct bpe_entry {
    uint64_t key;
    uint64_t tie; // joint id << 32 | position
} bpe_entry;

#define NO_PAIR UINT64_MAX
#define NIL     UINT32_MAX
enum { SCAN_MAX = 48 };

void bpe_free(bpe *b) {
    mx_free(b->rules);
    mx_free(b->score_rank);
    mx_free(b->n_chars);
    *b = (bpe){0};
}

// Tokens that text must not become by merging.
enum { NOT_MERGED = TOK_OUTSIDE | TOK_SPECIAL | TOK_MARKUP };

static int32_t find_token(const bpe *b, mx_str text) {
    int32_t id = vocab_find(b->v, text);
    return id >= 0 && (b->v->flags[id] & NOT_MERGED) ? -1 : id;
}

void bpe_init(bpe *b, const vocab *v) {
    b->v = v;
    for (uint32_t c = 0; c < BPE_LOW; c++) {
        char s[4];
        int n = mx_utf8_encode(c, s);
        b->low[c] = vocab_find(v, (mx_str){s, (size_t)n});
    }
    for (int i = 0; i < 256; i++) {
        static const char hex[] = "0123456789ABCDEF";
        char s[6] = {'<', '0', 'x', hex[i >> 4], hex[i & 15], '>'};
        b->byte_id[i] = vocab_find(v, (mx_str){s, 6});
    }
}

static size_t slot_of(uint64_t key, size_t n_slots) {
    uint64_t h = key * 0x9e3779b97f4a7c15u;
    return (size_t)((h ^ h >> 29) * 0xd6e8feb86659fd93u >> 32) & (n_slots - 1);
}

void bpe_reserve_rules(bpe *b, size_t n) {
    size_t cap = b->n_slots ? b->n_slots : 1024;
    while (cap * 3 < n * 4) cap *= 2;
    if (cap == b->n_slots) return;
    bpe_rule *rules = mx_alloc(cap * sizeof *rules);
    memset(rules, 0xff, cap * sizeof *rules);
    for (size_t i = 0; i < b->n_slots; i++) {
        if (b->rules[i].key == NO_PAIR) continue;
        size_t k = slot_of(b->rules[i].key, cap);
        while (rules[k].key != NO_PAIR) k = (k + 1) & (cap - 1);
        rules[k] = b->rules[i];
    }
    mx_free(b->rules);
    b->rules = rules;
    b->n_slots = cap;
}

static mx_status unknown_part(mx_str s, mx_err *err) {
    return mx_err_set(err, MX_FORMAT, "'%.*s' is not in the vocabulary", (int)MX_MIN(s.n, 80u),
                      s.p);
}

mx_status bpe_add_rule(bpe *b, mx_str left, mx_str right, uint32_t rank, mx_err *err) {
    int32_t l = vocab_find(b->v, left), r = vocab_find(b->v, right);
    if (l < 0) return unknown_part(left, err);
    if (r < 0) return unknown_part(right, err);
    char joint[2 * VOCAB_MAX_TOKEN];
    memcpy(joint, left.p, left.n);
    memcpy(joint + left.n, right.p, right.n);
    int32_t id = vocab_find(b->v, (mx_str){joint, left.n + right.n});
    if (id < 0) return unknown_part((mx_str){joint, left.n + right.n}, err);
    bpe_reserve_rules(b, b->n_rules + 1);
    uint64_t key = (uint64_t)l << 32 | (uint32_t)r;
    size_t i = slot_of(key, b->n_slots);
    while (b->rules[i].key != NO_PAIR && b->rules[i].key != key) i = (i + 1) & (b->n_slots - 1);
    if (b->rules[i].key == NO_PAIR) b->n_rules++;
    b->rules[i] = (bpe_rule){key, rank, id};
    return MX_OK;
}

void bpe_drop_markup(bpe *b) {
    for (size_t i = 0; i < b->n_slots; i++) {
        bpe_rule *r = &b->rules[i];
        if (r->key != NO_PAIR && (b->v->flags[r->id] & NOT_MERGED)) r->id = -1;
    }
    for (uint32_t c = 0; c < BPE_LOW; c++) {
        if (b->low[c] >= 0 && (b->v->flags[b->low[c]] & NOT_MERGED)) b->low[c] = -1;
    }
}

static void count_chars(bpe *b) {
    b->n_chars = mx_calloc(b->v->n, sizeof *b->n_chars);
    for (uint32_t id = 0; id < b->v->n; id++) {
        mx_str s = vocab_text(b->v, id);
        uint32_t n = 0;
        for (size_t i = 0; i < s.n; i++) n += ((unsigned char)s.p[i] & 0xc0) != 0x80;
        b->n_chars[id] = (uint16_t)n;
    }
}

typedef struct scored {
    float score;
    uint32_t id;
} scored;

static int compare_scored(const void *x, const void *y) {
    const scored *a = x, *b = y;
    if (a->score != b->score) return a->score > b->score ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

void bpe_use_scores(bpe *b, const float *scores) {
    uint32_t n = b->v->n;
    scored *order = mx_alloc(n * sizeof *order + 1);
    for (uint32_t i = 0; i < n; i++) order[i] = (scored){scores[i], i};
    qsort(order, n, sizeof *order, compare_scored);
    b->score_rank = mx_calloc(n, sizeof *b->score_rank);
    uint32_t rank = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (i && order[i].score != order[i - 1].score) rank++;
        b->score_rank[order[i].id] = rank;
    }
    mx_free(order);
    count_chars(b);
}

void bpe_use_id_order(bpe *b) {
    b->score_rank = mx_calloc(b->v->n, sizeof *b->score_rank);
    for (uint32_t i = 0; i < b->v->n; i++) b->score_rank[i] = i;
    count_chars(b);
}

void bpe_work_free(bpe_work *w) {
    mx_free(w->syms);
    mx_free(w->heap);
    *w = (bpe_work){0};
}

// The token of the joint text of l and r, or -1.
static int32_t join_texts(const bpe *b, int32_t l, int32_t r) {
    mx_str ls = vocab_text(b->v, (uint32_t)l), rs = vocab_text(b->v, (uint32_t)r);
    if (ls.n + rs.n > b->v->max_token_bytes) return -1;
    char joint[VOCAB_MAX_TOKEN];
    memcpy(joint, ls.p, ls.n);
    memcpy(joint + ls.n, rs.p, rs.n);
    return find_token(b, (mx_str){joint, ls.n + rs.n});
}

// Sets key and joint of the pair (s, right); right < 0 means none.
static inline void set_pair(const bpe *b, bpe_sym *s, int32_t right) {
    s->key = NO_PAIR;
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
    for (size_t i = slot_of(key, b->n_slots); b->rules[i].key != NO_PAIR;
         i = (i + 1) & (b->n_slots - 1)) {
        if (b->rules[i].key != key) continue;
        s->joint = b->rules[i].id;
        if (s->joint >= 0) s->key = b->rules[i].rank;
        return;
    }
}

static void reserve_syms(bpe_work *w, size_t n) {
    if (n <= w->cap) return;
    w->cap = MX_MAX(n, w->cap * 2);
    mx_free(w->syms);
    w->syms = mx_alloc(w->cap * sizeof *w->syms);
}

// Ids of the piece's code points; returns how many. Code points without a token become byte tokens
// or the unknown token; several unknown ones in a row become one when fuse_unk is set.
static size_t first_symbols(const bpe *b, bpe_sym *s, mx_str piece) {
    size_t n = 0;
    bool pending = false; // an unknown token that is still to be written
    for (size_t i = 0; i < piece.n;) {
        size_t from = i;
        uint32_t c = unicode_next(piece.p, &i);
        int32_t id = c < BPE_LOW ? b->low[c] : find_token(b, (mx_str){piece.p + from, i - from});
        if (id >= 0) {
            if (pending) s[n++].id = b->unk;
            pending = false;
            s[n++].id = id;
            continue;
        }
        bool bytes = b->byte_fallback;
        for (size_t k = from; bytes && k < i; k++) {
            bytes = b->byte_id[(unsigned char)piece.p[k]] >= 0;
        }
        if (bytes) {
            for (size_t k = from; k < i; k++) s[n++].id = b->byte_id[(unsigned char)piece.p[k]];
        } else if (b->unk >= 0) {
            if (pending && !b->fuse_unk) s[n++].id = b->unk;
            pending = true;
        }
    }
    if (pending) s[n++].id = b->unk;
    return n;
}

// Merges few symbols: the least pair is found by looking at all. Returns how many are left.
static size_t merge_by_scan(const bpe *b, bpe_sym *s, size_t n) {
    for (size_t i = 0; i < n; i++) set_pair(b, &s[i], i + 1 < n ? s[i + 1].id : -1);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++) {
            if (s[i].key > s[best].key || s[i].key == NO_PAIR) continue;
            if (s[i].key < s[best].key || s[i].joint < s[best].joint) best = i;
        }
        if (s[best].key == NO_PAIR) break;
        s[best].id = s[best].joint;
        memmove(s + best + 1, s + best + 2, (n - best - 2) * sizeof *s);
        n--;
        set_pair(b, &s[best], best + 1 < n ? s[best + 1].id : -1);
        if (best > 0) set_pair(b, &s[best - 1], s[best].id);
    }
    return n;
}

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

// Recomputes the pair that begins at i and offers it.
static void offer(const bpe *b, bpe_work *w, size_t i) {
    bpe_sym *s = &w->syms[i];
    set_pair(b, s, s->next == NIL ? -1 : w->syms[s->next].id);
    if (s->key != NO_PAIR) heap_push(w, entry_of(w->syms, i));
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
        s[i].prev = i ? (uint32_t)i - 1 : NIL;
        s[i].next = i + 1 < n ? (uint32_t)i + 1 : NIL;
        set_pair(b, &s[i], i + 1 < n ? s[i + 1].id : -1);
        if (s[i].key != NO_PAIR) w->heap[w->heap_n++] = entry_of(s, i);
    }
    for (size_t i = w->heap_n / 4 + 1; i-- > 0;) {
        if (i < w->heap_n) sift_down(w->heap, w->heap_n, i);
    }
}

static void merge_by_heap(const bpe *b, bpe_work *w, size_t n) {
    bpe_sym *s = w->syms;
    fill_heap(b, w, n);
    while (w->heap_n) {
        bpe_entry e = w->heap[0];
        w->heap[0] = w->heap[--w->heap_n];
        if (w->heap_n) sift_down(w->heap, w->heap_n, 0);
        uint32_t i = (uint32_t)e.tie;
        // stale when the pair at i is no longer the one that was offered
        if (s[i].key != e.key || (uint32_t)s[i].joint != (uint32_t)(e.tie >> 32)) continue;
        uint32_t r = s[i].next;
        s[i].id = s[i].joint;
        s[i].next = s[r].next;
        if (s[r].next != NIL) s[s[r].next].prev = i;
        s[r].key = NO_PAIR;
        offer(b, w, i);
        if (s[i].prev != NIL) offer(b, w, s[i].prev);
    }
}

void bpe_encode(const bpe *b, bpe_work *w, mx_str piece, mx_ids *out) {
    if (piece.n == 0) return;
    if (b->ignore_merges) {
        int32_t id = find_token(b, piece);
        if (id >= 0) {
            mx_ids_push(out, id);
            return;
        }
    }
    // one byte makes at most one symbol; an unknown code point may flush one more before it
    reserve_syms(w, piece.n + 1);
    size_t n = first_symbols(b, w->syms, piece);
    if (n > SCAN_MAX) {
        merge_by_heap(b, w, n);
        for (uint32_t i = 0; i != NIL; i = w->syms[i].next) mx_ids_push(out, w->syms[i].id);
        return;
    }
    n = merge_by_scan(b, w->syms, n);
    for (size_t i = 0; i < n; i++) mx_ids_push(out, w->syms[i].id);
}
