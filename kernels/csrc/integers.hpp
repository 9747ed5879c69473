// Products of bfloat16 by integers of 16 bits, where the instruction set has a product for these and none for bfloat16:
// two multiplications in each lane at once, and none of the shifts that make two float32 of two bfloat16.
//
// A bfloat16 has 8 significant bits, so an integer of 14 is room for it and for what its neighbours are larger, up to 64
// times. So each group of 64 inputs of a row has one scale, as in block floating point (Wilkinson 1963, "Rounding Errors in
// Algebraic Processes"), and each output of a weight has one, as small as the sums allow: those of a group are exact in 32
// bits, whatever the row. What is rounded is a sixth of what bfloat16 has rounded before (docs/performance.md); where it
// would be half of that, a weight is multiplied in float32 (`fit_integers`).
#pragma once

#include "panels.hpp"

namespace {

constexpr int kGroup = 64;         // inputs
constexpr int kMostLeft = 16383;   // of a row's integers
constexpr int kMostRight = 32767;  // of a weight's

// Units that stand in memory.
struct Stored {
    static constexpr int kUnits = 1;
    const uint32_t* units;

    template <int kVectors>
    ALWAYS_INLINE void decode(int unit, int tile, Words (&words)[kUnits][kVectors]) const {
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector)
            words[0][vector] = load_words(units + (int64_t)unit * kPanel + spread_output<kVectors>(tile, vector));
    }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
#define INTEGERS

// Rows of these: each group is its integers, and then its scale.
struct Grouped {
    using Value = int16_t;
    static constexpr int kGroupValues = kGroup + sizeof(float) / sizeof(Value);

    static ALWAYS_INLINE float scale(const Value* group) {
        float value;
        memcpy(&value, group + kGroup, sizeof value);
        return value;
    }

    // A group's integers and scale from its bfloat16. What is less than 2^-100 counts as zero; where one value is not
    // finite, none of the group's is.
    static ALWAYS_INLINE void store(Value* to, const uint16_t* from) {
        __m256i most = _mm256_setzero_si256();
        for (int i = 0; i < kGroup; i += 16) {
            const __m256i values = _mm256_loadu_si256((const __m256i*)(from + i));
            most = _mm256_max_epu16(most, _mm256_and_si256(values, _mm256_set1_epi16(0x7FFF)));
        }
        const __m128i half = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
        const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
        const uint16_t largest = (uint16_t)~_mm_extract_epi16(least, 0);
        constexpr uint16_t kInfinite = 0x7F80, kTiny = (127 - 100) << 7;
        const float value = Bfloat16::widen(largest);
        const float inverse = largest < kTiny ? 0.0f : kMostLeft / value;
        const float scale = largest >= kInfinite ? __builtin_nanf("") : largest < kTiny ? 0.0f : value / kMostLeft;
        for (int i = 0; i < kGroup; i += 16) {
            const __m256i lower = _mm256_cvtps_epi32((__m256)(Bfloat16::load(from + i) * inverse));
            const __m256i upper = _mm256_cvtps_epi32((__m256)(Bfloat16::load(from + i + 8) * inverse));
            const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(lower, upper), 0xD8);
            _mm256_storeu_si256((__m256i*)(to + i), packed);
        }
        memcpy(to + kGroup, &scale, sizeof scale);
    }
};

// A row of so many inputs, which are groups: `num_values` integers.
template <>
ALWAYS_INLINE int64_t num_values<Grouped>(int num_inputs) {
    return (int64_t)num_inputs / kGroup * Grouped::kGroupValues;
}

template <>
ALWAYS_INLINE void convert_row<Bfloat16, Grouped>(const uint16_t* from, int16_t* to, int num_inputs) {
    for (int input = 0; input < num_inputs; input += kGroup, to += Grouped::kGroupValues) Grouped::store(to, from + input);
}

struct InIntegers {
    using Left = Grouped;
    using Unit = uint32_t;
    using Loaded = Words;
    static constexpr int kPerUnit = 2;

    static ALWAYS_INLINE Words load(const Unit* from) { return load_words(from); }
};

// A panel's units as pairs of integers.
template <class Source>
struct AsIntegers {
    static constexpr int kUnits = Source::kUnits;
    Source source;
    const float* inverse_scales;  // of the panel's outputs

