"""`pagewire top` and `pagewire explain` against a scripted server: every figure, away for a while, Ctrl-C."""

import io
import re

import grpc
import pytest
from pagewire_fakes import FakeGeneration, FakeIntrospection, serving
from rich.console import Console
from typer.testing import CliRunner

from pagewire import top
from pagewire.cli import app
from pagewire.errors import Unavailable
from pagewire.explain import explained
from pagewire.top import View, cells, watch
from protos.errors import Refusal, unavailable
from protos.pagewire.v1 import introspection_pb2 as pb

STATE = pb.SchedulerState(
    serving=True,
    num_waiting=3,
    num_running=12,
    num_swapped=2,
    num_waiting_tokens=1024,
    block_pool=pb.BlockPool(
        num_total=64,
        num_free=34,
        num_held=20,
        num_cached=10,
        num_shared=4,
        num_references=36,
        num_swap_total=16,
        num_swap_free=14,
    ),
    num_steps=12345,
    num_preemptions=5,
    last_step_ms=12.34,
    last_step_tokens=256,
    num_swap_outs=3,
    num_swap_ins=1,
    prefix_cache=pb.PrefixCache(num_looked_up_tokens=12000, num_found_tokens=4440),
    prefill_tokens_per_s=1234.5,
    swap_blocks_per_s=99.25,
)
ANSWER = pb.WatchStateResponse(state=STATE)
SCHEDULERS = [
    pb.NamedScheduler(
        address="10.0.0.1:50052",
        state=pb.SchedulerState(
            num_running=12, num_waiting=3, block_pool=pb.BlockPool(num_total=48, num_held=12, num_cached=6)
        ),
    ),
    pb.NamedScheduler(address="10.0.0.2:50052", obstacle="not connected"),
]
IN_LINES = [
    "10.0.0.1:50052: serving, 12 running, 3 waiting, 25% of 48 blocks held",
    "10.0.0.2:50052: not connected",
]


@pytest.fixture
def fake():
    fake = FakeIntrospection()
    fake.states = [STATE]
    return fake


@pytest.fixture
def target(fake):
    with serving(FakeGeneration(), introspection=fake) as address:
        yield address


def run(command: str, *arguments: str):
    return CliRunner().invoke(app, [command, *arguments])


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width)


def picture(view: View, console: Console) -> list[str]:
    with console.capture() as captured:
        console.print(view.picture())
    return [line.rstrip() for line in captured.get().splitlines()]


# One snapshot


def test_once_prints_every_figure_behind_its_name_in_one_line(target):
    shown = run("top", "--once", "--target", target)
    assert shown.exit_code == 0, shown.output
    (line,) = shown.stdout.splitlines()
    assert re.sub(r"^\d\d:\d\d:\d\d ", "", line) == (
        "serving=yes running=12 waiting=3 waiting_tokens=1024 swapped=2 blocks=64 free=34 cached=10 held=20 shared=4 "
        "references=36 swap_blocks=16 swap_free=14 swap_outs=3 swap_ins=1 steps=12345 steps_per_s=- step_ms=12.3 "
        "step_tokens=256 prefix_hits=37% prefill_tokens_per_s=1234 swap_blocks_per_s=99.2 preemptions=5"
    )


def test_on_a_terminal_blocks_are_a_bar_and_figures_are_sentences():
    console = terminal(width=28 + 16)
    view = View("host:1", console)
    view.take(ANSWER)
    headline, *lines = picture(view, terminal())
    assert headline.startswith("host:1  serving  ")
    # 32 cells for 64 blocks: two blocks a cell.
    assert lines == [
        "requests   12 running, 3 waiting (1,024 prompt tokens), 2 swapped out",
        "blocks     ██▓▓▓▓▓▓▓▓▒▒▒▒▒░░░░░░░░░░░░░░░░░",
        "           █ 4 shared  ▓ 16 held by one  ▒ 10 cached  ░ 34 free",
        "           20 of 64 held; 36 without sharing",
        "swap       ▓▓▓▓░░░░░░░░░░░░░░░░░░░░░░░░░░░░",
        "           2 of 16 blocks in CPU memory; 3 requests out and 1 in so far",
        "steps      -/s; the last took 12.3 ms for 256 tokens; 12,345 so far",
        "prefix     37% of 12,000 prompt tokens found cached",
        "rates      1234 prompt tokens/s, 99.2 swapped blocks/s",
        "preempted  5 so far",
    ]


