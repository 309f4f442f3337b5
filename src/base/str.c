// Strings, buffers, numbers, UTF-8. No state. Does not know locales: everything is bytes or UTF-8.
#include "base/str.h"

#include "base/mem.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

bool mx_str_starts(mx_str s, mx_str prefix) {
    return s.n >= prefix.n && memcmp(s.p, prefix.p, prefix.n) == 0;
}

bool mx_str_ends(mx_str s, mx_str suffix) {
    return s.n >= suffix.n && memcmp(s.p + (s.n - suffix.n), suffix.p, suffix.n) == 0;
}

static bool starts_number(const char *s) {
    return (*s >= '0' && *s <= '9') || *s == '-' || *s == '+' || *s == '.';
}

bool mx_parse_i64(const char *s, int64_t *out) {
    if (!s || !starts_number(s)) return false;
    char *end;
    errno = 0;
    long long v = strtoll(s, &end, 10);
    if (errno || end == s || *end) return false;
    *out = v;
    return true;
}

bool mx_parse_u64(const char *s, uint64_t *out) {
    if (!s || *s < '0' || *s > '9') return false;
    char *end;
    errno = 0;
    unsigned long long v = strtoull(s, &end, 10);
    if (errno || *end) return false;
    *out = v;
    return true;
}

bool mx_parse_f64(const char *s, double *out) {
    if (!s || !starts_number(s)) return false;
    char *end;
    errno = 0;
    double v = strtod(s, &end);
    if (end == s || *end || !isfinite(v)) return false;
    *out = v;
    return true;
}

bool mx_parse_size(const char *s, uint64_t *out_bytes) {
    if (!s || *s < '0' || *s > '9') return false;
    char *end;
    double v = strtod(s, &end);
    uint64_t unit = 1;
    switch (*end | 0x20) {
    case 'k': unit = 1ull << 10; break;
    case 'm': unit = 1ull << 20; break;
    case 'g': unit = 1ull << 30; break;
    case 't': unit = 1ull << 40; break;
    default: break;
    }
    if (unit > 1) end++;
    if (unit > 1 && *end == 'i') end++;
    if (*end == 'B' || *end == 'b') end++;
    if (*end || !isfinite(v) || v * (double)unit >= 9.2e18) return false;
    *out_bytes = (uint64_t)(v * (double)unit);
    return true;
}

void mx_buf_init(mx_buf *b, size_t ceiling_bytes) {
    *b = (mx_buf){.ceiling = ceiling_bytes ? ceiling_bytes : (size_t)1 << 30};
}

void mx_buf_free(mx_buf *b) {
    mx_free(b->data);
    *b = (mx_buf){.ceiling = b->ceiling};
}

void mx_buf_clear(mx_buf *b) {
    b->n = 0;
    b->full = false;
    if (b->data) b->data[0] = 0;
}

static bool reserve(mx_buf *b, size_t extra) {
    if (b->full) return false;
    if (extra > b->ceiling || b->n > b->ceiling - extra) {
        b->full = true;
        return false;
    }
    size_t need = b->n + extra + 1;
    if (need > b->cap) {
        size_t cap = b->cap ? b->cap : 64;
        while (cap < need) cap *= 2;
        b->data = mx_realloc(b->data, cap);
        b->cap = cap;
    }
    return true;
}

bool mx_buf_add(mx_buf *b, const void *p, size_t n) {
    if (!reserve(b, n)) return false;
    if (n) memcpy(b->data + b->n, p, n);
    b->n += n;
    b->data[b->n] = 0;
    return true;
}

bool mx_buf_puts(mx_buf *b, const char *s) {
    return mx_buf_add(b, s, strlen(s));
}

bool mx_buf_putc(mx_buf *b, char c) {
    return mx_buf_add(b, &c, 1);
}

bool mx_buf_printf(mx_buf *b, const char *fmt, ...) {
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    bool ok = n >= 0 && reserve(b, (size_t)n);
    if (ok) {
        vsnprintf(b->data + b->n, (size_t)n + 1, fmt, again);
        b->n += (size_t)n;
    }
    va_end(again);
    return ok;
}

