// Norms, pointwise ops, rotation, and writing the sequence state.
#include "turn.cuh"

// One CTA a row; columns are normalised in runs of dim, one warp a run when there are many.
ENTRY __launch_bounds__(256) rms_norm(PAR const k_norm a) {
    __shared__ float tmp[33];
    dep_trigger();
    dep_wait();
    int64_t row = blockIdx.x;
    const float *x = a.x + row * a.ldx;
    float *y = a.y + row * a.ldy;
    const float *res = a.res ? a.res + row * a.ldr : nullptr;
    if (a.dim == a.n_cols) {
        float s = 0.f;
        for (int c = threadIdx.x; c < a.dim; c += blockDim.x) {
            float v = ldx(x + c);
            s = fmaf(v, v, s);
        }
        float r = 1.f / sqrtf(block_sum(s, tmp) / (float)a.dim + a.eps);
        for (int c = threadIdx.x; c < a.dim; c += blockDim.x) {
            float v = ldx(x + c) * r * a.w[c];
            y[c] = res ? ldx(res + c) + v : v;
        }
        return;
    }
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int h = warp; h < a.n_cols / a.dim; h += blockDim.x >> 5) {
        float s = 0.f;
        for (int c = lane; c < a.dim; c += 32) {
            float v = ldx(x + h * a.dim + c);
            s = fmaf(v, v, s);
        }
        float r = 1.f / sqrtf(warp_sum(s) / (float)a.dim + a.eps);
        for (int c = lane; c < a.dim; c += 32) {
            y[h * a.dim + c] = ldx(x + h * a.dim + c) * r * a.w[c];
        }
    }
}

ENTRY __launch_bounds__(256) map(PAR const k_map a) {
    dep_trigger();
    dep_wait();
    int64_t row = blockIdx.x, from = row;
    bool zero = false;
    if (a.what == KMAP_GATHER) {
        from = row < a.counts[2] ? a.rows[row] : -1;
        zero = from < 0;
    }
    for (int c = blockIdx.y * blockDim.x + threadIdx.x; c < a.n_cols; c += gridDim.y * blockDim.x) {
        float v = zero ? 0.f : ldx(a.a + from * a.lda + c);
        if (a.what == KMAP_ADD) v += ldx(a.b + row * a.ldb + c);
        if (a.what == KMAP_GLU) v = activate(v, a.act) * ldx(a.b + row * a.ldb + c);
        if (a.what == KMAP_SOFTCAP) v = a.cap * tanhf(v / a.cap);
        a.y[row * a.ldy + c] = v;
    }
}

ENTRY rope_table(PAR const k_rope_table a) {
    dep_trigger();
    dep_wait();
    int64_t row = blockIdx.x;
    int half = a.n_rot / 2;
    float pos = (float)a.pos[row];
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float s, c;
        sincosf(pos * a.freq[i], &s, &c);
        a.y[row * a.ldy + i] = c * a.mscale;
        a.y[row * a.ldy + half + i] = s * a.mscale;
    }
}

// One warp a head: norm (optional), rotation, then to y or into the state. Heads in order: q, k, v.
// ROPE has q only; KV_WRITE has k and v and no rotation.
ENTRY __launch_bounds__(128) rope_kv(PAR const k_rope a) {
    __shared__ float sh[4][512];
    dep_trigger();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int h = blockIdx.y * 4 + warp;
    int64_t row = blockIdx.x;
    bool is_q = h < a.n_head, is_v = h >= a.n_head + a.n_kv_head;
    bool live = h < a.n_head + 2 * a.n_kv_head;
    int slot = live && !is_q ? a.kv_slot[row] : 0; // an input of the step: known before the wait
    dep_wait();
    if (!live || slot < 0) return;
    int kh = is_q ? 0 : (h - a.n_head) % max(1, a.n_kv_head);
    const float *x = is_q ? a.q + row * a.ldq + h * a.head_dim
                          : (is_v ? a.v + row * a.ldv : a.k + row * a.ldk) + kh * a.head_dim;
    const float *cs = a.cs + row * a.ldcs, *norm = is_q ? a.qn : is_v ? nullptr : a.kn;
    Turn turn = {a.head_dim, a.n_rot, a.interleaved, a.eps, norm != nullptr, !is_v && a.cs};
    int64_t at = is_q ? row * a.ldy + (int64_t)h * a.head_dim
                      : state_index(slot, kh, a.n_kv_head, a.page_tokens, a.head_dim);
    uint8_t *state = is_v ? a.vs : a.ks;
#pragma unroll 4
    for (int d = lane; d < a.head_dim; d += 32) sh[warp][d] = ldx(x + d);
    __syncwarp();
    auto get = [&](int d) { return sh[warp][d]; };
    auto angle = [&](int k) { return ldx(cs + k); };
    auto weight = [&](int d) { return __ldg(norm + d); };
    turn_head(turn, lane, get, angle, weight, [&](int d, float v) {
        if (is_q) {
            a.y[at + d] = v;
        } else {
            store_kv(state, at + d, v, a.kv_type);
        }
    });
}

// A tiny dependent op: y = 1.0001 y + 0.001.
ENTRY chain_step(PAR const k_chain a) {
    dep_trigger();
    dep_wait();
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < a.n) a.y[i] = fmaf(1.0001f, ldx(a.y + i), 0.001f);
}

// Reads n 16-byte words as fast as the memory gives them.
ENTRY __launch_bounds__(512) read_rate(PAR const k_chain a) {
    dep_wait();
    uint32_t s = 0;
    const uint4 *p = reinterpret_cast<const uint4 *>(a.x);
    int64_t step = (int64_t)gridDim.x * 2048;
    for (int64_t i = blockIdx.x * 2048ll + threadIdx.x; i + 1536 < a.n; i += step) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = ld_stream(p + i + j * 512);
#pragma unroll
        for (int j = 0; j < 4; j++) s += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (s == 0x12345678u) a.y[0] = 1.f;
}
