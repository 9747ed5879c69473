// Encodes weights of bfloat16 as the integers that integers.hpp multiplies.
#pragma once

#include "integers.hpp"
#include "threads.hpp"

namespace {

struct IntegerEncoding {
    const uint16_t* weight;  // [num_outputs][num_inputs]
    int num_outputs, num_inputs;
    char* panels;   // [panels][num_inputs / 4] IntegerPair
    float* scales;  // [num_outputs]
};

#if defined(INTEGERS)
// The scale of an output: the least power of two for which neither its integers nor their sum over a group are too
// large. 0 if all values are zero; negative if the scale is outside 1e-30 to 1e30, or rounding would change more than
// bfloat16 has rounded.
inline float integer_scale(const uint16_t* values, int num_inputs) {
    constexpr float kMostSum = (float)(INT32_MAX / kMostLeft - kGroup);  // leaves room for rounding each integer
    constexpr float kBfloat16Rounds = 1.6e-3f;                           // relative to a value, in the root mean square
    float most = 0.0f, most_sum = 0.0f, all = 0.0f;
    for (int group = 0; group < num_inputs; group += kGroup) {
        Floats sum = {}, largest = {};
        for (int i = group; i < least(group + kGroup, num_inputs); i += kWidth) {
            const Floats value = Bfloat16::load(values + i);
            const Floats size = absolute(value);
            largest = larger_of(size, largest), sum += size;
        }
        const float group_most = largest_of(largest), group_sum = sum_of(sum);
        all += group_sum;
        most = group_most > most ? group_most : most;
        most_sum = group_sum > most_sum ? group_sum : most_sum;
    }
    if (all == 0.0f) return 0.0f;
    const float bound = most / kMostRight > most_sum / kMostSum ? most / kMostRight : most_sum / kMostSum;
    const float scale = float_of((bits_of(bound) + 0x007FFFFFu) & 0xFF800000u);
    if (!(scale > 1e-30f && scale < 1e30f)) return -1.0f;
    Floats squares = {};  // of what rounding changes, in units of the scale
    for (int i = 0; i < num_inputs; i += kWidth) {
        const Floats integer = Bfloat16::load(values + i) * (1.0f / scale);
        const Floats change = integer - __builtin_convertvector(nearest_integers(integer), Floats);
        squares += change * change;
    }
    // The root mean square of values without outliers is 1.25 times their mean size, in which outliers count for less.
    const float allowed = kBfloat16Rounds * 1.25f * all / num_inputs / scale;
    return sum_of(squares) <= allowed * allowed * num_inputs ? scale : -1.0f;
}

// The sizes and codes of 16 values.
struct SizesAndCodes {
    __m128i sizes, codes;

    SizesAndCodes(const uint16_t* from, float inverse_scale) {
        Words size[kCount], code[kCount];
        for (int i = 0; i < kCount; ++i) {
            const Words value = (Words)(Bfloat16::load(from + i * kWidth) * inverse_scale);
            const Words absolute = value & 0x7FFFFFFFu;
            const Integers beyond = (Integers)(absolute >> 23) - (127 + 7);  // what exceeds 8 bits
            const Integers power = beyond > 0 ? beyond : Integers{};
            size[i] = (Words)nearest_integers((Floats)absolute) >> (Words)power;
            code[i] = (value >> 31 << 3) + (Words)power + 1u;
        }
        sizes = narrow(size), codes = narrow(code);
    }

  private:
    static constexpr int kCount = 16 / kWidth;

    static __m128i narrow(const Words (&from)[kCount]) {
#if defined(__AVX512F__)
        return _mm512_cvtepi32_epi8((__m512i)from[0]);
#else
        const __m256i packed = _mm256_packus_epi32((__m256i)from[0], (__m256i)from[1]);
        const __m256i halves = _mm256_permute4x64_epi64(packed, 0xD8);
        return _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
#endif
    }
};

// Writes output `output` and the one kWidth after it, whose places are side by side.
inline void write_outputs(const IntegerEncoding& a, IntegerPair* panel, int64_t first, int output) {
    const uint16_t* rows[2];
    float inverse_scales[2];
    static const uint16_t kZeros[16] = {};
    for (int i = 0; i < 2; ++i) {
        const int64_t number = first + output + kWidth * i;
        const bool is_one = number < a.num_outputs && a.scales[number] > 0.0f;
        rows[i] = is_one ? a.weight + number * a.num_inputs : nullptr;
        inverse_scales[i] = is_one ? 1.0f / a.scales[number] : 0.0f;
    }
    const int at = IntegerPair::place(output);
    for (int input = 0; input < a.num_inputs; input += 16) {
        const SizesAndCodes one(rows[0] != nullptr ? rows[0] + input : kZeros, inverse_scales[0]);
        const SizesAndCodes other(rows[1] != nullptr ? rows[1] + input : kZeros, inverse_scales[1]);
        // Interleaved, both outputs' values of a unit are 4 bytes.
        uint32_t sizes[8], codes[8];
        _mm_storeu_si128((__m128i*)sizes, _mm_unpacklo_epi8(one.sizes, other.sizes));
        _mm_storeu_si128((__m128i*)sizes + 1, _mm_unpackhi_epi8(one.sizes, other.sizes));
        _mm_storeu_si128((__m128i*)codes, _mm_unpacklo_epi8(one.codes, other.codes));
        _mm_storeu_si128((__m128i*)codes + 1, _mm_unpackhi_epi8(one.codes, other.codes));
        for (int unit = 0; unit < 8; unit += 2) {
            IntegerPair& to = panel[(input / 2 + unit) / 2];
            const uint32_t both = codes[unit] | codes[unit + 1] << 4;
            memcpy(to.sizes[0] + at, &sizes[unit], sizeof sizes[unit]);
            memcpy(to.sizes[1] + at, &sizes[unit + 1], sizeof sizes[unit]);
            memcpy(to.codes + at, &both, sizeof both);
        }
    }
}

struct IntegerEncodingJob {
    IntegerEncoding a;
    bool fits;
    Counter panels;
};

inline void encode_integer_panels(void* data, int) {
    IntegerEncodingJob& job = *static_cast<IntegerEncodingJob*>(data);
    const IntegerEncoding& a = job.a;
    for (int64_t number = job.panels.take(1); number < job.panels.count; number = job.panels.take(1)) {
        const int64_t first = number * kPanel;
        bool fits = __atomic_load_n(&job.fits, __ATOMIC_RELAXED);
        for (int64_t output = first; fits && output < first + kPanel && output < a.num_outputs; ++output) {
            a.scales[output] = integer_scale(a.weight + output * a.num_inputs, a.num_inputs);
            fits = a.scales[output] >= 0.0f;
        }
        if (!fits) return __atomic_store_n(&job.fits, false, __ATOMIC_RELAXED);
        IntegerPair* panel = reinterpret_cast<IntegerPair*>(a.panels) + number * (a.num_inputs / 4);
        for (int output = 0; output < kPanel; ++output)
            if (output % (2 * kWidth) < kWidth) write_outputs(a, panel, first, output);
    }
}
#endif

// Returns false, and leaves anything in its outputs, if this level has no integers or the weight is not to be
// multiplied by them.
inline bool encode_integers(const IntegerEncoding& a, const Threads& threads) {
#if defined(INTEGERS)
    if (!IntegerPanels::fits(a.num_inputs)) return false;
    IntegerEncodingJob job = {a, true, {0, (a.num_outputs + kPanel - 1) / kPanel}};
    run_on(threads, true, encode_integer_panels, &job);
    return job.fits;
#else
    (void)a, (void)threads;
    return false;
#endif
}

}  // namespace
