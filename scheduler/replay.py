"""`python -m scheduler.replay`, which `pagewire replay` runs: makes a recorded scheduler's decisions again.

Prints what was recorded, and whether every decision is the same this time. If one differs, the core is not the one that
was recorded, or it depends on something that no call tells it.
"""

import argparse
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from scheduler.admission import QueueFull
from scheduler.plan import Finished, Plan, Row, StepOutputs
from scheduler.record import OUTPUT_FIGURES, PLAN_FIGURES
from scheduler.replayer import Call, NotReplayable, Replayer
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup

# How many rows are shown of a plan that differs.
_NUM_ROWS = 32


class NoSuchRequest(Exception):
    """The request whose story was asked for is not in the record."""


def replay(file: BinaryIO, *, check: bool = False, request_id: str | None = None) -> int:
    """Replays a record, and prints what there is to say; returns the exit status: 0 if all is as it was, else 1.

    Args:
        file: the record.
        check: whether to check the core's invariants after each call.
        request_id: a request whose story is told on the way.

    Raises:
        NotReplayable: the file is no record, or is damaged.
        NoSuchRequest: `request_id` is not in it; everything else has been printed.
    """
    replayer = Replayer(file)
    core = replayer.core
    print(*_about(replayer), sep="\n")
    totals: Counter[str] = Counter()
    failed: Call | None = None
    is_told = request_id is None
    for call in replayer.calls():
        totals.update(_figures(call))
        for told_id, event in _events(call) if request_id is not None else ():
            if told_id == request_id:
                is_told = True
                print(f"{call.now:8.3f} s  step {core.num_steps}: {event}")
        if call.ended and call.digest != call.then:
            print(*_difference(call, core.num_steps), sep="\n")
            return 1
        if isinstance(call.outcome, Exception):
            if not isinstance(call.outcome, QueueFull | ValueError):  # which refuse a request
                failed = failed or call
        elif check and (wrong := _broken(core)):
            print(f"broken    step {core.num_steps}, line {call.line}: after {call.name}, {wrong}")
            return 1
    print("replayed  " + " ".join(f"{name}={number}" for name, number in totals.items() if number))
    if failed is not None:
        print(*_failure(failed), sep="\n")
    print("result    every decision is the same" + ("; the last line of the record is cut off" if replayer.cut else ""))
    if not is_told:
        raise NoSuchRequest(f"no request {request_id!r} in this record")
    return 0


def _about(replayer: Replayer) -> Iterator[str]:
    head, policy, pool = replayer.head, replayer.core.policy, replayer.core.blocks
    began = datetime.fromtimestamp(head["time"], UTC).isoformat(timespec="seconds")
    yield f"recorded  {began} by pagewire {head['pagewire']}"
    yield "worker    " + " ".join(f"{name}={value}" for name, value in head["worker"].items() if value)
    values = {field.name: getattr(policy, field.name) for field in fields(policy)}
    yield "policy    " + " ".join(f"{name}={getattr(value, 'value', value)}" for name, value in values.items())
    yield f"pool      {pool.num_blocks} blocks of {pool.block_size} tokens, {pool.num_swap_blocks} to swap to"


def _figures(call: Call) -> Counter[str]:
    figures = Counter({call.name: 1})
    match call.outcome:
        case Plan() as plan:
            figures |= Counter(tokens_computed=plan.num_tokens, preempted=len(plan.preempted))
        case StepOutputs() as outputs:
            counts = [len(new.sequence.output_token_ids) - new.first_index for new in outputs.new_tokens]
            figures["tokens_sampled"] = sum(counts)
        case Exception() as error:
            figures[type(error).__name__] = 1
    return figures


def _events(call: Call) -> Iterator[tuple[str, str]]:
    """What a call did to requests: (request id, event). Decodes are left out: they go on where nothing else is said."""
    match call.outcome:
        case Exception() as error if call.name == "submit":
            yield call.options["request_id"], f"refused: {error}"
        case None:
            yield from ((each.request_id, call.name) for each in call.args if isinstance(each, SequenceGroup))
        case SequenceGroup() as group:
            tokens = f"{group.num_prompt_tokens} prompt tokens, n={group.n}"
            yield group.request_id, f"submitted as number {group.number}: {tokens}"
        case Plan() as plan:
            yield from _changes(plan)
            rows = (row for row in plan.rows if row.num_new_tokens > 1 or not row.samples)
            yield from ((row.group.request_id, _row(row)) for row in rows)
        case StepOutputs() as outputs:
            yield from (_end(end) for end in outputs.finished)
            yield from ((group.request_id, "failed: its logits are not finite") for group in outputs.failed)
        case Finished() as end:
            yield _end(end)
        case list() as groups:
            yield from ((group.request_id, call.name) for group in groups if isinstance(group, SequenceGroup))


