"""Where and when figures were made, what the machine did meanwhile, and the file that they are kept in."""

import json
import os
import platform
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

_FILE_COLUMNS = 160


def run(main: Callable[[], None]) -> None:
    """Runs a command that measures; Ctrl-C ends it with status 130 and no traceback."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)


def facts(distributions: Sequence[str]) -> dict[str, object]:
    """Date, machine, and the versions of these distributions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": {"cpu": _cpu_model(), "cpus": os.cpu_count(), "system": platform.platform()},
        "versions": {name: metadata.version(name) for name in distributions} | {"python": platform.python_version()},
    }


def cpu_s(pid: int) -> float:
    """User and system time of a process, all threads; proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_and_idle_s() -> tuple[float, float]:
    """CPU seconds that all cores were busy, and idle, since the start of the machine; proc(5)."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), idle / os.sysconf("SC_CLK_TCK")


def available_bytes() -> int:
    """Memory that is available to new programs; proc(5)."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(line[1]) << 10 for line in lines if line[0] == "MemAvailable:")


def columns() -> int | None:
    """The width of tables for a rich console: as wide as they need to be in a file; None: the terminal's."""
    return None if sys.stdout.isatty() else _FILE_COLUMNS


def output_file(text: str) -> Path:
    """The type of an argument that names a file to write: refused before anything is measured, not after an hour.

    Raises:
        ArgumentTypeError: nothing can be written there.
    """
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentTypeError(f"{text}: {error.strerror}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentTypeError(f"{text} cannot be written")
    return path


def picture_file(text: str) -> Path:
    """The same for a picture, which only matplotlib can draw.

    Raises:
        ArgumentTypeError: it cannot be drawn, or not be written.
    """
    if Path(text).suffix not in (".svg", ".png"):
        raise ArgumentTypeError(f"{text} is neither an SVG nor a PNG")
    if find_spec("matplotlib") is None:
        raise ArgumentTypeError("drawing needs matplotlib, from the bench extra: pip install --editable '.[bench]'")
    return output_file(text)


def write(path: Path, report: dict[str, object]) -> None:
    """Writes a report as JSON, with floats rounded to five digits."""
    path.write_text(json.dumps(_rounded(report), indent=1) + "\n")


def _rounded(value: object) -> object:
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {key: _rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [_rounded(item) for item in value]
    return value


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
