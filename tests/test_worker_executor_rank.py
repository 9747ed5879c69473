"""What a rank does, apart from computing: how it meets the others, and in which order it answers."""

import threading
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kernels.cpu import KernelsUnavailable  # noqa: E402
from worker.config import WorkerSettings  # noqa: E402
from worker.executor import rank  # noqa: E402
from worker.executor.rank import Rank  # noqa: E402
from worker.inputs import MalformedStep  # noqa: E402
from worker.ranks import Host, Place  # noqa: E402


class Step:
    """A launched step whose answer is its name, once `wait` returns."""

    def __init__(self, name, wait=None):
        self.is_finished = wait is None
        self._name, self._wait = name, wait

    def result(self):
        if self._wait is not None:
            self._wait()
        return self._name


class OfSteps(Rank):
    """A rank that has launched what it is given."""

    def __init__(self):
        super().__init__(None, Place(), Host(), store=None)

    def launch(self, message):
        return message


def fail():
    raise RuntimeError("the device says no")


@pytest.mark.parametrize("second", [Step("second"), MalformedStep("token_ids", "none")], ids=["finished", "malformed"])
def test_a_step_that_is_finished_is_answered_after_the_one_before_it(second):
    is_awaited, is_finished, answers = threading.Event(), threading.Event(), SimpleQueue()

    def wait():
        is_awaited.set()
        assert is_finished.wait(10)

    def steps():
        yield Step("first", wait)
        assert is_awaited.wait(10)
        yield second
        is_finished.set()
        yield None

    OfSteps().run(steps().__next__, answers.put)
    given = [answers.get(timeout=10), answers.get(timeout=10)]
    assert given == ["first", second if isinstance(second, MalformedStep) else "second"]


def test_a_step_that_is_not_to_be_waited_for_is_answered_without_waking_a_thread():
    answered_by = []
    steps = iter([Step("first"), MalformedStep("token_ids", "none"), None])
    OfSteps().run(steps.__next__, lambda outcome: answered_by.append(threading.get_ident()))
    assert answered_by == [threading.get_ident()] * 2


@pytest.mark.parametrize("failing", [Step("failing", fail), SimpleNamespace(is_finished=True, result=fail)])
def test_what_a_step_fails_with_is_its_outcome(failing):
    answers = SimpleQueue()
    OfSteps().run(iter([failing, None]).__next__, answers.put)
    assert str(answers.get(timeout=10)) == "the device says no"


class Joined(Exception):
    """Says what a rank has joined the others with."""


def joined_with(monkeypatch, place, device="cpu", hang_timeout_s=60.0, kernels=None):
    """How long a rank waits for the others, and where it meets those of its tensor group."""

    def join(place, store, device, timeout_s, meeting):
        raise Joined(timeout_s, meeting)

    fake = SimpleNamespace(meeting=lambda *arguments: arguments)
    monkeypatch.setattr(rank, "CpuKernels", kernels or (lambda: fake))
    monkeypatch.setattr(rank, "prepare_device", lambda settings, host: torch.device(device))
    monkeypatch.setattr(rank.Ranks, "join", join)
    settings = WorkerSettings(model="x", hang_timeout_s=hang_timeout_s)
    with pytest.raises(Joined) as joined:
        Rank(settings, place, Host(), store=None, meeting=7).load()
    return joined.value.args


def test_a_rank_waits_for_the_others_while_they_load_and_as_long_as_a_step_may_take(monkeypatch):
    assert joined_with(monkeypatch, Place(3, 2, 2), hang_timeout_s=5) == (600, (7, 1, 2, 600))
    assert joined_with(monkeypatch, Place(3, 2, 2), hang_timeout_s=900) == (900, (7, 1, 2, 900))


@pytest.mark.parametrize("place, device", [(Place(0, 2), "cuda"), (Place(0, 1, 2), "cpu")])
def test_ranks_on_gpus_and_those_that_have_no_tensor_group_do_not_meet_in_shared_memory(monkeypatch, place, device):
    assert joined_with(monkeypatch, place, device) == (600, None)


def test_ranks_without_kernels_talk_through_sockets_and_say_why(monkeypatch, caplog):
    def refuse():
        raise KernelsUnavailable("there is no library")

    assert joined_with(monkeypatch, Place(0, 2), kernels=refuse) == (600, None)
    assert caplog.messages == ["ranks talk through sockets, since there is no library"]


def test_a_rank_signs_its_log_with_its_workers_name_and_its_number(monkeypatch):
    signed = []
    monkeypatch.setattr(rank, "start_logging", lambda service, settings: signed.append(settings.log_name))
    for name in ("", "worker-2"):
        rank.start_rank_logging(WorkerSettings(model="x", log_name=name), 1)
    assert signed == ["worker/1", "worker-2/1"]
