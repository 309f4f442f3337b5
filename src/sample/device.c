// A request's sampling as a device can do it: a row of settings, and the list of logits that bias,
// bans and penalties change. State: the sampler's counters, which find an id's place in the list.
#include "sample/sample_int.h"

#include "base/mem.h"

#include <math.h>

typedef struct edit_list {
    mx_sampler *s;
    mx_sample_edit *edits;
    int32_t n, cap;
    bool failed; // full, or not to be said in one edit
} edit_list;

// The edit of an id, made when there is none. NULL: not of the vocabulary, or the list is full.
static mx_sample_edit *edit_of(edit_list *l, int32_t id) {
    int32_t *at = sample_count_of(l->s, id); // 0: none; else its place + 1
    if (!at) return NULL;
    if (*at == 0) {
        if (l->n == l->cap) {
            l->failed = true;
            return NULL;
        }
        l->edits[l->n++] = (mx_sample_edit){.id = id};
        *at = l->n;
    }
    return &l->edits[*at - 1];
}

static void add_bias(edit_list *l, const mx_sampling *p, const mx_sample_history *h) {
    for (size_t i = 0; i < p->n_bias && !l->failed; i++) {
        const mx_logit_bias *b = &p->bias[i];
        mx_sample_edit *e = edit_of(l, b->id);
        if (b->bias >= 100 || (e && e->bias != 0)) l->failed = true; // forces; a second bias
        if (e) e->bias = b->bias <= -100 ? -INFINITY : b->bias;
    }
    for (size_t i = 0; i < h->n_banned && !l->failed; i++) {
        mx_sample_edit *e = edit_of(l, h->banned[i]);
        if (e) e->bias = -INFINITY;
    }
}

static void add_penalties(edit_list *l, const mx_sampling *p, const mx_sample_history *h,
                          bool *steps_on) {
    if (p->repeat_penalty != 1 && p->repeat_last_n != 0) {
        *steps_on = true;
        sample_window w = sample_window_of(h, p->repeat_last_n, SIZE_MAX);
        for (size_t i = 0; i < w.n && !l->failed; i++) {
            mx_sample_edit *e = edit_of(l, sample_window_at(&w, i));
            if (e) e->repeated = 1;
        }
    }
    if (p->presence_penalty != 0 || p->frequency_penalty != 0) {
        *steps_on = true;
        for (size_t i = 0; i < h->n_generated && !l->failed; i++) {
            mx_sample_edit *e = edit_of(l, h->generated[i]);
            if (e) e->count++;
        }
    }
}

bool mx_sample_on_device(mx_sampler *s, const mx_sampling *p, const mx_sample_history *h,
                         mx_sample_edit *edits, int32_t cap, mx_sample_plan *out) {
    bool greedy = p->temperature == 0 || p->top_k == 1;
    bool filters = p->typical_p < 1 || p->top_n_sigma >= 0 || p->xtc_probability > 0;
    *out = (mx_sample_plan){.n_edits = 0};
    if (p->dry_multiplier != 0 && p->dry_last_n != 0) return false;
    if (!greedy && filters) return false;
    edit_list l = {.s = s, .edits = edits, .cap = cap};
    sample_count_begin(s);
    add_bias(&l, p, h);
    add_penalties(&l, p, h, &out->steps_on);
    if (l.failed) return false;
    out->n_edits = l.n;
    out->row = (mx_sample_row){.temperature = greedy ? 0 : p->temperature,
                               .top_p = p->top_p,
                               .min_p = p->min_p,
                               .top_k = greedy ? 0 : p->top_k,
                               .seed = p->seed,
                               .choice = p->choice,
                               .pos = (uint32_t)h->n_generated,
                               .n_edits = l.n,
                               .repeat_penalty = p->repeat_penalty,
                               .presence_penalty = p->presence_penalty,
                               .frequency_penalty = p->frequency_penalty};
    return true;
}
