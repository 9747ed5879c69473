"""Bytes that are no HTTP/2, no gRPC or no method of ours cost their sender the connection, and others nothing.

gRPC itself answers what it cannot read, with INTERNAL where its specification says so. Those answers have no
ErrorInfo, and our own code is never reached. `make fuzz` makes many more.
"""

import asyncio
import logging
import os
import struct
from collections.abc import AsyncIterator

import hypothesis.strategies as st
import pytest
from fakes import TEXT, ControlPlane, control_plane, request
from http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    Heard,
    frame,
    grpc_message,
    opening,
    preface,
    say,
)
from hypothesis import HealthCheck, given, settings

NUM_EXAMPLES = int(os.environ.get("PAGEWIRE_FUZZ_EXAMPLES", "200"))
COMPLETE = b"/pagewire.v1.GenerationService/Complete"
OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 3, 8, 12, 13
GOOD = request("x", max_tokens=3).SerializeToString()


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    async with control_plane(router={"write_stall_s": 5.0}) as plane:
        yield plane
        assert await plane.text(max_tokens=3) == TEXT[:3], "it goes on"


def address(plane: ControlPlane) -> str:
    return plane.router_address.removeprefix("unix:")


def call(path: bytes = COMPLETE, *more: tuple[bytes, bytes], body: bytes | None = None, **options: bytes) -> bytes:
    """A whole connection with one call."""
    headers = frame(HEADERS, END_HEADERS, 1, opening(path, *more, **options))
    return preface() + headers + frame(DATA, END_STREAM, 1, grpc_message(GOOD) if body is None else body)


async def status_of(plane: ControlPlane, data: bytes) -> tuple[int, str]:
    heard = await say(address(plane), data)
    assert len(heard.statuses) == 1, heard
    return heard.statuses[0]


async def test_a_call_in_handmade_frames_is_answered(plane):
    assert await status_of(plane, call()) == (OK, "")


@pytest.mark.parametrize("path", [b"/pagewire.v1.GenerationService/Nope", b"nope", b"", b"/" + b"x" * 6000])
async def test_an_unknown_method_is_unimplemented(plane, path):
    assert (await status_of(plane, call(path)))[0] == UNIMPLEMENTED


@pytest.mark.parametrize("path", [b"\xff", b"/pagewire.v1.GenerationService/\xed\xa0\x80"])
async def test_a_method_name_that_is_not_utf8_ends_no_other_stream(plane, path):
    """Without our code, grpcio 1.85.1 shuts down the whole server."""
    plane.worker.gate.clear()
    stream = plane.generation.Generate(request(max_tokens=9))
    await plane.until(lambda state: state.num_running == 1)
    for _ in range(3):
        assert (await status_of(plane, call(path)))[0] == UNIMPLEMENTED
    plane.worker.gate.set()
    assert "".join([message.outputs[0].text async for message in stream]) == TEXT[:9]


async def test_many_unknown_methods_at_once_are_all_refused(plane):
    codes = await asyncio.gather(*(status_of(plane, call(b"/x\xff%d" % n)) for n in range(100)))
    assert {code for code, _ in codes} == {UNIMPLEMENTED}


@pytest.mark.parametrize(
    "data, code, words",
    [
        (call(body=grpc_message(GOOD, flag=1)), INTERNAL, "no encoding"),
        (call(COMPLETE, (b"grpc-encoding", b"gzip"), body=grpc_message(GOOD, flag=1)), INTERNAL, "Decompression"),
        (call(COMPLETE, (b"grpc-encoding", b"zz"), body=grpc_message(GOOD, flag=1)), INTERNAL, "grpc-encoding"),
        (call(COMPLETE, (b"grpc-timeout", b"soon")), INTERNAL, "grpc-timeout"),
        (call(COMPLETE, (b"x-bin", b"\xff\x00")), INTERNAL, "base64"),
        (call(body=grpc_message(GOOD, length=0xFFFFFFFF)), RESOURCE_EXHAUSTED, "larger than max"),
        (call(body=grpc_message(b"\xff\xff")), INVALID_ARGUMENT, "not a message of this type"),
    ],
)
async def test_a_request_that_is_not_grpc_is_refused_with_the_reason(plane, data, code, words):
    found, message = await status_of(plane, data)
    assert found == code
    assert words in message


