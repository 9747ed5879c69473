"""Counts of observations by size, cheap enough to be kept whether anybody scrapes them or not."""

from bisect import bisect_left
from collections.abc import Sequence

# Upper bounds in seconds: for the time of a request, and for that of a step or a token.
REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
STEP_SECONDS = (
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1,
    2.5,
    10,
)


class Histogram:
    """One owner observes; any thread may read.

    Args:
        bounds: upper bounds of the buckets, ascending; a last one takes what is above.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Takes `count` observations of one size."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[int]:
        """Observations up to each bound, and finally all of them."""
        counts, total = [], 0
        for count in self._counts[:]:  # a copy: another thread may observe meanwhile
            total += count
            counts.append(total)
        return counts
