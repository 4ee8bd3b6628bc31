// Reads and writes at an ascending index without duplicates, the sums of a reduction, and momentum between steps.
#pragma once
#include <cmath>
#include "host.hpp"

namespace {

constexpr int64_t AHEAD = 128;  // indices are far apart: prefetch the cache line, and with it the page

// Into the second-level cache, which waits for more lines at once than the first: half the time.
template <class T>
void prefetch(const T* data) { __builtin_prefetch(data, 0, 1); }

template <class T, class Visit>
void each_at(T* data, const Array<const int64_t>& index, Visit visit) {
    const int64_t n = int64_t(index.size());
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n) prefetch(data + index.data()[i + AHEAD]);
        visit(i, data[index.data()[i]]);
    }
}

NumPy<float> values_at(Array<const float> acc, Array<const int64_t> index) {
    std::vector<float> values(index.size());
    {
        nb::gil_scoped_release released;
        each_at(acc.data(), index, [&](int64_t i, const float& x) { values[i] = x; });
    }
    return to_numpy(std::move(values));
}

void take(Array<float> acc, Array<const int64_t> index, Array<float> out) {
    nb::gil_scoped_release released;
    each_at(acc.data(), index, [&](int64_t i, float& x) { out.data()[i] = x; x = 0.0f; });
}

void put(Array<float> acc, Array<const int64_t> index, Array<const float> values) {
    nb::gil_scoped_release released;
    each_at(acc.data(), index, [&](int64_t i, float& x) { x = values.data()[i]; });
}

void add_at(Array<float> acc, Array<const int64_t> index, Array<const float> values) {
    nb::gil_scoped_release released;
    each_at(acc.data(), index, [&](int64_t i, float& x) { x += values.data()[i]; });
}

// Deals an ascending index out to `size` owners, block by block in turn. Returns the places of the index in the order of owners,
// how many each has, and where `rank` keeps its own ones: its blocks one behind the other.
nb::tuple by_owner(Array<const int64_t> index, int64_t block, int64_t size, int64_t rank) {
    if (block < 1 || (block & (block - 1)) || size < 1) throw std::invalid_argument("blocks must be a power of two long");
    const int64_t n = int64_t(index.size());
    std::vector<int64_t> order(n), counts(size, 0), places;
    {
        nb::gil_scoped_release released;
        const int shift = __builtin_ctzll(uint64_t(block));
        const bool fast = (size & (size - 1)) == 0;
        const auto owner = [&](int64_t i) { const int64_t b = index.data()[i] >> shift; return fast ? b & (size - 1) : b % size; };
        for (int64_t i = 0; i < n; ++i) ++counts[owner(i)];
        std::vector<int64_t> next(size, 0);
        for (int64_t r = 1; r < size; ++r) next[r] = next[r - 1] + counts[r - 1];
        const int64_t mine = next[rank];
        for (int64_t i = 0; i < n; ++i) order[next[owner(i)]++] = i;
        places.resize(counts[rank]);
        for (int64_t i = 0; i < counts[rank]; ++i) {
            const int64_t at = index.data()[order[mine + i]];
            places[i] = (at >> shift) / size * block + (at & (block - 1));
        }
    }
    return nb::make_tuple(to_numpy(std::move(order)), to_numpy(std::move(counts)), to_numpy(std::move(places)));
}

MPISPARSE_CLONES
void add_part(float* total, const float* term, int64_t n) {
    for (int64_t i = 0; i < n; ++i) total[i] += term[i];
}

void add(Array<float> total, Array<const float> term) {
    if (total.size() != term.size()) throw std::invalid_argument("the term is not as long as the sum");
    nb::gil_scoped_release released;
    const int64_t n = int64_t(total.size());
    in_parts(0, n, threads_for(n), [&](int, int64_t begin, int64_t end) { add_part(total.data() + begin, term.data() + begin, end - begin); });
}

MPISPARSE_CLONES
void divide_part(float* values, int64_t n, float by) {
    if (std::fabs(by) >= 0x1p-100f && std::fabs(by) <= 0x1p100f && (bits_of(by) & 0x007fffff) == 0) {
        const float inverse = 1.0f / by;  // of a power of two: the same bits, in a quarter of the time
        for (int64_t i = 0; i < n; ++i) values[i] *= inverse;
        return;
    }
    for (int64_t i = 0; i < n; ++i) values[i] /= by;
}

