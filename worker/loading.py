"""From settings to a worker that is ready for its first step: find, build, fill, size the cache, warm up."""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.choice import Operations, with_int4_weights, with_int8_weights
from kernels.cpu import pin_threads
from protos.worker_pb2 import GetInfoResponse
from worker.cache_engine import CacheEngine, CacheShape
from worker.cache_size import (
    CacheSize,
    available_memory,
    count_swap_blocks,
    largest_logits_bytes,
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
from worker.decode_graphs import CudaRecorder
from worker.model_runner import ModelRunner
from worker.models.model import Model
from worker.models.registry import load_model
from worker.profile_run import CudaMemory, profile, run_prompts
from worker.ranks import ALONE, WHOLE_HOST, Host, Ranks
from worker.weights import not_finite, weight_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """What a worker serves with.

    Attributes:
        runner: ready for steps.
        info: the answer to GetInfo, except for the epoch.
    """

    runner: ModelRunner
    info: GetInfoResponse


def load_worker(
    settings: WorkerSettings, ranks: Ranks = ALONE, host: Host = WHOLE_HOST, device: torch.device | None = None
) -> LoadedWorker:
    """Loads the model; takes seconds, and belongs on the thread that will run the steps.

    Args:
        settings: of the worker.
        ranks: those that share the model; all of them load at the same time.
        host: this rank's part of it.
        device: the one to compute on, already prepared; None: it is prepared here.

    Raises:
        ModelError: the model cannot be loaded, or there is no room for its cache; the message says why.
    """
    clock = _Clock()
    device = device or prepare_device(settings, host)
    directory = find_checkpoint(settings.model)
    config = read_config(directory)
    dtype = checkpoint_dtype(config) if settings.dtype == "auto" else DTYPES[settings.dtype]
    cache_dtype = dtype if settings.kv_cache_dtype == "auto" else DTYPES[settings.kv_cache_dtype]
    clock.log("model found", directory=str(directory), dtype=dtype_name(dtype), device=str(device))

    model = load_model(
        directory,
        config,
        dtype,
        device,
        block_size=settings.block_size,
        context_length=settings.max_model_len,
        cache_dtype=cache_dtype,
        wrap=choose_quantization(settings, device, dtype),
        ranks=ranks,
    )
    operations = model.operations
    log.log(logging.WARNING if operations.note else logging.INFO, "kernels: %s", operations)
    context_length = _choose_context_length(settings, model)
    clock.log("weights loaded", threads=torch.get_num_threads())

    shape = CacheShape.of_model(model, settings.block_size, cache_dtype)
    size = _choose_cache_size(settings, model, shape, context_length, device, directory, host)
    cache = _make_cache(settings, model, shape, size, device, host)
    clock.log("KV cache sized", note=size.note, cpu_blocks=cache.num_cpu_blocks)

    runner = ModelRunner(
        model,
        cache,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        context_length=context_length,
        device=device,
    )
    if (record := _recorder(settings, model, device)) is not None:
        runner.record_decodes(record)
    name = settings.served_model_name or checkpoint_name(settings.model)
    try:
        worker = warm_up(
            runner, cache, name=name, dtype=dtype, kv_cache_note=size.note, quantization=settings.quantization
        )
    except FloatingPointError as error:
        raise not_finite(directory, dtype) from error
    if ranks.place.num_stages > 1:
        worker.info.num_concurrent_steps = ranks.place.num_stages
        worker.info.swap_ms_per_block *= ranks.place.num_stages  # each stage moves its own layers of a block
    give_back_freed_memory()
    clock.log("warmed up", swap_ms_per_block=round(worker.info.swap_ms_per_block, 4))
    return worker


def prepare_device(settings: WorkerSettings, host: Host = WHOLE_HOST) -> torch.device:
    """Chooses the device and sets up its compute threads.

    Call it once per thread: afterwards the thread is bound to one core, and a second call would take that one for all.

    Raises:
        ModelError: this host has no such device as the settings ask for.
    """
    cores = host.cores(os.sched_getaffinity(0))
    if host.num_ranks > 1:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(settings.num_threads or len(cores))
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device is cuda, but torch sees no CUDA device; auto takes the CPU then")
    if settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()):
        if host.gpu is None and torch.cuda.device_count() < host.num_ranks:
            raise ModelError(f"{host.num_ranks} ranks on this host want a GPU each; it has {torch.cuda.device_count()}")
        torch.cuda.set_device(host.index if host.gpu is None else host.gpu)
        return torch.device("cuda")
    log.info("threads", extra={"count": torch.get_num_threads(), "bound_to_cores": pin_threads()})
    return torch.device("cpu")


