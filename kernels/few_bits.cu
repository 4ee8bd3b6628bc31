// int4, int2 and sign: a block of GROUP threads works on the GROUP / SIZE groups of its values, one value a thread. A group
// shares a bfloat16 scale. kernels/few_bits.inc has the same on the CPU, with sums in the same order.

#define ROW 16  // sums go row by row, then the lanes of a row are added by halves

__device__ const float INT4_LEVELS[16] = {
    -224 / 256.0f, -176 / 256.0f, -136 / 256.0f, -102 / 256.0f, -70 / 256.0f, -41 / 256.0f, -16 / 256.0f, 0 / 256.0f,
    18 / 256.0f, 44 / 256.0f, 73 / 256.0f, 104 / 256.0f, 138 / 256.0f, 173 / 256.0f, 211 / 256.0f, 256 / 256.0f};
#define INT2_FIRST (49 / 128.0f)  // of the largest magnitude: what counts as outer when the scale is sought
#define INT2_INNER (9 / 32.0f)
#define INT2_SPLIT (41 / 64.0f)

enum FewBits { INT4, INT2, SIGN };

__device__ inline float level_of(int codec, u32 code) {
    if (codec == INT4) return INT4_LEVELS[code];
    const u32 sign = codec == INT2 ? code >> 1 : code;
    const float size = codec == INT2 && !(code & 1) ? INT2_INNER : 1.0f;
    return sign ? -size : size;
}

// The number of the level that is sent for a value.
__device__ inline u32 code_of(int codec, float value, float scale) {
    const u32 sign = bits_of(value) >> 31;
    if (codec == SIGN) return sign;
    if (codec == INT2) return 2 * sign + (absolute(value) >= __fmul_rn(INT2_SPLIT, scale));
    const float turned = scale < 0.0f ? -value : value, size = absolute(scale);
    u32 code = 0;
    for (u32 k = 1; k < 16; ++k) code += turned >= __fmul_rn(__fmul_rn(__fadd_rn(INT4_LEVELS[k - 1], INT4_LEVELS[k]), 0.5f), size);
    return code;
}

// Shared memory of a block: values, lanes of each group, codes.
struct Shared { float values[GROUP], lanes[GROUP / 64 * ROW]; u8 codes[GROUP]; };

enum Reduction { SUM, LARGEST, LEAST };

__device__ inline float reduced(int how, float x, float y) {
    return how == SUM ? __fadd_rn(x, y) : how == LARGEST ? fmaxf(x, y) : fminf(x, y);
}

// Reduces one number of each thread over its group: row by row, then lanes by halves. All threads must call it.
template <int HOW, u32 SIZE>
__device__ inline float over_group(float value, Shared* shared) {
    const u32 lane = threadIdx.x % SIZE, own = threadIdx.x / SIZE;
    shared->values[threadIdx.x] = value;
    __syncthreads();
    if (lane < ROW) {
        float sum = value;
        for (u32 i = threadIdx.x + ROW; i < (own + 1) * SIZE; i += ROW) sum = reduced(HOW, sum, shared->values[i]);
        shared->lanes[own * ROW + lane] = sum;
    }
    __syncthreads();
    float lanes[ROW];
    for (u32 i = 0; i < ROW; ++i) lanes[i] = shared->lanes[own * ROW + i];
    for (u32 half = ROW / 2; half > 0; half /= 2)
        for (u32 i = 0; i < half; ++i) lanes[i] = reduced(HOW, lanes[i], lanes[i + half]);
    return lanes[0];
}

// The outer level that is best, in least squares, for the magnitudes that are outer ones at first.
template <u32 SIZE>
__device__ inline float best_outer_level(float size, float count, Shared* shared) {
    const bool outer = size >= __fmul_rn(INT2_FIRST, over_group<LARGEST, SIZE>(size, shared));
    const float share = 1.0f / SIZE, part = __fmul_rn(size, share);  // so that sums are finite
    const float all = over_group<SUM, SIZE>(part, shared), sum = over_group<SUM, SIZE>(outer ? part : 0.0f, shared);
    const float many = over_group<SUM, SIZE>(outer ? 1.0f : 0.0f, shared);
    const float product = __fadd_rn(__fmul_rn(INT2_INNER, __fsub_rn(all, sum)), sum);
    const float square = __fadd_rn(__fmul_rn(INT2_INNER * INT2_INNER, __fsub_rn(count, many)), many);
    return __fdiv_rn(product, __fmul_rn(square, share));
}

template <int CODEC, u32 SIZE>
__device__ inline u16 scale_of(float value, float count, Shared* shared) {
    float scale;
    if (CODEC == INT4) {
        const float most = over_group<LARGEST, SIZE>(value, shared), least = over_group<LEAST, SIZE>(value, shared);
        scale = most >= -least ? most : least;
    } else if (CODEC == INT2) {
        scale = best_outer_level<SIZE>(absolute(value), count, shared);
    } else {
        scale = over_group<SUM, SIZE>(__fmul_rn(absolute(value), __fdiv_rn(1.0f, count)), shared);
    }
    const u16 half = float_to_finite_bf16(scale);
    return half & 0x7fffu ? half : (u16)0;
}

