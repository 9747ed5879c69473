"""How long something that is away is waited for."""

import asyncio
from collections.abc import Callable


class Patience:
    """Ends once it has been tried for long enough without a break.

    Args:
        seconds: for how long.
        on_over: called when it has ended.

    Attributes:
        over: whether it has ended, until what was waited for is back.
    """

    def __init__(self, seconds: float, on_over: Callable[[], None]) -> None:
        self.seconds = seconds
        self.over = False
        self._on_over = on_over
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """What is waited for is away; it may have been before."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.seconds, self._run_out)

    def stop(self) -> None:
        """It is back, or was never away."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self.over = None, False

    def _run_out(self) -> None:
        self.over = True
        self._on_over()