    template <int kVectors>
    ALWAYS_INLINE void decode(int unit, int tile, Words (&words)[kUnits][kVectors]) {
        source.decode(unit, tile, words);
#pragma GCC unroll 2
        for (int i = 0; i < kUnits; ++i)
#pragma GCC unroll 8
            for (int vector = 0; vector < kVectors; ++vector)
                words[i][vector] =
                    integers(words[i][vector], load_floats(inverse_scales + spread_output<kVectors>(tile, vector)));
    }

    // What is added brings a number's last bit to the last bit of a float's mantissa, rounded to the nearest.
    static ALWAYS_INLINE Words integers(Words pair, Floats inverse_scale) {
        const Floats rounder = broadcast(12582912.0f);  // 1.5 * 2^23
        const __m256 first = _mm256_fmadd_ps((__m256)(pair << 16), (__m256)inverse_scale, (__m256)rounder);
        const __m256 second = _mm256_fmadd_ps((__m256)(pair & 0xFFFF0000u), (__m256)inverse_scale, (__m256)rounder);
        return (Words)_mm256_blend_epi16((__m256i)first, _mm256_slli_epi32((__m256i)second, 16), 0xAA);
    }
};

// Adds the products of a unit's pairs with those of the rows.
template <int kRows, int kVectors>
ALWAYS_INLINE void add_pairs(
    const Words (&weights)[kVectors], const int16_t* x, int64_t x_stride, Integers (&sums)[kRows][kVectors]
) {
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
        int32_t both;
        memcpy(&both, x + row * x_stride, sizeof both);
        const __m256i pair = _mm256_set1_epi32(both);
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector)
            sums[row][vector] += (Integers)_mm256_madd_epi16((__m256i)weights[vector], pair);
    }
}

// As `multiply_tile`. The sums of a group are added to what `results` has from those before it.
template <int kRows, class Panel>
ALWAYS_INLINE void multiply_integers(
    const int16_t* x, int64_t x_stride, Panel panel, int num_units, int tile, Ahead& ahead, float (*results)[kPanel]
) {
    constexpr int kUnits = Panel::kUnits, kVectors = kRows <= kWholeRows ? kPanelVectors : 2;
    constexpr int kGroupUnits = kGroup / InIntegers::kPerUnit;
    constexpr bool kAsksAtOnce = Panel::kIsPlain && kRows == kVectorRows;
    static_assert(kGroupUnits % kRunUnits == 0, "the loop takes whole runs");
    Run runs[kMostRuns];
    ahead.share(num_units, kPanelVectors / kVectors - tile, runs);
    Run* run = runs;
    const char* line = run->at;
    int run_end = run->num_units;
    for (int unit = 0; unit < num_units; x += Grouped::kGroupValues) {
        Integers sums[kRows][kVectors] = {};
        const int16_t* values = x;
        for (const int group_end = unit + kGroupUnits; unit < group_end;) {
            if (unit == run_end) line = (++run)->at, run_end += run->num_units;
            if (kAsksAtOnce) ask(line, *run, kRunUnits);
            for (const int end = unit + kRunUnits; unit < end; unit += kUnits, values += kUnits * InIntegers::kPerUnit) {
                Words weights[kUnits][kVectors];
                panel.load(unit, tile, weights);
                if (!kAsksAtOnce) ask(line, *run, kUnits);
#pragma GCC unroll 2
                for (int i = 0; i < kUnits; ++i)
                    add_pairs(weights[i], values + i * InIntegers::kPerUnit, x_stride, sums);
            }
        }
        const bool is_first = unit == kGroupUnits;
#pragma GCC unroll 12
        for (int row = 0; row < kRows; ++row) {
            const Floats scale = broadcast(Grouped::scale(x + row * x_stride));
#pragma GCC unroll 8
            for (int vector = 0; vector < kVectors; ++vector) {
                float* to = results[row] + Panel::template output<kVectors>(tile, vector);
                const Floats before = is_first ? Floats{} : load_floats(to);
                const __m256 sum = _mm256_cvtepi32_ps((__m256i)sums[row][vector]);
                store_floats(to, (Floats)_mm256_fmadd_ps(sum, (__m256)scale, (__m256)before));
            }
        }
    }
}

