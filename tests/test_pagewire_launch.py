"""The local cluster, with small stand-ins for the services: start, restart, end in order, and every way to fail."""

import asyncio
import contextlib
import dataclasses
import errno
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pagewire_fakes
import pytest
from authority import Authority, replace
from rich.console import Console

from pagewire import background, cluster, health, state
from pagewire.access import Access
from pagewire.cluster import Cluster, LaunchError, RestartPolicy, ServiceProcess, stages
from pagewire.launch import LaunchOptions, Setting, check_free, free_port, services, shared_settings
from pagewire.processes import environment, module_command, start, start_ticks, uptime_s, with_descendants
from pagewire.restart import restart
from pagewire.up import _Foreground
from protos.tls import ServerTls

FAKES = pagewire_fakes.__file__
NAMES = ("worker", "scheduler", "router")
WAIT_S = 20.0


def wait_for(condition, what: str):
    """What `condition` gives once that is true; fails after `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.01)
    pytest.fail(f"not within {WAIT_S} s: {what}")


# The cluster


class Trial:
    """A cluster of fakes; notes what it reports."""

    def __init__(
        self,
        folder: Path,
        *,
        policy=RestartPolicy,
        stop_within_s: float = 5.0,
        start_within_s: float = WAIT_S,
        probe_s: float = 5.0,
        starts_behind: dict[str, str] | None = None,
        access: Access = Access(),  # noqa: B008
        **options: str,
    ) -> None:
        self.journal = folder / "journal"
        self.lines: list[str] = []
        self.waited: list[str] = []
        self.pids: dict[str, int] = {}
        self.restarted = asyncio.Event()
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()
        chain = []
        for name in NAMES:
            address = f"unix:{folder}/{name}.sock"
            command = [sys.executable, FAKES, name, "--listen", address, "--journal", str(self.journal)]
            command += options.get(name, "").split()
            behind = (starts_behind or {}).get(name, "")
            inside = access if name == "router" else Access()
            each = ServiceProcess(name, tuple(command), address, stop_within_s, inside, name, starts_behind=behind)
            chain.append(each)
        self.cluster = Cluster(
            chain,
            on_line=lambda name, line: self.lines.append(line),
            on_waiting=self.waited.append,
            on_pids=self.note_pids,
            new_policy=policy,
            start_within_s=start_within_s,
            probe_s=probe_s,
        )

    async def run(self) -> None:
        await asyncio.wait_for(self.cluster.run(self.stop, self.ready.set), WAIT_S)

    def note_pids(self, pids: dict[str, int]) -> None:
        # A report of fewer processes tells of a death, one of all of them of a start.
        self.pids |= pids
        if len(pids) == len(NAMES):
            self.restarted.set()

    def events(self) -> list[str]:
        return self.journal.read_text().splitlines()


@pytest.fixture
def folder(tmp_path_factory):
    # Short enough for a socket's path.
    return tmp_path_factory.mktemp("c")


async def ended_pid(trial: Trial, name: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Kills a service; gives the pid of the process that takes its place."""
    old = trial.pids[name]
    trial.restarted.clear()
    os.kill(old, number)
    await asyncio.wait_for(trial.restarted.wait(), WAIT_S)
    return trial.pids[name]


async def test_services_stop_in_the_reverse_order_of_their_start(folder):
    trial = Trial(folder)
    run = asyncio.create_task(trial.run())
    await asyncio.wait_for(trial.ready.wait(), WAIT_S)
    assert trial.waited == list(NAMES)
    assert {line.split()[2] for line in trial.lines} == set(NAMES)
    trial.stop.set()
    await run
    assert trial.events()[3:] == ["router stop", "scheduler stop", "worker stop"]


async def test_a_service_starts_behind_others_when_they_listen_and_is_waited_for_in_its_turn(folder):
    trial = Trial(folder, starts_behind={"scheduler": "router"})
    run = asyncio.create_task(trial.run())
    await asyncio.wait_for(trial.ready.wait(), WAIT_S)
    assert list(trial.pids) == ["worker", "router", "scheduler"]
    assert trial.events().index("router start") < trial.events().index("scheduler start")
    assert trial.waited == list(NAMES)
    trial.stop.set()
    await run
    assert trial.events()[3:] == ["router stop", "scheduler stop", "worker stop"]


async def test_a_service_starts_behind_others_that_do_not_listen_soon(folder, monkeypatch):
    monkeypatch.setattr(cluster, "_LISTENING_WITHIN_S", 0.2)
    trial = Trial(folder, starts_behind={"scheduler": "router"}, start_within_s=3.0, router="--mute")
    with pytest.raises(LaunchError, match="router does not serve after 3 s"):
        await trial.run()
    assert "scheduler start" in trial.events()


async def test_who_prints_a_line_is_asked_at_once_whether_it_serves(folder, monkeypatch):
    monkeypatch.setattr(cluster, "_POLL_S", 2 * WAIT_S)
    trial = Trial(folder)
    run = asyncio.create_task(trial.run())
    await asyncio.wait_for(trial.ready.wait(), WAIT_S)
    trial.stop.set()
    await run


