"""A real model in this process, without gRPC: what tests run the pure scheduler core against.

    model = load_weights(model_dir)
    small, large = start_runner(model, num_blocks=8, num_cpu_blocks=8), start_runner(model, num_blocks=999)
    response = small.runner.execute(request)

Weights take a second to load and are never written to, so tests that try many pools load them once.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.in_process import make_runner
from worker.cache_size import size_as_told
from worker.checkpoint import DTYPES, read_config
from worker.models.model import Model
from worker.models.registry import load_model

if TYPE_CHECKING:
    from worker.loading import LoadedWorker

CPU = torch.device("cpu")


def load_weights(model_dir: Path, dtype: str = "float32", device: torch.device = CPU) -> Model:
    """The model of a checkpoint directory, for any number of runners."""
    return load_model(model_dir, read_config(model_dir), DTYPES[dtype], device)


def start_runner(
    model: Model,
    *,
    num_blocks: int,
    num_cpu_blocks: int = 0,
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
) -> "LoadedWorker":
    """A worker with pools of its own, empty but warmed up as in the process.

    `info` is what GetInfo would answer, with epoch 0; the runner takes any epoch. `info.swap_ms_per_block` is measured
    and differs from run to run: a test whose plan depends on it sets it.
    """
    # Imported here, since the settings it imports need packages that a machine with a GPU may lack.
    from worker.loading import warm_up

    runner, cache = make_runner(
        model,
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        dtype=model.embedding.weight.dtype,
        device=CPU,
    )
    note = size_as_told(cache.shape, num_blocks, None).note
    return warm_up(runner, cache, name="test", dtype=model.embedding.weight.dtype, kv_cache_note=note)
