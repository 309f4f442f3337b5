// Conversions between float32 and the two 16-bit floats. Round to nearest even, NaN kept.
#ifndef MX_TENSOR_HALF_H
#define MX_TENSOR_HALF_H

#include <stdint.h>
#include <string.h>

static inline float mx_f32_from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t mx_f32_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float mx_bf16_to_f32(uint16_t h) {
    return mx_f32_from_bits((uint32_t)h << 16);
}
static inline uint16_t mx_f32_to_bf16(float f) {
    uint32_t u = mx_f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static inline float mx_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, mag = h & 0x7fffu;
    if (mag >= 0x7c00u) return mx_f32_from_bits(sign | 0x7f800000u | ((mag & 0x3ffu) << 13));
    if (mag >= 0x0400u) return mx_f32_from_bits(sign | ((mag << 13) + 0x38000000u));
    float f = (float)mag * 5.9604644775390625e-8f; // subnormal: mag * 2^-24, exact
    return sign ? -f : f;
}
static inline uint16_t mx_f32_to_f16(float f) {
    uint32_t u = mx_f32_bits(f), sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((u >> 13) & 0x3ffu));
    if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); // rounds to infinity
    if (u < 0x38800000u) {                                   // subnormal or zero
        float a = mx_f32_from_bits(u) + 0.5f;                // the adder rounds to 2^-24
        return (uint16_t)(sign | (mx_f32_bits(a) - 0x3f000000u));
    }
    u += 0xfffu + ((u >> 13) & 1u);
    return (uint16_t)(sign | ((u - 0x38000000u) >> 13));
}

#endif
