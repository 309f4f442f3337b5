// The sampler: one token from a row of logits, on the host. State: the scratch of mx_sampler,
// allocated once. It knows nothing of text, requests or devices.
//
// The chain is bias, repetition, DRY, frequency and presence on the row; top_n_sigma, typical_p,
// top_k, top_p, min_p and XTC on the list of candidates; temperature last; then a draw by the
// inverse of the cumulative weights, added up in double in order of id. The same row and settings
// give the same token on every machine whose exp() rounds alike.
#include "sample/sample_int.h"

#include "base/mem.h"

#include <float.h>
#include <math.h>
#include <string.h>

void mx_sampling_init(mx_sampling *s) {
    *s = (mx_sampling){.top_p = 1,
                       .typical_p = 1,
                       .top_n_sigma = -1,
                       .repeat_penalty = 1,
                       .repeat_last_n = 64,
                       .dry_base = 1.75f,
                       .dry_allowed_length = 2,
                       .dry_last_n = 64,
                       .xtc_threshold = 0.1f};
}

typedef struct range {
    const char *name;
    size_t offset;
    double min, max;
} range;

static const range float_ranges[] = {
    {"temperature", offsetof(mx_sampling, temperature), 0, FLT_MAX},
    {"top_p", offsetof(mx_sampling, top_p), 0, 1},
    {"min_p", offsetof(mx_sampling, min_p), 0, 1},
    {"typical_p", offsetof(mx_sampling, typical_p), 0, 1},
    {"top_n_sigma", offsetof(mx_sampling, top_n_sigma), -FLT_MAX, FLT_MAX},
    {"repeat_penalty", offsetof(mx_sampling, repeat_penalty), FLT_MIN, FLT_MAX},
    {"presence_penalty", offsetof(mx_sampling, presence_penalty), -FLT_MAX, FLT_MAX},
    {"frequency_penalty", offsetof(mx_sampling, frequency_penalty), -FLT_MAX, FLT_MAX},
    {"dry_multiplier", offsetof(mx_sampling, dry_multiplier), 0, FLT_MAX},
    {"dry_base", offsetof(mx_sampling, dry_base), 0, FLT_MAX},
    {"xtc_probability", offsetof(mx_sampling, xtc_probability), 0, 1},
    {"xtc_threshold", offsetof(mx_sampling, xtc_threshold), 0, 1},
};

static const range int_ranges[] = {
    {"top_k", offsetof(mx_sampling, top_k), 0, INT32_MAX},
    {"repeat_last_n", offsetof(mx_sampling, repeat_last_n), -1, INT32_MAX},
    {"dry_allowed_length", offsetof(mx_sampling, dry_allowed_length), 0, INT32_MAX},
    {"dry_last_n", offsetof(mx_sampling, dry_last_n), -1, INT32_MAX},
};

mx_status mx_sampling_check(const mx_sampling *s, int32_t n_vocab, mx_err *err) {
    for (size_t i = 0; i < MX_COUNT(float_ranges); i++) {
        const range *r = &float_ranges[i];
        float v;
        memcpy(&v, (const char *)s + r->offset, sizeof v);
        if ((double)v >= r->min && (double)v <= r->max) continue;
        return mx_err_set(err, MX_INVALID, "%s is %g, expected a number from %g to %g", r->name,
                          (double)v, r->min, r->max);
    }
    for (size_t i = 0; i < MX_COUNT(int_ranges); i++) {
        const range *r = &int_ranges[i];
        int32_t v;
        memcpy(&v, (const char *)s + r->offset, sizeof v);
        if (v >= r->min) continue;
        return mx_err_set(err, MX_INVALID, "%s is %d, expected %g or more", r->name, v, r->min);
    }
    for (size_t i = 0; i < s->n_bias; i++) {
        int32_t id = s->bias[i].id;
        if (id < 0 || id >= n_vocab) {
            return mx_err_set(err, MX_INVALID, "logit_bias: token %d is not below %d", id, n_vocab);
        }
        if (!isfinite(s->bias[i].bias)) {
            return mx_err_set(err, MX_INVALID, "logit_bias of token %d is not a number", id);
        }
    }
    return MX_OK;
}

