"""What the wrappers of the C++ operations check beyond `kernels.forms`, and their errors for what C++ finds wrong."""

import torch
from torch import Tensor

from kernels.forms import FLOATS, check_slots, form

# As csrc/elements.hpp numbers them.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_MOST_BLOCK_SIZE = 1024  # what csrc/tile.hpp has room for


def check_caches(k_cache: Tensor, v_cache: Tensor, head_dim: int) -> tuple[int, int, int]:
    """num_blocks, block_size and num_kv_heads of a layer's caches; raises ValueError unless C++ can read them."""
    num_blocks, block_size, num_kv_heads, cache_head_dim = k_cache.shape
    if v_cache.shape != k_cache.shape or cache_head_dim != head_dim:
        raise ValueError(f"k_cache {form(k_cache)} and v_cache {form(v_cache)} do not fit heads of {head_dim}")
    dense = (num_kv_heads * head_dim, head_dim, 1)
    if k_cache.stride() != v_cache.stride() or k_cache.stride()[1:] != dense or block_size > _MOST_BLOCK_SIZE:
        raise ValueError(f"k_cache {form(k_cache)} is strided, or has blocks of more than {_MOST_BLOCK_SIZE} tokens")
    if k_cache.dtype == torch.bfloat16 and (block_size % 2 or head_dim % 2 or k_cache.stride(0) % 2):
        raise ValueError(f"blocks of {block_size} tokens with heads of {head_dim} are no pairs of bfloat16")
    return num_blocks, block_size, num_kv_heads


def check_tokens(x: Tensor, name: str) -> None:
    """Raises ValueError unless each token's heads are side by side, [num_tokens, num_heads, head_dim], on the CPU."""
    together = x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
    if x.device.type != "cpu" or not together:
        raise ValueError(f"{name} {form(x)} of strides {x.stride()} on {x.device}: heads are to stand side by side")


def check_dense_slots(slot_mapping: Tensor, num_tokens: int) -> None:
    """Raises ValueError unless there is a slot for each token, in contiguous memory."""
    check_slots(slot_mapping, num_tokens)
    if not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping {form(slot_mapping)} is not contiguous")


def check_places(block_tables: Tensor, query_starts: Tensor, context_lengths: Tensor) -> None:
    """Raises ValueError unless the indices are as C++ reads them."""
    for name, indices in (("block_tables", block_tables), ("starts", query_starts), ("lengths", context_lengths)):
        if indices.dtype != torch.int32 or not indices.is_contiguous():
            raise ValueError(f"{name} {form(indices)} are not contiguous int32")


def misfit_row(
    row: int, num_tokens: int, block_tables: Tensor, query_starts: Tensor, context_lengths: Tensor, num_blocks: int
) -> ValueError:
    """What is wrong with a row of paged attention's arguments; one past the last row stands for `query_starts`."""
    if row == len(context_lengths):
        return ValueError(f"query_starts ends at {query_starts[-1]}, but q holds {num_tokens} tokens")
    return ValueError(
        f"row {row} has {query_starts[row + 1] - query_starts[row]} queries, a context of "
        f"{context_lengths[row]} and {block_tables.shape[1]} blocks, of {num_blocks} in the cache"
    )


def misfit_slot(token: int, slot_mapping: Tensor, num_blocks: int, block_size: int) -> ValueError:
    """What is wrong with a token's slot."""
    return ValueError(f"token {token} has slot {slot_mapping[token]} in {num_blocks} blocks of {block_size}")


def check_dense(x: Tensor, name: str) -> None:
    """Raises ValueError unless `x` is contiguous CPU memory of a dtype that the kernels take."""
    if x.dtype not in DTYPES or x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(f"{name} {form(x)} is to be contiguous on the CPU, in one of {', '.join(map(str, FLOATS))}")
