// What clang's CUDA front end needs to compile the kernels without NVIDIA's headers: qualifiers, places, and its own built-ins.
#pragma once
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

struct OneDimension { unsigned x; };
#define threadIdx (OneDimension{unsigned(__nvvm_read_ptx_sreg_tid_x())})
#define blockIdx (OneDimension{unsigned(__nvvm_read_ptx_sreg_ctaid_x())})
#define blockDim (OneDimension{unsigned(__nvvm_read_ptx_sreg_ntid_x())})

__device__ inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
__device__ inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
__device__ inline float __fadd_rn(float x, float y) { return __nvvm_add_rn_f(x, y); }
__device__ inline float __fsub_rn(float x, float y) { return __nvvm_add_rn_f(x, -y); }
__device__ inline float __fmul_rn(float x, float y) { return __nvvm_mul_rn_f(x, y); }
__device__ inline float __fdiv_rn(float x, float y) { return __nvvm_div_rn_f(x, y); }
__device__ inline double __dadd_rn(double x, double y) { return __nvvm_add_rn_d(x, y); }
__device__ inline double __dmul_rn(double x, double y) { return __nvvm_mul_rn_d(x, y); }
__device__ inline float __fsqrt_rn(float x) { return __nvvm_sqrt_rn_f(x); }
__device__ inline float rintf(float x) { return __builtin_rintf(x); }
__device__ inline float fminf(float x, float y) { return __nvvm_fmin_f(x, y); }
__device__ inline float fmaxf(float x, float y) { return __nvvm_fmax_f(x, y); }
__device__ inline int __popc(unsigned x) { return __builtin_popcount(x); }
__device__ inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }

__device__ inline int __syncthreads_or(int x) { return __nvvm_bar0_or(x); }
__device__ inline unsigned __ballot_sync(unsigned mask, bool x) { return __nvvm_vote_ballot_sync(mask, x); }

// A value of any size, moved in words of 32 bits.
template <class T, class Move>
__device__ inline T moved(T value, Move move) {
    if constexpr (sizeof(T) == 4) {
        return __builtin_bit_cast(T, move(__builtin_bit_cast(int, value)));
    } else {
        const unsigned long long word = __builtin_bit_cast(unsigned long long, value);
        const unsigned long long low = unsigned(move(int(unsigned(word)))), high = unsigned(move(int(unsigned(word >> 32))));
        return __builtin_bit_cast(T, low | (high << 32));
    }
}
template <class T>
__device__ inline T __shfl_up_sync(unsigned mask, T value, unsigned step) {
    return moved(value, [=](int word) { return __nvvm_shfl_sync_up_i32(mask, word, step, 0); });
}
template <class T>
__device__ inline T __shfl_down_sync(unsigned mask, T value, unsigned step) {
    return moved(value, [=](int word) { return __nvvm_shfl_sync_down_i32(mask, word, step, 31); });
}
template <class T>
__device__ inline T __shfl_sync(unsigned mask, T value, unsigned lane) {
    return moved(value, [=](int word) { return __nvvm_shfl_sync_idx_i32(mask, word, lane, 31); });
}

__device__ inline unsigned atomicAdd(unsigned* place, unsigned x) { return __nvvm_atom_add_gen_i((int*)place, int(x)); }
__device__ inline unsigned long long atomicAdd(unsigned long long* place, unsigned long long x) {
    return __nvvm_atom_add_gen_ll((long long*)place, (long long)x);
}
__device__ inline unsigned long long atomicMin(unsigned long long* place, unsigned long long x) {
    return __nvvm_atom_min_gen_ull(place, x);
}
__device__ inline long long atomicMin(long long* place, long long x) { return __nvvm_atom_min_gen_ll(place, x); }
