"""Ranks as processes of this host: they say what one rank says, and none of them outlives another."""

import asyncio
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from worker_fakes import GREEDY, Row, step, tiny_checkpoint, tokens

torch = pytest.importorskip("torch")

from protos.rpc import dial, wait_for_serving  # noqa: E402
from protos.worker_pb2 import ExecuteModelResponse, GetInfoResponse  # noqa: E402
from worker.checkpoint import ModelError  # noqa: E402
from worker.config import WorkerSettings  # noqa: E402
from worker.executor import mp  # noqa: E402
from worker.executor.executor import RankLost  # noqa: E402
from worker.executor.mp import MpExecutor  # noqa: E402
from worker.executor.rank import Rank  # noqa: E402
from worker.executor.ring import RingWriter  # noqa: E402
from worker.executor.told import tag_end, tag_outcome  # noqa: E402
from worker.executor.uni import UniExecutor  # noqa: E402
from worker.inputs import MalformedStep  # noqa: E402
from worker.model_runner import ModelRunner  # noqa: E402
from worker.observer import Observer  # noqa: E402
from worker.ranks import Host, Place  # noqa: E402

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Two layers with two K/V heads for four query heads."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Of three K/V heads rank 0 of two gets one, so it has room for twice as many blocks as the other one."""
    folder = tmp_path_factory.mktemp("tiny") / "uneven"
    return tiny_checkpoint(folder, hidden_size=48, num_attention_heads=6, num_key_value_heads=3)


def settings(checkpoint, tensor=1, stages=1, *, num_blocks=32, block_size=4):
    return WorkerSettings(
        model=str(checkpoint),
        dtype="float32",
        block_size=block_size,
        num_gpu_blocks=num_blocks,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
    )


class Running:
    """A loaded executor of several ranks.

    Attributes:
        lost: set when it says that it is.
    """

    def __init__(self, settings):
        # To have loaded one rank in this thread has bound it to one core, and ranks have the cores of who starts them.
        os.sched_setaffinity(0, range(os.cpu_count()))
        self.executor, self.lost = MpExecutor(settings), threading.Event()
        self.info = self.executor.load(self.lost.set)

    def execute(self, request):
        return self.executor.launch(request).result()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.executor.close()


PROMPT = [5, 17, 3, 88, 42]


def prompt(step_id=1, request_id=1):
    return step(Row(request_id, PROMPT, [0, 1, 2]), new={request_id: GREEDY}, step_id=step_id)


@pytest.mark.parametrize("tensor, stages", [pytest.param(2, 1, marks=pytest.mark.long), (2, 2)])
def test_a_few_steps_give_the_tokens_of_one_rank_in_as_many_blocks_as_all_have(uneven, tensor, stages, capfd):
    alone = UniExecutor(settings(uneven))
    alone.load(lambda: None)
    # A block of two K/V heads takes 512 bytes in each layer.
    each = settings(uneven, tensor, stages, num_blocks=None).model_copy(update={"kv_cache_bytes": 64 << 10})
    with Running(each) as running:
        assert running.info.num_blocks == 64 * stages
        port = running.executor._store.port
        socket.create_connection(("127.0.0.1", port), timeout=10).close()  # where ranks may look again
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=10)  # any other address of this host
        assert running.info.num_concurrent_steps == (stages if stages > 1 else 0)
        for process in running.executor._processes:  # one that is sent to the process group is for the front alone
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(process.pid, number)
        for request in (prompt(), prompt(step_id=2, request_id=2)):
            assert tokens(running.execute(request)) == tokens(alone.launch(request).result())
        assert not any(told.poll() for told in running.executor._told[1:]), "answers that nobody reads fill a pipe"
        bad = prompt()
        bad.block_tables = b""
        if stages == 1:
            with pytest.raises(MalformedStep, match="block_tables"):
                running.execute(bad)
            assert running.executor.is_usable()
            # Both are on their way before the first is answered.
            answers = [running.executor.launch(decode(at)) for at in range(2)]
            expected = [tokens(alone.launch(decode(at)).result()) for at in range(2)]
            assert [tokens(answer.result()) for answer in answers] == expected
            # That a rank ends is noticed though nobody waits for it.
            os.kill(running.executor._processes[0].pid, signal.SIGKILL)
            assert running.lost.wait(timeout=10)
            with pytest.raises(RankLost, match="rank 0 was ended by SIGKILL"):
                running.execute(prompt())
        else:
            with pytest.raises(RankLost):
                running.execute(decode(0))  # a stage does not know what another one samples
            assert running.lost.wait(timeout=10)
            assert "stands for a token that another stage samples" in capfd.readouterr().err


