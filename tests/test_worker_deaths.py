"""The real launcher, scheduler and router around a worker that dies or hangs: only the guilty one's stream is lost."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import mortal_worker
import pytest
from fakes import TEXT, write_tokenizer

from pagewire.cluster import Cluster, RestartPolicy
from pagewire.launch import LaunchOptions, free_port, services
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.rpc import dial

pytestmark = pytest.mark.slow
PROMPT, NUM_TOKENS = "p", 100
SAID = (TEXT * 3)[len(PROMPT) : len(PROMPT) + NUM_TOKENS]
WAIT_S = 30


@contextlib.asynccontextmanager
async def launched(folder: Path) -> AsyncIterator[tuple[GenerationServiceStub, dict[str, int]]]:
    """A stub, and the process ids by name, kept up to date."""
    options = LaunchOptions(str(write_tokenizer(folder / "model")), port=free_port())
    worker, *others = services(options, str(folder))
    worker = replace(
        worker, command=(sys.executable, mortal_worker.__file__, "--listen", worker.address), stop_within_s=5
    )
    stop, ready, pids = asyncio.Event(), asyncio.Event(), {}
    cluster = Cluster(
        [worker, *others],
        on_line=lambda name, line: print(line),
        on_pids=pids.update,
        new_policy=lambda: RestartPolicy(first_delay_s=0.05),
        probe_s=0.5,
    )
    run = asyncio.create_task(cluster.run(stop, ready.set))
    try:
        async with asyncio.timeout(WAIT_S), dial(options.target) as channel:
            await ready.wait()
            yield GenerationServiceStub(channel), pids
    finally:
        stop.set()
        await run


def asked(prompt: str, request_id: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id=request_id, text=prompt, stop=pb.StopConditions(max_tokens=NUM_TOKENS))


async def text_of(stream) -> str:
    """All that is still to come; by `read`, as what came before was."""
    text = ""
    while (message := await stream.read()) is not grpc.aio.EOF:
        text += message.outputs[0].text
    return text


async def test_a_request_that_kills_each_worker_fails_alone_by_its_id(tmp_path_factory):
    async with launched(tmp_path_factory.mktemp("c")) as (stub, _):
        streams = [stub.Generate(asked(PROMPT, f"good-{number}")) for number in range(4)]
        begun = [(await stream.read()).outputs[0].text for stream in streams]
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await stub.Complete(asked("Z", "bad"))
        assert info.value.code() is grpc.StatusCode.INTERNAL
        assert info.value.details().startswith(
            "request 'bad' is given up: workers lost in a row while they computed it"
        )
        assert [first + await text_of(stream) for first, stream in zip(begun, streams, strict=True)] == [SAID] * 4


@pytest.mark.long
async def test_a_worker_that_hangs_is_killed_and_the_next_one_goes_on(tmp_path_factory):
    async with launched(tmp_path_factory.mktemp("c")) as (stub, pids):
        stream, old = stub.Generate(asked(PROMPT, "good")), pids["worker"]
        first = (await stream.read()).outputs[0].text
        os.kill(old, signal.SIGSTOP)
        assert first + await text_of(stream) == SAID
        assert pids["worker"] != old
