"""The scheduler's front: what a router's messages do there, and what a router is told when it comes."""

import asyncio
import contextlib
import tempfile
import time

import grpc
import pytest
from fakes import FakeWorker, outputs_of, running, scripted, start_worker
from scheduler_by_hand import make
from test_session import HandRouter, plane_and_router, plane_and_two_routers

import scheduler.__main__ as scheduler_main
import scheduler.loop as scheduler_loop
from protos import session_pb2 as pb
from protos.columns import pack, unpack
from protos.errors import Refusal
from protos.rpc import SESSION_PROTOCOL_VERSION, dial, wait_for_serving
from protos.worker_pb2 import GetInfoResponse
from scheduler.config import SchedulerSettings
from scheduler.loop import SchedulerLoop
from scheduler.observer import Observer
from scheduler.server import SessionService
from scheduler.sessions import Sessions

CANCEL = pb.SessionRequest(cancel=pb.Cancel(handle=1))
STOP = pb.SessionRequest(stop_sequence=pb.StopSequence(handle=1, sequence_index=0, num_tokens=2))


async def test_a_sequence_ends_where_its_router_has_found_a_stop_string():
    worker = FakeWorker()
    async with plane_and_router(worker) as (plane, router):
        await router.open()
        await router.submit(max_tokens=150)
        await router.tokens(3)
        worker.gate.clear()
        await router.call.write(STOP)
        while not (ends := (await router.next("step_outputs")).step_outputs.finished):
            pass
        assert [(end.handle, end.sequence_index, end.status) for end in ends] == [(1, 0, pb.FINISH_STATUS_STOPPED)]
        assert ends[0].cumulative_logprob == 2 * -0.5, "of the two tokens that count"
        assert (await plane.state()).num_running == 0
        worker.gate.set()
        router.call.cancel()


async def test_a_stop_string_that_is_told_of_a_sequence_that_has_ended_changes_nothing():
    async with plane_and_router(FakeWorker()) as (_, router):
        await router.open()
        await router.submit(max_tokens=2)
        await router.tokens(2)
        await router.call.write(STOP)
        await router.submit(handle=2, request_id="r2", max_tokens=2)
        while (rows := outputs_of(await router.next("step_outputs")))[-1][2] < 1:
            assert {handle for handle, *_ in rows} == {2}
        router.call.cancel()


@pytest.mark.parametrize(
    "search", [pb.BeamSearch(width=0, early_stopping=pb.EARLY_STOPPING_TRUE), pb.BeamSearch(width=4)], ids=str
)
async def test_a_beam_search_without_a_width_or_an_end_is_refused(search):
    async with plane_and_router(FakeWorker()) as (_, router):
        await router.open()
        await router.submit(beam_search=search)
        rejected = (await router.next("rejected")).rejected
        assert rejected.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert rejected.message == "beam_search needs a width and a known early_stopping"
        router.call.cancel()


async def test_each_request_that_is_asked_for_has_its_place_and_one_that_is_not_live_none():
    worker = FakeWorker()
    async with plane_and_router(worker, max_num_seqs=1) as (plane, router):
        await router.open()
        worker.gate.clear()
        begin = time.monotonic()
        for handle in (1, 2, 3):
            await router.submit(handle, f"r{handle}", max_tokens=3)
        await plane.until(lambda state: (state.num_running, state.num_waiting) == (1, 2))
        there = time.monotonic()
        places = await located(router, 1, 99, 3, 2)
        waiting = pb.STATUS_WAITING
        assert places == [(pb.STATUS_RUNNING, -1), (pb.STATUS_UNSPECIFIED, -1), (waiting, 1), (waiting, 0)]
        asked = time.monotonic()
        waited_s = (await router.explain("r3")).waited_ms / 1e3
        assert asked - there <= waited_s <= time.monotonic() - begin
        with pytest.raises(grpc.aio.AioRpcError, match="no live request is called 'nobody'") as unknown:
            await router.explain("nobody")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        worker.gate.set()
        router.call.cancel()


async def test_routers_hear_what_another_worker_says_of_the_model_where_it_differs():
    async with plane_and_router(FakeWorker(num_blocks=64)) as (plane, router):
        assert (await router.open()).welcome.model.num_blocks == 64
        await plane.replace_worker(FakeWorker(epoch=2, num_blocks=128))
        assert (await router.next("model")).model.num_blocks == 128
        router.call.cancel()


async def test_how_fast_a_worker_swaps_is_known_from_what_it_says_of_itself():
    async with plane_and_router(FakeWorker(num_cpu_blocks=8)) as (plane, _):
        assert (await plane.state()).swap_blocks_per_s == pytest.approx(10_000), "0.1 ms for each"


async def test_who_is_given_up_hears_what_became_of_the_last_worker():
    worker = FakeWorker(explode=1)
    async with plane_and_router(worker, max_failed_steps=1) as (_, router):
        await router.open()
        await router.submit(max_tokens=3)
        message = (await router.next("rejected")).rejected.message
        assert message.startswith("request 'r' is given up: workers lost in a row while they computed it: 1, ")
        assert "(INTERNAL: " in message
        router.call.cancel()


