// The best of many outputs without most of their products: all are computed in 8 bits first, with bounds on their
// errors, and only panels that may hold the best one are multiplied exactly as without a screen. So the best is the
// same, to the bit, and 28 MB are read for a head of 43 (Weber, Schek & Blott 1998, "A Quantitative Analysis and
// Performance Study for Similarity-Search Methods in High-Dimensional Spaces", section 4, do this for the nearest of
// many points).
//
// A head's outputs have much in common: their mean, which is subtracted from all of them, since it favours no output
// over another. Each 64 inputs are turned by a Hadamard matrix, the row's and the weight's alike: their product stays
// the same, and outliers in a few inputs, which would make 8 bits coarse for all, are spread over all of them (Ashkboos
// et al. 2024, arXiv:2404.00456). With x a turned row, v an output's turned weights less the mean, and q and p their 8
// bits times their scales,
//
//     x v - q p = (x - q) p + x (v - p),    whose size is at most |x - q| |p| + |x| |v - p|
//
// These norms are known. For 49,152 tokens that leaves 5.4 panels of 1,536 on average (docs/measurements.md).
//
// The normalizer, which sums over all outputs, takes the products in 8 bits except for those panels.
#pragma once

#include "linear.hpp"

namespace {

// How many inputs are turned together.
constexpr int kTurned = kLeastGroup;
// Bounds on the rounding of floats: as a share of a norm, and of a sum of products as a share of its factors' norms.
constexpr float kOfNorms = 1e-3f, kOfSums = 1e-4f;

// A panel in 8 bits: this head, followed by [num_inputs / 4][32][4] bytes, each 128 more than its integer.
struct ScreenPanel {
    float scales[kPanel];

    uint8_t* values() { return reinterpret_cast<uint8_t*>(this + 1); }
    const uint8_t* values() const { return reinterpret_cast<const uint8_t*>(this + 1); }

    static int64_t bytes(int num_inputs) { return (int64_t)sizeof(ScreenPanel) + num_inputs * kPanel; }
};

static_assert(sizeof(ScreenPanel) == 128, "kernels/cpu_linear.py counts on it");

struct Screen {
    char* panels;
    float* mean;    // [num_inputs], subtracted from each output's weights
    float* norms;   // [panels], the largest norm of an output's weights in 8 bits
    float* errors;  // [panels], the largest norm of an output's errors in 8 bits

