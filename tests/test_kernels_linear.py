"""Linear layers in C++ against their twin."""

import pytest

torch = pytest.importorskip("torch")
from kernels import build, choice, cpu  # noqa: E402
from kernels.cpu import INTEGER_LEVELS, CpuKernels, KernelsUnavailable, runnable_levels  # noqa: E402
from kernels.cpu_linear import CpuLinear, Form  # noqa: E402
from kernels.quantization import in_8_bits  # noqa: E402
from kernels.reference import PlainLinear, int8_linear, linear  # noqa: E402

try:
    LEVELS = [*runnable_levels(), *build.MODELS]
except KernelsUnavailable:
    LEVELS = []
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# For rounding of the result, and for sums in another order, in proportion to the sum of what is added.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
# More rows than are converted at once, where x has another dtype than the multiplication.
NUM_IN_TWO_CHUNKS = 267


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "outputs_and_inputs", [(1, 2), (31, 6), (32, 64), (33, 8), (96, 576), (40, 640), (33, 1152), (70, 1536)]
)
def test_a_product_in_cpp_equals_its_twin(level, dtype, outputs_and_inputs):
    num_outputs, num_inputs = outputs_and_inputs
    weight, bias = random(num_outputs, num_inputs, dtype=dtype), random(num_outputs, dtype=dtype, seed=1)
    layer = CpuKernels(level).linear(weight, bias)
    for num_tokens in (0, 1, 2, 3, 4, 5, 11, 12, 13, 24, 31):
        x = random(num_tokens, num_inputs, dtype=dtype, seed=2)
        expected = PlainLinear(weight.double(), bias.double())(x.double())
        size = PlainLinear(weight.double().abs(), bias.double().abs())(x.double().abs())
        found = layer(x)
        assert found.dtype is dtype
        assert found.shape == expected.shape
        assert ((found.double() - expected).abs() <= TOLERANCES[dtype] * size).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens_and_inputs", [(40, 576), (33, 1152), (NUM_IN_TWO_CHUNKS, 1536)])
def test_an_output_has_the_same_bits_alone_and_in_a_batch_and_on_one_thread(level, dtype, tokens_and_inputs):
    num_tokens, num_inputs = tokens_and_inputs
    layer = CpuKernels(level).linear(random(100, num_inputs, dtype=dtype), None, widened=True)
    x = random(num_tokens, num_inputs, dtype=dtype, seed=1)
    together = layer(x)
    assert torch.cat([layer(x[:1]), layer(x[1:6]), layer(x[6:])]).equal(together)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = CpuKernels(level).linear(random(100, num_inputs, dtype=dtype), None, widened=True)
    finally:
        torch.set_num_threads(num_threads)
    assert alone(x).equal(together)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_has_the_same_bits_among_any_number_of_rows(level, dtype):
    layer = CpuKernels(level).linear(random(33, 576, dtype=dtype), None, widened=True)
    x = random(33, 576, dtype=dtype, seed=1)
    together = layer(x)
    for num_rows in range(33):
        assert layer(x[:num_rows]).equal(together[:num_rows])


@pytest.mark.parametrize("level", LEVELS)
def test_a_widened_product_is_not_rounded_to_the_dtype_of_the_weight(level):
    weight, x = random(64, 96, dtype=torch.bfloat16), random(5, 96, dtype=torch.bfloat16, seed=1)
    found = CpuKernels(level).linear(weight, None, widened=True)(x)
    torch.testing.assert_close(found, x.float() @ weight.float().T, rtol=1e-5, atol=1e-4)


def rms(x):
    return x.double().square().mean().sqrt()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_inputs", [64, 576, 1536])
