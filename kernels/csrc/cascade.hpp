// Decode rows whose contexts begin with the same blocks, and how they go through those blocks together.
//
// Such rows are a family; its rows are shared out to tiles of about equal size. A tile takes the queries of all its
// rows through the splits that the family shares, so that those are read once for the tile, and then each row's queries
// through the rest of the row's context. The parts are those that each row would have made alone, and are merged in the
// same order: being in a family changes no bit of a row's result.
//
// Cascade inference: Ye et al. 2024, FlashInfer (arXiv:2501.01005, section 3.1); Hydragen: Juravsky et al. 2024,
// arXiv:2402.05099. There the parts of the prefix and of the rest are computed by separate passes; here one thread does
// both for a tile, while the parts are in its caches.
#pragma once

#include <stdlib.h>

#include "tile.hpp"

namespace {

// Some rows of a family, with one query each.
struct SharedTile {
    const int32_t* rows;
    int num_rows;
    int num_splits;  // shared by the rows
};

struct Cascade {
    int32_t* rows;  // those of the first tile, then of the second, and so on
    SharedTile* tiles;
    int num_tiles;
    bool* has_row;
};

// A row can share the splits before that of its last token.
ALWAYS_INLINE int most_shared_splits(const Attention& a, int row) {
    return (a.context_lengths[row] - 1) / a.split_tokens();
}

// The number of leading splits that are the same in two contexts, as far as both rows can share them.
int count_shared_splits(const Attention& a, int row, int other) {
    const int32_t* table = a.block_tables + row * a.table_stride;
    const int32_t* others = a.block_tables + other * a.table_stride;
    const int most = least(most_shared_splits(a, row), most_shared_splits(a, other));
    const int blocks = a.split_tokens() / a.block_size;
    int split = 0;
    while (split < most && memcmp(table + split * blocks, others + split * blocks, sizeof(int32_t) * blocks) == 0) ++split;
    return split;
}

// How many splits a family should share to save the most: each shared split is read once instead of once per row.
// `shared` are the numbers of splits that the other rows have in common with the first.
int choose_depth(const int32_t* shared, int count) {
    int64_t most_saved = 0;
    int depth = 0;
    for (int i = 0; i < count; ++i) {
        int64_t num_rows = 0;
        for (int other = 0; other < count; ++other) num_rows += shared[other] >= shared[i];
        if (num_rows * shared[i] <= most_saved) continue;
        most_saved = num_rows * shared[i];
        depth = shared[i];
    }
    return depth;
}

// The number of tiles per K/V head: as many as their size requires, or, if that is more, enough for four per thread,
// heads counted; then more until all threads get the same number, while rows suffice. 0 if too few to keep them busy.
int choose_num_tiles(const Attention& a, int num_rows, int num_threads) {
    const int for_size = (num_rows + a.tile_queries() - 1) / a.tile_queries();
    if (num_threads == 1) return for_size;
    const int most = num_rows / 2;
    const int for_threads = least((4 * num_threads + a.num_kv_heads - 1) / a.num_kv_heads, most);
    int num_tiles = for_size > for_threads ? for_size : for_threads;
    while (num_tiles * a.num_kv_heads % num_threads != 0 && num_tiles < most) ++num_tiles;
    return num_tiles * a.num_kv_heads < 2 * num_threads ? 0 : num_tiles;
}

// Finds the families among the rows that `can_share`. Returns false if out of memory; `cascade` is to be freed anyway.
template <class CanShare>
bool find_families(const Attention& a, int num_threads, CanShare can_share, Cascade& cascade) {
    cascade.rows = static_cast<int32_t*>(malloc((3 * sizeof(int32_t) + sizeof(bool)) * a.num_rows));
    cascade.tiles = static_cast<SharedTile*>(malloc(sizeof(SharedTile) * a.num_rows));
    if (cascade.rows == nullptr || cascade.tiles == nullptr) return false;
    int32_t* const others = cascade.rows + a.num_rows;  // rows that begin like the first, and what they share with it
    int32_t* const shared = others + a.num_rows;
    cascade.has_row = reinterpret_cast<bool*>(shared + a.num_rows);
    memset(cascade.has_row, 0, a.num_rows);
    if (a.tile_queries() == 1) return true;
    const auto is_free = [&](int row) { return can_share(row) && !cascade.has_row[row]; };

    int32_t* next_rows = cascade.rows;
    for (int first = 0; first < a.num_rows; ++first) {
        if (!is_free(first) || most_shared_splits(a, first) == 0) continue;
        int num_others = 0;
        for (int row = first + 1; row < a.num_rows; ++row) {
            if (!is_free(row) || a.block_tables[row * a.table_stride] != a.block_tables[first * a.table_stride]) continue;
            others[num_others] = row;
            shared[num_others] = count_shared_splits(a, first, row);
            if (shared[num_others] > 0) ++num_others;
        }
        const int depth = choose_depth(shared, num_others);
        if (depth == 0) continue;

        int32_t* const rows = next_rows;
        int num_rows = 0;
        rows[num_rows++] = first;
        for (int i = 0; i < num_others; ++i)
            if (shared[i] >= depth) rows[num_rows++] = others[i];

        const int num_tiles = choose_num_tiles(a, num_rows, num_threads);
        if (num_tiles == 0) continue;
        for (int i = 0; i < num_rows; ++i) cascade.has_row[rows[i]] = true;
        for (int tile = 0; tile < num_tiles; ++tile) {
            const int begin = num_rows * tile / num_tiles, end = num_rows * (tile + 1) / num_tiles;
            cascade.tiles[cascade.num_tiles++] = {rows + begin, end - begin, depth};
        }
        next_rows += num_rows;
    }
    return true;
}

void free_cascade(const Cascade& cascade) {
    free(cascade.tiles);
    free(cascade.rows);
}

}  // namespace
