// Products of bfloat16 by integers of 16 bits, where there is AVX2 and nothing more: two multiplications in each lane at
// once, and none of the shifts that make two float32 of two bfloat16.
//
// A bfloat16 has 8 significant bits, and an integer of 14 has room for what its neighbours are larger, so one scale serves
// many, as in block floating point (Wilkinson 1963, "Rounding Errors in Algebraic Processes"). Of a row each group of 320
// inputs has one, by which its largest value is 8191, and all are rounded to it. Of a weight each output has one, a power
// of two as small as the sums allow: those of a group are exact in 32 bits, whatever the row. There only values are rounded
// that are less than a 128th of the largest one that the scale has room for. Both is much less than bfloat16 has rounded
// before (docs/performance.md); where it would be as much in one output, a weight is multiplied in float32.
//
// A weight's integer is one of 8 bits times a power of two, and so it takes 12 bits in memory, as in coded.hpp.
#pragma once

#include "panels.hpp"

namespace {

// Inputs of a group, and what they are multiples of in a row's last one.
constexpr int kGroup = 320, kLeastGroup = 64;

// Two units of a panel, of 32 outputs by 2 inputs each. A value's size is multiplied by what its code stands for: code 0
// for 0, 1 to 7 for the powers of two from 1 to 64, and 9 to 15 for the same with a minus sign.
struct IntegerPair {
    uint8_t sizes[2][2 * kPanel];
    uint8_t codes[2 * kPanel];  // lower half: of the first unit's value at the same place; upper half: of the second's

    // Of 32 bytes the even ones become one vector, and the odd ones the next: of 8 outputs each.
    static constexpr int place(int output) { return (output & 16) << 1 | (output & 7) << 2 | (output & 8) >> 3; }
};

static_assert(sizeof(IntegerPair) == 192, "kernels/cpu_linear.py counts on it");

inline int64_t integer_panel_bytes(int num_inputs) { return num_inputs / 4 * (int64_t)sizeof(IntegerPair); }

#if defined(__AVX2__) && !defined(__AVX512F__)
#define INTEGERS

constexpr int kMostLeft = 8191;       // of a row's integers
constexpr int kMostRight = 255 << 6;  // of a weight's

// Rows of these: each group is its integers, and then what they have in common.
struct Grouped {
    using Value = int16_t;

    struct Common {
        float scale;
        uint32_t cross;  // see `multiply_part`
    };
    static constexpr int kCommonValues = sizeof(Common) / sizeof(Value);

    static ALWAYS_INLINE Common common(const Value* behind) {
        Common found;
        memcpy(&found, behind, sizeof found);
        return found;
    }

    // A group's integers, and what they have in common, from its bfloat16. What is less than 2^-100 counts as zero; where one value is not
    // finite, none of the group's is.
    static ALWAYS_INLINE void store(Value* to, const uint16_t* from, int count) {
        __m256i most = _mm256_setzero_si256();
        for (int i = 0; i < count; i += 16) {
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
        Words twice = {};  // each two units' cross products, in both units' lanes
        for (int i = 0; i < count; i += 16) {
            const __m256i lower = _mm256_cvtps_epi32((__m256)(Bfloat16::load(from + i) * inverse));
            const __m256i upper = _mm256_cvtps_epi32((__m256)(Bfloat16::load(from + i + 8) * inverse));
            const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(lower, upper), 0xD8);
            _mm256_storeu_si256((__m256i*)(to + i), packed);
            twice += (Words)_mm256_madd_epi16(packed, _mm256_shuffle_epi32(packed, 0xB1));
        }
        const Common common = {scale, twice[0] + twice[2] + twice[4] + twice[6]};
        memcpy(to + count, &common, sizeof common);
    }
};

// A row of so many inputs, which are groups: `num_values` integers.
template <>
ALWAYS_INLINE int64_t num_values<Grouped>(int num_inputs) {
    return num_inputs + (int64_t)(num_inputs + kGroup - 1) / kGroup * Grouped::kCommonValues;
}

template <>
ALWAYS_INLINE void convert_row<Bfloat16, Grouped>(const uint16_t* from, int16_t* to, int num_inputs) {
    for (int input = 0; input < num_inputs; input += kGroup) {
        const int count = least(kGroup, num_inputs - input);
        Grouped::store(to, from + input, count);
        to += count + Grouped::kCommonValues;
    }
}

struct InIntegers {
    using Left = Grouped;
    using Loaded = Words;
    static constexpr int kPerUnit = 2;
};

constexpr int kGroupUnits = kGroup / InIntegers::kPerUnit;
constexpr int kPartRows = 4;    // of a tile, where units stand in memory
constexpr int kStepUnits = 16;  // between which memory is asked for there
static_assert(kGroup % kLeastGroup == 0 && kLeastGroup % (kStepUnits * InIntegers::kPerUnit) == 0, "steps fill groups");

// A panel of pairs.
struct IntegerUnits {
    static constexpr int kUnits = 2;
    const IntegerPair* pairs;