async def test_a_service_that_dies_is_started_again(folder):
    trial = Trial(folder, policy=lambda: RestartPolicy(first_delay_s=0.01))
    run = asyncio.create_task(trial.run())
    await asyncio.wait_for(trial.ready.wait(), WAIT_S)
    pid = await ended_pid(trial, "worker")
    assert os.getpgid(pid) == pid
    trial.stop.set()
    await run


async def test_nothing_watches_a_process_that_has_ended(folder):
    trial = Trial(folder, policy=lambda: RestartPolicy(first_delay_s=0.01))
    run = asyncio.create_task(trial.run())
    await asyncio.wait_for(trial.ready.wait(), WAIT_S)
    await ended_pid(trial, "worker")
    trial.stop.set()
    await run
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_a_service_has_left_running_ends_with_it_and_its_last_words_are_told(folder):
    script = "sleep 99 & printf 'left %s' $!; exit 3"
    leaving = ServiceProcess("worker", ("/bin/sh", "-c", script), f"unix:{folder}/nobody.sock")
    lines: list[str] = []
    alone = Cluster([leaving], on_line=lambda name, line: lines.append(line))
    with pytest.raises(LaunchError, match=r"worker ended with status 3 before it was ready\n  left \d+$"):
        await alone.run(asyncio.Event(), lambda: None)
    left = int(lines[0].removeprefix("left "))
    wait_for(lambda: start_ticks(left) is None, "what was left has ended")


async def test_a_service_that_dies_too_often_ends_the_cluster(folder):
    trial = Trial(folder, policy=lambda: RestartPolicy(first_delay_s=0.01, max_deaths=2))
    run = asyncio.create_task(trial.run())
    await asyncio.wait_for(trial.ready.wait(), WAIT_S)
    os.kill(await ended_pid(trial, "worker"), signal.SIGKILL)
    with pytest.raises(LaunchError, match=r"worker was killed by SIGKILL, death 2 within 120 s; giving up"):
        await run
    assert trial.events()[-2:] == ["router stop", "scheduler stop"]


async def test_a_service_that_was_told_to_stop_is_followed_at_once_and_has_not_died(folder):
    trial = Trial(folder, policy=lambda: RestartPolicy(first_delay_s=2 * WAIT_S, max_deaths=2))
    run = asyncio.create_task(trial.run())
    await asyncio.wait_for(trial.ready.wait(), WAIT_S)
    for _ in range(2):
        await ended_pid(trial, "router", signal.SIGTERM)
        while trial.events().count("router start") < trial.events().count("router stop") + 1:
            await asyncio.sleep(0.01)  # before which it is killed by the signal
    trial.stop.set()
    await run
    assert trial.events().count("router stop") == 3


async def killed_for_silence(trial: Trial, name: str, *signals: int) -> None:
    """Sends a service signals, after which it is silent: it is to be killed and started again."""
    run = asyncio.create_task(trial.run())
    await asyncio.wait_for(trial.ready.wait(), WAIT_S)
    trial.restarted.clear()
    old = trial.pids[name]
    for number in signals:
        os.kill(old, number)
    await asyncio.wait_for(trial.restarted.wait(), WAIT_S)
    assert trial.pids[name] != old
    trial.stop.set()
    await run


async def test_a_service_that_is_suspended_is_killed_and_started_again(folder, caplog):
    trial = Trial(folder, policy=lambda: RestartPolicy(first_delay_s=0.01), probe_s=0.3)
    await killed_for_silence(trial, "worker", signal.SIGSTOP)
    assert "worker has left 3 health checks in a row without an answer" in caplog.text


async def test_a_service_that_was_told_to_stop_and_does_not_is_killed_when_its_time_is_over(folder, caplog):
    options = {"worker": "--lingering", "stop_within_s": 1.5}
    trial = Trial(folder, policy=lambda: RestartPolicy(first_delay_s=0.01), probe_s=0.3, **options)
    await killed_for_silence(trial, "worker", signal.SIGTERM)
    assert "worker has left 6 health checks in a row without an answer" in caplog.text


