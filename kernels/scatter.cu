// Reads and writes at an ascending index without duplicates, and the sums of a reduction.

extern "C" __global__ void values_at(const float* acc, const i64* index, i64 n, float* out) {
    const i64 i = at_thread();
    if (i < n) out[i] = acc[index[i]];
}

extern "C" __global__ void take(float* acc, const i64* index, i64 n, float* out) {
    const i64 i = at_thread();
    if (i >= n) return;
    out[i] = acc[index[i]];
    acc[index[i]] = 0.0f;
}

extern "C" __global__ void put(float* acc, const i64* index, i64 n, const float* values) {
    const i64 i = at_thread();
    if (i < n) acc[index[i]] = values[i];
}

extern "C" __global__ void add_at(float* acc, const i64* index, i64 n, const float* values) {
    const i64 i = at_thread();
    if (i < n) acc[index[i]] = __fadd_rn(acc[index[i]], values[i]);
}

extern "C" __global__ void zero_at(void* data, u32 kind, const i64* index, i64 n) {
    const i64 i = at_thread();
    if (i >= n) return;
    if (kind == FP32) ((u32*)data)[index[i]] = 0;
    else if (kind == FP64) ((u64*)data)[index[i]] = 0;
    else ((u16*)data)[index[i]] = 0;
}

// Rounds to the buffer's kind; values become the rounding error.
extern "C" __global__ void publish_at(void* data, u32 kind, const i64* index, i64 n, float* values) {
    const i64 i = at_thread();
    if (i >= n) return;
    const float x = values[i];
    float kept = x;
    if (kind == FP32) {
        ((float*)data)[index[i]] = x;
    } else if (kind == FP64) {
        ((double*)data)[index[i]] = (double)x;
    } else if (kind == FP16) {
        const u16 h = ((u16*)data)[index[i]] = float_to_finite_fp16(x);
        kept = fp16_to_float(h);
    } else {
        const u16 h = ((u16*)data)[index[i]] = float_to_finite_bf16(x);
        kept = bf16_to_float(h);
    }
    values[i] = kind == FP32 || kind == FP64 ? 0.0f : __fsub_rn(x, kept);
}

// Fills a payload if some value that it was made of is not finite.
extern "C" __global__ void spoil(u8* payload, i64 n, u8 with, const i64* bad) {
    const i64 i = at_thread();
    if (i < n && *bad >= 0) payload[i] = with;
}

// Called once per rank, so that sums are in rank order.
extern "C" __global__ void add(float* total, const float* term, i64 n) {
    const i64 i = at_thread();
    if (i < n) total[i] = __fadd_rn(total[i], term[i]);
}

extern "C" __global__ void divide(float* values, float by, i64 n) {
    const i64 i = at_thread();
    if (i < n) values[i] = __fdiv_rn(values[i], by);
}
