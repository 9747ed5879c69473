"""Admission: what may wait, and whether a waiting group can have its blocks, now or ever."""

import enum
from array import array
from dataclasses import dataclass, field

from scheduler.beam import BeamParams
from scheduler.block_manager import BlockManager
from scheduler.fair_queue import FairQueue
from scheduler.plan import Plan
from scheduler.policy import MAX_PRIORITY, MIN_PRIORITY, Policy
from scheduler.preemption import Rates
from scheduler.sequence import Sequence, SequenceGroup


class Reason(enum.Enum):
    """What a group waits for."""

    NO_WORKER = enum.auto()
    NEXT_STEP = enum.auto()
    QUEUE = enum.auto()
    BLOCKS = enum.auto()
    SEQUENCES = enum.auto()
    TOKENS = enum.auto()
    SWAPPED_GROUPS = enum.auto()
    DELAY = enum.auto()
    SUSPECTS = enum.auto()


class QueueFull(Exception):
    """The waiting queue holds as much as it may; nothing was changed. In `retry_s` seconds there should be room."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Admission(enum.Enum):
    """Whether a waiting group can have its blocks."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


@dataclass(frozen=True, slots=True)
class Blocked:
    """The first of its queue, when it found too few free blocks: to look again each step would cost time by its length.

    Attributes:
        num_blocks: that it needed.
        token_ids: that it was to compute; none if they are in the swap pool.
        prefix: what the prefix cache had of them.
    """

    group: SequenceGroup
    num_blocks: int
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    prefix: list[tuple[int, int]] = field(default_factory=list)

    def holds(self, group: SequenceGroup, blocks: BlockManager) -> bool:
        """Whether nothing has changed for the better."""
        if group is not self.group or blocks.num_free >= self.num_blocks:
            return False
        return not blocks.extends(self.prefix, self.token_ids, group.salt)


def check_submission(
    policy: Policy, num_prompt_tokens: int, n: int, max_tokens: int, beam: BeamParams | None, priority: int
) -> None:
    """Refuses what can never run.

    Raises:
        ValueError: no prompt, no tokens wanted, more sequences than can ever run together, or no such priority.
    """
    if not num_prompt_tokens or n < 1 or max_tokens < 1:
        raise ValueError("a request needs a prompt, at least one sequence and at least one token")
    if beam is not None and n > beam.width:
        raise ValueError(f"n ({n}) is more than the {beam.width} hypotheses of the beam search")
    name, num_seqs = ("n", n) if beam is None else ("beam_width", beam.width)
    if num_seqs > policy.max_num_seqs:
        raise ValueError(f"{name} ({num_seqs}) is more than the {policy.max_num_seqs} that run together")
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise ValueError(f"priority ({priority}) is not in {MIN_PRIORITY} .. {MAX_PRIORITY}")


def check_room(policy: Policy, waiting: FairQueue, num_prompt_tokens: int, tenant: str, now: float) -> None:
    """Refuses what there is no room to let wait.

    Raises:
        QueueFull: the queue is at a bound.
    """
    num_waiting, num_tokens, outflow = len(waiting), waiting.num_tokens, waiting.outflow
    outflow.note(now, num_waiting, waiting.num_entered - num_waiting, waiting.num_tokens_entered - num_tokens)
    num_own, most_own = waiting.num_waiting_of(tenant), policy.max_waiting_requests_per_tenant
    if most_own is not None and num_own >= most_own:
        message = f"{num_own} requests of this tenant are waiting already"
        raise QueueFull(message, outflow.seconds_for(1, 0, waiting.share_of(tenant)))
    if num_waiting >= policy.max_waiting_requests:
        raise QueueFull(f"{num_waiting} requests are waiting already", outflow.refuse(now, 1, 0))
    if num_tokens and num_tokens + num_prompt_tokens > policy.max_waiting_tokens:
        message = f"requests with {num_tokens} prompt tokens are waiting already"
        raise QueueFull(message, outflow.refuse(now, 0, num_prompt_tokens))


