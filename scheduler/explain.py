"""Why a live request is where it is, as data: asked by a person, so it may take a look at all queues."""

import enum
from dataclasses import dataclass

from scheduler.admission import num_blocks_to_admit, num_blocks_to_swap_in
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup, Status


class Reason(enum.Enum):
    """What a group waits for."""

    NEXT_STEP = enum.auto()
    QUEUE = enum.auto()
    BLOCKS = enum.auto()
    SEQUENCES = enum.auto()
    TOKENS = enum.auto()
    SWAPPED_GROUPS = enum.auto()
    DELAY = enum.auto()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What there is to say of a group.

    Attributes:
        reason: None while it runs.
        message: the same in words, with the figures.
        queue_position: place among the waiting or the swapped groups, from 0; None while it runs.
        num_blocks_needed: blocks to run again, found ones included; 0 while it runs.
        num_blocks_held: blocks in its tables, shared ones once for each table.
        num_computed_tokens: tokens whose KV is in them, over its sequences.
        num_output_tokens: tokens sampled, over its sequences.
    """

    status: Status
    reason: Reason | None
    message: str
    queue_position: int | None
    num_blocks_needed: int
    num_blocks_held: int
    num_computed_tokens: int
    num_output_tokens: int


def explain(core: Scheduler, group: SequenceGroup, now: float) -> Explanation:
    """Why `group`, which has not ended, is where it is at the time `now`."""
    queues, blocks = core.queues, core.blocks
    reason, message, position, num_blocks = None, "it runs", None, 0
    if group.status is Status.WAITING:
        position, num_blocks = queues.waiting.num_ahead(group), num_blocks_to_admit(group, blocks)
        reason, message = _why_not_admitted(core, group, position, num_blocks, now)
    elif group.status is Status.SWAPPED:
        position, num_blocks = queues.swapped.index(group), num_blocks_to_swap_in(group, blocks)
        reason, message = _why_not_swapped_in(core, group, position, num_blocks)
    return Explanation(
        status=group.status,
        reason=reason,
        message=message,
        queue_position=position,
        num_blocks_needed=num_blocks,
        num_blocks_held=sum(len(sequence.block_table) for sequence in group.live),
        num_computed_tokens=sum(sequence.num_computed_tokens for sequence in group.live),
        num_output_tokens=sum(len(sequence.output_token_ids) for sequence in group.sequences),
    )


def _why_not_admitted(
    core: Scheduler, group: SequenceGroup, position: int, num_blocks: int, now: float
) -> tuple[Reason, str]:
    if core.queues.swapped:
        num_swapped = len(core.queues.swapped)
        return Reason.SWAPPED_GROUPS, f"{num_swapped} requests that were swapped out come back before others come in"
    if position:
        return Reason.QUEUE, f"{position} requests go first"
    if not core.prompts_are_due(now):
        factor = core.policy.delay_factor
        return Reason.DELAY, f"prompts gather for {factor:g} times as long as the last prefill step took"
    return _what_lacks(core, group, num_blocks)


def _why_not_swapped_in(core: Scheduler, group: SequenceGroup, position: int, num_blocks: int) -> tuple[Reason, str]:
    if position:
        return Reason.QUEUE, f"{position} requests come back first"
    return _what_lacks(core, group, num_blocks)


def _what_lacks(core: Scheduler, group: SequenceGroup, num_blocks: int) -> tuple[Reason, str]:
    """What the first of a queue waits for."""
    queues, policy, blocks = core.queues, core.policy, core.blocks
    if queues.num_running_seqs + group.num_seqs > policy.max_num_seqs:
        message = f"{queues.num_running_seqs} of {policy.max_num_seqs} sequences run, and it has {group.num_seqs}"
        return Reason.SEQUENCES, message
    reserved = core.num_reserved()
    if num_blocks > blocks.num_free - reserved:
        found = ", less those found in the prefix cache" if group.status is Status.WAITING else ""
        message = f"it needs {num_blocks} blocks{found}; {blocks.num_free} are free, {reserved} kept for what runs"
        return Reason.BLOCKS, message
    if core.last_step_was_full:
        message = f"what runs uses up the {policy.max_num_batched_tokens} tokens of each step"
        return Reason.TOKENS, message
    return Reason.NEXT_STEP, "nothing is in its way: the next step takes it"
