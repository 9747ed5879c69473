"""A client in Node by @grpc/grpc-js, from the .proto files: streams, cancels, keeps deadlines, reads errors."""

import base64
import importlib.util
import json
import shutil
import subprocess
import time
from pathlib import Path

import grpc
import platformdirs
import pytest
from cluster import cluster
from fakes import TEXT
from google.rpc.status_pb2 import Status

from protos.errors import from_status

ROOT = Path(__file__).parents[1]
PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("node") or not shutil.which("npm"), reason="node and npm are not installed"),
]


@pytest.fixture(scope="module")
def modules() -> Path:
    """A folder with the packages, filled once."""
    folder = platformdirs.user_cache_path("pagewire") / "node"
    stamp = folder / "installed"
    if not stamp.exists() or stamp.read_text() != " ".join(PACKAGES):
        folder.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *PACKAGES]
        run = subprocess.run(install, capture_output=True, text=True, timeout=100, check=False)
        assert run.returncode == 0, run.stderr
        stamp.write_text(" ".join(PACKAGES))
    return folder


def googleapis() -> Path:
    """Where google/api/annotations.proto is."""
    spec = importlib.util.find_spec("google.api")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))).parents[1]


def test_a_node_client_streams_cancels_and_reads_errors(modules):
    with cluster(step_ms=5) as running:
        command = ["node", ROOT / "tests" / "node_client.js", modules, running.target, ROOT, googleapis()]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert run.returncode == 0, run.stderr
        whole, cancelled, late, refused = map(json.loads, run.stdout.splitlines())

        assert whole["code"] == "OK"
        assert len(whole["texts"]) > 1
        assert "".join(whole["texts"]) == TEXT[1:41]

        assert cancelled["code"] == "CANCELLED"
        assert late["code"] == "DEADLINE_EXCEEDED"
        while (state := running.state()).num_running:
            time.sleep(0.01)
        assert state.block_pool.num_held == 0

        assert refused["code"] == "INVALID_ARGUMENT"
        status = Status.FromString(base64.b64decode(refused["details"]))
        error = from_status(grpc.StatusCode.INVALID_ARGUMENT, refused["message"], status)
        assert error.reason == "INVALID_REQUEST"
        assert [violation.field for violation in error.violations] == ["sampling.top_p"]
