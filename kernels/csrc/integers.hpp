// Products of bfloat16 by integers of 16 bits: two multiplications in each lane at once, and since two integers are added
// without error, as few as half of them are needed (`add_crossed`). Where there is AVX2 alone that makes twice as many
// products a second as in float32, and where there is AVX-512 two fifths more than its dot products of bfloat16. Tile
// registers have more of these still.
//
// A bfloat16 has 8 significant bits, and an integer of 14 has room for what its neighbours are larger, so one scale serves
// many, as in block floating point (Wilkinson 1963, "Rounding Errors in Algebraic Processes"). Of a row each group of 320
// inputs has one, by which its largest value is 8191, and all are rounded to it. Of a weight each output has one, a power
// of two as small as the sums allow: those of a group are exact in 32 bits, whatever the row. There only values are rounded
// that are less than a 128th of the largest one that the scale has room for. Both is much less than bfloat16 has rounded
// before (docs/measurements.md); where it would be as much in one output, a weight is multiplied as it is.
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

    // Of a vector of bytes the even ones become one vector of words, and the odd ones the next.
    static constexpr int place(int output) {
        return output / (2 * kWidth) * (4 * kWidth) + output % kWidth * 4 + output / kWidth % 2;
    }
};

static_assert(sizeof(IntegerPair) == 192, "kernels/cpu_linear.py counts on it");

inline int64_t integer_panel_bytes(int num_inputs) { return num_inputs / 4 * (int64_t)sizeof(IntegerPair); }

#if defined(__AVX2__) && !defined(TILES)
#define INTEGERS

// Each lane of a vector has two integers of 16 bits.
typedef uint16_t Pairs __attribute__((vector_size(4 * kWidth)));

ALWAYS_INLINE Words add_pairs(Words a, Words b) { return (Words)((Pairs)a + (Pairs)b); }

