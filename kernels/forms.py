"""The checks that all implementations of an operation share, and the wording of their messages."""

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INDICES = (torch.int32, torch.int64)


def form(x: Tensor) -> str:
    """A tensor's dtype and shape, for messages."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def check_dtypes(k_cache: Tensor, v_cache: Tensor, *tensors: Tensor) -> None:
    """Raises ValueError unless the tensors share a dtype that the kernels take, and the caches too, maybe another."""
    dtype, cache_dtype = tensors[0].dtype, k_cache.dtype
    agree = dtype in FLOATS and cache_dtype in FLOATS and v_cache.dtype == cache_dtype
    for tensor in tensors:
        agree = agree and tensor.dtype == dtype
    if not agree:
        kinds, caches = (", ".join(map(form, group)) for group in (tensors, (k_cache, v_cache)))
        raise ValueError(f"these differ in dtype, or are of none that the kernels take: {kinds}, or caches {caches}")


def check_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, query_starts: Tensor, context_lengths: Tensor
) -> None:
    """Raises ValueError unless the shapes and dtypes of paged attention's arguments fit together."""
    check_dtypes(k_cache, v_cache, q)
    num_rows = context_lengths.shape[0]
    if k_cache.shape != v_cache.shape or k_cache.ndim != 4 or q.ndim != 3 or q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"q {form(q)}, k_cache {form(k_cache)} and v_cache {form(v_cache)} do not fit together")
    if q.shape[1] == 0 or q.shape[1] % k_cache.shape[2] != 0:
        raise ValueError(f"{q.shape[1]} query heads do not share {k_cache.shape[2]} K/V heads equally")
    if block_tables.ndim != 2 or block_tables.shape[0] != num_rows or query_starts.shape != (num_rows + 1,):
        raise ValueError(
            f"block_tables {form(block_tables)}, query_starts {form(query_starts)} and "
            f"context_lengths {form(context_lengths)} do not have the same rows"
        )


def check_reach(window: int | None, softcap: float | None) -> None:
    """Raises ValueError unless window and softcap are each positive or None, and the window fits an int32."""
    if (window is not None and not 1 <= window < 2**31) or (softcap is not None and softcap <= 0):
        raise ValueError(f"window {window} and softcap {softcap} are to be positive, or None, and the window an int32")


def check_swap(source: Tensor, destination: Tensor, block_pairs: Tensor) -> None:
    """Raises ValueError unless blocks of `source` can be copied into `destination`, and `block_pairs` says which."""
    if source.ndim != 6 or source.shape[:2] != destination.shape[:2] or source.shape[3:] != destination.shape[3:]:
        raise ValueError(f"source {form(source)} and destination {form(destination)} do not fit together")
    if source.dtype != destination.dtype:
        raise ValueError(f"source and destination differ in dtype: {source.dtype}, {destination.dtype}")
    if block_pairs.ndim != 2 or block_pairs.shape[1] != 2 or block_pairs.dtype != torch.int64:
        raise ValueError(f"block_pairs is {form(block_pairs)}; it is to be int64 [num_pairs, 2]")


def check_slots(slot_mapping: Tensor, num_tokens: int) -> None:
    """Raises ValueError unless there is a slot for each token."""
    if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping is {form(slot_mapping)}; it is to be int64 {[num_tokens]}")


def check_floats(**tensors: Tensor) -> None:
    """Raises ValueError unless all share a device and a dtype that the kernels take, with a dense last dimension."""
    first = next(iter(tensors.values())).dtype
    if first not in FLOATS or any(tensor.dtype != first for tensor in tensors.values()):
        kinds = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise ValueError(f"not of one dtype, or of none that the kernels take: {kinds}")
    check_dense(**tensors)


def check_dense(**tensors: Tensor) -> None:
    """Raises ValueError unless all are on one device and dense in the last dimension."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, the others on {first.device}")
        if tensor.ndim > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} {form(tensor)} has strides {tensor.stride()}: its last dimension is not dense")


def check_indices(**tensors: Tensor) -> None:
    """Raises ValueError unless all are int32 or int64 and dense in the last dimension."""
    for name, tensor in tensors.items():
        if tensor.dtype not in INDICES:
            raise ValueError(f"{name} is {form(tensor)}; it is to be int32 or int64")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} {form(tensor)} has strides {tensor.stride()}: its last dimension is not dense")


def check_sampling(
    logits: Tensor, temperatures: Tensor, names: tuple[Tensor, ...], filters: tuple[Tensor, ...] | None
) -> None:
    """Raises ValueError unless each argument has one value for each row of logits, in the right dtype.

    Args:
        logits: [num_rows, vocabulary_size].
        temperatures: [num_rows].
        names: seeds, positions and sequence indexes, [num_rows] each.
        filters: top_k, top_p, min_p and typical_p, [num_rows] each, or None.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits are {form(logits)} with strides {logits.stride()}; float32 with dense rows is meant")
    if logits.shape[1] == 0:
        raise ValueError("the vocabulary is empty")
    floats, integers = [temperatures], list(names)
    if filters is not None:
        if len(filters) != 4:
            raise ValueError(f"{len(filters)} filters; top_k, top_p, min_p and typical_p are meant")
        integers.append(filters[0])
        floats.extend(filters[1:])
    for columns, dtype in ((floats, torch.float32), (integers, torch.int64)):
        for column in columns:
            if column.shape != logits.shape[:1] or column.dtype != dtype or not column.is_contiguous():
                raise ValueError(f"{form(column)} is to be one {dtype} for each of {logits.shape[0]} rows")
