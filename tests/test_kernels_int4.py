"""Weights of 4 bits: how they are rounded, their products in C++ against the twin, and which layers have them."""

import pytest

torch = pytest.importorskip("torch")
from kernels import reference  # noqa: E402
from kernels.choice import cpp, torch_reference, with_int4_weights  # noqa: E402
from kernels.cpu import INTEGER_LEVELS, CpuKernels, KernelsUnavailable, runnable_levels  # noqa: E402
from kernels.cpu_linear import Form  # noqa: E402
from kernels.quantization import Int4, in_8_bits  # noqa: E402
from kernels.reference import QuantizedLinear, int4_linear, int8_linear  # noqa: E402

try:
    LEVELS = [level for level in runnable_levels() if level in INTEGER_LEVELS]
except KernelsUnavailable:
    LEVELS = []
BFLOAT16 = torch.bfloat16


def random(*shape, dtype=BFLOAT16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Around zero, on one side of it, far from it, of very different sizes in one output, and constant.
WEIGHTS = {
    "around zero": random(33, 640),
    "positive": random(33, 640).abs(),
    "negative": -random(33, 640).abs() - 1,
    "far from zero": random(33, 640) / 64 + 3,
    "of many sizes": random(33, 640) * torch.logspace(-6, 2, 20).repeat_interleave(32),
    "two values": random(33, 640).sign(),
    "constant": torch.full((33, 640), -0.7),
    "zero": torch.zeros(33, 640),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_value_is_off_by_half_a_step_and_what_rounding_its_step_costs(kind):
    weight = WEIGHTS[kind].to(BFLOAT16).float()
    rounded = Int4.of(weight)
    steps = rounded.steps.repeat_interleave(32, 1) * rounded.scales[:, None]
    of_rounding = 8 * rounded.scales[:, None]  # 15 steps of which each is off by half a unit
    assert ((rounded.values() - weight).abs() <= 0.501 * steps + of_rounding).all()
    assert rounded.codes.max() <= 15
    assert rounded.steps.min() >= 1


def test_values_that_are_on_such_a_grid_already_stay_as_they_are():
    codes = torch.randint(0, 16, (5, 128), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    codes.view(5, 4, 32)[:, :, :2] = torch.tensor([0, 15], dtype=torch.uint8)
    steps = torch.tensor([[127, 1, 64, 9]] * 5, dtype=torch.int8)
    bases = torch.tensor([[-119, 0, 5, -9]] * 5, dtype=torch.int8)
    weight = Int4(codes, steps, bases, torch.tensor([1.0, 0.5, 0.25, 2.0, 4.0])).values()
    assert Int4.of(weight).values().equal(weight)


def test_a_base_lies_below_the_least_value_of_its_group_and_not_just_near_it():
    codes = torch.tensor([[*range(16)] * 2 + [7, 15] * 16], dtype=torch.uint8)
    steps, bases = torch.tensor([[127, 1]], dtype=torch.int8), torch.tensor([[-119, 0]], dtype=torch.int8)
    weight = Int4(codes, steps, bases, torch.ones(1)).values()
    assert Int4.of(weight).values().equal(weight)


def test_a_groups_integers_are_small_enough_in_the_mean_for_ten_groups_sums_however_small_those_of_others_are():
    weight = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], 1)
    rounded = Int4.of(weight)
    integers = (rounded.values() / rounded.scales[:, None]).view(2, 32)
    assert integers.abs().mean(1).max() < 819


def test_an_output_of_zeros_and_one_of_millions_of_inputs_are_rounded_to_8_bits():
    weight = torch.zeros(2, (1 << 21) + 32)
    weight[1, ::2] = 127.0
    integers, scales = in_8_bits(weight)
    assert scales.tolist() == [1.0, 1.0]
    assert torch.equal(integers.float(), weight)
    assert torch.equal(Int4.of(weight[:1]).values(), weight[:1])


def test_the_inputs_of_a_weight_come_in_groups():
    with pytest.raises(ValueError, match=r"weight float32 \[8, 40\] has no groups of 32 inputs"):
        int4_linear(torch.zeros(8, 40), None)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("outputs_and_inputs", [(1, 64), (32, 192), (33, 576), (70, 1536)])
def test_a_product_in_cpp_equals_its_twin_and_has_the_same_bits_in_any_batch(level, outputs_and_inputs):
    num_outputs, num_inputs = outputs_and_inputs
    weight, bias = random(num_outputs, num_inputs), random(num_outputs, seed=1)
    layer = CpuKernels(level).int4_linear(weight, bias, widened=True)
    assert layer.form is Form.INT4
    x = random(267, num_inputs, seed=2)
    together = layer(x)
    expected = int4_linear(weight, bias, widened=True)(x)
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=7e-4 * num_inputs**0.5)
    parts = x.split([1, 2, 3, 4, 5, 6, 11, 12, 13, 32, 178])
    assert torch.cat([layer(part) for part in parts]).equal(together)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_no_sum_is_too_large_for_its_integers(level, kind, num_rows):
    weight = WEIGHTS[kind].to(BFLOAT16)
    layer, twin = CpuKernels(level).int4_linear(weight, None, widened=True), int4_linear(weight, None, widened=True)
    for signs in (torch.ones(640), weight[0].float().sign()):
        x = signs.expand(num_rows, -1).to(BFLOAT16)
        size = int4_linear(weight.abs(), None, widened=True)(x.abs())
        assert ((layer(x) - twin(x)).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_gated_product_equals_its_twin(level):
    weight, bias = random(96, 128) / 8, random(96, seed=1)
    layer, twin = CpuKernels(level).int4_linear(weight, bias, gated=True), int4_linear(weight, bias, gated=True)
    for num_rows in (1, 5, 29, 267):
        x = random(num_rows, 128, seed=2)
        torch.testing.assert_close(layer(x), twin(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("level", LEVELS)
def test_the_head_and_weights_without_such_products_keep_8_bits(level):
    operations = with_int4_weights(cpp(CpuKernels(level)))
    assert operations.name == f"cpu: C++ {level}, int4 weights"
    weight = random(32, 192)
    assert operations.linear(weight, None).form is Form.INT4
    assert operations.linear(weight, None, gated=True).form is Form.INT4
    assert operations.linear(weight, None, widened=True).form is Form.INT8
    assert operations.linear(weight[:, :96], None).form is Form.INT8
    # Gates that fill no panel, and another dtype: the twin computes them.
    for layer in (operations.linear(weight[:24], None, gated=True), operations.linear(weight.float(), None)):
        assert isinstance(layer, QuantizedLinear)


def test_by_torch_the_head_keeps_8_bits_too():
    operations = with_int4_weights(torch_reference())
    weight, x = random(32, 192), random(3, 192, seed=1)
    assert operations.linear(weight, None)(x).equal(int4_linear(weight, None)(x))
    assert operations.linear(weight, None, widened=True)(x).equal(int8_linear(weight, None, widened=True)(x))


@pytest.mark.skipif(not LEVELS, reason="the C++ kernels were not built")
def test_levels_without_products_of_integers_do_without():
    assert cpp(CpuKernels("portable")).int4_linear is None
    assert CpuKernels("portable").int4_linear(random(32, 192), None) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["int4_linear", "int8_linear"])
@pytest.mark.parametrize("level", ["twin", *LEVELS])
def test_an_output_with_a_weight_that_is_not_finite_is_not_either(level, name, value):
    weight = random(3, 64)
    weight[1, 5] = value
    layer = getattr(reference if level == "twin" else CpuKernels(level), name)(weight, None, widened=True)
    for num_rows in (1, 13):
        found = layer(random(num_rows, 64, seed=1))
        assert not found[:, 1].isfinite().any()
        assert found[:, [0, 2]].isfinite().all()
