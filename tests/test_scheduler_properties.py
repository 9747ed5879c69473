"""Random walks over the scheduler core: whatever happens, no block leaks, no token is lost, everything ends once.

The worker is a function of (request, sequence index, position), as counter-based sampling makes the real one: outputs
may then not depend on memory, budget, or what else runs.
"""

from array import array

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.block_manager import BlockManager
from scheduler.plan import Plan, Row, StepResult
from scheduler.scheduler import Policy, QueueFull, Scheduler
from scheduler.sequence import SequenceGroup, Status

STOP = 0


def next_token(group: SequenceGroup, sequence_index: int, position: int) -> int:
    """What the model would sample; STOP one time in 13."""
    return (len(group.prompt_token_ids) * 7919 + group.n * 131 + sequence_index * 31 + position * 17) % 13


def expected_output(group: SequenceGroup, sequence_index: int) -> list[int]:
    """The whole output of a sequence that nothing cuts short."""
    tokens: list[int] = []
    while len(tokens) < group.max_tokens:
        tokens.append(next_token(group, sequence_index, len(group.prompt_token_ids) + len(tokens)))
        if tokens[-1] == STOP and len(tokens) > group.min_tokens:
            break
    return tokens


class Memory:
    """KV as a worker would hold it: in each slot the tokens whose KV it is, all that it depends on."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def clear(self) -> None:
        self._slots.clear()

    def execute(self, plan: Plan) -> None:
        """Copies, writes what the rows compute, then reads all that they attend to."""
        copied = {
            (to, offset): self._slots[source, offset]
            for source, to in plan.blocks_to_copy
            for offset in range(self._block_size)
            if (source, offset) in self._slots
        }
        self._slots |= copied
        written = set()
        for row in plan.rows:
            for position in range(row.start, row.start + row.num_new_tokens):
                slot = self._slot(row, position)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self._slots[slot] = tuple(row.group.token_ids(row.sequence, 0, position + 1))
        for row in plan.rows:
            for position in range(row.start + row.num_new_tokens):
                tokens = tuple(row.group.token_ids(row.sequence, 0, position + 1))
                assert self._slots.get(self._slot(row, position)) == tokens, "a row attends to another one's KV"

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.sequence.block_table[position // self._block_size], position % self._block_size


def run(plan: Plan) -> StepResult:
    samples = [(row, sequence) for row in plan.rows for sequence in row.samples]
    tokens = [next_token(row.group, sequence.index, row.start + row.num_new_tokens) for row, sequence in samples]
    return StepResult(tokens, [-1.0] * len(tokens))


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, step, abort, stop, lose the worker, let time pass; check after each."""

    def __init__(self) -> None:
        super().__init__()
        policy = Policy(max_num_batched_tokens=9, max_num_seqs=5, max_waiting_requests=6, watermark=0.1)
        self.core = Scheduler(policy, BlockManager(num_blocks=11, block_size=3))
        self.memory = Memory(block_size=3)
        self.groups: list[SequenceGroup] = []
        self.ended: set[tuple[int, int]] = set()
        self.now = 0.0
        self.in_flight: Plan | None = None

    @rule(
        prompt=st.integers(1, 30),
        branch=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]),
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        patience=st.none() | st.floats(0.5, 20),
    )
    def submit(self, prompt, branch, salt, n, max_tokens, min_tokens, patience):
        try:
            group = self.core.submit(
                request_id=f"r{len(self.groups)}",
                # Prompts are beginnings of three long ones that part at their fifth token.
                prompt_token_ids=array("i", [100 + place + 100 * branch * (place > 4) for place in range(prompt)]),
                n=n,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop_token_ids=[STOP],
                salt=salt,
                now=self.now,
                deadline=None if patience is None else self.now + patience,
            )
        except QueueFull:
            assert self.core.num_waiting >= 6
        else:
            self.groups.append(group)

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def schedule(self):
        self.now += 1.0
        plan = self.core.schedule(self.now)
        assert plan.num_tokens == sum(row.num_new_tokens for row in plan.rows) <= 9
        assert len(plan.rows) <= 5
        for row in plan.rows:
            assert row.start == row.sequence.num_computed_tokens
            table_end = len(row.sequence.block_table) * 3
            assert row.start + row.num_new_tokens <= table_end, "a token has no slot"
        self.memory.execute(plan)
        for end in plan.ignored:
            self.end_once(end.group, end.sequence.index)
        if plan.rows:
            self.in_flight = plan
        elif self.core.num_waiting:
            raise AssertionError("groups wait and nothing runs")

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def update(self):
        assert self.in_flight is not None
        outputs = self.core.update(self.in_flight, run(self.in_flight))
        self.in_flight = None
        for end in outputs.finished:
            self.end_once(end.group, end.sequence.index)

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def lose_the_worker(self):
        self.core.requeue_running()
        self.in_flight = None
        self.memory.clear()
        assert self.core.blocks.num_free == 11
        assert self.core.blocks.num_idle == 0

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
            for sequence in group.sequences:
                whole = expected_output(group, sequence.index)
                output = sequence.output_token_ids.tolist()
                assert output == whole[: len(output)]
                if sequence.status in (Status.FINISHED_LENGTH_CAPPED,):
                    assert output == whole

    def teardown(self):
        if self.in_flight is not None:
            self.update()
        for _ in range(2000):
            if not self.core.num_running + self.core.num_waiting:
                break
            self.schedule()
            if self.in_flight is not None:
                self.update()
            self.core.check()
        assert all(sequence.status.finished for group in self.groups for sequence in group.sequences)
        assert self.core.blocks.num_free == 11
        assert not self.core._groups

    def end_once(self, group: SequenceGroup, index: int) -> None:
        assert (group.number, index) not in self.ended, "a sequence ended twice"
        self.ended.add((group.number, index))


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