async def test_a_service_that_does_not_let_the_launcher_in_goes_on_and_is_watched_as_soon_as_it_does(
    folder, tmp_path, monkeypatch, caplog
):
    async def checks(num: int) -> None:
        end = num_checks[router] + num
        async with asyncio.timeout(WAIT_S):
            while num_checks[router] < end:
                await asyncio.sleep(0.01)

    def counted(address: str, **options) -> str:
        num_checks[address] += 1
        return check(address, **options)

    check, num_checks, router = health.check, Counter(), f"unix:{folder}/router.sock"
    monkeypatch.setattr(health, "check", counted)
    authority = Authority(tmp_path)
    certificate, key = authority.issue()
    tls = {"router": f"--tls-certificate {certificate} --tls-key {key}", "access": Access(ca=authority.ca)}
    # Without connections it may go on for two checks.
    trial = Trial(folder, policy=lambda: RestartPolicy(first_delay_s=0.01), stop_within_s=1.0, probe_s=0.5, **tls)
    run = asyncio.create_task(trial.run())
    await asyncio.wait_for(trial.ready.wait(), WAIT_S)
    pid, trusted = trial.pids["router"], authority.ca.read_bytes()
    replace(authority.ca, Authority(tmp_path).ca.read_bytes())
    await checks(5)
    authority.ca.unlink()
    await checks(5)
    assert trial.pids["router"] == pid
    assert caplog.text.count("router cannot be asked for its health") == 1
    replace(authority.ca, trusted)
    await checks(2)
    trial.restarted.clear()
    os.kill(pid, signal.SIGSTOP)
    await asyncio.wait_for(trial.restarted.wait(), WAIT_S)
    assert "router has left 3 health checks in a row without an answer" in caplog.text
    trial.stop.set()
    await run


async def test_a_usage_error_ends_the_start_with_its_message(folder):
    trial = Trial(folder, worker="--bad-option")
    with pytest.raises(LaunchError, match=r"worker ended with status 2 before it was ready\n(.*\n)*.*--bad-option"):
        await trial.run()
    assert not trial.ready.is_set()
    assert all(start_ticks(pid) is None for pid in trial.pids.values())


async def test_a_death_before_ready_ends_the_start_with_the_last_lines(folder):
    trial = Trial(folder, scheduler="--die")
    with pytest.raises(LaunchError, match=r"scheduler ended with status 3 before it was ready\n(.*\n)*.*no weights"):
        await trial.run()


async def test_a_start_whose_service_is_killed_says_what_may_have_killed_it(folder):
    trial = Trial(folder, worker="--mute")
    run = asyncio.create_task(trial.run())
    async with asyncio.timeout(WAIT_S):
        while "worker" not in trial.pids:
            await asyncio.sleep(0.01)
    os.kill(trial.pids["worker"], signal.SIGKILL)
    with pytest.raises(LaunchError, match="SIGKILL before it was ready: Linux does that when memory runs out"):
        await run


async def test_a_service_that_never_serves_ends_the_start(folder):
    trial = Trial(folder, start_within_s=0.5, worker="--mute")
    with pytest.raises(LaunchError, match=r"worker does not serve after 0.5 s"):
        await trial.run()


async def test_a_service_that_never_lets_the_launcher_in_ends_the_start(folder, tmp_path):
    certificate, key = Authority(tmp_path).issue()
    tls = {"router": f"--tls-certificate {certificate} --tls-key {key}", "access": Access(ca=Authority(tmp_path).ca)}
    with pytest.raises(LaunchError, match=r"router cannot be asked for its health: not let in by TLS.*look at --ca"):
        await Trial(folder, **tls).run()


async def test_a_service_that_does_not_stop_is_killed(folder):
    trial = Trial(folder, stop_within_s=1.0, router="--stubborn")
    run = asyncio.create_task(trial.run())
    await asyncio.wait_for(trial.ready.wait(), WAIT_S)
    trial.stop.set()
    await run
    assert trial.events()[3:] == ["router stop", "scheduler stop", "worker stop"]
    assert all(start_ticks(pid) is None for pid in trial.pids.values())


async def test_a_stop_while_starting_is_no_error(folder):
    trial = Trial(folder)
    trial.stop.set()
    await trial.run()
    assert not trial.ready.is_set()


def test_delays_double_up_to_their_bound_and_ten_deaths_in_two_minutes_are_too_many():
    policy = RestartPolicy()
    assert [policy.delay_after_death(now) for now in range(10)] == [0, 0.5, 1, 2, 4, 8, 10, 10, 10, None]
    patient = RestartPolicy()
    assert [patient.delay_after_death(20 * i) for i in range(12)][-1] == 10
    assert patient.delay_after_death(20 * 11 + 120) == 0


# Command lines


def test_options_reach_the_services_that_they_are_for():
    shared = shared_settings(dtype="float32", max_num_batched_tokens=64, log_level=None, max_num_seqs=8, record="r")
    extra = (Setting.parse("scheduler.chunked_prefill=false"), Setting.parse("worker.num-gpu-blocks=8"))
    worker, scheduler, router = services(LaunchOptions("/m", "0.0.0.0", 7000, (*shared, *extra)), "/d")
    assert (scheduler.starts_behind, router.peers) == ("router", "router")
    assert " ".join(worker.command[2:]) == (
        "-m worker --listen unix:/d/worker.sock --model /m --drain-grace-s=0 "
        "--dtype=float32 --max-num-batched-tokens=64 --num-gpu-blocks=8"
    )
    assert " ".join(scheduler.command[2:]) == (
        "-m scheduler --listen unix:/d/scheduler.sock --worker unix:/d/worker.sock"
        " --drain-grace-s=0 --max-num-batched-tokens=64 --max-num-seqs=8 --record=r --no-chunked-prefill"
    )
    assert " ".join(router.command[2:]) == (
        "-m router --listen 0.0.0.0:7000 --scheduler unix:/d/scheduler.sock --model /m"
    )
    assert router.address == "127.0.0.1:7000"


