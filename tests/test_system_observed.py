"""The three real processes, seen from outside: one trace through all of them, their metrics, their logs, channelz."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from deployment import Deployment, deployment, greedy
from fakes import VOCABULARY_SIZE, write_tokenizer
from otlp_fakes import collector
from test_metrics import fetch
from worker_fakes import tiny_checkpoint

from pagewire.launch import free_port

pytestmark = pytest.mark.slow
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACED = (("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01"),)
ROOT = "pagewire.v1.GenerationService/Complete"
SERVICES = ("router", "scheduler", "worker")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny random model of bytes."""
    directory = tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama", vocab_size=VOCABULARY_SIZE)
    write_tokenizer(directory)
    return directory


async def complete(running: Deployment, prompt: str, max_tokens: int, request_id: str) -> None:
    async with running.client() as stub:
        await stub.Complete(greedy(prompt, max_tokens, request_id=request_id), metadata=TRACED)


async def test_all_three_services_report_two_requests_that_compete_for_blocks(model, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    ports = {service: free_port() for service in SERVICES}
    async with collector() as received:
        options = {
            service: ("--metrics-listen", f"127.0.0.1:{port}", "--otlp-endpoint", received.endpoint)
            for service, port in ports.items()
        }
        options["worker"] += ("--block-size", "4", "--num-gpu-blocks", "20", "--num-threads", "1")
        options["scheduler"] += ("--watermark", "0", "--no-prefix-caching")
        async with deployment(model, **options) as running:
            both = asyncio.gather(*(complete(running, letter * 24, 48, letter) for letter in "ab"))
            with running.services["worker"].suspended():  # so that neither ends before the other begins
                await running.having(2)
            await both
            texts = {service: await asyncio.to_thread(fetch, port) for service, port in ports.items()}
            # Now, and not after the deployment's end, for which this test waits without running the collector's loop.
            twice = [ROOT, "tokenize", "queue", "prefill", "decode"]
            await received.until(lambda seen: all(len(seen.named(name)) == 2 for name in twice))
            await received.until(lambda seen: seen.named("preempted") and len(seen.named("execute")) == 3)
            log = running.services["router"].log.read_text()
    roots = {span.attributes["gen_ai.response.id"]: span for span in received.spans if span.name == ROOT}
    ours = [span for span in received.spans if not span.name.endswith("/GetState")]
    for span in ours:
        assert span.trace_id == TRACE_ID
        assert span.parent_id == "b7ad6b7169203331" or span.parent_id in {root.span_id for root in roots.values()}
    below = {
        request_id: sorted((span.service, span.name) for span in ours if span.parent_id == root.span_id)
        for request_id, root in roots.items()
    }
    whole = [
        ("pagewire-router", "tokenize"),
        *(("pagewire-scheduler", name) for name in ("decode", "prefill", "queue")),
        ("pagewire-worker", "execute"),
    ]
    preempted = [("pagewire-scheduler", "preempted"), ("pagewire-worker", "execute")]
    # The second request was preempted, and computed twice.
    assert sorted(below.values(), key=len) == [whole, sorted(whole + preempted)]
    execute = received.named("execute")[0]
    assert execute.attributes["pagewire.forward_ms"] > 0
    assert execute.attributes["pagewire.step_tokens"] >= 24
    name = model.name
    assert f'pagewire_num_preemptions_total{{model_name="{name}"}} 1.0' in texts["scheduler"]
    assert f'vllm:time_to_first_token_seconds_count{{model_name="{name}"}} 2.0' in texts["router"]
    assert (
        f'pagewire_worker_info{{device="cpu",dtype="float32",kv_dtype="float32",model_name="{name}"' in texts["worker"]
    )
    assert all("process_resident_memory_bytes" in text for text in texts.values())
    lines = [line for line in log.splitlines() if " request " in line]
    assert len(lines) == 2
    assert all(f"trace_id={TRACE_ID}" in line and "code=OK" in line for line in lines)


async def test_grpcurl_finds_channelz_and_reads_it(model):
    address = f"127.0.0.1:{free_port()}"
    async with deployment(model, listen=address, worker=("--num-gpu-blocks", "20", "--num-threads", "1")) as running:
        await complete(running, "hello", 3, "one")
        tool = Path(sys.executable).parent / "grpcurl"

        def grpcurl(*arguments: str) -> str:
            return subprocess.run(
                [tool, "-plaintext", address, *arguments], capture_output=True, text=True, check=True
            ).stdout

        assert "grpc.channelz.v1.Channelz" in (await asyncio.to_thread(grpcurl, "list")).split()
        answer = json.loads(await asyncio.to_thread(grpcurl, "grpc.channelz.v1.Channelz/GetServers"))
        (server,) = answer["server"]
        assert int(server["data"]["calls_succeeded"]) >= 1
        assert server["listen_socket"][0]["name"].endswith(address)
