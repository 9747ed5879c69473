"""Classic steps, deadlines that cannot be met, the bounds of the waiting queue, and why one waits."""

import pytest
from scheduler_by_hand import make, rows, step, submit

from scheduler.admission import QueueFull, Reason
from scheduler.explain import explain
from scheduler.plan import StepResult
from scheduler.policy import Policy, PreemptionMode
from scheduler.sequence import Status


def timed_step(core, now: float, step_s: float):
    plan = core.schedule(now)
    core.check()
    num_samples = sum(len(row.samples) for row in plan.rows)
    core.update(plan, StepResult([7] * num_samples, [0.0] * num_samples, step_s=step_s))
    return plan


def test_a_classic_step_is_all_prefill_or_all_decode():
    core = make(chunked_prefill=False)
    submit(core, 3)
    assert rows(step(core)[0]) == [(1, 0, 3)]
    submit(core, 5)
    submit(core, 6)
    assert rows(step(core)[0]) == [(1, 3, 1)]
    assert rows(step(core)[0]) == [(2, 0, 5), (3, 0, 6)]
    assert rows(step(core)[0]) == [(1, 4, 1), (2, 5, 1), (3, 6, 1)]


def test_steps_of_prompts_and_of_decodes_take_turns_so_that_neither_waits_for_the_other():
    core = make(chunked_prefill=False)
    submit(core, 3)
    step(core)
    planned = []
    for _ in range(4):
        submit(core, 2, max_tokens=1, priority=10)
        planned.append([number for number, _, _ in rows(step(core)[0])])
    assert planned == [[1], [2, 3], [1], [4, 5]]


def test_a_classic_prompt_is_whole_unless_it_is_longer_than_a_step():
    core = make(chunked_prefill=False, budget=16)
    for prompt in (10, 10, 40):
        submit(core, prompt, max_tokens=1)
    assert rows(step(core)[0]) == [(1, 0, 10)], "the second would have to be cut"
    assert rows(step(core)[0]) == [(2, 0, 10)]
    assert [rows(step(core)[0]) for _ in range(3)] == [[(3, 0, 16)], [(3, 16, 16)], [(3, 32, 8)]]


def test_a_group_swapped_out_comes_back_in_a_decode_step_before_new_prompts():
    core = make(chunked_prefill=False, num_swap_blocks=10, preemption_mode=PreemptionMode.SWAP)
    first, second = submit(core, 3), submit(core, 3)
    step(core)
    core.preempt(second)
    third = submit(core, 3)
    plan, _ = step(core)
    assert [row.group for row in plan.rows] == [first, second]
    assert third.status is Status.WAITING
    assert rows(step(core)[0]) == [(3, 0, 3)]


def test_the_delay_factor_lets_prompts_gather_for_a_multiple_of_the_last_prefill_step():
    core = make(chunked_prefill=False, delay_factor=2.0)
    submit(core, 3, now=0.0)
    timed_step(core, now=0.0, step_s=0.5)
    late = submit(core, 4, now=1.0)
    assert rows(timed_step(core, now=1.8, step_s=0.1)) == [(1, 3, 1)]
    assert rows(timed_step(core, now=1.9, step_s=0.1)) == [(1, 4, 1)]
    assert explain(core, late).reason is Reason.DELAY
    assert rows(timed_step(core, now=2.0, step_s=0.1)) == [(2, 0, 4)]


def test_the_delay_factor_does_not_hold_up_prompts_when_nothing_runs():
    core = make(chunked_prefill=False, delay_factor=2.0)
    submit(core, 3, max_tokens=1)
    timed_step(core, now=0.0, step_s=100.0)
    submit(core, 4, now=1.0)
    assert rows(timed_step(core, now=1.0, step_s=0.1)) == [(2, 0, 4)]


def test_a_delay_factor_goes_with_classic_steps_only():
    with pytest.raises(ValueError, match="chunked_prefill off"):
        Policy(8, 8, 8, delay_factor=1.0)


