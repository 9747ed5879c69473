"""Sampling in Triton draws the token that the worker's sampler draws."""

import math

import numpy as np
import pytest
import torch
from triton_device import everywhere

from kernels.sampling import sample_tokens
from worker.sampler import Sample, SamplingParameters, draw_tokens


def parameters(temperature, top_k=None, top_p=1.0, min_p=0.0, seed=0):
    return SamplingParameters(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop_token_ids=(),
        min_tokens=0,
        num_prompt_tokens=0,
        num_candidates=0,
    )


def draw(logits, samples, device, filters=True):
    """By the kernels, from the arguments of the worker's sampler."""
    size = logits.shape[1]

    def column(values, dtype):
        return torch.tensor(values, dtype=dtype, device=device)

    p = [sample.parameters for sample in samples]
    seeds = torch.from_numpy(np.array([x.seed for x in p], dtype=np.uint64).view(np.int64)).to(device)
    filter_columns = (
        column([x.top_k or size for x in p], torch.int64),
        column([x.top_p for x in p], torch.float32),
        column([x.min_p for x in p], torch.float32),
    )
    return sample_tokens(
        logits.to(device),
        column([x.temperature for x in p], torch.float32),
        seeds,
        column([sample.position for sample in samples], torch.int64),
        column([sample.sequence_index for sample in samples], torch.int64),
        filter_columns if filters else None,
    ).tolist()


def assert_draws_alike(device, logits, samples, filters=True):
    expected = draw_tokens(logits.clone(), samples).token_ids.tolist()
    assert draw(logits, samples, device, filters) == expected


@everywhere
@pytest.mark.parametrize("size", [1, 5, 1023, 8192, 20_001])
def test_the_best_token_is_taken_without_temperature(device, size):
    logits = torch.randn(3, size)
    logits[1, -1] = logits[1, 0] = 10.0  # the first of two
    samples = [Sample(parameters(0.0), 0, 0)] * 3
    found = draw(logits, samples, device, filters=False)
    assert found == logits.argmax(-1).tolist()
    assert found[1] == 0


@everywhere
@pytest.mark.parametrize("size", [1, 6, 1000, 20_001])
def test_a_draw_without_filters_is_the_samplers(device, size):
    torch.manual_seed(size)
    rows = [(0.7, 3, 0, 5), (1e-5, 4, 1, 6), (100.0, 2**64 - 1, 2, 7), (0.0, 9, 0, 8), (1.3, 2**40 + 7, 0, 100_000)]
    samples = [Sample(parameters(heat, seed=seed), index, position) for heat, seed, index, position in rows]
    assert_draws_alike(device, 3 * torch.randn(5, size), samples, filters=False)


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 400},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {},
]


@everywhere
@pytest.mark.parametrize("size, heat", [(1, 1.0), (40, 4.0), (5000, 0.5), (5000, 1.0)])
def test_a_filtered_draw_is_the_samplers(device, size, heat):
    torch.manual_seed(size)
    samples = [Sample(parameters(heat, seed=11 + i, **f), i, 3 * i) for i, f in enumerate(FILTERS)]
    assert_draws_alike(device, 2 * torch.randn(len(FILTERS), size), samples)


@everywhere
def test_tokens_that_tie_with_the_last_one_kept_are_kept(device):
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -3.0]]).expand(12, -1).contiguous()
    samples = [Sample(parameters(1.0, top_k=2, seed=seed), 0, 0) for seed in range(12)]
    drawn = set(draw(logits, samples, device))
    assert drawn <= {1, 2, 3, 4}
    assert drawn & {3, 4}, "the last one kept is 2: these tie with it"
    assert_draws_alike(device, logits, samples)


@everywhere
def test_forbidden_tokens_are_never_drawn(device):
    logits = torch.full((8, 300), -torch.inf)
    logits[:, 7], logits[:, 255] = 0.0, -1.0
    samples = [Sample(parameters(1.0, seed=seed, top_p=0.99 if seed % 2 else 1.0), 0, 0) for seed in range(8)]
    assert set(draw(logits, samples, device)) == {7, 255}
    assert_draws_alike(device, logits, samples)


@everywhere
def test_a_row_that_is_no_distribution_gets_some_token_and_spoils_no_other(device):
    logits = torch.randn(3, 1000)
    logits[1] = math.nan
    samples = [Sample(parameters(1.0, seed=seed, top_k=20, top_p=0.9), 0, 0) for seed in range(3)]
    found, expected = draw(logits, samples, device), draw_tokens(logits.clone(), samples)
    assert 0 <= found[1] < 1000
    assert [found[0], found[2]] == [int(expected.token_ids[0]), int(expected.token_ids[2])]


@everywhere
def test_sampling_refuses_arguments_that_do_not_fit(device):
    logits, heat = torch.zeros(2, 5, device=device), torch.ones(2, device=device)
    names = [torch.zeros(2, dtype=torch.int64, device=device)] * 3
    for arguments in (
        (logits.double(), heat, *names),
        (logits.T.contiguous().T, heat, *names),
        (logits, heat[:1], *names),
        (logits, heat.double(), *names),
        (logits, heat, *names[:2], names[2].int()),
        (logits, heat, *names, (names[0], heat, names[0])),
        (logits[:, :0], heat, *names),
    ):
        with pytest.raises(ValueError):
            sample_tokens(*arguments)
    assert sample_tokens(logits[:0], heat[:0], *(name[:0] for name in names)).tolist() == []
