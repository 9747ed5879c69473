"""The GPU benchmarks as far as they need no GPU: options, rows and lines, failing cases, and that cases run."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton_device import DEVICE

from bench import gpu_cases, gpu_model
from bench.gpu import LeftOut, Row, line, parse, run_cases, wanted
from bench.gpu_cases import Case, Timed, Work, cases, ceilings
from bench.gpu_model import LLAMA_3_8B, Load, ModelCases
from kernels.choice import triton_kernels

ROOT = Path(__file__).parents[1]


class FakeTimer:
    """A device on which a case takes the time that it returns."""

    def __init__(self):
        self.cleaned = 0

    def device_us(self, run, *, recorded):
        return run()

    def host_us(self, run):
        return 7.0

    def clean_up(self):
        self.cleaned += 1


def case(name, *, group="decode", ceiling=None, **facts):
    return Case(group, name, lambda: Work(lambda: 100.0, **facts), ceiling)


def measure(found, ceilings_=None, is_time_up=lambda: False):
    timer, told = FakeTimer(), []
    rows = run_cases(found, timer, ceilings_ or {}, is_time_up, told.append)
    assert told == rows
    return rows, timer


def test_a_rate_is_bytes_or_operations_over_time_and_a_share_of_its_ceiling():
    moves = case("moves", bytes_moved=50_000_000, ceiling="copy", beside=lambda: 300.0)
    computes = case("computes", operations=10**10)
    (first, second), _ = measure([moves, computes], {"copy": 1000.0})
    assert first == Row("decode", "moves", 100.0, 7.0, 500.0, "GB/s", 0.5, 300.0)
    assert second == Row("decode", "computes", 100.0, 7.0, 100.0, "TFLOP/s")


def test_a_case_may_have_timed_itself():
    serves = Case("model service", "32 at once", lambda: Timed(2e6, tokens=4096))
    steps = Case("model decode", "batch 1", lambda: Timed(5000.0, 300.0, bytes_moved=10**10), "copy")
    rows, _ = measure([serves, steps], {"copy": 4000.0})
    assert rows[0] == Row("model service", "32 at once", 2e6, 0.0, 2048.0, "tokens/s")
    assert rows[1] == Row("model decode", "batch 1", 5000.0, 300.0, 2000.0, "GB/s", 0.5)


def test_a_case_that_fails_names_itself_and_the_others_are_measured():
    def fail():
        raise ValueError("no such kernel")

    rows, timer = measure([case("before", bytes_moved=1), Case("swap", "bad", fail), case("after", bytes_moved=1)])
    assert [row.error for row in rows] == ["", "ValueError: no such kernel", ""]
    assert timer.cleaned == 3
    assert "swap" in line(rows[1])
    assert "FAILED: ValueError: no such kernel" in line(rows[1])


def test_a_case_that_needs_a_larger_machine_is_no_failure():
    def refuse():
        raise LeftOut("needs 33 GiB, and 24 GiB are free")

    rows, _ = measure([Case("model", "all", refuse)])
    assert rows == [Row("model", "all", error="left out: needs 33 GiB, and 24 GiB are free")]
    assert "FAILED" not in line(rows[0])


def test_no_case_is_started_when_the_time_is_up():
    rows, timer = measure([case("one")], is_time_up=lambda: True)
    assert rows == [Row("decode", "one", error="left out: the time was up")]
    assert timer.cleaned == 0
    assert "FAILED" not in line(rows[0])
    assert line(rows[0]).count("left out") == 1


def test_a_line_shows_only_figures_that_exist():
    text = line(Row("decode", "batch 1 x 512", 12.34, 50.0, 1234.5, "GB/s", 0.85, 20.0))
    for part in ("batch 1 x 512", "12.3 us", "1234.5 GB/s", "85.0%", "host   50.0 us", "torch      20.0 us"):
        assert part in text
    assert "torch" not in line(Row("copy", "x", 1.0, 1.0, 1.0, "GB/s"))


def test_options_choose_groups_and_unknown_ones_fail():
    assert parse([]).seconds == 250
    assert [c.group for c in wanted([case("a"), case("b", group="swap in")], "swap,copy")] == ["swap in"]
    assert len(wanted([case("a"), case("b")], "")) == 2
    for bad in (["--second", "x"], ["--nonsense"], ["--seconds", "0"]):
        with pytest.raises(SystemExit):
            parse(bad)


def test_each_case_has_its_own_name_and_a_ceiling_that_is_measured():
    found = list(cases(8 << 30))
    names = [(c.group, c.name) for c in found]
    assert len(set(names)) == len(names)
    assert {c.ceiling for c in found} <= {c.name for c in ceilings()}
    assert ("decode", "batch 256 x 4096") in names
    assert ("decode", "batch 256 x 32768") not in names


def test_the_cases_run_when_they_are_small(monkeypatch):
    for name, value in {"CUDA": DEVICE, "DTYPE": torch.float32, "NUM_LAYERS": 2, "HIDDEN": 64, "MLP": 96}.items():
        monkeypatch.setattr(gpu_cases, name, value)
    for name, value in {"NUM_HEADS": 4, "NUM_KV_HEADS": 2, "HEAD_DIM": 16, "VOCABULARY": 300}.items():
        monkeypatch.setattr(gpu_cases, name, value)
    for work in (
        gpu_cases._decode([40, 40]),
        gpu_cases._decode([33, 2]),
        gpu_cases._prefill([(20, 20), (20, 20)]),
        gpu_cases._prefill([(9, 30), (1, 4)]),
        gpu_cases._reshape_and_cache(3),
        gpu_cases._rotate_and_cache(3),
        gpu_cases._copy_blocks(2),
        gpu_cases._add_rms_norm(3),
        gpu_cases._silu_and_mul(3),
        gpu_cases._sampling(2, filtered=False),
        gpu_cases._sampling(2, filtered=True),
    ):
        assert (work.bytes_moved > 0) != (work.operations > 0)
        found = work.run()
        if work.beside is not None and found.ndim == 3:
            assert work.beside().numel() == found.numel()


def again(run):
    """A recorder whose graphs run everything again."""
    run()
    return run


@pytest.mark.long
def test_the_cases_of_whole_models_run_when_they_are_small(monkeypatch):
    monkeypatch.setattr(gpu_model, "choose", lambda *_, **__: triton_kernels())
    config = replace(
        LLAMA_3_8B,
        vocabulary_size=50,
        hidden_size=16,
        mlp_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        windows=(None,),
    )
    load = Load(batches=(1, 3), context=33, prompt_tokens=20, output_tokens=3, steps=2, rounds=1, budget=16)
    models = ModelCases(DEVICE, config=config, dtype=torch.float32, load=load, record=again)
    rows, _ = measure(models.cases(), {"copy": 1e-3})
    assert [row.error for row in rows] == [""] * 8
    assert [row.name for row in rows if row.group == "model service"] == [
        "1 at once, 1 step in flight",
        "3 at once, 1 step in flight",
        "1 at once, 2 steps in flight",
        "3 at once, 2 steps in flight",
    ]
    for row in rows:
        assert row.time_us > 0
        assert (row.share is not None) == (row.unit == "GB/s") == (row.group == "model decode")


def test_a_model_needs_memory_for_its_weights_and_its_cache():
    # 8.03 billion values of 2 bytes, and 128 rows of 1024 tokens of 128 KiB.
    assert ModelCases(DEVICE).bytes_needed == pytest.approx(2 * 8.03e9 + 128 * 1024 * 2**17, rel=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_measures_nothing():
    run = subprocess.run(
        [sys.executable, "-m", "bench.gpu"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 2
    assert "no CUDA device" in run.stderr
