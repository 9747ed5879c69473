"""Speed of the Triton kernels and of whole models on a GPU, as shares of what it was measured to reach.

`python -m bench.gpu` starts no more cases when its time is up. A case that fails is named with its error, and the
others go on. Results go to `bench/results/` with the device and the versions. Exit status: 1 when a case failed.

A case is recorded as a CUDA graph where it can be, as in production, so that the host's share does not count; the
host's own time for a call is measured beside it. Between repetitions the L2 cache is overwritten.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bench import machine

if TYPE_CHECKING:
    from bench.gpu_cases import Case, Timed

_RESULTS = Path(__file__).parent / "results"
_SECONDS = 250.0
_MOST_KV_BYTES = 8 << 30
# Time that the repetitions of a case may take, and how many there are at least and at most.
_CASE_MS = 60.0
_FEWEST, _MOST = 5, 50
_FLUSHED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a case.

    Attributes:
        group: of the case.
        name: of the case.
        time_us: of one run on the device, the median.
        host_us: that the host takes to ask for one.
        rate: GB/s; TFLOP/s for a case that computes, tokens/s for one that serves.
        unit: of the rate.
        share: of the case's ceiling; None where there is none.
        beside_us: of torch on contiguous tensors; None where there is nothing to compare with.
        error: why there are no figures; empty when there are.
    """

    group: str
    name: str
    time_us: float = 0.0
    host_us: float = 0.0
    rate: float = 0.0
    unit: str = ""
    share: float | None = None
    beside_us: float | None = None
    error: str = ""


class LeftOut(Exception):
    """This machine cannot run a case, for the reason given. That is no failure."""


class Timer(Protocol):
    """Gives the microseconds of a run on the device, and of asking for it on the host."""

    def device_us(self, run: Callable[[], object], *, recorded: bool) -> float:
        """The median of some runs, after a warm-up."""

    def host_us(self, run: Callable[[], object]) -> float:
        """Of one call that does not wait for the device."""

    def clean_up(self) -> None:
        """Frees what the last case took."""


class CudaTimer:
    """Times by CUDA events."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")

    def device_us(self, run: Callable[[], object], *, recorded: bool) -> float:
        """As `Timer.device_us`; a recorded run is replayed as a CUDA graph."""
        cuda = self._torch.cuda
        for _ in range(2):  # compiles
            run()
        cuda.synchronize()
        timed: Callable[[], object] = run
        if recorded:
            graph = cuda.CUDAGraph()
            with cuda.graph(graph):
                kept = run()  # its memory is the graph's: kept until the last replay
            timed = graph.replay
        first_ms = self._median_ms(timed, 2)
        count = int(min(_MOST, max(_FEWEST, _CASE_MS / max(first_ms, 1e-3))))
        median_ms = self._median_ms(timed, count)
        if recorded:
            del kept
        return 1e3 * median_ms

    def _median_ms(self, timed: Callable[[], object], count: int) -> float:
        cuda = self._torch.cuda
        pairs = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in pairs:
            self._flushed.zero_()
            start.record()
            timed()
            end.record()
        cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs)

    def host_us(self, run: Callable[[], object]) -> float:
        """As `Timer.host_us`: few enough calls that the device's queue never fills."""
        self._torch.cuda.synchronize()
        times = []
        for _ in range(10):
            begun = time.perf_counter()
            run()
            times.append(time.perf_counter() - begun)
        self._torch.cuda.synchronize()
        return 1e6 * statistics.median(times)

    def clean_up(self) -> None:
        """As `Timer.clean_up`."""
        self._torch.cuda.synchronize()
        self._torch.cuda.empty_cache()


def run_cases(
    cases: "Iterable[Case]",
    timer: Timer,
    ceilings: dict[str, float],
    is_time_up: Callable[[], bool],
    report: Callable[[Row], None],
) -> list[Row]:
    """A row for each case; those that fail, or for which there is no time, say so in theirs.

    Args:
        cases: in order.
        timer: that times them.
        ceilings: rate by name, for the shares.
        is_time_up: whether no more cases may be started.
        report: called with each row as it is made.
    """
    rows = []
    for case in cases:
        if is_time_up():
            row = Row(case.group, case.name, error="left out: the time was up")
        else:
            try:
                row = _measure(case, timer, ceilings)
            except LeftOut as reason:
                row = Row(case.group, case.name, error=f"left out: {reason}")
            except Exception as error:  # whatever one kernel does, the others are measured
                row = Row(case.group, case.name, error=f"{type(error).__name__}: {str(error).strip()[:300]}")
            try:
                timer.clean_up()
            except Exception as error:  # a fault on the device shows in the next call at the latest
                row = Row(case.group, case.name, error=row.error or f"{type(error).__name__}: {str(error)[:300]}")
        rows.append(row)
        report(row)
    return rows


