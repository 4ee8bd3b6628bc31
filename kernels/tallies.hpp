// Small work on counts that every step does between its messages: counts as bytes, and the borders of partitions.
// mpisparse/backends/numpy_tallies.py does the same.
#pragma once
#include "indices.hpp"

namespace {

// A row of counts is a row of marks in which each count's items are followed by its end. The places of the items, or those of
// the ends, whichever are fewer, as coded indices.
std::vector<uint8_t> code_counts(const std::vector<int64_t>& counts) {
    const int64_t slots = int64_t(counts.size());
    int64_t total = 0;
    for (const int64_t count : counts) {
        if (count < 0) throw std::invalid_argument("counts must not be negative");
        total += count;
    }
    std::vector<int64_t> places;
    places.reserve(size_t(std::min(slots, total)));
    int64_t at = 0;
    for (const int64_t count : counts) {
        if (total < slots)
            for (int64_t i = 0; i < count; ++i) places.push_back(at + i);
        else
            places.push_back(at + count);
        at += count + 1;
    }
    return encode_range(places.data(), places.size(), 0, uint64_t(slots + total));
}

// Decodes counts that code_counts() encoded; false if the message is damaged.
bool read_counts(const uint8_t* payload, size_t size, int64_t total, int64_t* out, int64_t slots) {
    if (total < 0) return false;
    std::vector<int64_t> places(size_t(std::min(slots, total)));
    if (decode_range(payload, size, 0, slots + total, places.data(), places.size()) < 0) return false;
    if (total < slots) {
        std::fill(out, out + slots, 0);
        for (int64_t i = 0; i < total; ++i) {
            const int64_t slot = places[i] - i;
            if (slot >= slots) return false;
            ++out[slot];
        }
        return true;
    }
    int64_t before = -1;
    for (int64_t s = 0; s < slots; ++s) {
        out[s] = places[s] - before - 1;
        before = places[s];
    }
    return before + 1 == slots + total;
}

void write_padded(const std::vector<uint8_t>& coded, Array<uint8_t>& payload) {
    if (coded.size() > payload.size()) throw std::invalid_argument("the counts take more bytes than there is room for");
    std::copy(coded.begin(), coded.end(), payload.data());
    std::fill(payload.data() + coded.size(), payload.data() + payload.size(), uint8_t(0));
}

NumPy<uint8_t> encode_counts(Array<const int64_t> counts) {
    return to_numpy(code_counts(std::vector<int64_t>(counts.data(), counts.data() + counts.size())));
}

bool decode_counts(Array<const uint8_t> payload, int64_t total, Array<int64_t> out) {
    return read_counts(payload.data(), payload.size(), total, out.data(), int64_t(out.size()));
}

// The same for counts that fall from one to the next: what lies between two of them travels; `above` lies above the last.
void encode_falling(Array<const int64_t> counts, int64_t above, Array<uint8_t> payload) {
    std::vector<int64_t> between(counts.size());
    for (size_t i = 0; i < between.size(); ++i)
        between[i] = counts.data()[i] - (i + 1 < between.size() ? counts.data()[i + 1] : above);
    write_padded(code_counts(between), payload);
}

bool decode_falling(Array<const uint8_t> payload, int64_t total, int64_t above, Array<int64_t> out) {
    if (!read_counts(payload.data(), payload.size(), total, out.data(), int64_t(out.size()))) return false;
    for (size_t i = out.size(); i-- > 0;) out.data()[i] = above += out.data()[i];
    return true;
}

// A part's work: the distinct sums of runs of blocks from the first on, ascending, and where the longest run of each ends.
struct RunningWork {
    std::vector<int64_t> sums{0}, stops;
    explicit RunningWork(const Array<const int64_t>& work) {
        for (size_t b = 0; b < work.size(); ++b) {
            if (!work.data()[b]) continue;
            sums.push_back(sums.back() + work.data()[b]);
            stops.push_back(int64_t(b));
        }
        stops.push_back(int64_t(work.size()));
    }
};

// Finds the borders that make the heaviest part lightest; part p has rooms[p] / unit of a bound, and none is longer than `limit`
// elements. A bound is feasible if filling the parts greedily up to it reaches the end.
NumPy<int64_t> least_borders(const std::vector<Array<const int64_t>>& work, Array<const int64_t> edges, int64_t limit,
                             const std::vector<int64_t>& rooms, int64_t unit, int64_t low, int64_t high) {
    const int64_t blocks = int64_t(edges.size()) - 1;
    if (rooms.size() != work.size()) throw std::invalid_argument("every part needs its room");
    std::vector<RunningWork> distinct;
    std::vector<size_t> of(work.size());
    for (size_t p = 0; p < work.size(); ++p) {
        if (int64_t(work[p].size()) != blocks) throw std::invalid_argument("work and edges do not fit");
        size_t same = 0;
        while (same < p && work[same].data() != work[p].data()) ++same;
        of[p] = same < p ? of[same] : distinct.size();
        if (same == p) distinct.emplace_back(work[p]);
    }
    std::vector<int64_t> borders(work.size() + 1, 0);
    const int64_t* ends = edges.data();
    const auto fill = [&](int64_t bound) {
        for (size_t p = 0; p < work.size(); ++p) {
            const RunningWork& part = distinct[of[p]];
            const int64_t start = borders[p];
            const int64_t before = part.sums[std::lower_bound(part.stops.begin(), part.stops.end(), start) - part.stops.begin()];
            const int64_t most = before + bound * rooms[p] / unit;
            int64_t stop = part.stops[std::upper_bound(part.sums.begin(), part.sums.end(), most) - part.sums.begin() - 1];
            if (limit < ends[blocks])
                stop = std::min<int64_t>(stop, std::upper_bound(ends, ends + blocks + 1, ends[start] + limit) - ends - 1);
            borders[p + 1] = stop;
        }
        return borders.back() >= blocks;
    };
    const bool weighted = std::any_of(rooms.begin(), rooms.end(), [&](int64_t room) { return room != unit; });
    while (weighted && !fill(high)) high *= 2;  // every part may have less room than one of mean weight
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (fill(middle)) high = middle;
        else low = middle + 1;
    }
    fill(low);
    return to_numpy(std::move(borders));
}

}  // namespace
