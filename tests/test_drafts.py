"""Tokens that are guessed to follow: where they are looked for, how many are computed, and which of them count."""

import random
from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given
from scheduler_by_hand import STOP, make, submit
from scheduler_model import Memory, next_token, run

from protos.columns import pack_floats, unpack
from protos.sampling_pb2 import LogprobColumns, Sampling
from scheduler.beam import BeamParams
from scheduler.config import SchedulerSettings
from scheduler.drafts import look_up
from scheduler.fair_queue import OUTPUT_TOKEN
from scheduler.plan import Plan, StepOutputs, StepResult, to_request
from scheduler.policy import Policy, PreemptionMode
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup, Status

# With a 6 behind it, 7, 8, 9, 5 are to be guessed.
AGAIN = [5, 6, 7, 8, 9, 5]


def drafting(**options) -> Scheduler:
    return make(**{"num_speculative_tokens": 4, "budget": 64} | options)


def answer(core: Scheduler, plan: Plan, *tokens: int, **columns) -> StepOutputs:
    outputs = core.update(plan, StepResult(list(tokens), [-0.5] * len(tokens), **columns))
    core.check()
    return outputs


def drafts(plan: Plan) -> list[tuple[int, int | None]]:
    """(position, token) of each row that is a guess."""
    return [(row.start, row.draft) for row in plan.rows if row.draft is not None]


def output(group: SequenceGroup, index: int = 0) -> list[int]:
    return group.sequences[index].output_token_ids.tolist()


def begun(core: Scheduler, prompt: list[int], first: int, **options) -> SequenceGroup:
    """A group whose prompt is computed, with which nothing is guessed, and whose first token is `first`."""
    group = submit(core, prompt, **options)
    plan = core.schedule(0.0)
    assert [row.group for row in plan.rows] == [group]
    answer(core, plan, first)
    return group


# Where tokens are looked for


def test_a_draft_is_what_followed_the_last_tokens_before():
    assert look_up(array("i", [*AGAIN, 6]), 2) == (2, array("i", [7, 8, 9, 5, 6]))


def test_the_longest_run_counts_and_of_several_the_last():
    tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 3, 4, 70, 1, 2, 3, 4]
    assert look_up(array("i", tokens), 2) == (4, array("i", tokens[4:]))
    tokens[-4:-2] = [8, 9]
    assert look_up(array("i", [*tokens[:-1], 3, 4]), 2)[1][0] == 70


def test_where_nothing_repeats_itself_there_is_no_draft():
    assert look_up(array("i", range(100)), 2) == (0, array("i"))
    assert look_up(array("i", [3]), 2) == (0, array("i"))
    assert look_up(array("i", [*AGAIN, 6]), 3) == (0, array("i"))


def test_a_very_long_match_counts_as_one_of_32_tokens():
    tokens = array("i", [*range(70), 100, *range(70)])
    assert look_up(tokens, 2) == (32, tokens[70:])


def test_bytes_that_only_look_like_tokens_are_passed_over():
    # 0x0201 and 0x0100 in four bytes each: from the second byte on the same bytes stand for other tokens.
    tokens = array("i", [0x01000000, 0x02000000, 0x03000000, 7, 0x00010000, 0x00020000, 9, 0x00010000, 0x00020000])
    assert look_up(tokens, 2) == (2, tokens[6:])
    assert look_up(array("i", [0x0A0B0A0B, 0x0A0B0A0B, 0x0B0A0B0A, 0x0A0B0A0B, 0x0B0A0B0A]), 2)[0] == 2


@given(st.lists(st.sampled_from([0, 1, 256, 257, 65536]), max_size=40), st.integers(1, 5))
def test_what_is_found_is_there(token_ids, least):
    tokens = array("i", token_ids)
    length, behind = look_up(tokens, least)
    places = [end for end in range(least, len(tokens)) if tokens[end - least : end] == tokens[-least:]]
    assert bool(length) == bool(places)
    if length:
        end = len(tokens) - len(behind)
        assert tokens[end - length : end] == tokens[-length:]
        assert least <= length


# How many are computed


def test_a_guess_is_a_row_behind_the_others_with_a_slot_of_its_own():
    core = drafting(num_speculative_tokens=3)
    group = begun(core, AGAIN, 6)
    plan = core.schedule(0.0)
    assert [(row.start, row.num_new_tokens, row.draft) for row in plan.rows] == [
        (6, 1, None),
        (7, 1, 7),
        (8, 1, 8),
        (9, 1, 9),
    ]
    assert (plan.num_tokens, plan.num_drafts) == (4, 3)
    request = to_request(plan, epoch=1)
    assert unpack(request.token_ids).tolist() == [6, 7, 8, 9]
    assert unpack(request.num_computed_tokens).tolist() == [6, 7, 8, 9]
    assert unpack(request.block_table_lengths).tolist() == [3] * 4
    assert group.live[0].num_computed_tokens == 7, "a guess does not count as computed"


