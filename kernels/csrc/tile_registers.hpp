// Intel AMX: eight registers of up to 16 rows of 64 bytes, and a product of two of them that is added to a third.
//
// One interface with two implementations: the instructions themselves, and a model of them in C++, with which the
// kernels run on any machine, for tests (-DTILE_MODEL). Both follow Intel's Software Developer's Manual, volume 2:
// LDTILECFG, TILELOADD, TILESTORED, TILEZERO and TDPBF16PS. The instructions are written as assembly, so that a
// compiler need not know them, and so that a register's number may be a template argument.
#pragma once

#include "elements.hpp"

#if defined(TILE_MODEL)
#include <assert.h>
#endif

namespace {

// What LDTILECFG reads: the rows of each register, and the bytes of each of its rows.
struct TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int num_row_bytes) { rows[tile] = num_rows, row_bytes[tile] = num_row_bytes; }
};
static_assert(sizeof(TileShapes) == 64, "as the manual lays it out");

#if !defined(TILE_MODEL)

struct TileRegisters {
    void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
    void release() { asm volatile("tilerelease"); }

    template <int kTo>
    ALWAYS_INLINE void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(kTo));
    }
    // Loads rows of memory, `stride` bytes from one to the next.
    template <int kTo>
    ALWAYS_INLINE void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTo) : "memory");
    }
    template <int kFrom>
    ALWAYS_INLINE void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kFrom) : "memory");
    }
    // sum[m][n] += left[m][2k] * right[k][2n] + left[m][2k + 1] * right[k][2n + 1] over all k, in bfloat16.
    template <int kSum, int kLeft, int kRight>
    ALWAYS_INLINE void multiply_add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
    }
};

#else

struct TileRegisters {
    void configure(const TileShapes& shapes) {
        assert(shapes.palette == 1 && shapes.start_row == 0);
        for (int tile = 0; tile < 16; ++tile) {
            assert(shapes.rows[tile] <= 16 && shapes.row_bytes[tile] <= 64);
            assert((shapes.rows[tile] == 0) == (shapes.row_bytes[tile] == 0));
            assert(tile < 8 || shapes.rows[tile] == 0);
        }
        shapes_ = shapes;
        memset(bytes_, 0, sizeof bytes_);
    }
    void release() { shapes_ = TileShapes{}; }

    template <int kTo>
    void zero() {
        assert(shapes_.rows[kTo] > 0);
        memset(bytes_[kTo], 0, sizeof bytes_[kTo]);
    }
    template <int kTo>
    void load(const void* from, int64_t stride) {
        zero<kTo>();
        for (int row = 0; row < shapes_.rows[kTo]; ++row)
            memcpy(bytes_[kTo][row], static_cast<const char*>(from) + row * stride, shapes_.row_bytes[kTo]);
    }
    template <int kFrom>
    void store(void* to, int64_t stride) {
        assert(shapes_.rows[kFrom] > 0);
        for (int row = 0; row < shapes_.rows[kFrom]; ++row)
            memcpy(static_cast<char*>(to) + row * stride, bytes_[kFrom][row], shapes_.row_bytes[kFrom]);
    }
    // Even and odd products have a sum each, and denormals count as zero.
    template <int kSum, int kLeft, int kRight>
    void multiply_add() {
        const int num_rows = shapes_.rows[kSum], num_columns = shapes_.row_bytes[kSum] / 4;
        const int num_pairs = shapes_.row_bytes[kLeft] / 4;
        static_assert(kSum != kLeft && kLeft != kRight && kSum != kRight, "the manual's #UD");
        assert(num_rows > 0 && shapes_.rows[kLeft] == num_rows && shapes_.rows[kRight] == num_pairs);
        assert(shapes_.row_bytes[kRight] == num_columns * 4);
        assert(shapes_.row_bytes[kSum] % 4 == 0 && shapes_.row_bytes[kLeft] % 4 == 0);
        for (int row = 0; row < num_rows; ++row)
            for (int column = 0; column < num_columns; ++column) {
                float sums[2] = {0.0f, 0.0f};
                for (int pair = 0; pair < num_pairs; ++pair)
                    for (int i = 0; i < 2; ++i) {
                        // The product of two bfloat16 is exact, so this rounds once, as a fused addition does.
                        const float product = value<kLeft>(row, 2 * pair + i) * value<kRight>(pair, 2 * column + i);
                        sums[i] = flushed(sums[i] + product);
                    }
                float sum;
                memcpy(&sum, &bytes_[kSum][row][4 * column], sizeof sum);
                sum = flushed(flushed(sum) + flushed(sums[0] + sums[1]));
                memcpy(&bytes_[kSum][row][4 * column], &sum, sizeof sum);
            }
    }

private:
    TileShapes shapes_;
    uint8_t bytes_[8][16][64];

    static float flushed(float x) { return x < 0x1p-126f && x > -0x1p-126f ? 0.0f : x; }

    template <int kTile>
    float value(int row, int column) const {
        uint16_t value;
        memcpy(&value, &bytes_[kTile][row][2 * column], sizeof value);
        return flushed(Bfloat16::widen(value));
    }
};

#endif

}  // namespace
