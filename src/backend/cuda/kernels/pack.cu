// Weights: from the checkpoint's rows to packed blocks, back to rows, and the embedding.
#include "fmt.cuh"

// Numbers of mx_dtype, in the order of tensor/tensor.h (checked by the host).
enum {
    D_F32 = 0,
    D_F16,
    D_BF16,
    D_Q4_0 = 13,
    D_Q4_1,
    D_Q5_0,
    D_Q5_1,
    D_Q8_0,
    D_Q4_K,
    D_Q5_K,
    D_Q6_K,
    D_AFFINE
};

__device__ __forceinline__ uint32_t u16_at(const uint8_t *p) {
    return p[0] | (uint32_t)p[1] << 8;
}

// The code of one weight, unsigned (Q8_0: plus 128).
__device__ uint32_t source_code(const k_pack &a, int64_t row, int col) {
    const uint8_t *r = a.data + row * a.row_bytes;
    int i = col % 32;
    switch (a.src) {
    case D_Q4_0: {
        uint8_t v = r[col / 32 * 18 + 2 + i % 16];
        return i < 16 ? v & 15 : v >> 4;
    }
    case D_Q4_1: {
        uint8_t v = r[col / 32 * 20 + 4 + i % 16];
        return i < 16 ? v & 15 : v >> 4;
    }
    case D_Q5_0: {
        const uint8_t *b = r + col / 32 * 22;
        uint8_t v = b[6 + i % 16];
        return (i < 16 ? v & 15 : v >> 4) | (b[2 + i / 8] >> (i % 8) & 1) << 4;
    }
    case D_Q5_1: {
        const uint8_t *b = r + col / 32 * 24;
        uint8_t v = b[8 + i % 16];
        return (i < 16 ? v & 15 : v >> 4) | (b[4 + i / 8] >> (i % 8) & 1) << 4;
    }
    case D_Q8_0: return r[col / 32 * 34 + 2 + i] ^ 0x80u;
    case D_Q4_K:
    case D_Q5_K: {
        bool five = a.src == D_Q5_K;
        const uint8_t *b = r + col / 256 * (five ? 176 : 144);
        int s = col % 256 / 32;
        uint32_t c = b[16 + (five ? 32 : 0) + s / 2 * 32 + i] >> (s % 2 * 4) & 15;
        if (five) c |= (b[16 + i] >> s & 1) << 4;
        return c;
    }
    case D_Q6_K: {
        const uint8_t *b = r + col / 256 * 210;
        int j = col % 256, h = j / 128, q = j % 128;
        return (b[h * 64 + q % 64] >> (q / 64 * 4) & 15) |
               (b[128 + h * 32 + q % 32] >> (q / 32 * 2) & 3) << 4;
    }
    case D_AFFINE:
        if (a.bits == 8) return r[col];
        return r[col >> 1] >> ((col & 1) * 4) & 15;
    default: return 0;
    }
}

// 16-bit scale and bias of one row and group (PAIR), or the scale (SYM).
__device__ uint32_t source_scale(const k_pack &a, int64_t row, int grp) {
    const uint8_t *r = a.data + row * a.row_bytes;
    switch (a.src) {
    case D_Q4_0: return u16_at(r + (int64_t)grp * 18);
    case D_Q5_0: return u16_at(r + (int64_t)grp * 22);
    case D_Q8_0: return u16_at(r + (int64_t)grp * 34);
    case D_Q4_1: return u16_at(r + (int64_t)grp * 20) | u16_at(r + (int64_t)grp * 20 + 2) << 16;
    case D_Q5_1: return u16_at(r + (int64_t)grp * 24) | u16_at(r + (int64_t)grp * 24 + 2) << 16;
    default: {
        int64_t o = row * a.scale_row_bytes + 2 * (int64_t)grp;
        return u16_at(a.scales + o) | u16_at(a.biases + o) << 16;
    }
    }
}

