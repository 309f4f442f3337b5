// Added tokens: spellings that become one token before text is normalised or split.
//
// State: a sorted list, constant after loading. Does not decide what is markup (tokenizer.c).
// A search narrows the sorted list byte by byte, so the longest token at a position is found
// without a tree; positions whose byte begins no token cost one look-up.
#include "text/text_int.h"

#include <stdlib.h>

void added_free(added_set *s) {
    mx_free(s->items);
    *s = (added_set){0};
}

void added_add(added_set *s, added_token t) {
    CHECK(t.match.n > 0);
    if (s->n == s->cap) {
        s->cap = s->cap ? s->cap * 2 : 16;
        s->items = mx_realloc(s->items, s->cap * sizeof *s->items);
    }
    s->items[s->n++] = t;
}

static int compare_texts(mx_str a, mx_str b) {
    int c = memcmp(a.p, b.p, MX_MIN(a.n, b.n));
    return c ? c : a.n < b.n ? -1 : a.n > b.n;
}

static int compare_tokens(const void *x, const void *y) {
    const added_token *a = x, *b = y;
    int c = compare_texts(a->match, b->match);
    return c ? c : a->id < b->id ? -1 : a->id > b->id;
}

void added_sort(added_set *s) {
    if (s->n) qsort(s->items, s->n, sizeof *s->items, compare_tokens);
    size_t n = 0;
    for (size_t i = 0; i < s->n; i++) {
        if (n && mx_str_eq(s->items[n - 1].match, s->items[i].match)) continue;
        s->items[n++] = s->items[i];
    }
    s->n = n;
    size_t i = 0;
    for (int c = 0; c < 257; c++) {
        while (i < n && (unsigned char)s->items[i].match.p[0] < c) i++;
        s->first[c] = (uint32_t)i;
    }
}

// First item in [lo, hi) whose byte at depth is >= c; items all agree before depth and those that
// end there sort first.
static uint32_t lower(const added_set *s, uint32_t lo, uint32_t hi, size_t depth, int c) {
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        mx_str m = s->items[mid].match;
        int b = depth < m.n ? (unsigned char)m.p[depth] : -1;
        if (b < c)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static bool all_trusted(const trust *tr, size_t start, size_t end) {
    if (!tr) return true;
    if (tr->none) return false;
    size_t lo = 0, hi = tr->n; // the first range that ends behind start
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (tr->untrusted[mid].end <= start)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo == tr->n || tr->untrusted[lo].start >= end;
}

// The longest permitted token that begins at i, or NULL.
static const added_token *longest_at(const added_set *s, mx_str text, size_t i, const trust *tr) {
    unsigned char c = (unsigned char)text.p[i];
    uint32_t lo = s->first[c], hi = s->first[c + 1];
    const added_token *best = NULL;
    for (size_t depth = 1; lo < hi; depth++) {
        const added_token *t = &s->items[lo];
        if (t->match.n == depth) { // texts are distinct: only the first can end here
            if (!t->markup || all_trusted(tr, i, i + depth)) best = t;
            lo++;
        }
        if (i + depth >= text.n) break;
        int b = (unsigned char)text.p[i + depth];
        lo = lower(s, lo, hi, depth, b);
        hi = lower(s, lo, hi, depth, b + 1);
    }
    return best;
}

static bool word_at(mx_str text, size_t i) {
    return i < text.n && unicode_classes()[unicode_next(text.p, &i)] & UC_WORD;
}

// End of the blanks from i. Tokens that are blanks themselves may ask inside the same run again and
// again; its end is remembered.
static size_t strip_behind(mx_str text, size_t i, added_hit *hit) {
    if (i >= hit->blank_from && i < hit->blank_end) return hit->blank_end;
    const uint8_t *cls = unicode_classes();
    hit->blank_from = i;
    while (i < text.n) {
        size_t k = i;
        if (!(cls[unicode_next(text.p, &k)] & UC_SPACE)) break;
        i = k;
    }
    return hit->blank_end = i;
}

bool added_find(const added_set *s, mx_str text, size_t next, size_t done, const trust *tr,
                added_hit *hit) {
    if (!s->n) return false;
    const uint8_t *cls = unicode_classes();
    for (size_t i = next; i < text.n; i++) {
        unsigned char c = (unsigned char)text.p[i];
        if (s->first[c] == s->first[c + 1]) continue;
        const added_token *t = longest_at(s, text, i, tr);
        if (!t) continue;
        size_t start = i, end = i + t->match.n;
        if (t->single_word &&
            ((start > 0 && word_at(text, unicode_prev(text.p, start))) || word_at(text, end))) {
            i = end - 1; // what was refused is not looked at again
            continue;
        }
        while (t->lstrip && start > done) {
            size_t at = unicode_prev(text.p, start), k = at;
            if (!(cls[unicode_next(text.p, &k)] & UC_SPACE)) break;
            start = at;
        }
        if (t->rstrip) end = strip_behind(text, end, hit);
        hit->start = start;
        hit->end = end;
        hit->next = i + t->match.n;
        hit->id = t->id;
        return true;
    }
    return false;
}
