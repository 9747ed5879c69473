"""The waiting queue of one tenant: who waits, and in which order. Whose turn it is among tenants, `fair_queue.py` says.

WHY NOTHING STARVES, for one tenant; with several this gets a group to the first place of its own, and `fair_queue.py`
goes on from there. A group's rank is `arrival - priority * aging_s`, fixed at its arrival: waiting makes a group rise
only because later ones come in further back, so priorities age without anybody being sorted again. Take a group G.

1. Only a group that arrived less than `(MAX_PRIORITY - G's priority) * aging_s` seconds after G can be ahead of it. So
   the set of those ahead is final by then; it holds as many groups as the queue may and as came in that time.
2. Admission takes the queue's head or nobody, and preempts nobody. So no group behind G gets in while G waits. Nobody
   is where there is no room, and in steps in which the prompt of a group ahead ends (`admission.should_follow`).
3. The running group of the least rank is never preempted, gets at least a token of each step's budget
   (`max_num_seqs <= max_num_batched_tokens`), and has room to its end (`admission.max_tokens_that_fit`). So each step
   brings it nearer to its end; without chunked prefill each second step, since prompts and decodes take turns. What it
   has done is lost only if a group of a lesser rank comes in and takes its blocks; then it goes back to its place in
   the queue, and is counted again only when it is the first of those ahead of G.

Hence once the set is final, G runs within twice the sum of (prompt tokens + max_tokens + 1) steps over the groups that
are ahead of it, running or swapped out (four times without chunked prefill), and ends within as many again for itself;
`tests/test_scheduler_fairness.py` holds the core to it. In practice it is a small share of that: a step advances all
that run, and prompts by more than a token.

Steps are counted here as they are planned, each answered before the next. With d of them in flight, a group may have to
wait for results before it has something to plan, in up to d - 1 of d plans: d times as many suffice.
"""

import heapq
from operator import attrgetter

from scheduler.sequence import SequenceGroup


class WaitingQueue:
    """Groups that wait for blocks, by rank. A preempted one comes back to its old place."""

    def __init__(self) -> None:
        self._members: dict[int, SequenceGroup] = {}
        # Groups that have left stay in the heap until they surface, or outnumber the others.
        self._heap: list[tuple[tuple[float, int], SequenceGroup]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group.number in self._members

    def push(self, group: SequenceGroup) -> None:
        """Takes a group in at its place."""
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
        """Lets a group go, from wherever it stands."""
        del self._members[group.number]
        if not self._members:
            self._heap.clear()
        elif self._heap[0][1] is group:
            heapq.heappop(self._heap)

    def order(self) -> list[SequenceGroup]:
        """All groups, first to last."""
        return sorted(self._members.values(), key=attrgetter("rank"))
