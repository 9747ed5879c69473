"""The router's line for each call, and the id that a call goes by."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
from fakes import ControlPlane, FakeWorker, control_plane, request, running

import router.__main__ as router_main
from pagewire.launch import free_port
from protos.calls import Call, Calls
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1 import introspection_pb2
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.rpc import dial, wait_for_serving
from router.config import RouterSettings
from router.tokenizer import Tokenizer

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def lines(caplog):
    """The facts of the access log's lines, once there are so many: a call's line comes behind its answer."""
    caplog.set_level(logging.DEBUG, logger="router.access")

    def facts() -> list[dict[str, object]]:
        names = "method request_id peer code reason error prompt_tokens output_tokens ttft_ms cached_tokens queue_ms "
        names += "preemptions total_ms trace_id"
        return [
            {"event": record.message, "level": record.levelname}
            | {name: value for name, value in vars(record).items() if name in names.split()}
            for record in caplog.records
            if record.name == "router.access" and record.method not in ("GetState",)
        ]

    async def wait(number: int) -> list[dict[str, object]]:
        while len(facts()) < number:
            await asyncio.sleep(0.005)
        return facts()

    return wait


async def test_an_answered_request_is_one_line_with_all_there_is_to_tell(lines):
    async with control_plane() as plane:
        wanted = request("hello", max_tokens=9)
        wanted.request_id = "mine"
        await plane.generation.Complete(wanted, metadata=(("traceparent", TRACE),))
        (line,) = await lines(1)
        times = [line.pop(name) for name in ("queue_ms", "ttft_ms", "total_ms")]
        assert times == sorted(times)
        assert str(line.pop("peer")).startswith("unix:")
        assert line == {
            "event": "request",
            "level": "INFO",
            "method": "Complete",
            "request_id": "mine",
            "code": "OK",
            "prompt_tokens": 5,
            "output_tokens": 9,
            "cached_tokens": 0,
            "preemptions": 0,
            "trace_id": TRACE.split("-")[1],
        }


async def test_a_watch_at_the_operators_port_is_a_line_that_says_why_it_ended(lines):
    async with control_plane(router={"admin_listen": f"127.0.0.1:{free_port()}"}) as plane:
        watch = plane.introspection.WatchState(introspection_pb2.WatchStateRequest())
        await watch.read()
        plane.stop_router.set()
        (line,) = await lines(1)
        facts = [line[name] for name in ("event", "level", "method", "code", "reason")]
        assert facts == ["call", "DEBUG", "WatchState", "UNAVAILABLE", "DRAINING"]


async def test_the_log_tells_where_the_operators_port_is(caplog):
    caplog.set_level(logging.INFO, logger="router")
    port = free_port()
    async with control_plane(router={"admin_listen": f"127.0.0.1:{port}"}):
        (told,) = [record for record in caplog.records if record.message == "listening for operators"]
        assert (vars(told)["address"], vars(told)["port"]) == (f"127.0.0.1:{port}", port)


async def test_a_refused_request_is_a_line_with_its_reason(lines):
    async with control_plane() as plane:
        with pytest.raises(grpc.aio.AioRpcError):
            await plane.generation.Complete(request(""))
        (line,) = await lines(1)
        assert (line["level"], line["code"], line["reason"]) == ("INFO", "INVALID_ARGUMENT", "INVALID_REQUEST")
        assert line["error"] == "text: must not be empty"
        assert "output_tokens" not in line


async def test_bytes_that_are_no_request_are_a_line_too(lines):
    async with control_plane() as plane:
        call = plane.channel.unary_unary("/pagewire.v1.GenerationService/Complete")
        with pytest.raises(grpc.aio.AioRpcError):
            await call(b"\xff\xff")
        (line,) = await lines(1)
        assert (line["level"], line["code"]) == ("INFO", "INVALID_ARGUMENT")


async def test_calls_that_generate_nothing_are_told_quietly(lines):
    async with control_plane() as plane:
        await plane.generation.Tokenize(pb.TokenizeRequest(text="hello"))
        with pytest.raises(grpc.aio.AioRpcError):
            await plane.generation.GetModel(pb.GetModelRequest(model="other"))
        told = [(line["event"], line["level"], line["method"], line["code"]) for line in await lines(2)]
        assert told == [("call", "DEBUG", "Tokenize", "OK"), ("call", "DEBUG", "GetModel", "NOT_FOUND")]


async def test_a_request_that_its_client_gave_up_is_a_line_with_what_it_got(lines):
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        call = plane.generation.Generate(request(max_tokens=150))
        await call.read()
        call.cancel()
        await plane.until(lambda state: state.num_running == 0)
        (line,) = await lines(1)
        assert line["code"] == "CANCELLED"
        assert line["output_tokens"] >= 1
        worker.gate.clear()
        with pytest.raises(grpc.aio.AioRpcError):
            await plane.generation.Complete(request(), timeout=0.05)
        worker.gate.set()
        assert (await lines(2))[1]["code"] == "DEADLINE_EXCEEDED"


async def test_a_call_that_outlasts_a_drain_is_a_line(lines):
    worker = FakeWorker()
    async with control_plane(worker, router={"drain_grace_s": 0.2}) as plane:
        worker.gate.clear()
        live = plane.generation.Generate(request(max_tokens=3))
        await plane.until(lambda state: state.num_running == 1)
        plane.stop_router.set()
        with pytest.raises(grpc.aio.AioRpcError):
            await live.read()
        worker.gate.set()
        assert ("UNAVAILABLE", "DRAINING") in [(line["code"], line.get("reason")) for line in await lines(1)]


# The id


async def _id_of(call) -> tuple[str, str]:
    """The id in the answer's header, and in its messages."""
    answer = await call
    return dict(await call.initial_metadata())["x-request-id"], answer.request_id


