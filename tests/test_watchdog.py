"""Health by progress: steps that do not return, workers that do not answer, and requests that are not planned."""

import asyncio
import logging
import time

import pytest
from fakes import TEXT, FakeWorker, control_plane, request
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

import scheduler.__main__ as scheduler_main
import scheduler.loop as scheduler_loop
import scheduler.server as scheduler_server
from protos.patience import Patience
from protos.rpc import wait_for_serving
from scheduler.plan import Plan
from scheduler.scheduler import Scheduler
from scheduler.watchdog import Watchdog

STALL_S = 0.25


async def test_watchers_learn_of_a_step_that_does_not_return_and_new_requests_wait():
    worker = FakeWorker()
    async with control_plane(worker, health_stall_s=STALL_S, num_speculative_tokens=0) as plane:
        watch = HealthStub(plane.channel).Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        worker.gate.clear()
        call = asyncio.ensure_future(plane.text(max_tokens=40))
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        later = asyncio.ensure_future(plane.text("q", max_tokens=3))
        await plane.until(lambda state: state.num_running + state.num_waiting == 2)
        worker.gate.set()
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        assert [await call, await later] == [TEXT[:40], "The"]
        assert len(worker.requests) == 40, "the step was not given up and computed twice"
        watch.cancel()


async def test_routers_learn_at_once_of_a_stall_and_of_its_end(monkeypatch):
    """Without this they would look at the scheduler's health and load in a while."""
    monkeypatch.setattr(scheduler_main, "_HEALTH_INTERVAL_S", None)
    monkeypatch.setattr(scheduler_server, "_LOAD_INTERVAL_S", None)
    worker = FakeWorker()
    async with control_plane(worker, health_stall_s=STALL_S) as plane:
        watch = HealthStub(plane.channel).Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        worker.gate.clear()
        call = asyncio.ensure_future(plane.text(max_tokens=3))
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        worker.gate.set()
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        assert await call == "The"
        watch.cancel()


async def test_a_request_that_leaves_a_stalled_step_does_not_make_it_healthy():
    worker = FakeWorker()
    async with control_plane(worker, health_stall_s=STALL_S) as plane:
        worker.gate.clear()
        call = plane.generation.Generate(request(max_tokens=3))
        await plane.until(lambda state: not state.serving)
        call.cancel()
        await plane.until(lambda state: state.block_pool.num_held == 0)
        assert not (await plane.state()).serving
        worker.gate.set()
        await wait_for_serving(plane.channel)


async def test_requests_that_wait_while_nothing_is_planned_are_logged_with_the_state_and_planned_again(
    monkeypatch, caplog
):
    plan, wedged = Scheduler.schedule, True

    def schedule(core: Scheduler, now: float) -> Plan:
        return Plan(step_id=0) if wedged else plan(core, now)

    async with control_plane(health_stall_s=STALL_S) as plane:
        monkeypatch.setattr(Scheduler, "schedule", schedule)
        call = asyncio.ensure_future(plane.text(max_tokens=3))
        await plane.until(lambda state: not state.serving)
        (line,) = [record for record in caplog.records if "no progress" in record.message]
        assert line.levelno == logging.ERROR
        assert line.message == "no progress: requests wait, and no step is planned"
        assert (line.waiting, line.running, line.free_blocks, line.blocks) == (1, 0, 64, 64)
        assert line.request == "nothing is known to be in its way: the next step looks at it"
        wedged = False
        assert await call == "The"
        await wait_for_serving(plane.channel)


async def test_a_step_that_does_not_return_is_logged_with_its_size(caplog):
    worker = FakeWorker()
    async with control_plane(worker, health_stall_s=STALL_S) as plane:
        worker.gate.clear()
        call = asyncio.ensure_future(plane.text("hello", max_tokens=3))
        await plane.until(lambda state: not state.serving)
        (line,) = [record for record in caplog.records if "no progress" in record.message]
        assert line.message.startswith("no progress: the worker has not answered a step for ")
        assert (line.step, line.step_tokens, line.running) == (worker.requests[0].step_id, 5, 1)
        worker.gate.set()
        assert await call == "The"


