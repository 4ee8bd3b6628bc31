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

// One tile: acc += gradient; update the moving average, if there is one; mark the elements of [lo, hi) that reach `floor`; and find
// the lowest index at which acc is not finite, among those added to (or, without an average, compared with the floor).
template <bool AVERAGE>
__device__ inline void pass(float* acc, float* average, float rate, float rest, i64 size, const Gradients& grads, i64 lo, i64 hi,
                            u32 floor, i64 tile, u32* masks, u32* counts, i64* bads, u32* warps, i64* lows) {
    const int BATCH = 4;  // loads in flight at a time
    Place place = {0, 0, 0, nullptr, FP32};
    i64 bad = NONE;
    u32 hits = 0;
    for (int start = 0; start < 32; start += BATCH) {
        float x[BATCH], g[BATCH], mean[BATCH];
        bool given[BATCH];
#pragma unroll
        for (int item = 0; item < BATCH; ++item) {
            const i64 i = tile * TILE + (start + item) * BLOCK + threadIdx.x;
            given[item] = i < size && move_to(&place, grads, i);
            const bool inside = i >= lo && i < hi;
            g[item] = given[item] ? load_one(place.source, place.kind, i - place.begin) : 0.0f;
            x[item] = given[item] || (!AVERAGE && inside) ? acc[i] : 0.0f;
            if (AVERAGE) mean[item] = i < size ? average[i] : 0.0f;
        }
#pragma unroll
        for (int item = 0; item < BATCH; ++item) {
            const i64 i = tile * TILE + (start + item) * BLOCK + threadIdx.x;
            const bool inside = i >= lo && i < hi;
            if (given[item]) acc[i] = x[item] = __fadd_rn(x[item], g[item]);
            if ((bits_of(x[item]) & MAGNITUDE) >= INFINITE && i < bad) bad = i;
            if (AVERAGE) {
                const float kept = __fmul_rn(rest, mean[item]);
                mean[item] = given[item] ? __fadd_rn(__fmul_rn(rate, absolute(g[item])), kept) : kept;
                if (i < size) average[i] = mean[item];
            }
            if (!masks) continue;
            const u32 magnitude = bits_of(AVERAGE ? mean[item] : x[item]) & MAGNITUDE;
            const u32 word = __ballot_sync(ALL, inside && magnitude >= floor);
            if (threadIdx.x % 32 == 0) masks[(i64)blockIdx.x * BLOCK + (start + item) * WARPS + threadIdx.x / 32] = word;
            hits += __popc(word);
        }
    }
    u32 total = 0;
    if (masks) sum_before(threadIdx.x % 32 == 0 ? hits : 0u, warps, &total);
    if (__syncthreads_or(bad != NONE)) bad = lowest(bad, lows);
    if (threadIdx.x == 0) {
        if (counts) counts[blockIdx.x] = total;
        bads[blockIdx.x] = bad;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
accumulate_select(float* acc, i64 size, const u64* pointers, const i64* ends, const u8* kinds, i64 slots, i64 lo, i64 hi,
                  u32 floor, i64 first, u32* masks, u32* counts, i64* bads) {
    __shared__ u32 warps[WARPS];
    __shared__ i64 lows[WARPS];
    const Gradients grads = {pointers, ends, kinds, slots};
    pass<false>(acc, nullptr, 0.0f, 0.0f, size, grads, lo, hi, floor, first + blockIdx.x, masks, counts, bads, warps, lows);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
average_select(float* acc, float* average, float rate, float rest, i64 size, const u64* pointers, const i64* ends, const u8* kinds,
               i64 slots, i64 lo, i64 hi, u32 floor, u32* masks, u32* counts, i64* bads) {
    __shared__ u32 warps[WARPS];
    __shared__ i64 lows[WARPS];
    const Gradients grads = {pointers, ends, kinds, slots};
    pass<true>(acc, average, rate, rest, size, grads, lo, hi, floor, blockIdx.x, masks, counts, bads, warps, lows);
}

// Adds one gradient during backward; selects nothing.
extern "C" __global__ void __launch_bounds__(BLOCK) accumulate(float* acc, i64 size, const void* source, u32 kind, i64* bads) {
    __shared__ i64 lows[WARPS];
    i64 bad = NONE;
    for (int item = 0; item < 32; ++item) {
        const i64 i = blockIdx.x * TILE + item * BLOCK + threadIdx.x;
        if (i >= size) break;
        const float x = acc[i] = __fadd_rn(acc[i], load_one(source, kind, i));
        if ((bits_of(x) & MAGNITUDE) >= INFINITE && i < bad) bad = i;
    }
    if (__syncthreads_or(bad != NONE)) bad = lowest(bad, lows);
    if (threadIdx.x == 0) bads[blockIdx.x] = bad;
}

// One block: stores the address of the first non-finite element, unless an earlier pass stored one; the host reads it later.
extern "C" __global__ void note_bad(const float* acc, const i64* bads, i64 tiles, u64* noted) {
    __shared__ i64 lows[WARPS];
    i64 bad = NONE;
    for (i64 t = threadIdx.x; t < tiles; t += BLOCK)
        if (bads[t] < bad) bad = bads[t];
    bad = lowest(bad, lows);
    if (threadIdx.x == 0 && bad != NONE && *noted == 0) *noted = (u64)(acc + bad);
}

// Reads the gradients only.
extern "C" __global__ void __launch_bounds__(BLOCK)
first_nonfinite(i64 size, const u64* pointers, const i64* ends, const u8* kinds, i64 slots, u32* counts, i64* bads) {
    __shared__ i64 lows[WARPS];
    const Gradients grads = {pointers, ends, kinds, slots};
    Place place = {0, 0, 0, nullptr, FP32};
    i64 bad = NONE;
    for (int item = 0; item < 32; ++item) {
        const i64 i = blockIdx.x * TILE + item * BLOCK + threadIdx.x;
        if (i >= size || !move_to(&place, grads, i)) continue;
        const float x = load_one(place.source, place.kind, i - place.begin);
        if ((bits_of(x) & MAGNITUDE) >= INFINITE && i < bad) bad = i;
    }
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
