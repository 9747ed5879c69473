"""Runs all that needs a GPU within a time limit: its tests, then the benchmarks. `python -m bench.gpu_check`.

It runs from the source tree, with any Python that has torch, Triton, numpy, pytest, protobuf and grpcio; the generated
`*_pb2.py` files have to be there. Each part runs in a process of its own, so that what it does to the device ends with
it. What failed is named again at the end. Exit status: 0 when all went well, 1 when something failed, 2 without a GPU.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import gpu

_ROOT = Path(__file__).parents[1]
_SECONDS = 460.0
# The share of it that tests may take.
_TESTS_SHARE = 0.45
# What the benchmark may need from the start of its last case until its results are written.
_LAST_CASE_S = 40.0
_PROCESSES = 6


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a part.

    Attributes:
        name: of the part.
        failures: lines that name what failed; empty when nothing did.
        took_s: seconds.
    """

    name: str
    failures: list[str]
    took_s: float


def run(name: str, command: Sequence[str], limit_s: float) -> Outcome:
    """Runs a part and shows what it prints; ends it if it takes longer than `limit_s`."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    begun = time.monotonic()
    failures = []
    # In a session of its own, to end it together with the processes that it started, which hold its output open.
    process = subprocess.Popen(
        command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    alarm = threading.Timer(limit_s, end)
    alarm.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(("FAILED", "ERROR")):
                failures.append(line.strip())
        status = process.wait()
    except BaseException:
        # Ctrl-C does not reach a session of its own.
        end()
        raise
    finally:
        alarm.cancel()
    if late.is_set():
        failures.append(f"ended after {limit_s:.0f} s")
    elif status != 0 and not failures:
        failures.append(f"ended with status {status}")
    return Outcome(name, failures, time.monotonic() - begun)


def files_of_gpu_tests() -> list[str]:
    """The files with tests that need a GPU."""
    files = sorted((_ROOT / "tests").glob("test_*.py"))
    return [str(path.relative_to(_ROOT)) for path in files if _knows_gpu(path.read_text())]


def _knows_gpu(source: str) -> bool:
    return "pytest.mark.gpu" in source or "from triton_device import" in source


def _command_of_tests() -> list[str]:
    """In several processes if pytest-xdist is there: most time goes into Triton's compiler, on the CPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--color=no", "-m", "gpu", *files_of_gpu_tests()]
    return [*command, "-n", str(_PROCESSES)] if importlib.util.find_spec("xdist") is not None else command


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for all of it (default: %(default)s)")
    parser.add_argument("--output", type=gpu.output, help="of the benchmarks, as bench.gpu takes it")
    parser.add_argument("--only", default="", help="groups of the benchmarks, as bench.gpu takes them")
    options = parser.parse_args(arguments)
    least = math.ceil(2 * _LAST_CASE_S / (1 - _TESTS_SHARE))
    if options.seconds < least:
        parser.error(f"--seconds is to be {least} at least")
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs both parts; the exit status."""
    options = parse(arguments)
    import torch

    # SIGTERM ends the part that runs, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not torch.cuda.is_available():
        print("bench.gpu_check: no CUDA device here; nothing was run", file=sys.stderr)
        return 2
    deadline = time.monotonic() + options.seconds
    tested = run("tests", _command_of_tests(), _TESTS_SHARE * options.seconds)
    left_s = deadline - time.monotonic()
    measure = [sys.executable, "-m", "bench.gpu", "--seconds", f"{left_s - _LAST_CASE_S:.0f}", "--only", options.only]
    measure += ["--output", str(options.output)] if options.output else []
    measured = run("benchmarks", measure, left_s)
    for part in (tested, measured):
        print(f"== {part.name}: {'FAILED' if part.failures else 'ok'} in {part.took_s:.0f} s")
        for failure in part.failures:
            print(f"   {failure}")
    return 1 if tested.failures or measured.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
