// Words: a number and the epoch in which it was written, in 8 bytes that are read and written as
// one. A reader knows by the epoch that the number is there; nothing is cleared and no barrier is
// needed. Epochs of a buffer only grow.
#pragma once
#include "dev.cuh"

typedef uint64_t word;

__device__ __forceinline__ void put_word(word *p, float v, uint32_t epoch) {
    word w = (word)__float_as_uint(v) | (word)epoch << 32;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(w) : "memory");
}
__device__ __forceinline__ word get_word(const word *p) {
    word w;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(w) : "l"(p) : "memory");
    return w;
}
// Two neighbours, 16-byte aligned; each is whole.
__device__ __forceinline__ void get_words(const word *p, word &a, word &b) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(a), "=l"(b)
                 : "l"(p)
                 : "memory");
}
__device__ __forceinline__ uint32_t epoch_of(word w) {
    return (uint32_t)(w >> 32);
}
__device__ __forceinline__ float number_of(word w) {
    return __uint_as_float((uint32_t)w);
}
// The number, once it is there.
__device__ __forceinline__ float wait_word(const word *p, uint32_t epoch) {
    word w = get_word(p);
    while (epoch_of(w) != epoch) w = get_word(p);
    return number_of(w);
}
