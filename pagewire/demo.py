"""`pagewire demo`: the whole system once, on a real model, from scratch: fetch, start, complete, chat, stop."""

import tempfile
import time
from pathlib import Path

from rich.console import Console

from pagewire import background, models, terminal
from pagewire.client import Client, Stream
from pagewire.cluster import LaunchError
from pagewire.errors import RequestError
from pagewire.launch import LaunchOptions, free_port
from pagewire.request import Options

_TEXT = "The capital of France is"
_QUESTION = "Why is the sky blue? Answer in two sentences."
_COMPLETE = Options(temperature=0, max_tokens=32, stop="\n")
_CHAT = Options(temperature=0, max_tokens=128)


def run(model: str, console: Console) -> None:
    """Runs the demo.

    Raises:
        PagewireError: something did not work; includes the services' last log lines if they had started.
    """
    path = models.resolve(model, console)
    with tempfile.TemporaryDirectory(prefix="pagewire-demo-") as folder:
        log_file = Path(folder) / "cluster.log"
        options = LaunchOptions(path, port=free_port(), log_file=log_file)
        started = time.monotonic()
        process = background.start(options, tie=True)
        try:
            with console.status("starting worker, scheduler and router"):
                background.wait_until_serving(process, options)
            console.print(f"[bold]Worker, scheduler and router serve[/] after {time.monotonic() - started:.1f} s.\n")
            _talk(options.target, console)
        except RequestError as error:
            raise LaunchError(f"{error}\n{background.log_tail(log_file)}") from error
        finally:
            process.terminate()
            with console.status("stopping"):
                process.wait()
    console.print("\nStopped. `pagewire up` keeps such a cluster running.", highlight=False)


def _talk(target: str, console: Console) -> None:
    with Client(target) as client:
        console.print(f"[bold]Completion:[/] [cyan]{_TEXT}[/]", end="")
        _answer(client.stream(_TEXT, **_COMPLETE), console)
        console.print(f"\n[bold]Chat:[/] [cyan]{_QUESTION}[/]")
        _answer(client.stream_chat(_QUESTION, **_CHAT), console)


def _answer(stream: Stream, console: Console) -> None:
    completion = terminal.show(stream, headings=False)
    console.print(terminal.summary(completion), style="dim", highlight=False)
