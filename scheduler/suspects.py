"""Suspects: requests in whose steps a worker was lost, one of which may have killed it.

They are run again in halves, one half at a time, with the worker to itself: groups that are not suspects wait, and are
not in its steps. When the worker is lost again, the half is halved; once all of a half have sampled, it is cleared. So
a poisonous request is found by bisection, and the others go on. In the end a suspect is alone; it is given up when
`max_failed_steps` workers in a row were lost in its steps, the last one in steps of it alone.

SAMPLED means that each unfinished sequence has a token that it did not have when the worker was lost. Less would not
do: what kills may be the last chunk of a prompt, or the second sequence that is recomputed. So a request that kills the
same way whenever it is computed is never cleared. One that kills only now and then, or only beside others, may be
cleared, and costs a worker each time that it kills again; but each time it is a token further.

THE BOUND. Let N requests be in the steps that are lost with the first worker, one of them poisonous. After k workers,
its half has at most N / 2^k of them (rounded up), and no other request comes in. So it is alone in the steps that are
lost with worker number 1 + ceil(log2 N) at the latest, and costs max(max_failed_steps, 1 + ceil(log2 N)) workers. With
p poisonous requests it is at most p times that number: each lost worker counts towards one of them. A worker that is
lost for another reason is taken for one of these; and one more is lost to a request that ends while the step of it that
kills is in flight.

Suspects' steps have few tokens, so that streams resume one after the other, and not all of them after a long step. The
bound is the same: a step that is lost still has at most a half in it.

No request is suspected if no step was in flight, or if the worker left in order: then it has not run what it left.
"""

from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from scheduler.admission import Reason
from scheduler.fair_queue import FairQueue
from scheduler.in_flight import StepsInFlight
from scheduler.plan import Plan
from scheduler.queues import Queues
from scheduler.sequence import SequenceGroup, Status

# Why a group loses its blocks to those on trial, and in which mode.
RUN_APART = "recompute: others run apart, one of which may have killed a worker"


@dataclass(frozen=True, slots=True)
class Conviction:
    """A group that is given up: `num_workers` in a row were lost in its steps, the last one in steps of it alone."""

    group: SequenceGroup
    num_workers: int


@dataclass(slots=True)
class _Record:
    """The record of a group that has not sampled since a worker was lost in its steps.

    Attributes:
        num_workers: workers lost in its steps in a row.
        num_tokens: tokens that each unfinished sequence had when the last of them was lost, by the sequence's index.
    """

    num_workers: int = 0
    num_tokens: dict[int, int] = field(default_factory=dict)


class Suspects:
    """Groups that have to run apart from all others; false when there are none.

    Args:
        max_failed_steps: workers lost in a row after which a group is given up.
        queues: where all groups are.
        in_flight: the steps that are lost with a worker.
    """

    def __init__(self, max_failed_steps: int, queues: Queues, in_flight: StepsInFlight) -> None:
        self._max_failed_steps = max_failed_steps
        self._queues = queues
        self._in_flight = in_flight
        self._records: dict[int, _Record] = {}
        # The first set is on trial. Each is in order of rank; every live group with a record is in one of them.
        self._sets: deque[list[SequenceGroup]] = deque()

    def __bool__(self) -> bool:
        return bool(self._sets)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group.number in self._records

    @property
    def num_suspects(self) -> int:
        """How many suspects there are."""
        return len(self._records)

    @property
    def on_trial(self) -> list[SequenceGroup]:
        """The groups that may run now, least rank first, including those already cleared or ended."""
        return self._sets[0] if self._sets else []

    def num_workers_lost(self, group: SequenceGroup) -> int:
        """How many workers in a row were lost in a suspect's steps."""
        return self._records[group.number].num_workers

    def accuse(self) -> Conviction | None:
        """Suspects what is in flight of having killed the worker. The caller has to end a group that is convicted."""
        computed = self._in_flight.groups
        accused = sorted((group for group in computed if group.live), key=attrgetter("rank"))
        if not accused:
            return None
        for group in accused:
            record = self._records.setdefault(group.number, _Record())
            record.num_workers += 1
            record.num_tokens = {sequence.index: sequence.num_tokens for sequence in group.live}
        others = [[group for group in suspects if group in self and group not in accused] for suspects in self._sets]
        middle = (len(accused) + 1) // 2
        self._sets = deque(filter(None, (accused[:middle], accused[middle:], *others)))
        num_workers = self.num_workers_lost(accused[0])
        if len(computed) > 1 or num_workers < self._max_failed_steps:
            return None
        return Conviction(accused[0], num_workers)

    def clear(self, plan: Plan) -> None:
        """Clears the groups of an answered step that have sampled."""
        for row in plan.rows if self._records else ():
            record = self._records.get(row.group.number)
            if record is not None and all(
                sequence.num_tokens > record.num_tokens.get(sequence.index, 0) for sequence in row.group.live
            ):
                del self._records[row.group.number]

    def head_of(self, waiting: FairQueue) -> SequenceGroup | None:
        """The group that comes in next: one on trial while there are suspects, otherwise the head of all that wait."""
        if self._sets and not self._queues.running and not self._in_flight and not self._left():
            self._turn_to_next()  # those on trial ended as soon as they came in
        if not self._sets:
            return waiting.head()
        return next((group for group in self.on_trial if group.status is Status.WAITING), None)

    def turn(self, held_up: Reason | None) -> list[SequenceGroup] | None:
        """Puts the next groups on trial, once those before them are through.

        Args:
            held_up: what the first waiting group lacked. If there was no room for more, those that ran go through
                without the rest.

        Returns:
            The groups that run, and now have to wait; None if nothing may be planned before the steps in flight are
            answered: of two groups that may kill the worker, only one should have it.
        """
        if not self._sets:
            return []
        left = self._left()
        full = held_up in (Reason.BLOCKS, Reason.SEQUENCES)
        if left and not (full and all(group.status is not Status.RUNNING for group in left)):
            return []
        if self._in_flight:
            return None
        self._turn_to_next()
        if not self._sets:
            return []
        for group in list(self._queues.swapped):
            self._queues.preempt(group)
        return list(self._queues.running)

    def check(self) -> None:
        """Asserts that each suspect will have its trial; for tests, after every step."""
        numbers = [group.number for suspects in self._sets for group in suspects if group.live]
        assert len(numbers) == len(set(numbers)), "a suspect is in two sets"
        waiting = {number for number in self._records if number in self._queues.groups}
        assert waiting <= set(numbers), "a suspect is in no set"

    def _turn_to_next(self) -> None:
        """Goes on to those on trial for which there was no room beside the others, or else to the next live set."""
        self._sets[0] = self._left()
        while self._sets and not self._left():
            self._sets.popleft()
        if not self._sets:
            self._records.clear()

    def _left(self) -> list[SequenceGroup]:
        """The groups on trial that are neither cleared nor ended."""
        return [group for group in self.on_trial if group.live and group in self]
