"""Layers that no other file tests: stacked products, and the head."""

import pytest

torch = pytest.importorskip("torch")
from kernels.choice import choose, torch_reference  # noqa: E402
from kernels.cpu_linear import CpuLinear  # noqa: E402
from worker.layers.embedding import Embedding, Head  # noqa: E402
from worker.layers.linear import Linear  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_rows", [1, 17, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_stacked_projections_stand_side_by_side_whoever_multiplies(num_rows, bias):
    torch.manual_seed(0)
    dtype = torch.bfloat16
    parts = {"a.weight": (32, 64), "a.bias": (32,), "b.weight": (16, 64), "b.bias": (16,)}
    tensors = {name: torch.randn(*shape).to(dtype) for name, shape in parts.items()}
    x = torch.randn(num_rows, 64).to(dtype)
    for operations in (torch_reference(), choose(CPU, dtype, head_dim=64, block_size=16)):
        layer = Linear(64, {"a": 32, "b": 16}, bias=bias, dtype=dtype, device=CPU)
        for name, tensor in layer.checkpoint_tensors("").items():
            tensor.copy_(tensors[name])
        layer.pack(operations)
        expected = [x.float() @ tensors[f"{name}.weight"].float().T for name in "ab"]
        if bias:
            expected = [y + tensors[f"{name}.bias"].float() for y, name in zip(expected, "ab", strict=True)]
        torch.testing.assert_close(layer(x).float(), torch.cat(expected, -1), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_head_gives_logits_in_float32_and_leaves_the_embedding_it_is_tied_to(dtype):
    torch.manual_seed(0)
    embedding = Embedding(50, 24, dtype=dtype, device=CPU)
    embedding.weight.normal_()
    vectors = embedding.weight.clone()
    head = Head(24, 50, dtype=dtype, device=CPU)
    head.tie(embedding)
    head.pack(choose(CPU, dtype, head_dim=64, block_size=16))
    x = torch.randn(3, 24).to(dtype)
    logits = head(x)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, x.float() @ vectors.float().T, rtol=1e-2, atol=5e-2)
    assert embedding.weight.equal(vectors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_a_step_take_no_memory_that_those_before_did_not(dtype):
    head = Head(24, 50, dtype=dtype, device=CPU)
    torch.nn.init.normal_(head.weight)
    head.pack(choose(CPU, dtype, head_dim=64, block_size=16))
    if not isinstance(head.packed, CpuLinear):
        pytest.skip("the C++ kernels were not built")
    x = torch.randn(9, 24).to(dtype)
    expected = head(x).clone()
    place = head(x).data_ptr()
    for num_samples in (1, 9, 4, 16):
        logits = head(torch.cat([x, x])[:num_samples])
        assert logits.data_ptr() == place
        assert logits.equal(torch.cat([expected, expected])[:num_samples])
    assert head(torch.cat([x, x])).equal(torch.cat([expected, expected])), "more than there was room for"


def test_a_layer_that_is_not_packed_further_can_be_filled_anew():
    """So can a recorded graph's weights, which stay where they are."""
    layer = Linear(4, {"a": 3}, bias=False, dtype=torch.float32, device=CPU)
    layer.pack(torch_reference())
    layer.checkpoint_tensors("")["a.weight"].fill_(2.0)
    assert layer(torch.ones(1, 4)).tolist() == [[8.0] * 3]
