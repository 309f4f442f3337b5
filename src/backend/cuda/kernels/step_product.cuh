// Part of step.cuh: activations from words, the products over the rings, and what becomes of their
// sums.
#pragma once
#include "step_ring.cuh"
#include "word.cuh"

// What the functions below share. In dynamic shared memory, but for the numbers.
struct Step {
    int warp, lane;
    const k_layer *layers;
    uint4 *xs;
    float *xm, *ds, *ssqs, *part; // ds: [warp]; ssqs: [2][warp]; part: [2][batch][warp][16]
    uint8_t *slots, *attn;
    uint32_t zero;           // 16 zero bytes of shared memory
    int pos, range, kv_slot; // of the token
    uint32_t e;              // epoch of the present layer's input
    int slot, turn, batch;   // ring slot; parity of ssqs; parity of part
};

// ---- Activations ----

// Waits for the words of columns c, c + 128, ... of the run that ends at c1.
template <int HELD>
__device__ __forceinline__ void wait_run(const word *x, int c, int c1, int n_cols, uint32_t epoch,
                                         float4 *v) {
    bool ok;
    do {
        word w[HELD][4];
        ok = true;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            int k = c + i * 128;
            bool in = k < c1 && k < n_cols;
            if (in) {
                get_words(x + k, w[i][0], w[i][1]);
                get_words(x + k + 2, w[i][2], w[i][3]);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) w[i][j] = (word)epoch << 32;
            }
        }
#pragma unroll
        for (int i = 0; i < HELD; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) ok = ok && epoch_of(w[i][j]) == epoch;
            v[i] = make_float4(number_of(w[i][0]), number_of(w[i][1]), number_of(w[i][2]),
                               number_of(w[i][3]));
        }
    } while (!ok);
}

// Sums of four numbers over every L lanes; a lane ends with the sum of number `piece`.
template <int L> __device__ __forceinline__ float sum4(const float *v, int lane, int &piece) {
    bool hi = lane & (L / 2), up = lane & (L / 4);
    float k0 = (hi ? v[2] : v[0]) + __shfl_xor_sync(FULL, hi ? v[0] : v[2], L / 2);
    float k1 = (hi ? v[3] : v[1]) + __shfl_xor_sync(FULL, hi ? v[1] : v[3], L / 2);
    float k = (up ? k1 : k0) + __shfl_xor_sync(FULL, up ? k0 : k1, L / 4);
#pragma unroll
    for (int i = L / 8; i; i >>= 1) k += __shfl_xor_sync(FULL, k, i);
    piece = (hi ? 2 : 0) + (up ? 1 : 0);
    return k;
}

// put4 of gemv.cuh for all pieces of a run from c0 on.
template <class F, int HELD>
__device__ __forceinline__ void put_run(const float4 *v, float inv, int c0, int c1, uint32_t *xs,
                                        float *xm, int lane) {
    int c = c0 + lane * 4;
    if constexpr (F::FLOAT || HELD < 4) {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            put4<F, 1>(v[i], inv, c + i * 128, c + i * 128 < c1, 0, xs, xm);
        }
    } else {
        constexpr int L = F::XG / 4, N = (HELD + 3) / 4 * 4;
        float sum[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            sum[i] = 0.f;
            if (i >= HELD) continue;
            int k = c + i * 128, w = (k & 63) >> 2;
            uint2 q = codes4(v[i], inv, sum[i]);
            uint32_t *p = xs + (k >> 6) * 32 + (w & 3) * 4 + x_word<F>(w >> 2);
            if (k < c1) p[0] = q.x, p[16] = q.y;
        }
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            int piece;
            float k = sum4<L>(sum + i, lane, piece);
            int group = c0 + lane / L * F::XG + (i + piece) * 128;
            if (lane % (L / 4) == 0 && group < c1) xm[group / F::XG] = k;
        }
    }
}

// prepare_held of gemv.cuh for words; one token.
template <class F, int HELD>
__device__ __forceinline__ void prepare_words(const word *x, const float *gamma, int n_cols,
                                              uint32_t epoch, int c0, int c1, uint32_t *xs,
                                              float *xm, float *d_out, float *ssq_out, int lane) {
    float4 v[HELD], gam[HELD <= 4 ? HELD : 1];
    int c = c0 + lane * 4;
    auto weight = [&](int i) {
        int k = c + i * 128;
        return k < c1 && k < n_cols ? __ldg(reinterpret_cast<const float4 *>(gamma + k))
                                    : make_float4(0.f, 0.f, 0.f, 0.f);
    };
    if (HELD <= 4 && gamma) {
#pragma unroll
        for (int i = 0; i < HELD; i++) gam[HELD <= 4 ? i : 0] = weight(i);
    }
    // One word first: the whole run is asked for when it is likely to be there.
    int last = min(c1, n_cols) - 1;
    if (last >= c0) {
        while (epoch_of(get_word(x + last)) != epoch) continue;
    }
    wait_run<HELD>(x, c, c1, n_cols, epoch, v);
    // No branch between the pieces: they are worked on side by side.
    float ssq = 0.f, m = 0.f;
    if (gamma) {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            v[i] = times_gamma(v[i], HELD <= 4 ? gam[HELD <= 4 ? i : 0] : weight(i), ssq);
        }
        ssq = warp_sum(ssq);
    }
#pragma unroll
    for (int i = 0; i < HELD; i++) m = max4(m, v[i]);
    float2 d = run_scale<F>(m);
    put_run<F, HELD>(v, d.y, c0, c1, xs, xm, lane);
    if (lane == 0) *d_out = d.x, *ssq_out = ssq;
}

// ---- Products ----

