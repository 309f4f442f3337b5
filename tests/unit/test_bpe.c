// Merging: short, middle and very long pieces give what the definition gives, for rules in the
// order of a training, rules in any order, and scores that tie.
#include "base/mem.h"
#include "text/bpe_int.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
// cmocka.h needs the two above
#include <cmocka.h>

static uint64_t state64 = 88172645463325252u;

static uint32_t random_below(uint32_t n) {
    state64 ^= state64 << 13;
    state64 ^= state64 >> 7;
    state64 ^= state64 << 17;
    return (uint32_t)(state64 >> 33) % n;
}

typedef struct made {
    vocab v;
    bpe b;
} made;

enum { LETTERS = 4, TOKENS = 160, LONGEST = 9 };

// Letters, and texts that two earlier tokens join to, each with its rule.
static void make(made *m, bool shuffled, bool scores) {
    *m = (made){0};
    mx_err err = {0};
    int32_t left[TOKENS], right[TOKENS];
    int n = 0, n_rules = 0;
    for (; n < LETTERS; n++) {
        char c = (char)('a' + n);
        assert_int_equal(vocab_put(&m->v, n, (mx_str){&c, 1}, &err), MX_OK);
    }
    while (n < TOKENS) {
        int32_t l = (int32_t)random_below((uint32_t)n), r = (int32_t)random_below((uint32_t)n);
        mx_str a = vocab_text(&m->v, (uint32_t)l), b = vocab_text(&m->v, (uint32_t)r);
        char joint[2 * LONGEST];
        if (a.n + b.n > LONGEST) continue;
        memcpy(joint, a.p, a.n);
        memcpy(joint + a.n, b.p, b.n);
        if (vocab_find(&m->v, (mx_str){joint, a.n + b.n}) >= 0) continue;
        assert_int_equal(vocab_put(&m->v, n++, (mx_str){joint, a.n + b.n}, &err), MX_OK);
        left[n_rules] = l, right[n_rules++] = r;
    }
    bpe_init(&m->b, &m->v);
    m->b.unk = -1;
    if (scores) {
        float s[TOKENS];
        for (int i = 0; i < TOKENS; i++) s[i] = -(float)random_below(20); // many are equal
        bpe_use_scores(&m->b, s);
        return;
    }
    int order[TOKENS];
    for (int i = 0; i < n_rules; i++) order[i] = i;
    for (int i = n_rules - 1; shuffled && i > 0; i--) {
        int k = (int)random_below((uint32_t)i + 1), t = order[i];
        order[i] = order[k], order[k] = t;
    }
    for (int i = 0; i < n_rules; i++) {
        mx_str a = vocab_text(&m->v, (uint32_t)left[order[i]]);
        mx_str b = vocab_text(&m->v, (uint32_t)right[order[i]]);
        assert_int_equal(bpe_add_rule(&m->b, a, b, (uint32_t)i, &err), MX_OK);
    }
}

static void drop(made *m) {
    bpe_free(&m->b);
    vocab_free(&m->v);
}

// Order of merging l and r, and what they become; false when they do not merge.
static bool pair_of(const made *m, int32_t l, int32_t r, uint64_t *key, int32_t *joint) {
    const bpe *b = &m->b;
    if (b->score_rank) {
        mx_str x = vocab_text(&m->v, (uint32_t)l), y = vocab_text(&m->v, (uint32_t)r);
        char text[4 * LONGEST];
        memcpy(text, x.p, x.n);
        memcpy(text + x.n, y.p, y.n);
        *joint = vocab_find(&m->v, (mx_str){text, x.n + y.n});
        if (*joint < 0) return false;
        // best score, longest left part, longest right part
        *key = ((uint64_t)b->score_rank[*joint] << 32) + ((uint64_t)(LONGEST - x.n) << 8) +
               (LONGEST - y.n);
        return true;
    }
    for (size_t i = 0; i < b->n_slots; i++) {
        if (b->rules[i].key != ((uint64_t)l << 32 | (uint32_t)r)) continue;
        *key = b->rules[i].rank;
        *joint = b->rules[i].id;
        return true;
    }
    return false;
}

// The definition: merge the first of the least pairs, until there is none. A table of pairs is made
// once, for the definition looks at all of them each time.
static size_t define(const made *m, const char *text, size_t n, int32_t *ids) {
    static uint64_t key[TOKENS][TOKENS];
    static int32_t joint[TOKENS][TOKENS];
    for (int32_t l = 0; l < TOKENS; l++) {
        for (int32_t r = 0; r < TOKENS; r++) {
            if (!pair_of(m, l, r, &key[l][r], &joint[l][r])) key[l][r] = UINT64_MAX;
        }
    }
    for (size_t i = 0; i < n; i++) ids[i] = text[i] - 'a';
    for (;;) {
        size_t best = n;
        for (size_t i = 0; i + 1 < n; i++) {
            uint64_t k = key[ids[i]][ids[i + 1]];
            if (k == UINT64_MAX) continue;
            if (best == n) best = i;
            uint64_t have = key[ids[best]][ids[best + 1]];
            bool less = k < have ||
                        (k == have && joint[ids[i]][ids[i + 1]] < joint[ids[best]][ids[best + 1]]);
            if (less) best = i;
        }
        if (best == n) return n;
        ids[best] = joint[ids[best]][ids[best + 1]];
        memmove(ids + best + 1, ids + best + 2, (n - best - 2) * sizeof *ids);
        n--;
    }
}

static void compare(const made *m, size_t n, bool runs) {
    char *text = mx_alloc(n + 1);
    for (size_t i = 0; i < n; i++) {
        bool same = runs && i && random_below(10);
        text[i] = same ? text[i - 1] : (char)('a' + random_below(LETTERS));
    }
    int32_t *want = mx_alloc(n * sizeof *want);
    size_t n_want = define(m, text, n, want);
    bpe_work w = {0};
    mx_ids got = {0};
    bpe_encode(&m->b, &w, (mx_str){text, n}, &got);
    assert_int_equal(got.n, n_want);
    assert_memory_equal(got.v, want, n_want * sizeof *want);
    // working memory is left as it must be for the next piece
    got.n = 0;
    bpe_encode(&m->b, &w, (mx_str){text, n}, &got);
    assert_int_equal(got.n, n_want);
    assert_memory_equal(got.v, want, n_want * sizeof *want);
    mx_free(got.v);
    bpe_work_free(&w);
    mx_free(want);
    mx_free(text);
}

static void compare_kind(bool shuffled, bool scores) {
    static const size_t lengths[] = {1, 2, 47, 48, 49, 50, 700, 4095, 4096, 4097, 6000};
    for (int round = 0; round < 4; round++) {
        made m;
        make(&m, shuffled, scores);
        for (size_t i = 0; i < MX_COUNT(lengths); i++) compare(&m, lengths[i], round & 1);
        drop(&m);
    }
}

static void rules_of_a_training(void **state) {
    (void)state;
    compare_kind(false, false);
}

static void rules_in_any_order(void **state) {
    (void)state;
    compare_kind(true, false);
}

static void scores_that_tie(void **state) {
    (void)state;
    compare_kind(false, true);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rules_of_a_training),
        cmocka_unit_test(rules_in_any_order),
        cmocka_unit_test(scores_that_tie),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
