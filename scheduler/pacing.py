"""The steps that are with the worker, and when the next one is to be planned. Time is an argument here too.

Planned as soon as there is room for it, a second step would make whoever arrives during the first wait for both. So it
is planned late: when the worker is expected to be done soon, by what its last steps took. Then planning, sending and
telling the routers hide behind the forward pass, and a newcomer waits for little more than the step that runs. Where
the expectation is wrong, the worker waits for a while, or the newcomer does; nothing else depends on it.
"""

from collections import deque

from scheduler.plan import Plan

# How long before the worker is expected to be done: for planning, sending, and for being woken up late; and as a share
# of what it is expected to take, for being wrong about that.
_LEAD_S = 0.004
_LEAD_SHARE = 0.15


class Pacing:
    """At most `max_steps` steps, oldest first.

    Attributes:
        begun: when the worker came to the oldest of them, as far as that shows here.
    """

    def __init__(self, max_steps: int) -> None:
        self.begun = 0.0
        self._max_steps = max_steps
        # Each with the seconds that it is expected to take.
        self._steps: deque[tuple[Plan, float]] = deque()
        self._idle = False

    @property
    def expected_s(self) -> float:
        """What the steps are expected to take, all together."""
        return sum(seconds for _, seconds in self._steps)

    @property
    def oldest(self) -> Plan | None:
        """The step whose result comes next."""
        return self._steps[0][0] if self._steps else None

    def add(self, plan: Plan, expected_s: float, now: float) -> None:
        """Takes in a step that is sent now."""
        if not self._steps:
            self.begun = now
        self._steps.append((plan, expected_s))

    def rest(self) -> None:
        """There is nothing to plan before the next result."""
        self._idle = True

    def pop(self, now: float) -> float:
        """The oldest step is answered.

        Returns:
            Seconds that it took.
        """
        self._steps.popleft()
        self._idle = False
        took_s, self.begun = now - self.begun, now
        return took_s

    def next_plan_time(self) -> float | None:
        """When to plan the next step; None for not before the next result.

        A step that samples for a beam search is waited for: planned without it, each search would go on in every second
        step only.
        """
        if not self._steps:
            return self.begun
        if self._idle or len(self._steps) == self._max_steps or any(plan.num_beams for plan, _ in self._steps):
            return None
        expected_s = self.expected_s
        return self.begun + expected_s - _LEAD_S - _LEAD_SHARE * expected_s
