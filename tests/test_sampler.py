"""The sampler on small known distributions."""

import math
from dataclasses import replace

import pytest
import torch

from kernels.philox import gumbel_noise_of_all
from protos.sampling_pb2 import Sampling
from worker.sampler import draw_tokens
from worker.sampling_parameters import Sample, SamplingParameters

GREEDY = SamplingParameters(
    temperature=0,
    top_p=1,
    top_k=None,
    min_p=0,
    seed=0,
    stop_token_ids=(),
    min_tokens=0,
    num_prompt_tokens=0,
    num_candidates=0,
)
RANDOM = replace(GREEDY, temperature=1)


def log_probabilities(*probabilities):
    """Logits of these probabilities, shifted by a constant like those of a model."""
    return torch.tensor(probabilities).log() + 3


def draw(logits, *parameters, positions=None):
    """Samples rows of logits, with one set of parameters for each row or for all."""
    logits = logits if logits.ndim == 2 else logits[None]
    if len(parameters) == 1:
        parameters = parameters * len(logits)
    positions = positions or [0] * len(logits)
    samples = [Sample(p, 0, position) for p, position in zip(parameters, positions, strict=True)]
    return draw_tokens(logits.clone(), samples)


def frequencies(logits, parameters, num_draws=4000):
    """How often each token is drawn at positions 0, 1, 2, ..."""
    drawn = draw(logits.expand(num_draws, -1), parameters, positions=list(range(num_draws))).token_ids
    return torch.bincount(drawn, minlength=logits.shape[-1]) / num_draws


def support(logits, parameters):
    return frequencies(logits, parameters, 400).nonzero().squeeze(-1).tolist()


def test_greedy_takes_the_best_token_and_its_log_probability():
    sampled = draw(torch.stack([log_probabilities(0.2, 0.5, 0.3), log_probabilities(0.7, 0.2, 0.1)]), GREEDY)
    assert sampled.token_ids.tolist() == [1, 0]
    assert sampled.logprobs.exp().tolist() == pytest.approx([0.5, 0.7])
    assert not sampled.failed.any()


def test_log_probabilities_are_those_of_the_model_whatever_the_temperature_and_filters():
    chosen = draw(log_probabilities(0.2, 0.5, 0.3), replace(RANDOM, temperature=0.3, top_k=2))
    assert chosen.logprobs.exp().item() == pytest.approx([0.2, 0.5, 0.3][chosen.token_ids.item()])


@pytest.mark.parametrize(
    "parameters, expected",
    [
        (RANDOM, (0.4, 0.3, 0.2, 0.1)),
        (replace(RANDOM, temperature=0.5), (16 / 30, 9 / 30, 4 / 30, 1 / 30)),
        (replace(RANDOM, top_k=2), (4 / 7, 3 / 7, 0, 0)),
        (replace(RANDOM, top_p=0.75), (4 / 9, 3 / 9, 2 / 9, 0)),
        (replace(RANDOM, min_p=0.6), (4 / 7, 3 / 7, 0, 0)),
    ],
)
def test_draws_follow_the_distribution(parameters, expected):
    found = frequencies(log_probabilities(0.4, 0.3, 0.2, 0.1), parameters)
    possible = [(f, e) for f, e in zip(found.tolist(), expected, strict=True) if e > 0]
    assert sum(f for f, _ in possible) == pytest.approx(1)
    chi_square = 4000 * sum((f - e) ** 2 / e for f, e in possible)
    assert chi_square < 16.3  # at most 3 degrees of freedom: exceeded once in a thousand, and the seed is fixed


def test_a_token_depends_on_seed_sequence_and_position_and_not_on_the_batch():
    torch.manual_seed(1)
    logits = torch.randn(6, 1000)
    samples = [
        Sample(RANDOM, 0, 5),
        Sample(GREEDY, 0, 5),
        Sample(replace(RANDOM, seed=2**64 - 1), 0, 5),
        Sample(replace(RANDOM, top_k=50), 1, 6),
        Sample(replace(RANDOM, top_p=0.9), 0, 7),
        Sample(replace(RANDOM, temperature=0.01), 0, 8),
    ]
    together = draw_tokens(logits.clone(), samples).token_ids.tolist()
    alone = [draw_tokens(logits[i : i + 1].clone(), samples[i : i + 1]).token_ids.item() for i in range(6)]
    backwards = draw_tokens(logits.flip(0), samples[::-1]).token_ids.tolist()[::-1]
    assert together == alone == backwards


