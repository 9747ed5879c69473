"""Sampling in C++ draws the token that its torch twin draws."""

import math

import pytest

torch = pytest.importorskip("torch")
from kernels import build, reference  # noqa: E402
from kernels.cpu import CpuKernels, KernelsUnavailable, runnable_levels  # noqa: E402
from kernels.philox import gumbel_noise  # noqa: E402

try:
    LEVELS = [*runnable_levels(), *build.MODELS]
except KernelsUnavailable:
    LEVELS = []
pytestmark = pytest.mark.skipif(not LEVELS, reason="the C++ kernels are not built: no compiler when this was installed")

# top_k (0: all), top_p, min_p.
FILTERS = [
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (400, 1.0, 0.0),
    (0, 0.01, 0.0),
    (0, 0.5, 0.0),
    (0, 0.999, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (50, 0.9, 0.0),
    (50, 0.9, 0.02),
    (600, 0.9, 0.0),
    (700, 0.99, 0.001),
    (0, 1.0, 0.0),
]


@pytest.fixture(params=LEVELS)
def kernels(request):
    return CpuKernels(request.param)


def names(num_rows):
    """Seeds, positions and sequence indexes, some with all their bits in use."""
    rows = torch.arange(num_rows)
    return rows * 0x0123_4567_89AB_CDEF, rows * 7_001, rows % 3


def columns(filters, size):
    top_k, top_p, min_p = zip(*filters, strict=True)
    kept = torch.tensor([k or size for k in top_k])
    return kept, torch.tensor(top_p), torch.tensor(min_p), torch.ones(len(filters))


@pytest.mark.parametrize("size", [1, 6, 1000, 20_001])
def test_a_draw_equals_that_of_the_twin(kernels, size):
    logits = 3 * torch.randn(5, size, generator=torch.Generator().manual_seed(size))
    heat = torch.tensor([0.7, 1e-5, 100.0, 0.0, 1.3])
    assert kernels.sample_tokens(logits, heat, *names(5)).equal(reference.sample_tokens(logits, heat, *names(5)))


def test_tokens_that_tie_with_the_last_one_of_a_top_k_count_in_top_p(kernels):
    logits = torch.linspace(0, -1, 300).repeat(40, 1)
    logits = torch.cat([logits, torch.full((40, 3700), -1.0)], 1)
    for sample_tokens in (kernels.sample_tokens, reference.sample_tokens):
        drawn = sample_tokens(logits, torch.ones(40), *names(40), columns([(300, 0.9, 0.0)] * 40, 4000))
        assert (drawn >= 300).sum() > 20, "they have nearly all of the probability"


@pytest.mark.parametrize("size, heat", [(1, 1.0), (40, 4.0), (5000, 0.5), (5000, 1.0), (20_001, 2.0)])
def test_a_filtered_draw_equals_that_of_the_twin(kernels, size, heat):
    logits = 2 * torch.randn(len(FILTERS), size, generator=torch.Generator().manual_seed(size))
    arguments = (torch.full((len(FILTERS),), heat), *names(len(FILTERS)), columns(FILTERS, size))
    assert kernels.sample_tokens(logits, *arguments).equal(reference.sample_tokens(logits, *arguments))


def test_hundreds_of_draws_with_each_filter_equal_the_twins(kernels):
    filters = [*FILTERS, (3, 0.5, 0.0), (0, 1 - 2.0**-24, 0.0)] * 200
    logits = 2 * torch.randn(len(filters), 200, generator=torch.Generator().manual_seed(0))
    arguments = (torch.ones(len(filters)), *names(len(filters)), columns(filters, 200))
    assert kernels.sample_tokens(logits, *arguments).equal(reference.sample_tokens(logits, *arguments))


# The least of the 32-bit words make the largest noise; a few that seeds give to tokens.
RARE = [(11_647_403, 167, 2), (42_591, 93, 41), (842_465, 280, 125), (325_673, 125, 150), (206_582, 162, 265)]


@pytest.mark.parametrize("seed, token, word", RARE)
def test_noise_is_right_to_a_hundredth_however_rare_it_is(kernels, seed, token, word):
    """Two tokens may be drawn; the logit of the rare one puts it just ahead of the other, or just behind."""
    of_both = [torch.tensor([number] * 2) for number in (seed, 0, 0)]
    of_other = gumbel_noise(torch.zeros(2, 1, dtype=torch.int64), *of_both)[0]
    logits = torch.full((2, 300), -torch.inf)
    logits[:, 0] = 0.0
    logits[:, token] = of_other + math.log(-math.log1p(-(word + 0.5) / 2**32)) + torch.tensor([0.01, -0.01])
    for sample_tokens in (kernels.sample_tokens, reference.sample_tokens):
        assert sample_tokens(logits, torch.ones(2), *of_both).tolist() == [token, 0]


def test_the_only_token_is_drawn_even_if_its_word_is_so_great_that_it_rounds_to_the_end_of_the_range(kernels):
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 138] = 0.0
    for sample_tokens in (kernels.sample_tokens, reference.sample_tokens):
        assert sample_tokens(logits, torch.ones(1), *torch.tensor([[13_045], [0], [0]])).tolist() == [138]


