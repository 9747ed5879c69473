// Products of bfloat16 by 16-bit integers: each lane does two multiplications at once, and since two integers are added
// without error, as few as half of the multiplications are needed (`add_crossed`). With AVX2 alone that makes twice as
// many products a second as in float32, and with AVX-512 two fifths more than its dot products of bfloat16. Tile
// registers make even more of these.
//
// In a row each group of inputs has a scale (integer_rows.hpp). In a weight each output has one, a power of two as
// small as the sums allow: those of a group are exact in 32 bits, whatever the row. In the weight, rounding changes
// only values below a 128th of the largest that the scale has room for. Both roundings are much less than bfloat16 has
// rounded before (docs/measurements.md); if they would be as much in one output, the weight is multiplied as it is.
//
// A weight's integer is 8 bits times a power of two, and so it takes 12 bits in memory, as in coded.hpp. Quantized weights
// bring integers and scales of their own (Int8Units, int4.hpp).
#pragma once

#include "integer_rows.hpp"

namespace {

// Two units of a panel, of 32 outputs by 2 inputs each. A value is its size times what its code stands for: code 0
// stands for 0, 1 to 7 for the powers of two from 1 to 64, and 9 to 15 for the same with a minus sign.
struct IntegerPair {
    uint8_t sizes[2][2 * kPanel];
    uint8_t codes[2 * kPanel];  // lower half: of the first unit's value at the same place; upper half: of the second's

    // The even bytes of a vector become one vector of words, and the odd bytes the next.
    static constexpr int place(int output) {
        return output / (2 * kWidth) * (4 * kWidth) + output % kWidth * 4 + output / kWidth % 2;
    }
};

static_assert(sizeof(IntegerPair) == 192, "kernels/cpu_linear.py counts on it");

inline int64_t integer_panel_bytes(int num_inputs) { return num_inputs / 4 * (int64_t)sizeof(IntegerPair); }

#if defined(INTEGERS)
constexpr int kMostRight = 255 << 6;  // the largest of a weight's integers

struct InIntegers {
    using Left = Grouped;
    using Loaded = Words;
    static constexpr int kPerUnit = 2;
};

constexpr int kGroupUnits = kGroup / InIntegers::kPerUnit;
// kMostPlainRows: the most rows for which memory is the bottleneck, so that products are not merged in pairs. For more
// rows than `kDecodingRows`, units are decoded into memory, at most kMostPartUnits at once, and memory is prefetched
// every kStepUnits units.
#if defined(__AVX512F__)
constexpr int kMostPlainRows = 4, kMostPartUnits = kGroupUnits, kStepUnits = 4;
#else
constexpr int kMostPlainRows = 6, kMostPartUnits = 288, kStepUnits = 16;
#endif
static_assert(kGroup % kLeastGroup == 0 && kLeastGroup % (kStepUnits * InIntegers::kPerUnit) == 0, "steps fill groups");

// Multiplies bytes without a sign by bytes with one, and adds the two products of each pair of bytes.
ALWAYS_INLINE Words multiply_bytes(Words bytes, Words factors) {
#if defined(__AVX512F__)
    return (Words)_mm512_maddubs_epi16((__m512i)bytes, (__m512i)factors);
#else
    return (Words)_mm256_maddubs_epi16((__m256i)bytes, (__m256i)factors);
#endif
}

// A panel of pairs.
struct IntegerUnits {
    static constexpr int kUnits = 2;
    const IntegerPair* pairs;

    // Decodes `unit` and the one after it.
    template <int kVectors>
    ALWAYS_INLINE void decode(int unit, int tile, Words (&words)[kUnits][kVectors]) const {
        const IntegerPair& from = pairs[unit / kUnits];
#pragma GCC unroll 2
        for (int i = 0; i < kUnits; ++i)
#pragma GCC unroll 2
            for (int half = 0; half < kVectors / 2; ++half) {
                const Words sizes = load_words((const Words*)from.sizes[i] + tile + half);
                const Words codes = load_words((const Words*)from.codes + tile + half);
                const Words own_codes = i == 0 ? codes : codes >> 4;
                // Each product takes in two neighbours, one of which must not count: its code is that of 0.
                words[i][2 * half] = multiplied(sizes, own_codes & 0x000F000Fu);
                words[i][2 * half + 1] = multiplied(sizes, own_codes & 0x0F000F00u);
            }
    }

