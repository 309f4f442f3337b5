// Reading C source for the checks: a file in memory, and a copy in which comments, strings and
// character constants are blanks, so that the two have the same lines and columns.
#ifndef TOOLS_CTEXT_H
#define TOOLS_CTEXT_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct ctext {
    char path[1024];
    char *raw, *code; // NUL-terminated, n bytes each
    size_t n;
} ctext;

// Length of the comment, string or character constant that starts at p, or 0.
static inline size_t ctext_opaque(const char *p) {
    size_t n;
    if (p[0] == '/' && p[1] == '/') return strcspn(p, "\n");
    if (p[0] == '/' && p[1] == '*') {
        const char *end = strstr(p + 2, "*/");
        return end ? (size_t)(end + 2 - p) : strlen(p);
    }
    if (p[0] != '"' && p[0] != '\'') return 0;
    for (n = 1; p[n] && p[n] != p[0] && p[n] != '\n'; n++) {
        if (p[n] == '\\' && p[n + 1]) n++;
    }
    return p[n] == p[0] ? n + 1 : n;
}

static inline bool ctext_word_char(char c) {
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static inline void ctext_blank(ctext *t) {
    for (size_t i = 0; i < t->n;) {
        bool digits = t->code[i] == '\'' && i > 0 && ctext_word_char(t->code[i - 1]); // 1'000
        size_t n = digits ? 0 : ctext_opaque(t->code + i);
        for (size_t k = 0; k < n; k++) {
            if (t->code[i + k] != '\n') t->code[i + k] = ' ';
        }
        i += n ? n : 1;
    }
}

// Reads the next file named on standard input. False at the end of the list.
static inline bool ctext_next(ctext *t) {
    *t = (ctext){0};
    FILE *f = NULL;
    while (!f) {
        if (!fgets(t->path, sizeof t->path, stdin)) return false;
        t->path[strcspn(t->path, "\n")] = 0;
        f = fopen(t->path, "rb");
    }
    size_t cap = 0;
    do {
        if (t->n + 65537 > cap) {
            cap = cap ? cap * 2 : 131072;
            t->raw = realloc(t->raw, cap);
            if (!t->raw) abort();
        }
        t->n += fread(t->raw + t->n, 1, 65536, f);
    } while (!feof(f) && !ferror(f));
    fclose(f);
    t->raw[t->n] = 0;
    t->code = malloc(t->n + 1);
    if (!t->code) abort();
    memcpy(t->code, t->raw, t->n + 1);
    ctext_blank(t);
    return true;
}

static inline void ctext_free(ctext *t) {
    free(t->raw);
    free(t->code);
}

static inline bool ctext_ends_with(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

static inline bool ctext_starts_with(const char *s, const char *start) {
    return strncmp(s, start, strlen(start)) == 0;
}

#endif
