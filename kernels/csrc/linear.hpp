// Linear layers: y = x W^T + b for a batch of tokens, on weights that were packed once.
//
// The weight is packed in panels of 32 outputs, and a panel stays in the cache while rows of x go past it: all of them,
// or, if they are converted before they are multiplied, as many as stay in the cache too. At small batches memory is
// the bottleneck, so a thread that works on one panel prefetches the one that it will probably get next.
//
// In a quantized weight each output has a scale, and each value is an int8, [inputs][32] in each panel, or takes 4 bits
// (int4.hpp). Every other dtype holds an int8 exactly: the sum runs over the integers themselves, and is multiplied by
// the scale once.
// A bfloat16 weight may be coded (coded.hpp): its panels are shorter, and its values the same. Or it may be held as
// integers (integers.hpp): its panels are as short, and many rows take less time.
//
// An output is one sum, made in one order (panels.hpp): neither the batch nor the threads change a bit of it.
#pragma once

#include <stdlib.h>

#include "int4.hpp"
#include "integers.hpp"
#include "panels.hpp"
#include "scores.hpp"
#include "threads.hpp"

namespace {

// A weight's layout in memory, as kernels/cpu_linear.py numbers it: in the units that are multiplied,
// [panels][units][32]; in int8, [panels][num_inputs][32]; or encoded (coded.hpp, integers.hpp, int4.hpp).
enum class Form : int { kPlain, kInt8, kCoded, kIntegers, kInt4 };

struct Linear {
    Dtype dtype;          // of x, of the bias, of the weight unless it is quantized, and of out unless it is widened
    const void* x;        // [num_rows][num_inputs], rows x_stride values apart
    int64_t x_stride;
    Form form;            // of the weight
    const void* weight;   // its panels
    const float* scales;  // one per output, padded to whole panels, if it is quantized or integers; else null
    const Exception* exceptions;  // if it is coded; else null
    const void* bias;     // one per output, or null
    void* out;            // [num_rows][num_outputs], or [num_outputs / 2] if gated; rows out_stride values apart
    int64_t out_stride;
    int num_rows, num_outputs, num_inputs;
    bool gated;    // a panel is 16 gates and the 16 values that they gate; the result is silu(gate) * value
    bool widened;  // out is float32, and the sums are not rounded
    // What attention reads next, or null; and how many bytes of it are prefetched with each panel.
    ContextAhead* context;
    int64_t context_bytes;
    // The scores, if the outputs are logits of which nothing else is wanted: they are not stored then. Else null.
    const PanelScores* scores;

    int num_panels() const { return (num_outputs + kPanel - 1) / kPanel; }
    int64_t panel_bytes() const {
        switch (form) {
            case Form::kCoded: return CodedPanel::bytes(num_inputs);
            case Form::kIntegers: return integer_panel_bytes(num_inputs);
            case Form::kInt4: return int4_panel_bytes(num_inputs);
            case Form::kInt8: return (int64_t)num_inputs * kPanel;
            default: return (int64_t)num_inputs * kPanel * size_of(dtype);
        }
    }
};

// Shared out in items, each one panel with one chunk of rows: all panels with the first chunk, then all with the next.
struct LinearJob {
    Linear a;
    Work work;
    int chunk_rows;  // rows of each chunk but the last
    Shares items;
    bool out_of_memory;
    const LinearJob* following;  // or null; its first panels are prefetched during the last ones of this job

