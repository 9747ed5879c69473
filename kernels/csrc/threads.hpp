// Work for several threads: torch's own.
//
// torch brings an OpenMP runtime with a pool of threads, and a second pool would fight it over the cores: its threads
// spin for a while after each region. So nothing here is compiled with -fopenmp. The loader finds the function by which
// GCC's code opens a parallel region (GOMP_parallel, which LLVM's runtime has too) in the runtime that torch has loaded
// and hands it over; a region of ours then runs on the threads that have just multiplied matrices.
#pragma once

#include <stdint.h>

// What each thread of a team does with a job that they share; they are numbered from 0.
using Work = void (*)(void* job, int thread);

// Calls call(data) on each of num_threads threads, the caller's among them, and waits for all.
using ParallelRegion = void (*)(void (*call)(void* data), void* data, unsigned num_threads, unsigned flags);

// How a kernel may run: by `region`, if there is one, on num_threads threads. A team of another size than torch's would
// make OpenMP end threads and start them again, so a kernel takes all of them or none.
struct Threads {
    ParallelRegion region;
    int num_threads;
};

namespace {

struct Team {
    Work work;
    void* job;
    int num_threads;  // that have come so far
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

// Hands out the numbers 0 to count - 1, some at a time.
struct Counter {
    int64_t next;
    int64_t count;

    // The first of the next `step` numbers; `count` or more when there are none left.
    int64_t take(int64_t step) { return __atomic_fetch_add(&next, step, __ATOMIC_RELAXED); }
};

// As many shares at most; of more threads several have the same one.
constexpr int kMostShares = 8;

// The numbers 0 to count - 1, of which each thread has a share that it begins with. So what one job leaves in a core's
// caches, or asks memory for, is mostly found there by the next one: cores do not always share a cache, and then a line
// that goes from one to the other takes as long as one from memory.
struct Shares {
    struct Share {
        int64_t next, end;
        char padding[48];  // to the next one's cache line
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
            made.shares[i].next = begin;
            made.shares[i].end = begin = end < count ? end : count;
        }
        return made;
    }

    int of(int thread) const { return thread % num_shares; }
    // The share that a number is in.
    int find(int64_t number) const {
        int share = 0;
        while (share + 1 < num_shares && number >= shares[share].end) ++share;
        return share;
    }
};

// What a thread takes: its own share, step by step, and then of the others', until none is left.
class Taker {
  public:
    int64_t first = 0, end = 0;  // what was taken last

    Taker(Shares& shares, int thread) : shares_(shares), own_(shares.of(thread)) {}

    // Takes the next numbers, `step` at most. False if there are none.
    bool take(int64_t step) {
        for (; num_empty_ < shares_.num_shares; ++num_empty_) {
            Shares::Share& share = shares_.shares[(own_ + num_empty_) % shares_.num_shares];
            if (__atomic_load_n(&share.next, __ATOMIC_RELAXED) >= share.end) continue;
            first = __atomic_fetch_add(&share.next, step, __ATOMIC_RELAXED);
            if (first >= share.end) continue;
            end = first + step < share.end ? first + step : share.end;
            has_more_ = end < share.end;
            return true;
        }
        return false;
    }

    // Whether the share that was taken from has more, beginning with `end`.
    bool has_more() const { return has_more_; }

  private:
    Shares& shares_;
    const int own_;
    int num_empty_ = 0;
    bool has_more_ = false;
};

}  // namespace
