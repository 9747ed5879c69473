"""`python -m bench.compare`: Pagewire's service and its peers on the same prompts, interleaved; ratios, JSON, a plot.

Each peer is installed once, into an environment of its own; one that cannot be installed is named and left out. All
engines get the same token ids, decode greedily and write as many tokens as they are told. All figures are computed
here, from the times that their drivers note. README.md beside this file tells what makes it fair.
"""

import argparse
import signal
import sys
from datetime import datetime
from pathlib import Path

import platformdirs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import machine
from bench.compare import plot, report, workload
from bench.compare.engine import Command, Engine, EngineError
from bench.compare.install import InstallError, Peers
from bench.compare.rounds import Comparison
from bench.compare.rows import ROWS, compare
from bench.compare.variants import VARIANTS, Variant, prepare, select
from pagewire.errors import PagewireError
from pagewire.models import DEFAULT_MODEL, resolve

# With less, no engine is started: the kernel would kill some process, and nobody could tell what that spoilt.
_LEAST_FREE_BYTES = 3 << 30


def main() -> None:
    """Entry point."""
    arguments = _parse()
    # SIGTERM ends the engines in order, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(highlight=False, soft_wrap=True, width=machine.columns())
    try:
        status = run(arguments, console)
    except KeyboardInterrupt:
        console.print("interrupted")
        status = 130
    except PagewireError as error:
        sys.exit(f"python -m bench.compare: {error}")
    sys.exit(status)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Installs, plays, shows and writes; returns the exit status."""
    model = Path(resolve(arguments.model, console))
    prompts = workload.make(model)
    commands, left_out = _prepare(arguments.variants, model, arguments.peers, console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", completed=-1)

        def on_step(text: str) -> None:
            progress.update(task, description=text, advance=1)
            if not console.is_terminal and text.endswith("starts"):
                console.print(text)

        comparison = Comparison(
            [variant for variant in arguments.variants if variant.name in commands],
            lambda variant: _start(commands[variant.name]),
            prompts,
            arguments.workloads,
            num_rounds=arguments.rounds,
            num_probes=arguments.probes,
            on_step=on_step,
            on_run=lambda run: console.print(report.run_line(run)),
        )
        progress.update(task, total=comparison.most_steps)
        comparison.results.left_out |= left_out
        interrupted = False
        try:
            comparison.run()
        except KeyboardInterrupt:
            interrupted = True
    results = comparison.results
    compared = [compare(row, results, arguments.variants, arguments.workloads) for row in ROWS]
    report.show(results, compared, arguments.variants, console)
    machine.write(
        arguments.json,
        report.report(
            results,
            compared,
            arguments.variants,
            prompts,
            model=model.name,
            num_rounds=arguments.rounds,
            interrupted=interrupted,
        ),
    )
    console.print(f"all runs: {arguments.json}")
    if arguments.figure and any(run.rate is not None for run in results.runs):
        plot.draw(results.runs, arguments.figure)
        console.print(f"w4 at all rates: {arguments.figure}")
    if interrupted:
        return 130
    return 0 if results.runs else 1


def _prepare(
    variants: list[Variant], model: Path, folder: Path, console: Console
) -> tuple[dict[str, Command], dict[str, str]]:
    """The command of each variant, and the reasons of those that have none, by name."""
    commands, left_out = {}, {}
    with console.status("") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text)

        peers = Peers(folder, say)
        for variant in variants:
            try:
                commands[variant.name] = prepare(variant, model, peers, folder / "logs")
            except (InstallError, OSError) as error:
                left_out[variant.name] = f"not installed: {error}"
                console.print(f"{variant.name} is left out, {left_out[variant.name]}", markup=False)
    return commands, left_out


def _start(command: Command) -> Engine:
    free = machine.available_bytes()
    if free < _LEAST_FREE_BYTES:
        raise EngineError(f"only {free / 1e9:.1f} GB of memory are free")
    return Engine(command)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    peers = ",".join(dict.fromkeys(variant.peer for variant in VARIANTS))
    out = Path("build", "compare", datetime.now().strftime("%Y-%m-%d-%H%M%S"))
    cache = platformdirs.user_cache_path("pagewire") / "peers"
    parser.add_argument("--engines", default=peers, help="peers, or their variants, with commas between (%(default)s)")
    parser.add_argument("--workloads", default=",".join(workload.NAMES), help="with commas between (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of starts and runs (%(default)s)")
    parser.add_argument(
        "--probes", type=int, default=4, help="of each search for the highest rate; 0: none (%(default)s)"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a checkpoint's folder (%(default)s: the built-in one)")
    parser.add_argument("--peers", type=Path, default=cache, help="where peers are installed (%(default)s)")
    parser.add_argument(
        "--json", type=machine.output_file, default=f"{out}.json", help="file for all runs (%(default)s)"
    )
    parser.add_argument(
        "--figure", type=Path, default=f"{out}.svg", help="SVG or PNG to draw, of w4 at all rates (%(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.probes < 0:
        parser.error("--rounds must be at least 1, and --probes at least 0")
    arguments.workloads = [name.strip() for name in arguments.workloads.split(",")]
    try:
        arguments.variants = select([name.strip() for name in arguments.engines.split(",")], arguments.workloads)
    except ValueError as error:
        parser.error(str(error))
    if not arguments.variants:
        parser.error("none of these engines plays any of these workloads")
    if "w4" in arguments.workloads:
        try:
            machine.picture_file(str(arguments.figure))
        except argparse.ArgumentTypeError as error:
            parser.error(f"--figure: {error}")
    return arguments


if __name__ == "__main__":
    machine.run(main)
