"""Decode steps as CUDA graphs: recorded once for each of a ladder of batch sizes, replayed with one launch per step.

A forward pass of thirty layers is some hundreds of launches, and the host takes longer for each than the GPU does for a
small batch. A recorded pass reads the same memory every time, so a step's inputs are copied there. A batch between two
rungs of the ladder is padded with rows of one token that have no context and no slot: they write nothing and get zeros.

All graphs are recorded at the start, not when they are first needed: during a recording, no thread may give the device
other work, and what Triton compiles for a batch size would hold up all requests for seconds.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels.batch_bounds import BatchBounds
from worker.inputs import ModelInputs
from worker.layers.attention import AttentionMetadata

# Steps of more rows keep the GPU busy for longer than the host needs to launch them.
MOST_ROWS = 256
_SMALL_SIZES = (1, 2, 4, 8)
_SPACING = 16
# Between two log lines about the progress of the recording.
_SILENCE_S = 2.0

log = logging.getLogger(__name__)

# A model's forward pass over tokens (ids, positions) that are where the metadata say; [num_tokens, hidden_size].
Forward = Callable[[Tensor, Tensor, AttentionMetadata], Tensor]


class Recorder(Protocol):
    """Records what a function does on the device."""

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A function that does the same again on the same memory; it returns the same result tensor every time."""


def ladder(most_rows: int) -> list[int]:
    """The batch sizes that are recorded, up to the first that holds `most_rows`.

    Products of few rows take as long as their weights take to be read, so padding costs little.
    """
    sizes = [*_SMALL_SIZES, *range(_SPACING, most_rows + _SPACING, _SPACING)]
    return sizes[: bisect_left(sizes, most_rows) + 1]


class DecodeGraphs:
    """A forward pass for batches of one token a row.

    Args:
        forward: the pass to record; it must not look at what is on the device.
        record: records it.
        most_rows: most rows of a batch.
        block_size: tokens in a block.
        context_length: most tokens in a row's context.
        device: where everything is.
    """

    def __init__(
        self,
        forward: Forward,
        record: Recorder,
        *,
        most_rows: int,
        block_size: int,
        context_length: int,
        device: torch.device,
    ) -> None:
        self._sizes = ladder(most_rows)
        most_blocks = -(-context_length // block_size)
        largest = self._sizes[-1]
        # What every graph reads; the smaller ones read the beginning of it.
        self._tokens = torch.zeros(3 * largest, dtype=torch.int64, device=device)
        self._tables = torch.zeros(largest, most_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._contexts = torch.zeros(largest, dtype=torch.int32, device=device)
        self._bounds = BatchBounds(longest_context=context_length, fewest_queries=1, most_queries=1)
        self._replays = self._record(forward, record)

    def size_for(self, num_rows: int, num_tokens: int) -> int | None:
        """The number of rows to pad a step to; None if no graph runs it."""
        if num_tokens != num_rows or not 0 < num_rows <= self._sizes[-1]:
            return None
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def __call__(self, inputs: ModelInputs) -> Tensor:
        """Hidden states of a padded step, [size, hidden_size]; they stay until the next call of any size.

        Args:
            inputs: with as many rows as `size_for` says.
        """
        tokens, metadata = self._inputs(len(inputs.token_ids))
        tables = inputs.attention.block_tables
        tokens.copy_(inputs.tokens)
        metadata.context_lengths.copy_(inputs.attention.context_lengths)
        metadata.block_tables[:, : tables.shape[1]].copy_(tables)
        return self._replays[len(inputs.token_ids)]()

    def _inputs(self, size: int) -> tuple[Tensor, AttentionMetadata]:
        """What the graph of a size reads: its tokens as in `ModelInputs.tokens`, and where they are in the cache."""
        tokens = self._tokens[: 3 * size].view(3, size)
        places = (tokens[2], self._tables[:size], self._starts[: size + 1], self._contexts[:size])
        return tokens, AttentionMetadata(*places, self._bounds)

    def _record(self, forward: Forward, record: Recorder) -> dict[int, Callable[[], Tensor]]:
        """A replay for each size; the largest first, so that the others find room in the memory that it took."""
        replays = {}
        begun = told = time.perf_counter()
        for size in reversed(self._sizes):
            tokens, metadata = self._inputs(size)
            tokens[:2], tokens[2] = 0, -1  # only padding: nothing is written to the cache
            replays[size] = record(partial(forward, tokens[0], tokens[1], metadata))
            if time.perf_counter() - told > _SILENCE_S:
                told = time.perf_counter()
                log.info("recording decode graphs", extra={"done": len(replays), "of": len(self._sizes)})
        took_ms = round(1e3 * (time.perf_counter() - begun))
        log.info("decode graphs recorded", extra={"up_to_rows": self._sizes[-1], "took_ms": took_ms})
        return replays


class CudaRecorder:
    """Records into CUDA graphs that share one pool of memory: they are replayed one after the other, never two at once,
    and the result of one is used before the next begins.
    """

    def __init__(self, device: torch.device) -> None:
        # One stream for all: only then do they share memory, and cuBLAS has its workspace there before it is recorded.
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Recorder`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()  # what a first run compiles or loads cannot be recorded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
