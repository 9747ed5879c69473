"""Settings from flags and environment, log lines, and the end of a process."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys

import pytest
from fakes import FakeWorker, start_worker

from protos.process import start_logging
from router.config import RouterSettings
from scheduler.config import SchedulerSettings


def test_flags_win_over_the_environment_and_the_environment_over_defaults(monkeypatch):
    monkeypatch.setenv("PAGEWIRE_SCHEDULER_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("PAGEWIRE_SCHEDULER_LEASE_S", "9")
    monkeypatch.setenv("PAGEWIRE_ROUTER_LISTEN", "elsewhere")
    settings = SchedulerSettings.parse("scheduler", ["--max-num-seqs", "8"])
    assert (settings.max_num_seqs, settings.lease_s, settings.max_num_batched_tokens) == (8, 9.0, 512)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-num-sequences", "8"], "unrecognized arguments: --max-num-sequences 8; did you mean --max-num-seqs?\n"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate; `python -m scheduler --help` lists all\n"),
        (["--max-num-seqs"], "--max-num-seqs: expected one argument; `python -m scheduler --help` lists all\n"),
        (["--max-num-seqs", "0"], "--max-num-seqs: Input should be greater than or equal to 1"),
        (["--max-num-seqs", "many"], "--max-num-seqs: Input should be a valid integer"),
        (["--metrics-listen", "9464"], "--metrics-listen: 9464 is no address here; write it like 127.0.0.1:9464"),
        (["--metrics-listen", "localhost:9464/metrics"], "--metrics-listen: localhost:9464/metrics is no address here"),
        (
            ["--otlp-endpoint", "host:1"],
            "--otlp-endpoint: host:1 is no address here; write it like http://127.0.0.1:43",
        ),
        (["--worker", ""], "--worker: String should have at least 1 character"),
        (["--log-name", "a b"], "--log-name: String should match pattern"),
        (
            ["--max-num-seqs", "600"],
            "error: options: max_num_seqs (600) must be at least 1 and at most max_num_batched_tokens (512)",
        ),
    ],
)
def test_a_wrong_option_ends_the_process_with_2_and_names_it(arguments, words, capsys):
    with pytest.raises(SystemExit) as info:
        SchedulerSettings.parse("scheduler", arguments)
    assert info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines(keepends=True)
    assert words in line


def test_all_wrong_options_are_named_at_once(capsys):
    with pytest.raises(SystemExit):
        SchedulerSettings.parse("scheduler", ["--max-num-seqs", "0", "--lease-s", "soon"])
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("python -m scheduler: error: --max-num-seqs: ")
    assert second.startswith("python -m scheduler: error: --lease-s: ")


@pytest.mark.parametrize("name", ["PAGEWIRE_ROUTER_LISTNE", "PAGEWIRE_MODEL"])
def test_an_unknown_variable_in_the_environment_is_refused(name, monkeypatch, capsys):
    monkeypatch.setenv(name, "x")
    with pytest.raises(SystemExit):
        RouterSettings.parse("router", ["--model", "m"])
    assert name in capsys.readouterr().err


def test_all_unknown_variables_are_named_at_once(monkeypatch, capsys):
    monkeypatch.setenv("PAGEWIRE_ROUTER_LISTNE", "x")
    monkeypatch.setenv("PAGEWIRE_MODEL", "x")
    with pytest.raises(SystemExit):
        RouterSettings.parse("router", ["--model", "m"])
    assert "unknown environment variable PAGEWIRE_MODEL, PAGEWIRE_ROUTER_LISTNE: " in capsys.readouterr().err


def test_variables_that_kubernetes_makes_of_a_service_are_refused_with_what_keeps_them_out(monkeypatch, capsys):
    monkeypatch.setenv("PAGEWIRE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("PAGEWIRE_PORT", "tcp://10.0.0.1:50051")
    with pytest.raises(SystemExit):
        RouterSettings.parse("router", ["--model", "m"])
    error = capsys.readouterr().err
    assert "PAGEWIRE_PORT, PAGEWIRE_SERVICE_HOST: Kubernetes makes it" in error
    assert "`enableServiceLinks: false`" in error


def test_help_says_how_a_service_is_started_and_what_it_does(capsys):
    with pytest.raises(SystemExit) as info:
        SchedulerSettings.parse("scheduler", ["--help"])
    assert info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: python -m scheduler ")
    assert "Pagewire scheduler: batches sequences" in text


def test_variables_of_the_other_programs_are_left_to_them(monkeypatch):
    for name in ("PAGEWIRE_SCHEDULER_LISTEN", "PAGEWIRE_WORKER_MODEL", "PAGEWIRE_CLIENT_TOKEN"):
        monkeypatch.setenv(name, "theirs")
    assert RouterSettings.parse("router", ["--model", "mine"]).model == "mine"


def test_log_lines_carry_their_facts_as_text_or_json(capsys):
    for form in ("text", "json"):
        start_logging("router", RouterSettings(model="m", log_format=form))
        logging.getLogger("x").info("request", extra={"request_id": "r1", "why": "two words"})
    text, line = capsys.readouterr().err.strip().splitlines()
    assert 'router    request request_id=r1 why="two words"' in text
    assert json.loads(line)["request_id"] == "r1"
    assert json.loads(line)["service"] == "router"
    logging.getLogger().handlers.clear()


def test_one_of_several_routers_signs_its_log_lines_with_its_own_name(capsys):
    for form in ("text", "json"):
        start_logging("router", RouterSettings(model="m", log_format=form, log_name="router-2"))
        logging.getLogger("x").info("request")
    text, line = capsys.readouterr().err.strip().splitlines()
    logging.getLogger().handlers.clear()
    assert text.endswith("INFO  router-2  request")
    assert json.loads(line)["service"] == "router-2"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_record_is_one_line_and_can_forge_no_other(form, capsys):
    evil = 'r1\n12:00:00.000 INFO  router     request\r\x1b[2J\u2028" outcome=OK'
    start_logging("router", RouterSettings(model="m", log_format=form))
    logging.getLogger("x").info("request", extra={"request_id": evil, "tenant": evil})
    logging.getLogger("x").warning(evil)
    try:
        raise ValueError(evil)
    except ValueError:
        logging.getLogger("x").exception("bug")
    logging.getLogger().handlers.clear()
    written = capsys.readouterr().err
    assert not set(written) & set("\r\x1b\u2028")
    events = [line for line in written.splitlines() if not line.startswith("    ")]
    assert len(events) == 3
    assert not [line for line in events if line.startswith("12:00:00.000")]
    if form == "json":
        assert json.loads(events[0])["request_id"] == evil
    else:
        assert f"request_id={json.dumps(evil)}" in events[0]


async def test_a_scheduler_whose_steps_are_larger_than_its_worker_has_room_for_ends_with_one_line(tmp_path):
    sockets = [f"unix:{tmp_path}/{name}" for name in ("worker", "scheduler")]
    server = await start_worker(FakeWorker(), sockets[0])
    command = [sys.executable, "-m", "scheduler", "--worker", sockets[0], "--listen", sockets[1]]
    process = await asyncio.create_subprocess_exec(
        *command, "--max-num-batched-tokens=8192", stderr=asyncio.subprocess.PIPE
    )
    _, written = await process.communicate()
    await server.stop(0)
    assert process.returncode == 1
    assert "8192 is more than the 4096 that the worker has room for: lower it, or raise" in written.decode()
    assert "Traceback" not in written.decode()


LOOP = """
import asyncio, sys
from protos.process import run
async def main(stop):
    print("up", flush=True)
    await stop.wait()
    print("draining", flush=True)
    if len(sys.argv) > 1:
        await asyncio.to_thread(sys.stdin.read)