    // `floats` has room for a mean, followed by the norms and the errors.
    static Screen of(char* panels, float* floats, int num_outputs, int num_inputs) {
        float* norms = floats + num_inputs;
        return {panels, floats, norms, norms + (num_outputs + kPanel - 1) / kPanel};
    }
    ScreenPanel& panel(int64_t number, int num_inputs) const {
        return *reinterpret_cast<ScreenPanel*>(panels + number * ScreenPanel::bytes(num_inputs));
    }
};

#if defined(INTEGERS) && defined(__AVX512F__)
#define SCREENS

// Turns each `kTurned` values by a Hadamard matrix of norm 1.
template <class Value>
ALWAYS_INLINE void turn(Value* values, int count) {
    for (Value* x = values; x < values + count; x += kTurned) {
        for (int half = 1; half < kTurned; half *= 2)
            for (int i = 0; i < kTurned; i += 2 * half)
                for (int j = i; j < i + half; ++j) {
                    const Value sum = x[j] + x[j + half], difference = x[j] - x[j + half];
                    x[j] = sum, x[j + half] = difference;
                }
        for (int i = 0; i < kTurned; ++i) x[i] *= 0.125f;
    }
    static_assert(kTurned == 64, "whose root is 8");
}

// The root of a sum of squares, and a little more.
ALWAYS_INLINE float norm_of(float squares) { return __builtin_sqrtf(squares) * (1.0f + kOfNorms); }

// The job of making a screen for a weight of integers.
struct ScreenJob {
    const IntegerPair* weight;
    const float* scales;
    Screen screen;
    int num_inputs;
    Counter numbers;
    bool out_of_memory;
};

// Decodes one vector of a panel's outputs: their weights as they are multiplied, less the mean, [num_inputs].
inline void decode_outputs(const ScreenJob& job, int64_t number, int vector, Floats* to) {
    const IntegerUnits source = {job.weight + number * (job.num_inputs / 4)};
    const Floats scale = load_floats(job.scales + number * kPanel + vector * kWidth);
    for (int unit = 0; unit < job.num_inputs / InIntegers::kPerUnit; unit += source.kUnits) {
        Words words[IntegerUnits::kUnits][kPanelVectors];
        source.decode(unit, 0, words);
        for (int i = 0; i < source.kUnits; ++i) {
            const Integers both = (Integers)words[i][vector];
            const int input = (unit + i) * InIntegers::kPerUnit;
            to[input] = __builtin_convertvector(both << 16 >> 16, Floats) * scale - job.screen.mean[input];
            to[input + 1] = __builtin_convertvector(both >> 16, Floats) * scale - job.screen.mean[input + 1];
        }
    }
}

// Writes the mean. Subtracting the same from all outputs does not change which is best, so it need not be exact: some
// panels are enough.
inline void take_mean(const ScreenJob& job, Floats* weights, Floats* sums) {
    constexpr int kMostPanels = 128;
    const int64_t num_panels = job.numbers.count, step = (num_panels + kMostPanels - 1) / kMostPanels;
    memset(job.screen.mean, 0, sizeof(float) * job.num_inputs);
    memset(sums, 0, sizeof(Floats) * job.num_inputs);
    int num_outputs = 0;
    for (int64_t number = 0; number < num_panels; number += step)
        for (int vector = 0; vector < kPanelVectors; ++vector, num_outputs += kWidth) {
            decode_outputs(job, number, vector, weights);
            for (int i = 0; i < job.num_inputs; ++i) sums[i] += weights[i];
        }
    for (int i = 0; i < job.num_inputs; ++i) job.screen.mean[i] = sum_of(sums[i]) / num_outputs;
}

inline void write_panel(const ScreenJob& job, int64_t number, Floats* weights) {
    ScreenPanel& panel = job.screen.panel(number, job.num_inputs);
    Floats most_squares = {}, most_errors = {};
    for (int vector = 0; vector < kPanelVectors; ++vector) {
        const int first = vector * kWidth;
        decode_outputs(job, number, vector, weights);
        turn(weights, job.num_inputs);
        Floats largest = {};
        for (int i = 0; i < job.num_inputs; ++i)
            largest = larger_of(absolute(weights[i]), largest);
        const Floats scale = largest * (1.0f / 127), inverse = largest > 0.0f ? 127.0f / largest : Floats{};
        Floats squares = {}, errors = {};
        for (int i = 0; i < job.num_inputs; i += 4) {
            Words bytes = {};
            for (int j = 0; j < 4; ++j) {
                const Integers integer = nearest_integers(weights[i + j] * inverse);
                const Floats value = __builtin_convertvector(integer, Floats) * scale, error = weights[i + j] - value;
                squares += value * value, errors += error * error;
                bytes |= (Words)(integer + 128) << 8 * j;
            }
            memcpy(panel.values() + (int64_t)i * kPanel + 4 * first, &bytes, sizeof bytes);
        }
        store_floats(panel.scales + first, scale);
        most_squares = larger_of(most_squares, squares), most_errors = larger_of(most_errors, errors);
    }
    job.screen.norms[number] = norm_of(largest_of(most_squares));
    job.screen.errors[number] = norm_of(largest_of(most_errors));
}

inline Floats* floats_for(ScreenJob& job, int count) {
    Floats* memory = static_cast<Floats*>(aligned_alloc(sizeof(Floats), sizeof(Floats) * job.num_inputs * count));
    if (memory == nullptr) __atomic_store_n(&job.out_of_memory, true, __ATOMIC_RELAXED);
    return memory;
}

inline void write_panels(void* data, int) {
    ScreenJob& job = *static_cast<ScreenJob*>(data);
    Floats* weights = floats_for(job, 1);
    if (weights == nullptr) return;
    for (int64_t number = job.numbers.take(1); number < job.numbers.count; number = job.numbers.take(1))
        write_panel(job, number, weights);
    free(weights);
}

// A row in 8 bits.
struct ScreenedRow {
    float scale;
    int offset;   // the excess of its products with a panel, whose bytes are 128 too large
    float norm;   // of the row
    float error;  // the norm of its integers' errors
    float shift;  // its product with the mean
    float slack;  // a bound on the rounding of floats in an output beyond that
};

// The screening of rows, up to their scores.
class Screening {
  public:
    // `a` has no bias, and its weight is of integers.
    Screening(const Linear& a, const Screen& screen, const RowScores& scores, int num_threads)
        : a_(a), screen_(screen), scores_(scores), panels_(PanelScores::make(a.num_rows, a.num_outputs)),
          shares_(Shares::evenly(a.num_panels(), num_threads)), rows_to_begin_{0, a.num_rows}, rows_to_end_{0, a.num_rows} {
        a_.scores = &panels_;
        Floats mean_squares = {};
        for (int i = 0; i < a.num_inputs; i += kWidth)
            mean_squares += load_floats(screen.mean + i) * load_floats(screen.mean + i);
        mean_norm_ = norm_of(sum_of(mean_squares));
        const int64_t num_inputs = a.num_inputs, row_values = num_values<Grouped>(a.num_inputs);
        const int64_t row_bytes = sizeof(ScreenedRow) + (sizeof(float) + 1) * num_inputs + sizeof(int16_t) * row_values;
        rows_ = static_cast<ScreenedRow*>(malloc(a.num_rows * row_bytes + 1));
        turned_ = reinterpret_cast<float*>(rows_ + a.num_rows);
        grouped_ = reinterpret_cast<int16_t*>(turned_ + a.num_rows * num_inputs);
        integers_ = reinterpret_cast<int8_t*>(grouped_ + a.num_rows * row_values);
    }
    ~Screening() {
        free(panels_.most);
        free(rows_);
    }

