"""The whole control plane at full speed: real scheduler and router processes over real gRPC, on Unix sockets.

Behind them is a worker that answers at once (`bench.instant_worker`), in front of them streams that are always busy
(`bench.load`): either on the Session stream of the scheduler itself, or real Generate calls to the router. All
processes compete for this machine's cores; the CPU time of each, from /proc, tells what it would do on a core of its
own.
"""

import asyncio
import bisect
import contextlib
import itertools
import json
import math
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bench import machine
from bench.load import gap_s
from pagewire.processes import environment, module_command, tied
from protos import session_pb2
from protos.rpc import dial, wait_for_serving
from protos.session_pb2_grpc import SessionServiceStub

_START_TIMEOUT_S = 60
_SILENCE_TIMEOUT_S = 10
# What the worker says. Plain text of common words, a name, figures and a character of several bytes.
TEXT = (
    "A scheduler that plans each step afresh can admit a request as soon as there is room for it, and let it go as "
    "soon as it has ended. In 2022 Yu and others called this iteration-level scheduling – the batch changes between "
    "any two tokens. Memory is the other half: a sequence grows by one token a step, nobody knows how far, and what is "
    "reserved for it in one piece is mostly wasted. Cut into blocks of 16 tokens, less than 4 % of it is.\n\n"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured.

    Attributes:
        door: "session", streams at the scheduler, or "generate", calls to the router.
        num_streams: over all load processes.
        num_clients: load processes.
        step_ms: time that the worker takes for a step, at least.
        model: directory of the tokenizer.
        warmup_s: seconds that do not count, once tokens come.
        window_s: seconds that count.
    """

    door: str
    model: Path
    num_streams: int = 256
    num_clients: int = 1
    num_prompt_tokens: int = 100
    num_output_tokens: int = 512
    step_ms: float = 0.0
    warmup_s: float = 2.0
    window_s: float = 6.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates over the window.

    Attributes:
        tokens_s: that reached the load processes.
        messages_s: that they came in.
        tokens_per_step: how many sequences a step held.
        cpu: share of a core that each process used.
        others_cpu: cores that all other processes of this machine used.
        idle_cpu: cores that nothing used.
        tokens_per_cpu_s: what each process did in a second of CPU time; of the clients all together.
        gap_ms: between two deltas of a stream of Generate, p50 and p99; empty at the other door.
    """

    tokens_s: float
    messages_s: float
    requests_s: float
    steps_s: float
    tokens_per_step: float
    cpu: dict[str, float]
    others_cpu: float
    idle_cpu: float
    tokens_per_cpu_s: dict[str, float]
    gap_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Look:
    time: float
    tokens: float
    messages: int
    requests: int
    num_steps: int
    gaps: list[int]
    cpu_s: dict[str, float]
    # Of the whole machine.
    busy_s: float
    idle_s: float


@dataclass
class _Plane:
    """The processes, by name."""

    directory: str
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    clients: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)

    def address(self, name: str) -> str:
        """Where a server listens."""
        return f"unix:{self.directory}/{name}"

    def start(self, name: str, module: str, *arguments: str) -> None:
        with self._log(name).open("wb") as log:
            command = tied(module_command(module, arguments))
            self.children[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment())

    async def start_client(self, name: str, *arguments: str) -> None:
        command = tied(module_command("bench.load", arguments))
        self.clients[name] = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env=environment()
        )

    async def next_lines(self) -> None:
        """Returns when every client has reported what it has received by now; earlier reports are skipped."""
        asked = time.monotonic()
        for name, client in self.clients.items():
            assert client.stdout is not None
            told = -math.inf
            while told < asked:
                async with asyncio.timeout(_SILENCE_TIMEOUT_S):
                    line = await client.stdout.readline()
                if not line:
                    raise RuntimeError(f"{name} has ended; what the servers said:\n{self.last_words()}")
                self.lines[name] = json.loads(line)
                told = self.lines[name]["time"]

    def last_words(self) -> str:
        """The ends of the servers' logs."""
        return "\n".join(self._log(name).read_text()[-1000:] for name in self.children)

    def _log(self, name: str) -> Path:
        return Path(self.directory, f"{name}.log")

    def total(self, count: str) -> float:
        return sum(line[count] for line in self.lines.values())

    def gaps(self) -> list[int]:
        """Of all clients, by bucket."""
        return [sum(counts) for counts in zip(*(line["gaps"] for line in self.lines.values()), strict=True)]

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each process so far, user and system; of the clients together."""
        seconds = {name: machine.cpu_s(child.pid) for name, child in self.children.items()}
        seconds["clients"] = sum(machine.cpu_s(client.pid) for client in self.clients.values())
        return seconds

    async def stop(self) -> None:
        for client in self.clients.values():
            with contextlib.suppress(ProcessLookupError):
                client.kill()
            await client.wait()
        for child in self.children.values():
            child.kill()
            child.wait()


async def measure(setting: Setting, on_rate: Callable[[float, float], None] | None = None) -> Measured:
    """Starts everything, waits until it is warm, and measures for the window.

    Args:
        setting: what is measured.
        on_rate: called with seconds of the window so far, and tokens a second since it began.

    Raises:
        RuntimeError: a process did not come up, or ended.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(setting.model / "tokenizer.json"))
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    characters_per_token = len(TEXT) / len(token_ids)
    async with (
        _running(setting, token_ids, tokenizer.get_vocab_size()) as plane,
        dial(plane.address("scheduler")) as channel,
    ):
        stub = SessionServiceStub(channel)

        async def look() -> _Look:
            await plane.next_lines()
            state = await stub.GetState(session_pb2.GetStateRequest(), timeout=5)
            tokens = plane.total("tokens") + plane.total("characters") / characters_per_token
            counts = int(plane.total("messages")), int(plane.total("requests"))
            busy_s, idle_s = machine.busy_and_idle_s()
            now, gaps, cpu_s = time.monotonic(), plane.gaps(), plane.cpu_s()
            return _Look(now, tokens, *counts, state.num_steps, gaps, cpu_s, busy_s, idle_s)

        while (first := await look()).tokens == 0:
            pass
        warm = first.time + setting.warmup_s
        while (first := await look()).time < warm:
            pass
        while (last := await look()).time < first.time + setting.window_s:
            if on_rate is not None:
                on_rate(last.time - first.time, (last.tokens - first.tokens) / (last.time - first.time))
    return _compare(first, last)


