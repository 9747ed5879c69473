"""Which executor runs a worker's ranks, and why."""

import importlib.util
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from worker.checkpoint import ModelError, read_config
from worker.config import ExecutorName, WorkerSettings
from worker.executor.executor import Executor
from worker.executor.external import ExternalRanks
from worker.executor.lines import LinesExecutor
from worker.executor.mp import MpExecutor
from worker.executor.uni import UniExecutor
from worker.models.registry import check_place
from worker.ranks import Place

log = logging.getLogger(__name__)


def make_executor(settings: WorkerSettings) -> Executor:
    """The executor that the settings name, or the first that fits.

    Raises:
        ModelError: none fits, or the one that they name does not.
    """
    num_gpus = torch.cuda.device_count() if settings.device != "cpu" else 0
    name, reason = choose(settings, os.environ, num_gpus, has_ray=importlib.util.find_spec("ray") is not None)
    log.info("executor: %s, since %s", name, reason, extra={"ranks": settings.num_ranks})
    if settings.num_ranks > 1:
        _check_place(settings)
    if name == "uni":
        return UniExecutor(settings)
    if name == "mp":
        return MpExecutor(settings)
    if name == "ray":
        # Ray reads these when it is imported: it is not to drop lines that several ranks log alike, nor to take SIGTERM
        # for a failure.
        os.environ |= {"RAY_DEDUP_LOGS": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
        from worker.executor.ray import RayRanks

        return LinesExecutor(RayRanks(settings).connect)
    return LinesExecutor(ExternalRanks(settings).connect)


def _check_place(settings: WorkerSettings) -> None:
    """Refuses sizes that the model cannot be split into before the ranks start, if its config.json is on this host."""
    directory = Path(settings.model)
    try:
        config = read_config(directory)
    except ModelError:  # a name on the hub, or a folder that only the ranks' hosts have
        return
    check_place(directory, config, Place(0, settings.tensor_parallel_size, settings.pipeline_parallel_size))


def is_follower(settings: WorkerSettings, environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several that torchrun has started, and not the one that serves."""
    return settings.executor in ("auto", "external") and _is_under_torchrun(environment) and environment["RANK"] != "0"


def choose(
    settings: WorkerSettings, environment: Mapping[str, str], num_gpus: int, *, has_ray: bool
) -> tuple[ExecutorName, str]:
    """An executor's name and the reason.

    Args:
        settings: of the worker.
        environment: the environment variables, where torchrun says what it started.
        num_gpus: GPUs of this host that the settings allow; 0: CPUs compute.
        has_ray: whether the package is installed.

    Raises:
        ModelError: see `make_executor`.
    """
    size = settings.num_ranks
    sizes = f"--tensor-parallel-size x --pipeline-parallel-size is {size}"
    under_torchrun = _is_under_torchrun(environment)
    match settings.executor:
        case "auto":
            pass
        case "uni" if size > 1:
            raise ModelError(f"--executor uni is one rank, and {sizes}: leave --executor out")
        case "external" if not under_torchrun:
            raise ModelError(
                "--executor external is for processes that torchrun starts, which sets RANK and WORLD_SIZE"
            )
        case "ray" if not has_ray:
            raise ModelError("--executor ray wants the package: pip install -e '.[ray]'")
        case name:
            return name, "--executor says so"
    # Some platforms set both variables for every process, even for a single one.
    if under_torchrun and environment["WORLD_SIZE"] != "1":
        return "external", "torchrun has started this process"
    if size == 1:
        return "uni", "there is one rank"
    if settings.ray_address:
        if not has_ray:
            raise ModelError("--ray-address wants Ray: pip install -e '.[ray]'")
        return "ray", "--ray-address names a cluster"
    if num_gpus == 0 or num_gpus >= size:
        return "mp", "all ranks have room on this host"
    if has_ray:
        return "ray", f"{size} ranks want a GPU each, and this host has {num_gpus}"
    raise ModelError(
        f"{sizes}, and this host has {num_gpus} GPUs: lower the sizes, or install Ray for more hosts: "
        "pip install -e '.[ray]'"
    )


def _is_under_torchrun(environment: Mapping[str, str]) -> bool:
    return bool(environment.get("RANK") and environment.get("WORLD_SIZE"))
