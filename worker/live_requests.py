"""What the worker remembers of requests between steps.

That is little: how each live request samples, and where the token that each of its sequences sampled last is kept; for
a request with penalties, all its tokens; for one that wants its prompt's log-probabilities, the prompt. Everything else
arrives with every step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from protos.worker_pb2 import ExecuteModelRequest, NewRequest
from worker.adjustments import TokenHistory
from worker.inputs import LAST_SAMPLED, Integers, MalformedStep, Step, StepLimits, check_token_ids, read_column
from worker.last_tokens import LastTokens
from worker.sampling_parameters import Sample, SamplingParameters


@dataclass(slots=True)
class LiveRequest:
    """A live request.

    Attributes:
        parameters: how it samples.
        prompt_token_ids: empty if nothing depends on them.
        history: set if something depends on earlier tokens.
        places: the place in `LastTokens` of each sequence that has sampled a token, by the sequence's index.
    """

    parameters: SamplingParameters
    prompt_token_ids: Integers
    history: TokenHistory | None
    places: dict[int, int] = field(default_factory=dict)


class LiveRequests:
    """All live requests, by the ids that the scheduler gives them.

    Args:
        limits: what ids have to keep within.
        last_tokens: where places are taken, and given back when a request is finished.
    """

    def __init__(self, limits: StepLimits, last_tokens: LastTokens) -> None:
        self._limits = limits
        self._last_tokens = last_tokens
        self._requests: dict[int, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def note(self, request: ExecuteModelRequest, step: Step) -> None:
        """Forgets finished requests, then notes new ones: an id may be used again in the same step.

        Raises:
            MalformedStep: a new one is invalid; those before it have been noted.
        """
        for request_id in step.finished_request_ids.tolist():
            self._forget(request_id)
        for new in request.new_requests:
            try:
                parameters = SamplingParameters.from_message(new.sampling, self._limits.vocabulary_size)
            except ValueError as error:
                raise MalformedStep("new_requests.sampling", f"request {new.request_id}: {error}") from error
            live = self._read_new(new, parameters)
            self._forget(new.request_id)
            self._requests[new.request_id] = live

    def _forget(self, request_id: int) -> None:
        live = self._requests.pop(request_id, None)
        if live is not None:
            for place in live.places.values():
                self._last_tokens.give_back(place)

    def _read_new(self, new: NewRequest, parameters: SamplingParameters) -> LiveRequest:
        prompt = read_column(new, "prompt_token_ids")
        if parameters.num_prompt_logprobs is not None or parameters.penalizes:
            check_token_ids("new_requests.prompt_token_ids", prompt, self._limits)
            if len(prompt) != parameters.num_prompt_tokens:
                message = (
                    f"request {new.request_id}: {len(prompt)} tokens; its prompt has {parameters.num_prompt_tokens}"
                )
                raise MalformedStep("new_requests.prompt_token_ids", message)
        if not parameters.penalizes:
            return LiveRequest(parameters, prompt, None)
        history = TokenHistory(prompt)
        indexes, counts = read_column(new, "output_sequence_indexes"), read_column(new, "output_counts")
        token_ids = read_column(new, "output_token_ids")
        if len(indexes) != len(counts) or counts.sum() != len(token_ids) or np.any(counts < 0):
            raise MalformedStep("new_requests.output_counts", "do not fit the other columns")
        check_token_ids("new_requests.output_token_ids", token_ids, self._limits)
        for index, output in zip(indexes.tolist(), np.split(token_ids, np.cumsum(counts)[:-1]), strict=False):
            history.note(index, len(prompt), output)
        return LiveRequest(parameters, prompt, history)

    def samples(self, step: Step, settle: Callable[[], None]) -> list[Sample]:
        """What is to be drawn from the logits of each sample row.

        Args:
            step: one whose requests have been noted.
            settle: called before the first look at a history; all that was sampled until then is in it afterwards.
        """
        samples = []
        settled = False
        for request_id, sequence_index, position in step.samples:
            live = self._requests.get(request_id)
            if live is None:
                raise MalformedStep("request_ids", f"{request_id} was never among new_requests, or is finished")
            if live.history is not None:
                if not settled:
                    settle()
                    settled = True
                if live.history.output(sequence_index, position) is None:
                    name = f"sequence {sequence_index} of request {request_id}"
                    raise MalformedStep(
                        "new_requests.output_token_ids", f"the output of {name} has a gap before {position}"
                    )
            samples.append(Sample(live.parameters, sequence_index, position, live.history))
        return samples

    def prompt_targets(self, step: Step) -> list[tuple[Integers, int]]:
        """For each row that reports prompt tokens: which ones, and how many of the best tokens come with each."""
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

    def places_to_read(self, step: Step) -> tuple[list[int], list[int]]:
        """Indices of the step's tokens that stand for what was sampled last, and the place of each."""
        unknown = np.flatnonzero(step.token_ids == LAST_SAMPLED)
        if len(unknown) == 0:
            return [], []
        rows = np.searchsorted(step.query_starts, unknown, side="right") - 1
        places = []
        for request_id, sequence_index in zip(
            step.request_ids[rows].tolist(), step.sequence_indexes[rows].tolist(), strict=True
        ):
            live = self._requests.get(request_id)
            place = live.places.get(sequence_index) if live is not None else None
            if place is None:
                name = f"sequence {sequence_index} of request {request_id}"
                raise MalformedStep("token_ids", f"{LAST_SAMPLED} stands for {name}, which has sampled nothing")
            places.append(place)
        return unknown.tolist(), places

    def places_to_write(self, step: Step) -> tuple[list[int], list[int]]:
        """Indices of the samples that are kept, and a place for each.

        Candidates are not kept: which of them goes on, and as which sequence, only the scheduler knows. If a sequence
        has several samples, among which the scheduler chooses as well, any one is kept, and no step asks for it.
        """
        samples, places = [], []
        for index, (request_id, sequence_index, _) in enumerate(step.samples):
            live = self._requests[request_id]
            if live.parameters.num_candidates > 0:
                continue
            place = live.places.get(sequence_index)
            if place is None:
                place = live.places[sequence_index] = self._last_tokens.take()
            samples.append(index)
            places.append(place)
        return samples, places