def test_of_several_schedulers_each_has_a_line_of_its_own(fake, target):
    fake.schedulers = SCHEDULERS
    for arguments in (["top", "--once", "--target", target], ["status", "--port", target.rpartition(":")[2]]):
        shown = CliRunner().invoke(app, arguments).stdout
        assert [line.split(" ", 1)[1].strip() for line in shown.splitlines()][-2:] == IN_LINES
    view = View("host:1", terminal())
    view.take(pb.WatchStateResponse(state=STATE, schedulers=SCHEDULERS))
    assert picture(view, terminal())[-2:] == [f"schedulers  {IN_LINES[0]}", f"            {IN_LINES[1]}"]


def test_whoever_shows_the_state_gets_in_with_a_token(fake, target):
    for arguments in (["top", "--once", "--target", target], ["status", "--port", target.rpartition(":")[2]]):
        assert CliRunner().invoke(app, ["--token", "t", *arguments]).exit_code == 0
    assert fake.tokens == ["Bearer t"] * 2


def test_what_was_never_measured_is_a_dash_and_a_server_without_a_swap_pool_has_no_bar_for_it():
    view = View("host:1", terminal())
    view.take(pb.WatchStateResponse(state=pb.SchedulerState(block_pool=pb.BlockPool(num_total=4, num_free=4))))
    shown = "\n".join(picture(view, terminal()))
    assert "no worker, nothing runs" in shown
    assert "swap  " not in shown
    assert "- of 0 prompt tokens" in shown
    assert "- prompt tokens/s, - swapped blocks/s" in shown


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ([4, 16, 10, 34], [2, 8, 5, 17]),
        ([0, 0, 0, 64], [0, 0, 0, 32]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([1, 0, 1, 9998], [1, 0, 1, 30]),
        ([9997, 1, 1, 1], [29, 1, 1, 1]),
        ([1, 1, 1, 0], [11, 11, 10, 0]),
    ],
)
def test_a_bar_is_in_proportion_and_shows_what_there_is_little_of(counts, sizes):
    assert cells(counts, 32) == sizes


def test_steps_per_second_are_those_between_two_states_and_unknown_behind_a_restart():
    now = [100.0]
    view = View("host:1", terminal(), clock=lambda: now[0])
    rates = []
    for at, num_steps in ((100.0, 1000), (102.0, 1100), (104.0, 7), (105.0, 17)):
        now[0] = at
        view.take(pb.WatchStateResponse(state=pb.SchedulerState(num_steps=num_steps)))
        rates.append(re.search(r"steps_per_s=(\S+)", view.lines()[0])[1])
    assert rates == ["-", "50.0", "-", "10.0"]


def test_a_scheduler_that_comes_back_does_not_count_what_it_did_before():
    now = [100.0]
    view = View("host:1", terminal(), clock=lambda: now[0])
    rates = []
    for counts in ({"a": 100, "b": 9000}, {"a": 110}, {"a": 120, "b": 9500}, {"a": 120, "b": 9540}):
        now[0] += 2
        states = {address: pb.SchedulerState(num_steps=num_steps) for address, num_steps in counts.items()}
        named = [pb.NamedScheduler(address=address, state=states.get(address)) for address in "ab"]
        whole = pb.SchedulerState(num_steps=sum(counts.values()))
        view.take(pb.WatchStateResponse(state=whole, schedulers=named))
        rates.append(re.search(r"steps_per_s=(\S+)", view.lines()[0])[1])
    assert rates == ["-", "5.0", "5.0", "20.0"]


# Watching


def test_a_watch_writes_a_line_for_each_state_and_ends_with_the_servers_error(fake, target):
    fake.states = [STATE, STATE]
    fake.refusal = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHES", "16 watch", retry_delay_ms=1000)
    shown = run("top", "--interval", "0.25", "--target", target)
    assert shown.exit_code == 1
    assert [line.split()[1] for line in shown.stdout.splitlines()] == ["serving=yes"] * 2
    assert shown.stderr == "error: 16 watch; try again in 1 s\n"
    assert fake.intervals_ms == [250]


def test_a_server_that_is_away_for_a_moment_is_asked_again(fake, target):
    fake.refusal = unavailable("DRAINING", "shutting down")
    states = watch(target, 1.0, sleep=lambda seconds: None)
    kinds = [type(next(states)) for _ in range(4)]
    assert kinds == [pb.WatchStateResponse, Unavailable, pb.WatchStateResponse, Unavailable]
    states.close()


