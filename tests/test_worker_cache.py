"""How many blocks there are, and moving them."""

import pytest
import torch

from worker.cache_engine import (
    CacheEngine,
    CacheShape,
    available_memory,
    count_swap_blocks,
    size_as_told,
    size_on_cpu,
    size_on_gpu,
)

# 2 (K and V) * 2 layers * 4 tokens * 1 head * 8 values * 2 bytes = 256 bytes a block.
SHAPE = CacheShape(num_layers=2, block_size=4, num_kv_heads=1, head_dim=8, dtype=torch.bfloat16)
CPU = torch.device("cpu")


def test_blocks_as_told_go_before_bytes_as_told():
    assert SHAPE.block_bytes == 256
    assert size_as_told(SHAPE, 30, 100_000).num_blocks == 30
    assert size_as_told(SHAPE, None, 1023).num_blocks == 3
    assert size_as_told(SHAPE, None, None) is None
    with pytest.raises(ValueError, match="no block of 256 bytes fits"):
        size_as_told(SHAPE, None, 255)


@pytest.mark.parametrize(
    "context_length, available_bytes, num_blocks, reason",
    [
        (10, 1 << 40, 64 * 3, "64 sequences of 10 tokens"),
        (1 << 30, 4096, 4, "a quarter of the 0.00 GiB available"),
        (1 << 30, 1 << 40, (4 << 30) // 256, "the default cap of 4.00 GiB"),
    ],
)
def test_on_a_cpu_the_least_of_three_sizes_is_taken_and_named(context_length, available_bytes, num_blocks, reason):
    size = size_on_cpu(SHAPE, context_length, available_bytes)
    assert size.num_blocks == num_blocks
    assert size.note.endswith(reason)


def test_on_a_gpu_the_cache_gets_our_share_less_the_peak():
    size = size_on_gpu(SHAPE, total_bytes=10_000, peak_bytes=6_000, gpu_memory_utilization=0.9)
    assert size.num_blocks == 3000 // 256
    with pytest.raises(ValueError):
        size_on_gpu(SHAPE, total_bytes=10_000, peak_bytes=9_000, gpu_memory_utilization=0.9)


def test_memory_is_available_here():
    assert 1 << 20 < available_memory() < 1 << 50


@pytest.mark.parametrize(
    "swap_bytes, num_blocks, available_bytes, expected",
    [
        (1023, 2, 1 << 40, 3),
        (0, 1000, 1 << 40, 0),
        (None, 1000, 1 << 40, 1000),
        (None, 1 << 40, 1 << 40, (1 << 30) // 256),
        (None, 1000, 4096, 4),
        (None, 1000, -1, 0),
    ],
    ids=["as told", "none", "as the cache", "the cap", "a quarter of the memory", "no memory"],
)
def test_the_swap_pool_is_as_told_or_the_least_of_three_sizes(swap_bytes, num_blocks, available_bytes, expected):
    assert count_swap_blocks(SHAPE, swap_bytes, num_blocks, available_bytes) == expected


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_large_pool_is_zero_and_costs_nothing_until_it_is_written():
    before = resident_bytes()
    cache = CacheEngine(SHAPE, (8 << 30) // 256, 0, CPU)
    k_cache, v_cache = cache.layers[1]
    assert k_cache.shape == v_cache.shape == (1 << 25, 4, 1, 8)
    assert k_cache[12345].sum() == 0
    assert resident_bytes() - before < 64 << 20


def test_a_block_that_is_swapped_out_costs_its_own_pages_of_a_large_pool():
    deep = CacheShape(num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    cache = CacheEngine(deep, 2, 3000, CPU)
    cache.swap_out(torch.tensor([[0, 0]]))
    before = resident_bytes()
    cache.swap_out(torch.tensor([[1, 1500]]))
    assert resident_bytes() - before < 8 << 20  # 368,640 bytes in 60 pieces; huge pages would be 120 MiB


def test_blocks_go_out_to_the_cpu_pool_and_come_back_to_other_places():
    cache = CacheEngine(SHAPE, 4, 2, CPU)
    for k_cache, v_cache in cache.layers:
        k_cache[3], v_cache[3] = 5, 7
    cache.swap_out(torch.tensor([[3, 1]]))
    cache.clear(torch.tensor([3]))
    cache.swap_in(torch.tensor([[1, 0]]))
    cache.copy(torch.tensor([[0, 2]]))
    for k_cache, v_cache in cache.layers:
        assert k_cache[:, 0, 0, 0].tolist() == [5, 0, 5, 0]
        assert v_cache[:, 0, 0, 0].tolist() == [7, 0, 7, 0]


def random_bits(cache):
    """Fills the cache with any bits, those of NaNs among them; gives them as integers."""
    bits = torch.randint(-(1 << 15), 1 << 15, cache._cache.shape, dtype=torch.int16)
    cache._cache.copy_(bits.view(torch.bfloat16))
    return bits


def test_swapped_blocks_keep_every_bit():
    cache = CacheEngine(SHAPE, 7, 9, CPU)
    bits = random_bits(cache)
    there = torch.stack([torch.tensor([6, 0, 3, 2]), torch.tensor([0, 8, 4, 1])], dim=1)
    cache.swap_out(there)
    cache.clear(torch.arange(7))
    cache.swap_in(there.flip(1))
    found = cache._cache.view(torch.int16)
    assert torch.equal(found[:, :, [0, 2, 3, 6]], bits[:, :, [0, 2, 3, 6]])
    assert not found[:, :, [1, 4, 5]].any()


@pytest.mark.parametrize("num_blocks, num_cpu_blocks", [(1, 5), (300, 1), (300, 200)])
def test_the_cost_of_a_block_is_measured_and_leaves_both_pools_zero(num_blocks, num_cpu_blocks):
    cache = CacheEngine(SHAPE, num_blocks, num_cpu_blocks, CPU)
    assert 0 < cache.measure_swap() < 100
    assert not cache._cache.any()
    assert not cache._cpu_cache.any()


def test_without_a_swap_pool_a_block_costs_nothing():
    assert CacheEngine(SHAPE, 4, 0, CPU).measure_swap() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: pinned memory is not tested")
def test_on_a_gpu_the_swap_pool_is_pinned_and_keeps_every_bit():
    cache = CacheEngine(SHAPE, 7, 9, torch.device("cuda"))
    assert cache._cpu_cache.is_pinned()
    assert cache.measure_swap() > 0
    bits = random_bits(cache)
    cache.swap_out(torch.tensor([[6, 0], [2, 8]]))
    cache.swap_in(torch.tensor([[8, 3], [0, 1]]))
    found = cache._cache.view(torch.int16).cpu()
    assert torch.equal(found[:, :, [3, 1]], bits[:, :, [2, 6]])
