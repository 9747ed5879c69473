"""`python -m bench.chaos`: processes die, hang and are stopped at random, and every stream stays as it would be.

A cluster under the launcher's supervision, in float32, with two routers on one port; first with one scheduler, then
with two, each with its worker. An undisturbed pass tells what the answer to each request is. Then clients ask for the
same again and again, in any combination, while workers, schedulers and routers get SIGKILL, SIGTERM and SIGSTOP (with
SIGCONT after a while) at random moments. Each answer must be the undisturbed one: token ids, text, reasons, counts,
log-probabilities to 1e-4. At the end nothing may be live, and all blocks must be free. Exit status 1 if anything is not
so.
"""

import argparse
import asyncio
import dataclasses
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench import machine
from bench.chaos import report
from bench.chaos.faults import Faults, recovery_s
from bench.chaos.load import Load
from bench.chaos.report import Outcome
from bench.chaos.requests import PROMPTS, Asked, mixed
from bench.chaos.site import Site, cold_start_s, supervised
from bench.control_plane import cached_model
from pagewire.cluster import LaunchError
from pagewire.results import Completion

_IDLE_WITHIN_S = 60.0
_SHOW_S = 10.0
_NUM_RECOVERIES = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do to one cluster.

    Attributes:
        spacing_s: at most this long between two faults that do not come together, once streams move again.
        suspensions_s: (shortest, longest) times of SIGSTOP; None for the usual ones.
    """

    model: Path
    num_schedulers: int
    num_faults: int
    seed: int = 1
    num_clients: int = 12
    max_tokens: int = 120
    spacing_s: float = 3.0
    suspensions_s: tuple[tuple[float, float], ...] | None = None
    settings: tuple[str, ...] = ()
    prompts: tuple[str, ...] = PROMPTS


async def disturb(plan: Plan, folder: Path, log: Path, console: Console) -> Outcome:
    """Runs a cluster through its faults, with its sockets in `folder`.

    Raises:
        AssertionError: streams did not go on, or something was left over at the end.
    """
    async with supervised(plan.model, folder, log, plan.num_schedulers, plan.settings) as site:
        requests, expected = await undisturbed(site, plan)
        counting = asyncio.create_task(site.count_computed())
        try:
            calm = Load(site.target, requests, plan.num_clients)
            await calm.run(expected, asyncio.Event(), num_rounds=1)
            await site.idle(_IDLE_WITHIN_S)
            await asyncio.sleep(1.0)  # for the counters to be read
            computed = site.num_computed_tokens
            outcome = await _faults(site, plan, requests, expected, console)
            needed = computed / len(requests) * outcome.num_answers
            recomputed = round(max(0.0, site.num_computed_tokens - computed - needed))
            wrong = [*(f"before any fault: {what}" for what in calm.wrong), *outcome.wrong]
            return dataclasses.replace(outcome, num_recomputed_tokens=recomputed, wrong=wrong)
        finally:
            counting.cancel()


async def undisturbed(site: Site, plan: Plan) -> tuple[list[Asked], list[Completion]]:
    """The requests, and the answer to each when it is alone and nothing fails."""
    load = Load(site.target, (), 1)
    plain = mixed(plan.seed, plan.max_tokens, plan.prompts)
    answers = await load.once(plain)
    stopped = [
        asked.with_stop_string(answer)
        for asked, answer in zip(plain, answers, strict=True)
        if asked.kind in ("greedy", "n=4") and answer.text
    ]
    requests, expected = [*plain, *stopped], [*answers, *await load.once(stopped)]
    order = random.Random(plan.seed).sample(range(len(requests)), len(requests))
    return [requests[place] for place in order], [expected[place] for place in order]


async def _faults(
    site: Site, plan: Plan, requests: list[Asked], expected: list[Completion], console: Console
) -> Outcome:
    load = Load(site.target, requests, plan.num_clients)
    chosen = {} if plan.suspensions_s is None else {"suspensions_s": plan.suspensions_s}
    faults = Faults(site, load, random.Random(plan.seed), plan.spacing_s, **chosen)
    stop, start = asyncio.Event(), time.monotonic()
    async with asyncio.TaskGroup() as group:
        showing = group.create_task(_show(faults, load, plan, console))
        reading = group.create_task(load.run(expected, stop))
        await asyncio.sleep(1.0)
        try:
            await faults.inflict(plan.num_faults)
        finally:
            stop.set()
        await reading
        showing.cancel()
    seconds = time.monotonic() - start
    wrong = list(load.wrong)
    try:
        await site.idle(_IDLE_WITHIN_S)
    except AssertionError as error:
        wrong.append(str(error))
    return Outcome(
        num_schedulers=plan.num_schedulers,
        rows=report.rows_of(faults.done, load),
        num_faults=len(faults.done),
        num_answers=load.num_answers,
        num_tokens=load.num_tokens,
        num_asked_again=load.num_asked_again,
        num_recomputed_tokens=0,
        seconds=seconds,
        wrong=wrong,
    )


async def _show(faults: Faults, load: Load, plan: Plan, console: Console) -> None:
    while True:
        await asyncio.sleep(_SHOW_S)
        told = f"{len(faults.done)}/{plan.num_faults} faults, {load.num_answers} answers, {len(load.wrong)} wrong"
        console.print(f"  {told}, last: {faults.done[-1].name} {faults.done[-1].signal.name}" if faults.done else told)


async def recoveries(plan: Plan, folder: Path) -> dict[str, list[float]]:
    """Seconds of a worker's start alone, and from the death of a worker and of a scheduler to the next token."""
    starts = [await cold_start_s(plan.model, folder, plan.settings) for _ in range(3)]
    async with supervised(plan.model, folder, folder / "log", 1, plan.settings) as site:
        requests, expected = await undisturbed(site, plan)
        load, stop = Load(site.target, requests, plan.num_clients), asyncio.Event()
        reading = asyncio.create_task(load.run(expected, stop))
        await asyncio.sleep(2.0)
        found: dict[str, list[float]] = {}
        for name in ("worker", "scheduler"):
            found[name] = []
            for _ in range(_NUM_RECOVERIES):
                found[name].append(await recovery_s(site, load, name))
                await asyncio.sleep(1.0)
        stop.set()
        await reading
        assert not load.wrong, load.wrong
    return {"worker_cold_start_s": starts, "worker_back_s": found["worker"], "scheduler_back_s": found["scheduler"]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=120, help="over both forms of the cluster")
    parser.add_argument("--schedulers", type=int, choices=[1, 2], help="one form only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=12, help="requests at once")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default the built-in model, if it is there")
    parser.add_argument("--set", action="append", default=[], help="SERVICE.OPTION=VALUE, as of `pagewire up`")
    parser.add_argument("--no-recovery", action="store_true", help="leave out how soon a killed service is back")
    parser.add_argument("--logs", type=Path, help="folder for the services' logs")
    parser.add_argument("--json", type=machine.output_file, help="file to write all figures to")
    arguments = parser.parse_args()
    if arguments.faults < 1 or arguments.clients < 1:
        parser.error("--faults and --clients must be at least 1")
    return arguments