def test_who_repeats_himself_is_guessed_to_go_on():
    core = drafting(num_speculative_tokens=24)
    begun(core, [1, 2, 3, 2], 3)
    assert drafts(core.schedule(0.0)) == [(5, 2), (6, 3), (7, 2), (8, 3)]


@pytest.mark.parametrize(("match_length", "num_drafts"), [(1, 1), (2, 4), (4, 4), (7, 7), (12, 12), (40, 24)])
def test_no_more_is_guessed_than_matches_or_four(match_length, num_drafts):
    core = drafting(num_speculative_tokens=24, budget=600, num_blocks=200)
    text = list(range(1000, 1000 + match_length))
    group = begun(core, [1, *text, *range(20, 420), 2, *text[:-1]], text[-1], max_tokens=50)
    plan = core.schedule(0.0)
    assert plan.num_drafts == num_drafts
    assert [row.draft for row in plan.rows[1:]] == group.prompt_token_ids.tolist()[1 + match_length :][:num_drafts]


def test_no_more_is_guessed_than_the_request_may_have():
    core = drafting()
    begun(core, AGAIN, 6, max_tokens=4)
    assert len(drafts(core.schedule(0.0))) == 2, "one has come, one is sampled, and two may be guessed"


@pytest.mark.parametrize(("budget", "num_drafts"), [(4, 1), (6, 2), (9, 2)])
def test_no_more_is_guessed_than_the_step_has_room_for(budget, num_drafts):
    core = drafting(budget=budget, max_num_seqs=4)
    submit(core, AGAIN)
    while not (plan := core.schedule(0.0)).rows[0].samples:
        answer(core, plan)
    answer(core, plan, 6)
    submit(core, 2)
    assert len(drafts(core.schedule(0.0))) == num_drafts


@pytest.mark.parametrize(("num_blocks", "watermark", "drafted"), [(3, 0.0, 3), (3, 0.4, 1)])
def test_guesses_take_no_block_that_is_kept_for_others(num_blocks, watermark, drafted):
    core = drafting(num_speculative_tokens=3, num_blocks=num_blocks, watermark=watermark)
    begun(core, AGAIN, 6, max_tokens=6)
    assert core.blocks.num_held == 2
    assert len(drafts(core.schedule(0.0))) == drafted, "in the second block one slot is left"


@pytest.mark.parametrize(("prompt", "drafted"), [([*range(20, 28), 5, 6, 7, 8], [(13, 7)]), (list(range(20, 32)), [])])
def test_where_what_runs_has_grown_into_the_reserve_no_more_is_guessed_than_elsewhere(prompt, drafted):
    core = drafting(num_blocks=5, watermark=0.9)
    begun(core, prompt, 6, max_tokens=3)
    plan = core.schedule(0.0)
    assert core.blocks.num_free < core.num_reserved()
    assert drafts(plan) == drafted, "the block has three slots left, and one guess may count"


def test_in_a_larger_step_only_a_longer_match_is_worth_a_guess():
    core = drafting(max_num_seqs=40, budget=400, num_blocks=400)
    short, long = [*range(5, 10), 1, *range(5, 10)], [*range(20, 30), 1, *range(20, 30)]
    groups = [submit(core, short), submit(core, long)]
    groups += [submit(core, list(range(100 + 10 * place, 104 + 10 * place))) for place in range(30)]
    plan = core.schedule(0.0)
    answer(core, plan, *[1] * len(plan.rows))
    plan = core.schedule(0.0)
    assert len(plan.rows) - plan.num_drafts == 32
    drafted = [row.group for row in plan.rows if row.draft is not None]
    # Behind a match of 6 tokens the first is right in 0.84 of the cases and the second in 0.72, behind one of 11 in
    # 0.91, 0.84 and 0.77. 32 rows that take as long as 40 ask for 0.8, and for a little more with each.
    assert drafted == [groups[0], *[groups[1]] * 2]


@pytest.mark.parametrize(
    "options",
    [
        {"beam": BeamParams(2)},
        {"sampling": Sampling(repetition_penalty=1.3)},
        {"sampling": Sampling(frequency_penalty=0.5)},
    ],
)
def test_what_depends_on_more_than_the_tokens_before_is_not_guessed(options):
    core = drafting()
    group = submit(core, [5, 6, 7, 5, 6, 7, 5, 6, 7, 5], **options)
    while group.live:
        plan = core.schedule(0.0)
        assert not drafts(plan)
        core.update(plan, run(plan))
    assert any(len(sequence.output_token_ids) > 1 for sequence in group.sequences)


