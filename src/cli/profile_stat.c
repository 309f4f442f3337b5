// Statistics of measured times. Stateless.
#include "cli/profile.h"

#include "base/mem.h"
#include "base/str.h"

#include <math.h>
#include <stdlib.h>

void prof_push(prof_series *s, double v) {
    s->v = mx_realloc(s->v, (s->n + 1) * sizeof *s->v);
    s->v[s->n++] = v;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double prof_quantile(const prof_series *s, double q) {
    if (s->n == 0) return 0;
    double *v = mx_alloc(s->n * sizeof *v);
    memcpy(v, s->v, s->n * sizeof *v);
    qsort(v, s->n, sizeof *v, by_value);
    double x = v[(size_t)(q * (double)(s->n - 1) + 0.5)];
    mx_free(v);
    return x;
}

double prof_slope(const double *x, const double *y, size_t n) {
    double mx = 0, my = 0, xx = 0, xy = 0;
    for (size_t i = 0; i < n; i++) mx += x[i] / (double)n, my += y[i] / (double)n;
    for (size_t i = 0; i < n; i++) {
        xx += (x[i] - mx) * (x[i] - mx);
        xy += (x[i] - mx) * (y[i] - my);
    }
    return xx > 0 ? xy / xx : 0;
}

prof_diff prof_paired(const prof_series *a, const prof_series *b) {
    prof_series d = {0};
    for (size_t i = 0; i < MX_MIN(a->n, b->n); i++) prof_push(&d, a->v[i] - b->v[i]);
    prof_diff out = {.median = prof_quantile(&d, 0.5)};
    out.spread = fmax(prof_quantile(&d, 0.75) - out.median, out.median - prof_quantile(&d, 0.25));
    mx_free(d.v);
    return out;
}

prof_diff prof_null(const double *medians, size_t n) {
    prof_series s = {0};
    for (size_t i = 0; i < n; i++) prof_push(&s, medians[i]);
    prof_diff out = {.median = prof_quantile(&s, 0.5)};
    out.spread = prof_quantile(&s, 1) - prof_quantile(&s, 0);
    mx_free(s.v);
    return out;
}

void prof_order(size_t *order, size_t n, uint32_t round) {
    for (size_t i = 0; i < n; i++) {
        uint32_t key[2] = {round, (uint32_t)i};
        size_t k = (size_t)(mx_hash64(key, sizeof key, 1) % (i + 1));
        order[i] = order[k];
        order[k] = i;
    }
}