async def test_the_header_names_a_request_that_brings_no_id():
    async with control_plane() as plane:
        named = (("x-request-id", "from-the-mesh"),)
        wanted = request(max_tokens=2)
        assert await _id_of(plane.generation.Complete(wanted, metadata=named)) == ("from-the-mesh", "from-the-mesh")
        wanted.request_id = "mine"
        assert await _id_of(plane.generation.Complete(wanted, metadata=named)) == ("mine", "mine")


async def test_a_request_without_any_id_is_told_the_one_it_got():
    async with control_plane() as plane:
        header, message = await _id_of(plane.generation.Complete(request(max_tokens=2)))
        assert header == message
        assert header.startswith("req-")


async def test_requests_that_share_a_header_live_side_by_side():
    worker = FakeWorker()
    async with control_plane(worker) as plane:
        worker.gate.clear()
        named = (("x-request-id", "shared"),)
        calls = [plane.generation.Complete(request(max_tokens=2), metadata=named) for _ in range(2)]
        await plane.until(lambda state: state.num_running + state.num_waiting == 2)
        worker.gate.set()
        ids = sorted([(await _id_of(call))[1] for call in calls])
        assert ids[0] == "shared"
        assert ids[1].startswith("shared-")


@contextlib.asynccontextmanager
async def another_router(plane: ControlPlane) -> AsyncIterator[GenerationServiceStub]:
    """Beside the first one, with a session of its own to the same scheduler."""
    address = f"unix:{plane.directory}/other"
    settings = RouterSettings(model=plane.directory, listen=address, scheduler=plane.scheduler_address)
    tokenizer = Tokenizer(Path(plane.directory) / "model")
    async with running(lambda stop: router_main.serve(settings, tokenizer, stop)), dial(address) as channel:
        await wait_for_serving(channel)
        yield GenerationServiceStub(channel)


async def test_requests_that_share_a_header_live_side_by_side_at_two_routers():
    """An application that hands its caller's header on asks for several answers at once, and a mesh spreads them."""
    worker = FakeWorker()
    async with control_plane(worker) as plane, another_router(plane) as other:
        worker.gate.clear()
        named = (("x-request-id", "shared"),)
        first = plane.generation.Complete(request(max_tokens=2), metadata=named)
        await plane.until(lambda state: state.num_running + state.num_waiting == 1)
        second = other.Complete(request(max_tokens=2), metadata=named)
        await plane.until(lambda state: state.num_running + state.num_waiting == 2)
        worker.gate.set()
        assert await _id_of(first) == ("shared", "shared")
        header, message = await _id_of(second)
        assert header == message
        assert header.startswith("shared-")


async def test_an_id_of_the_clients_own_is_refused_where_another_router_has_it():
    worker = FakeWorker()
    wanted = request(max_tokens=2)
    wanted.request_id = "mine"
    async with control_plane(worker) as plane, another_router(plane) as other:
        worker.gate.clear()
        first = plane.generation.Complete(wanted)
        await plane.until(lambda state: state.num_running + state.num_waiting == 1)
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await other.Complete(wanted)
        assert info.value.code() is grpc.StatusCode.ALREADY_EXISTS
        worker.gate.set()
        await first


async def test_a_header_that_is_too_long_is_refused_by_its_name():
    async with control_plane() as plane:
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await plane.generation.Complete(request(), metadata=(("x-request-id", "x" * 200),))
        assert info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert info.value.details().startswith("x-request-id: must be at most")


async def test_a_request_that_is_not_let_in_is_answered_without_headers_so_that_it_can_be_tried_again():
    """A client retries by itself only what has ended before any header came."""
    worker = FakeWorker()
    async with control_plane(worker, max_num_seqs=1, max_waiting_requests=1) as plane:
        worker.gate.clear()
        calls = [plane.generation.Complete(request(max_tokens=2)) for _ in range(2)]
        await plane.until(lambda state: (state.num_running, state.num_waiting) == (1, 1))
        refused = plane.generation.Generate(request(max_tokens=2))
        with pytest.raises(grpc.aio.AioRpcError):
            await refused.read()
        assert "x-request-id" not in dict(await refused.initial_metadata())
        worker.gate.set()
        await asyncio.gather(*calls)


class Ended(Calls[Call]):
    """Keeps the calls that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[Call] = []

    def end(self, call: Call, context: object) -> None:
        self.ended.append(call)


async def test_a_call_is_known_by_its_context_until_it_has_ended():
    calls, context = Ended(), Mock(code=lambda: None)

    async def answer(request: object, context: object) -> object:
        assert calls.of(context).method == "Method"
        return request

    handler = calls.around(grpc.unary_unary_rpc_method_handler(answer), "/some.Service/Method")
    assert await handler.unary_unary("asked", context) == "asked"
    with pytest.raises(KeyError):
        calls.of(context)
    (call,) = calls.ended
    assert (call.service, call.kind, call.code) == ("some.Service", "unary", grpc.StatusCode.OK)
    assert 0 <= call.total_s <= time.monotonic() - call.arrival