def _changes(plan: Plan) -> Iterator[tuple[str, str]]:
    """What a plan does besides its rows: (request id, event)."""
    yield from ((preempted.group.request_id, f"preempted, {preempted.reason}") for preempted in plan.preempted)
    yield from ((group.request_id, "resumed") for group in plan.resumed)
    yield from ((dropped.group.request_id, f"dropped, {dropped.message}") for dropped in plan.dropped)
    yield from (_end(end) for end in plan.finished)


def _row(row: Row) -> str:
    table = row.sequence.block_table.tolist()
    tokens = f"tokens {row.start} to {row.start + row.num_new_tokens - 1}"
    drafted = "" if row.draft is None else f", drafted {row.draft}"
    return f"sequence {row.sequence.index} computes {tokens}{drafted}, samples {len(row.samples)}, blocks {table}"


def _end(end: Finished) -> tuple[str, str]:
    num_tokens = len(end.sequence.output_token_ids)
    words = f"sequence {end.sequence.index} {end.sequence.status.name} with {num_tokens} tokens of output"
    return end.group.request_id, f"{words}: {end.message}" if end.message else words


def _difference(call: Call, step_id: int) -> Iterator[str]:
    """A decision as it was and as it is now; of the first, only the digest is known."""
    yield f"differs   step {step_id}, line {call.line}: {call.name} at {call.now:.3f} s"
    for word, digest in (("then", call.then), ("now", call.digest)):
        yield f"  {word:<6}  {_words(call, digest)}"
    if isinstance(call.outcome, Plan):
        yield from _plan(call.outcome)
    else:
        yield from (f"  now     request {request_id}: {event}" for request_id, event in _events(call))
    if isinstance(call.outcome, Exception):
        yield from _failure(call)


def _plan(plan: Plan) -> Iterator[str]:
    yield from (f"  now     request {row.group.request_id}: {_row(row)}" for row in plan.rows[:_NUM_ROWS])
    if len(plan.rows) > _NUM_ROWS:
        yield f"  now     and {len(plan.rows) - _NUM_ROWS} rows more"
    yield from (f"  now     request {request_id}: {change}" for request_id, change in _changes(plan))
    swaps = f"swaps out {plan.blocks_to_swap_out}, swaps in {plan.blocks_to_swap_in}"
    yield f"  now     {swaps}, copies {plan.blocks_to_copy}, forgets {plan.forget}"


def _words(call: Call, digest: object) -> str:
    names = {Plan: PLAN_FIGURES, StepOutputs: OUTPUT_FIGURES}.get(type(call.outcome), ())
    if isinstance(digest, list) and len(digest) == len(names) + 1:
        return ", ".join(f"{name} {figure}" for name, figure in zip((*names, "checksum"), digest, strict=True))
    return str(digest)


def _failure(call: Call) -> Iterator[str]:
    assert isinstance(call.outcome, Exception)
    then = ", as it did when it was recorded" if call.ended and call.digest == call.then else ""
    yield f"failed    line {call.line}: {call.name} raises{then}"
    yield "".join(traceback.format_exception(call.outcome)).rstrip()


def _broken(core: Scheduler) -> str | None:
    """The invariant that does not hold; None if all do."""
    try:
        core.check()
    except AssertionError as error:
        return str(error) or "".join(traceback.format_tb(error.__traceback__)[-1:])
    return None


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="pagewire replay", description=__doc__)
    parser.add_argument("file", type=Path, help="what `--record` wrote")
    parser.add_argument("--check", action="store_true", help="check the core's invariants after each call")
    parser.add_argument("--request", metavar="ID", help="tell the story of one request")
    arguments = parser.parse_args()
    status = 2
    try:
        try:
            with _opened(arguments.file) as file:
                status = replay(file, check=arguments.check, request_id=arguments.request)
        except (NotReplayable, NoSuchRequest) as error:
            print(f"{parser.prog}: {arguments.file}: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            status = 130
        sys.stdout.flush()
    except OSError as error:  # from standard output, of which a reader may well want the first lines only
        if not isinstance(error, BrokenPipeError):
            print(f"{parser.prog}: standard output: {error.strerror}", file=sys.stderr)
        # What is left in the buffer would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 2
    sys.exit(status)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise NotReplayable(error.strerror) from error


if __name__ == "__main__":
    main()