def test_seed_sequence_index_and_position_each_change_the_draws():
    logits = torch.zeros(8, 1000)
    names = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 2, 0), (0, 0, 1), (0, 0, 2), (1, 1, 1)]
    samples = [Sample(replace(RANDOM, seed=seed), index, position) for seed, index, position in names]
    assert len(set(draw_tokens(logits, samples).token_ids.tolist())) == 8


def test_filters_that_keep_every_token_draw_the_same_as_none():
    torch.manual_seed(2)
    logits = torch.randn(50, 300)
    positions = list(range(50))
    expected = draw(logits, RANDOM, positions=positions).token_ids
    for parameters in (replace(RANDOM, top_k=300), replace(RANDOM, top_k=10_000), replace(RANDOM, min_p=1e-30)):
        assert torch.equal(draw(logits, parameters, positions=positions).token_ids, expected)


@pytest.mark.parametrize(
    "parameters, kept",
    [
        (replace(RANDOM, top_k=1), [3]),
        (replace(RANDOM, top_k=2), [1, 2, 3]),
        (replace(RANDOM, top_k=3), [1, 2, 3]),
        (replace(RANDOM, top_k=100), [0, 1, 2, 3]),
        (replace(RANDOM, top_p=0.1), [3]),
        (replace(RANDOM, top_p=0.41), [1, 2, 3]),
        (replace(RANDOM, top_p=0.85), [1, 2, 3]),
        (replace(RANDOM, top_p=0.95), [0, 1, 2, 3]),
        (replace(RANDOM, min_p=0.9), [3]),
        (replace(RANDOM, min_p=0.5), [1, 2, 3]),
        (replace(RANDOM, min_p=0.2), [0, 1, 2, 3]),
        # Top-p is a share of what top-k keeps: 0.4 + 0.25 + 0.25, of which 0.4 is 44 %.
        (replace(RANDOM, top_k=2, top_p=0.43), [3]),
        (replace(RANDOM, top_k=2, top_p=0.46), [1, 2, 3]),
    ],
)
def test_a_filter_keeps_the_most_probable_tokens_and_ties_with_the_last_of_them(parameters, kept):
    assert support(log_probabilities(0.1, 0.25, 0.25, 0.4), parameters) == kept


@pytest.mark.parametrize(
    "parameters, num_kept",
    [
        (replace(RANDOM, top_k=255), 255),
        (replace(RANDOM, top_k=256), 256),
        (replace(RANDOM, top_k=257), 257),
        (replace(RANDOM, top_k=5000), 5000),
        (replace(RANDOM, min_p=math.exp(-0.001 * 299.5)), 300),
        (replace(RANDOM, top_p=(1 - math.exp(-0.001 * 600.5)) / (1 - math.exp(-6))), 601),
        (replace(RANDOM, top_p=(1 - math.exp(-0.001 * 4500.5)) / (1 - math.exp(-6))), 4501),
    ],
)
def test_filters_may_keep_more_tokens_than_are_looked_at_first(parameters, num_kept):
    logits = -0.001 * torch.arange(6000.0)  # in order, so that the first num_kept are kept
    positions = torch.arange(40)
    zeros = torch.zeros_like(positions)
    expected = (gumbel_noise_of_all(6000, zeros, positions, zeros) + logits)[:, :num_kept].argmax(-1)
    drawn = draw(logits.expand(40, -1), parameters, positions=positions.tolist()).token_ids
    assert torch.equal(drawn, expected)


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 300}, {"top_p": math.expm1(-1e-5 * 299.5) / math.expm1(-1e-2)}, {"min_p": math.exp(-1e-5 * 299.5)}],
)
def test_a_filter_that_ends_beyond_the_tokens_looked_at_first_ends_at_the_right_one(filters):
    logits = -1e-5 * torch.arange(1000.0)  # nearly uniform: 4000 draws miss none of 300 tokens
    assert frequencies(logits, replace(RANDOM, **filters)).nonzero().squeeze(-1).tolist() == list(range(300))


