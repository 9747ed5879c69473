"""Bounds the waits of one task, thousands of them, one after the other."""

import asyncio
from types import TracebackType
from typing import Self


class Patience:
    """Raises TimeoutError out of its block when a wait inside lasts too long.

        async with Patience(5.0) as patience:
            while ...:
                patience.begin()
                await ...
                patience.end()

    One timer serves all waits: it is armed when there is none, and again for the rest of a wait that it finds.
    asyncio.timeout would set and cancel one for each.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._begun: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begins a wait, in place of the one before."""
        self._begun = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_s, self._look)

    def end(self) -> None:
        """Ends the wait."""
        self._begun = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _look(self) -> None:
        self._timer = None
        if self._begun is None:
            return
        end = self._begun + self._limit_s
        if end <= self._loop.time():
            self._timeout.reschedule(end)
        else:
            self._timer = self._loop.call_at(end, self._look)
