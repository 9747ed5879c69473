"""The gRPC front of the worker: epoch, order, errors. It computes nothing itself.

Steps run on one thread of their own, in the order in which they were read, so the event loop that answers health checks
never waits for one.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from protos.errors import Refusal, Violation, invalid_argument, unavailable
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, GetInfoRequest, GetInfoResponse
from protos.worker_pb2_grpc import WorkerServiceServicer
from worker.inputs import MalformedStep
from worker.loading import LoadedWorker

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Call:
    """One call that steps arrive on. Once it is broken, by a failed step or a client that left, no step of it runs."""

    broken: bool = False


class WorkerService(WorkerServiceServicer):
    """Answers UNAVAILABLE until `load` is done."""

    def __init__(self) -> None:
        self._epoch = secrets.randbits(63)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")
        self._loaded: LoadedWorker | None = None

    async def load(self, load: Callable[[], LoadedWorker]) -> None:
        """Runs `load` on the thread of the steps, whose OpenMP team is then the one that they will use."""
        self._loaded = await asyncio.get_running_loop().run_in_executor(self._thread, load)

    async def GetInfo(self, request: GetInfoRequest, context: grpc.aio.ServicerContext) -> GetInfoResponse:
        """What was loaded, under this life's epoch."""
        info = GetInfoResponse(epoch=self._epoch)
        info.MergeFrom(self._require_loaded().info)
        return info

    async def ExecuteModel(
        self, request: ExecuteModelRequest, context: grpc.aio.ServicerContext
    ) -> ExecuteModelResponse:
        """One step by itself."""
        return await self._submit(request, _Call())

    async def Execute(self, requests: AsyncIterator[ExecuteModelRequest], context: grpc.aio.ServicerContext) -> None:
        """Steps in order. While one runs the next is read and waits at the thread's door; a third stays with gRPC."""
        call = _Call()
        requests = aiter(requests)
        following = asyncio.ensure_future(self._next_step(requests, call))
        try:
            while (step := await following) is not None:
                following = asyncio.ensure_future(self._next_step(requests, call))
                await context.write(await step)
        finally:
            call.broken = True
            following.cancel()
            # A next request that was refused while this one failed is nobody's news; asyncio would report it as lost.
            following.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _next_step(
        self, requests: AsyncIterator[ExecuteModelRequest], call: _Call
    ) -> "asyncio.Future[ExecuteModelResponse] | None":
        """The response to the next request, already on its way; None when the client has no more."""
        request = await anext(requests, None)
        return None if request is None else self._submit(request, call)

    def _submit(self, request: ExecuteModelRequest, call: _Call) -> "asyncio.Future[ExecuteModelResponse]":
        worker = self._require_loaded()
        if request.epoch != self._epoch:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                "WRONG_EPOCH",
                f"step {request.step_id} is for epoch {request.epoch}, and this worker's is {self._epoch}",
            )
        return asyncio.get_running_loop().run_in_executor(self._thread, _execute, worker, request, call)

    def _require_loaded(self) -> LoadedWorker:
        if self._loaded is None:
            raise unavailable("LOADING", "the worker is still loading its model")
        return self._loaded


def _execute(worker: LoadedWorker, request: ExecuteModelRequest, call: _Call) -> ExecuteModelResponse:
    """Runs on the thread of the steps."""
    if call.broken:
        return ExecuteModelResponse()  # nobody reads it
    try:
        return worker.runner.execute(request)
    except MalformedStep as error:
        call.broken = True
        raise invalid_argument([Violation(error.field, error.description)]) from error
    except Exception as error:
        call.broken = True
        log.exception("step failed", extra={"step_id": request.step_id})
        message = f"step {request.step_id} failed with {type(error).__name__}; the worker's log says why"
        raise Refusal(grpc.StatusCode.INTERNAL, "STEP_FAILED", message) from error
