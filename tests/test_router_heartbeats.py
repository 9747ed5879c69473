"""Heartbeats: who waits on a silent stream hears where it is; a busy stream carries none."""

import asyncio
import contextlib

import grpc
import pytest
from fakes import TEXT, ControlPlane, FakeWorker, control_plane, request

from protos import session_pb2
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1 import introspection_pb2
from router.heartbeats import Heartbeats

WAITING = introspection_pb2.REQUEST_STATUS_WAITING
RUNNING = introspection_pb2.REQUEST_STATUS_RUNNING


async def until_beat(call, status: int, position: int | None = None) -> pb.Heartbeat:
    """Reads heartbeats up to one that says so; the test's own timeout bounds the wait."""
    while True:
        message = await call.read()
        assert message.HasField("heartbeat")
        assert not message.outputs
        beat = message.heartbeat
        if beat.status == status and (beat.queue_position if beat.HasField("queue_position") else None) == position:
            return beat


async def rest(call) -> list[pb.GenerateResponse]:
    """All messages that are still to come."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def start(plane: ControlPlane, num_before: int):
    """One more request that waits, behind `num_before`."""
    call = plane.generation.Generate(request(max_tokens=5))
    await plane.until(lambda state: state.num_waiting == num_before + 1)
    return call


async def test_a_stream_that_waits_hears_its_falling_position_and_then_its_text_alone():
    worker = FakeWorker()
    async with control_plane(worker, router={"heartbeat_s": 0.05}, max_num_seqs=1) as plane:
        worker.gate.clear()
        running = plane.generation.Generate(request(max_tokens=5))
        await plane.until(lambda state: state.num_running == 1)
        first, second = await start(plane, 0), await start(plane, 1)
        await until_beat(running, RUNNING)  # its prompt is computed for long
        await until_beat(first, WAITING, 0)
        beat = await until_beat(second, WAITING, 1)
        assert beat.waited_ms >= 50
        first.cancel()
        assert (await until_beat(second, WAITING, 0)).waited_ms > beat.waited_ms
        worker.gate.set()
        messages = await rest(second)
        assert "".join(output.text for message in messages for output in message.outputs) == TEXT[:5]
        begun = next(place for place, message in enumerate(messages) if message.outputs)
        assert not any(message.HasField("heartbeat") for message in messages[begun:])
        await rest(running)


async def test_what_is_only_sent_whole_has_heartbeats_meanwhile():
    worker = FakeWorker()
    async with control_plane(worker, router={"heartbeat_s": 0.05}) as plane:
        wanted = request(max_tokens=5)
        wanted.sampling.best_of = 2
        worker.gate.clear()
        call = plane.generation.Generate(wanted)
        await until_beat(call, RUNNING)
        worker.gate.set()
        assert [output.text for message in await rest(call) for output in message.outputs] == [TEXT[:5]]


async def test_a_lost_scheduler_does_not_silence_them():
    worker = FakeWorker()
    async with control_plane(worker, router={"heartbeat_s": 0.05}) as plane:
        worker.gate.clear()
        call = plane.generation.Generate(request(max_tokens=5))
        await until_beat(call, RUNNING)
        await plane.cut_sessions(refuse=True)
        await until_beat(call, introspection_pb2.REQUEST_STATUS_UNSPECIFIED)
        plane.proxy.refusing = False
        await until_beat(call, RUNNING)
        worker.gate.set()
        await rest(call)


async def test_zero_is_none():
    worker = FakeWorker()
    async with control_plane(worker, router={"heartbeat_s": 0}) as plane:
        worker.gate.clear()
        call = plane.generation.Generate(request(max_tokens=5))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                pytest.fail(f"{await call.read()}")
        await plane.until(lambda state: state.num_running == 0)  # the read was cancelled, and the call with it
        worker.gate.set()


class Link:
    """A scheduler at which all wait, each behind those with smaller handles."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    async def locate(self, handles: list[int]) -> list[tuple[int, int]]:
        self.asked.append(handles)
        return [(session_pb2.STATUS_WAITING, handle) for handle in handles]


class Live:
    """A request as far as its heart is concerned."""

    total_ms = 7.0

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.num_taken = 0
        self.beats: list[pb.Heartbeat] = []

    def beat(self, heartbeat: pb.Heartbeat) -> None:
        self.beats.append(heartbeat)


async def test_only_silent_streams_are_asked_after_all_at_once(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    link = Link()
    hearts = Heartbeats(link, silence_s=10)  # type: ignore[arg-type]
    busy, silent, late = Live(1), Live(2), Live(3)
    with hearts.over(busy), hearts.over(silent), hearts.over(late):  # type: ignore[arg-type]
        for now in (102.5, 105.0, 107.5):
            busy.num_taken += 1
            await hearts.look(now)
        assert link.asked == []
        late.num_taken += 1
        for now in (110.0, 112.5, 115.0):
            busy.num_taken += 1
            await hearts.look(now)
        assert link.asked == [[2]]
        assert silent.beats == [pb.Heartbeat(status=WAITING, queue_position=2, waited_ms=7)]
        await hearts.look(120.0)
        assert link.asked[1:] == [[2, 3]]
        assert len(silent.beats) == 2, "the next one comes as late as the first"
    await hearts.look(1000.0)
    assert len(link.asked) == 2, "streams that have ended are not looked at"
    assert not busy.beats


async def test_output_that_comes_while_a_stream_is_asked_after_is_sign_of_life_enough(monkeypatch):
    class Answering(Link):
        async def locate(self, handles: list[int]) -> list[tuple[int, int]]:
            served.num_taken += 1
            return await super().locate(handles)

    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    hearts = Heartbeats(Answering(), silence_s=10)  # type: ignore[arg-type]
    served, silent = Live(1), Live(2)
    with hearts.over(served), hearts.over(silent):  # type: ignore[arg-type]
        await hearts.look(110.0)
    assert (len(served.beats), len(silent.beats)) == (0, 1)
