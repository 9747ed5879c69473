// Causal attention of ragged queries over the paged cache: decode rows and prefill chunks alike.
// PagedAttention: Kwon et al., SOSP'23, arXiv:2309.06180. Softmax in one pass over the context: Milakov & Gimelshein
// 2018, arXiv:1805.02867, Alg. 3.
// The split of a context with a merge: flash-decoding, Dao et al. 2023.
//
// A tile is some queries of one row with all query heads of one K/V head: for a decode row, one query times the group,
// so that a block is read once for the group. A context is cut into splits of a few blocks; how many blocks depends on
// the block size alone (`split_tokens`). For each split a tile computes
//
//     scores = Q K^T;  m = max;  P = exp(scores - m);  l = sum of P;  part = P V
//
// and the parts are merged in order. Whether one thread does this for all splits of a tile as it goes, or several
// threads compute parts and the last one merges them, changes no bit; nor does it matter how a row's queries were cut
// into chunks, or what else is in the batch. A row's result depends on its own queries, its context and the block size.
//
// With a window, splits that no query of a tile sees are left out. Decode rows whose contexts begin with the same
// blocks go through these together (cascade.hpp).
//
// Nothing past a row's context is read, except for K columns whose scores are then left out, and the second half of a
// pair of V whose first half is the last token: that counts as zero.
#pragma once

#include <stdlib.h>

#include "cascade.hpp"
#include "threads.hpp"
#include "tile.hpp"