@pytest.mark.parametrize(
    "pair",
    [
        (b"y", b"\xff\xfe"),
        (b"y-bin", b"/////w=="),
        (b"y", b""),
        (b"traceparent", b"\xff" * 55),
    ],
)
async def test_odd_metadata_harms_no_call(plane, pair):
    code, message = await status_of(plane, call(COMPLETE, pair))
    assert (code, message) in [(OK, "")] or (code == INTERNAL and "metadata" in message)


async def test_an_odd_request_id_is_refused_by_name(plane):
    code, message = await status_of(plane, call(COMPLETE, (b"x-request-id", b"\n")))
    assert code == INVALID_ARGUMENT
    assert "x-request-id" in message


async def test_calls_reset_as_soon_as_they_open_leave_nothing_behind(plane):
    """The attack known as rapid reset."""
    calls = [
        frame(HEADERS, END_HEADERS, stream, opening(COMPLETE))
        + frame(DATA, END_STREAM, stream, grpc_message(GOOD))
        + frame(RST_STREAM, 0, stream, struct.pack(">I", 8))
        for stream in range(1, 4001, 2)
    ]
    await say(address(plane), preface() + b"".join(calls), until_status=False)
    state = await plane.until(lambda state: state.num_running + state.num_waiting == 0)
    assert state.block_pool.num_held == 0


async def test_calls_that_never_send_their_message_hold_nothing_of_ours(plane):
    """Calls that are only opened, half sent, or ended without a message: no place among live requests, and no block."""
    parts = [
        frame(HEADERS, END_HEADERS, 1, opening(COMPLETE)),
        frame(HEADERS, END_HEADERS, 3, opening(COMPLETE)) + frame(DATA, 0, 3, grpc_message(GOOD, length=100)),
        frame(HEADERS, END_HEADERS | END_STREAM, 5, opening(COMPLETE)),
    ]
    heard = await say(address(plane), preface() + b"".join(parts), until_status=False)
    assert not heard.statuses
    assert (await plane.state()).num_running == 0


def frames() -> st.SearchStrategy[bytes]:
    """Valid frames, frames of noise, and plain noise."""
    streams = st.sampled_from([0, 1, 3, 5, 2, 0x7FFFFFFF])
    paths = st.sampled_from([COMPLETE, b"/pagewire.v1.GenerationService/Generate", b"\xff"]) | st.binary(max_size=9)
    metadata = st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=40)), max_size=2)
    payloads = st.one_of(
        st.binary(max_size=40),
        st.builds(lambda path, more: opening(path, *more), paths, metadata),
        st.builds(lambda data, flag: grpc_message(data, flag=flag), st.binary(max_size=30), st.integers(0, 2)),
        st.just(grpc_message(GOOD)),
        st.binary(min_size=4, max_size=8),
    )
    kinds = st.sampled_from([HEADERS, HEADERS, DATA, DATA, CONTINUATION, *range(2, 11)])
    flags = st.sampled_from([END_STREAM, END_HEADERS, END_STREAM | END_HEADERS]) | st.integers(0, 255)
    return st.one_of(st.builds(frame, kinds, flags, streams, payloads), st.binary(max_size=30))


def check_heard(heard: Heard) -> None:
    """Checks that no answer of gRPC is a Python exception."""
    for code, message in heard.statuses:
        assert 0 <= code <= 16
        assert code != 2, message
        assert "Unexpected" not in message, message


async def test_noise_of_any_kind_leaves_nothing_behind(plane, caplog):
    loop = asyncio.get_running_loop()
    talks = st.tuples(st.sampled_from([b"", preface(), preface(), preface(0)]), st.lists(frames(), max_size=8))

    async def check(batch: list[tuple[bytes, list[bytes]]]) -> None:
        saying = (say(address(plane), start + b"".join(more), until_status=False) for start, more in batch)
        for heard in await asyncio.gather(*saying):
            check_heard(heard)
        async with asyncio.timeout(20):
            state = await plane.until(lambda state: state.num_running + state.num_waiting == 0)
        assert state.block_pool.num_held == 0

    @settings(
        max_examples=NUM_EXAMPLES // 8,
        derandomize="PAGEWIRE_FUZZ_EXAMPLES" not in os.environ,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(talks, min_size=1, max_size=20))
    def run(batch: list[tuple[bytes, list[bytes]]]) -> None:
        asyncio.run_coroutine_threadsafe(check(batch), loop).result()

    with caplog.at_level(logging.ERROR):
        await asyncio.to_thread(run)
    assert not [record for record in caplog.records if record.message == "bug"]
