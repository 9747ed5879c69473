"""The results of a run with faults: how long streams paused, by service and signal, and what it cost to go on."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.chaos.faults import RANK, SERVICES, SIGNALS, Fault
from bench.chaos.load import Load
from pagewire.bench import percentile


@dataclass(frozen=True, slots=True)
class Row:
    """Faults of one kind.

    Attributes:
        num_streams: that moved when one of them came.
        pause_p50_s: of each such stream, the longest time between two deltas that began before the next fault; None
            where there was no such stream.
    """

    service: str
    signal: str
    num_faults: int
    num_streams: int
    pause_p50_s: float | None
    pause_p99_s: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One form of the cluster, and how it fared.

    Attributes:
        num_answers: equal to those of the undisturbed run.
        num_recomputed_tokens: that the schedulers planned beyond what as many answers take when nothing fails.
    """

    num_schedulers: int
    rows: list[Row]
    num_faults: int
    num_answers: int
    num_tokens: int
    num_asked_again: int
    num_recomputed_tokens: int
    seconds: float
    wrong: list[str]


def rows_of(faults: Sequence[Fault], load: Load) -> list[Row]:
    """A row for each kind that there was."""
    pauses: dict[tuple[str, str], list[float]] = defaultdict(list)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    ends = [fault.at for fault in faults[1:]]
    for fault, next_at in itertools.zip_longest(faults, ends, fillvalue=float("inf")):
        assert isinstance(fault, Fault)
        kind = fault.service, fault.signal.name
        counts[kind] += 1
        for reading in load.readings:
            if reading.started < fault.at < (reading.ended or 0):
                gap_s = reading.longest_gap_s(fault.at, float(next_at))
                if gap_s is not None:
                    pauses[kind].append(gap_s)
    order = [(service, number.name) for service in (*SERVICES, RANK) for number in SIGNALS]
    return [_row(*kind, counts[kind], pauses[kind]) for kind in order if counts[kind]]


def _row(service: str, signal: str, num_faults: int, pauses: Sequence[float]) -> Row:
    p50, p99 = (percentile(pauses, p) if pauses else None for p in (50, 99))
    return Row(service, signal, num_faults, len(pauses), p50, p99)


def table(outcome: Outcome) -> Table:
    """For a terminal."""
    title = f"{outcome.num_schedulers} scheduler{'s' * (outcome.num_schedulers > 1)}, each with a worker; two routers"
    grid = Table(title=title, title_justify="left")
    for name in ("service", "signal", "faults", "streams", "pause p50, s", "p99"):
        grid.add_column(name, justify="left" if name in ("service", "signal") else "right")
    for row in outcome.rows:
        figures = ["-" if pause is None else f"{pause:.2f}" for pause in (row.pause_p50_s, row.pause_p99_s)]
        grid.add_row(row.service, row.signal, str(row.num_faults), str(row.num_streams), *figures)
    return grid
