"""A step that was launched on the device, and its answer once the device has finished it."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from protos.worker_pb2 import ExecuteModelResponse, StepTimings
from worker.adjustments import TokenHistory
from worker.cache_engine import Swap
from worker.logprobs import TokenLogprobs
from worker.sampler import SampledTokens
from worker.streams import Mark

Results = TypeVar("Results")


@dataclass(frozen=True, slots=True)
class StepMarks:
    """Marks where the parts of a step begin and end on the device.

    Attributes:
        begun: before everything.
        prepared: before the forward pass.
        forwarded: before sampling.
        finished: after everything that the answer is made of.
        swap: of the blocks that are moved between the pools, beside the step or before its forward pass.
        arrived: after the previous stage's hidden states have come; None: there is no previous stage.
        num_stages: of the model; each is assumed to take as long as this one.
    """

    begun: Mark
    prepared: Mark
    forwarded: Mark
    finished: Mark
    swap: Swap | None
    arrived: Mark | None = None
    num_stages: int = 1

    @property
    def are_passed(self) -> bool:
        """Whether the device has done all of the step."""
        return self.finished.is_passed and (self.swap is None or self.swap.ended.is_passed)

    def wait(self) -> None:
        """Blocks the host until the device has done all of the step."""
        self.finished.wait()
        if self.swap is not None:
            self.swap.ended.wait()

    def timings(self) -> StepTimings:
        """How long each part took; call it once all marks are passed."""
        swap_ms = self.num_stages * self.swap.ended.ms_since(self.swap.begun) if self.swap is not None else 0.0
        return StepTimings(
            # If the swap took longer than the preparation, the forward pass has not waited for it.
            prepare_ms=max(self.prepared.ms_since(self.begun), swap_ms),
            forward_ms=self.num_stages * self.forwarded.ms_since(self.arrived or self.prepared),
            sample_ms=self.finished.ms_since(self.forwarded),
            swap_ms=swap_ms,
        )


@dataclass(frozen=True, slots=True)
class Note:
    """A sampled token that later draws depend on.

    Attributes:
        sample: its index among the step's samples.
        history: where it is to be noted.
        sequence_index: the sequence that it belongs to.
        position: its position in that sequence.
    """

    sample: int
    history: TokenHistory
    sequence_index: int
    position: int


class StepInFlight:
    """A launched step. `result` may be called by any thread, more than once.

    Args:
        step_id: of the request.
        epoch: of the request.
        marks: set by the step.
        sampled: what it samples, brought to the host by `to_host`; None: nothing.
        prompt: log-probabilities of prompts, brought likewise; None: they were not asked for.
        notes: tokens to note before any draw that depends on them.
    """

    def __init__(
        self,
        step_id: int,
        epoch: int,
        marks: StepMarks,
        sampled: SampledTokens | None,
        prompt: TokenLogprobs | None,
        notes: Sequence[Note],
    ) -> None:
        self._response = ExecuteModelResponse(step_id=step_id, epoch=epoch)
        self._marks = marks
        self._sampled = sampled
        self._prompt = prompt
        self._notes = notes
        self._lock = threading.Lock()
        self._is_answered = False

    @property
    def is_finished(self) -> bool:
        """Whether `result` need not wait for the device."""
        return self._marks.are_passed

    def result(self) -> ExecuteModelResponse:
        """The answer; waits until the device has finished the step, and returns only when all `notes` are noted."""
        with self._lock:
            if not self._is_answered:
                self._marks.wait()
                self._answer()
                self._is_answered = True
        return self._response

    def _answer(self) -> None:
        response, sampled = self._response, self._sampled
        response.timings.CopyFrom(self._marks.timings())
        if self._prompt is not None:
            response.prompt_logprobs.CopyFrom(self._prompt.to_columns())
        if sampled is None:
            return
        token_ids = sampled.token_ids.numpy()
        for note in self._notes:
            note.history.note(note.sequence_index, note.position, int(token_ids[note.sample]))
        response.token_ids = token_ids.astype(np.int32).tobytes()
        response.logprobs = sampled.logprobs.numpy().tobytes()
        response.failed_samples = np.flatnonzero(sampled.failed).astype(np.int32).tobytes()
        if sampled.candidates is not None:
            response.candidate_token_ids = sampled.candidates.token_ids.numpy().astype(np.int32).tobytes()
            response.candidate_logprobs = sampled.candidates.logprobs.numpy().tobytes()
        if sampled.top_logprobs is not None:
            response.top_logprobs.CopyFrom(sampled.top_logprobs.to_columns())


def to_host(results: Results, device: torch.device) -> Results:
    """A dataclass with its tensors on the way to the CPU; they are there once a mark set after this is passed.

    For a copy that does not block, torch uses pinned memory.
    """
    return results if device.type == "cpu" else _bring(results)


def _bring(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("cpu", non_blocking=True)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: _bring(getattr(value, field.name)) for field in fields(value)})
