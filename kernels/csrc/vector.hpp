// Vectors of one instruction-set level, and the two kinds of elements that the kernels work on.
//
// level.cpp is compiled once for each level with that level's -m flags, so everything here is one source for all of
// them: the vectors are GCC's and clang's own (vector_size), which become SSE2 or NEON, AVX2 or AVX-512 by the flags.
// Only the bfloat16 dot product of AVX512_BF16 and a masked load have to be asked for by name.
//
// Nothing here may include a C++ standard header: an inline function of it that one level compiles with AVX-512 could
// be the copy that the linker keeps for all of them. For the same reason everything lives in an unnamed namespace.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace {

// Accumulators of one tile of a product: rows x columns, in vectors. AVX-512 has 32 registers, the others count on 16;
// without AVX512_BF16 a vector of bfloat16 pairs takes two.
#if defined(__AVX512F__)
constexpr int kWidth = 16;  // lanes of a vector
#if defined(__AVX512BF16__)
constexpr int kMaxRows = 6;
#else
constexpr int kMaxRows = 4;
#endif
constexpr int kMaxColumns = 4;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kMaxRows = 4;
constexpr int kMaxColumns = 2;
#else
constexpr int kWidth = 4;
constexpr int kMaxRows = 4;
constexpr int kMaxColumns = 2;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));

constexpr float kInfinity = __builtin_inff();

ALWAYS_INLINE int least(int a, int b) { return a < b ? a : b; }
ALWAYS_INLINE int round_up(int count, int unit) { return (count + unit - 1) / unit * unit; }
ALWAYS_INLINE Floats larger_of(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}
ALWAYS_INLINE Floats broadcast(float value) { return Floats{} + value; }

ALWAYS_INLINE Words load_words(const void* from) {
    Words words;
    memcpy(&words, from, sizeof words);
    return words;
}

// The first `lanes` of a vector; the rest are zero, and the memory behind them is not touched.
ALWAYS_INLINE Words load_words(const void* from, int lanes) {
#if defined(__AVX512F__)
    return (Words)_mm512_maskz_loadu_epi32((__mmask16)((1u << lanes) - 1), from);
#else
    Words words = {};
    for (int lane = 0; lane < lanes; ++lane) words[lane] = static_cast<const uint32_t*>(from)[lane];
    return words;
#endif
}

ALWAYS_INLINE Floats load_floats(const float* from) { return (Floats)load_words(from); }
ALWAYS_INLINE void store_floats(float* to, Floats value) { memcpy(to, &value, sizeof value); }

ALWAYS_INLINE void store_floats(float* to, Floats value, int lanes) {
    if (lanes == kWidth) return store_floats(to, value);
    for (int lane = 0; lane < lanes; ++lane) to[lane] = value[lane];
}

