// Finds races: hooks that -fsanitize=thread calls for every access of the kernels, in place of the sanitizer's own library.
//
// Two accesses to a byte race if one of them writes, not both are atomic, and they are of different blocks, or of different threads
// of a block with no barrier between. That does not depend on the order in which the emulator ran them. Shared memory and memory of
// device_allocate() are watched; what a warp's shuffles and ballots order is not taken for ordered, since CUDA does not promise it.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <map>
#include <unordered_map>

namespace {

struct Access {
    int64_t block = -1;
    int thread = 0;
    uint32_t phase = 0;
    bool atomic = false;
};
// Those who have read a byte, or written it. Blocks run one after another, so one access of any block before and two of this block since
// its last barrier are enough: a later access of another thread races with one of these if it races with any.
struct Users {
    Access before, here[2];
};
struct Byte {
    Users reads, writes;
};

std::map<uintptr_t, size_t> memory;
std::unordered_map<uintptr_t, Byte> global, shared;
uintptr_t shared_begin = 0, shared_end = 0;
Access now;
int running = -1;
char found[256] = "";

bool watched(uintptr_t at) {
    auto after = memory.upper_bound(at);
    if (after == memory.begin()) return false;
    --after;
    return at < after->first + after->second;
}

bool races(const Access& before) {
    if (before.block < 0 || (before.atomic && now.atomic)) return false;
    return before.block != now.block || (before.thread != now.thread && before.phase == now.phase);
}

bool same_place(const Access& before) { return before.block == now.block && before.phase == now.phase; }

void report(const Access& before, uintptr_t at, const char* what, const char* where) {
    if (found[0]) return;
    std::snprintf(found, sizeof found, "a race: block %lld, thread %d %s %s memory that block %lld, thread %d uses, no barrier between (%#llx)",
                  (long long)now.block, now.thread, what, where, (long long)before.block, before.thread, (unsigned long long)at);
}

void compare(const Users& users, uintptr_t at, const char* what, const char* where) {
    for (const Access& user : {users.before, users.here[0], users.here[1]})
        if (races(user)) report(user, at, what, where);
}

void remember(Users& users) {
    Access* here = users.here;
    if (here[0].block >= 0 && here[0].block != now.block) users.before = here[0];
    if (!same_place(here[0])) here[0] = here[1] = now;
    else if (here[0].thread != now.thread) here[1] = now;
    else here[0].atomic &= now.atomic;
}

void touch(const void* place, size_t nbytes, bool writes) {
    if (running < 0) return;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(place);
    const bool in_shared = begin >= shared_begin && begin < shared_end;
    if (!in_shared && !watched(begin)) return;
    for (uintptr_t at = begin; at < begin + nbytes; ++at) {
        Byte& byte = (in_shared ? shared : global)[at];
        const char* where = in_shared ? "shared" : "global";
        compare(byte.writes, at, writes ? "writes" : "reads", where);
        if (writes) compare(byte.reads, at, "writes", where);
        remember(writes ? byte.writes : byte.reads);
    }
}

}  // namespace

extern "C" {
void race_memory(void* place, size_t nbytes) { memory[reinterpret_cast<uintptr_t>(place)] = nbytes; }
void race_forget(void* place) { memory.erase(reinterpret_cast<uintptr_t>(place)); }
void race_launch(void* begin, void* end) {
    global.clear();
    found[0] = 0;
    shared_begin = reinterpret_cast<uintptr_t>(begin), shared_end = reinterpret_cast<uintptr_t>(end);
}
void race_block(unsigned block) {
    shared.clear();
    now.block = block, now.phase = 0;
}
void race_thread(int thread) { running = now.thread = thread; }
void race_barrier() { ++now.phase; }
void race_atomic(bool atomic) { now.atomic = atomic; }
const char* race_found() { return found; }

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* place, unsigned long nbytes) { touch(place, nbytes, false); }
void __tsan_write_range(void* place, unsigned long nbytes) { touch(place, nbytes, true); }
#define HOOKS(nbytes)                                                                     \
    void __tsan_read##nbytes(void* place) { touch(place, nbytes, false); }                \
    void __tsan_write##nbytes(void* place) { touch(place, nbytes, true); }                \
    void __tsan_volatile_read##nbytes(void* place) { touch(place, nbytes, false); }       \
    void __tsan_volatile_write##nbytes(void* place) { touch(place, nbytes, true); }       \
    void __tsan_unaligned_read##nbytes(void* place) { touch(place, nbytes, false); }      \
    void __tsan_unaligned_write##nbytes(void* place) { touch(place, nbytes, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
}
