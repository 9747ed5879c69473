// What the library says about itself, what this CPU can do, and the pinning of threads.
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include "threads.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

// The digest of the sources that this was built from; the loader refuses a library that was built from others.
EXPORT const char* source_digest() { return SOURCE_DIGEST; }

#if defined(__x86_64__) && defined(__linux__)
// Whether this process may use the tile registers for bfloat16: the CPU has them, and the system saves them and grants
// permission when asked. That is asked for all threads, since a thread with permission needs a larger signal stack.
static bool may_use_tiles() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & bit_OSXSAVE) == 0) return false;
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    constexpr unsigned kTileShapes = 1u << 17, kTileData = 1u << 18;
    if ((low & kTileShapes) == 0 || (low & kTileData) == 0) return false;
    constexpr long kRequestPermission = 0x1023, kTileDataNumber = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileDataNumber) == 0;
}
#elif defined(__x86_64__)
static bool may_use_tiles() { return false; }
#endif

// The best level that this CPU runs; it also runs every level that comes before it in kernels/build.py.
EXPORT const char* best_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();  // also asks the operating system whether it saves the wide registers
    unsigned a, b, c, d;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;  // clang's builtin does not know "f16c"
    const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    if (bf16 && may_use_tiles()) return "amx_bf16";
    if (bf16) return "avx512_bf16";
    if (avx512) return "avx512";
    if (avx2) return "avx2";
#endif
    return "portable";
}

#if defined(__linux__)
namespace {

struct Pins {
    const int* cpus;
    int num_threads;
    int failures;
};

void pin(void* data, int thread) {
    Pins& pins = *static_cast<Pins*>(data);
    if (thread >= pins.num_threads) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(pins.cpus[thread], &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) __atomic_add_fetch(&pins.failures, 1, __ATOMIC_RELAXED);
}

}  // namespace

// Binds each thread of a region to a CPU of its own; returns how many could not be bound.
EXPORT int pin_threads(const int* cpus, int num_threads, ParallelRegion region) {
    Pins pins = {cpus, num_threads, 0};
    run_on({region, num_threads}, true, pin, &pins);
    return pins.failures;
}
#endif
