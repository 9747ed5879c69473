"""The scheduler's end of the wire to its worker: wait until it serves, ask what it loaded, run steps in order."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from protos import rpc
from protos.tls import ClientTls
from protos.trace_context import TraceContext
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, GetInfoRequest, GetInfoResponse
from protos.worker_pb2_grpc import WorkerServiceStub
from scheduler.answers import MalformedAnswer, check_answer
from scheduler.plan import Plan, StepResult, to_request, to_result

# The errors that reading from or writing to an ended stream raises.
_BROKEN = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError)
# With these the worker has stopped in order, or is not the one that was asked what it loaded.
_IN_ORDER = (grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION)
# After this time without a connection the log says why, and new certificates are looked for.
_LOOK_AGAIN_S = 10.0
# Put among the answers to end a wait for one.
_INTERRUPT = ExecuteModelResponse()
log = logging.getLogger(__name__)


class WorkerLost(Exception):
    """The worker, or the stream to it, is gone; the KV that it held cannot be used any more.

    Attributes:
        in_order: whether it left in order, without running the steps that it did not answer.
    """

    def __init__(self, message: str, *, in_order: bool) -> None:
        super().__init__(message)
        self.in_order = in_order


class WorkerLink:
    """The connection to the worker at an address, through any number of restarts of the worker.

    Args:
        on_lost: called when the stream of steps ends, also while no step runs.
    """

    def __init__(self, address: str, on_lost: Callable[[], None], tls: ClientTls | None = None) -> None:
        self._line = rpc.Line(address, tls)
        self._stub = WorkerServiceStub(self._line.channel)
        self._on_lost = on_lost
        self._epoch = 0
        self._call: grpc.aio.StreamStreamCall[ExecuteModelRequest, ExecuteModelResponse] | None = None
        # The call's answers, and None for its end. A task reads them, since cancelling a read cancels the stream.
        self._responses: asyncio.Queue[ExecuteModelResponse | None] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._num_unanswered = 0  # steps on their way

    async def connect(self) -> GetInfoResponse:
        """Waits, for ever if need be, until a worker serves, and opens a stream of steps to this incarnation of it."""
        self.close_stream()
        while True:
            await self._wait_for_serving()
            try:
                info = await self._stub.GetInfo(GetInfoRequest(), timeout=10)
                break
            except grpc.aio.AioRpcError as error:
                log.warning("worker does not answer", extra={"code": error.code().name, "details": error.details()})
                await asyncio.sleep(0.1)
        self._epoch = info.epoch
        self._call = self._stub.Execute()
        self._call.add_done_callback(lambda _: self._on_lost())
        self._responses = asyncio.Queue()
        self._num_unanswered = 0
        self._reader = asyncio.create_task(_read(self._call, self._responses))
        return info

    async def _wait_for_serving(self) -> None:
        while True:
            if await self._line.renew():
                self._stub = WorkerServiceStub(self._line.channel)
            try:
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    return await rpc.wait_for_serving(self._line.channel)
            except TimeoutError:
                if obstacle := await self._line.obstacle():
                    log.warning("no connection to the worker", extra={"details": obstacle})

    async def check(self) -> None:
        """Raises WorkerLost if the stream of steps has ended."""
        assert self._call is not None, "not connected"
        if self._call.done():
            raise await self._loss()

    async def look(self, timeout_s: float) -> str | None:
        """Asks the worker for its health, beside the stream of steps; returns why it did not answer in time, if so."""
        try:
            await HealthStub(self._line.channel).Check(HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return None

    async def send(self, plan: Plan, traces: Sequence[TraceContext] = ()) -> None:
        """Sends a step, as it is at the time of the call, behind those that are on their way.

        Args:
            plan: the step.
            traces: the traces that get a span of it.

        Raises:
            WorkerLost: the step did not get through, and no more results will come.
        """
        assert self._call is not None, "not connected"
        try:
            await self._call.write(to_request(plan, self._epoch, traces))
        except _BROKEN as error:
            raise await self._loss() from error
        self._num_unanswered += 1

    async def receive(self, plan: Plan, timeout_s: float | None) -> StepResult | None:
        """The result of the oldest step that is on its way.

        Args:
            plan: that step.
            timeout_s: how long to wait; None for ever.

        Returns:
            The result; None if it did not come in time, or before an `interrupt`. It may then be asked for again.

        Raises:
            WorkerLost: no result will come any more; or the answer is malformed, and the stream was closed.
        """
        assert self._call is not None, "not connected"
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._responses.get()
        except TimeoutError:
            return None
        if response is _INTERRUPT:
            return None
        if response is None:
            raise await self._loss()
        self._num_unanswered -= 1
        try:
            check_answer(plan, self._epoch, response)
        except MalformedAnswer as error:
            self.close_stream()
            raise WorkerLost(str(error), in_order=False) from error
        return to_result(response)

    def interrupt(self) -> None:
        """Ends a wait for a result, since there is something else to do. A stream's end ends the wait by itself."""
        if self._call is not None and not self._call.done():
            self._responses.put_nowait(_INTERRUPT)

    def close_stream(self) -> None:
        """Cancels the stream of steps, if one is open: an abandoned call is never collected."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def close(self) -> None:
        """Closes the stream and the connection."""
        self.close_stream()
        await self._line.channel.close()

    async def _loss(self) -> WorkerLost:
        """What the end of the stream of steps says about the loss."""
        assert self._call is not None
        code, words = await self._call.code(), await self._call.details()
        # A write that meets the end of the stream puts INTERNAL in the place of what the worker said. But if all steps
        # were answered, there is none that the worker may have run since.
        is_unknown = code is grpc.StatusCode.INTERNAL and not self._num_unanswered
        return WorkerLost(f"{code.name}: {words}" if words else code.name, in_order=is_unknown or code in _IN_ORDER)


async def _read(
    call: "grpc.aio.StreamStreamCall[ExecuteModelRequest, ExecuteModelResponse]",
    responses: "asyncio.Queue[ExecuteModelResponse | None]",
) -> None:
    """Passes on what a call answers, until it ends."""
    try:
        while isinstance(response := await call.read(), ExecuteModelResponse):
            responses.put_nowait(response)
    except _BROKEN as error:
        log.debug("stream of steps broken", extra={"error": str(error)})
    responses.put_nowait(None)
