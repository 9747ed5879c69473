"""`python -m bench.load session|generate`: streams that are always busy, against a scheduler or a router.

Each stream runs one request after another, as soon as the last one has ended. The first requests have different
lengths, so that ends and admissions are spread evenly over the steps. A JSON line on standard output tells four times a
second what has come in so far, until the process is ended.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import secrets
import sys
import time
from dataclasses import dataclass, field

import grpc
import uvloop

from protos import session_pb2
from protos.columns import pack
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.rpc import SESSION_PROTOCOL_VERSION, dial, wait_for_serving
from protos.sampling_pb2 import Sampling
from protos.session_pb2_grpc import SessionServiceStub

_REPORT_INTERVAL_S = 0.25
# Gaps are counted in buckets from 10 µs to 40 s, each bucket's a tenth longer than those of the one before.
_SHORTEST_GAP_S, _GAP_RATIO, _NUM_GAP_BUCKETS = 1e-5, 1.1, 160


def gap_s(bucket: int) -> float:
    """The middle of a bucket of gaps."""
    return _SHORTEST_GAP_S * _GAP_RATIO ** (bucket + 0.5)


@dataclass(slots=True)
class Counts:
    """What has come in: over the Session stream tokens are counted, from Generate characters.

    Attributes:
        gaps: times between two deltas of a stream of Generate, by bucket.
    """

    messages: int = 0
    tokens: int = 0
    characters: int = 0
    requests: int = 0
    gaps: list[int] = field(default_factory=lambda: [0] * _NUM_GAP_BUCKETS)

    def add_gap(self, seconds: float) -> None:
        """Counts a gap."""
        bucket = int(math.log(max(seconds, _SHORTEST_GAP_S) / _SHORTEST_GAP_S, _GAP_RATIO))
        self.gaps[min(bucket, _NUM_GAP_BUCKETS - 1)] += 1

    async def report(self) -> None:
        """Prints the counts again and again."""
        while True:
            line = {"time": time.monotonic(), "messages": self.messages, "requests": self.requests}
            print(
                json.dumps(line | {"tokens": self.tokens, "characters": self.characters, "gaps": self.gaps}), flush=True
            )
            await asyncio.sleep(_REPORT_INTERVAL_S)


@dataclass(frozen=True, slots=True)
class Streams:
    """How many streams, and what each asks for."""

    count: int
    num_prompt_tokens: int
    num_output_tokens: int
    vocabulary_size: int

    def prompt(self, rng: random.Random) -> list[int]:
        """Random tokens: no two prompts share a prefix."""
        return [rng.randrange(self.vocabulary_size) for _ in range(self.num_prompt_tokens)]

    def first_length(self, place: int) -> int:
        """Output tokens of the first request of a stream."""
        return max(1, self.num_output_tokens * (place + 1) // self.count)


async def load_session(target: str, streams: Streams, counts: Counts) -> None:
    """Uses the Session stream as a router does, but decodes no text."""
    rng = random.Random(secrets.randbits(32))
    async with dial(target) as channel:
        call = SessionServiceStub(channel).Session(wait_for_ready=True)
        hello = session_pb2.Hello(router_id=secrets.token_hex(8), protocol_version=SESSION_PROTOCOL_VERSION)
        await call.write(session_pb2.SessionRequest(hello=hello))
        for place in range(streams.count):
            await call.write(_submit(place, streams, streams.first_length(place), rng))
        handle = streams.count
        async for message in call:
            counts.messages += 1
            if message.HasField("rejected"):
                raise RuntimeError(message.rejected.message)
            outputs = message.step_outputs
            counts.tokens += len(outputs.token_ids) // 4
            for _ in outputs.finished:
                counts.requests += 1
                await call.write(_submit(handle, streams, streams.num_output_tokens, rng))
                handle += 1


async def load_generate(target: str, streams: Streams, counts: Counts) -> None:
    """Asks a router for text, a call for each request."""
    async with dial(target) as channel:
        await wait_for_serving(channel)
        stub = GenerationServiceStub(channel)
        await asyncio.gather(*(_generate(stub, streams, place, counts) for place in range(streams.count)))


async def _generate(stub: GenerationServiceStub, streams: Streams, place: int, counts: Counts) -> None:
    rng = random.Random(secrets.randbits(32))
    length = streams.first_length(place)
    while True:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=streams.prompt(rng)),
            sampling=pb.SamplingParams(temperature=0),
            stop=pb.StopConditions(max_tokens=length, ignore_eos=True),
        )
        last = None
        async for response in stub.Generate(request):
            now = time.monotonic()
            if last is not None:
                counts.add_gap(now - last)
            last = now
            counts.messages += 1
            for output in response.outputs:
                counts.characters += len(output.text)
        counts.requests += 1
        length = streams.num_output_tokens


def _submit(handle: int, streams: Streams, length: int, rng: random.Random) -> session_pb2.SessionRequest:
    submit = session_pb2.Submit(
        handle=handle,
        request_id=f"bench-{secrets.token_hex(4)}-{handle}",
        prompt_token_ids=pack(streams.prompt(rng)),
        sampling=Sampling(temperature=0, top_p=1, num_prompt_tokens=streams.num_prompt_tokens),
        n=1,
        max_tokens=length,
    )
    return session_pb2.SessionRequest(submit=submit)


async def _main(arguments: argparse.Namespace) -> None:
    streams = Streams(arguments.streams, arguments.prompt_tokens, arguments.output_tokens, arguments.vocabulary_size)
    counts = Counts()
    reporting = asyncio.create_task(counts.report())
    try:
        load = load_session if arguments.kind == "session" else load_generate
        await load(arguments.target, streams, counts)
    finally:
        reporting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reporting


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["session", "generate"])
    parser.add_argument("--target", required=True, help='"host:port" or "unix:/path"')
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--vocabulary-size", type=int, required=True)
    arguments = parser.parse_args()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(_main(arguments))
    except grpc.aio.AioRpcError as error:
        sys.exit(f"{arguments.target}: {error.code().name}: {error.details()}")


if __name__ == "__main__":
    main()
