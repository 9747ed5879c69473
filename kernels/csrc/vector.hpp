// Vectors of one instruction-set level.
//
// level.cpp is compiled once for each level with that level's -m flags, so everything here is one source for all of
// them: the vectors are GCC's and clang's own (vector_size), which become SSE2 or NEON, AVX2 or AVX-512 by the flags.
// Only what they cannot express is written as intrinsics.
//
// Nothing here may include a C++ standard header: an inline function from it that one level compiles with AVX-512 could
// be the copy that the linker keeps for all of them. For the same reason everything lives in an unnamed namespace.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // lanes of a vector
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Integers __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));

constexpr float kInfinity = __builtin_inff();

// A number as a type.
template <int kNumber>
struct Number {
    static constexpr int value = kNumber;
};

template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

ALWAYS_INLINE int least(int a, int b) { return a < b ? a : b; }
ALWAYS_INLINE int round_up(int count, int unit) { return (count + unit - 1) / unit * unit; }
ALWAYS_INLINE int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }  // of the cache
ALWAYS_INLINE Floats broadcast(float value) { return Floats{} + value; }

// The larger one in each lane; `b` where either is NaN.
ALWAYS_INLINE Floats larger_of(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)  // GCC 12 would compare and choose
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

ALWAYS_INLINE Floats absolute(Floats x) { return (Floats)((Words)x & 0x7FFFFFFFu); }

// Vectors at any address, over objects of any type.
typedef Floats FloatsAnywhere __attribute__((aligned(1), may_alias));
typedef Words WordsAnywhere __attribute__((aligned(1), may_alias));
typedef Halves HalvesAnywhere __attribute__((aligned(1), may_alias));

ALWAYS_INLINE Words load_words(const void* from) { return *static_cast<const WordsAnywhere*>(from); }
ALWAYS_INLINE Halves load_halves(const void* from) { return *static_cast<const HalvesAnywhere*>(from); }

// The first `lanes` lanes of a vector; the rest are zero, and the memory past them is not touched.
ALWAYS_INLINE Words load_words(const uint32_t* from, int lanes) {
#if defined(__AVX512F__)
    return (Words)_mm512_maskz_loadu_epi32((__mmask16)((1u << lanes) - 1), from);
#else
    Words words = {};
    for (int lane = 0; lane < lanes; ++lane) words[lane] = from[lane];
    return words;
#endif
}

ALWAYS_INLINE Halves load_halves(const uint16_t* from, int lanes) {
#if defined(__AVX512F__)
    return (Halves)_mm256_maskz_loadu_epi16((__mmask16)((1u << lanes) - 1), from);
#else
    Halves halves = {};
    for (int lane = 0; lane < lanes; ++lane) halves[lane] = from[lane];
    return halves;
#endif
}

ALWAYS_INLINE Floats load_floats(const float* from) { return (Floats)load_words(from); }
ALWAYS_INLINE void store_floats(float* to, Floats value) { *(FloatsAnywhere*)to = value; }
ALWAYS_INLINE void store_halves(uint16_t* to, Halves value) { *(HalvesAnywhere*)to = value; }

ALWAYS_INLINE void store_floats(float* to, Floats value, int lanes) {
    if (lanes == kWidth) return store_floats(to, value);
    for (int lane = 0; lane < lanes; ++lane) to[lane] = value[lane];
}

#if defined(__AVX2__)
// Rounded to the nearest, ties to even.
ALWAYS_INLINE Integers nearest_integers(Floats x) {
#if defined(__AVX512F__)
    return (Integers)_mm512_cvtps_epi32((__m512)x);
#else
    return (Integers)_mm256_cvtps_epi32((__m256)x);
#endif
}

#endif

// a * b + c, rounded once where there is an instruction for it. If such a sum is written out, a compiler may round it
// once in one place, and twice in another.
ALWAYS_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// 2^x with a relative error of some 2e-7: x = n + r, a polynomial in r on [-1/2, 1/2], and n added to the exponent
// (Cody & Waite 1980). Below -126 the result is 2^-126, which is as good as 0; NaN stays NaN, and 0 becomes exactly 1.
ALWAYS_INLINE Floats power_of_two(Floats x) {
    x = larger_of(broadcast(-126.0f), x);
#if defined(__AVX512F__)
    const Floats n = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
#if defined(__AVX2__)
    x = (Floats)_mm256_min_ps((__m256)broadcast(127.0f), (__m256)x);
#else
    x = x > 127.0f ? broadcast(127.0f) : x;
#endif
    const Floats rounder = broadcast(12582912.0f);  // 1.5 * 2^23: adding a number to it rounds that to an integer
    const Floats shifted = x + rounder;
    const Floats n = shifted - rounder;
#endif
    const Floats r = x - n;
    Floats y = broadcast(1.3264727313e-3f);  // of least relative error, with a constant term of 1
    y = y * r + 9.6715129912e-3f;
    y = y * r + 5.5507335812e-2f;
    y = y * r + 2.4022242427e-1f;
    y = y * r + 6.9314700365e-1f;
    y = y * r + 1.0f;
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    return y * (Floats)(((Words)shifted << 23) + 0x3F800000u);
#endif
}

constexpr float kLog2E = 1.44269504f;

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

// 8-bit integers as floats.
ALWAYS_INLINE Floats widen_bytes(const int8_t* from) {
#if defined(__AVX512F__)  // GCC 12 would convert them lane by lane, here and in 256 bits
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    typedef int8_t Bytes __attribute__((vector_size(kWidth)));
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Integers), Floats);
#endif
}

ALWAYS_INLINE Floats silu(Floats x) { return x / (1.0f + power_of_two(x * -kLog2E)); }

}  // namespace
