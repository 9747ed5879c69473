"""Who goes first, and that nobody waits for ever: the bound that `scheduler/waiting_queue.py` proves."""

from collections import deque
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from scheduler_by_hand import make, step, submit
from scheduler_model import run

from scheduler.policy import MAX_PRIORITY, MIN_PRIORITY, PreemptionMode
from scheduler.preemption import Rates
from scheduler.sequence import Status


def test_a_higher_priority_goes_first_and_arrival_decides_among_equals():
    core = make(max_num_seqs=1)
    low, first, second, high = (submit(core, 2, max_tokens=1, priority=p) for p in (-1, 0, 0, 1))
    order = []
    while core.num_live:
        order += [row.group for row in step(core)[0].rows]
    assert order == [high, first, second, low]


def test_a_level_of_priority_is_worth_aging_s_of_waiting():
    core = make(max_num_seqs=1, aging_s=10.0)
    submit(core, 2, max_tokens=3)
    step(core)
    old = submit(core, 2, max_tokens=1, now=0.0)
    late = submit(core, 2, max_tokens=1, now=10.5, priority=1)
    early = submit(core, 2, max_tokens=1, now=9.5, priority=1)
    order = []
    while core.num_live:
        order += [row.group for row in step(core)[0].rows if row.start == 0]
    assert order == [early, old, late]


def test_a_priority_outside_the_range_is_refused():
    with pytest.raises(ValueError, match="priority"):
        submit(make(), 2, priority=MAX_PRIORITY + 1)


def test_the_head_of_the_queue_is_not_overtaken_by_one_that_would_fit():
    core = make(num_blocks=6)
    submit(core, 14, max_tokens=4)
    large, small = submit(core, 10), submit(core, 1)
    step(core)
    step(core)
    assert large.status is small.status is Status.WAITING


@settings(max_examples=150, deadline=None)
@given(
    others=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 8), st.integers(1, 3), st.integers(MIN_PRIORITY, MAX_PRIORITY)),
        max_size=12,
    ),
    arrivals_each_step=st.integers(1, 3),
    priority=st.integers(MIN_PRIORITY, MAX_PRIORITY),
    mode=st.sampled_from(PreemptionMode),
    chunked=st.booleans(),
    depth=st.integers(1, 3),
    lanes=st.booleans(),
    rates=st.sampled_from([Rates(), Rates(prefill_token_s=1.0, decode_step_s=0.001)]),  # all join, or none does
)
def test_however_many_come_with_a_higher_priority_a_group_ends_within_the_proven_number_of_steps(
    others, arrivals_each_step, priority, mode, chunked, depth, lanes, rates
):
    aging_s = 0.5
    core = make(
        num_blocks=9,
        budget=8,
        max_num_seqs=4,
        num_swap_blocks=6,
        aging_s=aging_s,
        preemption_mode=mode,
        chunked_prefill=chunked,
        max_steps_in_flight=depth,
    )
    if lanes:
        core.set_num_concurrent_steps(depth)
    in_flight = deque()
    for prompt, max_tokens, n, level in others:
        submit(core, prompt, max_tokens=max_tokens, n=n, priority=level)
    group = submit(core, 5, max_tokens=2, priority=priority)
    final_s = (MAX_PRIORITY - priority) * aging_s  # from here on nobody gets ahead of it
    now, bound = 0.0, None
    while group.live:
        now += 1.0
        for _ in range(arrivals_each_step):  # an adversary: always of the highest priority
            if core.num_waiting < 90:
                submit(core, 3, max_tokens=2, now=now, priority=MAX_PRIORITY)
        if bound is None and now >= final_s:
            ahead = [other for other in core.queues.groups.values() if other.rank < group.rank]
            holders = [*core.queues.running, *core.queues.swapped]
            work = {other.number: other.num_prompt_tokens + other.max_tokens + 1 for other in ahead + holders}
            work[group.number] = group.num_prompt_tokens + group.max_tokens + 1
            bound = core.num_steps + (2 if chunked else 4) * depth * sum(work.values()) + 1
        core.rates = replace(rates)
        plan = core.schedule(now)
        core.check()
        assert bound is None or core.num_steps <= bound, "it starved"
        if plan.rows:
            in_flight.append(plan)
        if in_flight and (not plan.rows or len(in_flight) == depth):
            plan = in_flight.popleft()
            core.update(plan, run(plan))
