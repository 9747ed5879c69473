"""Lines between a front and ranks, with ranks that compute nothing, on threads of this process."""

import contextlib
import os
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue

import pytest
from torch.distributed import HashStore
from worker_fakes import step

from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, GetInfoResponse
from worker.checkpoint import ModelError
from worker.executor import lines
from worker.executor.executor import RankLost
from worker.executor.lines import LOOPBACK, LinesExecutor, be_rank, dial, meet_ranks, run_here
from worker.executor.told import read_outcome, tag_end, tag_outcome
from worker.inputs import MalformedStep
from worker.ranks import Place


class Echo:
    """A rank whose answer names the step; what it is told to do to a step happens instead."""

    def __init__(self, does=None, loads=lambda: GetInfoResponse(model="echo")):
        self._does = does or {}
        self.load = loads
        self.seen = []
        self.is_asked = None

    def run(self, steps, answer):
        self.is_asked = answer is not None
        while (message := steps()) is not None:
            step_id = ExecuteModelRequest.FromString(message).step_id
            self.seen.append(step_id)
            outcome = self._does.get(step_id, lambda step_id=step_id: ExecuteModelResponse(step_id=step_id))()
            if answer is not None:
                answer(outcome)


@contextlib.contextmanager
def started(*ranks):
    """An executor of these ranks, their threads, and the front's ends of the lines."""
    pipes = [Pipe() for _ in ranks]
    threads = [
        threading.Thread(target=run_here, args=(end, rank, number), daemon=True)
        for number, (rank, (_, end)) in enumerate(zip(ranks, pipes, strict=True))
    ]
    for thread in threads:
        thread.start()
    front = [end for end, _ in pipes]
    executor = LinesExecutor(lambda: front)
    try:
        yield executor, threads, front
    finally:
        executor.close()
        for thread in threads:
            thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)


def test_every_rank_gets_every_step_and_rank_0_answers_in_order_however_many_are_in_flight():
    with started(Echo(), other := Echo(loads=lambda: GetInfoResponse(model="other"))) as (executor, *_):
        assert executor.load(pytest.fail).model == "echo"
        answers = [executor.launch(step(step_id=step_id)) for step_id in range(1, 6)]
        assert answers[0].result().step_id == 1
        assert answers[3].result().step_id == 4, "what nobody asked for was not passed over"
        assert answers[4].result().step_id == 5
    assert other.seen == [1, 2, 3, 4, 5]
    assert not other.is_asked, "answers that nobody reads fill a line"


def test_a_malformed_step_names_the_field_and_the_next_one_runs():
    with started(Echo({1: lambda: MalformedStep("token_ids", "what would be right")})) as (executor, *_):
        executor.load(pytest.fail)
        with pytest.raises(MalformedStep, match="token_ids: what would be right"):
            executor.launch(step(step_id=1)).result()
        assert executor.launch(step(step_id=2)).result().step_id == 2
        assert executor.is_usable()


def boom():
    raise RuntimeError("boom")


def test_a_step_that_fails_at_rank_0_is_the_end_of_all_ranks_with_its_traceback(caplog):
    with started(Echo({1: lambda: RuntimeError("the device says no")}), Echo()) as (executor, threads, _):
        lost = threading.Event()
        executor.load(lost.set)
        with pytest.raises(RankLost, match="RuntimeError: the device says no"):
            executor.launch(step(step_id=1)).result()
        assert lost.wait(10)
        assert not executor.is_usable()
        for thread in threads:
            thread.join(10)
    assert "the device says no" in caplog.text


def test_a_rank_that_nobody_asks_and_fails_is_told_of_with_its_traceback(caplog):
    # Rank 1 gets a step before rank 0: one that failed at once could end the line that launch still writes to.
    was_launched = threading.Event()
    with started(Echo(), Echo({1: lambda: boom() if was_launched.wait(10) else None})) as (executor, *_):
        lost = threading.Event()
        executor.load(lost.set)
        executor.launch(step(step_id=1))
        was_launched.set()
        assert lost.wait(10)
        with pytest.raises(RankLost, match="rank 1 failed"):
            executor.launch(step(step_id=2)).result()
    # Rank 0, whose pipe is closed meanwhile, may log behind it.
    (told,) = [message for message in caplog.messages if message.startswith("ranks lost")]
    assert 'raise RuntimeError("boom")' in told


