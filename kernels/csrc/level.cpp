// The kernels' C interface at one instruction-set level. Compiled once for each level, with LEVEL its name and the
// level's -m flags; every function's name ends in the level, such as paged_attention_avx512_bf16. Tensors are pointers
// and a dtype, strides count values; kernels/reference.py says what each operation means, and the Python wrapper
// (kernels/cpu.py) makes its checks. See vector.hpp for why no C++ header is included here.
#include "attention.hpp"
#include "cache.hpp"
#include "decoder.hpp"
#include "integer_encoding.hpp"
#include "linear.hpp"
#include "meeting.hpp"
#include "pointwise.hpp"
#include "sampling.hpp"
#include "scores.hpp"
#include "screening.hpp"

#define JOIN(operation, level) operation##_##level
#define NAME(operation, level) JOIN(operation, level)
#define EXPORT(result, operation) extern "C" __attribute__((visibility("default"))) result NAME(operation, LEVEL)

EXPORT(int, paged_attention)(
    Dtype dtype, Dtype cache_dtype, const void* q, int64_t q_stride, const void* k_cache, const void* v_cache,
    int64_t block_stride, const int32_t* block_tables, int64_t table_stride, const int32_t* query_starts,
    const int32_t* context_lengths, void* out, int64_t num_tokens, int num_rows, int num_blocks, int block_size,
    int num_heads, int num_kv_heads, int head_dim, float scale, int window, float softcap, ParallelRegion region,
    int num_threads
) {
    return paged_attention(
        {q, q_stride, k_cache, v_cache, block_stride, block_tables, table_stride, query_starts, context_lengths, dtype,
         cache_dtype, num_rows, num_blocks, block_size, num_heads, num_kv_heads, head_dim, scale, window, softcap, out},
        num_tokens, {region, num_threads}
    );
}

EXPORT(int, reshape_and_cache)(
    Dtype dtype, Dtype cache_dtype, void* k, int64_t k_stride, void* v, int64_t v_stride, void* k_cache, void* v_cache,
    int64_t block_stride, const int64_t* slot_mapping, int num_tokens, int num_blocks, int block_size,
    int num_kv_heads, int head_dim, ParallelRegion region, int num_threads
) {
    return write_cache(
        {dtype, cache_dtype, k, v, k_stride, v_stride, k_cache, v_cache, block_stride, slot_mapping,
         (int64_t)num_blocks * block_size, num_tokens, block_size, num_kv_heads, head_dim, nullptr, 0, 0, nullptr,
         nullptr, nullptr, nullptr, 0.0f},
        {region, num_threads}
    );
}

EXPORT(int, rotate_and_cache)(
    Dtype dtype, Dtype cache_dtype, void* heads, int64_t stride, const void* cos, const void* sin, void* k_cache,
    void* v_cache, int64_t block_stride, const int64_t* slot_mapping, int num_tokens, int num_blocks, int block_size,
    int num_heads, int num_kv_heads, int head_dim, ParallelRegion region, int num_threads
) {
    void* k = static_cast<char*>(heads) + (int64_t)num_heads * head_dim * size_of(dtype);
    void* v = static_cast<char*>(k) + (int64_t)num_kv_heads * head_dim * size_of(dtype);
    return write_cache(
        {dtype, cache_dtype, k, v, stride, stride, k_cache, v_cache, block_stride, slot_mapping,
         (int64_t)num_blocks * block_size, num_tokens, block_size, num_kv_heads, head_dim, heads, stride,
         num_heads + num_kv_heads, cos, sin, nullptr, nullptr, 0.0f},
        {region, num_threads}
    );
}

EXPORT(void, rms_norm)(
    Dtype dtype, const void* x, void* residual, const void* weight, float epsilon, void* out, int64_t num_rows,
    int64_t size, ParallelRegion region, int num_threads
) {
    run_pointwise<false>({dtype, x, residual, weight, epsilon, out, num_rows, size}, {region, num_threads});
}

EXPORT(void, silu_and_mul)(
    Dtype dtype, const void* x, void* out, int64_t num_rows, int64_t size, ParallelRegion region, int num_threads
) {
    run_pointwise<true>({dtype, x, nullptr, nullptr, 0.0f, out, num_rows, size}, {region, num_threads});
}

