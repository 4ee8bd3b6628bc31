// The passes over the flat vector: add gradients, watch for non-finite values, mark the elements that reach a floor.

// The gradients of one step, one entry per parameter: address (null: no gradient), end in the flat vector, element kind.
struct Gradients {
    const u64* pointers;
    const i64* ends;
    const u8* kinds;
    i64 count;
};

// A thread's position among the gradients while it visits ascending elements.
struct Place {
    i64 slot, begin, end;
    const void* source;
    u32 kind;
};

// Moves on to the gradient of element i; returns whether there is one.
__device__ inline bool move_to(Place* place, const Gradients& grads, i64 i) {
    if (i >= place->end && place->slot < grads.count) {
        place->slot = upper_bound(grads.ends, place->slot, grads.count, i);
        const bool inside = place->slot < grads.count;
        place->begin = place->slot ? grads.ends[place->slot - 1] : 0;
        place->end = inside ? grads.ends[place->slot] : NONE;
        place->source = inside ? (const void*)grads.pointers[place->slot] : nullptr;
        place->kind = inside ? grads.kinds[place->slot] : FP32;
    }
    return i < place->end && place->source != nullptr;
}

// What a pass is given: acc += gradient; update the moving average, if there is one; mark the elements of [lo, hi) that reach `floor`.
struct Pass {
    float *acc, *average;
    float rate, rest;
    i64 size, lo, hi;
    u32 floor;
    u32* masks;  // null: nothing is marked
};

// What a thread has found in its tile: marked elements, and the lowest index at which acc is not finite, among those added to (or,
// without an average, compared with the floor).
struct Seen {
    u32 hits;
    i64 bad;
};

__device__ inline float average_of(const Pass& p, bool given, float gradient, float mean) {
    const float kept = __fmul_rn(p.rest, mean);
    return given ? __fadd_rn(__fmul_rn(p.rate, absolute(gradient)), kept) : kept;
}

// Any tile, one element at a time: a thread's elements lie BLOCK apart.
template <bool AVERAGE>
__device__ inline Seen any_tile(const Pass& p, const Gradients& grads, Place place, i64 tile) {
    const int BATCH = 4;  // loads in flight at a time
    Seen seen = {0, NONE};
    for (int start = 0; start < 32; start += BATCH) {
        float x[BATCH], g[BATCH], mean[BATCH];
        bool given[BATCH];
#pragma unroll
        for (int item = 0; item < BATCH; ++item) {
            const i64 i = tile * TILE + (start + item) * BLOCK + threadIdx.x;
            given[item] = i < p.size && move_to(&place, grads, i);
            const bool inside = i >= p.lo && i < p.hi;
            g[item] = given[item] ? load_one(place.source, place.kind, i - place.begin) : 0.0f;
            x[item] = given[item] || (!AVERAGE && inside) ? p.acc[i] : 0.0f;
            if (AVERAGE) mean[item] = i < p.size ? p.average[i] : 0.0f;
        }
#pragma unroll
        for (int item = 0; item < BATCH; ++item) {
            const i64 i = tile * TILE + (start + item) * BLOCK + threadIdx.x;
            const bool inside = i >= p.lo && i < p.hi;
            if (given[item]) p.acc[i] = x[item] = __fadd_rn(x[item], g[item]);
            if ((bits_of(x[item]) & MAGNITUDE) >= INFINITE && i < seen.bad) seen.bad = i;
            if (AVERAGE) {
                mean[item] = average_of(p, given[item], g[item], mean[item]);
                if (i < p.size) p.average[i] = mean[item];
            }
            if (!p.masks) continue;
            const u32 magnitude = bits_of(AVERAGE ? mean[item] : x[item]) & MAGNITUDE;
            const u32 word = __ballot_sync(ALL, inside && magnitude >= p.floor);
            if (threadIdx.x % 32 == 0) {
                p.masks[(i64)blockIdx.x * BLOCK + (start + item) * WARPS + threadIdx.x / 32] = word;
                seen.hits += __popc(word);
            }
        }
    }
    return seen;
}

