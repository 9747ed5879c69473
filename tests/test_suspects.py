"""Who kills workers is found by bisection and fails alone; all others complete. `suspects.py` has the bound."""

import math
from array import array
from collections import deque

import hypothesis.strategies as st
from hypothesis import given, settings
from scheduler_by_hand import make, rows, step, submit
from scheduler_model import STOP, Memory, expected_outputs, run

from scheduler.admission import Reason
from scheduler.beam import BeamParams, EarlyStopping
from scheduler.block_manager import BlockManager
from scheduler.explain import explain
from scheduler.plan import Plan
from scheduler.policy import Policy, PreemptionMode
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup, Status


def lose(core: Scheduler, **how: bool) -> SequenceGroup | None:
    """The worker is lost; gives who is convicted."""
    conviction = core.requeue_running(**how)[1]
    core.check()
    return None if conviction is None else conviction.group


def planned(core: Scheduler) -> list[int]:
    """Plans a step; the numbers of the requests in it."""
    plan = core.schedule(0.0)
    core.check()
    return [row.group.number for row in plan.rows]


def trials(core: Scheduler, poison: SequenceGroup) -> list[list[int]]:
    """The steps in which workers are lost until `poison` is convicted, and who was in them; the others are answered."""
    deaths = []
    while True:
        plan = core.schedule(0.0)
        if all(row.group is not poison for row in plan.rows):
            core.update(plan, run(plan))
            continue
        deaths.append([row.group.number for row in plan.rows])
        if lose(core) is not None:
            return deaths


def test_a_request_that_kills_workers_is_found_by_halving_and_the_others_go_on():
    core = make(budget=64)
    groups = [submit(core, 4, max_tokens=9) for _ in range(8)]
    step(core)
    assert trials(core, groups[5]) == [[1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8], [5, 6], [6]]
    assert groups[5].status is Status.FINISHED_ABORTED
    while core.num_live:
        step(core)
    others = [sequence for group in groups if group is not groups[5] for sequence in group.sequences]
    assert all(len(sequence.output_token_ids) == 9 for sequence in others)


def test_steps_on_trial_are_short_so_that_the_first_stream_goes_on_before_all_are_computed_again():
    core = make(budget=64, max_num_seqs=4)
    for _ in range(3):
        submit(core, 20)
    assert core.schedule(0.0).num_tokens == 60
    lose(core)
    steps = [rows(step(core)[0]) for _ in range(6)]
    assert steps[:3] == [[(1, 0, 16)], [(1, 16, 4), (2, 0, 12)], [(1, 20, 1), (2, 12, 8)]], "a quarter of the tokens"
    assert steps[3:5] == [[(3, 0, 16)], [(3, 16, 4)]]
    assert sum(num_tokens for *_, num_tokens in steps[5]) > 16, "nobody is on trial any more"


def test_a_request_that_was_alone_from_the_beginning_gets_three_workers():
    core = make()
    assert trials(core, submit(core, 4)) == [[1]] * 3


def test_a_request_that_samples_is_cleared_and_workers_lost_now_and_then_do_not_add_up():
    core = make()
    group = submit(core, 4)
    for _ in range(4):
        assert planned(core) == [1]
        assert lose(core) is None
        assert group in core.suspects
        step(core)
        assert not core.suspects.num_suspects


def test_a_chunk_that_goes_well_clears_nobody_so_that_a_prompts_last_one_can_not_kill_for_ever():
    core = make(budget=4, max_num_seqs=4)
    group = submit(core, 10)
    for _ in range(3):
        step(core)
        assert core.schedule(0.0).rows[0].start == 4
        conviction = lose(core)
    assert conviction is group


def test_a_second_sequence_that_kills_is_not_cleared_by_the_first_one_that_samples():
    core = make(budget=4, max_num_seqs=4)
    group = submit(core, 4, n=2)
    for _ in range(6):
        step(core)
    for _ in range(3):
        while (plan := core.schedule(0.0)).rows[-1].sequence.index == 0 or not plan.rows[-1].samples:
            core.update(plan, run(plan))
        conviction = lose(core)
    assert conviction is group


def test_who_was_not_in_the_lost_steps_is_no_suspect_and_waits():
    core = make(budget=4, max_num_seqs=4)
    suspect = submit(core, 4)
    planned(core)
    bystander = submit(core, 4)
    lose(core)
    assert bystander not in core.suspects
    assert planned(core) == [suspect.number]
    assert explain(core, bystander).reason is Reason.SUSPECTS
    assert "are run again first" in explain(core, bystander).message


def test_an_explanation_says_why_a_request_is_run_apart():
    core = make(budget=64)
    first, second = (submit(core, 4) for _ in range(2))
    planned(core)
    lose(core)
    planned(core)
    apart = "apart from others (workers lost in a row in its steps: 1; at 3 and alone it fails)"
    assert explain(core, first).message == f"it runs {apart}"
    assert (explain(core, second).reason, explain(core, second).message) == (
        Reason.SUSPECTS,
        f"it waits to run {apart}",
    )


