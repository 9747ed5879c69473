// How values of the cache are multiplied with the left side of attention's two products: queries, or probabilities.
//
// A unit is what one step of a dot product takes in from each column: 2 neighbouring bfloat16, or 1 value of another
// kind. The cache's layout is made of units (multiply.hpp). Each of these structs says what its unit is, how a vector
// of units is loaded, how many parts it has, which are multiplied one after the other, and how each is multiplied with
// the left side's values for that unit, which are of the kind `Left`.
#pragma once

#include "elements.hpp"

namespace {

// A tile of a product has rows x columns accumulators, in vectors. AVX-512 has 32 registers, the others count on 16,
// and a vector of pairs that is taken apart needs two.
#if defined(__AVX512F__)
constexpr int kMostRows = 6;
constexpr int kMostColumns = 4;
#else
constexpr int kMostRows = 4;
constexpr int kMostColumns = 2;
#endif

// What products by vectors have in common; see InTiles in multiply_tiles.hpp for the other kind.
template <int kValues>
struct ByVectors {
    static constexpr int kPerUnit = kValues;
    static constexpr int kChunk = kWidth;  // tokens of K that are multiplied together
    static constexpr int kRowStep = 1;     // rows of the left side that are read at once, filled or not

    // P's rows are padded with zeros to a multiple of this.
    static int value_tokens(int) { return kPerUnit; }
    void begin(int) {}
    void end() {}
};

template <class Cache>
struct InFloat32;

template <>
struct InFloat32<Float32> : ByVectors<1> {
    using Left = Float32;
    using Unit = uint32_t;
    using Loaded = Floats;
    using Part = Floats;
    static constexpr int kRows = kMostRows, kParts = 1;

    static ALWAYS_INLINE Loaded load(const Unit* from) { return (Floats)load_words(from); }
    static ALWAYS_INLINE Loaded load(const Unit* from, int lanes) { return (Floats)load_words(from, lanes); }
    static ALWAYS_INLINE Floats part(Loaded b, int) { return b; }
    static ALWAYS_INLINE Floats multiply_add(Floats sum, Floats part, const float* a) { return sum + part * a[0]; }
};

template <>
struct InFloat32<Float16> : ByVectors<1> {
    using Left = Float32;
    using Unit = uint16_t;
    using Loaded = Floats;
    using Part = Floats;
    static constexpr int kRows = kMostRows, kParts = 1;

    static ALWAYS_INLINE Loaded load(const Unit* from) { return Float16::widen(load_halves(from)); }
    static ALWAYS_INLINE Loaded load(const Unit* from, int lanes) { return Float16::widen(load_halves(from, lanes)); }
    static ALWAYS_INLINE Floats part(Loaded b, int) { return b; }
    static ALWAYS_INLINE Floats multiply_add(Floats sum, Floats part, const float* a) { return sum + part * a[0]; }
};

template <>
struct InFloat32<Bfloat16> : ByVectors<2> {
    using Left = Float32;
    using Unit = uint32_t;
    using Loaded = Words;
    using Part = Floats;
    static constexpr int kRows = 4, kParts = 2;

    static ALWAYS_INLINE Loaded load(const Unit* from) { return load_words(from); }
    static ALWAYS_INLINE Loaded load(const Unit* from, int lanes) { return load_words(from, lanes); }
    static ALWAYS_INLINE Loaded first_only(Loaded pairs) { return pairs & 0xFFFFu; }
    static ALWAYS_INLINE Floats part(Loaded b, int number) {
        if (number == 0) return (Floats)(b << 16);
#if defined(__AVX2__) && !defined(__AVX512F__)
        // The mask comes from memory: a compiler would keep it in a register that one sum of a tile would then lack.
        static const Words kMask = Words{} + 0xFFFF0000u;
        Words upper;
        asm("vpand %2, %1, %0" : "=x"(upper) : "x"(b), "m"(kMask));
        return (Floats)upper;
#else
        return (Floats)(b & 0xFFFF0000u);
#endif
    }
    static ALWAYS_INLINE Floats multiply_add(Floats sum, Floats part, const float* a) { return sum + part * a[0]; }
};

#if defined(__AVX512BF16__)
// Both sides in bfloat16, by the instruction for it.
struct InBfloat16 : ByVectors<2> {
    using Left = Bfloat16;
    using Unit = uint32_t;
    using Loaded = Words;
    using Part = Words;
    static constexpr int kRows = kMostRows, kParts = 1;

    static ALWAYS_INLINE Loaded load(const Unit* from) { return load_words(from); }
    static ALWAYS_INLINE Loaded load(const Unit* from, int lanes) { return load_words(from, lanes); }
    static ALWAYS_INLINE Loaded first_only(Loaded pairs) { return pairs & 0xFFFFu; }
    static ALWAYS_INLINE Words part(Loaded b, int) { return b; }
    static ALWAYS_INLINE Floats multiply_add(Floats sum, Words part, const uint16_t* a) {
        int32_t pair;
        memcpy(&pair, a, sizeof pair);
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)part, (__m512bh)_mm512_set1_epi32(pair));
    }
};
#endif

// Adds to the sums the outer product of some vectors with a value of each row of the left side.
template <class Product, int kRows, int kColumns>
ALWAYS_INLINE void add_part(
    const typename Product::Part (&values)[kColumns], const typename Product::Left::Value* left, int64_t stride,
    Floats (&sums)[kRows][kColumns]
) {
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column)
            sums[row][column] = Product::multiply_add(sums[row][column], values[column], left + row * stride);
}

// The same for vectors of units and the rows' values for these units.
template <class Product, int kRows, int kColumns>
ALWAYS_INLINE void add_products(
    const typename Product::Loaded (&units)[kColumns], const typename Product::Left::Value* left, int64_t stride,
    Floats (&sums)[kRows][kColumns]
) {
#pragma GCC unroll 2
    for (int part = 0; part < Product::kParts; ++part) {
        typename Product::Part values[kColumns];
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column) values[column] = Product::part(units[column], part);
        add_part<Product>(values, left + part, stride, sums);
    }
}

}  // namespace
