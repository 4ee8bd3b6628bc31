// The CPU backend: every pass over the flat vector, and the small dense loops around the messages.
// mpisparse/backends/numpy_backend.py says in NumPy what each function does; the two agree to the last bit.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "codec.hpp"
#include "predict.hpp"
#include "scan.hpp"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace nb = nanobind;
template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using NumPy = nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig>;

namespace {

using Scan = int32_t (*)(const Piece&);
using Average = void (*)(const Averaging&);
struct Isa { const char* name; Scan scan; Average average; };

std::vector<Isa> available_isas() {
    std::vector<Isa> isas{{generic::NAME, generic::scan, generic::average}};
#ifdef MPISPARSE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi"))
        isas.push_back({avx2::NAME, avx2::scan, avx2::average});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("bmi"))
        isas.push_back({avx512::NAME, avx512::scan, avx512::average});
#endif
    return isas;
}

const std::vector<Isa> ISAS = available_isas();
Isa isa = ISAS.back();

void use_isa(const std::string& name) {
    for (const Isa& candidate : ISAS)
        if (name == candidate.name) { isa = candidate; return; }
    throw std::invalid_argument("this CPU or build has no instruction set named " + name);
}

// The most threads that a kernel uses. One setting for the process, like torch's own; results do not depend on it.
std::atomic<int> most_threads{1};

void use_threads(int count) {
    if (count < 1) throw std::invalid_argument("the number of threads must be at least 1, got " + std::to_string(count));
    most_threads = count;
}

constexpr int64_t AHEAD = 24;  // indices lie far apart: fetch the line and its page early

int32_t magnitude_bits(float threshold) {
    if (!(threshold >= 0.0f)) throw std::invalid_argument("threshold must be a number >= 0");
    return int32_t(bits_of(threshold));
}

template <class T>
NumPy<T> to_numpy(std::vector<T>&& values) {
    auto* owner = new std::vector<T>(std::move(values));
    nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return NumPy<T>(owner->data(), {owner->size()}, capsule);
}

// The gradients of one step: `ends` are the parameters' ends in the flat vector, a null pointer is an absent gradient.
struct Gradients {
    const uint64_t* pointers;
    const int64_t* ends;
    const uint8_t* kinds;
    int64_t count;

    // Calls visit(source or null, kind, begin, end) for each parameter's share of [begin, end), in order.
    template <class Visit>
    void each(int64_t begin, int64_t end, Visit visit) const {
        int64_t i = std::upper_bound(ends, ends + count, begin) - ends;
        for (; i < count && begin < end; ++i) {
            const int64_t first = i ? ends[i - 1] : 0, stop = std::min(end, ends[i]);
            const Kind kind = Kind(kinds[i]);
            const char* source = reinterpret_cast<const char*>(pointers[i]);
            if (source) source += (begin - first) * (kind == FP32 ? 4 : 2);
            if (begin < stop) visit(source, kind, begin, stop);
            begin = std::max(begin, stop);
        }
    }
};

// Runs work(part, begin, end) on `threads` contiguous parts of [begin, end): their order is the order of the result.
template <class Work>
void in_parts(int64_t begin, int64_t end, int threads, Work work) {
    const int64_t length = end - begin;
    const auto bound = [&](int part) { return begin + length / threads * part + length % threads * part / threads; };
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
#endif
    for (int part = 0; part < threads; ++part) work(part, bound(part), bound(part + 1));
}

// How many threads a pass over so many elements is worth.
int threads_for(int64_t length) { return int(std::max<int64_t>(1, std::min<int64_t>(most_threads, length / 32768))); }

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

// Joins what the parts found; the first non-finite element is the one of the lowest part.
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

// By what elements are selected: scores are null where magnitudes count alone.
struct Keying {
    Key key = MAGNITUDES;
    const uint8_t* scores = nullptr;
    const uint8_t* at(int64_t i) const { return scores ? scores + i : nullptr; }
};

