"""Clients that do not read, do not write, or do nothing cost bounded memory, and delay no other client.

They speak HTTP/2 by hand (`http2_frames`), over TCP, to the real processes.
"""

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from cluster import Cluster, cluster
from fakes import TEXT
from http2_frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame, grpc_message, opening, preface

from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.rpc import dial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GENERATE = b"/pagewire.v1.GenerationService/Generate"
STALL_S = 12.0  # a thousand steps take three seconds, and three times as long on a busy machine
MIB = 1 << 20


@pytest.fixture
def running() -> Iterator[Cluster]:
    # A step takes a while, so that even on a busy machine an undisturbed stream waits for that; it gives one token.
    options = ("--num-speculative-tokens", "0")
    with cluster("--write-stall-s", str(STALL_S), scheduler_options=options, step_ms=2) as running:
        yield running


def router_bytes(running: Cluster) -> int:
    return next(iter(running.routers.values())).rss_bytes()


def asking(num_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[65]),
        stop=pb.StopConditions(max_tokens=num_tokens, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True),
    )


@contextlib.asynccontextmanager
async def connections(running: Cluster, count: int, data: bytes) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Connections that have sent `data` and read nothing."""
    host, _, port = running.target.rpartition(":")
    writers = []
    try:
        for _ in range(count):
            # The smallest TCP window, and a reader that pauses at once.
            _, writer = await asyncio.open_connection(host, int(port), limit=1)
            writers.append(writer)
            writer.write(data)
            await writer.drain()
        yield writers
    finally:
        for writer in writers:
            writer.transport.abort()


async def gaps_of_a_stream(running: Cluster, num_tokens: int) -> list[float]:
    """Seconds between the deltas of a stream that is read; its text is checked."""
    async with dial(running.target) as channel:
        times, text = [], ""
        async for message in GenerationServiceStub(channel).Generate(asking(num_tokens)):
            times.append(time.monotonic())
            text += message.outputs[0].text
    assert text == (TEXT * num_tokens)[1 : num_tokens + 1]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


async def until_step(running: Cluster, number: int) -> None:
    while (await asyncio.to_thread(running.state)).num_steps < number:
        await asyncio.sleep(0.05)


async def until_idle(running: Cluster) -> None:
    while (state := await asyncio.to_thread(running.state)).num_running + state.num_waiting:
        await asyncio.sleep(0.05)
    assert state.block_pool.num_held == 0


async def test_readers_that_stop_cost_bounded_memory_delay_no_other_and_are_given_up(running):
    num_stalled, num_tokens = 40, 8000
    undisturbed = await gaps_of_a_stream(running, 200)
    async with contextlib.AsyncExitStack() as stalled:
        for number in range(num_stalled):
            request = asking(num_tokens)
            # Each delta repeats it, so the stream's window and gRPC's buffer behind it are full after some hundred.
            request.request_id = f"{number:0128}"
            body = frame(DATA, END_STREAM, 1, grpc_message(request.SerializeToString()))
            data = preface(window=200) + frame(HEADERS, END_HEADERS, 1, opening(GENERATE)) + body
            await stalled.enter_async_context(connections(running, 1, data))
        await until_step(running, 1000)
        before = router_bytes(running)
        disturbed = await gaps_of_a_stream(running, 200)
        state = await asyncio.to_thread(running.state)
        assert state.num_running == num_stalled, "their tokens are still computed"
        await until_step(running, 2000)
        during = router_bytes(running)
        await until_idle(running)  # they are given up, long before their last tokens
        after = router_bytes(running)
    assert (await asyncio.to_thread(running.state)).num_steps < num_tokens
    # Each got a thousand more tokens; waiting as messages, these would take 400 bytes each.
    assert during - before < num_stalled * MIB / 4
    assert after - before < num_stalled * MIB / 4
    # 40 more sequences in each step cost some time; a stream held up by others' full windows would wait for seconds.
    assert statistics.median(disturbed) < 10 * statistics.median(undisturbed) + 0.02
    assert max(disturbed) < 4.0


async def test_calls_that_never_send_or_send_slowly_hold_no_place_and_no_block(running):
    request = grpc_message(asking(5).SerializeToString())
    half = preface() + frame(HEADERS, END_HEADERS, 1, opening(GENERATE))
    async with connections(running, 300, half) as writers:
        for writer in writers:
            writer.write(frame(DATA, 0, 1, request[:7]))
        assert len(await gaps_of_a_stream(running, 20)) > 1
        state = await asyncio.to_thread(running.state)
        assert state.num_running + state.num_waiting == 0
        for writer in writers:
            writer.write(frame(DATA, END_STREAM, 1, request[7:]))
        while (await asyncio.to_thread(running.state)).num_steps < 25:
            await asyncio.sleep(0.01)
        await until_idle(running)


async def test_two_thousand_idle_connections_cost_little_memory_and_delay_no_other_client(running):
    """Their number is limited only by the process's limit of open files."""
    undisturbed = await gaps_of_a_stream(running, 200)
    before = router_bytes(running)
    async with connections(running, 2000, preface()):
        disturbed = await gaps_of_a_stream(running, 200)
        assert router_bytes(running) - before < 2000 * MIB / 16
    assert statistics.median(disturbed) < 5 * statistics.median(undisturbed) + 0.02