def test_several_routers_share_the_port_and_have_a_socket_each():
    options = LaunchOptions("/m", port=7000, routers=2, settings=(Setting.parse("router.log-format=json"),))
    chain = services(options, "/d")
    assert [service.name for service in chain] == ["worker", "scheduler", "router-1", "router-2"]
    assert [service.name for service in stages(chain)[-1]] == ["router-1", "router-2"]
    assert chain[3].address == "unix:/d/router-2.sock"
    assert " ".join(chain[3].command[2:]) == (
        "-m router --listen 127.0.0.1:7000,unix:/d/router-2.sock --share-port"
        " --scheduler unix:/d/scheduler.sock --model /m --log-name=router-2 --log-format=json"
    )


@pytest.mark.parametrize("option", ["metrics-listen", "admin-listen"])
def test_several_routers_have_a_port_each_where_they_can_not_share_one(option):
    def told(value: str, routers: int) -> list[str]:
        options = LaunchOptions("m", settings=(Setting.parse(f"router.{option}={value}"),), routers=routers)
        return [service.command[-1].partition("=")[2] for service in services(options, "/d")[2:]]

    assert told("[::1]:9091", 3) == ["[::1]:9091", "[::1]:9092", "[::1]:9093"]
    assert told("127.0.0.1:0", 2) == ["127.0.0.1:0"] * 2, "any free port"
    assert told("unix:/s", 1) == ["unix:/s"]
    with pytest.raises(LaunchError, match=rf'router.{option}: 2 routers cannot share unix:/s; write "host:port"'):
        told("unix:/s", 2)


def test_a_service_may_take_as_long_to_stop_as_it_was_told_to_drain():
    options = LaunchOptions("/m", settings=(Setting.parse("router.drain-grace-s=5"),))
    assert [service.stop_within_s for service in services(options, "/d")] == [10, 10, 15]


def test_what_services_are_told_by_their_environment_counts_unless_a_setting_says_otherwise(monkeypatch):
    monkeypatch.setenv("PAGEWIRE_ROUTER_DRAIN_GRACE_S", "120")
    monkeypatch.setenv("PAGEWIRE_SCHEDULER_DRAIN_GRACE_S", "20")
    monkeypatch.setenv("PAGEWIRE_ROUTER_METRICS_LISTEN", "127.0.0.1:9091")
    options = LaunchOptions("/m", routers=2, settings=(Setting.parse("scheduler.drain-grace-s=5"),))
    worker, scheduler, *routers = services(options, "/d")
    assert [service.stop_within_s for service in (worker, scheduler, *routers)] == [10, 15, 130, 130]
    assert scheduler.command[-1] == "--drain-grace-s=5"
    assert ["--metrics-listen=127.0.0.1:9092" in service.command for service in routers] == [False, True]


def test_a_router_with_tls_that_the_launcher_does_not_trust_is_an_error_before_anything_starts():
    told = (Setting.parse("router.tls-certificate=/c.pem"),)
    with pytest.raises(LaunchError, match=r"router.tls-certificate: .*`pagewire --ca FILE up ...`"):
        LaunchOptions("/m", settings=told)
    LaunchOptions("/m", settings=told, access=Access(ca="/ca.pem"))


def test_a_router_without_tls_that_would_be_asked_by_tls_is_an_error_before_anything_starts():
    with pytest.raises(LaunchError, match=r"the router has no TLS.*leave out --tls, --ca and PAGEWIRE_CLIENT_\*"):
        LaunchOptions("/m", access=Access(tls=True))


INNER_TLS = [
    "worker.tls-certificate",
    "scheduler.tls_certificate",
    "scheduler.worker-tls-ca",
    "router.scheduler-tls-ca",
]


@pytest.mark.parametrize("name", INNER_TLS)
def test_tls_between_services_behind_the_router_is_refused_however_it_is_told(name, monkeypatch):
    refusal = f"{name.replace('_', '-')}: leave it out; .* Unix sockets"
    with pytest.raises(LaunchError, match=refusal):
        LaunchOptions("/m", settings=(Setting.parse(f"{name}=/c.pem"),))
    monkeypatch.setenv(f"PAGEWIRE_{re.sub('[.-]', '_', name).upper()}", "/c.pem")
    with pytest.raises(LaunchError, match=refusal):
        LaunchOptions("/m")


@pytest.mark.parametrize("variable", ["PAGEWIRE_WORKER_SELFTEST", "PAGEWIRE_ROUTER_SHARE_PORT"])
def test_what_is_the_launchers_to_say_is_refused_in_the_environment_too(variable, monkeypatch):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(LaunchError, match=rf"{variable}: `pagewire up` gives this option itself; (run|say) "):
        LaunchOptions("/m")


