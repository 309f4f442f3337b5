// Attention over one chunk of cached positions, built once for every instruction set; no state.
//
// Positions are cut into chunks of 256 counted from position 0. Within a chunk, for one query:
//   score[t] = (sum over d ascending of fma(q[d], k[t][d], .)) * scale, then the softcap;
//   m        = the greatest visible score;
//   p[t]     = exp(score[t] - m), 0 where not visible;
//   s        = sum of p in sixteen interleaved partial sums (lane t % 16), then a fixed tree;
//   o[d]     = sum over t ascending of fma(p[t], v[t][d], .).
// Chunks are merged in ascending order. Nothing here depends on which other queries, rows or heads
// are computed in the same call, so decode and prefill, alone or in a batch, give the same bits.
//
// So that lanes can be positions and no vector is ever summed across for a score, keys lie
// transposed in blocks of 16 tokens. In a page of one kv head:
//   keys    element d of token t at ((t / 16) * head_dim + d) * 16 + t % 16
//   values  element d of token t at t * head_dim + d
// float16 state saturates at +-65504, so that a masked position never makes 0 * inf.
#include "backend/cpu/cpu_int.h"
#include "backend/cpu/vec.h"

#include <math.h>

enum { TILE_Q = VEC_TILES ? 6 : 1 };      // queries of one register tile
enum { TILE_V = VEC_REGS == 32 ? 4 : 1 }; // vectors of one register tile, beside TILE_V = 1

VEC_FN vf load_kv(const void *p, int64_t i, bool half) {
    return half ? vldh((const uint16_t *)p + i) : vld((const float *)p + i);
}

VEC_FN void fetch_kv(const void *p, int64_t i, bool half) {
    __builtin_prefetch(half ? (const char *)p + 2 * i : (const char *)p + 4 * i);
}

