"""How our servers end calls and themselves, and that gRPC knows the options that they set."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from http2_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAGIC,
    PING,
    SETTINGS,
    frame,
    grpc_message,
    header_block,
    opening,
    preface,
)

from protos import last_answers, rpc
from protos.boundary import Boundary
from protos.calls import Calls
from protos.errors import CannotListen, Refusal, Violation, invalid_argument, to_status
from router.config import RouterSettings

METHOD = "/pagewire.test/Say"
Say = Callable[[grpc.aio.ServicerContext], Awaitable[bytes | None]]


@contextlib.asynccontextmanager
async def serving(say: Say, make=grpc.unary_stream_rpc_method_handler, options=()):
    """A server of ours with one method, which streams unless told otherwise, and its port."""

    def add(_: object, server: grpc.aio.Server) -> None:
        async def method(request: bytes, context: grpc.aio.ServicerContext) -> bytes | None:
            return await say(context)

        handlers = {"Say": make(method, bytes, bytes)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pagewire.test", handlers),))
        server.add_registered_method_handlers("pagewire.test", handlers)

    server = rpc.Server([rpc.Service("pagewire.test", add, None)], options=options)
    port = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    try:
        yield server, port
    finally:
        await server.stop(0)


def channel_to(*ports: int) -> grpc.aio.Channel:
    """A plain client's, which takes the first server that answers."""
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    return grpc.aio.insecure_channel(f"ipv4:{addresses}", [("grpc.use_local_subchannel_pool", 1)])


def say(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall:
    return channel.unary_stream(METHOD)(b"")


@pytest.mark.parametrize("refuses", [True, False])
async def test_an_error_is_not_waited_for_where_the_client_reads_nothing(refuses):
    """Neither by the method nor by a server that stops: the messages before fill the client's window."""
    ended = asyncio.Event()

    async def flood(context: grpc.aio.ServicerContext) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    while True:
                        await context.write(b"x" * 1_000_000)
            if refuses:
                raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT_STALLED", "reads nothing")
            raise RuntimeError("a bug, as the test wants")
        finally:
            ended.set()

    async with serving(flood) as (server, port), channel_to(port) as channel:
        call = say(channel)
        await call.initial_metadata()
        await ended.wait()
        begun = time.monotonic()
        await server.stop(grace_s=60)
        assert time.monotonic() - begun < 20
        call.cancel()


class Over:
    """The context of a call whose client has left or whose deadline has passed, before gRPC cancels it."""

    async def write(self, message: bytes) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')

    async def abort_with_status(self, status: object) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')

    def code(self) -> None:
        return None

    def time_remaining(self) -> float:
        return 0.0


async def streams(request: bytes, context: Over) -> None:
    await context.write(b"a token")


async def refuses(request: bytes, context: Over) -> None:
    raise Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "LATE", "its deadline cannot be met")


async def answers(request: bytes, context: Over) -> bytes:
    return b"a whole answer"


@pytest.mark.parametrize(
    ("behaviour", "make"),
    [
        (streams, grpc.unary_stream_rpc_method_handler),
        (refuses, grpc.unary_stream_rpc_method_handler),
        (answers, grpc.unary_unary_rpc_method_handler),
    ],
)
async def test_a_message_to_a_call_that_is_over_is_no_bug(behaviour, make, caplog):
    """A cancelled call is what gRPC does not log."""
    handler, calls = make(behaviour, bytes, bytes), Calls()
    for interceptor in (Boundary(), calls, last_answers.LastAnswers(connections_age=False)):
        handler = interceptor.around(handler, METHOD)
    with pytest.raises(asyncio.CancelledError):
        await handler.unary_stream(b"", Over())
    (counts,) = calls.counts.values()
    assert sum(counts.num_by_code.values()) == 1
    assert not caplog.records


async def test_clients_that_leave_while_messages_wait_for_them_are_cancelled_calls(caplog):
    """Of some of these messages gRPC says that they were not sent before it cancels the call."""

    async def flood(context: grpc.aio.ServicerContext) -> None:
        while True:
            await context.write(b"x" * 1_000_000)

    async def leave(port: int) -> None:
        async with channel_to(port) as channel:
            call = say(channel)
            await call.read()
            call.cancel()

    async with serving(flood) as (server, port):
        for _ in range(20):
            await asyncio.gather(*(leave(port) for _ in range(10)))
        await server.stop(grace_s=60)
        (counts,) = server.calls.counts.values()
    assert counts.num_by_code == {grpc.StatusCode.CANCELLED: 200}
    assert not caplog.records


