"""The driver's side of the line protocol; it runs in each peer's environment, and imports only the standard library.

A driver is a program `drive_X.py MODEL OPTIONS`, where OPTIONS is a JSON object. It answers one JSON object a line:

    -> (starts)                     <- {"version": "...", "pids": [...], "started_at": seconds or null}
    -> {"requests": [{"token_ids": [...], "max_tokens": n, "at": seconds}, ...]}
                                    <- {"times": [[seconds, ...], ...], "tokens": [[id, ...], ...]}
                                    or {"error": "..."}
    -> (end of input)               (ends)

`at` and `times` are seconds since the run began; `started_at` is by the monotonic clock, for an engine that was started
later than its driver. `pids` are the processes whose memory, with that of their descendants, is the engine's. Whatever
is printed goes to standard error.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class Request:
    """One request of a run: when it arrives, and the tokens that came back, each with its time."""

    token_ids: list[int]
    max_tokens: int
    at: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, now: float, tokens: Sequence[int]) -> None:
        """Notes tokens that came together."""
        self.times += [now] * len(tokens)
        self.tokens += tokens


class Engine(Protocol):
    """What a driver drives."""

    version: str
    pids: list[int]
    started_at: float | None

    def play(self, requests: list[Request]) -> None:
        """Sends each request at its time and notes what comes back."""

    def close(self) -> None:
        """Ends what the engine started."""


def serve(load: Callable[[str, dict[str, Any]], Engine]) -> None:
    """Loads the engine that the command line names, and plays runs until the input ends or SIGTERM comes."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    engine = load(sys.argv[1], json.loads(sys.argv[2]))
    try:
        answer(version=engine.version, pids=engine.pids, started_at=engine.started_at)
        for line in sys.stdin:
            requests = [Request(**request) for request in json.loads(line)["requests"]]
            try:
                engine.play(requests)
            except Exception as error:
                traceback.print_exc()
                while isinstance(error, ExceptionGroup):
                    error = error.exceptions[0]
                answer(error=f"{type(error).__name__}: {error}")
            else:
                answer(times=[request.times for request in requests], tokens=[request.tokens for request in requests])
    finally:
        engine.close()


def play_in_steps(
    requests: list[Request],
    submit: Callable[[int, Request], None],
    step: Callable[[], Iterable[tuple[int, Sequence[int]]]],
    busy: Callable[[], bool],
) -> None:
    """Plays a run on an engine that has to be stepped.

    Args:
        requests: in any order.
        submit: gives the engine a request, at its arrival or as soon after as the step before has ended.
        step: lets it work; returns the new tokens, by the request's index.
        busy: whether it has work left.
    """
    started = time.perf_counter()
    coming = sorted(range(len(requests)), key=lambda index: requests[index].at, reverse=True)
    while coming or busy():
        while coming and requests[coming[-1]].at <= time.perf_counter() - started:
            index = coming.pop()
            submit(index, requests[index])
        if busy():
            tokens = step()
            now = time.perf_counter() - started
            for index, ids in tokens:
                requests[index].add(now, ids)
        else:
            time.sleep(0.0005)
