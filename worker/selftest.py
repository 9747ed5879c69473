"""`python -m worker --selftest`: what this machine is and does, and whether what runs on it is right.

Plain lines, to be pasted into a question. Apart from the exit status, only lines that begin with FAIL mean that
something is wrong; a note says what could be faster.
"""

import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from kernels import build
from kernels.choice import LinearLayer, Operations, choose
from kernels.cpu_linear import CpuLinear
from kernels.reference import PlainLinear
from worker.cache_engine import CacheShape
from worker.cache_size import available_memory
from worker.checkpoint import DTYPES, ModelError, checkpoint_dtype, find_checkpoint, read_config
from worker.config import WorkerSettings
from worker.loading import choose_quantization, dtype_name, prepare_device
from worker.models.registry import load_model
from worker.parity import Check, Setting, Switch, check_model, check_operations
from worker.weights import weight_bytes

_DISTRIBUTIONS = ("pagewire", "torch", "triton", "numpy", "safetensors", "transformers", "grpcio")
# Instructions that kernels and torch look for, on x86-64 and on Arm, as /proc/cpuinfo names them.
_INSTRUCTIONS = (
    *("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"),
    *("asimd", "bf16", "i8mm", "sve"),
)
_SPEED_BYTES = 256 << 20
_PRODUCT_SIZE = 1024
_PRODUCTS = {
    CpuLinear: "C++, weights packed",
    PlainLinear: "torch, weights as loaded",
}
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Fact:
    """A line that is neither right nor wrong."""

    name: str
    value: str


Line = Fact | Check


def run_selftest(settings: WorkerSettings, write: Callable[[str], object] = print) -> int:
    """Prints what is found as it is found; returns the process's exit status, 1 if a check failed."""
    num_passed = num_failed = 0
    for title, lines in _sections(settings):
        write(title)
        for line in lines:
            write(_render(line))
            if isinstance(line, Check):
                num_passed, num_failed = num_passed + line.passed, num_failed + (not line.passed)
        write("")
    write(f"{num_passed} checks passed" + (f", {num_failed} FAILED" if num_failed else ""))
    return 1 if num_failed else 0


def _render(line: Line) -> str:
    if isinstance(line, Fact):
        return f"  {line.name:<20} {line.value}"
    return f"  {'ok  ' if line.passed else 'FAIL'}  {line.name:<40} {line.outcome}"


def _sections(settings: WorkerSettings) -> Iterator[tuple[str, Iterable[Line]]]:
    yield "machine", _machine()  # before its threads are bound to a core each
    yield "versions", _versions()
    try:
        device = prepare_device(settings)
    except ModelError as error:
        yield "device", [Check("device", False, str(error))]
        return
    dtype, cache_dtype, problem = _dtypes(settings)
    operations = choose(device, dtype, head_dim=64, block_size=settings.block_size, cache_dtype=cache_dtype)
    title = f"kernels for {dtype_name(dtype)} with a cache in {dtype_name(cache_dtype)}"
    yield f"{title}, {torch.get_num_threads()} threads", _kernels(operations, dtype, device)
    yield "speed", _speeds(operations, dtype, device)
    setting = Setting(device, dtype, cache_dtype, settings.block_size)
    yield f"operations: {operations.name}, against their torch twins", check_operations(operations, setting)
    if problem is not None:
        yield "model", [problem]
    elif settings.model:
        yield "model", _model(settings, device, dtype, cache_dtype)


def _dtypes(settings: WorkerSettings) -> tuple[torch.dtype, torch.dtype, Check | None]:
    """The dtypes of weights and cache, as a worker with these settings has them; and what is wrong with the model."""
    problem, dtype = None, DTYPES.get(settings.dtype, torch.bfloat16)
    if settings.model and settings.dtype == "auto":
        try:
            dtype = checkpoint_dtype(read_config(find_checkpoint(settings.model)))
        except ModelError as error:
            problem = Check("model", False, str(error))
    return dtype, DTYPES.get(settings.kv_cache_dtype, dtype), problem


def _machine() -> Iterator[Line]:
    names, flags = _cpuinfo()
    yield Fact("system", platform.platform())
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores are ours"
    yield Fact("CPU", f"{names or platform.machine()}, {cores}")
    yield Fact("instructions", ", ".join(name for name in _INSTRUCTIONS if name in flags) or "unknown")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Fact("memory", f"{_gibibytes(pages)}, {_gibibytes(available_memory())} available to us")
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if huge_pages.exists():
        chosen = re.findall(r"\[(\w+)\]", huge_pages.read_text())
        note = "; note: attention on the CPU is slower without" if chosen == ["never"] else ""
        yield Fact("huge pages", f"{', '.join(chosen)}{note}")
    yield from _gpu()


