// The kinds of elements that tensors consist of, each as vectors and one by one: widened to float32, in which
// everything is computed, and rounded back to the nearest, ties to even. NaN stays NaN; overflow gives infinity.
#pragma once

#include "vector.hpp"

namespace {

// As kernels/cpu.py numbers them.
enum Dtype : int { kFloat32, kBfloat16, kFloat16 };

ALWAYS_INLINE uint32_t bits_of(float x) {
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    return word;
}

ALWAYS_INLINE float float_of(uint32_t word) {
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

struct Float32 {
    using Value = float;
    static constexpr Dtype kDtype = kFloat32;

    static ALWAYS_INLINE Floats load(const Value* from) { return load_floats(from); }
    static ALWAYS_INLINE void store(Value* to, Floats x) { store_floats(to, x); }
    static ALWAYS_INLINE float widen(Value x) { return x; }
    static ALWAYS_INLINE Value narrow(float x) { return x; }
    static ALWAYS_INLINE Floats rounded(Floats x) { return x; }
};

struct Bfloat16 {
    using Value = uint16_t;
    static constexpr Dtype kDtype = kBfloat16;

    static ALWAYS_INLINE Floats load(const Value* from) {
        return (Floats)(__builtin_convertvector(load_halves(from), Words) << 16);
    }
    // The upper halves of the result are zero. A NaN stays a NaN if it comes from arithmetic on values widened here:
    // its lower half is then zero.
    static ALWAYS_INLINE Words bits(Floats x) {
        const Words words = (Words)x;
        return (words + 0x7FFFu + ((words >> 16) & 1u)) >> 16;
    }
    static ALWAYS_INLINE void store(Value* to, Floats x) {
#if defined(__AVX512BF16__)
        store_halves(to, (Halves)_mm512_cvtneps_pbh((__m512)x));  // denormals, less than 2^-126, become zero
#elif defined(__AVX2__) && !defined(__AVX512F__)
        const __m256i words = (__m256i)bits(x);
        const __m128i lower = _mm256_castsi256_si128(words), upper = _mm256_extracti128_si256(words, 1);
        store_halves(to, (Halves)_mm_packus_epi32(lower, upper));
#else
        store_halves(to, __builtin_convertvector(bits(x), Halves));
#endif
    }
    static ALWAYS_INLINE float widen(Value x) { return float_of((uint32_t)x << 16); }
    static ALWAYS_INLINE Value narrow(float x) {
        const uint32_t word = bits_of(x);
        return x == x ? (Value)((word + 0x7FFFu + ((word >> 16) & 1u)) >> 16) : (Value)0x7FC0u;
    }
    static ALWAYS_INLINE Floats rounded(Floats x) { return (Floats)(bits(x) << 16); }
};

struct Float16 {
    using Value = uint16_t;
    static constexpr Dtype kDtype = kFloat16;

    static ALWAYS_INLINE Floats widen(Halves halves) {
#if defined(__AVX512F__)
        return (Floats)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__)
        return (Floats)_mm256_cvtph_ps((__m128i)halves);
#else
        const Words words = __builtin_convertvector(halves, Words);
        const Words shifted = (words & 0x7FFFu) << 13;  // exponent and mantissa where float32 has them
        const Words exponent = shifted & 0x0F800000u;
        const Words normal = shifted + ((127u - 15u) << 23);
        // Denormals have no hidden 1: their mantissa counts in steps of 2^-24.
        const Words small = (Words)((Floats)(shifted + (113u << 23)) - 6.103515625e-5f);
        const Words large = normal + ((128u - 16u) << 23);  // infinite, or NaN
        const Words magnitude = exponent == 0x0F800000u ? large : exponent == 0u ? small : normal;
        return (Floats)(magnitude | (words & 0x8000u) << 16);
#endif
    }
    static ALWAYS_INLINE Halves narrow(Floats x) {
#if defined(__AVX512F__)
        return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
        return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
        const Integers word = (Integers)x & 0x7FFFFFFF;
        const Integers normal = (word - ((127 - 15) << 23) + 0xFFF + ((word >> 13) & 1)) >> 13;
        // Denormals: the sum has steps of 2^-24, so the addition rounds to them.
        const Integers small = (Integers)((Floats)word + 0.5f) - 0x3F000000;
        const Integers large = word > 0x7F800000 ? Integers{} + 0x7E00 : Integers{} + 0x7C00;
        const Integers magnitude = word >= (143 << 23) ? large : word < (113 << 23) ? small : normal;
        return __builtin_convertvector((Words)magnitude | ((Words)x >> 16 & 0x8000u), Halves);
#endif
    }
    static ALWAYS_INLINE Floats load(const Value* from) { return widen(load_halves(from)); }
    static ALWAYS_INLINE void store(Value* to, Floats x) { store_halves(to, narrow(x)); }
    static ALWAYS_INLINE float widen(Value x) { return widen(Halves{x})[0]; }
    static ALWAYS_INLINE Value narrow(float x) { return narrow(Floats{x})[0]; }
    static ALWAYS_INLINE Floats rounded(Floats x) { return widen(narrow(x)); }
};

// Calls `body` with the element type of that dtype.
template <class Body>
ALWAYS_INLINE void with_element(Dtype dtype, Body body) {
    if (dtype == kFloat32) return body(Float32{});
    if (dtype == kBfloat16) return body(Bfloat16{});
    body(Float16{});
}

ALWAYS_INLINE int size_of(Dtype dtype) { return dtype == kFloat32 ? 4 : 2; }

ALWAYS_INLINE const void* value_at(Dtype dtype, const void* values, int64_t index) {
    return static_cast<const char*>(values) + index * size_of(dtype);
}

// Copies `count` values of one kind to another kind.
template <class From, class To>
ALWAYS_INLINE void convert(const typename From::Value* from, typename To::Value* to, int count) {
    if constexpr (From::kDtype == To::kDtype) {
        memcpy(to, from, count * sizeof *to);
    } else {
        int i = 0;
        for (; i + kWidth <= count; i += kWidth) {
            Floats x = From::load(from + i);
            if constexpr (From::kDtype == kFloat32) x = x == x ? x : broadcast(__builtin_nanf(""));  // one with known bits
            To::store(to + i, x);
        }
        for (; i < count; ++i) to[i] = To::narrow(From::widen(from[i]));
    }
}

}  // namespace
