"""Where and when figures were made, and the file that they are kept in."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path


def facts(distributions: Sequence[str]) -> dict[str, object]:
    """Date, machine, and the versions of these distributions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": {"cpu": _cpu_model(), "cpus": os.cpu_count(), "system": platform.platform()},
        "versions": {name: metadata.version(name) for name in distributions} | {"python": platform.python_version()},
    }


def write(path: Path, report: dict[str, object]) -> None:
    """Writes a report as JSON, floats short enough to be read."""
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
