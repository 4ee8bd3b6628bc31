// The native CPU backend as the Python module mpisparse._cpu. mpisparse/backends/protocol.py says what each function does;
// mpisparse/backends/numpy_backend.py does the same in NumPy, and the two agree to the last bit.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "candidates.hpp"
#include "codec.hpp"
#include "indices.hpp"
#include "passes.hpp"
#include "predict.hpp"
#include "scatter.hpp"

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
    m.def("drop_decayed", &drop_decayed);
    m.def("block_counts", &block_counts);
    m.def("compress_rows", &compress_rows);
    m.def("expand_rows", &expand_rows);
    m.def("encode_indices", &encode_indices);
    m.def("decode_indices", &decode_indices);
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
