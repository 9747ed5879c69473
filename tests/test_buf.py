"""Our .proto files checked by buf: its lint, and whether the public API breaks what was released.

`released_api/` holds the public files of the last release; a release copies them there.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hatch_build import protoc

ROOT = Path(__file__).parents[1]
RELEASED = ROOT / "tests" / "released_api"


def compiled(path: Path, root: Path, pattern: str) -> Path:
    """The files below root/protos that match the pattern, as a descriptor set with comments."""
    names = sorted(str(name.relative_to(root)) for name in (root / "protos").rglob(pattern))
    protoc("--include_source_info", "--include_imports", f"--descriptor_set_out={path}", *names, root=root)
    return path


def buf(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "buf", *arguments, "--config", ROOT / "protos" / "buf.yaml"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def breaking(now: Path, released: Path) -> subprocess.CompletedProcess[str]:
    return buf("breaking", now, "--against", released, "--path", "protos/pagewire")


def test_buf_finds_no_fault(tmp_path):
    run = buf("lint", compiled(tmp_path / "now.binpb", ROOT, "*.proto"), "--path", "protos")
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_public_api_breaks_nothing_that_was_released(tmp_path):
    now = compiled(tmp_path / "now.binpb", ROOT, "pagewire/v1/*.proto")
    run = breaking(now, compiled(tmp_path / "released.binpb", RELEASED, "pagewire/v1/*.proto"))
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    "was, becomes",
    [
        ("  string adapter = 11;\n", ""),
        ("string adapter = 11;", "string adapter = 13;"),
        ("string adapter = 11;", "bytes adapter = 11;"),
        ("rpc Tokenize(", "rpc Encode("),
    ],
)
def test_a_change_that_would_break_clients_is_found(tmp_path, was, becomes):
    shutil.copytree(RELEASED, tmp_path / "changed")
    (path,) = (tmp_path / "changed").rglob("generation.proto")
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, becomes))
    changed = compiled(tmp_path / "changed.binpb", tmp_path / "changed", "pagewire/v1/*.proto")
    run = breaking(changed, compiled(tmp_path / "released.binpb", RELEASED, "pagewire/v1/*.proto"))
    assert run.returncode == 100, run.stdout + run.stderr
    assert "generation.proto" in run.stdout
