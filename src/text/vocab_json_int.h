// model.vocab and model.merges of a tokenizer.json.
#ifndef MX_TEXT_VOCAB_JSON_INT_H
#define MX_TEXT_VOCAB_JSON_INT_H

#include "text/bpe_int.h"

typedef struct vocab_json {
    mx_str vocab, merges; // views of the text; p NULL when the file has none
    mx_buf rest;          // the file with {} and [] in their places; mx_buf_free it
} vocab_json;

// Cuts the two values out. rest need not be valid JSON: its parser says so. Errors: FORMAT.
mx_status vocab_json_cut(mx_str text, vocab_json *out, mx_err *err);
// Reads them. Strict: any deviation is FORMAT with the byte where it is, counted in the part.
mx_status vocab_json_read(const vocab_json *j, vocab *v, mx_err *err);
mx_status vocab_json_merges(const vocab_json *j, bpe *b, mx_err *err);

#endif
