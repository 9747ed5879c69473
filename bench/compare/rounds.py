"""The order of runs: A B A B. Engines start fresh in each round and stay warm through it; only one at a time has work.

A round begins with the engines' starts. Then each test is played by one engine after the other, so that a machine that
drifts does so for all of them; no two runs have the same prompts. Engines without work stay in memory, suspended, and
`Run.others_cpu` tells whether anything else computed. Last comes the search for the highest rate, one probe of each
engine in turn.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.compare.engine import EngineError
from bench.compare.variants import Precision, Variant
from bench.compare.workload import stamped
from pagewire.bench import BenchError, Record, Workload, metrics

# Requests a second of w4: in the goals, in all runs before the search, and at the ends of the search.
GOAL_RATE = 4.2
RATES = (GOAL_RATE / 2, GOAL_RATE)
LOWEST_RATE, HIGHEST_RATE = 0.5, 33.6
TPOT_LIMIT_MS = 50.0
# A search ends when the lowest rate that failed is within this factor of the highest one that did not.
_NARROW = 1.1
_OPEN_LOOP = "w4"
_WARM = "warm"
_FAILURES = (EngineError, BenchError)
# By then a resumed engine has dealt with the timers that ran out meanwhile.
_SETTLE_S = 0.5
# By then an engine has done what it does once after its first answers: ours takes the memory of its KV cache as soon as
# it is idle.
_START_S = 5.0


class EngineLike(Protocol):
    """What a round needs of `bench.compare.engine.Engine`."""

    version: str
    first_answer_s: float | None

    def play(self, rows: Sequence[Record]) -> float:
        """Fills in times and output; returns the cores that others used meanwhile."""

    def pause(self) -> None:
        """Takes it off the CPU until `resume`."""

    def resume(self) -> None:
        """Lets it go on."""

    def peak_memory_bytes(self) -> int | None:
        """Since its start; None if its processes are gone."""

    def close(self) -> None:
        """Ends it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one test by one engine.

    Attributes:
        rate: requests a second, for w4.
        search: whether the rate was a probe of the search.
        others_cpu: cores that all other processes of the machine used meanwhile.
        first_tokens: of each answer; engines that were asked the same mostly agree.
    """

    round: int
    engine: str
    test: str
    rate: float | None
    search: bool
    metrics: dict[str, float | None]
    others_cpu: float
    first_tokens: list[int]


@dataclass(slots=True)
class Life:
    """One engine in one round.

    Attributes:
        peak_bytes: of memory, from its start to the end of its tests; None if it failed or ended before.
        best_rate: requests a second, the highest found that keeps to the limit; None if none did, or without a search.
    """

    round: int
    engine: str
    version: str
    first_answer_s: float | None = None
    peak_bytes: int | None = None
    best_rate: float | None = None


@dataclass(slots=True)
class Results:
    """All results so far.

    Attributes:
        left_out: reasons, by the name of the variant.
    """

    runs: list[Run] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


class RateSearch:
    """Searches for the highest rate at which an engine keeps to the limit, by bisection.

    Args:
        known: rates that were played, and whether the limit was kept.
        lowest, highest: the ends of the range.
        num_probes: at most.
    """

    def __init__(self, known: dict[float, bool], lowest: float, highest: float, num_probes: int) -> None:
        kept = [rate for rate, ok in known.items() if ok]
        failed = [rate for rate, ok in known.items() if not ok]
        self.best = max(kept, default=None)
        self._failed = min((rate for rate in failed if self.best is None or rate > self.best), default=None)
        self._lowest, self._highest = lowest, highest
        self._probes_left = num_probes

    @property
    def next_rate(self) -> float | None:
        """The rate to try; None when the search has ended."""
        if not self._probes_left or self.best == self._highest:
            return None
        if self._failed is None and self.best is not None and self.best >= self._highest / 2:
            return self._highest  # not known to fail
        failed = self._failed or self._highest
        if self.best is None:
            return failed / 2 if failed / 2 >= self._lowest else None
        if failed <= self.best * _NARROW:
            return None
        return round((self.best * failed) ** 0.5, 2)

    def take(self, rate: float, kept: bool) -> None:
        """The result of a probe."""
        self._probes_left -= 1
        if kept:
            self.best = rate
        else:
            self._failed = rate


class Comparison:
    """Plays all rounds; `results` has what was found so far.

    Args:
        variants: in the order in which they play.
        start: starts the engine of a variant. After an EngineError, from this or from the engine, that engine is left
            out, and the others go on.
        workload: see `pagewire.bench`.
        tests: of the workload.
        num_rounds: rounds.
        num_probes: of each search; 0 for no search.
        on_step: called with what is done next: a start or a run.
        on_run: called with each run.
        settle_s: rest before a run.
        start_s: rest after an engine's first answers.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        start: Callable[[Variant], EngineLike],
        workload: Workload,
        tests: Sequence[str],
        *,
        num_rounds: int,
        num_probes: int,
        on_step: Callable[[str], None] = lambda text: None,
        on_run: Callable[[Run], None] = lambda run: None,
        settle_s: float = _SETTLE_S,
        start_s: float = _START_S,
    ) -> None:
        self.results = Results()
        self._variants = variants
        self._start_engine = start
        self._workload = workload
        self._tests = tests
        self._num_rounds = num_rounds
        self._num_probes = num_probes
        self._on_step = on_step
        self._on_run = on_run
        self._settle_s, self._start_s = settle_s, start_s
        self._round = 0
        self._stamp = 0
        self._live: dict[str, _Live] = {}

    @property
    def most_steps(self) -> int:
        """Starts and runs, if every search takes all its probes."""
        tests = [test for variant in self._variants for test in variant.tests if test in self._tests]
        open_loop = tests.count(_OPEN_LOOP)
        runs = len(tests) + (len(RATES) - 1 + self._num_probes) * open_loop
        return self._num_rounds * (len(self._variants) + runs)

    def run(self) -> None:
        """Plays all rounds; ends all engines, also when it is interrupted."""
        for number in range(self._num_rounds):
            self._round = number
            # One kind after the other: all of them together would need more memory than a laptop has.
            for precision in Precision:
                try:
                    self._start(precision)
                    self._play_tests()
                    self._search()
                finally:
                    # Closes all of them, even if one close is interrupted.
                    with contextlib.ExitStack() as closing:
                        for live in self._live.values():
                            closing.callback(live.engine.close)
                        self._live = {}

    def _start(self, precision: Precision) -> None:
        for variant in self._variants:
            name = variant.name
            if variant.precision != precision or name in self.results.left_out:
                continue
            self._on_step(f"{name} starts")
            try:
                engine = self._start_engine(variant)
            except _FAILURES as error:
                self.results.left_out[name] = str(error)
                continue
            life = Life(self._round, name, engine.version)
            self.results.lives.append(life)
            self._live[name] = _Live(variant, engine, life)
            warm = stamped(self._workload, _WARM, 1.0, 0, self._stamp)
            try:
                engine.play(warm[:1])
                life.first_answer_s = engine.first_answer_s
                engine.play(warm)
                time.sleep(self._start_s)
                engine.pause()
            except _FAILURES as error:
                self._leave_out(name, "warming up", error)

    def _play_tests(self) -> None:
        for test in self._tests:
            for rate in RATES if test == _OPEN_LOOP else (None,):
                self._stamp += 1
                for name in list(self._live):
                    if test in self._live[name].variant.tests:
                        self._play(name, test, rate)
        for live in self._live.values():
            live.life.peak_bytes = live.engine.peak_memory_bytes()

    def _search(self) -> None:
        if _OPEN_LOOP not in self._tests or not self._num_probes:
            return
        searches = {}
        for name in self._live:
            runs = [run for run in self.results.runs if (run.round, run.engine) == (self._round, name)]
            known = {run.rate: _keeps_limit(run) for run in runs if run.rate is not None}
            searches[name] = RateSearch(known, LOWEST_RATE, HIGHEST_RATE, self._num_probes)
        while probes := {name: rate for name, search in searches.items() if (rate := search.next_rate) is not None}:
            self._stamp += 1
            for name, rate in probes.items():
                run = self._play(name, _OPEN_LOOP, rate, search=True)
                if run is None:
                    del searches[name]
                else:
                    searches[name].take(rate, _keeps_limit(run))
        for name, search in searches.items():
            self._live[name].life.best_rate = search.best

    def _play(self, name: str, test: str, rate: float | None, *, search: bool = False) -> Run | None:
        """One run; None if the engine failed, which is then left out."""
        at_rate = "" if rate is None else f" at {rate:g}/s"
        self._on_step(f"round {self._round + 1} of {self._num_rounds}: {name} plays {test}{at_rate}")
        rows = stamped(self._workload, test, rate or 1.0, self._round, self._stamp)
        engine = self._live[name].engine
        engine.resume()
        time.sleep(self._settle_s)
        try:
            others_cpu = engine.play(rows)
            figures = metrics(rows)
        except _FAILURES as error:
            self._leave_out(name, f"{test}{at_rate}", error)
            return None
        engine.pause()
        first_tokens = [row.output[0] for row in rows]
        run = Run(self._round, name, test, rate, search, figures, others_cpu, first_tokens)
        self.results.runs.append(run)
        self._on_run(run)
        return run

    def _leave_out(self, name: str, doing: str, error: Exception) -> None:
        self.results.left_out[name] = f"round {self._round + 1}, {doing}: {error}"
        self._live.pop(name).engine.close()


@dataclass(frozen=True, slots=True)
class _Live:
    """An engine that runs."""

    variant: Variant
    engine: EngineLike
    life: Life


def _keeps_limit(run: Run) -> bool:
    tpot = run.metrics["tpot_p50_ms"]
    return tpot is not None and tpot < TPOT_LIMIT_MS
