"""`python -m worker --model DIRECTORY`; `worker.process` does the work."""

import gc
import os
import threading
from pathlib import Path

from worker.config import WorkerSettings

# Of weights that are asked for ahead; more than that may not stay in memory until it is used.
_MOST_BYTES_AHEAD = 4 << 30

# A thread that waits for the others of its OpenMP team spins, by default for milliseconds. The router and the scheduler
# run on the same cores: with one more busy thread than cores, those that spin keep the one that all wait for off its
# core, at each of the hundreds of barriers of a step, and a decode step of 14 ms was measured to take 1,700. Spinning
# for some tens of microseconds costs a quiet machine nothing. libgomp reads this once, when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def read_ahead(model: str) -> None:
    """Has the weights of a checkpoint's directory read from disk, as far as they are not in memory."""
    left = _MOST_BYTES_AHEAD
    for path in sorted(Path(model).expanduser().glob("*.safetensors")):
        with path.open("rb") as file:
            size = min(left, os.fstat(file.fileno()).st_size)
            os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_WILLNEED)
            left -= size


if __name__ == "__main__":
    # What is imported stays: to look for garbage among it again and again takes a sixth of the time of torch's import.
    gc.disable()
    settings = WorkerSettings.parse("worker")
    if settings.model and hasattr(os, "posix_fadvise"):
        threading.Thread(target=read_ahead, args=[settings.model], daemon=True).start()
    from worker.process import main

    gc.freeze()
    gc.enable()
    main(settings)
