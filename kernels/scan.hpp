// One pass over memory: add a gradient into the accumulator, watch for non-finite values, and collect the elements that
// reach a floor. Magnitudes are compared as integers (the bits of |x| are ordered like |x|, and NaN is above all), so
// every instruction set gives the same answer. `scan.inc` is the pass, `few_bits.inc` the codecs of few bits; both are included
// once per instruction set in a namespace.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>
#include "few_bits.hpp"
#include "half.hpp"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define MPISPARSE_X86 1
#include <immintrin.h>
#endif

// Compiles a function for AVX2 too and picks the version at load time, where the compiler and the C library can.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define MPISPARSE_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define MPISPARSE_CLONES
#endif

enum Kind : uint8_t { FP32 = 0, FP16 = 1, BF16 = 2, FP64 = 3 };  // FP64: published gradients only
constexpr int64_t CHUNK = 64;
constexpr int32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;

// One line of a chunk, some pages ahead. torch's memory has pages of 4 kB, at whose ends the processor's own prefetching stops.
template <class T>
void prefetch_ahead(const T* data) { __builtin_prefetch(reinterpret_cast<const char*>(data) + (32 << 10), 0, 2); }

inline float load_one(const void* source, Kind kind, int64_t i) {
    if (kind == FP32) return static_cast<const float*>(source)[i];
    const uint16_t h = static_cast<const uint16_t*>(source)[i];
    return kind == FP16 ? fp16_to_float(h) : bf16_to_float(h);
}

// Selected elements, ascending; grown a chunk at a time, so that push needs no bounds check.
struct Found {
    std::vector<int64_t> index;
    std::vector<float> magnitude;
    int64_t count = 0;
    void reserve_chunk() {
        if (count + CHUNK > int64_t(index.size())) {
            const size_t room = std::max<size_t>(4096, index.size() * 2);
            index.resize(room);
            magnitude.resize(room);
        }
    }
    void push(int64_t i, int32_t key) {
        index[count] = i;
        magnitude[count++] = float_of(uint32_t(key));
    }
};

// Arguments of average = rate x |grad| + (1 - rate) x average; a null grad counts as zeros.
struct Averaging {
    float* average;
    const void* grad;
    Kind kind;
    int64_t count;
    float rate;
};

// What is compared with the floor: the magnitude; its product with the importance, (score + 1) / 256; or the score, and the
// magnitude among equal scores. All are bit patterns of floats >= 0, which are ordered like the floats.
enum Key : uint8_t { MAGNITUDES = 0, PRODUCTS = 1, SCORES = 2 };

inline int32_t key_of(Key key, float x, uint8_t score) {
    const int32_t m = int32_t(bits_of(x) & MAGNITUDE);
    if (key == PRODUCTS) return int32_t(bits_of(float_of(uint32_t(m)) * ((float(score) + 1.0f) * 0x1p-8f)));
    return key == SCORES ? int32_t(score) << 23 | m >> 8 : m;
}

// Arguments of a pass over acc[0, count): grad may be null; selected elements go to `found`, if given, with indices from `base`
// on; scores belong to acc[0, count) and may be null if the key is the magnitude. With a reference, instead of a grad, the pass
// compares |acc - reference| and writes nothing.
struct Piece {
    float* acc;
    const void* grad;
    Kind kind;
    int64_t count, base;
    int32_t floor;
    Found* found;
    Key key = MAGNITUDES;
    const uint8_t* scores = nullptr;
    const float* reference = nullptr;
};

