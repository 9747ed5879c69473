"""Layers that no other file tests: packed linear products."""

import pytest

torch = pytest.importorskip("torch")
from worker.layers.linear import Linear, padded_rows  # noqa: E402


@pytest.mark.parametrize(("num_rows", "padded"), [(1, 1), (15, 15), (16, 16), (17, 18), (33, 36), (65, 72), (512, 512)])
def test_rows_are_rounded_up_to_eight_sizes_an_octave(num_rows, padded):
    assert padded_rows(num_rows) == padded


def test_rounding_adds_an_eighth_at_most_and_knows_few_sizes():
    sizes = {padded_rows(num_rows) for num_rows in range(1, 2049)}
    assert all(n <= padded_rows(n) <= n * 9 / 8 for n in range(1, 2049))
    assert len(sizes) <= 72


@pytest.mark.parametrize("num_rows", [1, 17, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_product_is_the_plain_one(num_rows, bias):
    torch.manual_seed(0)
    layer = Linear(64, {"a": 32, "b": 16}, bias=bias, dtype=torch.bfloat16, device=torch.device("cpu"))
    layer.weight.normal_()
    if layer.bias is not None:
        layer.bias.normal_()
    x = torch.randn(num_rows, 64).bfloat16()
    plain = layer(x)
    layer.pack()
    packed = layer(x)
    assert packed.shape == plain.shape
    torch.testing.assert_close(packed, plain, rtol=2e-2, atol=2e-2)
