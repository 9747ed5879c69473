"""The kernels under a whole model: which ones a worker takes, and that they all say the same."""

import pytest
import torch
from real_worker import start_runner
from worker_fakes import GREEDY, Row, logprobs, step, tiny_checkpoint, tokens

from kernels import build, choice, cpu
from worker.checkpoint import read_config
from worker.loading import load_model

CPU = torch.device("cpu")
PROMPT = [5, 17, 3, 88, 42, 9, 61, 2, 30, 11, 7]
SHAPE = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "head_dim": 16}
LEVELS = cpu.runnable_levels() if build.LIBRARY.exists() else []


def answers(directory, dtype, operations, monkeypatch):
    """Tokens and log-probabilities of a prompt in two chunks and twelve decodes."""
    if operations is not None:
        monkeypatch.setattr("worker.models.registry.choose", lambda *args, **sizes: operations)
    model = load_model(directory, read_config(directory), dtype, CPU, block_size=4)
    runner = start_runner(model, num_blocks=16, block_size=4).runner
    runner.execute(step(Row(1, PROMPT[:6], range(6)), new={1: GREEDY}, samples=[]))
    found = [runner.execute(step(Row(1, PROMPT[6:], range(6), computed=6)))]
    found += [runner.execute(step(Row(1, [-1], range(6), computed=11 + number))) for number in range(12)]
    return [token for response in found for token in tokens(response)], [logprobs(response)[0] for response in found]


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_says_what_the_reference_says(tmp_path, monkeypatch, level):
    directory = tiny_checkpoint(tmp_path, **SHAPE)
    expected = answers(directory, torch.float32, choice.torch_reference(), monkeypatch)
    found = answers(directory, torch.float32, choice.cpp(cpu.CpuKernels(level)), monkeypatch)
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_the_first_answer_in_bfloat16_is_as_probable_as_the_references(tmp_path, monkeypatch, level):
    directory = tiny_checkpoint(tmp_path, **SHAPE)
    expected = answers(directory, torch.bfloat16, choice.torch_reference(), monkeypatch)
    found = answers(directory, torch.bfloat16, choice.cpp(cpu.CpuKernels(level)), monkeypatch)
    assert found[1][0] == pytest.approx(expected[1][0], abs=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_worker_takes_the_best_kernels_there_are(tmp_path, dtype):
    directory = tiny_checkpoint(tmp_path, **SHAPE)
    operations = load_model(directory, read_config(directory), dtype, CPU).operations
    assert operations.name == (f"cpu: C++ {LEVELS[-1]}" if LEVELS else "reference")
    assert bool(operations.note) == (not LEVELS)


@pytest.mark.skipif(not LEVELS, reason="the C++ kernels are not built")
@pytest.mark.parametrize("sizes", [{"head_dim": 15, "block_size": 16}, {"head_dim": 16, "block_size": 15}])
def test_a_cache_in_bfloat16_that_is_not_all_pairs_is_left_to_torch(sizes):
    assert "in pairs" in choice.choose(CPU, torch.bfloat16, **sizes).note
    assert choice.choose(CPU, torch.float32, **sizes).note == ""


def test_where_the_kernels_cannot_be_used_torch_computes_and_the_note_says_why(monkeypatch):
    def refuse():
        raise cpu.KernelsUnavailable("the library is older than its sources")

    monkeypatch.setattr(choice, "CpuKernels", refuse)
    operations = choice.choose(CPU, torch.float32, head_dim=16, block_size=16)
    assert (operations.name, operations.note) == ("reference", "the library is older than its sources")


def test_pages_that_hold_anything_do_not_disturb_the_c_kernels(tmp_path):
    """The runner zeroes blocks that are entered for the reference's sake; the C++ kernels need nothing of the kind."""
    directory = tiny_checkpoint(tmp_path, **SHAPE)
    model = load_model(directory, read_config(directory), torch.float32, CPU, block_size=4)
    if not model.operations.name.startswith("cpu"):
        pytest.skip("the C++ kernels are not built: no compiler when this was installed")
    runner = start_runner(model, num_blocks=16, block_size=4).runner
    expected = runner.execute(step(Row(1, PROMPT, range(3)), new={1: GREEDY}))
    runner._cache._cache.fill_(torch.nan)
    runner._cache.clear = lambda blocks: None
    found = runner.execute(step(Row(2, PROMPT, range(3)), new={2: GREEDY}))
    assert (tokens(found), logprobs(found)) == (tokens(expected), logprobs(expected))
