// The two small matrix products of attention, on one tile of registers: scores = Q K^T of some K blocks, and P V summed
// over some V blocks. Both broadcast a unit of the left side and multiply it with vectors of the right side, as in any
// GEMM of registers (Goto & van de Geijn 2008); the blocks' layouts are made for that:
//
//     K, of one head in one block: [head_dim units][block_size]       columns are tokens, the sum runs over components
//     V, of one head in one block: [block_size units][head_dim]       columns are components, the sum runs over tokens
//
// in units of two neighbouring bfloat16, or of one float32. An element's sum is made in one order, whatever the tile:
// how rows and columns are shared out among tiles changes no bit of the result.
//
// Memory is asked for ahead: each step of a sum prefetches a line of the block that will be needed some blocks later.
#pragma once

#include "vector.hpp"

namespace {

// The number of rows of a tile, as a type.
template <int kRows>
struct Rows {
    static constexpr int value = kRows;
};

// Some of the columns of a K block.
struct Chunk {
    const uint32_t* units;  // of its first column
    const uint32_t* ahead;  // as much memory, needed soon
    int column;             // where its scores go
    int lanes;              // its columns, at most kWidth
};

template <class Element, int kRows, int kColumns>
ALWAYS_INLINE void score_tile(
    const uint32_t* q, int q_units, const Chunk* chunks, int block_size, int lanes, float* scores, int stride
) {
    Floats sums[kRows][kColumns] = {};
    for (int unit = 0; unit < q_units; ++unit) {
        typename Element::Loaded k[kColumns];
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column) {
            const uint32_t* from = chunks[column].units + (size_t)unit * block_size;
            k[column] = Element::unpack(lanes == kWidth ? load_words(from) : load_words(from, lanes));
            __builtin_prefetch(chunks[column].ahead + (size_t)unit * kWidth);
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
            for (int column = 0; column < kColumns; ++column)
                sums[row][column] = Element::multiply_add(sums[row][column], k[column], q[row * q_units + unit]);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column)
            store_floats(scores + (size_t)row * stride + chunks[column].column, sums[row][column], lanes);
}

template <class Element, int kRows>
ALWAYS_INLINE void score_rows(
    const uint32_t* q, int q_units, const Chunk* chunks, int num_chunks, int block_size, float* scores, int stride
) {
    int chunk = 0;
    const auto next_are_whole = [&](int count) {
        if (chunk + count > num_chunks) return false;
        for (int i = 0; i < count; ++i)
            if (chunks[chunk + i].lanes != kWidth) return false;
        return true;
    };
    while (chunk < num_chunks) {
        const Chunk* here = chunks + chunk;
        if (kMaxColumns >= 4 && next_are_whole(4)) {
            score_tile<Element, kRows, kMaxColumns >= 4 ? 4 : 1>(q, q_units, here, block_size, kWidth, scores, stride);
            chunk += 4;
        } else if (next_are_whole(2)) {
            score_tile<Element, kRows, 2>(q, q_units, here, block_size, kWidth, scores, stride);
            chunk += 2;
        } else if (here->lanes == kWidth) {
            score_tile<Element, kRows, 1>(q, q_units, here, block_size, kWidth, scores, stride);
            chunk += 1;
        } else {
            score_tile<Element, kRows, 1>(q, q_units, here, block_size, here->lanes, scores, stride);
            chunk += 1;
        }
    }
}

// The V blocks of one head that a product runs over.
struct ValueBlocks {
    const uint32_t* const* units;  // of each block
    const uint32_t* const* ahead;  // as much memory as each block, needed soon
    int num_blocks;
    int units_per_block;
    int num_units;  // of tokens, in all blocks together; what is behind them is not read
    bool half;      // whether the last of them holds only one token
    int head_dim;
};

template <class Element, int kRows, int kColumns>
ALWAYS_INLINE void value_tile(
    const uint32_t* p, int p_stride, const ValueBlocks& v, int component, int lanes, float* out, int stride
) {
    Floats sums[kRows][kColumns] = {};
    const auto add = [&](const uint32_t* from, int unit, bool half) __attribute__((always_inline)) {
        typename Element::Loaded values[kColumns];
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column) {
            const uint32_t* at = from + column * kWidth;
            const Words words = lanes == kWidth ? load_words(at) : load_words(at, lanes);
            values[column] = half ? Element::unpack_first(words) : Element::unpack(words);
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
            for (int column = 0; column < kColumns; ++column)
                sums[row][column] = Element::multiply_add(sums[row][column], values[column], p[row * p_stride + unit]);
    };
    const int num_whole = v.num_units - (v.half ? 1 : 0);
    int unit = 0;
    for (int block = 0; block < v.num_blocks; ++block) {
        const uint32_t* from = v.units[block] + component;
        const uint32_t* ahead = v.ahead[block] + component;
        const int end = least(unit + v.units_per_block, num_whole);
        for (; unit < end; ++unit, from += v.head_dim, ahead += v.head_dim) {
#pragma GCC unroll 8
            for (int column = 0; column < kColumns; ++column) __builtin_prefetch(ahead + column * kWidth);
            add(from, unit, false);
        }
        if (v.half && unit == num_whole && block == v.num_blocks - 1) add(from, unit, true);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column)
            store_floats(out + (size_t)row * stride + component + column * kWidth, sums[row][column], lanes);
}

template <class Element, int kRows>
ALWAYS_INLINE void value_rows(const uint32_t* p, int p_stride, const ValueBlocks& v, float* out, int stride) {
    int component = 0;
    while (component < v.head_dim) {
        const int left = v.head_dim - component;
        if (kMaxColumns >= 4 && left >= 4 * kWidth) {
            value_tile<Element, kRows, kMaxColumns >= 4 ? 4 : 1>(p, p_stride, v, component, kWidth, out, stride);
            component += 4 * kWidth;
        } else if (left >= 2 * kWidth) {
            value_tile<Element, kRows, 2>(p, p_stride, v, component, kWidth, out, stride);
            component += 2 * kWidth;
        } else if (left >= kWidth) {
            value_tile<Element, kRows, 1>(p, p_stride, v, component, kWidth, out, stride);
            component += kWidth;
        } else {
            value_tile<Element, kRows, 1>(p, p_stride, v, component, left, out, stride);
            component += left;
        }
    }
}

// Q K^T: q is [num_rows][q_units], scores are [num_rows][stride].
template <class Element>
void multiply_scores(
    const uint32_t* q, int num_rows, int q_units, const Chunk* chunks, int num_chunks, int block_size, float* scores,
    int stride
) {
    int row = 0;
    const auto tile = [&](auto rows) __attribute__((always_inline)) {
        constexpr int kRows = decltype(rows)::value;
        if constexpr (kRows <= kMaxRows) {
            for (; row + kRows <= num_rows; row += kRows)
                score_rows<Element, kRows>(
                    q + (size_t)row * q_units, q_units, chunks, num_chunks, block_size, scores + (size_t)row * stride,
                    stride
                );
        }
    };
    tile(Rows<6>{}), tile(Rows<4>{}), tile(Rows<3>{}), tile(Rows<2>{}), tile(Rows<1>{});
}

// P V: p is [num_rows][p_stride] units, out is [num_rows][stride].
template <class Element>
void multiply_values(
    const uint32_t* p, int num_rows, int p_stride, const ValueBlocks& v, float* out, int stride
) {
    int row = 0;
    const auto tile = [&](auto rows) __attribute__((always_inline)) {
        constexpr int kRows = decltype(rows)::value;
        if constexpr (kRows <= kMaxRows) {
            for (; row + kRows <= num_rows; row += kRows)
                value_rows<Element, kRows>(
                    p + (size_t)row * p_stride, p_stride, v, out + (size_t)row * stride, stride
                );
        }
    };
    tile(Rows<6>{}), tile(Rows<4>{}), tile(Rows<3>{}), tile(Rows<2>{}), tile(Rows<1>{});
}

}  // namespace