def test_a_rank_that_goes_without_a_word_is_missed_while_nothing_runs(caplog):
    with started(Echo()) as (executor, _, front):
        front_end, rank_end = Pipe()
        rank_end.send_bytes(b"I")
        front.append(front_end)
        lost = threading.Event()
        executor.load(lost.set)
        assert not lost.is_set()
        rank_end.close()
        assert lost.wait(10)
    assert caplog.messages[-1] == "ranks lost: rank 1 is gone"


def test_a_rank_that_can_not_load_the_model_says_which_it_is_and_where():
    def refuse():
        raise ModelError("there is no directory /models/x")

    with started(Echo(), Echo(loads=refuse)) as (executor, *_):
        where = rf"there is no directory /models/x \(rank 1 on {socket.gethostname()}\)"
        with pytest.raises(ModelError, match=where):
            executor.load(pytest.fail)


def test_a_rank_that_cannot_load_leaves_it_to_the_front_to_log_why(caplog):
    def refuse():
        raise ModelError("no memory")

    front, end = Pipe()
    run_here(end, Echo(loads=refuse), 1)
    assert b"no memory" in front.recv_bytes()
    assert not caplog.messages


def test_a_rank_that_fails_logs_why_though_the_front_is_gone(caplog):
    front, end = Pipe()
    front.close()
    run_here(end, Echo(loads=boom), 1)
    (failure,) = caplog.records
    assert (failure.message, failure.exc_text.splitlines()[-1]) == ("rank failed", "RuntimeError: boom")


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError])
def test_a_rank_ends_without_a_word_when_its_line_does(error, caplog):
    def receive():
        raise error

    _front, end = Pipe()
    run_here(end, rank := Echo(), 0, receive)
    assert rank.is_asked
    assert not caplog.messages


def test_a_rank_that_dies_while_it_loads_is_lost():
    with started(Echo(), Echo(loads=boom)) as (executor, *_), pytest.raises(RankLost, match="RuntimeError: boom"):
        executor.load(pytest.fail)


def test_a_rank_that_goes_without_a_word_while_it_loads_is_lost():
    front, rank = Pipe()
    rank.close()
    with pytest.raises(RankLost, match="has ended while it loaded the model"):
        LinesExecutor(lambda: [front]).load(pytest.fail)


def test_a_step_whose_rank_0_goes_without_an_answer_is_lost():
    front, rank = Pipe()
    rank.send_bytes(b"I")
    executor, lost = LinesExecutor(lambda: [front]), threading.Event()
    executor.load(lost.set)
    answer = executor.launch(step())
    rank.recv_bytes()
    rank.close()
    with pytest.raises(RankLost, match="rank 0 is gone"):
        answer.result()
    assert lost.wait(10)


def test_why_rank_0_has_ended_is_read_behind_its_answers_though_nobody_waits_for_them(caplog):
    with started(Echo({2: boom})) as (executor, *_):
        lost = threading.Event()
        executor.load(lost.set)
        executor.launch(step(step_id=1))
        executor.launch(step(step_id=2))
        assert lost.wait(10)
    (told,) = [message for message in caplog.messages if message.startswith("ranks lost")]
    assert 'raise RuntimeError("boom")' in told


def test_the_thread_that_waits_for_an_answer_reads_rank_0s_line_to_its_end(monkeypatch):
    front, rank = Pipe()
    lost = threading.Event()

    def read(message):
        rank.close()
        assert not lost.wait(0.1), "the end of the line counted before what was said on it"
        return read_outcome(message)

    monkeypatch.setattr(lines, "read_outcome", read)
    rank.send_bytes(b"I")
    executor = LinesExecutor(lambda: [front])
    executor.load(lost.set)
    answer = executor.launch(step())
    rank.send_bytes(tag_end(RuntimeError("boom")))
    with pytest.raises(RankLost, match="rank 0 failed: RuntimeError: boom"):
        answer.result()
    assert lost.wait(10)


