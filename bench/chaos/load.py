"""Clients that ask, read and compare all the time, and the times of their deltas."""

import asyncio
import bisect
import itertools
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.chaos.requests import Asked, difference
from pagewire import AsyncClient
from pagewire.access import Access
from pagewire.errors import RequestError
from pagewire.results import Completion

# Codes after which a client may ask again, if nothing of the answer has come.
_ASK_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_ASK_AGAIN_S = 0.2
# An answer takes seconds, and the longest fault half a minute.
_LONGEST_S = 180.0
# A stream that has been silent for longer than this was pausing before the fault.
_SHORTLY_S = 1.0


class _OwnConnection(Access):
    """Channels that share no connection with the others of this process, so that each may reach another router."""

    def aio_channel(self, target: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        return super().aio_channel(target, [*options, ("grpc.use_local_subchannel_pool", 1)])


@dataclass(slots=True, eq=False)
class Reading:
    """One stream.

    Attributes:
        times: when its deltas came, by time.monotonic.
        ended: None while it is live.
    """

    asked: Asked
    started: float
    times: "array[float]" = field(default_factory=lambda: array("d"))
    ended: float | None = None

    def moved_since(self, at: float) -> bool:
        """Whether a delta has come since; of an answer that is held back, whether all of it has."""
        return self.ended is not None or (self.asked.streamed and bool(self.times) and self.times[-1] > at)

    def longest_gap_s(self, start: float, end: float) -> float | None:
        """The longest time between two deltas that touches these times; None unless it moved shortly before them."""
        before = bisect.bisect(self.times, start) - 1
        if not self.asked.streamed or before < 0 or self.times[before] < start - _SHORTLY_S:
            return None
        pairs = itertools.pairwise(self.times[before:])
        return max((late - early for early, late in pairs if early < end), default=None)


@dataclass
class Load:
    """Clients that go round a list of requests.

    Attributes:
        readings: every stream, in the order of their start.
        live: those that have not ended.
        wrong: what was wrong with an answer, or why there was none.
        num_answers: that were as expected.
        num_tokens: in them.
        num_asked_again: requests that a router refused, or left before their first token.
    """

    target: str
    requests: Sequence[Asked]
    num_clients: int
    readings: list[Reading] = field(default_factory=list)
    live: set[Reading] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    num_answers: int = 0
    num_tokens: int = 0
    num_asked_again: int = 0

    async def once(self, requests: Sequence[Asked]) -> list[Completion]:
        """The answer of each, one after another."""
        async with AsyncClient(self.target, _OwnConnection()) as client:
            return [await self._answer(client, asked) for asked in requests]

    async def run(self, expected: Sequence[Completion], stop: asyncio.Event, num_rounds: int | None = None) -> None:
        """Asks for all, again and again, until `stop` is set or so many times; live answers are read to their end."""
        rounds = itertools.count() if num_rounds is None else range(num_rounds)
        work = iter(pair for _ in rounds for pair in zip(self.requests, expected, strict=True))
        async with asyncio.TaskGroup() as group:
            for _ in range(self.num_clients):
                group.create_task(self._client(work, stop))

    async def _client(self, work: Iterator[tuple[Asked, Completion]], stop: asyncio.Event) -> None:
        async with AsyncClient(self.target, _OwnConnection()) as client:
            for asked, expected in work:
                if stop.is_set():
                    return
                try:
                    async with asyncio.timeout(_LONGEST_S):
                        answer = await self._answer(client, asked)
                except (RequestError, TimeoutError) as error:
                    self._note(asked, f"{type(error).__name__}: {error}")
                    continue
                if (found := difference(expected, answer)) is not None:
                    self._note(asked, f"{answer.request_id}: {found}")
                else:
                    self.num_answers += 1
                    self.num_tokens += sum(len(output.token_ids) for output in answer.outputs)

    async def _answer(self, client: AsyncClient, asked: Asked) -> Completion:
        while True:
            reading = Reading(asked, time.monotonic())
            self.readings.append(reading)
            self.live.add(reading)
            stream = client.stream(asked.prompt, **asked.options)
            try:
                async for _ in stream:
                    reading.times.append(time.monotonic())
                return stream.completion
            except RequestError as error:
                if stream.completion.request_id or error.code not in _ASK_AGAIN:
                    raise
                self.num_asked_again += 1
            finally:
                reading.ended = time.monotonic()
                self.live.discard(reading)
            await asyncio.sleep(_ASK_AGAIN_S)

    def _note(self, asked: Asked, what: str) -> None:
        self.wrong.append(f"{asked.kind}, {asked.prompt[-20:]!r}: {what}")
