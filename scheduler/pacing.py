"""The steps that the worker has, and when to plan the next one. Time is an argument here too.

If a second step were planned as soon as there is room for it, a request that arrives during the first would wait for
both. So it is planned late: when the worker is expected to be done soon, judging by how long its last steps took. Then
planning, sending and delivering to routers hide behind the forward pass, and a new request waits for little more than
the step that runs. If the expectation is wrong, the worker or the new request waits for a while; nothing else depends
on it.

A worker that works on several steps at once has room for a new request beside those that it has. So while it has fewer
steps than that, the next is planned as soon as there is something to plan.
"""

import math
from collections import deque

from scheduler.plan import Plan

# A step is planned this long before the worker is expected to be done: a fixed time for planning, sending and waking up
# late, and a share of the expected time, since that may be wrong.
_LEAD_S = 0.004
_LEAD_SHARE = 0.15
_AT_ONCE = -math.inf


class Pacing:
    """The steps that the worker has, oldest first.

    Args:
        max_steps: the most that there may be.
        num_concurrent: how many of them the worker works on at the same time.
    """

    def __init__(self, max_steps: int, num_concurrent: int = 1) -> None:
        self._max_steps = max_steps
        self._num_concurrent = num_concurrent
        # Each with the seconds for which it is expected to keep the worker busy.
        self._steps: deque[tuple[Plan, float]] = deque()
        # When the worker began each step that it works on, as far as that shows here.
        self._begun: deque[float] = deque()
        self._idle = False

    @property
    def expected_s(self) -> float:
        """How long all steps together are expected to take, s.

        A worker for S steps is a pipeline of S parts; steps go through them in order, each for the same time in every
        part. So their times in one part add up, and the longest goes through the other S - 1 parts as well.
        """
        seconds = [seconds for _, seconds in self._steps]
        return sum(seconds) + (self._num_concurrent - 1) * max(seconds, default=0.0)

    @property
    def oldest(self) -> Plan | None:
        """The step whose result comes next."""
        return self._steps[0][0] if self._steps else None

    def add(self, plan: Plan, expected_s: float, now: float) -> None:
        """Adds a step that is sent now."""
        self._steps.append((plan, expected_s))
        self._note_begun(now)

    def rest(self) -> None:
        """Takes note that there is nothing to plan at present."""
        self._idle = True

    def stir(self) -> bool:
        """Something may have come to be planned. Returns whether to plan it now, without waiting for a result."""
        stirred = self._idle and self._num_concurrent > 1
        self._idle = self._idle and not stirred
        return stirred

    def pop(self, now: float) -> float:
        """Removes the oldest step, which is answered.

        Returns:
            Seconds since the worker began it: where it works on several at once, more than the time between answers.
        """
        self._steps.popleft()
        self._idle = False
        took_s = now - self._begun.popleft()
        self._note_begun(now)
        return took_s

    def next_plan_time(self) -> float | None:
        """When to plan the next step; None: not before the next result, or `stir`.

        Nothing is planned behind a step that samples for a beam search: a step without the search would follow, so that
        it went on only in every second step. Where the worker works on several at once, others are planned beside it.
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
        """If there is another step that the worker can work on, it begins it now."""
        if len(self._begun) < min(len(self._steps), self._num_concurrent):
            self._begun.append(now)
