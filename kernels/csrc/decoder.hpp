// All layers of a decoder like Llama's (worker/models/llama.py says what they compute), for the tokens of one step.
//
// A layer is eight jobs, the operations in the other files:
//
//     add and normalize | q, k, v | rotate and cache | attend | output
//     add and normalize | gate and up | down
//
// After the last layer's attention only the tokens whose output is asked for go on: of a prompt, the last one. The
// products between one layer's attention and the next prefetch what the next one is going to read (ahead.hpp).
#pragma once

#include "attention.hpp"
#include "cache.hpp"
#include "linear.hpp"
#include "pointwise.hpp"
#include "program.hpp"

namespace {

// These structs, up to DecoderStep, are those of kernels/cpu_decoder.py.
struct Weights {
    Form form;
    const void* panels;
    const float* scales;
    const Exception* exceptions;
    const void* bias;
    int num_outputs, num_inputs;
};

struct DecoderLayer {
    const void* attention_norm;
    const void* q_norm;  // and k_norm: for each head, or null
    const void* k_norm;
    const void* mlp_norm;
    Weights qkv, output, gate_up, down;
    int window;
};

struct Decoder {
    const DecoderLayer* layers;
    const void* norm;  // after the last layer
    Dtype dtype;
    int num_layers, hidden_size, num_heads, num_kv_heads, head_dim;
    float epsilon, scale;
};

struct DecoderStep {
    void* residual;  // [num_tokens][hidden_size]; on entry the embeddings
    void* out;       // [num_scored][hidden_size]
    void* scratch;   // per token: 2 * hidden_size values, then q, k and v, then q, then the MLP's values
    const void* cos;
    const void* sin;
    void* const* caches;  // the K and the V cache of each layer in turn
    int64_t block_stride;  // values from one block to the next, in each cache
    const int64_t* slot_mapping;
    const int32_t* block_tables;
    const int32_t* query_starts;
    const int32_t* context_lengths;
    const int64_t* scored;  // [num_scored], ascending: the tokens in `out`; not read if those are all
    int64_t table_stride;
    Dtype cache_dtype;
    int num_tokens, num_rows, num_scored, num_blocks, block_size;
};

struct LayerJobs {
    PointwiseJob attention_norm;
    LinearJob qkv;
    CacheJob cache;
    AttentionJob attention;
    LinearJob output;
    PointwiseJob mlp_norm;
    LinearJob gate_up, down;
    ContextAhead context;  // of this layer
};

// Moves the rows of the scored tokens to the front, in both buffers.
struct PickJob {
    const int64_t* scored;
    int num_scored;
    char *attended, *residual;
    int64_t attended_bytes, residual_bytes;  // per row
};

inline void pick_rows(void* data, int thread) {
    PickJob& job = *static_cast<PickJob*>(data);
    if (thread > 0) return;
    // A row only moves towards the front, so each is read before another takes its place.
    for (int64_t to = 0; to < job.num_scored; ++to) {
        const int64_t from = job.scored[to];
        memmove(job.attended + to * job.attended_bytes, job.attended + from * job.attended_bytes, job.attended_bytes);
        memmove(job.residual + to * job.residual_bytes, job.residual + from * job.residual_bytes, job.residual_bytes);
    }
}

// Lists each block once per share whose queries see it, up to `most_bytes` of K and V in all; `ahead.ids` is to be
// freed. Returns false if out of memory.
bool list_blocks(const Attention& a, const Plan& plan, int64_t most_bytes, BlocksAhead& ahead) {
    const int64_t value_bytes = size_of(a.cache_dtype);
    ahead.bytes = (int64_t)a.block_size * a.num_kv_heads * a.head_dim * value_bytes;
    ahead.stride = a.block_stride * value_bytes;
    ahead.num_shares = plan.items.num_shares;
    const int64_t most = most_bytes / (2 * ahead.bytes) / ahead.num_shares;  // blocks per share
    ahead.ids = static_cast<int32_t*>(malloc(sizeof(int32_t) * most * ahead.num_shares + 1));
    uint8_t* const last_lister = static_cast<uint8_t*>(calloc(a.num_blocks, 1));  // per block: share + 1, or 0
    const bool has_memory = ahead.ids != nullptr && last_lister != nullptr;
    int share = 0;  // the one whose blocks are being listed
    int64_t count = 0, end = most;
    const auto list_row = [&](int row) {
        const int32_t* table = a.block_tables + row * a.table_stride;
        const int first_seen = a.first_seen(a.context_lengths[row] - a.num_queries(row));
        const int last = (a.context_lengths[row] - 1) / a.block_size;
        for (int i = first_seen / a.block_size; i <= last && count < end; ++i) {
            if (last_lister[table[i]] != share + 1) ahead.ids[count++] = table[i];
            last_lister[table[i]] = share + 1;
        }
    };
    if (has_memory)
        visit_items(a, plan, [&](const int32_t* rows, int num_rows, int64_t first_item, int64_t) {
            for (const int next = plan.items.find(first_item); share < next; ++share) {
                ahead.ends[share] = count;
                end = count + most;
            }
            for (int i = 0; i < num_rows; ++i) list_row(rows[i]);
        });
    for (; share < ahead.num_shares; ++share) ahead.ends[share] = count;
    free(last_lister);
    return has_memory;
}

// What one job hands to the next, within the layers.
struct Buffers {
    char *x, *normed, *heads, *attended, *gated;

