"""The scheduler's end of the wire to its worker: wait until it serves, ask what it loaded, run steps in order."""

import asyncio
import logging
from collections.abc import Callable

import grpc

from protos import rpc
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, GetInfoRequest, GetInfoResponse
from protos.worker_pb2_grpc import WorkerServiceStub
from scheduler.plan import Plan, StepResult, to_request, to_result

log = logging.getLogger(__name__)


class WorkerLost(Exception):
    """The worker, or the stream to it, is gone; what it held of KV can not be used any more."""


class WorkerLink:
    """One worker by its address, through as many of its lives as it takes.

    Args:
        on_lost: called when the stream of steps ends, also while no step runs.
    """

    def __init__(self, address: str, step_timeout_s: float, on_lost: Callable[[], None]) -> None:
        self._channel = rpc.dial(address)
        self._stub = WorkerServiceStub(self._channel)
        self._step_timeout_s = step_timeout_s
        self._on_lost = on_lost
        self._epoch = 0
        self._call: grpc.aio.StreamStreamCall[ExecuteModelRequest, ExecuteModelResponse] | None = None

    async def connect(self) -> GetInfoResponse:
        """Waits, for ever if need be, until the worker serves, and opens a stream of steps to that life of it."""
        self.close_stream()
        while True:
            await rpc.wait_for_serving(self._channel)
            try:
                info = await self._stub.GetInfo(GetInfoRequest(), timeout=10)
                break
            except grpc.aio.AioRpcError as error:
                log.warning("worker does not answer", extra={"code": error.code().name, "details": error.details()})
                await asyncio.sleep(0.1)
        self._epoch = info.epoch
        self._call = self._stub.Execute()
        self._call.add_done_callback(lambda _: self._on_lost())
        return info

    async def check(self) -> None:
        """Raises WorkerLost when the stream of steps has ended."""
        assert self._call is not None, "not connected"
        if self._call.done():
            raise WorkerLost(await self._last_words())

    async def execute(self, plan: Plan) -> StepResult:
        """Runs a step.

        Raises:
            WorkerLost: there is no result, and there will be none.
        """
        assert self._call is not None, "not connected"
        try:
            async with asyncio.timeout(self._step_timeout_s):
                await self._call.write(to_request(plan, self._epoch))
                response = await self._call.read()
        except TimeoutError as error:
            raise WorkerLost(f"no result of step {plan.step_id} within {self._step_timeout_s} s") from error
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise WorkerLost(await self._last_words()) from error
        if not isinstance(response, ExecuteModelResponse):  # the stream's end
            raise WorkerLost(await self._last_words())
        assert response.step_id == plan.step_id, "results out of order"
        return to_result(response)

    def close_stream(self) -> None:
        """Cancels the stream of steps, if one is open: an abandoned call is never collected."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def close(self) -> None:
        """Hangs up."""
        self.close_stream()
        await self._channel.close()

    async def _last_words(self) -> str:
        assert self._call is not None
        return f"{(await self._call.code()).name}: {await self._call.details()}"