def _gpu() -> Iterator[Line]:
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        yield Fact("GPU", f"none ({built})")
        return
    properties = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    yield Fact("GPU", f"{properties.name}, {properties.multi_processor_count} SMs, CUDA {torch.version.cuda}")
    yield Fact("compute capability", f"{properties.major}.{properties.minor}")
    yield Fact("GPU memory", f"{_gibibytes(total_bytes)}, {_gibibytes(free_bytes)} free")


def _versions() -> Iterator[Line]:
    yield Fact("python", platform.python_version())
    for name in _DISTRIBUTIONS:
        try:
            yield Fact(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Fact(name, "not installed")


def _kernels(operations: Operations, dtype: torch.dtype, device: torch.device) -> Iterator[Line]:
    yield Fact("operations", operations.name)
    if operations.note:
        yield Fact("note", f"none faster, since {operations.note}")
    levels = list(build.levels())
    if operations.name.startswith("cpu: ") and not operations.name.endswith(levels[-1]):
        yield Fact("note", f"this CPU does not run the fastest, {levels[-1]}")
    yield Fact("matrix products", _PRODUCTS[type(_product(operations, dtype, device))])


def _product(operations: Operations, dtype: torch.dtype, device: torch.device) -> LinearLayer:
    return operations.linear(torch.full((_PRODUCT_SIZE, _PRODUCT_SIZE), 0.5, dtype=dtype, device=device), None)


def _speeds(operations: Operations, dtype: torch.dtype, device: torch.device) -> Iterator[Line]:
    host = torch.ones(_SPEED_BYTES // 4)
    yield _speed("memory read", host.sum, _SPEED_BYTES)
    other = torch.empty_like(host)
    yield _speed("memory copy", lambda: other.copy_(host), _SPEED_BYTES)
    if device.type == "cuda":
        there, back = host.to(device), torch.empty_like(host, device=device)
        pinned = host.pin_memory()
        yield _speed("GPU memory read", there.sum, _SPEED_BYTES)
        yield _speed("GPU memory copy", lambda: back.copy_(there), _SPEED_BYTES)
        yield _speed("host to GPU", lambda: there.copy_(pinned, non_blocking=True), _SPEED_BYTES)
        yield _speed("GPU to host", lambda: pinned.copy_(there, non_blocking=True), _SPEED_BYTES)
    product = _product(operations, dtype, device)
    x = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype, device=device)
    took_s = _seconds(lambda: product(x))
    yield Fact("matrix product", f"{2 * _PRODUCT_SIZE**3 / took_s / 1e12:.2f} TFLOP/s in {dtype_name(dtype)}")


def _speed(name: str, work: Callable[[], object], num_bytes: int) -> Fact:
    return Fact(name, f"{num_bytes / _seconds(work) / 1e9:.1f} GB/s")


def _seconds(work: Callable[[], object]) -> float:
    """The shortest of a few times, after a run that warms up."""
    work()
    times = []
    for _ in range(_ROUNDS):
        _wait_for_device()
        begun = time.perf_counter()
        work()
        _wait_for_device()
        times.append(time.perf_counter() - begun)
    return min(times)


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _model(
    settings: WorkerSettings, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype
) -> Iterator[Line]:
    begun = time.perf_counter()
    switches: list[Switch] = []

    def wrap(chosen: Operations) -> Operations:
        quantize = choose_quantization(settings, device, dtype)
        switches.append(Switch(quantize(chosen) if quantize else chosen))
        return switches[0].operations

    try:
        directory = find_checkpoint(settings.model)
        config = read_config(directory)
        yield Fact("checkpoint", f"{directory}, {_gibibytes(weight_bytes(directory))}")
        yield Fact("architecture", ", ".join(config.get("architectures") or ["not named"]))
        model = load_model(
            directory,
            config,
            dtype,
            device,
            block_size=settings.block_size,
            context_length=settings.max_model_len,
            cache_dtype=cache_dtype,
            wrap=wrap,
        )
    except ModelError as error:
        yield Check("model", False, str(error))
        return
    yield Fact("class", f"{type(model).__name__} on {model.operations.name}, loaded in {_ms(begun)}")
    if model.operations.note:
        yield Fact("note", f"no faster kernels for it, since {model.operations.note}")
    shape = CacheShape.of_model(model, settings.block_size, cache_dtype)
    yield Fact("KV of a token", f"{shape.block_bytes // settings.block_size:,} bytes")
    yield check_model(model, switches[0], shape, device, dtype)


def _ms(begun: float) -> str:
    return f"{1e3 * (time.perf_counter() - begun):,.0f} ms"


def _cpuinfo() -> tuple[str, set[str]]:
    """The CPU's name, and its flags."""
    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        return "", set()
    names = {value.strip() for key, _, value in lines if key.strip() == "model name"}
    flags = {flag for key, _, value in lines if key.strip() in ("flags", "Features") for flag in value.split()}
    return ", ".join(sorted(names)), flags


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
