// Text to tokens and back, for the tokenizers real checkpoints carry.
#ifndef MX_TEXT_TOKENIZER_H
#define MX_TEXT_TOKENIZER_H

#include "base/str.h"
#include "format/weights.h"

typedef struct mx_tokenizer mx_tokenizer;

// Loads tokenizer.json (and tokenizer_config.json when there) from a folder. Supported: BPE models,
// byte-level (GPT-2 style) and SentencePiece-style with byte fallback; the normalizers,
// pre-tokenizers, post-processors, decoders and added tokens of such files. A construct that is
// not supported is an error that names it; nothing is skipped in silence.
mx_status mx_tokenizer_open_dir(mx_tokenizer **t, const char *dir, mx_err *err);
// From memory: the text of a tokenizer.json, and that of a tokenizer_config.json (p NULL: none).
mx_status mx_tokenizer_open_json(mx_tokenizer **t, mx_str json, mx_str config, mx_err *err);
// From GGUF metadata: tokenizer.ggml.model gpt2 (with its `pre`), llama (SentencePiece BPE), or
// no_vocab: the bytes, with a warning.
mx_status mx_tokenizer_open_gguf(mx_tokenizer **t, const mx_weights *w, mx_err *err);
// A vocabulary of the 256 bytes and nothing else, for models whose text means nothing.
mx_status mx_tokenizer_open_bytes(mx_tokenizer **t, mx_err *err);
void mx_tokenizer_close(mx_tokenizer *t);
// All functions below are thread-safe on an open tokenizer.

int32_t mx_tokenizer_n_vocab(const mx_tokenizer *t); // 1 + greatest id
int32_t mx_tokenizer_bos(const mx_tokenizer *t);     // -1 when there is none
int32_t mx_tokenizer_eos(const mx_tokenizer *t);     // the tokenizer's own; -1 when there is none
// Every id that ends a turn as far as tokenizer and GGUF metadata say (eos, eot, eom). Returns the
// count, writes at most cap.
int32_t mx_tokenizer_eos_ids(const mx_tokenizer *t, int32_t *ids, int32_t cap);
bool mx_tokenizer_adds_bos(const mx_tokenizer *t); // what add_special does at the front
// The token's text: for byte-level vocabularies the decoded bytes, for an added token its content.
// Empty for an id that does not exist. Valid while t is open.
mx_str mx_tokenizer_piece(const mx_tokenizer *t, int32_t id);
bool mx_tokenizer_is_special(const mx_tokenizer *t, int32_t id); // control token
int32_t mx_tokenizer_find(const mx_tokenizer *t, mx_str piece);  // id of a token by text, or -1
// The chat template: default one, or the one named "tool_use"; empty when there is none.
mx_str mx_tokenizer_template(const mx_tokenizer *t, const char *name);

// Growable id list; free with mx_free(ids->v).
typedef struct mx_ids {
    int32_t *v;
    size_t n, cap;
} mx_ids;
void mx_ids_push(mx_ids *ids, int32_t id);

// A piece of text and where it came from. Only trusted (template) text may become control tokens;
// in untrusted text their spelling is ordinary text.
typedef struct mx_span {
    mx_str text;
    bool trusted;
} mx_span;

typedef struct mx_encode_opts {
    bool add_special;   // what the post-processor adds: BOS and so on
    bool parse_special; // spellings of control tokens become those tokens
} mx_encode_opts;

// Appends ids of text to out. With add_special, a text that already begins with BOS's spelling
// (and parse_special) does not get a second BOS. Invalid UTF-8 is an error (INVALID).
// Time is O(n log n) whatever the text.
mx_status mx_tokenizer_encode(const mx_tokenizer *t, mx_str text, mx_encode_opts opts, mx_ids *out,
                              mx_err *err);
// Encodes a rendered prompt: spans joined, control tokens recognised in trusted spans only.
// No special tokens are added; a chat prompt carries its own.
mx_status mx_tokenizer_encode_spans(const mx_tokenizer *t, const mx_span *spans, size_t n,
                                    mx_ids *out, mx_err *err);

// Decodes ids and appends the text, as Hugging Face's decode(skip_special_tokens=skip_special).
void mx_tokenizer_decode(const mx_tokenizer *t, const int32_t *ids, size_t n, bool skip_special,
                         mx_buf *out);

// Incremental decoding. Pushed deltas, concatenated, equal the decode of all ids; no delta ends
// inside a UTF-8 sequence (the flush turns a left-over into U+FFFD).
typedef struct mx_detok mx_detok;
mx_detok *mx_detok_open(const mx_tokenizer *t, bool skip_special);
void mx_detok_close(mx_detok *d);
void mx_detok_push(mx_detok *d, int32_t id, mx_buf *out); // appends the new text, if any
void mx_detok_flush(mx_detok *d, mx_buf *out);

#endif
