// Weights, as pieces of float32, against a flat reference of the same elements; a missing weight counts as equal. And an ascending
// index dealt out to owners.

__device__ inline float apart(Place* place, const Gradients& weights, const float* reference, i64 i) {
    return move_to(place, weights, i) ? __fsub_rn(((const float*)place->source)[i - place->begin], reference[i]) : 0.0f;
}

// Calls visit(item, i, difference) for each of a thread's elements of a tile that begins at `first`; from `end` on they are 0. The
// reference is read in [lo, hi); elsewhere it counts as 0. All threads of a block call it equally often.
template <class Visit>
__device__ inline void each_apart(const Gradients& weights, const float* reference, i64 first, i64 end, i64 lo, i64 hi, Visit visit) {
    const int BATCH = 4;  // differences whose loads are in flight at a time
    Place place = {0, 0, 0, nullptr, FP32};
    const i64 last = first + TILE;
    const bool outside = last <= lo || first >= hi, uniform = outside || (first >= lo && last <= hi);
    if (last <= end && uniform && move_to(&place, weights, first) && last <= place.end) {  // inside one parameter
        const float* const weight = (const float*)place.source + (first - place.begin);
#pragma unroll 1
        for (int start = 0; start < 32; start += BATCH) {
            float own[BATCH], other[BATCH];
#pragma unroll
            for (int item = 0; item < BATCH; ++item) {
                own[item] = weight[(start + item) * BLOCK + threadIdx.x];
                other[item] = outside ? 0.0f : reference[first + (start + item) * BLOCK + threadIdx.x];
            }
#pragma unroll
            for (int item = 0; item < BATCH; ++item)
                visit(start + item, first + (start + item) * BLOCK + threadIdx.x, __fsub_rn(own[item], other[item]));
        }
        return;
    }
#pragma unroll 1
    for (int start = 0; start < 32; start += BATCH) {
        float own[BATCH], other[BATCH];
#pragma unroll
        for (int item = 0; item < BATCH; ++item) {
            const i64 i = first + (start + item) * BLOCK + threadIdx.x;
            const bool given = i < end && move_to(&place, weights, i);
            own[item] = given ? ((const float*)place.source)[i - place.begin] : 0.0f;
            other[item] = given && i >= lo && i < hi ? reference[i] : 0.0f;
        }
#pragma unroll
        for (int item = 0; item < BATCH; ++item)
            visit(start + item, first + (start + item) * BLOCK + threadIdx.x, __fsub_rn(own[item], other[item]));
    }
}

