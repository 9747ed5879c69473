"""The wall clock decides nothing: it may jump, since every wait and deadline uses a monotonic clock."""

import ast
import asyncio
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from cluster import cluster
from fakes import TEXT

from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub

ROOT = Path(__file__).parents[1]
ROOMS = ("protos", "router", "scheduler", "worker", "kernels", "pagewire")
CLOCKS = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime", "CLOCK_REALTIME"},
    "datetime": {"now", "utcnow", "today", "fromtimestamp"},
    "date": {"today"},
}
# For people to read, and for chat templates.
TELLERS = {
    "pagewire/bench_report.py": "the date of a report",
    "pagewire/top.py": "the time of a picture",
    "protos/logs.py": "the time of a log line",
    "protos/tracing.py": "where spans lie, by one look at the start",
    "router/tokenizer.py": "the date in a chat template's prompt",
    "scheduler/recorder.py": "the date of a record",
    "scheduler/replay.py": "the date of a record",
}
DAY_S = 86_400


def reads_wall_clock(source: str) -> bool:
    """Whether Python code asks for the time of day, by its module or by a name that it imports."""
    return any(map(is_look, ast.walk(ast.parse(source))))


def is_look(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module == "time":
        return bool(CLOCKS["time"] & {name.name for name in node.names})
    return isinstance(node, ast.Attribute) and node.attr in CLOCKS.get(ast.unparse(node.value).rpartition(".")[2], ())


@pytest.mark.parametrize(
    "line", ["time.time()", "from time import time as now", "datetime.datetime.now()", "date.today()", "time.time_ns()"]
)
def test_code_that_reads_the_wall_clock_is_found(line):
    assert reads_wall_clock(line)
    assert not reads_wall_clock("time.monotonic(); loop.time(); from time import monotonic; record.time")


def test_the_wall_clock_is_read_only_to_tell_the_time():
    found = {str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert {name for name in found if reads_wall_clock((ROOT / name).read_text())} == TELLERS.keys()
    native = [path for path in (ROOT / "kernels" / "csrc").iterdir() if "system_clock" in path.read_text()]
    assert not native


@pytest.fixture
def jump(tmp_path, monkeypatch) -> Callable[[float], None]:
    """Sets by how many days the wall clock is wrong in processes started from now on."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    library, days = tmp_path / "wall_clock.so", tmp_path / "days"
    source = ROOT / "tests" / "wall_clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    days.write_bytes(bytes(8))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("WALL_CLOCK", str(days))

    def set_days(num_days: float) -> None:
        with days.open("r+b") as file:
            file.write(struct.pack("<q", int(num_days * DAY_S)))

    return set_days


@pytest.mark.slow
async def test_a_wall_clock_that_jumps_by_a_day_both_ways_changes_nothing(jump):
    def asked(max_tokens: int) -> pb.GenerateRequest:
        return pb.GenerateRequest(text="p", stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True))

    stalls = ("--health-stall-s", "1")
    with cluster(*stalls, "--heartbeat-s", "0.1", scheduler_options=stalls, step_ms=5) as running:
        async with grpc.aio.insecure_channel(running.target) as channel:
            stub = GenerationServiceStub(channel)
            streams = [stub.Generate(asked(num_tokens), timeout=60) for num_tokens in (300, 350, 400)]
            texts = [(await stream.read()).outputs[0].text for stream in streams]
            for num_days in (1, 0, -1, 1):
                jump(num_days)
                assert (await stub.Complete(asked(20), timeout=60)).outputs[0].text == TEXT[1:21]
                with pytest.raises(grpc.aio.AioRpcError) as info:
                    await stub.Complete(asked(2000), timeout=0.2)
                assert info.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            rest = await asyncio.gather(*(_text(stream) for stream in streams))
        state = running.state()
        logs = [service.log.read_text() for service in (running.scheduler, *running.routers.values())]
    assert [text + more for text, more in zip(texts, rest, strict=True)] == [
        (TEXT * 9)[1 : 1 + num_tokens] for num_tokens in (300, 350, 400)
    ]
    assert (state.num_running + state.num_waiting, state.block_pool.num_held) == (0, 0)
    for log in logs:
        assert "lost" not in log
        assert "silent" not in log


async def _text(stream) -> str:
    text = ""
    while (message := await stream.read()) is not grpc.aio.EOF:
        text += "".join(output.text for output in message.outputs)
    return text
