"""`python -m bench.scheduler_speed`: how fast the control plane is, without a model behind it.

Two parts. **core**: time of schedule + update for a step, at 16 to 1,024 running sequences (`core_speed.py`); nothing
in it may grow with the length of sequences or of the waiting queue. **plane**: tokens a second through real processes
over real gRPC (`control_plane.py`), at the scheduler's Session stream, and at the router's Generate with one client
process and two; "paced" gives the worker a step time, so that all streams run together as with a real model.
**streams** is the last of these alone: 1,000 at once, and how far apart their deltas are.
"""

import argparse
import asyncio
import dataclasses
import gc
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import control_plane, machine
from bench.control_plane import Measured, Setting
from bench.core_speed import Case, Driver, Summary, Timings
from protos.process import calm_collector

SIZES = (16, 64, 256, 1024)
# What design.md asks for: mean milliseconds of schedule + update, and tokens a second.
CORE_TARGETS_MS = {256: 1.0, 1024: 4.0}
PLANE_TARGETS = {"session": 60_000.0, "generate": 15_000.0}
_LONG, _MANY = 4000, 4000
_NUM_STEPS = 400
_PACE_MS = 10.0
_STREAMS = "generate, 1,000 streams"


@dataclass(frozen=True, slots=True)
class CoreRow:
    """A case's milliseconds, and how they compare with the same case at its simplest.

    Attributes:
        core: schedule and update.
        request: building and serializing the message to the worker.
        result: parsing its answer.
        submit: taking in one request, where the case has some.
        gc_ms_per_step: garbage collection, most of it within these times.
        ratio: of the core's median to that at a context of 100 tokens with no request waiting; None for mixed steps.
    """

    case: Case
    core: Summary
    schedule: Summary
    update: Summary
    request: Summary
    result: Summary
    submit: Summary
    longest: float
    gc_ms_per_step: float
    tokens_per_step: float
    num_steps: int
    ratio: float | None


@dataclass(frozen=True, slots=True)
class PlaneRow:
    """What came through the real processes."""

    name: str
    setting: Setting
    measured: Measured


def core_cases(sizes: tuple[int, ...] = SIZES) -> list[Case]:
    """Decodes short and long, with and without a blocked queue, and mixed steps."""
    cases = []
    for size in sizes:
        cases += [
            Case(size),
            Case(size, steps_in_flight=2),
            Case(size, num_concurrent_steps=4),
            Case(size, context=_LONG),
            Case(size, num_waiting=_MANY),
            Case(size, num_waiting=_MANY, blocked_by_memory=True),
            Case(size, context=_LONG, num_waiting=_MANY, waiting_cached=True),
            Case(size, context=_LONG, num_waiting=_MANY, waiting_cached=True, blocked_by_memory=True),
            Case(size, num_waiting=_MANY, num_tenants=1000),
            Case(size, mixed=True),
            Case(size, mixed=True, num_tenants=10),
        ]
    return cases


def run_core(cases: list[Case], seconds: float, console: Console) -> list[CoreRow]:
    """All cases, one after another, at most so many seconds each after their warm-up."""
    rows: list[CoreRow] = []
    simplest: dict[int, float] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("core", total=len(cases))
        _time(cases[0], seconds / 4)  # the first to run is slower
        for case in cases:
            progress.update(task, description=f"core: {describe(case)}")
            timings = _time(case, seconds)
            median = Summary.of(timings.core).p50
            simplest.setdefault(case.num_running, median)
            rows.append(_core_row(case, timings, None if case.mixed else median / simplest[case.num_running]))
            progress.advance(task)
    return rows


def run_plane(settings: dict[str, Setting], console: Console) -> list[PlaneRow]:
    """All settings, one after another."""
    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for name, setting in settings.items():
            task = progress.add_task(f"plane: {name}", total=setting.window_s, rate="warming up")

            def show(seconds: float, rate: float, task: TaskID = task) -> None:
                progress.update(task, completed=seconds, rate=f"{rate:,.0f} tokens/s")

            measured = asyncio.run(control_plane.measure(setting, show))
            progress.remove_task(task)
            rows.append(PlaneRow(name, setting, measured))
    return rows


def plane_settings(model: Path, seconds: float) -> dict[str, Setting]:
    """The ways through, by name."""
    session = Setting("session", model, window_s=seconds)
    generate = Setting("generate", model, window_s=seconds)
    return {
        "session": session,
        "generate, 1 client": generate,
        "generate, 2 clients": dataclasses.replace(generate, num_clients=2),
        "session, paced": dataclasses.replace(session, step_ms=_PACE_MS),
        "generate, paced": dataclasses.replace(generate, step_ms=_PACE_MS),
        _STREAMS: dataclasses.replace(generate, num_streams=1000),
    }


def describe(case: Case) -> str:
    """A case in a few words."""
    tenants = f", {case.num_tenants} tenants" if case.num_tenants > 1 else ""
    if case.mixed:
        return f"{case.num_running} running, mixed{tenants}"
    words = f"{case.num_running} running, context {case.context}"
    if case.steps_in_flight > 1:
        words += f", {case.steps_in_flight} steps in flight"
    if case.num_concurrent_steps > 1:
        words += f", {case.num_concurrent_steps} steps at once"
    if case.num_waiting:
        words += f", {case.num_waiting} wait for {'blocks' if case.blocked_by_memory else 'places'}"
    return words + (", prompts cached" if case.waiting_cached else "") + tenants


