// Inside the sampler: its scratch, and the links of the chain.
#ifndef MX_SAMPLE_SAMPLE_INT_H
#define MX_SAMPLE_SAMPLE_INT_H

#include "sample/sample.h"

enum {
    SAMPLE_DRY_WINDOW = 1 << 17, // DRY looks at this many tokens at most
    SAMPLE_INDEX_DRAW = 0,       // random numbers of one position
    SAMPLE_INDEX_XTC = 1
};

// A token that may still be chosen. The list is always in ascending order of id.
typedef struct sample_cand {
    float logit; // finite
    int32_t id;
} sample_cand;

// A candidate to be ranked: small keys first, equal keys by id.
typedef struct sample_item {
    double key;
    int32_t id;
    int32_t at; // index of the candidate
} sample_item;

struct mx_sampler {
    int32_t n_vocab, n; // n: candidates left
    float *row;         // (n_vocab) logits under change; -inf: may not be chosen
    sample_cand *cand;  // (n_vocab)
    double *weight;     // (n_vocab) of each candidate
    sample_item *item;  // (n_vocab)
    uint32_t *seen;     // (n_vocab) == stamp: `count` of this id is valid
    uint32_t stamp;
    int32_t *count; // (n_vocab)
    int32_t *ids;   // (n_vocab) distinct ids, n_ids of them
    int32_t n_ids;
    int32_t *match; // (SAMPLE_DRY_WINDOW)
};

// ---- penalty.c: changes of s->row ----

// Copies the row: NaN becomes -inf, +inf the greatest float. False when no logit is finite.
bool sample_load(mx_sampler *s, const float *logits);
void sample_bias(mx_sampler *s, const mx_sampling *p, const mx_sample_history *h);
void sample_repetition(mx_sampler *s, const mx_sampling *p, const mx_sample_history *h);
void sample_dry(mx_sampler *s, const mx_sampling *p, const mx_sample_history *h);
void sample_frequency(mx_sampler *s, const mx_sampling *p, const mx_sample_history *h);

typedef struct sample_window { // the last tokens of prompt and generated together
    const mx_sample_history *h;
    size_t first, n;
} sample_window;
// The last `last_n` tokens (-1: all), at most cap.
sample_window sample_window_of(const mx_sample_history *h, int32_t last_n, size_t cap);
int32_t sample_window_at(const sample_window *w, size_t i);
// Counters of ids: all are zero after count_begin; ids counted are s->ids. NULL: not of the
// vocabulary.
void sample_count_begin(mx_sampler *s);
int32_t *sample_count_of(mx_sampler *s, int32_t id);

// ---- filter.c: candidates; each call leaves at least one of them ----

void sample_collect(mx_sampler *s); // from the row: all that may be chosen
void sample_top_n_sigma(mx_sampler *s, double n);
void sample_typical(mx_sampler *s, double p);
void sample_top_k(mx_sampler *s, int32_t k);
void sample_top_p(mx_sampler *s, double p);
void sample_min_p(mx_sampler *s, double p);
void sample_xtc(mx_sampler *s, double threshold);
// Weights exp((logit - greatest) / temperature) into s->weight; returns their sum, added up in
// order of id.
double sample_weights(mx_sampler *s, double temperature);
// Moves the m first of items (0 < m <= n) to the front, in order.
void sample_order(sample_item *items, int32_t n, int32_t m);

// ---- random.c ----

void sample_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

#endif
