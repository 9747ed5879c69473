"""Normalizers and best tokens of logits in C++, against the twins."""

import pytest

torch = pytest.importorskip("torch")
from kernels import build, reference  # noqa: E402
from kernels.cpu import SCREENING_LEVELS, CpuKernels, KernelsUnavailable, runnable_levels  # noqa: E402

try:
    LEVELS = [*runnable_levels(), *build.MODELS]
except KernelsUnavailable:
    LEVELS = []
INFINITY = float("inf")


@pytest.fixture(params=LEVELS)
def kernels(request):
    return CpuKernels(request.param)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 5


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 15), (2, 16), (5, 63), (4, 64), (1, 1000), (9, 49152)])
def test_normalizers_and_best_tokens_equal_the_twins(kernels, shape):
    logits = random(*shape)
    normalizers, best = kernels.normalizers_and_best(logits)
    expected, expected_best = reference.normalizers_and_best(logits)
    torch.testing.assert_close(normalizers, expected, rtol=1e-6, atol=2e-6)
    assert best.equal(expected_best)


def test_the_first_of_best_tokens_that_tie_is_taken(kernels):
    logits = random(3, 100)
    logits[0, [7, 50, 99]] = logits[1, [98, 99]] = 40
    logits[2] = 0.25
    assert kernels.normalizers_and_best(logits)[1].tolist() == [7, 98, 0]


def test_forbidden_tokens_and_strided_rows_are_treated_as_by_the_twin(kernels):
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
def test_a_row_that_is_no_distribution_has_no_finite_log_probability_and_spoils_no_other_row(kernels, value, place):
    logits = random(3, 100)
    expected = kernels.normalizers_and_best(logits)
    logits[1, place] = value
    normalizers, best = kernels.normalizers_and_best(logits)
    assert 0 <= best[1] < 100
    assert not (logits[1, best[1]] - normalizers[1]).isfinite()
    for found, before in zip((normalizers, best), expected, strict=True):
        assert found[[0, 2]].equal(before[[0, 2]])


def test_a_row_without_an_allowed_token_has_no_finite_log_probability(kernels):
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
def test_a_product_scores_its_outputs_like_logits_to_the_last_bit(kernels, shape, dtype, layer, biased):
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


def screened(kernels, weight):
    """Two heads of that weight: one with a screen, if the level has screens, and one without."""
    heads = [kernels.linear(weight, None, widened=True) for _ in range(2)]
    heads[0].make_screen()
    return heads


def heads_and_rows():
    """Weights and rows for which 8 bits are few, with descriptions."""
    plain, rows = random(3000, 320) / 8, random(40, 320, seed=1)
    yield "of one size", plain, rows
    yield "of few panels", plain[:97], rows
    yield "of less than a panel", plain[:5, :64], rows[:, :64]
    yield "of a group of inputs and a part of one", random(300, 384) / 8, random(40, 384, seed=1)
    far_below = plain[:97] / 64 - 1  # the last panel has one of them, and padding
    far_below[7] = 0.25
    yield "all but one far below zero", far_below, rows / 1000 + 1 / 16
    yield "with much in common", plain + 10 * random(1, 320, seed=2), rows
    yield "that nearly tie", plain[:1500].repeat(2, 1) * (1 + random(3000, 320, seed=2) / 1000), rows
    yield "that tie", plain[:1].expand(3000, 320), rows
    inputs = torch.ones(320)
    inputs[[3, 77, 250]] = 60
    yield "with inputs that stand out in rows", plain, rows * inputs
    yield "with inputs that stand out in rows and weights", plain * inputs, rows * inputs
    yield "with one large weight in each output", plain + 9 * torch.eye(320).repeat(10, 1)[:3000], rows
    yield "of rows that are nothing", plain, rows * 0
    yield "of outputs that are nothing", plain * 0, rows
    yield "of tiny rows", plain, rows * 1e-25
    yield "of large rows", plain, rows * 1e25


HEADS = {name: (weight.bfloat16(), rows.bfloat16()) for name, weight, rows in heads_and_rows()}


