"""Sampling in Triton draws the token that its torch twin draws, alone and as the worker's sampler calls it."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from triton_device import everywhere, never_waits

from kernels.philox import gumbel_noise
from kernels.sampling import sample_tokens
from worker.adjustments import TokenHistory
from worker.sampler import draw_tokens
from worker.sampling_parameters import Sample, SamplingParameters


def parameters(temperature, top_k=None, top_p=1.0, min_p=0.0, seed=0, typical_p=1.0):
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
        typical_p=typical_p,
    )


def draw(logits, samples, device, filters=True):
    """Draws with the kernels, from the arguments of the worker's sampler."""
    size = logits.shape[1]

    def column(values, dtype):
        return torch.tensor(values, dtype=dtype, device=device)

    p = [sample.parameters for sample in samples]
    seeds = torch.from_numpy(np.array([x.seed for x in p], dtype=np.uint64).view(np.int64)).to(device)
    filter_columns = (
        column([x.top_k or size for x in p], torch.int64),
        column([x.top_p for x in p], torch.float32),
        column([x.min_p for x in p], torch.float32),
        column([x.typical_p for x in p], torch.float32),
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
    logits[2, size // 3 :: 1024] = 10.0  # the first of those that one lane looks at
    samples = [Sample(parameters(0.0), 0, 0)] * 3
    found = draw(logits, samples, device, filters=False)
    assert found == logits.argmax(-1).tolist()
    assert found[1] == 0


@everywhere
@pytest.mark.parametrize("size", [1, 6, 1000, 20_001])
def test_a_draw_without_filters_equals_that_of_the_sampler(device, size):
    torch.manual_seed(size)
    rows = [(0.7, 3, 0, 5), (1e-5, 4, 1, 6), (100.0, 2**64 - 1, 2, 7), (0.0, 9, 0, 8), (1.3, 2**40 + 7, 0, 100_000)]
    samples = [Sample(parameters(heat, seed=seed), index, position) for heat, seed, index, position in rows]
    logits = 3 * torch.randn(5, size)
    logits[1] = 0.0  # tokens that tie are drawn from at any temperature
    assert_draws_alike(device, logits, samples, filters=False)


@everywhere
def test_rows_may_be_parts_of_wider_ones(device):
    logits = torch.randn(8, 500).to(device)[:, 100:400]
    samples = [Sample(parameters(5.0, seed=i, top_k=2), i, 0) for i in range(8)]
    assert draw(logits, samples, device) == draw(logits.contiguous(), samples, device)


# The least of the 32-bit words make the largest noise; a few that seeds give to tokens.
@everywhere
@pytest.mark.parametrize("seed, token, word", [(11_647_403, 167, 2), (325_673, 125, 150), (206_582, 162, 265)])
def test_noise_is_right_to_a_hundredth_however_rare_it_is(device, seed, token, word):
    """Two tokens may be drawn; the logit of the rare one puts it just ahead of the other, or just behind."""
    other = gumbel_noise(torch.zeros(1, 1, dtype=torch.int64), *torch.tensor([[seed], [0], [0]])).item()
    logits = torch.full((2, 300), -torch.inf)
    logits[:, 0] = 0.0
    logits[:, token] = other + math.log(-math.log1p(-(word + 0.5) / 2**32)) + torch.tensor([0.01, -0.01])
    assert draw(logits, [Sample(parameters(1.0, seed=seed), 0, 0)] * 2, device, filters=False) == [token, 0]


@everywhere
def test_the_only_token_is_drawn_even_if_its_word_is_so_great_that_it_rounds_to_the_end_of_the_range(device):
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 138] = 0.0
    assert draw(logits, [Sample(parameters(1.0, seed=13_045), 0, 0)], device, filters=False) == [138]


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
    {"typical_p": 0.05},
    {"typical_p": 0.5},
    {"typical_p": 0.999},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.7},
    {"top_k": 2, "typical_p": 0.3},
    {},
]


