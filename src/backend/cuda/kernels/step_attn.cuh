// Part of step.cuh: attention of one token among the CTAs of a group of heads. Each takes splits of
// the context (attn.cuh has the arithmetic), sends its partial results as words, and merges a share
// of the group's numbers.
#pragma once
#include "attn.cuh"
#include "step_product.cuh"
#include "turn.cuh"

enum { ATTN_HELD = 2048 + 256 }; // numbers of partial results that a CTA merges at once

// Dynamic shared memory of attention.
template <int HD, int NR> struct AttnShared {
    float q[NR][HD];
    float turn[SWARPS][HD];
    uint4 sq[2][HD / 32][32];
    float w[NR][MAX_PARTS];
    float held[ATTN_HELD];
    float so[SWARPS * PART_FLOATS(NR, HD)];
};

// What this warp does in attention: the same in every layer.
struct Place {
    bool in, pad;      // has a part in it; the token is padding
    int kvh, j, n_cta; // KV head; place among the CTAs of its group, how many they are
    int active, split; // splits there are; this warp's, >= active: none
    int c0, c1;        // its tokens
    bool owner;        // the CTA that has the new position
    Span sp;
    int64_t first; // where its first rows are in the state, in elements of the head
};
__device__ __forceinline__ Place place_of(const k_step &a, const Step &s) {
    Place p;
    p.n_cta = a.n_split / 2;
    p.kvh = blockIdx.x % a.n_kv_head, p.j = blockIdx.x / a.n_kv_head;
    p.in = p.j < p.n_cta, p.pad = s.range < 0;
    p.sp = visible(a.window, s.pos);
    int len = p.sp.end - p.sp.lo, per = split_tokens(len, a.n_split);
    p.active = (len + per - 1) / per;
    p.split = (s.warp >> 2) * p.n_cta + p.j;
    p.owner = (s.pos - p.sp.lo) / per % p.n_cta == p.j;
    p.c0 = p.sp.lo + p.split * per, p.c1 = p.split < p.active ? min(p.c0 + per, p.sp.end) : 0;
    int q = p.c0 + (s.warp & 3) * 16, page = 0;
    if (p.in && !p.pad && q < p.c1) {
        page = max(0, a.page_table[(int64_t)s.range * a.max_pages + (q >> a.page_shift)]);
    }
    p.first = (int64_t)page * a.n_kv_head * a.page_tokens * a.head_dim +
              (int64_t)(q & ((1 << a.page_shift) - 1)) * a.head_dim;
    return p;
}

// Rotated q of the group's heads to shared memory; the owner of the new position also writes its k
// and v to the state.
template <int HD, int NR>
__device__ __forceinline__ void turn_group(const k_step &a, const Step &s, const k_layer &l,
                                           AttnShared<HD, NR> &sh, const Place &at,
                                           uint32_t epoch) {
    int lane = s.lane, hd = a.head_dim, n = a.n_rep + (at.owner ? 2 : 0), slot = s.kv_slot;
    for (int h = s.warp; h < n; h += SWARPS) {
        bool is_q = h < a.n_rep, is_v = h == a.n_rep + 1;
        int from = is_q ? (at.kvh * a.n_rep + h) * hd : a.n_q + (is_v ? a.n_kv : 0) + at.kvh * hd;
        const word *x = a.qkv + from;
        Turn turn = {hd,
                     a.n_rot,
                     a.interleaved,
                     a.head_eps,
                     is_q ? l.qn : is_v ? nullptr : l.kn,
                     is_v ? nullptr : a.cs};
        int64_t to =
            is_q || slot < 0 ? 0 : state_index(slot, at.kvh, a.n_kv_head, a.page_tokens, hd);
        auto load = [&](int d0, float *v) {
            bool ok;
            do {
                word w[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int d = d0 + i * 32 + lane;
                    w[i] = d < hd ? get_word(x + d) : (word)epoch << 32;
                }
                ok = true;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    ok = ok && epoch_of(w[i]) == epoch;
                    v[i] = number_of(w[i]);
                }
            } while (!ok);
            __syncwarp();
        };
        turn_head(turn, sh.turn[s.warp], lane, load, [&](int d, float v) {
            if (is_q) {
                sh.q[h][d] = v;
            } else if (slot >= 0) {
                store_kv(is_v ? l.vs : l.ks, to + d, v, KTYPE_F16);
            }
        });
        __syncwarp();
    }
}

