// Runs CUDA kernels on the CPU: put before the kernels' source, it makes every CUDA thread of a block a fiber.
//
// A fiber runs until it meets the others (a barrier, a ballot, a shuffle) and waits there; a scheduler lets fibers, warps and
// blocks go on in an order that the test chooses: forward, reversed, or shuffled anew in every round. So a missing barrier, or
// a sum that depends on the order, gives another result in some order. Shared memory is filled with rubbish before each block. What
// would hang on a GPU is an error: a barrier that not all threads of the block reach, a ballot that not all lanes of its mask reach.
// Blocks run one by one: races between them are found by races.cpp, from the accesses. Speed is not shown.
#pragma once
#include <algorithm>
#include <array>
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
#if defined(__SANITIZE_THREAD__)  // races.cpp has the hooks
extern "C" {
void race_memory(void*, size_t);
void race_forget(void*);
void race_launch(void*, void*);
void race_block(unsigned);
void race_thread(int);
void race_barrier();
void race_atomic(bool);
const char* race_found();
}
#else
inline void race_memory(void*, size_t) {}
inline void race_forget(void*) {}
inline void race_launch(void*, void*) {}
inline void race_block(unsigned) {}
inline void race_thread(int) {}
inline void race_barrier() {}
inline void race_atomic(bool) {}
inline const char* race_found() { return ""; }
#endif

#define __global__
#define __device__ static
#define __launch_bounds__(threads)
#define __grid_constant__
#define __align__(nbytes) alignas(nbytes)
#define __shared__ static __attribute__((section("cuda_shared")))
static char none_at_all __attribute__((section("cuda_shared"), used));  // so that there is such a section
extern char __start_cuda_shared[], __stop_cuda_shared[];

struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

enum State { READY, AT_BARRIER, IN_WARP, DONE };
struct Fiber {
    ucontext_t context;
    jmp_buf place;
    bool started = false;
    State state = DONE;
    unsigned thread, meetings = 0;
    uint64_t deposit[2];  // what it brings to this meeting of its warp, and to the one before
    uint32_t mask;
    char* stack;
};

constexpr size_t STACK = 64 * 1024;
static std::vector<Fiber*> fibers;
static Fiber* current = nullptr;
static ucontext_t scheduler_context;
static jmp_buf scheduler_place;
static void (*body)(void*) = nullptr;
static void* arguments = nullptr;
static int order = 0;  // 0 forward, 1 reversed, 2 shuffled
static std::mt19937 generator;
static std::string failure;
static int any = 0, any_next = 0;
static unsigned first_block = 0;  // the block that a launch begins with, to test large indices

// ASan must be told of every change of stack, and knows swapcontext; elsewhere setjmp and longjmp are faster.
#if defined(__SANITIZE_ADDRESS__)
static const void* scheduler_stack = nullptr;
static size_t scheduler_size = 0;
static void* fake = nullptr;
inline void to_fiber(Fiber* f) {
    void* own = nullptr;
    __sanitizer_start_switch_fiber(&own, f->stack, STACK);
    swapcontext(&scheduler_context, &f->context);
    __sanitizer_finish_switch_fiber(own, nullptr, nullptr);
}
inline void to_scheduler() {
    void* own = nullptr;
    __sanitizer_start_switch_fiber(&own, scheduler_stack, scheduler_size);
    swapcontext(&current->context, &scheduler_context);
    __sanitizer_finish_switch_fiber(own, &scheduler_stack, &scheduler_size);
}
inline void arrived() { __sanitizer_finish_switch_fiber(fake, &scheduler_stack, &scheduler_size); }
#else
inline void to_fiber(Fiber* f) {
    if (_setjmp(scheduler_place) == 0) {
        if (f->started) _longjmp(f->place, 1);
        f->started = true;
        swapcontext(&scheduler_context, &f->context);
    }
}
inline void to_scheduler() {
    if (_setjmp(current->place) == 0) _longjmp(scheduler_place, 1);
}
inline void arrived() {}
#endif

inline void fiber_main() {
    arrived();
    for (;;) {
        body(arguments);
        current->state = DONE;
        to_scheduler();
    }
}

inline void yield(State state) {
    current->state = state;
    to_scheduler();
}