run(main)
"""


def start(*arguments: str) -> subprocess.Popen:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", LOOP, *arguments], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_process_drain_and_exit_with_0(number):
    process = start()
    os.kill(process.pid, number)
    assert process.wait(10) == 0
    assert process.stdout.read() == "draining\n"


def test_ctrl_c_ends_a_draining_process_at_once():
    process = start("until told")
    os.kill(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == "draining\n"
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(10) == 1


def test_a_second_sigterm_does_not_interrupt_the_drain():
    process = start("until told")
    os.kill(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == "draining\n"
    os.kill(process.pid, signal.SIGTERM)
    process.stdin.close()
    assert process.wait(10) == 0


@pytest.mark.parametrize("error", ["CannotListen", "CannotServe", "CannotTrace"])
def test_what_keeps_a_service_from_serving_is_one_line_and_status_1(error):
    code = f"""
from protos.errors import {error}
from protos.process import run
async def main(stop):
    raise {error}("why")
run(main)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "why\n")


def test_a_service_has_grpcs_thread_for_as_long_as_it_runs_and_a_calm_collector():
    code = """
import gc, threading
from protos.process import run
async def main(stop):
    from grpc import aio
    async with aio.insecure_channel("unix:/nowhere"):
        pass
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(info))
    live = [[] for _ in range(40_000)]
    print(threading.active_count() > 1, gc.get_freeze_count() > 10_000, len(collections))
run(main)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "True True 0\n"


IMPORTS = """
import gc, os, runpy, sys
os._exit = sys.exit
looked_at = []
gc.callbacks.append(lambda phase, info: looked_at.append(len(gc.get_objects())))
sys.argv = ["worker", "--model", "/no/such/model", "--listen", "127.0.0.1:0", "--log-level", "error"]
try:
    runpy.run_module("worker", run_name="__main__")
finally:
    print("frozen", gc.get_freeze_count(), "looked at", max(looked_at, default=0), file=sys.stderr)
"""


def test_a_starting_worker_never_collects_garbage_among_its_imports():
    pytest.importorskip("torch")
    ended = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60, check=False)
    told = next(line for line in ended.stderr.splitlines() if line.startswith("frozen"))
    _, frozen, _, _, looked_at = told.split()
    assert int(frozen) > 100_000
    assert int(looked_at) < 50_000


def test_a_worker_refuses_wrong_options_before_it_imports_torch():
    code = "import sys, worker.__main__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("module", ["router.__main__", "scheduler.__main__", "worker.__main__", "worker.process"])
def test_a_service_has_chosen_its_pollers_when_grpc_is_imported(module):
    code = f"""
import os, sys

class Witness:
    def find_spec(self, name, *_):
        if name == "grpc":
            print(os.environ.get("GRPC_EXPERIMENTS"))

sys.meta_path.insert(0, Witness())
import {module}
"""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    run = [sys.executable, "-c", code]
    assert "-event_engine_client" in subprocess.run(run, env=environment, capture_output=True, text=True).stdout
    environment["GRPC_EXPERIMENTS"] = "mine"
    assert subprocess.run(run, env=environment, capture_output=True, text=True).stdout.split() == ["mine"]
