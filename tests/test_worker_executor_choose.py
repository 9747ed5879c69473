"""Which executor runs a worker's ranks, and why."""

import re
from pathlib import Path

import pytest
from worker_fakes import tiny_checkpoint

from worker.checkpoint import ModelError
from worker.config import WorkerSettings
from worker.executor.choose import choose, make_executor
from worker.executor.mp import MpExecutor
from worker.executor.uni import UniExecutor

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2"}


def chosen(*, num_gpus=0, has_ray=False, environment=None, **settings):
    return choose(WorkerSettings(model="m", **settings), environment or {}, num_gpus, has_ray=has_ray)


@pytest.mark.parametrize(
    "facts, name, reason",
    [
        ({}, "uni", "there is one rank"),
        ({"tensor_parallel_size": 3}, "mp", "all ranks have room on this host"),
        ({"pipeline_parallel_size": 2, "num_gpus": 2}, "mp", "all ranks have room on this host"),
        ({"tensor_parallel_size": 4, "num_gpus": 2, "has_ray": True}, "ray", "this host has 2"),
        ({"tensor_parallel_size": 2, "ray_address": "auto", "has_ray": True}, "ray", "--ray-address names a cluster"),
        ({"tensor_parallel_size": 2, "environment": TORCHRUN}, "external", "torchrun has started this process"),
        ({"environment": {"RANK": "0", "WORLD_SIZE": "1"}}, "uni", "there is one rank"),
        ({"environment": {"RANK": "", "WORLD_SIZE": ""}}, "uni", "there is one rank"),
        ({"environment": {"WORLD_SIZE": "2"}}, "uni", "there is one rank"),
        ({"environment": {"RANK": "0"}}, "uni", "there is one rank"),
        ({"executor": "uni"}, "uni", "--executor says so"),
        ({"executor": "mp"}, "mp", "--executor says so"),
        ({"executor": "mp", "environment": TORCHRUN}, "mp", "--executor says so"),
    ],
)
def test_the_first_that_fits_is_taken_unless_one_is_named(facts, name, reason):
    found, why = chosen(**facts)
    assert found == name
    assert reason in why


@pytest.mark.parametrize(
    "facts, remedy",
    [
        ({"executor": "uni", "tensor_parallel_size": 2}, "leave --executor out"),
        ({"executor": "external"}, "torchrun"),
        ({"executor": "ray"}, "pip install -e '.[ray]'"),
        ({"tensor_parallel_size": 2, "ray_address": "auto"}, "pip install -e '.[ray]'"),
        ({"tensor_parallel_size": 4, "num_gpus": 2}, "lower the sizes, or install Ray"),
    ],
)
def test_what_can_not_be_run_is_refused_with_the_remedy(facts, remedy):
    with pytest.raises(ModelError, match=re.escape(remedy)):
        chosen(**facts)


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"tensor_parallel_size": 100}, "possible are 1, 2"),
        ({"pipeline_parallel_size": 100}, "--pipeline-parallel-size is 100, but the model has"),
    ],
)
def test_sizes_that_a_model_can_not_be_shared_out_to_are_refused_before_any_rank_begins(tmp_path, sizes, words):
    tiny_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=words):
        make_executor(WorkerSettings(model=str(tmp_path), device="cpu", **sizes))


def test_the_chosen_executor_is_made(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert isinstance(make_executor(WorkerSettings(model="m", device="cpu")), UniExecutor)
    assert isinstance(make_executor(WorkerSettings(model="m", device="cpu", executor="mp")), MpExecutor)
    external = make_executor(WorkerSettings(model="m", device="cpu", executor="external"))
    with pytest.raises(ModelError, match="wants the environment that torchrun sets"):
        external.load(pytest.fail)


def test_gpus_count_unless_the_settings_leave_them_alone(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(make_executor(WorkerSettings(model="m", device="cpu", tensor_parallel_size=4)), MpExecutor)
    with pytest.raises(ModelError, match="this host has 2 GPUs: lower the sizes, or install Ray"):
        make_executor(WorkerSettings(model="m", tensor_parallel_size=4))


def test_the_wire_to_the_worker_knows_neither_ranks_nor_stages():
    text = (Path(__file__).parents[1] / "protos" / "worker.proto").read_text()
    assert not re.search(r"\brank|tensor|stage|pipeline|executor", text, re.IGNORECASE)
