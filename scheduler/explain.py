"""Why a live request is where it is, as data. A person asks for it, so it may take the time to look at all queues."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.admission import Reason, num_blocks_to_admit, num_blocks_to_swap_in
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup, Status


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a group is, and why.

    Attributes:
        reason: what it waits for; None while it runs.
        message: the same in words, with figures.
        queue_position: place among the waiting or the swapped groups, from 0; None while it runs.
        num_blocks_needed: blocks that it needs to run, those in the prefix cache included; 0 while it runs.
        num_blocks_held: blocks in its tables, shared ones once for each table.
        num_computed_tokens: tokens whose KV is in these, summed over its sequences.
        num_output_tokens: tokens sampled, summed over its sequences.
    """

    status: Status
    reason: Reason | None
    message: str
    queue_position: int | None
    num_blocks_needed: int
    num_blocks_held: int
    num_computed_tokens: int
    num_output_tokens: int


def explain(core: Scheduler, group: SequenceGroup, serving: bool = True) -> Explanation:
    """Why `group`, which has not ended, is where it is; `serving` says whether there is a worker for it."""
    queues, blocks = core.queues, core.blocks
    reason, message, queue, position, num_blocks = None, "it runs" + _apart(core, group), [], None, 0
    if group.status is Status.WAITING:
        queue, num_blocks = queues.waiting.order(), num_blocks_to_admit(group, blocks)
    elif group.status is Status.SWAPPED:
        queue, num_blocks = queues.swapped, num_blocks_to_swap_in(group, blocks)
    if queue:
        position = queue.index(group)
        reason = _why(core, group, position) if serving else Reason.NO_WORKER
        message = _in_words(core, group, reason, queue[:position], num_blocks)
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


def _why(core: Scheduler, group: SequenceGroup, position: int) -> Reason:
    """What the `position`-th of the waiting or the swapped groups waits for, as the last plan left it."""
    if core.suspects:
        return (core.held_up(group) or Reason.NEXT_STEP) if group in core.suspects.on_trial else Reason.SUSPECTS
    if group.status is Status.WAITING and core.queues.swapped:
        return Reason.SWAPPED_GROUPS
    if position:
        return Reason.QUEUE
    if (reason := core.held_up(group)) is not None:
        return reason
    # It came, or became the first, after the last plan was made.
    too_many = core.queues.num_running_seqs + group.num_seqs > core.policy.max_num_seqs
    return Reason.SEQUENCES if too_many else Reason.NEXT_STEP


def _in_words(
    core: Scheduler, group: SequenceGroup, reason: Reason, ahead: Sequence[SequenceGroup], num_blocks: int
) -> str:
    queues, policy, blocks = core.queues, core.policy, core.blocks
    match reason:
        case Reason.SWAPPED_GROUPS:
            return f"{len(queues.swapped)} requests that were swapped out come back before others come in"
        case Reason.QUEUE:
            own = sum(other.tenant == group.tenant for other in ahead)
            return f"{len(ahead)} requests go first" + ("" if own == len(ahead) else f", {own} of them its tenant's")
        case Reason.BLOCKS:
            found = ", less those found in the prefix cache" if group.status is Status.WAITING else ""
            kept = f"{blocks.num_free} are free, {core.num_reserved()} kept for what runs"
            return f"it needs {num_blocks} blocks{found}; {kept}"
        case Reason.SEQUENCES:
            return f"{queues.num_running_seqs} of {policy.max_num_seqs} sequences run, and it has {group.num_seqs}"
        case Reason.TOKENS:
            return f"what runs uses up the {policy.max_num_batched_tokens} tokens of each step"
        case Reason.DELAY:
            return f"prompts gather for {policy.delay_factor:g} times as long as the last prefill step took"
        case Reason.SUSPECTS if group in core.suspects:
            return f"it waits to run{_apart(core, group)}"
        case Reason.SUSPECTS:
            return "requests in whose steps a worker was lost are run again first, a few at a time"
        case Reason.NO_WORKER:
            return "no worker is connected: it runs as soon as one is, if others do not go first"
    return "nothing is known to be in its way: the next step looks at it"


def _apart(core: Scheduler, group: SequenceGroup) -> str:
    """Why a group is run apart from others, if it is."""
    if group not in core.suspects:
        return ""
    lost = f"workers lost in a row in its steps: {core.suspects.num_workers_lost(group)}"
    return f" apart from others ({lost}; at {core.policy.max_failed_steps} and alone it fails)"
