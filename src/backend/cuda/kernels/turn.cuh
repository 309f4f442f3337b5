// A head of q, k or v on its way to attention: norm (optional), rotation, the state's number
// format.
#pragma once
#include "dev.cuh"

__device__ __forceinline__ void store_kv(uint8_t *p, int64_t i, float v, int type) {
    if (type == KTYPE_F16) {
        reinterpret_cast<__half *>(p)[i] = __float2half_rn(v);
    } else if (type == KTYPE_BF16) {
        reinterpret_cast<__nv_bfloat16 *>(p)[i] = __float2bfloat16_rn(v);
    } else {
        reinterpret_cast<float *>(p)[i] = v;
    }
}

// First element of a head in the state.
__device__ __forceinline__ int64_t state_index(int slot, int head, int n_kv_head, int page_tokens,
                                               int head_dim) {
    return (((int64_t)(slot / page_tokens) * n_kv_head + head) * page_tokens + slot % page_tokens) *
           head_dim;
}

struct Turn {
    int head_dim, n_rot, interleaved;
    float eps;
    bool has_norm, turns; // per-head norm; rotation
};

// One head by one warp. get(d): number d; angle(k): cosine k, or sine k - n_rot / 2; weight(d): of
// the norm; put(d, x) gets the results.
template <class Get, class Angle, class Weight, class Put>
__device__ __forceinline__ void turn_head(const Turn &a, int lane, Get get, Angle angle,
                                          Weight weight, Put put) {
    float r = 1.f;
    if (a.has_norm) {
        float ssq = 0.f;
#pragma unroll 4
        for (int d = lane; d < a.head_dim; d += 32) {
            float v = get(d);
            ssq = fmaf(v, v, ssq);
        }
        r = rsqrtf(warp_sum(ssq) / (float)a.head_dim + a.eps);
    }
    auto normed = [&](int d) { return a.has_norm ? get(d) * (weight(d) * r) : get(d); };
    int half = a.turns ? a.n_rot / 2 : 0;
#pragma unroll 2
    for (int k = lane; k < half; k += 32) {
        int d = a.interleaved ? 2 * k : k, e = a.interleaved ? 2 * k + 1 : k + half;
        float u = normed(d), v = normed(e), cos = angle(k), sin = angle(half + k);
        put(d, fmaf(u, cos, -v * sin));
        put(e, fmaf(v, cos, u * sin));
    }
#pragma unroll 1
    for (int d = 2 * half + lane; d < a.head_dim; d += 32) put(d, normed(d));
}
