"""The cluster that is disturbed: real services under the launcher's own supervision, restarted without a growing delay.

Several schedulers are replicas of `pagewire up`.
"""

import asyncio
import contextlib
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pagewire.cluster import Cluster, RestartPolicy, ServiceProcess
from pagewire.launch import LaunchOptions, Setting, free_port, services
from protos.pagewire.v1 import introspection_pb2
from protos.pagewire.v1.introspection_pb2_grpc import IntrospectionServiceStub
from protos.rpc import dial

NUM_ROUTERS = 2
_READ_S = 0.25
_COMPUTED = "pagewire_iteration_tokens_sum"
SETTINGS = (
    "worker.dtype=float32",
    # Short, so that some faults last longer than the grace of a SIGTERM that came before.
    "worker.drain-grace-s=1",
    "scheduler.drain-grace-s=2",
    "router.drain-grace-s=2",
)


def steady_policy() -> RestartPolicy:
    """Each death is treated as `pagewire up` treats the first: here, many deaths are no sign of a crash loop."""
    return RestartPolicy(max_delay_s=0, max_deaths=1 << 30)


@dataclass
class Site:
    """A cluster that runs.

    Attributes:
        target: the port that all routers share.
        pids: of the processes that live, by service name.
        num_schedulers: and as many workers.
        run: ends with an error when supervision has given up.
        num_computed_tokens: of prompts and outputs, by all schedulers and their predecessors, as last read.
    """

    target: str
    num_schedulers: int
    metrics_ports: Sequence[int]
    run: "asyncio.Task[None]"
    pids: dict[str, int] = field(default_factory=dict)
    num_computed_tokens: float = 0

    @property
    def processes(self) -> dict[str, int]:
        """Services, and the ranks of workers that have processes for them, as "rank-0-of-worker"; Ray's raylet too."""
        workers = [(name, pid) for name, pid in self.pids.items() if name.partition("-")[0] == "worker"]
        ranks = {f"rank-{n}-of-{name}": pid for name, parent in workers for n, pid in enumerate(_ranks_of(parent))}
        return self.pids | ranks

    def raise_if_over(self) -> None:
        """Raises what ended the cluster."""
        if self.run.done():
            self.run.result()
            raise RuntimeError("the cluster ended")

    async def count_computed(self) -> None:
        """Adds up, without end, what the schedulers' counters gain; a restarted one begins at 0."""
        last: dict[int, float] = {}
        while True:
            for port in self.metrics_ports:
                now = await asyncio.to_thread(_computed_tokens, port)
                if now is not None:
                    before = last.get(port, now)
                    self.num_computed_tokens += now - before if now >= before else now
                    last[port] = now
            await asyncio.sleep(_READ_S)

    async def idle(self, within_s: float) -> None:
        """Returns when nothing is live at any scheduler and every block is free.

        Raises:
            AssertionError: that is not so in time; the text has the states.
        """
        states: Sequence[introspection_pb2.SchedulerState] = ()
        end = time.monotonic() + within_s
        async with dial(self.target) as channel:
            stub = IntrospectionServiceStub(channel)
            while time.monotonic() < end:
                response = await stub.GetState(
                    introspection_pb2.GetStateRequest(), wait_for_ready=True, timeout=within_s
                )
                told = [row.state for row in response.schedulers if row.HasField("state")]
                states = told if response.schedulers else [response.state]
                if len(states) == self.num_schedulers and all(map(_is_empty, states)):
                    return
                await asyncio.sleep(0.1)
        raise AssertionError(
            f"something is live, or a block is not free, {within_s:g} s after the last answer:\n{states}"
        )


@contextlib.asynccontextmanager
async def supervised(
    model: Path, folder: Path, log_file: Path, num_schedulers: int, settings: Sequence[str]
) -> AsyncIterator[Site]:
    """A cluster that serves, with its sockets in `folder`."""
    told = tuple(Setting.parse(text) for text in (*SETTINGS, *settings))
    options = LaunchOptions(str(model), port=free_port(), routers=NUM_ROUTERS, replicas=num_schedulers, settings=told)
    chain, ports = _measured(services(options, str(folder)))
    stop, ready, pids = asyncio.Event(), asyncio.Event(), dict[str, int]()

    def note(now: dict[str, int]) -> None:
        pids.clear()
        pids.update(now)

    with log_file.open("a", buffering=1) as log:
        cluster = Cluster(
            chain,
            on_line=lambda name, line: print(f"{name}: {line}", file=log),
            on_pids=note,
            new_policy=steady_policy,
        )
        run = asyncio.create_task(cluster.run(stop, ready.set))
        up = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait((run, up), return_when=asyncio.FIRST_COMPLETED)
            site = Site(options.target, num_schedulers, ports, run, pids)
            if not ready.is_set():
                site.raise_if_over()
            yield site
        finally:
            up.cancel()
            stop.set()
            await run


async def cold_start_s(model: Path, folder: Path, settings: Sequence[str]) -> float:
    """Seconds from the start of a worker, with nothing else running, until it serves."""
    told = tuple(Setting.parse(text) for text in (*SETTINGS, *settings))
    worker = services(LaunchOptions(str(model), settings=told), str(folder))[0]
    stop, start = asyncio.Event(), time.monotonic()
    taken: list[float] = []

    def ready() -> None:
        taken.append(time.monotonic() - start)
        stop.set()

    await Cluster([worker], on_line=lambda name, line: None).run(stop, ready)
    return taken[0]


def _measured(chain: Sequence[ServiceProcess]) -> tuple[list[ServiceProcess], list[int]]:
    """The same services with metrics of the schedulers, and their ports."""
    ports: list[int] = []

    def told(service: ServiceProcess) -> ServiceProcess:
        if service.peers != "scheduler":
            return service
        ports.append(free_port())
        return replace(service, command=(*service.command, f"--metrics-listen=127.0.0.1:{ports[-1]}"))

    return [told(service) for service in chain], ports


def _ranks_of(front: int) -> list[int]:
    """The processes of a worker's ranks, and the raylet of a cluster that it has started for them."""
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(folder.name)] = (folder / "cmdline").read_bytes()

    def is_below(pid: int) -> bool:
        return pid in parents and (parents[pid] == front or is_below(parents[pid]))

    def is_rank(command: bytes) -> bool:
        return any(word in command for word in (b"spawn_main", b"ray::RankActor", b"/raylet/raylet"))

    return sorted(pid for pid, command in commands.items() if is_rank(command) and is_below(pid))


def _computed_tokens(port: int) -> float | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1.0) as response:
            lines = response.read().decode().splitlines()
    except OSError:
        return None
    return next((float(line.split()[-1]) for line in lines if line.startswith(_COMPUTED)), None)


def _is_empty(state: introspection_pb2.SchedulerState) -> bool:
    pool = state.block_pool
    live = state.num_waiting + state.num_running + state.num_swapped
    return not live and not pool.num_held and pool.num_swap_free == pool.num_swap_total
