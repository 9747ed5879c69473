// Sums and gathers over the processes of one host, through memory that they share.
//
// Each process has two sides to put its data on, and uses them alternately. It puts its data, says so, waits until all
// have said so, and reads. A process at its next meeting but one has seen all others come to the next one, so they are
// done with what is on that side: they need not say that they have read it.
#pragma once

#include <sched.h>
#include <time.h>

#include "elements.hpp"

namespace {

struct Meeting {
    char* memory;      // shared by all: for each process a cache line with its turn, then each one's two sides
    int64_t room;      // bytes of a side
    int rank, size;    // this process, and how many there are
    uint64_t* turn;    // of this process: the number of meetings that it has come to
    double timeout_s;  // how long the others may take to come

    uint64_t* turn_of(int process) const { return reinterpret_cast<uint64_t*>(memory + 64 * process); }
    char* side(int process, uint64_t at) const { return memory + 64 * size + (2 * process + (at & 1)) * room; }
};

inline double now_s() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// Spins for a while, as long as a process with a core of its own may take to come; then yields the core to others.
inline bool wait_for(const uint64_t* turn, uint64_t at, double timeout_s) {
    constexpr int kLooks = 4000, kYields = 256;
    for (int look = 0; look < kLooks; ++look) {
        if (__atomic_load_n(turn, __ATOMIC_ACQUIRE) >= at) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    const double end = now_s() + timeout_s;
    do {
        for (int i = 0; i < kYields; ++i) {
            if (__atomic_load_n(turn, __ATOMIC_ACQUIRE) >= at) return true;
            sched_yield();
        }
    } while (now_s() < end);
    return false;
}

// Puts this process's data by put(side), and waits for all others. Returns -1, or the rank of one that did not come.
template <class Put>
ALWAYS_INLINE int meet(const Meeting& m, Put put) {
    const uint64_t at = ++*m.turn;
    put(m.side(m.rank, at));
    __atomic_store_n(m.turn_of(m.rank), at, __ATOMIC_RELEASE);
    for (int process = 0; process < m.size; ++process)
        if (!wait_for(m.turn_of(process), at, m.timeout_s)) return process;
    return -1;
}

// Sums each value over the processes, in the order of their ranks in every process, so that all of them get the same.
template <class Element, class Value = typename Element::Value>
ALWAYS_INLINE int sum_shares(const Meeting& m, Value* x, int64_t count) {
    const int64_t most = m.room / (int64_t)sizeof(Value);
    for (int64_t first = 0; first < count; first += most) {
        const int64_t n = count - first < most ? count - first : most;
        Value* values = x + first;
        const int missing = meet(m, [&](char* side) { memcpy(side, values, n * sizeof(Value)); });
        if (missing != -1) return missing;
        const auto of = [&](int process) { return reinterpret_cast<const Value*>(m.side(process, *m.turn)); };
        int64_t i = 0;
        for (; i + kWidth <= n; i += kWidth) {
            Floats sum = Element::load(of(0) + i);
            for (int process = 1; process < m.size; ++process) sum += Element::load(of(process) + i);
            Element::store(values + i, sum);
        }
        for (; i < n; ++i) {
            float sum = Element::widen(of(0)[i]);
            for (int process = 1; process < m.size; ++process) sum += Element::widen(of(process)[i]);
            values[i] = Element::narrow(sum);
        }
    }
    return -1;
}

// Puts rows side by side: from each process, num_rows rows of row_bytes[process] bytes. A single row fits on a side.
inline int gather_shares(const Meeting& m, const char* x, char* out, int64_t num_rows, const int64_t* row_bytes) {
    int64_t longest = 1, out_bytes = 0;
    for (int process = 0; process < m.size; ++process) {
        longest = row_bytes[process] > longest ? row_bytes[process] : longest;
        out_bytes += row_bytes[process];
    }
    const int64_t most = m.room / longest;
    for (int64_t first = 0; first < num_rows; first += most) {
        const int64_t n = num_rows - first < most ? num_rows - first : most;
        const int64_t own = row_bytes[m.rank];
        const int missing = meet(m, [&](char* side) { memcpy(side, x + first * own, n * own); });
        if (missing != -1) return missing;
        char* to = out + first * out_bytes;
        for (int process = 0; process < m.size; to += row_bytes[process++])
            for (int64_t row = 0; row < n; ++row)
                memcpy(to + row * out_bytes, m.side(process, *m.turn) + row * row_bytes[process], row_bytes[process]);
    }
    return -1;
}

}  // namespace
