"""Beam search by its rules: who goes on, who is finished, and when it is over. Log-probabilities are chosen by hand."""

from array import array

import pytest
from scheduler_by_hand import make, submit
from scheduler_model import STOP, expected_beams, run

from scheduler.beam import Beam, BeamParams, BeamSearch, EarlyStopping
from scheduler.plan import StepResult
from scheduler.sequence import Status


def search(width=2, length_penalty=1.0, early_stopping=EarlyStopping.FALSE, min_tokens=0) -> BeamSearch:
    return BeamSearch(BeamParams(width, length_penalty, early_stopping), frozenset({STOP}), min_tokens)


def beam(tokens: list[int], logprob: float, *candidates: tuple[int, float]) -> Beam:
    return Beam(array("i", tokens), logprob, candidates)


def going_on(beams: BeamSearch, *given: Beam, max_tokens=100) -> list[tuple[int, int]]:
    return [(extension.parent, extension.token_id) for extension in beams.step(given, max_tokens)]


def finished(beams: BeamSearch) -> list[tuple[list[int], float]]:
    return [(hypothesis.token_ids.tolist(), pytest.approx(hypothesis.score)) for hypothesis in beams.hypotheses]


def test_the_best_continuations_of_all_beams_together_go_on():
    first, second = beam([1], -1.0, (5, -0.5), (6, -0.7)), beam([2], -1.5, (7, -0.1), (8, -3.0))
    assert going_on(search(), first, second) == [(0, 5), (1, 7)]
    assert going_on(search(width=3), first, second) == [(0, 5), (1, 7), (0, 6)]


def test_a_stop_among_the_best_is_a_hypothesis_and_further_down_it_is_nothing():
    beams = search()
    assert going_on(beams, beam([1], -1.0, (STOP, -0.1), (5, -0.5), (6, -0.7))) == [(0, 5), (0, 6)]
    assert finished(beams) == [([1, STOP], -1.1 / 2)]
    beams = search()
    going_on(beams, beam([1], -1.0, (5, -0.1), (6, -0.5), (STOP, -0.7)))
    assert not beams.hypotheses


def test_of_two_stops_one_behind_the_best_is_nothing_also_where_a_beam_is_still_missing():
    beams = search()
    first, second = beam([1], -1.0, (STOP, -0.1), (5, -0.2)), beam([2], -1.1, (STOP, -0.3), (6, -0.7))
    assert going_on(beams, first, second) == [(0, 5), (1, 6)]
    assert finished(beams) == [([1, STOP], -1.1 / 2)]
    assert beams.hypotheses[0].stop_token_id == STOP


def test_a_stop_before_min_tokens_is_a_token_like_others():
    assert going_on(search(min_tokens=2), beam([1], -1.0, (STOP, -0.1), (5, -0.5))) == [(0, STOP), (0, 5)]


def test_the_score_divides_by_the_length_to_the_power_of_the_penalty():
    for penalty, score in ((0.0, -1.2), (1.0, -0.6), (2.0, -0.3), (-1.0, -2.4)):
        beams = search(length_penalty=penalty)
        going_on(beams, beam([1], -1.0, (STOP, -0.2), (5, -0.3), (6, -0.4)))
        assert finished(beams) == [([1, STOP], score)]


def test_at_max_tokens_the_best_beams_end_as_they_are():
    beams = search()
    assert going_on(beams, beam([1], -1.0, (5, -0.1), (6, -0.2), (7, -0.3)), max_tokens=2) == []
    assert beams.done
    assert finished(beams) == [([1, 5], -0.55), ([1, 6], -0.6)]
    assert [hypothesis.stop_token_id for hypothesis in beams.hypotheses] == [None, None]


@pytest.mark.parametrize(
    ("early_stopping", "done"),
    [(EarlyStopping.TRUE, True), (EarlyStopping.FALSE, False), (EarlyStopping.NEVER, False)],
)
def test_with_all_hypotheses_there_a_better_beam_keeps_the_search_going_unless_told_otherwise(early_stopping, done):
    beams = search(width=1, early_stopping=early_stopping)
    beams.hypotheses = search_with_hypothesis(score=-2.0)
    going_on(beams, beam([1], -1.0, (5, -0.5)))  # -1.5 / 2
    assert beams.done is done


