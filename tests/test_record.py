"""Records: a scheduler's calls and decisions in a file, and the same decisions made again from that file."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from cluster import cluster
from fakes import TEXT
from hypothesis import settings
from scheduler_by_hand import make, step, submit
from terminals import CTRL_C, Terminal
from test_scheduler_properties import SchedulerMachine

import scheduler.__main__ as scheduler_main
from protos.columns import pack, pack_floats
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.sampling_pb2 import Sampling
from protos.worker_pb2 import ExecuteModelResponse
from scheduler.block_manager import BlockManager
from scheduler.plan import to_result
from scheduler.policy import Policy
from scheduler.record import INPUTS, reader, to_line
from scheduler.recorder import Recorder
from scheduler.replay import NoSuchRequest, replay
from scheduler.replayer import NotReplayable, Replayer
from scheduler.scheduler import Scheduler
from scheduler.sequence import Status

READERS = {"check", "held_up", "num_reserved"}


class Disk(io.BytesIO):
    """A file that can be read after it is closed, on a disk with room for `num_bytes`."""

    def __init__(self, num_bytes: int = 1 << 40) -> None:
        super().__init__()
        self.num_bytes = num_bytes

    def write(self, line: bytes) -> int:
        if super().write(line[: self.num_bytes - self.tell()]) < len(line):
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(line)

    def close(self) -> None:
        """Keeps its content."""


def recorded(disk: Disk, **options) -> Scheduler:
    core = make(**options)
    Recorder(disk, "the record").attach(core, {"model": "m"})
    return core


def some_service(disk: Disk) -> Scheduler:
    """Two requests that fight for 6 blocks of 4 tokens: steps 1 to 3 compute both, step 4 preempts the second."""
    core = recorded(disk, num_blocks=6)
    submit(core, 10, max_tokens=5)
    group = submit(core, 6, n=2, sampling=Sampling(seed=3))
    for now in range(5):
        step(core, now=float(now))
    core.stop(group, 0, 2)
    return core


def replayed(data: bytes, **options) -> int:
    return replay(io.BytesIO(data), **options)


class RecordedMachine(SchedulerMachine):
    """The random walks of the scheduler's own test; each is replayed at its end."""

    def new_core(self, policy: Policy, blocks: BlockManager) -> Scheduler:
        core = super().new_core(policy, blocks)
        self.disk = Disk()
        Recorder(self.disk, "the record").attach(core, {})
        return core

    def teardown(self):
        super().teardown()
        if hasattr(self, "disk"):
            replayer = Replayer(io.BytesIO(self.disk.getvalue()))
            for call in replayer.calls():
                assert call.ended
                assert call.digest == call.then, f"line {call.line}: {call.name}"
                replayer.core.check()
            assert not replayer.cut
            assert replayer.core.rates == self.core.rates
            assert replayer.core.num_steps == self.core.num_steps


RecordedMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=80, deadline=None)
TestRecordedMachine = RecordedMachine.TestCase


def test_a_replay_tells_what_was_decided_and_that_it_is_the_same(capsys):
    disk = Disk()
    some_service(disk)
    assert replayed(disk.getvalue(), check=True, request_id="r") == 0
    told = capsys.readouterr().out
    assert "worker    model=m\npolicy    max_num_batched_tokens=16" in told
    assert "pool      6 blocks of 4 tokens" in told
    assert "step 1: sequence 0 computes tokens 0 to 9, samples 1, blocks [0, 1, 2]" in told
    assert "step 4: preempted, recompute: 3 blocks to swap, 0 swap blocks free" in told
    assert "step 5: sequence 0 FINISHED_LENGTH_CAPPED with 5 tokens of output" in told
    assert "schedule=5 tokens_computed=24 update=5 tokens_sampled=11 preempted=1" in told
    assert told.endswith("result    every decision is the same\n")


def test_what_a_worker_answered_is_read_back_as_it_was():
    columns = {"token_ids": pack([7, 8]), "logprobs": pack_floats([-0.5, -1.5]), "failed_samples": pack([1])}
    of_beams = {"candidate_token_ids": pack([3, 4]), "candidate_logprobs": pack_floats([-0.25, -2.0])}
    result = to_result(ExecuteModelResponse(**columns, **of_beams))
    assert reader().decode(to_line(result).decode()) == result


def test_what_could_not_be_read_back_is_not_written():
    with pytest.raises(TypeError, match="a Status has no place in a record"):
        to_line(Status.RUNNING)


def test_a_story_is_told_in_seconds_since_the_record_began(capsys):
    disk = Disk()
    core = recorded(disk)
    clock = json.loads(disk.getvalue())["clock"]
    submit(core, 4, now=clock + 1.5)
    step(core, now=clock + 2.25)
    assert replayed(disk.getvalue(), request_id="r") == 0
    told = capsys.readouterr().out
    assert "   1.500 s  step 0: submitted as number" in told
    assert "   2.250 s  step 1: sequence 0 computes tokens 0 to 3" in told


