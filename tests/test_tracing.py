"""One trace from the caller through router, scheduler and worker, as a collector gets it."""

import asyncio
import contextlib
from collections import Counter

import fakes
import grpc
import pytest
from fakes import FakeWorker, outputs_of, request
from otlp_fakes import Collector, collector
from test_session import HandRouter

from protos import session_pb2 as pb_session
from protos.columns import pack
from protos.errors import CannotTrace
from protos.pagewire.v1 import generation_pb2 as pb
from protos.rpc import dial
from protos.trace_context import TraceContext

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE_ID}-b7ad6b7169203331-01"
GENERATE = "pagewire.v1.GenerationService/Generate"
COMPLETE = "pagewire.v1.GenerationService/Complete"
TRACED = (("traceparent", CALLER), ("tracestate", "vendor=x"))


@pytest.fixture(autouse=True)
def _batches_at_once(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@contextlib.asynccontextmanager
async def traced_plane(worker: FakeWorker | None = None, **scheduler_options):
    """A control plane whose router and scheduler send their spans to a collector."""
    async with collector() as received:
        otlp = {"otlp_endpoint": received.endpoint}
        async with fakes.control_plane(worker, router=otlp, **otlp, **scheduler_options) as plane:
            yield plane, received


async def spans_below(received: Collector, name: str, *expected: str) -> dict[str, list]:
    """The span `name` and its children by name, once all that `expected` names are there."""
    await received.until(lambda seen: seen.named(name))
    (root,) = received.named(name)

    def children() -> list:
        return [span for span in received.spans if span.parent_id == root.span_id]

    await received.until(lambda _: sorted(span.name for span in children()) == sorted(expected))
    found: dict[str, list] = {"root": [root]}
    for span in children():
        assert span.trace_id == root.trace_id
        assert root.begin_ns - 1e6 <= span.begin_ns <= span.end_ns <= root.end_ns + 50e6
        found.setdefault(span.name, []).append(span)
    return found


async def test_a_request_is_one_trace_under_the_span_of_its_caller():
    async with traced_plane() as (plane, received):
        wanted = request("hello", max_tokens=9)
        wanted.request_id = "mine"
        async for _ in plane.generation.Generate(wanted, metadata=TRACED):
            pass
        spans = await spans_below(received, GENERATE, "tokenize", "queue", "prefill", "decode")
        (root,) = spans["root"]
        assert (root.trace_id, root.parent_id, root.tracestate) == (TRACE_ID, "b7ad6b7169203331", "vendor=x")
        assert root.service == "pagewire-router"
        assert root.error is None
        facts = {
            "rpc.system": "grpc",
            "rpc.method": "Generate",
            "rpc.grpc.status_code": 0,
            "gen_ai.operation.name": "text_completion",
            "gen_ai.response.model": "fake",
            "gen_ai.response.id": "mine",
            "gen_ai.request.max_tokens": 9,
            "gen_ai.usage.input_tokens": 5,
            "gen_ai.usage.output_tokens": 9,
        }
        assert {name: root.attributes[name] for name in facts} == facts
        assert 0 < root.attributes["gen_ai.response.time_to_first_chunk"] <= (root.end_ns - root.begin_ns) / 1e9
        assert [value.string_value for value in root.attributes["gen_ai.response.finish_reasons"].values] == ["length"]
        queue, prefill, decode = (spans[name][0] for name in ("queue", "prefill", "decode"))
        assert {span.service for span in (queue, prefill, decode)} == {"pagewire-scheduler"}
        assert queue.end_ns == pytest.approx(prefill.begin_ns, abs=1e6)
        assert prefill.end_ns == pytest.approx(decode.begin_ns, abs=1e6)
        assert decode.attributes["gen_ai.usage.output_tokens"] == 9
        assert queue.tracestate == "vendor=x"


async def test_the_span_of_a_chat_says_that_it_is_one():
    async with traced_plane() as (plane, received):
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
        await plane.generation.Complete(pb.GenerateRequest(chat=chat, stop=pb.StopConditions(max_tokens=2)))
        spans = await spans_below(received, COMPLETE, "tokenize", "queue", "prefill", "decode")
        assert spans["root"][0].attributes["gen_ai.operation.name"] == "chat"


async def test_the_worker_gets_the_trace_only_with_the_steps_of_the_prompt():
    worker = FakeWorker()
    async with traced_plane(worker, max_num_batched_tokens=8, max_num_seqs=8) as (plane, received):
        await plane.generation.Complete(request("x" * 20, max_tokens=5), metadata=TRACED)
        (root,) = (await spans_below(received, COMPLETE, "tokenize", "queue", "prefill", "decode"))["root"]
        traces = [[row.traceparent for row in step.traces] for step in worker.requests]
        context = f"00-{TRACE_ID}-{root.span_id}-01"
        assert traces == [[context]] * 3 + [[]] * 4, "8, 8 and 4 tokens, and four decodes"
        assert worker.requests[0].traces[0].tracestate == "vendor=x"


async def test_a_step_that_computes_one_token_of_a_prompt_belongs_to_its_trace_too():
    worker = FakeWorker()
    async with traced_plane(worker) as (plane, _):
        await plane.generation.Complete(request("x", max_tokens=3), metadata=TRACED)
        assert [len(step.traces) for step in worker.requests] == [1, 0, 0]


async def test_a_request_that_moves_on_ends_here_without_an_error_and_one_that_moved_in_has_all_phases():
    worker = FakeWorker()
    async with collector() as received:
        async with (
            fakes.control_plane(worker, otlp_endpoint=received.endpoint, drain_grace_s=0.1) as plane,
            dial(plane.scheduler_address) as channel,
        ):
            router = HandRouter(channel)
            await router.open()
            begun = pb_session.Continuation(progress=[pb_session.Progress(token_ids=pack([7, 8]))])
            for handle in (1, 2):
                await router.submit(handle, f"r{handle}", max_tokens=150, traceparent=CALLER, continuation=begun)
                while handle not in {row[0] for row in outputs_of(await router.next("step_outputs"))}:
                    pass
            worker.gate.clear()
            await router.call.write(pb_session.SessionRequest(cancel=pb_session.Cancel(handle=1, moved=True)))
            await received.until(lambda seen: seen.named("decode"))
            plane.stop_router.set()
        await received.until(lambda seen: len(seen.named("decode")) == 2)
        phases = Counter((span.name, span.error, "pagewire.moved" in span.attributes) for span in received.spans)
        assert phases == {("queue", None, False): 2, ("prefill", None, False): 2, ("decode", None, True): 2}


async def test_each_preemption_is_a_span_with_its_reason():
    worker = FakeWorker(num_blocks=12)
    async with traced_plane(worker, watermark=0) as (plane, received):
        first, second = request("a" * 16, max_tokens=20), request("b" * 16, max_tokens=20)
        first.request_id, second.request_id = "first", "second"
        worker.gate.clear()
        older = asyncio.ensure_future(plane.generation.Complete(first))
        await plane.until(lambda state: state.num_running + state.num_waiting == 1)
        younger = asyncio.ensure_future(_drain(plane, second))
        await plane.until(lambda state: state.num_running + state.num_waiting == 2)
        worker.gate.set()
        await asyncio.gather(older, younger)
        spans = await spans_below(received, GENERATE, "tokenize", "queue", "prefill", "decode", "preempted")
        (preempted,) = spans["preempted"]
        assert preempted.attributes["pagewire.preempted_by"] == "first"
        assert preempted.attributes["pagewire.reason"].startswith("recompute: ")
        (decode,) = spans["decode"]
        assert decode.attributes["pagewire.preemptions"] == 1
        assert decode.begin_ns <= preempted.begin_ns < preempted.end_ns <= decode.end_ns


async def _drain(plane, wanted: pb.GenerateRequest) -> None:
    async for _ in plane.generation.Generate(wanted, metadata=TRACED):
        pass


async def test_every_span_that_a_cancellation_ended_says_so():
    async with traced_plane() as (plane, received):
        call = plane.generation.Generate(request(max_tokens=150), metadata=TRACED)
        await call.read()
        call.cancel()
        spans = await spans_below(received, GENERATE, "tokenize", "queue", "prefill", "decode")
        assert spans["root"][0].error == "CANCELLED"
        assert spans["root"][0].attributes["rpc.grpc.status_code"] == grpc.StatusCode.CANCELLED.value[0]
        assert spans["decode"][0].error.startswith("CANCELLED")
        assert spans["prefill"][0].error is None
        assert not any("pagewire.moved" in span.attributes for each in spans.values() for span in each)


async def test_a_request_cancelled_while_it_waits_has_only_a_queue_span():
    worker = FakeWorker()
    async with traced_plane(worker, max_num_seqs=1) as (plane, received):
        worker.gate.clear()
        running = plane.generation.Generate(request(max_tokens=3), metadata=(("traceparent", CALLER[:-1] + "0"),))
        await plane.until(lambda state: state.num_running == 1)
        waiting = plane.generation.Generate(request(max_tokens=3), metadata=TRACED)
        await plane.until(lambda state: state.num_waiting == 1)
        waiting.cancel()
        spans = await spans_below(received, GENERATE, "tokenize", "queue")
        assert spans["queue"][0].error.startswith("CANCELLED")
        worker.gate.set()
        async for _ in running:
            pass


async def test_a_refused_request_is_a_span_with_an_error_and_its_reason():
    async with traced_plane() as (plane, received):
        with pytest.raises(grpc.aio.AioRpcError):
            await plane.generation.Complete(request(""), metadata=TRACED)
        spans = await spans_below(received, COMPLETE)
        assert spans["root"][0].error == "INVALID_ARGUMENT: text: must not be empty"
        assert spans["root"][0].attributes["error.type"] == "INVALID_REQUEST"


async def test_a_failure_at_the_scheduler_shows_there_and_at_the_router():
    worker = FakeWorker(explode=3)
    async with traced_plane(worker, max_failed_steps=1) as (plane, received):
        with pytest.raises(grpc.aio.AioRpcError):
            await plane.generation.Complete(request(max_tokens=3), metadata=TRACED)
        spans = await spans_below(received, COMPLETE, "tokenize", "queue", "prefill", "preempted")
        assert spans["prefill"][0].error.startswith("INTERNAL: request ")
        assert spans["root"][0].error.startswith("INTERNAL: request ")
        assert spans["preempted"][0].attributes["pagewire.reason"] == "recompute: the worker was lost"
        worker.explode = 0


async def test_a_caller_that_does_not_sample_is_not_traced():
    worker = FakeWorker()
    async with traced_plane(worker) as (plane, received):
        unsampled = CALLER[:-2] + "00"
        await plane.generation.Complete(request(max_tokens=3), metadata=(("traceparent", unsampled),))
        await plane.generation.Complete(request(max_tokens=3))
        await spans_below(received, COMPLETE, "tokenize", "queue", "prefill", "decode")
        assert all(span.trace_id != TRACE_ID for span in received.spans)
        assert not any(step.traces for step in worker.requests[:3])


async def test_the_context_of_the_caller_passes_through_a_router_without_an_endpoint():
    async with collector() as received, fakes.control_plane(otlp_endpoint=received.endpoint) as plane:
        await plane.generation.Complete(request(max_tokens=3), metadata=TRACED)
        await received.until(lambda seen: len(seen.spans) == 3)
        assert {(span.name, span.parent_id) for span in received.spans} == {
            (name, "b7ad6b7169203331") for name in ("queue", "prefill", "decode")
        }


async def test_a_dead_collector_delays_neither_a_request_nor_the_end():
    dead = {"otlp_endpoint": "http://127.0.0.1:1"}
    async with asyncio.timeout(20), fakes.control_plane(router=dead, **dead) as plane:
        for _ in range(20):
            await plane.generation.Complete(request(max_tokens=3), metadata=TRACED)


def test_the_missing_extra_is_named(monkeypatch):
    import sys

    from protos import telemetry
    from protos.process import Settings

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "protos.tracing", raising=False)
    with pytest.raises(CannotTrace, match=r"pip install -e '.\[otel\]'"):
        telemetry.start_tracer("router", Settings(otlp_endpoint="http://127.0.0.1:4317"))


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        CALLER.upper(),
        CALLER.replace("00-", "ff-", 1),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        CALLER + "-more",
        CALLER + "\n",
        "01-" + CALLER[3:] + "-" + "x" * 100,
    ],
)
def test_a_broken_traceparent_is_no_context(traceparent):
    assert TraceContext.parse(traceparent) is None


def test_a_later_version_of_traceparent_may_have_more_fields():
    context = TraceContext.parse("01-" + CALLER[3:] + "-more")
    assert context is not None
    assert (context.trace_id, context.sampled) == (TRACE_ID, True)
