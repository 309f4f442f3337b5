// A packed weight format: how a block (16 rows x KB columns) becomes tensor-core operands.
//
// Lane (g = lane / 4, t = lane % 4) of a warp owns rows g and g + 8. In every run of 16 columns it
// owns columns 4t .. 4t+3, for weights and activations alike, so that a product needs no shuffle:
//   4-bit codes   64 columns: 16 bytes a lane {row g: columns 0-31, 32-63; row g+8: the same};
//                 byte b of a word: low nibble column 4t+b, high nibble column 16+4t+b
//   5, 6-bit      the same, and a plane of the high bits (see high_bits)
//   8-bit codes   32 columns: 16 bytes a lane {g, cols 0-15; g+8, 0-15; g, 16-31; g+8, 16-31}
//   16-bit floats 16 columns: 16 bytes a lane {g: 4t,4t+1; g+8: 4t,4t+1; g: 4t+2,+3; g+8: 4t+2,+3}
// Scales follow the codes, rows g and g+8 side by side.
#pragma once
#include "dev.cuh"

template <int BITS_, int GROUP_, int KB_, int SC_, int BF_> struct Fmt {
    static constexpr int BITS = BITS_, GROUP = GROUP_, KB = KB_, SC = SC_;
    static constexpr bool FLOAT = BITS_ == 16, BF = BF_ != 0;
    static constexpr int CODES = KPACK_CODE_BYTES(BITS_, KB_);
    static constexpr int HIGH = BITS_ == 16 ? 0 : KB_ * 8; // offset of the plane of high bits
    static constexpr int BYTES = CODES + KPACK_SCALE_BYTES((GROUP_ ? GROUP_ : 1), KB_, SC_);
    static constexpr int SLOT_KB = KPACK_SLOT_KB(BYTES);
    static constexpr int XG = GROUP_ ? GROUP_ : 32; // columns of one activation sum
    static constexpr int OFFSET = BITS_ == 16 ? 0 : 1 << (BITS_ - 1);
    static constexpr int D = 256; // K45, K6: float16 d, from the scales' start
};

#define PACK(ID, name, bits, group, kb, sc)                                                        \
    using Fmt_##name = Fmt<bits, group, kb, sc, KPACK_##ID == KPACK_B16>;
MX_CUDA_PACKS(PACK)
#undef PACK

// High bits of 4 codes, in place in 4 bytes. i = run of 64 columns, h = its half, rh = row half,
// q = run of 16 columns within the 32.
template <class F>
__device__ __forceinline__ uint32_t high_bits(uint32_t w0, uint32_t w1, int h, int rh, int q) {
    if (F::BITS == 5) {
        int s = h * 4 + rh * 2 + q;
        return (s <= 4 ? w0 << (4 - s) : w0 >> (s - 4)) & 0x10101010u;
    }
    int s = 2 * (rh * 2 + q);
    uint32_t w = h ? w1 : w0;
    return (s <= 4 ? w << (4 - s) : w >> (s - 4)) & 0x30303030u;
}

// The codes of 16 rows x 32 columns (run blk of the block) as u8 operands a[4].
template <class F> struct Codes {
    uint4 q;
    uint32_t w0, w1;
    __device__ __forceinline__ void load(const uint8_t *tile, int i, int lane) {
        if (F::BITS == 8) return;
        q = *reinterpret_cast<const uint4 *>(tile + i * 512 + lane * 16);
        if (F::BITS == 5) {
            w0 = *reinterpret_cast<const uint32_t *>(tile + F::HIGH + i * 128 + lane * 4);
        }
        if (F::BITS == 6) {
            uint2 v = *reinterpret_cast<const uint2 *>(tile + F::HIGH + i * 256 + lane * 8);
            w0 = v.x, w1 = v.y;
        }
    }
    __device__ __forceinline__ void get(const uint8_t *tile, int i, int h, int lane, uint32_t *a) {
        if (F::BITS == 8) {
            uint4 v = *reinterpret_cast<const uint4 *>(tile + (i * 2 + h) * 512 + lane * 16);
            a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
            return;
        }
        const uint32_t m = 0x0f0f0f0fu;
        uint32_t r0 = h ? q.y : q.x, r1 = h ? q.w : q.z;
        a[0] = r0 & m, a[1] = r1 & m, a[2] = (r0 >> 4) & m, a[3] = (r1 >> 4) & m;
        if (F::BITS == 5 || F::BITS == 6) {
            a[0] |= high_bits<F>(w0, w1, h, 0, 0), a[1] |= high_bits<F>(w0, w1, h, 1, 0);
            a[2] |= high_bits<F>(w0, w1, h, 0, 1), a[3] |= high_bits<F>(w0, w1, h, 1, 1);
        }
    }
    // 4-bit codes: all low nibbles of the 64 columns (runs 0 and 2 of 16), or all high ones (1, 3).
    __device__ __forceinline__ void nibbles(bool high, uint32_t *a) {
        const uint32_t m = 0x0f0f0f0fu;
        int s = high ? 4 : 0;
        a[0] = (q.x >> s) & m, a[1] = (q.z >> s) & m, a[2] = (q.y >> s) & m, a[3] = (q.w >> s) & m;
    }
};

// Scale and bias of rows g and g + 8 for scale group `grp` of the block.
struct Scale2 {
    float s0, b0, s1, b1;
};
template <class F>
__device__ __forceinline__ Scale2 scales(const uint8_t *tile, int grp, int g, int bf) {
    const uint8_t *sc = tile + F::CODES;
    Scale2 r;
    if (F::SC == KSC_PAIR) {
        uint2 v = *reinterpret_cast<const uint2 *>(sc + grp * 64 + g * 8);
        if (bf) {
            r.s0 = bf_lo(v.x), r.b0 = bf_hi(v.x), r.s1 = bf_lo(v.y), r.b1 = bf_hi(v.y);
        } else {
            r.s0 = h_lo(v.x), r.b0 = h_hi(v.x), r.s1 = h_lo(v.y), r.b1 = h_hi(v.y);
        }
    } else if (F::SC == KSC_SYM) {
        uint32_t v = *reinterpret_cast<const uint32_t *>(sc + grp * 32 + g * 4);
        r.s0 = h_lo(v), r.s1 = h_hi(v);
        r.b0 = -(float)F::OFFSET * r.s0, r.b1 = -(float)F::OFFSET * r.s1;
    } else if (F::SC == KSC_K45) {
        uint32_t v = *reinterpret_cast<const uint32_t *>(sc + grp * 32 + g * 4);
        uint2 d = *reinterpret_cast<const uint2 *>(sc + F::D + g * 8);
        r.s0 = h_lo(d.x) * (float)(v & 255), r.b0 = -h_hi(d.x) * (float)((v >> 8) & 255);
        r.s1 = h_lo(d.y) * (float)((v >> 16) & 255), r.b1 = -h_hi(d.y) * (float)(v >> 24);
    } else { // K6: grp counts 16 columns
        uint32_t v = *reinterpret_cast<const uint32_t *>(sc + (grp >> 1) * 32 + g * 4);
        uint32_t d = *reinterpret_cast<const uint32_t *>(sc + F::D + g * 4);
        if (grp & 1) v >>= 8;
        r.s0 = h_lo(d) * (float)(int8_t)(v & 255);
        r.s1 = h_hi(d) * (float)(int8_t)((v >> 16) & 255);
        r.b0 = -32.f * r.s0, r.b1 = -32.f * r.s1;
    }
    return r;
}
