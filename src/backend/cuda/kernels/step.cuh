// Many layers of one token in one launch: one CTA an SM stays for all of them.
//
// A layer is five phases: q, k, v; attention over a part of the context; merging the parts; output
// projection; gate and up; down. A phase's outputs are words (word.cuh), so that a CTA goes on as
// soon as what it reads is there. Four warps do nothing but ask for weights: a ring for each of the
// other warps, which runs ahead across phases, since weights depend on nothing, with a limit on
// what is on its way at once: activations would have to queue behind it. Products, rotation and
// attention are those of the kernels of single ops, with the same rounding: the results are the
// same bit for bit.
//
// Why a buffer of words may be overwritten a layer later: every phase needs all outputs of the
// phase before (attention needs its heads', the output projection all heads), and a CTA writes its
// outputs of a phase after it has read what the phase reads.
#pragma once
#include "step_attn.cuh"

// ---- Asking early ----

__device__ __forceinline__ void prefetch_l2(const void *p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// The small vectors of a layer, by all CTAs together: they would wait behind the copies of weights
// when they are needed.
__device__ __forceinline__ void prefetch_vectors(const k_step &a, const k_layer &l) {
    int line = blockIdx.x * 32, n = 0; // in floats
    auto all = [&](const float *v, int count) {
        for (int i = line; v && i < count; i += gridDim.x * 32) {
            if (threadIdx.x == n) prefetch_l2(v + i);
        }
        n += 32; // another warp
    };
    all(l.norm[0], a.n_embd), all(l.norm[1], a.n_embd);
    all(l.bias[0], a.n_q), all(l.bias[1], a.n_kv), all(l.bias[2], a.n_kv);
    all(l.bias[3], a.n_embd), all(l.qn, a.head_dim), all(l.kn, a.head_dim);
}

// The state that this warp will read first.
__device__ __forceinline__ void prefetch_state(const k_step &a, const Step &s, const Place &at,
                                               const k_layer &l) {
    int hd = a.head_dim;
    if (!at.in || at.pad || at.c0 + (s.warp & 3) * 16 >= at.c1) return;
    int64_t first = (at.first + (int64_t)at.kvh * a.page_tokens * hd) * 2;
    for (int i = s.lane * 128; i < 16 * hd * 2; i += 4096) {
        prefetch_l2(l.ks + first + i), prefetch_l2(l.vs + first + i);
    }
}

// ---- The step ----

enum { STEP_EPOCHS = 5 }; // of a layer

template <class F>
__device__ __forceinline__ Flow flow_of(const k_step &a, const Step &s, const k_layer &l, int ph,
                                        bool last) {
    Flow f = {};
    if (ph == 0) {
        f.x = a.h0, f.x_epoch = s.e, f.gamma = l.norm[0], f.out = a.qkv, f.out_epoch = s.e + 1;
    } else if (ph == 1) {
        f.x = a.att, f.x_epoch = s.e + 3, f.res = a.h0, f.res_epoch = s.e;
        f.out = a.h1, f.out_epoch = s.e + 4;
    } else if (ph == 2) {
        f.x = a.h1, f.x_epoch = s.e + 4, f.gamma = l.norm[1], f.out = a.glu, f.out_epoch = s.e + 4;
    } else {
        f.x = a.glu, f.x_epoch = s.e + 4, f.res = a.h1, f.res_epoch = s.e + 4;
        f.out = a.h0, f.out_epoch = s.e + STEP_EPOCHS, f.plain = last ? a.y : nullptr;
    }
    return f;
}

// Registers move from the warps that copy to those that compute: 168 a thread at launch, of which a
// CTA cannot have more in all (56 * 128 + 224 * 256 = 168 * 384).
__device__ __forceinline__ void few_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
#endif
}
__device__ __forceinline__ void many_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
#endif
}

