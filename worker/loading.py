"""From settings to a worker that is ready for its first step: find, build, fill, size the cache, warm up."""

import logging
import os
import time
from dataclasses import dataclass

import torch

from kernels.cpu import pin_threads
from protos.columns import pack
from protos.sampling_pb2 import Sampling
from protos.worker_pb2 import ExecuteModelRequest, GetInfoResponse, NewRequest
from worker.cache_engine import (
    CacheEngine,
    CacheShape,
    CacheSize,
    available_memory,
    count_swap_blocks,
    size_as_told,
    size_on_cpu,
    size_on_gpu,
)
from worker.checkpoint import (
    DTYPES,
    ModelError,
    checkpoint_dtype,
    checkpoint_name,
    find_checkpoint,
    read_config,
)
from worker.config import WorkerSettings
from worker.inputs import StepLimits
from worker.model_runner import ModelRunner
from worker.models.model import Model
from worker.models.registry import load_model

# Samples of the step that a GPU's cache is sized beside: their logits are its largest tensor.
_PROFILED_SAMPLES = 256

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """What a worker serves with.

    Attributes:
        runner: ready for steps.
        info: the answer to GetInfo, but for the epoch.
    """

    runner: ModelRunner
    info: GetInfoResponse


def load_worker(settings: WorkerSettings) -> LoadedWorker:
    """Loads the model; takes seconds, and belongs on the thread that will run the steps.

    Raises:
        ModelError: the model, or a cache for it, can not be had; the message says why.
    """
    clock = _Clock()
    torch.set_num_threads(settings.num_threads or len(os.sched_getaffinity(0)))
    device = _choose_device(settings)
    directory = find_checkpoint(settings.model)
    config = read_config(directory)
    dtype = checkpoint_dtype(config) if settings.dtype == "auto" else DTYPES[settings.dtype]
    if device.type == "cpu":
        log.info("threads", extra={"count": torch.get_num_threads(), "bound_to_cores": pin_threads()})
    clock.log("model found", directory=str(directory), dtype=_name(dtype), device=str(device))

    model = load_model(
        directory,
        config,
        dtype,
        device,
        block_size=settings.block_size,
        context_length=settings.max_model_len,
    )
    operations = model.operations
    log.log(
        logging.WARNING if operations.note else logging.INFO,
        "kernels: %s",
        f"{operations.name}, since {operations.note}" if operations.note else operations.name,
    )
    context_length = settings.max_model_len or model.config.context_length
    if context_length > model.config.context_length:
        raise ModelError(
            f"--max-model-len is {context_length}, but the model was made for {model.config.context_length}"
        )
    clock.log("weights loaded", threads=torch.get_num_threads())

    numbers = model.config
    shape = CacheShape(numbers.num_layers, settings.block_size, numbers.num_kv_heads, numbers.head_dim, dtype)
    try:
        size = _choose_cache_size(settings, model, shape, context_length, device)
    except ValueError as error:
        raise ModelError(str(error)) from error
    available_bytes = available_memory() - (size.num_blocks * shape.block_bytes if device.type == "cpu" else 0)
    num_cpu_blocks = count_swap_blocks(shape, settings.swap_bytes, size.num_blocks, available_bytes)
    cache = CacheEngine(shape, size.num_blocks, num_cpu_blocks, device)
    clock.log("KV cache sized", note=size.note, cpu_blocks=num_cpu_blocks)

    runner = ModelRunner(
        model,
        cache,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        context_length=context_length,
        device=device,
    )
    name = settings.served_model_name or checkpoint_name(settings.model)
    worker = warm_up(runner, cache, name=name, kv_cache_note=size.note)
    clock.log("warmed up", swap_ms_per_block=round(worker.info.swap_ms_per_block, 4))
    return worker


def warm_up(runner: ModelRunner, cache: CacheEngine, *, name: str, kv_cache_note: str) -> LoadedWorker:
    """The worker: has run what a first step would wait for, and measured what moving a block costs.

    Args:
        runner: that has done nothing yet.
        cache: the runner's.
        name: of the model.
        kv_cache_note: how the number of blocks came about.
    """
    _run_prompts(runner, num_rows=1, num_samples=1, tokens_per_row=1)
    limits, dtype = runner.limits, _name(cache.shape.dtype)
    info = GetInfoResponse(
        model=name,
        context_length=limits.context_length,
        vocabulary_size=limits.vocabulary_size,
        dtype=dtype,
        kv_dtype=dtype,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        num_cpu_blocks=limits.num_cpu_blocks,
        kv_cache_note=kv_cache_note,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        # Behind the prompt: the pages of the cache's first blocks are there.
        swap_ms_per_block=cache.measure_swap(),
    )
    return LoadedWorker(runner, info)


class _Clock:
    """Logs the phases of a load, each with its own time."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def log(self, phase: str, **facts: object) -> None:
        now = time.perf_counter()
        log.info(phase, extra={"took_ms": round(1e3 * (now - self._begun)), **facts})
        self._begun = now


def _choose_device(settings: WorkerSettings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device is cuda, but torch sees no CUDA device")
    return torch.device(settings.device)


def _choose_cache_size(
    settings: WorkerSettings, model: Model, shape: CacheShape, context_length: int, device: torch.device
) -> CacheSize:
    told = size_as_told(shape, settings.num_blocks, settings.kv_cache_bytes)
    if told is not None:
        return told
    if device.type == "cpu":
        return size_on_cpu(shape, context_length, available_memory())
    total_bytes, peak_bytes = _profile(settings, model, shape, context_length, device)
    return size_on_gpu(shape, total_bytes, peak_bytes, settings.gpu_memory_utilization)


def _profile(
    settings: WorkerSettings, model: Model, shape: CacheShape, context_length: int, device: torch.device
) -> tuple[int, int]:
    """Bytes that the GPU has, and that were taken, by all processes, when the largest step had just been run."""
    tokens_per_row = min(context_length, settings.max_num_batched_tokens)
    num_blocks = -(-tokens_per_row // shape.block_size)
    runner = ModelRunner(
        model,
        CacheEngine(shape, num_blocks, 0, device),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        context_length=context_length,
        device=device,
    )
    num_rows = settings.max_num_batched_tokens // tokens_per_row
    _run_prompts(runner, num_rows, _PROFILED_SAMPLES, tokens_per_row)
    torch.cuda.synchronize(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)  # what torch has put aside for itself counts as taken
    del runner
    torch.cuda.empty_cache()
    return total_bytes, total_bytes - free_bytes - num_blocks * shape.block_bytes


def _run_prompts(runner: ModelRunner, num_rows: int, num_samples: int, tokens_per_row: int) -> None:
    """Runs a step of prompts that all stand in the same first blocks, whose contents do not matter."""
    limits: StepLimits = runner.limits
    num_blocks = -(-tokens_per_row // limits.block_size)
    sampling = Sampling(temperature=1, top_p=1)
    request = ExecuteModelRequest(
        new_requests=[NewRequest(request_id=0, sampling=sampling)],
        request_ids=pack([0] * num_rows),
        sequence_indexes=pack(range(num_rows)),
        num_computed_tokens=pack([0] * num_rows),
        num_new_tokens=pack([tokens_per_row] * num_rows),
        token_ids=pack([0] * (num_rows * tokens_per_row)),
        block_table_lengths=pack([num_blocks] * num_rows),
        block_tables=pack(list(range(num_blocks)) * num_rows),
        sample_rows=pack([0] * num_samples),
        sample_sequence_indexes=pack(range(num_samples)),
    )
    runner.execute(request)
    runner.execute(ExecuteModelRequest(finished_request_ids=pack([0])))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
