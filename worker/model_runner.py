"""One step: swap out, swap in, copy, forward, sample; and what has to be remembered between steps.

That is little: how each live request samples, and the token that each of its sequences sampled last. Everything else
arrives with every step.
"""

import time
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, StepTimings
from worker.cache_engine import CacheEngine
from worker.inputs import (
    LAST_SAMPLED,
    Integers,
    MalformedStep,
    ModelInputs,
    Step,
    StepLimits,
    make_inputs,
    read_step,
)
from worker.models.llama import LlamaForCausalLM
from worker.sampler import Sample, SampledTokens, SamplingParameters, draw_tokens


@dataclass(slots=True)
class _Request:
    """A live request: how it samples, and the last token of each of its sequences, by sequence index."""

    parameters: SamplingParameters
    last_tokens: dict[int, int] = field(default_factory=dict)


class ModelRunner:
    """Executes steps, one at a time, on one thread.

    Args:
        model: with its weights.
        cache: its block pools.
        max_num_batched_tokens: most tokens of a step.
        context_length: most tokens of a sequence.
        device: where the model and the cache are.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        cache: CacheEngine,
        *,
        max_num_batched_tokens: int,
        context_length: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self._requests: dict[int, _Request] = {}
        self.limits = StepLimits(
            vocabulary_size=model.config.vocabulary_size,
            context_length=context_length,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=cache.shape.block_size,
            num_blocks=cache.num_blocks,
            num_cpu_blocks=cache.num_cpu_blocks,
        )

    @torch.inference_mode()
    def execute(self, request: ExecuteModelRequest) -> ExecuteModelResponse:
        """Does one step. On a GPU the forward's time shows in `sample_ms`, which waits for it.

        Raises:
            MalformedStep: nothing was computed; new and finished requests may have been noted.
        """
        begun = time.perf_counter()
        step = read_step(request, self.limits)
        self._note_requests(request, step)
        samples = self._samples(step)
        self._fill_in_last_tokens(step)
        inputs = make_inputs(step, self.limits.block_size, self._device)
        swap_ms = self._swap_blocks(step)
        self._prepare_blocks(step, inputs)
        prepared = time.perf_counter()

        hidden = None
        if len(step.token_ids) > 0:
            hidden = self._model(inputs.token_ids, inputs.positions, self._cache.layers, inputs.attention)
        forwarded = time.perf_counter()

        response = ExecuteModelResponse(step_id=request.step_id, epoch=request.epoch)
        if hidden is not None and samples:
            self._answer(response, step, draw_tokens(self._logits(hidden, step, inputs), samples))
        times = (begun, prepared, forwarded, time.perf_counter())
        prepare_ms, forward_ms, sample_ms = (1e3 * (end - start) for start, end in pairwise(times))
        response.timings.CopyFrom(
            StepTimings(prepare_ms=prepare_ms, forward_ms=forward_ms, sample_ms=sample_ms, swap_ms=swap_ms)
        )
        return response

    def _note_requests(self, request: ExecuteModelRequest, step: Step) -> None:
        """Forgets finished requests, then learns of new ones: an id may come back in the same step."""
        for request_id in step.finished_request_ids.tolist():
            self._requests.pop(request_id, None)
        for new in request.new_requests:
            try:
                parameters = SamplingParameters.from_message(new.sampling, self.limits.vocabulary_size)
            except ValueError as error:
                raise MalformedStep("new_requests.sampling", f"request {new.request_id}: {error}") from error
            self._requests[new.request_id] = _Request(parameters)

    def _samples(self, step: Step) -> list[Sample]:
        """What is to be drawn from the logits of each sample row."""
        columns = (
            step.request_ids[step.sample_rows],
            step.sample_sequence_indexes,
            step.context_lengths[step.sample_rows],
        )
        samples = []
        for request_id, sequence_index, position in zip(*(column.tolist() for column in columns), strict=True):
            live = self._requests.get(request_id)
            if live is None:
                raise MalformedStep("request_ids", f"{request_id} was never among new_requests, or is finished")
            samples.append(Sample(live.parameters, sequence_index, position))
        return samples

    def _fill_in_last_tokens(self, step: Step) -> None:
        """Puts the token that a sequence sampled last in place of each `LAST_SAMPLED`."""
        unknown = np.flatnonzero(step.token_ids == LAST_SAMPLED)
        rows = np.searchsorted(step.query_starts, unknown, side="right") - 1
        for index, row in zip(unknown.tolist(), rows.tolist(), strict=True):
            request_id, sequence_index = int(step.request_ids[row]), int(step.sequence_indexes[row])
            live = self._requests.get(request_id)
            token_id = live.last_tokens.get(sequence_index) if live is not None else None
            if token_id is None:
                name = f"sequence {sequence_index} of request {request_id}"
                raise MalformedStep("token_ids", f"{LAST_SAMPLED} stands for {name}, which has sampled nothing")
            step.token_ids[index] = token_id

    def _swap_blocks(self, step: Step) -> float:
        """Swaps blocks out, then in, each direction at once; gives the milliseconds that took."""
        if len(step.blocks_to_swap_out) == len(step.blocks_to_swap_in) == 0:
            return 0.0
        begun = self._cache.finished_at()
        if len(step.blocks_to_swap_out) > 0:
            self._cache.swap_out(_tensor(step.blocks_to_swap_out))
        if len(step.blocks_to_swap_in) > 0:
            self._cache.swap_in(_tensor(step.blocks_to_swap_in))
        return 1e3 * (self._cache.finished_at() - begun)

    def _prepare_blocks(self, step: Step, inputs: ModelInputs) -> None:
        """Copies what is about to be written and shared no longer, and zeroes what a sequence enters."""
        if len(step.blocks_to_copy) > 0:
            self._cache.copy(_tensor(step.blocks_to_copy))
        if len(inputs.entered_blocks) > 0:
            self._cache.clear(inputs.entered_blocks)

    def _logits(self, hidden: Tensor, step: Step, inputs: ModelInputs) -> Tensor:
        """[num_samples, vocabulary_size]; the head runs once for each row, however many samples share it."""
        rows, of_sample = np.unique(step.sample_rows, return_inverse=True)
        logits = self._model.head(hidden[inputs.last_tokens[torch.from_numpy(rows).to(self._device)]])
        if np.array_equal(rows, step.sample_rows):
            return logits
        return logits[torch.from_numpy(of_sample).to(self._device)]

    def _answer(self, response: ExecuteModelResponse, step: Step, sampled: SampledTokens) -> None:
        token_ids = sampled.token_ids.cpu().numpy()
        request_ids = step.request_ids[step.sample_rows]
        # A failed sample leaves a token behind too: the next step may be on its way already and ask for it. Candidates
        # leave none: which of them goes on, and as which sequence, only the scheduler knows.
        for request_id, sequence_index, token_id in zip(
            request_ids.tolist(), step.sample_sequence_indexes.tolist(), token_ids.tolist(), strict=True
        ):
            live = self._requests[request_id]
            if live.parameters.num_candidates == 0:
                live.last_tokens[sequence_index] = token_id
        response.token_ids = token_ids.astype(np.int32).tobytes()
        response.logprobs = sampled.logprobs.cpu().numpy().tobytes()
        response.failed_samples = np.flatnonzero(sampled.failed.cpu().numpy()).astype(np.int32).tobytes()
        if sampled.candidates is not None:
            candidate_ids = sampled.candidates.token_ids.cpu().numpy()
            response.candidate_token_ids = candidate_ids.astype(np.int32).tobytes()
            response.candidate_logprobs = sampled.candidates.logprobs.cpu().numpy().tobytes()


def _tensor(pairs: Integers) -> Tensor:
    return torch.from_numpy(pairs.astype(np.int64))