def core_table(rows: list[CoreRow]) -> Table:
    """Milliseconds of each case."""
    table = Table(title="Scheduler core, ms a step", title_justify="left", box=None, pad_edge=False)
    table.add_column("case")
    headings = ("mean", "p50", "p99", "max", "ratio", "schedule", "update", "to_request", "parse", "gc", "submit µs")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        core, ratio = row.core, "" if row.ratio is None else f"{row.ratio:.2f}"
        parts = [row.schedule.mean, row.update.mean, row.request.mean, row.result.mean, row.gc_ms_per_step]
        target = CORE_TARGETS_MS.get(row.case.num_running)
        mark = "" if target is None else " ✓" if core.mean <= target else " ✗"
        cells = [f"{core.mean:.3f}{mark}", f"{core.p50:.3f}", f"{core.p99:.3f}", f"{row.longest:.1f}", ratio]
        submit = f"{row.submit.mean * 1e3:.1f}" if row.submit.mean else ""
        table.add_row(describe(row.case), *cells, *(f"{part:.3f}" for part in parts), submit)
    return table


def plane_table(rows: list[PlaneRow]) -> Table:
    """Tokens a second, and a CPU second."""
    title = f"Control plane, {rows[0].setting.num_streams} streams"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("door")
    headings = ("tokens/s", "target", "messages/s", "steps/s", "tokens/step", "delta p50, p99 ms")
    for heading in headings:
        table.add_column(heading, justify="right")
    names = ("scheduler", "router", "worker", "clients")
    for name in names:
        table.add_column(f"{name}: cores, tokens/CPU-s", justify="right")
    table.add_column("idle, others", justify="right")
    for row in rows:
        measured = row.measured
        target = PLANE_TARGETS[row.setting.door] if row.name not in ("session, paced", _STREAMS) else None
        mark = "" if target is None else f"{target:,.0f} {'✓' if measured.tokens_s >= target else '✗'}"
        cells = [f"{measured.tokens_s:,.0f}", mark, f"{measured.messages_s:,.0f}"]
        cells += [f"{measured.steps_s:,.0f}", f"{measured.tokens_per_step:.1f}"]
        cells.append(", ".join(f"{gap:.1f}" for gap in measured.gap_ms.values()))
        for name in names:
            used = measured.cpu.get(name)
            cells.append("" if used is None else f"{used:.2f}, {measured.tokens_per_cpu_s.get(name, 0):,.0f}")
        table.add_row(row.name, *cells, f"{measured.idle_cpu:.2f}, {measured.others_cpu:.2f}")
    return table


def _time(case: Case, seconds: float) -> Timings:
    gc.collect()  # no case pays for what an earlier one has left
    driver = Driver(case)
    driver.warm_up()
    return driver.run(_NUM_STEPS, seconds)


def _core_row(case: Case, timings: Timings, ratio: float | None) -> CoreRow:
    num_steps = len(timings.schedule)
    return CoreRow(
        case=case,
        core=Summary.of(timings.core),
        schedule=Summary.of(timings.schedule),
        update=Summary.of(timings.update),
        request=Summary.of(timings.request),
        result=Summary.of(timings.result),
        submit=Summary.of(timings.submit),
        longest=max(timings.core),
        gc_ms_per_step=timings.gc_ms / num_steps,
        tokens_per_step=timings.num_tokens / num_steps,
        num_steps=num_steps,
        ratio=ratio,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["core", "plane", "streams"], help="one part")
    parser.add_argument(
        "--model", type=Path, help="folder of a tokenizer; default the built-in model's, if it is there"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="that each measurement of the plane counts")
    parser.add_argument("--json", type=machine.output_file, help="file to write all figures to")
    arguments = parser.parse_args()
    if not arguments.seconds > 0:
        parser.error("--seconds must be greater than 0")
    return arguments


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    console = Console(width=machine.columns())
    calm_collector()  # as in the scheduler's process
    report: dict[str, object] = machine.facts(["pagewire", "grpcio", "protobuf", "uvloop", "tokenizers"])
    if arguments.only in (None, "core"):
        core = run_core(core_cases(), 2.0, console)
        console.print(core_table(core))
        console.print(
            "ratio: of the median to the one in the first row of its size. ✓ ✗: against the target of its size.\n"
        )
        report["core"] = [dataclasses.asdict(row) for row in core]
    if arguments.only != "core":
        with tempfile.TemporaryDirectory() as directory:
            model = arguments.model or control_plane.cached_model()
            model = model or control_plane.write_byte_tokenizer(Path(directory))
            chosen = plane_settings(model, arguments.seconds)
            if arguments.only == "streams":
                chosen = {_STREAMS: chosen[_STREAMS]}
            plane = run_plane(chosen, console)
        console.print(plane_table(plane))
        report["plane"] = [
            {"name": row.name, "setting": dataclasses.asdict(row.setting) | {"model": row.setting.model.name}}
            | {"measured": dataclasses.asdict(row.measured)}
            for row in plane
        ]
    if arguments.json is not None:
        machine.write(arguments.json, report)


if __name__ == "__main__":
    machine.run(main)
