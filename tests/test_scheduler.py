"""The scheduler core: what each step holds, with numbers small enough to do by hand. No clock, no port, no torch."""

from array import array

import pytest
from scheduler_by_hand import STOP, make, rows, step, submit

from protos.columns import unpack
from scheduler.admission import QueueFull
from scheduler.plan import StepResult, to_request
from scheduler.policy import Policy
from scheduler.sequence import Progress, Status


def test_a_prompt_is_computed_then_a_token_a_step_until_max_tokens():
    core = make()
    group = submit(core, 5, max_tokens=3)
    assert rows(step(core)[0]) == [(1, 0, 5)]
    assert rows(step(core)[0]) == [(1, 5, 1)]
    plan, outputs = step(core)
    assert rows(plan) == [(1, 6, 1)]
    assert [end.sequence.status for end in outputs.finished] == [Status.FINISHED_LENGTH_CAPPED]
    assert group.sequences[0].output_token_ids.tolist() == [7, 7, 7]
    assert group.sequences[0].cumulative_logprob == pytest.approx(-1.5)
    assert core.blocks.num_free == 100
    assert not core.schedule(0.0).rows


def test_a_stop_id_ends_a_sequence_but_not_before_min_tokens():
    core = make()
    group = submit(core, 3, min_tokens=2)
    step(core, STOP)
    step(core, STOP)
    assert group.live
    step(core, STOP)
    assert group.sequences[0].stop_token_id == STOP
    assert group.sequences[0].status is Status.FINISHED_STOPPED
    assert len(group.sequences[0].output_token_ids) == 3


def test_a_long_prompt_is_computed_in_chunks_and_samples_only_at_its_end():
    core = make(budget=8)
    submit(core, 20)
    sampled = []
    for expected in [(1, 0, 8), (1, 8, 8), (1, 16, 4)]:
        plan, outputs = step(core)
        assert rows(plan) == [expected]
        sampled.append(len(outputs.new_tokens))
    assert sampled == [0, 0, 1]


def test_decodes_come_first_and_chunks_fill_what_is_left_of_the_budget():
    core = make(budget=8)
    submit(core, 3)
    step(core)
    submit(core, 20)
    assert rows(step(core)[0]) == [(1, 3, 1), (2, 0, 7)]
    assert rows(step(core)[0]) == [(1, 4, 1), (2, 7, 7)]


def test_the_budget_is_shared_by_prompts_in_order_of_arrival():
    core = make(budget=8)
    for _ in range(3):
        submit(core, 3)
    assert rows(step(core)[0]) == [(1, 0, 3), (2, 0, 3), (3, 0, 2)]


def test_max_num_seqs_holds_a_group_back():
    core = make(max_num_seqs=2)
    for _ in range(3):
        submit(core, 2)
    assert [number for number, _, _ in rows(step(core)[0])] == [1, 2]
    assert core.num_waiting == 1


def test_a_group_that_would_pass_the_watermark_waits_for_later():
    core = make(num_blocks=10, watermark=0.2)
    submit(core, 15)  # 4 blocks
    submit(core, 15)
    submit(core, 3)
    step(core)
    step(core)
    assert core.num_running == 2, "4 + 4 of 10 leave the watermark's 2"
    assert core.num_waiting == 1


def test_a_group_alone_may_take_the_watermark_too():
    core = make(num_blocks=4, watermark=0.5)
    submit(core, 12)
    assert rows(step(core)[0]) == [(1, 0, 12)]


def test_a_group_that_lacked_blocks_comes_in_as_soon_as_others_have_left_enough():
    core = make(num_blocks=6)
    submit(core, 7, max_tokens=2)
    submit(core, 3)
    group = submit(core, 15)  # 4 blocks
    step(core)
    assert group.status is Status.WAITING
    step(core)  # the first ends
    step(core)
    assert group.status is Status.RUNNING


def test_a_small_group_that_goes_first_is_not_held_up_by_what_a_large_one_lacked():
    core = make(num_blocks=6)
    submit(core, 14)
    submit(core, 10)
    step(core)
    submit(core, 3, priority=1)
    assert rows(step(core)[0]) == [(1, 14, 1), (3, 0, 3)]


