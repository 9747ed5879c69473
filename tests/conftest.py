"""Fixtures that several test files share."""

import contextlib
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protos import pollers

# As in the worker process: OpenMP's threads spin for milliseconds otherwise, which takes seconds on shared cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
with contextlib.suppress(ImportError):  # a machine that only tests kernels may have no gRPC
    pollers.keep()
# By `time.time`. CI sets it, since its time is limited and its machines vary in speed.
SLOW_TESTS_UNTIL = float(os.environ.get("SLOW_TESTS_UNTIL", "inf"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """If their time is limited, slow tests come last; the first of these are what users do with the real model."""
    if math.isfinite(SLOW_TESTS_UNTIL):
        items.sort(key=lambda item: (_is_slow(item), not item.path.name.startswith("test_system")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips slow tests when their time is over."""
    if time.time() > SLOW_TESTS_UNTIL and _is_slow(item):
        pytest.skip("LEFT OUT: the time for slow tests is over")


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The small real model as a checkpoint directory, fetched once into the user's cache."""
    command = [sys.executable, "-m", "pagewire", "model"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    return Path(run.stdout.strip().splitlines()[-1])
