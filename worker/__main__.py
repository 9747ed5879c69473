"""`python -m worker --model DIRECTORY`; `worker.process` does the work."""

import contextlib
import gc
import json
import os
import sys
from importlib import import_module
from pathlib import Path

# Whether the system gives huge pages, and to whom.
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Says as one of Python's own options that it has begun again; glibc may take its variable away before we see it.
_AGAIN = "begun-again"


def ask_for_huge_pages() -> None:
    """Begins this program again so that malloc asks for huge pages, where those get them who ask.

    A step goes through all weights and asks memory for them ahead; a page of 4 KB is soon over, and to look up the next
    one takes time. glibc reads what it is told before Python begins, and once.
    """
    if "GLIBC_TUNABLES" in os.environ or _AGAIN in sys._xoptions:
        return
    with contextlib.suppress(OSError):  # it goes without as well
        if "[madvise]" in _HUGE_PAGES.read_text():
            os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
            program, *arguments = sys.orig_argv
            os.execv(sys.executable, [program, "-X", _AGAIN, *arguments])


if __name__ == "__main__":
    ask_for_huge_pages()

from worker.config import WorkerSettings  # noqa: E402  # it would be imported twice

# A thread that waits for the others of its OpenMP team spins, by default for milliseconds. The router and the scheduler
# run on the same cores: with one more busy thread than cores, those that spin keep the one that all wait for off its
# core, at each of the hundreds of barriers of a step, and a decode step of 14 ms was measured to take 1,700. Spinning
# for some tens of microseconds costs a quiet machine nothing. libgomp reads this once, when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# NumPy comes with a team of threads for products that nobody here asks it for; they would spin from its import on.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if __name__ == "__main__":
    # What is imported stays: to look for garbage among it again and again takes a sixth of the time of torch's import.
    gc.disable()
    arguments = sys.argv[1:]
    if arguments == ["-"]:
        # We began before anybody knew what to tell us (pagewire/early_worker.py): we import, and then hear it.
        import_module("worker.process")
        arguments = json.loads(sys.stdin.readline() or sys.exit())
    settings = WorkerSettings.parse("worker", arguments)
    from worker.process import main

    gc.freeze()
    gc.enable()
    main(settings)
