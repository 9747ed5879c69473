// Linear layers: y = x W^T + b for a batch of tokens, on weights that were packed once.
//
// The weight stands in panels of 32 outputs, [units][32] each, in the units of product.hpp: what one step of the sums
// takes in stands together, and a panel is one stream through memory. The kernel is the inner one of Goto & van de Geijn
// 2008: a tile of sums in registers, each step of it an outer product, and a panel that stays in the cache while all
// rows of x go past it. At small batches memory decides, so a thread that works on one panel asks for the one that it
// will probably get next.
//
// Of a quantized weight each value is an int8, [inputs][32] in each panel, and each output has a scale. An int8 is a
// number of every other kind too: the sum runs over the integers themselves, and is multiplied by the scale once.
// A weight of bfloat16 may be coded (coded.hpp): its panels are shorter, and its values the same.
//
// An output is one sum, made in one order: neither the batch nor the threads nor the tile changes a bit of it.
#pragma once

#include <stdlib.h>

#include "ahead.hpp"
#include "coded.hpp"
#include "product.hpp"
#include "threads.hpp"
#if defined(TILES)
#include "tile_registers.hpp"
#endif

namespace {

// The most rows of a tile, with two vectors of outputs each and with all of a panel: what the registers hold, which are 16
// below AVX-512.
#if defined(__AVX512F__)
constexpr int kVectorRows = 12, kWholeRows = 12;
#else
constexpr int kVectorRows = 6, kWholeRows = 8 / kPanelVectors;
#endif

// Of rows that are converted at once.
constexpr int64_t kConvertedBytes = 512 << 10;

struct Linear {
    Dtype dtype;          // of x, of the bias, of the weight unless it is int8, and of out unless it is widened
    const void* x;        // [num_rows][num_inputs], rows x_stride values apart
    int64_t x_stride;
    const void* weight;   // [panels][units][32] units, [panels][num_inputs][32] int8, or coded panels
    const float* scales;  // of each output, where the weight is int8; else null
    const Exception* exceptions;  // where the weight is coded; else null
    const void* bias;     // of each output, or null
    void* out;            // [num_rows][num_outputs], or half as many where gated; rows out_stride values apart
    int64_t out_stride;
    int num_rows, num_outputs, num_inputs;
    bool gated;    // a panel is 16 gates and the 16 values that they are for; what comes out is silu(gate) * value
    bool widened;  // out is float32, and the sums are not rounded
    // What is multiplied with next: panels, whose first ones are asked for while the last ones of this weight are
    // worked on; or null.
    const char* following;
    int64_t following_bytes;  // of each
    // What attention reads next, and how much of it is asked for with each panel; or null.
    ContextAhead* context;
    int64_t context_bytes;

    int num_panels() const { return (num_outputs + kPanel - 1) / kPanel; }
    int64_t panel_bytes() const {
        if (exceptions != nullptr) return CodedPanel::bytes(num_inputs);
        return (int64_t)num_inputs * kPanel * (scales != nullptr ? 1 : size_of(dtype));
    }
};

struct LinearJob {
    Linear a;
    int num_threads;
    Counter panels;
    bool out_of_memory;
};

// A panel as tiles take it in: kUnits units at a time, and of each kVectors vectors of outputs. The last unit that is loaded
// may be one too many, and then it holds anything.
template <class Product>
struct Plain {
    static constexpr bool kIsPlain = true;
    static constexpr int kUnits = 1;
    const typename Product::Unit* units;

    // The first output of a tile's vector.
    template <int kVectors>
    static constexpr int output(int tile, int vector) {
        return (tile * kVectors + vector) * kWidth;
    }

    // Adds the products of a unit with rows of x. It is loaded again for each of its parts, and the compiler is not to know
    // that it is the same: kept between them it would take the registers of two sums.
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

// The same, of units that are made on the way.
template <class Product, class Source>
struct Decoded {
    static constexpr bool kIsPlain = false;
    static constexpr int kUnits = Source::kUnits;
    Source source;

