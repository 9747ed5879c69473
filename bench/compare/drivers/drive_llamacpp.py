"""llama.cpp's own server, over its HTTP API.

Options: "server", its program; "kv_tokens", room of the KV cache that all slots share; "slots"; "lookup", flags of the
server for drafts from the prompt and the answer so far, if any.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import aiohttp
from lines import Request, serve

_POLL_S = 0.02
_STOP_S = 10.0


class LlamaCpp:
    """One server, ended with this process."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        threads = str(len(os.sched_getaffinity(0)))
        command = [options["server"], "--model", model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--threads", threads, "--threads-batch", threads, "--ctx-size", str(options["kv_tokens"])]
        command += ["--parallel", str(options["slots"]), "--kv-unified"]
        for flag, value in options.get("lookup", {}).items():
            command += [f"--{flag}", str(value)]
        self._runner = asyncio.Runner()
        self.started_at = time.monotonic()
        # Its output goes where that of this process goes; the driver's input is not for it.
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr)
        self.pids = [self._server.pid]
        try:
            self._runner.run(self._wait())
            self._session = self._runner.run(self._connect())
        except BaseException:
            self._end()
            raise
        version = subprocess.run([options["server"], "--version"], capture_output=True, text=True, check=True)
        self.version = (version.stdout + version.stderr).strip().splitlines()[0].removeprefix("version: ")

    def play(self, requests: list[Request]) -> None:
        """Streams all, each from its arrival on."""
        self._runner.run(self._play(requests))

    def close(self) -> None:
        """Ends the server."""
        self._runner.run(self._session.close())
        self._end()

    def _end(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    async def _connect(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            # Each request has a connection of its own: one that is kept open breaks while the server is suspended.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=1 << 20,
        )

    async def _wait(self) -> None:
        async with aiohttp.ClientSession() as session:
            while self._server.poll() is None:
                try:
                    async with session.get(f"{self._url}/health") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(_POLL_S)
        raise RuntimeError(f"llama-server ended with status {self._server.returncode}")

    async def _play(self, requests: list[Request]) -> None:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(self._one(request, started))

    async def _one(self, request: Request, started: float) -> None:
        await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - started)))
        body = {
            "prompt": request.token_ids,
            "n_predict": request.max_tokens,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": True,
            "return_tokens": True,
        }
        async with self._session.post(f"{self._url}/completion", json=body) as response:
            if response.status != 200:
                raise RuntimeError(await response.text())
            async for line in response.content:
                if line.startswith(b"data: {"):
                    tokens = json.loads(line[6:]).get("tokens") or []
                    request.add(time.perf_counter() - started, tokens)


if __name__ == "__main__":
    serve(LlamaCpp)
