"""Ranks under torchrun, as real processes: what they answer, and that they end together."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from worker_fakes import greedy, tiny_checkpoint

from protos.rpc import dial, wait_for_serving
from protos.worker_pb2 import DESCRIPTOR, GetInfoRequest
from protos.worker_pb2_grpc import WorkerServiceStub
from worker.checkpoint import ModelError
from worker.config import WorkerSettings
from worker.executor.choose import is_follower
from worker.executor.external import Launched
from worker.executor.uni import UniExecutor
from worker.ranks import Host, Place

NAME = DESCRIPTOR.services_by_name["WorkerService"].full_name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


def settings(checkpoint, **changes):
    return WorkerSettings(model=str(checkpoint), block_size=4, num_gpu_blocks=32, num_threads=1, **changes)


class Torchrun:
    """A process of torchrun and the ranks that it has started."""

    def __init__(self, process, stub, log):
        self.process, self.stub, self._log = process, stub, log
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        self.ranks = {int(variables(pid)["RANK"]): int(pid) for pid in children.read_text().split()}

    async def ended(self):
        """Torchrun's status, once no process is left."""
        async with asyncio.timeout(20):
            status = await self.process.wait()
            while any(is_running(pid) for pid in self.ranks.values()):
                await asyncio.sleep(0.02)
        return status

    @property
    def log(self):
        return self._log.read_text()


def variables(pid):
    """The environment that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.asynccontextmanager
async def torchrun(checkpoint, tmp_path, *flags):
    """Two ranks that serve."""
    address, log = f"unix:{tmp_path}/worker.sock", tmp_path / "log"
    arguments = ["--model", checkpoint, "--listen", address, "--block-size", 4, "--num-gpu-blocks", 32, *flags]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "worker"]
    with log.open("w") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *map(str, launcher + arguments),
            "--num-threads=1",
            "--drain-grace-s=0",
            stdout=stderr,
            stderr=stderr,
        )
    started = None
    try:
        async with asyncio.timeout(90), dial(address) as channel:
            serving = asyncio.ensure_future(wait_for_serving(channel, NAME))
            ended = asyncio.ensure_future(process.wait())
            await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
            assert not ended.done(), log.read_text()
            ended.cancel()
            started = Torchrun(process, WorkerServiceStub(channel), log)
            yield started
    finally:
        for pid in (process.pid, *(started.ranks.values() if started else ())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def answers_of(stub):
    """What the ranks answer over gRPC to the steps of `greedy`."""
    epoch = (await stub.GetInfo(GetInfoRequest())).epoch
    loop = asyncio.get_running_loop()

    def launch(request):
        request.epoch = epoch

        async def ask():
            return await stub.ExecuteModel(request)

        return asyncio.run_coroutine_threadsafe(ask(), loop)

    return await asyncio.to_thread(greedy, launch)


def answers_of_one_rank(checkpoint):
    executor = UniExecutor(settings(checkpoint))
    executor.load(pytest.fail)
    return greedy(executor.launch)


async def test_two_ranks_under_torchrun_answer_as_one_does_and_end_with_0_on_sigterm(checkpoint, tmp_path):
    async with torchrun(checkpoint, tmp_path, "--tensor-parallel-size", 2) as started:
        assert await answers_of(started.stub) == answers_of_one_rank(checkpoint)
        info = await started.stub.GetInfo(GetInfoRequest())
        assert (info.model, info.num_blocks, info.num_concurrent_steps) == ("tiny-llama", 32, 0)
        started.process.terminate()
        await started.ended()
    assert "stopping" in started.log
    assert "failed (exitcode" not in started.log, started.log
    assert "worker/1" in started.log


@pytest.mark.long
async def test_two_stages_under_torchrun_answer_as_one_rank_does(checkpoint, tmp_path):
    async with torchrun(checkpoint, tmp_path, "--pipeline-parallel-size", 2) as started:
        assert await answers_of(started.stub) == answers_of_one_rank(checkpoint)
        assert (await started.stub.GetInfo(GetInfoRequest())).num_concurrent_steps == 2


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
async def test_no_rank_outlives_another_though_nothing_runs(checkpoint, tmp_path, rank):
    async with torchrun(checkpoint, tmp_path, "--tensor-parallel-size", 2) as started:
        os.kill(started.ranks[rank], signal.SIGKILL)
        assert await started.ended() == 1
    assert (f"ranks lost: rank {rank} is gone" in started.log) == (rank == 1)


@pytest.mark.long
async def test_no_rank_outlives_torchrun(checkpoint, tmp_path):
    async with torchrun(checkpoint, tmp_path, "--tensor-parallel-size", 2) as started:
        started.process.kill()
        assert await started.ended() == -signal.SIGKILL
    assert "stopping" in started.log


TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host-0"}


def test_a_rank_knows_its_place_and_where_rank_0_is():
    pair = settings("x", tensor_parallel_size=2)
    assert Launched.read(pair, TWO) == Launched(Place(1, 2), Host(1, 2), "127.0.0.1")
    apart = TWO | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert Launched.read(pair, apart) == Launched(Place(1, 2), Host(0, 1), "host-0")


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"WORLD_SIZE": "3"}, "torchrun has started 3 processes, and .* is 2: make --nnodes x --nproc-per-node"),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE 2, so torchrun has not set both"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK is 1 and WORLD_SIZE 1"),
        ({"RANK": "-1"}, "RANK is -1"),
        ({"LOCAL_RANK": "one"}, "wants the environment that torchrun sets: .*'one'"),
    ],
)
def test_what_torchrun_has_started_has_to_fit_the_sizes(changes, complaint):
    with pytest.raises(ModelError, match=complaint):
        Launched.read(settings("x", tensor_parallel_size=2), TWO | changes)


def test_a_rank_that_is_no_number_is_an_error_that_names_it():
    command = [sys.executable, "-m", "worker", "--model", "x"]
    ended = subprocess.run(command, env=os.environ | TWO | {"RANK": "one"}, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "wants the environment that torchrun sets" in ended.stderr
    assert "'one'" in ended.stderr


@pytest.mark.parametrize(
    "port, complaint",
    [(None, "MASTER_PORT expected, but not set"), ("seven", "'seven'"), ("taken", "address already in use")],
)
def test_ranks_that_cannot_meet_are_told_where_they_should(monkeypatch, port, complaint):
    with socket.create_server(("127.0.0.1", 0)) as another:
        ours = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        for name, value in (TWO | ours).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("MASTER_PORT", raising=False)
        if port is not None:
            monkeypatch.setenv("MASTER_PORT", str(another.getsockname()[1]) if port == "taken" else port)
        launched = Launched.read(settings("x", tensor_parallel_size=2), os.environ)
        with pytest.raises(ModelError, match=f"do not meet at MASTER_ADDR and MASTER_PORT: .*{complaint}"):
            launched.meet()


def test_all_ranks_but_the_first_serve_nobody():
    pair = settings("x", tensor_parallel_size=2)
    assert is_follower(pair, TWO)
    assert not is_follower(pair, TWO | {"RANK": "0"})
    assert not is_follower(pair, {})
    assert not is_follower(pair, TWO | {"RANK": ""})
    assert not is_follower(settings("x", executor="mp"), TWO)
