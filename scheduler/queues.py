"""Where each live group is, and how it moves from one place to another with its blocks.

    waiting --admit--> running --preempt--> waiting, or swapped --swap_in--> running        any --finish--> gone

All three are in order of rank; those that wait, within each tenant. The scheduler decides which group moves, and when.
"""

from bisect import bisect_left, insort
from operator import attrgetter

from scheduler.block_manager import BlockManager
from scheduler.fair_queue import FairQueue
from scheduler.sequence import Sequence, SequenceGroup, Status

_by_rank = attrgetter("rank")


class Queues:
    """All groups from submission to their end.

    Attributes:
        blocks: the pools that hold their blocks.
        groups: the live groups by number.
        waiting: groups that wait for blocks, of all tenants.
        running: groups that hold blocks, least rank first.
        swapped: groups whose blocks are in the swap pool, least rank first.
        num_running_seqs: sequences of the running groups.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.groups: dict[int, SequenceGroup] = {}
        self.waiting = FairQueue()
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self.num_running_seqs = 0
        self._gone: list[int] = []

    def submit(self, group: SequenceGroup) -> None:
        """Takes in a new group; it waits."""
        self.groups[group.number] = group
        self.waiting.enter(group)

    def admit(self, group: SequenceGroup, num_tokens: int, prefix: list[tuple[int, int]]) -> None:
        """Gives a waiting group's root blocks for `num_tokens` tokens, of which `prefix` holds the first."""
        is_new = group.first_scheduled is None
        self.waiting.admit(group, num_tokens - len(prefix) * self.blocks.block_size if is_new else 0)
        self.blocks.allocate(group.root, num_tokens, prefix)
        self._run(group)

    def preempt(self, group: SequenceGroup) -> None:
        """Takes all blocks of a running or swapped group, which waits to be computed again."""
        self._leave(group)
        for sequence in group.live:
            self.blocks.free(sequence)
        group.move_to(Status.WAITING)
        group.forked = len(group.live) == 1
        self.waiting.push(group)

    def swap_out(self, group: SequenceGroup) -> None:
        """Moves the blocks of a running group to the swap pool, which has room for them."""
        self._leave(group)
        self.blocks.swap_out(group)
        group.move_to(Status.SWAPPED)
        insort(self.swapped, group, key=_by_rank)

    def swap_in(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Moves the blocks of a swapped group back.

        Returns:
            Pairs (swap block, block) to be copied.
        """
        self._leave(group)
        copies = self.blocks.swap_in(group)
        self._run(group)
        return copies

    def finish(self, group: SequenceGroup, sequence: Sequence, status: Status) -> None:
        """Ends a sequence and, with its last one, the group; its blocks are free on return."""
        last = len(group.live) == 1
        if last:
            self.leave_for_good(group)
        elif sequence.status is Status.RUNNING and group.beam is None:
            self.num_running_seqs -= 1
        sequence.move_to(status)
        self.blocks.free(sequence)
        group.live.remove(sequence)

    def leave_for_good(self, group: SequenceGroup) -> None:
        """Takes a group that ends out of its queue."""
        self._leave(group)
        self.waiting.leave(group)
        del self.groups[group.number]
        if group.known_to_worker:
            self._gone.append(group.number)

    def forget_worker(self) -> None:
        """Makes all groups wait, to be computed from the beginning: the worker is gone, and its memory with it."""
        for group in [*self.running, *self.swapped]:
            self.preempt(group)
        for group in self.groups.values():
            group.known_to_worker = False
            group.forget_steps_in_flight()
        self._gone.clear()
        self.blocks.disown_all()

    def take_gone(self) -> list[int]:
        """Numbers of the groups known to the worker that have ended since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def check(self, max_num_seqs: int) -> None:
        """Asserts the invariants of queues and blocks; for tests, after every step."""
        groups = self.groups.values()
        self.blocks.check(sequence for group in groups for sequence in group.sequences)
        places = {
            Status.WAITING: {group.number for group in groups if group in self.waiting},
            Status.RUNNING: {group.number for group in self.running},
            Status.SWAPPED: {group.number for group in self.swapped},
        }
        assert sum(map(len, places.values())) == len(groups), "a live group is in no queue, or in two"
        self.waiting.check(groups)
        assert len(self.waiting) == len(places[Status.WAITING])
        assert self.waiting.num_tokens == sum(group.num_prompt_tokens for group in groups if group in self.waiting)
        for group in groups:
            assert group.live, "an ended group is still here"
            assert all(sequence.status is group.status for sequence in group.live), "a sequence is in two queues"
            assert group.number in places[group.status], "a group is not where its status says"
            assert all(s.status.finished and not s.block_table for s in group.sequences if s not in group.live)
            holds, swapped = (any(s.block_table for s in group.live), any(s.swap_table for s in group.live))
            assert not holds or group.status is Status.RUNNING, "a group that does not run holds blocks"
            assert not swapped or group.status is Status.SWAPPED, "a group that is not swapped holds swap blocks"
        for queue in (self.running, self.swapped):
            assert queue == sorted(queue, key=_by_rank)
        assert self.num_running_seqs == sum(group.num_seqs for group in self.running) <= max_num_seqs

    def _run(self, group: SequenceGroup) -> None:
        group.move_to(Status.RUNNING)
        insort(self.running, group, key=_by_rank)
        self.num_running_seqs += group.num_seqs

    def _leave(self, group: SequenceGroup) -> None:
        """Takes a group out of its queue."""
        match group.status:
            case Status.WAITING:
                self.waiting.remove(group)
            case Status.RUNNING:
                del self.running[bisect_left(self.running, group.rank, key=_by_rank)]
                self.num_running_seqs -= group.num_seqs
            case Status.SWAPPED:
                del self.swapped[bisect_left(self.swapped, group.rank, key=_by_rank)]
            case _:
                raise AssertionError("a group that has ended is in no queue")
