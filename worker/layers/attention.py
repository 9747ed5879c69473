"""Paged attention as a layer: the step's indices, the cache write and the attention itself."""

from dataclasses import dataclass

from torch import Tensor

from kernels import reference


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step stand in the cache; built once, handed to every layer.

    Attributes:
        slot_mapping: [num_tokens] int64, the slot that each token's K and V are written to.
        block_tables: [num_rows, max_blocks] int32; entries behind a row's last block are any valid block.
        query_starts: [num_rows + 1] int32, the first token of each row, and num_tokens.
        context_lengths: [num_rows] int32, tokens of each row with those of this step.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lengths: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, layer_cache: tuple[Tensor, Tensor], metadata: AttentionMetadata, scale: float
) -> Tensor:
    """Writes K and V of the step's tokens into the layer's cache, and attends to all that is in it of their sequences.

    Args:
        q: [num_tokens, num_heads, head_dim].
        k: [num_tokens, num_kv_heads, head_dim].
        v: like `k`.
        layer_cache: K and V cache of this layer, [num_blocks, block_size, num_kv_heads, head_dim] each.
        metadata: of this step.
        scale: factor of the scores before the softmax.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    k_cache, v_cache = layer_cache
    reference.reshape_and_cache(k, v, k_cache, v_cache, metadata.slot_mapping)
    return reference.paged_attention(
        q, k_cache, v_cache, metadata.block_tables, metadata.query_starts, metadata.context_lengths, scale
    )
