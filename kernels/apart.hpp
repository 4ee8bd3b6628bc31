// Differences between weights and a flat reference of the same elements, in pieces that stay in cache.
#pragma once
#include "passes.hpp"
#include "scatter.hpp"

namespace {

constexpr int64_t TILE = 4096;
constexpr int64_t GROUP_OF_WEIGHTS = 512;

// difference = weight - reference; a missing weight counts as equal.
MPISPARSE_CLONES void subtract_floats(const float* weights, const float* reference, int64_t count, float* difference) {
    for (int64_t i = 0; i < count; ++i) difference[i] = weights[i] - reference[i];
}

MPISPARSE_CLONES void divide_floats(const float* source, float by, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = source[i] / by;
}

MPISPARSE_CLONES void multiply_floats(const float* source, float by, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = source[i] * by;
}

// Calls visit(difference, begin, end) for tiles of [lo, hi), in order.
template <class Visit>
void each_difference(const Gradients& weights, const float* reference, int64_t lo, int64_t hi, Visit visit) {
    float tile[TILE];
    weights.each(lo, hi, [&](const char* source, Kind, int64_t from, int64_t to) {
        const float* own = reinterpret_cast<const float*>(source);
        for (int64_t a = from; a < to; a += TILE) {
            const int64_t b = std::min(a + TILE, to);
            if (own) subtract_floats(own + (a - from), reference + a, b - a, tile);
            else std::fill(tile, tile + (b - a), 0.0f);
            visit(tile, a, b);
        }
    });
}

void check_floats(const Array<const uint8_t>& kinds) {
    for (size_t i = 0; i < kinds.size(); ++i)
        if (kinds.data()[i] != FP32) throw std::invalid_argument("weights must be float32");
}

// Collects all elements of [begin, end), which have no weights: a distance of 0 reaches a floor of 0.
void select_equal(Found& found, int64_t begin, int64_t end) {
    float zeros[CHUNK] = {};
    for (; begin < end; begin += CHUNK) isa.scan({zeros, nullptr, FP32, std::min(CHUNK, end - begin), begin, 0, &found});
}

// Collects the elements of [lo, hi) whose distance is at least `floor`, and checks these and all weights for non-finite values.
// Outside, the reference is not read: there a pass takes half the memory traffic.
nb::tuple select_apart(Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds,
                       Array<const float> reference, int64_t lo, int64_t hi, float floor) {
    const int32_t bits = magnitude_bits(floor);
    check_floats(kinds);
    const Gradients weights{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    const int64_t size = int64_t(reference.size());
    Scanned all;
    {
        nb::gil_scoped_release released;
        const int threads = threads_for(size);
        std::vector<Found> found(threads);
        std::vector<int64_t> bad(threads, -1);
        in_parts(0, size, threads, [&](int part, int64_t begin, int64_t end) {
            weights.each(begin, end, [&](const char* source, Kind, int64_t from, int64_t to) {
                const int64_t inner = std::min(std::max(lo, from), to), outer = std::max(std::min(hi, to), inner);
                const int64_t bounds[4] = {from, inner, outer, to};
                for (int i = 0; i < 3; ++i) {
                    const int64_t a = bounds[i], b = bounds[i + 1];
                    if (a == b) continue;
                    if (!source) {
                        if (i == 1 && bits == 0) select_equal(found[part], a, b);
                        continue;
                    }
                    const float *own = reinterpret_cast<const float*>(source) + (a - from), *other = i == 1 ? reference.data() + a : nullptr;
                    Piece piece{const_cast<float*>(own), nullptr, FP32, b - a, a, bits, i == 1 ? &found[part] : nullptr};  // only read
                    piece.reference = other;
                    if (isa.scan(piece) < INFINITE || bad[part] >= 0) continue;
                    for (int64_t j = 0; j < b - a && bad[part] < 0; ++j)
                        if (!std::isfinite(other ? own[j] - other[j] : own[j])) bad[part] = a + j;
                }
            });
        });
        all = join(found, bad);
    }
    return to_tuple(std::move(all));
}

// The root of the sum of squares of 512 differences, added in an order that every instruction set keeps.
MPISPARSE_CLONES float norm_of(const float* x) {
    constexpr int LANES = 16;
    float sums[LANES] = {};
    for (int64_t i = 0; i < GROUP_OF_WEIGHTS; i += LANES)
        for (int lane = 0; lane < LANES; ++lane) sums[lane] += x[i + lane] * x[i + lane];
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
    return std::min(std::sqrt(sums[0]), 0x1.fffffep127f);
}

// Writes the distance of each group of 512 neighbours; returns the first non-finite index or -1.
int64_t group_norms(Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds, Array<const float> reference,
                    Array<float> norms) {
    check_floats(kinds);
    const Gradients weights{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    const int64_t size = int64_t(reference.size()), groups = int64_t(norms.size());
    if (groups * GROUP_OF_WEIGHTS < size) throw std::invalid_argument("there must be a norm for each group");
    nb::gil_scoped_release released;
    const int threads = threads_for(size);
    std::vector<int64_t> bad(threads, -1);
    in_parts(0, groups, threads, [&](int part, int64_t begin, int64_t end) {
        float tile[GROUP_OF_WEIGHTS];
        for (int64_t g = begin; g < end; ++g) {
            const int64_t lo = g * GROUP_OF_WEIGHTS, hi = std::min(lo + GROUP_OF_WEIGHTS, size);
            std::fill(tile, tile + GROUP_OF_WEIGHTS, 0.0f);
            weights.each(lo, hi, [&](const char* source, Kind, int64_t from, int64_t to) {
                if (source) subtract_floats(reinterpret_cast<const float*>(source), reference.data() + from, to - from, tile + (from - lo));
            });
            norms.data()[g] = norm_of(tile);
            if (!(norms.data()[g] < 0x1.fffffep127f) && bad[part] < 0) {
                const int64_t at = first_nonfinite_of(tile, 0, hi - lo);
                if (at >= 0) bad[part] = lo + at;
            }
        }
    });
    for (int64_t b : bad)
        if (b >= 0) return b;
    return -1;
}

// Counts the magnitudes of the differences in [lo, hi) as histogram() does.
NumPy<int64_t> histogram_apart(Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds,
                               Array<const float> reference, int64_t lo, int64_t hi) {
    check_floats(kinds);
    const Gradients weights{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    std::vector<int64_t> counts(2048, 0);
    {
        nb::gil_scoped_release released;
        each_difference(weights, reference.data(), lo, hi, [&](float* tile, int64_t from, int64_t to) {
            for (int64_t i = 0; i < to - from; ++i) ++counts[(bits_of(tile[i]) & MAGNITUDE) >> 20];
        });
    }
    return to_numpy(std::move(counts));
}

// Writes the differences of [lo, lo + out.size()).
void subtract_apart(Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds,
                    Array<const float> reference, int64_t lo, Array<float> out) {
    check_floats(kinds);
    const Gradients weights{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    nb::gil_scoped_release released;
    weights.each(lo, lo + int64_t(out.size()), [&](const char* source, Kind, int64_t from, int64_t to) {
        const float* own = reinterpret_cast<const float*>(source);
        if (own) subtract_floats(own, reference.data() + from, to - from, out.data() + (from - lo));
        else std::fill(out.data() + (from - lo), out.data() + (to - lo), 0.0f);
    });
}

// Calls visit(weights or null, begin, end) for the share [begin, end) of ascending indices that each parameter has. The weights
// are shifted, so that flat indices fit.
template <class Visit>
void each_share(const Gradients& weights, const Array<const int64_t>& index, Visit visit) {
    const int64_t *first = index.data(), *last = first + index.size(), *at = first;
    for (int64_t i = 0, begin = 0; i < weights.count && at < last; begin = weights.ends[i++]) {
        const int64_t* stop = std::lower_bound(at, last, weights.ends[i]);
        const uint64_t address = weights.pointers[i];
        if (at < stop) visit(address ? reinterpret_cast<float*>(address - uint64_t(begin) * sizeof(float)) : nullptr, at - first, stop - first);
        at = stop;
    }
}

// Returns the differences at ascending indices.
NumPy<float> values_apart(Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds,
                          Array<const float> reference, Array<const int64_t> index) {
    check_floats(kinds);
    std::vector<float> values(index.size());
    {
        nb::gil_scoped_release released;
        const Gradients weights{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
        each_share(weights, index, [&](const float* own, int64_t begin, int64_t end) {
            for (int64_t i = begin; own && i < end; ++i) {
                const int64_t at = index.data()[i], next = index.data()[std::min(i + AHEAD, end - 1)];
                prefetch(own + next);
                prefetch(reference.data() + next);
                values[i] = own[at] - reference.data()[at];
            }
        });
    }
    return to_numpy(std::move(values));
}

// Adds the mean to the reference at ascending indices, and mean - own to the weights.
void move_apart(Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds, Array<float> reference,
                Array<const int64_t> index, Array<const float> mean, Array<const float> own) {
    check_floats(kinds);
    if (mean.size() != index.size() || own.size() != index.size()) throw std::invalid_argument("there must be a mean for each index");
    nb::gil_scoped_release released;
    const Gradients weights{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    each_share(weights, index, [&](float* target, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t at = index.data()[i], next = index.data()[std::min(i + AHEAD, end - 1)];
            prefetch(reference.data() + next);
            if (target) prefetch(target + next);
            reference.data()[at] += mean.data()[i];
            if (target) target[at] += mean.data()[i] - own.data()[i];
        }
    });
}

// Adds a stretch of values to the weights of [lo, lo + values.size()).
void add_stretch(Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds, int64_t lo,
                 Array<const float> values) {
    check_floats(kinds);
    nb::gil_scoped_release released;
    const Gradients weights{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    weights.each(lo, lo + int64_t(values.size()), [&](const char* source, Kind, int64_t from, int64_t to) {
        auto* own = reinterpret_cast<float*>(const_cast<char*>(source));
        for (int64_t i = 0; own && i < to - from; ++i) own[i] += values.data()[from - lo + i];
    });
}

// As multiply_floats, past the caches: lines of `out` need not be read first, a third of the traffic. False if a product is not finite.
bool stream_multiplied(const float* source, float by, int64_t count, float* out) {
    float watched = 0.0f;  // NaN from the first non-finite product on
    int64_t i = 0;
#ifdef MPISPARSE_X86
    const auto one = [&] { out[i] = source[i] * by; watched += out[i] * 0.0f; };
    for (; i < count && reinterpret_cast<uintptr_t>(out + i) % 16; ++i) one();
    __m128 sums = _mm_setzero_ps();
    for (; i + 4 <= count; i += 4) {
        const __m128 x = _mm_mul_ps(_mm_loadu_ps(source + i), _mm_set1_ps(by));
        sums = _mm_add_ps(sums, _mm_mul_ps(x, _mm_setzero_ps()));
        _mm_stream_ps(out + i, x);
    }
    for (; i < count; ++i) one();
    end_stream();
    float lanes[4];
    _mm_storeu_ps(lanes, sums);
    for (float lane : lanes) watched += lane;
#else
    for (; i < count; ++i) { out[i] = source[i] * by; watched += out[i] * 0.0f; }
#endif
    return watched == 0.0f;
}

// Writes the gradients divided by a number, zeros where there is none; returns the first non-finite index or -1.
int64_t divide_into(Array<float> out, Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds, float by) {
    nb::gil_scoped_release released;
    const Gradients grads{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    const int64_t size = int64_t(out.size());
    const float inverse = 1.0f / by;
    const bool exact = (bits_of(by) & 0x7fffff) == 0 && std::isnormal(inverse);  // a power of two
    const int threads = threads_for(size);
    std::vector<int64_t> bad(threads, -1);
    in_parts(0, size, threads, [&](int part, int64_t begin, int64_t end) {
        grads.each(begin, end, [&](const char* source, Kind kind, int64_t from, int64_t to) {
            if (source && kind == FP32 && exact && size >= BEYOND_CACHE) {
                if (!stream_multiplied(reinterpret_cast<const float*>(source), inverse, to - from, out.data() + from) && bad[part] < 0)
                    bad[part] = first_nonfinite_of(out.data(), from, to);
                return;
            }
            for (int64_t a = from; a < to; a += TILE) {
                const int64_t b = std::min(a + TILE, to);
                float* target = out.data() + a;
                if (!source) { std::fill(target, target + (b - a), 0.0f); continue; }
                if (kind != FP32)
                    for (int64_t i = 0; i < b - a; ++i) target[i] = load_one(source, kind, a - from + i) / by;
                else
                    (exact ? multiply_floats : divide_floats)(reinterpret_cast<const float*>(source) + (a - from), exact ? inverse : by, b - a, target);
                if (isa.scan({target, nullptr, FP32, b - a, a, 0, nullptr}) >= INFINITE && bad[part] < 0)
                    bad[part] = first_nonfinite_of(out.data(), a, b);
            }
        });
    });
    for (int64_t b : bad)
        if (b >= 0) return b;
    return -1;
}

}  // namespace