    // Unit `unit + i`, of the two that `unit` begins.
    template <int kVectors>
    ALWAYS_INLINE void decode(int unit, int i, int tile, Words (&words)[kVectors]) const {
        const __m256i factors = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 2, 4, 8, 16, 32, 64, 0, -1, -2, -4, -8, -16, -32, -64)
        );
        const IntegerPair& from = pairs[unit / kUnits];
#pragma GCC unroll 2
        for (int half = 0; half < kVectors / 2; ++half) {
            const __m256i sizes = _mm256_load_si256((const __m256i*)from.sizes[i] + tile + half);
            const __m256i codes = _mm256_load_si256((const __m256i*)from.codes + tile + half);
            const __m256i own_codes = i == 0 ? codes : _mm256_srli_epi16(codes, 4);
            // Each product is of two neighbours, of which one is not to count: its code is that of 0.
            const __m256i even = _mm256_and_si256(own_codes, _mm256_set1_epi16(0x000F));
            const __m256i odd = _mm256_and_si256(own_codes, _mm256_set1_epi16(0x0F00));
            words[2 * half] = (Words)_mm256_maddubs_epi16(sizes, _mm256_shuffle_epi8(factors, even));
            words[2 * half + 1] = (Words)_mm256_maddubs_epi16(sizes, _mm256_shuffle_epi8(factors, odd));
        }
    }
};

// Such a panel of int8, [inputs][32].
struct Int8Units {
    static constexpr int kUnits = 2;
    const int8_t* values;

    // As above.
    template <int kVectors>
    ALWAYS_INLINE void decode(int unit, int i, int tile, Words (&words)[kVectors]) const {
#pragma GCC unroll 2
        for (int half = 0; half < kVectors / 2; ++half) {
            const int8_t* from = values + ((int64_t)(unit + i) * 2 * kPanel + (tile + half) * (kPanel / 2));
            const __m128i first = _mm_loadu_si128((const __m128i*)from);
            const __m128i second = _mm_loadu_si128((const __m128i*)(from + kPanel));
            words[2 * half] = (Words)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second));
            words[2 * half + 1] = (Words)_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(first, second));
        }
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
        for (int vector = 0; vector < kVectors; ++vector) {
            Integers sum = sums[row][vector] + (Integers)_mm256_madd_epi16((__m256i)weights[vector], pair);
            // Or the compiler would multiply two units first and then add: more than there are registers for.
            asm("" : "+x"(sum));
            sums[row][vector] = sum;
        }
    }
}

// Some of a panel's units, decoded: those of a tile's outputs.
struct DecodedPart {
    static constexpr int kVectors = 2;
    // So many stay in the first cache while all rows go past them, and some of these rows too. A panel of more is worked
    // on in parts of whole groups.
    static constexpr int kMostUnits = 288, kWholeGroups = kMostUnits / kGroupUnits * kGroupUnits;
    alignas(64) uint32_t words[kMostUnits][kVectors * kWidth];
    Words cross[kMostUnits / kGroupUnits + 1][kVectors];  // of each group, see `multiply_part`