def _compare(first: _Look, last: _Look) -> Measured:
    seconds = last.time - first.time
    tokens = last.tokens - first.tokens
    num_steps = last.num_steps - first.num_steps
    used = {name: last.cpu_s[name] - first.cpu_s[name] for name in last.cpu_s}
    return Measured(
        tokens_s=tokens / seconds,
        messages_s=(last.messages - first.messages) / seconds,
        requests_s=(last.requests - first.requests) / seconds,
        steps_s=num_steps / seconds,
        tokens_per_step=tokens / max(1, num_steps),
        cpu={name: cpu_s / seconds for name, cpu_s in used.items()},
        others_cpu=max(0.0, last.busy_s - first.busy_s - sum(used.values())) / seconds,
        idle_cpu=(last.idle_s - first.idle_s) / seconds,
        tokens_per_cpu_s={name: tokens / cpu_s for name, cpu_s in used.items() if cpu_s},
        gap_ms=_percentiles([late - early for early, late in zip(first.gaps, last.gaps, strict=True)]),
    )


def _percentiles(gaps: list[int]) -> dict[str, float]:
    total, upto = sum(gaps), list(itertools.accumulate(gaps))
    if not total:
        return {}
    return {name: 1e3 * gap_s(bisect.bisect_left(upto, share * total)) for name, share in (("p50", 0.5), ("p99", 0.99))}


@contextlib.asynccontextmanager
async def _running(setting: Setting, token_ids: list[int], vocabulary_size: int) -> AsyncIterator[_Plane]:
    with tempfile.TemporaryDirectory(prefix="pwbench") as directory:
        plane = _Plane(directory)
        text = _write_json(Path(directory, "text.json"), token_ids)
        worker, scheduler, router = map(plane.address, ("worker", "scheduler", "router"))
        try:
            plane.start(
                "worker",
                "bench.instant_worker",
                *("--listen", worker, "--text", str(text), "--vocabulary-size", str(vocabulary_size)),
                *("--step-ms", str(setting.step_ms)),
            )
            plane.start(
                "scheduler",
                "scheduler",
                *("--listen", scheduler, "--worker", worker, "--log-level", "warning"),
                *("--max-num-seqs", str(setting.num_streams), "--max-num-batched-tokens", "2048"),
            )
            target = scheduler
            if setting.door == "generate":
                target = router
                plane.start(
                    "router",
                    "router",
                    *("--listen", target, "--scheduler", scheduler, "--model", str(setting.model)),
                    *("--log-level", "warning"),
                )
            await _wait_for_serving(plane, target)
            for place in range(setting.num_clients):
                await plane.start_client(
                    f"client {place}",
                    *(setting.door, "--target", target, "--vocabulary-size", str(vocabulary_size)),
                    *("--streams", str(setting.num_streams // setting.num_clients)),
                    *("--prompt-tokens", str(setting.num_prompt_tokens)),
                    *("--output-tokens", str(setting.num_output_tokens)),
                )
            yield plane
        finally:
            await plane.stop()


async def _wait_for_serving(plane: _Plane, target: str) -> None:
    end = time.monotonic() + _START_TIMEOUT_S
    async with dial(target) as channel:
        serving = asyncio.create_task(wait_for_serving(channel))
        try:
            while not serving.done():
                await asyncio.wait([serving], timeout=0.1)
                if time.monotonic() > end or any(child.poll() is not None for child in plane.children.values()):
                    raise RuntimeError(f"the processes did not come up:\n{plane.last_words()}")
        finally:
            serving.cancel()


def _write_json(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def write_byte_tokenizer(directory: Path) -> Path:
    """A folder with a tokenizer whose tokens are bytes, for a machine without a model."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # ByteLevel writes a byte that is no printable character as a character after the first 256.
    shown = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={shown[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 256}))
    return directory


def cached_model() -> Path | None:
    """The folder of the built-in model, as `pagewire model` prints it, where it has been fetched already."""
    folder = platformdirs.user_cache_path("pagewire") / "models" / "smollm2-135m-instruct"
    return folder if (folder / "tokenizer.json").is_file() else None
