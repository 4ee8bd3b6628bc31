// Importance of elements, predicted by one small net per layer. Its inputs are the element's last gradients, divided by the layer's
// root mean square, with the sign of the accumulated value taken out; HIDDEN rectified units lead to a number in (0, 1).
// Only operations that IEEE 754 defines to the last bit, in a fixed order: mpisparse/backends/numpy_nets.py gives the same bits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>
#include "scan.hpp"

constexpr int64_t HIDDEN = 8, DEPTHS = 8, STRIP = 64;
inline int64_t net_size(int64_t depth) { return HIDDEN * (depth + 2) + 1; }

// Layout of a net: the weights of each hidden unit, the hidden biases, the output weights, the output bias.
struct Net {
    const float* weights;
    int64_t depth;
    const float* unit(int64_t j) const { return weights + j * depth; }
    float bias(int64_t j) const { return weights[HIDDEN * depth + j]; }
    float out(int64_t j) const { return weights[HIDDEN * (depth + 1) + j]; }
    float out_bias() const { return weights[HIDDEN * (depth + 2)]; }
};

// About log2(1 + |x|) with the sign of x: linear between powers of two.
inline float feature(uint16_t gradient, float inverse) {
    const float x = bf16_to_float(gradient) * inverse;
    const float length = float(int32_t(bits_of(1.0f + std::fabs(x))) - 0x3f800000) * 0x1p-23f;
    return float_of(bits_of(length) | (bits_of(x) & 0x80000000u));
}

inline float oriented(float x, uint16_t accumulated) { return float_of(bits_of(x) ^ (uint32_t(accumulated & 0x8000u) << 16)); }

inline float importance(float z) { return 0.5f + 0.5f * (z / (1.0f + std::fabs(z))); }

inline uint8_t score_of(float z) { return uint8_t(std::min(254.0f, importance(z) * 255.0f)); }

// Scores elements [0, count) of one layer; row r of the history is at history + r * stride, the accumulator is the row after the last.
MPISPARSE_CLONES
void predict_layer(const uint16_t* history, int64_t stride, int64_t count, const float* weights, int64_t depth, float inverse, uint8_t* out) {
    const Net net{weights, depth};
    float x[DEPTHS][STRIP], z[STRIP], unit[STRIP];
    for (int64_t start = 0; start < count; start += STRIP) {
        const int64_t n = std::min(STRIP, count - start);
        const uint16_t* accumulated = history + depth * stride + start;
        for (int64_t h = 0; h < depth; ++h)
            for (int64_t i = 0; i < n; ++i) x[h][i] = oriented(feature(history[h * stride + start + i], inverse), accumulated[i]);
        for (int64_t i = 0; i < STRIP; ++i) z[i] = net.out_bias();
        for (int64_t j = 0; j < HIDDEN; ++j) {
            for (int64_t i = 0; i < n; ++i) unit[i] = net.bias(j);
            for (int64_t h = 0; h < depth; ++h)
                for (int64_t i = 0; i < n; ++i) unit[i] += net.unit(j)[h] * x[h][i];
            for (int64_t i = 0; i < n; ++i) z[i] += net.out(j) * (unit[i] > 0.0f ? unit[i] : 0.0f);
        }
        for (int64_t i = 0; i < n; ++i) out[start + i] = score_of(z[i]);
    }
}

// Scores `count` elements; `ends` delimits the layers.
inline void predict(const uint16_t* history, int64_t count, const float* nets, const float* inverse, const int64_t* ends, int64_t layers,
                    int64_t depth, uint8_t* out) {
    for (int64_t layer = 0, begin = 0; layer < layers; begin = ends[layer++])
        predict_layer(history + begin, count, ends[layer] - begin, nets + layer * net_size(depth), depth, inverse[layer], out + begin);
}

// The state of training: the nets and Adam's moments, with its two bias corrections per batch.
struct Learner {
    float *nets, *mean, *square;
    int64_t size;
    float rate;
    const float* corrections;