def test_a_product_of_bfloat16_adds_at_most_a_quarter_of_the_rounding_error_of_its_input(level, num_inputs):
    weight, wide = random(70, num_inputs, dtype=torch.bfloat16), random(40, num_inputs, dtype=torch.float32, seed=1)
    x = wide.bfloat16()
    exact = x.double() @ weight.double().T
    has_rounded = rms(wide.double() @ weight.double().T - exact)
    assert rms(CpuKernels(level).linear(weight, None, widened=True)(x) - exact) <= has_rounded / 4


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 2, 4, 6, 40])
def test_weights_down_to_a_64th_of_the_largest_of_their_output_are_multiplied_exactly(level, num_rows):
    # Each mantissa with seven exponents and both signs; few to a group, whose sum would otherwise limit them.
    mantissas, places = torch.arange(128, 256), torch.arange(9)
    weight = torch.zeros(128, 576)
    weight[:, places * 64] = mantissas[:, None] * 2.0 ** -(places % 7) * (-1.0) ** places
    weight[0, 64] = 0
    layer = CpuKernels(level).linear(weight.bfloat16(), None, widened=True)
    assert (layer.form is Form.INTEGERS) == (level in INTEGER_LEVELS)
    one_by_one = torch.eye(576)[places * 64].bfloat16()
    rows = one_by_one.repeat(-(-num_rows // 9), 1)
    found = torch.cat([layer(part) for part in rows.split(num_rows)])
    torch.testing.assert_close(found, weight[:, places * 64].T.repeat(-(-num_rows // 9), 1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_the_largest_values_side_by_side_are_multiplied_exactly(level, signs):
    # The largest of a row meets that of a weight, in one unit of two inputs and in the next.
    weight, x = torch.zeros(32, 576), torch.zeros(13, 576)
    weight[:, :4], x[:, :4] = signs[0] * 255.0, signs[1] * 128.0
    weight[:, 300], x[:, 302], x[:, 303] = 255, 128, -128
    found = CpuKernels(level).linear(weight.bfloat16(), None, widened=True)(x.bfloat16())
    torch.testing.assert_close(found, x @ weight.T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", INTEGER_LEVELS)
def test_a_weight_is_kept_as_integers_if_rounding_allows_it(level):
    kernels, weight = CpuKernels(level), random(70, 576, dtype=torch.bfloat16)
    assert kernels.linear(weight, None).form is Form.INTEGERS
    assert kernels.linear(weight[:, :570], None).form is Form.CODED
    assert kernels.linear(weight.float(), None).form is Form.PLAIN
    for factor in (1e-35, 1e35):
        assert kernels.linear(weight * factor, None).form is Form.CODED
    weight[3, 5] = 1e3
    assert kernels.linear(weight, None).form is Form.CODED
    weight[3, 5] = torch.nan
    assert kernels.linear(weight, None).form is Form.CODED
    assert kernels.linear(weight[:, :0], weight[:, 0])(weight[:3, :0]).equal(weight[:, 0].expand(3, -1))


@pytest.mark.parametrize("level", LEVELS)
def test_a_value_far_larger_than_others_costs_precision_only_nearby(level):
    weight, x = random(70, 576, dtype=torch.bfloat16), random(9, 576, dtype=torch.bfloat16, seed=1)
    layer = CpuKernels(level).linear(weight, None, widened=True)
    x[4, 100] = 1e6
    weight_far_away = weight.clone()
    weight_far_away[:, :320] = 0
    found = CpuKernels(level).linear(weight_far_away, None, widened=True)(x)
    expected = x.double() @ weight_far_away.double().T
    assert rms(found[4] - expected[4]) <= 1e-3 * rms(expected[4])
    near = x.double() @ weight.double().T
    assert rms(layer(x)[4] - near[4]) <= 1e-3 * rms(near[4])


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_with_values_far_larger_than_others_is_not_rounded(level):
    weight, x = random(70, 576, dtype=torch.bfloat16), random(9, 576, dtype=torch.bfloat16, seed=1)
    weight[30, 7] = 3e4
    x[:, 7] = 0
    found = CpuKernels(level).linear(weight, None, widened=True)(x)
    torch.testing.assert_close(found, x.float() @ weight.float().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_inputs", [64, 1536])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("value", [0.7, 255 / 256])  # the latter comes to 0.996 of the range of 32 bits
def test_a_sum_of_equal_products_as_large_as_they_get_does_not_overflow(level, num_inputs, sign, value):
    weight = torch.full((33, num_inputs), value, dtype=torch.bfloat16)
    for num_rows in (1, 5, 7, 12):
        x = torch.full((num_rows, num_inputs), sign * 255.0, dtype=torch.bfloat16)
        found = CpuKernels(level).linear(weight, None, widened=True)(x)
        torch.testing.assert_close(found, x.float() @ weight.float().T, rtol=1e-3, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_rows_of_zeros_and_outputs_of_zeros_give_zeros(level):
    weight, x = random(40, 128, dtype=torch.bfloat16), random(9, 128, dtype=torch.bfloat16, seed=1)
    weight[11] = x[1] = 0
    layer = CpuKernels(level).linear(weight, None)
    assert (layer.form is Form.INTEGERS) == (level in INTEGER_LEVELS)
    for found in (layer(x), layer(x[:3])):
        assert found[1].eq(0).all()
        assert found[:, 11].eq(0).all()
        assert found[0].ne(0).sum() == 39


@pytest.mark.parametrize("level", LEVELS)
def test_a_product_may_be_given_room_for_its_result_which_has_to_fit(level):
    layer = CpuKernels(level).linear(random(64, 96, dtype=torch.bfloat16), None, widened=True)
    x = random(5, 96, dtype=torch.bfloat16, seed=1)
    room = torch.full((7, 64), -1.0)
    found = layer(x, room[:5])
    assert found.data_ptr() == room.data_ptr()
    assert found.equal(layer(x))
    assert room[5:].eq(-1).all(), "no more than that is written"
    for misfit in (room, room[:5, :32], room[:5].T, room[:5].bfloat16()):
        with pytest.raises(ValueError, match=r"no room for \[5, 64\]"):
            layer(x, misfit)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_be_strided_and_the_weight_may_change_once_it_is_packed(level, dtype):
    weight, wide = random(40, 24, dtype=dtype), random(7, 50, dtype=dtype, seed=1)
    layer = CpuKernels(level).linear(weight, None)
    expected = layer(wide[:, :24].contiguous())
    weight.zero_()
    assert layer(wide[:, :24]).equal(expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["linear", "int8_linear"])
def test_a_gated_product_equals_its_twin(level, dtype, name):
    weight, bias = random(96, 64, dtype=dtype) / 8, random(96, dtype=dtype, seed=1)
    layer = getattr(CpuKernels(level), name)(weight, bias, gated=True)
    twin = {"linear": linear, "int8_linear": int8_linear}[name](weight, bias, gated=True)
    # The last number of rows takes more than one chunk of converted rows, with three panels each.
    for num_tokens in (1, 5, 29, NUM_IN_TWO_CHUNKS):
        x = random(num_tokens, 64, dtype=dtype, seed=2)
        torch.testing.assert_close(layer(x), twin(x), rtol=2e-2, atol=4 * TOLERANCES[dtype])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs_and_inputs", [(31, 6), (32, 64), (70, 1536)])
def test_an_int8_product_in_cpp_equals_its_twin_and_has_the_same_bits_in_any_batch(level, dtype, outputs_and_inputs):
    num_outputs, num_inputs = outputs_and_inputs
    weight, bias = random(num_outputs, num_inputs, dtype=dtype), random(num_outputs, dtype=dtype, seed=1)
    layer = CpuKernels(level).int8_linear(weight, bias, widened=True)
    twin = int8_linear(weight, bias, widened=True)
    x = random(NUM_IN_TWO_CHUNKS, num_inputs, dtype=dtype, seed=2)
    together = layer(x)
    # bfloat16 that is multiplied as integers is rounded once more, by less than a tenth of its own rounding.
    each = 7e-4 if dtype is torch.bfloat16 and level in INTEGER_LEVELS else 2e-5
    torch.testing.assert_close(together, twin(x), rtol=1e-5, atol=each * num_inputs**0.5)
    parts = x.split([1, 2, 3, 5, 11, 9, NUM_IN_TWO_CHUNKS - 31])
    assert torch.cat([layer(part) for part in parts]).equal(together)


def coded_and_plain(monkeypatch, level, weight, *, gated=False):
    layers = []
    for coding_levels in ([level], []):
        monkeypatch.setattr(cpu, "_CODING_LEVELS", coding_levels)
        layers.append(CpuKernels(level).linear(weight, None, gated=gated))
    return layers


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("outputs_and_inputs", [(1, 2), (33, 70), (96, 574), (64, 1532)])
def test_a_coded_weight_gives_the_bits_of_a_plain_one(monkeypatch, level, outputs_and_inputs):
    num_outputs, num_inputs = outputs_and_inputs
    weight = random(num_outputs, num_inputs, dtype=torch.bfloat16)
    coded, plain = coded_and_plain(monkeypatch, level, weight)
    assert coded.form is Form.CODED
    assert plain.form is Form.PLAIN
    for num_rows in (1, 2, 5, 6, 12, 13, 31, 70, 121, NUM_IN_TWO_CHUNKS):
        x = random(num_rows, num_inputs, dtype=torch.bfloat16, seed=2)
        assert coded(x).equal(plain(x))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_inputs", [128, 130])  # units of two inputs: an even number of them, and an odd one
def test_a_coded_weight_may_be_gated_and_hold_any_value(monkeypatch, level, num_inputs):
    weight = random(64, num_inputs, dtype=torch.bfloat16)
    rare = torch.tensor([0.0, -0.0, 1e-30, -3e38, 1e-40, -2e-35, torch.inf, 7e10, -torch.inf], dtype=torch.bfloat16)
    # Two in one unit, the first and last places of a panel, each of its quarters; and one output that is all zeros.
    places = [(0, 0), (0, 1), (0, -1), (31, 0), (31, -1), (20, 3), (32, 0), (40, 64), (63, 0)]
    for place, value in zip(places, rare, strict=True):
        weight[place] = value
    weight[50] = 0
    for gated in (False, True):
        coded, plain = coded_and_plain(monkeypatch, level, weight, gated=gated)
        assert coded.form is Form.CODED
        for num_rows in (1, 5, 13, 60, 121):
            x = random(num_rows, num_inputs, dtype=torch.bfloat16, seed=2)
            torch.testing.assert_close(coded(x), plain(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not LEVELS, reason="the C++ kernels were not built")
def test_a_weight_with_too_many_different_values_stays_plain(monkeypatch):
    bits = torch.randint(-(1 << 15), 1 << 15, (64, 64), generator=torch.Generator().manual_seed(0))
    coded, plain = coded_and_plain(monkeypatch, LEVELS[0], bits.to(torch.int16).view(torch.bfloat16))
    assert coded.form is Form.PLAIN
    x = random(3, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(coded(x), plain(x), rtol=0, atol=0, equal_nan=True)


def test_a_quantized_weight_is_off_by_at_most_half_a_step_and_zero_stays_zero():
    weight = random(5, 40, dtype=torch.float32)
    weight[3] = 0
    integers, scales = in_8_bits(weight)
    assert integers.dtype is torch.int8
    assert ((integers * scales[:, None] - weight).abs() <= scales[:, None] * 0.5001).all()
    assert (integers.abs().amax(1)[[0, 1, 2, 4]] == 127).all()
    assert not integers[3].any()


@pytest.mark.parametrize("level", LEVELS)
def test_values_that_are_not_finite_affect_only_their_row(level):
    layer = CpuKernels(level).linear(random(32, 64, dtype=torch.bfloat16), None)
    x = random(9, 64, dtype=torch.bfloat16, seed=1)
    expected = layer(x)
    others = [0, *range(2, 9)]
    for value in (torch.nan, torch.inf, -torch.inf):
        x[1, 5] = value
        for found in (layer(x), torch.cat([layer(x[:3]), layer(x[3:])])):
            assert not found[1].isfinite().any()
            assert found[others].equal(expected[others])
    x[1, 5] = torch.nan
    assert layer(x)[1].isnan().all()


@pytest.mark.skipif(not LEVELS, reason="the C++ kernels were not built")
def test_arguments_that_do_not_fit_are_refused_with_their_shapes():
    kernels = CpuKernels()
    weight = random(8, 6, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"bias float32 \[8\] does not fit weight bfloat16 \[8, 6\]"):
        kernels.linear(weight, torch.zeros(8))
    with pytest.raises(ValueError, match="in pairs"):
        kernels.linear(random(8, 5, dtype=torch.bfloat16), None)
    with pytest.raises(ValueError, match="gates by 16"):
        kernels.int8_linear(weight, None, gated=True)
    layer = kernels.linear(weight, None)
    for x in (
        random(2, 4, dtype=torch.bfloat16),
        random(2, 6, dtype=torch.float32),
        random(6, 2, dtype=torch.bfloat16).T,
    ):
        with pytest.raises(ValueError, match="side by side"):
            layer(x)


@pytest.mark.skipif(not LEVELS, reason="the C++ kernels were not built")
def test_the_outputs_of_a_gate_are_not_widened():
    with pytest.raises(ValueError, match="what a gate gives is not widened"):
        CpuKernels().linear(random(64, 6, dtype=torch.float32), None, widened=True, gated=True)


@pytest.mark.skipif(not LEVELS, reason="the C++ kernels were not built")
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_multiplies_only_what_cannot_be_packed(dtype):
    operations = choice.cpp(CpuKernels())
    assert type(operations.linear(random(8, 6, dtype=dtype), None)) is CpuLinear
    assert type(operations.linear(random(8, 5, dtype=dtype), None)) is PlainLinear