def test_a_worker_that_leaves_in_order_or_dies_idle_makes_nobody_a_suspect():
    core = make()
    submit(core, 4)
    planned(core)
    lose(core, in_order=True)
    assert not core.suspects
    step(core)
    lose(core)
    assert not core.suspects


def test_a_half_that_finds_no_room_together_is_tried_one_after_the_other():
    core = make(num_blocks=12, budget=64)
    first, *_ = [submit(core, 8, max_tokens=4) for _ in range(4)]
    assert planned(core) == [1, 2, 3, 4]
    lose(core)
    core.replace_pool(BlockManager(4, 4))
    assert rows(step(core)[0]) == [(1, 0, 8)]
    assert rows(step(core)[0]) == [(2, 0, 8)], "the first is cleared, and would have to end before there is room beside"
    assert first.status is Status.WAITING
    while core.num_live:
        step(core)


def test_of_the_suspects_those_of_the_least_rank_are_tried_first():
    core = make()
    submit(core, 4)
    step(core)
    urgent = submit(core, 4, priority=5)
    assert planned(core) == [1, urgent.number]
    lose(core)
    assert planned(core) == [urgent.number]


def test_who_is_on_trial_keeps_its_blocks_though_there_is_no_room_for_another_one():
    core = make()
    first, *_ = [submit(core, 4, n=n, max_tokens=8) for n in (2, 1, 1, 1)]
    for _ in range(6):
        step(core)
    core.schedule(0.0)
    lose(core)
    core.replace_pool(BlockManager(6, 4))
    while first in core.suspects:
        step(core)
        assert first.num_preemptions == 0
    while core.num_live:
        step(core)


def test_who_is_cleared_is_not_tried_again_with_those_of_its_half_that_are_not():
    core = make(budget=32)
    first, second, third, *_ = [submit(core, prompt) for prompt in (2, 20, 2, 2, 2, 2)]
    assert planned(core) == [1, 2, 3, 4, 5, 6]
    lose(core)
    step(core)  # eight tokens: the first samples, the second has a chunk, the third waits
    core.preempt(first)
    assert planned(core) == [second.number]
    lose(core)
    while second in core.suspects:
        step(core)
    assert planned(core) == [third.number]


def test_who_is_swapped_out_does_not_come_back_into_the_steps_of_the_next_half():
    core = make(num_swap_blocks=9, preemption_mode=PreemptionMode.SWAP)
    _, second, *_ = [submit(core, 4) for _ in range(4)]
    assert planned(core) == [1, 2, 3, 4]
    lose(core)
    step(core)
    core.preempt(second)
    assert second.status is Status.SWAPPED
    assert planned(core) == [3, 4]
    assert second.status is Status.WAITING


def test_the_next_half_stays_out_of_steps_of_the_one_before_though_the_last_of_that_cannot_come_in():
    core = make(max_num_seqs=4)
    first, too_long, *_ = [submit(core, prompt) for prompt in (4, 10, 1, 1)]
    assert planned(core) == [1, 2, 3, 4]
    lose(core)
    core.replace_pool(BlockManager(2, 5))
    step(core)
    assert first not in core.suspects
    plan, _ = step(core)
    assert [end.group for end in plan.finished] == [too_long]
    assert rows(plan) == [(1, 4, 1)]
    assert planned(core) == [3, 4]


def test_steps_of_two_halves_are_never_in_flight_together():
    core = make(budget=64, max_steps_in_flight=2)
    first, second = submit(core, 4), submit(core, 4)
    core.schedule(0.0)
    lose(core)
    plans = [core.schedule(0.0), core.schedule(0.0)]
    assert [rows(plan)[0][0] for plan in plans] == [first.number] * 2
    core.update(plans[0], run(plans[0]))
    assert core.schedule(0.0).rows == [], "the first is cleared, and has another step in flight"
    core.update(plans[1], run(plans[1]))
    plan = core.schedule(0.0)
    assert [row.group for row in plan.rows] == [second]
    assert [(each.group, each.mode) for each in plan.preempted] == [(first, PreemptionMode.RECOMPUTE)]
    assert first.preemption_reason.startswith("recompute: others run apart")


# Random walks


requests = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 20),
        "n": st.integers(1, 3),
        "beam": st.sampled_from([None, None, None, BeamParams(2, 1.0, EarlyStopping.TRUE)]),
        "max_tokens": st.integers(1, 8),
        "priority": st.sampled_from([0, 0, 5, -2]),
        "tenant": st.sampled_from(["", "", "a"]),
        # The step that it comes before, and the position in any of its sequences whose computation kills.
        "arrival": st.integers(0, 12),
        "kills_at": st.none() | st.none() | st.integers(0, 20),
    }
)
policies = st.builds(
    Policy,
    max_num_batched_tokens=st.integers(8, 24),
    max_num_seqs=st.integers(4, 8),
    max_waiting_requests=st.just(100),
    watermark=st.sampled_from([0.0, 0.1]),
    prefix_caching=st.booleans(),
    chunked_prefill=st.booleans(),
    preemption_mode=st.sampled_from(PreemptionMode),
    max_steps_in_flight=st.integers(1, 3),
    max_failed_steps=st.integers(1, 4),
)
concurrency = st.sampled_from([1, 1, 2, 3])


