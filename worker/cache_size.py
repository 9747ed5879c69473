"""How many blocks the KV cache and its swap pool have, and why, in words."""

import os
from dataclasses import dataclass
from pathlib import Path

from worker.cache_engine import CacheShape

# What a CPU worker takes by default: as much as the checkpoint, since a host that can hold the one can hold the other,
# but room for at least this many sequences of full length, so that no single one takes all of it; and at most this
# share of the memory that is left. The prefix cache fills every block in time, so a generous pool would not stay the
# zero pages that it is at first.
_DEFAULT_SEQUENCES = 2
_DEFAULT_SHARE = 0.25
# The most that the swap pool takes by default; it never has more blocks than the cache, whose blocks go there.
_DEFAULT_SWAP_CAP_BYTES = 1 << 30

# Samples of the largest step that the cache leaves room for: their logits are that step's largest tensors.
PROFILED_SAMPLES = 256
# Bytes for each of those logits, measured with filters and log-probabilities for all, on distributions that are typical
# of models; flat ones, whose nuclei hold most of the vocabulary, take up to five times as much.
_LOGIT_BYTES = 24


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How many blocks, and how that came about, in words."""

    num_blocks: int
    note: str


@dataclass(frozen=True, slots=True)
class Profile:
    """What takes a GPU's memory before there is a KV cache.

    Attributes:
        total_bytes: of the device.
        resident_bytes: what stays: weights, libraries, other processes.
        step_bytes: what the largest step took beyond them at its peak.
        graph_bytes: what CUDA graphs took.
    """

    total_bytes: int
    resident_bytes: int
    step_bytes: int
    graph_bytes: int

    @property
    def room_bytes(self) -> int:
        """What is left."""
        return self.total_bytes - self.resident_bytes - self.step_bytes - self.graph_bytes


def size_as_told(
    shape: CacheShape, num_gpu_blocks: int | None, kv_cache_bytes: int | None, room_bytes: int | None = None
) -> CacheSize | None:
    """The size that the settings name, by blocks or else by bytes; None if they name none.

    Args:
        shape: of a block.
        num_gpu_blocks: as told by --num-gpu-blocks.
        kv_cache_bytes: as told by --kv-cache-bytes.
        room_bytes: how much there is for it; None: not checked.

    Raises:
        ValueError: that is less than one block, or more than there is room for.
    """
    if num_gpu_blocks is not None:
        flag, num_blocks = "--num-gpu-blocks", num_gpu_blocks
    elif kv_cache_bytes is not None:
        flag, num_blocks = "--kv-cache-bytes", kv_cache_bytes // shape.block_bytes
    else:
        return None
    if num_blocks < 1:
        raise ValueError(f"{flag} is {kv_cache_bytes:,}, but a block of the KV cache takes {shape.block_bytes:,} bytes")
    if room_bytes is not None and num_blocks * shape.block_bytes > room_bytes:
        fitting = max(0, room_bytes) // shape.block_bytes
        raise ValueError(
            f"{flag} makes a KV cache of {in_words(num_blocks * shape.block_bytes)}, but beside the weights and a "
            f"step there are {in_words(room_bytes)} of memory: at most {fitting:,} blocks, or "
            f"{fitting * shape.block_bytes:,} bytes"
        )
    return _size(shape, num_blocks, f"as told by {flag}")


def size_on_cpu(shape: CacheShape, context_length: int, checkpoint_bytes: int, room_bytes: int) -> CacheSize:
    """As large as the checkpoint, with room for two sequences at least, within a share of the memory that is left.

    Raises:
        ValueError: the share does not hold one block.
    """
    longest_bytes = _DEFAULT_SEQUENCES * -(-context_length // shape.block_size) * shape.block_bytes
    wanted = max(
        (checkpoint_bytes, "as large as the checkpoint"),
        (longest_bytes, f"room for {_DEFAULT_SEQUENCES} sequences of {context_length:,} tokens"),
    )
    share = (int(_DEFAULT_SHARE * room_bytes), f"a quarter of the {in_words(room_bytes)} that are left")
    cache_bytes, reason = min(wanted, share)
    if cache_bytes < shape.block_bytes:
        raise ValueError(
            f"only {in_words(room_bytes)} of memory are left beside the weights and a step, and the KV cache takes a "
            "quarter of that: free some, or say how much it may take by --kv-cache-bytes"
        )
    return _size(shape, cache_bytes // shape.block_bytes, reason)


def size_on_gpu(shape: CacheShape, profile: Profile, gpu_memory_utilization: float) -> CacheSize:
    """The size that fills what all else leaves of our share of the GPU's memory.

    Args:
        shape: of a block.
        profile: of the GPU's memory.
        gpu_memory_utilization: our share of it, in (0, 1].

    Raises:
        ValueError: that does not hold one block.
    """
    kept_bytes = int(profile.total_bytes * (1 - gpu_memory_utilization))
    cache_bytes = profile.room_bytes - kept_bytes
    reason = (
        f"{gpu_memory_utilization:.0%} of {in_words(profile.total_bytes)}, less {in_words(profile.resident_bytes)} "
        f"of weights and others, {in_words(profile.step_bytes)} for a step and {in_words(profile.graph_bytes)} for "
        "CUDA graphs"
    )
    if cache_bytes < shape.block_bytes:
        raise ValueError(
            f"no room for the KV cache: {reason}; raise --gpu-memory-utilization, or lower --max-num-batched-tokens"
        )
    return _size(shape, cache_bytes // shape.block_bytes, reason)


def count_swap_blocks(shape: CacheShape, swap_bytes: int | None, num_blocks: int, available_bytes: int) -> int:
    """Blocks of the swap pool: what `swap_bytes` hold, or by default as many as the cache has, within reason.

    Args:
        shape: of a block.
        swap_bytes: as told by --swap-bytes; None if it is not given.
        num_blocks: of the cache.
        available_bytes: of CPU memory, besides the weights and the cache.

    Raises:
        ValueError: `swap_bytes` is more than there is.
    """
    if swap_bytes is not None:
        if swap_bytes > max(0, available_bytes):
            raise ValueError(
                f"--swap-bytes is {in_words(swap_bytes)}, but only {in_words(available_bytes)} of memory are left "
                "beside the KV cache; 0 is none"
            )
        return swap_bytes // shape.block_bytes
    most_bytes = min(_DEFAULT_SWAP_CAP_BYTES, int(_DEFAULT_SHARE * max(0, available_bytes)))
    return min(num_blocks, most_bytes // shape.block_bytes)


def largest_logits_bytes(vocabulary_size: int) -> int:
    """What the logits of the largest step take on a CPU, where that step is not run to measure it."""
    return PROFILED_SAMPLES * vocabulary_size * _LOGIT_BYTES


def available_memory() -> int:
    """Bytes that this process may still take: what the machine has, or, if less, what the container's limit leaves."""
    if not (meminfo := _read_meminfo()):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min(meminfo["MemAvailable"], _left_in_container(Path("/sys/fs/cgroup"), meminfo["MemAvailable"]))


