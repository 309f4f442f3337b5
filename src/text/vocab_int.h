// Token texts and the index from text to id.
#ifndef MX_TEXT_VOCAB_INT_H
#define MX_TEXT_VOCAB_INT_H

#include "base/str.h"

enum {
    VOCAB_MAX_ID = (1 << 22) - 1, // ids above are taken for corruption
    VOCAB_MAX_TOKEN = 4096,       // bytes of one token
};

enum {
    TOK_EXISTS = 1,
    TOK_ADDED = 2,    // an added token: matched in the text before anything else
    TOK_SPECIAL = 4,  // skipped by decode(skip_special)
    TOK_MARKUP = 8,   // never made from untrusted text
    TOK_OUTSIDE = 16, // an added token that the model's own vocabulary does not hold
};

typedef struct vocab_range {
    uint32_t at, n; // bytes of vocab.bytes
} vocab_range;

// Owned by the tokenizer. Read-only after loading.
typedef struct vocab {
    char *bytes; // all texts, one after the other
    size_t n_bytes, cap_bytes;
    vocab_range *text;  // by id: the file's spelling
    vocab_range *piece; // by id: what the token reads as
    uint8_t *flags;     // by id: TOK_*
    uint32_t n, cap;    // 1 + greatest id; room
    uint32_t n_tokens;  // ids that exist
    uint64_t *slots;    // hash << 32 | id + 1, or 0
    uint32_t n_slots;
    uint32_t max_token_bytes;
} vocab;

void vocab_free(vocab *v);
// Room for ids below n_ids and n_bytes of text.
void vocab_reserve(vocab *v, uint32_t n_ids, size_t n_bytes);
// Adds a token (text copied). Errors (FORMAT, without a place: the caller knows it): id out of
// range or taken, text taken, empty or too long.
mx_status vocab_put(vocab *v, int64_t id, mx_str text, mx_err *err);
int32_t vocab_find(const vocab *v, mx_str text); // -1 when absent

static inline mx_str vocab_text(const vocab *v, uint32_t id) {
    return (mx_str){v->bytes + v->text[id].at, v->text[id].n};
}
static inline mx_str vocab_piece(const vocab *v, uint32_t id) {
    return (mx_str){v->bytes + v->piece[id].at, v->piece[id].n};
}
static inline bool vocab_has(const vocab *v, int64_t id) {
    return id >= 0 && id < (int64_t)v->n && (v->flags[id] & TOK_EXISTS);
}
// Copies s behind the other texts.
vocab_range vocab_store(vocab *v, mx_str s);

#endif