EXPORT(int, linear)(
    Dtype dtype, const void* x, int64_t x_stride, Form form, const void* weight, const float* scales,
    const Exception* exceptions, const void* bias, void* out, int num_rows, int num_outputs, int num_inputs, int gated,
    int widened, ParallelRegion region, int num_threads
) {
    const int64_t out_stride = gated ? num_outputs / 2 : num_outputs;
    return linear(
        {dtype, x, x_stride, form, weight, scales, exceptions, bias, out, out_stride, num_rows, num_outputs, num_inputs,
         gated != 0, widened != 0, nullptr, 0, nullptr},
        {region, num_threads}
    );
}

// Uses the weight's screen if there is one.
EXPORT(int, score_outputs)(
    Dtype dtype, const void* x, int64_t x_stride, Form form, const void* weight, const float* scales,
    const Exception* exceptions, const void* bias, char* screen, float* norms, float* normalizers,
    int64_t* best, float* most, int num_rows, int num_outputs, int num_inputs, ParallelRegion region, int num_threads
) {
    const Linear a = {
        dtype, x, x_stride, form, weight, scales, exceptions, bias, nullptr, 0, num_rows, num_outputs, num_inputs, false,
        true, nullptr, 0, nullptr
    };
    const RowScores scores = {normalizers, best, most};
    if (screen != nullptr)
        return score_by_screen(a, Screen::of(screen, norms, num_outputs, num_inputs), scores, {region, num_threads});
    return score_outputs(a, scores, {region, num_threads});
}

EXPORT(int, write_screen)(
    const void* weight, const float* scales, char* screen, float* norms, int num_outputs, int num_inputs,
    ParallelRegion region, int num_threads
) {
    return write_screen(weight, scales, screen, norms, num_outputs, num_inputs, {region, num_threads});
}

EXPORT(int64_t, encode)(
    const uint16_t* weight, char* panels, Exception* exceptions, int64_t capacity, int num_outputs, int num_inputs,
    ParallelRegion region, int num_threads
) {
    return encode({weight, num_outputs, num_inputs, panels, exceptions, capacity, 0}, {region, num_threads});
}

EXPORT(int, encode_integers)(
    const uint16_t* weight, char* panels, float* scales, int num_outputs, int num_inputs, ParallelRegion region,
    int num_threads
) {
    return encode_integers({weight, num_outputs, num_inputs, panels, scales}, {region, num_threads});
}

EXPORT(int, pack_int4)(
    const uint8_t* codes, const int8_t* steps, const int8_t* bases, Int4Group* panels, int num_outputs, int num_inputs,
    ParallelRegion region, int num_threads
) {
    return pack_int4({codes, steps, bases, num_outputs, num_inputs, panels}, {region, num_threads});
}

EXPORT(int, normalizers_and_best)(
    const float* logits, int64_t stride, float* normalizers, int64_t* best, int num_rows, int size,
    ParallelRegion region, int num_threads
) {
    return score_logits(logits, stride, size, num_rows, {normalizers, best, nullptr}, {region, num_threads});
}

EXPORT(int, sample_tokens)(
    const float* logits, int64_t stride, const float* temperatures, const uint64_t* seeds, const int64_t* positions,
    const int64_t* sequence_indexes, const int64_t* top_k, const float* top_p, const float* min_p, int64_t* token_ids,
    int num_rows, int size, ParallelRegion region, int num_threads
) {
    SamplingJob job = {
        {logits, stride, size, temperatures, seeds, positions, sequence_indexes, top_k, top_p, min_p, token_ids},
        {0, num_rows}, false
    };
    run_on({region, num_threads}, num_rows > 1, sample_rows, &job);
    return job.out_of_memory ? -2 : -1;
}

EXPORT(int, sum_shares)(const Meeting* meeting, Dtype dtype, void* x, int64_t count) {
    int missing = -1;
    with_element(dtype, [&](auto element) {
        using Element = decltype(element);
        missing = sum_shares<Element>(*meeting, static_cast<typename Element::Value*>(x), count);
    });
    return missing;
}

EXPORT(int, gather_shares)(
    const Meeting* meeting, const char* x, char* out, int64_t num_rows, const int64_t* row_bytes
) {
    return gather_shares(*meeting, x, out, num_rows, row_bytes);
}

EXPORT(int, decode)(
    const Decoder* decoder, const DecoderStep* step, ParallelRegion region, TeamSize team_size, int num_threads
) {
    return decode(*decoder, *step, {region, num_threads}, team_size);
}