def test_a_deadline_that_the_measured_rate_can_not_meet_is_refused_before_it_passes():
    core = make(budget=128, num_blocks=200)
    running = submit(core, 100, max_tokens=9)
    timed_step(core, now=0.0, step_s=1.0)  # 100 tokens/s
    late = submit(core, 120, now=1.0, deadline=2.0)
    meant = submit(core, 80, now=1.0, deadline=2.0)
    plan = core.schedule(1.1)
    assert [dropped.group for dropped in plan.dropped] == [late]
    assert plan.dropped[0].message == (
        "its deadline cannot be met: it has waited 100 ms, 900 ms are left, and computing 120 tokens of its prompt "
        "takes 1200 ms at the measured 100 tokens/s"
    )
    assert late.status is Status.FINISHED_ABORTED
    assert [row.group for row in plan.rows] == [running, meant]


@pytest.mark.parametrize("num_together", [1, 3])
def test_one_slow_step_does_not_refuse_deadlines_for_ever(num_together):
    core = make(budget=128, num_blocks=200)
    submit(core, 100, max_tokens=1)
    timed_step(core, now=0.0, step_s=100.0)  # one token a second: the machine was suspended, say
    dropped = []
    for now in range(100, 110):
        for _ in range(num_together):
            submit(core, 100, max_tokens=1, now=float(now), deadline=now + 2.0)
        while core.num_live:
            dropped += timed_step(core, now=now + 0.5, step_s=0.1).dropped
    assert len(dropped) == num_together - 1, "while nothing runs one is tried, and measured"


def test_tokens_in_the_prefix_cache_count_as_computed_for_a_deadline():
    core = make(budget=128, num_blocks=200, prefix_caching=True)
    submit(core, list(range(100)), max_tokens=1)
    timed_step(core, now=0.0, step_s=1.0)
    meant = submit(core, [*range(100), *range(20)], now=1.0, deadline=2.0)
    late = submit(core, [*range(100), *range(200, 270)], now=1.0, deadline=1.5)
    plan = core.schedule(1.0)
    assert [row.group for row in plan.rows] == [meant]
    assert [dropped.group for dropped in plan.dropped] == [late]
    assert "computing 70 tokens of its prompt takes 700 ms" in plan.dropped[0].message


def test_without_a_measured_rate_a_deadline_is_kept_as_it_is():
    core = make(max_num_seqs=1)
    submit(core, 4)
    step(core)
    waiting = submit(core, 4, deadline=5.0)
    assert not step(core, now=4.9)[0].dropped
    assert [dropped.group for dropped in core.schedule(5.0).dropped] == [waiting]


def test_a_running_group_keeps_its_deadline_as_it_is():
    core = make(budget=128, num_blocks=200)
    submit(core, 100, max_tokens=1)
    timed_step(core, now=0.0, step_s=1.0)
    running = submit(core, 100, now=1.0, deadline=3.0)
    timed_step(core, now=1.0, step_s=1.0)
    assert not step(core, now=2.9)[0].dropped
    assert [dropped.group for dropped in core.schedule(3.0).dropped] == [running]


def test_waiting_tokens_are_bounded_but_one_prompt_may_always_wait():
    core = make(max_waiting_tokens=10)
    submit(core, 30)
    with pytest.raises(QueueFull, match="30 prompt tokens"):
        submit(core, 1)
    step(core)
    submit(core, 9)
    submit(core, 1)
    with pytest.raises(QueueFull, match="10 prompt tokens"):
        submit(core, 1)
    core.check()


def test_a_group_that_left_the_queue_makes_room_in_it():
    core = make(max_waiting_tokens=10, max_waiting_requests=2)
    first = submit(core, 8)
    submit(core, 2)
    core.abort(first)
    submit(core, 8)
    core.check()


def explained(core, group):
    explanation = explain(core, group)
    return explanation.status, explanation.reason


def test_a_running_group_has_nothing_to_explain_but_its_figures():
    core = make()
    group = submit(core, 6, n=2)
    assert explained(core, group) == (Status.WAITING, Reason.NEXT_STEP)
    step(core)
    explanation = explain(core, group)
    assert (explanation.status, explanation.reason, explanation.queue_position) == (Status.RUNNING, None, None)
    assert (explanation.num_blocks_held, explanation.num_computed_tokens, explanation.num_output_tokens) == (4, 12, 2)


def test_a_group_waits_for_those_before_it_and_the_first_for_what_is_lacking():
    core = make(num_blocks=6)
    submit(core, 14)
    first, second = submit(core, 10), submit(core, 3)
    step(core)
    step(core)
    explanation = explain(core, first)
    assert (explanation.reason, explanation.queue_position, explanation.num_blocks_needed) == (Reason.BLOCKS, 0, 3)
    assert "needs 3 blocks" in explanation.message
    assert "2 are free" in explanation.message
    assert (explain(core, second).reason, explain(core, second).queue_position) == (Reason.QUEUE, 1)


