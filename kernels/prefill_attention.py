"""Paged attention of long rows: the queries of prompts and their chunks.

One program per (K/V head, tile of queries); the last tiles, which see the most tokens, start first. The query heads
that share the K/V head are together the rows (M) of the matrix product, so that K and V are read once for all of them.
The host knows a bound on the number of tiles, but not which rows they belong to: each program finds its row by
bisection of `query_starts`. Without a window, tiles of K and V that every query sees whole go without a mask, as in
FlashAttention-2 (Dao 2023, arXiv:2307.08691, 3.1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_shape import AttentionShape
from kernels.attention_tiles import attend_tiles


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _long_rows_kernel(
    out: tl.tensor,
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    query_starts: tl.tensor,
    context_lengths: tl.tensor,
    score_scale: tl.tensor,
    cap: tl.tensor,
    num_rows: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,  # rows with up to this many queries are left to the other kernel
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    TILE_QUERIES: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)

    # -- which row's tile: row r's begin at query_starts[r] // TILE_QUERIES + r, which leaves room for all before --
    low, high = tl.full([], 0, tl.int32), num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle).to(tl.int32) // TILE_QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    row = low.to(tl.int64)
    query_start = tl.load(query_starts + row).to(tl.int64)
    num_queries = (tl.load(query_starts + row + 1) - query_start).to(tl.int32)
    context = tl.load(context_lengths + row).to(tl.int32)
    first_query = (tile - (query_start.to(tl.int32) // TILE_QUERIES + low)) * TILE_QUERIES
    if num_queries <= QUERIES or first_query >= num_queries:
        return

    # -- queries: row m is query m // GROUP of the tile, head m % GROUP of the K/V head's group --
    m = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    query, head = first_query + m // GROUP, kv_head * GROUP + m % GROUP
    valid = (m < TILE_QUERIES * GROUP) & (query < num_queries)
    filled = valid[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = (query_start + query) * q_token_stride + head * q_head_stride
    q_tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=filled, other=0.0)  # [M, D]

    # -- without a window, tiles of K and V that all queries see whole, without a mask; then the rest, with one --
    first_position = context - num_queries + first_query
    end = tl.minimum(first_position + TILE_QUERIES, context)
    accumulator = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    normalizer = tl.zeros([ROWS], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
    else:
        begin = (first_position + 1) // TILE * TILE
        accumulator, maximum, normalizer = attend_tiles(
            accumulator,
            maximum,
            normalizer,
            q_tile,
            query,
            k_cache + kv_head * head_stride,
            v_cache + kv_head * head_stride,
            block_tables + row * table_stride,
            0,
            begin,
            score_scale,
            cap,
            block_stride,
            token_stride,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_SIZE,
            TILE,
            False,
            False,
            0,
            CAPPED,
            PRECISION,
        )
    accumulator, maximum, normalizer = attend_tiles(
        accumulator,
        maximum,
        normalizer,
        q_tile,
        context - num_queries + query,
        k_cache + kv_head * head_stride,
        v_cache + kv_head * head_stride,
        block_tables + row * table_stride,
        begin,
        end,
        score_scale,
        cap,
        block_stride,
        token_stride,
        HEAD_DIM,
        PADDED_DIM,
        BLOCK_SIZE,
        TILE,
        True,
        True,
        WINDOW,
        CAPPED,
        PRECISION,
    )
    result = accumulator / tl.where(normalizer == 0.0, 1.0, normalizer)[:, None]
    rows = (query_start + query) * (num_kv_heads * GROUP) + head
    tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=filled)


def attend_long_rows(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    shape: AttentionShape,
) -> None:
    """Fills `out` for rows of more than `shape.short_queries` queries; arguments as in `attend_short_rows`."""
    rows, tile, num_warps, num_stages = long_tile(shape.padded_dim, q.dtype, k_cache.dtype)
    rows = max(rows, shape.short_rows)
    num_rows = len(context_lengths)
    _long_rows_kernel[(k_cache.shape[2], q.shape[0] // (rows // shape.group) + num_rows)](
        *(
            out,
            q,
            k_cache,
            v_cache,
            block_tables,
            query_starts,
            context_lengths,
            shape.score_scale,
            shape.cap,
            num_rows,
        ),
        *(q.stride(0), q.stride(1), *k_cache.stride()[:3], block_tables.stride(0)),
        GROUP=shape.group,
        QUERIES=shape.short_queries,
        HEAD_DIM=shape.head_dim,
        PADDED_DIM=shape.padded_dim,
        BLOCK_SIZE=shape.block_size,
        WINDOW=shape.window,
        ROWS=rows,
        TILE=tile,
        CAPPED=shape.cap != 0,
        PRECISION=shape.precision,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def long_tile(padded_dim: int, q_dtype: torch.dtype, cache_dtype: torch.dtype) -> tuple[int, int, int, int]:
    """The rows (queries times heads of a group) and tokens of a tile, the warps and the pipeline stages."""
    if q_dtype != cache_dtype:  # both are widened to float32
        return (32, 32, 8, 2) if padded_dim > 128 else (32, 32, 4, 2)
    if q_dtype == torch.float32:  # on plain arithmetic units: tiles that ptxas compiles without spills
        return (32, 16, 8, 2) if padded_dim > 128 else (32, 64, 8, 2) if padded_dim > 64 else (32, 32, 4, 2)
    if padded_dim <= 128:
        return 128, 64, 8, 5
    return 64, 32, 8, 5