@everywhere
@pytest.mark.parametrize(
    "size, heat",
    [(1, 1.0), (40, 4.0), (5000, 0.5), (5000, 1.0), pytest.param(40_001, 0.5, marks=pytest.mark.long), (40_001, 1.0)],
)
def test_a_filtered_draw_equals_that_of_the_sampler(device, size, heat):
    torch.manual_seed(size)
    samples = [Sample(parameters(heat, seed=11 + i, **f), i, 3 * i) for i, f in enumerate(FILTERS)]
    assert_draws_alike(device, 2 * torch.randn(len(FILTERS), size), samples)


@everywhere
def test_of_several_filters_each_may_be_the_narrowest(device):
    torch.manual_seed(2)
    pairs = [
        *({"top_k": 20, "min_p": 1.0}, {"top_p": 0.95, "min_p": 1.0}, {"top_p": 0.05, "min_p": 0.01}),
        *({"top_k": 3, "top_p": 0.5}, {"top_k": 9, "typical_p": 0.05}, {"min_p": 0.2, "typical_p": 0.9}),
    ]
    heats = [0.1] * 6 + [3.0] * 6
    samples = [Sample(parameters(heat, seed=i, **pairs[i % 6]), i, 0) for i, heat in enumerate(heats)]
    assert_draws_alike(device, 2 * torch.tensor(heats)[:, None] * torch.randn(12, 60), samples)


@everywhere
@pytest.mark.parametrize(
    "likely",
    [
        [*range(150), *range(4096, 4246)],
        range(5, 40_000, 4096),
        [*range(7, 40_000, 4096), *range(100, 900)],
    ],
)
def test_a_filtered_draw_equals_that_of_the_sampler_wherever_the_likely_tokens_are(device, likely, monkeypatch):
    torch.manual_seed(1)
    # What memory holds before it is written must not count, even if it looks like a likely logit.
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **kinds: empty(*sizes, **kinds).fill_(10))
    logits = torch.randn(4, 40_000)
    logits[:, likely] += 9
    filters = [{"top_k": 9}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.7}, {"top_p": 0.9, "typical_p": 0.5}]
    samples = [Sample(parameters(1.0, seed=i, **f), i, i) for i, f in enumerate(filters)]
    assert_draws_alike(device, logits, samples)


@everywhere
def test_tokens_that_tie_with_the_last_one_kept_are_kept(device):
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -3.0]]).expand(12, -1).contiguous()
    samples = [Sample(parameters(1.0, top_k=2, seed=seed), 0, 0) for seed in range(12)]
    drawn = set(draw(logits, samples, device))
    assert drawn <= {1, 2, 3, 4}
    assert drawn & {3, 4}, "the last kept token is 2: these tie with it"
    assert_draws_alike(device, logits, samples)
    # Those three are also the most typical ones, and what top-k keeps may be cut further.
    typical = [
        parameters(1.0, seed=seed, top_k=top_k, typical_p=p) for seed in (1, 2) for top_k, p in ((2, 0.999), (6, 0.05))
    ]
    assert_draws_alike(device, logits[:4], [Sample(p, 0, 0) for p in typical])


@everywhere
def test_forbidden_tokens_are_never_drawn(device):
    logits = torch.full((8, 300), -torch.inf)
    logits[:, 7], logits[:, 255] = 0.0, -1.0
    for name in ("top_p", "typical_p"):
        samples = [Sample(parameters(1.0, seed=seed, **{name: 0.99 if seed % 2 else 1.0}), 0, 0) for seed in range(8)]
        assert set(draw(logits, samples, device)) == {7, 255}
        assert_draws_alike(device, logits, samples)


@everywhere
def test_min_p_is_a_share_of_the_best_token_of_the_row_however_many_parts_it_has(device):
    logits = torch.randn(3, 17_000) + torch.tensor([[0.0], [9.0], [0.0]])
    assert_draws_alike(device, logits, [Sample(parameters(1.0, seed=i, min_p=0.2), i, 0) for i in range(3)])


@everywhere
def test_a_row_that_is_no_distribution_gets_some_token_and_spoils_no_other_row(device):
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
        (logits, heat, *names, (names[0], heat, names[0], heat)),
        (logits, heat, *names, (names[0], heat, heat)),
        (logits[:, :0], heat, *names),
        (logits[0], heat, *names),
        (logits, heat.repeat(2)[::2], *names),
        (logits, heat, *names, (heat, heat, heat, heat)),
    ):
        with pytest.raises(ValueError):
            sample_tokens(*arguments)
    assert sample_tokens(logits[:0], heat[:0], *(name[:0] for name in names)).tolist() == []