    template <int kVectors>
    static constexpr int output(int tile, int vector) {
        return spread_output<kVectors>(tile, vector);
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

// Integers as units of `kPerUnit` values.
template <int kPerUnit>
struct Quantized {
    static constexpr int kUnits = 1;
    const int8_t* values;

    template <int kVectors>
    ALWAYS_INLINE void decode(int unit, int tile, Words (&words)[kUnits][kVectors]) const {
        const int8_t* from = values + (int64_t)unit * kPerUnit * kPanel;
#pragma GCC unroll 8
        for (int vector = 0; vector < kVectors; ++vector) {
            const int8_t* at = from + spread_output<kVectors>(tile, vector);
            Words& word = words[0][vector];
            word = (Words)widen_bytes(at);
            // Integers as float32 have lower halves of zero, and what is left of them is bfloat16.
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
            // There products decide: to ask between them costs 5 % of their time, be there anything to ask for or not.
            while (unit < run_end) {
                ask(line, *run, kRunUnits);
                for (const int end = least(unit + kRunUnits, run_end); unit < end; ++unit)
                    panel.add(unit, tile, x + unit * Product::kPerUnit, x_stride, sums);
            }
        } else {
            // Here memory may decide, and more than a few lines at once would hold up what is needed now.
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

// The products of some rows with a panel, by vectors.
template <class InProduct>
struct VectorPanels {
    using Product = InProduct;
    static constexpr int kRows = kVectorRows;
    static constexpr bool kDecodes = true;

    template <class Panel>
    void multiply(
        int num_rows, const typename Product::Left::Value* x, int64_t x_stride, Panel panel, int num_units, Ahead& ahead,
        float (*results)[kPanel]
    ) {
        const auto tiles = [&](auto rows) __attribute__((always_inline)) {
            constexpr int kCount = decltype(rows)::value;
            if constexpr (kCount <= kRows)
                for (int tile = 0; tile < (kCount <= kWholeRows ? 1 : kPanelVectors / 2); ++tile)
                    multiply_tile<Product, kCount>(x, x_stride, panel, num_units, tile, ahead, results);
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
    void end() {}
};

#if defined(TILES)
// The same by tile registers: two of rows and two of outputs meet in four of sums. An output's sum is made in another
// order than by vectors, so that all batches, even of one row, come here.
struct TilePanels {
    // The bfloat16 of the right side stand in pairs here too.
    struct Product : ByVectors<2> {
        using Left = Bfloat16;
        using Unit = uint32_t;
        using Loaded = Words;
        static ALWAYS_INLINE Loaded load(const Unit* from) { return load_words(from); }
    };
    static constexpr int kRows = 32;
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

// From a row's sums over a panel to its outputs.
template <class Element>
ALWAYS_INLINE void finish_row(const Linear& a, int row, int64_t panel, float* sums) {
    using Value = typename Element::Value;
    const int first = (int)panel * kPanel, count = least(kPanel, a.num_outputs - first);
    if (a.scales != nullptr)
        for (int i = 0; i < count; ++i) sums[i] *= a.scales[first + i];
    if (a.bias != nullptr)
        for (int i = 0; i < count; ++i) sums[i] += Element::widen(static_cast<const Value*>(a.bias)[first + i]);
    if (a.widened) {
        memcpy(static_cast<float*>(a.out) + row * a.out_stride + first, sums, count * sizeof *sums);
    } else if (a.gated) {
        Value* out = static_cast<Value*>(a.out) + row * a.out_stride + first / 2;
        for (int i = 0; i < kPanel / 2; i += kWidth) {
            const Floats gate = Element::rounded(load_floats(sums + i));
            const Floats value = Element::rounded(load_floats(sums + kPanel / 2 + i));
            Element::store(out + i, Element::rounded(silu(gate)) * value);
        }
    } else {
        convert<Float32, Element>(sums, static_cast<Value*>(a.out) + row * a.out_stride + first, count);
    }
}

// Rows as they are multiplied.
template <class Value>
struct Rows {
    const Value* x;
    int64_t stride;
    int first, count;
};

// The rows of x in chunks. Those of another kind than the one to multiply are converted, some at a time, once for all
// panels.
template <class Element, class Left, int kRowStep>
class RowChunks {
  public:
    using Value = typename Left::Value;

    explicit RowChunks(const Linear& a) : a_(a), size_(kConverts ? least(most_converted(), a.num_rows) : a.num_rows) {}

    int count() const { return (a_.num_rows + size_ - 1) / size_; }
    int64_t bytes() const { return kConverts ? (size_ * row_bytes() + 63) / 64 * 64 : 0; }

    // Those of one chunk; in `memory`, if they are converted, where the last ones that were asked for may stand already.
    const Rows<Value>& rows(int64_t chunk, Value* memory) {
        const int first = (int)chunk * size_, count = least(size_, a_.num_rows - first);
        if (rows_.count > 0 && rows_.first == first) return rows_;
        const auto* x = static_cast<const typename Element::Value*>(a_.x) + first * a_.x_stride;
        if constexpr (kConverts) {
            for (int64_t row = 0; row < count; ++row)
                convert<Element, Left>(x + row * a_.x_stride, memory + row * a_.num_inputs, a_.num_inputs);
            rows_ = {memory, a_.num_inputs, first, count};
        } else {
            rows_ = {x, a_.x_stride, first, count};
        }
        return rows_;
    }

  private:
    static constexpr bool kConverts = Left::kDtype != Element::kDtype;

    int64_t row_bytes() const { return (int64_t)sizeof(Value) * a_.num_inputs; }
    int most_converted() const { return round_up((int)(kConvertedBytes / row_bytes()) + 1, kRowStep); }

    const Linear& a_;
    const int size_;
    Rows<Value> rows_ = {};
};

// All these rows with one panel, while `next` is asked for.
template <class Panels, class Element, class Panel>
ALWAYS_INLINE void run_panel(
    const Linear& a, Panels& panels, int64_t number, Panel panel,
    const Rows<typename Panels::Product::Left::Value>& rows, Span next, Ahead& ahead
) {
    const int num_units = a.num_inputs / Panels::Product::kPerUnit;
    const int num_blocks = (rows.count + Panels::kRows - 1) / Panels::kRows;
    const int64_t next_bytes = (next.bytes / num_blocks + 63) / 64 * 64;  // with each block of rows
    const int64_t context_bytes = a.context_bytes * rows.count / a.num_rows / num_blocks;
    float results[Panels::kRows][kPanel] __attribute__((aligned(64)));
    for (int row = 0; row < rows.count; row += Panels::kRows, next.at += next_bytes) {
        const int count = least(Panels::kRows, rows.count - row);
        ahead.begin({next.at, next_bytes}, context_bytes);
        panels.multiply(count, rows.x + row * rows.stride, rows.stride, panel, num_units, ahead, results);
        for (int i = 0; i < count; ++i) finish_row<Element>(a, rows.first + row + i, number, results[i]);
    }
}

enum class Form { kPlain, kInt8, kCoded };

template <class Panels, class Element, Form kForm>
void run_panels(void* data) {
    using Product = typename Panels::Product;
    LinearJob& job = *static_cast<LinearJob*>(data);
    const Linear& a = job.a;
    const int num_units = a.num_inputs / Product::kPerUnit;
    const int64_t num_panels = job.panels.count, panel_bytes = a.panel_bytes();
    RowChunks<Element, typename Product::Left, Panels::kRows> chunks(a);
    const int64_t num_items = num_panels * chunks.count();
    // Rows, and a panel that is decoded.
    using Value = typename Product::Left::Value;
    char* memory = static_cast<char*>(aligned_alloc(64, chunks.bytes() + sizeof(uint32_t) * num_units * kPanel));
    if (memory == nullptr) {
        __atomic_store_n(&job.out_of_memory, true, __ATOMIC_RELAXED);
        return;
    }
    uint32_t* decoded = reinterpret_cast<uint32_t*>(memory + chunks.bytes());

    Panels panels;
    Ahead ahead(a.context);
    const char* weight = static_cast<const char*>(a.weight);
    for (int64_t item = job.panels.take(1); item < num_items; item = job.panels.take(1)) {
        const int64_t number = item % num_panels, later = item + job.num_threads;
        const Rows<Value>& rows = chunks.rows(item / num_panels, reinterpret_cast<Value*>(memory));
        const char* at = weight + number * panel_bytes;
        const Span next = later < num_items
                              ? Span{weight + later % num_panels * panel_bytes, panel_bytes}
                              : Span{a.following + (later - num_items) * a.following_bytes, a.following_bytes};
        const auto run = [&](auto panel) __attribute__((always_inline)) {
            run_panel<Panels, Element>(a, panels, number, panel, rows, next, ahead);
        };
        // For many rows a panel is decoded once for all of them. Of a coded one that saves nothing for fewer than 120.
        constexpr int kMostDecoded = (kForm == Form::kCoded && kWholeRows == Panels::kRows ? 10 : 1) * Panels::kRows;
        const auto decode_and_run = [&](auto source) __attribute__((always_inline)) {
            if constexpr (Panels::kDecodes)
                if (rows.count <= kMostDecoded) return run(Decoded<Product, decltype(source)>{source});
            for (int unit = 0; unit < num_units; unit += source.kUnits) {
                Words words[source.kUnits][kPanelVectors];
                source.decode(unit, 0, words);
                for (int i = 0; i < source.kUnits && unit + i < num_units; ++i)
                    memcpy(decoded + (int64_t)(unit + i) * kPanel, words[i], sizeof words[i]);
            }
            run(Plain<Product>{decoded});
        };
        if constexpr (kForm == Form::kPlain) {
            run(Plain<Product>{reinterpret_cast<const typename Product::Unit*>(at)});
        } else if constexpr (kForm == Form::kInt8) {
            decode_and_run(Quantized<Product::kPerUnit>{reinterpret_cast<const int8_t*>(at)});
        } else {
            const CodedPanel* panel = reinterpret_cast<const CodedPanel*>(at);
            decode_and_run(Coded{panel, a.exceptions + panel->first_exception});
        }
    }
    panels.end();
    free(memory);
}

template <class Panels, class Element>
Work linear_work_by(const Linear& a) {
    using Product = typename Panels::Product;
    if constexpr (Product::kPerUnit == 2)
        if (a.exceptions != nullptr) return run_panels<Panels, Element, Form::kCoded>;
    if (a.scales == nullptr) return run_panels<Panels, Element, Form::kPlain>;
    if constexpr (Product::Left::kDtype == Element::kDtype)
        return run_panels<Panels, Element, Form::kInt8>;
    else
        return run_panels<VectorPanels<InFloat32<Float32>>, Element, Form::kInt8>;
}

Work linear_work(const Linear& a) {
    if (a.dtype == kFloat32) return linear_work_by<VectorPanels<InFloat32<Float32>>, Float32>(a);
    if (a.dtype == kFloat16) return linear_work_by<VectorPanels<InFloat32<Float16>>, Float16>(a);
#if defined(TILES)
    if (TilePanels::fits(a.num_inputs)) return linear_work_by<TilePanels, Bfloat16>(a);
#endif
#if defined(__AVX512BF16__)
    return linear_work_by<VectorPanels<InBfloat16>, Bfloat16>(a);
#else
    return linear_work_by<VectorPanels<InFloat32<Bfloat16>>, Bfloat16>(a);
#endif
}

// Gives -1, or -2 without memory.
int linear(const Linear& a, const Threads& threads) {
    if (a.num_rows == 0) return -1;
    LinearJob job = {a, threads.num_threads, {0, a.num_panels()}, false};
    run_on(threads, job.panels.count > 1, linear_work(a), &job);
    return job.out_of_memory ? -2 : -1;
}

}  // namespace
