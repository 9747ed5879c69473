"""Real router and scheduler processes on TCP for tests of other people's tools, with a worker that answers at once.

What it says is `fakes.TEXT`, again and again. Every process is ended with SIGTERM and asked for exit code 0.
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
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Cluster:
    """One worker, one scheduler, any number of routers by their ports."""

    directory: str
    step_ms: float = 0
    worker: Service = field(init=False)
    scheduler: Service = field(init=False)
    routers: dict[int, Service] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """The address of the first router."""
        return f"127.0.0.1:{next(iter(self.routers))}"

    def start_worker(self) -> None:
        """Starts the worker, without waiting for it."""
        text = Path(self.directory, "text.json")
        text.write_text(json.dumps(list(TEXT.encode())))
        script = ("--text", str(text), "--vocabulary-size", str(VOCABULARY_SIZE), "--step-ms", str(self.step_ms))
        address = f"unix:{self.directory}/worker"
        self.worker = Service("bench.instant_worker", "--listen", address, *script, directory=self.directory)

    def start_router(self, port: int, *options: str, scheduler: str | None = None) -> None:
        """Starts a router, without waiting for it."""
        self.routers[port] = Service(
            "router",
            *("--listen", f"127.0.0.1:{port}", "--scheduler", scheduler or f"unix:{self.directory}/scheduler"),
            *("--model", f"{self.directory}/model", "--log-level", "warning", *options),
            directory=self.directory,
        )

    def wait_for_serving(self, port: int) -> None:
        """Returns when the router says SERVING."""
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub, end = HealthStub(channel), time.monotonic() + START_TIMEOUT_S
            for answer in stub.Watch(HealthCheckRequest(), wait_for_ready=True, timeout=START_TIMEOUT_S):
                if answer.status == HealthCheckResponse.SERVING:
                    return
                assert time.monotonic() < end

    def stop_routers(self) -> None:
        """All at once: each may wait for a while before it ends."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(Service.stop, self.routers.values()))

    def state(self) -> introspection_pb2.SchedulerState:
        """The scheduler's own, asked for at the first router."""
        with grpc.insecure_channel(self.target) as channel:
            return IntrospectionServiceStub(channel).GetState(introspection_pb2.GetStateRequest(), timeout=10).state


@contextlib.contextmanager
def cluster(
    *router_options: str, num_routers: int = 1, step_ms: float = 0, scheduler_options: tuple[str, ...] = ()
) -> Iterator[Cluster]:
    """Everything started, and SERVING."""
    with tempfile.TemporaryDirectory(prefix="pw") as directory, contextlib.ExitStack() as ends:
        write_tokenizer(Path(directory, "model"))
        running = Cluster(directory, step_ms)
        running.start_worker()
        ends.callback(lambda: running.worker.stop())
        addresses = ("--listen", f"unix:{directory}/scheduler", "--worker", f"unix:{directory}/worker")
        running.scheduler = Service("scheduler", *addresses, *scheduler_options, directory=directory)
        ends.callback(running.scheduler.stop)
        ends.callback(running.stop_routers)
        for port in [free_port() for _ in range(num_routers)]:
            running.start_router(port, *router_options)
        for port in running.routers:
            running.wait_for_serving(port)
        yield running
