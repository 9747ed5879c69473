"""`pagewire bench`: plays a workload against a server and measures what its clients see.

A workload is a JSON object: test -> variants -> requests `{"ids": [...], "max_tokens": N, "gap": seconds}`. Repetition
i plays variant i, so that no prefix cache carries over; "warm" is played first and not measured. All requests of a test
are sent at once, except that those of w4 arrive with their gaps divided by the rate, whether or not earlier ones are
done (open loop). Decoding is greedy and ignores end-of-sequence ids.
"""

import asyncio
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pagewire.access import OPEN, Access
from pagewire.client import AsyncClient
from pagewire.errors import PagewireError, RequestError
from pagewire.request import Options

OPEN_LOOP_TESTS = ("w4",)
_WARM = "warm"
_REQUEST = '{"ids": [...], "max_tokens": N, "gap": seconds}'
Workload = dict[str, list[list[dict[str, Any]]]]


class BenchError(PagewireError):
    """A workload cannot be read or played."""


@dataclass(slots=True)
class Record:
    """One request and when its tokens arrived, in seconds from the start of the run.

    Attributes:
        at: its nominal arrival, from which TTFT is measured.
    """

    token_ids: list[int]
    max_tokens: int
    at: float = 0.0
    times: list[float] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """One run of one test."""

    test: str
    repetition: int
    # Requests a second, for open-loop tests.
    rate: float | None
    # Peak resident memory of the server's processes so far; None if it is not known.
    rss_mb: int | None
    metrics: dict[str, float | None]


def load(path: Path) -> Workload:
    """A workload from its file.

    Raises:
        BenchError: the file cannot be read, or is not a workload.
    """
    try:
        workload = json.loads(path.read_text())
        for test, variants in workload.items():
            if not all(variants):
                raise ValueError(f"a variant of {test} has no request")
            if wrong := [row for rows in variants for row in rows if not _is_request(row)]:
                raise ValueError(f"a request of {test} is not like {_REQUEST}: {json.dumps(wrong[0])}")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise BenchError(f"{path} is no workload: {error}") from error
    return workload


def records(workload: Workload, test: str, rate: float, repetition: int) -> list[Record]:
    """The requests of one run, with their arrivals; `rate` is in requests a second."""
    variants, at, rows = workload[test], 0.0, []
    for request in variants[repetition % len(variants)]:
        at += request["gap"] / rate if test in OPEN_LOOP_TESTS else 0.0
        rows.append(Record(request["ids"], request["max_tokens"], at))
    return rows


async def play(
    client: AsyncClient, rows: Iterable[Record], on_tokens: Callable[[int], None] = lambda count: None
) -> None:
    """Sends each request at its time and records when its tokens arrive.

    Raises:
        RequestError: one of them failed; the others are cancelled.
    """
    started = time.perf_counter()

    async def one(row: Record) -> None:
        await asyncio.sleep(max(0.0, row.at - (time.perf_counter() - started)))
        options = Options(max_tokens=row.max_tokens, temperature=0, ignore_eos=True, token_ids=True)
        async with client.stream(row.token_ids, **options) as stream:
            async for delta in stream:
                row.times += [time.perf_counter() - started] * len(delta.token_ids)
                row.output += delta.token_ids
                on_tokens(len(delta.token_ids))

    try:
        async with asyncio.TaskGroup() as group:
            for row in rows:
                group.create_task(one(row))
    except* RequestError as errors:
        raise errors.exceptions[0] from None


def metrics(rows: Sequence[Record]) -> dict[str, float | None]:
    """The figures of one run: times in milliseconds, rates in tokens a second.

    `out_tok_s` counts all tokens over the whole run; `decode_tok_s` is what one stream sees after its first token.

    Raises:
        BenchError: a request got no token.
    """
    if not all(row.times for row in rows):
        raise BenchError(f"{sum(not row.times for row in rows)} of {len(rows)} requests got no token")
    duration = max(row.times[-1] for row in rows) - min(row.at for row in rows)
    ttft = [row.times[0] - row.at for row in rows]
    tpot = [(row.times[-1] - row.times[0]) / (len(row.times) - 1) for row in rows if len(row.times) > 1]
    itl = [after - before for row in rows for before, after in pairwise(row.times)]
    count = sum(len(row.times) for row in rows)
    figures: dict[str, float | None] = {
        "total_s": round(duration, 3),
        "out_tok": count,
        "want_tok": sum(row.max_tokens for row in rows),
        "out_tok_s": round(count / duration, 1),
        "decode_tok_s": round(1 / statistics.mean(tpot), 1) if tpot and any(tpot) else None,
    }
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl)):
        figures[f"{name}_mean_ms"] = _ms(statistics.mean(values)) if values else None
        figures[f"{name}_p50_ms"] = _ms(percentile(values, 50)) if values else None
        figures[f"{name}_p99_ms"] = _ms(percentile(values, 99)) if values else None
    return figures


def percentile(values: Sequence[float], p: float) -> float:
    """The value at rank p/100 * (n - 1), rounded to the nearest; no interpolation."""
    return sorted(values)[round(p / 100 * (len(values) - 1))]


async def run(
    target: str,
    workload: Workload,
    tests: Sequence[str],
    *,
    rate: float,
    repetitions: int,
    rss_mb: Callable[[], int | None],
    on_row: Callable[[Row], None],
    on_start: Callable[[str, int, int], None] = lambda test, repetition, tokens: None,
    on_tokens: Callable[[int], None] = lambda count: None,
    access: Access = OPEN,
) -> None:
    """Warms the server up, then plays the tests in turn, all of them `repetitions` times.

    Args:
        target: the server's "host:port".
        workload: from `load`.
        tests: names in the workload.
        rate: requests a second, for open-loop tests.
        repetitions: of each test.
        rss_mb: called after each run, for `Row.rss_mb`.
        on_row: called with the result of each run.
        on_start: called with test, repetition and expected tokens of each run that begins.
        on_tokens: called with the number of tokens that just arrived.
        access: TLS and token, if the server requires them.

    Raises:
        BenchError: the workload has no such test.
        RequestError: a request failed.
    """
    for test in tests:
        if not workload.get(test):
            known = ", ".join(name for name in workload if name != _WARM)
            raise BenchError(f"the workload has no test {test!r}; it has {known}")
    async with AsyncClient(target, access) as client:
        if workload.get(_WARM):
            warm = records(workload, _WARM, rate, 0)
            on_start(_WARM, 0, sum(row.max_tokens for row in warm))
            await play(client, warm, on_tokens)
        for repetition in range(repetitions):
            for test in tests:
                requests = records(workload, test, rate, repetition)
                on_start(test, repetition, sum(row.max_tokens for row in requests))
                await play(client, requests, on_tokens)
                on_row(Row(test, repetition, rate if test in OPEN_LOOP_TESTS else None, rss_mb(), metrics(requests)))


def _is_request(row: object) -> bool:
    match row:
        case {"ids": list(), "max_tokens": int(), "gap": int() | float() as gap}:
            return 0 <= gap < math.inf
    return False


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
