// Long vectors in few bits: one payload per chunk of values, concatenated. mpisparse/backends/payloads.py has the layout.
#pragma once
#include <cstring>

#include "passes.hpp"
#include "scatter.hpp"

namespace {

int64_t padded(int64_t nbytes) { return (nbytes + 3) / 4 * 4; }

// One payload: scales, codes, and zeros that pad both.
struct Payload {
    uint8_t* data;
    int64_t codes, codes_end, end;
    Payload(const FewBits& codec, uint8_t* at, int64_t count) : data(at) {
        const int64_t whole = count / codec.group, rest = count % codec.group;
        codes = padded(scales_end(codec, count));
        codes_end = codes + whole * codec.codes + std::min(rest, codec.codes);
        end = padded(codes_end);
    }
    static int64_t scales_end(const FewBits& codec, int64_t count) { return 2 * ((count + codec.group - 1) / codec.group); }
    uint16_t* scales_at(int64_t group) const { return reinterpret_cast<uint16_t*>(data) + group; }
    uint8_t* codes_at(const FewBits& codec, int64_t group) const { return data + codes + group * codec.codes; }
    void pad(const FewBits& codec, int64_t count) const {
        const int64_t scaled = scales_end(codec, count);
        std::memset(data + scaled, 0, codes - scaled);
        std::memset(data + codes_end, 0, end - codes_end);
    }
};

// What all chunks have in common: tiles stay in cache between operations.
struct Chunks {
    static constexpr int64_t TILE = 2048;
    const FewBits& codec;
    int64_t length;

