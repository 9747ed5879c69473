"""Which operations a model on a GPU gets, and that all implementations have the same signature."""

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import triton_device  # noqa: F401 - before anything imports kernels

from kernels import build, choice, reference
from kernels.cpu import CpuKernels

CUDA = torch.device("cuda")
OPERATIONS = [field.name for field in fields(choice.Operations) if hasattr(reference, field.name)]
IMPLEMENTATIONS = {
    "triton": choice.triton_kernels,
    "cpp": lambda: choice.cpp(CpuKernels()),
    "reference": choice.torch_reference,
}


@pytest.fixture
def _new_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def choose(dtype=torch.bfloat16, head_dim=128, block_size=16, cache_dtype=None):
    return choice.choose(CUDA, dtype, head_dim=head_dim, block_size=block_size, cache_dtype=cache_dtype)


@pytest.mark.usefixtures("_new_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_computes_with_triton(dtype):
    chosen = choose(dtype)
    assert chosen.name.startswith("cuda: Triton 3.")
    assert chosen.note == ""
    assert chosen == choice.triton_kernels()


@pytest.mark.usefixtures("_new_gpu")
@pytest.mark.parametrize(
    "sizes, note",
    [
        ({"head_dim": 320}, "heads of up to 256 values, not 320"),
        ({"block_size": 24}, "blocks of a power of two of tokens, not 24"),
        ({"dtype": torch.float64}, "no kernels for torch.float64"),
        ({"cache_dtype": torch.float8_e5m2}, "no kernels for torch.float8_e5m2"),
    ],
)
def test_a_model_that_triton_cannot_compute_gets_the_twins_and_a_note_that_says_why(sizes, note):
    chosen = choose(**sizes)
    assert chosen.name == "reference"
    assert note in chosen.note


def test_an_old_gpu_gets_the_twins(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert str(choose()) == "reference, since Triton needs compute capability 8.0, and this GPU has 7.5"


def test_the_oldest_gpu_and_the_largest_heads_that_triton_takes_are_computed_with_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    chosen = choose(head_dim=256)
    assert str(chosen) == chosen.name == choice.triton_kernels().name


@pytest.mark.usefixtures("_new_gpu")
def test_without_triton_a_gpu_gets_the_twins(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    chosen = choose()
    assert chosen.name == "reference"
    assert "Triton is missing" in chosen.note


def test_other_devices_get_the_twins():
    assert choice.choose(torch.device("meta"), torch.float32, head_dim=64, block_size=16).name == "reference"


def test_a_worker_on_a_cpu_does_not_import_triton():
    code = (
        "import sys, torch; from kernels.choice import choose; import worker.model_runner; "
        "choose(torch.device('cpu'), torch.float32, head_dim=64, block_size=16); "
        "assert not any(name.split('.')[0] == 'triton' for name in sys.modules), 'triton was imported'"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_operation_has_the_parameters_of_its_twin(implementation, name):
    if implementation == "cpp" and not build.LIBRARY.exists():
        pytest.skip("the C++ kernels are not built: no compiler when this was installed")
    operation = getattr(IMPLEMENTATIONS[implementation](), name)
    if operation is None:
        pytest.skip("there are no kernels for it")
    ours = inspect.signature(operation).parameters
    twins = inspect.signature(getattr(reference, name)).parameters
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in twins.values()]


def test_every_operation_has_a_twin():
    # The twin of `decoder` is the model, which calls the other operations.
    told = {"name", "note", "reads_behind_context", "recordable", "decoder", "bytes_per_weight"}
    assert {field.name for field in fields(choice.Operations)} - told == set(OPERATIONS)