async def test_a_server_that_stops_sends_clients_to_another_while_live_calls_finish():
    """A plain client, without health checks and retries, to which GOAWAY is the only sign."""
    gate = asyncio.Event()

    async def wait(context: grpc.aio.ServicerContext) -> None:
        await context.write(b"begun")
        await gate.wait()
        await context.write(b"ended")

    async def answer(context: grpc.aio.ServicerContext) -> None:
        await context.write(b"other")

    async with serving(wait) as (old, old_port), serving(answer) as (_, port), channel_to(old_port, port) as channel:
        live = say(channel)
        assert await live.read() == b"begun"
        stopping = asyncio.create_task(old.stop(grace_s=60))
        while channel.get_state() is grpc.ChannelConnectivity.READY:
            await asyncio.sleep(0.001)
        assert await say(channel).read() == b"other"
        gate.set()
        assert [await live.read(), await live.read()] == [b"ended", grpc.aio.EOF]
        await stopping


async def test_a_server_that_stops_sends_the_last_answers_whole():
    """They are larger than a connection takes at once, so that they are on their way when their methods have ended."""
    answer, num_calls, begun, stops = b"x" * 4_000_000, 8, asyncio.Semaphore(0), asyncio.Event()

    async def wait(context: grpc.aio.ServicerContext) -> bytes:
        begun.release()
        await stops.wait()
        await asyncio.sleep(2 * rpc._SETTLE_S)
        return answer

    async with serving(wait, grpc.unary_unary_rpc_method_handler) as (server, port), channel_to(port) as channel:
        calls = [channel.unary_unary(METHOD)(b"") for _ in range(num_calls)]
        for _ in calls:
            await begun.acquire()
        stopping = asyncio.create_task(server.stop(grace_s=60))
        stops.set()
        assert await asyncio.gather(*calls) == [answer] * num_calls
        await stopping


async def test_an_answer_comes_before_its_call_ends_where_a_server_stops(monkeypatch):
    """So that the connection, which ends with its last call, stays while the answer is read."""
    monkeypatch.setattr(last_answers, "_READ_S", 60)
    gate = asyncio.Event()

    async def answer(context: grpc.aio.ServicerContext) -> bytes:
        await context.send_initial_metadata(())
        await gate.wait()
        return b"answer"

    async with serving(answer, grpc.unary_unary_rpc_method_handler) as (server, port), channel_to(port) as channel:
        call = say(channel)
        await call.initial_metadata()
        stopping = asyncio.create_task(server.stop(grace_s=60))
        while channel.get_state() is grpc.ChannelConnectivity.READY:
            await asyncio.sleep(0.001)
        gate.set()
        assert await call.read() == b"answer"
        ended, _ = await asyncio.wait([stopping, asyncio.create_task(call.code())], timeout=0.3)
        assert not ended
        call.cancel()
        await stopping


@pytest.mark.parametrize("num_bytes, age_s, comes_first", [(100_000, 60, True), (100, 60, False), (100_000, 0, False)])
async def test_so_does_a_large_one_where_any_may_be_the_last_of_an_aged_connection(
    monkeypatch, num_bytes, age_s, comes_first
):
    monkeypatch.setattr(last_answers, "_READ_S", 60)
    options = RouterSettings(model="m", max_connection_age_s=age_s).connection_age_options

    async def answer(context: grpc.aio.ServicerContext) -> bytes:
        return b"x" * num_bytes

    async with serving(answer, grpc.unary_unary_rpc_method_handler, options) as (_, port), channel_to(port) as channel:
        call = say(channel)
        assert await call.read() == b"x" * num_bytes
        code = asyncio.create_task(call.code())
        if comes_first:
            ended, _ = await asyncio.wait([code], timeout=0.3)
            assert not ended
            call.cancel()
        else:
            async with asyncio.timeout(30):
                assert await code is grpc.StatusCode.OK