def test_the_story_of_a_refused_request_is_its_refusal(capsys):
    disk = Disk()
    core = recorded(disk, num_blocks=6)
    with pytest.raises(ValueError, match="more than the 8") as refused:
        submit(core, 10, n=core.policy.max_num_seqs + 1)
    assert replayed(disk.getvalue(), request_id="r") == 0
    assert f"refused: {refused.value}\n" in capsys.readouterr().out


def test_a_request_that_is_not_in_the_record_is_an_error_after_the_whole_replay(capsys):
    disk = Disk()
    some_service(disk)
    with pytest.raises(NoSuchRequest, match="no request 'nope' in this record"):
        replayed(disk.getvalue(), request_id="nope")
    assert capsys.readouterr().out.endswith("result    every decision is the same\n")


@pytest.mark.parametrize(
    ("then", "now", "difference"),
    [
        (b'"max_num_seqs":8', b'"max_num_seqs":2', r"step 1, line 6: schedule.*\n.*rows 2.*\n.*rows 1"),
        (b'"token_ids":[7,7,7]', b'"token_ids":[7,2,7]', r"step 1, line 8: update.*\n.*finished 0.*\n.*finished 1"),
        (b'"token_ids":[7]', b'"token_ids":[8]', r"step 4, line 20: update.*\n.*checksum \d+\n.*checksum \d+"),
        (
            b'"max_waiting_requests":100',
            b'"max_waiting_requests":1',
            r"step 0, line 4: submit.*\n.*2\n.*QueueFull",
        ),
    ],
)
def test_the_first_decision_that_differs_is_shown_as_it_was_and_as_it_is(then, now, difference, capsys):
    disk = Disk()
    some_service(disk)
    assert disk.getvalue().count(then) >= 1
    assert replayed(disk.getvalue().replace(then, now, 1)) == 1
    assert re.search(difference, capsys.readouterr().out)


def test_a_violated_invariant_is_reported_with_its_step(monkeypatch, capsys):
    disk = Disk()
    some_service(disk)

    def broken(core: Scheduler) -> None:
        assert core.num_steps < 3, "a block leaked"

    monkeypatch.setattr(Scheduler, "check", broken)
    assert replayed(disk.getvalue(), check=True) == 1
    assert "step 3, line 14: after schedule, a block leaked" in capsys.readouterr().out


def test_a_record_that_is_cut_off_anywhere_is_good_up_to_its_last_whole_line(capsys):
    disk = Disk()
    some_service(disk)
    data = disk.getvalue()
    for end in range(data.index(b"\n") + 1, len(data)):
        assert replayed(data[:end]) == 0
        assert capsys.readouterr().out.endswith("cut off\n") is not data[:end].endswith(b"\n")


def test_a_call_that_failed_is_the_last_of_its_record_and_fails_again(capsys):
    disk = Disk()
    core = some_service(disk)
    core.schedule(9.0)
    with pytest.raises(AssertionError):
        core.schedule(9.5)
    assert replayed(disk.getvalue()) == 0
    told = capsys.readouterr().out
    assert "schedule raises, as it did when it was recorded\nTraceback" in told
    assert "AssertionError: too many steps in flight" in told


def test_a_full_disk_ends_the_record_and_nothing_else(caplog):
    whole, full = Disk(), Disk(num_bytes=1000)
    cores = [some_service(whole), some_service(full)]
    outputs = [[s.output_token_ids for g in core.queues.groups.values() for s in g.sequences] for core in cores]
    assert outputs[0] == outputs[1]
    assert cores[0].num_steps == cores[1].num_steps
    assert [line.getMessage() for line in caplog.records] == ["--record: the record ends here, and serving goes on"]
    assert caplog.records[0].error == "No space left on device"
    assert len(full.getvalue()) == 1000
    assert replayed(full.getvalue()) == 0


def test_methods_that_only_read_the_core_are_no_inputs_and_all_others_are():
    public = {name for name, member in vars(Scheduler).items() if callable(member) and not name.startswith("_")}
    assert public - READERS == set(INPUTS), "does it change the core? Then a record needs it"


