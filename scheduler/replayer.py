"""Makes the calls of a record again, on a new core. The core is pure, so the same calls decide the same."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from scheduler.plan import Plan
from scheduler.record import INPUTS, VERSION, digest, failure, reader
from scheduler.scheduler import Scheduler

# A file whose first line is longer than this is no record.
_HEAD_BYTES = 1 << 16


class NotReplayable(Exception):
    """The file is no record, cannot be read, is damaged, or is of another version; the message says which."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call, as it went this time.

    Attributes:
        line: where it stands in the record, counted from 1.
        now: seconds from the beginning of the record to the last time that a call named.
        outcome: what it returned, or the exception that it raised.
        then: the digest of its outcome when it was recorded.
        ended: whether the record has `then`; if not, that outcome is not known.
    """

    line: int
    now: float
    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    outcome: object
    then: object
    ended: bool

    @property
    def digest(self) -> object:
        """The digest of its outcome this time."""
        return failure(self.outcome) if isinstance(self.outcome, Exception) else digest(self.outcome)


class Replayer:
    """Reads a record, and makes its calls.

    Args:
        file: a record, from its beginning.

    Attributes:
        head: what the record says about itself.
        core: the core, as the calls so far have left it.
        cut: whether the last line was cut off; known at the end.

    Raises:
        NotReplayable: `file` is no record.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.head = _head(file)
        self.core = Scheduler(self.head["policy"], self.head["pool"])
        self.cut = False
        self._line = 1
        self._now = 0.0
        # Plans that may still be answered, by step id.
        self._plans: dict[int, Plan] = {}
        self._reader = reader(self._find)

    def calls(self) -> Iterator[Call]:
        """Makes the calls one by one, up to the record's last whole line.

        Raises:
            NotReplayable: a line is damaged.
        """
        while (line := self._read()) is not None:
            place = self._line
            match self._parse(line):
                case [str(name), list(args), dict(options)] if name in INPUTS:
                    outcome = self._make(name, args, options)
                case _:
                    raise self._damaged("it is no call that changes a core")
            then = self._read()
            told = None if then is None else self._parse(then)
            yield Call(place, self._now, name, tuple(args), options, outcome, told, then is not None)

    def _make(self, name: str, args: list[Any], options: dict[str, Any]) -> object:
        try:
            if name == "schedule":
                self._now = args[0] - self.head["clock"]
            elif "now" in options:
                self._now = options["now"] - self.head["clock"]
            outcome = getattr(self.core, name)(*args, **options)
        except Exception as error:
            return error
        if isinstance(outcome, Plan):
            self._plans[outcome.step_id] = outcome
        return outcome

    def _find(self, kind: str, number: int) -> object:
        """The group or plan that an argument stands for; raises KeyError if there is none."""
        if kind == "group":
            return self.core.queues.groups[number]
        plan = self._plans[number]  # the oldest in flight: none before it is answered any more
        self._plans = {step_id: later for step_id, later in self._plans.items() if step_id > number}
        return plan

    def _read(self) -> bytes | None:
        """The next line; None at the end."""
        line = _next_line(self._file)
        if not line.endswith(b"\n"):
            self.cut = self.cut or bool(line)
            return None
        self._line += 1
        return line

    def _parse(self, line: bytes) -> Any:
        try:
            return self._reader.decode(line.decode())
        except KeyError as error:
            raise self._damaged(f"it is about {error}, which is not there") from error
        except (ValueError, TypeError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, why: str) -> NotReplayable:
        return NotReplayable(f"line {self._line} is damaged: {why}")


def _next_line(file: BinaryIO, num_bytes: int = -1) -> bytes:
    try:
        return file.readline(num_bytes)
    except OSError as error:
        raise NotReplayable(f"it cannot be read: {error.strerror}") from error


def _head(file: BinaryIO) -> dict[str, Any]:
    line = _next_line(file, _HEAD_BYTES)
    if not line:
        raise NotReplayable("it is empty: the scheduler that was to write it had no worker yet, or no room on the disk")
    try:
        version = json.loads(line)["pagewire_record"]
    except (ValueError, TypeError, KeyError) as error:
        raise NotReplayable("it is no record of a scheduler") from error
    if version != VERSION:
        raise NotReplayable(f"it is a record of version {version}; this Pagewire replays version {VERSION}")
    try:
        head = reader().decode(line.decode())
        return {name: head[name] for name in ("pagewire", "worker", "time", "clock", "policy", "pool")}
    except (ValueError, TypeError, KeyError) as error:
        raise NotReplayable(f"line 1 is damaged, or of another release: {error}") from error