def test_a_server_that_stays_away_for_a_minute_is_given_up(fake, target):
    fake.refusal = unavailable("NO_SCHEDULER", "loading")
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        fake.states = []

    states = watch(target, 1.0, clock=lambda: now[0], sleep=sleep)
    assert next(states) == ANSWER
    assert all(isinstance(next(states), Unavailable) for _ in range(61))
    with pytest.raises(Unavailable, match="loading"):
        next(states)


def test_a_server_that_was_never_there_is_an_error_at_once():
    for arguments in ((), ("--once",)):
        shown = run("top", "--target", "127.0.0.1:1", *arguments)
        assert shown.exit_code == 1
        assert shown.stderr.startswith("error: no server answers; `pagewire up` starts one")


def test_while_a_server_is_away_its_last_state_stays_and_the_headline_says_why():
    view = View("host:1", terminal())
    view.take(ANSWER)
    view.take(Unavailable(unavailable("NO_SCHEDULER", "the scheduler does not answer")))
    headline, first, *_ = picture(view, terminal())
    assert headline == "host:1  no answer, trying again: the scheduler does not answer"
    assert "12 running" in first
    assert view.lines()[0].endswith("no answer: the scheduler does not answer")
    view.take(ANSWER)
    assert "serving=yes" in view.lines()[0]


@pytest.mark.parametrize("console", [terminal(), Console(file=io.StringIO(), width=100)])
def test_ctrl_c_ends_a_watch_cleanly_with_the_last_state_shown(console, monkeypatch):
    def interrupted(target: str, interval_s: float, access):
        yield ANSWER
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "watch", interrupted)
    top.run("host:1", 1.0, once=False, console=console)
    shown = console.file.getvalue()
    assert ("12 running" if console.is_terminal else "running=12") in shown


@pytest.mark.parametrize("command", [["top"], ["top", "--once"], ["explain", "r1"]])
def test_a_server_that_shows_no_state_is_named_with_its_option(command):
    with serving(FakeGeneration()) as target:
        shown = run(*command, "--target", target)
        assert (shown.exit_code, "runs with --no-introspection" in shown.stderr) == (1, True), shown.output


def test_an_interval_out_of_range_is_a_mistake_of_usage():
    assert run("top", "--interval", "0.001").exit_code == 2


# Explanations

WAITING = pb.ExplainRequestResponse(
    status=pb.REQUEST_STATUS_WAITING,
    reason=pb.WAIT_REASON_BLOCKS,
    message="it needs 5 blocks; 3 are free, 1 kept for what runs",
    queue_position=0,
    num_blocks_needed=5,
    num_blocks_free=3,
    num_computed_tokens=16,
    num_cached_prompt_tokens=8,
    num_output_tokens=4,
    num_running_seqs=6,
    max_num_seqs=7,
    num_preemptions=2,
    preempted_by="r0",
    preemption_reason="recompute, 20 tokens take 1.0 ms",
    waited_ms=1234.5,
    last_step_tokens=16,
    max_num_batched_tokens=17,
)


def test_explain_says_why_a_request_waits(fake, target):
    fake.explanations["r1"] = WAITING
    shown = run("explain", "r1", "--target", target)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines() == [
        "status     waiting: it needs 5 blocks; 3 are free, 1 kept for what runs",
        "queue      first",
        "blocks     0 held, 5 needed to run, 3 can be allocated now",
        "tokens     16 computed, 4 sampled, 8 of the prompt found cached",
        "sequences  6 of at most 7 run, of all requests",
        "steps      16 tokens in the last one, of at most 17",
        "preempted  2 times, last for r0: recompute, 20 tokens take 1.0 ms",
        "submitted  1.2 s ago",
    ]


def test_explain_leaves_out_what_means_nothing_for_a_request_that_runs():
    facts = pb.ExplainRequestResponse(
        status=pb.REQUEST_STATUS_RUNNING, message="it runs", num_blocks_held=3, num_blocks_free=9, num_running_seqs=1
    )
    lines = dict(explained(facts))
    assert (lines["status"], lines["blocks"]) == ("running", "3 held, 9 can be allocated now")
    assert {"queue", "preempted"}.isdisjoint(lines)


def test_explain_names_the_place_of_one_that_others_go_before():
    facts = pb.ExplainRequestResponse(status=pb.REQUEST_STATUS_SWAPPED, message="2 go first", queue_position=2)
    lines = dict(explained(facts))
    assert (lines["status"], lines["queue"]) == ("swapped out: 2 go first", "2 before it")


def test_explain_of_an_unknown_request_is_one_line_and_status_1(target):
    shown = run("explain", "nobody", "--target", target)
    assert (shown.exit_code, shown.stderr) == (1, "error: no live request is 'nobody'\n")
