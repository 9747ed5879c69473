"""Several steps at once, each on other sequences: who is in which, that all are filled, and that nobody starves."""

import asyncio
from array import array
from collections import deque

import hypothesis.strategies as st
import pytest
from fakes import TEXT, FakeWorker, control_plane
from hypothesis import example, given, settings
from scheduler_by_hand import make, rows, submit
from scheduler_model import run

from protos.columns import unpack
from scheduler.beam import BeamParams
from scheduler.pacing import Pacing
from scheduler.plan import Plan, StepResult, to_request
from scheduler.scheduler import Scheduler
from scheduler.sequence import Progress


def wide(num_lanes: int, **options) -> Scheduler:
    core = make(**options)
    core.set_num_concurrent_steps(num_lanes)
    return core


def planned(core: Scheduler) -> list[Plan]:
    """Plans until there is nothing to plan, or no room for it."""
    plans = []
    while core.in_flight.num_free and (plan := core.schedule(0.0)).rows:
        core.check()
        plans.append(plan)
    return plans


def answer(core: Scheduler, plan: Plan, step_s: float = 0.0) -> None:
    num_samples = sum(len(row.samples) for row in plan.rows)
    core.update(plan, StepResult([7] * num_samples, [-0.5] * num_samples, step_s=step_s))
    core.check()


def numbers(plan: Plan) -> list[int]:
    return [row.group.number for row in plan.rows]


def test_decodes_are_dealt_over_the_steps_and_none_waits_for_a_token_in_flight():
    core = wide(2)
    for _ in range(4):
        submit(core, 4)
    (first,) = planned(core)
    assert numbers(first) == [1, 2, 3, 4], "prompts are not dealt"
    answer(core, first)
    second, third = planned(core)
    assert (numbers(second), numbers(third)) == ([1, 2], [3, 4])
    answer(core, second)
    (fourth,) = planned(core)
    assert rows(fourth) == [(1, 5, 1), (2, 5, 1)]
    assert unpack(to_request(fourth, 1).token_ids).tolist() == [7, 7]


def test_chunks_of_one_prompt_follow_each_other_at_once():
    core = wide(3, budget=4, max_num_seqs=4)
    submit(core, 12)
    assert [rows(plan) for plan in planned(core)] == [[(1, 0, 4)], [(1, 4, 4)], [(1, 8, 4)]]


def test_sequences_that_are_too_few_for_all_steps_at_one_share_are_spread_thinner():
    core = wide(3)
    for _ in range(4):
        submit(core, 4)
    (prompts,) = planned(core)
    answer(core, prompts)
    assert [numbers(plan) for plan in planned(core)] == [[1, 2], [3], [4]]


def test_those_that_come_in_together_do_not_stay_together():
    core = wide(2, budget=20)
    for _ in range(2):
        submit(core, 4)
    answer(core, planned(core)[0])
    one, two = planned(core)
    for _ in range(4):
        submit(core, 4)
    answer(core, one)
    (with_prompts,) = planned(core)
    assert numbers(with_prompts) == [1, 3, 4, 5, 6]
    answer(core, two)
    (two,) = planned(core)
    answer(core, with_prompts)
    (one,) = planned(core)
    answer(core, two)
    (two,) = planned(core)
    assert (numbers(one), numbers(two)) == ([1, 3, 4], [2, 5, 6])


def test_the_sequences_of_a_group_go_together():
    core = wide(2)
    submit(core, 4, beam=BeamParams(3))
    submit(core, 4, n=2)
    (prompts,) = planned(core)
    core.update(prompts, run(prompts))
    assert [numbers(plan) for plan in planned(core)] == [[1, 1, 1], [2, 2]]


def test_a_sequence_computed_again_in_chunks_does_not_wait_for_a_token_of_its_group_in_flight():
    core = wide(2, budget=8)
    submit(core, 4, n=2, progress=[Progress(array("i", [7] * 2)), Progress(array("i", [7] * 20))])
    prompt, both = planned(core)
    assert (rows(prompt), rows(both)) == ([(1, 0, 4)], [(1, 4, 2), (1, 4, 6)])
    answer(core, prompt)
    assert [rows(plan) for plan in planned(core)] == [[(1, 10, 7)]], "the other one has sampled"