template <int CODEC, u32 BITS, u32 SIZE, bool LEAVE>
__device__ inline void encode_few(float* x, i64 n, u16* scales, u8* codes, Shared* shared) {
    const u32 NBYTES = SIZE * BITS / 8, own = threadIdx.x / SIZE, lane = threadIdx.x % SIZE;
    const i64 i = at_thread(), group = i / SIZE, rest = n - group * SIZE;
    const float value = i < n ? x[i] : 0.0f;
    const u16 half = scale_of<CODEC, SIZE>(value, rest < SIZE ? (float)rest : (float)SIZE, shared);
    const float scale = bf16_to_float(half);
    const u32 code = half ? code_of(CODEC, value, scale) : CODEC == INT4 ? 7u : 0u;
    shared->codes[threadIdx.x] = (u8)code;
    if (LEAVE && i < n && half) x[i] = __fsub_rn(value, __fmul_rn(level_of(CODEC, code), scale));
    if (i < n && lane == 0) scales[group] = half;
    __syncthreads();
    if (i >= n || lane >= NBYTES) return;
    u32 byte = 0;
    for (u32 k = 0; k < 8 / BITS; ++k) byte |= (u32)shared->codes[own * SIZE + k * NBYTES + lane] << (k * BITS);
    codes[group * NBYTES + lane] = (u8)byte;
}

template <int CODEC, u32 BITS, u32 SIZE>
__device__ inline float decode_few(const u16* scales, const u8* codes, i64 i) {
    const u32 NBYTES = SIZE * BITS / 8, lane = (u32)(i % SIZE);
    const u32 byte = codes[i / SIZE * NBYTES + lane % NBYTES];
    const u32 code = byte >> (lane / NBYTES * BITS) & ((1u << BITS) - 1);
    return __fmul_rn(level_of(CODEC, code), bf16_to_float(scales[i / SIZE]));
}

extern "C" __global__ void __launch_bounds__(GROUP) encode_int4(float* x, i64 n, u16* scales, u8* codes) {
    __shared__ Shared shared;
    encode_few<INT4, 4, 64, true>(x, n, scales, codes, &shared);
}
extern "C" __global__ void __launch_bounds__(GROUP) pack_int4(float* x, i64 n, u16* scales, u8* codes) {
    __shared__ Shared shared;
    encode_few<INT4, 4, 64, false>(x, n, scales, codes, &shared);
}
extern "C" __global__ void __launch_bounds__(GROUP) encode_int2(float* x, i64 n, u16* scales, u8* codes) {
    __shared__ Shared shared;
    encode_few<INT2, 2, 64, true>(x, n, scales, codes, &shared);
}
extern "C" __global__ void __launch_bounds__(GROUP) pack_int2(float* x, i64 n, u16* scales, u8* codes) {
    __shared__ Shared shared;
    encode_few<INT2, 2, 64, false>(x, n, scales, codes, &shared);
}
extern "C" __global__ void __launch_bounds__(GROUP) encode_sign(float* x, i64 n, u16* scales, u8* codes) {
    __shared__ Shared shared;
    encode_few<SIGN, 1, 128, true>(x, n, scales, codes, &shared);
}
extern "C" __global__ void __launch_bounds__(GROUP) pack_sign(float* x, i64 n, u16* scales, u8* codes) {
    __shared__ Shared shared;
    encode_few<SIGN, 1, 128, false>(x, n, scales, codes, &shared);
}

extern "C" __global__ void decode_int4(const u16* scales, const u8* codes, i64 n, float* x) {
    const i64 i = at_thread();
    if (i < n) x[i] = decode_few<INT4, 4, 64>(scales, codes, i);
}
extern "C" __global__ void decode_int2(const u16* scales, const u8* codes, i64 n, float* x) {
    const i64 i = at_thread();
    if (i < n) x[i] = decode_few<INT2, 2, 64>(scales, codes, i);
}
extern "C" __global__ void decode_sign(const u16* scales, const u8* codes, i64 n, float* x) {
    const i64 i = at_thread();
    if (i < n) x[i] = decode_few<SIGN, 1, 128>(scales, codes, i);
}

extern "C" __global__ void add_int4(const u16* scales, const u8* codes, i64 n, float* total) {
    const i64 i = at_thread();
    if (i < n) total[i] = __fadd_rn(total[i], decode_few<INT4, 4, 64>(scales, codes, i));
}
extern "C" __global__ void add_int2(const u16* scales, const u8* codes, i64 n, float* total) {
    const i64 i = at_thread();
    if (i < n) total[i] = __fadd_rn(total[i], decode_few<INT2, 2, 64>(scales, codes, i));
}
extern "C" __global__ void add_sign(const u16* scales, const u8* codes, i64 n, float* total) {
    const i64 i = at_thread();
    if (i < n) total[i] = __fadd_rn(total[i], decode_few<SIGN, 1, 128>(scales, codes, i));
}

extern "C" __global__ void subtract_int4(const u16* scales, const u8* codes, i64 n, float* total) {
    const i64 i = at_thread();
    if (i < n) total[i] = __fsub_rn(total[i], decode_few<INT4, 4, 64>(scales, codes, i));
}
extern "C" __global__ void subtract_int2(const u16* scales, const u8* codes, i64 n, float* total) {
    const i64 i = at_thread();
    if (i < n) total[i] = __fsub_rn(total[i], decode_few<INT2, 2, 64>(scales, codes, i));
}
extern "C" __global__ void subtract_sign(const u16* scales, const u8* codes, i64 n, float* total) {
    const i64 i = at_thread();
    if (i < n) total[i] = __fsub_rn(total[i], decode_few<SIGN, 1, 128>(scales, codes, i));
}
