// A token for each row of logits: the best one, or one drawn from what top-k, top-p and min-p keep.
//
// kernels/draws.py says what is computed: the argmax of scaled logits plus Gumbel noise, over the tokens whose scaled
// logit is no less than a threshold. The noise is that of kernels/philox.py; it is made for 4 * kWidth tokens at a
// time, and only if one of them can still win. The threshold is found without a sort, by the digits of a float's bits
// (radix selection; Alabi et al. 2012, "Fast k-selection algorithms for graphics processing units", section 3).
#pragma once

#include <stdlib.h>

#include "scores.hpp"
#include "threads.hpp"

namespace {

struct Sampling {
    const float* logits;  // [num_rows][size], rows `stride` values apart
    int64_t stride;
    int size;
    // One value per row.
    const float* temperatures;  // 0: the best token
    const uint64_t* seeds;
    const int64_t* positions;
    const int64_t* sequence_indexes;
    const int64_t* top_k;  // this, top_p and min_p may be null
    const float* top_p;
    const float* min_p;
    int64_t* token_ids;
};

struct SamplingJob {
    Sampling a;
    Counter rows;
    bool out_of_memory;
};

constexpr int kDraws = 4 * kWidth;  // tokens whose noise is made together
// More than the noise of any token: -log(-log(1 - 2^-33)).
constexpr float kMostNoise = 22.9f;

// Multiplies 32 by 32 bits, into the upper and the lower 32 bits of the product.
ALWAYS_INLINE void multiply_wide(Words a, uint32_t b, Words& upper, Words& lower) {
#if defined(__AVX512F__)
    const __m512i factor = _mm512_set1_epi32((int)b);
    const __m512i even = _mm512_mul_epu32((__m512i)a, factor);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
    upper = (Words)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
    lower = (Words)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
#else
    typedef uint64_t Products __attribute__((vector_size(8 * kWidth)));
    const Products products = __builtin_convertvector(a, Products) * b;
    upper = __builtin_convertvector(products >> 32, Words), lower = __builtin_convertvector(products, Words);
#endif
}

// Philox4x32-10 of the counters (first + lane, position, sequence index, 0).
ALWAYS_INLINE void philox(uint32_t first, uint32_t position, uint32_t sequence_index, uint64_t seed, Words (&c)[4]) {
    for (int lane = 0; lane < kWidth; ++lane) c[0][lane] = first + (uint32_t)lane;
    c[1] = Words{} + position, c[2] = Words{} + sequence_index, c[3] = Words{};
    uint32_t keys[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; ++round, keys[0] += 0x9E3779B9u, keys[1] += 0xBB67AE85u) {
        Words upper[2], lower[2];
        multiply_wide(c[0], 0xD2511F53u, upper[0], lower[0]);
        multiply_wide(c[2], 0xCD9E8D57u, upper[1], lower[1]);
        c[0] = upper[1] ^ c[1] ^ keys[0], c[1] = lower[1];
        c[2] = upper[0] ^ c[3] ^ keys[1], c[3] = lower[0];
    }
}

// The natural logarithm of positive normal numbers, with a relative error of 1e-7: that of the mantissa in
// [sqrt(1/2), sqrt(2)) by the series of atanh, plus that of the exponent.
ALWAYS_INLINE Floats logarithm(Floats x) {
    const Integers bits = (Integers)x - 0x3F3504F3;
    const Floats exponent = __builtin_convertvector(bits >> 23, Floats);
    const Floats mantissa = (Floats)((bits & 0x007FFFFF) + 0x3F3504F3);
    const Floats z = (mantissa - 1.0f) / (mantissa + 1.0f), w = z * z;
    const Floats tail = ((0.11523f * w + 0.14278f) * w + 0.2f) * w + 0.33333333f;
    return exponent * 0.693147180f + 2.0f * (z + z * w * tail);
}

// -log(-log(1 - (word + 1/2) / 2^32)).
ALWAYS_INLINE Floats gumbel(Words words) {
#if defined(__AVX512F__)
    const Floats number = (Floats)_mm512_cvtepu32_ps((__m512i)words);
#else
    const Floats number = __builtin_convertvector(words, Floats);
#endif
    Floats x = (number + 0.5f) * 0x1p-32f;
    x = x > 1.0f - 0x1p-24f ? broadcast(1.0f - 0x1p-24f) : x;
    // log(1 - x), corrected for the digits of x that 1 - x has lost (Higham 2002, section 1.14.1).
    const Floats u = 1.0f - x;
    const Floats surprise = u == 1.0f ? x : -logarithm(u) * (x / (1.0f - u));
    return -logarithm(surprise);
}

// One row's work.
class Row {
  public:
    Row(const Sampling& a, int64_t row, float* scaled, float* masses)
        : a(a), row(row), logits(a.logits + row * a.stride), scaled(scaled), masses(masses) {}