def test_a_beam_that_could_only_become_better_by_its_length_keeps_only_never_going():
    for early_stopping, done in ((EarlyStopping.FALSE, True), (EarlyStopping.NEVER, False)):
        beams = search(width=1, early_stopping=early_stopping)
        beams.hypotheses = search_with_hypothesis(score=-0.5)
        going_on(beams, beam([1], -1.0, (5, -0.5)), max_tokens=100)  # -0.75 now, -0.015 at 100 tokens
        assert beams.done is done


def search_with_hypothesis(score: float):
    beams = search(width=1, length_penalty=0.0)
    beams.step([beam([1], 0.0, (STOP, score))], max_tokens=100)
    return beams.hypotheses


def test_a_forbidden_candidate_is_none():
    assert going_on(search(), beam([1], -1.0, (5, -0.5), (6, float("-inf")))) == [(0, 5)]


def test_a_search_is_over_where_nothing_can_go_on_though_it_has_too_few_hypotheses():
    beams = search()
    assert going_on(beams, beam([1], -1.0, (5, -0.5)), max_tokens=2) == []
    assert beams.done
    assert finished(beams) == [([1, 5], -0.75)]


def test_a_search_that_is_concluded_has_its_beams_as_hypotheses_finished_by_length():
    beams = search()
    beams.conclude([beam([1, 5], -3.0), beam([1, 6], -2.0)])
    assert beams.done
    assert finished(beams) == [([1, 6], -1.0), ([1, 5], -1.5)]
    assert [hypothesis.stop_token_id for hypothesis in beams.hypotheses] == [None, None]


def test_a_group_searches_in_the_core_and_tells_its_best_hypotheses_once_at_the_end():
    core = make(num_blocks=40)
    params = BeamParams(width=3)
    group = submit(core, [11, 12, 13, 14, 15], n=2, beam=params, max_tokens=7, min_tokens=5)
    group.stop_token_ids = group.beam._stop_token_ids = frozenset({STOP})
    told = []
    while core.num_live:
        plan = core.schedule(0.0)
        core.check()
        told.append(core.update(plan, run(plan)))
        core.check()
    assert all(not outputs.new_tokens and not outputs.finished for outputs in told[:-1])
    assert [sequence.output_token_ids.tolist() for sequence in group.sequences] == expected_beams(group)
    assert [end.sequence.index for end in told[-1].finished] == [0, 1]
    for sequence in group.sequences:
        assert len(sequence.output_token_ids) == len(sequence.output_logprobs) == sequence.num_tokens - 5
    assert [new.first_index for new in told[-1].new_tokens] == [0, 0]
    assert core.blocks.num_free == 40


def test_beams_share_their_blocks_and_a_beam_without_continuation_gives_them_back():
    core = make(num_blocks=40)
    submit(core, 8, beam=BeamParams(3), max_tokens=50)
    for _ in range(12):
        plan = core.schedule(0.0)
        core.update(plan, run(plan))
    blocks = core.blocks
    assert blocks.num_references == 3 * 5, "three beams of 8 + 11 tokens"
    assert blocks.num_held < 12, "the prompt's two blocks once, and beams of one parent share more"


def test_beams_count_as_many_sequences_from_the_beginning():
    core = make(max_num_seqs=4)
    submit(core, 4, beam=BeamParams(3))
    other = submit(core, 4, n=2)
    plan = core.schedule(0.0)
    assert [row.group.number for row in plan.rows] == [1]
    assert other.status is Status.WAITING
    with pytest.raises(ValueError, match="beam_width"):
        submit(core, 4, beam=BeamParams(5))
    with pytest.raises(ValueError, match="hypotheses"):
        submit(core, 4, n=4, beam=BeamParams(3))


