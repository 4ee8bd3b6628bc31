// Counts. Integer sums do not depend on order, so blocks may use atomics here.

// Counts magnitudes by exponent and three bits of mantissa: bin b holds bit patterns [b << 20, (b + 1) << 20). `bins` must be zero.
extern "C" __global__ void histogram(const float* acc, i64 lo, i64 hi, u64* bins) {
    __shared__ u32 own[2048];
    for (u32 b = threadIdx.x; b < 2048; b += BLOCK) own[b] = 0;
    __syncthreads();
    const int BATCH = 8;  // loads in flight at a time
#pragma unroll 1
    for (int start = 0; start < 32; start += BATCH) {
        const i64 first = lo + blockIdx.x * TILE + start * BLOCK + threadIdx.x;
        float x[BATCH];
#pragma unroll
        for (int item = 0; item < BATCH; ++item)
            if (first + item * BLOCK < hi) x[item] = acc[first + item * BLOCK];
#pragma unroll
        for (int item = 0; item < BATCH; ++item)
            if (first + item * BLOCK < hi) atomicAdd(&own[(bits_of(x[item]) & MAGNITUDE) >> 20], 1u);
    }
    __syncthreads();
    for (u32 b = threadIdx.x; b < 2048; b += BLOCK)
        if (own[b]) atomicAdd(&bins[b], (u64)own[b]);
}

// counts[r]: magnitudes that reach exactly r of the rungs (ascending, at most RUNGS); NaN reaches none. `counts` must be zero.
#define RUNGS 1024
extern "C" __global__ void tail_counts(const float* magnitudes, i64 n, const float* rungs, u32 count, u64* counts) {
    __shared__ u32 ladder[RUNGS];
    __shared__ u32 own[RUNGS + 1];
    for (u32 r = threadIdx.x; r <= count; r += BLOCK) {
        own[r] = 0;
        if (r < count) ladder[r] = bits_of(rungs[r]);
    }
    __syncthreads();
    for (int item = 0; item < 32; ++item) {
        const i64 i = blockIdx.x * TILE + item * BLOCK + threadIdx.x;
        if (i >= n) break;
        const u32 x = bits_of(magnitudes[i]);
        u32 from = 0, to = x > INFINITE ? 0 : count;
        while (from < to) {
            const u32 middle = (from + to) / 2;
            if (ladder[middle] <= x) from = middle + 1; else to = middle;
        }
        atomicAdd(&own[from], 1u);
    }
    __syncthreads();
    for (u32 r = threadIdx.x; r <= count; r += BLOCK)
        if (own[r]) atomicAdd(&counts[r], (u64)own[r]);
}

// Candidates with flat index in [from, to) that reach the threshold, counted by one warp; all lanes get the result.
__device__ inline u32 count_between(const i64* index, const float* magnitude, i64 n, float threshold, i64 from, i64 to) {
    const i64 first = lower_bound(index, 0, n, from), last = lower_bound(index, first, n, to);
    u32 reached = 0;
    for (i64 start = first; start < last; start += 32) {
        const i64 i = start + threadIdx.x % 32;
        reached += __popc(__ballot_sync(ALL, i < last && magnitude[i] >= threshold));
    }
    return reached;
}

// One warp per block [edges[b], edges[b + 1]).
extern "C" __global__ void block_counts(const i64* index, const float* magnitude, i64 n, float threshold, const i64* edges, i64 blocks,
                                        i64* counts) {
    const i64 block = at_thread() / 32;
    if (block >= blocks) return;
    const u32 reached = count_between(index, magnitude, n, threshold, edges[block], edges[block + 1]);
    if (threadIdx.x % 32 == 0) counts[block] = reached;
}

// One warp per row; row 0 starts at `lo`.
extern "C" __global__ void row_counts(const i64* index, const float* magnitude, i64 n, float threshold, i64 lo, i64 row, i64 rows,
                                      u32* counts) {
    const i64 r = at_thread() / 32;
    if (r >= rows) return;
    const u32 reached = count_between(index, magnitude, n, threshold, lo + r * row, lo + (r + 1) * row);
    if (threadIdx.x % 32 == 0) counts[r] = reached;
}

// Where each value would be inserted into the ascending index, before equal ones.
extern "C" __global__ void search(const i64* index, i64 n, const i64* values, i64 count, i64* places) {
    const i64 i = at_thread();
    if (i < count) places[i] = lower_bound(index, 0, n, values[i]);
}

extern "C" __global__ void pick(const i64* index, const i64* places, i64 count, i64* picked) {
    const i64 i = at_thread();
    if (i < count) picked[i] = index[places[i]];
}
