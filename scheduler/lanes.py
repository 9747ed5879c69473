"""Lanes: which decodes a step takes, where the worker works on several steps at once, each with other sequences.

A decode needs the token before it, so a sequence is in one step at a time, and a step that took all decodes would leave
none for the others. So decodes are dealt out. S steps are in flight, where S is how many the worker works on at once. A
step takes, oldest first, at most its share of the groups that decode; and of those that are ready, at most an equal
share for each step that may still be planned. A group goes into a step whole, as it is admitted and preempted. Prompts
and their chunks are not dealt out: all that they need is known, so that the next chunk can follow in the next step.

WHY NO LANE STAYS EMPTY. Let S groups or more decode. While fewer than S steps are in flight, and no group is ready,
some step has two groups or more. When it is answered they are ready, and F > 1 steps are free: of R > 1 groups the next
step takes at most R / F, rounded up, so some are left for the step behind it, which is planned at once. So each round
of answers fills one more lane, until all are filled; and they stay so until a group ends.

WHY NO GROUP STARVES. The oldest group is in the next step whenever it is ready. Take another group, G, that is ready
while M older ones decode. If a step leaves it out with steps still free, another step is planned at once. Otherwise
that step takes a full share, all of them older groups: at least ceil((M + 1) / S). After S - 1 such steps in a row
fewer than that are ready of the M, so G is in the next one; unless one of the M has ended meanwhile, or an older group
has come in, which happens finitely often (`waiting_queue.py`).

WHY S STEPS, AND NOT ONE MORE. One more would keep the worker's first part busy for the time d that an answer and the
next plan take on their way. But the same decodes would be dealt out over S + 1 steps. Let a part take a + c n for a
step of n sequences. A token for each of N sequences then takes (S + 1) a + c N instead of S a + c N + d: that is a loss
unless d is more than a, the time that reading the weights takes; and in that case the worker can ask for one more step
itself.
"""

from scheduler.sequence import SequenceGroup


def deal(groups: list[SequenceGroup], num_lanes: int, num_free: int) -> list[SequenceGroup]:
    """The running groups that the next step takes, in order of rank.

    Args:
        groups: the running groups, in order of rank.
        num_lanes: how many steps the worker works on at the same time.
        num_free: how many of these may still be planned, the next one included.
    """
    num_decoding = num_ready = 0
    candidates: list[tuple[SequenceGroup, bool]] = []  # with whether it decodes
    for group in groups:
        # While a sequence's next token is in flight, it has nothing to compute.
        missing = [sequence.num_tokens - sequence.num_computed_tokens for sequence in group.live]
        most = max(missing)
        decodes = group.forked and most <= 1
        num_decoding += decodes
        num_ready += decodes and most
        if most:
            candidates.append((group, decodes))
    share = min(-(-num_decoding // num_lanes), -(-num_ready // num_free))
    taken = []
    for group, decodes in candidates:
        if not decodes or share:
            taken.append(group)
            share -= decodes
    return taken