// The products of some rows with a panel, by integers.
struct IntegerPanels {
    using Product = InIntegers;
    static constexpr int kRows = kVectorRows;
    static constexpr bool kDecodes = true;
    // Integers take longer to make, so that one tile makes all of a panel's, or none does.
    static constexpr int kMostDecodingRows = kWholeRows;

    template <class Source>
    static AsIntegers<Source> multiplied(Source source, const float* inverse_scales, int64_t panel) {
        return {source, inverse_scales + panel * kPanel};
    }

    template <class Panel>
    void multiply(
        int num_rows, const int16_t* x, int64_t x_stride, Panel panel, int num_units, Ahead& ahead,
        float (*results)[kPanel]
    ) {
        for_tiles(num_rows, [&](auto rows, int tile) __attribute__((always_inline)) {
            constexpr int kCount = decltype(rows)::value;
            if constexpr (Panel::kIsPlain || kCount <= kMostDecodingRows)
                multiply_integers<kCount>(x, x_stride, panel, num_units, tile, ahead, results);
        });
    }
    void end() {}
};
#endif

// Whether a weight of bfloat16 is to be multiplied as integers; what they are multiples of, for each output.
struct Fit {
    const uint16_t* weight;  // [num_outputs][num_inputs]
    int num_outputs, num_inputs;
    float* scales;          // [num_outputs]
    float* inverse_scales;  // filled up with zeros to whole panels
    bool fits;
    Counter panels;
};

// The scale of an output: as small as one of 16 bits may be, and the sum of a group's absolute values. 0 where all are
// zero; negative where rounding would be half of what bfloat16 rounds itself, which is 8e-4 of a value.
inline float integer_scale(const uint16_t* values, int num_inputs) {
    constexpr float kMostSum = (float)(INT32_MAX / kMostLeft - kGroup);  // of a group's integers, each rounded
    float most = 0.0f, most_sum = 0.0f, all = 0.0f;
    for (int group = 0; group < num_inputs; group += kGroup) {
        Floats sum = {}, largest = {};
        for (int i = 0; i < kGroup; i += kWidth) {
            const Floats value = Bfloat16::load(values + group + i);
            const Floats size = (Floats)((Words)value & 0x7FFFFFFFu);
            largest = larger_of(size, largest), sum += size;
        }
        const float group_most = largest_of(largest), group_sum = sum_of(sum);
        all += group_sum;
        most = group_most > most ? group_most : most;
        most_sum = group_sum > most_sum ? group_sum : most_sum;
    }
    const float scale = most / kMostRight > most_sum / kMostSum ? most / kMostRight : most_sum / kMostSum;
    if (scale == 0.0f) return scale;
    // The root mean square of what rounding changes is scale / sqrt(12); that of values without outliers, 1.25 of their mean
    // size, in which outliers count less than in their own.
    const float size = 1.25f * all / num_inputs;
    return scale > 1e-30f && scale * scale / 12.0f <= 4e-4f * 4e-4f * size * size ? scale : -1.0f;
}

inline void fit_panels(void* data) {
    Fit& job = *static_cast<Fit*>(data);
    for (int64_t panel = job.panels.take(1); panel < job.panels.count; panel = job.panels.take(1))
        for (int output = (int)panel * kPanel; output < ((int)panel + 1) * kPanel; ++output) {
            const bool is_one = output < job.num_outputs;
            const float scale =
                is_one ? integer_scale(job.weight + (int64_t)output * job.num_inputs, job.num_inputs) : 0.0f;
            if (is_one) job.scales[output] = scale;
            job.inverse_scales[output] = scale > 0.0f ? 1.0f / scale : 0.0f;
            if (!(scale >= 0.0f)) __atomic_store_n(&job.fits, false, __ATOMIC_RELAXED);
        }
}

// False where it is not, or there are no integers at this level; scales are anything then.
inline bool fit_integers(
    const uint16_t* weight, int num_outputs, int num_inputs, float* scales, float* inverse_scales, const Threads& threads
) {
#if defined(INTEGERS)
    constexpr bool kMultipliesIntegers = true;
#else
    constexpr bool kMultipliesIntegers = false;
#endif
    if (!kMultipliesIntegers || num_inputs % kGroup != 0) return false;
    Fit job = {weight, num_outputs, num_inputs, scales, inverse_scales, true, {0, (num_outputs + kPanel - 1) / kPanel}};
    run_on(threads, true, fit_panels, &job);
    return job.fits;
}

}  // namespace
