"""Heartbeats: streams that nothing is sent on for a while say what they wait for, so that no proxy takes them for dead.

A token costs a count. One look at all streams, four times in the configured time, finds those whose count stands still
for as long, and asks their schedulers where they are: each once for all, however many wait.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from protos.pagewire.v1 import generation_pb2 as pb
from router.introspection import REQUEST_STATUS
from router.live_request import LiveRequest
from router.schedulers import Schedulers

_LOOKS = 4


@dataclass(slots=True)
class _Stream:
    """One that is written to.

    Attributes:
        num_taken: messages that it had when it was last looked at.
        since: when that number was new, or the last heartbeat was due.
    """

    live: LiveRequest
    num_taken: int
    since: float


class Heartbeats:
    """All streams to clients.

    Args:
        silence_s: seconds without a message after which one gets a heartbeat, and again after as many.
    """

    def __init__(self, schedulers: Schedulers, silence_s: float) -> None:
        self._schedulers = schedulers
        self._silence_s = silence_s
        self._streams: dict[int, _Stream] = {}

    @contextlib.contextmanager
    def over(self, live: LiveRequest) -> Iterator[None]:
        """While this lasts, a request's stream has heartbeats."""
        self._streams[live.handle] = _Stream(live, 0, time.monotonic())
        try:
            yield
        finally:
            del self._streams[live.handle]

    async def run(self) -> None:
        """Looks again and again, for ever."""
        while True:
            await asyncio.sleep(self._silence_s / _LOOKS)
            await self.look(time.monotonic())

    async def look(self, now: float) -> None:
        """Gives a heartbeat to every stream that has been silent for so long, whether its scheduler answers or not."""
        silent = [stream for stream in self._streams.values() if self._due(stream, now)]
        if not silent:
            return
        places = await self._schedulers.locate([stream.live.handle for stream in silent])
        for stream, (status, position) in zip(silent, places, strict=True):
            if stream.live.num_taken == stream.num_taken:
                heartbeat = pb.Heartbeat(status=REQUEST_STATUS.get(status), waited_ms=stream.live.total_ms)
                if position >= 0:
                    heartbeat.queue_position = position
                stream.live.beat(heartbeat)

    def _due(self, stream: _Stream, now: float) -> bool:
        if stream.live.num_taken != stream.num_taken:
            stream.num_taken, stream.since = stream.live.num_taken, now
        elif now >= stream.since + self._silence_s:
            stream.since = now
            return True
        return False