class Worker:
    """The worker of a scheduler loop and its steps, set by the test."""

    def __init__(self) -> None:
        self.connected, self.stall, self.num_answered = True, None, 0
        self.core, self.info, self.in_flight = None, object(), None
        self.silence: str | None = None
        self.num_asked = 0

    async def look_at_worker(self, timeout_s: float) -> str | None:
        self.num_asked += 1
        return self.silence


class Steps:
    def __init__(self, expected_s: float) -> None:
        self.expected_s = expected_s


@pytest.mark.parametrize(("expected_s", "num_looks"), [(0.0, 5), (1.2, 5), (2.5, 10)])
async def test_a_step_may_take_four_times_its_expected_time_if_that_is_longer(expected_s, num_looks):
    worker = Worker()
    worker.in_flight = Steps(expected_s)
    watchdog = Watchdog(worker, stall_s=5.0)  # looks once a second
    assert [await watchdog.look() for _ in range(num_looks)] == [None] * num_looks
    assert await watchdog.look() == f"the worker has not answered a step for {num_looks} s"
    worker.num_answered += 1
    assert await watchdog.look() is None
    assert worker.num_asked == 0, "a worker that computes is not asked"


async def test_an_idle_worker_is_asked_and_its_silence_is_a_stall():
    worker = Worker()
    watchdog = Watchdog(worker, stall_s=5.0)
    assert await watchdog.look() is None
    worker.silence = "DEADLINE_EXCEEDED"
    assert await watchdog.look() == "the worker does not answer a health check (DEADLINE_EXCEEDED)"
    assert worker.num_asked == 2


async def test_connections_to_a_worker_that_ends_every_stream_at_once_are_spaced_out():
    times = []

    class Hasty(FakeWorker):
        async def GetInfo(self, request, context):
            times.append(time.monotonic())
            return await super().GetInfo(request, context)

        async def Execute(self, requests, context):
            return

    async with control_plane() as plane:
        await plane.replace_worker(Hasty(epoch=2))
        while len(times) < 6:
            await asyncio.sleep(0.01)
        assert times[5] - times[0] > 0.45
        await plane.replace_worker(FakeWorker(epoch=3))
        await wait_for_serving(plane.channel)


@pytest.mark.parametrize("num_in_flight", [1, 2])
async def test_a_step_that_is_not_answered_in_time_is_sent_again_to_the_next_worker(num_in_flight):
    worker = FakeWorker()
    async with control_plane(worker, step_timeout_s=0.3, max_steps_in_flight=num_in_flight) as plane:
        worker.gate.clear()
        text = asyncio.ensure_future(plane.text(max_tokens=9))
        while len(worker.requests) < 2:
            await asyncio.sleep(0.005)
        worker.gate.set()
        assert await text == TEXT[:9]


class NotedPatience(Patience):
    """Tells how often a wait has begun, and whether one lasts."""

    last: "NotedPatience"

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        NotedPatience.last = self
        self.num_begun = 0
        self.waits = False

    def begin(self) -> None:
        super().begin()
        self.num_begun += 1
        self.waits = True

    def end(self) -> None:
        super().end()
        self.waits = False


@pytest.mark.parametrize("num_in_flight", [1, 2])
async def test_each_step_may_take_its_time_and_a_worker_without_one_has_all_time(num_in_flight, monkeypatch):
    monkeypatch.setattr(scheduler_loop, "Patience", NotedPatience)
    async with control_plane(max_steps_in_flight=num_in_flight, num_speculative_tokens=0) as plane:
        assert await plane.text(max_tokens=100) == (TEXT * 3)[:100]
        assert NotedPatience.last.num_begun >= 100
        assert not NotedPatience.last.waits
