"""What the worker's tests are made of: tiny random checkpoints, and steps written row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from real_worker import CPU, load_weights

from bench.in_process import make_runner
from protos.columns import pack, unpack, unpack_floats
from protos.sampling_pb2 import Sampling
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, NewRequest
from worker.checkpoint import DTYPES
from worker.model_runner import ModelRunner

GREEDY = Sampling(temperature=0, top_p=1)


def tiny_llama(**changes):
    """A random Llama of transformers, in float32: 2 layers, 4 query heads on 2 K/V heads of 8, 97 token ids."""
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM as TheirModel

    numbers = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.5,  # far from uniform logits, so that no argmax hangs on the last bit
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    model = TheirModel(TheirConfig(**(numbers | changes))).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return model


def tiny_checkpoint(directory: Path, *, max_shard_size: str = "1GB", **changes) -> Path:
    """The directory, with a `tiny_llama` saved into it."""
    tiny_llama(**changes).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def tiny_runner(
    directory: Path,
    *,
    num_blocks: int = 64,
    num_cpu_blocks: int = 8,
    block_size: int = 4,
    dtype: str = "float32",
    device: torch.device = CPU,
    streams=None,
) -> ModelRunner:
    """A runner of the checkpoint in `directory`, as the worker would load it, but not warmed up."""
    return make_runner(
        load_weights(directory, dtype, device),
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        block_size=block_size,
        dtype=DTYPES[dtype],
        device=device,
        streams=streams,
    )[0]


@dataclass
class Row:
    """One sequence in a step: `tokens` are computed behind `computed` others."""

    request_id: int
    tokens: Sequence[int]
    blocks: Sequence[int]
    computed: int = 0
    sequence_index: int = 0


def step(
    *rows: Row,
    new: dict[int, Sampling] | None = None,
    samples: Sequence[tuple[int, int]] | None = None,
    swap_out: Sequence[int] = (),
    swap_in: Sequence[int] = (),
    copy: Sequence[int] = (),
    finished: Sequence[int] = (),
    step_id: int = 0,
    epoch: int = 0,
) -> ExecuteModelRequest:
    """A step's request. `samples` are pairs (row, sequence index); by default each row samples for its own sequence."""
    if samples is None:
        samples = [(index, row.sequence_index) for index, row in enumerate(rows)]
    return ExecuteModelRequest(
        step_id=step_id,
        epoch=epoch,
        new_requests=[NewRequest(request_id=key, sampling=value) for key, value in (new or {}).items()],
        request_ids=pack(row.request_id for row in rows),
        sequence_indexes=pack(row.sequence_index for row in rows),
        num_computed_tokens=pack(row.computed for row in rows),
        num_new_tokens=pack(len(row.tokens) for row in rows),
        token_ids=pack(token for row in rows for token in row.tokens),
        block_table_lengths=pack(len(row.blocks) for row in rows),
        block_tables=pack(block for row in rows for block in row.blocks),
        sample_rows=pack(row for row, _ in samples),
        sample_sequence_indexes=pack(index for _, index in samples),
        blocks_to_swap_out=pack(swap_out),
        blocks_to_swap_in=pack(swap_in),
        blocks_to_copy=pack(copy),
        finished_request_ids=pack(finished),
    )


def tokens(response: ExecuteModelResponse) -> list[int]:
    """The sampled token ids."""
    return list(unpack(response.token_ids))


def logprobs(response: ExecuteModelResponse) -> list[float]:
    """Their log-probabilities."""
    return list(unpack_floats(response.logprobs))


def candidates(response: ExecuteModelResponse) -> list[tuple[int, float]]:
    """(token id, log-probability) of the candidates of all samples, in order."""
    ids, values = unpack(response.candidate_token_ids), unpack_floats(response.candidate_logprobs)
    return list(zip(ids, values, strict=True))


def greedy(launch, prompts: Sequence[Sequence[int]] = ((5, 17, 3, 88, 42), (9, 1, 60)), num_tokens: int = 8):
    """Tokens that each prompt is continued with, in a cache of blocks of 4. A step is launched for each prompt before
    the first is answered; `launch` gives an answer of a request."""
    rows = [
        Row(index + 1, prompt, range(8 * index, 8 * index + (len(prompt) + num_tokens) // 4 + 1))
        for index, prompt in enumerate(prompts)
    ]
    told: list[list[int]] = [[] for _ in rows]
    for number in range(num_tokens):
        new = [{row.request_id: GREEDY} if number == 0 else None for row in rows]
        answers = [launch(step(row, new=sampling)) for row, sampling in zip(rows, new, strict=True)]
        for row, answer, sampled in zip(rows, answers, told, strict=True):
            sampled += tokens(answer.result())
            row.computed, row.tokens = row.computed + len(row.tokens), sampled[-1:]
    launch(step(finished=[row.request_id for row in rows])).result()
    return told
