// Byte-pair merging of one piece of text.
#ifndef MX_TEXT_BPE_INT_H
#define MX_TEXT_BPE_INT_H

#include "text/tokenizer.h"
#include "text/vocab_int.h"

enum { BPE_LOW = 0x250, BPE_MAX_CHARS = 0xffff };

// One merge rule. key = left id << 32 | right id; UINT64_MAX in an empty slot.
typedef struct bpe_rule {
    uint64_t key;
    uint32_t rank;
    int32_t id; // -1: the rule is not followed
} bpe_rule;

// Read-only after loading. Either `rules` (a list of merges) or `score_rank` (a vocabulary whose
// merges follow from its tokens' scores: any two tokens whose joint text is a token may merge).
typedef struct bpe {
    const vocab *v;
    bpe_rule *rules;
    size_t n_slots, n_rules;
    uint32_t n_ranks;     // 1 + greatest rank
    uint32_t *score_rank; // by id, 0 is best; NULL when there are rules
    uint16_t *n_chars;    // by id, with score_rank
    int32_t low[BPE_LOW]; // id of the token that is this one code point, or -1
    int32_t byte_id[256]; // id of <0xXX>, or -1
    int32_t unk;          // -1: unknown text is dropped
    bool byte_fallback, fuse_unk, ignore_merges;
} bpe;

void bpe_free(bpe *b);
// Fills the look-up tables from a complete vocabulary; call before the others.
void bpe_init(bpe *b, const vocab *v);
void bpe_reserve_rules(bpe *b, size_t n);
// Adds the rule of the next rank. Errors (FORMAT): a part or the whole is no token; the message
// says which. A repeated pair takes the later rank.
mx_status bpe_add_rule(bpe *b, mx_str left, mx_str right, uint32_t rank, mx_err *err);
// Takes the order from scores (greatest first), n = v->n of them.
void bpe_use_scores(bpe *b, const float *scores);
// Takes the order of the ids (Gemma's vocabularies list tokens in the order of their merges).
void bpe_use_id_order(bpe *b);

// Makes special and markup tokens unreachable by merging: they come from added-token matching only,
// so that untrusted text cannot arrive at them. Call when the flags are complete.
void bpe_drop_markup(bpe *b);

#define BPE_NO_PAIR UINT64_MAX

// A symbol and the pair it forms with its right neighbour.
typedef struct bpe_sym {
    uint64_t key;  // order of that pair, BPE_NO_PAIR when it cannot merge
    int32_t id;    // token
    int32_t joint; // token of the merged pair
    uint32_t prev, next;
} bpe_sym;

// Working memory of one encode call, grown as needed.
typedef struct bpe_work {
    bpe_sym *syms;
    struct bpe_entry *heap, *sorted, *sorted2;
    struct bpe_chunk *chunks;
    uint32_t *buckets; // by rank: the last chunk of its candidates, 0 when there is none
    size_t cap, heap_n, heap_cap, sorted_cap;
    uint32_t n_chunks, cap_chunks, free_chunk, n_buckets;
} bpe_work;
void bpe_work_free(bpe_work *w);

// Tokens that text must not become by merging.
enum { BPE_NOT_MERGED = TOK_OUTSIDE | TOK_SPECIAL | TOK_MARKUP };
static inline int32_t bpe_find_token(const bpe *b, mx_str text) {
    int32_t id = vocab_find(b->v, text);
    return id >= 0 && (b->v->flags[id] & BPE_NOT_MERGED) ? -1 : id;
}

static inline size_t bpe_slot_of(uint64_t key, size_t n_slots) {
    uint64_t h = key * 0x9e3779b97f4a7c15u;
    return (size_t)((h ^ h >> 29) * 0xd6e8feb86659fd93u >> 32) & (n_slots - 1);
}

// Merges the first n symbols of w (their ids are set) and appends the ids that are left.
void bpe_merge(const bpe *b, bpe_work *w, size_t n, mx_ids *out);

// Appends the ids of one piece (valid UTF-8, in the vocabulary's spelling, under 2^31 bytes).
// Time O(n log n) for short pieces, about linear for long ones.
void bpe_encode(const bpe *b, bpe_work *w, mx_str piece, mx_ids *out);

#endif