def test_many_ties_at_the_end_of_top_k_are_all_kept():
    assert len(support(torch.zeros(600), replace(RANDOM, top_k=3))) > 200


def test_the_smallest_temperature_is_greedy_and_the_largest_uniform():
    logits = log_probabilities(0.2, 0.5, 0.3)
    assert support(logits, replace(RANDOM, temperature=1e-38)) == [1]
    assert frequencies(logits, replace(RANDOM, temperature=1e30)).tolist() == pytest.approx([1 / 3] * 3, abs=0.03)


@pytest.mark.parametrize("parameters", [GREEDY, RANDOM, replace(RANDOM, top_k=2)])
def test_stop_tokens_cannot_be_drawn_before_min_tokens(parameters):
    logits = log_probabilities(0.04, 0.9, 0.05, 0.01).expand(100, -1)
    stopping = replace(parameters, stop_token_ids=(1, 2), min_tokens=3, num_prompt_tokens=10)
    for position in (10, 12):
        sampled = draw(logits, stopping, positions=[position] * 100)
        assert set(sampled.token_ids.tolist()) <= {0, 3}
        assert sampled.logprobs.exp().tolist() == pytest.approx(
            [{0: 0.04, 3: 0.01}[t] for t in sampled.token_ids.tolist()]
        )
    assert 1 in draw(logits, stopping, positions=[13] * 100).token_ids


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("parameters", [GREEDY, RANDOM, replace(RANDOM, top_k=2), replace(RANDOM, top_p=0.5)])
def test_a_row_that_is_not_finite_fails_alone(bad, parameters):
    logits = torch.stack([log_probabilities(0.1, 0.9), torch.tensor([0.0, bad]), log_probabilities(0.9, 0.1)])
    good = draw(logits[[0, 2]], parameters)
    sampled = draw(logits, parameters)
    assert sampled.failed.tolist() == [False, True, False]
    assert sampled.token_ids[[0, 2]].tolist() == good.token_ids.tolist()


def test_a_row_that_allows_no_token_fails():
    impossible = replace(GREEDY, stop_token_ids=(0, 1), min_tokens=1)
    assert draw(log_probabilities(0.5, 0.5), impossible).failed.tolist() == [True]
    assert draw(torch.tensor([-math.inf, -math.inf]), GREEDY).failed.tolist() == [True]
    assert draw(log_probabilities(0.5, 0.5), replace(impossible, temperature=1)).failed.tolist() == [True]


def test_tokens_without_probability_are_never_drawn_and_do_no_harm():
    assert support(torch.tensor([-math.inf, 0.0, -math.inf, 0.0]), RANDOM) == [1, 3]


def test_no_samples_give_no_tokens():
    sampled = draw_tokens(torch.empty(0, 5), [])
    assert sampled.token_ids.shape == sampled.logprobs.shape == sampled.failed.shape == (0,)


def test_parameters_come_from_the_message_and_a_value_out_of_range_is_refused():
    good = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.25, "seed": 2**64 - 1, "stop_token_ids": [0, 4, 5]}
    good["num_candidates"] = 5
    parameters = SamplingParameters.from_message(Sampling(**good), vocabulary_size=5)
    assert parameters == replace(GREEDY, **(good | {"stop_token_ids": (0, 4)}))
    assert SamplingParameters.from_message(Sampling(top_p=1), vocabulary_size=5) == GREEDY
    for bad in (
        {"temperature": -1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 2},
        {"num_candidates": -1},
        {"num_candidates": 6},
    ):
        with pytest.raises(ValueError):
            SamplingParameters.from_message(Sampling(**(good | bad)), vocabulary_size=5)
