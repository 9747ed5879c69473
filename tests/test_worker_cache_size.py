"""How many blocks there are, and why; and what the profile run of a GPU counts, of memory that is none."""

import subprocess
import sys

import pytest
import torch
from real_worker import load_weights
from worker_fakes import tiny_checkpoint

from worker import loading
from worker.cache_engine import CacheShape
from worker.cache_size import (
    Profile,
    _left_in_container,
    available_memory,
    count_swap_blocks,
    most_memory,
    size_as_told,
    size_on_cpu,
    size_on_gpu,
)
from worker.checkpoint import ModelError
from worker.config import WorkerSettings
from worker.loading import load_worker
from worker.model_runner import ModelRunner
from worker.profile_run import CudaMemory, profile
from worker.ranks import WHOLE_HOST

# 2 (K and V) * 2 layers * 4 tokens * 1 head * 8 values * 2 bytes = 256 bytes a block.
SHAPE = CacheShape(num_layers=2, block_size=4, num_kv_heads=1, head_dim=8, dtype=torch.bfloat16)
# In float32, and with 2 heads as the tiny model has them: 1,024 bytes.
TINY_SHAPE = CacheShape(num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def settings(checkpoint, **changes):
    return WorkerSettings(**({"model": str(checkpoint), "device": "cpu", "num_threads": 1} | changes))


def test_blocks_as_told_go_before_bytes_as_told():
    assert SHAPE.block_bytes == 256
    assert size_as_told(SHAPE, 30, 100_000).num_blocks == 30
    assert size_as_told(SHAPE, None, 1023).num_blocks == 3
    assert size_as_told(SHAPE, None, 256).num_blocks == 1
    assert size_as_told(SHAPE, None, None) is None


def test_the_note_tells_blocks_tokens_dtype_size_and_reason():
    assert size_as_told(SHAPE, 6 << 20, None).note == (
        "6,291,456 blocks of 4 tokens (25,165,824) in bfloat16, 1.50 GiB: as told by --num-gpu-blocks"
    )
    assert size_as_told(SHAPE, None, 5 << 20).note.endswith("in bfloat16, 5 MiB: as told by --kv-cache-bytes")


@pytest.mark.parametrize(
    "told, complaint",
    [
        ((None, 255), "--kv-cache-bytes is 255, but a block of the KV cache takes 256 bytes"),
        ((5, None), "--num-gpu-blocks makes .* at most 4 blocks, or 1,024 bytes"),
        ((None, 1280), "--kv-cache-bytes makes .* at most 4 blocks, or 1,024 bytes"),
    ],
)
def test_a_size_that_can_not_be_had_is_refused_by_its_flag(told, complaint):
    with pytest.raises(ValueError, match=complaint):
        size_as_told(SHAPE, *told, room_bytes=1100)


@pytest.mark.parametrize(
    "context_length, checkpoint_bytes, room_bytes, num_blocks, reason",
    [
        (10, 5000, 1 << 40, 5000 // 256, "as large as the checkpoint"),
        (100, 5000, 1 << 40, 50, "room for 2 sequences of 100 tokens"),
        (100, 5000, 4096, 4, "a quarter of the 0.00391 MiB that are left"),
        (100, 5000, 1024, 1, "a quarter of the 0.000977 MiB that are left"),
    ],
)
def test_a_cache_on_a_cpu_is_as_large_as_the_checkpoint_within_reason(
    context_length, checkpoint_bytes, room_bytes, num_blocks, reason
):
    size = size_on_cpu(SHAPE, context_length, checkpoint_bytes, room_bytes)
    assert size.num_blocks == num_blocks
    assert size.note.endswith(reason)


@pytest.mark.parametrize("room_bytes", [1023, 0, -5])
def test_a_cpu_without_memory_for_a_block_is_refused_with_a_remedy(room_bytes):
    with pytest.raises(ValueError, match="--kv-cache-bytes"):
        size_on_cpu(SHAPE, 10, 5000, room_bytes)


def test_a_cache_on_a_gpu_gets_our_share_of_it_less_all_else():
    found = Profile(total_bytes=10_000, resident_bytes=5_000, step_bytes=800, graph_bytes=200)
    size = size_on_gpu(SHAPE, found, gpu_memory_utilization=0.9)
    assert size.num_blocks == 3000 // 256
    for word in ("90%", "of weights and others", "for a step", "for CUDA graphs"):
        assert word in size.note
    with pytest.raises(ValueError, match="raise --gpu-memory-utilization, or lower --max-num-batched-tokens"):
        size_on_gpu(SHAPE, found, gpu_memory_utilization=0.62)


class FakeMemory:
    """A GPU of a million bytes: weights and others take 300,000, steps 70,000, graphs 5,000."""

    total_bytes = 1_000_000

    def __init__(self, cache_bytes):
        self._taken = 300_000 + cache_bytes
        self.is_marked = False

    def record(self, record):
        self._taken += 5_000

    def taken_bytes(self):
        return self._taken

    def mark(self):
        self.is_marked = True

    def peak_bytes(self):
        return 70_000


@pytest.mark.parametrize("max_num_batched_tokens, longest", [(1000, 128), (100, 100)])
def test_the_profile_run_is_the_largest_prompt_and_the_most_samples(
    checkpoint, monkeypatch, max_num_batched_tokens, longest
):
    steps = []
    memory = FakeMemory(cache_bytes=-(-longest // 4) * TINY_SHAPE.block_bytes)

    def launch(runner, request, launch=ModelRunner.launch):
        assert memory.is_marked
        if request.token_ids:
            steps.append(
                (len(request.token_ids) // 4, len(request.sample_rows) // 4, bool(request.prompt_logprob_rows))
            )
        return launch(runner, request)

    monkeypatch.setattr(ModelRunner, "record_decodes", lambda runner, record: memory.record(record))
    monkeypatch.setattr(ModelRunner, "launch", launch)
    found = profile(
        load_weights(checkpoint),
        TINY_SHAPE,
        max_num_batched_tokens=max_num_batched_tokens,
        context_length=128,
        device=CPU,
        memory=memory,
        record=lambda run: run,
    )
    most_samples = min(256, max_num_batched_tokens)
    assert steps == [
        (max_num_batched_tokens // longest * longest, max_num_batched_tokens // longest, True),
        (max_num_batched_tokens // most_samples * most_samples, most_samples, False),
    ]
    # The cache of the profile run is not there any more when the real one is made.
    assert found == Profile(1_000_000, resident_bytes=300_000, step_bytes=70_000, graph_bytes=5_000)
    assert found.room_bytes == 625_000


def test_a_gpus_memory_is_what_the_driver_and_torchs_allocator_say(monkeypatch):
    calls = []
    said = {
        "mem_get_info": (300, 1000),
        "memory_allocated": 40,
        "max_memory_allocated": 140,
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
    }
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, n=name, v=value: calls.append(n) or v)
    memory = CudaMemory(torch.device("cuda"))
    assert (memory.total_bytes, memory.taken_bytes()) == (1000, 700)
    assert calls.index("empty_cache") < len(calls) - 1 - calls[::-1].index("mem_get_info")
    memory.mark()
    assert memory.peak_bytes() == 100
    assert "reset_peak_memory_stats" in calls


@pytest.mark.parametrize(
    "changes, num_blocks, complaint",
    [
        ({}, (1000_000 - 300_000 - 75_000 - 100_000) // 1024, None),
        ({"gpu_memory_utilization": 0.5}, (500_000 - 375_000) // 1024, None),
        ({"num_gpu_blocks": 600}, 600, None),
        ({"num_gpu_blocks": 611}, None, "--num-gpu-blocks makes .* at most 610 blocks"),
        ({"gpu_memory_utilization": 0.3}, None, "raise --gpu-memory-utilization"),
    ],
)
def test_a_gpus_blocks_are_what_the_profile_run_leaves_or_as_told_within_that(
    checkpoint, monkeypatch, changes, num_blocks, complaint
):
    found = Profile(1_000_000, resident_bytes=300_000, step_bytes=70_000, graph_bytes=5_000)
    monkeypatch.setattr(loading, "profile", lambda *arguments, **others: found)
    chosen = (settings(checkpoint, **changes), load_weights(checkpoint), TINY_SHAPE, 128, torch.device("cuda"))
    if complaint is None:
        assert loading._choose_cache_size(*chosen, checkpoint, WHOLE_HOST).num_blocks == num_blocks
    else:
        with pytest.raises(ModelError, match=complaint):
            loading._choose_cache_size(*chosen, checkpoint, WHOLE_HOST)


def test_a_step_that_a_gpu_can_not_hold_is_refused_by_its_flag(checkpoint, monkeypatch):
    def run_out(*arguments, **others):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading, "profile", run_out)
    with pytest.raises(ModelError, match="lower --max-num-batched-tokens"):
        loading._choose_cache_size(
            settings(checkpoint),
            load_weights(checkpoint),
            TINY_SHAPE,
            128,
            torch.device("cuda"),
            checkpoint,
            WHOLE_HOST,
        )


def test_memory_is_available_here():
    assert 1 << 20 < available_memory() < 1 << 50


def test_the_most_memory_is_what_is_available_and_all_free_swap_space(monkeypatch):
    monkeypatch.setattr("worker.cache_size._left_in_container", lambda _, otherwise: otherwise)
    tells = "MemTotal: 9 kB\nMemAvailable: 3 kB\nSwapTotal: 8 kB\nSwapFree: 4 kB\nHugePages_Total: 0\n"
    monkeypatch.setattr("worker.cache_size.Path.read_text", lambda _: tells)
    assert (available_memory(), most_memory()) == (3 << 10, 7 << 10)
    monkeypatch.setattr("worker.cache_size.Path.exists", lambda _: False)
    assert most_memory() is None


def test_a_container_leaves_what_its_limit_does_and_what_is_only_cached_files(tmp_path):
    def group(**files):
        for name, content in files.items():
            (tmp_path / f"memory.{name}").write_text(f"{content}\n")
        return _left_in_container(tmp_path, 7777)

    assert _left_in_container(tmp_path, 7777) == 7777
    assert group(max="max", current=600, stat="anon 300\nactive_file 100\ninactive_file 150") == 7777
    assert group(max=1000) == 1000 - 600 + 250
    assert group(max=300) == 0


@pytest.mark.parametrize(
    "swap_bytes, num_blocks, available_bytes, expected",
    [
        (1023, 2, 1 << 40, 3),
        (0, 1000, -1, 0),
        (None, 1000, 1 << 40, 1000),
        (None, 1 << 40, 1 << 40, (1 << 30) // 256),
        (None, 1000, 4096, 4),
        (None, 1000, -1, 0),
    ],
    ids=["as told", "none", "as the cache", "the cap", "a quarter of the memory", "no memory"],
)
def test_the_swap_pool_is_as_told_or_the_least_of_three_sizes(swap_bytes, num_blocks, available_bytes, expected):
    assert count_swap_blocks(SHAPE, swap_bytes, num_blocks, available_bytes) == expected


def test_a_swap_pool_larger_than_the_memory_is_refused_by_its_flag():
    with pytest.raises(ValueError, match=r"--swap-bytes is 1 MiB, but only 0\.5 MiB"):
        count_swap_blocks(SHAPE, 1 << 20, 2, 1 << 19)


def test_the_cache_may_be_of_another_dtype_than_the_weights(checkpoint):
    one = load_worker(settings(checkpoint, kv_cache_bytes=1 << 20)).info
    other = load_worker(settings(checkpoint, kv_cache_bytes=1 << 20, kv_cache_dtype="bfloat16")).info
    assert (one.dtype, one.kv_dtype, other.dtype, other.kv_dtype) == ("float32", "float32", "float32", "bfloat16")
    assert other.num_blocks == 2 * one.num_blocks
    assert "in bfloat16, 1 MiB" in other.kv_cache_note


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"num_gpu_blocks": 1 << 40}, "--num-gpu-blocks makes a KV cache of"),
        ({"kv_cache_bytes": 1 << 60}, "--kv-cache-bytes makes a KV cache of"),
        ({"num_gpu_blocks": 4, "swap_bytes": 1 << 60}, "--swap-bytes is"),
    ],
)
def test_a_pool_that_the_machine_can_not_hold_is_refused_by_its_flag(checkpoint, changes, complaint):
    with pytest.raises(ModelError, match=complaint):
        load_worker(settings(checkpoint, **changes))


def test_a_pool_that_the_system_does_not_map_is_refused_with_a_remedy(checkpoint, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("worker.cache_engine.mmap.mmap", refuse)
    with pytest.raises(ModelError, match=r"Cannot allocate memory; --kv-cache-bytes makes it smaller"):
        load_worker(settings(checkpoint))


def test_the_process_says_so_in_one_line(checkpoint):
    arguments = ["--model", str(checkpoint), "--device", "cpu", "--listen", "127.0.0.1:0"]
    ended = subprocess.run(
        [sys.executable, "-m", "worker", *arguments, "--num-gpu-blocks", "1000000000000"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 1
    assert "cannot load the model: --num-gpu-blocks makes a KV cache of" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_context_that_the_cache_does_not_hold_is_warned_of(checkpoint, caplog):
    load_worker(settings(checkpoint, num_gpu_blocks=3))
    assert "a sequence of 128 tokens does not fit into the KV cache: longer ones than 48" in caplog.text