    template <class Source>
    ALWAYS_INLINE void fill(Source& source, int first, int count, int tile) {
        static_assert(Source::kUnits == 2, "cross products are of two units");
        Words(*of_group)[kVectors] = cross;
        for (int unit = 0; unit < count; ++of_group) {
            Words sums[kVectors] = {};
            for (const int end = least(unit + kGroupUnits, count); unit < end; unit += Source::kUnits) {
                Words decoded[Source::kUnits][kVectors];
#pragma GCC unroll 2
                for (int i = 0; i < Source::kUnits; ++i) {
                    source.decode(first + unit, i, tile, decoded[i]);
                    memcpy(words[unit + i], decoded[i], sizeof decoded[i]);
                }
                for (int vector = 0; vector < kVectors; ++vector)
                    sums[vector] += (Words)_mm256_madd_epi16((__m256i)decoded[0][vector], (__m256i)decoded[1][vector]);
            }
            memcpy(*of_group, sums, sizeof sums);
        }
    }
};

// Adds a group's sums to the results of a tile, or begins them.
template <int kRows, int kVectors>
ALWAYS_INLINE void add_group(
    const Integers (&sums)[kRows][kVectors], const int16_t* behind, int64_t x_stride, int tile, bool is_first,
    float (*results)[kPanel]
) {
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
        const __m256 scale = _mm256_broadcast_ss((const float*)(behind + row * x_stride));
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector) {
            float* to = results[row] + (tile * kVectors + vector) * kWidth;
            const Floats before = is_first ? Floats{} : load_floats(to);
            const __m256 sum = _mm256_cvtepi32_ps((__m256i)sums[row][vector]);
            store_floats(to, (Floats)_mm256_fmadd_ps(sum, scale, (__m256)before));
        }
    }
}

// Adds the products of two units of a part with those of the rows, made as `multiply_part` says.
template <int kRows, int kVectors>
ALWAYS_INLINE void add_crossed(
    const __m256i* weights, const int16_t* x, int64_t x_stride, Words (&sums)[kRows][kVectors]
) {
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
        int32_t first, second;
        memcpy(&first, x + row * x_stride, sizeof first);
        memcpy(&second, x + row * x_stride + InIntegers::kPerUnit, sizeof second);
        const __m256i a = _mm256_set1_epi32(first), b = _mm256_set1_epi32(second);
#pragma GCC unroll 2
        for (int vector = 0; vector < kVectors; ++vector) {
            const __m256i left = _mm256_add_epi16(a, weights[kVectors + vector]);
            const __m256i right = _mm256_add_epi16(b, weights[vector]);
            sums[row][vector] += (Words)_mm256_madd_epi16(left, right);
        }
    }
}

// Adds the products of a part with some rows to the results of a tile, or begins them.
//
// With a and b of a row, in one unit and the next, and v and w of the weight there,
//
//     a v + b w = (a + w)(b + v) - a b - v w
//
// is one product instead of two (Winograd 1968, "A New Algorithm for Inner Product"), where sums of a b over a group are
// the row's, and those of v w the weight's. Additions are more by as many, but a core has twice as many units for them.
// What is too large for 32 bits on the way is so by multiples of 2^32, and the group's sum is not.
template <int kRows>
ALWAYS_INLINE void multiply_part(
    const int16_t* x, int64_t x_stride, const DecodedPart& part, int num_units, int tile, bool is_first, Pace& pace,
    float (*results)[kPanel]
) {
    constexpr int kVectors = DecodedPart::kVectors;
    const Words(*cross)[kVectors] = part.cross;
    for (int unit = 0; unit < num_units; is_first = false, ++cross) {
        const int group_end = least(unit + kGroupUnits, num_units);
        Words sums[kRows][kVectors] = {};
        while (unit < group_end) {
            Run run = pace.next((group_end - unit) / kStepUnits);
            const char* line = run.at;
            for (const int run_end = unit + run.num_units * kStepUnits; unit < run_end;) {
                ask(line, run, 1);
                for (const int end = unit + kStepUnits; unit < end; unit += 2, x += 2 * InIntegers::kPerUnit)
                    add_crossed((const __m256i*)part.words[unit], x, x_stride, sums);
            }
        }
        Integers products[kRows][kVectors];
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
            for (int vector = 0; vector < kVectors; ++vector)
                products[row][vector] =
                    (Integers)(sums[row][vector] - (*cross)[vector] - Grouped::common(x + row * x_stride).cross);
        add_group(products, x, x_stride, tile, is_first, results);
        x += Grouped::kCommonValues;
    }
}

