"""Tenants: each is served by its weight while several wait, within the bound that `scheduler/fair_queue.py` proves."""

import itertools
from collections import Counter, deque

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from scheduler_by_hand import make, step, submit
from scheduler_model import run

from scheduler.admission import QueueFull
from scheduler.explain import explain
from scheduler.fair_queue import OUTPUT_TOKEN, PROMPT_TOKEN
from scheduler.policy import PreemptionMode
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup
from scheduler.waiting_queue import WaitingQueue


class Service:
    """What each tenant got, counted from the plans: a prompt when it first comes in, output as it is sampled.

    Attributes:
        booked: U of the proof: the most output of a tenant that was still to come, and the largest group beside.
    """

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self.booked = self.largest = 0.0
        self.admitted: list[SequenceGroup] = []

    def count(self, core: Scheduler, plan) -> None:
        for row in plan.rows:
            group = row.group
            if group.num_preemptions == 0 and group not in self.admitted:
                self.admitted.append(group)
                self.of[group.tenant] += PROMPT_TOKEN * (group.num_prompt_tokens - row.start)
            self.of[group.tenant] += OUTPUT_TOKEN * len(row.samples)
        for group in core.queues.groups.values():
            work = PROMPT_TOKEN * group.num_prompt_tokens + OUTPUT_TOKEN * group.max_tokens * len(group.sequences)
            self.largest = max(self.largest, work)
        due: Counter[str] = Counter()
        weights = {}
        for group in [*core.queues.running, *core.queues.swapped]:
            due[group.tenant] += group.max_tokens * len(group.live)
            weights[group.tenant] = group.tenant_weight
        for name, num_tokens in due.items():
            self.booked = max(self.booked, (self.largest + OUTPUT_TOKEN * num_tokens) / weights[name])


def admissions(core: Scheduler, num: int) -> list[str]:
    """The tenants of the next groups that come in."""
    return [group.tenant for group in admitted(core, num)]


def admitted(core: Scheduler, num: int) -> list[SequenceGroup]:
    """The next groups that come in."""
    groups: list[SequenceGroup] = []
    while len(groups) < num and core.num_live:
        groups += [row.group for row in step(core)[0].rows if not row.group.sequences[0].output_token_ids[1:]]
    return groups[:num]


def test_a_tenant_with_one_request_does_not_wait_for_all_of_a_tenant_with_many():
    core = make(max_num_seqs=1)
    for _ in range(10):
        submit(core, 4, max_tokens=1, tenant="many")
    submit(core, 4, max_tokens=1, tenant="one")
    assert admissions(core, 3) == ["many", "one", "many"]


def test_weights_of_one_and_three_give_one_and_three_quarters():
    core = make(max_num_seqs=1)
    for _ in range(40):
        submit(core, 4, max_tokens=1, tenant="small", tenant_weight=1)
        submit(core, 4, max_tokens=1, tenant="large", tenant_weight=3)
    assert Counter(admissions(core, 40)) == {"small": 10, "large": 30}


def test_output_counts_twice_as_much_as_prompt():
    core = make(max_num_seqs=1)
    for _ in range(30):
        submit(core, 2, max_tokens=5, tenant="writes")  # 12
        submit(core, 4, max_tokens=1, tenant="reads")  # 6
    counts = Counter(admissions(core, 30))
    assert abs(2 * counts["writes"] - counts["reads"]) <= 3


def test_prompt_tokens_from_the_prefix_cache_are_free():
    core = make(max_num_seqs=1, prefix_caching=True)
    for i in range(30):
        submit(core, 14, max_tokens=1, tenant="repeats")  # 2 of 14 are computed, once the rest is cached: 4
        submit(core, [100 * i + n for n in range(14)], max_tokens=1, tenant="new")  # 16
    counts = Counter(admissions(core, 30))
    assert abs(4 * counts["new"] - counts["repeats"]) <= 6


