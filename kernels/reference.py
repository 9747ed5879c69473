"""Torch twins of every kernel: what each operation means, said once, and what runs where nothing faster is built.

One is long enough for a file of its own: `sample_tokens` is in `kernels.draws`. So is the rounding of weights to fewer
bits, which the kernels do alike, in `kernels.quantization`.

Arguments are tensors and numbers, never a request or a configuration, so a test needs no model. Each wrapper checks
shapes and dtypes and raises ValueError; none casts or copies silently.

The KV cache is one tensor [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; `k_cache` and `v_cache` are
the two contiguous views of one layer of it. PagedAttention: Kwon et al., SOSP'23, arXiv:2309.06180.

The cache may have another dtype than everything else. Keys and values are then rounded to it as they are written, to
the nearest, ties to even; what is too large for it becomes infinite. Attention converts queries, keys and values to the
dtype that holds both of theirs exactly (`torch.promote_types`: float32 wherever they differ) and returns its result in
the queries'. Its sums are in float32 in any case.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention, silu

from kernels.batch_bounds import BatchBounds
from kernels.draws import sample_tokens as sample_tokens
from kernels.forms import check_attention, check_dtypes, check_reach, check_slots, check_swap, form
from kernels.quantization import Int4, in_8_bits


def reshape_and_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes each token's K and V into its slot, block_id * block_size + offset.

    Args:
        k: [num_tokens, num_kv_heads, head_dim].
        v: like `k`.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], perhaps of another dtype; written in place.
        v_cache: like `k_cache`.
        slot_mapping: [num_tokens] int64; -1 skips the token (padding). No slot occurs twice.
    """
    if k.shape != v.shape or k_cache.shape != v_cache.shape or k.shape[1:] != k_cache.shape[2:]:
        raise ValueError(
            f"k {form(k)}, v {form(v)}, k_cache {form(k_cache)} and v_cache {form(v_cache)} do not fit together"
        )
    check_dtypes(k_cache, v_cache, k, v)
    check_slots(slot_mapping, k.shape[0])
    written = slot_mapping >= 0
    if not written.all():
        k, v, slot_mapping = k[written], v[written], slot_mapping[written]
    for tokens, cache in ((k, k_cache), (v, v_cache)):
        cache[slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]] = tokens.to(cache.dtype)


