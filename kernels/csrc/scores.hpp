// What a row of logits comes to: the log of the sum of its exponentials, and the best token.
#pragma once

#include "elements.hpp"
#include "threads.hpp"

namespace {

struct Scores {
    const float* logits;  // [num_rows][size], rows `stride` values apart
    int64_t stride;
    int size;
    float* normalizers;  // [num_rows]
    int64_t* best;       // [num_rows], the first of those that tie
};

struct ScoresJob {
    Scores a;
    Counter rows;
};

ALWAYS_INLINE float largest_of(const float* x, int size) {
    Floats most[4] = {broadcast(-kInfinity), broadcast(-kInfinity), broadcast(-kInfinity), broadcast(-kInfinity)};
    int i = 0;
    for (; i + 4 * kWidth <= size; i += 4 * kWidth)
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) most[part] = larger_of(load_floats(x + i + part * kWidth), most[part]);
    float largest = largest_of(larger_of(larger_of(most[0], most[1]), larger_of(most[2], most[3])));
    for (; i < size; ++i) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

// Of exp(x - largest); NaN where some x is NaN, or where the largest is infinite.
ALWAYS_INLINE float sum_of_powers(const float* x, int size, float largest) {
    Floats sums[4] = {};
    int i = 0;
    for (; i + 4 * kWidth <= size; i += 4 * kWidth)
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part)
            sums[part] += power_of_two((load_floats(x + i + part * kWidth) - largest) * kLog2E);
    float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; ++i) sum += power_of_two(broadcast((x[i] - largest) * kLog2E))[0];
    return sum;
}

void score_rows(void* data, int) {
    ScoresJob& job = *static_cast<ScoresJob*>(data);
    for (int64_t row = job.rows.take(1); row < job.rows.count; row = job.rows.take(1)) {
        const float* x = job.a.logits + row * job.a.stride;
        const float largest = largest_of(x, job.a.size);
        int best = 0;
        while (best < job.a.size && x[best] != largest) ++best;
        job.a.best[row] = best < job.a.size ? best : 0;
        job.a.normalizers[row] = largest + __builtin_logf(sum_of_powers(x, job.a.size, largest));
    }
}

}  // namespace
