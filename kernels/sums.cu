// Sums of many values, in the order of the CPU's: halves of a piece of 1,024 are added until one number is left.
#define PIECE 1024

struct Sums {
    double values, squares;
};

__device__ inline Sums both(Sums a, Sums b) { return {__dadd_rn(a.values, b.values), __dadd_rn(a.squares, b.squares)}; }

// The sums of a lane's elements at STEP times 32 from each other, beginning with `first`.
template <int STEP>
__device__ inline Sums sums_of_lane(const float* source, i64 first, i64 end) {
    if constexpr (STEP < PIECE / 32) {
        return both(sums_of_lane<2 * STEP>(source, first, end), sums_of_lane<2 * STEP>(source, first + 32 * STEP, end));
    } else {
        const double x = first < end ? (double)absolute(source[first]) : 0.0;
        return {x, __dmul_rn(x, x)};
    }
}

// One warp per piece [begins[p], ends[p]): the sum of its magnitudes, and that of their squares.
extern "C" __global__ void piece_sums(const float* values, const i64* begins, const i64* ends, i64 pieces, double* sums) {
    const i64 piece = at_thread() / 32;
    if (piece >= pieces) return;
    const u32 lane = threadIdx.x % 32;
    Sums sum = sums_of_lane<1>(values, begins[piece] + lane, ends[piece]);
    for (u32 step = 16; step > 0; step /= 2)
        sum = both(sum, {__shfl_down_sync(ALL, sum.values, step), __shfl_down_sync(ALL, sum.squares, step)});
    if (lane) return;
    sums[2 * piece] = sum.values;
    sums[2 * piece + 1] = sum.squares;
}