async def test_a_call_is_not_held_until_its_deadline_or_the_end_of_its_server(monkeypatch):
    monkeypatch.setattr(last_answers, "_READ_S", 60)
    begun, gate = asyncio.Semaphore(0), asyncio.Event()

    async def answer(context: grpc.aio.ServicerContext) -> bytes:
        begun.release()
        await gate.wait()
        return b"answer"

    async with serving(answer, grpc.unary_unary_rpc_method_handler) as (server, port), channel_to(port) as channel:
        calls = [channel.unary_unary(METHOD)(b"", timeout=timeout) for timeout in (30, None)]
        for _ in calls:
            await begun.acquire()
        stopping = asyncio.create_task(server.stop(grace_s=1))
        while channel.get_state() is grpc.ChannelConnectivity.READY:
            await asyncio.sleep(0.001)
        gate.set()
        assert await asyncio.gather(*calls) == [b"answer"] * 2
        await stopping


async def test_a_server_that_stops_does_not_wait_the_whole_grace_for_who_does_not_read_an_answer(monkeypatch):
    monkeypatch.setattr(rpc, "_ANSWER_TIMEOUT_S", 0.3)
    ended = asyncio.Event()

    async def answer(context: grpc.aio.ServicerContext) -> bytes:
        ended.set()
        return b"x" * 1_000_000

    async with serving(answer, grpc.unary_unary_rpc_method_handler) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(preface() + frame(HEADERS, END_HEADERS, 1, opening(METHOD.encode())))
        writer.write(frame(DATA, END_STREAM, 1, grpc_message(b"")))
        await ended.wait()
        begun = time.monotonic()
        await server.stop(grace_s=60)
        assert time.monotonic() - begun < 20
        writer.close()


async def test_what_is_live_at_the_end_of_the_grace_is_told_why_by_its_method():
    broken_off = asyncio.Event()

    async def wait(context: grpc.aio.ServicerContext) -> None:
        await context.write(b"begun")
        await broken_off.wait()
        raise Refusal(grpc.StatusCode.ABORTED, "DRAINING", "it shut down")

    async with serving(wait) as (server, port), channel_to(port) as channel:
        call = say(channel)
        assert await call.read() == b"begun"
        await server.stop(grace_s=0.05, end_live=broken_off.set)
        assert (await call.code(), await call.details()) == (grpc.StatusCode.ABORTED, "it shut down")


@pytest.mark.parametrize(("end_within_s", "code"), [(30, grpc.StatusCode.OK), (0.01, grpc.StatusCode.UNAVAILABLE)])
async def test_what_is_told_to_end_has_a_time_for_that(end_within_s, code):
    told = asyncio.Event()

    async def wait(context: grpc.aio.ServicerContext) -> None:
        await context.write(b"begun")
        await told.wait()
        await asyncio.sleep(0.2)

    async with serving(wait) as (server, port), channel_to(port) as channel:
        call = say(channel)
        assert await call.read() == b"begun"
        await server.stop(grace_s=0, end_live=told.set, end_within_s=end_within_s)
        assert await call.code() is code


async def test_a_server_that_withdraws_tells_its_watchers_and_takes_calls_as_before():
    async def answer(context: grpc.aio.ServicerContext) -> None:
        await context.write(b"answer")

    async with serving(answer) as (server, port), channel_to(port) as channel:
        watch = HealthStub(channel).Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        await server.withdraw()
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        await server.set_serving(True)
        assert await say(channel).read() == b"answer"
        alive = await HealthStub(channel).Check(HealthCheckRequest(service=rpc.LIVENESS))
        assert alive.status == HealthCheckResponse.SERVING
        assert (await HealthStub(channel).Check(HealthCheckRequest())).status == HealthCheckResponse.NOT_SERVING
        watch.cancel()


