"""Gaps between tokens, counted by hand."""

import gc
from array import array
from collections import defaultdict, deque
from itertools import pairwise

import pytest

from protos.histogram import Histogram
from scheduler.block_manager import BlockManager
from scheduler.config import SchedulerSettings
from scheduler.observer import Observer
from scheduler.plan import Plan, StepResult
from scheduler.scheduler import Scheduler
from scheduler.sequence import Progress
from scheduler.sessions import RouterSession, Sessions, Ticket


class Clockwork:
    """A scheduler whose steps take one second each, the first one up to second 1, and its observer.

    Attributes:
        token_times: when each request's tokens came.
    """

    def __init__(self, num_blocks: int = 64, num_swap_blocks: int = 0, num_lanes: int = 1, **options) -> None:
        self.now = 0.0
        self.observer = Observer(clock=lambda: self.now)
        self.sessions = Sessions(self.observer.added, self.observer.ended)
        policy = SchedulerSettings(
            **{"max_num_batched_tokens": 16, "max_num_seqs": 8, "watermark": 0, "num_speculative_tokens": 0} | options
        ).policy()
        self.core = Scheduler(policy, BlockManager(num_blocks, 4, num_swap_blocks))
        self.core.set_num_concurrent_steps(num_lanes)
        self.in_flight: deque[tuple[float, Plan]] = deque()
        self.num_submitted = 0
        self.token_times: dict[str, list[float]] = defaultdict(list)

    def submit(self, num_prompt_tokens: int, max_tokens: int, num_taken_up: int = 0) -> None:
        self.num_submitted += 1
        group = self.core.submit(
            request_id=f"r{self.num_submitted}",
            prompt_token_ids=array("i", [self.num_submitted] * num_prompt_tokens),
            n=1,
            max_tokens=max_tokens,
            now=self.now,
            progress=[Progress(array("i", [0] * num_taken_up))] if num_taken_up else None,
        )
        self.sessions.add(RouterSession("router"), self.num_submitted, group)

    def step(self) -> None:
        while self.core.in_flight.num_free and (plan := self.core.schedule(self.now)).rows:
            self.observer.planned(plan, self.now)
            self.in_flight.append((self.now, plan))
        began, plan = self.in_flight.popleft()
        self.now += 1
        num_samples = sum(len(row.samples) for row in plan.rows)
        outputs = self.core.update(plan, StepResult([0] * num_samples, [0.0] * num_samples))
        for new in outputs.new_tokens:
            self.token_times[new.group.request_id].append(self.now)
        begun = self.sessions.deliver_tokens(outputs.new_tokens)
        self.observer.stepped(plan, outputs, begun, self.core, self.now - began)
        for ticket in self.sessions.deliver_finished(outputs.finished):
            self.sessions.end(ticket, self.now)

    def run(self) -> None:
        while self.core.num_live:
            self.step()

    def true_gaps(self) -> list[float]:
        return [later - earlier for times in self.token_times.values() for earlier, later in pairwise(times)]

    def gaps(self) -> dict[float, int]:
        return _observed(self.observer.inter_token_s)


def _observed(histogram: Histogram) -> dict[float, int]:
    """How many observations lie in each bucket, by its bound."""
    counts = histogram.cumulative()
    bounds = [*histogram.bounds, float("inf")]
    rows = zip(bounds, counts, [0, *counts], strict=False)
    return {bound: count - before for bound, count, before in rows if count > before}


def test_tokens_that_come_together_are_one_gap():
    clockwork = Clockwork(num_speculative_tokens=3)
    clockwork.submit(4, max_tokens=9)
    clockwork.run()
    assert clockwork.observer.num_generated == 9
    # The prompt's one token again and again is guessed to follow, and does not: zeros do, and then are guessed.
    num_steps = len(clockwork.token_times["r1"])
    assert 2 < num_steps < 9
    assert clockwork.gaps() == {1: num_steps - 1}