    Chunks(const std::string& name, int64_t chunk) : codec(isa.few_bits[number_of(name)]), length(chunk) {
        if (chunk < TILE || chunk % TILE) throw std::invalid_argument("chunks must be a multiple of 2048 values long");
    }
    static int number_of(const std::string& name) {
        const char* const names[] = {"int4", "int2", "sign"};
        for (int i = 0; i < 3; ++i)
            if (name == names[i]) return i;
        throw std::invalid_argument("there is no codec of few bits named " + name);
    }
    int64_t nbytes(int64_t count) const {
        const int64_t rest = count % length;
        return count / length * Payload(codec, nullptr, length).end + (rest ? Payload(codec, nullptr, rest).end : 0);
    }
    void check(size_t size, int64_t count) const {
        if (int64_t(size) != nbytes(count)) throw std::invalid_argument("the payload does not fit the number of values");
    }
    // Calls visit(part, offset of the payload, first value, values) for each chunk of `count` values, a part for each thread.
    template <class Visit>
    void each(int64_t count, Visit visit) const {
        const int64_t size = Payload(codec, nullptr, length).end;
        in_parts(0, (count + length - 1) / length, threads_for(count), [&](int part, int64_t begin, int64_t end) {
            for (int64_t c = begin; c < end; ++c) visit(part, c * size, c * length, std::min(length, count - c * length));
        });
    }
};

int64_t first_of(const std::vector<int64_t>& bad) {
    for (int64_t b : bad)
        if (b >= 0) return b;
    return -1;
}

void decode_chunks(const std::string& codec, Array<const uint8_t> payload, int64_t chunk, Array<float> x) {
    const Chunks chunks(codec, chunk);
    const int64_t n = int64_t(x.size());
    chunks.check(payload.size(), n);
    nb::gil_scoped_release released;
    chunks.each(n, [&](int, int64_t at, int64_t first, int64_t count) {
        const Payload from(chunks.codec, const_cast<uint8_t*>(payload.data()) + at, count);  // only read
        chunks.codec.decode(from.scales_at(0), from.codes_at(chunks.codec, 0), count, x.data() + first, n >= BEYOND_CACHE ? STREAM : WRITE);
        end_stream();
    });
}

// An owner's part of a reduction: left = sum of the rows, in order, / by + error; encodes it, and left becomes what is not sent.
// Returns the first index that is not finite, or -1.
int64_t settle_chunks(const std::string& codec, const std::vector<Array<const uint8_t>>& rows, int64_t chunk, float by,
                      Array<const float> error, Array<float> left, Array<uint8_t> payload) {
    const Chunks chunks(codec, chunk);
    const int64_t n = int64_t(left.size());
    chunks.check(payload.size(), n);
    for (const auto& row : rows) chunks.check(row.size(), n);
    if (error.size() != left.size()) throw std::invalid_argument("the error does not fit the number of values");
    nb::gil_scoped_release released;
    std::vector<int64_t> bad(threads_for(n), -1);
    chunks.each(n, [&](int part, int64_t at, int64_t first, int64_t count) {
        const Payload to(chunks.codec, payload.data() + at, count);
        to.pad(chunks.codec, count);
        for (int64_t a = 0; a < count && bad[part] < 0; a += Chunks::TILE) {
            const int64_t some = std::min(Chunks::TILE, count - a), group = a / chunks.codec.group;
            float* total = left.data() + first + a;
            Decoding how = WRITE;
            for (const auto& row : rows) {
                const Payload from(chunks.codec, const_cast<uint8_t*>(row.data()) + at, count);  // only read
                chunks.codec.decode(from.scales_at(group), from.codes_at(chunks.codec, group), some, total, how);
                how = ADD;
            }
            divide_part(total, some, by);
            add_part(total, error.data() + first + a, some);
            if (isa.scan({total, nullptr, FP32, some, 0, 0, nullptr}) < INFINITE)
                chunks.codec.encode(total, some, to.scales_at(group), to.codes_at(chunks.codec, group), true);
            else
                bad[part] = first_nonfinite_of(left.data(), first + a, first + a + some);
        }
    });
    return first_of(bad);
}

// Adds the gradients and encodes the sums; what is not sent stays in acc. Chunks start anew at each border: borders[0] is 0,
// the last one the number of values. Returns the first non-finite index (then the payload is invalid), or -1.
int64_t accumulate_chunks(const std::string& codec, Array<float> acc, Array<const uint64_t> pointers, Array<const int64_t> ends,
                          Array<const uint8_t> kinds, Array<const int64_t> borders, int64_t chunk, Array<uint8_t> payload) {
    const Chunks chunks(codec, chunk);
    const Gradients grads{pointers.data(), ends.data(), kinds.data(), int64_t(pointers.size())};
    const int64_t spans = int64_t(borders.size()) - 1;
    std::vector<int64_t> starts(1, 0);
    for (int64_t s = 0; s < spans; ++s) starts.push_back(starts[s] + chunks.nbytes(borders.data()[s + 1] - borders.data()[s]));
    if (spans < 0 || borders.data()[0] != 0 || borders.data()[spans] != int64_t(acc.size()) || starts[spans] != int64_t(payload.size()))
        throw std::invalid_argument("borders and payload do not fit the number of values");
    nb::gil_scoped_release released;
    int64_t worst = -1;
    for (int64_t s = 0; s < spans; ++s) {
        const int64_t lo = borders.data()[s], n = borders.data()[s + 1] - lo;
        std::vector<int64_t> bad(threads_for(n), -1);
        chunks.each(n, [&](int part, int64_t at, int64_t first, int64_t count) {
            const Payload to(chunks.codec, payload.data() + starts[s] + at, count);
            to.pad(chunks.codec, count);
            for (int64_t a = 0; a < count; a += Chunks::TILE) {
                const int64_t some = std::min(Chunks::TILE, count - a), group = a / chunks.codec.group, begin = lo + first + a;
                int32_t top = 0;
                grads.each(begin, begin + some, [&](const char* source, Kind kind, int64_t from, int64_t to_) {
                    top = std::max(top, isa.scan({acc.data() + from, source, kind, to_ - from, from, 0, nullptr}));
                });
                if (top < INFINITE)
                    chunks.codec.encode(acc.data() + begin, some, to.scales_at(group), to.codes_at(chunks.codec, group), true);
                else if (bad[part] < 0)
                    bad[part] = first_nonfinite_of(acc.data(), begin, begin + some);
            }
        });
        if (worst < 0) worst = first_of(bad);
    }
    return worst;
}

}  // namespace