struct Half {
    u16 bits;
};
struct Brain {
    u16 bits;
};
__device__ inline float as_float(float x) { return x; }
__device__ inline float as_float(Half x) { return fp16_to_float(x.bits); }
__device__ inline float as_float(Brain x) { return bf16_to_float(x.bits); }

// The word of marks that this lane writes, from what all lanes of its warp have marked: bit 4 j + k of `own` is element k of the
// lane's vector in round j.
__device__ inline u32 word_of_lane(u32 own) {
    if (__ballot_sync(ALL, own != 0) == 0) return 0;
    const u32 lane = threadIdx.x % 32;
    u32 word = 0;
    for (u32 s = 0; s < 8; ++s) word |= ((__shfl_sync(ALL, own, 8 * (lane % 4) + s) >> (lane / 4 * 4)) & 15u) << (4 * s);
    return word;
}

// A whole tile inside one parameter: vectors of four elements. A warp has 1,024 neighbours, 128 in each of eight rounds.
// GIVEN: there is a gradient, of type Number.
template <bool AVERAGE, bool GIVEN, class Number>
__device__ inline Seen inner_tile(const Pass& p, const Number* source, i64 tile) {
    const int BATCH = GIVEN ? 2 : 4;  // rounds whose loads are in flight at a time
    const i64 first = tile * TILE + threadIdx.x / 32 * 1024 + threadIdx.x % 32 * 4;
    Four<float>* const acc = (Four<float>*)(p.acc + first);
    Four<float>* const average = (Four<float>*)(p.average + first);
    const Four<Number>* const gradient = (const Four<Number>*)(source + (first - tile * TILE));
    u32 own = 0, most = 0;
#pragma unroll 1
    for (int start = 0; start < 8; start += BATCH) {
        Four<float> x[BATCH], mean[BATCH];
        Four<Number> g[BATCH];
#pragma unroll
        for (int round = 0; round < BATCH; ++round) {
            const int at = 32 * (start + round);
            if (GIVEN) g[round] = gradient[at];
            if (GIVEN || !AVERAGE) x[round] = acc[at];
            if (AVERAGE) mean[round] = average[at];
        }
#pragma unroll
        for (int round = 0; round < BATCH; ++round) {
            const int at = 32 * (start + round);
            u32 marked = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float added = GIVEN ? as_float(g[round].at[k]) : 0.0f;
                if (GIVEN) x[round].at[k] = __fadd_rn(x[round].at[k], added);
                if (AVERAGE) mean[round].at[k] = average_of(p, GIVEN, added, mean[round].at[k]);
                const u32 size = GIVEN || !AVERAGE ? bits_of(x[round].at[k]) & MAGNITUDE : 0u;
                if (size > most) most = size;
                if ((AVERAGE ? bits_of(mean[round].at[k]) & MAGNITUDE : size) >= p.floor) marked |= 1u << k;
            }
            if (GIVEN) acc[at] = x[round];
            if (AVERAGE) average[at] = mean[round];
            own |= marked << (4 * (start + round));
        }
    }
    Seen seen = {0, NONE};
    for (int item = 0; most >= INFINITE && seen.bad == NONE; ++item)
        if ((bits_of(acc[item / 4 * 32].at[item % 4]) & MAGNITUDE) >= INFINITE) seen.bad = first + item / 4 * 128 + item % 4;
    if (p.masks) {
        const u32 word = word_of_lane(own);
        p.masks[(i64)blockIdx.x * BLOCK + threadIdx.x] = word;
        seen.hits = __popc(word);
    }
    return seen;
}

