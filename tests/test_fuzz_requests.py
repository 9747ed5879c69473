"""Any message to any method is answered, or refused as docs/errors.md says, and leaves nothing behind.

Hypothesis makes them from the descriptors (`message_strategies`): every field of every request, good and wild values,
and bytes that are no message. They go through a real router and scheduler, with so few blocks that requests preempt
each other. `make fuzz` makes many more.
"""

import asyncio
import math
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import hypothesis.strategies as st
import pytest
from fakes import EOS, TEXT, ControlPlane, FakeWorker, control_plane, scripted
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from hypothesis import HealthCheck, given, settings
from message_strategies import damaged, messages

from protos.errors import Refusal, from_status
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1 import introspection_pb2

NUM_EXAMPLES = int(os.environ.get("PAGEWIRE_FUZZ_EXAMPLES", "300"))
# For one request with a long answer; it finds what hangs.
TIMEOUT_S = 20
ERRORS = Path(__file__).parent.parent / "docs" / "errors.md"
RETRYABLE = {"RESOURCE_EXHAUSTED", "UNAVAILABLE", "ABORTED"}

GENERATION = pb.DESCRIPTOR.services_by_name["GenerationService"]
INTROSPECTION = introspection_pb2.DESCRIPTOR.services_by_name["IntrospectionService"]
PROMPTS = {"prompt", *(field.name for field in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt"].fields)}
METHODS = {method.full_name: method for service in (GENERATION, INTROSPECTION) for method in service.methods}


def documented() -> dict[str, set[str]]:
    """The codes that a client may see, by reason, as the page lists them, without those of our own bugs."""
    public = ERRORS.read_text().split("## What a client may see")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", public, re.MULTILINE)
    assert len(rows) > 10
    return {reason: set(re.findall(r"\w+", codes)) for reason, codes in rows if "INTERNAL" not in codes}


DOCUMENTED = documented()


class SmallWorker(FakeWorker):
    """The scripted worker with a short context and few blocks; some of its sequences end by themselves."""

    def __init__(self) -> None:
        super().__init__(script=self._say, num_blocks=18, num_cpu_blocks=12)

    async def GetInfo(self, request: Message, context: grpc.aio.ServicerContext) -> Message:
        info = await super().GetInfo(request, context)
        info.context_length = 64
        return info

    @staticmethod
    def _say(sequence_index: int, output_index: int) -> int:
        return EOS if output_index % 23 == 9 + sequence_index else scripted(sequence_index, output_index)


@dataclass
class Target:
    """A control plane to throw messages at.

    Attributes:
        outcomes: "OK", or the reason of the refusal, and how often.
    """

    plane: ControlPlane
    loop: asyncio.AbstractEventLoop
    outcomes: Counter[str] = field(default_factory=Counter)

    async def call(self, method: str, data: bytes) -> list[Message] | Refusal:
        """Sends bytes as a request; returns the answers, or the refusal, which must be a documented one."""
        descriptor = METHODS[method]
        service, _, name = method.rpartition(".")
        many = self.plane.channel.unary_stream if descriptor.server_streaming else self.plane.channel.unary_unary
        call = many(f"/{service}/{name}", response_deserializer=_class_of(descriptor.output_type).FromString)(
            data, timeout=TIMEOUT_S
        )
        try:
            if not descriptor.server_streaming:
                answers = [await call]
            elif name == "WatchState":
                answers = [await anext(aiter(call))]
                call.cancel()
            else:
                answers = [message async for message in call]
        except grpc.aio.AioRpcError as error:
            refusal = checked_refusal(error)
            self.outcomes[refusal.reason] += 1
            return refusal
        self.outcomes["OK"] += 1
        return answers

    async def generate(self, request: pb.GenerateRequest, kind: str = "Generate") -> None:
        """Asks for text; leaves out what refusals name until there is an answer, and checks it."""
        for _ in range(6):
            answers = await self.call(f"pagewire.v1.GenerationService.{kind}", request.SerializeToString())
            if not isinstance(answers, Refusal):
                return check_answer(request, answers)
            if answers.reason == "RESOURCE_EXHAUSTED":  # the queue is full, as the test wants
                return None
            if answers.reason == "TAKEN_OVER":  # another call resumes the same request at the same time
                return None
            if answers.reason == "MODEL_NOT_FOUND":
                request.model = ""
            if answers.reason == "REQUEST_ID_IN_USE":
                request.request_id = ""
            lacks_something = any(violation.field.startswith("resume.") for violation in answers.violations)
            if lacks_something or (request.HasField("resume") and not request.request_id):
                request.ClearField("resume")
                continue
            for violation in answers.violations:
                leave_out(request, violation.field)
        raise AssertionError(f"refused again and again: {request}")

    async def rest(self) -> None:
        """Returns when nothing is live; then no block may be held."""
        async with asyncio.timeout(TIMEOUT_S):
            state = await self.plane.until(lambda s: not s.num_running + s.num_waiting + s.num_swapped)
        assert state.block_pool.num_held == 0
        assert state.block_pool.num_swap_free == state.block_pool.num_swap_total

    async def hold(
        self,
        strategy: st.SearchStrategy[Any],
        check: Callable[[Any], Coroutine[Any, Any, None]],
        num_examples: int = NUM_EXAMPLES,
    ) -> None:
        """Draws examples in a thread, and checks each here."""

        @settings(
            max_examples=num_examples,
            derandomize="PAGEWIRE_FUZZ_EXAMPLES" not in os.environ,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def run(example: Any) -> None:
            async def once() -> None:
                await check(example)
                await self.rest()

            asyncio.run_coroutine_threadsafe(once(), self.loop).result()

        await asyncio.to_thread(run)


@asynccontextmanager
async def target() -> AsyncIterator[Target]:
    async with control_plane(SmallWorker(), max_num_seqs=6, max_waiting_requests=4, watermark=0.0) as plane:
        target = Target(plane, asyncio.get_running_loop())
        yield target
        assert await plane.text(max_tokens=3) == TEXT[:3], "it goes on"


def _class_of(descriptor: Any) -> type[Message]:
    return getattr(introspection_pb2 if hasattr(introspection_pb2, descriptor.name) else pb, descriptor.name)


def checked_refusal(error: grpc.aio.AioRpcError) -> Refusal:
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    assert details is not None, error
    refusal = from_status(error.code(), error.details() or "", Status.FromString(details))
    assert error.code().name in DOCUMENTED.get(refusal.reason, ()), error
    assert refusal.message
    assert len(details) < 8192, "many peers accept no longer trailers"
    assert bool(refusal.violations) == (refusal.reason in ("INVALID_REQUEST", "FIELD_NOT_SUPPORTED")), error
    # Another call has the answer now; two that took it from each other would do so for ever.
    is_retryable = error.code().name in RETRYABLE and refusal.reason != "TAKEN_OVER"
    assert (refusal.retry_delay_ms is not None) == is_retryable, error
    return refusal


def leave_out(request: pb.GenerateRequest, path: str) -> None:
    """Clears the field that a violation names; a prompt is replaced by a good one."""
    if path == "request":  # more violations than are listed
        return
    names = re.sub(r"\[[^]]*\]", "", path).split(".")
    if names[0] in PROMPTS:
        request.text = "say "
        return
    message: Any = request
    for parent in names[:-1]:
        message = getattr(message, parent)
    message.ClearField(names[-1])


def check_answer(request: pb.GenerateRequest, answers: list[pb.GenerateResponse]) -> None:
    """Checks what holds for any answer to `request`, whatever it asks for."""
    n = request.sampling.n if request.sampling.HasField("n") else 1
    assert not any(answer.HasField("usage") for answer in answers[:-1])
    last = answers[-1]
    assert last.usage.prompt_tokens > 0
    assert last.timings.total_ms >= last.timings.ttft_ms >= 0
    if request.request_id:
        assert {answer.request_id for answer in answers} == {request.request_id}
    ends = [output for answer in answers for output in answer.outputs if output.finish_reason]
    known = {row.index for row in request.resume.received if row.ended}
    assert sorted(output.index for output in ends) == sorted({*range(n)} - known), "each sequence ends once"
    assert all(pb.FINISH_REASON_STOP <= output.finish_reason <= pb.FINISH_REASON_IGNORED for output in ends)
    assert all(math.isfinite(output.cumulative_logprob) for output in ends)
    outputs = [output for answer in answers for output in answer.outputs]
    num_tokens = sum(len(output.token_ids) for output in outputs)
    assert num_tokens <= last.usage.completion_tokens
    if not request.output.HasField("logprobs"):
        assert not any(output.logprobs for output in outputs)
    elif request.output.token_ids:
        assert sum(len(output.logprobs) for output in outputs) == num_tokens
    for logprobs in (logprobs for output in outputs for logprobs in output.logprobs):
        assert len(logprobs.top) == request.output.logprobs


def tame_and_wild(kind: type[Message]) -> st.SearchStrategy[Message]:
    return messages(kind, wild=False) | messages(kind, wild=True)


def requests_of_all_methods() -> st.SearchStrategy[tuple[str, Message]]:
    pairs = [st.tuples(st.just(name), tame_and_wild(_class_of(method.input_type))) for name, method in METHODS.items()]
    return st.one_of(pairs)


async def test_every_generate_request_is_answered_after_leaving_out_what_its_refusals_name():
    async with target() as reached:
        await reached.hold(tame_and_wild(pb.GenerateRequest), reached.generate)
        assert {"INVALID_REQUEST", "FIELD_NOT_SUPPORTED", "MODEL_NOT_FOUND"} < set(reached.outcomes)
        assert "TAKEN_OVER" not in reached.outcomes, "there is one call at a time"


async def test_requests_at_once_share_few_blocks_and_leave_none_behind():
    some = st.lists(st.tuples(messages(pb.GenerateRequest, wild=False), st.booleans()), min_size=2, max_size=8)
    async with target() as reached:

        async def check(requests: list[tuple[pb.GenerateRequest, bool]]) -> None:
            kinds = ("Complete", "Generate")
            await asyncio.gather(*(reached.generate(request, kinds[stream]) for request, stream in requests))

        await reached.hold(some, check, NUM_EXAMPLES // 3)
        assert reached.outcomes["OK"] > NUM_EXAMPLES // 3
        assert (await reached.plane.state()).num_preemptions


async def test_every_request_of_every_method_is_answered_or_refused_with_the_reason():
    async with target() as reached:

        async def check(request: tuple[str, Message]) -> None:
            await reached.call(request[0], request[1].SerializeToString())

        await reached.hold(requests_of_all_methods(), check)
        assert {"OK", "INVALID_REQUEST", "REQUEST_NOT_FOUND"} < set(reached.outcomes)


async def test_bytes_that_are_no_message_are_refused_with_the_reason():
    broken = requests_of_all_methods().flatmap(lambda pair: st.tuples(st.just(pair[0]), damaged(pair[1])))
    noise = st.tuples(st.sampled_from(sorted(METHODS)), st.binary(max_size=64))
    async with target() as reached:

        async def check(request: tuple[str, bytes]) -> None:
            await reached.call(*request)

        await reached.hold(broken | noise, check)
        assert reached.outcomes["INVALID_REQUEST"] > NUM_EXAMPLES / 5


@pytest.mark.parametrize("method", sorted(METHODS))
async def test_a_string_that_is_not_utf8_is_named(method):
    """A lone surrogate, as some languages encode it."""
    strings = [f for f in METHODS[method].input_type.fields if f.type == f.TYPE_STRING]
    async with target() as reached:
        for one in strings:
            tag = bytes([one.number << 3 | 2, 3]) + b"\xed\xa0\x80"
            await reached.call(method, tag)
        assert reached.outcomes["INVALID_REQUEST"] == len(strings)


def test_the_page_of_errors_lists_those_that_the_fuzzing_relies_on():
    refusal = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "x")
    assert refusal.code.name in DOCUMENTED[refusal.reason]
    assert "BUG" not in DOCUMENTED
