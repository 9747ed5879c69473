"""Several router processes on one port, by hand and by `pagewire up`, and that none shares a port by accident."""

import contextlib
import hashlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
from authority import Authority
from cluster import Cluster, cluster, free_port
from deployment import Service
from fakes import TEXT
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from launched import launched, wait_for

from pagewire import health
from pagewire.access import Access
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub


@pytest.fixture(scope="module")
def site():
    with cluster(num_routers=0) as running:
        yield running


def command(running: Cluster, listen: str, *options: str) -> list[str]:
    behind = ("--scheduler", running.scheduler_address(0), "--model", f"{running.directory}/model")
    return ["--listen", listen, *behind, *options]


@contextlib.contextmanager
def sharing(running: Cluster, port: int, number: int) -> Iterator[tuple[Service, str]]:
    """A router on a shared port that serves, and its own socket."""
    own = f"unix:{running.directory}/router-{port}-{number}"
    arguments = command(running, f"127.0.0.1:{port},{own}", "--share-port")
    service = Service("router", *arguments, directory=running.directory)
    try:
        running.wait_for_serving(own)
        yield service, own
        if service.process.poll() is None:
            service.stop()
    finally:
        service.process.kill()


def num_calls(own: str) -> int:
    """Calls that a router has answered on its own socket and the shared port, but for this one."""
    with grpc.insecure_channel(own) as channel:
        answer = channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
    return answer.server[0].data.calls_succeeded


def request(max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="p", stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True))


def complete(target: str, number: int = 0) -> str:
    """An answer over a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("client", number)]
    with grpc.insecure_channel(target, options=options) as channel:
        return GenerationServiceStub(channel).Complete(request(4), timeout=20).outputs[0].text


def test_connections_to_a_shared_port_are_spread_over_the_routers(site):
    port = free_port()
    with sharing(site, port, 1) as (_, first), sharing(site, port, 2) as (_, second):
        before = num_calls(first), num_calls(second)
        texts = [complete(f"127.0.0.1:{port}", number) for number in range(32)]
        assert all(text in TEXT * 2 for text in texts)
        first_part, second_part = num_calls(first) - before[0], num_calls(second) - before[1]
        # One of the calls that count them is counted on each side.
        assert first_part + second_part == 32 + 2
        assert min(first_part, second_part) > 4, "chance gives less one time in a million"


def test_a_shared_port_answers_while_one_router_is_left(site):
    port = free_port()
    with sharing(site, port, 1) as (lost, _), sharing(site, port, 2):
        lost.process.send_signal(signal.SIGKILL)
        lost.process.wait()
        assert all(complete(f"127.0.0.1:{port}", number) for number in range(8))


def test_routers_that_share_a_port_ask_for_tls_and_tokens_there_and_on_their_own_sockets(site, tmp_path):
    authority, port, tokens = Authority(tmp_path), free_port(), tmp_path / "tokens.toml"
    certificate, key = authority.issue()
    tokens.write_text(f'[acme]\nsha256 = ["{hashlib.sha256(b"secret").hexdigest()}"]\n')
    guarded = ("--tls-certificate", certificate, "--tls-key", key, "--auth-tokens", tokens, "--share-port")
    own = [f"unix:{site.directory}/router-{port}-{number}" for number in (1, 2)]
    access, asked = Access(ca=authority.ca, token="secret"), pb.GetModelRequest()
    with contextlib.ExitStack() as ends:
        for socket in own:
            arguments = command(site, f"127.0.0.1:{port},{socket}", *map(str, guarded))
            service = Service("router", *arguments, directory=site.directory)
            ends.callback(service.process.kill)
            while health.check(socket, access=access) != health.SERVING:
                assert service.process.poll() is None
        for target in (*own, f"127.0.0.1:{port}"):
            assert health.check(target) == "no answer (UNAVAILABLE)", "plaintext"
            with access.channel(target, []) as channel:
                stub = GenerationServiceStub(channel)
                assert stub.GetModel(asked, timeout=20, metadata=access.metadata).model
                with pytest.raises(grpc.RpcError) as info:
                    stub.GetModel(asked, timeout=20)
                assert info.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("first, second", list(itertools.product([(), ("--share-port",)], repeat=2)))
def test_a_port_is_shared_only_if_both_say_so(site, first, second):
    port = free_port()
    site.start_router(port, *first)
    try:
        site.wait_for_serving(port)
        arguments = [sys.executable, "-m", "router", *command(site, f"127.0.0.1:{port}", *second)]
        with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as other:
            if first and second:
                assert any("listening" in line for line in other.stderr)
                other.terminate()
                other.communicate()
                assert other.returncode == 0
            else:
                _, errors = other.communicate(timeout=30)
                assert (other.returncode, f"cannot listen on 127.0.0.1:{port}" in errors) == (1, True), errors
    finally:
        site.routers.pop(port).stop()


@pytest.mark.slow
def test_of_two_routers_that_were_launched_one_is_killed_and_comes_back_while_the_other_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with launched(tmp_path, "--routers", "2") as (process, running):
        lost, left = running.addresses["router-1"], running.addresses["router-2"]
        expected = complete(lost)
        assert expected in TEXT
        assert complete(left) == expected
        with grpc.insecure_channel(left) as channel:
            stream = iter(GenerationServiceStub(channel).Generate(request(400), timeout=20))
            text = next(stream).outputs[0].text
            os.kill(running.service_pids["router-1"], signal.SIGKILL)
            wait_for(lambda: health.check(lost) != health.SERVING)
            assert complete(left) == expected
            text += "".join(message.outputs[0].text for message in stream)
        assert text == (TEXT * 400)[1:401]
        wait_for(lambda: health.check(lost) == health.SERVING)
        assert complete(lost) == expected
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0, output


@pytest.mark.parametrize("address", ["127.0.0.1:99999", ":abc", "nobody.invalid:53001"])
def test_a_router_whose_admin_address_can_not_be_bound_ends_with_a_line_of_it(site, address):
    arguments = command(site, f"unix:{site.directory}/refused", "--admin-listen", address, "--log-level", "warning")
    ended = subprocess.run([sys.executable, "-m", "router", *arguments], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False), ended.stderr
    assert f"cannot listen on {address}: " in ended.stderr.splitlines()[-1], "gRPC may have written one before"
