"""Preemption: who loses its blocks, by which way, and how it gets them back."""

import pytest
from scheduler_by_hand import make, rows, step, submit
from scheduler_model import Memory, run

from scheduler.beam import BeamParams
from scheduler.plan import StepResult, to_request
from scheduler.policy import PreemptionMode
from scheduler.preemption import Rates, choose_mode
from scheduler.sequence import Status

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE


def swapped_out(core, victim):
    """Steps until `victim` is swapped out; the plan of that step."""
    plan = None
    while victim.status is not Status.SWAPPED:
        plan, _ = step(core)
    return plan


def test_a_group_of_several_is_swapped_out_whole_and_its_shared_blocks_once():
    core = make(num_blocks=6, num_swap_blocks=6, max_num_seqs=4)
    submit(core, 8, max_tokens=12)
    group = submit(core, 7, n=2, max_tokens=6)  # two blocks, then the second copied
    before = None
    while group.status is not Status.SWAPPED:
        before = [sequence.block_table.tolist() for sequence in group.live]
        plan, _ = step(core)
    assert before[0][0] == before[1][0]
    held = {block for table in before for block in table}
    assert {block for block, _ in plan.blocks_to_swap_out} == held
    assert len(plan.blocks_to_swap_out) == len(held), "a shared block is copied once"
    assert core.blocks.num_free_swap_blocks == 6 - len(held)
    assert not any(sequence.block_table for sequence in group.live)


def test_a_swapped_group_comes_back_where_it_was_and_computes_nothing_twice():
    core = make(num_blocks=6, num_swap_blocks=6, max_num_seqs=4)
    submit(core, 8, max_tokens=12)
    group = submit(core, 7, n=2, max_tokens=6)
    swapped_out(core, group)
    computed = [sequence.num_computed_tokens for sequence in group.live]
    while group.status is Status.SWAPPED:
        plan, _ = step(core)
    starts = [row.start for row in plan.rows if row.group is group]
    assert starts == computed
    assert len(plan.blocks_to_swap_in) == 3
    assert group.live[0].block_table[0] == group.live[1].block_table[0], "what was shared is shared again"
    assert core.blocks.num_free_swap_blocks == 6
    assert (core.num_swap_outs, core.num_swap_ins) == (1, 1)


def test_a_swapped_groups_blocks_hold_what_they_held():
    core = make(num_blocks=6, num_swap_blocks=6, max_num_seqs=4)
    memory = Memory(4)
    submit(core, 8, max_tokens=12)
    group = submit(core, 7, n=2, max_tokens=6)
    while core.num_live:
        plan = core.schedule(0.0)
        memory.execute(plan)  # asserts that each row attends to its own tokens
        core.update(plan, run(plan))
    assert group.num_preemptions == 1


def test_nobody_comes_in_by_a_step_that_takes_the_blocks_of_others():
    core = make(num_blocks=7, num_swap_blocks=9, budget=64, preemption_mode=SWAP)
    submit(core, 7)
    swapped = submit(core, 3)
    submit(core, 15)
    step(core)
    core.preempt(swapped)
    step(core)
    plan, _ = step(core)
    assert [preemption.group.number for preemption in plan.preempted] == [3]
    assert rows(plan) == [(1, 8, 1)], "the second would have room now"
    assert rows(step(core)[0]) == [(1, 9, 1), (2, 3, 1)]

    core = make(num_blocks=6, budget=64)
    submit(core, 7, tenant="a")
    submit(core, 15, tenant="a")
    step(core)
    submit(core, 3, tenant="b")
    step(core)
    plan, _ = step(core)
    assert [preemption.group.number for preemption in plan.preempted] == [2]
    assert rows(plan) == [(1, 8, 1)]
    assert rows(step(core)[0]) == [(1, 9, 1), (3, 0, 3)]


def test_new_prompts_wait_while_a_group_is_swapped_out_and_it_returns_before_them():
    core = make(num_blocks=6, num_swap_blocks=6, max_num_seqs=8)
    submit(core, 8, max_tokens=12)
    group = submit(core, 7, n=2, max_tokens=6)
    swapped_out(core, group)
    late = submit(core, 1, max_tokens=1)
    plan, _ = step(core)
    assert late.status is Status.WAITING, "there is room for it, but not its turn"
    while group.status is Status.SWAPPED:
        plan, _ = step(core)
    assert [number for number, _, _ in rows(plan)] in ([2, 2], [2, 2, 3])


def test_a_full_swap_pool_falls_back_to_recompute_and_says_so():
    core = make(num_blocks=6, num_swap_blocks=2, max_num_seqs=4, preemption_mode=SWAP)
    submit(core, 8, max_tokens=12)
    group = submit(core, 7, n=2, max_tokens=6)
    while not group.num_preemptions:
        plan, _ = step(core)
    assert group.status is Status.WAITING
    assert plan.preempted[0].mode is RECOMPUTE
    assert group.preemption_reason == "recompute: 3 blocks to swap, 2 swap blocks free"