// e^x with an error of some 1e-7 of it: x = n ln 2 + r, a polynomial in r, and n added to the exponent (Cody & Waite
// 1980). Below -87 it gives e^-87, which is as good as nothing; NaN stays NaN, and 0 gives exactly 1.
ALWAYS_INLINE Floats exponential(Floats x) {
#if defined(__AVX512F__)
    x = (Floats)_mm512_max_ps(_mm512_set1_ps(-87.0f), (__m512)x);  // of a NaN and a number, these give the second
    x = (Floats)_mm512_min_ps(_mm512_set1_ps(88.0f), (__m512)x);
#else
    x = x < -87.0f ? broadcast(-87.0f) : x;
    x = x > 88.0f ? broadcast(88.0f) : x;
#endif
    const Floats rounder = broadcast(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to an integer
    const Floats shifted = x * 1.44269504f + rounder;
    const Floats n = shifted - rounder;
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats y = broadcast(1.9875691500e-4f);  // Cephes' expf
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const Words scale = (((Words)shifted - 0x4B400000u) + 127u) << 23;
    return y * (Floats)scale;
}

ALWAYS_INLINE float sum_of(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    // By halves, always in the same order.
    float lanes[kWidth];
    memcpy(lanes, &x, sizeof lanes);
    for (int half = kWidth / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
#endif
}

ALWAYS_INLINE float largest_of(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int lane = 1; lane < kWidth; ++lane) most = x[lane] > most ? x[lane] : most;
    return most;
#endif
}

// A unit is what a dot product takes in at once: one float32, or two neighbouring bfloat16. It has 32 bits in either
// case, so a row of units is an array of uint32.
struct Float32 {
    using Value = float;
    static constexpr int kPerUnit = 1;

    struct Loaded {
        Floats values;
    };
    static ALWAYS_INLINE Loaded unpack(Words words) { return {(Floats)words}; }
    static ALWAYS_INLINE Loaded unpack_first(Words words) { return unpack(words); }
    static ALWAYS_INLINE Floats multiply_add(Floats sum, Loaded b, uint32_t a) {
        float value;
        memcpy(&value, &a, sizeof value);
        return sum + b.values * value;
    }

    static ALWAYS_INLINE Floats load(const Value* from) { return load_floats(from); }
    static ALWAYS_INLINE void store(Value* to, Floats x) { store_floats(to, x); }
    static ALWAYS_INLINE float widen(Value x) { return x; }
    static ALWAYS_INLINE Value narrow(float x) { return x; }
    static ALWAYS_INLINE Floats rounded(Floats x) { return x; }
};

struct Bfloat16 {
    using Value = uint16_t;
    static constexpr int kPerUnit = 2;

#if defined(__AVX512BF16__)
    struct Loaded {
        Words words;
    };
    static ALWAYS_INLINE Loaded unpack(Words words) { return {words}; }
    static ALWAYS_INLINE Floats multiply_add(Floats sum, Loaded b, uint32_t a) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b.words, (__m512bh)_mm512_set1_epi32((int)a));
    }
#else
    struct Loaded {
        Floats first, second;
    };
    static ALWAYS_INLINE Loaded unpack(Words words) { return {(Floats)(words << 16), (Floats)(words & 0xFFFF0000u)}; }
    static ALWAYS_INLINE Floats multiply_add(Floats sum, Loaded b, uint32_t a) {
        const uint32_t bits[2] = {a << 16, a & 0xFFFF0000u};
        float values[2];
        memcpy(values, bits, sizeof values);
        return sum + b.second * values[1] + b.first * values[0];
    }
#endif
    // Of a pair whose second half was never written: it counts as zero, whatever bits stand there.
    static ALWAYS_INLINE Loaded unpack_first(Words words) { return unpack(words & 0xFFFFu); }

    static ALWAYS_INLINE Floats load(const Value* from) {
        Halves halves;
        memcpy(&halves, from, sizeof halves);
        return (Floats)(__builtin_convertvector(halves, Words) << 16);
    }
    // To the nearest, ties to even; a NaN stays one.
    static ALWAYS_INLINE Words bits(Floats x) {
        const Words words = (Words)x;
        const Words nearest = (words + 0x7FFFu + ((words >> 16) & 1u)) >> 16;
        return x == x ? nearest : Words{} + 0x7FC0u;
    }
    static ALWAYS_INLINE void store(Value* to, Floats x) {
#if defined(__AVX512BF16__)
        const __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
#else
        const Halves halves = __builtin_convertvector(bits(x), Halves);
#endif
        memcpy(to, &halves, sizeof halves);
    }
    static ALWAYS_INLINE float widen(Value x) {
        const uint32_t word = (uint32_t)x << 16;
        float value;
        memcpy(&value, &word, sizeof value);
        return value;
    }
    static ALWAYS_INLINE Value narrow(float x) {
        uint32_t word;
        memcpy(&word, &x, sizeof word);
        return x == x ? (Value)((word + 0x7FFFu + ((word >> 16) & 1u)) >> 16) : (Value)0x7FC0u;
    }
    static ALWAYS_INLINE Floats rounded(Floats x) { return (Floats)(bits(x) << 16); }
};

}  // namespace
