// Shared by the CPU kernels: array types, the instruction set in use, threads, and results as NumPy arrays.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "scan.hpp"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace nb = nanobind;
template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using NumPy = nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig>;

namespace {

using Scan = int32_t (*)(const Piece&);
using Average = void (*)(const Averaging&);
struct Isa { const char* name; Scan scan; Average average; const FewBits* few_bits; };

std::vector<Isa> available_isas() {
    std::vector<Isa> isas{{generic::NAME, generic::scan, generic::average, generic::FEW_BITS}};
#ifdef MPISPARSE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi"))
        isas.push_back({avx2::NAME, avx2::scan, avx2::average, avx2::FEW_BITS});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("bmi"))
        isas.push_back({avx512::NAME, avx512::scan, avx512::average, avx512::FEW_BITS});
#endif
    return isas;
}

const std::vector<Isa> ISAS = available_isas();
Isa isa = ISAS.back();

void use_isa(const std::string& name) {
    for (const Isa& candidate : ISAS)
        if (name == candidate.name) { isa = candidate; return; }
    throw std::invalid_argument("this CPU or build has no instruction set named " + name);
}

std::vector<std::string> isa_names() {
    std::vector<std::string> names;
    for (const Isa& candidate : ISAS) names.push_back(candidate.name);
    return names;
}

// Upper limit on the threads of a kernel: one setting for the process, like torch's. Results do not depend on it.
std::atomic<int> most_threads{1};

void use_threads(int count) {
    if (count < 1) throw std::invalid_argument("the number of threads must be at least 1, got " + std::to_string(count));
    most_threads = count;
}

// Runs work(part, begin, end) on contiguous parts of [begin, end), one per thread, in ascending order of parts.
template <class Work>
void in_parts(int64_t begin, int64_t end, int threads, Work work) {
    const int64_t length = end - begin;
    const auto bound = [&](int part) { return begin + length / threads * part + length % threads * part / threads; };
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
#endif
    for (int part = 0; part < threads; ++part) work(part, bound(part), bound(part + 1));
}

// Threads for a pass over `length` elements: below 32,768 elements each, starting them costs more than it saves.
int threads_for(int64_t length) { return int(std::max<int64_t>(1, std::min<int64_t>(most_threads, length / 32768))); }

constexpr int64_t BEYOND_CACHE = 1 << 22;  // elements of a vector that no cache holds until it is read again

// Ends writes past the caches: before others read what was written.
void end_stream() {
#ifdef MPISPARSE_X86
    _mm_sfence();
#endif
}

int32_t magnitude_bits(float threshold) {
    if (!(threshold >= 0.0f)) throw std::invalid_argument("the threshold must be a number >= 0");
    return int32_t(bits_of(threshold));
}

template <class T>
NumPy<T> to_numpy(std::vector<T>&& values) {
    auto* owner = new std::vector<T>(std::move(values));
    nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return NumPy<T>(owner->data(), {owner->size()}, capsule);
}

}  // namespace
