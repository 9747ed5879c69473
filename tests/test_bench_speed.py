"""The speed bench: its cores are loaded as they should be, its worker says its text, its processes start and end."""

import asyncio
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from bench.control_plane import TEXT, Setting, _Plane, measure, write_byte_tokenizer
from bench.core_speed import Case, Driver, Summary
from bench.instant_worker import InstantWorker, serve
from bench.load import Counts, gap_s
from bench.scheduler_speed import core_cases, core_table, run_core
from protos.columns import pack, unpack
from protos.worker_pb2 import ExecuteModelRequest, GetInfoResponse


def test_a_decode_step_is_one_token_a_sequence_and_admits_no_other():
    for case in core_cases((4,)):
        if not case.mixed:
            driver = Driver(case)
            driver.warm_up()
            timings = driver.run(num_steps=5, seconds=10)
            assert timings.num_tokens == 5 * 4 // case.num_concurrent_steps, case
            assert driver.core.num_waiting == case.num_waiting
            assert len(timings.core) == len(timings.request) == len(timings.result) == 5


def test_mixed_steps_hold_prompts_too():
    driver = Driver(Case(num_running=8, mixed=True))
    driver.warm_up()
    timings = driver.run(num_steps=200, seconds=10)
    assert timings.num_tokens > 200 * 8
    assert driver.core.num_running == 8
    assert driver.core.num_waiting
    assert timings.submit


def test_a_run_ends_when_its_time_is_up():
    driver = Driver(Case(num_running=2))
    driver.warm_up()
    assert len(driver.run(num_steps=1 << 30, seconds=0.0).core) == 1


def test_a_summary_is_of_all_values():
    assert Summary.of([float(n) for n in range(100)]) == Summary(mean=49.5, p50=50.0, p99=98.0)
    assert Summary.of([]) == Summary(0.0, 0.0, 0.0)


def test_the_tables_show_every_case():
    console = Console(record=True, width=200)
    rows = run_core([Case(2), Case(2, context=40)], 0.01, console)
    assert rows[0].ratio == 1.0
    console.print(core_table(rows))
    assert "2 running, context 40" in console.export_text()


def test_the_instant_worker_says_its_text_by_position():
    worker = InstantWorker([10, 11, 12], GetInfoResponse())
    request = ExecuteModelRequest(
        step_id=7,
        num_computed_tokens=pack([0, 4]),
        num_new_tokens=pack([3, 1]),
        sample_rows=pack([0, 1]),
    )
    response = worker.answer(request)
    assert response.step_id == 7
    assert unpack(response.token_ids).tolist() == [10, 12]
    assert len(response.logprobs) == 8


def test_gaps_are_counted_to_within_a_twentieth():
    counts = Counts()
    for seconds in (0.0, 1e-4, 0.0123, 1.5, 1e9):
        counts.add_gap(seconds)
    buckets = [bucket for bucket, count in enumerate(counts.gaps) if count]
    assert sum(counts.gaps) == 5
    assert [gap_s(bucket) for bucket in buckets[1:4]] == pytest.approx([1e-4, 0.0123, 1.5], rel=0.05)


async def test_the_real_processes_are_measured_and_ended(tmp_path):
    assert len(TEXT.encode()) > len(TEXT)  # some character has several bytes
    setting = Setting(
        "session", write_byte_tokenizer(tmp_path), num_streams=8, num_output_tokens=64, warmup_s=0, window_s=0.3
    )
    before = child_pids()
    session, generate = await asyncio.gather(measure(setting), measure(replace(setting, door="generate")))
    assert child_pids() <= before
    assert session.cpu.keys() == {"worker", "scheduler", "clients"}
    assert generate.cpu.keys() == {"worker", "scheduler", "clients", "router"}
    assert session.gap_ms == {}
    assert 0 < generate.gap_ms["p50"] <= generate.gap_ms["p99"]
    for measured in (session, generate):
        assert measured.tokens_s > 0
        assert measured.messages_s > 0
        assert 0 < measured.tokens_per_step < 16


async def test_a_look_ignores_what_clients_reported_before_it():
    plane, stdout = _Plane(""), asyncio.StreamReader()
    plane.clients["client 0"] = SimpleNamespace(stdout=stdout)
    now = time.monotonic()
    for moment in (now - 2, now - 1, now + 3600):
        stdout.feed_data(json.dumps({"time": moment}).encode() + b"\n")
    await plane.next_lines()
    assert plane.lines["client 0"]["time"] == now + 3600


async def test_a_load_process_that_is_refused_says_why(tmp_path):
    stop, target = asyncio.Event(), f"unix:{tmp_path}/worker"
    # A worker does not generate text.
    serving = asyncio.create_task(serve(target, InstantWorker([1], GetInfoResponse()), stop))
    options = ["--target", target, "--streams", "1", "--vocabulary-size", "256"]
    load = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.load", "generate", *options),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await load.communicate()
    stop.set()
    await serving
    assert load.returncode == 1
    assert f"{target}: UNIMPLEMENTED" in errors.decode()


def child_pids() -> set[int]:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in children.split()}
