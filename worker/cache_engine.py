"""The KV cache: the memory that holds its blocks, and moving them between pools.

It does not know which sequence owns a block: the scheduler allocates, and this module does what it is told. How many
blocks there are is decided in `worker.cache_size`.
"""

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.choice import Operations
from worker.models.model import Model
from worker.streams import Mark, Streams, streams_of
from worker.transfer import to_device

Pairs = npt.NDArray[np.integer]

# What is moved out and in a few times at the start, to measure the cost of moving a block.
_MEASURED_BLOCKS = 64
_MEASURED_BYTES = 4 << 20
_MEASURED_ROUNDS = 5

# Advice of madvise(2), since Linux 5.14: populates pages as if they were written, and keeps their contents.
_MADV_POPULATE_WRITE = 23
_POPULATED_BYTES = 2 << 20  # at a time: other threads that need pages of the pool wait that long


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one block holds: K and V of `block_size` tokens in all layers."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of_model(cls, model: Model, block_size: int, dtype: torch.dtype) -> Self:
        """What a block holds for this rank's part of a model; a block's id is the same at all ranks."""
        return cls(len(model.layer_indexes), block_size, model.heads.kv.size, model.config.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all layers together."""
        values = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return values * self.dtype.itemsize

    def of_pool(self, num_blocks: int) -> tuple[int, ...]:
        """The shape of the tensor that holds `num_blocks` blocks."""
        return (self.num_layers, 2, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class Swap:
    """A move of blocks between the pools: the marks at its beginning and its end."""

    begun: Mark
    ended: Mark


class CacheEngine:
    """The block pool on the model's device, and a second pool in CPU memory to swap blocks out to.

    Both are zero at first. `layers` are the views that the model's layers read and write.

    Args:
        shape: of a block.
        num_blocks: blocks in the pool on the device.
        num_cpu_blocks: blocks in the other pool.
        device: the model's.
        operations: the model's, which decide how K and V are laid out in a block.
        streams: of the device; None: as `streams_of` returns them.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_blocks: int,
        num_cpu_blocks: int,
        device: torch.device,
        operations: Operations,
        streams: Streams | None = None,
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self._device = device
        self._operations = operations
        self._streams = streams or streams_of(device)
        if device.type == "cpu":
            self._cache, self._cpu_cache = _map(shape, num_blocks), _map(shape, num_cpu_blocks)
        else:
            self._cache = torch.zeros(shape.of_pool(num_blocks), dtype=shape.dtype, device=device)
            self._cpu_cache = torch.zeros(shape.of_pool(num_cpu_blocks), dtype=shape.dtype, pin_memory=True)
        self.layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self._cache]
        # Device blocks that are read or written by swaps which no step has waited for yet, and the last such swap.
        self._in_motion = np.zeros(num_blocks, dtype=bool)
        self._last_swap: Swap | None = None

    def populate(self, on_piece: Callable[[], None]) -> None:
        """Populates the main pool if it is on a CPU, from any thread; see the function of this name."""
        if self._device.type == "cpu":
            populate(self._cache, on_piece)

    def swap(self, blocks_out: Pairs, blocks_in: Pairs) -> Swap | None:
        """Moves blocks to the CPU pool and then others back, after all steps launched before and beside those after.

        The host does not wait, and steps wait only by `wait_for_swaps`.

        Args:
            blocks_out: [n, 2] pairs of (device block, CPU block).
            blocks_in: [n, 2] pairs of (CPU block, device block).

        Returns:
            The swap; None if there is nothing to move.
        """
        if len(blocks_out) == len(blocks_in) == 0:
            return None

        def move() -> None:
            for source, destination, pairs in (
                (self._cache, self._cpu_cache, blocks_out),
                (self._cpu_cache, self._cache, blocks_in),
            ):
                if len(pairs) > 0:
                    (sent,) = to_device(self._device, pairs.astype(np.int64))
                    self._operations.swap_blocks(source, destination, sent)

        self._last_swap = Swap(*self._streams.beside(move))
        self._in_motion[blocks_out[:, 0]] = True
        self._in_motion[blocks_in[:, 1]] = True
        return self._last_swap

    def wait_for_swaps(self, *blocks: npt.NDArray[np.integer]) -> None:
        """Call it before a step reads or writes `blocks`: the step then begins once no swap moves any of them.

        A step that touches no block in motion runs beside the swap.
        """
        if self._last_swap is not None and any(self._in_motion[touched].any() for touched in blocks):
            self._streams.wait_for(self._last_swap.ended)
            self._in_motion[:] = False
            self._last_swap = None

    def copy(self, block_pairs: Pairs) -> None:
        """Copies blocks onto others; block_pairs: [num_pairs, 2], (from, to)."""
        # The pairs stay in host memory, where the operation can see whether a block is both read and written.
        self._operations.copy_blocks(self._cache, torch.from_numpy(block_pairs.astype(np.int64)))

    def clear(self, blocks: Tensor) -> None:
        """Zeroes blocks; blocks: [n] int64, on the device."""
        self._cache.index_fill_(2, blocks, 0)

    def measure_swap(self) -> float:
        """Milliseconds that it takes to move one block between the pools, in either direction; 0 if one has none.

        Call it before anything is in the pools: it takes some tens of milliseconds, and zeroes the blocks that it
        moves.
        """
        count = min(_MEASURED_BLOCKS, max(1, _MEASURED_BYTES // self.shape.block_bytes))
        blocks = np.arange(min(count, self.num_blocks, self.num_cpu_blocks))
        if len(blocks) == 0:
            return 0.0
        pairs = np.stack([blocks, blocks], axis=1)
        on_cpu, on_device = torch.from_numpy(blocks), torch.from_numpy(blocks).to(self._device)
        self._cache.index_fill_(2, on_device, 1)  # pages never written all map to one page, and are read faster
        times_ms = []
        for _ in range(_MEASURED_ROUNDS):  # the first one warms up
            swap = self.swap(pairs, pairs)
            assert swap is not None
            swap.ended.wait()
            times_ms.append(swap.ended.ms_since(swap.begun))
        self.clear(on_device)
        self._cpu_cache.index_fill_(2, on_cpu, 0)
        return min(times_ms) / (2 * len(blocks))  # of the round that was disturbed least


def populate(pool: Tensor, on_piece: Callable[[], None]) -> None:
    """Has the system find pages for a pool in CPU memory before its blocks are written, where it can.

    The first write to a huge page waits milliseconds until the system has found and cleared one, and a prompt writes to
    dozens. The pool's contents stay, so it may be in use meanwhile; this takes a second for some hundreds of MiB.

    Args:
        pool: in CPU memory.
        on_piece: called after each piece, which takes some milliseconds; the next one waits for it to return.
    """
    madvise = ctypes.CDLL(None).madvise
    storage = pool.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    for address in range(start - start % _POPULATED_BYTES, end, _POPULATED_BYTES):
        first, last = max(address, start), min(address + _POPULATED_BYTES, end)
        if madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_POPULATE_WRITE) != 0:
            return
        on_piece()


def _map(shape: CacheShape, num_blocks: int) -> Tensor:
    """A pool in CPU memory, of zero pages that cost nothing until they are written; torch.zeros writes them all.

    It is laid out block by block, each with all its layers: the first block of SmolLM2-135M takes one huge page rather
    than one for each of K and V in 30 layers (120 MiB, and up to 300 ms), and a block is moved in one piece.
    """
    if num_blocks == 0:
        return torch.zeros(shape.of_pool(0), dtype=shape.dtype)
    pages = mmap.mmap(-1, num_blocks * shape.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    num_layers, two, _, *of_block = shape.of_pool(num_blocks)
    return torch.frombuffer(pages, dtype=shape.dtype).view(num_blocks, num_layers, two, *of_block).movedim(0, 2)
