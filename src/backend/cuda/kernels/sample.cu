// Sampling of the step's output rows, as the host's sampler (src/sample) does it: the same chain,
// the same random number, the same order of ids, so that both choose the same token.
//
// A row's vocabulary is divided among n_part CTAs: each applies the row's edits (bias, penalties,
// bans) that lie in its part, then takes its maximum, its lowest id, and the sums of exponentials
// (of the distribution; tempered, when nothing filters). The CTA that arrives last merges in order.
// Filters (top-k, then top-p, then min-p, on the untempered distribution) keep the keys above a
// threshold and the first ids of those equal to it: found by radix selection over counts, then over
// integer masses. The draw inverts the cumulative weights in order of id.
#include "dev.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };
#define FLOAT_MAX  3.402823466e+38f
#define MASS_SCALE 17592186044416.0 // 2^44

struct Best {
    float v;
    int id;
};
__device__ __forceinline__ Best better(Best a, Best b) { // larger value, then lower id
    return b.v > a.v || (b.v == a.v && b.id < a.id) ? b : a;
}
__device__ __forceinline__ Best warp_best(Best a) {
#pragma unroll
    for (int s = 16; s; s >>= 1) {
        Best b = {__shfl_xor_sync(FULL, a.v, s), __shfl_xor_sync(FULL, a.id, s)};
        a = better(a, b);
    }
    return a;
}
__device__ __forceinline__ Best block_best(Best a, Best *tmp) {
    a = warp_best(a);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) tmp[threadIdx.x >> 5] = a;
    __syncthreads();
    Best b = {-INFINITY, 0x7fffffff};
    if ((threadIdx.x & 31) < WARPS) b = tmp[threadIdx.x & 31];
    return warp_best(b);
}

template <class T> __device__ __forceinline__ T warp_total(T v) {
#pragma unroll
    for (int s = 16; s; s >>= 1) v += __shfl_xor_sync(FULL, v, s);
    return v;
}
// Sums of the warps, every thread gets all of them.
template <class T> __device__ __forceinline__ void warp_totals(T v, T *out) {
    v = warp_total(v);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) out[threadIdx.x >> 5] = v;
    __syncthreads();
}
// Sum of this thread's and all earlier threads' values.
template <class T> __device__ __forceinline__ T block_scan(T v, T *tmp) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int s = 1; s < 32; s <<= 1) {
        T u = __shfl_up_sync(FULL, v, s);
        if (lane >= s) v += u;
    }
    __syncthreads();
    if (lane == 31) tmp[warp] = v;
    __syncthreads();
    T before = 0;
    for (int i = 0; i < warp; i++) before += tmp[i];
    return before + v;
}
__device__ __forceinline__ int block_min(int v, int *tmp) {
    v = __reduce_min_sync(FULL, v);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) tmp[threadIdx.x >> 5] = v;
    __syncthreads();
    int m = tmp[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) m = min(m, tmp[i]);
    return m;
}