    void move(int64_t batch, const float* slope, float pairs) const {
        for (int64_t i = 0; i < size; ++i) {
            const float g = slope[i] / pairs;
            mean[i] = 0.9f * mean[i] + 0.1f * g;
            square[i] = 0.99f * square[i] + 0.01f * (g * g);
            nets[i] -= rate * ((mean[i] * corrections[2 * batch]) / (std::sqrt(square[i] * corrections[2 * batch + 1]) + 1e-8f));
        }
    }
};

// Forward and backward pass of one element through its net.
struct Pass {
    float x[DEPTHS], unit[HIDDEN], z;
    void forward(const Net& net, const uint16_t* history, int64_t stride, float inverse) {
        for (int64_t h = 0; h < net.depth; ++h) x[h] = oriented(feature(history[h * stride], inverse), history[net.depth * stride]);
        z = net.out_bias();
        for (int64_t j = 0; j < HIDDEN; ++j) {
            unit[j] = net.bias(j);
            for (int64_t h = 0; h < net.depth; ++h) unit[j] += net.unit(j)[h] * x[h];
            z += net.out(j) * (unit[j] > 0.0f ? unit[j] : 0.0f);
        }
    }
    // Adds to the gradient of a net, given the gradient with respect to the logarithm of the importance.
    void backward(const Net& net, float slope, float* slopes) const {
        const float wide = 1.0f + std::fabs(z), at_z = (slope / importance(z)) * (0.5f / (wide * wide));
        float *units = slopes, *biases = slopes + HIDDEN * net.depth, *outs = biases + HIDDEN;
        for (int64_t j = 0; j < HIDDEN; ++j) {
            outs[j] += at_z * (unit[j] > 0.0f ? unit[j] : 0.0f);
            const float at_unit = unit[j] > 0.0f ? at_z * net.out(j) : 0.0f;
            biases[j] += at_unit;
            for (int64_t h = 0; h < net.depth; ++h) units[j * net.depth + h] += at_unit * x[h];
        }
        outs[HIDDEN] += at_z;
    }
};

// Trains the nets with Adam to rank the first element of each pair above the second, by importance x magnitude. The loss of a batch
// is the weighted mean over its pairs of (second - first) / (second + first).
inline void learn(const Learner& learner, const uint16_t* history, int64_t count, const float* inverse, const int64_t* ends, int64_t layers,
                  int64_t depth, const float* magnitude, const int64_t* pairs, const float* weights, int64_t n, int64_t batch) {
    std::vector<int64_t> layer_of(count);
    for (int64_t layer = 0, i = 0; layer < layers; ++layer)
        for (; i < ends[layer]; ++i) layer_of[i] = layer;
    std::vector<float> slopes(learner.size);
    Pass pass[2];
    for (int64_t start = 0, b = 0; start < n; start += batch, ++b) {
        std::fill(slopes.begin(), slopes.end(), 0.0f);
        const int64_t stop = std::min(n, start + batch);
        for (int64_t p = start; p < stop; ++p) {
            float key[2];
            for (int side = 0; side < 2; ++side) {
                const int64_t i = pairs[2 * p + side];
                pass[side].forward({learner.nets + layer_of[i] * net_size(depth), depth}, history + i, count, inverse[layer_of[i]]);
                key[side] = importance(pass[side].z) * magnitude[i];
            }
            const float both = key[0] + key[1];
            const float slope = both > 0.0f ? weights[p] * (2.0f * ((key[0] / both) * (key[1] / both))) : 0.0f;
            for (int side = 0; side < 2; ++side) {
                const int64_t at = layer_of[pairs[2 * p + side]] * net_size(depth);
                pass[side].backward({learner.nets + at, depth}, side ? slope : -slope, slopes.data() + at);
            }
        }
        learner.move(b, slopes.data(), float(stop - start));
    }
}
