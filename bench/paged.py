"""Replays a trace through the scheduler core, and looks at its blocks every few steps. No worker, no gRPC, no torch.

Each sample is answered at once: with a stop id where the trace's output ends, else with a random id, so that no two
outputs share blocks by their content. Requests declare the greatest length that the model has, as clients do that do
not know how long the answer will be. Beam searches get random candidates (`candidates.py`), and end at the trace's
length.

What counts as what:

    allocated    slots of the blocks that are in a table; a block in several tables counts once. Blocks that are in none
                 and only cached for their content are not allocated: they are given up as soon as a block is needed
    used         allocated slots whose KV is computed, the step's own included: looked at when a step is computed,
                 before what ends with it is freed
    reservation  allocated slots for tokens that are known, but not computed yet: the rest of a prompt in chunks
    internal     allocated slots after the last token: the rest of each last block
    external     slots of no table
"""

import itertools
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.candidates import MEASURED, CandidateModel
from bench.contiguous import Averages, Shares
from bench.trace import MAX_TOKENS, TraceRequest
from scheduler.beam import BeamParams, EarlyStopping
from scheduler.block_manager import BlockManager
from scheduler.plan import Plan, StepResult
from scheduler.policy import Policy
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup

_STOP, _FIRST_ID = 2, 10
_VOCABULARY_SIZE = 50_000


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV memory and the bounds of a step.

    Attributes:
        num_slots: a multiple of each block size that is tried. The swap pool has as many.
        step_s: simulated time that a step takes.
        stride: blocks are looked at in every `stride`-th step.
    """

    num_slots: int = 15_680
    block_size: int = 16
    prefix_caching: bool = True
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 2048
    step_s: float = 0.025
    stride: int = 4


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay showed, averaged over the steps in which a request had to wait.

    Attributes:
        shares: of the pool's slots, by category.
        used_of_allocated: used slots / allocated slots.
        saved_by_sharing: 1 - blocks held / entries of all block tables.
        cached: share of the pool's blocks that are in no table, and kept for their content.
        num_finished: requests that were answered.
        num_preemptions: groups that lost their blocks.
    """

    shares: Shares
    used_of_allocated: float
    saved_by_sharing: float
    cached: float
    num_finished: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """How each request of the trace is decoded.

    Attributes:
        n: sequences that are sampled, all of the trace's length.
        beam_width: of a beam search instead; 0 for none.
        candidates: what the search sees.
    """

    n: int = 1
    beam_width: int = 0
    candidates: CandidateModel = MEASURED


