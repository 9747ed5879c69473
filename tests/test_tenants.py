"""Who a client is, and what tenants do not share: against a real router, scheduler and sockets."""

import asyncio
import hashlib
import hmac
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from authority import Authority, replace
from fakes import TEXT, FakeWorker, control_plane, request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_fakes import finished, router_alone

from pagewire.access import Access, AccessError
from pagewire.client import AsyncClient
from pagewire.errors import from_rpc_error
from pagewire.launch import free_port
from protos import session_pb2
from protos.errors import Refusal
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1 import introspection_pb2
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.pagewire.v1.introspection_pb2_grpc import IntrospectionServiceStub
from protos.rpc import dial
from protos.xds.load_service_pb2 import OrcaLoadReportRequest
from protos.xds.load_service_pb2_grpc import OpenRcaServiceStub
from router import tenant_file
from router.config import RouterSettings
from router.tenant_file import TenantFileError, TokenFile
from router.tenants import ByCertificate

PROMPT = "sixteen tokens are four blocks"


def entry(name: str, token: str, **fields: object) -> str:
    """A tenant's part of a token file."""
    facts = "".join(f"{key} = {value}\n" for key, value in fields.items())
    return f'[{name}]\nsha256 = ["{hashlib.sha256(token.encode()).hexdigest()}"]\n{facts}'


def limits(name: str, **fields: object) -> str:
    """A tenant's part of a file without tokens."""
    return "\n".join([f"[{name}]", *(f"{key} = {value}" for key, value in fields.items()), ""])


def bearing(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(entry("acme", "a", max_requests=1, weight=2) + entry("zeta", "z", tokens_per_minute=600))
    return path


def guarded(tokens: Path, **options: object) -> dict[str, object]:
    """A router that wants tokens, with a port for operators."""
    return {"auth_tokens": tokens, "admin_listen": f"127.0.0.1:{free_port()}", **options}


async def refusal_of(awaitable) -> object:
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await awaitable
    return from_rpc_error(info.value)


async def test_without_a_known_token_nothing_but_health_is_answered(tokens):
    async with control_plane(router=guarded(tokens)) as plane:
        assert (await health_pb2_grpc.HealthStub(plane.channel).Check(health_pb2.HealthCheckRequest())).status == 1
        for metadata, reason in (
            ((), "TOKEN_MISSING"),
            ((("authorization", "Basic a"),), "TOKEN_MISSING"),
            ((*bearing("a"), *bearing("z")), "TOKEN_MISSING"),
            (bearing("b"), "TOKEN_UNKNOWN"),
            (bearing(""), "TOKEN_UNKNOWN"),
        ):
            error = await refusal_of(plane.generation.Complete(request(), metadata=metadata))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)
        for method in ("/grpc.channelz.v1.Channelz/GetServers", "/pagewire.v1.GenerationService/Nothing"):
            call = plane.channel.unary_unary(method)
            assert (await refusal_of(call(b""))).code is grpc.StatusCode.UNIMPLEMENTED, "there is none, for nobody"
        assert (await plane.generation.Complete(request(max_tokens=3), metadata=bearing("a"))).outputs[0].text
        reports = OpenRcaServiceStub(plane.channel).StreamCoreMetrics
        assert (await refusal_of(reports(OrcaLoadReportRequest()).read())).code is grpc.StatusCode.UNAUTHENTICATED
        await reports(OrcaLoadReportRequest(), metadata=bearing("a")).read()


async def test_tokens_are_compared_in_constant_time_with_all_that_are_known(tokens, monkeypatch):
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    known = TokenFile(tokens)
    assert known.find("a")[0] == "acme"
    assert known.find("unknown") is None
    assert len(compared) == 4
    assert all(len(digest) == 32 for pair in compared for digest in pair)


