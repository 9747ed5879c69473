"""Writes a record while the scheduler serves: `record.py` defines its format, `replay.py` reads it."""

import contextlib
import io
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Self

from scheduler.record import INPUTS, VERSION, digest, failure, to_line
from scheduler.scheduler import Scheduler
from scheduler.sequence import SequenceGroup

log = logging.getLogger(__name__)


class Recorder:
    """Writes down every call that changes a core, and what it decided.

    The line of a call is handed to the operating system before the call is made, so it survives whatever kills the
    scheduler. If the file can no longer be written, as on a full disk, that ends the record and nothing else.

    Args:
        file: the file to write to; from now on the recorder's own.
        name: what the log calls it.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file: BinaryIO | None = file
        self._name = name
        self._inside = False

    @classmethod
    def open(cls, path: Path) -> Self:
        """A recorder to a new file: `path`, or if that exists, `path` with the first number appended that is free.

        So a scheduler that is started again with the same options keeps the record of what ended the one before.

        Raises:
            OSError: the file cannot be written.
        """
        numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
        for candidate in itertools.chain([path], numbered):
            with contextlib.suppress(FileExistsError):
                # A device or a pipe exists already; a folder is refused by `open`.
                mode = "w" if candidate.exists() and not candidate.is_file() else "x"
                file = io.BufferedWriter(io.FileIO(candidate, mode, opener=_private))
                break
        log.info("recording", extra={"file": candidate})
        return cls(file, str(candidate))

    def attach(self, core: Scheduler, worker: Mapping[str, str]) -> None:
        """Records `core`, which is new, from now on; `worker` is what a reader should know about the worker."""
        head = {"pagewire_record": VERSION, "pagewire": version("pagewire"), "worker": worker}
        clocks = {"time": time.time(), "clock": time.monotonic()}
        self._write(head | clocks | {"policy": core.policy, "pool": core.blocks})
        for name in INPUTS:
            setattr(core, name, self._recorded(name, getattr(core, name)))

    def close(self) -> None:
        """Ends the record."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what could not be written is tried again here
                file.close()

    def _recorded(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Any, **options: Any) -> object:
            # The core's calls to itself follow from the call recorded, and a call for an ended group changes nothing.
            if self._inside or self._file is None or _ended(args):
                return method(*args, **options)
            self._write([name, args, options])
            self._inside = True
            try:
                outcome = method(*args, **options)
            except Exception as error:
                self._write(failure(error))
                raise
            finally:
                self._inside = False
            self._write(digest(outcome))
            return outcome

        return call

    def _write(self, value: object) -> None:
        if self._file is None:
            return
        line = to_line(value)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            log.error(
                "--record: the record ends here, and serving goes on",
                extra={"file": self._name, "error": error.strerror},
            )
            self.close()


def _ended(args: tuple[Any, ...]) -> bool:
    return any(isinstance(argument, SequenceGroup) and not argument.live for argument in args)


def _private(path: str, flags: int) -> int:
    """Opens a file that only its owner can read: prompts are in it."""
    return os.open(path, flags, 0o600)
