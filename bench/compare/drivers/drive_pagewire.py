"""Pagewire through its real service: `pagewire up` on a free port, and the client of `pagewire bench`.

Options: "settings", as `pagewire up --set` takes them; "log", the file that the cluster logs into.
"""

import asyncio
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import uvloop
from lines import Request, serve

from pagewire import background, bench, state
from pagewire.client import AsyncClient
from pagewire.launch import LaunchOptions, Setting, free_port


class Pagewire:
    """A cluster of its own, ended with this process. The memory is that of its processes, launcher included."""

    version = metadata.version("pagewire")

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        settings = tuple(map(Setting.parse, options["settings"]))
        launch = LaunchOptions(model, port=free_port(), settings=settings, log_file=Path(options["log"]))
        self._port = launch.port
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.started_at = time.monotonic()
        process = background.start(launch, tie=True)
        self.pids = [process.pid]
        background.wait_until_serving(process, launch)
        self._client = self._runner.run(self._connect(launch.target))

    def play(self, requests: list[Request]) -> None:
        """Streams all, each from its arrival on."""
        rows = [bench.Record(request.token_ids, request.max_tokens, request.at) for request in requests]
        self._runner.run(bench.play(self._client, rows))
        for request, row in zip(requests, rows, strict=True):
            request.times, request.tokens = row.times, row.output

    def close(self) -> None:
        """Drains the cluster."""
        self._runner.run(self._client.close())
        running = state.load(self._port)
        if running is not None:
            background.stop(running)

    async def _connect(self, target: str) -> AsyncClient:
        return AsyncClient(target)


if __name__ == "__main__":
    serve(Pagewire)
