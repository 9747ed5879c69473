"""What `pagewire bench` shows and keeps: progress, a table of the best runs, JSON with all runs and conditions."""

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pagewire import bench, state
from pagewire.access import OPEN, Access
from pagewire.bench import Row
from pagewire.client import Client
from pagewire.processes import peak_resident_bytes, start_ticks
from pagewire.results import Model

# Rows of the table: the heading, the metrics shown, and their format.
_TABLE = (
    ("output tok/s", ("out_tok_s",), "{:.1f}"),
    ("decode tok/s of a stream", ("decode_tok_s",), "{:.1f}"),
    ("total s", ("total_s",), "{:.2f}"),
    ("TTFT ms, mean / p50 / p99", ("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms"), "{:.0f}"),
    ("TPOT ms, mean / p50 / p99", ("tpot_mean_ms", "tpot_p50_ms", "tpot_p99_ms"), "{:.1f}"),
    ("ITL ms, mean / p50 / p99", ("itl_mean_ms", "itl_p50_ms", "itl_p99_ms"), "{:.1f}"),
    ("tokens", ("out_tok",), "{:.0f}"),
)


def run(
    target: str,
    workload_file: Path,
    tests: Sequence[str],
    *,
    rate: float,
    repetitions: int,
    memory_of: int | None,
    json_file: Path | None,
    console: Console,
    access: Access = OPEN,
) -> None:
    """Plays the workload, prints a table of the best run of each test, and writes all runs to `json_file`.

    If a run fails or is interrupted, those before it are still written.

    Args:
        target: the server's "host:port".
        workload_file: see `pagewire.bench`.
        tests: names in the workload.
        rate: requests a second, for open-loop tests.
        repetitions: of each test.
        memory_of: pid of a process whose tree's peak memory is reported; None for the local cluster at `target`.
        json_file: None to write none.
        console: shows progress and table.
        access: TLS and token, if the server requires them.
    """
    workload = bench.load(workload_file)
    if json_file is not None and not json_file.parent.is_dir():
        raise bench.BenchError(f"--json {json_file}: there is no folder {json_file.parent}")
    if memory_of is not None and start_ticks(memory_of) is None:
        raise bench.BenchError(f"--memory-of {memory_of}: there is no such process")
    with Client(target, access) as client:
        model = client.model(timeout=10)
    pids = [memory_of] if memory_of is not None else _local_pids(target)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        console.print(_line(row), highlight=False)

    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("")
            uvloop.run(
                bench.run(
                    target,
                    workload,
                    tests,
                    access=access,
                    rate=rate,
                    repetitions=repetitions,
                    rss_mb=lambda: peak_resident_bytes(pids) >> 20 if pids else None,
                    on_start=lambda test, i, tokens: progress.reset(task, description=_name(test, i), total=tokens),
                    on_tokens=lambda count: progress.advance(task, count),
                    on_row=keep,
                )
            )
        console.print(table(rows))
    finally:
        if json_file is not None and rows:
            _write(json_file, report(target, model, workload_file, rows))


def best(rows: Sequence[Row]) -> dict[str, Row]:
    """Each test's run with the highest output rate."""
    chosen: dict[str, Row] = {}
    for row in rows:
        if row.test not in chosen or _rate(row) > _rate(chosen[row.test]):
            chosen[row.test] = row
    return chosen


def table(rows: Sequence[Row]) -> Table:
    """The best run of each test, one column per test."""
    chosen = best(rows)
    runs = len(rows) // len(chosen)
    shown = Table(title=f"best of {runs} run{'s' * (runs > 1)} each", title_justify="left", box=None, pad_edge=False)
    shown.add_column("")
    for test, row in chosen.items():
        shown.add_column(test + (f" at {row.rate:g}/s" if row.rate is not None else ""), justify="right")
    for heading, names, form in _TABLE:
        shown.add_row(heading, *(_cell(row, names, form) for row in chosen.values()))
    if any(row.rss_mb is not None for row in chosen.values()):
        shown.add_row("peak memory MB", *("-" if row.rss_mb is None else str(row.rss_mb) for row in chosen.values()))
    return shown


def report(target: str, model: Model, workload_file: Path, rows: Sequence[Row]) -> dict[str, object]:
    """All runs, and what is needed to compare them with others."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": {"cpu": _cpu_model(), "cpus": os.cpu_count(), "system": platform.platform()},
        "versions": {name: _version(name) for name in ("pagewire", "grpcio", "torch")}
        | {"python": platform.python_version()},
        "target": target,
        "model": dataclasses.asdict(model),
        "workload": workload_file.name,
        "runs": [dataclasses.asdict(row) for row in rows],
    }


def _write(json_file: Path, content: dict[str, object]) -> None:
    try:
        json_file.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise bench.BenchError(f"--json {json_file}: {error.strerror}") from error


def _local_pids(target: str) -> list[int]:
    """Pids of the services of the cluster that this user runs at `target` on this machine; empty if there is none."""
    port = target.rpartition(":")[2]
    running = state.load(int(port)) if port.isdigit() else None
    return list(running.service_pids.values()) if running and running.target == target else []


def _rate(row: Row) -> float:
    return row.metrics["out_tok_s"] or 0.0


def _name(test: str, repetition: int) -> str:
    return f"{test} run {repetition + 1}"


def _line(row: Row) -> str:
    figures = row.metrics
    return f"{_name(row.test, row.repetition)}: {figures['out_tok_s']} tok/s, mean TTFT {figures['ttft_mean_ms']} ms"


def _cell(row: Row, names: Sequence[str], form: str) -> str:
    values = [row.metrics[name] for name in names]
    return " / ".join("-" if value is None else form.format(value) for value in values)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