def test_without_chunked_prefill_prompts_and_decodes_still_take_turns():
    core = wide(2, chunked_prefill=False, budget=8)
    for _ in range(2):
        submit(core, 4)
    answer(core, planned(core)[0])
    for _ in range(4):
        submit(core, 4)
    one, two = planned(core)
    assert (numbers(one), numbers(two)) == ([1], [3, 4])
    answer(core, one)
    assert [numbers(plan) for plan in planned(core)] == [[1, 2]]
    answer(core, two)
    assert [numbers(plan) for plan in planned(core)] == [[5, 6]]


def test_a_worker_that_works_at_another_number_of_steps_is_planned_for_so():
    core = wide(2)
    group = submit(core, 4)
    assert len(planned(core)) == 1
    core.requeue_running(in_order=True)
    core.set_num_concurrent_steps(1)
    first = core.schedule(0.0)
    assert core.in_flight.num_free == 0, "max_steps_in_flight is 1"
    assert group.live[0].num_expected_tokens == 5, "what is in flight is counted on"
    core.update(first, StepResult([7], [0.0]))
    core.schedule(0.0)
    core.requeue_running(in_order=True)
    core.set_num_concurrent_steps(3)
    assert [rows(plan) for plan in planned(core)] == [[(1, 0, 5)]]
    core.check()


def test_a_step_counts_for_the_share_of_the_worker_that_it_takes():
    core = wide(4, budget=128)
    submit(core, 128)
    (prompt,) = planned(core)
    answer(core, prompt, step_s=2.0)
    assert core.rates.prefill_tokens_per_s == 256
    core.note_swap(8, 2.0)
    assert core.rates.swap_blocks_per_s == 16


