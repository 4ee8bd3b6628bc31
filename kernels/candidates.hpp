// Counts over selected candidates, and their indices as compressed sparse rows.
#pragma once
#include "host.hpp"

namespace {

// Counts how many rungs a magnitude reaches, by a table of equal cells over the bit patterns between the first and the last rung.
// If no cell holds two rungs, a look-up and one comparison without a branch give the answer.
class Ladder {
public:
    Ladder(const float* rungs, int64_t count) : count_(int32_t(count)), bits_(count) {
        for (int64_t r = 0; r < count; ++r) bits_[r] = magnitude_bits(rungs[r]);
        const uint32_t span = uint32_t(bits_.back() - bits_.front());
        while ((span >> shift_) >= CELLS) ++shift_;
        first_.resize((span >> shift_) + 1);
        int32_t reached = 0;
        for (size_t cell = 0; cell < first_.size(); ++cell) {
            const int32_t before = reached, from = bits_.front() + int32_t(cell << shift_);
            while (reached < count_ && bits_[reached] <= from) ++reached;
            first_[cell] = reached;
            single_ &= cell == 0 || reached <= before + 1;
        }
        single_ &= count_ <= first_.back() + 1 && bits_.front() < bits_.back();
    }
    // Increments counts[r] for each magnitude that reaches exactly r rungs.
    void count(const float* magnitudes, size_t n, int64_t* counts) const {
        if (!single_) {
            for (size_t i = 0; i < n; ++i) ++counts[reached(int32_t(bits_of(magnitudes[i])))];
            return;
        }
        std::vector<uint32_t> lanes(LANES * (size_t(count_) + 1), 0);  // independent counters of each rung
        const int32_t low = bits_.front(), high = bits_.back();
        const int32_t *first = first_.data(), *bits = bits_.data();
        for (size_t i = 0; i < n; ++i) {  // no branch: it would be unpredictable
            const int32_t x = int32_t(bits_of(magnitudes[i]));
            const int32_t inside = std::min(std::max(x, low), high - 1);
            const int32_t r = first[uint32_t(inside - low) >> shift_];
            const int32_t some = r + (bits[r] <= inside);
            const int32_t all = x >= high ? count_ : some;
            const int32_t reached = x >= low && x <= INFINITE ? all : 0;
            ++lanes[LANES * size_t(reached) + i % LANES];
        }
        for (size_t r = 0; r < lanes.size(); ++r) counts[r / LANES] += lanes[r];
    }

private:
    static constexpr uint32_t CELLS = 2048;
    static constexpr size_t LANES = 4;
    int64_t reached(int32_t x) const {
        if (x < bits_.front() || x > INFINITE) return 0;
        if (x >= bits_.back()) return count_;
        int64_t r = first_[uint32_t(x - bits_.front()) >> shift_];
        while (r < count_ && bits_[r] <= x) ++r;
        return r;
    }
    int32_t count_;
    std::vector<int32_t> bits_, first_;
    int shift_ = 0;
    bool single_ = true;
};

NumPy<int64_t> tail_counts(Array<const float> magnitudes, Array<const float> rungs) {
    const int64_t n = int64_t(rungs.size());
    std::vector<int64_t> counts(n + 1, 0);
    if (n) {
        nb::gil_scoped_release released;
        const Ladder ladder(rungs.data(), n);
        ladder.count(magnitudes.data(), magnitudes.size(), counts.data());
        for (int64_t r = n - 1; r > 0; --r) counts[r] += counts[r + 1];
    }
    counts.erase(counts.begin());
    return to_numpy(std::move(counts));
}

// Counts the candidates that reach the threshold in each block [edges[b], edges[b + 1]).
NumPy<int64_t> block_counts(Array<const int64_t> index, Array<const float> magnitude, float threshold, Array<const int64_t> edges) {
    std::vector<int64_t> counts(edges.size() - 1, 0);
    {
        nb::gil_scoped_release released;
        const int64_t* at = index.data();
        const int64_t* const end = at + index.size();
        const float* height = magnitude.data();
        for (size_t block = 0; block < counts.size(); ++block) {
            const int64_t stop = edges.data()[block + 1];
            int64_t count = 0;
            for (; at < end && *at < stop; ++at, ++height) count += *height >= threshold;
            counts[block] = count;
        }
    }
    return to_numpy(std::move(counts));
}

nb::tuple compress_rows(Array<const int64_t> index, Array<const float> magnitude, float threshold, int64_t lo, int64_t row, int64_t rows) {
    std::vector<uint32_t> counts(rows, 0);
    std::vector<uint16_t> columns(index.size());
    size_t kept = 0;
    {
        nb::gil_scoped_release released;
        const int shift = __builtin_ctzll(uint64_t(row));  // the row length is a power of two
        for (size_t i = 0; i < index.size(); ++i) {
            const int64_t offset = index.data()[i] - lo;
            columns[kept] = uint16_t(offset & (row - 1));
            const bool keep = magnitude.data()[i] >= threshold;
            counts[offset >> shift] += keep;
            kept += keep;
        }
        columns.resize(kept);
    }
    return nb::make_tuple(to_numpy(std::move(counts)), to_numpy(std::move(columns)));
}

// Writes the flat indices of compressed rows to `out`; false if the counts do not add up to its length.
bool expand_rows(Array<const uint32_t> counts, Array<const uint16_t> columns, int64_t lo, int64_t row, Array<int64_t> out) {
    nb::gil_scoped_release released;
    size_t at = 0;
    if (columns.size() != out.size()) return false;
    for (size_t r = 0; r < counts.size(); ++r) {
        const size_t stop = at + counts.data()[r];
        if (stop > out.size()) return false;
        for (; at < stop; ++at) out.data()[at] = lo + int64_t(r) * row + columns.data()[at];
    }
    return at == out.size();
}

}  // namespace
