"""How many blocks there are, and moving them."""

import pytest
import torch

from worker.cache_engine import (
    CacheEngine,
    CacheShape,
    available_memory,
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


def test_a_large_pool_is_zero_and_costs_nothing_until_it_is_written():
    def resident_pages():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    before = resident_pages()
    cache = CacheEngine(SHAPE, (8 << 30) // 256, 0, CPU)
    k_cache, v_cache = cache.layers[1]
    assert k_cache.shape == v_cache.shape == (1 << 25, 4, 1, 8)
    assert k_cache[12345].sum() == 0
    assert (resident_pages() - before) * 4096 < 64 << 20


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
