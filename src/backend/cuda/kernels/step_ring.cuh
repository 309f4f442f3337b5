// Part of step.cuh: the products of a layer, who takes which of their strips, and the rings of
// weights that the copying warps keep full.
#pragma once
#include "bulk.cuh"
#include "gemv.cuh"

// Warps that compute, and their threads; four more warps copy.
enum { SWARPS = 8, STHREADS = 256, SBLOCK = STHREADS + 128 };

__device__ __forceinline__ void meet() { // of the warps that compute
    asm volatile("bar.sync 1, 256;" ::: "memory");
}

// One product of a layer as one CTA sees it. Strips of the segments follow each other; with `pair`
// gate and up alternate.
struct Product {
    int first, n_seg, pair; // weights KSTEP_*: first, first + 1, ...
    int rows0, rows1; // of the first segment, and of each further one (0: none; not with pair)
    int n_cols, n_kb;
};

template <class F> __device__ __forceinline__ Product product_of(const k_step &a, int ph) {
    Product p;
    int cols = ph == 1 ? a.n_q : ph == 3 ? a.n_ff : a.n_embd;
    p.first = ph == 0 ? KSTEP_Q : ph == 1 ? KSTEP_O : ph == 2 ? KSTEP_GATE : KSTEP_DOWN;
    p.n_seg = ph == 0 ? 3 : ph == 2 ? 2 : 1;
    p.pair = ph == 2;
    p.rows0 = ph == 0 ? a.n_q : ph == 2 ? a.n_ff : a.n_embd;
    p.rows1 = ph == 0 ? a.n_kv : 0;
    p.n_cols = cols;
    p.n_kb = (cols + F::KB - 1) / F::KB;
    return p;
}

__device__ __forceinline__ int strips_of(int rows) {
    return (rows + 15) >> 4;
}

// Items of this CTA: strips, or with `pair` twice as many.
__device__ __forceinline__ int items_of(const Product &p) {
    int n = strips_of(p.rows0) + 2 * strips_of(p.rows1);
    int mine = n > (int)blockIdx.x ? (n - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0;
    return p.pair ? 2 * mine : mine;
}

// Item `it` of this CTA: its segment, and its strip there.
__device__ __forceinline__ void locate(const Product &p, int it, int &seg, int &strip) {
    strip = blockIdx.x + (p.pair ? it >> 1 : it) * gridDim.x;
    seg = p.pair ? it & 1 : 0;
    if (p.n_seg == 3 && strip >= strips_of(p.rows0)) {
        strip -= strips_of(p.rows0), seg = 1;
        if (strip >= strips_of(p.rows1)) strip -= strips_of(p.rows1), seg = 2;
    }
}

// A warp's run of blocks.
__device__ __forceinline__ void run_of(int n_kb, int warp, int &kb0, int &n) {
    kb0 = warp * n_kb / SWARPS;
    n = (warp + 1) * n_kb / SWARPS - kb0;
}

// The weights a warp needs, over all layers.
template <class F> struct StepItems {
    const k_step *a;
    const k_layer *layers; // shared memory
    int warp, layer, ph, it, n_it, kb0, n_kb;
    Product p;

    __device__ __forceinline__ void start(const k_step &step, const k_layer *l, int of_warp) {
        a = &step, layers = l, warp = of_warp, layer = 0, ph = -1, it = n_it = 0;
    }
    __device__ __forceinline__ int next(const uint8_t *&src) {
        while (it >= n_it) {
            if (++ph == 4) ph = 0, layer++;
            if (layer >= a->n_layers) {
                ph = 3; // stay at the end
                return 0;
            }
            p = product_of<F>(*a, ph);
            run_of(p.n_kb, warp, kb0, n_kb);
            it = 0, n_it = n_kb > 0 ? items_of(p) : 0;
        }
        int seg, strip;
        locate(p, it++, seg, strip);
        src = layers[layer].w[p.first + seg] + ((size_t)strip * p.n_kb + kb0) * F::BYTES;
        return n_kb;
    }
};

// The side of a ring that computes: slot i of warp w is full[w][i] when its part has landed.
template <class F> struct Rings {
    static constexpr int BLOCKS = F::SLOT_KB, SLOT = BLOCKS * F::BYTES;
    uint32_t full, empty; // barriers of this warp's slots, in shared memory
    uint32_t parity;
    template <int SLOTS>
    __device__ __forceinline__ const uint8_t *wait(const uint8_t *slots, int at) {
        mbar_wait(full + at * 8, parity);
        return slots + at * SLOT;
    }
    template <int SLOTS> __device__ __forceinline__ void done(int at, int lane) {
        __syncwarp();
        if (lane == 0) mbar_arrive(empty + at * 8);
        if (at == SLOTS - 1) parity ^= 1;
    }
};

// The warps that copy: each keeps the rings of two warps full, by a lane each.
template <class F, int SLOTS>
__device__ __forceinline__ void copy_weights(const k_step &a, const k_layer *layers, uint32_t slots,
                                             uint32_t full, uint32_t empty) {
    constexpr int PART = Rings<F>::BLOCKS, SLOT = Rings<F>::SLOT;
    int lane = threadIdx.x & 31, ring = ((int)(threadIdx.x >> 5) - SWARPS) * 2 + lane;
    if (lane > 1) return;
    StepItems<F> items;
    items.start(a, layers, ring);
    const uint8_t *src = nullptr;
    int left = items.next(src), n = 0, at = 0, old = 0; // n: parts asked for
    uint32_t turn = 1, old_turn = 0;                    // parity of `at`, of `old` = n - in_flight
    slots += ring * SLOTS * SLOT, full += ring * SLOTS * 8, empty += ring * SLOTS * 8;
    while (left > 0) {
        bool late = n >= a.in_flight && !mbar_test(full + old * 8, old_turn);
        if (late || (n >= SLOTS && !mbar_test(empty + at * 8, turn))) {
            __nanosleep(20);
            continue;
        }
        uint32_t bytes = (uint32_t)min(PART, left) * F::BYTES;
        mbar_expect(full + at * 8, bytes);
        bulk_copy(slots + at * SLOT, src, bytes, full + at * 8);
        src += SLOT, left -= PART;
        if (n >= a.in_flight && ++old == SLOTS) old = 0, old_turn ^= 1;
        n++;
        if (++at == SLOTS) at = 0, turn ^= 1;
        if (left <= 0) left = items.next(src);
    }
}
