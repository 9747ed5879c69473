"""Random walks over the scheduler core: whatever happens, no block leaks, no token is lost, everything ends once.

Submit, plan, answer, abort, stop, preempt, lose the worker, go on with what another scheduler began, let time pass, in
any order, with up to three steps in flight, of a worker that works at one of them or at all, under any policy;
`check()` after each. Forks, copies, swaps, evictions and deadlines come of themselves in pools this small. `make soak`
walks for millions of steps.
"""

import os
from array import array
from collections import deque
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_model import STOP, Memory, expected_outputs, run

from protos.sampling_pb2 import Sampling
from scheduler.admission import QueueFull
from scheduler.beam import BeamParams, EarlyStopping
from scheduler.block_manager import BlockManager
from scheduler.plan import Plan
from scheduler.policy import Policy, PreemptionMode
from scheduler.scheduler import Scheduler
from scheduler.sequence import Progress, SequenceGroup, Status

MAX_WAITING_REQUESTS, MAX_WAITING_TOKENS = 6, 60

beams = st.builds(
    BeamParams,
    width=st.integers(1, 4),
    length_penalty=st.sampled_from([1.0, 0.0, 2.0, -1.0]),
    early_stopping=st.sampled_from(EarlyStopping),
)


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler, its worker's memory, and all that happens to them."""

    @initialize(
        num_blocks=st.integers(6, 30),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(4, 6),
        spare_budget=st.integers(0, 12),
        num_swap_blocks=st.sampled_from([0, 3, 20]),
        mode=st.sampled_from(PreemptionMode),
        chunked_prefill=st.booleans(),
        prefix_caching=st.booleans(),
        watermark=st.sampled_from([0.0, 0.1, 0.5]),
        max_steps_in_flight=st.sampled_from([1, 1, 1, 2, 2, 3]),
        num_concurrent_steps=st.sampled_from([1, 1, 2, 3]),
        num_speculative_tokens=st.sampled_from([0, 1, 5]),
    )
    def start(
        self,
        num_blocks,
        block_size,
        max_num_seqs,
        spare_budget,
        num_swap_blocks,
        mode,
        chunked_prefill,
        prefix_caching,
        watermark,
        max_steps_in_flight,
        num_concurrent_steps,
        num_speculative_tokens,
    ):
        policy = Policy(
            max_num_batched_tokens=max_num_seqs + spare_budget,
            max_num_seqs=max_num_seqs,
            max_waiting_requests=MAX_WAITING_REQUESTS,
            max_waiting_tokens=MAX_WAITING_TOKENS,
            watermark=watermark,
            prefix_caching=prefix_caching,
            chunked_prefill=chunked_prefill,
            delay_factor=0.0 if chunked_prefill else 0.5,
            preemption_mode=mode,
            aging_s=2.0,
            max_steps_in_flight=max_steps_in_flight,
            num_speculative_tokens=num_speculative_tokens if max_steps_in_flight == 1 else 0,
        )
        self.core = self.new_core(policy, BlockManager(num_blocks, block_size, num_swap_blocks))
        self.core.set_num_concurrent_steps(num_concurrent_steps)
        self.memory = Memory(block_size)
        self.groups: list[SequenceGroup] = []
        self.ended: set[tuple[int, int]] = set()
        self.now = 0.0
        self.in_flight: deque[Plan] = deque()
        self.pool_replaced = False
        self.known_before: dict[tuple[int, int], int] = {}

    def new_core(self, policy: Policy, blocks: BlockManager) -> Scheduler:
        return Scheduler(policy, blocks)

    @rule(
        prompt=st.integers(1, 30),
        branch=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]),
        n=st.integers(1, 4),
        beam=st.none() | beams,
        max_tokens=st.integers(1, 16),
        min_tokens=st.integers(0, 3),
        priority=st.sampled_from([0, 0, 0, 10, -3]),
        patience=st.none() | st.floats(0.5, 20),
        asks=st.sampled_from([False, False, True]),
        tenant=st.sampled_from(["", "", "a", "b"]),
    )
    def submit(self, prompt, branch, salt, n, beam, max_tokens, min_tokens, priority, patience, asks, tenant):
        num_waiting, num_tokens = self.core.num_waiting, self.core.queues.waiting.num_tokens
        try:
            group = self.core.submit(
                request_id=f"r{len(self.groups)}",
                # Prompts are beginnings of three long ones that part at their fifth token.
                prompt_token_ids=array("i", [100 + place + 100 * branch * (place > 4) for place in range(prompt)]),
                n=n if beam is None else min(n, beam.width),
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop_token_ids=[STOP],
                sampling=Sampling(num_prompt_logprobs=0) if asks else None,
                beam=beam,
                priority=priority,
                salt=salt,
                tenant=tenant,
                tenant_weight=3.0 if tenant == "b" else 1.0,
                now=self.now,
                deadline=None if patience is None else self.now + patience,
            )
        except QueueFull:
            assert num_waiting >= MAX_WAITING_REQUESTS or num_tokens + prompt > MAX_WAITING_TOKENS
        else:
            self.groups.append(group)

    @precondition(lambda self: len(self.in_flight) < self.core.in_flight.max_steps)
    @rule()
    def schedule(self):
        self.now += 1.0
        holding = self.core.queues.running + self.core.queues.swapped
        decoding = {group.number for group in holding if not group.prefilling}
        plan = self.core.schedule(self.now)
        policy, blocks = self.core.policy, self.core.blocks
        assert plan.num_tokens == sum(row.num_new_tokens for row in plan.rows) <= policy.max_num_batched_tokens
        assert len(plan.rows) - plan.num_drafts <= policy.max_num_seqs
        for row in plan.rows:
            end = row.start + row.num_new_tokens
            assert end == row.sequence.num_computed_tokens or row.draft is not None
            assert end <= len(row.sequence.block_table) * blocks.block_size, "a token has no slot"
            last = row.group.num_prompt_tokens + row.group.max_tokens - 1
            assert end <= last or self.pool_replaced, "a token is computed behind which nothing is sampled"
        if not policy.chunked_prefill and any(row.group.number in decoding for row in plan.rows):
            assert all(row.num_new_tokens == 1 for row in plan.rows), "a step mixes prefill and decode"
        if self.core.in_flight.num_concurrent > 1:
            sampling = {sequence for before in self.in_flight for row in before.rows for sequence in row.samples}
            assert not sampling & {row.sequence for row in plan.rows}, "a row is behind a token that is in flight"
        self.memory.execute(plan)
        for end in plan.finished:
            self.end_once(end.group, end.sequence.index)
        for dropped in plan.dropped:
            assert not dropped.group.live
            for sequence in dropped.group.sequences:
                if sequence.status is Status.FINISHED_ABORTED:
                    self.end_once(dropped.group, sequence.index)
        if plan.rows:
            self.in_flight.append(plan)
        else:
            assert self.in_flight or not self.core.num_live, "groups wait and nothing runs"

    @precondition(lambda self: self.in_flight)
    @rule(step_s=st.sampled_from([0.0, 0.1, 3.0]), swap_s=st.sampled_from([0.0, 0.1]), failing=st.integers(0, 60))
    def update(self, step_s=0.0, swap_s=0.0, failing=60):
        plan = self.in_flight.popleft()
        result = run(plan, step_s, swap_s)
        if failing < len(result.token_ids):
            result = replace(result, failed=[failing])
        outputs = self.core.update(plan, result)
        assert all(not group.live for group in outputs.failed)
        for end in outputs.finished:
            self.end_once(end.group, end.sequence.index)
            if not self.pool_replaced:
                whole = expected_outputs(end.group)[end.sequence.index][: end.group.max_tokens]
                assert end.sequence.output_token_ids.tolist() == whole

    @precondition(lambda self: self.in_flight)
    @rule(
        next_pool=st.none() | st.tuples(st.integers(4, 30), st.sampled_from([0, 3, 20])),
        num_concurrent_steps=st.sampled_from([1, 2, 3]),
    )
    def lose_the_worker(self, next_pool, num_concurrent_steps):
        computed = {row.group for plan in self.in_flight for row in plan.rows}
        _, conviction = self.core.requeue_running()
        assert conviction is None or computed == {conviction.group}
        self.in_flight.clear()
        self.memory.clear()
        blocks = self.core.blocks
        assert blocks.num_free == blocks.num_blocks
        assert blocks.num_free_swap_blocks == blocks.num_swap_blocks
        assert blocks.num_idle == 0
        if next_pool is not None:
            num_blocks, num_swap_blocks = next_pool
            self.pool_replaced = True
            self.core.replace_pool(BlockManager(num_blocks, blocks.block_size, num_swap_blocks))
        self.core.set_num_concurrent_steps(num_concurrent_steps)

    @precondition(lambda self: self.groups)
    @rule(pick=st.randoms(use_true_random=False))
    def go_on_as_another_group(self, pick):
        """As a router does with what another scheduler has begun."""
        begun = pick.choice(self.groups)
        if not begun.live:
            return
        progress = [
            Progress(each.output_token_ids[:], each.cumulative_logprob, ended=each.status.finished)
            for each in (begun.sequences if begun.beam is None else ())
        ]
        told = any(each.token_ids for each in progress)
        self.core.abort(begun)
        group = self.core.submit(
            request_id=f"r{len(self.groups)}",
            prompt_token_ids=begun.prompt_token_ids,
            n=begun.n,
            max_tokens=begun.wanted_max_tokens,
            min_tokens=begun.min_tokens,
            stop_token_ids=[STOP],
            sampling=None if told else begun.sampling,
            beam=None if begun.beam is None else begun.beam._params,
            salt=begun.salt,
            tenant=begun.tenant,
            tenant_weight=begun.tenant_weight,
            now=self.now,
            deadline=begun.deadline,
            progress=progress,
        )
        self.groups.append(group)
        for sequence in group.sequences:
            self.known_before[group.number, sequence.index] = len(sequence.output_token_ids)

    @precondition(lambda self: self.core.num_running)
    @rule(pick=st.randoms(use_true_random=False))
    def preempt(self, pick):
        self.core.preempt(pick.choice(self.core.queues.running))

    @precondition(lambda self: self.groups)
    @rule(pick=st.randoms(use_true_random=False))
    def abort(self, pick):
        self.core.abort(pick.choice(self.groups))

    @precondition(lambda self: self.groups)
    @rule(pick=st.randoms(use_true_random=False), index=st.integers(0, 3), num_overrun=st.integers(0, 2))
    def stop(self, pick, index, num_overrun):
        group = pick.choice(self.groups)
        live = next((sequence for sequence in group.live if sequence.index == index), None)
        known = self.known_before.get((group.number, index), 0)
        num_tokens = None if live is None else max(known, len(live.output_token_ids) - num_overrun)
        finished = self.core.stop(group, index, num_tokens)
        if finished is not None:
            assert len(finished.sequence.output_token_ids) == num_tokens
            assert finished.sequence.cumulative_logprob == -num_tokens
            self.end_once(group, index)

    @invariant()
    def queues_and_blocks_are_sound(self):
        self.core.check()

    @invariant()
    def outputs_are_what_the_model_says_whatever_happened(self):
        for group in self.groups:
            if group.beam is not None and (group.live or group.status is Status.FINISHED_ABORTED):
                continue  # its sequences are candidates, no outputs
            if group.beam is not None and self.pool_replaced:
                continue  # a smaller pool may have ended the search where it stood
            for sequence, whole in zip(group.sequences, expected_outputs(group), strict=False):
                output = sequence.output_token_ids.tolist()
                assert output == whole[: len(output)]

    @invariant()
    def a_prompt_is_told_of_once_token_by_token_before_the_first_output(self):
        for group in self.groups:
            if group.prompt_logprobs is not None:
                told = group.prompt_logprobs.ranks.tolist()
                assert told == list(range(1, len(told) + 1))
                if any(sequence.output_token_ids for sequence in group.sequences):
                    assert len(told) == group.num_prompt_tokens - 1

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for _ in range(8000):
            if not self.core.num_live:
                break
            if len(self.in_flight) < self.core.in_flight.max_steps:
                self.schedule()
            if self.in_flight:
                self.update()
            self.core.check()
        while self.in_flight:
            self.update()
        assert all(sequence.status.finished for group in self.groups for sequence in group.sequences)
        assert self.core.blocks.num_held == 0
        assert self.core.blocks.num_free_swap_blocks == self.core.blocks.num_swap_blocks

    def end_once(self, group: SequenceGroup, index: int) -> None:
        assert (group.number, index) not in self.ended, "a sequence ended twice"
        self.ended.add((group.number, index))


SchedulerMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("PAGEWIRE_SOAK_WALKS", "200")), stateful_step_count=80, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
