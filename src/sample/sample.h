// Choosing a token from a row of logits, on the host: the chain of behaviour, penalties,
// counter-based random numbers. The reference for the SAMPLE op.
#ifndef MX_SAMPLE_SAMPLE_H
#define MX_SAMPLE_SAMPLE_H

#include "backend/step.h"
#include "base/err.h"

#include <stddef.h>
#include <stdint.h>

// Added to the logit. -100 or less bans the token; +100 or more forces: only forced tokens may be
// chosen, as long as one of them is not banned.
typedef struct mx_logit_bias {
    int32_t id;
    float bias;
} mx_logit_bias;

// Order: bias, repetition, DRY, frequency and presence, top_n_sigma, typical_p, top_k, top_p, min_p
// (on the untempered distribution), XTC, temperature, draw. Values that switch a link off:
// temperature 0 (greedy), top_k 0, top_p 1, min_p 0, typical_p 1, top_n_sigma < 0, repeat_penalty
// 1, presence 0, frequency 0, dry_multiplier 0, xtc_probability 0. A dry_base below 1 means 1.75.
// Greedy (the greatest after penalties, of equal ones the smallest id; filters play no part) when
// temperature is 0 or top_k is 1. Equal logits rank by id, smaller first.
typedef struct mx_sampling {
    float temperature, top_p, min_p, typical_p, top_n_sigma;
    int32_t top_k;
    float repeat_penalty, presence_penalty, frequency_penalty;
    int32_t repeat_last_n; // -1: the whole history
    float dry_multiplier, dry_base;
    int32_t dry_allowed_length, dry_last_n; // -1: the whole history (at most 131,072 tokens)
    const int32_t *dry_breakers; // not owned: a repetition does not reach across these tokens
    size_t n_dry_breakers;
    float xtc_probability, xtc_threshold;
    uint64_t seed;
    uint32_t choice;
    const mx_logit_bias *bias; // not owned
    size_t n_bias;
} mx_sampling;

void mx_sampling_init(mx_sampling *s); // everything off: greedy
// Checks ranges and that bias ids are below n_vocab. INVALID names the field.
mx_status mx_sampling_check(const mx_sampling *s, int32_t n_vocab, mx_err *err);

typedef struct mx_sampler mx_sampler;
// Scratch for rows of n_vocab; one per thread that samples. Allocates nothing later.
mx_sampler *mx_sampler_open(int32_t n_vocab);
void mx_sampler_close(mx_sampler *s);

typedef struct mx_sample_history {
    const int32_t *prompt; // repetition penalty and DRY see prompt and generated
    size_t n_prompt;
    const int32_t *generated; // presence and frequency see these only
    size_t n_generated;
    const int32_t *banned; // masked now (end tokens before min_tokens, ignore_eos)
    size_t n_banned;
} mx_sample_history;

// The token for position n_generated of a choice. logits (n_vocab) are not changed. The random
// number depends on (seed, choice, n_generated) only. NaN logits count as -inf, +inf as the
// greatest float. INTERNAL: a row without a finite logit; INVALID: every token of it is banned. Ids
// of the history that the vocabulary has not are passed over.
mx_status mx_sample(mx_sampler *s, const mx_sampling *p, const mx_sample_history *h,
                    const float *logits, int32_t *id, mx_err *err);

// What a device needs to choose the same token: the row without its place in the step, and the
// edits of its logits. False when that cannot be said (a filter or a forced token that devices do
// not know, a history of more than cap edits): the host must choose. steps_on: the token depends on
// the generated ones, so that the next step cannot be submitted before they are known.
typedef struct mx_sample_plan {
    mx_sample_row row;
    int32_t n_edits;
    bool steps_on;
} mx_sample_plan;
bool mx_sample_on_device(mx_sampler *s, const mx_sampling *p, const mx_sample_history *h,
                         mx_sample_edit *edits, int32_t cap, mx_sample_plan *out);

// log softmax of the unmodified row: logprob of id, and the k most likely in falling order (ties by
// id). top_ids, top_lp: (k); places beyond the row's finite logits are filled with -1 and -inf.
// False when no logit of the row is finite.
bool mx_logprobs(mx_sampler *s, const float *logits, int32_t id, float *lp, int32_t k,
                 int32_t *top_ids, float *top_lp);

// Counter-based uniform numbers in [0, 1), Philox-4x32-10 (Salmon et al., SC'11) keyed by seed.
double mx_random_uniform(uint64_t seed, uint32_t choice, uint32_t position, uint32_t index);

#endif
