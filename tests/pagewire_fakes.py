"""Stand-ins for the servers that the `pagewire` room talks to and starts.

They are sync gRPC servers: the client under test may run on any event loop, and no second one runs beside it.

Run as a program (`python pagewire_fakes.py NAME --listen ADDRESS ...`) this file is a service for the launcher's tests.
"""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from protos.errors import Refusal, to_status
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1 import introspection_pb2
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from protos.pagewire.v1.introspection_pb2_grpc import (
    IntrospectionServiceServicer,
    add_IntrospectionServiceServicer_to_server,
)
from protos.tls import ServerTls

USAGE = pb.Usage(prompt_tokens=5, cached_prompt_tokens=2, completion_tokens=3)
TIMINGS = pb.Timings(queue_ms=1, ttft_ms=100, total_ms=300)


def delta(text: str = "", index: int = 0, **fields) -> pb.GenerateResponse:
    """One message with one output."""
    return pb.GenerateResponse(request_id="r1", outputs=[pb.Output(index=index, text=text, **fields)])


def last(message: pb.GenerateResponse) -> pb.GenerateResponse:
    """The same as a stream's last message."""
    message.usage.CopyFrom(USAGE)
    message.timings.CopyFrom(TIMINGS)
    return message


def greeting(request: pb.GenerateRequest) -> Iterable[pb.GenerateResponse]:
    """Says "Hello, world" in three tokens and stops."""
    yield delta("Hel", token_ids=[1])
    yield delta("lo,", token_ids=[2])
    stop = {"finish_reason": pb.FINISH_REASON_STOP, "stop_match": pb.StopMatch(token_id=2), "cumulative_logprob": -1.5}
    yield last(delta(" world", token_ids=[3], **stop))


class FakeGeneration(GenerationServiceServicer):
    """Answers with `script(request)`: an iterable of messages, or raises a Refusal.

    Attributes:
        requests: all that came.
        ended: set when a Generate call ended before its script did.
        timeouts_s: the deadlines that came with them.
    """

    def __init__(self) -> None:
        self.script: Callable[[pb.GenerateRequest], Iterable[pb.GenerateResponse]] = greeting
        self.requests: list = []
        self.timeouts_s: list[float | None] = []
        self.ended = threading.Event()

    def Generate(self, request, context):
        self.requests.append(request)
        self.timeouts_s.append(context.time_remaining())
        finished = threading.Event()
        context.add_callback(lambda: finished.is_set() or self.ended.set())
        with _refusals(context):
            yield from self.script(request)
        finished.set()

    def Complete(self, request, context):
        self.requests.append(request)
        outputs: dict[int, pb.Output] = {}
        answer = pb.CompleteResponse(request_id="r1", usage=USAGE, timings=TIMINGS)
        with _refusals(context):
            for message in self.script(request):
                answer.prompt_logprobs.extend(message.prompt_logprobs)
                for output in message.outputs:
                    whole = outputs.setdefault(output.index, pb.Output(index=output.index))
                    text = whole.text + output.text
                    whole.MergeFrom(output)
                    whole.text = text
        answer.outputs.extend(outputs.values())
        return answer

    def Tokenize(self, request, context):
        self.requests.append(request)
        return pb.TokenizeResponse(token_ids=[7, 8, 9])

    def Detokenize(self, request, context):
        self.requests.append(request)
        return pb.DetokenizeResponse(text=" ".join(map(str, request.token_ids)))

    def GetModel(self, request, context):
        return pb.GetModelResponse(
            model="fake", context_length=64, dtype="float32", block_size=4, num_blocks=16, eos_token_ids=[2]
        )


