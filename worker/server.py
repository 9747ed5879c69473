"""The gRPC front of the worker: epoch, order, errors. It computes nothing itself.

Steps are given to the device by one thread, in the order in which they were read, so the event loop that answers health
checks never waits for one. Another thread waits for those that the device is still at, so that the next one is there
before the device runs dry; a CPU has done a step when it has been given it.
"""

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from protos.errors import Refusal, Violation, invalid_argument, unavailable
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, GetInfoRequest, GetInfoResponse
from protos.worker_pb2_grpc import WorkerServiceServicer
from worker.inputs import MalformedStep
from worker.loading import LoadedWorker
from worker.model_runner import ModelRunner
from worker.observer import Observer
from worker.step_in_flight import StepInFlight

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Call:
    """One call that steps arrive on.

    Attributes:
        broken: by a failed step or a client that left. No step of it runs any more.
        following: of a stream, its next step.
        leaving: whether it is to end behind the step that runs.
    """

    broken: bool = False
    following: "asyncio.Future[asyncio.Future[ExecuteModelResponse] | None] | None" = None
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class _Job:
    """A step on its way through the threads.

    Attributes:
        call: that it arrived on.
        answer: to be given by one of the threads, through `give` or `fail`.
        arrival: by `time.monotonic`, s.
    """

    runner: ModelRunner
    request: ExecuteModelRequest
    call: _Call
    answer: "asyncio.Future[ExecuteModelResponse]"
    arrival: float

    def give(self, response: ExecuteModelResponse) -> None:
        """Answers, from any thread."""
        self.answer.get_loop().call_soon_threadsafe(_settle, self.answer.set_result, self.answer, response)

    def fail(self, error: Exception) -> None:
        """Answers with an error, from any thread."""
        self.answer.get_loop().call_soon_threadsafe(_settle, self.answer.set_exception, self.answer, error)