def decode(at):
    return step(Row(1, [-1], [0, 1, 2], computed=5 + at), step_id=10 + at)


@pytest.mark.parametrize(
    "number, how", [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSTOP, "was stopped by SIGSTOP")]
)
def test_a_rank_that_dies_or_is_stopped_takes_all_down_within_a_second(checkpoint, number, how):
    with Running(settings(checkpoint, 2)) as running:
        processes = running.executor._processes
        os.kill(processes[1].pid, number)
        answer = running.executor.launch(prompt())
        with pytest.raises(RankLost, match=f"rank 1 {how}"):
            answer.result()
        assert running.lost.wait(timeout=10)
        assert not running.executor.is_usable()
        for process in processes:
            process.join(timeout=10)
            assert process.exitcode is not None


def test_a_rank_whose_step_has_failed_is_not_usable_any_more(checkpoint):
    executor = MpExecutor(settings(checkpoint, 2))
    told, tell = multiprocessing.Pipe(duplex=False)
    executor._told = [told]
    tell.send_bytes(tag_outcome(RuntimeError("CUDA error")))
    assert "CUDA error" in str(executor.answer(1))
    assert not executor.is_usable()


def test_the_front_asks_nothing_of_a_gpu_that_only_its_ranks_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: pytest.fail("it would take memory of the GPU for itself"))
    observer = Observer()
    observer.info = GetInfoResponse(device="cuda")
    (memory,) = (metric for metric in observer.metrics() if metric.name == "pagewire_worker_device_memory_bytes")
    assert memory.read() is None


def test_what_a_rank_can_not_load_is_told_in_its_words(checkpoint):
    with pytest.raises(ModelError, match="does not deal out 4 query heads on 2 key/value heads: possible are 1, 2, 4"):
        MpExecutor(settings(checkpoint, 3)).load(lambda: None)


def test_a_rank_that_ends_because_another_one_can_not_load_does_not_hide_why(checkpoint):
    executor = MpExecutor(settings(checkpoint, 2))
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    executor._told = [told for told, _ in pipes]
    pipes[1][1].send_bytes(tag_end(ModelError("no memory")))
    pipes[0][1].close()
    executor._processes = [process := Ended()]
    with pytest.raises(ModelError, match="no memory"):
        executor._wait_for_infos()
    assert process.calls == ["kill"]


def test_a_rank_that_ends_without_a_word_while_it_loads_is_lost_as_the_watch_says(checkpoint, monkeypatch):
    monkeypatch.setattr(mp, "_LOOK_S", 10)
    executor = MpExecutor(settings(checkpoint, 2))
    executor._told, tells = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(2)), strict=True)
    tells[1].close()
    executor._processes = [Ended()]
    threading.Timer(0.05, executor._watch, [lambda: None]).start()
    with pytest.raises(RankLost, match="rank 1 ended with status 1"):
        executor._wait_for_infos()


class Ended:
    """The process of a rank that has ended, and what it was told to do since."""

    name, pid = "rank 1", os.getpid()

    def __init__(self, exitcode=1):
        self.exitcode, self.calls = exitcode, []

    def kill(self):
        self.calls.append("kill")

    def join(self):
        self.calls.append("join")


@pytest.mark.parametrize(
    "status, how", [(0, "ended with status 0"), (1, "ended with status 1"), (-11, "was ended by SIGSEGV")]
)
def test_the_end_of_a_rank_is_told_whatever_its_status(checkpoint, status, how, caplog):
    executor, lost = MpExecutor(settings(checkpoint, 2)), threading.Event()
    executor._processes = [Ended(status)]
    executor._watch(lost.set)
    assert lost.is_set()
    assert caplog.messages == [f"ranks lost: rank 1 {how}"]