def test_services_behind_the_router_wait_for_nobody_when_they_stop_unless_they_are_told_to():
    options = LaunchOptions("/m", settings=(Setting.parse("scheduler.drain-grace-s=5"),))
    worker, scheduler, router = services(options, "/d")
    assert (worker.command[-1], worker.stop_within_s) == ("--drain-grace-s=0", 10)
    assert (scheduler.command[-1], scheduler.stop_within_s) == ("--drain-grace-s=5", 15)
    assert router.stop_within_s == 40


@pytest.mark.parametrize("text", ["worker.x", "worker=1", "engine.x=1", ".x=1", "worker.=1"])
def test_a_malformed_setting_is_refused(text):
    with pytest.raises(LaunchError, match=r"SERVICE\.OPTION=VALUE"):
        Setting.parse(text)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("worker.listen=127.0.0.1:1", "leave it out"),
        ("scheduler.worker=127.0.0.1:1", "leave it out"),
        ("router.listen=127.0.0.1:1", "--port"),
        ("router.share_port=false", "--routers"),
        ("worker.model=/m", "--model"),
        ("worker.selftest=true", "python -m worker --selftest"),
    ],
)
def test_a_setting_that_is_the_launchers_own_is_refused_with_what_to_say_in_its_place(text, remedy):
    with pytest.raises(LaunchError, match=f"{text}: .*{remedy}"):
        Setting.parse(text)


def test_a_taken_port_is_an_error_before_anything_starts(home):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port}: Address already in use; choose another --port"):
            check_free(LaunchOptions("/m", port=port))
    check_free(LaunchOptions("/m", port=port))
    with pytest.raises(LaunchError, match="choose another --host"):
        check_free(LaunchOptions("/m", host="no.such.host.invalid", port=port))
    with pytest.raises(LaunchError, match="--host is empty: name an address"):
        check_free(LaunchOptions("/m", host="", port=port))


def test_a_port_where_closed_connections_linger_is_free(home):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()  # who closes first keeps it for a minute
    check_free(LaunchOptions("/m", port=port))