class WorkerService(WorkerServiceServicer):
    """Answers UNAVAILABLE until `load` is done.

    Args:
        observer: is told of every step.
        hang_timeout_s: seconds that a step may go on after its stream has ended.

    Attributes:
        device_lost: set when the device has failed for good, or hangs, which the process has to end for.
    """

    def __init__(self, observer: Observer, hang_timeout_s: float = 60.0) -> None:
        self._observer = observer
        self._hang_timeout_s = hang_timeout_s
        self.device_lost = asyncio.Event()
        self._epoch = secrets.randbits(63)
        self._steps = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")
        self._results = ThreadPoolExecutor(max_workers=1, thread_name_prefix="result")
        self._loaded: LoadedWorker | None = None
        self._calls: set[_Call] = set()
        # Of streams that have.
        self._ending: set[asyncio.Task[None]] = set()

    async def load(self, load: Callable[[], LoadedWorker]) -> None:
        """Runs `load` on the thread of the steps, whose OpenMP team is then the one that they will use."""
        loop = asyncio.get_running_loop()
        self._loaded = await loop.run_in_executor(self._steps, load)
        self._observer.info = self._loaded.info
        # Beside the first steps, if there are any so soon.
        threading.Thread(target=self._loaded.runner.populate_cache, name="populate", daemon=True).start()

    async def GetInfo(self, request: GetInfoRequest, context: grpc.aio.ServicerContext) -> GetInfoResponse:
        """What was loaded, under this life's epoch; once nothing of a stream that has ended is computed any more."""
        if self._ending:
            await asyncio.wait(self._ending)
        info = GetInfoResponse(epoch=self._epoch)
        info.MergeFrom(self._require_loaded().info)
        return info

    async def ExecuteModel(
        self, request: ExecuteModelRequest, context: grpc.aio.ServicerContext
    ) -> ExecuteModelResponse:
        """One step by itself."""
        return await self._submit(request, _Call())

    async def Execute(self, requests: AsyncIterator[ExecuteModelRequest], context: grpc.aio.ServicerContext) -> None:
        """Steps in order. While one runs the next is read and given to the thread; a third stays with gRPC."""
        call = _Call()
        self._calls.add(call)
        requests = aiter(requests)
        call.following = asyncio.ensure_future(self._next_step(requests, call))
        try:
            while not call.leaving and (step := await call.following) is not None:
                call.following = asyncio.ensure_future(self._next_step(requests, call))
                await context.write(await step)
        except asyncio.CancelledError:
            if not (call.leaving and call.following.cancelled()):
                raise
        finally:
            call.broken = True
            call.following.cancel()
            call.following.add_done_callback(_disregard)
            self._calls.remove(call)
            self._ending.add(ending := asyncio.create_task(self._expect_end()))
            ending.add_done_callback(self._ending.discard)

    def leave(self) -> None:
        """Ends the streams in order: each behind the step that runs, or now. What they do not answer is not run."""
        for call in self._calls:
            call.leaving = True
            # One that has come already waits in line behind the step that runs.
            if call.following is not None and not call.following.done():
                call.following.cancel()

    async def _expect_end(self) -> None:
        """A stream has ended: what is computed of it comes to an end soon, or hangs."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._hang_timeout_s):
                for thread in (self._steps, self._results):
                    await loop.run_in_executor(thread, _nothing)
        except TimeoutError:
            log.error("a step hangs", extra={"after_s": self._hang_timeout_s})
            self.device_lost.set()

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
        job = _Job(worker.runner, request, call, asyncio.get_running_loop().create_future(), time.monotonic())
        self._steps.submit(self._launch, job)
        return job.answer

    def _launch(self, job: _Job) -> None:
        """On the thread of the steps."""
        if job.answer.cancelled():
            return
        with self._failures_of(job):
            if job.call.broken:
                job.give(ExecuteModelResponse())  # nobody reads it
                return
            step = job.runner.launch(job.request)
            if step.is_finished:
                self._give(job, step)
            else:
                self._results.submit(self._wait, job, step)

    def _wait(self, job: _Job, step: StepInFlight) -> None:
        """On the thread of the results."""
        with self._failures_of(job):
            if job.call.broken:
                job.give(ExecuteModelResponse())  # nobody reads it
            else:
                self._give(job, step)

    def _give(self, job: _Job, step: StepInFlight) -> None:
        response = step.result()
        job.give(response)
        self._observer.executed(job.request, response, job.arrival)

    @contextlib.contextmanager
    def _failures_of(self, job: _Job) -> Iterator[None]:
        """Answers with what is raised inside, after which no further step of the call runs."""
        try:
            yield
        except MalformedStep as error:
            job.call.broken = True
            job.fail(invalid_argument([Violation(error.field, error.description)]))
        except Exception as error:
            job.call.broken = True
            step_id = job.request.step_id
            log.exception("step failed", extra={"step_id": step_id})
            if not job.runner.is_usable():
                job.answer.get_loop().call_soon_threadsafe(self.device_lost.set)
            message = f"step {step_id} failed with {type(error).__name__}; the worker's log says why"
            job.fail(Refusal(grpc.StatusCode.INTERNAL, "STEP_FAILED", message))

    def _require_loaded(self) -> LoadedWorker:
        if self._loaded is None:
            raise unavailable("LOADING", "the worker is still loading its model")
        return self._loaded


def _nothing() -> None:
    """What a thread does when it has done all else."""


def _settle(settle: Callable[[Any], None], answer: "asyncio.Future[ExecuteModelResponse]", outcome: Any) -> None:
    """Gives an answer that has not been cancelled meanwhile."""
    if not answer.done():
        settle(outcome)


def _disregard(outcome: "asyncio.Future[Any]") -> None:
    """What comes of a next step when the one before it has failed is nobody's news; asyncio would report it as lost."""
    if not outcome.cancelled() and outcome.exception() is None and isinstance(outcome.result(), asyncio.Future):
        outcome.result().add_done_callback(_disregard)