// Scores of nq queries with nb blocks of 16 positions. Fetches the same bytes of blocks `ahead`.
VEC_FN void score_tile(int nq, int nb, bool half, const float *const *q, const void *const *k,
                       const void *const *ahead, int64_t head_dim, float scale, float *p) {
    vf acc[TILE_Q][TILE_V], kd[TILE_V];
#pragma GCC unroll 6
    for (int i = 0; i < nq; i++) {
#pragma GCC unroll 4
        for (int b = 0; b < nb; b++) acc[i][b] = vset1(0.0f);
    }
    for (int64_t d = 0; d < head_dim; d++) {
#pragma GCC unroll 4
        for (int b = 0; b < nb; b++) {
            kd[b] = load_kv(k[b], d * 16, half);
            fetch_kv(ahead[b], d * 16, half);
        }
#pragma GCC unroll 6
        for (int i = 0; i < nq; i++) {
            vf x = vset1(q[i][d]);
#pragma GCC unroll 4
            for (int b = 0; b < nb; b++) acc[i][b] = vfma(x, kd[b], acc[i][b]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < nq; i++) {
#pragma GCC unroll 4
        for (int b = 0; b < nb; b++) {
            vst(p + i * CPU_CHUNK + b * 16, vmul(acc[i][b], vset1(scale)));
        }
    }
}

// Adds p * v for positions [t0, t1) of nq queries into nv vectors of o, from zero. Fetches as
// score_tile does.
VEC_FN void value_tile(int nq, int nv, bool half, const cpu_attn_chunk *c, const void *const *ahead,
                       const float *p, int t0, int t1, int64_t d0, float *o, int64_t ldo) {
    vf acc[TILE_Q][TILE_V], vd[TILE_V];
    int64_t hd = c->head_dim;
#pragma GCC unroll 6
    for (int i = 0; i < nq; i++) {
#pragma GCC unroll 4
        for (int b = 0; b < nv; b++) acc[i][b] = vset1(0.0f);
    }
    for (int t = t0; t < t1;) {
        const void *v = c->v[t / 16], *next = ahead[t / 16];
        int end = (t / 16 + 1) * 16 < t1 ? (t / 16 + 1) * 16 : t1;
        for (; t < end; t++) {
#pragma GCC unroll 4
            for (int b = 0; b < nv; b++) {
                vd[b] = load_kv(v, t % 16 * hd + d0 + b * 16, half);
                if (b % 2 == 0 || !half) fetch_kv(next, t % 16 * hd + d0 + b * 16, half);
            }
#pragma GCC unroll 6
            for (int i = 0; i < nq; i++) {
                vf x = vset1(p[i * CPU_CHUNK + t]);
#pragma GCC unroll 4
                for (int b = 0; b < nv; b++) acc[i][b] = vfma(x, vd[b], acc[i][b]);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < nq; i++) {
#pragma GCC unroll 4
        for (int b = 0; b < nv; b++) vst(o + i * ldo + d0 + b * 16, acc[i][b]);
    }
}

// One function for each size of tile; the scalar table has tiles of one query only.
#if VEC_TILES
#define TILE_SWITCH(call)                                                                          \
    switch (nq) {                                                                                  \
    case 1: call(1); break;                                                                        \
    case 2: call(2); break;                                                                        \
    case 3: call(3); break;                                                                        \
    case 4: call(4); break;                                                                        \
    case 5: call(5); break;                                                                        \
    default: call(6); break;                                                                       \
    }
#else
#define TILE_SWITCH(call)                                                                          \
    (void)nq;                                                                                      \
    call(1);
#endif

#define SCORE_FN(name)                                                                             \
    static __attribute__((noinline)) void name(int nq, const float *const *q,                      \
                                               const void *const *k, const void *const *ahead,     \
                                               int64_t head_dim, float scale, float *p) {          \
        TILE_SWITCH(CALL_##name)                                                                   \
    }
#define CALL_score_half_1(n) score_tile(n, 1, true, q, k, ahead, head_dim, scale, p)
#define CALL_score_half_n(n) score_tile(n, TILE_V, true, q, k, ahead, head_dim, scale, p)
#define CALL_score_full_1(n) score_tile(n, 1, false, q, k, ahead, head_dim, scale, p)
#define CALL_score_full_n(n) score_tile(n, TILE_V, false, q, k, ahead, head_dim, scale, p)
SCORE_FN(score_half_1)
SCORE_FN(score_half_n)
SCORE_FN(score_full_1)
SCORE_FN(score_full_n)

#define VALUE_FN(name)                                                                             \
    static __attribute__((noinline)) void name(int nq, const cpu_attn_chunk *c,                    \
                                               const void *const *ahead, const float *p, int t0,   \
                                               int t1, int64_t d0, float *o, int64_t ldo) {        \
        TILE_SWITCH(CALL_##name)                                                                   \
    }
#define CALL_value_half_1(n) value_tile(n, 1, true, c, ahead, p, t0, t1, d0, o, ldo)
#define CALL_value_half_n(n) value_tile(n, TILE_V, true, c, ahead, p, t0, t1, d0, o, ldo)
#define CALL_value_full_1(n) value_tile(n, 1, false, c, ahead, p, t0, t1, d0, o, ldo)
#define CALL_value_full_n(n) value_tile(n, TILE_V, false, c, ahead, p, t0, t1, d0, o, ldo)
VALUE_FN(value_half_1)
VALUE_FN(value_half_n)
VALUE_FN(value_full_1)
VALUE_FN(value_full_n)

// Scores -> probabilities of one query, in place, over blocks [b0, b1); visible are [lo, hi).
static void soften(float *p, int b0, int b1, int lo, int hi, float softcap, float *m, float *s) {
    vf zero = vset1(0.0f), none = vset1(-INFINITY), best = none, sum = zero, lanes = viota();
    for (int b = b0; b < b1; b++) {
        vf x = vld(p + b * 16);
        if (softcap > 0) {
            vf cap = vset1(softcap);
            x = vmul(vtanh(vdiv(x, cap)), cap);
        }
        if (lo > b * 16) x = vsel_lt(lanes, vset1((float)(lo - b * 16)), none, x);
        if (hi < b * 16 + 16) x = vsel_lt(lanes, vset1((float)(hi - b * 16)), x, none);
        best = vmax(x, best);
        vst(p + b * 16, x);
    }
    *m = vmaxall(best);
    if (lo >= hi || *m == -INFINITY) {
        *m = -INFINITY;
        *s = 0;
        for (int b = b0; b < b1; b++) vst(p + b * 16, zero);
        return;
    }
    vf top = vset1(*m);
    for (int b = b0; b < b1; b++) {
        vf e = vexp(vsub(vld(p + b * 16), top));
        sum = vadd(sum, e);
        vst(p + b * 16, e);
    }
    *s = vsum(sum);
}

typedef void score_fn(int nq, const float *const *q, const void *const *k, const void *const *ahead,
                      int64_t head_dim, float scale, float *p);
typedef void value_fn(int nq, const cpu_attn_chunk *c, const void *const *ahead, const float *p,
                      int t0, int t1, int64_t d0, float *o, int64_t ldo);

static void score_all(const cpu_attn_chunk *c, const float *const *q, int n, int b0, int b1) {
    for (int b = b0; b < b1;) {
        int nb = b + TILE_V <= b1 ? TILE_V : 1;
        for (int i = 0; i < n; i += TILE_Q) {
            int nq = n - i < TILE_Q ? n - i : TILE_Q;
            float *p = c->p + i * CPU_CHUNK + b * 16;
            score_fn *f = nb == 1 ? (c->half ? score_half_1 : score_full_1)
                                  : (c->half ? score_half_n : score_full_n);
            f(nq, q + i, c->k + b, (i == 0 ? c->v : c->k) + b, c->head_dim, c->scale, p);
        }
        b += nb;
    }
}

static void value_all(const cpu_attn_chunk *c, int n, int lo, int hi) {
    int64_t ldo = cpu_pad16(c->head_dim);
    for (int64_t d = 0; d < ldo;) {
        int nv = d + 16 * TILE_V <= ldo ? TILE_V : 1;
        for (int i = 0; i < n; i += TILE_Q) {
            int nq = n - i < TILE_Q ? n - i : TILE_Q;
            const float *p = c->p + i * CPU_CHUNK;
            float *o = c->o + i * ldo;
            value_fn *f = nv == 1 ? (c->half ? value_half_1 : value_full_1)
                                  : (c->half ? value_half_n : value_full_n);
            f(nq, c, i == 0 ? c->ahead : c->v, p, lo, hi, d, o, ldo);
        }
        d += nv * 16;
    }
}

void CPU_FN(attn_chunk)(const cpu_attn_chunk *c) {
    const float *q[CPU_ATTN_ROWS];
    int n = c->n_row * c->n_group, lo = CPU_CHUNK, hi = 0;
    for (int r = 0; r < c->n_row; r++) {
        if (c->lo[r] < c->hi[r]) {
            lo = c->lo[r] < lo ? c->lo[r] : lo;
            hi = c->hi[r] > hi ? c->hi[r] : hi;
        }
        for (int g = 0; g < c->n_group; g++) {
            q[r * c->n_group + g] = c->q + r * c->ldq + (int64_t)g * c->head_dim;
        }
    }
    int b0 = lo / 16, b1 = (hi + 15) / 16;
    if (lo < hi) score_all(c, q, n, b0, b1);
    for (int i = 0; i < n; i++) {
        int r = i / c->n_group;
        soften(c->p + i * CPU_CHUNK, b0, lo < hi ? b1 : b0, c->lo[r], c->hi[r], c->softcap,
               &c->m[i], &c->s[i]);
    }
    value_all(c, n, lo, hi);
}

void CPU_FN(attn_merge)(float *m, float *s, float *o, const float *pm, const float *ps,
                        const float *po, int64_t n, int64_t ld) {
    for (int64_t i = 0; i < n; i++, o += ld, po += ld) {
        if (pm[i] == -INFINITY) continue;
        if (m[i] == -INFINITY) {
            m[i] = pm[i];
            s[i] = ps[i];
            memcpy(o, po, (size_t)ld * sizeof *o);
            continue;
        }
        float top = m[i] > pm[i] ? m[i] : pm[i];
        vf a = vexp(vset1(m[i] - top)), b = vexp(vset1(pm[i] - top));
        for (int64_t d = 0; d < ld; d += 16) {
            vst(o + d, vfma(vld(o + d), a, vmul(vld(po + d), b)));
        }
        float t[16];
        vst(t, vfma(vset1(s[i]), a, vmul(vset1(ps[i]), b)));
        s[i] = t[0];
        m[i] = top;
    }
}

void CPU_FN(attn_finish)(const float *o, float s, int64_t head_dim, float *out) {
    vf r = vset1(1.0f / s);
    int64_t d = 0;
    for (; d + 16 <= head_dim; d += 16) vst(out + d, vmul(vld(o + d), r));
    if (d < head_dim) vst_n(out + d, vmul(vld(o + d), r), head_dim - d);
}

VEC_FN vf saturate(vf x) {
    return vmax(vset1(-65504.0f), vmin(vset1(65504.0f), x));
}

static void store_half(const float *k, const float *v, int64_t hd, uint16_t *kd, uint16_t *vd) {
    uint16_t t[16];
    for (int64_t d = 0; d < hd; d += 16) {
        int64_t n = hd - d < 16 ? hd - d : 16;
        vsth(t, saturate(n == 16 ? vld(k + d) : vld_n(k + d, n)));
        for (int64_t i = 0; i < n; i++) kd[(d + i) * 16] = t[i];
        vsth(t, saturate(n == 16 ? vld(v + d) : vld_n(v + d, n)));
        memcpy(vd + d, t, (size_t)n * sizeof *t);
    }
}

void CPU_FN(kv_store)(const float *k, const float *v, int32_t head_dim, bool half, int64_t slot,
                      void *kpage, void *vpage) {
    int64_t hd = head_dim, at = slot / 16 * 16 * hd + slot % 16;
    if (half) {
        store_half(k, v, hd, (uint16_t *)kpage + at, (uint16_t *)vpage + slot * hd);
        return;
    }
    float *kd = (float *)kpage + at;
    for (int64_t d = 0; d < hd; d++) kd[d * 16] = k[d];
    memcpy((float *)vpage + slot * hd, v, (size_t)hd * sizeof *v);
}
