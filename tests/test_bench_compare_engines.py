"""The processes of the comparison: peers installed, drivers driven and ended, a whole run shown and written."""

import itertools
import json
import os
import signal
import sys
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
from compare_fakes import SMALL, RestlessComparison, command, variant
from rich.console import Console

from bench import machine
from bench.compare import __main__ as program
from bench.compare import report, variants
from bench.compare.drivers import lines
from bench.compare.drivers.lines import Request, play_in_steps
from bench.compare.engine import Command, Engine, EngineError
from bench.compare.install import InstallError, Peers, wheel_requirements
from bench.compare.recipes import RECIPES, Recipe
from bench.compare.rounds import Run
from bench.compare.variants import OURS, VARIANTS, Variant
from bench.control_plane import write_byte_tokenizer
from pagewire.bench import Record, metrics
from pagewire.processes import start_ticks

# A driver whose requests are tasks of a group.
DRIVER_OF_SEVERAL = """
import lines

class Several:
    version, pids, started_at = "7", [], None

    def __init__(self, model, options):
        pass

    def play(self, requests):
        raise ExceptionGroup("unhandled errors", [ExceptionGroup("within", [ValueError("out of luck")])])

    def close(self):
        pass

lines.serve(Several)
"""


# Installing


def test_the_requirements_of_a_wheel_are_read_from_it(tmp_path):
    wheel = tmp_path / "some-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        asked = ["numpy", "torch==1+cpu", "torchvision", 'six; python_version > "3"', 'ray; extra == "all"']
        lines = ["Metadata-Version: 2.1", *(f"Requires-Dist: {each}" for each in asked), "", "Requires-Nothing: text"]
        archive.writestr("some-1.dist-info/METADATA", "\n".join(lines))
    assert wheel_requirements(wheel, ["torch", "torchvision"]) == ["numpy", 'six; python_version > "3"']


@pytest.mark.slow
def test_an_installed_peer_stays_until_its_recipe_changes(tmp_path, monkeypatch):
    said = []
    peers = Peers(tmp_path, said.append)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "installed").write_text(repr(RECIPES["vllm"]))
    assert peers.python("vllm") == tmp_path / "vllm" / "bin" / "python"
    assert not said
    monkeypatch.setitem(RECIPES, "vllm", Recipe(("./no-such-folder",)))
    with pytest.raises(InstallError, match="no-such-folder"):
        peers.python("vllm")
    assert said == ["installing vllm, once: ./no-such-folder"]


# Processes


def test_figures_are_computed_from_the_times_that_drivers_note(tmp_path):
    rows = [Record([1, 2], 3, at=1.0), Record([1, 3], 5, at=3.0)]
    engine = Engine(command(tmp_path, ttft=0.5, tpot=0.25))
    try:
        engine.play(rows)
    finally:
        engine.close()
    figures = metrics(rows)
    # First tokens at 1.5 and 3.5, last ones at 2.0 and 4.5.
    assert figures["out_tok_s"] == round(8 / 3.5, 1)
    assert figures["ttft_mean_ms"] == 500
    assert figures["tpot_p50_ms"] == 250
    assert figures["decode_tok_s"] == 4


def test_the_first_answer_is_counted_from_the_start_that_the_driver_reports(tmp_path):
    engine = Engine(command(tmp_path, ttft=40.0))
    try:
        assert engine.version == "7"
        assert engine.first_answer_s is None
        engine.play([Record([1], 2)])
        first = engine.first_answer_s
        engine.play([Record([1], 2)])
        assert 40.0 < first == engine.first_answer_s < 100.0
    finally:
        engine.close()


def test_memory_is_that_of_the_processes_that_the_driver_names(tmp_path):
    engine = Engine(command(tmp_path, child=True))
    try:
        assert 100_000 < engine.peak_memory_bytes() < 10_000_000, "it is of `tail`, and not of the driver"
    finally:
        engine.close()


def test_the_memory_of_processes_that_are_gone_is_unknown(tmp_path):
    engine = Engine(command(tmp_path, child=True))
    try:
        (child,) = engine._pids
        os.kill(child, signal.SIGKILL)
        while start_ticks(child) is not None:
            pass
        assert engine.peak_memory_bytes() is None
    finally:
        engine.close()


def test_an_engine_that_waits_is_suspended_with_all_that_it_started(tmp_path):
    engine = Engine(command(tmp_path, child=True))
    pids = [*engine._pids, engine._process.pid]
    try:
        engine.pause()
        for pid in pids:  # a signal to another process takes effect when that runs next
            while "stopped" not in Path(f"/proc/{pid}/status").read_text():
                pass
        engine.resume()
        engine.play([Record([1], 2)])
        engine.pause()
    finally:
        engine.close()
    assert [start_ticks(pid) for pid in pids] == [None, None]


