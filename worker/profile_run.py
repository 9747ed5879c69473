"""Steps of made-up prompts: to warm a worker up, and to see how much of a GPU's memory the largest ones take."""

from collections.abc import Sequence
from typing import Protocol

import torch

from protos.columns import pack
from protos.sampling_pb2 import Sampling
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, NewRequest
from worker.cache_engine import CacheEngine, CacheShape
from worker.cache_size import PROFILED_SAMPLES, Profile
from worker.decode_graphs import Recorder
from worker.model_runner import ModelRunner
from worker.models.model import Model

# What takes the most memory in a sampler: a filter that sorts, and log-probabilities besides the tokens' own.
_HUNGRY = Sampling(temperature=1, top_p=0.9, typical_p=0.9, num_top_logprobs=1)


class DeviceMemory(Protocol):
    """A device's memory."""

    @property
    def total_bytes(self) -> int:
        """The memory that the device has."""

    def taken_bytes(self) -> int:
        """What all processes have taken of it, except for what torch caches and does not use."""

    def mark(self) -> None:
        """Makes `peak_bytes` count from here."""

    def peak_bytes(self) -> int:
        """The most that tensors have taken since `mark`, beyond what they took then."""


class CudaMemory:
    """A GPU's memory.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marked_bytes = 0

    @property
    def total_bytes(self) -> int:
        """See `DeviceMemory`."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def taken_bytes(self) -> int:
        """See `DeviceMemory`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return int(total_bytes - free_bytes)

    def mark(self) -> None:
        """See `DeviceMemory`."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._marked_bytes = torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.max_memory_allocated(self._device) - self._marked_bytes


def profile(
    model: Model,
    shape: CacheShape,
    *,
    max_num_batched_tokens: int,
    context_length: int,
    device: torch.device,
    memory: DeviceMemory,
    record: Recorder | None,
) -> Profile:
    """What is taken of a device's memory once its largest steps have been run, on a cache no larger than they need.

    These are two: the longest prompts, with all log-probabilities of the first; and `PROFILED_SAMPLES` samples, or as
    many as fit into a step. Nothing else takes as much at once.

    Args:
        model: with its weights.
        shape: of a block.
        max_num_batched_tokens: most tokens in a step.
        context_length: most tokens in a sequence.
        device: of the model.
        memory: the device's.
        record: makes graphs of decode steps; None if there are to be none.
    """
    longest = min(context_length, max_num_batched_tokens)
    num_blocks = -(-longest // shape.block_size)
    runner = ModelRunner(
        model,
        CacheEngine(shape, num_blocks, 0, device, model.operations),
        max_num_batched_tokens=max_num_batched_tokens,
        context_length=context_length,
        device=device,
    )
    memory.taken_bytes()  # so that torch keeps nothing of what loading took, which would hide what a step takes
    memory.mark()
    num_rows = min(PROFILED_SAMPLES, max_num_batched_tokens)
    per_row = min(longest, max_num_batched_tokens // num_rows)
    run_prompts(runner, [longest] * (max_num_batched_tokens // longest), hungry=True, tells_prompt=longest > 1)
    run_prompts(runner, [per_row] * num_rows, hungry=True)
    step_bytes = memory.peak_bytes()
    resident_bytes = memory.taken_bytes()
    if record is not None:
        runner.record_decodes(record)
    graph_bytes = memory.taken_bytes() - resident_bytes
    del runner
    resident_bytes -= num_blocks * shape.block_bytes
    return Profile(memory.total_bytes, resident_bytes, step_bytes, graph_bytes)


def run_prompts(
    runner: ModelRunner, lengths: Sequence[int], *, hungry: bool = False, tells_prompt: bool = False
) -> ExecuteModelResponse:
    """Runs a step of prompts that all use the same first blocks, whose contents do not matter; returns its answer.

    Args:
        runner: has room for them, and no live request.
        lengths: tokens in each prompt; a token is sampled after each.
        hungry: samples with what takes the most memory.
        tells_prompt: asks for the log-probabilities of the first prompt's tokens, of which there are two at least.
    """
    num_rows = len(lengths)
    num_blocks = [-(-length // runner.limits.block_size) for length in lengths]
    new = NewRequest(request_id=0, sampling=_HUNGRY if hungry else Sampling(temperature=1, top_p=1))
    new.sampling.num_prompt_tokens = lengths[0]
    if tells_prompt:
        new.sampling.num_prompt_logprobs = 1
        new.prompt_token_ids = pack([0] * lengths[0])
    response = runner.execute(
        ExecuteModelRequest(
            new_requests=[new],
            request_ids=pack([0] * num_rows),
            sequence_indexes=pack(range(num_rows)),
            num_computed_tokens=pack([0] * num_rows),
            num_new_tokens=pack(lengths),
            token_ids=pack([0] * sum(lengths)),
            block_table_lengths=pack(num_blocks),
            block_tables=pack(block for count in num_blocks for block in range(count)),
            sample_rows=pack(range(num_rows)),
            sample_sequence_indexes=pack(range(num_rows)),
            prompt_logprob_rows=pack([0] if tells_prompt else []),
            prompt_logprob_starts=pack([0] if tells_prompt else []),
        )
    )
    runner.execute(ExecuteModelRequest(finished_request_ids=pack([0])))
    return response
