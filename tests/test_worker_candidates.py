"""Candidates of a beam search, on distributions that can be written down and through whole steps of a tiny model."""

import math
from dataclasses import replace

import pytest
import torch
from worker_fakes import GREEDY, Row, candidates, logprobs, step, tiny_checkpoint, tiny_llama, tiny_runner, tokens

from protos.columns import unpack
from protos.sampling_pb2 import Sampling
from worker.candidates import best_candidates
from worker.inputs import MalformedStep
from worker.sampler import draw_tokens
from worker.sampling_parameters import Sample, SamplingParameters

PROMPT = [5, 17, 3, 88, 42, 9, 61, 2, 30, 11, 7]
OTHER = PROMPT[::-1]
SEEDED = Sampling(temperature=1, top_p=0.9, seed=11)


def best(count, **changes):
    return Sampling(temperature=0, top_p=1, num_candidates=count, **changes)


PARAMETERS = SamplingParameters.from_message(best(3), vocabulary_size=5)


def log_probabilities(*probabilities):
    """Logits, shifted by a constant as a model's are."""
    return torch.tensor([probabilities]).log() + 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def runner(checkpoint):
    return tiny_runner(checkpoint)


def theirs(prompt):
    """The distribution behind a prompt in transformers' model, as log-probabilities."""
    with torch.inference_mode():
        return tiny_llama()(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)


def test_rows_give_as_many_candidates_as_each_wants_best_first():
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0], [9.0, 6.0, 8.0, 7.0], [0.0, 0.0, 5.0, 0.0]])
    found = best_candidates(logits, torch.tensor([10.0, 20.0, 30.0]), [2, 4, 1])
    assert found.token_ids.tolist() == [1, 3, 0, 2, 3, 1, 2]
    assert found.logprobs.tolist() == [-6, -7, -11, -12, -13, -14, -25]
    assert found.best.tolist() == [1, 0, 2]


@pytest.mark.parametrize("count", [1, 8, 97])
def test_candidates_are_the_best_of_the_models_own_distribution(runner, count):
    response = runner.execute(step(Row(1, PROMPT, range(3)), new={1: best(count)}))
    values, ids = theirs(PROMPT).topk(count)
    assert [token for token, _ in candidates(response)] == ids.tolist()
    assert [value for _, value in candidates(response)] == pytest.approx(values.tolist(), abs=1e-4)
    assert (tokens(response), logprobs(response)) == ([candidates(response)[0][0]], [candidates(response)[0][1]])


def test_candidates_do_not_depend_on_temperature_and_filters():
    logits = log_probabilities(0.1, 0.2, 0.4, 0.25, 0.05)
    hot = replace(PARAMETERS, temperature=5, top_k=1, top_p=0.1, min_p=0.9)
    for position in range(20):
        sampled = draw_tokens(logits.clone(), [Sample(hot, 0, position)])
        assert sampled.candidates.token_ids.tolist() == [2, 3, 1]
        assert sampled.candidates.logprobs.exp().tolist() == pytest.approx([0.4, 0.25, 0.2])
        assert sampled.token_ids.tolist() == [2]


def test_the_token_of_a_tie_is_the_first_candidate():
    sampled = draw_tokens(torch.zeros(4, 5), [Sample(PARAMETERS, index, 0) for index in range(4)])
    assert sampled.token_ids.tolist() == sampled.candidates.token_ids[::3].tolist()


def test_stop_tokens_are_struck_out_before_min_tokens_and_the_others_keep_their_probabilities():
    stopping = replace(PARAMETERS, stop_token_ids=(2, 4), min_tokens=2, num_prompt_tokens=10)
    logits = log_probabilities(0.1, 0.2, 0.4, 0.25, 0.05)
    early = draw_tokens(logits.clone(), [Sample(stopping, 0, 11)])
    assert early.candidates.token_ids.tolist() == [3, 1, 0]
    assert early.candidates.logprobs.exp().tolist() == pytest.approx([0.25, 0.2, 0.1])
    late = draw_tokens(logits.clone(), [Sample(stopping, 0, 12)])
    assert late.candidates.token_ids.tolist() == [2, 3, 1]


