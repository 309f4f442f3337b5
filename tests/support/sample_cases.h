// Test support: random sampling settings, histories and rows that a device can take.
#ifndef TESTS_SUPPORT_SAMPLE_CASES_H
#define TESTS_SUPPORT_SAMPLE_CASES_H

#include "base/mem.h"
#include "sample/sample.h"

#include <math.h>

enum { SC_BIAS = 4, SC_HISTORY = 100, SC_BANNED = 2 };

typedef struct sample_case {
    mx_sampling p;
    mx_sample_history h;
    mx_logit_bias bias[SC_BIAS];
    int32_t tokens[SC_HISTORY], banned[SC_BANNED];
    int32_t n_vocab;
    uint32_t salt, used;
} sample_case;

static inline double sc_random(sample_case *c) { // [0, 1)
    return mx_random_uniform(c->salt, 99, c->used++, 5);
}

static inline int32_t sc_below(sample_case *c, int32_t n) {
    return (int32_t)(sc_random(c) * n);
}

static inline void sc_history(sample_case *c) {
    int32_t n = c->n_vocab, few = n < 12 ? n : 12;
    for (int i = 0; i < SC_HISTORY; i++) c->tokens[i] = sc_below(c, i % 2 ? few : n);
    c->tokens[3] = n + 5; // not of the vocabulary: passed over
    c->h.prompt = c->tokens;
    c->h.n_prompt = (size_t)sc_below(c, 50);
    c->h.generated = c->tokens + c->h.n_prompt;
    c->h.n_generated = (size_t)sc_below(c, 50);
}

// Bias of distinct ids, bans; never all of a vocabulary of 8 or more.
static inline void sc_edits(sample_case *c) {
    int32_t first = sc_below(c, c->n_vocab);
    for (int i = 0; i < SC_BIAS; i++) {
        c->bias[i] = (mx_logit_bias){(first + i) % c->n_vocab, (float)(sc_random(c) * 12 - 6)};
        if (i == 3) c->bias[i].bias = -100;
    }
    c->p.bias = c->bias;
    c->p.n_bias = c->n_vocab >= 8 ? (size_t)sc_below(c, SC_BIAS + 1) : 0;
    for (int i = 0; i < SC_BANNED; i++) c->banned[i] = sc_below(c, c->n_vocab);
    c->h.banned = c->banned;
    c->h.n_banned = c->n_vocab >= 8 ? (size_t)sc_below(c, SC_BANNED + 1) : 0;
}

// c must stay where it is: it points into itself.
static inline void sample_case_make(sample_case *c, uint32_t salt, int32_t n_vocab) {
    *c = (sample_case){.salt = salt, .n_vocab = n_vocab};
    mx_sampling_init(&c->p);
    c->p.temperature = sc_below(c, 4) ? (float)(0.3 + 1.5 * sc_random(c)) : 0;
    if (sc_below(c, 2)) c->p.top_k = 1 + sc_below(c, sc_below(c, 2) ? 8 : n_vocab + 3);
    if (sc_below(c, 2)) c->p.top_p = (float)sc_random(c);
    if (sc_below(c, 3) == 0) c->p.min_p = (float)(0.5 * sc_random(c));
    c->p.seed = (uint64_t)salt * 0x9e3779b97f4a7c15u;
    c->p.choice = salt % 3;
    sc_history(c);
    if (sc_below(c, 2)) sc_edits(c);
    if (sc_below(c, 2)) c->p.repeat_penalty = (float)(0.8 + sc_random(c));
    c->p.repeat_last_n = sc_below(c, 3) ? sc_below(c, 80) : -1;
    if (sc_below(c, 2)) c->p.presence_penalty = (float)(2 * sc_random(c) - 0.5);
    if (sc_below(c, 2)) c->p.frequency_penalty = (float)(sc_random(c) - 0.2);
}

// Logits, every other time with many equal ones; now and then a NaN or an infinity.
static inline void sample_case_row(sample_case *c, float *row) {
    bool ties = c->salt % 2;
    double scale = 1 + 8 * sc_random(c);
    for (int32_t i = 0; i < c->n_vocab; i++) {
        double u = sc_random(c) + sc_random(c) + sc_random(c) - 1.5;
        row[i] = (float)(ties ? floor(u * 16) / 16 * scale : u * scale);
    }
    if (c->n_vocab < 8) return;
    row[sc_below(c, c->n_vocab)] = NAN;
    row[sc_below(c, c->n_vocab)] = -INFINITY;
    if (sc_below(c, 8) == 0) row[sc_below(c, c->n_vocab)] = INFINITY;
}

#endif
