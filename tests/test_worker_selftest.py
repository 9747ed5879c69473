"""What `python -m worker --selftest` prints and ends with; and that no broken operation gets past its checks."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from models_fakes import save, tiny_model
from worker_fakes import tiny_checkpoint

from kernels.choice import torch_reference
from worker import selftest
from worker.cache_engine import CacheShape
from worker.checkpoint import read_config
from worker.config import WorkerSettings
from worker.models.registry import load_model
from worker.parity import Setting, Switch, all_operations, check_model, check_operations, checked_operations

CPU = torch.device("cpu")
SETTING = Setting(CPU, torch.float32, torch.float32, block_size=4)


def run(*arguments):
    command = [sys.executable, "-m", "worker", "--selftest", "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env={"PATH": ""})


def test_the_process_tells_machine_versions_kernels_and_speeds_and_ends_with_0():
    ended = run("--num-threads", 1)
    assert (ended.returncode, ended.stderr) == (0, "")
    for word in ("CPU ", "memory ", "torch ", "operations ", "memory read", "memory copy", "GB/s", "TFLOP/s"):
        assert f"  {word}" in ended.stdout or f" {word}" in ended.stdout, word
    assert "FAIL" not in ended.stdout
    num_checks = sum(line.startswith("  ok ") for line in ended.stdout.splitlines())
    assert ended.stdout.endswith(f"\n{num_checks} checks passed\n")
    assert num_checks > 10


@pytest.mark.parametrize(
    "dtype, cache_dtype",
    [("auto", "auto"), pytest.param("bfloat16", "float16", marks=pytest.mark.long), ("float16", "float32")],
)
def test_with_a_model_the_process_runs_it_in_the_dtypes_of_the_worker(tmp_path, dtype, cache_dtype):
    ended = run("--model", tiny_checkpoint(tmp_path), "--dtype", dtype, "--kv-cache-dtype", cache_dtype)
    assert (ended.returncode, ended.stderr) == (0, "")
    expected = ("float32", "float32") if dtype == "auto" else (dtype, cache_dtype)
    assert "kernels for {} with a cache in {}".format(*expected) in ended.stdout
    assert "class                LlamaForCausalLM on" in ended.stdout
    assert "ok    forward in two chunks and a decode" in ended.stdout


def test_a_model_that_transformers_runs_is_checked_too(tmp_path, capsys):
    import transformers

    numbers = {"vocab_size": 97, "hidden_size": 36, "intermediate_size": 44, "num_hidden_layers": 2, "head_dim": 12}
    config = transformers.Gemma2Config(**numbers, num_attention_heads=3, num_key_value_heads=1)
    directory = save(tiny_model(config), tmp_path)
    settings = WorkerSettings(selftest=True, model=str(directory), device="cpu")
    assert selftest.run_selftest(settings) == 0
    assert "ok    forward in two chunks and a decode" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--model", "/no/where"], "FAIL  model                                    there is no directory /no/where"),
        (["--device", "cuda"], "FAIL  device                                   --device is cuda, but torch sees no"),
    ],
)
def test_what_can_not_be_checked_has_failed(arguments, complaint):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    ended = run(*arguments)
    assert ended.returncode == 1
    assert complaint in ended.stdout
    assert ended.stdout.endswith("1 FAILED\n")
    assert "Traceback" not in ended.stderr


def test_without_selftest_a_model_is_required(capsys):
    with pytest.raises(SystemExit):
        WorkerSettings.parse("worker", ["--no-selftest"])
    assert "--model: Field required" in capsys.readouterr().err


def test_every_operation_has_a_check():
    assert checked_operations() == all_operations()


def names_of_failures(operations, setting=SETTING):
    return {check.name.split(",")[0] for check in check_operations(operations, setting) if not check.passed}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_twins_pass_against_themselves(dtype, cache_dtype, block_size):
    assert not names_of_failures(torch_reference(), Setting(CPU, dtype, cache_dtype, block_size))


def wrong(name):
    """The reference with one operation that does nothing, or gives values that are off by a tenth."""
    right = getattr(torch_reference(), name)
    if name in ("reshape_and_cache", "copy_blocks", "swap_blocks"):
        return replace(torch_reference(), **{name: lambda *arguments: None})

    def operation(*arguments):
        result = right(*arguments)
        return result * 1.1 if result.is_floating_point() else (result + 1) % 211

    return replace(torch_reference(), **{name: operation})


@pytest.mark.parametrize("name", sorted(all_operations()))
def test_an_operation_that_gives_wrong_values_has_failed(name):
    assert name in names_of_failures(wrong(name))


def test_rotation_that_writes_nothing_to_the_cache_has_failed():
    def rotate(heads, cos, sin, k_cache, v_cache, slots):
        return torch_reference().rotate_and_cache(heads, cos, sin, k_cache.clone(), v_cache.clone(), slots)

    assert names_of_failures(replace(torch_reference(), rotate_and_cache=rotate)) == {"rotate_and_cache"}


def test_an_operation_that_dies_or_gives_nan_or_another_shape_has_failed():
    def die(*arguments):
        raise RuntimeError("illegal instruction")

    broken = replace(
        torch_reference(),
        rms_norm=die,
        add_rms_norm=lambda *arguments: torch_reference().add_rms_norm(*arguments) * torch.nan,
        gelu=lambda x, approximate: x[:1],
    )
    outcomes = {c.name.split(",")[0]: c.outcome for c in check_operations(broken, SETTING) if not c.passed}
    assert outcomes.keys() == {"rms_norm", "add_rms_norm", "gelu"}
    assert outcomes["rms_norm"] == "RuntimeError: illegal instruction"
    assert "off by nan" in outcomes["add_rms_norm"]
    assert outcomes["gelu"] == "gives [1, 33] for [5, 33]"


@pytest.mark.parametrize("name", ["rotate_and_cache", "paged_attention", "add_rms_norm"])
def test_a_model_on_a_wrong_operation_has_failed_and_on_the_right_ones_not(tmp_path, name):
    directory = tiny_checkpoint(tmp_path)
    shape = CacheShape(2, 16, 2, 8, torch.float32)
    for operations, passes in ((torch_reference(), True), (wrong(name), False)):
        switch = Switch(operations)
        model = load_model(directory, read_config(directory), torch.float32, CPU, wrap=lambda _, s=switch: s.operations)
        assert check_model(model, switch, shape, CPU, torch.float32).passed == passes
        assert switch.current is operations


def test_a_failure_is_a_line_and_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "choose", lambda *arguments, **sizes: wrong("rms_norm"))
    assert selftest.run_selftest(WorkerSettings(selftest=True, device="cpu", dtype="float32")) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "FAIL  rms_norm, 3 x 72" in line and "off by 1.0e-01" in line]
    assert lines[-1].endswith("1 FAILED")