inline void prepare(unsigned threads) {
    while (fibers.size() < threads) {
        Fiber* f = new Fiber;
        f->thread = unsigned(fibers.size());
        f->stack = static_cast<char*>(std::malloc(STACK));
        getcontext(&f->context);
        f->context.uc_stack.ss_sp = f->stack;
        f->context.uc_stack.ss_size = STACK;
        f->context.uc_link = nullptr;
        makecontext(&f->context, fiber_main, 0);
        fibers.push_back(f);
    }
}

// Lets the lanes of a warp go on if all who are to meet are there.
inline bool release_warp(unsigned warp) {
    uint32_t here = 0, wanted = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (fibers[32 * warp + lane]->state == IN_WARP) here |= 1u << lane, wanted |= fibers[32 * warp + lane]->mask;
    if (!here || here != wanted) return false;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (here >> lane & 1) fibers[32 * warp + lane]->state = READY;
    return true;
}

inline bool release_barrier(unsigned threads) {
    for (unsigned t = 0; t < threads; ++t)
        if (fibers[t]->state != AT_BARRIER) return false;
    race_barrier();
    any = any_next;
    any_next = 0;
    for (unsigned t = 0; t < threads; ++t) fibers[t]->state = READY;
    return true;
}

inline std::vector<unsigned> sequence(unsigned count) {
    std::vector<unsigned> all(count);
    for (unsigned i = 0; i < count; ++i) all[i] = order == 1 ? count - 1 - i : i;
    if (order == 2) std::shuffle(all.begin(), all.end(), generator);
    return all;
}

inline void run_ready(unsigned thread) {
    if (fibers[thread]->state != READY) return;
    current = fibers[thread];
    threadIdx.x = thread;
    race_thread(int(thread));
    to_fiber(current);
    race_thread(-1);
}

// Shuffled, all threads go on by turns; otherwise each warp runs ahead as far as it can, which a missing barrier does not survive.
inline bool run_round(unsigned threads) {
    bool moved = false;
    if (order == 2) {
        for (unsigned t : sequence(threads)) run_ready(t);
        for (unsigned w = 0; w < threads / 32; ++w) moved |= release_warp(w);
    } else {
        for (unsigned w : sequence(threads / 32)) {
            do {
                for (unsigned lane : sequence(32)) run_ready(32 * w + lane);
            } while (release_warp(w));
        }
    }
    return release_barrier(threads) || moved;
}

inline bool run_block(unsigned threads) {
    std::memset(__start_cuda_shared, 0xA5, size_t(__stop_cuda_shared - __start_cuda_shared));
    any = any_next = 0;
    race_block(blockIdx.x);
    for (unsigned t = 0; t < threads; ++t) fibers[t]->state = READY;
    while (run_round(threads)) {}
    for (unsigned t = 0; t < threads; ++t) {
        if (fibers[t]->state == DONE) continue;
        failure = "thread " + std::to_string(t) + " of block " + std::to_string(blockIdx.x) + " waits for ever at a " +
                  (fibers[t]->state == AT_BARRIER ? "barrier" : "warp's meeting");
        for (Fiber* f : fibers) {  // they cannot be finished: begin with new ones next time
            std::free(f->stack);
            delete f;
        }
        fibers.clear();
        return false;
    }
    return true;
}

// Every lane of the mask brings a value; returns the values of all.
template <class T>
std::array<T, 32> meet(uint32_t mask, T value) {
    static_assert(sizeof(T) <= 8);
    Fiber* self = current;
    if (!(mask >> (self->thread % 32) & 1)) std::abort();
    uint64_t& slot = self->deposit[self->meetings++ % 2];
    std::memcpy(&slot, &value, sizeof(T));
    const unsigned turn = (self->meetings - 1) % 2;
    self->mask = mask;
    yield(IN_WARP);
    std::array<T, 32> values{};
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) std::memcpy(&values[lane], &fibers[self->thread / 32 * 32 + lane]->deposit[turn], sizeof(T));
    return values;
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(args[I])...);
}

