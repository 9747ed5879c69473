"""Biases, penalties and typical sampling, held against transformers' own processors, draw by draw.

A draw is the argmax of the processed scores plus the noise of (seed, sequence index, position). So it is theirs when it
is the argmax of the scores that their processors give, plus that noise.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.philox import gumbel_noise_of_all
from protos.columns import pack, pack_floats
from protos.sampling_pb2 import Sampling
from worker.adjustments import TokenHistory
from worker.sampler import draw_tokens
from worker.sampling_parameters import Sample, SamplingParameters

transformers = pytest.importorskip("transformers")
from transformers.generation import logits_process as theirs  # noqa: E402

VOCABULARY_SIZE = 1000
NEUTRAL = SamplingParameters.from_message(Sampling(temperature=1, top_p=1), VOCABULARY_SIZE)
GREEDY = replace(NEUTRAL, temperature=0)


def history_of(prompt, *outputs):
    """A request's tokens: its prompt, and the output of its sequences 0, 1, ..."""
    history = TokenHistory(np.array(prompt, dtype=np.int32))
    for index, output in enumerate(outputs):
        history.note(index, len(prompt), np.array(output, dtype=np.int32))
    return history


def samples_of(parameters, prompts, outputs):
    """A sample for each prompt and output, as the first sequence of a request of its own."""
    return [
        Sample(replace(p, num_prompt_tokens=len(prompt)), 0, len(prompt) + len(output), history_of(prompt, output))
        for p, prompt, output in zip(parameters, prompts, outputs, strict=True)
    ]


def random_tokens(generator, num_rows, most):
    """Rows of tokens out of few, so that they repeat, and of lengths that differ."""
    lengths = torch.randint(0, most, (num_rows,), generator=generator).tolist()
    return [torch.randint(0, 40, (length,), generator=generator).tolist() for length in lengths]


def their_scores(logits, parameters, prompt, output):
    """One row through transformers' processors in their order; OpenAI's penalties between them, by their formula."""
    scores, ids = logits[None].clone(), torch.tensor([[*prompt, *output]])
    p = parameters
    if p.bias_token_ids:
        biases = {(id_,): bias for id_, bias in zip(p.bias_token_ids, p.biases, strict=True)}
        scores = theirs.SequenceBiasLogitsProcessor(biases)(ids, scores)
    if p.repetition_penalty != 1 and ids.numel():
        scores = theirs.RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(ids, scores)
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=scores.shape[-1])
    scores = scores - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)
    if p.temperature not in (0, 1):
        scores = theirs.TemperatureLogitsWarper(p.temperature)(ids, scores)
    if p.top_k is not None:
        scores = theirs.TopKLogitsWarper(p.top_k)(ids, scores)
    if p.top_p < 1:
        scores = theirs.TopPLogitsWarper(p.top_p)(ids, scores)
    if p.min_p > 0:
        scores = theirs.MinPLogitsWarper(p.min_p)(ids, scores)
    if p.typical_p < 1:
        scores = theirs.TypicalLogitsWarper(p.typical_p)(ids, scores)
    return scores[0]


def their_tokens(logits, samples, prompts, outputs):
    tokens = []
    for row, sample in enumerate(samples):
        scores = their_scores(logits[row], sample.parameters, prompts[row], outputs[row])
        if sample.parameters.temperature > 0:
            name = (torch.tensor([number]) for number in (sample.parameters.seed, sample.position, 0))
            scores = scores + gumbel_noise_of_all(len(scores), *name)[0]
        tokens.append(scores.argmax().item())
    return tokens


ADJUSTMENTS = {
    "bias": {"bias_token_ids": (3, 17, 999), "biases": (4.0, -100.0, 2.5)},
    "repetition": {"repetition_penalty": 1.7},
    "repetition under 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5},
    "negative": {"presence_penalty": -2.0, "frequency_penalty": -0.5},
    "all": {
        "bias_token_ids": (5, 6),
        "biases": (6.0, 3.0),
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "temperature": 0.7,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.8,
    },
}


@pytest.mark.parametrize("base", [GREEDY, NEUTRAL], ids=["greedy", "drawn"])
@pytest.mark.parametrize("changes", ADJUSTMENTS.values(), ids=ADJUSTMENTS)
def test_tokens_are_those_of_transformers_own_processors(base, changes):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(24, VOCABULARY_SIZE, generator=generator)
    logits[:, :40] += 5  # so that what was seen is what is likely
    prompts, outputs = (random_tokens(generator, 24, most) for most in (30, 20))
    changes = changes | ({"temperature": 0} if base is GREEDY else {})
    samples = samples_of([replace(base, seed=row, **changes) for row in range(24)], prompts, outputs)
    expected = their_tokens(logits, samples, prompts, outputs)
    assert draw_tokens(logits.clone(), samples).token_ids.tolist() == expected
    plain = samples_of([replace(base, seed=row) for row in range(24)], prompts, outputs)
    assert draw_tokens(logits.clone(), plain).token_ids.tolist() != expected, "the adjustment makes a difference"