  private:
    // Multiplies each byte by what its code stands for.
    static ALWAYS_INLINE Words multiplied(Words sizes, Words codes) {
        const __m128i factors = _mm_setr_epi8(0, 1, 2, 4, 8, 16, 32, 64, 0, -1, -2, -4, -8, -16, -32, -64);
#if defined(__AVX512F__)
        return multiply_bytes(sizes, (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(factors), (__m512i)codes));
#else
        return multiply_bytes(sizes, (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(factors), (__m256i)codes));
#endif
    }
};

// The same for a panel of int8, [inputs][32].
struct Int8Units {
    static constexpr int kUnits = 2;
    const int8_t* values;

    // As above.
    template <int kVectors>
    ALWAYS_INLINE void decode(int unit, int tile, Words (&words)[kUnits][kVectors]) const {
        constexpr int kOutputs = 16;  // in 16 bytes
#pragma GCC unroll 2
        for (int i = 0; i < kUnits; ++i)
#pragma GCC unroll 2
            for (int part = 0; part < kVectors * kWidth / kOutputs; ++part) {
                const int first_output = tile * kVectors * kWidth + part * kOutputs;
                const int8_t* from = values + ((int64_t)(unit + i) * 2 * kPanel + first_output);
                const __m128i first = _mm_loadu_si128((const __m128i*)from);
                const __m128i second = _mm_loadu_si128((const __m128i*)(from + kPanel));
                const __m128i lower = _mm_unpacklo_epi8(first, second), upper = _mm_unpackhi_epi8(first, second);
#if defined(__AVX512F__)
                words[i][part] = (Words)_mm512_cvtepi8_epi16(_mm256_set_m128i(upper, lower));
#else
                words[i][2 * part] = (Words)_mm256_cvtepi8_epi16(lower);
                words[i][2 * part + 1] = (Words)_mm256_cvtepi8_epi16(upper);
#endif
            }
    }
};

typedef uint16_t Pairs __attribute__((vector_size(4 * kWidth)));

ALWAYS_INLINE Words add_pairs(Words a, Words b) { return (Words)((Pairs)a + (Pairs)b); }

ALWAYS_INLINE Words broadcast_pair(const int16_t* from) {
    uint32_t both;
    memcpy(&both, from, sizeof both);
    return Words{} + both;
}

// Calls `body` with every `kStep`th unit up to `end`, prefetching on the way.
template <int kStep, class Body>
ALWAYS_INLINE void walk(Pace& pace, int& unit, int end, Body body) {
    while (unit < end) {
        Run run = pace.next((end - unit) / kStep);
        const char* line = run.at;
        for (const int run_end = unit + run.num_units * kStep; unit < run_end; unit += kStep) {
            ask(line, run, 1);
            body(unit);
        }
    }
}

// Like `add_products`, but the compiler must not start the next multiplication before this addition: that would take
// more registers than there are.
ALWAYS_INLINE Words add_at_once(Words sum, Words a, Words b) {
    sum = add_products(sum, a, b);
    asm("" : "+v"(sum));
    return sum;
}

// Adds the products of a unit's pairs with those of the rows.
template <int kRows, int kVectors>
ALWAYS_INLINE void add_unit(
    const Words (&weights)[kVectors], const int16_t* x, int64_t x_stride, Words (&sums)[kRows][kVectors]
) {
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
        const Words pair = broadcast_pair(x + row * x_stride);
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector)
            sums[row][vector] = add_at_once(sums[row][vector], weights[vector], pair);
    }
}

// Whether two products of a row with a vector of a tile's outputs are merged into one, see `add_crossed`. If the
// multiply instruction adds too, a core's two units for products would be done before its other two are done with the
// additions. So one sum in three keeps both of its products: that makes 4 products and 4 additions for the three. CPUs
// with such an instruction and none for bfloat16 are Intel's, where the same two units do both: these merge none.
constexpr bool is_crossed([[maybe_unused]] int row, [[maybe_unused]] int vector) {
#if defined(__AVX512BF16__)
    return (2 * row + vector) % 3 != 2;
#elif defined(__AVX512F__)
    return false;
#else
    return true;
#endif
}

