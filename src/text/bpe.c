// Byte-pair encoding of one piece, with the result of Hugging Face's tokenizers: the tables, and
// the symbols that a piece begins as. Merging them is bpe_merge.c.
//
// State: struct bpe is constant after loading; struct bpe_work belongs to one call. Does not
// normalise or split text. A vocabulary with scores has no list of merges: the rule of two
// neighbours is looked up by their joint text when they meet, which costs nothing at load (a list
// for Gemma 3 would have 514,906 entries).
#include "text/bpe_int.h"

#include "base/mem.h"
#include "text/unicode_int.h"

#include <stdlib.h>

void bpe_free(bpe *b) {
    mx_free(b->rules);
    mx_free(b->score_rank);
    mx_free(b->n_chars);
    *b = (bpe){0};
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

void bpe_reserve_rules(bpe *b, size_t n) {
    size_t cap = b->n_slots ? b->n_slots : 1024;
    while (cap * 3 < n * 4) cap *= 2;
    if (cap == b->n_slots) return;
    bpe_rule *rules = mx_alloc(cap * sizeof *rules);
    memset(rules, 0xff, cap * sizeof *rules);
    for (size_t i = 0; i < b->n_slots; i++) {
        if (b->rules[i].key == BPE_NO_PAIR) continue;
        size_t k = bpe_slot_of(b->rules[i].key, cap);
        while (rules[k].key != BPE_NO_PAIR) k = (k + 1) & (cap - 1);
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
    b->n_ranks = MX_MAX(b->n_ranks, rank + 1);
    uint64_t key = (uint64_t)l << 32 | (uint32_t)r;
    size_t i = bpe_slot_of(key, b->n_slots);
    while (b->rules[i].key != BPE_NO_PAIR && b->rules[i].key != key) i = (i + 1) & (b->n_slots - 1);
    if (b->rules[i].key == BPE_NO_PAIR) b->n_rules++;
    b->rules[i] = (bpe_rule){key, rank, id};
    return MX_OK;
}

void bpe_drop_markup(bpe *b) {
    for (size_t i = 0; i < b->n_slots; i++) {
        bpe_rule *r = &b->rules[i];
        if (r->key != BPE_NO_PAIR && (b->v->flags[r->id] & BPE_NOT_MERGED)) r->id = -1;
    }
    for (uint32_t c = 0; c < BPE_LOW; c++) {
        if (b->low[c] >= 0 && (b->v->flags[b->low[c]] & BPE_NOT_MERGED)) b->low[c] = -1;
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
    b->n_ranks = rank + 1;
    mx_free(order);
    count_chars(b);
}

void bpe_use_id_order(bpe *b) {
    b->score_rank = mx_calloc(b->v->n, sizeof *b->score_rank);
    for (uint32_t i = 0; i < b->v->n; i++) b->score_rank[i] = i;
    b->n_ranks = b->v->n;
    count_chars(b);
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
        int32_t id =
            c < BPE_LOW ? b->low[c] : bpe_find_token(b, (mx_str){piece.p + from, i - from});
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

void bpe_encode(const bpe *b, bpe_work *w, mx_str piece, mx_ids *out) {
    if (piece.n == 0) return;
    if (b->ignore_merges) {
        int32_t id = bpe_find_token(b, piece);
        if (id >= 0) {
            mx_ids_push(out, id);
            return;
        }
    }
    // one byte makes at most one symbol; an unknown code point may flush one more before it
    reserve_syms(w, piece.n + 1);
    bpe_merge(b, w, first_symbols(b, w->syms, piece), out);
}
