// The passes over the flat vector: add gradients, watch for non-finite values, select or count by magnitude or key.
#pragma once
#include "gradients.hpp"

namespace {

int64_t first_nonfinite_of(const float* acc, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
        if (int32_t(bits_of(acc[i]) & MAGNITUDE) >= INFINITE) return i;
    return -1;
}

struct Scanned {
    std::vector<int64_t> index;
    std::vector<float> magnitude;
    int64_t bad = -1;
};

// Concatenates what the parts found; the first non-finite index is that of the lowest part that has one.
Scanned join(std::vector<Found>& parts, const std::vector<int64_t>& bad) {
    Scanned all;
    for (int64_t b : bad)
        if (b >= 0) { all.bad = b; break; }
    int64_t total = 0;
    for (const Found& f : parts) total += f.count;
    for (Found& f : parts) {
        f.index.resize(f.count);
        f.magnitude.resize(f.count);
    }
    if (parts.size() == 1) {
        all.index = std::move(parts[0].index);
        all.magnitude = std::move(parts[0].magnitude);
        return all;
    }
    all.index.reserve(total);
    all.magnitude.reserve(total);
    for (const Found& f : parts) {
        all.index.insert(all.index.end(), f.index.begin(), f.index.end());
        all.magnitude.insert(all.magnitude.end(), f.magnitude.begin(), f.magnitude.end());
    }
    return all;
}

// How elements are compared with the floor; scores are null if only magnitudes count.
struct Keying {
    Key key = MAGNITUDES;
    const uint8_t* scores = nullptr;
    const uint8_t* at(int64_t i) const { return scores ? scores + i : nullptr; }
};

Keying keying(Array<const uint8_t> scores, uint8_t key, size_t size) {
    if ((key != PRODUCTS && key != SCORES) || scores.size() != size)
        throw std::invalid_argument("scored selection needs a key of 1 or 2 and a score for each element");
    return {Key(key), scores.data()};
}

Scanned accumulate_select_(float* acc, int64_t size, const Gradients& grads, int64_t lo, int64_t hi, int32_t floor,
                           Keying keys = {}) {
    const int threads = threads_for(size);
    std::vector<Found> found(threads);
    std::vector<int64_t> bad(threads, -1);
    in_parts(0, size, threads, [&](int part, int64_t begin, int64_t end) {
        grads.each(begin, end, [&](const char* source, Kind kind, int64_t from, int64_t to) {
            const int64_t inner = std::min(std::max(lo, from), to), outer = std::max(std::min(hi, to), inner);
            const int64_t bounds[4] = {from, inner, outer, to};
            for (int i = 0; i < 3; ++i) {
                const int64_t a = bounds[i], b = bounds[i + 1];
                if (a == b || (!source && i != 1)) continue;
                const char* grad = source ? source + (a - from) * (kind == FP32 ? 4 : 2) : nullptr;
                const int32_t top =
                    isa.scan({acc + a, grad, kind, b - a, a, floor, i == 1 ? &found[part] : nullptr, keys.key, keys.at(a)});
                if (top >= INFINITE && bad[part] < 0) bad[part] = first_nonfinite_of(acc, a, b);
            }
        });
    });
    return join(found, bad);
}

nb::tuple to_tuple(Scanned&& found) {
    return nb::make_tuple(to_numpy(std::move(found.index)), to_numpy(std::move(found.magnitude)), found.bad);
}

nb::tuple accumulate_select_by(Array<float> acc, Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds,
                               int64_t lo, int64_t hi, float floor, Keying keys) {
    const int32_t bits = magnitude_bits(floor);
    const Gradients grads{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    const int64_t size = int64_t(acc.size());
    Scanned found;
    {
        nb::gil_scoped_release released;
        found = accumulate_select_(acc.data(), size, grads, lo, hi, bits, keys);
    }
    return to_tuple(std::move(found));
}

nb::tuple accumulate_select(Array<float> acc, Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds,
                            int64_t lo, int64_t hi, float floor) {
    return accumulate_select_by(acc, pointers, ends, kinds, lo, hi, floor, {});
}

// Finds what accumulate_select would in [lo, hi), but adds in a copy of one tile, so that nothing changes.
nb::tuple peek_select(Array<const float> acc, Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds,
                      int64_t lo, int64_t hi, float floor) {
    constexpr int64_t TILE = 2048;
    const int32_t bits = magnitude_bits(floor);
    const Gradients grads{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    Scanned all;
    {
        nb::gil_scoped_release released;
        const int threads = threads_for(hi - lo);
        std::vector<Found> found(threads);
        std::vector<int64_t> bad(threads, -1);
        in_parts(lo, hi, threads, [&](int part, int64_t begin, int64_t end) {
            alignas(64) float tile[TILE];
            grads.each(begin, end, [&](const char* source, Kind kind, int64_t from, int64_t to) {
                for (int64_t a = from; a < to; a += TILE) {
                    const int64_t n = std::min(TILE, to - a);
                    const char* grad = source ? source + (a - from) * (kind == FP32 ? 4 : 2) : nullptr;
                    std::copy_n(acc.data() + a, n, tile);
                    if (isa.scan({tile, grad, kind, n, a, bits, &found[part]}) >= INFINITE && bad[part] < 0)
                        bad[part] = a + first_nonfinite_of(tile, 0, n);
                }
            });
        });
        all = join(found, bad);
    }
    return to_tuple(std::move(all));
}

nb::tuple accumulate_select_scored(Array<float> acc, Array<const uint8_t> scores, uint8_t key, Array<const uint64_t> pointers,
                                   Array<const int64_t> ends, Array<const uint8_t> kinds, int64_t lo, int64_t hi, float floor) {
    return accumulate_select_by(acc, pointers, ends, kinds, lo, hi, floor, keying(scores, key, acc.size()));
}

nb::tuple select_by(Array<const float> acc, int64_t lo, int64_t hi, float floor, Keying keys) {
    const int32_t bits = magnitude_bits(floor);
    Scanned all;
    {
        nb::gil_scoped_release released;
        const int parts = threads_for(hi - lo);
        std::vector<Found> found(parts);
        std::vector<int64_t> bad(parts, -1);
        in_parts(lo, hi, parts, [&](int part, int64_t a, int64_t b) {
            auto* values = const_cast<float*>(acc.data()) + a;  // not written to without a gradient
            if (isa.scan({values, nullptr, FP32, b - a, a, bits, &found[part], keys.key, keys.at(a)}) >= INFINITE)
                bad[part] = first_nonfinite_of(acc.data(), a, b);
        });
        all = join(found, bad);
    }
    return to_tuple(std::move(all));
}

nb::tuple select_above(Array<const float> acc, int64_t lo, int64_t hi, float floor) {
    return select_by(acc, lo, hi, floor, {});
}

nb::tuple select_scored(Array<const float> acc, Array<const uint8_t> scores, uint8_t key, int64_t lo, int64_t hi, float floor) {
    return select_by(acc, lo, hi, floor, keying(scores, key, acc.size()));
}

// As accumulate_select, but selects by a moving average of the gradients' magnitudes, which it updates in the same pass. Works in
// tiles, so that both vectors stay in cache between the operations.
nb::tuple average_select(Array<float> acc, Array<float> average, float rate, Array<const uint64_t> pointers, Array<const int64_t> ends,
                         Array<const uint8_t> kinds, int64_t lo, int64_t hi, float floor) {
    constexpr int64_t TILE = 2048;
    const int32_t bits = magnitude_bits(floor);
    const Gradients grads{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    const int64_t size = int64_t(acc.size());
    Scanned all;
    {
        nb::gil_scoped_release released;
        const int threads = threads_for(size);
        std::vector<Found> found(threads);
        std::vector<int64_t> bad(threads, -1);
        in_parts(0, size, threads, [&](int part, int64_t begin, int64_t end) {
            grads.each(begin, end, [&](const char* source, Kind kind, int64_t from, int64_t to) {
                for (int64_t a = from; a < to; a += TILE) {
                    const int64_t b = std::min(a + TILE, to);
                    const char* grad = source ? source + (a - from) * (kind == FP32 ? 4 : 2) : nullptr;
                    isa.average({average.data() + a, grad, kind, b - a, rate});
                    if (grad && isa.scan({acc.data() + a, grad, kind, b - a, a, 0, nullptr}) >= INFINITE && bad[part] < 0)
                        bad[part] = first_nonfinite_of(acc.data(), a, b);
                    const int64_t inner = std::max(a, lo), outer = std::min(b, hi);
                    if (inner < outer)
                        isa.scan({average.data() + inner, nullptr, FP32, outer - inner, inner, bits, &found[part]});
                }
            });
        });
        all = join(found, bad);
    }
    return to_tuple(std::move(all));
}

int64_t accumulate(Array<float> acc, uint64_t pointer, uint8_t kind) {
    nb::gil_scoped_release released;
    const int64_t size = int64_t(acc.size());
    const Gradients grads{&pointer, &size, &kind, 1};
    return accumulate_select_(acc.data(), size, grads, 0, 0, 0).bad;
}

// Counts keys by exponent and three bits of mantissa: bin b holds bit patterns [b << 20, (b + 1) << 20).
NumPy<int64_t> histogram_by(Array<const float> acc, int64_t lo, int64_t hi, Keying keys) {
    std::vector<int64_t> counts(2048, 0);
    {
        nb::gil_scoped_release released;
        const int threads = threads_for(hi - lo);
        std::vector<std::vector<int64_t>> parts(threads, std::vector<int64_t>(2048, 0));
        in_parts(lo, hi, threads, [&](int part, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i)
                ++parts[part][key_of(keys.key, acc.data()[i], keys.scores ? keys.scores[i] : 0) >> 20];
        });
        for (const auto& part : parts)
            for (int b = 0; b < 2048; ++b) counts[b] += part[b];
    }
    return to_numpy(std::move(counts));
}

NumPy<int64_t> histogram(Array<const float> acc, int64_t lo, int64_t hi) { return histogram_by(acc, lo, hi, {}); }

NumPy<int64_t> histogram_scored(Array<const float> acc, Array<const uint8_t> scores, uint8_t key, int64_t lo, int64_t hi) {
    return histogram_by(acc, lo, hi, keying(scores, key, acc.size()));
}

}  // namespace