    int64_t sample() {
        best = largest_of(logits, a.size);
        if (!(a.temperatures[row] > 0) || !(best > -kInfinity && best < kInfinity)) return first_of_best();
        const float temperature = a.temperatures[row];
        int i = 0;
        for (; i + kWidth <= a.size; i += kWidth)
            store_floats(scaled + i, (load_floats(logits + i) - best) / temperature);
        for (; i < a.size; ++i) scaled[i] = (logits[i] - best) / temperature;
        for (; i % kDraws != 0; ++i) scaled[i] = -kInfinity;
        return draw(threshold());
    }

  private:
    int64_t first_of_best() const {
        int token = 0;
        while (token < a.size && logits[token] != best) ++token;
        return token < a.size ? token : 0;
    }

    // The least scaled logit that is kept.
    float threshold() const {
        float least = -kInfinity;
        if (a.top_k == nullptr) return least;
        if (a.top_k[row] < a.size) least = select(least, false, (double)a.top_k[row]);
        if (a.top_p[row] < 1) {
            double total = 0;
            for (int i = 0; i < a.size; i += kWidth) {
                const Floats x = load_floats(scaled + i), power = power_of_two(x * kLog2E);
                const Floats mass = x >= least ? power : Floats{};
                store_floats(masses + i, mass);
                total += sum_of(mass);
            }
            least = select(least, true, a.top_p[row] * total);
        }
        if (a.min_p[row] > 0) {
            const float of_best = __builtin_logf(a.min_p[row]);
            least = of_best > least ? of_best : least;
        }
        return least;
    }

    // The greatest scaled logit such that those no less than it, and no less than `least`, reach `target` by number or
    // by mass. No scaled logit is more than 0, so the bits of their magnitudes order them the other way round.
    float select(float least, bool by_mass, double target) const {
        uint32_t prefix = 0;
        double reached = 0;
        for (int shift = 20; shift >= 0; shift -= 10) {  // digits of 11 bits (the first, with the sign, a 0), 10 and 10
            const uint32_t most = shift == 20 ? 0x7FFu : 0x3FFu;
            double sums[1 << 11] = {};
            for (int i = 0; i < a.size; ++i) {
                const uint32_t key = bits_of(scaled[i]) & 0x7FFFFFFFu;
                if (scaled[i] < least || (shift < 20 && key >> (shift + 10) != prefix)) continue;
                sums[key >> shift & most] += by_mass ? masses[i] : 1.0f;
            }
            uint32_t last = 0;
            for (uint32_t digit = 0; digit <= most; ++digit) {
                if (sums[digit] == 0) continue;
                last = digit;
                if (reached + sums[digit] >= target) break;
                reached += sums[digit];
            }
            prefix = prefix << (shift == 20 ? 0 : 10) | last;
        }
        return -float_of(prefix);
    }

    // The kept token with the largest sum of scaled logit and noise.
    int64_t draw(float least) const {
        float most = -kInfinity;
        int64_t drawn = 0;
        for (int first = 0; first < a.size; first += kDraws) {
            const float floor = least > most - kMostNoise ? least : most - kMostNoise;
            Floats largest = load_floats(scaled + first);
            for (int part = 1; part < 4; ++part)
                largest = larger_of(load_floats(scaled + first + part * kWidth), largest);
            if (largest_of(largest) < floor) continue;

            Words words[4];
            philox((uint32_t)first / 4, (uint32_t)a.positions[row], (uint32_t)a.sequence_indexes[row], a.seeds[row], words);
            float noise[4][kWidth];
            for (int word = 0; word < 4; ++word) store_floats(noise[word], gumbel(words[word]));
            for (int i = 0; i < kDraws; ++i) {
                const float x = scaled[first + i], score = x + noise[i % 4][i / 4];
                if (x >= least && score > most) most = score, drawn = first + i;
            }
        }
        return drawn;
    }

    const Sampling& a;
    const int64_t row;
    const float* logits;
    float *scaled, *masses;
    float best = 0;
};

void sample_rows(void* data, int) {
    SamplingJob& job = *static_cast<SamplingJob*>(data);
    const size_t size = (size_t)(job.a.size + kDraws - 1) / kDraws * kDraws;
    float* memory = static_cast<float*>(aligned_alloc(64, sizeof(float) * 2 * size));
    if (memory == nullptr) {
        __atomic_store_n(&job.out_of_memory, true, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t row = job.rows.take(1); row < job.rows.count; row = job.rows.take(1))
        job.a.token_ids[row] = Row(job.a, row, memory, memory + size).sample();
    free(memory);
}

}  // namespace
