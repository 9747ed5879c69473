"""TLS on every wire: what is refused at the start, what a connection needs, and files that change while we run."""

import asyncio
import logging
import socket

import grpc
import pytest
from authority import Authority, replace, serial_number, shown_serial_number
from fakes import FakeWorker, control_plane, request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_fakes import FakeScheduler, router_alone, start_scheduler

from pagewire import health
from pagewire.access import Access
from pagewire.launch import free_port
from protos.pagewire.v1 import introspection_pb2
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.rpc import Line, Server, dial, wait_for_serving
from protos.tls import ClientTls, ServerTls, TlsError, read, read_pair
from router import schedulers as router_schedulers
from router.config import RouterSettings
from scheduler.config import SchedulerSettings


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


async def health_of(channel: grpc.aio.Channel) -> int:
    check = health_pb2_grpc.HealthStub(channel).Check
    return (await check(health_pb2.HealthCheckRequest(service="liveness"), timeout=10)).status


@pytest.fixture
async def serve():
    """Starts servers without services, and stops them at the end."""
    servers = []

    async def start(tls: ServerTls | None, address: str = "127.0.0.1:0") -> int:
        servers.append(Server([]))
        return await servers[-1].start(address, tls=tls)

    yield start
    for server in servers:
        await server.stop(0)


async def test_a_client_that_trusts_the_authority_gets_through_and_another_one_does_not(authority, serve, tmp_path):
    port = await serve(authority.server())
    async with dial(f"localhost:{port}", authority.client()) as channel:
        assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING
    for stranger in (Authority(tmp_path).client(), None):
        async with dial(f"localhost:{port}", stranger) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await health_of(channel)
            assert info.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_with_a_client_ca_nobody_gets_through_without_a_certificate_of_it(authority, serve, tmp_path):
    port = await serve(authority.server(client_ca=True))
    async with dial(f"localhost:{port}", authority.client("alice")) as channel:
        assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING
    mallory = Authority(tmp_path).issue("mallory", "alice")
    for refused in (authority.client(), ClientTls(authority.ca, *mallory)):
        async with dial(f"localhost:{port}", refused) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await health_of(channel)
            assert info.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_health_check_tells_a_server_that_does_not_let_it_in_from_nobody(authority, serve, tmp_path):
    tls = authority.server()
    port, unnamed, plain = await serve(tls), await serve(tls, "127.0.0.2:0"), await serve(None)
    mutual = await serve(ServerTls(tls.certificate, tls.key, authority.ca))

    async def said(address: str, **access: object) -> str:
        return await asyncio.to_thread(health.check, address, "liveness", 10, Access(**{"ca": authority.ca} | access))

    assert await said(f"127.0.0.1:{port}") == health.SERVING
    stranger = dict(zip(("certificate", "key"), Authority(tmp_path).issue("mallory"), strict=True))
    for answer in (
        await said(f"127.0.0.1:{port}", ca=Authority(tmp_path).ca),
        await said(f"127.0.0.2:{unnamed}"),
        await said(f"127.0.0.1:{plain}"),
        await said(f"127.0.0.1:{mutual}"),
        await said(f"127.0.0.1:{mutual}", **stranger),
    ):
        assert answer.startswith(health.NOT_LET_IN)
    for nobody in (f"127.0.0.1:{free_port()}", f"unix:{tmp_path}/nobody"):
        assert await said(nobody) == "no answer (UNAVAILABLE)"


async def test_new_connections_see_a_new_certificate(authority, serve):
    tls = authority.server()
    port = await serve(tls)
    before = await asyncio.to_thread(shown_serial_number, port, authority.ca)
    assert before == serial_number(tls.certificate)
    authority.issue("server")
    after = await asyncio.to_thread(shown_serial_number, port, authority.ca)
    assert after == serial_number(tls.certificate) != before


async def test_a_pair_that_does_not_fit_leaves_the_old_one_with_a_warning_until_it_fits(authority, serve, caplog):
    tls = authority.server()
    port = await serve(tls)
    old = serial_number(tls.certificate)
    certificate, key = authority.issue("other")
    with caplog.at_level(logging.INFO):
        for half in (certificate.read_bytes(), certificate.read_bytes()[:300], b""):
            replace(tls.certificate, half)
            assert await asyncio.to_thread(shown_serial_number, port, authority.ca) == old
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
        assert str(tls.certificate) in caplog.records[0].error
        await asyncio.to_thread(shown_serial_number, port, authority.ca)
        assert len(caplog.records) == 3, "each change is told of once"
        replace(tls.certificate, certificate.read_bytes())
        replace(tls.key, key.read_bytes())
        assert await asyncio.to_thread(shown_serial_number, port, authority.ca) == serial_number(certificate)
        assert caplog.records[-1].getMessage() == "certificate replaced"


