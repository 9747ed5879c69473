"""Steps in flight: what is planned before a token is known, what is not, and what becomes of it when all goes wrong."""

import math
from array import array
from dataclasses import replace

import pytest
from scheduler_by_hand import STOP, make, rows, submit
from scheduler_model import Memory, expected_outputs, run

from protos.columns import pack_floats, unpack
from protos.sampling_pb2 import LogprobColumns, Sampling
from scheduler.beam import BeamParams
from scheduler.pacing import Pacing
from scheduler.plan import Plan, StepResult, to_request
from scheduler.policy import PreemptionMode
from scheduler.preemption import Rates
from scheduler.sequence import Status

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE


def two_deep(**options):
    return make(max_steps_in_flight=2, **options)


def answer(core, plan: Plan, *tokens: int):
    """The result of `plan`, one token for each sample."""
    outputs = core.update(plan, StepResult(tokens, [-0.5] * len(tokens)))
    core.check()
    return outputs


def planned(core, now=0.0) -> Plan:
    plan = core.schedule(now)
    core.check()
    return plan


def token_ids(plan: Plan) -> list[int]:
    return unpack(to_request(plan, 1).token_ids).tolist()


def test_a_step_is_planned_behind_a_token_that_nobody_knows_yet():
    core = two_deep()
    group = submit(core, [11, 12, 13])
    first = planned(core)
    second = planned(core)
    assert rows(second) == [(1, 3, 1)]
    assert token_ids(second) == [-1]
    answer(core, first, 7)
    third = planned(core)
    assert (rows(third), token_ids(third)) == ([(1, 4, 1)], [-1])
    answer(core, second, 8)
    answer(core, third, 9)
    assert group.sequences[0].output_token_ids.tolist() == [7, 8, 9]
    assert token_ids(planned(core)) == [9], "with nothing in flight all is known"


def test_chunks_of_a_prompt_are_planned_one_behind_the_other():
    core = two_deep(budget=4, max_num_seqs=4)
    submit(core, 10)
    first, second = planned(core), planned(core)
    assert (rows(first), rows(second)) == ([(1, 0, 4)], [(1, 4, 4)])
    assert not answer(core, first).new_tokens
    assert rows(planned(core)) == [(1, 8, 2)]


def test_no_more_steps_are_planned_than_the_policy_allows_and_results_come_in_order():
    core = two_deep()
    submit(core, 3)
    first, second = planned(core), planned(core)
    with pytest.raises(AssertionError, match="too many"):
        core.schedule(0.0)
    with pytest.raises(AssertionError, match="step 2 is answered, and 1 is older"):
        core.update(second, StepResult([7], [0.0]))
    assert first.step_id == 1


def test_nothing_is_planned_behind_the_last_token_of_a_sequence():
    core = two_deep()
    group = submit(core, 3, max_tokens=2)
    first, second = planned(core), planned(core)
    answer(core, first, 7)
    third = planned(core)
    assert third.rows == [], "the second of two tokens is in flight"
    assert group.live
    outputs = answer(core, second, 8)
    assert [end.sequence.status for end in outputs.finished] == [Status.FINISHED_LENGTH_CAPPED]
    assert core.num_live == 0


def test_several_sequences_fork_when_their_prompt_is_planned_and_go_on_before_their_first_tokens_are_known():
    core = two_deep(num_blocks=10)
    group = submit(core, 6, n=3)
    first, second = planned(core), planned(core)
    assert rows(second) == [(1, 6, 1)] * 3
    assert token_ids(second) == [-1] * 3
    assert len(second.blocks_to_copy) == 2, "the last one to write keeps the shared block"
    answer(core, first, 7, 8, 9)
    answer(core, second, 17, 18, 19)
    assert [s.output_token_ids.tolist() for s in group.sequences] == [[7, 17], [8, 18], [9, 19]]


def test_a_search_waits_for_its_candidates_and_others_do_not_wait_for_it():
    core = two_deep(num_blocks=40)
    submit(core, 4, beam=BeamParams(2))
    submit(core, 4)
    first, second = planned(core), planned(core)
    assert (first.num_beams, second.num_beams) == (1, 0)
    assert rows(second) == [(2, 4, 1)]
    core.update(first, run(first))
    third = planned(core)
    assert rows(third) == [(1, 4, 1), (1, 4, 1), (2, 5, 1)]
    assert third.num_beams == 2


