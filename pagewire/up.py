"""`pagewire up` in the foreground: one cluster, its state file, and what the terminal shows until it is drained."""

import asyncio
import logging
import os
import re
import signal
import tempfile
import time
from dataclasses import replace
from typing import get_args

from rich.console import Console
from rich.status import Status
from rich.text import Text

from pagewire import state
from pagewire.cluster import Cluster, LaunchError, stages
from pagewire.early_worker import EarlyWorker
from pagewire.launch import LaunchOptions, check_free, services
from pagewire.processes import start_ticks
from pagewire.state import ClusterState
from protos import logs

_COLOURS = {"worker": "magenta", "scheduler": "cyan", "router": "green"}
# A socket's path in our folder must stay below Linux's 108 bytes, and be an address unescaped, in a list too.
_LONGEST_FOLDER = 70
_PLAIN_FOLDER = r"[A-Za-z0-9_./+-]+"
log = logging.getLogger(__name__)


def up(options: LaunchOptions, worker: EarlyWorker | None = None) -> int:
    """Runs the cluster until Ctrl-C, SIGTERM or the terminal's end drains it; a second Ctrl-C ends it at once.

    Args:
        options: the cluster's.
        worker: one that has been started already, if any.

    Returns:
        The exit status.

    Raises:
        LaunchError: it cannot start, or cannot go on.
    """
    check_free(options)
    parent = tempfile.gettempdir()
    if len(parent) > _LONGEST_FOLDER or not re.fullmatch(_PLAIN_FOLDER, parent):
        parent = "/tmp"
    with tempfile.TemporaryDirectory(prefix="pagewire-", dir=parent, ignore_cleanup_errors=True) as directory:
        foreground = _Foreground(options, directory, worker)
        with asyncio.Runner() if worker is None else worker.runner as runner:
            return runner.run(foreground.run())


class _Foreground:
    """One run of `pagewire up`: the cluster, its state file, and what the terminal shows."""

    def __init__(self, options: LaunchOptions, directory: str, worker: EarlyWorker | None) -> None:
        chain = services(options, directory)
        commands = {service.name: service.command for service in chain}
        self._state = ClusterState(
            launcher_pid=os.getpid(),
            launcher_start_ticks=start_ticks(os.getpid()) or 0,
            port=options.port,
            target=options.target,
            model=options.model,
            directory=directory,
            log_file=str(options.log_file) if options.log_file else None,
            stop_within_s=sum(max(service.stop_within_s for service in stage) for stage in stages(chain)),
            addresses={service.name: service.address for service in chain},
            service_pids={},
            serving=False,
        )
        self._options = options
        self._console = Console(highlight=False, soft_wrap=True)
        self._status = Status("", console=self._console)
        self._started = time.monotonic()
        self._cluster = Cluster(
            chain,
            on_line=self._line,
            on_waiting=self._waiting,
            on_pids=self._pids,
            started={} if worker is None else worker.become(commands),
        )
        self._stop = asyncio.Event()
        self._forced = False
        self._is_saved = False

    async def run(self) -> int:
        """Runs until a signal; returns the exit status."""
        self._start_logging()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # as `nohup` wants it
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        try:
            if self._console.is_terminal:
                self._status.start()
            await self._cluster.run(self._stop, self._ready)
        finally:
            state.remove(self._state)
            self._status.stop()  # which fails if the terminal is gone
        return 1 if self._forced else 0

    def _start_logging(self) -> None:
        """Logs as the router does; what the router refuses of this, it refuses with a better message."""
        level = self._options.value("router", "log-level", "info")
        form = self._options.value("router", "log-format", "text")
        logs.start("launcher", level if level in get_args(logs.LogLevel) else "info", form)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            if number == signal.SIGINT:  # a second SIGTERM may come from a sender that does not know of the first
                self._forced = True
                self._cluster.kill()
            return
        self._begin_stop()
        self._status.update("finishing live requests; Ctrl-C once more ends them")
        if self._console.is_terminal and number != signal.SIGHUP:  # SIGHUP says that the terminal is gone
            self._status.start()
        log.info("stopping")

    def _begin_stop(self) -> None:
        self._stop.set()
        if self._state.serving:
            self._save(serving=False)  # for `restart`, which would stop services that live requests still need

    def _ready(self) -> None:
        self._status.stop()
        self._save(serving=True)
        after_s = round(time.monotonic() - self._started, 1)
        log.info("serving", extra={"target": self._options.target, "after_s": after_s})
        if self._console.is_terminal:
            here = "" if self._options.port == 50051 else f" --target {self._options.target}"
            self._console.print(f'[bold]Ready.[/] Try: pagewire generate "The capital of France is"{here}')

    def _waiting(self, name: str) -> None:
        self._status.update(f"waiting for the {name}")

    def _pids(self, pids: dict[str, int]) -> None:
        self._save(service_pids=pids)

    def _save(self, **changes: object) -> None:
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]
        try:
            state.save(self._state)
        except OSError as error:
            if not self._is_saved:
                raise LaunchError(f"the state cannot be written, by which others find it: {error}") from error
            # The disk may be full; what runs serves all the same.
            log.warning("the state file is as it was, for `status` and `down`", extra={"error": str(error)})
        self._is_saved = True

    def _line(self, name: str, line: str) -> None:
        try:
            if self._console.is_terminal:
                self._console.print(_coloured(name, line))
            else:
                print(line, flush=True)
        except BrokenPipeError:
            # `pagewire up | head`: the reader is gone.
            self._begin_stop()
        except (OSError, ValueError):
            # A full disk, or an encoding without these characters: the line is lost, but must not hold up the services.
            pass


def _coloured(name: str, line: str) -> Text:
    """A log line whose process's name, near its start, has the colour of the service."""
    text = Text(line)
    place = line.find(name, 0, 40)
    if place >= 0:
        text.stylize(_COLOURS.get(name.partition("-")[0], "bold"), place, place + len(name))
    return text