// To each lane's sum both of its products are added.
ALWAYS_INLINE Words add_products(Words sum, Words a, Words b) {
#if defined(__AVX512F__)
    return (Words)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    return sum + (Words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

ALWAYS_INLINE Words broadcast_pair(const int16_t* from) {
    uint32_t both;
    memcpy(&both, from, sizeof both);
    return Words{} + both;
}

constexpr int kMostLeft = 8191;       // of a row's integers
constexpr int kMostRight = 255 << 6;  // of a weight's

// Rows of these: each group is its integers, and then what they have in common.
struct Grouped {
    using Value = int16_t;

    struct Common {
        float scale;
        uint32_t cross;  // see `add_crossed`
    };
    static constexpr int kCommonValues = sizeof(Common) / sizeof(Value);

    static ALWAYS_INLINE Common common(const Value* behind) {
        Common found;
        memcpy(&found, behind, sizeof found);
        return found;
    }

    // What a group of bfloat16 is multiplied by, and the scale of what comes of it. What is less than 2^-100 counts as zero;
    // where one value is not finite, none of the group's is.
    struct Scaling {
        float inverse, scale;

        static ALWAYS_INLINE Scaling of(const uint16_t* from, int count) {
            Words most = {};
            for (int i = 0; i < count; i += 2 * kWidth)
                most = larger_halves(most, load_words((const Words*)(from + i)) & 0x7FFF7FFFu);
            const __m256i halves = folded(most, [](__m256i a, __m256i b) { return _mm256_max_epu16(a, b); });
            const __m128i half = _mm_max_epu16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
            const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
            const uint16_t largest = (uint16_t)~_mm_extract_epi16(least, 0);
            constexpr uint16_t kInfinite = 0x7F80, kTiny = (127 - 100) << 7;
            const float value = Bfloat16::widen(largest);
            return {
                largest < kTiny ? 0.0f : kMostLeft / value,
                largest >= kInfinite ? __builtin_nanf("") : largest < kTiny ? 0.0f : value / kMostLeft
            };
        }
    };

    // Two values in each lane, times `inverse`.
    static ALWAYS_INLINE Words rounded(Words values, float inverse) {
        const Words first = (Words)nearest_integers((Floats)(values << 16) * inverse);
        const Words second = (Words)nearest_integers((Floats)(values & 0xFFFF0000u) * inverse);
        return (first & 0xFFFFu) | second << 16;
    }

    // Adds each two units' cross products, in both units' lanes; and their sum then.
    static ALWAYS_INLINE void add_cross(Words pairs, Words& twice) { twice = add_products(twice, pairs, swapped(pairs)); }
    static ALWAYS_INLINE uint32_t sum_cross(Words twice) {
        const __m256i sums = folded(twice, [](__m256i a, __m256i b) { return _mm256_add_epi32(a, b); });
        uint32_t lanes[8];
        memcpy(lanes, &sums, sizeof lanes);
        return lanes[0] + lanes[2] + lanes[4] + lanes[6];
    }

  private:
    static ALWAYS_INLINE Words larger_halves(Words a, Words b) {
#if defined(__AVX512F__)
        return (Words)_mm512_max_epu16((__m512i)a, (__m512i)b);
#else
        return (Words)_mm256_max_epu16((__m256i)a, (__m256i)b);
#endif
    }
    // Each two neighbouring lanes change places.
    static ALWAYS_INLINE Words swapped(Words x) {
#if defined(__AVX512F__)
        return (Words)_mm512_shuffle_epi32((__m512i)x, (_MM_PERM_ENUM)0xB1);
#else
        return (Words)_mm256_shuffle_epi32((__m256i)x, 0xB1);
#endif
    }
    // Both halves of a vector of 512 bits as one of 256.
    template <class Combine>
    static ALWAYS_INLINE __m256i folded(Words x, [[maybe_unused]] Combine combine) {
#if defined(__AVX512F__)
        return combine(_mm512_castsi512_si256((__m512i)x), _mm512_extracti64x4_epi64((__m512i)x, 1));
#else
        return (__m256i)x;
#endif
    }
};

// A row of so many inputs, which are groups: `num_values` integers.
template <>
ALWAYS_INLINE int64_t num_values<Grouped>(int num_inputs) {
    return num_inputs + (int64_t)(num_inputs + kGroup - 1) / kGroup * Grouped::kCommonValues;
}

// Rows that stand in memory side by side, cell by cell: a cell is a row's values of two units, or what a group has in
// common. Of as many rows as a vector has cells lines are whole, and a tile takes them in one after the other.
template <int kRows>
struct RowBlock {
    static constexpr int kCellValues = 4, kStep = kRows * kCellValues;  // the latter from a row's cell to its next one
    static_assert(Grouped::kCommonValues == kCellValues, "what a group has in common is a cell");

    // From up to `kRows` rows; where they are fewer, the last one stands for those that lack.
    static ALWAYS_INLINE void store(int16_t* to, const uint16_t* from, int64_t stride, int num_rows, int num_inputs) {
        const uint16_t* rows[kRows];
        for (int row = 0; row < kRows; ++row) rows[row] = from + least(row, num_rows - 1) * stride;
        for (int input = 0; input < num_inputs; input += kGroup) {
            const int count = least(kGroup, num_inputs - input);
            Grouped::Scaling scalings[kRows];
            for (int row = 0; row < kRows; ++row) scalings[row] = Grouped::Scaling::of(rows[row] + input, count);
            Words twice[kRows] = {};
            for (int i = 0; i < count; i += 2 * kWidth, to += kRows * 2 * kWidth) {
                Words cells[kRows];
#pragma GCC unroll 8
                for (int row = 0; row < kRows; ++row) {
                    const Words values = load_words((const Words*)(rows[row] + input + i));
                    cells[row] = Grouped::rounded(values, scalings[row].inverse);
                    Grouped::add_cross(cells[row], twice[row]);
                }
                if constexpr (kRows > 1) turn<kRows / 2>(cells);
                memcpy(to, cells, sizeof cells);
            }
            for (int row = 0; row < kRows; ++row, to += kCellValues) {
                const Grouped::Common common = {scalings[row].scale, Grouped::sum_cross(twice[row])};
                memcpy(to, &common, sizeof common);
            }
        }
    }

  private:
    typedef uint64_t Cells __attribute__((vector_size(4 * kWidth)));

    // Rows and columns of a square change places: two of its quarters, and so within each quarter.
    template <int kHalf>
    static ALWAYS_INLINE void turn(Words (&cells)[kRows]) {
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row)
            if (!(row & kHalf)) {
                const Cells first = (Cells)cells[row], second = (Cells)cells[row + kHalf];
                cells[row] = (Words)of_both<kHalf, 0>(first, second);
                cells[row + kHalf] = (Words)of_both<kHalf, kHalf>(first, second);
            }
        if constexpr (kHalf > 1) turn<kHalf / 2>(cells);
    }
    template <int kHalf, int kFrom>
    static ALWAYS_INLINE Cells of_both(Cells first, Cells second) {
        constexpr auto from = [](int cell) { return (cell & kHalf) * kRows / kHalf + (cell & ~kHalf) + kFrom; };
#if defined(__AVX512F__)
        return __builtin_shufflevector(first, second, from(0), from(1), from(2), from(3), from(4), from(5), from(6), from(7));
#else
        return __builtin_shufflevector(first, second, from(0), from(1), from(2), from(3));
#endif
    }
};

struct InIntegers {
    using Left = Grouped;
    using Loaded = Words;
    static constexpr int kPerUnit = 2;
};

constexpr int kGroupUnits = kGroup / InIntegers::kPerUnit;
// The most rows with which a tile decodes units for itself, and with which memory decides, so that no two products are
// made one. For more rows units are decoded into memory: the most that are there at once, those between which memory is
// asked for then, and the most rows of a tile.
#if defined(__AVX512F__)
constexpr int kDecodingRows = 12, kMostPlainRows = 4, kMostPartUnits = kGroupUnits, kStepUnits = 4;
#else
constexpr int kDecodingRows = 6, kMostPlainRows = 6, kMostPartUnits = 288, kStepUnits = 16;
#endif
constexpr int kPartRows = kWidth / 2;
static_assert(kPartRows <= kDecodingRows, "fewer rows than a tile's are not put together");
static_assert(kGroup % kLeastGroup == 0 && kLeastGroup % (kStepUnits * InIntegers::kPerUnit) == 0, "steps fill groups");

// The blocks of rows that are two blocks at least, each as many as a tile's. The last two share theirs evenly: a tile of
// few rows waits for the weight to be loaded, and for its own sums.
struct PartBlocks {
    static constexpr int kFewestRows = kPartRows / 2;
    int num_rows, count = (num_rows + kPartRows - 1) / kPartRows;

    // The first row of a block, and what is behind the one before.
    ALWAYS_INLINE int first(int block) const {
        if (block < count - 1) return block * kPartRows;
        return block == count ? num_rows : (num_rows + (count - 2) * kPartRows + 1) / 2;
    }
};

template <>
ALWAYS_INLINE void convert_rows<Bfloat16, Grouped>(
    const uint16_t* from, int64_t stride, int16_t* to, int num_rows, int num_inputs
) {
    const int64_t values = num_values<Grouped>(num_inputs);
    if (num_rows > kDecodingRows) {
        const PartBlocks blocks{num_rows};
        for (int block = 0; block < blocks.count; ++block, to += kPartRows * values) {
            const int first = blocks.first(block), count = blocks.first(block + 1) - first;
            RowBlock<kPartRows>::store(to, from + first * stride, stride, count, num_inputs);
        }
    } else {
        for (int row = 0; row < num_rows; ++row, from += stride, to += values)
            RowBlock<1>::store(to, from, stride, 1, num_inputs);
    }
}

// A panel of pairs.
struct IntegerUnits {
    static constexpr int kUnits = 2;
    const IntegerPair* pairs;

    // The two units that `unit` begins.
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
                // Each product is of two neighbours, of which one is not to count: its code is that of 0.
                words[i][2 * half] = multiplied(sizes, own_codes & 0x000F000Fu);
                words[i][2 * half + 1] = multiplied(sizes, own_codes & 0x0F000F00u);
            }
    }

  private:
    // Each two bytes by what their codes stand for, added.
    static ALWAYS_INLINE Words multiplied(Words sizes, Words codes) {
        const __m128i factors = _mm_setr_epi8(0, 1, 2, 4, 8, 16, 32, 64, 0, -1, -2, -4, -8, -16, -32, -64);
#if defined(__AVX512F__)
        const __m512i by = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(factors), (__m512i)codes);
        return (Words)_mm512_maddubs_epi16((__m512i)sizes, by);