// Where a product's numbers come from and go to.
struct Flow {
    const word *x, *res; // input; residual or null
    uint32_t x_epoch, res_epoch, out_epoch;
    const float *gamma;
    word *out;
    float *plain; // or null: the same numbers once more
};

// The output of this thread in a batch of items: 16 threads a strip.
struct Output {
    int item, seg, row; // first item of the batch that it sums; row < 0: none
    float bias;
    word res; // as asked for early
};

__device__ __forceinline__ Output output_of(const Product &p, const Flow &f, const k_layer &l,
                                            int first, int n) {
    Output o;
    int strip;
    o.item = (threadIdx.x >> 4) * (p.pair ? 2 : 1);
    o.row = -1, o.bias = 0.f, o.res = 0;
    if (o.item >= n) return o;
    locate(p, first + o.item, o.seg, strip);
    int row = strip * 16 + (threadIdx.x & 15);
    if (row >= (o.seg == 0 || p.pair ? p.rows0 : p.rows1)) return o;
    o.row = row;
    int w = p.first + o.seg;
    if (w <= KSTEP_O && l.bias[w]) o.bias = __ldg(l.bias[w] + row);
    if (f.res) o.res = get_word(f.res + row);
    return o;
}

// Sums of a batch's items over the warps, in order.
__device__ __forceinline__ void finish_batch(const k_step &a, const Step &s, const Product &p,
                                             const Flow &f, const Output &o, const float *part) {
    if (o.row < 0) return;
    auto sum = [&](int item) {
        float v = 0.f;
#pragma unroll
        for (int w = 0; w < SWARPS; w++) v += part[(item * SWARPS + w) * 16 + (threadIdx.x & 15)];
        return v;
    };
    float v = sum(o.item), u = p.pair ? sum(o.item + 1) : 0.f, r = 1.f;
    if (f.gamma) {
        float q = 0.f;
#pragma unroll
        for (int w = 0; w < SWARPS; w++) q += s.ssqs[s.turn * SWARPS + w];
        r = 1.f / sqrtf(q / (float)p.n_cols + a.eps);
    }
    float add = o.bias;
    if (f.res) {
        add += epoch_of(o.res) == f.res_epoch ? number_of(o.res)
                                              : wait_word(f.res + o.row, f.res_epoch);
    }
    v = p.pair ? activate(v * r, a.act) * (u * r) : fmaf(v, r, add); // as gemv_main rounds
    int base = o.seg == 0 || p.pair ? 0 : o.seg == 1 ? a.n_q : a.n_q + a.n_kv;
    put_word(f.out + base + o.row, v, f.out_epoch);
    if (f.plain) f.plain[o.row] = v;
}

template <class F, int SLOTS, class R>
__device__ __forceinline__ void run_product(const k_step &a, Step &s, R &ring, const Product &p,
                                            const Flow &f, const k_layer &l) {
    int n_items = items_of(p);
    if (n_items == 0) return;
    int kb0, n_kb, lane = s.lane, warp = s.warp;
    run_of(p.n_kb, warp, kb0, n_kb);
    int c0 = kb0 * F::KB, c1 = c0 + n_kb * F::KB, run = c1 - c0;
    s.turn ^= 1;
    float *d = s.ds + warp, *q = s.ssqs + s.turn * SWARPS + warp;
    uint32_t *xs = (uint32_t *)s.xs;
    if (run <= 128) {
        prepare_words<F, 1>(f.x, f.gamma, p.n_cols, f.x_epoch, c0, c1, xs, s.xm, d, q, lane);
    } else if (run <= 512) {
        prepare_words<F, 4>(f.x, f.gamma, p.n_cols, f.x_epoch, c0, c1, xs, s.xm, d, q, lane);
    } else {
        prepare_words<F, 14>(f.x, f.gamma, p.n_cols, f.x_epoch, c0, c1, xs, s.xm, d, q, lane);
    }
    __syncwarp();
    int g = lane >> 2, t = lane & 3;
    int xo[1] = {(g & 1) * 4 + t}, xt[1] = {0}; // as gemv_main for one token
    const uint4 *my_xs = s.xs + (size_t)kb0 * (F::KB / (F::FLOAT ? 32 : 64)) * 8;
    const float *my_xm = s.xm + kb0 * (F::KB / F::XG);
    float scale = *d;
#pragma unroll 1
    for (int first = 0; first < n_items; first += KSTEP_BATCH) {
        int n = min((int)KSTEP_BATCH, n_items - first);
        float *part = s.part + s.batch * (KSTEP_BATCH * SWARPS * 16);
        s.batch ^= 1;
        Output out = output_of(p, f, l, first, n);
#pragma unroll 1
        for (int it = 0; it < n; it++) {
            Acc<F, 1> acc;
            if (F::SC == KSC_PAIR && a.scale_type) {
                strip_sum<F, 1, F::SC == KSC_PAIR, SLOTS>(acc, ring, s.slots, s.slot, n_kb, my_xs,
                                                          my_xm, s.zero, xo, xt, lane);
            } else {
                strip_sum<F, 1, 0, SLOTS>(acc, ring, s.slots, s.slot, n_kb, my_xs, my_xm, s.zero,
                                          xo, xt, lane);
            }
            if (t == 0) {
                float r0 = F::FLOAT ? acc.r[0][0] + acc.r[0][1] : acc.r[0][0];
                float r1 = F::FLOAT ? acc.r[0][F::FLOAT ? 2 : 0] + acc.r[0][F::FLOAT ? 3 : 0]
                                    : acc.r[0][1];
                float *o = part + (it * SWARPS + warp) * 16;
                o[g] = scale * r0, o[g + 8] = scale * r1;
            }
        }
        meet();
        finish_batch(a, s, p, f, out, part);
    }
}
