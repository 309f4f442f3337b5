// Strings: views, growable buffers with a ceiling, number parsing, UTF-8.
#ifndef MX_BASE_STR_H
#define MX_BASE_STR_H

#include "base/err.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// A view: not owned, not NUL-terminated.
typedef struct mx_str {
    const char *p;
    size_t n;
} mx_str;

static inline mx_str mx_str_of(const char *s) {
    return (mx_str){s, s ? strlen(s) : 0};
}
static inline bool mx_str_eq(mx_str a, mx_str b) {
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}
static inline bool mx_str_is(mx_str a, const char *s) {
    return mx_str_eq(a, mx_str_of(s));
}
bool mx_str_starts(mx_str s, mx_str prefix);
bool mx_str_ends(mx_str s, mx_str suffix);

// Whole-string number parsing (no blanks, no rest, range checked). True on success.
bool mx_parse_i64(const char *s, int64_t *out);
bool mx_parse_u64(const char *s, uint64_t *out);
bool mx_parse_f64(const char *s, double *out); // finite only
// "1.5G", "512M", "64K", "1000" (bytes, binary units, B suffix optional).
bool mx_parse_size(const char *s, uint64_t *out_bytes);

// Growable byte buffer. ceiling 0 means 1 GiB. After overflow `full` stays set, appends do nothing
// and return false; check once at the end. data is NUL-terminated after every append.
typedef struct mx_buf {
    char *data;
    size_t n, cap, ceiling;
    bool full;
} mx_buf;

void mx_buf_init(mx_buf *b, size_t ceiling_bytes);
void mx_buf_free(mx_buf *b);
void mx_buf_clear(mx_buf *b); // keeps the memory, clears `full`
bool mx_buf_add(mx_buf *b, const void *p, size_t n);
bool mx_buf_puts(mx_buf *b, const char *s);
bool mx_buf_putc(mx_buf *b, char c);
bool mx_buf_printf(mx_buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
bool mx_buf_utf8(mx_buf *b, uint32_t cp);
// Appends s as a JSON string with quotes; invalid UTF-8 becomes U+FFFD.
bool mx_buf_json(mx_buf *b, mx_str s);
char *mx_buf_take(mx_buf *b); // hands over a NUL-terminated string (never NULL); b is empty after

// Decodes one code point at p[0..n). Returns its length 1..4, or 0 when the bytes are not valid
// UTF-8 (overlong, surrogate, > U+10FFFF, cut short). n must be at least 1.
int mx_utf8_decode(const char *p, size_t n, uint32_t *cp);
int mx_utf8_encode(uint32_t cp, char out[4]); // length
bool mx_utf8_valid(mx_str s);
// Length of the longest prefix of s that does not end inside a (so far valid) UTF-8 sequence.
size_t mx_utf8_complete(mx_str s);

uint64_t mx_hash64(const void *p, size_t n, uint64_t seed); // FNV-1a with a final mix; stable

#endif
