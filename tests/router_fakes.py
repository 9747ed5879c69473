"""Schedulers that say what a test tells them to, and a real router in front of them."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from fakes import CONTEXT_LENGTH, VOCABULARY_SIZE, running, write_tokenizer

import router.__main__ as router_main
from protos import session_pb2
from protos.columns import pack, pack_floats, unpack
from protos.errors import Refusal
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.pagewire.v1.introspection_pb2_grpc import IntrospectionServiceStub
from protos.rpc import Server, Service, dial, wait_for_serving
from protos.session_pb2_grpc import SessionServiceServicer, add_SessionServiceServicer_to_server
from protos.tls import ServerTls
from router.config import RouterSettings
from router.tokenizer import Tokenizer


def finished(
    sequence_index: int = 0, cumulative_logprob: float = -1.0, handle: int = 1, **fields
) -> session_pb2.Finished:
    """The end of a sequence, by its length unless told otherwise."""
    fields = {"status": session_pb2.FINISH_STATUS_LENGTH_CAPPED} | fields
    return session_pb2.Finished(
        handle=handle, sequence_index=sequence_index, cumulative_logprob=cumulative_logprob, **fields
    )


@dataclass
class FakeScheduler(SessionServiceServicer):
    """Welcomes one router, and keeps what it sends.

    Attributes:
        model: what it says that it serves.
        num_blocks: of its KV cache.
        max_num_seqs: sequences that it runs together.
        is_silent: whether it answers no pings.
        is_new: whether it has no request that a router comes back for.
        epoch: which of its lives this is.
        heard: Submit, StopSequence and Cancel messages, in order.
        state: what GetState answers; None for no answer.
        explanations: what Explain answers, by request id.
        position: what Locate answers for every request: its place in the queue.
    """

    model: str = "fake"
    num_blocks: int = 64
    max_num_seqs: int = 8
    is_silent: bool = False
    is_new: bool = False
    epoch: int = 1
    heard: "asyncio.Queue[session_pb2.SessionRequest]" = field(default_factory=asyncio.Queue)
    state: session_pb2.GetStateResponse | None = field(default_factory=session_pb2.GetStateResponse)
    explanations: dict[str, session_pb2.ExplainResponse] = field(default_factory=dict)
    position: int = 0
    num_states: int = 0
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def Session(self, requests, context):
        resumed = [row.handle for row in (await context.read()).hello.resume]
        self._context = context
        model = session_pb2.ModelInfo(
            model=self.model,
            context_length=CONTEXT_LENGTH,
            vocabulary_size=VOCABULARY_SIZE,
            block_size=4,
            num_blocks=self.num_blocks,
        )
        welcome = session_pb2.Welcome(
            scheduler_epoch=self.epoch,
            lease_ms=1000,
            model=model,
            limits=session_pb2.Limits(max_num_seqs=self.max_num_seqs),
            unknown_handles=pack(resumed if self.is_new else []),
        )
        await self._write(welcome=welcome)
        await self.tell_load(serving=True)
        while (message := await context.read()) is not grpc.aio.EOF:
            if message.HasField("ping"):
                if not self.is_silent:
                    await self._write(pong=session_pb2.Pong())
            else:
                self.heard.put_nowait(message)

    async def _write(self, **message: object) -> None:
        """One message at a time, as gRPC takes them: pings are answered while a test tells something."""
        async with self._writing:
            await self._context.write(session_pb2.SessionResponse(**message))

    async def GetState(self, request, context):
        self.num_states += 1
        if self.state is None:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "NOT_READY", "no worker is ready yet")
        return self.state

    async def Explain(self, request, context):
        if request.request_id not in self.explanations:
            raise Refusal(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "not live")
        return self.explanations[request.request_id]

    async def Locate(self, request, context):
        num_asked = len(unpack(request.handles))
        statuses, positions = [session_pb2.STATUS_WAITING] * num_asked, [self.position] * num_asked
        return session_pb2.LocateResponse(statuses=pack(statuses), positions=pack(positions))

    async def submitted(self) -> session_pb2.Submit:
        return (await self.heard.get()).submit

    async def tell_load(self, **load: object) -> None:
        await self._write(load=session_pb2.Load(**load))

    async def drain(self) -> None:
        await self._write(drain=session_pb2.Drain())

    async def tell(
        self,
        tokens: dict[int, bytes] | None = None,
        *ends: session_pb2.Finished,
        first: int = 0,
        handle: int = 1,
        accepts: bool = True,
    ) -> None:
        """Tells of a step: new tokens by sequence index, all from output index `first` on, and ends.

        Nobody is told of a request that was not accepted, unless it is of an earlier stay here.
        """
        if accepts:
            await self.accept(handle)
        tokens = tokens or {}
        outputs = session_pb2.StepOutputs(
            handles=pack([handle] * len(tokens)),
            sequence_indexes=pack(tokens),
            first_indexes=pack([first] * len(tokens)),
            counts=pack(map(len, tokens.values())),
            token_ids=pack(list(b"".join(tokens.values()))),
            finished=ends,
            token_logprobs=pack_floats([-0.25] * len(b"".join(tokens.values()))),
        )
        await self._write(step_outputs=outputs)

    async def accept(self, handle: int = 1) -> None:
        await self._write(accepted=session_pb2.Accepted(handle=handle))

    async def reject(self, code: grpc.StatusCode, message: str, handle: int = 1, reason: str = "X") -> None:
        rejected = session_pb2.Rejected(handle=handle, code=code.value[0], reason=reason, message=message)
        await self._write(rejected=rejected)


@dataclass
class RouterAlone:
    """A real router that serves, and the scripted schedulers behind it."""

    schedulers: tuple[FakeScheduler, ...]
    servers: list[Server]
    generation: GenerationServiceStub
    introspection: IntrospectionServiceStub
    stop: asyncio.Event
    address: str
    scheduler_address: str

    @property
    def scheduler(self) -> FakeScheduler:
        return self.schedulers[0]

    async def restart_scheduler(self) -> None:
        """Ends the first scheduler's process, as it were, and starts another one at its address."""
        await self.servers[0].stop(0)
        self.scheduler.is_new = True
        self.scheduler.epoch += 1
        self.servers[0] = await start_scheduler(self.scheduler, self.scheduler_address)

    @property
    def scheduler_server(self) -> Server:
        return self.servers[0]


