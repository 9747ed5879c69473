"""`python -m worker --model DIRECTORY`; `worker.process` does the work."""

import contextlib
import gc
import json
import os
import sys
from importlib import import_module
from pathlib import Path

# Whether the system gives huge pages, and whether only to programs that ask.
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# An option of Python's that says the program has been restarted; glibc may take its variable away before we see it.
_AGAIN = "begun-again"


def ask_for_huge_pages() -> None:
    """Restarts this program so that malloc asks for huge pages, if the system gives them to programs that ask.

    A step goes through all weights and prefetches them; a page of 4 KB is soon over, and looking up the next one takes
    time. glibc reads its settings once, before Python begins.
    """
    if "GLIBC_TUNABLES" in os.environ or _AGAIN in sys._xoptions:
        return
    with contextlib.suppress(OSError):  # it works without them as well
        if "[madvise]" in _HUGE_PAGES.read_text():
            os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
            program, *arguments = sys.orig_argv
            os.execv(sys.executable, [program, "-X", _AGAIN, *arguments])


if __name__ == "__main__":
    ask_for_huge_pages()

from worker.config import WorkerSettings  # noqa: E402  # it would be imported twice

# A thread that waits for the others of its OpenMP team spins, by default for milliseconds. The router and the scheduler
# run on the same cores: with one more busy thread than cores, threads that spin keep the one that all wait for off its
# core, at each of the hundreds of barriers of a step, and a decode step of 14 ms was measured to take 1,700. Spinning
# for some tens of microseconds costs a quiet machine nothing. libgomp reads this once, when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# NumPy brings a team of threads for matrix products, which are not done with it here; they would spin once imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if __name__ == "__main__":
    # What is imported stays: looking for garbage in it again and again takes a sixth of the time of torch's import.
    gc.disable()
    arguments = sys.argv[1:]
    if arguments == ["-"]:
        # Started before the arguments were known (pagewire/early_worker.py): we import first, and then read them.
        import_module("worker.process")
        arguments = json.loads(sys.stdin.readline() or sys.exit())
    settings = WorkerSettings.parse("worker", arguments)
    from worker.process import main

    gc.freeze()
    gc.enable()
    main(settings)
