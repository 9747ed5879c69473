"""Random walks over the scheduler core: whatever happens, no block leaks, no token is lost, everything ends once.

Submit, step, abort, stop, preempt, lose the worker, let time pass, in any order, under any policy; `check()` after
each. Forks, copies, swaps, evictions and deadlines come of themselves in pools this small. `make soak` walks for
millions of steps.
"""

import os
from array import array

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_model import STOP, Memory, expected_outputs, run

from scheduler.beam import BeamParams, EarlyStopping
from scheduler.block_manager import BlockManager
from scheduler.plan import Plan
from scheduler.policy import Policy, PreemptionMode
from scheduler.scheduler import QueueFull, Scheduler
from scheduler.sequence import SequenceGroup, Status

BUDGET, MAX_NUM_SEQS, MAX_WAITING_REQUESTS, MAX_WAITING_TOKENS = 9, 5, 6, 60
NUM_BLOCKS, BLOCK_SIZE = 11, 3

beams = st.builds(
    BeamParams,
    width=st.integers(1, 4),
    length_penalty=st.sampled_from([1.0, 0.0, 2.0, -1.0]),
    early_stopping=st.sampled_from(EarlyStopping),
)


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler, its worker's memory, and all that happens to them."""

    @initialize(
        num_swap_blocks=st.sampled_from([0, 3, 20]),
        mode=st.sampled_from(PreemptionMode),
        chunked_prefill=st.booleans(),
        prefix_caching=st.booleans(),
        watermark=st.sampled_from([0.0, 0.1]),
    )
    def start(self, num_swap_blocks, mode, chunked_prefill, prefix_caching, watermark):
        policy = Policy(
            max_num_batched_tokens=BUDGET,
            max_num_seqs=MAX_NUM_SEQS,
            max_waiting_requests=MAX_WAITING_REQUESTS,
            max_waiting_tokens=MAX_WAITING_TOKENS,
            watermark=watermark,
            prefix_caching=prefix_caching,
            chunked_prefill=chunked_prefill,
            delay_factor=0.0 if chunked_prefill else 0.5,
            preemption_mode=mode,
            aging_s=2.0,
        )
        self.core = Scheduler(policy, BlockManager(NUM_BLOCKS, BLOCK_SIZE, num_swap_blocks))
        self.memory = Memory(BLOCK_SIZE)
        self.groups: list[SequenceGroup] = []
        self.expected: dict[int, list[list[int]]] = {}
        self.ended: set[tuple[int, int]] = set()
        self.now = 0.0
        self.in_flight: Plan | None = None

    @rule(
        prompt=st.integers(1, 30),
        branch=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]),
        n=st.integers(1, 4),
        beam=st.none() | beams,
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        priority=st.sampled_from([0, 0, 0, 10, -3]),
        patience=st.none() | st.floats(0.5, 20),
    )
    def submit(self, prompt, branch, salt, n, beam, max_tokens, min_tokens, priority, patience):
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
                beam=beam,
                priority=priority,
                salt=salt,
                now=self.now,
                deadline=None if patience is None else self.now + patience,
            )
        except QueueFull:
            assert num_waiting >= MAX_WAITING_REQUESTS or num_tokens + prompt > MAX_WAITING_TOKENS
        else:
            self.groups.append(group)
            self.expected[group.number] = expected_outputs(group)

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def schedule(self):
        self.now += 1.0
        decoding = {group.number for group in self.core.queues.running if not group.prefilling}
        plan = self.core.schedule(self.now)
        assert plan.num_tokens == sum(row.num_new_tokens for row in plan.rows) <= BUDGET
        assert len(plan.rows) <= MAX_NUM_SEQS
        for row in plan.rows:
            assert row.start == row.sequence.num_computed_tokens
            assert row.start + row.num_new_tokens <= len(row.sequence.block_table) * BLOCK_SIZE, "a token has no slot"
        if not self.core.policy.chunked_prefill and any(row.group.number in decoding for row in plan.rows):
            assert all(row.num_new_tokens == 1 for row in plan.rows), "a step mixes prefill and decode"
        self.memory.execute(plan)
        for end in plan.ignored:
            self.end_once(end.group, end.sequence.index)
        if plan.rows:
            self.in_flight = plan
        else:
            assert not self.core.num_live, "groups wait and nothing runs"

    @precondition(lambda self: self.in_flight is not None)
    @rule(step_s=st.sampled_from([0.0, 0.1, 3.0]), swap_s=st.sampled_from([0.0, 0.1]))
    def update(self, step_s=0.0, swap_s=0.0):
        assert self.in_flight is not None
        outputs = self.core.update(self.in_flight, run(self.in_flight, step_s, swap_s))
        self.in_flight = None
        for end in outputs.finished:
            self.end_once(end.group, end.sequence.index)

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def lose_the_worker(self):
        self.core.requeue_running()
        self.in_flight = None
        self.memory.clear()
        assert self.core.blocks.num_free == NUM_BLOCKS
        assert self.core.blocks.num_free_swap_blocks == self.core.blocks.num_swap_blocks
        assert self.core.blocks.num_idle == 0

    @precondition(lambda self: self.core.num_running)
    @rule(pick=st.randoms(use_true_random=False))
    def preempt(self, pick):
        self.core.preempt(pick.choice(self.core.queues.running))

    @precondition(lambda self: self.groups)
    @rule(pick=st.randoms(use_true_random=False))
    def abort(self, pick):
        self.core.abort(pick.choice(self.groups))

    @precondition(lambda self: self.groups)
    @rule(pick=st.randoms(use_true_random=False), index=st.integers(0, 3))
    def stop(self, pick, index):
        group = pick.choice(self.groups)
        finished = self.core.stop(group, index)
        if finished is not None:
            self.end_once(group, index)

    @invariant()
    def queues_and_blocks_are_sound(self):
        self.core.check()

    @invariant()
    def outputs_are_what_the_model_says_whatever_happened(self):
        for group in self.groups:
            if group.beam is not None and (group.live or group.status is Status.FINISHED_ABORTED):
                continue  # its sequences are candidates, no outputs
            for sequence, whole in zip(group.sequences, self.expected[group.number], strict=False):
                output = sequence.output_token_ids.tolist()
                assert output == whole[: len(output)]
                if sequence.status in (Status.FINISHED_LENGTH_CAPPED, Status.FINISHED_STOPPED):
                    assert output == whole or (group.number, sequence.index) in self.ended

    def teardown(self):
        if not hasattr(self, "core"):
            return
        if self.in_flight is not None:
            self.update()
        for _ in range(4000):
            if not self.core.num_live:
                break
            self.schedule()
            if self.in_flight is not None:
                self.update()
            self.core.check()
        assert all(sequence.status.finished for group in self.groups for sequence in group.sequences)
        assert self.core.blocks.num_free == NUM_BLOCKS
        assert self.core.blocks.num_free_swap_blocks == self.core.blocks.num_swap_blocks

    def end_once(self, group: SequenceGroup, index: int) -> None:
        assert (group.number, index) not in self.ended, "a sequence ended twice"
        self.ended.add((group.number, index))


SchedulerMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("PAGEWIRE_SOAK_WALKS", "200")), stateful_step_count=80, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
