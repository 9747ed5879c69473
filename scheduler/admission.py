"""Admission: which requests may wait, and whether a waiting group can have its blocks, now or ever."""

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
    """The waiting queue is full; nothing was changed. In `retry_s` seconds there should be room."""

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
    """The head of a queue and the blocks it lacked: remembered, since matching its tokens in each step would cost time.

    Attributes:
        num_blocks: free blocks that it needed, the reserved ones included.
        token_ids: tokens to look up in the prefix cache; none if it is swapped out, or does not use the cache.
        prefix: the blocks that the prefix cache had for them.
    """

    group: SequenceGroup
    num_blocks: int
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    prefix: list[tuple[int, int]] = field(default_factory=list)

    def holds(self, group: SequenceGroup, blocks: BlockManager) -> bool:
        """Whether `group` still has too few free blocks, and no more of its tokens are cached."""
        if group is not self.group or blocks.num_free >= self.num_blocks:
            return False
        return not blocks.extends(self.prefix, self.token_ids, group.salt)


def check_submission(
    policy: Policy, num_prompt_tokens: int, n: int, max_tokens: int, beam: BeamParams | None, priority: int
) -> None:
    """Refuses a request that can never run.

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
    """Refuses a request that the waiting queue has no room for.

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
    """Whether a group whose first tokens are in `prefix` can be admitted while `num_reserved` blocks stay free.

    Returns:
        The answer, and how many blocks have to be free for the group, the reserved ones included.
    """
    num_blocks = num_blocks_to_admit(group, blocks)
    num_free_needed = num_blocks - blocks.num_held_of(prefix) + num_reserved
    if num_blocks > blocks.num_blocks:
        return Admission.NEVER, num_free_needed
    return Admission.OK if num_free_needed <= blocks.num_free else Admission.LATER, num_free_needed


def num_blocks_to_admit(group: SequenceGroup, blocks: BlockManager) -> int:
    """Blocks for all tokens of a group and one more per sequence: full prompt blocks once, the rest per sequence."""
    num_shared = group.num_prompt_tokens // blocks.block_size
    num_own = [blocks.num_blocks_for(sequence.num_tokens + 1) - num_shared for sequence in group.live]
    num_to_come = group.num_seqs - len(group.live)  # beams that have not begun
    return num_shared + sum(num_own) + num_to_come * num_own[0]


def num_blocks_to_swap_in(group: SequenceGroup, blocks: BlockManager) -> int:
    """Blocks for what is in the swap pool, and for the next tokens, so that the group need not leave again at once."""
    num_blocks = blocks.num_blocks_to_swap(group)
    for sequence in group.live if group.forked else group.live[:1]:
        num_new = blocks.num_blocks_for(sequence.num_tokens) - len(sequence.swap_table)
        begun = sequence.num_computed_tokens % blocks.block_size > 0  # perhaps shared, so that it has to be copied
        num_blocks += max(1, num_new + begun)
    return num_blocks


def max_tokens_that_fit(num_prompt_tokens: int, num_seqs: int, blocks: BlockManager) -> int:
    """Output tokens per sequence at which `num_seqs` sequences of one prompt, alone, fill the pool.

    A request capped at this can always grow when it is alone, so the oldest group never waits. A prompt that leaves no
    room is refused at admission, whatever this returns.
    """
    num_shared = num_prompt_tokens // blocks.block_size
    num_own_tokens = (blocks.num_blocks - num_shared) // num_seqs * blocks.block_size
    return max(1, num_shared * blocks.block_size + num_own_tokens - num_prompt_tokens)


def should_follow(plan: Plan, num_tokens: int, num_waiting: int, rates: Rates) -> bool:
    """Whether the first waiting prompt is better begun in the next step, although this one has room for it.

    Where a step's time is its arithmetic, all prompts of a step end only when the last of them would. A prompt that
    joins holds up each prompt that ends in the step for as long as its own tokens take, and gets its own first token no
    sooner than if it came right behind them. But the extra step costs every waiting group, this one included, the time
    of a decode step. Whichever costs less makes for the shorter average TTFT. So steps fill up when many wait; and of
    two prompts, the first does not wait for the other's end. On a GPU, where joining hardly makes a step longer, all
    join.

    No group is overtaken, and in each step that a prompt does not join, another prompt ends.

    Args:
        plan: the step so far.
        num_tokens: tokens of the prompt that this step has room for.
        num_waiting: groups that wait.
        rates: how fast the worker is; until that is known, all join.
    """
    return plan.num_prefills_done * num_tokens * rates.prefill_token_s > num_waiting * rates.decode_step_s


def why_never(group: SequenceGroup, blocks: BlockManager) -> str:
    """What `Admission.NEVER` means, in words for the client."""
    output = max(len(sequence.output_token_ids) for sequence in group.live)
    so_far = f", {output} tokens of output" if output else ""
    return (
        f"{group.num_seqs} x (a prompt of {group.num_prompt_tokens} tokens{so_far} and one more) need "
        f"{num_blocks_to_admit(group, blocks)} of the {blocks.num_blocks} KV blocks of {blocks.block_size} tokens that "
        f"there are"
    )


def why_no_more(group: SequenceGroup, sequence: Sequence, blocks: BlockManager) -> str:
    """Why a sequence ends before it has all the tokens that the client wants; in words for the client."""
    several = group.n > 1 or group.beam is not None
    return (
        f"{len(sequence.output_token_ids)} tokens of output are all that there is room for in the {blocks.num_blocks} "
        f"KV blocks of {blocks.block_size} tokens that there are, behind a prompt of {group.num_prompt_tokens} tokens"
        f"{' and beside its other sequences' if several else ''}"
    )