// One tile, by vectors if it lies inside one parameter and inside or outside of [lo, hi), and all vectors begin at multiples of
// their size. `place`: that of the tile's first element; given: whether there is a gradient.
template <bool AVERAGE>
__device__ inline Seen one_tile(Pass p, const Gradients& grads, const Place& place, bool given, i64 tile) {
    const i64 begin = tile * TILE, end = begin + TILE;
    const bool outside = end <= p.lo || begin >= p.hi, inside = begin >= p.lo && end <= p.hi;
    const u64 source = (u64)place.source + (begin - place.begin) * (place.kind == FP32 ? 4 : 2);
    const bool aligned = ((u64)p.acc | (u64)p.average) % 16 == 0 && (!given || source % (place.kind == FP32 ? 16 : 8) == 0);
    const bool whole = end <= p.size && (end <= place.end || grads.count == 0) && (inside || (outside && (given || AVERAGE)));
    if (!whole || !aligned) return any_tile<AVERAGE>(p, grads, place, tile);
    if (outside) p.floor = ALL;  // which no magnitude reaches
    if (!given) return inner_tile<AVERAGE, false>(p, (const float*)nullptr, tile);
    if (place.kind == FP32) return inner_tile<AVERAGE, true>(p, (const float*)source, tile);
    if (place.kind == FP16) return inner_tile<AVERAGE, true>(p, (const Half*)source, tile);
    return inner_tile<AVERAGE, true>(p, (const Brain*)source, tile);
}