def test_while_suspects_are_on_trial_nothing_is_guessed():
    core = drafting()
    group = begun(core, AGAIN, 6)
    assert drafts(core.schedule(0.0))
    core.requeue_running()
    plan = core.schedule(0.0)
    assert group in core.suspects
    assert not drafts(plan)
    answer(core, plan, 7)
    assert drafts(core.schedule(0.0))


def test_without_the_policy_nothing_is_guessed():
    core = make(budget=64)
    begun(core, AGAIN, 6)
    assert not drafts(core.schedule(0.0))


# Which count


def test_a_step_gives_as_many_tokens_more_as_were_guessed_right():
    core = drafting(num_speculative_tokens=3)
    group = begun(core, AGAIN, 6)
    outputs = answer(core, core.schedule(0.0), 7, 8, 1, 2)
    assert output(group) == [6, 7, 8, 1]
    assert outputs.num_accepted == 2
    assert [(new.sequence, new.first_index) for new in outputs.new_tokens] == [(group.live[0], 1)]
    assert core.schedule(0.0).rows[0].start == 9, "what was guessed right is computed"


@pytest.mark.parametrize(("prefix_caching", "num_kept"), [(True, 2), (False, 0)])
def test_blocks_filled_by_right_guesses_are_kept_where_blocks_are_kept(prefix_caching, num_kept):
    core = drafting(prefix_caching=prefix_caching)
    group = begun(core, AGAIN, 6)
    answer(core, core.schedule(0.0), 7, 8, 9, 5, 6)
    assert output(group) == [6, 7, 8, 9, 5, 6]
    core.abort(group)
    assert core.blocks.num_idle == num_kept


def test_behind_a_wrong_guess_nothing_counts_though_it_looks_right():
    core = drafting(num_speculative_tokens=3)
    group = begun(core, AGAIN, 6)
    outputs = answer(core, core.schedule(0.0), 1, 8, 9, 5)
    assert output(group) == [6, 1]
    assert outputs.num_accepted == 0
    assert core.schedule(0.0).rows[0].start == 7


def test_behind_a_stop_id_nothing_counts():
    core = drafting()
    group = begun(core, [5, 6, STOP, 8, 9, 5], 6)
    plan = core.schedule(0.0)
    assert drafts(plan) == [(7, STOP), (8, 8), (9, 9), (10, 5)]
    outputs = answer(core, plan, STOP, 8, 9, 5, 6)
    assert output(group) == [6, STOP]
    assert [end.sequence.status for end in outputs.finished] == [Status.FINISHED_STOPPED]


def test_the_last_token_may_be_a_guess():
    core = drafting()
    group = begun(core, AGAIN, 6, max_tokens=3)
    plan = core.schedule(0.0)
    outputs = answer(core, plan, 7, 8)
    assert output(group) == [6, 7, 8]
    assert [end.sequence.status for end in outputs.finished] == [Status.FINISHED_LENGTH_CAPPED]
    assert core.blocks.num_held == 0


def test_logits_that_are_not_finite_end_a_request_only_where_they_count():
    core = drafting(num_speculative_tokens=2)
    group = begun(core, AGAIN, 6)
    assert not answer(core, core.schedule(0.0), 1, 8, 9, failed=[1, 2]).failed
    assert output(group) == [6, 1]
    group = begun(core := drafting(num_speculative_tokens=2), AGAIN, 6)
    assert answer(core, core.schedule(0.0), 7, 8, 9, failed=[1]).failed == [group]


def test_log_probabilities_of_wrong_guesses_are_passed_over():
    core = drafting(num_speculative_tokens=2)
    asking = Sampling(num_top_logprobs=1)
    group, other = (submit(core, prompt, sampling=asking) for prompt in (AGAIN, [5, 4, 3, 2, 5]))
    answer(core, core.schedule(0.0), 6, 4, top_logprobs=tops(-0.8, -0.9))
    plan = core.schedule(0.0)
    assert [(row.group, row.draft) for row in plan.rows[2:]] == [(group, 7), (group, 8), (other, 3), (other, 2)]
    answer(core, plan, 1, 3, 0, 0, 1, 0, top_logprobs=tops(-0.1, -0.2, -0.3, -0.4, -0.5, -0.6))
    assert group.live[0].logprobs.logprobs.tolist() == pytest.approx([-0.8, -0.1])
    assert other.live[0].logprobs.logprobs.tolist() == pytest.approx([-0.9, -0.2, -0.5])