def choose_quantization(
    settings: WorkerSettings, device: torch.device, dtype: torch.dtype
) -> Callable[[Operations], Operations] | None:
    """Returns what turns a model's operations into those that the settings ask for; None if they need no change.

    What is returned raises ModelError if the quantization is not built for this CPU.

    Args:
        settings: of the worker.
        device: of the model.
        dtype: of the model.

    Raises:
        ModelError: it is not built for the device, or the dtype.
    """
    if settings.quantization == "none":
        return None
    if device.type != "cpu":
        raise ModelError(f"--quantization {settings.quantization} is for CPUs, not {device.type}: leave it out")
    if settings.quantization == "int8":
        return with_int8_weights
    if dtype != torch.bfloat16:
        raise ModelError(
            f"--quantization int4 is for bfloat16, not {dtype_name(dtype)}: take int8, or --dtype bfloat16"
        )

    def in_4_bits(operations: Operations) -> Operations:
        if operations.int4_linear is None or operations.note:
            needed = "kernels for AVX2 or AVX-512 without AMX"
            raise ModelError(f"--quantization int4 needs {needed}, not {operations}: take int8")
        return with_int4_weights(operations)

    return in_4_bits


def warm_up(
    runner: ModelRunner,
    cache: CacheEngine,
    *,
    name: str,
    dtype: torch.dtype,
    kv_cache_note: str,
    quantization: str = "none",
) -> LoadedWorker:
    """Runs what a first step would wait for, measures what moving a block costs, and returns the worker.

    Args:
        runner: has run no step yet.
        cache: the runner's.
        name: of the model.
        dtype: of its weights.
        kv_cache_note: how the number of blocks came about.
        quantization: of the weights.

    Raises:
        FloatingPointError: the logits are not finite.
    """
    if run_prompts(runner, [1]).failed_samples:
        raise FloatingPointError
    limits = runner.limits
    info = GetInfoResponse(
        model=name,
        context_length=limits.context_length,
        vocabulary_size=limits.vocabulary_size,
        dtype=dtype_name(dtype),
        kv_dtype=dtype_name(cache.shape.dtype),
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        num_cpu_blocks=limits.num_cpu_blocks,
        kv_cache_note=kv_cache_note,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        # After the prompt, when the pages of the cache's first blocks are there.
        swap_ms_per_block=cache.measure_swap(),
        quantization=quantization,
        device=runner.device.type,
    )
    return LoadedWorker(runner, info)


def populate_beside(runner: ModelRunner, cores: Iterable[int]) -> None:
    """Populates the cache's memory on any of `cores`, between steps.

    A thread inherits the cores of the one that starts it: the loading thread is bound to a core that its steps need.
    """

    def populate() -> None:
        os.sched_setaffinity(0, cores)
        runner.populate_cache()

    threading.Thread(target=populate, name="populate", daemon=True).start()


def give_back_freed_memory() -> None:
    """Returns to the system what this process has freed but malloc keeps: after loading, some tens of megabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name, as in flags and GetInfo."""
    return str(dtype).removeprefix("torch.")


class _Clock:
    """Logs the phases of a load, each with the time it took."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def log(self, phase: str, **facts: object) -> None:
        now = time.perf_counter()
        log.info(phase, extra={"took_ms": round(1e3 * (now - self._begun)), **facts})
        self._begun = now


def least_of_all(size: CacheSize, ranks: Ranks) -> CacheSize:
    """The size at the rank that has the least room: a block's id is the same at all ranks."""
    (num_blocks,) = ranks.least(size.num_blocks)
    if num_blocks == size.num_blocks:
        return size
    return CacheSize(num_blocks, f"{num_blocks:,} blocks, the least of {ranks.place.size} ranks")