#else
        const __m256i by = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(factors), (__m256i)codes);
        return (Words)_mm256_maddubs_epi16((__m256i)sizes, by);
#endif
    }
};

// Such a panel of int8, [inputs][32].
struct Int8Units {
    static constexpr int kUnits = 2;
    const int8_t* values;

    // As above.
    template <int kVectors>
    ALWAYS_INLINE void decode(int unit, int tile, Words (&words)[kUnits][kVectors]) const {
        constexpr int kOutputs = 16;  // that 16 bytes are of
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

// Calls `body` with each `kStep`th unit up to `end`, while memory is asked for.
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

// As `add_products`, and the compiler is not to multiply what comes next before it has added: that would take more
// registers than there are.
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

// Whether two products of a row with a vector of a tile's outputs are made one, see `add_crossed`. Where the instruction
// that multiplies adds too, a core's two units for products would be done with them before the other two are with the
// additions. So one of three has all of its products: then it is 4 products and 4 additions for the three. CPUs with such
// an instruction and none for bfloat16 are Intel's, where the same two units do both: there all have all.
constexpr bool is_crossed([[maybe_unused]] int row, [[maybe_unused]] int vector) {
#if defined(__AVX512BF16__)
    return (2 * row + vector) % 3 != 2;
#elif defined(__AVX512F__)
    return false;
#else
    return true;
#endif
}

// Adds the products of two units, each two pairs' as one product where `is_crossed`. With a and b of a row, in one unit and
// the next, and v and w of the weight there,
//
//     a v + b w = (a + w)(b + v) - a b - v w
//
// is one product instead of two (Winograd 1968, "A New Algorithm for Inner Product"), where sums of a b over a group are
// the row's, and those of v w the weight's. Additions are more by as many, but a core has twice as many units for them.
// What is too large for 32 bits on the way is so by multiples of 2^32, and the group's sum is not.
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

// The weight's own products of two units.
template <int kVectors>
ALWAYS_INLINE void add_cross(const Words (&weights)[2][kVectors], Words (&cross)[kVectors]) {
#pragma GCC unroll 2
    for (int vector = 0; vector < kVectors; ++vector)
        cross[vector] = add_products(cross[vector], weights[0][vector], weights[1][vector]);
}

// Takes from a group's sums what crossed ones are too large by, the row's own products and the weight's.
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

// Some of a panel's units, decoded: those of a tile's outputs.
struct DecodedPart {
    static constexpr int kVectors = 2;
    // As many as stay in the first cache while all rows go past them, and some of these rows too. A panel of more is
    // worked on in parts of whole groups.
    static constexpr int kWholeGroups = kMostPartUnits / kGroupUnits * kGroupUnits;
    Words pairs[kMostPartUnits / 2][2][kVectors];             // of units
    Words cross[kMostPartUnits / kGroupUnits + 1][kVectors];  // of each group, see `add_crossed`

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

// Adds a group's sums to the results of a tile, or begins them.
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

// Adds the products of a part with some rows to the results of a tile, or begins them.
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

// Adds the products of all units of a panel with few rows, decoded by each tile for its outputs. There memory may decide,
// and to ask for more than a few lines at once would hold up what is needed now.
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
    static constexpr int kMostDecodingRows = kRows;  // `multiply` decodes, whatever the rows
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

    // One part after the other, each for all rows.
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
