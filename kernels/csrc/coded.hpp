// bfloat16 in 12 bits, without loss.
//
// The upper byte of a bfloat16 is its sign and most of its exponent, and in one panel of a weight it takes few values:
// 16 of them cover all but one weight in some thousands. So a panel keeps those 16, and for each weight the index of
// its upper byte, in 4 bits, and the lower byte as it is. Weights with another upper byte are exceptions, kept in a
// list. Zhang et al. 2025, "70% Size, 100% Accuracy", section 2, has the entropy of the exponents of many models: 2.6
// bits. At small batches a product takes the time of reading the weight, which is a quarter less; the values computed
// with are the same, to the bit.
#pragma once

#include <stdlib.h>

#include "threads.hpp"
#include "vector.hpp"

namespace {

constexpr int kPanel = 32;  // outputs
constexpr int kPanelVectors = kPanel / kWidth;

// A value whose upper byte is not among its panel's 16.
struct Exception {
    int32_t pair;    // of units; INT32_MAX after the last one of a panel
    uint16_t place;  // output * 2, plus 1 for the second input, plus 64 in the second unit of the pair
    uint16_t value;
};

// Two units of a panel, of 32 outputs by 2 inputs each. Two, since then their codes have one byte for each value of a
// unit, at the same place, and need not be moved there.
struct CodedPair {
    uint8_t lower[2][2 * kPanel];
    uint8_t codes[2 * kPanel];  // lower half: of the first unit's value at the same place; upper half: of the second's
};

// The head of a panel, followed by its pairs. Each pair fills whole cache lines.
struct CodedPanel {
    alignas(64) uint8_t uppers[16];
    int64_t first_exception;
    // The pairs follow. In the last one the second unit may be past the end.

    const CodedPair* pairs() const { return reinterpret_cast<const CodedPair*>(this + 1); }
    CodedPair* pairs() { return reinterpret_cast<CodedPair*>(this + 1); }
    static int num_pairs(int num_inputs) { return (num_inputs + 3) / 4; }
    static int64_t bytes(int num_inputs) {
        return sizeof(CodedPanel) + sizeof(CodedPair) * (int64_t)num_pairs(num_inputs);
    }
};

static_assert(sizeof(CodedPanel) == 64 && sizeof(CodedPair) == 192, "kernels/cpu_linear.py counts on it");

// The place of a unit's value in `lower`. The instructions that put lower and upper bytes together work within each 16
// bytes: of 16 values, the first 8 go to one vector, and the last 8 to another.
ALWAYS_INLINE int spread(int place) { return (place & 24) << 1 | (place & 32) >> 2 | (place & 7); }

// So the vectors of a tile with some of a panel's outputs are spread evenly over the panel, and the tile reads whole 16
// bytes of it. This is the first output of a vector.
template <int kVectors>
constexpr int spread_output(int tile, int vector) {
    return tile * kWidth + vector * (kPanel / kVectors);
}

// Decodes a panel's units, two at a time, for a tile's outputs. Pairs must be decoded in order; `unit` is a pair's
// first.
struct Coded {
    static constexpr int kUnits = 2;
    const CodedPanel* panel;
    const Exception* next;

    template <int kVectors>
    static constexpr int output(int tile, int vector) {
        return spread_output<kVectors>(tile, vector);
    }

    template <int kVectors>
    ALWAYS_INLINE void decode(int unit, int tile, Words (&words)[kUnits][kVectors]) {
        const CodedPair& from = panel->pairs()[unit / 2];
#if defined(__AVX512BW__)
        static_assert(kVectors == 2, "a vector of codes is that of two of words");
        const __m512i uppers = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)panel->uppers));
        const __m512i codes = _mm512_load_si512(from.codes);
#pragma GCC unroll 2
        for (int i = 0; i < kUnits; ++i) {
            const __m512i lower = _mm512_load_si512(from.lower[i]);
            const __m512i own_codes = _mm512_and_si512(_mm512_srli_epi16(codes, 4 * i), _mm512_set1_epi8(15));
            const __m512i upper = _mm512_shuffle_epi8(uppers, own_codes);
            words[i][0] = (Words)_mm512_unpacklo_epi8(lower, upper);
            words[i][1] = (Words)_mm512_unpackhi_epi8(lower, upper);
        }
