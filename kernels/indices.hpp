// Ascending indices as Golomb-Rice codes of their gaps. mpisparse/backends/gaps.py describes the format.
#pragma once
#include <cstring>

#include "host.hpp"

namespace {

constexpr size_t GAP_GROUP = 128;  // gaps that share a parameter
constexpr uint64_t ESCAPE = 32;    // a quotient of a group that is written elsewhere
constexpr int MOST_LOW = 31;       // bits of a gap that are written as they are
constexpr uint8_t PLAIN = 0, GROUPED = 1;

int bit_length(uint64_t x) { return x ? 64 - __builtin_clzll(x) : 0; }

int low_bits(uint64_t spare, uint64_t count) { return std::min(MOST_LOW, std::max(0, bit_length(spare / count) - 1)); }

// Bits of some gaps with a parameter. Sums fit into a Gap: together gaps are no longer than their region.
template <class Gap>
uint64_t plain_bits(const Gap* gaps, size_t count, int low) {
    Gap ones = 0;
    for (size_t i = 0; i < count; ++i) ones += gaps[i] >> low;
    return uint64_t(ones) + count * uint64_t(1 + low);
}

// The same for a group; large quotients are written in `wide` bits elsewhere.
template <class Gap>
uint64_t group_bits(const Gap* gaps, size_t count, int low, int wide) {
    Gap ones = 0, escapes = 0;
    for (size_t i = 0; i < count; ++i) {
        const Gap quotient = gaps[i] >> low;
        const bool escaped = quotient >= Gap(ESCAPE);
        ones += escaped ? Gap(ESCAPE) : quotient;
        escapes += escaped;
    }
    return uint64_t(ones) + count * uint64_t(1 + low) + uint64_t(escapes) * uint64_t(wide);
}

// Writes bits to zeroed memory, low ones first.
class BitWriter {
public:
    BitWriter(uint8_t* bytes, uint64_t at) : bytes_(bytes), at_(at) {}
    void put(uint64_t value, int count) {  // at most 57 bits
        uint64_t word;
        std::memcpy(&word, bytes_ + (at_ >> 3), 8);
        word |= value << (at_ & 7);
        std::memcpy(bytes_ + (at_ >> 3), &word, 8);
        at_ += uint64_t(count);
    }
    void unary(uint64_t zeros) {
        at_ += zeros;
        bytes_[at_ >> 3] |= uint8_t(1u << (at_ & 7));
        ++at_;
    }
    // The lowest `bits` bits of every value.
    template <class Gap>
    void lows(const Gap* values, size_t count, int bits) {
        const uint64_t mask = (uint64_t(1) << bits) - 1;
        uint8_t* to = bytes_ + (at_ >> 3);
        int filled = int(at_ & 7);
        uint64_t word = filled ? *to & ((1u << filled) - 1) : 0;
        for (size_t i = 0; i < count; ++i) {
            word |= (uint64_t(values[i]) & mask) << filled;
            filled += bits;
            if (filled >= 32) {
                std::memcpy(to, &word, 4);
                to += 4;
                word >>= 32;
                filled -= 32;
            }
        }
        for (; filled > 0; filled -= 8, word >>= 8) *to++ |= uint8_t(word);
        at_ += count * uint64_t(bits);
    }

private:
    uint8_t* bytes_;
    uint64_t at_;
};

// Reads bits of a message that may end anywhere; bits beyond its end read as zeros.
class BitReader {
public:
    BitReader(const uint8_t* bytes, size_t size) : bytes_(bytes), size_(size) {}
    uint64_t get(uint64_t at, int count) const { return (word(at >> 3) >> (at & 7)) & ((uint64_t(1) << count) - 1); }  // up to 57 bits
    uint64_t word(size_t at) const {
        uint64_t word = 0;
        if (at + 8 <= size_) std::memcpy(&word, bytes_ + at, 8);
        else if (at < size_) std::memcpy(&word, bytes_ + at, size_ - at);
        return word;
    }

private:
    const uint8_t* bytes_;
    size_t size_;
};

// The parameter of a group, from the mean gap downwards as long as that saves bits; adds the bits of the group.
template <class Gap>
int group_low(const Gap* gaps, size_t count, int wide, uint64_t& bits) {
    Gap sum = 0;
    for (size_t i = 0; i < count; ++i) sum += gaps[i];
    int low = std::min(MOST_LOW, bit_length(uint64_t(sum) / count));
    uint64_t least = group_bits(gaps, count, low, wide);
    while (low > 0) {
        const uint64_t fewer = group_bits(gaps, count, low - 1, wide);
        if (fewer >= least) break;
        least = fewer;
        --low;
    }
    bits += least;
    return low;
}

template <class Gap>
std::vector<uint8_t> encode_gaps(const std::vector<Gap>& gaps, uint64_t length) {
    const size_t count = gaps.size(), groups = (count + GAP_GROUP - 1) / GAP_GROUP;
    const int wide = bit_length(length), plain = low_bits(length - count, count);
    const auto size_of = [&](size_t g) { return std::min(GAP_GROUP, count - g * GAP_GROUP); };
    std::vector<uint8_t> lows(groups);
    uint64_t in_groups = 8 * groups, low_total = 0;
    for (size_t g = 0; g < groups; ++g) {
        lows[g] = uint8_t(group_low(gaps.data() + g * GAP_GROUP, size_of(g), wide, in_groups));
        low_total += size_of(g) * uint64_t(lows[g]);
    }
    const uint64_t in_one = plain_bits(gaps.data(), count, plain);
    const bool grouped = in_groups < in_one;
    const size_t nbytes = 1 + size_t((std::min(in_groups, in_one) + 7) / 8), head = 1 + (grouped ? groups : 0);
    std::vector<uint8_t> out(nbytes + 8, 0);
    out[0] = grouped ? GROUPED : PLAIN;
    BitWriter low(out.data(), 8 * head), unary(out.data(), 8 * head + (grouped ? low_total : count * uint64_t(plain)));
    if (!grouped) {
        low.lows(gaps.data(), count, plain);
        for (const Gap gap : gaps) unary.unary(uint64_t(gap) >> plain);
    } else {
        std::copy(lows.begin(), lows.end(), out.begin() + 1);
        std::vector<uint64_t> escaped;
        for (size_t g = 0; g < groups; ++g) low.lows(gaps.data() + g * GAP_GROUP, size_of(g), lows[g]);
        for (size_t i = 0; i < count; ++i) {
            const uint64_t quotient = uint64_t(gaps[i]) >> lows[i / GAP_GROUP];
            if (quotient >= ESCAPE) escaped.push_back(quotient);
            unary.unary(std::min(quotient, ESCAPE));
        }
        for (const uint64_t quotient : escaped) unary.put(quotient, wide);
    }
    out.resize(nbytes);
    return out;
}

template <class Gap>
std::vector<uint8_t> encode_as(const int64_t* index, size_t count, int64_t lo, uint64_t length) {
    std::vector<Gap> gaps(count);
    gaps[0] = Gap(index[0] - lo);
    for (size_t i = 1; i < count; ++i) gaps[i] = Gap(index[i] - index[i - 1] - 1);
    return encode_gaps(gaps, length);
}

std::vector<uint8_t> encode_range(const int64_t* index, size_t count, int64_t lo, uint64_t length) {
    if (count == 0) return {};
    return length >> 31 ? encode_as<int64_t>(index, count, lo, length) : encode_as<int32_t>(index, count, lo, length);
}

NumPy<uint8_t> encode_indices(Array<const int64_t> index, int64_t lo, int64_t hi) {
    std::vector<uint8_t> out;
    {
        nb::gil_scoped_release released;
        out = encode_range(index.data(), index.size(), lo, uint64_t(hi - lo));
    }
    return to_numpy(std::move(out));
}

// Reads quotients one after the other; false where the message ends.
class Quotients {
public:
    Quotients(const BitReader& reader, size_t size, uint64_t at)
        : reader_(reader), size_(size), byte_(size_t(at >> 3)), word_(reader.word(byte_) >> (at & 7) << (at & 7)), at_(at) {}
    bool next(uint64_t& quotient) {
        while (word_ == 0) {
            byte_ += 8;
            if (byte_ >= size_) return false;
            word_ = reader_.word(byte_);
        }
        const uint64_t one = 8 * uint64_t(byte_) + uint64_t(__builtin_ctzll(word_));
        quotient = one - at_;
        word_ &= word_ - 1;
        at_ = one + 1;
        return true;
    }
    uint64_t at() const { return at_; }

private:
    const BitReader& reader_;
    size_t size_, byte_;
    uint64_t word_, at_;
};

// Writes the gaps of a message whose groups have their own parameters; returns where its bits end, or 0 if it is damaged.
uint64_t decode_groups(const uint8_t* bytes, size_t size, uint64_t length, int64_t* out, size_t count) {
    const size_t groups = (count + GAP_GROUP - 1) / GAP_GROUP;
    if (size < 1 + groups) return 0;
    const int wide = bit_length(length);
    uint64_t low = 8 * uint64_t(1 + groups), at = low;
    for (size_t g = 0; g < groups; ++g) {
        if (bytes[1 + g] > MOST_LOW) return 0;
        at += uint64_t(bytes[1 + g]) * std::min(GAP_GROUP, count - g * GAP_GROUP);
    }
    if (at >= 8 * uint64_t(size)) return 0;
    const BitReader reader(bytes, size);
    Quotients quotients(reader, size, at);
    std::vector<size_t> escaped;
    for (size_t i = 0; i < count; ++i) {
        const int bits = bytes[1 + i / GAP_GROUP];
        uint64_t quotient;
        if (!quotients.next(quotient) || quotient > std::min(length >> bits, ESCAPE)) return 0;
        if (quotient == ESCAPE) escaped.push_back(i);
        out[i] = int64_t(quotient << bits | reader.get(low, bits));
        low += uint64_t(bits);
    }
    at = quotients.at();
    for (const size_t i : escaped) {
        const int bits = bytes[1 + i / GAP_GROUP];
        uint64_t quotient = reader.get(at, std::min(wide, 32));
        if (wide > 32) quotient |= reader.get(at + 32, wide - 32) << 32;
        at += uint64_t(wide);
        if (at > 8 * uint64_t(size) || quotient < ESCAPE || quotient > length >> bits) return 0;
        out[i] = int64_t(quotient << bits | (uint64_t(out[i]) & ((uint64_t(1) << bits) - 1)));
    }
    return at;
}

// The same where all gaps have one parameter.
uint64_t decode_plain(const uint8_t* bytes, size_t size, uint64_t length, int64_t* out, size_t count) {
    const int bits = low_bits(length - count, count);
    uint64_t low = 8, at = low + uint64_t(bits) * count;
    if (at >= 8 * uint64_t(size)) return 0;
    const BitReader reader(bytes, size);
    Quotients quotients(reader, size, at);
    const uint64_t most = length >> bits;
    for (size_t i = 0; i < count; ++i) {
        uint64_t quotient;
        if (!quotients.next(quotient) || quotient > most) return 0;
        out[i] = int64_t(quotient << bits | reader.get(low, bits));
        low += uint64_t(bits);
    }
    return quotients.at();
}

// Writes the indices to `out` and returns how many bytes they took, or -1 if the message is damaged.
int64_t decode_range(const uint8_t* bytes, size_t size, int64_t lo, int64_t hi, int64_t* index, size_t count) {
    const uint64_t length = uint64_t(hi - lo);
    if (count == 0) return 0;
    if (size == 0 || count > length || bytes[0] > GROUPED) return -1;
    const uint64_t end = (bytes[0] == GROUPED ? decode_groups : decode_plain)(bytes, size, length, index, count);
    if (end == 0) return -1;
    uint64_t offset = 0;
    for (size_t i = 0; i < count; ++i) {
        offset += uint64_t(index[i]);
        if (offset >= length) return -1;
        index[i] = lo + int64_t(offset++);
    }
    return int64_t((end + 7) / 8);
}

int64_t decode_indices(Array<const uint8_t> payload, int64_t lo, int64_t hi, Array<int64_t> out) {
    nb::gil_scoped_release released;
    return decode_range(payload.data(), payload.size(), lo, hi, out.data(), out.size());
}

// The candidates that reach a threshold.
NumPy<int64_t> reaching(Array<const int64_t> index, Array<const float> magnitude, float threshold) {
    std::vector<int64_t> kept(index.size());
    {
        nb::gil_scoped_release released;
        const int64_t* from = index.data();
        const float* height = magnitude.data();
        int64_t* to = kept.data();
        size_t count = 0;
        for (size_t i = 0, n = index.size(); i < n; ++i) {
            to[count] = from[i];
            count += height[i] >= threshold;
        }
        kept.resize(count);
    }
    return to_numpy(std::move(kept));
}

}  // namespace