@pytest.mark.slow
@pytest.mark.long
async def test_calls_outlast_half_a_minute_in_which_a_busy_server_begins_none():
    """After that gRPC cancels them by default, as a burst of thousands showed on a slow machine."""
    calls: list[grpc.Call] = []

    async def answer(context: grpc.aio.ServicerContext) -> bytes:
        if not calls:
            # Not of asyncio's: they are on their way at once.
            calls.extend(method.future(b"") for _ in range(20))
            time.sleep(32)  # noqa: ASYNC251 - the loop is to stand still
        return b"answer"

    async with serving(answer, grpc.unary_unary_rpc_method_handler) as (_, port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            method = channel.unary_unary(METHOD)
            assert await asyncio.to_thread(method, b"") == b"answer"
            assert await asyncio.to_thread(lambda: [call.result() for call in calls]) == [b"answer"] * 20


def test_grpc_knows_every_option_that_we_set():
    """It ignores others without a word; one with `recv` in its name has kept peers' clients from pinging for years."""
    core = next(Path(grpc.__file__).parent.glob("_cython/cygrpc*.so")).read_bytes()
    aged = RouterSettings(model="m", max_connection_age_s=60)
    options = [*rpc.server_options(1), *rpc.client_options(), *aged.connection_age_options]
    assert [name for name, _ in options if name.encode() + b"\0" not in core] == []
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms" not in core


def test_servers_let_clients_ping_every_ten_seconds_and_notice_themselves_when_one_is_gone():
    options = dict(rpc.server_options(1))
    assert options["grpc.http2.min_ping_interval_without_data_ms"] <= 10_000
    assert options["grpc.http2.max_ping_strikes"] == 0, "none of them ends a connection"
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] <= 60_000
    assert options["grpc.http2.max_pings_without_data"] == 0, "through any silence"
    # Our own clients ping no faster than our servers allow by the interval alone.
    assert (
        dict(rpc.client_options())["grpc.keepalive_time_ms"] >= options["grpc.http2.min_ping_interval_without_data_ms"]
    )


async def test_a_client_at_a_unix_socket_writes_no_pings_behind_what_it_receives(tmp_path):
    """One that is written when the server has closed already would cost the client what it has not read."""
    frames: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(MAGIC))
        writer.write(frame(SETTINGS, 0, 0))
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3]))
                frames.append(head[3])
                stream = int.from_bytes(head[5:])
                if head[3] == HEADERS:
                    begun = header_block((b":status", b"200"), (b"content-type", b"application/grpc"))
                    writer.write(frame(HEADERS, END_HEADERS, stream, begun))
                    writer.write(frame(DATA, 0, stream, grpc_message(b"token")))
        writer.close()

    path = tmp_path / "socket"
    async with await asyncio.start_unix_server(serve, path), rpc.dial(f"unix:{path}") as channel:
        # What a call writes is behind what the answer to the one before made the client write.
        for _ in range(3):
            assert await say(channel).read() == b"token"
    assert frames.count(HEADERS) == 3
    assert PING not in frames


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nonsense", "write HOST:PORT, "),
        ("127.0.0.1", "write HOST:PORT, "),
        ("127.0.0.1:", "write HOST:PORT, "),
        (":0", "write HOST:PORT, "),
        ("::1", r"write HOST:PORT, \[HOST\]:PORT or unix:PATH"),
        ("unix:", "write HOST:PORT, "),
        ("127.0.0.1:99999", "ports go from 0 to 65535"),
        ("127.0.0.1:-1", "ports go from 0 to 65535"),
        ("nobody.invalid:53001", "its host is not known"),
        ("unix:/no/such/folder/s", "there is no folder /no/such/folder"),
        (f"unix:/tmp/{'s' * 120}", "a socket's path has 107 bytes at most"),
    ],
)
async def test_an_address_that_can_not_be_bound_is_named_with_what_is_wrong(address, words):
    with pytest.raises(CannotListen, match=f"cannot listen on {address}: {words}"):
        await rpc.Server([]).start(address)


@pytest.mark.parametrize("path", ["s:99999", "99999"])
async def test_a_sockets_path_may_end_like_a_port(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = rpc.Server([])
    await server.start(f"unix:{path}")
    assert (tmp_path / path).is_socket()
    with pytest.raises(CannotListen, match="another process does"):
        await rpc.Server([]).start(f"unix:{path}")
    await server.stop(0)


def test_an_error_says_at_most_what_trailers_hold():
    """Many peers take 8 KiB of them."""
    refusal = invalid_argument([Violation("f" * 500, "d" * 500)] * 40)
    assert refusal.violations[0] == Violation("f" * 159 + "…", "d" * 159 + "…")
    assert refusal.violations[16:] == (Violation("request", "24 more violations are left out here"),)
    status = to_status(refusal)
    assert (len(status.message), status.message[-1]) == (1024, "…")
    assert status.ByteSize() < 8192
    as_many = (Violation("f" * 160, "d" * 160),) * 16
    assert invalid_argument(as_many).violations == as_many
