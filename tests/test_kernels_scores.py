"""What C++ makes of logits, against the twins: normalizers and best tokens."""

import pytest

torch = pytest.importorskip("torch")
from kernels import build, reference  # noqa: E402
from kernels.cpu import CpuKernels, KernelsUnavailable, runnable_levels  # noqa: E402

try:
    LEVELS = [*runnable_levels(), *build.MODELS]
except KernelsUnavailable:
    LEVELS = []
INFINITY = float("inf")


@pytest.fixture(params=LEVELS)
def kernels(request):
    return CpuKernels(request.param)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 5


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 15), (2, 16), (5, 63), (4, 64), (1, 1000), (9, 49152)])
def test_normalizers_and_best_tokens_are_the_twins(kernels, shape):
    logits = random(*shape)
    normalizers, best = kernels.normalizers_and_best(logits)
    expected, expected_best = reference.normalizers_and_best(logits)
    torch.testing.assert_close(normalizers, expected, rtol=1e-6, atol=2e-6)
    assert best.equal(expected_best)


def test_of_best_tokens_that_tie_the_first_is_taken(kernels):
    logits = random(3, 100)
    logits[0, [7, 50, 99]] = logits[1, [98, 99]] = 40
    logits[2] = 0.25
    assert kernels.normalizers_and_best(logits)[1].tolist() == [7, 98, 0]


def test_forbidden_tokens_and_strided_rows_count_as_the_twin_counts_them(kernels):
    logits = random(4, 300)
    logits[1, 3:] = -INFINITY
    logits[2, :299] = -INFINITY
    part = logits[:, :299][::2]
    for rows in (logits, part[:1]):
        normalizers, best = kernels.normalizers_and_best(rows)
        torch.testing.assert_close(normalizers, rows.logsumexp(-1), rtol=1e-6, atol=2e-6)
        assert best.equal(rows.argmax(-1))


@pytest.mark.parametrize("value", [INFINITY, float("nan")])
@pytest.mark.parametrize("place", [0, 40, 99])
def test_a_row_that_is_no_distribution_has_no_finite_log_probability_and_spoils_no_other(kernels, value, place):
    logits = random(3, 100)
    expected = kernels.normalizers_and_best(logits)
    logits[1, place] = value
    normalizers, best = kernels.normalizers_and_best(logits)
    assert 0 <= best[1] < 100
    assert not (logits[1, best[1]] - normalizers[1]).isfinite()
    for found, before in zip((normalizers, best), expected, strict=True):
        assert found[[0, 2]].equal(before[[0, 2]])


def test_a_row_without_a_token_that_is_allowed_has_no_finite_log_probability(kernels):
    logits = torch.full((1, 50), -INFINITY)
    normalizers, best = kernels.normalizers_and_best(logits)
    assert not (logits[0, best[0]] - normalizers[0]).isfinite()


def test_logits_that_do_not_fit_are_refused(kernels):
    for logits in (random(2, 4).double(), random(4, 2).T, random(2, 0)):
        with pytest.raises(ValueError, match="are to be float32 with dense rows"):
            kernels.normalizers_and_best(logits)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layer", ["linear", "int8_linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (31, 64), (33, 6), (1000, 64), (3000, 320)])
def test_a_product_scores_its_outputs_as_if_they_were_logits_to_the_last_bit(kernels, shape, dtype, layer, biased):
    bias = random(shape[0]).to(dtype) if biased else None
    product = getattr(kernels, layer)(random(*shape).to(dtype) / 8, bias, widened=True)
    x = random(40, shape[1]).to(dtype)
    logits = product(x)
    normalizers, best = kernels.normalizers_and_best(logits)
    for rows in (slice(0, 40), slice(3, 4), slice(5, 18), slice(0, 0)):
        found = product.score(x[rows])
        assert found[0].equal(normalizers[rows])
        assert found[1].equal(best[rows])
        assert found[2].equal(logits.gather(-1, best[:, None]).squeeze(-1)[rows])


@pytest.mark.parametrize("num_outputs", [64, 97, 100])
def test_a_product_of_a_row_that_is_not_finite_is_no_distribution_and_spoils_no_other(kernels, num_outputs):
    product = kernels.linear(random(num_outputs, 64).bfloat16(), None, widened=True)
    x = random(3, 64).bfloat16()
    expected = product.score(x)
    x[1, 7] = float("nan")
    normalizers, best, most = product.score(x)
    assert 0 <= best[1] < num_outputs
    assert not (most[1] - normalizers[1]).isfinite()
    for found, before in zip((normalizers, best, most), expected, strict=True):
        assert found[[0, 2]].equal(before[[0, 2]])


def test_outputs_that_are_no_logits_are_not_scored(kernels):
    weight = random(64, 64).bfloat16()
    for options in ({}, {"gated": True}):
        with pytest.raises(ValueError, match="are to be float32 and no gate's"):
            kernels.linear(weight, None, **options).score(random(1, 64).bfloat16())
    with pytest.raises(ValueError, match="is not of 64"):
        kernels.linear(weight, None, widened=True).score(random(1, 32).bfloat16())
