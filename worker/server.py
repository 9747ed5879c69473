"""The gRPC front of the worker: epoch, order, errors. It computes nothing itself.

One thread launches the steps, in the order in which they were read, so the event loop that answers health checks never
waits for one. Another thread waits for steps that the device is still running, so that the next one is launched before
the device runs dry; on a CPU, a step is done when its launch returns.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.errors import Refusal, Violation, invalid_argument, unavailable
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, GetInfoRequest, GetInfoResponse
from protos.worker_pb2_grpc import WorkerServiceServicer
from worker.executor.executor import Answer, Executor
from worker.inputs import MalformedStep
from worker.observer import Observer

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Call:
    """One call that steps arrive on.

    Attributes:
        broken: whether a step has failed or the client has left. No further step of the call runs.
        steps: for a stream, the steps that have come and are not answered yet, oldest first; None marks its end.
        leaving: whether it is to end after the step that is running.
    """

    broken: bool = False
    steps: "asyncio.Queue[_Job | None]" = field(default_factory=asyncio.Queue)
    leaving: bool = False

    def leave(self) -> None:
        """Ends the stream cleanly; see `WorkerService.leave`."""
        self.leaving = True
        self.steps.put_nowait(None)


@dataclass(frozen=True, slots=True)
class _Job:
    """A step on its way through the threads.

    Attributes:
        call: the call that it arrived on.
        answer: set by one of the threads, through `give` or `fail`.
        arrival: when it arrived, by `time.monotonic`, s.
    """

    executor: Executor
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
        observer: told of every answered step.
        hang_timeout_s: seconds that a step may run on after its stream has ended.

    Attributes:
        device_lost: set when the device has failed for good or hangs; the process has to end then.
    """

    def __init__(self, observer: Observer, hang_timeout_s: float = 60.0) -> None:
        self._observer = observer
        self._hang_timeout_s = hang_timeout_s
        self.device_lost = asyncio.Event()
        self._epoch = secrets.randbits(63)
        self._steps = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")
        self._results = ThreadPoolExecutor(max_workers=1, thread_name_prefix="result")
        self._executor: Executor | None = None
        self._info = GetInfoResponse()
        self._calls: set[_Call] = set()
        # The stream whose steps the cache's blocks are of.
        self._current: _Call | None = None
        # Per ended stream, the task that waits for its last steps.
        self._ending: set[asyncio.Task[None]] = set()

    async def load(self, executor: Executor) -> None:
        """Loads the model on the thread that will run the steps, so that they use its OpenMP team."""
        loop = asyncio.get_running_loop()

        def on_lost() -> None:
            loop.call_soon_threadsafe(self.device_lost.set)

        self._info = await loop.run_in_executor(self._steps, executor.load, on_lost)
        self._executor = executor
        self._observer.info = self._info

    async def GetInfo(self, request: GetInfoRequest, context: grpc.aio.ServicerContext) -> GetInfoResponse:
        """What was loaded, with this process's epoch; waits until no step of an ended stream is running any more."""
        if self._ending:
            await asyncio.wait(self._ending)
        self._require_loaded()
        info = GetInfoResponse(epoch=self._epoch)
        info.MergeFrom(self._info)
        return info

    async def ExecuteModel(
        self, request: ExecuteModelRequest, context: grpc.aio.ServicerContext
    ) -> ExecuteModelResponse:
        """Runs one step by itself."""
        job = self._submit(request, _Call())
        response = await job.answer
        self._observer.executed(request, response, job.arrival, time.monotonic())
        return response

    async def Execute(self, requests: AsyncIterator[ExecuteModelRequest], context: grpc.aio.ServicerContext) -> None:
        """Runs steps in order. While one runs, the next is read and given to the thread; later ones stay with gRPC.

        Where n steps run at once, n + 1 are read.
        """
        self._require_loaded()  # otherwise the load would look like a hanging step once this stream has ended
        call = _Call()
        self._calls.add(call)
        room = asyncio.Semaphore(1 + max(1, self._info.num_concurrent_steps))
        reading = asyncio.create_task(self._read(requests, call, room))
        try:
            while not call.leaving and (job := await call.steps.get()) is not None:
                response, end = await job.answer, time.monotonic()
                await context.write(response)
                room.release()
                # Only once the answer is on its way: the next step waits for that.
                self._observer.executed(job.request, response, job.arrival, end)
            if reading.done():
                reading.result()
        finally:
            call.broken = True
            reading.cancel()
            self._calls.remove(call)
            self._ending.add(ending := asyncio.create_task(self._expect_end()))
            ending.add_done_callback(self._ending.discard)

    def leave(self) -> None:
        """Ends streams cleanly: each after its running step, or now if it has none. Later steps are not run."""
        for call in self._calls:
            call.leave()

    async def _expect_end(self) -> None:
        """Waits for the last steps of a stream that has ended; if they take too long, the device hangs."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._hang_timeout_s):
                for thread in (self._steps, self._results):
                    await loop.run_in_executor(thread, _nothing)
        except TimeoutError:
            log.error("a step hangs", extra={"after_s": self._hang_timeout_s})
            self.device_lost.set()

    async def _read(self, requests: AsyncIterator[ExecuteModelRequest], call: _Call, room: asyncio.Semaphore) -> None:
        """Submits steps as they come, while there is room, until the client sends no more or one is refused."""
        requests = aiter(requests)
        try:
            while await room.acquire() and (request := await anext(requests, None)) is not None and not call.leaving:
                call.steps.put_nowait(self._submit(request, call))
                self._displace(call)
        finally:
            call.steps.put_nowait(None)

    def _displace(self, call: _Call) -> None:
        """Ends the stream whose steps ran before this one's, if it is open: that of a scheduler that is lost, or of a
        second one. Each takes all blocks for its own, and sends everything anew on its next stream.
        """
        if self._current is not call and self._current in self._calls:
            log.warning("steps come on another stream: the one before it ends")
            self._current.leave()
        self._current = call

    def _submit(self, request: ExecuteModelRequest, call: _Call) -> _Job:
        executor = self._require_loaded()
        if request.epoch != self._epoch:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                "WRONG_EPOCH",
                f"step {request.step_id} is for epoch {request.epoch}, and this worker's is {self._epoch}",
            )
        job = _Job(executor, request, call, asyncio.get_running_loop().create_future(), time.monotonic())
        job.answer.add_done_callback(_disregard)
        self._steps.submit(self._launch, job)
        return job

    def _launch(self, job: _Job) -> None:
        """Launches a step, on the thread of the steps."""
        if job.answer.cancelled():
            return
        with self._failures_of(job):
            if job.call.broken:
                job.give(ExecuteModelResponse())  # it is never read
                return
            step = job.executor.launch(job.request)
            if step.is_finished:
                job.give(step.result())
            else:
                self._results.submit(self._wait, job, step)

    def _wait(self, job: _Job, step: Answer) -> None:
        """Waits for a step, on the thread of the results, whether or not its answer will be read."""
        with self._failures_of(job):
            job.give(step.result())

    @contextlib.contextmanager
    def _failures_of(self, job: _Job) -> Iterator[None]:
        """Answers with the exception raised inside, if any; no further step of the call runs then."""
        try:
            yield
        except MalformedStep as error:
            job.call.broken = True
            job.fail(invalid_argument([Violation(error.field, error.description)]))
        except Exception as error:
            job.call.broken = True
            step_id = job.request.step_id
            log.exception("step failed", extra={"step_id": step_id})
            if not job.executor.is_usable():
                job.answer.get_loop().call_soon_threadsafe(self.device_lost.set)
            message = f"step {step_id} failed with {type(error).__name__}; the worker's log says why"
            job.fail(Refusal(grpc.StatusCode.INTERNAL, "STEP_FAILED", message))

    def _require_loaded(self) -> Executor:
        if self._executor is None:
            raise unavailable("LOADING", "the worker is still loading its model")
        return self._executor


def _nothing() -> None:
    """Runs on a thread once all that was submitted to it before has run."""


def _settle(settle: Callable[[Any], None], answer: "asyncio.Future[ExecuteModelResponse]", outcome: Any) -> None:
    """Sets an answer, unless it was cancelled meanwhile."""
    if not answer.done():
        settle(outcome)


def _disregard(answer: "asyncio.Future[ExecuteModelResponse]") -> None:
    """Marks an error as retrieved: after a failed step the next ones' are never read, and asyncio would report that."""
    if not answer.cancelled():
        answer.exception()