    bool has_memory() const { return rows_ != nullptr && panels_.most != nullptr; }

    void begin_rows() {
        for (int64_t row = rows_to_begin_.take(1); row < a_.num_rows; row = rows_to_begin_.take(1)) begin_row(row);
    }

    void screen_panels(int thread) {
        Taker items(shares_, thread);
        while (items.take(1)) {
            const ScreenPanel& panel = screen_.panel(items.first, a_.num_inputs);
            const int64_t next = items.expected() >= 0 ? items.expected() : items.first;
            const char* ahead = reinterpret_cast<const char*>(screen_.panel(next, a_.num_inputs).values());
            for (int row = 0; row < a_.num_rows; row += kRows, ahead = nullptr)
                with_rows(least(kRows, a_.num_rows - row), [&](auto rows) __attribute__((always_inline)) {
                    if constexpr (decltype(rows)::value <= kRows)
                        screen_rows<decltype(rows)::value>(row, panel, items.first, ahead);
                });
        }
    }

    void end_rows() {
        IntegerPanels multiplier;
        for (int64_t row = rows_to_end_.take(1); row < a_.num_rows; row = rows_to_end_.take(1)) {
            const PanelScores panels = panels_.of_row(row);
            int best = 0;
            for (int i = 1; i < a_.num_panels(); ++i) best = panels.most[i] > panels.most[best] ? i : best;
            multiply(multiplier, row, best);
            float most = panels.most[best];
            for (int i = 0; i < a_.num_panels(); ++i)
                if (i != best && may_reach(most, row, i)) {
                    multiply(multiplier, row, i);
                    most = panels.most[i] > most ? panels.most[i] : most;
                }
            merge_panels(panels, a_.num_outputs, scores_, row);
        }
    }

  private:
    static constexpr int kRows = 8;  // rows of a tile

