"""How our programs are started as child processes, and what Linux says about processes. Knows no service by name."""

import asyncio
import contextlib
import os
import signal
import site
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Of an ended process whose output has not ended: how soon it is noticed.
_LOOK_S = 1.0

# Becomes another program, which is killed when the process that started it ends, however that happens. It is a program
# of its own, since in a child of a process with gRPC's threads no Python may run between fork and exec (see gRPC's
# fork_support.md).
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if sys.argv[2]:
    os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
if os.getppid() == int(sys.argv[1]):  # else the parent died before the first line
    os.execv(sys.argv[3], sys.argv[3:])
"""


def module_command(module: str, arguments: Sequence[str] = ()) -> tuple[str, ...]:
    """`python -m module`, which finds our module and not one of that name in the user's current folder."""
    return (sys.executable, "-P", "-m", module, *arguments)


def tied(command: Sequence[str], cores: Iterable[int] = ()) -> tuple[str, ...]:
    """The same command, as a child that is killed when this process ends, and uses these cores only; none for all."""
    return (sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), ",".join(map(str, cores)), *command)


def environment() -> dict[str, str]:
    """The environment for `module_command`: ours, with the repository's root on the path if it is not installed."""
    # gRPC's own messages, such as one for each connection that a peer ends, have no place between log lines.
    variables = {"GRPC_VERBOSITY": "ERROR"} | os.environ
    if str(ROOT) not in site.getsitepackages():
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), str(ROOT)]))
    return variables


async def start(
    command: Sequence[str],
    *,
    cores: Iterable[int] = (),
    variables: Mapping[str, str] | None = None,
    stdin: int = asyncio.subprocess.DEVNULL,
) -> asyncio.subprocess.Process:
    """Starts a command that is `tied` to this process, in a session of its own, with all its output in one pipe.

    Args:
        command: runs one of our programs.
        cores: those that it uses; none for all.
        variables: added to our environment.
        stdin: as asyncio takes it.
    """
    return await asyncio.create_subprocess_exec(
        *tied(command, cores),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment() | dict(variables or {}),
        cwd=_folder(),
        # A terminal's Ctrl-C is for the launcher, which then stops the services in order.
        start_new_session=True,
    )


def _folder() -> str:
    """Our current folder; the root if it has been removed, since torch cannot be loaded in such a folder."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


async def ended(process: asyncio.subprocess.Process) -> int:
    """The exit status of a process, once it has ended.

    `Process.wait` also waits for the end of its output, which whatever it has left running may hold open.
    """
    output_ended = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait([output_ended], timeout=_LOOK_S)
    finally:
        output_ended.cancel()
    return process.returncode


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: it tells reused pids apart. None if the process is gone."""
    fields = _stat(pid)
    # A zombie has ended; its parent has just not noticed yet.
    return int(fields[19]) if fields and fields[0] != "Z" else None


def uptime_s(pid: int) -> float | None:
    """How long a process has run, in seconds; None if it is gone."""
    ticks = start_ticks(pid)
    return None if ticks is None else time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def with_descendants(pids: Iterable[int]) -> list[int]:
    """These processes and all that they have started, directly or not."""
    parents = {pid: int(fields[1]) for pid in _all_pids() if (fields := _stat(pid))}
    found = [pid for pid in pids if pid in parents]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid and child not in found]
    return found


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal to these processes; those that are gone are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def resident_bytes(pid: int) -> int:
    """Memory of a process and its descendants that is in RAM now; 0 if it is gone."""
    return sum(_memory(each).get("VmRSS", 0) for each in with_descendants([pid]))


def peak_resident_bytes(pids: Iterable[int]) -> int:
    """The sum of the peak resident sizes of these processes and their descendants."""
    return sum(_memory(pid).get("VmHWM", 0) for pid in with_descendants(pids))


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on, which proc(5) counts as the third."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _memory(pid: int) -> Mapping[str, int]:
    """The Vm lines of /proc/PID/status, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines if line.startswith("Vm"))
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows}
