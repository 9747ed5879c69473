"""deploy/envoy.yaml in a real Envoy before real routers and a real scheduler: what a client behind a proxy sees."""

import asyncio
import http.client
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import pytest
from cluster import Cluster, cluster, free_port
from envoy_proxy import BINARY, Envoy, envoy, router_cluster, routes
from fakes import TEXT

from pagewire import Client
from pagewire.errors import DeadlineExceeded, Unavailable
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BINARY.exists(), reason="Envoy is not installed: no package of it for this machine"),
]
PROMPT = "p"
STEP_MS = 20
ROUTER = ("--drain-delay-s", "5")  # as in the containers


def said(num_tokens: int) -> str:
    """What the worker answers to PROMPT."""
    endless = TEXT * (num_tokens // len(TEXT) + 2)
    return endless[len(PROMPT) : len(PROMPT) + num_tokens]


def asked(max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=PROMPT, stop=pb.StopConditions(max_tokens=max_tokens))


@dataclass(frozen=True)
class Site:
    cluster: Cluster
    envoy: Envoy

    def http(self, method: str, path: str, body: object = None, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.envoy.port, timeout=30)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"content-type": "application/json"} | headers)
        return connection.getresponse()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Two routers behind Envoy; a step takes 20 ms."""
    with cluster(*ROUTER, num_routers=2, step_ms=STEP_MS) as running, envoy([*running.routers]) as proxy:
        proxy.wait_for_healthy(2)
        yield Site(running, proxy)


async def test_tokens_pass_one_by_one_while_later_ones_are_computed(site):
    async with grpc.aio.insecure_channel(site.envoy.target) as channel:
        call = GenerationServiceStub(channel).Generate(asked(max_tokens=100))
        messages = aiter(call)
        first = await anext(messages)
        assert (await asyncio.to_thread(site.cluster.state)).num_running == 1
        texts = [first.outputs[0].text, *[message.outputs[0].text async for message in messages]]
        assert "".join(texts) == said(100)
        assert len(texts) > 50


async def test_a_cancelled_call_is_gone_from_the_scheduler(site):
    async with grpc.aio.insecure_channel(site.envoy.target) as channel:
        call = GenerationServiceStub(channel).Generate(asked(max_tokens=5000))
        await call.read()
        call.cancel()
        while (state := await asyncio.to_thread(site.cluster.state)).num_running:
            await asyncio.sleep(0.01)
        assert state.block_pool.num_held == 0


async def test_a_deadline_passes_to_the_scheduler(site):
    async with grpc.aio.insecure_channel(site.envoy.target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await GenerationServiceStub(channel).Complete(asked(max_tokens=5000), timeout=0.3)
        assert info.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        while (state := await asyncio.to_thread(site.cluster.state)).num_running:
            await asyncio.sleep(0.01)
        assert state.block_pool.num_held == 0


async def test_a_stream_whose_deadline_passes_ends_with_that_and_is_not_broken_off(site):
    async def outlasted(deadline_s: float) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as info:
            async for _ in GenerationServiceStub(channel).Generate(asked(max_tokens=5000), timeout=deadline_s):
                pass
        return info.value.code()

    async with grpc.aio.insecure_channel(site.envoy.target) as channel:
        codes = await asyncio.gather(*[outlasted(0.5 + 0.01 * number) for number in range(30)])
        assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}


def test_a_deadline_over_http_is_a_header_and_an_error_like_others(site):
    endless = {"text": PROMPT, "stop": {"max_tokens": 5000}}
    answer = site.http("POST", "/v1/complete", endless, **{"grpc-timeout": "300m"})
    assert (answer.status, json.load(answer)["code"]) == (504, grpc.StatusCode.DEADLINE_EXCEEDED.value[0])


def test_a_router_describes_itself_through_the_proxy(site):
    command = [str(BINARY.with_name("grpcurl")), "-plaintext", site.envoy.target, "describe", "pagewire.v1.StopMatch"]
    described = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert "uint32 token_id = 2;" in described.stdout, described.stderr


async def test_error_details_pass(site):
    async with grpc.aio.insecure_channel(site.envoy.target) as channel:
        request = asked(max_tokens=1)
        request.sampling.top_p = 7
        with pytest.raises(grpc.aio.AioRpcError) as info:
            await GenerationServiceStub(channel).Complete(request)
        assert info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert b"INVALID_REQUEST" in dict(info.value.trailing_metadata())["grpc-status-details-bin"]


def test_json_over_http_is_answered_with_json(site):
    answer = site.http("POST", "/v1/complete", {"text": PROMPT, "stop": {"max_tokens": 5}})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    body = json.load(answer)
    assert body["outputs"][0]["text"] == said(5)
    assert body["outputs"][0]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert json.load(site.http("POST", "/v1/tokenize", {"text": "Hi"})) == {"token_ids": [72, 105]}
    assert json.load(site.http("POST", "/v1/detokenize", {"token_ids": [72, 105]})) == {"text": "Hi"}
    assert json.load(site.http("GET", "/v1/model"))["model"] == "instant"
    assert json.load(site.http("GET", "/v1/model?model=instant"))["model"] == "instant"
    assert json.load(site.http("GET", "/v1/state"))["state"]["serving"] is True
    assert site.http("GET", "/v1/requests/nobody").status == 404


def test_json_is_streamed_a_line_for_each_message(site):
    answer = site.http("POST", "/v1/generate", {"text": PROMPT, "stop": {"max_tokens": 100}})
    first = json.loads(answer.readline())
    assert site.cluster.state().num_running == 1, "the first line comes before the last token is computed"
    messages = [first, *[json.loads(line) for line in answer]]
    assert "".join(message["outputs"][0].get("text", "") for message in messages) == said(100)
    assert messages[-1]["usage"]["completion_tokens"] == 100


def test_who_hangs_up_on_http_cancels_the_request(site):
    answer = site.http("POST", "/v1/generate", {"text": PROMPT, "stop": {"max_tokens": 5000}})
    answer.readline()
    answer.close()
    while (state := site.cluster.state()).num_running:
        time.sleep(0.01)
    assert state.block_pool.num_held == 0


def test_errors_over_http_name_the_field(site):
    answer = site.http("POST", "/v1/complete", {"text": PROMPT, "sampling": {"top_p": 7}})
    assert answer.status == 400
    details = json.load(answer)["details"]
    assert any(row.get("reason") == "INVALID_REQUEST" for row in details)
    assert any(row.get("field_violations", [{}])[0].get("field") == "sampling.top_p" for row in details)


def test_json_bodies_pass_up_to_what_a_router_takes(site):
    answer = site.http("POST", "/v1/tokenize", {"text": "x" * (6 << 20)})
    assert answer.status == 400, "the router's own answer, and not Envoy's 413"
    assert "text" in json.load(answer)["message"]


async def test_what_one_router_refuses_is_asked_of_another_until_the_first_is_ejected(site):
    """One router has no scheduler; with health checks off, Envoy learns of it by its UNAVAILABLE alone."""

    def blind(config: dict) -> None:
        del router_cluster(config)["health_checks"]

    port = free_port()
    site.cluster.start_router(port, scheduler=f"127.0.0.1:{free_port()}")
    try:
        good = next(iter(site.cluster.routers))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
        with envoy([good, port], blind) as proxy:
            async with grpc.aio.insecure_channel(proxy.target) as channel:
                stub = GenerationServiceStub(channel)
                while proxy.stat("cluster.router.outlier_detection.ejections_active") == 0:
                    assert (await stub.Tokenize(pb.TokenizeRequest(text="Hi"))).token_ids == [72, 105]
                    assert (await stub.Complete(asked(2))).outputs[0].text == said(2)
                    texts = [message.outputs[0].text async for message in stub.Generate(asked(2))]
                    assert "".join(texts) == said(2)
            assert proxy.stat("cluster.router.upstream_rq_retry_success") > 0
    finally:
        site.cluster.routers.pop(port).stop()


async def test_a_full_circuit_breaker_answers_unavailable_at_once(site):
    def narrow(config: dict) -> None:
        router_cluster(config)["circuit_breakers"]["thresholds"][0]["max_requests"] = 2

    with envoy([*site.cluster.routers], narrow) as proxy:
        proxy.wait_for_healthy(2)
        async with grpc.aio.insecure_channel(proxy.target) as channel:
            stub = GenerationServiceStub(channel)
            calls = [stub.Generate(asked(max_tokens=5000)) for _ in range(2)]
            for call in calls:
                await call.read()
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await stub.Complete(asked(1))
            assert info.value.code() is grpc.StatusCode.UNAVAILABLE
            assert ("x-envoy-overloaded", "true") in [*info.value.initial_metadata(), *info.value.trailing_metadata()]
            for call in calls:
                call.cancel()


def test_our_client_asks_once_for_what_takes_longer_than_the_proxy_allows(site):
    def hurried(config: dict) -> None:
        for route in routes(config):
            route["route"]["timeout"] = "0.3s"

    with envoy([*site.cluster.routers], hurried) as proxy, Client(proxy.target) as client:
        proxy.wait_for_healthy(2)
        assert client.generate(PROMPT, max_tokens=2).text == said(2)
        with pytest.raises(Unavailable):
            client.generate(PROMPT, max_tokens=5000)
        assert proxy.stat("cluster.router.upstream_rq_timeout") == 1


def test_our_client_says_that_its_timeout_has_passed_also_where_a_proxy_is_the_first_to_know(site):
    def keeping_deadlines(config: dict) -> None:
        for route in routes(config):
            route["route"]["max_grpc_timeout"] = "0s"  # as Istio does

    def outlasted(place: int) -> None:
        with Client(proxy.target) as client:
            ask = client.generate if place % 2 else lambda *prompt, **options: list(client.stream(*prompt, **options))
            with pytest.raises(DeadlineExceeded):
                ask(PROMPT, max_tokens=5000, timeout=0.5 + 0.01 * place)

    with envoy([*site.cluster.routers], keeping_deadlines) as proxy, ThreadPoolExecutor(40) as threads:
        proxy.wait_for_healthy(2)
        list(threads.map(outlasted, range(40)))


async def test_a_rolling_restart_under_load_fails_no_call_even_without_retries(site):
    stop = asyncio.Event()

    def without_retries(config: dict) -> None:
        for route in routes(config):
            del route["route"]["retry_policy"]

    async def load(target: str) -> int:
        num_calls = 0
        async with grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = GenerationServiceStub(channel)
            while not stop.is_set():
                texts = [message.outputs[0].text async for message in stub.Generate(asked(15))]
                assert "".join(texts) == said(15)
                assert (await stub.Complete(asked(1))).outputs[0].text == said(1)
                num_calls += 2
        return num_calls

    with envoy([*site.cluster.routers], without_retries) as proxy:
        proxy.wait_for_healthy(2)
        clients = [asyncio.create_task(load(proxy.target)) for _ in range(8)]
        try:
            for port in [*site.cluster.routers]:
                await asyncio.to_thread(site.cluster.routers.pop(port).stop)
                site.cluster.start_router(port, *ROUTER)
                await asyncio.to_thread(site.cluster.wait_for_serving, port)
                await asyncio.to_thread(proxy.wait_for_healthy, 2)
        finally:
            stop.set()
            counts = await asyncio.gather(*clients)
    assert min(counts) > 10


async def test_while_the_worker_is_away_calls_wait_instead_of_failing():
    """All routers are NOT_SERVING then; Envoy goes on sending, and the scheduler keeps what comes."""
    with cluster(num_routers=2) as running, envoy([*running.routers]) as proxy:
        proxy.wait_for_healthy(2)
        worker = running.worker
        worker.process.send_signal(signal.SIGKILL)
        worker.process.wait()
        await asyncio.to_thread(proxy.wait_for_healthy, 0)
        async with grpc.aio.insecure_channel(proxy.target) as channel:
            waiting = asyncio.ensure_future(GenerationServiceStub(channel).Complete(asked(3)))
            while (await asyncio.to_thread(running.state)).num_waiting == 0:
                assert not waiting.done(), await waiting
                await asyncio.sleep(0.01)
            running.start_worker()
            assert (await waiting).outputs[0].text == said(3)