    // The panel of an item.
    Span panel(int64_t item) const {
        const int64_t bytes = a.panel_bytes();
        return {static_cast<const char*>(a.weight) + item % a.num_panels() * bytes, bytes};
    }
    // The panel that a thread will begin the following job with.
    Span expect_following(int thread) const {
        if (following == nullptr) return {};
        return following->panel(following->items.shares[following->items.of(thread)].left.next);
    }
};

// The epilogue: turns the sums of some rows over a panel into outputs.
template <class Element>
ALWAYS_INLINE void finish_rows(const Linear& a, int64_t first_row, int num_rows, int64_t panel, float (*sums)[kPanel]) {
    using Value = typename Element::Value;
    const int first = (int)panel * kPanel, count = least(kPanel, a.num_outputs - first);
    float bias[kPanel] = {};
    for (int i = 0; a.bias != nullptr && i < count; ++i)
        bias[i] = Element::widen(static_cast<const Value*>(a.bias)[first + i]);
    const auto finished = [&](int row, int i) __attribute__((always_inline)) {
        const Floats x = load_floats(sums[row] + i);
        if (a.scales == nullptr) return a.bias != nullptr ? x + load_floats(bias + i) : x;
        const Floats scale = load_floats(a.scales + first + i);
        return a.bias != nullptr ? multiply_add(x, scale, load_floats(bias + i)) : x * scale;
    };
    // Stores them as values of that kind, at their places in `out`.
    const auto put = [&](auto out_element) __attribute__((always_inline)) {
        using Out = decltype(out_element);
        auto* out = static_cast<typename Out::Value*>(a.out) + first_row * a.out_stride + first;
        for (int row = 0; row < num_rows; ++row, out += a.out_stride)
            if (count == kPanel) {
#pragma GCC unroll 8
                for (int i = 0; i < kPanel; i += kWidth) Out::store(out + i, finished(row, i));
            } else {
                typename Out::Value values[kPanel];
                for (int i = 0; i < kPanel; i += kWidth) Out::store(values + i, finished(row, i));
                memcpy(out, values, count * sizeof *out);
            }
    };
    if (a.scores != nullptr) {
        for (int row = 0; row < num_rows; ++row) {
#pragma GCC unroll 8
            for (int i = 0; i < kPanel; i += kWidth) store_floats(sums[row] + i, finished(row, i));
            fill_panel(sums[row], count);
        }
        score_panels(sums, num_rows, a.scores->of_row(first_row).behind(panel), a.scores->stride);
    } else if (a.gated) {
        Value* out = static_cast<Value*>(a.out) + first_row * a.out_stride + first / 2;
        for (int row = 0; row < num_rows; ++row, out += a.out_stride)
#pragma GCC unroll 2
            for (int i = 0; i < kPanel / 2; i += kWidth) {
                const Floats gate = Element::rounded(finished(row, i));
                const Floats value = Element::rounded(finished(row, kPanel / 2 + i));
                Element::store(out + i, Element::rounded(silu(gate)) * value);
            }
    } else if (a.widened) {
        put(Float32{});
    } else {
        put(Element{});
    }
}

// Rows in the form in which they are multiplied.
template <class Value>
struct Rows {
    const Value* x;
    int64_t stride;
    int first, count;
};

template <class Left, class Element>
constexpr bool converts = !kIsSame<Left, Element>;

// The rows of x in chunks. If they are of another kind than is multiplied, each thread converts them, a chunk at a
// time, once for all of its panels.
template <class Element, class Left>
class RowChunks {
  public:
    using Value = typename Left::Value;

    RowChunks(const Linear& a, int size) : a_(a), size_(size) {}

    int64_t bytes() const { return kConverts ? whole_lines((int64_t)sizeof(Value) * size_ * stride()) : 0; }

    // The rows of one chunk; if converted, in `memory`, where they are reused if the same chunk was asked for last.
    const Rows<Value>& rows(int64_t chunk, Value* memory) {
        const int first = (int)chunk * size_, count = least(size_, a_.num_rows - first);
        if (rows_.count > 0 && rows_.first == first) return rows_;
        const auto* x = static_cast<const typename Element::Value*>(a_.x) + first * a_.x_stride;
        if constexpr (kConverts) {
            convert_rows<Element, Left>(x, a_.x_stride, memory, count, a_.num_inputs);
            rows_ = {memory, stride(), first, count};
        } else {
            rows_ = {x, a_.x_stride, first, count};
        }
        return rows_;
    }

  private:
    static constexpr bool kConverts = converts<Left, Element>;

    int64_t stride() const { return num_values<Left>(a_.num_inputs); }

