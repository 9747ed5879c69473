"""What the host knows of a step's lengths without asking the device.

A kernel's launch grid is made on the host, and lengths are on the device: to look at them there would stop the host
until all work before is done. The bounds stand in for them. They change how the work is cut up, never what comes out,
as long as they hold.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """Bounds of the rows of one step, for `paged_attention`; None where the caller promises nothing.

    A step that is recorded as a CUDA graph and replayed with other lengths promises what holds for all of them.

    Attributes:
        longest_context: no row's context is longer than this many tokens; None: what the block tables have room for.
        total_context: the rows' contexts together are about this many tokens, which balances the work where they
            differ in length. None in a recorded graph: then the cut adapts to each row on the device.
        fewest_queries: no row has fewer queries.
        most_queries: no row has more queries.
    """

    longest_context: int | None = None
    total_context: int | None = None
    fewest_queries: int | None = None
    most_queries: int | None = None
