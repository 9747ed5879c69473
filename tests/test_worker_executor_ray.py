"""Ranks as actors of a real cluster of Ray: what they answer, who hears of their end, and what they leave behind."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from worker_fakes import greedy, step, tiny_checkpoint

from worker.checkpoint import ModelError
from worker.config import WorkerSettings
from worker.executor.choose import make_executor
from worker.executor.executor import RankLost
from worker.executor.uni import UniExecutor
from worker.ranks import Host

ray = pytest.importorskip("ray", reason="Ray is not installed")
logging.setLogRecordFactory(logging.LogRecord)  # Ray's own adds a fact to each line, whoever logs it


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with a CPU each, on this host."""
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    for _ in range(2):
        nodes.add_node(num_cpus=1, object_store_memory=100_000_000, include_dashboard=False)
    yield nodes
    nodes.shutdown()


# To the end of this process, which Ray ends when one thread drops a handle while another one leaves a cluster.
KEPT = []


@pytest.fixture
def join(cluster):
    """Makes an executor with ranks in the cluster, which is left behind the test."""

    def make(model, **changes):
        KEPT.append(make_executor(settings(model, ray_address=cluster.address, **changes)))
        return KEPT[-1]

    yield make
    ray.shutdown()


def settings(checkpoint, **changes):
    options = {"executor": "ray", "tensor_parallel_size": 2, "block_size": 4, "num_gpu_blocks": 32, "num_threads": 1}
    return WorkerSettings(model=str(checkpoint), device="cpu", **(options | changes))


def answers_of_one_rank(checkpoint):
    executor = UniExecutor(settings(checkpoint, executor="uni", tensor_parallel_size=1))
    executor.load(lambda: None)
    return greedy(executor.launch)


def pids_of_ranks():
    """Processes of ranks, by their number; Ray names a process for what it runs."""
    found = subprocess.run(["pgrep", "-f", "^ray::RankActor"], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in found.split() if is_running(int(pid))]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, within_s=20):
    """Waits for processes that other ones end."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_on_two_nodes_answer_as_one_does_and_the_end_of_one_is_the_end_of_all(checkpoint, join):
    executor = join(checkpoint)
    lost = threading.Event()
    assert executor.load(lost.set).model == "tiny-llama"
    assert greedy(executor.launch) == answers_of_one_rank(checkpoint)
    ranks = pids_of_ranks()
    assert len(ranks) == 2
    assert not lost.is_set()
    os.kill(ranks[0], signal.SIGKILL)
    assert lost.wait(10)
    assert not executor.is_usable()
    with pytest.raises(RankLost, match=r"rank [01] is gone"):
        executor.launch(step()).result()
    until(lambda: not pids_of_ranks())


@pytest.mark.long
def test_stages_answer_as_one_rank_does_and_a_node_that_is_lost_is_heard_of_within_a_second(checkpoint, cluster, join):
    node = cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
    executor = join(checkpoint, tensor_parallel_size=2, pipeline_parallel_size=2)
    lost = threading.Event()
    assert executor.load(lost.set).num_concurrent_steps == 2
    assert greedy(executor.launch) == answers_of_one_rank(checkpoint)
    node.kill_raylet()
    assert lost.wait(1)
    until(lambda: not pids_of_ranks())
    cluster.remove_node(node)
    until(lambda: ray.cluster_resources()["CPU"] == 2)  # or the next test's cluster would have it still


@pytest.mark.long
def test_a_worker_that_is_killed_leaves_nothing_in_the_cluster_and_the_next_one_has_its_room(
    checkpoint, cluster, join, tmp_path
):
    flags = {
        "model": checkpoint,
        "listen": f"unix:{tmp_path}/worker.sock",
        "executor": "ray",
        "ray-address": cluster.address,
        "tensor-parallel-size": 2,
        "num-gpu-blocks": 32,
    }
    command = [sys.executable, "-m", "worker", *(f"--{name}={value}" for name, value in flags.items())]
    log = tmp_path / "log"
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr, stdout=stderr) as worker:
        try:
            until(lambda: worker.poll() is not None or "serving" in log.read_text(), within_s=60)
            assert worker.poll() is None, log.read_text()
            assert len(pids_of_ranks()) == 2
        finally:
            worker.kill()
    until(lambda: not pids_of_ranks(), within_s=10)

    executor = join(checkpoint)
    lost = threading.Event()
    executor.load(lost.set)
    live = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    assert len(live) == 1, "a placement group was left behind"
    assert "worker/1" in log.read_text()
    assert "worker/0" in log.read_text()


@pytest.mark.long
def test_a_raylet_that_is_killed_ends_the_worker_that_has_started_it_with_1(checkpoint, tmp_path):
    flags = {"model": checkpoint, "listen": f"unix:{tmp_path}/worker.sock", "executor": "ray", "num-gpu-blocks": 32}
    flags |= {"pipeline-parallel-size": 2, "device": "cpu"}
    command = [sys.executable, "-m", "worker", *(f"--{name}={value}" for name, value in flags.items())]
    log = tmp_path / "log"
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr, stdout=stderr) as worker:
        try:
            until(lambda: worker.poll() is not None or "serving" in log.read_text(), within_s=60)
            found = ["pgrep", "-P", str(worker.pid), "raylet"]
            (raylet,) = map(int, subprocess.run(found, capture_output=True, text=True, check=True).stdout.split())
            os.kill(raylet, signal.SIGKILL)
            assert worker.wait(30) == 1
        finally:
            worker.kill()
    until(lambda: not pids_of_ranks(), within_s=10)
    assert "ranks lost" in log.read_text()


@pytest.mark.long
def test_a_model_that_a_node_does_not_have_is_named_with_the_rank_and_the_host(join, tmp_path):
    executor = join(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"there is no directory .*/nowhere \(rank [01] on "):
        executor.load(pytest.fail)


@pytest.mark.long
def test_a_cluster_without_room_says_what_it_has(checkpoint, join, monkeypatch):
    monkeypatch.setattr("worker.executor.ray._PLACEMENT_S", 0.5)
    executor = join(checkpoint, pipeline_parallel_size=2)
    # How many are free is Ray's own count, which those of ranks that were killed take a while to come back to.
    with pytest.raises(ModelError, match=r"4 ranks want a CPU each, and the cluster of Ray has 2, [012] of them free"):
        executor.load(pytest.fail)


def test_a_cluster_that_is_not_there_is_named(checkpoint):
    executor = make_executor(settings(checkpoint, ray_address="127.0.0.1:1"))
    with pytest.raises(ModelError, match=r"cannot join --ray-address 127.0.0.1:1: .*`ray start --address"):
        executor.load(pytest.fail)


def test_ranks_of_a_node_follow_each_other_and_those_beside_the_front_come_first():
    from worker.executor.ray import deal_bundles

    assert deal_bundles(["b", "a", "b", "a"], "b", has_gpus=False) == [
        (0, Host(0, 2)),
        (2, Host(1, 2)),
        (1, Host(0, 2)),
        (3, Host(1, 2)),
    ]
    assert deal_bundles(["b", "a"], "c", has_gpus=True) == [(1, Host(0, 1, gpu=0)), (0, Host(0, 1, gpu=0))]
