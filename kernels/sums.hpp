// Sums of many values in an order that every backend keeps: halves of a piece are added until one number is left.
#pragma once
#include <cmath>

#include "host.hpp"

namespace {

constexpr int64_t PIECE = 1024;  // elements of a piece at most; a shorter one is filled up with zeros

void add_halves(double* x) {
    for (int64_t half = PIECE / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; ++i) x[i] += x[i + half];
}

void sum_piece(const float* source, int64_t n, double* sums) {
    double x[PIECE], squares[PIECE];
    for (int64_t i = 0; i < PIECE; ++i) {
        x[i] = i < n ? std::fabs(double(source[i])) : 0.0;
        squares[i] = x[i] * x[i];
    }
    add_halves(x);
    add_halves(squares);
    sums[0] = x[0];
    sums[1] = squares[0];
}

// Two numbers for each piece [begins[i], ends[i]): the sum of its magnitudes, and that of their squares.
NumPy<double> piece_sums(Array<const float> values, Array<const int64_t> begins, Array<const int64_t> ends) {
    const int64_t pieces = int64_t(begins.size());
    std::vector<double> sums(2 * pieces);
    for (int64_t p = 0; p < pieces; ++p)
        if (begins.data()[p] < 0 || ends.data()[p] > int64_t(values.size()) || ends.data()[p] - begins.data()[p] > PIECE)
            throw std::invalid_argument("a piece must lie inside of the values and have at most 1024 elements");
    {
        nb::gil_scoped_release released;
        in_parts(0, pieces, threads_for(pieces * PIECE), [&](int, int64_t begin, int64_t end) {
            for (int64_t p = begin; p < end; ++p)
                sum_piece(values.data() + begins.data()[p], ends.data()[p] - begins.data()[p], &sums[2 * p]);
        });
    }
    return to_numpy(std::move(sums));
}

}  // namespace
