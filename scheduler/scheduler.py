"""The scheduler core: which tokens the next step computes. PREEMPTION IS DECIDED HERE.

Iteration-level scheduling (Orca, OSDI'22) over paged KV (Kwon et al., SOSP'23), with chunked prefill (Sarathi-Serve,
OSDI'24): `plan = schedule(now)`, the worker runs it, `update(plan, result)`. A pure state machine: no I/O, no clock, no
randomness; time is an argument, so that a test can drive every line of it and a recording can be replayed.

A sequence has tokens, and some of them are computed. There are no phases: a prompt, a chunk of it, a decode and the
recomputation after a preemption are all "compute the next tokens"; who reaches its last token samples one more.
"""

import enum
import heapq
import itertools
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from protos.sampling_pb2 import Sampling
from scheduler.block_manager import BlockManager
from scheduler.plan import Finished, NewTokens, Plan, Row, StepOutputs, StepResult
from scheduler.sequence import Sequence, SequenceGroup, Status


@dataclass(frozen=True, slots=True)
class Policy:
    """The bounds that the core keeps.

    Attributes:
        max_num_batched_tokens: tokens of a step at most, prefill and decode together.
        max_num_seqs: running sequences at most.
        max_waiting_requests: groups in the waiting queue at most.
        watermark: share of the blocks that admission leaves free, so that what runs can grow.
        prefix_caching: whether blocks are found again by the tokens in them.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_waiting_requests: int
    watermark: float = 0.01
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must be at least 1 and at most max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): every running sequence decodes one token a step"
            )
        if self.max_waiting_requests < 1:
            raise ValueError(f"max_waiting_requests ({self.max_waiting_requests}) must be at least 1")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark ({self.watermark}) must be in [0, 1)")


class QueueFull(Exception):
    """The waiting queue holds as many groups as it may; nothing was changed."""


class Admission(enum.Enum):
    """Whether a waiting group can have its blocks."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class Scheduler:
    """Owns all groups from submission to their end."""

    def __init__(self, policy: Policy, blocks: BlockManager) -> None:
        self.policy = policy
        self.blocks = blocks
        self.num_steps = 0
        self.num_preemptions = 0
        self._numbers = itertools.count(1)
        self._groups: dict[int, SequenceGroup] = {}
        # A heap by number, so by arrival: a preempted group comes back to its old place. Ended groups stay in it until
        # they surface, as in _deadlines.
        self._waiting: list[tuple[int, SequenceGroup]] = []
        self._deadlines: list[tuple[float, int, SequenceGroup]] = []
        # Oldest admission first.
        self._running: dict[int, SequenceGroup] = {}
        self._forget: list[int] = []
        self._num_watermark_blocks = int(policy.watermark * blocks.num_blocks)

    @property
    def num_running(self) -> int:
        """Groups that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Groups that wait for blocks."""
        return len(self._groups) - len(self._running)

    @property
    def next_deadline(self) -> float | None:
        """The time at which `schedule` has a group to drop, if it has nothing else to do."""
        self._skip_ended_deadlines()
        return self._deadlines[0][0] if self._deadlines else None

    def submit(
        self,
        *,
        request_id: str,
        prompt_token_ids: "array[int]",
        n: int,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: Iterable[int] = (),
        sampling: Sampling | None = None,
        salt: str = "",
        now: float,
        deadline: float | None = None,
    ) -> SequenceGroup:
        """Puts a new group at the end of the waiting queue.

        Raises:
            ValueError: no prompt, no tokens wanted, or more sequences than can ever run together.
            QueueFull: the queue is at its bound.
        """
        if not prompt_token_ids or n < 1 or max_tokens < 1:
            raise ValueError("a request needs a prompt, at least one sequence and at least one token")
        if n > self.policy.max_num_seqs:
            raise ValueError(f"n ({n}) is more than the {self.policy.max_num_seqs} sequences that run together")
        if self.num_waiting >= self.policy.max_waiting_requests:
            raise QueueFull(f"{self.num_waiting} requests are waiting already")
        group = SequenceGroup(
            number=next(self._numbers),
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            n=n,
            max_tokens=min(max_tokens, self._max_tokens_that_fit(len(prompt_token_ids), n)),
            min_tokens=min_tokens,
            stop_token_ids=frozenset(stop_token_ids),
            sampling=sampling,
            arrival=now,
            salt=salt,
            deadline=deadline,
        )
        self._groups[group.number] = group
        self._drop_ended(self._waiting)
        heapq.heappush(self._waiting, (group.number, group))
        self._drop_ended(self._deadlines)
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, group.number, group))
        return group

    def abort(self, group: SequenceGroup) -> None:
        """Ends all of a group's sequences now; its blocks are free on return. A group that has ended stays as it is."""
        for sequence in list(group.live):
            self._finish(group, sequence, Status.FINISHED_ABORTED)

    def stop(self, group: SequenceGroup, sequence_index: int) -> Finished | None:
        """Ends one sequence, in whose text the router found a stop string; the group's others go on.

        Returns:
            None when it has ended already.
        """
        for sequence in group.live:
            if sequence.index == sequence_index:
                self._finish(group, sequence, Status.FINISHED_STOPPED)
                return Finished(group, sequence)
        return None

    def requeue_running(self) -> list[SequenceGroup]:
        """The worker is gone and all KV with it: every running group goes back to its place in the waiting queue.

        Returns:
            The groups, to be computed again.
        """
        lost = list(self._running.values())
        for group in lost:
            group.num_failed_steps += 1
            self._to_waiting(group)
        for group in self._groups.values():
            group.known_to_worker = False
        self._forget.clear()
        self.blocks.disown_all()
        return lost

    def replace_pool(self, blocks: BlockManager) -> None:
        """Takes another pool, of a new worker, while no group runs; requests too long for it end earlier."""
        assert not self._running, "blocks are held"
        self.blocks = blocks
        self._num_watermark_blocks = int(self.policy.watermark * blocks.num_blocks)
        for group in self._groups.values():
            group.max_tokens = min(group.max_tokens, self._max_tokens_that_fit(group.num_prompt_tokens, group.n))

    def schedule(self, now: float) -> Plan:
        """Plans one step: running groups oldest first, decodes before chunks, then new groups while there is room."""
        self.num_steps += 1
        plan = Plan(self.num_steps)
        self._drop_expired(plan, now)
        self._schedule_running(plan)
        for row in plan.rows:
            self._remember(row)
        if not plan.num_preempted:
            self._admit(plan, now)
        if plan.rows:
            plan.forget, self._forget = self._forget, []
        assert plan.num_tokens <= self.policy.max_num_batched_tokens, "over budget"
        return plan

    def update(self, plan: Plan, result: StepResult) -> StepOutputs:
        """Takes a step's tokens: appends them, forks where a prompt is done, ends what is finished.

        Groups that ended while the step ran are passed over; what the step computed for them is lost with their blocks.
        """
        outputs = StepOutputs()
        failed = set(result.failed)
        place = 0
        for row in plan.rows:
            group, sequence = row.group, row.sequence
            group.num_failed_steps = 0
            first_place, place = place, place + len(row.samples)
            if failed and not failed.isdisjoint(range(first_place, place)):
                if group.live:
                    outputs.failed.append(group)
                    for live in group.live:
                        self.blocks.disown(live)
                    self.abort(group)
                continue
            if sequence.status is Status.RUNNING:
                sequence.num_computed_tokens = row.start + row.num_new_tokens
                if not group.forked and sequence.num_computed_tokens == group.num_prompt_tokens:
                    self._fork(group)
            for i, sampled in enumerate(row.samples, first_place):
                if sampled.status is Status.RUNNING:
                    self._append(group, sampled, result.token_ids[i], result.logprobs[i], outputs)
        return outputs

    def check(self) -> None:
        """Asserts the invariants of queues and blocks; for tests, after every step."""
        self.blocks.check(sequence for group in self._groups.values() for sequence in group.sequences)
        waiting = {group.number for _, group in self._waiting if group.live and group.number not in self._running}
        assert waiting | self._running.keys() == self._groups.keys(), "a live group is in no queue"
        for group in self._groups.values():
            status = Status.RUNNING if group.number in self._running else Status.WAITING
            assert group.live, "an ended group is still here"
            assert all(sequence.status is status for sequence in group.live), "a sequence is in two queues"
            assert all(s.status.finished and not s.block_table for s in group.sequences if s not in group.live)
            if status is Status.WAITING:
                assert not any(sequence.block_table for sequence in group.live), "a waiting group holds blocks"
        assert sum(len(group.live) for group in self._running.values()) <= self.policy.max_num_seqs

    # Running groups

    def _schedule_running(self, plan: Plan) -> None:
        # Decodes are one token each and always fit; what they leave of the budget goes to longer chunks, oldest first.
        chunk_budget = self.policy.max_num_batched_tokens - sum(len(group.live) for group in self._running.values())
        for group in list(self._running.values()):
            if group.number not in self._running:  # preempted for an older one
                continue
            first_row, first_copy = len(plan.rows), len(plan.blocks_to_copy)
            for sequence in group.live if group.forked else (group.root,):
                wanted = group.target(sequence) - sequence.num_computed_tokens
                num_new_tokens = 1 + min(wanted - 1, chunk_budget)
                if not self._reserve(plan, group, sequence, num_new_tokens):  # all or nothing
                    plan.num_tokens -= sum(row.num_new_tokens for row in plan.rows[first_row:])
                    del plan.rows[first_row:], plan.blocks_to_copy[first_copy:]
                    return
                chunk_budget -= num_new_tokens - 1
                self._add_row(plan, group, sequence, num_new_tokens)

    def _reserve(self, plan: Plan, group: SequenceGroup, sequence: Sequence, num_new_tokens: int) -> bool:
        """Gets blocks for a sequence's next tokens, from the newest groups where too few are free.

        Returns:
            False when that came down to its own group, which is preempted then.
        """
        num_tokens = sequence.num_computed_tokens + num_new_tokens
        while self.blocks.num_blocks_to_append(sequence, num_tokens) > self.blocks.num_free:
            victim = next(reversed(self._running.values()))
            assert len(self._running) > 1, "a group alone has no room, though its max_tokens fits"
            self._preempt(plan, victim)
            if victim is group:
                return False
        plan.blocks_to_copy += self.blocks.append_slots(sequence, num_tokens)
        return True

    def _preempt(self, plan: Plan, victim: SequenceGroup) -> None:
        """Takes all of a group's blocks; its tokens are computed again later (recompute, SOSP'23 section 4.5)."""
        plan.num_preempted += 1
        self.num_preemptions += 1
        victim.num_preemptions += 1
        self._to_waiting(victim)

    def _add_row(self, plan: Plan, group: SequenceGroup, sequence: Sequence, num_new_tokens: int) -> Row:
        samples: tuple[Sequence, ...] | list[Sequence] = ()
        end = sequence.num_computed_tokens + num_new_tokens
        if group.forked:
            samples = (sequence,) if end == sequence.num_tokens else ()
        elif end == group.num_prompt_tokens and end == sequence.num_tokens:
            samples = list(group.live)
        if not group.known_to_worker:
            group.known_to_worker = True
            plan.new_groups.append(group)
        row = Row(group, sequence, sequence.num_computed_tokens, num_new_tokens, samples)
        plan.rows.append(row)
        plan.num_tokens += num_new_tokens
        return row

    def _remember(self, row: Row) -> None:
        """Lets later rows, of this step already, find the blocks that `row` fills.

        The worker writes the KV of a step's tokens before it attends to them, layer by layer, so a row may build on
        what another row of the same step computes. A row that is remembered is sent: nothing takes it back.
        """
        if self.policy.prefix_caching:
            self.blocks.remember(row.group, row.sequence, row.start + row.num_new_tokens)

    # Waiting groups

    def _admit(self, plan: Plan, now: float) -> None:
        num_seqs = sum(len(group.live) for group in self._running.values())
        while plan.num_tokens < self.policy.max_num_batched_tokens and (group := self._first_waiting()):
            root = group.root
            tokens = group.token_ids(root, 0, group.target(root))
            prefix = self.blocks.match(tokens, group.salt) if self.policy.prefix_caching else []
            admission = self._can_allocate(group, prefix)
            if admission is Admission.NEVER:
                message = (
                    f"{group.n} x (a prompt of {group.num_prompt_tokens} tokens and one more) need more than the "
                    f"{self.blocks.num_blocks} KV blocks of {self.blocks.block_size} tokens that there are"
                )
                for sequence in list(group.live):
                    # With output it had its blocks once, in a larger pool of an earlier worker.
                    capped = bool(sequence.output_token_ids)
                    self._finish(group, sequence, Status.FINISHED_LENGTH_CAPPED if capped else Status.FINISHED_IGNORED)
                    plan.ignored.append(Finished(group, sequence, message=message))
                continue
            num_seqs += len(group.live)
            if admission is Admission.LATER or num_seqs > self.policy.max_num_seqs:
                return
            heapq.heappop(self._waiting)
            self._running[group.number] = group
            for sequence in group.live:
                sequence.move_to(Status.RUNNING)
            self.blocks.allocate(root, len(tokens), prefix)
            if group.first_scheduled is None:
                group.first_scheduled = now
                group.num_cached_prompt_tokens = root.num_computed_tokens
            budget = self.policy.max_num_batched_tokens - plan.num_tokens
            self._remember(self._add_row(plan, group, root, min(len(tokens) - root.num_computed_tokens, budget)))

    def _first_waiting(self) -> SequenceGroup | None:
        while self._waiting and not self._waiting[0][1].live:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _can_allocate(self, group: SequenceGroup, prefix: list[tuple[int, int]]) -> Admission:
        """OK leaves the watermark free, unless nothing else runs: then nobody else is there to grow."""
        num_blocks = self._num_blocks_to_readmit(group)
        if num_blocks > self.blocks.num_blocks:
            return Admission.NEVER
        watermark = self._num_watermark_blocks if self._running else 0
        num_taken = num_blocks - self.blocks.num_held_of(prefix)
        return Admission.OK if num_taken <= self.blocks.num_free - watermark else Admission.LATER

    def _num_blocks_to_readmit(self, group: SequenceGroup) -> int:
        """Blocks for the group's tokens and one more each: full prompt blocks once, the rest for each sequence."""
        num_shared = group.num_prompt_tokens // self.blocks.block_size
        return num_shared + sum(self.blocks.num_blocks_for(s.num_tokens + 1) - num_shared for s in group.live)

    def _max_tokens_that_fit(self, num_prompt_tokens: int, n: int) -> int:
        """Output tokens at which n sequences alone fill the pool.

        Capping a request by it means that a group alone can always grow, so that the oldest never waits. A prompt that
        leaves no room is refused at admission, whatever this says.
        """
        num_shared = num_prompt_tokens // self.blocks.block_size
        num_own_tokens = (self.blocks.num_blocks - num_shared) // n * self.blocks.block_size
        return max(1, num_shared * self.blocks.block_size + num_own_tokens - num_prompt_tokens)

    def _drop_expired(self, plan: Plan, now: float) -> None:
        self._skip_ended_deadlines()
        while self._deadlines and self._deadlines[0][0] <= now:
            group = heapq.heappop(self._deadlines)[2]
            self.abort(group)
            plan.expired.append(group)
            self._skip_ended_deadlines()

    def _skip_ended_deadlines(self) -> None:
        while self._deadlines and not self._deadlines[0][2].live:
            heapq.heappop(self._deadlines)

    def _drop_ended(self, heap: list) -> None:
        """Keeps a heap within twice the live groups, at constant cost a submission."""
        if len(heap) > 2 * len(self._groups) + 64:
            heap[:] = [entry for entry in heap if entry[-1].live]
            heapq.heapify(heap)

    # Changes of a group

    def _fork(self, group: SequenceGroup) -> None:
        root = group.root
        for child in group.live[1:]:
            self.blocks.fork(root, child)
            child.num_computed_tokens = root.num_computed_tokens
        group.forked = True

    def _append(
        self, group: SequenceGroup, sequence: Sequence, token_id: int, logprob: float, outputs: StepOutputs
    ) -> None:
        first_index = len(sequence.output_token_ids)
        sequence.append(token_id, logprob)
        outputs.new_tokens.append(NewTokens(group, sequence, first_index))
        num_output_tokens = first_index + 1
        if token_id in group.stop_token_ids and num_output_tokens > group.min_tokens:
            self._finish(group, sequence, Status.FINISHED_STOPPED)
            outputs.finished.append(Finished(group, sequence, stop_token_id=token_id))
        elif num_output_tokens >= group.max_tokens:
            self._finish(group, sequence, Status.FINISHED_LENGTH_CAPPED)
            outputs.finished.append(Finished(group, sequence))

    def _to_waiting(self, group: SequenceGroup) -> None:
        del self._running[group.number]
        for sequence in group.live:
            self.blocks.free(sequence)
            sequence.move_to(Status.WAITING)
        group.forked = len(group.live) == 1
        heapq.heappush(self._waiting, (group.number, group))

    def _finish(self, group: SequenceGroup, sequence: Sequence, status: Status) -> None:
        """Ends a sequence and, with its last one, the group."""
        sequence.move_to(status)
        self.blocks.free(sequence)
        group.live.remove(sequence)
        if not group.live:
            del self._groups[group.number]
            self._running.pop(group.number, None)
            if group.known_to_worker:
                self._forget.append(group.number)
