"""The waiting queue of one tenant: which groups wait, and in which order. Among tenants, `fair_queue.py` gives turns.

WHY NOTHING STARVES, with one tenant. With several, this brings a group to the first place among its tenant's, and
`fair_queue.py` goes on from there. A group's rank is `arrival - priority * aging_s`, fixed at its arrival: a waiting
group rises only because later ones come in behind it, so priorities age without any sorting again. Take a group G.

1. Only a group that arrived less than `(MAX_PRIORITY - G's priority) * aging_s` seconds after G can be ahead of it. So
   the set of groups ahead is final by then; it holds at most what the queue may hold and what came in that time.
2. Admission takes the head of the queue or none, and preempts none. So no group behind G is admitted while G waits.
   None is taken where there is no room, nor in some steps in which the prompt of a group ahead ends
   (`admission.should_follow`).
3. The running group of the least rank is never preempted, gets at least a token of each step's budget
   (`max_num_seqs <= max_num_batched_tokens`), and has room until its end (`admission.max_tokens_that_fit`). So each
   step brings it nearer to its end; without chunked prefill every second step, since prefill and decode steps
   alternate. Its progress is lost only if a group of a lesser rank is admitted and takes its blocks; then it goes back
   to its place in the queue, and is counted again only when it is the first of those ahead of G.

Hence once the set is final, G runs within this number of steps: twice the sum of (prompt tokens + max_tokens + 1) over
the groups that are ahead of it, running or swapped out (four times without chunked prefill). It ends within the same
again for its own tokens. `tests/test_scheduler_fairness.py` holds the core to this bound. In practice it takes a small
share of that: a step advances all running groups, and prompts by more than a token.

Steps are counted here as they are planned, each answered before the next. With d of them in flight, a group may have to
wait for results before it has something to plan, in up to d - 1 of d plans: d times that number of steps suffices.
"""

import heapq
from operator import attrgetter

from scheduler.sequence import SequenceGroup


class WaitingQueue:
    """Groups that wait for blocks, by rank. A preempted one comes back to its old place."""

    def __init__(self) -> None:
        self._members: dict[int, SequenceGroup] = {}
        # Groups that have left stay in the heap until they come to the top, or outnumber the others.
        self._heap: list[tuple[tuple[float, int], SequenceGroup]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group.number in self._members

    def push(self, group: SequenceGroup) -> None:
        """Puts a group in its place."""
        self._members[group.number] = group
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(member.rank, member) for member in self._members.values() if member is not group]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (group.rank, group))

    def head(self) -> SequenceGroup | None:
        """The group that goes first."""
        while self._heap and self._heap[0][1] not in self:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, group: SequenceGroup) -> None:
        """Removes a group from wherever it stands."""
        del self._members[group.number]
        if not self._members:
            self._heap.clear()
        elif self._heap[0][1] is group:
            heapq.heappop(self._heap)

    def order(self) -> list[SequenceGroup]:
        """All groups, first to last."""
        return sorted(self._members.values(), key=attrgetter("rank"))