#elif defined(__AVX2__)
        const __m256i uppers = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)panel->uppers));
#pragma GCC unroll 2
        for (int half = 0; half < kVectors / 2; ++half) {
            const __m256i codes = _mm256_load_si256((const __m256i*)from.codes + tile + half);
#pragma GCC unroll 2
            for (int i = 0; i < kUnits; ++i) {
                const __m256i lower = _mm256_load_si256((const __m256i*)from.lower[i] + tile + half);
                const __m256i own_codes = _mm256_and_si256(_mm256_srli_epi16(codes, 4 * i), _mm256_set1_epi8(15));
                const __m256i upper = _mm256_shuffle_epi8(uppers, own_codes);
                words[i][half] = (Words)_mm256_unpacklo_epi8(lower, upper);
                words[i][half + kVectors / 2] = (Words)_mm256_unpackhi_epi8(lower, upper);
            }
        }
#else
        for (int i = 0; i < kUnits; ++i)
            for (int lane = 0; lane < kVectors * kWidth; ++lane) {
                const int vector = lane / kWidth;
                const int at = spread(2 * (spread_output<kVectors>(tile, vector) + lane % kWidth));
                const uint32_t first_upper = panel->uppers[from.codes[at] >> 4 * i & 15];
                const uint32_t second_upper = panel->uppers[from.codes[at + 1] >> 4 * i & 15];
                words[i][vector][lane % kWidth] =
                    from.lower[i][at] | first_upper << 8 | from.lower[i][at + 1] << 16 | second_upper << 24;
            }
#endif
        if (__builtin_expect(unit / 2 == next->pair, 0)) {
            // In a copy, so that words without exceptions stay in registers.
            Words changed[kUnits][kVectors];
#pragma GCC unroll 2
            for (int i = 0; i < kUnits; ++i)
#pragma GCC unroll 8
                for (int vector = 0; vector < kVectors; ++vector) changed[i][vector] = words[i][vector];
            put_exceptions(unit / 2, tile, kVectors, changed[0]);
#pragma GCC unroll 2
            for (int i = 0; i < kUnits; ++i)
#pragma GCC unroll 8
                for (int vector = 0; vector < kVectors; ++vector) words[i][vector] = changed[i][vector];
        }
    }

    // `words` are [kUnits][num_vectors].
    __attribute__((noinline)) void put_exceptions(int pair, int tile, int num_vectors, Words* words) {
        const int spacing = kPanel / num_vectors;
        for (; next->pair == pair; ++next) {
            const int output = next->place % (2 * kPanel) / 2, lane = output % spacing - tile * kWidth;
            if (lane < 0 || lane >= kWidth) continue;
            Words& to = words[next->place / (2 * kPanel) * num_vectors + output / spacing];
            memcpy(reinterpret_cast<uint16_t*>(&to) + 2 * lane + next->place % 2, &next->value, sizeof next->value);
        }
    }
};

struct Encoding {
    const uint16_t* weight;  // [num_outputs][num_inputs]
    int num_outputs, num_inputs;
    char* panels;
    Exception* exceptions;
    int64_t capacity;  // of `exceptions`
    int64_t num_exceptions;
};

struct EncodingJob {
    Encoding a;
    Counter panels;
};

// Writes the 16 most frequent upper bytes, and returns how many values have another one. `count` is even.
inline int64_t choose_uppers(const uint16_t* values, int64_t count, CodedPanel& panel) {
    // Two tables: neighbours are often alike, and in one table the second would wait for the first one's count.
    int64_t counts[256] = {}, odd_counts[256] = {}, num_left = count;
    for (int64_t i = 0; i < count; i += 2) {
        ++counts[values[i] >> 8];
        ++odd_counts[values[i + 1] >> 8];
    }
    uint8_t seen[256];
    int num_seen = 0;
    for (int byte = 0; byte < 256; ++byte)
        if ((counts[byte] += odd_counts[byte]) > 0) seen[num_seen++] = (uint8_t)byte;
    for (uint8_t& upper : panel.uppers) {
        upper = 0;  // any byte will do if fewer than 16 were seen
        for (int i = 0; i < num_seen; ++i) upper = counts[seen[i]] > counts[upper] ? seen[i] : upper;
        num_left -= counts[upper];
        counts[upper] = 0;
    }
    return num_left;
}