def test_candidates_beyond_the_tokens_that_are_possible_have_no_probability():
    stopping = replace(PARAMETERS, stop_token_ids=(0, 1, 2, 4), min_tokens=1)
    sampled = draw_tokens(log_probabilities(0.1, 0.2, 0.4, 0.25, 0.05), [Sample(stopping, 0, 0)])
    assert sampled.candidates.token_ids.tolist()[0] == 3
    assert sampled.candidates.logprobs.exp().tolist() == pytest.approx([0.25, 0, 0])
    assert not sampled.failed.any()
    none_left = replace(stopping, stop_token_ids=(0, 1, 2, 3, 4))
    assert draw_tokens(log_probabilities(0.2, 0.2, 0.2, 0.2, 0.2), [Sample(none_left, 0, 0)]).failed.tolist() == [True]


def test_rows_of_other_requests_are_drawn_as_without_the_candidates_between_them(runner):
    rows = [Row(1, PROMPT, [0, 1, 2]), Row(2, OTHER, [3, 4, 5]), Row(3, PROMPT[:5], [6, 7]), Row(4, OTHER, [8, 9, 10])]
    new = {1: SEEDED, 2: GREEDY, 3: GREEDY, 4: SEEDED}
    samples = [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
    expected = runner.execute(step(*rows, new=new, samples=samples))
    found = runner.execute(step(*rows, new=new | {2: best(4), 3: best(2)}, samples=samples))
    assert tokens(found) == tokens(expected)
    assert logprobs(found) == logprobs(expected)
    assert candidates(expected) == []
    assert len(candidates(found)) == 4 + 2


def test_candidates_of_requests_that_want_different_numbers_stand_in_the_order_of_the_samples(runner):
    rows = [Row(1, PROMPT, [0, 1, 2]), Row(2, OTHER, [3, 4, 5]), Row(3, PROMPT[:5], [6, 7])]
    response = runner.execute(step(*rows, new={1: best(3), 2: best(5), 3: GREEDY}, samples=[(1, 0), (2, 0), (0, 0)]))
    expected = [*theirs(OTHER).topk(5).indices.tolist(), *theirs(PROMPT).topk(3).indices.tolist()]
    assert [token for token, _ in candidates(response)] == expected
    assert tokens(response) == [expected[0], theirs(PROMPT[:5]).argmax().item(), expected[5]]


def test_a_failed_sample_has_its_candidates_too_and_the_others_are_untouched(runner):
    expected = candidates(runner.execute(step(Row(1, PROMPT, [0, 1, 2]), new={1: best(3)})))
    runner._model.embedding.weight[96] = torch.nan
    rows = [Row(2, [96] * 5, [3, 4]), Row(1, PROMPT, [0, 1, 2])]
    response = runner.execute(step(*rows, new={1: best(3), 2: best(4)}))
    assert list(unpack(response.failed_samples)) == [0]
    assert len(candidates(response)) == 4 + 3
    assert all(0 <= token < 97 for token, _ in candidates(response))
    found = candidates(response)[4:]
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_and_give_ids_of_the_vocabulary(bad):
    logits = torch.tensor([[0.0, bad, 1.0, 2.0, 3.0], [bad] * 5])
    sampled = draw_tokens(logits, [Sample(PARAMETERS, 0, 0)] * 2)
    assert sampled.failed.tolist() == [True, True]
    assert len(sampled.candidates.token_ids) == 6
    assert set(sampled.candidates.token_ids.tolist()) <= set(range(5))


@pytest.mark.parametrize("count", [-1, 98])
def test_a_number_of_candidates_that_the_vocabulary_does_not_hold_is_a_malformed_step(runner, count):
    with pytest.raises(MalformedStep, match=rf"request 1: num_candidates {count} is not in 0 \.\. 97") as malformed:
        runner.execute(step(Row(1, PROMPT, range(3)), new={1: best(count)}))
    assert malformed.value.field == "new_requests.sampling"


def test_candidates_leave_no_token_behind_that_minus_one_could_stand_for(runner):
    runner.execute(step(Row(1, PROMPT, range(3)), new={1: best(3)}))
    with pytest.raises(MalformedStep, match="sequence 0 of request 1, which has sampled nothing"):
        runner.execute(step(Row(1, [-1], range(3), computed=11)))