def test_a_restarted_scheduler_keeps_earlier_records(tmp_path):
    for _ in range(3):
        recorder = Recorder.open(tmp_path / "record")
        recorder.attach(make(), {})
        recorder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record", "record.1", "record.2"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}, "prompts are in it"
    assert len({path.read_bytes().count(b"\n") for path in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize(("place", "words"), [("", "Is a directory"), ("nowhere/record", "No such file or directory")])
def test_a_record_that_cannot_be_begun_is_refused_at_the_start(place, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["scheduler", "--record", str(tmp_path / place)])
    monkeypatch.setattr("protos.process.start_logging", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        scheduler_main.main()
    assert end.value.code == 2
    assert f"--record: cannot write {tmp_path / place}: {words}" in capsys.readouterr().err


def test_a_restarted_scheduler_serves_on_a_full_disk(monkeypatch, caplog):
    def full(path: Path) -> Recorder:
        raise OSError(errno.ENOSPC, "No space left on device")

    runs = []
    monkeypatch.setattr(Recorder, "open", full)
    monkeypatch.setattr("sys.argv", ["scheduler", "--record", "record"])
    monkeypatch.setattr("protos.process.start_logging", lambda *_: None)
    monkeypatch.setattr("protos.process.run", runs.append)
    scheduler_main.main()
    assert len(runs) == 1
    assert [line.getMessage() for line in caplog.records] == ["--record: nothing is recorded"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is empty"),
        (b"# Pagewire\n", "it is no record"),
        (b"\xff" * (1 << 17), "it is no record"),
        (b'{"pagewire_record":1}\n', "it is a record of version 1; this Pagewire replays version 2"),
        (
            b'{"pagewire_record":2,"policy":{"$Policy":{"luck":1}}}\n',
            "line 1 is damaged, or of another .*luck",
        ),
    ],
)
def test_a_file_that_is_no_record_is_refused(data, words):
    with pytest.raises(NotReplayable, match=words):
        Replayer(io.BytesIO(data))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[", "line 2 is damaged: Expecting"),
        (b'["__init__",[],{}]', "line 2 is damaged: it is no call"),
        (b'["abort",[{"$group":7}],{}]', "line 2 is damaged: it is about 7, which is not there"),
        (b'["abort",[{"$Popen":["ls"]}],{}]', r"line 2 is damaged: \$Popen is not known"),
    ],
)
def test_a_damaged_line_is_named(line, words):
    disk = Disk()
    recorded(disk)
    with pytest.raises(NotReplayable, match=words):
        replayed(disk.getvalue() + line + b"\n")


class Unreadable(io.BytesIO):
    def readline(self, num_bytes: int | None = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_a_file_that_cannot_be_read_is_refused():
    with pytest.raises(NotReplayable, match="Input/output error"):
        Replayer(Unreadable())


@pytest.mark.parametrize(
    ("output", "words"),
    [("a closed pipe", ""), ("/dev/full", "pagewire replay: standard output: No space left on device\n")],
)
def test_output_that_cannot_be_written_is_not_blamed_on_the_record(output, words, tmp_path):
    disk = Disk()
    some_service(disk)
    (tmp_path / "record").write_bytes(disk.getvalue())
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") if output == "a closed pipe" else open(output, "wb") as stdout:
        command = [sys.executable, "-m", "scheduler.replay", str(tmp_path / "record")]
        ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, words)


def test_ctrl_c_ends_a_replay_without_a_word(tmp_path):
    os.mkfifo(path := tmp_path / "record")
    command = [sys.executable, "-m", "scheduler.replay", str(path)]
    with closing(Terminal(command)) as terminal, path.open("wb"):  # which waits until the replay has opened it, too
        terminal.press(CTRL_C)
        assert (terminal.wait(), terminal.written) == (130, b"^C")


def pagewire_replay(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagewire", "replay", str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def complete(port: int, number: int) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = pb.GenerateRequest(text="prompt " * number, stop=pb.StopConditions(max_tokens=20, ignore_eos=True))
        request.request_id = f"r{number}"
        request.sampling.n = number
        return GenerationServiceStub(channel).Complete(request, timeout=20).outputs[0].text


def test_a_killed_scheduler_leaves_a_record_and_its_successor_serves_on_a_full_disk(tmp_path):
    path = tmp_path / "record"
    with (
        cluster(scheduler_options=("--record", str(path), "--max-num-seqs", "4")) as running,
        ThreadPoolExecutor() as pool,
    ):
        (port,) = running.routers
        texts = list(pool.map(complete, [port] * 4, range(1, 5)))
        assert all(text in TEXT * 2 for text in texts)
        running.scheduler.process.kill()
        running.scheduler.process.wait()
        replay = pagewire_replay(path, "--check", "--request", "r2")
        assert replay.returncode == 0, replay.stdout + replay.stderr
        assert "submitted as number" in replay.stdout
        assert "tokens_sampled=200" in replay.stdout
        assert "every decision is the same" in replay.stdout
        running.start_scheduler(0, "--record", "/dev/full")
        running.wait_for_serving(port)
        assert complete(port, 1) == texts[0]
        assert running.scheduler.log.read_text().count("--record: the record ends here, and serving goes on") == 1
    unknown = pagewire_replay(path, "--request", "nope")
    told = f"pagewire replay: {path}: no request 'nope' in this record\n"
    assert (unknown.returncode, unknown.stderr) == (2, told)
    assert pagewire_replay(tmp_path).returncode == 2
