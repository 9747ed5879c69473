"""Copying blocks: onto others of the same cache, and between a GPU's cache and a pool in the CPU's memory.

One launch copies all blocks of all layers. A block is stored in pieces, one for K and one for V in each layer, often of
no more than some tens of KiB: a copy engine that gets them one by one spends more time on starting than on moving. So
programs copy them, each a part of a piece at a time, in a grid that is a fixed share of the GPU: the CPU's pinned
memory has an address on the GPU too, and a few dozen programs keep enough of it in flight to fill the link. Swapping
this way leaves most multiprocessors to a forward pass beside it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms import check_swap

_WORDS = 2048  # of 8 bytes: what a program has in flight at once
_PROGRAMS_ON_LINK = 64
_PROGRAMS_IN_MEMORY = 2048
_NUM_WARPS = 8


@triton.jit(do_not_specialize=["num_pairs"])
def _copy_pieces_kernel(
    source: tl.tensor,
    destination: tl.tensor,
    block_pairs: tl.tensor,  # [num_pairs, 2] int64
    num_pairs: tl.tensor,
    source_part_stride: tl.tensor,
    destination_part_stride: tl.tensor,
    PIECE: tl.constexpr,  # words of a block in one layer's K or V
    NUM_PARTS: tl.constexpr,  # layers times two
    WORDS: tl.constexpr,
) -> None:
    SLICES: tl.constexpr = (PIECE + WORDS - 1) // WORDS
    num_tiles = num_pairs.to(tl.int64) * NUM_PARTS * SLICES
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # Slices of a piece are neighbours, then the parts of a block, then blocks.
        piece, slice_index = tile // SLICES, tile % SLICES
        pair, part = piece // NUM_PARTS, piece % NUM_PARTS
        from_block = tl.load(block_pairs + 2 * pair)
        to_block = tl.load(block_pairs + 2 * pair + 1)
        words = slice_index * WORDS + tl.arange(0, WORDS)
        there = words < PIECE
        moved = tl.load(source + part * source_part_stride + from_block * PIECE + words, mask=there)
        tl.store(destination + part * destination_part_stride + to_block * PIECE + words, moved, mask=there)


def copy_blocks(kv_cache: Tensor, block_pairs: Tensor) -> None:
    """Copies blocks onto others of the same cache in all layers; every block is read before any is written.

    Runs on the current stream and returns at once. If the pairs are in the CPU's memory, as a step brings them, the
    host can see which blocks are both read and written; only those are moved aside first. Pairs on the GPU cannot be
    looked at without waiting, so all their blocks are moved aside.

    Args:
        kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], contiguous, written in place.
        block_pairs: [num_pairs, 2] int64, (from, to); no block is written twice.
    """
    _check(kv_cache, kv_cache, block_pairs)
    if len(block_pairs) == 0:
        return
    from_blocks, to_blocks = block_pairs.unbind(1)
    aside, straight = block_pairs, block_pairs[:0]
    if not block_pairs.is_cuda:
        overlapping = torch.isin(from_blocks, to_blocks)
        aside, straight = block_pairs[overlapping], block_pairs[~overlapping]
    numbers = torch.arange(len(aside), device=aside.device)
    if len(aside) > 0:
        kept = kv_cache.new_empty((*kv_cache.shape[:2], len(aside), *kv_cache.shape[3:]))
        _launch(kv_cache, kept, torch.stack([aside[:, 0], numbers], 1), _PROGRAMS_IN_MEMORY)
    _launch(kv_cache, kv_cache, straight, _PROGRAMS_IN_MEMORY)
    if len(aside) > 0:
        _launch(kept, kv_cache, torch.stack([numbers, aside[:, 1]], 1), _PROGRAMS_IN_MEMORY)


def swap_blocks(source: Tensor, destination: Tensor, block_pairs: Tensor) -> None:
    """Copies blocks between a cache on the GPU and a pool in pinned memory of the CPU, in all layers.

    Runs on the current stream and returns at once, so ordering is up to the caller. On a side stream: let it wait for
    an event that was recorded after the last write of what it reads (swapping out: the forward pass that wrote the
    blocks; swapping in: the swap-out that filled the CPU's blocks) and after the last use of what it overwrites; and
    let whatever reads what it wrote, or writes what it read, wait for an event recorded after it. The CPU may look at
    the pool after synchronizing with that event.

    Args:
        source: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], contiguous; on a GPU, or pinned.
        destination: like `source` except for num_blocks; written in place.
        block_pairs: [num_pairs, 2] int64, (from, to); no block is written twice. On the CPU or on the GPU.
    """
    _check(source, destination, block_pairs)
    on_link = not (source.is_cuda and destination.is_cuda)
    if on_link and torch.cuda.is_available():
        for name, pool in (("source", source), ("destination", destination)):
            if not pool.is_cuda and pool.numel() > 0 and not pool.is_pinned():
                raise ValueError(f"{name} is in memory of the CPU that is not pinned: the GPU cannot reach it")
    _launch(source, destination, block_pairs, _PROGRAMS_ON_LINK if on_link else _PROGRAMS_IN_MEMORY)


def _launch(source: Tensor, destination: Tensor, block_pairs: Tensor, most_programs: int) -> None:
    if len(block_pairs) == 0 or source.shape[0] == 0:
        return
    device = source.device if source.is_cuda else destination.device
    if device.type == "cuda" and not block_pairs.is_cuda:
        block_pairs = block_pairs.pin_memory()  # a copy from unpinned memory would wait for the device
    source_words, destination_words = _as_words(source), _as_words(destination)
    piece = source_words.shape[-1]
    num_parts = source_words.shape[0]
    num_tiles = len(block_pairs) * num_parts * triton.cdiv(piece, _WORDS)
    _copy_pieces_kernel[(min(num_tiles, most_programs),)](
        source_words,
        destination_words,
        block_pairs.to(device, non_blocking=True).contiguous(),
        len(block_pairs),
        *(source_words.stride(0), destination_words.stride(0)),
        PIECE=piece,
        NUM_PARTS=num_parts,
        WORDS=min(_WORDS, triton.next_power_of_2(piece)),
        num_warps=_NUM_WARPS,
    )


def _as_words(kv_cache: Tensor) -> Tensor:
    """[num_layers * 2, num_blocks, words of a piece], in the widest integers that divide a piece, or else as it is."""
    num_layers, two, num_blocks = kv_cache.shape[:3]
    pieces = kv_cache.view(num_layers * two, num_blocks, -1)
    for words in (torch.int64, torch.int32):
        if pieces.shape[-1] * pieces.dtype.itemsize % words.itemsize == 0:
            return pieces.view(words)
    return pieces


def _check(source: Tensor, destination: Tensor, block_pairs: Tensor) -> None:
    check_swap(source, destination, block_pairs)
    if not source.is_contiguous() or not destination.is_contiguous():
        raise ValueError(f"the pools are to be contiguous; their strides are {source.stride()}, {destination.stride()}")