def test_who_becomes_the_first_after_the_last_plan_does_not_lack_what_the_one_before_lacked():
    core = make(num_blocks=6)
    submit(core, 14)
    lacking = submit(core, 10)
    step(core)
    first = submit(core, 10, priority=1)
    assert explained(core, first) == (Status.WAITING, Reason.NEXT_STEP)
    assert explain(core, first).message == "nothing is known to be in its way: the next step looks at it"
    assert explained(core, lacking) == (Status.WAITING, Reason.QUEUE)


def test_a_group_waits_for_a_sequence_to_end():
    core = make(max_num_seqs=2)
    submit(core, 4)
    group = submit(core, 4, n=2)
    step(core)
    assert explained(core, group) == (Status.WAITING, Reason.SEQUENCES)


def test_a_group_waits_for_tokens_of_the_budget():
    core = make(budget=8)
    submit(core, 30)
    group = submit(core, 4)
    step(core)
    assert explained(core, group) == (Status.WAITING, Reason.TOKENS)


def test_a_group_waits_for_those_that_were_swapped_out_and_these_for_blocks():
    core = make(num_blocks=6, num_swap_blocks=6, max_num_seqs=4)
    submit(core, 8, max_tokens=12)
    group = submit(core, 7, n=2, max_tokens=6)
    while group.status is not Status.SWAPPED:
        step(core)
    late = submit(core, 3)
    assert explained(core, late) == (Status.WAITING, Reason.SWAPPED_GROUPS)
    assert explained(core, group) == (Status.SWAPPED, Reason.BLOCKS)
    assert explain(core, group).num_blocks_needed == 5, "3 that were swapped, and one more each"


def test_a_half_computed_prompt_of_several_sequences_needs_the_blocks_of_one_to_come_back():
    core = make(num_swap_blocks=10, budget=8, preemption_mode=PreemptionMode.SWAP)
    group = submit(core, 20, n=2)
    step(core)
    core.preempt(group)
    assert explain(core, group).num_blocks_needed == 5, "2 that were swapped, and 3 for the rest"


def test_each_final_status_is_reached():
    core = make(num_blocks=6, budget=16)
    stopped, capped, aborted = submit(core, 2), submit(core, 2, max_tokens=2), submit(core, 2)
    ignored = submit(core, 50)
    step(core)
    core.stop(stopped, 0)
    step(core)
    core.abort(aborted)
    step(core)
    reached = [group.status for group in (stopped, capped, aborted, ignored)]
    assert reached == [status for status in Status if status.finished]


def test_a_sequence_stopped_in_its_text_drops_what_was_sampled_since():
    core = make()
    group = submit(core, 3)
    for token in (7, 8, 9):
        step(core, token)
    finished = core.stop(group, 0, num_tokens=2)
    assert finished.sequence.output_token_ids.tolist() == [7, 8]
    assert finished.sequence.cumulative_logprob == -1.0
    core.check()


def test_a_prompt_of_several_sequences_has_the_whole_budget():
    core = make(budget=8)
    submit(core, 100, n=8, max_tokens=1)
    assert [rows(step(core)[0])[0][2] for _ in range(13)] == [8] * 12 + [4]


def test_two_prompts_that_are_computed_in_chunks_share_the_budget():
    core = make(budget=8, num_blocks=100, watermark=0.0)
    first, second = submit(core, 12), submit(core, 30)
    step(core)
    step(core)
    late = submit(core, 30, priority=5)
    assert rows(step(core)[0]) == [(1, 12, 1), (2, 4, 7)]
    assert late.status is Status.WAITING
    assert first.live
    assert second.live


def with_rates(prefill_token_s: float, decode_step_s: float, num_prompts: int, num_tokens: int):
    """A core that has measured these, and so many prompts that wait."""
    core = make(num_blocks=1000, budget=512, max_num_seqs=64)
    core.rates.prefill_token_s, core.rates.decode_step_s = prefill_token_s, decode_step_s
    return core, [submit(core, num_tokens) for _ in range(num_prompts)]