// Adds the products of all units of a panel with few rows, decoded by each tile for its outputs. There memory decides, and
// to ask for more than a few lines at once would hold up what is needed now.
template <int kRows, int kVectors, class Source>
ALWAYS_INLINE void multiply_decoding(
    const int16_t* x, int64_t x_stride, Source& source, int num_units, int tile, Pace& pace, float (*results)[kPanel]
) {
    constexpr int kUnits = Source::kUnits;
    for (int unit = 0; unit < num_units; x += Grouped::kCommonValues) {
        const bool is_first = unit == 0;
        Integers sums[kRows][kVectors] = {};
        const int end = least(unit + kGroupUnits, num_units);
        while (unit < end) {
            Run run = pace.next((end - unit) / kUnits);
            const char* line = run.at;
            for (const int run_end = unit + run.num_units * kUnits; unit < run_end; unit += kUnits) {
                ask(line, run, 1);
#pragma GCC unroll 2
                for (int i = 0; i < kUnits; ++i, x += InIntegers::kPerUnit) {
                    Words weights[kVectors];
                    source.decode(unit, i, tile, weights);
                    add_pairs(weights, x, x_stride, sums);
                }
            }
        }
        add_group(sums, x, x_stride, tile, is_first, results);
    }
}

// The products of some rows with a panel, by integers.
struct IntegerPanels {
    using Product = InIntegers;
    static constexpr int kRows = kConvertedRows;
    static constexpr bool kDecodes = true;
    static constexpr int kMostDecodingRows = kRows;  // `multiply` decodes, whatever the rows
    using Int8Source = Int8Units;

    static bool fits(int num_inputs) { return num_inputs > 0 && num_inputs % kLeastGroup == 0; }

    template <class Source>
    void multiply(
        int num_rows, const int16_t* x, int64_t x_stride, Decoded<Product, Source> panel, int num_units, Ahead& ahead,
        float (*results)[kPanel]
    ) {
        if (num_rows <= kVectorRows)
            with_rows(num_rows, [&](auto rows) __attribute__((always_inline)) {
                constexpr int kCount = decltype(rows)::value, kVectors = kCount <= kWholeRows ? kPanelVectors : 2;
                Pace pace(ahead, kPanelVectors / kVectors * (num_units / Source::kUnits));
                for (int tile = 0; tile < kPanelVectors / kVectors; ++tile)
                    multiply_decoding<kCount, kVectors>(x, x_stride, panel.source, num_units, tile, pace, results);
            });
        else
            multiply_parts(num_rows, x, x_stride, panel.source, num_units, ahead, results);
    }
    void end() {}

  private:
    DecodedPart part_;

    // One part after the other, each for all rows.
    template <class Source>
    ALWAYS_INLINE void multiply_parts(
        int num_rows, const int16_t* x, int64_t x_stride, Source& source, int num_units, Ahead& ahead,
        float (*results)[kPanel]
    ) {
        constexpr int kTiles = kPanelVectors / DecodedPart::kVectors;
        const int part_units = num_units <= part_.kMostUnits ? num_units : part_.kWholeGroups;
        Pace pace(ahead, (num_rows + kPartRows - 1) / kPartRows * kTiles * (num_units / kStepUnits));
        for (int first = 0; first < num_units; first += part_units) {
            const int count = least(part_units, num_units - first);
            for (int tile = 0; tile < kTiles; ++tile) {
                part_.fill(source, first, count, tile);
                for (int row = 0; row < num_rows; row += kPartRows)
                    with_rows(least(kPartRows, num_rows - row), [&](auto rows) __attribute__((always_inline)) {
                        if constexpr (decltype(rows)::value <= kPartRows)
                            multiply_part<decltype(rows)::value>(
                                x + row * x_stride, x_stride, part_, count, tile, first == 0, pace, results + row
                            );
                    });
            }
            x += num_values<Grouped>(count * InIntegers::kPerUnit);
        }
    }
};
#endif

}  // namespace
