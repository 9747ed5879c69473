// The scores of rows of logits: the log of the sum of their exponentials, and the best token. Each panel of a row gets
// its own scores first, so that a product whose outputs are logits needs no memory for them (linear.hpp). The bits are
// the same either way.
//
// The scores of panels are merged as in Milakov & Gimelshein 2018, arXiv:1805.02867, section 3.1.
#pragma once

#include <stdlib.h>

#include "coded.hpp"
#include "threads.hpp"

namespace {

// The scores of each panel of each row.
struct PanelScores {
    float* most;      // the largest logit
    float* sums;      // of exp(logit - largest); NaN if a logit is, or if the largest is +infinity
    uint8_t* places;  // of the largest logit, the first if some tie
    int64_t stride;   // panels from one row to the next

    // For rows of `size` logits; `most` is to be freed, and null if out of memory.
    static PanelScores make(int64_t num_rows, int size) {
        // An odd number of cache lines, so that rows do not fall into the same few sets of a cache.
        const int64_t stride = 16 * ((size / (16 * kPanel) + 1) | 1);
        float* memory = static_cast<float*>(malloc(num_rows * stride * (2 * sizeof(float) + 1) + 1));
        float* sums = memory + num_rows * stride;
        return {memory, sums, reinterpret_cast<uint8_t*>(sums + num_rows * stride), stride};
    }
    PanelScores behind(int64_t panels) const { return {most + panels, sums + panels, places + panels, stride}; }
    PanelScores of_row(int64_t row) const { return behind(row * stride); }
};

struct RowScores {
    float* normalizers;  // [num_rows], the log of the sum of exponentials
    int64_t* best;       // [num_rows], the first of those that tie
    float* most;         // [num_rows], the best token's logit; or null
};

// Scores rows whose panels have scores already, or which are given as logits.
struct ScoresJob {
    const float* logits;  // [num_rows][size], rows `stride` values apart; or null
    int64_t stride;
    int size;
    PanelScores panels;
    RowScores scores;
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

// Which of a panel's logits equal `value`, one bit for each.
ALWAYS_INLINE uint32_t equal_places(const float* logits, float value) {
    uint32_t places = 0;
    for (int i = 0; i < kPanel; i += kWidth) {
#if defined(__AVX512F__)
        const uint32_t equal = _mm512_cmpeq_ps_mask((__m512)load_floats(logits + i), _mm512_set1_ps(value));
#elif defined(__AVX2__)
        const __m256 lanes = _mm256_cmp_ps((__m256)load_floats(logits + i), _mm256_set1_ps(value), _CMP_EQ_OQ);
        const uint32_t equal = (uint32_t)_mm256_movemask_ps(lanes);
#else
        uint32_t equal = 0;
        for (int lane = 0; lane < kWidth; ++lane) equal |= (uint32_t)(logits[i + lane] == value) << lane;
#endif
        places |= equal << i;
    }
    return places;
}

// Writes the scores of some panels, `stride` apart. First all panels' largest logits, so that no panel waits for its
// own. Not inlined into the products.
__attribute__((noinline)) void score_panels(
    const float (*logits)[kPanel], int count, const PanelScores& to, int64_t stride
) {
    for (int panel = 0; panel < count; ++panel) {
        Floats most = load_floats(logits[panel]);
#pragma GCC unroll 8
        for (int i = kWidth; i < kPanel; i += kWidth) most = larger_of(load_floats(logits[panel] + i), most);
        to.most[panel * stride] = largest_of(most);
    }
    for (int panel = 0; panel < count; ++panel) {
        const float largest = to.most[panel * stride];
        const Floats from = larger_of(broadcast(-__FLT_MAX__), broadcast(largest));  // finite where no token is allowed
        Floats sum = {};
#pragma GCC unroll 8
        for (int i = 0; i < kPanel; i += kWidth) sum += power_of_two((load_floats(logits[panel] + i) - from) * kLog2E);
        to.sums[panel * stride] = sum_of(sum);
        to.places[panel * stride] = (uint8_t)__builtin_ctz(equal_places(logits[panel], largest) | 1u << (kPanel - 1));
    }
}

// Pads a panel with -infinity after its `count` logits.
ALWAYS_INLINE void fill_panel(float* logits, int count) {
    for (int i = count; i < kPanel; ++i) logits[i] = -kInfinity;
}

void score_row(const float* logits, int size, const PanelScores& to) {
    const int num_whole = size / kPanel, num_left = size % kPanel;
    score_panels(reinterpret_cast<const float(*)[kPanel]>(logits), num_whole, to, 1);
    if (num_left == 0) return;
    float last[1][kPanel];
    memcpy(last, logits + num_whole * kPanel, num_left * sizeof *logits);
    fill_panel(last[0], num_left);
    score_panels(last, 1, to.behind(num_whole), 1);
}

// Merges the scores of a row's panels into the row's.
ALWAYS_INLINE void merge_panels(const PanelScores& panels, int size, const RowScores& scores, int64_t row) {
    const int num_panels = (size + kPanel - 1) / kPanel;
    const int padded = round_up(num_panels, kWidth);
    for (int panel = num_panels; panel < padded; ++panel) panels.most[panel] = -kInfinity, panels.sums[panel] = 0.0f;
    const float largest = largest_of(panels.most, padded);
    Floats sum = {};
    for (int i = 0; i < padded; i += kWidth)
        sum += load_floats(panels.sums + i) * power_of_two((load_floats(panels.most + i) - largest) * kLog2E);
    int panel = 0;
    while (panel < num_panels && panels.most[panel] != largest) ++panel;
    const int best = panel < num_panels ? panel * kPanel + panels.places[panel] : 0;
    scores.best[row] = best < size ? best : 0;  // past the last token if all logits of a panel are NaN
    scores.normalizers[row] = largest + __builtin_logf(sum_of(sum));
    if (scores.most != nullptr) scores.most[row] = largest;
}

void score_rows(void* data, int) {
    ScoresJob& job = *static_cast<ScoresJob*>(data);
    for (int64_t row = job.rows.take(1); row < job.rows.count; row = job.rows.take(1)) {
        const PanelScores panels = job.panels.of_row(row);
        if (job.logits != nullptr) score_row(job.logits + row * job.stride, job.size, panels);
        merge_panels(panels, job.size, job.scores, row);
    }
}

void run_scores(ScoresJob job, const Threads& threads) { run_on(threads, job.rows.count > 1, score_rows, &job); }

// Scores rows of logits. Returns -1, or -2 if out of memory.
int score_logits(
    const float* logits, int64_t stride, int size, int num_rows, const RowScores& scores, const Threads& threads
) {
    const PanelScores panels = PanelScores::make(num_rows, size);
    if (panels.most == nullptr) return -2;
    run_scores({logits, stride, size, panels, scores, {0, num_rows}}, threads);
    free(panels.most);
    return -1;
}

}  // namespace