def test_what_is_in_flight_for_a_sequence_that_stopped_is_passed_over():
    core = two_deep()
    stopping, other = submit(core, 3), submit(core, 3)
    first, second = planned(core), planned(core)
    outputs = answer(core, first, STOP, 7)
    assert [end.group for end in outputs.finished] == [stopping]
    assert stopping.sequences[0].output_token_ids.tolist() == [STOP]
    third = planned(core)
    assert [row.group for row in third.rows] == [other]
    assert third.forget == [stopping.number], "behind the row that is in flight"
    outputs = answer(core, second, 99, 8)
    assert [new.group for new in outputs.new_tokens] == [other]
    assert stopping.sequences[0].output_token_ids.tolist() == [STOP]


def test_blocks_of_a_group_aborted_in_flight_are_free_at_once_and_its_tokens_go_nowhere():
    core, memory, plans = two_deep(num_blocks=4), Memory(4), []

    def plan_and_run() -> Plan:
        plans.append(planned(core))
        memory.execute(plans[-1])  # asserts that each row attends to its own tokens
        return plans[-1]

    gone = submit(core, 12)
    plan_and_run()
    plan_and_run()
    core.abort(gone)
    core.check()
    assert core.blocks.num_free == 4
    late = submit(core, [31, 32, 33, 34, 35, 36, 37, 38, 39], max_tokens=2)
    assert not answer(core, plans[0], 7).new_tokens
    assert rows(plan_and_run()) == [(2, 0, 9)], "into blocks that the step before it writes, too"
    assert not answer(core, plans[1], 8).new_tokens
    answer(core, plans[2], 9)
    assert late.sequences[0].output_token_ids.tolist() == [9]
    assert gone.sequences[0].output_token_ids.tolist() == []


def test_a_sequence_stopped_by_the_router_takes_nothing_from_two_steps_in_flight():
    core = two_deep()
    group = submit(core, 4, n=2)
    first, second = planned(core), planned(core)
    core.stop(group, 0)
    core.check()
    answer(core, first, 7, 8)
    answer(core, second, 9, 10)
    assert [s.output_token_ids.tolist() for s in group.sequences] == [[], [8, 10]]


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_a_preempted_group_takes_its_tokens_in_flight_and_comes_back_with_them(mode):
    core = two_deep(num_swap_blocks=10, preemption_mode=mode, num_blocks=20)
    group = submit(core, 6, n=2)
    first, second = planned(core), planned(core)
    core.preempt(group)
    core.check()
    answer(core, first, 7, 8)
    assert planned(core).rows == [], "the tokens of the second step are not known yet"
    assert core.held_up(group) is not None
    outputs = answer(core, second, 17, 18)
    assert len(outputs.new_tokens) == 2
    assert [s.output_token_ids.tolist() for s in group.sequences] == [[7, 17], [8, 18]]
    plan = planned(core)
    if mode is SWAP:
        assert rows(plan) == [(1, 7, 1), (1, 7, 1)], "nothing is computed twice"
        assert token_ids(plan) == [17, 18]
    else:
        assert rows(plan) == [(1, 0, 6)]


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
@pytest.mark.parametrize("last_token", [STOP, 7])
def test_a_preempted_group_ends_where_it_is_by_a_token_that_was_in_flight(mode, last_token):
    core = two_deep(num_swap_blocks=10, preemption_mode=mode)
    group = submit(core, 6, max_tokens=1)
    plan = planned(core)
    core.preempt(group)
    outputs = answer(core, plan, last_token)
    assert [end.group for end in outputs.finished] == [group]
    expected = Status.FINISHED_STOPPED if last_token == STOP else Status.FINISHED_LENGTH_CAPPED
    assert group.status is expected
    assert core.num_live == 0
    assert core.blocks.num_free_swap_blocks == 10


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_a_search_goes_on_with_candidates_that_were_in_flight_when_it_was_preempted(mode):
    core = two_deep(num_blocks=60, num_swap_blocks=60, preemption_mode=mode)
    memory = Memory(4)
    group = submit(core, 9, n=3, beam=BeamParams(3), max_tokens=9, min_tokens=9)
    for turn in range(60):
        plan = planned(core)
        memory.execute(plan)
        if plan.num_beams and turn % 2:
            core.preempt(group)
            core.check()
        core.update(plan, run(plan))
        core.check()
    assert group.num_preemptions > 3
    assert [sequence.output_token_ids.tolist() for sequence in group.sequences] == expected_outputs(group)
    assert core.blocks.num_free_swap_blocks == 60


