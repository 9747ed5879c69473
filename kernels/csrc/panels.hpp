// Products of some rows with one panel of a weight, on register tiles.
//
// A panel is 32 outputs, [units][32], in the units of product.hpp: what one step of the sums takes in is contiguous,
// and a panel is one stream through memory. The kernel is the inner one of Goto & van de Geijn 2008: a tile of sums in
// registers, each step of which is an outer product.
//
// An output is one sum, made in one order: neither the batch nor the tile changes a bit of it.
#pragma once

#include "ahead.hpp"
#include "coded.hpp"
#include "product.hpp"
#if defined(TILES)
#include "tile_registers.hpp"
#endif

namespace {

// The most rows of a tile, with two vectors of outputs (kVectorRows) or all of a panel's (kWholeRows): what the
// registers hold, of which there are 16 below AVX-512. And the rows that are converted at once: enough to pay for the
// other work per chunk of rows, such as decoding a panel; more would leave the caches. A multiple of the rows of all
// tiles that take them.
#if defined(__AVX512F__)
constexpr int kVectorRows = 12, kWholeRows = 12, kConvertedRows = 264;
#else
constexpr int kVectorRows = 6, kWholeRows = 8 / kPanelVectors, kConvertedRows = 192;
#endif

// Rows in the form in which they are multiplied: the number of values of each, and the conversion from another kind.
template <class Left>
ALWAYS_INLINE int64_t num_values(int num_inputs) {
    return num_inputs;
}

template <class Element, class Left>
ALWAYS_INLINE void convert_rows(
    const typename Element::Value* from, int64_t stride, typename Left::Value* to, int num_rows, int num_inputs
) {
    for (int row = 0; row < num_rows; ++row, from += stride, to += num_values<Left>(num_inputs))
        convert<Element, Left>(from, to, num_inputs);
}

// A panel as tiles take it in: kUnits units at a time, each as kVectors vectors of outputs, whose first output is
// `output`. This one's units are in memory.
template <class Product>
struct Plain {
    static constexpr bool kIsPlain = true;
    static constexpr int kUnits = 1;
    const typename Product::Unit* units;

    template <int kVectors>
    static constexpr int output(int tile, int vector) {
        return (tile * kVectors + vector) * kWidth;
    }

    // Adds the products of a unit with rows of x. The unit is loaded again for each of its parts, and the compiler must
    // not know that it is the same: kept between them, it would take the registers of two sums.
    template <int kRows, int kVectors>
    ALWAYS_INLINE void add(
        int unit, int tile, const typename Product::Left::Value* x, int64_t x_stride, Floats (&sums)[kRows][kVectors]
    ) const {
#pragma GCC unroll 2
        for (int part = 0; part < Product::kParts; ++part) {
            const auto* from = units + (int64_t)unit * kPanel + output<kVectors>(tile, 0);
            if (Product::kParts > 1) asm volatile("" : "+r"(from));
            typename Product::Part values[kVectors];
#pragma GCC unroll 8
            for (int vector = 0; vector < kVectors; ++vector)
                values[vector] = Product::part(Product::load(from + vector * kWidth), part);
            add_part<Product>(values, x + part, x_stride, sums);
        }
    }
};

// A panel whose units are decoded on the way. The last one may be past the end; it then holds anything.
template <class Product, class Source>
struct Decoded {
    static constexpr bool kIsPlain = false;
    static constexpr int kUnits = Source::kUnits;
    Source source;

    template <int kVectors>
    static constexpr int output(int tile, int vector) {
        return Source::template output<kVectors>(tile, vector);
    }

    template <int kVectors>
    ALWAYS_INLINE void load(int unit, int tile, typename Product::Loaded (&loaded)[kUnits][kVectors]) {
        Words words[kUnits][kVectors];
        source.decode(unit, tile, words);
#pragma GCC unroll 2
        for (int i = 0; i < kUnits; ++i)
#pragma GCC unroll 8
            for (int vector = 0; vector < kVectors; ++vector)
                loaded[i][vector] = Product::load(reinterpret_cast<const typename Product::Unit*>(&words[i][vector]));
    }
};

// A panel of int8, decoded into units of `kPerUnit` values.
template <int kPerUnit>
struct Quantized {
    static constexpr int kUnits = 1;
    const int8_t* values;

