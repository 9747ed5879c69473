"""How long something is away, and what happens when that is too long."""

import asyncio
from collections.abc import Callable


class Absence:
    """The absence of something that may go and come back again and again.

    Args:
        most_s: seconds after which an absence is too long.
        on_too_long: called once in each absence that is too long.

    Attributes:
        most_s: as above.
        too_long: whether it has been away for too long.
    """

    def __init__(self, most_s: float, on_too_long: Callable[[], None]) -> None:
        self.most_s = most_s
        self.too_long = False
        self._on_too_long = on_too_long
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Notes that it is away; it may have been away already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.most_s, self._run_out)

    def end(self) -> None:
        """Notes that it is back, or was never away."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self.too_long = None, False

    def _run_out(self) -> None:
        self.too_long = True
        self._on_too_long()