def test_rows_of_all_kinds_in_one_batch_are_drawn_as_each_alone():
    generator = torch.Generator().manual_seed(2)
    kinds = [{}, {"top_k": 40}, {"typical_p": 0.5}, *ADJUSTMENTS.values()] * 2
    logits = 3 * torch.randn(len(kinds), VOCABULARY_SIZE, generator=generator)
    prompts, outputs = (random_tokens(generator, len(kinds), most) for most in (30, 20))
    bases = (GREEDY, NEUTRAL)
    parameters = [replace(bases[row % 2], seed=row, **changes) for row, changes in enumerate(kinds)]
    samples = samples_of(parameters, prompts, outputs)
    together = draw_tokens(logits.clone(), samples)
    for row, sample in enumerate(samples):
        alone = draw_tokens(logits[row : row + 1].clone(), [sample])
        assert alone.token_ids.item() == together.token_ids[row].item()
        assert alone.logprobs.item() == together.logprobs[row].item()


@pytest.mark.parametrize("typical_p", [0.001, 0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0], ids=["flat", "round", "peaked"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 300}, {"top_p": 0.95, "min_p": 0.01}], ids=["all", "k", "p"])
def test_typical_sampling_keeps_what_transformers_keeps(typical_p, scale, filters):
    """Flat distributions keep more than the 256 tokens that are looked at first."""
    logits = scale * torch.randn(1, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(3))
    p = replace(NEUTRAL, typical_p=typical_p, **filters)
    kept = their_scores(logits[0], p, [], []).isfinite().nonzero().squeeze(-1).tolist()
    positions = torch.arange(200)
    samples = [Sample(p, 0, position) for position in positions.tolist()]
    drawn = draw_tokens(logits.repeat(200, 1), samples).token_ids
    zeros = torch.zeros_like(positions)
    noise = gumbel_noise_of_all(VOCABULARY_SIZE, zeros, positions, zeros)
    expected = (noise + their_scores(logits[0], p, [], [])).argmax(-1)
    assert torch.equal(drawn, expected)
    assert set(drawn.tolist()) <= set(kept)


def test_log_probabilities_stay_the_models_own_whatever_is_added_and_subtracted():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(8, VOCABULARY_SIZE, generator=generator)
    prompts, outputs = (random_tokens(generator, 8, most) for most in (30, 20))
    samples = samples_of([replace(NEUTRAL, seed=row, **ADJUSTMENTS["all"]) for row in range(8)], prompts, outputs)
    drawn = draw_tokens(logits.clone(), samples)
    expected = logits.log_softmax(-1).gather(-1, drawn.token_ids[:, None]).squeeze(-1)
    assert drawn.logprobs.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_token_in_prompt_and_output_is_penalized_once_for_repetition():
    logits = torch.tensor([[4.0, 2.5, -1.0]])
    sample = Sample(replace(GREEDY, num_prompt_tokens=2, repetition_penalty=1.5), 0, 5, history_of([0, 0], [0, 0, 2]))
    assert draw_tokens(logits, [sample]).token_ids.item() == 0
    assert logits.tolist() == [[pytest.approx(4 / 1.5), 2.5, -1.5]]


def test_the_prompt_does_not_count_for_presence_and_frequency():
    logits = torch.zeros(1, 4)
    p = replace(GREEDY, num_prompt_tokens=2, presence_penalty=1, frequency_penalty=0.25)
    draw_tokens(logits, [Sample(p, 0, 5, history_of([0, 1], [1, 2, 2]))])
    assert logits.tolist() == [[0, -1.25, -1.5, 0]]


def test_a_bias_bans_a_token_and_forces_one():
    logits = torch.tensor([[9.0, 1.0, 0.0]]).repeat(2, 1)
    banned = replace(GREEDY, bias_token_ids=(0,), biases=(-100.0,))
    forced = replace(NEUTRAL, bias_token_ids=(2,), biases=(100.0,))
    assert draw_tokens(logits, [Sample(banned, 0, 0), Sample(forced, 0, 0)]).token_ids.tolist() == [1, 2]