    void begin_row(int64_t row) {
        const int num_inputs = a_.num_inputs;
        int16_t* grouped = grouped_ + row * num_values<Grouped>(num_inputs);
        convert_rows<Bfloat16, Grouped>(
            static_cast<const uint16_t*>(a_.x) + row * a_.x_stride, a_.x_stride, grouped, 1, num_inputs
        );
        float* const turned = turned_ + row * num_inputs;
        Floats squares = {}, shifts = {};
        for (int first = 0; first < num_inputs; first += kGroup, grouped += Grouped::kCommonValues) {
            const int count = least(kGroup, num_inputs - first);
            const float scale = Grouped::common(grouped + count).scale;
            for (int i = first; i < first + count; i += kWidth, grouped += kWidth) {
                const __m512i integers = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)grouped));
                const Floats x = (Floats)_mm512_cvtepi32_ps(integers) * scale, mean = load_floats(screen_.mean + i);
                store_floats(turned + i, x);
                squares += x * x, shifts += x * mean;
            }
        }
        turn(turned, num_inputs);
        Floats largest = {};
        for (int i = 0; i < num_inputs; i += kWidth)
            largest = larger_of(absolute(load_floats(turned + i)), largest);
        const float most = largest_of(largest), scale = most / 127, inverse = most > 0.0f ? 127 / most : 0.0f;
        Floats errors = {};
        Words sums = {};  // anything if a value is not finite; no comparison holds then
        for (int i = 0; i < num_inputs; i += kWidth) {
            const Floats x = load_floats(turned + i);
            const Integers integer = nearest_integers(x * inverse);
            const Floats error = x - __builtin_convertvector(integer, Floats) * scale;
            errors += error * error, sums += (Words)integer;
            _mm_storeu_si128((__m128i*)(integers_ + row * num_inputs + i), _mm512_cvtsepi32_epi8((__m512i)integer));
        }
        ScreenedRow& to = rows_[row];
        to.scale = scale, to.offset = (int)(128u * (uint32_t)_mm512_reduce_add_epi32((__m512i)sums));
        to.norm = norm_of(sum_of(squares)), to.error = norm_of(sum_of(errors)) + kOfSums * to.norm;
        to.shift = sum_of(shifts), to.slack = kOfSums * to.norm * mean_norm_;
    }

    // Scores the products of some rows with a panel in 8 bits, prefetching from `ahead` unless it is null.
    template <int kCount>
    ALWAYS_INLINE void screen_rows(int first_row, const ScreenPanel& panel, int64_t number, const char* ahead) {
        const int num_inputs = a_.num_inputs, outputs = least(kPanel, a_.num_outputs - (int)number * kPanel);
        const int8_t* x = integers_ + (int64_t)first_row * num_inputs;
        const uint8_t* values = panel.values();
        __m512i sums[kCount][kPanelVectors] = {};
        for (int i = 0; i < num_inputs; i += 4, values += 4 * kPanel, x += 4) {
            if (ahead != nullptr) {
                __builtin_prefetch(ahead + (int64_t)i * kPanel, 0, 2);
                __builtin_prefetch(ahead + (int64_t)i * kPanel + 64, 0, 2);
            }
            const __m512i weights[] = {_mm512_loadu_si512(values), _mm512_loadu_si512(values + 4 * kWidth)};
#pragma GCC unroll 8
            for (int row = 0; row < kCount; ++row) {
                int32_t four;
                memcpy(&four, x + row * num_inputs, sizeof four);
#pragma GCC unroll 2
                for (int vector = 0; vector < kPanelVectors; ++vector)
                    sums[row][vector] = _mm512_dpbusd_epi32(sums[row][vector], weights[vector], _mm512_set1_epi32(four));
            }
        }
        float results[kCount][kPanel] __attribute__((aligned(64)));
        for (int i = 0; i < kCount; ++i) {
            const ScreenedRow& row = rows_[first_row + i];
#pragma GCC unroll 2
            for (int vector = 0; vector < kPanelVectors; ++vector) {
                const int at = vector * kWidth;
                const Floats sum = __builtin_convertvector((Integers)sums[i][vector] - row.offset, Floats);
                const Floats scale = load_floats(panel.scales + at) * row.scale;
                store_floats(results[i] + at, multiply_add(sum, scale, broadcast(row.shift)));
            }
            fill_panel(results[i], outputs);
        }
        score_panels(results, kCount, panels_.of_row(first_row).behind(number), panels_.stride);
    }

    // Whether a panel may have an output as large as this, by its bounds. These say nothing of values that are not
    // finite: no comparison with NaN holds, and the answer is yes.
    bool may_reach(float output, int64_t number_of_row, int64_t panel) const {
        const ScreenedRow& row = rows_[number_of_row];
        const float off = screen_.norms[panel] * row.error + screen_.errors[panel] * row.norm + row.slack;
        return !(panels_.of_row(number_of_row).most[panel] + off < output);
    }

    // Scores a panel's outputs for a row, computed as without a screen.
    void multiply(IntegerPanels& multiplier, int64_t row, int64_t number) {
        const int64_t row_values = num_values<Grouped>(a_.num_inputs);
        const char* panel = static_cast<const char*>(a_.weight) + number * a_.panel_bytes();
        const IntegerUnits source = {reinterpret_cast<const IntegerPair*>(panel)};
        float results[1][kPanel] __attribute__((aligned(64)));
        Ahead ahead(nullptr, 0);
        ahead.begin({}, 0);
        multiplier.multiply(
            1, grouped_ + row * row_values, row_values, Decoded<InIntegers, IntegerUnits>{source},
            a_.num_inputs / InIntegers::kPerUnit, ahead, results
        );
        finish_rows<Bfloat16>(a_, row, 1, number, results);
    }

    Linear a_;
    const Screen& screen_;
    const RowScores& scores_;
    float mean_norm_;
    PanelScores panels_;
    ScreenedRow* rows_;
    float* turned_;        // [num_rows][num_inputs]
    int16_t* grouped_;     // the rows as `IntegerPanels` multiplies them
    int8_t* integers_;     // [num_rows][num_inputs]
    Shares shares_;        // of the panels
    Counter rows_to_begin_, rows_to_end_;
};

