// Shared by all CUDA kernels. All *.cu files are joined, this one first, and compiled as one source without headers: by NVRTC, by
// nvcc or, behind an emulator, by a C++ compiler. mpisparse/backends/protocol.py says what each operation does.
//
// Results equal those of the CPU kernels to the last bit: products and sums are rounded one by one (never fused), magnitudes are
// compared as integers, and selected elements are compacted in order by counting first: mark, scan, write. Each block works on one
// tile of TILE elements; bit b of mask word w stands for element 32 w + b of the tile.
#ifndef BLOCK
#define BLOCK 256  // threads per block, a multiple of 32
#endif
#ifndef SCAN
#define SCAN 1024  // threads of the one block that scans the counts of tiles, a multiple of 32
#endif
#define WARPS (BLOCK / 32)
#define TILE (32ll * BLOCK)
#define GROUP 256  // values that share a scale
#define ALL 0xffffffffu

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum Kind { FP32 = 0, FP16 = 1, BF16 = 2, FP64 = 3 };  // FP64: published gradients only

#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u
#define NONE 0x7fffffffffffffffll  // no index

__device__ inline u32 bits_of(float x) { return __float_as_uint(x); }
__device__ inline float float_of(u32 u) { return __uint_as_float(u); }
__device__ inline float absolute(float x) { return float_of(bits_of(x) & MAGNITUDE); }
__device__ inline i64 at_thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

__device__ inline float fp16_to_float(u16 h) {
    const u32 sign = (u32)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return float_of(sign | INFINITE | (magnitude << 13));
    if (magnitude < 0x0400u) return float_of(sign | bits_of(__fmul_rn((float)magnitude, 5.9604644775390625e-08f)));
    return float_of(sign | ((magnitude << 13) + 0x38000000u));
}

__device__ inline float bf16_to_float(u16 h) { return float_of((u32)h << 16); }

// Round to the nearest finite value, ties to even.
__device__ inline u16 float_to_finite_fp16(float x) {
    const u32 u = bits_of(x), magnitude = u & MAGNITUDE;
    const u16 sign = (u16)((u >> 16) & 0x8000u);
    if (magnitude > INFINITE) return sign | 0x7e00u;
    if (magnitude >= 0x477ff000u) return sign | 0x7bffu;  // from 65520 on it would be infinite
    if (magnitude < 0x38800000u)                         // below 2^-14: let fp32 addition round to units of 2^-24
        return sign | (u16)(bits_of(__fadd_rn(float_of(magnitude), 0.5f)) - 0x3f000000u);
    return sign | (u16)((magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13);
}

__device__ inline u16 float_to_finite_bf16(float x) {
    const u32 u = bits_of(x);
    if ((u & MAGNITUDE) > INFINITE) return (u16)((u >> 16) | 0x40u);
    const u16 h = (u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    return (h & 0x7fffu) == 0x7f80u ? (u16)((h & 0x8000u) | 0x7f7fu) : h;
}

__device__ inline float load_one(const void* source, u32 kind, i64 i) {
    if (kind == FP32) return ((const float*)source)[i];
    const u16 h = ((const u16*)source)[i];
    return kind == FP16 ? fp16_to_float(h) : bf16_to_float(h);
}

// The first place in ascending data[from, to) whose value is at least (upper_bound: greater than) x.
__device__ inline i64 lower_bound(const i64* data, i64 from, i64 to, i64 x) {
    while (from < to) {
        const i64 middle = from + (to - from) / 2;
        if (data[middle] < x) from = middle + 1; else to = middle;
    }
    return from;
}
__device__ inline i64 upper_bound(const i64* data, i64 from, i64 to, i64 x) { return lower_bound(data, from, to, x + 1); }

// Four neighbours that are read or written at once; their address is a multiple of their size.
template <class Number>
struct __align__(4 * sizeof(Number)) Four {
    Number at[4];
};

// Exclusive prefix sum over the threads of a block; `warps` is shared memory for one number per warp. All threads must call it.
template <class Number>
__device__ inline Number sum_before(Number value, Number* warps, Number* total) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = blockDim.x / 32;
    Number sum = value;
    for (u32 step = 1; step < 32; step *= 2) {
        const Number other = __shfl_up_sync(ALL, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    Number before = 0, all = 0;
    for (u32 w = 0; w < count; ++w) {
        if (w == warp) before = all;
        all += warps[w];
    }
    __syncthreads();
    *total = all;
    return before + sum - value;
}

// The minimum over the threads of a block, valid in thread 0; `warps` as above. All threads must call it.
__device__ inline i64 lowest(i64 value, i64* warps) {
    for (u32 step = 16; step > 0; step /= 2) {
        const i64 other = __shfl_down_sync(ALL, value, step);
        if (other < value) value = other;
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    for (u32 w = 1; threadIdx.x == 0 && w < blockDim.x / 32; ++w)
        if (warps[w] < value) value = warps[w];
    __syncthreads();
    return value;
}

// Marks the elements of this block's tile of [0, n) that pass the test, and counts them.
template <class Test>
__device__ inline void mark(i64 n, u32* masks, u32* counts, u32* warps, Test test) {
    const u32 warp = threadIdx.x / 32;
    u32 hits = 0;
    for (int item = 0; item < 32; ++item) {
        const i64 i = blockIdx.x * TILE + item * BLOCK + threadIdx.x;
        const u32 word = __ballot_sync(ALL, i < n && test(i));
        if (threadIdx.x % 32 == 0) masks[(i64)blockIdx.x * BLOCK + item * WARPS + warp] = word;
        hits += __popc(word);
    }
    u32 total;
    sum_before(threadIdx.x % 32 == 0 ? hits : 0u, warps, &total);
    if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// Calls write(place, element) for each marked element of this block's tile; places ascend with elements.
template <class Write>
__device__ inline void write_marked(const u32* masks, const i64* offsets, u32* warps, Write write) {
    if (offsets[blockIdx.x] == offsets[blockIdx.x + 1]) return;
    u32 word = masks[(i64)blockIdx.x * BLOCK + threadIdx.x], total;
    i64 place = offsets[blockIdx.x] + sum_before((u32)__popc(word), warps, &total);
    for (; word; word &= word - 1) write(place++, blockIdx.x * TILE + 32 * threadIdx.x + __ffs(word) - 1);
}

// One block: offsets[i] is the sum of counts[0, i); summary is the sum of all counts, the lowest of `bads` or -1, and the flag.
extern "C" __global__ void scan_counts(const u32* counts, const i64* bads, i64 n, i64* offsets, const i64* flag, i64* summary) {
    __shared__ i64 sums[SCAN / 32];
    __shared__ i64 lows[SCAN / 32];
    i64 done = 0, bad = NONE;
    for (i64 start = 0; start < n; start += 4 * SCAN) {
        const i64 first = start + 4 * threadIdx.x;
        i64 own[4], sum = 0, total;
        for (int j = 0; j < 4; ++j) {
            own[j] = first + j < n ? counts[first + j] : 0;
            if (bads && first + j < n && bads[first + j] < bad) bad = bads[first + j];
            sum += own[j];
        }
        i64 before = done + sum_before(sum, sums, &total);
        for (int j = 0; j < 4 && first + j < n; ++j) {
            offsets[first + j] = before;
            before += own[j];
        }
        done += total;
    }
    bad = lowest(bad, lows);
    if (threadIdx.x == 0) {
        offsets[n] = summary[0] = done;
        summary[1] = bad == NONE ? -1 : bad;
        summary[2] = *flag;
    }
}
