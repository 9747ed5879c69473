// Rows of bfloat16 as the integers of 16 bits that integers.hpp multiplies.
//
// A bfloat16 has 8 significant bits, and an integer of 14 has room for what its neighbours are larger, so one scale serves
// many, as in block floating point (Wilkinson 1963, "Rounding Errors in Algebraic Processes"): each group of 320 inputs of
// a row has one, by which its largest value is 8191, and all are rounded to it.
//
// Rows that a tile decodes a weight for stand one behind the other. More of them stand in blocks of as many as a tile's.
#pragma once

#include "panels.hpp"

namespace {

// Inputs of a group, and what they are multiples of in a row's last one.
constexpr int kGroup = 320, kLeastGroup = 64;

#if defined(__AVX2__) && !defined(TILES)
#define INTEGERS

// Each lane of a vector has two integers of 16 bits. To its sum both of its products are added.
ALWAYS_INLINE Words add_products(Words sum, Words a, Words b) {
#if defined(__AVX512F__)
    return (Words)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    return sum + (Words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

constexpr int kMostLeft = 8191;  // of a row's integers

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

// The most rows with which a tile decodes a weight for itself, and the most of a block.
constexpr int kDecodingRows = kVectorRows, kPartRows = kWidth / 2;
static_assert(kPartRows <= kDecodingRows, "fewer rows than a tile's are not put together");

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
#endif

}  // namespace
