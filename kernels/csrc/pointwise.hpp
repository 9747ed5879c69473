// The operations between the matrix products: RMSNorm, with the residual addition before it, and SwiGLU's gate.
#pragma once

#include "elements.hpp"
#include "threads.hpp"

namespace {

// With fewer values than this, waking the other threads costs more than they save.
constexpr int64_t kWorthwhile = 1 << 14;

struct Pointwise {
    Dtype dtype;     // of all tensors
    const void* x;   // [num_rows][size], or [num_rows][2 * size] for the gate
    void* residual;  // [num_rows][size], or null
    const void* weight;
    float epsilon;
    void* out;       // [num_rows][size]
    int64_t num_rows, size;
};

struct PointwiseJob {
    Pointwise a;
    int64_t step;  // rows at a time
    Shares rows;
};

// RMSNorm, Zhang & Sennrich 2019, arXiv:1910.07467; rounded where Hugging Face rounds: the sum, then x / rms(x), then
// its product with the weight. If there is a residual, x is added to it first; out may be x.
template <class Element, class Value = typename Element::Value>
ALWAYS_INLINE void normalize(
    const Value* x, Value* residual, const Value* weight, float epsilon, Value* out, int64_t size
) {
    const int64_t whole = size / kWidth * kWidth;
    Floats squares[4] = {};
    float rest = 0.0f;
    for (int64_t i = 0; i < whole; i += kWidth) {
        Floats value = Element::load(x + i);
        if (residual != nullptr) {
            value = Element::rounded(value + Element::load(residual + i));
            Element::store(residual + i, value);
        }
        squares[i / kWidth % 4] += value * value;
    }
    for (int64_t i = whole; i < size; ++i) {
        float value = Element::widen(x[i]);
        if (residual != nullptr) {
            residual[i] = Element::narrow(value + Element::widen(residual[i]));
            value = Element::widen(residual[i]);
        }
        rest += value * value;
    }
    const float mean = (sum_of((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest) / (float)size;
    const float inverse = 1.0f / __builtin_sqrtf(mean + epsilon);
    const Value* from = residual != nullptr ? residual : x;
    for (int64_t i = 0; i < whole; i += kWidth)
        Element::store(out + i, Element::rounded(Element::load(from + i) * inverse) * Element::load(weight + i));
    for (int64_t i = whole; i < size; ++i) {
        const Value normalized = Element::narrow(Element::widen(from[i]) * inverse);
        out[i] = Element::narrow(Element::widen(normalized) * Element::widen(weight[i]));
    }
}

template <class Element>
ALWAYS_INLINE void normalize_row(const Pointwise& a, int64_t row) {
    using Value = typename Element::Value;
    Value* residual = static_cast<Value*>(a.residual);
    normalize<Element>(
        static_cast<const Value*>(a.x) + row * a.size, residual == nullptr ? nullptr : residual + row * a.size,
        static_cast<const Value*>(a.weight), a.epsilon, static_cast<Value*>(a.out) + row * a.size, a.size
    );
}

// silu(first half) * second half, Shazeer 2020, arXiv:2002.05202; silu is rounded before the product.
template <class Element>
ALWAYS_INLINE void gate_row(const Pointwise& a, int64_t row) {
    using Value = typename Element::Value;
    const Value* gate = static_cast<const Value*>(a.x) + row * 2 * a.size;
    const Value* up = gate + a.size;
    Value* out = static_cast<Value*>(a.out) + row * a.size;
    int64_t i = 0;
    for (; i + kWidth <= a.size; i += kWidth) {
        const Floats x = Element::load(gate + i);
        Element::store(out + i, Element::rounded(silu(x)) * Element::load(up + i));
    }
    for (; i < a.size; ++i) {
        const float x = Element::widen(gate[i]);
        const Value gated = Element::narrow(silu(broadcast(x))[0]);
        out[i] = Element::narrow(Element::widen(gated) * Element::widen(up[i]));
    }
}

template <class Element, bool kGate>
void run_rows(void* data, int thread) {
    PointwiseJob& job = *static_cast<PointwiseJob*>(data);
    for (Taker rows(job.rows, thread); rows.take(job.step);)
        for (int64_t row = rows.first; row < rows.end; ++row)
            if constexpr (kGate)
                gate_row<Element>(job.a, row);
            else
                normalize_row<Element>(job.a, row);
}

PointwiseJob make_job(const Pointwise& a, int num_threads) {
    return {a, 1 + 4096 / (a.size + 1), Shares::evenly(a.num_rows, num_threads)};
}

template <bool kGate>
Work pointwise_work(Dtype dtype) {
    if (dtype == kFloat32) return run_rows<Float32, kGate>;
    if (dtype == kBfloat16) return run_rows<Bfloat16, kGate>;
    return run_rows<Float16, kGate>;
}

template <bool kGate>
void run_pointwise(const Pointwise& a, const Threads& threads) {
    PointwiseJob job = make_job(a, threads.num_threads);
    const bool worthwhile = a.num_rows > job.step && a.num_rows * a.size > kWorthwhile;
    run_on(threads, worthwhile, pointwise_work<kGate>(a.dtype), &job);
}

}  // namespace
