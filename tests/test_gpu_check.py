"""The one command for a GPU, as far as it can be tested without one: what it runs, ends, and counts as failures."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu_check import files_of_gpu_tests, parse, run
from pagewire.processes import start_ticks

ROOT = Path(__file__).parents[1]


def run_python(code, limit_s=30):
    return run("part", [sys.executable, "-c", code], limit_s)


def test_a_part_that_succeeds_is_shown_and_has_no_failures(capsys):
    assert run_python("print('12.5 us')").failures == []
    assert "12.5 us" in capsys.readouterr().out


def test_a_failure_is_named_by_its_own_line_or_by_the_exit_status():
    told = run_python("print('FAILED tests/x.py::test_y - boom\\nFAILED decode batch 1: ValueError'); exit(1)")
    assert told.failures == ["FAILED tests/x.py::test_y - boom", "FAILED decode batch 1: ValueError"]
    assert run_python("exit(3)").failures == ["ended with status 3"]


@pytest.mark.long
def test_a_part_that_hangs_is_ended_with_all_that_it_started(capsys):
    code = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("begun", flush=True)
time.sleep(600)
"""
    outcome = run_python(code, limit_s=8)
    assert outcome.failures == ["ended after 8 s"]
    assert outcome.took_s < 60
    assert "begun" in capsys.readouterr().out


def test_an_interruption_ends_the_part_that_runs():
    code = """
import sys
from bench.gpu_check import run
run("part", [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"], 600)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as checking:
        assert checking.stdout is not None
        checking.stdout.readline()
        part = int(checking.stdout.readline())
        checking.send_signal(signal.SIGINT)
        assert checking.wait(timeout=30) != 0
    assert start_ticks(part) is None


def test_the_tests_of_kernels_and_of_the_worker_on_a_gpu_are_among_what_it_runs():
    files = files_of_gpu_tests()
    for name in ("triton_attention", "triton_cache", "decode_graphs", "worker_gpu", "worker_swap", "worker_cache"):
        assert f"tests/test_{name}.py" in files
    assert "tests/test_scheduler.py" not in files


def test_those_tests_are_collected_without_most_of_our_dependencies():
    """An import finder that refuses them stands for a machine with a GPU and little else."""
    missing = {"pydantic", "pydantic_settings", "pytest_asyncio", "platformdirs", "gguf", "grpc_health", "grpc_status"}
    code = f"""
import importlib.abc, sys
class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Bare())
import pytest
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:asyncio", "-p", "no:cacheprovider", *{files_of_gpu_tests()!r}]))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]


def test_a_time_limit_without_room_for_a_case_is_refused():
    assert parse([]).seconds < 8 * 60
    with pytest.raises(SystemExit):
        parse(["--seconds", "100"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_runs_nothing():
    command = [sys.executable, "-m", "bench.gpu_check"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "no CUDA device" in ended.stderr
