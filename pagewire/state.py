"""What `pagewire up` leaves for `down` and `status` to find: one small JSON file per port, in the user's state folder.

A file whose launcher is gone is stale, whatever has that pid now; `load` removes it.
"""

import contextlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs

from pagewire.processes import start_ticks


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster that a launcher on this machine runs.

    Attributes:
        launcher_pid: the process that SIGTERM drains.
        launcher_start_ticks: tells it apart from a later process with the same pid.
        target: where clients connect.
        directory: holds the Unix sockets; removed with the cluster.
        log_file: None for a cluster in the foreground of a terminal.
        stop_within_s: the most seconds that stopping it takes.
        addresses: where each service answers health checks.
        service_pids: by service name; changes with every restart.
        serving: whether all services have been up once, and have not been told to stop since.
    """

    launcher_pid: int
    launcher_start_ticks: int
    port: int
    target: str
    model: str
    directory: str
    log_file: str | None
    stop_within_s: float
    addresses: dict[str, str]
    service_pids: dict[str, int]
    serving: bool

    @property
    def alive(self) -> bool:
        """Whether its launcher runs."""
        return start_ticks(self.launcher_pid) == self.launcher_start_ticks


def log_path(port: int) -> Path:
    """Where a cluster in the background logs."""
    return platformdirs.user_log_path("pagewire") / f"{port}.log"


def save(state: ClusterState) -> None:
    """Writes the file of the state's port, whole or not at all."""
    path = _path(state.port)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(asdict(state), indent=1))
    draft.replace(path)


def load(port: int) -> ClusterState | None:
    """The cluster that runs on a port; None if there is none."""
    try:
        state = ClusterState(**json.loads(_path(port).read_text()))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None
    if state.alive:
        return state
    remove(state)
    return None


def remove(state: ClusterState) -> None:
    """Forgets a cluster that has ended."""
    shutil.rmtree(state.directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # it may be gone, or its folder no longer writable
        _path(state.port).unlink()


def _path(port: int) -> Path:
    return platformdirs.user_state_path("pagewire") / f"{port}.json"