def test_one_sequence_is_recomputed_and_several_are_swapped_while_nothing_is_measured():
    for n, mode in ((1, RECOMPUTE), (2, SWAP)):
        core = make(num_swap_blocks=10)
        group = submit(core, 6, n=n)
        step(core)
        assert choose_mode(group, PreemptionMode.AUTO, core.blocks, Rates())[0] is mode


def test_a_mode_that_is_forced_holds_for_one_sequence_and_for_several():
    for n in (1, 2):
        for mode in (SWAP, RECOMPUTE):
            core = make(num_swap_blocks=10, preemption_mode=mode)
            group = submit(core, 6, n=n)
            step(core)
            assert core.preempt(group).mode is mode
            core.check()


def test_auto_takes_the_cheaper_way_by_the_measured_rates_and_says_why():
    core = make(num_swap_blocks=10)
    group = submit(core, 6, n=2)
    step(core)
    step(core)  # 6 + 2 tokens in 3 blocks
    fast_copies = Rates(prefill_tokens_per_s=1000.0, swap_blocks_per_s=10_000.0)
    assert choose_mode(group, PreemptionMode.AUTO, core.blocks, fast_copies) == (
        SWAP,
        "swap: 8 tokens take 8.0 ms to compute, 3 blocks 0.6 ms to swap",
    )
    slow_copies = Rates(prefill_tokens_per_s=1000.0, swap_blocks_per_s=100.0)
    assert choose_mode(group, PreemptionMode.AUTO, core.blocks, slow_copies) == (
        RECOMPUTE,
        "recompute: 8 tokens take 8.0 ms to compute, 3 blocks 60.0 ms to swap",
    )


def test_rates_are_averages_of_steps_that_are_mostly_prefill_and_of_swaps():
    rates = Rates()
    rates.note_step(num_tokens=100, num_prefill_tokens=100, step_s=0.1)
    assert rates.prefill_tokens_per_s == 1000
    rates.note_step(num_tokens=100, num_prefill_tokens=100, step_s=0.05)
    assert 1000 < rates.prefill_tokens_per_s < 2000
    known = rates.prefill_tokens_per_s
    rates.note_step(num_tokens=200, num_prefill_tokens=80, step_s=9.0)
    rates.note_step(num_tokens=10, num_prefill_tokens=10, step_s=9.0)
    assert rates.prefill_tokens_per_s == known, "a decode step and a short prompt say nothing"
    assert rates.decode_step_s == 0.0, "nor does a step with a prompt in it say how long decodes take"
    rates.note_swap(50, 0.01)
    assert rates.swap_blocks_per_s == 5000


def test_a_step_that_took_no_time_says_nothing():
    rates = Rates()
    for step_s in (0.0, 0.1, 0.0):
        rates.note_step(num_tokens=4, num_prefill_tokens=0, step_s=step_s)
        rates.note_step(num_tokens=100, num_prefill_tokens=100, step_s=step_s)
        rates.note_swap(50, step_s)
    assert (rates.decode_step_s, rates.prefill_tokens_per_s, rates.swap_blocks_per_s) == (0.1, 1000, 500)


def test_the_core_measures_its_rates_from_the_timings_of_steps():
    core = make(budget=128, max_num_seqs=4)
    submit(core, 100)
    plan = core.schedule(0.0)
    core.update(plan, StepResult([7], [0.0], step_s=0.2))
    assert core.rates.prefill_tokens_per_s == 500


def test_the_victim_is_of_the_lowest_priority_and_among_these_the_newest():
    core = make(num_blocks=9)
    high = submit(core, 7, priority=1)
    low = submit(core, 7, priority=-1)
    middle = submit(core, 7)
    order = []
    while len(order) < 2:
        plan, _ = step(core)
        order += [preemption.group for preemption in plan.preempted]
    assert order == [low, middle]
    assert high.num_preemptions == 0
    assert low.preempted_by == "r"


def test_a_preemption_between_two_steps_is_sent_with_the_next_one():
    core = make(num_blocks=20, num_swap_blocks=10, preemption_mode=SWAP)
    first, second = submit(core, 6), submit(core, 5)
    step(core)
    core.preempt(second)
    plan, _ = step(core)
    assert len(plan.blocks_to_swap_out) == 2
    assert len(plan.blocks_to_swap_in) == 2, "there is room, so it is back at once"
    assert [row.group for row in plan.rows] == [first, second]
    request = to_request(plan, epoch=1)
    assert len(request.blocks_to_swap_out) == len(request.blocks_to_swap_in) == 16