async def test_a_new_token_file_counts_at_once_and_a_broken_one_leaves_the_old(tokens, caplog):
    known = TokenFile(tokens)
    with caplog.at_level(logging.WARNING):
        empty, short = b"[acme]\nsha256 = []", b"[acme]\nsha256 = ['a']"
        for broken in (b"[acme", b"\xff", empty, short, entry('"a/b"', "x").encode()):
            replace(tokens, broken)
            assert known.find("a") is not None
        tokens.unlink()
        assert known.find("a") is not None
    assert len(caplog.records) == 6
    replace(tokens, entry("acme", "new").encode())
    assert known.find("new")[0] == "acme"
    assert known.find("a") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "x: Input should be a valid dictionary"),
        (entry("acme", "a", wieght=1), "acme.wieght: Extra inputs"),
        (entry("acme", "a", weight=0), "acme.weight: Input should be greater than 0"),
        (entry("acme", "a") + entry("zeta", "a"), "a hash stands there twice"),
    ],
)
def test_a_token_file_that_is_wrong_is_refused_naming_the_place(text, words, tokens):
    tokens.write_text(text)
    with pytest.raises(TenantFileError, match=words):
        tenant_file.read_tokens(tokens)


def test_a_file_for_tenants_without_tokens_has_no_hashes(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(entry("acme", "a"))
    with pytest.raises(TenantFileError, match=r"acme\.sha256: Extra inputs are not permitted"):
        tenant_file.read_tenants(path)
    path.write_text(limits("acme", weight=2))
    with pytest.raises(TenantFileError, match=r"acme\.sha256: Field required"):
        tenant_file.read_tokens(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "--tenants: needs --tenant-header or --tenant-from-certificate"),
        ({"auth_tokens": "tokens.toml"}, "--tenants and --auth-tokens: the token file has weights and limits too"),
    ],
)
def test_a_file_of_tenants_is_for_those_whom_no_token_file_names(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tokens.toml").write_text(entry("acme", "a"))
    Path("tenants.toml").write_text(limits("acme", weight=2))
    with pytest.raises(ValueError, match=words):
        RouterSettings(model="m", tenants="tenants.toml", **options)


def test_a_header_of_bytes_names_no_tenant():
    with pytest.raises(ValueError, match="--tenant-header: metadata whose name ends with -bin holds bytes"):
        RouterSettings(model="m", tenant_header="X-Tenant-Bin")


def test_the_command_line_makes_entries_that_the_router_reads(tmp_path):
    command = [sys.executable, "-m", "pagewire", "token", "new", "acme"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    path = tmp_path / "tokens.toml"
    path.write_text(run.stdout)
    token = run.stderr.split()[-1]
    assert token not in run.stdout
    assert TokenFile(path).find(token)[0] == "acme"


async def cached(plane, metadata, **fields) -> int:
    answer = await plane.generation.Complete(
        pb.GenerateRequest(text=PROMPT, stop=pb.StopConditions(max_tokens=2), **fields), metadata=metadata
    )
    return answer.usage.cached_prompt_tokens


async def test_tenants_do_not_find_each_others_prompts_in_the_cache(tokens):
    async with control_plane(router=guarded(tokens)) as plane:
        assert await cached(plane, bearing("a")) == 0
        assert await cached(plane, bearing("a")) > 0
        assert await cached(plane, bearing("z")) == 0
        assert await cached(plane, bearing("z"), cache_salt="acme/") == 0
        assert await cached(plane, bearing("a"), cache_salt="s") == 0
        assert await cached(plane, bearing("a"), cache_salt="s") > 0


async def test_tenants_share_the_cache_where_the_operator_says_so(tokens):
    async with control_plane(router=guarded(tokens, share_prefix_cache_across_tenants=True)) as plane:
        assert await cached(plane, bearing("a")) == 0
        assert await cached(plane, bearing("z")) > 0


async def test_a_header_of_a_trusted_proxy_names_the_tenant_and_no_name_passes_for_another(tokens):
    async with control_plane(router={"tenant_header": "X-Tenant"}) as plane:
        assert await cached(plane, (("x-tenant", "acme"),)) == 0
        assert await cached(plane, (("x-tenant", "acme"),)) > 0
        assert await cached(plane, ()) == 0
        assert await cached(plane, (), cache_salt="acme/") == 0
        error = await refusal_of(plane.generation.Complete(request(), metadata=(("x-tenant", "a/b"),)))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TENANT_MALFORMED")


async def test_a_file_gives_tenants_that_a_header_names_their_limits_and_is_read_again(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(limits("acme", max_requests=2))
    async with control_plane(router={"tenant_header": "x-tenant", "tenants": path, "tenant_max_requests": 7}) as plane:

        async def max_requests(*metadata: tuple[str, str]) -> int:
            return (await plane.generation.GetModel(pb.GetModelRequest(), metadata=metadata)).max_requests

        assert await max_requests(("x-tenant", "acme")) == 2
        assert await max_requests(("x-tenant", "zeta")) == 7, "who is not in the file has the defaults"
        assert await max_requests() == 7
        replace(path, limits("zeta", max_requests=1).encode())
        assert (await max_requests(("x-tenant", "acme")), await max_requests(("x-tenant", "zeta"))) == (7, 1)


async def test_a_verified_certificate_names_the_tenant(tmp_path):
    authority = Authority(tmp_path)
    tls, acme, zeta = authority.server(client_ca=True), authority.client("acme"), authority.client("zeta")
    files = {"tls_certificate": tls.certificate, "tls_key": tls.key, "tls_client_ca": tls.client_ca}
    (tmp_path / "tenants.toml").write_text(limits("acme", tokens_per_minute=1000))
    options = {"tenant_from_certificate": True, "tenants": tmp_path / "tenants.toml", "tenant_max_requests": 3, **files}
    async with control_plane(router=options, client_tls=acme) as plane:
        assert await cached(plane, ()) == 0
        assert await cached(plane, ()) > 0
        model = await plane.generation.GetModel(pb.GetModelRequest())
        assert (model.max_requests, model.tokens_per_minute) == (3, 1000)
        async with dial(plane.router_address, zeta) as channel:
            answer = await GenerationServiceStub(channel).Complete(request(PROMPT, max_tokens=2))
            assert answer.usage.cached_prompt_tokens == 0


@pytest.mark.parametrize("names", [[], [b""], [b"a/b"], [b"\xff"], [b"acme", b"zeta"]])
def test_a_certificate_without_one_name_that_a_tenant_may_have_names_nobody(names):
    tenants = ByCertificate(RouterSettings(model="fake"))
    with pytest.raises(Refusal, match="the certificate's common name must be 1 to 64 letters") as info:
        tenants.of(Shown(names))
    assert (info.value.code, info.value.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TENANT_MALFORMED")
    assert tenants.of(Shown([b"acme"])).name == "acme"


@dataclass
class Shown:
    """Stands for a call's context: the common names in the client's certificate."""

    names: list[bytes]

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_common_name": self.names} if self.names else {}


async def live(plane, name: str, metadata) -> asyncio.Task:
    """A request that the scheduler holds."""
    before = (await plane.state()).num_running
    call = plane.generation.Complete(pb.GenerateRequest(text="p", request_id=name), metadata=metadata)
    task = asyncio.ensure_future(_awaited(call))
    await plane.until(lambda state: state.num_running > before)
    return task


async def _awaited(call):
    return await call


async def test_a_tenant_is_told_of_its_own_requests_only_and_ids_of_two_do_not_meet(tokens):
    worker = FakeWorker()
    async with control_plane(worker, router={"auth_tokens": tokens, "tenant_max_requests": 3}) as plane:
        explain = IntrospectionServiceStub(plane.channel).ExplainRequest
        plane.introspection = Introspection(plane.introspection, bearing("a"))
        worker.gate.clear()
        mine = await live(plane, "mine", bearing("a"))
        asked = introspection_pb2.ExplainRequestRequest(request_id="mine")
        assert (await explain(asked, metadata=bearing("a"))).num_running_seqs == 1
        assert (await refusal_of(explain(asked, metadata=bearing("z")))).code is grpc.StatusCode.NOT_FOUND
        as_scheduler = introspection_pb2.ExplainRequestRequest(request_id="acme/mine")
        assert (await refusal_of(explain(as_scheduler, metadata=bearing("z")))).code is grpc.StatusCode.NOT_FOUND
        theirs = asyncio.ensure_future(
            _awaited(plane.generation.Complete(pb.GenerateRequest(text="p", request_id="mine"), metadata=bearing("z")))
        )
        worker.gate.set()
        assert (await mine).request_id == (await theirs).request_id == "mine"


async def test_a_tenant_is_told_which_of_its_own_requests_took_its_blocks_and_no_other_tenants_id(tokens):
    async with router_alone(auth_tokens=tokens) as plane:
        asked = introspection_pb2.ExplainRequestRequest(request_id="mine")
        for by, told in (("acme/other", "other"), ("zeta/secret", "another tenant's request"), ("", "")):
            plane.scheduler.explanations["acme/mine"] = session_pb2.ExplainResponse(preempted_by=by)
            answer = await plane.introspection.ExplainRequest(asked, metadata=bearing("a"))
            assert answer.preempted_by == told


class Introspection:
    """An introspection stub that bears a token."""

    def __init__(self, stub: IntrospectionServiceStub, metadata) -> None:
        self._stub = stub
        self._metadata = metadata

    def GetState(self, request):
        return self._stub.GetState(request, metadata=self._metadata)


async def test_operators_see_all_requests_on_their_port_and_clients_no_introspection_on_theirs(tokens):
    worker = FakeWorker()
    async with control_plane(worker, router=guarded(tokens)) as plane:
        worker.gate.clear()
        mine = await live(plane, "mine", bearing("a"))
        asked = introspection_pb2.ExplainRequestRequest(request_id="acme/mine")
        assert (await plane.introspection.ExplainRequest(asked)).num_running_seqs == 1
        for method in (
            "/pagewire.v1.IntrospectionService/GetState",
            "/grpc.channelz.v1.Channelz/GetServers",
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ):
            error = await refusal_of(plane.channel.unary_unary(method)(b"", metadata=bearing("a")))
            assert error.code is grpc.StatusCode.UNIMPLEMENTED
        worker.gate.set()
        await mine


async def test_limits_of_a_tenant_are_told_and_kept_with_a_delay_for_the_retry(tokens):
    worker = FakeWorker()
    async with control_plane(worker, router=guarded(tokens)) as plane:
        model = await plane.generation.GetModel(pb.GetModelRequest(), metadata=bearing("z"))
        assert (model.max_requests, model.tokens_per_minute) == (0, 600)
        worker.gate.clear()
        mine = await live(plane, "", bearing("a"))
        error = await refusal_of(plane.generation.Complete(request(), metadata=bearing("a")))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_REQUESTS_EXHAUSTED")
        assert error.retry_after_s > 0
        worker.gate.set()
        await mine
        for _ in range(4):
            await plane.generation.Complete(request("p" * 30, max_tokens=120), metadata=bearing("z"))
        error = await refusal_of(plane.generation.Complete(request("p" * 30), metadata=bearing("z")))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_TOKENS_EXHAUSTED")
        assert 0 < error.retry_after_s <= 3  # 600 are used and 30 wanted, at ten a second


@pytest.mark.parametrize(
    ("setting", "value", "fields", "field"),
    [
        ("max_prompt_tokens", 3, {"text": "four"}, "text"),
        ("max_output_tokens", 5, {"stop": pb.StopConditions(max_tokens=6)}, "stop.max_tokens"),
        ("max_n", 2, {"sampling": pb.SamplingParams(n=3)}, "sampling.n"),
        ("max_beam_width", 2, {"sampling": pb.SamplingParams(beam_width=3)}, "sampling.beam_width"),
    ],
)
async def test_limits_of_requests_are_told_and_name_the_field(setting, value, fields, field):
    async with control_plane(router={setting: value}) as plane:
        assert getattr(await plane.generation.GetModel(pb.GetModelRequest()), setting) == value
        error = await refusal_of(plane.generation.Complete(pb.GenerateRequest(**({"text": "one"} | fields))))
        assert (error.code, error.violations[0].field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert str(value) in error.violations[0].description


async def test_an_output_without_a_wish_is_as_long_as_the_operator_allows():
    async with control_plane(router={"max_output_tokens": 5}) as plane:
        assert len(await plane.text()) == 5


async def test_a_message_over_the_limit_is_refused_before_it_is_read():
    async with control_plane(router={"max_message_bytes": 10_000}) as plane:
        assert (await plane.generation.GetModel(pb.GetModelRequest())).max_message_bytes == 10_000
        error = await refusal_of(plane.generation.Complete(request("p" * 20_000)))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "10000" in str(error)


async def test_grpcurl_gets_through_with_the_ca_and_a_token(tokens, tmp_path):
    authority, address = Authority(tmp_path), f"127.0.0.1:{free_port()}"
    tls = authority.server()
    options = {"listen": address, "auth_tokens": tokens, "tls_certificate": tls.certificate, "tls_key": tls.key}
    tool = Path(sys.executable).parent / "grpcurl"

    def grpcurl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [tool, "-cacert", str(authority.ca), *arguments, address, "pagewire.v1.GenerationService/GetModel"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    async with control_plane(router=options, client_tls=authority.client()) as plane:
        answer = await asyncio.to_thread(grpcurl, "-H", "authorization: Bearer a")
        assert '"model": "fake"' in answer.stdout, answer.stderr
        assert "Unauthenticated" in (await asyncio.to_thread(grpcurl)).stderr
        plane.introspection = Introspection(plane.introspection, bearing("a"))


async def test_our_own_client_and_command_line_get_in_with_tls_and_a_token(tokens, tmp_path):
    authority, address = Authority(tmp_path), f"127.0.0.1:{free_port()}"
    tls, alice = authority.server(client_ca=True), authority.client("alice")
    files = {"tls_certificate": tls.certificate, "tls_key": tls.key, "tls_client_ca": tls.client_ca}
    worker = FakeWorker()
    options = {"listen": address, "auth_tokens": tokens, **files}
    arguments = ["--ca", str(authority.ca), "--certificate", str(alice.certificate), "--key", str(alice.key)]

    def pagewire(*arguments: str, token: str = "a") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pagewire", *arguments, "--target", address]
        environment = os.environ | {"PAGEWIRE_CLIENT_TOKEN": token}
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environment)

    async with control_plane(worker, router=options, client_tls=alice) as plane:
        plane.introspection = Introspection(plane.introspection, bearing("a"))
        access = Access(ca=authority.ca, certificate=alice.certificate, key=alice.key, token="a")
        async with AsyncClient(address, access) as client:
            assert (await client.generate("p", max_tokens=3)).text == "The"
        generated = await asyncio.to_thread(pagewire, *arguments, "generate", "p", "--max-tokens", "3")
        assert generated.stdout.strip() == "The", generated.stderr
        shown = await asyncio.to_thread(pagewire, *arguments, "top", "--once")
        assert "running=0" in shown.stdout, shown.stderr
        refused = await asyncio.to_thread(lambda: pagewire(*arguments, "generate", "p", token="b"))
        assert "this token is not known" in refused.stderr
        unknown = (await asyncio.to_thread(pagewire, *arguments[:2], "generate", "p")).stderr
        assert "not let in by TLS; leave it out, or look at --ca, --certificate and --key" in unknown
        assert "no server answers" in (await asyncio.to_thread(pagewire, "generate", "p")).stderr


def test_files_of_a_client_that_can_not_be_used_are_named(tmp_path):
    with pytest.raises(AccessError, match=r"cannot read /missing\.pem"):
        AsyncClient("localhost:1", Access(ca="/missing.pem"))
    with pytest.raises(AccessError, match="--certificate and --key: give both"):
        AsyncClient("localhost:1", Access(certificate="a.pem"))


def test_a_token_comes_without_the_line_end_of_its_file_and_one_that_no_header_can_carry_is_named():
    assert Access(token=" pw-x\n").metadata == (("authorization", "Bearer pw-x"),)
    assert Access(token="\n").metadata == ()
    for token in ("pw-\u00e9", "pw-\nx"):
        with pytest.raises(AccessError, match="--token: must be of printable ASCII characters only"):
            _ = Access(token=token).metadata


async def test_the_scheduler_is_told_who_the_tenant_is_and_what_its_share_is(tokens):
    async with router_alone(auth_tokens=tokens) as plane:
        call = plane.generation.Complete(pb.GenerateRequest(text="p", request_id="r"), metadata=bearing("a"))
        submit = await plane.scheduler.submitted()
        assert (submit.tenant, submit.tenant_weight) == ("acme", 2.0)
        assert (submit.request_id, submit.cache_salt) == ("acme/r", "acme/")
        call.cancel()


async def test_the_scheduler_is_told_the_share_of_a_tenant_that_a_header_names(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(limits("acme", weight=3))
    async with router_alone(tenant_header="x-tenant", tenants=path) as plane:
        call = plane.generation.Complete(request(), metadata=(("x-tenant", "acme"),))
        submit = await plane.scheduler.submitted()
        assert (submit.tenant, submit.tenant_weight) == ("acme", 3.0)
        call.cancel()


async def test_a_live_request_that_other_calls_take_over_costs_its_tenant_as_much_as_one_call(tokens):
    worker = FakeWorker()
    async with control_plane(worker, router=guarded(tokens)) as plane:
        asked = request("p" * 190, max_tokens=9)
        asked.request_id, asked.sampling.seed = "r", 7
        worker.gate.clear()
        calls = [plane.generation.Generate(asked, metadata=bearing("z"))]
        await plane.until(lambda state: state.num_running == 1)
        asked.resume.seed = 7
        for _ in range(3):  # of 600 tokens a minute each would take 199
            calls.append(plane.generation.Generate(asked, metadata=bearing("z")))
            assert (await refusal_of(calls[-2].read())).reason == "TAKEN_OVER"
        worker.gate.set()
        assert "".join([message.outputs[0].text async for message in calls[-1]]) == TEXT[:9]
        for _ in range(2):
            await plane.generation.Complete(request("p" * 190, max_tokens=1), metadata=bearing("z"))


async def test_output_that_is_told_to_several_calls_costs_its_tenant_as_much_as_one_call():
    """Also where a call that took it over had not been told of it again before the next one did."""
    async with router_alone(tenant_tokens_per_minute=200) as plane:
        asked = pb.GenerateRequest(text="p" * 10, request_id="r", stop=pb.StopConditions(max_tokens=150))
        asked.sampling.seed = 7
        first = plane.generation.Generate(asked)
        handle = (await plane.scheduler.submitted()).handle
        await plane.scheduler.tell({0: b"a" * 100}, handle=handle)
        assert len((await first.read()).outputs[0].text) == 100
        asked.resume.seed = 7
        calls = [first]
        for _ in range(2):
            calls.append(plane.generation.Generate(asked))
            assert (await refusal_of(calls[-2].read())).reason == "TAKEN_OVER"
            while not (message := await plane.scheduler.heard.get()).HasField("submit"):
                pass
        handle = message.submit.handle
        await plane.scheduler.tell({0: b"a" * 120}, finished(handle=handle), handle=handle)
        assert "".join([message.outputs[0].text async for message in calls[-1]]) == "a" * 120
        call = plane.generation.Complete(request("p" * 50))
        while not (await plane.scheduler.heard.get()).HasField("submit"):
            pass
        call.cancel()


async def test_another_prompt_under_the_id_of_a_live_request_costs_its_tenant_as_much_as_any(tokens):
    worker = FakeWorker()
    async with control_plane(worker, router=guarded(tokens)) as plane:
        worker.gate.clear()
        asked = request("p" * 190, max_tokens=9)
        asked.request_id, asked.sampling.seed = "r", 7
        calls = [plane.generation.Generate(asked, metadata=bearing("z"))]
        await plane.until(lambda state: state.num_running == 1)
        asked.resume.seed = 7
        for other in "qrs":
            asked.text = other * 190
            calls.append(plane.generation.Generate(asked, metadata=bearing("z")))
            if other != "s":
                assert (await refusal_of(calls[-2].read())).reason == "TAKEN_OVER"
        assert (await refusal_of(calls[-1].read())).reason == "TENANT_TOKENS_EXHAUSTED", "4 x 190 of 600 a minute"
        worker.gate.set()


async def test_a_request_that_no_scheduler_computed_costs_its_tenant_nothing(tokens):
    async with router_alone(auth_tokens=tokens) as plane:
        for handle in range(1, 5):  # of 600 tokens a minute each would take 190
            call = plane.generation.Complete(request("p" * 190), metadata=bearing("z"))
            assert (await plane.scheduler.submitted()).handle == handle
            await plane.scheduler.reject(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", handle)
            assert "the queue is full" in str(await refusal_of(call))
            assert (await plane.scheduler.heard.get()).HasField("cancel")
        last = plane.generation.Complete(request("p" * 190), metadata=bearing("z"))
        await plane.scheduler.submitted()
        last.cancel()