    const Linear& a_;
    const int size_;
    Rows<Value> rows_ = {};
};

// Multiplies all these rows with one panel and prefetches `next`. Calls `take_next` before it writes the last outputs.
template <class Panels, class Element, class Panel, class TakeNext>
ALWAYS_INLINE void run_panel(
    const Linear& a, Panels& panels, int64_t number, Panel panel,
    const Rows<typename Panels::Product::Left::Value>& rows, Span next, Ahead& ahead, TakeNext take_next
) {
    const int num_units = a.num_inputs / Panels::Product::kPerUnit;
    const int num_blocks = (rows.count + Panels::kRows - 1) / Panels::kRows;
    const int64_t next_bytes = whole_lines(next.bytes / num_blocks);  // per block of rows
    const int64_t context_bytes = a.context_bytes * rows.count / a.num_rows / num_blocks;
    float results[Panels::kRows][kPanel] __attribute__((aligned(64)));
    for (int row = 0; row < rows.count; row += Panels::kRows, next.at += next_bytes) {
        const int count = least(Panels::kRows, rows.count - row);
        ahead.begin({next.at, next_bytes}, context_bytes);
        panels.multiply(count, rows.x + row * rows.stride, rows.stride, panel, num_units, ahead, results);
        if (row + count == rows.count) take_next();
        finish_rows<Element>(a, rows.first + row, count, number, results);
    }
}

template <class Panels, class Element, Form kForm>
void run_panels(void* data, int thread) {
    using Product = typename Panels::Product;
    LinearJob& job = *static_cast<LinearJob*>(data);
    const Linear& a = job.a;
    const int num_units = a.num_inputs / Product::kPerUnit;
    const int64_t num_panels = a.num_panels();
    RowChunks<Element, typename Product::Left> chunks(a, job.chunk_rows);
    // For more rows than this a panel is decoded once, into memory.
    constexpr int kMostDecoding = kForm == Form::kInt8 ? Panels::kRows : Panels::kMostDecodingRows;
    constexpr bool kStoresPanel = kForm != Form::kPlain && kMostDecoding < kConvertedRows;
    // Memory for converted rows, and for such a panel.
    using Value = typename Product::Left::Value;
    const int64_t panel_values = kStoresPanel ? (int64_t)num_units * kPanel : 0;
    char* memory = static_cast<char*>(aligned_alloc(64, chunks.bytes() + sizeof(uint32_t) * panel_values + 64));
    if (memory == nullptr) {
        __atomic_store_n(&job.out_of_memory, true, __ATOMIC_RELAXED);
        return;
    }
    uint32_t* decoded = reinterpret_cast<uint32_t*>(memory + chunks.bytes());

    Panels panels;
    Ahead ahead(a.context, thread);
    Taker items(job.items, thread);
    // An atomic operation waits for all earlier stores, so the next panel is taken before the last outputs are written.
    for (bool has_item = items.take(1); has_item;) {
        const auto take_next = [&] { has_item = items.take(1); };
        const int64_t number = items.first % num_panels;
        const Rows<Value>& rows = chunks.rows(items.first / num_panels, reinterpret_cast<Value*>(memory));
        const char* at = job.panel(number).at;
        const Span next = items.expected() >= 0 ? job.panel(items.expected()) : job.expect_following(thread);
        const auto run = [&](auto panel) __attribute__((always_inline)) {
            run_panel<Panels, Element>(a, panels, number, panel, rows, next, ahead, take_next);
        };
        const auto decode_and_run = [&](auto source) __attribute__((always_inline)) {
            if constexpr (Panels::kDecodes)
                if (rows.count <= kMostDecoding) return run(Decoded<Product, decltype(source)>{source});
            if constexpr (kStoresPanel) {
                for (int unit = 0; unit < num_units; unit += source.kUnits) {
                    Words words[source.kUnits][kPanelVectors];
                    source.decode(unit, 0, words);
                    for (int i = 0; i < source.kUnits && unit + i < num_units; ++i)
                        memcpy(decoded + (int64_t)(unit + i) * kPanel, words[i], sizeof words[i]);
                }
                run(Plain<Product>{decoded});
            }
        };
        if constexpr (kForm == Form::kPlain) {
            run(Plain<Product>{reinterpret_cast<const typename Product::Unit*>(at)});
        } else if constexpr (kForm == Form::kInt8) {
            decode_and_run(typename Panels::Int8Source{reinterpret_cast<const int8_t*>(at)});
        } else if constexpr (kForm == Form::kCoded) {
            const CodedPanel* panel = reinterpret_cast<const CodedPanel*>(at);
            decode_and_run(Coded{panel, a.exceptions + panel->first_exception});
#if defined(INTEGERS)
        } else if constexpr (kForm == Form::kInt4) {
            decode_and_run(Int4Units{reinterpret_cast<const Int4Group*>(at)});
        } else {
            decode_and_run(IntegerUnits{reinterpret_cast<const IntegerPair*>(at)});
#endif
        }
    }
    panels.end();
    free(memory);
}

struct LinearKernel {
    Work work;
    bool converts;  // whether it converts rows
    int tile_rows;
};

template <class Panels, class Element, Form kForm>
constexpr LinearKernel linear_kernel = {
    run_panels<Panels, Element, kForm>, converts<typename Panels::Product::Left, Element>, Panels::kTileRows
};

template <class Panels, class Element>
LinearKernel choose_kernel_by(const Linear& a) {
    using Product = typename Panels::Product;
    if constexpr (Product::kPerUnit == 2)
        if (a.form == Form::kCoded) return linear_kernel<Panels, Element, Form::kCoded>;
    if (a.form == Form::kPlain) return linear_kernel<Panels, Element, Form::kPlain>;
    if constexpr (Product::Left::kDtype == Element::kDtype)
        return linear_kernel<Panels, Element, Form::kInt8>;
    else
        return linear_kernel<VectorPanels<InFloat32<Float32>>, Element, Form::kInt8>;
}

LinearKernel choose_kernel(const Linear& a) {
    if (a.dtype == kFloat32) return choose_kernel_by<VectorPanels<InFloat32<Float32>>, Float32>(a);
    if (a.dtype == kFloat16) return choose_kernel_by<VectorPanels<InFloat32<Float16>>, Float16>(a);
#if defined(INTEGERS)
    if (a.form == Form::kIntegers) return linear_kernel<IntegerPanels, Bfloat16, Form::kIntegers>;
    if (a.form == Form::kInt4) return linear_kernel<IntegerPanels, Bfloat16, Form::kInt4>;
    if (a.form == Form::kInt8 && IntegerPanels::fits(a.num_inputs))
        return linear_kernel<IntegerPanels, Bfloat16, Form::kInt8>;
#endif
#if defined(TILES)
    if (TilePanels::fits(a.num_inputs)) return choose_kernel_by<TilePanels, Bfloat16>(a);
#endif
#if defined(__AVX512BF16__)
    return choose_kernel_by<VectorPanels<InBfloat16>, Bfloat16>(a);
#else
    return choose_kernel_by<VectorPanels<InFloat32<Bfloat16>>, Bfloat16>(a);
#endif
}

// Chunks are about equal. If a panel's outputs fill only half a cache line of a row, shares are whole pairs of panels,
// so that two threads hardly ever write to the same line.
LinearJob make_job(const Linear& a, int num_threads) {
    const LinearKernel kernel = choose_kernel(a);
    const int num_chunks = kernel.converts ? (a.num_rows + kConvertedRows - 1) / kConvertedRows : 1;
    const int rows_each = num_chunks > 1 ? (a.num_rows + num_chunks - 1) / num_chunks : a.num_rows;
    // Fewer rows than a tile has make a chunk of their own size, and take no more memory than that.
    const int chunk_rows = rows_each < kernel.tile_rows ? rows_each : round_up(rows_each, kernel.tile_rows);
    const int unit = a.gated && size_of(a.dtype) == 2 ? 2 : 1;
    const int64_t num_items = (int64_t)a.num_panels() * num_chunks;
    return {a, kernel.work, chunk_rows, Shares::evenly(num_items, num_threads, unit), false, nullptr};
}

// Returns -1, or -2 if out of memory.
int linear(const Linear& a, const Threads& threads) {
    if (a.num_rows == 0) return -1;
    LinearJob job = make_job(a, threads.num_threads);
    run_on(threads, a.num_panels() > 1, job.work, &job);
    return job.out_of_memory ? -2 : -1;
}

// Writes the scores of the outputs, which are not stored themselves. Returns as `linear` does.
int score_outputs(Linear a, const RowScores& scores, const Threads& threads) {
    const PanelScores panels = PanelScores::make(a.num_rows, a.num_outputs);
    a.scores = &panels;
    const int result = panels.most != nullptr ? linear(a, threads) : -2;
    if (result == -1) run_scores({nullptr, 0, a.num_outputs, panels, scores, {0, a.num_rows}}, threads);
    free(panels.most);
    return result;
}

}  // namespace