// 6-bit scale and min of sub-block s of a q4_k or q5_k block.
__device__ __forceinline__ uint32_t k_scale(const uint8_t *sc, int s) {
    uint32_t d, m;
    if (s < 4) {
        d = sc[s] & 63, m = sc[s + 4] & 63;
    } else {
        d = (sc[s + 4] & 15) | (sc[s - 4] >> 6) << 4;
        m = sc[s + 4] >> 4 | (sc[s] >> 6) << 4;
    }
    return d | m << 8;
}

template <class F> __device__ uint32_t code_word(const k_pack &a, int64_t row0, int col0, int i) {
    auto code = [&](int r, int c) -> uint32_t {
        int64_t row = row0 + r;
        return row < a.n_rows && col0 + c < a.n_cols ? source_code(a, row, col0 + c) : 0;
    };
    uint32_t w = 0;
    if (F::BITS == 8) {
        int lane = i % 128 / 4, comp = i % 4;
        for (int b = 0; b < 4; b++) {
            w |= code(lane / 4 + (comp & 1) * 8, i / 128 * 32 + (comp >> 1) * 16 + lane % 4 * 4 + b)
                 << (8 * b);
        }
        return w;
    }
    if (i < F::KB * 2) { // low nibbles
        int lane = i % 128 / 4, comp = i % 4, r = lane / 4 + (comp >> 1) * 8;
        int c = i / 128 * 64 + (comp & 1) * 32 + lane % 4 * 4;
        for (int b = 0; b < 4; b++) {
            w |= (code(r, c + b) & 15) << (8 * b) | (code(r, c + 16 + b) & 15) << (8 * b + 4);
        }
        return w;
    }
    i -= F::KB * 2;
    bool five = F::BITS == 5;
    int run = five ? i / 32 : i / 64, lane = five ? i % 32 : i % 64 / 2;
    for (int h = five ? 0 : i % 2; h < (five ? 2 : i % 2 + 1); h++) {
        for (int rh = 0; rh < 2; rh++) {
            for (int q = 0; q < 2; q++) {
                for (int b = 0; b < 4; b++) {
                    uint32_t c =
                        code(lane / 4 + rh * 8, run * 64 + h * 32 + q * 16 + lane % 4 * 4 + b);
                    w |= five ? (c >> 4 & 1) << (8 * b + h * 4 + rh * 2 + q)
                              : (c >> 4 & 3) << (8 * b + 2 * (rh * 2 + q));
                }
            }
        }
    }
    return w;
}

template <class F> __device__ uint32_t scale_word(const k_pack &a, int64_t row0, int col0, int i) {
    auto in = [&](int r) { return row0 + r < a.n_rows; };
    if (F::SC == KSC_PAIR) {
        int grp = i / 16, g = i % 16 / 2, r = g + (i % 2) * 8;
        if (!in(r) || col0 + grp * F::GROUP >= a.n_cols) return 0;
        return source_scale(a, row0 + r, col0 / F::GROUP + grp);
    }
    if (F::SC == KSC_SYM) {
        int grp = i / 8, g = i % 8;
        if (col0 + grp * F::GROUP >= a.n_cols) return 0;
        uint32_t lo = in(g) ? source_scale(a, row0 + g, col0 / F::GROUP + grp) : 0;
        uint32_t hi = in(g + 8) ? source_scale(a, row0 + g + 8, col0 / F::GROUP + grp) : 0;
        return lo | hi << 16;
    }
    if (col0 >= a.n_cols) return 0;
    int64_t blk = col0 / 256;
    if (F::SC == KSC_K45) {
        int size = a.src == D_Q5_K ? 176 : 144;
        if (i < 64) {
            int grp = i / 8, g = i % 8;
            uint32_t lo = 0, hi = 0;
            if (in(g)) lo = k_scale(a.data + (row0 + g) * a.row_bytes + blk * size + 4, grp);
            if (in(g + 8))
                hi = k_scale(a.data + (row0 + g + 8) * a.row_bytes + blk * size + 4, grp);
            return lo | hi << 16;
        }
        int r = (i - 64) / 2 + (i % 2) * 8;
        if (!in(r)) return 0;
        const uint8_t *b = a.data + (row0 + r) * a.row_bytes + blk * size;
        return u16_at(b) | u16_at(b + 2) << 16;
    }
    if (i < 64) { // K6
        int run = i / 8, g = i % 8;
        uint32_t w = 0;
        for (int rh = 0; rh < 2; rh++) {
            if (!in(g + rh * 8)) continue;
            const uint8_t *b = a.data + (row0 + g + rh * 8) * a.row_bytes + blk * 210 + 192;
            w |= (uint32_t)b[run * 2] << (16 * rh) | (uint32_t)b[run * 2 + 1] << (16 * rh + 8);
        }
        return w;
    }
    int g = i - 64;
    uint32_t lo = 0, hi = 0;
    if (in(g)) lo = u16_at(a.data + (row0 + g) * a.row_bytes + blk * 210 + 208);
    if (in(g + 8)) hi = u16_at(a.data + (row0 + g + 8) * a.row_bytes + blk * 210 + 208);
    return lo | hi << 16;
}

