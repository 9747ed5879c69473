"""One engine under test: the parent's side of the line protocol (`drivers/lines.py`), its memory and its CPU time."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from bench.compare import memory
from pagewire.bench import Record
from pagewire.processes import signal_all, start_ticks, tied, with_descendants

_TAIL_LINES = 6
_READ_BYTES = 1 << 20
# Between the end of a driver's input, SIGTERM and SIGKILL.
_STOP_S = 20.0
_POLL_S = 0.01


class EngineError(Exception):
    """An engine did not start, failed a run, or answered something other than what was asked."""


@dataclass(frozen=True, slots=True)
class Command:
    """How an engine's driver is started.

    Attributes:
        arguments: its program first, by its path.
        log: where everything that it prints goes.
        start_within_s: until it must be ready; a run has `run_within_s`.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    start_within_s: float = 900.0
    run_within_s: float = 900.0


class Engine:
    """A driver's process, from its start to `close`, which ends it and all that it has started.

    Attributes:
        version: as the engine tells it.
        first_answer_s: from its start to the first token of the first run.

    Raises:
        EngineError: it did not become ready; none of its processes is left.
    """

    def __init__(self, command: Command) -> None:
        self._command = command
        self._started_at = time.monotonic()
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("wb") as log:
            self._process = subprocess.Popen(
                tied(command.arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(command.environment),
                # A terminal's Ctrl-C is for this process, which then ends its engines in order.
                start_new_session=True,
            )
        self._pids: list[int] = []
        self._busy = True
        self._rest = b""
        self.first_answer_s: float | None = None
        try:
            ready = self._answer(command.start_within_s)
            self.version: str = ready["version"]
            self._pids = ready["pids"]
            self._started_at = ready["started_at"] or self._started_at
        except BaseException:
            self.close()
            raise

    def play(self, rows: Sequence[Record]) -> float:
        """Plays a run, and fills in the times and output of its requests; returns the cores that others used meanwhile.

        Raises:
            EngineError: it failed, or gave more or fewer tokens than asked.
        """
        asked = [{"token_ids": row.token_ids, "max_tokens": row.max_tokens, "at": row.at} for row in rows]
        line = json.dumps({"requests": asked}).encode() + b"\n"
        before, sent_at = self._cpu(), time.monotonic()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(self._with_tail("ended")) from None
        answer = self._answer(self._command.run_within_s)
        after, seconds = self._cpu(), time.monotonic() - sent_at
        for row, times, tokens in zip(rows, answer["times"], answer["tokens"], strict=True):
            if len(times) != row.max_tokens:
                raise EngineError(f"gave {len(times)} of {row.max_tokens} tokens")
            row.times, row.output = times, tokens
        if self.first_answer_s is None:
            first = min(row.times[0] for row in rows)
            self.first_answer_s = sent_at + first - self._started_at
        (own, busy), (own_then, busy_then) = after, before
        return max(0.0, busy - busy_then - (own - own_then)) / seconds

    def pause(self) -> None:
        """Stops its processes until `resume`: some poll while they wait, and would slow down the one that plays."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets its processes go on."""
        self._signal(signal.SIGCONT)

    def peak_memory_bytes(self) -> int | None:
        """The greatest memory of its processes, what they share counted once; None if they are gone."""
        return memory.peak_memory_bytes(self._pids) or None

    def close(self) -> None:
        """Lets the driver end by itself, then ends what is left, by process id; at once if interrupted."""
        born = {pid: start_ticks(pid) for pid in with_descendants([self._process.pid])}
        self.resume()
        try:
            self._end()
        finally:
            left = [pid for pid, ticks in born.items() if ticks is not None and start_ticks(pid) == ticks]
            signal_all(left, signal.SIGKILL)
            self._process.wait()
            deadline = time.monotonic() + _STOP_S
            # The next engine needs their memory.
            while any(start_ticks(pid) == born[pid] for pid in left) and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def _end(self) -> None:
        """Ends the driver, unless it ignores SIGTERM."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Whatever it has not read yet does not matter.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        if not self._busy:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        # A driver that plays does not read its input.
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)

    def _signal(self, number: signal.Signals) -> None:
        signal_all(with_descendants([self._process.pid]), number)

    def _answer(self, within_s: float) -> dict[str, Any]:
        """The driver's next line, waited for at most so long."""
        assert self._process.stdout is not None
        self._busy = True
        file, deadline = self._process.stdout.fileno(), time.monotonic() + within_s
        pieces = [self._rest]
        while b"\n" not in pieces[-1]:
            if not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise EngineError(self._with_tail(f"gave no answer within {within_s:g} s"))
            pieces.append(os.read(file, _READ_BYTES))
            if not pieces[-1]:
                raise EngineError(self._with_tail(f"ended with status {self._process.wait()}"))
        line, _, self._rest = b"".join(pieces).partition(b"\n")
        self._busy = False
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def _cpu(self) -> tuple[float, float]:
        """CPU seconds of the driver and all its descendants, and of all processes of the machine."""
        own = 0.0
        for pid in with_descendants([self._process.pid]):
            with contextlib.suppress(OSError):
                own += machine.cpu_s(pid)
        return own, machine.busy_and_idle_s()[0]

    def _with_tail(self, message: str) -> str:
        lines = self._command.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"{message}, see {self._command.log}", *(f"  {line}" for line in lines)])