def test_priorities_count_within_a_tenant_only():
    core = make(max_num_seqs=1)
    submit(core, 4, max_tokens=1, tenant="a")
    later = submit(core, 4, max_tokens=1, tenant="a", priority=3)
    submit(core, 4, max_tokens=1, tenant="b", priority=9)
    submit(core, 4, max_tokens=1, tenant="b", priority=9)
    order = admitted(core, 4)
    assert order[0].tenant == "b"
    assert order[1] is later, "b does not get ahead of a by calling all that it has urgent"


def test_who_waits_alone_has_all_of_the_service():
    core = make(max_num_seqs=4)
    submit(core, 4, max_tokens=1, tenant="was here")
    step(core)
    for _ in range(8):
        submit(core, 4, max_tokens=2, tenant="alone")
    plan, _ = step(core)
    assert [row.group.tenant for row in plan.rows] == ["alone"] * 4


def test_what_a_tenant_had_alone_is_not_held_against_it():
    core = make(max_num_seqs=1)
    submit(core, 4, max_tokens=30, tenant="was alone")
    while core.num_live:
        step(core)
    for _ in range(4):
        submit(core, 4, max_tokens=1, tenant="was alone")
        submit(core, 4, max_tokens=1, tenant="comes")
    assert Counter(admissions(core, 4)) == {"was alone": 2, "comes": 2}


def test_an_idle_tenant_comes_back_without_credit():
    core = make(max_num_seqs=1)
    for _ in range(60):
        submit(core, 4, max_tokens=1, tenant="busy")
    submit(core, 4, max_tokens=1, tenant="idle")
    assert Counter(admissions(core, 30)) == {"busy": 29, "idle": 1}
    for _ in range(20):
        submit(core, 4, max_tokens=1, tenant="idle")
    assert Counter(admissions(core, 20)) == {"busy": 10, "idle": 10}


@pytest.mark.parametrize(("prompt", "max_tokens"), [(300, 1), (4, 150)])
def test_a_tenant_that_sends_one_large_request_at_a_time_gets_no_more_than_its_share(prompt, max_tokens):
    core = make(num_blocks=200, budget=500, max_num_seqs=1)
    service = Service()
    for _ in range(2000):
        while core.queues.waiting.num_waiting_of("small") < 9:
            submit(core, 4, max_tokens=2, tenant="small")
        if not any(group.tenant == "large" for group in core.queues.groups.values()):
            submit(core, prompt, max_tokens, tenant="large")  # each time it has nothing live in between
        plan, _ = step(core)
        service.count(core, plan)
    assert abs(service.of["large"] - service.of["small"]) <= service.booked
    assert service.of["large"] > 500


def test_a_turn_is_kept_until_the_group_is_in():
    core = make(num_blocks=8, max_num_seqs=8)
    first = submit(core, 8, max_tokens=6, tenant="a")
    step(core)
    large = submit(core, 20, max_tokens=1, tenant="a")  # it waits for blocks
    step(core)
    assert core.held_up(large) is not None
    small = submit(core, 1, max_tokens=1, tenant="b")
    while first.live:
        assert core.queues.waiting.head() is large, "a is charged for what it outputs, and b is not let past"
        assert core.queues.waiting.order() == [large, small]
        step(core)
    while small.live or large.live:
        step(core)


def test_a_turn_is_lost_with_the_last_group_that_waits():
    core = make(max_num_seqs=1)
    submit(core, 4, max_tokens=3, tenant="runs")
    ahead = submit(core, 4, max_tokens=1, tenant="a")
    submit(core, 4, max_tokens=1, tenant="b")
    step(core)
    assert core.queues.waiting.head() is ahead
    core.abort(ahead)
    submit(core, 4, max_tokens=1, tenant="a")
    assert core.queues.waiting.head().tenant == "b"


def test_who_comes_after_the_turn_of_a_tenant_far_behind_the_clock_does_not_get_ahead_of_that_tenant():
    core = make(max_num_seqs=1, budget=64)
    submit(core, 40, max_tokens=1, tenant="had much")
    for _ in range(3):
        submit(core, 4, max_tokens=1, tenant="behind")
    assert admissions(core, 2) == ["had much", "behind"]
    submit(core, 4, max_tokens=1, tenant="comes")
    assert admissions(core, 3) == ["behind", "behind", "comes"]