# The whole launcher, as a user's commands


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's folders of their own, and packages named like the services, which the launcher starts by name."""
    for name in NAMES:
        package = tmp_path / "fakes" / name
        package.mkdir(parents=True)
        main = f"import sys, pagewire_fakes; pagewire_fakes.main([{name!r}, *pagewire_fakes.told(sys.argv[1:])])"
        (package / "__main__.py").write_text(main)
        # Without it the folder would stand behind the real package of that name, wherever that is on the path.
        (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'fakes'}:{Path(FAKES).parent}")
    for kind in ("STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))
    return tmp_path


@pytest.fixture
def port(home):
    """A port whose cluster, if a test leaves one, is killed."""
    port = free_port()
    yield port
    if running := state.load(port):
        os.kill(running.launcher_pid, signal.SIGKILL)


def pagewire(*arguments: str | Path | int) -> subprocess.CompletedProcess:
    command = module_command("pagewire", [str(argument) for argument in arguments])
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_a_detached_cluster_serves_and_is_shown_and_stopped(home, port):
    up = pagewire("up", "--model", home, "--port", port, "--detach", "--set", f"worker.journal={home}/journal")
    assert (up.returncode, up.stderr) == (0, "")
    assert f"serves on 127.0.0.1:{port}" in up.stdout
    assert health.check(f"127.0.0.1:{port}") == health.SERVING
    shown = pagewire("status", "--port", port)
    assert shown.returncode == 0
    where = f"target   127.0.0.1:{port}, SERVING"
    for word in (*NAMES, "launcher", where, "fake, float32, 64 tokens", "--no-introspection", f"{port}.log"):
        assert word in shown.stdout
    again = pagewire("up", "--model", home, "--port", port)
    assert (again.returncode, "runs on port" in again.stderr) == (1, True)
    assert pagewire("down", "--port", port).returncode == 0
    assert (home / "journal").read_text().splitlines() == ["worker start", "worker stop"]
    assert pagewire("status", "--port", port).returncode == 1
    assert "nothing runs" in pagewire("down", "--port", port).stdout


def test_no_command_says_that_nothing_runs_where_something_does_that_this_user_did_not_start(home):
    with pagewire_fakes.serving(pagewire_fakes.FakeGeneration()) as target:
        port = target.rpartition(":")[2]
        assert f"target   127.0.0.1:{port}, SERVING" in pagewire("status", "--port", port).stdout
        down = pagewire("down", "--port", port).stdout
        assert down == f"nothing runs on port {port} that this user's `pagewire up` started\n"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        shown = pagewire("status", "--port", port)
        assert (shown.returncode, shown.stdout) == (
            1,
            f"nothing answers on port {port}; `pagewire up` starts a cluster\n",
        )


@pytest.mark.parametrize("num", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_cluster_behind_tls_is_started_and_shown_by_who_trusts_it(num, home, port):
    authority = Authority(home)
    certificate, key = authority.issue()
    tls = ("--set", f"router.tls-certificate={certificate}", "--set", f"router.tls-key={key}")
    several = ("--routers", num, "--replicas", num)
    up = pagewire("--ca", authority.ca, "up", "--model", home, "--port", port, "--detach", *several, *tls)
    assert (up.returncode, up.stderr) == (0, "")
    shown = pagewire("--ca", authority.ca, "status", "--port", port)
    assert shown.returncode == 0
    assert shown.stdout.count("SERVING") == 3 * num + 1, "all processes, and the target"
    assert [name for name in state.load(port).addresses if name not in shown.stdout] == []
    locked_out = pagewire("status", "--port", port)
    assert (locked_out.returncode, "(UNAVAILABLE); --ca FILE or --tls" in locked_out.stdout) == (1, True)
    pids = state.load(port).service_pids
    refused = pagewire("restart", "router", "--port", port)
    assert (refused.returncode, state.load(port).service_pids) == (1, pids)
    assert "no router tells its health: no answer (UNAVAILABLE); --ca FILE or --tls" in refused.stderr
    assert pagewire("--ca", authority.ca, "restart", "router", "--port", port).returncode == 0
    assert pagewire("down", "--port", port).returncode == 0


def test_one_of_several_routers_that_dies_is_started_again_while_the_others_serve(home, port):
    process, running = started(home, port, "--routers", "3", "--set", f"router.journal={home}/journal")
    assert sorted(running.service_pids) == ["router-1", "router-2", "router-3", "scheduler", "worker"]
    assert pagewire("status", "--port", port).stdout.count("SERVING") == 6, "five processes, and the port"
    pid = running.service_pids["router-2"]
    os.kill(pid, signal.SIGKILL)
    # A connection that it had not accepted yet dies with it; the next one comes to another.
    wait_for(lambda: health.check(f"127.0.0.1:{port}") == health.SERVING, "another one answers")
    wait_for(lambda: (home / "journal").read_text().count("router start") == 4, "another one")
    assert state.load(port).service_pids["router-2"] != pid
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert (home / "journal").read_text().splitlines()[-3:] == ["router stop"] * 3


def test_a_detached_cluster_that_cannot_start_shows_the_end_of_its_log(home, port):
    up = pagewire("up", "--model", home, "--port", port, "-d", "--set", "worker.bad-option=true")
    assert up.returncode == 1
    assert "unrecognized arguments: --bad-option" in up.stderr
    assert state.load(port) is None


def test_a_cluster_that_does_not_serve_yet_ends_with_the_command_that_detaches_it(home, port):
    arguments = ["up", "--model", str(home), "--port", str(port), "--detach", "--set", "worker.mute=true"]
    process = subprocess.Popen(module_command("pagewire", arguments), env=environment())
    running = wait_for(lambda: (now := state.load(port)) and now.service_pids and now, "its processes start")
    process.terminate()
    assert process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert not running.alive
    assert state.load(port) is None


def test_each_process_of_a_service_is_replaced_when_the_one_before_serves(home, port):
    several = ("--routers", "2", "--replicas", "2")
    process, running = started(home, port, *several, "--set", f"router.journal={home}/journal")
    shown = pagewire("restart", "router", "worker", "--port", port)
    assert (shown.returncode, shown.stderr) == (0, "")
    pids = state.load(port).service_pids
    for name, line in zip(("router-1", "router-2", "worker-1", "worker-2"), shown.stdout.splitlines(), strict=True):
        assert re.fullmatch(rf"{name} serves again, as pid {pids[name]}; it was away for \d+\.\d s", line)
    assert {name for name, pid in pids.items() if pid == running.service_pids[name]} == {"scheduler-1", "scheduler-2"}
    assert (home / "journal").read_text().splitlines()[2:] == ["router stop", "router start"] * 2
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT_S)
    assert "worker-2 has stopped; starting its successor" in output


def test_a_restart_says_what_it_waited_for_in_vain(home):
    def attempt() -> None:
        restart(1, ["worker"], Console(), Access(), timeout_s=0.2)

    with pytest.raises(LaunchError, match="nothing runs on port 1; `pagewire up` starts a cluster"):
        attempt()
    with worker_alone(home) as (process, alone):
        with pytest.raises(
            LaunchError, match=rf"--timeout is over, .* waited for worker \(pid {process.pid}\) to stop"
        ):
            attempt()
        assert process.wait() == -signal.SIGTERM
        state.save(dataclasses.replace(alone, serving=False))
        with pytest.raises(LaunchError, match="the cluster does not serve yet"):
            attempt()


@contextlib.contextmanager
def worker_alone(home: Path, tls: ServerTls | None = None) -> Iterator[tuple[subprocess.Popen, state.ClusterState]]:
    """The state of a cluster with a process and a router that serves, of which this process is the launcher."""
    fake = pagewire_fakes.FakeGeneration()
    with pagewire_fakes.serving(fake, tls=tls) as router, subprocess.Popen(["sleep", "99"]) as process:
        me, pids, addresses = os.getpid(), {"worker": process.pid}, {"worker": f"unix:{home}/nobody", "router": router}
        alone = state.ClusterState(me, start_ticks(me), 1, "", "", str(home / "gone"), None, 1.0, addresses, pids, True)
        state.save(alone)
        try:
            yield process, alone
        finally:
            process.kill()


def test_a_restart_that_does_not_get_in_stops_nothing(home):
    authority = Authority(home)
    with worker_alone(home, authority.server()) as (process, _):
        for access, words in (
            (Access(), r"no answer \(UNAVAILABLE\); --ca FILE or --tls, before the command"),
            (Access(ca=Authority(home).ca), "not let in by TLS; .* look at --ca"),
        ):
            with pytest.raises(LaunchError, match=f"no router tells its health: {words}"):
                restart(1, ["worker"], Console(), access, timeout_s=WAIT_S)
        process.kill()
        assert process.wait() == -signal.SIGKILL


def test_a_restart_ends_with_the_stop_of_the_cluster(home):
    def stop_the_cluster() -> None:
        process.wait()
        state.save(dataclasses.replace(alone, serving=False))

    with worker_alone(home) as (process, alone):
        stopper = threading.Thread(target=stop_the_cluster)
        stopper.start()
        with pytest.raises(LaunchError, match="the cluster was told to stop while this waited for worker"):
            restart(1, ["worker"], Console(), Access(), timeout_s=WAIT_S)
        stopper.join()


def test_a_restart_that_ends_the_cluster_says_why(home, port):
    assert pagewire("up", "--model", home, "--port", port, "-d").returncode == 0
    (home / "fakes" / "scheduler" / "__main__.py").write_text("import sys; print('half an update'); sys.exit(2)")
    shown = pagewire("restart", "scheduler", "--port", port)
    assert (shown.returncode, "the cluster has ended" in shown.stderr) == (1, True)
    assert "scheduler ended with status 2\n" in shown.stderr
    assert "half an update" in shown.stderr


def started(
    home: Path, port: int, *arguments: str, under: tuple[str, ...] = ()
) -> tuple[subprocess.Popen, state.ClusterState]:
    """`pagewire up` in the foreground, once it serves; `under` another command, which becomes it."""
    command = (*under, *module_command("pagewire", ["up", "--model", str(home), "--port", str(port), *arguments]))
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return process, wait_for(lambda: (now := state.load(port)) and now.serving and now, "serving")


def test_ctrl_c_drains_and_ends_with_status_0(home, port):
    process, running = started(home, port, "--set", f"router.journal={home}/journal")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "INFO  launcher  serving" in output
    assert (home / "journal").read_text().splitlines()[-1] == "router stop"
    assert not Path(running.directory).exists()
    assert state.load(port) is None


def test_the_end_of_the_terminal_drains(home, port):
    # Also where these tests themselves run under nohup.
    heeded = ("env", "--default-signal=HUP")
    process, running = started(home, port, "--set", f"router.journal={home}/journal", under=heeded)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert (home / "journal").read_text().splitlines()[-1] == "router stop"
    assert not Path(running.directory).exists()
    assert state.load(port) is None


def test_under_nohup_the_end_of_the_terminal_does_not_matter(home, port):
    process, _ = started(home, port, under=("nohup",))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, "the first signal that says to stop was Ctrl-C; a second one would have forced it"


def test_sockets_lie_in_tmp_where_the_path_of_another_folder_can_not_stand_in_a_list(home, folder, port, monkeypatch):
    (folder / "a, b").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "a, b"))
    process, running = started(home, port)
    assert Path(running.directory).parent == Path("/tmp")
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0


