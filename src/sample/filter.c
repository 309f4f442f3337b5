// Filters: which tokens may be drawn. State: the sampler's list of candidates, always in ascending
// order of id.
//
// A filter finds the last candidate it keeps, in the order of its keys (equal keys by id), and then
// drops what comes after it, so that the list is never reordered. Probabilities are weights in
// double, exp(logit - greatest), added up in an order that depends on the row alone. Vocabularies
// have up to 262,144 entries and a filter keeps few: ranks are found by a heap, or by selection,
// before anything is sorted.
#include "base/mem.h"
#include "sample/sample_int.h"

#include <math.h>
#include <stdlib.h>

enum { HEAP_MAX = 1024, PORTION = 128, MAX_ROUNDS = 64 };

void sample_collect(mx_sampler *s) {
    s->n = 0;
    for (int32_t i = 0; i < s->n_vocab; i++) {
        if (s->row[i] > -INFINITY) s->cand[s->n++] = (sample_cand){s->row[i], i};
    }
}

static float greatest(const mx_sampler *s) {
    float m = s->cand[0].logit;
    for (int32_t i = 1; i < s->n; i++) m = s->cand[i].logit > m ? s->cand[i].logit : m;
    return m;
}

double sample_weights(mx_sampler *s, double temperature) {
    double max = (double)greatest(s), sum = 0;
    for (int32_t i = 0; i < s->n; i++) {
        double d = (double)s->cand[i].logit - max;
        s->weight[i] = d == 0 ? 1 : exp(d / temperature);
        sum += s->weight[i];
    }
    return sum;
}

// ---- Ranking ----

static bool before(const sample_item *a, const sample_item *b) {
    return a->key < b->key || (a->key == b->key && a->id < b->id);
}

static int compare_items(const void *a, const void *b) {
    return before(a, b) ? -1 : before(b, a) ? 1 : 0;
}

static void swap_items(sample_item *a, sample_item *b) {
    sample_item t = *a;
    *a = *b;
    *b = t;
}

// Heap with the last in order at its root.
static void sift_down(sample_item *heap, int32_t n, int32_t i) {
    for (int32_t c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && before(&heap[c], &heap[c + 1])) c++;
        if (!before(&heap[i], &heap[c])) return;
        swap_items(&heap[i], &heap[c]);
    }
}

static void select_by_heap(sample_item *items, int32_t n, int32_t m) {
    for (int32_t i = m / 2 - 1; i >= 0; i--) sift_down(items, m, i);
    for (int32_t i = m; i < n; i++) {
        if (!before(&items[i], &items[0])) continue;
        swap_items(&items[i], &items[0]);
        sift_down(items, m, 0);
    }
}

static sample_item median_of_three(sample_item a, sample_item b, sample_item c) {
    if (before(&b, &a)) swap_items(&a, &b);
    if (before(&c, &b)) b = c;
    return before(&b, &a) ? a : b;
}

static void sort_items(sample_item *items, int32_t n) {
    qsort(items, (size_t)n, sizeof *items, compare_items);
}

// Hoare's partition of items low..high: those up to *end come before those from *start on; between
// the two there is at most one. All items differ (by id).
static void split_items(sample_item *items, int32_t low, int32_t high, int32_t *end,
                        int32_t *start) {
    sample_item pivot = median_of_three(items[low], items[low + (high - low) / 2], items[high]);
    int32_t i = low, j = high;
    while (i <= j) {
        while (before(&items[i], &pivot)) i++;
        while (before(&pivot, &items[j])) j--;
        if (i <= j) swap_items(&items[i++], &items[j--]);
    }
    *end = j, *start = i;
}

// The m first are before position m. After too many rounds, as an adversary could force, the rest
// is sorted.
static void select_by_partition(sample_item *items, int32_t n, int32_t m) {
    int32_t low = 0, high = n - 1;
    for (int round = 0; low < high && m > low && m <= high; round++) {
        int32_t end, start;
        if (round == MAX_ROUNDS) {
            sort_items(items + low, high - low + 1);
            return;
        }
        split_items(items, low, high, &end, &start);
        if (m <= end)
            high = end;
        else if (m >= start)
            low = start;
        else
            return;
    }
}

void sample_order(sample_item *items, int32_t n, int32_t m) {
    CHECK(m > 0 && m <= n);
    if (m < n && m <= HEAP_MAX)
        select_by_heap(items, n, m);
    else if (m < n)
        select_by_partition(items, n, m);
    sort_items(items, m);
}

static void keep_up_to(mx_sampler *s, const double *key, const sample_item *last) {
    int32_t n = 0;
    for (int32_t i = 0; i < s->n; i++) {
        double k = key ? key[i] : -(double)s->cand[i].logit;
        sample_item it = {k, s->cand[i].id, i};
        if (!before(last, &it)) s->cand[n++] = s->cand[i];
    }
    s->n = n;
}