// The random number of a draw, in [0, 1): Philox-4x32-10 of (0, position, choice, 0), keyed by
// seed.
__device__ __forceinline__ double uniform(const k_sample_row &r) {
    uint32_t k0 = (uint32_t)r.seed, k1 = (uint32_t)(r.seed >> 32);
    uint4 c = make_uint4(0u, r.pos, r.choice, 0u);
#pragma unroll
    for (int i = 0; i < 10; i++) {
        uint32_t h0 = __umulhi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x;
        uint32_t h1 = __umulhi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
        c = make_uint4(h1 ^ c.y ^ k0, l1, h0 ^ c.w ^ k1, l0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return (double)(((unsigned long long)c.x << 32 | c.y) >> 11) * 1.1102230246251565e-16;
}

// Order-preserving key of a number: a > b means key(a) > key(b).
__device__ __forceinline__ uint32_t key_of(float f) {
    uint32_t u = __float_as_uint(f + 0.f); // one zero
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float of_key(uint32_t k) {
    return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k);
}
// NaN counts as -inf, +inf as the greatest float.
__device__ __forceinline__ float logit_at(const float *x, int i) {
    float v = ldx(x + i);
    return v == v ? fminf(v, FLOAT_MAX) : -INFINITY;
}
__device__ __forceinline__ double weight_of(float v, float top, double temperature) {
    double d = (double)v - (double)top;
    return d < -746.0 * temperature ? 0.0 : exp(d / temperature);
}
__device__ __forceinline__ unsigned long long mass_of(float v, float top) {
    return v - top < -31.f ? 0ull : (unsigned long long)(weight_of(v, top, 1.0) * MASS_SCALE);
}

// ---- Edits ----

__device__ __forceinline__ float clamp_logit(double v) {
    return v > (double)FLOAT_MAX ? FLOAT_MAX : v < -(double)FLOAT_MAX ? -FLOAT_MAX : (float)v;
}
__device__ float edited(float l, const k_sample_edit &e, const k_sample_row &r) {
    if (e.bias == -INFINITY) return -INFINITY;
    if (!(l > -INFINITY)) return l;
    if (e.bias != 0.f) l = clamp_logit((double)l + (double)e.bias);
    if (e.repeated) {
        double p = (double)r.repeat_penalty;
        l = clamp_logit(l > 0.f ? (double)l / p : (double)l * p);
    }
    if (e.count > 0) {
        double less = __dmul_rn((double)r.frequency_penalty, (double)e.count);
        l = clamp_logit(__dsub_rn(__dsub_rn((double)l, less), (double)r.presence_penalty));
    }
    return l;
}
__device__ __forceinline__ void apply_edits(const k_sample &a, const k_sample_row &r, float *x,
                                            int i0, int i1) {
    if (r.n_edits == 0) return;
    for (int k = threadIdx.x; k < r.n_edits; k += THREADS) {
        k_sample_edit e = a.edits[r.first_edit + k];
        if (e.id >= i0 && e.id < i1) __stcg(x + e.id, edited(logit_at(x, e.id), e, r));
    }
    __syncthreads();
}

// ---- Filters and the draw ----

// What may be drawn: keys above `key`, and of those equal to it the ids up to last_id.
struct Kept {
    uint32_t key;
    int last_id;
    __device__ __forceinline__ bool has(uint32_t k, int id) const {
        return k > key || (k == key && id <= last_id);
    }
};

struct Scratch {
    unsigned long long hist[WARPS][256];
    unsigned long long u[WARPS];
    double d[WARPS];
    int i[WARPS];
    unsigned long long left, all;
    uint32_t bin;
    Best best[32];
};

// The first id in [lo, hi) at which the weights, added up in order, exceed target; the last id of
// any weight where rounding leaves the target above the sum of all.
template <class W> __device__ int find_at(int lo, int hi, double target, Scratch &t, W weight) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    while (hi - lo > THREADS) {
        int per = ((hi - lo + WARPS - 1) / WARPS + 31) & ~31, end = min(lo + (warp + 1) * per, hi);
        double s = 0;
#pragma unroll 4
        for (int i = lo + warp * per + lane; i < end; i += 32) s += weight(i);
        warp_totals(s, t.d);
        double got = 0, before = 0;
        int pick = -1, last = 0;
        for (int k = 0; k < WARPS; k++) {
            if (t.d[k] > 0) last = k;
            if (pick < 0 && got + t.d[k] > target) pick = k, before = got;
            got += t.d[k];
        }
        target = pick < 0 ? (double)INFINITY : target - before;
        lo += (pick < 0 ? last : pick) * per;
        hi = min(lo + per, hi);
    }
    int id = lo + (int)threadIdx.x;
    double w = id < hi ? weight(id) : 0, sum = block_scan(w, t.d);
    int first = block_min(sum > target && w > 0 ? id : 0x7fffffff, t.i);
    int last = -block_min(w > 0 ? -id : 0, t.i);
    return first < 0x7fffffff ? first : last;
}

// The smallest key such that what is kept with keys >= it reaches `target` of weight (greatest
// keys first); t.left: what is wanted of the tokens of that very key, t.all: what they have.
template <class W>
__device__ uint32_t select_key(const float *x, int n, Kept kept, unsigned long long target,
                               Scratch &t, W weight) {
    uint32_t prefix = 0;
    int warp = threadIdx.x >> 5;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = 0; i < WARPS; i++) t.hist[i][threadIdx.x] = 0;
        __syncthreads();
        uint32_t high = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
#pragma unroll 8
        for (int i = threadIdx.x; i < n; i += THREADS) {
            float v = logit_at(x, i);
            uint32_t k = key_of(v);
            if ((k & high) != prefix || !kept.has(k, i)) continue;
            unsigned long long w = weight(v);
            if (w) atomicAdd((unsigned long long *)&t.hist[warp][(k >> shift) & 255], w);
        }
        __syncthreads();
        unsigned long long mine = 0; // of bin 255 - thread
        for (int i = 0; i < WARPS; i++) mine += t.hist[i][255 - threadIdx.x];
        unsigned long long sum = block_scan(mine, t.u);
        int first = min(block_min(sum >= target ? (int)threadIdx.x : 255, t.i), 255);
        if ((int)threadIdx.x == first) {
            t.bin = 255 - first, t.left = target - min(target, sum - mine), t.all = mine;
        }
        __syncthreads();
        prefix |= t.bin << shift;
        target = t.left;
    }
    return prefix;
}

