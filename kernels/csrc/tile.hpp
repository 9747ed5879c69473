// The pieces of the attention that attention.hpp describes which one thread computes at a time: one tile against one
// split of its context, and the merge of such parts. The cache's layout is described in multiply.hpp.
#pragma once

#include "multiply.hpp"
#if defined(TILES)
#include "multiply_tiles.hpp"
#endif

namespace {

constexpr int kSplitTokens = 128;
constexpr int kTileRows = 48;  // the most rows of Q, unless one query's group is larger
constexpr int kMaxBlocks = kSplitTokens;
// The distance, in blocks, between the one being read and the one being prefetched. With blocks of 16 tokens, 64
// components and 2 bytes, on one thread of a Zen 5 that reads all from memory, 2 and 8 take 1.2 and 1.1 times as long.
constexpr int kAhead = 4;

struct Attention {
    const void* q;
    int64_t q_stride;  // values from one token's queries to the next token's
    const void* k_cache;
    const void* v_cache;
    int64_t block_stride;  // values from one block to the next, in either cache
    const int32_t* block_tables;
    int64_t table_stride;
    const int32_t* query_starts;
    const int32_t* context_lengths;
    Dtype dtype;        // of q and out
    Dtype cache_dtype;  // of k_cache and v_cache
    int num_rows, num_blocks, block_size, num_heads, num_kv_heads, head_dim;
    float scale;
    int window;     // tokens that a query sees, including its own; 0: all up to its own
    float softcap;  // scores become softcap * tanh(score / softcap); 0: they stay as they are
    void* out;