def test_a_rank_whose_end_another_thread_has_just_seen_is_looked_at_once_more():
    assert mp._loss([Ended(exitcode=None)]) is None  # the system knows of no such child any more


def test_the_end_of_an_executor_that_is_closed_is_no_loss(checkpoint, caplog):
    executor = MpExecutor(settings(checkpoint, 2))
    executor._processes = [process := Ended(-9)]
    executor.close()
    assert process.calls == ["kill", "join"]
    executor._watch(pytest.fail)
    assert not executor.is_usable()
    assert not caplog.messages


def test_a_step_that_is_larger_than_the_memory_for_steps_is_malformed_and_the_next_one_is_answered(checkpoint):
    executor = MpExecutor(settings(checkpoint, 2))
    (places, place), (told, tell) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
    executor._steps, executor._told = RingWriter([place], capacity_bytes=256), [told]
    with pytest.raises(MalformedStep, match=r"block_tables: a message of .* bytes; there is room for 256"):
        executor.launch(step(Row(1, PROMPT, range(256))))
    tell.send_bytes(tag_outcome(ExecuteModelResponse(step_id=7)))
    tell.close()
    assert executor.launch(step(step_id=7)).result().step_id == 7
    places.close()


def test_answers_that_nobody_has_asked_for_are_passed_over(checkpoint):
    executor = MpExecutor(settings(checkpoint, 2))
    told, tell = multiprocessing.Pipe(duplex=False)
    executor._told = [told]
    for step_id in (1, 2, 3):
        tell.send_bytes(tag_outcome(ExecuteModelResponse(step_id=step_id)))
    assert [executor.answer(2).step_id, executor.answer(3).step_id] == [2, 3]


@pytest.mark.parametrize(
    "load",
    [
        lambda settings: UniExecutor(settings).load(lambda: None),
        lambda settings: Rank(settings, Place(), Host(), store=None).load(),
    ],
    ids=["uni", "rank"],
)
def test_a_rank_computes_on_all_its_cores_and_takes_the_caches_memory_on_any_of_them(checkpoint, monkeypatch, load):
    populated_on = queue.Queue()
    monkeypatch.setattr(ModelRunner, "populate_cache", lambda self: populated_on.put(os.sched_getaffinity(0)))

    def act():
        os.sched_setaffinity(0, range(os.cpu_count()))  # whatever a test before has bound this process's threads to
        cores = os.sched_getaffinity(0)
        load(settings(checkpoint))
        return cores, torch.get_num_threads()

    with ThreadPoolExecutor(1) as pool:
        cores, num_threads = pool.submit(act).result()
    assert num_threads == len(cores)
    assert populated_on.get(timeout=10) == cores


def ranks_of(front):
    """Pids of the processes that a worker has spawned for its ranks."""
    children = [int(pid) for path in Path(f"/proc/{front}/task").glob("*/children") for pid in path.read_text().split()]
    return [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_ranks_die_with_a_front_that_is_killed_and_leave_no_file_behind(checkpoint, tmp_path):
    address = f"unix:{tmp_path}/worker"
    flags = ["--model", checkpoint, "--listen", address, "--tensor-parallel-size", "2", "--num-gpu-blocks", "8"]
    (temporary := tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "worker", *map(str, flags)]
    environment = os.environ | {"TMPDIR": str(temporary)}
    front = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        asyncio.run(until_serving(address))
        ranks = ranks_of(front.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGSTOP)  # like one that is computing, it does not notice that its pipe ends
    finally:
        front.kill()
    # The pipe of the log ends when the last of them does.
    _, log = front.communicate(timeout=20)
    assert "executor: mp, since all ranks have room on this host" in log
    assert "worker/1" in log
    assert list(temporary.iterdir()) == []
    for pid in ranks:  # a zombie, perhaps, of whoever reaps it
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


async def until_serving(address):
    async with dial(address) as channel, asyncio.timeout(60):
        await wait_for_serving(channel)
