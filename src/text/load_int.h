// Parts of the tokenizer.json loader.
#ifndef MX_TEXT_LOAD_INT_H
#define MX_TEXT_LOAD_INT_H

#include "text/text_int.h"

// A boolean member: dflt when absent or null. FORMAT when it is something else.
mx_status load_bool(const json_t *o, const char *key, bool dflt, bool *out, mx_err *err);
mx_status load_string(const json_t *o, const char *key, mx_str *out, mx_err *err); // required
mx_str load_view(const json_t *v); // of a JSON string

// Normalizer, pre-tokenizer and decoder. Errors: UNSUPPORTED naming the construct, FORMAT.
mx_status load_pipeline(mx_tokenizer *t, const json_t *root, mx_err *err);
// What add_special puts around; v NULL or null: nothing.
mx_status load_post_processor(mx_tokenizer *t, const json_t *v, mx_err *err);

#endif
