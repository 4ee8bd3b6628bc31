// Kernels of the lossy codecs: one float32 scale per group of 256 values, rounding to nearest even.
#pragma once
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include "half.hpp"

constexpr int64_t GROUP = 256;

// The bits of |x| are ordered like |x|, and integer maxima vectorize.
inline float largest(const float* x, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; ++i) most = std::max(most, int32_t(bits_of(x[i]) & 0x7fffffff));
    return float_of(uint32_t(most));
}

// Rounds to the nearest integer, ties to even, for |x| < 2^22: the sum has no fraction bits.
inline float whole(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

// HDF5's checksum: running sums of big-endian 16-bit words modulo 65535, 0 only for 0; an odd last byte is a high byte.
inline uint32_t fletcher32(const uint8_t* data, int64_t nbytes) {
    uint64_t one = 0, two = 0;
    bool any = false;
    for (int64_t left = nbytes / 2; left > 0;) {
        const int64_t count = std::min<int64_t>(left, 4096);
        uint64_t sum = 0, weighted = 0;
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t word = uint32_t(data[2 * i]) << 8 | data[2 * i + 1];
            sum += word;
            weighted += uint64_t(uint32_t(count - i) * word);  // below 2^28
        }
        two = (two + one * uint64_t(count) + weighted) % 65535;
        one = (one + sum) % 65535;
        any |= sum != 0;
        data += 2 * count;
        left -= count;
    }
    if (nbytes % 2) {
        any |= *data != 0;
        one = (one + (uint64_t(*data) << 8)) % 65535;
        two = (two + one) % 65535;
    }
    const auto fold = [any](uint64_t x) { return uint32_t(any && x == 0 ? 65535 : x); };
    return fold(two) << 16 | fold(one);
}

// Sends q * scale in float32; x becomes the rounding error, which is exact: x and q * scale are within a factor of two of each
// other, or q is 0.
inline void encode_int8(float* x, int64_t n, float* scales, int8_t* q) {
    for (int64_t g = 0; g * GROUP < n; ++g, x += GROUP, q += GROUP) {
        const int64_t count = std::min(GROUP, n - g * GROUP);
        const float scale = scales[g] = std::min(largest(x, count) / 127.0f, 0x1.020406p+121f);
        if (!(scale > 0.0f)) {
            std::fill(q, q + count, int8_t(0));
            continue;
        }
        for (int64_t i = 0; i < count; ++i) {
            const float steps = std::max(-127.0f, std::min(127.0f, whole(x[i] / scale)));
            q[i] = int8_t(int32_t(steps));
            x[i] -= steps * scale;
        }
    }
}

template <bool ADD>
void put_value(float& x, float value) { x = ADD ? x + value : value; }

// Decoders write to x, or add to it.
template <bool ADD>
void decode_int8(const float* scales, const int8_t* q, int64_t n, float* x) {
    for (int64_t g = 0; g * GROUP < n; ++g, x += GROUP, q += GROUP) {
        const int64_t count = std::min(GROUP, n - g * GROUP);
        for (int64_t i = 0; i < count; ++i) put_value<ADD>(x[i], float(q[i]) * scales[g]);
    }
}

// The power of two that scales the group's largest magnitude into [2^14, 2^15): no overflow, and scaling is exact.
inline float fp16_scale(float most) {
    if (!(most > 0.0f)) return 1.0f;
    int exponent;
    std::frexp(most, &exponent);
    return std::ldexp(1.0f, std::max(-126, std::min(127, exponent - 15)));
}

inline void encode_fp16(float* x, int64_t n, float* scales, uint16_t* h) {
    for (int64_t g = 0; g * GROUP < n; ++g, x += GROUP, h += GROUP) {
        const int64_t count = std::min(GROUP, n - g * GROUP);
        const float scale = scales[g] = fp16_scale(largest(x, count));
        for (int64_t i = 0; i < count; ++i) {
            h[i] = float_to_finite_fp16(std::max(-32752.0f, std::min(32752.0f, x[i] / scale)));
            x[i] -= fp16_to_float(h[i]) * scale;
        }
    }
}

template <bool ADD>
void decode_fp16(const float* scales, const uint16_t* h, int64_t n, float* x) {
    for (int64_t i = 0; i < n; ++i) put_value<ADD>(x[i], fp16_to_float(h[i]) * scales[i / GROUP]);
}

inline void encode_bf16(float* x, int64_t n, uint16_t* h) {
    for (int64_t i = 0; i < n; ++i) {
        h[i] = float_to_finite_bf16(x[i]);
        x[i] -= bf16_to_float(h[i]);
    }
}

template <bool ADD>
void decode_bf16(const uint16_t* h, int64_t n, float* x) {
    for (int64_t i = 0; i < n; ++i) put_value<ADD>(x[i], bf16_to_float(h[i]));
}