def can_allocate(
    group: SequenceGroup, prefix: list[tuple[int, int]], blocks: BlockManager, num_reserved: int
) -> tuple[Admission, int]:
    """Whether a group, of whose tokens `prefix` holds the first, can come in and `num_reserved` blocks stay free.

    Returns:
        That, and how many blocks have to be free for it, the reserved ones included.
    """
    num_blocks = num_blocks_to_admit(group, blocks)
    num_free_needed = num_blocks - blocks.num_held_of(prefix) + num_reserved
    if num_blocks > blocks.num_blocks:
        return Admission.NEVER, num_free_needed
    return Admission.OK if num_free_needed <= blocks.num_free else Admission.LATER, num_free_needed


def num_blocks_to_admit(group: SequenceGroup, blocks: BlockManager) -> int:
    """Blocks for the group's tokens and one more each: full prompt blocks once, the rest for each sequence."""
    num_shared = group.num_prompt_tokens // blocks.block_size
    num_own = [blocks.num_blocks_for(sequence.num_tokens + 1) - num_shared for sequence in group.live]
    num_to_come = group.num_seqs - len(group.live)  # beams that have not begun
    return num_shared + sum(num_own) + num_to_come * num_own[0]


def num_blocks_to_swap_in(group: SequenceGroup, blocks: BlockManager) -> int:
    """Blocks for what is in the swap pool, and for the next tokens, so that the group need not leave again at once."""
    num_blocks = blocks.num_blocks_to_swap(group)
    for sequence in group.live if group.forked else group.live[:1]:
        num_new = blocks.num_blocks_for(sequence.num_tokens) - len(sequence.swap_table)
        begun = sequence.num_computed_tokens % blocks.block_size > 0  # perhaps shared, and to be copied
        num_blocks += max(1, num_new + begun)
    return num_blocks


def max_tokens_that_fit(num_prompt_tokens: int, num_seqs: int, blocks: BlockManager) -> int:
    """Output tokens at which `num_seqs` sequences of one prompt alone fill the pool.

    Capping a request by it means that a group alone can always grow, so that the oldest never waits. A prompt that
    leaves no room is refused at admission, whatever this says.
    """
    num_shared = num_prompt_tokens // blocks.block_size
    num_own_tokens = (blocks.num_blocks - num_shared) // num_seqs * blocks.block_size
    return max(1, num_shared * blocks.block_size + num_own_tokens - num_prompt_tokens)


def should_follow(plan: Plan, num_tokens: int, num_waiting: int, rates: Rates) -> bool:
    """Whether the prompt of the first group that waits is better begun behind a step that has room for it than in it.

    Where time is arithmetic, prompts of one step all end when the last of them would: who joins holds up each whose
    prompt ends in the step for as long as its own tokens take, and comes no sooner than right behind them. But a step
    more is what a decode step takes, for all who wait, itself among them. Whichever is less makes for the shorter time
    to first token on average. So with many waiting steps fill up, and of two prompts the first does not wait for the
    other's end. On a GPU, where a step hardly takes longer for them, all join.

    Nobody is overtaken, and in each step that somebody follows another's prompt ends.

    Args:
        plan: of the step, so far.
        num_tokens: of the prompt, for which there is room.
        num_waiting: groups that wait.
        rates: what the worker can do; while they are not known, all join.
    """
    return plan.num_prefills_done * num_tokens * rates.prefill_token_s > num_waiting * rates.decode_step_s


def why_never(group: SequenceGroup, blocks: BlockManager) -> str:
    """What `Admission.NEVER` means, for the client."""
    output = max(len(sequence.output_token_ids) for sequence in group.live)
    so_far = f", {output} tokens of output" if output else ""
    return (
        f"{group.num_seqs} x (a prompt of {group.num_prompt_tokens} tokens{so_far} and one more) need "
        f"{num_blocks_to_admit(group, blocks)} of the {blocks.num_blocks} KV blocks of {blocks.block_size} tokens that "
        f"there are"
    )


def why_no_more(group: SequenceGroup, sequence: Sequence, blocks: BlockManager) -> str:
    """Why a sequence ends before it has as many tokens as are wanted of it; for the client."""
    several = group.n > 1 or group.beam is not None
    return (
        f"{len(sequence.output_token_ids)} tokens of output are all that there is room for in the {blocks.num_blocks} "
        f"KV blocks of {blocks.block_size} tokens that there are, behind a prompt of {group.num_prompt_tokens} tokens"
        f"{' and beside its other sequences' if several else ''}"
    )