def _measure(case: "Case", timer: Timer, ceilings: dict[str, float]) -> Row:
    from bench.gpu_cases import Timed

    made, beside_us, operations = case.make(), None, 0
    if isinstance(made, Timed):
        timed = made
    else:
        time_us = timer.device_us(made.run, recorded=made.recorded)
        beside_us = timer.device_us(made.beside, recorded=made.recorded) if made.beside is not None else None
        timed, operations = Timed(time_us, timer.host_us(made.run), made.bytes_moved), made.operations
    rate, unit = _rate(timed, operations)
    ceiling = ceilings.get(case.ceiling) if case.ceiling is not None else None
    return Row(
        group=case.group,
        name=case.name,
        time_us=timed.time_us,
        host_us=timed.host_us,
        rate=rate,
        unit=unit,
        share=rate / ceiling if ceiling else None,
        beside_us=beside_us,
    )


def _rate(timed: "Timed", operations: int) -> tuple[float, str]:
    if timed.tokens:
        return timed.tokens / timed.time_us * 1e6, "tokens/s"
    if operations:
        return operations / timed.time_us / 1e6, "TFLOP/s"
    return timed.bytes_moved / timed.time_us / 1e3, "GB/s"


def line(row: Row) -> str:
    """A row as a line of the table."""
    title = f"{row.group:18} {row.name:36}"
    if row.error:
        return f"{title} {row.error if row.error.startswith('left out') else f'FAILED: {row.error}'}"
    share = f"{row.share:6.1%}" if row.share is not None else " " * 6
    beside = f"  torch {row.beside_us:9.1f} us" if row.beside_us is not None else ""
    return f"{title} {row.time_us:11.1f} us {row.rate:8.1f} {row.unit:8} {share}  host {row.host_us:6.1f} us{beside}"


def output(text: str) -> Path:
    """The type of the argument that names an existing folder, or a file to write.

    Raises:
        ArgumentTypeError: nothing can be written there.
    """
    path = Path(text)
    return path if path.is_dir() else machine.output_file(text)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="groups whose names begin so, comma-separated (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=_SECONDS, help="no case is started later (default: %(default)s)"
    )
    parser.add_argument("--kv-bytes", type=int, default=_MOST_KV_BYTES, help="most K and V of a decode case's layer")
    parser.add_argument(
        "--output", type=output, default=_RESULTS, help="file or folder for the results (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.kv_bytes <= 0:
        parser.error("--seconds and --kv-bytes are to be positive")
    return options


def wanted(cases: "Iterable[Case]", only: str) -> "list[Case]":
    """Those whose group begins with one of the names in `only`; all when it is empty."""
    prefixes = tuple(name.strip() for name in only.split(",") if name.strip())
    return [case for case in cases if not prefixes or case.group.startswith(prefixes)]


def _model_cases() -> "Iterator[Case]":
    """Cases of whole models, or a single one that tells why there are none."""
    from bench.gpu_cases import CUDA, Case

    def refuse(reason: Exception) -> "Timed":
        raise reason

    try:
        import torch

        from bench.gpu_model import ModelCases

        models = ModelCases(CUDA)
        free_bytes = torch.cuda.mem_get_info()[0]
        if models.bytes_needed > 0.9 * free_bytes:
            raise LeftOut(f"needs {models.bytes_needed >> 30} GiB, and {free_bytes >> 30} GiB are free")
    except Exception as error:  # what the worker's modules need may be missing here, or too old
        yield Case("model", "all", partial(refuse, error))
        return
    yield from models.cases()


def main(arguments: Sequence[str]) -> int:
    """Measures, prints the table and writes the results; the exit status."""
    options = parse(arguments)
    import torch

    if not torch.cuda.is_available():
        print("bench.gpu: no CUDA device here; nothing was measured", file=sys.stderr)
        return 2
    from bench.gpu_cases import cases, ceilings

    deadline = time.monotonic() + options.seconds
    device = torch.cuda.get_device_properties(0)
    print(f"{device.name}, {device.multi_processor_count} multiprocessors, torch {torch.__version__}", flush=True)

    def show(row: Row) -> None:
        print(line(row), flush=True)

    def is_time_up() -> bool:
        return time.monotonic() > deadline

    facts = machine.facts(["torch", "triton"])
    facts["device"] = {
        "name": device.name,
        "capability": f"{device.major}.{device.minor}",
        "multiprocessors": device.multi_processor_count,
        "memory_bytes": device.total_memory,
        "cuda": torch.version.cuda,
    }
    path = options.output
    if path.is_dir():
        path /= f"{str(facts['date'])[:10]}-gpu-{'-'.join(device.name.lower().split())}.json"
    timer = CudaTimer()
    rates: dict[str, float] = {}
    measured: list[Row] = []
    kernels = cases(min(options.kv_bytes, device.total_memory // 4))
    with torch.inference_mode():
        # Whole models last: they need the memory that the others have freed.
        for group in (ceilings(), wanted(kernels, options.only), wanted(_model_cases(), options.only)):
            measured += run_cases(group, timer, rates, is_time_up, show)
            rates = rates or {row.name: row.rate for row in measured if not row.error}
            # Written now, in case the next group ends the process.
            machine.write(path, facts | {"ceilings": rates, "rows": [asdict(row) for row in measured]})
    failed = [row for row in measured if row.error and not row.error.startswith("left out")]
    print(f"{len(measured)} cases, {len(failed)} failed; written to {path}")
    for row in failed:
        print(f"FAILED {row.group} {row.name}: {row.error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
