"""Tiny random models of transformers, and whole generations of them by their own forward and by our runner."""

from collections.abc import Sequence
from pathlib import Path

import torch
from worker_fakes import GREEDY, Row, logprobs, step, tokens

from worker.model_runner import ModelRunner

VOCABULARY_SIZE = 97
PROMPTS = (
    [5, 17, 3, 88, 42, 9, 61, 2, 30, 11, 7, 5, 96, 13, 54, 8, 23],
    [44],
    [9, 8, 7, 6, 5, 4, 3],
    [int(37 * n % 97) for n in range(29)],
)
NUM_TOKENS = 7

Generation = list[tuple[int, float]]


def tiny_model(config, *, spread=0.5):
    """A random model of transformers in float32, its norms and biases random too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = any(word in name for word in ("norm", "ln_")) and name.endswith("weight")
            if is_norm:
                parameter += 0.2 * torch.randn_like(parameter)
            else:
                torch.nn.init.normal_(parameter, 0.0, 0.2 if parameter.ndim == 1 else spread)
    return model


def save(model, directory: Path, *, max_shard_size: str = "1GB") -> Path:
    """The directory, with the model saved into it."""
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


@torch.inference_mode()
def theirs(model, prompts: Sequence[list[int]] = PROMPTS, num_tokens: int = NUM_TOKENS) -> list[Generation]:
    """Greedy tokens with their log-probabilities, each from one forward over everything before it, without a cache."""
    generations = []
    for prompt in prompts:
        ids, generation = list(prompt), []
        for _ in range(num_tokens):
            values = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float().log_softmax(-1)
            ids.append(int(values.argmax()))
            generation.append((ids[-1], values.max().item()))
        generations.append(generation)
    return generations


def ours(
    runner: ModelRunner, prompts: Sequence[list[int]] = PROMPTS, num_tokens: int = NUM_TOKENS, budget: int = 9
) -> list[Generation]:
    """The same by steps of at most `budget` tokens: what decodes comes first, then chunks of the prompts in order.

    The blocks of the sequences are interleaved, so that no table is a run of neighbours.
    """
    per_sequence = runner.limits.num_blocks // len(prompts)
    tables = [[index + len(prompts) * number for number in range(per_sequence)] for index in range(len(prompts))]
    computed, generations = [0] * len(prompts), [[] for _ in prompts]
    known: set[int] = set()
    while any(len(generation) < num_tokens for generation in generations):
        rows, samplers, room = [], [], budget
        waiting = [index for index, found in enumerate(generations) if len(found) < num_tokens]
        for index in sorted(waiting, key=lambda index: not generations[index]):
            chunk = (prompts[index] + [token for token, _ in generations[index]])[computed[index] :][:room]
            if not chunk:
                continue
            rows.append(Row(index, chunk, tables[index], computed[index]))
            computed[index] += len(chunk)
            room -= len(chunk)
            if computed[index] >= len(prompts[index]):
                samplers.append((len(rows) - 1, index))
        new = {row.request_id: GREEDY for row in rows if row.request_id not in known}
        known |= new.keys()
        response = runner.execute(step(*rows, new=new, samples=[(row, 0) for row, _ in samplers]))
        for (_, index), token, value in zip(samplers, tokens(response), logprobs(response), strict=True):
            generations[index].append((token, value))
    runner.execute(step(finished=list(known)))
    return generations


def assert_alike(found: list[Generation], expected: list[Generation], tolerance: float = 1e-4) -> None:
    """The tokens are the same, and no log-probability is off by more than `tolerance`."""
    for ours_, theirs_ in zip(found, expected, strict=True):
        assert [token for token, _ in ours_] == [token for token, _ in theirs_]
        for (_, our_value), (_, their_value) in zip(ours_, theirs_, strict=True):
            assert abs(our_value - their_value) < tolerance