// Keeps the greatest keys down to `key`, and of that key the n_equal lowest ids of n_all.
__device__ Kept narrow(const float *x, int n, Kept kept, uint32_t key, unsigned long long n_equal,
                       unsigned long long n_all, Scratch &t) {
    Kept to = {key, key == kept.key ? kept.last_id : 0x7fffffff};
    if (n_equal >= n_all) return to;
    double target = (double)n_equal - 0.5;
    int last = find_at(0, n, target, t, [&](int i) {
        return key_of(logit_at(x, i)) == key && kept.has(key, i) ? 1.0 : 0.0;
    });
    to.last_id = last;
    return to;
}

__device__ int draw_filtered(const k_sample &a, const k_sample_row &r, const float *x, float top,
                             Scratch &t) {
    int n = a.n_vocab;
    Kept kept = {key_of(-INFINITY), -1};
    if (r.top_k > 0 && r.top_k < n) {
        uint32_t key =
            select_key(x, n, kept, (unsigned long long)r.top_k, t, [](float) { return 1ull; });
        // fewer than top_k tokens may be chosen: all of them stay
        if (key > kept.key) kept = narrow(x, n, kept, key, t.left, t.all, t);
    }
    if (r.top_p < 1.f) {
        unsigned long long all = 0;
#pragma unroll 4
        for (int i = threadIdx.x; i < n; i += THREADS) {
            float v = logit_at(x, i);
            if (kept.has(key_of(v), i)) all += mass_of(v, top);
        }
        warp_totals(all, t.u);
        all = 0;
        for (int i = 0; i < WARPS; i++) all += t.u[i];
        unsigned long long want = (unsigned long long)((double)all * (double)fmaxf(r.top_p, 0.f));
        uint32_t key =
            select_key(x, n, kept, max(want, 1ull), t, [&](float v) { return mass_of(v, top); });
        unsigned long long one = max(mass_of(of_key(key), top), 1ull);
        kept = narrow(x, n, kept, key, (t.left + one - 1) / one, t.all / one, t);
    }
    auto weight = [&](int i) {
        float v = logit_at(x, i);
        if (!kept.has(key_of(v), i)) return 0.0;
        if (r.min_p > 0.f && weight_of(v, top, 1.0) < (double)r.min_p) return 0.0;
        return weight_of(v, top, (double)r.temperature);
    };
    double s = 0, sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += THREADS) s += weight(i);
    warp_totals(s, t.d);
    for (int i = 0; i < WARPS; i++) sum += t.d[i];
    return find_at(0, n, uniform(r) * sum, t, weight);
}

// What a part leaves in memory.
struct PartSum {
    float top;
    int id;
    float sum; // of exp(x - top)
    int pad;
    double tempered;
};