mx_sampler *mx_sampler_open(int32_t n_vocab) {
    CHECK(n_vocab > 0);
    size_t n = (size_t)n_vocab;
    mx_sampler *s = mx_calloc(1, sizeof *s);
    s->n_vocab = n_vocab;
    s->row = mx_calloc(n, sizeof *s->row);
    s->cand = mx_calloc(n, sizeof *s->cand);
    s->weight = mx_calloc(n, sizeof *s->weight);
    s->item = mx_calloc(n, sizeof *s->item);
    s->seen = mx_calloc(n, sizeof *s->seen);
    s->count = mx_calloc(n, sizeof *s->count);
    s->ids = mx_calloc(n, sizeof *s->ids);
    s->match = mx_calloc(SAMPLE_DRY_WINDOW, sizeof *s->match);
    return s;
}

void mx_sampler_close(mx_sampler *s) {
    if (!s) return;
    mx_free(s->row);
    mx_free(s->cand);
    mx_free(s->weight);
    mx_free(s->item);
    mx_free(s->seen);
    mx_free(s->count);
    mx_free(s->ids);
    mx_free(s->match);
    mx_free(s);
}

// The greatest of the row, of equal ones the first; -1 when none may be chosen.
static int32_t argmax(const mx_sampler *s) {
    int32_t best = -1;
    for (int32_t i = 0; i < s->n_vocab; i++) {
        if (s->row[i] > (best < 0 ? -INFINITY : s->row[best])) best = i;
    }
    return best;
}

static void filter(mx_sampler *s, const mx_sampling *p, uint32_t position) {
    sample_collect(s);
    if (p->top_n_sigma >= 0) sample_top_n_sigma(s, (double)p->top_n_sigma);
    if (p->typical_p < 1) sample_typical(s, (double)p->typical_p);
    if (p->top_k > 0) sample_top_k(s, p->top_k);
    if (p->top_p < 1) sample_top_p(s, (double)p->top_p);
    if (p->min_p > 0) sample_min_p(s, (double)p->min_p);
    if (p->xtc_probability > 0) {
        double u = mx_random_uniform(p->seed, p->choice, position, SAMPLE_INDEX_XTC);
        if (u < (double)p->xtc_probability) sample_xtc(s, (double)p->xtc_threshold);
    }
}

static int32_t draw(mx_sampler *s, const mx_sampling *p, uint32_t position) {
    double u = mx_random_uniform(p->seed, p->choice, position, SAMPLE_INDEX_DRAW);
    double target = u * sample_weights(s, (double)p->temperature), got = 0;
    int32_t last = 0; // rounding may leave the target just above the sum of all
    for (int32_t i = 0; i < s->n; i++) {
        if (s->weight[i] > 0) last = i;
        got += s->weight[i];
        if (got > target) break;
    }
    return s->cand[last].id;
}

mx_status mx_sample(mx_sampler *s, const mx_sampling *p, const mx_sample_history *h,
                    const float *logits, int32_t *id, mx_err *err) {
    if (!sample_load(s, logits)) {
        return mx_err_set(err, MX_INTERNAL, "no finite logit at position %zu", h->n_generated);
    }
    sample_bias(s, p, h);
    sample_repetition(s, p, h);
    sample_dry(s, p, h);
    sample_frequency(s, p, h);
    *id = argmax(s);
    if (*id < 0) {
        return mx_err_set(err, MX_INVALID, "every token is banned at position %zu (logit_bias?)",
                          h->n_generated);
    }
    if (p->temperature == 0 || p->top_k == 1) return MX_OK;
    filter(s, p, (uint32_t)h->n_generated);
    *id = draw(s, p, (uint32_t)h->n_generated);
    return MX_OK;
}

bool mx_logprobs(mx_sampler *s, const float *logits, int32_t id, float *lp, int32_t k,
                 int32_t *top_ids, float *top_lp) {
    CHECK(id >= 0 && id < s->n_vocab && k >= 0);
    bool any = sample_load(s, logits);
    sample_collect(s);
    double max = 0, log_sum = 0;
    if (any) {
        log_sum = log(sample_weights(s, 1));
        max = (double)s->row[argmax(s)];
    }
    *lp = (float)((double)s->row[id] - max - log_sum);
    int32_t m = any ? MX_MIN(k, s->n) : 0;
    for (int32_t i = 0; i < (m ? s->n : 0); i++) {
        s->item[i] = (sample_item){-(double)s->cand[i].logit, s->cand[i].id, i};
    }
    if (m) sample_order(s->item, s->n, m);
    for (int32_t i = 0; i < k; i++) {
        top_ids[i] = i < m ? s->item[i].id : -1;
        top_lp[i] = i < m ? (float)(-s->item[i].key - max - log_sum) : -INFINITY;
    }
    return any;
}
