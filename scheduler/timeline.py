"""When a request was where, as far as metrics and its trace report it. Times are in seconds of the loop's clock."""

from dataclasses import dataclass, field

from protos.trace_context import TraceContext


@dataclass(slots=True)
class Pause:
    """From the loss of a request's blocks to the plan in which it ran again.

    Attributes:
        end: None while it lasts.
        reason: why it lost them, in words.
        by: the request that got the blocks; empty if the worker was lost.
    """

    begin: float
    reason: str
    by: str
    end: float | None = None


@dataclass(slots=True)
class Timeline:
    """The times of one request that its group does not know; that knows its arrival, and when it was first scheduled.

    Attributes:
        trace: the router's span; None where the request is not traced.
    """

    trace: TraceContext | None = None
    first_token: float | None = None
    pauses: list[Pause] = field(default_factory=list)

    @property
    def paused(self) -> Pause | None:
        """The pause that has not ended, if any."""
        return self.pauses[-1] if self.pauses and self.pauses[-1].end is None else None