// Merges this CTA's share of the group's numbers over `active` splits.
template <int HD, int NR>
__device__ __forceinline__ void merge_group(const k_step &a, const Step &s, AttnShared<HD, NR> &sh,
                                            const Place &at, uint32_t epoch) {
    int active = at.active;
    int hd = a.head_dim, all = a.n_rep * hd, share = (all + at.n_cta - 1) / at.n_cta;
    int i0 = at.j * share, n = min(share, all - i0), stride = PART_FLOATS(NR, hd);
    const word *part = a.part + (size_t)at.kvh * a.n_split * stride;
    if (n > 0) {
        int h0 = i0 / hd, h1 = (i0 + n - 1) / hd;
        for (int h = h0 + s.warp; h <= h1; h += SWARPS) {
            float m[2], l[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int k = s.lane + 32 * i;
                const word *p = part + (size_t)k * stride + NR * hd + 2 * h;
                m[i] = k < active ? wait_word(p, epoch) : -1e30f;
                l[i] = k < active ? wait_word(p + 1, epoch) : 0.f;
            }
            __syncwarp();
            split_weights(m, l, active, s.lane, sh.w[h]);
        }
        // Thread (k, d): one division, then steps of whole rows where they fit.
        int k = threadIdx.x / n, d = threadIdx.x - k * n, rows = STHREADS / n;
        if (rows > 0) {
            if (k < rows) {
#pragma unroll 1
                for (; k < active; k += 4 * rows) {
                    word w[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        if (k + i * rows < active) {
                            w[i] = get_word(part + (size_t)(k + i * rows) * stride + i0 + d);
                        }
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int r = k + i * rows;
                        if (r >= active) continue;
                        sh.held[r * n + d] =
                            epoch_of(w[i]) == epoch
                                ? number_of(w[i])
                                : wait_word(part + (size_t)r * stride + i0 + d, epoch);
                    }
                }
            }
        } else {
            for (int i = threadIdx.x; i < n * active; i += STHREADS) {
                int r = i / n;
                sh.held[i] = wait_word(part + (size_t)r * stride + i0 + i - r * n, epoch);
            }
        }
    }
    meet();
    for (int i = threadIdx.x; i < n; i += STHREADS) {
        const float *w = sh.w[(i0 + i) / hd];
        float x = 0.f;
#pragma unroll 8
        for (int k = 0; k < active; k++) x = fmaf(w[k], sh.held[k * n + i], x);
        put_word(a.att + (size_t)at.kvh * all + i0 + i, x, epoch + 1);
    }
}

// The splits of this CTA, each added up over its warps, to the CTAs of the group; the only split of
// all to the result.
template <int HD, int NR>
__device__ __forceinline__ void send_parts(const k_step &a, const Step &s,
                                           const AttnShared<HD, NR> &sh, const Place &at, int all) {
    int hd = a.head_dim, stride = PART_FLOATS(NR, hd);
    bool two = at.n_cta + at.j < at.active; // both halves have a split
    int half = two ? s.warp >> 2 : 0, n = two ? 128 : STHREADS;
    const float *so = sh.so + half * NW * stride;
    if (at.active == 1) {
        word *y = a.att + (size_t)at.kvh * all;
        merge_warps<NR>(so, hd, a.n_rep, threadIdx.x, n,
                        [&](int i, bool, int, float, float l, float x) {
                            put_word(y + i, l > 0.f ? x / l : 0.f, s.e + 3);
                        });
        return;
    }
    int split = half * at.n_cta + at.j;
    word *mine = a.part + ((size_t)at.kvh * a.n_split + split) * stride;
    merge_warps<NR>(so, hd, a.n_rep, threadIdx.x & (n - 1), n,
                    [&](int i, bool first, int h, float m, float l, float x) {
                        put_word(mine + i, x, s.e + 2);
                        if (!first) return;
                        put_word(mine + NR * hd + 2 * h, m, s.e + 2);
                        put_word(mine + NR * hd + 2 * h + 1, l, s.e + 2);
                    });
}

// Epochs: q, k, v have s.e + 1, partial results s.e + 2, the result s.e + 3.
template <int HD, int NR>
__device__ __forceinline__ void run_attention(const k_step &a, const Step &s, const Place &at,
                                              const k_layer &l) {
    AttnShared<HD, NR> &sh = *reinterpret_cast<AttnShared<HD, NR> *>(s.attn);
    int hd = a.head_dim, all = a.n_rep * hd;
    if (!at.in) return;
    if (at.pad) {
        for (int i = at.j * STHREADS + threadIdx.x; i < all; i += at.n_cta * STHREADS) {
            put_word(a.att + (size_t)at.kvh * all + i, 0.f, s.e + 3);
        }
        return;
    }
    // A CTA without a split of its own does not look at q: nothing would keep q from being
    // overwritten meanwhile. It may still have a share of the merge, which others wait for.
    if (at.j >= at.active) {
        if (at.active > 1) {
            merge_group<HD, NR>(a, s, sh, at, s.e + 2);
            meet();
        }
        return;
    }
    int64_t of_head = (int64_t)at.kvh * a.page_tokens * hd;
    Paged paged = {reinterpret_cast<const __half *>(l.ks) + of_head,
                   reinterpret_cast<const __half *>(l.vs) + of_head,
                   a.page_table + (int64_t)s.range * a.max_pages,
                   (int64_t)a.n_kv_head * a.page_tokens * hd,
                   a.page_shift,
                   hd};
    Tiles<HD, NR> w;
    w.start(paged, at.sp, at.c0, at.c1, s.warp & 3, at.first);
    bool any = w.p < w.c1, early = any && w.p + 16 <= s.pos;
    if (early) w.load_first();
    turn_group<HD, NR>(a, s, l, sh, at, s.e + 1);
    meet();
    if (!early && any) w.load_first();
    float qs = a.softcap > 0.f ? a.scale : a.scale * LOG2E;
    if (s.warp < HD / 32) {
        pack_q<HD>(sh.sq, s.warp, a.n_rep, hd, qs, s.lane,
                   [&](int h, int d) { return sh.q[h][d]; });
    }
    meet();
    w.run(sh.sq, a.softcap);
    if (any)
        w.put(sh.so + s.warp * PART_FLOATS(NR, hd), a.n_rep);
    else
        w.put_none(sh.so + s.warp * PART_FLOATS(NR, hd), a.n_rep);
    meet();
    send_parts<HD, NR>(a, s, sh, at, all);
    if (at.active > 1) merge_group<HD, NR>(a, s, sh, at, s.e + 2);
    meet(); // before activations are written over it
}
