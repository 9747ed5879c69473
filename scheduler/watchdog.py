"""Progress: whether steps come back, or would if there were any. The health check reports what is found here.

A look costs nothing while steps come back. An idle worker is asked for its health, beside the stream of steps: a
request made up to test it would take the place of a client's.
"""

import asyncio
import logging
from itertools import islice

from scheduler.explain import explain
from scheduler.loop import SchedulerLoop

_NUM_LOOKS = 5
# How many times as long as expected a step may take.
_SLACK = 4.0
log = logging.getLogger(__name__)


class Watchdog:
    """Looks at a loop a few times in `stall_s` seconds.

    It counts time in looks, so that a scheduler that was itself suspended does not blame its worker.
    """

    def __init__(self, loop: SchedulerLoop, stall_s: float) -> None:
        self._loop = loop
        self._stall_s = stall_s
        self._interval_s = min(1.0, stall_s / _NUM_LOOKS)
        self._num_answered = 0
        # Looks in a row at which there was work and no step had come back.
        self._num_looks = 0

    async def run(self) -> None:
        """Looks, for ever."""
        while True:
            await asyncio.sleep(self._interval_s)
            worker, was_stalled = self._loop.info, self._loop.stall is not None
            stall = await self.look()
            if not self._loop.connected or self._loop.info is not worker:
                continue  # what was seen is not about this worker
            self._loop.set_stall(stall)
            if stall is not None and not was_stalled:
                log.error("no progress: %s", stall, extra=self._facts())
            elif stall is None and was_stalled:
                log.info("progress again")

    async def look(self) -> str | None:
        """Why there is no progress; None if there is, or would be."""
        loop = self._loop
        if not loop.connected or loop.num_answered != self._num_answered:
            self._num_answered, self._num_looks = loop.num_answered, 0
            return None
        steps, has_requests = loop.in_flight, loop.core is not None and loop.core.num_live > 0
        if steps is None and not has_requests:
            self._num_looks = 0
            silence = await loop.look_at_worker(self._stall_s)
            return None if silence is None else f"the worker does not answer a health check ({silence})"
        self._num_looks += 1
        waited_s = self._num_looks * self._interval_s
        if waited_s <= max(self._stall_s, _SLACK * steps.expected_s if steps is not None else 0.0):
            return loop.stall
        if steps is None:
            loop.wake()  # another plan costs nothing
            return "requests wait, and no step is planned"
        return f"the worker has not answered a step for {waited_s - self._interval_s:g} s"

    def _facts(self) -> dict[str, object]:
        """The scheduler's state, for the log: it helps to find the cause."""
        core, steps = self._loop.core, self._loop.in_flight
        assert core is not None
        facts: dict[str, object] = {
            "waiting": core.num_waiting,
            "running": core.num_running,
            "swapped": core.num_swapped,
            "free_blocks": core.blocks.num_free,
            "blocks": core.blocks.num_blocks,
        }
        if steps is not None and steps.oldest is not None:
            facts |= {"step": steps.oldest.step_id, "step_tokens": steps.oldest.num_tokens}
        for group in islice(core.queues.groups.values(), 1):  # the oldest
            facts |= {"request_id": group.request_id, "request": explain(core, group).message}
        return facts
