"""What the comparison is about: a row for each figure, ours beside the best peer's, and the goal for their ratio."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from bench.compare.rounds import GOAL_RATE, TPOT_LIMIT_MS, Life, Results
from bench.compare.variants import OURS, Precision, Variant

# Figures of one engine, by round.
_Figures = dict[int, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some rounds' figures, and their ends."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """None of no values."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1]) if ordered else None


@dataclass(frozen=True, slots=True)
class Goal:
    """What our figure has to reach: a ratio to the best peer's, or a value in the row's own unit."""

    value: float
    absolute: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        find: the figures of an engine of this name.
        more_is_better: which peer is the best one, and what the goal bounds.
        form: how figures are written.
        tests: what an engine must be able to play to be compared; only tests that were chosen count.
    """

    name: str
    unit: str
    find: Callable[[Results, str], _Figures]
    goal: Goal
    more_is_better: bool = True
    precision: Precision = Precision.BF16
    form: str = ".0f"
    tests: tuple[str, ...] = ()

    def meets_goal(self, value: float) -> bool:
        """Whether a ratio, or a figure where the goal is absolute, is good enough."""
        return value >= self.goal.value if self.more_is_better else value <= self.goal.value

    def best(self, values: Iterable[float]) -> float:
        """The best one."""
        return max(values) if self.more_is_better else min(values)


@dataclass(frozen=True, slots=True)
class Compared:
    """A row with its figures.

    Attributes:
        engines: by name; those that have none are not there.
        ours, best_peer: names; None where no engine has a figure.
        ratio: ours / the best peer's of the same round; that peer has the best median.
        met: whether the median reaches the goal; None where that is unknown.
    """

    row: Row
    engines: dict[str, Spread]
    ours: str | None
    best_peer: str | None
    ratio: Spread | None
    met: bool | None


def compare(row: Row, results: Results, variants: Sequence[Variant], tests: Sequence[str]) -> Compared:
    """A row with the figures that were found; `tests` are those that were chosen."""
    needed = set(row.tests) & set(tests)
    figures = {
        variant.name: found
        for variant in variants
        if variant.precision == row.precision and needed <= set(variant.tests)
        if (found := row.find(results, variant.name))
    }
    spreads = {name: spread for name, found in figures.items() if (spread := Spread.of(found.values()))}
    peers = {variant.name: variant.peer for variant in variants}
    # Our default, and not our best variant in this row: no user gets the best of every row.
    ours = next((name for name in spreads if peers[name] == OURS), None)
    theirs = _best(row, {name: spread for name, spread in spreads.items() if peers[name] != OURS})
    ratio = None
    if ours is not None and theirs is not None:
        mine, other = figures[ours], figures[theirs]
        ratio = Spread.of(mine[number] / other[number] for number in mine.keys() & other.keys())
    judged = spreads.get(ours or "") if row.goal.absolute else ratio
    met = None if judged is None else row.meets_goal(judged.median)
    return Compared(row, spreads, ours, theirs, ratio, met)


def _best(row: Row, spreads: dict[str, Spread]) -> str | None:
    if not spreads:
        return None
    best = row.best(spread.median for spread in spreads.values())
    return next(name for name, spread in spreads.items() if spread.median == best)


def _metric(test: str, metric: str, rate: float | None = None) -> Callable[[Results, str], _Figures]:
    """A figure of the runs of one test."""

    def find(results: Results, name: str) -> _Figures:
        runs = [
            run for run in results.runs if (run.engine, run.test, run.rate) == (name, test, rate) and not run.search
        ]
        return {run.round: value for run in runs if (value := run.metrics[metric]) is not None}

    return find


def _life(figure: Callable[[Life], float | None]) -> Callable[[Results, str], _Figures]:
    """A figure of an engine's rounds."""

    def find(results: Results, name: str) -> _Figures:
        lives = [life for life in results.lives if life.engine == name]
        return {life.round: value for life in lives if (value := figure(life)) is not None}

    return find


def _megabytes(life: Life) -> float | None:
    return None if life.peak_bytes is None else life.peak_bytes / 1e6


ROWS = (
    Row("W1 one stream", "tok/s", _metric("w1", "decode_tok_s"), Goal(1.35), form=".1f"),
    Row(
        "W1 one stream, quantized",
        "tok/s",
        _metric("w1", "decode_tok_s"),
        Goal(1.8),
        precision=Precision.QUANTIZED,
        form=".1f",
    ),
    Row("W2 32 at once", "tok/s", _metric("w2", "out_tok_s"), Goal(1.7)),
    Row("W2 mean TTFT", "ms", _metric("w2", "ttft_mean_ms"), Goal(1.0), more_is_better=False),
    Row("W3 shared prefix", "tok/s", _metric("w3", "out_tok_s"), Goal(2.0)),
    Row(
        f"W4 at {GOAL_RATE:g}/s, TTFT p99",
        "ms",
        _metric("w4", "ttft_p99_ms", GOAL_RATE),
        Goal(0.6),
        more_is_better=False,
    ),
    Row(
        f"W4 at {GOAL_RATE:g}/s, TPOT p50",
        "ms",
        _metric("w4", "tpot_p50_ms", GOAL_RATE),
        Goal(0.6),
        more_is_better=False,
        form=".1f",
    ),
    Row(
        f"W4 highest rate, TPOT p50 < {TPOT_LIMIT_MS:g} ms",
        "req/s",
        _life(lambda life: life.best_rate),
        Goal(1.7),
        form=".1f",
    ),
    Row(
        "first answer after start",
        "s",
        _life(lambda life: life.first_answer_s),
        Goal(3.0, absolute=True),
        more_is_better=False,
        form=".1f",
    ),
    Row(
        "peak memory over the tests",
        "MB",
        _life(_megabytes),
        Goal(1200.0, absolute=True),
        more_is_better=False,
        tests=("w1", "w2", "w3", "w4"),
    ),
)