inline void begin_rows(void* job, int) { static_cast<Screening*>(job)->begin_rows(); }
inline void screen_panels(void* job, int thread) { static_cast<Screening*>(job)->screen_panels(thread); }
inline void end_rows(void* job, int) { static_cast<Screening*>(job)->end_rows(); }
#endif

// Writes the screen of a weight of integers. Returns -1, or -2 if out of memory.
inline int write_screen(
    const void* weight, const float* scales, char* panels, float* norms, int num_outputs, int num_inputs,
    const Threads& threads
) {
#if defined(SCREENS)
    const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel;
    const Screen screen = Screen::of(panels, norms, num_outputs, num_inputs);
    ScreenJob job = {static_cast<const IntegerPair*>(weight), scales, screen, num_inputs, {0, num_panels}, false};
    Floats* memory = floats_for(job, 2);
    if (memory == nullptr) return -2;
    take_mean(job, memory, memory + num_inputs);
    free(memory);
    run_on(threads, true, write_panels, &job);
    return job.out_of_memory ? -2 : -1;
#else
    (void)weight, (void)scales, (void)panels, (void)norms, (void)num_outputs, (void)num_inputs, (void)threads;
    return -2;
#endif
}

// Like `score_outputs`, except for the error of the normalizers.
inline int score_by_screen(const Linear& a, const Screen& screen, const RowScores& scores, const Threads& threads) {
#if defined(SCREENS)
    Screening screening(a, screen, scores, threads.num_threads);
    if (!screening.has_memory()) return -2;
    run_on(threads, a.num_rows > 1, begin_rows, &screening);
    run_on(threads, a.num_panels() > 1, screen_panels, &screening);
    run_on(threads, a.num_rows > 1, end_rows, &screening);
    return -1;
#else
    (void)a, (void)screen, (void)scores, (void)threads;
    return -2;
#endif
}

}  // namespace