def _choose_context_length(settings: WorkerSettings, model: Model) -> int:
    """As told by the settings; otherwise what the model was made for.

    Raises:
        ModelError: it was not made for that many tokens.
    """
    longest = model.config.context_length
    context_length = settings.max_model_len or longest
    if context_length > longest:
        raise ModelError(
            f"--max-model-len is {context_length}, but the model was made for {longest}: give that or less, or nothing"
        )
    return context_length


def _choose_cache_size(
    settings: WorkerSettings,
    model: Model,
    shape: CacheShape,
    context_length: int,
    device: torch.device,
    directory: Path,
    host: Host,
) -> CacheSize:
    """As told by the settings; if they name no size, what the device has room for. The same at all ranks.

    Raises:
        ModelError: there is no room.
    """
    told = (settings.num_gpu_blocks, settings.kv_cache_bytes)
    try:
        if device.type == "cpu":
            room_bytes = _own_memory(settings, host) - largest_logits_bytes(model.config.vocabulary_size)
            own = size_as_told(shape, *told, room_bytes) or size_on_cpu(
                shape, context_length, weight_bytes(directory) // model.ranks.place.size, room_bytes
            )
        else:
            found = profile(
                model,
                shape,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                context_length=context_length,
                device=device,
                memory=CudaMemory(device),
                record=_recorder(settings, model, device),
            )
            own = size_as_told(shape, *told, found.room_bytes) or size_on_gpu(
                shape, found, settings.gpu_memory_utilization
            )
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"a step of {settings.max_num_batched_tokens} tokens does not fit into the GPU's memory with the weights: "
            "lower --max-num-batched-tokens, or end what else uses the GPU"
        ) from error
    except ValueError as error:
        raise ModelError(str(error)) from error
    size = least_of_all(own, model.ranks)
    if context_length > size.num_blocks * shape.block_size:
        log.warning(
            "a sequence of %d tokens does not fit into the KV cache: longer ones than %d end early or are refused",
            context_length,
            size.num_blocks * shape.block_size,
        )
    return size


def _own_memory(settings: WorkerSettings, host: Host) -> int:
    """Bytes that a rank may still take, besides what the other ranks of its host may."""
    return int(available_memory() * settings.memory_share) // host.num_ranks


def _make_cache(
    settings: WorkerSettings, model: Model, shape: CacheShape, size: CacheSize, device: torch.device, host: Host
) -> CacheEngine:
    """The KV cache with both of its pools.

    Raises:
        ModelError: there is no memory for them.
    """
    taken_bytes = size.num_blocks * shape.block_bytes if device.type == "cpu" else 0
    available_bytes = _own_memory(settings, host) - taken_bytes
    try:
        own = count_swap_blocks(shape, settings.swap_bytes, size.num_blocks, available_bytes)
        (num_cpu_blocks,) = model.ranks.least(own)
        return CacheEngine(shape, size.num_blocks, num_cpu_blocks, device, model.operations)
    except ValueError as error:
        raise ModelError(str(error)) from error
    except (OSError, RuntimeError) as error:  # what mmap raises, and torch for memory of either kind
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ModelError(
            f"no memory for a KV cache of {size.note}: {reason}; --kv-cache-bytes makes it smaller, --swap-bytes the "
            "pool beside it"
        ) from error


def _recorder(settings: WorkerSettings, model: Model, device: torch.device) -> CudaRecorder | None:
    """The recorder of decode steps; None if they are not to be, or cannot be, recorded."""
    # Sending from stage to stage is done by the host.
    recordable = model.operations.recordable and model.ranks.place.num_stages == 1
    if device.type != "cuda" or not settings.cuda_graphs or not recordable:
        return None
    return CudaRecorder(device)
