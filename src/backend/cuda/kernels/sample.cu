// Sampling of the step's output rows.
//
// A row's vocabulary is divided among n_part CTAs: maximum, its lowest id, sum of exponentials and
// (temperature without filters) the Gumbel maximum. The CTA that arrives last merges in order.
// Filters (top-k, then top-p, then min-p, on the untempered distribution) are thresholds on the
// logit: found by radix selection over counts, then over integer masses (deterministic). The draw
// is argmax(logit / T + Gumbel), the noise from Philox-4x32-10 of (seed; token / 4, pos, choice).
#include "dev.cuh"

enum { THREADS = 256 };

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
    if ((threadIdx.x & 31) < THREADS / 32) b = tmp[threadIdx.x & 31];
    return warp_best(b);
}

// Four random words of one counter.
__device__ __forceinline__ uint4 philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint4 c = make_uint4(c0, c1, c2, 0x6d78u);
#pragma unroll
    for (int i = 0; i < 10; i++) {
        uint32_t h0 = __umulhi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x;
        uint32_t h1 = __umulhi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
        c = make_uint4(h1 ^ c.y ^ k0, l1, h0 ^ c.w ^ k1, l0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c;
}
__device__ __forceinline__ float gumbel(uint32_t bits) {
    float u = ((float)bits + 0.5f) * 2.3283064365386963e-10f;
    return -logf(-log1pf(-u));
}
__device__ __forceinline__ float noise(const k_sample_row &r, int id) {
    uint4 c = philox(r.seed, (uint32_t)id >> 2, r.pos, r.choice);
    return gumbel((id & 3) == 0 ? c.x : (id & 3) == 1 ? c.y : (id & 3) == 2 ? c.z : c.w);
}

// Order-preserving key: a > b as floats means key(a) > key(b). NaN sorts lowest.
__device__ __forceinline__ uint32_t key_of(float f) {
    if (!(f == f)) return 0;
    uint32_t u = __float_as_uint(f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float logit_at(const float *x, int i) {
    float v = ldx(x + i);
    return v == v ? v : -INFINITY;
}

// Smallest key such that the weight of all keys >= it reaches `target`; only keys >= floor count.
// weight: 1 a token (mass false), or its probability mass in units of 2^-40 of the maximum.
__device__ uint32_t select_key(const float *x, int n, uint32_t floor_key, bool mass, float top,
                               unsigned long long target, unsigned long long *hist) {
    __shared__ uint32_t s_prefix;
    __shared__ unsigned long long s_left;
    uint32_t prefix = 0;
    unsigned long long left = target;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += THREADS) hist[i] = 0;
        __syncthreads();
        uint32_t high = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
        for (int i = threadIdx.x; i < n; i += THREADS) {
            float v = logit_at(x, i);
            uint32_t k = key_of(v);
            if (k < floor_key || (k & high) != prefix) continue;
            unsigned long long w =
                mass ? (unsigned long long)(expf(v - top) * 1099511627776.f) : 1ull;
            atomicAdd((unsigned long long *)&hist[(k >> shift) & 255], w);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int b = 255;
            while (b > 0 && hist[b] < left) left -= hist[b--];
            s_prefix = prefix | (uint32_t)b << shift;
            s_left = left;
        }
        __syncthreads();
        prefix = s_prefix, left = s_left;
        __syncthreads();
    }
    return prefix;
}

// Total mass of the keys >= floor, same units.
__device__ unsigned long long mass_above(const float *x, int n, uint32_t floor_key, float top,
                                         unsigned long long *hist) {
    if (threadIdx.x == 0) hist[0] = 0;
    __syncthreads();
    unsigned long long s = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        float v = logit_at(x, i);
        if (key_of(v) >= floor_key) s += (unsigned long long)(expf(v - top) * 1099511627776.f);
    }
    atomicAdd((unsigned long long *)&hist[0], s);
    __syncthreads();
    s = hist[0];
    __syncthreads();
    return s;
}

