"""The order in which a device works: steps one after the other, and swaps beside them (CUDA's streams, not gRPC's).

The host gives work to the main stream and goes on; marks tell how far the device has come, and when. A CPU has done its
work when the call returns, so there a mark is passed as soon as it is set, and nothing ever runs beside.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in a stream."""

    @property
    def is_passed(self) -> bool:
        """Whether the device has done all that it was given before the mark."""

    def wait(self) -> None:
        """Blocks the host until the mark is passed."""

    def ms_since(self, earlier: "Mark") -> float:
        """Milliseconds of device time between two marks of the same device, both of them passed."""


class Streams(Protocol):
    """The main stream, which is the one that torch works on, and a side stream."""

    def mark(self) -> Mark:
        """Sets a mark after all that the main stream was given."""

    def beside(self, work: Callable[[], None]) -> tuple[Mark, Mark]:
        """Runs `work` beside the main stream, after all that both were given; returns marks at its start and end."""

    def wait_for(self, mark: Mark) -> None:
        """Makes what the main stream is given from now on wait for a mark of the side stream; the host goes on."""


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


@dataclass(frozen=True, slots=True)
class Moment:
    """A mark on a device that has done its work when the call returns.

    Attributes:
        at_s: when it was set, by `time.perf_counter`.
    """

    at_s: float

    @property
    def is_passed(self) -> bool:
        """See `Mark`."""
        return True

    def wait(self) -> None:
        """See `Mark`."""

    def ms_since(self, earlier: Mark) -> float:
        """See `Mark`."""
        assert isinstance(earlier, Moment)
        return 1e3 * (self.at_s - earlier.at_s)


class HostStreams:
    """A CPU, which does one thing at a time."""

    def mark(self) -> Moment:
        """See `Streams`."""
        return Moment(time.perf_counter())

    def beside(self, work: Callable[[], None]) -> tuple[Moment, Moment]:
        """See `Streams`."""
        begun = self.mark()
        work()
        return begun, self.mark()

    def wait_for(self, mark: Mark) -> None:
        """See `Streams`."""


@dataclass(frozen=True, slots=True)
class CudaMark:
    """A CUDA event, recorded with timing."""

    event: torch.cuda.Event

    @property
    def is_passed(self) -> bool:
        """See `Mark`."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See `Mark`; other threads run meanwhile."""
        self.event.synchronize()

    def ms_since(self, earlier: Mark) -> float:
        """See `Mark`."""
        assert isinstance(earlier, CudaMark)
        return float(earlier.event.elapsed_time(self.event))


class CudaStreams:
    """A GPU: the stream that is current on the calling thread, and a side stream of our own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def mark(self) -> CudaMark:
        """See `Streams`."""
        return self._mark(torch.cuda.current_stream(self._device))

    def beside(self, work: Callable[[], None]) -> tuple[CudaMark, CudaMark]:
        """See `Streams`. What `work` allocates belongs to the side stream, so that nothing else gets it too early."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            begun = self._mark(self._side)
            work()
            return begun, self._mark(self._side)

    def wait_for(self, mark: Mark) -> None:
        """See `Streams`."""
        assert isinstance(mark, CudaMark)
        torch.cuda.current_stream(self._device).wait_event(mark.event)

    def _mark(self, stream: torch.cuda.Stream) -> CudaMark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return CudaMark(event)