@pytest.mark.parametrize("name", HEADS)
def test_a_screen_finds_the_best_outputs_of_all_to_the_last_bit(kernels, name):
    weight, x = HEADS[name]
    head, plain = screened(kernels, weight)
    expected = plain.score(x)
    for rows in (slice(0, 40), slice(3, 4), slice(5, 18), slice(0, 0)):
        normalizers, best, most = head.score(x[rows])
        assert best.equal(expected[1][rows])
        assert most.equal(expected[2][rows])
        assert normalizers.equal(head.score(x)[0][rows]), "other rows change a bit"
        size = max(1.0, float(expected[2].abs().max()))
        torch.testing.assert_close(normalizers, expected[0][rows], rtol=0, atol=0.01 * size)


def test_a_screen_skips_outputs(kernels):
    """All small logits add to the normalizer; those that were only estimated change its last digits."""
    weight, x = HEADS["of one size"]
    head, plain = screened(kernels, weight)
    num_same = (head.score(x / 64)[0] == plain.score(x / 64)[0]).sum()
    assert num_same < 20 if kernels.level in SCREENING_LEVELS else num_same == 40


def turned(x):
    """Multiplies each 64 inputs by the Hadamard matrix of csrc/screening.hpp, which is its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < 64:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (x.view(-1, 64) @ matrix / 8).view(x.shape)


def in_8_bits(x):
    scale = x.abs().max() / 127
    return (x / scale).round() * scale


def off_by_the_row():
    """An output that 8 bits hold exactly, mostly zeros; a row of integers, nearly a half more where it is not zero."""
    output = torch.zeros(320)
    output[::64] = 4.0
    row = (random(320) * 2).round().clamp(-126, 126) + 40.4 * (output > 0)
    row[1] = 127
    return output, row


def off_by_the_weight():
    """An output, and a row that is just the error of its 8 bits, and that 8 bits hold exactly."""
    outputs = (random(320, seed=seed) / 8 for seed in range(10))
    pairs = ((output, in_8_bits(output - in_8_bits(output))) for output in outputs)
    return next((output, row) for output, row in pairs if output @ row > 3 * row.norm() ** 2)


@pytest.mark.parametrize("place", [590, 600])  # in either half of a panel
@pytest.mark.parametrize("make", [off_by_the_row, off_by_the_weight])
def test_a_screen_allows_for_the_worst_error_of_8_bits(kernels, make, place):
    output, row = make()
    x = turned(row).bfloat16().float()
    logit = float(x @ turned(output).bfloat16().float())
    weight = random(640, 320, seed=11) / 400
    weight[place] = turned(output)
    # Another output is nearly as good.
    weight[5] = x * (logit - 2e-4 * x.norm() * output.norm()) / x.norm().square()
    x = x.bfloat16()
    head, plain = screened(kernels, weight.bfloat16())
    assert plain.score(x[None])[1] == place
    assert head.score(x[None])[1:] == plain.score(x[None])[1:]


@pytest.mark.parametrize("num_outputs", [64, 97, 100])
@pytest.mark.parametrize("has_screen", [False, True])
def test_a_product_of_a_row_that_is_not_finite_is_no_distribution_and_spoils_no_other(kernels, num_outputs, has_screen):
    product = screened(kernels, random(num_outputs, 64).bfloat16())[0 if has_screen else 1]
    x = random(3, 64).bfloat16()
    expected = product.score(x)
    x[1, 7] = float("nan")
    normalizers, best, most = product.score(x)
    assert 0 <= best[1] < num_outputs
    assert not (most[1] - normalizers[1]).isfinite()
    for found, before in zip((normalizers, best, most), expected, strict=True):
        assert found[[0, 2]].equal(before[[0, 2]])


def test_outputs_that_are_not_logits_are_not_scored(kernels):
    weight = random(64, 64).bfloat16()
    for options in ({}, {"gated": True}):
        with pytest.raises(ValueError, match="are to be float32 and no gate's"):
            kernels.linear(weight, None, **options).score(random(1, 64).bfloat16())
    with pytest.raises(ValueError, match="is not of 64"):
        kernels.linear(weight, None, widened=True).score(random(1, 32).bfloat16())