template <class F> __device__ uint32_t float_word(const k_pack &a, int64_t row0, int col0, int i) {
    int lane = i % 128 / 4, comp = i % 4;
    int64_t row = row0 + lane / 4 + (comp & 1) * 8;
    int c = col0 + i / 128 * 16 + lane % 4 * 4 + (comp >> 1) * 2;
    if (row >= a.n_rows) return 0;
    const uint8_t *p = a.data + row * a.row_bytes + 2 * (int64_t)c;
    return (c < a.n_cols ? u16_at(p) : 0) | (c + 1 < a.n_cols ? u16_at(p + 2) : 0) << 16;
}

template <class F> __device__ __forceinline__ void pack_body(const k_pack &a) {
    dep_wait();
    const int words = F::BYTES / 4;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < a.n_words;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t blk = i / words;
        int w = (int)(i % words);
        int64_t row0 = blk / a.n_kb * 16;
        int col0 = (int)(blk % a.n_kb) * F::KB;
        uint32_t v;
        if constexpr (F::FLOAT) {
            v = float_word<F>(a, row0, col0, w);
        } else {
            v = w < F::CODES / 4 ? code_word<F>(a, row0, col0, w)
                                 : scale_word<F>(a, row0, col0, w - F::CODES / 4);
        }
        a.out[i] = v;
    }
}

#define PACK(ID, name, bits, group, kb, sc)                                                        \
    ENTRY pack_##name(PAR const k_pack a) {                                                        \
        pack_body<Fmt_##name>(a);                                                                  \
    }
MX_CUDA_PACKS(PACK)
#undef PACK

// ---- Reading single weights ----

template <class F>
__device__ float packed_at(const uint8_t *w, int n_kb, int bf, int64_t row, int col) {
    const uint8_t *tile = w + ((row / 16) * n_kb + col / F::KB) * (int64_t)F::BYTES;
    int r = (int)(row % 16), g = r % 8, rh = r / 8, c = col % F::KB;
    int q = c % 32 / 16, t = c % 16 / 4, b = c % 4, lane = g * 4 + t;
    if (F::FLOAT) {
        uint32_t v =
            u16_at(tile + c / 16 * 512 + lane * 16 + (rh + (b >> 1) * 2) * 4 + (b & 1) * 2);
        return from16(v, F::BF ? KTYPE_BF16 : KTYPE_F16);
    }
    uint32_t code;
    if (F::BITS == 8) {
        code = tile[c / 32 * 512 + lane * 16 + (rh + q * 2) * 4 + b];
    } else {
        int i = c / 64, h = c % 64 / 32;
        uint8_t v = tile[i * 512 + lane * 16 + (rh * 2 + h) * 4 + b];
        code = q ? v >> 4 : v & 15;
        if (F::BITS == 5) {
            code |= (tile[F::HIGH + i * 128 + lane * 4 + b] >> (h * 4 + rh * 2 + q) & 1) << 4;
        }
        if (F::BITS == 6) {
            code |= (tile[F::HIGH + i * 256 + lane * 8 + h * 4 + b] >> (2 * (rh * 2 + q)) & 3) << 4;
        }
    }
    Scale2 s = scales<F>(tile, c / F::XG, g, bf);
    return rh ? fmaf(s.s1, (float)code, s.b1) : fmaf(s.s0, (float)code, s.b0);
}