def test_a_pair_that_is_replaced_while_it_is_read_is_not_taken(authority, monkeypatch):
    def replaced(path):
        content = read(path)
        replace(path, content)
        return content

    server = authority.server()
    assert read_pair(server.certificate, server.key)
    monkeypatch.setattr("protos.tls.read", replaced)
    with pytest.raises(TlsError, match="is being written"):
        read_pair(server.certificate, server.key)


async def test_a_new_client_ca_counts_for_new_connections(authority, serve, tmp_path):
    tls, other = authority.server(client_ca=True), Authority(tmp_path)
    port = await serve(tls)
    stranger = ClientTls(authority.ca, *other.issue("bob", "bob"))
    replace(tls.client_ca, authority.ca.read_bytes() + other.ca.read_bytes())
    async with dial(f"localhost:{port}", stranger) as channel:
        assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING


async def test_a_stream_goes_on_over_a_rotation_and_new_connections_see_the_new_certificate(authority):
    tls, address = authority.server(), f"127.0.0.1:{free_port()}"
    files = {"tls_certificate": tls.certificate, "tls_key": tls.key}
    worker = FakeWorker()
    async with control_plane(worker, router={"listen": address, **files}, client_tls=authority.client()) as plane:
        worker.gate.clear()
        call = plane.generation.Generate(request("p", max_tokens=50))
        await plane.until(lambda state: state.num_running == 1)
        port = int(address.rpartition(":")[2])
        before = await asyncio.to_thread(shown_serial_number, port, authority.ca)
        authority.issue("server")
        assert await asyncio.to_thread(shown_serial_number, port, authority.ca) != before
        worker.gate.set()
        text = "".join([output.text async for response in call for output in response.outputs])
        assert len(text) == 50
        async with dial(address, authority.client()) as channel:
            answer = await GenerationServiceStub(channel).Complete(request("p", max_tokens=50))
            assert answer.outputs[0].text == text