Keying keying(Array<const uint8_t> scores, uint8_t key, size_t size) {
    if ((key != PRODUCTS && key != SCORES) || scores.size() != size) throw std::invalid_argument("no such key, or a score is missing");
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

nb::tuple accumulate_select_scored(Array<float> acc, Array<const uint8_t> scores, uint8_t key, Array<const uint64_t> pointers,
                                   Array<const int64_t> ends, Array<const uint8_t> kinds, int64_t lo, int64_t hi, float floor) {
    return accumulate_select_by(acc, pointers, ends, kinds, lo, hi, floor, keying(scores, key, acc.size()));
}

nb::tuple select_by(Array<float> acc, int64_t lo, int64_t hi, float floor, Keying keys) {
    const int32_t bits = magnitude_bits(floor);
    Scanned all;
    {
        nb::gil_scoped_release released;
        const int parts = threads_for(hi - lo);
        std::vector<Found> found(parts);
        std::vector<int64_t> bad(parts, -1);
        in_parts(lo, hi, parts, [&](int part, int64_t a, int64_t b) {
            if (isa.scan({acc.data() + a, nullptr, FP32, b - a, a, bits, &found[part], keys.key, keys.at(a)}) >= INFINITE)
                bad[part] = first_nonfinite_of(acc.data(), a, b);
        });
        all = join(found, bad);
    }
    return to_tuple(std::move(all));
}

nb::tuple select_above(Array<float> acc, int64_t lo, int64_t hi, float floor) {
    return select_by(acc, lo, hi, floor, {});
}

nb::tuple select_scored(Array<float> acc, Array<const uint8_t> scores, uint8_t key, int64_t lo, int64_t hi, float floor) {
    return select_by(acc, lo, hi, floor, keying(scores, key, acc.size()));
}

// As accumulate_select, but what is collected is the moving average of the gradients' magnitudes, updated in the same pass:
// a tile of both vectors stays in cache from one operation to the next.
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

// What is sent of masked values and of what earlier steps left: share x value + (1 - share) x previous, at either index.
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

// What was sent is over for elements that nobody selected and of which nothing arrived: their `left` takes what was still to
// come, pending x value. Adds `left` into acc, and returns the others with their values.
nb::tuple come_to_rest(Array<float> acc, Array<const int64_t> index, Array<const float> values, Array<const uint8_t> selected,
                       Array<const float> mean, Array<float> left, float pending) {
    const int64_t n = int64_t(index.size());
    std::vector<int64_t> moving(n);
    std::vector<float> sent(n);
    int64_t kept = 0;
    {
        nb::gil_scoped_release released;
        for (int64_t i = 0; i < n; ++i) {
            if (i + AHEAD < n) __builtin_prefetch(acc.data() + index.data()[i + AHEAD], 1);
            const bool resting = !selected.data()[i] && mean.data()[i] == 0.0f;
            if (resting) left.data()[i] += pending * values.data()[i];
            acc.data()[index.data()[i]] += left.data()[i];
            moving[kept] = index.data()[i];
            sent[kept] = values.data()[i];
            kept += !resting;
        }
        moving.resize(kept);
        sent.resize(kept);
    }
    return nb::make_tuple(to_numpy(std::move(moving)), to_numpy(std::move(sent)));
}

int64_t accumulate(Array<float> acc, uint64_t pointer, uint8_t kind) {
    nb::gil_scoped_release released;
    const int64_t size = int64_t(acc.size());
    const Gradients grads{&pointer, &size, &kind, 1};
    return accumulate_select_(acc.data(), size, grads, 0, 0, 0).bad;
}

int64_t first_nonfinite(Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds) {
    nb::gil_scoped_release released;
    const Gradients grads{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    const int64_t size = grads.count ? grads.ends[grads.count - 1] : 0;
    const int threads = threads_for(size);
    std::vector<int64_t> bad(threads, -1);
    in_parts(0, size, threads, [&](int part, int64_t begin, int64_t end) {
        grads.each(begin, end, [&](const char* source, Kind kind, int64_t from, int64_t to) {
            if (!source || bad[part] >= 0) return;
            if (kind == FP32) {
                auto* values = reinterpret_cast<float*>(const_cast<char*>(source));
                if (isa.scan({values, nullptr, FP32, to - from, from, 0, nullptr}) < INFINITE) return;
            }
            for (int64_t i = 0; i < to - from && bad[part] < 0; ++i)
                if (!std::isfinite(load_one(source, kind, i))) bad[part] = from + i;
        });
    });
    for (int64_t b : bad)
        if (b >= 0) return b;
    return -1;
}

// Counts of keys by exponent and the first three bits of mantissa: bin b holds bits [b << 20, (b + 1) << 20).
NumPy<int64_t> histogram_by(Array<float> acc, int64_t lo, int64_t hi, Keying keys) {
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

NumPy<int64_t> histogram(Array<float> acc, int64_t lo, int64_t hi) { return histogram_by(acc, lo, hi, {}); }

NumPy<int64_t> histogram_scored(Array<float> acc, Array<const uint8_t> scores, uint8_t key, int64_t lo, int64_t hi) {
    return histogram_by(acc, lo, hi, keying(scores, key, acc.size()));
}

// Gradients of [lo, lo + out.size()) as bfloat16; an absent one is zeros.
void record(Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds, int64_t lo, Array<uint16_t> out) {
    nb::gil_scoped_release released;
    const Gradients grads{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    grads.each(lo, lo + int64_t(out.size()), [&](const char* source, Kind kind, int64_t from, int64_t to) {
        uint16_t* target = out.data() + (from - lo);
        if (!source) std::fill(target, target + (to - from), uint16_t(0));
        for (int64_t i = 0; source && i < to - from; ++i) target[i] = float_to_finite_bf16(load_one(source, kind, i));
    });
}

// Gradients at ascending indices; an absent one is zero.
void gather(Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds, Array<const int64_t> index, Array<float> out) {
    nb::gil_scoped_release released;
    int64_t parameter = 0;
    for (size_t i = 0; i < index.size(); ++i) {
        const int64_t at = index.data()[i];
        while (at >= ends.data()[parameter]) ++parameter;
        const auto* source = reinterpret_cast<const char*>(pointers.data()[parameter]);
        const int64_t begin = parameter ? ends.data()[parameter - 1] : 0;
        out.data()[i] = source ? load_one(source, Kind(kinds.data()[parameter]), at - begin) : 0.0f;
    }
}

// Rungs between the first and the last, found through a table of equal cells over the bit patterns in between. Cells are
// narrow against rungs: where none holds two, one comparison without a branch remains after the look-up.
class Ladder {
public:
    Ladder(const float* rungs, int64_t count) : count_(count), bits_(count) {
        for (int64_t r = 0; r < count; ++r) bits_[r] = magnitude_bits(rungs[r]);
        const uint32_t span = uint32_t(bits_.back() - bits_.front());
        while ((span >> shift_) >= CELLS) ++shift_;
        first_.resize((span >> shift_) + 1);
        for (size_t cell = 0; cell < first_.size(); ++cell) {
            first_[cell] = reached_from(cell ? first_[cell - 1] : 0, bits_.front() + int32_t(cell << shift_));
            single_ &= cell == 0 || first_[cell] <= first_[cell - 1] + 1;
        }
        single_ &= count_ <= first_.back() + 1;
    }
    // Adds one at the number of rungs that each magnitude reaches.
    void count(const float* magnitudes, size_t n, int64_t* counts) const {
        for (size_t i = 0; i < n; ++i) {
            const int32_t x = int32_t(bits_of(magnitudes[i]));
            if (single_ && x >= bits_.front() && x < bits_.back()) {
                const int64_t r = first_[uint32_t(x - bits_.front()) >> shift_];
                ++counts[r + (bits_[r] <= x)];
            } else {
                ++counts[reached(x)];
            }
        }
    }

private:
    static constexpr uint32_t CELLS = 4096;
    int64_t reached(int32_t x) const {
        if (x < bits_.front() || x > INFINITE) return 0;
        if (x >= bits_.back()) return count_;
        return reached_from(first_[uint32_t(x - bits_.front()) >> shift_], x);
    }
    int64_t reached_from(int64_t r, int32_t x) const {
        while (r < count_ && bits_[r] <= x) ++r;
        return r;
    }
    int64_t count_;
    std::vector<int32_t> bits_;
    std::vector<int64_t> first_;
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

// How many of the candidates (ascending) reach the threshold between each two edges.
NumPy<int64_t> block_counts(Array<const int64_t> index, Array<const float> magnitude, float threshold, Array<const int64_t> edges) {
    std::vector<int64_t> counts(edges.size() - 1, 0);
    {
        nb::gil_scoped_release released;
        size_t block = 0;
        for (size_t i = 0; i < index.size(); ++i) {
            while (index.data()[i] >= edges.data()[block + 1]) ++block;
            counts[block] += magnitude.data()[i] >= threshold;
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
        const int shift = __builtin_ctzll(uint64_t(row));  // rows are a power of two long
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

// Writes the flat indices of one rank's rows into `out`; false if the counts do not add up to it.
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

template <class T, class Visit>
void each_at(T* data, const Array<const int64_t>& index, Visit visit) {
    const int64_t n = int64_t(index.size());
    for (int64_t i = 0; i < n; ++i) {
        if (i + AHEAD < n) __builtin_prefetch(data + index.data()[i + AHEAD], 1);
        visit(i, data[index.data()[i]]);
    }
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

// Writes mean values at `index` in the buffer's own type; values keep what rounding to that type left over.
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

std::vector<std::string> isa_names() {
    std::vector<std::string> names;
    for (const Isa& candidate : ISAS) names.push_back(candidate.name);
    return names;
}

}  // namespace

NB_MODULE(_cpu, m) {
    m.def("isas", &isa_names);
    m.def("isa", [] { return std::string(isa.name); });
    m.def("use_isa", &use_isa);
    m.def("threads", [] { return int(most_threads); });
    m.def("use_threads", &use_threads);
#ifdef _OPENMP
    m.attr("openmp") = true;
#else
    m.attr("openmp") = false;
#endif
    m.def("accumulate_select", &accumulate_select);
    m.def("accumulate", &accumulate);
    m.def("select", &select_above);
    m.def("first_nonfinite", &first_nonfinite);
    m.def("late_nonfinite", [](Array<float>) { return -1; });  // accumulate() reports at once
    m.def("histogram", &histogram);
    m.def("accumulate_select_scored", &accumulate_select_scored);
    m.def("select_scored", &select_scored);
    m.def("histogram_scored", &histogram_scored);
    m.def("record", &record);
    m.def("gather", &gather);
    m.def("predict", [](Array<const uint16_t> history, Array<const float> nets, Array<const float> inverse, Array<const int64_t> ends,
                        int64_t depth, Array<uint8_t> out) {
        nb::gil_scoped_release released;
        predict(history.data(), int64_t(out.size()), nets.data(), inverse.data(), ends.data(), int64_t(ends.size()), depth, out.data());
    });
    m.def("learn", [](Array<float> nets, Array<float> mean, Array<float> square, Array<const uint16_t> history, Array<const float> inverse,
                      Array<const int64_t> ends, int64_t depth, Array<const float> magnitude, Array<const int64_t> pairs,
                      Array<const float> weights, int64_t batch, float rate, Array<const float> corrections) {
        nb::gil_scoped_release released;
        learn({nets.data(), mean.data(), square.data(), int64_t(nets.size()), rate, corrections.data()}, history.data(),
              int64_t(magnitude.size()), inverse.data(), ends.data(), int64_t(ends.size()), depth, magnitude.data(), pairs.data(),
              weights.data(), int64_t(weights.size()), batch);
    });
    m.def("tail_counts", &tail_counts);
    m.def("average_select", &average_select);
    m.def("blend", &blend);
    m.def("come_to_rest", &come_to_rest);
    m.def("block_counts", &block_counts);
    m.def("compress_rows", &compress_rows);
    m.def("expand_rows", &expand_rows);
    m.def("take", &take);
    m.def("put", &put);
    m.def("add_at", &add_at);
    m.def("add", &add);
    m.def("divide", &divide);
    m.def("zero_at", &zero_at);
    m.def("publish_at", &publish_at);
    m.def("fletcher32", [](Array<const uint8_t> data) {
        nb::gil_scoped_release released;
        return fletcher32(data.data(), int64_t(data.size()));
    });
    m.def("encode_int8", [](Array<float> x, Array<float> scales, Array<int8_t> q) {
        nb::gil_scoped_release released;
        encode_int8(x.data(), int64_t(x.size()), scales.data(), q.data());
    });
    m.def("decode_int8", [](Array<const float> scales, Array<const int8_t> q, Array<float> x) {
        nb::gil_scoped_release released;
        decode_int8(scales.data(), q.data(), int64_t(x.size()), x.data());
    });
    m.def("encode_fp16", [](Array<float> x, Array<float> scales, Array<uint16_t> h) {
        nb::gil_scoped_release released;
        encode_fp16(x.data(), int64_t(x.size()), scales.data(), h.data());
    });
    m.def("decode_fp16", [](Array<const float> scales, Array<const uint16_t> h, Array<float> x) {
        nb::gil_scoped_release released;
        decode_fp16(scales.data(), h.data(), int64_t(x.size()), x.data());
    });
    m.def("encode_bf16", [](Array<float> x, Array<uint16_t> h) {
        nb::gil_scoped_release released;
        encode_bf16(x.data(), int64_t(x.size()), h.data());
    });
    m.def("decode_bf16", [](Array<const uint16_t> h, Array<float> x) {
        nb::gil_scoped_release released;
        decode_bf16(h.data(), int64_t(x.size()), x.data());
    });
}
