"""The pools of blocks, and moving them."""

import os
from itertools import pairwise

import numpy as np
import pytest
import torch

from kernels.choice import choose, torch_reference
from worker import cache_engine
from worker.cache_engine import CacheEngine, CacheShape

# 2 (K and V) * 2 layers * 4 tokens * 1 head * 8 values * 2 bytes = 256 bytes a block.
SHAPE = CacheShape(num_layers=2, block_size=4, num_kv_heads=1, head_dim=8, dtype=torch.bfloat16)
CPU = torch.device("cpu")
NONE = np.empty((0, 2), dtype=np.int32)


def pairs(*of):
    return np.array(of, dtype=np.int32)


def start(num_blocks, num_cpu_blocks, shape=SHAPE):
    return CacheEngine(shape, num_blocks, num_cpu_blocks, CPU, torch_reference())


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_large_pool_is_zero_and_costs_nothing_until_it_is_written():
    before = resident_bytes()
    cache = start((8 << 30) // 256, 0)
    k_cache, v_cache = cache.layers[1]
    assert k_cache.shape == v_cache.shape == (1 << 25, 4, 1, 8)
    assert k_cache[12345].sum() == 0
    assert resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("moves", [[pairs([0, 1500]), NONE], [NONE, pairs([0, 1500])]], ids=["out", "in"])
def test_a_block_costs_its_own_pages_of_a_large_pool(moves):
    deep = CacheShape(num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    cache = start(3000, 3000, deep)
    cache.layers[0][0][0] = 1
    cache.swap(pairs([0, 0]), NONE)
    before = resident_bytes()
    cache.swap(*moves)
    assert resident_bytes() - before < 8 << 20  # 368,640 bytes; in a piece for each layer they would take 120 MiB


def kernel_version():
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


@pytest.mark.skipif(not hasattr(os, "uname") or kernel_version() < (5, 14), reason="no madvise that populates")
def test_a_pool_that_is_populated_has_its_memory_and_keeps_what_stood_in_it():
    deep = CacheShape(num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    cache = start(200, 0, deep)
    cache.layers[7][1][3] = 1
    before, behind_pieces = resident_bytes(), []
    cache.populate(lambda: behind_pieces.append(resident_bytes()))
    assert resident_bytes() - before > 200 * deep.block_bytes - (8 << 20)
    assert max(behind - ahead for ahead, behind in pairwise([before, *behind_pieces])) < 8 << 20
    assert (cache.layers[7][1][3] == 1).all()
    assert not cache.layers[7][1][4].any()


def test_a_system_that_cannot_populate_is_asked_only_once(monkeypatch):
    monkeypatch.setattr(cache_engine, "_MADV_POPULATE_WRITE", 1 << 20)  # no such advice, as before Linux 5.14
    cache, pieces = start((8 << 20) // 256, 0), []
    cache.populate(lambda: pieces.append(None))
    assert not pieces
    assert not cache.layers[0][0].any()


def test_blocks_go_out_to_the_cpu_pool_and_come_back_to_other_places():
    cache = start(4, 2)
    for k_cache, v_cache in cache.layers:
        k_cache[3], v_cache[3] = 5, 7
    cache.swap(pairs([3, 1]), NONE)
    cache.clear(torch.tensor([3]))
    cache.swap(NONE, pairs([1, 0]))
    cache.copy(pairs([0, 2]))
    for k_cache, v_cache in cache.layers:
        assert k_cache[:, 0, 0, 0].tolist() == [5, 0, 5, 0]
        assert v_cache[:, 0, 0, 0].tolist() == [7, 0, 7, 0]


def random_bits(cache):
    """Fills the cache with any bits, those of NaNs among them; gives them as integers."""
    bits = torch.randint(-(1 << 15), 1 << 15, cache._cache.shape, dtype=torch.int16)
    cache._cache.copy_(bits.view(torch.bfloat16))
    return bits


def test_swapped_blocks_keep_every_bit():
    cache = start(7, 9)
    bits = random_bits(cache)
    there = pairs([6, 0], [0, 8], [3, 4], [2, 1])
    cache.swap(there, NONE)
    cache.clear(torch.arange(7))
    cache.swap(NONE, there[:, ::-1])
    found = cache._cache.view(torch.int16)
    assert torch.equal(found[:, :, [0, 2, 3, 6]], bits[:, :, [0, 2, 3, 6]])
    assert not found[:, :, [1, 4, 5]].any()


@pytest.mark.parametrize("num_blocks, num_cpu_blocks", [(1, 5), (300, 1), (300, 200)])
def test_the_cost_of_a_block_is_measured_and_leaves_both_pools_zero(num_blocks, num_cpu_blocks):
    cache = start(num_blocks, num_cpu_blocks)
    assert 0 < cache.measure_swap() < 100
    assert not cache._cache.any()
    assert not cache._cpu_cache.any()


def test_without_a_swap_pool_a_block_costs_nothing():
    assert start(4, 0).measure_swap() == 0


def test_moving_nothing_is_no_swap():
    assert start(4, 4).swap(NONE, NONE) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: pinned memory is not tested")
@pytest.mark.parametrize("is_chosen", [True, False], ids=["as chosen", "by torch"])
def test_on_a_gpu_the_swap_pool_is_pinned_and_keeps_every_bit(is_chosen):
    device = torch.device("cuda")
    operations = choose(device, SHAPE.dtype, head_dim=8, block_size=4) if is_chosen else torch_reference()
    cache = CacheEngine(SHAPE, 7, 9, device, operations)
    assert cache._cpu_cache.is_pinned()
    assert cache.measure_swap() > 0
    bits = random_bits(cache)
    cache.swap(pairs([6, 0], [2, 8]), pairs([8, 3], [0, 1]))
    cache.wait_for_swaps(np.array([3]))
    found = cache._cache.view(torch.int16).cpu()
    assert torch.equal(found[:, :, [3, 1]], bits[:, :, [2, 6]])
