// Normalizers and pre-tokenizers: from text to the pieces that are merged one by one.
#ifndef MX_TEXT_SPLIT_INT_H
#define MX_TEXT_SPLIT_INT_H

#include "base/mem.h"
#include "text/unicode_int.h"

// ---- patterns: what a Split, a Replace and their kin look for ----

typedef enum pattern_kind {
    PAT_STRING, // this text
    PAT_CLASS,  // one code point with one of these class bits
    PAT_GPT2,   // the well-known expressions have scanners of their own (scan.c)
    PAT_LLAMA3,
    PAT_QWEN2,
    PAT_REGEX // PCRE2
} pattern_kind;

typedef struct pattern {
    pattern_kind kind;
    mx_str text;  // PAT_STRING, PAT_REGEX: as given; owned by the arena it was made with
    uint8_t mask; // PAT_CLASS
    void *code;   // PAT_REGEX: pcre2_code
} pattern;

// What a search needs besides the pattern; zero-initialised, one for each call of encode.
typedef struct pattern_work {
    void *data, *context, *stack; // PCRE2's
} pattern_work;

void pattern_free(pattern *p);
void pattern_work_free(pattern_work *w);
pattern pattern_string(mx_arena *a, mx_str s);
pattern pattern_class(uint8_t mask);
// An expression in the syntax that Hugging Face's tokenizers uses (Oniguruma). Well-known ones get
// a scanner unless `plain` is set. Errors: UNSUPPORTED, naming construct and expression.
mx_status pattern_regex(pattern *p, mx_arena *a, mx_str re, bool plain, mx_err *err);
// The first match at or after `from` in valid UTF-8; *found false when there is none. Errors:
// INVALID when the expression takes too many steps.
mx_status pattern_find(const pattern *p, pattern_work *w, mx_str text, size_t from, bool *found,
                       size_t *start, size_t *end, mx_err *err);

// End of the piece that begins at i < text.n, for the well-known expressions (they match
// everywhere). Linear over a whole text. `cls` is unicode_classes().
size_t scan_gpt2(mx_str text, size_t i, const uint8_t *cls);
size_t scan_cl100k(mx_str text, size_t i, const uint8_t *cls, int max_digits); // Llama 3, Qwen 2

// ---- normalizers ----

typedef enum norm_kind {
    NORM_UNICODE,
    NORM_PREPEND,
    NORM_REPLACE,
    NORM_LOWERCASE,
    NORM_STRIP,
    NORM_BYTES // every byte becomes the code point that spells it
} norm_kind;

typedef struct norm_op {
    norm_kind kind;
    uc_form form;
    mx_str text; // PREPEND; REPLACE's content
    pattern pat; // REPLACE
    bool left, right;
} norm_op;

typedef struct norm_chain {
    norm_op *ops;
    size_t n;
} norm_chain;

// Runs the chain over text (valid UTF-8). The result is text itself or lies in one of tmp[2].
mx_status norm_run(const norm_chain *c, pattern_work *w, mx_str text, mx_buf tmp[2], mx_str *out,
                   mx_err *err);
void norm_free(norm_chain *c); // patterns only; memory is the arena's

// ---- pre-tokenizers ----

typedef enum pre_kind {
    PRE_SPLIT,
    PRE_BYTES,    // ByteLevel: prefix space, then the bytes' spelling
    PRE_METASPACE // spaces become the replacement, one may be put in front
} pre_kind;

typedef enum pre_behavior {
    PRE_REMOVED,
    PRE_ISOLATED,
    PRE_MERGED_WITH_PREVIOUS,
    PRE_MERGED_WITH_NEXT,
    PRE_CONTIGUOUS
} pre_behavior;

typedef enum pre_prepend { PRE_NEVER, PRE_ALWAYS, PRE_FIRST } pre_prepend;

typedef struct pre_op {
    pre_kind kind;
    pattern pat; // SPLIT
    pre_behavior behavior;
    bool invert;
    bool prefix_space;   // BYTES
    bool use_regex;      // BYTES: pat is used
    mx_str replacement;  // METASPACE
    pre_prepend prepend; // METASPACE
} pre_op;

typedef struct pre_chain {
    pre_op *ops;
    size_t n;
} pre_chain;

typedef struct pre_piece {
    uint32_t at, n;
} pre_piece;

// Working memory; the result of pre_run is text and pieces[0..n).
typedef struct pre_work {
    mx_buf buf[2];
    mx_str text;
    pre_piece *pieces, *other;
    size_t n, cap, other_cap;
    bool at_zero; // pieces[0] begins where the whole input begins
    pattern_work pat;
} pre_work;

void pre_work_init(pre_work *w);
void pre_work_free(pre_work *w);
// Cuts text (valid UTF-8, under 2^31 bytes) into pieces. at_zero: it begins the whole input.
mx_status pre_run(const pre_chain *c, pre_work *w, mx_str text, bool at_zero, mx_err *err);
void pre_free(pre_chain *c);

// The code point that spells a byte in byte-level vocabularies, and back (-1: none).
uint32_t byte_to_spelling(uint8_t byte);
int spelling_to_byte(uint32_t cp);
void append_byte_spelling(mx_str bytes, mx_buf *out);

#endif
