"""Paged attention on a GPU: ragged queries over a cache of blocks, decode rows and prefill chunks in one batch.

PagedAttention: Kwon et al., SOSP'23, arXiv:2309.06180. Here are the checks and the choice among three launches:
`decode_attention` does short rows (split and merge), `prefill_attention` long ones. Every row is done by one of the two
and skipped by the other, so the host need not know which is which, and never waits for the device.
"""

import functools
import math

import torch
import triton
from torch import Tensor

from kernels.attention_shape import AttentionShape
from kernels.batch_bounds import BatchBounds
from kernels.decode_attention import attend_short_rows, plan_splits
from kernels.forms import check_attention, check_dense, check_indices, check_reach
from kernels.prefill_attention import attend_long_rows

_MOST_HEAD_DIM = 256
# The fewest rows that `tl.dot` takes, and the most that a launch grid takes in its last dimension.
_FEWEST_TILE_ROWS = 16
_MOST_ROWS = 65535


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bounds: BatchBounds | None = None,
) -> Tensor:
    """`reference.paged_attention` without a device synchronization, so it can be recorded in a CUDA graph.

    The caller vouches for the values of the indices: checking them would mean waiting for the device. A row of one
    query and no context gets zeros, and serves as padding.

    Args:
        q: [num_tokens, num_heads, head_dim]; may be a strided view, dense in head_dim, which is 256 at most.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], perhaps of another dtype; block_size is a power of
            two. Slots past the context may hold anything: they are not read.
        v_cache: like `k_cache`, including strides.
        block_tables: [num_rows, max_blocks] int32 or int64; entries after a row's last block are not read.
        query_starts: [num_rows + 1] int32 or int64, from 0 to num_tokens.
        context_lengths: [num_rows] int32 or int64, each at least the row's number of queries.
        scale: factor of the scores before the softmax.
        window: a query sees its own token and the `window` - 1 before it; None: all before it (Mistral: Jiang et al.
            2023, arXiv:2310.06825).
        softcap: scores become softcap * tanh(score / softcap) before the softmax; None: they stay as they are (Gemma 2:
            Gemma Team 2024, arXiv:2408.00118).
        bounds: what the host knows of the lengths.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous, in q's dtype.
    """
    _check(q, k_cache, v_cache, block_tables, query_starts, context_lengths, window, softcap)
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    num_rows = len(context_lengths)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out

    bounds = bounds or BatchBounds()
    room = block_tables.shape[1] * block_size
    longest = room if bounds.longest_context is None else min(room, bounds.longest_context)
    most_queries = num_tokens - (num_rows - 1)  # every row has at least one
    if bounds.most_queries is not None:
        most_queries = min(most_queries, bounds.most_queries)
    group = num_heads // num_kv_heads
    tile_rows = max(_FEWEST_TILE_ROWS, triton.next_power_of_2(group))
    shape = AttentionShape(
        group=group,
        head_dim=head_dim,
        padded_dim=max(16, triton.next_power_of_2(head_dim)),
        block_size=block_size,
        window=window or 0,
        short_rows=tile_rows,
        # As few different values as possible: the kernel is compiled for each.
        short_queries=1 if most_queries == 1 else tile_rows // group,
        precision=precision_of(q.dtype, k_cache.dtype),
        score_scale=scale * math.log2(math.e) if softcap is None else scale / softcap,
        cap=0.0 if softcap is None else softcap * math.log2(math.e),
    )
    tensors = (out, q, k_cache, v_cache, block_tables, query_starts, context_lengths)
    if bounds.fewest_queries is None or bounds.fewest_queries <= shape.short_queries:
        num_lanes = num_rows * num_kv_heads
        seen = longest if window is None else min(longest, window + shape.short_queries - 1)
        total = None if bounds.total_context is None else bounds.total_context * num_kv_heads
        attend_short_rows(*tensors, shape, *plan_splits(num_lanes, seen, total, _num_processors(q.device)))
    if most_queries > shape.short_queries:
        attend_long_rows(*tensors, shape)
    return out


def precision_of(q_dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """The precision of float32 products, as `tl.dot` names it: if q and the cache differ, both are widened to float32.

    tf32 holds all that 16-bit floats hold. With three products it suffices when one side is float32, and takes a
    fraction of the registers that plain float32 arithmetic would take, which would spill.
    """
    if q_dtype == cache_dtype:
        return "ieee"
    return "tf32x3" if torch.float32 in (q_dtype, cache_dtype) else "tf32"


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 4  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    window: int | None,
    softcap: float | None,
) -> None:
    check_attention(q, k_cache, v_cache, block_tables, query_starts, context_lengths)
    num_rows = context_lengths.shape[0]
    check_dense(q=q, k_cache=k_cache, v_cache=v_cache)
    check_indices(block_tables=block_tables, query_starts=query_starts, context_lengths=context_lengths)
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"the strides of k_cache, {k_cache.stride()}, and v_cache, {v_cache.stride()}, differ")
    if q.shape[2] > _MOST_HEAD_DIM or k_cache.shape[1] & (k_cache.shape[1] - 1) != 0:
        raise ValueError(
            f"head_dim {q.shape[2]} is more than {_MOST_HEAD_DIM}, or block_size {k_cache.shape[1]} no power of two"
        )
    if not num_rows <= q.shape[0] or num_rows > _MOST_ROWS:
        raise ValueError(
            f"{num_rows} rows for {q.shape[0]} tokens; every row has a query, and there are {_MOST_ROWS} at most"
        )
    check_reach(window, softcap)