def test_a_bias_does_not_lift_what_min_tokens_forbids():
    p = replace(GREEDY, bias_token_ids=(2,), biases=(100.0,), stop_token_ids=(2,), min_tokens=1)
    assert draw_tokens(torch.tensor([[1.0, 2.0, 3.0]]), [Sample(p, 0, 0)]).token_ids.item() == 1
    nothing = replace(p, stop_token_ids=(0, 1, 2))
    assert draw_tokens(torch.tensor([[1.0, 2.0, 3.0]]), [Sample(nothing, 0, 0)]).failed.tolist() == [True]


def test_candidates_of_a_beam_search_have_their_biases_in_their_log_probabilities():
    """As SequenceBiasLogitsProcessor adds to the log-softmax there."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    p = replace(GREEDY, num_candidates=3, bias_token_ids=(0, 2), biases=(5.0, -4.0))
    expected = logits.log_softmax(-1) + torch.tensor([[5.0, 0.0, -4.0, 0.0]])
    drawn = draw_tokens(logits.clone(), [Sample(p, 0, 0)])
    assert drawn.candidates.token_ids.tolist() == [0, 1, 3]
    assert drawn.candidates.logprobs.tolist() == pytest.approx(expected[0, [0, 1, 3]].tolist(), abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone_with_adjustments_too(bad):
    prompts, outputs = [[0, 1]] * 3, [[2]] * 3
    samples = samples_of([replace(NEUTRAL, num_top_logprobs=2, **ADJUSTMENTS["all"])] * 3, prompts, outputs)
    logits = torch.zeros(3, VOCABULARY_SIZE)
    logits[1, 7] = bad
    drawn = draw_tokens(logits, samples)
    assert drawn.failed.tolist() == [False, True, False]
    assert drawn.top_logprobs.ranks[[0, 2]].tolist() == [1, 1]


@pytest.mark.parametrize("penalty", [1e-38, 1e38])
def test_the_most_absurd_penalty_fails_nothing(penalty):
    logits = torch.tensor([[5.0, -5.0, 1.0], [5.0, -5.0, 0.0]])
    samples = samples_of([replace(NEUTRAL, repetition_penalty=penalty)] * 2, [[0, 1]] * 2, [[], [2]])
    assert draw_tokens(logits, samples).failed.tolist() == [False, False]


# The history


def test_a_token_sampled_again_at_its_position_takes_its_own_place():
    history = history_of([7, 7, 3])
    for position, token in ((3, 1), (4, 2), (4, 5), (3, 1), (4, 5), (5, 6)):
        history.note(0, position, token)
    assert history.output(0, 6).tolist() == [1, 5, 6]
    assert history.output(0, 4).tolist() == [1], "what comes later is not seen"
    assert history.output(0, 3).tolist() == []
    assert history.unique_prompt.tolist() == [3, 7]
    history.note(0, 6, np.arange(100))
    history.note(0, 3, 8)
    assert history.output(0, 106).tolist() == [8, 5, 6, *range(100)], "what comes later stays"


def test_sequences_of_a_request_have_outputs_of_their_own_and_gaps_are_seen():
    history = history_of([7], range(100), [3])
    history.note(1, 2, 4)
    assert history.output(0, 101).tolist() == list(range(100))
    assert history.output(1, 3).tolist() == [3, 4]
    assert history.output(1, 4) is None
    assert history.output(2, 1).tolist() == []
    assert history.output(2, 2) is None
    assert history.output(0, 0) is None, "a position in the prompt"


# The message


def test_parameters_come_from_the_message_and_a_value_out_of_range_is_refused():
    good = {
        "top_p": 1,
        "typical_p": 0.5,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "bias_token_ids": pack([0, 9, 5]),
        "biases": pack_floats([1, 2, 3]),
        "num_top_logprobs": 0,
        "num_prompt_logprobs": 5,
    }
    p = SamplingParameters.from_message(Sampling(**good), vocabulary_size=6)
    assert (p.typical_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (0.5, 1.5, -1, 2)
    assert (p.bias_token_ids, p.biases) == ((0, 5), (1, 3)), "one beyond the vocabulary is left out"
    assert (p.num_top_logprobs, p.num_prompt_logprobs) == (0, 5)
    for bound in ({"min_p": 1}, {"typical_p": 1}, {"num_candidates": 6}, {"num_top_logprobs": 6}):
        SamplingParameters.from_message(Sampling(**(good | bound)), vocabulary_size=6)
    for bad in (
        {"typical_p": 1.5},
        {"typical_p": math.nan},
        {"repetition_penalty": -1},
        {"repetition_penalty": math.inf},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"biases": pack_floats([1, 2])},
        {"biases": pack_floats([1, math.inf, 3])},
        {"num_top_logprobs": -1},
        {"num_prompt_logprobs": 7},
    ):
        with pytest.raises(ValueError):
            SamplingParameters.from_message(Sampling(**(good | bad)), vocabulary_size=6)