def test_nothing_of_an_engine_outlives_it(tmp_path):
    engine = Engine(command(tmp_path, child=True))
    pids = [*engine._pids, engine._process.pid]
    assert all(start_ticks(pid) is not None for pid in pids)
    engine.close()
    assert [start_ticks(pid) for pid in pids] == [None, None]


def test_an_interrupted_end_ends_all_engines_at_once(tmp_path, monkeypatch):
    engines = []

    def start(each: Variant) -> Engine:
        engines.append(Engine(command(tmp_path, child=True)))
        # As if Ctrl-C came while a driver is ending.
        monkeypatch.setattr(engines[-1], "_end", interrupt)
        return engines[-1]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    names = [variant("a"), variant("b")]
    playing = RestlessComparison(names, start, SMALL, ["w1"], num_rounds=1, num_probes=0, on_run=interrupt)
    with pytest.raises(KeyboardInterrupt):
        playing.run()
    pids = [pid for engine in engines for pid in (*engine._pids, engine._process.pid)]
    assert [start_ticks(pid) for pid in pids] == [None] * 4


def test_a_driver_that_dies_is_reported_with_the_end_of_its_log(tmp_path):
    with pytest.raises(EngineError, match=r"ended with status 3[\s\S]*a word of its own"):
        Engine(command(tmp_path, dies=True))


def test_a_run_that_fails_is_reported_with_its_reason(tmp_path):
    engine = Engine(command(tmp_path, fails_at=0))
    try:
        with pytest.raises(EngineError, match="out of luck"):
            engine.play([Record([1], 2)])
        engine.play([Record([1], 2)])
    finally:
        engine.close()


def test_an_error_in_a_task_group_is_reported_by_its_own_name(tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER_OF_SEVERAL)
    environment = os.environ | {"PYTHONPATH": str(Path(lines.__file__).parent)}
    engine = Engine(Command((sys.executable, str(driver), "model", "{}"), environment, tmp_path / "driver.log"))
    try:
        with pytest.raises(EngineError, match=r"^ValueError: out of luck$"):
            engine.play([Record([1], 2)])
    finally:
        engine.close()


def test_an_answer_of_another_length_is_an_error(tmp_path):
    engine = Engine(command(tmp_path, short=1))
    try:
        with pytest.raises(EngineError, match="gave 3 of 4 tokens"):
            engine.play([Record([1], 4)])
    finally:
        engine.close()


def test_a_silent_driver_is_given_up(tmp_path, monkeypatch):
    engine = Engine(command(tmp_path, sleeps_at=0, run_within_s=0.1))
    with pytest.raises(EngineError, match="no answer within"):
        engine.play([Record([1], 2)])
    engine.close()
    assert start_ticks(engine._process.pid) is None


def test_an_engine_that_is_stepped_gets_its_requests_as_they_arrive():
    requests = [Request([1], 2, at=0.02), Request([2], 3, at=0.0)]
    log, left = [], {}

    def submit(index, request):
        log.append(index)
        left[index] = request.max_tokens

    def step():
        tokens = [(index, [index]) for index in left]
        for index, _ in tokens:
            left[index] -= 1
            if not left[index]:
                del left[index]
        return tokens

    play_in_steps(requests, submit, step, lambda: bool(left))
    assert log == [1, 0]
    assert [request.tokens for request in requests] == [[0, 0], [1, 1, 1]]
    assert requests[0].times[0] >= 0.02
    assert all(before <= after for request in requests for before, after in itertools.pairwise(request.times))


def test_tokens_of_one_step_have_one_time():
    request = Request([1], 5, at=0.0)
    steps = iter([[4], [5, 6, 7], [8]])
    play_in_steps([request], lambda index, row: None, lambda: [(0, next(steps))], lambda: len(request.tokens) < 5)
    assert request.tokens == [4, 5, 6, 7, 8]
    assert [len(list(same)) for _, same in itertools.groupby(request.times)] == [1, 3, 1]


@pytest.mark.model
@pytest.mark.slow
def test_the_real_service_is_driven_and_ended(model_dir, tmp_path):
    ours = variants.prepare(VARIANTS[0], Path(model_dir), Peers(tmp_path / "peers", print), tmp_path)
    engine = Engine(ours)
    try:
        rows = [Record([1, 338, 260], 4), Record([1, 338], 3, at=0.05)]
        engine.play(rows)
        assert [len(row.output) for row in rows] == [4, 3]
        assert rows[1].times[0] > 0.05
        assert engine.first_answer_s > 0
        assert engine.peak_memory_bytes() > 200_000_000, "the weights are in it"
        pids = [*engine._pids, engine._process.pid]
    finally:
        engine.close()
    assert [start_ticks(pid) for pid in pids] == [None, None]