async def test_the_inner_wires_carry_mutual_tls(authority, tmp_path):
    worker_tls = ServerTls(*authority.issue("worker"), authority.ca)
    scheduler, router = authority.issue("scheduler", "scheduler"), authority.issue("router", "router")
    inner = {
        "tls_certificate": scheduler[0],
        "tls_key": scheduler[1],
        "tls_client_ca": authority.ca,
        "worker_tls_ca": authority.ca,
        "worker_tls_certificate": scheduler[0],
        "worker_tls_key": scheduler[1],
    }
    outer = {
        "scheduler_tls_ca": authority.ca,
        "scheduler_tls_certificate": router[0],
        "scheduler_tls_key": router[1],
    }
    async with control_plane(worker_tls=worker_tls, router=outer, **inner) as plane:
        assert len(await plane.text(max_tokens=5)) == 5
        async with dial(plane.scheduler_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_of(channel)
        # the authority is replaced, which the router learns when it has to connect again
        new = Authority(tmp_path)
        replace(authority.ca, new.ca.read_bytes())
        for name in ("scheduler", "router"):
            new.issue(name, name)
        async with dial(plane.router_address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            await plane.cut_sessions()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
            await wait_for_serving(channel)
            assert len((await GenerationServiceStub(channel).Complete(request("p", max_tokens=5))).outputs[0].text) == 5


async def test_a_line_says_why_there_is_no_connection(authority, serve, tmp_path):
    port = await serve(authority.server())
    line = Line(f"localhost:{port}", Authority(tmp_path).client())
    assert "CERTIFICATE_VERIFY_FAILED" in await line.obstacle()
    await line.channel.close()


async def test_what_is_asked_over_a_line_goes_on_where_it_is_dialled_anew(authority, serve, tmp_path):
    port, tls = await serve(authority.server()), authority.client()
    line = Line(f"localhost:{port}", tls)
    watch = health_pb2_grpc.HealthStub(line.channel).Watch(health_pb2.HealthCheckRequest(service="liveness"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    replace(tls.ca, authority.ca.read_bytes() + Authority(tmp_path).ca.read_bytes())
    assert await line.renew()
    assert await health_of(line.channel) == health_pb2.HealthCheckResponse.SERVING
    assert not watch.done()
    watch.cancel()
    await line.channel.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tls-certificate", "{certificate}"], "--tls-certificate and --tls-key: give both, or neither"),
        (["--tls-certificate", "/missing.pem", "--tls-key", "{key}"], "--tls-certificate: cannot read /"),
        (
            ["--tls-certificate", "{certificate}", "--tls-key", "{other_key}"],
            "--tls-certificate, --tls-key: {certificate} and {other_key} are",
        ),
        (["--tls-certificate", "{key}", "--tls-key", "{key}"], "--tls-certificate, --tls-key: {key} and {key} are no"),
        (["--tls-client-ca", "{ca}"], "--tls-client-ca: needs --tls-certificate and --tls-key"),
        (["--tls-client-ca", "{key}"], "--tls-client-ca: {key} holds no CA certificate"),
        (["--scheduler-tls-certificate", "{certificate}"], "--scheduler-tls-certificate and --scheduler-tls-key: give"),
        (
            ["--scheduler-tls-certificate", "{certificate}", "--scheduler-tls-key", "{key}"],
            "--scheduler-tls-certificate: needs --scheduler-tls-ca",
        ),
        (["--tenant-from-certificate"], "--tenant-from-certificate: needs --tls-client-ca"),
        (["--auth-tokens", "/missing.toml"], "--auth-tokens: cannot read /missing.toml"),
        (["--auth-tokens", "{tokens}", "--tenant-header", "x-tenant"], "--auth-tokens and --tenant-header: each says"),
    ],
)
def test_files_that_can_not_be_used_end_the_process_and_the_option_is_named(
    arguments, words, authority, tmp_path, capsys
):
    certificate, key = authority.issue("server")
    tokens = tmp_path / "tokens.toml"
    tokens.write_text("")
    names = {"certificate": certificate, "key": key, "other_key": authority.issue("other")[1], "ca": authority.ca}
    names["tokens"] = tokens
    with pytest.raises(SystemExit) as info:
        RouterSettings.parse("router", ["--model", "m", *(argument.format(**names) for argument in arguments)])
    assert info.value.code == 2
    assert words.format(**names) in capsys.readouterr().err


def test_a_scheduler_names_the_options_of_its_wire_to_the_worker(authority, capsys):
    with pytest.raises(SystemExit):
        SchedulerSettings.parse("scheduler", ["--worker-tls-key", str(authority.issue("server")[1])])
    assert "--worker-tls-certificate and --worker-tls-key: give both" in capsys.readouterr().err


# Schedulers behind a name


async def test_schedulers_behind_a_name_show_certificates_for_that_name(authority, monkeypatch, caplog):
    port, hosts, known = free_port(), ["127.0.0.2"], socket.getaddrinfo

    def lookup(host: str, port: str, *rest: object, **options: object) -> list[tuple]:
        addresses = hosts if host == "localhost" else [host]
        return [row for address in addresses for row in known(address, port, *rest, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(router_schedulers, "_LOOKUP_INTERVAL_S", 0.02)
    # Of localhost, which the router is told, and 127.0.0.1, but not of the addresses that it dials.
    addresses = [f"127.0.0.{last}:{port}" for last in (2, 3)]
    servers = [await start_scheduler(FakeScheduler(), address, authority.server()) for address in addresses]
    for name, connects in (("localhost", True), ("", False), ("other.test", False)):
        line = Line(addresses[0], authority.client(), name)
        assert (await line.obstacle() == "") is connects
        await line.channel.close()
    async with router_alone(scheduler=f"dns:///localhost:{port}", scheduler_tls_ca=authority.ca) as plane:
        ca = authority.ca.read_bytes()
        replace(authority.ca, b"half a file")
        hosts.append("127.0.0.3")
        async with asyncio.timeout(10):
            while "a scheduler cannot be dialled yet" not in caplog.text:
                await asyncio.sleep(0.01)
        replace(authority.ca, ca)
        async with asyncio.timeout(10):
            while len((await plane.introspection.GetState(introspection_pb2.GetStateRequest())).schedulers) < 2:
                await asyncio.sleep(0.01)
    for server in servers:
        await server.stop(0)
