"""Which package may import which, and that the control plane needs no torch."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("protos", "router", "scheduler", "worker", "kernels", "pagewire")
ALLOWED = {
    "protos": set(),
    "router": {"protos"},
    "scheduler": {"protos"},
    "worker": {"protos", "kernels"},
    "kernels": set(),
    "pagewire": {"protos"},
}
TORCH = {"torch", "triton", "transformers", "safetensors", "numpy"}
WITHOUT_TORCH = {"protos", "router", "scheduler", "pagewire"}


def imports_of(path: Path) -> set[str]:
    """Top-level names that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_table_allows(room):
    for path in (ROOT / room).rglob("*.py"):
        others = imports_of(path) & set(ROOMS) - {room}
        assert others <= ALLOWED[room], f"{path.relative_to(ROOT)} imports {others - ALLOWED[room]}"
        if room in WITHOUT_TORCH:
            assert not imports_of(path) & TORCH, f"{path.relative_to(ROOT)} imports {imports_of(path) & TORCH}"
        if room == "kernels":
            assert "grpc" not in imports_of(path)


@pytest.mark.parametrize("room", ROOMS)
def test_each_name_resolves_inside_the_repository(room):
    spec = importlib.util.find_spec(room)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).parent == ROOT / room


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "pagewire"])
def test_an_init_file_is_a_docstring_and_nothing_else(room):
    for path in (ROOT / room).rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert len(body) == 1, path
        assert isinstance(body[0], ast.Expr)


@pytest.mark.parametrize("module", ["router.__main__", "scheduler.__main__", "pagewire.cli"])
def test_the_control_plane_starts_where_torch_is_not_installed(module):
    """An import finder that refuses torch stands for a machine without it."""
    script = f"""
import importlib.abc, sys
class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {TORCH!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, NoTorch())
import {module}
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr


def test_no_module_is_named_utils_or_the_like():
    for room in ROOMS:
        drawers = {"utils", "util", "common", "helpers", "misc"}
        found = [path for path in (ROOT / room).rglob("*") if path.stem in drawers and "__pycache__" not in path.parts]
        assert not found
