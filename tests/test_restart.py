"""`pagewire restart` while clients stream without a pause: no stream breaks, and no text differs."""

import asyncio
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from fakes import TEXT
from launched import launched

from pagewire import AsyncClient
from pagewire.processes import environment, module_command
from pagewire.state import ClusterState
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub

NUM_TOKENS = 100  # half a second
EXPECTED = (TEXT * NUM_TOKENS)[1 : 1 + NUM_TOKENS]
NUM_CLIENTS = 4


class Clients:
    """Clients that ask for one stream after the other, each over a connection of its own.

    Attributes:
        texts: of streams that ended.
        refused: errors of calls that failed before their first message.
        broken: errors of calls that failed later.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.refused: list[str] = []
        self.broken: list[str] = []
        self._stop = asyncio.Event()

    @asynccontextmanager
    async def streaming(self, target: str) -> AsyncIterator[None]:
        """Starts when each client has got text; at the end all streams have ended."""
        begun = [asyncio.Event() for _ in range(NUM_CLIENTS)]
        async with asyncio.TaskGroup() as group:
            for event in begun:
                group.create_task(self._ask(target, event))
            for event in begun:
                await event.wait()
            yield
            self._stop.set()

    async def _ask(self, target: str, begun: asyncio.Event) -> None:
        request = pb.GenerateRequest(text="p", stop=pb.StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True))
        async with grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = GenerationServiceStub(channel)
            while not self._stop.is_set():
                text = ""
                try:
                    async for message in stub.Generate(request, timeout=60, wait_for_ready=True):
                        text += message.outputs[0].text
                        begun.set()
                except grpc.aio.AioRpcError as error:
                    (self.broken if text else self.refused).append(error.details())
                    await asyncio.sleep(0.05)
                else:
                    self.texts.append(text)


async def restart(service: str, running: ClusterState) -> None:
    command = module_command("pagewire", ["restart", service, "--port", str(running.port)])
    shown = await asyncio.to_thread(subprocess.run, command, env=environment(), capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr


@pytest.mark.slow
async def test_no_stream_breaks_while_every_service_is_restarted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with launched(tmp_path, "--routers", "2") as (process, running):
        clients = Clients()
        async with clients.streaming(running.target):
            await restart("worker", running)
            assert clients.refused == [], "the scheduler lets new requests wait for the next worker"
            await restart("scheduler", running)
            assert set(clients.refused) <= {"no scheduler is ready; retry"}
            await restart("router", running)
        assert clients.broken == []
        assert set(clients.texts) == {EXPECTED}
        process.send_signal(signal.SIGINT)
        output, _ = await asyncio.to_thread(process.communicate, timeout=30)
    assert process.returncode == 0, output
    assert re.search(r"worker lost .*requeued=[1-9]", output), "streams lived through the restart of the worker"
    assert "request goes on" in output, "and through that of the scheduler"
    assert re.search(r"router-\d +draining live=[1-9]", output), "and ended at the router at which they began"


@pytest.mark.slow
async def test_our_client_waits_while_the_only_router_is_restarted(tmp_path, monkeypatch):
    async def ask_for(answer: Callable[[AsyncClient], Awaitable[str]]) -> None:
        async with AsyncClient(running.target) as client:
            while not restarted.is_set():
                assert await answer(client) == EXPECTED

    async def streamed(client: AsyncClient) -> str:
        return "".join([delta.text async for delta in client.stream("p", max_tokens=NUM_TOKENS, ignore_eos=True)])

    async def whole(client: AsyncClient) -> str:
        return (await client.generate("p", max_tokens=NUM_TOKENS, ignore_eos=True)).text

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    restarted = asyncio.Event()
    with launched(tmp_path) as (_, running):
        async with asyncio.TaskGroup() as group:
            for answer in (streamed, whole):
                group.create_task(ask_for(answer))
            await restart("router", running)
            restarted.set()