ENTRY __launch_bounds__(256) sample(PAR const k_sample a) {
    __shared__ float ftmp[33];
    __shared__ Scratch t;
    __shared__ PartSum parts[64];
    __shared__ int s_last;
    dep_trigger();
    dep_wait();
    int row = blockIdx.y, part = blockIdx.x;
    if (row >= a.counts[2]) return;
    k_sample_row r = a.rows[row];
    if (r.host) return;
    float *x = a.logits + (int64_t)row * a.ld;
    int per = (a.n_vocab + a.n_part - 1) / a.n_part;
    int i0 = part * per, i1 = min(i0 + per, a.n_vocab);
    bool greedy = r.temperature <= 0.f || r.top_k == 1;
    bool filters =
        !greedy && ((r.top_k > 0 && r.top_k < a.n_vocab) || r.top_p < 1.f || r.min_p > 0.f);
    bool draw = !greedy && !filters;
    double temperature = draw ? (double)r.temperature : 1.0;
    apply_edits(a, r, x, i0, i1);

    Best m = {-INFINITY, 0x7fffffff};
    for (int i = i0 + threadIdx.x; i < i1; i += THREADS) m = better(m, Best{logit_at(x, i), i});
    m = block_best(m, t.best);
    float s = 0.f;
    double td = 0;
    if (m.v > -INFINITY) {
        for (int i = i0 + threadIdx.x; i < i1; i += THREADS) {
            float v = logit_at(x, i);
            s += expf(v - m.v);
            if (draw) td += weight_of(v, m.v, temperature);
        }
    }
    s = block_sum(s, ftmp);
    if (draw) {
        warp_totals(td, t.d);
        td = 0;
        for (int i = 0; i < WARPS; i++) td += t.d[i];
    }
    float *out = a.part + ((int64_t)row * a.n_part + part) * 8;
    if (threadIdx.x == 0) {
        __stcg(out, m.v), __stcg(out + 1, __int_as_float(m.id)), __stcg(out + 2, s);
        __stcg(reinterpret_cast<double *>(out + 4), td);
        __threadfence();
        unsigned k = atomicAdd((unsigned *)(a.ticket + row), 1u);
        s_last = k == (unsigned)a.n_part - 1;
        if (s_last) a.ticket[row] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!s_last) return;
    // n_part <= 64
    if ((int)threadIdx.x < a.n_part) {
        const float *q = a.part + ((int64_t)row * a.n_part + threadIdx.x) * 8;
        parts[threadIdx.x] = PartSum{__ldcg(q), __float_as_int(__ldcg(q + 1)), __ldcg(q + 2), 0,
                                     __ldcg(reinterpret_cast<const double *>(q + 4))};
    }
    __syncthreads();
    Best all = {-INFINITY, 0x7fffffff};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 2; i++) { // two parts a lane, the same in every warp
        int p = (threadIdx.x & 31) + 32 * i;
        if (p < a.n_part) all = better(all, Best{parts[p].top, parts[p].id});
    }
    all = warp_best(all);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int p = (threadIdx.x & 31) + 32 * i;
        if (p < a.n_part && parts[p].top > -INFINITY) {
            sum += parts[p].sum * expf(parts[p].top - all.v);
        }
    }
    sum = warp_sum(sum);
    int id = all.id;
    bool none = !(all.v > -INFINITY);
    if (draw && !none) { // the part that the draw falls into, then the token
        if ((int)threadIdx.x < a.n_part) {
            PartSum &q = parts[threadIdx.x];
            q.tempered = q.top > -INFINITY ? q.tempered * weight_of(q.top, all.v, temperature) : 0;
        }
        __syncthreads();
        double total = 0, got = 0, before = 0;
        for (int p = 0; p < a.n_part; p++) total += parts[p].tempered;
        double target = uniform(r) * total;
        int pick = -1, last = 0;
        for (int p = 0; p < a.n_part; p++) {
            double w = parts[p].tempered;
            if (w > 0) last = p;
            if (pick < 0 && got + w > target) pick = p, before = got;
            got += w;
        }
        target = pick < 0 ? (double)INFINITY : target - before;
        int lo = (pick < 0 ? last : pick) * per;
        id = find_at(lo, min(lo + per, a.n_vocab), target, t,
                     [&](int i) { return weight_of(logit_at(x, i), all.v, temperature); });
    }
    if (filters && !none) id = draw_filtered(a, r, x, all.v, t);
    if (threadIdx.x == 0) {
        if (none || id < 0 || id >= a.n_vocab) id = 0;
        a.out_id[row] = id;
        a.out_logprob[row] = none ? NAN : logit_at(x, id) - all.v - logf(sum);
    }
}