__device__ float rows_at(const k_rows &w, int64_t row, int col) {
    const uint8_t *r = w.data + row * w.row_bytes;
    if (w.type == KTYPE_F32) return *reinterpret_cast<const float *>(r + 4 * (int64_t)col);
    if (w.type != KTYPE_AFFINE) return from16(u16_at(r + 2 * (int64_t)col), w.type);
    int64_t at = (int64_t)col * w.bits;
    uint32_t v = r[at >> 3] >> (at & 7);
    if ((at & 7) + w.bits > 8) v |= (uint32_t)r[(at >> 3) + 1] << (8 - (at & 7));
    v &= (1u << w.bits) - 1;
    int64_t grp = col / w.group;
    const uint8_t *s = w.scales + row * w.scale_row_bytes, *b = w.biases + row * w.scale_row_bytes;
    if (w.scale_type == KTYPE_F32) {
        return fmaf(reinterpret_cast<const float *>(s)[grp], (float)v,
                    reinterpret_cast<const float *>(b)[grp]);
    }
    return fmaf(from16(u16_at(s + 2 * grp), w.scale_type), (float)v,
                from16(u16_at(b + 2 * grp), w.scale_type));
}

__device__ float weight_at(const k_weight &w, int64_t row, int col) {
    switch (w.pack) {
#define PACK(ID, name, bits, group, kb, sc)                                                        \
    case KPACK_##ID: return packed_at<Fmt_##name>(w.w, w.n_kb, w.scale_type, row, col);
        MX_CUDA_PACKS(PACK)
#undef PACK
    default: return rows_at(w.rows, row, col);
    }
}

ENTRY embed(PAR const k_embed a) {
    dep_trigger();
    dep_wait();
    int row = blockIdx.x;
    int id = a.tok_range[row] < 0 ? -1 : a.ids[row];
    if (a.tok_range[row] >= 0 && id < 0) id = __ldcg(a.out_id + (-1 - id));
    bool ok = id >= 0 && id < a.n_vocab;
    for (int c = threadIdx.x; c < a.n_cols; c += blockDim.x) {
        a.y[(int64_t)row * a.ldy + c] = ok ? weight_at(a.w, id, c) * a.scale : 0.f;
    }
}

// Plain product for formats that are not packed: 4 rows x 8 tokens a warp-row, float32.
ENTRY __launch_bounds__(256) mm_rows(PAR const k_mm_rows a) {
    dep_trigger();
    dep_wait();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int row = blockIdx.x * 8 + warp, tok0 = blockIdx.y * 8;
    if (row >= a.n_rows) return;
    int n = min(8, a.n_tok - tok0);
    float acc[8];
#pragma unroll
    for (int k = 0; k < 8; k++) acc[k] = 0.f;
    for (int c = lane; c < a.n_cols; c += 32) {
        float w = rows_at(a.w, row, c);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (k < n) acc[k] = fmaf(w, ldx(a.x + (int64_t)(tok0 + k) * a.ldx + c), acc[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float v = warp_sum(acc[k]);
        if (k < n && lane == 0) {
            if (a.bias) v += a.bias[row];
            if (a.res) v += ldx(a.res + (int64_t)(tok0 + k) * a.ldr + row);
            a.y[(int64_t)(tok0 + k) * a.ldy + row] = v;
        }
    }
}