async def _main(arguments: argparse.Namespace, console: Console) -> bool:
    model = arguments.model or cached_model()
    if model is None:
        raise SystemExit("no model: fetch the built-in one with `pagewire model`, or give --model FOLDER")
    if arguments.logs is not None:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    forms = [arguments.schedulers] if arguments.schedulers else [1, 2]
    plan = Plan(model, 1, arguments.faults, arguments.seed, arguments.clients, settings=tuple(arguments.set))
    found: dict[str, object] = machine.facts(["pagewire", "grpcio", "protobuf", "torch"]) | {"model": model.name}
    is_right = True
    if not arguments.no_recovery:
        with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp") as folder:
            found["recovery"] = recovery = await recoveries(plan, Path(folder))
        for name, values in recovery.items():
            console.print(f"{name}: {', '.join(f'{value:.2f}' for value in sorted(values))}")
    outcomes = []
    for place, num_schedulers in enumerate(forms):
        num_faults = arguments.faults * (place + 1) // len(forms) - arguments.faults * place // len(forms)
        with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp") as folder:
            form = dataclasses.replace(plan, num_schedulers=num_schedulers, num_faults=num_faults)
            log = (arguments.logs or Path(folder)) / f"cluster-{num_schedulers}.log"
            outcome = await disturb(form, Path(folder), log, console)
        console.print(report.table(outcome))
        console.print(
            f"{outcome.num_faults} faults in {outcome.seconds:.0f} s; {outcome.num_answers} answers of "
            f"{outcome.num_tokens} tokens as undisturbed, {len(outcome.wrong)} not; {outcome.num_recomputed_tokens} "
            f"tokens recomputed; {outcome.num_asked_again} requests asked for again before their first token"
        )
        for what in outcome.wrong:
            console.print(f"  wrong: {what}", markup=False)
        is_right = is_right and not outcome.wrong
        outcomes.append(dataclasses.asdict(outcome))
    if arguments.json is not None:
        machine.write(arguments.json, found | {"forms": outcomes})
    return is_right


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    try:
        is_right = asyncio.run(_main(arguments, Console()))
    except LaunchError as error:
        sys.exit(f"python -m bench.chaos: {error}")
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    machine.run(main)
