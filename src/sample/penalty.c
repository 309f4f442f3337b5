// Changes of a row of logits before anything is filtered: bans, bias, repetition, DRY, frequency
// and presence. State: the sampler's scratch. Every sum is made in double and rounded once; a
// finite logit stays finite (it is clamped), so that -inf means "may not be chosen" and nothing
// else.
#include "base/mem.h"
#include "sample/sample_int.h"

#include <float.h>
#include <math.h>
#include <string.h>

static float clamp_logit(double v) {
    return v > FLT_MAX ? FLT_MAX : v < -FLT_MAX ? -FLT_MAX : (float)v;
}

bool sample_load(mx_sampler *s, const float *logits) {
    bool any = false;
    for (int32_t i = 0; i < s->n_vocab; i++) {
        float v = logits[i];
        any |= isfinite(v) != 0;
        s->row[i] = isnan(v) ? -INFINITY : v > FLT_MAX ? FLT_MAX : v;
    }
    return any;
}

static bool valid_id(const mx_sampler *s, int32_t id) {
    return id >= 0 && id < s->n_vocab;
}

void sample_count_begin(mx_sampler *s) {
    s->n_ids = 0;
    if (++s->stamp == 0) { // wrapped: old stamps would look new
        memset(s->seen, 0, (size_t)s->n_vocab * sizeof *s->seen);
        s->stamp = 1;
    }
}

// The counter of an id (0 at first), or NULL when the id is not of this vocabulary.
int32_t *sample_count_of(mx_sampler *s, int32_t id) {
    if (!valid_id(s, id)) return NULL;
    if (s->seen[id] != s->stamp) {
        s->seen[id] = s->stamp;
        s->count[id] = 0;
        s->ids[s->n_ids++] = id;
    }
    return &s->count[id];
}

// Only forced tokens remain, unless all of them are banned. A forced token whose own logit is not
// finite can be chosen all the same.
static void force(mx_sampler *s, const mx_sampling *p) {
    sample_count_begin(s);
    for (size_t i = 0; i < p->n_bias; i++) {
        int32_t *n = p->bias[i].bias >= 100 ? sample_count_of(s, p->bias[i].id) : NULL;
        if (n) *n = 1;
    }
    if (s->n_ids == 0) return;
    for (int32_t i = 0; i < s->n_vocab; i++) {
        if (s->seen[i] != s->stamp)
            s->row[i] = -INFINITY;
        else if (!isfinite(s->row[i]))
            s->row[i] = 0;
    }
}

static bool is_banned(const mx_sampling *p, const mx_sample_history *h, int32_t id) {
    for (size_t i = 0; i < h->n_banned; i++) {
        if (h->banned[i] == id) return true;
    }
    for (size_t i = 0; i < p->n_bias; i++) {
        if (p->bias[i].id == id && p->bias[i].bias <= -100) return true;
    }
    return false;
}

static bool forces_a_free_token(const mx_sampler *s, const mx_sampling *p,
                                const mx_sample_history *h) {
    for (size_t i = 0; i < p->n_bias; i++) {
        const mx_logit_bias *b = &p->bias[i];
        if (b->bias >= 100 && valid_id(s, b->id) && !is_banned(p, h, b->id)) return true;
    }
    return false;
}

void sample_bias(mx_sampler *s, const mx_sampling *p, const mx_sample_history *h) {
    if (forces_a_free_token(s, p, h)) force(s, p);
    for (size_t i = 0; i < p->n_bias; i++) {
        const mx_logit_bias *b = &p->bias[i];
        if (!valid_id(s, b->id)) continue;
        float *l = &s->row[b->id];
        if (b->bias <= -100)
            *l = -INFINITY;
        else if (*l > -INFINITY)
            *l = clamp_logit((double)*l + (double)b->bias);
    }
    for (size_t i = 0; i < h->n_banned; i++) {
        if (valid_id(s, h->banned[i])) s->row[h->banned[i]] = -INFINITY;
    }
}

sample_window sample_window_of(const mx_sample_history *h, int32_t last_n, size_t cap) {
    size_t all = h->n_prompt + h->n_generated, n = all;
    if (last_n >= 0) n = MX_MIN(n, (size_t)last_n);
    n = MX_MIN(n, cap);
    return (sample_window){h, all - n, n};
}