def test_a_prompt_that_can_never_fit_is_ignored_with_an_explanation_and_others_go_on():
    core = make(num_blocks=4)
    group = submit(core, 17)
    submit(core, 3)
    plan, _ = step(core)
    assert rows(plan) == [(2, 0, 3)]
    assert group.sequences[0].status is Status.FINISHED_IGNORED
    assert plan.finished[0].message == (
        "1 x (a prompt of 17 tokens and one more) need 5 of the 4 KV blocks of 4 tokens that there are"
    )


def test_a_full_pool_preempts_the_newest_group():
    core = make(num_blocks=4)
    old = submit(core, 7)  # 2 blocks
    new = submit(core, 7)
    step(core)  # both at 8 tokens with the sampled one
    plan, _ = step(core)  # positions 7, no new block
    assert not plan.preempted
    plan, _ = step(core)  # position 8: each needs a third block, none is free
    assert len(plan.preempted) == 1
    assert rows(plan) == [(1, 8, 1)]
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    assert new.sequences[0].status is Status.WAITING
    assert not new.sequences[0].block_table


def test_a_preempted_sequence_computes_prompt_and_output_again_and_samples_the_next_token():
    core = make(num_blocks=4)
    submit(core, 7, max_tokens=4)
    new = submit(core, 7, max_tokens=4)
    while new.num_preemptions == 0:
        step(core)
    kept = new.sequences[0].output_token_ids.tolist()
    while new.root.status is not Status.RUNNING:
        plan, _ = step(core)
    assert rows(plan) == [(2, 0, 7 + len(kept))]
    assert len(new.sequences[0].output_token_ids) == len(kept) + 1


def test_a_preempted_group_returns_before_one_that_arrived_later():
    core = make(num_blocks=4)
    submit(core, 7, max_tokens=3)
    second = submit(core, 7)
    third = submit(core, 2)
    while second.num_preemptions == 0:
        step(core)
    assert third.first_scheduled is None
    while third.first_scheduled is None:
        step(core)
    assert second.status is Status.RUNNING, "the block left free meanwhile did not go to the later one"


def test_the_oldest_group_always_finishes_however_small_the_pool():
    core = make(num_blocks=5)
    groups = [submit(core, 5, max_tokens=12) for _ in range(6)]
    for _ in range(300):
        step(core)
    assert all(not group.live for group in groups)
    assert core.num_preemptions > 0
    assert core.blocks.num_free == 5


def test_max_tokens_is_capped_by_what_a_group_alone_can_hold_and_that_is_said():
    core = make(num_blocks=4)
    group, ends = submit(core, 5, max_tokens=1000), []
    while group.live:
        ends += step(core)[1].finished
    assert group.sequences[0].status is Status.FINISHED_LENGTH_CAPPED
    assert len(group.sequences[0].output_token_ids) == 4 * 4 - 5
    assert [end.message for end in ends] == [
        "11 tokens of output are all that there is room for in the 4 KV blocks of 4 tokens that there are, behind a "
        "prompt of 5 tokens"
    ]


def test_sequences_that_went_on_unevenly_in_a_larger_pool_end_at_this_ones_cap_or_fit_into_it():
    core = make(num_blocks=13, block_size=1, budget=3, max_num_seqs=2)
    begun = [Progress(array("i", [7])), Progress(array("i", [7] * 9))]
    group = submit(core, 1, max_tokens=20, n=2, progress=begun)
    plan, _ = step(core)
    assert [ended.sequence.index for ended in plan.finished] == [1]
    assert "13 KV blocks of 1 tokens that there are, behind a prompt of 1 tokens and beside" in plan.finished[0].message
    while group.live:
        step(core)
    assert [len(sequence.output_token_ids) for sequence in group.sequences] == [6, 9]


