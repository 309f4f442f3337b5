// The tokenizer's own struct and the parts its files share.
#ifndef MX_TEXT_TEXT_INT_H
#define MX_TEXT_TEXT_INT_H

#include "text/bpe_int.h"
#include "text/split_int.h"
#include "text/tokenizer.h"
#include "text/vocab_int.h"

// The expression that ByteLevel uses (GPT-2's).
#define TEXT_RE_GPT2                                                                               \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

// ---- added tokens ----

// A text that is looked for before anything else happens to the input.
typedef struct added_token {
    mx_str match; // what is looked for: the content, or its normal form
    int32_t id;
    bool single_word, lstrip, rstrip, markup;
} added_token;

// Sorted by match; those that start with byte c are items[first[c]..first[c + 1]).
typedef struct added_set {
    added_token *items;
    size_t n, cap;
    uint32_t first[257];
} added_set;

void added_add(added_set *s, added_token t);
void added_sort(added_set *s); // once, after the last added_add; of equal texts the first one stays
void added_free(added_set *s);

// A found token. Its range has the blanks around it that it asks for, so ranges may overlap; the
// search goes on at `next`.
typedef struct added_hit {
    size_t start, end, next;
    size_t blank_from, blank_end; // the blanks last stripped behind a token
    int32_t id;
} added_hit;

// Which bytes may become markup tokens: all but those of these ranges (ascending, not empty).
typedef struct text_range {
    size_t start, end;
} text_range;
typedef struct trust {
    text_range *untrusted;
    size_t n;
    bool none; // no byte may
} trust;

// The next added token at or after `next` (leftmost, then longest). `done` is the end of the one
// before, which blanks in front do not pass. `tr` NULL: everything is trusted. *hit is zero at the
// first call and keeps what was found between calls.
bool added_find(const added_set *s, mx_str text, size_t next, size_t done, const trust *tr,
                added_hit *hit);

// ---- decoders ----

typedef enum dec_kind {
    DEC_REPLACE,
    DEC_BYTE_FALLBACK,
    DEC_FUSE,
    DEC_STRIP,
    DEC_METASPACE,
    DEC_BYTES
} dec_kind;

typedef struct dec_op {
    dec_kind kind;
    mx_str from, to;      // REPLACE; STRIP's character and METASPACE's replacement in from
    uint32_t left, right; // STRIP
    bool drop_first;      // METASPACE: no space for the replacement in the first token
} dec_op;

enum { DEC_MAX_OPS = 16 };

// ---- the tokenizer ----

typedef struct text_template {
    mx_str name, text; // name "" is the default
} text_template;

// What an added token of the normalised kind decodes to.
typedef struct shown_token {
    int32_t id;
    mx_str text;
} shown_token;

struct mx_tokenizer {
    vocab v;
    bpe b;
    norm_chain norm;
    pre_chain pre;
    added_set raw;    // matched in the text as it is
    added_set normal; // matched after normalisation
    added_set strict; // raw, and the markup of `normal` by its content: takes the place of raw when
                      // spans differ in trust (trust cannot be followed through normalisation)
    dec_op dec[DEC_MAX_OPS];
    size_t n_dec;
    bool join_with_spaces; // no decoder: tokens are joined by spaces
    mx_ids prefix, suffix; // what add_special puts around
    int32_t bos, eos;
    mx_ids eos_ids;
    struct shown_token *shown; // added tokens that decode to their normal form; by id
    size_t n_shown;
    text_template *templates;
    size_t n_templates;
    mx_arena arena;
};

mx_tokenizer *tokenizer_new(void);
// Adds a token that is matched in the text. `text` is copied. Errors as vocab_put's.
typedef struct added_opts {
    bool single_word, lstrip, rstrip, normalized, special;
} added_opts;
mx_status tokenizer_add_token(mx_tokenizer *t, int64_t id, mx_str text, added_opts o, mx_err *err);
// To be called once, when everything is loaded: sorts, marks markup, makes pieces.
mx_status tokenizer_finish(mx_tokenizer *t, mx_err *err);
void tokenizer_add_template(mx_tokenizer *t, mx_str name, mx_str text); // the first of a name stays
void tokenizer_add_eos(mx_tokenizer *t, int64_t id);                    // no double entries
mx_str tokenizer_copy(mx_tokenizer *t, mx_str s);
// Notes what the added tokens of t->normal decode to (their normal forms are made already).
void detok_note_shown(mx_tokenizer *t);
// Fills vocab.piece of ordinary tokens from the decoder (detok.c).
void detok_make_pieces(mx_tokenizer *t);
#endif
