"""A real model in this process, without gRPC: what tests run the pure scheduler core against.

    worker = load_runner(model_dir, num_blocks=64, num_cpu_blocks=64)
    response = worker.runner.execute(request)

Weights take a second to load and are never written to, so tests that try many pools load them once:

    model = load_weights(model_dir)
    small, large = start_runner(model, num_blocks=8, num_cpu_blocks=8), start_runner(model, num_blocks=999)
"""

from pathlib import Path

import torch

from worker.cache_engine import CacheEngine, CacheShape, size_as_told
from worker.checkpoint import DTYPES, read_config
from worker.loading import LoadedWorker, warm_up
from worker.model_runner import ModelRunner
from worker.models.model import Model
from worker.models.registry import load_model

CPU = torch.device("cpu")


def load_weights(model_dir: Path, dtype: str = "float32") -> Model:
    """The model of a checkpoint directory, for as many runners as a test wants."""
    return load_model(model_dir, read_config(model_dir), DTYPES[dtype], CPU)


def start_runner(
    model: Model,
    *,
    num_blocks: int,
    num_cpu_blocks: int = 0,
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
) -> LoadedWorker:
    """A worker with pools of its own, empty but warmed up as in the process.

    `info` is what GetInfo would answer, with epoch 0; the runner takes any epoch. `info.swap_ms_per_block` is measured
    and differs from run to run: a test whose plan depends on it sets it.
    """
    numbers, dtype = model.config, model.embedding.weight.dtype
    shape = CacheShape(numbers.num_layers, block_size, numbers.num_kv_heads, numbers.head_dim, dtype)
    cache = CacheEngine(shape, num_blocks, num_cpu_blocks, CPU)
    runner = ModelRunner(
        model,
        cache,
        max_num_batched_tokens=max_num_batched_tokens,
        context_length=numbers.context_length,
        device=CPU,
    )
    return warm_up(runner, cache, name="test", kv_cache_note=size_as_told(shape, num_blocks, None).note)


def load_runner(
    model_dir: Path,
    *,
    num_blocks: int,
    num_cpu_blocks: int = 0,
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
    dtype: str = "float32",
) -> LoadedWorker:
    """`start_runner` on the weights in `model_dir`, for a test that needs no more than one."""
    return start_runner(
        load_weights(model_dir, dtype),
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
    )
