"""How long something is away, and what happens when that is too long."""

import asyncio
from collections.abc import Callable


class Absence:
    """Of something that may go and come back again and again.

    Args:
        most_s: seconds from which on it is too long.
        on_too_long: called once in each absence that is.

    Attributes:
        most_s: see there.
        too_long: whether it is away for so long.
    """

    def __init__(self, most_s: float, on_too_long: Callable[[], None]) -> None:
        self.most_s = most_s
        self.too_long = False
        self._on_too_long = on_too_long
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """It is away; it may have been before."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.most_s, self._run_out)

    def end(self) -> None:
        """It is back, or was never away."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self.too_long = None, False

    def _run_out(self) -> None:
        self.too_long = True
        self._on_too_long()