    Buffers(const Decoder& d, const DecoderStep& step) {
        const int64_t values = (int64_t)step.num_tokens * size_of(d.dtype);
        x = static_cast<char*>(step.scratch);
        normed = x + values * d.hidden_size;
        heads = normed + values * d.hidden_size;
        attended = heads + values * (d.num_heads + 2 * d.num_kv_heads) * d.head_dim;
        gated = attended + values * d.num_heads * d.head_dim;
    }
};

// Writes out the jobs of each layer, and the stages that run them.
class DecoderPlan {
  public:
    DecoderPlan(
        const Decoder& decoder, const DecoderStep& step, int num_threads, const Plan& attention,
        const BlocksAhead& ahead
    )
        : d(decoder), step(step), b(decoder, step), num_tokens(step.num_tokens), num_threads(num_threads),
          attention(attention), ahead(ahead) {}

    // `jobs` has room for all layers, `stages` for eight per layer and two more. Returns the number of stages.
    int write(LayerJobs* jobs, PickJob& pick, PointwiseJob& last, Stage* stages) {
        const Work norm = pointwise_work<false>(d.dtype);
        Stage* next = stages;
        for (int i = 0; i < d.num_layers; ++i) {
            const DecoderLayer& layer = d.layers[i];
            LayerJobs& job = jobs[i];
            const bool is_last = i + 1 == d.num_layers;
            const LinearJob* output = is_last && step.num_scored == 0 ? nullptr : &job.output;
            const LinearJob* behind = is_last ? nullptr : &jobs[i + 1].qkv;
            ContextAhead* context = is_last ? nullptr : &jobs[i + 1].context;
            const auto cache = [&](int number) { return static_cast<const char*>(step.caches[2 * i + number]); };
            job.context = ContextAhead(ahead, cache(0), cache(1));
            // Nothing is added to the embeddings.
            job.attention_norm = i == 0 ? normalize(step.residual, nullptr, layer.attention_norm, b.normed)
                                        : normalize(b.x, step.residual, layer.attention_norm, b.normed);
            job.qkv = multiply(layer.qkv, b.normed, b.heads, output, &job.context);
            job.cache = {cache_write(i), Shares::evenly(step.num_tokens, num_threads)};
            job.attention = {attend(i), attention, false};
            const bool picks = is_last && step.num_scored < step.num_tokens;
            if (picks) num_tokens = step.num_scored;
            job.output = multiply(layer.output, b.attended, b.x, &job.gate_up, context);
            job.mlp_norm = normalize(b.x, step.residual, layer.mlp_norm, b.normed);
            job.gate_up = multiply(layer.gate_up, b.normed, b.gated, &job.down, context, true);
            job.down = multiply(layer.down, b.gated, b.x, behind, context);

            *next++ = {norm, &job.attention_norm};
            *next++ = {job.qkv.work, &job.qkv};
            *next++ = {cache_work(step.cache_dtype), &job.cache};
            *next++ = {attention_work(job.attention.a), &job.attention};
            if (picks) {
                pick = pick_scored();
                *next++ = {pick_rows, &pick};
                if (num_tokens == 0) return (int)(next - stages);
            }
            *next++ = {job.output.work, &job.output};
            *next++ = {norm, &job.mlp_norm};
            *next++ = {job.gate_up.work, &job.gate_up};
            *next++ = {job.down.work, &job.down};
        }
        last = normalize(b.x, step.residual, d.norm, step.out);
        *next++ = {norm, &last};
        return (int)(next - stages);
    }

    // The most bytes of K and V to prefetch in each layer: one per ten multiplications, since few rows leave little
    // memory bandwidth idle; and no more than stays in the cache that cores share until it is read.
    int64_t most_bytes_ahead() const {
        constexpr int64_t kMostBytes = 8 << 20;
        const int64_t bytes = num_weights() * num_tokens / 10;
        return bytes < kMostBytes ? bytes : kMostBytes;
    }

    // The attention of the layer that sees the most tokens.
    Attention attend_widest() const {
        Attention widest = attend(0);
        for (int i = 1; i < d.num_layers; ++i) {
            const int window = d.layers[i].window;
            if (window == 0 || (widest.window > 0 && window > widest.window)) widest.window = window;
        }
        return widest;
    }

    Attention attend(int layer) const {
        return {b.heads, heads_stride(), step.caches[2 * layer], step.caches[2 * layer + 1], step.block_stride,
                step.block_tables, step.table_stride, step.query_starts, step.context_lengths, d.dtype, step.cache_dtype,
                step.num_rows, step.num_blocks, step.block_size, d.num_heads, d.num_kv_heads, d.head_dim, d.scale,
                d.layers[layer].window, 0.0f, b.attended};
    }