def test_each_token_behind_the_first_is_one_gap():
    clockwork = Clockwork()
    clockwork.submit(4, max_tokens=3)
    clockwork.submit(4, max_tokens=5)
    clockwork.run()
    assert clockwork.gaps() == {1: 2 + 4}
    assert clockwork.observer.num_generated == 8


def test_beside_other_steps_the_gap_is_what_a_step_takes():
    clockwork = Clockwork(num_lanes=3)
    for _ in range(6):
        clockwork.submit(4, max_tokens=9)
    clockwork.run()
    true = clockwork.true_gaps()
    assert set(true) == {2, 3}, "two other steps are answered between two of a sequence, or one while they are two"
    assert sum(clockwork.gaps().values()) == len(true) == 6 * 8
    assert clockwork.observer.inter_token_s.sum == sum(true)


def test_an_idle_time_is_no_gap():
    clockwork = Clockwork()
    clockwork.submit(4, max_tokens=2)
    clockwork.run()
    clockwork.now += 100
    clockwork.submit(4, max_tokens=2)
    clockwork.run()
    assert clockwork.gaps() == {1: 2}


def test_queue_prefill_and_decode_add_up_to_the_whole():
    clockwork = Clockwork(max_num_seqs=1)
    clockwork.submit(4, max_tokens=3)
    clockwork.submit(40, max_tokens=4)
    clockwork.run()
    observer = clockwork.observer
    assert observer.queue_s.sum == 0 + 3
    assert observer.prefill_s.sum == 1 + 3, "40 tokens are three steps of 16 at most"
    assert observer.decode_s.sum == 2 + 3


def test_what_was_begun_elsewhere_is_waited_for_and_decoded_here_as_any_other():
    clockwork = Clockwork()
    clockwork.submit(4, max_tokens=5, num_taken_up=2)
    clockwork.run()
    observer = clockwork.observer
    assert (observer.queue_s.sum, observer.prefill_s.sum, observer.decode_s.sum) == (0, 1, 2)
    assert clockwork.gaps() == {1: 2}


def test_nothing_is_kept_of_a_request_that_has_ended_long_ago():
    clockwork = Clockwork()
    clockwork.submit(4, max_tokens=3)
    group = clockwork.sessions.find("r1").group
    clockwork.run()
    clockwork.sessions.purge(before=clockwork.now + 1)
    gc.collect()
    assert not [kept for kept in gc.get_objects() if type(kept) is Ticket and kept.group is group]


def test_for_a_lost_worker_no_request_is_blamed_that_took_the_blocks_at_another_time():
    clockwork = Clockwork()
    clockwork.submit(4, max_tokens=9)
    clockwork.step()
    ticket = clockwork.sessions.find("r1")
    ticket.group.preempted_by = "another"
    clockwork.observer.lost([ticket.group])
    assert [pause.by for pause in ticket.timeline.pauses] == [""]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_gap_over_a_pause_is_as_long_as_it_is(mode):
    clockwork = Clockwork(num_blocks=6, num_swap_blocks=6, prefix_caching=False, preemption_mode=mode)
    for num_prompt_tokens, max_tokens in ((6, 12), (5, 9), (6, 3), (3, 14)):
        clockwork.submit(num_prompt_tokens, max_tokens)
    clockwork.run()
    assert clockwork.core.num_preemptions > 1
    true = clockwork.true_gaps()
    assert max(true) > 3
    assert sum(clockwork.gaps().values()) == len(true) == 11 + 8 + 2 + 13
    assert clockwork.observer.inter_token_s.sum == sum(true)


def test_without_chunked_prefill_a_prompt_between_two_decodes_is_part_of_the_gap():
    clockwork = Clockwork(chunked_prefill=False)
    clockwork.submit(4, max_tokens=3)
    clockwork.step()
    clockwork.step()
    clockwork.submit(4, max_tokens=1)
    clockwork.run()
    # Tokens of the first one: at 1, at 2, and at 4, since the other's prompt takes the third second.
    assert clockwork.gaps() == {1: 1, 2.5: 1}
