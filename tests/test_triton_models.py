"""Whole models and whole steps with the Triton kernels, against the same with their torch twins."""

import pytest
import torch
from triton_device import DEVICE, DOT_DTYPES, ON_GPU, everywhere, never_waits
from worker_fakes import GREEDY, Row, logprobs, step, tokens

from kernels import choice
from protos.columns import pack
from protos.sampling_pb2 import Sampling
from worker import cache_engine
from worker.cache_engine import CacheEngine, CacheShape
from worker.inputs import StepLimits, make_inputs, read_step
from worker.model_runner import ModelRunner
from worker.models.registry import ARCHITECTURES

BLOCK_SIZE, NUM_BLOCKS, VOCABULARY_SIZE = 8, 24, 97
LLAMA = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
GPT2 = {"vocab_size": VOCABULARY_SIZE, "n_positions": 128, "n_embd": 48, "n_layer": 2, "n_head": 3}
OPT = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral, window of 6": ("MistralForCausalLM", LLAMA | {"sliding_window": 6}),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"hidden_size": 40}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "opt": ("OPTForCausalLM", OPT),
}
# Relative to the largest logit. The kernels round where their twins do, but add in another order.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
LIMITS = StepLimits(
    vocabulary_size=VOCABULARY_SIZE,
    context_length=128,
    max_num_batched_tokens=256,
    block_size=BLOCK_SIZE,
    num_blocks=NUM_BLOCKS,
    num_cpu_blocks=0,
)
# Prompts of 19, 40 and 5 tokens in scattered blocks.
PROMPTS = [[(7 * n + 3) % 97 for n in range(19)], [(5 * n + 1) % 97 for n in range(40)], [9, 8, 7, 6, 5]]
TABLES = [range(0, 24, 3), range(1, 24, 3), range(2, 24, 3)]


def chunk(number, start, end):
    """Tokens of one of the prompts, as a row."""
    return Row(number, PROMPTS[number][start:end], TABLES[number], computed=start)


STEPS = {
    "prefill": step(chunk(0, 0, 18), chunk(2, 0, 4)),
    "a chunk beside decodes": step(chunk(0, 18, 19), chunk(1, 0, 23), chunk(2, 4, 5)),
    "a chunk": step(chunk(1, 23, 39)),
    "decodes": step(chunk(1, 39, 40), Row(0, [11], TABLES[0], 19), Row(2, [12], TABLES[2], 5)),
    "one decode": step(Row(2, [13], TABLES[2], 6)),
}


def make_model(name, operations, dtype, device):
    """A random model, the same whatever its operations, dtype and device."""
    architecture = ARCHITECTURES[MODELS[name][0]]
    config = MODELS[name][1] | {"architectures": [MODELS[name][0]]}
    model = architecture.model(
        architecture.numbers.from_json(config), operations=operations, dtype=dtype, device=device
    )
    generator = torch.Generator().manual_seed(0)
    for piece in model.pieces():
        for tensor_name, tensor in piece.tensors().items():
            drawn = torch.randn(tensor.shape, generator=generator)
            is_scale = tensor.ndim == 1 and tensor_name.endswith("weight")
            tensor.copy_(1 + 0.2 * drawn if is_scale else 0.2 * drawn if tensor.ndim == 1 else 0.3 * drawn)
        piece.pack()
    return model


def make_cache(model, operations, dtype, device):
    """Pools for it; their blocks hold NaN, unless the operations read behind the context."""
    numbers = model.config
    shape = CacheShape(numbers.num_layers, BLOCK_SIZE, numbers.num_kv_heads, numbers.head_dim, dtype)
    cache = CacheEngine(shape, NUM_BLOCKS, 4, device, operations)
    if not operations.reads_behind_context:
        for k_cache, v_cache in cache.layers:
            k_cache.fill_(torch.nan)
            v_cache.fill_(torch.nan)
    return cache


@everywhere
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.long] if name != "llama" and dtype != DOT_DTYPES[0] else [])
        for name in MODELS
        for dtype in DOT_DTYPES
    ],
)
def test_logits_are_the_twins_in(device, name, dtype):
    runs = []
    for operations in (choice.triton_kernels(), choice.torch_reference()):
        model = make_model(name, operations, dtype, device)
        runs.append((model, make_cache(model, operations, dtype, device)))
    for kind, request in STEPS.items():
        inputs, _ = make_inputs(read_step(request, LIMITS), BLOCK_SIZE, device)
        found, expected = (
            model.head(model(inputs.token_ids, inputs.positions, cache.layers, inputs.attention))
            for model, cache in runs
        )
        assert expected.abs().max() > 1, "logits that are all alike prove nothing"
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCES[dtype], f"{kind}: {error}"


SEEDED = Sampling(temperature=0.8, top_p=0.9, top_k=40, seed=5)
PENALIZED = Sampling(
    top_p=1, num_prompt_tokens=len(PROMPTS[2]), repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25
)


