"""What quantized weights cost in accuracy, on a text that ships with Python, and where they can be had."""

import math
from pydoc_data.topics import topics

import pytest

torch = pytest.importorskip("torch")
from tokenizers import Tokenizer  # noqa: E402
from worker_fakes import Row, step, tiny_checkpoint  # noqa: E402

from kernels import choice  # noqa: E402
from kernels.cpu import INTEGER_LEVELS, KernelsUnavailable, runnable_levels  # noqa: E402
from protos.columns import pack, unpack, unpack_floats  # noqa: E402
from protos.sampling_pb2 import Sampling  # noqa: E402
from worker.checkpoint import ModelError  # noqa: E402
from worker.config import WorkerSettings  # noqa: E402
from worker.loading import choose_quantization, load_worker  # noqa: E402

NUM_TOKENS = 512
try:
    INT4_IF_BUILT = ("int4",) if runnable_levels()[-1] in INTEGER_LEVELS else ()
except KernelsUnavailable:
    INT4_IF_BUILT = ()


def loaded(directory, **changes):
    settings = {"model": str(directory), "device": "cpu", "swap_bytes": 0, "max_num_batched_tokens": NUM_TOKENS}
    return load_worker(WorkerSettings(**settings | changes))


def told(runner, token_ids):
    """Of each token but the first: its log-probability, and which was the most probable one."""
    sampling = Sampling(temperature=0, top_p=1, num_prompt_tokens=len(token_ids), num_prompt_logprobs=1)
    request = step(Row(1, token_ids, range(-(-len(token_ids) // 16))), new={1: sampling})
    request.finished_request_ids = pack([1])
    request.new_requests[0].prompt_token_ids = pack(token_ids)
    request.prompt_logprob_rows = request.prompt_logprob_starts = pack([0])
    columns = runner.execute(request).prompt_logprobs
    return list(unpack_floats(columns.logprobs)), list(unpack(columns.top_token_ids))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.long
def test_quantized_weights_cost_2_percent_of_perplexity_at_most_and_few_of_the_best_tokens(model_dir):
    text = "\n".join(topics[name] for name in sorted(topics))
    token_ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text[:40_000]).ids
    passages = [token_ids[start : start + NUM_TOKENS] for start in range(0, 8 * NUM_TOKENS, NUM_TOKENS)]
    losses, best = {}, {}
    for quantization in ("none", "int8", *INT4_IF_BUILT):
        runner = loaded(model_dir, quantization=quantization).runner
        answers = [told(runner, passage) for passage in passages]
        logprobs = [value for values, _ in answers for value in values]
        losses[quantization] = -sum(logprobs) / len(logprobs)
        best[quantization] = [token_id for _, token_ids in answers for token_id in token_ids]
    for quantization in ("int8", *INT4_IF_BUILT):
        cost = math.exp(losses[quantization] - losses["none"]) - 1
        agreement = sum(map(int.__eq__, best["none"], best[quantization])) / len(best["none"])
        assert cost < 0.02, f"perplexity {math.exp(losses['none']):.2f} became {cost:+.2%} in {quantization}"
        assert agreement > 0.93


def test_the_worker_says_how_its_weights_are_kept(tmp_path):
    directory = tiny_checkpoint(tmp_path)
    assert loaded(directory, num_gpu_blocks=8).info.quantization == "none"
    worker = loaded(directory, num_gpu_blocks=8, quantization="int8")
    assert worker.info.quantization == "int8"
    assert worker.info.dtype == "float32"


@pytest.mark.skipif(not INT4_IF_BUILT, reason="this CPU has no products of 4 bits")
def test_a_worker_computes_with_weights_of_4_bits(tmp_path):
    directory = tiny_checkpoint(tmp_path, hidden_size=64, intermediate_size=128, num_attention_heads=8)
    worker = loaded(directory, num_gpu_blocks=8, dtype="bfloat16", quantization="int4")
    assert worker.info.quantization == "int4"
    assert len(told(worker.runner, list(range(5, 25)))[0]) == 19


def test_other_devices_than_cpus_refuse_them_with_the_flag(tmp_path):
    settings = WorkerSettings(model=str(tmp_path), quantization="int8")
    with pytest.raises(ModelError, match="--quantization int8 is for CPUs, not cuda"):
        choose_quantization(settings, torch.device("cuda"), torch.bfloat16)


def test_4_bits_are_refused_where_no_kernel_multiplies_them_with_what_is_to_be_done(tmp_path, monkeypatch):
    settings = WorkerSettings(model=str(tmp_path), quantization="int4")
    with pytest.raises(ModelError, match="int4 is for bfloat16, not float32: take int8, or --dtype bfloat16"):
        choose_quantization(settings, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(choice, "INTEGER_LEVELS", ())
    directory = tiny_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=r"int4 needs kernels for AVX2 or AVX-512 without AMX, not .*: take int8"):
        loaded(directory, num_gpu_blocks=8, dtype="bfloat16", quantization="int4")
