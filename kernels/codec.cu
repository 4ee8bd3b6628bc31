// The lossy codecs: one block per group of GROUP values, which share a float32 scale; encoders leave the rounding error in x.

// The largest magnitude in a group; all its threads get the result.
__device__ inline float largest(float x, u32* warps) {
    u32 most = bits_of(x) & MAGNITUDE;
    for (u32 step = 16; step > 0; step /= 2) {
        const u32 other = __shfl_down_sync(ALL, most, step);
        if (other > most) most = other;
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
    __syncthreads();
    most = warps[0];
    for (u32 w = 1; w < GROUP / 32; ++w)
        if (warps[w] > most) most = warps[w];
    return float_of(most);
}

extern "C" __global__ void __launch_bounds__(GROUP) encode_int8(float* x, i64 n, float* scales, signed char* q) {
    __shared__ u32 warps[GROUP / 32];
    const i64 i = at_thread();
    const float value = i < n ? x[i] : 0.0f;
    float scale = __fdiv_rn(largest(value, warps), 127.0f);
    if (scale > 0x1.020406p+121f) scale = 0x1.020406p+121f;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    if (i >= n) return;
    if (!(scale > 0.0f)) {
        q[i] = 0;
        return;
    }
    const int steps = (int)fmaxf(-127.0f, fminf(127.0f, rintf(__fdiv_rn(value, scale))));  // -0 and 0 are one
    q[i] = (signed char)steps;
    x[i] = __fsub_rn(value, __fmul_rn((float)steps, scale));
}

extern "C" __global__ void decode_int8(const float* scales, const signed char* q, i64 n, float* x) {
    const i64 i = at_thread();
    if (i < n) x[i] = __fmul_rn((float)q[i], scales[i / GROUP]);
}

extern "C" __global__ void add_int8(const float* scales, const signed char* q, i64 n, float* total) {
    const i64 i = at_thread();
    if (i < n) total[i] = __fadd_rn(total[i], __fmul_rn((float)q[i], scales[i / GROUP]));
}

// The scale is the power of two that brings the largest magnitude into [2^14, 2^15), as far as its exponent allows.
extern "C" __global__ void __launch_bounds__(GROUP) encode_fp16(float* x, i64 n, float* scales, u16* h) {
    __shared__ u32 warps[GROUP / 32];
    const i64 i = at_thread();
    const float value = i < n ? x[i] : 0.0f;
    const float most = largest(value, warps);
    const int exponent = (int)(bits_of(most) >> 23) - 14;  // of the scale, with its bias
    const float scale = most > 0.0f ? float_of((u32)(exponent < 1 ? 1 : exponent) << 23) : 1.0f;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    if (i >= n) return;
    h[i] = float_to_finite_fp16(fmaxf(-32752.0f, fminf(32752.0f, __fdiv_rn(value, scale))));
    x[i] = __fsub_rn(value, __fmul_rn(fp16_to_float(h[i]), scale));
}

extern "C" __global__ void decode_fp16(const float* scales, const u16* h, i64 n, float* x) {
    const i64 i = at_thread();
    if (i < n) x[i] = __fmul_rn(fp16_to_float(h[i]), scales[i / GROUP]);
}

extern "C" __global__ void add_fp16(const float* scales, const u16* h, i64 n, float* total) {
    const i64 i = at_thread();
    if (i < n) total[i] = __fadd_rn(total[i], __fmul_rn(fp16_to_float(h[i]), scales[i / GROUP]));
}

extern "C" __global__ void encode_bf16(float* x, i64 n, u16* h) {
    const i64 i = at_thread();
    if (i >= n) return;
    h[i] = float_to_finite_bf16(x[i]);
    x[i] = __fsub_rn(x[i], bf16_to_float(h[i]));
}

extern "C" __global__ void decode_bf16(const u16* h, i64 n, float* x) {
    const i64 i = at_thread();
    if (i < n) x[i] = bf16_to_float(h[i]);
}

extern "C" __global__ void add_bf16(const u16* h, i64 n, float* total) {
    const i64 i = at_thread();
    if (i < n) total[i] = __fadd_rn(total[i], bf16_to_float(h[i]));
}
