"""Heartbeats: silent streams say after a while what they wait for, so that no proxy takes them for dead.

A message costs only a count. A look at all streams, four times within the configured time, finds those whose count has
stood still for that time, and asks their schedulers where they are: each scheduler once, however many streams wait.
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
    """A stream that is written to.

    Attributes:
        num_taken: messages that it had got when it was last looked at.
        since: when that number was last seen to change, or the last heartbeat was due.
    """

    live: LiveRequest
    num_taken: int
    since: float


class Heartbeats:
    """Heartbeats of all streams to clients.

    Args:
        silence_s: seconds without a message after which a stream gets a heartbeat, and between its heartbeats.
    """

    def __init__(self, schedulers: Schedulers, silence_s: float) -> None:
        self._schedulers = schedulers
        self._silence_s = silence_s
        self._streams: dict[int, _Stream] = {}

    @contextlib.contextmanager
    def over(self, live: LiveRequest) -> Iterator[None]:
        """Gives a request's stream heartbeats for as long as the block lasts."""
        self._streams[live.handle] = _Stream(live, 0, time.monotonic())
        try:
            yield
        finally:
            del self._streams[live.handle]

    async def run(self) -> None:
        """Looks at the streams again and again, for ever."""
        while True:
            await asyncio.sleep(self._silence_s / _LOOKS)
            await self.look(time.monotonic())

    async def look(self, now: float) -> None:
        """Sends a heartbeat on every stream that was silent for `silence_s`, whether its scheduler answers or not."""
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