// Adds the products of two units, merging those of two pairs into one where `is_crossed`. With a and b of a row, in one
// unit and the next, and v and w of the weight in the same units,
//
//     a v + b w = (a + w)(b + v) - a b - v w
//
// is one product instead of two (Winograd 1968, "A New Algorithm for Inner Product"): the sum of a b over a group
// depends on the row alone, and that of v w on the weight alone. Each product saved costs an addition, but a core has
// twice as many units for those. Sums may overflow 32 bits on the way, by multiples of 2^32; a group's final sum fits.
template <int kRows, int kVectors>
ALWAYS_INLINE void add_crossed(
    const Words (&weights)[2][kVectors], const int16_t* x, int64_t x_stride, Words (&sums)[kRows][kVectors]
) {
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
        const int16_t* of_row = x + row * x_stride;
        if (!__builtin_constant_p(x_stride)) asm("" : "+r"(of_row));  // or the compiler would keep two offsets for each row
        const Words a = broadcast_pair(of_row), b = broadcast_pair(of_row + InIntegers::kPerUnit);
#pragma GCC unroll 2
        for (int vector = 0; vector < kVectors; ++vector) {
            Words& sum = sums[row][vector];
            if (is_crossed(row, vector))
                sum = add_products(sum, add_pairs(a, weights[1][vector]), add_pairs(b, weights[0][vector]));
            else
                sum = add_at_once(add_at_once(sum, weights[0][vector], a), weights[1][vector], b);
        }
    }
}

// Adds the weight's own products of two units.
template <int kVectors>
ALWAYS_INLINE void add_cross(const Words (&weights)[2][kVectors], Words (&cross)[kVectors]) {
#pragma GCC unroll 2
    for (int vector = 0; vector < kVectors; ++vector)
        cross[vector] = add_products(cross[vector], weights[0][vector], weights[1][vector]);
}

// Subtracts the excess from a group's crossed sums: the row's own products and the weight's.
template <int kRows, int kVectors>
ALWAYS_INLINE void take_cross(
    const Words (&cross)[kVectors], const int16_t* behind, int64_t x_stride, Words (&sums)[kRows][kVectors]
) {
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
        for (int vector = 0; vector < kVectors; ++vector)
            if (is_crossed(row, vector)) sums[row][vector] -= cross[vector] + Grouped::common(behind + row * x_stride).cross;
}

// Some of a panel's units, decoded for a tile's outputs.
struct DecodedPart {
    static constexpr int kVectors = 2;
    // As many units as stay in the L1 cache, with some of the rows, while all rows go past them. A panel with more is
    // worked on in parts of whole groups.
    static constexpr int kWholeGroups = kMostPartUnits / kGroupUnits * kGroupUnits;
    Words pairs[kMostPartUnits / 2][2][kVectors];             // pairs of units
    Words cross[kMostPartUnits / kGroupUnits + 1][kVectors];  // one per group, see `add_crossed`

    template <class Source>
    ALWAYS_INLINE void fill(Source& source, int first, int count, int tile) {
        Words(*of_group)[kVectors] = cross;
        for (int unit = 0; unit < count; ++of_group) {
            Words sums[kVectors] = {};
            for (const int end = least(unit + kGroupUnits, count); unit < end; unit += 2) {
                source.decode(first + unit, tile, pairs[unit / 2]);
                add_cross(pairs[unit / 2], sums);
            }
            memcpy(*of_group, sums, sizeof sums);
        }
    }
};

// Adds a group's sums to the results of a tile, or starts them with these.
template <int kRows, int kVectors>
ALWAYS_INLINE void add_group(
    const Words (&sums)[kRows][kVectors], const int16_t* behind, int64_t x_stride, int tile, bool is_first,
    float (*results)[kPanel]
) {
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
        const Floats scale = broadcast(Grouped::common(behind + row * x_stride).scale);
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector) {
            float* to = results[row] + (tile * kVectors + vector) * kWidth;
            const Floats before = is_first ? Floats{} : load_floats(to);
            const Floats sum = __builtin_convertvector((Integers)sums[row][vector], Floats);
            store_floats(to, multiply_add(sum, scale, before));
        }
    }
}

// Adds the products of a part with some rows to the results of a tile, or starts them with these.
template <int kRows>
ALWAYS_INLINE void multiply_part(
    const int16_t* x, const DecodedPart& part, int num_units, int tile, bool is_first, Pace& pace, float (*results)[kPanel]
) {
    constexpr int kVectors = DecodedPart::kVectors;
    constexpr int64_t kStride = RowBlock<kPartRows>::kCellValues, kStep = RowBlock<kPartRows>::kStep;
    const Words(*pair)[2][kVectors] = part.pairs;
    const Words(*cross)[kVectors] = part.cross;
    for (int unit = 0; unit < num_units; is_first = false, ++cross) {
        Words sums[kRows][kVectors] = {};
        walk<kStepUnits>(pace, unit, least(unit + kGroupUnits, num_units), [&](int) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int i = 0; i < kStepUnits / 2; ++i, ++pair, x += kStep) add_crossed(*pair, x, kStride, sums);
        });
        take_cross(*cross, x, kStride, sums);
        add_group(sums, x, kStride, tile, is_first, results);
        x += kStep;
    }
}

