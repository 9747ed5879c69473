"""Real router and scheduler processes on TCP, to test with other people's tools, and a worker that answers at once.

It says `fakes.TEXT` again and again, or another text. Every process is ended with SIGTERM, and must exit with 0.
"""

import contextlib
import json
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from deployment import START_TIMEOUT_S, Service
from fakes import TEXT, VOCABULARY_SIZE, write_tokenizer
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from protos.pagewire.v1 import introspection_pb2
from protos.pagewire.v1.introspection_pb2_grpc import IntrospectionServiceStub


def free_port() -> int:
    """A port of the loopback address on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Cluster:
    """Any number of schedulers, a worker for each, and any number of routers by their ports."""

    directory: str
    step_ms: float = 0
    text: str = TEXT
    workers: dict[int, Service] = field(default_factory=dict)
    schedulers: dict[int, Service] = field(default_factory=dict)
    routers: dict[int, Service] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """The address of the first router."""
        return f"127.0.0.1:{next(iter(self.routers))}"

    @property
    def worker(self) -> Service:
        """The first one."""
        return self.workers[0]

    @property
    def scheduler(self) -> Service:
        """The first one."""
        return self.schedulers[0]

    def start_worker(self, index: int = 0) -> None:
        """Starts a scheduler's worker, without waiting for it."""
        text = Path(self.directory, "text.json")
        text.write_text(json.dumps(list(self.text.encode())))
        script = ("--text", str(text), "--vocabulary-size", str(VOCABULARY_SIZE), "--step-ms", str(self.step_ms))
        address = f"unix:{self.directory}/worker{index}"
        self.workers[index] = Service("bench.instant_worker", "--listen", address, *script, directory=self.directory)

    def scheduler_address(self, index: int) -> str:
        return f"unix:{self.directory}/scheduler{index}"

    def start_scheduler(self, index: int = 0, *options: str) -> None:
        """Starts a scheduler, without waiting for it."""
        addresses = ("--listen", self.scheduler_address(index), "--worker", f"unix:{self.directory}/worker{index}")
        self.schedulers[index] = Service("scheduler", *addresses, *options, directory=self.directory)

    def start_router(self, port: int, *options: str, scheduler: str | None = None) -> None:
        """Starts a router, without waiting for it."""
        everyone = ",".join(map(self.scheduler_address, self.schedulers))
        self.routers[port] = Service(
            "router",
            *("--listen", f"127.0.0.1:{port}", "--scheduler", scheduler or everyone),
            *("--model", f"{self.directory}/model", "--log-level", "warning", *options),
            directory=self.directory,
        )

    def wait_for_serving(self, address: int | str) -> None:
        """Returns when the router at a port or address says SERVING."""
        with grpc.insecure_channel(f"127.0.0.1:{address}" if isinstance(address, int) else address) as channel:
            stub, end = HealthStub(channel), time.monotonic() + START_TIMEOUT_S
            for answer in stub.Watch(HealthCheckRequest(), wait_for_ready=True, timeout=START_TIMEOUT_S):
                if answer.status == HealthCheckResponse.SERVING:
                    return
                assert time.monotonic() < end

    def stop(self) -> None:
        """Stops them from front to back, even if one fails; the routers all at once, since each may take a while."""
        with contextlib.ExitStack() as last_first:
            for service in (*self.workers.values(), *self.schedulers.values()):
                last_first.callback(service.stop)
            with ThreadPoolExecutor() as pool:
                list(pool.map(Service.stop, self.routers.values()))

    def states(self) -> introspection_pb2.GetStateResponse:
        """What the first router says."""
        with grpc.insecure_channel(self.target) as channel:
            return IntrospectionServiceStub(channel).GetState(introspection_pb2.GetStateRequest(), timeout=10)

    def state(self) -> introspection_pb2.SchedulerState:
        """The state of the schedulers, as the first router reports it."""
        return self.states().state


@contextlib.contextmanager
def cluster(
    *router_options: str,
    num_routers: int = 1,
    num_schedulers: int = 1,
    scheduler_options: tuple[str, ...] = (),
    step_ms: float = 0,
    text: str = TEXT,
) -> Iterator[Cluster]:
    """Everything started, and SERVING."""
    with tempfile.TemporaryDirectory(prefix="pw") as directory:
        write_tokenizer(Path(directory, "model"))
        running = Cluster(directory, step_ms, text)
        try:
            for index in range(num_schedulers):
                running.start_worker(index)
                running.start_scheduler(index, *scheduler_options)
            for port in [free_port() for _ in range(num_routers)]:
                running.start_router(port, *router_options)
            for port in running.routers:
                running.wait_for_serving(port)
            yield running
        finally:
            running.stop()