def test_beams_that_part_while_they_wait_share_their_prompt_when_they_come_in():
    core = two_deep(num_blocks=20, preemption_mode=RECOMPUTE)
    group = submit(core, 8, beam=BeamParams(3), max_tokens=9)
    plan = planned(core)
    core.preempt(group)
    core.update(plan, run(plan))
    assert (len(group.live), group.status) == (3, Status.WAITING)
    assert rows(planned(core)) == [(1, 0, 8)], "one of them computes it for all"
    assert rows(planned(core)) == [(1, 8, 1)] * 3
    assert core.blocks.num_held == 2 + 3


def test_a_block_is_found_when_its_tokens_are_known_though_its_step_is_still_in_flight():
    core = two_deep(prefix_caching=True)
    submit(core, [11, 12, 13], max_tokens=20)
    first, second = planned(core), planned(core)  # the second fills the block, with a token that nobody knows
    finds = submit(core, [11, 12, 13, 7, 50])
    answer(core, first, 7)
    third = planned(core)
    assert rows(third) == [(1, 4, 1), (2, 4, 1)], "the older one's row told what the block holds"
    assert finds.num_cached_prompt_tokens == 4
    answer(core, second, 8)


def test_a_block_that_ends_in_an_unknown_token_is_not_found():
    core = two_deep(prefix_caching=True)
    submit(core, [11, 12, 13], max_tokens=20)
    first = planned(core)
    misses = submit(core, [11, 12, 13, 7, 50])
    second = planned(core)  # fills the first one's block
    assert rows(second) == [(1, 3, 1), (2, 0, 5)]
    assert misses.num_cached_prompt_tokens == 0
    answer(core, first, 7)


def test_what_a_failed_sample_came_from_is_not_found_though_its_group_was_preempted_meanwhile():
    core = two_deep(prefix_caching=True)
    prompt = list(range(10, 22))
    broken = submit(core, prompt)
    plan = planned(core)
    core.preempt(broken)
    assert core.blocks.num_idle == 3
    outputs = core.update(plan, StepResult([0], [0.0], failed=[0]))
    core.check()
    assert outputs.failed == [broken]
    assert core.blocks.num_idle == 0
    submit(core, prompt)
    assert rows(planned(core)) == [(2, 0, 12)]


def test_a_failed_sample_ends_its_group_and_what_is_in_flight_for_it_is_passed_over():
    core = two_deep()
    broken, fine = submit(core, 4), submit(core, 4)
    first, second = planned(core), planned(core)
    outputs = core.update(first, StepResult([0, 7], [0.0, 0.0], failed=[0]))
    assert outputs.failed == [broken]
    outputs = core.update(second, StepResult([0, 8], [0.0, 0.0], failed=[0]))
    core.check()
    assert outputs.failed == []
    assert fine.sequences[0].output_token_ids.tolist() == [7, 8]


def told(*positions: int) -> LogprobColumns:
    return LogprobColumns(logprobs=pack_floats([-1.0] * len(positions)), ranks=array("i", positions).tobytes())


def test_a_prompt_is_told_of_once_across_steps_in_flight_and_a_preemption():
    core = two_deep(budget=3, max_num_seqs=1)
    group = submit(core, 8, sampling=Sampling(num_prompt_logprobs=0))
    first, second = planned(core), planned(core)
    assert (first.telling, second.telling) == ([(0, 0)], [(0, 3)])
    core.preempt(group)
    core.update(first, replace(run(first), prompt_logprobs=told(1, 2, 3)))
    core.update(second, replace(run(second), prompt_logprobs=told(4, 5, 6)))
    assert group.prompt_logprobs.ranks.tolist() == [1, 2, 3, 4, 5, 6]
    telling = []
    while group.num_told < 7:
        plan = planned(core)
        telling.append(plan.telling)
        core.update(plan, run(plan))
    assert telling == [[], [], [(0, 6)]]


def test_a_prompt_with_a_log_probability_that_is_no_number_fails_its_group():
    core = make()
    group = submit(core, 4, sampling=Sampling(num_prompt_logprobs=0))
    plan = planned(core)
    broken = LogprobColumns(logprobs=pack_floats([-1.0, math.nan, -1.0]), ranks=array("i", [1, 2, 3]).tobytes())
    assert core.update(plan, replace(run(plan), prompt_logprobs=broken)).failed == [group]
    core.check()


