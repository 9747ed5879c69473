"""Memory of engines with several processes: what these share counts once, whoever else maps it."""

import contextlib
import subprocess
import sys

import pytest

from bench.compare.memory import peak_memory_bytes

SIZE = 32 << 20
MARGIN = 4 << 20

MAPS = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
sum(memory[:: mmap.PAGESIZE])
print("ready", flush=True)
sys.stdin.read()
"""
FORKS = f"""
import os, sys
memory = b"x" * {SIZE}
if not os.fork():
    sys.stdin.read()
    os._exit(0)
print("ready", flush=True)
sys.stdin.read()
os.wait()
"""


@pytest.fixture
def start(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * (SIZE // 256))
    with contextlib.ExitStack() as running:

        def started(program: str) -> int:
            process = subprocess.Popen(
                [sys.executable, "-c", program, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            running.callback(process.communicate)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            return process.pid

        yield started


def test_a_file_that_two_processes_map_counts_once(start):
    first, second = start(MAPS), start(MAPS)
    alone = peak_memory_bytes([first])
    assert alone > SIZE
    assert alone < peak_memory_bytes([first, second]) < alone + SIZE - MARGIN


def test_a_file_that_other_programs_map_too_still_counts(start):
    ours = [start(MAPS), start(MAPS)]
    before = peak_memory_bytes(ours)
    start(MAPS), start(MAPS)
    assert peak_memory_bytes(ours) == pytest.approx(before, abs=MARGIN)


def test_memory_from_before_a_fork_counts_once(start):
    parent = start(FORKS)
    assert SIZE < peak_memory_bytes([parent]) < 2 * SIZE - MARGIN


def test_processes_that_have_ended_have_no_memory(start):
    assert peak_memory_bytes([2**22 + 1]) == 0