def test_a_group_that_goes_on_has_the_room_of_its_sequences_that_have_ended():
    core = make(num_blocks=25)
    begun = [Progress(array("i", [7] * 40)), *[Progress(array("i"), 0.0, True)] * 3]
    assert submit(core, 4, max_tokens=80, n=4, progress=begun).max_tokens == 80


def test_a_group_that_goes_on_with_one_sequence_computes_prompt_and_output_in_one_row():
    core = make()
    submit(core, 4, n=2, progress=[Progress(array("i"), 0.0, True), Progress(array("i", [7] * 5))])
    assert rows(step(core)[0]) == [(1, 0, 9)]


def test_sequences_of_one_prompt_have_all_begun_elsewhere_or_none():
    with pytest.raises(ValueError, match="some sequences have tokens and others none"):
        submit(make(), 4, n=2, progress=[Progress(array("i")), Progress(array("i", [7]))])


@pytest.mark.parametrize(
    ("begun", "reason"),
    [
        ([Progress(array("i", [7] * 9)), Progress(array("i", [7]))], "sequence 0 has all of its 9 tokens already"),
        ([Progress(array("i", [7]), 0.0, True)] * 2, "all sequences have ended already"),
        ([Progress(array("i", [7]))], "zip"),
    ],
)
def test_what_leaves_nothing_to_do_or_is_of_other_sequences_cannot_be_gone_on_with(begun, reason):
    core = make()
    with pytest.raises(ValueError, match=reason):
        submit(core, 4, n=2, max_tokens=9, progress=begun)
    assert core.num_live == 0


def test_n_sequences_share_the_prompts_blocks_and_sample_from_one_row():
    core = make(num_blocks=10)
    group = submit(core, 6, n=3)
    plan, outputs = step(core)
    assert rows(plan) == [(1, 0, 6)]
    assert [sequence.index for sequence in plan.rows[0].samples] == [0, 1, 2]
    assert len(outputs.new_tokens) == 3
    assert core.blocks.num_free == 8, "two blocks for all three"
    plan, _ = step(core)
    assert rows(plan) == [(1, 6, 1)] * 3
    assert len(plan.blocks_to_copy) == 2, "the last one to write keeps the shared block"
    assert core.blocks.num_free == 6
    assert len({sequence.block_table[0] for sequence in group.live}) == 1
    assert len({sequence.block_table[1] for sequence in group.live}) == 3


def test_a_preempted_group_of_several_shares_its_prompt_again():
    core = make(num_blocks=7)
    submit(core, 7, max_tokens=9)
    group = submit(core, 6, n=2, max_tokens=6)
    while group.num_preemptions == 0:
        step(core)
    outputs_before = [sequence.output_token_ids.tolist() for sequence in group.sequences]
    assert all(outputs_before)
    while group.root.status is not Status.RUNNING:
        step(core)
    assert group.forked
    assert group.live[0].block_table[0] == group.live[1].block_table[0]
    while group.live:
        step(core)
    for sequence, before in zip(group.sequences, outputs_before, strict=True):
        assert sequence.output_token_ids.tolist()[: len(before)] == before
        assert len(sequence.output_token_ids) == 6


def test_a_group_of_several_is_preempted_all_or_nothing():
    core = make(num_blocks=6, max_num_seqs=4)
    submit(core, 8, max_tokens=20)
    group = submit(core, 7, n=2, max_tokens=20)
    for _ in range(40):
        plan, _ = step(core)
        if plan.preempted:
            break
    assert len(plan.preempted) == 1
    assert not any(row.group is group for row in plan.rows)
    assert all(sequence.status is Status.WAITING for sequence in group.live)
    live_blocks = {block for row in plan.rows for block in row.sequence.block_table}
    assert all(to in live_blocks for _, to in plan.blocks_to_copy)


def test_a_sequence_stopped_by_the_router_leaves_its_group_running():
    core = make()
    group = submit(core, 4, n=2)
    step(core)
    finished = core.stop(group, 0)
    core.check()
    assert finished is not None
    assert group.sequences[0].status is Status.FINISHED_STOPPED
    assert [(row.sequence.index) for row in step(core)[0].rows] == [1]
    assert core.stop(group, 0) is None, "a second time changes nothing"


