"""A full queue says when there will be room: at the rate at which it empties, behind those who were refused before."""

import pytest
from fakes import FakeWorker, control_plane, request
from scheduler_by_hand import make, step, submit
from test_control_plane import refusal_of

from scheduler.admission import QueueFull
from scheduler.outflow import Outflow


def fill(core, now=0.0, **options) -> float:
    """Submits until the queue is full; the delay of the refusal."""
    while True:
        try:
            submit(core, 4, max_tokens=1, now=now, **options)
        except QueueFull as full:
            return full.retry_s


def drain(core, start: int, seconds: int, per_second: int) -> None:
    """One step, and with it one request, leaves after the other."""
    for now in range(start, start + seconds):
        for _ in range(per_second):
            step(core, now=float(now))
            submit(core, 4, max_tokens=1, now=float(now))


def test_before_anything_is_known_a_second_is_told():
    core = make(max_waiting_requests=5)
    assert [fill(core), fill(core)] == [1.0, 2.0]


@pytest.mark.parametrize(("per_second", "delay_s"), [(4, 0.25), (1, 1.0)])
def test_the_delay_is_the_time_in_which_one_leaves(per_second, delay_s):
    core = make(max_num_seqs=1, max_waiting_requests=20)
    fill(core)
    drain(core, 1, 40, per_second)
    assert fill(core, now=41.0) == pytest.approx(delay_s, rel=0.15)


def test_who_is_refused_later_comes_behind_who_was_before():
    core = make(max_num_seqs=1, max_waiting_requests=20)
    fill(core)
    drain(core, 1, 40, per_second=1)
    delays = [fill(core, now=41.0) for _ in range(4)]
    assert delays == pytest.approx([1, 2, 3, 4], rel=0.15)
    drain(core, 41, 3, per_second=1)
    assert fill(core, now=44.0) == pytest.approx(2, rel=0.3), "three have had their time since"


def test_tokens_are_told_by_the_tokens_that_leave():
    core = make(max_num_seqs=1, max_waiting_tokens=80)
    fill(core)
    drain(core, 1, 40, per_second=2)
    with pytest.raises(QueueFull) as info:
        submit(core, 40, now=41.0)
    assert info.value.retry_s == pytest.approx(40 / 8, rel=0.15)


def test_idle_hours_do_not_count():
    core = make(max_num_seqs=1, max_waiting_requests=20)
    fill(core)
    drain(core, 1, 40, per_second=4)
    while core.num_live:
        step(core, now=41.0)
    assert fill(core, now=7200.0) == pytest.approx(0.25, rel=0.1)


def test_a_queue_that_stands_still_is_told_as_such_and_never_for_more_than_a_minute():
    core = make(max_num_seqs=1, max_waiting_requests=20)
    fill(core)
    drain(core, 1, 10, per_second=4)
    delays = [fill(core, now=float(now)) for now in (20, 60, 200, 400)]
    assert delays == sorted(delays)
    assert delays[-1] == 60.0
    assert all(0.1 <= fill(core, now=401.0) <= 60.0 for _ in range(50))


def test_a_fast_queue_is_never_told_less_than_a_tenth_of_a_second():
    outflow = Outflow()
    outflow.note(0.0, 10, 0, 0)
    outflow.note(1.0, 10, 10_000, 0)
    assert outflow.refuse(1.0, 1, 0) == pytest.approx(0.1)


def test_one_tenant_can_not_fill_the_queue_for_all():
    core = make(max_num_seqs=1, max_waiting_requests=20, max_waiting_requests_per_tenant=5)
    fill(core, tenant="greedy")
    assert core.num_waiting == 5
    for _ in range(5):
        submit(core, 4, tenant="other")
    with pytest.raises(QueueFull, match="5 requests of this tenant"):
        submit(core, 4, tenant="other")
    for _ in range(5):
        step(core)  # what comes in makes room
    submit(core, 4, tenant="greedy")


def test_a_tenants_room_comes_at_its_share_of_the_rate():
    core = make(max_num_seqs=1, max_waiting_requests=40, max_waiting_requests_per_tenant=10)
    fill(core, tenant="small")
    fill(core, tenant="large", tenant_weight=3.0)
    for now in range(1, 41):
        step(core, now=float(now))
        for tenant, weight in (("small", 1.0), ("large", 3.0)):
            if core.queues.waiting.num_waiting_of(tenant) < 10:
                submit(core, 4, max_tokens=1, now=float(now), tenant=tenant, tenant_weight=weight)
    assert fill(core, now=41.0, tenant="small") == pytest.approx(4, rel=0.2)
    assert fill(core, now=41.0, tenant="large", tenant_weight=3.0) == pytest.approx(4 / 3, rel=0.2)


async def test_a_client_hears_the_delay():
    worker = FakeWorker()
    async with control_plane(worker, max_num_seqs=1, max_waiting_requests=1) as plane:
        worker.gate.clear()
        calls = [plane.generation.Generate(request(max_tokens=2))]
        await plane.until(lambda state: state.num_running == 1)
        calls.append(plane.generation.Generate(request(max_tokens=2)))
        await plane.until(lambda state: state.num_waiting == 1)
        delays = [(await refusal_of(plane.generation.Complete(request(max_tokens=2)))).retry_delay_ms for _ in range(3)]
        assert all(100 <= delay <= 60_000 for delay in delays)
        assert delays == sorted(delays)
        assert len(set(delays)) == 3, "each is told another time"
        worker.gate.set()
        for call in calls:
            async for _ in call:
                pass
