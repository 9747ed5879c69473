"""Steps in flight: planned, and not answered yet. The core lives in the time of its last plan.

What is planned counts as done: a row's tokens are computed from its plan on (`num_computed_tokens`), and what it
samples is there (`num_expected_tokens`), so that the next step can be planned behind it. The id of such a token is the
worker's to know; on the wire it is -1. What has to be known is not counted on: the tokens of beams, which only the
search chooses, and a sequence's last one, behind which nothing is computed; and no token at all where the worker works
at several steps at once (`lanes.py`), since it would have to end one of them before it could begin the next. Nor are
drafts (`drafts.py`): the tokens of those that were right count as computed from the answer on.

WHY THIS IS SAFE. What the worker computes is as if it ran steps strictly in the order of their plans, and of each step
the swaps out, the swaps in and the copies before the forward. So it is enough that each plan is right when those before
it have been run. That holds for a worker at several steps too: each of its parts keeps some layers' KV to itself, takes
the steps in order, and for each swaps and copies its own blocks before its own forward. A part sees no other's blocks,
and gets from it only what belongs to the same step; what a later step would need of an earlier one's end, a sampled
token, no later step is planned on. Chunks of one prompt may follow each other: each reads KV of its own layer only.

1. A block that a sequence lets go of, because it ended, was aborted or was preempted, may still be read and written by
   steps in flight. Whoever gets it next is planned after them, so it is written again after them, and only what was
   written then is read. No acknowledgement is waited for.
2. A swap block is free as soon as the step that brings it back is planned. It is written next by the swaps out of a
   later step: no group comes back in a step that takes another one's blocks. What is swapped out holds all that counts
   as computed, since the steps before have computed it.
3. A shared block that is about to be written is copied before the step's forward, after all writes planned before: what
   its holders have in common is in it by then, and nothing else.
4. A block can be found in the prefix cache from the plan on whose step fills it: its finder runs in that step, which
   writes KV before it attends to it, layer by layer, or in a later one. It is found by its tokens, so all of them have
   to be known: what a step in flight samples into it makes it findable later.
5. Results are taken in the order of the steps. A token belongs to its sequence wherever that is by then, waiting or
   swapped out too. A preempted group does not come back before the steps that were in flight then are answered: it is
   planned with all that it has, and with the beams that its search chose meanwhile.
6. A sequence that ended, by a stop id that was in flight, by the router or by an abort, takes nothing any more. What a
   step in flight computes for it is the KV of a token that it did sample, or of a draft, in a block of case 1.
7. The worker forgets a request by a plan that is made after the request's end, hence behind all of its rows. What it
   notes of outputs for penalties it notes in the order of the steps, each token at its place.
8. A lost worker takes all steps in flight with it. Nothing is expected any more then, and all is computed again from
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
        max_steps: how many at most, where the worker works at one at a time.

    Attributes:
        num_concurrent: at how many the worker works at once.
    """

    def __init__(self, max_steps: int) -> None:
        self.num_concurrent = 1
        self._max_steps = max_steps
        self._plans: deque[Plan] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def max_steps(self) -> int:
        """How many there may be; `lanes.py` says why no more than the worker works at, where these are several."""
        return self._max_steps if self.num_concurrent == 1 else self.num_concurrent

    @property
    def num_free(self) -> int:
        """How many more may be planned now."""
        return self.max_steps - len(self._plans)

    @property
    def last(self) -> int:
        """The one planned last; 0 for none."""
        return self._plans[-1].step_id if self._plans else 0

    @property
    def groups(self) -> list[SequenceGroup]:
        """The groups of which they compute tokens, also those that have ended since."""
        return list({row.group.number: row.group for plan in self._plans for row in plan.rows}.values())

    def check_room(self) -> None:
        """Asserts that one more may be planned."""
        assert self.num_free > 0, "too many steps in flight"

    def add(self, plan: Plan) -> None:
        """Takes in a step with rows."""
        self._plans.append(plan)

    def answer(self, step_id: int) -> None:
        """Lets the oldest go, which this has to be."""
        oldest = self._plans.popleft().step_id
        assert oldest == step_id, f"step {step_id} is answered, and {oldest} is older"

    def lose(self) -> None:
        """Forgets all."""
        self._plans.clear()

    def hold(self, group: SequenceGroup) -> bool:
        """Whether something may still come for a preempted group."""
        return bool(self._plans) and group.returns_after >= self._plans[0].step_id

    def check(self, groups: Iterable[SequenceGroup]) -> None:
        """Asserts that every token that is expected comes with one of them."""
        for sequence in (sequence for group in groups for sequence in group.live):
            num_expected = sequence.num_expected_tokens - sequence.num_tokens
            most = len(self._plans) if self.num_concurrent == 1 else 0
            assert 0 <= num_expected <= most, "a token is expected that no step samples"


def add_row(
    plan: Plan, group: SequenceGroup, sequence: Sequence, num_new_tokens: int, blocks: BlockManager, *, cached: bool
) -> None:
    """Plans tokens that have their slots, and counts them as computed.

    Args:
        plan: the step.
        group: of which the sequence is.
        sequence: whose next tokens are computed, and sampled behind if they are its last.
        num_new_tokens: how many.
        blocks: where they have their slots.
        cached: whether the blocks that they fill can be found by others.
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