    CacheWrite cache_write(int layer) const {
        const int64_t stride = heads_stride();
        void* k = b.heads + (int64_t)d.num_heads * d.head_dim * size_of(d.dtype);
        void* v = static_cast<char*>(k) + (int64_t)d.num_kv_heads * d.head_dim * size_of(d.dtype);
        return {d.dtype, step.cache_dtype, k, v, stride, stride, step.caches[2 * layer], step.caches[2 * layer + 1],
                step.block_stride, step.slot_mapping, (int64_t)step.num_blocks * step.block_size, step.num_tokens,
                step.block_size, d.num_kv_heads, d.head_dim, b.heads, stride, d.num_heads + d.num_kv_heads, step.cos,
                step.sin, d.layers[layer].q_norm, d.layers[layer].k_norm, d.epsilon};
    }

  private:
    // Values from one token's queries, keys and values to the next token's.
    int64_t heads_stride() const { return (int64_t)(d.num_heads + 2 * d.num_kv_heads) * d.head_dim; }

    // Weights of one layer.
    int64_t num_weights() const {
        const DecoderLayer& layer = d.layers[0];
        const auto of = [](const Weights& weights) { return (int64_t)weights.num_outputs * weights.num_inputs; };
        return of(layer.qkv) + of(layer.output) + of(layer.gate_up) + of(layer.down);
    }

    PointwiseJob normalize(const void* x, void* residual, const void* weight, void* out) const {
        return make_job({d.dtype, x, residual, weight, d.epsilon, out, num_tokens, d.hidden_size}, num_threads);
    }

    PickJob pick_scored() const {
        const int64_t attended_bytes = (int64_t)d.num_heads * d.head_dim * size_of(d.dtype);
        const int64_t residual_bytes = (int64_t)d.hidden_size * size_of(d.dtype);
        char* residual = static_cast<char*>(step.residual);
        return {step.scored, step.num_scored, b.attended, residual, attended_bytes, residual_bytes};
    }

    LinearJob multiply(
        const Weights& weights, const void* x, void* out, const LinearJob* following, ContextAhead* context,
        bool gated = false
    ) const {
        const int64_t context_bytes = ahead.all_bytes() * kPanel * weights.num_inputs / num_weights();
        LinearJob job = make_job(
            {d.dtype, x, weights.num_inputs, weights.form, weights.panels, weights.scales, weights.exceptions,
             weights.bias, out, gated ? weights.num_outputs / 2 : weights.num_outputs, num_tokens, weights.num_outputs,
             weights.num_inputs, gated, false, context, context_bytes, nullptr},
            num_threads
        );
        job.following = following;
        return job;
    }

    const Decoder& d;
    const DecoderStep& step;
    const Buffers b;
    int num_tokens;  // of the next job
    const int num_threads;
    const Plan& attention;
    const BlocksAhead& ahead;
};

bool ran_out_of_memory(const LayerJobs& job) {
    return job.qkv.out_of_memory || job.attention.out_of_memory || job.output.out_of_memory ||
           job.gate_up.out_of_memory || job.down.out_of_memory;
}

// Returns -1; or the index of a row that does not fit (see `find_misfit`); or num_rows + 1 plus the index of a token
// whose slot does not exist; or -2 if out of memory.
int decode(const Decoder& decoder, const DecoderStep& step, const Threads& threads, TeamSize team_size) {
    if (step.num_tokens == 0) return -1;
    Plan attention = {};
    BlocksAhead ahead = {};
    DecoderPlan plan(decoder, step, threads.num_threads, attention, ahead);
    const int token = find_misfit(plan.cache_write(0));
    if (token >= 0) return step.num_rows + 1 + token;
    const Attention first = plan.attend(0);
    const int row = find_misfit(first, step.num_tokens);
    if (row >= 0) return row;

    LayerJobs* jobs = static_cast<LayerJobs*>(aligned_alloc(64, sizeof(LayerJobs) * decoder.num_layers));
    Stage* stages = static_cast<Stage*>(malloc(sizeof(Stage) * (8 * decoder.num_layers + 2)));
    bool out_of_memory = !make_plan(first, threads.num_threads, attention) || jobs == nullptr || stages == nullptr ||
                         !list_blocks(plan.attend_widest(), attention, plan.most_bytes_ahead(), ahead);
    if (!out_of_memory) {
        PickJob pick;
        PointwiseJob last;
        Program program;
        program.num_stages = plan.write(jobs, pick, last, stages);
        program.stages = stages;
        program.team_size = threads.region != nullptr && threads.num_threads > 1 ? team_size : nullptr;
        run_on(threads, true, run_program, &program);
        for (int i = 0; i < decoder.num_layers; ++i) out_of_memory |= ran_out_of_memory(jobs[i]);
    }
    free(ahead.ids);
    free_plan(attention);
    free(stages);
    free(jobs);
    return out_of_memory ? -2 : -1;
}

}  // namespace
