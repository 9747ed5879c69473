"""Paged attention as a layer: the step's indices, the cache write and the attention itself."""

from dataclasses import dataclass, field

from torch import Tensor

from kernels.batch_bounds import BatchBounds
from kernels.choice import Operations


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step are in the cache; built once, passed to every layer.

    Attributes:
        slot_mapping: [num_tokens] int64, the slot that each token's K and V are written to.
        block_tables: [num_rows, max_blocks] int32; entries after a row's last block are any valid block.
        query_starts: [num_rows + 1] int32, the index of each row's first token, then num_tokens.
        context_lengths: [num_rows] int32, tokens of each row, including those of this step.
        bounds: what the host knows of the rows, so that no kernel launch has to wait for the device.
        scored: [num_scored] int64, ascending: indices of the tokens whose hidden states are asked for; None: all.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    bounds: BatchBounds = field(default_factory=BatchBounds)
    scored: Tensor | None = None

    def pick_scored(self, x: Tensor) -> Tensor:
        """The rows of [num_tokens, ...] that are asked for."""
        return x if self.scored is None else x[self.scored]


def attend_rotated(
    operations: Operations,
    heads: Tensor,
    rotation: tuple[Tensor, Tensor],
    layer_cache: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Rotates queries and keys, writes K and V into the layer's cache, and attends to all of their sequences in it.

    Args:
        operations: the ones that every other access to the cache goes through as well.
        heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], each token's queries, keys and values; overwritten.
        rotation: cosines and sines of each token's position, [num_tokens, head_dim / 2] each.
        layer_cache: K and V cache of this layer, [num_blocks, block_size, num_kv_heads, head_dim] each.
        metadata: of this step.
        scale: factor of the scores before the softmax.
        window: how many tokens a query sees, itself included; None: all before it.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    q = operations.rotate_and_cache(heads, *rotation, *layer_cache, metadata.slot_mapping)
    return _attend_cached(operations, q, layer_cache, metadata, scale, window, None)


def attend(
    operations: Operations,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_cache: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As `attend_rotated`, for queries and keys that are not to be rotated here.

    Args:
        operations: see there.
        q: [num_tokens, num_heads, head_dim].
        k: [num_tokens, num_kv_heads, head_dim].
        v: like `k`.
        layer_cache: see there.
        metadata: see there.
        scale: see there.
        window: see there.
        softcap: bound of the scores; None: none.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    operations.reshape_and_cache(k, v, *layer_cache, metadata.slot_mapping)
    return _attend_cached(operations, q, layer_cache, metadata, scale, window, softcap)


def _attend_cached(
    operations: Operations,
    q: Tensor,
    layer_cache: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    places = (metadata.block_tables, metadata.query_starts, metadata.context_lengths)
    return operations.paged_attention(q, *layer_cache, *places, scale, window, softcap, metadata.bounds)
