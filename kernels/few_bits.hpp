// int4, int2 and sign: a group of values has one bfloat16 scale; levels are multiples of it, constants of so few bits that products
// are exact. docs/results/codecs.md says where they come from; mpisparse/backends/numpy_few_bits.py has the same.
#pragma once
#include <cstdint>

// int4: the scale is the value of largest magnitude, with its sign. Levels ascend. Splits are the middles between them, in the order
// of a binary search: the middle one, the middles of both halves, and so on.
alignas(64) constexpr float INT4_LEVELS[16] = {
    -224 / 256.0f, -176 / 256.0f, -136 / 256.0f, -102 / 256.0f, -70 / 256.0f, -41 / 256.0f, -16 / 256.0f, 0 / 256.0f,
    18 / 256.0f, 44 / 256.0f, 73 / 256.0f, 104 / 256.0f, 138 / 256.0f, 173 / 256.0f, 211 / 256.0f, 256 / 256.0f};
alignas(64) constexpr float INT4_SPLITS[4][16] = {
    {18 / 512.0f},
    {-172 / 512.0f, 242 / 512.0f},
    {-312 / 512.0f, -57 / 512.0f, 117 / 512.0f, 384 / 512.0f},
    {-400 / 512.0f, -238 / 512.0f, -111 / 512.0f, -16 / 512.0f, 62 / 512.0f, 177 / 512.0f, 311 / 512.0f, 467 / 512.0f}};

// 32 cells between minus and plus the scale, so narrow that each has at most one split and so placed that none is near an edge: rounding
// cannot lead past a split. `below` counts the splits below a cell; a cell without a split has one that no value reaches.
struct Cells {
    static constexpr float PER_SCALE = 15.5f;
    alignas(64) float split[32] = {};
    alignas(64) int32_t below[32] = {};
    constexpr Cells() {
        for (int cell = 0; cell < 32; ++cell) {
            split[cell] = 4.0f;
            for (int k = 1; k < 16; ++k) {
                const float middle = (INT4_LEVELS[k - 1] + INT4_LEVELS[k]) / 2;
                const int at = int(middle * PER_SCALE + 16.0f);
                if (at == cell) split[cell] = middle;
                below[cell] += at < cell;
            }
        }
    }
};
constexpr Cells CELLS;

// int2: the scale is the outer level that is best, in least squares, if magnitudes from INT2_FIRST x the largest on are outer ones.
// Then magnitudes from INT2_SPLIT x scale on are. Bit 0 of a code tells the outer level, bit 1 the sign.
constexpr float INT2_FIRST = 49 / 128.0f, INT2_INNER = 9 / 32.0f, INT2_SPLIT = 41 / 64.0f;
alignas(64) constexpr float INT2_LEVELS[16] = {INT2_INNER, 1.0f, -INT2_INNER, -1.0f};

constexpr int ROW = 16;  // values that are added at once

// CODES: bytes of a group's codes; byte j holds the codes of values j, j + CODES, j + 2 CODES, ... from its lowest bits on.
// ZEROS: a byte of codes of zeros, which fill up the last group.
struct Int4 { static constexpr int64_t GROUP = 64, CODES = 32; static constexpr uint8_t ZEROS = 0x77; };
struct Int2 { static constexpr int64_t GROUP = 64, CODES = 16; static constexpr uint8_t ZEROS = 0; };
struct Sign { static constexpr int64_t GROUP = 128, CODES = 16; static constexpr uint8_t ZEROS = 0; };

enum Decoding { WRITE, ADD, SUBTRACT, STREAM };  // what is done with decoded values; STREAM writes past the caches

// Encodes x[0, n); with `leave`, x becomes what is not sent.
using EncodeFew = void (*)(float* x, int64_t n, uint16_t* scales, uint8_t* codes, bool leave);
using DecodeFew = void (*)(const uint16_t* scales, const uint8_t* codes, int64_t n, float* x, Decoding how);
struct FewBits { EncodeFew encode; DecodeFew decode; int64_t group, codes; };
