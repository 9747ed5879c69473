"""What a rank does wherever it runs: meets the others, loads its share of the model, runs the steps that all run."""

import ctypes
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable

import torch
from torch import distributed

from kernels.cpu import CpuKernels, KernelsUnavailable
from kernels.cpu_meeting import CpuMeeting
from protos.process import start_logging
from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, GetInfoResponse
from worker.config import WorkerSettings
from worker.inputs import MalformedStep
from worker.loading import LoadedWorker, load_worker, populate_beside, prepare_device
from worker.ranks import Host, Place, Ranks
from worker.step_in_flight import StepInFlight

log = logging.getLogger(__name__)

# The response to a step, or why there is none; a malformed step is not the rank's fault.
Outcome = ExecuteModelResponse | Exception
# How long the others may still be loading when this one has loaded.
_MEETING_S = 600.0
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Has the kernel send this process a signal when the thread that has started it is gone (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def start_rank_logging(settings: WorkerSettings, number: int | str) -> None:
    """Logs as the worker does, with the rank's number after its name."""
    name = f"{settings.log_name or 'worker'}/{number}"
    start_logging("worker", settings.model_copy(update={"log_name": name}))


class Rank:
    """One of the ranks of a worker.

    Args:
        settings: of the worker.
        place: this rank's.
        host: this rank's part of its host.
        store: where all ranks find each other.
        meeting: descriptor of memory that it shares with its tensor group; None: there is none.
    """

    def __init__(
        self, settings: WorkerSettings, place: Place, host: Host, store: distributed.Store, meeting: int | None = None
    ) -> None:
        self._settings, self._place, self._host, self._store, self._meeting = settings, place, host, store, meeting
        self._loaded: LoadedWorker | None = None

    def load(self) -> GetInfoResponse:
        """Meets the others and loads; see `Executor.load`."""
        cores = self._host.cores(os.sched_getaffinity(0))
        device = prepare_device(self._settings, self._host)
        timeout_s = max(_MEETING_S, self._settings.hang_timeout_s)
        ranks = Ranks.join(self._place, self._store, device, timeout_s, self._make_meeting(device, timeout_s))
        self._loaded = load_worker(self._settings, ranks, self._host, device)
        populate_beside(self._loaded.runner, cores)
        return self._loaded.info

    def _make_meeting(self, device: torch.device, timeout_s: float) -> CpuMeeting | None:
        place = self._place
        if self._meeting is None or device.type != "cpu" or place.tensor_size == 1:
            return None
        try:
            kernels = CpuKernels()
        except KernelsUnavailable as problem:
            log.warning("ranks talk through sockets, since %s", problem)
            return None
        return kernels.meeting(self._meeting, place.tensor_rank, place.tensor_size, timeout_s)

    def launch(self, message: bytes) -> "StepInFlight | MalformedStep":
        """Launches one step on the device; returns the error if it is malformed.

        Raises:
            MalformedStep: there are several stages, which check different parts of it: the others may have begun.
        """
        assert self._loaded is not None, "not loaded"
        try:
            return self._loaded.runner.launch(ExecuteModelRequest.FromString(message))
        except MalformedStep as error:
            if self._place.num_stages > 1:
                raise
            return error

    def run(self, steps: Callable[[], bytes | None], answer: Callable[[Outcome], None] | None) -> None:
        """Runs steps until there are no more; the next one is read while the device is running those before.

        Args:
            steps: waits for the next one and returns it; None if there are no more.
            answer: called with the outcome of each, by any thread but in order; None: this rank does not answer.
        """
        waiting: queue.Queue[StepInFlight | MalformedStep] = queue.Queue()

        def wait(answer: Callable[[Outcome], None]) -> None:
            while True:
                answer(_outcome(waiting.get()))
                waiting.task_done()

        if answer is not None:
            threading.Thread(target=wait, args=(answer,), name="result", daemon=True).start()
        while (message := steps()) is not None:
            step = self.launch(message)
            if answer is None:
                continue
            if waiting.unfinished_tasks == 0 and (isinstance(step, MalformedStep) or step.is_finished):
                answer(_outcome(step))  # the time to wake up a thread is a good part of a short step
            else:
                waiting.put(step)


def _outcome(step: StepInFlight | MalformedStep) -> Outcome:
    try:
        return step if isinstance(step, MalformedStep) else step.result()
    except Exception as error:
        return error
