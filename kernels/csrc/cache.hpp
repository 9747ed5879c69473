// K and V of a step's tokens into their slots of the paged cache, in the layout that multiply.hpp reads; and the same
// fused with the rotation of queries and keys (RoFormer: Su et al. 2021, arXiv:2104.09864).
#pragma once

#include "threads.hpp"
#include "vector.hpp"

namespace {

struct CacheWrite {
    void* k;           // the first K head of the first token; read, and rotated in place by `rotate`
    void* v;
    int64_t k_stride;  // values between a token's heads and the next one's
    int64_t v_stride;
    void* k_cache;
    void* v_cache;
    const int64_t* slot_mapping;
    int64_t num_slots;
    int num_tokens, block_size, num_kv_heads, head_dim;
    // Only to rotate: all of a token's heads that turn, num_heads of them, the K heads last.
    void* heads;
    int64_t heads_stride;
    int num_heads;
    const void* cos;  // [num_tokens][head_dim / 2]
    const void* sin;
};

struct CacheJob {
    CacheWrite a;
    Counter tokens;
};

template <class Element>
ALWAYS_INLINE void write_token(const CacheWrite& a, int64_t token) {
    using Value = typename Element::Value;
    constexpr int kUnit = Element::kPerUnit;
    const int64_t slot = a.slot_mapping[token];
    if (slot < 0) return;
    const int64_t block = slot / a.block_size, offset = slot % a.block_size;
    for (int head = 0; head < a.num_kv_heads; ++head) {
        const int64_t start = (block * a.num_kv_heads + head) * a.block_size * a.head_dim;
        const Value* k = static_cast<const Value*>(a.k) + token * a.k_stride + (int64_t)head * a.head_dim;
        const Value* v = static_cast<const Value*>(a.v) + token * a.v_stride + (int64_t)head * a.head_dim;
        Value* k_block = static_cast<Value*>(a.k_cache) + start + offset * kUnit;
        for (int unit = 0; unit < a.head_dim / kUnit; ++unit)
            memcpy(k_block + (int64_t)unit * a.block_size * kUnit, k + unit * kUnit, kUnit * sizeof(Value));
        Value* v_block = static_cast<Value*>(a.v_cache) + start + offset / kUnit * a.head_dim * kUnit + offset % kUnit;
        for (int i = 0; i < a.head_dim; ++i) v_block[i * kUnit] = v[i];
    }
}

// Component i of a head turns with component i + head_dim / 2; in float32, rounded once.
template <class Element>
ALWAYS_INLINE void rotate_token(const CacheWrite& a, int64_t token) {
    using Value = typename Element::Value;
    const int half = a.head_dim / 2;
    const Value* cos = static_cast<const Value*>(a.cos) + token * half;
    const Value* sin = static_cast<const Value*>(a.sin) + token * half;
    for (int head = 0; head < a.num_heads; ++head) {
        Value* first = static_cast<Value*>(a.heads) + token * a.heads_stride + (int64_t)head * a.head_dim;
        Value* second = first + half;
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

template <class Element>
void write_tokens(void* data) {
    constexpr int64_t kStep = 16;
    CacheJob& job = *static_cast<CacheJob*>(data);
    for (int64_t token = job.tokens.take(kStep); token < job.tokens.count; token = job.tokens.take(kStep))
        for (int64_t i = token; i < token + kStep && i < job.tokens.count; ++i) {
            if (job.a.heads != nullptr) rotate_token<Element>(job.a, i);
            write_token<Element>(job.a, i);
        }
}

// Gives -1, or the number of a token whose slot does not exist.
template <class Element>
int write_cache(const CacheWrite& a, const Threads& threads) {
    for (int token = 0; token < a.num_tokens; ++token)
        if (a.slot_mapping[token] >= a.num_slots) return token;
    CacheJob job = {a, {0, a.num_tokens}};
    run_on(threads, a.num_tokens >= 48, write_tokens<Element>, &job);
    return -1;
}

}  // namespace