def normalizers_and_best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """What log-probabilities are made with, and what greedy decoding takes.

    Args:
        logits: [num_rows, vocabulary_size] float32; -inf forbids a token.

    Returns:
        The log of each row's sum of exponentials, [num_rows] float32; and its best token, [num_rows] int64, the first
        of those that tie. For a row with a NaN or +inf, or of -inf alone: a value with which no log-probability is
        finite, and some token.
    """
    return logits.logsumexp(-1), logits.argmax(-1)


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
    """Causal attention of ragged queries over the paged cache: decode rows and prefill chunks, mixed in one batch.

    Row i owns the queries query_starts[i] : query_starts[i + 1], which are the last of its context_lengths[i] tokens;
    the K and V of all those tokens are in the cache already. A query sees its own token and those before it. Query
    heads share K/V heads in equal groups, in order (GQA: Ainslie et al. 2023, arXiv:2305.13245).

    Args:
        q: [num_tokens, num_heads, head_dim]; may be a strided view.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], perhaps of another dtype.
        v_cache: like `k_cache`. Whole blocks are read and then masked, and 0 * NaN is NaN: slots past the context may
            hold anything finite.
        block_tables: [num_rows, max_blocks] int32 or int64; entries after a row's last block are any valid block.
        query_starts: [num_rows + 1] int32 or int64, from 0 to num_tokens.
        context_lengths: [num_rows] int32 or int64, each at least the row's number of queries.
        scale: factor of the scores before the softmax.
        window: how many tokens a query sees, including its own; None: all up to its own (Mistral: Jiang et al. 2023,
            arXiv:2310.06825).
        softcap: scores become softcap * tanh(score / softcap) before the softmax; None: they stay as they are (Gemma 2:
            Gemma Team 2024, arXiv:2408.00118).
        bounds: what the host knows of the lengths without asking the device; not used here, where the lengths are read.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous, in q's dtype.
    """
    check_attention(q, k_cache, v_cache, block_tables, query_starts, context_lengths)
    check_reach(window, softcap)
    starts, lengths = query_starts.tolist(), context_lengths.tolist()
    if starts[-1] != q.shape[0]:
        raise ValueError(f"query_starts ends at {starts[-1]}, but q holds {q.shape[0]} tokens")
    block_size = k_cache.shape[1]
    out = q.new_empty(q.shape)
    decode_rows = []
    for row, length in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if not 0 < end - start <= length <= block_tables.shape[1] * block_size:
            raise ValueError(
                f"row {row} has {end - start} queries, a context of {length} and {block_tables.shape[1]} blocks"
            )
        if end - start == 1:
            decode_rows.append(row)
            continue
        table = block_tables[row, : -(-length // block_size)]
        out[start:end] = _attend_chunk(q[start:end], k_cache, v_cache, table, length, scale, window, softcap)

    for group in _of_similar_length(decode_rows, lengths):
        longest = lengths[group[0]]
        num_blocks = -(-longest // block_size)
        if len(group) == len(lengths):  # the whole batch, as it is: nothing to pick out or to put back
            tables = block_tables[:, :num_blocks]
            return _attend_decode(q, k_cache, v_cache, tables, context_lengths, longest, scale, window, softcap)
        rows = torch.tensor(group, device=q.device)
        tokens = query_starts[rows].long()
        tables = block_tables[rows, :num_blocks]
        out[tokens] = _attend_decode(
            q[tokens], k_cache, v_cache, tables, context_lengths[rows], longest, scale, window, softcap
        )
    return out


def _attend_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """One query per row, all rows at once; q: [num_rows, num_heads, head_dim]."""
    num_rows, _, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    blocks = block_tables.flatten()
    dtype = torch.promote_types(q.dtype, k_cache.dtype)
    k, v = (
        cache.index_select(0, blocks).to(dtype).view(num_rows, -1, num_kv_heads, head_dim)[:, :longest].transpose(1, 2)
        for cache in (k_cache, v_cache)
    )  # [R, Hkv, L, D]
    # The query heads of one K/V head take the place of SDPA's queries of one head: its K and V are read once.
    grouped = q.view(num_rows, num_kv_heads, -1, head_dim).to(dtype)  # [R, Hkv, G, D]
    seen = None
    if num_rows > 1 or window is not None:
        positions = torch.arange(longest, device=q.device)
        seen = positions < context_lengths[:, None]  # [R, L]
        if window is not None:
            seen &= positions >= context_lengths[:, None] - window
        seen = seen[:, None, None]  # [R, 1, 1, L]
    return _weigh(grouped, k, v, seen, scale, softcap).reshape(q.shape).to(q.dtype)


def _attend_chunk(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_length: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """All queries of one row, the last of its context; q: [num_queries, num_heads, head_dim]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group_size = num_heads // num_kv_heads
    dtype = torch.promote_types(q.dtype, k_cache.dtype)
    k, v = (
        cache.index_select(0, block_table)
        .to(dtype)
        .view(-1, num_kv_heads, head_dim)[:context_length]
        .transpose(0, 1)[:, None]
        .expand(-1, group_size, -1, -1)
        for cache in (k_cache, v_cache)
    )  # [Hkv, G, L, D], not copied for each of the G
    grouped = q.view(num_queries, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3).to(dtype)  # [Hkv, G, Q, D]
    if num_queries == context_length and window is None and softcap is None:
        out = scaled_dot_product_attention(grouped, k, v, is_causal=True, scale=scale)
    else:
        positions = torch.arange(context_length, device=q.device)
        seen = positions <= positions[-num_queries:, None]  # [Q, L]
        if window is not None:
            seen &= positions > positions[-num_queries:, None] - window
        out = _weigh(grouped, k, v, seen, scale, softcap)
    return out.permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype)


def _weigh(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Attention over what is `seen`, by SDPA; scores are computed explicitly, in float32, only if they are capped."""
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    scores = (q.float() * scale) @ k.float().transpose(-1, -2)
    scores = scores.div_(softcap).tanh_().mul_(softcap)
    if seen is not None:
        scores = scores.masked_fill_(~seen, -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def _of_similar_length(rows: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """`rows` in groups, longest first, none shorter than half its group's longest: padding never doubles the work."""
    groups: list[list[int]] = []
    for row in sorted(rows, key=lengths.__getitem__, reverse=True):
        if not groups or 2 * lengths[row] < lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    return groups


def copy_blocks(kv_cache: Tensor, block_pairs: Tensor) -> None:
    """Copies blocks onto others of the same cache in all layers; every block is read before any is written.

    Args:
        kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], written in place.
        block_pairs: [num_pairs, 2] int64, (from, to); no block is written twice.
    """
    swap_blocks(kv_cache, kv_cache, block_pairs)


def swap_blocks(source: Tensor, destination: Tensor, block_pairs: Tensor) -> None:
    """Copies blocks from one cache into another, which may be on another device, in all layers.

    Args:
        source: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim].
        destination: like `source` except for num_blocks; written in place.
        block_pairs: [num_pairs, 2] int64, (from, to); no block is written twice.
    """
    check_swap(source, destination, block_pairs)
    from_blocks, to_blocks = block_pairs.unbind(1)
    on_cpu = source.device.type == destination.device.type == "cpu"
    if on_cpu and not (source is destination and torch.isin(from_blocks, to_blocks).any()):
        # Nothing is read after it was written, so blocks may be copied directly; with a copy in between they take two
        # or three times as long. By numpy: torch would share each block's bytes out among its threads, and waiting for
        # a thread that another process keeps off its core was measured to take 8 ms a block.
        read, written = _as_bytes(source), _as_bytes(destination)
        for from_block, to_block in block_pairs.tolist():
            written[:, :, to_block] = read[:, :, from_block]
        return
    blocks = source.index_select(2, from_blocks.to(source.device))
    destination.index_copy_(2, to_blocks.to(destination.device), blocks.to(destination.device))


def _as_bytes(kv_cache: Tensor) -> npt.NDArray[np.uint8]:
    """[num_layers, 2, num_blocks, bytes] of a cache in CPU memory."""
    return kv_cache.view(torch.uint8).view(*kv_cache.shape[:3], -1).numpy()


class PlainLinear:
    """y = finish(x W^T + b), with the weight as it is; see `linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, finish: Callable[[Tensor], Tensor] | None = None) -> None:
        self._weight, self._bias, self._finish = weight, bias, finish

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, num_inputs] -> [num_tokens, num_outputs], or what `finish` makes of them."""
        y = functional.linear(x, self._weight, self._bias)
        return y if self._finish is None else self._finish(y)


def linear(weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False) -> PlainLinear:
    """A linear layer, y = x W^T + b: made once, perhaps with the weight in another layout, and called in each step.

    Args:
        weight: [num_outputs, num_inputs].
        bias: [num_outputs], or None.
        widened: whether y is float32 instead of the weight's dtype.
        gated: whether `silu_and_mul` of y is returned instead of y.
    """
    return PlainLinear(weight, bias, linear_finish(silu_and_mul, widened=widened, gated=gated))


def linear_finish(
    silu_and_mul: Callable[[Tensor], Tensor], *, widened: bool, gated: bool
) -> Callable[[Tensor], Tensor] | None:
    """What is applied to a linear layer's outputs if the product itself does not do it; None for nothing."""
    return Tensor.float if widened else silu_and_mul if gated else None


def int8_linear(
    weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False
) -> "QuantizedLinear":
    """`linear` with each weight as an integer from -127 to 127 times one factor for each output.

    The input is not quantized, so an output depends on nothing else in its batch, and weights take half the memory of
    16 bits. In this twin they take more: it only says what the operation means.
    """
    integers, scales = in_8_bits(weight)
    return QuantizedLinear(integers.float() * scales[:, None], weight.dtype, bias, widened=widened, gated=gated)


class QuantizedLinear:
    """See `int8_linear`; products and sums are in float32, and the result is rounded once.

    Args:
        weight: the values that are left of it, in float32.
        dtype: of the input, and of the result unless it is widened.
        bias: see `linear`.
        widened: see there.
        gated: see there.
    """

    def __init__(
        self, weight: Tensor, dtype: torch.dtype, bias: Tensor | None, *, widened: bool = False, gated: bool = False
    ) -> None:
        self._product = PlainLinear(weight, None if bias is None else bias.float())
        self._dtype, self._widened, self._gated = dtype, widened, gated

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, num_inputs] -> [num_tokens, num_outputs], or [num_tokens, num_outputs / 2] if gated."""
        y = self._product(x.float())
        if self._widened:
            return y
        y = y.to(self._dtype)
        return silu_and_mul(y) if self._gated else y


def int4_linear(
    weight: Tensor, bias: Tensor | None, *, widened: bool = False, gated: bool = False
) -> "QuantizedLinear":
    """`linear` with weights of 4 bits, see `Int4`; its inputs come in groups of 32. Otherwise like `int8_linear`."""
    return QuantizedLinear(Int4.of(weight).values(), weight.dtype, bias, widened=widened, gated=gated)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension, in float32 inside (Zhang & Sennrich 2019, arXiv:1910.07467).

    Args:
        x: [..., size].
        weight: [size], in x's dtype; multiplied after rounding to that dtype, as in Hugging Face.
        epsilon: added to the mean square.

    Returns:
        Like `x`.
    """
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(f"weight {form(weight)} does not fit x {form(x)}")
    wide = x.to(torch.float32, copy=True)  # a copy even of float32, since it is scaled in place
    inverse_rms = wide.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    return wide.mul_(inverse_rms).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Adds `x` to `residual` in place, and returns the RMSNorm of the sum; shapes as in `rms_norm`."""
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(f"x {form(x)} and residual {form(residual)} differ")
    return rms_norm(residual.add_(x), weight, epsilon)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates each head of each token by its position, in place (RoFormer: Su et al. 2021, arXiv:2104.09864).

    Component i of a head is rotated with component i + head_dim / 2 ("rotate half", as Hugging Face lays Llama out),
    not with its neighbour as in the paper.

    Args:
        x: [num_tokens, num_heads, head_dim]; may be a strided view, such as the q and k part of a fused projection.
        cos: [num_tokens, head_dim / 2], in x's dtype: the rows of the table at the tokens' positions.
        sin: like `cos`.
    """
    if cos.shape != (x.shape[0], x.shape[2] // 2) or sin.shape != cos.shape or not x.dtype == cos.dtype == sin.dtype:
        raise ValueError(f"cos {form(cos)} and sin {form(sin)} do not fit x {form(x)}")
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.chunk(2, dim=-1)
    rotated_first = torch.addcmul(first * cos, second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated_first)


def rotate_and_cache(
    heads: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Splits a fused projection: rotates queries and keys in place, and writes keys and values into their slots.

    Args:
        heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: each token's queries, keys and values.
        cos: [num_tokens, head_dim / 2], as in `rotary_embedding`.
        sin: like `cos`.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], written in place.
        v_cache: like `k_cache`.
        slot_mapping: as in `reshape_and_cache`.

    Returns:
        The rotated queries, [num_tokens, num_heads, head_dim]: a view of `heads`.
    """
    num_kv_heads = k_cache.shape[2]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    if num_heads < 1:
        raise ValueError(f"heads {form(heads)} hold no queries beside {num_kv_heads} K/V heads")
    rotary_embedding(heads[:, :-num_kv_heads], cos, sin)  # q and k at once
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    reshape_and_cache(k, v, k_cache, v_cache, slot_mapping)
    return q


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension: SwiGLU's gate (Shazeer 2020, arXiv:2002.05202).

    Args:
        x: [num_tokens, 2 * size].

    Returns:
        [num_tokens, size].
    """
    if x.shape[-1] % 2 != 0:
        raise ValueError(f"x {form(x)} has no two halves")
    gate, up = x.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU of every value (Hendrycks & Gimpel 2016, arXiv:1606.08415).

    Args:
        x: [num_tokens, size].
        approximate: "none" for the exact Gaussian integral, "tanh" for its approximation, as torch names them.

    Returns:
        Like `x`.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate is {approximate!r}; it is to be 'none' or 'tanh'")
    return torch.nn.functional.gelu(x, approximate=approximate)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu(first half) * second half of the last dimension: GEGLU's gate (Shazeer 2020, arXiv:2002.05202).

    Args:
        x: [num_tokens, 2 * size].
        approximate: as in `gelu`.

    Returns:
        [num_tokens, size].
    """
    if x.shape[-1] % 2 != 0:
        raise ValueError(f"x {form(x)} has no two halves")
    gate, up = x.chunk(2, dim=-1)
    return gelu(gate, approximate).mul_(up)
