"""What is done to the processes of a cluster: which, when, and how long until streams move again."""

import asyncio
import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass

from bench.chaos.load import Load
from bench.chaos.site import Site

SERVICES = ("worker", "scheduler", "router")
RANK = "rank"
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
# Seconds that a process is suspended: mostly too few for anything to notice, sometimes more than --health-stall-s
# (5 s), or so many that its supervisor or a keepalive gives it up.
_SUSPENSIONS_S = ((0.1, 2.0),) * 6 + ((2.0, 8.0),) * 2 + ((20.0, 45.0),)
# A request fails when three workers, or schedulers, are lost over it without a token in between (docs/architecture.md).
_MOST_BEFORE_PROGRESS = 2
_PROGRESS_WITHIN_S = 120.0


@dataclass(slots=True)
class Fault:
    """One signal to one process.

    Attributes:
        at: by time.monotonic.
        suspended_s: between SIGSTOP and SIGCONT; None for other signals.
    """

    at: float
    name: str
    signal: signal.Signals
    suspended_s: float | None = None

    @property
    def service(self) -> str:
        """Of `SERVICES`, or `RANK`."""
        return self.name.partition("-")[0]


class Faults:
    """Faults at random moments, every service and signal equally often.

    Args:
        spacing_s: at most this long between two faults that do not come together, once streams move again.
        suspensions_s: (shortest, longest) times between SIGSTOP and SIGCONT, of which one is drawn.
    """

    def __init__(
        self,
        site: Site,
        load: Load,
        rng: random.Random,
        spacing_s: float,
        suspensions_s: tuple[tuple[float, float], ...] = _SUSPENSIONS_S,
    ) -> None:
        self.done: list[Fault] = []
        self._site = site
        self._services = (*SERVICES, RANK) if any(name.startswith(RANK) for name in site.processes) else SERVICES
        self._load = load
        self._rng = rng
        self._spacing_s = spacing_s
        self._suspensions_s = suspensions_s
        self._deck: list[tuple[str, signal.Signals]] = []
        # Those of workers and schedulers since all streams last moved.
        self._before_progress: list[Fault] = []

    async def inflict(self, num: int) -> None:
        """Inflicts so many faults; returns when every suspended process runs again or is gone."""
        async with asyncio.TaskGroup() as resuming:
            while len(self.done) < num:
                fault = self._next()
                if fault is None:  # all processes of that service are being started
                    await asyncio.sleep(0.05)
                    continue
                pid = self._site.processes.get(fault.name)
                try:
                    if pid is None:
                        raise ProcessLookupError
                    os.kill(pid, fault.signal)
                except ProcessLookupError:  # it has just ended
                    self._deck.append((fault.service, fault.signal))
                    continue
                self.done.append(fault)
                if fault.suspended_s is not None:
                    resuming.create_task(self._resume(fault, pid))
                await self._wait_after(fault)

    def _next(self) -> Fault | None:
        if not self._deck:
            self._deck = [(service, number) for service in self._services for number in SIGNALS]
            self._rng.shuffle(self._deck)
        service, number = self._deck[-1]
        names = sorted(name for name in self._site.processes if name.partition("-")[0] == service)
        if not names:
            return None
        self._deck.pop()
        suspended_s = self._rng.uniform(*self._rng.choice(self._suspensions_s)) if number is signal.SIGSTOP else None
        return Fault(time.monotonic(), self._rng.choice(names), number, suspended_s)

    async def _resume(self, fault: Fault, pid: int) -> None:
        assert fault.suspended_s is not None
        await asyncio.sleep(fault.suspended_s)
        if self._site.processes.get(fault.name) == pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _wait_after(self, fault: Fault) -> None:
        if fault.service != "router":
            self._before_progress.append(fault)
        together = self._rng.random() < 0.25
        if len(self._before_progress) >= _MOST_BEFORE_PROGRESS or (self._before_progress and not together):
            await wait_until_all_move(self._site, self._load, self._before_progress[-1])
            self._before_progress.clear()
        if not together:
            await asyncio.sleep(self._rng.uniform(0, self._spacing_s))


async def wait_until_all_move(site: Site, load: Load, fault: Fault) -> None:
    """Returns when every stream that was live at a fault has moved since.

    Raises:
        AssertionError: that is not so in time.
    """
    waiting = set(load.live)
    end = fault.at + _PROGRESS_WITHIN_S
    while waiting := {reading for reading in waiting if not reading.moved_since(fault.at)}:
        site.raise_if_over()
        kinds = sorted(reading.asked.kind for reading in waiting)
        assert time.monotonic() < end, f"no progress for {_PROGRESS_WITHIN_S:g} s after {fault}: {kinds}"
        await asyncio.sleep(0.02)


async def recovery_s(site: Site, load: Load, name: str) -> float:
    """Kills a service that has no replica; returns the seconds until its successor's first token.

    Tokens that were on their way already come within 50 ms.
    """
    fault = Fault(time.monotonic(), name, signal.SIGKILL)
    os.kill(site.pids[name], signal.SIGKILL)
    quiet = fault.at + 0.05
    while not (times := [each.times[-1] for each in load.live if each.times and each.times[-1] > quiet]):
        site.raise_if_over()
        await asyncio.sleep(0.005)
    await wait_until_all_move(site, load, fault)
    return min(times) - fault.at
