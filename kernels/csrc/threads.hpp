// Work for several threads: torch's own.
//
// torch brings an OpenMP runtime with a pool of threads, and a second pool would fight it over the cores: its threads
// spin for a while after each region. So nothing here is compiled with -fopenmp. The loader finds the function by which
// GCC's code opens a parallel region (GOMP_parallel, which LLVM's runtime has too) in the runtime that torch has loaded
// and hands it over; a region of ours then runs on the threads that have just multiplied matrices.
#pragma once

#include <stdint.h>

// What each thread of a team does with a job that they share.
using Work = void (*)(void* job);

// Calls work(job) on each of num_threads threads, the caller's among them, and waits for all.
using ParallelRegion = void (*)(Work work, void* job, unsigned num_threads, unsigned flags);

// How a kernel may run: by `region`, if there is one, on num_threads threads. A team of another size than torch's would
// make OpenMP end threads and start them again, so a kernel takes all of them or none.
struct Threads {
    ParallelRegion region;
    int num_threads;
};

namespace {

inline void run_on(const Threads& threads, bool worthwhile, Work work, void* job) {
    if (worthwhile && threads.region != nullptr && threads.num_threads > 1)
        threads.region(work, job, (unsigned)threads.num_threads, 0);
    else
        work(job);
}

// Hands out the numbers 0 to count - 1, some at a time.
struct Counter {
    int64_t next;
    int64_t count;

    // The first of the next `step` numbers; `count` or more when there are none left.
    int64_t take(int64_t step) { return __atomic_fetch_add(&next, step, __ATOMIC_RELAXED); }
};

}  // namespace
