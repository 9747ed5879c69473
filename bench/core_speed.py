"""Time that the scheduler core takes for a step: schedule + update, and the messages to the worker and back.

Each case is a core with so many running sequences, driven for some hundred steps after a warm-up, in this process,
with the interpreter's garbage collection as it is in production. The worker's answers are prepared outside the clock.
"""

import gc
import itertools
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pagewire.bench import percentile
from protos.columns import pack, pack_floats
from protos.sampling_pb2 import Sampling
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse
from scheduler.block_manager import BlockManager
from scheduler.plan import Plan, StepResult, to_request, to_result
from scheduler.policy import Policy
from scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
# What joins the decodes of a mixed step: prompts of 256 tokens for outputs of 512, in chunks of up to 512 tokens.
_PROMPT_TOKENS, _OUTPUT_TOKENS, _CHUNK_TOKENS = 256, 512, 512
_MIXED_QUEUE = 32
_VOCABULARY_SIZE = 50_000


@dataclass(frozen=True, slots=True)
class Case:
    """What a core is loaded with.

    Attributes:
        num_running: sequences that decode.
        context: tokens in front of each when the clock starts.
        num_waiting: requests that cannot be admitted: as many sequences run as may.
        blocked_by_memory: they wait for blocks instead, of which too few are free.
        waiting_cached: the prompts of those that wait are in the prefix cache, all but their last block.
        mixed: requests end and new ones are admitted all the time, so that steps hold chunks of prompts too.
        steps_in_flight: steps that are planned, one behind the other, before the first of them is answered.
        num_concurrent_steps: steps that run beside each other, each with a share of the sequences.
        num_tenants: whose requests they are, in turn.
    """

    num_running: int
    context: int = 100
    num_waiting: int = 0
    blocked_by_memory: bool = False
    waiting_cached: bool = False
    mixed: bool = False
    steps_in_flight: int = 1
    num_concurrent_steps: int = 1
    num_tenants: int = 1


@dataclass(slots=True)
class Timings:
    """Milliseconds of each step, one entry a step.

    Attributes:
        core: schedule and update.
        request: building and serializing the message to the worker.
        result: parsing its answer.
        submit: milliseconds of each submission.
        gc_ms: garbage collection during the whole run, also while the answers are prepared.
        num_tokens: planned, over all steps.
    """

    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    request: list[float] = field(default_factory=list)
    result: list[float] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)
    gc_ms: float = 0.0
    num_tokens: int = 0

    @property
    def core(self) -> list[float]:
        """Schedule and update together, step by step."""
        return [schedule + update for schedule, update in zip(self.schedule, self.update, strict=True)]