def test_a_rank_that_fails_ends_the_wait_for_an_answer_of_rank_0_which_computes_on(monkeypatch):
    pipes = [Pipe() for _ in range(2)]

    def read(message):
        if message.startswith(b"R"):  # the thread that waits for the second answer has read the first
            pipes[1][1].send_bytes(tag_end(RuntimeError("boom")))
            pipes[1][1].close()
        return read_outcome(message)

    monkeypatch.setattr(lines, "read_outcome", read)
    for _, rank in pipes:
        rank.send_bytes(b"I")
    executor = LinesExecutor(lambda: [front for front, _ in pipes])
    executor.load(lambda: None)
    _, second = executor.launch(step(step_id=1)), executor.launch(step(step_id=2))
    pipes[0][1].send_bytes(tag_outcome(ExecuteModelResponse(step_id=1)))
    with pytest.raises(RankLost, match="rank 1 failed: RuntimeError: boom"):
        second.result()


def test_a_step_that_cannot_be_sent_to_a_rank_fails_for_the_reason_that_this_rank_gives(monkeypatch):
    def read_slowly(rank, line, last_word=lines._last_word):
        threading.Event().wait(0.05)
        return last_word(rank, line)

    monkeypatch.setattr(lines, "_last_word", read_slowly)
    monkeypatch.setattr(lines, "_LOOK_S", 10)
    pipes = [Pipe() for _ in range(2)]
    for _, rank in pipes:
        rank.send_bytes(b"I")
    executor = LinesExecutor(lambda: [front for front, _ in pipes])
    executor.load(lambda: None)
    pipes[1][1].send_bytes(tag_end(RuntimeError("boom")))
    pipes[1][1].close()
    with pytest.raises(RankLost, match="rank 1 failed: RuntimeError: boom"):
        executor.launch(step())


def test_ranks_end_with_an_executor_that_is_closed_which_is_no_loss(caplog):
    with started(Echo(), Echo()) as (executor, threads, _):
        lost = threading.Event()
        executor.load(lost.set)
        (watch,) = (thread for thread in threading.enumerate() if thread.name == "watch")
        executor.close()
        for thread in (*threads, watch):
            thread.join(10)
            assert not thread.is_alive()
        assert not lost.is_set()
        assert not executor.is_usable()
    assert not caplog.messages


def test_who_does_not_know_the_secret_or_is_not_expected_is_no_rank():
    store, met = HashStore(), {}
    front = threading.Thread(
        target=lambda: met.update(meet_ranks(store, LOOPBACK, [1], lambda missing: None)), daemon=True
    )
    front.start()
    address, port, _ = store.get("pagewire/front").decode().split()
    assert address == LOOPBACK
    with socket.create_connection((address, int(port))) as stranger:
        stranger.sendall(os.urandom(16) + (1).to_bytes(4))
        assert stranger.recv(1) == b""
    with dial(store, 2) as unexpected, pytest.raises(EOFError):
        unexpected.recv_bytes()
    line = dial(store, 1)
    front.join(10)
    for end in (line, met[1]):
        with socket.socket(fileno=os.dup(end.fileno())) as kept_alive:  # else a host that vanishes is never missed
            assert kept_alive.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            for option, value in lines._KEEPALIVE.items():
                assert kept_alive.getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) == value
            # Small messages may not wait for those before to be acknowledged.
            assert kept_alive.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    assert met.keys() == {1}
    met[1].send_bytes(b"step")
    assert line.recv_bytes() == b"step"
    line.close()
    met[1].close()


def met(*ranks, address=LOOPBACK):
    """The ends of the lines to ranks that dial in this order: the front's by number, and the ranks'."""
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        dialled = pool.submit(lambda: [dial(store, rank) for rank in ranks])
        return meet_ranks(store, address, set(ranks), lambda missing: None), dialled.result()


def reset(line):
    """Closes a line as if its host had forgotten it."""
    with socket.socket(fileno=os.dup(line.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


def test_a_rank_that_comes_twice_keeps_its_first_line():
    fronts, (first, again, other) = met(0, 0, 1)
    with pytest.raises(EOFError):
        again.recv_bytes()
    fronts[0].send_bytes(b"step")
    assert first.recv_bytes() == b"step"
    for end in (first, again, other, *fronts.values()):
        end.close()


def test_a_front_listens_to_other_hosts_only_where_ranks_are_there():
    fronts, (rank,) = met(0, address="127.0.0.2")
    rank.close()
    fronts[0].close()
    store = HashStore()

    def look(missing):
        _, port, _ = store.get("pagewire/front").decode().split()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(port)), timeout=10)
        raise RankLost("enough")

    with pytest.raises(RankLost, match="enough"):
        meet_ranks(store, LOOPBACK, [0], look)


