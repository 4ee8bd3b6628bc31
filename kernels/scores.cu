// Selection by predicted importance, a byte per element, and what its nets learn from: gradients in 16 bits, and some in full.

#define PRODUCTS 1u  // magnitude x (score + 1) / 256; else by score, then by magnitude: the float has the bits of both

__device__ inline u32 key_of(u32 rule, float value, u8 score) {
    const u32 magnitude = bits_of(value) & MAGNITUDE;
    if (rule != PRODUCTS) return (u32)score << 23 | magnitude >> 8;
    const float share = __fmul_rn(__fadd_rn((float)score, 1.0f), 0.00390625f);
    return bits_of(__fmul_rn(float_of(magnitude), share)) & MAGNITUDE;
}

// Marks the elements of [lo, hi) whose keys reach `floor`, and watches their values.
extern "C" __global__ void __launch_bounds__(BLOCK)
select_scored(const float* acc, const u8* scores, u32 rule, i64 lo, i64 hi, u32 floor, i64 first, u32* masks, u32* counts, i64* bads) {
    __shared__ u32 warps[WARPS];
    __shared__ i64 lows[WARPS];
    i64 bad = NONE;
    mark(NONE, masks, counts, warps, [&](i64 place) {
        const i64 i = first * TILE + place;
        if (i < lo || i >= hi) return false;
        const float value = acc[i];
        if ((bits_of(value) & MAGNITUDE) >= INFINITE && i < bad) bad = i;
        return key_of(rule, value, scores[i]) >= floor;
    });
    if (__syncthreads_or(bad != NONE)) bad = lowest(bad, lows);
    if (threadIdx.x == 0) bads[blockIdx.x] = bad;
}

extern "C" __global__ void write_scored(const float* acc, const u8* scores, u32 rule, i64 first, const u32* masks, const i64* offsets,
                                        i64* index, float* keys) {
    __shared__ u32 warps[WARPS];
    write_marked(masks, offsets, warps, [=](i64 place, i64 element) {
        const i64 i = first * TILE + element;
        index[place] = i;
        keys[place] = float_of(key_of(rule, acc[i], scores[i]));
    });
}

// As histogram, of keys.
extern "C" __global__ void histogram_scored(const float* acc, const u8* scores, u32 rule, i64 lo, i64 hi, u64* bins) {
    __shared__ u32 own[2048];
    for (u32 b = threadIdx.x; b < 2048; b += BLOCK) own[b] = 0;
    __syncthreads();
    for (int item = 0; item < 32; ++item) {
        const i64 i = lo + blockIdx.x * TILE + item * BLOCK + threadIdx.x;
        if (i < hi) atomicAdd(&own[key_of(rule, acc[i], scores[i]) >> 20], 1u);
    }
    __syncthreads();
    for (u32 b = threadIdx.x; b < 2048; b += BLOCK)
        if (own[b]) atomicAdd(&bins[b], (u64)own[b]);
}

__device__ inline float gradient_at(const Gradients& grads, i64 i) {
    Place place = {0, 0, 0, nullptr, FP32};
    return move_to(&place, grads, i) ? load_one(place.source, place.kind, i - place.begin) : 0.0f;
}

// The gradients of n elements from `lo` on as finite bfloat16.
extern "C" __global__ void record(const u64* pointers, const i64* ends, const u8* kinds, i64 slots, i64 lo, i64 n, u16* out) {
    const i64 i = at_thread();
    if (i < n) out[i] = float_to_finite_bf16(gradient_at({pointers, ends, kinds, slots}, lo + i));
}

extern "C" __global__ void gather(const u64* pointers, const i64* ends, const u8* kinds, i64 slots, const i64* index, i64 n, float* out) {
    const i64 i = at_thread();
    if (i < n) out[i] = gradient_at({pointers, ends, kinds, slots}, index[i]);
}

extern "C" __global__ void bytes_at(const u8* bytes, const i64* index, i64 n, u8* out) {
    const i64 i = at_thread();
    if (i < n) out[i] = bytes[index[i]];
}

extern "C" __global__ void put_bytes(u8* bytes, const i64* index, i64 n, const u8* values) {
    const i64 i = at_thread();
    if (i < n) bytes[index[i]] = values[i];
}