__device__ int draw_filtered(const k_sample &a, const k_sample_row &r, const float *x, float top,
                             unsigned long long *hist, Best *tmp) {
    int n = a.n_vocab;
    uint32_t floor_key = 1; // NaN never
    if (r.top_k > 0 && r.top_k < n) {
        floor_key = select_key(x, n, floor_key, false, top, (unsigned long long)r.top_k, hist);
    }
    if (r.top_p < 1.f) {
        unsigned long long all = mass_above(x, n, floor_key, top, hist);
        unsigned long long want = (unsigned long long)((double)all * (double)fmaxf(r.top_p, 0.f));
        if (want == 0) want = 1;
        floor_key = max(floor_key, select_key(x, n, floor_key, true, top, want, hist));
    }
    if (r.min_p > 0.f) floor_key = max(floor_key, key_of(top + logf(r.min_p)));
    floor_key = min(floor_key, key_of(top));
    Best b = {-INFINITY, 0x7fffffff};
    for (int i = threadIdx.x; i < n; i += THREADS) {
        float v = logit_at(x, i);
        if (key_of(v) < floor_key) continue;
        Best c = {v / r.temperature + noise(r, i), i};
        b = better(b, c);
    }
    return block_best(b, tmp).id;
}

ENTRY __launch_bounds__(256) sample(PAR const k_sample a) {
    __shared__ Best tmp[32];
    __shared__ float ftmp[33];
    __shared__ unsigned long long hist[256];
    __shared__ int s_last;
    dep_trigger();
    dep_wait();
    int row = blockIdx.y, part = blockIdx.x;
    if (row >= a.counts[2]) return;
    k_sample_row r = a.rows[row];
    if (r.host) return;
    const float *x = a.logits + (int64_t)row * a.ld;
    int per = (a.n_vocab + a.n_part - 1) / a.n_part;
    int i0 = part * per, i1 = min(i0 + per, a.n_vocab);
    bool greedy = r.temperature <= 0.f || r.top_k == 1;
    bool filters =
        !greedy && ((r.top_k > 0 && r.top_k < a.n_vocab) || r.top_p < 1.f || r.min_p > 0.f);
    bool draw = !greedy && !filters;

    Best m = {-INFINITY, 0x7fffffff}, gb = {-INFINITY, 0x7fffffff};
    for (int i = i0 + threadIdx.x; i < i1; i += THREADS) {
        float v = logit_at(x, i);
        m = better(m, Best{v, i});
        if (draw) gb = better(gb, Best{v / r.temperature + noise(r, i), i});
    }
    m = block_best(m, tmp);
    if (draw) gb = block_best(gb, tmp);
    float s = 0.f;
    if (m.v > -INFINITY) {
        for (int i = i0 + threadIdx.x; i < i1; i += THREADS) s += expf(logit_at(x, i) - m.v);
    }
    s = block_sum(s, ftmp);
    float *out = a.part + ((int64_t)row * a.n_part + part) * 8;
    if (threadIdx.x == 0) {
        __stcg(out, m.v), __stcg(out + 1, __int_as_float(m.id)), __stcg(out + 2, s);
        __stcg(out + 3, gb.v), __stcg(out + 4, __int_as_float(gb.id));
        __threadfence();
        unsigned k = atomicAdd((unsigned *)(a.ticket + row), 1u);
        s_last = k == (unsigned)a.n_part - 1;
        if (s_last) a.ticket[row] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!s_last) return;
    // n_part <= 64: two partial results a lane, the same in every warp.
    Best all = {-INFINITY, 0x7fffffff}, g = all, mine[2];
    float sums[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int p = (threadIdx.x & 31) + 32 * i;
        const float *q = a.part + ((int64_t)row * a.n_part + min(p, a.n_part - 1)) * 8;
        mine[i] = Best{__ldcg(q), __float_as_int(__ldcg(q + 1))};
        sums[i] = p < a.n_part ? __ldcg(q + 2) : 0.f;
        g = better(g, Best{__ldcg(q + 3), __float_as_int(__ldcg(q + 4))});
        all = better(all, mine[i]);
    }
    all = warp_best(all), g = warp_best(g);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (mine[i].v > -INFINITY) sum += sums[i] * expf(mine[i].v - all.v);
    }
    sum = warp_sum(sum);
    int id = all.id;
    if (draw) id = g.id;
    if (filters && all.v > -INFINITY) id = draw_filtered(a, r, x, all.v, hist, tmp);
    if (threadIdx.x == 0) {
        bool none = !(all.v > -INFINITY);
        if (none || id >= a.n_vocab) id = 0;
        a.out_id[row] = id;
        a.out_logprob[row] = none ? NAN : logit_at(x, id) - all.v - logf(sum);
    }
}