// Marks the elements of [lo, hi) that are at least `floor` apart, and watches these and all weights.
extern "C" __global__ void __launch_bounds__(BLOCK)
select_apart(const u64* pointers, const i64* ends, const u8* kinds, i64 slots, const float* reference, i64 size, i64 lo, i64 hi,
             u32 floor, u32* masks, u32* counts, i64* bads) {
    __shared__ u32 warps[WARPS];
    __shared__ i64 lows[WARPS];
    const Gradients weights = {pointers, ends, kinds, slots};
    u32 hits = 0, total;
    i64 bad = NONE;
    each_apart(weights, reference, blockIdx.x * TILE, size, lo, hi, [&](int item, i64 i, float x) {
        const u32 magnitude = bits_of(x) & MAGNITUDE;
        if (magnitude >= INFINITE && i < bad) bad = i;
        const u32 word = __ballot_sync(ALL, i >= lo && i < hi && magnitude >= floor);
        if (threadIdx.x % 32 == 0) {
            masks[(i64)blockIdx.x * BLOCK + item * WARPS + threadIdx.x / 32] = word;
            hits += __popc(word);
        }
    });
    sum_before(hits, warps, &total);
    if (__syncthreads_or(bad != NONE)) bad = lowest(bad, lows);
    if (threadIdx.x == 0) {
        counts[blockIdx.x] = total;
        bads[blockIdx.x] = bad;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
write_apart(const u64* pointers, const i64* ends, const u8* kinds, i64 slots, const float* reference, const u32* masks,
            const i64* offsets, i64* index, float* magnitude) {
    __shared__ u32 warps[WARPS];
    const Gradients weights = {pointers, ends, kinds, slots};
    Place at = {0, 0, 0, nullptr, FP32};
    write_marked(masks, offsets, warps, [&](i64 place, i64 i) {
        index[place] = i;
        magnitude[place] = absolute(apart(&at, weights, reference, i));
    });
}

// As histogram, of the differences of [lo, hi).
extern "C" __global__ void __launch_bounds__(BLOCK)
histogram_apart(const u64* pointers, const i64* ends, const u8* kinds, i64 slots, const float* reference, i64 lo, i64 hi, u64* bins) {
    __shared__ u32 own[2048];
    const Gradients weights = {pointers, ends, kinds, slots};
    for (u32 b = threadIdx.x; b < 2048; b += BLOCK) own[b] = 0;
    __syncthreads();
    each_apart(weights, reference, lo + blockIdx.x * TILE, hi, lo, hi, [&](int, i64 i, float x) {
        if (i < hi) atomicAdd(&own[(bits_of(x) & MAGNITUDE) >> 20], 1u);
    });
    __syncthreads();
    for (u32 b = threadIdx.x; b < 2048; b += BLOCK)
        if (own[b]) atomicAdd(&bins[b], (u64)own[b]);
}

// Writes the differences of [lo, hi).
extern "C" __global__ void __launch_bounds__(BLOCK)
subtract_apart(const u64* pointers, const i64* ends, const u8* kinds, i64 slots, const float* reference, i64 lo, i64 hi, float* out) {
    const Gradients weights = {pointers, ends, kinds, slots};
    each_apart(weights, reference, lo + blockIdx.x * TILE, hi, lo, hi, [&](int, i64 i, float x) {
        if (i < hi) out[i - lo] = x;
    });
}

// Half a warp for each group of 512 neighbours: lanes add squares 16 apart, then each other's sums, in the order of the host.
#define GROUP_OF_WEIGHTS 512
extern "C" __global__ void __launch_bounds__(BLOCK)
group_norms(const u64* pointers, const i64* ends, const u8* kinds, i64 slots, const float* reference, i64 size, float* norms,
            u32* counts, i64* bads) {
    __shared__ i64 lows[WARPS];
    const Gradients weights = {pointers, ends, kinds, slots};
    const i64 group = at_thread() / 16, end = (group + 1) * GROUP_OF_WEIGHTS < size ? (group + 1) * GROUP_OF_WEIGHTS : size;
    Place place = {0, 0, 0, nullptr, FP32};
    float sum = 0.0f;
    i64 bad = NONE;
    for (i64 i = group * GROUP_OF_WEIGHTS + threadIdx.x % 16; i < end; i += 16) {
        const float x = apart(&place, weights, reference, i);
        if ((bits_of(x) & MAGNITUDE) >= INFINITE && i < bad) bad = i;
        sum = __fadd_rn(sum, __fmul_rn(x, x));
    }
    for (u32 step = 8; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_down_sync(ALL, sum, step));
    const float root = __fsqrt_rn(sum), most = float_of(INFINITE - 1);
    if (threadIdx.x % 16 == 0 && group * GROUP_OF_WEIGHTS < size) norms[group] = root > most ? most : root;
    if (__syncthreads_or(bad != NONE)) bad = lowest(bad, lows);
    if (threadIdx.x == 0) {
        counts[blockIdx.x] = 0;
        bads[blockIdx.x] = bad;
    }
}

extern "C" __global__ void values_apart(const u64* pointers, const i64* ends, const u8* kinds, i64 slots, const float* reference,
                                        const i64* index, i64 n, float* out) {
    const i64 i = at_thread();
    Place place = {0, 0, 0, nullptr, FP32};
    if (i < n) out[i] = apart(&place, {pointers, ends, kinds, slots}, reference, index[i]);
}

// Adds the mean to the reference, and mean - own to the weights: their distance loses what was sent.
extern "C" __global__ void move_apart(const u64* pointers, const i64* ends, const u8* kinds, i64 slots, float* reference,
                                      const i64* index, i64 n, const float* mean, const float* own) {
    const i64 i = at_thread();
    if (i >= n) return;
    const i64 at = index[i];
    Place place = {0, 0, 0, nullptr, FP32};
    reference[at] = __fadd_rn(reference[at], mean[i]);
    if (!move_to(&place, {pointers, ends, kinds, slots}, at)) return;
    float* const weight = (float*)place.source + (at - place.begin);
    *weight = __fadd_rn(*weight, __fsub_rn(mean[i], own[i]));
}

// Adds to the weights of [lo, hi).
extern "C" __global__ void __launch_bounds__(BLOCK)
add_stretch(const u64* pointers, const i64* ends, const u8* kinds, i64 slots, i64 lo, i64 hi, const float* values) {
    const Gradients weights = {pointers, ends, kinds, slots};
    Place place = {0, 0, 0, nullptr, FP32};
    for (int item = 0; item < 32; ++item) {
        const i64 i = lo + blockIdx.x * TILE + item * BLOCK + threadIdx.x;
        if (i >= hi || !move_to(&place, weights, i)) continue;
        float* const weight = (float*)place.source + (i - place.begin);
        *weight = __fadd_rn(*weight, values[i - lo]);
    }
}

// The elements of some blocks of `width` neighbours one behind the other, from element `skip` on.
extern "C" __global__ void neighbours(const i64* blocks, i64 width, i64 skip, i64 n, i64* index) {
    const i64 i = at_thread();
    if (i < n) index[i] = blocks[(skip + i) / width] * width + (skip + i) % width;
}

// Owners have blocks of `width` neighbours in turn. The blocks of threads of each owner, one owner's behind the other's, go through
// the whole index: element e of all their tiles is place e % (tiles * TILE) of the index, for owner e / (tiles * TILE).
extern "C" __global__ void mark_owned(const i64* index, i64 n, i64 tiles, i64 width, i64 size, u32* masks, u32* counts) {
    __shared__ u32 warps[WARPS];
    const i64 owner = blockIdx.x / tiles, before = owner * tiles * TILE;
    mark(before + n, masks, counts, warps, [=](i64 e) { return index[e - before] / width % size == owner; });
}

// places: where `rank` keeps its own elements, its blocks one behind the other.
extern "C" __global__ void write_owned(const i64* index, i64 tiles, i64 width, i64 size, i64 rank, const u32* masks, const i64* offsets,
                                       i64* order, i64* places) {
    __shared__ u32 warps[WARPS];
    const i64 owner = blockIdx.x / tiles, before = owner * tiles * TILE, first = offsets[rank * tiles];
    write_marked(masks, offsets, warps, [=](i64 place, i64 e) {
        order[place] = e - before;
        const i64 at = index[e - before];
        if (owner == rank) places[place - first] = at / (width * size) * width + at % width;
    });
}
