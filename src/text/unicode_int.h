// Unicode as Hugging Face's tokenizers sees it: classes, normal forms, lower case.
#ifndef MX_TEXT_UNICODE_INT_H
#define MX_TEXT_UNICODE_INT_H

#include "base/str.h"

// Bits of a code point's class byte.
enum {
    UC_LETTER = 1, // \p{L}, Unicode 16
    UC_NUMBER = 2, // \p{N}, Unicode 16
    UC_SPACE = 4,  // White_Space
    UC_DIGIT = 8,  // numeric as the Digits pre-tokenizer sees it
    UC_PUNCT = 16, // as the Punctuation pre-tokenizer sees it
    UC_WORD = 32,  // what single_word looks at: \w and the joiners U+200C, U+200D
    UC_NORM = 64,  // may change or combine under NFC
};

// One byte per code point (index < 0x110000). Built at the first call, then constant; thread-safe.
const uint8_t *unicode_classes(void);

// A code point of text known to be valid UTF-8; i is advanced past it. i < n is the caller's duty.
static inline uint32_t unicode_next(const char *p, size_t *i) {
    const unsigned char *s = (const unsigned char *)p + *i;
    uint32_t c = s[0];
    if (c < 0x80) {
        *i += 1;
        return c;
    }
    if (c < 0xe0) {
        *i += 2;
        return (c & 0x1f) << 6 | (s[1] & 0x3fu);
    }
    if (c < 0xf0) {
        *i += 3;
        return (c & 0x0f) << 12 | (s[1] & 0x3fu) << 6 | (s[2] & 0x3fu);
    }
    *i += 4;
    return (c & 0x07) << 18 | (s[1] & 0x3fu) << 12 | (s[2] & 0x3fu) << 6 | (s[3] & 0x3fu);
}
// Length of the sequence that starts with this byte (valid UTF-8).
static inline size_t unicode_len(char first) {
    unsigned char c = (unsigned char)first;
    return c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}
// Start of the code point that ends before i > 0 (valid UTF-8).
static inline size_t unicode_prev(const char *p, size_t i) {
    do i--;
    while (i > 0 && ((unsigned char)p[i] & 0xc0) == 0x80);
    return i;
}

typedef enum uc_form { UC_NFC, UC_NFD, UC_NFKC, UC_NFKD } uc_form;
// Appends the normal form of valid UTF-8 text. Time O(n).
void unicode_normalize(uc_form form, mx_str text, mx_buf *out);
// Appends text with each code point in lower case (no context rules).
void unicode_lower(mx_str text, mx_buf *out);

// Text for the inside of a PCRE2 class that matches \p{name} as of Unicode 16 when PCRE2's own
// tables are of Unicode 14 or 16; name "\w" is that class. False when the name is neither that nor
// a category of one or two letters.
bool unicode_class_text(mx_str name, mx_buf *out);

#endif