// The order in which decoding meets exceptions.
inline int by_place(const void* a, const void* b) {
    const Exception &first = *static_cast<const Exception*>(a), &second = *static_cast<const Exception*>(b);
    return first.pair != second.pair ? (first.pair > second.pair) * 2 - 1 : first.place - second.place;
}

// Writes a panel that `Coded` reads. Outputs that pad the last panel, and a unit that pads a pair, may be anything.
inline void encode_panel(Encoding& a, int64_t number) {
    constexpr uint8_t kNone = 16;
    CodedPanel& panel = *reinterpret_cast<CodedPanel*>(a.panels + number * CodedPanel::bytes(a.num_inputs));
    const int num_outputs = least(kPanel, a.num_outputs - (int)number * kPanel), num_units = a.num_inputs / 2;
    const uint16_t* weight = a.weight + number * kPanel * a.num_inputs;
    const int64_t count = choose_uppers(weight, (int64_t)num_outputs * a.num_inputs, panel) + 1;
    panel.first_exception = __atomic_fetch_add(&a.num_exceptions, count, __ATOMIC_RELAXED);
    if (panel.first_exception + count > a.capacity) return;

    uint8_t codes[256];
    memset(codes, kNone, sizeof codes);
    for (uint8_t code = 0; code < 16; ++code) codes[panel.uppers[code]] = code;
    Exception* const exceptions = a.exceptions + panel.first_exception;
    Exception* exception = exceptions;
    const int num_pairs = CodedPanel::num_pairs(a.num_inputs);
    if (num_outputs < kPanel) memset((void*)panel.pairs(), 0, sizeof(CodedPair) * num_pairs);
    // Output by output, in the weight's order in memory, two units at a time. A unit's two values are side by side.
    for (int output = 0; output < num_outputs; ++output) {
        const uint16_t* values = weight + (int64_t)output * a.num_inputs;
        const int at = spread(2 * output);
        const auto encode_pair = [&](int number_of_pair, auto units) __attribute__((always_inline)) {
            constexpr int kUnits = decltype(units)::value;
            CodedPair& to = panel.pairs()[number_of_pair];
            const uint16_t* from = values + 4 * number_of_pair;
            uint32_t code_bytes = 0, all = 0;
            for (int unit = 0; unit < kUnits; ++unit) {
                const uint16_t first = from[2 * unit], second = from[2 * unit + 1];
                const uint32_t both = codes[first >> 8] | codes[second >> 8] << 8;
                code_bytes |= (both & 0x0F0F) << 4 * unit, all |= both;
                to.lower[unit][at] = (uint8_t)first, to.lower[unit][at + 1] = (uint8_t)second;
            }
            to.codes[at] = (uint8_t)code_bytes, to.codes[at + 1] = (uint8_t)(code_bytes >> 8);
            if (__builtin_expect(all & (kNone | kNone << 8), 0))
                for (int i = 0; i < 2 * kUnits; ++i)
                    if (codes[from[i] >> 8] == kNone) {
                        const int place = i / 2 * 2 * kPanel + 2 * output + i % 2;
                        *exception++ = {number_of_pair, (uint16_t)place, from[i]};
                    }
        };
        int pair = 0;
        for (; pair < num_units / 2; ++pair) encode_pair(pair, Number<2>{});
        if (num_units % 2 == 1) encode_pair(pair, Number<1>{});
    }
    qsort(exceptions, exception - exceptions, sizeof(Exception), by_place);
    exception->pair = INT32_MAX;
}

inline void encode_panels(void* data, int) {
    EncodingJob& job = *static_cast<EncodingJob*>(data);
    for (int64_t number = job.panels.take(1); number < job.panels.count; number = job.panels.take(1))
        encode_panel(job.a, number);
}

// Returns the number of exceptions, ends of panels included; if that is more than there is room for, the panels must
// not be used.
inline int64_t encode(const Encoding& encoding, const Threads& threads) {
    EncodingJob job = {encoding, {0, (encoding.num_outputs + kPanel - 1) / kPanel}};
    run_on(threads, true, encode_panels, &job);
    return job.a.num_exceptions;
}

}  // namespace
