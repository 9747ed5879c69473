// What one thread computes at a time of the attention that attention.hpp describes: one tile against one split of its
// context, and the merge of such parts. The cache's layout stands in multiply.hpp.
#pragma once

#include "multiply.hpp"

namespace {

constexpr int kSplitTokens = 128;
constexpr int kTileRows = 48;  // rows of Q at most, unless one query's group is larger
constexpr int kMaxBlocks = kSplitTokens;
constexpr int kAhead = 4;  // blocks between the one that is read and the one that is prefetched

struct Attention {
    const void* q;
    int64_t q_stride;  // values between a token's queries and the next one's
    const void* k_cache;
    const void* v_cache;
    const int32_t* block_tables;
    int64_t table_stride;
    const int32_t* query_starts;
    const int32_t* context_lengths;
    int num_rows, num_blocks, block_size, num_heads, num_kv_heads, head_dim;
    float scale;
    int window;     // tokens that a query sees, its own among them; 0: all before it
    float softcap;  // scores become softcap * tanh(score / softcap); 0: they stay
    void* out;

    int group_size() const { return num_heads / num_kv_heads; }
    int split_tokens() const { return block_size * (block_size >= kSplitTokens ? 1 : kSplitTokens / block_size); }
    int tile_queries() const { return group_size() >= kTileRows ? 1 : kTileRows / group_size(); }
    int num_queries(int row) const { return query_starts[row + 1] - query_starts[row]; }
    int num_tiles(int row) const { return (num_queries(row) + tile_queries() - 1) / tile_queries(); }
    int first_seen(int position) const { return window == 0 || position < window ? 0 : position - window + 1; }
    int num_splits(int row) const { return (context_lengths[row] + split_tokens() - 1) / split_tokens(); }
};

// What one thread does at a time.
struct Item {
    int row, head, tile;
    int first_split, end_split;
    int first_query, num_queries;  // of the row's
    int end_token;                 // behind the last that any of its queries sees
};

// m, l and part, for each row of a tile.
struct Part {
    float *most, *sum, *out;
};

ALWAYS_INLINE int64_t part_size(const Attention& a, int num_queries) {
    return (int64_t)num_queries * a.group_size() * (a.head_dim + 2);
}

ALWAYS_INLINE Part part_at(float* memory, int num_tile_rows) {
    return {memory, memory + num_tile_rows, memory + 2 * num_tile_rows};
}

// Adds one split's part to what has been merged so far. Not inlined, so that both ways to it round alike.
__attribute__((noinline)) void merge(Part all, Part part, int num_tile_rows, int head_dim) {
    for (int row = 0; row < num_tile_rows; ++row) {
        if (part.sum[row] == 0.0f) continue;  // the query stands before the split
        const float most = all.most[row] > part.most[row] ? all.most[row] : part.most[row];
        const Floats powers = exponential(Floats{all.most[row] - most, part.most[row] - most});
        const float old = all.sum[row] == 0.0f ? 0.0f : powers[0], added = powers[1];
        all.most[row] = most;
        all.sum[row] = all.sum[row] * old + part.sum[row] * added;
        float* to = all.out + (int64_t)row * head_dim;
        const float* from = part.out + (int64_t)row * head_dim;
        for (int i = 0; i < head_dim; ++i) to[i] = to[i] * old + from[i] * added;
    }
}

// `x` where the lane's token, `first` and on, is one of from..end - 1, and else `other`.
ALWAYS_INLINE Floats where_seen(Floats x, int first, int from, int end, float other) {
    if (first >= from && first + kWidth <= end) return x;
    Floats tokens;
    for (int lane = 0; lane < kWidth; ++lane) tokens[lane] = (float)(first + lane);
    x = tokens < (float)end ? x : broadcast(other);
    return tokens >= (float)from ? x : broadcast(other);
}

// Scores to probabilities of one row of a tile, which sees from..end - 1 of the split's tokens; the others' are zero.
template <class Element>
ALWAYS_INLINE void soften(
    const Attention& a, float* scores, typename Element::Value* p, int from, int end, int num_padded, float* most_out,
    float* sum_out
) {
    if (from >= end) end = 0;
    // -- scale, cap, hide what is not seen, find the maximum
    Floats most = broadcast(-kInfinity);
    int i = 0;
    for (; i < end; i += kWidth) {
        Floats s = load_floats(scores + i) * a.scale;
        if (a.softcap != 0.0f) s = a.softcap - 2.0f * a.softcap / (exponential(s * (2.0f / a.softcap)) + 1.0f);
        s = where_seen(s, i, from, end, -kInfinity);
        store_floats(scores + i, s);
        most = larger_of(s, most);
    }
    const float m = largest_of(most);
    // -- exponentiate and sum
    Floats sum = {};
    for (i = 0; i < end; i += kWidth) {
        const Floats e = where_seen(exponential(load_floats(scores + i) - m), i, from, end, 0.0f);
        sum += e;
        Element::store(p + i, e);
    }
    for (; i < num_padded; i += kWidth) Element::store(p + i, Floats{});
    *most_out = m;
    *sum_out = end > 0 ? sum_of(sum) : 0.0f;
}

// A thread's memory for one tile.
template <class Element>
struct Scratch {
    uint32_t* q;
    float* scores;
    typename Element::Value* p;
    Part all, part;
    int stride;  // of scores and p, in tokens
    Chunk chunks[1024 / kWidth + kMaxBlocks];
    const uint32_t* blocks[2 * kMaxBlocks + kAhead];  // K's, V's, and the next ones' K
    const uint32_t* following[kAhead];
};

// The blocks of one head of a cache: [num_blocks][num_kv_heads][units of the block].
template <class Element>
ALWAYS_INLINE const uint32_t* block_units(const Attention& a, const void* cache, int32_t block, int head) {
    const int64_t units = (int64_t)a.block_size * a.head_dim / Element::kPerUnit;
    return static_cast<const uint32_t*>(cache) + ((int64_t)block * a.num_kv_heads + head) * units;
}

// The K blocks that an item's split begins with; gives how many.
template <class Element>
ALWAYS_INLINE int list_first_blocks(const Attention& a, const Item& item, int split, const uint32_t** list) {
    const int first = split * a.split_tokens() / a.block_size;
    const int end = least((item.end_token + a.block_size - 1) / a.block_size, first + kAhead);
    const int32_t* table = a.block_tables + item.row * a.table_stride;
    for (int block = first; block < end; ++block)
        list[block - first] = block_units<Element>(a, a.k_cache, table[block], item.head);
    return end > first ? end - first : 0;
}

template <class Element>
void attend_split(const Attention& a, const Item& item, int split, int num_following, Scratch<Element>& scratch) {
    const int begin = split * a.split_tokens(), end = least(begin + a.split_tokens(), item.end_token);
    const int first_block = begin / a.block_size;
    const int num_blocks = (end - begin + a.block_size - 1) / a.block_size;
    const int group_size = a.group_size(), num_tile_rows = item.num_queries * group_size;
    const int units_per_head = a.head_dim / Element::kPerUnit;
    const int32_t* table = a.block_tables + item.row * a.table_stride + first_block;

    // -- the blocks, in the order in which they are read
    const uint32_t** blocks = scratch.blocks;
    for (int block = 0; block < num_blocks; ++block) {
        blocks[block] = block_units<Element>(a, a.k_cache, table[block], item.head);
        blocks[num_blocks + block] = block_units<Element>(a, a.v_cache, table[block], item.head);
    }
    for (int i = 0; i < kAhead; ++i)
        blocks[2 * num_blocks + i] = i < num_following ? scratch.following[i] : blocks[2 * num_blocks - 1];

    // -- scores
    int num_chunks = 0;
    for (int block = 0; block < num_blocks; ++block) {
        const int num_columns = least(a.block_size, end - begin - block * a.block_size);
        for (int column = 0; column < num_columns; column += kWidth) {
            const int64_t passed = (int64_t)column * units_per_head;
            scratch.chunks[num_chunks++] = {
                blocks[block] + column,
                blocks[block + kAhead] + passed,
                block * a.block_size + column,
                least(kWidth, a.block_size - column),
            };
        }
    }
    multiply_scores<Element>(
        scratch.q, num_tile_rows, units_per_head, scratch.chunks, num_chunks, a.block_size, scratch.scores,
        scratch.stride
    );

    // -- probabilities
    const int first_position = item.end_token - item.num_queries;
    const int num_padded = round_up(end - begin, Element::kPerUnit);
    for (int row = 0; row < num_tile_rows; ++row) {
        const int position = first_position + row / group_size;
        const int from = a.first_seen(position) - begin, seen = least(end, position + 1) - begin;
        soften<Element>(
            a, scratch.scores + (int64_t)row * scratch.stride, scratch.p + (int64_t)row * scratch.stride,
            from > 0 ? from : 0, seen, num_padded, scratch.part.most + row, scratch.part.sum + row
        );
    }

    // -- values
    const ValueBlocks v = {
        blocks + num_blocks,
        blocks + num_blocks + kAhead,
        num_blocks,
        a.block_size / Element::kPerUnit,
        num_padded / Element::kPerUnit,
        (end - begin) % Element::kPerUnit != 0,
        a.head_dim,
    };
    multiply_values<Element>(
        reinterpret_cast<const uint32_t*>(scratch.p), num_tile_rows, scratch.stride / Element::kPerUnit, v,
        scratch.part.out, a.head_dim
    );
}

template <class Element>
void load_queries(const Attention& a, const Item& item, uint32_t* to) {
    using Value = typename Element::Value;
    const int64_t size = (int64_t)a.group_size() * a.head_dim;
    const Value* q = static_cast<const Value*>(a.q) + item.head * size;
    const int64_t first_token = a.query_starts[item.row] + item.first_query;
    for (int query = 0; query < item.num_queries; ++query)
        memcpy(
            reinterpret_cast<Value*>(to) + query * size, q + (first_token + query) * a.q_stride, size * sizeof(Value)
        );
}

template <class Element>
void store_output(const Attention& a, const Item& item, Part all) {
    using Value = typename Element::Value;
    const int group_size = a.group_size();
    const int64_t first_token = a.query_starts[item.row] + item.first_query;
    for (int row = 0; row < item.num_queries * group_size; ++row) {
        const int64_t token = first_token + row / group_size;
        const int64_t head = (int64_t)item.head * group_size + row % group_size;
        Value* to = static_cast<Value*>(a.out) + (token * a.num_heads + head) * a.head_dim;
        const float* from = all.out + (int64_t)row * a.head_dim;
        const float inverse = 1.0f / all.sum[row];
        int i = 0;
        for (; i + kWidth <= a.head_dim; i += kWidth) Element::store(to + i, load_floats(from + i) * inverse);
        for (; i < a.head_dim; ++i) to[i] = Element::narrow(from[i] * inverse);
    }
}

void clear(Part part, int num_tile_rows, int head_dim) {
    memset(part.out, 0, sizeof(float) * num_tile_rows * head_dim);
    for (int row = 0; row < num_tile_rows; ++row) part.most[row] = -kInfinity, part.sum[row] = 0.0f;
}

}  // namespace