def test_thousands_of_draws_equal_the_twins_and_follow_the_distribution(kernels):
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0, -torch.inf, 0.5]]).expand(4000, -1).contiguous()
    heat, rows = torch.ones(4000), names(4000)
    found = kernels.sample_tokens(logits, heat, *rows)
    assert found.equal(reference.sample_tokens(logits, heat, *rows))
    shares = found.bincount(minlength=6) / 4000
    assert (shares - logits[0].softmax(-1)).abs().max() < 0.03


def test_the_best_token_is_the_first_of_a_tie_and_ties_with_the_last_kept_token_are_kept(kernels):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, -3.0]]).expand(40, -1).contiguous()
    assert kernels.sample_tokens(logits, torch.zeros(40), *names(40)).eq(1).all()
    kept = kernels.sample_tokens(logits, torch.ones(40), *names(40), columns([(3, 1.0, 0.0)] * 40, 6))
    assert set(kept.tolist()) == {1, 2, 3, 4}, "the last one kept is one of 2 and 4"


def test_a_forbidden_token_is_never_drawn(kernels):
    logits = torch.full((40, 300), -torch.inf)
    logits[:, 7], logits[:, 255] = 0.0, -1.0
    for filters in (None, columns([(0, 0.99, 0.0)] * 40, 300)):
        assert set(kernels.sample_tokens(logits, torch.ones(40), *names(40), filters).tolist()) == {7, 255}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_no_distribution_gets_some_token_and_spoils_no_other_row(kernels, value):
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    arguments = (torch.ones(3), *names(3), columns([(20, 0.9, 0.0)] * 3, 1000))
    expected = kernels.sample_tokens(logits, *arguments)
    logits[1] = value
    found = kernels.sample_tokens(logits, *arguments)
    assert 0 <= found[1] < 1000
    assert found[[0, 2]].equal(expected[[0, 2]])


def test_rows_may_be_strided_and_typical_sampling_equals_the_twin(kernels):
    logits = torch.randn(6, 2000, generator=torch.Generator().manual_seed(0))[:, 100:400]
    heat, filters = torch.ones(6), columns(FILTERS[-6:], 300)
    assert kernels.sample_tokens(logits, heat, *names(6)).equal(reference.sample_tokens(logits, heat, *names(6)))
    filters[3][2] = 0.4
    arguments = (heat, *names(6), filters)
    assert kernels.sample_tokens(logits, *arguments).equal(reference.sample_tokens(logits, *arguments))


def test_arguments_that_do_not_fit_are_refused(kernels):
    logits, heat = torch.zeros(2, 5), torch.ones(2)
    for arguments in (
        (logits.double(), heat, *names(2)),
        (logits, heat[:1], *names(2)),
        (logits[:, :0], heat, *names(2)),
    ):
        with pytest.raises(ValueError, match=r"float32|row|empty"):
            kernels.sample_tokens(*arguments)
