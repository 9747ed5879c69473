"""Norm, rotary embedding and activations in Triton against their torch twins, which they follow in rounding too."""

import pytest
import torch
from triton_device import everywhere

from kernels import reference
from kernels.activation import gelu, gelu_and_mul, silu_and_mul
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary_embedding import rotary_embedding

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One unit in the last place: a sum in another order, or another approximation, may be rounded the other way.
ULP = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def numbers(*shape, device, dtype):
    return torch.randn(shape).to(device=device, dtype=dtype)


def assert_rounds_alike(found, expected, num_roundings=1):
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=num_roundings * 1.1 * ULP[found.dtype], atol=3e-6)
    if found.dtype != torch.float32 and found.numel() > 100:
        assert (found == expected).float().mean() > 0.95, "many values are off by a unit in the last place"


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 6), (5, 576), (3, 4096), (2, 3, 80), (0, 64), (2, 0), (80,)])
def test_rms_norm_equals_its_twin(device, dtype, shape):
    x, weight = numbers(*shape, device=device, dtype=dtype), numbers(shape[-1], device=device, dtype=dtype)
    before = x.clone()
    assert_rounds_alike(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [6, 576, 4096])
def test_add_rms_norm_equals_its_twin(device, dtype, size):
    x, residual = (numbers(5, size, device=device, dtype=dtype) for _ in range(2))
    weight, expected_residual = numbers(size, device=device, dtype=dtype), residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    assert_rounds_alike(add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)


@everywhere
def test_rms_norm_takes_the_rows_of_a_wider_matrix(device):
    wide, weight = torch.randn(4, 40, device=device), torch.randn(16, device=device)
    torch.testing.assert_close(rms_norm(wide[:, 8:24], weight, 1e-5), reference.rms_norm(wide[:, 8:24], weight, 1e-5))
    x, residual = wide[:, 8:24], torch.randn(4, 20, device=device)[:, :16]
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    torch.testing.assert_close(add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens, num_heads, head_dim", [(1, 1, 2), (7, 3, 80), (5, 8, 128), (0, 1, 4)])
def test_rotary_embedding_equals_its_twin(device, dtype, num_tokens, num_heads, head_dim):
    fused = numbers(num_tokens, num_heads + 2, head_dim, device=device, dtype=dtype)
    angles = torch.randn(num_tokens, head_dim // 2)
    cos, sin = (turn.to(device=device, dtype=dtype) for turn in (angles.cos(), angles.sin()))
    expected = fused.clone()
    rotary_embedding(fused[:, :num_heads], cos, sin)
    reference.rotary_embedding(expected[:, :num_heads], cos, sin)
    assert_rounds_alike(fused, expected)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens, size", [(1, 1), (3, 1536), (2, 1025), (0, 8)])
def test_activations_equal_their_twins(device, dtype, num_tokens, size):
    x = 1.5 * numbers(num_tokens, 2 * size, device=device, dtype=dtype)
    assert_rounds_alike(silu_and_mul(x), reference.silu_and_mul(x), 2)
    for approximate in ("none", "tanh"):
        assert_rounds_alike(gelu(x[:, 1:], approximate), reference.gelu(x[:, 1:], approximate))
        assert_rounds_alike(gelu_and_mul(x, approximate), reference.gelu_and_mul(x, approximate), 2)


@everywhere
def test_layers_refuse_arguments_that_do_not_fit(device):
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    turns = torch.zeros(2, 4, device=device)
    for call in (
        lambda: rms_norm(x, weight[:7], 1e-5),
        lambda: rms_norm(x, weight.double(), 1e-5),
        lambda: rms_norm(x, weight.to("meta"), 1e-5),
        lambda: rms_norm(x.T.contiguous().T, weight, 1e-5),
        lambda: rms_norm(x.expand(3, 2, 8), weight, 1e-5),
        lambda: rms_norm(x[:, :1].expand(2, 65537).contiguous(), x.new_zeros(65537), 1e-5),
        lambda: add_rms_norm(x, x[:1], weight, 1e-5),
        lambda: add_rms_norm(x, x.half(), weight, 1e-5),
        lambda: add_rms_norm(x.new_zeros(2, 2, 8), x.expand(2, 2, 8), weight, 1e-5),
        lambda: add_rms_norm(x.expand(2, 2, 8), x.new_zeros(2, 2, 8), weight, 1e-5),
        lambda: silu_and_mul(x[:, :7]),
        lambda: silu_and_mul(x.double()),
        lambda: gelu(x, "sigmoid"),
        lambda: gelu(x[None]),
        lambda: rotary_embedding(x[:, None], turns[:1], turns[:1]),
        lambda: rotary_embedding(x[:, None], turns.half(), turns.half()),
        lambda: rotary_embedding(x[:, None], turns, turns[:1]),
        lambda: rotary_embedding(x[:, None], turns, x[:, :4]),
        lambda: rotary_embedding(x[:, None, :7], turns[:, :3], turns[:, :3]),
        lambda: rotary_embedding(x, turns, turns),
    ):
        with pytest.raises(ValueError):
            call()