void divide(Array<float> values, float by) {
    nb::gil_scoped_release released;
    const int64_t n = int64_t(values.size());
    in_parts(0, n, threads_for(n), [&](int, int64_t begin, int64_t end) { divide_part(values.data() + begin, end - begin, by); });
}

void zero_at(uint64_t data, uint8_t kind, int64_t, Array<const int64_t> index) {
    nb::gil_scoped_release released;
    if (kind == FP32)
        each_at(reinterpret_cast<float*>(data), index, [](int64_t, float& x) { x = 0.0f; });
    else if (kind == FP64)
        each_at(reinterpret_cast<double*>(data), index, [](int64_t, double& x) { x = 0.0; });
    else
        each_at(reinterpret_cast<uint16_t*>(data), index, [](int64_t, uint16_t& x) { x = 0; });
}

// Writes values at `index`, rounded to the buffer's kind; `values` becomes the rounding error.
void publish_at(uint64_t data, uint8_t kind, int64_t, Array<const int64_t> index, Array<float> values) {
    nb::gil_scoped_release released;
    float* v = values.data();
    if (kind == FP32)
        each_at(reinterpret_cast<float*>(data), index, [&](int64_t i, float& x) { x = v[i]; v[i] = 0.0f; });
    else if (kind == FP64)
        each_at(reinterpret_cast<double*>(data), index, [&](int64_t i, double& x) { x = v[i]; v[i] = 0.0f; });
    else if (kind == FP16)
        each_at(reinterpret_cast<uint16_t*>(data), index, [&](int64_t i, uint16_t& x) {
            x = float_to_finite_fp16(v[i]);
            v[i] -= fp16_to_float(x);
        });
    else
        each_at(reinterpret_cast<uint16_t*>(data), index, [&](int64_t i, uint16_t& x) {
            x = float_to_finite_bf16(v[i]);
            v[i] -= bf16_to_float(x);
        });
}

// Merges two ascending indices: share x value + (1 - share) x previous at their union, zero for what one of them lacks.
nb::tuple blend(Array<const int64_t> index, Array<const float> values, Array<const int64_t> carried, Array<const float> previous, float share) {
    const size_t n = index.size(), m = carried.size();
    std::vector<int64_t> all(n + m);
    std::vector<float> mixed(n + m);
    std::vector<uint8_t> selected(n + m);
    size_t at = 0;
    {
        nb::gil_scoped_release released;
        const float rest = 1.0f - share;
        for (size_t i = 0, j = 0; i < n || j < m; ++at) {
            const bool first = j == m || (i < n && index.data()[i] <= carried.data()[j]);
            const bool second = i == n || (j < m && carried.data()[j] <= index.data()[i]);
            all[at] = first ? index.data()[i] : carried.data()[j];
            mixed[at] = share * (first ? values.data()[i] : 0.0f) + rest * (second ? previous.data()[j] : 0.0f);
            selected[at] = first;
            i += first;
            j += second;
        }
        all.resize(at);
        mixed.resize(at);
        selected.resize(at);
    }
    return nb::make_tuple(to_numpy(std::move(all)), to_numpy(std::move(mixed)), to_numpy(std::move(selected)));
}

// Drops elements that are not selected and whose mean is zero: their unsent momentum, pending x value, goes to `left`. Adds `left`
// into acc and returns the other elements with their values.
nb::tuple drop_decayed(Array<float> acc, Array<const int64_t> index, Array<const float> values, Array<const uint8_t> selected,
                       Array<const float> mean, Array<float> left, float pending) {
    const int64_t n = int64_t(index.size());
    std::vector<int64_t> kept_index(n);
    std::vector<float> sent(n);
    int64_t kept = 0;
    {
        nb::gil_scoped_release released;
        for (int64_t i = 0; i < n; ++i) {
            if (i + AHEAD < n) prefetch(acc.data() + index.data()[i + AHEAD]);
            const bool decayed = !selected.data()[i] && mean.data()[i] == 0.0f;
            if (decayed) left.data()[i] += pending * values.data()[i];
            acc.data()[index.data()[i]] += left.data()[i];
            kept_index[kept] = index.data()[i];
            sent[kept] = values.data()[i];
            kept += !decayed;
        }
        kept_index.resize(kept);
        sent.resize(kept);
    }
    return nb::make_tuple(to_numpy(std::move(kept_index)), to_numpy(std::move(sent)));
}

}  // namespace
