"""Real processes that are suspended, told to stop, or outlived by their clients' connections."""

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from cluster import Cluster, cluster, free_port
from fakes import TEXT, pass_on
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from router.config import RouterSettings

pytestmark = pytest.mark.slow
PROMPT = "p"
STALL = ("--health-stall-s", "1")
# For a chain whose services notice a second of silence, on a busy machine.
WITHIN_S = 10


def said(num_tokens: int) -> str:
    """What the worker answers to PROMPT."""
    endless = TEXT * (num_tokens // len(TEXT) + 2)
    return endless[len(PROMPT) : len(PROMPT) + num_tokens]


def asked(max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=PROMPT, stop=pb.StopConditions(max_tokens=max_tokens))


async def text_of(call) -> str:
    """All text that is still to come; by `read`, as before."""
    text = ""
    while (message := await call.read()) is not grpc.aio.EOF:
        text += message.outputs[0].text
    return text


def open_channel(target: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)])


class Health:
    """A client that watches."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.told: asyncio.Queue[int] = asyncio.Queue()
        self._task = asyncio.create_task(self._watch(HealthStub(channel)))

    async def becomes(self, serving: bool) -> None:
        """Waits for the next change, for a limited time."""
        async with asyncio.timeout(WITHIN_S):
            status = await self.told.get()
        assert status == (HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING)

    async def _watch(self, stub: HealthStub) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for answer in stub.Watch(HealthCheckRequest(), wait_for_ready=True):
                self.told.put_nowait(answer.status)


@pytest.fixture(scope="module")
def site() -> Iterator[Cluster]:
    with cluster(*STALL, scheduler_options=STALL, step_ms=20) as running:
        yield running


@contextlib.asynccontextmanager
async def watched(site: Cluster) -> AsyncIterator[tuple[GenerationServiceStub, Health, Health]]:
    """A client, and the health of router and scheduler from Watch, both SERVING."""
    async with open_channel(site.target) as channel, open_channel(site.scheduler_address(0)) as scheduler:
        healths = Health(channel), Health(scheduler)
        for health in healths:
            await health.becomes(serving=True)
        yield GenerationServiceStub(channel), *healths


async def test_the_suspension_of_an_idle_worker_is_noticed_and_so_is_its_return(site):
    async with watched(site) as (stub, router, scheduler):
        with site.worker.suspended():
            await scheduler.becomes(serving=False)
            await router.becomes(serving=False)
            waiting = asyncio.ensure_future(stub.Complete(asked(3)))
            while (state := await asyncio.to_thread(site.state)).num_waiting + state.num_running == 0:
                assert not waiting.done()
        assert (await waiting).outputs[0].text == said(3)
        await scheduler.becomes(serving=True)
        await router.becomes(serving=True)


async def test_the_suspension_of_a_busy_worker_interrupts_streams_and_ends_none(site):
    async with watched(site) as (stub, router, scheduler):
        stream = stub.Generate(asked(60))
        text = (await stream.read()).outputs[0].text
        with site.worker.suspended():
            await scheduler.becomes(serving=False)
            await router.becomes(serving=False)
        assert text + await text_of(stream) == said(60)
        await scheduler.becomes(serving=True)
        await router.becomes(serving=True)


async def test_a_router_notices_that_its_scheduler_is_suspended_and_new_requests_wait(site):
    async with watched(site) as (stub, router, _):
        stream = stub.Generate(asked(60))
        text = (await stream.read()).outputs[0].text
        with site.scheduler.suspended():
            await router.becomes(serving=False)
            waiting = asyncio.ensure_future(stub.Complete(asked(3)))
        assert text + await text_of(stream) == said(60)
        assert (await waiting).outputs[0].text == said(3)
        await router.becomes(serving=True)


async def test_a_suspended_router_does_not_blame_its_scheduler(site):
    (service,) = site.routers.values()
    async with watched(site) as (stub, router, _):
        with service.suspended():
            await asyncio.sleep(2)  # longer than a scheduler may be silent
        assert (await stub.Complete(asked(80))).outputs[0].text == said(80)
        assert router.told.empty()


async def test_a_router_without_a_scheduler_is_up_and_says_so():
    with cluster() as running:
        port = free_port()
        running.start_router(port, scheduler=f"127.0.0.1:{free_port()}")
        async with open_channel(f"127.0.0.1:{port}") as channel:
            await Health(channel).becomes(serving=False)
            alive = await HealthStub(channel).Check(HealthCheckRequest(service="liveness"))
            assert alive.status == HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await GenerationServiceStub(channel).Complete(asked(1))
            assert info.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_scheduler_that_is_told_to_stop_is_not_serving_and_finishes_its_live_requests():
    with cluster(step_ms=20) as running:
        async with watched(running) as (stub, router, scheduler):
            stream = stub.Generate(asked(60))
            text = (await stream.read()).outputs[0].text
            stopping = asyncio.create_task(asyncio.to_thread(running.scheduler.stop))
            await scheduler.becomes(serving=False)
            await router.becomes(serving=False)
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await stub.Complete(asked(1))
            assert info.value.code() is grpc.StatusCode.UNAVAILABLE
            assert text + await text_of(stream) == said(60)
            await stopping
            running.start_scheduler()
            await router.becomes(serving=True)


@pytest.mark.parametrize(
    "options", [("--drain-delay-s", "60"), pytest.param(("--drain-grace-s", "60"), marks=pytest.mark.long)]
)
async def test_ctrl_c_ends_a_router_at_once_while_it_still_takes_calls_and_while_it_drains(options):
    with cluster(*options, step_ms=20) as running:
        ((port, service),) = running.routers.items()
        async with open_channel(running.target) as channel:
            health, stream = Health(channel), GenerationServiceStub(channel).Generate(asked(5000))
            await health.becomes(serving=True)
            await stream.read()
            service.process.send_signal(signal.SIGTERM)
            await health.becomes(serving=False)
            service.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(service.process.wait, WITHIN_S) == 1
            del running.routers[port]
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await text_of(stream)
            assert info.value.code() is grpc.StatusCode.UNAVAILABLE


class Balancer:
    """Spreads connections, not calls: the first goes to the first target, the next to the next."""

    def __init__(self, ports: list[int]) -> None:
        self.num_connections = 0
        self._ports = itertools.cycle(ports)

    async def start(self) -> int:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return server.sockets[0].getsockname()[1]

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        back, forth = await asyncio.open_connection("127.0.0.1", next(self._ports))
        with contextlib.suppress(asyncio.CancelledError):  # at the end of the test
            await asyncio.gather(pass_on(reader, forth), pass_on(back, writer))


async def test_an_aged_connection_keeps_its_stream_while_new_calls_go_to_another_router():
    age = ("--max-connection-age-s", "1", "--max-connection-age-grace-s", "60")
    with cluster(*age, num_routers=2, step_ms=20) as running:
        balancer = Balancer([*running.routers])
        async with open_channel(f"127.0.0.1:{await balancer.start()}") as channel:
            stub = GenerationServiceStub(channel)
            stream = stub.Generate(asked(150))  # three seconds
            text = (await stream.read()).outputs[0].text
            while channel.get_state() is grpc.ChannelConnectivity.READY:
                await asyncio.sleep(0.01)
            first, second = running.routers.values()
            with first.suspended():  # only the other one can answer now
                assert (await stub.Complete(asked(3), timeout=WITHIN_S)).outputs[0].text == said(3)
            assert balancer.num_connections == 2
            assert text + await text_of(stream) == said(150)
            assert second.process.poll() is None


def test_connections_do_not_age_by_default_and_their_grace_is_at_least_that_of_the_drain():
    assert RouterSettings(model="m").connection_age_options == []
    with pytest.raises(
        ValueError, match=r"max_connection_age_grace_s \(10\) is less than drain_grace_s \(30\): make it"
    ):
        RouterSettings(model="m", max_connection_age_s=60, max_connection_age_grace_s=10)
