"""One rank, on the threads of the worker's own process."""

import os
from collections.abc import Callable

from protos.worker_pb2 import ExecuteModelRequest, GetInfoResponse
from worker.config import WorkerSettings
from worker.loading import LoadedWorker, load_worker, populate_beside
from worker.step_in_flight import StepInFlight


class UniExecutor:
    """See `Executor`."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._loaded: LoadedWorker | None = None

    def load(self, on_lost: Callable[[], None]) -> GetInfoResponse:
        """See `Executor`; only a step shows that the device is lost, so `on_lost` is never called."""
        cores = os.sched_getaffinity(0)
        self._loaded = load_worker(self._settings)
        populate_beside(self._loaded.runner, cores)
        return self._loaded.info

    def launch(self, request: ExecuteModelRequest) -> StepInFlight:
        """See `Executor`."""
        assert self._loaded is not None, "not loaded"
        return self._loaded.runner.launch(request)

    def is_usable(self) -> bool:
        """See `Executor`."""
        return self._loaded is not None and self._loaded.runner.is_usable()

    def close(self) -> None:
        """See `Executor`; there are no other ranks."""
