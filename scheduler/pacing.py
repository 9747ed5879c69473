"""The steps that are with the worker, and when the next one is to be planned. Time is an argument here too.

Planned as soon as there is room for it, a second step would make whoever arrives during the first wait for both. So it
is planned late: when the worker is expected to be done soon, by what its last steps took. Then planning, sending and
telling the routers hide behind the forward pass, and a newcomer waits for little more than the step that runs. Where
the expectation is wrong, the worker waits for a while, or the newcomer does; nothing else depends on it.

A worker that works at several steps at once has room for a newcomer beside those that it has. So as long as it is at
fewer than it can be, the next is planned as soon as there is something to plan.
"""

import math
from collections import deque

from scheduler.plan import Plan

# How long before the worker is expected to be done: for planning, sending, and for being woken up late; and as a share
# of what it is expected to take, for being wrong about that.
_LEAD_S = 0.004
_LEAD_SHARE = 0.15
_AT_ONCE = -math.inf


class Pacing:
    """The steps, oldest first.

    Args:
        max_steps: how many there are at most.
        num_concurrent: how many of them the worker works at, at the same time.
    """

    def __init__(self, max_steps: int, num_concurrent: int = 1) -> None:
        self._max_steps = max_steps
        self._num_concurrent = num_concurrent
        # Each with the seconds for which it is expected to hold the worker up.
        self._steps: deque[tuple[Plan, float]] = deque()
        # When the worker came to those that it is at, as far as that shows here.
        self._begun: deque[float] = deque()
        self._idle = False

    @property
    def expected_s(self) -> float:
        """What the steps are expected to take, all together.

        They go through the worker in order, each in as many parts of one length as it works at steps: so they come out
        one such part after another, and the first of them waits for the longest to have gone through the others.
        """
        seconds = [seconds for _, seconds in self._steps]
        return sum(seconds) + (self._num_concurrent - 1) * max(seconds, default=0.0)

    @property
    def oldest(self) -> Plan | None:
        """The step whose result comes next."""
        return self._steps[0][0] if self._steps else None

    def add(self, plan: Plan, expected_s: float, now: float) -> None:
        """Takes in a step that is sent now."""
        self._steps.append((plan, expected_s))
        self._note_begun(now)

    def rest(self) -> None:
        """There is nothing to plan, as things are."""
        self._idle = True

    def stir(self) -> bool:
        """There may be something to plan now. Gives whether it can be, before a result: where the worker has room."""
        stirred = self._idle and self._num_concurrent > 1
        self._idle = self._idle and not stirred
        return stirred

    def pop(self, now: float) -> float:
        """The oldest step is answered.

        Returns:
            Seconds that it took since the worker came to it: more than answers are apart where that works at several.
        """
        self._steps.popleft()
        self._idle = False
        took_s = now - self._begun.popleft()
        self._note_begun(now)
        return took_s

    def next_plan_time(self) -> float | None:
        """When to plan the next step; None for not before the next result, or `stir`.

        Behind a step that samples for a beam search nothing is planned: without it, each search would go on in every
        second step only. Beside it others are.
        """
        if not self._steps:
            return _AT_ONCE
        if self._idle or len(self._steps) == self._max_steps:
            return None
        if self._num_concurrent > 1:
            return _AT_ONCE
        if any(plan.num_beams for plan, _ in self._steps):
            return None
        expected_s = self.expected_s
        return self._begun[0] + expected_s - _LEAD_S - _LEAD_SHARE * expected_s

    def _note_begun(self, now: float) -> None:
        """If there is a step that the worker can come to, it comes to it now."""
        if len(self._begun) < min(len(self._steps), self._num_concurrent):
            self._begun.append(now)