int32_t sample_window_at(const sample_window *w, size_t i) {
    size_t k = w->first + i;
    return k < w->h->n_prompt ? w->h->prompt[k] : w->h->generated[k - w->h->n_prompt];
}

void sample_repetition(mx_sampler *s, const mx_sampling *p, const mx_sample_history *h) {
    if (p->repeat_penalty == 1.0f) return;
    double r = (double)p->repeat_penalty;
    sample_window w = sample_window_of(h, p->repeat_last_n, SIZE_MAX);
    sample_count_begin(s);
    for (size_t i = 0; i < w.n; i++) sample_count_of(s, sample_window_at(&w, i));
    for (int32_t i = 0; i < s->n_ids; i++) {
        float *l = &s->row[s->ids[i]];
        if (*l > -INFINITY) *l = clamp_logit(*l > 0 ? (double)*l / r : (double)*l * r);
    }
}

// Length of the text's end that holds no breaker: no repetition is longer.
static int32_t unbroken(const mx_sampling *p, const sample_window *w) {
    for (size_t k = 0; k < w->n; k++) {
        int32_t id = sample_window_at(w, w->n - 1 - k);
        for (size_t i = 0; i < p->n_dry_breakers; i++) {
            if (p->dry_breakers[i] == id) return (int32_t)k;
        }
    }
    return (int32_t)w->n;
}

// match[k] = how far the end of the window equals the text that ends k tokens earlier: the
// Z function of the window read backwards, in linear time.
static void match_ends(const sample_window *w, int32_t *match) {
    int32_t n = (int32_t)w->n, left = 0, right = 0;
    for (int32_t k = 1; k < n; k++) {
        int32_t z = k < right ? MX_MIN(right - k, match[k - left]) : 0;
        while (k + z < n && sample_window_at(w, (size_t)(n - 1 - z)) ==
                                sample_window_at(w, (size_t)(n - 1 - k - z)))
            z++;
        match[k] = z;
        if (k + z > right) left = k, right = k + z;
    }
}

// A token that would go on with a repetition of L >= allowed_length tokens loses
// multiplier * base^(L - allowed_length).
void sample_dry(mx_sampler *s, const mx_sampling *p, const mx_sample_history *h) {
    if (p->dry_multiplier == 0 || p->dry_last_n == 0) return;
    sample_window w = sample_window_of(h, p->dry_last_n, SAMPLE_DRY_WINDOW);
    int32_t longest = unbroken(p, &w), allowed = MX_MAX(p->dry_allowed_length, 1);
    if (longest < allowed || w.n < 2) return;
    match_ends(&w, s->match);
    sample_count_begin(s);
    for (size_t k = 1; k < w.n; k++) {
        int32_t len = MX_MIN(s->match[k], longest);
        int32_t *best = len >= allowed ? sample_count_of(s, sample_window_at(&w, w.n - k)) : NULL;
        if (best && len > *best) *best = len;
    }
    double base = p->dry_base < 1.0f ? 1.75 : (double)p->dry_base;
    for (int32_t i = 0; i < s->n_ids; i++) {
        float *l = &s->row[s->ids[i]];
        double more = pow(base, s->count[s->ids[i]] - p->dry_allowed_length);
        if (*l > -INFINITY) *l = clamp_logit((double)*l - (double)p->dry_multiplier * more);
    }
}

void sample_frequency(mx_sampler *s, const mx_sampling *p, const mx_sample_history *h) {
    if (p->presence_penalty == 0 && p->frequency_penalty == 0) return;
    sample_count_begin(s);
    for (size_t i = 0; i < h->n_generated; i++) {
        int32_t *n = sample_count_of(s, h->generated[i]);
        if (n) ++*n;
    }
    for (int32_t i = 0; i < s->n_ids; i++) {
        float *l = &s->row[s->ids[i]];
        double less = (double)p->frequency_penalty * s->count[s->ids[i]];
        if (*l > -INFINITY) *l = clamp_logit((double)*l - less - (double)p->presence_penalty);
    }
}