bool mx_buf_utf8(mx_buf *b, uint32_t cp) {
    char tmp[4];
    return mx_buf_add(b, tmp, (size_t)mx_utf8_encode(cp, tmp));
}

bool mx_buf_json(mx_buf *b, mx_str s) {
    mx_buf_putc(b, '"');
    for (size_t i = 0; i < s.n;) {
        uint32_t cp;
        int len = mx_utf8_decode(s.p + i, s.n - i, &cp);
        if (len == 0) {
            mx_buf_puts(b, "\xef\xbf\xbd");
            i++;
            continue;
        }
        if (cp == '"' || cp == '\\') {
            mx_buf_printf(b, "\\%c", (char)cp);
        } else if (cp == '\n') {
            mx_buf_puts(b, "\\n");
        } else if (cp < 0x20) {
            mx_buf_printf(b, "\\u%04x", (unsigned)cp);
        } else {
            mx_buf_add(b, s.p + i, (size_t)len);
        }
        i += (size_t)len;
    }
    return mx_buf_putc(b, '"');
}

char *mx_buf_take(mx_buf *b) {
    char *p = b->data ? b->data : mx_calloc(1, 1);
    b->data = NULL;
    b->n = b->cap = 0;
    return p;
}

int mx_utf8_decode(const char *s, size_t n, uint32_t *cp) {
    const unsigned char *p = (const unsigned char *)s;
    if (p[0] < 0x80) {
        *cp = p[0];
        return 1;
    }
    int len = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    if (p[0] < 0xc2 || p[0] > 0xf4 || (size_t)len > n) return 0;
    uint32_t v = p[0] & (0xffu >> (len + 1));
    for (int i = 1; i < len; i++) {
        if ((p[i] & 0xc0) != 0x80) return 0;
        v = (v << 6) | (p[i] & 0x3fu);
    }
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
    if (v < least[len] || v > 0x10ffff || (v >= 0xd800 && v <= 0xdfff)) return 0;
    *cp = v;
    return len;
}

int mx_utf8_encode(uint32_t cp, char out[4]) {
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xc0 | (cp >> 6));
        out[1] = (char)(0x80 | (cp & 0x3f));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xe0 | (cp >> 12));
        out[1] = (char)(0x80 | ((cp >> 6) & 0x3f));
        out[2] = (char)(0x80 | (cp & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | (cp >> 18));
    out[1] = (char)(0x80 | ((cp >> 12) & 0x3f));
    out[2] = (char)(0x80 | ((cp >> 6) & 0x3f));
    out[3] = (char)(0x80 | (cp & 0x3f));
    return 4;
}

bool mx_utf8_valid(mx_str s) {
    for (size_t i = 0; i < s.n;) {
        uint32_t cp;
        int len = mx_utf8_decode(s.p + i, s.n - i, &cp);
        if (len == 0) return false;
        i += (size_t)len;
    }
    return true;
}

size_t mx_utf8_complete(mx_str s) {
    const unsigned char *p = (const unsigned char *)s.p;
    for (size_t back = 1; back <= 3 && back <= s.n; back++) {
        unsigned char c = p[s.n - back];
        if ((c & 0xc0) == 0x80) continue;
        size_t need = c >= 0xf0 && c <= 0xf4 ? 4 : c >= 0xe0 ? 3 : c >= 0xc2 ? 2 : 1;
        return need > back ? s.n - back : s.n;
    }
    return s.n;
}

uint64_t mx_hash64(const void *data, size_t n, uint64_t seed) {
    const unsigned char *p = data;
    uint64_t h = 0xcbf29ce484222325ull ^ (seed * 0x9e3779b97f4a7c15ull);
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3ull;
    h ^= h >> 33;
    h *= 0xff51afd7ed558ccdull;
    h ^= h >> 33;
    return h;
}
