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
    const float *norm; // per-head norm weight or null
    const float *cs;   // cosines, then sines (n_rot / 2 each), or null: no rotation
};

// One head by one warp. load(d0, v): numbers d0 + 32 i + lane to v[i], zero past the end; put(d, x)
// gets the results. sh: head_dim floats of this warp.
template <class Load, class Put>
__device__ __forceinline__ void turn_head(const Turn &a, float *sh, int lane, Load load, Put put) {
    int half = a.n_rot / 2;
    // 128 columns at a time, all of their inputs asked for together
    float cos4[4], sin4[4], mine4[4], other4[4]; // norm weights of d and of its partner
    auto partner = [&](int d) { return a.interleaved ? d ^ 1 : (d >= half ? d - half : d + half); };
    auto angles = [&](int d0) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int d = d0 + i * 32 + lane;
            bool turn = a.cs && d < a.n_rot;
            int k = a.interleaved ? d >> 1 : (d < half ? d : d - half);
            cos4[i] = turn ? ldx(a.cs + k) : 1.f;
            sin4[i] = turn ? ldx(a.cs + half + k) : 0.f;
            mine4[i] = a.norm && d < a.head_dim ? __ldg(a.norm + d) : 1.f;
            other4[i] = a.norm && turn ? __ldg(a.norm + partner(d)) : 1.f;
        }
    };
    float ssq = 0.f;
    angles(0);
    for (int d0 = 0; d0 < a.head_dim; d0 += 128) {
        float v[4];
        load(d0, v);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int d = d0 + i * 32 + lane;
            ssq = fmaf(v[i], v[i], ssq);
            if (d < a.head_dim) sh[d] = v[i];
        }
    }
    float r = a.norm ? 1.f / sqrtf(warp_sum(ssq) / (float)a.head_dim + a.eps) : 1.f;
    __syncwarp();
    for (int d0 = 0; d0 < a.head_dim; d0 += 128) {
        if (d0) angles(d0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int d = d0 + i * 32 + lane;
            if (d >= a.head_dim) continue;
            bool turn = a.cs && d < a.n_rot, second = a.interleaved ? d & 1 : d >= half;
            float o = turn ? (a.norm ? other4[i] * r : 1.f) * sh[partner(d)] : 0.f;
            float v = sh[d] * (a.norm ? mine4[i] * r : 1.f);
            put(d, fmaf(v, cos4[i], second ? o * sin4[i] : -o * sin4[i]));
        }
    }
}