class Walk:
    """A core, and a worker that dies of some requests."""

    def __init__(self, policy: Policy, num_concurrent_steps: int, num_blocks: int, num_swap_blocks: int) -> None:
        self.core = Scheduler(policy, BlockManager(num_blocks, 4, num_swap_blocks))
        self.core.set_num_concurrent_steps(num_concurrent_steps)
        self.memory = Memory(4)
        self.in_flight: deque[Plan] = deque()
        self.kills_at: dict[int, int] = {}
        self.killers: set[int] = set()
        self.convicted: set[int] = set()
        # Since there were no suspects: workers lost, what they may number at most, and the requests that kill.
        self.num_lost = 0
        self.most_lost = 0

    def submit(self, number: int, given: dict) -> SequenceGroup:
        beam = given["beam"]
        group = self.core.submit(
            request_id=f"r{number}",
            prompt_token_ids=array("i", range(100 + number, 100 + number + given["prompt"])),
            n=given["n"] if beam is None else 1,
            max_tokens=given["max_tokens"],
            stop_token_ids=[STOP],
            beam=beam,
            priority=given["priority"],
            tenant=given["tenant"],
            now=float(number),
        )
        if given["kills_at"] is not None:
            self.kills_at[group.number] = given["kills_at"]
        return group

    def kills(self, plan: Plan) -> set[int]:
        return {
            row.group.number
            for row in plan.rows
            if row.group.number in self.kills_at
            and row.start + row.num_new_tokens > self.kills_at[row.group.number] >= row.start
        }

    def move(self, now: float) -> None:
        """Plans a step if there is room, and answers the oldest if there is none."""
        core = self.core
        if len(self.in_flight) < core.in_flight.max_steps:
            plan = core.schedule(now)
            core.check()
            assert plan.rows or self.in_flight or not core.num_live, "groups wait and nothing runs"
            if core.suspects:
                assert all(row.group in core.suspects.on_trial for row in plan.rows), "a suspect is not alone"
            self.memory.execute(plan)
            if plan.rows:
                self.in_flight.append(plan)
                return
        if self.in_flight:
            plan = self.in_flight[0]
            if killers := self.kills(plan):
                self.lose({number for number in killers if number in core.queues.groups})
            else:
                core.update(self.in_flight.popleft(), run(plan))
                core.check()

    def lose(self, killers: set[int]) -> None:
        """By steps of `killers`; of none of them where it died by itself, or of a request that has ended since."""
        core = self.core
        computed = {row.group.number for plan in self.in_flight for row in plan.rows}
        if not core.suspects:
            num_killers = len(computed & self.kills_at.keys())
            halvings = math.ceil(math.log2(max(1, len(computed))))
            self.num_lost, self.most_lost = 0, num_killers * max(core.policy.max_failed_steps, 1 + halvings)
        self.num_lost += bool(killers)
        self.killers |= killers
        self.in_flight.clear()
        self.memory.clear()
        convicted = lose(core)
        if convicted is not None:
            assert computed == {convicted.number}, "it was not alone"
            self.convicted.add(convicted.number)


def walk(trial: Walk, given: list[dict], spurious: frozenset[int]) -> None:
    """Until all have ended; `spurious`: moves after which the worker is lost for no reason."""
    groups: list[SequenceGroup] = []
    for now in range(4000):
        groups += [trial.submit(number, each) for number, each in enumerate(given) if each["arrival"] == now]
        trial.move(float(now))
        if now in spurious:
            trial.lose(set())
        elif not spurious:
            assert trial.num_lost <= trial.most_lost, "more workers than the bound"
        if now > 12 and not trial.core.num_live:
            break
    assert not trial.core.num_live
    assert trial.core.blocks.num_held == 0
    for group in groups:
        outputs = [sequence.output_token_ids.tolist() for sequence in group.sequences]
        if group.number not in trial.convicted and group.status is not Status.FINISHED_IGNORED:
            assert outputs == [tokens[: group.max_tokens] for tokens in expected_outputs(group)]


@given(
    st.builds(Walk, policies, concurrency, st.integers(6, 60), st.sampled_from([0, 12])),
    st.lists(requests, min_size=1, max_size=14),
)
@settings(max_examples=150, deadline=None)
def test_exactly_those_that_kill_are_failed_within_the_bound_and_all_others_complete(trial, given):
    walk(trial, given, frozenset())
    assert trial.convicted == trial.killers


@given(
    st.builds(Walk, policies, concurrency, st.integers(6, 60), st.just(0)),
    st.lists(requests, min_size=1, max_size=8),
    st.frozensets(st.integers(0, 60), max_size=6),
)
@settings(max_examples=80, deadline=None)
def test_workers_that_die_by_themselves_beside_hang_nothing_up_and_convict_nobody_in_company(trial, given, when):
    walk(trial, given, when)
    assert trial.killers <= trial.convicted
