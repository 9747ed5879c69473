"""What the host knows of a step's lengths without asking the device.

A kernel's launch grid is made on the host, and lengths are on the device: reading them there would stop the host until
all earlier work is done. These bounds stand in for them. As long as they hold, they change how the work is cut up,
never the result.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """Bounds of the rows of one step, for `paged_attention`; None where the caller promises nothing.

    For a step that is recorded as a CUDA graph and replayed with other lengths, bounds must hold for all of these.

    Attributes:
        longest_context: no row's context is longer than this many tokens; None: what the block tables have room for.
        total_context: the rows' contexts together are about this many tokens, which balances the work when they
            differ in length. None in a recorded graph: the cut then adapts to each row on the device.
        fewest_queries: no row has fewer queries.
        most_queries: no row has more queries.
    """

    longest_context: int | None = None
    total_context: int | None = None
    fewest_queries: int | None = None
    most_queries: int | None = None
