"""Ranks as processes of this host. This process, the front, computes nothing.

Steps go to all ranks through memory that they share (`ring.py`); rank 0 answers through a pipe. Ranks die with the
front, and when one of them ends or is stopped, the front ends the others and itself, within a fraction of a second; it
is for the front's parent to start it again.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from operator import methodcaller
from typing import Any

from torch.distributed import TCPStore

from kernels.cpu_meeting import shared_memory
from protos.process import calm_collector
from protos.worker_pb2 import ExecuteModelRequest, GetInfoResponse
from worker.checkpoint import ModelError
from worker.config import WorkerSettings
from worker.executor.executor import RankLost
from worker.executor.rank import Outcome, Rank, end_with_parent, start_rank_logging
from worker.executor.ring import RingReader, RingWriter
from worker.executor.told import NumberedAnswer, read_outcome, tag_end, tag_info, tag_outcome, wait_for_infos
from worker.inputs import MalformedStep
from worker.ranks import Host, Place

_HOST = "127.0.0.1"
# How often the front checks whether a rank was stopped by a signal; when one has ended, it is told at once.
_LOOK_S = 0.25

log = logging.getLogger(__name__)


class MpExecutor:
    """See `Executor`.

    Args:
        settings: of the worker, with the number of ranks.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        # Holds the addresses where ranks find each other; NCCL's threads read it as long as they run.
        self._store: TCPStore | None = None
        self._processes: list[BaseProcess] = []
        self._steps: RingWriter | None = None
        # What each rank reports.
        self._told: list[Connection] = []
        self._num_launched = 0
        self._num_answered = 0
        self._loss: str | None = None
        self._has_ended = threading.Event()

    def load(self, on_lost: Callable[[], None]) -> GetInfoResponse:
        """See `Executor`. Ranks are children of the calling thread, and die with it."""
        size = self._settings.num_ranks
        self._store = _open_store()
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        self._steps = RingWriter([writer for _, writer in pipes])
        tensor_size, num_stages = self._settings.tensor_parallel_size, self._settings.pipeline_parallel_size
        meetings = [shared_memory(tensor_size) for _ in range(num_stages)]
        for rank, (places, _) in enumerate(pipes):
            told, tell = context.Pipe(duplex=False)
            place = Place(rank, tensor_size, num_stages)
            start = _Start(self._settings.model_dump_json(), place, self._store.port, os.getpid())
            steps, meeting = _Descriptor(self._steps.descriptor), _Descriptor(meetings[place.stage])
            arguments = (start, steps, meeting, places, tell)
            process = context.Process(target=_run, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            places.close()
            tell.close()
            self._processes.append(process)
            self._told.append(told)
        threading.Thread(target=self._watch, args=(on_lost,), name="watch", daemon=True).start()
        return self._wait_for_infos()

    def launch(self, request: ExecuteModelRequest) -> NumberedAnswer:
        """See `Executor`."""
        assert self._steps is not None, "not loaded"
        message = request.SerializeToString()
        try:
            self._steps.write(message)
        except ValueError as error:
            raise MalformedStep("block_tables", str(error)) from error
        except OSError as error:
            raise self._lost() from error
        self._num_launched += 1
        return NumberedAnswer(self.answer, self._num_launched)

    def is_usable(self) -> bool:
        """See `Executor`."""
        return self._loss is None

    def close(self) -> None:
        """See `Executor`."""
        self._loss = self._loss or "closed"
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def answer(self, number: int) -> Outcome:
        """Rank 0's answer to the `number`th step that was launched; answers to earlier steps are skipped."""
        try:
            while True:
                message = self._told[0].recv_bytes()
                self._num_answered += 1
                outcome = read_outcome(message)
                if isinstance(outcome, RankLost):
                    self._end(f"rank 0 failed: {outcome}")
                if self._num_answered == number:
                    return outcome
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def _wait_for_infos(self) -> GetInfoResponse:
        """Rank 0's info, once all ranks are ready."""
        try:
            return wait_for_infos(self._told)
        except (ModelError, RankLost):
            self._end("one cannot load the model")
            raise
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def _watch(self, on_lost: Callable[[], None]) -> None:
        """Ends all ranks when one of them has ended or was stopped."""
        while (loss := _loss(self._processes)) is None:
            wait([process.sentinel for process in self._processes], timeout=_LOOK_S)
        if self.is_usable():
            self._end(loss)
            on_lost()

    def _end(self, loss: str) -> None:
        log.error("ranks lost: %s", loss)
        self._loss = loss
        self._has_ended.set()
        for process in self._processes:
            process.kill()

    def _lost(self) -> RankLost:
        """Why a pipe ended: the watch thread is about to say so, if it has not already."""
        self._has_ended.wait(timeout=2 * _LOOK_S)
        return RankLost(self._loss or "a rank closed its pipe")


def _open_store() -> TCPStore:
    """Where ranks find each other. By default it would listen on all of the host's addresses, and it trusts anyone."""
    listening = socket.create_server((_HOST, 0))
    port = listening.getsockname()[1]
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _loss(processes: Sequence[BaseProcess]) -> str | None:
    """Which rank ended, or was stopped, and how; None while all run."""
    for process in processes:
        if (code := process.exitcode) is not None:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            return f"{process.name} {how}"
        assert process.pid is not None
        stopped = None
        with contextlib.suppress(ChildProcessError):  # another thread has just seen its end
            stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG)
        if stopped is not None:
            return f"{process.name} was stopped by {signal.Signals(stopped.si_status).name}"
    return None


@dataclass(frozen=True, slots=True)
class _Start:
    """What a rank is told when it is spawned.

    Attributes:
        settings: of the worker, JSON.
        place: the rank's.
        port: of the store.
        front: the front's pid.
    """

    settings: str
    place: Place
    port: int
    front: int


@dataclass(frozen=True, slots=True)
class _Descriptor:
    """A file descriptor for a process that is being spawned, which gets the number of its own copy instead."""

    number: int

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        """So it is inherited. A `DupFd` made earlier is fetched from a socket, whose folder outlives this process."""
        return methodcaller("detach"), (DupFd(self.number),)


def _run(start: _Start, steps: int, meeting: int, places: Connection, tell: Connection) -> None:
    """Runs a rank's process until it ends."""
    # The front ends it, and what ends the front ends it too: a signal to the process group is for the front alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    if os.getppid() != start.front:
        os._exit(1)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    settings = WorkerSettings.model_validate_json(start.settings)
    start_rank_logging(settings, start.place.rank)
    try:
        store = TCPStore(_HOST, start.port, is_master=False)
        rank = Rank(settings, start.place, Host(start.place.rank, start.place.size), store, meeting)
        info = rank.load()
        ring = RingReader(steps, start.place.rank, places)
        calm_collector()
        tell.send_bytes(tag_info(info))
        answers = start.place.rank == 0
        rank.run(ring.read, (lambda outcome: tell.send_bytes(tag_outcome(outcome))) if answers else None)
    except ModelError as error:
        tell.send_bytes(tag_end(error))
    except Exception:
        log.exception("rank failed")
    os._exit(1)
