// Momentum between steps: merge two ascending indices, and drop elements whose momentum has decayed.

// Marks the elements of `carried` that are not in `index`.
extern "C" __global__ void mark_absent(const i64* carried, i64 m, const i64* index, i64 n, u32* masks, u32* counts) {
    __shared__ u32 warps[WARPS];
    mark(m, masks, counts, warps, [=](i64 j) {
        const i64 at = lower_bound(index, 0, n, carried[j]);
        return at == n || index[at] != carried[j];
    });
}

extern "C" __global__ void write_kept(const i64* index, const float* values, const u32* masks, const i64* offsets, i64* kept_index,
                                      float* kept_values) {
    __shared__ u32 warps[WARPS];
    write_marked(masks, offsets, warps, [=](i64 place, i64 i) {
        kept_index[place] = index[i];
        kept_values[place] = values[i];
    });
}

// Writes the elements of `index` to their places in the union; `absent` are the carried elements that are not selected.
extern "C" __global__ void blend_selected(const i64* index, const float* values, i64 n, const i64* carried, const float* previous, i64 m,
                                          const i64* absent, i64 others, float share, float rest, i64* out, float* mixed, u8* selected) {
    const i64 i = at_thread();
    if (i >= n) return;
    const i64 at = lower_bound(carried, 0, m, index[i]), place = i + lower_bound(absent, 0, others, index[i]);
    const float before = at < m && carried[at] == index[i] ? previous[at] : 0.0f;
    out[place] = index[i];
    mixed[place] = __fadd_rn(__fmul_rn(share, values[i]), __fmul_rn(rest, before));
    selected[place] = 1;
}

extern "C" __global__ void blend_carried(const i64* absent, const float* previous, i64 others, const i64* index, i64 n, float share,
                                         float rest, i64* out, float* mixed, u8* selected) {
    const i64 j = at_thread();
    if (j >= others) return;
    const i64 place = j + lower_bound(index, 0, n, absent[j]);
    out[place] = absent[j];
    mixed[place] = __fadd_rn(__fmul_rn(share, 0.0f), __fmul_rn(rest, previous[j]));
    selected[place] = 0;
}

// Marks the elements that are sent again; the unsent momentum of the others goes to acc.
extern "C" __global__ void drop_decayed(float* acc, const i64* index, const float* values, const u8* selected, const float* mean,
                                        float* left, i64 n, float pending, u32* masks, u32* counts) {
    __shared__ u32 warps[WARPS];
    mark(n, masks, counts, warps, [=](i64 i) {
        const bool decayed = !selected[i] && mean[i] == 0.0f;
        if (decayed) left[i] = __fadd_rn(left[i], __fmul_rn(pending, values[i]));
        acc[index[i]] = __fadd_rn(acc[index[i]], left[i]);
        return !decayed;
    });
}
