// The two small matrix products of attention, on one tile of registers: scores = Q K^T of some K blocks, and P V summed
// over some V blocks. Both broadcast a unit of the left side and multiply it with vectors of the right side, as in any
// GEMM of registers (Goto & van de Geijn 2008); the blocks' layouts are made for that:
//
//     K, of one head in one block: [head_dim units][block_size]       columns are tokens, the sum runs over components
//     V, of one head in one block: [block_size units][head_dim]       columns are components, the sum runs over tokens
//
// in units of two neighbouring bfloat16, or of one other value. An element's sum is made in one order, whatever the
// tile: how rows and columns are shared out among tiles changes no bit of the result.
//
// Memory is prefetched: each step of a sum asks for a line of the block that will be needed some blocks later.
#pragma once

#include "product.hpp"

namespace {

// Some of the columns of a K block.
template <class Unit>
struct Chunk {
    const Unit* units;  // of its first column
    const Unit* ahead;  // the same amount of memory, needed soon
    int column;         // where its scores go
    int lanes;          // the number of its columns, at most Product::kChunk
};

// The V blocks of one head that a product runs over.
template <class Unit>
struct ValueBlocks {
    const Unit* const* units;  // of each block
    const Unit* const* ahead;  // the same amount of memory for each block, needed soon
    int num_blocks;
    int units_per_block;
    int num_units;  // along the tokens, in all blocks together; nothing past them is read
    bool half;      // whether the last unit holds only one token
    int head_dim;
};

template <class Product, int kRows, int kColumns>
ALWAYS_INLINE void score_tile(
    const typename Product::Left::Value* q, int head_dim, const Chunk<typename Product::Unit>* chunks, int block_size,
    int lanes, float* scores, int stride
) {
    Floats sums[kRows][kColumns] = {};
    for (int unit = 0; unit < head_dim / Product::kPerUnit; ++unit) {
        typename Product::Loaded k[kColumns];
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column) {
            const auto* from = chunks[column].units + (size_t)unit * block_size;
            k[column] = lanes == kWidth ? Product::load(from) : Product::load(from, lanes);
            __builtin_prefetch(chunks[column].ahead + (size_t)unit * kWidth);
        }
        add_products<Product>(k, q + unit * Product::kPerUnit, head_dim, sums);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column)
            store_floats(scores + (size_t)row * stride + chunks[column].column, sums[row][column], lanes);
}

template <class Product, int kRows>
ALWAYS_INLINE void score_rows(
    const typename Product::Left::Value* q, int head_dim, const Chunk<typename Product::Unit>* chunks, int num_chunks,
    int block_size, float* scores, int stride
) {
    int chunk = 0;
    const auto next_are_whole = [&](int count) {
        if (chunk + count > num_chunks) return false;
        for (int i = 0; i < count; ++i)
            if (chunks[chunk + i].lanes != kWidth) return false;
        return true;
    };
    const auto tile = [&](auto columns, int lanes) __attribute__((always_inline)) {
        constexpr int kColumns = decltype(columns)::value;
        score_tile<Product, kRows, kColumns>(q, head_dim, chunks + chunk, block_size, lanes, scores, stride);
        chunk += kColumns;
    };
    while (chunk < num_chunks) {
        if (kMostColumns >= 4 && next_are_whole(4))
            tile(Number<kMostColumns>{}, kWidth);
        else if (next_are_whole(2))
            tile(Number<2>{}, kWidth);
        else if (next_are_whole(1))
            tile(Number<1>{}, kWidth);
        else
            tile(Number<1>{}, chunks[chunk].lanes);
    }
}

template <class Product, int kRows, int kColumns>
ALWAYS_INLINE void value_tile(
    const typename Product::Left::Value* p, int p_stride, const ValueBlocks<typename Product::Unit>& v, int component,
    int lanes, float* out
) {
    Floats sums[kRows][kColumns] = {};
    const auto add = [&](const typename Product::Unit* from, int unit, bool half) __attribute__((always_inline)) {
        typename Product::Loaded values[kColumns];
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column) {
            const auto* at = from + column * kWidth;
            values[column] = lanes == kWidth ? Product::load(at) : Product::load(at, lanes);
            if constexpr (Product::kPerUnit == 2)
                if (half) values[column] = Product::first_only(values[column]);
        }
        add_products<Product>(values, p + unit * Product::kPerUnit, p_stride, sums);
    };
    const int num_whole = v.num_units - (v.half ? 1 : 0);
    int unit = 0;
    for (int block = 0; block < v.num_blocks; ++block) {
        const auto* from = v.units[block] + component;
        const auto* ahead = v.ahead[block] + component;
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
            store_floats(out + (size_t)row * v.head_dim + component + column * kWidth, sums[row][column], lanes);
}

template <class Product, int kRows>
ALWAYS_INLINE void value_rows(
    const typename Product::Left::Value* p, int p_stride, const ValueBlocks<typename Product::Unit>& v, float* out
) {
    int component = 0;
    const auto tile = [&](auto columns, int lanes) __attribute__((always_inline)) {
        constexpr int kColumns = decltype(columns)::value;
        value_tile<Product, kRows, kColumns>(p, p_stride, v, component, lanes, out);
        component += kColumns * kWidth;
    };
    while (component < v.head_dim) {
        const int left = v.head_dim - component;
        if (kMostColumns >= 4 && left >= 4 * kWidth)
            tile(Number<kMostColumns>{}, kWidth);
        else if (left >= 2 * kWidth)
            tile(Number<2>{}, kWidth);
        else if (left >= kWidth)
            tile(Number<1>{}, kWidth);
        else
            tile(Number<1>{}, left);
    }
}

// Calls `tile` with the number of rows to take at once, as a type, and with the first of them.
template <int kMost, class Tile>
ALWAYS_INLINE void take_rows(int num_rows, Tile tile) {
    int row = 0;
    const auto take = [&](auto rows) __attribute__((always_inline)) {
        constexpr int kRows = decltype(rows)::value;
        if constexpr (kRows <= kMost)
            for (; row + kRows <= num_rows; row += kRows) tile(rows, row);
    };
    take(Number<6>{}), take(Number<4>{}), take(Number<3>{}), take(Number<2>{}), take(Number<1>{});
}

// Q K^T: q is [num_rows][head_dim], scores are [num_rows][stride].
template <class Product>
void multiply_scores(
    Product&, const typename Product::Left::Value* q, int num_rows, int head_dim,
    const Chunk<typename Product::Unit>* chunks, int num_chunks, int block_size, float* scores, int stride
) {
    take_rows<Product::kRows>(num_rows, [&](auto rows, int row) __attribute__((always_inline)) {
        score_rows<Product, decltype(rows)::value>(
            q + (size_t)row * head_dim, head_dim, chunks, num_chunks, block_size, scores + (size_t)row * stride, stride
        );
    });
}

// P V: p is [num_rows][p_stride], out is [num_rows][head_dim].
template <class Product>
void multiply_values(
    Product&, const typename Product::Left::Value* p, int num_rows, int p_stride,
    const ValueBlocks<typename Product::Unit>& v, float* out
) {
    take_rows<Product::kRows>(num_rows, [&](auto rows, int row) __attribute__((always_inline)) {
        value_rows<Product, decltype(rows)::value>(
            p + (size_t)row * p_stride, p_stride, v, out + (size_t)row * v.head_dim
        );
    });
}

}  // namespace