@settings(max_examples=30, deadline=None)
@example(2, [(0, 1, 1, False), (0, 1, 1, False), (1, 1, 1, False), (2, 1, 1, False)], 10, False)
@given(
    st.integers(2, 4),
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 20), st.integers(1, 2), st.booleans()), min_size=1, max_size=9
    ),
    st.integers(10, 30),
    st.booleans(),
)
def test_with_as_many_groups_as_lanes_no_lane_stays_empty_and_each_sequence_gets_a_token_in_time(
    num_lanes, arrivals, spare_budget, chunked
):
    """However they came, and whatever is said by the way: checked from when all have come, for as long as none ends."""
    core = wide(num_lanes, num_blocks=10_000, budget=90 + spare_budget, max_num_seqs=90, chunked_prefill=chunked)
    coming = deque(sorted(arrivals))
    in_flight: deque[Plan] = deque()
    settled, last_token = 0, {}
    for turn in range(24 + 3 * num_lanes**2):
        while coming and coming[0][0] <= turn:
            _, prompt, n, beam = coming.popleft()
            submit(core, prompt, n=n, max_tokens=1000, min_tokens=1000, beam=BeamParams(n) if beam else None)
        in_flight.extend(planned(core))
        groups = [group for group in core.queues.groups.values() if not coming and not group.prefilling]
        settled = settled + 1 if len(groups) == len(arrivals) else 0
        if settled > num_lanes**2:
            assert len(in_flight) == min(num_lanes, len(groups)), "a lane is empty"
            sizes = [len(set(numbers(plan))) for plan in in_flight]
            assert max(sizes) <= -(-len(groups) // num_lanes), "a step took more than its share"
        if in_flight:
            plan = in_flight.popleft()
            core.update(plan, run(plan))
            for row in plan.rows if settled > num_lanes**2 else ():
                gap = turn - last_token.get(row.sequence, turn)
                assert gap < 2 * num_lanes, "a sequence waited for more than its turn"
                last_token[row.sequence] = turn
    assert settled > num_lanes**2, "the test saw nothing"


# When the next step is planned, and what it takes


def test_as_long_as_the_worker_has_room_the_next_step_is_planned_at_once():
    pacing = Pacing(2, num_concurrent=2)
    pacing.add(Plan(1, num_beams=3), expected_s=1.0, now=10.0)
    assert pacing.next_plan_time() < 10.0
    pacing.add(Plan(2), expected_s=1.0, now=10.0)
    assert pacing.next_plan_time() is None
    pacing.pop(now=12.0)
    assert pacing.next_plan_time() < 12.0


@pytest.mark.parametrize(("num_concurrent", "stirs"), [(1, False), (2, True)])
def test_news_are_planned_for_at_once_where_the_worker_has_room_and_else_after_its_step(num_concurrent, stirs):
    pacing = Pacing(2, num_concurrent)
    pacing.add(Plan(1), expected_s=1.0, now=10.0)
    assert not pacing.stir(), "the loop does not rest"
    pacing.rest()
    assert pacing.next_plan_time() is None
    assert pacing.stir() is stirs
    assert (pacing.next_plan_time() is not None) is stirs
    assert not pacing.stir(), "it was told already"


def test_steps_beside_each_other_take_longer_than_they_are_apart():
    pacing = Pacing(3, num_concurrent=3)
    assert pacing.expected_s == 0.0
    for sent in range(3):
        pacing.add(Plan(sent), expected_s=1.0, now=float(sent))
    assert pacing.expected_s == 5.0, "three parts of a second for the first, and one more for each behind it"
    assert [pacing.pop(now=3.0), pacing.pop(now=4.0), pacing.pop(now=5.5)] == [3.0, 3.0, 3.5]


# Through the loop


class WideWorker(FakeWorker):
    """Reads steps while others wait for their answers.

    Attributes:
        num_answered: steps.
        most_in_flight: steps that were there at once.
    """

    num_answered = 0
    most_in_flight = 0

    async def Execute(self, requests, context):
        arrived: asyncio.Queue = asyncio.Queue()

        async def read() -> None:
            async for request in requests:
                assert -1 not in unpack(request.token_ids), "an unknown token"
                self.requests.append(request)
                self.most_in_flight = max(self.most_in_flight, len(self.requests) - self.num_answered)
                arrived.put_nowait(request)
            arrived.put_nowait(None)

        reader = asyncio.create_task(read())
        while (request := await arrived.get()) is not None:
            await self.gate.wait()
            self.num_answered += 1
            await context.write(self.answer(request))
        await reader


async def until_sent(worker: FakeWorker, num_steps: int) -> None:
    while len(worker.requests) < num_steps:
        await asyncio.sleep(0.005)


async def test_who_comes_while_steps_run_is_in_the_next_lane_at_once():
    worker = WideWorker(num_concurrent_steps=3)
    async with control_plane(worker, num_speculative_tokens=0) as plane:
        worker.gate.clear()
        calls = []
        for place in range(5):
            calls.append(asyncio.create_task(plane.text("p" * (place + 1), max_tokens=30)))
            await plane.until(lambda state, place=place: state.num_running + state.num_waiting == place + 1)
            await until_sent(worker, min(place + 1, 3))
        assert (await plane.state()).num_waiting == 2
        assert [len(unpack(request.request_ids)) for request in worker.requests] == [1, 1, 1]
        worker.gate.set()
        assert await asyncio.gather(*calls) == [TEXT[:30]] * 5
        assert worker.most_in_flight == 3


async def test_streams_go_on_at_a_worker_that_works_at_more_steps_than_the_one_before():
    worker = FakeWorker()
    async with control_plane(worker, num_speculative_tokens=0) as plane:
        calls = [asyncio.create_task(plane.text("p" * n, max_tokens=90)) for n in range(1, 5)]
        await until_sent(worker, 20)
        await plane.replace_worker(wide_worker := WideWorker(epoch=2, num_concurrent_steps=2))
        assert await asyncio.gather(*calls) == [(TEXT * 2)[:90]] * 4
        assert max(len(unpack(step.request_ids)) for step in worker.requests) == 4
        assert {len(unpack(step.request_ids)) for step in wide_worker.requests[-20:]} <= {1, 2}, "each has a share"
