"""Lanes: which decodes a step takes, where the worker works at several steps at once, each on other sequences.

A decode needs the token before it, so a sequence is in one step at a time, and a step that took all decodes would leave
none for the others. They are dealt: S steps are in flight, S being what the worker works at, and a step takes, oldest
first, at most its share of the groups that decode, and of those that are ready at most what is left when each step that
may still be planned gets as many. A group goes whole, as it is admitted and preempted. Prompts and chunks are not
dealt: what they need is known, so that the next chunk can follow in the next step.

WHY NO LANE STAYS EMPTY. Let S groups or more decode. While fewer than S steps are in flight, and nobody is ready, some
step holds two of the groups or more. When it is answered they are ready, and F > 1 steps are free: of R > 1 groups the
next step takes R / F at most, rounded up, so some are left for the one behind it, which is planned at once. So each
round of answers fills a lane more, until all are filled, and they stay so until a group ends.

WHY NOBODY STARVES. The oldest group is in the next step whenever it is ready. Take another one, G, that is ready while
M older ones decode. If it is left out with steps still free, another step is planned at once. Else the step that leaves
it out takes a full share, all of older ones: ceil((M + 1) / S) of them at least. After S - 1 such steps in a row fewer
than that are ready of the M, so G is in the next one; unless one of the M has ended meanwhile, or an older one has come
in, which are finitely many (`waiting_queue.py`).

WHY S STEPS, AND NOT ONE MORE. One more would keep the worker's first part busy for the time d that an answer and the
next plan are on their way. But the same decodes would be dealt over S + 1 steps. Let a part take a + c n for a step of
n sequences. A token for each of N sequences then takes (S + 1) a + c N, instead of S a + c N + d: it is a loss unless d
is more than a, which is what the weights take to read: and there one more step can be asked for by the worker itself.
"""

from scheduler.sequence import SequenceGroup


def deal(groups: list[SequenceGroup], num_lanes: int, num_free: int) -> list[SequenceGroup]:
    """Those of the running groups that the next step takes, in their order.

    Args:
        groups: by rank.
        num_lanes: steps that the worker works at, at the same time.
        num_free: those of them that may still be planned, the next one included.
    """
    num_decoding = num_ready = 0
    candidates: list[tuple[SequenceGroup, bool]] = []  # and whether it decodes
    for group in groups:
        # While what it samples is in flight nothing is missing of it.
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
