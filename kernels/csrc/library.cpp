// What the library says of itself, and what this CPU can do.
#if defined(__linux__)
#include <sched.h>
#endif
#include "threads.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

// The digest of the sources that this was built from; the loader refuses a library that is older than they are.
EXPORT const char* source_digest() { return SOURCE_DIGEST; }

// The best level that this CPU runs; it runs every level that stands before it in kernels/build.py as well.
EXPORT const char* best_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();  // asks the operating system as well whether it saves the wide registers
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return "avx512_bf16";
    if (avx512) return "avx512";
    if (avx2) return "avx2";
#endif
    return "portable";
}

#if defined(__linux__)
namespace {

struct Pins {
    const int* cpus;
    Counter threads;
    int failures;
};

void pin(void* data) {
    Pins& pins = *static_cast<Pins*>(data);
    const int64_t thread = pins.threads.take(1);
    if (thread >= pins.threads.count) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(pins.cpus[thread], &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) __atomic_add_fetch(&pins.failures, 1, __ATOMIC_RELAXED);
}

}  // namespace

// Binds each thread of a region to a CPU of its own; gives how many could not be bound.
EXPORT int pin_threads(const int* cpus, int num_threads, ParallelRegion region) {
    Pins pins = {cpus, {0, num_threads}, 0};
    run_on({region, num_threads}, true, pin, &pins);
    return pins.failures;
}
#endif
