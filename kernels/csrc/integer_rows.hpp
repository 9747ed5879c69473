// Rows of bfloat16 as the 16-bit integers that integers.hpp multiplies.
//
// A bfloat16 has 8 significant bits, and an integer of 14 bits leaves room for neighbours that are larger, so one scale
// serves many values, as in block floating point (Wilkinson 1963, "Rounding Errors in Algebraic Processes"): each group
// of 320 inputs of a row has one, which makes its largest value 8191, and all its values are rounded to integers.
//
// Rows for which each tile decodes the weight are stored one after the other. More rows are stored in blocks of as many
// rows as a tile has.
#pragma once

#include "panels.hpp"

namespace {

// Inputs of a group; a row's last group may have fewer, a multiple of kLeastGroup.
constexpr int kGroup = 320, kLeastGroup = 64;

#if defined(__AVX2__) && !defined(TILES)
#define INTEGERS

// Each lane of a vector has two 16-bit integers. Both of its products are added to its sum.
ALWAYS_INLINE Words add_products(Words sum, Words a, Words b) {
#if defined(__AVX512F__)
    return (Words)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    return sum + (Words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

constexpr int kMostLeft = 8191;  // the largest of a row's integers

// Rows of integers: each group is its integers, followed by what they have in common.
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

    // The factor that turns a group of bfloat16 into integers, and the scale of those. A group whose largest value is
    // less than 2^-100 counts as zero; if a value is not finite, the scale is NaN, so no result of the group is finite.
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

    // The two values in each lane, times `inverse`, rounded to integers.
    static ALWAYS_INLINE Words rounded(Words values, float inverse) {
        const Words first = (Words)nearest_integers((Floats)(values << 16) * inverse);
        const Words second = (Words)nearest_integers((Floats)(values & 0xFFFF0000u) * inverse);
        return (first & 0xFFFFu) | second << 16;
    }

    // Adds the cross products of each two neighbouring units, in both units' lanes; `sum_cross` counts them once.
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
    // Swaps each two neighbouring lanes.
    static ALWAYS_INLINE Words swapped(Words x) {
#if defined(__AVX512F__)
        return (Words)_mm512_shuffle_epi32((__m512i)x, (_MM_PERM_ENUM)0xB1);
#else
        return (Words)_mm256_shuffle_epi32((__m256i)x, 0xB1);
#endif
    }
    // Combines the two halves of a 512-bit vector into one of 256 bits.
    template <class Combine>
    static ALWAYS_INLINE __m256i folded(Words x, [[maybe_unused]] Combine combine) {
#if defined(__AVX512F__)
        return combine(_mm512_castsi512_si256((__m512i)x), _mm512_extracti64x4_epi64((__m512i)x, 1));
#else
        return (__m256i)x;
#endif
    }
};

// The int16 values of a row of `num_inputs` inputs, in groups.
template <>
ALWAYS_INLINE int64_t num_values<Grouped>(int num_inputs) {
    return num_inputs + (int64_t)(num_inputs + kGroup - 1) / kGroup * Grouped::kCommonValues;
}

// Rows interleaved in memory, cell by cell: a cell is a row's values of two units, or what a group has in common. With
// as many rows as a vector has cells, cache lines are used whole, and a tile reads them one after the other.
template <int kRows>
struct RowBlock {
    static constexpr int kCellValues = 4, kStep = kRows * kCellValues;  // the latter from a row's cell to its next one
    static_assert(Grouped::kCommonValues == kCellValues, "what a group has in common is a cell");

    // Converts up to `kRows` rows; if there are fewer, the last one is repeated.
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

    // Transposes a square of cells: swaps two of its quarters, then does the same within each quarter.
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

// The most rows for which each tile decodes the weight itself, and the most rows of a block.
constexpr int kDecodingRows = kVectorRows, kPartRows = kWidth / 2;
static_assert(kPartRows <= kDecodingRows, "fewer rows than a tile's are not put together");

// The blocks of rows, at least two, each with as many rows as a tile has. The last two share their rows evenly: a tile
// of few rows would wait for the loads of the weight, and for its own sums.
struct PartBlocks {
    static constexpr int kFewestRows = kPartRows / 2;
    int num_rows, count = (num_rows + kPartRows - 1) / kPartRows;

    // The first row of a block, which is also the end of the block before.
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
#endif

}  // namespace
