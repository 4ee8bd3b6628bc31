// The gradients of a step, and kernels that only read them.
#pragma once
#include <cmath>

#include "host.hpp"

namespace {

// The gradients of one step, one entry per parameter: address (null: no gradient), end in the flat vector, element kind.
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

// Writes the gradients of [lo, lo + out.size()) as bfloat16; absent ones are zero.
void record(Array<const uint64_t> pointers, Array<const int64_t> ends, Array<const uint8_t> kinds, int64_t lo, Array<uint16_t> out) {
    nb::gil_scoped_release released;
    const Gradients grads{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    grads.each(lo, lo + int64_t(out.size()), [&](const char* source, Kind kind, int64_t from, int64_t to) {
        uint16_t* target = out.data() + (from - lo);
        if (!source) std::fill(target, target + (to - from), uint16_t(0));
        for (int64_t i = 0; source && i < to - from; ++i) target[i] = float_to_finite_bf16(load_one(source, kind, i));
    });
}

// Writes the gradients at ascending indices; absent ones are zero.
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

}  // namespace