def test_a_group_aborted_while_swapped_gives_its_swap_blocks_back():
    core = make(num_blocks=20, num_swap_blocks=4, preemption_mode=SWAP)
    group = submit(core, 6, n=2)
    step(core)
    core.preempt(group)
    core.abort(group)
    core.check()
    assert core.blocks.num_free_swap_blocks == 4
    submit(core, 3)
    assert step(core)[0].blocks_to_swap_out == [], "nobody needs the copy any more"


def test_a_lost_worker_takes_the_swap_pool_with_it():
    core = make(num_blocks=20, num_swap_blocks=4, preemption_mode=SWAP)
    group = submit(core, 6, n=2, max_tokens=3)
    step(core)
    core.preempt(group)
    core.requeue_running()
    core.check()
    assert group.status is Status.WAITING
    assert core.blocks.num_free_swap_blocks == 4
    plan, _ = step(core)
    assert rows(plan) == [(1, 0, 6)]
    assert plan.blocks_to_swap_out == plan.blocks_to_swap_in == []


def test_a_prompt_half_computed_is_swapped_with_the_blocks_that_hold_something():
    core = make(num_blocks=20, num_swap_blocks=10, budget=8, preemption_mode=SWAP)
    group = submit(core, 20)
    step(core)
    core.preempt(group)
    plan, _ = step(core)
    assert len(plan.blocks_to_swap_out) == 2, "8 of 20 tokens are computed"
    assert rows(plan) == [(1, 8, 8)]


def test_beams_that_are_computed_again_sample_together():
    core = make(num_blocks=40, budget=8, max_num_seqs=4, preemption_mode=RECOMPUTE)
    group = submit(core, 5, beam=BeamParams(3), max_tokens=12)
    for _ in range(6):
        plan = core.schedule(0.0)
        core.update(plan, run(plan))
    assert len(group.live) == 3
    core.preempt(group)
    sampled = []
    while group.live:
        plan = core.schedule(0.0)
        core.check()
        sampled.append(sum(len(row.samples) for row in plan.rows))
        core.update(plan, run(plan))
    assert set(sampled) == {0, 3}, "all beams or none"


def test_a_swapped_group_comes_back_as_soon_as_what_is_left_of_it_fits():
    for mode in (SWAP, RECOMPUTE):
        core = make(num_blocks=20, num_swap_blocks=40, preemption_mode=mode)
        submit(core, 8, max_tokens=60)
        group = submit(core, 7, n=4, max_tokens=20)
        while not group.num_preemptions:
            step(core)
        step(core)  # it has been found too large
        for index in range(3):
            core.stop(group, index)  # three of four end meanwhile
        step(core)
        assert group.status is Status.RUNNING


def test_a_half_computed_prompt_comes_back_in_a_classic_step_of_prompts():
    core = make(chunked_prefill=False, num_swap_blocks=20, num_blocks=300, budget=8, preemption_mode=SWAP)
    decoding = submit(core, 3, max_tokens=500)
    step(core)
    group = submit(core, 20, max_tokens=3)
    step(core)
    while not group.root.num_computed_tokens:
        step(core)
    core.preempt(group)
    planned = [rows(step(core)[0]) for _ in range(2)]
    assert group.status is Status.RUNNING
    assert all(len(plan) == 1 for plan in planned), "prompts and decodes do not share a step"
    assert decoding.live


def test_a_swapped_group_alone_comes_back_even_into_a_pool_that_it_will_outgrow():
    core = make(num_blocks=6, num_swap_blocks=20, preemption_mode=SWAP)
    group = submit(core, 7, n=2, max_tokens=100)
    while group.live:
        if group.status is Status.RUNNING:
            core.preempt(group)
        step(core)
    assert [len(sequence.output_token_ids) for sequence in group.sequences] == [5, 5], "all that the pool holds"


def test_beams_swapped_while_some_lag_behind_agree_on_their_blocks_when_they_are_back():
    core = make(num_blocks=16, block_size=1, budget=3, max_num_seqs=3, num_swap_blocks=60, prefix_caching=True)
    group = submit(core, 4, beam=BeamParams(2), max_tokens=14, min_tokens=14)

    def steps(count):
        for _ in range(count):
            plan = core.schedule(0.0)
            core.check()
            core.update(plan, run(plan))
            core.check()

    steps(6)
    core.rates = Rates(prefill_tokens_per_s=1e9, swap_blocks_per_s=1.0)
    assert core.preempt(group).mode is RECOMPUTE
    steps(3)
    assert group.prefilling, "one beam is computed again, the other not yet"
    core.rates = Rates(prefill_tokens_per_s=1.0, swap_blocks_per_s=1e9)
    assert core.preempt(group).mode is SWAP
    submit(core, [100, 101], max_tokens=6)
    while core.num_live:
        steps(1)


def test_a_group_that_does_not_run_can_not_be_preempted():
    core = make()
    group = submit(core, 3)
    with pytest.raises(AssertionError, match="WAITING"):
        core.preempt(group)