def most_memory() -> int | None:
    """Bytes that this process can take at the very most, with all the free swap space; None if nothing tells."""
    meminfo = _read_meminfo()
    return available_memory() + meminfo["SwapFree"] if meminfo else None


def _read_meminfo() -> dict[str, int]:
    """What Linux tells of the machine's memory, in bytes; empty on other systems."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return {}
    rows = (line.split(":") for line in path.read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in rows}


def _left_in_container(group: Path, otherwise: int) -> int:
    """What a control group's limit leaves; `otherwise` if it has none."""
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return otherwise
    if limit == "max":
        return otherwise
    # Pages of files, the checkpoint's among them, count as used, but the kernel reclaims them before it kills.
    cached = int(rows.get("active_file", 0)) + int(rows.get("inactive_file", 0))
    return max(0, int(limit) - used + cached)


def _size(shape: CacheShape, num_blocks: int, reason: str) -> CacheSize:
    size = f"{num_blocks:,} blocks of {shape.block_size} tokens ({num_blocks * shape.block_size:,})"
    dtype = str(shape.dtype).removeprefix("torch.")
    return CacheSize(num_blocks, f"{size} in {dtype}, {in_words(num_blocks * shape.block_bytes)}: {reason}")


def in_words(num_bytes: int) -> str:
    """A size as it is told to people."""
    num_bytes = max(0, num_bytes)
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.3g} MiB"
