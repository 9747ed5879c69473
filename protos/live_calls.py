"""The calls that a server waits for before it stops."""

import asyncio
from typing import Any


class LiveCalls:
    """gRPC's tasks for calls, from when they are added until they are discarded."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._none = asyncio.Event()
        self._none.set()

    def add(self, task: asyncio.Task[Any]) -> None:
        """Adds a call that has begun."""
        self._tasks.add(task)
        self._none.clear()

    def add_until_done(self, task: asyncio.Task[Any]) -> None:
        """Adds a call that ends with its task."""
        self.add(task)
        task.add_done_callback(self.discard)

    def discard(self, task: asyncio.Task[Any]) -> None:
        """Removes a call that has ended."""
        self._tasks.discard(task)
        if not self._tasks:
            self._none.set()

    async def none_within(self, timeout_s: float) -> bool:
        """Whether there is none, now or at some time within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._none.wait()
        except TimeoutError:
            return not self._tasks


def current_call() -> asyncio.Task[Any]:
    """The task that gRPC made for the current call."""
    call = asyncio.current_task()
    assert call is not None
    return call
