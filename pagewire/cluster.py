"""Keeps a chain of services running on this machine: starts them, restarts what dies, stops them in reverse order.

A service that has served, and then accepts connections but leaves a few health checks in a row unanswered, is killed
and restarted: it is suspended, or its event loop hangs. How its work gets on is for its own health status to say. A
service that only refuses us, for instance because its certificate has expired, is not hung: it runs on, and we log it.

A service that ends with status 0 was told to from outside (by `pagewire restart`), since ours do so only after a
signal: its successor is started at once, and no death is counted.

Knows processes, their output and their health; `pagewire.launch` knows which services there are, and their options.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from pagewire import health
from pagewire.access import Access, AccessError
from pagewire.errors import PagewireError
from pagewire.processes import ended, start
from pagewire.shares import Share

# The exit status of our services when they refuse their options; starting them again would not help.
USAGE_ERROR = 2
_TAIL_LINES = 12
_POLL_S = 0.1
# A service that starts after others waits no longer than this for them.
_LISTENING_WITHIN_S = 5.0
# A silent service is killed after this many health checks in a row without an answer.
_MAX_SILENT = 3
# A start is given up after this many health checks in a row that refuse us: waiting would not change that.
_MAX_REFUSED = 10
_LINE_BYTES = 64 << 10
log = logging.getLogger(__name__)


class LaunchError(PagewireError):
    """The cluster cannot start or cannot go on."""


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """One service to run.

    Attributes:
        name: as in its log lines.
        command: its command line.
        address: where it answers health checks.
        stop_within_s: seconds between SIGTERM and SIGKILL.
        access: TLS for that address, if it has any.
        peers: the group of services that it belongs to, which stop at the same time. Empty if it stops by itself.
        share: what it may use of the machine.
        starts_behind: the group of services (`peers`) that are to accept connections before it is started for the first
            time, so that few processes import at the same time. Empty for none.
    """

    name: str
    command: tuple[str, ...]
    address: str
    stop_within_s: float = 40.0
    access: Access = Access()  # noqa: RUF009  # frozen
    peers: str = ""
    share: Share = Share()  # noqa: RUF009  # frozen
    starts_behind: str = ""


@dataclass(slots=True)
class RestartPolicy:
    """When a service that died is started again: at once, then after ever longer delays while deaths follow each other.

    Attributes:
        first_delay_s: delay after the second death in a row within the window; from then on delays double.
        max_deaths: this many within the window are too many. A request that kills workers costs one death, and one
            for each halving of the requests that run beside it (8 in all for 128), which is no reason to give up.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 10.0
    max_deaths: int = 10
    window_s: float = 120.0
    _deaths: deque[float] = field(default_factory=deque)
    _streak: int = 0

    def delay_after_death(self, now: float) -> float | None:
        """Seconds to wait before the next start, for a death at `now` (seconds); None to give up."""
        recent = bool(self._deaths) and now - self._deaths[-1] < self.window_s
        self._streak = self._streak + 1 if recent else 1
        self._deaths.append(now)
        while now - self._deaths[0] >= self.window_s:
            self._deaths.popleft()
        if len(self._deaths) >= self.max_deaths:
            return None
        return min(self.first_delay_s * 2.0 ** (self._streak - 2), self.max_delay_s) if self._streak > 1 else 0.0


@dataclass(slots=True)
class _Running:
    """A service's process, while it runs.

    Attributes:
        has_served: whether it has been SERVING. Until then it may be silent: it may be loading a model.
    """

    process: asyncio.subprocess.Process
    reader: asyncio.Task[None]
    has_served: bool = False


