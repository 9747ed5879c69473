"""The Triton kernels that write and move the paged cache, against their torch twins. They must agree bit by bit."""

import pytest
import torch
from triton_device import everywhere

from kernels import reference
from kernels.copy_blocks import copy_blocks, swap_blocks
from kernels.reshape_and_cache import reshape_and_cache, rotate_and_cache

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def caches(device, dtype, num_kv_heads, head_dim, block_size=16, num_blocks=5):
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return [torch.randn(shape).to(device=device, dtype=dtype) for _ in range(2)]


def slots(num_tokens, device, num_slots=80):
    """Slots in random order after slot 0, every fourth one padding."""
    drawn = 1 + torch.randperm(num_slots - 1)[:num_tokens]
    drawn[:1], drawn[3::4] = 0, -1
    return drawn.to(device)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("num_tokens, num_kv_heads, head_dim", [(1, 1, 64), (7, 3, 80), (33, 8, 128), (0, 2, 64)])
def test_reshape_and_cache_equals_its_twin(device, dtype, cache_dtype, num_tokens, num_kv_heads, head_dim):
    fused = torch.randn(num_tokens, 2 * num_kv_heads + 1, head_dim).to(device=device, dtype=dtype)
    k, v = fused[:, 1 : num_kv_heads + 1], fused[:, num_kv_heads + 1 :]
    found = caches(device, cache_dtype, num_kv_heads, head_dim)
    expected = [cache.clone() for cache in found]
    mapping = slots(num_tokens, device)
    reshape_and_cache(k, v, *found, mapping)
    reference.reshape_and_cache(k, v, *expected, mapping)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize(
    "num_tokens, num_heads, num_kv_heads, head_dim",
    [(1, 3, 1, 64), (9, 4, 4, 80), (5, 9, 3, 64), (0, 2, 1, 96), (2, 1, 1, 2), (3, 24, 8, 16)],
)
def test_rotate_and_cache_equals_its_twin(device, dtype, cache_dtype, num_tokens, num_heads, num_kv_heads, head_dim):
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(device=device, dtype=dtype)
    cos, sin = (torch.randn(num_tokens, head_dim // 2).to(device=device, dtype=dtype) for _ in range(2))
    found = caches(device, cache_dtype, num_kv_heads, head_dim)
    expected, expected_heads = [cache.clone() for cache in found], heads.clone()
    mapping = slots(num_tokens, device)
    q = rotate_and_cache(heads, cos, sin, *found, mapping)
    expected_q = reference.rotate_and_cache(expected_heads, cos, sin, *expected, mapping)
    assert q.data_ptr() == heads.data_ptr()
    # A fused multiply-add rounds once less: one unit in the last place.
    for mine, theirs in ((q, expected_q), (heads, expected_heads), (found[0], expected[0])):
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(found[1], expected[1])


@everywhere
def test_the_cache_writes_refuse_arguments_that_do_not_fit(device):
    k_cache, v_cache = caches(device, torch.float32, 1, 4)
    k, mapping = torch.zeros(2, 1, 4, device=device), torch.tensor([0, 1], device=device)
    for arguments in (
        (k, k[:1], k_cache, v_cache, mapping),
        (k.double(), k.double(), k_cache, v_cache, mapping),
        (k, k, k_cache, v_cache, mapping.int()),
        (k, k, k_cache, v_cache, mapping[:1]),
        (k[..., :2], k[..., :2], k_cache, v_cache, mapping),
        (k.repeat(1, 1, 2)[..., ::2], k, k_cache, v_cache, mapping),
        (k, k, k_cache, v_cache.transpose(0, 1).contiguous().transpose(0, 1), mapping),
    ):
        with pytest.raises(ValueError):
            reshape_and_cache(*arguments)
    heads, turns, sparse = torch.zeros(2, 3, 4, device=device), torch.zeros(2, 2, device=device), k_cache[..., ::2]
    for arguments, complaint in (
        ((k, turns, turns, k_cache, v_cache, mapping), "no queries"),
        ((heads, turns[:1], turns[:1], k_cache, v_cache, mapping), "do not fit x"),
        ((heads[..., :2], turns[:, :1], turns[:, :1], k_cache, v_cache, mapping), "do not fit together"),
        ((heads[..., :2], turns[:, :1], turns[:, :1], sparse, sparse, mapping), "not dense"),
        ((heads, turns, turns, k_cache, v_cache.half(), mapping), "differ in dtype"),
        ((heads, turns, turns, k_cache, v_cache[1:], mapping), "differ in shape"),
        ((heads, turns, turns, k_cache, v_cache, mapping[:1]), "slot_mapping"),
    ):
        with pytest.raises(ValueError, match=complaint):
            rotate_and_cache(*arguments)


def pool(num_blocks, dtype=torch.float32, head_dim=3, num_layers=2, block_size=4):
    return torch.randn(num_layers, 2, num_blocks, block_size, 1, head_dim).to(dtype)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [3, 64, 5000])
@pytest.mark.parametrize("pairs", [[[0, 1], [1, 2], [3, 0]], [[3, 0], [3, 1], [4, 2]], [[2, 2]], [[0, 4], [4, 0]], []])
@pytest.mark.parametrize("pairs_on_device", [False, True])
def test_copy_blocks_equals_its_twin(device, dtype, head_dim, pairs, pairs_on_device):
    cache = pool(5, dtype, head_dim).to(device)
    expected = cache.clone()
    pairs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    reference.copy_blocks(expected, pairs)
    copy_blocks(cache, pairs.to(device) if pairs_on_device else pairs)
    assert torch.equal(cache, expected)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
def test_swap_blocks_equals_its_twin_in_both_directions(device, dtype):
    cache, swapped = pool(6, dtype, 100, 3), pool(4, dtype, 100, 3)
    expected_cache, expected_swapped = cache.clone(), swapped.clone()
    cache = cache.to(device)
    if device.type == "cuda":
        swapped = swapped.pin_memory()
    out, back = torch.tensor([[5, 0], [1, 3]]), torch.tensor([[3, 2], [0, 0]])
    swap_blocks(cache, swapped, out)
    swap_blocks(swapped, cache, back)
    reference.swap_blocks(expected_cache, expected_swapped, out)
    reference.swap_blocks(expected_swapped, expected_cache, back)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(cache.cpu(), expected_cache)
    assert torch.equal(swapped, expected_swapped)


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_need_not_be_a_multiple_of_eight_bytes(device, dtype):
    cache = pool(3, dtype, block_size=1).to(device)
    expected, pairs = cache.clone(), torch.tensor([[0, 2], [2, 1]])
    reference.copy_blocks(expected, pairs)
    copy_blocks(cache, pairs)
    assert torch.equal(cache, expected)


@everywhere
def test_more_is_swapped_than_programs_are_launched(device):
    cache, order = pool(50).to(device), torch.randperm(50)
    moved = torch.zeros_like(cache, device="cpu", pin_memory=device.type == "cuda")
    swap_blocks(cache, moved, torch.stack([order, torch.arange(50)]).T)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(moved, cache.cpu()[:, :, order])


@everywhere
def test_pools_without_layers_hold_nothing_to_move(device):
    cache = pool(2, num_layers=0).to(device)
    swap_blocks(cache, cache.clone(), torch.tensor([[0, 1]]))


@everywhere
def test_moving_blocks_refuses_pools_that_do_not_fit(device):
    cache = pool(2).to(device)
    scattered = cache.transpose(2, 3).contiguous().transpose(2, 3)
    for source, destination, pairs in (
        (cache, cache[:1], [[0, 1]]),
        (cache, cache.half(), [[0, 1]]),
        (cache, pool(2, head_dim=4).to(device), [[0, 1]]),
        (cache[0], cache[0], [[0, 1]]),
        (cache, cache, [0, 1]),
        (cache, cache, [[0, 1, 1]]),
        (cache, cache, [[False, True]]),
        (cache, scattered, [[0, 1]]),
        (scattered, cache, [[0, 1]]),
    ):
        with pytest.raises(ValueError):
            swap_blocks(source, destination, torch.tensor(pairs))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: pinned memory was not tried")
def test_swap_blocks_refuses_memory_that_the_gpu_cannot_reach():
    with pytest.raises(ValueError, match="not pinned"):
        swap_blocks(pool(2).cuda(), pool(2), torch.tensor([[0, 1]]))
