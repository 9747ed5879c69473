"""Fixtures that several test files share."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from protos import pollers

# As in the worker process: OpenMP's threads spin for milliseconds otherwise, which takes seconds on shared cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
with contextlib.suppress(ImportError):  # where kernels alone are tested there may be no gRPC
    pollers.keep()


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The small real model as a checkpoint directory, fetched once into the user's cache."""
    command = [sys.executable, "-m", "pagewire", "model"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    return Path(run.stdout.strip().splitlines()[-1])
