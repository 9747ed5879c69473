// Work for several threads: torch's own.
//
// torch brings an OpenMP runtime with a pool of threads, and a second pool would fight it over the cores: its threads
// spin for a while after each region. So nothing here is compiled with -fopenmp. In the runtime that torch has loaded,
// the loader finds the function by which GCC's code opens a parallel region (GOMP_parallel, which LLVM's runtime has
// too) and hands it over; our regions then run on the threads that have just multiplied matrices.
#pragma once

#include <stdint.h>

// What each thread of a team does with the job that they share; threads are numbered from 0.
using Work = void (*)(void* job, int thread);

// Calls call(data) on each of num_threads threads, the caller's among them, and waits for all.
using ParallelRegion = void (*)(void (*call)(void* data), void* data, unsigned num_threads, unsigned flags);

// How a kernel may run: through `region`, if there is one, on num_threads threads. A team of another size than torch's
// would make OpenMP end threads and start them again, so a kernel takes all of them or only the caller's.
struct Threads {
    ParallelRegion region;
    int num_threads;
};

namespace {

struct Team {
    Work work;
    void* job;
    int num_threads;  // those that have joined so far
};

inline void join_team(void* data) {
    Team& team = *static_cast<Team*>(data);
    team.work(team.job, __atomic_fetch_add(&team.num_threads, 1, __ATOMIC_RELAXED));
}

inline void run_on(const Threads& threads, bool worthwhile, Work work, void* job) {
    Team team = {work, job, 0};
    if (worthwhile && threads.region != nullptr && threads.num_threads > 1)
        threads.region(join_team, &team, (unsigned)threads.num_threads, 0);
    else
        join_team(&team);
}

// Hands out the numbers 0 to count - 1, a few at a time.
struct Counter {
    int64_t next;
    int64_t count;

    // The first of the next `step` numbers; `count` or more when there are none left.
    int64_t take(int64_t step) { return __atomic_fetch_add(&next, step, __ATOMIC_RELAXED); }
};

// The most shares; if there are more threads, several have the same one.
constexpr int kMostShares = 8;

// The numbers 0 to count - 1, of which each thread has a share that it begins with. So the next job mostly finds in a
// core's caches what the last one left or prefetched there: cores do not always share a cache, and then a line that
// goes from one core to the other takes as long as one from memory.
struct Shares {
    // What is left of a share.
    struct alignas(8) Left {
        int next, end;
    };
    struct Share {
        alignas(64) Left left;  // in a cache line of its own

        Left load() {
            Left found;
            __atomic_load(&left, &found, __ATOMIC_RELAXED);
            return found;
        }
        // Replaces what is left by `rest` if it is still `expected`; otherwise stores what it is in `expected`.
        bool exchange(Left& expected, Left rest) {
            return __atomic_compare_exchange(&left, &expected, &rest, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        }
    };
    Share shares[kMostShares];
    int num_shares;

    // Shares as even as multiples of `unit` allow.
    static Shares evenly(int64_t count, int num_threads, int64_t unit = 1) {
        Shares made;
        made.num_shares = num_threads < kMostShares ? num_threads : kMostShares;
        const int64_t num_units = (count + unit - 1) / unit;
        int64_t begin = 0;
        for (int i = 0; i < made.num_shares; ++i) {
            const int64_t end = num_units * (i + 1) / made.num_shares * unit;
            made.shares[i].left = {(int)begin, (int)(end < count ? end : count)};
            begin = made.shares[i].left.end;
        }
        return made;
    }

    int of(int thread) const { return thread % num_shares; }
    // The share that a number is in.
    int find(int64_t number) const {
        int share = 0;
        while (share + 1 < num_shares && number >= shares[share].left.end) ++share;
        return share;
    }
};

// What a thread takes: its own share, step by step, and then from the others', until none is left. From those it takes
// at the end, to stay out of their owners' way (as in Chase & Lev 2005, "Dynamic Circular Work-Stealing Deque").
class Taker {
  public:
    int64_t first = 0, end = 0;  // the numbers taken last

    Taker(Shares& shares, int thread) : shares_(shares), own_(shares.of(thread)) {}

    // Takes the next numbers, at most `step`. Returns false if there are none.
    bool take(int64_t step) {
        for (; num_empty_ < shares_.num_shares; ++num_empty_) {
            Shares::Share& share = shares_.shares[(own_ + num_empty_) % shares_.num_shares];
            Shares::Left left = share.load();
            while (left.next < left.end) {
                const int taken = step < left.end - left.next ? (int)step : left.end - left.next;
                const bool is_own = num_empty_ == 0;
                first = is_own ? left.next : left.end - taken;
                end = first + taken;
                const Shares::Left rest = is_own ? Shares::Left{(int)end, left.end} : Shares::Left{left.next, (int)first};
                if (!share.exchange(left, rest)) continue;
                expected_ = rest.next == rest.end ? -1 : is_own ? end : first - 1;
                return true;
            }
        }
        return false;
    }

    // The number that will probably be taken next, with a step of 1; -1 if the share last taken from has no more.
    int64_t expected() const { return expected_; }

  private:
    Shares& shares_;
    const int own_;
    int num_empty_ = 0;
    int64_t expected_ = -1;
};

}  // namespace