template <class F, int HD, int NR, int SLOTS>
__device__ __forceinline__ void run_layers(const k_step &a, Step &s, Rings<F> &ring) {
    s.e = *(volatile uint32_t *)a.epoch + 1;
    s.pos = a.pos[0], s.range = a.tok_range[0], s.kv_slot = a.kv_slot[0];
    Place at = place_of(a, s);
    for (int i = blockIdx.x * STHREADS + threadIdx.x; i < a.n_embd; i += gridDim.x * STHREADS) {
        put_word(a.h0 + i, ldx(a.x + i), s.e);
    }
#pragma unroll 1
    for (int layer = 0; layer < a.n_layers; layer++, s.e += STEP_EPOCHS) {
        const k_layer &l = s.layers[layer];
        prefetch_state(a, s, at, l);
        if (layer + 1 < a.n_layers) prefetch_vectors(a, s.layers[layer + 1]);
#pragma unroll 1
        for (int ph = 0; ph < 4; ph++) {
            Product p = product_of<F>(a, ph);
            Flow f = flow_of<F>(a, s, l, ph, layer + 1 == a.n_layers);
            run_product<F, SLOTS>(a, s, ring, p, f, l);
            if (ph == 0) run_attention<HD, NR>(a, s, at, l);
        }
    }
    // All CTAs have read the old epoch: each wrote a part of what the last phase needed.
    if (blockIdx.x == 0 && threadIdx.x == 0) *(volatile uint32_t *)a.epoch = s.e;
}

template <class F, int HD, int NR, int SLOTS>
__device__ __forceinline__ void step_body(const k_step &a) {
    extern __shared__ __align__(128) uint8_t sm[];
    __shared__ uint4 zero;
    __shared__ uint64_t full[SWARPS * SLOTS], empty[SWARPS * SLOTS];
    const k_layer *layers = reinterpret_cast<const k_layer *>(sm + a.off_layers);
    uint32_t *table = reinterpret_cast<uint32_t *>(sm + a.off_layers);
    int n_words = a.n_layers * (int)(sizeof(k_layer) / 4), warp = threadIdx.x >> 5;
    for (int i = threadIdx.x; i < n_words; i += SBLOCK) {
        table[i] = __ldg(reinterpret_cast<const uint32_t *>(a.layers) + i);
    }
    if (threadIdx.x < SWARPS * SLOTS) {
        mbar_init(smem_addr(full + threadIdx.x), 1);
        mbar_init(smem_addr(empty + threadIdx.x), 1);
        mbar_init_fence();
    }
    if (threadIdx.x == 0) zero = make_uint4(0, 0, 0, 0);
    __syncthreads();
    dep_trigger();
    if (warp >= SWARPS) {
        few_registers();
        copy_weights<F, SLOTS>(a, layers, smem_addr(sm), smem_addr(full), smem_addr(empty));
        return;
    }
    many_registers();
    dep_wait();
    Step s;
    s.warp = warp, s.lane = threadIdx.x & 31;
    s.layers = layers, s.zero = smem_addr(&zero);
    s.xs = reinterpret_cast<uint4 *>(sm + a.off_xs);
    s.xm = reinterpret_cast<float *>(sm + a.off_xm);
    s.ds = reinterpret_cast<float *>(sm + a.off_d), s.ssqs = s.ds + SWARPS;
    s.part = reinterpret_cast<float *>(sm + a.off_part);
    s.slots = sm + warp * SLOTS * Rings<F>::SLOT;
    s.attn = sm + a.off_attn;
    s.slot = s.turn = s.batch = 0;
    Rings<F> ring = {smem_addr(full + warp * SLOTS), smem_addr(empty + warp * SLOTS), 0};
    run_layers<F, HD, NR, SLOTS>(a, s, ring);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL // the only devices it has run on
#define STEP_BODY(name, HD, NR) step_body<Fmt_##name, HD, NR, KSTEP_SLOTS>(a)
#else
#define STEP_BODY(name, HD, NR) (void)a
#endif
#define STEP(name, HD, NR)                                                                         \
    ENTRY __launch_bounds__(SBLOCK, 1) step_##name##_h##HD##_r##NR(PAR const k_step a) {           \
        STEP_BODY(name, HD, NR);                                                                   \
    }
#define STEPS(name)                                                                                \
    STEP(name, 64, 4)                                                                              \
    STEP(name, 64, 8)                                                                              \
    STEP(name, 128, 4)                                                                             \
    STEP(name, 128, 8)