class Cluster:
    """The services of one `pagewire up`; each needs the ones before it in the list.

    Args:
        services: in the order in which the start waits for them.
        on_line: called with a service's name and each line that it prints.
        on_waiting: called with the name of the service that the start waits for.
        on_pids: called with the services' process ids whenever they change.
        new_policy: makes each service's restart policy.
        start_within_s: seconds after which the start is given up; a large model takes minutes to load.
        probe_s: seconds between two health checks of a service that runs; also the timeout of each.
        started: processes that are running already, by their services' names.
    """

    def __init__(
        self,
        services: Sequence[ServiceProcess],
        *,
        on_line: Callable[[str, str], None],
        on_waiting: Callable[[str], None] = lambda name: None,
        on_pids: Callable[[dict[str, int]], None] = lambda pids: None,
        new_policy: Callable[[], RestartPolicy] = RestartPolicy,
        start_within_s: float = 1800.0,
        probe_s: float = 5.0,
        started: Mapping[str, asyncio.subprocess.Process] | None = None,
    ) -> None:
        self._services = services
        self._on_line = on_line
        self._on_waiting = on_waiting
        self._on_pids = on_pids
        self._new_policy = new_policy
        self._start_within_s = start_within_s
        self._probe_s = probe_s
        self._started = dict(started or {})
        self._running: dict[str, _Running] = {}
        self._tails: dict[str, deque[str]] = {service.name: deque(maxlen=_TAIL_LINES) for service in services}
        self._ready = False
        self._said: dict[str, str] = {}  # in the last health check of each service waited for
        # Set, and replaced by a new one, when a service prints a line.
        self._news = asyncio.Event()

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Starts all, calls `on_ready` when all are SERVING, keeps them running until `stop`, stops them in reverse.

        Raises:
            LaunchError: a service did not become ready, or died too often; nothing runs any more.
        """
        keepers = [asyncio.create_task(self._keep(service)) for service in self._services]
        ready = asyncio.create_task(self._wait_until_serving())
        stopped = asyncio.create_task(stop.wait())
        tasks: list[asyncio.Task] = [*keepers, ready, stopped]
        try:
            await _first_of(ready, stopped, *keepers)
            if not stop.is_set():
                self._ready = True
                on_ready()
                await _first_of(stopped, *keepers)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stage in reversed(stages(self._services)):
                await asyncio.gather(*map(self._stop, stage))

    def kill(self) -> None:
        """Ends all processes at once; `run` then returns soon."""
        for running in self._running.values():
            _kill_group(running.process.pid)

    async def _wait_until_serving(self) -> None:
        give_up_at = asyncio.get_running_loop().time() + self._start_within_s
        for service in self._services:
            self._on_waiting(service.name)
            try:
                async with asyncio.timeout_at(give_up_at):
                    await self._until(service, lambda said: said == health.SERVING)
                if (running := self._running.get(service.name)) is not None:
                    running.has_served = True
            except TimeoutError:
                said = self._said.get(service.name, health.NO_ANSWER)
                late = f"{service.name} does not serve after {self._start_within_s:g} s; its health check says: {said}"
                raise LaunchError(self._with_tail(service, late)) from None

    async def _wait_until_listening(self, peers: str) -> None:
        """Waits, but not long, until services accept connections: one that starts behind them can do without."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LISTENING_WITHIN_S):
                for service in self._services:
                    if service.peers == peers:
                        await self._until(service, lambda said: not said.startswith(health.NO_ANSWER))

    async def _until(self, service: ServiceProcess, is_reached: Callable[[str], bool]) -> None:
        """Waits until `is_reached` holds for what a service's health check says.

        Raises:
            LaunchError: the service refuses us, and waiting will not change that.
        """
        num_refused = 0
        # Polled rather than watched: a watch that is cancelled keeps its connection (grpc#43360). A line that a service
        # prints brings the next check forward, since the service may have got further.
        while True:
            news = self._news
            said = await asyncio.to_thread(health.check, service.address, access=service.access)
            if is_reached(said):
                return
            self._said[service.name] = said
            num_refused = num_refused + 1 if said.startswith(health.NOT_LET_IN) else 0
            if num_refused == _MAX_REFUSED:
                raise LaunchError(f"{service.name} cannot be asked for its health: {said}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await news.wait()

    async def _keep(self, service: ServiceProcess) -> None:
        """Runs a service again and again; ends only by raising LaunchError."""
        policy = self._new_policy()
        if service.starts_behind:
            await self._wait_until_listening(service.starts_behind)
        while True:
            status, has_served = await self._run_once(service)
            end = f"{service.name} {_describe(status)}"
            if not self._ready or status == USAGE_ERROR:
                when = "" if self._ready else " before it was ready"
                # One that has served may have been killed by us, and why is said there.
                is_unexplained = status == -signal.SIGKILL and not has_served
                why = ": Linux does that when memory runs out" if is_unexplained else ""
                raise LaunchError(self._with_tail(service, end + when + why))
            if status == 0:
                log.info(f"{service.name} has stopped; starting its successor")
                continue
            delay_s = policy.delay_after_death(asyncio.get_running_loop().time())
            if delay_s is None:
                often = f"{end}, death {policy.max_deaths} within {policy.window_s:g} s; giving up"
                raise LaunchError(self._with_tail(service, often))
            log.warning(f"{end}; starting it again", extra={"delay_s": delay_s})
            await asyncio.sleep(delay_s)

    async def _run_once(self, service: ServiceProcess) -> tuple[int, bool]:
        """Returns a process's exit status, and whether it has served."""
        process = self._started.pop(service.name, None)
        if process is None:
            process = await start(service.command, cores=service.share.cores, variables=service.share.environment)
        running = _Running(process, asyncio.create_task(self._read_lines(service.name, process)))
        self._running[service.name] = running
        self._report_pids()
        watch = asyncio.create_task(self._kill_when_silent(service, running))
        try:
            status = await ended(process)
        finally:
            watch.cancel()
        await self._forget(service.name)
        return status, running.has_served

    async def _kill_when_silent(self, service: ServiceProcess, running: _Running) -> None:
        """Kills a process that no longer answers. Silence is counted in checks: we may be suspended ourselves."""
        num_unanswered, said = 0, ""
        while True:
            if said != health.SILENT:  # such a check took that long itself
                await asyncio.sleep(self._probe_s)
            before, said = said, await self._said_by(service)
            if said.startswith(health.NOT_LET_IN) and not before.startswith(health.NOT_LET_IN):
                unknown = f"{service.name} cannot be asked for its health; until it can, only its end is noticed"
                log.warning(unknown, extra={"why": said})
            running.has_served = running.has_served or said == health.SERVING
            if not (running.has_served and said.startswith(health.NO_ANSWER)):
                num_unanswered = 0
                continue
            num_unanswered += 1
            # A service that was told to stop accepts no connections, and has `stop_within_s` to end.
            # From the first of n + 1 checks to the last, n times `probe_s` pass.
            num_allowed = _MAX_SILENT - 1 if said == health.SILENT else service.stop_within_s / self._probe_s
            if num_unanswered > num_allowed:
                break
        log.error(f"{service.name} has left {num_unanswered} health checks in a row without an answer; killing it")
        _kill_group(running.process.pid)

    async def _said_by(self, service: ServiceProcess) -> str:
        """What a health check says, even if the files that `access` names are gone."""
        try:
            return await asyncio.to_thread(
                health.check, service.address, timeout_s=self._probe_s, access=service.access
            )
        except AccessError as error:
            return f"{health.NOT_LET_IN}; {error}"

    async def _stop(self, service: ServiceProcess) -> None:
        running = self._running.get(service.name)
        if running is None:
            return
        with contextlib.suppress(ProcessLookupError):
            running.process.terminate()
        try:
            async with asyncio.timeout(service.stop_within_s):
                await ended(running.process)
        except TimeoutError:
            log.warning(f"{service.name} did not stop in time; killing it", extra={"after_s": service.stop_within_s})
            _kill_group(running.process.pid)
            await ended(running.process)
        await self._forget(service.name)

    async def _forget(self, name: str) -> None:
        """After a process has ended: reads its last output, and kills what it may have left running in its session."""
        running = self._running.pop(name)
        _kill_group(running.process.pid)
        await asyncio.wait([running.reader], timeout=1.0)
        running.reader.cancel()
        self._report_pids()

    def _report_pids(self) -> None:
        self._on_pids({name: running.process.pid for name, running in self._running.items()})

    async def _read_lines(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in _lines(process.stdout):
            self._tails[name].append(line)
            self._on_line(name, line)
            self._news.set()
            self._news = asyncio.Event()

    def _with_tail(self, service: ServiceProcess, message: str) -> str:
        return "\n".join([message, *(f"  {line}" for line in self._tails[service.name])])


def stages(services: Sequence[ServiceProcess]) -> list[list[ServiceProcess]]:
    """The services in their order, peers together."""
    return [list(stage) for _, stage in groupby(services, key=lambda service: service.peers or service.name)]


async def _first_of(*tasks: asyncio.Task) -> None:
    """Waits for the first task that ends; raises what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of a stream; one that is longer than `_LINE_BYTES` comes in pieces."""
    rest = b""
    while chunk := await stream.read(_LINE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
        if len(rest) >= _LINE_BYTES:
            yield rest.decode(errors="replace")
            rest = b""
    if rest:
        yield rest.decode(errors="replace")


def _describe(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
