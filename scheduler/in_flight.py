"""Steps in flight: planned, and not answered yet. The core's state is that after its last plan.

What is planned counts as done: a row's tokens are computed from its plan on (`num_computed_tokens`), and what it
samples is there (`num_expected_tokens`), so that the next step can be planned behind it. Only the worker knows the id
of such a token; on the wire it is -1. A token whose id has to be known is not counted on: a beam's, which only the
search chooses. Nor is a sequence's last one, since nothing is computed after it; nor any token where the worker works
on several steps at once (`lanes.py`), since it would have to end one before it could begin the next. Nor are drafts
(`drafts.py`): the tokens of those that were right count as computed once the step is answered.

WHY THIS IS SAFE. The worker computes as if it ran steps strictly in the order of their plans, and in each step the
swaps out, the swaps in and the copies before the forward pass. So it is enough that each plan is right once those
before it have been run. This also holds for a worker that works on several steps: each of its parts keeps the KV of
some layers to itself, takes the steps in order, and in each swaps and copies its own blocks before its own forward
pass. A part sees no other part's blocks, and gets from it only what belongs to the same step. A later step could need a
token that an earlier one samples at its end; for such a worker, no step is planned that does. Chunks of one prompt may
follow each other: in each layer they read that layer's KV only.

1. A block that a sequence lets go of, because it ended, was aborted or was preempted, may still be read and written by
   steps in flight. Its next holder is planned after them, so it is written again after them, and only what was written
   then is read. There is no need to wait for an acknowledgement.
2. A swap block is free as soon as the step that swaps it in is planned. It is written next by the swaps out of a later
   step: no group is swapped in by a step that takes another group's blocks. What is swapped out holds everything that
   counts as computed, since the earlier steps have computed it.
3. A shared block that is about to be written is copied before the step's forward pass, after all writes planned before:
   by then it holds what its holders have in common, and nothing else.
4. A block can be found in the prefix cache as soon as the step that fills it is planned. The sequence that finds it
   runs in that step, which writes KV before it attends to it, layer by layer, or in a later one. A block is found by
   its tokens, so all of them have to be known: one that a step in flight samples a token into becomes findable later.
5. Results are taken in the order of the steps. A token belongs to its sequence wherever that is by then, also waiting
   or swapped out. A preempted group does not come back before the steps that were in flight at its preemption are
   answered: it is planned with all its tokens, and with the beams that its search has chosen meanwhile.
6. A sequence that ended, by a stop id that was in flight, by the router or by an abort, takes no more tokens. What a
   step in flight computes for it is the KV of a token that it did sample, or of a draft, in a block of case 1.
7. A plan made after a request's end, and hence after all of its rows, tells the worker to forget it. What the worker
   notes of outputs for penalties, it notes in the order of the steps, each token in its place.
8. A lost worker takes all steps in flight with it. Nothing is expected of them any more, and all is computed again from
   what is known; draws are counter-based, so the tokens are the same.
"""

from collections import deque
from collections.abc import Iterable

from scheduler.block_manager import BlockManager
from scheduler.plan import Plan, Row
from scheduler.sequence import Sequence, SequenceGroup


class StepsInFlight:
    """The steps that the worker has not answered.

    Args:
        max_steps: the most that there may be, where the worker works on one at a time.

    Attributes:
        num_concurrent: how many the worker works on at once.
    """

    def __init__(self, max_steps: int) -> None:
        self.num_concurrent = 1
        self._max_steps = max_steps
        self._plans: deque[Plan] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def max_steps(self) -> int:
        """The most that there may be: no more than the worker works on, if that is several (`lanes.py` says why)."""
        return self._max_steps if self.num_concurrent == 1 else self.num_concurrent

    @property
    def num_free(self) -> int:
        """How many more may be planned now."""
        return self.max_steps - len(self._plans)

    @property
    def last(self) -> int:
        """The id of the step planned last; 0 for none."""
        return self._plans[-1].step_id if self._plans else 0

    @property
    def groups(self) -> list[SequenceGroup]:
        """The groups whose tokens they compute, also those that have ended since."""
        return list({row.group.number: row.group for plan in self._plans for row in plan.rows}.values())

    def check_room(self) -> None:
        """Asserts that one more may be planned."""
        assert self.num_free > 0, "too many steps in flight"

    def add(self, plan: Plan) -> None:
        """Adds a step that has rows."""
        self._plans.append(plan)

    def answer(self, step_id: int) -> None:
        """Removes the oldest step, which this has to be."""
        oldest = self._plans.popleft().step_id
        assert oldest == step_id, f"step {step_id} is answered, and {oldest} is older"

    def lose(self) -> None:
        """Forgets all steps."""
        self._plans.clear()

    def hold(self, group: SequenceGroup) -> bool:
        """Whether something may still come for a preempted group."""
        return bool(self._plans) and group.returns_after >= self._plans[0].step_id

    def check(self, groups: Iterable[SequenceGroup]) -> None:
        """Asserts that every expected token can come with one of them."""
        for sequence in (sequence for group in groups for sequence in group.live):
            num_expected = sequence.num_expected_tokens - sequence.num_tokens
            most = len(self._plans) if self.num_concurrent == 1 else 0
            assert 0 <= num_expected <= most, "a token is expected that no step samples"


def add_row(
    plan: Plan, group: SequenceGroup, sequence: Sequence, num_new_tokens: int, blocks: BlockManager, *, cached: bool
) -> None:
    """Plans tokens that already have slots, and counts them as computed.

    Args:
        plan: the step.
        group: the sequence's group.
        sequence: its next tokens are computed; if they are its last, it samples another.
        num_new_tokens: how many tokens.
        blocks: the pool in which they have their slots.
        cached: whether other groups can find the blocks that they fill.
    """
    start = sequence.num_computed_tokens
    end = start + num_new_tokens
    sequence.num_computed_tokens = end
    if cached and end >= (len(sequence.contents) + 1) * blocks.block_size:
        blocks.remember(group, sequence, min(end, sequence.num_tokens))
    samples: tuple[Sequence, ...] | list[Sequence] = ()
    if end == sequence.num_expected_tokens:
        samples = (sequence,) if group.forked else list(group.live)
        for sampled in samples:
            if sampled.num_expected_tokens < group.expects_below:
                sampled.num_expected_tokens += 1
            elif group.beam is not None:
                plan.num_beams += 1
    if not group.forked and end == group.num_prompt_tokens:
        for child in group.live[1:]:
            blocks.fork(sequence, child)
        group.forked = True
    if not group.known_to_worker:
        group.known_to_worker = True
        plan.new_groups.append(group)
    row = Row(group, sequence, start, num_new_tokens, samples)
    if group.prompt_logprobs is not None and group.num_told < row.prompt_logprobs_end:
        plan.telling.append((len(plan.rows), max(start, group.num_told)))
        group.num_told = row.prompt_logprobs_end
    plan.add(row)
