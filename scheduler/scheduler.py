"""The scheduler core: which tokens the next step computes. PREEMPTION IS DECIDED HERE.

Iteration-level scheduling (Orca, OSDI'22) over paged KV (Kwon et al., SOSP'23), with chunked prefill (Sarathi-Serve,
OSDI'24): `plan = schedule(now)`, the worker runs it, `update(plan, result)`. More steps may be planned before the first
is answered (`in_flight.py`). A pure state machine: no I/O, no clock, no randomness; time is an argument, so that a test
can drive every line of it and a recording can be replayed.

A sequence has tokens, and some of them are computed. There are no phases: a prompt, a chunk of it, a decode and the
recomputation after a preemption are all "compute the next tokens"; a sequence that reaches its last token samples one
more.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from protos.columns import next_number
from protos.sampling_pb2 import Sampling
from scheduler.admission import (
    Admission,
    Blocked,
    Reason,
    can_allocate,
    check_room,
    check_submission,
    max_tokens_that_fit,
    num_blocks_to_swap_in,
    should_follow,
    why_never,
)
from scheduler.beam import BeamParams, BeamSearch
from scheduler.block_manager import BlockManager
from scheduler.deadlines import Deadlines, too_late
from scheduler.decoding import Decoder
from scheduler.drafts import add_drafts
from scheduler.in_flight import StepsInFlight, add_row
from scheduler.lanes import deal
from scheduler.plan import Finished, Plan, StepOutputs, StepResult
from scheduler.policy import Policy, PreemptionMode
from scheduler.preemption import Preemption, Rates, choose_mode
from scheduler.queues import Queues
from scheduler.sequence import Progress, Sequence, SequenceGroup, Status
from scheduler.suspects import RUN_APART, Conviction, Suspects

# While suspects are on trial, the token budget of a step is divided by this.
_TRIAL_BUDGET_DIVISOR = 4


class Scheduler:
    """Owns all groups from submission to their end.

    Attributes:
        queues: where each group is.
        rates: how fast the worker is, as measured.
        num_prompt_tokens: prompt tokens of all groups admitted so far, each group counted once.
        num_looked_up_tokens: how many of those were looked up in the prefix cache.
        num_found_tokens: how many of those were found there.
        in_flight: the steps that the worker has not answered.
        suspects: groups that may have killed a worker.
    """

    def __init__(self, policy: Policy, blocks: BlockManager) -> None:
        self.policy = policy
        self.queues = Queues(blocks)
        self.rates = Rates()
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_swap_outs = 0
        self.num_swap_ins = 0
        self.num_prompt_tokens = 0
        self.num_looked_up_tokens = 0
        self.num_found_tokens = 0
        self.in_flight = StepsInFlight(policy.max_steps_in_flight)
        self.suspects = Suspects(policy.max_failed_steps, self.queues, self.in_flight)
        self._decoder = Decoder(self.queues, cached=policy.prefix_caching)
        self._deadlines = Deadlines()
        self._last_number = 0
        self._blocked: Blocked | None = None
        # The group that the last plan could not admit or swap in, and what it lacked.
        self._held_up: tuple[SequenceGroup, Reason] | None = None
        # Whether the last step, without chunked prefill, was a prefill step; how long the last step with prefill took.
        self._prefilled_last = False
        self._prefill_step_s = 0.0

    @property
    def blocks(self) -> BlockManager:
        """The pools."""
        return self.queues.blocks

    @property
    def num_live(self) -> int:
        """Groups that have not ended."""
        return len(self.queues.groups)

    @property
    def num_running(self) -> int:
        """Groups that hold blocks."""
        return len(self.queues.running)

    @property
    def num_swapped(self) -> int:
        """Groups whose blocks are in the swap pool."""
        return len(self.queues.swapped)

    @property
    def num_waiting(self) -> int:
        """Groups that wait for blocks."""
        return len(self.queues.waiting)

    @property
    def next_deadline(self) -> float | None:
        """When `schedule` next has a deadline to check, even if it has nothing else to do; None for never."""
        return self._deadlines.next_time

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
        beam: BeamParams | None = None,
        priority: int = 0,
        salt: str = "",
        tenant: str = "",
        tenant_weight: float = 1.0,
        now: float,
        deadline: float | None = None,
        progress: Seq[Progress] | None = None,
        waited_s: float = 0.0,
    ) -> SequenceGroup:
        """Puts a new group into the waiting queue.

        With `progress`, another scheduler had accepted the group, and its sequences had that output there: the queue's
        bounds do not apply to it, and the `waited_s` seconds since then count towards its place in the queue.

        Raises:
            ValueError: no prompt, no tokens wanted, more sequences than can ever run together, no such priority, a
                beam search with penalties or log-probabilities, or progress that does not fit.
            QueueFull: the queue is at a bound.
        """
        num_tokens = len(prompt_token_ids)
        check_submission(self.policy, num_tokens, n, max_tokens, beam, priority)
        if progress is None:
            check_room(self.policy, self.queues.waiting, num_tokens, tenant, now)
        number = self._last_number = next_number(self._last_number, self.queues.groups)
        stops = frozenset(stop_token_ids)
        group = SequenceGroup(
            number=number,
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            n=n,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            sampling=sampling,
            arrival=now,
            rank=(now - waited_s - priority * self.policy.aging_s, number),
            salt=salt,
            tenant=tenant,
            tenant_weight=tenant_weight,
            deadline=deadline,
            beam=BeamSearch(beam, stops, min_tokens) if beam is not None else None,
            runs_ahead=self.in_flight.num_concurrent == 1,
        )
        if progress:
            group.take_up(progress)
        self._cap(group)
        self.queues.submit(group)
        if deadline is not None:
            self._deadlines.watch(group, self.rates, self.num_live)
        return group

    def set_deadline(self, group: SequenceGroup, deadline: float | None) -> None:
        """The group has another client, which waits until `deadline`; None: for ever."""
        self._deadlines.forget(group)
        group.deadline = deadline
        if deadline is not None:
            self._deadlines.watch(group, self.rates, self.num_live)

    def abort(self, group: SequenceGroup) -> None:
        """Ends all of a group's sequences now; its blocks are free on return. A group that has ended stays as it is."""
        for sequence in list(group.live):
            self.queues.finish(group, sequence, Status.FINISHED_ABORTED)

    def stop(self, group: SequenceGroup, sequence_index: int, num_tokens: int | None = None) -> Finished | None:
        """Ends one sequence, in whose text the router found a stop string; the group's others go on.

        Args:
            group: the sequence's group.
            sequence_index: its index in the group.
            num_tokens: output tokens up to the stop string's end; those sampled since are dropped. None keeps all.

        Returns:
            None if it has already ended, or is a beam, whose text no router has seen.
        """
        for sequence in group.live if group.beam is None else ():
            if sequence.index == sequence_index:
                self._blocked = None  # it may need fewer blocks now
                self.queues.finish(group, sequence, Status.FINISHED_STOPPED)
                if num_tokens is not None:
                    sequence.cut(num_tokens)
                return Finished(group, sequence)
        return None

    def preempt(self, group: SequenceGroup, by: SequenceGroup | None = None) -> Preemption:
        """Takes a running group's blocks, in the mode that the policy chooses, until its turn comes again."""
        assert group.status is Status.RUNNING, f"a group that is {group.status.name} has no blocks to take"
        return self._preempt(group, *choose_mode(group, self.policy.preemption_mode, self.blocks, self.rates), by)

    def _preempt(
        self, group: SequenceGroup, mode: PreemptionMode, reason: str, by: SequenceGroup | None = None
    ) -> Preemption:
        self.num_preemptions += 1
        group.num_preemptions += 1
        group.preempted_by = by.request_id if by is not None and by is not group else ""
        group.preemption_reason = reason
        group.returns_after = self.in_flight.last
        if mode is PreemptionMode.SWAP:
            self.num_swap_outs += 1
            self.queues.swap_out(group)
        else:
            self.queues.preempt(group)
        return Preemption(group, mode, reason)

    def requeue_running(self, *, in_order: bool = False) -> tuple[list[SequenceGroup], Conviction | None]:
        """Puts every group back into the waiting queue: the worker is gone, with all KV and the steps in flight.

        Args:
            in_order: whether the worker left in order, without running the steps that it did not answer. Otherwise one
                of them may have killed it.

        Returns:
            The groups that were running or had something in flight, which have to be computed again; and the conviction
            of the one among them, if any, that is given up instead and has ended.
        """
        groups = self.queues.groups.values()
        lost = [group for group in groups if group.status is Status.RUNNING or self.in_flight.hold(group)]
        conviction = None if in_order else self.suspects.accuse()
        self.in_flight.lose()
        self.queues.forget_worker()
        self._blocked = self._held_up = None
        if conviction is not None:
            self.abort(conviction.group)
        return lost, conviction

    def replace_pool(self, blocks: BlockManager) -> None:
        """Takes a new worker's pools, while nothing holds blocks; requests too long for them will end earlier."""
        assert not self.queues.running + self.queues.swapped, "blocks are held"
        self.queues.blocks = blocks
        for group in self.queues.groups.values():
            self._cap(group)

    def _cap(self, group: SequenceGroup) -> None:
        """Bounds the output of a group's unfinished sequences by what the pool can hold."""
        most = max_tokens_that_fit(group.num_prompt_tokens, group.num_seqs, self.blocks)
        group.cap(min(group.wanted_max_tokens, most))

    def set_num_concurrent_steps(self, num_steps: int) -> None:
        """Sets how many steps a new worker works on at the same time; none may be in flight now."""
        assert not self.in_flight, "steps are in flight"
        self.in_flight.num_concurrent = num_steps
        for group in self.queues.groups.values():
            group.runs_ahead = num_steps == 1
            group.cap(group.max_tokens)

    def note_swap(self, num_blocks: int, swap_s: float) -> None:
        """Takes how long the worker took to swap blocks: in a step, or when it measured this before its first."""
        self.rates.note_swap(num_blocks, swap_s / self.in_flight.num_concurrent)

    def schedule(self, now: float) -> Plan:
        """Plans one step.

        Running groups go first, oldest first; then swapped groups come back; then waiting groups are admitted, as long
        as the budgets of tokens and sequences and the free blocks allow. Without chunked prefill, prefill steps and
        decode steps alternate while there is work for both.
        """
        self.in_flight.check_room()
        self.num_steps += 1
        plan = Plan(self.num_steps)
        plan.dropped = self._deadlines.take_late(now, self.blocks, self._rates_to_refuse_by)
        for dropped in plan.dropped:
            self.abort(dropped.group)
        in_the_way = self.suspects.turn(self._held_up[1] if self._held_up is not None else None)
        if in_the_way is None:
            return plan
        apart = [self._preempt(group, PreemptionMode.RECOMPUTE, RUN_APART) for group in in_the_way]
        self._held_up = None
        if self.policy.chunked_prefill:
            self._schedule_running(plan)
            self._swap_in(plan)
            self._admit(plan, now)
        else:
            for prefilling in (False, True) if self._prefilled_last else (True, False):
                if not plan.rows:
                    self._schedule_running(plan, prefilling)
                    self._swap_in(plan, prefilling)
                    if prefilling:
                        self._admit(plan, now)
                    self._prefilled_last = prefilling
        if plan.rows:
            if self.policy.num_speculative_tokens and not self.suspects:
                num_tokens_left = self._budget - plan.num_tokens
                num_blocks_left = max(0, self.blocks.num_free - self.num_reserved())
                add_drafts(plan, self.policy.num_speculative_tokens, num_tokens_left, num_blocks_left, self.blocks)
            self.in_flight.add(plan)
            plan.blocks_to_swap_out = self.blocks.take_swapped_out()
            plan.forget = self.queues.take_gone()
            self.queues.waiting.charge(row.group for row in plan.rows if row.draft is None for _ in row.samples)
        plan.preempted += apart
        assert plan.num_tokens <= self.policy.max_num_batched_tokens, "over budget"
        return plan

    def update(self, plan: Plan, result: StepResult) -> StepOutputs:
        """Takes the tokens of the oldest step in flight: appends them, forks beams, ends what is finished.

        Sequences that ended while the step ran are skipped.
        """
        if plan.rows:
            self.in_flight.answer(plan.step_id)
        # Of several steps at once, each holds the others up for only a share of its own time.
        step_s = result.step_s / self.in_flight.num_concurrent
        if plan.num_prefill_tokens:
            self._prefill_step_s = step_s
        self.rates.note_step(plan.num_tokens, plan.num_prefill_tokens, step_s)
        self.note_swap(len(plan.blocks_to_swap_out) + len(plan.blocks_to_swap_in), result.swap_s)
        outputs = self._decoder.decode(plan, result)
        self.suspects.clear(plan)
        return outputs

    def check(self) -> None:
        """Asserts the invariants of queues and blocks; for tests, after every step."""
        self.queues.check(self.policy.max_num_seqs)
        self.in_flight.check(self.queues.groups.values())
        self.suspects.check()

    @property
    def _budget(self) -> int:
        """The next step's token budget; small while suspects are on trial, so that streams resume soon after a loss."""
        most = self.policy.max_num_batched_tokens
        return max(self.policy.max_num_seqs, most // _TRIAL_BUDGET_DIVISOR) if self.suspects else most

    @property
    def _rates_to_refuse_by(self) -> Rates:
        """The rates by which a deadline counts as out of reach; none are used while nothing runs.

        Trying then costs nobody anything, and gives a new measurement. Otherwise one slow step could refuse every later
        request.
        """
        return self.rates if self.queues.running or self.in_flight else Rates()

    # What runs

    def _schedule_running(self, plan: Plan, prefilling: bool | None = None) -> None:
        """Adds rows for the running groups: all, or only those that are prefilling, or only those that are not."""
        has_slots, blocks, cached = self.blocks.has_slots, self.blocks, self.policy.prefix_caching
        groups = [group for group in self.queues.running if prefilling is None or prefilling == group.prefilling]
        if (num_lanes := self.in_flight.num_concurrent) > 1:
            groups = deal(groups, num_lanes, self.in_flight.num_free)
        running = Status.RUNNING
        # Every row gets one token. The rest of the budget goes to longer chunks, oldest first.
        chunk_budget = self._budget - sum([group.num_rows for group in groups])
        for group in groups:
            sequence = group.live[0]
            if sequence.status is not running:
                break  # preempted for an older one, and so are all behind it
            # Nearly all rows are like this: one more token, with a slot in a block that the sequence has.
            if (
                len(group.live) == 1
                and sequence.num_expected_tokens == sequence.num_computed_tokens + 1
                and has_slots(sequence, sequence.num_expected_tokens)
            ):
                add_row(plan, group, sequence, 1, blocks, cached=cached)
            else:
                chunk_budget -= self._schedule_group(plan, group, chunk_budget)

    def _schedule_group(self, plan: Plan, group: SequenceGroup, chunk_budget: int) -> int:
        """Adds rows for all sequences of a running group, or for none if the group itself is preempted.

        Returns:
            Tokens taken from `chunk_budget`: all but the first of each row.
        """
        blocks = self.blocks
        num_extra, rows, growth = 0, [], []
        for sequence, target in group.targets():
            num_missing = target - sequence.num_computed_tokens
            if num_missing > 0:
                extra = min(num_missing - 1, chunk_budget - num_extra)
                num_extra += extra
                rows.append((sequence, 1 + extra))
                if not blocks.has_slots(sequence, end := sequence.num_computed_tokens + 1 + extra):
                    growth.append((sequence, end))
        if growth and not self._reserve(plan, group, growth):
            return 0
        for sequence, num_new_tokens in rows:
            add_row(plan, group, sequence, num_new_tokens, blocks, cached=self.policy.prefix_caching)
        return num_extra

    def _reserve(self, plan: Plan, group: SequenceGroup, growth: list[tuple[Sequence, int]]) -> bool:
        """Gets blocks for a group's next tokens; while too few are free, preempts the group of the highest rank.

        Returns:
            False if that was at last the group itself, which is then preempted.
        """
        while self.blocks.num_blocks_to_append(growth) > self.blocks.num_free:
            victim = self.queues.running[-1]
            assert victim is not self.queues.running[0], "a group alone has no room, though its max_tokens fits"
            plan.preempted.append(self.preempt(victim, by=group))
            if victim is group:
                return False
        for sequence, num_tokens in growth:
            plan.blocks_to_copy += self.blocks.append_slots(sequence, num_tokens)
        return True

    # What waits

    def _swap_in(self, plan: Plan, prefilling: bool | None = None) -> None:
        """Brings groups back from the swap pool, oldest first, until one has to wait."""
        queues = self.queues
        while queues.swapped and prefilling in (None, queues.swapped[0].prefilling):
            group = queues.swapped[0]
            if (reason := self._why_not_back(group, plan)) is not None:
                self._held_up = (group, reason)
                return
            self._blocked = None
            plan.blocks_to_swap_in += queues.swap_in(group)
            plan.resumed.append(group)
            self.num_swap_ins += 1
            if self.policy.prefix_caching:
                for sequence in group.live:  # all at once, so that those that share a block agree on what it holds
                    self.blocks.remember(group, sequence, sequence.num_computed_tokens)
            self._schedule_group(plan, group, self._budget - plan.num_tokens - group.num_rows)

    def _why_not_back(self, group: SequenceGroup, plan: Plan) -> Reason | None:
        """What keeps the first swapped group out, if anything; BLOCKS, if others have just lost theirs."""
        if self.in_flight.hold(group):
            return Reason.NEXT_STEP
        if self._budget - plan.num_tokens < group.num_rows:
            return Reason.TOKENS
        if plan.preempted or self._is_blocked(group):
            return Reason.BLOCKS
        num_blocks = num_blocks_to_swap_in(group, self.blocks) + self.num_reserved()
        if self.queues.running and num_blocks > self.blocks.num_free:  # alone it fits: its max_tokens ensures that
            self._blocked = Blocked(group, num_blocks)
            return Reason.BLOCKS
        return None

    def _admit(self, plan: Plan, now: float) -> None:
        """Admits waiting groups in turn; the first that cannot come in holds up all others: none is overtaken."""
        while (group := self.suspects.head_of(self.queues.waiting)) and not self.queues.swapped:
            if (reason := self._let_in(group, plan, now)) is not None:
                self._held_up = (group, reason)
                return

    def _let_in(self, group: SequenceGroup, plan: Plan, now: float) -> Reason | None:
        """Admits the first waiting group, or ends it if it cannot run, or not in time; else returns what it lacks."""
        num_tokens_left = self._budget - plan.num_tokens
        if (reason := self._why_not_yet(group, plan, num_tokens_left, now)) is not None:
            return reason
        if group.beam is None and self._decoder.end_outgrown(plan, group):
            return None
        tokens = group.token_ids(group.root, 0, group.targets()[0][1])
        looks_up = self.policy.prefix_caching and not group.owes_prompt_logprobs
        prefix = self.blocks.match(tokens, group.salt) if looks_up else []
        admission, num_free_needed = can_allocate(group, prefix, self.blocks, self.num_reserved())
        if admission is Admission.NEVER:
            self._decoder.end_unfinished(plan, group, why_never(group, self.blocks))
            return None
        if admission is Admission.LATER:
            self._blocked = Blocked(group, num_free_needed, *((tokens, prefix) if looks_up else ()))
            return Reason.BLOCKS
        num_missing = len(tokens) - len(prefix) * self.blocks.block_size
        if not self.policy.chunked_prefill and plan.rows and num_missing > num_tokens_left:
            return Reason.TOKENS  # only a prompt longer than a whole step is cut
        num_tokens = min(num_missing, num_tokens_left)
        if self.policy.chunked_prefill and should_follow(plan, num_tokens, len(self.queues.waiting), self.rates):
            return Reason.NEXT_STEP
        if (dropped := too_late(group, num_missing, self._rates_to_refuse_by, now)) is not None:
            plan.dropped.append(dropped)
            self.abort(group)
            return None
        self._blocked = None
        self.queues.admit(group, len(tokens), prefix)
        if group.first_scheduled is None:
            self._note_first_admission(group, now, looked_up=looks_up)
        else:
            plan.resumed.append(group)
        add_row(plan, group, group.root, num_tokens, self.blocks, cached=self.policy.prefix_caching)
        return None

    def _note_first_admission(self, group: SequenceGroup, now: float, *, looked_up: bool) -> None:
        group.first_scheduled = now
        group.num_cached_prompt_tokens = min(group.root.num_computed_tokens, group.num_prompt_tokens)
        self.num_prompt_tokens += group.num_prompt_tokens
        self.num_looked_up_tokens += group.num_prompt_tokens if looked_up else 0
        self.num_found_tokens += group.num_cached_prompt_tokens

    def _why_not_yet(self, group: SequenceGroup, plan: Plan, num_tokens_left: int, now: float) -> Reason | None:
        """What keeps the first waiting group out, if anything, as far as one can tell without looking at its tokens."""
        if self.in_flight.hold(group):
            return Reason.NEXT_STEP
        if plan.preempted or self._is_blocked(group):
            return Reason.BLOCKS
        if not num_tokens_left:
            return Reason.TOKENS
        if self.queues.num_running_seqs + group.num_seqs > self.policy.max_num_seqs:
            return Reason.SEQUENCES
        # The delay factor lets prompts gather, so that decodes are held up less often.
        delay_s = self.policy.delay_factor * self._prefill_step_s
        return Reason.DELAY if self.queues.running and now - group.arrival < delay_s else None

    def held_up(self, group: SequenceGroup) -> Reason | None:
        """What held this group up in the last plan; None if nothing did, or no plan has looked at it yet."""
        return self._held_up[1] if self._held_up is not None and self._held_up[0] is group else None

    def num_reserved(self) -> int:
        """Blocks that admission leaves free (the watermark), so that what runs can grow; none when nothing runs."""
        return int(self.policy.watermark * self.blocks.num_blocks) if self.queues.running else 0

    def _is_blocked(self, group: SequenceGroup) -> bool:
        return self._blocked is not None and bool(self.queues.running) and self._blocked.holds(group, self.blocks)