@dataclass(frozen=True, slots=True)
class Summary:
    """Milliseconds over the steps of a case."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: list[float]) -> "Summary":
        """Mean, median and 99th percentile; zeros for none."""
        if not values:
            return cls(0.0, 0.0, 0.0)
        return cls(sum(values) / len(values), percentile(values, 50), percentile(values, 99))


class Driver:
    """Drives the core of one case."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self._case = case
        self._rng = random.Random(seed)
        self._ids = itertools.count()
        budget = case.num_running + _CHUNK_TOKENS if case.mixed else 1 << 20
        policy = Policy(
            max_num_batched_tokens=budget,
            max_num_seqs=case.num_running,
            max_waiting_requests=case.num_waiting + case.num_running + _MIXED_QUEUE,
            max_waiting_tokens=1 << 40,
            max_steps_in_flight=case.steps_in_flight,
        )
        longest = (_PROMPT_TOKENS + _OUTPUT_TOKENS if case.mixed else case.context) + 2048
        blocks = BlockManager(case.num_running * (longest // BLOCK_SIZE + 1), BLOCK_SIZE)
        self.core = Scheduler(policy, blocks)
        self.core.set_num_concurrent_steps(case.num_concurrent_steps)
        self._refill = False
        self._in_flight: deque[tuple[Plan, bytes]] = deque()
        self.timings = Timings()
        self._prompt: array[int] | None = None

    def warm_up(self) -> None:
        """Fills the core until every sequence decodes, and then the waiting queue."""
        case = self._case
        for place in range(case.num_running):
            # Spread over the lengths of blocks, or over the outputs' lengths: they do not all grow, or end, at once.
            if case.mixed:
                self._submit(_PROMPT_TOKENS, max(2, _OUTPUT_TOKENS * (place + 1) // case.num_running))
            else:
                self._submit(case.context + place % BLOCK_SIZE, 1 << 30)
        while self.core.num_waiting:
            self._step()
        if case.blocked_by_memory:
            self.core.policy = replace(self.core.policy, max_num_seqs=2 * case.num_running, watermark=0.99)
        for _ in range(case.num_waiting):
            self._submit(case.context, 1 << 30, cached=case.waiting_cached)
        self._refill = case.mixed
        assert self.core.num_waiting == case.num_waiting
        for _ in range(2 * BLOCK_SIZE):
            self._step()
        self.timings = Timings()

    def run(self, num_steps: int, seconds: float, on_step: Callable[[], None] | None = None) -> Timings:
        """Up to `num_steps` steps, at most about `seconds` long."""
        end = time.perf_counter() + seconds
        with _clocked_gc(self.timings):
            for _ in range(num_steps):
                self._step()
                if on_step is not None:
                    on_step()
                if time.perf_counter() > end:
                    break
        return self.timings

    def _step(self) -> None:
        core, timings = self.core, self.timings
        if self._refill:
            while core.num_waiting < _MIXED_QUEUE:
                self._submit(_PROMPT_TOKENS, _OUTPUT_TOKENS)
        start = time.perf_counter()
        plan = core.schedule(start)
        planned = time.perf_counter()
        data = to_request(plan, epoch=1).SerializeToString()
        sent = time.perf_counter()
        timings.schedule.append((planned - start) * 1e3)
        timings.request.append((sent - planned) * 1e3)
        timings.num_tokens += plan.num_tokens
        self._in_flight.append((plan, self._answer(plan, data)))
        if len(self._in_flight) < core.in_flight.max_steps:
            return
        plan, answer = self._in_flight.popleft()
        received = time.perf_counter()
        result = parse(answer)
        parsed = time.perf_counter()
        core.update(plan, result)
        updated = time.perf_counter()
        timings.update.append((updated - parsed) * 1e3)
        timings.result.append((parsed - received) * 1e3)

    def _submit(self, num_prompt_tokens: int, max_tokens: int, *, cached: bool = False) -> None:
        if cached and self._prompt is not None:
            prompt = self._prompt[:num_prompt_tokens]
        else:
            prompt = self._random_tokens(num_prompt_tokens)
        self._prompt = self._prompt or prompt
        number = next(self._ids)
        tenant = f"tenant {number % self._case.num_tenants}"
        start = time.perf_counter()
        self.core.submit(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            n=1,
            max_tokens=max_tokens,
            stop_token_ids=[2],
            sampling=Sampling(temperature=1.0, top_p=1.0, num_prompt_tokens=num_prompt_tokens),
            tenant=tenant,
            now=start,
        )
        self.timings.submit.append((time.perf_counter() - start) * 1e3)

    def _answer(self, plan: Plan, data: bytes) -> bytes:
        num_samples = len(ExecuteModelRequest.FromString(data).sample_rows) // 4
        response = ExecuteModelResponse(
            step_id=plan.step_id,
            epoch=1,
            token_ids=pack(self._random_tokens(num_samples)),
            logprobs=pack_floats([-0.5] * num_samples),
        )
        return response.SerializeToString()

    def _random_tokens(self, count: int) -> "array[int]":
        """Ids of the vocabulary, none of them a stop id."""
        tokens = array("i", array("H", self._rng.randbytes(2 * count)))
        for place, token_id in enumerate(tokens):
            if token_id <= 2:
                tokens[place] = 3
        return tokens


def parse(data: bytes) -> StepResult:
    """The worker's answer, as the scheduler's link to it reads it."""
    return to_result(ExecuteModelResponse.FromString(data))


@contextmanager
def _clocked_gc(timings: Timings) -> Iterator[None]:
    start = 0.0

    def on_gc(phase: str, _: dict[str, int]) -> None:
        nonlocal start
        if phase == "start":
            start = time.perf_counter()
        else:
            timings.gc_ms += (time.perf_counter() - start) * 1e3

    gc.callbacks.append(on_gc)
    try:
        yield
    finally:
        gc.callbacks.remove(on_gc)