namespace {

// A row's share of the work. The items of the families come before all rows' items.
struct RowPlan {
    int64_t first_item;     // one item per tile and K/V head, or per split of these; none if the row is in a family
    bool split;             // whether each split of each tile is an item of its own
    int64_t first_partial;  // in floats
    int64_t first_tile;     // among the tiles of all split rows, counted once per K/V head
};

// How a step's work is shared out; it does not depend on a layer's window or caches.
struct Plan {
    RowPlan* rows;  // and one more, which marks the end of the last
    Cascade cascade;
    float* partials;
    int32_t* splits_left;  // per tile; the thread that brings it to 0 merges the tile
    Shares items;
    bool worthwhile;  // whether the work is enough for several threads
};

struct AttentionJob {
    Attention a;
    Plan plan;
    bool out_of_memory;
};

// Goes through the item's splits. `all` gets their result, merged into what it holds if it is `begun`; `next` is the
// item that this thread does afterwards, or null.
template <class Product>
void attend_splits(
    const Attention& a, const Item& item, const Item* next, bool begun, Scratch<Product>& scratch, Part all
) {
    const int num_tile_rows = item.num_queries * a.group_size();
    for (int split = item.first_split; split < item.end_split; ++split) {
        int num_following = 0;
        if (split + 1 < item.end_split)
            num_following = list_first_blocks<Product>(a, item, split + 1, scratch.following);
        else if (next != nullptr)
            num_following = list_first_blocks<Product>(a, *next, next->first_split, scratch.following);
        attend_split(a, item, split, num_following, scratch, begun ? scratch.part : all);
        if (begun) merge(all, scratch.part, num_tile_rows, a.head_dim);
        begun = true;
    }
}

// Does an item that is one split of a tile. The last thread to finish a split of a tile merges the tile's splits.
template <class Product>
void attend_part(const AttentionJob& job, const Item& item, const Item* next, Scratch<Product>& scratch) {
    const Attention& a = job.a;
    const RowPlan& plan = job.plan.rows[item.row];
    const int num_tile_rows = item.num_queries * a.group_size();
    const int num_tiles = a.num_tiles(item.row), num_splits = a.num_splits(item.row);
    const int64_t tile = (int64_t)item.head * num_tiles + item.tile;
    const int64_t size = part_size(a, least(a.tile_queries(), a.num_queries(item.row)));
    float* partials = job.plan.partials + plan.first_partial + tile * num_splits * size;
    const Part own = part_at(partials + item.first_split * size, num_tile_rows);
    if (item.first_split == item.end_split) clear(own, num_tile_rows, a.head_dim);
    attend_splits(a, item, next, false, scratch, own);
    int32_t* splits_left = job.plan.splits_left + plan.first_tile + tile;
    if (__atomic_sub_fetch(splits_left, 1, __ATOMIC_ACQ_REL) > 0) return;
    *splits_left = num_splits;  // reset for the next layer
    const Part all = part_at(partials, num_tile_rows);
    for (int split = 1; split < num_splits; ++split)
        merge(all, part_at(partials + split * size, num_tile_rows), num_tile_rows, a.head_dim);
    store_output(a, item, all);
}

// A tile of `row`, with the splits that its queries see.
Item tile_of(const Attention& a, int row, int head, int tile) {
    Item item = {};
    item.row = row;
    item.head = head;
    item.tile = tile;
    item.first_query = tile * a.tile_queries();
    item.num_queries = least(a.tile_queries(), a.num_queries(row) - item.first_query);
    item.first_position = a.context_lengths[row] - a.num_queries(row) + item.first_query;
    item.end_token = item.first_position + item.num_queries;
    item.first_split = a.first_seen(item.first_position) / a.split_tokens();
    item.end_split = (item.end_token + a.split_tokens() - 1) / a.split_tokens();
    return item;
}

// The item of the splits that a tile's rows share. With a window there are none: most rows would not see them.
Item shared_item(const Attention& a, const SharedTile& tile, int head) {
    Item item = {};
    item.row = tile.rows[0];
    item.head = head;
    item.end_split = a.window == 0 ? tile.num_splits : 0;
    item.num_queries = tile.num_rows;
    item.first_position = item.end_token = item.end_split * a.split_tokens();
    item.shared = &tile;
    return item;
}

template <class Product>
void attend_shared(const Attention& a, const Item& item, const Item* next, Scratch<Product>& scratch) {
    using Left = typename Product::Left;
    const SharedTile& tile = *item.shared;
    const int group_size = a.group_size();
    const auto own_item = [&](int i) {
        Item own = tile_of(a, tile.rows[i], item.head, 0);
        if (own.first_split < item.end_split) own.first_split = item.end_split;
        return own;
    };

    for (int i = 0; i < tile.num_rows; ++i) {
        const int64_t token = a.query_starts[tile.rows[i]];
        load_query<Left>(a, token, item.head, scratch.q + (int64_t)i * group_size * a.head_dim);
    }
    Item own = own_item(0);
    attend_splits(a, item, &own, false, scratch, scratch.shared);
    for (int i = 0; i < tile.num_rows; ++i) {
        const Item current = own;
        const bool more = i + 1 < tile.num_rows;
        if (more) own = own_item(i + 1);
        load_queries<Left>(a, current, scratch.q);
        if (item.end_split > 0) copy_rows(scratch.shared, i * group_size, group_size, a.head_dim, scratch.all);
        attend_splits(a, current, more ? &own : next, item.end_split > 0, scratch, scratch.all);
        store_output(a, current, scratch.all);
    }
}

// Does the item; `next` is the item that this thread does after it, or null.
template <class Product>
void attend(const AttentionJob& job, const Item& item, const Item* next, Scratch<Product>& scratch) {
    if (item.shared != nullptr) return attend_shared(job.a, item, next, scratch);
    load_queries<typename Product::Left>(job.a, item, scratch.q);
    if (job.plan.rows[item.row].split) return attend_part(job, item, next, scratch);
    attend_splits(job.a, item, next, false, scratch, scratch.all);
    store_output(job.a, item, scratch.all);
}

// Finds item `number`. If it belongs to a row rather than a family, that is `row` or a later one.
Item find_item(const AttentionJob& job, int64_t number, int row) {
    const Attention& a = job.a;
    const Plan& plan = job.plan;
    if (number < plan.rows[0].first_item)
        return shared_item(a, plan.cascade.tiles[number / a.num_kv_heads], (int)(number % a.num_kv_heads));
    while (plan.rows[row + 1].first_item <= number) ++row;
    const int num_tiles = a.num_tiles(row), num_splits = plan.rows[row].split ? a.num_splits(row) : 1;
    const int index = (int)(number - plan.rows[row].first_item);
    // The last queries see the most tokens: they come first, so that no thread is left with them at the end.
    const int tile = num_tiles - 1 - index / num_splits % num_tiles;
    Item item = tile_of(a, row, index / (num_tiles * num_splits), tile);
    if (plan.rows[row].split) {
        const int split = index % num_splits;
        const bool seen = split >= item.first_split && split < item.end_split;
        item.first_split = split;
        item.end_split = seen ? split + 1 : split;
    }
    return item;
}

// Allocates the memory of `scratch`, which is to be freed; null if out of memory.
template <class Product>
void* prepare(const Attention& a, Scratch<Product>& scratch) {
    using Left = typename Product::Left;
    const int num_tile_rows = a.tile_queries() * a.group_size();
    const int num_left_rows = round_up(num_tile_rows, Product::kRowStep);
    scratch.stride = round_up(a.split_tokens(), kWidth);
    const bool in_place = Left::kDtype == kFloat32;  // probabilities may overwrite the scores
    const size_t score_bytes = whole_lines(sizeof(float) * num_left_rows * scratch.stride);
    const size_t p_bytes = in_place ? 0 : whole_lines(sizeof(*scratch.p) * num_left_rows * scratch.stride);
    const size_t q_bytes = whole_lines(sizeof(*scratch.q) * num_left_rows * a.head_dim);
    const size_t part_bytes = whole_lines(sizeof(float) * part_size(a, a.tile_queries()));
    char* memory = static_cast<char*>(aligned_alloc(64, score_bytes + p_bytes + q_bytes + 3 * part_bytes));
    if (memory == nullptr) return nullptr;
    scratch.scores = reinterpret_cast<float*>(memory);
    scratch.p = reinterpret_cast<typename Left::Value*>(in_place ? memory : memory + score_bytes);
    scratch.q = reinterpret_cast<typename Left::Value*>(memory + score_bytes + p_bytes);
    char* parts = memory + score_bytes + p_bytes + q_bytes;
    scratch.all = part_at(reinterpret_cast<float*>(parts), num_tile_rows);
    scratch.part = part_at(reinterpret_cast<float*>(parts + part_bytes), num_tile_rows);
    scratch.shared = part_at(reinterpret_cast<float*>(parts + 2 * part_bytes), num_tile_rows);
    return memory;
}

template <class Product>
void attend_items(void* data, int thread) {
    AttentionJob& job = *static_cast<AttentionJob*>(data);
    Scratch<Product> scratch;
    void* memory = prepare(job.a, scratch);
    if (memory == nullptr) {
        __atomic_store_n(&job.out_of_memory, true, __ATOMIC_RELAXED);
        return;
    }
    scratch.product.begin(job.a.block_size);
    Taker items(job.plan.items, thread);
    Item next;
    bool more = items.take(1);
    if (more) next = find_item(job, items.first, 0);
    while (more) {
        const Item item = next;
        const int64_t number = items.first;
        more = items.take(1);
        if (more) next = find_item(job, items.first, items.first > number && item.shared == nullptr ? item.row : 0);
        attend<Product>(job, item, more ? &next : nullptr, scratch);
    }
    scratch.product.end();
    free(memory);
}

// The index of a row whose lengths or blocks do not fit; num_rows if query_starts as a whole does not; -1 if all fits.
int find_misfit(const Attention& a, int64_t num_tokens) {
    for (int row = 0; row < a.num_rows; ++row) {
        const int64_t queries = (int64_t)a.query_starts[row + 1] - a.query_starts[row];
        const int64_t context = a.context_lengths[row];
        if (queries < 1 || queries > context || context > a.table_stride * a.block_size) return row;
        for (int64_t block = 0; block * a.block_size < context; ++block) {
            const int32_t id = a.block_tables[row * a.table_stride + block];
            if (id < 0 || id >= a.num_blocks) return row;
        }
    }
    return a.query_starts[0] == 0 && a.query_starts[a.num_rows] == num_tokens ? -1 : a.num_rows;
}

// The cost of a row's tiles.
int64_t cost_of(const Attention& a, int row) {
    return (int64_t)a.num_kv_heads * a.num_queries(row) * a.context_lengths[row];
}

// Decides which rows are split: those whose tiles are each a large share of all work. Returns the cost of all work.
int64_t choose_splits(const Attention& a, int num_threads, RowPlan* rows) {
    int64_t cost = 0;
    for (int row = 0; row < a.num_rows; ++row) cost += cost_of(a, row);
    for (int row = 0; row < a.num_rows; ++row) {
        const int64_t tile_cost = (int64_t)least(a.tile_queries(), a.num_queries(row)) * a.context_lengths[row];
        rows[row].split = num_threads > 1 && a.num_splits(row) > 1 && tile_cost * 4 * num_threads > cost;
    }
    return cost;
}

// Calls body(rows, num_rows, first_item, num_items) for each tile of a family and each other row, in item order.
template <class Body>
void visit_items(const Attention& a, const Plan& plan, Body body) {
    for (int i = 0; i < plan.cascade.num_tiles; ++i) {
        const SharedTile& tile = plan.cascade.tiles[i];
        body(tile.rows, tile.num_rows, (int64_t)i * a.num_kv_heads, (int64_t)a.num_kv_heads);
    }
    for (int32_t row = 0; row < a.num_rows; ++row) {
        const int64_t first_item = plan.rows[row].first_item;
        if (!plan.cascade.has_row[row]) body(&row, 1, first_item, plan.rows[row + 1].first_item - first_item);
    }
}

// Shares of about equal cost; all items together cost `cost`.
Shares share_out_items(const Attention& a, const Plan& plan, int num_threads, int64_t cost) {
    Shares shares = Shares::evenly(0, num_threads);
    int share = 0;
    int64_t cost_before = 0;
    visit_items(a, plan, [&](const int32_t* rows, int num_rows, int64_t first_item, int64_t num_items) {
        int64_t cost_of_these = 0;
        for (int i = 0; i < num_rows; ++i) cost_of_these += cost_of(a, rows[i]);
        for (; share + 1 < shares.num_shares; ++share) {
            const int64_t left = cost * (share + 1) / shares.num_shares - cost_before;
            if (left >= cost_of_these) break;
            const int end = (int)(first_item + num_items * left / cost_of_these);
            shares.shares[share].left.end = shares.shares[share + 1].left.next = end;
        }
        cost_before += cost_of_these;
        shares.shares[share].left.end = (int)(first_item + num_items);
    });
    for (; share + 1 < shares.num_shares; ++share)
        shares.shares[share + 1].left = {shares.shares[share].left.end, shares.shares[share].left.end};
    return shares;
}

// Shares the work out; the plan is to be freed. Returns false if out of memory.
bool make_plan(const Attention& a, int num_threads, Plan& plan) {
    plan = {};
    plan.rows = static_cast<RowPlan*>(malloc(sizeof(RowPlan) * (a.num_rows + 1)));
    if (plan.rows == nullptr) return false;
    const int64_t cost = choose_splits(a, num_threads, plan.rows);
    const auto can_share = [&](int row) { return a.num_queries(row) == 1 && !plan.rows[row].split; };
    if (!find_families(a, num_threads, can_share, plan.cascade)) return false;

    RowPlan next = {(int64_t)plan.cascade.num_tiles * a.num_kv_heads, false, 0, 0};
    for (int row = 0; row < a.num_rows; ++row) {
        next.split = plan.rows[row].split;
        plan.rows[row] = next;
        if (plan.cascade.has_row[row]) continue;
        const int num_splits = a.num_splits(row);
        const int64_t num_tiles = (int64_t)a.num_kv_heads * a.num_tiles(row);
        next.first_item += next.split ? num_tiles * num_splits : num_tiles;
        if (next.split) {
            const int64_t size = part_size(a, least(a.tile_queries(), a.num_queries(row)));
            next.first_partial += num_tiles * num_splits * size;
            next.first_tile += num_tiles;
        }
    }
    plan.rows[a.num_rows] = next;
    plan.items = share_out_items(a, plan, num_threads, cost);
    plan.worthwhile = next.first_item > 1 && cost * a.head_dim > 1 << 14;
    if (next.first_tile == 0) return true;

    const size_t bytes = sizeof(float) * next.first_partial + sizeof(int32_t) * next.first_tile;
    plan.partials = static_cast<float*>(malloc(bytes));
    if (plan.partials == nullptr) return false;
    plan.splits_left = reinterpret_cast<int32_t*>(plan.partials + next.first_partial);
    for (int row = 0; row < a.num_rows; ++row)
        if (plan.rows[row].split)
            for (int64_t tile = plan.rows[row].first_tile; tile < plan.rows[row + 1].first_tile; ++tile)
                plan.splits_left[tile] = a.num_splits(row);
    return true;
}

void free_plan(const Plan& plan) {
    free(plan.partials);
    free_cascade(plan.cascade);
    free(plan.rows);
}

// q and the cache meet in bfloat16 if both are bfloat16 and the level multiplies it, else in float32, which holds the
// values of both exactly (see kernels/reference.py).
Work attention_work(const Attention& a) {
#if defined(TILES)
    if (a.dtype == kBfloat16 && a.cache_dtype == kBfloat16 && InTiles::fits(a.head_dim, a.block_size))
        return attend_items<InTiles>;
#endif
#if defined(__AVX512BF16__)
    if (a.dtype == kBfloat16 && a.cache_dtype == kBfloat16) return attend_items<InBfloat16>;
#endif
    if (a.cache_dtype == kBfloat16) return attend_items<InFloat32<Bfloat16>>;
    if (a.cache_dtype == kFloat16) return attend_items<InFloat32<Float16>>;
    return attend_items<InFloat32<Float32>>;
}

// Returns -1, or the index of a row that does not fit (num_rows: query_starts as a whole), or -2 if out of memory.
int paged_attention(const Attention& a, int64_t num_tokens, const Threads& threads) {
    const int misfit = find_misfit(a, num_tokens);
    if (misfit >= 0 || a.num_rows == 0) return misfit;
    AttentionJob job = {a, {}, false};
    job.out_of_memory = !make_plan(a, threads.num_threads, job.plan);
    if (!job.out_of_memory) run_on(threads, job.plan.worthwhile, attention_work(a), &job);
    free_plan(job.plan);
    return job.out_of_memory ? -2 : -1;
}

}  // namespace