def test_a_worker_lost_with_two_steps_in_flight_takes_their_tokens_with_it_and_no_other():
    core = two_deep(num_swap_blocks=10, preemption_mode=SWAP)
    running, swapped = submit(core, 4, max_tokens=6), submit(core, 5, n=2, max_tokens=6)
    waiting = submit(core, 40)
    answer(core, planned(core), 7, 8, 9)
    planned(core)
    planned(core)
    core.preempt(swapped)
    assert core.requeue_running(in_order=True)[0] == [running, swapped, waiting]
    core.check()
    assert core.blocks.num_free == 100
    assert [s.output_token_ids.tolist() for s in (*running.sequences, *swapped.sequences)] == [[7], [8], [9]]
    plan = planned(core)
    assert rows(plan)[:2] == [(1, 0, 5), (2, 0, 5)]
    assert [group.number for group in plan.new_groups] == [1, 2, 3], "the new worker is told of them anew"


# When the next step is planned


def sent(num_beams=0, step_id=1) -> Plan:
    return Plan(step_id, num_beams=num_beams)


def test_without_a_step_in_flight_the_next_is_planned_at_once_and_with_all_there_may_be_not_before_a_result():
    pacing = Pacing(1)
    assert pacing.next_plan_time() <= 0.0
    pacing.add(sent(), expected_s=1.0, now=10.0)
    assert pacing.next_plan_time() is None
    assert pacing.pop(now=11.5) == 1.5
    assert pacing.next_plan_time() <= 11.5


def test_the_second_step_is_planned_shortly_before_the_first_is_expected_to_end():
    pacing = Pacing(2)
    pacing.add(sent(), expected_s=1.0, now=10.0)
    assert 10.5 < pacing.next_plan_time() < 11.0
    pacing.add(sent(step_id=2), expected_s=1.0, now=10.9)
    assert pacing.next_plan_time() is None
    pacing.pop(now=11.2)
    assert 11.7 < pacing.next_plan_time() < 12.2, "the worker came to the second when it was done with the first"


def test_the_second_step_is_planned_at_once_while_nobody_knows_what_the_first_will_take():
    pacing = Pacing(2)
    pacing.add(sent(), expected_s=0.0, now=10.0)
    assert pacing.next_plan_time() <= 10.0


def test_a_step_of_beams_is_waited_for():
    pacing = Pacing(2)
    pacing.add(sent(num_beams=4), expected_s=1.0, now=10.0)
    assert pacing.next_plan_time() is None
    pacing.pop(now=11.0)
    assert pacing.next_plan_time() <= 11.0


def test_a_step_of_beams_is_waited_for_behind_another_one_too():
    pacing = Pacing(3)
    pacing.add(sent(), expected_s=1.0, now=10.0)
    pacing.add(sent(num_beams=4, step_id=2), expected_s=1.0, now=10.9)
    assert pacing.next_plan_time() is None
    pacing.pop(now=11.0)
    assert pacing.next_plan_time() is None


def test_when_there_was_nothing_to_plan_the_next_result_is_waited_for():
    pacing = Pacing(2)
    pacing.add(sent(), expected_s=0.0, now=10.0)
    pacing.rest()
    assert pacing.next_plan_time() is None
    pacing.pop(now=11.0)
    assert pacing.next_plan_time() <= 11.0


def test_a_steps_time_is_expected_from_those_before():
    core = make(budget=256)
    assert core.rates.expected_step_s(num_tokens=1, num_prefill_tokens=0) == 0.0
    core.rates.note_step(num_tokens=4, num_prefill_tokens=0, step_s=0.02)
    assert core.rates.expected_step_s(num_tokens=9, num_prefill_tokens=0) == 0.02
    core.rates.note_step(num_tokens=100, num_prefill_tokens=100, step_s=0.1)
    assert core.rates.decode_step_s == 0.02, "a prompt says nothing of decodes"
    assert core.rates.prefill_token_s == pytest.approx(0.0008), "a step takes 0.02 s in any case"
    assert core.rates.expected_step_s(num_tokens=210, num_prefill_tokens=200) == pytest.approx(0.2)
    assert core.rates.expected_step_s(num_tokens=12, num_prefill_tokens=10) == 0.02
    assert core.rates.expected_step_s(num_tokens=10, num_prefill_tokens=10) == pytest.approx(0.01)


def test_what_a_prompt_adds_to_a_step_is_not_known_before_a_decode_was():
    rates = Rates()
    rates.note_step(num_tokens=100, num_prefill_tokens=100, step_s=0.1)
    assert rates.prefill_token_s == 0.0
    rates.note_step(num_tokens=4, num_prefill_tokens=0, step_s=0.2)
    rates.note_step(num_tokens=100, num_prefill_tokens=100, step_s=0.1)
    assert rates.prefill_token_s == 0.0, "nor less than nothing"