def test_a_preempted_group_comes_back_for_nothing():
    core = make(num_blocks=6, max_num_seqs=8)
    elder, younger = submit(core, 8, max_tokens=12, tenant="a"), submit(core, 7, max_tokens=12, tenant="b")
    service = Service()
    while elder.live or younger.live:
        plan, _ = step(core)
        service.count(core, plan)
    assert younger.num_preemptions
    assert service.of == {"a": 8 + 2 * 12, "b": 7 + 2 * 12}


def test_the_state_of_tenants_without_requests_is_bounded():
    core = make(max_num_seqs=2)
    for number in range(3000):
        submit(core, 1, max_tokens=30, tenant=f"t{number}")
        submit(core, 1, max_tokens=30, tenant="always")
        for group in list(core.queues.groups.values())[:-2]:
            step(core)
            core.abort(group)
    queue = core.queues.waiting
    assert len(queue._tenants) <= 4
    assert len(queue._away) <= 1024
    for group in list(core.queues.groups.values()):
        core.abort(group)
    submit(core, 1, max_tokens=1)
    assert len(queue._tenants) == 1
    assert len(queue._heap) < 100


def test_of_tenants_that_left_ahead_of_the_clock_only_the_last_are_remembered(monkeypatch):
    monkeypatch.setattr("scheduler.fair_queue._MAX_AWAY", 3)
    core = make()
    for place in range(5):
        submit(core, 1, max_tokens=9 + place, tenant=f"t{place}")
    while core.num_live:
        step(core)
    assert list(core.queues.waiting._away) == ["t2", "t3", "t4"]


def test_tenants_that_give_up_while_they_wait_leave_nothing_behind_and_others_keep_their_turns():
    core = make(max_num_seqs=1)
    submit(core, 4, max_tokens=1, tenant="runs")
    for tenant in "aabb":
        submit(core, 4, max_tokens=1, tenant=tenant)
    step(core)
    for number in range(300):
        core.abort(submit(core, 4, tenant=f"t{number}"))
        core.check()
    assert len(core.queues.waiting._heap) < 100
    assert sorted(admissions(core, 4)) == ["a", "a", "b", "b"]


def test_a_weight_has_to_be_over_zero():
    for weight in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="tenant_weight"):
            submit(make(), 2, tenant_weight=weight)


def test_a_share_is_of_the_weights_of_those_that_wait_as_they_are_now():
    core = make()
    waiting = core.queues.waiting
    own = submit(core, 4, tenant="a", tenant_weight=0.1)
    heavy = submit(core, 4, tenant="b", tenant_weight=1e30)
    assert waiting.share_of("a") == pytest.approx(1e-31)
    core.abort(heavy)
    core.check()
    assert waiting.share_of("a") == 1, "nothing of a small weight was lost beside a large one"
    submit(core, 4, tenant="c", tenant_weight=0.3)
    assert waiting.share_of("a") == pytest.approx(1 / 4)
    submit(core, 4, tenant="a", tenant_weight=0.6)
    core.check()
    assert waiting.share_of("a") == pytest.approx(2 / 3)
    core.abort(own)
    assert waiting.share_of("a") == pytest.approx(2 / 3)


def test_a_refusal_looks_at_no_more_tenants_however_many_wait(monkeypatch):
    core = make(max_waiting_requests=1000, max_waiting_requests_per_tenant=1)
    for number in range(100):
        submit(core, 4, tenant=f"t{number}")
    num_looks, length = 0, WaitingQueue.__len__

    def look(queue: WaitingQueue) -> int:
        nonlocal num_looks
        num_looks += 1
        return length(queue)

    monkeypatch.setattr(WaitingQueue, "__len__", look)
    with pytest.raises(QueueFull):
        submit(core, 4, tenant="t0")
    assert num_looks < 5