def arguments_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


def test_up_begins_with_a_worker_that_is_told_later_what_its_successor_is_told_at_once(home, port):
    process, running = started(home, port, "--set", f"worker.journal={home}/journal")
    first = running.service_pids["worker"]
    assert arguments_of(first)[-3:] == ["-m", "worker", "-"]
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: (home / "journal").read_text().count("worker start") == 2, "a successor")
    command = arguments_of(state.load(port).service_pids["worker"])
    assert {"--listen", running.addresses["worker"], f"--journal={home}/journal"} <= set(command)
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0


def test_workers_that_share_the_machine_out_are_started_when_their_shares_are_known(home, port):
    process, running = started(home, port, "--replicas", "2")
    assert sorted(with_descendants([process.pid])) == sorted([process.pid, *running.service_pids.values()])
    assert all("--listen" in arguments_of(pid) for pid in running.service_pids.values())
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    "arguments, status",
    [(["--no-such-option"], 2), (["--model", "/no/such/folder"], 1), (["--set", "worker"], 1), (["--help"], 0)],
    ids=["option", "model", "setting", "help"],
)
def test_up_that_starts_nothing_leaves_no_worker_and_says_no_more(home, port, arguments, status):
    shown = pagewire("up", "--port", port, *arguments)
    assert shown.returncode == status
    assert "Traceback" not in shown.stderr
    assert "Exception ignored" not in shown.stderr
    ours = str(home / "fakes")
    wait_for(lambda: not any(ours in environment_of(pid) for pid in processes()), "no process of ours is left")