def test_abort_frees_all_blocks_at_once_and_twice_is_as_once():
    core = make()
    group = submit(core, 9, n=2)
    step(core)
    core.abort(group)
    core.abort(group)
    core.check()
    assert core.blocks.num_free == 100
    assert [sequence.status for sequence in group.sequences] == [Status.FINISHED_ABORTED] * 2


def test_a_group_aborted_while_its_step_runs_takes_no_token_from_it():
    core = make()
    group = submit(core, 4)
    other = submit(core, 4)
    plan = core.schedule(0.0)
    core.abort(group)
    outputs = core.update(plan, StepResult([7, 8], [0.0, 0.0]))
    core.check()
    assert [new.group for new in outputs.new_tokens] == [other]
    assert other.sequences[0].output_token_ids.tolist() == [8]


def test_a_waiting_group_is_dropped_when_its_deadline_passes_before_any_prefill_is_spent_on_it():
    core = make()
    group = submit(core, 4, deadline=5.0)
    assert core.next_deadline == 5.0
    plan = core.schedule(5.0)
    assert plan.rows == []
    assert [dropped.group for dropped in plan.dropped] == [group]
    assert group.sequences[0].status is Status.FINISHED_ABORTED
    assert core.next_deadline is None


@pytest.mark.parametrize("deadlines", [[None], [3.0], [8.0], [8.0, 5.0], [None, 3.0], [3.0, None]])
def test_who_takes_a_group_over_gives_it_a_deadline_of_its_own(deadlines):
    core = make()
    group, other = submit(core, 4, deadline=5.0), submit(core, 4, deadline=9.0)
    for deadline in deadlines:
        core.set_deadline(group, deadline)
    assert core.next_deadline == min(9.0, deadline or 9.0)
    times = (2.0, 3.0, 5.0, 8.0)
    dropped = [[each.group for each in step(core, now=now)[0].dropped] for now in times]
    assert dropped == [[group] * (now == deadline) for now in times]
    assert other.live


def test_a_running_group_ends_when_its_deadline_passes():
    core = make()
    group = submit(core, 4, deadline=5.0)
    step(core, now=1.0)
    plan, _ = step(core, now=6.0)
    assert [dropped.group for dropped in plan.dropped] == [group]
    assert core.blocks.num_free == 100


def test_the_waiting_queue_is_bounded():
    core = make(max_waiting_requests=2)
    submit(core, 2)
    submit(core, 2)
    with pytest.raises(QueueFull, match=r"^2 requests are waiting already$"):
        submit(core, 2)
    core.check()


@pytest.mark.parametrize("lacking", [{"prompt": 0}, {"prompt": 2, "n": 0}, {"prompt": 2, "max_tokens": 0}])
def test_a_request_without_prompt_sequences_or_tokens_is_refused(lacking):
    with pytest.raises(ValueError, match="needs a prompt, at least one sequence and at least one token"):
        submit(make(), **lacking)


def test_more_sequences_than_can_run_together_are_refused():
    with pytest.raises(ValueError, match="more than the 8"):
        submit(make(), 2, n=9)


def test_a_policy_under_which_a_decode_might_not_fit_is_refused():
    with pytest.raises(ValueError, match="max_num_seqs"):
        Policy(max_num_batched_tokens=8, max_num_seqs=9, max_waiting_requests=1)


def test_a_sample_without_a_token_fails_its_group_alone():
    core = make()
    broken, fine = submit(core, 4), submit(core, 4)
    plan = core.schedule(0.0)
    outputs = core.update(plan, StepResult([0, 7], [0.0, 0.0], failed=[0]))
    core.check()
    assert outputs.failed == [broken]
    assert fine.sequences[0].output_token_ids.tolist() == [7]


