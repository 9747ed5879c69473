"""`pagewire restart`: replaces processes of a local cluster, one by one, while it serves.

This command only stops a process; since that then ends in order, the launcher starts its successor at once.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status

from pagewire import health, state
from pagewire.access import Access
from pagewire.background import log_tail
from pagewire.cluster import LaunchError
from pagewire.state import ClusterState
from pagewire.status import health_of, with_remedy

_POLL_S = 0.05


def restart(port: int, services: Sequence[str], console: Console, access: Access, timeout_s: float) -> None:
    """Replaces all processes of these services, each once all serve again with the successor of the one before.

    Args:
        port: the cluster's.
        services: to be replaced in this order.
        console: shows what happens.
        access: TLS for the routers, if they have it.
        timeout_s: seconds for each process, from its SIGTERM until all serve again.

    Raises:
        LaunchError: no cluster serves, or it does not serve again in time, or has ended or been told to stop; or no
            router tells its health, which shows when a restart is done, and so nothing was stopped.
    """
    running = state.load(port)
    if running is None or not running.serving:
        which = "nothing runs" if running is None else "the cluster does not serve yet, or is being stopped,"
        raise LaunchError(f"{which} on port {port}; `pagewire up` starts a cluster")
    _require_a_way_in(running, access)
    for name in [name for service in services for name in running.addresses if name.partition("-")[0] == service]:
        with console.status("") as shown:
            begin = time.monotonic()
            pid = _replace(name, _Watch(running, begin + timeout_s, shown), access)
            away_s = time.monotonic() - begin
        console.print(f"{name} serves again, as pid {pid}; it was away for {away_s:.1f} s")


def _require_a_way_in(running: ClusterState, access: Access) -> None:
    said = ""
    for router in (name for name in running.addresses if name.startswith("router")):
        said = health_of(running, router, access)
        if not said.startswith((health.NO_ANSWER, health.NOT_LET_IN)):
            return
    raise LaunchError(f"no router tells its health: {with_remedy(said, access)}")


class _Watch:
    """Polls a cluster, for a bounded time, and shows what it waits for.

    Args:
        running: the cluster.
        end: when the time is over, by time.monotonic().
    """

    def __init__(self, running: ClusterState, end: float, shown: Status) -> None:
        self._running = running
        self._end = end
        self._shown = shown

    def next(self, awaited: str) -> ClusterState:
        """The cluster as it is a moment later.

        Raises:
            LaunchError: the time is over, or the cluster has ended or was told to stop.
        """
        self._shown.update(f"waiting for {awaited}")
        time.sleep(_POLL_S)
        now = state.load(self._running.port)
        if now is None:
            while self._running.alive and time.monotonic() < self._end:
                time.sleep(_POLL_S)  # its last log lines say why it ends
            log_file = self._running.log_file
            tail = f"; its log ends with\n{log_tail(Path(log_file))}" if log_file else ""
            raise LaunchError(f"the cluster has ended while this waited for {awaited}{tail}")
        if not now.serving:
            raise LaunchError(f"the cluster was told to stop while this waited for {awaited}")
        if time.monotonic() >= self._end:
            raise LaunchError(f"--timeout is over, and this still waited for {awaited}; the launcher goes on with it")
        return now


def _replace(name: str, watch: _Watch, access: Access) -> int:
    """Stops a process, and returns the pid of its successor once all serve again."""
    while (old := watch.next(f"{name} to run").service_pids.get(name)) is None:
        pass  # it has just died, and is about to be started again
    with contextlib.suppress(ProcessLookupError):
        os.kill(old, signal.SIGTERM)
    while (new := watch.next(f"{name} (pid {old}) to stop").service_pids.get(name)) in (None, old):
        pass
    assert new is not None
    # The services that need it serve only with it, and none is to be stopped while another one is away.
    for each in watch.next(f"{name} (pid {new}) to serve").addresses:
        while health_of(watch.next(f"{each} to serve"), each, access) != health.SERVING:
            pass
    return new
