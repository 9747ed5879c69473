// The two products of attention in bfloat16 by tile registers (Intel AMX), on the blocks' layouts of multiply.hpp,
// which are what TDPBF16PS expects of its right side: rows of 16 pairs.
//
// Four registers hold the sums of 16 rows by 64 columns. An element's sum is made in one order here too, but another
// than by vectors, so decodes and prompts alike come here: a query's result must not depend on its neighbours.
#pragma once

#include "multiply.hpp"
#include "tile_registers.hpp"

namespace {

struct InTiles {
    using Left = Bfloat16;
    using Unit = uint32_t;
    static constexpr int kPerUnit = 2;
    static constexpr int kChunk = 16;    // tokens
    static constexpr int kRowStep = 16;  // rows of the left side that are read at once, filled or not

    TileRegisters registers;
    alignas(64) uint32_t last_values[16][16];
    alignas(64) float last_sums[16][64];

    static bool fits(int head_dim, int block_size) { return head_dim % 32 == 0 && block_size % 16 == 0; }
    // The pairs of tokens of a V block that are taken in at once.
    static int value_depth(int block_size) { return block_size % 32 == 0 ? 16 : 8; }
    // P's rows are padded with zeros to a multiple of this.
    static int value_tokens(int block_size) { return 2 * value_depth(block_size); }

    void begin(int block_size);
    void end() { registers.release(); }
};

// Registers 0 to 3 are sums.
enum { kLeftOfScores = 4, kRightOfScores, kLeftOfValues, kRightOfValues };

void InTiles::begin(int block_size) {
    const int depth = value_depth(block_size);
    TileShapes shapes;
    for (int tile = 0; tile < 6; ++tile) shapes.set(tile, 16, 64);
    shapes.set(kLeftOfValues, 16, 4 * depth);
    shapes.set(kRightOfValues, depth, 64);
    registers.configure(shapes);
}

// Calls `body` for the first `count` of four registers, with the register's number as a type.
template <class Body>
ALWAYS_INLINE void for_sums(int count, Body body) {
    body(Number<0>{});
    if (count > 1) body(Number<1>{});
    if (count > 2) body(Number<2>{});
    if (count > 3) body(Number<3>{});
}

void multiply_scores(
    InTiles& product, const uint16_t* q, int num_rows, int head_dim, const Chunk<uint32_t>* chunks, int num_chunks,
    int block_size, float* scores, int stride
) {
    TileRegisters& registers = product.registers;
    for (int row = 0; row < num_rows; row += 16)
        for (int first = 0; first < num_chunks; first += 4) {
            const Chunk<uint32_t>* chunk = chunks + first;
            const int count = least(4, num_chunks - first);
            for_sums(count, [&](auto sum) { registers.zero<decltype(sum)::value>(); });
            for (int unit = 0; unit < head_dim / 2; unit += 16) {
                registers.load<kLeftOfScores>(q + (int64_t)row * head_dim + 2 * unit, 2 * head_dim);
                for_sums(count, [&](auto sum) {
                    constexpr int kSum = decltype(sum)::value;
                    registers.load<kRightOfScores>(chunk[kSum].units + (int64_t)unit * block_size, 4 * block_size);
                    registers.multiply_add<kSum, kLeftOfScores, kRightOfScores>();
                    for (int i = 0; i < 16; ++i) __builtin_prefetch(chunk[kSum].ahead + (unit + i) * 16);
                });
            }
            for_sums(count, [&](auto sum) {
                constexpr int kSum = decltype(sum)::value;
                registers.store<kSum>(scores + (int64_t)row * stride + chunk[kSum].column, 4 * stride);
            });
        }
}

// Copies the first `num_units` units of 16 columns of V, the last of which may be half; zeros follow them.
void copy_last_values(InTiles& product, const uint32_t* from, int head_dim, int num_units, bool half) {
    memset(product.last_values, 0, sizeof product.last_values);
    for (int unit = 0; unit < num_units; ++unit)
        for (int i = 0; i < 16; ++i)
            product.last_values[unit][i] = from[unit * head_dim + i] & (half && unit == num_units - 1 ? 0xFFFFu : ~0u);
}

void multiply_values(
    InTiles& product, const uint16_t* p, int num_rows, int p_stride, const ValueBlocks<uint32_t>& v, float* out
) {
    TileRegisters& registers = product.registers;
    const int depth = InTiles::value_depth(2 * v.units_per_block);
    for (int row = 0; row < num_rows; row += 16)
        for (int component = 0; component < v.head_dim; component += 64) {
            const int count = least(4, (v.head_dim - component) / 16);
            for_sums(count, [&](auto sum) { registers.zero<decltype(sum)::value>(); });
            for (int unit = 0; unit < v.num_units; unit += depth) {
                const int block = unit / v.units_per_block;
                const int64_t start = (int64_t)(unit % v.units_per_block) * v.head_dim + component;
                const int left = v.num_units - unit;
                registers.load<kLeftOfValues>(p + (int64_t)row * p_stride + 2 * unit, 2 * p_stride);
                for_sums(count, [&](auto sum) {
                    constexpr int kSum = decltype(sum)::value;
                    const uint32_t* from = v.units[block] + start + 16 * kSum;
                    if (left > depth || (left == depth && !v.half)) {
                        registers.load<kRightOfValues>(from, 4 * v.head_dim);
                    } else {
                        copy_last_values(product, from, v.head_dim, left, v.half);
                        registers.load<kRightOfValues>(product.last_values, sizeof product.last_values[0]);
                    }
                    registers.multiply_add<kSum, kLeftOfValues, kRightOfValues>();
                    for (int i = 0; i < depth; ++i)
                        __builtin_prefetch(v.ahead[block] + start + i * v.head_dim + 16 * kSum);
                });
            }
            float* to = out + (int64_t)row * v.head_dim + component;
            if (row + 16 <= num_rows) {
                for_sums(count, [&](auto sum) {
                    registers.store<decltype(sum)::value>(to + 16 * decltype(sum)::value, 4 * v.head_dim);
                });
                continue;
            }
            for_sums(count, [&](auto sum) {
                constexpr int kSum = decltype(sum)::value;
                registers.store<kSum>(&product.last_sums[0][16 * kSum], sizeof product.last_sums[0]);
            });
            for (int i = 0; i < num_rows - row; ++i)
                memcpy(to + (int64_t)i * v.head_dim, product.last_sums[i], sizeof(float) * 16 * count);
        }
}

}  // namespace