def test_a_rank_is_awaited_though_it_is_late_and_strangers_keep_silent_or_hang_up(monkeypatch):
    store, dialled = HashStore(), SimpleQueue()

    def story():
        """What happens between two looks of the front."""
        address = (LOOPBACK, int(store.get("pagewire/front").decode().split()[1]))
        monkeypatch.setattr(lines, "_GREETING_S", 0.05)
        with socket.create_connection(address):
            yield
        reset(socket.create_connection(address))
        yield
        yield
        monkeypatch.undo()
        threading.Thread(target=lambda: dialled.put(dial(store, 0)), daemon=True).start()

    looks = story()
    fronts = meet_ranks(store, LOOPBACK, [0], lambda missing: next(looks, None))
    with dialled.get(timeout=10) as rank, fronts[0] as front:
        front.send_bytes(b"step")
        assert rank.recv_bytes() == b"step"


def test_a_rank_whose_host_resets_the_line_is_lost(caplog):
    fronts, (rank,) = met(0)
    rank.send_bytes(b"I")
    executor, lost = LinesExecutor(lambda: list(fronts.values())), threading.Event()
    executor.load(lost.set)
    reset(rank)
    assert lost.wait(10)
    assert caplog.messages == ["ranks lost: rank 0 is gone"]


@pytest.mark.parametrize("end", [Connection.close, reset], ids=["closed", "reset"])
def test_a_rank_ends_with_the_front_whatever_it_is_doing(monkeypatch, end):
    class Ended(BaseException):
        pass

    def exit_with(status):
        raise Ended(status)

    monkeypatch.setattr(lines.os, "_exit", exit_with)
    fronts, (rank,) = met(0)
    end(fronts[0])
    with rank, pytest.raises(Ended, match="0"):
        lines._read(rank, SimpleQueue())


def test_steps_are_taken_off_the_line_of_a_rank_that_computes_for_long(monkeypatch):
    computing, released, ended = threading.Event(), threading.Event(), SimpleQueue()

    def compute():
        computing.set()
        assert released.wait(30)
        return ExecuteModelResponse(step_id=1)

    class OfTwoSteps(Echo):
        def run(self, steps, answer):
            super().run(chain((steps() for _ in range(2)), [None]).__next__, answer)

    monkeypatch.setattr(lines, "Rank", lambda *_: OfTwoSteps({1: compute}))
    # The rank's process is a thread here.
    monkeypatch.setattr(lines.os, "_exit", ended.put)
    monkeypatch.setattr(lines.logging, "shutdown", lambda: None)
    monkeypatch.setitem(lines._KEEPALIVE, "TCP_USER_TIMEOUT", 1000)
    store = HashStore()
    rank = threading.Thread(target=lambda: be_rank(dial(store, 0), None, Place(), None, store), daemon=True)
    rank.start()
    executor = LinesExecutor(lambda: list(meet_ranks(store, LOOPBACK, [0], lambda missing: None).values()))
    executor.load(lambda: None)
    first = executor.launch(step(step_id=1))
    assert computing.wait(30)
    second = executor.launch(step(step_id=2, finished=range(4 << 20)))  # more than the sockets' buffers hold
    released.set()
    assert [first.result().step_id, second.result().step_id] == [1, 2]
    executor.close()
    assert sorted([ended.get(timeout=30), ended.get(timeout=30)]) == [0, 1]


def test_whoever_knows_that_a_rank_will_not_come_ends_the_wait():
    def look(missing):
        raise RankLost(f"{missing} will not come")

    with pytest.raises(RankLost, match=r"\[1, 2\] will not come"):
        meet_ranks(HashStore(), LOOPBACK, [1, 2], look)


def test_the_wait_for_ranks_ends_when_their_time_is_over(monkeypatch):
    monkeypatch.setattr(lines, "_MEETING_S", 0)
    with pytest.raises(RankLost, match=r"ranks \[1\] have not come within 0 s"):
        meet_ranks(HashStore(), LOOPBACK, [1], lambda missing: None)