template <bool AVERAGE>
__device__ inline void pass(const Pass& p, const Gradients& grads, i64 tile, u32* counts, i64* bads, u32* warps, i64* lows) {
    Place place = {0, 0, 0, nullptr, FP32};
    const bool given = tile * TILE < p.size && move_to(&place, grads, tile * TILE);
    Seen seen = one_tile<AVERAGE>(p, grads, place, given, tile);
    u32 total = 0;
    if (p.masks) sum_before(seen.hits, warps, &total);
    if (__syncthreads_or(seen.bad != NONE)) seen.bad = lowest(seen.bad, lows);
    if (threadIdx.x == 0) {
        if (counts) counts[blockIdx.x] = total;
        bads[blockIdx.x] = seen.bad;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
accumulate_select(float* acc, i64 size, const u64* pointers, const i64* ends, const u8* kinds, i64 slots, i64 lo, i64 hi,
                  u32 floor, i64 first, u32* masks, u32* counts, i64* bads) {
    __shared__ u32 warps[WARPS];
    __shared__ i64 lows[WARPS];
    const Gradients grads = {pointers, ends, kinds, slots};
    const Pass p = {acc, nullptr, 0.0f, 0.0f, size, lo, hi, floor, masks};
    pass<false>(p, grads, first + blockIdx.x, counts, bads, warps, lows);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
average_select(float* acc, float* average, float rate, float rest, i64 size, const u64* pointers, const i64* ends, const u8* kinds,
               i64 slots, i64 lo, i64 hi, u32 floor, u32* masks, u32* counts, i64* bads) {
    __shared__ u32 warps[WARPS];
    __shared__ i64 lows[WARPS];
    const Gradients grads = {pointers, ends, kinds, slots};
    const Pass p = {acc, average, rate, rest, size, lo, hi, floor, masks};
    pass<true>(p, grads, blockIdx.x, counts, bads, warps, lows);
}

// Gradients that are added during backward, by one launch: where each goes and lies, its elements and kind, and the number of tiles
// of all up to it.
#define ADDED 32
struct Addition {
    float* acc;
    const void* source;
    i64 size, tiles;
    u64 kind;
};
struct Additions {
    Addition at[ADDED];
};

// Selects nothing. The lowest address where acc is not finite goes to `noted`; the host reads it later.
extern "C" __global__ void __launch_bounds__(BLOCK) accumulate(const __grid_constant__ Additions added, u64* noted) {
    __shared__ i64 lows[WARPS];
    u32 which = 0;
    while (added.at[which].tiles <= blockIdx.x) ++which;
    const Addition& own = added.at[which];
    const i64 tile = blockIdx.x - (which ? added.at[which - 1].tiles : 0);
    const Gradients none = {nullptr, nullptr, nullptr, 0};
    const Place place = {0, 0, own.size, own.source, (u32)own.kind};
    const Pass p = {own.acc, nullptr, 0.0f, 0.0f, own.size, 0, 0, 0, nullptr};
    i64 bad = one_tile<false>(p, none, place, true, tile).bad;
    if (__syncthreads_or(bad != NONE)) bad = lowest(bad, lows);
    if (threadIdx.x == 0 && bad != NONE) atomicMin(noted, (u64)(own.acc + bad));
}

// Where a tile of gradients is not finite, by vectors if it lies inside one parameter.
template <class Number>
__device__ inline i64 watch_inner(const Number* source, i64 tile) {
    const int BATCH = 4;  // rounds whose loads are in flight at a time
    const Four<Number>* const gradient = (const Four<Number>*)source + threadIdx.x;
    u32 most = 0;
#pragma unroll 1
    for (int start = 0; start < 8; start += BATCH) {
        Four<Number> g[BATCH];
#pragma unroll
        for (int round = 0; round < BATCH; ++round) g[round] = gradient[(start + round) * BLOCK];
#pragma unroll
        for (int round = 0; round < BATCH; ++round)
            for (int k = 0; k < 4; ++k) {
                const u32 size = bits_of(as_float(g[round].at[k])) & MAGNITUDE;
                if (size > most) most = size;
            }
    }
    for (int item = 0; most >= INFINITE && item < 32; ++item)
        if ((bits_of(as_float(gradient[item / 4 * BLOCK].at[item % 4])) & MAGNITUDE) >= INFINITE)
            return tile * TILE + 4 * (item / 4 * BLOCK + (i64)threadIdx.x) + item % 4;
    return NONE;
}

__device__ inline i64 watch_any(i64 size, const Gradients& grads, Place place, i64 tile) {
    for (int item = 0; item < 32; ++item) {
        const i64 i = tile * TILE + item * BLOCK + threadIdx.x;
        if (i >= size || !move_to(&place, grads, i)) continue;
        const float x = load_one(place.source, place.kind, i - place.begin);
        if ((bits_of(x) & MAGNITUDE) >= INFINITE) return i;
    }
    return NONE;
}

__device__ inline i64 watch(i64 size, const Gradients& grads, i64 tile) {
    const i64 begin = tile * TILE, end = begin + TILE;
    Place place = {0, 0, 0, nullptr, FP32};
    const bool given = move_to(&place, grads, begin);
    const u64 source = (u64)place.source + (begin - place.begin) * (place.kind == FP32 ? 4 : 2);
    if (!given || end > size || end > place.end || source % (place.kind == FP32 ? 16 : 8)) return watch_any(size, grads, place, tile);
    if (place.kind == FP32) return watch_inner((const float*)source, tile);
    if (place.kind == FP16) return watch_inner((const Half*)source, tile);
    return watch_inner((const Brain*)source, tile);
}

// Reads the gradients only.
extern "C" __global__ void __launch_bounds__(BLOCK)
first_nonfinite(i64 size, const u64* pointers, const i64* ends, const u8* kinds, i64 slots, u32* counts, i64* bads) {
    __shared__ i64 lows[WARPS];
    const Gradients grads = {pointers, ends, kinds, slots};
    i64 bad = watch(size, grads, blockIdx.x);
    if (__syncthreads_or(bad != NONE)) bad = lowest(bad, lows);
    if (threadIdx.x == 0) {
        counts[blockIdx.x] = 0;
        bads[blockIdx.x] = bad;
    }
}

extern "C" __global__ void write_selected(const float* acc, i64 first, const u32* masks, const i64* offsets, i64* index, float* magnitude) {
    __shared__ u32 warps[WARPS];
    write_marked(masks, offsets, warps, [=](i64 place, i64 element) {
        const i64 i = first * TILE + element;
        index[place] = i;
        magnitude[place] = absolute(acc[i]);
    });
}