// Computes the products of all units of a panel with few rows; each tile decodes its own outputs. Memory may be the
// bottleneck here, and prefetching more than a few lines at once would hold up what is needed now.
template <int kRows, int kVectors, class Source>
ALWAYS_INLINE void multiply_decoding(
    const int16_t* x, int64_t x_stride, Source& source, int num_units, int tile, Pace& pace, float (*results)[kPanel]
) {
    for (int unit = 0; unit < num_units; x += Grouped::kCommonValues) {
        const bool is_first = unit == 0;
        Words sums[kRows][kVectors] = {}, cross[kVectors] = {};
        walk<2>(pace, unit, least(unit + kGroupUnits, num_units), [&](int first) __attribute__((always_inline)) {
            Words weights[2][kVectors];
            source.decode(first, tile, weights);
            if constexpr (kRows > kMostPlainRows) {
                add_cross(weights, cross);
                add_crossed(weights, x, x_stride, sums);
            } else {
                add_unit(weights[0], x, x_stride, sums);
                add_unit(weights[1], x + InIntegers::kPerUnit, x_stride, sums);
            }
            x += 2 * InIntegers::kPerUnit;
        });
        if constexpr (kRows > kMostPlainRows) take_cross(cross, x, x_stride, sums);
        add_group(sums, x, x_stride, tile, is_first, results);
    }
}

// The products of some rows with a panel, by integers.
struct IntegerPanels {
    using Product = InIntegers;
    static constexpr int kRows = kConvertedRows, kTileRows = kPartRows;
    static constexpr bool kDecodes = true;
    static constexpr int kMostDecodingRows = kRows;  // `multiply` decodes, however many rows there are
    using Int8Source = Int8Units;

    static bool fits(int num_inputs) { return num_inputs > 0 && num_inputs % kLeastGroup == 0; }

    template <class Source>
    void multiply(
        int num_rows, const int16_t* x, int64_t x_stride, Decoded<Product, Source> panel, int num_units, Ahead& ahead,
        float (*results)[kPanel]
    ) {
        if (num_rows <= kDecodingRows)
            with_rows(num_rows, [&](auto rows) __attribute__((always_inline)) {
                constexpr int kCount = decltype(rows)::value, kVectors = kCount <= kWholeRows ? kPanelVectors : 2;
                Pace pace(ahead, kPanelVectors / kVectors * (num_units / 2));
                for (int tile = 0; tile < kPanelVectors / kVectors; ++tile)
                    multiply_decoding<kCount, kVectors>(x, x_stride, panel.source, num_units, tile, pace, results);
            });
        else
            multiply_parts(num_rows, x, panel.source, num_units, ahead, results);
    }
    void end() {}

  private:
    DecodedPart part_;

    // Works on one part after the other, each with all rows.
    template <class Source>
    ALWAYS_INLINE void multiply_parts(
        int num_rows, const int16_t* x, Source& source, int num_units, Ahead& ahead, float (*results)[kPanel]
    ) {
        constexpr int kTiles = kPanelVectors / DecodedPart::kVectors;
        const PartBlocks blocks{num_rows};
        const int64_t block_values = kPartRows * num_values<Grouped>(num_units * InIntegers::kPerUnit);
        const int part_units = num_units <= kMostPartUnits ? num_units : part_.kWholeGroups;
        Pace pace(ahead, blocks.count * kTiles * (num_units / kStepUnits));
        for (int first = 0; first < num_units; first += part_units) {
            const int count = least(part_units, num_units - first);
            for (int tile = 0; tile < kTiles; ++tile) {
                part_.fill(source, first, count, tile);
                for (int block = 0; block < blocks.count; ++block) {
                    const int row = blocks.first(block);
                    with_rows(blocks.first(block + 1) - row, [&](auto rows) __attribute__((always_inline)) {
                        constexpr int kCount = decltype(rows)::value;
                        if constexpr (kCount >= PartBlocks::kFewestRows && kCount <= kPartRows)
                            multiply_part<kCount>(
                                x + block * block_values, part_, count, tile, first == 0, pace, results + row
                            );
                    });
                }
            }
            x += kPartRows * num_values<Grouped>(count * InIntegers::kPerUnit);
        }
    }
};
#endif

}  // namespace
