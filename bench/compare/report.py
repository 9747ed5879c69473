"""What the comparison shows and keeps: a line for each run, two tables, and JSON with all runs and conditions."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench import machine
from bench.compare.recipes import RECIPES
from bench.compare.rounds import Results, Run
from bench.compare.rows import Compared, Spread
from bench.compare.variants import OURS, Variant
from pagewire.bench import Workload

# A run says little if other processes used more cores than this meanwhile.
QUIET_CPU = 0.1


def run_line(run: Run) -> str:
    """One run."""
    figures, rate = run.metrics, "" if run.rate is None else f" at {run.rate:g}/s"
    noise = f"; others used {run.others_cpu:.2f} cores" if run.others_cpu > QUIET_CPU else ""
    return (
        f"round {run.round + 1} {run.test}{rate} {run.engine}: {figures['out_tok_s']:.0f} tok/s, "
        f"TTFT {figures['ttft_mean_ms']:.0f} ms (p99 {figures['ttft_p99_ms']:.0f}), "
        f"TPOT p50 {figures['tpot_p50_ms']:.1f} ms{noise}"
    )


def show(results: Results, compared: Sequence[Compared], variants: Sequence[Variant], console: Console) -> None:
    """Both tables, and what was left out."""
    shown = [each for each in compared if each.engines]
    if shown:
        console.print(_goals_table(shown))
        console.print()
        console.print(_engines_table(shown, results, variants))
        console.print(_first_tokens_line(results))
    for name, reason in results.left_out.items():
        console.print(f"left out: {name}, {reason}", markup=False)


def _goals_table(compared: Sequence[Compared]) -> Table:
    """Ours beside the best peer of each row."""
    title = "Pagewire's service beside the best peer: median of rounds (min..max)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for heading in ("Pagewire", "best peer", "", "ratio", "goal", ""):
        table.add_column(heading, justify="left" if heading == "best peer" else "right")
    for each in compared:
        row, goal = each.row, each.row.goal
        sign = "≥" if row.more_is_better else "≤"
        wanted = f"{sign} {goal.value:g} {row.unit}" if goal.absolute else f"{sign} {goal.value:g} x"
        table.add_row(
            f"{row.name}, {row.unit}",
            _spread(each.engines.get(each.ours or ""), row.form),
            each.best_peer or "-",
            _spread(each.engines.get(each.best_peer or ""), row.form),
            _spread(each.ratio, ".2f"),
            wanted,
            {True: "met", False: "not met", None: "-"}[each.met],
        )
    return table


def _engines_table(compared: Sequence[Compared], results: Results, variants: Sequence[Variant]) -> Table:
    """Medians: a line for each engine, and a column for each row of the comparison."""
    table = Table(title="medians", title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for each in compared:
        table.add_column(f"{each.row.name}, {each.row.unit}", justify="right")
    names = [variant.name for variant in variants if any(life.engine == variant.name for life in results.lives)]
    for name in names:
        spreads = [(each.engines.get(name), each.row.form) for each in compared]
        table.add_row(name, *("-" if spread is None else f"{spread.median:{form}}" for spread, form in spreads))
    return table


def _first_tokens_line(results: Results) -> str:
    """How many answers begin as ours do, for each peer: all were asked the same, greedily."""
    # Two engines may be probed at the same rate with different prompts.
    runs = [run for run in results.runs if not run.search]
    ours = {(run.round, run.test, run.rate): run.first_tokens for run in runs if run.engine == OURS}
    agreeing: dict[str, list[bool]] = {}
    for run in runs:
        tokens = ours.get((run.round, run.test, run.rate))
        if run.engine != OURS and tokens is not None:
            same = (mine == other for mine, other in zip(tokens, run.first_tokens, strict=True))
            agreeing.setdefault(run.engine, []).extend(same)
    words = [f"{name} {sum(found)} of {len(found)}" for name, found in agreeing.items()]
    return f"answers that begin with Pagewire's first token: {', '.join(words)}" if words else ""


def report(
    results: Results,
    compared: Sequence[Compared],
    variants: Sequence[Variant],
    workload: Workload,
    *,
    model: str,
    num_rounds: int,
    interrupted: bool,
) -> dict[str, object]:
    """Everything, for the file."""
    names = [variant.name for variant in variants]
    return machine.facts(["pagewire", "grpcio", "torch"]) | {
        "model": model,
        "workload_sha256": hashlib.sha256(json.dumps(workload, sort_keys=True).encode()).hexdigest(),
        "rounds": num_rounds,
        "interrupted": interrupted,
        "engines": {
            variant.name: {
                "version": next((life.version for life in results.lives if life.engine == variant.name), None),
                "precision": variant.precision.value,
                "tests": variant.tests,
                "options": variant.options,
                "installed": dataclasses.asdict(RECIPES[variant.peer]) if variant.peer in RECIPES else None,
            }
            for variant in variants
        },
        "left_out": {name: results.left_out[name] for name in names if name in results.left_out},
        "rows": [
            {
                "name": each.row.name,
                "unit": each.row.unit,
                "goal": dataclasses.asdict(each.row.goal),
                "more_is_better": each.row.more_is_better,
                "ours": each.ours,
                "best_peer": each.best_peer,
                "ratio": each.ratio and dataclasses.asdict(each.ratio),
                "met": each.met,
                "engines": {name: dataclasses.asdict(spread) for name, spread in each.engines.items()},
            }
            for each in compared
        ],
        "lives": [dataclasses.asdict(life) for life in results.lives],
        "runs": [dataclasses.asdict(run) for run in results.runs],
    }


def _spread(spread: Spread | None, form: str) -> str:
    if spread is None:
        return "-"
    ends = "" if spread.low == spread.high else f" ({spread.low:{form}}..{spread.high:{form}})"
    return f"{spread.median:{form}}{ends}"
