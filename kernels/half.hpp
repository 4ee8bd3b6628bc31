// fp16 and bf16 as 16-bit patterns: conversion by round-to-nearest-even, the same bits on every machine.
#pragma once
#include <cstdint>
#include <cstring>

inline uint32_t bits_of(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float float_of(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }

inline float fp16_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | (magnitude << 13));
    if (magnitude < 0x0400u) {  // zero or subnormal: magnitude * 2^-24 is exact in fp32
        const float x = float(magnitude) * 5.9604644775390625e-08f;
        return float_of(sign | bits_of(x));
    }
    return float_of(sign | ((magnitude << 13) + 0x38000000u));
}

inline uint16_t float_to_fp16(float x) {
    const uint32_t u = bits_of(x), magnitude = u & 0x7fffffffu;
    const uint16_t sign = uint16_t((u >> 16) & 0x8000u);
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;
    if (magnitude >= 0x47800000u) return sign | 0x7c00u;  // 65536 and above, infinity
    if (magnitude < 0x38800000u) {                        // below 2^-14: let fp32 addition round to units of 2^-24
        const uint32_t rounded = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
        return sign | uint16_t(rounded);
    }
    return sign | uint16_t((magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13);
}

inline float bf16_to_float(uint16_t h) { return float_of(uint32_t(h) << 16); }

inline uint16_t float_to_bf16(float x) {
    const uint32_t u = bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40u);
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// Rounds to the nearest finite value: an infinity in a published gradient could never be corrected.
inline uint16_t float_to_finite_fp16(float x) {
    const uint16_t h = float_to_fp16(x);
    return (h & 0x7fffu) == 0x7c00u ? uint16_t((h & 0x8000u) | 0x7bffu) : h;
}
inline uint16_t float_to_finite_bf16(float x) {
    const uint16_t h = float_to_bf16(x);
    return (h & 0x7fffu) == 0x7f80u ? uint16_t((h & 0x8000u) | 0x7f7fu) : h;
}
