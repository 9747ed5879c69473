"""Paged attention of short rows, those whose few queries fit the smallest tile: decodes above all.

One program per (K/V head, split, row). The query heads that share the K/V head, and the row's few queries, are together
the rows (M) of one matrix product, so that K and V are read once for all of them (GQA: Ainslie et al. 2023,
arXiv:2305.13245). The context is cut into splits, since a batch of few rows would otherwise leave most of the GPU idle;
a second launch, one program per (query head, query, row), weighs the splits' results by their shares of the mass
(Flash-Decoding: Dao, Haziza, Massa & Sizov 2023; FlashDecoding++: Hong et al. 2023, arXiv:2311.01282).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_shape import AttentionShape
from kernels.attention_tiles import attend_tiles

# With this many programs per multiprocessor, the context is cut no finer: two rounds of two at a time.
_PROGRAMS_PER_PROCESSOR = 4
# Rows much shorter than the longest leave programs idle; so the grid is at most this many times the programs above.
_MOST_IDLE = 16
_MOST_SPLITS = 64
_FEWEST_SPLIT_TOKENS = 128


@triton.jit(do_not_specialize=["chunk", "num_splits", "table_stride"])
def _short_rows_kernel(
    out: tl.tensor,  # [num_tokens, num_heads, HEAD_DIM]
    partials: tl.tensor,  # [num_rows, num_heads, QUERIES, num_splits, HEAD_DIM] float32
    log_sums: tl.tensor,  # [num_rows, num_heads, QUERIES, num_splits] float32, to the base 2
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    query_starts: tl.tensor,
    context_lengths: tl.tensor,
    score_scale: tl.tensor,
    cap: tl.tensor,
    chunk: tl.tensor,
    num_splits: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_kv_heads = tl.num_programs(0)
    query_start = tl.load(query_starts + row).to(tl.int64)
    num_queries = (tl.load(query_starts + row + 1) - query_start).to(tl.int32)
    context = tl.load(context_lengths + row).to(tl.int32)
    if num_queries < 1 or num_queries > QUERIES:
        return

    # -- the tokens of this split --
    first, split_tokens = _cut(context, num_queries, chunk, num_splits, WINDOW, TILE)
    begin = first + split * split_tokens
    if begin >= context and split > 0:
        return
    end = tl.minimum(begin + split_tokens, context)

    # -- queries: row m is query m // GROUP, head m % GROUP of the K/V head's group --
    m = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    query, head = m // GROUP, kv_head * GROUP + m % GROUP
    q_rows = (query_start + query) * q_token_stride + head * q_head_stride
    valid = query < num_queries
    filled = valid[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=filled, other=0.0)  # [M, D]

    accumulator = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    normalizer = tl.zeros([ROWS], tl.float32)
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
        QUERIES > 1,
        True,
        WINDOW,
        CAPPED,
        PRECISION,
    )

    # -- a context in one piece is done; otherwise the merge needs the mass as well --
    result = accumulator / tl.where(normalizer == 0.0, 1.0, normalizer)[:, None]
    num_heads = num_kv_heads * GROUP
    if first + split_tokens >= context:
        rows = (query_start + query) * num_heads + head
        tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=filled)
    else:
        rows = ((row * num_heads + head) * QUERIES + query) * num_splits + split
        tl.store(partials + rows[:, None] * HEAD_DIM + dims[None, :], result, mask=filled)
        tl.store(log_sums + rows, maximum + tl.log2(normalizer), mask=valid)


@triton.jit
def _cut(
    context: tl.tensor,
    num_queries: tl.tensor,
    chunk: tl.tensor,
    num_splits: tl.tensor,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    # The first token that any query of the row sees, and the number of tokens of each split.
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - num_queries - WINDOW + 1, 0)
    split_tokens = tl.maximum(chunk, tl.cdiv(context - first, num_splits))
    return first, tl.cdiv(split_tokens, TILE) * TILE


@triton.jit(do_not_specialize=["chunk", "num_splits"])
def _merge_kernel(
    out: tl.tensor,
    partials: tl.tensor,
    log_sums: tl.tensor,
    query_starts: tl.tensor,
    context_lengths: tl.tensor,
    chunk: tl.tensor,
    num_splits: tl.tensor,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
) -> None:
    head, query, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_heads = tl.num_programs(0)
    query_start = tl.load(query_starts + row).to(tl.int64)
    num_queries = (tl.load(query_starts + row + 1) - query_start).to(tl.int32)
    context = tl.load(context_lengths + row).to(tl.int32)
    if query >= num_queries or num_queries > QUERIES:
        return
    first, split_tokens = _cut(context, num_queries, chunk, num_splits, WINDOW, TILE)
    if first + split_tokens >= context:
        return  # in one piece, and already written

    splits = tl.arange(0, PADDED_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    present = splits < tl.cdiv(context - first, split_tokens)
    rows = ((row * num_heads + head) * QUERIES + query) * num_splits + splits
    log_sum = tl.load(log_sums + rows, mask=present, other=float("-inf"))  # [S]
    weights = tl.exp2(log_sum - tl.max(log_sum, 0))
    filled = present[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partials + rows[:, None] * HEAD_DIM + dims[None, :], mask=filled, other=0.0)  # [S, D]
    result = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    token = (query_start + query) * num_heads + head
    tl.store(out + token * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def attend_short_rows(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    shape: AttentionShape,
    num_splits: int,
    chunk: int,
) -> None:
    """Fills `out` for rows of up to `shape.short_queries` queries; takes the checked arguments of `paged_attention`.

    Args:
        out: [num_tokens, num_heads, head_dim], contiguous.
        q: like `out`, except for strides.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        v_cache: like `k_cache`.
        block_tables: [num_rows, max_blocks].
        query_starts: [num_rows + 1].
        context_lengths: [num_rows].
        shape: what the launches have in common.
        num_splits: the most splits of a row.
        chunk: the fewest tokens of a split.
    """
    num_rows, num_heads, queries = len(context_lengths), q.shape[1], shape.short_queries
    # Untouched if nothing is split; but always of these dtypes, since each set of dtypes is compiled separately.
    places = (num_rows, num_heads, queries, num_splits) if num_splits > 1 else (0,)
    log_sums = torch.empty(places, dtype=torch.float32, device=q.device)
    partials = torch.empty((*places, shape.head_dim), dtype=torch.float32, device=q.device)
    tile, num_warps, num_stages = short_tile(shape.padded_dim, torch.promote_types(q.dtype, k_cache.dtype))
    _short_rows_kernel[(k_cache.shape[2], num_splits, num_rows)](
        *(out, partials, log_sums, q, k_cache, v_cache, block_tables, query_starts, context_lengths),
        *(shape.score_scale, shape.cap, chunk, num_splits),
        *(q.stride(0), q.stride(1), *k_cache.stride()[:3], block_tables.stride(0)),
        GROUP=shape.group,
        QUERIES=queries,
        HEAD_DIM=shape.head_dim,
        PADDED_DIM=shape.padded_dim,
        BLOCK_SIZE=shape.block_size,
        WINDOW=shape.window,
        ROWS=shape.short_rows,
        TILE=tile,
        CAPPED=shape.cap != 0,
        PRECISION=shape.precision,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if num_splits > 1:
        _merge_kernel[(num_heads, queries, num_rows)](
            *(out, partials, log_sums, query_starts, context_lengths, chunk, num_splits),
            QUERIES=queries,
            HEAD_DIM=shape.head_dim,
            PADDED_DIM=shape.padded_dim,
            WINDOW=shape.window,
            TILE=tile,
            PADDED_SPLITS=triton.next_power_of_2(num_splits),
        )


def short_tile(padded_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Tokens of a tile, warps and pipeline stages, for products in this dtype.

    A tile of K is at most 16 KiB. Five stages, since they are divided between the look-up in the block table and the
    loads that depend on it: with three, the next tile would not arrive before the last one is finished. Two such
    programs fit on a multiprocessor. In float32, 16 KiB do not compile without spills.
    """
    if dtype == torch.float32:
        return 16, 4, 5 if padded_dim <= 128 else 3
    return max(16, min(128, 16384 // (padded_dim * dtype.itemsize))), 4, 5


def plan_splits(num_lanes: int, longest: int, total: int | None, num_processors: int) -> tuple[int, int]:
    """How finely the contexts are cut: the most splits of a row, and the fewest tokens of a split.

    A row is cut into splits of equal length, as many as it may have but none shorter than the fewest tokens. That is
    done on the device, so that a recorded graph suits any lengths.

    Args:
        num_lanes: rows times K/V heads, the parallelism without a cut.
        longest: tokens of the longest context.
        total: tokens of all contexts, times K/V heads; None if that is not known.
        num_processors: multiprocessors of the GPU.
    """
    wanted = _PROGRAMS_PER_PROCESSOR * num_processors
    work = num_lanes * longest if total is None else min(total, num_lanes * longest)
    share = max(_FEWEST_SPLIT_TOKENS, -(-work // wanted))
    most = max(1, min(_MOST_SPLITS, _MOST_IDLE * wanted // num_lanes))
    num_splits = min(most, max(1, -(-longest // share)))
    return num_splits, _FEWEST_SPLIT_TOKENS if total is None else share
