"""One step: swap out, swap in, copy, forward, sample; and what has to be remembered between steps.

That is little: how each live request samples, and the token that each of its sequences sampled last; of a request with
penalties all its tokens, of one that wants its prompt's log-probabilities the prompt. Everything else arrives with
every step.
"""

import time
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, NewRequest, StepTimings
from worker.adjustments import TokenHistory
from worker.cache_engine import CacheEngine
from worker.inputs import (
    LAST_SAMPLED,
    Integers,
    MalformedStep,
    ModelInputs,
    Step,
    StepLimits,
    check_token_ids,
    make_inputs,
    read_column,
    read_step,
)
from worker.logprobs import TokenLogprobs, prompt_logprobs
from worker.models.model import Model
from worker.sampler import Sample, SampledTokens, SamplingParameters, draw_tokens


@dataclass(slots=True)
class _Request:
    """A live request: how it samples, and the last token of each of its sequences, by sequence index.

    Attributes:
        prompt_token_ids: empty where nothing depends on them.
        history: set where something depends on the tokens before.
    """

    parameters: SamplingParameters
    prompt_token_ids: Integers
    history: TokenHistory | None
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
        model: Model,
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
        prompt_targets = self._prompt_targets(step)
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
        if hidden is not None and prompt_targets:
            response.prompt_logprobs.CopyFrom(self._prompt_logprobs(hidden, step, prompt_targets).to_columns())
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
            self._requests[new.request_id] = self._read_new(new, parameters)

    def _read_new(self, new: NewRequest, parameters: SamplingParameters) -> _Request:
        prompt = read_column(new, "prompt_token_ids")
        if parameters.num_prompt_logprobs is not None or parameters.penalizes:
            check_token_ids("new_requests.prompt_token_ids", prompt, self.limits)
            if len(prompt) != parameters.num_prompt_tokens:
                message = (
                    f"request {new.request_id}: {len(prompt)} tokens; its prompt has {parameters.num_prompt_tokens}"
                )
                raise MalformedStep("new_requests.prompt_token_ids", message)
        if not parameters.penalizes:
            return _Request(parameters, prompt, None)
        history = TokenHistory(prompt)
        indexes, counts = read_column(new, "output_sequence_indexes"), read_column(new, "output_counts")
        token_ids = read_column(new, "output_token_ids")
        if len(indexes) != len(counts) or counts.sum() != len(token_ids) or np.any(counts < 0):
            raise MalformedStep("new_requests.output_counts", "do not fit the other columns")
        check_token_ids("new_requests.output_token_ids", token_ids, self.limits)
        for index, output in zip(indexes.tolist(), np.split(token_ids, np.cumsum(counts)[:-1]), strict=False):
            history.note(index, len(prompt), output)
        return _Request(parameters, prompt, history)

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
            if live.history is not None and live.history.output(sequence_index, position) is None:
                name = f"sequence {sequence_index} of request {request_id}"
                raise MalformedStep(
                    "new_requests.output_token_ids", f"the output of {name} has a gap before {position}"
                )
            samples.append(Sample(live.parameters, sequence_index, position, live.history))
        return samples

    def _prompt_targets(self, step: Step) -> list[tuple[Integers, int]]:
        """Of each row that tells of prompt tokens: which these are, and how many others each comes with."""
        targets = []
        for row, start in zip(step.prompt_logprob_rows.tolist(), step.prompt_logprob_starts.tolist(), strict=True):
            live = self._requests.get(int(step.request_ids[row]))
            if live is None or live.parameters.num_prompt_logprobs is None:
                raise MalformedStep("prompt_logprob_rows", f"{row} is of a request that did not ask")
            told = live.prompt_token_ids[start + 1 : step.context_lengths[row] + 1]
            if len(told) == 0:
                raise MalformedStep("prompt_logprob_starts", f"{start} is behind the prompt's last token but one")
            targets.append((told, live.parameters.num_prompt_logprobs))
        return targets

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

    def _prompt_logprobs(self, hidden: Tensor, step: Step, targets: list[tuple[Integers, int]]) -> TokenLogprobs:
        firsts = step.prompt_logprob_starts - step.num_computed_tokens[step.prompt_logprob_rows]
        firsts += step.query_starts[step.prompt_logprob_rows]
        # Slices, or a copy where there are several: of hidden states, which are small beside logits.
        states = [hidden[first : first + len(told)] for first, (told, _) in zip(firsts.tolist(), targets, strict=True)]
        return prompt_logprobs(
            self._model.head,
            self.limits.vocabulary_size,
            states[0] if len(states) == 1 else torch.cat(states),
            torch.from_numpy(np.concatenate([told for told, _ in targets]).astype(np.int64)).to(self._device),
            [count for told, count in targets for _ in range(len(told))],
        )

    def _answer(self, response: ExecuteModelResponse, step: Step, sampled: SampledTokens) -> None:
        token_ids = sampled.token_ids.cpu().numpy()
        request_ids = step.request_ids[step.sample_rows]
        # A failed sample leaves a token behind too: the next step may be on its way already and ask for it. Candidates
        # leave none: which of them goes on, and as which sequence, only the scheduler knows.
        columns = (request_ids, step.sample_sequence_indexes, token_ids)
        for sample, (request_id, sequence_index, token_id) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            live = self._requests[request_id]
            if live.parameters.num_candidates == 0:
                live.last_tokens[sequence_index] = token_id
            if live.history is not None:
                live.history.note(sequence_index, int(step.context_lengths[step.sample_rows[sample]]), token_id)
        response.token_ids = token_ids.astype(np.int32).tobytes()
        response.logprobs = sampled.logprobs.cpu().numpy().tobytes()
        response.failed_samples = np.flatnonzero(sampled.failed.cpu().numpy()).astype(np.int32).tobytes()
        if sampled.candidates is not None:
            candidate_ids = sampled.candidates.token_ids.cpu().numpy()
            response.candidate_token_ids = candidate_ids.astype(np.int32).tobytes()
            response.candidate_logprobs = sampled.candidates.logprobs.cpu().numpy().tobytes()
        if sampled.top_logprobs is not None:
            response.top_logprobs.CopyFrom(sampled.top_logprobs.to_columns())


def _tensor(pairs: Integers) -> Tensor:
    return torch.from_numpy(pairs.astype(np.int64))
