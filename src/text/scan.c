// Scanners for the pre-tokenizer expressions that nearly every byte-level model uses.
//
// No state. Does not know vocabularies. Each call returns the end of one match of the expression
// at i; since the expressions match at every position, walking from end to end cuts the text as the
// regex would. A run of white space is looked at a bounded number of times, so a whole text costs
// linear time whatever it holds.
#include "text/split_int.h"

static uint8_t class_at(mx_str t, size_t i, const uint8_t *cls) {
    if (i >= t.n) return 0;
    return cls[unicode_next(t.p, &i)];
}

// End of the run from i of code points whose class has (want true) or has not any bit of mask.
static size_t run_of(mx_str t, size_t i, const uint8_t *cls, uint8_t mask, bool want) {
    while (i < t.n) {
        size_t next = i;
        if (((cls[unicode_next(t.p, &next)] & mask) != 0) != want) break;
        i = next;
    }
    return i;
}

// Length of 's 't 're 've 'm 'll 'd at i, or 0. With fold, letters in either case; the long s
// (U+017F) is an s too, as the regex engine folds it.
static size_t contraction(mx_str t, size_t i, bool fold) {
    if (t.p[i] != '\'' || i + 1 >= t.n) return 0;
    char a = t.p[i + 1], b = i + 2 < t.n ? t.p[i + 2] : 0;
    if (fold) {
        if (a >= 'A' && a <= 'Z') a |= 0x20;
        if (b >= 'A' && b <= 'Z') b |= 0x20;
        if (a == '\xc5' && b == '\xbf') return 3;
    }
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
    return 0;
}

// \s+(?!\S)|\s+ over the white space [i, end)
static size_t spaces_end(mx_str t, size_t i, size_t end) {
    if (end == t.n) return end;
    size_t last = unicode_prev(t.p, end);
    return last > i ? last : end;
}

size_t scan_gpt2(mx_str t, size_t i, const uint8_t *cls) {
    size_t c = contraction(t, i, false);
    if (c) return i + c;
    size_t from = t.p[i] == ' ' && i + 1 < t.n ? i + 1 : i;
    uint8_t k = class_at(t, from, cls);
    if (k & UC_SPACE) {
        k = class_at(t, i, cls);
        from = i;
    }
    if (k & UC_LETTER) return run_of(t, from, cls, UC_LETTER, true);
    if (k & UC_NUMBER) return run_of(t, from, cls, UC_NUMBER, true);
    if (!(k & UC_SPACE)) return run_of(t, from, cls, UC_SPACE | UC_LETTER | UC_NUMBER, false);
    return spaces_end(t, i, run_of(t, i, cls, UC_SPACE, true));
}

static bool is_newline(char c) {
    return c == '\n' || c == '\r';
}

static size_t scan_spaces(mx_str t, size_t i, const uint8_t *cls) {
    size_t end = run_of(t, i, cls, UC_SPACE, true), nl = end;
    while (nl > i && !is_newline(t.p[nl - 1])) nl--;
    if (nl > i) return nl; // \s*[\r\n]+
    return spaces_end(t, i, end);
}

size_t scan_cl100k(mx_str t, size_t i, const uint8_t *cls, int max_digits) {
    size_t len = contraction(t, i, true);
    if (len) return i + len;
    size_t next = i;
    uint8_t k = cls[unicode_next(t.p, &next)], k2 = class_at(t, next, cls);
    if (k & UC_LETTER) return run_of(t, next, cls, UC_LETTER, true);
    if (k & UC_NUMBER) {
        size_t end = next;
        for (int n = 1; n < max_digits && class_at(t, end, cls) & UC_NUMBER; n++) {
            unicode_next(t.p, &end);
        }
        return end;
    }
    if (!is_newline(t.p[i]) && k2 & UC_LETTER) return run_of(t, next, cls, UC_LETTER, true);
    size_t from = t.p[i] == ' ' && next < t.n ? next : i;
    if (!(class_at(t, from, cls) & (UC_SPACE | UC_LETTER | UC_NUMBER))) {
        size_t end = run_of(t, from, cls, UC_SPACE | UC_LETTER | UC_NUMBER, false);
        while (end < t.n && is_newline(t.p[end])) end++;
        return end;
    }
    return scan_spaces(t, i, cls);
}