class FakeIntrospection(IntrospectionServiceServicer):
    """Shows `states`, one after the other, and then raises `refusal`; knows the requests in `explanations`.

    Attributes:
        schedulers: that the states are of, where there are several.
        intervals_ms: of the watches that came.
        tokens: what each question for the state carried.
    """

    def __init__(self) -> None:
        self.states: list[introspection_pb2.SchedulerState] = []
        self.schedulers: list[introspection_pb2.NamedScheduler] = []
        self.refusal: Refusal | None = None
        self.explanations: dict[str, introspection_pb2.ExplainRequestResponse] = {}
        self.intervals_ms: list[int] = []
        self.tokens: list[str | bytes | None] = []

    def GetState(self, request, context):
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        with _refusals(context):
            if self.refusal is not None:
                raise self.refusal
        return introspection_pb2.GetStateResponse(state=self.states[0], schedulers=self.schedulers)

    def WatchState(self, request, context):
        self.intervals_ms.append(request.interval_ms)
        for state in self.states:
            yield introspection_pb2.WatchStateResponse(state=state, schedulers=self.schedulers)
        with _refusals(context):
            if self.refusal is not None:
                raise self.refusal

    def ExplainRequest(self, request, context):
        with _refusals(context):
            if request.request_id not in self.explanations:
                message = f"no live request is {request.request_id!r}"
                raise Refusal(grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND", message)
        return self.explanations[request.request_id]


@contextmanager
def _refusals(context: grpc.ServicerContext) -> Iterator[None]:
    try:
        yield
    except Refusal as refusal:
        context.abort_with_status(rpc_status.to_status(to_status(refusal)))


@contextmanager
def serving(
    fake: FakeGeneration,
    address: str = "127.0.0.1:0",
    introspection: FakeIntrospection | None = None,
    tls: ServerTls | None = None,
    *,
    share_port: bool = False,
) -> Iterator[str]:
    """Serves a fake with health, and another of the introspection service if given; gives their address."""
    server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", int(share_port))])
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    add_GenerationServiceServicer_to_server(fake, server)
    if introspection is not None:
        add_IntrospectionServiceServicer_to_server(introspection, server)
    port, *_ = [
        server.add_secure_port(each, tls.credentials()) if tls else server.add_insecure_port(each)
        for each in address.split(",")
    ]
    server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()


def told(arguments: list[str]) -> list[str]:
    """What a service is told: its arguments, or those on its input where it began before anybody knew them."""
    return json.loads(sys.stdin.readline() or sys.exit()) if arguments == ["-"] else arguments


def main(arguments: list[str]) -> None:
    """A service NAME that answers health checks at --listen until SIGTERM and writes its start and stop into --journal.

    --die: ends with status 3 at once. --bad-option: is refused with status 2. --stubborn: does not care for SIGTERM.
    --mute: never answers. --lingering: takes no connections after SIGTERM, and does not end.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--listen")
    for option in ("--journal", "--tls-certificate", "--tls-key"):
        parser.add_argument(option, type=Path)
    for flag in ("--die", "--bad-option", "--stubborn", "--mute", "--lingering", "--share-port"):
        parser.add_argument(flag, action="store_true")
    given, _ = parser.parse_known_args(arguments)
    name = given.name

    def note(event: str) -> None:
        if given.journal:
            with given.journal.open("a") as journal:
                journal.write(f"{name} {event}\n")

    print(f"12:00:00.000 INFO  {name:<9} starting pid={os.getpid()}", file=sys.stderr, flush=True)
    if given.bad_option:
        print(f"python -m {name}: error: unrecognized arguments: --bad-option", file=sys.stderr)
        sys.exit(2)
    if given.die:
        print(f"12:00:00.000 ERROR {name:<9} no weights", file=sys.stderr)
        sys.exit(3)
    # Before gRPC's threads exist, so that none of them takes the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    tls = ServerTls(given.tls_certificate, given.tls_key) if given.tls_certificate else None
    serve = serving(FakeGeneration(), given.listen, tls=tls, share_port=given.share_port)
    with nullcontext() if given.mute else serve:
        note("start")
        if not given.mute:
            print(f"12:00:00.000 INFO  {name:<9} serving", file=sys.stderr, flush=True)
        while True:
            signal.sigwait({signal.SIGTERM})
            note("stop")
            if not given.stubborn:
                break
    while given.lingering:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