def test_a_position_counts_in_the_order_in_which_tenants_take_turns():
    core = make(max_num_seqs=1, budget=64)
    submit(core, 4, max_tokens=1, tenant="c")
    names = "aaaabbabbbaacb"
    weights = {"a": 1.0, "b": 2.1, "c": 1.0}
    groups = [submit(core, 60, max_tokens=1, tenant=name, tenant_weight=weights[name]) for name in names]
    step(core)
    expected = core.queues.waiting.order()
    assert [explain(core, group).queue_position for group in expected] == list(range(len(groups)))
    last = expected[-1]
    of_own = sum(group.tenant == last.tenant for group in expected[:-1])
    assert explain(core, last).message == f"{len(groups) - 1} requests go first, {of_own} of them its tenant's"
    assert admitted(core, len(groups)) == expected


sizes = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(1, 2)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(sizes, min_size=2, max_size=3),
    weights=st.lists(st.sampled_from([0.5, 1.0, 1.0, 3.0]), min_size=3, max_size=3),
    guests=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12), st.integers(1, 6)), max_size=20),
    mode=st.sampled_from(PreemptionMode),
    chunked=st.booleans(),
    depth=st.integers(1, 2),
)
def test_tenants_that_always_wait_are_never_further_apart_than_is_booked_for_one(
    shapes, weights, guests, mode, chunked, depth
):
    core = make(
        num_blocks=9,
        budget=8,
        max_num_seqs=4,
        num_swap_blocks=6,
        preemption_mode=mode,
        chunked_prefill=chunked,
        max_steps_in_flight=depth,
        prefix_caching=False,
    )
    service, in_flight = Service(), deque()
    endless = {f"t{place}": itertools.cycle(shape) for place, shape in enumerate(shapes)}
    weight = dict(zip(endless, weights, strict=False))
    apart = 0.0
    for now in range(100):
        for name, shape in endless.items():
            while core.queues.waiting.num_waiting_of(name) < 6:
                prompt, max_tokens, n = next(shape)
                urgent = {"t0": 10, "t1": -10}.get(name, 0)  # as t0 calls all that it has
                share = {"tenant": name, "tenant_weight": weight[name], "priority": urgent}
                submit(core, prompt, max_tokens, n=n, now=now, **share)
        for at, prompt, max_tokens in guests:
            if at == now:
                submit(core, prompt, max_tokens, now=now, tenant=f"guest{prompt % 3}")
        plan = core.schedule(float(now))
        core.check()
        service.count(core, plan)
        got = [service.of[name] / weight[name] for name in endless]
        apart = max(apart, max(got) - min(got))
        assert apart <= service.booked
        if plan.rows:
            in_flight.append(plan)
        if in_flight and (not plan.rows or len(in_flight) == depth):
            plan = in_flight.popleft()
            core.update(plan, run(plan))
    total = sum(service.of[name] for name in endless)
    assert total > 100, "it stood still"


@settings(max_examples=30, deadline=None)
@given(
    ahead=st.integers(0, 3),
    prompt=st.integers(1, 8),
    newcomers=st.integers(1, 4),
    weight=st.sampled_from([0.5, 1.0, 5.0]),
    mode=st.sampled_from(PreemptionMode),
)
def test_nobody_waits_for_ever_for_tenants_that_are_always_new(ahead, prompt, newcomers, weight, mode):
    core = make(num_blocks=9, budget=8, max_num_seqs=3, num_swap_blocks=6, preemption_mode=mode)
    for _ in range(ahead):  # its tenant has had more than its share, for a while
        submit(core, 12, max_tokens=8, tenant="old", tenant_weight=weight)
    for _ in range(3):
        step(core)
    group = submit(core, prompt, max_tokens=4, tenant="old", tenant_weight=weight)
    names = itertools.count()
    for now in itertools.count(1):
        for _ in range(newcomers):
            if core.num_waiting < 8:
                submit(core, 1, max_tokens=1, now=float(now), priority=10, tenant=f"new{next(names)}")
        step(core, now=float(now))
        if not group.live:
            break
        assert now < 1000, "it starved"