// Adds the weights of items in order until *got reaches target: the last one, or NULL.
static const sample_item *walk(const mx_sampler *s, const sample_item *items, int32_t n,
                               double target, double *got) {
    for (int32_t i = 0; i < n; i++) {
        *got += s->weight[items[i].at];
        if (*got >= target) return &items[i];
    }
    return NULL;
}

// The last item needed for a share `p` of the weights in s->weight, whose sum is `sum`. Most often
// it is among the first few. Else the list is split about pivots and the part that holds the answer
// is split again, so that only a few items are sorted; the sum of what lies before is added in the
// order in which the splits left it.
static sample_item last_of_share(mx_sampler *s, double p, double sum) {
    int32_t low = MX_MIN(PORTION, s->n), high = s->n - 1;
    double got = 0, target = p * sum;
    sample_order(s->item, s->n, low);
    const sample_item *last = walk(s, s->item, low, target, &got);
    for (int round = 0; !last && high - low >= PORTION && round < MAX_ROUNDS; round++) {
        int32_t end, start;
        double part = 0;
        split_items(s->item, low, high, &end, &start);
        if (end < low) end = start - 1; // the pivot alone
        walk(s, s->item + low, end - low + 1, HUGE_VAL, &part);
        if (got + part >= target)
            high = end;
        else
            got += part, low = end + 1;
    }
    if (last) return *last;
    if (low > high) return s->item[s->n - 1];
    sort_items(s->item + low, high - low + 1);
    last = walk(s, s->item + low, high - low + 1, target, &got);
    return last ? *last : s->item[high];
}

// ---- The links ----

void sample_top_n_sigma(mx_sampler *s, double n) {
    double sum = 0, squares = 0, max = (double)greatest(s);
    for (int32_t i = 0; i < s->n; i++) sum += (double)s->cand[i].logit;
    double mean = sum / s->n;
    for (int32_t i = 0; i < s->n; i++) {
        double d = (double)s->cand[i].logit - mean;
        squares += d * d;
    }
    double low = max - n * sqrt(squares / s->n);
    int32_t kept = 0;
    for (int32_t i = 0; i < s->n; i++) {
        if ((double)s->cand[i].logit >= low) s->cand[kept++] = s->cand[i];
    }
    s->n = kept;
}

// Keys: how far the surprise of a token is from the mean surprise (the entropy).
void sample_typical(mx_sampler *s, double p) {
    double sum = sample_weights(s, 1), max = (double)greatest(s), zero = log(sum) + max;
    double entropy = 0;
    for (int32_t i = 0; i < s->n; i++) {
        double surprise = zero - (double)s->cand[i].logit;
        if (s->weight[i] > 0) entropy += s->weight[i] / sum * surprise;
    }
    for (int32_t i = 0; i < s->n; i++) {
        double far = fabs(zero - (double)s->cand[i].logit - entropy);
        s->item[i] = (sample_item){far, s->cand[i].id, i};
    }
    sample_item last = last_of_share(s, p, sum);
    for (int32_t i = 0; i < s->n; i++) { // the weights are not needed any more
        s->weight[i] = fabs(zero - (double)s->cand[i].logit - entropy);
    }
    keep_up_to(s, s->weight, &last);
}

static void rank_by_logit(mx_sampler *s) {
    for (int32_t i = 0; i < s->n; i++) {
        s->item[i] = (sample_item){-(double)s->cand[i].logit, s->cand[i].id, i};
    }
}

void sample_top_k(mx_sampler *s, int32_t k) {
    if (k >= s->n) return;
    rank_by_logit(s);
    sample_order(s->item, s->n, k);
    keep_up_to(s, NULL, &s->item[k - 1]);
}

void sample_top_p(mx_sampler *s, double p) {
    double sum = sample_weights(s, 1);
    rank_by_logit(s);
    sample_item last = last_of_share(s, p, sum);
    keep_up_to(s, NULL, &last);
}

void sample_min_p(mx_sampler *s, double p) {
    sample_weights(s, 1);
    int32_t n = 0;
    for (int32_t i = 0; i < s->n; i++) {
        if (s->weight[i] >= p) s->cand[n++] = s->cand[i];
    }
    s->n = n;
}

// Of the candidates with at least `threshold` of the probability only the least likely one stays
// (of equal ones the last by id), when there are two or more.
void sample_xtc(mx_sampler *s, double threshold) {
    double sum = sample_weights(s, 1);
    int32_t least = -1, n_top = 0, n = 0;
    for (int32_t i = 0; i < s->n; i++) {
        if (s->weight[i] < threshold * sum) continue;
        n_top++;
        if (least < 0 || s->cand[i].logit <= s->cand[least].logit) least = i;
    }
    if (n_top < 2) return;
    for (int32_t i = 0; i < s->n; i++) {
        if (s->weight[i] < threshold * sum || i == least) s->cand[n++] = s->cand[i];
    }
    s->n = n;
}
