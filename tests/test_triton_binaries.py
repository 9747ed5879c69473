"""The binaries for a GPU: they compile, spill nothing, and fit beside each other on a multiprocessor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton_device  # noqa: F401 - before anything imports kernels
from triton_binaries import cases

# Shared memory that one program of a multiprocessor may have, and the multiprocessor's registers.
MOST_SHARED = {80: 163 * 1024, 90: 227 * 1024}
REGISTERS = 65536
CASES = cases()


@pytest.fixture(scope="module")
def binaries():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("triton_binaries.py"))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.timeout(300)  # the first one compiles them all
@pytest.mark.parametrize("name", CASES)
def test_a_binary_spills_nothing_and_fits(binaries, name):
    found, capability = binaries[name], CASES[name].capability
    assert found["stack"] == 0, found
    assert found["registers"] * found["threads"] <= REGISTERS, found
    assert found["shared"] <= MOST_SHARED[capability], found


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("short rows")])
def test_two_decode_programs_share_a_multiprocessor_and_load_ahead(binaries, name):
    found, capability = binaries[name], CASES[name].capability
    assert 2 * found["registers"] * found["threads"] <= REGISTERS, found
    assert 2 * found["shared"] <= MOST_SHARED[capability], found
    assert found["async_copies"] > 0, "loads of K and V do not run ahead of the products"


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("long rows")])
def test_prefill_uses_the_tensor_cores_of_each_architecture(binaries, name):
    found, capability = binaries[name], CASES[name].capability
    assert found["async_copies"] > 0, "loads of K and V do not run ahead of the products"
    if "cache" in name:  # of another dtype
        assert found["wgmma"] + found["mma"] > 0, found
    elif "fp32" not in name:
        assert found["wgmma" if capability == 90 else "mma"] > 0, found


@pytest.mark.parametrize(
    "name", ["reshape_and_cache", "rms_norm", "copy_pieces", "activation", "parts", "draws", "bounds"]
)
def test_kernels_bound_by_memory_load_sixteen_bytes_at_once(binaries, name):
    found = binaries[f"{name}_kernel sm_90"]
    assert found["wide_loads"] > 0, found
