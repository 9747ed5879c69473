"""The router's end of its one stream to a scheduler, which survives broken connections and restarts there."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping

import grpc

from protos import rpc
from protos import session_pb2 as pb
from protos.columns import pack, unpack
from protos.errors import Refusal, code_from_number, unavailable
from protos.session_pb2_grpc import SessionServiceStub
from router.absence import Absence
from router.live_request import LiveRequest, OutputStream
from router.step_outputs import deliver

_RECONNECT_DELAY_S = 0.1
# After this long without a connection, the router logs why and looks for new certificates.
_LOOK_AGAIN_S = 10.0
# The delay after a refusal that only a new version of one side can fix.
_REFUSED_DELAY_S = 5.0
# How many times the scheduler is checked within the time after which it counts as stalled.
_NUM_LOOKS = 5
# How long a scheduler without a worker keeps its requests when others have one.
_WORKER_PATIENCE_S = 10.0
# A request fails when it has lost this many schedulers in a row without a token in between: it may be what kills them.
_MOST_LOST = 3
# The timeout of unary calls.
_ANSWER_TIMEOUT_S = 5.0
log = logging.getLogger(__name__)


class SchedulerLink:
    """All of this router's requests at one scheduler.

    Args:
        address: where it is dialled.
        stall_s: seconds without a message after which the scheduler counts as stalled; it is pinged before.
        patience_s: seconds that requests wait here for a scheduler that is away.
        on_change: called when `serving` or `welcome` may have changed.
        on_refused: called with a request that the scheduler does not take, and its refusal.
        line: the channel to the scheduler.

    Attributes:
        name: its address as bytes, for the choice among schedulers.
        accepted: whether it serves the model that the others do, as `Schedulers` decides.
        welcome: what the scheduler said about itself and its model; None before the first connection.
        connected: whether there is a session, and the load is what the scheduler says.
        draining: whether it has said that it is going away.
    """

    def __init__(
        self,
        address: str,
        stall_s: float,
        patience_s: float,
        on_change: Callable[[], None],
        on_refused: Callable[[LiveRequest, Refusal], None],
        line: rpc.Line,
    ) -> None:
        self.address = address
        self.name = address.encode()
        self.accepted = True
        self.welcome: pb.Welcome | None = None
        self.load = pb.Load()
        self._line = line
        self._stub = SessionServiceStub(self._line.channel)
        self._router_id = secrets.token_hex(8)
        self.draining = False
        self._on_change = on_change
        self._on_refused = on_refused
        self._live: dict[int, LiveRequest] = {}
        # Handles of submissions that the scheduler has not answered, so that its Load does not count them.
        self._unanswered: set[int] = set()
        # How many of the live requests its last Load counts.
        self._num_counted = 0
        self.connected = False
        self._stall_s = stall_s
        # Checks in a row with nothing heard in between. Counted rather than timed, so that a router that was itself
        # suspended does not blame its scheduler.
        self._num_silent_looks = 0
        self._outbox: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        # When the scheduler is away too long, its requests end; until its worker is away too long, it keeps them.
        self._absence = Absence(patience_s, self._give_up)
        self._worker_absence = Absence(_WORKER_PATIENCE_S, on_change)
        # Handles that the last Hello told the scheduler to continue.
        self._resumed: set[int] = set()

    @property
    def serving(self) -> bool:
        """Whether a request submitted now would run at once."""
        return self.connected and self.load.serving and not self.draining and not self.stalled

    @property
    def life(self) -> tuple[str, int]:
        """Its address, and the epoch of the process that is, or last was, there."""
        return self.address, 0 if self.welcome is None else self.welcome.scheduler_epoch

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def stalled(self) -> bool:
        """Whether nothing was heard for so long that no request should wait for it."""
        return self._num_silent_looks > _NUM_LOOKS

    @property
    def num_queued(self) -> int:
        """Requests that wait or run at the scheduler: what it said last, adjusted by what this router did since."""
        told = self.load.num_waiting + self.load.num_running + self.load.num_swapped
        return max(0, told + len(self._live) - self._num_counted)

    @property
    def live(self) -> list[LiveRequest]:
        """Requests that the scheduler still has to run; the others' last messages are on their way to the clients."""
        return [live for live in self._live.values() if not live.over]

    @property
    def gone(self) -> bool:
        """Whether its requests should go on elsewhere.

        A scheduler that has just lost its worker keeps them: it knows which of them may be to blame.
        """
        away = not self.connected or self.stalled or self._worker_absence.too_long
        return away or self.gone_in_order or not self.accepted

    @property
    def gone_in_order(self) -> bool:
        """Whether it has said that it is going away, or that its worker did: none of its requests is to blame."""
        return self.draining or self.load.worker_left

    def submit(self, live: LiveRequest) -> None:
        """Sends a request to the scheduler.

        A scheduler that has lost its worker takes the request all the same: it waits there for the next worker. A
        request that another scheduler had continues where it was.
        """
        self._live[live.handle] = live
        self._send_submit(live)

    def release(self, live: LiveRequest, *, moved: bool = False) -> None:
        """Drops a request that is answered, given up or moved elsewhere: its blocks are free within a step."""
        self._unanswered.discard(live.handle)
        if self._live.pop(live.handle, None) is not None and not live.finished:
            self._send(pb.SessionRequest(cancel=pb.Cancel(handle=live.handle, moved=moved)))

    def stop_sequence(self, handle: int, stream: OutputStream) -> None:
        """Reports a stop string in this sequence, which ends with the last of its tokens that count."""
        stop = pb.StopSequence(handle=handle, sequence_index=stream.index, num_tokens=stream.num_tokens)
        self._send(pb.SessionRequest(stop_sequence=stop))

    async def get_state(self) -> pb.GetStateResponse:
        """The scheduler's queues and blocks."""
        try:
            return await self._stub.GetState(pb.GetStateRequest(), timeout=_ANSWER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _no_answer(error) from error

    async def locate(self, handles: list[int]) -> list[tuple[int, int]]:
        """(session_pb2.Status, place in its queue or -1) of each live request; status 0 if unknown."""
        request = pb.LocateRequest(router_id=self._router_id, handles=pack(handles))
        try:
            response = await self._stub.Locate(request, timeout=_ANSWER_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return [(pb.STATUS_UNSPECIFIED, -1)] * len(handles)
        return list(zip(unpack(response.statuses), unpack(response.positions), strict=True))

    async def explain(self, scoped_id: str, request_id: str, *, briefly: bool = False) -> pb.ExplainResponse:
        """Why a live request is where it is or, if `briefly`, only that it is live; the client calls it `request_id`.

        Raises:
            Refusal: NOT_FOUND, there is no such live request; UNAVAILABLE.
        """
        try:
            request = pb.ExplainRequest(request_id=scoped_id, briefly=briefly)
            return await self._stub.Explain(request, timeout=_ANSWER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                message = f"request_id: no live request is {request_id[:128]!r}; it has ended, or was never submitted"
                raise Refusal(grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND", message) from error
            raise _no_answer(error) from error

    async def run(self) -> None:
        """Keeps a session open, for ever."""
        while True:
            if await self._line.renew():
                self._stub = SessionServiceStub(self._line.channel)
            call = self._stub.Session(wait_for_ready=True)
            delay_s = _RECONNECT_DELAY_S
            try:
                await self._converse(call)
                log.warning("scheduler closed the session", extra={"scheduler": self.address})
            except TimeoutError:
                if obstacle := await self._line.obstacle():
                    facts = {"scheduler": self.address, "details": obstacle}
                    log.warning("no connection to the scheduler", extra=facts)
            except grpc.aio.AioRpcError as error:
                facts = {"scheduler": self.address, "code": error.code().name}
                log.warning("session lost", extra=facts | {"details": error.details() or ""})
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    delay_s = _REFUSED_DELAY_S
            finally:
                call.cancel()  # an abandoned call is never garbage-collected
                self._disconnected()
            await asyncio.sleep(delay_s)

    async def close(self) -> None:
        """Hangs up."""
        await self._line.channel.close()

    async def _converse(self, call: grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]) -> None:
        async with asyncio.timeout(_LOOK_AGAIN_S):
            await call.wait_for_connection()
        resume = [
            pb.Resume(handle=handle, num_tokens=pack(stream.num_received for stream in live.streams))
            for handle, live in self._live.items()
        ]
        self._resumed = {row.handle for row in resume}
        hello = pb.Hello(router_id=self._router_id, protocol_version=rpc.SESSION_PROTOCOL_VERSION, resume=resume)
        await call.write(pb.SessionRequest(hello=hello))
        self._outbox = asyncio.Queue()
        beside = [asyncio.create_task(self._write(call, self._outbox)), asyncio.create_task(self._watch())]
        try:
            async for message in call:
                self._receive(message)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _write(
        self,
        call: grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse],
        outbox: "asyncio.Queue[pb.SessionRequest]",
    ) -> None:
        while True:
            await call.write(await outbox.get())

    async def _watch(self) -> None:
        """Asks for a sign of life when there has been none for a while."""
        self._num_silent_looks = 0
        while True:
            await asyncio.sleep(self._stall_s / _NUM_LOOKS)
            if self._num_silent_looks:
                self._send(pb.SessionRequest(ping=pb.Ping()))
            was_serving = self.serving
            self._num_silent_looks += 1
            if was_serving != self.serving:
                facts = {"scheduler": self.address, "for_s": self._stall_s, "live": len(self._live)}
                log.error("the scheduler is silent", extra=facts)
                self._on_change()

    def _send(self, message: pb.SessionRequest) -> None:
        # Nothing is queued while disconnected: the next Hello tells the scheduler all that matters.
        if self.connected:
            self._outbox.put_nowait(message)

    def _send_submit(self, live: LiveRequest) -> None:
        request, deadline = live.request, live.deadline
        submit = pb.Submit(
            handle=live.handle,
            request_id=request.scoped_id,
            prompt_token_ids=pack(request.prompt_token_ids),
            sampling=request.sampling,
            n=request.num_sequences,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            beam_search=request.beam_search,
            tenant=request.tenant,
            tenant_weight=request.tenant_weight,
            traceparent=live.trace.traceparent if live.trace else "",
            tracestate=live.trace.tracestate if live.trace else "",
            timeout_ms=0 if deadline is None else max(1, int((deadline - time.monotonic()) * 1e3)),
            continuation=live.continuation() if live.accepted else None,
            adopt=live.request.resume is not None and not live.accepted,
        )
        if live.has_prompt_logprobs:
            submit.sampling.ClearField("num_prompt_logprobs")
        self._unanswered.add(live.handle)
        self._send(pb.SessionRequest(submit=submit))
        self._stop_again(live)

    def _stop_again(self, live: LiveRequest) -> None:
        """Tells a scheduler that may not know it yet which sequences have met a stop string."""
        for stream in live.streams:
            if stream.stopped and not stream.ended:
                self.stop_sequence(live.handle, stream)

    def _receive(self, message: pb.SessionResponse) -> None:
        was_stalled, self._num_silent_looks = self.stalled, 0
        if was_stalled:
            log.info("the scheduler is heard again", extra={"scheduler": self.address})
            self._on_change()
        match message.WhichOneof("message"):
            case "step_outputs":
                deliver(message.step_outputs, self._answered())
            case "accepted":
                self._on_accepted(message.accepted.handle)
            case "rejected":
                self._unanswered.discard(message.rejected.handle)
                self._on_rejected(message.rejected)
            case "load":
                was_serving, self.load = self.serving, message.load
                self._watch_worker()
                self._num_counted = len(self._live) - len(self._unanswered)
                if was_serving != self.serving:
                    self._on_change()
            case "welcome":
                self._on_welcome(message.welcome)
            case "model":
                assert self.welcome is not None, "a session opens with Welcome"
                self.welcome.model.CopyFrom(message.model)
                self._on_change()
            case "drain":
                self.draining = True
                self._on_change()

    def _answered(self) -> Mapping[int, LiveRequest]:
        """The live requests but those just submitted: output for these is from an earlier stay here."""
        if not self._unanswered:
            return self._live
        return {handle: live for handle, live in self._live.items() if handle not in self._unanswered}

    def _on_accepted(self, handle: int) -> None:
        self._unanswered.discard(handle)
        if handle in self._live:
            self._live[handle].accept()

    def _on_rejected(self, rejected: pb.Rejected) -> None:
        live = self._live.get(rejected.handle)
        if live is not None:
            delay_ms = rejected.retry_delay_ms or None
            code = code_from_number(rejected.code)
            self._on_refused(live, Refusal(code, rejected.reason, rejected.message, retry_delay_ms=delay_ms))

    def _on_welcome(self, welcome: pb.Welcome) -> None:
        facts = {"scheduler": self.address, "model": welcome.model.model, "epoch": welcome.scheduler_epoch}
        log.info("scheduler connected", extra=facts)
        last_life, last_welcome, self.welcome = self.life, self.welcome, welcome
        self.connected = True
        went_in_order, self.draining = self.draining, False
        self._absence.end()
        self._unanswered.clear()
        self._on_change()  # which decides whether this scheduler is accepted
        for handle in self._resumed - self._live.keys():  # their clients left between Hello and Welcome
            self._send(pb.SessionRequest(cancel=pb.Cancel(handle=handle)))
        unknown = set(unpack(welcome.unknown_handles))
        is_other = last_welcome is not None and model_of(last_welcome) != model_of(welcome)
        for live in self.live:
            if not self.accepted:  # others have the model, and carry on
                live.fail(lost(live, "its scheduler came back with another model"))
            elif is_other:
                message = f"the request is lost: {welcome.model.model!r} is served now, which would say something else"
                live.fail(Refusal(grpc.StatusCode.FAILED_PRECONDITION, "MODEL_CHANGED", message))
            elif live.handle in unknown:
                self._on_lost(live, last_life, in_order=went_in_order)
            else:
                self._stop_again(live)

    def _disconnected(self) -> None:
        if not self.connected:
            return
        self.connected = False
        self.load = pb.Load()
        self._watch_worker()
        self._absence.begin()
        self._on_change()

    def _on_lost(self, live: LiveRequest, life: tuple[str, int], *, in_order: bool) -> None:
        """Resubmits a request, or gives it up: its scheduler is gone, or has not kept it until we came back."""
        if not in_order and give_up(live, life):
            return None
        log.info("request goes on", extra={"request_id": live.request.request_id, "tokens": live.num_tokens})
        return self._send_submit(live)

    def _watch_worker(self) -> None:
        if self.connected and not self.load.serving:
            self._worker_absence.begin()
        else:
            self._worker_absence.end()

    def _give_up(self) -> None:
        for live in self.live:
            why = f"its scheduler has been away for {self._absence.most_s:g} s, and there is no other"
            live.fail(lost(live, why))

    def break_off(self) -> None:
        """Ends all live requests with an error: this router is about to go."""
        for live in self.live:
            text = "this router shut down before the request was finished"
            live.fail(Refusal(_code_of_loss(live), "DRAINING", text, retry_delay_ms=1000))


def _no_answer(error: grpc.aio.AioRpcError) -> Refusal:
    return unavailable("NO_SCHEDULER", f"the scheduler does not answer: {error.details()}")


def model_of(welcome: pb.Welcome) -> tuple[str, int, int, str, str]:
    """What must be equal for requests to go from one scheduler to another."""
    model = welcome.model
    return model.model, model.context_length, model.vocabulary_size, model.dtype, model.quantization


def lost(live: LiveRequest, why: str) -> Refusal:
    """The error that ends a request that cannot go on."""
    return Refusal(_code_of_loss(live), "SCHEDULER_LOST", f"the request was lost: {why}", retry_delay_ms=1000)


def give_up(live: LiveRequest, life: tuple[str, int]) -> bool:
    """Notes that a request has lost a scheduler; returns whether it failed for that: it may be what kills them."""
    if live.lose(life) < _MOST_LOST:
        return False
    message = f"the request is given up: {_MOST_LOST} schedulers in a row were lost while they had it"
    live.fail(Refusal(grpc.StatusCode.INTERNAL, "SCHEDULERS_LOST", message))
    return True


def _code_of_loss(live: LiveRequest) -> grpc.StatusCode:
    """UNAVAILABLE, which proxies retry, as long as the client has no token; after that ABORTED, which they do not."""
    return grpc.StatusCode.ABORTED if live.has_told else grpc.StatusCode.UNAVAILABLE