def test_a_search_that_finds_fewer_hypotheses_than_are_wanted_ends_as_often_as_is_wanted():
    core = make()
    submit(core, 4, n=2, beam=BeamParams(2), max_tokens=1)
    plan = core.schedule(0.0)
    nothing = float("-inf")
    outputs = core.update(plan, StepResult([5], [-0.5], (), [5, 6, 7], [-0.5, nothing, nothing]))
    assert [(end.sequence.index, end.sequence.status) for end in outputs.finished] == [
        (0, Status.FINISHED_LENGTH_CAPPED),
        (1, Status.FINISHED_ABORTED),
    ]
    assert [new.sequence.output_token_ids.tolist() for new in outputs.new_tokens] == [[5]]
    core.check()


def test_a_search_that_can_never_fit_ends_n_times_ignored():
    core = make(num_blocks=4)
    submit(core, 12, n=2, beam=BeamParams(3))
    plan = core.schedule(0.0)
    assert [(end.sequence.index, end.sequence.status) for end in plan.finished] == [
        (0, Status.FINISHED_IGNORED),
        (1, Status.FINISHED_IGNORED),
    ]
    assert "3 x" in plan.finished[0].message
    core.check()


def test_a_search_that_does_not_fit_into_a_new_workers_pool_ends_with_what_it_has():
    core = make(num_blocks=40)
    group = submit(core, 8, n=2, beam=BeamParams(3), max_tokens=50, min_tokens=49)
    for _ in range(12):
        plan = core.schedule(0.0)
        core.update(plan, run(plan))
    best = [sequence.output_token_ids.tolist() for sequence in group.live[:2]]
    core.requeue_running()
    core.replace_pool(type(core.blocks)(num_blocks=6, block_size=4))
    plan = core.schedule(0.0)
    assert [end.sequence.status for end in plan.finished] == [Status.FINISHED_LENGTH_CAPPED] * 2
    assert [new.sequence.output_token_ids.tolist() for new in plan.new_tokens] == best
    core.check()


def test_a_sample_without_a_token_fails_a_search_whole():
    core = make(num_blocks=40)
    group = submit(core, 8, beam=BeamParams(3), max_tokens=50)
    other = submit(core, 4)
    for _ in range(3):
        plan = core.schedule(0.0)
        core.update(plan, run(plan))
    plan = core.schedule(0.0)
    result = run(plan)
    outputs = core.update(
        plan,
        StepResult(result.token_ids, result.logprobs, [1], result.candidate_token_ids, result.candidate_logprobs),
    )
    core.check()
    assert outputs.failed == [group]
    assert other.live


def test_the_worst_hypothesis_decides_whether_a_beam_can_still_improve():
    beams = search(width=2, length_penalty=0.0)
    going_on(beams, beam([1], 0.0, (STOP, -0.1), (5, -1.0), (6, -1.5)))
    going_on(beams, beam([1, 5], -1.0, (STOP, -2.0), (7, -2.5), (8, -2.6)), beam([1, 6], -1.5, (9, -3.0), (9, -3.1)))
    assert [hypothesis.score for hypothesis in beams.hypotheses] == [pytest.approx(-0.1), pytest.approx(-3.0)]
    assert beams.done, "the best beam has -3.5"
    beams = search(width=2, length_penalty=0.0)
    going_on(beams, beam([1], 0.0, (STOP, -0.1), (5, -1.0), (6, -1.5)))
    going_on(beams, beam([1, 5], -1.0, (STOP, -2.0), (7, -1.0), (8, -2.6)), beam([1, 6], -1.5, (9, -3.0), (9, -3.1)))
    assert not beams.done, "the best beam has -2, between the two hypotheses"


def test_two_searches_in_one_step_get_their_own_candidates_also_when_the_first_is_gone():
    core = make(num_blocks=80, max_num_seqs=8)
    gone = submit(core, 5, beam=BeamParams(3), max_tokens=9, min_tokens=9)
    kept = submit(core, 7, n=3, beam=BeamParams(3), max_tokens=9, min_tokens=9)
    for _ in range(3):
        plan = core.schedule(0.0)
        core.update(plan, run(plan))
    plan = core.schedule(0.0)
    core.abort(gone)
    core.update(plan, run(plan))
    while core.num_live:
        plan = core.schedule(0.0)
        core.update(plan, run(plan))
    assert [sequence.output_token_ids.tolist() for sequence in kept.sequences] == expected_beams(kept)