@contextlib.asynccontextmanager
async def router_alone(*schedulers: FakeScheduler, **options: object) -> AsyncIterator[RouterAlone]:
    """A router that has been welcomed. It drains for a minute at most, which no test waits for."""
    schedulers = schedulers or (FakeScheduler(),)
    with tempfile.TemporaryDirectory(prefix="pw") as directory:
        tokenizer = Tokenizer(write_tokenizer(Path(directory) / "model"))
        behind = [f"unix:{directory}/s{index}" for index in range(len(schedulers))]
        defaults = {"listen": f"unix:{directory}/r", "scheduler": ",".join(behind), "drain_grace_s": 60.0}
        settings = RouterSettings(model=directory, **(defaults | options))
        servers = [await start_scheduler(*pair) for pair in zip(schedulers, behind, strict=True)]
        try:
            async with (
                dial(settings.listen) as channel,
                running(lambda stop: router_main.serve(settings, tokenizer, stop)) as stop,
            ):
                await wait_for_serving(channel)
                generation, introspection = GenerationServiceStub(channel), IntrospectionServiceStub(channel)
                yield RouterAlone(schedulers, servers, generation, introspection, stop, settings.listen, behind[0])
        finally:
            for server in servers:
                await server.stop(0)


async def start_scheduler(scheduler: FakeScheduler, address: str, tls: ServerTls | None = None) -> Server:
    """Lets a scheduler be dialled."""
    name = session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
    server = Server([Service(name, add_SessionServiceServicer_to_server, scheduler)])
    await server.start(address, tls=tls)
    return server