class Replay:
    """The replay of one trace through one core.

    Args:
        on_finished: called for each request that has ended.
    """

    def __init__(
        self,
        trace: Iterable[TraceRequest],
        pool: Pool,
        decoding: Decoding | None = None,
        on_finished: Callable[[], None] | None = None,
    ) -> None:
        self._pool = pool
        self._decoding = decoding or Decoding()
        self._coming = deque(trace)
        self._on_finished = on_finished
        self._num_finished = 0
        self._rng = random.Random(1)
        policy = Policy(
            max_num_batched_tokens=pool.max_num_batched_tokens,
            max_num_seqs=pool.max_num_seqs,
            max_waiting_requests=len(self._coming) + 1,
            prefix_caching=pool.prefix_caching,
        )
        num_blocks = pool.num_slots // pool.block_size
        self.core = Scheduler(policy, BlockManager(num_blocks, pool.block_size, num_blocks))
        self._live: dict[int, tuple[SequenceGroup, int]] = {}
        self._averages = Averages(pool.num_slots)
        self._sharing = [0.0, 0.0]

    def run(self) -> Replayed:
        """Steps until all requests are answered."""
        now = 0.0
        for step in itertools.count():
            if not self._live:
                if not self._coming:
                    break
                now = max(now, self._coming[0].arrival_s)
            while self._coming and self._coming[0].arrival_s <= now:
                self._submit(self._coming.popleft())
            plan = self.core.schedule(now)
            assert plan.rows, "nothing runs, though requests are live"
            if self.core.num_waiting and step % self._pool.stride == 0:
                self._look(plan)
            now += self._pool.step_s
            self.core.update(plan, self._answer(plan))
            self._drop_finished(plan)
        shares = self._averages.shares(now)
        num_looks = max(1, shares.num_steps)
        return Replayed(
            shares,
            shares.used / max(1e-9, 1 - shares.external),
            self._sharing[0] / num_looks,
            self._sharing[1] / num_looks,
            self._num_finished,
            self.core.num_preemptions,
        )

    def _submit(self, request: TraceRequest) -> None:
        prompt = array("i", (self._random_id() for _ in range(request.num_prompt_tokens)))
        width = self._decoding.beam_width
        group = self.core.submit(
            request_id=f"r{self._num_finished + len(self._live)}",
            prompt_token_ids=prompt,
            n=self._decoding.n,
            max_tokens=request.num_output_tokens if width else MAX_TOKENS - len(prompt),
            stop_token_ids=[] if width else [_STOP],
            beam=BeamParams(width=width, early_stopping=EarlyStopping.NEVER) if width else None,
            now=request.arrival_s,
        )
        self._live[group.number] = (group, request.num_output_tokens)

    def _answer(self, plan: Plan) -> StepResult:
        token_ids: list[int] = []
        candidate_ids: list[int] = []
        candidate_logprobs: list[float] = []
        for row in plan.rows:
            length = self._live[row.group.number][1]
            for sequence in row.samples:
                last = len(sequence.output_token_ids) + 1 == length
                token_ids.append(_STOP if last else self._random_id())
                if row.group.beam is not None:
                    num_candidates = row.group.beam.num_candidates
                    candidate_ids += range(token_ids[-1] + 1, token_ids[-1] + 1 + num_candidates)
                    candidate_logprobs += self._decoding.candidates.draw(self._rng, num_candidates)
        logprobs = [-0.5] * len(token_ids)
        return StepResult(token_ids, logprobs, candidate_token_ids=candidate_ids, candidate_logprobs=candidate_logprobs)

    def _random_id(self) -> int:
        return self._rng.randrange(_FIRST_ID, _VOCABULARY_SIZE)

    def _drop_finished(self, plan: Plan) -> None:
        for row in plan.rows:
            if not row.group.live and row.group.number in self._live:
                del self._live[row.group.number]
                self._num_finished += 1
                if self._on_finished is not None:
                    self._on_finished()

    def _look(self, plan: Plan) -> None:
        """Counts the slots of all held blocks as they are once the step is computed."""
        block_size = self._pool.block_size
        computed = {id(row.sequence): row.start + row.num_new_tokens for row in plan.rows}
        # Of each block in a table: slots that are computed, and slots that belong to a known token.
        fills: dict[int, tuple[int, int]] = {}
        num_references = num_running = 0
        for group, _ in self._live.values():
            tables = [sequence for sequence in group.live if sequence.block_table]
            num_running += bool(tables)
            for sequence in tables:
                num_references += len(sequence.block_table)
                num_computed = computed.get(id(sequence), sequence.num_computed_tokens)
                for place, block in enumerate(sequence.block_table):
                    start = place * block_size
                    fill = (_clip(num_computed - start, block_size), _clip(sequence.num_tokens - start, block_size))
                    fills[block] = max(fill, fills.get(block, fill))
        blocks = self.core.blocks
        assert len(fills) == blocks.num_blocks - blocks.num_free, "a held block is in no live table"
        used = sum(fill for fill, _ in fills.values())
        known = sum(max(fill) for fill in fills.values())
        self._averages.add(used, known - used, len(fills) * block_size - known, num_running)
        self._sharing[0] += 1 - len(fills) / max(1, num_references)
        self._sharing[1] += blocks.num_idle / blocks.num_blocks


def _clip(number: int, limit: int) -> int:
    return max(0, min(number, limit))