def test_a_lost_worker_sends_all_running_groups_back_and_they_lose_no_token():
    core = make()
    groups = [submit(core, 4, max_tokens=6, n=n) for n in (1, 2)]
    for _ in range(3):
        step(core)
    kept = [[s.output_token_ids.tolist() for s in group.sequences] for group in groups]
    plan = core.schedule(0.0)
    assert core.requeue_running(in_order=True)[0] == groups
    core.check()
    assert core.blocks.num_free == 100
    plan = core.schedule(0.0)
    assert [group.number for group in plan.new_groups] == [1, 2], "the new worker is told of them anew"
    num_samples = sum(len(row.samples) for row in plan.rows)
    core.update(plan, StepResult([7] * num_samples, [0.0] * num_samples))
    while any(group.live for group in groups):
        step(core)
    for group, before in zip(groups, kept, strict=True):
        for sequence, tokens in zip(group.sequences, before, strict=True):
            assert sequence.output_token_ids.tolist()[:3] == tokens
            assert len(sequence.output_token_ids) == 6


def test_with_a_worker_nothing_is_lost_of_a_group_that_never_ran():
    core = make(max_num_seqs=1)
    running, _ = submit(core, 4), submit(core, 4)
    step(core)
    assert core.requeue_running()[0] == [running]


def test_the_worker_is_told_of_a_request_once_and_when_it_is_over():
    core = make()
    submit(core, 2, max_tokens=2)
    assert [group.number for group in step(core)[0].new_groups] == [1]
    assert step(core)[0].new_groups == []
    submit(core, 2)
    assert step(core)[0].forget == [1]


def test_what_the_worker_must_forget_waits_for_a_step_that_is_sent():
    core = make()
    submit(core, 2, max_tokens=1)
    step(core)
    assert core.schedule(0.0).forget == []
    submit(core, 2)
    assert step(core)[0].forget == [1]


def test_a_plan_travels_in_columns():
    core = make()
    submit(core, [11, 12, 13], n=2)
    step(core, token=7)
    submit(core, [21])
    request = to_request(core.schedule(0.0), epoch=9)
    assert (request.step_id, request.epoch) == (2, 9)
    assert unpack(request.request_ids).tolist() == [1, 1, 2]
    assert unpack(request.sequence_indexes).tolist() == [0, 1, 0]
    assert unpack(request.num_computed_tokens).tolist() == [3, 3, 0]
    assert unpack(request.num_new_tokens).tolist() == [1, 1, 1]
    assert unpack(request.token_ids).tolist() == [7, 7, 21]
    assert unpack(request.block_table_lengths).tolist() == [1, 1, 1]
    assert unpack(request.block_tables).tolist() == [1, 0, 2]
    assert unpack(request.sample_rows).tolist() == [0, 1, 2]
    assert unpack(request.sample_sequence_indexes).tolist() == [0, 1, 0]
    assert unpack(request.blocks_to_copy).tolist() == [0, 1]
    assert [new.request_id for new in request.new_requests] == [2]


def test_token_ids_cross_the_border_of_prompt_and_output():
    core = make()
    group = submit(core, [11, 12, 13])
    step(core, token=7)
    step(core, token=8)
    sequence = group.sequences[0]
    assert group.token_ids(sequence, 1, 5).tolist() == [12, 13, 7, 8]
    assert group.token_ids(sequence, 0, 2).tolist() == [11, 12]
    assert group.token_ids(sequence, 4, 5).tolist() == [8]


def test_who_comes_from_another_scheduler_keeps_the_place_that_it_has_waited_for():
    core = make(max_num_seqs=1)
    submit(core, 4, now=0.0)
    step(core, now=0.0)
    first, second = submit(core, 4, now=5.0), submit(core, 4, now=9.0)
    moved = submit(core, 4, now=10.0, progress=[Progress(array("i"))], waited_s=4.0)
    assert core.queues.waiting.order() == [first, moved, second]


def test_numbers_begin_anew_behind_the_last_one_and_leave_live_groups_alone(monkeypatch):
    monkeypatch.setattr("protos.columns._LARGEST", 3)
    core = make()
    kept = submit(core, 4)
    numbers = []
    for now in range(4):
        group = submit(core, 4, now=float(now))
        numbers.append(group.number)
        core.abort(group)
    assert (kept.number, numbers) == (1, [2, 3, 2, 3])