def test_a_worker_that_has_died_when_it_is_told_its_arguments_ends_the_start_with_its_last_words(home, port):
    (home / "fakes" / "worker" / "__main__.py").write_text("import sys; sys.exit('no such library')")
    shown = pagewire("up", "--model", home, "--port", port)
    assert shown.returncode == 1
    assert "worker ended with status 1 before it was ready\n  no such library" in shown.stderr
    assert "Exception ignored" not in shown.stderr


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def environment_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def test_a_second_ctrl_c_ends_what_does_not_stop(home, port):
    process, running = started(home, port, "--set", "router.stubborn=true", "--set", f"router.journal={home}/journal")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "stop" in (home / "journal").read_text(), "the router knows")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert all(start_ticks(pid) is None for pid in running.service_pids.values())


def test_a_cluster_that_is_stopped_again_while_it_drains_goes_on_draining(home, port):
    process, running = started(home, port, "--set", "router.stubborn=true", "--set", f"router.journal={home}/journal")
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: "stop" in (home / "journal").read_text(), "the router knows")
    process.send_signal(signal.SIGTERM)
    os.kill(running.service_pids["router"], signal.SIGKILL)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert (home / "journal").read_text().count("stop") == 1
    assert all(start_ticks(pid) is None for pid in running.service_pids.values())


def test_a_cluster_that_drains_is_not_restarted(home, port):
    process, running = started(home, port, "--set", "router.stubborn=true", "--set", f"router.journal={home}/journal")
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: "stop" in (home / "journal").read_text(), "the router knows")
    refused = pagewire("restart", "worker", "--port", port)
    assert (refused.returncode, "is being stopped" in refused.stderr) == (1, True)
    assert state.load(port).service_pids == running.service_pids
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)


class FullDisk(io.StringIO):
    """What cannot be written to any more."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_launcher_that_can_write_neither_lines_nor_its_state_goes_on(home, port, monkeypatch):
    foreground = _Foreground(LaunchOptions("/m", port=port), str(home), None)
    monkeypatch.setattr(sys, "stdout", FullDisk())
    foreground._line("router", "a line")
    foreground._pids({"router": 1})
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    foreground._pids({"router": 2})
    assert not foreground._stop.is_set()


def test_a_cluster_that_nobody_would_find_is_not_started(home, port, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    with pytest.raises(LaunchError, match=r"state cannot be written, by which others find it: .*/dev/null"):
        _Foreground(LaunchOptions("/m", port=port), str(home), None)._pids({"router": 1})


def test_services_die_with_a_killed_launcher(home, port):
    process, running = started(home, port)
    assert len(running.service_pids) == 3
    process.kill()
    process.communicate(timeout=WAIT_S)
    wait_for(lambda: all(start_ticks(pid) is None for pid in running.service_pids.values()), "services are gone")
    assert state.load(port) is None
    assert not Path(running.directory).exists()


def test_a_state_file_whose_pid_was_used_again_is_stale(home, port):
    mine = state.ClusterState(os.getpid(), 1, port, "", "", str(home / "gone"), None, 1.0, {}, {}, True)
    state.save(mine)
    assert state.load(port) is None


def test_a_cluster_tied_to_its_starter_ends_with_it(home, port):
    code = (
        "from pathlib import Path; from pagewire import background; from pagewire.launch import LaunchOptions\n"
        f"options = LaunchOptions({str(home)!r}, port={port}, log_file=Path({str(home / 'log')!r}))\n"
        "background.wait_until_serving(background.start(options, tie=True), options)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), timeout=WAIT_S, check=True)
    wait_for(lambda: state.load(port) is None, "the launcher is gone")


def test_the_demo_runs_and_leaves_nothing(home):
    shown = pagewire("demo", "--model", home)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.count("Hello, world") == 2
    assert shown.stdout.count("TTFT 100 ms, 10.0 tokens/s, 3 tokens in 0.30 s") == 2


# Processes


def test_a_process_is_known_by_its_start():
    me = os.getpid()
    assert start_ticks(me) == start_ticks(me)
    assert 0 < uptime_s(me) < 24 * 3600
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in with_descendants([me])
        child.stdin.close()
    assert start_ticks(child.pid) is None


async def test_a_process_starts_in_our_folder_and_in_the_root_if_ours_was_removed(folder, monkeypatch):
    async def where() -> str:
        process = await start([sys.executable, "-c", "import os; print(os.getcwd())"])
        said, _ = await process.communicate()
        return said.decode().strip()

    monkeypatch.chdir(folder)
    assert await where() == str(folder)
    folder.rmdir()
    assert await where() == "/"


def test_background_quotes_the_end_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(map(str, range(100))))
    assert background.log_tail(log, lines=2) == "  98\n  99"
    log.write_text("")
    assert background.log_tail(log) == f"  {log} is empty: is the disk full?"
