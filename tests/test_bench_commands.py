"""The commands of bench/: what they refuse before they measure, and what they show of what was measured."""

import importlib
import json
import subprocess
import sys
from array import array
from contextlib import closing
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest
from rich.console import Console
from terminals import CTRL_C, Terminal

from bench import executors, machine
from bench.chaos import report
from bench.chaos.faults import Fault
from bench.chaos.load import Load, Reading
from bench.chaos.report import Outcome, rows_of
from bench.chaos.requests import Asked
from bench.core_speed import Summary
from bench.executors import Measured
from pagewire.processes import start_ticks, with_descendants

COMMANDS = ("compare.__main__", "chaos.__main__", "kv_memory", "scheduler_speed", "executors")


@pytest.fixture
def call(monkeypatch):
    """Runs a command; gives its exit status."""

    def called(name: str, *arguments: str) -> object:
        module = importlib.import_module(f"bench.{name}")
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            module.main()
        return ended.value.code

    return called


def test_a_comparison_that_could_not_draw_w4_is_refused_and_others_are_not(call, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    told = ("--json", str(tmp_path / "found.json"), "--model", "no-such-model")
    assert call("compare.__main__", *told) == 2
    assert "--figure: drawing needs matplotlib" in capsys.readouterr().err
    assert "no-such-model" in str(call("compare.__main__", *told, "--workloads", "w1,w2,w3"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(name, call, tmp_path, capsys):
    assert call(name, "--json", str(tmp_path)) == 2
    assert f"{tmp_path} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, arguments, told",
    [
        ("compare.__main__", ("--rounds", "0"), "at least 1"),
        ("compare.__main__", ("--probes", "-1"), "at least 0"),
        ("compare.__main__", ("--engines", "transformers-lookup", "--workloads", "w2"), "none of these engines"),
        ("compare.workload", (), "required: model, out"),
        ("compare.workload", ("no-such-folder", "{folder}/out.json"), "no-such-folder is no checkpoint's folder"),
        ("chaos.__main__", ("--faults", "0"), "at least 1"),
        ("chaos.__main__", ("--clients", "0"), "at least 1"),
        ("kv_memory", ("--scale", "0"), "greater than 0"),
        ("kv_memory", ("--scale", "nan"), "greater than 0"),
        ("kv_memory", ("--figure", "{folder}/out.jpg"), "neither an SVG nor a PNG"),
        ("scheduler_speed", ("--seconds", "0"), "greater than 0"),
        ("executors", ("--executors", "uni,unix"), "no executor unix"),
    ],
)
def test_arguments_that_measure_nothing_are_refused(name, arguments, told, call, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(name, *(argument.format(folder=tmp_path) for argument in arguments)) == 2
    assert told in capsys.readouterr().err


def test_the_folder_of_a_file_to_write_is_made(tmp_path):
    path = tmp_path / "new" / "found.json"
    assert machine.output_file(str(path)) == path
    machine.write(path, {"figure": 1 / 3})
    assert json.loads(path.read_text()) == {"figure": 0.33333}
    assert machine.output_file(str(path)) == path, "it is replaced"


def test_a_picture_is_refused_where_nothing_can_draw_it(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(machine.ArgumentTypeError, match="matplotlib"):
        machine.picture_file(str(tmp_path / "found.svg"))


def test_a_file_gets_all_figures(tmp_path):
    command = [sys.executable, "-m", "bench.kv_memory", "--scale", "0.001"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "ShareGPT-like  Pagewire       16, no prefix cache" in shown
    assert "…" not in shown


def test_an_executor_that_fails_leaves_the_figures_of_the_others(call, tmp_path, monkeypatch, capsys):
    def run(executor: str, num_ranks: int, model: Path) -> list[Measured]:
        if executor == "ray":
            raise subprocess.CalledProcessError(3, [])
        return [Measured(executor, num_ranks, 1, Summary(1.0, 1.0, 1.0))]

    monkeypatch.setattr(executors, "run", run)
    out = tmp_path / "found.json"
    assert call("executors", "--executors", "uni,ray,mp", "--json", str(out)) == "\n".join(
        f"ray, ranks: {num_ranks}, ended with status 3" for num_ranks in (1, 2)
    )
    assert [(row["executor"], row["num_ranks"]) for row in json.loads(out.read_text())["steps"]] == [
        ("uni", 1),
        ("mp", 1),
        ("mp", 2),
    ]
    assert "1.000" in capsys.readouterr().out


def test_ctrl_c_ends_a_measurement_of_the_core_without_a_word():
    with closing(Terminal([sys.executable, "-m", "bench.scheduler_speed", "--only", "core"])) as terminal:
        terminal.wait_for(lambda: b"core:" in terminal.written)
        terminal.press(CTRL_C)
        assert terminal.wait() == 130
        assert b"Traceback" not in terminal.written
        assert terminal.is_as_before


@pytest.mark.slow
def test_ctrl_c_ends_a_measurement_of_executors_without_a_word_and_with_all_its_processes():
    with closing(Terminal([sys.executable, "-m", "bench.executors", "--executors", "external"])) as terminal:

        def processes() -> list[int]:
            return with_descendants([terminal.process.pid])

        terminal.wait_for(lambda: len(processes()) >= 3)  # this one, torchrun, and what that has started
        before = processes()
        terminal.press(CTRL_C)
        assert terminal.wait() == 130
        assert b"Traceback" not in terminal.written
        assert {start_ticks(pid) for pid in before} == {None}


def test_the_ranks_of_an_executor_are_ended_after_its_steps(monkeypatch):
    class Executor:
        closed = False

        def load(self, on_loss) -> None:
            pass

        def close(self) -> None:
            self.closed = True

    made = Executor()
    monkeypatch.setattr(executors, "start_logging", lambda *_: None)
    monkeypatch.setattr(executors, "make_executor", lambda settings: made)
    monkeypatch.setattr(executors, "measure", lambda runs, num_rows: Summary(1.0, 1.0, 1.0))
    assert len(executors.measure_here("mp", 2, "model")) == len(executors.ROWS)
    assert made.closed


def test_faults_that_no_stream_saw_have_no_pause():
    reading = Reading(Asked("greedy", "", {}), started=10.0, times=array("d", [10.5, 10.9, 12.0]), ended=12.0)
    load = Load("", (), 1, readings=[reading])
    rows = rows_of([Fault(11.0, "worker", SIGKILL), Fault(20.0, "router-2", SIGTERM)], load)
    assert [(row.service, row.num_streams, row.pause_p50_s) for row in rows] == [
        ("worker", 1, pytest.approx(1.1)),
        ("router", 0, None),
    ]
    console = Console(record=True, width=100)
    console.print(report.table(Outcome(1, rows, 2, 0, 0, 0, 0, 1.0, [])))
    (line,) = (line for line in console.export_text().splitlines() if "router" in line and "SIGTERM" in line)
    assert line.replace("│", " ").split() == ["router", "SIGTERM", "1", "0", "-", "-"]
