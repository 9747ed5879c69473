"""Thousands of streams at once through the real processes: each is whole and right, or refused by a limit of ours.

The worker answers at once, so the router is the bottleneck. How long deltas take is measured by
`python -m bench.scheduler_speed`; here nothing depends on time.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from cluster import Cluster, cluster, free_port
from fakes import TEXT
from google.rpc.status_pb2 import Status

from protos.errors import Refusal, from_status
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.rpc import dial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_CONNECTIONS = 4


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    # More streams at once than by default, and steps large enough for all of them.
    with cluster(scheduler_options=("--max-num-seqs", "1024", "--max-num-batched-tokens", "4096")) as running:
        yield running


@contextlib.asynccontextmanager
async def stubs(target: str) -> AsyncIterator[list[GenerationServiceStub]]:
    async with contextlib.AsyncExitStack() as channels:
        yield [GenerationServiceStub(await channels.enter_async_context(dial(target))) for _ in range(NUM_CONNECTIONS)]


async def stream(stub: GenerationServiceStub, number: int, num_tokens: int) -> Refusal | None:
    """Asks for a text that only this number gets, and checks it; returns the refusal if there was one."""
    num_prompt_tokens = 1 + number % len(TEXT)
    request = pb.GenerateRequest(
        request_id=f"stream-{number}",
        token_ids=pb.TokenIds(ids=[number % 128] * num_prompt_tokens),
        stop=pb.StopConditions(max_tokens=num_tokens, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True),
    )
    call = stub.Generate(request)
    try:
        messages = [message async for message in call]
    except grpc.aio.AioRpcError as error:
        details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
        return from_status(error.code(), error.details() or "", Status.FromString(details) if details else None)
    expected = (TEXT * (2 + num_tokens // len(TEXT)))[num_prompt_tokens:][:num_tokens]
    assert "".join(message.outputs[0].text for message in messages) == expected
    assert bytes(token for message in messages for token in message.outputs[0].token_ids) == expected.encode()
    assert {message.request_id for message in messages} == {request.request_id}
    last = messages[-1]
    assert last.outputs[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (num_prompt_tokens, num_tokens)
    return None


def opened(
    each: list[GenerationServiceStub], num_streams: int, num_tokens: int
) -> "list[asyncio.Task[Refusal | None]]":
    """All at once."""
    calls = (stream(each[number % NUM_CONNECTIONS], number, num_tokens) for number in range(num_streams))
    return [asyncio.create_task(call) for call in calls]


async def burst(target: str, num_streams: int, num_tokens: int) -> list[Refusal]:
    """Opens all at once; returns the refusals."""
    async with stubs(target) as each:
        calls = opened(each, num_streams, num_tokens)
        return [refusal for refusal in await asyncio.gather(*calls) if refusal is not None]


def assert_idle(running: Cluster) -> None:
    state = running.state()
    assert state.num_running + state.num_waiting == 0
    assert state.block_pool.num_held == 0


@pytest.mark.long
async def test_a_thousand_streams_at_once_are_all_whole_and_right(running):
    assert await burst(running.target, 1000, 40) == []
    assert_idle(running)


async def test_four_thousand_opened_at_once_all_come_through(running):
    """With gRPC's own limit of pending calls, hundreds of them fail by chance."""
    assert await burst(running.target, 4000, 3) == []
    assert_idle(running)


async def test_a_burst_over_the_routers_limit_is_refused_with_a_delay_and_the_rest_comes_through(running):
    port = free_port()
    running.start_router(port, "--max-live-requests", "500")
    running.wait_for_serving(port)
    async with stubs(f"127.0.0.1:{port}") as each:
        # No stream ends before all are opened, however fast the service is.
        with running.worker.suspended():
            calls = opened(each, 4000, 3)
            refusals = [await call for call in itertools.islice(asyncio.as_completed(calls), 3500)]
        assert {(refusal.code, refusal.reason) for refusal in refusals} == {
            (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        }
        assert all(refusal.retry_delay_ms for refusal in refusals)
        assert (await asyncio.gather(*calls)).count(None) == 500
    assert_idle(running)
