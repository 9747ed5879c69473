"""Ranks that torchrun has started, of which this process is one; see https://docs.pytorch.org/docs/stable/elastic/run.html.

Rank 0's process serves gRPC and is the front: it has a line to each other rank (`lines.py`) and to its own, which runs
on another thread. The other processes are ranks and nothing else. When one dies, torchrun ends the group, and so does
rank 0; when rank 0 ends, so do they.
"""

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn, Self

from torch.distributed import Store
from torch.distributed.rendezvous import rendezvous

from worker.checkpoint import ModelError
from worker.config import WorkerSettings
from worker.executor.lines import LOOPBACK, be_rank, dial, meet_ranks, run_here
from worker.executor.rank import Rank, end_with_parent
from worker.ranks import Host, Place

_RENDEZVOUS_S = 600.0


@dataclass(frozen=True, slots=True)
class Launched:
    """What torchrun says about this process.

    Attributes:
        place: as a rank.
        host: its part of its host.
        address: of rank 0's host, as the others know it.
    """

    place: Place
    host: Host
    address: str

    @classmethod
    def read(cls, settings: WorkerSettings, environment: Mapping[str, str]) -> Self:
        """Reads it from the environment.

        Raises:
            ModelError: torchrun started other processes than the settings ask for, or none.
        """
        try:
            rank, world_size, local_rank, local_world_size = (
                int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            )
            address = environment["MASTER_ADDR"]
        except (KeyError, ValueError) as error:
            raise ModelError(f"--executor external wants the environment that torchrun sets: {error}") from error
        if not 0 <= rank < world_size:
            raise ModelError(f"RANK is {rank} and WORLD_SIZE {world_size}, so torchrun has not set both")
        if world_size != settings.num_ranks:
            raise ModelError(
                f"torchrun has started {world_size} processes, and --tensor-parallel-size x --pipeline-parallel-size "
                f"is {settings.num_ranks}: make --nnodes x --nproc-per-node and these the same"
            )
        return cls(
            Place(rank, settings.tensor_parallel_size, settings.pipeline_parallel_size),
            Host(local_rank, local_world_size),
            LOOPBACK if local_world_size == world_size else address,
        )

    def meet(self) -> Store:
        """Waits for the store that all ranks share, and returns it.

        Raises:
            ModelError: it is not to be found, or another process has its port.
        """
        if self.address == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_RENDEZVOUS_S)))
        except (ValueError, RuntimeError) as error:  # torch's own errors are of the second type
            raise ModelError(f"the ranks do not meet at MASTER_ADDR and MASTER_PORT: {error}") from error
        return store


class ExternalRanks:
    """The ranks of a worker, as rank 0 sees them.

    Args:
        settings: of the worker.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings

    def connect(self) -> list[Connection]:
        """Waits for the other ranks and starts its own; returns the line to each, in order.

        Raises:
            ModelError: torchrun has started other processes than the settings ask for.
            RankLost: not all have come.
        """
        launched = Launched.read(self._settings, os.environ)
        # Without torchrun this process would otherwise serve on, and keep its port from the processes started next.
        end_with_parent(signal.SIGTERM)
        store = launched.meet()
        others = meet_ranks(store, launched.address, range(1, launched.place.size), _nothing)
        front, own = Pipe()
        rank = Rank(self._settings, launched.place, launched.host, store)
        threading.Thread(target=run_here, args=(own, rank, 0), name="rank 0", daemon=True).start()
        return [front, *(others[rank] for rank in sorted(others))]


def follow(settings: WorkerSettings) -> NoReturn:
    """Runs a rank other than 0; does not return.

    Raises:
        ModelError: torchrun has started other processes than the settings ask for.
    """
    launched = Launched.read(settings, os.environ)
    store = launched.meet()
    line = dial(store, launched.place.rank)
    # Torchrun tells all ranks to stop. Rank 0 drains, and needs the others for that.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    be_rank(line, settings, launched.place, launched.host, store)


def _nothing(missing: list[int]) -> None:
    """Does nothing: torchrun itself checks that all ranks are alive."""
