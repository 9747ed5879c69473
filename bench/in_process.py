"""The worker's steps without its process: a runner and the scheduler's core, face to face in this one."""

from collections import deque

import torch

from scheduler.plan import Plan, StepOutputs, to_request, to_result
from scheduler.scheduler import Scheduler
from worker.cache_engine import CacheEngine, CacheShape
from worker.model_runner import ModelRunner
from worker.models.model import Model
from worker.step_in_flight import StepInFlight
from worker.streams import Streams


def make_runner(
    model: Model,
    *,
    num_blocks: int,
    num_cpu_blocks: int = 0,
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
    dtype: torch.dtype,
    device: torch.device,
    streams: Streams | None = None,
) -> tuple[ModelRunner, CacheEngine]:
    """A runner of a model, and its block pools, which are unused."""
    numbers = model.config
    shape = CacheShape.of_model(model, block_size, dtype)
    cache = CacheEngine(shape, num_blocks, num_cpu_blocks, device, model.operations, streams)
    runner = ModelRunner(
        model,
        cache,
        max_num_batched_tokens=max_num_batched_tokens,
        context_length=numbers.context_length,
        device=device,
        streams=streams,
    )
    return runner, cache


class FaceToFace:
    """A core and a runner.

    Args:
        core: whose policy says how many steps may be in flight.
        runner: with as many blocks as the core knows of.
    """

    def __init__(self, core: Scheduler, runner: ModelRunner) -> None:
        self._core = core
        self._runner = runner
        self._in_flight: deque[tuple[Plan, StepInFlight]] = deque()

    def run(self) -> None:
        """Steps until no group is live."""
        while self._core.num_live:
            self.advance()
        while self._in_flight:  # steps of sequences that have ended
            self._answer()

    def advance(self) -> StepOutputs | None:
        """Launches one more step, or if that cannot be, takes the oldest one's answer; returns what came of it."""
        most = self._core.policy.max_steps_in_flight
        # The next step of a beam search cannot be planned before this one's samples are known.
        if len(self._in_flight) < most and not any(plan.num_beams for plan, _ in self._in_flight):
            plan = self._core.schedule(0.0)
            if plan.rows:
                self._in_flight.append((plan, self._runner.launch(to_request(plan, epoch=0))))
                return None
            assert self._in_flight, "somebody waits, and nothing is in flight"
        return self._answer()

    def _answer(self) -> StepOutputs:
        plan, step = self._in_flight.popleft()
        return self._core.update(plan, to_result(step.result()))
