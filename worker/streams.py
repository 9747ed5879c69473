"""In which order a device works: steps one after the other, and swaps beside them (CUDA's streams, not gRPC's).

The host gives work to the main stream and goes on; marks tell how far the device has come, and when it was there. A CPU
does its work while it is given it, so there a mark is passed as soon as it is set, and nothing is ever beside.
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
        """Whether the device has done all that it was given before."""

    def wait(self) -> None:
        """Lets the host wait until it has."""

    def ms_since(self, earlier: "Mark") -> float:
        """Milliseconds of the device's time between two marks of the same device, both of them passed."""


class Streams(Protocol):
    """The main stream, which is the one that torch works on, and one beside it."""

    def mark(self) -> Mark:
        """Behind all that the main stream was given."""

    def beside(self, work: Callable[[], None]) -> tuple[Mark, Mark]:
        """Does `work` beside the main stream, behind all that both were given; its beginning and its end."""

    def wait_for(self, mark: Mark) -> None:
        """Lets what the main stream is given from now on wait for a mark of the other one; the host goes on."""


def streams_of(device: torch.device) -> Streams:
    """Those of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


@dataclass(frozen=True, slots=True)
class Moment:
    """A mark where work is done while it is given.

    Attributes:
        at_s: of `time.perf_counter`.
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
    """A CUDA event that was recorded with its time."""

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
    """A GPU: the stream that is current on the thread that calls, and a side stream of our own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def mark(self) -> CudaMark:
        """See `Streams`."""
        return self._mark(torch.cuda.current_stream(self._device))

    def beside(self, work: Callable[[], None]) -> tuple[CudaMark, CudaMark]:
        """See `Streams`. What `work` allocates is the side stream's, so that nothing else gets it too early."""
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
