// A sequence of jobs on one team of threads: each thread goes through all of them, and waits for the others after each.
//
// A decode step is hundreds of jobs of a few microseconds, and opening a parallel region for each would cost a good
// part of that. A waiting thread spins for a while, since the others mostly arrive soon. Then it sleeps: the thread
// that all wait for may need its core.
#pragma once

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif
#include "threads.hpp"

namespace {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Where the threads of a team wait for each other, again and again; Mellor-Crummey & Scott 1991, section 3.1.
class Barrier {
  public:
    // Returns once all `team_size` threads have called it; what they did before is then visible to all.
    void wait(int team_size) {
        const uint32_t round = __atomic_load_n(&round_, __ATOMIC_RELAXED);
        if (__atomic_add_fetch(&arrived_, 1, __ATOMIC_ACQ_REL) == team_size) {
            __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&round_, round + 1, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&num_asleep_, __ATOMIC_SEQ_CST) > 0) wake_all();
            return;
        }
        for (int i = 0; i < kSpins; ++i) {
            if (__atomic_load_n(&round_, __ATOMIC_ACQUIRE) != round) return;
            pause_briefly();
        }
        __atomic_add_fetch(&num_asleep_, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&round_, __ATOMIC_SEQ_CST) == round) sleep_in(round);
        __atomic_sub_fetch(&num_asleep_, 1, __ATOMIC_RELAXED);
    }

  private:
    static constexpr int kSpins = 2000;  // some tens of microseconds

#if defined(__linux__)
    // Sleeps until it is woken, unless the round is over.
    void sleep_in(uint32_t round) { syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0); }
    void wake_all() { syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0); }
#else
    void sleep_in(uint32_t) { sched_yield(); }
    void wake_all() {}
#endif

    alignas(64) int arrived_ = 0;
    alignas(64) uint32_t round_ = 0;
    int num_asleep_ = 0;
};

struct Stage {
    Work work;
    void* job;
};

// Called in a parallel region, returns the region's number of threads (omp_get_num_threads).
using TeamSize = int (*)();

struct Program {
    const Stage* stages;
    int num_stages;
    TeamSize team_size;  // null if there is no region
    Barrier barrier;
};

inline void run_program(void* data, int thread) {
    Program& program = *static_cast<Program*>(data);
    const int team_size = program.team_size != nullptr ? program.team_size() : 1;
    for (int i = 0; i < program.num_stages; ++i) {
        program.stages[i].work(program.stages[i].job, thread);
        program.barrier.wait(team_size);
    }
}

}  // namespace