def make_runner(operations, device, name="llama", dtype=torch.float32):
    model = make_model(name, operations, dtype, device)
    cache = make_cache(model, operations, dtype, device)
    return ModelRunner(model, cache, max_num_batched_tokens=256, context_length=128, device=device)


def generate(runner):
    """A greedy, a seeded and a penalized sequence, in steps that swap, copy, prefill in chunks and decode."""
    tables = [list(table) for table in TABLES]
    found = []
    first = step(Row(0, PROMPTS[0], tables[0]), Row(2, PROMPTS[2], tables[2]), new={0: GREEDY, 1: SEEDED, 2: PENALIZED})
    first.new_requests[2].prompt_token_ids = pack(PROMPTS[2])
    found.append(runner.execute(first))
    tables[2][0], tables[0][1] = 23, 22
    moves = {"copy": [TABLES[2][0], 23], "swap_out": [TABLES[0][1], 2]}
    found.append(runner.execute(step(Row(1, PROMPTS[1][:17], tables[1]), samples=[], **moves)))
    rows = [Row(0, [-1], tables[0], 19), Row(1, PROMPTS[1][17:], tables[1], 17), Row(2, [-1], tables[2], 5)]
    found.append(runner.execute(step(*rows, swap_in=[2, 22])))
    for number in range(1, 6):
        rows = [Row(0, [-1], tables[0], 19 + number), Row(2, [-1], tables[2], 5 + number)]
        rows.insert(number % 3, Row(1, [-1], tables[1], 39 + number))
        found.append(runner.execute(step(*rows)))
    return [token for response in found for token in tokens(response)], [
        value for response in found for value in logprobs(response)
    ]


@everywhere
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.long), "gpt2"])
def test_whole_generations_equal_those_of_the_twins(device, name, monkeypatch):
    # Layer by layer, as in the pools on a GPU.
    monkeypatch.setattr(
        cache_engine, "_map", lambda shape, num_blocks: torch.zeros(shape.of_pool(num_blocks), dtype=shape.dtype)
    )
    found = generate(make_runner(choice.triton_kernels(), device, name))
    expected = generate(make_runner(choice.torch_reference(), device, name))
    assert found[0] == expected[0]
    assert len(set(found[0])) > 5, "a model that repeats itself proves nothing"
    assert found[1] == pytest.approx(expected[1], abs=1e-4)


@everywhere
def test_no_step_waits_for_the_device(device):
    """Except with penalties, which look at earlier tokens on the host."""
    runner = make_runner(choice.triton_kernels(), device)
    new = {0: GREEDY, 1: SEEDED, 2: Sampling(temperature=1, top_p=1, typical_p=0.8, num_top_logprobs=3)}
    prompts = step(chunk(0, 0, 19), chunk(1, 0, 40), chunk(2, 0, 5), new=new)
    decodes = [
        step(*(Row(number, [-1], TABLES[number], len(PROMPTS[number]) + n) for number in range(3))) for n in range(3)
    ]
    for request in (prompts, decodes[0]):
        runner.execute(request)  # compiles
    with never_waits(device):
        in_flight = [runner.launch(request) for request in decodes[1:]]
    assert all(len(tokens(each.result())) == 3 for each in in_flight)


@pytest.mark.skipif(ON_GPU, reason="only the interpreter shows what a kernel is launched with")
def test_no_batch_size_needs_a_compilation_of_its_own(monkeypatch):
    """Triton specialises for pointers that are multiples of 16; with an odd number of rows, one might not be."""
    from triton.runtime.interpreter import GridExecutor

    launch, launched = GridExecutor.__call__, []

    def check_and_launch(executor, *args, **kwargs):
        launched.append(executor.fn.__name__)
        pointers = [arg.data_ptr() % 16 for arg in args if isinstance(arg, torch.Tensor)]
        assert not any(pointers), f"{executor.fn.__name__}: {pointers}"
        return launch(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", check_and_launch)
    runner = make_runner(choice.triton_kernels(), DEVICE)
    runner.execute(step(*(chunk(n, 0, 5) for n in range(3)), new={0: SEEDED, 1: SEEDED, 2: GREEDY}))
    for num_rows in (1, 2, 3):
        runner.execute(step(*(Row(number, [-1], TABLES[number], 5) for number in range(num_rows))))
    assert {"_short_rows_kernel", "_rotate_and_cache_kernel", "_draws_kernel", "_bounds_kernel"} <= set(launched)


@everywhere
def test_the_torch_twins_wait_for_the_device(device):
    """Otherwise the test that no step waits could not fail."""
    runner = make_runner(choice.torch_reference(), device)
    runner.execute(step(chunk(2, 0, 5), new={2: SEEDED}))
    with pytest.raises((AssertionError, RuntimeError), match=r"waits|synchroniz"), never_waits(device):
        runner.launch(step(Row(2, [-1], TABLES[2], 5)))
