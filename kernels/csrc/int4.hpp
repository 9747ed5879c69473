// Weights of 4 bits, for products by 16-bit integers (integers.hpp).
//
// Each 32 inputs of an output have a step and a base, and a weight is a code of 4 bits: the integer that is multiplied is
// step * code + 8 * base, and each output has a scale. So values to one side of zero lose no more than those around it,
// as in llama.cpp's Q4_1. Steps and bases take 8 bits each, 4.5 bits for a weight in all.
#pragma once

#include "integers.hpp"
#include "threads.hpp"

namespace {

// 32 inputs of a panel.
struct Int4Group {
    static constexpr int kInputs = 32, kUnits = kInputs / 2, kBaseUnit = 8;

    int8_t terms[kPanel][2];  // each output's step and base; base and step if its codes are in odd bytes
    uint8_t codes[kUnits / 2][2 * kPanel];  // placed as in an IntegerPair
};

static_assert(sizeof(Int4Group) == 576, "kernels/cpu_linear.py counts on it");

inline int64_t int4_panel_bytes(int num_inputs) {
    return num_inputs / Int4Group::kInputs * (int64_t)sizeof(Int4Group);
}

// A weight as kernels/quantization.py rounds it.
struct Int4Packing {
    const uint8_t* codes;  // [num_outputs][num_inputs]
    const int8_t *steps, *bases;  // [num_outputs][num_inputs / 32]
    int num_outputs, num_inputs;
    Int4Group* panels;  // [panels][num_inputs / 32]
};

#if defined(INTEGERS)
static_assert(kLeastGroup % Int4Group::kInputs == 0, "whatever is multiplied by integers has whole groups");
static_assert(kGroupUnits % Int4Group::kUnits == 0, "so have the parts that are decoded at once");

// A panel of such groups.
struct Int4Units {
    static constexpr int kUnits = 2;
    const Int4Group* groups;
    Words terms[kPanelVectors] = {};  // for each vector of a tile, since its group's first unit was decoded

    // Decodes `unit` and the one after it. Each tile and part begins with a group's first unit.
    template <int kVectors>
    ALWAYS_INLINE void decode(int unit, int tile, Words (&words)[kUnits][kVectors]) {
        const Int4Group& group = groups[unit / Int4Group::kUnits];
        const int unit_of_group = unit % Int4Group::kUnits;
        if (unit_of_group == 0)
#pragma GCC unroll 4
            for (int vector = 0; vector < kVectors; ++vector)
                terms[vector] = for_both_inputs(group.terms + (tile * kVectors + vector) * kWidth);
#pragma GCC unroll 2
        for (int half = 0; half < kVectors / 2; ++half) {
            const Words codes = load_words((const Words*)group.codes[unit_of_group / 2] + tile + half);
#pragma GCC unroll 2
            for (int i = 0; i < kUnits; ++i) {
                // Of two neighbours one is a code, and the other one becomes what its output's base is multiplied by.
                constexpr uint32_t kFirst = 0x000F000F, kSecond = kFirst << 8, kBase = Int4Group::kBaseUnit * 0x10001u;
                const Words own = i == 0 ? codes : codes >> 4;
                words[i][2 * half] = multiply_bytes((own & kFirst) | kBase << 8, terms[2 * half]);
                words[i][2 * half + 1] = multiply_bytes((own & kSecond) | kBase, terms[2 * half + 1]);
            }
        }
    }

  private:
    // The terms of a vector's outputs, in the halves of each lane.
    static ALWAYS_INLINE Words for_both_inputs(const int8_t (*from)[2]) {
#if defined(__AVX512F__)
        const Words once = (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#else
        const Words once = (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#endif
        return once | once << 16;
    }
};

struct Int4PackingJob {
    Int4Packing a;
    Counter panels;
};

inline void pack_int4_panels(void* data, int) {
    Int4PackingJob& job = *static_cast<Int4PackingJob*>(data);
    const Int4Packing& a = job.a;
    const int num_groups = a.num_inputs / Int4Group::kInputs;
    for (int64_t number = job.panels.take(1); number < job.panels.count; number = job.panels.take(1)) {
        Int4Group* panel = a.panels + number * num_groups;
        memset(panel, 0, num_groups * sizeof *panel);
        const int count = least(kPanel, (int)(a.num_outputs - number * kPanel));
        for (int output = 0; output < count; ++output) {
            const int64_t row = number * kPanel + output;
            const bool is_second = output / kWidth % 2 == 1;  // see IntegerPair::place
            for (int group = 0; group < num_groups; ++group) {
                int8_t* terms = panel[group].terms[output];
                terms[is_second] = a.steps[row * num_groups + group];
                terms[!is_second] = a.bases[row * num_groups + group];
                const uint8_t* codes = a.codes + row * a.num_inputs + group * Int4Group::kInputs;
                for (int i = 0; i < Int4Group::kInputs; ++i)
                    panel[group].codes[i / 4][IntegerPair::place(output) + i % 2 * 2] |= codes[i] << i / 2 % 2 * 4;
            }
        }
    }
}
#endif

// Returns false if this level has no integers, or the weight does not fit them.
inline bool pack_int4(const Int4Packing& a, const Threads& threads) {
#if defined(INTEGERS)
    if (!IntegerPanels::fits(a.num_inputs)) return false;
    Int4PackingJob job = {a, {0, (a.num_outputs + kPanel - 1) / kPanel}};
    run_on(threads, true, pack_int4_panels, &job);
    return true;
#else
    (void)a, (void)threads;
    return false;
#endif
}

}  // namespace