@pytest.mark.parametrize("end", [CANCEL, STOP], ids=["cancelled", "stopped"])
async def test_who_waits_takes_the_place_of_who_has_left_beside_the_step_that_runs(end):
    """The worker works at two steps at once, and two sequences may not run."""
    worker = FakeWorker(num_concurrent_steps=2)
    async with plane_and_router(worker, max_num_seqs=1) as (plane, router):
        await router.open()
        worker.gate.clear()
        for handle in (1, 2):
            await router.submit(handle, f"r{handle}", max_tokens=3)
            await router.next("accepted")
        await plane.until(lambda state: (state.num_running, state.num_waiting) == (1, 1))
        await router.call.write(end)
        await plane.until(lambda state: (state.num_running, state.num_waiting) == (1, 0))
        worker.gate.set()
        router.call.cancel()


async def located(router: HandRouter, *handles: int) -> list[tuple[int, int]]:
    answer = await router._stub.Locate(pb.LocateRequest(router_id="by-hand", handles=pack(handles)))
    return list(zip(unpack(answer.statuses), unpack(answer.positions), strict=True))


async def test_an_end_can_be_told_again_for_as_long_as_the_lease_of_its_router(monkeypatch):
    monkeypatch.setattr(scheduler_loop, "_RETENTION_S", 0.0)
    async with plane_and_two_routers(FakeWorker(), lease_s=60.0) as (_, router, other):
        await router.submit(max_tokens=3)
        assert len(await router.tokens(3)) == 3
        router.call.cancel()
        await other.submit(request_id="later", max_tokens=3)
        assert len(await other.tokens(3)) == 3
        welcome = (await router.open(resume=[pb.Resume(handle=1, num_tokens=pack([2]))])).welcome
        assert not welcome.unknown_handles
        (told,) = outputs_of(await router.next("step_outputs"))
        assert told == (1, 0, 2, [scripted(0, 2)])


@pytest.mark.parametrize("end", ["finished", "cancelled"])
async def test_a_scheduler_that_drains_ends_with_its_last_request(end):
    worker = FakeWorker()
    with tempfile.TemporaryDirectory(prefix="pw") as directory:
        server = await start_worker(worker, f"unix:{directory}/w")
        wires = {"listen": f"unix:{directory}/s", "worker": f"unix:{directory}/w"}
        settings = SchedulerSettings(**wires, drain_grace_s=1e6)
        async with (
            dial(settings.listen) as channel,
            running(lambda stop: scheduler_main.serve(settings, stop)) as stop,
        ):
            await wait_for_serving(channel)
            router = HandRouter(channel)
            await router.open()
            worker.gate.clear()
            await router.submit(max_tokens=3)
            await router.next("accepted")
            stop.set()
            await router.next("drain")
            await router.submit(handle=2, request_id="late")
            assert (await router.next("rejected")).rejected.reason == "DRAINING"
            if end == "finished":
                worker.gate.set()
                assert len(await router.tokens(3)) == 3
            else:
                await router.call.write(CANCEL)
        worker.gate.set()
        await server.stop(0)


async def test_before_the_first_worker_there_is_nothing_to_tell():
    sessions = Sessions(lambda ticket: None, lambda ticket: None)
    loop = SchedulerLoop(SchedulerSettings(), sessions, Observer())
    service = SessionService(SchedulerSettings(), loop, sessions, epoch=1)
    for answer in (
        service.GetState(pb.GetStateRequest(), None),
        service.Locate(pb.LocateRequest(), None),
        service.Explain(pb.ExplainRequest(), None),
    ):
        with pytest.raises(Refusal, match="no worker is ready yet"):
            await answer


class Call:
    """The server's side of a session that says Hello and nothing more."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self.said.put_nowait(pb.SessionRequest(hello=pb.Hello(protocol_version=SESSION_PROTOCOL_VERSION)))
        self.told: asyncio.Queue[pb.SessionResponse] = asyncio.Queue()

    async def read(self) -> pb.SessionRequest:
        return await self.said.get()

    async def write(self, message: pb.SessionResponse) -> None:
        self.told.put_nowait(message)


@pytest.mark.parametrize("drains", [False, True])
async def test_a_router_that_comes_is_told_at_once_how_things_stand(drains):
    sessions, settings = Sessions(lambda ticket: None, lambda ticket: None), SchedulerSettings(drain_grace_s=7.5)
    loop = SchedulerLoop(settings, sessions, Observer())
    loop.info, loop.core = GetInfoResponse(), make()
    loop.ready.set()
    service, call = SessionService(settings, loop, sessions, epoch=1), Call()
    if drains:
        service.drain(settings.drain_grace_s)
    session = asyncio.create_task(service.Session(None, call))
    kinds = ["welcome", "drain", "load"] if drains else ["welcome", "load"]
    messages = [await call.told.get() for _ in kinds]
    assert [message.WhichOneof("message") for message in messages] == kinds
    assert [message.drain.grace_ms for message in messages if message.HasField("drain")] == [7500] * drains
    session.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await session
