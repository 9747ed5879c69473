"""Ranks as actors of Ray, on one node or on many (Moritz et al., OSDI'18, arXiv:1712.05889).

Ray finds nodes with room for the ranks, and starts a process for each there. Neither the steps nor what ranks send to
each other go through Ray: each rank has a line to the front (`lines.py`), and ends with it. Ray does not restart ranks;
the front ends when one is gone, and it is for its parent to start it again, with a new placement group.
"""

import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore

from worker.checkpoint import ModelError
from worker.config import WorkerSettings
from worker.executor.executor import RankLost
from worker.executor.lines import LOOPBACK, be_rank, dial, meet_ranks
from worker.executor.rank import end_with_parent, start_rank_logging
from worker.ranks import Host, Place

# How long to wait for room: others may be about to leave some, or the cluster may be about to grow.
_PLACEMENT_S = 120.0
# For a cluster of our own: nothing of ours goes through the store, and Ray requires at least 75 MB.
_OBJECT_STORE_BYTES = 100_000_000
# How long a cluster may take to accept a connection.
_ANSWER_S = 10.0
# What `worker.__main__` sets before torch is imported, passed on to ranks that nodes of an existing cluster start.
_HANDED_ON = ("GOMP_SPINCOUNT",)


class RayRanks:
    """The ranks of a worker. Ray keeps them running as long as this object and its process exist.

    Args:
        settings: of the worker.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        # For each rank, the pending result of its `run`: ready only when it has ended.
        self._lives: list[ray.ObjectRef[None]] = []
        self._store: TCPStore | None = None

    def connect(self) -> list[Connection]:
        """Starts the ranks; returns the line to each, in order.

        Raises:
            ModelError: there is no cluster, or no room in it.
            RankLost: one has ended.
        """
        settings, size = self._settings, self._settings.num_ranks
        _join_cluster(settings)
        kind = "GPU" if _computes_on_gpus(settings) else "CPU"
        self._group = _make_room(settings, kind)
        nodes = list(placement_group_table(self._group)["bundles_to_node_id"].values())
        here = ray.get_runtime_context().get_node_id()
        address = LOOPBACK if set(nodes) == {here} else ray.util.get_node_ip_address()
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)

        told = settings.model_copy(update={"device": "cuda" if kind == "GPU" else "cpu"}).model_dump_json()
        for rank, (bundle, host) in enumerate(deal_bundles(nodes, here, has_gpus=kind == "GPU")):
            place = Place(rank, settings.tensor_parallel_size, settings.pipeline_parallel_size)
            actor = (
                ray.remote(RankActor)
                .options(
                    num_cpus=int(kind == "CPU"),
                    num_gpus=int(kind == "GPU"),
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
                    runtime_env=_environment() if settings.ray_address else None,
                )
                .remote()
            )
            self._actors.append(actor)
            self._lives.append(actor.run.remote(told, place, host, address, self._store.port))
        lines = meet_ranks(self._store, address, range(size), self._look)
        return [lines[rank] for rank in range(size)]

    def _look(self, missing: list[int]) -> None:
        """Raises when one of these ranks has ended."""
        ended, _ = ray.wait([self._lives[rank] for rank in missing], timeout=0)
        for life in ended:
            rank = self._lives.index(life)
            try:
                ray.get(life)
            except ray.exceptions.RayError as error:
                raise RankLost(f"rank {rank} has not started: {error}") from error


class RankActor:
    """A rank's process, as Ray sees it."""

    def run(self, settings_json: str, place: Place, host: Host, address: str, port: int) -> None:
        """Runs the rank; does not return."""
        # When the raylet ends, so do its ranks, at once.
        end_with_parent(signal.SIGKILL)
        # From a terminal, SIGINT reaches all processes; the front then drains.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if address == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        settings = WorkerSettings.model_validate_json(settings_json)
        start_rank_logging(settings, place.rank)
        _forget_factory()
        store = TCPStore(address, port, is_master=False)
        be_rank(dial(store, place.rank), settings, place, host, store)


def deal_bundles(nodes: Sequence[str], here: str, *, has_gpus: bool) -> list[tuple[int, Host]]:
    """For each rank in order, its bundle and its part of its host; the ranks of a node are consecutive.

    Args:
        nodes: where each bundle is.
        here: the front's node, whose ranks come first.
        has_gpus: whether a bundle is a GPU; Ray shows each rank only its own.
    """
    order = sorted(range(len(nodes)), key=lambda bundle: (nodes[bundle] != here, nodes[bundle], bundle))
    counts, seen, dealt = Counter(nodes), Counter[str](), []
    for bundle in order:
        node = nodes[bundle]
        dealt.append((bundle, Host(seen[node], counts[node], gpu=0 if has_gpus else None)))
        seen[node] += 1
    return dealt


def _join_cluster(settings: WorkerSettings) -> None:
    """Joins the cluster that the settings name, or starts one.

    Raises:
        ModelError: it cannot be joined or started.
    """
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0"}
    _forget_factory()
    # It is for our gRPC, which has read it; Ray's own gRPC knows other names, and complains in each of its processes.
    os.environ.pop("GRPC_EXPERIMENTS", None)
    own: dict[str, Any] = {"num_cpus": settings.num_ranks, "object_store_memory": _OBJECT_STORE_BYTES}
    if settings.device == "cpu":
        own["num_gpus"] = 0
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that signals are for the main thread
    try:
        if ":" in settings.ray_address:  # Ray would try for two minutes
            host, _, port = settings.ray_address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
        ray.init(
            address=settings.ray_address or "local",
            include_dashboard=False,
            log_to_driver=True,
            configure_logging=False,
            **({} if settings.ray_address else own),
        )
    except (OSError, RuntimeError, ValueError) as error:
        if not settings.ray_address:
            raise ModelError(f"Ray cannot be started on this host: {error}; try again, or --executor mp") from error
        raise ModelError(
            f"cannot join --ray-address {settings.ray_address}: {error}; this host has to be one of its nodes: "
            "`ray start --address=HOST:6379`, with the same versions of Python and Ray"
        ) from error


def _forget_factory() -> None:
    """Removes Ray's record factory, which adds a field of its own to each line that is logged."""
    logging.setLogRecordFactory(logging.LogRecord)


def _environment() -> dict[str, Any]:
    return {"env_vars": {name: os.environ[name] for name in _HANDED_ON if name in os.environ}}


def _computes_on_gpus(settings: WorkerSettings) -> bool:
    if settings.device == "auto":
        return ray.cluster_resources().get("GPU", 0) > 0
    return settings.device == "cuda"


def _make_room(settings: WorkerSettings, kind: str) -> PlacementGroup:
    """A bundle for each rank, on as few nodes as possible.

    Raises:
        ModelError: the cluster does not have that many.
    """
    size = settings.num_ranks
    has_room = bool(settings.ray_address) or ray.cluster_resources().get(kind, 0) >= size
    if has_room:
        group = placement_group([{kind: 1}] * size, strategy="PACK")
        if group.wait(_PLACEMENT_S):
            return group
    total, free = (int(found.get(kind, 0)) for found in (ray.cluster_resources(), ray.available_resources()))
    raise ModelError(
        f"{size} ranks want a {kind} each, and the cluster of Ray has {total}, {free} of them free: add nodes, or "
        "lower --tensor-parallel-size x --pipeline-parallel-size"
    )