namespace generic {
constexpr const char* NAME = "generic";
constexpr int LANES = 1;
using Vec = float;
using Bits = int32_t;
inline Vec load(const float* p) { return *p; }
inline Vec widen(const uint16_t* p, Kind kind) { return load_one(p, kind, 0); }
inline void store(float* p, Vec x) { *p = x; }
inline void stream(float* p, Vec x) { *p = x; }
inline Vec add(Vec x, Vec y) { return x + y; }
inline Vec multiply(Vec x, Vec y) { return x * y; }
inline Vec everywhere(float x) { return x; }
inline Vec absolute(Vec x) { return float_of(bits_of(x) & MAGNITUDE); }
inline Bits spread(int32_t x) { return x; }
inline Bits magnitude(Vec x) { return int32_t(bits_of(x) & MAGNITUDE); }
inline Bits bytes(const uint8_t* p) { return *p; }
inline Vec floats(Bits x) { return float(x); }
inline Bits before(Bits high, Bits low) { return high << 23 | low >> 8; }
inline Bits larger(Bits x, Bits y) { return std::max(x, y); }
inline uint64_t above(Bits x, Bits y) { return x > y; }
inline int32_t highest(Bits x) { return x; }
struct Table { float at[16]; };
inline Vec subtract(Vec x, Vec y) { return x - y; }
inline Vec greater(Vec x, Vec y) { return x > y ? x : y; }
inline Vec lesser(Vec x, Vec y) { return x < y ? x : y; }
inline Vec flip(Vec x, Bits signs) { return float_of(bits_of(x) ^ uint32_t(signs)); }
inline Bits pattern(Vec x) { return int32_t(bits_of(x)); }
inline Bits with(Bits x, Bits y) { return x | y; }
inline Bits both(Bits x, Bits y) { return x & y; }
template <int N> Bits left(Bits x) { return int32_t(uint32_t(x) << N); }
template <int N> Bits right(Bits x) { return int32_t(uint32_t(x) >> N); }
inline Bits descend(Bits k, Vec x, Vec split) { return 2 * k + int32_t(~bits_of(x - split) >> 31); }  // no branch: unpredictable
inline Vec where(Vec x, Vec split, Vec value) { return float_of(bits_of(value) & ~uint32_t(int32_t(bits_of(x - split)) >> 31)); }
inline void store_bytes(uint8_t* p, Bits x) { *p = uint8_t(x); }
inline Bits key_with_sign(Vec x) { return int32_t(bits_of(x) << 1 | (~bits_of(x) >> 31)); }
inline Bits larger_key(Bits x, Bits y) { return int32_t(std::max(uint32_t(x), uint32_t(y))); }
inline uint32_t highest_key(Bits x) { return uint32_t(x); }
inline float sum_of(const Vec* row) {
    float lane[ROW];
    std::copy(row, row + ROW, lane);
    for (int half = ROW / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
}
template <int COUNT> Table table(const float* p, float scale) {
    Table t;
    for (int i = 0; i < COUNT; ++i) t.at[i] = p[i] * scale;
    return t;
}
template <int COUNT> Vec look_up(const Table& t, Bits k) { return t.at[k]; }
#include "scan.inc"
#include "few_bits.inc"
}  // namespace generic

#ifdef MPISPARSE_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c,bmi"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi")
#endif
namespace avx2 {
constexpr const char* NAME = "avx2";
constexpr int LANES = 8;
using Vec = __m256;
using Bits = __m256i;
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec widen(const uint16_t* p, Kind kind) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return kind == FP16 ? _mm256_cvtph_ps(h) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline void stream(float* p, Vec x) { _mm256_stream_ps(p, x); }  // aligned
inline Vec add(Vec x, Vec y) { return _mm256_add_ps(x, y); }
inline Vec multiply(Vec x, Vec y) { return _mm256_mul_ps(x, y); }
inline Vec everywhere(float x) { return _mm256_set1_ps(x); }
inline Vec absolute(Vec x) { return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(MAGNITUDE))); }
inline Bits spread(int32_t x) { return _mm256_set1_epi32(x); }
inline Bits magnitude(Vec x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(MAGNITUDE)); }
inline Bits bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline Vec floats(Bits x) { return _mm256_cvtepi32_ps(x); }
inline Bits before(Bits high, Bits low) { return _mm256_or_si256(_mm256_slli_epi32(high, 23), _mm256_srli_epi32(low, 8)); }
inline Bits larger(Bits x, Bits y) { return _mm256_max_epi32(x, y); }
inline uint64_t above(Bits x, Bits y) { return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(x, y)))); }
inline int32_t highest(Bits x) {
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x);
    return *std::max_element(lanes, lanes + 8);
}
struct Table { __m256 low, high; };
inline Vec subtract(Vec x, Vec y) { return _mm256_sub_ps(x, y); }
inline Vec greater(Vec x, Vec y) { return _mm256_max_ps(x, y); }
inline Vec lesser(Vec x, Vec y) { return _mm256_min_ps(x, y); }
inline Vec flip(Vec x, Bits signs) { return _mm256_xor_ps(x, _mm256_castsi256_ps(signs)); }
inline Bits pattern(Vec x) { return _mm256_castps_si256(x); }
inline Bits with(Bits x, Bits y) { return _mm256_or_si256(x, y); }
inline Bits both(Bits x, Bits y) { return _mm256_and_si256(x, y); }
template <int N> Bits left(Bits x) { return _mm256_slli_epi32(x, N); }
template <int N> Bits right(Bits x) { return _mm256_srli_epi32(x, N); }
inline Bits descend(Bits k, Vec x, Vec split) {
    return _mm256_sub_epi32(_mm256_add_epi32(k, k), _mm256_castps_si256(_mm256_cmp_ps(x, split, _CMP_GE_OQ)));
}
inline Vec where(Vec x, Vec split, Vec value) { return _mm256_and_ps(_mm256_cmp_ps(x, split, _CMP_GE_OQ), value); }
inline void store_bytes(uint8_t* p, Bits x) {
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
inline Bits key_with_sign(Vec x) {
    const Bits u = _mm256_castps_si256(x);
    return _mm256_or_si256(_mm256_slli_epi32(u, 1), _mm256_srli_epi32(_mm256_xor_si256(u, _mm256_set1_epi32(-1)), 31));
}
inline Bits larger_key(Bits x, Bits y) { return _mm256_max_epu32(x, y); }
inline uint32_t highest_key(Bits x) {
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    return uint32_t(_mm_cvtsi128_si32(_mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1))));
}
inline float sum_of_lanes(Vec x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float sum_of(const Vec* row) { return sum_of_lanes(add(row[0], row[1])); }
template <int COUNT> Table table(const float* p, float scale) {
    const Vec low = multiply(load(p), everywhere(scale));
    return {low, COUNT > 8 ? multiply(load(p + 8), everywhere(scale)) : low};
}
template <int COUNT> Vec look_up(const Table& t, Bits k) {
    const Vec low = _mm256_permutevar8x32_ps(t.low, k);
    if (COUNT <= 8) return low;
    return _mm256_blendv_ps(low, _mm256_permutevar8x32_ps(t.high, k), _mm256_castsi256_ps(_mm256_slli_epi32(k, 28)));
}
#include "scan.inc"
#include "few_bits.inc"
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,bmi"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,bmi")
#endif
namespace avx512 {
constexpr const char* NAME = "avx512";
constexpr int LANES = 16;
using Vec = __m512;
using Bits = __m512i;
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec widen(const uint16_t* p, Kind kind) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return kind == FP16 ? _mm512_cvtph_ps(h) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void stream(float* p, Vec x) { _mm512_stream_ps(p, x); }  // aligned
inline Vec add(Vec x, Vec y) { return _mm512_add_ps(x, y); }
inline Vec multiply(Vec x, Vec y) { return _mm512_mul_ps(x, y); }
inline Vec everywhere(float x) { return _mm512_set1_ps(x); }
inline Vec absolute(Vec x) { return _mm512_abs_ps(x); }
inline Bits spread(int32_t x) { return _mm512_set1_epi32(x); }
inline Bits magnitude(Vec x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(MAGNITUDE)); }
inline Bits bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec floats(Bits x) { return _mm512_cvtepi32_ps(x); }
inline Bits before(Bits high, Bits low) { return _mm512_or_si512(_mm512_slli_epi32(high, 23), _mm512_srli_epi32(low, 8)); }
inline Bits larger(Bits x, Bits y) { return _mm512_max_epi32(x, y); }
inline uint64_t above(Bits x, Bits y) { return _mm512_cmpgt_epi32_mask(x, y); }
inline int32_t highest(Bits x) { return _mm512_reduce_max_epi32(x); }
struct Table { __m512 all; };
inline Vec subtract(Vec x, Vec y) { return _mm512_sub_ps(x, y); }
inline Vec greater(Vec x, Vec y) { return _mm512_max_ps(x, y); }
inline Vec lesser(Vec x, Vec y) { return _mm512_min_ps(x, y); }
inline Vec flip(Vec x, Bits signs) { return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), signs)); }
inline Bits pattern(Vec x) { return _mm512_castps_si512(x); }
inline Bits with(Bits x, Bits y) { return _mm512_or_si512(x, y); }
inline Bits both(Bits x, Bits y) { return _mm512_and_si512(x, y); }
template <int N> Bits left(Bits x) { return _mm512_slli_epi32(x, N); }
template <int N> Bits right(Bits x) { return _mm512_srli_epi32(x, N); }
inline Bits descend(Bits k, Vec x, Vec split) {
    const Bits twice = _mm512_add_epi32(k, k);
    return _mm512_mask_add_epi32(twice, _mm512_cmp_ps_mask(x, split, _CMP_GE_OQ), twice, _mm512_set1_epi32(1));
}
inline Vec where(Vec x, Vec split, Vec value) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, split, _CMP_GE_OQ), value); }
inline void store_bytes(uint8_t* p, Bits x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x)); }
inline Bits key_with_sign(Vec x) {
    return _mm512_xor_si512(_mm512_rol_epi32(_mm512_castps_si512(x), 1), _mm512_set1_epi32(1));
}
inline Bits larger_key(Bits x, Bits y) { return _mm512_max_epu32(x, y); }
inline uint32_t highest_key(Bits x) { return _mm512_reduce_max_epu32(x); }
inline float sum_of(const Vec* row) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(*row), 1));
    return avx2::sum_of_lanes(_mm256_add_ps(_mm512_castps512_ps256(*row), high));
}
template <int COUNT> Table table(const float* p, float scale) { return {multiply(load(p), everywhere(scale))}; }
template <int COUNT> Vec look_up(const Table& t, Bits k) { return _mm512_permutexvar_ps(k, t.all); }

// Finds int4's codes by cells: half the instructions of halving. The scale must not be so small that its inverse overflows.
struct InCells {
    Vec inverse, low, high;
    explicit InCells(float size)
        : inverse(everywhere(Cells::PER_SCALE / size)), low(multiply(load(CELLS.split), everywhere(size))),
          high(multiply(load(CELLS.split + 16), everywhere(size))) {}
    Bits code(Vec x) const {
        const Bits cell = _mm512_cvttps_epi32(_mm512_fmadd_ps(x, inverse, everywhere(16.0f)));
        const Bits below = _mm512_permutex2var_epi32(_mm512_load_si512(CELLS.below), cell, _mm512_load_si512(CELLS.below + 16));
        const __mmask16 above = _mm512_cmp_ps_mask(x, _mm512_permutex2var_ps(low, cell, high), _CMP_GE_OQ);
        return _mm512_mask_add_epi32(below, above, below, spread(1));
    }
};
#define MPISPARSE_CELLS
#include "scan.inc"
#include "few_bits.inc"
#undef MPISPARSE_CELLS
}  // namespace avx512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
