"""The command line as a process: its streams may be full, closed or of another encoding, and signals may end it."""

import os
import shlex
import signal
import subprocess
import sys
from contextlib import closing

import pytest
from pagewire_fakes import FakeGeneration, FakeIntrospection, delta, serving
from terminals import HIDE_CURSOR, Terminal

from protos.pagewire.v1 import introspection_pb2

PAGEWIRE = f"{shlex.quote(sys.executable)} -m pagewire"


@pytest.fixture
def target():
    """A server that greets; its state comes twice, and then again when it is asked again."""
    introspection = FakeIntrospection()
    introspection.states = [introspection_pb2.SchedulerState(serving=True)] * 2
    with serving(FakeGeneration(), introspection=introspection) as address:
        yield address


def shell(line: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs a line of shell, with output buffered as usual, and arguments in it as bytes of latin-1."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | variables
    return subprocess.run(["sh", "-c", line.encode("latin-1")], env=env, capture_output=True, timeout=60, check=False)


COMMANDS = [
    "",
    "--help",
    "--version",
    "up --help",
    "token new me",
    "model .",
    "health {target}",
    "generate Hi --target {target}",
    "generate Hi -n 2 --target {target}",
    "chat --target {target}",
    "top --target {target}",
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("output", "why"),
    [("> /dev/full", "[Errno 28] No space left on device"), (">&-", "[Errno 9] Bad file descriptor")],
    ids=["full", "closed"],
)
def test_output_that_cannot_be_written_is_one_line(command, output, why, target):
    ended = shell(f"echo Hi | {PAGEWIRE} {command.format(target=target)} {output}")
    assert (ended.returncode, ended.stderr.decode()) == (1, f"error: {why}\n")


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(target):
    ended = shell(f"{PAGEWIRE} top --target {target} | head -n 1")
    assert (ended.stdout.count(b"\n"), ended.stderr) == (1, b"")


def test_closed_input_is_one_line(target):
    ended = shell(f"{PAGEWIRE} chat --target {target} <&-")
    assert (ended.returncode, ended.stderr) == (1, b"error: [Errno 9] Bad file descriptor\n")


def test_a_command_that_does_not_need_a_stream_does_without(target):
    assert shell(f"{PAGEWIRE} generate Hi --target {target} <&- 2>&-").stdout == b"Hello, world\n"


@pytest.mark.parametrize(
    "command",
    [
        "health \xff:1",
        "health {target} --service \xff",
        "generate Hi --target \xff:1",
        "top --target \xff:1",
        "explain \xff --target {target}",
    ],
)
def test_an_argument_that_is_not_utf_8_is_one_line(command, target):
    ended = shell(f"{PAGEWIRE} {command.format(target=target)}")
    assert (ended.returncode, ended.stderr) == (1, rb"error: '\udcff' cannot be written in utf-8" + b"\n")


def test_a_host_that_is_not_utf_8_is_one_line():
    ended = shell(f"{PAGEWIRE} up --host \xff")
    assert (ended.returncode, ended.stderr.count(b"\n")) == (1, 1)
    assert ended.stderr.startswith(rb"error: cannot listen on \udcff:50051: ")


def test_an_answer_that_the_terminal_cannot_show_is_one_line():
    fake = FakeGeneration()
    fake.script = lambda request: [delta("€5")]
    with serving(fake) as address:
        ended = shell(f"{PAGEWIRE} generate Hi --target {address}", PYTHONIOENCODING="latin-1")
    assert (ended.returncode, ended.stderr) == (1, b"error: '\\u20ac' cannot be written in latin-1\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_watch_that_a_signal_ends_shows_the_cursor_again(number, target):
    with closing(Terminal([sys.executable, "-m", "pagewire", "top", "--target", target])) as terminal:
        terminal.wait_for(lambda: terminal.written.count(b"serving") >= 2)
        assert HIDE_CURSOR in terminal.written
        terminal.process.send_signal(number)
        assert terminal.wait() == 128 + number
        assert terminal.is_as_before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_chat_that_a_signal_ends_leaves_a_terminal_that_shows_what_is_typed(number, target):
    with closing(Terminal([sys.executable, "-m", "pagewire", "chat", "--target", target])) as terminal:
        terminal.wait_for(lambda: b"> " in terminal.written)
        assert not terminal.is_as_before, "keys come one by one"
        terminal.process.send_signal(number)
        assert terminal.wait() == 128 + number
        assert terminal.is_as_before


def test_a_signal_that_is_ignored_from_the_start_as_under_nohup_ends_nothing(target):
    command = f"trap '' HUP; exec {PAGEWIRE} top --target {target}"
    with closing(Terminal(["/bin/sh", "-c", command])) as terminal:
        terminal.wait_for(lambda: b"serving" in terminal.written)
        terminal.process.send_signal(signal.SIGHUP)
        terminal.wait_for(lambda: terminal.written.count(b"serving") >= 6)
