"""A cluster in the background: `pagewire up` as a process of its own, which logs to a file, and how it is stopped."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from pagewire import state
from pagewire.cluster import LaunchError
from pagewire.launch import LaunchOptions, check_free
from pagewire.processes import environment, module_command, tied
from pagewire.state import ClusterState

_POLL_S = 0.02


def start(options: LaunchOptions, *, tie: bool = False) -> subprocess.Popen[bytes]:
    """Starts `pagewire up` with its output in `options.log_file`; with `tie` it is killed when this process ends."""
    assert options.log_file is not None
    check_free(options)
    options.log_file.parent.mkdir(parents=True, exist_ok=True)
    command = module_command("pagewire", ["up", *options.arguments()])
    with options.log_file.open("wb") as output:
        return subprocess.Popen(
            tied(command) if tie else command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_without_access(environment()) | options.access.environment,
            start_new_session=True,
        )


def _without_access(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that hold a client's access to other servers."""
    return {name: value for name, value in variables.items() if not name.startswith("PAGEWIRE_CLIENT_")}


def wait_until_serving(process: subprocess.Popen[bytes], options: LaunchOptions) -> None:
    """Returns when the cluster that `start` launched serves; stops it if this process is to end.

    Raises:
        LaunchError: the cluster ended instead; holds the last lines of its log.
    """
    try:
        while True:
            status = process.poll()
            if status is not None:
                assert options.log_file is not None
                raise LaunchError(f"the cluster did not start (status {status})\n{log_tail(options.log_file)}")
            running = state.load(options.port)
            if running is not None and running.launcher_pid == process.pid and running.serving:
                return
            time.sleep(_POLL_S)
    except (KeyboardInterrupt, SystemExit):
        process.terminate()
        process.wait()
        raise


def log_tail(log_file: Path, lines: int = 20) -> str:
    """The last lines of a log, indented; if there are none, what may have kept them from it."""
    text = log_file.read_text(errors="replace").splitlines()[-lines:] or [f"{log_file} is empty: is the disk full?"]
    return "\n".join(f"  {line}" for line in text)


def stop(running: ClusterState) -> None:
    """Drains a cluster and waits for its end; kills it if that takes longer than its services are allowed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.launcher_pid, signal.SIGTERM)
    deadline = time.monotonic() + running.stop_within_s
    while running.alive and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if running.alive:
        os.kill(running.launcher_pid, signal.SIGKILL)
        state.remove(running)