def tops(*logprobs: float) -> LogprobColumns:
    num = len(logprobs)
    zeros = array("i", [0] * num).tobytes()
    return LogprobColumns(
        logprobs=pack_floats(logprobs), ranks=zeros, top_token_ids=zeros, top_logprobs=pack_floats(logprobs)
    )


def test_a_tenant_pays_for_the_guesses_that_were_right():
    core = drafting(num_speculative_tokens=3)
    groups = [submit(core, AGAIN, tenant=name) for name in ("lucky", "unlucky")]
    answer(core, core.schedule(0.0), 6, 6)
    plan = core.schedule(0.0)
    assert [row.group for row in plan.rows] == [*groups, *[groups[0]] * 3, *[groups[1]] * 3]
    before = [core.queues.waiting._tenants[group.tenant].counter for group in groups]
    answer(core, plan, 7, 1, 8, 1, 0, 8, 9, 5)
    after = [core.queues.waiting._tenants[group.tenant].counter for group in groups]
    paid = [now - then for now, then in zip(after, before, strict=True)]
    assert paid[0] == 2 * OUTPUT_TOKEN
    assert paid[1] == 0


@pytest.mark.parametrize(("mode", "first"), [(PreemptionMode.RECOMPUTE, 0), (PreemptionMode.SWAP, 7)])
def test_a_group_that_is_preempted_while_its_guesses_run_keeps_what_was_right(mode, first):
    core = drafting(num_speculative_tokens=3, num_swap_blocks=8, preemption_mode=mode)
    group = begun(core, AGAIN, 6)
    plan = core.schedule(0.0)
    core.preempt(group)
    answer(core, plan, 7, 8, 9, 5)
    assert output(group) == [6, 7, 8, 9, 5]
    (again, *_) = core.schedule(0.0).rows
    assert (again.start, again.num_new_tokens) == (first, 11 - first)


@pytest.mark.parametrize("num_speculative_tokens", [0, 4])
def test_blocks_that_right_guesses_fill_are_found_again(num_speculative_tokens):
    core = drafting(num_speculative_tokens=num_speculative_tokens, prefix_caching=True)
    group = submit(core, [5, 6, 7, 5], max_tokens=9)
    while core.num_live:
        plan = core.schedule(0.0)
        answer(core, plan, *[5 + (row.start + row.num_new_tokens) % 3 for row in plan.rows])
    tokens = group.prompt_token_ids + array("i", [*output(group), 0])
    assert len(core.blocks.match(tokens, "")) == 3, "all but the last token have their KV in 12 slots"


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_outputs_are_the_same_whatever_is_guessed(num_lanes):
    source = random.Random(3)
    requests = [(source.randint(3, 30), source.randint(1, 40), source.randint(1, 3)) for _ in range(30)]
    for num_speculative_tokens in (0, 1, 3, 8):
        core = drafting(num_speculative_tokens=num_speculative_tokens, num_blocks=60, max_num_seqs=8)
        core.set_num_concurrent_steps(num_lanes)
        memory, in_flight, num_accepted = Memory(4), [], 0
        groups = [submit(core, prompt, max_tokens=most, n=n) for prompt, most, n in requests]
        while core.num_live:
            while core.in_flight.num_free and (plan := core.schedule(0.0)).rows:
                memory.execute(plan)
                in_flight.append(plan)
            plan = in_flight.pop(0)
            num_accepted += core.update(plan, run(plan)).num_accepted
            core.check()
        assert bool(num_accepted) == bool(num_speculative_tokens)
        for group in groups:
            assert [output(group, index) for index in range(group.n)] == [
                expected(group, index) for index in range(group.n)
            ]


def expected(group: SequenceGroup, index: int) -> list[int]:
    """A whole output; requests made by hand have a stop id of their own."""
    tokens = [next_token(group, index, group.num_prompt_tokens + place) for place in range(group.max_tokens)]
    return tokens[: tokens.index(STOP) + 1] if STOP in tokens else tokens


# What is chosen where nothing is said


def test_guesses_go_with_one_step_at_a_time():
    assert SchedulerSettings().policy("cpu").num_speculative_tokens == 24
    assert SchedulerSettings().policy("cuda").num_speculative_tokens == 0, "two steps are in flight there"
    asked = SchedulerSettings(num_speculative_tokens=4).policy("cuda")
    assert (asked.num_speculative_tokens, asked.max_steps_in_flight) == (4, 1)
    with pytest.raises(ValueError, match=r"num_speculative_tokens \(4\) goes with max_steps_in_flight 1"):
        SchedulerSettings(num_speculative_tokens=4, max_steps_in_flight=2)
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        Policy(16, 8, 8, num_speculative_tokens=-1)