// 0, or -1 with last_failure() set, or the number of an argument (from 1) whose size is not the kernel's.
template <class... A>
int launch(void (*kernel)(A...), unsigned grid, unsigned block, void** args, const int* sizes, int count) {
    const int expected[] = {int(sizeof(A))...};
    if (count != int(sizeof...(A))) return int(sizeof...(A)) + 1;
    for (int i = 0; i < count; ++i)
        if (sizes[i] != expected[i]) return i + 1;
    static void (*which)(A...);
    which = kernel;
    body = [](void* all) { call(which, static_cast<void**>(all), std::index_sequence_for<A...>()); };
    arguments = args;
    gridDim.x = first_block + grid;
    blockDim.x = block;
    failure.clear();
    race_launch(__start_cuda_shared, __stop_cuda_shared);
    prepare(block);
    for (Fiber* f : fibers) f->meetings = 0;
    for (unsigned b : sequence(grid)) {
        blockIdx.x = first_block + b;
        if (!run_block(block)) return -1;
    }
    failure = race_found();
    return failure.empty() ? 0 : -1;
}

// Memory with guards on both sides, full of rubbish at first.
constexpr size_t GUARD = 64;
struct Header { size_t nbytes; char pad[GUARD - sizeof(size_t)]; };

}  // namespace emulator

#define EMULATE(name)                                                                                   \
    extern "C" int launch_##name(unsigned grid, unsigned block, void** args, const int* sizes, int count) { \
        return emulator::launch(&name, grid, block, args, sizes, count);                               \
    }

extern "C" const char* last_failure() { return emulator::failure.c_str(); }
extern "C" void set_order(int order, unsigned seed) {
    emulator::order = order;
    emulator::generator.seed(seed);
}

extern "C" void begin_with_block(unsigned first) { emulator::first_block = first; }

extern "C" void* device_allocate(size_t nbytes) {
    using namespace emulator;
    char* block = static_cast<char*>(std::malloc(sizeof(Header) + nbytes + GUARD));
    reinterpret_cast<Header*>(block)->nbytes = nbytes;
    std::memset(block + sizeof(size_t), 0xCD, sizeof(Header) - sizeof(size_t) + nbytes + GUARD);
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(block, sizeof(Header));
    __asan_poison_memory_region(block + sizeof(Header) + nbytes, GUARD);
#endif
    race_memory(block + sizeof(Header), nbytes);
    return block + sizeof(Header);
}

// Frees the memory; false if someone wrote before its begin or behind its end.
extern "C" bool device_free(void* memory) {
    using namespace emulator;
    char* block = static_cast<char*>(memory) - sizeof(Header);
    race_forget(memory);
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(block, sizeof(Header));
    const size_t length = reinterpret_cast<Header*>(block)->nbytes;
    __asan_unpoison_memory_region(block + sizeof(Header) + length, GUARD);
#endif
    const size_t nbytes = reinterpret_cast<Header*>(block)->nbytes;
    bool sound = true;
    for (size_t i = sizeof(size_t); i < sizeof(Header); ++i) sound &= block[i] == char(0xCD);
    for (size_t i = 0; i < GUARD; ++i) sound &= block[sizeof(Header) + nbytes + i] == char(0xCD);
    std::free(block);
    return sound;
}

inline void __syncthreads() { emulator::yield(emulator::AT_BARRIER); }
inline int __syncthreads_or(int flag) {
    if (flag) emulator::any_next = 1;
    emulator::yield(emulator::AT_BARRIER);
    return emulator::any;
}
inline uint32_t __ballot_sync(uint32_t mask, bool flag) {
    const std::array<uint8_t, 32> flags = emulator::meet(mask, uint8_t(flag));
    uint32_t word = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) word |= uint32_t(flags[lane]) << lane;
    return word;
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned step) {
    const unsigned lane = threadIdx.x % 32;
    const std::array<T, 32> values = emulator::meet(mask, value);
    return lane >= step ? values[lane - step] : value;
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned step) {
    const unsigned lane = threadIdx.x % 32;
    const std::array<T, 32> values = emulator::meet(mask, value);
    return lane + step < 32 ? values[lane + step] : value;
}
template <class T>
T __shfl_sync(uint32_t mask, T value, unsigned lane) {
    return emulator::meet(mask, value)[lane % 32];
}
template <class T>
T atomicAdd(T* place, T value) {
    race_atomic(true);
    const T before = *place;
    *place += value;
    race_atomic(false);
    return before;
}
template <class T>
T atomicMin(T* place, T value) {
    race_atomic(true);
    const T before = *place;
    if (value < before) *place = value;
    race_atomic(false);
    return before;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
inline uint32_t __float_as_uint(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
