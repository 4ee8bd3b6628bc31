// The native CPU backend as the Python module mpisparse._cpu. mpisparse/backends/protocol.py says what each function does;
// mpisparse/backends/numpy_backend.py does the same in NumPy, and the two agree to the last bit.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "apart.hpp"
#include "candidates.hpp"
#include "chunks.hpp"
#include "codec.hpp"
#include "indices.hpp"
#include "passes.hpp"
#include "predict.hpp"
#include "scatter.hpp"
#include "sums.hpp"
#include "tallies.hpp"

namespace {

// Runs work(codec, first group, first value, values) on whole groups, a part for each thread.
template <int WHICH, class Work>
void in_groups(int64_t n, size_t scales, size_t codes, Work work) {
    const FewBits& codec = isa.few_bits[WHICH];
    const int64_t groups = (n + codec.group - 1) / codec.group;
    const int64_t last = std::min(n - (groups - 1) * codec.group, codec.codes);
    if (int64_t(scales) != groups || int64_t(codes) != (groups ? (groups - 1) * codec.codes + last : 0))
        throw std::invalid_argument("scales or codes do not fit the number of values");
    nb::gil_scoped_release released;
    in_parts(0, groups, threads_for(n), [&](int, int64_t begin, int64_t end) {
        const int64_t first = begin * codec.group;
        work(codec, begin, first, std::min(end * codec.group, n) - first);
    });
}

template <int WHICH>
void encode_few_bits(Array<float> x, Array<uint16_t> scales, Array<uint8_t> codes) {
    in_groups<WHICH>(int64_t(x.size()), scales.size(), codes.size(), [&](const FewBits& codec, int64_t group, int64_t first, int64_t n) {
        codec.encode(x.data() + first, n, scales.data() + group, codes.data() + group * codec.codes, true);
    });
}

template <int WHICH>
void pack_few_bits(Array<const float> x, Array<uint16_t> scales, Array<uint8_t> codes) {
    auto* values = const_cast<float*>(x.data());  // not written to
    in_groups<WHICH>(int64_t(x.size()), scales.size(), codes.size(), [&](const FewBits& codec, int64_t group, int64_t first, int64_t n) {
        codec.encode(values + first, n, scales.data() + group, codes.data() + group * codec.codes, false);
    });
}

template <int WHICH, Decoding HOW>
void decode_few_bits(Array<const uint16_t> scales, Array<const uint8_t> codes, Array<float> x) {
    in_groups<WHICH>(int64_t(x.size()), scales.size(), codes.size(), [&](const FewBits& codec, int64_t group, int64_t first, int64_t n) {
        codec.decode(scales.data() + group, codes.data() + group * codec.codes, n, x.data() + first, HOW);
    });
}

// An owner's part of a reduction: left = sum of the rows, in order, / by + error; encodes it, and left becomes what is not sent.
// Returns the first index that is not finite, or -1; in tiles, so that they stay in cache between the operations.
template <int WHICH>
int64_t settle_few_bits(const std::vector<std::pair<Array<const uint16_t>, Array<const uint8_t>>>& rows, float by,
                        Array<const float> error, Array<float> left, Array<uint16_t> scales, Array<uint8_t> codes) {
    constexpr int64_t TILE = 2048;
    for (const auto& row : rows)
        if (row.first.size() != scales.size() || row.second.size() != codes.size() || error.size() != left.size())
            throw std::invalid_argument("rows and error do not fit the number of values");
    std::atomic<int64_t> bad{INT64_MAX};
    in_groups<WHICH>(int64_t(left.size()), scales.size(), codes.size(), [&](const FewBits& codec, int64_t group, int64_t first, int64_t n) {
        for (; n > 0; n -= TILE, first += TILE, group += TILE / codec.group) {
            const int64_t count = std::min(n, TILE), code = group * codec.codes;
            float* total = left.data() + first;
            Decoding how = WRITE;
            for (const auto& row : rows) {
                codec.decode(row.first.data() + group, row.second.data() + code, count, total, how);
                how = ADD;
            }
            divide_part(total, count, by);
            add_part(total, error.data() + first, count);
            if (isa.scan({total, nullptr, FP32, count, 0, 0, nullptr}) < INFINITE) {
                codec.encode(total, count, scales.data() + group, codes.data() + code, true);
                continue;
            }
            const int64_t found = first_nonfinite_of(left.data(), first, first + count);
            for (int64_t least = bad; found < least && !bad.compare_exchange_weak(least, found);) {}
        }
    });
    return bad == INT64_MAX ? -1 : int64_t(bad);
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
    m.def("peek_select", &peek_select);
    m.def("select", &select_above);
    m.def("first_nonfinite", &first_nonfinite);
    m.def("late_nonfinite", [](Array<float>) { return -1; });  // accumulate() reports at once
    m.def("histogram", &histogram);
    m.def("piece_sums", &piece_sums);
    m.def("accumulate_select_scored", &accumulate_select_scored);
    m.def("select_scored", &select_scored);
    m.def("histogram_scored", &histogram_scored);
    m.def("record", &record);
    m.def("gather", &gather);
    m.def("select_apart", &select_apart);
    m.def("group_norms", &group_norms);
    m.def("histogram_apart", &histogram_apart);
    m.def("subtract_apart", &subtract_apart);
    m.def("values_apart", &values_apart);
    m.def("move_apart", &move_apart);
    m.def("by_owner", &by_owner);
    m.def("add_stretch", &add_stretch);
    m.def("divide_into", &divide_into);
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
    m.def("drop_decayed", &drop_decayed);
    m.def("block_counts", &block_counts);
    m.def("compress_rows", &compress_rows);
    m.def("expand_rows", &expand_rows);
    m.def("encode_indices", &encode_indices);
    m.def("decode_indices", &decode_indices);
    m.def("encode_counts", &encode_counts);
    m.def("decode_counts", &decode_counts);
    m.def("encode_falling", &encode_falling);
    m.def("decode_falling", &decode_falling);
    m.def("least_borders", &least_borders);
    m.def("reaching", &reaching);
    m.def("values_at", &values_at);
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
        decode_int8<false>(scales.data(), q.data(), int64_t(x.size()), x.data());
    });
    m.def("add_int8", [](Array<const float> scales, Array<const int8_t> q, Array<float> total) {
        nb::gil_scoped_release released;
        decode_int8<true>(scales.data(), q.data(), int64_t(total.size()), total.data());
    });
    m.def("encode_fp16", [](Array<float> x, Array<float> scales, Array<uint16_t> h) {
        nb::gil_scoped_release released;
        encode_fp16(x.data(), int64_t(x.size()), scales.data(), h.data());
    });
    m.def("decode_fp16", [](Array<const float> scales, Array<const uint16_t> h, Array<float> x) {
        nb::gil_scoped_release released;
        decode_fp16<false>(scales.data(), h.data(), int64_t(x.size()), x.data());
    });
    m.def("add_fp16", [](Array<const float> scales, Array<const uint16_t> h, Array<float> total) {
        nb::gil_scoped_release released;
        decode_fp16<true>(scales.data(), h.data(), int64_t(total.size()), total.data());
    });
    m.def("encode_bf16", [](Array<float> x, Array<uint16_t> h) {
        nb::gil_scoped_release released;
        encode_bf16(x.data(), int64_t(x.size()), h.data());
    });
    m.def("decode_bf16", [](Array<const uint16_t> h, Array<float> x) {
        nb::gil_scoped_release released;
        decode_bf16<false>(h.data(), int64_t(x.size()), x.data());
    });
    m.def("add_bf16", [](Array<const uint16_t> h, Array<float> total) {
        nb::gil_scoped_release released;
        decode_bf16<true>(h.data(), int64_t(total.size()), total.data());
    });
    m.def("encode_int4", &encode_few_bits<0>);
    m.def("pack_int4", &pack_few_bits<0>);
    m.def("decode_int4", &decode_few_bits<0, WRITE>);
    m.def("add_int4", &decode_few_bits<0, ADD>);
    m.def("subtract_int4", &decode_few_bits<0, SUBTRACT>);
    m.def("settle_int4", &settle_few_bits<0>);
    m.def("encode_int2", &encode_few_bits<1>);
    m.def("pack_int2", &pack_few_bits<1>);
    m.def("decode_int2", &decode_few_bits<1, WRITE>);
    m.def("add_int2", &decode_few_bits<1, ADD>);
    m.def("subtract_int2", &decode_few_bits<1, SUBTRACT>);
    m.def("settle_int2", &settle_few_bits<1>);
    m.def("encode_sign", &encode_few_bits<2>);
    m.def("pack_sign", &pack_few_bits<2>);
    m.def("decode_sign", &decode_few_bits<2, WRITE>);
    m.def("add_sign", &decode_few_bits<2, ADD>);
    m.def("subtract_sign", &decode_few_bits<2, SUBTRACT>);
    m.def("settle_sign", &settle_few_bits<2>);
    m.def("decode_chunks", &decode_chunks);
    m.def("settle_chunks", &settle_chunks);
    m.def("accumulate_chunks", &accumulate_chunks);
}