    template <int kVectors>
    static constexpr int output(int tile, int vector) {
        return spread_output<kVectors>(tile, vector);
    }

    template <int kVectors>
    ALWAYS_INLINE void decode(int unit, int tile, Words (&words)[kUnits][kVectors]) const {
        const int8_t* from = values + (int64_t)unit * kPerUnit * kPanel;
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector) {
            const int8_t* at = from + spread_output<kVectors>(tile, vector);
            Words& word = words[0][vector];
            word = (Words)widen_bytes(at);
            // As float32 these integers have lower halves of zero, so the upper halves are their bfloat16.
            if constexpr (kPerUnit == 2) word = word >> 16 | (Words)widen_bytes(at + kPanel);
        }
    }
};

template <class Product, int kRows, class Panel>
ALWAYS_INLINE void multiply_tile(
    const typename Product::Left::Value* x, int64_t x_stride, Panel panel, int num_units, int tile, Ahead& ahead,
    float (*results)[kPanel]
) {
    constexpr int kUnits = Panel::kUnits, kVectors = kRows <= kWholeRows ? kPanelVectors : 2;
    static_assert(kUnits <= 2, "the loop takes two");
    Run runs[kMostRuns];
    ahead.share(num_units, kPanelVectors / kVectors - tile, runs);
    Floats sums[kRows][kVectors] = {};
    Run* run = runs;
    for (int unit = 0; unit < num_units; ++run) {
        const char* line = run->at;
        const int run_end = unit + run->num_units;
        if constexpr (Panel::kIsPlain && kRows == kVectorRows) {
            // Products are the bottleneck here: checking for prefetches between them costs 5 % of their time, whether
            // there is anything to prefetch or not.
            while (unit < run_end) {
                ask(line, *run, kRunUnits);
                for (const int end = least(unit + kRunUnits, run_end); unit < end; ++unit)
                    panel.add(unit, tile, x + unit * Product::kPerUnit, x_stride, sums);
            }
        } else {
            // Memory may be the bottleneck here, and prefetching more than a few lines at once would hold up the loads.
            for (; unit < run_end; unit += kUnits) {
                const auto* values = x + unit * Product::kPerUnit;
                if constexpr (Panel::kIsPlain) {
                    ask(line, *run, 1);
                    panel.add(unit, tile, values, x_stride, sums);
                } else {
                    typename Product::Loaded weights[kUnits][kVectors];
                    panel.load(unit, tile, weights);
                    ask(line, *run, kUnits);
                    add_products<Product>(weights[0], values, x_stride, sums);
                    if constexpr (kUnits == 2)
                        if (unit + 1 < num_units)
                            add_products<Product>(weights[1], values + Product::kPerUnit, x_stride, sums);
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector)
            store_floats(results[row] + Panel::template output<kVectors>(tile, vector), sums[row][vector]);
}

// Calls `body` with the number of a tile's rows as a type.
template <class Body>
ALWAYS_INLINE void with_rows(int num_rows, Body body) {
    const auto tiles = [&](auto rows) __attribute__((always_inline)) {
        if constexpr (decltype(rows)::value <= kVectorRows) body(rows);
    };
    switch (num_rows) {
        case 1: tiles(Number<1>{}); break;
        case 2: tiles(Number<2>{}); break;
        case 3: tiles(Number<3>{}); break;
        case 4: tiles(Number<4>{}); break;
        case 5: tiles(Number<5>{}); break;
        case 6: tiles(Number<6>{}); break;
        case 7: tiles(Number<7>{}); break;
        case 8: tiles(Number<8>{}); break;
        case 9: tiles(Number<9>{}); break;
        case 10: tiles(Number<10>{}); break;
        case 11: tiles(Number<11>{}); break;
        default: tiles(Number<12>{});
    }
}

// Multiplies some rows with a panel, by vectors.
template <class InProduct>
struct VectorPanels {
    using Product = InProduct;
    static constexpr int kRows = kVectorRows, kTileRows = kRows;
    static constexpr bool kDecodes = true;
    // The most rows for which each tile decodes a coded panel for itself: beyond, decoding again and again costs more
    // than the way through memory that it saves.
    static constexpr int kMostDecodingRows = kVectorRows == 12 ? 120 : kVectorRows;
    using Int8Source = Quantized<Product::kPerUnit>;

    template <class Panel>
    void multiply(
        int num_rows, const typename Product::Left::Value* x, int64_t x_stride, Panel panel, int num_units, Ahead& ahead,
        float (*results)[kPanel]
    ) {
        with_rows(num_rows, [&](auto rows) __attribute__((always_inline)) {
            constexpr int kCount = decltype(rows)::value;
            for (int tile = 0; tile < (kCount <= kWholeRows ? 1 : kPanelVectors / 2); ++tile)
                multiply_tile<Product, kCount>(x, x_stride, panel, num_units, tile, ahead, results);
        });
    }
    void end() {}
};

#if defined(TILES)
// The same by tile registers: two of rows and two of outputs are multiplied into four of sums. An output's sum is made
// in another order than by vectors, so all batches, even of one row, come here.
struct TilePanels {
    // The right side's bfloat16 are in pairs here too.
    struct Product : ByVectors<2> {
        using Left = Bfloat16;
        using Unit = uint32_t;
    };
    static constexpr int kRows = 32, kTileRows = kRows, kMostDecodingRows = 0;
    using Int8Source = Quantized<Product::kPerUnit>;
    static constexpr bool kDecodes = false;

    static bool fits(int num_inputs) { return num_inputs % 32 == 0; }

    void multiply(
        int num_rows, const uint16_t* x, int64_t x_stride, Plain<Product> panel, int num_units, Ahead& ahead,
        float (*results)[kPanel]
    ) {
        configure(num_rows);
        const bool both = num_rows > 16;
        registers.zero<0>(), registers.zero<1>();
        if (both) registers.zero<2>(), registers.zero<3>();
        Run runs[kMostRuns];
        ahead.share(num_units, 1, runs);
        Run* run = runs;
        const char* line = run->at;
        for (int unit = 0, run_end = run->num_units; unit < num_units; unit += kRunUnits) {
            if (unit == run_end) line = (++run)->at, run_end += run->num_units;
            ask(line, *run, kRunUnits);
            registers.load<kFirst>(x + 2 * unit, 2 * x_stride);
            registers.load<kLeftHalf>(panel.units + (int64_t)unit * kPanel, 4 * kPanel);
            registers.load<kRightHalf>(panel.units + (int64_t)unit * kPanel + 16, 4 * kPanel);
            registers.multiply_add<0, kFirst, kLeftHalf>();
            registers.multiply_add<1, kFirst, kRightHalf>();
            if (both) {
                registers.load<kSecond>(x + 16 * x_stride + 2 * unit, 2 * x_stride);
                registers.multiply_add<2, kSecond, kLeftHalf>();
                registers.multiply_add<3, kSecond, kRightHalf>();
            }
        }
        registers.store<0>(results[0], sizeof results[0]), registers.store<1>(results[0] + 16, sizeof results[0]);
        if (both)
            registers.store<2>(results[16], sizeof results[0]), registers.store<3>(results[16] + 16, sizeof results[0]);
    }
    void end() {
        if (configured_rows > 0) registers.release();
    }

  private:
    // Registers 0 to 3 are sums: of the first 16 rows by both halves of a panel, then of the second 16 rows.
    enum { kFirst = 4, kSecond, kLeftHalf, kRightHalf };
    TileRegisters registers;
    int configured_rows = 0;

    void configure(int num_rows) {
        if (num_rows == configured_rows) return;
        const int first = least(16, num_rows), second = num_rows - first;
        TileShapes shapes;
        shapes.set(0, first, 64), shapes.set(1, first, 64), shapes.set(kFirst, first, 64);
        if (second > 0) shapes.set(2, second, 64), shapes.set(3, second, 64), shapes.set(kSecond, second, 64);
        shapes.set(kLeftHalf, 16, 64), shapes.set(kRightHalf, 16, 64);
        registers.configure(shapes);
        configured_rows = num_rows;
    }
};
#endif

}  // namespace
