"""The three real processes for a test, on Unix sockets. Each is ended with SIGTERM, and must exit with 0."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pagewire.processes import tied
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1 import introspection_pb2
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.pagewire.v1.introspection_pb2_grpc import IntrospectionServiceStub
from protos.rpc import dial, wait_for_serving

START_TIMEOUT_S = 60


class Service:
    """One of our processes."""

    def __init__(self, name: str, *arguments: str, directory: str) -> None:
        self.name = name
        self.log = Path(directory) / f"{name}.log"
        with self.log.open("a") as log:
            command = [sys.executable, "-m", name, *arguments]
            self.arguments = arguments
            # Tied to this process: a test run that is killed leaves no service behind.
            self.process = subprocess.Popen(tied(command), stderr=log, stdout=log, start_new_session=True)

    def rss_bytes(self) -> int:
        """Memory it has now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspends it meanwhile."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends it with SIGTERM; it must exit with 0 in time."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        assert code == 0, f"{self.name} exited with {code}:\n{self.log.read_text()[-3000:]}"


@dataclass
class Deployment:
    """A running chain; `services` by name."""

    directory: str
    router_address: str
    services: dict[str, Service] = field(default_factory=dict)
    ready_after_s: float = 0.0

    def start(self, name: str, *arguments: str) -> Service:
        self.services[name] = Service(name, *arguments, directory=self.directory)
        return self.services[name]

    async def state(self) -> introspection_pb2.SchedulerState:
        async with dial(self.router_address) as channel:
            stub = IntrospectionServiceStub(channel)
            return (await stub.GetState(introspection_pb2.GetStateRequest(), timeout=10)).state

    async def idle(self) -> introspection_pb2.SchedulerState:
        """Waits until nothing is live; returns the state, in which no block may be held."""
        state = await self.having(0)
        assert state.block_pool.num_held == 0
        return state

    async def having(self, num_live: int) -> introspection_pb2.SchedulerState:
        """Waits until so many requests are live; returns the state."""
        while True:
            state = await self.state()
            if state.num_running + state.num_waiting == num_live:
                return state
            await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[GenerationServiceStub]:
        async with dial(self.router_address) as channel:
            yield GenerationServiceStub(channel)

    async def complete(self, requests: list[pb.GenerateRequest]) -> list[pb.CompleteResponse]:
        """The answers to all, sent at once."""
        async with self.client() as stub:
            return list(await asyncio.gather(*(stub.Complete(request) for request in requests)))


@contextlib.asynccontextmanager
async def deployment(
    model: Path | str,
    *,
    worker: tuple[str, ...] = (),
    scheduler: tuple[str, ...] = (),
    router: tuple[str, ...] = (),
    listen: str | None = None,
) -> AsyncIterator[Deployment]:
    """Worker, scheduler and router for `model`, SERVING; stopped in reverse, with nothing left behind.

    The router listens on `listen`, else on a Unix socket.
    """
    with tempfile.TemporaryDirectory(prefix="pw") as directory:
        running = Deployment(directory, listen or f"unix:{directory}/router")
        start = time.monotonic()
        try:
            running.start("worker", "--listen", f"unix:{directory}/worker", "--model", str(model), *worker)
            running.start(
                "router",
                *("--listen", running.router_address, "--scheduler", f"unix:{directory}/scheduler"),
                *("--model", str(model), *router),
            )
            async with dial(running.router_address) as channel:
                try:
                    async with asyncio.timeout(START_TIMEOUT_S):
                        await channel.channel_ready()
                        # After the worker, as `pagewire up` does: it takes longest to import, and they share two cores.
                        running.start(
                            "scheduler",
                            *("--listen", f"unix:{directory}/scheduler", "--worker", f"unix:{directory}/worker"),
                            *scheduler,
                        )
                        await wait_for_serving(channel)
                except TimeoutError:
                    logs = [service.log.read_text()[-2000:] for service in running.services.values()]
                    raise AssertionError("not ready:\n" + "\n".join(logs)) from None
            running.ready_after_s = time.monotonic() - start
            yield running
            await running.idle()
            for name in ("router", "scheduler", "worker"):
                running.services.pop(name).stop()
        finally:
            for service in running.services.values():
                service.process.kill()
                service.process.wait()


def greedy(prompt: str | list[int], max_tokens: int, **options: object) -> pb.GenerateRequest:
    """A greedy request that goes on to max_tokens and gives its token ids."""
    prompt_field = {"text": prompt} if isinstance(prompt, str) else {"token_ids": pb.TokenIds(ids=prompt)}
    return pb.GenerateRequest(
        **prompt_field,
        sampling=pb.SamplingParams(temperature=0),
        stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True),
        **options,
    )