    int group_size() const { return num_heads / num_kv_heads; }
    int split_tokens() const { return block_size * (block_size >= kSplitTokens ? 1 : kSplitTokens / block_size); }
    int tile_queries() const { return group_size() >= kTileRows ? 1 : kTileRows / group_size(); }
    int num_queries(int row) const { return query_starts[row + 1] - query_starts[row]; }
    int num_tiles(int row) const { return (num_queries(row) + tile_queries() - 1) / tile_queries(); }
    int first_seen(int position) const { return window == 0 || position < window ? 0 : position - window + 1; }
    int num_splits(int row) const { return (context_lengths[row] + split_tokens() - 1) / split_tokens(); }
};

struct SharedTile;  // cascade.hpp

// The piece of work that one thread does at a time.
struct Item {
    int row, head, tile;
    int first_split, end_split;
    int first_query, num_queries;  // within the row
    int first_position;            // of the first query; the others follow
    int end_token;                 // one past the last token that any of its queries sees
    const SharedTile* shared;      // null unless its queries are those of several rows, which its tokens come before
};

// m (to the base 2), l and part of attention.hpp, for each row of a tile. m and l are padded to whole vectors.
struct Part {
    float *most, *sum, *out;
};

ALWAYS_INLINE int64_t part_size(const Attention& a, int num_queries) {
    const int num_tile_rows = num_queries * a.group_size();
    return 2 * round_up(num_tile_rows, kWidth) + (int64_t)num_tile_rows * a.head_dim;
}

ALWAYS_INLINE Part part_at(float* memory, int num_tile_rows) {
    const int padded = round_up(num_tile_rows, kWidth);
    return {memory, memory + padded, memory + 2 * padded};
}

// Adds one split's part to what has been merged so far. Not inlined, so that both callers' results round alike.
__attribute__((noinline)) void merge(Part all, Part part, int num_tile_rows, int head_dim) {
    for (int first = 0; first < num_tile_rows; first += kWidth) {
        const Floats all_most = load_floats(all.most + first), part_most = load_floats(part.most + first);
        const Floats all_sum = load_floats(all.sum + first), part_sum = load_floats(part.sum + first);
        const Floats most = larger_of(all_most, part_most);
        const Floats old = all_sum == 0.0f ? Floats{} : power_of_two(all_most - most);
        const Floats added = part_sum == 0.0f ? Floats{} : power_of_two(part_most - most);
        store_floats(all.most + first, most);
        store_floats(all.sum + first, all_sum * old + part_sum * added);
        for (int lane = 0; lane < least(kWidth, num_tile_rows - first); ++lane) {
            if (part_sum[lane] == 0.0f) continue;  // the query sees nothing of the split
            float* to = all.out + (int64_t)(first + lane) * head_dim;
            const float* from = part.out + (int64_t)(first + lane) * head_dim;
            int i = 0;
            for (; i + kWidth <= head_dim; i += kWidth)
                store_floats(to + i, load_floats(to + i) * old[lane] + load_floats(from + i) * added[lane]);
            for (; i < head_dim; ++i) to[i] = to[i] * old[lane] + from[i] * added[lane];
        }
    }
}

// `x` where the lane's token is one of from..end - 1, else `other`; lane 0's token is `first`, the others follow.
ALWAYS_INLINE Floats where_seen(Floats x, int first, int from, int end, float other) {
    Floats tokens;
    for (int lane = 0; lane < kWidth; ++lane) tokens[lane] = (float)(first + lane);
    x = tokens < (float)end ? x : broadcast(other);
    return tokens >= (float)from ? x : broadcast(other);
}

// Calls `visit` for each vector that holds some of the tokens from..end - 1, with whether it holds others as well.
template <class Visit>
ALWAYS_INLINE void visit_seen(int from, int end, Visit visit) {
    int i = from / kWidth * kWidth;
    if (i < from && i < end) visit(i, true), i += kWidth;
    for (; i + kWidth <= end; i += kWidth) visit(i, false);
    if (i < end) visit(i, true);
}

// Replaces scores by softcap * tanh(scale * score / softcap), to the base 2.
void cap_scores(const Attention& a, float* scores, int count) {
    const float twice = 2.0f * kLog2E * a.scale / a.softcap;
    for (int i = 0; i < count; i += kWidth) {
        const Floats tanh = 1.0f - 2.0f / (power_of_two(load_floats(scores + i) * twice) + 1.0f);
        store_floats(scores + i, tanh * (a.softcap * kLog2E));
    }
}

// The largest score times `factor` of one row, which sees from..end - 1 of the split's tokens.
ALWAYS_INLINE float find_most(const float* scores, float factor, int from, int end) {
    Floats most = broadcast(-kInfinity);
    visit_seen(from, end, [&](int i, bool partly) __attribute__((always_inline)) {
        const Floats s = load_floats(scores + i) * factor;
        most = larger_of(partly ? where_seen(s, i, from, end, -kInfinity) : s, most);
    });
    return largest_of(most);
}

// Turns scores into probabilities, 0 for tokens that are not seen. `p` may overwrite the scores. Returns the sum.
template <class Left>
ALWAYS_INLINE float soften(
    const float* scores, float factor, float most, typename Left::Value* p, int from, int end, int num_padded
) {
    for (int i = 0; i < from / kWidth * kWidth; i += kWidth) Left::store(p + i, Floats{});
    Floats sum = {};
    visit_seen(from, end, [&](int i, bool partly) __attribute__((always_inline)) {
        Floats e = power_of_two(load_floats(scores + i) * factor - most);
        if (partly) e = where_seen(e, i, from, end, 0.0f);
        sum += e;
        Left::store(p + i, e);
    });
    for (int i = round_up(end, kWidth); i < num_padded; i += kWidth) Left::store(p + i, Floats{});
    return sum_of(sum);
}

// A thread's working memory for one tile.
template <class Product>
struct Scratch {
    using Unit = typename Product::Unit;
    Product product;
    typename Product::Left::Value* q;
    float* scores;
    typename Product::Left::Value* p;
    Part all, part, shared;
    int stride;  // of scores and p, in tokens
    Chunk<Unit> chunks[1024 / kWidth + kMaxBlocks];
    const Unit* blocks[2 * kMaxBlocks + kAhead];  // K's, V's, and K's of the split that follows
    const Unit* following[kAhead];
};

// One head's part of a block of a cache; each block is [num_kv_heads][units].
template <class Product>
ALWAYS_INLINE const typename Product::Unit* block_units(const Attention& a, const void* cache, int32_t block, int head) {
    const int64_t units = (int64_t)a.block_size * a.head_dim / Product::kPerUnit;
    const int64_t stride = a.block_stride / Product::kPerUnit;
    return static_cast<const typename Product::Unit*>(cache) + block * stride + head * units;
}

// Lists the first K blocks of an item's split, at most kAhead; returns how many.
template <class Product>
ALWAYS_INLINE int list_first_blocks(
    const Attention& a, const Item& item, int split, const typename Product::Unit** list
) {
    const int first = split * a.split_tokens() / a.block_size;
    const int end = least((item.end_token + a.block_size - 1) / a.block_size, first + kAhead);
    const int32_t* table = a.block_tables + item.row * a.table_stride;
    for (int block = first; block < end; ++block)
        list[block - first] = block_units<Product>(a, a.k_cache, table[block], item.head);
    return end > first ? end - first : 0;
}

template <class Product>
void attend_split(
    const Attention& a, const Item& item, int split, int num_following, Scratch<Product>& scratch, Part part
) {
    const int begin = split * a.split_tokens(), end = least(begin + a.split_tokens(), item.end_token);
    const int first_block = begin / a.block_size;
    const int num_blocks = (end - begin + a.block_size - 1) / a.block_size;
    const int group_size = a.group_size(), num_tile_rows = item.num_queries * group_size;
    const int32_t* table = a.block_tables + item.row * a.table_stride + first_block;

    // -- the blocks, in the order in which they are read
    const typename Product::Unit** blocks = scratch.blocks;
    for (int block = 0; block < num_blocks; ++block) {
        blocks[block] = block_units<Product>(a, a.k_cache, table[block], item.head);
        blocks[num_blocks + block] = block_units<Product>(a, a.v_cache, table[block], item.head);
    }
    for (int i = 0; i < kAhead; ++i)
        blocks[2 * num_blocks + i] = i < num_following ? scratch.following[i] : blocks[2 * num_blocks - 1];

    // -- scores
    int num_chunks = 0;
    for (int block = 0; block < num_blocks; ++block) {
        const int num_columns = least(a.block_size, end - begin - block * a.block_size);
        for (int column = 0; column < num_columns; column += Product::kChunk) {
            const int64_t passed = (int64_t)column * (a.head_dim / Product::kPerUnit);
            scratch.chunks[num_chunks++] = {
                blocks[block] + column,
                blocks[block + kAhead] + passed,
                block * a.block_size + column,
                least(Product::kChunk, a.block_size - column),
            };
        }
    }
    multiply_scores(
        scratch.product, scratch.q, num_tile_rows, a.head_dim, scratch.chunks, num_chunks, a.block_size, scratch.scores,
        scratch.stride
    );

    // -- probabilities; first all rows' largest scores, so that no row waits for its own
    const int num_padded = round_up(end - begin, Product::value_tokens(a.block_size));
    const float factor = a.softcap == 0.0f ? a.scale * kLog2E : 1.0f;
    if (a.softcap != 0.0f)
        for (int row = 0; row < num_tile_rows; ++row)
            cap_scores(a, scratch.scores + (int64_t)row * scratch.stride, end - begin);
    const auto for_rows = [&](auto body) __attribute__((always_inline)) {
        for (int query = 0; query < item.num_queries; ++query) {
            const int position = item.first_position + query;
            const int first_seen = a.first_seen(position) - begin, seen = least(end, position + 1) - begin;
            const int from = first_seen > 0 ? first_seen : 0;
            const bool none = from >= seen;
            for (int row = query * group_size; row < (query + 1) * group_size; ++row)
                body(row, none ? 0 : from, none ? 0 : seen);
        }
    };
    for_rows([&](int row, int from, int seen) __attribute__((always_inline)) {
        part.most[row] = find_most(scratch.scores + (int64_t)row * scratch.stride, factor, from, seen);
    });
    for_rows([&](int row, int from, int seen) __attribute__((always_inline)) {
        const int64_t start = (int64_t)row * scratch.stride;
        part.sum[row] = soften<typename Product::Left>(
            scratch.scores + start, factor, part.most[row], scratch.p + start, from, seen, num_padded
        );
    });

    // -- values
    const ValueBlocks<typename Product::Unit> v = {
        blocks + num_blocks,
        blocks + num_blocks + kAhead,
        num_blocks,
        a.block_size / Product::kPerUnit,
        (end - begin + Product::kPerUnit - 1) / Product::kPerUnit,
        (end - begin) % Product::kPerUnit != 0,
        a.head_dim,
    };
    multiply_values(scratch.product, scratch.p, num_tile_rows, scratch.stride, v, part.out);
}

// Loads the queries of one token's group.
template <class Left>
void load_query(const Attention& a, int64_t token, int head, typename Left::Value* to) {
    const int size = a.group_size() * a.head_dim;
    with_element(a.dtype, [&](auto element) {
        using Element = decltype(element);
        const auto* q = static_cast<const typename Element::Value*>(a.q);
        convert<Element, Left>(q + token * a.q_stride + (int64_t)head * size, to, size);
    });
}

template <class Left>
void load_queries(const Attention& a, const Item& item, typename Left::Value* to) {
    const int64_t first_token = a.query_starts[item.row] + item.first_query;
    for (int query = 0; query < item.num_queries; ++query)
        load_query<Left>(a, first_token + query, item.head, to + (int64_t)query * a.group_size() * a.head_dim);
}

void store_output(const Attention& a, const Item& item, Part all) {
    const int group_size = a.group_size();
    const int64_t first_token = a.query_starts[item.row] + item.first_query;
    with_element(a.dtype, [&](auto element) {
        using Element = decltype(element);
        for (int row = 0; row < item.num_queries * group_size; ++row) {
            const int64_t token = first_token + row / group_size;
            const int64_t head = (int64_t)item.head * group_size + row % group_size;
            auto* to = static_cast<typename Element::Value*>(a.out) + (token * a.num_heads + head) * a.head_dim;
            const float* from = all.out + (int64_t)row * a.head_dim;
            const float inverse = 1.0f / all.sum[row];
            int i = 0;
            for (; i + kWidth <= a.head_dim; i += kWidth) Element::store(to + i, load_floats(from + i) * inverse);
            for (; i < a.head_dim; ++i) to[i] = Element::narrow(from[i] * inverse);
        }
    });
}

// Copies some of the rows of one part to a part of their own.
void copy_rows(Part from, int first, int num_tile_rows, int head_dim, Part to) {
    memcpy(to.most, from.most + first, sizeof(float) * num_tile_rows);
    memcpy(to.sum, from.sum + first, sizeof(float) * num_tile_rows);
    memcpy(to.out, from.out + (int64_t)first * head_dim, sizeof(float) * num_tile_rows * head_dim);
}

void clear(Part part, int num_tile_rows, int head_dim) {
    memset(part.out, 0, sizeof(float) * num_tile_rows * head_dim);
    for (int row = 0; row < num_tile_rows; ++row) part.most[row] = -kInfinity, part.sum[row] = 0.0f;
}

}  // namespace
