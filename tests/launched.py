"""`pagewire up` as a process, with the real router and scheduler, and the real worker or one that answers at once."""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster import free_port
from fakes import TEXT, VOCABULARY_SIZE, write_tokenizer

from pagewire import state
from pagewire.processes import environment, module_command


@contextlib.contextmanager
def launched(directory: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen, state.ClusterState]]:
    """`pagewire up` with a worker that answers at once, once it serves."""
    package = directory / "stand-ins" / "worker"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    # It has no model, and no request to wait for: --model DIRECTORY --drain-grace-s=0.
    listens = "import sys, pagewire_fakes; sys.argv[1:] = pagewire_fakes.told(sys.argv[1:])"
    without = "at = sys.argv.index('--model'); del sys.argv[at : at + 3]"
    (package / "__main__.py").write_text(f"{listens}; {without}; from bench.instant_worker import main; main()")
    text = directory / "text.json"
    text.write_text(json.dumps(list(TEXT.encode())))
    script = {"text": text, "vocabulary-size": VOCABULARY_SIZE, "step-ms": 5}
    told = [word for option, value in script.items() for word in ("--set", f"worker.{option}={value}")]
    with launched_with(write_tokenizer(directory / "model"), *told, *arguments, path=package.parent) as running:
        yield running


@contextlib.contextmanager
def launched_with(
    model: Path, *arguments: str, path: Path | None = None
) -> Iterator[tuple[subprocess.Popen, state.ClusterState]]:
    """`pagewire up` for a model, once it serves; packages in the folder `path` precede ours and find these tests."""
    port, env = free_port(), environment()
    command = module_command("pagewire", ["up", "--model", str(model), "--port", str(port), *arguments])
    if path is not None:
        env["PYTHONPATH"] = f"{path}:{Path(__file__).parent}:{env.get('PYTHONPATH', '')}"
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process, wait_for(lambda: (now := state.load(port)) and now.serving and now)
        finally:
            process.kill()  # which its services do not survive


def wait_for(condition: Callable[[], object]) -> object:
    """Waits until the condition is true; returns its value."""
    end = time.monotonic() + 30
    while not (result := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return result
