"""The KV cache: how many blocks there are, the memory they stand in, and moving them between pools.

It knows nothing of who owns a block: the scheduler allocates, and this module does what it is told.
"""

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels import reference

# What a CPU worker takes when nobody says how much: room for this many sequences of full length, a quarter of the
# memory that is free beside the weights, or the cap, whichever is least. Pages cost nothing until they are written.
_DEFAULT_NUM_SEQUENCES = 64
_DEFAULT_SHARE = 0.25
_DEFAULT_CAP_BYTES = 4 << 30
# The same for the swap pool, beside the cache; it never has more blocks than the cache, whose blocks go there.
_DEFAULT_SWAP_CAP_BYTES = 1 << 30

# What is moved out and in at the start, a few times, to measure the cost of a block.
_MEASURED_BLOCKS = 64
_MEASURED_BYTES = 16 << 20
_MEASURED_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one block holds: K and V of `block_size` tokens in all layers."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all layers together."""
        values = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return values * self.dtype.itemsize

    def of_pool(self, num_blocks: int) -> tuple[int, ...]:
        """The shape of the tensor that holds so many blocks."""
        return (self.num_layers, 2, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How many blocks, and in words how that came about."""

    num_blocks: int
    note: str


def size_as_told(shape: CacheShape, num_blocks: int | None, kv_cache_bytes: int | None) -> CacheSize | None:
    """The size that the settings name, by blocks or else by bytes; None when they name none.

    Raises:
        ValueError: the bytes do not hold one block.
    """
    if num_blocks is not None:
        return _size(shape, num_blocks, "as told by --num-blocks")
    if kv_cache_bytes is not None:
        return _size(shape, kv_cache_bytes // shape.block_bytes, "as told by --kv-cache-bytes")
    return None


def size_on_cpu(shape: CacheShape, context_length: int, available_bytes: int) -> CacheSize:
    """A share of the memory that is available beside the weights, within reason.

    Raises:
        ValueError: the share does not hold one block.
    """
    longest_bytes = -(-context_length // shape.block_size) * shape.block_bytes
    candidates = [
        (_DEFAULT_NUM_SEQUENCES * longest_bytes, f"{_DEFAULT_NUM_SEQUENCES} sequences of {context_length} tokens"),
        (int(_DEFAULT_SHARE * available_bytes), f"a quarter of the {_gibibytes(available_bytes)} available"),
        (_DEFAULT_CAP_BYTES, f"the default cap of {_gibibytes(_DEFAULT_CAP_BYTES)}"),
    ]
    cache_bytes, reason = min(candidates)
    return _size(shape, cache_bytes // shape.block_bytes, reason)


def size_on_gpu(shape: CacheShape, total_bytes: int, peak_bytes: int, gpu_memory_utilization: float) -> CacheSize:
    """What is left of our share of the GPU's memory beside the peak of the largest step.

    Args:
        shape: of a block.
        total_bytes: the GPU's memory.
        peak_bytes: most that was in use during the profile run, by us and by others.
        gpu_memory_utilization: our share of `total_bytes`, in (0, 1].

    Raises:
        ValueError: that does not hold one block.
    """
    cache_bytes = int(total_bytes * gpu_memory_utilization) - peak_bytes
    reason = f"{gpu_memory_utilization:.0%} of {_gibibytes(total_bytes)}, less {_gibibytes(peak_bytes)} at the peak"
    return _size(shape, cache_bytes // shape.block_bytes, reason)


def count_swap_blocks(shape: CacheShape, swap_bytes: int | None, num_blocks: int, available_bytes: int) -> int:
    """Blocks of the swap pool: what `swap_bytes` hold, or by default as many as the cache has, within reason.

    Args:
        shape: of a block.
        swap_bytes: as told by --swap-bytes; None when nobody says.
        num_blocks: of the cache.
        available_bytes: of CPU memory, beside the weights and the cache.
    """
    if swap_bytes is not None:
        return swap_bytes // shape.block_bytes
    most_bytes = min(_DEFAULT_SWAP_CAP_BYTES, int(_DEFAULT_SHARE * max(0, available_bytes)))
    return min(num_blocks, most_bytes // shape.block_bytes)


def _size(shape: CacheShape, num_blocks: int, reason: str) -> CacheSize:
    if num_blocks < 1:
        raise ValueError(f"no block of {shape.block_bytes:,} bytes fits into the KV cache ({reason})")
    tokens, size = num_blocks * shape.block_size, _gibibytes(num_blocks * shape.block_bytes)
    return CacheSize(num_blocks, f"{num_blocks:,} blocks of {shape.block_size} tokens ({tokens:,}) in {size}: {reason}")


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def available_memory() -> int:
    """Bytes that this process may still take: what the machine has, or what the container's limit leaves if less."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    rows = dict(line.split(":") for line in meminfo.read_text().splitlines())
    available = int(rows["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(most) - int(used.read_text())))
    return available


class CacheEngine:
    """The block pool on the model's device, and beside it a pool in CPU memory to swap blocks out to.

    Both are zero at first. `layers` are the views that the model's layers read and write.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, num_cpu_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_cpu_blocks = num_cpu_blocks
        if device.type == "cpu":
            self._cache = _map(shape, num_blocks, huge_pages=True)
            # Small pages for what may never be used: a block has a piece in every layer, so the first one that is
            # swapped out would take two huge pages a layer (120 MB and up to 150 ms for SmolLM2-135M's 30 layers).
            self._cpu_cache = _map(shape, num_cpu_blocks, huge_pages=False)
        else:
            self._cache = torch.zeros(shape.of_pool(num_blocks), dtype=shape.dtype, device=device)
            self._cpu_cache = torch.zeros(shape.of_pool(num_cpu_blocks), dtype=shape.dtype, pin_memory=True)
        self.layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self._cache]

    def swap_out(self, block_pairs: Tensor) -> None:
        """Copies blocks to the CPU pool; block_pairs: [num_pairs, 2] int64, (ours, CPU's)."""
        reference.swap_blocks(self._cache, self._cpu_cache, block_pairs)

    def swap_in(self, block_pairs: Tensor) -> None:
        """Copies blocks back; block_pairs: [num_pairs, 2] int64, (CPU's, ours)."""
        reference.swap_blocks(self._cpu_cache, self._cache, block_pairs)

    def copy(self, block_pairs: Tensor) -> None:
        """Copies blocks onto others; block_pairs: [num_pairs, 2] int64, (from, to)."""
        reference.copy_blocks(self._cache, block_pairs)

    def clear(self, blocks: Tensor) -> None:
        """Zeroes blocks; blocks: [n] int64.

        Done when a sequence enters a block: attention reads whole blocks and masks what stands behind the context, and
        a NaN that the block's last owner left there would get through the mask, since 0 * NaN is NaN.
        """
        self._cache.index_fill_(2, blocks, 0)

    def measure_swap(self) -> float:
        """Milliseconds that it takes to move one block from one pool to the other, in either direction; 0 without two.

        To be called before anything is in the pools: it takes some tens of milliseconds, and leaves the blocks that it
        moves zero.
        """
        count = min(_MEASURED_BLOCKS, max(1, _MEASURED_BYTES // self.shape.block_bytes))
        blocks = torch.arange(min(count, self.num_blocks, self.num_cpu_blocks))
        if len(blocks) == 0:
            return 0.0
        pairs = blocks[:, None].expand(-1, 2)
        on_device = blocks.to(self._cache.device)
        self._cache.index_fill_(2, on_device, 1)  # pages that were never written are all one page, and read faster
        times_s = []
        for _ in range(_MEASURED_ROUNDS):  # the first one warms up
            begun = self.finished_at()
            self.swap_out(pairs)
            self.swap_in(pairs)
            times_s.append(self.finished_at() - begun)
        self.clear(on_device)
        self._cpu_cache.index_fill_(2, blocks, 0)
        return 1e3 * min(times_s) / (2 * len(blocks))  # of the round that nobody else held up

    def finished_at(self) -> float:
        """The time in seconds, of `time.perf_counter`, once the device has done all that it was given."""
        if self._cache.is_cuda:
            torch.cuda.synchronize(self._cache.device)
        return time.perf_counter()


def _map(shape: CacheShape, num_blocks: int, *, huge_pages: bool) -> Tensor:
    """A pool in CPU memory, of zero pages that cost nothing until they are written; torch.zeros writes them all."""
    if num_blocks == 0:
        return torch.zeros(shape.of_pool(0), dtype=shape.dtype)
    pages = mmap.mmap(-1, num_blocks * shape.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=shape.dtype).view(shape.of_pool(num_blocks))