def test_a_prompt_does_not_join_a_step_in_which_that_would_hold_up_the_end_of_another_one():
    core, (_, second) = with_rates(0.001, 0.01, num_prompts=2, num_tokens=300)
    plan, _ = step(core)
    assert rows(plan) == [(1, 0, 300)], "together, 300 ms more for the first one, and 10 less for the other"
    assert core.held_up(second) is Reason.NEXT_STEP
    assert rows(step(core)[0]) == [(1, 300, 1), (2, 0, 300)]


def test_the_rest_of_a_prompt_that_was_cut_is_not_held_up_either():
    core, _ = with_rates(0.001, 0.01, num_prompts=1, num_tokens=600)
    submit(core, 300)
    assert rows(step(core)[0]) == [(1, 0, 512)]
    assert rows(step(core)[0]) == [(1, 512, 88)]
    assert rows(step(core)[0]) == [(1, 600, 1), (2, 0, 300)]


def test_a_prompt_joins_a_step_where_its_tokens_take_less_than_a_step_more():
    core, _ = with_rates(0.001, 0.01, num_prompts=1, num_tokens=300)
    submit(core, 9)
    submit(core, 11)
    plan, _ = step(core)
    assert rows(plan) == [(1, 0, 300), (2, 0, 9)], "9 ms for one or 10 for two, then 11 for two or 10 for one"


def test_with_many_waiting_prompts_share_steps_rather_than_have_all_wait_for_one_more():
    core, _ = with_rates(0.001, 0.01, num_prompts=30, num_tokens=16)
    plan, _ = step(core)
    assert len(plan.rows) == 12, "12 times 16 ms are more than 18 times 10, 11 times 16 are less than 19 times 10"
    num_steps = 1
    while core.num_waiting:
        step(core)
        num_steps += 1
    assert num_steps < 8


@pytest.mark.parametrize("rates", [(0.00001, 0.01), (0.0, 0.01), (0.0, 0.0)], ids=str)
def test_all_prompts_join_where_a_step_hardly_takes_longer_for_them_or_nobody_knows(rates):
    core, _ = with_rates(*rates, num_prompts=2, num_tokens=200)
    assert rows(step(core)[0]) == [(1, 0, 200), (2, 0, 200)]


def test_a_deadline_given_before_the_rate_was_known_is_looked_at_again_at_admission():
    core = make(budget=128, num_blocks=400, max_num_seqs=4)
    submit(core, 128, max_tokens=9)
    late = submit(core, 1000, deadline=3.0)
    timed_step(core, now=0.0, step_s=1.28)  # 100 tokens/s
    plan = timed_step(core, now=1.28, step_s=1.28)
    assert [dropped.group for dropped in plan.dropped] == [late]
    assert late not in [row.group for row in plan.rows]
    assert "1000 tokens of its prompt takes 10000 ms" in plan.dropped[0].message


def test_a_sampled_group_that_outgrew_the_pool_of_a_new_worker_ends_by_its_length():
    core = make(num_blocks=40)
    group = submit(core, 8, max_tokens=60)
    for _ in range(20):
        step(core)
    core.requeue_running()
    core.replace_pool(type(core.blocks)(num_blocks=6, block_size=4))
    plan = core.schedule(0.0)
    assert [end.sequence.status for end in plan.finished] == [Status.FINISHED_LENGTH_CAPPED]
    assert "20 tokens of output" in plan.finished[0].message
    assert "behind a prompt of 8 tokens" in plan.finished[0].message
    assert len(group.sequences[0].output_token_ids) == 20


def test_a_short_lived_small_pool_shortens_nobody_who_had_room_before_and_has_it_again():
    core = make(num_blocks=40)
    group = submit(core, 8, max_tokens=50)
    step(core)
    core.requeue_running()
    core.replace_pool(type(core.blocks)(num_blocks=4, block_size=4))
    assert group.max_tokens == 8
    core.replace_pool(type(core.blocks)(num_blocks=40, block_size=4))
    assert group.max_tokens == 50


def test_looking_up_a_prompt_that_has_to_wait_is_not_done_again_each_step():
    core = make(num_blocks=8, prefix_caching=True)
    submit(core, 15, max_tokens=12)
    submit(core, list(range(50, 80)))
    step(core)
    looked_up = []
    match = core.blocks.match
    core.blocks.match = lambda tokens, salt: looked_up.append(tokens) or match(tokens, salt)
    for _ in range(3):
        step(core)
    assert len(looked_up) <= 1
