// Compressed sparse rows: from candidates that reach the threshold to columns, and back to flat indices.

extern "C" __global__ void mark_reached(const float* magnitude, i64 n, float threshold, u32* masks, u32* counts) {
    __shared__ u32 warps[WARPS];
    mark(n, masks, counts, warps, [=](i64 i) { return magnitude[i] >= threshold; });
}

// The row length `row` is a power of two; `room` columns fit.
extern "C" __global__ void write_columns(const i64* index, i64 lo, i64 row, const u32* masks, const i64* offsets, u16* columns,
                                         i64 room) {
    __shared__ u32 warps[WARPS];
    write_marked(masks, offsets, warps, [=](i64 place, i64 i) {
        if (place < room) columns[place] = (u16)((index[i] - lo) & (row - 1));
    });
}

// Row r has columns [offsets[r], offsets[r + 1]). Where they do not add up to n, or a column lies beyond `hi`, every index is one
// that there is, and the flag is set.
extern "C" __global__ void expand_rows(const i64* offsets, i64 rows, const u16* columns, i64 n, i64 lo, i64 hi, i64 row, i64* out,
                                       i64* flag) {
    const i64 i = at_thread();
    if (i >= n) return;
    const i64 found = lo + (upper_bound(offsets, 0, rows, i) - 1) * row + columns[i];
    const bool sound = offsets[rows] == n && found < hi;
    out[i] = sound ? found : lo;
    if (!sound) atomicMin(flag, -1ll);
}