# As called by the worker's sampler


def kinds_of_samples():
    """A sample of every kind, and one of all kinds together."""
    history = TokenHistory(np.array([3, 4, 5], dtype=np.int32))
    history.note(0, 3, np.array([7, 7, 9], dtype=np.int32))
    greedy, heated = parameters(0.0), parameters(0.8, seed=3)
    filtered = parameters(1.2, top_k=50, top_p=0.9, min_p=0.01, seed=4)
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    kinds = [
        *(greedy, heated, filtered, replace(heated, typical_p=0.5), replace(filtered, typical_p=0.7)),
        *(replace(p, bias_token_ids=(11, 12), biases=(3.0, -100.0)) for p in (greedy, heated)),
        *(replace(p, **penalties) for p in (greedy, filtered)),
        *(replace(p, stop_token_ids=(17, 18), min_tokens=9) for p in (greedy, heated)),
        *(replace(greedy, num_candidates=number) for number in (1, 4)),
        *(replace(heated, num_top_logprobs=number) for number in (0, 3)),
        replace(filtered, typical_p=0.9, stop_token_ids=(17,), min_tokens=9, num_top_logprobs=2, **penalties),
    ]
    return [Sample(replace(p, num_prompt_tokens=3), 0, 6, history) for p in kinds]


def likely_logits(num_rows, size=1500):
    """Logits whose likeliest tokens are those that the samples bias, forbid or have seen."""
    logits = 2 * torch.randn(num_rows, size, generator=torch.Generator().manual_seed(1))
    logits[:, 3:20] += 6
    return logits


def assert_sampled_alike(found, expected):
    """Compares two `SampledTokens`, or parts of them."""
    for name in (field.name for field in fields(found)):
        ours, theirs = getattr(found, name), getattr(expected, name)
        if isinstance(ours, torch.Tensor) and ours.is_floating_point():
            torch.testing.assert_close(ours.cpu(), theirs, atol=1e-4, rtol=1e-5)
        elif isinstance(ours, torch.Tensor):
            assert ours.tolist() == theirs.tolist(), name
        else:
            assert_sampled_alike(ours, theirs)


@everywhere
def test_samples_of_every_kind_equal_those_of_the_twin_and_the_host_does_not_wait(device):
    samples = kinds_of_samples()
    logits = likely_logits(len(samples))
    expected = draw_tokens(logits.clone(), samples)
    on_device = [logits.to(device).clone() for _ in range(2)]
    draw_tokens(on_device[0], samples, sample_tokens)  # compiles
    with never_waits(device):
        found = draw_tokens(on_device[1], samples, sample_tokens)
    assert_sampled_alike(found, expected)
    assert not found.failed.any()


@everywhere
def test_a_sample_is_the_same_alone_and_beside_others(device):
    samples = kinds_of_samples()
    logits = likely_logits(len(samples)).to(device)
    together = draw_tokens(logits.clone(), samples, sample_tokens).token_ids.tolist()
    for row, sample in enumerate(samples):
        alone = draw_tokens(logits[row : row + 1].clone(), [sample], sample_tokens).token_ids.tolist()
        assert alone == together[row : row + 1]


@everywhere
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone_and_that_is_decided_on_the_device(device, bad):
    samples = kinds_of_samples()
    logits = likely_logits(len(samples))
    good = draw_tokens(logits.to(device).clone(), samples, sample_tokens).token_ids.tolist()
    logits[1::2, 700] = bad
    logits = logits.to(device)
    with never_waits(device):
        found = draw_tokens(logits, samples, sample_tokens)
    assert found.failed.tolist() == [row % 2 == 1 for row in range(len(samples))]
    assert found.token_ids.tolist()[::2] == good[::2]
    assert all(0 <= token < 1500 for token in found.token_ids.tolist())


@everywhere
def test_a_row_that_allows_no_token_fails(device):
    p = replace(parameters(1.0, top_p=0.5), stop_token_ids=(0, 1), min_tokens=1)
    found = draw_tokens(torch.zeros(1, 2, device=device), [Sample(p, 0, 0)], sample_tokens)
    assert found.failed.tolist() == [True]
