"""The scheduler's gRPC front: sessions with routers.

It turns a router's messages into calls of the core; and it owns leases, takeovers of requests, load reports and
draining.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator

import grpc

from protos import session_pb2 as pb
from protos.columns import pack, unpack
from protos.errors import Refusal, taken_over, unavailable
from protos.rpc import SESSION_PROTOCOL_VERSION
from protos.trace_context import TraceContext
from protos.worker_pb2 import GetInfoResponse
from scheduler.admission import QueueFull
from scheduler.beam import BeamParams, EarlyStopping
from scheduler.config import SchedulerSettings
from scheduler.describe import describe, describe_request, locate
from scheduler.loop import SchedulerLoop
from scheduler.scheduler import Scheduler
from scheduler.sequence import Progress, SequenceGroup
from scheduler.sessions import Outbox, RouterSession, Sessions, Ticket, to_rejected

_EARLY_STOPPING = {
    pb.EARLY_STOPPING_TRUE: EarlyStopping.TRUE,
    pb.EARLY_STOPPING_FALSE: EarlyStopping.FALSE,
    pb.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}
_LOAD_INTERVAL_S = 1.0
log = logging.getLogger(__name__)


class SessionService:
    """Serves routers.

    Args:
        epoch: names this incarnation of the scheduler.
    """

    def __init__(self, settings: SchedulerSettings, loop: SchedulerLoop, sessions: Sessions, epoch: int) -> None:
        self._settings = settings
        self._loop = loop
        self._sessions = sessions
        self._epoch = epoch
        self._draining = False
        # Sessions without a stream, each with the timer that ends its lease.
        self._leases: dict[str, asyncio.TimerHandle] = {}

    async def Session(self, requests: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext) -> None:
        """Serves one router's stream; its end starts the lease of the router's requests."""
        first = await context.read()
        if first is grpc.aio.EOF or first.WhichOneof("message") != "hello":
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "NO_HELLO", "a session opens with Hello")
        hello = first.hello
        if hello.protocol_version != SESSION_PROTOCOL_VERSION:
            message = f"router speaks protocol {hello.protocol_version}, this scheduler {SESSION_PROTOCOL_VERSION}"
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION", message)
        await self._loop.ready.wait()
        session = self._sessions.connect(hello.router_id)
        outbox = session.outbox
        assert outbox is not None
        if lease := self._leases.pop(session.router_id, None):
            lease.cancel()
        log.info("router connected", extra={"router_id": session.router_id})
        tasks: list[asyncio.Task[None]] = []
        try:
            self._welcome(session, outbox, hello)
            tasks += [
                asyncio.create_task(self._read(session, outbox, context)),
                asyncio.create_task(_write(outbox, context)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # This comes first: every `await` here may be cancelled.
            if self._sessions.disconnect(session, outbox):
                live = sum(bool(ticket.group.live) for ticket in session.tickets.values())
                log.info("router disconnected", extra={"router_id": session.router_id, "live": live})
                self._begin_lease(session)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(
                result, grpc.aio.BaseError
            ):  # a BaseError is gRPC's: the stream broke
                raise result

    async def GetState(self, request: pb.GetStateRequest, context: grpc.aio.ServicerContext) -> pb.GetStateResponse:
        """Queues and blocks as they are now."""
        return describe(self._core(), self._loop)

    async def Locate(self, request: pb.LocateRequest, context: grpc.aio.ServicerContext) -> pb.LocateResponse:
        """Where some of a router's requests are."""
        return locate(self._core(), self._sessions.find_all(request.router_id, unpack(request.handles)))

    async def Explain(self, request: pb.ExplainRequest, context: grpc.aio.ServicerContext) -> pb.ExplainResponse:
        """Why a live request is where it is."""
        core = self._core()
        ticket = self._sessions.find(request.request_id)
        if ticket is None:
            message = f"request_id: no live request is called {request.request_id[:128]!r}"
            raise Refusal(grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND", message)
        if request.briefly:  # finding its place in the queue takes milliseconds where thousands wait
            return pb.ExplainResponse()
        return describe_request(core, self._loop, ticket.group, time.monotonic())

    async def report_load(self) -> None:
        """Tells every router the load when it has changed: within a second, and at once when serving begins or ends.

        What another worker says of its model is told too, if it is not as before.
        """
        told = None
        while True:
            model = None if self._loop.info is None else _model(self._loop.info)
            for session in self._sessions:
                if session.outbox is not None:
                    if model != told:
                        session.outbox.put(pb.SessionResponse(model=model))
                    session.outbox.put_load(self._load_now)
            told = model
            await self._loop.wait_for_change(_LOAD_INTERVAL_S)

    def _load_now(self) -> pb.Load:
        core = self._core()
        return pb.Load(
            serving=self._loop.serving,
            num_waiting=core.num_waiting,
            num_running=core.num_running,
            num_swapped=core.num_swapped,
            kv_usage=1 - core.blocks.num_free / core.blocks.num_blocks,
            worker_left=self._loop.worker_left,
        )

    def drain(self, grace_s: float) -> None:
        """Refuses new requests from now on, and tells every router so; live requests go on."""
        self._draining = True
        for session in self._sessions:
            if session.outbox is not None:
                session.outbox.put(_drain(grace_s))

    def close(self) -> None:
        """Ends each stream once it has taken what is left for it; stop() would wait its whole grace for open ones."""
        for session in self._sessions:
            if session.outbox is not None:
                session.outbox.close()

    def _core(self) -> Scheduler:
        if self._loop.core is None:
            raise unavailable("NOT_READY", "no worker is ready yet")
        return self._loop.core

    def _welcome(self, session: RouterSession, outbox: Outbox, hello: pb.Hello) -> None:
        info = self._loop.info
        assert info is not None
        resumed = {resume.handle: resume for resume in hello.resume}
        unknown = [handle for handle in resumed if handle not in session.tickets]
        limits = pb.Limits(
            max_num_batched_tokens=self._settings.max_num_batched_tokens,
            max_num_seqs=self._settings.max_num_seqs,
            max_waiting_requests=self._settings.max_waiting_requests,
            max_waiting_tokens=self._settings.max_waiting_tokens,
        )
        welcome = pb.Welcome(
            scheduler_epoch=self._epoch,
            lease_ms=int(self._settings.lease_s * 1e3),
            model=_model(info),
            limits=limits,
            unknown_handles=pack(unknown),
        )
        outbox.put(pb.SessionResponse(welcome=welcome))
        outbox.put_load(self._load_now)
        if self._draining:
            outbox.put(_drain(self._settings.drain_grace_s))
        for handle, ticket in list(session.tickets.items()):
            if handle in resumed:
                self._sessions.resume(ticket, unpack(resumed[handle].num_tokens))
            else:
                self._cancel(session, handle)

    async def _read(self, session: RouterSession, outbox: Outbox, context: grpc.aio.ServicerContext) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            if session.outbox is not outbox:
                return  # the router has opened a newer stream, and what counts is said there
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(session, outbox, message.submit)
                case "cancel":
                    self._cancel(session, message.cancel.handle, moved=message.cancel.moved)
                case "stop_sequence":
                    self._stop_sequence(session, message.stop_sequence)
                case "ping":
                    outbox.put(pb.SessionResponse(pong=pb.Pong(nonce=message.ping.nonce)))

    def _submit(self, session: RouterSession, outbox: Outbox, submit: pb.Submit) -> None:
        known = self._sessions.find(submit.request_id)
        if known is not None and (known.session, known.handle) != (session, submit.handle):
            if _takes_over(known, submit):
                known = self._adopt(known, session, submit)
            elif known.session.outbox is None and not submit.HasField("continuation"):
                known = None  # its router is away, perhaps for ever; it may be the same client that asks again now
            else:
                message = f"request id {submit.request_id!r} is in use by a live request"
                in_use = Refusal(grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE", message)
                return _reject(outbox, submit.handle, in_use)
        if known is None and submit.handle not in session.tickets:
            if self._draining:
                return _reject(outbox, submit.handle, unavailable("DRAINING", "the scheduler is shutting down"))
            try:
                group = self._submit_to_core(submit)
            except QueueFull as full:
                code, delay_ms = grpc.StatusCode.RESOURCE_EXHAUSTED, math.ceil(full.retry_s * 1e3)
                refusal = Refusal(code, "RESOURCE_EXHAUSTED", str(full), retry_delay_ms=delay_ms)
                return _reject(outbox, submit.handle, refusal)
            except ValueError as error:
                refusal = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", str(error))
                return _reject(outbox, submit.handle, refusal)
            trace = TraceContext.parse(submit.traceparent, submit.tracestate)
            self._sessions.add(session, submit.handle, group, trace if trace and trace.sampled else None)
            self._loop.wake()
        accepted = pb.Accepted(handle=submit.handle)
        return outbox.put(pb.SessionResponse(accepted=accepted))

    def _adopt(self, ticket: Ticket, session: RouterSession, submit: pb.Submit) -> Ticket | None:
        """Gives a live request to another call; if it cannot be told from its start, ends it and returns None."""
        log.info("request taken over", extra={"request_id": submit.request_id, "router_id": session.router_id})
        group = ticket.group
        wanted = (group.prompt_token_ids, group.sampling, group.n, group.wanted_max_tokens)
        same = wanted == (unpack(submit.prompt_token_ids), submit.sampling, submit.n, submit.max_tokens)
        if same and not group.taken_up and not submit.HasField("continuation"):
            self._core().set_deadline(group, _deadline(submit, time.monotonic()))
            lost = ticket.session
            self._sessions.adopt(ticket, session, submit.handle)
            if lost.router_id in self._leases:
                self._begin_lease(lost)  # clients move one by one, and the last of thousands comes late
            return ticket
        self._core().abort(group)
        self._sessions.reject(ticket, taken_over(), time.monotonic())
        return None

    def _submit_to_core(self, submit: pb.Submit) -> SequenceGroup:
        beam, now = None, time.monotonic()
        if submit.HasField("beam_search"):
            search = submit.beam_search
            if search.early_stopping not in _EARLY_STOPPING or search.width < 1:
                raise ValueError("beam_search needs a width and a known early_stopping")
            beam = BeamParams(search.width, search.length_penalty, _EARLY_STOPPING[search.early_stopping])
        return self._core().submit(
            request_id=submit.request_id,
            prompt_token_ids=unpack(submit.prompt_token_ids),
            n=submit.n,
            max_tokens=submit.max_tokens,
            min_tokens=submit.sampling.min_tokens,
            stop_token_ids=submit.stop_token_ids,
            sampling=submit.sampling,
            beam=beam,
            priority=submit.priority,
            salt=submit.cache_salt,
            tenant=submit.tenant,
            tenant_weight=submit.tenant_weight or 1.0,
            now=now,
            deadline=_deadline(submit, now),
            progress=_progress(submit.continuation) if submit.HasField("continuation") else None,
            waited_s=max(0.0, submit.continuation.waited_ms / 1e3),
        )

    def _cancel(self, session: RouterSession, handle: int, *, moved: bool = False) -> None:
        ticket = self._sessions.give_up(session, handle, moved=moved)
        if ticket is not None:
            self._core().abort(ticket.group)
            self._loop.wake()
            what = "request goes to another scheduler" if moved else "request cancelled"
            log.info(what, extra={"request_id": ticket.group.request_id})

    def _stop_sequence(self, session: RouterSession, stop: pb.StopSequence) -> None:
        ticket = session.tickets.get(stop.handle)
        if ticket is not None:
            finished = self._core().stop(ticket.group, stop.sequence_index, stop.num_tokens or None)
            if finished is not None:
                self._loop.deliver_finished([finished])
                self._loop.wake()

    def _begin_lease(self, session: RouterSession) -> None:
        """Starts the session's lease; starts it anew if it is running."""
        if lease := self._leases.pop(session.router_id, None):
            lease.cancel()
        loop = asyncio.get_running_loop()
        self._leases[session.router_id] = loop.call_later(self._settings.lease_s, self._end_lease, session)

    def _end_lease(self, session: RouterSession) -> None:
        self._leases.pop(session.router_id, None)
        groups = [group for group in self._sessions.drop(session) if group.live]
        for group in groups:
            self._core().abort(group)
        self._loop.wake()
        if groups:
            facts = {"router_id": session.router_id, "aborted": len(groups)}
            log.warning("router did not come back within the lease", extra=facts)


async def _write(outbox: Outbox, context: grpc.aio.ServicerContext) -> None:
    while (message := await outbox.take()) is not None:
        await context.write(message)


def _model(info: GetInfoResponse) -> pb.ModelInfo:
    return pb.ModelInfo(
        model=info.model,
        context_length=info.context_length,
        vocabulary_size=info.vocabulary_size,
        dtype=info.dtype,
        kv_dtype=info.kv_dtype,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        kv_cache_note=info.kv_cache_note,
        quantization=info.quantization,
    )


def _takes_over(ticket: Ticket, submit: pb.Submit) -> bool:
    """Whether a submission takes over a live request: it asks to, or the request is left to its lease.

    Such a request is that of a router that is gone, and has gone on at another scheduler meanwhile.
    """
    group, left = ticket.group, submit.HasField("continuation") and ticket.session.outbox is None
    # Only the client that made the request knows its seed.
    return (submit.adopt or left) and group.sampling is not None and group.sampling.seed == submit.sampling.seed


def _deadline(submit: pb.Submit, now: float) -> float | None:
    return now + submit.timeout_ms / 1e3 if submit.timeout_ms else None


def _progress(continuation: pb.Continuation) -> list[Progress]:
    return [Progress(unpack(row.token_ids), row.cumulative_logprob, row.ended) for row in continuation.progress]


def _drain(grace_s: float) -> pb.SessionResponse:
    return pb.SessionResponse(drain=pb.Drain(grace_ms=int(grace_s * 1e3)))


def _reject(outbox: Outbox, handle: int, refusal: Refusal) -> None:
    outbox.put(pb.SessionResponse(rejected=to_rejected(handle, refusal)))