# The whole


def arguments(tmp_path: Path, engines: list[Variant], **changes) -> Namespace:
    told = {
        "model": str(write_byte_tokenizer(tmp_path / "model")),
        "variants": engines,
        "workloads": ["w1", "w4"],
        "rounds": 2,
        "probes": 1,
        "peers": tmp_path / "peers",
        "json": tmp_path / "found.json",
        "figure": None,
    }
    return Namespace(**(told | changes))


@pytest.fixture
def fake_drivers(tmp_path, monkeypatch):
    """Drivers of known speed in place of the real ones; "missing" cannot be installed."""

    def prepare(each: Variant, model: Path, peers: Peers, logs: Path) -> Command:
        if each.name == "missing":
            raise InstallError("no such wheel")
        return command(tmp_path, version=each.name, **each.options)

    monkeypatch.setattr(program, "prepare", prepare)
    monkeypatch.setattr(machine, "available_bytes", lambda: 1 << 40)
    monkeypatch.setattr(program, "Comparison", RestlessComparison)


FAKES = [
    variant(OURS, OURS, options={"ttft": 0.1, "tpot": 0.01}),
    variant("peer", options={"ttft": 0.2, "tpot": 0.02}),
    variant("failing", options={"fails_at": 3}),
    variant("missing"),
]


def test_all_results_are_shown_and_written(tmp_path, fake_drivers):
    console = Console(record=True, width=200)
    assert program.run(arguments(tmp_path, FAKES), console) == 0
    shown = console.export_text()
    lines = [line.split() for line in shown.splitlines()]
    assert ["W1", "one", "stream,", "tok/s", "100.0", "peer", "50.0", "2.00", "≥", "1.35", "x", "met"] in lines
    assert "left out: missing, not installed: no such wheel" in shown
    assert "left out: failing, round 1, w4 at 2.1/s: out of luck" in shown
    assert "answers that begin with Pagewire's first token: peer" in shown
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["left_out"].keys() == {"missing", "failing"}
    assert found["engines"]["peer"]["version"] == "peer"
    assert {row["name"]: row["ratio"]["median"] for row in found["rows"] if row["ratio"]}["W1 one stream"] == 2.0
    runs = [run for run in found["runs"] if run["engine"] == "peer"]
    assert [(run["round"], run["test"], run["rate"]) for run in runs] == [
        (number, test, rate)
        for number in range(2)
        for test, rate in (("w1", None), ("w4", 2.1), ("w4", 4.2), ("w4", 11.88))
    ]
    assert all(run["metrics"]["ttft_p99_ms"] == 200 for run in runs)


def test_a_peer_whose_folder_cannot_be_made_is_left_out(tmp_path):
    (tmp_path / "file").touch()
    peer = next(each for each in VARIANTS if each.name == "openvino")
    asked = arguments(tmp_path, [peer], peers=tmp_path / "file")
    assert program.run(asked, Console(record=True)) == 1
    assert "Not a directory" in json.loads((tmp_path / "found.json").read_text())["left_out"]["openvino"]


def test_no_engine_is_started_without_memory_and_a_comparison_without_runs_fails(tmp_path, fake_drivers, monkeypatch):
    monkeypatch.setattr(machine, "available_bytes", lambda: 1 << 30)
    assert program.run(arguments(tmp_path, FAKES[:2]), Console(record=True)) == 1
    reason = "only 1.1 GB of memory are free"
    assert json.loads((tmp_path / "found.json").read_text())["left_out"] == {OURS: reason, "peer": reason}


def test_an_unknown_model_is_named(tmp_path, monkeypatch):
    told = ["--json", str(tmp_path / "found.json"), "--workloads", "w1"]
    for model in ("no-such-model", str(tmp_path)):
        monkeypatch.setattr(sys, "argv", ["compare", "--model", model, *told])
        with pytest.raises(SystemExit, match=model):
            program.main()


def test_an_interrupted_run_writes_what_it_has(tmp_path, fake_drivers, monkeypatch):
    def line(run: Run) -> str:
        if run.test == "w4":
            raise KeyboardInterrupt
        return run.engine

    monkeypatch.setattr(report, "run_line", line)
    assert program.run(arguments(tmp_path, FAKES[:2]), Console(record=True)) == 130
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["interrupted"]
    assert [run["test"] for run in found["runs"]] == ["w1", "w1", "w4"]
