// Writes K and V of a step's tokens into their slots of the paged cache, in the layout that multiply.hpp reads and
// rounded to the cache's dtype; also fused with the rotation of queries and keys (RoFormer: Su et al. 2021,
// arXiv:2104.09864).
#pragma once

#include "pointwise.hpp"

namespace {

struct CacheWrite {
    Dtype dtype;        // of k, v, heads, cos and sin
    Dtype cache_dtype;  // of k_cache and v_cache
    void* k;            // the first K head of the first token
    void* v;
    int64_t k_stride;  // values from one token's heads to the next token's
    int64_t v_stride;
    void* k_cache;
    void* v_cache;
    int64_t block_stride;  // values from one block to the next, in either cache
    const int64_t* slot_mapping;
    int64_t num_slots;
    int num_tokens, block_size, num_kv_heads, head_dim;
    // For rotation only, else null: a token's heads that are rotated, num_heads of them, the K heads last.
    void* heads;
    int64_t heads_stride;
    int num_heads;
    const void* cos;  // [num_tokens][head_dim / 2]
    const void* sin;
    // The weights of the RMSNorms over each query head and each K head before rotation, or null.
    const void* q_norm;
    const void* k_norm;
    float epsilon;
};

struct CacheJob {
    CacheWrite a;
    Shares tokens;
};

// Writes `count` components of one head, from `first` on, into a slot.
template <class Value, int kUnit>
ALWAYS_INLINE void place(
    const CacheWrite& a, int64_t slot, int head, int first, int count, const Value* k, const Value* v
) {
    const int64_t block = slot / a.block_size, offset = slot % a.block_size;
    const int64_t start = block * a.block_stride + (int64_t)head * a.block_size * a.head_dim;
    Value* k_units = static_cast<Value*>(a.k_cache) + start + first * a.block_size + offset * kUnit;
    for (int i = 0; i < count; i += kUnit) memcpy(k_units + (int64_t)i * a.block_size, k + i, sizeof(Value[kUnit]));
    Value* v_units = static_cast<Value*>(a.v_cache) + start + (offset / kUnit * a.head_dim + first) * kUnit;
    for (int i = 0; i < count; ++i) v_units[i * kUnit + offset % kUnit] = v[i];
}

template <class Cache, int kUnit>
ALWAYS_INLINE void write_token(const CacheWrite& a, int64_t token) {
    using Value = typename Cache::Value;
    constexpr int kPiece = 64;
    const int64_t slot = a.slot_mapping[token];
    if (slot < 0) return;
    for (int head = 0; head < a.num_kv_heads; ++head) {
        const void* k = value_at(a.dtype, a.k, token * a.k_stride + (int64_t)head * a.head_dim);
        const void* v = value_at(a.dtype, a.v, token * a.v_stride + (int64_t)head * a.head_dim);
        if (a.dtype == Cache::kDtype) {
            place<Value, kUnit>(a, slot, head, 0, a.head_dim, static_cast<const Value*>(k), static_cast<const Value*>(v));
            continue;
        }
        for (int first = 0; first < a.head_dim; first += kPiece) {
            const int count = least(kPiece, a.head_dim - first);
            float wide[2][kPiece];
            Value rounded[2][kPiece];
            with_element(a.dtype, [&](auto element) {
                using Element = decltype(element);
                convert<Element, Float32>(static_cast<const typename Element::Value*>(k) + first, wide[0], count);
                convert<Element, Float32>(static_cast<const typename Element::Value*>(v) + first, wide[1], count);
            });
            convert<Float32, Cache>(wide[0], rounded[0], count);
            convert<Float32, Cache>(wide[1], rounded[1], count);
            place<Value, kUnit>(a, slot, head, first, count, rounded[0], rounded[1]);
        }
    }
}

// Rotates component i of a head with component i + head_dim / 2; in float32, rounded once.
template <class Element>
ALWAYS_INLINE void rotate_token(const CacheWrite& a, int64_t token) {
    using Value = typename Element::Value;
    const int half = a.head_dim / 2;
    const Value* cos = static_cast<const Value*>(a.cos) + token * half;
    const Value* sin = static_cast<const Value*>(a.sin) + token * half;
    for (int head = 0; head < a.num_heads; ++head) {
        Value* first = static_cast<Value*>(a.heads) + token * a.heads_stride + (int64_t)head * a.head_dim;
        Value* second = first + half;
        if (a.q_norm != nullptr) {
            const auto* norm = static_cast<const Value*>(head < a.num_heads - a.num_kv_heads ? a.q_norm : a.k_norm);
            normalize<Element>(first, static_cast<Value*>(nullptr), norm, a.epsilon, first, a.head_dim);
        }
        int i = 0;
        for (; i + kWidth <= half; i += kWidth) {
            const Floats x = Element::load(first + i), y = Element::load(second + i);
            const Floats c = Element::load(cos + i), s = Element::load(sin + i);
            Element::store(first + i, x * c - y * s);
            Element::store(second + i, y * c + x * s);
        }
        for (; i < half; ++i) {
            const float x = Element::widen(first[i]), y = Element::widen(second[i]);
            const float c = Element::widen(cos[i]), s = Element::widen(sin[i]);
            first[i] = Element::narrow(x * c - y * s);
            second[i] = Element::narrow(y * c + x * s);
        }
    }
}

template <class Cache, int kUnit>
void write_tokens(void* data, int thread) {
    constexpr int64_t kStep = 16;
    CacheJob& job = *static_cast<CacheJob*>(data);
    for (Taker tokens(job.tokens, thread); tokens.take(kStep);)
        for (int64_t token = tokens.first; token < tokens.end; ++token) {
            if (job.a.heads != nullptr)
                with_element(job.a.dtype, [&](auto element) { rotate_token<decltype(element)>(job.a, token); });
            write_token<Cache, kUnit>(job.a, token);
        }
}

Work cache_work(Dtype cache_dtype) {
    if (cache_dtype == kFloat32) return write_tokens<Float32, 1>;
    if (cache_dtype == kBfloat16) return write_tokens<Bfloat16, 2>;
    return write_tokens<Float16, 1>;
}

// The index of a token whose slot does not exist; -1 if there is none.
int find_misfit(const CacheWrite& a) {
    for (int token = 0; token < a.num_tokens; ++token)
        if (a.slot_mapping[token] >= a.num_slots) return token;
    return -1;
}

// Returns what `find_misfit` does.
int write_cache(const CacheWrite& a, const Threads& threads) {
    const int misfit = find_misfit(a);
    if (misfit >= 0) return misfit;
    CacheJob job = {a, Shares::evenly(a.num_tokens, threads.num_threads)};
    run_on(threads, a.num_tokens >= 48, cache_work(a.cache_dtype), &job);
    return -1;
}

}  // namespace
